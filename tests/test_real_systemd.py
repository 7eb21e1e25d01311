"""The units that `unit` installs, under a systemd of their own (BATCHRUN_TEST_SYSTEMD=1, root).

It is booted on an overlay of this machine's root, in namespaces of its own: see
tests/faults/systemd_boot.sh. That takes about two minutes, most of it `RestartSec`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(
    not os.environ.get("BATCHRUN_TEST_SYSTEMD"), reason="boots a systemd (BATCHRUN_TEST_SYSTEMD=1)"
)
PYTHON = "/usr/bin/python3"  # whoever runs a unit must be able to read it
CONFIG = """
    min_free = "1MB"
    [defaults]
    batch_size = 10
    [jobs.rejecting]
    max_rejects = 10
    [jobs.poisonous]
    max_tries = 1
    [jobs.slow]
    wait_s = 1.0
    records = 400
    """
JOBS = '''
"""One file for three jobs."""

import os
import signal
import time
from dataclasses import dataclass

from batchrun import job


@dataclass(frozen=True)
class Settings:
    records: int = 40
    wait_s: float = 0.0


@job(settings=Settings)
def rejecting(ctx):
    for batch in ctx.batches(range(ctx.settings.records)):
        batch.reject(batch.records[0], "not wanted")
        yield batch


@job(settings=Settings)
def poisonous(ctx):
    for batch in ctx.batches(range(ctx.settings.records)):
        os.kill(os.getpid(), signal.SIGKILL)
        yield batch


@job(settings=Settings)
def slow(ctx):
    for batch in ctx.batches(range(ctx.settings.records)):
        time.sleep(ctx.settings.wait_s)
        yield batch
'''
DRIVE = "[Service]\nType=oneshot\nExecStart=/srv/drive/drive.sh\nTimeoutStartSec=300\n"


def seed_of(folder: Path) -> Path:
    """Lay out what is laid over this machine: batchrun in /opt, the jobs, what drives them."""
    faults, drive = ROOT / "tests" / "faults", folder / "srv" / "drive"
    units = folder / "etc" / "systemd" / "system"
    wanted = units / "basic.target.wants"
    for made in (drive, wanted, folder / "opt"):
        made.mkdir(parents=True)
    installed = folder / "opt" / "batchrun"
    subprocess.run([PYTHON, "-m", "venv", "--copies", str(installed)], check=True)
    pip = [str(installed / "bin" / "python"), "-m", "pip", "install", "-q", "--no-cache-dir"]
    subprocess.run([*pip, str(ROOT)], check=True, stdout=sys.stderr)
    script = installed / "bin" / "batchrun"
    script.write_text(script.read_text().replace(str(folder), ""))
    (drive / "jobs.py").write_text(JOBS)
    (drive / "batchrun.toml").write_text(CONFIG)
    shutil.copy(faults / "systemd_drive.sh", drive / "drive.sh")
    (units / "drive.service").write_text(DRIVE)
    (wanted / "drive.service").symlink_to("../drive.service")
    for place in (folder, *folder.glob("srv/**"), *folder.glob("etc/**"), drive / "drive.sh"):
        place.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Boot, drive, power off; return the console."""
    if os.geteuid() or not shutil.which("systemd-nspawn"):
        pytest.skip("NO SYSTEMD: this needs root and systemd-nspawn")
    seed = seed_of(tmp_path_factory.mktemp("seed"))
    boot = ["bash", str(ROOT / "tests" / "faults" / "systemd_boot.sh"), str(seed)]
    ended = subprocess.run(
        ["unshare", "-m", "--propagation", "private", *boot],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
    )
    return ended.stdout.decode(errors="replace").replace("\r", "")


def found(shown: str, what: str) -> dict[str, str]:
    """Return what systemd said of a unit: property -> value."""
    lines = [line for line in shown.splitlines() if line.startswith(f"FOUND {what} ")]
    assert lines, shown
    return dict(word.partition("=")[::2] for word in lines[0].split()[2:])


def test_a_run_with_rejects_is_a_success_and_is_not_started_again(shown: str) -> None:
    unit = found(shown, "rejecting")
    assert (unit["Result"], unit["ActiveState"], unit["NRestarts"]) == ("success", "inactive", "0")


def test_a_run_that_needs_a_person_fails_as_a_unit_and_reaches_on_failure(shown: str) -> None:
    unit = found(shown, "poisonous")
    assert (unit["Result"], unit["ExecMainStatus"], unit["NRestarts"]) == ("exit-code", "13", "0")
    assert list(found(shown, "mail")) == ["batchrun-shop-poisonous.service"]


def test_a_stopped_unit_has_ended_well(shown: str) -> None:
    unit = found(shown, "stopped")
    assert (unit["Result"], unit["ActiveState"]) == ("success", "inactive")
    assert "JOURNAL to go on: batchrun --config /srv/shop/batchrun.toml resume" in shown


def test_a_killed_supervisor_is_started_again_and_its_run_goes_on(shown: str) -> None:
    assert found(shown, "killed")["Result"] == "signal"
    again = found(shown, "again")
    assert (again["ActiveState"], again["NRestarts"]) == ("active", "1")
    assert " was left by its owner: interrupted\nJOURNAL run " in shown
