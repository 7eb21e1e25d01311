"""Real faults: kills, I/O errors, full disks, lying disks and power cuts, where it counts.

What must hold, whatever happened:
  H1  acknowledged <= resumed <= acknowledged + 1; commits without a gap, the chain of hashes whole,
      SQLite's integrity_check ok, and every record in the target exactly once;
  H2  a documented exit code with a letter, no traceback, a full disk never called corruption;
  H4  cleanups ran in reverse order, and the lock is free.
After a kill or a power cut nothing but rolling forward was needed: a checkpoint restored from the
ledger would hide a missing fsync.

Faults come from strace (kill or fail the N-th call, N = 1, 2, ... until nothing is hit) and from
file systems of our own in a private mount namespace: ext4 and xfs on loop devices, whose power is
cut by FS_IOC_SHUTDOWN without flushing the journal. BATCHRUN_TEST_LONG=1 tries every place.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import apsw
import pytest
from conftest import LAUNCH, ROOT, Ended, clean_environment, wait_for

LONG = bool(os.environ.get("BATCHRUN_TEST_LONG"))
FAULTS = ROOT / "tests" / "faults"
RECORDS, BATCH = 6, 2  # three batches and the end of the loop: four commits
COMMITS = RECORDS // BATCH + 1

CONFIG = """\
state = "{disk}/state"
min_free = "1kB"
[defaults]
retry_for = "0"
on_exhausted = "fail"
batch_size = {batch}
[jobs.count]
records = {records}
target = "{target}"
notes = "{notes}"
ahead = {ahead}
"""

# The job notes what it sees by making folders: no fault here hits mkdir on a sound disk.
JOB = """\
import os
import time
from dataclasses import dataclass

from batchrun import Context, job


@dataclass(frozen=True)
class Settings:
    records: int
    target: str
    notes: str
    ahead: bool


@job(settings=Settings, version=1)
def count(ctx: Context[Settings]):
    def note(text):
        os.mkdir(f"{ctx.settings.notes}/{time.monotonic_ns():020d} {text}")

    class Numbers:
        reads_ahead = ctx.settings.ahead

        def read(self, after, limit):
            first = (after or 0) + 1
            return list(range(first, min(first + limit, ctx.settings.records + 1)))

        def key(self, record):
            return record

    note("begun")
    ctx.on_exit(note, "closed outer")
    stock = ctx.connect("sqlite:" + ctx.settings.target)
    stock.execute("CREATE TABLE IF NOT EXISTS got (key INTEGER NOT NULL)")
    ctx.on_exit(note, "closed inner")
    for batch in ctx.batches(Numbers(), target=stock):
        note(f"handed {batch.number}")
        with batch.transaction() as rows:
            rows.executemany("INSERT INTO got VALUES (?)", [(key,) for key in batch])
        yield batch
        note(f"acked {batch.number}")
"""

ONCE = """
SELECT coalesce(sum(copies), 0), count(*), coalesce(max(copies), 0)
FROM (SELECT count(*) AS copies FROM got GROUP BY key)
"""


# --- what the machine must have -------------------------------------------------------------------


def why_no_strace() -> str:
    """Return why system calls cannot be made to fail here; empty if they can."""
    if not shutil.which("strace"):
        return "NO STRACE: no system call was made to fail"
    probe = ["strace", "-qq", "-o", os.devnull, "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return "STRACE MAY NOT TRACE HERE: no system call was made to fail"
    return ""


def why_no_mounts(*programs: str) -> str:
    """Return why no disk of our own can be had here; empty if it can."""
    if os.geteuid():
        return "NOT ROOT: no power was cut, no disk was full"
    missing = [name for name in programs if not shutil.which(name, path=PATH)]
    if missing:
        return f"NO {' '.join(missing).upper()}: no power was cut, no disk was full"
    probe = ["losetup", "--find"]
    if programs and subprocess.run(probe, capture_output=True, check=False).returncode:
        return "NO LOOP DEVICES: no power was cut, no disk was full"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "NO MOUNT NAMESPACES: no power was cut, no disk was full"
    return ""


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NO_STRACE = why_no_strace()
NO_MOUNTS = why_no_mounts()
NO_EXT4 = why_no_mounts("losetup", "mkfs.ext4")
NO_XFS = why_no_mounts("losetup", "mkfs.xfs")
needs_strace = pytest.mark.skipif(bool(NO_STRACE), reason=NO_STRACE)
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS)
needs_ext4 = pytest.mark.skipif(bool(NO_EXT4), reason=NO_EXT4)
needs_xfs = pytest.mark.skipif(bool(NO_XFS), reason=NO_XFS)

CLONE_NEWNS = 0x00020000
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def own_mounts() -> Iterator[None]:
    """A mount namespace of our own: what is mounted in it is gone with it, whatever happens."""
    folder = Path.cwd()
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if LIBC.unshare(CLONE_NEWNS):
            pytest.skip("NO MOUNT NAMESPACES: unshare was refused")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        yield
    finally:
        if LIBC.setns(before, CLONE_NEWNS):
            os._exit(70)  # never go on with tests in the wrong namespace
        os.close(before)
        os.chdir(folder)


# --- starting batchrun ----------------------------------------------------------------------------


class Quick:
    """Starts batchrun by fork from a process that has loaded everything: tests/faults/quick.py."""

    def __init__(self, batchrun_folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(FAULTS / "quick.py"), str(batchrun_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
            bufsize=1,
        )

    def start(self, **order: Any) -> int:  # noqa: ANN401 - JSON
        """Start one, and return its pid as soon as it runs."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        return int(self._answer()["pid"])

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        return int(self._answer()["code"])

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "quick.py has ended"
        found: dict[str, int] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Fault:
    """What happens to the `number`-th of some calls: to that one only, or to all from it on."""

    calls: str
    number: int
    what: str
    sticky: bool = False

    def options(self, trace: Path) -> list[str]:
        """Return strace's options; file names are written to the trace beside descriptors."""
        when = f"{self.number}+" if self.sticky else f"{self.number}"
        inject = f"inject={self.calls}:{self.what}:when={when}"
        return ["-y", "-o", str(trace), "-e", f"trace={self.calls}", "-e", inject]


KILL, EIO, ENOSPC = "signal=KILL", "error=EIO", "error=ENOSPC"


class Starter(Protocol):
    """Starts batchrun and waits for it."""

    def start(self, **order: Any) -> int: ...  # noqa: ANN401 - see Quick
    def wait(self) -> int: ...


