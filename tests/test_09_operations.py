"""Operations: effects in the outside world happen once, whatever is killed when."""

import json
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import apsw
import pytest
from conftest import Project, wait_for
from outside import CLIENT, KINDS, Outside, outside
from test_05_ledger import opened
from test_11_worker import worker_of
from test_12_attempts import is_pending
from test_cleanup import is_over
from test_crash_table import Nursery, nursery

from batchrun import (
    CONFIRMED,
    FREED,
    Alarm,
    Busy,
    Claim,
    Crew,
    Effects,
    Host,
    How,
    IllegalTransition,
    JobError,
    Ledger,
    LostOwnership,
    Operation,
    Operations,
    Request,
    Told,
    broken,
    digest_of,
    interval_of,
    open_ledger,
    recorded_lookup,
    remember_secret,
    retry_after_s,
)

CONFIG = """\
min_free = "1MB"
[defaults]
retry_for = "{retry_for}"
on_exhausted = "pause"
batch_size = 6
settle = "{settle}"
call_timeout = "{call_timeout}"
retry_first_wait = "10ms"
[jobs.push]
"""

JOB = """
from dataclasses import dataclass
from batchrun import CannotTell, job


@dataclass(frozen=True)
class Settings:
    url: str
    kind: str
    records: int = 12
    each: bool = True
    workers: int = 3
    rate: str = "none"
    on_error: str = "raise"
    timeout_s: float = 5.0
    revision: int = 0


def not_done(error):
    return getattr(error, "status", 0) in (422, 429)


@job(settings=Settings, not_done=not_done)
def push(ctx):
    s = ctx.settings

    def call(key, record):
        return send(s.url, "PUT", key, {"record": record}, s.timeout_s)

    def lookup(key):
        try:
            return send(s.url, "GET", key)
        except Answered as answered:
            if answered.status == 501:
                raise CannotTell from None
            raise

    ask = None if s.kind == "neither" else lookup
    for batch in ctx.batches(list(range(s.records)), name="main"):
        if s.each:
            done = ctx.once_each(
                batch,
                idempotency_key=lambda record: f"push/{record}",
                call=call,
                lookup=ask,
                workers=s.workers,
                rate=None if s.rate == "none" else s.rate,
                on_error=s.on_error,
            )
            print("pairs", json.dumps(done), flush=True)
        else:
            for record in batch:
                ctx.once(f"push/{record}", call, record, lookup=ask)
        yield batch
"""


class Shop:
    """A project with the job `push`, and the destination that it pushes to."""

    def __init__(self, folder: Path, server: Outside, kind: str, **settings: object) -> None:
        self.folder, self.server, self.kind, self.space = folder, server, kind, folder.parent.name
        self.options = {"retry_for": "0", "settle": "0", "call_timeout": "10s"}
        self.options |= {n: str(settings.pop(n)) for n in list(settings) if n in self.options}
        self.settings = {"url": server.of(self.space, kind), "kind": kind, **settings}
        self.write(CLIENT + JOB)

    def write(self, job: str) -> None:
        """Write the project's files."""
        (self.folder / "jobs").mkdir(mode=0o700, exist_ok=True, parents=True)
        self.folder.chmod(0o700)
        config = CONFIG.format(**self.options)
        config += "".join(f"{name} = {json.dumps(v)}\n" for name, v in self.settings.items())
        for name, text in (("batchrun.toml", config), ("jobs/push.py", job)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600)

    @property
    def effects(self) -> dict[str, int]:
        return self.server.effects(self.space)

    def ledger(self) -> Ledger:
        return open_ledger(self.folder / "state" / "ledger.db", Host(), create=False)

    def operations(self) -> dict[str, Operation]:
        with closing(self.ledger()) as ledger:
            return ledger.operations_with("push", [f"push/{n}" for n in range(5000)])

    def open(self) -> list[str]:
        return [key for key, row in self.operations().items() if row.outcome is None]

    def latest(self) -> Any:  # noqa: ANN401 - a Run
        with closing(self.ledger()) as ledger:
            return ledger.latest("push")

    def answer(self) -> None:
        """Say as a person, of all that is unknown, what the destination has seen."""
        with closing(self.ledger()) as ledger:
            run = ledger.latest("push")
            assert run is not None
            for row in ledger.open_operations(run):
                done = row.key in self.effects
                outcome, receipt = (CONFIRMED, '{"by": "hand"}') if done else (FREED, None)
                ledger.answer(row, Told(row.id, outcome, receipt, "ann", "looked"), "ann")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """A destination for all tests of this file that run in this process."""
    with outside(tmp_path_factory.mktemp("outside")) as running:
        yield running


@pytest.fixture(scope="module")
def nurse() -> Iterator[Nursery]:
    """What starts batchrun quickly."""
    with nursery() as started:
        yield started


# --- kills at every named point -------------------------------------------------------------------

POINTS = (
    "operation.claiming",
    "operation.claimed",
    "operation.called",
    "operation.settling",
    "operation.settled",
    "commit.begun",
    "ledger.commit",
)
KILLED = -signal.SIGKILL


