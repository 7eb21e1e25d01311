"""The worker: one attempt, from its first batch to its last release, whatever happens between."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import LAUNCH, Ended, Project, clean_environment, wait_for

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
stop_grace = "30s"
[jobs.sync]
"""

# Ten records in two batches; what is done is a line in a file. `hold` waits until a file is there.
JOB = """\
import os, time
from pathlib import Path
from batchrun import job

def hold(name):
    Path(name + ".reached").touch()
    while not Path(name).exists():
        time.sleep(0.002)

def done(record):
    with open("done.txt", "a") as file:
        file.write(f"{record}\\n")

@job
def sync(ctx):
    for number in (1, 2, 3):
        ctx.on_exit(lambda number=number: done(f"released {number}"))
    for batch in ctx.batches(list(range(1, 11))):
        for record in batch:
            if record == 8: BEFORE_8
            done(record)
        AFTER
        yield batch
"""


def write_job(project: Project, before_8: str = "pass", after: str = "pass") -> None:
    """Write the job with something done before record 8, or at the end of each batch."""
    text = JOB.replace("BEFORE_8", before_8).replace("AFTER", after)
    project.write(CONFIG, sync=text)


def at(point: str) -> Mapping[str, str]:
    """Return an environment with a named point."""
    return {**clean_environment(), "BATCHRUN_TEST_POINT": point}


def done(project: Project) -> list[str]:
    """Return what was done, in order."""
    path = project.folder / "done.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def records(project: Project) -> list[int]:
    """Return the records that were processed, in order."""
    return [int(line) for line in done(project) if line.isdecimal()]


def rows(project: Project, sql: str) -> list[Any]:
    """Return rows of the ledger."""
    connection = apsw.Connection(str(project.state / "ledger.db"))
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


def run_row(project: Project) -> tuple[Any, ...]:
    """Return state, reason and number of the newest run."""
    found: tuple[Any, ...] = rows(
        project, "SELECT state, reason, number FROM run ORDER BY key DESC LIMIT 1"
    )[0]
    return found


