"""A run that is not well: paused in time, kept by its supervisor, and goes on by itself."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Ended, Project, clean_environment, wait_for
from test_07_health import LateHost
from test_11_worker import at, let_go, records, rows, run_row, start_held, worker_of
from test_12_attempts import all_done, attempts, own_memory_group
from test_12_supervisor import is_locked, launch_with
from test_12_systemd import AS_MAIN, Ear, ear
from test_13_reports import RUN

import batchrun

__all__ = ["ear"]  # a fixture of another file

# All intervals are shorter than a user's by the same factor or more; nothing else is different.
CONFIG = """\
min_free = "1MB"
[health]
check_interval = "200ms"
recheck_after = "100ms"
bad_in_a_row = 2
MORE_HEALTH
[[health.dependency]]
name = "feed"
url = "tcp://127.0.0.1:PORT"
timeout = "2s"
MORE_NEED
[defaults]
batch_size = 5
max_tries = 1
retry_first_wait = "1ms"
MORE_OPTIONS
[jobs.sync]
"""

# Ten records in two batches; the first of them may have to do something, and record 8 too.
JOB = """\
import os, signal, socket, time
from pathlib import Path
from batchrun import job

ctx = None

def fetch():
    socket.create_connection(("127.0.0.1", PORT)).close()

def hold(name, *, deaf=False):
    Path(name + ".reached").touch()
    while not Path(name).exists() and (deaf or not ctx.should_stop):
        time.sleep(0.002)

@job
def sync(context):
    global ctx
    ctx = context
    for batch in ctx.batches(list(range(1, 11))):
        for record in batch:
            if record == 1: BEFORE_1
            if record == 8: BEFORE_8
            with open("done.txt", "a") as file:
                file.write(f"{record}\\n")
        yield batch
"""
HOLD_AND_FETCH = "(hold('go'), fetch())"


class Feed:
    """A dependency on a port of its own: a real listener that can go away and come back."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def goes_away(self) -> None:
        """Listen no more: whoever comes is refused."""
        self._socket.close()

    def comes_back(self) -> None:
        """Listen on the same port again."""
        self._socket = socket.create_server(("127.0.0.1", self.port))


@pytest.fixture
def feed() -> Iterator[Feed]:
    """A dependency that is there."""
    made = Feed()
    yield made
    made.goes_away()


def write(
    project: Project,
    port: int,
    before_8: str = HOLD_AND_FETCH,
    *,
    before_1: str = "pass",
    need: str = "",
    health: str = "",
    options: str = "",
) -> None:
    """Write a job with a dependency, and what is done before records 1 and 8."""
    config = CONFIG.replace("PORT", str(port)).replace("MORE_NEED\n", need)
    config = config.replace("MORE_HEALTH\n", health).replace("MORE_OPTIONS\n", options)
    for name in re.findall("(?m)^(max_tries|retry_first_wait) =", options):
        config = re.sub(rf"(?m)^{name} = .*\n", "", config, count=1)
    job = JOB.replace("PORT", str(port)).replace("BEFORE_1", before_1)
    project.write(config, sync=job.replace("BEFORE_8", before_8))


def is_paused(project: Project) -> bool:
    """Tell whether the run is paused by health and kept by a supervisor."""
    sql = "SELECT state, reason FROM run WHERE checks_at IS NOT NULL"
    return rows(project, sql) == [("paused", "health")]


def paused_in_the_middle(project: Project, feed: Feed, **how: str) -> subprocess.Popen[str]:
    """Start the job, take its dependency away, and return when the run is kept paused."""
    write(project, feed.port, **how)
    process = start_held(project)
    feed.goes_away()
    let_go(project)
    wait_for(lambda: is_paused(project), "the pause")
    return process


def said(project: Project) -> list[str]:
    """Return the lines for people, in order."""
    return [why for (why,) in rows(project, "SELECT why FROM event WHERE what LIKE 'said%'")]


def checks(project: Project) -> int:
    """Return how many health checks were made."""
    return int(rows(project, "SELECT count(*) FROM health_check")[0][0])


