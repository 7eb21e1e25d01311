"""What batchrun costs: ratios measured in one run, printed as one table.

    python tests/bench/spine.py [--records 1000000] [--runs 7]

Whole processes are timed in turn (A B A B ...), so that a machine whose speed drifts is no fault of
either; every figure is the median of the pairs. The split inside a run is what the ledger keeps:
seconds of reading, of the job's own work, and of batchrun. Nothing here asserts; a line that misses
its figure says so.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import apsw

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import batchrun  # noqa: E402 - the clone's own file, whatever is installed

PYTHON = sys.executable
LAUNCH = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from batchrun import main; main()"
BATCH = 5_000
TABLE = "sku TEXT PRIMARY KEY, name TEXT NOT NULL, quantity INTEGER, price TEXT, updated_at TEXT"
UPSERT = """INSERT INTO stock VALUES (?, ?, ?, ?, ?) ON CONFLICT (sku) DO UPDATE SET
name = excluded.name, quantity = excluded.quantity, price = excluded.price,
updated_at = excluded.updated_at"""
SELECT = "SELECT sku, name, quantity, price, updated_at FROM feed"

JOB = f"""
from dataclasses import dataclass
from batchrun import Context, Query, job

@dataclass(frozen=True)
class Settings:
    source: str
    database: str

@job(settings=Settings)
def copy(ctx: Context[Settings]):
    source = ctx.connect(ctx.settings.source)
    stock = ctx.connect(ctx.settings.database)
    for batch in ctx.batches(Query(source, {SELECT!r}, key="sku"), target=stock):
        with batch.transaction() as rows:
            rows.executemany({UPSERT!r}, batch.records)
        yield batch

@job
def first(ctx):
    import os, time
    for batch in ctx.batches(range(10_000_000), size=1):
        if "BENCH_FIRST" in os.environ:
            with open(os.environ["BENCH_FIRST"], "w") as file:
                file.write(str(time.time()))
        yield batch

@job
def empty(ctx):
    for batch in ctx.batches(range(10_000_000), size=1):
        yield batch
"""
CONFIG = """
[jobs.copy]
source = "sqlite:feed.db"
database = "sqlite:stock.db"
[jobs.empty]
uses = "copy:empty"
[jobs.first]
uses = "copy:first"
"""

# The loops that batchrun is compared with: the same reads and writes without a supervisor.
LOOP = """
import json, os, sqlite3, sys
import {library} as library
connect = {connect}
source, stock = connect("feed.db"), connect("stock.db")
stock.execute("PRAGMA synchronous = FULL")
last = ""
while True:
    sql = {select!r} + " WHERE sku > ? ORDER BY sku LIMIT 5000"
    records = source.execute(sql, (last,)).fetchall()
    if not records:
        break
    stock.execute("BEGIN IMMEDIATE")
    stock.executemany({upsert!r}, records)
    stock.execute("COMMIT")
    last = records[-1][0]
    {checkpoint}