@dataclass
class Shop:
    """A project whose state is on `disk`, its target there or elsewhere, its notes elsewhere."""

    folder: Path
    quick: Starter
    disk: Path = field(default=Path())
    target: Path = field(default=Path())
    records: int = RECORDS
    batch: int = BATCH
    ahead: bool = (
        False  # whether the source is read ahead, and a batch committed in a thread beside
    )
    started: int = 0

    def __post_init__(self) -> None:
        """Write config and job."""
        for path in (self.folder, self.folder / "jobs", self.notes):
            path.mkdir(mode=0o700)
        if self.disk == Path():
            self.disk = self.folder / "disk"
            self.disk.mkdir(mode=0o700)
        if self.target == Path():
            self.target = self.disk / "stock.db"
        places = {"disk": self.disk, "target": self.target, "notes": self.notes}
        numbers = {"records": self.records, "batch": self.batch, "ahead": str(self.ahead).lower()}
        config = CONFIG.format(**places, **numbers)
        for name, text in (("batchrun.toml", config), ("jobs/count.py", JOB)):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600)

    @property
    def notes(self) -> Path:
        """The folder of what the job has noted, on a sound disk."""
        return self.folder / "notes"

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.disk / "state"

    @property
    def trace(self) -> Path:
        """What strace wrote about the newest start."""
        return self.folder / f"{self.started}.trace"

    def noted(self) -> list[str]:
        """Return what the job has noted, in order, without the time."""
        return [name.partition(" ")[2] for name in sorted(os.listdir(self.notes))]  # noqa: PTH208 - thousands

    def acked(self) -> int:
        """Return the last batch after which the job went on."""
        numbers = [int(note.split()[1]) for note in self.noted() if note.startswith("acked")]
        return max(numbers, default=0)

    def start(
        self,
        *words: str,
        strace: list[str] | None = None,
        limits: dict[str, int] | None = None,
        vfs: dict[str, Any] | None = None,
        point: str = "",
        env: dict[str, str] | None = None,
    ) -> int:
        """Start `batchrun WORDS` and return its pid."""
        self.started += 1
        return self.quick.start(
            words=list(words),
            cwd=str(self.folder),
            env={"BATCHRUN_TEST_POINT": point, **(env or {})},
            out=str(self.folder / f"{self.started}.out"),
            err=str(self.folder / f"{self.started}.err"),
            strace=strace or [],
            limits=limits or {},
            vfs=vfs or {},
        )

    def finish(self) -> Ended:
        """Wait for what was started last."""
        code = self.quick.wait()
        ends = (self.folder / f"{self.started}.{end}" for end in ("out", "err"))
        return Ended(code, *(path.read_text() if path.exists() else "" for path in ends))

    def run(self, *words: str, fault: Fault | None = None, **how: Any) -> Ended:  # noqa: ANN401
        """Run the job (or other words) to its end, under a fault or none."""
        trace = self.folder / f"{self.started + 1}.trace"
        self.start(*words or RUN, strace=fault.options(trace) if fault else None, **how)
        return self.finish()

    def killed(self) -> bool:
        """Tell whether strace killed the newest start."""
        return "+++ killed by SIGKILL" in self.trace.read_text(errors="replace")

    def hits(self) -> list[str]:
        """Return the calls on our disk that were hit in the newest start."""
        return [shortened(line) for line in self._hit() if str(self.disk) in line]

    def hits_elsewhere(self) -> list[str]:
        """Return those that hit anything else: the config, the job's file, /proc, our stderr."""
        return [shortened(line) for line in self._hit() if str(self.disk) not in line]

    def _hit(self) -> list[str]:
        lines = self.trace.read_text(errors="replace").splitlines() if self.trace.exists() else []
        return [line for line in lines if "(INJECTED" in line]


RUN = ("-v", "run", "count", "--in-process")  # -v: repairs are said


def shortened(line: str) -> str:
    """Return a line of strace without folders and contents: `pwrite64 stock.db-wal EIO`."""
    call, error = re.findall(r"(\w+)\(", line)[0], re.findall(r"= -1 (\w+)", line)
    names = re.findall(r'[<"]([^<>"]*[^<>"0-9/][^<>"]*)[>"]', line)
    return " ".join([call, *(Path(name).name for name in names), *error])


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    """The clone's batchrun, quickly started, in the ordinary namespace."""
    made = Quick(ROOT)
    yield made
    made.close()


@pytest.fixture
def mounted_quick(own_mounts: None) -> Iterator[Quick]:  # noqa: ARG001 - order of fixtures
    """The same inside our own mount namespace."""
    made = Quick(ROOT)
    yield made
    made.close()


# --- what must hold -------------------------------------------------------------------------------


def require_goes_on(shop: Shop, acked: int, *, only_forward: bool = True) -> None:
    """Start again without a fault, and check H1."""
    before = len(shop.noted())
    ended = shop.run("resume", "count", "--in-process")
    if ended.code == 4:  # nothing had begun
        assert acked == 0, ended.err
        ended = shop.run()
    assert ended.code == 0, f"going on ended with {ended.code}:\n{ended.err}"
    handed = [int(note.split()[1]) for note in shop.noted()[before:] if note.startswith("handed")]
    first = handed[0] if handed else shop.records // shop.batch + 1
    assert acked + 1 <= first <= acked + 2, f"acknowledged {acked}, went on with {first}"
    if only_forward:
        assert "restored from the ledger" not in ended.err, ended.err
    require_whole(shop)


def require_whole(shop: Shop) -> None:
    """Check what a finished run leaves: each record once, each commit once, nothing else."""
    commits = shop.records // shop.batch + 1
    with opened(shop.target) as target:
        assert target.pragma("integrity_check") == "ok"
        assert target.execute(ONCE).fetchall() == [(shop.records, shop.records, 1)]
    with opened(shop.state / "ledger.db") as ledger:
        assert ledger.pragma("integrity_check") == "ok"
        last = "SELECT key, id, state, number, hash FROM run ORDER BY key DESC LIMIT 1"
        ((key, run, state, number, digest),) = ledger.execute(last).fetchall()
        assert (state, number) == ("succeeded", commits)
        rows = "SELECT number, hash FROM batch WHERE run = ? ORDER BY number"
        hashes: dict[Any, Any] = dict(ledger.execute(rows, (key,)).fetchall())  # type: ignore[arg-type]
    assert list(hashes) == list(range(1, commits + 1))
    assert hashes[commits] == digest
    checkpoint = next((shop.state / "checkpoints" / "count").glob(f"{run}.json"))
    assert (
        json.loads(checkpoint.read_bytes().partition(b"\n")[2])["previous"] == hashes[commits - 1]
    )
    assert list(shop.state.rglob("*.tmp")) == []


