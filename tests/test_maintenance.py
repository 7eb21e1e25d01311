"""Maintenance with real processes: nothing is admitted behind the barrier, no deferred start twice.

What one process does is held at its named points while others go by; the steps of on and off are
killed one by one; starters race against a barrier that goes up and down. What counts is the proof
that the ledger itself can give: no attempt of a closed job was admitted between the event that
opened a barrier and the one that closed it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import LAUNCH, ROOT, Project, clean_environment, wait_for
from test_11_worker import rows
from test_12_supervisor import launch_with
from test_faults import needs_strace

from batchrun import Barrier, Host, Ledger, StateDirectory, load_config, open_ledger

LONG = bool(os.environ.get("BATCHRUN_TEST_LONG"))

# A process that has batchrun imported and forks all that a line asks for, so that starting costs
# nothing and a crowd can be let go at once. Answers: their pids, and at the end their exit codes.
CROWD = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import batchrun, click, filelock, subprocess
for line in sys.stdin:
    folder, starts = json.loads(line)
    gate, opener = os.pipe()
    pids = []
    for number, (point, words) in enumerate(starts):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(opener)
            os.setsid()
            os.chdir(folder)
            batchrun.NAMED_POINT = os.environ["BATCHRUN_TEST_POINT"] = point
            output = os.open(f"output.{{number}}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            for place, descriptor in enumerate((null, output, output)):
                os.dup2(descriptor, place)
            os.read(gate, 1)
            sys.argv = ["batchrun", *words]
            batchrun.main()
    os.close(gate)
    os.close(opener)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids]), flush=True)
"""

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
[jobs.sync]
tags = ["nightly"]
[jobs.other]
uses = "sync"
"""

# Ten records in two batches; what is done is a line in a file.
JOB = """\
import os, time
from pathlib import Path
from batchrun import job

@job(version=3)
def sync(ctx):
    for batch in ctx.batches(list(range(1, 11))):
        for record in batch:
            HERE
            with open("done.txt", "a") as file:
                file.write(f"{ctx.run_id} {record}\\n")
        yield batch
"""


@dataclass
class Crowd:
    """Starts many batchruns at once in a project folder."""

    process: subprocess.Popen[str]
    folder: Path
    started: list[int] = field(default_factory=list)  # what has not been waited for

    def start(self, *starts: tuple[str, str]) -> list[int]:
        """Start each (named point, words of the command line); return their pids."""
        assert self.process.stdin is not None
        line = [str(self.folder), [(point, words.split()) for point, words in starts]]
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        self.started = self._answer()
        return self.started

    def end(self) -> list[int]:
        """Return the exit codes of all that were started, when they have ended."""
        ended, self.started = self._answer(), []
        return ended

    def run(self, words: str, point: str = "") -> int:
        """Run one to its end and return its exit code."""
        self.start((point, words))
        return self.end()[0]

    def said(self, number: int = 0) -> str:
        """Return what one of the last ones wrote."""
        return (self.folder / f"output.{number}").read_text()

    def _answer(self) -> list[int]:
        assert self.process.stdout is not None
        answer: list[int] = json.loads(self.process.stdout.readline())
        return answer


@contextmanager
def crowd_in(folder: Path) -> Iterator[Crowd]:
    """A crowd that is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CROWD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        text=True,
    )
    made = Crowd(process, folder)
    with process:
        try:
            yield made
        finally:
            for pid in made.started:  # one that a failing test holds would hold us up for ever
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shop(project: Project) -> Project:
    project.write(CONFIG, sync=JOB.replace("HERE", "pass"))
    return project


@pytest.fixture
def crowd(shop: Project) -> Iterator[Crowd]:
    with crowd_in(shop.folder) as made:
        yield made


def lockfile(project: Project) -> Path:
    return project.state / "maintenance.lock"


def done(project: Project) -> list[str]:
    """Return the records that were processed, in order, by whatever run."""
    path = project.folder / "done.txt"
    return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []


def states(project: Project) -> list[Any]:
    return rows(project, "SELECT job, state, reason FROM run ORDER BY key")


def events(project: Project) -> list[str]:
    return [what for (what,) in rows(project, "SELECT what FROM event ORDER BY id")]


def ledger_of(project: Project) -> Ledger:
    return open_ledger(project.state / "ledger.db", Host(), create=False)


def barriers(ledger: Ledger) -> list[Barrier]:
    return ledger._all(Barrier, "ORDER BY id")


def admitted_behind_barriers(project: Project) -> list[object]:
    """Return every attempt that some barrier should have stopped; the proof is that none is."""
    ledger = ledger_of(project)
    try:
        return [row for barrier in barriers(ledger) for row in ledger.admitted_behind(barrier)]
    finally:
        ledger.close()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def held(pid: int) -> None:
    """Wait until a process is held at its named point."""
    wait_for(lambda: is_stopped(pid), "a process to be held at its point")


# --- what people type and read --------------------------------------------------------------------


