"""Rejected records: how many a run may have, what is kept of them, and how they are run again."""

import contextlib
import os
import signal
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended, Project, clean_environment, wait_for
from test_08_jobs import PRELUDE, Shop
from test_11_worker import at
from test_12_supervisor import is_stopped

import batchrun
from batchrun import ConfigurationError, Reject, RejectLimit, load_config

STOCK = """
    stock = ctx.connect("sqlite:t.db")
    make = "CREATE TABLE IF NOT EXISTS t (x TEXT)"
    ctx.step("make", lambda rows: rows.execute(make) and None, target=stock)
    bad = open("bad.txt").read().split()
    """
WRITE = """
        with batch.transaction() as rows:
            for record in batch:
                if str(record) in bad:
                    batch.reject(record, f"{record} is bad")
                else:
                    rows.execute("INSERT INTO t VALUES (?)", [str(record)])
        yield batch
    """
LOOP = f"""
    for batch in ctx.batches(range(20), target=stock):{WRITE}"""


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


def bad(shop: Shop, *records: object) -> None:
    """Let the job reject these records from now on."""
    shop.project.write_file("bad.txt", " ".join(map(str, records)))


def applied(shop: Shop) -> list[str]:
    """Return what the job has written, in the order of writing."""
    with contextlib.closing(sqlite3.connect(shop.folder / "t.db")) as stock:
        return [x for (x,) in stock.execute("SELECT x FROM t ORDER BY rowid")]


def newest(shop: Shop) -> str:
    """Return the id of the newest run."""
    return str(shop.rows("SELECT id FROM run ORDER BY key DESC LIMIT 1")[0][0])


def rejects(shop: Shop, run: str) -> list[dict[str, Any]]:
    """Return what `rejects list` says."""
    ended = shop.call("rejects", "list", run, "--json")
    assert ended.code == 0, ended
    return list(ended.document["rejects"])


def states(shop: Shop, run: str) -> list[tuple[int, str, str]]:
    """Return id, record and state of each reject of a run and its retries."""
    return [(r["id"], r["record"], r["state"]) for r in rejects(shop, run)]


def retry(shop: Shop, run: str, *ids: int, point: str = "") -> Ended:
    """Run open rejects again."""
    words = ("rejects", "retry", run, *map(str, ids), "--in-process")
    return shop.call(*words, point=point)


# --- the limits -----------------------------------------------------------------------------------


def read_limit(project: Project, text: str) -> RejectLimit:
    project.write(f"[jobs.sync]\nmax_rejects = {text}\n")
    return load_config(project.folder / "batchrun.toml").job("sync").max_rejects


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0", (0, None)),
        ("100", (100, None)),
        ('"0.5%"', (None, 5_000)),
        ('"0.0001%"', (None, 1)),
        ('[100, "1%"]', (100, 10_000)),
        ('["1%", 100]', (100, 10_000)),
    ],
)
def test_a_limit_is_a_number_a_share_or_both(
    project: Project, text: str, limit: tuple[int | None, int | None]
) -> None:
    assert read_limit(project, text) == limit


@pytest.mark.parametrize(
    "text", ["-1", "1.5", '"5"', '"100%"', '"-1%"', "true", '["1%", "2%"]', "[1, 2]", '"1 %"']
)
def test_a_limit_that_says_nothing_sure_is_refused(project: Project, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_limit(project, text)
    wanted = 'a number of records, a share below "100%", or a list of one of each is wanted'
    assert wanted in str(refused.value)


def test_an_empty_list_is_no_limit(project: Project) -> None:
    with pytest.raises(ConfigurationError, match="a number of records or a share is wanted"):
        read_limit(project, "[]")


@pytest.mark.parametrize(
    ("limit", "rejected", "read", "at_end", "over"),
    [
        (RejectLimit(2, None), 2, 2, False, ""),
        (RejectLimit(2, None), 3, 10**9, False, "2 records"),
        (RejectLimit(None, 10_000), 10, 20, False, ""),  # 1,000 count as read, until the end
        (RejectLimit(None, 10_000), 11, 20, False, "1% of 1,000 records"),
        (RejectLimit(None, 10_000), 10, 20, True, "1% of 20 records"),
        (RejectLimit(None, 5_000), 60, 12_000, True, ""),
        (RejectLimit(None, 5_000), 61, 12_000, True, "0.5% of 12,000 records"),
        (RejectLimit(2, 10_000), 3, 10_000, False, "2 records"),
        (RejectLimit(200, 10_000), 101, 10_000, False, "1% of 10,000 records"),
    ],
)
def test_a_share_is_of_the_records_read_so_far(
    limit: RejectLimit,
    rejected: int,
    read: int,
    at_end: bool,  # noqa: FBT001 - a column of the table above
    over: str,
) -> None:
    assert limit.exceeded(rejected, read, at_end=at_end) == over


def test_a_run_over_its_share_fails_at_that_batch_and_names_its_first_reject(shop: Shop) -> None:
    shop.write(STOCK + LOOP, config='max_rejects = "0.1%"')
    bad(shop, 3, 7, 8)
    assert shop.letter().splitlines() == [
        "More than 0.1% of 1,000 records were rejected, the first of this batch: 7: 7 is bad.",
        "The batch is not committed; commit 2 stands.",
        "Mend the records, or raise max_rejects in [jobs.sync].",
    ]
    assert applied(shop) == ["0", "1", "2", "4"]
    assert states(shop, "sync") == [(1, "3", "open")]


def test_a_share_is_judged_at_the_end_by_what_was_read(shop: Shop) -> None:
    shop.write(STOCK + LOOP, config='max_rejects = "1%"')
    bad(shop, 3)
    letter = [
        "More than 1% of 20 records were rejected, the first: 3: 3 is bad.",
        "No commit was undone; commit 6 stands.",
        "Mend the records, or raise max_rejects in [jobs.sync].",
    ]
    assert shop.letter().splitlines() == letter
    assert shop.letter().splitlines() == letter  # it stays so, and nothing is done twice
    shop.write(STOCK + LOOP, config='max_rejects = "5%"')
    assert shop.run().code == 10
    assert applied(shop) == [str(n) for n in range(20) if n != 3]


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"sku": "a", "price": Decimal("1.50"), "tags": ["x", None, True]},
        ("a", 1, 2.5),
        ["a", b"bytes"],
        "text",
        7,
        None,
    ],
)
def test_a_record_of_plain_types_comes_back_as_it_was(record: object) -> None:
    kept = batchrun.kept_reject(Reject(record, "why", 3, raw=True))
    assert batchrun.decode_cursor(str(kept["value"])) == record
    assert (kept["record"], kept["record_number"], kept["raw"]) == (repr(record), 3, True)


