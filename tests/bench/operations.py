"""What operations cost: ratios against the raw loop, measured in the same run.

    python tests/bench/operations.py [--keys 5000] [--known 1000000]

once_each and once with an instant call, against what SQLite alone takes for the same rows in the
same transactions, and against one fdatasync a claim (no claim is made without one); calls of 20 ms
with 8 workers against the ideal; and how long it takes to learn that a batch of known keys is
recorded. Nothing here asserts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import batchrun  # noqa: E402 - the clone's own file, whatever is installed

JOB = """
import time
from dataclasses import dataclass
from batchrun import job


@dataclass(frozen=True)
class Settings:
    keys: int
    sleep_s: float = 0.0
    once: bool = False
    first: int = 0


@job(settings=Settings)
def push(ctx):
    s = ctx.settings
    def call(key, record):
        if s.sleep_s:
            time.sleep(s.sleep_s)
        return {"id": record}
    records = list(range(s.first, s.first + s.keys))
    for batch in ctx.batches(records, name="main", size=s.keys):
        began, used = time.perf_counter(), time.process_time()
        if s.once:
            for record in batch:
                ctx.once(f"push/{record}", call, record)
        else:
            ctx.once_each(batch, idempotency_key=lambda record: f"push/{record}", call=call)
        print("took", time.perf_counter() - began, time.process_time() - used, flush=True)
        yield batch
"""
CONFIG = 'min_free = "1MB"\n[jobs.push]\nkeys = {keys}\n'
LAUNCH = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from batchrun import main; main()"


def took_s(folder: Path, **settings: object) -> tuple[float, float]:
    """Run the job and return what it measured: seconds in all, and of CPU."""
    words = [
        word
        for name, value in settings.items()
        for word in ("--set", f"{name}={str(value).lower()}")
    ]
    command = [sys.executable, "-P", "-c", LAUNCH, "run", "push", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    logs = sorted((folder / "state/logs/push").iterdir(), key=lambda path: path.stat().st_mtime)
    wall, cpu = logs[-1].read_text().partition("took ")[2].split()[:2]
    return float(wall), float(cpu)


def synced_s(folder: Path, times: int) -> float:
    """Return how long so many writes take that each wait for the disk."""
    place = os.open(folder / "raw", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(place, bytes(512 * times))
    os.fsync(place)
    os.lseek(place, 0, os.SEEK_SET)
    began = time.perf_counter()
    for _ in range(times):
        os.write(place, bytes(512))
        os.fdatasync(place)
    os.close(place)
    return time.perf_counter() - began


def bare_s(folder: Path, keys: int, at_once: int) -> tuple[float, float]:
    """Return how long SQLite alone takes for as many claims and outcomes: in all, and of CPU."""
    ledger = batchrun.open_ledger(folder / "state/ledger.db", batchrun.Host(), create=False)
    run, connection, at = ledger.latest("push"), ledger._connection, batchrun.Host().now()
    assert run is not None
    began, used = time.perf_counter(), time.process_time()
    for first in range(0, keys, at_once):
        names = [f"bare/{at_once}/{n}" for n in range(first, min(first + at_once, keys))]
        of_all = {"job": run.job, "run": run.key, "generation": 1, "number": 1, "now": at}
        of_all |= {"lookup": None, "irreversible": 0}
        claims = json.dumps([(name, bytes(32).hex()) for name in names])
        connection.execute("PRAGMA synchronous = FULL; BEGIN IMMEDIATE")
        ids = connection.execute(batchrun.CLAIM, {**of_all, "claims": claims}).fetchall()
        connection.execute("COMMIT; PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE")
        told = [(row, "done", '{"id": 1}', None, None, at) for _, row in ids]
        connection.executemany(batchrun.OUTCOME, told)
        connection.execute("COMMIT")
    took = time.perf_counter() - began, time.process_time() - used
    ledger.close()
    return took


def fill(folder: Path, known: int) -> None:
    """Record so many operations as done."""
    ledger = batchrun.open_ledger(folder / "state/ledger.db", batchrun.Host(), create=False)
    run = ledger.latest("push")
    assert run is not None
    digests = (batchrun.digest_of("", (n,)) for n in range(known))
    rows = (
        (f"push/{n}", digest, run.job, run.key, json.dumps({"id": n}))
        for n, digest in enumerate(digests)
    )
    connection = ledger._connection
    with connection:
        connection.executemany(
            "INSERT INTO operation (key, arguments, job, run, generation, number, claimed_at,"
            " outcome, receipt, ended_at) VALUES (?, ?, ?, ?, 1, 0, '2026-01-31T12:00:00.000Z',"
            " 'done', ?, '2026-01-31T12:00:00.000Z') ON CONFLICT DO NOTHING",
            rows,
        )
    ledger.close()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="What operations cost")
    parser.add_argument("--keys", type=int, default=5000)
    parser.add_argument("--known", type=int, default=1_000_000)
    asked = parser.parse_args()
    keys = asked.keys
    with tempfile.TemporaryDirectory(dir=ROOT / ".tmp", prefix="bench-") as made:
        folder = Path(made)
        (folder / "jobs").mkdir(mode=0o700)
        for name, text in (("batchrun.toml", CONFIG.format(keys=keys)), ("jobs/push.py", JOB)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)
        synced = synced_s(folder, keys)
        each, once = (took_s(folder, first=n, once=n > 1) for n in (1, 10_000_001))
        (slow, _), ideal = took_s(folder, first=20_000_001, sleep_s=0.02), keys * 0.02 / 8
        bare, bare_once = (bare_s(folder, keys, at_once) for at_once in (batchrun.SLICE, 1))
        fill(folder, asked.known)
        again = took_s(folder, first=asked.known // 2)
    alone = "  the same rows by SQLite alone"
    for name, (wall, cpu), beside in (
        (f"once_each, {keys:,} instant calls", each, "60 are wanted"),
        (alone, bare, f"{each[1] / bare[1]:.2f} times its CPU is taken"),
        (f"once, {keys:,}", once, "400 are wanted"),
        (alone, bare_once, f"{once[1] / bare_once[1]:.2f} times its CPU is taken"),
        (f"{keys:,} of {asked.known:,} known", again, "50 are wanted"),
    ):
        print(f"{name:36}{wall * 1000:8.0f} ms, CPU {cpu * 1000:6.0f} ms ({beside})")
    print(f"once: {once[0] / synced:.2f} times one fdatasync a claim, {synced * 1000:.0f} ms")
    print(f"20 ms calls: {slow:.2f} s, {slow / ideal:.3f} times the ideal (1.15 is wanted)")


if __name__ == "__main__":
    main()
