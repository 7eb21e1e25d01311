"""Cleanups are real: each is tried, in reverse order, in time, and also after a kill -9."""

import contextlib
import fcntl
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from conftest import Ended, Project, clean_environment, wait_for
from test_12_attempts import CLOCK, FAST
from test_12_supervisor import is_locked, launch_with

import batchrun

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
stop_grace = "{grace}"
cleanup_timeout = "{limit}"
[jobs.sync]
"""

# Three scratch tables and between them other releases; what is done is a line in done.txt. A table
# that an earlier attempt left there would stop this one: CREATE TABLE does not take it well.
JOB = """\
import contextlib, fcntl, os, signal, time
from pathlib import Path
import apsw
from batchrun import job

def note(text):
    with open("done.txt", "a") as file:
        print(text, file=file)

def hold(name):
    Path(name + ".reached").touch()
    while not Path(name).exists():
        time.sleep(0.002)

def ask(sql):
    with contextlib.closing(apsw.Connection("stock.db")) as stock:
        stock.set_busy_timeout(10_000)
        stock.execute(sql)

def drop(*, table):
    ask(f"DROP TABLE IF EXISTS {table}")
    note(f"dropped {table}")
    DROPPING

@job
def sync(ctx):
    for number in (1, 2, 3):
        ctx.on_exit(note, f"released {number}")
        ctx.cleanup(drop, table=f"scratch_{number}")
        ask(f"CREATE TABLE scratch_{number} (sku TEXT)")
    BEFORE
    for batch in ctx.batches(range(10)):
        if batch.number == 2:
            INSIDE
        yield batch
"""
IN_ORDER = [f"{what}{number}" for number in (3, 2, 1) for what in ("dropped scratch_", "released ")]
PENDING = "SELECT count(*) FROM cleanup WHERE done_at IS NULL"


class Shop:
    """A project with the job above, run by real processes."""

    def __init__(self, project: Project) -> None:
        self.project, self.folder = project, project.folder

    def write(
        self,
        *,
        before: str = "pass",
        inside: str = "pass",
        dropping: str = "pass",
        grace: str = "30s",
        limit: str = "20s",
    ) -> None:
        """Write the job with something done before its loop, in batch 2, or in each cleanup."""
        text = JOB.replace("BEFORE", before).replace("INSIDE", inside)
        config = CONFIG.format(grace=grace, limit=limit)
        self.project.write(config, sync=text.replace("DROPPING", dropping))

    def run(self, *words: str, point: str = "") -> Ended:
        """Run a command, `run sync` if none is given, to its end."""
        return self.project.finish(self.start(*words, point=point))

    def start(self, *words: str, point: str = "") -> subprocess.Popen[str]:
        environment = {**clean_environment(), "BATCHRUN_TEST_POINT": point}
        return self.project.start(*(words or ("run", "sync")), env=environment)

    def start_held(self) -> subprocess.Popen[str]:
        """Start the job and return when it has come to a `hold("go")`."""
        process = self.start()
        self.wait_for_file("go.reached")
        return process

    def wait_for_file(self, name: str) -> None:
        wait_for((self.folder / name).exists, name)

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def done(self) -> list[str]:
        """Return what was done, in order, and forget it."""
        path = self.folder / "done.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def tables(self) -> int:
        """Return how many scratch tables there are."""
        return int(self._ask("stock.db", "SELECT count(*) FROM sqlite_schema")[0][0])

    def rows(self, sql: str) -> list[Any]:
        """Ask the ledger."""
        return self._ask("state/ledger.db", sql)

    def pending(self) -> int:
        return int(self.rows(PENDING)[0][0])

    def run_id(self) -> str:
        """Return the id of the newest run."""
        return str(self.rows("SELECT id FROM run ORDER BY key DESC")[0][0])

    def state(self) -> str:
        return str(self.rows("SELECT state FROM run ORDER BY key DESC")[0][0])

    def _ask(self, name: str, sql: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.folder / name)) as connection:
            return connection.execute(sql).fetchall()

    def require_all_clean(self) -> None:
        """Check that every table that was made is gone, and that every row is done."""
        assert (self.tables(), self.pending()) == (0, 0)


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


def worker_of(process: subprocess.Popen[str]) -> int:
    """Return the pid of a supervisor's worker."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(wait_for(lambda: path.read_text().split(), "a worker")[0])