@pytest.mark.parametrize("each", [False, True], ids=["once", "once_each"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_point_repeats_no_effect_and_forgets_none(
    nurse: Nursery, server: Outside, tmp_path: Path, kind: str, point: str, *, each: bool
) -> None:
    shop = Shop(tmp_path / "shop", server, kind, each=each)
    nurse.run(shop.folder, ["run", "push"], f"{point}=kill")
    require_named(shop)
    nurse.run(shop.folder, ["resume"], f"{point}=kill-both")
    require_named(shop)
    if shop.latest().state != "succeeded":
        code = nurse.run(shop.folder, ["resume"])
        if kind == "neither" and code == 13:
            require_named(shop)
            shop.answer()
            code = nurse.run(shop.folder, ["resume"])
        assert code == 0, (shop.folder / "output.txt").read_text()
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}
    assert {row.outcome for row in shop.operations().values()} <= {"done", "confirmed"}
    run = shop.latest()
    assert (run.state, run.read) == ("succeeded", 12)
    assert sum(run.counts.values()) == 12


def require_named(shop: Shop) -> None:
    """No effect happened twice, and each one has a row; it is named if it has no outcome."""
    operations = shop.operations()
    assert max(shop.effects.values(), default=1) == 1
    assert set(shop.effects) <= set(operations)
    unknown = [key for key, row in operations.items() if row.outcome is None]
    run = shop.latest()
    if run.state == "awaiting" and unknown:
        said = (shop.folder / "output.txt").read_text()
        assert f"Whether the operation '{unknown[0]}' was done is unknown; claimed" in said
        assert f"batchrun reconcile {run.id}" in said


# --- a key means once ever ------------------------------------------------------------------------


def said(shop: Shop) -> str:
    return (shop.folder / "output.txt").read_text()


def run(nurse: Nursery, shop: Shop, *words: str, point: str = "") -> int:
    """Run batchrun; what it says replaces what was said before."""
    (shop.folder / "output.txt").write_text("")
    return nurse.run(shop.folder, list(words), point)


@pytest.mark.parametrize("each", [False, True], ids=["once", "once_each"])
def test_a_later_run_calls_no_recorded_key_and_names_the_first_once(
    nurse: Nursery, server: Outside, tmp_path: Path, *, each: bool
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", each=each)
    assert run(nurse, shop, "run", "push") == 0
    first = shop.latest()
    assert run(nurse, shop, "-v", "run", "push", "--set", "records=14") == 0
    assert shop.effects == {f"push/{n}": 1 for n in range(14)}
    second = shop.latest()
    assert (first.counts, second.counts) == ({"called": 12}, {"already done": 12, "called": 2})
    (told,) = re.findall(r"operations were recorded before.*", said(shop))
    what = "operations were recorded before and are not called again; the first is 'push/0'"
    assert told == f"{what}, of run {first.id}, {shop.operations()['push/0'].claimed_at}"


def test_a_key_that_was_claimed_for_other_arguments_is_refused(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "keys", records=3)
    assert run(nurse, shop, "run", "push") == 0
    first = shop.latest()
    shop.write((CLIENT + JOB).replace("list(range(s.records))", "[0, 5, 2]"))
    shop.write((CLIENT + JOB).replace('f"push/{record}"', '"push/0"'))
    assert run(nurse, shop, "run", "push") == 13
    assert "The idempotency key 'push/0' was used for other arguments." in said(shop)
    assert "Two records of this batch have it" in said(shop)
    assert f"When the job is mended: batchrun resume {shop.latest().id}\n" in said(shop)
    shop.write((CLIENT + JOB).replace('f"push/{record}"', 'f"push/{(record + 1) % 3}"'))
    assert run(nurse, shop, "run", "push") == 13
    assert re.search(r"It was claimed at 20\S+Z by run " + first.id, said(shop))
    assert shop.effects == {f"push/{n}": 1 for n in range(3)}


def test_a_key_twice_in_a_batch_is_called_once_and_both_get_its_receipt(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup")
    shop.write((CLIENT + JOB).replace("list(range(s.records))", "[7, 8, 7]"))
    assert run(nurse, shop, "run", "push") == 0
    assert shop.effects == {"push/7": 1, "push/8": 1}
    assert shop.latest().counts == {"called": 2, "already done": 1}
    (log,) = (shop.folder / "state/logs/push").iterdir()
    pairs = json.loads(log.read_text().partition("pairs ")[2].splitlines()[0])
    assert [record for record, _ in pairs] == [7, 8, 7]
    assert pairs[0][1] == pairs[2][1] != pairs[1][1]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (('f"push/{record}"', '""'), "An operation cannot have the key ''."),
        (('f"push/{record}"', '"a\\nb"'), "An operation cannot have the key 'a\\nb'."),
        (('f"push/{record}"', '"x" * 513'), "An operation cannot have the key 'xxx"),
        (('f"push/{record}"', "record"), "An operation cannot have the key 0."),
        (('"none" else s.rate', '"none" else "fast"'), "cannot go on at the rate 'fast'"),
        (('"none" else s.rate', '"none" else 20'), "cannot go on at the rate 20."),
        (("def call(", "async def call("), "An operation cannot be made by push.<locals>.call."),
        (("def lookup(", "async def lookup("), "cannot be made by push.<locals>.lookup."),
        (('return send(s.url, "PUT"', 'yield send(s.url, "PUT"'), "push.<locals>.call."),
        (("workers=s.workers", "workers=0"), "cannot go on with workers=0, on_error='raise'."),
        (("on_error=s.on_error", 'on_error="skip"'), "with workers=3, on_error='skip'."),
    ],
)
def test_what_cannot_be_an_operation_is_refused_before_any_call(
    nurse: Nursery, server: Outside, tmp_path: Path, broken: tuple[str, str], complaint: str
) -> None:
    shop = Shop(tmp_path / "shop", server, "keys", rate="1000/s")
    assert broken[0] in JOB
    shop.write((CLIENT + JOB).replace(*broken))
    assert run(nurse, shop, "run", "push") == 1
    assert complaint in said(shop)
    assert shop.effects == {}


@pytest.mark.parametrize("receipt", ["{1, 2}", "'half a \\udcff character'"])
def test_a_receipt_that_is_not_json_is_told_after_the_call_was_recorded(
    receipt: str, nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=3)
    shop.write(
        (CLIENT + JOB)
        .replace('return send(s.url, "PUT"', 'return {1: 2} and send(s.url, "PUT"')
        .replace("s.timeout_s)\n", f"s.timeout_s) and {receipt}\n", 1)
    )
    assert run(nurse, shop, "run", "push") == 1
    what = r"The operation 'push/\d' was done, but its receipt is not JSON: "
    assert re.search(what + re.escape(receipt), said(shop))
    assert {shop.operations()[key].outcome for key in shop.effects} == {"done"}
    assert shop.open() == []


def test_a_letter_keeps_its_parts_whatever_lines_a_value_has() -> None:
    letter = broken("no receipt", key="k", receipt="[[1 2]\n [3 4]]")
    assert (
        letter.what == "The operation 'k' was done, but its receipt is not JSON: [[1 2]\n [3 4]]."
    )
    assert letter.todo == "Return None, text, numbers, lists and dicts with text keys."


def test_a_call_may_not_use_the_context(nurse: Nursery, server: Outside, tmp_path: Path) -> None:
    for workers in (1, 3):
        shop = Shop(tmp_path / f"shop{workers}" / "shop", server, "keys", workers=workers)
        nested = 'ctx.once("inner", lambda key: None); return send(s.url, "PUT"'
        shop.write((CLIENT + JOB).replace('return send(s.url, "PUT"', nested))
        assert run(nurse, shop, "run", "push") == 1
        assert "used the job's context." in said(shop)
        assert "inner" not in shop.operations()


@pytest.mark.parametrize("each", [False, True], ids=["once", "once_each"])
def test_a_call_that_returns_what_was_to_be_awaited_was_not_made(
    nurse: Nursery, server: Outside, tmp_path: Path, *, each: bool
) -> None:
    shop = Shop(tmp_path / "shop", server, "keys", each=each, records=3)
    later = "    async def later(key, record):\n        return 1\n\n    def call(key, record):\n"
    job = (CLIENT + JOB).replace("    def call(key, record):\n", later)
    shop.write(job.replace('return send(s.url, "PUT"', "return later(key, record) or send(0, 0"))
    assert run(nurse, shop, "run", "push") == 1
    letter = r"The operation 'push/\d' was not made: its call returned a coroutine, not awaited."
    assert re.search(letter, said(shop))
    assert "never awaited" not in said(shop)
    assert {row.outcome for row in shop.operations().values()} == {FREED}
    shop.write(CLIENT + JOB)
    assert run(nurse, shop, "resume") == 0
    assert shop.effects == {f"push/{n}": 1 for n in range(3)}


def test_what_a_lookup_returns_to_be_awaited_tells_nothing(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=3)
    assert run(nurse, shop, "run", "push", point="operation.called@2=kill") == 13
    unknown = shop.open()
    later = "    async def later(key):\n        return 1\n\n    def lookup(key):\n"
    job = (CLIENT + JOB).replace("    def lookup(key):\n", later)
    shop.write(job.replace('return send(s.url, "GET", key)', "return later(key)"))
    assert run(nurse, shop, "resume") == 1
    assert "its lookup returned a coroutine, not awaited." in said(shop)
    assert shop.open() == unknown


def test_a_thread_of_the_job_may_not_use_the_context_and_the_batch_is_not_committed(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "keys", each=False)
    threaded = (
        "import threading\n                done = threading.Thread(target=ctx.once,"
        ' args=(f"push/{record}", call, record))\n'
        "                done.start(); done.join()"
    )
    call = 'ctx.once(f"push/{record}", call, record, lookup=ask)'
    assert call in JOB
    shop.write((CLIENT + JOB).replace(call, threaded))
    assert run(nurse, shop, "run", "push") == 1
    assert "The job used its context in a thread of its own." in said(shop)
    assert (shop.operations(), shop.latest().number) == ({}, 0)


def test_equal_arguments_have_equal_digests_whatever_their_order_and_process() -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    rich = {"b": Decimal("1.50"), "a": [date(2026, 1, 31), moment, UUID(int=7), b"\0", (1, 2.5)]}
    assert digest_of("k", (rich,)) == digest_of("k", (dict(reversed(rich.items())),))
    assert digest_of("k", ("x", 1)).hex().startswith("38e37cb9")
    others: list[Any] = [1, 1.0, "1", Decimal(1), True, None, [1], {"a": 1}, b"1"]
    assert len({digest_of("k", (other,)) for other in others}) == len(others)


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (object(), "a object is among them"),
        ([{1, 2}], "a set is among them"),
        (float("nan"), "Out of range float values are not JSON compliant"),
        (lambda: None, "a function is among them"),
    ],
)
def test_arguments_that_have_no_digest_are_refused(argument: object, why: str) -> None:
    with pytest.raises(JobError) as refused:
        digest_of("k", (argument,))
    assert refused.value.what == f"The arguments of operation 'k' have no digest: {why}."


