"""People are told of what needs them: once, by every way, and never in the way of a run."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import ROOT, Ended, Project, clean_environment, wait_for
from test_05_ledger import admit
from test_11_worker import at, rows, start_held, worker_of, write_job
from test_12_supervisor import launch_with

import batchrun
from batchrun import (
    Alerts,
    AttemptEnd,
    Config,
    Ending,
    ExitCode,
    Host,
    Launch,
    Ledger,
    Lockfile,
    Reason,
    Rollback,
    RunState,
    load_config,
    open_ledger,
    ping_of,
    typed_elsewhere,
)

WORDS = """["sh", "-c", "told=$(cat); printf '%s\\\\n' \\"$told\\" >> told.jsonl"]"""
COMMAND = f"[alerts]\ncommand = {WORDS}\n"
RAISES = "raise ValueError('no stock')"


# --- whom alerts are told to ----------------------------------------------------------------------


@dataclass
class Ear:
    """An HTTP server that notes what it is told, and answers as it is told to."""

    url: str = ""
    heard: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, body
    headers: dict[str, str] = field(default_factory=dict)  # of the newest request
    answer: Callable[[], int] = lambda: 200


@pytest.fixture
def ear() -> Iterator[Ear]:
    made, over = Ear(), threading.Event()

    class Web(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
            made.headers = dict(self.headers)
            made.heard.append((self.command, self.path, body))
            if code := made.answer():
                self.send_response(code)
                self.end_headers()
            else:
                over.wait()

        do_GET = do_POST  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        over.set()
        server.shutdown()


def told(folder: Path) -> list[dict[str, Any]]:
    """Return the events that the command was given, in the order in which they were raised."""
    path = folder / "told.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=lambda event: int(event["alert"]))


def elsewhere(folder: Path, todo: str) -> str:
    return typed_elsewhere(todo, folder / "batchrun.toml")


def deliveries(project: Project) -> list[Any]:
    sql = "SELECT kind, way, error FROM delivery JOIN alert a ON a.id = alert ORDER BY delivery.id"
    return rows(project, sql)


def make_due(project: Project) -> None:
    """Let the waits of all deliveries be over."""
    with closing(apsw.Connection(str(project.state / "ledger.db"))) as ledger:
        ledger.execute("UPDATE delivery SET at = '2026-01-01T00:00:00.000Z'")


def alert(project: Project, config: str, **job: str) -> None:
    """Write the job and a config with alerts."""
    write_job(project, **job)
    path = project.folder / "batchrun.toml"
    path.write_text(f"{path.read_text()}\n{config}")


def run_id(project: Project) -> str:
    return str(rows(project, "SELECT id FROM run ORDER BY key DESC LIMIT 1")[0][0])


# --- in one process, with a clock of its own ------------------------------------------------------


class LateHost(Host):
    """A Host whose wall clock the test sets."""

    late_s = 0.0

    def later(self, seconds: float) -> str:
        return super().later(seconds + self.late_s)


HOUR, DAY = 3600.0, 86_400.0


@dataclass
class Desk:
    """A ledger, a configuration, and a clock; `tick` looks and tells as the tick does."""

    folder: Path
    host: LateHost
    ledger: Ledger
    config: Config
    lockfile: Lockfile | None = None

    def tick(self, after_s: float = 0.0) -> list[str]:
        """Return the kinds of what the command has been told so far, so much later."""
        self.host.late_s += after_s
        alerts = Alerts(self.config, self.ledger, self.host)
        alerts.look(self.lockfile)
        alerts.deliver()
        return [event["kind"] for event in told(self.folder)]

    @property
    def text(self) -> str:
        """The newest text that was told, but for what differs from run to run."""
        return str(told(self.folder)[-1]["text"])

    def end(self, ending: Ending, reason: Reason = Reason.NONE, error: str = "it broke") -> None:
        """Have an attempt of the job that ended so."""
        admission = admit(self.ledger, run_id=f"r{self.ledger.newest_event()}")
        code = ExitCode.DONE if ending == Ending.SUCCEEDED else ExitCode.FAILED
        end = AttemptEnd(ending, code, reason, error)
        self.ledger.settle(admission.run, admission.generation, end)

    def configure(self, more: str) -> None:
        path = self.folder / "batchrun.toml"
        path.write_text(f"{COMMAND}[jobs.sync]\n{more}")
        self.config = load_config(path)

    def tries(self) -> list[Any]:
        return self.ledger._rows("SELECT alert, way, error FROM delivery ORDER BY id")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    host, path = LateHost(), tmp_path / "batchrun.toml"
    (tmp_path / "state").mkdir(mode=0o700)
    path.write_text(f"{COMMAND}[jobs.sync]\n")
    with closing(open_ledger(tmp_path / "state" / "ledger.db", host, create=True)) as ledger:
        yield Desk(tmp_path, host, ledger, load_config(path))


# --- once per change ------------------------------------------------------------------------------


def test_a_failed_run_is_told_once_by_every_way_and_its_next_success_too(
    project: Project, ear: Ear
) -> None:
    alert(project, f'{COMMAND}webhook = "{ear.url}/in"\n', before_8=RAISES)
    assert project.run("run", "sync").code == 1
    run = run_id(project)
    (event,) = told(project.folder)
    why = f"sync: run {run} failed.\nThe job raised ValueError: no stock in batch 2."
    todo = elsewhere(project.folder, f"batchrun resume {run}")
    assert event == {
        "alert": 1,
        "kind": "failed",
        "job": "sync",
        "run": run,
        "at": event["at"],
        "why": why,
        "todo": todo,
        "text": f"{why}\nto type: {todo}",
        "host": os.uname().nodename,
        "config": str(project.folder / "batchrun.toml"),
    }
    assert [(how, path, json.loads(body)) for how, path, body in ear.heard] == [
        ("POST", "/in", event)
    ]
    assert ear.headers["Content-Type"] == "application/json"
    assert [project.run("resume", "--all") for _ in range(2)] == [Ended(0, "", "")] * 2
    assert project.run("run", "sync").code == 1
    alert(project, f'{COMMAND}webhook = "{ear.url}/in"\n')
    assert project.run("run", "sync") == Ended(0, "", "")
    failed, recovered = told(project.folder)
    assert recovered["text"] == (
        f"sync has recovered: run {run} succeeded.\nIt was failed since {failed['at']}."
    )
    assert len(ear.heard) == 2
    assert deliveries(project) == [
        (kind, way, None) for kind in ("failed", "recovered") for way in ("command", "webhook")
    ]
    kinds = [kind for (kind,) in rows(project, "SELECT kind FROM alert ORDER BY id")]
    assert kinds == ["failed", "recovered"]


def test_what_is_to_be_typed_can_be_typed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "batchrun").touch(mode=0o755)
    for place, program in (
        ("/nowhere", f"{sys.executable} {ROOT}/batchrun.py"),
        (f"{tmp_path}", "batchrun"),
    ):
        monkeypatch.setenv("PATH", place)
        line = elsewhere(Path("/a b"), "batchrun resume 1")
        assert line == f"{program} --config '/a b/batchrun.toml' resume 1"
    assert elsewhere(Path("/a"), "kill -CONT 7") == "kill -CONT 7"


@pytest.mark.parametrize(
    ("ending", "reason", "kind", "words"),
    [
        (Ending.RAISED, Reason.NONE, "failed", "failed"),
        (Ending.AWAITS, Reason.POISON, "awaiting", "needs a person"),
        (Ending.STOPPED, Reason.RETRY, "awaiting", "needs a person"),
        (Ending.REFUSED, Reason.NONE, "awaiting", "needs a person"),
    ],
)
def test_a_run_that_needs_a_person_is_told_once_over_many_ticks_until_it_has_recovered(
    desk: Desk, ending: Ending, reason: Reason, kind: str, words: str
) -> None:
    desk.end(ending, reason)
    assert desk.tick() == [kind]
    run = told(desk.folder)[0]["run"]
    todo = f"to type: {elsewhere(desk.folder, f'batchrun resume {run}')}"
    assert desk.text == f"sync: run {run} {words}.\nit broke\n{todo}"
    desk.end(ending, reason)
    assert [desk.tick(300), desk.tick(DAY)] == [[kind]] * 2
    desk.end(Ending.SUCCEEDED)
    assert [desk.tick(), desk.tick(300)] == [[kind, "recovered"]] * 2
    assert desk.ledger.alerts() == []


def test_what_is_done_to_an_older_success_is_no_recovery(desk: Desk) -> None:
    desk.end(Ending.SUCCEEDED)
    older = desk.ledger.last_success("sync")
    desk.end(Ending.RAISED)
    assert desk.tick() == ["failed"]
    desk.ledger.note("ann", "2 rejects dropped", "not ours", run=older)
    assert desk.tick() == ["failed"]
    assert [alert.kind for alert in desk.ledger.alerts()] == ["failed"]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [(Ending.STOPPED, Reason.STOP), (Ending.STOPPED, Reason.PERSON), (Ending.DIED, Reason.NONE)],
)
def test_what_goes_on_by_itself_or_was_decided_is_not_told(
    desk: Desk, ending: Ending, reason: Reason
) -> None:
    desk.end(ending, reason)
    assert desk.tick(DAY) == []


def test_a_pause_by_health_is_told_when_it_is_longer_than_paused_after(desk: Desk) -> None:
    desk.end(Ending.STOPPED, Reason.HEALTH, "")
    assert [desk.tick(), desk.tick(0.4 * HOUR)] == [[], []]
    assert [desk.tick(0.6 * HOUR), desk.tick(HOUR)] == [["paused"]] * 2
    assert desk.text.splitlines()[0].endswith("is paused by health for 1h00m.")


def test_each_question_of_a_run_is_told(project: Project) -> None:
    project.write(
        f"[jobs.sync]\n{COMMAND}",
        sync="from batchrun import job\n\n@job\ndef sync(ctx):\n"
        "    ctx.approval('one', 'first')\n    ctx.approval('two', 'second')\n"
        "    for batch in ctx.batches([1]):\n        yield batch\n",
    )
    assert project.run("run", "sync").code == 13
    run = run_id(project)
    assert project.run("approve", run, "one", "--why", "good").code == 0
    assert project.run("resume", "--all").code == 13
    first, second = (event["text"] for event in told(project.folder))
    assert first == (
        f"sync: run {run} needs a person.\nIt asks for the approval 'one': first\n"
        "to type: " + elsewhere(project.folder, f'batchrun approve {run} one --why "..."')
    )
    assert "It asks for the approval 'two': second" in second


def test_a_job_is_late_without_a_success_within_expect_every(desk: Desk) -> None:
    desk.configure('expect_every = "1d"')
    desk.end(Ending.SUCCEEDED)
    assert [desk.tick(0.9 * DAY), desk.tick(0.2 * DAY), desk.tick(DAY)] == [[], *[["late"]] * 2]
    assert desk.text == (
        "sync is late: no success for 1d02h, one is expected every 1d00h.\n"
        f"to type: {elsewhere(desk.folder, 'batchrun status sync')}"
    )
    desk.end(Ending.SUCCEEDED)
    assert desk.tick() == ["late", "recovered"]
    assert desk.tick(2 * DAY) == ["late", "recovered", "late"]


def test_a_timer_that_never_fires_is_noticed_from_the_first_tick_on(desk: Desk) -> None:
    desk.configure('expect_every = "1d"')
    assert desk.tick(2 * DAY) == []  # nothing is known of it yet
    for _ in range(3):
        desk.ledger.tick(["sync"])
    assert [(event.job, event.what) for event in desk.ledger.events()] == [("sync", "expected")]
    assert desk.tick(1.5 * DAY) == ["late"]
    assert "no success for 1d12h, one is expected every 1d00h, it never had one." in desk.text


def test_a_timer_that_never_fires_is_noticed_where_no_job_ever_ran(project: Project) -> None:
    write_job(project)
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert not project.state.exists()  # nobody said that a success is expected
    path = project.folder / "batchrun.toml"
    path.write_text(f'{path.read_text()}expect_every = "1ms"\n')
    assert project.run("resume", "--all") == Ended(0, "", "")
    ended = project.run("status")
    assert ended.code == 3
    assert re.search(r"\nlate: sync, no success for \S+, .*, it never had one\n", ended.out)


def test_a_job_is_late_under_maintenance_too_and_a_forgotten_one_is_told(desk: Desk) -> None:
    desk.configure('expect_every = "1d"')
    desk.end(Ending.SUCCEEDED)
    desk.lockfile = Lockfile(1, 1, "", "ada", "deploy", None, [], "It was to end at noon.")
    assert [desk.tick(2 * DAY), desk.tick(300)] == [["late", "overdue"]] * 2
    late, overdue = told(desk.folder)
    assert late["why"].endswith("every 1d00h; maintenance is on, by ada.")
    assert overdue["text"] == (
        "Maintenance is overdue. It was to end at noon. It is on by ada.\n"
        f"to type: {elsewhere(desk.folder, 'batchrun maintenance off')}"
    )
    desk.lockfile = None
    assert [desk.tick(), desk.tick()] == [["late", "overdue", "recovered"]] * 2
    assert desk.text.startswith("Maintenance is not overdue any more.\nIt was overdue since 20")


def test_an_alert_of_a_job_that_is_taken_out_of_the_configuration_stands_no_more(
    desk: Desk,
) -> None:
    desk.end(Ending.RAISED)
    assert desk.tick() == ["failed"]
    path = desk.folder / "batchrun.toml"
    path.write_text(f"{COMMAND}[jobs.other]\n")
    desk.config = load_config(path)
    assert [desk.tick(), desk.ledger.alerts()] == [["failed"], []]


def test_only_what_on_names_is_told(desk: Desk) -> None:
    path = desk.folder / "batchrun.toml"
    path.write_text(f'{COMMAND}on = ["late", "recovered"]\n[jobs.sync]\n')
    desk.config = load_config(path)
    desk.end(Ending.RAISED)
    assert desk.tick(DAY) == []
    assert desk.ledger.alerts() == []


def test_status_shows_a_late_job_in_a_line_and_what_to_type(project: Project) -> None:
    write_job(project)
    path = project.folder / "batchrun.toml"
    path.write_text(f'{path.read_text()}expect_every = "1ms"\n')
    assert project.run("run", "sync") == Ended(0, "", "")
    ended = project.run("status")
    words = (
        r"late: sync, no success for \d+s, one is expected every 0s\nto type: batchrun run sync\n"
    )
    assert ended.code == 3
    assert re.search(words, ended.out)
    one = project.run("status", "sync")
    assert one.code == 3
    assert re.search(r"\n  late          no success for \d+s, one is expected every 0s\n", one.out)


# --- stalled ----------------------------------------------------------------------------------


STALLED = COMMAND + '[jobs.other]\nuses = "sync"\n'


def hold_stalled(project: Project) -> tuple[Any, str]:
    """Return the supervisor and run of a job whose second batch hangs, and is stalled at once."""
    alert(project, STALLED, before_8="hold('go')")
    path = project.folder / "batchrun.toml"
    path.write_text(path.read_text().replace("[defaults]", '[defaults]\nstalled_after = "10ms"', 1))
    process = start_held(project)

    def is_stalled() -> bool:
        return bool(project.run("--json", "status", "sync").document["jobs"][0]["stalled"])

    wait_for(is_stalled, "the run to be stalled")
    return process, run_id(project)


def test_a_batch_that_hangs_is_told_by_the_tick_and_a_start_that_meets_it_exits_13(
    project: Project,
) -> None:
    process, run = hold_stalled(project)
    worker = worker_of(process)
    assert [project.run("resume", "--all") for _ in range(2)] == [Ended(0, "", "")] * 2
    (event,) = told(project.folder)
    assert (event["kind"], event["todo"]) == ("stalled", f"kill -KILL {worker}")
    words = rf"sync: run {run} is stalled: no commit for \d+s, at most \d+s is usual\.\n"
    assert re.fullmatch(words + f"Worker {worker} lives. .*", event["why"])
    status = project.run("status")
    assert status.code == 3
    assert "stalled: sync, no commit for " in status.out
    busy = project.run("run", "sync")
    assert busy.code == 13
    assert busy.err.splitlines()[0].startswith("sync is busy: ")
    assert busy.err.splitlines()[1:] == [
        busy.err.splitlines()[1],
        "Nothing was started; the refusal is recorded.",
        f"To end it: kill -KILL {worker}",
    ]
    assert f"Worker {worker} lives. Once it is killed its batch is done again." in busy.err


def test_an_owner_that_is_frozen_is_told_with_what_thaws_it(project: Project) -> None:
    process, run = hold_stalled(project)
    os.kill(process.pid, signal.SIGSTOP)
    worker = worker_of(process)
    os.kill(worker, signal.SIGSTOP)
    assert project.run("resume", "--all").code == 0
    (event,) = told(project.folder)
    assert (event["run"], event["todo"]) == (run, f"kill -CONT {worker}")
    assert f"Process {worker} is stopped (SIGSTOP, or a debugger)." in event["why"]
    busy = project.run("run", "sync")
    assert (busy.code, busy.err.splitlines()[-1]) == (13, f"To let it go on: kill -CONT {worker}")


def test_slow_batches_are_given_ten_times_their_usual_time(desk: Desk) -> None:
    me = desk.host.identify()
    assert me
    admission = admit(desk.ledger, owner=me)
    basis = batchrun.Basis({}, 1, batchrun.first_hash(desk.ledger.uuid, "r1", ""))
    run = desk.ledger.open_attempt(admission.run, admission.generation, me, basis)
    look = batchrun.stalled
    job = desk.config.job("sync")
    desk.host.late_s = 14 * 60
    assert look(desk.ledger, job, run, desk.host) is None
    desk.host.late_s = 16 * 60
    found = look(desk.ledger, job, run, desk.host)
    assert found
    assert found.what == "no commit for 16m00s, at most 15m00s is usual"
    sql = (
        "INSERT INTO batch (run, number, generation, kind, loop, cursor, read, rejected, counts,"
        " hash, at, elapsed_s) VALUES (?, 1, 1, 'batch', 'main', '1', 5, 0, '{}', '', ?, 120.0)"
    )
    desk.ledger._sql(sql, (run.key, Host().now()))
    assert look(desk.ledger, job, run, desk.host) is None
    desk.host.late_s = 21 * 60
    assert look(desk.ledger, job, run, desk.host)
    desk.configure('stalled_after = "0"')
    assert look(desk.ledger, desk.config.job("sync"), run, desk.host) is None


# --- what does not arrive -------------------------------------------------------------------------


def test_what_does_not_arrive_is_tried_again_with_longer_waits_and_given_up_at_last(
    desk: Desk, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchrun, "DELIVERY_TRIES", 3)
    path = desk.folder / "batchrun.toml"
    desk.end(Ending.RAISED)
    for after_s, code in ((0, 500), (30, 1), (31, 0), (200, 2), (41, 301), (DAY, 3), (DAY, 4)):
        limit = "30s" if code else "300ms"
        path.write_text(f'[alerts]\nwebhook = "{ear.url}/"\ntimeout = "{limit}"\n[jobs.sync]\n')
        desk.config = load_config(path)
        ear.answer = lambda code=code: code  # type: ignore[misc]
        desk.tick(after_s)
    assert desk.tries() == [
        (1, "webhook", "answers HTTP 500 instead of 2xx"),
        (1, "webhook", "gives no answer within 0.3 s"),
        (1, "webhook", "answers HTTP 301 instead of 2xx"),
    ]
    given_up = desk.ledger.events(what="%was not told%")
    assert [(event.job, event.what, event.why) for event in given_up] == [
        ("sync", "alert 1 was not told by webhook", "answers HTTP 301 instead of 2xx")
    ]
    assert desk.ledger.undelivered() == [(1, "webhook", "answers HTTP 301 instead of 2xx")]


def test_one_way_that_fails_holds_no_other_up(desk: Desk, ear: Ear) -> None:
    path = desk.folder / "batchrun.toml"
    path.write_text(f'{COMMAND}webhook = "http://127.0.0.1:1/"\n[jobs.sync]\n')
    desk.config = load_config(path)
    desk.end(Ending.RAISED)
    assert desk.tick() == ["failed"]
    path.write_text(path.read_text().replace("http://127.0.0.1:1/", ear.url))
    desk.config = load_config(path)
    assert desk.tick(3 * HOUR) == ["failed"]
    assert desk.tries() == [
        (1, "command", None),
        (1, "webhook", "refuses connections"),
        (1, "webhook", None),
    ]
    assert desk.ledger.undelivered() == []


@pytest.mark.parametrize(
    ("command", "limit", "error"),
    [
        (["sh", "-c", "echo no room; exit 3"], "30s", "ended with exit 3: no room"),
        (["sh", "-c", "sleep 600"], "200ms", "gives no answer within 0.2 s"),
        (["./not-there"], "30s", "cannot be asked: No such file or directory"),
    ],
)
def test_a_command_that_fails_or_hangs_is_recorded_and_ended(
    desk: Desk, command: list[str], limit: str, error: str
) -> None:
    path = desk.folder / "batchrun.toml"
    path.write_text(
        f'[alerts]\ncommand = {json.dumps(command)}\ntimeout = "{limit}"\n[jobs.sync]\n'
    )
    desk.config = load_config(path)
    desk.end(Ending.RAISED)
    desk.tick()
    assert desk.tries() == [(1, "command", error)]
    assert Host().children() == []


def test_a_way_that_is_taken_out_of_the_configuration_is_waited_for_no_more(desk: Desk) -> None:
    path = desk.folder / "batchrun.toml"
    path.write_text('[alerts]\nwebhook = "http://127.0.0.1:1/"\n[jobs.sync]\n')
    desk.config = load_config(path)
    desk.end(Ending.RAISED)
    desk.tick()
    desk.configure("")
    desk.tick(DAY)
    assert desk.ledger.alerts("pending <> '[]'") == []


def test_a_clock_that_is_set_back_holds_no_delivery_up(desk: Desk) -> None:
    path = desk.folder / "batchrun.toml"
    path.write_text('[alerts]\ncommand = ["false"]\n[jobs.sync]\n')
    desk.config = load_config(path)
    desk.end(Ending.RAISED)
    for after_s in (0, -DAY):
        desk.tick(after_s)
    assert len(desk.tries()) == 2


@pytest.mark.parametrize(
    ("point", "tries"),
    [
        ("alert.raised", []),
        ("delivery.begun", ["the process ended during the call"]),
        ("delivery.answered", ["the process ended during the call"]),
    ],
)
def test_killed_between_raise_and_record_it_is_told_once_at_least_and_each_try_is_kept(
    project: Project, point: str, tries: list[str]
) -> None:
    alert(project, COMMAND, before_8=RAISES)
    assert project.run("run", "sync", env=at(f"{point}=kill")).code == -signal.SIGKILL
    assert [error for _, _, error in deliveries(project)] == tries
    make_due(project)
    assert [project.run("resume", "--all") for _ in range(2)] == [Ended(0, "", "")] * 2
    assert [error for _, _, error in deliveries(project)] == [*tries, None]
    assert {event["kind"] for event in told(project.folder)} == {"failed"}


# --- never in the way -------------------------------------------------------------------------


def test_a_webhook_that_hangs_changes_neither_exit_code_nor_letter_and_a_refusal_waits_for_none(
    project: Project, ear: Ear
) -> None:
    ear.answer = lambda: 0
    config = f'[alerts]\nwebhook = "{ear.url}/in"\ntimeout = "300ms"\n'
    alert(project, config, before_8=RAISES)
    ended = project.run("run", "sync")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"sync: run {run_id(project)} failed.\nThe job raised ")
    assert deliveries(project) == [("failed", "webhook", "gives no answer within 0.3 s")]
    make_due(project)
    assert project.run("maintenance", "on").code == 0
    assert project.run("run", "sync").code == 12
    assert len(deliveries(project)) == 1


def test_whatever_goes_wrong_with_telling_changes_no_exit_code(project: Project) -> None:
    alert(project, COMMAND)
    path = project.folder / "batchrun.toml"
    path.write_text(path.read_text().replace("[jobs.sync]", '[jobs.sync]\nexpect_every = "1d"'))
    assert project.run("run", "sync") == Ended(0, "", "")
    with closing(apsw.Connection(str(project.state / "ledger.db"))) as ledger:
        ledger.execute("UPDATE run SET ended_at = 'yesterday'")
    ended = project.run("-v", "run", "sync", "--batches", "1")
    assert ended.code == 75
    assert "warning: not everybody was told: Invalid isoformat string: 'yesterday'" in ended.err


def test_a_command_is_not_called_with_the_supervisors_stops_blocked(project: Project) -> None:
    words = '["cp", "/proc/self/status", "status.txt"]'  # no shell: that unblocks them by itself
    alert(project, f"[alerts]\ncommand = {words}\n", before_8=RAISES)
    assert project.run("run", "sync").code == 1
    status = (project.folder / "status.txt").read_text()
    assert re.findall(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE) == ["0" * 16]


def test_a_wrong_configuration_is_said_once(project: Project) -> None:
    project.write(f"{COMMAND}[jobs.sync]\nbatch_size = 0\n")
    ended = project.run("run", "sync")
    assert ended.code == 2
    assert ended.err.count("cannot be used") == 1


def test_who_was_asked_to_stop_waits_for_no_webhook_and_the_next_one_tells(
    project: Project, ear: Ear
) -> None:
    config = f'[alerts]\nwebhook = "{ear.url}/in"\n'
    alert(project, config, before_8=RAISES)
    assert project.run("run", "sync", env=at("alert.raised=kill")).code == -signal.SIGKILL
    alert(project, config, before_8="hold('go')")
    process = start_held(project)
    process.terminate()
    (project.folder / "go").touch()
    assert project.finish(process).code == 75
    assert deliveries(project) == []
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert [json.loads(body)["kind"] for _, _, body in ear.heard] == ["failed", "recovered"]


# --- a disk that is full --------------------------------------------------------------------------


def kinds_heard(ear: Ear) -> list[str]:
    return [json.loads(body)["kind"] for _, _, body in ear.heard]


def test_a_start_below_min_free_is_told_once_until_the_job_has_succeeded(
    project: Project, ear: Ear
) -> None:
    config = f'[alerts]\nwebhook = "{ear.url}/in"\n'
    alert(project, config)
    assert project.run("run", "sync", "--batches", "1").code == 75
    path = project.folder / "batchrun.toml"
    text = path.read_text()
    path.write_text(text.replace('"1MB"', '"900TB"'))
    for _ in range(2):
        assert project.run("run", "sync").code == 5
    assert kinds_heard(ear) == ["awaiting"]
    event = json.loads(ear.heard[0][2])
    why = event["why"].splitlines()
    assert event["todo"].endswith("doctor sync")
    assert why[0] == "sync needs a person: its state directory cannot be used."
    assert why[1].startswith("Disk full: less than 900,000,000,000,000 bytes are free at ")
    path.write_text(text)
    assert project.run("run", "sync").code == 0
    assert kinds_heard(ear) == ["awaiting", "recovered"]


@pytest.mark.needs_root
def test_where_the_ledger_takes_nothing_it_is_told_all_the_same(project: Project, ear: Ear) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: no file system can be mounted")
    disk = project.state
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("NO MOUNT: this machine does not let root mount a tmpfs")
    try:
        alert(project, f'[alerts]\nwebhook = "{ear.url}/in"\n')
        assert project.run("run", "sync", "--batches", "1").code == 75
        fill = ["dd", "if=/dev/zero", f"of={disk}/fill", "bs=4k"]
        assert b"No space left" in subprocess.run(fill, capture_output=True, check=False).stderr
        for number in (1, 2):
            assert project.run("run", "sync").code == 5
            assert kinds_heard(ear) == ["awaiting"] * number
        assert project.run("resume", "--all").code == 5
        (disk / "fill").unlink()
        assert project.run("resume", "--all").code == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.needs_root
def test_a_start_by_the_wrong_user_is_told_to_that_user_alone(project: Project, ear: Ear) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: nothing can be given to another user")
    alert(project, f'[alerts]\nwebhook = "{ear.url}/in"\n')
    assert project.run("run", "sync", "--batches", "1").code == 75
    for path in (project.state, *project.state.rglob("*")):
        os.chown(path, 65_534, 65_534)
    ended = project.run("run", "sync")
    assert (ended.code, ear.heard) == (5, [])
    assert "cannot be used: it belongs to " in ended.err


# SQLite itself makes the COMMIT fail.
NO_COMMIT = """\
real = batchrun.Ledger.{verb}
def fails(ledger, *given, **named):
    ledger._connection.set_commit_hook(lambda: True)
    real(ledger, *given, **named)