# --- a failure while something declared is down ---------------------------------------------------


def test_the_founding_story_a_dependency_is_gone_for_long_and_comes_back(
    project: Project, feed: Feed
) -> None:
    process = paused_in_the_middle(project, feed)
    seen = checks(project)
    wait_for(lambda: checks(project) > seen + 3, "more checks in vain")
    assert len(rows(project, "SELECT 1 FROM attempt")) == 1
    feed.comes_back()
    ended = project.finish(process)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert all_done(project)
    assert attempts(project) == [("raised", 0, 1), ("succeeded", 0, None)]
    ((paused_s, tries, checks_at),) = rows(project, "SELECT paused_s, tries, checks_at FROM run")
    assert (paused_s > 0.2, tries, checks_at) == (True, 0, None)
    down = f"dependencies: feed tcp://127.0.0.1:{feed.port} refuses connections"
    assert said(project) == [
        f"health: pause: a declared need is bad: {down}; no attempt begins until it answers",
        "health: go on: well; well again: dependencies: all answer",
    ]
    report = project.run("report", "sync").out
    assert re.search(r"  paused by health +\d", report)
    assert re.search(
        r"paused \(health\) +supervisor +The job raised ConnectionRefusedError: .* in batch 2"
        r"\. No try is charged: a declared need is bad: dependencies: feed ",
        report,
    )
    assert re.search(r"reserved \(health\) +supervisor +it is well again\n", report)


def test_k43_what_is_down_at_the_start_is_waited_for_and_then_the_run_runs(
    project: Project, feed: Feed
) -> None:
    feed.goes_away()
    write(project, feed.port, "pass", before_1="fetch()")
    process = project.start("run", "sync")
    ledger = project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and is_paused(project), "the pause")
    feed.comes_back()
    assert project.finish(process).code == 0
    assert attempts(project) == [("raised", 0, 1), ("succeeded", 0, None)]
    assert records(project) == list(range(1, 11))


def test_a_failure_while_all_is_well_is_charged(project: Project, feed: Feed) -> None:
    write(project, feed.port, "1 / 0")
    assert project.run("run", "sync").code == 13
    assert attempts(project) == [("raised", 1, 1)]
    assert run_row(project) == ("awaiting", "poison", 1)


def test_time_in_pauses_is_no_time_in_which_a_batch_was_tried(project: Project, feed: Feed) -> None:
    options = 'retry_for = "5s"\nmax_tries = 2\n'
    process = paused_in_the_middle(project, feed, options=options)
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 5.1, "retry_for")
    once = "Path('again').exists() or (Path('again').touch(), 1 / 0)"
    write(project, feed.port, once, options=options)
    feed.comes_back()
    assert project.finish(process).code == 0
    assert attempts(project) == [("raised", 0, 1), ("raised", 1, 1), ("succeeded", 0, None)]


def test_what_goes_away_while_a_try_is_waited_for_holds_it_back_too(
    project: Project, feed: Feed
) -> None:
    options = 'retry_first_wait = "20m"\nmax_tries = 2\n'
    write(project, feed.port, "1 / 0", options=options)
    process = project.start("run", "sync")
    ledger = project.state / "ledger.db"
    charged = "SELECT 1 FROM run WHERE tries = 1"
    wait_for(lambda: ledger.exists() and rows(project, charged), "the first failure")
    assert run_row(project) == ("reserved", "", 1)
    feed.goes_away()
    wait_for(lambda: is_paused(project), "the pause")
    feed.comes_back()
    wait_for(lambda: run_row(project) == ("reserved", "health", 1), "the end of the pause")
    assert rows(project, "SELECT error FROM run") == [(None,)]
    process.send_signal(signal.SIGTERM)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 1)


# --- while the run is kept paused -----------------------------------------------------------------


