"""One attempt after another: tries, retries, plan B, limits, and what the endings are called."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from conftest import Ended, Project, wait_for
from test_11_worker import (
    at,
    done,
    let_go,
    records,
    rows,
    run_row,
    start_held,
    worker_of,
)
from test_12_supervisor import DEAF, is_stopped, launch_with

from batchrun import Host

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
stop_grace = "30s"
max_tries = 3
retry_first_wait = "1ms"
[jobs.sync]
"""

# Ten records in two batches. `first` counts its calls over all attempts: true the first `times`.
JOB = """\
import os, signal, time
from pathlib import Path
from batchrun import Fatal, job

def hold(name):
    Path(name + ".reached").write_text(str(os.getpid()))
    while not Path(name).exists():
        time.sleep(0.002)

def first(times=1):
    with open("calls.txt", "a") as file:
        file.write("x")
        return file.tell() <= times

def done(record):
    with open("done.txt", "a") as file:
        file.write(f"{record}\\n")

def retry_if(error):
    RETRY_IF

@job(retry_if=retry_if)
def sync(ctx):
    BEFORE
    for batch in ctx.batches(range(1, 11), key=lambda record: record):
        for record in batch:
            if record == 8: BEFORE_8
            done(record)
        yield batch
"""
YIELD = "        yield batch\n"
RAISES = "raise ConnectionRefusedError('down')"
RANGE = r"\(records 6 to 10, loop main, after cursor 5, \"[0-9a-f]{32}\"\)"


def write_job(
    project: Project,
    before_8: str = "pass",
    *,
    before: str = "pass",
    retry_if: str = "return True",
    config: str = "",
) -> None:
    """Write the job with something done before record 8, or before the loop."""
    text = JOB.replace("BEFORE_8", before_8).replace("BEFORE", before)
    project.write(CONFIG + config, sync=text.replace("RETRY_IF", retry_if))


def attempts(project: Project) -> list[tuple[str, int, int | None]]:
    """Return how each attempt ended, whether it was charged, whether to try again."""
    return rows(project, "SELECT ending, charged, retry FROM attempt ORDER BY run, generation")


def tries(project: Project) -> int:
    """Return how many tries of the armed batch were charged."""
    return int(rows(project, "SELECT tries FROM run ORDER BY key DESC LIMIT 1")[0][0])


def all_done(project: Project) -> bool:
    """Tell whether every record was processed."""
    return sorted(set(records(project))) == list(range(1, 11))


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Tell whether a signal has been sent to a process that has not taken it yet."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^ShdPnd:\t(\w+)$", text, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & 1 << (number - 1))


def waiting(project: Project, config: str = 'retry_first_wait = "20m"\n') -> subprocess.Popen[str]:
    """Start a job that raises, and return its supervisor when it waits before the second try."""
    write_job(project, f"\n                if first(): {RAISES}")
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace('retry_first_wait = "1ms"\n', config))
    process = project.start("run", "sync")

    def waits() -> bool:
        file = project.state / "ledger.db"
        sql = "SELECT state FROM run JOIN attempt ON run = key WHERE ending = 'raised'"
        return file.exists() and rows(project, sql) == [("reserved",)]

    wait_for(waits, "the wait before the second try")
    return process


# --- tried again ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        (RAISES, "raised"),
        ("raise SystemExit(0)", "raised"),
        ("os._exit(0)", "died"),
        ("os.kill(os.getpid(), 9)", "died"),
        ("__import__('ctypes').string_at(0)", "died"),
    ],
)
def test_a_batch_that_fails_twice_and_then_works_needs_nobody(
    project: Project, how: str, ending: str
) -> None:
    write_job(project, f"\n                if first(2): {how}")
    ended = project.run("run", "sync")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert attempts(project) == [(ending, 1, 1), (ending, 1, 1), ("succeeded", 0, None)]
    assert records(project) == [*range(1, 8), 6, 7, *range(6, 11)]
    assert run_row(project) == ("succeeded", "", 3)
    assert tries(project) == 0