@contextlib.contextmanager
def opened(path: Path) -> Iterator[apsw.Connection]:
    """Open a database that no process uses any more, and close it."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.transaction_mode = "DEFERRED"
    try:
        yield connection
    finally:
        connection.close(force=True)


def require_letter(shop: Shop, ended: Ended) -> None:
    """Check H2: 5 with a letter. The job's own target may also end it with 1.

    SQLite itself calls a sector that cannot be read a malformed image: 13, and nothing is touched.
    """
    hits, said = shop.hits(), ended.err.lower()
    if ended.code == 13 and all(hit.startswith("pread64") for hit in hits):
        assert "is left as it is" in said, ended.err
        return
    at_target = any("stock.db" in hit for hit in hits)
    assert ended.code in ({5, 1} if at_target else {5}), f"exit {ended.code}:\n{ended.err[-1500:]}"
    assert said.count("\n") >= 3, (
        f"no letter:\n{ended.err}"
    )  # what, what is unchanged, what to type
    if not at_target:
        assert "traceback" not in said, ended.err
        assert not re.search("damaged|corrupt|malformed", said), ended.err
        if any(re.search(r"(-wal|json\S*|count) ENOSPC$", hit) for hit in hits[:1]):
            assert "disk full" in said, ended.err


def require_cleaned_up(shop: Shop, before: int = 0) -> None:
    """Check H4: what the job had opened was closed in reverse order."""
    noted = shop.noted()[before:]
    closed = [note for note in noted if note.startswith("closed")]
    assert closed in ([], ["closed outer"], ["closed inner", "closed outer"]), noted
    assert bool(closed) == ("begun" in noted), noted


def count_calls(shop: Shop, calls: str) -> int:
    """Return how often a run without any fault makes these calls."""
    trace = shop.folder / f"{shop.started + 1}.trace"
    shop.start(*RUN, strace=["-o", str(trace), "-e", f"trace={calls}"])
    assert shop.finish().code == 0
    require_whole(shop)
    return sum(" = " in line for line in trace.read_text().splitlines())


def places(total: int, at_most: int) -> list[int]:
    """Return all of 1..total, or an even choice of them with both ends."""
    if LONG or total <= at_most:
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (at_most - 1)) for i in range(at_most)})


# --- rows 1-4: every call is killed, fails once, fails for ever ----------------------------------

# name -> the calls (any of them counts), and how many places a CI run tries
CALLS: dict[str, tuple[str, int]] = {
    "fsync": ("fsync", 100),
    "fdatasync": ("fdatasync", 18),
    "rename": ("rename,renameat,renameat2", 100),
    "openat": ("openat", 9),
    "pwrite64": ("pwrite64", 10),
    "write": ("write", 5),
    "unlink": ("unlink,unlinkat", 5),
    "close": ("close", 5),
    "ftruncate": ("ftruncate", 5),
    "flock": ("flock", 5),
    "mmap": ("mmap", 4),
    "fcntl": ("fcntl", 7),
}


@needs_strace
@pytest.mark.parametrize("name", CALLS)
def test_a_kill_before_any_system_call_loses_and_repeats_nothing(
    name: str, tmp_path: Path, quick: Quick
) -> None:
    calls, at_most = CALLS[name]
    total = count_calls(Shop(tmp_path / "sound", quick), calls)
    for number in places(total, at_most):
        shop = Shop(tmp_path / f"{name}-{number}", quick)
        ended = shop.run(fault=Fault(calls, number, KILL))
        assert ended.code in (-signal.SIGKILL, 0), f"{name} {number}: {ended}"
        require_goes_on(shop, shop.acked())
        shutil.rmtree(shop.folder)


def require_survives(shop: Shop, fault: Fault) -> None:
    """Run under a fault that leaves the process alive, check H2 and H4, go on, check H1."""
    ended = shop.run(fault=fault)
    hits = shop.hits()
    elsewhere = shop.hits_elsewhere()
    if not hits and not elsewhere:  # some calls are made by chance: while waiting, or by threads
        assert ended.code == 0, ended
        shutil.rmtree(shop.folder)
        return
    if ended.code != 0 and not elsewhere:
        require_letter(shop, ended)
    require_cleaned_up(shop)
    if "unlink" not in fault.calls:
        assert list(shop.state.rglob(".*.json.*.tmp")) == [], hits
    require_goes_on(shop, shop.acked())
    shutil.rmtree(shop.folder)


# The same for calls that fail; no disk is full where something is only read or removed.
FAILING: dict[tuple[str, str], int] = {
    ("fsync", "EIO"): 12,
    ("fsync", "ENOSPC"): 5,
    ("fdatasync", "EIO"): 14,
    ("fdatasync", "ENOSPC"): 6,
    ("rename", "EIO"): 100,
    ("rename", "ENOSPC"): 3,
    ("openat", "EIO"): 11,
    ("openat", "ENOSPC"): 5,
    ("pwrite64", "EIO"): 6,
    ("pwrite64", "ENOSPC"): 9,
    ("write", "EIO"): 4,
    ("write", "ENOSPC"): 4,
    ("unlink", "EIO"): 4,
    ("ftruncate", "EIO"): 3,
    ("ftruncate", "ENOSPC"): 4,
    ("pread64", "EIO"): 5,
}
CALLS["pread64"] = ("pread64", 0)


@needs_strace
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize(("name", "error"), FAILING)
def test_a_call_that_fails_ends_the_run_with_a_letter_and_the_next_start_goes_on(
    name: str, error: str, *, sticky: bool, tmp_path: Path, quick: Quick
) -> None:
    calls, _ = CALLS[name]
    total = count_calls(Shop(tmp_path / "sound", quick), calls)
    failures = []
    at_most = max(2, FAILING[name, error] // (2 if sticky else 1))
    for number in places(total, at_most):
        shop = Shop(tmp_path / f"{number}", quick)
        try:
            require_survives(shop, Fault(calls, number, f"error={error}", sticky))
        except AssertionError as failure:
            failures.append(f"--- {number}: {shop.hits()[:3]}\n{str(failure)[:600]}")
    if failures:
        pytest.fail(f"{len(failures)} of {total}\n" + "\n".join(failures), pytrace=False)


# --- after a failed sync --------------------------------------------------------------------------


class Plain:
    """Starts batchrun as a user does: an interpreter, a supervisor, a worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **order: Any) -> int:  # noqa: ANN401 - JSON
        """Start one, with strace around both of its processes if that is asked for."""
        strace = ["strace", "-f", "-qq", *order["strace"]] if order["strace"] else []
        with Path(order["out"]).open("ab") as out, Path(order["err"]).open("ab") as err:
            self._process = subprocess.Popen(
                [*strace, *LAUNCH, *order["words"]],
                cwd=order["cwd"],
                env={**clean_environment(), **order["env"]},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self._process.pid

    def wait(self) -> int:
        """Wait for its end; strace ends like what it traced, with 128 + N for signal N."""
        assert self._process
        code = self._process.wait(60)
        return -(code - 128) if code > 128 and code - 128 == signal.SIGKILL else code


def calls_of(trace: Path) -> list[str]:
    """Return a trace's lines, shortened, in order."""
    return [shortened(line) for line in trace.read_text(errors="replace").splitlines()]


@needs_strace
@pytest.mark.parametrize(
    ("point", "code"),
    [
        ("file.fsync=EIO", 5),
        ("checkpoint.rename@2=EIO", 5),
        ("checkpoint.fsync@2=EIO", 5),
        ("ledger.committed@1=kill-both", -9),
        ("worker.ended=kill-both", -9),
    ],
)
def test_the_start_after_an_unclean_end_first_makes_durable_what_it_has_read(
    point: str, code: int, tmp_path: Path, quick: Quick
) -> None:
    shop = Shop(tmp_path / "shop", Plain())
    if point == "file.fsync=EIO":  # of any commit: let one stand before
        assert shop.run("run", "count", "--batches", "1").code == 75
    words = ["--batches", "1"] if point.startswith("worker.ended") else []
    ended = shop.run("run", "count", *words, point=point)
    assert ended.code == code, ended
    log = shop.state / "ledger.db-wal"
    left_in_wal = log.exists() and log.stat().st_size > 0
    assert left_in_wal == (code == -9)
    before = len(shop.noted())
    shop.quick = quick
    watched = ["-y", "-o", str(shop.folder / "next.trace"), "-e", "trace=fdatasync,rename,renameat"]
    shop.start("resume", "count", "--in-process", strace=watched)
    assert shop.finish().code == 0
    assert shop.noted()[before:][1] in ("handed 2", "handed 3"), shop.noted()
    calls = calls_of(shop.folder / "next.trace")
    first = calls[: next(n for n, call in enumerate(calls) if "stock.db" in call)]
    assert ("fdatasync ledger.db" in first) == left_in_wal, calls  # moved into the ledger's pages
    assert any(re.search(r"rename.*\.json$", call) for call in first), calls  # a new inode
    require_whole(shop)


# --- rows 6-8, 18: the power fails ----------------------------------------------------------------

FS_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
SIZE_BYTES = {"ext4": 96 * 2**20, "xfs": 320 * 2**20}


class Disk:
    """A file system in a file of its own, mounted at `place`, whose power can be cut."""

    def __init__(self, folder: Path, kind: str, size_bytes: int = 0) -> None:
        self.place, self._image = folder / "mounted", folder / "image"
        self.place.mkdir()
        with self._image.open("wb") as image:
            image.truncate(size_bytes or SIZE_BYTES[kind])
        self._tool(*MAKE[kind], str(self._image))
        self.mount()

    @staticmethod
    def _tool(*words: str) -> None:
        subprocess.run(words, check=True, env={**os.environ, "PATH": PATH}, capture_output=True)

    def mount(self) -> None:
        """Mount it; the journal is recovered."""
        self._tool("mount", "-o", "loop", str(self._image), str(self.place))

    def folder(self, name: str) -> Path:
        """Return a new folder that would survive a power cut."""
        made = self.place / name
        made.mkdir(mode=0o700)
        self._sync()
        return made

    def _sync(self) -> None:
        directory = os.open(self.place, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def cut(self) -> None:
        """Cut the power: from now on nothing reaches the image, and every call fails with EIO."""
        directory = os.open(self.place, os.O_RDONLY)
        fcntl.ioctl(directory, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(directory)

    def unmount(self) -> None:
        """Unmount it as soon as the last process has let go."""

        def is_free() -> bool:
            words = ["umount", str(self.place)]
            return subprocess.run(words, capture_output=True, check=False).returncode == 0

        wait_for(is_free, f"{self.place} to be free")

    def power_cycle(self) -> None:
        """Cut the power and switch it on again."""
        self.cut()
        self.unmount()
        self.mount()


# name -> how many places a CI run tries on ext4 and on xfs
POWER = {"fsync": (100, 5), "fdatasync": (16, 6), "rename": (100, 3), "openat": (4, 0)}
if LONG:
    POWER |= dict.fromkeys(("pwrite64", "write", "unlink", "ftruncate", "close"), (1000, 1000))


def power_fails(disk: Disk, calls: str, number: int, folder: Path, quick: Quick) -> str:
    """Cut the power before one call, switch it on, go on; return what was wrong, if anything."""
    shop = Shop(folder, quick, disk=disk.folder(folder.name))
    try:
        ended = shop.run(fault=Fault(calls, number, KILL))
        assert ended.code in (-signal.SIGKILL, 0), ended
        disk.power_cycle()
        require_goes_on(shop, shop.acked())
    except AssertionError as failure:
        return f"--- {calls} {number}: {str(failure)[:700]}"
    finally:
        shutil.rmtree(shop.disk)
    return ""


@needs_strace
@pytest.mark.parametrize("name", POWER)
@pytest.mark.parametrize(
    "kind", [pytest.param("ext4", marks=needs_ext4), pytest.param("xfs", marks=needs_xfs)]
)
def test_a_power_cut_before_any_system_call_needs_no_repair(
    kind: str, name: str, tmp_path: Path, mounted_quick: Quick
) -> None:
    at_most = POWER[name][kind == "xfs"]
    if not at_most:
        pytest.skip("every place is tried with BATCHRUN_TEST_LONG=1")
    disk = Disk(tmp_path, kind)
    calls = CALLS[name][0]
    sound = Shop(tmp_path / "sound", mounted_quick, disk=disk.folder("sound"))
    found = [
        power_fails(disk, calls, number, tmp_path / f"{number}", mounted_quick)
        for number in places(count_calls(sound, calls), at_most)
    ]
    if any(found):
        pytest.fail("\n".join(filter(None, found)), pytrace=False)


def cut_at_random(shop: Shop, disk: Disk, rounds: int, seed: int) -> str:
    """Cut the power again and again in one long run; return what was wrong, if anything.

    The ledger's WAL is reused after some hundred batches of a start: only then a missing fsync of
    the directory is not made good by chance by an fsync of the growing WAL. See `cut_at_a_commit`.
    """
    chance, acked = random.Random(seed), 0  # noqa: S311 - to be the same each time
    for number in range(rounds):
        until = acked + (450 if number == 0 else chance.randint(1, 40))
        shutil.rmtree(shop.notes)
        shop.notes.mkdir()
        pid = shop.start(*RUN)
        wait_for(lambda: state_of(pid) == "Z" or shop.acked() >= until, f"batch {until}")  # noqa: B023
        disk.cut()
        ended = shop.finish()
        try:
            assert_went_on(shop, acked, ended)
            require_cleaned_up_after_a_cut(shop, ended)
        except AssertionError as failure:
            return f"round {number}, seed {seed}: {str(failure)[:800]}"
        finally:
            disk.unmount()
            disk.mount()
        acked = shop.acked()
    shop.notes.rename(shop.folder / "notes.last")
    shop.notes.mkdir()
    ended = shop.run("resume", "count", "--in-process", "--batches", "1")
    try:
        assert ended.code == 75, ended.err
        assert_went_on(shop, acked, ended)
        with opened(shop.target) as target:
            ((rows, keys, copies),) = target.execute(ONCE).fetchall()
            assert (rows, copies) == (keys, 1)
            assert target.execute("SELECT max(key) FROM got").get == keys
            assert f"handed {int(keys) // shop.batch}" in shop.noted()
        checked = shop.run("check")
        assert checked.code == 0, checked
    except AssertionError as failure:
        return f"at the end, seed {seed}: {str(failure)[:800]}"
    return ""


def assert_went_on(shop: Shop, acked: int, ended: Ended) -> None:
    """Check H1 for a start that has not come to the end, and that nothing was repaired."""
    handed = [int(note.split()[1]) for note in shop.noted() if note.startswith("handed")]
    assert handed, f"exit {ended.code}: {ended.err}"
    assert acked + 1 <= handed[0] <= acked + 2, f"acknowledged {acked}, went on with {handed[0]}"
    assert "restored from the ledger" not in ended.err, ended.err


def require_cleaned_up_after_a_cut(shop: Shop, ended: Ended) -> None:
    """Check H2 and H4 for a run whose disk went away under it (row 18)."""
    assert ended.code in (5, 1), f"exit {ended.code}: {ended.err}"  # 1: the target was hit first
    assert not re.search("damaged|corrupt", ended.err), ended.err
    require_cleaned_up(shop)


@needs_ext4
@pytest.mark.parametrize(
    ("kind", "rounds"), [("ext4", 12), pytest.param("xfs", 4, marks=needs_xfs)]
)
def test_power_cuts_at_random_in_a_long_run_need_no_repair(
    kind: str, rounds: int, tmp_path: Path, mounted_quick: Quick
) -> None:
    disk = Disk(tmp_path, kind)
    shop = Shop(tmp_path / "shop", mounted_quick, disk.folder("d"), records=10**6, ahead=True)
    seed = random.randrange(10**6)  # noqa: S311
    wrong = cut_at_random(shop, disk, rounds * (40 if LONG else 1), seed)
    if wrong:
        pytest.fail(wrong, pytrace=False)


def cut_at_a_commit(shop: Shop, disk: Disk, number: int) -> str:
    """Cut the power right after the COMMIT of a batch; return what was wrong on the next start.

    The target is on another disk, or its syncs would make a forgotten one good by chance.
    """
    ended = shop.run(*RUN, point=f"ledger.committed@{number}=kill")
    assert ended.code == -signal.SIGKILL, ended
    disk.power_cycle()
    shutil.rmtree(shop.notes)
    shop.notes.mkdir()
    ended = shop.run("resume", "count", "--in-process", "--batches", "1")
    try:
        assert ended.code == 75, ended
        assert_went_on(shop, number, ended)
        assert f"handed {number + 1}" in shop.noted()
    except AssertionError as failure:
        return f"cut at commit {number}: {str(failure)[:800]}"
    return ""


@needs_ext4
@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=needs_xfs)])
def test_a_commit_in_a_reused_wal_is_durable_with_its_checkpoint(
    kind: str, tmp_path: Path, mounted_quick: Quick
) -> None:
    disk = Disk(tmp_path, kind)
    target = tmp_path / "stock.db"
    shop = Shop(tmp_path / "shop", mounted_quick, disk.folder("d"), target, records=10**6)
    for number in (450, 900) if LONG else (450,):
        assert cut_at_a_commit(shop, disk, number) == ""


