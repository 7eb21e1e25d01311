"""Reports turn rows into words: the same rows, the same words."""

import json
import re

import pytest

import batchrun
from batchrun import Attempt, Event, ProcessIdentity, RejectRow, Run, RunState, Standing

RUN = Run(
    key=1,
    id="a1b2c3d4e5",
    job="stock",
    state=RunState.PAUSED,
    reason="stop",
    request=None,
    generation=2,
    created_at="2026-01-31T23:00:00.000Z",
    changed_at="2026-01-31T23:59:00.000Z",
    ended_at=None,
    number=3,
    hash="0" * 64,
    checkpoint=b"bytes",
    batches=2,
    read=10_000,
    rejected=1,
    expected=24_000,
    counts={"inserted": 9_000, "updated": 999},
    settings={"feed": "digest"},
    overrides={},
    job_version=1,
    fresh_in_a_row=0,
    read_s=1.0,
    work_s=2.0,
    own_s=0.3,
    error=None,
    retry_of=None,
    rollback_of=None,
    rollback_to=None,
    tried=None,
    tries=0,
    paused_s=0.0,
    checks_at=None,
    deferred=None,
    size=None,
)
ATTEMPT = Attempt(
    generation=1,
    supervisor=ProcessIdentity(10, 20, "boot"),
    worker=ProcessIdentity(11, 21, "boot"),
    began_at="2026-01-31T23:00:01.000Z",
    ended_at="2026-01-31T23:10:00.000Z",
    ending="raised",
    reason="",
    exit_code=1,
    signal=None,
    error="The job raised ValueError: no.",
    unchanged=None,
    todo=None,
    peak_rss_bytes=38_500_000,
    from_number=0,
    to_number=3,
    releases=[
        {"name": "connection", "elapsed_s": 0.0123, "error": None},
        {"name": "feed", "elapsed_s": 0.0, "error": "OSError: gone"},
    ],
    charged=1,
    retry=1,
)
EVENT = Event(7, "2026-01-31T23:00:00.500Z", RUN.id, "stock", "supervisor 10", "started", "why")
REJECT = RejectRow(
    id=1,
    run=RUN.id,
    number=2,
    generation=1,
    place=0,
    loop="main",
    record="SKU-7",
    reason="quantity is 'x'",
    at="2026-01-31T23:05:00.000Z",
    value='"SKU-7"',
    raw=0,
    record_number=None,
    tries=1,
    state="open",
    retry=None,
    why=None,
    spot=(1, 2, 0),
)

COURSE = {
    "until_at": "2026-01-31T23:59:00.000Z",
    "duration_s": 3540.0,
    "at_work_s": 599.0,
    "records_per_s": 16.694,
    "batch_p95_s": 2.5,
    "span_s": 29.5,
    "spans": [],
    "operations": [],
    "open_operations": [],
    "why": "",
    "next": "batchrun resume a1b2c3d4e5",
}
REPORT = """\
stock: paused (stop)

Run a1b2c3d4e5
It began 2026-01-31 23:00:00Z and is not finished.
Where the time went: 1.00 s reading, 2.00 s the job's work, 0.30 s batchrun (10.0 % of that).
  records read              10,000 of 24,000
  inserted                  9,000
  updated                   999
  rejected                  1
  records per second        17
  took                      59m00s
  at work                   9m59s
  paused by health          0 s
  attempts                  1
  commits                   3
  batches                   2
  95 of 100 batches within  2.5 s
to type: batchrun resume a1b2c3d4e5

Over time
Time is in UTC. Shaded: no attempt was under way, 1 s in all.
  Attempts and health       memory not checked; connections not checked; dependencies not checked

Attempts
attempt  began (UTC)           took   how it ended              commits  peak   error
1        2026-01-31 23:00:01Z  9m59s  raised, charged as a try  3        38 MB  The job raised \
ValueError: no.

Operations
None.

Rejects
id  commit  loop  state  record  reason
1   2       main  open   SKU-7   quantity is 'x'
to type: batchrun rejects list a1b2c3d4e5

Releases, last in, first out
attempt and place  released    took     error
1.1                connection  12.3 ms
1.2                feed        0 s      OSError: gone

Recorded cleanups
None.

Events
when (UTC)            what     who            why
2026-01-31 23:00:00Z  started  supervisor 10  why"""


