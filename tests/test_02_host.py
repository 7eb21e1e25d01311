"""Section 2: gauges of memory, processes, connections. Real processes, sockets; fake trees."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import pytest
from conftest import wait_for

from batchrun import Host, Memory, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

MB = 1_000_000
MIB = 2**20
HOST_KB = {"MemTotal": 8_000_000, "MemFree": 1_000_000, "MemAvailable": 6_000_000, "Buffers": 0}
HOST_KB |= {"Cached": 5_000_000, "Shmem": 0, "Active": 0, "Inactive": 0}
HOST = Memory(6_000_000 * 1024, 8_000_000 * 1024, "host")
UNLIMITED = 2**63 - 4096  # what cgroup v1 says without a limit


class FakeTree(Host):
    """A Host whose /proc and /sys/fs/cgroup are folders of the test."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        lines = [f"{name}: {size} kB" for name, size in HOST_KB.items()]
        self.write("proc/meminfo", "\n".join(lines))

    def write(self, name: str, text: object) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def group_v2(self, group: str, limit: object, used: int, cache: int) -> None:
        folder = f"cgroup{group.rstrip('/')}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", used)
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 7")

    def group_v1(self, group: str, limit: int, used: int, cache: int) -> None:
        folder = f"cgroup/memory{group.rstrip('/')}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}")


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "cache_mib", "wanted"),
    [
        (512 * MIB, 400, Memory(412 * MIB, 512 * MIB, "cgroup /box")),
        (512 * MIB, 20, Memory(32 * MIB, 512 * MIB, "cgroup /box")),
        ("max", 400, HOST),
    ],
)
def test_k37_the_limit_of_a_container_counts_with_its_file_cache_given_back(
    tree: FakeTree, limit: object, cache_mib: int, wanted: Memory
) -> None:
    tree.write("cgroup/cgroup.controllers", "memory")
    tree.write("proc/self/cgroup", "0::/box")
    tree.group_v2("/box", limit, 500 * MIB, cache_mib * MIB)
    assert tree.memory() == wanted


def test_k37_without_any_file_of_control_groups_the_host_counts(tree: FakeTree) -> None:
    assert tree.memory() == HOST


def test_without_any_file_at_all_memory_is_unknown(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path)
    (tree.proc / "meminfo").unlink()
    assert tree.memory() is None
    assert tree.memory_pressure() is None


def test_the_tightest_of_all_groups_above_a_process_counts(tree: FakeTree) -> None:
    tree.write("cgroup/cgroup.controllers", "memory")
    tree.write("proc/17/cgroup", "0::/a/b/c")
    tree.group_v2("/a/b/c", 900 * MIB, 100 * MIB, 0)
    tree.group_v2("/a/b", "max", 100 * MIB, 0)
    tree.group_v2("/a", 1000 * MIB, 950 * MIB, 10 * MIB)
    assert tree.memory(17) == Memory(60 * MIB, 1000 * MIB, "cgroup /a")


def test_inside_a_container_the_limit_is_at_the_root_that_is_seen(tree: FakeTree) -> None:
    tree.write("cgroup/cgroup.controllers", "memory")
    tree.write("proc/self/cgroup", "0::/../../somewhere")
    tree.group_v2("/", 300 * MIB, 100 * MIB, 0)
    assert tree.memory() == Memory(200 * MIB, 300 * MIB, "cgroup /")


def test_control_groups_of_version_1_count_and_their_unlimited_is_no_limit(tree: FakeTree) -> None:
    lines = ["3:cpu,cpuacct:/", "4:memory:/a/b", "0::/"]
    tree.write("proc/self/cgroup", "\n".join(lines))
    tree.group_v1("/a/b", 200 * MIB, 190 * MIB, 100 * MIB)
    tree.group_v1("/a", UNLIMITED, 500 * MIB, 0)
    tree.group_v1("/", UNLIMITED, 500 * MIB, 0)
    assert tree.memory() == Memory(110 * MIB, 200 * MIB, "cgroup /a/b")
    tree.group_v1("/a/b", UNLIMITED, 190 * MIB, 100 * MIB)
    assert tree.memory() == HOST


