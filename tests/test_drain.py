"""Draining: what a barrier found is stopped, ended or named; and the report proves it."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import apsw
import pytest
from conftest import LAUNCH, ROOT, Ended, Project, clean_environment, wait_for
from test_11_worker import at, rows, worker_of
from test_12_supervisor import error_output
from test_14_command_line import on_a_terminal
from test_maintenance import LONG, Crowd, crowd_in, held, lockfile
from test_stopping import gone_on_elsewhere, is_gone

from batchrun import Host

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
stop_grace = "30s"
max_tries = 3
retry_first_wait = "60s"
[jobs.sync]
tags = ["nightly"]
name = "sync"
[jobs.other]
uses = "sync"
name = "other"
"""

# Ten records in two batches, into a target. A file NAME.hold holds the job before its second
# batch (with NAME.deaf as well it heeds no TERM), NAME.fail lets it raise there, NAME.ask lets it
# ask for an approval.
JOB = """\
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from batchrun import Context, job

@dataclass(frozen=True)
class Settings:
    name: str

class Numbers:
    # 1 to 10; a file NAME.slow holds the read of what follows the first five

    def __init__(self, name):
        self.name = name

    def key(self, record):
        return record

    def read(self, after, limit):
        while after == 5 and is_there(f"{self.name}.slow"):
            Path(f"{self.name}.slow.held").touch()
            time.sleep(0.002)
        return [*range((after or 0) + 1, min((after or 0) + limit, 10) + 1)]

def is_there(name):
    return Path(name).exists()

def meet(name):
    if is_there(f"{name}.deaf"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while is_there(f"{name}.hold"):
        Path(f"{name}.held").touch()
        time.sleep(0.002)
    if is_there(f"{name}.fail"):
        raise ValueError("no")

@job(settings=Settings, version=2)
def sync(ctx: Context[Settings]):
    name = ctx.settings.name
    target = ctx.connect(f"sqlite:{name}.db")
    table = "CREATE TABLE IF NOT EXISTS done (record INTEGER NOT NULL)"
    ctx.step("make table", lambda rows: rows.execute(table) and None, target=target)
    if is_there(f"{name}.ask"):
        ctx.approval("go", "on?")
    for batch in ctx.batches(Numbers(name), target=target):
        if batch.records[0] == 6:
            meet(name)
        with batch.transaction() as rows:
            rows.executemany("INSERT INTO done VALUES (?)", [(n,) for n in batch])
        yield batch
"""
SHORT = CONFIG.replace('stop_grace = "30s"', 'stop_grace = "1s"')
STILL_ON = "  maintenance is still on; when the deploy is done: batchrun maintenance off"
IS_OVER = "  maintenance is over, so this is of then; to begin anew: batchrun drain"
HELD_AT = 2  # the commit after which a held job stands: the step, and one batch


@pytest.fixture
def shop(project: Project) -> Project:
    project.write(CONFIG, sync=JOB)
    return project


@pytest.fixture
def crowd(shop: Project) -> Iterator[Crowd]:
    with crowd_in(shop.folder) as made:
        yield made


def done(project: Project, job: str = "sync") -> list[int]:
    """Return the records in a job's target; each once, in order, when all is done."""
    connection = apsw.Connection(str(project.folder / f"{job}.db"))
    try:
        return [int(record) for (record,) in connection.execute("SELECT record FROM done")]
    finally:
        connection.close()


def hold(project: Project, what: str = "hold", job: str = "sync") -> None:
    project.write_file(f"{job}.{what}", "")


def let_go(project: Project, what: str = "hold", job: str = "sync") -> None:
    (project.folder / f"{job}.{what}").unlink()


def start_held(project: Project, job: str = "sync", *words: str) -> subprocess.Popen[str]:
    """Start a job and return when it is inside its second batch."""
    hold(project, job=job)
    process = project.start("run", job, *words)
    wait_for((project.folder / f"{job}.held").exists, "the job to be held")
    return process


def start_drain(project: Project, *words: str) -> subprocess.Popen[str]:
    """Start a drain and return when it waits."""
    process = project.start("drain", *words)
    wait_for(lambda: "waiting" in error_output(project, process), "the drain to wait")
    return process


