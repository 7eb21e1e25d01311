"""What the README promises is so: its commands run as written, and it leaves nothing out.

The README's first two `sh` blocks are run in a copy of the clone, exactly as a reader would paste
them. The second of them runs the tests, and so would come back to this file without end. Two
things keep it from that: inside, BATCHRUN_DOCS_NESTED is set and the test that runs the blocks is
skipped; and PYTEST_ADDOPTS selects tests/test_13_reports.py alone, which is enough to see that the
command makes an environment in which tests pass, and takes a second instead of minutes.
"""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import apsw
import click
import pytest
from conftest import LAUNCH, ROOT, Ended, Project, clean_environment

import batchrun

README = (ROOT / "README.md").read_text(encoding="utf-8")
SAMPLE_CONFIG = (ROOT / "sample_config.toml").read_text(encoding="utf-8")
NESTED = "BATCHRUN_DOCS_NESTED"


# --- the README's first two commands --------------------------------------------------------------


def sh_blocks() -> list[str]:
    """Return the README's fenced `sh` blocks in order."""
    return re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def copy_of_the_clone(folder: Path) -> Path:
    """Copy what git would have: all but what .gitignore names."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    ignore = shutil.ignore_patterns(".git", *ignored)
    return Path(shutil.copytree(ROOT, folder, ignore=ignore, symlinks=True))


def rows_of_the_sample_run(clone: Path) -> int:
    """Count the rows in the stock table that the sample config names."""
    settings = tomllib.loads(SAMPLE_CONFIG)["jobs"]["inventory_sync"]
    database = settings.get("database", "sqlite:stock.db").removeprefix("sqlite:")
    with apsw.Connection(str(clone / database), flags=apsw.SQLITE_OPEN_READONLY) as connection:
        count = connection.execute(f'SELECT count(*) FROM "{settings.get("table", "stock")}"').get
    connection.close()
    return int(count)


def test_the_first_two_blocks_are_one_line_each() -> None:
    assert [block.count("\n") for block in sh_blocks()[:2]] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(NESTED in os.environ, reason="runs inside itself (see the module's docstring)")
def test_the_first_two_commands_run_as_written_and_leave_nothing_outside(tmp_path: Path) -> None:
    clone = copy_of_the_clone(tmp_path / "clone")
    outside = {name: tmp_path / name for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for folder in outside.values():
        folder.mkdir()
    environment = {
        **clean_environment(),
        **{name: str(folder) for name, folder in outside.items()},
        NESTED: "1",
        "PYTEST_ADDOPTS": "-k test_13_reports",
    }

    def paste(line: str) -> str:
        ended = subprocess.run(
            ["sh", "-c", line],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    sample, tests = sh_blocks()[:2]
    paste(sample)
    assert rows_of_the_sample_run(clone) == 24_000
    assert re.search(r"\d+ passed", paste(tests))
    paste(sample)  # again, in the environment that the tests have been added to
    assert rows_of_the_sample_run(clone) == 24_000
    left = {path.name for folder in outside.values() for path in folder.iterdir()}
    assert left - {".rustup"} == set()  # pip asks `rustc` for its version; rustup makes its folder


# --- the README's other examples ------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of one language in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_job_in_the_readme_runs(project: Project) -> None:
    project.write(
        """
        [jobs.archive_orders]
        feed = "orders.csv"
        """,
        archive_orders=blocks("python")[0],
    )
    project.write_file("orders.csv", "order,total\n1,10.50\n2,7.25\n")
    assert project.run("run", "archive_orders") == Ended(0, "", "")
    archive = apsw.Connection(str(project.folder / "archive.db"))
    rows = archive.execute('SELECT * FROM orders ORDER BY "order"').fetchall()
    archive.close()
    assert rows == [("1", "10.50"), ("2", "7.25")]


def test_the_settings_in_the_readme_are_those_of_the_sample_jobs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCK_DSN", "postgresql://stock:S3cr3t@localhost/shop")
    monkeypatch.setenv("ORDERS_URL", "amqp://shop:S3cr3t@localhost")
    project.write_file("batchrun.toml", "\n".join(blocks("toml")))
    config = batchrun.load_config(project.folder / "batchrun.toml")
    assert list(config.jobs) == ["inventory_sync", "prices", "queue_orders", "archive_orders"]
    queue, folder = config.jobs["queue_orders"], config.folder
    batchrun.build_settings(settings_class(queue.name), queue.settings, job="", folder=folder)
    cls = settings_class("inventory_sync")
    for job in (config.jobs["inventory_sync"], config.jobs["prices"]):
        made: Any = batchrun.build_settings(cls, job.settings, job=job.name, folder=config.folder)
        assert made.database in (os.environ["STOCK_DSN"], "sqlite:stock.db")


def test_the_cron_lines_in_the_readme_are_silent_when_all_is_well(project: Project) -> None:
    lines = re.findall(r"^\S+ \S+ \* \* \*  +(\S+) (.*)$", README, re.MULTILINE)
    assert len(lines) == 2
    assert project.run("init", str(project.folder)).code == 0
    for _, words in lines:
        here = words.replace("/srv/shop", str(project.folder)).split()
        assert project.run(*here, cwd=Path("/"), env={}) == Ended(0, "", "")
    assert (project.folder / "stock.db").exists()


# --- the command line -----------------------------------------------------------------------------


def commands(
    group: click.Group, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Yield ("maintenance on", its command) for each command that is not hidden."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        elif not command.hidden:
            yield " ".join((*words, name)), command


COMMAND_LINE = batchrun.build_command_line()
COMMANDS = dict(commands(COMMAND_LINE))


def help_of(*words: str) -> str:
    """Return what `batchrun WORDS --help` prints, by a process of its own."""
    shown = subprocess.run(
        [*LAUNCH, *words, "--help"],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    return shown.stdout


def options() -> list[str]:
    """Return the long name of each option of batchrun and of its commands."""
    parameters = [p for command in [COMMAND_LINE, *COMMANDS.values()] for p in command.params]
    shown = [p for p in parameters if isinstance(p, click.Option) and not p.hidden]
    return sorted({max(option.opts, key=len) for option in shown})


def test_the_help_shows_every_command() -> None:
    text = help_of()
    tops = {name.split()[0] for name in COMMANDS}
    assert [top for top in sorted(tops) if not re.search(rf"^ +{top}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_ends_with_its_exit_status(name: str) -> None:
    _, heading, ending = help_of(*name.split()).rpartition("Exit status")
    assert heading, "there is no 'Exit status'"
    assert re.search(r"\b0\b", ending), "exit code 0 is not explained"
    assert not re.search(r"^(Options|Commands|Usage):", ending, re.MULTILINE), ending


def test_the_readme_has_every_command() -> None:
    assert [name for name in COMMANDS if f"batchrun {name}" not in README] == []


def test_the_readme_has_every_option() -> None:
    assert [name for name in options() if not re.search(rf"{name}\b", README)] == []


def test_the_readme_has_a_row_for_every_exit_code() -> None:
    codes = [int(code) for code in batchrun.ExitCode]
    assert [c for c in codes if not re.search(rf"^\| *`?{c}`? *\|", README, re.MULTILINE)] == []


# --- the configuration ----------------------------------------------------------------------------


def known_keys() -> set[str]:
    """Return batchrun's own keys, dotted; `jobs.NAME.x` is key x of any job."""
    tables = batchrun.config_keys()
    return {f"{table}.{key}".lstrip(".") for table, keys in tables.items() for key in keys}