def test_everybody_who_asks_is_told_who_keeps_a_paused_run(project: Project, feed: Feed) -> None:
    process = paused_in_the_middle(project, feed)
    down = rf"feed tcp://127\.0\.0\.1:{feed.port} refuses connections"
    why = rf"It is paused by health: .* {down}; no attempt begins until it answers"
    who = rf"Process {process.pid} keeps it, goes on when it is well, and checks again now\."
    assert not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[1:]
    status = project.run("status", "sync").out
    assert "sync: paused (health) since " in status
    assert re.search(rf"  why           {why}\n  why           {who}\n", status), status
    assert f"to type: batchrun logs -f {rows(project, 'SELECT id FROM run')[0][0]}\n" in status
    busy = project.run("run", "sync")
    assert busy.code == 11
    assert re.search(rf"sync is busy: pid {process.pid} .* runs it, .*\n{why}\n{who}\n", busy.err)
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert is_locked(project)
    feed.comes_back()
    assert project.finish(process).code == 0


@pytest.mark.parametrize(
    ("what", "code", "state"),
    [
        (signal.SIGTERM, 75, ("paused", "stop")),
        (signal.SIGINT, 130, ("paused", "stop")),
        ("pause", 75, ("paused", "person")),
        ("cancel", 75, ("cancelled", "")),
        ("maintenance", 75, ("paused", "maintenance")),
    ],
)
def test_a_pause_ends_within_a_second_when_somebody_asks(
    project: Project, feed: Feed, what: signal.Signals | str, code: int, state: tuple[str, str]
) -> None:
    process = paused_in_the_middle(project, feed)
    if isinstance(what, signal.Signals):
        process.send_signal(what)
    elif what == "maintenance":
        (project.state / "maintenance.lock").touch()
    else:
        project.run(what, "sync")
    began = time.monotonic()
    assert project.finish(process).code == code
    assert time.monotonic() - began < 1
    assert run_row(project) == (*state, 1)
    assert rows(project, "SELECT paused_s > 0, checks_at, tries FROM run") == [(1, None, 0)]


def test_pause_and_cancel_wait_for_the_end_of_a_kept_run(project: Project, feed: Feed) -> None:
    process = paused_in_the_middle(project, feed)
    assert project.run("cancel", "sync", "--kill").code == 0
    assert project.finish(process).code in (75, -signal.SIGTERM, -signal.SIGKILL)
    assert run_row(project) == ("cancelled", "", 1)


def test_a_supervisor_killed_in_a_pause_leaves_the_run_to_the_tick(
    project: Project, feed: Feed
) -> None:
    process = paused_in_the_middle(project, feed)
    process.kill()
    project.finish(process)
    status = project.run("status", "sync").out
    assert "sync: paused (health) since " in status
    assert "  why           Nobody keeps it any more; the tick goes on with it.\n" in status
    assert "to type: batchrun resume " in status
    feed.comes_back()
    assert project.run("resume", "--all").code == 0
    assert all_done(project)


def test_a_batchrun_that_was_replaced_in_a_pause_begins_no_other_attempt(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port)
    line = "digests = iter('aab'); batchrun.code_digest = lambda: next(digests)"
    process = start_held(project, launch=launch_with(line))
    feed.goes_away()
    let_go(project)
    wait_for(lambda: is_paused(project), "the pause")
    feed.comes_back()
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 1)


def test_past_max_pause_a_person_is_told_and_the_tick_tries_again(
    project: Project, feed: Feed
) -> None:
    ended = project.finish(paused_in_the_middle(project, feed, options='max_pause = "300ms"\n'))
    ((run, paused_s),) = rows(project, "SELECT id, paused_s FROM run")
    why = f"a declared need is bad: dependencies: feed tcp://127.0.0.1:{feed.port} refuses"
    assert (ended.code, ended.err) == (
        13,
        (
            f"sync: run {run} paused.\n"
            f"It was not well for 0s: {why} connections; no attempt begins until it answers\n"
            "Commit 1 stands: 5 records are done.\n"
            f"The log: {project.state}/logs/sync/{run}.log\n"
            f"To go on: batchrun resume {run}\n"
        ),
    )
    assert run_row(project) == ("paused", "health", 1)
    assert 0.3 < paused_s < 5
    config, host = batchrun.load_config(project.folder / "batchrun.toml"), batchrun.Host()
    state = batchrun.StateDirectory(config, host)
    with contextlib.closing(state.open_ledger(create=False)) as known:
        assert batchrun.HealthWatch(config, "sync", known, host).is_due  # the next start asks first
    assert project.run("resume", "--all").code == 13
    feed.comes_back()
    assert project.run("resume", "--all").code == 0
    assert all_done(project)
    assert {charged for _, charged, _ in attempts(project)} == {0}