def test_a_lookup_is_recorded_if_another_process_can_call_it() -> None:
    def recorded(lookup: object) -> object:
        return json.loads(recorded_lookup(lookup) or "null")

    given = partial(wait_for, 1, text="y")  # type: ignore[arg-type, call-arg]
    remember_secret("a password of theirs")
    assert recorded(partial(print, "a password of theirs")) is None
    assert recorded(wait_for) == ["conftest:wait_for", [], {}]
    assert recorded(given) == ["conftest:wait_for", [1], {"text": "y"}]
    for other in (lambda key: key, Shop.answer, partial(print, Shop)):
        assert recorded(other) is None


def test_an_operation_behind_the_targets_commit_is_refused(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    """After a crash there the batch would be rolled forward, and its operations forgotten."""
    shop = Shop(tmp_path / "shop", server, "keys")
    behind = (
        '    target = ctx.connect("sqlite:t.db")\n'
        '    for batch in ctx.batches(list(range(s.records)), name="main", target=target):\n'
        "        with batch.transaction():\n            pass\n"
    )
    loop = '    for batch in ctx.batches(list(range(s.records)), name="main"):\n'
    assert loop in JOB
    shop.write((CLIENT + JOB).replace(loop, behind))
    assert run(nurse, shop, "run", "push") == 1
    assert "once() of batch 1 was called after the batch was closed." in said(shop)
    assert shop.effects == {}


# --- what goes wrong outside ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "detail"),
    [("hang after", ""), ("reset before", ""), ("reset after", ""), ("error after", "")],
)
@pytest.mark.parametrize("each", [False, True], ids=["once", "once_each"])
def test_a_fault_of_the_destination_is_looked_up_and_nothing_is_repeated(
    nurse: Nursery, server: Outside, tmp_path: Path, fault: str, detail: str, *, each: bool
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", each=each, timeout_s=0.3, retry_for="30s")
    server.plan(shop.space, "push/3", fault, detail)
    assert run(nurse, shop, "run", "push") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}
    assert server.lookups(shop.space) == {"push/3": 1}
    expected = {"called": 12} if fault == "reset before" else {"called": 11, "confirmed": 1}
    assert shop.latest().counts == expected
    assert len(shop_attempts(shop)) == 2


