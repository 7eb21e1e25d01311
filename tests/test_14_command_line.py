"""The command line: where words go, what may be typed, what a start finds around it."""

import gc
import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import LAUNCH, ROOT, Ended, Project, clean_environment, wait_for

import batchrun

CONFIG = """
[jobs.count]
batch_size = 10
"""
COUNT = """
    from batchrun import job

    @job()
    def count(ctx):
        for batch in ctx.batches(range(100)):
            yield batch
    """
BROKEN = """
    from batchrun import job

    @job()
    def count(ctx):
        for batch in ctx.batches(range(100)):
            if batch.number == 3:
                raise ValueError("no such shelf")
            yield batch
    """
HOLDING = """
    import pathlib, time
    from batchrun import job

    @job()
    def count(ctx):
        for batch in ctx.batches(range(100)):
            pathlib.Path("holding").touch()
            while pathlib.Path("hold").exists() and not ctx.should_stop:
                time.sleep(0.01)
            yield batch
    """


@pytest.fixture
def shop(project: Project) -> Project:
    """A project with one job that counts to 100 in ten batches."""
    project.write(CONFIG, count=COUNT)
    return project


@pytest.fixture
def paused(shop: Project) -> Project:
    """The same, stopped after two batches."""
    assert shop.run("run", "count", "--batches", "2").code == 75
    return shop


def run_id(project: Project) -> str:
    """Return the id of the one run there is."""
    return str(project.run("--json", "status").document["jobs"][0]["run"])


def everything_in(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, owner and size of each file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        seen = path.lstat()
        found[str(path)] = (seen.st_mode, seen.st_uid, seen.st_size if path.is_file() else 0)
    return found


# --- where words go -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_lines", [False, True])
def test_what_is_said_shows_no_secret_and_no_control_character(
    *, as_lines: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    console = batchrun.Console(batchrun.Host())
    console.as_lines, console.tells = as_lines, True
    console.say("asked \x1b[31mhttps://joe:hunter22@example.org")
    out, err = capfd.readouterr()
    assert "joe:***@example.org" in (out if as_lines else err)
    assert "hunter22" not in out + err
    assert "\x1b" not in out + err


def test_a_run_that_nobody_watches_says_nothing_when_all_is_well(shop: Project) -> None:
    assert shop.run("run", "count") == Ended(0, "", "")


def test_a_run_that_fails_writes_one_letter_that_ends_with_what_to_type(shop: Project) -> None:
    shop.write(CONFIG, count=BROKEN)
    ended = shop.run("run", "count")
    run = run_id(shop)
    assert ended == Ended(
        1,
        "",
        f"count: run {run} failed.\n"
        "The job raised ValueError: no such shelf in batch 3.\n"
        "Commit 2 stands: 20 records are done.\n"
        f"The log: {shop.folder}/state/logs/count/{run}.log\n"
        f"To go on: batchrun resume {run}\n",
    )


def test_a_person_who_resumes_is_told_in_one_line_from_where(paused: Project) -> None:
    line = f"run {run_id(paused)} goes on after commit 2, 20 records read\n"
    assert paused.run("resume") == Ended(0, "", line)


def test_the_tick_goes_on_without_a_word(paused: Project) -> None:
    assert paused.run("resume", "--all") == Ended(0, "", "")
    assert "count: succeeded since " in paused.run("status", "count").out


@pytest.mark.parametrize("fine", [batchrun.ExitCode.DONE_WITH_REJECTS, batchrun.ExitCode.STOPPED])
def test_a_failure_hides_behind_no_exit_code_that_is_fine(fine: batchrun.ExitCode) -> None:
    done, failed = batchrun.ExitCode.DONE, batchrun.ExitCode.FAILED
    assert batchrun.worst_of([done, failed, fine]) == failed
    assert batchrun.worst_of([fine, done]) == fine


def test_the_tick_has_nothing_to_do_before_the_first_run(shop: Project) -> None:
    assert shop.run("resume", "--all") == Ended(0, "", "")
    assert not (shop.folder / "state").exists()


def test_plain_lines_have_no_return_and_no_escape_and_are_few(project: Project) -> None:
    project.write("[jobs.many]\nbatch_size = 100\n", many=COUNT.replace("count", "many", 1))
    text = COUNT.replace("count(", "many(").replace("range(100)", "range(200_000)")
    project.write("[jobs.many]\nbatch_size = 100\n", many=text)
    ended = project.run("-v", "run", "many")
    lines = ended.err.splitlines()
    assert (ended.code, ended.out) == (0, "")
    assert not {"\r", "\x1b"} & {*ended.err}
    assert 2 <= len(lines) < 200
    assert [line for line in lines if not line.startswith(("many", "warning: "))] == []
    assert "200,000 of 200,000" in ended.err


def test_json_lines_have_a_type_each_and_the_last_is_the_result(paused: Project) -> None:
    run = run_id(paused)
    ended = paused.run("--json", "resume")
    documents = [json.loads(line) for line in ended.out.splitlines()]
    assert (ended.code, ended.err) == (0, "")
    assert {document["type"] for document in documents} == {"said", "progress", "result"}
    assert documents[-1] == {
        "type": "result",
        "exit_code": 0,
        "run": run,
        "job": "count",
        "state": "succeeded",
        "reason": "",
        "read": 100,
        "rejected": 0,
        "counts": {},
    }


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "nope"], 4),
        (["run"], 2),
        (["stauts"], 2),
        (["resume"], 4),
        (["run", "count", "--set", "password=x"], 2),
    ],
)
def test_with_json_the_last_line_of_a_failure_is_an_error_object(
    shop: Project, words: list[str], code: int
) -> None:
    ended = shop.run(*words, "--json") if words[0] == "run" else shop.run("--json", *words)
    error = json.loads(ended.err.splitlines()[-1])
    assert (ended.code, ended.out) == (code, "")
    assert (error["type"], error["exit_code"], bool(error["text"])) == ("error", code, True)