def run_id(project: Project, job: str = "sync") -> str:
    found = rows(project, f"SELECT id FROM run WHERE job = '{job}' ORDER BY key DESC")
    return str(found[0][0])


def states(project: Project) -> list[Any]:
    return rows(project, "SELECT job, state, reason, number FROM run ORDER BY key")


def drains(project: Project) -> list[Any]:
    return rows(project, "SELECT id, barrier, exit_code FROM drain ORDER BY id")


def stands(project: Project) -> dict[str, str]:
    """Return job -> class as the newest drain's report has it, and require that it adds up."""
    ended = project.run("report", "drain", "--json")
    assert ended.code == 0, ended.out + ended.err
    document = ended.document
    assert document["adds_up"], document
    assert document["admitted_behind"] == []
    assert sum(document["sums"].values()) == document["total"] == len(document["runs"])
    return {run["job"]: run["stands"] for run in document["runs"]}


def finish(project: Project, code: int = 0) -> None:
    """Open the door and let the tick go on; every record of each job is then there once."""
    assert project.run("maintenance", "off").code == 0
    assert project.run("resume", "--all").code == code


# --- what it asks for, shows and proves ---------------------------------------------------------


def test_a_drain_stops_what_runs_at_its_next_safe_point_and_proves_it(shop: Project) -> None:
    process = start_held(shop)
    drain = start_drain(shop, "--reason", "deploy 1.4")
    said = error_output(shop, drain)
    run = run_id(shop)
    pace = r"which take [0-9.]+ s each, (due in|late by) \d+s"
    assert re.fullmatch(rf"waiting for sync: run {run}, batch 2, {pace}\n", said), said
    status = shop.run("status").out.splitlines()
    assert status[1] == "drain 1: it goes on, or was killed; batchrun drain goes on with it"
    assert stands(shop) == {"sync": "running"}
    let_go(shop)
    ended = shop.finish(drain)
    assert (ended.code, ended.err) == (0, said)
    assert shop.finish(process).code == 75
    assert states(shop) == [("sync", "paused", "drain", 3)]
    assert rows(shop, "SELECT request FROM run") == [(None,)]
    since, opened = rows(shop, "SELECT at, opened FROM barrier")[0]
    (by,) = rows(shop, "SELECT who FROM barrier")[0]
    assert ended.out == (
        "drain 1: nobody may write any more\n"
        f"  barrier     1, since {since} by {by} (deploy 1.4)\n"
        "  unfinished  1 run = 0 finished + 1 stopped + 0 awaiting + 0 deferred + 0 running"
        " + 0 orphaned\n"
        f"  stopped     sync: run {run} at commit 3, paused (drain)\n"
        "  operations  0 of unknown outcome\n"
        "  starts      none was turned away\n"
        f"  admitted    nothing between event {opened} and the drain's end\n"
        f"{STILL_ON}\n"
    )
    assert shop.run("report", "drain") == Ended(0, ended.out, "")
    assert shop.run("drain") == Ended(0, ended.out, "")  # drained already
    assert drains(shop) == [(1, 1, 0)]
    assert shop.run("status").out.splitlines()[1] == "drain 1: nobody may write any more"
    finish(shop)
    assert done(shop) == [*range(1, 11)]
    (at,) = rows(shop, "SELECT closed_at FROM barrier")[0]
    told = shop.run("report", "drain", "1").out.splitlines()
    over = f"drain 1, of a maintenance that is over since {at}"
    assert told[0] == f"{over}: nobody may write any more"
    assert told[1:-1] == ended.out.splitlines()[1:-1]  # what it proved stays
    assert told[-1] == IS_OVER
    assert "drain 1" not in shop.run("status").out


def test_with_finish_what_runs_ends_by_itself(shop: Project) -> None:
    process = start_held(shop)
    drain = start_drain(shop, "--finish")
    let_go(shop)
    assert shop.finish(drain).code == 0
    assert shop.finish(process).code == 0
    assert stands(shop) == {"sync": "finished"}
    assert [what for (what,) in rows(shop, "SELECT what FROM event") if "drain" in what] == [
        "drain",
        "drain ended",
    ]


