"""What shells and Kubernetes make of batchrun: completion, PID 1, the termination message."""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import LAUNCH, Ended, Project, clean_environment, wait_for
from test_11_worker import let_go, records, rows, run_row, start_held, write_job

from batchrun import Host, typed_elsewhere

# --- completion -----------------------------------------------------------------------------------


def completed(project: Project, *words: str, shell: str = "bash", **more: str) -> list[str]:
    """Return what a shell is given for the last of the words."""
    asked = {
        "_BATCHRUN_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(("batchrun", *words)),
        "COMP_CWORD": str(len(words)) if shell != "fish" else words[-1],
    }
    told = project.run(env={**clean_environment(), **asked, **more}, cwd=Path("/"))
    assert (told.code, told.err) == (0, "")
    return told.out.split()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_line_that_is_completed_is_not_answered_yet(project: Project, option: str) -> None:
    write_job(project)
    assert completed(project, option, "stat") == ["plain,status"]


def test_names_of_commands_jobs_and_runs_are_completed(project: Project) -> None:
    write_job(project)
    config = str(project.folder / "batchrun.toml")
    assert project.run("run", "sync").code == 0
    ((run,),) = rows(project, "SELECT id FROM run")
    assert "plain,maintenance" in completed(project, "ma")
    assert completed(project, "run", "s", BATCHRUN_CONFIG=config) == ["plain,sync"]
    assert completed(project, "--config", config, "run", "") == ["plain,sync"]
    assert completed(project, "report", run[:4], BATCHRUN_CONFIG=config) == [f"plain,{run}"]
    assert completed(project, "status", "", BATCHRUN_CONFIG=config) == [
        "plain,sync",
        f"plain,{run}",
    ]
    assert completed(project, "backup", "co", BATCHRUN_CONFIG=config) == ["file,co"]
    assert completed(project, "rejects", "re") == ["plain,retry"]
    levels = completed(project, "logs", "sync", "--level", "WAR")
    assert [level.upper() for level in levels] == ["PLAIN,WARN", "PLAIN,WARNING"]
    assert completed(project, "unit", "--every", "m") == ["plain,monthly"]
    for shell in ("zsh", "fish"):
        assert "sync" in "".join(
            completed(project, "run", "s", shell=shell, BATCHRUN_CONFIG=config)
        )


def test_completion_says_nothing_where_nothing_can_be_read(project: Project) -> None:
    assert completed(project, "run", "") == []
    broken = project.write_file("batchrun.toml", "[jobs")
    assert completed(project, "run", "", BATCHRUN_CONFIG=str(broken)) == []
    project.write("[jobs.sync]")
    assert completed(project, "report", "s", BATCHRUN_CONFIG=str(broken)) == ["plain,sync"]
    assert not project.state.exists()


def test_bash_completes_with_the_line_in_the_readme(project: Project) -> None:
    write_job(project)
    script = project.write_file("batchrun", f'#!/bin/sh\nexec {shlex.join(LAUNCH)} "$@"\n')
    script.chmod(0o700)
    lines = """
        eval "$(_BATCHRUN_COMPLETE=bash_source batchrun)"
        COMP_WORDS=(batchrun run s) COMP_CWORD=2
        _batchrun_completion batchrun
        echo "${COMPREPLY[*]}"
    """
    path = {**clean_environment(), "PATH": f"{project.folder}:{os.environ['PATH']}"}
    how = {"env": path, "cwd": project.folder, "text": True, "stderr": subprocess.STDOUT}
    assert subprocess.check_output(["bash", "-c", lines], **how) == "sync\n"  # type: ignore[call-overload]


# --- Kubernetes -----------------------------------------------------------------------------------


def with_message(path: Path, **more: str) -> Mapping[str, str]:
    return {**clean_environment(), "BATCHRUN_TERMINATION_MESSAGE": str(path), **more}


def test_the_termination_message_is_how_the_run_ended(project: Project, tmp_path: Path) -> None:
    write_job(project)
    message = tmp_path / "termination-log"
    message.write_text("x" * 9_000)
    for way in ((), ("--json",)):
        assert project.run("run", "sync", *way, env=with_message(message)).code == 0
        last = rows(project, "SELECT id FROM run ORDER BY key DESC")[0][0]
        text = message.read_text()
        assert text.startswith(f"sync: run {last} succeeded after ")
        assert text.endswith(": 10 of 10 read, 0 rejected")
    write_job(project, "raise ValueError('token=S3cr3t ' + 3_000 * 'ü')")
    failed = project.run("run", "sync", env=with_message(message))
    assert failed.code == 1
    typed = typed_elsewhere(failed.err, project.folder / "batchrun.toml", "resume")
    assert message.read_text() == typed.rstrip("\n")
    assert "S3cr3t" not in message.read_text()
    write_job(project, "raise ValueError('\\x1b[2Jbell\\x07')")
    assert project.run("run", "sync", env=with_message(message)).code == 1
    assert "ValueError: \\x1b[2Jbell\\x07" in message.read_text()


def test_a_termination_message_is_cut_between_two_letters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHRUN_TERMINATION_MESSAGE", str(tmp_path / "message"))
    Host().show_end("x" + 5_000 * "ü")
    assert (tmp_path / "message").read_text() == "x" + 2_047 * "ü"


@pytest.mark.parametrize("place", ["/", "/nowhere/message", "/dev/full", "pipe"])
def test_a_message_that_cannot_be_written_fails_no_run(project: Project, place: str) -> None:
    write_job(project)
    if place == "pipe":  # that nobody reads
        os.mkfifo(project.folder / place)
    path = project.folder / place
    assert project.run("run", "sync", env=with_message(path)) == Ended(0, "", "")


def test_as_the_first_process_of_a_container_term_ends_at_a_safe_point(project: Project) -> None:
    """A pid namespace in which batchrun is PID 1: the kernel ignores what it has no action for."""
    unshare = shutil.which("unshare")
    ways = ["--user", "--map-root-user"] * (os.geteuid() != 0)
    alone = [str(unshare), *ways, "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not unshare or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NO NAMESPACES: unshare cannot make a pid namespace here")
    write_job(project, "print(os.getppid()); hold('go')")
    message = project.folder / "message"
    launch = (*alone, *LAUNCH)
    process = start_held(project, launch=launch, env=with_message(message))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (first,) = map(int, wait_for(lambda: children.read_text().split(), "PID 1"))
    os.kill(first, signal.SIGTERM)
    wait_for(lambda: rows(project, "SELECT request FROM run") and is_asked(first), "the stop")
    let_go(project)
    assert project.finish(process).code == 75
    assert run_row(project) == ("paused", "stop", 2)
    assert message.read_text().startswith("sync: run ")
    log = next(project.state.glob("logs/sync/*.log")).read_text()
    assert any(line.endswith(" OUT 1") for line in log.splitlines())  # the supervisor was PID 1
    assert project.run("resume", "sync").code == 0
    assert records(project) == list(range(1, 11))


def is_asked(pid: int) -> bool:
    """Tell whether no stop signal waits for a process any more."""
    text = Path(f"/proc/{pid}/status").read_text()
    return "SigPnd:\t0000000000000000" in text and "ShdPnd:\t0000000000000000" in text