class Priced(dict[str, object]):
    """A type that no cursor has."""


class Unspeakable:
    """A record that cannot even be shown."""

    def __repr__(self) -> str:
        raise OSError("no words")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Priced(a=1), "{'a': 1}"),
        ({"n": float("nan")}, "{'n': nan}"),
        ({"password": "S3cr3t-of-shop"}, "{'password': '***'}"),
        (Unspeakable(), "<Unspeakable, which cannot be shown: OSError>"),
    ],
)
def test_of_any_other_record_only_the_masked_text_is_kept(record: object, text: str) -> None:
    kept = batchrun.kept_reject(Reject(record, "why"))
    assert (kept["record"], kept["value"]) == (text, None)


def test_of_what_is_no_record_of_the_batch_only_the_text_is_kept(shop: Shop) -> None:
    shop.write(
        """
        for batch in ctx.batches([{"sku": "a"}, {"sku": "b"}, {"sku": "c"}]):
            batch.reject("a", "the key alone")
            batch.reject({"sku": "b"}, "an equal copy")
            batch.reject(batch.records[2], "itself")
            yield batch
        """,
        config="max_rejects = 3",
    )
    assert shop.run().code == 10
    assert [r["can_retry"] for r in rejects(shop, "sync")] == [False, True, True]


def test_a_large_record_is_cut_and_says_so() -> None:
    kept = batchrun.kept_reject(Reject("x" * 70_000, "y" * 70_000))
    assert kept["value"] is None
    assert str(kept["record"]).endswith("xxx... (cut: 70,002 characters)")
    assert [len(str(kept[name])) for name in ("record", "reason")] == [65_564, 65_536]


FEED = """
    feed = ctx.enter(Delimited("feed.csv", key="sku", parse=parsed))
    for batch in ctx.batches(feed, target=stock):
        with batch.transaction() as rows:
            for r in batch:
                rows.execute("INSERT INTO t VALUES (?)", [f"{r['sku']}={r['qty'] + 1}"])
        yield batch
    """
PARSE = '\nMORE = ""\ndef parsed(r):\n    return {**r, "qty": int(r["qty"] + MORE)}\n\n'


def write_feed_job(shop: Shop, parse: str = PARSE) -> None:
    lines = (line[4:] for line in (STOCK + FEED).splitlines())
    body = "".join(f"    {line}\n" for line in lines)
    text = f"{PRELUDE}{parse}@job\ndef sync(ctx):\n{body}"
    shop.write_file(text, config="max_rejects = 5")


def test_what_parse_refused_is_kept_raw_with_its_number_and_goes_through_parse_again(
    shop: Shop,
) -> None:
    write_feed_job(shop)
    bad(shop)
    shop.project.write_file("feed.csv", "sku,qty\na,1\nb,\nc,3\nd,\n")
    assert shop.run().code == 10
    assert shop.rows("SELECT read, rejected FROM run ORDER BY key DESC LIMIT 1") == [(4, 2)]
    [b, d] = rejects(shop, "sync")
    assert (b["record"], b["record_number"], b["raw"]) == ("{'sku': 'b', 'qty': ''}", 2, True)
    assert b["reason"].startswith("record 2: ValueError: invalid literal")
    assert (d["record_number"], d["can_retry"]) == (4, True)
    write_feed_job(shop, PARSE.replace('MORE = ""', 'MORE = "0"'))
    assert retry(shop, newest(shop)).code == 0
    assert applied(shop) == ["a=2", "c=4", "b=1", "d=1"]


def test_what_parse_refuses_again_waits_with_its_new_error(shop: Shop) -> None:
    write_feed_job(shop)
    bad(shop)
    shop.project.write_file("feed.csv", "sku,qty\na,1\nb,\n")
    assert shop.run().code == 10
    first = newest(shop)
    write_feed_job(shop, PARSE.replace("int(r", "float(r"))
    assert retry(shop, first).code == 10
    old, new = rejects(shop, first)
    assert (old["state"], old["retry"]) == ("retried", newest(shop))
    assert (new["state"], new["run"], new["raw"]) == ("open", newest(shop), True)
    assert new["reason"].startswith("record 2: ValueError: could not convert")


# --- retry ----------------------------------------------------------------------------------------


@pytest.fixture
def rejected(shop: Shop) -> Shop:
    """A shop with one finished run, of which 3, 8 and 9 were rejected."""
    shop.write(STOCK + LOOP, config="max_rejects = 5")
    bad(shop, 3, 8, 9)
    assert shop.run().code == 10
    return shop


def test_a_retry_runs_just_the_rejects_through_the_same_job(rejected: Shop) -> None:
    first = newest(rejected)
    bad(rejected, 8)
    ended = retry(rejected, first)
    assert ended.code == 10, ended
    assert applied(rejected)[-2:] == ["3", "9"]
    assert sorted(map(int, applied(rejected))) == [n for n in range(20) if n != 8]
    gone = [(1, "3", "retried"), (2, "8", "retried"), (3, "9", "retried")]
    assert states(rejected, first) == [*gone, (4, "8", "open")]
    bad(rejected)
    assert retry(rejected, newest(rejected)).code == 0
    assert states(rejected, first) == [*gone, (4, "8", "retried")]
    assert sorted(map(int, applied(rejected))) == list(range(20))
    assert rejected.rows("SELECT read, rejected, retry_of FROM run") == [
        (20, 3, None),
        (3, 1, first),
        (1, 0, first),
    ]


@pytest.mark.parametrize("opened", ['ctx.connect("sqlite:s.db")', 'sqlite3.connect("s.db")'])
def test_a_retry_of_a_query_takes_the_keys_of_rows_that_are_there_no_more(
    shop: Shop, opened: str
) -> None:
    body = f"""
        source = {opened}
        bad = open("bad.txt").read().split()
        for batch in ctx.batches(Query(source, "SELECT n, sku FROM s", key="sku")):
            done(batch.number, batch.first_key)
            for row in batch:
                if str(row[0]) in bad:
                    batch.reject(row, "bad")
            yield batch
        """
    shop.write(body, config="max_rejects = 5")
    stock_of_20(shop.folder, "s.db").close()
    bad(shop, 3, 8)
    assert shop.run().code == 10
    bad(shop)
    with contextlib.closing(sqlite3.connect(shop.folder / "s.db")) as source, source:
        source.execute("DELETE FROM s")
    assert retry(shop, newest(shop)).code == 0
    assert shop.done()[-1:] == ["s03"]
    assert [state for _, _, state in states(shop, "sync")] == ["retried", "retried"]


