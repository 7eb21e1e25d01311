"""Killed at every named point of the protocol, and at random, a run still does everything once.

One job does both kinds of work: a step and a loop with a transactional target, where nothing may
happen twice, and a loop whose effect is a line in a file, where at most one batch may be repeated.
The former reads ahead, so that its batches are committed in a thread beside; the latter does not.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import apsw
import pytest
from conftest import ROOT, clean_environment, wait_for

from batchrun import CheckpointStore, Host, check, open_ledger, parse_checkpoint

# A process that has batchrun imported, and forks a supervisor for each line that it is sent: the
# supervisor's own start, which is not what is tested here, costs nothing then. The worker is
# executed as always. Answers: the supervisor's pid, and after its end its exit code.
NURSERY = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import batchrun, click, filelock, subprocess
for line in sys.stdin:
    folder, point, words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        batchrun.NAMED_POINT = os.environ["BATCHRUN_TEST_POINT"] = point
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for place, descriptor in enumerate((null, output, output)):
            os.dup2(descriptor, place)
        sys.argv = ["batchrun", *words]
        batchrun.main()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

CONFIG = """\
min_free = "1MB"
[defaults]
retry_for = "0"
on_exhausted = "fail"
batch_size = 10
[jobs.sync]
records = {records}
"""

JOB = '''\
import os
from dataclasses import dataclass
from batchrun import Query, job

NUMBERS = """WITH RECURSIVE number(record) AS (
    SELECT 1 UNION ALL SELECT record + 1 FROM number WHERE record < ?
) SELECT record FROM number"""

@dataclass(frozen=True)
class Settings:
    records: int

@job(settings=Settings)
def sync(ctx):
    records = list(range(1, ctx.settings.records + 1))
    stock = ctx.connect("sqlite:stock.db")
    effects = os.open("effects.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ctx.on_exit(os.close, effects)
    table = "CREATE TABLE stock (record INTEGER NOT NULL)"
    ctx.step("make table", lambda rows: rows.execute(table) and None, target=stock)
    numbers = Query(stock, NUMBERS, key="record", parameters=[ctx.settings.records])
    for batch in ctx.batches(numbers, name="stock", target=stock):
        with batch.transaction() as rows:
            rows.executemany("INSERT INTO stock VALUES (?)", batch.records)
        yield batch
    for batch in ctx.batches(records, name="effects"):
        for record in batch:
            os.write(effects, f"{record}\\n".encode())
        yield batch
'''

# Commits of a run of 30 records: 1 the step, 2 to 4 and 6 to 8 the batches, 5 and 9 loop ends.
RECORDS, BATCH, COMMITS = 30, 10, 9
ALL = range(1, COMMITS + 1)
BATCHES = [2, 3, 4, 6, 7, 8]
NUMBERED_POINTS = {
    "batch.handed_out": BATCHES,
    "batch.yielded": BATCHES,
    "target.commit": [1, 2, 3, 4],
    "target.committed": [1, 2, 3, 4],
    "commit.begun": ALL,
    "commit.prepared": ALL,
    "ledger.begun": ALL,
    "checkpoint.rename": ALL,
    "checkpoint.fsync": ALL,
    "ledger.commit": ALL,
    "ledger.committed": ALL,
}
# Points behind which the commit can be found again: there is no second time for the same number.
DURABLE = (
    "batch.yielded",
    "target.committed",
    "checkpoint.fsync",
    "ledger.commit",
    "ledger.committed",
)
VICTIMS = {"kill": "worker", "kill-supervisor": "supervisor", "kill-both": "both"}
SUPERVISOR_POINTS = ("admit.judged", "admit.commit", "admit.committed", "worker.started")

STORM_KILLS = int(os.environ.get("BATCHRUN_STORM_KILLS", "300"))
STORM_SEED = os.environ.get("BATCHRUN_STORM_SEED") or str(random.SystemRandom().randrange(10**9))


@dataclass
class Nursery:
    """Starts batchrun again and again, one process at a time."""

    process: subprocess.Popen[str]

    def start(self, folder: Path, words: list[str], point: str = "") -> int:
        """Start `batchrun WORDS` in a folder; return its pid."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), point, words]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> int:
        """Return the exit code of what was started, when it has ended."""
        return self._answer()

    def run(self, folder: Path, words: list[str], point: str = "") -> int:
        """Start, wait, return the exit code."""
        self.start(folder, words, point)
        return self.end()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery that is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    with process:
        yield Nursery(process)


