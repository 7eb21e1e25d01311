"""A run is taken back: what batches remember, and the run that puts it back, newest first."""

import contextlib
import json
import re
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended, Project
from test_08_jobs import PRELUDE, Shop

from batchrun import (
    BatchRow,
    BrokenImage,
    CursorError,
    ImageInMaking,
    ImageStore,
    JobError,
    NewerFormat,
    Remembered,
    decode_cursor,
    encode_cursor,
)

# Twenty records in batches of five: each sets its row and remembers the one that was there before.
JOB = f"""{PRELUDE}
URL = open("url.txt").read()
PUT = "INSERT INTO t VALUES (?, ?) ON CONFLICT (x) DO UPDATE SET v = excluded.v"
PUT, DELETE, FIND = (
    sql.replace("?", "?" if URL.startswith("sqlite") else "%s")
    for sql in (PUT, "DELETE FROM t WHERE x = ?", "SELECT v FROM t WHERE x = ?")
)

def undo(ctx):
    table = ctx.connect(URL)
    for batch in ctx.batches(ctx.remembered, target=table):
        with batch.transaction() as rows:
            for x, v in batch:
                rows.execute(*((DELETE, (x,)) if v is None else (PUT, (x, v))))
        done(*[x for x, v in batch])
        yield batch

@job(rollback=undo)
def sync(ctx):
    table = ctx.connect(URL)
    value, first = open("value.txt").read().split()
    for batch in ctx.batches(range(20), target=table):
        with batch.transaction() as rows:
            for x in batch:
                old = rows.execute(FIND, (x,)).fetchone()
                if x >= int(first):
                    batch.remember([(x, old and old[0])])
                rows.execute(PUT, (x, value))
        yield batch
"""
NO_ROLLBACK = JOB.replace("@job(rollback=undo)", "@job")
POSTGRES_TOO = pytest.mark.parametrize("database", ["sqlite", "postgres"])


class Table(Shop):
    """A shop whose job writes a table, of which half is there before."""

    url = "sqlite:t.db"

    def open(self, url: str = "sqlite:t.db") -> None:
        """Write the job; make the table."""
        self.url = url
        self.project.write_file("url.txt", url)
        self.write_file(JOB)
        self.value("new")
        self.ask("CREATE TABLE t (x INTEGER PRIMARY KEY, v TEXT)")
        for x in range(0, 20, 2):
            self.ask(f"INSERT INTO t VALUES ({x}, 'old {x}')")

    def value(self, text: str, first: int = 0) -> None:
        """Let the job write this from now on, and remember rows from a number on."""
        (self.folder / "value.txt").write_text(f"{text} {first}")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the target, and commit."""
        if self.url.startswith("sqlite:"):
            target: Any = sqlite3.connect(self.folder / "t.db")
        else:
            target = pytest.importorskip("psycopg").connect(self.url)
        with contextlib.closing(target):
            found = target.execute(sql)
            rows = list(found.fetchall()) if found.description else []
            target.commit()
        return rows

    def table(self) -> list[tuple[Any, ...]]:
        return self.ask("SELECT * FROM t ORDER BY x")

    def newest(self) -> str:
        """Return the id of the newest run."""
        return str(self.rows("SELECT id FROM run ORDER BY key DESC LIMIT 1")[0][0])

    def done_once(self) -> str:
        """Run the job to its end; return the run's id."""
        ended = self.run()
        assert ended.code == 0, ended
        return self.newest()

    def roll_back(self, *words: str, point: str = "", code: int = 0) -> Ended:
        """Roll a run back, and see that it ended so."""
        ended = self.call("rollback", *words, "--in-process", point=point)
        assert ended.code == code, ended
        return ended

    def refused(self, *words: str, code: int = 13) -> str:
        """Return the letter that refuses a rollback, and see that it has done nothing."""
        before = self.rows("SELECT max(key), (SELECT max(id) FROM event) FROM run")
        letter = self.roll_back(*words, code=code).err
        assert self.rows("SELECT max(key), (SELECT max(id) FROM event) FROM run") == before
        return letter

    def images(self) -> list[Path]:
        """Return the files of images, by commit number."""
        found = self.folder.glob("state/images/sync/*/*")
        return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