def test_the_founding_story_a_dependency_goes_away_and_comes_back(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    connect = f"__import__('socket').create_connection(('127.0.0.1', {port})).close()"
    down = f"\n                if first(9): {connect}"
    waits = 'max_tries = 100\nretry_for = "15m"\nretry_max_wait = "20ms"\n'
    write_job(project, down, config="")
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace("max_tries = 3\n", waits))
    process = project.start("run", "sync")
    refused = "SELECT 1 FROM attempt WHERE error LIKE '%ConnectionRefusedError%'"
    ledger = project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and len(rows(project, refused)) >= 3, "three attempts in vain")
    with socket.create_server(("127.0.0.1", port)):
        ended = project.finish(process)
    assert (ended.code, ended.err) == (0, "")
    assert all_done(project)
    assert len(records(project)) == 10 + 2 * len(rows(project, refused))


def test_a_job_that_fails_before_its_first_batch_is_tried_again(project: Project) -> None:
    write_job(project, before=f"\n    if first(2): {RAISES}")
    assert project.run("run", "sync").code == 0
    assert attempts(project) == [("raised", 1, 1), ("raised", 1, 1), ("succeeded", 0, None)]


@pytest.mark.parametrize(
    ("raised", "retry_if", "words"),
    [
        ("raise Fatal('no')", "return True", "It is not tried again: that is Fatal."),
        ("raise type('Bad', (Fatal,), {})()", "1 / 0", "It is not tried again: that is Fatal."),
        ("raise OSError", "return False", "It is not tried again: retry_if said so."),
        (
            "raise OSError",
            "raise KeyError('x')",
            "It is not tried again: retry_if raised KeyError: 'x'.",
        ),
    ],
)
def test_what_would_not_help_is_not_tried_again(
    project: Project, raised: str, retry_if: str, words: str
) -> None:
    write_job(project, raised, retry_if=retry_if)
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert f" in batch 2.\n{words}\nCommit 1 stands: 5 records are done.\n" in ended.err
    assert attempts(project) == [("raised", 1, 0)]
    assert run_row(project) == ("failed", "", 1)


def test_retry_if_is_asked_with_the_exception_itself(project: Project) -> None:
    write_job(
        project, "raise OSError(5 if first() else 6, 'x')", retry_if="return error.errno == 5"
    )
    assert project.run("run", "sync").code == 1
    assert attempts(project) == [("raised", 1, 1), ("raised", 1, 0)]


@pytest.mark.parametrize(
    ("driver", "how"), [("sqlite3", "sqlite3.connect('t.db', timeout=0.01)"), ("apsw", "busy()")]
)
def test_a_target_that_is_locked_before_its_first_mark_is_tried_again(
    project: Project, driver: str, how: str
) -> None:
    project.write(
        'min_free = "1MB"\n[jobs.sync]\n',
        sync=f"""
        import {driver}
        from batchrun import job

        def busy():
            connection = apsw.Connection("t.db")
            connection.set_busy_timeout(10)
            return connection

        @job
        def sync(ctx):
            for batch in ctx.batches([1], target={how}):
                with batch.transaction():
                    pass
                yield batch
        """,
    )
    with contextlib.closing(apsw.Connection(str(project.folder / "t.db"))) as other:
        other.execute("BEGIN IMMEDIATE; CREATE TABLE a (b)")
        ended = project.run("run", "sync")
    assert ended.code == 1
    assert "locked" in ended.err
    assert attempts(project) == [("raised", 1, 1)]


def test_a_letter_is_not_tried_again_and_costs_no_try(project: Project) -> None:
    write_job(project, "batch.number = ctx.batches(range(3))")
    ended = project.run("run", "sync")
    assert ended.code == 1, ended.err
    assert attempts(project) == [("raised", 0, None)]


def test_a_job_under_in_process_fails_at_once(project: Project) -> None:
    write_job(project, RAISES)
    assert project.run("run", "sync", "--in-process").code == 1
    assert attempts(project) == [("raised", 1, 1)]
    assert run_row(project) == ("failed", "", 1)