@contextlib.contextmanager
def killed(shop: Shop) -> Iterator[str]:
    """Give the id of a run that was killed with three tables there, and forget what was done."""
    shop.write(inside="os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)")
    assert shop.run().code == -signal.SIGKILL
    wait_for(lambda: not shop.project.living(), "the worker to be gone")
    shop.done()
    assert (shop.tables(), shop.pending()) == (3, 3)
    yield shop.run_id()


# --- the order ------------------------------------------------------------------------------------


def test_recorded_cleanups_and_other_releases_run_in_one_reverse_order(shop: Shop) -> None:
    shop.write()
    assert shop.run().code == 0
    assert shop.done() == IN_ORDER
    shop.require_all_clean()
    report = shop.run("report", "sync").out
    assert re.search(r"\n1\.\d +sync:drop\(table='scratch_3'\) +\S+ ms\n", report), report
    line = r"3   sync:drop\(table='scratch_3'\) +\d{4}-\d\d-\d\d \S+Z +\S+ ms\n"
    assert re.search(f"Recorded cleanups\n(?:.*\n){{3}}{line}", report), report


OF_RUN = "[ctx.on_finish(drop, table=f'scratch_{n}') for n in (8, 9)]"


def test_what_belongs_to_the_run_is_released_after_all_else_and_in_reverse_order(
    shop: Shop,
) -> None:
    shop.write(before=OF_RUN)
    assert shop.run().code == 0
    assert shop.done() == [*IN_ORDER, "dropped scratch_9", "dropped scratch_8"]


def test_what_belongs_to_the_run_outlives_an_attempt_that_fails(shop: Shop) -> None:
    shop.write(before=OF_RUN, inside="1 / 0")
    assert shop.run().code == 1
    assert (shop.done(), shop.pending()) == (IN_ORDER, 2)
    shop.write(before=OF_RUN)
    assert shop.run().code == 0
    assert shop.done() == [*IN_ORDER, "dropped scratch_9", "dropped scratch_8"]
    assert shop.pending() == 0


def test_a_cancel_releases_what_belongs_to_the_run_in_reverse_order(shop: Shop) -> None:
    shop.write(before=OF_RUN, inside="1 / 0")
    shop.run()
    assert shop.done() == IN_ORDER
    assert shop.run("cancel", "sync").code == 0
    assert shop.done() == ["dropped scratch_9", "dropped scratch_8"]


WAITS: dict[str, dict[str, str]] = {
    "before batch 1": {"before": "hold('go')"},
    "in a batch": {"inside": "hold('go')"},
    "while it waits for a lock": {
        "inside": "Path('go.reached').touch(); fcntl.flock(os.open('lock', os.O_RDWR), 2)"
    },
}