@needs_strace
@needs_ext4
def test_a_commit_whose_sync_failed_is_there_or_not_after_a_power_cut_and_both_are_right(
    tmp_path: Path, mounted_quick: Quick
) -> None:
    disk = Disk(tmp_path, "ext4")
    sound = Shop(tmp_path / "sound", mounted_quick, disk=disk.folder("sound"))
    total = count_calls(sound, "fdatasync")
    for number in places(total, 6):
        name = f"{number}"
        shop = Shop(tmp_path / name, mounted_quick, disk=disk.folder(name))
        ended = shop.run(fault=Fault("fdatasync", number, EIO))
        assert ended.code in (5, 1, 0), ended
        disk.power_cycle()
        require_goes_on(shop, shop.acked())


# --- row 13: a disk that lies ---------------------------------------------------------------------


@needs_strace
@needs_ext4
@pytest.mark.parametrize("until", [1, 2, 3])
def test_a_disk_that_lies_about_syncs_is_found_out_or_harmless(
    until: int, tmp_path: Path, mounted_quick: Quick
) -> None:
    disk = Disk(tmp_path, "ext4")
    shop = Shop(tmp_path / "shop", mounted_quick, disk=disk.folder("d"))
    first = shop.run("run", "count", "--in-process", "--batches", "1")
    assert first.code == 75, first
    os.sync()
    lie = Fault("fsync,fdatasync", 1, "retval=0", sticky=True)
    lied = shop.run("resume", "count", "--in-process", "--batches", f"{until}", fault=lie)
    assert lied.code in (75, 0), lied
    disk.power_cycle()
    ended = shop.run("resume", "count", "--in-process")
    if ended.code == 13:
        assert "Nothing was changed." in ended.err or "left as it is" in ended.err, ended.err
    else:
        assert ended.code == 0, ended
        require_whole(shop)