def test_k08_a_pause_feeds_the_watchdog_says_why_and_leaves_at_once(
    project: Project, feed: Feed, ear: Ear
) -> None:
    write(project, feed.port)
    watched = ear.environment(WATCHDOG_USEC="400000")
    process = start_held(project, launch=AS_MAIN, env=watched)
    feed.goes_away()
    let_go(project)
    wait_for(lambda: is_paused(project), "the pause")
    ear.forget()
    wait_for(lambda: len(ear.heard("WATCHDOG")) > 5, "the watchdog's food")
    words = r"sync: paused by health, checks again at \d\d:\d\d:\d\dZ: a declared need is bad: .*"
    wait_for(lambda: any(re.fullmatch(words, s) for s in ear.heard("STATUS")), "the reason")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert project.finish(process).code == 75
    assert time.monotonic() - began < 1


# --- a verdict while the worker works -------------------------------------------------------------


def test_two_bad_factors_pause_at_the_safe_point_and_free_what_the_worker_held(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port, "hold('go')", options='max_rss = "1MB"\n')
    process = start_held(project)
    worker = worker_of(process)
    wait_for(lambda: said(project), "the first bad factor")
    feed.goes_away()
    wait_for(lambda: is_paused(project), "the pause")
    assert not Path(f"/proc/{worker}").exists()
    assert records(project) == list(range(1, 11))  # the batch in hand was done to its end
    assert run_row(project) == ("paused", "health", 2)
    feed.comes_back()
    ended = project.finish(process)
    assert (ended.code, ended.err) == (0, "")
    assert records(project) == list(range(1, 11))
    assert attempts(project) == [("stopped", 0, None), ("succeeded", 0, None)]
    told = said(project)
    assert told[0].startswith("health: go on: one factor is bad, which alone does not pause: memo")
    assert told[1].startswith("health: pause: two factors are bad: memory: the worker uses ")


def test_a_person_who_pauses_what_health_has_asked_to_stop_has_the_last_word(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port, "hold('go', deaf=True)", need="critical = true\n")
    process = start_held(project)
    feed.goes_away()
    wait_for(lambda: any("health: pause" in line for line in said(project)), "the verdict")
    assert project.run("pause", "sync").code == 0
    let_go(project)
    assert project.finish(process, limit_s=20).code == 75
    assert run_row(project) == ("paused", "person", 2)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_batch_that_reaches_no_safe_point_in_time_is_given_up_and_done_again(
    project: Project, feed: Feed, *, deaf: bool
) -> None:
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"
    held = f"({block if deaf else None}, hold('go', deaf=True))"
    options, need = 'stop_grace = "500ms"\n', "critical = true\n"
    write(project, feed.port, held, need=need, options=options)
    process = start_held(project)
    feed.goes_away()
    wait_for(lambda: is_paused(project), "the pause")
    let_go(project)
    feed.comes_back()
    assert project.finish(process).code == 0
    assert records(project) == [*range(1, 8), *range(6, 11)]
    ending = "died" if deaf else "stopped"
    assert attempts(project) == [(ending, 0, None), ("succeeded", 0, None)]


def test_one_bad_factor_is_said_once_and_the_run_goes_on(project: Project, feed: Feed) -> None:
    write(project, feed.port, "hold('go')")
    process = project.start("-v", "run", "sync")
    wait_for((project.folder / "go.reached").exists, "record 8")
    feed.goes_away()
    wait_for(lambda: said(project), "a word")
    seen = checks(project)
    wait_for(lambda: checks(project) > seen + 2, "more bad checks")
    let_go(project)
    ended = project.finish(process)
    assert ended.code == 0
    line = "health: go on: one factor is bad, which alone does not pause: dependencies: feed"
    assert ended.err.count("health:") == ended.err.count(line) == 1
    assert attempts(project) == [("succeeded", 0, None)]


