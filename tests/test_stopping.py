"""Stopping a run from outside: asked and waited for, or its owner ended; never taken from it."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Project, wait_for
from test_05_ledger import opened
from test_11_worker import (
    CONFIG,
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
from test_12_attempts import is_zombie
from test_12_supervisor import DEAF, error_output, is_locked, is_stopped

import batchrun
from batchrun import Busy, Host, JobLock, Ledger, Reason, Request, RunState, open_ledger


def run_id(project: Project) -> str:
    return str(rows(project, "SELECT id FROM run")[0][0])


def sent(project: Project) -> list[str]:
    """Return the signals that were sent to owners, in order, without the pids."""
    words = rows(project, "SELECT why FROM event WHERE what = 'ends the owner' ORDER BY id")
    return [why.split()[0] for (why,) in words]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or is_zombie(pid)


# --- waiting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_wait_returns_when_the_run_has_stopped_and_its_lock_is_free(
    project: Project, verb: str, state: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    worker = worker_of(process)
    waiting = project.start(verb, "sync", "--wait")
    words = f"waiting for pid {process.pid} and pid {worker}\n"
    wait_for(lambda: error_output(project, waiting) == words, "what it waits for")
    assert waiting.poll() is None
    let_go(project)
    ended = project.finish(waiting)
    assert (ended.code, ended.out) == (0, f"run {run_id(project)} of sync is {state}\n")
    assert not is_locked(project)
    assert run_row(project) == (state, "person", 2)
    project.finish(process)


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [(("pause", "sync", "--wait"), 0, "state"), (("drain", "--deadline", "2m"), 0, "adds_up")],
)
def test_who_waits_with_json_writes_one_document_and_says_the_rest_on_stderr(
    project: Project, words: tuple[str, ...], code: int, name: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    waiting = project.start("--json", *words)
    wait_for(lambda: "waiting for " in error_output(project, waiting), "what it waits for")
    let_go(project)
    ended = project.finish(waiting)
    assert (ended.code, name in ended.document) == (code, True)
    project.finish(process)


def test_wait_goes_on_to_stop_a_run_whose_owner_dies(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    worker = worker_of(process)
    waiting = project.start("pause", "sync", "--wait")
    wait_for(lambda: "waiting" in error_output(project, waiting), "it to wait")
    for pid in (worker, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert project.finish(waiting).code == 0
    assert run_row(project) == ("paused", "person", 1)


def test_wait_ends_by_ctrl_c_and_the_wish_stays(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    waiting = project.start("pause", "sync", "--wait")
    wait_for(lambda: "waiting" in error_output(project, waiting), "it to wait")
    waiting.send_signal(signal.SIGINT)
    assert project.finish(waiting).code == 130
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "person", 2)


@pytest.mark.parametrize("verb", ["pause", "cancel", "drain"])
def test_should_stop_is_true_at_once_for_a_stop_that_is_asked_for_in_the_ledger(
    project: Project, verb: str
) -> None:
    waiting = "[time.sleep(0.005) for _ in iter(lambda: ctx.should_stop, True)]; raise OSError"
    write_job(project, waiting)
    process = project.start("run", "sync")
    wait_for(lambda: "7" in done(project), "the second batch")
    assert project.run(verb, *["sync"] * (verb != "drain")).code in (0, 75)
    ended = project.finish(process, limit_s=10)
    assert ended.code == 75
    assert run_row(project)[1:] == ("drain" if verb == "drain" else "person", 1)


class FastHost(Host):
    """A machine on which every wait is over at once; by its clock each takes a quarter hour."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += max(seconds, 900)


def test_wait_is_bounded_and_says_what_to_type(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    config = batchrun.load_config(project.folder / "batchrun.toml")
    said: list[str] = []
    state = batchrun.StateDirectory(config, Host())
    ledger = state.open_ledger(create=False)
    run = ledger.latest("sync")
    assert run is not None
    stopper = batchrun.Stopper(state, ledger, run, Request.PAUSE, "a person")
    assert not stopper.stop()
    with pytest.raises(Busy) as late:
        stopper.wait(FastHost(), said.append)
    ledger.close()
    words = f"waiting for pid {process.pid} and pid {worker_of(process)}"
    assert said == [words]
    assert str(late.value) == (
        f"Run {run.id} has not stopped within 1h00m.\nStill {words}.\n"
        "The pause is asked for, and stays so.\n"
        f"To end its processes: batchrun cancel --kill {run.id}"
    )


def test_a_pause_that_comes_during_a_batch_that_fails_is_not_lost(project: Project) -> None:
    write_job(project, "hold('go'); raise ValueError('no')")
    project.write(
        CONFIG.replace("[jobs.sync]", 'max_tries = 3\nretry_first_wait = "60s"\n[jobs.sync]')
    )
    process = start_held(project)
    assert project.run("pause", "sync").code == 0
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "person", 1)