# --- row 9: the suite itself ----------------------------------------------------------------------

LEDGER_FIRST = """\
            publish()
            reach("ledger.commit", number)
        reach("ledger.committed", number)
"""
BEGUN = """\
        with self._writing():
            reach("ledger.begun", number)
"""
NAIVE_FENCE = """\
        with self._owning(run, commit.checkpoint.generation):
            pass
        publish()
        with self._writing():
"""

# name -> what stands there, and what is put in its place
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "no fsync of the file": [("            os.fsync(descriptor)\n", "")],
    "no fsync of the directory": [("        os.fsync(at)\n", "")],
    "synchronous=NORMAL": [
        (
            'connection.pragma("synchronous", "FULL")\n    connection.pragma("foreign',
            'connection.pragma("synchronous", "NORMAL")\n    connection.pragma("foreign',
        ),
        ('connection.pragma("synchronous") != 2', 'connection.pragma("synchronous") != 1'),
    ],
    "ledger first": [(LEDGER_FIRST, "        publish()\n")],
    "fence outside the lock": [
        (BEGUN, NAIVE_FENCE),
        ("            publish()\n            reach", "            reach"),
    ],
}


@contextlib.contextmanager
def mutant(name: str, folder: Path) -> Iterator[Quick]:
    """Batchrun with one of its guarantees cut out."""
    text = (ROOT / "batchrun.py").read_text()
    for stands, instead in MUTANTS[name]:
        assert text.count(stands) == 1, f"the mutant {name!r} no longer fits batchrun.py: {stands}"
        text = text.replace(stands, instead)
    (folder / "mutant").mkdir()
    (folder / "mutant" / "batchrun.py").write_text(text)
    made = Quick(folder / "mutant")
    try:
        yield made
    finally:
        made.close()


@needs_ext4
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("no fsync of the file", "xfs", marks=needs_xfs),
        ("no fsync of the directory", "ext4"),
        ("synchronous=NORMAL", "ext4"),
    ],
)
def test_the_power_cuts_find_a_missing_sync(
    name: str,
    kind: str,
    tmp_path: Path,
    own_mounts: None,  # noqa: ARG001
) -> None:
    with mutant(name, tmp_path) as quick:
        disk = Disk(tmp_path, kind)
        target = tmp_path / "stock.db"
        shop = Shop(tmp_path / "shop", quick, disk.folder("d"), target, records=10**6)
        assert any(cut_at_a_commit(shop, disk, 450 * n) for n in range(1, 6)), f"not found: {name}"


@needs_strace
def test_the_kills_find_a_ledger_that_commits_before_the_rename(tmp_path: Path) -> None:
    with mutant("ledger first", tmp_path) as quick:
        shop = Shop(tmp_path / "shop", quick)
        shop.run(fault=Fault(CALLS["rename"][0], 3, KILL))
        with pytest.raises(AssertionError, match="restored from the ledger"):
            require_goes_on(shop, shop.acked())