@pytest.fixture
def shop(project: Project) -> Table:
    made = Table(project)
    made.open()
    return made


# --- what is kept -----------------------------------------------------------------------------


def image_of(*rows: object) -> tuple[bytes, str]:
    made = ImageInMaking(10**6, JobError("too much"))
    made.add(rows)
    return made.content()


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [(1, None, "a\nb\r\u2028"), {"price": Decimal("1.50"), "raw": b"\x00"}, [2**60, 0.1]]
    store = ImageStore(tmp_path / "images" / "sync" / "r1")
    (tmp_path / "images").mkdir()
    name = store.write(7, 2, *image_of(*rows))
    assert name.startswith("7-2-")
    assert [row for line in store.lines(name) for row in decode_cursor(line.decode())] == rows
    assert {path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {0o600}
    assert {store.folder.stat().st_mode & 0o777, store.folder.parent.stat().st_mode & 0o777} == {
        0o700
    }


def test_a_row_that_could_not_be_had_back_is_refused() -> None:
    with pytest.raises(CursorError) as refused:
        image_of((1, object))
    allowed = "text, a number, a date, bytes, None, or a tuple, list or dict of those"
    assert str(refused.value).splitlines() == [
        "(1, <class 'object'>) cannot be remembered: it has a value of type type.",
        f"A remembered row is {allowed}.",
        "Nothing was committed.",
        "Let the job remember the row as such values.",
    ]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda content: content[:-1], "43 bytes follow its header, not 44"),
        (lambda content: content[:-1] + b"\x00", "it has other bytes than were written"),
        (lambda _: b"", "it does not begin with a header of batchrun-image"),
        (lambda content: b"x" + content, "it does not begin with a header of batchrun-image"),
    ],
)
def test_an_image_that_was_torn_or_changed_is_known(
    tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    store = ImageStore(tmp_path / "images" / "sync" / "r1")
    name = store.write(1, 1, *image_of((1, "one"), (2, "two")))
    path = store.folder / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BrokenImage) as broken:
        store.lines(name)
    assert str(broken.value) == (
        f"What batch 1 of run r1 has remembered cannot be read.\n{path}: {why}\n"
        "Nothing was done with it.\nPut that file back from a backup, then type this again."
    )


def test_an_image_of_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images" / "sync" / "r1")
    content, digest = image_of((1,))
    name = store.write(1, 1, content.replace(b"image 1 ", b"image 2 "), digest)
    with pytest.raises(NewerFormat, match="has format 2; this batchrun knows 1"):
        store.look(name)


def test_what_a_batch_remembers_is_one_private_file_that_its_commit_names(shop: Table) -> None:
    shop.value("new", first=5)
    run = shop.done_once()
    names = [path.name for path in shop.images()]
    assert [name.partition("-")[0] for name in names] == ["2", "3", "4"]
    rows = "SELECT number, remembered, images FROM batch WHERE kind = 'batch' ORDER BY number"
    assert shop.rows(rows) == [(1, 0, None), *zip((2, 3, 4), (5, 5, 5), names, strict=True)]
    assert {path.parent.name for path in shop.images()} == {run}
    assert {path.stat().st_mode & 0o777 for path in shop.images()} == {0o600}


def test_a_job_that_remembers_nothing_has_no_file_and_no_field_for_it(shop: Table) -> None:
    shop.value("new", first=99)
    shop.run("--batches", "2")
    (checkpoint,) = shop.folder.glob("state/checkpoints/sync/*.json")
    assert "remembered" not in checkpoint.read_text()
    assert not (shop.folder / "state/images").exists()


def test_remember_after_the_batch_is_closed_is_refused(shop: Table) -> None:
    shop.write_file(
        JOB.replace("        yield batch\n\n@job", "        yield batch\n\n@job").replace(
            "                rows.execute(PUT, (x, value))\n",
            "                rows.execute(PUT, (x, value))\n        batch.remember([1])\n",
        )
    )
    assert shop.letter() == (
        "remember() of batch 1 was called after the batch was closed.\n"
        "Its transaction() or its yield has committed it already.\n"
        "Nothing more was committed.\n"
        "Call remember() before the yield, and inside transaction() if there is one."
    )