def on_a_terminal(project: Project, *words: str) -> tuple[int, str]:
    """Run a command with a terminal of 80 columns as stderr; return exit code and what it shows."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*LAUNCH, *words],
        cwd=project.folder,
        env={**clean_environment(), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while select.select([screen], [], [], 60)[0]:
        try:
            shown += os.read(screen, 65_536)
        except OSError:  # EIO: the other end was closed
            break
    os.close(screen)
    return process.wait(60), shown.decode()


def test_a_terminal_gets_one_live_line_and_then_how_it_ended(shop: Project) -> None:
    code, shown = on_a_terminal(shop, "run", "count")
    lines = [line for line in shown.split("\r\n") if not line.startswith("warning: ")]
    run = run_id(shop)
    assert code == 0
    assert lines[1:] == [""]
    drawn = [line for line in lines[0].split("\r\x1b[K") if line]
    assert drawn[-1].startswith(f"count: run {run} succeeded after ")
    assert drawn[-1].endswith(": 100 of 100 read, 0 rejected")
    assert all(line.startswith("count ") and len(line) < 80 for line in drawn[:-1])
    assert drawn[-2].startswith("count [####")
    assert "] 100%  100 of 100" in drawn[-2]


def test_the_journal_gets_plain_lines(shop: Project) -> None:
    journal = shop.outputs / "0.err"
    journal.touch()
    found = journal.stat()
    stream = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    ended = shop.run("run", "count", env={**clean_environment(), **stream})
    last = ended.err.splitlines()[-1]
    assert (ended.code, ended.out) == (0, "")
    assert last.startswith(f"<6>count: run {run_id(shop)} succeeded after ")
    assert all(line.startswith(("<6>", "<4>warning: ")) for line in ended.err.splitlines())
    assert not {"\r", "\x1b"} & {*ended.err}


@pytest.mark.parametrize("outputs", ["> /dev/full 2>&1", "2>&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_an_output_that_is_full_or_closed_or_gone_fails_no_run(shop: Project, outputs: str) -> None:
    line = f'"$@" {outputs}' if "|" not in outputs else f'set -o pipefail; "$@" {outputs}'
    words = ["bash", "-c", line, "bash", *LAUNCH, "-v", "run", "count"]
    ended = subprocess.run(words, cwd=shop.folder, env=clean_environment(), timeout=60, check=False)
    assert ended.returncode == 0
    state = shop.folder / "state"  # whose files must not have become stdout or stderr
    texts = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    assert not any(b"succeeded after" in text for text in texts)
    assert shop.run("check") == Ended(0, "ledger and checkpoints agree\n", "")
    assert "count: succeeded since " in shop.run("status", "count").out


def test_systemd_hears_ready_before_a_start_is_refused(
    shop: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shop.run("run", "count").code == 0
    (shop.folder / "state/maintenance.lock").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        monkeypatch.chdir(shop.outputs)  # a socket's address has at most 107 bytes
        systemd.bind("notify")
        systemd.settimeout(30)
        address = f"/proc/{os.getpid()}/cwd/notify"
        for words, code in ((("run", "count"), 12), (("resume", "--all"), 0)):
            ended = shop.run(*words, env={**clean_environment(), "NOTIFY_SOCKET": address})
            assert ended.code == code
            assert systemd.recv(100) == b"READY=1"
            assert code == 0 or systemd.recv(4096).startswith(b"STATUS=Maintenance is on: ")


# --- what may be typed ----------------------------------------------------------------------------


def test_lines_to_type_name_the_configuration_if_it_was_given(paused: Project) -> None:
    run, path = run_id(paused), paused.folder / "batchrun.toml"
    by_option = paused.run("--config", str(path), "status", cwd=Path("/"))
    by_name = {**clean_environment(), "BATCHRUN_CONFIG": str(path)}
    by_environment = paused.run("status", cwd=Path("/"), env=by_name)
    line = f"to type: batchrun --config {path} resume {run}"
    assert by_environment.out.splitlines()[-1] == by_option.out.splitlines()[-1] == line
    assert paused.run("status").out.splitlines()[-1] == f"to type: batchrun resume {run}"
    words = line.removeprefix("to type: batchrun ").split()
    assert paused.run(*words, cwd=Path("/")).code == 0


def test_a_path_with_blanks_can_be_typed_too(shop: Project) -> None:
    odd = shop.folder / "a shop.toml"
    (shop.folder / "batchrun.toml").rename(odd)
    ended = shop.run("--config", str(odd), "status", "count")
    assert ended.code == 4
    assert ended.err.endswith(f"batchrun --config '{odd}' run JOB\n")


@pytest.mark.parametrize("words", [("--json", "status"), ("status", "--json")])
def test_global_options_may_stand_before_a_command_or_after_it(
    paused: Project, words: tuple[str, ...]
) -> None:
    assert paused.run(*words).document["jobs"][0]["read"] == 20


def test_a_mistyped_command_is_answered_with_the_one_that_is_meant(shop: Project) -> None:
    ended = shop.run("stauts")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("batchrun has no command 'stauts'; did you mean status?\n")
    assert ended.err.endswith("See: batchrun --help\n")


def test_a_word_of_two_lines_that_is_one_too_many_is_told_as_any_other(shop: Project) -> None:
    said = "batchrun status has no use for 'b\\nc'.\nNothing was changed.\n"
    assert shop.run("status", "a", "b\nc").err.startswith(said)
    assert shop.run("rejects").err.startswith("Usage: batchrun rejects [OPTIONS] COMMAND")


def test_set_refuses_what_others_could_read(shop: Project) -> None:
    assert shop.run("run", "count", "--set", "api_key=abcdef") == Ended(
        2,
        "",
        "--set api_key looks like a secret.\n"
        "A command line can be read by everyone on the machine.\n"
        "Nothing was started.\n"
        'Write in the configuration: api_key = { env = "NAME" }\n',
    )


ONE_REPORT = "A report is of one RUN or JOB, or of `drain` and its number without options."
SAME = "\nNothing was changed.\n"
NO_ID = f"a whole number is wanted, 1 or more.{SAME}See: batchrun report --help"


def no_option(command: str, option: str) -> str:
    """Return the letter for an option that the command has not."""
    path = f"batchrun rejects {command}"
    return f"{path} has no option {option}.{SAME}See: {path} --help"


DROP = "batchrun rejects drop [OPTIONS] RUN [ID]... --why TEXT"
SHOW = "batchrun rejects show [OPTIONS] RUN [ID]..."
STATUS = "batchrun status [OPTIONS] [RUN|JOB]"
MAINTENANCE = "See: batchrun maintenance --help"
NO_TICK = "--all goes on with all that is due, each as it was started."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("resume count --all", f"{NO_TICK}\nWrite: batchrun resume --all, or resume RUN"),
        ("resume --all --batches 1", f"{NO_TICK}\nWrite: batchrun resume --all, or resume RUN"),
        ("resume --all --in-process", f"{NO_TICK}\nWrite: batchrun resume --all, or resume RUN"),
        ("report count 5", f"{ONE_REPORT}\nWrite: batchrun report count"),
        ("report count two", f"ID 'two': {NO_ID}"),
        ("report drain --markdown", f"{ONE_REPORT}\nWrite: batchrun report drain"),
        ("rejects list --batches 3", no_option("list", "--batches")),
        ("rejects list --why x", no_option("list", "--why")),
        ("rejects show count --in-process", no_option("show", "--in-process")),
        ("rejects retry count --why x", no_option("retry", "--why")),
        ("rejects drop count --why x --batches 3", no_option("drop", "--batches")),
        ("rejects drop count", f"batchrun rejects drop needs --why TEXT.{SAME}Write: {DROP}"),
        ("rejects show", f"batchrun rejects show needs RUN.{SAME}Write: {SHOW}"),
        (
            "rejects sort count",
            f"batchrun rejects has no command 'sort'.{SAME}See: batchrun rejects --help",
        ),
        ("it's", f'batchrun has no command "it\'s".{SAME}See: batchrun --help'),
        ("status a b('c')", f"batchrun status has no use for \"b('c')\".{SAME}Write: {STATUS}"),
        ("--quiet", f"batchrun needs a command.{SAME}See: batchrun --help"),
        ("maintenance -q", f"batchrun maintenance needs a command.{SAME}{MAINTENANCE}"),
    ],
)
def test_what_a_command_would_not_heed_is_refused(shop: Project, words: str, said: str) -> None:
    assert shop.run("run", "count").code == 0
    assert shop.run(*words.split()) == Ended(2, "", f"{said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "sync", "--html", ""), "--html says nothing: ''.\nWrite: --html FILE\n"),
        (("metrics", "--write", ""), "--write says nothing: ''.\nWrite: --write FOLDER\n"),
        (("logs", "sync", "--since", ""), "--since says nothing: ''.\nWrite: --since 2h|TIME\n"),
        (
            ("rejects", "drop", "sync", "--why", "..."),
            "--why says nothing: '...'.\nWrite: --why TEXT\n",
        ),
        (
            ("reconcile", "--absent", "k", "--why", "..."),
            "--why says nothing: '...'.\nWrite: --why TEXT\n",
        ),
    ],
)
def test_an_option_that_says_nothing_is_refused(
    shop: Project, words: tuple[str, ...], said: str
) -> None:
    assert shop.run(*words) == Ended(2, "", said)


LEVELS_SAID = "DEBUG, OUT, INFO, ERR, WARN, WARNING, ERROR or CRITICAL is wanted"
NO_NUMBER = "a whole number is wanted, 1 or more"
NO_DURATION = 'a duration with its unit is wanted, such as "90s", "3m" or "1h30m"'


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("run count --batches 0", NO_NUMBER),
        ("resume --batches 0", NO_NUMBER),
        ("rollback count --to-batch -1", "a whole number is wanted, 0 or more"),
        (f"rollback count --to-batch {2**63}", "a whole number is wanted, 0 or more"),
        (f"rollback count --to-batch {'9' * 5000}", "a whole number is wanted, 0 or more"),
        ("run count --when-blocked wait", "refuse or defer is wanted"),
        ("rejects retry count --when-blocked wait", "refuse or defer is wanted"),
        ("drain --then stop", "leave or interrupt is wanted"),
        ("drain --deadline 10", NO_DURATION),
        ("prune --keep 90", NO_DURATION),
        ("logs count --level LOUD", LEVELS_SAID),
    ],
)
def test_a_word_of_the_wrong_kind_is_refused(shop: Project, words: str, wrong: str) -> None:
    *_, option, value = words.split()
    name = words[: words.index(" count" if "count" in words else " -")]
    said = f"{option} {value!r}: {wrong}.\nNothing was changed.\nSee: batchrun {name} --help\n"
    assert shop.run(*words.split()) == Ended(2, "", said)
    assert not shop.state.exists()


OF_CLICK = re.compile(r"No such|Invalid value|Missing|Got unexpected|requires an|does not take|'--")


@pytest.mark.parametrize("parts", batchrun.COMMANDS, ids=lambda parts: parts.name)
def test_each_command_answers_words_that_it_has_not_with_letters(
    parts: batchrun.CommandParts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["x"] * 9 if any(more.get("nargs") for _, more in parts.parameters) else ["7"] * 9
    wrong = [["--nonsense"], ["--jsno"], ["--config"], ["--json=1"], given]
    wrong += [[names[0]] for names, more in parts.parameters if takes_a_value(names, more)]
    wrong += [[]] * any(must_be_given(names, more) for names, more in parts.parameters)
    for words in wrong:
        assert batchrun.run_command_line(["--json", *parts.name.split(), *words]) == 2
        captured = capfd.readouterr()
        error = json.loads(captured.err.splitlines()[-1])
        assert (captured.out, error["type"], error["exit_code"]) == ("", "error", 2)
        what, unchanged, todo = error["text"].split("\n")
        assert what.endswith((".", "?"))
        assert OF_CLICK.search(error["text"]) is None, error
        assert unchanged == "Nothing was changed."
        assert todo.startswith((f"See: batchrun {parts.name} --help", "Write: "))
    assert list(tmp_path.iterdir()) == []


def must_be_given(names: Sequence[str], more: dict[str, Any]) -> bool:
    """Tell whether a command is nothing without it."""
    left_out = {"default", "nargs"} & {*more} or names[0].startswith("-")
    return bool(more.get("required", not left_out))


def takes_a_value(names: Sequence[str], more: dict[str, Any]) -> bool:
    """Tell whether it is an option with a value."""
    return names[0].startswith("--") and "is_flag" not in more


def test_a_level_is_read_in_upper_or_lower_case(shop: Project) -> None:
    assert shop.run("run", "count").code == 0
    shown = shop.run("logs", "count", "--level", "warning")
    assert (shown.code, shown.out) == (0, shop.run("logs", "count", "--level", "WARNING").out)


def test_several_unfinished_runs_are_listed_for_a_resume_without_a_name(project: Project) -> None:
    project.write("[jobs.a]\nuses='count'\n[jobs.b]\nuses='count'\n[defaults]\nbatch_size = 9\n",
                  count=COUNT)  # fmt: skip
    for job in "ab":
        assert project.run("run", job, "--batches", "1").code == 75
    runs = [(job["job"], job["run"]) for job in project.run("--json", "status").document["jobs"]]
    lines = "".join(f"  batchrun resume {run}   ({job})\n" for job, run in runs)
    assert project.run("resume") == Ended(2, "", f"2 runs are unfinished.\nType one of:\n{lines}")


# --- status ---------------------------------------------------------------------------------------


def test_status_tells_that_a_person_is_needed_by_exit_code_3(paused: Project) -> None:
    run = run_id(paused)
    assert paused.run("status").code == 0
    asked = paused.run("pause", "count")
    assert asked == Ended(0, f"run {run} of count is paused\n", "")
    status = paused.run("status", "count")
    assert status.code == 3
    assert "count: paused (person) since " in status.out
    assert status.out.endswith(f"to type: batchrun resume {run}\n")
    assert paused.run("run", "count").code == 13
    assert paused.run("resume", "--all") == Ended(0, "", "")
    assert paused.run("resume", "count").code == 0
    assert paused.run("status").code == 0


def test_a_dead_owner_is_seen_as_interrupted_and_needs_no_hand_work(shop: Project) -> None:
    shop.write(CONFIG, count=HOLDING)
    (shop.folder / "hold").touch()
    supervisor = shop.start("run", "count")
    wait_for((shop.folder / "holding").exists, "the first batch")
    status = shop.run("--json", "status").document["jobs"][0]
    assert (status["state"], status["next"]) == ("running", f"batchrun logs -f {status['run']}")
    shop.kill_all()
    supervisor.wait()
    status = shop.run("--json", "status").document["jobs"][0]
    resume = f"batchrun resume {status['run']}"
    assert (status["state"], status["next"]) == ("interrupted", resume)
    assert status["why"].startswith("Its processes are gone")
    (shop.folder / "hold").unlink()
    assert shop.run("resume", "--all") == Ended(0, "", "")
    assert shop.run("--json", "status").document["jobs"][0]["state"] == "succeeded"


def test_a_stopped_process_is_seen_and_needs_someone(shop: Project) -> None:
    shop.write(CONFIG, count=HOLDING)
    (shop.folder / "hold").touch()
    supervisor = shop.start("run", "count")
    wait_for((shop.folder / "holding").exists, "the first batch")
    supervisor.send_signal(signal.SIGSTOP)
    host = batchrun.Host()
    me = host.identify(supervisor.pid)
    assert me is not None
    wait_for(lambda: host.is_stopped(me), "the supervisor to be stopped")
    status = shop.run("status", "count")
    assert status.code == 3
    assert status.out.endswith(f"to type: kill -CONT {supervisor.pid}\n")
    supervisor.send_signal(signal.SIGCONT)
    (shop.folder / "hold").unlink()
    assert shop.finish(supervisor).code == 0


def test_a_pause_asked_for_is_done_at_the_next_safe_point(shop: Project) -> None:
    shop.write(CONFIG, count=HOLDING)
    (shop.folder / "hold").touch()
    supervisor = shop.start("run", "count")
    wait_for((shop.folder / "holding").exists, "the first batch")
    asked = shop.run("pause", "count")
    assert asked.out == f"run {run_id(shop)} of count will be paused at its next safe point\n"
    (shop.folder / "hold").unlink()
    assert shop.finish(supervisor) == Ended(75, "", "")
    assert shop.run("status").code == 3


def test_a_finished_run_is_neither_paused_nor_cancelled_nor_resumed(shop: Project) -> None:
    assert shop.run("run", "count").code == 0
    said = Ended(0, f"run {run_id(shop)} of count has succeeded already\n", "")
    assert [shop.run(word, "count") for word in ("pause", "cancel", "resume")] == [said] * 3


# --- maintenance ----------------------------------------------------------------------------------


def touched(path: Path) -> None:
    """Make the lockfile as a person does."""
    path.touch()


def unreadable(path: Path) -> None:
    """Make one that nobody may read."""
    path.touch(0)


def explained(path: Path) -> None:
    """Make one that says why."""
    path.write_text('{"reason": "the shelves move", "by": "ann"}')


@pytest.mark.parametrize("make", [touched, Path.mkdir, unreadable, explained])
def test_whatever_is_named_maintenance_lock_refuses_with_12_and_a_row(
    paused: Project, make: Callable[[Path], None]
) -> None:
    lockfile = paused.folder / "state/maintenance.lock"
    make(lockfile)
    ended = paused.run("run", "count")
    assert (ended.code, ended.out) == (12, "")
    me = batchrun.Host().user_name(os.getuid())
    said = " by ann (the shelves move)" if make is explained else f" by {me}"
    first, *others = ended.err.splitlines()
    assert first.startswith(f"Maintenance is on: {lockfile} is there, since 20")
    assert re.fullmatch(r".*Z, for [0-9]s,", first.removesuffix(f"{said}."))
    assert others == [
        "Nothing was started; the refusal is recorded.",
        "When the maintenance is over: batchrun maintenance off",
    ]
    assert paused.run("resume", "--all") == Ended(0, "", "")
    status = paused.run("--json", "status").document
    assert status["jobs"][0]["refused_since_success"] == 1  # the tick leaves no row
    assert status["maintenance"]["reason"] == ("the shelves move" if make is explained else "")
    lockfile.rmdir() if lockfile.is_dir() else lockfile.unlink()
    assert paused.run("resume", "--all") == Ended(0, "", "")
    assert "count: succeeded since " in paused.run("status", "count").out


# --- K20 owner and umask, K26 cron's world, K45 file systems --------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_are_the_same_whatever_the_umask(shop: Project, umask: int) -> None:
    shop.write(CONFIG, count=BROKEN)
    assert shop.run("run", "count", umask=umask).code == 1
    state = shop.folder / "state"
    for path in [state, *state.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert (path.name, oct(mode)) == (path.name, oct(0o700 if path.is_dir() else 0o600))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_init_makes_runs_whatever_the_umask_and_is_made_once(
    project: Project, umask: int
) -> None:
    shop = project.folder / "new shop"
    made = project.run("init", str(shop), umask=umask)
    assert made.code == 0
    assert made.out.endswith(f"to go on: cd '{shop}' && batchrun run inventory_sync\n")
    assert project.run("run", "inventory_sync", cwd=shop, umask=umask) == Ended(0, "", "")
    assert project.run("init", str(shop)) == Ended(
        2,
        "",
        f"{shop}/batchrun.toml is there already.\n"
        "Nothing was written.\n"
        "Choose another folder: batchrun init FOLDER\n",
    )
    assert project.run("check", cwd=shop).code == 0


@pytest.mark.needs_root
def test_another_users_state_is_read_by_root_but_not_written(paused: Project) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: no other user's files can be made")
    run, state = run_id(paused), paused.folder / "state"
    for path in [state, *state.rglob("*")]:
        os.chown(path, 65534, 65534)
    before = everything_in(state)
    for words in (("status",), ("report", "count"), ("check",)):
        assert (words, paused.run(*words).code) == (words, 0)
    assert everything_in(state) == before
    owner = batchrun.Host().user_name(65534)
    for words in (("run", "count"), ("resume",), ("pause", run), ("cancel", run), ("repair",)):
        assert paused.run(*words) == Ended(
            5,
            "",
            f"The state directory {state} cannot be used: it belongs to {owner}.\n"
            "Nothing was changed.\n"
            f"Type: sudo -u {owner} batchrun {' '.join(words)}\n",
        )
    assert everything_in(state) == before


def test_status_report_and_check_change_no_file(paused: Project) -> None:
    before = everything_in(paused.folder)
    contents = {p: p.read_bytes() for p in (paused.folder / "state").rglob("*") if p.is_file()}
    for words in (("status",), ("status", "count"), ("report", "count"), ("check",), ("jobs",)):
        assert (words, paused.run(*words).code) == (words, 0)
    after = {k: v for k, v in everything_in(paused.folder).items() if "__pycache__" not in k}
    assert after == {k: v for k, v in before.items() if "__pycache__" not in k}
    assert {p: p.read_bytes() for p in contents} == contents


@pytest.mark.needs_root
@pytest.mark.parametrize("how", ["read-only", "full"])
def test_status_report_and_check_work_where_nothing_can_be_written(shop: Project, how: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: no file system can be mounted")
    disk = shop.folder / "state"
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "mode=0700", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("NO MOUNT: this machine does not let root mount a tmpfs")
    try:
        assert shop.run("run", "count", "--batches", "2").code == 75
        change = "ro" if how == "read-only" else "size=1m"
        subprocess.run(["mount", "-o", f"remount,{change}", str(disk)], check=True)
        if how == "full":
            fill = ["dd", "if=/dev/zero", f"of={disk}/fill", "bs=4k"]
            assert b"No space left" in subprocess.run(fill, capture_output=True, check=False).stderr
        for words in (("status",), ("report", "count"), ("check",)):
            assert (words, shop.run(*words).code) == (words, 0)
        assert shop.run("resume").code == 5
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_state_is_found_from_anywhere_with_an_empty_environment(shop: Project) -> None:
    path = str(shop.folder / "batchrun.toml")
    scratch = shop.outputs / "scratch"
    scratch.mkdir()
    assert (
        shop.run("--config", path, "run", "count", "--batches", "1", cwd=scratch, env={}).code == 75
    )
    for cwd in (Path("/"), scratch, shop.folder):
        ended = shop.run("--config", path, "run", "count", "--batches", "1", cwd=cwd, env={})
        assert ended.code == 75
    assert shop.run("--json", "status").document["jobs"][0]["read"] == 40
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("words", [("resume",), ("status",), ("report", "count"), ("check",)])
def test_without_a_ledger_nothing_is_made_and_the_path_is_named(
    shop: Project, words: tuple[str, ...]
) -> None:
    before = everything_in(shop.folder)
    state = shop.folder / "state"
    assert shop.run(*words, env={}) == Ended(
        4,
        "",
        f"There is no state directory at {state}.\n"
        "Nothing was made.\n"
        "Is it the right configuration? A first run makes it: batchrun run JOB\n",
    )
    assert everything_in(shop.folder) == before


class FakeMounts(batchrun.Host):
    """A machine with one file system."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def mount_table(self) -> list[str]:
        return [f"1 1 0:1 / / rw - {self.kind} none rw"]


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(shop: Project, kind: str) -> None:
    config = batchrun.load_config(shop.folder / "batchrun.toml")
    state = batchrun.StateDirectory(config, FakeMounts(kind))
    with pytest.raises(batchrun.StateDirectoryError) as refused:
        state.require_fit(create=True)
    assert str(refused.value) == (
        f"The state directory {config.state} cannot be used: it is on a network file system"
        f" ({kind}), where locks are not reliable.\n"
        "Nothing was changed.\n"
        "Put `state` on a local disk in the configuration."
    )
    assert not config.state.exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs"])