def test_batches_are_counted_over_all_attempts(project: Project) -> None:
    write_job(project, config='batch_size = 2\nrecycle_above = "1MB"\n')
    assert project.run("run", "sync", "--batches", "3").code == 75
    assert run_row(project) == ("paused", "stop", 3)
    assert records(project) == [1, 2, 3, 4, 5, 6]


WRITES = """\
def say(console, text):
    connection = batchrun.apsw.Connection("state/ledger.db")
    connection.execute("BEGIN IMMEDIATE; ROLLBACK")
    connection.close()
    os.write(2, text.encode() + b"\\n")

batchrun.Console.say = say
"""


def test_what_follows_a_failure_is_said_without_the_write_lock(project: Project) -> None:
    write_job(project, f"\n                if first(): {RAISES}")
    project.write_file("say.py", WRITES)
    ended = project.run("run", "sync", launch=launch_with("exec(open('say.py').read())"))
    assert ended.code == 0, ended.err
    assert "The next attempt begins in 0.0 s: try 2 of 3.\n" in ended.err


def test_what_a_worker_says_last_is_shown(project: Project) -> None:
    write_job(project)
    early = "        yield batch\n        ctx.finish('enough')\n        return\n"
    project.write(CONFIG, sync=(project.folder / "jobs/sync.py").read_text().replace(YIELD, early))
    never = launch_with("batchrun.WATCH_INTERVAL_S = 1e6")  # it looks again only at the end
    ended = project.run("-v", "run", "sync", launch=never)
    assert "the job finished by itself: enough\n" in ended.err


def test_a_job_that_outgrows_in_process_is_paused(project: Project) -> None:
    write_job(project, config='recycle_above = "1MB"\n')
    ended = project.run("run", "sync", "--in-process")
    assert (ended.code, run_row(project)) == (75, ("paused", "stop", 1))
    assert re.fullmatch(r"The worker held \d+ MB, more than recycle_above\.\n", ended.err)
    assert project.run("resume", "--all").code == 0


# --- poison and plan B ----------------------------------------------------------------------------


def test_a_batch_that_used_up_its_tries_is_poison_and_awaits_a_person(project: Project) -> None:
    write_job(project, RAISES)
    ended = project.run("run", "sync")
    (run,) = rows(project, "SELECT id FROM run")[0]
    why = "Batch 2 failed 3 times, and max_tries = 3 is reached"
    assert ended.code == 13
    assert re.fullmatch(
        f"sync: run {run} awaiting.\n"
        f"{why} {RANGE}\\.\n"
        "The last time: The job raised ConnectionRefusedError: down in batch 2.\n"
        "Commit 1 stands: 5 records are done.\n"
        f"The log: {project.state}/logs/sync/{run}.log\n"
        f"To go on: batchrun resume {run}\n",
        ended.err,
    )
    assert run_row(project) == ("awaiting", "poison", 1)
    refused = project.run("run", "sync")
    assert refused.code == 13
    assert f"Run {run} of sync awaits a person: its next batch is poison.\n{why}" in refused.err
    assert f"To go on: batchrun resume {run}\n" in refused.err
    assert project.run("resume", "--all").code == 0
    assert len(attempts(project)) == 3
    status = project.run("status", "sync")
    assert status.code == 3
    assert why in status.out
    assert f"to type: batchrun resume {run}" in status.out


def test_a_person_s_resume_counts_the_tries_anew(project: Project) -> None:
    write_job(project, RAISES)
    project.run("run", "sync")
    assert project.run("resume", "sync").code == 13
    assert len(attempts(project)) == 6
    write_job(project, f"\n                if first(2): {RAISES}")
    assert project.run("resume", "sync").code == 0
    assert all_done(project)