def shop_attempts(shop: Shop) -> list[Any]:
    with closing(shop.ledger()) as ledger:
        return ledger.attempts(shop.latest())


def test_a_wait_that_is_asked_for_halts_all_calls_and_ends_no_attempt(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=6, workers=1, retry_for="30s")
    server.plan(shop.space, "push/2", "busy", "1", times=2)
    began = time.monotonic()
    assert run(nurse, shop, "run", "push") == 0, said(shop)
    assert time.monotonic() - began > 2
    assert shop.effects == {f"push/{n}": 1 for n in range(6)}
    times = server.times(shop.space)
    assert max(after - before for before, after in pairwise(times)) > 1.9
    assert len(shop_attempts(shop)) == 1
    assert server.lookups(shop.space) == {}


def test_a_longer_wait_than_retry_for_is_an_error_like_any_other(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", retry_for="10s")
    server.plan(shop.space, "push/2", "busy", "3600")
    assert run(nurse, shop, "run", "push") == 0, said(shop)
    assert [each.ending for each in shop_attempts(shop)] == ["raised", "succeeded"]
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}


@pytest.mark.parametrize("each", [False, True], ids=["once", "once_each"])
def test_what_the_destination_refuses_ends_the_attempt_and_may_be_claimed_again(
    nurse: Nursery, server: Outside, tmp_path: Path, *, each: bool
) -> None:
    shop = Shop(tmp_path / "shop", server, "neither", each=each)
    server.plan(shop.space, "push/3", "refuse", "422")
    assert run(nurse, shop, "run", "push") == 13
    assert "The job raised Answered: HTTP 422 in batch 1." in said(shop)
    row = shop.operations()["push/3"]
    assert (row.outcome, row.who, row.why) == ("freed", "worker", "Answered: HTTP 422")
    assert shop.open() == []
    assert run(nurse, shop, "resume") == 0
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}


def test_a_record_that_the_destination_refuses_can_be_rejected(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "neither", on_error="reject", max_rejects=1)
    server.plan(shop.space, "push/3", "refuse", "422")
    assert run(nurse, shop, "run", "push") == 10, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12) if n != 3}
    ended = shop.latest()
    assert (ended.read, ended.rejected, ended.counts) == (12, 1, {"called": 11})


def test_an_unknown_outcome_is_never_a_reject(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "neither", on_error="reject", max_rejects=9)
    server.plan(shop.space, "push/3", "error after")
    assert run(nurse, shop, "run", "push") == 13
    assert shop.open() == ["push/3"]
    assert shop.latest().rejected == 0


@pytest.mark.parametrize("fault", [("nonsense", ""), ("refuse", "503")])
def test_a_lookup_that_fails_is_an_error_of_the_job_and_is_asked_again(
    nurse: Nursery, server: Outside, tmp_path: Path, fault: tuple[str, str]
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", retry_for="30s")
    server.plan(shop.space, "push/3", "reset after")
    server.plan(shop.space, "GET push/3", *fault)
    assert run(nurse, shop, "run", "push") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}
    assert [each.ending for each in shop_attempts(shop)] == ["raised", "raised", "succeeded"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (("refuse", "503"), "Answered: HTTP 503"),
        (("hang", ""), "TimeoutError: the lookup of operation 'push/3' did not end within"),
    ],
)
def test_when_the_tries_of_a_lookup_are_over_the_run_awaits_its_operation_and_then_is_due(
    nurse: Nursery, server: Outside, tmp_path: Path, fault: tuple[str, str], why: str
) -> None:
    shop = Shop(
        tmp_path / "shop", server, "lookup", retry_for="30s", max_tries=3, call_timeout="500ms"
    )
    server.plan(shop.space, "push/3", "reset after")
    server.plan(shop.space, "GET push/3", *fault, times=2)
    assert run(nurse, shop, "run", "push") == 13
    stands = shop.latest()
    assert (stands.state, stands.reason, shop.open()) == ("awaiting", "operation", ["push/3"])
    for words in ("run", "status"):
        assert words == "run" or run(nurse, shop, "status", "push") == 3
        assert "Whether the operation 'push/3' was done is unknown; claimed 20" in said(shop)
        assert words == "status" or "Batch 1 failed 3 times, and max_tries = 3" in said(shop)
        assert f"The last time: The job raised {why}" in said(shop)
        assert f"batchrun reconcile {stands.id}" in said(shop)
        assert words == "status" or f"reconcile {stands.id} --absent push/3" in said(shop)
    shop.answer()
    assert run(nurse, shop, "resume", "--all") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}


