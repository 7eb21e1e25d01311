"""What the other tests lean on holds: waiting fails with words, processes are found and killed."""

import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Project, wait_for

PYTHON = (sys.executable, "-c")


def test_waiting_returns_the_first_true_value() -> None:
    answers = iter([0, "", "here"])
    assert wait_for(lambda: next(answers), "an answer") == "here"


def test_waiting_in_vain_says_for_what_and_what_was_seen() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        wait_for(lambda: 0, "the ledger", limit_s=0.01)
    assert str(failure.value) == "waited 0.01 s in vain for the ledger; last seen: 0"


def test_a_process_gives_its_exit_code_and_both_outputs(project: Project) -> None:
    code = "import sys; print('[1]'); print('oh', file=sys.stderr); sys.exit(3)"
    ended = project.run(code, launch=PYTHON)
    assert (ended.code, ended.out, ended.err, ended.document) == (3, "[1]\n", "oh\n", [1])


def test_a_process_that_takes_too_long_fails_the_test_with_its_output(project: Project) -> None:
    code = "import signal; print('still here', flush=True); signal.pause()"
    process = project.start(code, launch=PYTHON)
    wait_for(lambda: "still here" in project.output(process, 0).out, "its first line")
    with pytest.raises(pytest.fail.Exception, match="still here"):
        project.finish(process, limit_s=0.01)


def test_a_process_has_the_environment_and_umask_it_was_given(project: Project) -> None:
    code = "import os; open('made', 'w').close(); print(sorted(set(os.environ) - {'LC_CTYPE'}))"
    before = os.umask(0o022)
    os.umask(before)
    assert project.run(code, launch=PYTHON, env={}, umask=0o077).out == "[]\n"
    assert (project.folder / "made").stat().st_mode & 0o777 == 0o600
    assert os.umask(before) == before


def test_orphans_in_process_groups_and_sessions_of_their_own_are_killed_too(
    project: Project,
) -> None:
    child = "import signal; open('ready', 'a').write('.'); signal.pause()"
    code = (
        "import subprocess, sys\n"
        f"for how in ({{'process_group': 0}}, {{'start_new_session': True}}):\n"
        f"    subprocess.Popen([sys.executable, '-c', {child!r}], **how)\n"
    )
    assert project.run(code, launch=PYTHON).code == 0
    ready = project.folder / "ready"
    wait_for(lambda: ready.exists() and ready.read_text() == "..", "two orphans")
    assert len(project.living()) == 2
    project.kill_all()
    assert project.living() == []


def test_a_killed_process_gives_its_signal_as_a_negative_code(project: Project) -> None:
    process = project.start("import signal; signal.pause()", launch=PYTHON)
    process.send_signal(signal.SIGKILL)
    assert project.finish(process).code == -signal.SIGKILL


def test_the_files_of_a_project_are_the_owners_only(project: Project) -> None:
    project.write("[jobs.a]\n", a="    x = 1\n")
    paths = [project.folder / "batchrun.toml", project.folder / "jobs" / "a.py"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert paths[1].read_text() == "x = 1\n"


def test_temporary_files_are_inside_the_clone(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    given = pytestconfig.invocation_params.args
    if any(str(argument).startswith("--basetemp") for argument in given):
        pytest.skip("--basetemp says otherwise")
    assert tmp_path.is_relative_to(ROOT)


def test_each_test_has_an_empty_postgresql_database_of_its_own(postgres_dsn: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        tables = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        assert connection.execute(tables).fetchone() == (0,)