def test_a_record_that_kills_is_poison_after_max_tries_of_a_timer(project: Project) -> None:
    job = JOB.replace("range(1, 11)", "range(1, 10_002)").replace("            done(record)\n", "")
    kills = job.replace("record == 8", "record == 7_777").replace(
        "BEFORE_8", "os.kill(os.getpid(), 9)"
    )
    config = CONFIG.replace("= 5\n", "= 5000\n").replace("[jobs", 'retry_for = "0"\n[jobs')
    project.write(config, sync=kills.replace("BEFORE", "pass").replace("RETRY_IF", "return True"))
    words = ("records 5,001 to 10,000", "killed by SIGKILL")
    ended = project.run("run", "sync")
    for count in (1, 2):
        assert (ended.code, tries(project), *run_row(project)) == (13, count, "paused", "retry", 1)
        ended = project.run("resume", "--all")
    assert (ended.code, *run_row(project)) == (13, "awaiting", "poison", 1)
    assert all(word in ended.err for word in words), ended.err
    assert "Batch 2 failed 3 times, and max_tries = 3 is reached" in ended.err
    assert project.run("resume", "--all").code == 0
    assert len(attempts(project)) == 3


def test_the_first_batch_of_a_second_loop_has_tries_of_its_own(project: Project) -> None:
    loops = JOB.replace("range(1, 11)", "range(5)").replace("BEFORE_8", "pass")
    second = (
        "    for batch in ctx.batches(range(7, 9), name='second', key=lambda record: record):\n"
        "        os._exit(1)\n        yield batch\n"
    )
    loops = loops.replace("key=", "name='one', key=") + second
    project.write(CONFIG, sync=loops.replace("BEFORE", "pass").replace("RETRY_IF", "return True"))
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert "(records 6 to 10, loop second, at the beginning)" in ended.err
    assert attempts(project) == [("died", 1, 1)] * 3


def test_when_retry_for_is_over_the_run_is_paused_and_the_tick_goes_on(project: Project) -> None:
    write_job(project, f"\n                if first(2): {RAISES}", config='retry_for = "0"\n')
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert "Batch 2 failed once, and retry_for is reached (records 6 to 10" in ended.err
    assert run_row(project) == ("paused", "retry", 1)
    for words in (["status"], ["status", "sync"]):
        shown = project.run(*words, "--json")
        assert (shown.code, shown.document["jobs"][0]["needs_someone"]) == (3, True)
    assert project.run("resume", "--all").code == 13
    assert tries(project) == 2
    assert project.run("resume", "--all").code == 0
    assert all_done(project)


def test_plan_b_can_be_to_fail_and_a_start_of_a_failed_run_counts_anew(project: Project) -> None:
    write_job(project, RAISES, config='on_exhausted = "fail"\n')
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert "The job raised ConnectionRefusedError: down in batch 2.\n" in ended.err
    assert (run_row(project), tries(project)) == (("failed", "", 1), 3)
    assert project.run("run", "sync").code == 1
    assert len(attempts(project)) == 6


# --- what costs no try ----------------------------------------------------------------------------


def test_stops_kills_and_deploys_of_a_batch_cost_it_no_try(project: Project) -> None:
    write_job(project, "hold('go')", config="")
    project.write(CONFIG.replace("max_tries = 3", "max_tries = 1"))
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1):  # as the second stop sends it
        process = start_held(project)
        os.kill(worker_of(process), number)
        assert project.finish(process).code == 75
        (project.folder / "go.reached").unlink()
    process = start_held(project)  # the supervisor and its worker at once, as by a power cut
    worker = worker_of(process)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    process.kill()
    project.finish(process)
    (project.folder / "go.reached").unlink()
    process = start_held(project)  # the supervisor alone
    process.kill()
    let_go(project)
    project.finish(process)
    ended = project.run("run", "sync")
    assert ended.code == 0, ended.err
    assert sum(charged for _, charged, _ in attempts(project)) == 0
    assert [ending for ending, _, _ in attempts(project)] == [
        *["stopped"] * 3,
        "died",
        "stopped",
        "succeeded",
    ]


@pytest.mark.parametrize(
    ("then", "ending", "state"),
    [(RAISES, "stopped", ("paused", "stop", 1)), ("os._exit(1)", "died", ("interrupted", "", 1))],
)
def test_what_goes_wrong_once_a_stop_was_asked_for_costs_no_try(
    project: Project, then: str, ending: str, state: tuple[str, str, int]
) -> None:
    write_job(project, f"\n                if first(): hold('go'); {then}")
    process = start_held(project)
    worker = worker_of(process)
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: is_stopped(worker), "the worker to stand still")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: is_pending(worker, signal.SIGTERM), "the stop to reach the worker")
    os.kill(worker, signal.SIGCONT)
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == state
    assert attempts(project) == [(ending, 0, None)]
    assert project.run("resume", "--all").code == 0


