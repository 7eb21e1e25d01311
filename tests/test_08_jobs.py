"""What a job is and what it is given: the contract, its guards, and exactly once in a target.

Most tests run a job with `--in-process` in a forked child of this interpreter: a real process that
can be killed at a named point, only without the time that starting Python takes.
"""

import contextlib
import json
import os
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from conftest import Ended, Project, wait_for

import batchrun
from batchrun import Batch, Context, job

CONFIG = "[defaults]\nbatch_size = 5\n[jobs.sync]\n"
PRELUDE = """
import os, sqlite3
import apsw
from batchrun import Batch, Context, Delimited, JsonLines, Query, job

def done(*what):
    with open("done.txt", "a") as file:
        print(*what, file=file, flush=True)

"""
RUN = ("run", "sync", "--in-process")
UNCHANGED = "Nothing more was committed."


class Shop:
    """A project with one job, `sync`, run in forked children."""

    def __init__(self, project: Project) -> None:
        self.project, self.folder = project, project.folder

    def write(self, body: str, *, config: str = "", decorator: str = "@job") -> None:
        """Write the job; its body gets `ctx`."""
        text = f"{PRELUDE}{decorator}\ndef sync(ctx):\n{indent(dedent(body), '    ')}"
        self.write_file(text, config=config)

    def write_file(self, text: str, *, config: str = "") -> None:
        """Write the job's whole file."""
        self.project.write(CONFIG + config, sync=text)

    def start(self, *words: str, point: str = "", cwd: Path | None = None) -> int:
        """Start a command and return its pid; `end` must follow before the next start."""
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                be_batchrun(words, point, cwd or self.folder, (out, err))
            os._exit(99)
        return pid

    def end(self, pid: int) -> Ended:
        """Wait for its end; a process killed at a point ends with -9."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        return Ended(code, out.read_text(), err.read_text())

    def call(self, *words: str, point: str = "", cwd: Path | None = None) -> Ended:
        """Run a command to its end."""
        return self.end(self.start(*words, point=point, cwd=cwd))

    def run(self, *more: str, point: str = "") -> Ended:
        """Run the job; it goes on where it was."""
        return self.call(*RUN, *more, point=point)

    def letter(self, *more: str, code: int = 1) -> str:
        """Return what a failing run says, from the second line to the one that names the log."""
        ended = self.run(*more)
        assert ended.code == code, ended
        lines = ended.err.splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith("sync: run ")) + 1
        ends = [at for at, line in enumerate(lines) if line.startswith("The log: ")]
        return "\n".join(lines[start : (ends or [len(lines)])[0]])

    def done(self) -> list[str]:
        """Return what the job has noted in done.txt."""
        path = self.folder / "done.txt"
        return path.read_text().split() if path.exists() else []

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the ledger."""
        with contextlib.closing(sqlite3.connect(self.folder / "state" / "ledger.db")) as ledger:
            return ledger.execute(sql).fetchall()

    def commits(self) -> int:
        """Return how many commits the ledger has."""
        ((number,),) = self.rows("SELECT count(*) FROM batch")
        return int(number)