@pytest.mark.parametrize("where", WAITS)
def test_a_stop_runs_every_cleanup_wherever_it_meets_the_job(shop: Shop, where: str) -> None:
    """K07. Cleaning up takes longer than the stop's own grace, and is not cut short by it."""
    shop.write(**WAITS[where], dropping="time.sleep(0.25)", grace="300ms")
    with (shop.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = shop.start_held()
        process.send_signal(signal.SIGTERM)
        assert shop.project.finish(process).code == 75
    assert shop.done() == IN_ORDER
    shop.require_all_clean()


# --- a kill at every point ------------------------------------------------------------------------


POINTS = [
    *(f"cleanup.recorded@{number}" for number in (1, 3)),
    "batch.handed_out@1",
    "batch.yielded@2",
    *(f"cleanup.{what}" for what in ("begun", "called", "done")),
    *(f"cleanup.{what}@2" for what in ("begun", "called", "done")),
    "worker.ended",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_nothing_that_the_next_attempts_do_not_remove(
    shop: Shop, point: str
) -> None:
    shop.write()
    anywhere = point.partition("@")[0]
    assert shop.run(point=f"{point}=kill").code in (0, 1)  # after the ending it is no failure
    again = shop.run(point=f"{anywhere}=kill")
    assert again.code in (0, 1), again
    ended = shop.run()
    assert (ended.code, shop.state()) == (0, "succeeded"), ended
    shop.require_all_clean()


def test_what_a_killed_attempt_left_is_removed_before_the_job_s_first_line(shop: Shop) -> None:
    with killed(shop) as run:
        shop.write(before="note('begun')")
        ended = shop.run("resume", run, "-v")
    assert ended.code == 0
    assert "3 cleanups were left by an earlier attempt: called\n" in ended.err
    dropped = [line for line in IN_ORDER if line.startswith("dropped")]
    assert shop.done() == [*dropped, "begun", *IN_ORDER]
    shop.require_all_clean()


HOURS = (
    CLOCK.rpartition("batchrun.Ledger")[0]
    + """
def releases_until(self, run, known=batchrun.Ledger.releases_until):
    return known(self, run) and float("inf")  # a moment on the worker's own, slow clock

batchrun.Ledger.releases_until = releases_until
"""
)
TAKES_LONG = """
    Path("hang.reached").write_text(str(os.getpid()))
    time.sleep(0.3)
    Path("hang.reached").unlink()"""


def test_the_time_of_what_was_left_is_not_the_first_batch_s(shop: Shop) -> None:
    with killed(shop) as run:
        shop.write(before="time.sleep(0.5)", dropping=TAKES_LONG)
        shop.project.write_file("clock.py", HOURS)
        ended = shop.project.run("resume", run, launch=FAST)
    assert ended.code == 0, ended.err
    assert shop.rows("SELECT count(*) FROM attempt WHERE ending = 'overdue'") == [(0,)]


def test_a_stop_while_what_was_left_is_removed_does_not_reach_the_job(shop: Shop) -> None:
    with killed(shop):
        told = "stop = signal.getsignal(15)"
        heard = "signal.signal(15, lambda *_: (Path('told').touch(), stop()))"
        shop.write(before="note('begun')", dropping=f"{told}; {heard}; hold('go')")
        process = shop.start_held()
        process.send_signal(signal.SIGTERM)
        shop.wait_for_file("told")
        shop.let_go()
        assert shop.project.finish(process).code == 75
    assert "begun" not in shop.done()
    shop.require_all_clean()


# --- in time --------------------------------------------------------------------------------------


def test_a_release_that_hangs_is_cut_off_and_the_next_ones_run(shop: Shop) -> None:
    shop.write(dropping="while table == 'scratch_2': time.sleep(60)", limit="200ms")
    ended = shop.run()
    assert ended.code == 3
    error = "TimeoutError: did not end within 0.2 s"
    failed = f"A cleanup failed: sync:drop(table='scratch_2'): {error}.\n"
    assert ended.err == f"Everything was committed.\n{failed}"
    assert shop.done() == IN_ORDER
    assert shop.rows("SELECT error FROM cleanup WHERE done_at IS NULL") == [(error,)]


def test_a_release_is_cut_off_in_the_same_interpreter_too(shop: Shop) -> None:
    shop.write(limit="200ms", before="ctx.on_exit(time.sleep, 60)")
    ended = shop.run("run", "sync", "--in-process")
    assert ended.code == 3
    assert ended.err == (
        "Everything was committed.\n"
        "A cleanup failed: sleep: TimeoutError: did not end within 0.2 s.\n"
    )
    shop.require_all_clean()


def test_a_cleanup_that_no_time_limit_reaches_is_killed_and_called_by_the_next_attempt(
    shop: Shop,
) -> None:
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60)); time.sleep(600)"
    shop.write(dropping=deaf, limit="200ms", grace="200ms")
    ended = shop.run()
    assert ended.code == 1
    assert "\nThe worker did not end its cleanups, and was killed, during the cleanup " in ended.err
    error = "the process ended during the call"
    assert shop.rows("SELECT id, error FROM cleanup WHERE error IS NOT NULL") == [(3, error)]
    shop.write()
    assert shop.run().code == 0
    shop.require_all_clean()


def is_over(until: float) -> bool:
    return time.monotonic() >= until


def stop(process: subprocess.Popen[str], *, times: int) -> None:
    """Send so many stops; two signals within a second are one stop."""
    for number in range(times):
        until = time.monotonic() + 1.05 * bool(number)
        wait_for(partial(is_over, until), "another second")
        process.send_signal(signal.SIGTERM)


