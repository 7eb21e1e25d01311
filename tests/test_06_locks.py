"""Section 6: the kernel says who lives, the lockfile who may begin."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, wait_for

from batchrun import Host, JobLock, StateDirectoryError, holds_lock

HOLDER = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import batchrun, signal
from pathlib import Path
lock = batchrun.JobLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
signal.pause()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks" / "sync.lock"


@pytest.fixture
def hold(path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a process that takes the lock and keeps it."""
    held: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(path)]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
        held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        return process

    yield begin
    for process in held:
        process.kill()
        process.communicate()


def test_a_lock_is_had_once_and_free_after_its_release(path: Path) -> None:
    lock, other = JobLock(path), JobLock(path)
    assert lock.acquire()
    assert lock.is_ours()
    assert not other.acquire()
    lock.release()
    assert other.acquire()
    other.release()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_lock_file_left_by_nobody_is_free(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("left long ago")
    lock = JobLock(path)
    assert lock.acquire()
    lock.release()
    assert path.read_text() == "left long ago"


def test_the_lock_ends_with_its_process(
    path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    holder, lock = hold(), JobLock(path)
    assert not lock.acquire()
    assert lock.owners(Host()) == [holder.pid]
    holder.kill()
    holder.wait()
    assert lock.acquire()
    lock.release()


def test_a_stopped_owner_keeps_the_lock(
    path: Path, hold: Callable[[], subprocess.Popen[str]]
) -> None:
    holder = hold()
    holder.send_signal(signal.SIGSTOP)
    host = Host()
    identity = host.identify(holder.pid)
    assert identity is not None
    wait_for(lambda: host.is_stopped(identity), "the owner to be stopped")
    assert not JobLock(path).acquire()


def test_a_disk_that_does_not_answer_is_not_a_lock_that_was_taken_away(path: Path) -> None:
    lock = JobLock(path)
    assert lock.acquire()
    path.unlink()
    path.symlink_to(path.name)  # the system refuses to look at it: ELOOP, as a dead disk with EIO
    with pytest.raises(OSError, match="symbolic links"):
        holds_lock(lock.descriptor, path)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_owner_whose_lock_file_was_taken_away_notices(path: Path, *, replaced: bool) -> None:
    lock = JobLock(path)
    assert lock.acquire()
    assert holds_lock(lock.descriptor, path)
    path.unlink()
    if replaced:
        path.touch()
    assert not lock.is_ours()
    assert not holds_lock(lock.descriptor, path)
    second = JobLock(path)
    assert second.acquire()  # which is why the ledger's generation decides who may write
    second.release()
    lock.release()


def test_a_lock_whose_file_is_replaced_in_the_moment_it_is_taken_is_given_up(path: Path) -> None:
    class Raced(JobLock):
        def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - any attribute
            super().__setattr__(name, value)
            if name == "descriptor" and value >= 0:
                path.unlink()
                path.touch()

    raced = Raced(path)
    assert not raced.acquire()
    assert raced.descriptor == -1
    second = JobLock(path)
    assert second.acquire()
    second.release()


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe"])
def test_only_a_plain_file_is_a_lock(path: Path, tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    path.parent.mkdir()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(StateDirectoryError) as refusal:
        JobLock(path).acquire()
    assert str(refusal.value) == (
        f"The lock {path} is a link, a directory or a pipe, not a file.\n"
        "Nothing was changed.\n"
        f"See what it is: ls -l {path}"
    )
    assert outside.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_second_name_of_a_lock_file_does_no_harm(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    path.parent.mkdir()
    path.hardlink_to(outside)  # as a backup by `cp -al` leaves it
    lock = JobLock(path)
    assert lock.acquire()
    lock.release()
    assert outside.read_text() == "precious"


def test_a_missing_state_directory_is_not_made_by_a_lock(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JobLock(tmp_path / "mistyped" / "locks" / "sync.lock").acquire()
    assert list(tmp_path.iterdir()) == []