def overtaken(folder: Path, first: Quick, second: Quick) -> str:
    """Hold an owner before its rename, take its run over, let it go on; return what is wrong."""
    shop = Shop(folder, first)
    owner = shop.start(*RUN, point="checkpoint.rename@2=stop")
    wait_for(lambda: state_of(owner) == "T", "the owner to be held")
    (shop.state / "locks" / "count.lock").unlink()
    successor = Shop.__new__(Shop)
    successor.__dict__.update(shop.__dict__, quick=second)
    pid = successor.start("resume", "count", "--in-process")
    sleeps = Path(f"/proc/{pid}/wchan")
    wait_for(
        lambda: state_of(pid) == "Z" or (sleeps.exists() and "nanosleep" in sleeps.read_text()),
        "the successor to have ended, or to wait for the ledger",
    )
    os.kill(owner, signal.SIGCONT)
    ended, succeeded = shop.finish(), successor.finish()
    if succeeded.code != 0 or ended.code != 14:
        return f"owner {ended}, successor {succeeded}"
    try:
        require_whole(shop)
        held = next((shop.state / "checkpoints" / "count").glob("*.json")).read_bytes()
        assert json.loads(held.partition(b"\n")[2])["number"] == COMMITS, "overwritten checkpoint"
    except AssertionError as failure:
        return str(failure)
    return ""


def state_of(pid: int) -> str:
    """Return a process's state letter; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_an_owner_held_before_its_rename_overwrites_nothing_of_its_successor(
    tmp_path: Path, quick: Quick
) -> None:
    second = Quick(ROOT)
    try:
        assert overtaken(tmp_path / "shop", quick, second) == ""
    finally:
        second.close()


def test_the_overtaking_finds_a_fence_outside_the_lock(tmp_path: Path, quick: Quick) -> None:
    with mutant("fence outside the lock", tmp_path) as first:
        assert overtaken(tmp_path / "shop", first, quick), "the naive fence was not found out"


# --- row 5: SQLite's own operations fail ----------------------------------------------------------


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("operation", ["xWrite", "xSync", "xRead", "xTruncate", "xOpen", "xDelete"])
def test_an_operation_of_sqlite_on_the_ledger_that_fails_loses_nothing(
    operation: str, *, sticky: bool, tmp_path: Path, quick: Quick
) -> None:
    number, step = 1, 1 if LONG else {"xWrite": 11, "xSync": 4, "xRead": 9}.get(operation, 1)
    while True:
        shop = Shop(tmp_path / f"{number}", quick, ahead=True)
        fired = shop.folder / "fired"
        vfs = {"operation": operation, "at": number, "sticky": sticky, "fired": str(fired)}
        shop.start(*RUN, vfs=vfs)
        ended = shop.finish()
        if not fired.exists():
            assert number > 1
            assert ended.code == 0, ended
            return
        assert ended.code in (5, 0), f"{operation} {number}: {ended}"
        assert "Traceback" not in ended.err, f"{operation} {number}: {ended.err}"
        require_cleaned_up(shop)
        require_goes_on(shop, shop.acked())
        shutil.rmtree(shop.folder)
        number += step


# --- row 10: a kill while a start mends what the last one left ------------------------------------


@needs_strace
@pytest.mark.parametrize("half", ["forward", "missing", "torn", "older"])
def test_a_kill_while_a_start_mends_is_mended_by_the_next(
    half: str, tmp_path: Path, quick: Quick
) -> None:
    shop = Shop(tmp_path / "shop", quick)
    assert shop.run("run", "count", "--in-process", "--batches", "1").code == 75
    (file,) = (shop.state / "checkpoints" / "count").glob("*.json")
    older = file.read_bytes()
    shop.run("resume", "count", "--in-process", point="ledger.commit@2=kill")
    if half != "forward":
        ended = shop.run("resume", "count", "--in-process", "--batches", "1")
        assert ended.code == 75, ended
        if half == "older":
            file.write_bytes(older)
        elif half == "torn":
            os.truncate(file, 100)
        else:
            file.unlink()
    acked, prepared = 1 if half == "forward" else 3, tmp_path / "prepared"
    shutil.copytree(shop.disk, prepared)
    number = 1
    while True:
        shutil.rmtree(shop.disk)
        shutil.copytree(prepared, shop.disk)
        shutil.rmtree(shop.notes)
        shop.notes.mkdir()
        calls = "fsync,fdatasync,rename,renameat,unlink"
        fault = Fault(calls, number, KILL)
        trace = shop.folder / f"{shop.started + 1}.trace"
        shop.start("resume", "count", "--in-process", strace=fault.options(trace))
        ended = shop.finish()
        if not shop.killed():
            assert ended.code == 0, ended
            break
        handed = [int(note.split()[1]) for note in shop.noted() if note.startswith("handed")]
        done = max([acked, shop.acked(), *(batch - 1 for batch in handed)])  # rolled forward too
        require_goes_on(shop, done, only_forward=False)
        number += 1
    assert number > 5  # otherwise the loop met nothing


# --- row 11: the disk fails while resources are released ------------------------------------------

RELEASES = """\
import os
from batchrun import Context, job


@job(version=1)
def count(ctx: Context[None]):
    def last_words(name):
        os.mkdir("NOTES/" + name)
        with open("DISK/words", "w") as file:
            os.fsync(file.fileno())

    for name in ("outer", "middle", "inner"):
        ctx.on_exit(last_words, name)
    def read(after, limit):
        return list(range(after or 0, 4))[:limit]

    for batch in ctx.batches(read, key=lambda record: record + 1):
        yield batch
"""


@needs_strace
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-ever"])
def test_a_disk_that_fails_during_cleanup_stops_no_other_cleanup(
    *, sticky: bool, tmp_path: Path, quick: Quick
) -> None:
    shop = Shop(tmp_path / "shop", quick)
    text = RELEASES.replace("NOTES", str(shop.notes)).replace("DISK", str(shop.disk))
    (shop.folder / "jobs" / "count.py").write_text(text)
    config = (shop.folder / "batchrun.toml").read_text().partition("records")[0]
    (shop.folder / "batchrun.toml").write_text(config)
    fault = Fault("fsync", 1, ENOSPC, sticky)
    trace = shop.folder / "1.trace"
    shop.start(*RUN, strace=["-P", str(shop.disk / "words"), *fault.options(trace)])
    ended = shop.finish()
    assert sorted(path.name for path in shop.notes.iterdir()) == ["inner", "middle", "outer"]
    assert ended.code == 3, ended  # everything is committed, and something needs someone
    with opened(shop.state / "ledger.db") as ledger:
        releases = json.loads(str(ledger.execute("SELECT releases FROM attempt").get))
    failed = [entry["error"] for entry in releases if entry["name"] == "last_words"]
    full = "OSError: [Errno 28] No space left on device"
    assert failed == [full, full, full] if sticky else failed == [full, "", ""]
    assert "Everything was committed.\nA cleanup failed: last_words" in ended.err, ended.err


# --- rows 14 and 15: no room, no inodes -----------------------------------------------------------


LEAVE_BYTES = (0, 8192, 40_960, 81_920, 131_072, 262_144, 400_000) if LONG else (0, 40_960, 131_072)


def fill(folder: Path, leave_bytes: int) -> Path:
    """Fill a disk up to some bytes; return what has to be removed to make room again."""
    ballast = folder / "ballast"
    room = os.statvfs(folder)
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - leave_bytes))
    return ballast


def require_disk_full(shop: Shop, ended: Ended) -> None:
    """Check that a full disk was called that, by batchrun or by the job's own target."""
    assert ended.code in (5, 1), ended
    assert "full" in ended.err.lower() or "no space left" in ended.err.lower(), ended.err
    assert not re.search("damaged|corrupt|malformed|lost", ended.err), ended.err
    assert ended.code == 1 or "Traceback" not in ended.err, ended.err
    require_cleaned_up(shop)


