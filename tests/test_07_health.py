"""Section 7: factors, verdicts, hysteresis, leaks; probes against real servers, dead and alive."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw
import pytest
from conftest import ROOT, Project, wait_for

import batchrun
from batchrun import (
    DISK,
    FACTORS,
    GROWTH,
    Answer,
    Factor,
    Growth,
    HealthConfig,
    HealthMonitor,
    Host,
    Inquiry,
    Memory,
    Need,
    Peer,
    Usage,
    Wellness,
    disk_answer,
    load_config,
    memory_factor,
    needs_factor,
    size_text,
    verdict_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OK, BAD, UNKNOWN = Wellness.OK, Wellness.BAD, Wellness.UNKNOWN
MB = 1_000_000
HEALTH = HealthConfig((), 60, 180, 10, 3, 2, 64 * MB, ())
CACHE = Need("dependencies", "cache", "tcp://10.0.0.5:6379", 5, critical=False, jobs=())
STOCK = Need("connections", "stock", "sqlite:stock.db", 5, critical=False, jobs=(), normal=4)


def usage(rss_bytes: int = 0, **connections: int) -> Usage:
    return Usage(rss_bytes, 0, 1, 0, connections)


def answer(need: Need, state: Wellness, why: str = "") -> tuple[Need, Answer]:
    return need, Answer(need.name, state, why)


# --- factors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "state", "critical", "more"),
    [
        *[(64 * MB, OK, False, ""), (64 * MB - 1, BAD, False, ""), (16 * MB, BAD, False, "")],
        (16 * MB - 1, BAD, True, ", about to be killed"),
    ],
)
def test_memory_is_bad_below_min_available_and_critical_below_a_quarter_of_it(
    left: int,
    state: Wellness,
    critical: bool,  # noqa: FBT001 - pytest gives it by name
    more: str,
) -> None:
    why = f"{size_text(left)} available of 512 MB (cgroup /x){more}"
    found = memory_factor(Memory(left, 512 * MB, "cgroup /x"), usage(), HEALTH)
    assert found == Factor("memory", state, why, critical)


def test_memory_is_bad_if_the_worker_uses_more_than_its_max_rss() -> None:
    plenty = Memory(8000 * MB, 9000 * MB, "host")
    found = memory_factor(plenty, usage(900 * MB), HEALTH, max_rss_bytes=800 * MB)
    assert found == Factor("memory", BAD, "the worker uses 900 MB, over its max_rss of 800 MB")
    assert memory_factor(plenty, usage(900 * MB), HEALTH).state == OK
    assert memory_factor(None, usage(900 * MB), HEALTH, max_rss_bytes=800 * MB).state == BAD


def test_memory_that_is_about_to_be_gone_is_critical_whatever_the_worker_uses() -> None:
    little = Memory(5 * MB, 512 * MB, "cgroup /x")
    found = memory_factor(little, usage(900 * MB), HEALTH, max_rss_bytes=800 * MB)
    assert found == memory_factor(little, None, HEALTH)
    assert found.critical


def test_memory_that_cannot_be_read_is_unknown() -> None:
    assert str(memory_factor(None, None, HEALTH)) == "unknown: what is left cannot be read"


def test_connections_are_bad_if_a_database_is_or_has_too_many_or_they_grow() -> None:
    def judged(*pairs: tuple[Need, Answer], **connections: int) -> str:
        return str(needs_factor("connections", pairs, HEALTH, usage(**connections)))

    assert judged() == judged(answer(CACHE, BAD)) == "ok: none is declared"
    assert judged(answer(STOCK, OK), stock=4) == "ok: all answer"
    assert judged(answer(STOCK, OK)) == "ok: all answer"
    many = "bad: stock sqlite:stock.db 5 connections, 4 are normal"
    assert judged(answer(STOCK, OK), stock=5) == many
    assert judged(answer(STOCK._replace(normal=0), OK), stock=5) == "ok: all answer"
    assert judged(answer(STOCK, BAD, "is not there")) == "bad: stock sqlite:stock.db is not there"
    assert judged(answer(STOCK, UNKNOWN, "why")) == "unknown: stock sqlite:stock.db why"
    grew = "connections grew 2 a batch over 12 batches"
    assert judged(answer(STOCK, OK), answer(GROWTH, BAD, grew)) == f"bad: {grew}"


def test_dependencies_are_as_well_as_the_worst_of_them() -> None:
    other = CACHE._replace(name="other", url="", command=("test", "-d", "/srv/a b"), critical=True)
    low = (DISK, disk_answer(1 * MB, 16 * MB))

    def judged(*pairs: tuple[Need, Answer]) -> Factor:
        return needs_factor("dependencies", pairs, HEALTH)

    assert judged(answer(CACHE, BAD, "refuses connections"), answer(other, UNKNOWN, "?")) == Factor(
        "dependencies", BAD, "cache tcp://10.0.0.5:6379 refuses connections"
    )
    assert judged(answer(CACHE, OK), answer(other, BAD, "ended with exit 1")) == Factor(
        "dependencies", BAD, "other test -d '/srv/a b' ended with exit 1", critical=True
    )
    assert judged(low) == Factor(
        "dependencies",
        BAD,
        "the state folder's disk has 1.0 MB free, min_free is 16 MB",
        critical=True,
    )
    assert judged((DISK, disk_answer(16 * MB, 16 * MB))).state == OK


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_the_configuration_calls_critical_is_so_only_if_it_is_bad(name: str) -> None:
    health = HEALTH._replace(critical=(name,))
    for state in Wellness:
        left = {OK: Memory(9**9, 9**9, "host"), BAD: Memory(20 * MB, 9**9, "host"), UNKNOWN: None}
        factors = [
            memory_factor(left[state], None, health),
            needs_factor("connections", [answer(STOCK, state)], health),
            needs_factor("dependencies", [answer(CACHE, state)], health),
        ]
        assert [f.state for f in factors] == [state] * 3
        assert [f.name for f in factors if f.critical] == [name] * (state == BAD)


# --- verdicts -------------------------------------------------------------------------------------

STATES = [*[(state, False) for state in Wellness], (BAD, True)]


@pytest.mark.parametrize("states", list(itertools.product(STATES, repeat=3)))
def test_two_bad_factors_pause_or_one_that_is_critical_and_nothing_else(
    states: Sequence[tuple[Wellness, bool]],
) -> None:
    factors = [
        Factor(name, state, f"why {name}", critical=critical)
        for name, (state, critical) in zip(FACTORS, states, strict=True)
    ]
    bad = [factor.name for factor in factors if factor.state == BAD]
    wanted = len(bad) > 1 or any(critical for _, critical in states)
    found = verdict_of(factors)
    assert found.pause == wanted
    assert [name for name in FACTORS if f"{name}: why {name}" in found.why] == bad


def test_a_verdict_says_why_in_one_line() -> None:
    memory = memory_factor(Memory(32 * MB, 512 * MB, "cgroup /x"), None, HEALTH)
    cache = needs_factor("dependencies", [answer(CACHE, BAD, "refuses connections")], HEALTH)
    low = "memory: 32 MB available of 512 MB (cgroup /x)"
    down = "dependencies: cache tcp://10.0.0.5:6379 refuses connections"
    assert verdict_of([memory, cache]) == (True, f"two factors are bad: {low}; {down}")
    assert verdict_of([cache._replace(critical=True)]) == (
        True,
        f"a critical factor is bad: {down}",
    )
    assert verdict_of([cache._replace(wanted=True)]) == (
        True,
        f"a declared need is bad: {down}; no attempt begins until it answers",
    )
    assert verdict_of([cache]) == (False, f"one factor is bad, which alone does not pause: {down}")
    assert verdict_of([]) == (False, "well")


# --- hysteresis -----------------------------------------------------------------------------------


def factors_of(state: Wellness, count: int = 2, *, critical: bool = False) -> list[Factor]:
    """Return the three factors, the first `count` of them in this state, the others ok."""
    states = [state] * count + [OK] * (3 - count)
    both = zip(FACTORS, states, strict=True)
    return [Factor(name, s, f"is {s}", critical and s == BAD) for name, s in both]


def watched(*checks: list[Factor], health: HealthConfig = HEALTH) -> list[str]:
    """Return what is told over a series of checks, `-` where nothing is."""
    monitor = HealthMonitor(health, lambda: 0.5)
    return [monitor.judge(factors) or "-" for factors in checks]


def pauses(told: list[str]) -> tuple[int, int]:
    """Count the pauses and the goings on that were told."""
    verdicts = [line.split(":")[1].strip() for line in told if line != "-"]
    changes = [a for a, b in itertools.pairwise(["go on", *verdicts]) if a != b]
    return changes.count("go on"), changes.count("pause")


def test_k28_flapping_is_not_told_and_does_not_pause() -> None:
    told = watched(*[factors_of(BAD), factors_of(OK)] * 12)
    assert told == ["-"] * 24


def test_k28_three_bad_checks_pause_and_two_good_ones_go_on() -> None:
    told = watched(*[factors_of(BAD)] * 3, *[factors_of(OK)] * 2)
    both = "memory: is bad; connections: is bad"
    well = "memory: is ok; connections: is ok"
    assert told == [
        *["-", "-", f"health: pause: two factors are bad: {both}"],
        *["-", f"health: go on: well; well again: {well}"],
    ]
    assert pauses(told) == (1, 1)


def test_k28_what_is_unknown_never_pauses() -> None:
    assert watched(*[factors_of(UNKNOWN, 3)] * 3) == ["-"] * 3
    broken = [factors_of(BAD), factors_of(BAD), factors_of(UNKNOWN)] * 4
    assert watched(*broken) == ["-"] * 12


def test_what_has_become_bad_does_not_become_good_by_being_unknown() -> None:
    told = watched(*[factors_of(BAD)] * 3, *[factors_of(UNKNOWN)] * 20)
    assert pauses(told) == (1, 0)


def test_factors_that_are_bad_in_turn_neither_pause_a_run_nor_let_a_paused_one_go_on() -> None:
    paused = [factors_of(BAD)] * 3
    in_turn = [
        [Factor("memory", BAD, ""), Factor("connections", OK, "")],
        [Factor("memory", OK, ""), Factor("connections", BAD, "")],
    ] * 4
    assert pauses(watched(*in_turn)) == (0, 0)
    assert pauses(watched(*paused, *in_turn)) == (1, 0)


def test_one_bad_factor_is_told_and_goes_on() -> None:
    told = watched(*[factors_of(BAD, 1)] * 9)
    alone = "health: go on: one factor is bad, which alone does not pause: memory: is bad"
    assert told == ["-", "-", alone, *["-"] * 6]


def test_a_critical_factor_pauses_at_the_first_bad_check() -> None:
    told = watched(factors_of(BAD, 1, critical=True), *[factors_of(OK)] * 2)
    assert told[0] == "health: pause: a critical factor is bad: memory: is bad"
    assert pauses(told) == (1, 1)


def test_k28_a_factor_that_is_critical_now_and_then_pauses_once_and_not_each_time() -> None:
    critical, bad = factors_of(BAD, 1, critical=True), factors_of(BAD, 1)
    assert pauses(watched(*[critical, bad] * 12)) == (1, 0)
    assert pauses(watched(*[critical, bad, factors_of(OK)] * 8)) == (1, 0)
    told = watched(critical, bad, bad)
    alone = "one factor is bad, which alone does not pause: memory: is bad"
    assert told[1:] == ["-", f"health: go on: {alone}"]


def test_a_bad_check_is_made_again_in_seconds_then_more_slowly() -> None:
    monitor = HealthMonitor(HEALTH, lambda: 0.5)

    def wait_s(factors: list[Factor]) -> float:
        monitor.judge(factors)
        return monitor.wait_s()

    assert wait_s(factors_of(OK)) == 180
    assert [wait_s(factors_of(BAD)) for _ in range(7)] == [10, 20, 40, 80, 160, 180, 180]
    assert [wait_s(factors_of(OK)) for _ in range(3)] == [10, 180, 180]


def test_waits_are_spread_by_a_quarter() -> None:
    for drawn, wanted_s in ((0.0, 135.0), (0.5, 180.0), (1.0, 225.0)):
        monitor = HealthMonitor(HEALTH, lambda drawn=drawn: drawn)  # type: ignore[misc]
        assert monitor.wait_s() == wanted_s


# --- leaks ----------------------------------------------------------------------------------------


def growth(gauge: str, values: Sequence[int], every: int = 1) -> Growth | None:
    """Return how a gauge leaks that was read after each batch, or after every few."""
    return batchrun.growth(gauge, [(every * n, used) for n, used in enumerate(values)])


def test_a_leak_is_found_where_a_gauge_is_read_only_now_and_then() -> None:
    found = growth("connections", range(15), every=50)
    assert str(found) == "connections grew 0.02 a batch over 551 batches"


def test_twelve_batches_of_a_leak_are_named_with_their_slope() -> None:
    values = [100 * MB] * 3 + [100 * MB + 31 * MB * n for n in range(12)]
    assert str(growth("rss_bytes", values)) == "rss grew 31 MB a batch over 12 batches"
    assert growth("rss_bytes", values[:-1]) is None
    counts = [7, 7, 7, *range(8, 20)]
    assert str(growth("open_files", counts)) == "open files grew 1 a batch over 12 batches"


@pytest.mark.parametrize("every", [2, 3, 4, 6, 12])
def test_a_leak_that_is_not_in_every_batch_is_found(every: int) -> None:
    found = [growth("connections", [n // every for n in range(count)]) for count in range(3, 200)]
    assert any(found)
    slopes = [each.slope for each in found if each]
    assert all(0.5 / every < slope < 2 / every for slope in slopes)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_under_noise_is_found(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - repeatable
    values = [int((200 + 20 * n + draw.gauss(0, 20)) * MB) for n in range(51)]
    found = [growth("rss_bytes", values[:count]) for count in range(15, 52)]
    slopes = [each.slope for each in found if each]
    assert slopes
    assert 15 * MB < slopes[-1] < 25 * MB


@pytest.mark.parametrize("seed", range(10))
def test_noise_saw_teeth_steps_and_warming_up_are_no_leak(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - repeatable
    period, count = draw.randint(2, 11), 150
    shapes: dict[str, list[float]] = {
        "noise": [300 + draw.gauss(0, 40) for _ in range(count)],
        "saw tooth": [300 + 30 * ((n + seed) % period) + draw.gauss(0, 3) for n in range(count)],
        "long saw tooth, known": [300 + 30 * (n % 40) for n in range(40, 43 + count)],
        "one step": [
            300 + 400 * (n > draw.randint(20, 90)) + draw.gauss(0, 2) for n in range(count)
        ],
        "warming up": [300 + 500 * (1 - 0.7**n) + draw.gauss(0, 1) for n in range(count)],
        "warming up slowly": [300 + 500 * (1 - 0.9**n) for n in range(count)],
    }
    for shape, values in shapes.items():
        first = 45 if "known" in shape else 12
        for upto in range(first, count):
            found = growth("rss_bytes", [int(each * MB) for each in values[:upto]])
            assert found is None, f"{shape} at {upto}: {found}"


def test_of_a_hundred_random_walks_of_memory_few_are_called_a_leak() -> None:
    called = 0
    for seed in range(100):
        draw = random.Random(seed)  # noqa: S311 - repeatable
        values = [
            *itertools.accumulate(
                (int(draw.gauss(0, 10 * MB)) for _ in range(150)), initial=2000 * MB
            )
        ]
        called += any(growth("rss_bytes", values[:upto]) for upto in range(15, 151))
    assert called <= 4


# --- probes ---------------------------------------------------------------------------------------


def need(url: str | dict[str, object] = "", *, limit_s: float = 5, **more: Any) -> Need:  # noqa: ANN401 - any field
    return Need(
        "dependencies", more.pop("name", "it"), url, limit_s, critical=False, jobs=(), **more
    )


def asked(*needs: Need, folder: Path = ROOT) -> dict[str, Answer]:
    """Ask, and return the answers; fail if a process is left behind."""
    before = set(Host().children())
    found = Inquiry(needs, folder, Host()).wait()
    assert set(Host().children()) <= before
    return found


def said(one: Need, folder: Path = ROOT) -> str:
    return all_said(one, folder=folder)[0]


def all_said(*needs: Need, folder: Path = ROOT) -> list[str]:
    """Ask in one round, and return what came back, in the order of the needs."""
    numbered = [each._replace(name=str(number)) for number, each in enumerate(needs)]
    found = asked(*numbered, folder=folder)
    return [f"{found[each.name].state}: {found[each.name].why}" for each in numbered]


@contextlib.contextmanager
def listener(backlog: int = 8) -> Iterator[tuple[socket.socket, int]]:
    """Listen and accept nothing: the kernel takes connections until the backlog is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server, server.getsockname()[1]