def keys_of_the_sample_config() -> set[str]:
    """Return the keys that the sample config sets or shows as a comment (`# key = value`)."""
    table, keys = "", set()
    for line in SAMPLE_CONFIG.splitlines():
        if heading := re.match(r"(?:# ?)?\[+([\w.]+)\]+\s*(?:#|$)", line):
            table = re.sub(r"^jobs\.\w+", "jobs.NAME", heading[1]) + "."
        elif pair := re.match(r"(?:# ?)?([a-z_][\w.]*) *= *[\[{\"'\d+\-tf]", line):
            keys.add(table + pair[1])
    return keys


def settings_class(name: str) -> Any:  # noqa: ANN401 - it is no module of ours
    """Return the settings class of jobs/NAME.py."""
    path = ROOT / "jobs" / f"{name}.py"
    sys.path[:0] = [str(path.parent)] * (str(path.parent) not in sys.path)  # as a run does
    spec = importlib.util.spec_from_file_location(f"{name}_settings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Settings


def settings_of_the_sample_jobs() -> set[str]:
    """Return the settings of the jobs in jobs/: keys that are theirs, not batchrun's."""
    names = [p.stem for p in (ROOT / "jobs").glob("*.py") if "\nclass Settings" in p.read_text()]
    return {f"jobs.NAME.{field.name}" for name in names for field in fields(settings_class(name))}


def test_every_config_key_is_in_the_sample_config() -> None:
    shown = keys_of_the_sample_config()
    for_one_job = {re.sub(r"^defaults\.", "jobs.NAME.", key) for key in shown}
    assert sorted(known_keys() - shown - for_one_job) == []


def test_every_key_of_the_sample_config_is_a_config_key_or_a_setting_of_a_job() -> None:
    unknown = keys_of_the_sample_config() - known_keys() - settings_of_the_sample_jobs()
    assert sorted(key for key in unknown if not key.startswith("jobs.NAME.types.")) == []


def test_every_setting_of_the_sample_jobs_is_in_the_sample_config() -> None:
    assert sorted(settings_of_the_sample_jobs() - keys_of_the_sample_config()) == []


def test_every_config_key_is_in_the_readme() -> None:
    names = {key.rpartition(".")[2] for key in known_keys()}
    assert sorted(name for name in names if f"`{name}" not in README) == []


def test_the_sample_config_is_toml() -> None:
    assert "inventory_sync" in tomllib.loads(SAMPLE_CONFIG)["jobs"]


# --- lists of the README --------------------------------------------------------------------------


def test_the_readme_names_each_command_that_takes_an_option() -> None:
    told: dict[str, set[str]] = {}
    for named, of in re.findall(r"^\| (`-.*?) \| ([a-z, ]+) \|", README, re.MULTILINE):
        for option in re.findall(r"--[a-z-]+", named.replace(r"\|", " ")):
            told.setdefault(option, set()).update({*of.split(", ")} - {"all"})
    has: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        for option in {max(each.opts, key=len) for each in shown} - {"--help"}:
            has.setdefault(option, set()).add(re.sub("^rejects .*", "rejects", name))
    assert {option: of for option, of in told.items() if option in has} == has


@pytest.mark.parametrize("source", [batchrun.Query, batchrun.JsonLines, batchrun.Delimited])
def test_the_readme_shows_how_each_source_is_made(source: type) -> None:
    [shown] = re.findall(rf"^{source.__name__}\((.*?)\)$", README, re.MULTILINE | re.DOTALL)
    named = re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", shown.strip())
    taken = [name for name in inspect.signature(source).parameters if name != "shared"]
    assert [name for name in named if name in taken] == taken