def test_a_batch_that_remembers_too_much_is_refused_and_not_committed(shop: Table) -> None:
    shop.write_file(JOB, config='max_remembered = "60B"\n')
    before = shop.table()
    assert shop.letter() == (
        "Batch 1 remembers more than 60 bytes.\n"
        "What a rollback needs of a batch is kept in one file, and held in memory while it is"
        " packed.\nNothing more was committed.\n"
        "Remember only rows that change, lower batch_size, or raise max_remembered in [jobs.sync]."
    )
    assert (shop.table(), shop.images(), shop.commits()) == (before, [], 0)


def test_a_full_disk_while_an_image_is_written_is_a_known_non_commit(shop: Table) -> None:
    before = shop.table()
    assert shop.run(point="image.write@1=ENOSPC").code == 5
    assert (
        "Disk full: what a batch remembers cannot be written to"
        in shop.project.outputs.parent.joinpath("shop/err.txt").read_text()
    )
    assert (shop.table(), shop.images(), shop.commits()) == (before, [], 0)
    run = shop.done_once()
    shop.roll_back(run)
    assert shop.table() == before


def test_a_file_that_an_older_try_left_goes_when_the_batch_begins_again(shop: Table) -> None:
    assert shop.run(point="image.written@2=kill").code == -9
    assert [path.name[:4] for path in shop.images()] == ["1-1-", "2-1-"]
    shop.done_once()
    assert [path.name[:4] for path in shop.images()] == ["1-1-", "2-2-", "3-2-", "4-2-"]


def test_what_the_target_has_committed_keeps_the_image_of_its_try(shop: Table) -> None:
    before = shop.table()
    assert shop.run(point="target.committed@2=kill").code == -9
    run = shop.done_once()
    assert [path.name[:4] for path in shop.images()] == ["1-1-", "2-1-", "3-2-", "4-2-"]
    shop.roll_back(run)
    assert shop.table() == before


def test_a_commit_whose_image_is_gone_is_refused(shop: Table) -> None:
    assert shop.run(point="target.committed@2=kill").code == -9
    gone = shop.images()[1]
    gone.rename(shop.folder / "aside")
    ended = shop.run()
    assert (ended.code, shop.commits()) == (13, 1)
    assert f"{gone}: No such file or directory" in ended.err
    (shop.folder / "aside").rename(gone)
    shop.done_once()


# --- and put back -----------------------------------------------------------------------------

KILLS = ("target.commit@1", "target.committed@1", "commit.prepared@2", "checkpoint.rename@3")
OF_RUN = ("image.write@1", *KILLS, "image.written@4", "ledger.commit@4")
OF_ROLLBACK = ("batch.handed_out@1", *KILLS, "checkpoint.fsync@3", "ledger.commit@4")


@POSTGRES_TOO
def test_a_run_killed_again_and_again_is_undone_by_a_rollback_killed_as_often(
    project: Project, database: str, request: pytest.FixtureRequest
) -> None:
    shop = Table(project)
    is_sqlite = database == "sqlite"
    shop.open("sqlite:t.db" if is_sqlite else request.getfixturevalue("postgres_dsn"))
    before = shop.table()
    for point in OF_RUN:
        assert shop.run(point=f"{point}=kill").code == -9, point
    run = shop.done_once()
    assert shop.table() == [(x, "new") for x in range(20)]
    for point in OF_ROLLBACK:
        shop.roll_back(run, point=f"{point}=kill", code=-9)
    shop.roll_back(run)
    assert shop.table() == before
    assert len(shop.rows("SELECT 1 FROM run")) == 2
    assert shop.call("check").code == 0