def test_a_supervisor_that_waits_for_its_next_attempt_ends_at_once(shop: Project) -> None:
    hold(shop, "fail")
    process = shop.start("run", "sync")
    sql = "SELECT 1 FROM attempt WHERE retry = 1"
    wait_for((shop.state / "ledger.db").exists, "the ledger")
    wait_for(lambda: rows(shop, sql), "the job to wait for its next try")
    assert shop.run("drain").code == 0
    assert shop.finish(process).code == 75
    assert states(shop) in ([("sync", "paused", why, 2)] for why in ("drain", "maintenance"))
    let_go(shop, "fail")
    finish(shop)
    assert done(shop) == [*range(1, 11)]


def test_a_drain_without_a_deadline_to_wait_for_names_who_still_runs(shop: Project) -> None:
    process = start_held(shop)
    ended = shop.run("drain", "--deadline", "0")
    worker = worker_of(process)
    ticks = {pid: Host().identify(pid) for pid in (process.pid, worker)}
    owners = " and ".join(f"pid {p} (start {i.ticks})" for p, i in ticks.items() if i)
    assert ended.code == 11
    first, _, total, line, todo, *_ = ended.out.splitlines()
    assert first == (
        "drain 1: some still run past its deadline; batchrun drain goes on with it, or interrupts"
        " them: batchrun drain --then interrupt"
    )
    assert total == (
        "  unfinished  1 run = 0 finished + 0 stopped + 0 awaiting + 0 deferred + 1 running"
        " + 0 orphaned"
    )
    run = run_id(shop)
    assert line == f"  running     sync: run {run} at commit 2, running, owned by {owners}"
    assert todo.strip() == f"to end it: batchrun cancel --kill {run}"
    assert shop.run("status").out.splitlines()[1] == first
    drain = start_drain(shop)
    let_go(shop)
    assert shop.finish(drain).code == 0
    assert drains(shop) == [(1, 1, 0)]
    shop.finish(process)


@pytest.mark.parametrize(("words", "code"), [((), 75), (("--finish",), 0)])
def test_what_still_runs_at_the_deadline_is_left_alone(
    shop: Project, words: tuple[str, ...], code: int
) -> None:
    process = start_held(shop)
    assert shop.run("drain", "--deadline", "0", *words).code == 11
    assert rows(shop, "SELECT why FROM event WHERE what = 'drain interrupts'") == []
    assert rows(shop, "SELECT request FROM run") == [("drain" if code else None,)]
    let_go(shop)
    assert shop.finish(process).code == code
    assert states(shop)[0][1:3] == (("paused", "drain") if code else ("succeeded", ""))


def test_what_runs_past_the_deadline_is_interrupted_and_done_again(shop: Project) -> None:
    config = shop.folder / "batchrun.toml"
    config.write_text(config.read_text().replace('"30s"', '"10m"'))  # a second stop, not the grace
    process = start_held(shop)
    ended = shop.run("drain", "--deadline", "0", "--then", "interrupt")
    assert ended.code == 0, ended.out + ended.err
    assert shop.finish(process).code == 75
    ((job, state, reason, number),) = states(shop)
    assert (job, state, number) == ("sync", "paused", HELD_AT)
    assert reason in ("stop", "drain")
    said = rows(shop, "SELECT why FROM event WHERE what = 'drain interrupts'")
    assert said == [(f"SIGTERM to pid {process.pid}: the deadline is over",)] * 2
    let_go(shop)
    finish(shop)
    assert done(shop) == [*range(1, 11)]


# --- what no waiting changes --------------------------------------------------------------------


def test_an_orphan_needs_a_person_and_is_never_called_stopped(shop: Project) -> None:
    process = start_held(shop)
    worker = worker_of(process)
    process.kill()
    process.wait()
    ended = shop.run("drain", "--deadline", "0")
    assert ended.code == 13
    assert stands(shop) == {"sync": "orphaned"}
    assert f"to end it: batchrun cancel --kill {run_id(shop)}\n" in ended.out
    let_go(shop)
    wait_for(lambda: is_gone(worker), "the orphan to leave")
    assert shop.run("drain").code == 0
    assert stands(shop) == {"sync": "stopped"}
    finish(shop)
    assert done(shop) == [*range(1, 11)]