def test_absent_is_not_believed_before_settle_has_passed(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", settle="2s")
    server.plan(shop.space, "push/3", "late", "1")
    assert run(nurse, shop, "run", "push", point="operation.called@4=kill") == 13
    assert run(nurse, shop, "resume") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}
    assert server.lookups(shop.space)["push/3"] == 2


def test_what_was_looked_up_and_then_not_begun_is_not_recorded_as_done(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=6, rate="4/s")
    assert run(nurse, shop, "run", "push", point="operation.claimed@3=kill") == 13
    assert shop.open() == ["push/0", "push/1", "push/2"]
    server.plan(shop.space, "push/4", "error after")
    assert run(nurse, shop, "resume") == 13
    assert run(nurse, shop, "resume") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(6)}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_call_over_its_time_limit_ends_the_attempt_and_stays_unknown(
    nurse: Nursery, server: Outside, tmp_path: Path, workers: int
) -> None:
    shop = Shop(
        tmp_path / "shop", server, "neither", workers=workers, timeout_s=60, call_timeout="500ms"
    )
    # whatever the job takes a time-out of its own for: this call may be at work still
    careless = JOB.replace("def not_done(error):", "def not_done(error):\n    return True")
    shop.write(CLIENT + careless)
    server.plan(shop.space, "push/1", "hang after")
    assert run(nurse, shop, "run", "push") == 13
    words = "TimeoutError: the call of operation 'push/1' did not end within 0.5 s in batch 1."
    assert f"The job raised {words}" in said(shop)
    assert shop.open() == ["push/1"]
    done = {key for key, row in shop.operations().items() if row.outcome == "done"}
    assert done == set(shop.effects) - {"push/1"}


# --- what nobody can tell -------------------------------------------------------------------------


def unknown_shop(nurse: Nursery, server: Outside, folder: Path) -> Shop:
    """A shop whose run awaits an answer: one effect happened, one did not, and nobody can tell."""
    shop = Shop(folder / "shop", server, "neither", records=6, workers=2)
    server.plan(shop.space, "push/1", "error after")
    server.plan(shop.space, "push/0", "reset before")
    assert run(nurse, shop, "run", "push") == 13
    assert run(nurse, shop, "resume") == 13
    return shop


