"""What became of an operation is found out by a person or a lookup, shown before it is recorded."""

import json
import re
from typing import Any

import pytest
from conftest import Project, clean_environment, wait_for

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 3
settle = "{settle}"
call_timeout = "10s"
retry_for = "0"
[jobs.push]
"""

# Nine letters are posted; the calls of those that are bad raise. The post office can be asked by
# two functions of the module, by one that no other process can find, or not at all.
JOB = """\
import os
import time
from functools import partial
from pathlib import Path
from batchrun import CannotTell, job

POSTED, BAD = Path("posted.txt"), "{bad}"

def post(key, letter):
    if letter in "z" + BAD:
        {before}
        raise ConnectionError("reset by peer")
    with POSTED.open("a") as file:
        print(key, file=file)
    return {{"number": len(POSTED.read_text().split())}}

def look(key):
    with open("asked.txt", "a") as file:
        print(key, time.monotonic(), file=file)
    if Path("closed").exists():
        raise CannotTell("the office is closed")
    if Path("deadly").exists():
        os._exit(3)
    if Path("broken").exists():
        raise OSError("no route")
    keys = POSTED.read_text().split()
    return {{"number": keys.index(key) + 1}} if key in keys else None

def look_in(office, key):
    print("noise of the job")
    assert office == "main"
    return look(key)

@job
def push(ctx):
    for batch in ctx.batches(list("abcdefghi")):
        key = "letter/{{}}".format
        ctx.once_each(batch, idempotency_key=key, call=post, lookup={lookup}, workers=2)
        yield batch
