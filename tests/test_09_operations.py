"""Operations: effects in the outside world happen once, whatever is killed when."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import Ended, Project, wait_for
from outside import CLIENT, KINDS, Outside, outside
from test_crash_table import Nursery, nursery, query

from batchrun import (
    CONFIRMED,
    FREED,
    Host,
    JobError,
    Ledger,
    Operation,
    Told,
    digest_of,
    interval_of,
    lookup_name,
    open_ledger,
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
                said = (CONFIRMED, '{"by": "hand"}') if done else (FREED, None)
                ledger.answer(row, Told(row.id, *said, who="ann", why="looked"), "ann")


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