@pytest.mark.needs_root
def test_k27_a_run_is_paused_while_another_process_takes_the_memory(
    project: Project, feed: Feed
) -> None:
    parent = own_memory_group()
    if parent is None or os.geteuid():
        pytest.skip("NOT ROOT OR NO MEMORY CGROUP (v1): nobody took a run's memory")
    group = parent / f"batchrun-test-pause-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(300 * 2**20))
    joins = ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "-")
    try:
        write(
            project,
            feed.port,
            "hold('go')",
            health='min_available = "150MB"\ncritical = ["memory"]\n',
        )
        process = project.start("run", "sync", launch=(*joins, *AS_MAIN[4:]))
        wait_for((project.folder / "go.reached").exists, "record 8")
        takes = "x = b'x' * 150_000_000; print(flush=True); input()"
        with subprocess.Popen(
            [*joins, sys.executable, "-c", takes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            wait_for(lambda: is_paused(project), "the pause")
            other.kill()
        assert project.finish(process).code == 0
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "an empty group")
        group.rmdir()
    assert records(project) == list(range(1, 11))
    pause, well = said(project)
    assert re.match(
        r"health: pause: a critical factor is bad: memory: \d+ MB available of 315 MB "
        r"\(cgroup",
        pause,
    ), pause
    assert well.startswith("health: go on: well; well again: memory: ")


# --- leaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        ('b"x" * 3_000_000', r"rss grew (2\.9|3\.\d) MB a batch over 12 batches"),
        ('Popen(["sleep", "60"])', r"children grew 1 a batch over 12 batches"),
    ],
)
def test_a_leak_is_named_once_with_its_slope_and_shown(
    project: Project, feed: Feed, leak: str, words: str
) -> None:
    job = """
    from pathlib import Path
    from subprocess import Popen
    import time
    from batchrun import job

    held = []

    @job
    def sync(ctx):
        for batch in ctx.batches(list(range(20))):
            held.append(LEAK)
            while batch.number == 20 and not Path("go").exists():
                time.sleep(0.002)
            yield batch
    """
    write(project, feed.port)
    text = (project.folder / "batchrun.toml").read_text()
    job = dedent(job).replace("LEAK", leak)
    project.write(text.replace("batch_size = 5", "batch_size = 1"), sync=job)
    process = project.start("-v", "run", "sync")
    ledger = project.state / "ledger.db"
    named = "SELECT why FROM event WHERE what = 'said (leak)'"
    wait_for(lambda: ledger.exists() and rows(project, named), "the leak's name")
    seen = checks(project)
    wait_for(lambda: checks(project) > seen + 2, "more checks")
    status = project.run("status", "sync")
    let_go(project)
    ended = project.finish(process)
    assert ended.code == 0
    ((why,),) = rows(project, named)
    assert re.fullmatch(words, why), why
    assert ended.err.count(why) == project.run("report", "sync").out.count(why) == 1
    assert re.search(f"  leak          {words}\n", status.out)


# --- a run that is well ---------------------------------------------------------------------------


def test_a_run_that_is_well_asks_nobody_before_the_first_check(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port, "fetch()")
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace('check_interval = "200ms"\n', ""))
    assert project.run("run", "sync", env=at("probe.start=kill")).code == 0
    assert rows(project, "SELECT count(*) FROM health_check") == [(0,)]


def test_doctor_warns_of_batches_that_last_longer_than_a_stop_may_take(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port, "time.sleep(0.05)", options='stop_grace = "40ms"\n')
    assert project.run("run", "sync").code == 0
    doctor = project.run("doctor", "sync")
    assert doctor.code == 3
    assert re.search(
        r"^bad      batches of sync one of 20 takes 0\.0\d+ s or more; stop_grace is 0\.04 s",
        doctor.out,
        re.MULTILINE,
    )
    assert (
        "to mend it: set a smaller batch_size or a longer stop_grace in [jobs.sync]" in doctor.out
    )
    write(project, feed.port)
    assert "batches of sync" not in project.run("doctor", "sync").out