def test_a_raw_record_of_no_known_number_is_refused_again_without_one() -> None:
    class Source:
        def key(self, record: Any) -> Any:  # noqa: ANN401 - a record
            return record

        def parse(self, record: Any) -> int:  # noqa: ANN401
            return int(record)

    blank = batchrun.RejectRow(*[None] * len(batchrun.RejectRow._fields))  # type: ignore[arg-type]
    row = blank._replace(value='"x"', raw=1, spot=(1, 1, 1))
    taken_up = batchrun._TakenUp(Source(), lambda _after, _limit: [row])
    assert taken_up.read(None, 5) == ([], (1, 1, 1))
    why = "ValueError: invalid literal for int() with base 10: 'x'"
    assert taken_up.take_rejects() == [Reject("x", why, None, raw=True)]


def test_a_retry_that_fails_is_tried_again_by_its_supervisor(rejected: Shop) -> None:
    once = """
        if not os.path.exists("once"):
            open("once", "w").close()
            raise OSError("once")"""
    loop = LOOP.replace("target=stock):", f"target=stock):{once}")
    rejected.write(STOCK + loop, config='max_tries = 2\nretry_first_wait = "1ms"\n')
    bad(rejected)
    assert rejected.project.run("rejects", "retry", "sync").code == 0
    assert applied(rejected)[-3:] == ["3", "8", "9"]


def test_a_retry_has_no_limit_of_rejects(rejected: Shop) -> None:
    rejected.write(STOCK + LOOP, config='max_rejects = [0, "1%"]')
    bad(rejected, 8)
    assert retry(rejected, "sync").code == 10
    assert applied(rejected)[-2:] == ["3", "9"]


def test_only_the_rejects_that_are_named_are_retried(rejected: Shop) -> None:
    bad(rejected)
    assert retry(rejected, "sync", 2).code == 0
    assert applied(rejected)[-1] == "8"
    ended = rejected.call("rejects", "list", "sync", "--json").document["rejects"]
    assert [r["state"] for r in ended] == ["open", "retried", "open"]
    again = retry(rejected, "sync", 2)
    assert (again.code, again.err.splitlines()[0]) == (
        4,
        f"Run {newest(rejected)} of sync has no open reject that can be run again.",
    )
    assert len(rejected.rows("SELECT 1 FROM run")) == 2


def test_a_reject_that_is_not_there_is_a_letter(rejected: Shop) -> None:
    ended = retry(rejected, "sync", 4)
    run = newest(rejected)
    assert (ended.code, ended.err) == (
        4,
        f"Run {run} has no reject 4; it has 3.\nSee: batchrun rejects list {run}\n",
    )


def test_a_retry_that_a_disk_refuses_to_begin_is_typed_again(rejected: Shop) -> None:
    folder = rejected.project.state / "checkpoints" / "sync"
    folder.rename(folder.with_name("aside"))
    folder.touch()
    ended = rejected.project.run("rejects", "retry", "sync")
    assert (ended.code, ended.err.splitlines()[-1]) == (
        5,
        f"Check the disk of {folder}, then type this again.",
    )


@pytest.mark.parametrize(
    "point",
    ["batch.handed_out", "target.commit", "target.committed", "checkpoint.rename", "ledger.commit"],
)
def test_a_retry_that_is_killed_goes_on_and_applies_each_record_once(
    rejected: Shop, point: str
) -> None:
    first = newest(rejected)
    bad(rejected)
    rejected.write(STOCK + LOOP.replace("target", "size=2, target"), config="max_rejects = 5")
    for number in (2, 3):  # commit 1 is the step
        kill = f"{point}@{number}=kill"
        ended = retry(rejected, first, point=kill) if number == 2 else rejected.run(point=kill)
        assert ended.code == -signal.SIGKILL
    refused = retry(rejected, first)
    assert (refused.code, refused.err.splitlines()[0]) == (
        13,
        f"Run {newest(rejected)} of sync is unfinished.",
    )
    assert rejected.call("resume", newest(rejected), "--in-process").code == 0
    assert [state for *_, state in states(rejected, first)] == ["retried"] * 3
    assert sorted(map(int, applied(rejected))) == list(range(20))
    assert applied(rejected)[-3:] == ["3", "8", "9"]


def test_a_retry_that_is_cancelled_gives_back_what_it_has_not_done(rejected: Shop) -> None:
    first = newest(rejected)
    bad(rejected)
    rejected.write(STOCK + LOOP.replace("target", "size=2, target"), config="max_rejects = 5")
    assert retry(rejected, first, point="batch.handed_out@3=kill").code == -signal.SIGKILL
    dropped = rejected.call("rejects", "drop", first, "--why", "old")
    assert "13  a person is needed" in rejected.call("rejects", "drop", "--help").out
    assert (dropped.code, dropped.err.splitlines()[0]) == (
        13,
        f"Run {newest(rejected)} of sync is unfinished.",
    )
    assert rejected.call("cancel", newest(rejected)).code == 0
    left = [(1, "3", "retried"), (2, "8", "retried"), (3, "9", "open")]
    assert states(rejected, first) == left
    assert retry(rejected, first).code == 0
    assert sorted(map(int, applied(rejected))) == list(range(20))


def test_a_retry_needs_the_run_to_be_finished(shop: Shop) -> None:
    shop.write(STOCK + LOOP, config="max_rejects = 1")
    bad(shop, 3, 8)
    assert shop.run().code == 1
    run = newest(shop)
    ended = retry(shop, "sync")
    assert ended.code == 13
    assert ended.err == (
        f"Run {run} of sync is unfinished.\n"
        "A job has one unfinished run at most, and a retry is a run of its own.\n"
        "Nothing was started; the rejects are as they were.\n"
        f"First type one of:\n  batchrun resume {run}\n  batchrun cancel {run}\n"
    )


TWO = f"""
    ctx.step("note", lambda: done("step"))
    for batch in ctx.batches(range(5), name="empty", target=stock):{WRITE}
    for batch in ctx.batches(range(10, 15), name="bad", target=stock):{WRITE}
    """