def test_an_exception_that_the_worker_recorded_is_charged_also_without_its_supervisor(
    project: Project,
) -> None:
    write_job(project, f"\n                if first(): {RAISES}")
    assert project.run("run", "sync", env=at("worker.ended=kill-supervisor")).code == -9
    wait_for(lambda: not project.living(), "the worker to leave")
    assert attempts(project) == [("raised", 0, 1)]
    assert "interrupted" in project.run("status", "sync").out
    assert project.run("resume", "--all").code == 0
    assert attempts(project) == [("raised", 1, 1), ("succeeded", 0, None)]


def test_a_worker_killed_before_its_first_batch_costs_no_try_but_is_tried_again(
    project: Project,
) -> None:
    write_job(project, before="\n    if first(4): os._exit(1)")
    assert project.run("run", "sync").code == 0
    assert attempts(project) == [*[("died", 0, 1)] * 4, ("succeeded", 0, None)]


# --- the wait -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "code", "state"),
    [
        (signal.SIGTERM, 75, ("paused", "stop")),
        (signal.SIGINT, 130, ("paused", "stop")),
        ("pause", 75, ("paused", "person")),
        ("cancel", 75, ("cancelled", "")),
        ("maintenance", 75, ("paused", "maintenance")),
    ],
)
def test_a_wait_ends_at_once_when_somebody_asks(
    project: Project, what: signal.Signals | str, code: int, state: tuple[str, str]
) -> None:
    process = waiting(project)
    status = project.run("status", "sync").out
    assert "sync: reserved since " in status
    assert "why           Another attempt follows.\n" in status
    if isinstance(what, signal.Signals):
        process.send_signal(what)
    elif what == "maintenance":
        (project.state / "maintenance.lock").touch()
    else:
        project.run(what, "sync")
    began = time.monotonic()
    ended = project.finish(process)
    assert time.monotonic() - began < 1
    letter = "Maintenance is on: " if what == "maintenance" else ""
    assert ended.code == code
    assert bool(ended.err) == bool(letter)
    assert letter in ended.err
    assert run_row(project)[:2] == state
    assert attempts(project) == [("raised", 1, 1)]
    (project.state / "maintenance.lock").unlink(missing_ok=True)
    if state[0] == "paused":
        goes_on = ["resume", "sync"] if what == "pause" else ["resume", "--all"]
        assert project.run(*goes_on).code == 0
        assert all_done(project)


def test_a_cancel_in_the_wait_runs_the_cleanups_that_a_dead_worker_left(project: Project) -> None:
    text = JOB.replace("BEFORE_8", "os._exit(1)").replace("RETRY_IF", "return True")
    text = text.replace("    BEFORE", "    ctx.cleanup(remove, what='staging')")
    text = text.replace("@job(", "def remove(what):\n    done(f'{what} removed')\n\n@job(")
    project.write(CONFIG.replace("1ms", "20m"), sync=text)
    process = project.start("run", "sync")
    sql = "SELECT 1 FROM run JOIN attempt ON run = key WHERE ending = 'died' AND state = 'reserved'"
    ledger = project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and rows(project, sql), "the wait before the second try")
    assert "staging removed" not in done(project)
    project.run("cancel", "sync")
    ended = project.finish(process)
    assert (ended.code, ended.err) == (75, "")
    assert run_row(project) == ("cancelled", "", 1)
    assert done(project)[-1] == "staging removed"


def test_a_supervisor_killed_in_its_wait_leaves_the_run_to_the_tick(project: Project) -> None:
    process = waiting(project)
    process.kill()
    project.finish(process)
    assert "interrupted" in project.run("status", "sync").out
    assert project.run("resume", "--all").code == 0
    assert all_done(project)
    assert rows(project, "SELECT count(*) FROM event WHERE what LIKE 'failed%'") == [(0,)]


