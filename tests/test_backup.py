"""`backup`: a copy made while jobs run is whole, and a restore goes on, or says what it cannot."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import apsw
import pytest
from conftest import LAUNCH, Ended, Project, wait_for
from test_05_ledger import HOST, commit, opened
from test_11_worker import at, finish_after, let_go, records, run_row, start_held, write_job

from batchrun import fault_of_copy, newest_ids, open_ledger

# Each batch of 5 records is a row of the target, whose mark commits with it.
INTO_TARGET = """
import batchrun

@batchrun.job
def sync(ctx):
    stock = ctx.connect("sqlite:stock.db")
    ctx.step("table", lambda rows: rows.execute("CREATE TABLE t (n)") and None, target=stock)
    for batch in ctx.batches(list(range(1, 21)), target=stock):
        with batch.transaction() as rows:
            rows.executemany("INSERT INTO t VALUES (?)", [(n,) for n in batch])
        yield batch
"""


def restore(project: Project, copy: Path) -> None:
    """Put a copy back, as the README says."""
    aside = project.folder / "aside"
    aside.mkdir()
    for path in project.state.glob("ledger.db*"):  # its log and index too
        path.rename(aside / path.name)
    shutil.copy(copy, project.state / "ledger.db")


def stock(project: Project) -> list[int]:
    with contextlib.closing(apsw.Connection(str(project.folder / "stock.db"))) as connection:
        return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n")]


# --- the copy -------------------------------------------------------------------------------------


def test_a_copy_made_while_a_job_runs_is_one_whole_private_file(project: Project) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    copy = project.folder / "copy.db"
    made = project.run("backup", "copy.db", umask=0o000)
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith(f"{copy}: ")
    assert made.out.endswith(" kB, verified; the README says how it is put back\n")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in project.folder.glob("*copy*")) == ["copy.db"]
    with contextlib.closing(apsw.Connection(f"{copy.as_uri()}?immutable=1", 0x41)) as ledger:
        assert list(ledger.execute("SELECT state, number FROM run")) == [("running", 1)]
    let_go(project)
    assert project.finish(process).code == 0


def test_a_copy_is_of_one_moment_though_others_write_meanwhile(
    project: Project, tmp_path: Path
) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    process = project.start("backup", str(tmp_path / "copy.db"), env=at("backup.begun=stop"))
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: ") T " in stat.read_text(), "the backup to begin")
    assert project.run("run", "sync").code == 0
    os.kill(process.pid, signal.SIGCONT)
    assert project.finish(process).code == 0
    with contextlib.closing(apsw.Connection(str(tmp_path / "copy.db"))) as ledger:
        assert list(ledger.execute("SELECT count(*) FROM run")) == [(1,)]


def test_an_older_copy_is_not_touched_without_force(project: Project) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    assert project.run("backup", "copy.db").code == 0
    copy = project.folder / "copy.db"
    older = copy.stat().st_ino
    why = f"{copy} is there already.\nIt was not touched.\nChoose another name, or add --force.\n"
    assert project.run("backup", "copy.db") == Ended(2, "", why)
    assert copy.stat().st_ino == older
    assert project.run("backup", "copy.db", "--force").code == 0
    assert copy.stat().st_ino != older


@pytest.mark.parametrize("what", ["text", "database", "link", "pipe"])
def test_nothing_but_an_older_copy_is_replaced(project: Project, what: str) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    there = project.folder / "there"
    if what == "text":
        there.write_text("precious")
    elif what == "database":
        with contextlib.closing(apsw.Connection(str(there))) as database:
            database.execute("CREATE TABLE stock (sku)")
    elif what == "link":
        assert project.run("backup", "copy.db").code == 0
        there.symlink_to("copy.db")
    else:
        os.mkfifo(there)
    before = there.lstat().st_ino
    why = f"{there} is there already, and is no copy of a ledger.\nIt was not touched.\n"
    refused = project.run("backup", "there", "--force")
    assert refused == Ended(2, "", f"{why}Choose another name.\n")
    assert there.lstat().st_ino == before


@pytest.mark.parametrize("name", ["state/copy.db", "state", "jobs"])
def test_a_copy_has_a_name_outside_the_state_directory(project: Project, name: str) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    refused = project.run("backup", name, "--force")
    what = f"{project.folder}/{name} is a folder, or in the state directory."
    assert (refused.code, refused.err.splitlines()[0]) == (2, what)


@pytest.mark.parametrize(
    ("point", "code"), [("backup.publish=kill", -9), ("backup.publish=ENOSPC", 5)]
)
def test_a_backup_that_is_cut_off_leaves_the_copy_before(
    project: Project, point: str, code: int
) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    assert project.run("backup", "copy.db").code == 0
    copy = project.folder / "copy.db"
    before = copy.stat()
    assert project.run("backup", "copy.db", "--force", env=at(point)).code == code
    assert copy.stat().st_ino == before.st_ino


def test_a_disk_that_is_too_small_for_the_copy_is_named(project: Project) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    small = ("/bin/sh", "-c", 'ulimit -f 64; exec "$@"', "-", *LAUNCH)
    refused = project.run("backup", "copy.db", launch=small)
    assert refused.code == 5
    said = f"The copy {project.folder}/copy.db cannot be written: "
    assert refused.err.startswith(said), refused.err
    assert "not an error" not in refused.err
    assert "No copy was made." in refused.err
    assert list(project.folder.glob("*copy*")) == []


def test_a_copy_that_is_not_sound_does_not_take_the_place_of_the_one_before(
    project: Project,
) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    assert project.run("backup", "copy.db").code == 0
    copy = project.folder / "copy.db"
    before = copy.stat().st_ino
    with contextlib.closing(apsw.Connection(str(project.state / "ledger.db"))) as ledger:
        ledger.execute("PRAGMA writable_schema = ON")
        ledger.execute(
            "INSERT INTO sqlite_schema VALUES ('table', 't', 't', 4, 'CREATE TABLE t(a)')"
        )
    refused = project.run("backup", "copy.db", "--force")
    what = f"The copy of {project.state}/ledger.db is not what it should be: "
    assert (refused.code, refused.err[: len(what)]) == (5, what)
    assert f"\nIt was removed; {copy} is as it was.\n" in refused.err
    assert copy.stat().st_ino == before
    assert sorted(path.name for path in project.folder.glob("*copy*")) == ["copy.db"]


def test_a_copy_that_is_not_what_it_should_be_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    ledger = open_ledger(tmp_path / "state/ledger.db", HOST, create=True)
    commit(ledger, opened(ledger))
    copy = tmp_path / "copy.db"
    newest = ledger.back_up(copy)
    assert newest == newest_ids(ledger._connection)
    assert fault_of_copy(copy, ledger.uuid, newest) == ""
    more = newest | {"event": newest["event"] + 1}
    behind = f"its newest event is {newest['event']}, not {more['event']}"
    assert fault_of_copy(copy, ledger.uuid, more) == behind
    assert fault_of_copy(copy, "another", newest) == f"it is of ledger {ledger.uuid}"
    with copy.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(os.urandom(4096))
    assert fault_of_copy(copy, ledger.uuid, newest)
    ledger.close()


# --- a restore ------------------------------------------------------------------------------------


def test_a_ledger_put_back_alone_is_enough_to_go_on(project: Project, tmp_path: Path) -> None:
    write_job(project, "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)")
    project.run("run", "sync")
    copy = tmp_path / "copy.db"
    assert project.run("backup", str(copy)).code == 0
    shutil.rmtree(project.state)  # the disk is gone
    project.state.mkdir(mode=0o700)
    shutil.copy(copy, project.state / "ledger.db")
    write_job(project)
    said = finish_after(project, 0)
    assert "restored from the ledger's copy of commit 1" in said.err
    assert records(project)[-5:] == [6, 7, 8, 9, 10]
    assert project.run("check").code == 0


def test_an_older_ledger_under_newer_checkpoints_is_refused_until_it_is_repaired(
    project: Project, tmp_path: Path
) -> None:
    project.write("[defaults]\nbatch_size = 5\n[jobs.sync]\n", sync=INTO_TARGET)
    assert project.run("run", "sync", "--batches", "1").code == 75
    copy = tmp_path / "copy.db"
    assert project.run("backup", str(copy)).code == 0
    assert project.run("resume", "sync", "--batches", "2").code == 75
    restore(project, copy)
    refused = project.run("resume", "sync")
    assert refused.code == 13
    assert "see: batchrun repair" in refused.err
    assert project.run("check").code == 3
    assert project.run("repair", "--apply").code == 0
    checked = project.run("check")
    assert checked.code == 0
    assert "commit 3 has no row, since a repair at" in checked.out
    assert project.run("resume", "sync").code == 0
    assert stock(project) == list(range(1, 21))


def test_an_older_ledger_alone_does_not_repeat_what_the_target_has(
    project: Project, tmp_path: Path
) -> None:
    project.write("[defaults]\nbatch_size = 5\n[jobs.sync]\n", sync=INTO_TARGET)
    assert project.run("run", "sync", "--batches", "1").code == 75
    copy = tmp_path / "copy.db"
    assert project.run("backup", str(copy)).code == 0
    assert project.run("resume", "sync", "--batches", "2").code == 75
    restore(project, copy)
    shutil.rmtree(project.state / "checkpoints")
    assert project.run("resume", "sync").code == 13
    assert stock(project) == list(range(1, 16))


def test_a_restored_ledger_under_a_finished_run_of_a_lost_one_is_refused(
    project: Project, tmp_path: Path
) -> None:
    write_job(project)
    assert project.run("run", "sync").code == 0
    copy = tmp_path / "copy.db"
    assert project.run("backup", str(copy)).code == 0
    assert project.run("run", "sync").code == 0
    restore(project, copy)
    refused = project.run("run", "sync")
    assert refused.code == 13
    assert project.run("repair", "--apply").code == 0
    assert project.run("run", "sync").code == 0
    assert run_row(project)[0] == "succeeded"