batchrun.Ledger.{verb} = fails
"""


@pytest.mark.parametrize(("verb", "attempts"), [("tick", 2), ("raise_alerts", 3)])
def test_after_a_commit_of_unknown_outcome_the_tick_begins_nothing_more(
    project: Project, ear: Ear, verb: str, attempts: int
) -> None:
    alert(
        project,
        f'[alerts]\nwebhook = "{ear.url}/in"\n[jobs.other]\nuses = "sync"\n',
        before_8=RAISES,
    )
    for job in ("sync", "other"):
        assert project.run("run", job, "--batches", "1").code == 75
    project.write_file("commit.py", NO_COMMIT.format(verb=verb))
    launch = launch_with("exec(open('commit.py').read())")
    ended = project.run("resume", "--all", launch=launch)
    assert ended.code == (5 if verb == "tick" else 1)
    assert ("What the tick has recorded may or may not be" in ended.err) is (verb == "tick")
    assert len(rows(project, "SELECT 1 FROM attempt")) == attempts
    assert kinds_heard(ear) == ["failed"] * (attempts - 2)


def test_after_a_commit_of_unknown_outcome_it_is_told_without_a_record(
    project: Project, ear: Ear
) -> None:
    alert(project, f'[alerts]\nwebhook = "{ear.url}/in"\n')
    assert project.run("run", "sync", "--batches", "1").code == 75
    project.write_file("commit.py", NO_COMMIT.format(verb="admit"))
    launch = launch_with("exec(open('commit.py').read())")
    assert project.run("run", "sync", launch=launch).code == 5
    assert (kinds_heard(ear), deliveries(project)) == (["awaiting"], [])


def test_what_a_success_has_pruned_with_unknown_outcome_is_told_as_such(
    project: Project, ear: Ear
) -> None:
    alert(project, f'[alerts]\nwebhook = "{ear.url}/in"\n')
    project.write_file("commit.py", NO_COMMIT.format(verb="prune_the_rest"))
    ended = project.run("run", "sync", launch=launch_with("exec(open('commit.py').read())"))
    ((run,),) = rows(project, "SELECT id FROM run WHERE state = 'succeeded'")
    assert (ended.code, kinds_heard(ear), deliveries(project)) == (5, ["awaiting"], [])
    assert ended.err.startswith("The ledger's COMMIT failed. ")
    assert f"Run {run} of sync stays succeeded: only old ones were to go.\n" in ended.err


def test_after_a_refusal_of_unknown_outcome_the_tick_begins_nothing_more(project: Project) -> None:
    alert(project, '[jobs.other]\nuses = "sync"\n')
    for job in ("sync", "other"):
        assert project.run("run", job, "--batches", "1").code == 75
    assert project.run("maintenance", "on", "--job", "sync").code == 0
    project.write_file("commit.py", NO_COMMIT.format(verb="refuse"))
    launch = launch_with("exec(open('commit.py').read())")
    ended = project.run("resume", "--all", launch=launch)
    assert (ended.code, len(rows(project, "SELECT 1 FROM attempt"))) == (5, 2)


# --- pings --------------------------------------------------------------------------------------


def with_ping(project: Project, ear: Ear, before_8: str) -> None:
    write_job(project, before_8=before_8)
    path = project.folder / "batchrun.toml"
    path.write_text(
        f'{path.read_text()}[jobs.sync]\nping = "{ear.url}/x1y2"\n'.replace("[jobs.sync]\n", "", 1)
    )


def test_a_job_pings_when_it_begins_and_when_it_ends(project: Project, ear: Ear) -> None:
    held = "hold('go'); " + RAISES
    with_ping(project, ear, held)
    process = start_held(project)
    wait_for(lambda: ear.heard, "the ping of the start")
    (project.folder / "go").touch()
    assert project.finish(process).code == 1
    with_ping(project, ear, "pass")
    ear.heard.pop()
    assert project.run("run", "sync") == Ended(0, "", "")
    paths = [(how, path) for how, path, _ in ear.heard]
    assert paths[0] == ("GET", "/x1y2/start")
    assert paths[-1] == ("GET", "/x1y2")
    kinds = [kind for (kind,) in rows(project, "SELECT kind FROM alert ORDER BY id")]
    assert kinds == ["ping start", "ping fail", "ping start", "ping success"]
    assert project.run("maintenance", "on").code == 0
    assert project.run("run", "sync").code == 12
    assert len(rows(project, "SELECT 1 FROM alert")) == 4
    assert rows(project, "SELECT 1 FROM alert WHERE pending <> '[]'") == []


@pytest.mark.parametrize("code", ExitCode)
def test_a_start_pings_that_it_failed_where_somebody_must_look(code: ExitCode) -> None:
    pings = ping_of(None, Launch("sync"), code)
    assert [ping.kind for ping in pings] == ["ping fail"] * (code in (1, 2, 5, 13))


def test_a_ping_that_hangs_holds_no_batch_up_and_a_newer_one_takes_its_place(
    project: Project, ear: Ear
) -> None:
    ear.answer = lambda: 0
    with_ping(project, ear, "pass")
    path = project.folder / "batchrun.toml"
    path.write_text(f'{path.read_text()}[alerts]\ntimeout = "300ms"\n')
    assert project.run("run", "sync") == Ended(0, "", "")
    assert rows(project, "SELECT kind, pending FROM alert ORDER BY id") == [
        ("ping start", "[]"),
        ("ping success", '["ping"]'),
    ]


def test_a_retry_and_a_rollback_are_not_the_job_and_ping_nobody(desk: Desk, ear: Ear) -> None:
    desk.configure(f'ping = "{ear.url}/x1y2"')
    run = admit(desk.ledger).run._replace(state=RunState.SUCCEEDED)
    assert [ping.kind for ping in ping_of(run, Launch("sync"), ExitCode.DONE)] == ["ping success"]
    for other in (run._replace(retry_of="r0"), run._replace(rollback_of="r0")):
        Alerts(desk.config, desk.ledger, desk.host).ping(other)
        assert ping_of(other, Launch("sync"), ExitCode.DONE) == []
        assert ping_of(other, Launch("sync"), ExitCode.FAILED) == []
    refused = Launch("sync", rollback=Rollback(run, 0, 1))
    assert ping_of(None, refused, ExitCode.PERSON_NEEDED) == []
    assert (desk.ledger.alerts("true"), ear.heard) == ([], [])


# --- secrets --------------------------------------------------------------------------------------


def test_no_secret_of_a_way_is_in_any_text(project: Project, ear: Ear) -> None:
    ear.answer = lambda: 500
    config = f'[alerts]\nwebhook = "{ear.url}/hook/S3cr3tPath"\nheader = {{ env = "HOOK" }}\n'
    alert(project, config, before_8=f"raise ValueError('{ear.url}/hook/S3cr3tPath')")
    env = {**clean_environment(), "HOOK": "Authorization: Bearer T0kenT0ken"}
    ended = project.run("run", "sync", env=env)
    assert ended.code == 1
    assert ear.headers["Authorization"] == "Bearer T0kenT0ken"
    doctor = project.run("doctor", "--alerts", env=env)
    assert doctor.code == 3
    texts = [*ended.__dict__.values(), *doctor.__dict__.values(), *(b for _, _, b in ear.heard)]
    files = [path.read_bytes() for path in project.state.rglob("*") if path.is_file()]
    for secret in ("S3cr3tPath", "T0kenT0ken"):
        assert [text for text in texts if secret in str(text)] == []
        assert [content for content in files if secret.encode() in content] == []


ALERT_NAMES = '"failed", "awaiting", "paused", "stalled", "overdue", "late" or "recovered"'


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            'webhook = "hooks.example/S3cr3t"',
            'webhook = "***": an address that begins with one of http://, https:// is wanted',
        ),
        ('header = "S3cr3t"', 'header = "***": a header is wanted, "Name: value"'),
        (
            'on = ["fail"]',
            f'on = ["fail"]: {ALERT_NAMES} is wanted',
        ),
        ('comand = ["mail"]', "comand: there is no such key or table; did you mean command?"),
    ],
)
def test_a_wrong_key_of_alerts_is_refused(project: Project, line: str, wrong: str) -> None:
    project.write(f"[jobs.sync]\n[alerts]\n{line}\n")
    ended = project.run("status")
    assert ended.code == 2
    assert ended.err.splitlines()[1] == f"- [alerts] {wrong}"


# --- doctor -----------------------------------------------------------------------------------


def test_doctor_sends_a_test_by_every_way_and_says_what_came_back(
    project: Project, ear: Ear
) -> None:
    with_ping(project, ear, "pass")
    path = project.folder / "batchrun.toml"
    path.write_text(f'{path.read_text()}{COMMAND}webhook = "http://127.0.0.1:1/"\n')
    ended = project.run("--json", "doctor", "--alerts")
    found = [(r["name"], r["state"], r["answer"]) for r in ended.document["examined"]]
    assert ended.code == 3
    assert found == [
        ("command", "ok", "ended with exit 0"),
        ("webhook", "bad", "refuses connections"),
        ("ping of sync", "ok", "answers HTTP 200"),
    ]
    assert [bool(row["todo"]) for row in ended.document["examined"]] == [False, True, False]
    (event,) = told(project.folder)
    assert event["text"] == "This is a test of batchrun's alerts; nothing is wrong."
    assert [path for _, path, _ in ear.heard] == ["/x1y2"]


def test_doctor_finds_a_job_that_is_expected_and_that_nobody_would_miss(project: Project) -> None:
    write_job(project)
    path = project.folder / "batchrun.toml"
    path.write_text(f'{path.read_text()}expect_every = "1d"\n')

    def found() -> list[Any]:
        rows = project.run("--json", "doctor", "sync").document["examined"]
        return [
            row["answer"]
            for row in rows
            if row["name"] == "expect_every of sync" and row["state"] == "bad"
        ]

    assert found() == ["no tick was ever seen"]
    assert project.run("run", "sync").code == 0
    assert found() == ["no tick was ever seen"]
    assert project.run("resume", "--all") == Ended(0, "", "")
    assert found() == []
    with closing(apsw.Connection(str(project.state / "ledger.db"))) as ledger:
        ledger.execute("UPDATE ledger SET ticked_at = '2026-01-01T00:00:00.000Z'")
    assert found() == ["no tick was seen since 2026-01-01T00:00:00.000Z"]
    path.write_text(f'{path.read_text()}ping = "http://127.0.0.1:1/"\n')
    assert found() == []