def test_an_orphan_past_the_deadline_is_interrupted_too(shop: Project) -> None:
    process = start_held(shop)
    process.kill()
    process.wait()
    assert shop.run("drain", "--deadline", "0", "--then", "interrupt").code == 0
    assert stands(shop) == {"sync": "stopped"}
    let_go(shop)
    finish(shop)
    assert done(shop) == [*range(1, 11)]


def test_a_supervisor_that_has_gone_on_to_another_run_is_not_interrupted(shop: Project) -> None:
    assert shop.run("run", "sync", "--batches", "1").code == 75
    with gone_on_elsewhere(shop):
        draining = start_drain(shop, "--deadline", "0s", "--then", "interrupt")
    assert shop.finish(draining).code == 0
    assert rows(shop, "SELECT * FROM event WHERE what = 'drain interrupts'") == []


def test_a_frozen_owner_needs_a_person(shop: Project) -> None:
    process = start_held(shop)
    process.send_signal(signal.SIGSTOP)
    ended = shop.run("drain", "--deadline", "0")
    assert ended.code == 13
    assert stands(shop) == {"sync": "running"}
    assert ", frozen\n" in ended.out
    process.send_signal(signal.SIGCONT)
    let_go(shop)
    assert shop.run("drain").code == 0
    assert shop.finish(process).code == 75


def waited_s(project: Project) -> float:
    """Return how long the drain went on after it had begun to interrupt."""
    sql = "SELECT (julianday(ended_at) - julianday(at)) * 86400 FROM drain"
    return float(rows(project, sql)[0][0])


def test_an_owner_that_hangs_in_process_is_waited_for_within_a_bound(shop: Project) -> None:
    shop.write(SHORT, sync=JOB)
    hold(shop, "deaf")
    process = start_held(shop, "sync", "--in-process")
    ended = shop.run("drain", "--deadline", "0", "--then", "interrupt")
    assert ended.code == 13, ended.out
    lines = ended.out.splitlines()
    stuck = "an owner is orphaned, frozen or heeds no stop, or an operation is unknown"
    assert lines[0] == f"drain 1: a person is needed: {stuck}"
    assert len(re.findall(rf"\bpid {process.pid}\b", lines[3])) == 1
    assert lines[4].strip() == f"to end it: batchrun cancel --kill {run_id(shop)}"
    assert 4 <= waited_s(shop) < 4 + 4  # stop_grace, as much again, 2 s; and the time to look
    assert shop.run("cancel", "--kill", "sync").code == 0
    shop.finish(process)


def test_a_frozen_owner_is_waited_for_within_the_same_bound(shop: Project) -> None:
    shop.write(SHORT, sync=JOB)
    process = start_held(shop)
    process.send_signal(signal.SIGSTOP)
    assert shop.run("drain", "--deadline", "0", "--then", "interrupt").code == 13
    assert 4 <= waited_s(shop) < 4 + 4
    process.send_signal(signal.SIGCONT)
    shop.finish(process)
    assert shop.run("drain").code == 0


def test_who_was_killed_without_a_word_is_settled_and_the_tick_goes_on(shop: Project) -> None:
    process = start_held(shop)
    for pid in (worker_of(process), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    before = rows(shop, "SELECT generation FROM run")[0][0]
    assert shop.run("drain").code == 0
    assert stands(shop) == {"sync": "stopped"}
    assert states(shop) == [("sync", "interrupted", "", HELD_AT)]
    assert rows(shop, "SELECT generation FROM run")[0][0] > before
    let_go(shop)
    finish(shop)
    assert done(shop) == [*range(1, 11)]


# --- a drain that is stopped, or whose barrier falls --------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_drain_that_is_stopped_goes_on_when_it_is_typed_again(
    shop: Project, number: signal.Signals, code: int
) -> None:
    process = start_held(shop)
    drain = start_drain(shop)
    drain.send_signal(number)
    ended = shop.finish(drain)
    assert ended.code == code
    assert drains(shop) == [(1, 1, code)]
    assert "batchrun drain goes on with it\n" in ended.out
    assert ended.out.endswith(f"{STILL_ON}\n")
    assert rows(shop, "SELECT request FROM run") == [("drain",)]
    let_go(shop)
    assert shop.run("drain").code == 0
    assert drains(shop) == [(1, 1, 0)]
    assert shop.finish(process).code == 75