def test_more_used_than_the_limit_leaves_nothing_and_not_less(tree: FakeTree) -> None:
    tree.write("cgroup/unified/memory.max", "")  # a file that says nothing is no limit
    tree.write("proc/self/cgroup", "4:memory:/a")
    tree.group_v1("/a", 100 * MIB, 120 * MIB, 0)
    assert tree.memory() == Memory(0, 100 * MIB, "cgroup /a")


def test_the_limit_of_the_address_space_of_a_process_counts(tree: FakeTree) -> None:
    tree.write("proc/9/limits", "Max address space         400000000   unlimited       bytes")
    tree.write("proc/9/statm", f"{300 * MB // os.sysconf('SC_PAGE_SIZE')} 5 5 5 0 5 0")
    found = tree.memory(9)
    assert found is not None
    assert (found.limit_bytes, found.source) == (400 * MB, "RLIMIT_AS")
    assert 100 * MB <= found.available_bytes < 101 * MB


def test_a_real_limit_of_the_address_space_is_seen() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))

    with subprocess.Popen(["sleep", "60"], preexec_fn=limit) as process:  # noqa: PLW1509 - no threads
        try:
            found = Host().memory(process.pid)
        finally:
            process.kill()
    assert found is not None
    assert (found.limit_bytes, found.source) == (2**30, "RLIMIT_AS")
    assert 2**30 - 100 * MB < found.available_bytes < 2**30


def test_the_memory_of_this_machine_is_less_than_all_there_is() -> None:
    found = Host().memory()
    assert found is not None
    assert 0 < found.available_bytes <= found.limit_bytes


@pytest.mark.needs_root
def test_a_real_control_group_of_version_1_is_seen() -> None:
    root = Path("/sys/fs/cgroup/memory")
    if os.geteuid() or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("NO CGROUP V1: this machine has no memory controller that root could limit by")
    group = root / f"batchrun_test_{os.getpid()}"
    group.mkdir()
    process = subprocess.Popen(["sleep", "60"])
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * MIB))
        (group / "cgroup.procs").write_text(str(process.pid))
        found = Host().memory(process.pid)
    finally:
        process.kill()
        process.wait()
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()
    assert found is not None
    assert (found.limit_bytes, found.source) == (64 * MIB, f"cgroup /{group.name}")
    assert 32 * MIB < found.available_bytes <= 64 * MIB


def test_pressure_is_what_the_kernel_says_of_the_last_ten_seconds(tree: FakeTree) -> None:
    tree.write("proc/pressure/memory", "some avg10=12.34 avg60=0.00 avg300=0.00 total=5683")
    assert tree.memory_pressure() == 12.34


# --- a process and all below it -------------------------------------------------------------------

FAMILY = """
import os, subprocess, sys, threading
ballast = b"x" * 30_000_000
files = [open(os.devnull) for _ in range(10)]
stop = threading.Event()
for _ in range(3):
    threading.Thread(target=stop.wait, daemon=True).start()
inner = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('.', flush=True); input()"
pipe = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", inner], stdin=pipe, stdout=pipe)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process with 4 threads, 10 files, 30 MB, a child and a grandchild, ready."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_a_process_is_gauged_with_all_that_live_below_it(family: subprocess.Popen[str]) -> None:
    usage = Host().usage(family.pid)
    assert usage is not None
    assert usage.children == 2
    assert usage.threads == 4 + 1 + 1
    assert usage.rss_bytes > 40 * MB
    assert usage.open_files is not None
    assert 10 + 3 + 3 + 3 <= usage.open_files < 40
    assert usage.connections == {}


def test_a_process_that_is_gone_has_no_usage() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert Host().usage(process.pid) is None
    assert Host().children(process.pid) == []


@pytest.mark.needs_root
def test_what_may_not_be_seen_is_none_and_no_error(family: subprocess.Popen[str]) -> None:
    if os.geteuid():
        pytest.skip("NO ROOT: only root can become somebody who may not look")
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setresuid(65_534, 65_534, 65_534)
            usage = Host().usage(family.pid, {"x": [Peer("127.0.0.1", 1)]})
            seen = usage and (usage.open_files, usage.connections, usage.threads)
            os.write(writer, repr(seen).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "(None, {}, 6)"


SPAWN = """
import os, subprocess, sys
for _ in range(200):
    subprocess.Popen(["true"])
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
print("done", flush=True)
sys.stdin.read()
"""


def test_k49_two_hundred_short_lived_children_disturb_no_gauge() -> None:
    host, pipe, slowest_s, seen = Host(), subprocess.PIPE, 0.0, set[int]()
    with subprocess.Popen([sys.executable, "-c", SPAWN], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        while not process.stdout.read():
            began = time.perf_counter()
            usage = host.usage(process.pid, {"x": [Peer("127.0.0.1", 1), Peer("/nowhere")]})
            slowest_s = max(slowest_s, time.perf_counter() - began)
            assert usage is not None
            seen.add(usage.children)
        process.kill()
    assert max(seen) >= 1, "no child was ever seen"
    assert slowest_s < 2


# --- connections ----------------------------------------------------------------------------------

CONNECT = """
import socket, sys
kind, *address = sys.argv[1:]
ends = []
for _ in range(3):
    if kind == "unix":
        end = socket.socket(socket.AF_UNIX); end.connect(address[0])
    else:
        end = socket.socket(getattr(socket, kind)); end.connect((address[0], int(address[1])))
    ends.append(end)