# --- ending the owner ---------------------------------------------------------------------------


def start_deaf(project: Project) -> tuple[subprocess.Popen[str], int]:
    """Start a job that hangs in C, with little patience configured."""
    write_job(project, DEAF)
    project.write(CONFIG.replace("30s", "300ms"))
    process = start_held(project)
    return process, worker_of(process)


def test_kill_asks_first_and_the_owner_cancels_at_its_safe_point(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    killing = project.start("cancel", "--kill", "sync")
    wait_for(lambda: sent(project) == ["SIGTERM", "SIGTERM"], "both to be asked")
    let_go(project)
    ended = project.finish(killing)
    assert (ended.code, ended.out) == (0, f"run {run_id(project)} of sync is cancelled\n")
    assert project.finish(process).code == 75
    assert run_row(project) == ("cancelled", "person", 2)
    assert records(project) == list(range(1, 11))
    assert sent(project) == ["SIGTERM", "SIGTERM"]


def test_kill_ends_an_owner_that_does_not_listen(project: Project) -> None:
    process, worker = start_deaf(project)
    os.kill(process.pid, signal.SIGSTOP)  # so that it is not the supervisor that ends the worker
    os.kill(worker, signal.SIGSTOP)
    ended = project.run("cancel", "--kill", "sync")
    assert (ended.code, ended.out) == (0, f"run {run_id(project)} of sync is cancelled\n")
    assert is_gone(worker)
    assert not is_locked(project)
    assert run_row(project)[0] == "cancelled"
    assert rows(project, "SELECT generation > 1 FROM run") == [(1,)]
    assert sent(project)[:2] == ["SIGTERM", "SIGTERM"]
    project.finish(process)
    write_job(project)
    assert project.run("run", "sync").code == 0


def test_a_frozen_owner_is_reported_and_ended_by_kill_alone(project: Project) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at("commit.prepared@2=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the worker to freeze")
    os.kill(process.pid, signal.SIGSTOP)
    shown = project.run("cancel", "sync")
    assert shown.out == (
        f"run {run_id(project)} of sync will be cancelled at its next safe point\n"
        f"Process {process.pid} is stopped (SIGSTOP, or a debugger).\n"
        f"to end it: batchrun cancel --kill {run_id(project)}\n"
    )
    assert is_stopped(worker)
    assert project.run("run", "sync").code == 11
    assert project.run("cancel", "sync", "--kill").code == 0
    assert run_row(project)[0] == "cancelled"
    assert is_gone(worker)
    project.finish(process)
    assert records(project) == list(range(1, 11)), "it was let go on to its safe point"


def test_kill_of_a_run_that_nobody_owns_signals_nobody(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    me = Host().identify()
    assert me is not None
    rows(project, f"UPDATE attempt SET supervisor = json_set(supervisor, '$.pid', {me.pid})")
    ended = project.run("cancel", "--kill", "sync")
    assert (ended.code, sent(project)) == (0, [])
    assert run_row(project)[0] == "cancelled"


@contextlib.contextmanager
def gone_on_elsewhere(project: Project) -> Iterator[None]:
    """Let a run rest whose supervisor has gone on to another; meanwhile we hold its job's lock."""
    elsewhere, lock = subprocess.Popen(["sleep", "60"]), JobLock(project.state / "locks/sync.lock")
    found = Host().identify(elsewhere.pid)
    assert found is not None
    rows(project, f"UPDATE attempt SET supervisor = '{json.dumps(found._asdict())}'")
    assert lock.acquire()
    try:
        yield
    finally:
        lock.release()
        elsewhere.kill()
        elsewhere.wait()


def test_kill_signals_no_supervisor_that_has_gone_on_to_another_run(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    with gone_on_elsewhere(project):
        killing = project.start("cancel", "--kill", "sync")
        wait_for(lambda: "waiting" in error_output(project, killing), "it to wait")
    ended = project.finish(killing)
    assert (ended.code, ended.err) == (0, f"waiting for pid {os.getpid()}\n")
    assert (run_row(project)[0], sent(project)) == ("cancelled", [])


def test_who_is_refused_as_busy_is_told_of_the_process_that_has_the_lock(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    with gone_on_elsewhere(project):
        for sql in ("SELECT 1", "UPDATE attempt SET supervisor = json_set(supervisor, '$.pid', 0)"):
            rows(project, sql)  # at another run, or gone
            ended = project.run("-v", "run", "sync")
            assert ended.code == 11
            assert f"sync is busy: pid {os.getpid()} (for " in ended.err
            assert "which a killed supervisor left behind" not in ended.err


def test_kill_never_signals_another_process_that_has_the_number_now(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    worker = worker_of(process)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        sql = "UPDATE attempt SET worker = json_set(worker, '$.pid', {})"
        rows(project, sql.format(stranger.pid))
        let_go(project)
        assert project.run("cancel", "--kill", "sync").code == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert is_gone(worker)
    project.finish(process)


def test_kill_signals_nobody_who_only_has_the_lock_file_open(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    with (project.state / "locks" / "sync.lock").open() as lock:
        stranger = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    try:
        waiting = project.start("cancel", "--kill", "sync")
        wait_for(lambda: sent(project), "the first signal")
        let_go(project)
        assert project.finish(waiting).code == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    project.finish(process)


def test_kill_ends_children_of_the_worker_that_hold_the_lock(project: Project) -> None:
    fork = "os.fork() or time.sleep(600)"
    write_job(project, f"({fork}, {DEAF})")
    project.write(CONFIG.replace("30s", "300ms"))
    process = start_held(project)
    worker = worker_of(process)
    (child,) = map(int, Path(f"/proc/{worker}/task/{worker}/children").read_text().split())
    process.kill()  # or it would end them itself
    project.finish(process)
    assert project.run("cancel", "--kill", "sync").code == 0
    wait_for(lambda: is_gone(child), "the child to be gone")


def test_a_run_that_was_recorded_as_done_is_not_cancelled_afterwards(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("worker.ended=kill-both"))
    ended = project.run("cancel", "--kill", "sync")
    assert (ended.code, ended.out) == (0, f"run {run_id(project)} of sync has succeeded\n")
    assert run_row(project)[0] == "succeeded"


# --- pausing what nobody runs -------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "state").mkdir(mode=0o700)
    return open_ledger(tmp_path / "state" / "ledger.db", Host(), create=True)


def test_pausing_an_idle_run_leaves_one_event_that_tells_the_truth(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.pause(run, "a person")
    said = [(event.what, event.why) for event in ledger.events()[-2:]]
    assert said[0][0] == "interrupted"
    assert said[1] == ("paused (person)", "a person paused it; it was interrupted")
    assert "reserved" not in [event.what for event in ledger.events()]
    ledger.close()


@pytest.mark.parametrize("state", [RunState.WAITING, RunState.AWAITING])
def test_pausing_a_run_that_waits_keeps_its_state_and_the_wish(
    ledger: Ledger, state: RunState
) -> None:
    columns = {"id": "r1", "job": "sync", "created_at": "", "changed_at": ""}
    key = ledger._insert("run", state="waiting", **columns)
    if state == RunState.AWAITING:
        ledger._set("run", {"key": key}, state="reserved")
        ledger._set("run", {"key": key}, state=state, reason=Reason.APPROVAL)
    ledger.pause(ledger.run(key), "a person")
    run = ledger.run(key)
    assert (run.state, run.request) == (state, "pause")
    assert [event.what for event in ledger.events()] == ["requested: pause"]
    ledger.close()


def test_a_run_paused_while_idle_goes_on_by_a_person(project: Project) -> None:
    write_job(project, "raise ValueError('no')")
    assert project.run("run", "sync").code == 1
    shown = project.run("pause", "sync")
    assert shown.out == f"run {run_id(project)} of sync is paused\n"
    told = project.run("status", "sync").out
    assert "ValueError: no" in told, told  # the failure that it was paused on
    write_job(project)
    assert project.run("run", "sync").code == 13
    finish_after(project, 0)
    assert done(project)[-1] == "released 1"


@pytest.mark.parametrize(
    ("wish", "following"), [("pause", "pause --wait"), ("cancel", "cancel --kill")]
)
def test_what_is_asked_of_a_run_is_shown_with_what_to_type_next(
    project: Project, wish: str, following: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    project.run(wish, "sync")
    shown = project.run("status", "sync").out
    assert f"It stops at its next safe point: {wish} is asked for." in shown
    assert f"to type: batchrun {following} {run_id(project)}\n" in shown
    let_go(project)
    project.finish(process)


@pytest.mark.parametrize(
    ("wish", "held", "verb"),
    [
        ("pause", "A pause was asked for; only batchrun resume {} goes on.", "resume"),
        ("cancel", "A cancel was asked for, and is not done yet.", "cancel"),
        ("drain", "", "resume"),
    ],
)
def test_what_was_asked_of_a_run_whose_owner_is_gone_is_shown_as_it_is(
    project: Project, wish: str, held: str, verb: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    worker = worker_of(process)
    if wish == "drain":
        rows(project, "UPDATE run SET request = 'drain'")
    else:
        project.run(wish, "sync")
    for pid in (process.pid, worker):
        os.kill(pid, signal.SIGKILL)
    project.finish(process)
    shown = project.run("status", "sync").out
    lines = [line.strip().removeprefix("why").strip() for line in shown.splitlines()]
    asked = [line for line in lines if " asked for" in line]
    assert asked == [held.format(run_id(project))] * bool(held)
    assert shown.endswith(f"to type: batchrun {verb} {run_id(project)}\n")
