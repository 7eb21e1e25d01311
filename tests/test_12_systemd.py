"""What systemd and a terminal see of a supervisor that waits or stops: a real NOTIFY_SOCKET."""

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import LAUNCH, Project, clean_environment, wait_for
from test_11_worker import (
    CONFIG,
    RELEASED,
    at,
    done,
    finish_after,
    let_go,
    log_of,
    records,
    rows,
    run_row,
    start_held,
    worker_of,
    write_job,
)
from test_12_supervisor import DEAF, is_stopped, launch_with

from batchrun import EXTEND_BY_S, Host, Systemd

AS_MAIN = ("/bin/sh", "-c", 'export WATCHDOG_PID=$$; exec "$@"', "-", *LAUNCH)


class Ear:
    """A notification socket, and what was heard there, line by line."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def environment(self, **more: str) -> Mapping[str, str]:
        """Return an environment as systemd makes it."""
        return {**clean_environment(), "NOTIFY_SOCKET": self.address, **more}

    def heard(self, name: str) -> list[str]:
        """Listen, and return all values of one name so far."""
        try:
            while True:
                self.lines += self._socket.recv(4096).decode().splitlines()
        except BlockingIOError:
            pairs = [line.partition("=") for line in self.lines]
            return [value for known, _, value in pairs if known == name]

    def forget(self) -> None:
        """Listen, and forget what was heard."""
        self.heard("")
        self.lines.clear()

    def close(self) -> None:
        """Stop listening; nobody can speak to us any more."""
        self._socket.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    """An abstract notification socket."""
    made = Ear(f"@batchrun-test-{secrets.token_hex(8)}")
    yield made
    made.close()


# --- a run and its ends -----------------------------------------------------------------------


def test_a_clean_run_says_ready_and_at_last_how_it_ended(project: Project, ear: Ear) -> None:
    write_job(project, "done([name for name in os.environ if 'NOTIFY' in name])")
    assert project.run("run", "sync", env=ear.environment()).code == 0
    assert ear.heard("READY") == ["1"]
    ready, *shown, last = ear.lines
    run = rows(project, "SELECT id FROM run")[0][0]
    assert ready == "READY=1"
    assert last.startswith(f"STATUS=sync: run {run} succeeded after ")
    assert all(line.startswith("STATUS=sync: batch ") for line in shown)
    assert "[]" in done(project)  # the job cannot speak in our name


def test_a_refused_start_says_ready_and_why_it_was_refused(project: Project, ear: Ear) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    assert project.run("run", "sync", env=ear.environment()).code == 11
    assert ear.heard("READY") == ["1"]
    assert ear.heard("STATUS")[0].startswith(f"sync is busy: pid {process.pid} ")
    let_go(project)
    assert project.finish(process).code == 0
    ear.forget()
    (project.state / "maintenance.lock").touch()
    refused = project.run("run", "sync", env=ear.environment())
    assert refused.code == 12
    assert ear.heard("READY") == ["1"]
    assert ear.lines == ["READY=1", f"STATUS={refused.err.splitlines()[0]}"]


def test_a_stop_in_a_slow_batch_asks_for_more_time_each_second(project: Project, ear: Ear) -> None:
    write_job(project, "hold('go')")
    process = start_held(project, env=ear.environment())
    assert ear.heard("STOPPING") == ear.heard("EXTEND_TIMEOUT_USEC") == []
    process.send_signal(signal.SIGTERM)
    asked = wait_for(lambda: ear.heard("EXTEND_TIMEOUT_USEC")[2:], "three extensions")
    assert asked == [str(int(EXTEND_BY_S * 1_000_000))]
    assert ear.heard("STATUS")[-1] == "sync: batch 2, 5 of 10 records, asked to stop"
    let_go(project)
    assert project.finish(process).code == 75
    assert ear.heard("STOPPING") == ["1"]
    assert ear.lines.index("STOPPING=1") < ear.lines.index(f"EXTEND_TIMEOUT_USEC={asked[0]}")
    assert " paused (stop" in ear.heard("STATUS")[-1]


def test_no_more_time_is_asked_for_than_our_own_rule_lets_a_worker_live(
    project: Project, ear: Ear
) -> None:
    write_job(project, DEAF)
    project.write(CONFIG.replace("30s", "300ms"))
    process = start_held(project, env=ear.environment())
    process.send_signal(signal.SIGTERM)
    assert project.finish(process).code == 75
    asked = [int(value) for value in ear.heard("EXTEND_TIMEOUT_USEC")]
    assert asked
    assert max(asked) <= (0.3 + 0.3 + 4) * 1_000_000


@pytest.mark.parametrize("how", ["closed", "full"])
def test_a_socket_that_is_gone_or_full_holds_no_run_up(
    project: Project, ear: Ear, how: str
) -> None:
    write_job(project)
    if how == "closed":
        ear.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker:
        try:
            while how == "full":
                speaker.sendto(b"X=1", f"\0{ear.address[1:]}")
        except BlockingIOError:
            pass
        assert project.run("run", "sync", env=ear.environment()).code == 0
    assert records(project) == list(range(1, 11))


# --- the watchdog -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["works", "hangs"])
def test_the_watchdog_hears_of_a_supervisor_whose_worker_lasts_long(
    project: Project, ear: Ear, how: str
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project, env=ear.environment(WATCHDOG_USEC="200000"), launch=AS_MAIN)
    worker = worker_of(process)
    if how == "hangs":
        os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: is_stopped(worker), "the worker to stop")
    ear.forget()
    wait_for(lambda: len(ear.heard("WATCHDOG")) > 4, "five pings")
    os.kill(worker, signal.SIGCONT)
    let_go(project)
    assert project.finish(process).code == 0


def test_the_watchdog_of_another_process_hears_nothing(project: Project, ear: Ear) -> None:
    write_job(project, "hold('go')")
    other = ear.environment(WATCHDOG_USEC="2000", WATCHDOG_PID=str(os.getpid()))
    process = start_held(project, env=other)
    wait_for(lambda: "sync: batch 2, 5 of 10 records" in ear.heard("STATUS"), "the second batch")
    let_go(project)
    assert project.finish(process).code == 0
    assert ear.heard("WATCHDOG") == []


def test_a_supervisor_that_hangs_falls_silent_while_its_worker_works(
    project: Project, ear: Ear
) -> None:
    write_job(project, "hold('go')")
    process = start_held(project, env=ear.environment(WATCHDOG_USEC="20000"), launch=AS_MAIN)
    worker = worker_of(process)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(process.pid), "the supervisor to stop")
    ear.forget()
    let_go(project)
    stat = Path(f"/proc/{worker}/stat")
    wait_for(lambda: ") Z " in stat.read_text(), "the worker's end")
    assert ear.heard("WATCHDOG") == []
    process.send_signal(signal.SIGCONT)
    assert project.finish(process).code == 0
    assert records(project) == list(range(1, 11))


def test_the_watchdog_is_fed_while_a_start_waits_for_an_orphan(project: Project, ear: Ear) -> None:
    write_job(project, "hold('go')")
    process = start_held(project)
    worker = worker_of(process)
    os.kill(worker, signal.SIGSTOP)
    process.kill()
    process.wait()
    later = project.start(
        "run", "sync", env=ear.environment(WATCHDOG_USEC="100000"), launch=AS_MAIN
    )
    waits = f"sync: waiting for pid {worker}, which a killed supervisor left behind"
    wait_for(lambda: waits in ear.heard("STATUS"), "the wait to be shown")
    ear.forget()
    wait_for(lambda: len(ear.heard("WATCHDOG")) > 2, "three pings")
    let_go(project)
    os.kill(worker, signal.SIGCONT)
    assert project.finish(later).code == 0


# --- a statement that lasts (K08) -----------------------------------------------------------------

STATEMENT = """\
(db := ctx.connect("sqlite:long.db"), hold('go'), db.execute("WITH RECURSIVE n(x) AS \
(SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT LAST) SELECT count(*) FROM n").fetchall())"""
ENDLESS = STATEMENT.replace("LAST", "-1")


def start_statement(project: Project, ear: Ear) -> subprocess.Popen[str]:
    """Start the job and return when its worker is inside the statement and uses the processor."""
    process = start_held(project, env=ear.environment(WATCHDOG_USEC="20000"), launch=AS_MAIN)
    stat = Path(f"/proc/{worker_of(process)}/stat")

    def used() -> int:
        return int(stat.read_text().rpartition(")")[2].split()[11])  # hundredths of a second

    let_go(project)
    before = used()
    wait_for(lambda: used() > before + 5, "the statement to run")
    return process


def test_a_stop_in_a_long_statement_waits_for_its_end_and_the_watchdog_is_fed(
    project: Project, ear: Ear
) -> None:
    write_job(project, STATEMENT.replace("LAST", "8000000"))
    process = start_statement(project, ear)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: ear.heard("STOPPING"), "the stop to be counted")
    ear.forget()
    wait_for(lambda: len(ear.heard("WATCHDOG")) > 1, "pings while the statement runs")
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 2)
    assert done(project)[-3:] == RELEASED


def test_a_second_stop_interrupts_a_statement_that_would_never_end(
    project: Project, ear: Ear
) -> None:
    write_job(project, ENDLESS)
    process = start_statement(project, ear)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: ear.heard("EXTEND_TIMEOUT_USEC")[1:], "a second to go by after the first stop")
    process.send_signal(signal.SIGINT)
    assert project.finish(process).code == 130
    assert run_row(project) == ("paused", "stop", 1), log_of(project)
    assert done(project)[-3:] == RELEASED


RELEASING = """
    import signal, time
    from pathlib import Path
    from batchrun import job

    def release():
        sent = []
        signal.signal(signal.SIGUSR1, lambda *_: sent.append("SIGUSR1"))
        Path("releasing").touch()
        while not Path("go").exists():
            time.sleep(0.002)
        Path("sent").write_text(str(sent))

    @job
    def sync(ctx):
        ctx.on_exit(release)
        for batch in ctx.batches(range(3)):
            yield batch
    """


def test_a_second_stop_does_not_reach_a_worker_that_releases_what_it_holds(
    project: Project, ear: Ear
) -> None:
    project.write(CONFIG, sync=RELEASING)
    process = project.start("run", "sync", env=ear.environment(), launch=AS_MAIN)
    wait_for((project.folder / "releasing").exists, "the release to begin")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        ear.forget()
        wait_for(lambda: ear.heard("EXTEND_TIMEOUT_USEC")[2:], "two seconds to go by")
    let_go(project)
    assert project.finish(process).code == 0
    assert (project.folder / "sent").read_text() == "[]"


def test_the_grace_interrupts_a_statement_that_would_never_end(project: Project, ear: Ear) -> None:
    write_job(project, ENDLESS)
    project.write(CONFIG.replace("30s", "2s"))
    process = start_statement(project, ear)
    process.send_signal(signal.SIGTERM)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 1)
    assert done(project)[-3:] == RELEASED


def test_a_statement_that_was_interrupted_does_not_go_on_in_its_server(
    project: Project, postgres_dsn: str
) -> None:
    psycopg = pytest.importorskip("psycopg", reason="NO PSYCOPG: install '.[test]'")
    sleep = f"ctx.connect({postgres_dsn!r}).execute('SELECT pg_sleep(600)')"
    write_job(project, sleep)
    process = project.start("run", "sync")
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' \
AND datname = current_database() AND state = 'active'"
    with psycopg.connect(postgres_dsn, autocommit=True) as watcher:

        def sleepers() -> int:
            return int(watcher.execute(sleeping).fetchone()[0])

        wait_for(lambda: sleepers() == 1, "the statement")
        os.kill(worker_of(process), signal.SIGUSR1)
        assert project.finish(process).code == 75
        wait_for(lambda: sleepers() == 0, "its end", limit_s=10)
    assert done(project)[-3:] == RELEASED


# --- Ctrl-C in process, and a stop before anything has begun --------------------------------------


@pytest.mark.parametrize("point", ["commit.prepared", "ledger.commit", "checkpoint.fsync"])
def test_ctrl_c_in_process_never_tears_a_commit(project: Project, point: str) -> None:
    write_job(project)
    process = project.start("run", "sync", "--in-process", env=at(f"{point}@2=stop"))
    wait_for(lambda: is_stopped(process.pid), "the commit")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    ended = project.finish(process)
    assert (ended.code, ended.err) == (130, "")
    assert run_row(project) == ("paused", "stop", 2)
    assert project.run("check").out == "ledger and checkpoints agree\n"
    assert done(project)[-3:] == RELEASED
    finish_after(project, 0)


@pytest.mark.parametrize("words", [("run", "sync"), ("resume",), ("resume", "--all")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_before_anything_has_begun_starts_nothing(
    project: Project, words: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    write_job(project)
    assert project.run("run", "sync", "--batches", "1").code == 75
    before = rows(project, "SELECT * FROM attempt")
    process = project.start(*words, env=at("main.begun=stop"))
    wait_for(lambda: is_stopped(process.pid), "the beginning")
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert project.finish(process).code == code
    assert rows(project, "SELECT * FROM attempt") == before


def test_other_commands_can_be_stopped_at_once(project: Project) -> None:
    write_job(project)
    process = project.start("status", env=at("main.begun=stop"))
    wait_for(lambda: is_stopped(process.pid), "the beginning")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert project.finish(process).code == -signal.SIGTERM


# --- what is said, and when -----------------------------------------------------------------------


class SetClock(Host):
    """A machine whose clock is set by the test."""

    time_s = 100.0

    def monotonic(self) -> float:
        """Return the time that was set."""
        return self.time_s


@pytest.fixture
def systemd(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """What speaks to the ear, on a clock that stands still."""
    for name, value in ear.environment(WATCHDOG_USEC="4000000").items():
        monkeypatch.setenv(name, value)
    return SetClock().systemd


def test_what_is_done_is_one_line_said_when_it_changes_and_once_a_second(
    systemd: Systemd, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("one\nREADY=1", "two", "two", "x" * 5000):
        systemd.show(text)
        systemd.turn()
    assert ear.heard("STATUS") == ["one"]
    monkeypatch.setattr(SetClock, "time_s", 101.0)
    systemd.turn()
    assert ear.heard("STATUS") == ["one", "x" * 500]
    systemd.show("the last", at_once=True)
    assert ear.heard("STATUS")[-1] == "the last"
    assert ear.heard("READY") == []


def test_the_watchdog_is_fed_at_half_its_time_and_by_turns_only(
    systemd: Systemd, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []
    for moment_s in (100.0, 101.9, 102.0, 103.9, 110.0):
        monkeypatch.setattr(SetClock, "time_s", moment_s)
        systemd.turn()
        fed.append(len(ear.heard("WATCHDOG")))
    assert fed == [1, 1, 2, 2, 3]
    assert systemd.longest_wait_s == 1


def test_what_a_full_socket_did_not_take_is_said_later(systemd: Systemd, ear: Ear) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker:
        try:
            while True:
                speaker.sendto(b"X=1", f"\0{ear.address[1:]}")
        except BlockingIOError:
            systemd.ready()
    assert ear.heard("READY") == []
    systemd.turn()
    systemd.turn()
    assert ear.heard("READY") == ["1"]


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ear = Ear("user@1000")
    monkeypatch.setenv("NOTIFY_SOCKET", ear.address)
    Host().systemd.ready()
    assert ear.heard("READY") == ["1"]
    assert "NOTIFY_SOCKET" not in os.environ
    ear.close()


def test_secrets_are_masked_before_systemd_hears_them(project: Project, ear: Ear) -> None:
    write_job(project)
    secret = launch_with('batchrun.doing_text = lambda *_: "postgres://me:geheim@host"')
    assert project.run("run", "sync", env=ear.environment(), launch=secret).code == 0
    assert "sync: postgres://me:***@host" in ear.heard("STATUS")