# --- what is tried again stays the same run -------------------------------------------------------


def test_a_fresh_run_that_is_tried_again_stays_the_same_run(project: Project, feed: Feed) -> None:
    once = "Path('once').exists() or (Path('once').touch(), 1 / 0)"
    write(project, feed.port, once, options="max_tries = 3\n")
    assert project.run("run", "sync", "--fresh").code == 0
    assert rows(project, "SELECT state FROM run") == [("succeeded",)]
    assert records(project) == [*range(1, 8), *range(6, 11)]


# --- a real database ------------------------------------------------------------------------------


class Cluster:
    """A PostgreSQL server of this test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder, user = folder, dict[str, Any]()
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
            user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._user = user
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"
        self._call("initdb", "--username=postgres", "--auth=trust", "--no-sync")

    def _call(self, name: str, *words: str) -> None:
        (folder,) = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
        subprocess.run(
            [folder / name, f"--pgdata={self._folder}/data", *words],
            check=True,
            cwd=self._folder,
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            **self._user,
        )

    def start(self) -> None:
        """Start the server and wait until it lets in."""
        options = f"-c port={self._port} -c listen_addresses=127.0.0.1 -c fsync=off"
        options += f" -c unix_socket_directories={self._folder}"
        log = f"--log={self._folder}/log"
        self._call("pg_ctl", "start", "--wait", log, f"--options={options}")

    def stop(self) -> None:
        """Stop the server; whoever is connected is cut off."""
        self._call("pg_ctl", "stop", "--wait", "--mode=fast")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A server that runs, outside of folders that only root may enter."""
    pytest.importorskip("psycopg", reason="NO PSYCOPG: install '.[test]'")
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("NO POSTGRESQL: no server was stopped and started")
    folder = Path(f"/dev/shm/batchrun-test-{os.getpid()}")  # noqa: S108 - short, and removed below
    folder.mkdir(mode=0o700)
    try:
        made = Cluster(folder)
        made.start()
        yield made
        with contextlib.suppress(subprocess.CalledProcessError):
            made.stop()
    finally:
        shutil.rmtree(folder)


def test_postgresql_is_stopped_and_started_in_the_middle_of_a_run(
    project: Project, cluster: Cluster
) -> None:
    psycopg = pytest.importorskip("psycopg")
    project.write(
        f"""
        min_free = "1MB"
        [health]
        check_interval = "200ms"
        recheck_after = "100ms"
        [[health.database]]
        name = "stock"
        url = "{cluster.url}"
        [defaults]
        batch_size = 5
        max_tries = 1
        retry_first_wait = "1ms"
        [jobs.sync]
        """,
        sync=f"""
        import time
        from pathlib import Path
        from batchrun import job

        @job
        def sync(ctx):
            stock = ctx.connect("{cluster.url}")
            for batch in ctx.batches(list(range(1, 11)), target=stock):
                with batch.transaction() as cursor:
                    cursor.executemany("INSERT INTO stock VALUES (%s)", [(r,) for r in batch])
                    Path("go.reached").touch()
                    while batch.number == 2 and not Path("go").exists():
                        time.sleep(0.002)
                yield batch
        """,
    )
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE stock (record integer)")
    process = project.start("run", "sync")
    ledger = project.state / "ledger.db"
    second = "SELECT 1 FROM run WHERE number = 1"
    wait_for(lambda: ledger.exists() and rows(project, second), "the second batch")
    cluster.stop()
    let_go(project)
    wait_for(lambda: is_paused(project), "the pause")
    cluster.start()
    ended = project.finish(process)
    assert (ended.code, ended.err) == (0, "")
    with psycopg.connect(cluster.url) as connection:
        found = connection.execute("SELECT record FROM stock ORDER BY record").fetchall()
    assert found == [(record,) for record in range(1, 11)]
    assert attempts(project) == [("raised", 0, 1), ("succeeded", 0, None)]