@pytest.mark.parametrize("is_at_rest", [False, True])
def test_after_an_unclean_end_the_checkpoint_is_written_anew_before_it_is_built_on(
    project: Project, *, is_at_rest: bool
) -> None:
    if is_at_rest:
        write_job(project, "os._exit(1)", config='retry_for = "0"\n')
        assert project.run("run", "sync").code == 13
    else:
        process = waiting(project)
        process.kill()
        process.wait()
    (checkpoint,) = project.state.glob("checkpoints/sync/*.json")
    before = checkpoint.stat().st_ino
    started = project.start("resume", "--all", env=at("admit.committed=stop"))
    wait_for(lambda: is_stopped(started.pid), "the admission")
    assert checkpoint.stat().st_ino != before


UNDEAD = """\
def children(host, pid=None):
    return [int(open("undead").read())] if os.path.exists("calls.txt") else []

batchrun.Host.children, batchrun.ORPHAN_GRACE_S = children, 0.05
"""


def test_no_attempt_begins_while_something_of_the_last_one_cannot_be_ended(
    project: Project,
) -> None:
    write_job(project, f"\n                if first(): {RAISES}")
    with subprocess.Popen(["true"]) as undead:  # a zombie takes every signal, and stays
        wait_for(lambda: is_zombie(undead.pid), "its end")
        project.write_file("undead", str(undead.pid))
        project.write_file("children.py", UNDEAD)
        ended = project.run("run", "sync", launch=launch_with("exec(open('children.py').read())"))
    assert (ended.code, run_row(project)) == (13, ("paused", "retry", 1))
    assert "What its worker left behind still lives.\n" in ended.err
    assert attempts(project) == [("raised", 1, 1)]


def test_a_batchrun_that_was_replaced_in_the_wait_begins_no_other_attempt(project: Project) -> None:
    write_job(project, f"\n                if first(): {RAISES}")
    line = "digests = iter('aab'); batchrun.code_digest = lambda: next(digests)"
    ended = project.run("run", "sync", launch=launch_with(line))
    assert (ended.code, ended.err) == (75, "")
    assert run_row(project) == ("paused", "stop", 1)
    why = rows(project, "SELECT why FROM event ORDER BY id DESC LIMIT 1")[0][0]
    assert "was replaced while this batchrun was running." in why
    assert project.run("resume", "--all").code == 0


def test_the_wait_is_said_and_grows_up_to_its_limit(project: Project) -> None:
    write_job(project, RAISES, config='max_tries = 6\nretry_max_wait = "30ms"\n')
    text = (project.folder / "batchrun.toml").read_text().replace("max_tries = 3\n", "")
    project.write(text)
    project.run("run", "sync")
    said = [why for (why,) in rows(project, "SELECT why FROM event WHERE what = 'reserved'")]
    assert len(said) == 5
    assert said[0] == (
        "The job raised ConnectionRefusedError: down in batch 2."
        " The next attempt begins in 0.0 s: try 2 of 6."
    )


# --- a batch that takes too long ------------------------------------------------------------------

# The supervisor's clock: ten thousand times as fast while a worker hangs, which wrote its pid.
CLOCK = """\
def hangs():
    try:
        return os.path.exists("/proc/" + open("hang.reached").read())
    except OSError:
        return False

def monotonic(self, clock=batchrun.Host.monotonic, last=[0.0, 0.0]):
    now = clock(self)
    last[1] += (now - last[0]) * (10_000 if hangs() else 1)
    last[0] = now
    return last[1]

batchrun.Host.monotonic = monotonic
batchrun.Ledger.releases_until = lambda *_: None  # a moment on the worker's own, slow clock
"""
FAST = launch_with("exec(open('clock.py').read())")
FROZEN = "(Path('hang.reached').write_text(str(os.getpid())), os.kill(os.getpid(), 19))"