@needs_ext4
@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_is_called_that_and_all_goes_on_when_there_is_room(
    kind: str, *, begun: bool, tmp_path: Path, mounted_quick: Quick
) -> None:
    if kind == "ext4":
        place = Disk(tmp_path, "ext4", 16 * 2**20).place
    else:
        place = tmp_path / "mounted"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=0700", "none", str(place)]
        subprocess.run(words, check=True)
    was_full = 0
    for leave_bytes in LEAVE_BYTES:
        disk = place / "d"
        disk.mkdir(mode=0o700)
        shop = Shop(tmp_path / f"{leave_bytes}", mounted_quick, disk, records=200, ahead=True)
        if begun:
            assert shop.run(*RUN, "--batches", "1").code == 75
        before = len(shop.noted())
        acked = shop.acked() + begun
        ballast = fill(place, leave_bytes)
        ended = shop.run()
        if ended.code:
            was_full += 1
            shown = shop.noted()[before:]
            closed = [note for note in shown if note.startswith("closed")]
            assert closed in ([], ["closed outer"], ["closed inner", "closed outer"]), shown
            assert ended.code in (5, 1), ended
            said = ended.err.lower()
            assert "full" in said or "no space left" in said, ended.err
            assert not re.search("damaged|corrupt|malformed|lost", said), ended.err
            seen = shop.run("status", "count")
            assert seen.code in (0, 3, 4, 5), seen
            assert "Traceback" not in seen.err, seen.err
        ballast.unlink()
        if ended.code:
            require_goes_on(shop, max(acked, shop.acked()))
        else:
            require_whole(shop)
        shutil.rmtree(disk)
    assert was_full >= 2


@needs_ext4
def test_a_ledger_is_read_where_blocks_smaller_than_a_page_run_out(
    tmp_path: Path, mounted_quick: Quick
) -> None:
    place = Disk(tmp_path, "ext4", 16 * 2**20).place  # so small that a block has 1,024 bytes
    assert os.statvfs(place).f_frsize == 1_024
    disk = place / "d"
    disk.mkdir(mode=0o700)
    shop = Shop(tmp_path / "shop", mounted_quick, disk, records=200)
    assert shop.run(*RUN).code == 0
    with (place / "ballast").open("wb", buffering=0) as ballast:
        for room_bytes in range(0, 20_480, 2_048):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(1_024))
            ballast.truncate(ballast.tell() - room_bytes)
            ballast.seek(0, os.SEEK_END)
            os.fsync(ballast)
            seen = shop.run("status", "count")
            assert (seen.code, "succeeded" in seen.out) == (0, True), (room_bytes, seen)
            refused = shop.run("cancel", "count")
            assert refused.code == 5, (room_bytes, refused)
            assert "Disk full: the ledger" in refused.err


@needs_mounts
def test_a_disk_without_inodes_is_called_full_and_all_goes_on_when_there_are_some(
    tmp_path: Path, mounted_quick: Quick
) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "none", str(place)], check=True)
    inodes = 1
    while True:
        inodes += 1
        few = ["mount", "-o", f"remount,nr_inodes={inodes}", str(place)]
        subprocess.run(few, check=True)
        target = tmp_path / f"{inodes}.db"
        shop = Shop(tmp_path / f"{inodes}", mounted_quick, place, target)
        ended = shop.run()
        if ended.code == 0:
            break
        require_disk_full(shop, ended)
        more = ["mount", "-o", "remount,nr_inodes=1000", str(place)]
        subprocess.run(more, check=True)
        require_goes_on(shop, shop.acked())
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert inodes > 8


# --- row 16: limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("FSIZE", (512, 16_384, 36_000, 70_000, 120_000)),
        ("NOFILE", tuple(range(5, 16, 1 if LONG else 3))),
    ],
)
def test_a_limit_of_the_system_ends_a_run_in_words_and_the_next_goes_on(
    name: str, values: tuple[int, ...], tmp_path: Path, quick: Quick
) -> None:
    for value in values:
        shop = Shop(tmp_path / f"{value}", quick)
        shop.start(*RUN, limits={name: value})
        ended = shop.finish()
        assert ended.code in (0, 1, 2, 5), f"{name} {value}: {ended}"
        if ended.code == 5:
            assert "Traceback" not in ended.err, f"{name} {value}: {ended.err}"
        if ended.code == 0:
            require_whole(shop)
            continue
        assert not re.search("damaged|corrupt|malformed", ended.err), f"{name} {value}: {ended.err}"
        require_cleaned_up(shop)
        require_goes_on(shop, shop.acked())


# --- rows 17 and 18: slow, and not writable any more ----------------------------------------------


@needs_strace
def test_slow_syncs_make_a_run_slower_and_nothing_else(tmp_path: Path, quick: Quick) -> None:
    shop = Shop(tmp_path / "shop", quick)
    delay = 300_000 if LONG else 40_000
    began = time.monotonic()
    ended = shop.run(fault=Fault("fsync,fdatasync", 1, f"delay_exit={delay}", sticky=True))
    assert ended.code == 0, ended
    assert time.monotonic() - began > 20 * delay / 1e6
    require_whole(shop)


@pytest.mark.skipif(bool(os.geteuid()), reason="NOT ROOT: no folder was made immutable")
def test_a_folder_that_turns_read_only_under_a_run_ends_it_with_a_letter(
    tmp_path: Path, quick: Quick
) -> None:
    shop = Shop(tmp_path / "shop", quick, target=tmp_path / "stock.db", records=10**5)
    shop.start(*RUN)
    wait_for(lambda: shop.acked() >= 2, "a few batches")
    frozen = str(shop.state / "checkpoints" / "count")
    if subprocess.run(["chattr", "+i", frozen], capture_output=True, check=False).returncode:
        shop.run("cancel", "count")
        pytest.skip("NO IMMUTABLE FOLDERS on this file system")
    try:
        ended = shop.finish()
    finally:
        subprocess.run(["chattr", "-i", frozen], check=True)
    assert ended.code == 5, ended
    assert "A checkpoint cannot be read or written in" in ended.err, ended.err
    assert "Operation not permitted" in ended.err, ended.err
    require_cleaned_up(shop)
    acked = shop.acked()
    shutil.rmtree(shop.notes)
    shop.notes.mkdir()
    again = shop.run("resume", "count", "--in-process", "--batches", "1")
    assert again.code == 75, again
    assert_went_on(shop, acked, again)


