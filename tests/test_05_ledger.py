"""Section 5: one verb is one transaction and one edge; what is not a healthy ledger is refused."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import ROOT, wait_for

import batchrun
from batchrun import (
    NEW,
    TRANSITIONS,
    Admission,
    Agreement,
    AttemptEnd,
    Basis,
    Busy,
    Checkpoint,
    Commit,
    ConfigurationError,
    Ending,
    ExitCode,
    Host,
    IllegalTransition,
    JobError,
    Ledger,
    LostOwnership,
    Memory,
    NotFound,
    OutcomeUnknown,
    PersonNeeded,
    ProcessIdentity,
    Reason,
    Request,
    Run,
    RunState,
    Start,
    StateDirectoryError,
    Usage,
    checkpoint_bytes,
    first_hash,
    open_ledger,
    require_sqlite,
)

ME = ProcessIdentity(4242, 1, "a boot id")
HOST = Host()
SUCCEEDED = AttemptEnd(Ending.SUCCEEDED, ExitCode.DONE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path / "state" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    made = open_ledger(path, HOST, create=True)
    yield made
    made.close()


def nothing(*_: object) -> None:
    """Say yes."""


def start(run_id: str = "r1", **how: Any) -> Start:  # noqa: ANN401 - any field of Start
    return Start(
        who="a test",
        run_id=run_id,
        **{
            "owner": ME,
            "require_admission": nothing,
            "require_may_go_on": nothing,
            "write_checkpoint": nothing,
            **how,
        },
    )


def admit(ledger: Ledger, job: str = "sync", run_id: str = "r1", **how: Any) -> Admission:  # noqa: ANN401
    return ledger.admit(job, start(run_id, **how), lambda _: Agreement())


def opened(ledger: Ledger, **how: Any) -> Run:  # noqa: ANN401
    """Return a run that was admitted and whose worker has begun."""
    admission = admit(ledger, **how)
    run = admission.run
    basis = Basis({}, 1, first_hash(ledger.uuid, run.id, ""))
    return ledger.open_attempt(run, admission.generation, ME, basis)


def next_checkpoint(ledger: Ledger, run: Run, *, rejected: int = 0) -> Checkpoint:
    number = run.number + 1
    counts: dict[str, int] = {"new": 5 * number}
    link = {"read": 5, "rejected": rejected, "staged": run.generation, "counts": {"new": 5}}
    return Checkpoint(
        ledger=ledger.uuid,
        event=0,
        operation=0,
        job=run.job,
        job_version=1,
        run=run.id,
        generation=run.generation,
        number=number,
        kind="batch",
        loop="main",
        cursor=str(5 * number),
        ended=False,
        passed=[],
        marks={},
        totals={"read": 5 * number, "rejected": rejected, "batches": number, "counts": counts},
        link={**link, "first_key": "1", "last_key": "5", "elapsed_s": 0.5},
        source=None,
        settings="",
        previous=run.hash,
        at="2026-01-31T00:00:00.000Z",
    )


def commit(ledger: Ledger, run: Run, *, publish: Callable[[], None] = nothing) -> Run:
    """Make the next commit of a run; return the run after it."""
    checkpoint = next_checkpoint(ledger, run)
    made = Commit(checkpoint, *checkpoint_bytes(checkpoint), spent=(0.1, 0.2, 0.3))
    ledger.commit(run, made, publish)
    return ledger.run(run.key)


def everything(ledger: Ledger) -> list[Any]:
    """Return all rows of all tables."""
    tables = [row[0] for row in ledger._rows("SELECT name FROM sqlite_schema WHERE type='table'")]
    return [(table, ledger._rows(f"SELECT * FROM {table}")) for table in tables]


# --- states ---------------------------------------------------------------------------------------

DESIGNED = """
new -> waiting, reserved
waiting -> reserved, cancelled
reserved -> running, succeeded, awaiting, paused, interrupted, failed, cancelled
running -> reserved, succeeded, awaiting, paused, interrupted, failed, cancelled
awaiting -> reserved, cancelled
paused -> reserved, cancelled
interrupted -> reserved, cancelled
failed -> reserved, cancelled
"""
EDGES = {
    (before, after)
    for line in DESIGNED.strip().splitlines()
    for before, _, rest in [line.partition(" -> ")]
    for after in rest.split(", ")
}
PAIRS = list(product([NEW, *RunState], RunState))


def test_the_edges_are_those_of_the_design_each_with_a_sentence_of_its_own() -> None:
    assert set(TRANSITIONS) == EDGES
    assert len(set(TRANSITIONS.values())) == len(TRANSITIONS)


def test_the_database_holds_the_same_edges(ledger: Ledger) -> None:
    rows = ledger._rows("SELECT from_state, to_state, sentence FROM edge")
    assert {(before, after): sentence for before, after, sentence in rows} == TRANSITIONS


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_database_lets_a_run_go_along_the_edges_and_no_other_way(
    ledger: Ledger, before: str, after: str
) -> None:
    sql = "INSERT INTO run (id, job, state, created_at, changed_at) VALUES ('x', 'j', ?, '', '')"
    allowed = contextlib.nullcontext()
    refused = pytest.raises(apsw.ConstraintError, match="illegal transition")
    with allowed if (before, after) in EDGES else refused:
        if before == NEW:
            ledger._sql(sql, (after,))
        else:
            put_into(ledger, sql, before)
            ledger._sql("UPDATE run SET state = ?", (after,))


def put_into(ledger: Ledger, sql: str, state: str) -> None:
    """Insert a run and lead it to a state along edges only."""
    ledger._sql(sql, ("reserved" if state != "waiting" else "waiting",))
    if state not in ("reserved", "waiting"):
        ledger._sql("UPDATE run SET state = ?", (state,))


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[0] != NEW])
def test_a_verb_goes_along_the_edges_and_no_other_way(
    ledger: Ledger, before: str, after: RunState
) -> None:
    sql = "INSERT INTO run (id, job, state, created_at, changed_at) VALUES ('x', 'j', ?, '', '')"
    put_into(ledger, sql, before)
    run = ledger.run(1)
    if (before, after) in EDGES:
        with ledger._writing():
            assert ledger._move(run, after, who="a test").state == after
        said = [(event.who, event.what, event.why) for event in ledger.events()]
        assert said == [("a test", after, TRANSITIONS[before, after])]
    else:
        message = f"Run x is {before}; there is no edge from there to {after}."
        with pytest.raises(IllegalTransition, match=f"^{re.escape(message)}$"), ledger._writing():
            ledger._move(run, after, who="a test")
        assert ledger.events() == []


def test_a_run_that_moved_meanwhile_is_not_moved_again(ledger: Ledger) -> None:
    run = admit(ledger).run
    ledger.cancel(run, "a person", "why not")
    with (
        pytest.raises(IllegalTransition, match=r"^Run r1 was no longer reserved\.$"),
        ledger._writing(),
    ):
        ledger._move(run, RunState.RUNNING, who="a test")


def test_a_job_has_one_unfinished_run(ledger: Ledger) -> None:
    admit(ledger)
    with pytest.raises(StateDirectoryError, match="UNIQUE constraint failed"), ledger._writing():
        ledger._insert_run("sync", start("r2"), RunState.RESERVED)
    assert admit(ledger, "another job", "r2").run.id == "r2"


def test_event_ids_only_rise_and_the_newest_stays(ledger: Ledger) -> None:
    first, second = ledger.note("me", "one"), ledger.note("me", "two")
    assert second == first + 1
    with pytest.raises(StateDirectoryError, match="the ledger's clock"), ledger._writing():
        ledger._sql("DELETE FROM event WHERE id = ?", (second,))
    with ledger._writing():
        ledger._sql("DELETE FROM event WHERE id = ?", (first,))
    assert ledger.newest_event() == second


# --- verbs ----------------------------------------------------------------------------------------


def test_a_run_is_led_from_its_start_to_its_end(ledger: Ledger) -> None:
    run = opened(ledger)
    assert (run.state, run.generation, run.number) == (RunState.RESERVED, 1, 0)
    ledger.begin_batches(run, 1, 10)
    run = commit(ledger, commit(ledger, run))
    assert (run.state, run.number, run.batches, run.read) == (RunState.RUNNING, 2, 2, 10)
    assert (run.counts, run.expected) == ({"new": 10}, 10)
    assert (run.read_s, run.work_s, run.own_s) == pytest.approx((0.2, 0.4, 0.6))
    ledger.end_attempt(run, 1, SUCCEEDED, [{"name": "file", "elapsed_s": 0.0, "error": None}])
    run = ledger.settle(run, 1, batchrun.DIED, signal=None, peak_rss_bytes=5)
    assert (run.state, run.finished, run.request) == (RunState.SUCCEEDED, True, None)
    (attempt,) = ledger.attempts(run)
    assert (attempt.supervisor, attempt.worker, attempt.ending) == (ME, ME, "succeeded")
    assert (attempt.from_number, attempt.to_number, attempt.peak_rss_bytes) == (0, 2, 5)
    assert ledger.last_attempt(run) == attempt
    assert attempt.releases[0]["name"] == "file"
    row = ledger.commit_row(run, 2)
    assert row is not None
    assert (row.read, row.counts, row.hash, row.cursor) == (5, {"new": 5}, run.hash, "10")
    assert ledger.gaps(run) == []


@pytest.mark.parametrize(
    ("ending", "reason", "state"),
    [
        (Ending.SUCCEEDED, Reason.NONE, RunState.SUCCEEDED),
        (Ending.STOPPED, Reason.STOP, RunState.PAUSED),
        (Ending.RAISED, Reason.NONE, RunState.FAILED),
        (Ending.REFUSED, Reason.NONE, RunState.INTERRUPTED),  # before anything was begun
        (Ending.CHANGED, Reason.NONE, RunState.FAILED),
        (Ending.DIED, Reason.NONE, RunState.INTERRUPTED),
    ],
)
def test_the_state_follows_the_ending_that_the_worker_recorded(
    ledger: Ledger, ending: Ending, reason: Reason, state: RunState
) -> None:
    run = opened(ledger)
    ledger.end_attempt(run, 1, AttemptEnd(ending, ExitCode.FAILED, reason), [])
    assert (settled := ledger.settle(run, 1, SUCCEEDED)).state == state
    assert settled.reason == reason


@pytest.mark.parametrize(
    ("ending", "retry", "is_open", "state", "charged"),
    [
        (Ending.RAISED, True, True, RunState.INTERRUPTED, 1),  # an exception of the job's own
        (Ending.RAISED, True, False, RunState.INTERRUPTED, 1),
        (Ending.RAISED, False, True, RunState.FAILED, 1),
        (Ending.RAISED, None, True, RunState.FAILED, 0),  # a letter
        (Ending.DIED, True, True, RunState.INTERRUPTED, 1),  # nobody had asked for it
        (Ending.DIED, True, False, RunState.INTERRUPTED, 0),  # before any batch
        (Ending.DIED, None, True, RunState.INTERRUPTED, 0),  # a kill that was asked for; a reboot
        (Ending.OVERDUE, True, True, RunState.INTERRUPTED, 1),
        (Ending.RECYCLED, None, True, RunState.INTERRUPTED, 0),
        (Ending.STOPPED, None, True, RunState.PAUSED, 0),
        (Ending.REFUSED, None, True, RunState.INTERRUPTED, 0),
    ],
)
def test_only_an_ending_that_the_batch_caused_is_charged_and_only_once(
    ledger: Ledger,
    ending: Ending,
    *,
    retry: bool | None,
    is_open: bool,
    state: RunState,
    charged: int,
) -> None:
    run = opened(ledger)
    if is_open:
        ledger.begin_batches(run, 1, None, '["main","null",5]')
    end = AttemptEnd(ending, ExitCode.FAILED, retry=retry)
    run = ledger.settle(run, 1, end, lambda *_: batchrun.After(RunState.RESERVED))
    last = ledger.last_attempt(run)
    assert last is not None
    assert (run.state, run.tries, last.charged) == (RunState.RESERVED, charged, charged)
    run = ledger.settle(run, 1, end)
    assert (run.state, run.tries) == (state, charged)


def test_a_commit_and_another_key_begin_to_count_anew(ledger: Ledger) -> None:
    run = opened(ledger)
    raised = AttemptEnd(Ending.RAISED, ExitCode.FAILED, retry=True)
    for generation, (tried, tries) in enumerate([("a", 1), ("a", 2), ("b", 1), ("b", 2)], 1):
        ledger.begin_batches(run, generation, None, tried)
        run = ledger.settle(run, generation, raised)
        assert (run.tried, run.tries) == (tried, tries)
        run = opened(ledger)
    ledger.begin_batches(run, run.generation, None, "b")
    run = commit(ledger, run)
    assert (run.tried, run.tries) == (None, 0)
    ledger.arm(run, run.generation, "c")
    assert ledger.run(run.key).tried == "c"


@pytest.mark.parametrize(
    ("state", "reason", "tries", "size"),
    [
        (RunState.FAILED, "", 0, 1),
        (RunState.AWAITING, Reason.POISON, 0, 1),
        (RunState.PAUSED, Reason.PERSON, 0, 1),
        (RunState.PAUSED, Reason.RETRY, 1, 0),
        (RunState.INTERRUPTED, "", 1, 0),
    ],
)
def test_tries_are_free_again_once_a_person_has_decided(
    ledger: Ledger, state: RunState, reason: str, tries: int, size: int
) -> None:
    run = opened(ledger)
    ledger.begin_batches(run, 1, None, "a")
    raised = AttemptEnd(Ending.RAISED, ExitCode.FAILED, retry=True)
    run = ledger.settle(run, 1, raised, lambda *_: batchrun.After(state, reason, size=0))
    assert (run.state, run.tries, run.size) == (state, 1, 0)
    again = admit(ledger).run
    assert (again.tries, again.size) == (tries, size)


def test_a_batch_that_the_checkpoint_proves_is_no_lone_bad_record(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.begin_batches(run, 1, None, "a")
    raised = AttemptEnd(Ending.RAISED, ExitCode.FAILED, retry=True)
    after = batchrun.After(RunState.INTERRUPTED, size=0)  # the next record is the bad one
    run = ledger.settle(run, 1, raised, lambda *_: after)
    proof = Agreement("rolled forward", forward=next_checkpoint(ledger, run))
    run = ledger.admit("sync", start("r2"), lambda _: proof).run
    assert (run.id, run.number, run.tries, run.size) == ("r1", 1, 0, 1)


def test_a_supervisor_keeps_its_own_run_between_two_attempts_and_no_other_does(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    raised = AttemptEnd(Ending.RAISED, ExitCode.FAILED, retry=True)
    run = ledger.settle(run, 1, raised, lambda *_: batchrun.After(RunState.RESERVED, why="again"))
    mine = admit(ledger)
    assert (mine.run.state, mine.said) == (RunState.RESERVED, [])
    run = ledger.settle(mine.run, 2, raised, lambda *_: batchrun.After(RunState.RESERVED))
    other = admit(ledger, owner=ME._replace(boot_id="another boot"))
    assert other.said == [f"run {run.id} was left by its owner: interrupted"]


@pytest.mark.parametrize(
    ("request_", "state", "reason"),
    [(None, "paused", "stop"), ("pause", "paused", "person"), ("cancel", "cancelled", "")],
)
def test_a_run_that_is_kept_rests_as_was_requested(
    ledger: Ledger, request_: str | None, state: str, reason: str
) -> None:
    run = opened(ledger)
    raised = AttemptEnd(Ending.RAISED, ExitCode.FAILED, retry=True)
    run = ledger.settle(run, 1, raised, lambda *_: batchrun.After(RunState.RESERVED))
    if request_:
        ledger.request(run, Request(request_), "me")
    run = ledger.rest(run, Reason.STOP, "why")
    assert (run.state, run.reason) == (state, reason)
    assert run.request == ("cancel" if request_ == "cancel" else None) or run.finished


def test_a_worker_without_an_ending_is_interrupted(ledger: Ledger) -> None:
    run = opened(ledger)
    assert ledger.settle(run, 1, batchrun.DIED).state == RunState.INTERRUPTED


# Every verb of an owner, as one that was superseded would call it.
FENCED: dict[str, Callable[[Ledger, Run], object]] = {
    "commit": commit,
    "open_attempt": lambda ledger, run: ledger.open_attempt(run, 1, ME, Basis({}, 1, "")),
    "begin_batches": lambda ledger, run: ledger.begin_batches(run, 1, None),
    "arm": lambda ledger, run: ledger.arm(run, 1, "a try"),
    "stage_rejects": lambda ledger, run: ledger.stage_rejects(
        run, 1, 1, "main", [{"record": "x", "reason": "y"}]
    ),
    "end_attempt": lambda ledger, run: ledger.end_attempt(run, 1, SUCCEEDED, []),
    "settle": lambda ledger, run: ledger.settle(run, 1, SUCCEEDED, signal=9),
    "rest": lambda ledger, run: ledger.rest(run, Reason.STOP, "why"),
    "keep_paused": lambda ledger, run: ledger.keep_paused(run, "why", "then", 1.0),
    "count_pause": lambda ledger, run: ledger.count_pause(run, 1.0),
    "end_pause": lambda ledger, run: ledger.end_pause(run, "why"),
    "record_cleanup": lambda ledger, run: ledger.record_cleanup(run, 1, "jobs:drop", {}, 0),
    "begin_cleanup": lambda ledger, run: ledger.begin_cleanup(run, 1, 1),
    "end_cleanup": lambda ledger, run: ledger.end_cleanup(run, 1, 1, None, 0.1),
    "note_releases": lambda ledger, run: ledger.note_releases(run, 1, 60.0),
    "end_cleaning": lambda ledger, run: ledger.end_cleaning(run, 1, SUCCEEDED, "me"),
    "operate": lambda ledger, run: ledger.operate(run, 1, [], [("a key", b"")], number=1),
    "sync": lambda ledger, run: ledger.sync(run, 1),
    "take_up": lambda ledger, run: ledger.take_up(run, 1, 1, []),
    "record_reading": lambda ledger, run: ledger.record_reading(run, 1, None, None, 0.5),
    "record_health_check": lambda ledger, run: ledger.record_health_check(
        run, 1, dict.fromkeys(batchrun.FACTORS, "ok"), "well", "why", 0.1
    ),
    "ask": lambda ledger, run: ledger.ask(run, 1, "go", "whether to go on"),
}


@pytest.mark.parametrize("verb", FENCED)
def test_an_older_generation_can_write_nothing(ledger: Ledger, verb: str) -> None:
    old = opened(ledger)
    ledger.record_cleanup(old, 1, "jobs:remove", {}, 0)
    newer = opened(ledger)
    assert (old.generation, newer.generation) == (1, 2)
    before = everything(ledger)
    with pytest.raises(LostOwnership) as lost:
        FENCED[verb](ledger, old)
    assert lost.value.exit_code == ExitCode.LOST_OWNERSHIP
    assert str(lost.value) == (
        "Lost ownership of run r1: generation 1 was superseded.\n"
        "Another process took the run over; this one may not write any more.\n"
        "Neither ledger nor checkpoint was changed; the new owner goes on from them.\n"
        "See `batchrun status sync`."
    )
    assert everything(ledger) == before


def test_an_older_generation_publishes_no_checkpoint(ledger: Ledger) -> None:
    old, published = opened(ledger), list[str]()
    opened(ledger)
    with pytest.raises(LostOwnership):
        commit(ledger, old, publish=lambda: published.append("renamed"))
    assert published == []


def test_every_verb_that_is_given_a_generation_is_known_to_be_fenced() -> None:
    reads = {"safe_points"}
    verbs = {name: each for name, each in vars(Ledger).items() if not name.startswith("_")}
    given = {n for n, v in verbs.items() if callable(v) and "generation" in signature(v).parameters}
    assert given - reads <= set(FENCED)


def test_a_commit_follows_the_one_before_and_no_other(ledger: Ledger) -> None:
    run = opened(ledger)
    commit(ledger, run)
    with pytest.raises(LostOwnership):
        commit(ledger, run)  # number 1 once more
    assert ledger.run(run.key).number == 1


def test_readings_and_health_checks_are_kept_in_order_by_the_owner_alone(ledger: Ledger) -> None:
    run = opened(ledger)
    memory, usage = Memory(5, 7, "cgroup /x"), Usage(11, 13, 2, 1, {"stock": 3, "feed": 1})
    found = {"memory": "ok: 5 of 7", "connections": "unknown: ?", "dependencies": "bad: down"}
    ledger.record_reading(run, run.generation, memory, usage, 0.5)
    run = commit(ledger, run)
    ledger.record_reading(run, run.generation, None, usage._replace(open_files=None), None)
    ledger.record_health_check(run, run.generation, found, "go on", "one is bad", 0.25)
    first, second = ledger.readings(run)
    (checked,) = ledger.health_checks(run)
    assert first[2:] == (1, 0, 5, 7, "cgroup /x", 11, 4, 13, 2, 1, 0.5)
    assert second[2:] == (1, 1, None, None, None, 11, None, None, 2, 1, None)
    assert checked[2:] == (1, *found.values(), "go on", "one is bad", 0.25)
    assert first.id < second.id
    assert first.at <= second.at <= checked.at
    assert ledger.readings(run, newest=1) == [second]
    with pytest.raises(LostOwnership):
        ledger.record_reading(run, 2, memory, usage, None)
    with pytest.raises(LostOwnership):
        ledger.record_health_check(run, 2, found, "pause", "", 0)
    assert (len(ledger.readings(run)), len(ledger.health_checks(run))) == (2, 1)


def test_safe_points_are_the_gauges_of_an_attempt_in_order(ledger: Ledger) -> None:
    run = opened(ledger)
    none: dict[str, list[object]] = {gauge: [] for gauge in batchrun.GAUGES}
    assert ledger.safe_points(run, 1) == none
    for _ in range(4):
        run = commit(ledger, run)
    with ledger._writing():
        ledger._sql("UPDATE batch SET rss_bytes = 10 * number, threads = 2 WHERE number > 1")
        ledger._sql("UPDATE batch SET connections = 7 WHERE number IN (1, 4)")
    points = ledger.safe_points(run, 1, newest=2)
    assert points == none | {
        "rss_bytes": [(3, 30), (4, 40)],
        "connections": [(1, 7), (4, 7)],  # far apart: it is not read at every one
        "threads": [(3, 2), (4, 2)],
    }
    assert ledger.safe_points(run, 2) == none


def test_a_rename_that_fails_leaves_no_row(ledger: Ledger) -> None:
    run = opened(ledger)
    before = everything(ledger)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        commit(ledger, run, publish=fail)
    assert everything(ledger) == before


def test_a_commit_that_raised_is_an_unknown_outcome(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ledger._sql

    def fail(sql: str, *bindings: object) -> object:
        if sql == "COMMIT":
            raise apsw.IOError("IOError: disk I/O error")
        return real(sql, *bindings)

    monkeypatch.setattr(ledger, "_sql", fail)
    with pytest.raises(OutcomeUnknown, match="COMMIT failed") as unknown:
        ledger.note("me", "one")
    assert unknown.value.exit_code == ExitCode.STATE_DIRECTORY
    assert unknown.value.todo.endswith(", then type this again.")  # whatever it was, also a cancel
    assert ledger.events() == []


def test_a_request_is_kept_until_the_edge_that_honours_it(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.request(run, Request.PAUSE, "a person")
    assert ledger.run(run.key).request == "pause"
    ledger.end_attempt(run, 1, AttemptEnd(Ending.STOPPED, ExitCode.STOPPED, Reason.PERSON), [])
    assert ledger.settle(run, 1, batchrun.DIED).request is None


def test_nothing_outranks_a_cancel(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.request(run, Request.CANCEL, "a person")
    ledger.request(run, Request.CANCEL, "another person")
    with pytest.raises(IllegalTransition) as refusal:
        ledger.request(run, Request.PAUSE, "a person")
    assert str(refusal.value) == (
        "Run r1 has finished, or is to be cancelled already.\n"
        "Nothing was changed.\n"
        "See: batchrun status sync"
    )
    again = admit(ledger, run_id="r2")
    assert (again.run.id, ledger.run(run.key).state) == ("r2", RunState.CANCELLED)
    assert "run r1 cancelled: cancelling was asked for before it ended" in again.said
    with pytest.raises(IllegalTransition):
        ledger.request(run, Request.CANCEL, "too late")
    assert ledger.run(run.key).request is None


def test_a_cancel_supersedes_every_owner(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.cancel(run, "a person", "not needed")
    with pytest.raises(LostOwnership):
        commit(ledger, run)


@pytest.mark.parametrize("end", [RunState.CANCELLED, RunState.SUCCEEDED])
def test_a_run_that_finished_meanwhile_is_neither_cancelled_nor_paused(
    ledger: Ledger, end: RunState
) -> None:
    run = opened(ledger)
    with ledger._writing():
        ledger._move(run, end, who="a test")
    before = everything(ledger)
    ledger.cancel(run, "a person", "too late")
    ledger.pause(run, "a person")
    assert everything(ledger) == before


def test_a_run_that_nobody_owns_is_paused_by_a_person(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.pause(run, "a person")
    paused = ledger.run(run.key)
    assert (paused.state, paused.reason) == (RunState.PAUSED, Reason.PERSON)
    ledger.pause(paused, "a person")
    ledger.cancel(paused, "a person", "")
    ledger.pause(paused, "a person")
    assert ledger.run(run.key).state == RunState.CANCELLED


def test_a_person_s_pause_keeps_what_the_run_stood_on(ledger: Ledger) -> None:
    run = opened(ledger)
    run = ledger.settle(run, 1, AttemptEnd(Ending.RAISED, ExitCode.FAILED, error="no such column"))
    assert run.state == RunState.FAILED
    ledger.pause(run, "a person")
    paused = ledger.run(run.key)
    assert (paused.state, paused.error) == (RunState.PAUSED, "no such column")


def test_a_run_that_awaits_stays_so_when_it_is_paused_and_begins_no_deferred_start(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    awaits = AttemptEnd(Ending.AWAITS, ExitCode.PERSON_NEEDED, Reason.APPROVAL)
    run = ledger.settle(run, 1, awaits)
    ledger.defer("sync", start("r2"), {}, "maintenance")
    assert ledger.run(run.key).deferred
    ledger.pause(run, "a person")
    paused = ledger.run(run.key)
    assert (paused.state, paused.request) == (RunState.AWAITING, Request.PAUSE)
    assert paused.deferred is None


def test_a_pause_by_health_is_looked_after_and_counted_until_it_ends(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.begin_batches(run, 1, None)
    stopped = AttemptEnd(Ending.STOPPED, ExitCode.STOPPED, Reason.HEALTH)
    run = ledger.settle(run, 1, stopped, lambda *_: batchrun.After(RunState.RESERVED))
    kept = ledger.keep_paused(run, "memory: bad", "2026-01-31T00:03:00.000Z", 7.0)
    assert (kept.state, kept.reason, kept.error) == (RunState.PAUSED, Reason.HEALTH, "memory: bad")
    kept = ledger.keep_paused(kept, "memory: bad", "2026-01-31T00:06:00.000Z", 3.0)
    ledger.count_pause(kept, 2.0)
    kept = ledger.run(run.key)
    assert (kept.checks_at, kept.paused_s) == ("2026-01-31T00:06:00.000Z", 12.0)
    well = ledger.end_pause(kept, "it is well again")
    assert (well.state, well.checks_at, well.error) == (RunState.RESERVED, None, None)


@pytest.mark.parametrize(("request_", "reason"), [(None, "health"), (Request.PAUSE, "person")])
def test_nobody_looks_after_a_pause_that_is_given_up(
    ledger: Ledger, request_: Request | None, reason: str
) -> None:
    kept = ledger.keep_paused(opened(ledger), "memory: bad", "2026-01-31T00:03:00.000Z", 7.0)
    if request_:
        ledger.request(kept, request_, "a person")
        assert ledger.end_pause(kept, "it is well again").state == RunState.PAUSED
    rests = ledger.rest(kept, Reason.HEALTH, "it did not get well")
    assert (rests.state, rests.reason, rests.checks_at) == (RunState.PAUSED, reason, None)


def test_a_drain_asks_only_a_run_that_is_owned_and_of_which_nothing_else_is_asked(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    ledger.ask_to_drain(run, "a drain")
    assert ledger.run(run.key).request == Request.DRAIN
    ledger.request(run, Request.PAUSE, "a person")
    ledger.ask_to_drain(run, "a drain")
    assert ledger.run(run.key).request == Request.PAUSE
    ledger.pause(run, "a person")
    ledger.ask_to_drain(run, "a drain")
    assert ledger.run(run.key).request is None
    asked = [event.what for event in ledger.events(run, what="requested%")]
    assert asked == ["requested: drain", "requested: pause"]


def test_a_resume_begins_no_new_run(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match=r"^The job sync has never run\."):
        admit(ledger, only_resume=True)
    run = opened(ledger)
    ledger.end_attempt(run, 1, SUCCEEDED, [])
    assert admit(ledger, only_resume=True, run_id="r2").run.state == RunState.SUCCEEDED
    found = admit(ledger, only_resume=True, run_id="r3")
    assert (found.run.id, found.generation) == ("r1", 0)
    assert [run.id for run in ledger._all(Run, "")] == ["r1"]


def test_an_admission_that_is_refused_changes_nothing(ledger: Ledger) -> None:
    commit(ledger, opened(ledger))

    def refuse(*_: object) -> Agreement:
        raise PersonNeeded("No.")

    before = everything(ledger)
    with pytest.raises(PersonNeeded):
        admit(ledger, require_admission=refuse)
    with pytest.raises(PersonNeeded):
        admit(ledger, require_may_go_on=refuse)
    with pytest.raises(PersonNeeded):
        ledger.admit("sync", start(), refuse)
    with pytest.raises(PersonNeeded, match="was started with other settings"):
        admit(ledger, overrides={"feed": "other.csv"})
    assert everything(ledger) == before


def test_settings_of_a_later_start_are_kept_until_a_commit_or_when_they_are_accepted(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    assert admit(ledger, overrides={"feed": "other.csv"}).run.overrides == {"feed": "other.csv"}
    commit(ledger, opened(ledger))
    accepted = admit(ledger, overrides={"feed": "third.csv"}, accept_settings=True)
    assert (accepted.run.id, accepted.run.overrides) == (run.id, {"feed": "third.csv"})


def test_what_is_adopted_from_a_checkpoint_has_ids_above_all_that_it_knows_of(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    behind = 50 - ledger.newest_event()
    found = next_checkpoint(ledger, run)._replace(number=4, generation=3, event=50, operation=7)
    ledger.adopt(found, "a person")
    run = ledger.run(run.key)
    assert (run.state, run.number, run.generation) == (RunState.INTERRUPTED, 4, 4)
    assert ledger.newest_operation() == 7
    repaired = [(event.id, event.why) for event in ledger.events(what="repaired")]
    assert repaired == [
        (51, f"{behind} events were lost before this one"),
        (52, "operations 1 to 7 were lost"),
        (53, "checkpoint 4 adopted; commits 1 to 3 have no rows"),
    ]


def test_what_is_adopted_from_an_older_checkpoint_takes_back_what_came_after_it(
    ledger: Ledger,
) -> None:
    run, checkpoints = opened(ledger), list[Checkpoint]()
    for _ in range(3):
        rejects = [{"record": f"of {run.number + 1}", "reason": "no sku"}]
        ledger.stage_rejects(run, 1, run.number + 1, "main", rejects)
        checkpoints.append(next_checkpoint(ledger, run, rejected=1))
        ledger.commit(run, Commit(checkpoints[-1], *checkpoint_bytes(checkpoints[-1])), nothing)
        run = ledger.run(run.key)
    ledger.adopt(checkpoints[1]._replace(at="2026-01-01T00:00:00.000Z"), "a person")
    run = ledger.run(run.key)
    assert (run.number, run.rejected) == (2, 1)
    assert [row.record for row in ledger.rejects(run)] == ["of 1", "of 2"]
    (event,) = ledger.events(what="repaired")
    assert event.why == "checkpoint 2 adopted; what came after it is done again"
    newer = next_checkpoint(ledger, run)._replace(generation=9)
    ledger.adopt(newer, "a person")
    assert ledger.events(what="repaired")[-1].why == "checkpoint 3 adopted"


def test_a_fresh_start_cancels_and_begins_in_one_transaction(ledger: Ledger) -> None:
    commit(ledger, opened(ledger))
    fresh = admit(ledger, run_id="r2", fresh=True)
    assert (fresh.run.id, fresh.run.number) == ("r2", 0)
    assert [run.state for run in ledger._all(Run, "ORDER BY key")] == ["cancelled", "reserved"]


def test_rejects_count_only_when_their_commit_does(ledger: Ledger) -> None:
    run = opened(ledger)
    ledger.stage_rejects(run, 1, 1, "main", [{"record": "old", "reason": "left by a killed try"}])
    run = opened(ledger)
    two = [{"record": "a", "reason": "no sku"}, {"record": "b", "reason": "no price"}]
    ledger.stage_rejects(run, 2, 1, "main", two)
    assert ledger.rejects(run) == []
    checkpoint = next_checkpoint(ledger, run, rejected=2)
    ledger.commit(run, Commit(checkpoint, *checkpoint_bytes(checkpoint)), nothing)
    kept = [(row.id, row.number, row.record, row.reason) for row in ledger.rejects(run)]
    assert kept == [(1, 1, "a", "no sku"), (2, 1, "b", "no price")]
    assert ledger._rows("SELECT count(*) FROM reject") == [(2,)]


def test_rejects_are_not_dropped_while_a_retry_of_their_kin_goes_on(ledger: Ledger) -> None:
    first = opened(ledger)
    ledger.stage_rejects(first, 1, 1, "main", [{"record": "x", "reason": "y", "value": "1"}])
    checkpoint = next_checkpoint(ledger, first, rejected=1)
    ledger.commit(first, Commit(checkpoint, *checkpoint_bytes(checkpoint)), nothing)
    first = ledger.settle(first, 1, SUCCEEDED)
    spots = [row.spot for row in ledger.rejects(first)]
    second = opened(ledger, run_id="r2", retry=batchrun.Retry(first, spots))
    second = ledger.settle(second, second.generation, SUCCEEDED)  # it came to no record
    third = opened(ledger, run_id="r3", retry=batchrun.Retry(second, spots))
    for run in (first, second):
        with pytest.raises(PersonNeeded, match=r"^Run r3 of sync is unfinished\."):
            ledger.drop_rejects(run, ledger.rejects(run), "a person", "sold out")
    ledger.settle(third, third.generation, SUCCEEDED)
    assert ledger.drop_rejects(second, ledger.rejects(second), "a person", "sold out") == 1
    assert ledger.drop_rejects(second, ledger.rejects(second), "a person", "sold out") == 0


def test_a_cleanup_is_stuck_once_nobody_is_at_it_and_it_failed_or_its_run_is_over(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    cleanup = ledger.record_cleanup(run, 1, "jobs:drop", {"table": "new"}, 0)
    assert cleanup is not None
    ledger.begin_cleanup(run, 1, cleanup.id)
    ledger.end_cleanup(run, 1, cleanup.id, "the database is away", 0.1)
    assert ledger.stuck_cleanups() == []  # its worker may call it again
    run = ledger.settle(run, 1, batchrun.DIED)
    assert [each.arguments for each in ledger.stuck_cleanups()] == [{"table": "new"}]
    again = opened(ledger)
    assert ledger.record_cleanup(again, 2, "jobs:drop", {"table": "new"}, 0)
    ledger.settle(again, 2, batchrun.DIED)
    [kept] = ledger.stuck_cleanups()
    assert (kept.id, kept.error) == (cleanup.id + 1, "the database is away")
    ledger.forget_cleanups(run, "a person", "dropped by hand")
    assert ledger.stuck_cleanups() == []
    errors = ["recorded anew: 2", "let go by a person: dropped by hand"]
    assert [each.error for each in ledger.cleanups(run)] == errors


def test_a_run_is_found_by_any_beginning_of_its_id(ledger: Ledger) -> None:
    for number, name in enumerate(("ab", "abzzzz9", "abc", "b", "a%", "ab\U0010fffe")):
        admit(ledger, f"job{number}", name)
    assert {run.id for run in ledger.runs_like("ab")} == {"ab", "abzzzz9", "abc", "ab\U0010fffe"}
    assert [run.id for run in ledger.runs_like("a%")] == ["a%"]
    assert ledger.runs_like("c") == []
    assert len(ledger.runs_like("")) == 5
    found = ledger.run_with_id("ab")
    assert found is not None
    assert (found.id, ledger.run_with_id("a")) == ("ab", None)


def test_refusals_are_counted_since_the_last_success(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.note("me", "refused: busy", job="sync")
    assert ledger.refused_since_success("sync") == 3
    run = opened(ledger)
    ledger.settle(run, 1, SUCCEEDED)
    ledger.note("me", "refused: maintenance", job="sync")
    ledger.note("me", "refused: busy", job="another job")
    ledger.note("ann", "2 rejects dropped", run=run)
    assert ledger.refused_since_success("sync") == 1
    assert [event.what for event in ledger.events(what="refused: m%")] == ["refused: maintenance"]


def test_a_lost_row_is_a_gap_also_at_the_end(ledger: Ledger) -> None:
    run = opened(ledger)
    for _ in range(6):
        run = commit(ledger, run)
    with ledger._writing():
        ledger._sql("DELETE FROM batch WHERE number IN (1, 3, 4, 6)")
    assert ledger.gaps(run) == [(1, 1), (3, 4), (6, 6)]


# --- the connection -------------------------------------------------------------------------------


def test_every_commit_is_synced_and_the_log_is_a_write_ahead_log(ledger: Ledger) -> None:
    pragma = ledger._connection.pragma
    assert (pragma("journal_mode"), pragma("synchronous"), pragma("foreign_keys")) == ("wal", 2, 1)


@pytest.mark.parametrize("version", ["3.40.1", "3.51.2", "3.52.0", "3.52.7"])
def test_an_sqlite_that_can_corrupt_a_ledger_is_refused(version: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        require_sqlite(version)
    assert str(refusal.value) == (
        f"SQLite {version} is not fit for a ledger.\n"
        "Versions before 3.51.3 can corrupt a WAL file; 3.52 was withdrawn.\n"
        "Nothing was opened.\n"
        "Type: python -m pip install 'apsw>=3.51.3.0,!=3.52.*'"
    )


@pytest.mark.parametrize("version", ["3.51.3", "3.53.0", "4.0.0"])
def test_a_sound_sqlite_is_taken(version: str) -> None:
    require_sqlite(version)


def test_opening_asks_for_the_version_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(ConfigurationError):
        open_ledger(path, HOST, create=True)
    assert not path.exists()


def test_text_that_is_not_utf_8_is_a_letter_and_changes_nothing(ledger: Ledger) -> None:
    said = "'a\\udcffb' is not UTF-8, and cannot be kept or found in the ledger."
    for verb in (
        lambda: ledger.runs_like("a\udcffb"),
        lambda: ledger.note("a person", "noted", "a\udcffb"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            verb()
        assert refused.value.what == said
    assert ledger.events() == []


def test_a_forked_child_cannot_use_the_ledger_and_the_parent_is_unharmed(ledger: Ledger) -> None:
    admit(ledger)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ledger.close()
            ledger.events()
        except JobError as refusal:
            said = "The ledger was opened by another process and is not used in its children."
            code = 0 if refusal.what == said else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert commit(ledger, opened(ledger)).number == 1


class QuickHost(Host):
    """A machine on which ten seconds pass in a tenth."""

    def monotonic(self) -> float:
        return super().monotonic() * 100


def test_a_write_lock_held_for_too_long_is_busy(ledger: Ledger, path: Path) -> None:
    other = open_ledger(path, QuickHost(), create=False)
    with ledger._writing():
        assert other.events() == []  # readers go on
        with pytest.raises(Busy) as busy:
            other.note("me", "one")
    assert str(busy.value) == (
        f"The ledger {path} is busy.\n"
        "Another process has held its write lock for 10 s.\n"
        "Nothing was changed.\n"
        "Start again."
    )
    assert other.note("me", "one") == 1
    other.close()


def test_a_reader_held_open_stops_no_run_but_is_told_to_one_that_must_sync(
    ledger: Ledger, path: Path
) -> None:
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("BEGIN; SELECT * FROM run")
    run = commit(ledger, opened(ledger))
    assert not ledger.empty_log()
    other = open_ledger(path, QuickHost(), create=False)
    with pytest.raises(StateDirectoryError) as refusal:
        other.make_durable()
    assert str(refusal.value) == (
        f"The log of the ledger {path} cannot be written back.\n"
        "The last owner did not end cleanly, and another process has kept the ledger open"
        " for reading for 10 s.\n"
        "Nothing was started.\n"
        f"See who reads it: fuser -v {path}; then start again."
    )
    for _ in range(300):
        run = commit(ledger, run)
    assert ledger.log_bytes() > 300 * 4096
    reader.close()
    other.make_durable()
    assert ledger.log_bytes() == 0
    assert ledger.empty_log()
    other.close()


def test_the_log_is_bounded_without_readers(ledger: Ledger) -> None:
    run = opened(ledger)
    for _ in range(600):
        run = commit(ledger, run)
    assert ledger.log_bytes() < 5_000_000


CHILD = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import batchrun; from pathlib import Path\n"
)


def child(code: str, *arguments: object, point: str = "") -> subprocess.Popen[str]:
    """Start a Python process with batchrun imported."""
    environment = {**os.environ, "BATCHRUN_TEST_POINT": point}
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


WRITER = """
ledger = batchrun.open_ledger(Path(sys.argv[1]), batchrun.Host(), create=False)
run = ledger.unfinished(sys.argv[2])
for number in range(100):
    ledger.note("child", "written", str(number))
    ledger.begin_batches(run, 1, number) if number == 0 else ledger.stage_rejects(
        run, 1, 1, "main", [{"record": str(number), "reason": "reads first"}]
    )