def worker_of(process: subprocess.Popen[str]) -> int:
    """Return the pid of a supervisor's worker."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(wait_for(lambda: path.read_text().split(), "a worker")[0])


def start_held(project: Project, **how: Any) -> subprocess.Popen[str]:  # noqa: ANN401 - see Project
    """Start the job and return when it waits before record 8."""
    process = project.start("run", "sync", **how)
    reached = project.folder / "go.reached"
    wait_for(reached.exists, "the job to reach record 8")
    return process


def let_go(project: Project) -> None:
    """Let the job go on."""
    (project.folder / "go").touch()


def finish_after(project: Project, code: int) -> Ended:
    """Resume with a job that works, and expect every record to be done."""
    ended = project.run("resume", "sync")
    assert ended.code == code, ended.err
    assert sorted(set(records(project))) == list(range(1, 11))
    return ended


RELEASED = ["released 3", "released 2", "released 1"]


# --- K01, K02, K03: where an attempt that ended goes on ---------------------------------------


@pytest.mark.parametrize(
    ("before", "code", "state"),
    [
        ("raise ValueError('no')", 1, "failed"),
        ("os.kill(os.getpid(), 9)", 1, "failed"),
        ("os._exit(0)", 1, "failed"),
        ("os._exit(5)", 1, "failed"),
        ("__import__('ctypes').string_at(0)", 1, "failed"),
    ],
)
def test_an_attempt_that_ends_inside_a_batch_leaves_that_batch_to_the_next(
    project: Project, before: str, code: int, state: str
) -> None:
    write_job(project, before)
    ended = project.run("run", "sync")
    assert ended.code == code, ended.err
    assert run_row(project) == (state, "", 1)
    assert "Commit 1 stands: 5 records are done." in ended.err
    assert "To go on: batchrun resume" in ended.err
    write_job(project)
    finish_after(project, 0)
    assert records(project) == [*range(1, 8), *range(6, 11)]


@pytest.mark.parametrize(
    ("before", "words", "number"),
    [
        ("os.kill(os.getpid(), 9)", r"was killed by SIGKILL \(.+: peak \d\d MB\)", 9),
        ("os.kill(os.getpid(), 40)", r"was killed by signal 40 \(peak \d\d MB\)", 40),
        ("__import__('ctypes').string_at(0)", r"was killed by SIGSEGV \(peak \d\d MB\)", 11),
        ("os._exit(0)", r"left with exit code 0 and no ending \(peak \d\d MB\)", None),
        ("os._exit(5)", r"left with exit code 5 and no ending \(peak \d\d MB\)", None),
    ],
)
def test_how_the_worker_went_away_is_said_everywhere(
    project: Project, before: str, words: str, number: int | None
) -> None:
    write_job(project, before)
    where = r"batch 2 \(records 6 to 10, loop main, after cursor \S.*\)\."
    said = re.compile(rf"^(.* )?The worker {words} in {where}$", re.MULTILINE)
    for ended in (
        project.run("run", "sync"),
        *(project.run(c, "sync") for c in ("status", "report")),
    ):
        assert said.search(ended.out + ended.err), ended
    ((signal_number, error, peak),) = rows(
        project, "SELECT signal, error, peak_rss_bytes FROM attempt"
    )
    assert (signal_number, bool(said.match(error))) == (number, True)
    assert peak > 10_000_000


def test_a_job_that_raises_before_its_first_batch_leaves_the_checkpoint_as_it_is(
    project: Project,
) -> None:
    write_job(project, "raise ValueError('no')")
    project.run("run", "sync")
    (path,) = (project.state / "checkpoints" / "sync").glob("*.json")
    before = path.read_bytes()
    project.write(CONFIG, sync=JOB.replace("    for number in", "    1 / 0\n    for number in"))
    for _ in range(2):
        assert project.run("run", "sync").code == 1
        assert path.read_bytes() == before
    write_job(project)
    finish_after(project, 0)
    assert records(project) == [*range(1, 8), *range(6, 11)]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6])
def test_every_size_of_a_source_is_read_to_its_end_without_an_empty_batch(
    project: Project, size: int
) -> None:
    text = JOB.replace("range(1, 11)", f"range(1, {size + 1})").replace("BEFORE_8", "pass")
    project.write(CONFIG, sync=text.replace("AFTER", "assert len(batch)"))
    assert project.run("run", "sync", "--in-process").code == 0
    assert records(project) == list(range(1, size + 1))
    assert rows(project, "SELECT state, read, batches FROM run") == [
        ("succeeded", size, -(-size // 5))
    ]
    assert project.run("resume", "sync").code == 0
    assert len(rows(project, "SELECT id FROM run")) == 1


# --- stops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["supervisor", "worker"])
def test_sigterm_ends_the_attempt_at_the_next_safe_point(project: Project, whom: str) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    os.kill(worker_of(process) if whom == "worker" else process.pid, signal.SIGTERM)
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 2)
    assert done(project) == [*map(str, range(1, 11)), *RELEASED]
    finish_after(project, 0)
    assert records(project) == list(range(1, 11))


def test_an_interrupted_batch_is_given_up_and_everything_released_in_reverse(
    project: Project,
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    os.kill(worker_of(process), signal.SIGUSR1)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 1)
    assert done(project) == [*map(str, range(1, 8)), *RELEASED]
    write_job(project)
    finish_after(project, 0)


@pytest.mark.parametrize("catch", ["except BaseException: pass", "except BaseException: 1 / 0"])
def test_a_job_that_swallows_the_interruption_gets_nothing_more_committed(
    project: Project, catch: str
) -> None:
    write_job(project, f"\n                try: hold('go')\n                {catch}")
    process = start_held(project)
    os.kill(worker_of(process), signal.SIGUSR1)
    ended = project.finish(process)
    assert ended.code == 75, ended.err
    assert run_row(project) == ("paused", "stop", 1)
    write_job(project)
    finish_after(project, 0)


def test_batches_are_counted_and_the_attempt_ends_after_so_many(project: Project) -> None:
    write_job(project)
    assert project.run("run", "sync", "--batches", "1").code == 75
    assert run_row(project) == ("paused", "stop", 1)
    assert project.run("run", "sync", "--batches", "1").code == 75
    finish_after(project, 0)
    assert records(project) == list(range(1, 11))


# --- releases ---------------------------------------------------------------------------------


def test_the_error_of_a_cleanup_is_attached_to_the_run_s_error(project: Project) -> None:
    raising = JOB.replace(
        "ctx.on_exit(lambda", "ctx.on_exit(lambda: 1 / 0) if number == 2 else ctx.on_exit(lambda"
    )
    project.write(
        CONFIG, sync=raising.replace("BEFORE_8", "raise ValueError('E1')").replace("AFTER", "0")
    )
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert (
        "The job raised ValueError: E1 in batch 2.\n"
        "A cleanup failed: <lambda>: ZeroDivisionError: division by zero.\n" in ended.err
    )
    assert done(project)[-2:] == ["released 3", "released 1"]


def test_a_success_with_a_failing_cleanup_is_no_plain_success(project: Project) -> None:
    project.write(
        CONFIG,
        sync=JOB.replace("BEFORE_8", "pass")
        .replace("    for batch", "    ctx.on_exit(lambda: 1 / 0)\n    for batch")
        .replace("AFTER", "pass"),
    )
    ended = project.run("run", "sync")
    assert ended.code == 3
    assert ended.err == (
        "Everything was committed.\n"
        "A cleanup failed: <lambda>: ZeroDivisionError: division by zero.\n"
    )
    assert run_row(project) == ("succeeded", "", 3)


def test_an_exception_that_cannot_be_shown_is_still_an_ending(project: Project) -> None:
    write_job(project, "raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})()")
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert "The job raised Mute in batch 2." in ended.err
    assert run_row(project) == ("failed", "", 1)
    assert done(project)[-3:] == RELEASED


def test_a_thread_that_the_job_leaves_behind_does_not_hold_the_worker(project: Project) -> None:
    write_job(project, "__import__('threading').Thread(target=time.sleep, args=(600,)).start()")
    assert project.run("run", "sync", limit_s=20).code == 0


# A mark that takes its time: the database counts to a million whenever one is written.
SLOW_MARK = """
from batchrun import job