def test_steps_run_and_loops_without_rejects_are_empty(shop: Shop) -> None:
    shop.write(STOCK + TWO, config="max_rejects = 1")
    bad(shop, 12)
    assert shop.run().code == 10
    bad(shop)
    assert retry(shop, "sync").code == 0
    assert shop.done() == ["step", "step"]
    assert applied(shop) == ["0", "1", "2", "3", "4", "10", "11", "13", "14", "12"]


def test_a_retry_has_the_settings_of_its_run(shop: Shop) -> None:
    text = """
from dataclasses import dataclass
from batchrun import job

@dataclass(frozen=True)
class Settings:
    bad: int = 0

@job(settings=Settings)
def sync(ctx):
    for batch in ctx.batches(range(5)):
        for record in batch:
            if record == ctx.settings.bad:
                batch.reject(record, "bad")
        yield batch
"""
    shop.write_file(text, config="max_rejects = 1")
    assert shop.run("--set", "bad=3").code == 10
    assert retry(shop, "sync").code == 10
    assert [(r["record"], r["state"]) for r in rejects(shop, "sync")] == [
        ("3", "retried"),
        ("3", "open"),
    ]


def test_a_retry_does_not_look_like_a_success_of_the_whole(rejected: Shop) -> None:
    status = ("status", "sync", "--json")
    [before] = rejected.call(*status).document["jobs"]
    bad(rejected)
    assert retry(rejected, "sync").code == 0
    [after] = rejected.call(*status).document["jobs"]
    assert before["last_success"] == after["last_success"]
    report = rejected.call("report", newest(rejected)).out.splitlines()
    first = rejected.rows("SELECT retry_of FROM run ORDER BY key DESC")[0][0]
    assert report[0] == "sync: succeeded"
    assert f"It is a retry of rejects of run {first}." in report


def test_min_of_last_is_not_fooled_by_a_retry(shop: Shop) -> None:
    job = STOCK + FEED.replace(", parse=parsed", ", min_of_last=0.9").replace(
        "r['qty'] + 1", "r['qty']"
    )
    job = job.replace(
        "for r in batch:",
        "for r in batch:\n                if r['sku'] in bad:\n"
        "                    batch.reject(r, 'bad')\n                    continue",
    )
    shop.write(job, config="max_rejects = 5")
    bad(shop, "s3")
    feed = "".join(f"s{n},{n}\n" for n in range(20))
    shop.project.write_file("feed.csv", f"sku,qty\n{feed}")
    assert shop.run().code == 10
    bad(shop)
    assert retry(shop, "sync").code == 0
    shop.project.write_file("feed.csv", "sku,qty\ns1,1\n")
    assert "ended after 1 records: too few." in shop.letter(code=13)


def test_a_timer_that_meets_an_unfinished_retry_goes_on_with_it_and_then_runs_the_whole(
    rejected: Shop,
) -> None:
    bad(rejected)
    killed = retry(rejected, "sync", point="batch.handed_out@2=kill")
    assert killed.code == -signal.SIGKILL
    assert rejected.run().code == 0
    assert rejected.rows("SELECT state, read, retry_of IS NULL FROM run ORDER BY key") == [
        ("succeeded", 20, 1),
        ("succeeded", 3, 0),
        ("succeeded", 20, 1),
    ]


def test_a_timer_that_has_finished_a_retry_and_meets_maintenance_is_deferred(
    rejected: Shop,
) -> None:
    bad(rejected)
    assert retry(rejected, "sync", point="batch.handed_out@2=kill").code == -signal.SIGKILL
    words = ("run", "sync", "--when-blocked", "defer")
    process = rejected.project.start(*words, env=at("attempt.settled=stop"))
    wait_for(lambda: is_stopped(process.pid), "the end of the retry")
    assert rejected.project.run("maintenance", "on").code == 0
    os.kill(process.pid, signal.SIGCONT)
    assert rejected.project.finish(process).code == 75
    found = rejected.rows("SELECT state, deferred IS NULL, retry_of IS NULL FROM run ORDER BY key")
    assert found == [("succeeded", 1, 1), ("succeeded", 1, 0), ("waiting", 0, 1)]


def test_a_retry_goes_through_a_worker_of_its_own(rejected: Shop) -> None:
    bad(rejected)
    run = newest(rejected)
    ended = rejected.project.run("rejects", "retry", "sync", "1")
    assert ended == Ended(0, "", "")
    assert applied(rejected)[-1] == "3"
    assert [r["state"] for r in rejects(rejected, run)] == ["retried", "open", "open"]


# --- list, show, drop -----------------------------------------------------------------------------


def test_the_open_rejects_of_all_runs_are_listed(rejected: Shop) -> None:
    first = newest(rejected)
    lines = rejected.call("rejects", "list").out.splitlines()
    assert lines[0].split() == ["run", "job", "ended", "open", "rejects"]
    assert lines[1].split()[0] == first
    assert lines[1].split()[-1] == "3"
    bad(rejected)
    assert retry(rejected, first).code == 0
    assert rejected.call("rejects", "list").out == "no open rejects\n"


def test_a_reject_is_shown_with_all_that_is_kept(rejected: Shop) -> None:
    run = newest(rejected)
    lines = rejected.call("rejects", "show", "sync", "1").out.splitlines()
    assert lines[0] == f"reject 1 of run {run}: open"
    assert lines[1].startswith("  commit    2 of attempt 1, loop main, ")
    assert lines[1].endswith("Z, try 1")
    assert lines[2:] == [
        "  kept is   the job's record",
        "  reason    3 is bad",
        "  record    3",
    ]


def test_dropping_needs_a_reason_and_is_recorded(rejected: Shop) -> None:
    run = newest(rejected)
    ended = rejected.call("rejects", "drop", run, "1", "--why", " ")
    assert (ended.code, ended.err) == (2, "--why says nothing: ' '.\nWrite: --why TEXT\n")
    why = ("--why", "the supplier sent token=abcd1234")
    assert (
        rejected.call("rejects", "drop", run, "1", *why).out == f"1 rejects of run {run} dropped\n"
    )
    shown = rejected.call("rejects", "show", run, "1").out.splitlines()[0]
    assert shown == f"reject 1 of run {run}: dropped: the supplier sent token=***"
    event = rejected.rows("SELECT what, why FROM event WHERE what LIKE '%dropped'")
    assert event == [("1 rejects dropped", "the supplier sent token=***")]
    bad(rejected)
    assert retry(rejected, run).code == 0
    assert applied(rejected)[-2:] == ["8", "9"]