def test_a_second_stop_does_not_cut_a_cleanup_short(shop: Shop) -> None:
    shop.write(before="ctx.on_exit(hold, 'go')", grace="30s")
    process = shop.start_held()
    os.kill(worker_of(process), signal.SIGUSR1)  # what a second stop sends at other times
    stop(process, times=2)
    shop.let_go()
    assert shop.project.finish(process).code == 0  # it had committed everything before
    assert shop.done() == IN_ORDER
    shop.require_all_clean()


def test_a_third_stop_ends_a_cleanup_which_the_next_attempt_calls(shop: Shop) -> None:
    shop.write(dropping="hold('go')")
    process = shop.start_held()
    stop(process, times=3)
    assert shop.project.finish(process).code == 75
    shop.write()
    assert shop.run().code == 0
    shop.require_all_clean()


# --- errors --------------------------------------------------------------------------------------


FAILS_2 = "if table == 'scratch_2': raise OSError('E2')"


def test_an_error_of_a_cleanup_is_attached_to_the_job_s_own(shop: Shop) -> None:
    """K30."""
    shop.write(inside="raise ValueError('E1')", dropping=FAILS_2)
    ended = shop.run()
    assert ended.code == 1
    assert (
        "The job raised ValueError: E1 in batch 2.\n"
        "A cleanup failed: sync:drop(table='scratch_2'): OSError: E2.\n"
    ) in ended.err
    assert shop.done() == IN_ORDER
    assert shop.pending() == 1


def test_a_cleanup_that_failed_is_tried_again_and_the_job_goes_on_meanwhile(shop: Shop) -> None:
    with killed(shop):
        shop.write(dropping=FAILS_2)
        ended = shop.run()
    failed = "sync:drop(table='scratch_2'): OSError: E2"
    assert ended.code == 3  # it failed before the job's first line, and again at its end
    assert f"A cleanup failed: {failed}; {failed}.\n" in ended.err
    assert shop.rows("SELECT id, error FROM cleanup WHERE error IS NOT NULL ORDER BY id") == [
        (2, "recorded anew: 5"),
        (5, "OSError: E2"),
    ]
    found = shop.run("check")
    what = f"run {shop.run_id()} of sync: the cleanup sync:drop(table='scratch_2') is pending"
    letting_go = f"cancel {shop.run_id()} --forget-cleanups WHY"
    todo = f"to type: batchrun cancel {shop.run_id()}, or {letting_go}\n"
    assert (found.code, found.out) == (3, f"{what}\n  OSError: E2\n  {todo}")
    status = shop.run("status", "sync")
    assert status.code == 3
    assert status.out.endswith(f"{what}: OSError: E2\n{todo}")
    assert re.search(r"\n  cleanups +\d+ done, 1 PENDING\n", status.out)
    report = shop.run("report", "sync").out
    assert re.search(
        r"\n5 +sync:drop\(table='scratch_2'\) +PENDING +\S+ m?s +OSError: E2\n", report
    )
    shop.write()
    assert shop.run().code == 0  # the next run of the job calls it first
    shop.require_all_clean()


def test_a_cleanup_that_failed_in_a_run_that_succeeded_can_be_called_by_hand(shop: Shop) -> None:
    shop.write(dropping=FAILS_2)
    assert shop.run().code == 3
    shop.write()
    ended = shop.run("cancel", shop.run_id())
    assert (ended.code, ended.out) == (0, f"run {shop.run_id()} of sync has succeeded\n"), ended
    shop.require_all_clean()


# --- runs that do not go on ----------------------------------------------------------------------


def test_a_cancel_first_lets_a_worker_call_the_cleanups(shop: Shop) -> None:
    with killed(shop) as run:
        ended = shop.run("cancel", "sync")
    assert (ended.code, ended.out) == (0, f"run {run} of sync is cancelled\n"), ended
    assert shop.done() == [line for line in IN_ORDER if line.startswith("dropped")]
    assert shop.state() == "cancelled"
    assert shop.rows("SELECT ending FROM attempt ORDER BY generation") == [
        ("died",),
        ("cleaned up",),
    ]
    shop.require_all_clean()


FAILS_TO_SHOW = """\
def progress(console, run):
    if os.path.exists("go.reached"):
        raise batchrun.Busy("The terminal is gone.")

batchrun.Console.progress = progress
"""