def test_a_local_file_system_is_used_and_tmpfs_warned_about(shop: Project, kind: str) -> None:
    config = batchrun.load_config(shop.folder / "batchrun.toml")
    state = batchrun.StateDirectory(config, FakeMounts(kind))
    state.require_fit(create=True)
    warning = f"warning: {config.state} is on tmpfs: a reboot loses every checkpoint"
    assert (state.warning() == warning) is (kind == "tmpfs")


# --- K41 secrets ----------------------------------------------------------------------------------

SECRET = "S3cr3t"


def test_a_secret_is_nowhere_but_where_the_job_needs_it(project: Project) -> None:
    project.write(
        """
        [jobs.leak]
        database = "postgres://u:S3cr3t@h/db"
        """,
        leak="""
        import pathlib, time
        from dataclasses import dataclass
        from batchrun import job

        @dataclass(frozen=True)
        class Settings:
            database: str

        @job(settings=Settings)
        def leak(ctx):
            for batch in ctx.batches(range(3)):
                pathlib.Path("holding").touch()
                while not pathlib.Path("go").exists():
                    time.sleep(0.01)
                ctx.log.error("cannot reach %s", ctx.settings.database)
                raise ConnectionError(f"cannot reach {ctx.settings.database} as S3cr3t")
                yield batch
        """,
    )
    process = project.start("-v", "run", "leak")
    wait_for((project.folder / "holding").exists, "the first batch")
    lists = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in project.living()
             for name in ("cmdline", "environ")]  # fmt: skip
    assert lists
    assert not any(SECRET.encode() in text for text in lists)
    (project.folder / "go").touch()
    ended = project.finish(process)
    assert (ended.code, ended.out) == (1, "")
    assert "ConnectionError: cannot reach postgres://u:***@h/db as ***" in ended.err
    files = [path for path in (project.folder / "state").rglob("*") if path.is_file()]
    assert any("postgres://u:***@h/db" in p.read_text(errors="replace") for p in files)
    texts = [path.read_bytes() for path in files] + [
        (shown.out + shown.err).encode()
        for words in (
            ["status", "leak"],
            ["report", "leak"],
            ["--json", "report", "leak"],
            ["jobs"],
        )
        for shown in [project.run(*words)]
    ]
    assert not any(SECRET.encode() in text for text in [*texts, ended.err.encode()])