def test_rejects_of_a_retry_that_asks_for_an_approval_wait_for_it(rejected: Shop) -> None:
    rejected.write(STOCK + '\n    ctx.approval("publish", "now?")' + LOOP)
    ended = rejected.project.run("rejects", "retry", "sync")
    assert ended.code == 13, ended
    asks = newest(rejected)
    for words in (("retry", "sync"), ("retry", asks), ("drop", "sync", "--why", "x")):
        refused = rejected.project.run("rejects", *words)
        assert (refused.code, refused.err.splitlines()[-3:]) == (
            13,
            [
                "First type one of:",
                f'  batchrun approve {asks} publish --why "..."',
                f"  batchrun cancel {asks}",
            ],
        )


def test_rejects_of_which_only_text_is_kept_cannot_be_retried_and_say_so(shop: Shop) -> None:
    loop = "class Odd(dict): ...\nfor batch in ctx.batches([Odd(a=1)]):\n"
    shop.write(
        f"{loop}    batch.reject(batch.records[0], 'odd')\n    yield batch",
        config="max_rejects = 1",
    )
    assert shop.run().code == 10
    assert "open, text only" in shop.call("rejects", "list", "sync").out
    shown = shop.call("rejects", "show", "sync").out
    assert "only its text is kept, so it cannot be retried" in shown
    assert retry(shop, "sync").code == 4


# --- isolation: sources ---------------------------------------------------------------------------


def stock_of_20(folder: Path, name: str = "source.db") -> sqlite3.Connection:
    """Return a database with 20 records, their keys not the numbers from 0."""
    connection = sqlite3.connect(folder / name)
    connection.execute("CREATE TABLE IF NOT EXISTS s (sku TEXT PRIMARY KEY NOT NULL, n INTEGER)")
    rows = [(f"s{number:02}", number) for number in range(20)]
    connection.executemany("INSERT OR IGNORE INTO s VALUES (?, ?)", rows)
    connection.commit()
    return connection


def feed_of_20(folder: Path, name: str, first: str, line: str) -> Path:
    """Write a feed of 20 records with an empty line in it."""
    lines = [line % number for number in range(20)]
    path = folder / name
    path.write_text(first + "".join([*lines[:9], "\n", *lines[9:]]))
    return path


def paged(after: int | None, limit: int) -> tuple[list[int], int | None]:
    first = after or 0
    following = min(first + min(limit, 4), 20)
    return list(range(first, following)), following if following < 20 else None


SOURCES: dict[str, Any] = {
    "list": lambda _: [f"r{n}" for n in range(20)],
    "range": lambda _: range(20),
    "Delimited": lambda folder: batchrun.Delimited(
        feed_of_20(folder, "f.csv", "sku,n\n", '"s%d\n",1\n'), key="sku"
    ),
    "JsonLines": lambda folder: batchrun.JsonLines(feed_of_20(folder, "f.jsonl", "", "[%d]\n")),
    "Query": lambda folder: batchrun.Query(stock_of_20(folder), "SELECT sku, n FROM s", key="sku"),
    "read with a next cursor": lambda _: paged,
}


def batches_of(source: Any, limits: list[int], after: Any = None) -> list[batchrun.Portion]:  # noqa: ANN401
    """Read a source to its end, by limits in turn; the last one stays; let go of it."""
    reader, read = batchrun.Reader(batchrun.as_source(source), after), list[batchrun.Portion]()
    while (portion := reader.read_batch(limits[min(len(read), len(limits) - 1)])).records:
        read.append(portion)
    if isinstance(source, batchrun.Query):
        source._connection.close()
    getattr(source, "close", lambda: None)()
    return read


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("limits", [[3], [1], [2, 1, 4], [10]])
def test_a_smaller_limit_reads_exactly_on_from_any_cursor(
    tmp_path: Path, name: str, limits: list[int]
) -> None:
    whole = batches_of(SOURCES[name](tmp_path), [6])
    assert [len(portion.records) for portion in whole] == [6, 6, 6, 2]
    for done in range(len(whole)):
        after = whole[done - 1].cursor if done else None
        rest = batches_of(SOURCES[name](tmp_path), limits, after)
        assert [len(p.records) for p in rest[:-1]] == (limits + limits[-1:] * 20)[: len(rest) - 1]
        left = [record for portion in whole[done:] for record in portion.records]
        assert [record for portion in rest for record in portion.records] == left


# --- isolation ------------------------------------------------------------------------------------

QUICK = 'max_tries = 2\nretry_first_wait = "1ms"\n'
ISOLATE = "isolate = true\nmax_rejects = 5\n"
FAIL = """
        with batch.transaction() as rows:
            done(batch.number, len(batch))
            for record in batch:
                if str(record) in bad:
                    raise ValueError(f"{record} is bad")
                rows.execute("INSERT INTO t VALUES (?)", [str(record)])
        yield batch
    """
FAILING = f"""
    for batch in ctx.batches(range(20), target=stock):{FAIL}"""


def isolate(shop: Shop, code: int = 10, point: str = "") -> Ended:
    """Run the job with real workers; `code` is what it ends with."""
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": point}
    ended = shop.project.run("run", "sync", env=env)
    assert ended.code == code, ended
    return ended


def sizes(shop: Shop) -> list[int]:
    """Return how many records each batch had that was begun."""
    return [int(size) for size in shop.done()[1::2]]


@pytest.mark.parametrize("poison", [[0], [12, 13], [19]])
def test_the_bad_records_alone_are_rejected_and_all_others_done_once(
    shop: Shop, poison: list[int]
) -> None:
    shop.write(STOCK + FAILING, config=ISOLATE)
    bad(shop, *poison)
    isolate(shop)
    assert applied(shop) == [str(n) for n in range(20) if n not in poison]
    kept = [(r["record"], r["reason"].partition(" in batch")[0]) for r in rejects(shop, "sync")]
    assert kept == [(str(n), f"The job raised ValueError: {n} is bad") for n in poison]
    ended = [(20, len(poison), "succeeded")]
    assert shop.rows("SELECT read, rejected, state FROM run") == ended
    alone = "SELECT read, rejected, first_key IS last_key FROM batch WHERE rejected"
    assert shop.rows(alone) == [(1, 1, 1)] * len(poison)