"""


def test_eight_writers_of_two_hundred_rows_meet_no_error(ledger: Ledger, path: Path) -> None:
    jobs = [f"job{number}" for number in range(8)]
    for job in jobs:
        opened(ledger, job=job, run_id=job)
    writers = [child(WRITER, path, job) for job in jobs]
    assert [finished(writer) for writer in writers] == [(0, "")] * 8
    assert len(ledger.events(what="written")) == 800
    assert {run.state for run in ledger.all_unfinished()} == {RunState.RUNNING}
    assert ledger.damage() == ""


RACE = """
host = batchrun.Host()
print("ready", flush=True)
for name in sys.stdin:
    path = Path(name.strip())
    ledger = batchrun.open_ledger(path, host, create=True)
    ledger.note("child", "opened")
    print(ledger.uuid, flush=True)
    ledger.close()
"""


def test_six_processes_that_open_first_make_one_ledger(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD + RACE]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(6)]
        assert {racer.stdout.readline() for racer in racers if racer.stdout} == {"ready\n"}
        for round_ in range(30):
            path = tmp_path / f"{round_}.db"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"{path}\n")
                racer.stdin.flush()
            said = {racer.stdout.readline() for racer in racers if racer.stdout}
            assert len(said) == 1, said
            made = open_ledger(path, HOST, create=False)
            assert len(made.events()) == 6
            made.close()
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.close()


# --- what is no healthy ledger --------------------------------------------------------------------


@pytest.mark.parametrize("point", ["ledger.made", "ledger.begun"])
def test_a_maker_that_is_killed_leaves_no_half_ledger(path: Path, point: str) -> None:
    code = "batchrun.open_ledger(Path(sys.argv[1]), batchrun.Host(), create=True)"
    made = finished(child(code, path, point=f"{point}=kill"))
    assert made[0] == (-signal.SIGKILL if point == "ledger.made" else 0)
    ledger = open_ledger(path, HOST, create=True)
    admit(ledger)
    ledger.close()
    assert [entry.name for entry in path.parent.iterdir()] == ["ledger.db"]


LOST = (
    "The ledger {path} does not hold what the checkpoints tell of: {how}.\n"
    "Without it batchrun would begin at record 1 again.\n"
    "Nothing was changed; it is never made anew by itself.\n"
    "Put the ledger back from a backup, or see `batchrun repair`."
)


def test_a_ledger_that_is_missing_or_empty_is_a_loss_if_checkpoints_exist(path: Path) -> None:
    for _ in range(2):
        with pytest.raises(PersonNeeded) as refusal:
            open_ledger(path, HOST, create=True, witnesses=True)
        assert str(refusal.value) == LOST.format(path=path, how="it is missing or empty")
        path.touch()
    assert path.stat().st_size == 0


def test_a_ledger_that_is_missing_beside_its_log_is_a_loss(path: Path) -> None:
    log = path.with_name("ledger.db-wal")
    log.write_bytes(b"rows")
    with pytest.raises(PersonNeeded, match="it is missing or empty"):
        open_ledger(path, HOST, create=True)
    assert (path.exists(), log.read_bytes()) == (False, b"rows")


def test_a_missing_ledger_is_not_made_to_be_read(path: Path) -> None:
    with pytest.raises(NotFound, match=r"^There is no ledger at .*\nType: batchrun run JOB$"):
        open_ledger(path, HOST, create=False)
    assert list(path.parent.iterdir()) == []


def refusal_of(path: Path) -> PersonNeeded | StateDirectoryError:
    """Open what is no healthy ledger; return the refusal, its bytes being untouched."""
    before = path.read_bytes()
    with pytest.raises((PersonNeeded, StateDirectoryError)) as refusal:
        open_ledger(path, HOST, create=True, witnesses=True)
    assert path.read_bytes() == before
    assert isinstance(refusal.value, PersonNeeded | StateDirectoryError)
    return refusal.value


def test_a_text_file_is_no_ledger(path: Path) -> None:
    path.write_text("not a database " * 1000)
    assert str(refusal_of(path)) == (
        f"The ledger {path} is damaged: file is not a database.\n"
        "It is left as it is; the checkpoints are beside it.\n"
        "See `batchrun check`, then `batchrun repair`."
    )


def test_another_database_is_no_ledger(path: Path) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as other:
        other.execute("CREATE TABLE ledger (uuid)")
    assert refusal_of(path).what.endswith("tell of: it is not a batchrun ledger.")
    with contextlib.closing(apsw.Connection(str(path))) as other:
        other.pragma("application_id", batchrun.APPLICATION_ID)
        other.pragma("user_version", 1)
    assert refusal_of(path).what.endswith("tell of: its own row is gone.")
    with contextlib.closing(apsw.Connection(str(path))) as other:
        other.execute("DROP TABLE ledger")
    assert "no such table: ledger" in refusal_of(path).what


@pytest.fixture
def at_rest(path: Path) -> Path:
    """A ledger with forty commits, closed."""
    ledger = open_ledger(path, HOST, create=True)
    run = opened(ledger)
    for _ in range(40):
        run = commit(ledger, run)
    ledger.close()
    return path


def test_a_truncated_ledger_is_damaged_at_once_or_when_looked_at(at_rest: Path) -> None:
    content = at_rest.read_bytes()
    for length in (*range(100, len(content), 4096 + 100), len(content) - 1):
        at_rest.write_bytes(content[:length])
        try:
            ledger = open_ledger(at_rest, HOST, create=True, witnesses=True)
        except PersonNeeded:
            continue
        assert ledger.damage() != "", length
        ledger.close()


def test_damaged_pages_are_found_and_named(at_rest: Path) -> None:
    content = at_rest.read_bytes()
    for number in range(len(content) // 4096):
        start_, damaged = number * 4096, bytearray(content)
        damaged[start_ : start_ + 110] = bytes(110)
        at_rest.write_bytes(damaged)
        try:
            ledger = open_ledger(at_rest, HOST, create=True, witnesses=True)
        except PersonNeeded:
            continue
        assert ledger.damage() != "", number
        ledger.close()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "directory", "pipe"])
def test_only_a_plain_file_is_a_ledger(at_rest: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside.db"
    shutil.move(at_rest, outside)
    before = outside.read_bytes()
    if kind == "symlink":
        at_rest.symlink_to(outside)
    elif kind == "hard link":
        at_rest.hardlink_to(outside)
    elif kind == "directory":
        at_rest.mkdir()
    else:
        os.mkfifo(at_rest)
    with pytest.raises(StateDirectoryError) as refusal:
        open_ledger(at_rest, HOST, create=True)
    assert str(refusal.value) == (
        f"{at_rest} is not a plain file.\n"
        "It is a link, a directory, a pipe, or has a second name.\n"
        "It is left as it is.\n"
        f"See what it is: ls -l {at_rest}"
    )
    assert outside.read_bytes() == before


def test_a_link_where_the_ledger_is_made_is_not_followed(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (path.parent / ".ledger.db.tmp").symlink_to(outside)
    open_ledger(path, HOST, create=True).close()
    assert outside.read_text() == "precious"


# --- versions -------------------------------------------------------------------------------------

NOW, NEXT = batchrun.SCHEMA_VERSION, batchrun.SCHEMA_VERSION + 1


def columns_of(path: Path) -> dict[str, set[tuple[object, ...]]]:
    """Every table's columns: name, type, NOT NULL, default, place in the primary key."""
    with contextlib.closing(apsw.Connection(str(path))) as ledger:
        names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'index', 'trigger')"
        return {
            str(name): {tuple(row[1:]) for row in ledger.execute(f"PRAGMA table_info({name})")}
            for (name,) in ledger.execute(names).fetchall()
        }