SLOW = (
    "CREATE TRIGGER slow AFTER UPDATE OF number ON batchrun_mark BEGIN INSERT INTO t"
    " SELECT count(*) FROM (WITH RECURSIVE n(i) AS"
    " (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000) SELECT i FROM n); END"
)

@job
def sync(ctx):
    target = ctx.connect("sqlite:t.db")
    target.execute("CREATE TABLE t (x)")
    loop = ctx.batches(range(2), target=target, size=1)
    target.execute(SLOW)
    for batch in loop:
        with batch.transaction() as rows:
            rows.execute("INSERT INTO t VALUES (0)")
        yield batch
"""


def test_the_time_that_a_mark_takes_is_batchrun_s_own_and_not_the_job_s(project: Project) -> None:
    project.write(CONFIG, sync=SLOW_MARK)
    assert project.run("run", "sync").code == 0
    assert rows(project, "SELECT own_s > work_s, work_s > 0 FROM run") == [(1, 1)]


# --- reading ahead ----------------------------------------------------------------------------

# The ten records from a query that tells which rows it gives: `read 1` and so on.
QUERYING = (
    JOB[: JOB.index("@job")]
    + """\
import threading
from batchrun import Query

CONTEXT, INSIDE, ASKED = [], threading.Event(), threading.Event()