@pytest.mark.parametrize("limit", [1, 7, 99, 100, 101, 1_000])
def test_rows_are_read_in_answers_of_no_more_than_is_asked_for(tmp_path: Path, limit: int) -> None:
    (tmp_path / "images").mkdir()
    store = ImageStore(tmp_path / "images" / "sync" / "r1")
    blank = BatchRow(*[None] * len(BatchRow._fields))  # type: ignore[arg-type]
    batches = [blank._replace(number=3, remembered=0)]
    for number, kept in ((2, range(250, 253)), (1, range(250))):
        images = store.write(number, 1, *image_of(*kept))
        batches.append(blank._replace(number=number, remembered=len(kept), images=images))
    source, read = Remembered(batches, store), list[int]()
    rows, after = source.read(None, limit)
    while rows and len(read) < 253:
        assert len(rows) <= limit
        read += rows
        rows, after = source.read(after, limit)
    assert (read, rows) == ([*range(252, -1, -1)], [])
    assert source.total() == len(read)
    assert Remembered(batches, store).read((1, 150), 3) == ([149, 148, 147], (1, 147))


def test_rows_come_newest_batch_first_and_last_row_first(shop: Table) -> None:
    shop.roll_back(shop.done_once())
    assert shop.done() == [str(x) for x in range(19, -1, -1)]


def test_a_rollback_goes_on_by_resume_by_run_and_when_it_is_typed_again(shop: Table) -> None:
    before = shop.table()
    run = shop.done_once()
    shop.roll_back(run, "--batches", "1", code=75)
    assert shop.call("resume", "--in-process", "--batches", "1").code == 75
    shop.roll_back(run, "--batches", "1", code=75)
    assert f"  run           {shop.newest()}, a rollback of run {run}" in (
        shop.call("status", "sync").out.splitlines()
    )
    letter = shop.refused(run, "--to-batch", "2")
    assert letter == (
        f"Run {shop.newest()} rolls it back to batch 0, and is unfinished.\nNothing was changed.\n"
        f"To go on with that: batchrun resume {shop.newest()}\n"
    )
    assert shop.call("resume", "--all").code == 0
    assert shop.table() == before
    assert len(shop.rows("SELECT 1 FROM run")) == 2


def test_run_finishes_a_rollback_and_then_begins_the_whole_job(shop: Table) -> None:
    run = shop.done_once()
    shop.roll_back(run, "--batches", "1", code=75)
    assert shop.run().code == 0
    kinds = "SELECT rollback_of, state, read FROM run ORDER BY key"
    assert shop.rows(kinds) == [
        (None, "succeeded", 20),
        (run, "succeeded", 20),
        (None, "succeeded", 20),
    ]
    assert shop.table() == [(x, "new") for x in range(20)]


def test_only_what_came_after_a_batch_is_undone_and_the_rest_later(shop: Table) -> None:
    before = shop.table()
    run = shop.done_once()
    shop.roll_back(run, "--to-batch", "3")
    assert shop.table() == [(x, "new") for x in range(15)] + before[8:]
    assert "why           rolled back to batch 3 by run" in shop.call("status", run).out
    shop.roll_back(run)
    assert shop.done()[5:] == [str(x) for x in range(14, -1, -1)]
    assert shop.table() == before


def test_rows_that_changed_twice_come_back_run_by_run(shop: Table) -> None:
    before = shop.table()
    first = shop.done_once()
    shop.value("newer")
    second = shop.done_once()
    assert shop.refused(first) == (
        f"Run {second} of sync is newer and has remembered rows that are not rolled back.\n"
        f"It has changed what run {first} left; the newest changes are undone first.\n"
        f"Nothing was undone.\nFirst type: batchrun rollback {second}\n"
    )
    shop.roll_back(second)
    assert shop.table() == [(x, "new") for x in range(20)]
    shop.roll_back(first)
    assert shop.table() == before