@pytest.mark.parametrize("version", [1, 2])
def test_an_old_ledger_is_migrated_to_what_a_new_one_is(
    path: Path, tmp_path: Path, version: int
) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as old:
        old.execute((Path(__file__).parent / f"schema_version_{version}.sql").read_text())
        first = ("new", "reserved", "an older sentence")  # and there were no other edges then
        old.execute("INSERT INTO edge VALUES (?, ?, ?)", first)
        old.execute("INSERT INTO ledger VALUES ('uuid of old', '2026-01-01T00:00:00.000Z')")
        old.pragma("application_id", batchrun.APPLICATION_ID)
    with_version(path, version)
    path.chmod(0o600)
    migrated = open_ledger(path, HOST, create=False)
    run = commit(migrated, opened(migrated))
    assert (migrated.uuid, run.number, migrated.damage()) == ("uuid of old", 1, "")
    edges = migrated._rows("SELECT from_state, to_state, sentence FROM edge")
    assert {(before, after): why for before, after, why in edges} == TRANSITIONS
    migrated.close()
    (tmp_path / "new").mkdir()
    open_ledger(tmp_path / "new" / "ledger.db", HOST, create=True).close()
    assert columns_of(path) == columns_of(tmp_path / "new" / "ledger.db")


def with_version(path: Path, version: int) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as other:
        other.pragma("user_version", version)