def test_a_batch_is_halved_until_its_record_is_alone_and_grows_again(shop: Shop) -> None:
    shop.write(STOCK + FAILING.replace("target", "size=16, target"), config=ISOLATE)
    bad(shop, 5)
    isolate(shop)
    #       fails: 0-15, 0-7; 0-3 is done; fails: 4-7, 4-5; 4 is done; 5 fails; then 5 is passed
    assert sizes(shop) == [16, 8, 4, 4, 2, 1, 1, 1, 2, 4, 7]
    assert shop.rows("SELECT count(*), sum(charged) FROM attempt") == [(6, 5)]
    assert [read for (read,) in shop.rows("SELECT read FROM batch WHERE kind = 'batch'")] == [
        *(4, 1, 1, 1, 2, 4, 7)
    ]


def test_a_short_last_batch_is_halved_by_what_it_holds(shop: Shop) -> None:
    loop = FAILING.replace("range(20), target", "range(3), size=1000, target")
    shop.write(STOCK + loop, config=ISOLATE)
    bad(shop, 2)
    isolate(shop)
    assert sizes(shop) == [3, 3, 1, 1, 1]


@pytest.mark.parametrize("key", ["isolate = true", 'on_exhausted = "reject"'])
def test_isolation_without_a_target_is_refused_with_the_reason(shop: Shop, key: str) -> None:
    shop.write("for batch in ctx.batches(range(3)):\n    yield batch", config=f"{key}\n")
    why = "A batch that failed half-way is done again in halves, and only a target tells"
    assert shop.letter().splitlines() == [
        f"Loop 'main' has no target, but [jobs.sync] has {key}.",
        f"{why} what was done.",
        "Nothing more was committed.",
        "Name it, ctx.batches(source, target=connection), or leave that out.",
    ]


def test_over_the_limit_the_run_fails_naming_the_first_record(shop: Shop) -> None:
    shop.write(STOCK + FAILING, config="isolate = true\nmax_rejects = 1\n")
    bad(shop, 1, 7)
    said = isolate(shop, code=1).err.splitlines()[1]
    named = "the first of this batch: 7: The job raised ValueError: 7 is bad"
    assert said.startswith(f"More than 1 records were rejected, {named}")
    assert shop.rows("SELECT charged FROM attempt ORDER BY generation DESC LIMIT 1") == [(0,)]
    assert applied(shop) == ["0", "2", "3", "4", "5", "6"]
    bad(shop)
    isolate(shop)
    assert applied(shop) == [str(n) for n in range(20) if n != 1]  # 7 was mended, and not rejected


SMALL = FAILING.replace("range(20), target", "range(8), size=4, target")


def all_but_1(shop: Shop) -> None:
    """Require that 1 of 0 to 7 was rejected, and the others done once."""
    assert applied(shop) == [str(n) for n in range(8) if n != 1]
    assert [r["record"] for r in rejects(shop, "sync")] == ["1"]
    assert shop.rows("SELECT read, rejected, state FROM run") == [(8, 1, "succeeded")]


# Commit 2 is 0; 3 passes 1 over, with nothing in the target; 4 is 2; then come the others. After
# the last point of each the next attempt goes on behind that commit.
LAST = {2: "ledger.commit", 3: "ledger.commit", 4: "ledger.committed", 5: "ledger.committed"}
KILLS = [
    f"{point}@{number}"
    for number, last in LAST.items()
    for point in ("target.committed", "commit.begun", "ledger.begun", last)
    if (point, number) != ("target.committed", 3)
]


@pytest.mark.parametrize("points", [KILLS, [f"ledger.committed@{number}" for number in LAST]])
def test_isolation_goes_on_with_its_limit_when_its_workers_are_killed(
    shop: Shop, points: list[str]
) -> None:
    kill = f"""
    import batchrun
    ledger = sqlite3.connect("state/ledger.db")
    (died,), = ledger.execute("SELECT count(*) FROM attempt WHERE ending = 'died'")
    ledger.close()
    batchrun.NAMED_POINT = {[*points, "none"]}[died] + "=kill"
    """
    shop.write(kill + STOCK + SMALL, config=ISOLATE + QUICK)
    bad(shop, 1)
    isolate(shop)
    all_but_1(shop)
    assert shop.rows("SELECT count(*) FROM attempt WHERE signal = 9") == [(len(points),)]


def test_isolation_goes_on_with_its_limit_when_all_its_processes_are_killed(shop: Shop) -> None:
    shop.write(STOCK + SMALL, config=ISOLATE + QUICK)
    bad(shop, 1)
    for point in KILLS:
        isolate(shop, code=-signal.SIGKILL, point=f"{point}=kill-both")
    isolate(shop)
    all_but_1(shop)


def test_isolation_goes_on_after_a_stop_in_its_middle(shop: Shop) -> None:
    os.mkfifo(shop.folder / "go")
    held = "\n        if len(batch) == 1 and ctx.generation == 3: open('go').close()"
    shop.write(STOCK + SMALL.replace("target=stock):", f"target=stock):{held}"), config=ISOLATE)
    bad(shop, 1)
    started = shop.project.start("run", "sync")
    with (shop.folder / "go").open("w"):  # it is in the batch
        started.send_signal(signal.SIGTERM)
    assert shop.project.finish(started).code == 75
    assert shop.rows("SELECT state, size, read FROM run") == [("paused", 1, 1)]
    isolate(shop)
    all_but_1(shop)


def test_isolation_goes_on_in_fresh_workers_when_each_outgrows_its_limit(shop: Shop) -> None:
    shop.write(STOCK + SMALL, config=ISOLATE + 'recycle_above = "1MB"\n')
    bad(shop, 1)
    isolate(shop)
    all_but_1(shop)
    assert shop.rows("SELECT count(*) FROM attempt WHERE ending = 'recycled'")[0][0] >= 5


def test_isolation_rests_while_maintenance_is_on(shop: Shop) -> None:
    close = (
        "\n                if str(record) in bad and len(batch) == 1: open(LOCKFILE, 'w').close()"
    )
    lockfile = shop.folder / "state" / "maintenance.lock"
    loop = SMALL.replace("for record in batch:", f"for record in batch:{close}")
    shop.write(STOCK + loop.replace("LOCKFILE", repr(str(lockfile))), config=ISOLATE)
    bad(shop, 1)
    isolate(shop, code=75)
    assert shop.rows("SELECT state, size FROM run") == [("paused", 0)]
    lockfile.unlink()
    isolate(shop)
    all_but_1(shop)


