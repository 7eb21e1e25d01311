"""What a run logged: every line with its time, over moves of the file, and never in its way."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LAUNCH, Project, clean_environment, wait_for

from batchrun import Host, LogFile, LogLine, LogStream, print_to_log

CONFIG = """
[jobs.talk]
batch_size = 10
"""
TALK = """
    import ctypes, os, pathlib, subprocess, sys, time
    from batchrun import job

    LOG = pathlib.Path("state/logs/talk") / f"{os.environ['BATCHRUN_RUN_ID']}.log"

    HOLD = pathlib.Path("hold")

    @job()
    def talk(ctx):
        for batch in ctx.batches(range(30)):
            if batch.number == 2:
                ACTION
            print("batch", batch.number)
            yield batch
    """
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def write_job(project: Project, action: str = "pass") -> None:
    """Write the job that does this in its second batch."""
    project.write(CONFIG, talk=TALK.replace("ACTION", action))


def log_of(project: Project) -> Path:
    """Return the log of the one run."""
    (path,) = (project.state / "logs" / "talk").glob("*.log")
    return path


def texts(project: Project, *words: str) -> list[str]:
    """Return what `logs` shows behind time and level, without what batchrun said."""
    shown = project.run("--json", "logs", "talk", *words).out.splitlines()
    lines = [json.loads(line)["text"] for line in shown]
    return [line for line in lines if not line.startswith("batchrun: ")]


# --- every line has its time --------------------------------------------------------------------


MANY_WAYS = (
    "ctx.log.warning('logged %s\\n  in two lines', 7);"
    " print('to stderr', file=sys.stderr);"
    " print('half', end='', flush=True); print(' a line');"
    " ctypes.CDLL(None).write(1, b'from C\\n', 7);"
    " subprocess.run(['echo', 'from a child'])"
)


def test_every_line_has_a_time_and_a_level_also_one_that_a_library_or_a_child_wrote(
    project: Project,
) -> None:
    write_job(project, MANY_WAYS)
    assert project.run("run", "talk").code == 0
    shown = project.run("logs", "talk").out.splitlines()
    assert all(re.fullmatch(rf"{STAMP} (INFO|OUT|ERR|WARNING) +\S.*", line) for line in shown)
    assert [line[25:] for line in shown if "batchrun: " not in line] == [
        "OUT     batch 1",
        "WARNING logged 7",
        "WARNING   in two lines",
        "ERR     to stderr",
        "OUT     half a line",
        "INFO    from C",
        "INFO    from a child",
        "OUT     batch 2",
        "OUT     batch 3",
    ]
    assert [line[:24] for line in shown] == sorted(line[:24] for line in shown)
    raw = log_of(project).read_text().splitlines()
    assert [line for line in raw if not re.match(STAMP, line)] == ["from C", "from a child"]


def test_a_log_that_cannot_be_read_is_told_of_once_and_the_rest_is_shown(project: Project) -> None:
    write_job(project)
    assert project.run("run", "talk").code == 0
    log = log_of(project)
    log.rename(log.with_suffix(".old"))
    assert project.run("logs", "talk").code == 0  # it may be removed
    log.symlink_to(log.with_suffix(".old"))
    shown = project.run("logs", "talk")
    why = f"The log {log} cannot be read: Too many levels of symbolic links.\n"
    assert (shown.code, shown.err) == (3, why)
    assert "batchrun: succeeded" in shown.out


def test_what_a_library_writes_is_no_error_of_the_line_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("2026-01-31T01:00:00.000Z ERROR bad\nraw\n")
    log = LogFile(path, "2026-01-31T00:00:00.000Z")
    lines = list(log.new_lines(to_end=True))
    log.close()
    assert [(line.at[11:13], line.level, line.text) for line in lines] == [
        ("01", "ERROR", "bad"),
        ("01", "INFO", "raw"),
    ]


def test_what_batchrun_did_stands_between_what_the_job_said(project: Project) -> None:
    write_job(project, "raise ValueError('no shelf')")
    assert project.run("run", "talk").code == 1
    shown = [line[25:] for line in project.run("logs", "talk").out.splitlines()]
    assert shown[0] == "INFO    batchrun: started: a start was admitted"
    running = "INFO    batchrun: running: the worker is about to hand out its first batch"
    assert shown[1:3] == [running, "OUT     batch 1"]
    assert shown[3] == "ERROR   Traceback (most recent call last):"
    assert shown[-2] == "ERROR   ValueError: no shelf"
    assert shown[-1].startswith("WARNING batchrun: failed: The job raised ValueError: no shelf")


def test_a_line_that_was_begun_swallows_no_other(project: Project) -> None:
    begun = "print('wait', end='', flush=True);"
    write_job(project, f"{begun} sys.stderr.write('no\\n'); {begun} ctx.log.error('full'); 1/0")
    assert project.run("run", "talk").code == 1
    assert texts(project, "--level", "ERR")[:3] == [
        "no",
        "full",
        "Traceback (most recent call last):",
    ]
    assert texts(project, "--level", "OUT")[1:5] == ["wait", "no", "wait", "full"]


def test_only_lines_of_a_level_and_since_a_moment_are_shown(project: Project) -> None:
    write_job(project, MANY_WAYS)
    assert project.run("run", "talk").code == 0
    warned = ["logged 7", "  in two lines", "to stderr"]
    assert texts(project, "--level", "warning") == texts(project, "--level", "WARN") == warned
    assert texts(project, "--level", "ERROR") == []
    assert len(texts(project, "--since", "1h")) == 9
    assert texts(project, "--since", "2999-01-01T00:00Z") == []
    at = json.loads(project.run("--json", "logs", "talk", "--level", "ERR").out.splitlines()[0])[
        "at"
    ]
    assert texts(project, "--since", at, "--level", "WARNING") == warned
    assert texts(project, "--since", "400000d", "--level", "ERR")  # 1,095 years: since ever


def test_a_moment_that_is_none_is_refused(project: Project) -> None:
    write_job(project)
    ended = project.run("logs", "talk", "--since", "soon")
    said = "--since 'soon' is neither a duration nor a moment."
    assert (ended.code, ended.err.splitlines()[0]) == (2, said)


def test_no_character_and_no_locale_fails_a_print_or_reaches_the_terminal(project: Project) -> None:
    odd = r"print('caf\u00e9', '\udcff', '\x1b[31mred\x07', '\u65e5', 'https://u:S3cr3t@h/')"
    write_job(project, odd)
    ascii_only = {**clean_environment(), "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    assert project.run("run", "talk", env=ascii_only).code == 0
    ended = project.run("logs", "talk", env=ascii_only)
    assert "café \\udcff \\x1b[31mred\\x07 日 https://u:***@h/\n" in ended.out


def test_a_library_may_ask_for_the_descriptor_and_write_bytes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    print_to_log(Host())
    sys.stdout.buffer.write(b"bytes \xff\n")
    subprocess.run(["echo", "a child"], stdout=sys.stdout, check=True)
    sys.stderr.write("")
    monkeypatch.undo()
    lines = capfd.readouterr().err.splitlines()
    assert [re.sub(STAMP, "T", line) for line in lines] == ["T OUT bytes \ufffd", "a child"]
    assert LogStream("OUT", Host()).write(b"") == 0


# --- the file may go away -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        ("LOG.rename('old.log')", ["batch 3"]),
        ("LOG.unlink()", ["batch 3"]),
        ("os.truncate(LOG, 0)", ["batch 2", "batch 3"]),
        ("LOG.unlink(); LOG.mkdir()", []),
        ("import shutil; shutil.rmtree(LOG.parent.parent)", ["batch 3"]),
    ],
)
def test_a_log_that_is_moved_removed_or_cut_is_made_anew_at_the_next_safe_point(
    project: Project, action: str, kept: list[str]
) -> None:
    write_job(project, action)
    assert project.run("run", "talk").code == 0
    assert texts(project) == kept
    if "rename" in action:
        moved = (project.folder / "old.log").read_text().splitlines()
        assert [line[25:] for line in moved] == ["OUT batch 1", "OUT batch 2"]


def test_a_reader_goes_on_in_the_new_file_where_a_log_was_moved_or_cut(tmp_path: Path) -> None:
    path, begins = tmp_path / "a.log", "2026-01-31T00:00:00.000Z"
    log = LogFile(path, begins)

    def read(*, to_end: bool = False) -> list[str]:
        return [f"{line.at[11:13]} {line.text}" for line in log.new_lines(to_end=to_end)]

    assert read() == []
    path.write_text("no time\n2026-01-31T01:00:00.000Z INFO one\nraw\nhalf")
    assert read() == ["00 no time", "01 one", "01 raw"]
    with path.open("a") as file:
        file.write(" a line\n2026-01-31T02:00:00.000Z INFO last words")
    assert read() == ["01 half a line"]
    path.rename(tmp_path / "b.log")
    path.write_text("2026-01-31T03:00:00.000Z INFO new\n")
    assert read() == ["02 last words", "03 new"]
    path.write_text("x\n")  # cut short, the same file
    assert read() == ["03 x"]
    path.unlink()
    assert read() == []
    path.mkdir()
    assert read(to_end=True) == []
    assert str(LogLine(begins, "OUT", "x")) == f"{begins} OUT     x"


# --- following ------------------------------------------------------------------------------------


HELD = "pathlib.Path('held').touch(); [time.sleep(0.01) for _ in iter(HOLD.exists, False)]"


def held_run(project: Project) -> subprocess.Popen[str]:
    """Start the job, which stays in its second batch until `hold` is removed."""
    write_job(project, HELD)
    (project.folder / "hold").touch()
    process = project.start("run", "talk")
    wait_for((project.folder / "held").exists, "the second batch")
    return process


def test_following_shows_what_comes_and_ends_with_the_run(project: Project) -> None:
    run = held_run(project)
    following = project.start("logs", "talk", "-f")
    wait_for(lambda: "batch 1\n" in project.output(following, 0).out, "what was there before")
    log_of(project).rename(project.folder / "moved.log")
    (project.folder / "hold").unlink()
    assert project.finish(run).code == 0
    ended = project.finish(following)
    shown = [line[25:] for line in ended.out.splitlines()]
    assert (ended.code, ended.err) == (0, "")
    assert [line for line in shown if line.startswith("OUT")] == [
        f"OUT     batch {number}" for number in (1, 2, 3)
    ]
    assert shown[-1].startswith("INFO    batchrun: succeeded")


def test_ctrl_c_ends_the_following_and_not_the_run(project: Project) -> None:
    run = held_run(project)
    following = project.start("logs", "talk", "--follow")
    wait_for(lambda: "batch 1\n" in project.output(following, 0).out, "what was there before")
    following.send_signal(signal.SIGINT)
    ended = project.finish(following)
    assert (ended.code, ended.err) == (0, "")
    (project.folder / "hold").unlink()
    assert project.finish(run).code == 0


def test_following_ends_at_once_where_nothing_goes_on_or_nobody_reads(project: Project) -> None:
    write_job(project)
    assert project.run("run", "talk", "--batches", "2").code == 75
    ended = project.run("logs", "talk", "-f")
    assert (ended.code, ended.out.count("OUT     batch")) == (0, 2)
    words = ["bash", "-o", "pipefail", "-c", '"$@" | head -1', "bash", *LAUNCH, "logs", "talk"]
    read = subprocess.run(
        words, cwd=project.folder, env=clean_environment(), capture_output=True, check=False
    )
    assert (read.returncode, read.stdout.count(b"\n"), read.stderr) == (0, 1, b"")


def test_following_keeps_nobody_from_emptying_the_ledgers_log(project: Project) -> None:
    run = held_run(project)
    following = project.start("logs", "talk", "-f")
    wait_for(lambda: "batch 1\n" in project.output(following, 0).out, "what was there before")

    def is_open() -> bool:
        files = Path(f"/proc/{following.pid}/fd")
        return any("ledger.db" in str(file.readlink()) for file in files.iterdir())

    def is_closed() -> bool:
        try:
            return not is_open()
        except OSError:
            return False

    wait_for(is_closed, "a moment in which the reader has not the ledger open")
    (project.folder / "hold").unlink()
    assert project.finish(run).code == 0
    assert project.finish(following).code == 0
