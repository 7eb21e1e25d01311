"""Before anything starts after a deploy: does every unfinished checkpoint load, and how if not?"""

import json
import os
import signal

import pytest
from conftest import Project, wait_for
from test_11_worker import at, rows, worker_of
from test_12_supervisor import is_stopped

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 2
[jobs.sync]
shop = "a"
[jobs.other]
uses = "sync"
"""

# Version 1 has cursors 1, 2, 3; version 2 has "n1", "n2", "n3".
JOB = """\
from dataclasses import dataclass
from batchrun import job

@dataclass(frozen=True)
class Settings:
    shop: str = "b"

def read(after, limit):
    done = int(str(after or 0).strip("n"))
    more = range(done + 1, min(done + limit, 6) + 1)
    return [PLAIN for n in more]

@job(settings=Settings, DECLARED)
def sync(ctx):
    for batch in ctx.batches(read, key=lambda record: record):
        with open("done.txt", "a") as file:
            print(*batch, file=file)
        yield batch
"""
ONE = ("n", "version=1, resumes={2: lambda cursor: int(cursor[1:])}")
TWO = ("f'n{n}'", "version=2, resumes={1: lambda cursor: f'n{cursor}'}")
LEFT_OUT = ("n", "version=1")
ALL_GO_ON = "all of 1 unfinished runs could go on\n"


def write_job(project: Project, plain: str, declared: str, config: str = CONFIG) -> None:
    project.write(config, sync=JOB.replace("PLAIN", plain).replace("DECLARED", declared))


@pytest.fixture
def paused(project: Project) -> Project:
    """A project whose run stands after one batch of version 1."""
    write_job(project, *ONE)
    assert project.run("run", "sync", "--batches", "1").code == 75
    return project


def run_of(project: Project, job: str = "sync") -> str:
    return str(rows(project, f"SELECT id FROM run WHERE job = '{job}'")[0][0])


@pytest.mark.parametrize(("old", "new"), [(ONE, TWO), (TWO, ONE)])
def test_a_run_goes_on_under_a_newer_and_under_an_older_version(
    project: Project, old: tuple[str, str], new: tuple[str, str]
) -> None:
    write_job(project, *old)
    assert project.run("run", "sync", "--batches", "1").code == 75
    write_job(project, *new)
    shown = project.run("rehearse")
    assert (shown.code, shown.out, shown.err) == (0, ALL_GO_ON, "")
    assert project.run("run", "sync", "--batches", "1").code == 75
    write_job(project, *old)  # and back in the middle, what a rollback of the deploy does
    assert project.run("rehearse").out == ALL_GO_ON
    assert project.run("run", "sync").code == 0
    read = (project.folder / "done.txt").read_text().replace("n", "").split()
    assert read == ["1", "2", "3", "4", "5", "6"]


def test_a_version_that_nobody_converts_is_named_with_the_ways_out(paused: Project) -> None:
    write_job(paused, "n", "version=3, resumes={2: int}")
    shown = paused.run("rehearse")
    assert (shown.code, shown.err) == (3, "")
    assert shown.out == (
        f"run {run_of(paused)} of sync could not go on: The checkpoint of run {run_of(paused)} was"
        " written by version 1 of the job sync.\n"
        "The job's file understands: 2, 3.\n"
        "Add a converter to @job(resumes={...}), install that version again, or type:"
        " batchrun run sync --fresh\n"
    )
    (finding,) = paused.run("rehearse", "--json").document["findings"]
    assert finding["why"] == "The job's file understands: 2, 3."


@pytest.mark.parametrize(
    ("converter", "why"),
    [
        ("lambda cursor: cursor['sku']", "TypeError: 'int' object is not subscriptable"),
        ("lambda cursor: object", "CursorError: The cursor <class 'object'> cannot be stored"),
        ("lambda cursor: exit(3)", "SystemExit: 3"),
        ("lambda cursor: None", "CursorError: It returned None, from which the run would begin"),
    ],
)
def test_a_converter_is_tried_on_the_stored_cursor(
    paused: Project, converter: str, why: str
) -> None:
    write_job(paused, "n", f"version=2, resumes={{1: {converter}}}")
    shown = paused.run("rehearse")
    assert shown.code == 3
    assert "was written by version 1, and the converter to version 2 fails.\n" in shown.out
    assert f"It was given 2. {why}" in shown.out
    assert shown.out.endswith("Mend it in @job(resumes={1: ...}), or install version 1 again.\n")
    ended = paused.run("run", "sync")  # which says the same, and needs a person too
    assert (ended.code, why in ended.err, "Traceback" in ended.err) == (13, True, False)
    assert (paused.folder / "done.txt").read_text() == "1 2\n", "nothing was read again"


@pytest.mark.parametrize(
    ("declared", "config", "words"),
    [
        ("version=1 / 0", CONFIG, "cannot be imported.\nZeroDivisionError"),
        ("version=exit()", CONFIG, "cannot be imported.\nSystemExit: None"),
        ("version=1", CONFIG.replace('shop = "a"', "shop = 3"), "shop"),
        ("version=1", CONFIG.replace('shop = "a"', 'shop = "c"'), "Settings of sync changed since"),
        ("version=1", CONFIG.replace("jobs.sync", "jobs.renamed"), 'There is no job "sync" in'),
    ],
)
def test_whatever_would_stop_the_run_is_a_finding(
    paused: Project, declared: str, config: str, words: str
) -> None:
    write_job(paused, "n", declared, config)
    shown = paused.run("rehearse")
    assert (shown.code, shown.err) == (3, "")
    assert shown.out.startswith(f"run {run_of(paused)} of sync could not go on: ")
    assert words in shown.out


def test_each_unfinished_run_is_asked_and_nothing_is_changed(paused: Project) -> None:
    assert paused.run("run", "other", "--batches", "1").code == 75
    files = {path: path.read_bytes() for path in paused.state.rglob("*") if path.is_file()}
    assert paused.run("rehearse").out == "all of 2 unfinished runs could go on\n"
    write_job(paused, "n", "version=2")
    shown = paused.run("rehearse")
    assert shown.code == 3
    assert [
        f"run {run_of(paused, job)} of {job} could not" in shown.out for job in ("sync", "other")
    ]
    assert files == {path: path.read_bytes() for path in paused.state.rglob("*") if path.is_file()}


def test_a_checkpoint_that_cannot_be_read_is_a_finding_unless_the_ledger_has_it(
    paused: Project,
) -> None:
    (path,) = (paused.state / "checkpoints" / "sync").glob("*.json")
    path.write_bytes(b"torn")
    assert paused.run("rehearse").out == ALL_GO_ON
    paused_rows = rows(paused, "UPDATE run SET checkpoint = NULL RETURNING 1")
    assert paused_rows == [(1,)]
    shown = paused.run("rehearse")
    assert (shown.code, "the ledger has no valid copy of it" in shown.out) == (3, True)


def test_a_maintenance_that_stays_on_says_so_with_the_two_ways_out(paused: Project) -> None:
    write_job(paused, "n", "version=3, resumes={2: int}")
    assert paused.run("maintenance", "on").code == 0
    shown = paused.run("maintenance", "off")
    assert (shown.code, shown.err) == (3, "")
    assert shown.out == (
        f"run {run_of(paused)} of sync could not go on: The checkpoint of run {run_of(paused)} was"
        " written by version 1 of the job sync.\n"
        "The job's file understands: 2, 3.\n"
        "Maintenance stays on: nothing was changed, and nothing starts. Type one of:\n"
        "  batchrun maintenance off           once it is mended (converter, old file, setting)\n"
        "  batchrun maintenance off --force   to open it all the same, which is recorded\n"
    )
    assert paused.run("maintenance", "off", "--force").code == 0


@pytest.mark.parametrize(("declared", "code"), [("version=2", 13), ("version=1 / 0", 2)])
def test_what_is_refused_at_the_start_goes_on_with_the_tick_once_it_is_put_back(
    paused: Project, declared: str, code: int
) -> None:
    write_job(paused, "n", declared)
    for _ in range(2):  # the tick does not give it up
        assert paused.run("resume", "--all").code == code
        assert rows(paused, "SELECT state, number FROM run") == [("interrupted", 1)]
    assert "  why           The " in paused.run("status", "sync").out
    write_job(paused, *ONE)
    assert paused.run("resume", "--all").code == 0
    assert (paused.folder / "done.txt").read_text() == "1 2\n3 4\n5 6\n"


# --- before a rollback ----------------------------------------------------------------------------


def test_another_version_is_asked_about_before_it_is_installed(paused: Project) -> None:
    write_job(paused, *TWO)
    assert paused.run("rehearse", "--as-version", "1").code == 0, "version 1 wrote it"
    assert paused.run("rehearse", "--as-version", "sync=2").code == 0, "2 is installed, converts 1"
    assert paused.run("run", "sync", "--batches", "1").code == 75
    shown = paused.run("rehearse", "--as-version", "sync=1")
    assert shown.code == 3
    assert shown.out == (
        f"run {run_of(paused)} of sync could not go on: its checkpoint was written by version 2,"
        " and version 1 is not installed.\n"
        "Only the resumes= of version 1's own file can say that it understands; installed is"
        " version 2.\n"
        "Ask again with that file installed, or keep version 2.\n"
    )


def test_a_run_without_a_commit_goes_on_under_any_version(project: Project) -> None:
    write_job(project, *ONE)
    project.run("run", "sync", env=at("batch.yielded@1=kill-both"))
    write_job(project, "n", "version=7")
    assert project.run("rehearse").out == ALL_GO_ON
    assert project.run("rehearse", "--as-version", "3").out == ALL_GO_ON


@pytest.mark.parametrize(
    ("words", "code", "letter"),
    [
        ("sync=x", 2, "--as-version 'sync=x' has no number.\nWrite: JOB=3\n"),
        ("sink=2", 4, 'There is no job "sink" in '),
    ],
)
def test_a_version_that_is_none_is_refused(
    paused: Project, words: str, code: int, letter: str
) -> None:
    ended = paused.run("rehearse", "--as-version", words)
    assert (ended.code, ended.err.startswith(letter)) == (code, True)


def test_a_run_that_is_going_on_is_rehearsed_where_it_stands(project: Project) -> None:
    write_job(project, *ONE)
    process = project.start("run", "sync", env=at("checkpoint.fsync@2=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the second commit")
    shown = project.run("rehearse")
    assert (shown.code, shown.out) == (0, ALL_GO_ON), shown.out
    os.kill(worker, signal.SIGCONT)
    assert project.finish(process).code == 0


def test_what_a_jobs_file_prints_is_no_part_of_the_result(paused: Project) -> None:
    file = paused.folder / "jobs" / "sync.py"
    file.write_text(f"{file.read_text()}\nprint('hello from the job')\n")
    asked = paused.run("rehearse", "--json")
    assert json.loads(asked.out) == {"runs": 1, "findings": []}
    assert "hello from the job" in asked.err


def test_a_door_that_is_open_is_not_said_to_stay_closed(paused: Project) -> None:
    (paused.folder / "jobs" / "sync.py").unlink()
    off = paused.run("maintenance", "off")
    assert (off.code, off.out) == (0, "maintenance was not on\n")