def test_a_newer_ledger_is_refused_untouched(at_rest: Path) -> None:
    with_version(at_rest, NEXT)
    refusal = refusal_of(at_rest)
    assert refusal.exit_code == ExitCode.STATE_DIRECTORY
    assert str(refusal) == (
        f"The ledger {at_rest} has version {NEXT}; this batchrun knows {NOW}.\n"
        "A newer batchrun wrote it.\n"
        "It was not touched.\n"
        "Install that version again."
    )


def test_a_ledger_without_a_version_is_refused_untouched_by_all_alike(at_rest: Path) -> None:
    with_version(at_rest, 0)
    letter = (
        f"The ledger {at_rest} has version 0, older than any that can be migrated.\n"
        "It was not touched.\n"
        "Put the ledger back from a backup; if there is none, move it away, then type:"
        " batchrun repair"
    )
    assert str(refusal_of(at_rest)) == letter
    with pytest.raises(StateDirectoryError) as to_read:
        open_ledger(at_rest, HOST, create=False, write=False)
    assert str(to_read.value) == letter


def test_an_older_ledger_is_migrated_after_a_backup(
    at_rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchrun, "SCHEMA_VERSION", NEXT)
    monkeypatch.setattr(batchrun, "MIGRATIONS", {NOW: "ALTER TABLE run ADD COLUMN colour TEXT"})
    ledger = open_ledger(at_rest, HOST, create=False)
    assert ledger._rows("SELECT colour, number FROM run") == [(None, 40)]
    assert ledger._connection.pragma("user_version") == NEXT
    ledger.close()
    backup = at_rest.with_name(f"ledger.db.version{NOW}")
    assert backup.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    old = open_ledger(backup, HOST, create=False)
    assert (old.run(1).number, old.damage()) == (40, "")
    old.close()


