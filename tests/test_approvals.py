"""A job asks a person: the question is stored once, no process waits, any later attempt goes on."""

import contextlib
import json
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import Project, wait_for
from test_05_ledger import opened
from test_11_worker import at, rows, run_row

import batchrun
from batchrun import (
    REPLIES,
    STARTS,
    Agreement,
    Host,
    Ledger,
    PersonNeeded,
    Request,
    Run,
    RunState,
    open_ledger,
    reply_to,
    require_may_go_on,
    standing,
)

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 5
[jobs.sync]
"""

# Five records, a question, five records and a last question. What is done is a line in a file.
JOB = """\
from batchrun import job

def done(text):
    with open("done.txt", "a") as file:
        print(text, file=file)

VERSION = 1

@job(version=VERSION, resumes={1: int})
def sync(ctx):
    for batch in ctx.batches(list(range(1, 6)), name="first"):
        done(f"first {len(batch)}")
        yield batch
    FIRST
    for batch in ctx.batches(list(range(1, 6)), name="second"):
        done(f"second {len(batch)}")
        yield batch
    done(f"again {ctx.approval('publish', 'make it seen by all').who}")
"""
ASK = """answer = ctx.approval("new prices", "5 prices, the highest 9.99")
    done(f"approved by {answer.who}: {answer.why}")"""


def write_job(project: Project, first: str = ASK, version: int = 1, retries: str = "") -> None:
    config = CONFIG.replace("batch_size", f"{retries}batch_size")
    project.write(
        config, sync=JOB.replace("FIRST", first).replace("VERSION = 1", f"VERSION = {version}")
    )


def done(project: Project) -> list[str]:
    return (project.folder / "done.txt").read_text().splitlines()


def run_id(project: Project) -> str:
    return str(rows(project, "SELECT id FROM run ORDER BY key DESC LIMIT 1")[0][0])


def asked(project: Project) -> list[tuple[object, ...]]:
    return rows(project, "SELECT name, summary, who, why FROM approval ORDER BY asked_at")


def events(project: Project, what: str) -> list[tuple[object, ...]]:
    return rows(project, f"SELECT who, what, why FROM event WHERE what LIKE '{what}' ORDER BY id")


@pytest.fixture
def waiting(project: Project) -> Project:
    """A project whose run has asked its first question."""
    write_job(project)
    assert project.run("run", "sync").code == 13
    return project


# --- asking -----------------------------------------------------------------------------------


def test_a_question_ends_the_attempt_and_says_what_to_type(project: Project) -> None:
    write_job(project)
    ended = project.run("run", "sync")
    run = run_id(project)
    assert (ended.code, ended.out) == (13, "")
    assert ended.err == (
        f"sync: run {run} awaiting.\n"
        "It asks for the approval 'new prices': 5 prices, the highest 9.99\n"
        "Commit 2 stands: 5 records are done.\n"
        f"To go on: batchrun approve {run} 'new prices' --why \"...\"\n"
    )
    assert run_row(project) == ("awaiting", "approval", 2)
    assert project.living() == []
    assert asked(project) == [("new prices", "5 prices, the highest 9.99", None, None)]
    assert rows(project, "SELECT ending, exit_code FROM attempt") == [("awaits an answer", 13)]


def test_without_an_answer_no_start_makes_an_attempt_and_the_tick_is_silent(
    waiting: Project,
) -> None:
    run = run_id(waiting)
    letter = (
        f"Run {run} of sync waits for an answer.\n"
        "It asks for the approval 'new prices': 5 prices, the highest 9.99\n"
        "Nothing was started.\n"
        f"To go on: batchrun approve {run} 'new prices' --why \"...\"\n"
        f"To give it up: batchrun cancel {run}\n"
    )
    for words in (("run", "sync"), ("resume", "sync"), ("run", "sync", "--fresh")):
        ended = waiting.run(*words)
        assert (ended.code, ended.out, ended.err) == (13, "", letter), words
    ended = waiting.run("resume", "--all")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert rows(waiting, "SELECT count(*) FROM attempt") == [(1,)]
    assert run_row(waiting) == ("awaiting", "approval", 2)


def test_status_shows_the_question_and_what_to_type(waiting: Project) -> None:
    run = run_id(waiting)
    shown = waiting.run("status", "sync")
    assert shown.code == 3
    assert "sync: awaiting (approval) since " in shown.out
    assert "  why           It asks for the approval 'new prices': 5 prices, the" in shown.out
    assert shown.out.endswith(f"to type: batchrun approve {run} 'new prices' --why \"...\"\n")


def test_an_answer_lets_the_tick_go_on_and_comes_back_to_the_job(waiting: Project) -> None:
    run = run_id(waiting)
    answered = waiting.run("approve", "sync", "new prices", "--by", "Ada", "--why", "seen by two")
    assert (answered.code, answered.err) == (0, "")
    assert answered.out == (
        f"run {run} of sync: 'new prices' is approved by Ada\n"
        f"the tick goes on with it; at once: batchrun resume {run}\n"
    )
    assert done(waiting) == ["first 5"], "an answer runs no job"
    assert run_row(waiting) == ("awaiting", "approval", 2)
    assert waiting.run("status", "sync").code == 0
    assert waiting.run("resume", "--all").code == 13, "the second question"
    assert done(waiting) == ["first 5", "approved by Ada: seen by two", "second 5"]
    me = Host().user_name(os.getuid())
    assert waiting.run("approve", run[:6], "publish", "--why", "go").code == 0
    assert waiting.run("run", "sync").code == 0
    assert done(waiting)[-2:] == ["approved by Ada: seen by two", f"again {me}"]
    assert events(waiting, "asked%") == [
        ("worker", "asked: new prices", "5 prices, the highest 9.99"),
        ("worker", "asked: publish", "make it seen by all"),
    ]
    assert events(waiting, "approved%") == [
        (me, "approved: new prices", "by Ada: seen by two"),
        (me, "approved: publish", "go"),
    ]


def test_an_approval_is_a_commit_with_the_answer_in_the_checkpoint(waiting: Project) -> None:
    waiting.run("approve", "sync", "new prices", "--by", "Ada", "--why", "yes")
    waiting.run("resume", "sync")
    assert rows(waiting, "SELECT number, kind, loop FROM batch ORDER BY number") == [
        (1, "batch", "first"),
        (2, "loop", "first"),
        (3, "approval", "new prices"),
        (4, "batch", "second"),
        (5, "loop", "second"),
    ]
    (path,) = (waiting.state / "checkpoints" / "sync").glob("*.json")
    passed = batchrun.parse_checkpoint(path.read_bytes())[0].passed
    kind, name, answer = passed[1]
    assert (kind, name, answer["who"], answer["why"]) == ("approval", "new prices", "Ada", "yes")


def test_answers_survive_a_deploy_and_other_words_in_the_question(waiting: Project) -> None:
    waiting.run("approve", "sync", "new prices", "--by", "Ada", "--why", "yes")
    write_job(waiting, ASK.replace("5 prices", "five prices"), version=2)
    assert waiting.run("resume", "sync").code == 13
    assert done(waiting)[1:] == ["approved by Ada: yes", "second 5"]
    assert asked(waiting)[0] == ("new prices", "5 prices, the highest 9.99", "Ada", "yes")


def test_a_question_that_is_gone_from_the_job_needs_a_person(waiting: Project) -> None:
    waiting.run("approve", "sync", "new prices", "--why", "yes")
    waiting.run("resume", "sync")
    write_job(waiting, "pass")
    waiting.run("approve", "sync", "publish", "--why", "yes")
    ended = waiting.run("run", "sync")
    assert ended.code == 13
    assert "The job's loops and steps are not those of the checkpoint." in ended.err


def test_secrets_in_question_and_answer_are_masked(project: Project) -> None:
    secret = "token=abcdef123456"
    write_job(project, f'ctx.approval("go", "https://shop/?{secret}")')
    ended = project.run("run", "sync")
    project.run("approve", "sync", "go", "--why", f"see https://shop/?{secret}")
    written = ended.err + json.dumps(rows(project, "SELECT * FROM approval") + events(project, "%"))
    assert "abcdef123456" not in written
    assert "https://shop/?token=***" in written


@pytest.mark.parametrize(
    "swallow",
    [
        "try:\n        {}\n    except Exception:\n        done('swallowed')",
        "try:\n        {}\n    except BaseException:\n        done('passed over')",
        "try:\n        {}\n    except BaseException:\n        raise ValueError('other')",
        "try:\n        {}\n    finally:\n        return",
    ],
)
def test_a_job_cannot_swallow_that_it_has_to_wait(project: Project, swallow: str) -> None:
    write_job(project, swallow.format("ctx.approval('go', 'on')"))
    assert project.run("run", "sync").code == 13
    assert run_row(project) == ("awaiting", "approval", 2)
    assert "swallowed" not in done(project)
    assert not [line for line in done(project) if line.startswith("second")]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            "for batch in ctx.batches([1], name='x'):\n        ctx.approval('go', 'on')",
            "Batch 3 was not yielded before the job read on.",
        ),
        (
            """for batch in ctx.batches([1, 2], name='x', size=1):
        yield batch
        ctx.approval('go', 'on')""",
            "approval 'go' began before loop 'x' was read to its end.",
        ),
        (
            "ctx.step('x', lambda: ctx.approval('go', 'on') and None)",
            "The approval 'go' began inside the step 'x'.",
        ),
        ("ctx.approval('first', 'on')", "Two loops or steps are named 'first'."),
        ("ctx.approval('', 'on')", "No approval can be named ''."),
    ],
)
def test_a_question_in_the_middle_of_something_is_refused(
    project: Project, place: str, words: str
) -> None:
    write_job(project, place)
    ended = project.run("run", "sync")
    assert ended.code == 1
    assert words in ended.err
    assert asked(project) == []


# --- answering ----------------------------------------------------------------------------------


def test_what_was_not_asked_or_is_answered_or_finished_cannot_be_approved(
    waiting: Project,
) -> None:
    run = run_id(waiting)
    ended = waiting.run("approve", "sync", "other", "--why", "x")
    assert ended.code == 4
    assert ended.err == (
        f"Run {run} of sync has not asked for the approval 'other'.\n"
        "It has asked for: 'new prices'.\nNothing was changed.\n"
    )
    assert waiting.run("approve", "sync", "new prices").code == 2
    ended = waiting.run("approve", "sync", "new prices", "--why", " ")
    assert (ended.code, ended.err) == (2, "--why says nothing: ' '.\nWrite: --why TEXT\n")
    ended = waiting.run("approve", "sync", "new prices", "--why", "...")
    assert (ended.code, ended.err) == (2, "--why says nothing: '...'.\nWrite: --why TEXT\n")
    assert waiting.run("approve", "sync", "new prices", "--by", "Ada", "--why", "a").code == 0
    ended = waiting.run("approve", "sync", "new prices", "--why", "b")
    assert ended.code == 1
    assert ended.err.startswith(f"'new prices' of run {run} was approved already, by Ada.\nAt ")
    assert ended.err.endswith(": a\nNothing was changed.\n")
    assert asked(waiting) == [("new prices", "5 prices, the highest 9.99", "Ada", "a")]


def test_an_approval_named_like_an_option_can_be_typed() -> None:
    rest: dict[str, Any] = dict.fromkeys(batchrun.Run._fields)
    run = batchrun.Run(**rest | {"id": "a1"})
    assert batchrun.approve_line(run, "--help") == 'batchrun approve a1 --why "..." -- --help'


def test_a_cancelled_run_cannot_be_approved(waiting: Project) -> None:
    run = run_id(waiting)
    assert waiting.run("cancel", "sync").code == 0
    ended = waiting.run("approve", run, "new prices", "--why", "x")
    assert ended.code == 1
    assert ended.err == (
        f"Run {run} of sync is cancelled; nothing can go on there.\nNothing was changed.\n"
    )


def test_of_two_answers_at_once_one_is_kept(waiting: Project) -> None:
    words = [("approve", "sync", "new prices", "--by", by, "--why", "x") for by in ("Ada", "Bob")]
    processes = [waiting.start(*each) for each in words]
    codes = [waiting.finish(process).code for process in processes]
    assert sorted(codes) == [0, 1]
    assert asked(waiting)[0][2] == ("Ada", "Bob")[codes.index(0)]
    assert len(events(waiting, "approved%")) == 1


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["kill", "kill-both"])
def test_a_kill_between_the_question_and_the_ending_asks_once(
    project: Project, action: str
) -> None:
    write_job(project, retries='retry_for = "5m"\nretry_first_wait = "10ms"\n')
    project.run("run", "sync", env=at(f"approval.asked@1={action}"))
    wait_for(lambda: project.living() == [], "the worker to leave")
    assert len(asked(project)) == 1
    project.run("resume", "--all")
    assert run_row(project) == ("awaiting", "approval", 2)
    assert len(events(project, "asked%")) == 1
    assert project.run("approve", "sync", "new prices", "--why", "yes").code == 0
    assert project.run("resume", "--all").code == 13
    assert run_row(project) == ("awaiting", "approval", 5)


def test_a_kill_between_the_ending_and_the_edge_is_settled_by_the_tick_once(
    project: Project,
) -> None:
    write_job(project)
    assert project.run("run", "sync", env=at("worker.ended=kill-both")).code == -signal.SIGKILL
    first = project.run("resume", "--all")
    assert (first.code, "approve" in first.err) == (13, True)
    assert run_row(project) == ("awaiting", "approval", 2)
    assert project.run("resume", "--all").code == 0
    assert rows(project, "SELECT count(*) FROM attempt") == [(1,)]


def test_an_answer_before_the_attempt_has_ended_counts(project: Project) -> None:
    write_job(project)
    project.run("run", "sync", env=at("approval.asked=kill-both"))
    assert project.run("approve", "sync", "new prices", "--by", "Ada", "--why", "x").code == 0
    assert project.run("resume", "--all").code == 13
    assert done(project)[1] == "approved by Ada: x"


def test_a_cancel_asked_for_outranks_a_question(project: Project) -> None:
    write_job(project)
    process = project.start("run", "sync", env=at("approval.asked=stop"))
    wait_for(lambda: is_asked(project), "a question")
    assert project.run("cancel", "sync").code == 0
    wait_for(lambda: continue_all(project) or process.poll() is not None, "the end")
    assert run_row(project) == ("cancelled", "person", 2)


def is_asked(project: Project) -> bool:
    try:
        return bool(asked(project))
    except apsw.Error:  # not made yet
        return False


def continue_all(project: Project) -> bool:
    for pid in project.living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return False


# --- the table of starts ------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "state").mkdir(mode=0o700)
    return open_ledger(tmp_path / "state" / "ledger.db", Host(), create=True)


def in_situation(ledger: Ledger, name: str) -> list[Run]:
    """Return runs in every state and reason that stand like this, each as a row of the ledger."""
    states = {
        "has a live owner": [("reserved", ""), ("running", "")],
        "awaits a person: its next batch is poison": [("awaiting", "poison")],
        "waits for an answer": [("awaiting", "approval"), ("awaiting", "")],
        "has a start that was deferred": [
            *[("waiting", ""), ("failed", ""), ("paused", "person"), ("awaiting", "poison")]
        ],
        "was paused by a person": [("paused", "person"), ("interrupted", ""), ("failed", "")],
        "has its answer": [("awaiting", "approval")],
        "failed": [("failed", "")],
        "was refused as it is installed": [("interrupted", "")],
        "was tried for retry_for in vain": [("paused", "retry")],
        "is due": [
            *[("waiting", ""), ("interrupted", "")],
            *[("paused", reason) for reason in ("health", "drain", "stop", "maintenance")],
        ],
    }
    found = []
    for number, (state, reason) in enumerate(states[name]):
        request = "pause" if name == "was paused by a person" and state != "paused" else None
        first = "waiting" if state == "waiting" else "reserved"
        deferred = {"at": "2026-01-01"} if name == "has a start that was deferred" else None
        columns = {"id": f"r{number}", "job": f"job{number}", "created_at": "", "changed_at": ""}
        key = ledger._insert(
            "run", state=first, reason=reason, request=request, deferred=deferred, **columns
        )
        if state != first:
            ledger._set("run", {"key": key}, state=state)
        if reason == "approval":
            answer = "2026-01-01T00:00:00.000Z" if name == "has its answer" else None
            asks = {"run": key, "name": "go", "summary": "on", "asked_at": ""}
            ledger._insert("approval", answered_at=answer, **asks)
        if name == "was refused as it is installed":
            gone = batchrun.ProcessIdentity(1, 1, "before")._asdict()
            of = {"run": key, "generation": 1, "began_at": "", "from_number": 0}
            ledger._insert("attempt", supervisor=gone, ending="refused", **of)
            ledger._set("run", {"key": key}, generation=1)
        found.append(ledger.run(key))
    return found


@pytest.mark.parametrize(("name", "start"), list(product(REPLIES, STARTS)))
def test_each_start_does_with_an_unfinished_run_what_the_table_says(
    ledger: Ledger, name: str, start: str
) -> None:
    wanted = REPLIES[name][STARTS.index(start)]
    for run in in_situation(ledger, name):
        assert reply_to(start, ledger, run) == wanted, (run.state, run.reason)
        if name == "has a live owner":  # which the lock keeps every start from
            continue
        stands = standing(ledger, run, Host())
        tick = REPLIES[name][STARTS.index("tick")]
        needs_someone = tick == "skip" or name in batchrun.NEEDS_A_PERSON
        assert (stands.is_due, stands.needs_someone) == (tick == "go on", needs_someone)
        assert admitted(ledger, run, start) == wanted, (run.state, run.reason)
    ledger.close()


def admitted(ledger: Ledger, run: Run, start: str) -> str:
    """Start as a supervisor does, and return what came of it in the table's words."""
    me = Host().identify()
    assert me is not None
    how = batchrun.Start(
        owner=me,
        who="a test",
        run_id=f"new of {run.job}",
        require_admission=lambda: None,
        require_may_go_on=lambda run: require_may_go_on(start, ledger, run),
        leaves=lambda run: reply_to(start, ledger, run) == "skip",
        write_checkpoint=lambda *_: None,
        only_resume=start in ("resume", "tick"),
        fresh=start == "fresh",
    )
    try:
        admission = ledger.admit(run.job, how, lambda _: Agreement())
    except PersonNeeded:
        return "refuse"
    begun = admission.run.id == (how.run_id if start == "fresh" else run.id)
    return ("go on" if admission.generation else "skip") if begun else "another run"