"""
POSTS_FIRST = 'POSTED.open("a").write(key + "\\n")'


class Post:
    """A project whose run awaits an answer about the letters d and e, if `bad` names them."""

    def __init__(self, project: Project) -> None:
        self.project, self.letter = project, ""

    def write(
        self, lookup: str, *, bad: str = "d", before: str = "pass", settle: str = "1s"
    ) -> None:
        job = JOB.format(lookup=lookup, bad=bad, before=before)
        self.project.write(CONFIG.format(settle=settle), push=job)

    def begin(self, lookup: str, **how: str) -> str:
        """Run the job until it awaits an answer; then nothing is bad any more. Return its id."""
        self.write(lookup, **how)
        self.project.write_file("posted.txt", "")
        (self.project.folder / "closed").touch()
        self.project.run("run", "push")
        ended = self.project.run("resume")
        assert ended.code == 13
        self.letter = ended.err
        (self.project.folder / "closed").unlink()
        self.write(lookup, bad="")
        return str(self.ask("status", "push")["jobs"][0]["run"])

    def ask(self, *words: str) -> dict[str, Any]:
        return dict(json.loads(self.project.run("--json", *words).out))

    def posted(self) -> list[str]:
        return [key[-1] for key in (self.project.folder / "posted.txt").read_text().split()]


@pytest.fixture
def post(project: Project) -> Post:
    return Post(project)


@pytest.mark.parametrize(
    ("lookup", "offered"), [("look", True), ("None", False), ("lambda key: look(key)", False)]
)
def test_the_destinations_are_offered_to_be_asked_where_they_can_be(
    post: Post, lookup: str, *, offered: bool
) -> None:
    run = post.begin(lookup)
    line = f"  batchrun reconcile {run} --lookup --apply\n"
    assert (line in post.letter) == offered, post.letter


def test_without_unknown_operations_there_is_nothing_to_do(post: Post) -> None:
    post.write("look", bad="")
    post.project.write_file("posted.txt", "")
    assert post.project.run("run", "push").code == 0
    ended = post.project.run("reconcile")
    assert (ended.code, ended.out, ended.err) == (0, "no operation is unknown\n", "")


@pytest.mark.parametrize(
    "lookup", ["None", "look", 'partial(look_in, "main")', "lambda key: look(key)"]
)
def test_a_person_s_answer_is_recorded_only_with_apply_and_the_run_goes_on(
    post: Post, lookup: str
) -> None:
    run = post.begin(lookup)
    before = post.project.run("reconcile", run)
    assert (before.code, "unknown" in before.out) == (3, True)
    lines = (f'{way} letter/d --why "..." --apply' for way in ("--confirm", "--absent"))
    can = lookup not in ("None", "lambda key: look(key)")
    typed = ["--lookup --apply"] * can + [f"{run} {line}" for line in lines]
    listed = "\n     or: ".join(f"batchrun reconcile {line}" for line in typed)
    assert before.out.endswith(f"\nto type: {listed}\n")
    answer = ("reconcile", run, "--absent", "letter/d", "--why", "I asked them")
    shown = post.project.run(*answer)
    assert (shown.code, "was not done" in shown.out) == (3, True)
    assert "nothing is recorded yet: type it again with --apply" in shown.out
    assert post.project.run("resume", run).code == 13
    assert post.project.run(*answer, "--apply").code == 0
    assert post.project.run("resume", "--all").code == 0
    assert sorted(post.posted()) == list("abcdefghi")


def test_what_a_person_confirms_is_not_called_again_and_its_receipt_is_kept(post: Post) -> None:
    run = post.begin("None", before=POSTS_FIRST)
    receipt = ("--receipt", '{"number": 4}')
    words = ("--confirm", "letter/d", *receipt, "--why", "seen there", "--by", "Ada", "--apply")
    ended = post.project.run("--json", "reconcile", run, *words)
    (row,) = json.loads(ended.out)["operations"]
    told = ("confirmed", {"number": 4}, "Ada", "seen there", True)
    assert tuple(row[n] for n in ("outcome", "receipt", "who", "why", "applied")) == told
    assert post.project.run("resume", "--all").code == 0
    assert sorted(post.posted()) == list("abcdefghi")


@pytest.mark.parametrize("lookup", ["look", 'partial(look_in, "main")'])
def test_lookups_find_what_was_done_and_what_was_not(post: Post, lookup: str) -> None:
    run = post.begin(lookup, bad="de", before='key[-1] == "d" and ' + POSTS_FIRST)
    rows = post.ask("reconcile", run, "--lookup")["operations"]
    assert {row["key"]: row["outcome"] for row in rows} == {
        "letter/d": "confirmed",
        "letter/e": "freed",
    }
    (post.project.folder / "asked.txt").unlink()
    ended = post.project.run("reconcile", run, "--lookup", "--apply")
    assert ended.code == 0
    assert "push: 1 are absent; asked again in 1 s" in ended.err
    asked = (post.project.folder / "asked.txt").read_text().splitlines()
    first, again = (float(line.split()[1]) for line in asked if line.startswith("letter/e"))
    assert again - first >= 1  # settle
    assert post.project.run("resume", "--all").code == 0
    assert sorted(post.posted()) == list("abcdefghi")


@pytest.mark.parametrize(
    ("lookup", "file", "why"),
    [
        ("look", "closed", "cannot tell: CannotTell: the office is closed"),
        ("look", "broken", "cannot tell: OSError: no route"),
        ("look", "deadly", "its process ended during the call"),
        (
            "lambda key: look(key)",
            "",
            "its lookup is no plain function, so only the job itself can ask",
        ),
        ("None", "", "it has no lookup, so only a person can tell"),
    ],
)
def test_what_nobody_can_tell_stays_unknown_and_says_why(
    post: Post, lookup: str, file: str, why: str
) -> None:
    run = post.begin(lookup)
    if file:
        (post.project.folder / file).touch()
    ended = post.project.run("--json", "reconcile", run, "--lookup", "--apply")
    (row,) = json.loads(ended.out)["operations"]
    assert (ended.code, row["outcome"], row["applied"]) == (3, None, False)
    assert why in row["why"]
    assert post.project.run("resume", run).code == 13


@pytest.mark.parametrize(
    ("words", "letter"),
    [
        (("--confirm", "letter/d"), "An answer needs --why."),
        (("--absent", "letter/d", "--why", " "), "An answer needs --why."),
        (
            ("--absent", "letter/d", "--confirm", "letter/d", "--why", "x"),
            "'letter/d' is confirmed and absent.",
        ),
        (("--receipt", "1", "--why", "x"), "--receipt is for one --confirm."),
    ],
)
def test_half_an_answer_is_refused(post: Post, words: tuple[str, ...], letter: str) -> None:
    run = post.begin("None")
    ended = post.project.run("reconcile", run, *words, "--apply")
    assert (ended.code, ended.err.splitlines()[:2]) == (2, [letter, "Nothing was changed."])


def test_what_is_said_of_a_second_look_is_not_in_the_document(post: Post) -> None:
    run = post.begin("look")
    ended = post.project.run("--json", "reconcile", run, "--lookup", "--apply")
    assert [row["outcome"] for row in ended.document["operations"]] == ["freed"]
    assert ended.err == "push: 1 are absent; asked again in 1 s\n"


def test_a_receipt_that_is_no_json_is_refused(post: Post) -> None:
    run = post.begin("None")
    words = ("--confirm", "letter/d", "--receipt", "{", "--why", "x", "--apply")
    ended = post.project.run("reconcile", run, *words)
    assert (ended.code, ended.err.splitlines()[2]) == (2, "See: batchrun reconcile --help")
    assert ended.err.startswith("--receipt '{': JSON is wanted (Expecting property name")


def test_an_unknown_key_is_refused(post: Post) -> None:
    run = post.begin("None")
    ended = post.project.run("reconcile", run, "--absent", "letter/x", "--why", "x", "--apply")
    assert ended.code == 4
    assert "There is no operation of unknown outcome with the key 'letter/x'." in ended.err


def test_an_answer_waits_until_nobody_is_at_work(post: Post) -> None:
    post.write("None", bad="")
    post.project.write_file("posted.txt", "")
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": "operation.claimed=stop"}
    running = post.project.start("run", "push", env=env)
    wait_for(lambda: "letter/a" in post.project.run("reconcile").out, "a claim")
    ended = post.project.run("reconcile", "--absent", "letter/a", "--why", "x", "--apply")
    assert (ended.code, ended.err.splitlines()[0]) == (
        11,
        "push is running, and finds out by itself.",
    )
    running.kill()


def test_an_answer_for_one_job_minds_no_other_that_runs(post: Post) -> None:
    post.begin("None")
    post.project.write(CONFIG.format(settle="1s") + '[jobs.again]\nuses = "push"\n')
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": "operation.claimed=stop"}
    running = post.project.start("run", "again", env=env)
    wait_for(lambda: "letter/a" in post.project.run("reconcile").out, "a claim")
    answer = ("reconcile", "--absent", "letter/d", "--why", "x", "--apply")
    ended = post.project.run("--json", *answer)
    running.kill()
    applied = [(row["key"], row["job"]) for row in ended.document["operations"] if row["applied"]]
    assert (ended.code, applied) == (3, [("letter/d", "push")])


def test_lookups_of_all_pass_over_a_job_that_runs(post: Post) -> None:
    post.begin("look")
    post.project.write(CONFIG.format(settle="1s") + '[jobs.again]\nuses = "push"\n')
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": "operation.claimed=stop"}
    running = post.project.start("run", "again", env=env)
    wait_for(lambda: "letter/a" in post.project.run("reconcile").out, "a claim")
    ended = post.project.run("--json", "reconcile", "--lookup", "--apply")
    running.kill()
    document = json.loads(ended.out.splitlines()[-1])
    rows = {(row["key"], row["job"]): row for row in document["operations"]}
    assert (ended.code, rows["letter/d", "push"]["applied"]) == (3, True)
    why = rows["letter/a", "again"]["why"]
    assert why == "again is running, and finds out by itself."


def test_a_key_that_two_jobs_do_not_know_about_is_answered_for_one_of_them(post: Post) -> None:
    run = post.begin("None")
    post.project.write(CONFIG.format(settle="1s") + '[jobs.again]\nuses = "push"\n')
    post.write("None")
    post.project.write(
        CONFIG.format(settle="1s") + '[jobs.again]\nuses = "push"\n',
        push=JOB.format(lookup="None", bad="d", before="pass"),
    )
    post.project.run("run", "again")
    answer = ("reconcile", "--absent", "letter/d", "--why", "x", "--apply")
    ended = post.project.run(*answer)
    of = {row["job"]: row["run"] for row in post.ask("reconcile")["operations"]}
    assert (ended.code, ended.err.splitlines()) == (
        2,
        [
            "Say of which run 'letter/d' is meant.",
            "Nothing was changed.",
            "Name it:",
            f"  batchrun reconcile {run} ...  (push)",
            f"  batchrun reconcile {of['again']} ...  (again)",
        ],
    )
    table = post.project.run("reconcile").out.splitlines()
    assert table[0].split()[:3] == ["key", "job", "run"]
    assert table[1].split()[:3] == ["letter/d", "push", run]
    assert post.project.run("reconcile", run, *answer[1:]).code == 0


def test_a_job_that_cannot_be_loaded_says_why_nothing_was_looked_up(post: Post) -> None:
    run = post.begin("look")
    post.project.write(CONFIG.format(settle="1s"), push="import nowhere\n")
    (row,) = post.ask("reconcile", run, "--lookup")["operations"]
    assert "No module named 'nowhere'" in row["why"]


def test_a_job_that_is_configured_no_more_keeps_no_other_from_being_looked_up(post: Post) -> None:
    post.begin("look", bad="de")
    other = CONFIG.format(settle="0s").replace("[jobs.push]", '[jobs.other]\nuses = "push"')
    post.project.write(other)
    answer = ("--confirm", "letter/e", "--why", "x")
    ended = post.project.run("--json", "reconcile", "--lookup", *answer)
    rows = {row["key"]: row for row in ended.document["operations"]}
    assert (ended.code, rows["letter/e"]["outcome"]) == (3, "confirmed")
    assert rows["letter/d"]["why"].startswith('cannot tell: There is no job "push" in ')


def test_a_drain_ends_with_13_while_an_operation_is_unknown(post: Post) -> None:
    run = post.begin("None")
    ended = post.project.run("drain")
    assert ended.code == 13
    assert "  operations  1 of unknown outcome\n" in ended.out
    assert f"to find out: batchrun reconcile {run}" in ended.out
    words = ("--absent", "letter/d", "--why", "asked", "--apply")
    assert post.project.run("reconcile", run, *words).code == 0
    assert post.project.run("drain").code == 0


def test_what_a_cancelled_run_left_unknown_is_told_by_cancel_status_and_drain(post: Post) -> None:
    run = post.begin("None")
    why = "Whether the operation 'letter/d' was done is unknown; claimed "
    ended = post.project.run("cancel", run)
    assert (ended.code, why in ended.out) == (0, True)
    assert ended.out.endswith(f"to find out: batchrun reconcile {run}\n")
    ended = post.project.run("status", "push")
    assert (ended.code, why in ended.out) == (3, True)
    assert f"to type: batchrun reconcile {run}\n" in ended.out
    ended = post.project.run("drain")
    assert ended.code == 13
    assert "  unfinished  0 runs = " in ended.out
    unknown = f"  unknown     1 of run {run} of push; to find out: batchrun reconcile {run}\n"
    assert f"  operations  1 of unknown outcome\n{unknown}" in ended.out
    words = ("--absent", "letter/d", "--why", "asked", "--apply")
    assert post.project.run("reconcile", run, *words).code == 0
    assert post.project.run("drain").code == 0
    assert post.project.run("status", "push").code == 0


def test_a_report_tells_no_share_of_next_to_nothing(post: Post) -> None:
    report = post.project.run("report", post.begin("None", bad="b")).out
    assert re.search(r"^Where the time went: .* s batchrun\.$", report, re.MULTILINE)
    assert re.search(r"^  open +1$", report, re.MULTILINE)


def test_one_answer_is_for_all_keys_of_a_run_that_begin_alike(post: Post) -> None:
    run = post.begin("None", bad="de")
    answer = ("--absent", "letter/*", "--why", "x", "--apply")
    ended = post.project.run("reconcile", *answer)
    assert (ended.code, ended.err.splitlines()[0]) == (
        2,
        "Say of which run 'letter/*' is meant.",
    )
    ended = post.project.run("reconcile", run, "--confirm", "letter/d", *answer)
    assert (ended.code, ended.err.splitlines()[0]) == (2, "'letter/d' is confirmed and absent.")
    receipt = ("--confirm", "letter/*", "--receipt", "1", "--why", "x", "--apply")
    ended = post.project.run("reconcile", run, *receipt)
    assert (ended.code, ended.err.splitlines()[0]) == (2, "--receipt is for one --confirm.")
    ended = post.project.run("reconcile", run, "--absent", "card/*", "--why", "x")
    assert ended.code == 4
    assert post.project.run("reconcile", run, *answer).code == 0
    assert post.project.run("resume", "--all").code == 0
    assert sorted(post.posted()) == list("abcdefghi")


@pytest.mark.parametrize("lookup", ["None", "lambda key: look(key)"])
def test_a_lookup_that_cannot_be_called_is_not_offered(post: Post, lookup: str) -> None:
    run = post.begin(lookup)
    ended = post.project.run("reconcile", run)
    first = f"to type: batchrun reconcile {run} --confirm letter/d "
    assert (first in ended.out, "--lookup" in ended.out) == (True, False)
    (row,) = post.ask("reconcile", run)["operations"]
    assert row["can_look_up"] is False


def test_the_last_line_says_what_an_answer_leads_to(post: Post) -> None:
    answer = ("--absent", "letter/d", "--why", "x", "--apply")
    run = post.begin("None")
    due = f"the tick goes on with run {run} of push; at once: batchrun resume {run}\n"
    assert post.project.run("reconcile", run, *answer).out.endswith(due)
    post.write("None")
    post.project.run("resume", run)
    assert post.project.run("cancel", run).code == 0
    over = f"run {run} of push is cancelled; see: batchrun report {run}\n"
    assert post.project.run("reconcile", run, *answer).out.endswith(over)
