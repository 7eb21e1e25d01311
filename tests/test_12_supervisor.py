"""The supervisor: who may run, what signals do, and that the lock outlives everything of a run."""

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import apsw
import pytest
from conftest import LAUNCH, ROOT, Project, wait_for
from test_11_worker import (
    CONFIG,
    JOB,
    RELEASED,
    at,
    done,
    finish_after,
    let_go,
    records,
    rows,
    run_row,
    start_held,
    worker_of,
    write_job,
)

BLOCK = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
DEAF = f"(signal := __import__('signal'), {BLOCK}, hold('go'))"  # as a job that hangs in C


def launch_with(line: str) -> tuple[str, ...]:
    """Return how batchrun is started with a line executed before its command line."""
    text = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import batchrun, os; {line};"
    return (*LAUNCH[:-1], f"{text} batchrun.main()")


def is_locked(project: Project) -> bool:
    """Tell whether anybody holds the job's lock."""
    with (project.state / "locks" / "sync.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def error_output(project: Project, process: subprocess.Popen[str]) -> str:
    """Return what a process has written to stderr so far."""
    return project.output(process, 0).err


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def refusals(project: Project) -> int:
    """Return how many starts were refused as busy."""
    return int(rows(project, "SELECT count(*) FROM event WHERE what = 'refused: busy'")[0][0])


# --- signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_the_first_stop_ends_the_run_at_its_next_safe_point(
    project: Project, number: signal.Signals, code: int
) -> None:
    heard = "[time.sleep(0.005) for _ in iter(lambda: ctx.should_stop, True)]"
    write_job(project, f"hold('go'); {heard}")
    process = start_held(project)
    process.send_signal(number)
    let_go(project)
    ended = project.finish(process)
    assert (ended.code, ended.out, ended.err) == (code, "", "")
    assert run_row(project) == ("paused", "stop", 2)
    assert done(project)[-3:] == RELEASED
    finish_after(project, 0)


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "TERM"), (signal.SIGHUP, "HUP")],
)
def test_the_first_stop_is_answered_once_with_what_it_waits_for(
    project: Project, number: signal.Signals, name: str
) -> None:
    write_job(project, "hold('go')")
    project.start("-v", "run", "sync")
    wait_for((project.folder / "go.reached").exists, "the job to reach record 8")
    process = project.started[-1]
    process.send_signal(number)
    said = f"stopping after this batch; {name} again interrupts it\n"
    wait_for(lambda: said in error_output(project, process), "the answer")
    let_go(project)
    assert project.finish(process).err.count("stopping") == 1


def test_three_sigterms_within_half_a_second_are_one_stop(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    status = Path(f"/proc/{process.pid}/status")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), "it to be taken up")
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 2)


def test_a_stop_is_seen_behind_a_timer_that_is_still_pending() -> None:
    line = (
        "stops = batchrun.StopCounter(batchrun.Host()); stops.begin();"
        "[os.kill(os.getpid(), number) for number in (17, 14, 15)];"
        "stops.look(); os._exit(stops.count)"
    )
    assert subprocess.run(launch_with(line), check=False).returncode == 1


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project, launch=("nohup", *LAUNCH))
    os.kill(process.pid, signal.SIGHUP)
    let_go(project)
    assert project.finish(process).code == 0