def test_a_batch_that_hangs_is_isolated(shop: Shop) -> None:
    hang = SMALL.replace('raise ValueError(f"{record} is bad")', "import signal; signal.pause()")
    how = 'batch_timeout = "2s"\nmax_tries = 20\nretry_first_wait = "1ms"\n'  # a start may be slow
    shop.write(STOCK + hang.replace("size=4", "size=2"), config=how + ISOLATE)
    bad(shop, 1)
    isolate(shop)
    all_but_1(shop)
    said = "The worker was stopped: batch 3 did not end within 2s (records 2 to 2, loop main, "
    assert rejects(shop, "sync")[0]["reason"].startswith(said)


@pytest.mark.parametrize("name", ["list", "Delimited", "Query", "read with a next cursor"])
def test_a_record_of_any_source_is_isolated(shop: Shop, name: str) -> None:
    where = "from pathlib import Path; from test_rejects import SOURCES"
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    source = f'SOURCES[{name!r}](Path("."))'
    loop = FAILING.replace("range(20), target", f"{source}, size=4, target")
    loop = loop.replace("str(record) in bad", "record == BAD")
    whole = batches_of(SOURCES[name](shop.folder), [20])[0].records
    shop.write(
        f"\n    {path}\n    {where}" + STOCK + loop.replace("BAD", repr(whole[6])), config=ISOLATE
    )
    bad(shop)
    isolate(shop)
    assert applied(shop) == [str(record) for record in whole if record != whole[6]]
    assert [r["record"] for r in rejects(shop, "sync")] == [repr(whole[6])]
    assert sizes(shop) == [4, 4, 2, 2, 1, 1, 2, 4, 4, 2]  # also of a source that is read ahead


def test_another_record_in_the_place_of_the_bad_one_is_tried_and_not_rejected(shop: Shop) -> None:
    stock_of_20(shop.folder).close()
    insert = """
                if len(batch) == 1 and record == ("s01", 1) and not os.path.exists("late"):
                    open("late", "w").close()
                    with sqlite3.connect("source.db") as late:
                        late.execute("INSERT INTO s VALUES ('s00b', 0)")"""
    query = 'Query(sqlite3.connect("source.db"), "SELECT sku, n FROM s", key="sku")'
    loop = FAILING.replace("range(20), target", f"{query}, size=4, target")
    loop = loop.replace("for record in batch:", f"for record in batch:{insert}")
    shop.write(STOCK + loop.replace("str(record) in bad", 'record[0] == "s01"'), config=ISOLATE)
    bad(shop)
    isolate(shop)
    assert [r["record"] for r in rejects(shop, "sync")] == ["('s01', 1)"]
    assert applied(shop)[:3] == ["('s00', 0)", "('s00b', 0)", "('s02', 2)"]


def test_a_record_is_isolated_with_postgresql_as_the_target(shop: Shop, postgres_dsn: str) -> None:
    stock = STOCK.replace("sqlite:t.db", postgres_dsn)
    shop.write(stock + SMALL.replace("VALUES (?)", "VALUES (%s)"), config=ISOLATE)
    bad(shop, 1)
    isolate(shop)
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_dsn) as connection:
        rows = connection.execute("SELECT x FROM t ORDER BY x::int").fetchall()
    assert rows == [(str(n),) for n in range(8) if n != 1]


class OperationalError(Exception):
    """As MySQL's drivers raise it: number and text."""


def test_of_a_mysql_driver_the_number_tells_whether_its_error_may_pass() -> None:
    numbers = (2006, 2013, 1205, 1213, 3819, 1644)  # lost, lost, lock, deadlock, check, trigger
    passes = [batchrun.may_pass(OperationalError(number, "text")) for number in numbers]
    assert passes == [True, True, True, True, False, False]


def test_a_text_that_sqlite3_cannot_decode_does_not_pass_by_itself() -> None:
    scratch, raises = sqlite3.connect(":memory:"), pytest.raises(sqlite3.OperationalError)
    with contextlib.closing(scratch) as connection, raises as raised:
        connection.execute("SELECT CAST(x'ff' AS TEXT)").fetchall()
    assert not batchrun.may_pass(raised.value)


def test_an_error_of_which_each_is_the_cause_of_the_other_comes_of_no_loss() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert not batchrun.comes_of_loss(first)


LOSES = """
    for batch in ctx.batches(range(8), size=4, target=stock):
        with batch.transaction() as rows:
            done(batch.number, len(batch))
            if ctx.generation < 3:
                {lost}
            rows.executemany("INSERT INTO t VALUES (%s)", [(str(n),) for n in batch])
        yield batch
    """