# --- repair ---------------------------------------------------------------------------------------


def test_a_lost_ledger_is_made_anew_from_the_checkpoints_by_repair_alone(paused: Project) -> None:
    run, ledger = run_id(paused), paused.folder / "state/ledger.db"
    ledger.unlink()
    assert paused.run("run", "count").code == 13
    shown = paused.run("repair")
    assert shown.code == 3
    assert shown.out.endswith("to do it: batchrun repair --apply\n")
    assert not ledger.exists()
    applied = paused.run("repair", "--apply")
    assert applied.code == 0
    assert f"run {run} of count: the ledger is lost; adopt its commit 2\n" in applied.out
    assert paused.run("resume").err.endswith("goes on after commit 2, 20 records read\n")
    assert paused.run("repair") == Ended(0, "nothing to repair\n", "")


def test_a_ledger_that_is_none_is_made_anew_also_without_checkpoints(shop: Project) -> None:
    assert shop.run("run", "count").code == 0
    ledger = shop.folder / "state/ledger.db"
    for checkpoint in (shop.folder / "state/checkpoints").glob("*/*"):
        checkpoint.unlink()
    ledger.write_bytes(b"SQLite format 3\0" + bytes(4080))
    assert shop.run("run", "count").code == 13
    assert shop.run("repair").code == 3
    assert shop.run("repair", "--apply").code == 0
    assert shop.run("run", "count") == Ended(0, "", "")