def test_a_cancel_that_cannot_go_on_keeps_its_lock_while_its_worker_lives(shop: Shop) -> None:
    with killed(shop) as run:
        shop.write(dropping="hold('go')")
        shop.project.write_file("show.py", FAILS_TO_SHOW)
        launch = launch_with("exec(open('show.py').read())")
        ended = shop.project.run("cancel", run, launch=launch)
        assert (ended.code, ended.err) == (11, "The terminal is gone.\n")
        assert is_locked(shop.project)
        shop.let_go()
    wait_for(lambda: not shop.project.living(), "the worker to be gone")
    assert not is_locked(shop.project)


def test_a_cleanup_that_fails_stops_no_cancel_and_stays_named(shop: Shop) -> None:
    with killed(shop) as run:
        shop.write(dropping=FAILS_2)
        ended = shop.run("cancel", run)
    assert (ended.code, ended.out) == (3, f"run {run} of sync is cancelled\n")
    assert ended.err == (
        "A cleanup failed: sync:drop(table='scratch_2'): OSError: E2.\n"
        f"Run {run} is cancelled; what its cleanups should remove may still be there.\n"
        f"To try again: batchrun cancel {run}\n"
    )
    assert (
        f"to type: batchrun cancel {run}, or cancel {run} --forget-cleanups WHY\n"
        in shop.run("check").out
    )
    shop.write()
    assert shop.run("cancel", run).code == 0
    shop.require_all_clean()
    assert shop.run("cancel", run).out == f"run {run} of sync was cancelled already\n"


def test_a_job_that_cannot_be_imported_is_cancelled_and_its_cleanups_stay_named(
    shop: Shop,
) -> None:
    with killed(shop) as run:
        text = (shop.folder / "jobs" / "sync.py").read_text()
        shop.project.write_file("jobs/sync.py", "import nothing_like_it")
        ended = shop.run("cancel", run)
    assert ended.code == 3
    assert "ModuleNotFoundError: No module named 'nothing_like_it' (line 1)\n" in ended.err
    assert (shop.state(), shop.pending()) == ("cancelled", 3)
    found = shop.run("check")
    assert found.out.count("the run is cancelled and nothing has called it\n") == 3
    shop.project.write_file("jobs/sync.py", text)
    assert shop.run("cancel", run).code == 0
    shop.require_all_clean()


def test_a_fresh_start_calls_what_the_cancelled_run_left(shop: Shop) -> None:
    with killed(shop):
        shop.write(before="note('begun')")
        assert shop.run("run", "sync", "--fresh").code == 0
    dropped = [line for line in IN_ORDER if line.startswith("dropped")]
    assert shop.done() == [*dropped, "begun", *IN_ORDER]
    assert [state for (state,) in shop.rows("SELECT state FROM run ORDER BY key")] == [
        "cancelled",
        "succeeded",
    ]
    shop.require_all_clean()


def test_a_cancel_that_was_killed_is_taken_up_by_the_tick(shop: Shop) -> None:
    with killed(shop):
        assert shop.run("cancel", "sync", point="cleanup.begun=kill-both").code == -signal.SIGKILL
    assert shop.state() == "interrupted"
    assert shop.run("resume", "--all").code == 0
    assert shop.state() == "cancelled"
    shop.require_all_clean()


def test_a_cancel_calls_the_cleanups_under_maintenance_too(shop: Shop) -> None:
    with killed(shop) as run:
        (shop.folder / "state" / "maintenance.lock").touch()
        ended = shop.run("cancel", "sync")
    assert (ended.code, ended.out, ended.err) == (0, f"run {run} of sync is cancelled\n", "")
    shop.require_all_clean()


def test_the_tick_calls_no_cleanup_under_maintenance(shop: Shop) -> None:
    with killed(shop):
        assert shop.run("cancel", "sync", point="cleanup.begun=kill-both").code == -signal.SIGKILL
    (shop.folder / "state" / "maintenance.lock").touch()
    assert shop.run("resume", "--all").code == 0
    assert (shop.state(), shop.tables()) == ("interrupted", 3)