CUT = "stock.execute('SELECT pg_terminate_backend(pg_backend_pid())')"
LOSSES = {
    "told": CUT,
    "found out": "try: " + CUT + "\n                except Exception: pass",
    "told in other words": "try: " + CUT + "\n                except Exception as error:"
    " raise ValueError('no stock') from error",
    "locked": "import psycopg; raise psycopg.errors.LockNotAvailable('held')",
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_server_that_is_lost_is_held_against_no_record(
    shop: Shop, postgres_dsn: str, how: str
) -> None:
    stock = STOCK.replace("sqlite:t.db", postgres_dsn)
    config = 'max_tries = 5\nretry_first_wait = "1ms"\n' + ISOLATE
    shop.write(stock + LOSES.format(lost=LOSSES[how]), config=config)
    bad(shop)
    isolate(shop, code=0)
    assert sizes(shop) == [4, 4, 4, 4]
    assert shop.rows("SELECT sum(charged) FROM attempt") == [(2,)]  # a try each, as of any error
    assert rejects(shop, "sync") == []


@pytest.mark.parametrize("config", ["", 'on_exhausted = "reject"\n'])
def test_a_server_that_stays_lost_leaves_the_batch_to_a_person(
    shop: Shop, postgres_dsn: str, config: str
) -> None:
    stock = STOCK.replace("sqlite:t.db", postgres_dsn)
    shop.write(stock + LOSES.format(lost=CUT), config=QUICK + (config or ISOLATE))
    bad(shop)
    isolate(shop, code=13)
    assert shop.rows("SELECT state, reason, size FROM run") == [("awaiting", "poison", None)]


def test_a_lost_server_that_retry_if_calls_permanent_fails_the_run(
    shop: Shop, postgres_dsn: str
) -> None:
    stock = STOCK.replace("sqlite:t.db", postgres_dsn)
    decorator = "@job(retry_if=lambda error: False)"
    shop.write(stock + LOSES.format(lost=CUT), config=QUICK + ISOLATE, decorator=decorator)
    bad(shop)
    isolate(shop, code=1)
    assert shop.rows("SELECT state, size, rejected FROM run") == [("failed", None, 0)]


def test_a_record_that_its_database_has_no_room_for_is_isolated(
    shop: Shop, postgres_dsn: str
) -> None:
    stock = (
        STOCK.replace("sqlite:t.db", postgres_dsn)
        + """
    make = "CREATE UNIQUE INDEX IF NOT EXISTS t_x ON t (x)"
    ctx.step("index", lambda rows: rows.execute(make) and None, target=stock)
    long = "".join(__import__("random").Random(1).choices("abcdefghijklmnopqrst", k=9000))
    """
    )
    loop = """
    for batch in ctx.batches(["a", "b", "long", "c"], target=stock):
        with batch.transaction() as rows:
            for record in batch:
                rows.execute("INSERT INTO t VALUES (%s)", [record.replace("long", long)])
        yield batch
    """
    shop.write(stock + loop, config=ISOLATE)
    bad(shop)
    isolate(shop)
    [reject] = rejects(shop, "sync")
    assert reject["record"] == "'long'"
    assert reject["reason"].startswith("The job raised ProgramLimitExceeded: index row")


def test_a_batch_that_was_done_before_its_process_died_is_not_taken_for_the_bad_one(
    shop: Shop,
) -> None:
    dying = FAIL.replace(
        "        yield batch",
        "        if batch.records == [0] and not os.path.exists('died'):\n"
        "            open('died', 'w').close()\n            raise OSError('after its commit')\n"
        "        yield batch",
    )
    shop.write(STOCK + FAILING.replace(FAIL, dying), config=ISOLATE)
    bad(shop, 1)
    isolate(shop)
    assert applied(shop) == [str(n) for n in range(20) if n != 1]
    assert [r["record"] for r in rejects(shop, "sync")] == ["1"]


def test_a_source_that_cannot_be_split_is_told(shop: Shop) -> None:
    pages = """
def read(after, limit):
    first = after or 0
    return list(range(first, first + 4)), first + 4 if first < 8 else None
"""
    shop.write(
        pages
        + STOCK.replace("\n    ", "\n")
        + FAILING.replace("\n    ", "\n").replace("range(20)", "read"),
        config=ISOLATE,
    )
    bad(shop, 6)
    assert isolate(shop, code=1).err.splitlines()[1:4] == [
        "The record that fails loop 'main' after 4 cannot be isolated.",
        "Its source gives 4 records in one answer, whatever is asked for.",
        "Nothing more was committed.",
    ]
    assert applied(shop) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("config", ["", 'on_exhausted = "reject"\n'])
def test_an_error_outside_a_batch_isolates_nothing(shop: Shop, config: str) -> None:
    down = "\n    if os.path.exists('down'): raise OSError('no network')"
    breaks = "\n        if batch.number == 3: open('down', 'w'); raise OSError('no network')\n"
    shop.write(STOCK + down + FAILING.rstrip() + breaks, config=QUICK + (config or ISOLATE))
    bad(shop)
    isolate(shop, code=13)
    assert shop.rows("SELECT state, size, tries, batches FROM run") == [("awaiting", None, 2, 2)]


def test_an_isolated_record_can_be_retried(shop: Shop) -> None:
    shop.write(STOCK + FAILING, config=ISOLATE)
    bad(shop, 7)
    isolate(shop)
    assert shop.project.run("rejects", "retry", "sync").code == 10  # and is isolated again
    assert states(shop, "sync") == [(1, "7", "retried"), (2, "7", "open")]
    bad(shop)
    assert retry(shop, "sync").code == 0
    assert applied(shop)[-1] == "7"


@pytest.mark.parametrize("config", ["", 'on_exhausted = "reject"\n'])
def test_what_retry_if_calls_transient_is_held_against_no_record(shop: Shop, config: str) -> None:
    decorator = "@job(retry_if=lambda error: '7 is bad' in str(error))"
    shop.write(STOCK + FAILING, config=QUICK + (config or ISOLATE), decorator=decorator)
    bad(shop, 7)
    isolate(shop, code=13)
    ended = [("awaiting", "poison", None, 2)]
    assert shop.rows("SELECT state, reason, size, tries FROM run") == ended


def test_what_retry_if_calls_permanent_is_isolated(shop: Shop) -> None:
    shop.write(STOCK + SMALL, config=ISOLATE, decorator="@job(retry_if=lambda error: False)")
    bad(shop, 1)
    isolate(shop)
    all_but_1(shop)


# --- isolation by real workers --------------------------------------------------------------------

KILL = """
        with batch.transaction() as rows:
            for record in batch:
                if str(record) in bad:
                    os.kill(os.getpid(), 9)
                rows.execute("INSERT INTO t VALUES (?)", [str(record)])
        yield batch
    """


def test_k16_a_record_that_kills_its_process_is_rejected_alone_and_the_rest_is_done(
    shop: Shop,
) -> None:
    loop = f"\n    for batch in ctx.batches(range(1, 12_346), target=stock, size=5000):{KILL}"
    shop.write(STOCK + loop, config="isolate = true\nmax_rejects = 1\n")
    bad(shop, 7_777)
    ended = shop.project.run("run", "sync")
    assert (ended.code, ended.out, ended.err) == (10, "", "")
    assert sorted(map(int, applied(shop))) == [n for n in range(1, 12_346) if n != 7_777]
    [reject] = rejects(shop, "sync")
    assert (reject["record"], reject["can_retry"]) == ("7777", True)
    assert reject["reason"].startswith("The worker was killed by SIGKILL")
    assert shop.rows("SELECT read, rejected, state FROM run") == [(12_345, 1, "succeeded")]
    assert shop.rows("SELECT sum(charged) FROM attempt") == [(13,)]  # 5,000 to 1


def test_as_plan_b_a_batch_is_isolated_when_its_tries_are_used_up(shop: Shop) -> None:
    shop.write(STOCK + FAILING, config='on_exhausted = "reject"\nmax_rejects = 1\n' + QUICK)
    bad(shop, 7)
    isolate(shop)
    assert applied(shop) == [str(n) for n in range(20) if n != 7]
    #       0-4; fails twice: 5-9; 5-6 is done; fails: 7-8, 7, which is passed; then all the rest
    assert sizes(shop) == [5, 5, 5, 2, 2, 1, 1, 2, 4, 5]