# --- what a hostile newcomer tried ----------------------------------------------------------------


def test_check_compares_the_target_with_the_commit_that_stands(project: Project) -> None:
    assert project.run("init", ".").code == 0
    config = (project.folder / "batchrun.toml").read_text()
    project.write_file("batchrun.toml", f"[defaults]\nbatch_size = 1000\n{config}")
    assert project.run("run", "inventory_sync", "--batches", "3").code == 75
    (checkpoint,) = project.state.glob("checkpoints/inventory_sync/*.json")
    older = checkpoint.read_bytes()
    assert project.run("run", "inventory_sync", "--batches", "2").code == 75
    checkpoint.write_bytes(older)
    found = project.run("--json", "check")
    (finding,) = found.document["findings"]  # the target is where the ledger is: nothing of it
    assert (found.code, "older than the ledger" in finding["what"]) == (3, True)


def test_jobs_shows_what_is_wrong_with_one_jobs_settings_beside_the_others(shop: Project) -> None:
    shop.write_file("batchrun.toml", CONFIG + "\n[jobs.other]\nuses = 'count'\nfed = 1\n")
    shown = shop.run("jobs")
    assert shown.code == 2
    assert shown.out == (
        "count  version 1, never run\n"
        "  -\n"
        "other  CANNOT BE USED, never run\n"
        "  The job other has no settings, but fed is given.\n"
    )
    assert "fed" in shown.err