def test_on_status_and_off_say_what_they_do(shop: Project, crowd: Crowd) -> None:
    moment = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    on = rf"maintenance is on since {moment}, for \ds, by ann \(deploy 1.4\), until {moment}\n"
    words = ["maintenance", "on", "--reason", "deploy 1.4", "--until", "+30m", "--by", "ann"]
    ended = shop.run(*words)
    assert ended.code == 0, ended.err
    assert re.fullmatch(on, ended.out)
    assert crowd.run("run sync") == 12
    assert crowd.run("run sync") == 12
    assert crowd.run("run other --when-blocked defer") == 75
    assert crowd.run("maintenance status") == 0
    waits = r"waits     other: run \w{10}, since " + moment
    away = rf"  deferred  other: 1\n  refused   sync: 2\n  {waits}\n"
    closed = "the tick begins them once it is off\n"
    assert re.fullmatch(on + away + closed, crowd.said())
    away += "to type: batchrun resume --all\n"
    assert crowd.run("maintenance off") == 0
    off = rf"since {moment} by ann \(deploy 1.4\), switched off\n"
    assert re.fullmatch(rf"maintenance is off; it was on for \d+s, {off}{away}", crowd.said()), (
        crowd.said()
    )
    assert done(shop) == []  # off begins nothing
    assert crowd.run("maintenance off") == 0
    assert crowd.said().startswith("maintenance was not on\n")
    assert crowd.run("maintenance status") == 0
    assert crowd.said().startswith("maintenance is off\n")


def test_maintenance_as_json(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("--json maintenance on --job sync --by ann") == 0
    found = json.loads(crowd.said())["maintenance"]
    assert (found["by"], found["scopes"], found["overdue"]) == ("ann", ["job:sync"], "")
    assert crowd.run("run sync") == 12
    assert crowd.run("--json maintenance status") == 0
    said = json.loads(crowd.said())
    assert said["barrier"]["scopes"] == ["job:sync"]
    assert said["turned_away"] == [{"done": "refused", "job": "sync", "starts": 1}]
    assert crowd.run("--json maintenance off") == 0
    assert json.loads(crowd.said())["barrier"]["closed_why"] == "switched off"
    assert not lockfile(shop).exists()


def test_maintenance_that_was_ended_by_hand_has_no_barrier(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync") == 12
    lockfile(shop).unlink()
    assert crowd.run("--json maintenance status") == 0
    said = json.loads(crowd.said())
    assert (said["maintenance"], said["barrier"]) == (None, None)
    assert said["turned_away"] == [{"done": "refused", "job": "sync", "starts": 1}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--until soon",
            (
                "--until 'soon' is neither a duration nor a moment.\nNothing was changed.\n"
                "Write: --until +30m, or --until 2026-01-31T17:30\n"
            ),
        ),
        (
            "--until 2020-01-01T00:00",
            "--until '2020-01-01T00:00' has passed.\nNothing was changed.\n",
        ),
        ("--until +0", "--until '+0' has passed.\nNothing was changed.\n"),
        ("--tag weekly", "No job has the tag 'weekly'.\nTags: nightly.\nNothing was changed.\n"),
        (
            "--version sync",
            "--version 'sync' is not NAME<N.\nNothing was changed.\nWrite: --version 'NAME<4'\n",
        ),
    ],
)
def test_what_on_does_not_understand_changes_nothing(
    shop: Project, crowd: Crowd, words: str, said: str
) -> None:
    assert crowd.run(f"maintenance on {words}") == 2
    assert crowd.said() == said
    assert not shop.state.exists()


def test_on_names_only_jobs_that_there_are(shop: Project, crowd: Crowd) -> None:
    for words in ("--job snyc", "--version snyc<4"):
        assert crowd.run(f"maintenance on {words}") == 4
        assert crowd.said().startswith('There is no job "snyc" in ')
    assert not shop.state.exists()


@pytest.mark.parametrize(
    ("words", "sync", "other"),
    [
        ("", 12, 12),
        ("--job sync", 12, 0),
        ("--tag nightly", 12, 0),
        ("--version sync<4 --version other<3", 12, 0),
        ("--version sync<3 --job other", 0, 12),
    ],
)
def test_what_is_not_in_scope_starts_as_usual(
    shop: Project, crowd: Crowd, words: str, sync: int, other: int
) -> None:
    assert crowd.run(f"maintenance on {words}") == 0
    assert [crowd.run("run sync"), crowd.run("run other")] == [sync, other]
    assert len(done(shop)) == 10 * [sync, other].count(0)
    assert crowd.run("resume --all") == 0
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    by_version = "sync<4" in words  # it was known only after an admission, which left a run
    assert len(done(shop)) == 10 * ([sync, other].count(0) + by_version)


