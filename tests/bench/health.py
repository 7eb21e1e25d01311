"""What watching a run's health costs: CPU of a sample and of a check, and the share of one core.

    python tests/bench/health.py [--rounds 20]

A sample is what the supervisor does each sample_interval, in its own process; a check is a round of
probes (a child process: its CPU counts too) against real listeners, with the gauges and the rows of
the ledger. The share is that of the default intervals on a healthy run. Nothing here asserts.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import batchrun  # noqa: E402 - the clone's own file, whatever is installed

WANTED_PERCENT = 0.5
JOB = """
from batchrun import job

@job
def copy(ctx):
    for batch in ctx.batches(list(range(3)), name="main"):
        yield batch
"""


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def median_cpu_s(call: Callable[[], None], rounds: int) -> float:
    """Return the median CPU seconds of a call, the first one left out."""
    taken = []
    for _ in range(rounds + 1):
        began = cpu_s()
        call()
        taken.append(cpu_s() - began)
    return statistics.median(taken[1:])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="CPU of a health sample and a health check")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ends = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [end.getsockname()[1] for end in ends]
        needs = "".join(
            f'[[health.{kind}]]\nname = "{name}"\nurl = "tcp://127.0.0.1:{port}"\n'
            for kind, name, port in zip(
                ("dependency", "dependency", "database"), "abc", ports, strict=True
            )
        )
        (folder / "jobs").mkdir(mode=0o700)
        (folder / "jobs/copy.py").write_text(JOB)
        (folder / "batchrun.toml").write_text(f"{needs}[jobs.copy]\n")
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from batchrun import main; main()"
        words = [sys.executable, "-c", code, "--config", str(folder / "batchrun.toml")]
        subprocess.run([*words, "run", "copy", "--batches", "1"], check=False)
        config, host = batchrun.load_config(folder / "batchrun.toml"), batchrun.Host()
        ledger = batchrun.StateDirectory(config, host).open_ledger(create=False)
        held.callback(ledger.close)
        (run,) = ledger.all_unfinished()
        watch = batchrun.HealthWatch(config, "copy", ledger, host)

        def sample() -> None:
            watch._sample_s, watch.due_s = host.monotonic(), host.monotonic() + 1e9
            watch.beat(run, run.generation, os.getpid())

        def check() -> None:
            seen = len(ledger.health_checks(run, 10_000))
            watch._sample_s = host.monotonic() + 1e9
            watch.check_soon()
            while len(ledger.health_checks(run, 10_000)) == seen:
                watch.beat(run, run.generation, os.getpid())
                host.sleep(batchrun.WATCH_INTERVAL_S)

        def idle() -> None:
            watch.due_s = watch._sample_s = host.monotonic() + 1e9
            for _ in range(1000):
                watch.beat(run, run.generation, os.getpid())

        health = config.health
        beat_s = median_cpu_s(idle, 3) / 1000
        parts = {
            "a beat with nothing due": (beat_s, batchrun.WATCH_INTERVAL_S),
            "a sample": (median_cpu_s(sample, rounds), health.sample_interval_s),
            "a check of 3 needs": (median_cpu_s(check, rounds), health.check_interval_s),
        }
    print(f"{'what':26} {'CPU ms':>9} {'every':>8} {'% of a core':>12}")
    shares = {name: 100 * used_s / every_s for name, (used_s, every_s) in parts.items()}
    for name, (used_s, every_s) in parts.items():
        print(f"{name:26} {used_s * 1000:9.3f} {every_s:6.1f} s {shares[name]:12.4f}")
    total = sum(shares.values())
    verdict = "" if total < WANTED_PERCENT else f"   MISSES the figure of {WANTED_PERCENT} %"
    print(f"{'all':26} {'':9} {'':8} {total:12.4f}{verdict}")


if __name__ == "__main__":
    main()