def test_a_report_tells_counts_attempts_releases_rejects_and_events() -> None:
    summary = batchrun.summarise(RUN, [ATTEMPT], [REJECT], [EVENT]) | COURSE
    assert batchrun.render_sheet(batchrun.sheet_of_run(summary)) == REPORT


def test_columns_stand_below_each_other_whatever_the_letters_are() -> None:
    rows = [["key", "job", "why"], ["库存/7", "e\u0301", "a\nb"], ["x" * 70, "y" * 70, "z" * 70]]
    assert batchrun.render_table(rows).splitlines() == [
        f"key{' ' * 69}job{' ' * 59}why",
        f"库存/7{' ' * 66}e\u0301{' ' * 61}a b",
        f"{'x' * 70}  {'y' * 57}...  {'z' * 70}",
    ]


def test_a_summary_is_json_without_the_checkpoint_and_with_units_in_its_names() -> None:
    summary = json.loads(json.dumps(batchrun.summarise(RUN, [ATTEMPT], [REJECT], [EVENT])))
    assert not {"key", "checkpoint", "settings", "hash"} & summary.keys()
    assert {"read_s", "work_s", "own_s", "exit_code"} <= summary.keys()
    assert summary["attempts"][0]["worker"] == {"pid": 11, "ticks": 21, "boot_id": "boot"}
    [reject] = summary["rejects"]
    assert {"id": 1, "number": 2, "record": "SKU-7", "can_retry": True}.items() <= reject.items()


def test_an_attempt_without_an_ending_is_not_given_one() -> None:
    going_on = ATTEMPT._replace(
        charged=0, ending=None, to_number=None, peak_rss_bytes=None, releases=[]
    )
    summary = batchrun.summarise(RUN, [going_on._replace(error=None)], [], [])
    row = ["1", "2026-01-31 23:00:01Z", "9m59s", "going on, or left by its owner", "3", "-", ""]
    assert batchrun.row_of_attempt(summary["attempts"][0]) == row


NOW = "2026-02-01T00:01:00.000Z"
STANDS = Standing(RunState.PAUSED, "", "batchrun resume a1b2c3d4e5", is_due=True)
PAUSED = batchrun.summarise_job("stock", RUN, STANDS, None, 0)
NEVER = batchrun.summarise_job(
    "prices", None, Standing(RunState.WAITING, "", "batchrun run prices"), None, 12
)
DONE = batchrun.summarise_job(
    "orders",
    RUN._replace(state=RunState.SUCCEEDED, reason="", read=5, expected=None),
    Standing(RunState.SUCCEEDED, "", "batchrun report a1b2c3d4e5"),
    RUN._replace(ended_at="2026-01-30T20:01:00.000Z"),
    0,
)


ABOUT = {
    "owners": "pid 7 (for 2m03s)",
    "attempts": 5 * [batchrun.summarise_attempt(ATTEMPT, RUN)],
    "last_commit": "2026-01-31T23:59:50.000Z",
    "batch_median_s": 0.5,
    "batch_p95_s": 1.25,
    "course": 'step make table done, now loop main after key "SKU-7"',
    "reading": {
        "at": "2026-02-01T00:00:40.000Z",
        "rss_bytes": 38_000_000,
        "available_bytes": 1_500_000_000,
        "limit_source": "host",
        "connections": 3,
        "open_files": 0,
    },
    "health_check": {
        "at": "2026-02-01T00:00:30.000Z",
        "verdict": "go on",
        "memory": "ok",
        "connections": "unknown: not seen",
        "dependencies": "bad: shop",
    },
    "operations": {"done": 5, "open": 2},
    "rejects": {},
    "cleanups": {"done": 1, "PENDING": 1},
}


def test_the_status_of_all_jobs_is_a_table_and_what_to_type() -> None:
    assert batchrun.render_status([PAUSED, NEVER, DONE], NOW) == (
        "job     state          for    batches  records  of      done  success    skipped\n"
        "stock   paused (stop)  2m00s  2        10,000   24,000  42%   -          -\n"
        "prices  never run      -      -        -        -       -     -          12\n"
        "orders  succeeded      2m00s  2        5        -       -     1d04h ago  -\n"
        "to type for stock: batchrun resume a1b2c3d4e5"
    )