def in_commit():
    INSIDE.set()
    return not ASKED.wait(20)  # true: roll back

def seen(record):
    AS_READ
    done(f"read {record}")

@job
def sync(ctx):
    CONTEXT.append(ctx)
    feed = ctx.connect("sqlite:feed.db")
    feed.execute("CREATE TABLE IF NOT EXISTS feed (id INTEGER PRIMARY KEY)")
    feed.execute("INSERT OR IGNORE INTO feed SELECT value FROM json_each('[1,2,3,4,5,6,7,8,9,10]')")
    feed.create_scalar_function("seen", seen, 1)
    for batch in ctx.batches(Query(feed, "SELECT id, seen(id) FROM feed", key="id")):
        for record, _ in batch:
            if record == 4: BEFORE_4
            done(record)
        yield batch
        done(f"yielded {batch.number}")
"""
)


def write_query(project: Project, as_read: str = "pass", before_4: str = "pass") -> None:
    """Write the querying job with something done as a row is read, and before record 4."""
    text = QUERYING.replace("AS_READ", as_read).replace("BEFORE_4", before_4)
    project.write(CONFIG, sync=text)


def test_a_query_is_read_on_while_the_batch_before_waits_for_its_commit(project: Project) -> None:
    write_query(project, before_4="hold('go')")
    process = start_held(project)
    other = apsw.Connection(str(project.state / "ledger.db"))
    other.execute("BEGIN IMMEDIATE")
    let_go(project)
    wait_for(lambda: "read 10" in done(project), "the second batch to be read")
    assert [*other.execute("SELECT number FROM run")] == [(0,)]
    assert "yielded 1" not in done(project)
    other.execute("ROLLBACK")
    other.close()
    assert project.finish(process).code == 0
    assert records(project) == list(range(1, 11))
    assert done(project).count("read 10") == 1


def test_a_query_may_ask_whether_to_stop_while_the_ledger_commits(project: Project) -> None:
    ask = "if record == 7: INSIDE.wait(20); CONTEXT[0].should_stop; ASKED.set()"
    ledger = "CONTEXT[0]._driver._ledger._connection"
    write_query(project, ask, f"{ledger}.set_commit_hook(in_commit)")
    ended = project.run("run", "sync")
    assert ended.code == 0, ended.err
    assert records(project) == list(range(1, 11))


def test_a_batch_is_committed_however_long_the_next_one_takes_to_be_read(project: Project) -> None:
    write_query(project, "if record == 7: hold('go')")
    process = start_held(project)
    wait_for(lambda: run_row(project)[2] == 1, "the first batch to be committed")
    assert records(project) == [1, 2, 3, 4, 5]
    os.kill(worker_of(process), signal.SIGUSR1)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 1)
    write_query(project)
    finish_after(project, 0)
    assert records(project) == list(range(1, 11))


def test_an_error_of_reading_ahead_is_raised_where_its_batch_is_asked_for(project: Project) -> None:
    write_query(project, "if record == 7: raise OSError('no row 7')")
    ended = project.run("run", "sync")
    assert (ended.code, "OSError: no row 7" in ended.err) == (1, True), ended.err
    assert run_row(project) == ("failed", "", 1)
    assert done(project)[-1] == "yielded 1"
    write_query(project)
    finish_after(project, 0)
    assert records(project) == list(range(1, 11))


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("file.fsync=ENOSPC", "Disk full: a checkpoint cannot be written to"),
        ("commit.prepared@1=EIO", "cannot be read or written in"),
        ("checkpoint.rename@1=EIO", "Whether it is on the disk cannot be known from here"),
        ("checkpoint.fsync@1=EIO", "Whether it is on the disk cannot be known from here"),
    ],
)
def test_what_was_read_ahead_is_not_handed_out_if_the_commit_fails(
    project: Project, point: str, words: str
) -> None:
    write_query(project)
    ended = project.run("run", "sync", env=at(point))
    assert ended.code == 5, ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert list(project.state.rglob("*.tmp")) == []
    assert run_row(project) == ("interrupted", "", 0)
    assert records(project) == [1, 2, 3, 4, 5]
    assert "yielded 1" not in done(project)
    finish_after(project, 0)


def test_where_no_thread_can_be_had_commit_and_reading_come_one_after_the_other(
    project: Project,
) -> None:
    write_query(project, before_4="__import__('_thread').stack_size(1 << 46)")  # too much for any
    ended = project.run("run", "sync")
    assert ended.code == 0, ended.err
    assert records(project) == list(range(1, 11))
    assert done(project).count("read 10") == 1


def test_a_source_that_wants_to_know_of_each_commit_is_read_when_it_was_told(
    project: Project,
) -> None:
    queue = """