CONNECTS = """\
from batchrun import job

@job(retry_if=lambda error: {retry_if})
def sync(ctx):
    ctx.connect("{url}")
    for batch in ctx.batches([1]):
        yield batch
"""


def test_a_database_that_does_not_let_in_is_tried_again_and_costs_no_try(
    project: Project, feed: Feed
) -> None:
    pytest.importorskip("psycopg", reason="NO PSYCOPG: install '.[test]'")
    feed.goes_away()
    url = f"postgres://u@127.0.0.1:{feed.port}/x"
    config = 'min_free = "1MB"\n[defaults]\nmax_tries = 1\nretry_first_wait = "1ms"\n[jobs.sync]\n'
    project.write(config, sync=CONNECTS.format(retry_if="True", url=url))
    process, ledger = project.start("run", "sync"), project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and len(attempts(project)) > 2, "the third attempt")
    process.terminate()
    assert project.finish(process).code == 75
    assert {attempt[1] for attempt in attempts(project)} == {0}
    project.write(f"{config}retry_for = '0'\n")
    ended = project.run("run", "sync")
    assert (ended.code, run_row(project)) == (13, ("paused", "retry", 0))
    assert f"The database {url} does not let us in.\n" in ended.err
    assert "Check that it runs, and the name and password in the configuration.\n" in ended.err
    project.write(config, sync=CONNECTS.format(retry_if="False", url=url))
    assert (project.run("run", "sync").code, run_row(project)) == (1, ("failed", "", 0))


def test_a_failure_that_costs_no_try_is_said_without_a_count_of_tries(
    project: Project, feed: Feed
) -> None:
    pytest.importorskip("psycopg", reason="NO PSYCOPG: install '.[test]'")
    feed.goes_away()
    config = 'min_free = "1MB"\n[defaults]\nmax_tries = 3\nretry_first_wait = "1ms"\n[jobs.sync]\n'
    project.write(
        config,
        sync=f"""
        from pathlib import Path
        from batchrun import job

        @job(retry_if=lambda error: True)
        def sync(ctx):
            for batch in ctx.batches([1]):
                if not Path("raised").exists():
                    Path("raised").touch()
                    raise ValueError("once")
                ctx.connect("postgres://u@127.0.0.1:{feed.port}/x")
                yield batch
        """,
    )
    process, ledger = project.start("run", "sync"), project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and len(attempts(project)) > 2, "the third attempt")
    process.terminate()
    assert project.finish(process).code == 75
    said = rows(project, "SELECT why FROM event WHERE what = 'reserved' ORDER BY id LIMIT 2")
    assert [re.sub(r".*begins in 0\.\d s", "", why, flags=re.DOTALL) for (why,) in said] == [
        ": try 2 of 3.",
        ".",
    ]
    project.write(f"{config}retry_for = '0'\n")
    ended = project.run("run", "sync")
    assert "What the job needs was not there, and retry_for is reached.\n" in ended.err


def test_a_database_that_a_server_does_not_have_is_told_at_once_and_not_waited_for(
    project: Project, cluster: Cluster
) -> None:
    url = f"{cluster.url.rpartition('/')[0]}/nosuch"
    config = 'min_free = "1MB"\n[defaults]\nretry_first_wait = "1ms"\n[jobs.sync]\n'
    project.write(f"{config}retry_for = '1s'\n", sync=CONNECTS.format(retry_if="True", url=url))
    ended = project.run("run", "sync")
    assert (ended.code, run_row(project)) == (1, ("failed", "", 0)), ended.err
    assert 'FATAL:  database "nosuch" does not exist.\n' in ended.err
    assert len(attempts(project)) == 1


def test_k43_a_database_that_is_down_at_the_start_is_waited_for(
    project: Project, cluster: Cluster
) -> None:
    cluster.stop()
    project.write(
        f"""
        min_free = "1MB"
        [health]
        check_interval = "200ms"
        recheck_after = "100ms"
        good_in_a_row = 1
        [[health.database]]
        name = "stock"
        url = "{cluster.url}"
        [defaults]
        max_tries = 1
        [jobs.sync]
        """,
        sync=CONNECTS.format(retry_if="True", url=cluster.url),
    )
    process = project.start("run", "sync")
    ledger = project.state / "ledger.db"
    wait_for(lambda: ledger.exists() and is_paused(project), "the pause")
    cluster.start()
    assert project.finish(process).code == 0
    assert attempts(project)[-1] == ("succeeded", 0, None)