def test_a_run_awaits_a_person_who_answers_and_then_the_tick_goes_on(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = unknown_shop(nurse, server, tmp_path)
    stands = shop.latest()
    assert (stands.state, stands.reason) == ("awaiting", "operation")
    claimed = shop.operations()["push/0"].claimed_at
    why = f"Whether the operation 'push/0' was done is unknown; claimed {claimed}. It is one of 2."
    reconcile = f"batchrun reconcile {stands.id}"
    assert why in said(shop)
    assert "--lookup" not in said(shop)  # it has none
    assert f"  {reconcile} --confirm push/0 " in said(shop)
    assert f"  {reconcile} --absent push/0 " in said(shop)
    assert run(nurse, shop, "status", "push") == 3
    assert why in said(shop)
    assert reconcile in said(shop)
    assert run(nurse, shop, "resume", "--all") == 0
    assert run(nurse, shop, "run", "push") == 13
    assert f"Run {stands.id} of push waits for an answer." in said(shop)
    assert shop.effects == {"push/1": 1}
    shop.answer()
    assert run(nurse, shop, "status", "push") == 0, said(shop)
    assert "All its operations have their outcome." in said(shop)
    assert run(nurse, shop, "resume", "--all") == 0
    assert shop.effects == {f"push/{n}": 1 for n in range(6)}
    assert shop.latest().counts == {"called": 5, "confirmed": 1}


def test_neither_a_fresh_start_nor_a_cancel_forgets_what_is_unknown(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = unknown_shop(nurse, server, tmp_path)
    old = shop.latest()
    assert run(nurse, shop, "run", "push", "--fresh") == 13
    assert f"Run {old.id} of push has unknown operations, which no fresh start forgets." in said(
        shop
    )
    assert shop.latest() == old
    assert run(nurse, shop, "cancel", old.id) == 0
    assert shop.open() == ["push/0", "push/1"]
    assert run(nurse, shop, "run", "push") == 13  # the new run answers for them now
    new = shop.latest()
    with closing(shop.ledger()) as ledger:
        assert len(ledger.open_operations(new)) == 2
        assert [(of.id, n) for of, n in ledger.runs_with_open_operations()] == [(new.id, 2)]
    shop.answer()
    assert run(nurse, shop, "resume") == 0
    assert shop.effects == {f"push/{n}": 1 for n in range(6)}


def test_a_fresh_start_tries_again_what_its_own_first_attempt_left_unknown(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", retry_for="30s")
    server.plan(shop.space, "push/3", "reset after")
    assert run(nurse, shop, "run", "push", "--fresh") == 0, said(shop)
    assert shop.effects == {f"push/{n}": 1 for n in range(12)}
    assert len(shop_attempts(shop)) == 2


def test_a_run_does_not_end_with_an_unknown_operation_that_it_never_met_again(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=6)
    assert run(nurse, shop, "run", "push", point="operation.called@2=kill") == 13
    shop.write((CLIENT + JOB).replace('f"push/{record}"', 'f"other/{record}"'))
    assert run(nurse, shop, "resume") == 13
    assert shop.latest().state == "awaiting"
    assert shop.latest().read == 6
    shop.answer()
    assert run(nurse, shop, "resume") == 0


# --- a place to stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_stop_begins_no_call_records_those_in_flight_and_leaves_nothing_unknown(
    project: Project, server: Outside, *, is_interrupted: bool
) -> None:
    """One call takes two seconds, so that it is in flight when the stop comes."""
    shop = Shop(project.folder, server, "neither", records=60, workers=4, rate="50/s")
    shop.options["call_timeout"] = "20s"
    shop.write((CLIENT + JOB).replace('name="main"', 'name="main", size=60'))
    server.plan(shop.space, "push/3", "slow", "2")
    process = project.start("run", "push")
    wait_for(lambda: len(shop.effects) > 4, "some calls")
    worker = worker_of(process)
    process.send_signal(signal.SIGTERM)
    if is_interrupted:
        os.kill(worker, signal.SIGSTOP)
        wait_for(partial(is_over, time.monotonic() + 0.3), "a second stop to be one of its own")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: is_pending(worker, signal.SIGUSR1), "the second stop to reach the worker")
        os.kill(worker, signal.SIGCONT)
    ended = project.finish(process)
    assert ended.code == 75, ended.err
    assert shop.open() == []
    assert "push/3" in shop.effects
    assert len(shop.effects) < 60
    done = {key for key, row in shop.operations().items() if row.outcome == "done"}
    assert done == set(shop.effects)
    assert project.run("resume").code == 0
    assert shop.effects == {f"push/{number}": 1 for number in range(60)}


def test_a_pause_ends_the_wait_that_a_destination_asked_for(
    project: Project, server: Outside
) -> None:
    shop = Shop(project.folder, server, "neither", records=6, workers=1, retry_for="2m")
    server.plan(shop.space, "push/2", "busy", "40")
    process = project.start("run", "push")
    wait_for(lambda: len(shop.effects) > 1, "the first calls")
    wait_for(lambda: "freed" in {row.outcome for row in shop.operations().values()}, "the wait")
    began = time.monotonic()
    with closing(shop.ledger()) as ledger:
        ledger.request(shop.latest(), Request.PAUSE, "ann")
    ended = project.finish(process)
    assert (ended.code, time.monotonic() - began < 20) == (75, True), ended.err
    assert shop.open() == []


class Door:
    """A driver that is asked to stop once, and then that is withdrawn."""

    def __init__(self) -> None:
        self.stops = 1

    def stop_is_asked(self) -> bool:
        self.stops -= 1
        return self.stops == 0

    def pass_gate(self) -> None:
        """Stay open."""

    def say(self, text: str) -> None:
        """Keep what people are told."""
        self.said = text


def a_crew(calls: Any, workers: int, rate: str | None = None) -> Crew:  # noqa: ANN401 - any call
    options = SimpleNamespace(call_timeout_s=60.0)
    of: Any = SimpleNamespace(host=Host(), driver=Door(), options=options, alarm=Alarm(60.0))
    of.driver.stops = 0
    return Crew(of, How(calls, workers=workers, rate=rate), calls, "call")


def test_a_crew_of_one_makes_a_call_a_turn_at_the_rate_and_none_after_a_halt() -> None:
    began = list[str]()
    with a_crew(lambda claim: began.append(claim.key), 1, "1/h") as crew:
        crew.add([Claim(str(n), (), b"") for n in range(3)])
        assert [claim.key for claim in crew.turn()] == ["0"]
        assert (crew.turn(), began) == ([], ["0"])  # the next one is due in an hour
        crew.due = 0.0
        assert [claim.key for claim in crew.turn()] == ["1"]
        crew.due, crew.halted = 0.0, True
        (left,) = crew.turn()
        assert (left.key, left.began, began) == ("2", 0.0, ["0", "1"])


def test_what_is_not_begun_when_its_crew_is_left_is_never_called() -> None:
    began, go_on = list[str](), threading.Event()

    def call(claim: Claim) -> None:
        began.append(claim.key)
        go_on.wait(20)

    before = threading.active_count()
    with a_crew(call, 2) as crew:
        crew.add([Claim(str(n), (), b"") for n in range(9)])
        crew.turn()
        wait_for(lambda: len(began) == 2, "both threads at work")
    go_on.set()
    wait_for(lambda: threading.active_count() == before, "the end of both")
    assert began == ["0", "1"]


def test_no_more_calls_are_in_flight_than_workers_where_there_is_a_rate() -> None:
    go_on = threading.Event()
    with a_crew(lambda _: go_on.wait(20), 2, "999999/s") as crew:
        crew.add([Claim(str(n), (), b"") for n in range(9)])
        for _ in range(4):
            assert crew.turn() == []
        assert len(crew.out) == 2
        go_on.set()


def test_the_time_limit_of_a_lookup_begins_with_it_also_when_it_is_asked_again() -> None:
    go_on = threading.Event()
    claims = [Claim(str(n), (), b"") for n in range(9)]
    for claim in claims:
        claim.began = Host().monotonic() - 100
    with a_crew(lambda _: go_on.wait(20), 2) as crew:
        crew.add(claims)
        assert crew.turn() == []
        go_on.set()


def test_what_a_withdrawn_stop_kept_from_being_looked_up_is_not_absent(tmp_path: Path) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run = opened(ledger)
        ids = ledger.operate(run, 1, [], [(key, digest_of(key, ())) for key in "abc"], number=1)
        options: Any = SimpleNamespace(settle_s=0.0, call_timeout_s=60.0)
        driver: Any = Door()
        operations = Operations(ledger, run, 1, Host(), options, None, driver)
        asked = list[str]()
        claims = [Claim(key, (), b"") for key in "abc"]
        for claim in claims:
            claim.id = ids[claim.key]
        absent = operations._look_up(claims, How(asked.append, lookup=asked.append))
        assert ([claim.key for claim in absent], asked) == (list("abc"), list("abc"))


def test_calls_begin_evenly_at_the_rate(nurse: Nursery, server: Outside, tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", server, "keys", records=12, rate="20/s")
    assert run(nurse, shop, "run", "push") == 0
    times = server.times(shop.space)
    gaps = [after - before for before, after in pairwise(times[:6])]
    assert 0.045 < sum(gaps) / len(gaps) < 0.2
    assert times[5] - times[0] > 0.2


def test_a_kill_in_a_slow_batch_leaves_at_most_two_slices_unknown(
    project: Project, server: Outside
) -> None:
    shop = Shop(project.folder, server, "neither", records=5000, workers=8, rate="20/s")
    shop.write((CLIENT + JOB).replace('name="main"', 'name="main", size=5000'))
    project.start("run", "push")
    wait_for(lambda: len(shop.effects) > 30, "some calls")
    project.kill_all()
    opened = shop.open()
    assert 0 < len(opened) <= 16  # two slices of as many as there are workers
    assert set(shop.effects) <= set(shop.operations())


@pytest.mark.parametrize(
    ("rate", "seconds"), [("20/s", 0.05), ("100/m", 0.6), ("3600/h", 1.0), ("0.5/s", 2.0)]
)
def test_a_rate_is_how_many_calls_begin_in_a_time(rate: str, seconds: float) -> None:
    assert interval_of(rate) == pytest.approx(seconds)
    assert interval_of(None) == 0


@pytest.mark.parametrize("rate", ["", "20", "0/s", "20/d", "-1/s", "20 /s"])
def test_a_rate_of_another_form_is_refused(rate: str) -> None:
    with pytest.raises(JobError, match="cannot go on at the rate"):
        interval_of(rate)


class Refused(Exception):
    """An error as HTTP libraries raise it."""

    def __init__(self, **facts: object) -> None:
        super().__init__()
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        (Refused(retry_after=2), 2.0),
        (Refused(retry_after="2.5"), 2.5),
        (Refused(headers={"Retry-After": "7"}), 7.0),
        (Refused(response=Refused(headers={"Retry-After": "7"})), 7.0),
        (Refused(headers={"Retry-After": "Sat, 31 Jan 2026 12:00:30 GMT"}), 30.0),
        (Refused(headers={"Retry-After": "Sat, 31 Jan 2026 11:00:00 GMT"}), 0.0),
        (Refused(headers={"Retry-After": "soon"}), None),
        (Refused(headers={}), None),
        (Refused(), None),
        (Refused(retry_after=float("inf")), float("inf")),
    ],
)
def test_a_wait_is_read_where_errors_carry_it(error: Exception, wait_s: float | None) -> None:
    assert retry_after_s(error, "2026-01-31T12:00:00.000Z") == wait_s