@pytest.mark.parametrize(
    "where",
    [
        {"inside": "hold('go'); raise ValueError('E1')"},
        {"inside": "raise ValueError('E1')", "before": "ctx.on_exit(hold, 'go')"},
    ],
    ids=["in a batch", "in a release"],
)
def test_who_has_lost_the_run_leaves_its_cleanups_to_the_owner(
    shop: Shop, where: dict[str, str]
) -> None:
    shop.write(**where)
    process = shop.start_held()
    with contextlib.closing(sqlite3.connect(shop.folder / "state" / "ledger.db")) as ledger:
        ledger.execute("UPDATE run SET generation = generation + 1")
        ledger.commit()
    shop.let_go()
    assert shop.project.finish(process).code == 14
    (log,) = (shop.folder / "state").rglob(f"{shop.run_id()}.log")
    lines = [line.partition(" ERROR ")[2] for line in log.read_text().splitlines()]
    raised = lines.index("The job raised ValueError: E1 in batch 2.")
    assert lines[raised + 1].startswith("Lost ownership of run")
    assert shop.done() == ["released 3", "released 2", "released 1"]
    assert (shop.tables(), shop.pending()) == (3, 3)


def test_who_must_not_write_any_more_leaves_its_cleanups_to_the_next_attempt(shop: Shop) -> None:
    shop.write()
    assert shop.run(point="checkpoint.rename@1=EIO").code == 5  # its outcome is unknown
    assert shop.done() == ["released 3", "released 2", "released 1"]
    assert shop.pending() == 3
    assert shop.run().code == 0
    shop.require_all_clean()


def test_registered_twice_in_an_attempt_it_is_called_once(shop: Shop) -> None:
    shop.write(before="ctx.cleanup(drop, table='scratch_1')")
    assert shop.run().code == 0
    assert shop.done() == IN_ORDER


# --- what can be recorded ------------------------------------------------------------------------


def drop(*, table: str) -> None:
    """Be a function that can be a cleanup."""


def ask() -> Iterator[None]:
    """Be a function whose call runs nothing."""
    yield


def moved() -> None:
    """Be a function that is not found under its name any more."""


FORMER, moved = moved, drop  # type: ignore[assignment]
HERE = __name__


def inner() -> Callable[[], None]:
    def made() -> None:
        pass

    return made


class Table:
    """Has a method, which is found by no name of its module."""

    def drop(self) -> None:
        pass


def in_main() -> Any:  # noqa: ANN401 - a function of another module
    function = FunctionType(drop.__code__, {})
    function.__module__, function.__qualname__ = "__main__", "drop"
    return function


UNFIT: list[tuple[Any, str, str]] = [
    (lambda: None, f"{HERE}:<lambda>", "it is a lambda"),
    (inner(), f"{HERE}:inner.<locals>.made", "it is defined inside something else"),
    (Table().drop, f"{HERE}:Table.drop", "it is no plain function"),
    (Table.drop, f"{HERE}:Table.drop", "it is defined inside something else"),
    (Table, f"{HERE}:Table", "it is no plain function"),
    (partial(drop, table="t"), "A partial", "it is no plain function"),
    (in_main(), "__main__:drop", "it stands in __main__"),
    (FORMER, f"{HERE}:moved", "its module has something else under this name"),
    (ask, f"{HERE}:ask", "calling it would not run it yet"),
]


def test_an_argument_without_a_name_is_refused_and_no_try_is_charged(shop: Shop) -> None:
    shop.write(before="ctx.cleanup(drop, 'scratch_1')")
    ended = shop.run()
    assert ended.code == 1
    assert (
        "The cleanup sync:drop cannot have these arguments: 1 of them has no name.\n"
        "They are kept in the ledger as JSON, and given back to the function by name.\n"
    ) in ended.err


@pytest.mark.parametrize(("function", "name", "reason"), UNFIT)
def test_a_function_that_another_process_could_not_find_is_refused(
    function: Any,  # noqa: ANN401 - whatever a job passes
    name: str,
    reason: str,
) -> None:
    with pytest.raises(batchrun.JobError) as refused:
        batchrun.require_recordable(function, {})
    assert str(refused.value) == (
        f"{name} cannot be a cleanup: {reason}.\n"
        "Another process may have to call it, knowing only its name and its arguments.\n"
        "Nothing more was committed.\n"
        "Use a plain function at the top level of a module: def drop(*, table): ..."
    )


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"table": Path("t")}, "they are no JSON"),
    ({"table": float("nan")}, "they are no JSON"),
    ({"table": batchrun.Secret("hunter2")}, "they are no JSON"),
    ({"table": ("a", "b")}, "JSON gives back others"),
    ({"table": {1: "a"}}, "JSON gives back others"),
    ({"table": "postgres://me:hunter2@host/db"}, "a secret is among them"),
    ({}, "missing a required argument: 'table'"),
    ({"table": "t", "schema": "s"}, "got an unexpected keyword argument 'schema'"),
]


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS)
def test_arguments_that_another_process_would_not_get_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(batchrun.JobError) as refused:
        batchrun.require_recordable(drop, arguments)
    assert str(refused.value) == (
        f"The cleanup {HERE}:drop cannot have these arguments: {reason}.\n"
        "They are kept in the ledger as JSON, and given back to the function by name.\n"
        "Nothing more was committed.\n"
        "Use None, text, numbers, lists and dicts with text keys;"
        " secrets the function finds itself."
    )


