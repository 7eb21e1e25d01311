"""One owner at a time: of a herd one wins; an owner that was overtaken writes nothing anywhere."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from conftest import ROOT, Project, clean_environment, wait_for
from test_11_worker import CONFIG, at, rows, run_row, worker_of
from test_12_supervisor import all_state, is_stopped

LONG = bool(os.environ.get("BATCHRUN_TEST_LONG"))
ROUNDS = 50 if LONG else 2
HERD = 16

# Ten records in two batches, into a target; with the file `held` there the first batch waits.
JOB = """\
import time
from pathlib import Path
from batchrun import job

@job
def sync(ctx):
    stock = ctx.connect("sqlite:stock.db")
    table = "CREATE TABLE IF NOT EXISTS stock (record INTEGER NOT NULL, generation INTEGER)"
    ctx.step("make table", lambda rows: rows.execute(table) and None, target=stock)
    for batch in ctx.batches(list(range(1, 11)), target=stock):
        while Path("held").exists():
            time.sleep(0.005)
        with batch.transaction() as rows:
            values = [(record, ctx.generation) for record in batch]
            rows.executemany("INSERT INTO stock VALUES (?, ?)", values)
        yield batch
"""


@pytest.fixture
def shop(project: Project) -> Project:
    project.write(CONFIG, sync=JOB)
    return project


def target(project: Project, sql: str) -> list[tuple[object, ...]]:
    connection = apsw.Connection(str(project.folder / "stock.db"))
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


def everywhere(project: Project) -> tuple[object, ...]:
    """Return all that an owner could have written: ledger, checkpoint, target and its marks."""
    tables = ("stock", "batchrun_mark")
    return all_state(project), [target(project, f"SELECT * FROM {table}") for table in tables]


def records(project: Project) -> list[object]:
    return [record for (record,) in target(project, "SELECT record FROM stock ORDER BY record")]


# --- overtaken ----------------------------------------------------------------------------------


def hold_at(shop: Project, point: str) -> tuple[subprocess.Popen[str], int]:
    """Start a run and return when its worker is stopped at a point; the lock file is replaced."""
    process = shop.start("run", "sync", env=at(f"{point}=stop"))
    worker = worker_of(process)
    wait_for(lambda: is_stopped(worker), "the first owner to stop")
    lock = shop.state / "locks" / "sync.lock"
    lock.unlink()
    lock.touch(0o600)
    return process, worker


# Commit 1 is the step, 2 and 3 are the batches.
@pytest.mark.parametrize(
    "point",
    [
        *("batch.handed_out@3", "target.committed@3", "batch.yielded@3"),
        *("commit.begun@3", "commit.prepared@3", "ledger.committed@3"),
    ],
)
def test_an_owner_that_was_overtaken_writes_nothing_anywhere(shop: Project, point: str) -> None:
    process, worker = hold_at(shop, point)
    assert shop.run("run", "sync").code == 0, "the second owner comes in and ends the run"
    before = everywhere(shop)
    os.kill(worker, signal.SIGCONT)
    ended = shop.finish(process)
    assert ended.code == 14
    assert ended.err.startswith("Lost ownership of run ")
    assert everywhere(shop) == before
    assert records(shop) == list(range(1, 11))


def test_a_second_owner_waits_behind_the_first_ones_open_transaction(shop: Project) -> None:
    process, worker = hold_at(shop, "target.commit@3")
    second = shop.start("run", "sync")
    claim = "SELECT count(*) FROM attempt WHERE worker IS NOT NULL"
    wait_for(lambda: rows(shop, claim) == [(2,)], "the second owner to work")
    os.kill(worker, signal.SIGCONT)
    assert shop.finish(process).code == 14
    assert shop.finish(second).code == 0
    assert records(shop) == list(range(1, 11))
    assert run_row(shop)[0] == "succeeded"
    assert target(shop, "SELECT DISTINCT generation FROM stock") == [(1,)], "rolled forward"


HELD_LOCK = ["ledger.begun@3", "checkpoint.rename@3", "checkpoint.fsync@3", "ledger.commit@3"]


@pytest.mark.skipif(not LONG, reason="each waits 10 s for the ledger (BATCHRUN_TEST_LONG=1)")
@pytest.mark.parametrize("point", HELD_LOCK)
def test_an_owner_held_under_the_write_lock_keeps_the_second_one_out(
    shop: Project, point: str
) -> None:
    process, worker = hold_at(shop, point)
    assert shop.run("run", "sync").code in (5, 11)
    assert rows(shop, "SELECT count(*) FROM attempt") == [(1,)]
    os.kill(worker, signal.SIGCONT)
    assert shop.finish(process).code == 14
    assert shop.run("run", "sync").code == 0
    assert records(shop) == list(range(1, 11))


# --- herds --------------------------------------------------------------------------------------

# A process that has batchrun imported; for each line it forks a herd that begins at one moment.
HERDER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import batchrun, click, filelock, subprocess
for line in sys.stdin:
    folder, words, count = json.loads(line)
    ready, go = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(go)
            os.chdir(folder)
            output = os.open(f"output{{number}}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for place, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
                os.dup2(descriptor, place)
            sys.argv = ["batchrun", *words]
            os.read(ready, 1)  # the end of the pipe: all begin
            batchrun.main()
        pids.append(pid)
    os.close(ready)
    os.close(go)
    for _ in pids:
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Herder:
    """Starts many batchruns at one moment, in milliseconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, folder: Path, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), words, HERD]) + "\n")
        self._process.stdin.flush()

    def code(self) -> int:
        """Return the exit code of the next one that ends."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture
def herder() -> Iterator[Herder]:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HERDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    ) as process:
        yield Herder(process)


@pytest.mark.parametrize("of", ["a new run", "an interrupted run"])
def test_of_a_herd_exactly_one_wins_every_time(shop: Project, herder: Herder, of: str) -> None:
    held = shop.folder / "held"
    words = ("run", "sync") if of == "a new run" else ("resume", "sync")
    for times in range(1, ROUNDS + 1):
        if of != "a new run":
            held.unlink(missing_ok=True)
            ended = shop.run("run", "sync", env=at("batch.handed_out@3=kill-both"))
            assert ended.code == -signal.SIGKILL
        attempts = rows(shop, "SELECT count(*) FROM attempt") if times > 1 or of[:2] == "an" else []
        held.touch()
        herder.start(shop.folder, *words)
        losers = [herder.code() for _ in range(HERD - 1)]
        held.unlink()
        assert (losers, herder.code()) == ([11] * (HERD - 1), 0)
        (count,) = rows(shop, "SELECT count(*) FROM attempt")[0]
        assert count == (attempts[0][0] if attempts else 0) + 1
        assert rows(shop, "SELECT count(*) FROM run WHERE state = 'succeeded'") == [(times,)]
        refused = rows(shop, "SELECT count(*) FROM event WHERE what = 'refused: busy'")
        assert refused == [(times * (HERD - 1),)]
    assert rows(shop, "SELECT count(*) FROM run") == [(ROUNDS,)]
    everything = sorted(list(range(1, 11)) * ROUNDS)
    assert records(shop) == everything, "each record once a run"