def test_repair_of_a_run_that_nobody_knows_is_not_found(paused: Project) -> None:
    assert paused.run("repair", "nosuch").code == 4


def with_output(project: Project, output: str, words: str) -> tuple[int, str]:
    """Run a command whose standard output is redirected by the shell; return code and stderr."""
    ended = subprocess.run(
        ["bash", "-c", f'"$@" {words} {output}', "bash", *LAUNCH],
        cwd=project.folder,
        env={**clean_environment(), "LANG": "C", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stderr


READING = ("status", "status count", "logs count", "report count", "jobs", "--json status")


@pytest.mark.parametrize("words", READING)
def test_a_result_that_cannot_be_written_is_told_in_words_of_its_own(
    paused: Project, words: str
) -> None:
    why = {"> /dev/full": "No space left on device", ">&-": "Bad file descriptor"}
    for output, reason in why.items():
        code, said = with_output(paused, output, words)
        assert code == 1
        assert f"Standard output cannot be written: {reason}." in said
        assert "Traceback" not in said
    assert with_output(paused, "| true", words) == (0, "")


def test_help_that_cannot_be_written_is_told_so_too(shop: Project) -> None:
    code, said = with_output(shop, "> /dev/full", "--help")
    lost = "What the command was to do is done; only its words are lost."
    full = "Standard output cannot be written: No space left on device."
    assert (code, said.splitlines()) == (1, [full, lost])


@pytest.mark.parametrize("words", ["--help", "--version", "run --help"])
def test_help_whose_reader_went_away_ends_as_any_other_result(shop: Project, words: str) -> None:
    assert with_output(shop, "| true", words) == (0, "")


def test_a_file_never_becomes_an_output_that_was_closed(paused: Project) -> None:
    before = everything_in(paused.folder)
    assert with_output(paused, "<&- >&-", "status count")[0] == 1
    assert everything_in(paused.folder) == before


def test_a_folder_whose_path_is_not_utf_8_is_refused_in_words(project: Project) -> None:
    folder = Path(os.fsdecode(os.fsencode(project.folder) + b"/b\xff"))
    folder.mkdir()
    ended = project.run("init", ".", cwd=folder)
    assert (ended.code, "is not UTF-8." in ended.err, list(folder.iterdir())) == (2, True, [])


def test_words_that_are_not_utf_8_are_refused_in_words(paused: Project) -> None:
    odd = os.fsdecode(b"a\xffb")
    for command in ("status", "cancel"):
        ended = paused.run(command, odd)
        assert (ended.code, " is not UTF-8, and cannot be kept" in ended.err) == (2, True)


# --- doctor ---------------------------------------------------------------------------------------


def sick_project(project: Project) -> None:
    project.write(
        """
        [[health.dependency]]
        name = "feed"
        command = ["sh", "-c", "echo not mounted; exit 1"]
        critical = true
        [[health.dependency]]
        name = "of b alone"
        url = { env = "NO_SUCH_URL" }
        jobs = ["b"]
        [[health.database]]
        name = "stock"
        url = "sqlite:stock.db"
        [jobs.a]
        [jobs.b]
        """
    )
    (project.folder / "stock.db").touch()


def test_doctor_asks_for_everything_once_and_explains_each_answer(project: Project) -> None:
    sick_project(project)
    found = project.run("doctor")
    assert (found.code, found.err) == (3, "")
    text = re.sub(r" \(\d+ ms\)", "", found.out.replace(str(project.folder), "F"))
    lines = text.splitlines()
    assert re.fullmatch(r"ok       memory .* available of .* \(.*\)", lines[0])
    below = "         below 64 MB (min_available) memory is bad, below a quarter of it critical"
    assert lines[1] == below
    assert lines[2].startswith("ok       memory pressure ")
    assert lines[4:14] == [
        "ok       state F/state is not there yet; a first run makes it",
        "         without it no run starts, and one that runs is paused at once",
        "bad      feed sh -c 'echo not mounted; exit 1' ended with exit 1: not mounted",
        "         while it is bad, dependencies is bad: that pauses a run alone",
        "         to mend it: see to it, or correct its entry in F/batchrun.toml",
        "unknown  of b alone the environment variable NO_SUCH_URL is not set",
        "         unknown is not bad: nobody would notice if it went away",
        "         to mend it: see to it, or correct its entry in F/batchrun.toml",
        "ok       stock sqlite:stock.db can be read, 0 tables",
        "         while it is bad, connections is bad: two bad factors pause a run",
    ]
    assert not project.state.exists()


def test_doctor_asks_only_for_what_the_named_job_needs(project: Project) -> None:
    sick_project(project)
    found = project.run("doctor", "a", "--json")
    assert found.code == 3
    rows = found.document["examined"]
    names = [row["name"] for row in rows]
    assert names[:5] == ["memory", "pressure", "state", "feed", "stock"]
    assert names[5:] == ["SQLite", "limits", "clock", "job a"]
    assert {key: rows[3][key] for key in ("state", "answer")} == {
        "state": "bad",
        "answer": "ended with exit 1: not mounted",
    }
    assert all(row["elapsed_s"] > 0 and row["means"] for row in rows)
    assert project.run("doctor", "c").code == 4


def test_what_a_job_prints_is_no_part_of_what_a_command_says_of_it(project: Project) -> None:
    project.write("[jobs.a]\n", a="print('noise')\nfrom batchrun import job\n@job\ndef a(c): yield")
    names = {row["name"] for row in project.run("doctor", "--json").document["examined"]}
    assert "job a" in names
    (found,) = project.run("jobs", "--json").document["jobs"]
    assert (found["job"], found["version"]) == ("a", 1)


def test_doctor_ends_with_0_if_all_is_well(project: Project) -> None:
    assert project.run("init", ".").code == 0
    assert project.run("run", "inventory_sync").code == 0
    found = project.run("doctor")
    assert (found.code, found.err) == (0, "")
    assert "lock held while it is held, free when it is not" in found.out
    assert list(project.state.glob("locks/doctor*")) == []
    (project.state / "maintenance.lock").touch(mode=0o666)  # whoever made it: it is no fault
    (project.state / "maintenance.lock").chmod(0o666)
    assert re.search(r"ok +files \d+, all its owner's", project.run("doctor").out)


@pytest.mark.parametrize(
    ("name", "spoil", "answer", "todo"),
    [
        ("files", "chmod 666 state/ledger.db", "S/ledger.db", "chown -R OWNER S; chmod -R go= S"),
        ("state", "chmod 777 state", "others may write to it.", "chmod go-w S"),
        ("lock", "touch state/locks", "Not a directory", "df -T S"),
        ("limits", "ulimit -n 64", "64 open files, of any size", "ulimit -n 1024"),
        ("limits", "ulimit -f 4096", "open files, of 2.1 MB", "ulimit -f unlimited"),
        ("job broken", "", "No module named 'nowhere'", "batchrun jobs"),
    ],
)
def test_doctor_names_what_is_wrong_and_what_to_type(
    project: Project, name: str, spoil: str, answer: str, todo: str
) -> None:
    project.write("[jobs.broken]", broken="import nowhere")
    project.state.mkdir(mode=0o700)
    (project.state / "ledger.db").touch(mode=0o600)
    spoiled = ("/bin/sh", "-c", f'{spoil or ":"}; exec "$@"', "-", *LAUNCH)
    found = project.run("doctor", "--json", launch=spoiled)
    assert found.code == 3
    (row,) = [row for row in found.document["examined"] if row["name"] == name]
    owner = project.state.owner()
    wanted = todo.replace("S", str(project.state)).replace("OWNER", owner)
    assert (row["state"], row["todo"]) == ("bad", wanted)
    assert answer.replace("S/", f"{project.state}/") in row["answer"]


def test_doctor_notices_a_clock_that_went_back(project: Project) -> None:
    assert project.run("init", ".").code == 0
    assert project.run("run", "inventory_sync").code == 0
    ledger = apsw.Connection(str(project.state / "ledger.db"))
    ledger.execute("UPDATE event SET at = '2999-01-01T00:00:00.000Z'")
    ledger.close()
    found = project.run("doctor")
    assert found.code == 3
    assert re.search(r"bad      clock .* before the newest event", found.out)
    assert "         to mend it: timedatectl\n" in found.out


@pytest.mark.parametrize(
    ("kind", "limit", "code"),
    [("simple", "1min 30s", 3), ("simple", "2min", 0), ("notify", "1s", 0)],
)
def test_doctor_compares_an_installed_unit_with_how_long_a_stop_may_take(
    project: Project, kind: str, limit: str, code: int
) -> None:
    assert project.run("init", ".").code == 0
    answer = f"Type={kind}\\nTimeoutStopUSec={limit}\\nLoadState=loaded\\n"
    systemctl = project.write_file("systemctl", f'#!/bin/sh\n[ $1 = show ] && printf "{answer}"\n')
    systemctl.chmod(0o700)  # there is no systemd to ask on most machines that run the tests
    path = {**clean_environment(), "PATH": f"{project.folder}:{os.environ['PATH']}"}
    found = project.run("doctor", env=path)
    assert found.code == code, found.out
    assert "unit of inventory_sync TimeoutStopSec is " in found.out
    todo = "to mend it: batchrun unit inventory_sync --install"
    assert (todo in found.out) == (code == 3)


NOTICED = """
import gc, os, sys
sys.path.insert(0, {root!r})
import batchrun
gc.callbacks.append(lambda phase, _: os.write(2, b"garbage looked for\\n"))
batchrun.main()
"""
LITTERING = """
    import gc

    from batchrun import job

    class Shelf:
        pass

    @job()
    def count(ctx):
        with open("threshold", "w") as file:
            file.write(str(gc.get_threshold()))
        for batch in ctx.batches(range(100)):
            for _ in batch:
                for _ in range(1000):
                    shelf = Shelf()
                    shelf.above = shelf
            yield batch
    """


def test_a_short_command_looks_for_no_garbage_and_a_long_one_does(shop: Project) -> None:
    launch = (sys.executable, "-P", "-c", NOTICED.format(root=str(ROOT)))
    assert shop.run("run", "count").code == 0
    short = shop.run("status", launch=launch)
    assert (short.code, short.err) == (0, "")
    shop.write(CONFIG, count=LITTERING)
    long = shop.run("run", "count", "--in-process", launch=launch)
    assert long.code == 0
    assert "garbage looked for" in long.err
    assert (shop.folder / "threshold").read_text() == str(gc.get_threshold())  # Python's own


@pytest.mark.parametrize("before", ["enable", "disable"])
@pytest.mark.parametrize("frozen", ["", "; gc.freeze()"])
def test_who_imports_batchrun_keeps_the_garbage_collection_that_they_have(
    before: str, frozen: str
) -> None:
    kept = "gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0"
    boot = f"import gc, sys; sys.path.insert(0, {str(ROOT)!r}); gc.{before}(){frozen}"
    code = f"{boot}; was = {kept}; import batchrun; assert was == ({kept}), ({kept})"
    subprocess.run([sys.executable, "-P", "-c", code], env=clean_environment(), check=True)