print("ready", flush=True)
sys.stdin.read()
"""


def connected(kind: str, *address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONNECT, kind, *address]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def count(process: subprocess.Popen[str], peers: dict[str, list[Peer]]) -> dict[str, int]:
    with process:
        usage = Host().usage(process.pid, peers)
        process.kill()
    assert usage is not None
    return usage.connections


@pytest.mark.parametrize(
    ("kind", "listen", "connect"),
    [
        ("AF_INET", "127.0.0.1", "127.0.0.1"),
        ("AF_INET6", "::1", "::1"),
        ("AF_INET6", "127.0.0.1", "::ffff:127.0.0.1"),
    ],
)
def test_connections_by_tcp_are_counted_from_outside(kind: str, listen: str, connect: str) -> None:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with (
        socket.create_server((listen, 0), family=family) as here,
        socket.create_server(("", 0)) as b,
    ):
        port, other = here.getsockname()[1], b.getsockname()[1]
        process = connected(kind, connect, str(port))
        peers = {"a": [Peer("10.9.9.9", port), Peer(listen, port)], "b": [Peer("127.0.0.1", other)]}
        assert count(process, peers) == {"a": 3, "b": 0}


def test_connections_to_a_unix_socket_are_counted_from_outside(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        process = connected("unix", path)
        accepted = [server.accept() for _ in range(3)]
        assert count(process, {"a": [Peer(path)], "b": [Peer(str(tmp_path))]}) == {"a": 3, "b": 0}
        for end, _ in accepted:
            end.close()


OPEN = """
import apsw, sys
ends = [apsw.Connection(sys.argv[1]) for _ in range(2)]
for end in ends:
    end.execute("SELECT * FROM t").fetchall()
print("ready", flush=True)
sys.stdin.read()
"""


def test_connections_to_an_sqlite_file_are_its_open_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "stock.db"
    made = apsw.Connection(str(path))
    made.execute("PRAGMA journal_mode = wal; CREATE TABLE t (x)").fetchall()
    made.close()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(path)], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert count(process, {"stock": [Peer(str(path))]}) == {"stock": 2}


def test_a_process_is_known_whatever_bytes_it_calls_itself_by() -> None:
    named = "open('/proc/self/comm', 'wb').write(b'\\xff) Z'); print(flush=True); input()"
    command, pipe = [sys.executable, "-c", named], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        found = Host().identify(process.pid)
        assert found is not None
        assert Host().is_alive(found)
        process.communicate(b"\n")


def test_a_path_lies_on_the_file_system_that_was_mounted_last_and_deepest_above_it() -> None:
    class Mounted(Host):
        def mount_table(self) -> list[str]:
            places = [("/", "ext4"), ("/srv", "xfs"), ("/srv", "btrfs"), ("/srv/a\\040b", "nfs4")]
            return [f"1 0 8:1 / {place} rw shared:1 - {kind} x rw" for place, kind in places]

    places = ("/srv-old/x", "/srv", "/srv/x", "/srv/a b/c", "/")
    kinds = [Mounted().file_system(Path(place)) for place in places]
    assert kinds == ["ext4", "btrfs", "btrfs", "nfs4", "ext4"]
