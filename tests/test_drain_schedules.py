"""Random schedules of starts, barriers, kills, freezes and drains, against a small model.

Each schedule is made from its seed, with real processes and a job of eight tiny batches. The model
knows what a command may end with, who may own, and that nothing moves behind a drain that ended
well; in the end every record is in the target exactly once. BATCHRUN_TEST_SEED runs one again.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import ROOT, clean_environment, wait_for

from batchrun import Barrier, Host, open_ledger

LONG = bool(os.environ.get("BATCHRUN_TEST_LONG"))
SEED = os.environ.get("BATCHRUN_TEST_SEED")
COUNT, LIMIT_S = (1000, 7200.0) if LONG else (40, 18.0)

# A process that has batchrun imported: it forks what it is asked to start, and says how it ended.
STARTER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import batchrun, click, filelock, subprocess
for line in sys.stdin:
    verb, *rest = json.loads(line)
    if verb == "start":
        folder, words = rest
        answer = os.fork()
        if answer == 0:
            os.setsid()
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDONLY)
            log = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for place, descriptor in enumerate((null, log, log)):
                os.dup2(descriptor, place)
            sys.argv = ["batchrun", *words]
            print("$", *words, file=sys.stderr, flush=True)
            batchrun.main()
    else:
        pid, code = os.waitpid(rest[0], os.WNOHANG if verb == "poll" else 0)
        answer = os.waitstatus_to_exitcode(code) if pid else None
    print(json.dumps(answer), flush=True)
"""

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 1
stop_grace = "200ms"
max_tries = 100
retry_first_wait = "10ms"
retry_max_wait = "20ms"
[jobs.sync]
"""

JOB = """\
import time
from batchrun import job

@job
def sync(ctx):
    target = ctx.connect("sqlite:stock.db")
    table = "CREATE TABLE IF NOT EXISTS done (record INTEGER NOT NULL)"
    ctx.step("make table", lambda rows: rows.execute(table) and None, target=target)
    for batch in ctx.batches(list(range(8)), target=target):
        time.sleep(0.04)
        with batch.transaction() as rows:
            rows.executemany("INSERT INTO done VALUES (?)", [(n,) for n in batch])
        yield batch