"""
HAND_WRITTEN = """
    with open("checkpoint.tmp", "w") as file:
        json.dump({"last": last}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename("checkpoint.tmp", "checkpoint.json")
    directory = os.open(".", os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
"""
APSW_CONNECT = "library.Connection"
SQLITE_CONNECT = "lambda path: library.connect(path, isolation_level=None)"


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was measured, the median, and the figure to reach."""

    what: str
    value: float
    wanted: float
    unit: str = ""


def loop_source(library: str, connect: str, checkpoint: str = "") -> str:
    """Return the text of a loop without a supervisor."""
    return LOOP.format(
        library=library,
        connect=connect,
        select=SELECT,
        upsert=UPSERT,
        checkpoint=checkpoint.strip(),
    )


def make_shop(folder: Path, records: int) -> None:
    """Write config, job and an SQLite feed."""
    (folder / "jobs").mkdir(mode=0o700)
    (folder / "batchrun.toml").write_text(CONFIG)
    (folder / "jobs" / "copy.py").write_text(JOB)
    feed = apsw.Connection(str(folder / "feed.db"))
    feed.execute(f"CREATE TABLE feed ({TABLE})")
    rows = (
        (f"SKU-{n:08d}", f"Product number {n}", n % 997, f"{n % 9973 / 100:.2f}", "2026-01-31")
        for n in range(records)
    )
    with feed:
        feed.executemany("INSERT INTO feed VALUES (?, ?, ?, ?, ?)", rows)
    feed.close()


def empty_stock(folder: Path) -> None:
    """Make the target anew."""
    for path in folder.glob("stock.db*"):
        path.unlink()
    stock = apsw.Connection(str(folder / "stock.db"))
    stock.pragma("journal_mode", "wal")
    stock.execute(f"CREATE TABLE stock ({TABLE})")
    stock.close()


ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def timed(folder: Path, *command: str) -> float:
    """Run a command in the folder and return its wall seconds; it must end with 0, 11 or 12."""
    began = time.monotonic()
    ended = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    elapsed_s = time.monotonic() - began
    if ended.returncode not in (0, 11, 12, 75):
        sys.exit(f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return elapsed_s


def run_copy(folder: Path) -> float:
    """Run the job `copy` to its end."""
    return timed(folder, PYTHON, "-P", "-c", LAUNCH, "run", "copy")


def paired(
    runs: int, first: Callable[[], float], second: Callable[[], float], prepare: Callable[[], None]
) -> float:
    """Return the median ratio first / second over pairs taken in turn."""
    ratios = []
    for number in range(runs + 1):
        prepare()
        one = first()
        prepare()
        other = second()
        if number:  # the first pair warms up
            ratios.append(one / other)
    return statistics.median(ratios)


def split_figures(folder: Path, runs: int) -> Iterator[Figure]:
    """Yield batchrun's share inside the run: its time over that of reading and the job's work."""
    shares: dict[str, list[float]] = {"inserting": [], "updating": []}
    for _ in range(runs):
        for how, of_runs in shares.items():
            if how == "inserting":
                empty_stock(folder)
            run_copy(folder)
            report = subprocess.run(
                [PYTHON, "-P", "-c", LAUNCH, "--json", "report", "copy"],
                cwd=folder,
                capture_output=True,
                check=True,
            )
            run = json.loads(report.stdout)
            of_runs.append(100 * run["own_s"] / (run["read_s"] + run["work_s"]))
    yield Figure("batchrun's share, inserting", statistics.median(shares["inserting"]), 9, "%")
    yield Figure("batchrun's share, updating", statistics.median(shares["updating"]), 10, "%")


def whole_run_figures(folder: Path, runs: int) -> Iterator[Figure]:
    """Yield whole runs over loops without a supervisor."""
    loops = [
        ("apsw loop without checkpoint", loop_source("apsw", APSW_CONNECT), 1.15),
        ("sqlite3 loop without checkpoint", loop_source("sqlite3", SQLITE_CONNECT), 1.00),
        (
            "sqlite3 loop with a checkpoint by hand",
            loop_source("sqlite3", SQLITE_CONNECT, HAND_WRITTEN),
            0.85,
        ),
    ]
    for what, text, wanted in loops:
        value = paired(
            runs,
            lambda: run_copy(folder),
            lambda text=text: timed(folder, PYTHON, "-c", text),  # type: ignore[misc]
            lambda: empty_stock(folder),
        )
        yield Figure(f"whole run over the {what}", value, wanted)


def health_figure(folder: Path, runs: int) -> Iterator[Figure]:
    """Yield a run that is watched sixty times as often as by default over one that is not."""
    config = folder / "batchrun.toml"

    def watched(every: str) -> float:
        health = f'[health]\nsample_interval = "{every}"\ncheck_interval = "{every}"\n'
        config.write_text(CONFIG + health)
        return run_copy(folder)

    value = paired(runs, lambda: watched("1s"), lambda: watched("1d"), lambda: empty_stock(folder))
    config.write_text(CONFIG)
    yield Figure("watched each second over not watched", value, 1.05)


def system_call_figures(folder: Path) -> Iterator[Figure]:
    """Yield syncs and bytes a batch beyond the job's own, counted by strace."""
    if not shutil.which("strace"):
        print("NOT MEASURED: syncs and bytes a batch (no strace)")
        return
    empty_stock(folder)
    trace = folder / "trace"
    calls = "trace=fsync,fdatasync,write,pwrite64"
    command = [
        "strace",
        "-f",
        "-qq",
        "-y",
        "-o",
        str(trace),
        "-e",
        calls,
        PYTHON,
        "-P",
        "-c",
        LAUNCH,
    ]
    subprocess.run([*command, "run", "copy"], cwd=folder, check=True, capture_output=True)
    lines = [line for line in trace.read_text().splitlines() if "/state/" in line]
    report = subprocess.run(
        [PYTHON, "-P", "-c", LAUNCH, "--json", "report", "copy"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    commits = json.loads(report.stdout)["number"]
    syncs = sum(1 for line in lines if "sync(" in line)
    written = [re.search(r"= (\d+)$", line) for line in lines if "write" in line]
    bytes_written = sum(int(found[1]) for found in written if found)
    yield Figure("syncs a batch", syncs / commits, 3.05)
    yield Figure("kB written a batch", bytes_written / commits / 1000, 20, " kB")


def bare_commit_s(folder: Path, times: int) -> float:
    """Return the cost of one atomic file and one FULL commit, without batchrun."""
    ledger = apsw.Connection(str(folder / "bare.db"))
    ledger.pragma("journal_mode", "wal")
    ledger.pragma("synchronous", "FULL")
    ledger.execute("CREATE TABLE IF NOT EXISTS row (n INTEGER PRIMARY KEY, hash TEXT)")
    directory = os.open(folder, os.O_RDONLY)
    content = b"x" * 1_300
    began = time.monotonic()
    for number in range(times):
        descriptor = os.open(
            "bare.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory
        )
        os.write(descriptor, content)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename("bare.tmp", "bare.json", src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
        ledger.execute("BEGIN IMMEDIATE")
        ledger.execute("INSERT OR REPLACE INTO row VALUES (?, ?)", (number, "y" * 64))
        ledger.execute("COMMIT")
    elapsed_s = time.monotonic() - began
    os.close(directory)
    ledger.close()
    return elapsed_s / times


def empty_batch_figure(folder: Path, runs: int) -> Iterator[Figure]:
    """Yield the cost of a committed empty batch over the bare cost beside it."""
    times, ratios = 2_000, []
    for _ in range(runs):
        timed(
            folder, PYTHON, "-P", "-c", LAUNCH, "run", "empty", "--fresh", "--batches", str(times)
        )
        report = subprocess.run(
            [PYTHON, "-P", "-c", LAUNCH, "--json", "report", "empty"],
            cwd=folder,
            capture_output=True,
            check=True,
        )
        own_s = json.loads(report.stdout)["own_s"] / times
        ratios.append(own_s / bare_commit_s(folder, times))
    yield Figure("an empty batch over a bare file and commit", statistics.median(ratios), 1.25)


def start_figures(folder: Path, runs: int) -> Iterator[Figure]:
    """Yield the costs of starting: whole commands over the imports they cannot do without."""
    many = 3 * runs

    def batchrun_(*words: str) -> Callable[[], float]:
        return lambda: timed(folder, PYTHON, "-P", "-c", LAUNCH, *words)

    def imports(names: str) -> Callable[[], float]:
        return lambda: timed(folder, PYTHON, "-c", f"import {names}")

    def nothing() -> None:
        """Prepare nothing."""

    lock = folder / "state" / "maintenance.lock"
    status = paired(many, batchrun_("status"), imports("click, apsw"), nothing)
    yield Figure("status over importing click, apsw", status, 1.4)
    lock.touch()
    refused = paired(many, batchrun_("run", "copy"), imports("click, apsw"), nothing)
    lock.unlink()
    yield Figure("run refused for maintenance over the same", refused, 1.4)
    holder = batchrun.JobLock(folder / "state" / "locks" / "copy.lock")
    holder.acquire()
    busy = paired(many, batchrun_("run", "copy"), imports("click, apsw, filelock"), nothing)
    holder.release()
    yield Figure("run refused as busy over click, apsw, filelock", busy, 1.4)
    everything = imports("click, apsw, psutil, filelock")
    first = paired(many, lambda: first_record_s(folder), everything, nothing)
    yield Figure("start of run to the first record over all imports", first, 2.2)


def first_record_s(folder: Path, *words: str) -> float:
    """Return the time from the start of a run until its first batch is in the job's hands.

    The run is killed there, worker and supervisor, so that the next one goes on after a kill -9.
    """
    mark = folder / "first"
    mark.unlink(missing_ok=True)
    env = {
        **ENVIRONMENT,
        "BENCH_FIRST": str(mark),
        "BATCHRUN_TEST_POINT": "batch.yielded=kill-both",
    }
    command = [PYTHON, "-P", "-c", LAUNCH, *(words or ("run", "first", "--fresh"))]
    began = time.time()
    subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True)
    while not mark.exists():
        time.sleep(0.001)
    return float(mark.read_text()) - began


def long_ledger_figures(folder: Path, runs: int, batches: int, rows: int) -> Iterator[Figure]:
    """Yield starts and `status` with a long run and a big ledger over those with none."""
    small, big = folder / "small", folder / "big"
    for shop in (small, big):
        shop.mkdir()
        make_shop(shop, 10)
    timed(small, PYTHON, "-P", "-c", LAUNCH, "run", "first", "--batches", "1")
    timed(big, PYTHON, "-P", "-c", LAUNCH, "run", "first", "--batches", str(batches))
    add_batch_rows(big / "state" / "ledger.db", rows)
    resumed = paired(
        2 * runs,
        lambda: first_record_s(big, "run", "first"),
        lambda: first_record_s(small),
        lambda: None,
    )
    yield Figure(f"resume after {batches:,} batches over a normal start", resumed, 1.1)
    status = (PYTHON, "-P", "-c", LAUNCH, "status", "first")
    shown = paired(
        2 * runs, lambda: timed(big, *status), lambda: timed(small, *status), lambda: None
    )
    yield Figure(f"status with {rows:,} more rows over a small ledger", shown, 1.2)


def add_batch_rows(path: Path, rows: int) -> None:
    """Give the ledger a finished run with so many batch rows."""
    ledger = apsw.Connection(str(path))
    with ledger:
        sql = "INSERT INTO run (id, job, state, created_at, changed_at) VALUES (?, ?, ?, ?, ?)"
        ledger.execute(sql, ("ffffffffff", "copy", "reserved", "2026", "2026"))
        ledger.execute("UPDATE run SET state = 'succeeded' WHERE id = 'ffffffffff'")
        ledger.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
            " INSERT INTO batch (run, number, generation, kind, loop, cursor, first_key, last_key,"
            " read, rejected, counts, hash, at, elapsed_s)"
            " SELECT (SELECT key FROM run WHERE id = 'ffffffffff'), i, 1, 'batch', 'main', i, i, i,"
            " 5000, 0, '{}', hex(zeroblob(32)), '2026', 0.1 FROM n",
            (rows,),
        )
    ledger.close()


def memory_figures(folder: Path, records: int) -> Iterator[Figure]:
    """Yield the worker's peak memory at five times the records over that at once."""
    peaks = []
    for times in (1, 5):
        shop = folder / f"memory{times}"
        shop.mkdir()
        make_shop(shop, records * times)
        empty_stock(shop)
        run_copy(shop)
        report = subprocess.run(
            [PYTHON, "-P", "-c", LAUNCH, "--json", "report", "copy"],
            cwd=shop,
            capture_output=True,
            check=True,
        )
        peaks.append(json.loads(report.stdout)["attempts"][-1]["peak_rss_bytes"])
        shutil.rmtree(shop)
    yield Figure(
        f"peak memory at {5 * records:,} records over {records:,}", peaks[1] / peaks[0], 1.1
    )


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--batches", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / ".tmp", prefix="bench-") as name:
        folder = Path(name)
        make_shop(folder, given.records)
        empty_stock(folder)
        for figures in (
            split_figures(folder, given.runs),
            system_call_figures(folder),
            empty_batch_figure(folder, given.runs),
            start_figures(folder, given.runs),
            whole_run_figures(folder, max(3, given.runs // 2)),
            health_figure(folder, given.runs),
            long_ledger_figures(folder, given.runs, given.batches, given.records),
            memory_figures(folder, given.records),
        ):
            for figure in figures:
                verdict = "ok" if figure.value <= figure.wanted else "MISSED"
                print(
                    f"{figure.what:<58} {figure.value:8.2f}{figure.unit:3}"
                    f"  wanted at most {figure.wanted:g}  {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