class Queue(Query):
    def committed(self, cursor):
        done(f"told {cursor}")
"""
    write_query(project)
    text = (project.folder / "jobs/sync.py").read_text().replace("(Query(", "(Queue(")
    (project.folder / "jobs/sync.py").write_text(text.replace("\n@job", f"{queue}\n@job"))
    assert project.run("run", "sync").code == 0
    known = [line for line in done(project) if line in ("told 5", "yielded 1", "read 6")]
    assert known == ["told 5", "yielded 1", "read 6"]


@pytest.mark.parametrize("use", ["CONTEXT[1].count(odd=1)", "CONTEXT[0].cleanup(print)"])
def test_what_reads_ahead_may_not_use_the_context(project: Project, use: str) -> None:
    write_query(project, f"if record == 7: {use}", "CONTEXT.append(batch)")
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert "a source that reads ahead, used the job's context." in ended.err
    assert records(project) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("last", ["--batches", "SIGTERM"])
def test_nothing_is_read_ahead_of_a_stop(project: Project, last: str) -> None:
    write_query(project, before_4="hold('go')")
    process = start_held(project) if last == "SIGTERM" else None
    if process is not None:
        os.kill(worker_of(process), signal.SIGTERM)
    let_go(project)
    ended = project.finish(process) if process else project.run("run", "sync", last, "1")
    assert ended.code == 75
    assert run_row(project) == ("paused", "stop", 1)
    assert "read 6" not in done(project)


def test_the_time_of_reading_ahead_is_counted_as_reading_and_once(project: Project) -> None:
    spin = "until = time.monotonic() + 0.1\n    while time.monotonic() < until: pass"
    write_query(project, spin)
    assert project.run("run", "sync").code == 0
    assert rows(project, "SELECT read_s > 1, own_s * 3 < read_s FROM run") == [(1, 1)]


# --- what cannot be recorded ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "words", "number"),
    [
        ("file.fsync=EIO", "cannot be read or written in", 0),
        ("file.fsync=ENOSPC", "Disk full: a checkpoint cannot be written to", 0),
        ("commit.prepared@2=EIO", "cannot be read or written in", 1),
        ("checkpoint.rename@2=EIO", "Whether it is on the disk cannot be known from here", 1),
        ("checkpoint.fsync@2=EIO", "Whether it is on the disk cannot be known from here", 1),
    ],
)
def test_a_disk_that_refuses_ends_with_5_and_the_worker_s_letter_is_shown(
    project: Project, point: str, words: str, number: int
) -> None:
    write_job(project)
    ended = project.run("run", "sync", env=at(point))
    assert ended.code == 5, ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert list(project.state.rglob("*.tmp")) == []
    assert run_row(project) == ("interrupted", "", number)
    assert done(project)[-3:] == RELEASED
    finish_after(project, 0)


def test_after_a_failed_fsync_the_next_start_makes_durable_what_it_read(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("checkpoint.fsync@2=EIO"))
    (path,) = (project.state / "checkpoints" / "sync").glob("*.json")
    before = path.stat().st_ino
    with path.open("rb"):  # so that the number cannot be given to another file
        ended = project.run("-v", "run", "sync", env=at("worker.started=kill"))
        assert ended.code == -9
        assert path.stat().st_ino != before
    assert "restored" not in ended.err
    finish_after(project, 0)


def test_an_ending_that_cannot_be_recorded_is_shown_and_found_out_by_the_next_start(
    project: Project,
) -> None:
    trigger = (
        "CREATE TRIGGER full BEFORE UPDATE OF ending ON attempt"
        " WHEN NEW.ending = 'succeeded' BEGIN SELECT RAISE(ABORT, 'no room'); END"
    )
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    rows(project, trigger)
    ended = project.run("run", "sync")
    assert ended.code == 5, ended.err
    assert "cannot be used: ConstraintError: no room." in ended.err
    assert run_row(project) == ("interrupted", "", 3)
    rows(project, "DROP TRIGGER full")
    finish_after(project, 0)
    assert records(project) == list(range(1, 11))


# --- the basis --------------------------------------------------------------------------------

SETTINGS_JOB = """\
from dataclasses import dataclass
from batchrun import job