def make_shop(folder: Path, records: int = RECORDS) -> Path:
    """Make a project folder with the job of both kinds."""
    (folder / "jobs").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    for name, text in (
        ("batchrun.toml", CONFIG.format(records=records)),
        ("jobs/sync.py", JOB),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    return folder


def query(path: Path, sql: str) -> list[tuple[object, ...]]:
    """Return rows of a database to which at most an orphaned worker still writes."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(10_000)  # else a busy ledger looks like one without a run
    try:
        return list(connection.execute(sql))
    finally:
        connection.close()


def committed(folder: Path) -> int:
    """Return the newest commit of the unfinished run: the checkpoint's number."""
    numbers = [
        parse_checkpoint(path.read_bytes())[0].number
        for path in (folder / "state" / "checkpoints" / "sync").glob("*.json")
    ]
    return max(numbers, default=0)


def require_sound(folder: Path, records: int = RECORDS) -> None:
    """Check what must hold after every series of kills, once the run has succeeded."""
    said = (folder / "output.txt").read_text()
    ledger = open_ledger(folder / "state" / "ledger.db", Host(), create=False)
    run = ledger.latest("sync")
    assert run is not None
    assert (run.state, run.read, run.batches) == ("succeeded", 2 * records, 2 * records // BATCH)
    assert run.number == run.batches + 3, said
    found = [ledger.commit_row(run, number) for number in range(1, run.number + 1)]
    rows = [row for row in found if row is not None]
    assert [row.number for row in rows] == list(range(1, run.number + 1))
    assert sum(row.read for row in rows) == run.read
    assert len(query(folder / "state" / "ledger.db", "SELECT id FROM run")) == 1
    store = CheckpointStore(folder / "state" / "checkpoints" / "sync")
    content = store.read(run.id)
    assert content == run.checkpoint, "the checkpoint and the ledger's copy of it differ"
    assert content is not None
    assert parse_checkpoint(content)[1] == run.hash == rows[-1].hash
    assert list(check(ledger, lambda _: store, ["sync"])) == []
    ledger.close()
    assert list(store.folder.glob(".*")) == [], "temporary files were left"

    once = [(record,) for record in range(1, records + 1)]
    assert query(folder / "stock.db", "SELECT record FROM stock ORDER BY record") == once
    effects = list(map(int, (folder / "effects.txt").read_text().split()))
    assert set(effects) == set(range(1, records + 1))
    for before, after in zip([0, *effects], effects, strict=False):
        first_of_batch = (before - 1) // BATCH * BATCH + 1
        assert after in (before + 1, first_of_batch), f"{before}, then {after}: {said}"


def killed_at_each_number(start: Nursery, folder: Path, point: str, turn: int) -> list[str]:
    """Kill one run at each number of a point, every victim in turn; return what was killed."""
    make_shop(folder)
    actions, done = list(VICTIMS), list[str]()
    for number in NUMBERED_POINTS[point]:
        action = actions[(number + turn) % 3]
        twice = turn == number % 3 and action != "kill-supervisor" and point not in DURABLE
        for time_ in range(1 + twice):
            code = start.run(folder, ["run", "sync"], f"{point}@{number}={action}")
            expected = 1 if action == "kill" else -signal.SIGKILL
            said = (folder / "output.txt").read_text()
            assert code == expected, f"{point}@{number}={action}: exit {code}, time {time_}: {said}"
            done.append(f"{point}@{number} {VICTIMS[action]} {'again' if time_ else 'once'}")
    code = start.run(folder, ["resume", "sync"])
    assert code == 0, (folder / "output.txt").read_text()
    require_sound(folder)
    return done


def killed_in_the_supervisor(start: Nursery, folder: Path, point: str, times: int) -> list[str]:
    """Kill a supervisor at a point of its own, when a run begins and when it goes on."""
    make_shop(folder)
    done = []
    for when, setting in (("beginning", ""), ("going on", "commit.prepared@6=kill")):
        for _ in range(times):
            code = start.run(folder, ["run", "sync"], f"{point}=kill")
            assert code == -signal.SIGKILL, (folder / "output.txt").read_text()
            done.append(f"{point} supervisor, {when}")
        if setting:
            continue
        assert start.run(folder, ["run", "sync"], "commit.prepared@6=kill") in (1, 75)
    assert start.run(folder, ["run", "sync"]) == 0, (folder / "output.txt").read_text()
    require_sound(folder)
    return done


def killed_after_its_ending(start: Nursery, folder: Path, action: str, times: int) -> list[str]:
    """Kill when the ending is recorded and the run's edge is not made yet."""
    make_shop(folder)
    start.run(folder, ["run", "sync"], f"worker.ended={action}")
    for _ in range(times - 1):
        start.run(folder, ["resume", "sync"], "admit.commit=kill")
    assert start.run(folder, ["resume", "sync"]) == 0, (folder / "output.txt").read_text()
    require_sound(folder)
    return [f"worker.ended {VICTIMS[action]}"] * times


def all_cases() -> list[Callable[[Nursery, Path], list[str]]]:
    """Return the whole table: a run each."""
    numbered = [
        partial(killed_at_each_number, point=point, turn=turn)
        for point in NUMBERED_POINTS
        for turn in range(3)
    ]
    begun = [
        partial(killed_in_the_supervisor, point=point, times=times)
        for point in SUPERVISOR_POINTS
        for times in (1, 2)
    ]
    ended = [
        partial(killed_after_its_ending, action=action, times=times)
        for action in VICTIMS
        for times in (1, 2)
    ]
    return [*numbered, *begun, *ended]


@pytest.mark.slow
def test_a_run_killed_at_every_point_of_the_protocol_does_everything_once(tmp_path: Path) -> None:
    cases = list(enumerate(all_cases()))

    def half(first: int) -> list[str]:
        with nursery() as start:
            results = (case(start, tmp_path / str(number)) for number, case in cases[first::2])
            return [killed for names in results for killed in names]

    with ThreadPoolExecutor(2) as pool:
        killed = [name for names in pool.map(half, range(2)) for name in names]
    print(f"crash table: {len(set(killed))} combinations, {len(killed)} kills, {len(cases)} runs")
    numbers = sum(map(len, NUMBERED_POINTS.values()))
    assert len(set(killed)) >= 3 * numbers, "each point, each commit, each victim"


def children(pid: int) -> list[int]:
    """Return the living children of a process."""
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def kill_at_random(start: Nursery, folder: Path, chance: random.Random) -> int:
    """Start once and kill somebody at a random instant; return how many kills hit somebody."""
    supervisor = start.start(folder, [verb(folder), "sync"])
    time.sleep(chance.uniform(0, 0.35))  # the instant is what is random here
    victim, hits = chance.choice(["worker", "supervisor", "both"]), 0
    below = children(supervisor)
    pids = {"worker": below, "supervisor": [supervisor], "both": [supervisor, *below]}[victim]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hits = 1
    code = start.end()
    assert code in (0, 1, -signal.SIGKILL), (folder / "output.txt").read_text()
    return hits


def verb(folder: Path) -> str:
    """Return `run` for the first start, then `resume`: a run that is over begins no other."""
    path = folder / "state" / "ledger.db"
    with suppress(apsw.Error):
        return "resume" if query(path, "SELECT id FROM run") else "run"
    return "run"


def is_over(folder: Path) -> bool:
    """Tell whether the one run of a folder has succeeded."""
    with suppress(apsw.Error):
        path = folder / "state" / "ledger.db"
        return query(path, "SELECT id FROM run WHERE state = 'succeeded'") != []
    return False


def storm(folder: Path, seed: str, kills: int) -> tuple[int, int]:
    """Kill at random until enough was killed; return the number of kills and of runs."""
    chance, done, runs, records = random.Random(seed), 0, 0, 400  # noqa: S311 - no secret
    with nursery() as start:
        while done < kills:
            shop = make_shop(folder / str(runs), records)
            while done < kills and not is_over(shop):
                done += kill_at_random(start, shop, chance)
            if not is_over(shop):
                code = start.run(shop, [verb(shop), "sync"])
                assert code == 0, (shop / "output.txt").read_text()
            wait_for(lambda shop=shop: is_over(shop), "the end of the run")  # type: ignore[misc]
            require_sound(shop, records)
            runs += 1
    return done, runs


@pytest.mark.slow
def test_a_storm_of_kills_at_random_instants_loses_and_repeats_nothing(tmp_path: Path) -> None:
    print(f"storm: BATCHRUN_STORM_SEED={STORM_SEED} BATCHRUN_STORM_KILLS={STORM_KILLS}")
    began = time.monotonic()

    def half(number: int) -> tuple[int, int]:
        return storm(tmp_path / str(number), f"{STORM_SEED}/{number}", (STORM_KILLS + 1) // 2)

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(half, range(2)))
    kills, runs = map(sum, zip(*halves, strict=True))
    print(f"storm: {kills} kills in {runs} runs, {time.monotonic() - began:.0f} s")
    assert kills >= STORM_KILLS