def closed_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def answering(*replies: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one connection: read, send a reply, and so on; yield the port and what was read."""
    heard: list[bytes] = []
    with listener() as (server, port):

        def serve() -> None:
            with contextlib.suppress(OSError):
                end, _ = server.accept()
                with end:
                    for reply in replies:
                        heard.append(end.recv(4096))
                        end.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port, heard
        thread.join(5)


def test_a_listener_is_well_and_its_address_is_what_connections_are_counted_by() -> None:
    with listener() as (_, port):
        (found,) = asked(need(f"tcp://127.0.0.1:{port}")).values()
    assert (found.state, found.why) == (OK, "takes connections")
    assert found.peers == (Peer("127.0.0.1", port),)
    assert 0 < found.elapsed_s < 5


def test_a_port_where_nobody_listens_refuses() -> None:
    schemes = ("tcp", "http", "https", "redis", "postgresql")
    needs = [need(f"{scheme}://127.0.0.1:{closed_port()}") for scheme in schemes]
    assert all_said(*needs) == ["bad: refuses connections"] * 5


def test_a_listener_that_accepts_and_never_answers_is_bad() -> None:
    with listener() as (_, port):
        schemes = ("http", "https", "redis", "postgresql")
        needs = [need(f"{scheme}://127.0.0.1:{port}/x", limit_s=0.5) for scheme in schemes]
        assert all_said(*needs) == ["bad: gives no answer within 0.5 s"] * 4


def test_a_tcp_probe_does_not_see_that_a_server_is_frozen_and_the_others_do() -> None:
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)"
    code += "; print(s.server_port, flush=True); s.serve_forever()"
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=nothing) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        http, tcp = f"http://127.0.0.1:{port}/", f"tcp://127.0.0.1:{port}"
        assert said(need(http)) == "ok: answers HTTP 200"
        server.send_signal(signal.SIGSTOP)
        frozen = all_said(need(http, limit_s=0.5), need(tcp))
        assert frozen == ["bad: gives no answer within 0.5 s", "ok: takes connections"]
        server.kill()


def test_a_full_backlog_is_no_answer() -> None:
    with listener(0) as (server, port), contextlib.ExitStack() as held:
        for _ in range(8):
            end = held.enter_context(socket.socket())
            end.settimeout(0)
            end.connect_ex(server.getsockname())
        found = said(need(f"tcp://127.0.0.1:{port}", limit_s=0.5))
    assert found == "bad: gives no answer within 0.5 s"


def test_unix_sockets_are_well_refuse_are_full_or_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert said(need("unix:s"), folder=tmp_path) == "bad: is not there"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        for url in (f"unix:{path}", f"unix://{path}"):
            assert said(need(url)) == "bad: refuses connections"
        server.listen(0)
        (found,) = asked(need("unix:s"), folder=tmp_path).values()
        assert (found.state, found.why, found.peers) == (
            OK,
            "takes connections",
            (Peer(str(path)),),
        )
        full = "bad: takes no more connections, its backlog is full"
        assert said(need(f"unix:{path}")) == full  # the probe before was never accepted


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers with the code that is asked for; notes who asks."""

    asked_by: tuple[str | None, ...] = ()

    def do_GET(self) -> None:
        type(self).asked_by = (self.path, self.headers["Authorization"], self.headers["User-Agent"])
        self.send_response(int(self.path[1:4]))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    """The host and port of an HTTP server: /CODE answers with that code."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_http_is_well_if_it_answers_as_expected(web: str) -> None:
    urls = [f"http://{web}/200", f"http://{web}/503", f"http://ada:a%20b@{web}/200?deep=yes"]
    answers = all_said(need(f"http://{web}/301", expect=301), *map(need, urls[:2]))
    assert answers == [
        "ok: answers HTTP 301",
        "ok: answers HTTP 200",
        "bad: answers HTTP 503 instead of 200",
    ]
    assert said(need(urls[2])) == "ok: answers HTTP 200"
    path, login, by = Ready.asked_by
    assert (path, login, by) == ("/200?deep=yes", "Basic YWRhOmEgYg==", "batchrun/0.1.0")


def test_https_that_speaks_no_tls_is_bad(web: str) -> None:
    assert said(need(f"https://{web}/200")).startswith("bad: cannot be reached: [SSL")


def test_redis_is_asked_to_answer_ping() -> None:
    with (
        answering(b"+PONG\r\n") as (good, heard),
        answering(b"+OK\r\n", b"-LOADING wait\r\n") as (loading, login),
        answering(b"") as (silent, _),
    ):
        needs = [need(f"redis://127.0.0.1:{good}"), need(f"redis://127.0.0.1:{silent}")]
        needs.append(need(f"redis://ada:S3cr3t@127.0.0.1:{loading}"))
        assert all_said(*needs) == [
            "ok: answers PING with PONG",
            "bad: answers PING with nothing",
            "bad: answers PING with -LOADING wait",
        ]
    assert heard == [b"*1\r\n$4\r\nPING\r\n"]
    assert login[0] == b"*3\r\n$4\r\nAUTH\r\n$3\r\nada\r\n$6\r\nS3cr3t\r\n"


def test_an_sqlite_file_is_well_if_it_can_be_read(tmp_path: Path) -> None:
    assert said(need("sqlite:stock.db"), folder=tmp_path) == "bad: is not there"
    made = apsw.Connection(str(tmp_path / "stock.db"))
    made.execute("CREATE TABLE a (x); CREATE TABLE b (x)").fetchall()
    (found,) = asked(need("sqlite:stock.db"), folder=tmp_path).values()
    assert (found.state, found.why) == (OK, "can be read, 2 tables")
    assert found.peers == (Peer(str(tmp_path / "stock.db")),)
    made.execute("BEGIN EXCLUSIVE")
    busy = said(need("sqlite:stock.db", limit_s=0.3), folder=tmp_path)
    assert busy in (
        "bad: gives no answer within 0.3 s",
        "bad: does not answer as it should: database is locked",
    )
    made.close()
    (tmp_path / "stock.db").write_text("no database at all, but long enough to be read as one" * 99)
    broken = said(need("sqlite:stock.db"), folder=tmp_path)
    assert broken == "bad: does not answer as it should: file is not a database"


def test_postgresql_answers_or_does_not_let_in(postgres_dsn: str) -> None:
    (found,) = asked(need(postgres_dsn)).values()
    assert (found.state, found.why) == (OK, "answers SELECT 1")
    assert [peer.address for peer in found.peers] == ["127.0.0.1"]
    wrong = postgres_dsn.rpartition("/")[0] + "/no_such_database"
    assert 'database "no_such_database" does not exist' in said(need(wrong))


def test_connections_to_postgresql_are_counted_by_what_the_probe_found(postgres_dsn: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    peers = asked(need(postgres_dsn))["it"].peers

    def count() -> int:
        used = Host().usage(os.getpid(), {"stock": peers})
        assert used is not None
        return used.connections["stock"]

    before = count()  # those of the fixture
    ends = [psycopg.connect(postgres_dsn) for _ in range(3)]
    assert count() == before + 3
    for end in ends:
        end.close()
    assert count() == before


def test_a_command_is_well_if_it_ends_with_0_and_its_last_line_says_why_not(tmp_path: Path) -> None:
    scripts = ("exit 0", "echo one; echo two >&2; exit 3", "kill -9 $$")
    needs = [need(command=("sh", "-c", script)) for script in scripts]
    needs.append(need(command=("./no_such",)))
    needs.append(need(command=("yes",), limit_s=0.5))
    assert all_said(*needs, folder=tmp_path) == [
        "ok: ended with exit 0",
        "bad: ended with exit 3: two",
        "bad: was killed by signal 9",
        "unknown: cannot be asked: No such file or directory",
        "bad: gives no answer within 0.5 s",
    ]


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    words = ("sh", "-c", "sleep 987 & sleep 986 & echo $! > started; wait")
    found = said(need(command=words, limit_s=1), folder=tmp_path)
    assert found == "bad: gives no answer within 1 s"
    pid = int((tmp_path / "started").read_text())
    wait_for(
        lambda: not Path(f"/proc/{pid}").exists() or Host()._stat_fields(pid)[:1] == ["Z"],
        "the command's own child to be gone",
    )


def test_one_probe_that_hangs_loses_only_itself() -> None:
    with listener() as (_, silent), listener() as (_, good):
        inquiry = Inquiry(
            [
                need(f"http://127.0.0.1:{silent}/", limit_s=30, name="silent"),
                need(command=("sleep", "100"), limit_s=0.5, name="hangs"),
                need(f"tcp://127.0.0.1:{good}", name="good"),
                need(f"tcp://127.0.0.1:{closed_port()}", name="closed"),
            ],
            ROOT,
            Host(),
        )
        began = time.monotonic()
        wait_for(lambda: inquiry.poll() or len(inquiry.answers) == 3, "three answers")
        assert time.monotonic() - began < 10
        assert {name: each.state for name, each in inquiry.answers.items()} == {
            "good": OK,
            "closed": BAD,
            "hangs": BAD,
        }
        inquiry.end()
    assert str(inquiry.answers["silent"].state) == "unknown"
    assert inquiry.answers["silent"].why == "was not asked to the end"


def test_an_answer_that_comes_after_its_time_does_not_count() -> None:
    late = need(command=("sleep", "0.5"), limit_s=0.1, name="late")
    found = asked(late, need(command=("sleep", "1"), name="slow"))
    assert (found["late"].state, found["late"].why) == (BAD, "gives no answer within 0.1 s")
    assert found["slow"].state == OK


def test_polling_never_waits() -> None:
    with listener() as (_, silent):
        inquiry = Inquiry([need(f"http://127.0.0.1:{silent}/", limit_s=0.7)], ROOT, Host())
        slowest_s = 0.0

        def polled() -> bool:
            nonlocal slowest_s
            began = time.thread_time()
            is_over = inquiry.poll()
            slowest_s = max(slowest_s, (time.thread_time() - began) * (not is_over))
            return is_over

        wait_for(polled, "the probe to be given up")
    assert slowest_s < 0.05


def test_probes_whose_process_dies_are_unknown() -> None:
    with listener() as (_, silent):
        before = set(Host().children())
        inquiry = Inquiry([need(f"http://127.0.0.1:{silent}/", limit_s=30)], ROOT, Host())
        (child,) = set(Host().children()) - before
        os.kill(child, signal.SIGKILL)
        wait_for(inquiry.poll, "the end of the round")
    assert inquiry.answers["it"].why == "cannot be asked: the probes' process went away"
    assert inquiry.answers["it"].state == UNKNOWN


class LateHost(Host):
    """A Host whose clock the test sets."""

    late_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.late_s


def test_probes_whose_process_is_frozen_are_given_up_and_killed() -> None:
    host, before = LateHost(), set(Host().children())
    inquiry = Inquiry([need("tcp://127.0.0.1:1", limit_s=5)], ROOT, host)
    (child,) = set(Host().children()) - before
    os.kill(child, signal.SIGSTOP)
    assert not inquiry.poll()
    host.late_s = 16
    assert inquiry.poll()
    assert inquiry.answers["it"].why == "cannot be asked: the probes' process does not get on"
    assert not Path(f"/proc/{child}").exists()


def test_a_round_that_cannot_be_started_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchrun, "NAMED_POINT", "probe.start=EAGAIN")
    found = said(need("tcp://127.0.0.1:1"))
    assert found == "unknown: cannot be asked: at a named point"


def test_the_probes_end_with_the_process_that_asks(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import batchrun
from pathlib import Path
words = ("sh", "-c", "echo $$ > started; sleep 985")
need = batchrun.Need("dependencies", "it", "", 60, False, (), words)
batchrun.Inquiry([need], Path({str(tmp_path)!r}), batchrun.Host())
import time; time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as asker:
        started = tmp_path / "started"
        wait_for(lambda: started.exists() and started.read_text().strip(), "the command to run")
        asker.kill()
    pid = int(started.read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the command to be gone")


def test_no_password_is_on_a_command_line_or_in_an_answer() -> None:
    before = set(Host().children())
    with listener() as (_, silent):
        urls = [f"{scheme}://ada:S3cr3t@127.0.0.1:{silent}/x" for scheme in ("postgresql", "http")]
        needs = [need(url, name=url[:4], limit_s=1) for url in urls]
        inquiry = Inquiry(needs, ROOT, Host())
        (child,) = set(Host().children()) - before
        line, place = Path(f"/proc/{child}/cmdline"), Path(f"/proc/{child}/environ")
        wait_for(lambda: b"probe_main" in line.read_bytes(), "the probes to have begun")
        shown = line.read_bytes() + place.read_bytes()
        assert b"S3cr3t" not in shown
        assert "S3cr3t" not in str(inquiry.wait())
    assert batchrun.asked(needs[1]) == f"http http://ada:***@127.0.0.1:{silent}/x"


def test_an_address_is_read_each_time_and_unknown_if_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = need({"env": "BATCHRUN_TEST_URL"})
    assert said(elsewhere) == "unknown: the environment variable BATCHRUN_TEST_URL is not set"
    monkeypatch.setenv("BATCHRUN_TEST_URL", f"tcp://127.0.0.1:{closed_port()}")
    assert said(elsewhere) == "bad: refuses connections"
    monkeypatch.setenv("BATCHRUN_TEST_URL", "gopher://x")
    assert said(elsewhere).startswith("unknown: an address that begins with one of tcp:, http:")
    monkeypatch.setenv("BATCHRUN_TEST_URL", "")
    assert said(elsewhere) == "unknown: its address is empty"
    assert said(elsewhere._replace(suffix="/start")) == "unknown: its address is empty"
    monkeypatch.setenv("BATCHRUN_TEST_URL", f"tcp://127.0.0.1:{closed_port()}")
    assert said(elsewhere._replace(factor="alerts")) == (
        "unknown: an address that begins with one of http://, https:// is wanted"
    )


@pytest.mark.parametrize("url", ["http://h/p/S3CRET TOKEN", "http://h:S3CRETPORT/p", "http://[S3C"])
def test_an_address_from_elsewhere_that_cannot_be_read_is_unknown_and_not_quoted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRUN_TEST_URL", url)
    why = said(need({"env": "BATCHRUN_TEST_URL"}))
    assert why.startswith("unknown: an address with")
    assert "S3C" not in why


def test_no_words_of_a_parser_of_addresses_are_in_an_answer() -> None:
    with listener() as (_, port):
        why = said(need(f"http://127.0.0.1:{port}/p/S3CRET TOKEN"))
    assert why == "bad: cannot be asked as it is written (InvalidURL)"
    assert said(need("http://h:S3CRET/")) == "bad: cannot be asked as it is written (ValueError)"


def test_a_name_that_does_not_exist_is_bad() -> None:
    assert said(need("tcp://no-such-host.invalid:80")).startswith(
        "bad: its name cannot be resolved: "
    )


@pytest.mark.needs_root
def test_a_resolver_that_never_answers_is_bad(tmp_path: Path) -> None:
    if os.geteuid() or subprocess.run(["unshare", "-mn", "true"], check=False).returncode:
        pytest.skip(
            "NO NAMESPACES: only root can put a silent resolver in the place of the real one"
        )
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:3\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    (tmp_path / "ask.py").write_text(
        f"""
import socket, sys; sys.path.insert(0, {str(ROOT)!r})
import batchrun
from pathlib import Path
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
needs = [batchrun.Need("dependencies", n, u, 1, False, ()) for n, u in (
    ("lost", "tcp://stock.example.com:80"), ("here", "tcp://127.0.0.1:9"))]
for answer in batchrun.Inquiry(needs, Path("."), batchrun.Host()).wait().values():
    print(f"{{answer.name}} {{answer.state}}: {{answer.why}}")
assert silent.recv(500)
"""
    )
    binds = " && ".join(
        f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")
    )
    script = f"{binds} && ip link set lo up; exec {sys.executable} {tmp_path}/ask.py"
    words = ["unshare", "-mn", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "here bad: refuses connections",
        "lost bad: gives no answer within 1 s",
    ]


# --- the watch: on time, recorded, only changes told ----------------------------------------------

JOB = """
    from batchrun import job

    @job
    def copy(ctx):
        for batch in ctx.batches(list(range(3)), name="main"):
            yield batch
"""


def test_the_watch_records_readings_and_checks_and_says_what_changes(project: Project) -> None:
    cache, stock = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    ports = [end.getsockname()[1] for end in (cache, stock)]
    project.write(
        f"""
        [[health.dependency]]
        name = "cache"
        url = "tcp://127.0.0.1:{ports[0]}"
        [[health.database]]
        name = "stock"
        url = "tcp://127.0.0.1:{ports[1]}"
        [jobs.copy]
        """,
        copy=JOB,
    )
    assert project.run("run", "copy", "--batches", "1").code == 75
    config, host = load_config(project.folder / "batchrun.toml"), LateHost()
    state = batchrun.StateDirectory(config, host)
    with contextlib.closing(state.open_ledger(create=False)) as ledger:
        (run,) = ledger.all_unfinished()
        watch = batchrun.HealthWatch(config, "copy", ledger, host)

        def check() -> bool:
            seen, host.late_s = len(ledger.health_checks(run)), host.late_s + 1000

            def is_done() -> bool:
                watch.beat(run, run.generation, os.getpid())
                return len(ledger.health_checks(run)) > seen

            wait_for(is_done, "a health check")
            return watch.verdict.pause

        assert watch.beat(run, run.generation, os.getpid()) == batchrun.WELL
        assert (ledger.readings(run), ledger.health_checks(run)) == ([], [])
        with socket.create_connection(("127.0.0.1", ports[1])):
            assert [check(), check()] == [False, False]
        reading = ledger.readings(run)[-1]
        for end in (cache, stock):
            end.close()
        assert [check() for _ in range(4)] == [False, False, True, True]
        with (
            socket.create_server(("127.0.0.1", ports[0])),
            socket.create_server(("127.0.0.1", ports[1])),
        ):
            assert [check(), check()] == [True, False]
        said = [event.why for event in ledger.events(run, what="said")]
        checks = ledger.health_checks(run)
    assert reading.rss_bytes
    assert reading.open_files
    assert (reading.connections, reading.number, reading.generation) == (1, run.number, 1)
    assert reading.limit_source
    lost = f"stock tcp://127.0.0.1:{ports[1]} refuses connections"
    refused = f"cache tcp://127.0.0.1:{ports[0]} refuses connections"
    both = f"connections: {lost}; dependencies: {refused}"
    assert said == [
        f"health: pause: two factors are bad: {both}",
        "health: go on: well; well again: connections: all answer; dependencies: all answer",
    ]
    assert [each.verdict for each in checks] == [*["go on"] * 4, *["pause"] * 3, "go on"]
    assert (checks[0].dependencies, checks[2].dependencies) == ("ok: all answer", f"bad: {refused}")
    assert [each.id for each in checks] == sorted(each.id for each in checks)