def test_the_tick_settles_a_run_whose_owner_died_and_leaves_it_if_it_failed(
    ledger: Ledger,
) -> None:
    run = opened(ledger)
    end = batchrun.AttemptEnd(batchrun.Ending.RAISED, batchrun.ExitCode.FAILED, error="no")
    ledger.end_attempt(run, 1, end, [])
    assert admitted(ledger, ledger.run(run.key), "tick") == "skip"
    assert ledger.run(run.key).state == RunState.FAILED
    ledger.close()


def test_a_pause_asked_for_while_a_question_is_open_is_lifted_by_a_person(ledger: Ledger) -> None:
    (run, _) = in_situation(ledger, "waits for an answer")
    ledger.request(run, Request.PAUSE, "a person")
    assert reply_to("resume", ledger, ledger.run(run.key)) == "refuse"
    ledger.approve(run, "go", "Ada", "yes", "Ada")
    run = ledger.run(run.key)
    assert [reply_to(start, ledger, run) for start in ("run", "tick")] == ["refuse", "skip"]
    assert admitted(ledger, run, "resume") == "go on"
    assert ledger.run(run.key).request is None
    ledger.close()


def test_an_answer_to_a_paused_run_says_that_only_a_person_goes_on(waiting: Project) -> None:
    run = run_id(waiting)
    assert waiting.run("pause", "sync").code == 0
    ended = waiting.run("approve", "sync", "new prices", "--why", "yes", "--by", "ann")
    assert ended.out == (
        f"run {run} of sync: 'new prices' is approved by ann\nto type: batchrun resume {run}\n"
    )
    held = f"A pause was asked for; only batchrun resume {run} goes on.\n"
    assert held in waiting.run("status", "sync").out
    assert waiting.run("resume", "--all").code == 0
    assert run_row(waiting) == ("awaiting", "approval", 2)


def test_a_given_approval_is_shown_with_who_and_why(waiting: Project) -> None:
    assert waiting.run("approve", "sync", "new prices", "--by", "Ada", "--why", "seen").code == 0
    assert "'new prices' is approved by Ada: seen" in waiting.run("status", "sync").out