# --- the ledger -----------------------------------------------------------------------------------


def test_an_owner_that_lost_ownership_claims_nothing_and_tells_nothing(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup", records=3)
    assert run(nurse, shop, "run", "push") == 0
    with closing(shop.ledger()) as ledger:
        ended, before = ledger.latest("push"), ledger.newest_operation()
        assert ended is not None
        for told, claims in (([Told(1, FREED)], []), ([], [("new", b"")])):
            with pytest.raises(LostOwnership):
                ledger.operate(ended, ended.generation - 1, told, claims, number=1)
        assert ledger.newest_operation() == before == 3


def commits_of(ledger: Ledger) -> list[int]:
    """Return a list that gets the level of `synchronous` of each transaction that is committed."""
    connection, levels = ledger._connection, list[int]()

    def watch(_: object, sql: str, _bindings: object) -> bool:
        if sql == "COMMIT":
            levels.append(connection.pragma("synchronous"))
        return True

    connection.exec_trace = watch
    return levels


def test_a_claim_waits_for_the_disk_and_what_is_only_told_does_not(tmp_path: Path) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run, levels = opened(ledger), commits_of(ledger)
        (row,) = ledger.operate(run, 1, [], [("key", b"")], number=1).values()
        ledger.operate(run, 1, [Told(row, FREED)], [])
        ledger.operate(run, 1, [], [("key", b"")], number=1)
        ledger.sync(run, 1)
        assert levels == [2, 1, 2, 2]


class Instant(Host):
    """A machine on which nothing takes any time."""

    def monotonic(self) -> float:
        """Return a moment, the same one always."""
        return 1.0


def test_instant_calls_are_told_and_claimed_by_the_slice_and_two_slices_are_open_at_most(
    tmp_path: Path,
) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run, driver, levels = opened(ledger), cast("Any", Door()), commits_of(ledger)
        driver.stops = 0
        options: Any = SimpleNamespace(settle_s=0.0, call_timeout_s=60.0)
        operations = Operations(ledger, run, 1, Instant(), options, None, driver)
        claims = [Claim(str(n), (), b"") for n in range(320)]
        how = How(lambda _: len(ledger.open_operations(run)))
        effects = Effects(operations, 1, how, deque(claims))
        effects._size = effects._most
        effects.make_all()
        assert max(claim.result for claim in claims) == 2 * 64
        assert levels == [2] * 5 + [1] * (len(levels) - 5)
        assert len(levels) <= 8


def test_a_key_counts_as_called_in_the_batch_that_called_it_and_is_done_in_any_other(
    tmp_path: Path,
) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        driver: Any = Door()
        options: Any = SimpleNamespace(settle_s=0.0, call_timeout_s=60.0)
        operations = Operations(ledger, opened(ledger), 1, Host(), options, None, driver)
        met = [operations.perform(n, [("key", ())], How(str))[0].counts_as for n in (1, 1, 2)]
        assert met == ["called", "called", "already done"]
        assert "'key'" in driver.said


def test_what_was_only_told_is_synced_once_and_nothing_is_told_for_nothing(tmp_path: Path) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run, driver = opened(ledger), cast("Any", Door())
        options: Any = SimpleNamespace(settle_s=0.0)
        operations = Operations(ledger, run, 1, Host(), options, None, driver)
        claim, levels = Claim("key", (), b""), commits_of(ledger)
        operations.tell([], [claim], number=1)
        assert (operations.sync(), levels) == (claim.id, [2])
        operations.tell([Told(claim.id, CONFIRMED)])
        assert [operations.sync(), operations.sync(), levels] == [claim.id, claim.id, [2, 1, 2]]
        operations.tell([])
        assert (operations.sync(), levels) == (claim.id, [2, 1, 2])


def test_a_key_that_has_an_outcome_or_is_claimed_is_not_claimed_by_the_ledger(
    tmp_path: Path,
) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run = opened(ledger)
        ids = ledger.operate(run, 1, [], [("done", b"1"), ("open", b"2")], number=1)
        ledger.operate(run, 1, [Told(ids["done"], CONFIRMED, "7")], [])
        before = ledger.operations_with(run.job, ["done", "open", "new"])
        for key in ("done", "open"):
            with pytest.raises(IllegalTransition, match="by somebody else meanwhile"):
                ledger.operate(run, 1, [], [("new", b""), (key, b"")], number=1)
        assert ledger.operations_with(run.job, ["done", "open", "new"]) == before


def test_an_outcome_is_never_changed_and_an_open_operation_has_no_end(tmp_path: Path) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run = opened(ledger)
        ids = ledger.operate(run, 1, [], [("done", b""), ("open", b"")], number=1)
        told = [Told(ids["done"], CONFIRMED, "7"), Told(ids["open"], None, why="cut off")]
        ledger.operate(run, 1, told, [])
        before = ledger.operations_with(run.job, ["done", "open"])
        assert (before["open"].why, before["open"].ended_at) == ("cut off", None)
        assert before["done"].ended_at
        ledger.operate(run, 1, [Told(ids["done"], FREED, None, "ann", "no")], [])
        ledger.take_up(run, 1, 9, [before["done"]])
        assert ledger.operations_with(run.job, ["done", "open"]) == before


def test_a_freed_key_that_is_claimed_again_keeps_nothing_of_its_former_claim(
    tmp_path: Path,
) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        run = opened(ledger)
        (row,) = ledger.operate(run, 1, [], [("key", b"1")], number=1, lookup="l").values()
        ledger.operate(run, 1, [Told(row, FREED, "7", "ann", "no")], [])
        assert ledger.operate(run, 1, [], [("key", b"2")], number=2, irreversible=1) == {"key": row}
        claim = ledger.operations_with(run.job, ["key"])["key"]
        assert (claim.arguments, claim.number, claim.lookup, claim.irreversible) == (
            b"2",
            2,
            None,
            1,
        )
        assert [claim.outcome, claim.receipt, claim.ended_at, claim.who, claim.why] == [None] * 5


def test_an_operation_that_an_older_run_left_open_belongs_to_the_commit_that_met_it(
    tmp_path: Path,
) -> None:
    with closing(open_ledger(tmp_path / "ledger.db", Host(), create=True)) as ledger:
        older = opened(ledger)
        ledger.operate(older, 1, [], [("key", b"")], number=7)
        ledger.cancel(older, "ann", "enough")
        run = opened(ledger, run_id="r2")
        left = ledger.operations_with(older.job, ["key"])["key"]
        ledger.take_up(run, 1, 3, [left])
        met = ledger.operations_with(older.job, ["key"])["key"]
        assert (met.run, met.generation, met.number) == (run.key, 1, 3)


def test_a_ledger_that_lost_operations_is_refused_and_says_which(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = Shop(tmp_path / "shop", server, "lookup")
    assert run(nurse, shop, "run", "push", "--batches", "1") == 75
    stands = shop.latest()
    with closing(apsw.Connection(str(shop.folder / "state/ledger.db"))) as ledger:
        ledger.execute("DELETE FROM operation WHERE id > 2")
    assert run(nurse, shop, "resume") == 13
    assert (
        f"Run {stands.id} of push cannot go on: the ledger is behind the operations that the"
        " checkpoint names." in said(shop)
    )
    lost = "operations 3 to 6, whose keys nothing keeps from being called again"
    assert lost in said(shop)
    assert run(nurse, shop, "repair", "--apply") in (0, 3), said(shop)
    assert run(nurse, shop, "resume") == 0, said(shop)
    ids = [row.id for row in shop.operations().values()]
    assert sorted(ids) == [1, 2, 7, 8, 9, 10, 11, 12]


def test_an_answer_is_refused_while_the_run_is_going_on_and_when_there_is_one(
    nurse: Nursery, server: Outside, tmp_path: Path
) -> None:
    shop = unknown_shop(nurse, server, tmp_path)
    row = shop.operations()["push/0"]
    with closing(shop.ledger()) as ledger:
        ledger.answer(row, Told(row.id, CONFIRMED, "1", who="ann", why="seen"), "root")
        with pytest.raises(IllegalTransition, match="'push/0' has its outcome already"):
            ledger.answer(row, Told(row.id, FREED, who="ann", why="no"), "root")
        (event,) = ledger.events(ledger.latest("push"), what="operation %")
        assert (event.who, event.what, event.why) == ("root", "operation confirmed: push/0", "seen")
    with closing(apsw.Connection(str(shop.folder / "state/ledger.db"))) as raw:
        raw.execute("UPDATE run SET state = 'reserved'")
    with closing(shop.ledger()) as ledger, pytest.raises(Busy, match="finds out by itself"):
        ledger.answer(row, Told(row.id, FREED, who="ann", why="no"), "root")