MIGRATE = """
batchrun.MIGRATIONS = {batchrun.SCHEMA_VERSION: "ALTER TABLE run ADD COLUMN colour TEXT"}
batchrun.SCHEMA_VERSION += 1
batchrun.open_ledger(Path(sys.argv[1]), batchrun.Host(), create=False).close()
"""


def test_a_migration_that_is_killed_has_changed_nothing_and_is_done_again(at_rest: Path) -> None:
    assert finished(child(MIGRATE, at_rest, point="migrate.commit=kill"))[0] == -signal.SIGKILL
    ledger = open_ledger(at_rest, HOST, create=False)  # by the old version
    assert (ledger.run(1).number, ledger._connection.pragma("user_version")) == (40, NOW)
    ledger.close()
    assert finished(child(MIGRATE, at_rest)) == (0, "")
    assert finished(child(MIGRATE, at_rest)) == (0, "")
    assert refusal_of(at_rest).what.endswith(f"has version {NEXT}; this batchrun knows {NOW}.")


def test_a_ledger_is_not_migrated_under_a_running_job(at_rest: Path) -> None:
    lock = batchrun.JobLock(at_rest.parent / "locks" / "sync.lock")
    assert lock.acquire()
    code, said = finished(child(MIGRATE, at_rest))
    lock.release()
    assert code == 1
    assert said.endswith(
        "batchrun.Busy: The ledger must be migrated, but sync is running.\n"
        "Its process may be an older batchrun.\n"
        "Nothing was changed.\n"
        "Wait for its end, or type: batchrun pause sync\n"
    )
    open_ledger(at_rest, HOST, create=False).close()