def test_a_dry_run_shows_what_would_be_done_and_writes_nothing(shop: Table) -> None:
    shop.value("new", first=5)
    run = shop.done_once()
    with contextlib.closing(sqlite3.connect(shop.folder / "state/ledger.db")) as ledger:
        insert = (
            "INSERT INTO operation (job, key, run, generation, number, arguments, irreversible,"
            " claimed_at, outcome) VALUES ('sync', ?, 1, 1, 4, x'00', ?, '', 'done')"
        )
        ledger.executemany(insert, [(f"mail/{n}", 1) for n in range(12)] + [("push/1", 0)])
        ledger.commit()
    before = shop.rows("SELECT count(*) FROM event"), shop.table()
    images = [
        [(x, f"old {x}" if x % 2 == 0 else None) for x in range(y, y + 5)] for y in (5, 10, 15)
    ]
    size = sum(len(encode_cursor([*rows])) for rows in images)
    ended = shop.roll_back(run, "--dry-run")
    keys = ", ".join(f"mail/{n}" for n in range(10))
    assert ended.out == (
        f"a rollback of run {run} to batch 0 would do this; nothing was written\n"
        f"  undone    15 rows, {size} bytes, of 3 batches: 4 to 2\n"
        "  no row    remembered by 1 batch: 1\n"
        "  outside   1 operations, left to the job's rollback\n"
        f"  NOT UNDONE: 12 operations that are irreversible: {keys}, ...\n"
        f"to do it: batchrun rollback {run}\n"
    )
    assert (shop.rows("SELECT count(*) FROM event"), shop.table()) == before
    document = json.loads(shop.roll_back(run, "--dry-run", "--to-batch", "2", "--json").out)
    assert (document["batches"], document["rows"], document["without_rows"]) == ([4, 3], 10, [])
    shop.roll_back(run, "--why", "wrong feed")
    report = shop.call("report", shop.newest()).out.splitlines()
    assert report[0] == "sync: succeeded"
    first = report.index(f"It is a rollback of run {run} to batch 0.")
    assert report[first + 1 : first + 5] == [
        "  undone    15 rows, of 3 batches: 4 to 2",
        "  no row    remembered by 1 batch: 1",
        "  outside   1 operations, left to the job's rollback",
        f"  NOT UNDONE: 12 operations that are irreversible: {keys}, ...",
    ]
    report = shop.call("report", run).out.splitlines()
    assert f"Run {shop.newest()} has rolled it back to batch 0." in report
    begun = f"rollback begun .*  to batch 0, by run {shop.newest()}: wrong feed"
    assert re.search(begun, report[-1])


# --- refusals ---------------------------------------------------------------------------------


def test_a_job_without_a_rollback_is_not_rolled_back(shop: Table) -> None:
    run = shop.done_once()
    shop.write_file(NO_ROLLBACK)
    assert shop.refused(run, code=2) == (
        f"The job sync has no rollback, so run {run} cannot be undone.\n"
        "How to undo a batch, only the job can say: @job(rollback=undo).\nNothing was undone.\n"
        "Give it a rollback that reads ctx.remembered, then type this again.\n"
    )


def test_a_rollback_whose_job_lost_its_own_waits_for_it(shop: Table) -> None:
    before = shop.table()
    run = shop.done_once()
    shop.roll_back(run, "--batches", "1", code=75)
    shop.write_file(NO_ROLLBACK)
    assert shop.call("rehearse").code == 3
    ended = shop.call("resume", "--in-process")
    assert (ended.code, "The job sync has no rollback" in ended.err) == (2, True)
    shop.write_file(JOB)
    assert shop.call("resume", "--in-process").code == 0
    assert shop.table() == before


def test_an_unfinished_run_is_not_rolled_back(shop: Table) -> None:
    shop.run("--batches", "1")
    run = shop.newest()
    assert shop.refused(run) == (
        f"Run {run} of sync is paused, so it is not rolled back.\n"
        "Whoever goes on with it would do again what is undone.\n"
        f"Nothing was undone.\nFirst give it up: batchrun cancel {run}\n"
    )
    before = shop.call("cancel", run)
    assert before.code == 0
    shop.roll_back(run)
    assert len(shop.table()) == 10


def test_no_run_is_rolled_back_while_another_one_is_unfinished(shop: Table) -> None:
    run = shop.done_once()
    shop.run("--batches", "1")
    other = shop.newest()
    assert shop.refused(run) == (
        f"Run {other} of sync is paused.\n"
        "A job has one unfinished run at most, and a rollback is a run of its own.\n"
        f"Nothing was undone.\nFirst type one of:\n  batchrun resume {other}\n"
        f"  batchrun cancel {other}\n"
    )