def test_a_drain_whose_barrier_falls_proves_nothing(shop: Project) -> None:
    process = start_held(shop)
    drain = start_drain(shop)
    lockfile(shop).unlink()
    ended = shop.finish(drain)
    assert ended.code == 1
    (at,) = rows(shop, "SELECT closed_at FROM barrier")[0]
    over = f"drain 1, of a maintenance that is over since {at}"
    lines = ended.out.splitlines()
    assert lines[0] == f"{over}: its barrier fell before it had ended; nothing is proven"
    assert lines[-1] == IS_OVER
    let_go(shop)
    assert shop.finish(process).code == 75


def test_a_drain_uses_the_lockfile_that_is_there(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("run other") == 0
    lockfile(shop).touch()
    assert crowd.run("drain --reason mine") == 0
    assert rows(shop, "SELECT reason FROM barrier") == [("",)]
    assert "unfinished  0 runs" in crowd.said()
    assert lockfile(shop).read_bytes() == b""


# --- whom it concerns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "code"),
    [
        (("--job", "sync"), 11),
        (("--tag", "nightly"), 11),
        (("--version", "sync<3"), 11),
        (("--version", "sync<2"), 0),
        (("--job", "other"), 0),
    ],
)
def test_a_drain_concerns_the_jobs_that_the_barrier_closes(
    shop: Project, scope: tuple[str, ...], code: int
) -> None:
    process = start_held(shop)
    assert shop.run("maintenance", "on", *scope).code == 0
    ended = shop.run("drain", "--deadline", "0")
    assert ended.code == code, ended.out
    assert stands(shop) == ({"sync": "running"} if code else {})
    assert rows(shop, "SELECT request FROM run") == [("drain" if code else None,)]
    let_go(shop)
    assert shop.finish(process).code == (75 if code else 0)


def test_what_a_scoped_drain_proves_names_its_scope(shop: Project, crowd: Crowd) -> None:
    process = start_held(shop, "other")
    assert crowd.run("maintenance on --job sync") == 0
    ended = shop.run("drain", "--json")
    assert ended.code == 0
    assert ended.document["ended"] == "drain 1: nobody of job:sync may write any more"
    assert crowd.run("report drain") == 0
    assert crowd.said().startswith("drain 1: nobody of job:sync may write any more\n")
    assert crowd.run("status") == 0
    assert crowd.said().splitlines()[1] == "drain 1: nobody of job:sync may write any more"
    let_go(shop, job="other")
    assert shop.finish(process).code == 0


@pytest.mark.parametrize("scope", ["job:synk", "tag:nigtly", "version:synk<3"])
def test_a_scope_that_names_nothing_does_not_add_up(
    shop: Project, crowd: Crowd, scope: str
) -> None:
    assert crowd.run("run sync") == 0
    lockfile(shop).write_text(f'{{"scopes": ["job:sync", "{scope}"]}}')
    for words in ("drain", "drain", "report drain"):
        assert crowd.run(words) == 3
        first, _, scopes, *_ = crowd.said().splitlines()
        assert first == "drain 1: IT DOES NOT ADD UP; what is below is not to be trusted"
        wrong = "no job or tag has that name, so nothing of it was closed"
        assert scopes == f"  scopes      {scope}: {wrong}"


@pytest.mark.usefixtures("shop")
def test_an_old_drain_is_not_taken_for_the_one_of_now(crowd: Crowd) -> None:
    for words in ("run sync", "drain", "maintenance off", "maintenance on"):
        assert crowd.run(words) == 0
    assert crowd.run("report drain") == 0
    first, *_, last = crowd.said().splitlines()
    assert re.fullmatch(
        r"drain 1, of a maintenance that is over since 20[-0-9T:.]+Z: nobody may write any more",
        first,
    )
    assert last == IS_OVER


def test_a_pause_stays_a_persons_pause(shop: Project) -> None:
    process = start_held(shop)
    assert shop.run("pause", "sync").code == 0
    drain = start_drain(shop)
    let_go(shop)
    assert shop.finish(drain).code == 0
    assert shop.finish(process).code == 75
    assert states(shop) == [("sync", "paused", "person", 3)]