@pytest.mark.parametrize(
    ("hangs", "stop_grace", "ended_by"),
    [("hold('hang')", "24h", None), (DEAF.replace("go", "hang"), "1s", 9), (FROZEN, "1s", 9)],
)
def test_a_batch_that_does_not_end_in_time_is_stopped_charged_and_done_again(
    project: Project, hangs: str, stop_grace: str, ended_by: int | None
) -> None:
    write_job(project, f"\n                if first(): {hangs}")
    text = (project.folder / "batchrun.toml").read_text().replace("30s", stop_grace)
    project.write(text)
    project.write_file("clock.py", CLOCK)
    ended = project.run("run", "sync", launch=FAST)
    assert (ended.code, ended.err) == (0, "")
    assert attempts(project) == [("overdue", 1, 1), ("succeeded", 0, None)]
    ((error, number),) = rows(project, "SELECT error, signal FROM attempt WHERE charged")
    words = f"The worker was stopped: batch 2 did not end within 30m {RANGE}\\."
    assert re.fullmatch(words, error), error
    assert number == ended_by
    assert all_done(project)


def test_a_worker_is_killed_10_s_after_the_second_stop_however_long_stop_grace_is(
    project: Project,
) -> None:
    write_job(project, DEAF.replace("go", "hang"))
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace('"30s"', '"30d"\nbatch_timeout = "0"'))
    project.write_file("clock.py", CLOCK)
    process = project.start("run", "sync", launch=FAST)
    wait_for((project.folder / "hang.reached").exists, "the hang")
    for number in (signal.SIGTERM, signal.SIGHUP):  # two that are taken one after the other
        process.send_signal(number)
    ended = project.finish(process, limit_s=20)  # by its clock, two days
    assert ended.code == 75
    assert "The worker did not stop when it was asked to, and was killed." in ended.err
    assert run_row(project) == ("interrupted", "", 1)


def test_reading_counts_for_the_time_of_a_batch(project: Project) -> None:
    write_job(project, before="\n    if first(): hold('hang')")
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace("30s", "24h"))
    project.write_file("clock.py", CLOCK)
    assert project.run("run", "sync", launch=FAST).code == 0
    assert attempts(project) == [("overdue", 1, 1), ("succeeded", 0, None)]
    error = rows(project, "SELECT error FROM attempt WHERE charged")[0][0]
    assert error == "The worker was stopped: batch 1 did not end within 30m."


def test_a_batch_that_commits_at_the_last_moment_is_not_charged(project: Project) -> None:
    write_job(project, "Path('hang.reached').write_text(str(os.getpid()))")
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace("30s", "10d"))
    project.write_file("clock.py", CLOCK)
    process = project.start("run", "sync", env=at("commit.begun@2=stop"), launch=FAST)
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the second commit")
    wait_for(lambda: is_pending(worker, signal.SIGUSR1), "the interruption")
    os.kill(worker, signal.SIGCONT)
    ended = project.finish(process)
    assert (ended.code, ended.err) == (0, "")
    assert attempts(project) == [("recycled", 0, None), ("succeeded", 0, None)]
    assert records(project) == list(range(1, 11))


# --- what a worker holds --------------------------------------------------------------------------


def test_a_worker_that_has_outgrown_is_followed_by_a_fresh_one(project: Project) -> None:
    grows = "\n    hoard = []\n    for batch in"
    text = JOB.replace("\n    for batch in", grows).replace("BEFORE_8", "pass")
    text = text.replace(
        "        yield batch", "        hoard.append(os.urandom(30_000_000))\n        yield batch"
    )
    config = CONFIG.replace("batch_size = 5", 'batch_size = 1\nrecycle_above = "100MB"')
    project.write(config, sync=text.replace("BEFORE", "pass").replace("RETRY_IF", "return True"))
    ended = project.run("run", "sync")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert records(project) == list(range(1, 11))
    endings = attempts(project)
    assert endings == [*[("recycled", 0, None)] * (len(endings) - 1), ("succeeded", 0, None)]
    assert 3 <= len(endings) <= 6
    assert rows(project, "SELECT max(tries) FROM run") == [(0,)]
    report = project.run("report", "sync").out
    assert re.search(r"The worker held 1\d\d MB, more than recycle_above\.", report)
    (most,) = rows(project, "SELECT max(rss_bytes) FROM batch")[0]
    assert 100_000_000 < most < 140_000_000