def test_an_older_batchrun_admits_nothing_after_a_migration(at_rest: Path) -> None:
    ledger = open_ledger(at_rest, HOST, create=False)
    assert finished(child(MIGRATE, at_rest)) == (0, "")
    with pytest.raises(StateDirectoryError, match=f"has version {NEXT}; this batchrun knows {NOW}"):
        admit(ledger)
    ledger.close()


# --- reading without writing ----------------------------------------------------------------------


class OtherOwner:
    """Lets a ledger look like somebody else's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


KEPT_OPEN = """
ledger = batchrun.open_ledger(Path(sys.argv[1]), batchrun.Host(), create=False)
ledger.note("the owner", "in the log only")
print("written", flush=True)
import signal
signal.pause()
"""


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {e.name: (e.stat().st_mtime_ns, e.read_bytes()) for e in folder.iterdir()}


@pytest.mark.parametrize("left", ["at rest", "in use", "killed"])
def test_another_owners_ledger_is_read_without_making_or_changing_a_file(
    at_rest: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    owner = None
    if left != "at rest":
        owner = child(KEPT_OPEN, at_rest)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "written\n"
        if left == "killed":
            owner.kill()
            finished(owner)
    before = contents(at_rest.parent)
    OtherOwner(monkeypatch)
    reader = open_ledger(at_rest, HOST, create=False, write=False)
    assert reader.run(1).number == 40
    expected = [] if left == "at rest" else ["in the log only"]
    assert [event.what for event in reader.events(what="in%")] == expected
    assert reader.damage() == ""
    with pytest.raises(StateDirectoryError, match="ReadOnlyError"):
        reader.note("me", "written")
    reader.close()
    assert contents(at_rest.parent) == before
    if owner is not None:
        owner.kill()
        finished(owner)


def test_an_older_ledger_of_another_owner_is_not_migrated(
    at_rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchrun, "SCHEMA_VERSION", NEXT)
    monkeypatch.setattr(batchrun, "MIGRATIONS", {NOW: "ALTER TABLE run ADD COLUMN colour TEXT"})
    OtherOwner(monkeypatch)
    with pytest.raises(StateDirectoryError, match=f"has version {NOW}, not migrated to {NEXT} yet"):
        open_ledger(at_rest, HOST, create=False, write=False)


def test_who_only_reads_an_older_ledger_is_told_what_migrates_it(
    at_rest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchrun, "SCHEMA_VERSION", NEXT)
    monkeypatch.setattr(batchrun, "MIGRATIONS", {NOW: "ALTER TABLE run ADD COLUMN colour TEXT"})
    before = contents(at_rest.parent)
    with pytest.raises(StateDirectoryError) as refusal:
        open_ledger(at_rest, HOST, create=False, write=False)
    assert str(refusal.value) == (
        f"The ledger {at_rest} has version {NOW}, not migrated to {NEXT} yet.\n"
        "It was not touched.\n"
        "Type, as its owner: batchrun resume --all\n"
        "That migrates it, as every command that writes does, and goes on with what is due."
    )
    assert contents(at_rest.parent) == before


class FullHost(Host):
    """A machine without a free byte."""

    def free_bytes(self, path: Path) -> int:  # noqa: ARG002
        return 0


def test_a_full_disk_is_never_called_corruption(at_rest: Path) -> None:
    for error in (apsw.FullError("full"), apsw.IOError("IOError: disk I/O error")):
        letter = batchrun.ledger_letter(error, at_rest, FullHost())
        assert letter.exit_code == ExitCode.STATE_DIRECTORY
        assert letter.what == f"Disk full: the ledger {at_rest} cannot be written ({error})."
        assert letter.todo.endswith(", then type this again.")


def test_json_columns_come_back_as_what_they_were(ledger: Ledger) -> None:
    run = admit(ledger, overrides={"feed": "a.csv"}).run
    assert run.overrides == {"feed": "a.csv"}
    assert ledger._rows("SELECT overrides FROM run") == [(json.dumps(run.overrides),)]
    assert wait_for(lambda: ledger.latest("sync"), "the run") == run
    assert [found.id for found in ledger.latest_of_each_job()] == ["r1"]