def test_operations_of_unknown_outcome_come_first(shop: Table) -> None:
    run = shop.done_once()
    with contextlib.closing(sqlite3.connect(shop.folder / "state/ledger.db")) as ledger:
        ledger.execute(
            "INSERT INTO operation (job, key, run, generation, number, arguments, claimed_at)"
            " VALUES ('sync', 'push/1', 1, 1, 4, x'00', '')"
        )
        ledger.commit()
    assert shop.refused(run) == (
        f"1 operations of run {run} of sync have no known outcome.\n"
        "Whether there is something to undo in the outside world is to be known first.\n"
        f"Nothing was undone.\nType: batchrun reconcile {run}\n"
    )


def test_operations_of_a_batch_that_was_never_committed_are_named_as_not_undone(
    shop: Table,
) -> None:
    effects = """\
        for x in batch:
            ctx.once(f"mail/{x}", lambda key, n: None, x)
        if batch.number == 3:
            raise batchrun.Fatal("stop here")
"""
    begins = "        with batch.transaction() as rows:\n            for x in batch:\n"
    job = JOB.replace(begins, effects + begins)
    shop.write_file(f"import batchrun\n{job}")
    assert shop.run().code == 1
    run = shop.newest()
    assert shop.call("cancel", run).code == 0
    keys = ", ".join(f"mail/{x}" for x in range(10, 15))
    line = f"  NOT UNDONE: 5 operations of a batch that was never committed: {keys}\n"
    assert line in shop.roll_back(run, "--dry-run").out
    document = json.loads(shop.roll_back(run, "--dry-run", "--json").out)
    assert (document["operations"], document["uncommitted"]) == (10, 5)
    shop.roll_back(run)
    assert line in shop.call("report", shop.newest()).out


def test_a_run_without_rows_names_its_operations_and_the_newest_run_that_has_some(
    shop: Table,
) -> None:
    first = shop.done_once()
    shop.value("new", first=99)
    run = shop.done_once()
    with contextlib.closing(sqlite3.connect(shop.folder / "state/ledger.db")) as ledger:
        insert = (
            "INSERT INTO operation (job, key, run, generation, number, arguments, claimed_at,"
            " outcome) VALUES ('sync', ?, 2, 1, ?, x'00', '', 'done')"
        )
        ledger.executemany(insert, [("push/1", 4), ("push/2", 5)])
        ledger.commit()
    assert shop.refused(run) == (
        f"Run {run} of sync has nothing to undo above batch 0.\n"
        "None of those batches has remembered a row, or what they had is being pruned.\n"
        "NOT UNDONE: 2 operations: push/1, push/2\n"
        "Nothing was undone.\n"
        f"The newest run that has remembered rows: batchrun rollback {first}\n"
    )


def test_a_rollback_is_not_rolled_back_and_nothing_is_twice(shop: Table) -> None:
    shop.value("new", first=5)
    run = shop.done_once()
    shop.roll_back(run, "--to-batch", "3")
    undone = shop.newest()
    assert shop.refused(undone) == (
        f"Run {undone} of sync is a rollback itself, of run {run}.\n"
        "It put back what was there before; what it has overwritten is not kept.\n"
        "Nothing was undone.\nBegin the job anew: batchrun run sync\n"
    )
    assert shop.refused(run, "--to-batch", "3") == (
        f"Run {run} of sync is rolled back to batch 3 already.\n"
        "There is nothing above batch 3 that is not undone.\n"
        f"Nothing was undone.\nSee: batchrun report {run}\n"
    )
    assert shop.refused(run, "--to-batch", "17", code=2) == (
        f"Run {run} of sync has no batch 17; its newest commit is 5.\n"
        "Batches above --to-batch are undone, and 0 undoes all.\n"
        f"Nothing was undone.\nSee: batchrun report {run}\n"
    )
    shop.roll_back(run, "--to-batch", "1")
    assert shop.refused(run) == (
        f"Run {run} of sync has nothing to undo above batch 0.\n"
        "None of those batches has remembered a row, or what they had is being pruned.\n"
        f"Nothing was undone.\nSee: batchrun report {run}\n"
    )