def be_batchrun(words: tuple[str, ...], point: str, cwd: Path, outputs: tuple[Path, Path]) -> None:
    """Be a batchrun process; never returns."""
    os.setsid()
    os.chdir(cwd)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the process's whole life
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    batchrun.NAMED_POINT = point
    code = batchrun.run_command_line(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


# --- the contract -------------------------------------------------------------------------------


def test_ctx_and_batch_have_exactly_these_names(shop: Shop) -> None:
    shop.write("""
        for batch in ctx.batches(range(1)):
            for thing in ctx, batch:
                done(*sorted(name for name in dir(thing) if not name.startswith("_")))
            iter(batch), len(batch)
            yield batch
        """)
    assert shop.run().code == 0
    of_ctx, of_batch = (shop.folder / "done.txt").read_text().splitlines()
    assert of_ctx == (
        "approval batch_size batches cleanup connect cursor enter finish generation log on_exit"
        " on_finish once once_each remembered run_id settings should_stop step"
    )
    assert of_batch == "count first_key last_key loop number records reject remember transaction"


def test_an_untyped_minimal_job_works(shop: Shop) -> None:
    shop.write_file("""
        from batchrun import job

        @job
        def sync(ctx):
            for batch in ctx.batches(range(12)):
                print(batch.number, batch.loop, list(batch), len(batch))
                yield batch
        """)
    ended = shop.run()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == ("1 main [0, 1, 2, 3, 4] 5\n2 main [5, 6, 7, 8, 9] 5\n3 main [10, 11] 2\n")
    assert shop.commits() == 4  # the loop's end is one


def test_a_batch_knows_its_keys_and_the_context_where_it_stands(shop: Shop) -> None:
    shop.write("""
        read = lambda after, limit: [n for n in range(1, 8) if n > (after or 0)][:limit]
        for batch in ctx.batches(read, key=lambda n: n, name="numbers", size=3):
            print(ctx.cursor, batch.first_key, batch.last_key, batch.loop, ctx.batch_size,
                  ctx.generation, ctx.should_stop, ctx.settings)
            yield batch
        """)
    assert shop.run().out.splitlines() == [
        "None 1 3 numbers 5 1 False None",
        "3 4 6 numbers 5 1 False None",
        "6 7 7 numbers 5 1 False None",
    ]


# --- guards: each refuses before anything is committed ------------------------------------------

LOOP = "for batch in ctx.batches(range(12)):\n"
WITH_TARGET = (
    'target = ctx.connect("sqlite:t.db")\nfor batch in ctx.batches(range(12), target=target):\n'
)

GUARDS = {
    "reading on past a batch that was not yielded": (
        LOOP + "    if batch.number == 9: yield batch",
        (
            "Batch 1 was not yielded before the job read on.\n"
            "Yielding commits a batch; reading on would lose it."
        ),
        "End the loop's body with: yield batch",
    ),
    "reading on, the error swallowed": (
        """
            batches = ctx.batches(range(12))
            first = next(batches)
            try:
                next(batches)
            except Exception:
                yield first
        """,
        (
            "Batch 1 was not yielded before the job read on.\n"
            "Yielding commits a batch; reading on would lose it."
        ),
        "End the loop's body with: yield batch",
    ),
    "returning with a batch that was not yielded": (
        "next(ctx.batches(range(12)))\nreturn\nyield",
        (
            "Batch 1 was not yielded before the job read on.\n"
            "Yielding commits a batch; reading on would lose it."
        ),
        "End the loop's body with: yield batch",
    ),
    "yielding its records": (
        LOOP + "    yield batch.records",
        (
            "The job yielded a value of type list; expected was batch 1.\n"
            "Yielding commits the batch that was handed out last."
        ),
        "Write: for batch in ctx.batches(...): ...; yield batch",
    ),
    "yielding before the first batch": (
        "yield\n" + LOOP + "    yield batch",
        (
            "The job yielded a value of type NoneType; expected was nothing: no batch is open.\n"
            "Yielding commits the batch that was handed out last."
        ),
        "Write: for batch in ctx.batches(...): ...; yield batch",
    ),
    "yielding inside transaction()": (
        WITH_TARGET + "    with batch.transaction():\n        yield batch",
        (
            "Batch 1 was yielded inside its transaction().\n"
            "Yielding commits the batch; its rows are not committed yet."
        ),
        "Move the yield out of the `with` block.",
    ),
    "never entering transaction()": (
        WITH_TARGET + "    yield batch",
        (
            "Batch 1 has a target but never entered transaction().\n"
            "Its mark was not written, so the batch could be applied twice."
        ),
        "Write its rows inside `with batch.transaction() as rows:`.",
    ),
    "transaction() without a target": (
        LOOP + "    with batch.transaction():\n        pass\n    yield batch",
        (
            "Loop 'main' has no target, so its batches have no transaction().\n"
            "Its mark is kept where the rows are."
        ),
        "Name the connection: ctx.batches(source, target=connection)",
    ),
    "returning from the loop": (
        LOOP + "    return\n    yield batch",
        (
            "Batch 1 was not yielded before the job read on.\n"
            "Yielding commits a batch; reading on would lose it."
        ),
        "End the loop's body with: yield batch",
    ),
    "no loop at all": (
        "return\nyield",
        (
            "The job returned without a loop.\n"
            "A job reads its source by ctx.batches(...); without one nothing is recorded."
        ),
        "Write: for batch in ctx.batches(source): ...; yield batch",
    ),
    "a loop begun and not read": (
        "ctx.batches(range(12))\nreturn\nyield",
        (
            "The job returned before loop 'main' was read to its end.\n"
            "What was not read would be missing although the run had succeeded."
        ),
        'Leave out the break or return, or call ctx.finish("why") before it.',
    ),
    "a second loop before the first was read": (
        'ctx.batches(range(2))\nctx.batches(range(2), name="more")\nyield',
        (
            "loop 'more' began before loop 'main' was read to its end.\n"
            "Commits are one chain: loops and steps come one after another."
        ),
        "Read the first loop to its end, or join the two sources in one loop.",
    ),
    "a step result that is not JSON": (
        'ctx.step("now", lambda: {1, 2})\nyield',
        (
            "The result of step 'now' is not JSON: {1, 2}.\n"
            "It is recorded once and given back in every later attempt."
        ),
        "Return None, text, numbers, lists and dicts with text keys.",
    ),
    "a step result that JSON would change": (
        'ctx.step("now", lambda: {1: 2})\nyield',
        (
            "The result of step 'now' is not JSON: {1: 2}.\n"
            "It is recorded once and given back in every later attempt."
        ),
        "Return None, text, numbers, lists and dicts with text keys.",
    ),
    "a step result that holds itself": (
        'me = []; me.append(me)\nctx.step("now", lambda: me)\nyield',
        (
            "The result of step 'now' is not JSON: [[...]].\n"
            "It is recorded once and given back in every later attempt."
        ),
        "Return None, text, numbers, lists and dicts with text keys.",
    ),
    "a target that is no connection": (
        'ctx.batches(range(2), target=open("done.txt", "a"))\nyield',
        (
            "A TextIOWrapper cannot be a target.\n"
            "A target is an open connection of sqlite3, apsw, psycopg or another DB-API driver."
        ),
        "Pass the connection itself, for example: target=ctx.connect(ctx.settings.database)",
    ),
    "a cursor as target": (
        'ctx.batches(range(2), target=sqlite3.connect("t.db").cursor())\nyield',
        (
            "A Cursor cannot be a target.\n"
            "A target is an open connection of sqlite3, apsw, psycopg or another DB-API driver."
        ),
        "Pass the connection itself, for example: target=ctx.connect(ctx.settings.database)",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_broken_contract_is_a_letter_and_commits_nothing(shop: Shop, name: str) -> None:
    body, what, todo = GUARDS[name]
    shop.write(body)
    letter = shop.letter()
    assert letter.removesuffix("\nCommit 0 stands: 0 records are done.") == (
        f"{what}\n{UNCHANGED}\n{todo}"
    )
    assert shop.commits() == 0


# What breaks the contract after batch 1 was committed as it should be.
AFTER_ONE = {
    "breaking out of the loop": (
        LOOP + "    yield batch\n    break",
        (
            "The job returned before loop 'main' was read to its end.\n"
            "What was not read would be missing although the run had succeeded."
        ),
        'Leave out the break or return, or call ctx.finish("why") before it.',
    ),
    "yielding a batch twice": (
        LOOP + "    yield batch\n    yield batch",
        (
            "The job yielded batch 1; expected was nothing: no batch is open.\n"
            "Yielding commits the batch that was handed out last."
        ),
        "Write: for batch in ctx.batches(...): ...; yield batch",
    ),
    "yielding the batch before": (
        "old = None\n" + LOOP + "    yield old or batch\n    old = batch",
        (
            "The job yielded batch 1; expected was batch 2.\n"
            "Yielding commits the batch that was handed out last."
        ),
        "Write: for batch in ctx.batches(...): ...; yield batch",
    ),
}


@pytest.mark.parametrize("name", AFTER_ONE)
def test_a_contract_broken_later_leaves_what_was_committed(shop: Shop, name: str) -> None:
    body, what, todo = AFTER_ONE[name]
    shop.write(body)
    assert shop.letter() == f"{what}\n{UNCHANGED}\n{todo}"
    assert shop.commits() == 1


@pytest.mark.parametrize("second", ["ctx.batches(range(2))", 'ctx.step("main", list)'])
def test_two_loops_or_steps_of_one_name_are_refused(shop: Shop, second: str) -> None:
    shop.write(f"for batch in ctx.batches(range(2)):\n    yield batch\n{second}")
    assert shop.letter() == (
        "Two loops or steps are named 'main'.\n"
        "Each has a cursor or a result of its own in the checkpoint.\n"
        f'{UNCHANGED}\nGive each a name: ctx.batches(source, name="...")'
    )


def test_a_source_around_another_may_hand_on_what_that_one_has_not(shop: Shop) -> None:
    shop.write_file(
        """
        from batchrun import job

        class Around:
            def __init__(self, source):
                self.source, self.key = source, source.index
                self.total = getattr(source, "total", None)
                self.fingerprint = getattr(source, "fingerprint", None)

            def read(self, after, limit):
                begin = 0 if after is None else after + 1
                return [*self.source[begin : begin + limit]]

        @job
        def sync(ctx):
            for batch in ctx.batches(Around(range(12))):
                yield batch
        """
    )
    assert shop.run().code == 0
    assert shop.rows("SELECT read, expected FROM run") == [(12, None)]


def test_a_word_that_job_does_not_know_is_named() -> None:
    with pytest.raises(TypeError, match="'verson'"):
        batchrun.job(verson=2)(lambda _: (yield))  # type: ignore[call-overload]


def test_a_function_that_never_yields_is_no_job() -> None:
    with pytest.raises(batchrun.JobError) as refusal:

        @job
        def sync(ctx: Context[None]) -> Iterator[Batch]:
            return iter(ctx.batches(range(12)))

    assert str(refusal.value) == (
        "The job sync never yields.\n"
        "A job yields each batch after its work; yielding is what commits it.\n"
        "Nothing was begun.\nEnd the loop's body with: yield batch"
    )


def test_a_job_that_ends_python_has_failed(shop: Shop) -> None:
    shop.write(LOOP + "    raise SystemExit(0)\n    yield batch")
    assert shop.letter().startswith("The job raised SystemExit: 0 in batch 1.")
    assert shop.commits() == 0


def test_a_source_that_stands_still_is_stopped(shop: Shop) -> None:
    shop.write("""
        for batch in ctx.batches(lambda after, limit: [1, 2, 3], key=lambda n: n):
            yield batch
        """)
    assert shop.letter().startswith("The source of loop main does not advance: after 3 came 1.\n")
    assert shop.commits() == 0


ACKNOWLEDGING = """
class Numbers:
    key = staticmethod(lambda number: number)

    def read(self, after, limit):
        begin = after or 0
        done(f"read-{begin}")
        return list(range(begin, min(begin + 2, 5))), begin + 2 if begin < 5 else None

    def committed(self, cursor):
        done(f"committed-{cursor}")
        FAILS

for batch in ctx.batches(Numbers()):
    done(*batch)
    yield batch
"""
FIRST = ["read-0", "0", "1", "committed-2"]
SECOND = ["read-2", "2", "3", "committed-4"]
THIRD = ["read-4", "4", "committed-6", "read-6"]


def test_a_source_is_told_of_each_commit_before_it_is_read_again(shop: Shop) -> None:
    shop.write(ACKNOWLEDGING.replace("FAILS", ""))
    assert shop.run().code == 0
    assert shop.done() == FIRST + SECOND + THIRD
    assert shop.rows("SELECT read FROM batch") == [(2,), (2,), (1,), (0,)]


def test_a_source_is_told_of_a_commit_before_the_attempt_stops(shop: Shop) -> None:
    shop.write(ACKNOWLEDGING.replace("FAILS", ""))
    assert shop.run("--batches", "1").code == 75
    assert shop.done() == FIRST


def test_a_source_that_was_not_told_of_a_commit_is_told_by_the_next_attempt(shop: Shop) -> None:
    shop.write(ACKNOWLEDGING.replace("FAILS", ""))
    assert shop.run(point="source.committed@2=kill").code == -9
    assert shop.run().code == 0
    assert shop.done() == FIRST + SECOND[:-1] + ["committed-4"] + THIRD


def test_a_source_that_fails_when_it_is_told_ends_the_attempt_and_the_batch_stands(
    shop: Shop,
) -> None:
    fails = "if cursor == 4: raise OSError('the broker is away')"
    shop.write(ACKNOWLEDGING.replace("FAILS", fails))
    assert shop.letter().startswith("The job raised OSError: the broker is away.\nCommit 2 stands")
    assert shop.done() == FIRST + SECOND
    assert shop.letter().startswith("The job raised OSError: the broker is away.\nCommit 2 stands")
    shop.write(ACKNOWLEDGING.replace("FAILS", ""))
    assert shop.run().code == 0
    assert shop.done() == [*FIRST, *SECOND, "committed-4", "committed-4", *THIRD]


def test_a_key_that_would_come_back_as_something_else_is_refused_before_work(shop: Shop) -> None:
    shop.write("""
        class Name(str):
            pass

        for batch in ctx.batches([Name("a"), Name("b")]):
            yield batch
        for batch in ctx.batches(lambda after, limit: [] if after else [1], key=float, name="n"):
            yield batch
        nan = lambda after, limit: [] if after else [1]
        for batch in ctx.batches(nan, key=lambda _: float("nan"), name="nan"):
            done("worked")
            yield batch
        """)
    assert shop.letter().startswith(
        "The cursor nan cannot be stored: NaN and infinity have no place in an order."
    )
    assert shop.done() == []


def test_finishing_early_on_purpose_is_no_mistake(shop: Shop) -> None:
    shop.write(
        LOOP
        + """
            yield batch
            if batch.number == 2:
                ctx.finish("enough is on the shelf")
                return
        """
    )
    assert shop.run().code == 0
    assert shop.commits() == 2
    said = shop.rows("SELECT why FROM event WHERE what = 'said'")
    assert said == [("the job finished by itself: enough is on the shelf",)]


ESTIMATED = """
    class Shelf:
        def total(self):
            return ESTIMATE

        def read(self, after, limit):
            return list(range((after or 0) + 1, min((after or 0) + limit, 20) + 1))

        def key(self, record):
            return record

    for batch in ctx.batches(Shelf(), size=10):
        yield batch
"""


@pytest.mark.parametrize("estimate", [19, 21])
def test_a_source_that_was_read_whole_has_what_was_read_and_not_what_was_estimated(
    shop: Shop, estimate: int
) -> None:
    shop.write(ESTIMATED.replace("ESTIMATE", str(estimate)))
    assert shop.run("--batches", "1").code == 75
    assert shop.rows("SELECT read, expected FROM run") == [(10, estimate)]
    assert shop.run().code == 0
    assert shop.rows("SELECT read, expected FROM run") == [(20, 20)]


def test_a_source_that_was_left_early_on_purpose_has_what_it_was_said_to_have(shop: Shop) -> None:
    ends = "        ctx.finish('enough')\n        return\n"
    shop.write(ESTIMATED.replace("ESTIMATE", "20") + ends)
    assert shop.run().code == 0
    assert shop.rows("SELECT read, expected FROM run") == [(10, 20)]
    assert re.search(r"records read +10 of 20$", shop.call("report", "sync").out, re.MULTILINE)


def test_rejecting_from_a_batch_that_was_yielded_is_refused(shop: Shop) -> None:
    shop.write(LOOP + "    yield batch\n    batch.reject(1, 'late')")
    assert shop.letter().startswith("reject() of batch 1 was called after the batch was closed.")


def test_an_exception_is_a_reason_to_reject_and_stands_there_as_its_type_and_text(
    shop: Shop,
) -> None:
    shop.write(LOOP + "    batch.reject(batch.records[0], KeyError('price'))\n    yield batch")
    assert "the first of this batch: 0: KeyError: 'price'." in shop.letter()


def test_a_long_error_is_cut_in_letters_and_stands_whole_in_the_log(shop: Shop) -> None:
    shop.write(LOOP + "    raise ValueError('x' * 4900 + 'END')\n    yield batch")
    text = (shop.folder / "batchrun.toml").read_text()
    (shop.folder / "batchrun.toml").write_text(f"{text}max_tries = 1\n")
    ended = shop.project.run("run", "sync")
    cut = "x" * (300 - len("ValueError: ")) + "... (4,915 characters; all of it is in the log)"
    assert f"The job raised ValueError: {cut} in batch 1.\n" in ended.err
    assert max(map(len, ended.err.splitlines())) < 500
    (log,) = shop.folder.rglob("*.log")
    assert "x" * 4900 + "END" in log.read_text()
    for words in (["status", "sync"], ["report", "sync"]):
        assert "x" * 301 not in shop.project.run(*words).out


def test_a_long_rejected_record_is_cut_in_the_letter_and_stands_whole_in_the_log(
    shop: Shop,
) -> None:
    shop.write(LOOP + "    batch.reject('r' * 5000, 'y' * 400 + '.')\n    yield batch")
    letter = shop.project.run("run", "sync").err
    record = f"'{'r' * 299}... (5,002 characters; all of it is in the log)"
    reason = f"{'y' * 300}... (400 characters; all of it is in the log)"
    assert f"the first of this batch: {record}: {reason}.\n" in letter
    (log,) = shop.folder.rglob("*.log")
    assert f"Rejected: '{'r' * 5000}': {'y' * 400}\n" in log.read_text()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("MemoryError()", "MemoryError in batch 1."),
        ("ValueError('no price.')", "ValueError: no price in batch 1."),
    ],
)
def test_an_error_is_one_sentence_with_and_without_words(shop: Shop, error: str, said: str) -> None:
    shop.write(LOOP + f"    raise {error}\n    yield batch")
    assert f"The job raised {said}" in shop.letter()


def test_a_reason_that_ends_with_a_full_stop_gets_no_second_one(shop: Shop) -> None:
    shop.write(LOOP + "    batch.reject(0, 'It failed in batch 9.')\n    yield batch")
    assert "the first of this batch: 0: It failed in batch 9.\n" in shop.letter()


@pytest.mark.parametrize("reason", ["None", "7"])
def test_what_is_no_reason_to_reject_is_the_jobs_mistake(shop: Shop, reason: str) -> None:
    shop.write(LOOP + f"    batch.reject(batch.records[0], {reason})\n    yield batch")
    kind = type(eval(reason)).__name__  # noqa: S307 - of the two above
    assert shop.letter().startswith(
        f"reject() of batch 1 was given {kind} as its reason.\n"
        "The reason is what a person reads who has to decide about the record.\n"
    )


def test_finishing_with_an_applied_batch_in_hand_is_refused(shop: Shop) -> None:
    shop.write(
        WITH_TARGET
        + """
            ctx.finish("enough")
            with batch.transaction():
                pass
            return
            yield
        """
    )
    assert shop.letter().startswith("Batch 1 was not yielded before the job read on.")


# --- loops and steps over several attempts ------------------------------------------------------

TWO_LOOPS = """
    target = ctx.connect("sqlite:t.db")

    def add(rows):
        rows.execute("INSERT INTO t VALUES ('+')")

    ctx.step("table", lambda rows: rows.execute("CREATE TABLE t (x)") and 7, target=target)
    for name in "first", "second":
        for batch in ctx.batches(range(12), name=name, target=target):
            with batch.transaction() as rows:
                rows.executemany("INSERT INTO t VALUES (?)", [(f"{name}{n}",) for n in batch])
            yield batch
        ctx.step(f"after {name}", add, target=target)
    """
EXPECTED = sorted([f"{name}{n}" for name in ("first", "second") for n in range(12)] + ["+", "+"])


@pytest.mark.parametrize(
    "point", ["target.commit", "target.committed", "commit.prepared", "ledger.begun"]
)
def test_two_loops_and_steps_killed_at_each_commit_apply_everything_once(
    shop: Shop, point: str
) -> None:
    shop.write(TWO_LOOPS)
    for number in range(1, 12):
        if number not in (5, 10) or not point.startswith("target"):  # a loop's end writes no mark
            assert shop.run(point=f"{point}@{number}=kill").code == -9
    assert shop.run().code == 0
    with contextlib.closing(sqlite3.connect(shop.folder / "t.db")) as target:
        assert sorted(x for (x,) in target.execute("SELECT x FROM t")) == EXPECTED
    assert shop.rows("SELECT number FROM batch") == [(number,) for number in range(1, 12)]


ORDER = """
    for name in {order}:
        if name.startswith("step"):
            ctx.step(name, lambda: 1)
            continue
        for batch in ctx.batches(range(7), name=name):
            yield batch
            if name == {broken!r}:
                raise RuntimeError("stop here")
    """


@pytest.mark.parametrize(
    ("now", "met"),
    [
        (["loop a", "step b", "loop renamed"], "loop 'loop a', step 'step b', loop 'loop renamed'"),
        (["step b", "loop a", "loop c"], "step 'step b'"),
        (["loop a", "step b"], "loop 'loop a', step 'step b'"),
        (["loop a"], "loop 'loop a'"),
    ],
)
def test_another_order_of_loops_and_steps_is_refused_naming_both(
    shop: Shop, now: list[str], met: str
) -> None:
    shop.write(ORDER.format(order=["loop a", "step b", "loop c"], broken="loop c"))
    assert shop.run().code == 1
    before = shop.commits()
    shop.write(ORDER.format(order=now, broken=""))
    assert shop.letter(code=13).splitlines() == [
        "The job's loops and steps are not those of the checkpoint.",
        f"The checkpoint has: loop 'loop a', step 'step b', loop 'loop c'. The job met: {met}.",
        "Nothing was done; the checkpoint stands.",
        "Give them their old names and order back, or start anew: batchrun run sync --fresh",
    ]
    assert shop.commits() == before


def test_a_step_is_called_once_per_run_and_gives_its_result_again(shop: Shop) -> None:
    shop.write("""
        got = ctx.step("ask", lambda: done("asked") or {"rate": [1, 2.5, None]})
        print(got)
        for batch in ctx.batches(range(12)):
            yield batch
            if batch.number == 2 and ctx.generation == 1:
                raise RuntimeError
        """)
    assert [shop.run().out for _ in range(2)] == ["{'rate': [1, 2.5, None]}\n"] * 2
    assert shop.done() == ["asked"]


def test_what_a_job_does_to_a_steps_result_changes_no_record_of_it(shop: Shop) -> None:
    shop.write("""
        got = ctx.step("ask", lambda: ["asked"])
        print(got)
        got.append("changed by the job")
        for batch in ctx.batches(range(12)):
            yield batch
            if batch.number == 2 and ctx.generation < 3:
                raise RuntimeError
        """)
    assert [shop.run().out for _ in range(3)] == ["['asked']\n"] * 3


def test_a_step_that_failed_is_not_passed_over(shop: Shop) -> None:
    shop.write("""
        try:
            ctx.step("ask", lambda: 1 / 0)
        except ZeroDivisionError:
            pass
        for batch in ctx.batches(range(12)):
            yield batch
        """)
    assert shop.letter().startswith("The job raised ZeroDivisionError: division by zero.")
    assert shop.commits() == 0


# --- targets: the same shape of job for each driver ---------------------------------------------


@dataclass
class Stock:
    """A target database and how a job opens it.

    Attributes:
        opened: the expression that opens it, DSN filled in.
        begin: the statement that begins a transaction in it, empty if the driver does by itself.
    """

    shop: Shop
    opened: str
    begin: str
    dsn: str

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection beside the job's, committed at the end."""
        if self.dsn:
            psycopg = pytest.importorskip("psycopg")
            with psycopg.connect(self.dsn) as connection:
                yield connection
        else:
            path = self.shop.folder / "t.db"
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                yield connection

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Execute a statement and commit; return the rows, if it gives any."""
        with self.connected() as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def write(self, body: str, *, before: str = "", config: str = "") -> None:
        """Write a job of 12 records in 3 batches: `body` is what it does with each."""
        text = "import psycopg\n" if self.dsn else ""
        text += f"stock = ctx.enter({self.opened})\n{dedent(before)}"
        text += f"for batch in ctx.batches(range(12), target=stock):\n{indent(dedent(body), TAB)}"
        self.shop.write(text.replace("(?)", "(%s)" if self.dsn else "(?)"), config=config)

    def applied(self) -> list[int]:
        """Return what the job has written."""
        return sorted(x for (x,) in self.ask("SELECT x FROM t"))

    def beginning(self, statement: str) -> str:
        """Return the lines that execute a statement in a transaction that stays open."""
        begin = f"stock.execute({self.begin!r})\n" if self.begin else ""
        return f"{begin}stock.execute({statement!r})\n"


TAB = "    "
WRITE = dedent("""
    with batch.transaction() as rows:
        rows.executemany("INSERT INTO t VALUES (?)", [(n,) for n in batch])
    yield batch
    """)
ALL = list(range(12))

# name -> how it is opened, and the statement that begins a transaction, if that must be said
OPENED = {
    "sqlite3": ('sqlite3.connect("t.db")', ""),
    "sqlite3, by statement, rows as Row": ("__import__('rows').connect()", "BEGIN"),
    "apsw": ('apsw.Connection("t.db")', "BEGIN"),
    "apsw by ctx.connect": ('ctx.connect("sqlite:t.db")', "BEGIN"),
    "psycopg": ("psycopg.connect(DSN)", ""),
    "psycopg, autocommit, rows as dict": (
        "psycopg.connect(DSN, autocommit=True, row_factory=psycopg.rows.dict_row)",
        "BEGIN",
    ),
}
if sys.version_info >= (3, 12):
    OPENED["sqlite3, autocommit"] = ('sqlite3.connect("t.db", autocommit=True)', "BEGIN")
    OPENED["sqlite3, no autocommit"] = ('sqlite3.connect("t.db", autocommit=False)', "")
ROWS = """
    import sqlite3

    def connect():
        connection = sqlite3.connect("t.db", isolation_level=None)
        connection.row_factory = sqlite3.Row
        return connection
    """


@pytest.fixture(params=["sqlite3", "apsw by ctx.connect", "psycopg"])
def stock(request: pytest.FixtureRequest, shop: Shop) -> Stock:
    """A target of each kind."""
    return make_stock(request, shop)


@pytest.fixture(params=OPENED)
def any_stock(request: pytest.FixtureRequest, shop: Shop) -> Stock:
    """A target of each kind, opened in each way that its driver knows."""
    return make_stock(request, shop)


def make_stock(request: pytest.FixtureRequest, shop: Shop, name: str = "") -> Stock:
    opened, begin = OPENED[name or request.param]
    dsn = request.getfixturevalue("postgres_dsn") if "DSN" in opened else ""
    (shop.folder / "jobs").mkdir(mode=0o700)
    shop.project.write_file("jobs/rows.py", ROWS)
    made = Stock(shop, opened.replace("DSN", repr(dsn)), begin, dsn)
    made.ask("CREATE TABLE t (x INTEGER)")
    return made


def test_each_record_is_applied_once_whenever_the_process_is_killed(any_stock: Stock) -> None:
    step = """
        def one(rows):
            rows.execute("INSERT INTO t VALUES (99)")

        ctx.step("one", one, target=stock)
        """
    any_stock.write(WRITE, before=step)
    points = ["target.commit@1", "target.committed@1", "batch.handed_out@2", "target.commit@2"]
    points += ["target.committed@2", "target.committed@3", "ledger.begun@3", "commit.prepared@4"]
    for point in points:
        assert any_stock.shop.run(point=f"{point}=kill").code == -9, point
    assert any_stock.shop.run().code == 0
    assert any_stock.applied() == [*ALL, 99]
    said = [why for (why,) in any_stock.shop.rows("SELECT why FROM event WHERE what = 'said'")]
    rolled = [why for why in said if why.endswith("is in the target already: rolled forward")]
    assert [int(why.split()[1]) for why in rolled] == [1, 2, 3, 3, 4]


def test_reading_the_target_before_its_transaction_is_fine(any_stock: Stock) -> None:
    look = any_stock.beginning("SELECT x FROM t")
    any_stock.write(look + WRITE, before=look)
    ended = any_stock.shop.run()
    assert (ended.code, any_stock.applied()) == (0, ALL), ended.err


def test_writes_left_open_before_the_loop_are_refused(any_stock: Stock) -> None:
    any_stock.write(WRITE, before=any_stock.beginning("INSERT INTO t VALUES (77)"))
    assert any_stock.shop.letter().splitlines() == [
        "The target of 'main' has an open transaction with writes.",
        "batchrun would commit them together with its own mark, or roll them back.",
        UNCHANGED,
        "Commit them before, or write inside `with batch.transaction() as rows:`.",
    ]
    assert any_stock.applied() == []


def test_writes_that_were_committed_before_the_loop_are_fine(any_stock: Stock) -> None:
    before = any_stock.beginning("INSERT INTO t VALUES (77)") + "stock.execute('COMMIT')\n"
    any_stock.write(WRITE, before=before)
    assert any_stock.shop.run().code == 0
    assert any_stock.applied() == [*ALL, 77]


def test_writes_left_open_after_the_transaction_are_refused(any_stock: Stock) -> None:
    late = any_stock.beginning("INSERT INTO t VALUES (77)") + "yield batch"
    any_stock.write(WRITE.replace("yield batch", late))
    assert any_stock.shop.letter().splitlines() == [
        "Batch 1 was yielded while its target has an open transaction.",
        "Writes after transaction() would be lost, or committed without the mark.",
        UNCHANGED,
        "Put all writes of the batch into its transaction().",
    ]
    assert any_stock.shop.commits() == 0


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_transaction_that_the_job_ends_by_itself_is_refused(
    any_stock: Stock, statement: str
) -> None:
    any_stock.write(WRITE.replace("\nyield", f"\n    rows.execute('{statement}')\nyield"))
    assert any_stock.shop.letter().splitlines() == [
        "The job ended the transaction of 'main' inside transaction().",
        "Rows and mark commit together; what was committed alone may be applied twice.",
        UNCHANGED,
        "Leave commit() and rollback() to the end of the `with` block.",
    ]


@pytest.mark.parametrize("call", ["commit", "rollback"])
def test_a_transaction_that_the_job_ends_by_a_call_is_refused(stock: Stock, call: str) -> None:
    ended = f"execute({call!r})" if "ctx.connect" in stock.opened else f"{call}()"  # apsw has none
    write = "stock.execute('INSERT INTO t VALUES (77)')"
    stock.write(f"with batch.transaction():\n    {write}\n    stock.{ended}\nyield batch")
    what = "The job ended the transaction of 'main' inside transaction()."
    assert stock.shop.letter().splitlines()[0] == what


@pytest.mark.parametrize("body", ["pass", "batch.count(seen=len(batch))"])
def test_a_transaction_without_a_statement_commits_its_mark(any_stock: Stock, body: str) -> None:
    any_stock.write(
        f"with batch.transaction():\n    {body}\nyield batch",
        before="ctx.step('none', lambda rows: None, target=stock)\n",
    )
    ended = any_stock.shop.run()
    assert (ended.code, any_stock.shop.commits()) == (0, 5), ended.err
    marks = any_stock.ask("SELECT loop, number FROM batchrun_mark ORDER BY number")
    assert marks == [("none", 1), ("main", 4)]


# --- connections that are nobody's target --------------------------------------------------------

LOOSE = "for batch in ctx.batches(range(12)):\n"


def write_loose(stock: Stock, body: str, before: str = "", loop: str = LOOSE) -> None:
    """Write a job whose loop has no target, but which holds the connection."""
    imports = "import psycopg\n" if stock.dsn else ""
    opened = f"{imports}stock = ctx.enter({stock.opened})\n{before}"
    stock.shop.write(opened + loop + indent(body, TAB))


def test_writes_that_are_open_at_a_yield_without_a_target_are_refused(any_stock: Stock) -> None:
    write_loose(any_stock, any_stock.beginning("INSERT INTO t VALUES (77)") + "yield batch\n")
    driver = any_stock.opened.partition(".")[0].replace("ctx", "apsw")
    driver = "sqlite3" if "rows" in driver else driver
    assert any_stock.shop.letter().splitlines() == [
        f"Batch 1 was yielded while a connection of {driver} has open writes.",
        "At the end they would be rolled back, and the batch would count as done without them.",
        UNCHANGED,
        "Commit or roll back before the yield, or name it: ctx.batches(source, target=connection)",
    ]
    assert (any_stock.applied(), any_stock.shop.commits()) == ([], 0)


def test_writes_that_are_open_beside_the_target_are_refused(stock: Stock) -> None:
    other = "other = ctx.connect('sqlite:other.db')\n"
    body = "with batch.transaction():\n    pass\n"
    body += stock.beginning("INSERT INTO t VALUES (77)") + "yield batch\n"
    loop = "for batch in ctx.batches(range(12), target=other):\n"
    write_loose(stock, body, other, loop)
    assert stock.shop.letter().startswith("Batch 1 was yielded while a connection of ")
    assert stock.applied() == []


def test_reads_that_are_open_at_a_yield_and_committed_writes_are_fine(any_stock: Stock) -> None:
    commit = "stock.execute('COMMIT')\n" if any_stock.begin else "stock.commit()\n"
    write = any_stock.beginning("INSERT INTO t VALUES (77)") + commit
    look = any_stock.beginning("SELECT x FROM t").rstrip() + ".fetchall()\n"
    write_loose(any_stock, f"{write}{look}yield batch\n{commit}")
    ended = any_stock.shop.run()
    assert (ended.code, any_stock.applied()) == (0, [77, 77, 77]), ended.err


def test_a_connection_that_was_closed_may_be_yielded_beside(stock: Stock) -> None:
    write_loose(stock, "stock.close()\nyield batch\n")
    ended = stock.shop.run()
    assert ended.code == 0, ended.err


def test_rows_that_are_being_fetched_at_a_yield_are_not_disturbed(
    shop: Shop, postgres_dsn: str
) -> None:
    shop.write(f"""
        stock = ctx.connect({postgres_dsn!r})
        rows = stock.cursor().stream("SELECT generate_series(1, 12)")
        for batch in ctx.batches(range(12)):
            done(*next(rows))
            yield batch
        rows.close()
        """)
    ended = shop.run()
    assert ended.code == 0, ended.err
    assert shop.done() == ["1", "2", "3"]


def test_a_connection_whose_rows_are_of_a_class_is_asked_all_the_same(
    shop: Shop, postgres_dsn: str
) -> None:
    postgres_stock(shop, postgres_dsn)
    shop.write(f"""
        import psycopg
        rows = psycopg.rows.kwargs_row(lambda x: x)
        stock = ctx.enter(psycopg.connect({postgres_dsn!r}, row_factory=rows))
        for batch in ctx.batches(range(12)):
            stock.execute("SELECT x FROM t").fetchall()
            yield batch
        """)
    ended = shop.run()
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("name", ["sqlite3", "apsw", "psycopg"])
def test_a_query_on_a_connection_that_the_job_writes_to_and_commits_goes_on(
    request: pytest.FixtureRequest, shop: Shop, name: str
) -> None:
    stock = make_stock(request, shop, name)
    stock.ask("INSERT INTO t VALUES (1), (2), (3)")
    commit = "stock.execute('COMMIT')\n" if stock.begin else "stock.commit()\n"
    write = stock.beginning("UPDATE t SET x = x") + commit
    query = "batchrun.Query(stock, 'SELECT x FROM t', key='x')"
    loop = f"for batch in ctx.batches({query}, size=1):\n"
    write_loose(stock, f"{write}yield batch\n", "import batchrun\n", loop)
    ended = shop.run()
    assert (ended.code, shop.commits()) == (0, 4), ended.err


def test_half_a_batch_is_rolled_back_when_the_job_raises(stock: Stock) -> None:
    stock.write(WRITE.replace("\nyield", "\n    if batch.number == 2: raise OSError\nyield"))
    assert stock.shop.letter().startswith("The job raised OSError in batch 2.")
    assert stock.applied() == ALL[:5]


def test_a_batch_whose_transaction_failed_cannot_be_yielded_all_the_same(stock: Stock) -> None:
    stock.write("""
        try:
            with batch.transaction() as rows:
                rows.execute("INSERT INTO t VALUES (1)")
                rows.execute("INSERT INTO nowhere VALUES (1)")
        except Exception:
            pass
        yield batch
        """)
    assert stock.shop.letter().splitlines() == [
        "Batch 1 was yielded although its transaction() was rolled back.",
        "An error ended it and the job went on; its rows would be missing.",
        UNCHANGED,
        "Let the error out of the job, or reject the records that cause it.",
    ]
    assert (stock.applied(), stock.shop.commits()) == ([], 0)


def test_entering_transaction_twice_is_refused(stock: Stock) -> None:
    stock.write(WRITE.replace("yield", "with batch.transaction():\n    pass\nyield"))
    assert stock.shop.letter().splitlines() == [
        "Batch 1 entered transaction() twice.",
        "Its rows and its mark commit together, once.",
        UNCHANGED,
        "Put all writes of the batch into one `with batch.transaction() as rows:`.",
    ]
    assert stock.shop.commits() == 0


@pytest.mark.parametrize("call", ["reject(1, 'late')", "count(late=1)"])
def test_what_comes_after_the_transaction_has_closed_is_refused(stock: Stock, call: str) -> None:
    late = f"try:\n    batch.{call}\nexcept Exception:\n    pass\nyield batch"
    stock.write(WRITE.replace("yield batch", late))
    name = call.partition("(")[0]
    assert stock.shop.letter().splitlines() == [
        f"{name}() of batch 1 was called after the batch was closed.",
        "Its transaction() or its yield has committed it already.",
        UNCHANGED,
        f"Call {name}() before the yield, and inside transaction() if there is one.",
    ]
    assert stock.shop.commits() == 0


# --- the mark -----------------------------------------------------------------------------------


def stop_after_two(stock: Stock) -> None:
    """Commit two of three batches, and let the third fail."""
    stock.write(
        WRITE.replace("with", "if batch.number == 3 and ctx.generation == 1: raise OSError\nwith")
    )
    assert stock.shop.run().code == 1
    assert stock.applied() == ALL[:10]


@pytest.mark.parametrize(
    ("spoil", "number", "why"),
    [
        (
            "UPDATE batchrun_mark SET number = 1",
            1,
            "It was restored from an older copy, or it is another database.",
        ),
        (
            "DROP TABLE batchrun_mark",
            0,
            "It was restored from an older copy, or it is another database.",
        ),
        ("UPDATE batchrun_mark SET number = 4", 4, "Another copy of this run has written to it."),
    ],
    ids=["restored from yesterday", "another database", "more than one ahead"],
)
def test_a_target_that_does_not_fit_the_checkpoint_is_refused(
    stock: Stock, spoil: str, number: int, why: str
) -> None:
    stop_after_two(stock)
    stock.ask(spoil)
    assert stock.shop.letter(code=13).splitlines() == [
        (
            "The target of 'main' does not fit the checkpoint:"
            f" it is marked {number}, the checkpoint says 2."
        ),
        why,
        "No record was written to it.",
        "Bring the right database back, or start anew: batchrun run sync --fresh",
    ]
    assert stock.applied() == ALL[:10]


def test_a_finished_loop_is_never_rolled_forward(shop: Shop) -> None:
    shop.write(TWO_LOOPS)
    assert shop.run(point="batch.handed_out@8=kill").code == -9
    with contextlib.closing(sqlite3.connect(shop.folder / "t.db")) as target, target:
        target.execute("UPDATE batchrun_mark SET number = 8 WHERE loop = 'first'")
    assert shop.letter(code=13).splitlines()[:2] == [
        "The target of 'first' does not fit the checkpoint: it is marked 8, the checkpoint says 4.",
        "Another copy of this run has written to it.",
    ]
    assert shop.commits() == 7


NEWER = "UPDATE batchrun_mark SET generation = generation + 1"
AHEAD = "UPDATE batchrun_mark SET number = 3"  # as a copy of the state directory does


@pytest.mark.parametrize("taken", [NEWER, AHEAD], ids=["claimed", "moved on"])
def test_a_worker_whose_mark_was_taken_changes_nothing_and_stops(stock: Stock, taken: str) -> None:
    stock.write(WRITE, before='done("open")\n')
    opening = (
        "psycopg.connect({dsn!r}, autocommit=True)" if stock.dsn else "sqlite3.connect('t.db')"
    )
    claim = f"if batch.number == 2:\n    other = {opening}\n    other.execute({taken!r})\n"
    claim = claim.replace("{dsn!r}", repr(stock.dsn)) + "    stock is other or other.commit()\n"
    swallowed = "try:\n" + indent(WRITE.strip().removesuffix("yield batch"), TAB)
    stock.write(claim + swallowed + "except Exception:\n    pass\nyield batch")
    ended = stock.shop.run()
    assert ended.code == 14, ended
    assert "generation" in ended.err
    assert stock.applied() == ALL[:5]
    assert stock.shop.commits() == 1


def test_an_attempt_that_finds_a_newer_claim_stops_before_it_reads(stock: Stock) -> None:
    stop_after_two(stock)
    stock.ask("UPDATE batchrun_mark SET generation = 9")
    assert stock.shop.run().code == 14
    assert stock.applied() == ALL[:10]


# --- PostgreSQL ---------------------------------------------------------------------------------


def postgres_stock(shop: Shop, dsn: str) -> Stock:
    made = Stock(shop, f"ctx.connect({dsn!r})", "", dsn)
    made.ask("CREATE TABLE t (x INTEGER)")
    return made


def test_the_claim_waits_behind_a_commit_that_is_still_in_flight(
    shop: Shop, postgres_dsn: str
) -> None:
    stock = postgres_stock(shop, postgres_dsn)
    shop.write(
        "def read(after, limit):\n"
        "    return [n for n in range(12) if after is None or n > after][:limit]\n"
        f"stock = {stock.opened}\n"
        "for batch in ctx.batches(read, key=lambda n: n, target=stock):\n"
        + indent(WRITE.replace("(?)", "(%s)"), TAB)
    )
    assert shop.run(point="batch.handed_out@2=kill").code == -9
    with stock.connected() as old:  # the dead worker's transaction, which its server still commits
        old.execute("INSERT INTO t SELECT generate_series(5, 9)")
        old.execute("UPDATE batchrun_mark SET number = 2, cursor = '9'")
        process = shop.start("run", "sync", "--in-process")
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for(lambda: stock.ask(waiting) == [(1,)], "the claim to wait")
    assert shop.end(process).code == 0
    assert stock.applied() == ALL


def test_a_claim_that_waits_can_be_interrupted(shop: Shop, postgres_dsn: str) -> None:
    stock = postgres_stock(shop, postgres_dsn)
    stock.write(WRITE)
    assert shop.run(point="batch.handed_out@2=kill").code == -9
    with stock.connected() as old:
        old.execute("UPDATE batchrun_mark SET counts = counts")
        process = shop.start(*RUN)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for(lambda: stock.ask(waiting) == [(1,)], "the claim to wait")
        os.kill(process, signal.SIGUSR1)
        assert shop.end(process).code == 75
    assert shop.run().code == 0
    assert stock.applied() == ALL


def test_two_jobs_may_make_the_table_of_marks_at_once(shop: Shop, postgres_dsn: str) -> None:
    stock = postgres_stock(shop, postgres_dsn)
    stock.write(WRITE)
    with stock.connected() as other:
        other.execute(batchrun.MARK_TABLE)
        process = shop.start(*RUN)
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_for(lambda: stock.ask(waiting) == [(1,)], "the second maker to wait")
    assert shop.end(process).code == 0
    assert stock.applied() == ALL


OTHER_DRIVER = """
    import sqlite3

    paramstyle = "qmark"

    class Link:
        def __init__(self):
            self._connection = sqlite3.connect("t.db")
            self.commit, self.rollback = self._connection.commit, self._connection.rollback
            self.cursor, self.close = self._connection.cursor, self._connection.close
    """


def test_another_db_api_driver_can_hold_the_mark_too(shop: Shop) -> None:
    stock = Stock(shop, "__import__('other').Link()", "", "")
    stock.ask("CREATE TABLE t (x INTEGER)")
    stock.write(WRITE)
    shop.project.write_file("jobs/other.py", OTHER_DRIVER)
    for point in ("target.commit@1", "target.committed@2"):
        assert shop.run(point=f"{point}=kill").code == -9
    assert shop.run().code == 0
    assert stock.applied() == ALL


def test_a_role_that_may_make_no_tables_can_use_a_table_of_marks_that_is_there(
    shop: Shop, postgres_dsn: str
) -> None:
    stock = postgres_stock(shop, postgres_dsn)
    role = f"clerk_{os.urandom(4).hex()}"
    stock.ask(f"CREATE ROLE {role} LOGIN")
    try:
        stock.ask(f"GRANT INSERT, SELECT ON t TO {role}")
        stock.opened = f"ctx.connect({postgres_dsn.replace('postgres@', role + '@')!r})"
        stock.write(WRITE)
        letter = shop.letter().splitlines()
        assert letter[:5] == [
            "The target of 'main' lets batchrun make no table for its marks.",
            "InsufficientPrivilege: permission denied for schema public",
            "LINE 1: CREATE TABLE IF NOT EXISTS batchrun_mark (",
            "                                   ^",
            UNCHANGED,
        ]
        assert letter[5] == "Let its owner run this, and grant SELECT, INSERT, UPDATE:"
        stock.ask("\n".join(letter[6:]))
        stock.ask(f"GRANT SELECT, INSERT, UPDATE ON batchrun_mark TO {role}")
        assert shop.run().code == 0
        assert stock.applied() == ALL
    finally:
        stock.ask(f"DROP OWNED BY {role}; DROP ROLE {role}")


# --- resources ----------------------------------------------------------------------------------

RELEASED = "SELECT releases FROM attempt ORDER BY run, generation DESC LIMIT 1"


def releases(shop: Shop) -> list[tuple[str, str]]:
    ((text,),) = shop.rows(RELEASED)
    return [(entry["name"], entry["error"]) for entry in json.loads(text)]


RESOURCES = """
    class Thing:
        def __init__(self, name, error=None):
            self.name, self.error = name, error
        def __enter__(self):
            return self.name
        def __exit__(self, kind, error, traceback):
            done(self.name, kind and kind.__name__)
            if self.error:
                raise self.error

    class Plain:
        def close(self):
            done("plain")

    ctx.on_exit(done, "first")
    print(ctx.enter(Thing("second", {error})))
    stock = ctx.connect("sqlite:t.db")
    ctx.enter(Plain())
    ctx.enter(sqlite3.connect("t.db"))
    try:
        for batch in ctx.batches(range(12)):
            {inside}
            yield batch
    finally:
        done("own")
    """
NAMES = ["the job's own frame", "Connection", "Plain", "connection sqlite:t.db", "Thing", "done"]


def test_resources_are_released_in_reverse_order(shop: Shop) -> None:
    shop.write(RESOURCES.format(error=None, inside="pass"))
    assert shop.run().out == "second\n"
    assert shop.done() == ["own", "plain", "second", "None", "first"]
    assert releases(shop) == [(name, "") for name in NAMES]


def test_a_resource_is_told_when_the_attempt_did_not_succeed(shop: Shop) -> None:
    shop.write(RESOURCES.format(error=None, inside="pass"))
    assert shop.run("--batches", "1").code == 75
    assert shop.done() == ["own", "plain", "second", "JobError", "first"]


def test_a_cleanup_that_fails_hides_neither_the_error_nor_the_other_cleanups(shop: Shop) -> None:
    shop.write(RESOURCES.format(error="OSError('E2')", inside="raise ValueError('E1')"))
    assert shop.letter().startswith("The job raised ValueError: E1 in batch 1.")
    assert shop.done() == ["own", "plain", "second", "JobError", "first"]
    assert releases(shop) == [(name, "OSError: E2" if name == "Thing" else "") for name in NAMES]


def test_success_with_a_cleanup_that_failed_says_so(shop: Shop) -> None:
    shop.write(RESOURCES.format(error="OSError('E2')", inside="pass"))
    ended = shop.run()
    assert (ended.code, ended.err) == (
        3,
        "Everything was committed.\nA cleanup failed: Thing: OSError: E2.\n",
    )


@pytest.mark.parametrize("name", OPENED)
def test_what_a_connection_did_not_commit_is_rolled_back_at_the_end(
    request: pytest.FixtureRequest, shop: Shop, name: str
) -> None:
    stock = make_stock(request, shop, name)
    open_write = stock.beginning("INSERT INTO t VALUES (77)")
    loop = "for batch in ctx.batches(range(12)):\n    yield batch\n"
    imports = "import psycopg\n" if stock.dsn else ""
    shop.write(f"{imports}stock = ctx.enter({stock.opened})\n{loop}{open_write}")
    assert shop.run().code == 0
    assert stock.applied() == []
    assert {error for _, error in releases(shop)} == {""}


# --- rejects ------------------------------------------------------------------------------------

REJECTS = """
    with batch.transaction() as rows:
        for n in batch:
            if n % 5 == 3:
                batch.reject(n, "three in five")
            else:
                rows.execute("INSERT INTO t VALUES (?)", [n])
        batch.count(inserted=len(batch) - 1)
    yield batch
    """
KEPT = [n for n in ALL if n % 5 != 3]


def test_the_first_reject_fails_a_run_that_allows_none(stock: Stock) -> None:
    stock.write(REJECTS)
    assert stock.shop.letter().splitlines() == [
        "More than 0 records were rejected, the first of this batch: 3: three in five.",
        "The batch is not committed; commit 0 stands.",
        "Mend the records, or raise max_rejects in [jobs.sync].",
    ]
    assert (stock.applied(), stock.shop.commits()) == ([], 0)


def test_rejects_within_the_limit_end_with_10_and_are_kept(stock: Stock) -> None:
    stock.write(REJECTS, config="max_rejects = 2")
    assert stock.shop.run().code == 10
    assert stock.applied() == KEPT
    kept = stock.shop.rows("SELECT number, record, reason, confirmed FROM reject")
    assert kept == [(1, "3", "three in five", 1), (2, "8", "three in five", 1)]
    assert stock.shop.rows("SELECT read, rejected FROM run") == [(12, 2)]


@pytest.mark.parametrize("point", ["target.commit", "target.committed", "ledger.begun"])
def test_rejects_count_once_whenever_the_process_is_killed(shop: Shop, point: str) -> None:
    stock = Stock(shop, *OPENED["sqlite3"], dsn="")
    stock.ask("CREATE TABLE t (x INTEGER)")
    stock.write(REJECTS, config="max_rejects = 2")
    for number in (1, 2):
        assert shop.run(point=f"{point}@{number}=kill").code == -9
    assert shop.run().code == 10
    assert stock.applied() == KEPT
    assert shop.rows("SELECT number, record FROM reject WHERE confirmed") == [(1, "3"), (2, "8")]
    assert shop.rows("SELECT count(*) FROM reject") == [(2,)]
    assert shop.rows("SELECT read, rejected FROM run") == [(12, 2)]


def test_a_limit_lowered_after_the_target_committed_is_a_letter(shop: Shop) -> None:
    stock = Stock(shop, *OPENED["sqlite3"], dsn="")
    stock.ask("CREATE TABLE t (x INTEGER)")
    stock.write(REJECTS, config="max_rejects = 2")
    assert shop.run(point="target.committed@1=kill").code == -9
    stock.write(REJECTS, config="max_rejects = 0")
    assert shop.letter().splitlines()[0] == "More than 0 records were rejected."


# --- cases from the field -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "code"),
    [("os.kill(os.getpid(), 15)", 75), ("os.kill(os.getpid(), 9)", -9), ("raise OSError", 1)],
)
@pytest.mark.parametrize("place", ["before", "within", "after"])
def test_k01_no_record_is_missing_after_a_stop_in_batch_2(
    shop: Shop, trouble: str, code: int, place: str
) -> None:
    at = {"before": "5", "within": "7", "after": "9"}[place]
    shop.write(f"""
        for batch in ctx.batches(range(10)):
            for n in batch:
                if ctx.generation == 1 and n == {at} and {place != "after"}:
                    {trouble}
                done(n)
                if ctx.generation == 1 and n == {at} and {place == "after"}:
                    {trouble}
            yield batch
        """)
    assert shop.run().code == code
    if shop.rows("SELECT state FROM run") != [("succeeded",)]:
        assert shop.run().code == 0
    assert sorted(set(map(int, shop.done()))) == list(range(10))
    assert len(shop.done()) <= 15


@pytest.mark.parametrize("records", [0, 1, 4, 5, 6, 10, 13])
def test_k17_calls_sizes_and_totals_are_right(shop: Shop, records: int) -> None:
    shop.write(f"""
        for batch in ctx.batches(range({records})):
            done(len(batch))
            yield batch
        """)
    assert shop.run().code == 0
    full, rest = divmod(records, 5)
    assert shop.done() == ["5"] * full + [str(rest)] * (rest > 0)
    assert shop.rows("SELECT state, read, batches FROM run") == [
        ("succeeded", records, full + (rest > 0))
    ]


def test_k34_a_job_that_marks_its_rows_done_processes_every_row(shop: Shop) -> None:
    stock = Stock(shop, *OPENED["apsw by ctx.connect"], dsn="")
    stock.ask("CREATE TABLE t (x INTEGER PRIMARY KEY, done INTEGER DEFAULT 0)")
    with stock.connected() as connection:
        connection.executemany("INSERT INTO t (x) VALUES (?)", [(n,) for n in range(100)])
    shop.write("""
        stock = ctx.connect("sqlite:t.db")
        waiting = Query(stock, "SELECT x FROM t WHERE done = 0", key="x")
        for batch in ctx.batches(waiting, target=stock):
            with batch.transaction() as rows:
                rows.executemany("UPDATE t SET done = 1 WHERE x = ?", [(r[0],) for r in batch])
            yield batch
        """)
    assert shop.run().code == 0
    assert stock.ask("SELECT count(*) FROM t WHERE done = 1") == [(100,)]
    assert shop.rows("SELECT read FROM run") == [(100,)]


# --- the job's file and settings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (
            "def sync(:",
            "cannot be imported.",
            "SyntaxError: invalid syntax (sync.py, line 1) (line 1)",
        ),
        (
            "x = 1\n\nimport nowhere",
            "cannot be imported.",
            "ModuleNotFoundError: No module named 'nowhere' (line 3)",
        ),
        (
            "import json\njson.loads('')",
            "cannot be imported.",
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)",
        ),
        ("x = 1", "has no job named 'sync'.", "Its jobs are: none; is @job missing?"),
        (
            "import batchrun\n@batchrun.job\ndef other(ctx):\n    yield",
            "has no job named 'sync'.",
            "Its jobs are: other",
        ),
    ],
)
def test_a_mistake_in_the_jobs_file_is_a_letter(shop: Shop, text: str, what: str, why: str) -> None:
    shop.write_file(text)
    letter = shop.letter(code=2).splitlines()
    named = f"{shop.folder}/jobs/sync.py {what}"
    assert letter[0] in (named, f"The job's file {named}")
    assert letter[1:3] == [why, "Nothing was begun."]


def test_a_job_that_returns_after_a_step_has_not_succeeded(shop: Shop) -> None:
    shop.write('ctx.step("make table", lambda: None)\nreturn\nyield')
    assert shop.letter(code=1).startswith("The job returned without a loop.\n")


def test_a_missing_job_file_is_a_letter(shop: Shop) -> None:
    shop.write_file("")
    (shop.folder / "jobs" / "sync.py").unlink()
    assert shop.letter(code=2) == (
        f"There is no file {shop.folder}/jobs/sync.py, which the job sync is to be in.\n"
        "Nothing was begun.\n"
        'Write it, or name the file it is in: uses = "FILE:FUNCTION" in [jobs.sync].'
    )


def test_a_wrong_setting_is_a_letter_that_names_it(shop: Shop) -> None:
    text = """
        from dataclasses import dataclass
        from batchrun import job

        @dataclass(frozen=True)
        class Settings:
            feed: str
            most: int = 3

        @job(settings=Settings)
        def sync(ctx):
            for batch in ctx.batches(range(ctx.settings.most)):
                yield batch
        """
    shop.write_file(text, config='feed = "x"\nmost = "many"')
    ended = shop.run()
    assert ended.code == 2
    assert "most" in ended.err
    assert "Traceback" not in ended.err
    shop.write_file(text, config='feed = "x"')
    assert shop.run("--set", "most=2").code == 0
    assert shop.rows("SELECT read FROM run WHERE state = 'succeeded'") == [(2,)]


# --- interrupts ---------------------------------------------------------------------------------

KILLED = """
    for batch in ctx.batches(range(12)):
        if batch.number == 2 and ctx.generation == 1:
            try:
                os.kill(os.getpid(), 10)  # SIGUSR1, as a second stop sends it
                done("missed")
            except BaseException as error:
                done(type(error).__name__)
            {then}
        yield batch
    """


@pytest.mark.parametrize("then", ["pass", "return", "next(ctx.batches([1], name='more'))"])
def test_an_interrupt_that_the_job_swallows_commits_no_half_batch(shop: Shop, then: str) -> None:
    shop.write(KILLED.format(then=then))
    assert shop.run().code == 75
    assert (shop.done(), shop.commits()) == (["Interrupted"], 1)
    assert shop.run().code == 0


def test_a_stop_that_the_job_swallows_is_still_a_stop(shop: Shop) -> None:
    shop.write("""
        try:
            for batch in ctx.batches(range(12)):
                yield batch
                os.kill(os.getpid(), 15)
        except BaseException:
            done("swallowed")
        """)
    assert shop.run().code == 75
    assert shop.commits() == 1


def test_what_was_read_when_a_stop_was_asked_for_is_not_begun(shop: Shop) -> None:
    shop.write("""
        def read(after, limit):
            os.kill(os.getpid(), 15 if after else 0)
            return list(range((after or 0) + 1, 11))[:5]

        for batch in ctx.batches(read, key=lambda number: number):
            done(*batch)
            yield batch
        """)
    assert shop.run().code == 75
    assert shop.done() == ["1", "2", "3", "4", "5"]


def test_our_own_code_is_not_interrupted_and_the_job_is_afterwards_once() -> None:
    frame, seen = batchrun.JobFrame(), []

    def work() -> None:
        with frame.switched(inside=True):
            with frame.switched(inside=False):
                frame.interrupt()
                seen.append("ours to the end")
            seen.append("the job's")

    with pytest.raises(batchrun.Interrupted):
        work()
    frame.interrupt()
    with frame.switched(inside=True):
        seen.append("cleanup")
    assert seen == ["ours to the end", "cleanup"]


def test_an_error_of_our_own_does_not_swallow_an_interrupt() -> None:
    frame = batchrun.JobFrame()

    def work() -> None:
        with (
            frame.switched(inside=True),
            contextlib.suppress(OSError),
            frame.switched(inside=False),
        ):
            frame.interrupt()
            raise OSError

    with pytest.raises(batchrun.Interrupted):
        work()


@pytest.fixture
def alarmed() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarmed")
def test_behind_a_call_that_has_a_time_limit_no_alarm_is_left() -> None:
    alarm = batchrun.Alarm(60)
    assert alarm.call(lambda x: (x, signal.getitimer(signal.ITIMER_REAL)[0] > 0), 1) == (1, True)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    with pytest.raises(TimeoutError, match=r"^did not end within 0\.01 s$"):
        batchrun.Alarm(0.01).call(signal.pause)


@pytest.mark.usefixtures("alarmed")
def test_the_time_for_all_releases_has_room_for_one_that_a_release_adds() -> None:
    stack = batchrun.CleanupStack(batchrun.Host(), 20)
    stack.push("first", lambda _: None)
    stack.push("second", lambda _: stack.push("added", lambda _: None))
    assert stack.limit_s == 60
    stack.unwind()
    assert [release["name"] for release in stack.releases] == ["second", "added", "first"]


# --- databases, secrets, the log ----------------------------------------------------------------


def test_a_sqlite_database_is_opened_to_wait_for_others_and_to_lose_nothing(tmp_path: Path) -> None:
    with contextlib.closing(batchrun.open_database(f"sqlite:{tmp_path}/stock.db")) as stock:
        names = ("busy_timeout", "journal_mode", "synchronous", "foreign_keys")
        found = [stock.pragma(name) for name in names]
    assert found == [batchrun.BUSY_LIMIT_S * 1000, "wal", 2, 1]


def test_database_urls_name_the_file_that_they_say(shop: Shop) -> None:
    shop.write("""
        here = os.getcwd()
        urls = ["sqlite:a.db", "sqlite:///b.db", f"sqlite:{here}/c.db", f"sqlite:///{here}/d.db"]
        for url in urls:
            print(ctx.connect(url).filename.removeprefix(here))
        for batch in ctx.batches(range(1)):
            yield batch
        """)
    ended = shop.call("--config", str(shop.folder / "batchrun.toml"), *RUN, cwd=Path("/"))
    assert ended.out.split() == ["/a.db", "/b.db", "/c.db", "/d.db"], ended.err


@pytest.mark.parametrize(
    "url", ["sqlite:", "sqlite://host/x.db", "stock.db", "mysql://u:S3cr3t@h/d"]
)
def test_a_database_that_cannot_be_named_so_is_a_letter(shop: Shop, url: str) -> None:
    shop.write(f"ctx.connect({url!r})\nyield")
    shown = url.replace("S3cr3t", "***")
    assert shop.letter(code=2).splitlines() == [
        f"The database '{shown}' is none that batchrun can open.",
        "Nothing was opened.",
        'Write "sqlite:stock.db" or "postgres://user@host/name".',
    ]


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:S3cr3t@127.0.0.1:1/h",
        "postgres://u:S3c%72r3t@127.0.0.1:1/h",
        "postgres://u:S3cr3t/more@127.0.0.1:1/h",
        "postgres://u:S3cr3t#more@127.0.0.1:1/h",
        "postgres://127.0.0.1:1/h?user=u&password=S3cr3t&nonsense=1",
    ],
)
def test_k41_no_secret_of_a_database_url_gets_out(shop: Shop, url: str) -> None:
    pytest.importorskip("psycopg")
    shop.write(
        f"""
        ctx.log.info("opening %s", {url!r})
        try:
            ctx.connect({url!r})
        finally:
            ctx.on_exit(lambda: 1 / 0)
        yield
        """.replace("ctx.enter(contextlib.ExitStack())", "pass")
    )
    ended = shop.project.run("run", "sync")
    assert ended.code == 1
    assert "does not let us in" in ended.err
    texts = [path.read_bytes() for path in shop.folder.glob("state/**/*") if path.is_file()]
    texts += [ended.out.encode(), ended.err.encode()]
    assert [text for text in texts if b"S3cr3t" in text or b"S3c%72r3t" in text] == []


def test_what_a_job_prints_is_in_the_log_even_if_it_is_killed(shop: Shop) -> None:
    shop.write("""
        print("printed")
        ctx.log.info("logged")
        os.kill(os.getpid(), 9)
        yield
        """)
    assert shop.project.run("run", "sync").code == 1
    (log,) = shop.folder.glob("state/logs/sync/*.log")
    printed, logged = log.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z OUT printed", printed)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO logged", logged)


# --- what a hostile newcomer tried ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("batch.count(updated=-5)", "count(updated=-5) is no number of records."),
        ("batch.count(inserted=1.5)", "count(inserted=1.5) is no number of records."),
        ("batch.count(inserted=True)", "count(inserted=True) is no number of records."),
        ("batch.count(names='x')", "count(names='x') is no number of records."),
    ],
)
def test_only_whole_numbers_of_records_are_counted(shop: Shop, body: str, said: str) -> None:
    shop.write(f"for batch in ctx.batches(range(10)):\n    {body}\n    yield batch\n")
    ended = shop.run()
    assert (ended.code, said in ended.err) == (1, True)


@pytest.mark.parametrize("size", [0, -1, 10**9, 2.5, True])
def test_a_batch_size_out_of_range_is_refused(shop: Shop, size: object) -> None:
    shop.write(f"for batch in ctx.batches(range(10), size={size!r}):\n    yield batch\n")
    ended = shop.run()
    wanted = f"Loop 'main' cannot have batches of {size!r} records."
    assert (ended.code, wanted in ended.err) == (1, True)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_a_loop_without_a_name_that_can_be_shown_is_refused(shop: Shop, name: str) -> None:
    shop.write(f"for batch in ctx.batches(range(10), name={name!r}):\n    yield batch\n")
    ended = shop.run()
    assert (ended.code, "No loop can be named" in ended.err) == (1, True)


def test_an_error_that_no_file_can_hold_fails_the_run_with_its_words(shop: Shop) -> None:
    shop.write(
        "for batch in ctx.batches(range(10)):\n    raise ValueError('a\\udcffb')\n    yield batch\n"
    )
    ended = shop.run()
    assert (ended.code, "ValueError: a\\udcffb in batch 1" in ended.err) == (1, True)
    assert "failed" in shop.project.run("status", "sync").out


def test_a_keyboard_interrupt_of_the_jobs_own_making_is_a_failure(project: Project) -> None:
    text = "@job\ndef sync(ctx):\n    for batch in ctx.batches(range(10)):\n"
    text += "        raise KeyboardInterrupt\n        yield batch\n"
    project.write(CONFIG, sync=PRELUDE + text)
    ended = project.run("run", "sync")
    assert (ended.code, "The job raised KeyboardInterrupt" in ended.err) == (1, True)