def test_a_fresh_start_stays_one_run_in_however_many_workers(project: Project) -> None:
    write_job(project, config='recycle_above = "1MB"\n')
    assert project.run("run", "sync", "--batches", "1").code == 75
    assert project.run("run", "sync", "--fresh").code == 0
    states = rows(project, "SELECT state, read FROM run ORDER BY key")
    assert states == [("cancelled", 5), ("succeeded", 10)]
    assert [ending for ending, *_ in attempts(project)][1:] == ["recycled", "recycled", "succeeded"]


def test_what_the_worker_holds_is_recorded_with_each_commit(project: Project) -> None:
    opens = "\n    held = [open('/dev/null') for _ in range(20)]"
    opens += "\n    import socket; held += socket.socketpair() * 1"
    write_job(project, before=opens)
    assert project.run("run", "sync").code == 0
    found = rows(
        project,
        "SELECT rss_bytes > 10000000, open_files > 22, threads, children, connections FROM batch",
    )
    assert found[0] == (1, 1, 1, 0, 2)
    assert [row[:3] for row in found] == [(1, 1, 1)] * 3


def test_own_gauges_count_files_sockets_and_children() -> None:
    host = Host()
    before = host.own_gauges(dear=True)
    ends = socket.socketpair()
    child = subprocess.Popen(["/bin/sleep", "600"])
    after = host.own_gauges(dear=True)
    more = {name: after[name] - before[name] for name in ("open_files", "connections", "children")}
    assert more == {"open_files": 2, "connections": 2, "children": 1}
    cheap = {"rss_bytes", "open_files", "threads", "children"}
    assert set(host.own_gauges(dear=False)) == cheap
    child.kill()
    child.wait()
    for end in ends:
        end.close()


# --- memory ---------------------------------------------------------------------------------------

HOARD = "bytearray(600_000_000)"
LIMIT = "\n    import resource; resource.setrlimit(resource.RLIMIT_AS, (500_000_000,) * 2)"


def test_a_batch_that_takes_600_mb_once_under_500_mb_goes_on_in_a_fresh_worker(
    project: Project,
) -> None:
    write_job(project, f"\n                if first(): {HOARD}", before=LIMIT)
    assert project.run("run", "sync").code == 0
    assert attempts(project) == [("raised", 1, 1), ("succeeded", 0, None)]
    error = rows(project, "SELECT error FROM attempt WHERE charged")[0][0]
    assert error == "The job raised MemoryError in batch 2."
    assert all_done(project)


def own_memory_group() -> Path | None:
    """Return the folder of this process's memory cgroup, version 1 or 2, if groups can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = Path(f"/sys/fs/cgroup/memory{path}")
            return folder if os.access(folder, os.W_OK) else None
    return None


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with a limit of 60 MiB."""
    parent = own_memory_group()
    if parent is None or os.geteuid():
        pytest.skip("NOT ROOT OR NO MEMORY CGROUP (v1): no worker was killed for memory")
    group = parent / f"batchrun-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(60 * 2**20))
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text(), "the limited worker to be gone")
    group.rmdir()


def test_a_worker_killed_for_memory_is_followed_by_one_that_goes_on(
    project: Project, limited: Path
) -> None:
    joins = f"(Path('{limited}/cgroup.procs').write_text(str(os.getpid())), bytearray(200_000_000))"
    write_job(project, f"\n                if first(): {joins}")
    ended: Ended = project.run("run", "sync")
    assert (ended.code, ended.err) == (0, "")
    assert attempts(project) == [("died", 1, 1), ("succeeded", 0, None)]
    ((error, number, peak),) = rows(
        project, "SELECT error, signal, peak_rss_bytes FROM attempt WHERE charged"
    )
    words = r"The worker was killed by SIGKILL \(probably out of memory: peak \d\d MB\) in batch 2"
    assert re.fullmatch(f"{words} {RANGE}\\.", error), error
    assert (number, 40_000_000 < peak < 100_000_000) == (9, True)
    assert done(project)