def test_functions_of_other_modules_and_builtins_can_be_cleanups() -> None:
    assert batchrun.require_recordable(os.unlink, {"path": "t"}) == "posix:unlink"
    assert batchrun.require_recordable(os.removedirs, {"name": "t"}) == "os:removedirs"


def test_a_refused_cleanup_cannot_be_swallowed_and_nothing_is_recorded(shop: Shop) -> None:
    shop.write(before="with contextlib.suppress(Exception): ctx.cleanup(lambda: None)")
    ended = shop.run()
    assert ended.code == 1
    assert "sync:sync.<locals>.<lambda> cannot be a cleanup" in ended.err
    assert shop.rows("SELECT count(*) FROM cleanup") == [(3,)]
    shop.require_all_clean()


# --- a cleanup that takes its process along -------------------------------------------------------


KILLS = "if table == 'scratch_2': os.kill(os.getpid(), 9)"
CATCHES = """\
while table == 'scratch_2':
        try: time.sleep(600)
        except BaseException: pass"""
AGAIN = {
    KILLS: "its process ended during the call",
    CATCHES: "TimeoutError: did not end within 0.3 s",
}


@pytest.mark.parametrize(("dropping", "error"), AGAIN.items())
def test_a_cleanup_that_takes_its_process_along_keeps_no_run_from_its_batches(
    shop: Shop, dropping: str, error: str
) -> None:
    with killed(shop) as run:
        shop.write(dropping=dropping, limit="300ms", grace="300ms")
        first, ended = shop.run(), shop.run()
    call = "sync:drop(table='scratch_2')"
    assert f" during the cleanup {call} of run {run}. All records committed stand.\n" in first.err
    assert (first.code, ended.code, shop.state()) == (1, 3, "succeeded"), (first, ended)
    assert f"A cleanup failed: {call}: {error}; {call}: {error}.\n" in ended.err
    assert "dropped scratch_1" in shop.done()
    found = shop.run("check").out
    assert f"\n  {error}\n" in found
    assert f"batchrun cancel {run}, or cancel {run} --forget-cleanups WHY\n" in found
    assert shop.run().code == 3  # tomorrow's run
    assert shop.rows("SELECT state FROM run") == [("succeeded",), ("succeeded",)]


def test_a_cleanup_that_kills_its_process_at_the_end_charges_no_batch(shop: Shop) -> None:
    config = CONFIG.format(grace="30s", limit="20s")
    job = JOB.replace("DROPPING", KILLS).replace("BEFORE", "pass").replace("INSIDE", "pass")
    config = config.replace("[jobs", 'max_tries = 1\nretry_for = "0"\n[jobs')
    shop.project.write(config, sync=job)
    ended = shop.run()
    assert "No batch was open, and retry_for is reached.\nThe last time: " in ended.err, ended
    again = shop.run("resume", shop.run_id())
    assert (again.code, shop.state()) == (3, "succeeded"), again


def test_a_person_can_let_the_cleanups_of_a_run_go(shop: Shop) -> None:
    shop.write(dropping=FAILS_2)
    assert shop.run().code == 3
    run = shop.run_id()
    ended = shop.run("cancel", run, "--forget-cleanups", "dropped it by hand")
    assert (ended.code, ended.out) == (0, f"run {run} of sync has succeeded already\n"), ended
    [(error,)] = shop.rows("SELECT error FROM cleanup WHERE id = 2 AND done_at IS NOT NULL")
    assert re.fullmatch(r"let go by .+: dropped it by hand", error)
    assert shop.run("check").code == 0