def test_other_settings_are_refused(shop: Table) -> None:
    head = "from dataclasses import dataclass\n@dataclass(frozen=True)\n"
    head += "class Settings:\n    city: str\n"
    job = f"{head}{JOB}".replace("@job(", "@job(settings=Settings, ")
    shop.write_file(job, config='city = "Ulm"\n')
    run = shop.done_once()
    shop.write_file(job, config='city = "Bonn"\n')
    assert shop.refused(run) == (
        f"Settings of sync changed since run {run}: city.\n"
        "What it has remembered belongs to the old ones.\nNothing was undone.\n"
        "Put them back in the configuration, then type this again.\n"
    )


def test_a_missing_or_torn_image_is_named_and_nothing_is_undone(shop: Table) -> None:
    run = shop.done_once()
    newest = shop.images()[-1]
    for spoil in (lambda: newest.write_bytes(newest.read_bytes()[:-1]), newest.unlink):
        spoil()
        assert f"What batch 4 of run {run} has remembered cannot be read.\n{newest}: " in (
            shop.refused(run)
        )
        assert f"What batch 4 of run {run} has remembered" in shop.call("check").out
    assert shop.table() == [(x, "new") for x in range(20)]


def test_what_is_rolled_back_is_needed_no_more(shop: Table) -> None:
    run = shop.done_once()
    shop.roll_back(run)
    shop.images()[-1].unlink()
    assert shop.call("check").code == 0


def test_remember_and_remembered_have_their_places(shop: Table) -> None:
    shop.write_file(JOB.replace("    value, first", "    ctx.remembered\n    value, first"))
    assert shop.letter() == (
        "ctx.remembered was asked for in a run that is no rollback.\n"
        "Only `batchrun rollback RUN` hands out what a run has remembered.\n"
        "Nothing more was committed.\nRead it in the function that @job(rollback=) names."
    )
    shop.write_file(
        JOB.replace(
            "            for x, v in batch:",
            "            batch.remember([1])\n            for x, v in batch:",
        )
    )
    run = shop.done_once()
    ended = shop.roll_back(run, code=1)
    assert (
        "Batch 1 of a rollback called remember().\n"
        "A rollback is not rolled back itself; the job is begun anew.\n"
        "Nothing more was committed.\n"
        "Leave it out of the function that @job(rollback=) names." in ended.err
    )


def test_a_rollback_that_is_no_generator_is_refused(shop: Table) -> None:
    shop.write_file(JOB.replace("        yield batch\n\n@job", "\n@job"))
    assert "The job undo never yields." in shop.run().err


# --- no success of the job ----------------------------------------------------------------------


def test_a_run_that_was_rolled_back_is_no_success_and_neither_is_its_rollback(shop: Table) -> None:
    shop.write_file(JOB, config='once_per = "month"\n')
    first = shop.done_once()
    assert "has succeeded in this month already" in shop.run("-v").err
    shop.roll_back(first)
    assert shop.call("status", "sync", "--json").document["jobs"][0]["last_success"] is None
    again = shop.done_once()
    assert again != first
    assert shop.table() == [(x, "new") for x in range(20)]


def test_check_names_each_critical_job_without_a_rollback(shop: Table) -> None:
    shop.write_file(JOB, config="critical = true\n")
    shop.done_once()
    assert shop.call("check").code == 0
    shop.write_file(NO_ROLLBACK, config="critical = true\n")
    ended = shop.call("check")
    assert (ended.code, ended.out) == (
        3,
        (
            "the critical job sync has no rollback\n  a run of it cannot be taken back\n"
            f"  to type: add @job(rollback=...) in {shop.folder}/jobs/sync.py\n"
        ),
    )


def test_the_rejects_of_a_rollback_are_not_run_through_the_job(shop: Table) -> None:
    shop.write_file(
        JOB.replace(
            "            for x, v in batch:",
            "            batch.reject(batch.records[0], 'no')\n            for x, v in batch:",
        ),
        config="max_rejects = 4\n",
    )
    run = shop.done_once()
    shop.roll_back(run, code=10)
    ended = shop.call("rejects", "retry", shop.newest())
    assert (ended.code, ended.err) == (
        2,
        (
            f"Run {shop.newest()} is a rollback; its rejects are no records of the job.\n"
            f"Mend them by hand: batchrun rejects show {shop.newest()}\n"
        ),
    )
