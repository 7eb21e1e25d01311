"""`unit`: what it prints is what systemd and cron accept, and starts this very batchrun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Ended, Project
from test_11_worker import records, write_job

import batchrun
from batchrun import (
    KILL_AFTER_INTERRUPT_S,
    ORPHAN_GRACE_S,
    App,
    ConfigurationError,
    Timed,
    load_config,
    sandbox_of,
    unit_command,
    unit_word,
)

CONFIG = """
    [defaults]
    stop_grace = "20s"
    cleanup_timeout = "6s"
    [jobs.sync]
    """
ODD = '50 %h $HOME "it\'s" ; ü'  # all that a shell, cron or systemd could take for something else


def files_of(shown: Ended) -> dict[str, str]:
    """Return the units that a command has printed as JSON: name -> text."""
    assert (shown.code, shown.err) == (0, "")
    return {Path(file["path"]).name: file["text"] for file in shown.document["files"]}


def analysed(folder: Path, files: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Ask systemd-analyze about units."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("NO SYSTEMD: systemd-analyze is not here")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    paths = [str(folder / name) for name in files if not words[1:] or name.endswith(".service")]
    return subprocess.run(
        ["systemd-analyze", *words, *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("sync",),
        ("--tick",),
        ("sync", "--every", "Mon..Fri 4:15", "--on-failure", "mail@%n.service"),
        ("sync", "--every", "hourly"),
    ],
)
def test_systemd_accepts_the_units_without_a_word(
    project: Project, tmp_path: Path, words: tuple[str, ...]
) -> None:
    odd = tmp_path / ODD
    project.folder.rename(odd)
    project.folder = odd
    write_job(project)
    files = files_of(project.run("unit", *words, "--json"))
    (tmp_path / "mail@.service").write_text("[Service]\nExecStart=/bin/true\n")
    verified = analysed(tmp_path, files, "verify")
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_exposure_of_a_job_is_under_4(project: Project, tmp_path: Path) -> None:
    write_job(project)
    files = files_of(project.run("unit", "sync", "--json"))
    files = {n: re.sub("^User=.*", "User=nobody", t, flags=re.MULTILINE) for n, t in files.items()}
    told = analysed(tmp_path, files, "security", "--offline=true", "--threshold=40")
    assert told.returncode == 0, told.stdout.splitlines()[-1]


def console_script(folder: Path) -> Path:
    """Make what pip makes: an executable of the name batchrun."""
    script = folder / "batchrun"
    boot = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom batchrun import main\nmain()\n"
    script.write_text(f"#!{sys.executable}\n{boot}")
    script.chmod(0o700)
    return script


def test_systemd_finds_a_console_script_whose_path_is_odd(project: Project, tmp_path: Path) -> None:
    write_job(project)
    odd = tmp_path / ODD.replace('"it\'s"', "it is")  # systemd takes no quotes there
    odd.mkdir(mode=0o700)
    script = console_script(odd)
    files = files_of(project.run("unit", "sync", "--json", launch=(str(script),)))
    assert analysed(tmp_path, files, "verify").stderr == ""
    script.rename(odd / "moved")
    assert "is not executable" in analysed(tmp_path, files, "verify").stderr


def test_a_crontab_line_runs_the_job_from_any_folder_without_an_environment(
    project: Project, tmp_path: Path
) -> None:
    odd = tmp_path / ODD
    project.folder.rename(odd)
    project.folder = odd
    write_job(project)
    shown = project.run("unit", "--cron", "sync", launch=(str(console_script(tmp_path)),))
    assert (shown.code, shown.err) == (0, "")
    fields, line = shown.out.rstrip("\n").split("  ", 1)
    assert re.fullmatch(r"\d+ 3 \* \* \*", fields)
    assert not re.search(r"(?<!\\)%", line)  # cron ends a command there
    ran = subprocess.run(
        ["/bin/sh", "-c", line.replace("\\%", "%")],
        cwd="/",
        env={},
        capture_output=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == (b"", b"")
    assert records(project) == list(range(1, 11))


def test_the_tick_comes_every_five_minutes_and_is_never_held_back(project: Project) -> None:
    write_job(project)
    line = project.run("unit", "--cron", "--tick").out
    assert line.startswith("*/5 * * * *  ")
    assert line.endswith(f" --config {project.folder}/batchrun.toml resume --all\n")
    files = files_of(project.run("unit", "--tick", "--json"))
    assert list(files) == ["batchrun-tick-shop.service", "batchrun-tick-shop.timer"]
    assert "StartLimit" not in "".join(files.values())


def test_a_unit_says_what_a_service_of_a_long_job_needs(project: Project, tmp_path: Path) -> None:
    config = f"""{CONFIG}
    target = "sqlite:{tmp_path}/elsewhere/stock.db"
    other = "sqlite:stock.db"
    """
    project.write(config, sync="")
    service = files_of(project.run("unit", "sync", "--json"))["batchrun-shop-sync.service"]
    lines = service.splitlines()
    wanted = [
        "Type=notify",
        "NotifyAccess=main",
        "Restart=on-abnormal",
        "RestartSec=30",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "SuccessExitStatus=10 11 12 75",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "TimeoutStopSec=40",  # 20 s to the safe point, 10 s interrupted, 6 s to release, 4 s
        "WatchdogSec=5min",
        f"ReadWritePaths={project.folder} {tmp_path}/elsewhere",
        f"EnvironmentFile=-{project.folder}/batchrun.env",
    ]
    assert [line for line in wanted if line not in lines] == []


def test_a_stop_takes_no_longer_than_its_unit_allows(project: Project) -> None:
    project.write(CONFIG, sync="")
    job = load_config(project.folder / "batchrun.toml").jobs["sync"]
    killed_s = min(job.stop_grace_s, KILL_AFTER_INTERRUPT_S) + 2 * ORPHAN_GRACE_S
    assert job.longest_stop_s == job.stop_grace_s + job.cleanup_timeout_s + killed_s


@pytest.mark.parametrize("folder", ["/srv", *batchrun.VOLATILE_FOLDERS])
def test_a_unit_has_a_tmp_of_its_own_unless_its_job_writes_to_such_a_folder(folder: str) -> None:
    writes = [Path("/etc/shop"), Path(folder) / "shop"]
    timed = Timed("batchrun-shop", ["batchrun"], "shop", writes, 90.0, "", "daily", "")
    assert ("PrivateTmp=yes" in sandbox_of(timed).split()) == (folder == "/srv")


def test_install_writes_where_systemd_looks_and_only_over_its_own(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(project)
    app, units = App(), project.folder / "units"
    monkeypatch.setattr(app.host, "root_units", units)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project.folder))
    folder = app.host.unit_folder
    app.take(str(project.folder / "batchrun.toml"))
    asked: dict[str, Any] = {"tick": False, "every": None, "cron": False, "on_failure": None}

    def install(job: str | None = "sync", *, force: bool = False) -> str:
        asked["tick"] = job is None
        result: batchrun.Result = unit_command(app, job=job, install=True, force=force, **asked)
        return result.text

    shown = install()
    names = ["batchrun-shop-sync.service", "batchrun-shop-sync.timer"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert [shown.count((folder / name).read_text()) for name in names] == [1, 1]
    systemctl = "systemctl" if os.geteuid() == 0 else "systemctl --user"
    assert shown.splitlines()[-2:] == [
        f"#   {systemctl} daemon-reload",
        f"#   {systemctl} enable --now batchrun-shop-sync.timer",
    ]
    install()  # again, over its own
    other = folder / "batchrun-tick-shop.timer"
    other.write_text("[Timer]\n")
    with pytest.raises(ConfigurationError) as refused:
        install(None)
    assert str(refused.value) == (
        f"{other} is there, and was not written by this command.\n"
        "Nothing was written.\nMove it away, or add --force."
    )
    assert other.read_text() == "[Timer]\n"
    assert not (folder / "batchrun-tick-shop.service").exists()
    install(None, force=True)
    assert other.read_text().startswith("# Written by ")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "Name a job, or --tick."),
        (("sync", "--tick"), "Name a job or --tick, not both."),
        (
            ("--tick", "--every", "daily"),
            "--tick comes every five minutes; it takes no --every.",
        ),
        (
            ("sync", "--every", "daily\n[Service]"),
            "--every takes one line of text.",
        ),
        (("sync", "--cron", "--install"), "--cron only prints a line."),
        (("sync", "--force"), "--force is for --install."),
    ],
)
def test_what_unit_would_not_heed_it_refuses(
    project: Project, words: tuple[str, ...], what: str
) -> None:
    write_job(project)
    todo = "Nothing was written.\nSee: batchrun unit --help\n"
    assert project.run("unit", *words) == Ended(2, "", f"{what}\n{todo}")


@pytest.mark.parametrize(
    "unit",
    [
        *("mail", "mail.sh", "mail.service\nUser=root", "mail.service; true", "/bin/mail.service"),
        *("mail@%.service", "mäil.service", ".service", "a.service, b.service", "--x.service"),
    ],
)
def test_what_is_no_name_of_a_unit_is_not_printed_into_one(project: Project, unit: str) -> None:
    write_job(project)
    refused = project.run("unit", "sync", f"--on-failure={unit}")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        f"--on-failure {unit!r} is no name of a unit.\n"
        "Nothing was written.\nWrite: --on-failure mail@%n.service\n"
    )


@pytest.mark.parametrize(
    "unit", ["mail@%n.service", "tell-it.target", "a.service b@c:d_e.timer", r"a\x2db.path"]
)
def test_units_that_start_when_it_fails_are_named_as_they_are(project: Project, unit: str) -> None:
    write_job(project)
    assert f"\nOnFailure={unit}\n" in project.run("unit", "sync", "--on-failure", unit).out


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (("--every", "whenever"), '"Mon..Fri 4:15"'),
        (("--every", "Mon *-*-* 25:00"), '"Mon..Fri 4:15"'),
        (("--cron", "--every", "Mon..Fri 4:15"), '"30 4 * * 1-5"'),
        (("--cron", "--every", "61 4 * * *"), '"30 4 * * 1-5"'),
    ],
)
@pytest.mark.parametrize("path", [None, ""])
def test_an_every_at_which_nothing_can_start_is_refused(
    project: Project,
    words: tuple[str, ...],
    example: str,
    path: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path is not None:
        if "25:00" in words[-1]:
            pytest.skip("without systemd nobody knows its hours")
        monkeypatch.setenv("PATH", path)
    write_job(project)
    assert project.run("unit", "sync", *words) == Ended(
        2,
        "",
        f"--every {words[-1]!r} is not when something can be started.\nNothing was written.\n"
        f"Write hourly, daily, weekly, monthly, or for example {example}.\n",
    )


def test_the_five_fields_of_cron_are_known_within_their_bounds() -> None:
    for text in ("* * * * *", "*/5 0-23/2 1,15 jan-DEC 7", "59 23 31 12 mon-fri", "0 4 * * sun,6"):
        assert batchrun.is_cron(text), text
    for text in ("* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8"):
        assert not batchrun.is_cron(text), text
    for text in ("5-1 * * * *", "*/0 * * * *", "a * * * *", "1- * * * *", ", * * * *", "@daily"):
        assert not batchrun.is_cron(text), text


def test_two_folders_of_one_name_have_units_of_their_own(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, paths = tmp_path / "units", list[Path]()
    monkeypatch.setattr(batchrun.Host, "unit_folder", units)
    asked: dict[str, Any] = {"tick": False, "every": None, "cron": False, "on_failure": None}
    for name in ("one", "two"):
        folder = tmp_path / name / "shop"
        folder.mkdir(parents=True, mode=0o700)
        write_job(Project(folder, project.outputs))
        paths.append(folder / "batchrun.toml")
    for path in (*paths, *paths):
        app = App()
        app.take(str(path))
        unit_command(app, job="sync", install=True, force=True, **asked)
    texts = {path.name: path.read_text() for path in units.glob("*.service")}
    (first, own), second = sorted(texts, key=len), "batchrun-shop-sync.service"
    assert first == second
    assert re.fullmatch(r"batchrun-shop-[0-9a-f]{8}-sync\.service", own)
    assert [f"of {paths[0]}\n" in texts[first], f"of {paths[1]}\n" in texts[own]] == [True, True]


def test_a_job_that_is_not_configured_has_no_unit(project: Project) -> None:
    write_job(project)
    assert project.run("unit", "nope").code == 4


def test_an_interpreter_that_no_unit_can_name_is_refused(project: Project, tmp_path: Path) -> None:
    write_job(project)
    odd = tmp_path / 'a "b"'
    odd.mkdir(mode=0o700)
    refused = project.run("unit", "sync", launch=(str(console_script(odd)),))
    what = f"The path {odd}/batchrun or {project.folder}/batchrun.toml cannot stand in a unit"
    todo = "Nothing was written.\nSee: batchrun unit --help\n"
    assert refused == Ended(2, "", f"{what} or crontab.\n{todo}")


@pytest.mark.parametrize(
    ("text", "word"),
    [("/a/b-c.py", "/a/b-c.py"), ("50%", "50%%"), ('a "b\\', '"a \\"b\\\\"'), ("a;b", '"a;b"')],
)
def test_a_word_is_quoted_as_systemd_reads_it(text: str, word: str) -> None:
    assert unit_word(text) == word