def shown_of(run: Run) -> list[str]:
    """Return what the table, the screen, the end and the live line say of a run's records."""
    stands = Standing(run.state, "", "batchrun report a1b2c3d4e5")
    status = batchrun.summarise_job("stock", run, stands, None, 0)
    row = batchrun.render_status([status], NOW).splitlines()[1]
    screen = batchrun.render_one_status({**status, "about": ABOUT}, NOW)
    live = batchrun.progress_line(run, 0.0, 200)
    texts = (row, screen, batchrun.counts_text(run._asdict()), live)
    return [
        found for text in texts for found in re.findall(r"[0-9,]{5,}(?: of | +)[0-9,]{5,}", text)
    ]


def test_a_run_that_ended_before_its_source_shows_how_much_there_was() -> None:
    run = RUN._replace(state=RunState.SUCCEEDED, reason="", read=12_000, expected=24_000)
    assert shown_of(run) == ["12,000   24,000", *["12,000 of 24,000"] * 3]
    status = batchrun.summarise_job("stock", run, STANDS._replace(state=run.state), None, 0)
    assert "  50%\n" in batchrun.render_status([status], NOW)


def test_a_run_that_read_more_than_was_estimated_shows_no_total_below_that() -> None:
    run = RUN._replace(state=RunState.RUNNING, read=24_000, expected=23_993)
    assert shown_of(run) == ["24,000   24,000", *["24,000 of 24,000"] * 3]
    assert shown_of(run._replace(read=23_000))[1:] == ["23,000 of 23,993"] * 3


def test_the_status_of_one_job_ends_with_why_and_one_line_to_type() -> None:
    why = "Its processes are gone.\nNo more is known."
    stands = STANDS._replace(state=RunState.INTERRUPTED, why=why)
    status = batchrun.summarise_job("stock", RUN._replace(reason=""), stands, None, 3)
    status["about"] = ABOUT
    assert batchrun.render_one_status(status, NOW) == (
        "stock: interrupted since 2026-01-31 23:59:00Z\n"
        "  run           a1b2c3d4e5, owned by pid 7 (for 2m03s)\n"
        "  records       10,000 of 24,000\n"
        "  batches       2, newest commit 1m10s ago, median 0.50 s, 95th percentile 1.25 s\n"
        '  loops         step make table done, now loop main after key "SKU-7"\n'
        "  attempts      5\n"
        + 4
        * (
            "  attempt       1  2026-01-31 23:00:01Z  9m59s: raised, charged as a try, commits 3,"
            " peak 38 MB\n"
        )
        + "  reading       38 MB of memory used, 1.5 GB available (host), 3 connections, 20s ago\n"
        "  health        go on, 30s ago\n"
        "  memory        ok\n"
        "  connections   unknown: not seen\n"
        "  dependencies  bad: shop\n"
        "  operations    5 done, 2 open\n"
        "  cleanups      1 done, 1 PENDING\n"
        "  last success  -\n"
        "  skipped       3 starts since\n"
        "  why           Its processes are gone.\n"
        "  why           No more is known.\n"
        "to type: batchrun resume a1b2c3d4e5"
    )


@pytest.mark.parametrize(("columns", "width"), [(20, 20), (60, 52), (77, 77), (157, 95)])
def test_the_live_line_fits_and_keeps_its_width(columns: int, width: int) -> None:
    lines = [
        batchrun.progress_line(RUN._replace(read=read), rate, columns)
        for read, rate in [(0, 0.0), (5, 1.0), (9_999, 123.0), (24_000, 48_123.4)]
    ]
    assert {len(line) for line in lines} == {width}
    assert all(line.startswith("stock ") for line in lines)


def test_the_live_line_has_bar_share_records_rate_and_time_left() -> None:
    line = batchrun.progress_line(RUN._replace(read=12_000), 4_000.0, 80)
    bar = "#" * 12 + "-" * 13
    assert line == f"stock [{bar}]  50%  12,000 of 24,000     4,000/s     3s left"


def test_the_live_line_without_a_known_total_has_no_bar() -> None:
    run = RUN._replace(expected=None)
    assert batchrun.progress_line(run, 50.0, 80).split() == ["stock", "10,000", "records", "50/s"]


@pytest.mark.parametrize("read", [24_000, 30_000])
def test_a_source_that_grew_is_never_more_than_all_of_it(read: int) -> None:
    line = batchrun.progress_line(RUN._replace(read=read), 50.0, 80)
    assert "100%" in line
    assert "-" not in line
    assert "left" not in line