"""

GOES_ON = {0, 4, 11, 12, 75, -signal.SIGKILL}  # what a start may end with while all else happens


@dataclass
class Starter:
    """Starts batchruns in a folder, without the time that an interpreter takes."""

    process: subprocess.Popen[str]

    def ask(self, *words: object) -> Any:  # noqa: ANN401 - a pid, a code or nothing
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    with process:
        yield Starter(process)


@dataclass
class Shop:
    """One project under a schedule, and what the model knows of it."""

    folder: Path
    starter: Starter
    random: random.Random
    closed: bool = False  # whether maintenance is on
    still: list[Any] | None = None  # what a drain that ended well left: nothing may move
    frozen: set[int] = field(default_factory=set)  # pids
    going: list[int] = field(default_factory=list)  # pids of starts that were not waited for
    told: list[str] = field(default_factory=list)  # what was done, and how it ended

    # -- what is there -------------------------------------------------------------------------

    def rows(self, sql: str, name: str = "state/ledger.db") -> list[Any]:
        if not (self.folder / name).exists():
            return []
        connection = apsw.Connection(str(self.folder / name), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(500)
        try:
            return list(connection.execute(sql))
        except apsw.SQLError:  # the target has no table yet
            return []
        finally:
            connection.close()

    def owners(self) -> dict[str, int]:
        """Return the living owners of the newest attempt that is recorded."""
        sql = "SELECT supervisor, worker FROM attempt ORDER BY run DESC, generation DESC LIMIT 1"
        found: dict[str, int] = {}
        for texts in self.rows(sql):
            for name, text in zip(("supervisor", "worker"), texts, strict=True):
                if text and (pid := json.loads(text)["pid"]) and is_alive(pid):
                    found[name] = pid
        return found

    def is_locked(self) -> bool:
        path = self.folder / "state/locks/sync.lock"
        if not path.exists():
            return False
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def written(self) -> list[Any]:
        """Return all that an owner writes: its runs, commits, and the target."""
        runs = self.rows("SELECT id, state, number, generation FROM run WHERE state <> 'waiting'")
        commits = self.rows("SELECT run, number, hash FROM batch ORDER BY run, number")
        return [runs, commits, self.rows("SELECT record FROM done", "stock.db")]

    # -- what is done --------------------------------------------------------------------------

    def call(self, *words: str) -> int:
        """Run a command to its end."""
        code = int(self.starter.ask("wait", self.starter.ask("start", str(self.folder), words)))
        self.told.append(f"{' '.join(words)}: {code}")
        return code

    def begin(self, *words: str) -> None:
        """Start a job; behind a barrier it ends at once, and says so."""
        if not self.closed:
            self.told.append(f"{' '.join(words)} ...")
            self.going.append(self.starter.ask("start", str(self.folder), words))
            return
        code = self.call(*words)
        if "--all" in words:
            assert code == 0
        elif "defer" in words:
            assert code in (75, 11)
        else:
            assert code == 12 or (code == 0 and words[0] == "resume") or code == 4

    def start(self) -> None:
        self.begin("run", "sync")

    def start_or_defer(self) -> None:
        self.begin("run", "sync", "--when-blocked", "defer")

    def resume(self) -> None:
        self.begin("resume", "sync")

    def tick(self) -> None:
        self.begin("resume", "--all")

    def close(self) -> None:
        code = self.call("maintenance", "on")
        assert code == (12 if self.closed else 0)
        self.closed = True

    def open(self) -> None:
        if self.still is not None:
            assert self.written() == self.still, "something was written behind a drain"
        code = self.call("maintenance", "off")
        assert code == 0
        self.closed, self.still = False, None

    def kill(self) -> None:
        which = self.random.choice((("supervisor",), ("worker",), ("supervisor", "worker")))
        owners = self.owners()
        for name in which:
            if name in owners:
                self.told.append(f"kill {name}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(owners[name], signal.SIGKILL)
                self.frozen.discard(owners[name])

    def freeze(self) -> None:
        for name, pid in self.owners().items():
            if self.random.random() < 0.5:
                self.told.append(f"freeze {name}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                self.frozen.add(pid)
        if self.is_writing():  # nobody could do anything until it goes on
            self.thaw()

    def is_writing(self) -> bool:
        """Tell whether one of the frozen holds the ledger's write lock."""
        try:
            self.rows("BEGIN IMMEDIATE")
        except apsw.BusyError:
            return True
        return False

    def thaw(self) -> None:
        self.told.append("continue")
        for pid in self.frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.frozen.clear()

    def wait(self) -> None:
        time.sleep(
            self.random.random() * 0.25
        )  # the schedule's own time; nothing is expected of it

    def drain(self) -> None:
        deadline = self.random.choice(("0", "50ms", "5s"))
        ways = [["--finish"], ["--then", "interrupt"], []]
        frozen = {pid for pid in self.frozen if is_alive(pid)}
        if frozen:
            deadline = "50ms"
        words = self.random.choice(ways)
        code = self.call("drain", "--deadline", deadline, *words)
        self.closed = True
        if code == 0:
            wait_for(lambda: not self.is_locked(), "a start to be refused that had the lock")
            assert self.owners().keys() <= {"supervisor"}, "a worker of a drained job lives"
            self.still = self.still or self.written()
        else:
            assert code in (11, 13)
            assert self.still is None, "a drained state is drained no more"
            assert code == 13 or deadline != "5s"
        self.require_sums()

    # -- what holds ----------------------------------------------------------------------------

    def require_sums(self) -> None:
        assert self.call("report", "drain") == 0

    def require_fences(self) -> None:
        """Require that nothing was admitted behind any barrier."""
        ledger = open_ledger(self.folder / "state/ledger.db", Host(), create=False)
        try:
            barriers = ledger._all(Barrier, "ORDER BY id")
            assert [row for each in barriers for row in ledger.admitted_behind(each)] == []
        finally:
            ledger.close()

    def finish(self) -> None:
        """Let everything go on to its end: every record of every run is there once."""
        self.thaw()
        self.open()
        for pid in self.going:
            code = self.starter.ask("wait", pid)
            assert code in GOES_ON, f"a start ended with {code}"
        wait_for(lambda: not self.is_locked(), "the last owner to leave")
        unfinished = "SELECT 1 FROM run WHERE state NOT IN ('succeeded', 'cancelled')"
        if not self.rows(unfinished) or self.random.random() < 0.5:
            assert self.call("run", "sync") == 0
        else:
            assert self.call("resume", "--all") == 0
        assert not self.rows(unfinished)
        self.require_fences()
        runs = len(self.rows("SELECT 1 FROM run"))
        done = sorted(n for (n,) in self.rows("SELECT record FROM done", "stock.db"))
        assert done == sorted([*range(8)] * runs)


ACTIONS = (
    *(Shop.start,) * 3,
    Shop.start_or_defer,
    Shop.resume,
    *(Shop.tick,) * 2,
    *(Shop.close,) * 2,
    *(Shop.open,) * 3,
    *(Shop.kill,) * 3,
    *(Shop.freeze,) * 2,
    Shop.thaw,
    Shop.wait,
    *(Shop.drain,) * 4,
)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run_schedule(folder: Path, starter: Starter, seed: int) -> list[str]:
    """Run the schedule of a seed; return what was done."""
    (folder / "jobs").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    for name, text in (("batchrun.toml", CONFIG), ("jobs/sync.py", JOB)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    chosen = random.Random(seed)  # noqa: S311 - the same schedule again, not a secret
    shop = Shop(folder, starter, chosen)
    try:
        shop.start()
        wait_for(lambda: shop.rows("SELECT 1 FROM run"), "the first run")
        shop.wait()
        for _ in range(chosen.randint(5, 12)):
            chosen.choice(ACTIONS)(shop)
        shop.finish()
    except BaseException:
        print(f"seed {seed}:", *shop.told, (folder / "output.txt").read_text(), sep="\n")
        shop.thaw()
        for pid in {*shop.going, *shop.owners().values()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    return shop.told


def test_random_schedules_keep_the_rules(tmp_path: Path, starter: Starter) -> None:
    until, ends = time.monotonic() + LIMIT_S, list[str]()
    first = int(os.environ.get("BATCHRUN_TEST_FIRST_SEED", "0"))
    for seed in [int(SEED)] if SEED else range(first, first + COUNT):
        if time.monotonic() > until:
            break
        ends += run_schedule(tmp_path / str(seed), starter, seed)
    drains = {end.rpartition(": ")[2] for end in ends if end.startswith("drain")}
    print(f"{len(ends)} actions; drains ended with {sorted(drains)}")
    assert SEED or "0" in drains