def test_a_persons_cancel_is_never_called_the_drains(shop: Project) -> None:
    hold(shop)
    process = shop.start("run", "sync", env=at("worker.ended=stop"))
    wait_for((shop.folder / "sync.held").exists, "the job to be held")
    worker = worker_of(process)
    drain = start_drain(shop)
    let_go(shop)
    held(worker)  # after it has stopped for the drain
    assert shop.run("cancel", "sync").code == 0
    os.kill(worker, signal.SIGCONT)
    assert shop.finish(drain).code == 0
    shop.finish(process)
    assert states(shop) == [("sync", "cancelled", "person", 3)]


# --- the report ---------------------------------------------------------------------------------


def test_a_report_that_does_not_add_up_says_so(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("run sync") == 0
    assert crowd.run("drain") == 0
    connection = apsw.Connection(str(shop.state / "ledger.db"))
    connection.execute("UPDATE event SET what = 'waiting' WHERE what = 'started'")
    connection.execute(
        "INSERT INTO run (id, job, state, created_at, changed_at) VALUES"
        " ('intruder', 'sync', 'reserved', '2026-01-01T00:00:00.000Z', '2026-01-01T00:00:00.000Z')"
    )
    connection.execute(
        "INSERT INTO event (at, run, job, who, what) SELECT created_at, key, job, 'x', 'started'"
        " FROM run WHERE id = 'intruder'"
    )
    connection.close()
    assert crowd.run("drain") == 3
    first, _, total, *_ = crowd.said().splitlines()
    assert first == "drain 1: IT DOES NOT ADD UP; what is below is not to be trusted"
    assert total.startswith("  unfinished  0 runs = 0 finished + 1 stopped + ")
    assert crowd.run("report drain") == 3


def test_the_report_of_a_drain_that_has_ended_does_not_change_with_the_configuration(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on --tag nightly") == 0
    assert crowd.run("run other") == 0
    assert crowd.run("drain") == 0
    before = shop.run("report", "drain")
    assert before.code == 0, before
    config = (shop.folder / "batchrun.toml").read_text()
    more = config.replace("[jobs.other]", '[jobs.other]\ntags = ["nightly"]')
    (shop.folder / "batchrun.toml").write_text(more)
    assert shop.run("report", "drain") == before


@pytest.mark.usefixtures("shop")
def test_there_is_no_report_of_a_drain_that_never_was(crowd: Crowd) -> None:
    assert crowd.run("run sync") == 0
    assert crowd.run("report drain 7") == 4
    assert crowd.said() == "There is no such drain.\nTo begin one: batchrun drain\n"


def test_what_blocks_is_shown_live_on_a_narrow_terminal(shop: Project) -> None:
    process = start_held(shop)
    code, shown = on_a_terminal(shop, "drain", "--deadline", "1s")
    assert code == 11
    drawn = [line for line in re.split(r"\r\x1b\[K|\r\n", shown) if line.startswith("drain, ")]
    wanted = (
        r"drain, (\d+s left|past its deadline), waits for 1: sync, batch 2, (due in|late by) \d+s"
    )
    assert drawn
    assert all(re.fullmatch(wanted, line) for line in drawn), drawn
    let_go(shop)
    shop.finish(process)


# --- the deploy ---------------------------------------------------------------------------------


def test_the_deploy_in_the_readme_is_done_as_written(shop: Project) -> None:
    """With a `batchrun` on the PATH and a ./deploy.sh that proves that nothing runs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^batchrun maintenance on .*deploy\.sh.*$", readme, re.MULTILINE)
    words = " ".join(map(shlex.quote, LAUNCH))
    for name, text in (("batchrun", f'exec {words} "$@"'), ("deploy.sh", "touch deployed")):
        shop.write_file(name, f"#!/bin/sh\n{text}\n").chmod(0o700)
    process = start_held(shop)
    environment = clean_environment()
    environment["PATH"] = f"{shop.folder}:{environment['PATH']}"
    deploy = subprocess.Popen(["sh", "-c", line], cwd=shop.folder, env=environment)
    sql = "SELECT 1 FROM run WHERE request = 'drain'"
    wait_for(lambda: rows(shop, sql), "the drain to ask")
    assert shop.run("run", "other").code == 12
    assert not (shop.folder / "deployed").exists()
    let_go(shop)
    assert (deploy.wait(60), shop.finish(process).code) == (0, 75)
    assert (shop.folder / "deployed").exists()
    assert stands(shop) == {"sync": "stopped"}
    assert shop.run("resume", "--all").code == 0
    assert done(shop) == [*range(1, 11)]


# --- the rehearsal: a start in every step, beside a long read and a question ----------------------


def prepare_scene(shop: Project) -> subprocess.Popen[str]:
    """Let `asks` wait for an approval, and return the start of `reads`, inside a long read."""
    more = "".join(f'[jobs.{name}]\nuses = "sync"\nname = "{name}"\n' for name in ("asks", "reads"))
    shop.write(CONFIG + more, sync=JOB)
    hold(shop, "ask", "asks")
    assert shop.run("run", "asks").code == 13
    hold(shop, "slow", "reads")
    process = shop.start("run", "reads")
    wait_for((shop.folder / "reads.slow.held").exists, "the long read")
    return process


def end_scene(shop: Project, reads: subprocess.Popen[str], drain: subprocess.Popen[str]) -> None:
    """Let the long read end; require that all is accounted for, and done once in the end."""
    sql = "SELECT 1 FROM run WHERE job = 'reads' AND request = 'drain'"
    wait_for(lambda: rows(shop, sql), "the drain to ask")
    let_go(shop, "slow", "reads")
    assert shop.finish(drain).code == 0
    assert shop.finish(reads).code == 75
    found = stands(shop)
    assert (found["asks"], found["reads"]) == ("awaiting", "stopped")
    assert shop.run("maintenance", "off").code == 0
    assert shop.run("approve", "asks", "go", "--why", "yes").code == 0
    assert shop.run("resume", "--all").code == 0
    assert shop.run("run", "sync").code == 0
    for job in ("asks", "reads"):
        assert done(shop, job) == [*range(1, 11)], job
    runs = len(rows(shop, "SELECT 1 FROM run WHERE job = 'sync'"))
    assert sorted(done(shop)) == sorted([*range(1, 11)] * runs)


BEFORE = [("start.looked", 12), ("admit.judged", 75), ("admit.committed", 75)]
BEFORE += [("admit.commit", 75)] * LONG
BEHIND = ["barrier.linked", "drain.begun"]
BEHIND += ["barrier.synced", "barrier.row", "barrier.raised"] * LONG


@pytest.mark.parametrize(("point", "code"), BEFORE)
def test_a_drain_while_a_start_is_held_in_its_admission(
    shop: Project, point: str, code: int
) -> None:
    reads = prepare_scene(shop)
    hold(shop)  # so that it cannot end before it is asked
    start = shop.start("run", "sync", env=at(f"{point}=stop"))
    held(start.pid)
    drain = shop.start("drain")
    if code == 12:
        wait_for(lambda: "waiting for reads" in error_output(shop, drain), "the drain to wait")
    start.send_signal(signal.SIGCONT)
    if code == 75:
        sql = "SELECT 1 FROM run WHERE job = 'sync' AND request = 'drain' OR reason = 'drain'"
        wait_for(lambda: rows(shop, sql), "the drain to ask")
    let_go(shop)
    assert shop.finish(start).code == code
    end_scene(shop, reads, drain)


@pytest.mark.parametrize("point", BEHIND)
def test_a_start_while_a_drain_is_held_behind_its_barrier(shop: Project, point: str) -> None:
    reads = prepare_scene(shop)
    drain = shop.start("drain", env=at(f"{point}=stop"))
    held(drain.pid)
    start = shop.start("run", "sync", "--when-blocked", "defer")
    if point == "barrier.linked":  # in the drain's own transaction, so the start waits for it
        wait_for((shop.state / "locks/sync.lock").exists, "the start to have its lock")
    else:
        assert shop.finish(start).code == 75
    drain.send_signal(signal.SIGCONT)
    assert shop.finish(start).code == 75
    end_scene(shop, reads, drain)