def test_patience_counts_a_pause_once_and_not_as_time_of_trying() -> None:
    class Clock(batchrun.Host):
        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

    host = Clock()
    patience = batchrun.Patience(cast("Any", None), host)
    assert (patience.paused_s, patience.end_pause()) == (0, 0)
    counted = []
    for host.now_s in (100.0, 107.0, 110.0):
        counted.append(patience.count_pause())
    host.now_s = 112.0
    assert (counted, patience.paused_s, patience.end_pause()) == ([0, 7, 3], 12, 2)
    assert (patience.paused_s, patience.end_pause()) == (0, 0)


def test_patience_begins_anew_with_each_run() -> None:
    options = SimpleNamespace(retry_max_wait_s=60, retry_for_s=60, retry_first_wait_s=1)
    patience = batchrun.Patience(cast("Any", options), LateHost())
    for _ in range(3):
        patience.lose(RUN)
    assert patience.wait_s >= 8
    patience.lose(RUN._replace(key=RUN.key + 1))
    assert patience.wait_s < 2


def test_progress_begins_anew_with_each_run(capfd: pytest.CaptureFixture[str]) -> None:
    host = LateHost()
    console = batchrun.Console(host)
    console.verbose = True
    first = RUN._replace(read=0, expected=1000)
    console.progress(first)
    host.late_s = 10.0
    console.progress(first._replace(read=1000))
    second = first._replace(key=first.key + 1)
    console.progress(second)
    host.late_s = 20.0
    console.progress(second._replace(read=100))
    shown = [line.split() for line in capfd.readouterr().err.splitlines()]
    assert [(words[1], round(float(words[5].rstrip("/s")), -1)) for words in shown] == [
        ("100%", 100),
        ("10%", 10),
    ]


def test_a_pause_is_not_in_the_rate(capfd: pytest.CaptureFixture[str]) -> None:
    host = LateHost()
    console = batchrun.Console(host)
    console.verbose = True
    run = RUN._replace(read=0, expected=1000)
    console.progress(run)
    host.late_s = 20.0
    console.progress(run._replace(read=500, paused_s=10.0))
    assert re.search(r"50%  +500 of 1,000 +(50|49)/s +1\ds left", capfd.readouterr().err)


def test_connections_of_a_worker_that_is_gone_do_not_keep_its_run_paused(
    project: Project, feed: Feed
) -> None:
    write(project, feed.port, "pass", health='critical = ["connections"]\n')
    text = (project.folder / "batchrun.toml").read_text()
    project.write(text.replace("batch_size = 5", "batch_size = 1"))
    job = (project.folder / "jobs/sync.py").read_text().replace("range(1, 11)", "range(1, 31)")
    project.write_file("jobs/sync.py", job)
    assert project.run("run", "sync", "--batches", "20").code == 75
    rows(project, "UPDATE batch SET connections = number")
    config, host = batchrun.load_config(project.folder / "batchrun.toml"), LateHost()
    state = batchrun.StateDirectory(config, host)
    with contextlib.closing(state.open_ledger(create=False)) as ledger:
        (run,) = ledger.all_unfinished()
        watch = batchrun.HealthWatch(config, "sync", ledger, host)

        def pauses(worker: int | None) -> bool:
            watch.check_soon()
            seen = len(ledger.health_checks(run))

            def is_done() -> bool:
                watch.beat(run, run.generation, worker)
                return len(ledger.health_checks(run)) > seen

            wait_for(is_done, "a health check")
            return watch.beat(run, run.generation, worker).pause

        assert [pauses(os.getpid()), pauses(None), pauses(None)] == [True, True, False]
    assert "connections grew 1 a batch over 12 batches" in said(project)