# --- row 46: somebody sets the clock --------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("cc"), reason="NO C COMPILER: no clock was set")
@pytest.mark.parametrize("step_s", [-7200, 864_000])
def test_a_clock_that_is_set_during_a_run_changes_no_order_and_no_duration(
    step_s: int, tmp_path: Path
) -> None:
    library, offset = tmp_path / "fakewall.so", tmp_path / "offset"
    make = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(FAULTS / "fakewall.c")]
    subprocess.run(make, check=True)
    offset.write_bytes(struct.pack("q", 0))
    shop = Shop(tmp_path / "shop", Plain())
    fake = {"LD_PRELOAD": str(library), "FAKEWALL": str(offset)}
    shop.start("run", "count", point="checkpoint.rename@2=stop", env=fake)

    def held() -> int:
        rows = [int(f.name) for f in Path("/proc").glob("[0-9]*") if state_of(int(f.name)) == "T"]
        return next((pid for pid in rows if str(shop.folder) in command_line(pid)), 0)

    worker = wait_for(held, "the worker to be held in batch 2")
    with offset.open("r+b") as file:
        file.write(struct.pack("q", step_s))
    os.kill(worker, signal.SIGCONT)
    ended = shop.finish()
    assert ended.code == 0, ended
    require_whole(shop)
    with opened(shop.state / "ledger.db") as ledger:
        at = [row[0] for row in ledger.execute("SELECT at FROM batch ORDER BY number")]
        assert (at[1] > at[2]) == (step_s < 0), "the clock was not set"
        spent = ledger.execute("SELECT read_s, work_s, own_s FROM run").fetchall()[0]
        assert all(0 <= float(seconds or 0) < 60 for seconds in spent), spent
        elapsed = [row[0] for row in ledger.execute("SELECT elapsed_s FROM batch")]
        assert all(0 <= float(seconds or 0) < 60 for seconds in elapsed), elapsed
        events = [row[0] for row in ledger.execute("SELECT what FROM event ORDER BY id")]
    assert [what for what in events if what != "target"] == ["started", "running", "succeeded"]
    for words in (("status", "count"), ("report", "count")):
        seen = shop.run(*words, env=fake)
        assert seen.code == 0, seen
        assert not re.search(r"\s-\d", seen.out), seen.out


def command_line(pid: int) -> str:
    """Return what a process was started as; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (OSError, UnicodeDecodeError):
        return ""


# --- row 45: the kernel kills for memory ----------------------------------------------------------

MEMORY = Path("/sys/fs/cgroup/memory")

HUNGRY = """import os
from batchrun import Context, job


@job(version=1)
def count(ctx: Context[None]):
    with open("/proc/self/cgroup") as file:
        ctx.log.info(file.read())
    def read(after, limit):
        return list(range(after or 0, 4))[:limit]

    for batch in ctx.batches(read, key=lambda record: record + 1):
        if batch.number == 2 and ctx.generation == 1:
            with open("LIMITED/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
            hoard = [bytearray(2**20) for _ in range(200)]
        yield batch
"""


@pytest.mark.skipif(
    bool(os.geteuid()) or not (MEMORY / "memory.limit_in_bytes").exists(),
    reason="NOT ROOT OR NO MEMORY CGROUP (v1): no worker was killed for memory",
)
def test_a_worker_killed_for_memory_is_interrupted_and_resumed(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop", Plain())
    limited = MEMORY / f"batchrun-test-{os.getpid()}"
    limited.mkdir()
    try:
        (limited / "memory.limit_in_bytes").write_text(str(60 * 2**20))
        (shop.folder / "jobs" / "count.py").write_text(HUNGRY.replace("LIMITED", str(limited)))
        config = (shop.folder / "batchrun.toml").read_text().partition("records")[0]
        (shop.folder / "batchrun.toml").write_text(config)
        ended = shop.run("run", "count")
        assert ended.code == 1, ended
        assert (
            "failed.\nThe worker was killed by SIGKILL (probably out of memory: peak " in ended.err
        )
        assert " MB) in batch 2 (records 3 to 4, loop main, " in ended.err, ended.err
        assert "Commit 1 stands: 2 records are done." in ended.err, ended.err
        again = shop.run("resume", "count")
        assert again.code == 0, again
    finally:
        wait_for(
            lambda: not (limited / "cgroup.procs").read_text(), "the limited worker to be gone"
        )
        limited.rmdir()
    with opened(shop.state / "ledger.db") as ledger:
        rows = ledger.execute("SELECT number, generation FROM batch ORDER BY number").fetchall()
        assert rows == [(1, 1), (2, 2), (3, 2)]
        assert ledger.execute("SELECT signal FROM attempt WHERE generation = 1").get == 9


# --- growth ---------------------------------------------------------------------------------------


def test_many_kills_leave_nothing_behind(tmp_path: Path, quick: Quick) -> None:
    rounds = 300 if LONG else 40
    shop = Shop(tmp_path / "shop", quick, records=rounds * BATCH)
    points = ("file.fsync", "checkpoint.rename", "checkpoint.fsync", "ledger.committed")
    log = shop.state / "ledger.db-wal"
    for number in range(1, rounds + 1):
        point = points[number % len(points)]
        at = "" if point == "file.fsync" else f"@{number}"
        if point == "file.fsync":
            shop.run("resume" if number > 1 else "run", "count", "--in-process", "--batches", "1")
        ended = shop.run(*RUN, point=f"{point}{at}=kill")
        assert ended.code in (-signal.SIGKILL, 75, 0), ended
        if ended.code == 0:
            break
        assert len(list(shop.state.rglob("*.tmp"))) <= 1
        assert not log.exists() or log.stat().st_size < 2**20
    assert shop.run("resume", "count", "--in-process").code == 0
    require_whole(shop)
    assert sorted(path.name for path in shop.state.iterdir() if path.name != "logs") == [
        "checkpoints",
        "ledger.db",
        "locks",
    ]
    assert shop.state.joinpath("ledger.db").stat().st_size < 2**20


def test_a_long_run_opens_no_more_files_as_it_goes(tmp_path: Path, quick: Quick) -> None:
    shop = Shop(tmp_path / "shop", quick, records=10**5, ahead=True)
    pid = shop.start(*RUN)

    def opened_at(batch: int) -> int:
        wait_for(lambda: shop.acked() >= batch, f"batch {batch}")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: state_of(pid) == "T", "the process to be held")
        found = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        os.kill(pid, signal.SIGCONT)
        return found

    early, late = opened_at(5), opened_at(300)
    os.kill(pid, signal.SIGTERM)
    ended = shop.finish()
    assert ended.code == 75, ended
    assert abs(late - early) <= 1, f"{early} open files at batch 5, {late} at batch 300"
    assert (shop.state / "ledger.db-wal").exists() is False