def test_a_run_of_a_version_that_is_closed_waits_for_its_end(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("run sync --batches 1") == 75
    assert crowd.run("maintenance on --version sync<4") == 0
    assert crowd.run("run sync") == 12
    assert "It has version 3 of sync installed.\nNothing was started;" in crowd.said()
    assert states(shop) == [("sync", "paused", "maintenance")]
    assert crowd.run("run sync --when-blocked defer") == 75
    job = (
        (shop.folder / "jobs/sync.py")
        .read_text()
        .replace("version=3", "version=4, resumes={3: tuple}")
    )
    shop.write(CONFIG, sync=job)
    assert crowd.run("resume --all") == 0
    assert done(shop) == [str(record) for record in range(1, 11)]
    assert states(shop) == [("sync", "succeeded", "")]


# --- K36: whatever the lockfile is ----------------------------------------------------------------


def old(path: Path) -> None:
    path.touch()
    os.utime(path, (0, time.time() - 3 * 86_400))


def expired(path: Path) -> None:
    path.write_text('{"until": "2026-01-01T00:00:00Z", "by": "ann", "reason": "deploy 1.4"}')


@pytest.mark.parametrize(
    ("make", "code", "age"),
    [
        (Path.touch, 12, r"for \ds"),
        (Path.mkdir, 12, r"for \ds"),
        (lambda path: path.touch(0), 12, r"for \ds"),
        (lambda path: path.symlink_to("nowhere"), 12, r"for \ds"),
        (expired, 13, r"for \ds"),
        (old, 13, r"for 3d00h"),
    ],
    ids=["empty", "directory", "unreadable", "dangling link", "expired", "3 days old"],
)
def test_k36_whatever_is_there_is_on_and_its_age_is_told(
    shop: Project, crowd: Crowd, make: Callable[[Path], None], code: int, age: str
) -> None:
    shop.state.mkdir(mode=0o700)
    make(lockfile(shop))
    assert crowd.run("run sync") == code
    letter = crowd.said()
    assert re.match(rf"Maintenance is on: \S+ is there, since \S+Z, {age}, by \S+", letter), letter
    assert ("IT IS OVERDUE." in letter) == (code == 13)
    assert crowd.run("status") == (3 if code == 13 else 0)
    assert crowd.said().startswith("MAINTENANCE IS OVERDUE." if code == 13 else "maintenance is on")
    assert crowd.run("maintenance status") == (3 if code == 13 else 0)
    overdue = ["maintenance overdue"] * (code == 13)
    assert events(shop) == ["maintenance on", *overdue, "refused: maintenance"]
    assert crowd.run("maintenance off") == 0
    assert crowd.run("run sync") == 0
    assert not os.path.lexists(lockfile(shop))


def test_k36_made_between_the_first_look_and_the_admission(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("maintenance off") == 4  # there is no state directory yet
    assert crowd.run("run other") == 0
    (pid,) = crowd.start(("start.looked=stop", "run sync"))
    held(pid)
    lockfile(shop).touch()
    os.kill(pid, signal.SIGCONT)
    assert crowd.end() == [12]
    assert events(shop)[-2:] == ["maintenance on", "refused: maintenance"]
    assert len(done(shop)) == 10


def test_k36_made_during_a_run_which_stops_only_when_asked(shop: Project, crowd: Crowd) -> None:
    hold = """
            if record == 5:
                Path("reached").touch()
                while not Path("go").exists(): time.sleep(0.005)
    """.strip()
    shop.write(CONFIG, sync=JOB.replace("HERE", hold))
    crowd.start(("", "run sync"))
    wait_for((shop.folder / "reached").exists, "the job to reach record 5")
    assert shop.run("maintenance", "on").code == 0
    assert shop.run("run", "sync").code == 12
    (shop.folder / "go").touch()
    assert crowd.end() == [0]
    assert states(shop) == [("sync", "succeeded", "")]
    assert crowd.run("run sync") == 12


# --- removed by hand ------------------------------------------------------------------------------


def test_a_lockfile_removed_by_hand_closes_its_barrier_before_anything_is_admitted(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on") == 0
    lockfile(shop).unlink()
    assert crowd.run("run sync") == 0
    assert events(shop)[:3] == ["maintenance on", "maintenance off", "started"]
    assert rows(shop, "SELECT closed_why FROM barrier") == [("removed by hand",)]
    assert admitted_behind_barriers(shop) == []


# --- later attempts -------------------------------------------------------------------------------

FEED_JOB = """\
from batchrun import Delimited, job

@job
def sync(ctx):
    for batch in ctx.batches(ctx.enter(Delimited("feed.csv", key="sku"))):
        yield batch
"""


def test_a_later_attempt_of_a_run_that_is_going_on_meets_the_barrier_too(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG.replace("tags", 'on_changed_source = "fresh"\ntags'), sync=FEED_JOB)
    shop.write_file("feed.csv", "sku\n" + "".join(f"{n}\n" for n in range(1, 11)))
    assert crowd.run("run sync --batches 1") == 75
    shop.write_file("feed.csv", "sku\n" + "".join(f"{n}\n" for n in range(1, 21)))
    (pid,) = crowd.start(("attempt.settled=stop", "run sync"))
    held(pid)  # it has found the changed source, and is about to begin anew
    assert shop.run("maintenance", "on", "--by", "ann").code == 0
    os.kill(pid, signal.SIGCONT)
    assert crowd.end() == [75]
    run = rows(shop, "SELECT id FROM run")[0][0]
    first, second, third = crowd.said().splitlines()
    assert first == f"sync: run {run} is paused."
    assert second.startswith(f"Maintenance is on: {lockfile(shop)} is there, since ")
    assert third == "The tick goes on with it."
    assert states(shop) == [("sync", "paused", "maintenance")]
    assert events(shop)[-1] == "paused (maintenance)"
    assert not [what for what in events(shop) if what.startswith("refused")]
    assert admitted_behind_barriers(shop) == []
    assert crowd.run("maintenance off") == 0
    assert crowd.run("run sync") == 0
    assert states(shop)[-1] == ("sync", "succeeded", "")


def test_a_start_that_would_begin_anew_for_a_changed_source_is_deferred_as_a_run_of_its_own(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG.replace("tags", 'on_changed_source = "fresh"\ntags'), sync=FEED_JOB)
    shop.write_file("feed.csv", "sku\n" + "".join(f"{n}\n" for n in range(1, 11)))
    assert crowd.run("run sync --batches 1") == 75
    shop.write_file("feed.csv", "sku\n" + "".join(f"{n}\n" for n in range(1, 21)))
    (pid,) = crowd.start(("attempt.settled=stop", "run sync --when-blocked defer"))
    held(pid)
    assert shop.run("maintenance", "on").code == 0
    os.kill(pid, signal.SIGCONT)
    assert crowd.end() == [75]
    assert rows(shop, "SELECT state, fresh_in_a_row, deferred IS NULL FROM run ORDER BY key") == [
        ("cancelled", 0, 1),
        ("waiting", 1, 0),
    ]
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop)[-1] == ("sync", "succeeded", "")


def test_a_fresh_start_that_its_version_closes_is_deferred_as_the_run_that_it_began(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on --version sync<4") == 0
    assert crowd.run("run sync --fresh --when-blocked defer") == 75
    assert states(shop) == [("sync", "paused", "maintenance")]
    assert deferred(shop) == [("sync", "paused")]


def test_the_tick_begins_and_records_nothing_while_maintenance_is_on(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("run sync --batches 1") == 75
    before = events(shop)
    lockfile(shop).touch()
    assert [crowd.run("resume --all"), crowd.run("resume --all")] == [0, 0]
    assert events(shop) == [*before, "maintenance on"]  # which nobody had met before
    assert crowd.run("maintenance off") == 0
    assert crowd.run("maintenance on --version sync<4") == 0
    assert crowd.run("-v resume --all") == 0
    assert "\nNothing was started.\nWhen the maintenance" in crowd.said()
    assert "refused: maintenance" not in events(shop)


# --- deferred starts ------------------------------------------------------------------------------


def deferred(project: Project) -> list[Any]:
    return rows(project, "SELECT job, state FROM run WHERE deferred IS NOT NULL ORDER BY key")


def test_a_deferred_start_is_stored_shown_and_begun_once_by_the_tick(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    run = rows(shop, "SELECT id FROM run")[0][0]
    first, second, third, fourth = crowd.said().splitlines()
    assert re.fullmatch(rf"sync: the start is deferred since 20\S+Z, as run {run}\.", first)
    assert second.startswith("Maintenance is on: ")
    assert third == "The tick (batchrun resume --all) begins it once when that is over."
    assert fourth == f"To withdraw it: batchrun cancel {run}"
    assert crowd.run("run sync --when-blocked defer") == 75
    assert states(shop) == [("sync", "waiting", "")]
    assert events(shop) == ["maintenance on", "waiting", "deferred", "deferred"]
    assert crowd.run("status") == 0
    assert re.search(r"^deferred: sync, for \ds$", crowd.said(), re.MULTILINE)
    assert crowd.run("status sync") == 0
    assert re.search(r"A start was deferred at 20\S+Z; the tick begins it\.", crowd.said())
    assert crowd.run("check") == 0
    assert crowd.run("resume --all") == 0  # still closed: refused, and still stored
    assert deferred(shop) == [("sync", "waiting")]
    assert crowd.run("maintenance off") == 0
    assert [crowd.run("resume --all"), crowd.run("resume --all")] == [0, 0]
    assert done(shop) == [str(record) for record in range(1, 11)]
    assert deferred(shop) == []
    assert admitted_behind_barriers(shop) == []


def test_a_job_may_defer_its_starts_and_a_launch_says_otherwise(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG.replace("tags", 'when_blocked = "defer"\ntags'))
    lockfile(shop).parent.mkdir(mode=0o700)
    lockfile(shop).touch()
    assert crowd.run("run sync --when-blocked refuse") == 12
    assert crowd.run("run sync") == 75
    assert crowd.run("run sync --when-blocked wait") == 2
    said = "--when-blocked 'wait': refuse or defer is wanted.\nNothing was changed.\n"
    said += "See: batchrun run --help\n"
    assert crowd.said() == said


def test_a_waiting_run_is_withdrawn_by_cancel(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    assert crowd.run("cancel sync") == 0
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert (states(shop), done(shop)) == ([("sync", "cancelled", "")], [])


@pytest.mark.parametrize("words", ["run sync", "resume sync", "resume --all"])
def test_a_waiting_run_is_begun_by_any_start(shop: Project, crowd: Crowd, words: str) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer --batches 1") == 75
    assert crowd.run("maintenance off") == 0
    assert crowd.run(words) == 75  # as the deferred start asked: one batch
    assert len(done(shop)) == 5
    assert rows(shop, "SELECT count(*), state, deferred FROM run") == [(1, "paused", None)]
    assert crowd.run("resume --all") == 0
    assert len(done(shop)) == 10


WITH_SETTINGS = """
    from dataclasses import dataclass
    from batchrun import job

    @dataclass(frozen=True)
    class Settings:
        records: int = 10

    @job(settings=Settings)
    def sync(ctx):
        for batch in ctx.batches(list(range(ctx.settings.records))):
            yield batch
    """


def test_a_deferred_start_keeps_its_settings_and_acceptances(shop: Project, crowd: Crowd) -> None:
    shop.write(CONFIG, sync=WITH_SETTINGS)
    assert crowd.run("run sync --batches 1 --set records=20") == 75
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --set records=30 --when-blocked defer") == 13  # it is based on 20
    deferring = "run sync --set records=30 --accept-settings --accept-source --when-blocked defer"
    assert crowd.run(deferring) == 75
    assert crowd.said().splitlines()[-1].startswith("To withdraw it: batchrun pause ")
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0, crowd.said()
    assert rows(shop, "SELECT read, state FROM run") == [(30, "succeeded")]


def test_a_start_deferred_on_a_failed_run_lets_the_tick_go_on_with_it(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(
        CONFIG, sync=JOB.replace("HERE", "if record == 8 and not Path('ok').exists(): 1 / 0")
    )
    assert crowd.run("run sync") == 1
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    assert states(shop) == [("sync", "failed", "")]
    (shop.folder / "ok").touch()
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", "")]


def test_a_resume_of_poison_that_was_deferred_is_begun_by_the_tick(
    shop: Project, crowd: Crowd
) -> None:
    config = CONFIG.replace("[defaults]", '[defaults]\nmax_tries = 1\nretry_for = "1h"')
    shop.write(config, sync=JOB.replace("HERE", "if not Path('ok').exists(): 1 / 0"))
    assert crowd.run("run sync") == 13
    assert states(shop) == [("sync", "awaiting", "poison")]
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 13
    assert crowd.run("resume sync --when-blocked defer") == 75
    (shop.folder / "ok").touch()
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", "")]


def test_a_run_that_a_person_paused_is_deferred_by_a_person_only(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("run sync --batches 1") == 75
    assert crowd.run("pause sync") == 0
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 13
    assert crowd.run("resume sync --when-blocked defer") == 75
    assert crowd.run("pause sync") == 0  # thought better of it
    assert deferred(shop) == []
    assert crowd.run("resume sync --when-blocked defer") == 75
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", "")]


def test_a_fresh_start_is_not_deferred_while_a_run_is_unfinished(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("run sync --batches 1") == 75
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --fresh --when-blocked defer") == 12
    run = rows(shop, "SELECT id FROM run")[0][0]
    first, second, third, fourth = crowd.said().splitlines()
    assert first == f"A fresh start of sync is not deferred while run {run} is unfinished."
    assert second.startswith("Maintenance is on: ")
    assert third == "Nothing was stored; the refusal is recorded."
    assert fourth == f"Give the run up, then type this again: batchrun cancel {run}"
    assert states(shop) == [("sync", "paused", "stop")]
    assert events(shop)[-1] == "refused: maintenance"
    assert crowd.run(f"cancel {run}") == 0
    assert crowd.run("run sync --fresh --when-blocked defer") == 75
    assert states(shop) == [("sync", "cancelled", ""), ("sync", "waiting", "")]


def test_nothing_is_deferred_that_is_running_or_has_nothing_to_go_on_with(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("run sync") == 0
    assert crowd.run("maintenance on") == 0
    assert crowd.run("resume sync --when-blocked defer") == 0
    assert crowd.said().endswith("of sync has succeeded already\n")
    assert crowd.run("maintenance off") == 0
    hold = "while not Path('go').exists(): time.sleep(0.005)"
    shop.write(CONFIG, sync=JOB.replace("HERE", hold))
    crowd.start(("", "run sync"))
    wait_for(lambda: states(shop)[-1][1] == "running", "the run to run")
    assert shop.run("maintenance", "on").code == 0
    at_once = launch_with("batchrun.DEFER_WAIT_S = 1e9")  # it waits for no owner
    assert shop.run("run", "sync", "--when-blocked", "defer", launch=at_once).code == 11
    (shop.folder / "go").touch()
    assert crowd.end() == [0]


@pytest.mark.parametrize(("point", "stored"), [("defer.commit", False), ("defer.committed", True)])
def test_a_deferral_is_acknowledged_only_when_it_is_stored(
    shop: Project, crowd: Crowd, point: str, *, stored: bool
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer", f"{point}=kill") == -9
    assert crowd.said() == ""
    assert deferred(shop) == [("sync", "waiting")] * stored
    assert crowd.run("run sync --when-blocked defer") == 75
    assert deferred(shop) == [("sync", "waiting")]


@pytest.mark.parametrize("point", ["admit.judged", "admit.commit", "admit.committed"])
def test_a_deferred_start_whose_taker_is_killed_is_begun_by_the_next(
    shop: Project, crowd: Crowd, point: str
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all", f"{point}=kill") == -9
    assert crowd.run("resume --all") == 0
    assert done(shop) == [str(record) for record in range(1, 11)]
    assert states(shop) == [("sync", "succeeded", "")]


@pytest.mark.parametrize("words", ["resume --all", "run sync"])
def test_of_sixteen_that_race_for_a_deferred_start_exactly_one_begins_it(
    shop: Project, crowd: Crowd, words: str
) -> None:
    assert crowd.run("maintenance on") == 0
    for number in range(1, (50 if LONG else 3) + 1):
        assert crowd.run("run sync --when-blocked defer") == 75
        (run,) = rows(shop, "SELECT id FROM run WHERE state = 'waiting'")[0]
        assert crowd.run("maintenance off") == 0
        # one batch: what another one finds afterwards is a run that was begun, not a deferred one
        crowd.start(*[("", f"{words} --batches 1" if "run" in words else words)] * 16)
        codes = crowd.end()
        begun = rows(
            shop,
            "SELECT count(*) FROM event e JOIN run r ON r.key = e.run"
            f" WHERE r.id = '{run}' AND e.why = 'a stored start was admitted'",
        )
        assert begun == [(1,)], codes
        assert crowd.run("maintenance on") == 0
        while crowd.run("maintenance off") == 0 and rows(
            shop, "SELECT 1 FROM run WHERE state NOT IN ('succeeded', 'cancelled')"
        ):
            assert crowd.run("run sync") == 0
        assert crowd.run("maintenance on") == 0
        mine = [line for line in (shop.folder / "done.txt").read_text().splitlines() if run in line]
        assert len(mine) == 10, f"round {number}: {codes}"
    assert admitted_behind_barriers(shop) == []


def test_a_pause_of_a_deferred_start_wins_until_a_person_resumes_it(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    run = rows(shop, "SELECT id FROM run")[0][0]
    for words in ("pause sync", "pause sync --wait"):
        assert crowd.run(words) == 0
        assert crowd.said() == f"run {run} of sync waits; only batchrun resume {run} begins it\n"
    assert crowd.run("run sync --when-blocked defer") == 13
    assert crowd.run("maintenance off") == 0
    assert [crowd.run("resume --all"), crowd.run("run sync")] == [0, 13]
    assert "was paused by a person" in crowd.said()
    assert "the tick begins it" not in crowd.said()
    assert states(shop) == [("sync", "waiting", "")]
    assert crowd.run("resume sync") == 0
    assert states(shop) == [("sync", "succeeded", "")]


def test_a_resume_that_is_deferred_outdates_the_pause_of_a_deferred_start(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    assert crowd.run("pause sync") == 0
    assert crowd.run("resume sync --when-blocked defer") == 75
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", "")]


def test_what_is_said_to_withdraw_the_note_on_an_unfinished_run_withdraws_it(
    shop: Project, crowd: Crowd
) -> None:
    config = CONFIG.replace("tags", "max_tries = 1\ntags")
    shop.write(config, sync=JOB.replace("HERE", "os._exit(9)"))
    assert crowd.run("run sync") == 13  # its batch is poison
    assert crowd.run("maintenance on") == 0
    assert crowd.run("resume sync --when-blocked defer") == 75
    assert crowd.run(crowd.said().splitlines()[-1].partition("batchrun ")[2]) == 0
    assert deferred(shop) == []
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert rows(shop, "SELECT count(*) FROM attempt") == [(1,)]


def test_a_deferred_start_is_no_second_success_of_its_period(shop: Project, crowd: Crowd) -> None:
    shop.write(CONFIG.replace("tags", 'once_per = "day"\ntags'))
    assert crowd.run("run sync") == 0
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 0
    assert states(shop) == [("sync", "succeeded", "")]
    assert events(shop)[-1] == "skipped: once per period"
    assert crowd.run("run sync --fresh --when-blocked defer") == 75
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", "")] * 2  # as --fresh asked


def test_a_deferred_start_whose_period_has_its_success_is_cancelled_by_the_tick(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("run sync") == 0
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --when-blocked defer") == 75
    shop.write(CONFIG.replace("tags", 'once_per = "day"\ntags'))
    assert crowd.run("maintenance off") == 0
    assert crowd.run("resume --all") == 0
    assert states(shop) == [("sync", "succeeded", ""), ("sync", "cancelled", "")]
    ((why,),) = rows(shop, "SELECT why FROM event WHERE what = 'cancelled'")
    assert why.startswith("sync has succeeded in this day already (")


def test_a_second_deferred_start_says_whether_it_is_the_same_or_what_it_replaces(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG, sync=WITH_SETTINGS)
    assert crowd.run("maintenance on") == 0
    defer = "--when-blocked defer"
    assert crowd.run(f"run sync --set records=11 --batches 1 {defer}") == 75
    run = rows(shop, "SELECT id FROM run")[0][0]
    assert crowd.run(f"run sync {defer}") == 75  # a timer's takes nothing away
    assert crowd.said().splitlines()[2] == "It is the same as the one that was deferred before."
    assert crowd.run(f"run sync --set records=12 {defer}") == 75
    assert crowd.said().splitlines()[2] == (
        f"It replaces the one that was deferred before as run {run}:"
        " --set records=11 --batches 1; now --set records=12 --batches 1."
    )


def test_a_deferred_start_whose_settings_fit_no_more_fails_with_a_way_out_that_works(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG, sync=WITH_SETTINGS)
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync --set records=11 --when-blocked defer") == 75
    shop.write(CONFIG, sync=JOB.replace("HERE", "pass"))
    assert crowd.run("maintenance off") == 3
    assert "  batchrun maintenance off --force " in crowd.said()
    assert crowd.run("maintenance off --force") == 0
    assert crowd.run("resume --all") == 2
    assert "The job sync has no settings, but records is given." in crowd.said()
    way_out = "Without its --set, from the start: batchrun run sync --fresh"
    assert way_out in crowd.said().splitlines()
    assert crowd.run("run sync --fresh") == 0


def test_of_eight_starts_that_are_turned_away_at_once_every_one_is_stored(
    shop: Project, crowd: Crowd
) -> None:
    assert crowd.run("maintenance on") == 0
    crowd.start(*[("", "run sync --when-blocked defer")] * 8)
    assert crowd.end() == [75] * 8
    assert events(shop).count("deferred") == 8
    assert states(shop) == [("sync", "waiting", "")]


def test_a_start_that_is_deferred_by_an_overdue_maintenance_is_as_loud_as_a_refusal(
    shop: Project, crowd: Crowd
) -> None:
    shop.write(CONFIG.replace("min_free", 'max_maintenance = "1ms"\nmin_free'))
    assert crowd.run("maintenance on") == 0
    assert crowd.run("run sync") == 13
    refused = crowd.said().splitlines()
    assert crowd.run("run sync --when-blocked defer") == 75
    stored = crowd.said().splitlines()
    loud = [line for line in refused if line.startswith(("IT IS OVERDUE. ", "When the main"))]
    assert (len(loud), stored[2:4]) == (2, loud)


# --- killed at every step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "on"),
    [
        ("barrier.prepared", False),
        ("barrier.linked", True),
        ("barrier.synced", True),
        ("barrier.row", True),
        ("barrier.raised", True),
    ],
)
def test_on_that_is_killed_is_fully_on_or_fully_off(
    shop: Project, crowd: Crowd, point: str, *, on: bool
) -> None:
    assert crowd.run("run other") == 0
    assert crowd.run("maintenance on --by ann --job sync", f"{point}=kill") == -9
    assert lockfile(shop).exists() == on
    assert crowd.run("run other") == 0
    assert crowd.run("run sync") == (12 if on else 0)
    known = rows(shop, "SELECT who, scopes, closed FROM barrier")
    assert known == [("ann", '["job:sync"]', None)] * on
    assert crowd.run("maintenance on") == (12 if on else 0)
    assert crowd.run("maintenance off") == 0
    assert crowd.run("run sync") == 0
    assert rows(shop, "SELECT count(*) FROM barrier WHERE closed IS NULL") == [(0,)]
    assert crowd.run("maintenance on") == 0
    assert [path.name for path in shop.state.glob(".*")] == []  # nor is anything left of it


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("barrier.unlinked", "removed by hand"),
        ("barrier.closed", "removed by hand"),
        ("barrier.lowered", "switched off"),
    ],
)
def test_off_that_is_killed_is_fully_on_or_fully_off(
    shop: Project, crowd: Crowd, point: str, why: str
) -> None:
    assert crowd.run("maintenance on") == 0
    assert crowd.run("maintenance off", f"{point}=kill") == -9
    assert not lockfile(shop).exists()
    assert crowd.run("run sync") == 0
    assert rows(shop, "SELECT closed_why FROM barrier") == [(why,)]
    assert admitted_behind_barriers(shop) == []


CALLS = {  # what a line of strace says -> what that is
    r"fsync\(.*/\.maintenance\.lock\.": "fsync file",
    r"\blinkat\(.*maintenance\.lock": "link",
    r"unlinkat\(.*\"\.maintenance\.lock\..* = 0": "unlink temporary",
    r"unlink\(.*/maintenance\.lock\"": "unlink",
    r"fsync\(\d+<[^>]*/state>": "fsync folder",
    r"sync\(.*/ledger\.db-wal>": "commit",
    r"write\(1<.*maintenance is": "said",
}


@needs_strace
@pytest.mark.parametrize(
    ("words", "order"),
    [
        ("on", ["fsync file", "link", "unlink temporary", "fsync folder", "commit", "said"]),
        ("off", ["unlink", "fsync folder", "commit", "said"]),
    ],
)
def test_what_was_acknowledged_survives_a_power_cut(
    shop: Project, crowd: Crowd, words: str, order: list[str]
) -> None:
    """Each step is on the disk before the next begins, and all before it is said."""
    for before in ["on"] if words == "off" else ["on", "off"]:
        assert crowd.run(f"maintenance {before}") == 0
    calls = "trace=fsync,fdatasync,link,linkat,unlink,unlinkat,rmdir,write"
    strace = ["strace", "-f", "-y", "-qq", "-o", "trace.txt", "-e", calls]
    assert shop.run("maintenance", words, launch=(*strace, *LAUNCH)).code == 0
    lines = (shop.folder / "trace.txt").read_text().splitlines()
    meant = [next((m for p, m in CALLS.items() if re.search(p, line)), "") for line in lines]
    seen = [each for each in meant if each]
    assert seen[: len(order) - 1] == order[:-1]
    assert seen.index("said") > seen.index("commit")


# --- every interleaving ---------------------------------------------------------------------------

ADMISSION = ("start.looked", "admit.judged", "admit.commit", "admit.committed")
ON = ("barrier.prepared", "barrier.linked", "barrier.synced", "barrier.row", "barrier.raised")
OFF = ("barrier.unlinked", "barrier.closed", "barrier.lowered")
IN_TRANSACTION = (*ADMISSION[1:3], *ON[1:4], *OFF[:2])


def cross(shop: Project, crowd: Crowd, point: str, words: str, other: str) -> tuple[int, int]:
    """Hold one process at its point while another goes by, or waits; return how both ended."""
    (pid,) = crowd.start((f"{point}=stop", words))
    held(pid)
    process = shop.start(*other.split())
    if point in IN_TRANSACTION:  # the other one can only wait until this one is let go
        ledger = shop.state / "ledger.db"
        wait_for(lambda: has_open(process.pid, ledger), "the other to open the ledger")
        code = None
    else:
        code = shop.finish(process).code
    os.kill(pid, signal.SIGCONT)
    ended = crowd.end()[0]
    return ended, shop.finish(process).code if code is None else code


def has_open(pid: int, path: Path) -> bool:
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, or no file
            if path.samefile(each):
                return True
    return False


@pytest.mark.parametrize("point", ADMISSION)
def test_an_admission_held_anywhere_stands_before_the_barrier_or_sees_it(
    shop: Project, crowd: Crowd, point: str
) -> None:
    assert crowd.run("run other") == 0
    started, raised = cross(shop, crowd, point, "run sync", "maintenance on")
    assert raised == 0
    assert started == (12 if point == "start.looked" else 0)
    assert admitted_behind_barriers(shop) == []
    assert len(done(shop)) == (10 if started == 12 else 20)


@pytest.mark.parametrize("point", ON)
def test_on_held_anywhere_lets_through_only_what_stands_before_it(
    shop: Project, crowd: Crowd, point: str
) -> None:
    assert crowd.run("run other") == 0
    raised, started = cross(shop, crowd, point, "maintenance on", "run sync")
    assert raised == 0
    assert started == (0 if point == "barrier.prepared" else 12)
    assert admitted_behind_barriers(shop) == []


@pytest.mark.parametrize("point", OFF)
def test_off_held_anywhere_lets_through_only_what_stands_behind_it(
    shop: Project, crowd: Crowd, point: str
) -> None:
    assert crowd.run("maintenance on") == 0
    lowered, started = cross(shop, crowd, point, "maintenance off", "run sync")
    assert (lowered, started) == (0, 0)  # the file was gone when the start looked
    assert rows(shop, "SELECT closed_why FROM barrier") == [("switched off",)]
    assert admitted_behind_barriers(shop) == []


@pytest.mark.parametrize("point", ["start.looked", "admit.judged", "admit.commit"])
def test_an_admission_held_anywhere_is_admitted_behind_the_end_of_a_barrier(
    shop: Project, crowd: Crowd, point: str
) -> None:
    """The lockfile was removed by hand before; `off` and the admission meet at the open row."""
    assert crowd.run("maintenance on") == 0
    lockfile(shop).unlink()
    started, lowered = cross(shop, crowd, point, "run sync", "maintenance off")
    assert (started, lowered) == (0, 0)
    assert rows(shop, "SELECT closed_why FROM barrier") == [("removed by hand",)]
    assert admitted_behind_barriers(shop) == []


# --- the race -------------------------------------------------------------------------------------

# A starter admits and ends attempts as fast as it can, as a supervisor does: a cheap look, then the
# admission. What is raced is the ledger's own verb against the real lockfile.
STARTER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from batchrun import *
from batchrun import DIED
name, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
host = Host()
config = load_config(folder / "batchrun.toml")
job = config.job("sync")._replace(name=name)
door = StateDirectory(config, host).maintenance
ledger = open_ledger(config.state / "ledger.db", host, create=False)
number = refused = 0
until = time.monotonic() + seconds
while time.monotonic() < until:
    number += 1
    try:
        seen = door.require_open(job)
        start = Start(
            owner=host.identify(), who=name, run_id=f"{{name}}-{{number}}",
            require_admission={look}, require_may_go_on=lambda run: None,
            write_checkpoint=lambda *_: None,
        )
        admission = ledger.admit(name, start, lambda run: Agreement())
        ledger.settle(admission.run, admission.generation, DIED)
    except MaintenanceOn as refusal:
        refused += 1
        if refused % 50 == 1:
            ledger.refuse(name, name, refusal.what, door.find)
        time.sleep(0.001)
print(number - refused, refused)
"""


@dataclass
class Raced:
    """What a race came to: barriers raised, starts admitted and refused, what was wrong."""

    ups: int
    admitted: int
    refused: int
    wrong: list[str]


def race(shop: Project, seconds: float, look: str) -> Raced:
    """Race starters against a barrier that goes up and down, by command and by hand."""
    script = STARTER.format(root=str(ROOT), look=look)
    starters = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, f"s{n}", str(shop.folder), str(seconds)],
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )
        for n in range(4)
    ]
    host = Host()
    door = StateDirectory(load_config(shop.folder / "batchrun.toml"), host).maintenance
    ledger = ledger_of(shop)
    expected: dict[str, str] = {}
    while any(process.poll() is None for process in starters):
        number = len(expected)
        reason = f"{seconds:g} s, number {number}"
        expected[reason] = ("switched off", "removed by hand")[number % 4 == 1]
        if number % 4 == 3:
            lockfile(shop).write_text(json.dumps({"reason": reason}))
            ledger.refuse("toggler", "toggler", "made by hand", door.find)
        else:
            door.begin(ledger, "ann", by="ann", reason=reason, until=None, scopes=[])
        host.sleep(0.003)
        if expected[reason] == "removed by hand":
            lockfile(shop).unlink()
        else:
            door.end(ledger, "ann", "switched off")
        host.sleep(0.004)
    counts = [[*map(int, process.communicate()[0].split())] for process in starters]
    assert all(process.returncode == 0 for process in starters)
    ledger.refuse("toggler", "toggler", "to close what was removed last", door.find)
    rows = [row for row in barriers(ledger) if row.reason in expected]
    wrong = [f"{row}" for row in rows if row.closed_why != expected[row.reason]]
    wrong += [
        f"{row}: {ledger.admitted_behind(row)}" for row in rows if ledger.admitted_behind(row)
    ]
    wrong += [f"{len(rows)} rows of {len(expected)} barriers"] * (len(rows) != len(expected))
    ledger.close()
    return Raced(len(rows), sum(a for a, _ in counts), sum(r for _, r in counts), wrong)


def test_no_start_is_admitted_behind_a_barrier_under_load(shop: Project, crowd: Crowd) -> None:
    assert crowd.run("run other") == 0
    raced = race(shop, 20 if LONG else 3, "lambda: door.require_open(job)")
    print(raced)
    assert raced.wrong == []
    assert min(raced.ups, raced.admitted, raced.refused) > 10


def test_the_race_finds_an_admission_that_looks_only_before_its_transaction(
    shop: Project, crowd: Crowd
) -> None:
    """It lets a start through, and takes a barrier that is up for one that was removed."""
    assert crowd.run("run other") == 0
    wrong = (race(shop, seconds, "lambda: seen").wrong for seconds in (1, 2, 4, 8))
    assert any(wrong)
