"""Start batchrun over and over in milliseconds: libraries are loaded once, each start is a fork.

    python -P quick.py FOLDER_OF_BATCHRUN

One JSON line in, `{words, cwd, env, out, err, strace, limits, vfs}`; two lines out: `{"pid": N}`
as soon as it runs, and `{"code": N}` when it has ended (-N for signal N). With `strace` (its
options) the process is traced from its first line on: nothing of an interpreter's start is counted.
Nothing is shared between starts but loaded modules; batchrun has opened nothing before the fork.
`limits` are resource limits, `{"FSIZE": bytes}`; `vfs` fails SQLite's own N-th operation on the
ledger.
"""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

# Everything that a run loads sooner or later.
import logging  # noqa: F401
import pwd  # noqa: F401
import shlex  # noqa: F401
import tomllib  # noqa: F401
import traceback  # noqa: F401

import apsw
import click  # noqa: F401
import filelock  # noqa: F401
import psutil  # noqa: F401

import batchrun

PR_SET_PTRACER, PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class FaultyFile(apsw.VFSFile):
    """A file of the ledger whose operations can fail."""

    def __init__(self, vfs: "FaultyVfs", name: Any, flags: list[int]) -> None:  # noqa: ANN401
        self._vfs = vfs
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        super().__init__("unix", name, flags)

    def xWrite(self, data: bytes, where: int) -> None:  # noqa: N802
        self._vfs.hit("xWrite", self._name, apsw.FullError)
        super().xWrite(data, where)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._vfs.hit("xSync", self._name, apsw.IOError)
        super().xSync(flags)

    def xRead(self, amount: int, where: int) -> bytes:  # noqa: N802
        self._vfs.hit("xRead", self._name, apsw.IOError)
        return super().xRead(amount, where)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self._vfs.hit("xTruncate", self._name, apsw.IOError)
        super().xTruncate(size)


class FaultyVfs(apsw.VFS):
    """SQLite's way to the disk: fails the `at`-th operation, or all from it on."""

    def __init__(self, operation: str, at: int, sticky: bool, fired: str) -> None:  # noqa: FBT001
        self._operation, self._at, self._sticky, self._fired = operation, at, sticky, fired
        self._count = 0
        super().__init__("faulty", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> FaultyFile:  # noqa: ANN401, N802
        self.hit("xOpen", str(name), apsw.CantOpenError)
        return FaultyFile(self, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: FBT001, N802
        self.hit("xDelete", name, apsw.IOError)
        super().xDelete(name, sync)

    def hit(self, operation: str, name: str, error: type[apsw.Error]) -> None:
        """Count an operation on the ledger, and let it fail if it is its turn."""
        if operation != self._operation or "ledger.db" not in name:
            return
        self._count += 1
        if self._count == self._at or (self._sticky and self._count > self._at):
            Path(self._fired).write_text(f"{operation} {name}")
            message = f"injected into {operation} {self._count}"
            raise error(message)


def become_batchrun(order: dict[str, Any], go: int) -> None:
    """Be the command line of an order, from the moment that the parent says go."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, PTRACER_ANY, 0, 0, 0)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    batchrun.NAMED_POINT = os.environ.get("BATCHRUN_TEST_POINT", "")
    for descriptor, path in ((1, order["out"]), (2, order["err"])):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(made, descriptor)
        os.close(made)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.argv = ["batchrun", *order["words"]]
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    vfs = FaultyVfs(**order["vfs"]) if order["vfs"] else None
    os.read(go, 1)
    os.close(go)
    try:
        batchrun.main()
    finally:
        if vfs:
            vfs.unregister()


def is_traced(pid: int) -> bool:
    """Tell whether strace holds a process."""
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()


def tell(**document: int) -> None:
    """Write one line to whoever asked."""
    os.write(1, f"{json.dumps(document)}\n".encode())


def serve() -> None:
    """Answer orders until there are no more."""
    while line := sys.stdin.readline():
        order = json.loads(line)
        ready, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go)
            return become_batchrun(order, ready)
        os.close(ready)
        strace = None
        if order["strace"]:
            strace = subprocess.Popen(["strace", "-qq", *order["strace"], "-p", str(pid)])
            while not is_traced(pid) and strace.poll() is None:
                time.sleep(0.001)
        tell(pid=pid)
        with contextlib.suppress(BrokenPipeError):  # the fault has killed it before its first line
            os.write(go, b"!")
        os.close(go)
        _, status = os.waitpid(pid, 0)
        if strace:
            strace.wait()
        tell(code=os.waitstatus_to_exitcode(status))
    return None


serve()