@dataclass(frozen=True)
class Settings:
    shop: str = "a"
    depth: int = 1

@job(settings=Settings, VERSION)
def sync(ctx):
    for batch in ctx.batches(lambda after, limit: list(range((after or 0) + 1, 11))[:limit],
                             key=lambda record: record):
        print(ctx.settings, ctx.cursor)
        yield batch
"""


def write_settings_job(project: Project, config: str = "", version: str = "version=1") -> None:
    """Write the job with settings."""
    project.write(CONFIG + config, sync=SETTINGS_JOB.replace("VERSION", version))


def log_of(project: Project) -> str:
    """Return the log of the one run."""
    (path,) = (project.state / "logs" / "sync").glob("*.log")
    return path.read_text()


def test_changed_settings_are_named_and_accepted_only_by_a_person(project: Project) -> None:
    write_settings_job(project)
    assert project.run("run", "sync", "--batches", "1").code == 75
    write_settings_job(project, 'shop = "b"\ndepth = 2\n')
    ended = project.run("run", "sync")
    assert ended.code == 13
    (run,) = rows(project, "SELECT id FROM run")[0]
    assert ended.err == (
        f"sync: run {run} interrupted.\n"
        f"Settings of sync changed since run {run} began: depth, shop.\n"
        "Its 1 commits were made with the old ones.\n"
        "Nothing was done; the checkpoint stands.\n"
        "Put them back, or type one of:\n"
        "  batchrun run sync --fresh\n"
        f"  batchrun resume {run} --accept-settings\n"
    )
    assert project.run("resume", "sync", "--accept-settings").code == 0
    assert "Settings(shop='b', depth=2)" in log_of(project)


def test_a_setting_given_with_a_start_is_kept_by_the_run_s_resumes(project: Project) -> None:
    write_settings_job(project)
    project.run("run", "sync", "--set", "shop=mine", "--batches", "1")
    assert project.run("resume", "sync").code == 0
    assert log_of(project).count("Settings(shop='mine', depth=1)") == 2


@pytest.mark.parametrize("mistake", ["setting", "value", "file"])
def test_a_start_that_is_mistyped_cancels_and_begins_nothing(
    project: Project, mistake: str
) -> None:
    write_settings_job(project)
    assert project.run("run", "sync", "--batches", "1").code == 75
    before = rows(project, "SELECT * FROM run")
    given = {"setting": "shopp=mine", "value": "depth=deep", "file": "depth=3"}[mistake]
    if mistake == "file":
        project.write_file("jobs/sync.py", "import nowhere")
    refused = project.run("run", "sync", "--fresh", "--set", given)
    assert refused.code == 2
    said = {
        "setting": "- shopp: there is no such setting; did you mean shop?\nNothing was changed.\n",
        "value": "- depth: a value of type int is wanted\nNothing was changed.\n",
        "file": "ModuleNotFoundError: No module named 'nowhere' (line 1)\nNothing was begun.\n",
    }
    assert said[mistake] in refused.err
    assert rows(project, "SELECT * FROM run") == before


def test_an_option_of_the_job_is_no_setting(project: Project) -> None:
    write_settings_job(project)
    refused = project.run("run", "sync", "--set", "batch_size=3")
    line = "- batch_size: there is no such setting; it is an option of the job, which stands in"
    assert (refused.code, line in refused.err) == (2, True)
    assert project.run("run", "sync").code == 0


def test_a_checkpoint_of_another_version_needs_a_converter(project: Project) -> None:
    write_settings_job(project)
    project.run("run", "sync", "--batches", "1")
    write_settings_job(project, version="version=2")
    ended = project.run("run", "sync")
    assert ended.code == 13
    assert "was written by version 1 of the job sync.\nThe job's file understands: 2." in ended.err
    write_settings_job(project, version="version=2, resumes={1: lambda cursor: cursor + 2}")
    assert project.run("run", "sync").code == 0
    assert rows(project, "SELECT read, job_version FROM run") == [(8, 2)]


def test_a_converter_is_not_asked_between_loops(project: Project) -> None:
    write_settings_job(project)
    project.run("run", "sync", env=at("ledger.committed@3=kill"))
    write_settings_job(project, version="version=2, resumes={1: lambda cursor: cursor + 2}")
    ended = project.run("run", "sync")
    assert ended.code == 0, ended.err


# --- in this interpreter ------------------------------------------------------------------------


def test_a_job_can_be_debugged_in_process(project: Project) -> None:
    write_job(project, "breakpoint()")
    process = subprocess.run(
        [*LAUNCH, "run", "sync", "--in-process"],
        cwd=project.folder,
        env=clean_environment(),
        input="p 'record', record\nc\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert process.returncode == 0, process.stderr
    assert "('record', 8)" in process.stdout
    assert run_row(project) == ("succeeded", "", 3)


def test_ctrl_c_in_process_ends_with_130_and_the_batch_is_done_again(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project, launch=(*LAUNCH[:-1], LAUNCH[-1]))
    project.kill_all()
    (project.folder / "go.reached").unlink()
    process = project.start("run", "sync", "--in-process")
    wait_for((project.folder / "go.reached").exists, "record 8 again")
    os.kill(process.pid, signal.SIGINT)
    assert project.finish(process).code == 130
    assert run_row(project) == ("paused", "stop", 1)
    let_go(project)
    finish_after(project, 0)


# --- limits and streams -------------------------------------------------------------------------


def shell(project: Project, script: str) -> Ended:
    """Run a shell script in which "$@" is batchrun."""
    process = subprocess.run(
        ["/bin/bash", "-c", script, "-", *LAUNCH],
        cwd=project.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Ended(process.returncode, process.stdout, process.stderr)


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full", "| true"])
def test_closed_and_full_streams_change_nothing(project: Project, streams: str) -> None:
    # no file of ours becomes a standard stream: SQLite, opened first, puts /dev/null there
    write_job(project)
    ended = shell(project, f'set -o pipefail; "$@" -v run sync {streams}')
    assert ended.code == 0, ended.err
    assert records(project) == list(range(1, 11))
    assert (project.state / "ledger.db").read_bytes()[:16] == b"SQLite format 3\0"
    assert project.run("check").code == 0


@pytest.mark.parametrize("limit", ["-f 100", "-n 11"])
def test_small_limits_end_with_a_letter_and_the_run_goes_on_without_them(
    project: Project, limit: str
) -> None:
    write_job(project)
    project.run("run", "sync", "--batches", "1")
    ended = shell(project, f'ulimit {limit}; "$@" run sync')
    assert ended.code in (0, 1, 5, 75), ended.err
    assert "Traceback" not in ended.err
    finish_after(project, 0)
    assert project.run("check").code == 0