def stop_until_ended(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Go on asking, as an impatient person does."""

    def ask() -> bool:
        process.send_signal(number)
        time.sleep(0.05)
        return process.poll() is not None

    wait_for(ask, "the end")


def test_the_second_stop_gives_the_batch_up(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    stop_until_ended(process, signal.SIGINT)
    assert project.finish(process).code == 130
    assert run_row(project) == ("paused", "stop", 1)
    assert done(project) == [*map(str, range(1, 8)), *RELEASED]


def test_the_third_stop_is_out_and_the_run_can_be_resumed(project: Project) -> None:
    write_job(project, DEAF)
    process = start_held(project)
    stop_until_ended(process, signal.SIGINT)
    ended = project.finish(process)
    assert ended.code == 130
    assert "The worker did not stop when it was asked to, and was killed." in ended.err
    assert run_row(project) == ("interrupted", "", 1)
    assert not is_locked(project)
    write_job(project)
    finish_after(project, 0)


def test_a_job_that_hangs_is_killed_when_the_grace_is_over(project: Project) -> None:
    write_job(project, DEAF)
    project.write(CONFIG.replace("30s", "300ms"))
    process = start_held(project)
    process.send_signal(signal.SIGTERM)
    ended = project.finish(process, limit_s=10)
    assert ended.code == 75
    assert "The worker did not stop when it was asked to, and was killed." in ended.err


def test_a_stop_before_the_first_batch_begins_none(project: Project) -> None:
    hold = "    while not ctx.should_stop: time.sleep(0.005)\n    done('asked'); hold('go')\n"
    text = JOB.replace("    for batch", f"    Path('go.reached').touch()\n{hold}    for batch")
    project.write(CONFIG, sync=text.replace("BEFORE_8", "pass").replace("AFTER", "pass"))
    process = project.start("-v", "run", "sync")
    wait_for((project.folder / "go.reached").exists, "the job")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "asked" in done(project), "the worker to be asked")
    let_go(project)
    ended = project.finish(process)
    assert ended.code == 75
    assert "stopping before the next batch; TERM again stops at once\n" in ended.err
    assert run_row(project) == ("paused", "stop", 0)
    assert done(project) == ["asked", *RELEASED]
    write_job(project)
    finish_after(project, 0)


def test_a_stop_during_the_admission_ends_at_the_first_gate(project: Project) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at("admit.judged=stop"))
    wait_for(lambda: is_stopped(process.pid), "the admission")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert project.finish(process).code == 75
    assert run_row(project)[:2] == ("paused", "stop")
    finish_after(project, 0)


# --- two processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGKILL", "sys.exit(7)", "1 / 0"])
def test_the_lock_outlives_the_supervisor_until_its_worker_is_gone(
    project: Project, how: str
) -> None:
    write_job(project, "hold('go')")
    line = f"batchrun.Console.progress = lambda *_: os.path.exists('go.reached') and {how}"
    launch = LAUNCH if how == "SIGKILL" else launch_with(line)
    process = start_held(project, launch=launch)
    worker = worker_of(process) if how == "SIGKILL" else 0
    if how == "SIGKILL":
        process.kill()
    ended = project.finish(process)
    assert ended.code == (-9 if how == "SIGKILL" else 1)
    assert ("ZeroDivisionError" in ended.err) == (how == "1 / 0")
    assert is_locked(project)
    following = project.start("-v", "run", "sync")
    said = f"waiting for pid {worker or ''}"
    wait_for(lambda: said in error_output(project, following), "the new run to say so")
    assert len(records(project)) == 7
    let_go(project)
    ended = project.finish(following)
    assert ended.code == 0, ended.err
    assert "goes on after commit 2, 10 records read" in ended.err
    assert records(project) == list(range(1, 11))
    assert done(project).count("released 1") == 2


def test_a_stop_while_waiting_for_an_orphan_starts_nothing(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    process.kill()
    following = project.start("-v", "run", "sync")
    wait_for(lambda: "waiting for pid" in error_output(project, following), "the wait")
    following.send_signal(signal.SIGTERM)
    ended = project.finish(following)
    assert ended.code == 75
    assert ended.err.endswith("stopped while waiting; nothing was started\n")
    assert rows(project, "SELECT count(*) FROM attempt") == [(1,)]


def test_an_orphan_that_does_not_end_within_the_grace_is_not_waited_for(project: Project) -> None:
    write_job(project, DEAF)
    project.write(CONFIG.replace("30s", "300ms"))
    process = start_held(project)
    worker = worker_of(process)
    process.kill()
    process.wait()
    ended = project.run("run", "sync", limit_s=20)
    assert (ended.code, f"pid {worker} " in ended.err) == (11, True)
    assert rows(project, "SELECT count(*) FROM attempt") == [(1,)]


FORKS = """\
[os.write(1, b'')]
            if record == 8 and os.fork() == 0:
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.setsid()
                if os.fork():
                    os._exit(0)
                Path("child.pid").write_text(str(os.getpid()))
                while True:
                    with open("late.txt", "a") as file:
                        file.write("late\\n")
                    time.sleep(0.005)
            if record == 8:
                while not Path("late.txt").exists(): time.sleep(0.005)
                os.kill(os.getpid(), 9)
"""


def test_children_of_a_dead_worker_are_gone_before_the_lock_is_free(project: Project) -> None:
    write_job(project, FORKS)
    ended = project.run("run", "sync")
    assert ended.code == 1, ended.err
    child = int((project.folder / "child.pid").read_text())
    assert not Path(f"/proc/{child}").exists()
    assert not is_locked(project)


def test_children_that_were_there_before_are_left_alone(project: Project) -> None:
    write_job(project)
    script = 'sleep 600 & echo $! > sleep.pid; exec "$@" run sync'
    process = project.start(launch=("/bin/bash", "-c", script, "-", *LAUNCH))
    assert project.finish(process).code == 0
    pid = int((project.folder / "sleep.pid").read_text())
    assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def test_the_supervisor_stays_small(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    status = Path(f"/proc/{process.pid}/status").read_text()
    (rss_kb,) = [int(line.split()[1]) for line in status.splitlines() if line[:5] == "VmRSS"]
    assert rss_kb < 40_000
    let_go(project)
    assert project.finish(process).code == 0


# --- a worker that cannot be started ------------------------------------------------------------


def test_a_worker_that_cannot_be_started_leaves_the_run_interrupted(project: Project) -> None:
    write_job(project)
    ended = project.run("run", "sync", launch=launch_with("sys.executable = '/nowhere/python'"))
    (run,) = rows(project, "SELECT id FROM run")[0]
    assert ended.code == 1
    assert ended.err == (
        f"sync: run {run} interrupted.\n"
        "The worker's process cannot be started: No such file or directory.\n"
        "Nothing was done.\n"
        f"The log: {project.state}/logs/sync/{run}.log\n"
        f"To go on: batchrun resume {run}\n"
    )
    assert not is_locked(project)
    finish_after(project, 0)


@pytest.mark.parametrize(
    ("words", "line"),
    [("run sync", "sys.executable = '/nowhere/python'"), ("run sync --in-process", "pass")],
)
def test_an_attempt_without_a_worker_process_leaves_no_file_for_last_words(
    project: Project, words: str, line: str
) -> None:
    write_job(project)
    settled = at("attempt.settled=stop")
    process = project.start(*words.split(), env=settled, launch=launch_with(line))
    wait_for(lambda: is_stopped(process.pid), "the end of the attempt")
    held = [str(file.readlink()) for file in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert [name for name in held if "last words" in name] == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_run_goes_on_without_a_log_that_is_no_plain_file(project: Project, kind: str) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    (log,) = (project.state / "logs" / "sync").glob("*.log")
    log.unlink()
    victim = project.write_file("victim.txt", "mine\n")
    if kind == "link":
        log.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        log.mkdir()
    ended = project.run("-v", "run", "sync", limit_s=30)
    assert ended.code == 0
    assert f"warning: The log {log} cannot be written: " in ended.err
    assert (
        f"batchrun: warning: The log {log} cannot be written: " in project.run("logs", "sync").out
    )
    assert victim.read_text() == "mine\n"


# --- who may run --------------------------------------------------------------------------------


def test_of_five_starts_at_once_one_runs_and_four_are_refused_with_a_row_each(
    project: Project,
) -> None:
    write_job(project, "hold('go')")
    began = time.monotonic()
    processes = [project.start("run", "sync") for _ in range(5)]
    wait_for(lambda: sum(process.poll() is None for process in processes) == 1, "four refusals")
    assert time.monotonic() - began < 10
    let_go(project)
    ends = [project.finish(process) for process in processes]
    assert sorted(end.code for end in ends) == [0, 11, 11, 11, 11]
    assert refusals(project) == 4
    refused = next(end.err for end in ends if end.code == 11)
    assert refused.startswith("sync is busy: ")
    assert refused.endswith("is recorded.\nSee `batchrun status sync`.\n")
    assert rows(project, "SELECT count(*) FROM attempt") == [(1,)]


def test_a_ledger_whose_maker_was_killed_is_made_by_the_next_start(project: Project) -> None:
    write_job(project)
    assert project.run("run", "sync", env=at("ledger.made=kill")).code == -9
    assert project.run("run", "sync").code == 0
    assert [path.name for path in project.state.glob("ledger.db*")] == ["ledger.db"]


def test_of_two_starts_at_once_one_runs_every_time(project: Project) -> None:
    write_job(project, "hold('go')")
    for times in range(1, 11):
        (project.folder / "go").unlink(missing_ok=True)
        processes = [project.start("run", "sync") for _ in range(2)]
        wait_for(lambda: any(process.poll() == 11 for process in processes), "a refusal")  # noqa: B023
        let_go(project)
        assert sorted(project.finish(process).code for process in processes) == [0, 11]
        assert refusals(project) == times
    assert rows(project, "SELECT count(*) FROM attempt") == [(10,)]
    assert records(project) == list(range(1, 11)) * 10


def test_of_a_herd_after_kill_9_one_goes_on(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("commit.prepared@2=kill-both"))
    write_job(project, "hold('go')")
    herd = [project.start("run", "sync") for _ in range(20)]
    wait_for(lambda: sum(process.poll() is None for process in herd) == 1, "19 refusals")
    let_go(project)
    assert sorted(project.finish(process).code for process in herd) == [0] + [11] * 19
    assert rows(project, "SELECT max(generation), count(*) FROM attempt") == [(2, 2)]
    assert sorted(set(records(project))) == list(range(1, 11))


def test_a_stopped_owner_is_named_as_stopped(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    for pid in (process.pid, worker_of(process)):
        os.kill(pid, signal.SIGSTOP)
    ended = project.run("run", "sync")
    assert ended.code == 11
    assert f"pid {process.pid} (for " in ended.err
    assert "s, stopped)" in ended.err
    for pid in (process.pid, worker_of(process)):
        os.kill(pid, signal.SIGCONT)
    let_go(project)
    assert project.finish(process).code == 0


def test_a_lock_and_a_row_that_nobody_owns_hold_nobody_up(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("commit.prepared@2=kill-both"))
    connection = apsw.Connection(str(project.state / "ledger.db"))
    ((owner,),) = connection.execute("SELECT supervisor FROM attempt")
    of_another_boot = json.dumps({**json.loads(owner), "pid": 1, "boot_id": "another"})
    connection.execute("UPDATE attempt SET supervisor = ?, worker = ?", [of_another_boot] * 2)
    connection.close()
    status = project.run("status", "sync")
    assert "interrupted" in status.out
    assert "batchrun resume" in status.out
    for point in ("admit.commit=kill", "admit.committed=kill"):
        project.run("run", "sync", env=at(point))
        assert "interrupted" in project.run("status", "sync").out
    finish_after(project, 0)


# --- fencing ------------------------------------------------------------------------------------


TABLES = ("run", "attempt", "batch", "event")


def all_state(project: Project) -> tuple[object, ...]:
    """Return everything that an owner that lost may not change."""
    content = [rows(project, f"SELECT * FROM {table}") for table in TABLES]
    files = sorted((project.state / "checkpoints" / "sync").iterdir())
    return (content, [(path.name, path.read_bytes()) for path in files if path.suffix == ".json"])


@pytest.mark.parametrize(
    "point",
    ["batch.handed_out", "batch.yielded", "commit.begun", "commit.prepared", "ledger.committed"],
)
def test_an_owner_that_was_overtaken_changes_nothing_and_ends_with_14(
    project: Project, point: str
) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at(f"{point}@2=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the first owner to stop")
    (project.state / "locks" / "sync.lock").unlink()
    assert project.run("run", "sync").code == 0
    before = all_state(project)
    os.kill(worker, signal.SIGCONT)
    ended = project.finish(process)
    assert ended.code == 14
    assert ended.err.startswith("Lost ownership of run ")
    assert all_state(project) == before


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_an_owner_whose_lock_file_is_gone_stops_within_one_batch(
    project: Project, how: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    lock = project.state / "locks" / "sync.lock"
    lock.unlink()
    if how == "replaced":
        lock.touch(0o600)
    let_go(project)
    ended = project.finish(process)
    assert ended.code == 14, ended.err
    assert run_row(project) == ("interrupted", "", 1)
    write_job(project)
    finish_after(project, 0)


@pytest.mark.parametrize("point", ["commit.begun", "commit.prepared"])
def test_a_generation_raised_behind_the_owner_s_back_fences_its_next_commit(
    project: Project, point: str
) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at(f"{point}@2=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the owner to stop")
    connection = apsw.Connection(str(project.state / "ledger.db"))
    connection.execute("UPDATE run SET generation = generation + 1")
    connection.close()
    before = all_state(project)
    os.kill(worker, signal.SIGCONT)
    assert project.finish(process).code == 14
    assert all_state(project) == before
    assert list((project.state / "checkpoints" / "sync").glob(".*")) == []


def test_an_owner_stopped_inside_its_commit_keeps_everybody_else_out(project: Project) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at("checkpoint.rename@2=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the owner to stop")
    (project.state / "locks" / "sync.lock").unlink()
    ended = project.run("run", "sync")
    assert ended.code == 5
    assert f"The log of the ledger {project.state}/ledger.db cannot be written back." in ended.err
    os.kill(worker, signal.SIGCONT)
    assert project.finish(process).code == 14
    assert run_row(project) == ("interrupted", "", 2)
    finish_after(project, 0)


# --- requests and resumes -----------------------------------------------------------------------


def test_a_pause_by_a_person_is_lifted_by_a_person_only(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    assert project.run("pause", "sync").code == 0
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "person", 2)
    (run,) = rows(project, "SELECT id FROM run")[0]
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert ended.err.startswith(f"Run {run} of sync was paused by a person.\nSince ")
    assert ended.err.endswith(f"Nothing was started.\nTo go on: batchrun resume {run}\n")
    assert project.run("resume", "--all").code == 0
    assert run_row(project) == ("paused", "person", 2)
    finish_after(project, 0)


def test_a_live_run_is_cancelled_at_its_next_safe_point(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    assert project.run("cancel", "sync").code == 0
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("cancelled", "person", 2)


def test_a_request_made_before_the_first_batch_is_honoured_before_it(project: Project) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at("worker.started=stop"))
    wait_for(lambda: is_stopped(process.pid), "the supervisor to stop")
    os.kill(worker_of(process), signal.SIGSTOP)
    assert project.run("pause", "sync").code == 0
    os.kill(worker_of(process), signal.SIGCONT)
    os.kill(process.pid, signal.SIGCONT)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "person", 0)


def test_an_idle_run_is_paused_and_cancelled_at_once(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    assert project.run("pause", "sync").code == 0
    assert run_row(project) == ("paused", "person", 1)
    assert project.run("cancel", "sync").code == 0
    assert run_row(project)[0] == "cancelled"


def test_a_failed_run_goes_on_by_run_and_not_by_the_tick(project: Project) -> None:
    write_job(project, "raise ValueError('no')")
    assert project.run("run", "sync").code == 1
    write_job(project)
    assert project.run("resume", "--all").code == 0
    assert run_row(project)[0] == "failed"
    assert project.run("run", "sync").code == 0
    assert rows(project, "SELECT count(*) FROM run") == [(1,)]


def test_the_tick_goes_on_with_what_was_stopped_and_with_what_was_killed(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    project.run("resume", "--all", env=at("commit.prepared@2=kill-both"))
    assert project.run("resume", "--all").code == 0
    assert run_row(project) == ("succeeded", "", 3)
    assert project.run("resume", "--all").code == 0


def test_a_resume_of_a_run_whose_end_was_recorded_begins_no_other(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("worker.ended=kill-both"))
    assert run_row(project)[0] == "running"
    assert project.run("resume", "sync").code == 0
    assert rows(project, "SELECT state FROM run") == [("succeeded",)]


FEED_JOB = """\
from batchrun import Delimited, job

@job
def sync(ctx):
    for batch in ctx.batches(ctx.enter(Delimited("feed.csv", key="sku"))):
        yield batch
"""


def write_feed(project: Project, quantity: int) -> None:
    """Replace the feed by another one."""
    lines = [f"{number},{quantity}" for number in range(1, 11)]
    new = project.write_file("feed.new", "\n".join(["sku,quantity", *lines, ""]))
    new.rename(project.folder / "feed.csv")


def test_a_changed_source_begins_anew_where_the_job_wants_it_but_not_for_ever(
    project: Project,
) -> None:
    project.write(CONFIG + 'on_changed_source = "fresh"\n', sync=FEED_JOB)
    for times in range(3):
        write_feed(project, times)
        ended = project.run("-v", "run", "sync", "--batches", "1")
        assert ended.code == 75, ended.err
        assert ("is cancelled, its source changed; a new one begins" in ended.err) == (times > 0)
    states = rows(project, "SELECT state, fresh_in_a_row FROM run ORDER BY key")
    assert states == [("cancelled", 0), ("cancelled", 1), ("paused", 2)]
    write_feed(project, 99)
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert ended.err.startswith("The source of sync changed 3 times in a row.\n")
    assert project.run("run", "sync", "--fresh").code == 0


def test_a_changed_source_is_refused_where_the_job_does_not_say_otherwise(
    project: Project,
) -> None:
    project.write(CONFIG, sync=FEED_JOB)
    write_feed(project, 1)
    project.run("run", "sync", "--batches", "1")
    write_feed(project, 2)
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert "The source of loop 'main' changed since commit 1." in ended.err
    write_feed(project, 1)
    with (project.folder / "feed.csv").open("a") as feed:
        feed.write("11,1\n")
    assert project.run("resume", "sync", "--accept-source").code == 0


def test_a_reader_of_the_ledger_does_not_spoil_a_success(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    reader = apsw.Connection(str(project.state / "ledger.db"))
    reader.execute("BEGIN; SELECT * FROM run").fetchall()
    assert project.run("run", "sync").code == 0
    reader.close()


def test_a_batchrun_that_was_replaced_starts_no_other_worker(project: Project) -> None:
    project.write(CONFIG + 'on_changed_source = "fresh"\n', sync=FEED_JOB)
    write_feed(project, 1)
    project.run("run", "sync", "--batches", "1")
    write_feed(project, 2)
    line = "digests = iter('aab'); batchrun.code_digest = lambda: next(digests)"
    ended = project.run("run", "sync", launch=launch_with(line))
    assert ended.code == 75
    assert "was replaced while this batchrun was running." in ended.err


def test_rejects_within_the_limit_end_with_10_also_when_the_edge_is_made_later(
    project: Project,
) -> None:
    write_job(project, "batch.reject(record, 'bad')")
    project.write(CONFIG + "max_rejects = 1\n")
    project.run("run", "sync", env=at("worker.ended=kill-both"))
    assert project.run("resume", "sync").code == 10
    assert rows(project, "SELECT state, rejected FROM run") == [("succeeded", 1)]
    project.write(CONFIG)
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert "More than 0 records were rejected, the first of this batch: 8: bad." in ended.err


def test_a_start_during_maintenance_is_refused_with_a_row(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    (project.state / "maintenance.lock").touch()
    assert project.run("run", "sync").code == 12
    assert rows(project, "SELECT what FROM event ORDER BY id DESC LIMIT 1") == [
        ("refused: maintenance",)
    ]
    (project.state / "maintenance.lock").unlink()
    finish_after(project, 0)
