"""Section 3: the config file, the settings, secrets and identity. Real files, exact messages."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import ROOT

import batchrun
from batchrun import (
    ConfigurationError,
    NotFound,
    Secret,
    build_settings,
    changed_settings,
    check_trusted,
    config_keys,
    identity,
    load_config,
    looks_secret,
    mask_secrets,
    parse_duration,
    parse_size,
    settings_digest,
)

SAMPLE, JOB = ROOT / "sample_config.toml", ROOT / "jobs/inventory_sync.py"
ME = 1000  # a user who is not root, so that the tests are the same under root


@pytest.fixture(autouse=True)
def _no_secret_is_remembered_from_test_to_test() -> None:
    batchrun._REMEMBERED.clear()


def config_file(folder: Path, text: str) -> Path:
    path = folder / "batchrun.toml"
    path.write_text(text, "utf-8")
    return path


def letter(folder: Path, text: str) -> str:
    path = config_file(folder, text)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    return str(caught.value).replace(str(folder), "F")


# --- durations and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("3m", 180), ("90s", 90), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800)],
        *[("1.5h", 5400), (0, 0), ("0", 0), (0.0, 0), ("0s", 0), ("1m500ms", 60.5)],
    ],
)
def test_a_duration_is_read_in_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", [5, 1.5, True, False, None, "", "5", "m", "3 m", "30m1h", "1h1h", "-3m", "٣m", "infs"]
)
def test_a_duration_without_its_unit_or_in_disorder_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r'^a duration with its unit is wanted, such as "90s"'):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("512MB", 512_000_000), ("512MiB", 536_870_912), ("1kB", 1000), ("1KB", 1000)],
        *[("7B", 7), ("1.5GB", 1_500_000_000), ("1 GiB", 1 << 30), (0, 0), ("0.1GB", 100_000_000)],
    ],
)
def test_a_size_is_read_in_bytes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", [512, True, "512", "512M", "512mb", "MB", "-1MB", "", "1e3B"])
def test_a_size_without_a_plain_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r'^a size with its unit is wanted, such as "512MB"'):
        parse_size(text)


# --- the config file ------------------------------------------------------------------------------


def test_an_empty_config_has_every_default(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, ""))
    assert (config.state, config.jobs_folder) == (tmp_path / "state", tmp_path / "jobs")
    assert (config.min_free_bytes, config.jobs) == (16_000_000, {})


def test_a_job_takes_defaults_then_its_own_options_and_the_rest_are_its_settings(
    tmp_path: Path,
) -> None:
    text = '[defaults]\nbatch_size = 100\nstop_grace = "2m"\n'
    text += '[jobs.a]\n[jobs."b.2"]\nuses = "stock:sync"\nbatch_size = 7\nfeed = "x"\n'
    config = load_config(config_file(tmp_path, text))
    first, second = config.job("a"), config.job("b.2")
    assert (first.module, first.function, first.path) == ("a", "a", tmp_path / "jobs/a.py")
    assert (first.batch_size, first.stop_grace_s, first.max_fresh) == (100, 120, 2)
    assert (second.module, second.function) == ("stock", "sync")
    assert second.path == tmp_path / "jobs/stock.py"
    assert (second.batch_size, second.stop_grace_s, second.settings) == (7, 120, {"feed": "x"})


def test_relative_paths_are_relative_to_the_config_file_from_any_folder(
    tmp_path: Path,
) -> None:  # K26
    path = config_file(tmp_path, 'state = "var/state"\njobs_folder = "../jobs"\n')
    code = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
    code += "from batchrun import load_config; c = load_config(Path(sys.argv[2]))\n"
    code += "print(c.state, c.jobs_folder, sep='\\n')"
    (tmp_path / "scratch").mkdir()
    for place in ("/", str(tmp_path / "scratch")):
        command = [sys.executable, "-I", "-c", code, str(ROOT), str(path)]
        shown = subprocess.run(command, cwd=place, env={}, capture_output=True, check=True)
        assert shown.stdout.decode().split() == [
            str(tmp_path / "var/state"),
            str(tmp_path.parent / "jobs"),
        ]


def test_a_relative_config_path_is_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("batchrun.toml"))
    assert (config.path, config.folder) == (tmp_path / "batchrun.toml", tmp_path)


def test_the_folder_is_that_of_the_name_and_not_of_what_a_link_leads_to(tmp_path: Path) -> None:
    for name in ("real", "named"):
        (tmp_path / name).mkdir()
    (tmp_path / "named/batchrun.toml").symlink_to(config_file(tmp_path / "real", ""))
    (tmp_path / "current").symlink_to("named")
    config = load_config(tmp_path / "current/batchrun.toml")
    assert config.state == tmp_path / "named/state"


def test_reading_a_config_creates_nothing(tmp_path: Path) -> None:
    load_config(config_file(tmp_path, "[jobs.a]\n"))
    assert [each.name for each in tmp_path.iterdir()] == ["batchrun.toml"]


def test_a_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b'\xef\xbb\xbfstate = "s"\r\n[jobs.a]\r\n')
    assert load_config(tmp_path / "b.toml").state == tmp_path / "s"


def test_a_missing_config_is_named_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(tmp_path / "no.toml")
    assert str(caught.value) == (
        f"There is no config file {tmp_path}/no.toml.\n"
        "Nothing was changed.\n"
        "To make one, type: batchrun init\n"
        "To use another: batchrun --config PATH ..."
    )


def test_a_relative_config_in_a_deleted_working_folder_is_a_letter(tmp_path: Path) -> None:
    code = "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
    code += "import batchrun as c; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
    code += "try: c.load_config(Path('batchrun.toml'))\n"
    code += "except c.ConfigurationError as error: print(error)"
    command = [sys.executable, "-I", "-c", code, str(ROOT)]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert shown.stdout.startswith(b"There is no config file batchrun.toml.\nNothing was changed.")


def test_a_config_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"The config file {tmp_path} cannot be read.\n- Is a directory\nNothing was changed.\n"
        f"To see who may read it, type: ls -ld {tmp_path.parent} {tmp_path}"
    )


def test_a_syntax_error_is_named_with_line_and_column(tmp_path: Path) -> None:
    assert letter(tmp_path, 'state = "s"\nmin_free = = 3\n') == (
        "The config file F/batchrun.toml cannot be used.\n"
        "- it is not valid TOML: Invalid value (at line 2, column 12)\n"
        "Nothing was changed.\n"
        "Correct it, then type: batchrun --config F/batchrun.toml jobs"
    )


def test_a_config_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b'state = "\xff"')
    with pytest.raises(ConfigurationError, match="it is not valid TOML: 'utf-8' codec can't"):
        load_config(tmp_path / "b.toml")


def test_a_letter_quotes_a_name_that_would_be_two_tables(tmp_path: Path) -> None:
    found = letter(tmp_path, '[jobs."stock.push"]\nbatch_size = 0\n')
    assert '[jobs."stock.push"] batch_size = 0: a whole number' in found


def test_everything_wrong_in_a_config_stands_in_one_letter(tmp_path: Path) -> None:
    text = 'stat = "s"\nmin_free = 16\nstate = "~/s"\n'
    text += '[defaults]\nbatch_sise = 1\nmax_fresh = true\nuses = "a"\n'
    text += '[job.a]\n[jobs.".x"]\n[jobs.a-b]\n[jobs.c]\nbatch_size = 0\nuses = "a:b:c"\n'
    text += 'on_changed_source = "maybe"\n[jobs]\nd = 3\n'
    assert letter(tmp_path, text).splitlines() == [
        "The config file F/batchrun.toml cannot be used.",
        (
            '- min_free = 16: a size with its unit is wanted, such as "512MB" (1000-based)'
            ' or "512MiB" (1024-based)'
        ),
        '- state = "~/s": a path without "~", relative to the config file or whole, is wanted',
        "- stat: there is no such key or table; did you mean state?",
        "- job: there is no such key or table; did you mean jobs?",
        "- [defaults] max_fresh = true: a whole number from 0 to 1000 is wanted",
        "- [defaults] batch_sise: there is no such key or table; did you mean batch_size?",
        "- [defaults] uses: there is no such key or table here; it stands in [jobs.NAME]",
        (
            '- [jobs.".x"]: a job\'s name is 1 to 64 letters, digits, _ - . and begins with'
            " neither . nor -"
        ),
        '- [jobs.".x"] uses = ".x": "function" or "module:function" is wanted',
        '- [jobs.a-b] uses = "a-b": "function" or "module:function" is wanted',
        '- [jobs.c] uses = "a:b:c": "function" or "module:function" is wanted',
        "- [jobs.c] batch_size = 0: a whole number from 1 to 1000000 is wanted",
        '- [jobs.c] on_changed_source = "maybe": "refuse" or "fresh" is wanted',
        "- [jobs.d] must be a table, with a heading of its own",
        "Nothing was changed.",
        "Correct it, then type: batchrun --config F/batchrun.toml jobs",
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("batch_size = 10", "in [defaults] or [jobs.NAME]"),
        ('[defaults]\nmin_free = "1MB"', "at the top of the file"),
        ('[alerts]\ncritical = ["memory"]', "in [defaults] or [jobs.NAME] or [health] or "),
    ],
)
def test_a_key_in_a_wrong_place_is_told_where_it_stands(
    tmp_path: Path, text: str, where: str
) -> None:
    assert f": there is no such key or table here; it stands {where}" in letter(tmp_path, text)


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x" * 64])
def test_a_name_that_can_be_a_folder_is_a_jobs_name(tmp_path: Path, name: str) -> None:
    path = config_file(tmp_path, f'[jobs."{name}"]\nuses = "f"\n')
    assert load_config(path).job(name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a b", "é", "x" * 65, "a\\n"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert "a job's name is 1 to 64" in letter(tmp_path, f'[jobs."{name}"]\nuses = "f"\n')


def test_a_job_that_is_not_configured_is_answered_with_the_lines_that_add_it(
    tmp_path: Path,
) -> None:
    config = load_config(config_file(tmp_path, "[jobs.inventory_sync]\n[jobs.other]\n"))
    with pytest.raises(NotFound) as caught:
        config.job("inventory_sink")
    assert str(caught.value) == (
        f'There is no job "inventory_sink" in {tmp_path}/batchrun.toml;'
        " did you mean inventory_sync?\n"
        "Configured: inventory_sync, other.\n"
        "Nothing was changed.\n"
        "To add it, write there:\n"
        "[jobs.inventory_sink]\n"
        'uses = "FUNCTION"'
    )


# --- keys and the sample --------------------------------------------------------------------------


def test_the_sample_config_is_valid_as_it_stands() -> None:
    config = load_config(SAMPLE)
    assert config.job("inventory_sync").settings == {
        "feed": "jobs/sample_feed.tsv",
        "key": ["sku"],
        "database": "sqlite:stock.db",
        "table": "stock",
    }


def switched_on() -> str:
    """Return the sample config with every key that it shows as a comment."""
    return re.sub(r"^#(?=[a-z\[])", "", SAMPLE.read_text("utf-8"), flags=re.MULTILINE)


def test_the_sample_config_shows_every_key_with_its_default() -> None:
    shown, keys = tomllib.loads(switched_on()), config_keys()
    assert {key: shown[key] for key in keys[""]} == {k: v.default for k, v in keys[""].items()}
    assert shown["defaults"] == {k: v.default for k, v in keys["defaults"].items()}
    assert shown["jobs"]["inventory_sync"]["uses"] == "inventory_sync"
    assert sorted({*shown} - {*keys[""]}) == ["alerts", "defaults", "health", "jobs"]
    assert shown["alerts"].keys() == keys["alerts"].keys()
    for key in ("on", "paused_after", "timeout"):
        assert shown["alerts"][key] == keys["alerts"][key].default
    health = shown["health"]
    assert {k: health[k] for k in keys["health"]} == {
        k: v.default for k, v in keys["health"].items()
    }
    for name, rows in (("dependency", health["dependency"]), ("database", health["database"])):
        known = keys[f"health.{name}"]
        assert {key for row in rows for key in row} == known.keys()
        for key in ("timeout", "critical", "jobs", "expect", "normal"):
            assert all(
                row.get(key, known[key].default) == known[key].default for row in rows if key in row
            )


def test_the_sample_config_shows_every_setting_of_its_job_with_a_value_that_it_takes(
    tmp_path: Path,
) -> None:
    config = load_config(config_file(tmp_path, switched_on()))
    found = batchrun.load_job(config.job("inventory_sync")._replace(path=JOB)).settings
    assert found is not None
    shown = config.job("inventory_sync").settings
    assert sorted(shown) == sorted(each.name for each in fields(found))
    made: Any = build_settings(found, shown, job="inventory_sync", folder=tmp_path)
    for each in fields(found):
        if each.default not in {MISSING, None}:
            assert getattr(made, each.name) == each.default


def test_every_key_has_a_default_that_it_can_read_and_a_meaning() -> None:
    for table in config_keys().values():
        for name, key in table.items():
            assert key.meaning, name
            key.read(key.default)


# --- health ---------------------------------------------------------------------------------------


def test_health_has_defaults_and_each_need_is_a_row(tmp_path: Path) -> None:
    config = load_config(
        config_file(
            tmp_path,
            """
            [health]
            check_interval = "2m"
            critical = ["memory"]
            [[health.database]]
            name = "stock"
            url = "postgresql:///shop?host=/run/postgresql"
            normal = 3
            jobs = ["b"]
            [[health.dependency]]
            name = "cache"
            url = { env = "CACHE_URL" }
            timeout = "500ms"
            critical = true
            [[health.dependency]]
            name = "feed"
            command = ["test", "-d", "/srv/feeds"]
            [jobs.a]
            max_rss = "1GB"
            [jobs.b]
            """,
        )
    )
    health = config.health
    assert health[1:] == (60, 120, 10, 3, 2, 64_000_000, ("memory",))
    cache, feed, stock = health.needs
    assert (cache.factor, cache.name, cache.timeout_s, cache.critical) == (
        *("dependencies", "cache", 0.5, True),
    )
    assert (feed.command, feed.expect, feed.normal) == (("test", "-d", "/srv/feeds"), 200, 0)
    assert (stock.factor, stock.normal, stock.jobs) == ("connections", 3, ("b",))
    assert health.needs_of("a") == [cache, feed]
    assert health.needs_of("b") == health.needs_of(None) == [cache, feed, stock]
    assert (config.job("a").max_rss_bytes, config.job("b").max_rss_bytes) == (10**9, 0)


def test_everything_wrong_with_health_is_in_one_letter(tmp_path: Path) -> None:
    found = letter(
        tmp_path,
        """
        [health]
        sample_interva = "60s"
        check_interval = "0s"
        bad_in_a_row = 0
        critical = ["memori"]
        dependency = [3]
        [[health.database]]
        name = "stock"
        url = "sqlite:"
        [[health.database]]
        url = "tcp://localhost"
        command = ["true"]
        [[health.database]]
        name = "stock"
        url = "http:///x"
        jobs = ["syncs"]
        expect = 201
        [jobs.sync]
        """,
    )
    assert found == (
        "The config file F/batchrun.toml cannot be used.\n"
        '- [health] check_interval = "0s": at least 0.1 s is wanted\n'
        "- [health] bad_in_a_row = 0: a whole number from 1 to 100 is wanted\n"
        '- [health] critical = ["memori"]: "memory", "connections" or "dependencies" is wanted\n'
        "- [health] sample_interva: there is no such key or table; did you mean sample_interval?\n"
        "- [[health.dependency]] number 1 must be a table, with a heading of its own\n"
        '- [[health.database]] number 1 url = "sqlite:": a path is wanted, "sqlite:PATH"\n'
        '- [[health.database]] number 2 url = "tcp://localhost": a port is wanted,'
        ' "tcp://HOST:PORT"\n'
        "- [[health.database]] number 2 command: there is no such key or table here;"
        " it stands in [[health.dependency]] or [alerts]\n"
        "- [[health.database]] number 2 name: is missing; it says what messages call it\n"
        '- [[health.database]] number 3 url = "http:///x": a host is wanted, "http://HOST"\n'
        "- [[health.database]] number 3 expect: there is no such key or table here;"
        " it stands in [[health.dependency]]\n"
        '- [[health.database]] number 3 name = "stock": another one has that name\n'
        '- [[health.database]] number 3 jobs: there is no job "syncs"; did you mean sync?\n'
        "Nothing was changed.\n"
        "Correct it, then type: batchrun --config F/batchrun.toml jobs"
    )


SPACES = "an address without spaces and control characters is wanted"
PORT = 'an address with a port from 1 to 65535 or none, "HOST:PORT", is wanted'


def test_a_secret_in_a_list_or_a_table_of_its_own_is_refused_and_not_quoted(tmp_path: Path) -> None:
    text = """
        [jobs.a]
        ping = ["https://h/services/T0AB1XYZ/Qwertz99"]
        [alerts]
        webhook = { url = "https://h/services/T0AB1XYZ/Qwertz99" }
        header = ["X-Key: 99Asdfgh"]
        """
    found = mask_secrets(letter(tmp_path, text))
    assert [secret for secret in ("T0AB1XYZ", "Qwertz99", "99Asdfgh") if secret in found] == []
    assert found.count("an address that begins with one of http://, https:// is wanted") == 2


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h/p/S3CRET TOKEN", SPACES),
        ("https://h/p/S3CRET\tTOKEN", SPACES),
        ("sqlite:S3CRET\n.db", SPACES),
        ("http://h:S3CRETPORT/p", PORT),
        ("tcp://h:99999", PORT),
        ("http://[S3CRET/p", PORT),
        ("postgres://ada@h:1,g:S3CRET/x", PORT),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_and_not_quoted(url: str, wanted: str) -> None:
    with pytest.raises(ValueError, match="is wanted") as refused:
        batchrun.require_url(url)
    assert str(refused.value) == f"{wanted} (the address is not shown: it may hold a secret)"
    assert mask_secrets(f"{json.dumps(url)}, {url}") == '"***", ***'


@pytest.mark.parametrize("url", ["sqlite:a b.db", "tcp://[::1]:80", "postgres://[::1]:1,h,g:2/x"])
def test_an_address_with_a_space_in_its_path_or_colons_in_its_host_can_be_read(url: str) -> None:
    assert batchrun.require_url(url) == url


def test_the_pieces_of_a_secret_address_are_masked_and_its_words_are_not() -> None:
    batchrun.remember_url("https://hooks.example/services/T0AB1XYZ?key=Qwertz")
    assert mask_secrets("services of /T0AB1XYZ/start, Qwertz") == "services of /***/start, ***"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ('name = "x"', "url or command: is missing"),
        ('name = "x"\nurl = "tcp://h:1"\ncommand = ["a"]', "url or command: only one of them"),
        ('name = "x"\nurl = "tcp://h:1"\nexpect = 200', "expect: only a url that begins with http"),
        ('name = "x"\nurl = "tcp://h:port"', "an address with a port from"),
        ('name = "x"\nurl = "ftp://h"', "an address that begins with one of tcp:, http:, https:"),
        ('name = "x"\nurl = { env = "A", file = "b" }', "an address that begins with one of"),
        ('name = "x"\ncommand = "true"', "a list of words is wanted"),
        ('name = "x"\ncommand = ["a", 1]', "text is wanted"),
        ('name = "x"\nurl = "tcp://h:1"\ncritical = 1', "true or false is wanted"),
        ('name = ""\nurl = "tcp://h:1"', "a name of 1 to 64 characters is wanted"),
    ],
)
def test_a_dependency_that_cannot_be_asked_is_refused(tmp_path: Path, keys: str, why: str) -> None:
    assert why in letter(tmp_path, f"[[health.dependency]]\n{keys}")


def test_a_dependency_that_is_a_single_table_is_refused_with_the_heading_to_write(
    tmp_path: Path,
) -> None:
    why = "- health.database must be a list: write [[health.database]] above each"
    assert why in letter(tmp_path, '[health.database]\nname = "x"')


def test_the_password_in_the_address_of_a_dependency_is_masked(tmp_path: Path) -> None:
    text = '[[health.dependency]]\nname = "x"\nurl = "redis://:S3cr3t-99@cache"'
    load_config(config_file(tmp_path, text))
    assert mask_secrets("it is S3cr3t-99") == "it is ***"


# --- trust ----------------------------------------------------------------------------------------


def place(folder: Path, name: str, mode: int = 0o600, owner: int = ME, group: int = ME) -> Path:
    path = folder / name
    path.write_text("")
    own(path, mode, owner, group)
    return path


def own(path: Path, mode: int, owner: int = ME, group: int = ME) -> None:
    if os.geteuid():
        pytest.skip("only root can give files to others")
    os.chown(path, owner, group)
    path.chmod(mode)


def distrust(path: Path, what: str = "the config file", euid: int = ME) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_trusted(path, what=what, euid=euid)
    return str(caught.value)


def test_a_file_of_ones_own_or_of_root_is_trusted(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    check_trusted(place(tmp_path, "a", 0o644), what="the job file", euid=ME)
    check_trusted(place(tmp_path, "b", 0o644, 0, 0), what="the job file", euid=ME)


def test_a_file_that_everyone_can_write_is_refused_with_the_chmod_to_type(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    path = place(tmp_path, "a", 0o646)
    assert distrust(path) == (
        f"Other users could change the config file: {path}.\n"
        f"- {path} can be written to by everyone (mode 0646),"
        " and jobs are code that runs with your rights\n"
        "Nothing was changed.\n"
        f"To end this, type: chmod go-w {path}"
    )


def test_a_file_that_a_group_of_several_can_write_is_refused(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    path = place(tmp_path, "a", 0o664, ME, 100)
    assert "can be written to by its group (mode 0664)" in distrust(path)
    assert distrust(path).endswith(f"chmod go-w {path}")


def test_a_file_that_roots_own_group_can_write_is_trusted(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    check_trusted(place(tmp_path, "a", 0o664, 0, 0), what="the job file", euid=ME)


def test_a_file_that_the_owners_private_group_can_write_is_trusted(tmp_path: Path) -> None:
    names = {group.gr_gid: group.gr_name for group in grp.getgrall() if not group.gr_mem}
    private = (u for u in pwd.getpwall() if u.pw_uid and names.get(u.pw_gid) == u.pw_name)
    user = next(private, None)
    if user is None:
        pytest.skip("no user here has a private group")
    own(tmp_path, 0o775, user.pw_uid, user.pw_gid)
    path = place(tmp_path, "a", 0o664, user.pw_uid, user.pw_gid)
    check_trusted(path, what="the job file", euid=user.pw_uid)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    path = place(tmp_path, "a", 0o600, 4242)
    assert f"{path} belongs to 4242" in distrust(path)


def test_root_does_not_trust_the_file_of_a_user(tmp_path: Path) -> None:
    own(tmp_path, 0o755, 0, 0)
    said = distrust(place(tmp_path, "a", 0o600, 4242), euid=0)
    assert "type: sudo -u 4242 batchrun" in said.lower()


def test_a_file_in_a_folder_that_everyone_can_write_is_refused_unless_it_is_sticky(
    tmp_path: Path,
) -> None:
    own(tmp_path, 0o777)
    path = place(tmp_path, "a")
    assert distrust(path).endswith(f"To end this, type: chmod go-w {tmp_path}")
    own(tmp_path, 0o1777, 0, 0)
    check_trusted(path, what="the config file", euid=ME)


def test_a_sticky_jobs_folder_that_everyone_can_write_is_refused(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    (tmp_path / "jobs").mkdir()
    own(tmp_path / "jobs", 0o1777)
    assert "(mode 1777)" in distrust(tmp_path / "jobs", "the jobs folder")


def test_both_folders_of_a_linked_file_are_looked_at(tmp_path: Path) -> None:
    own(tmp_path, 0o755)
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
    path = place(tmp_path / "shut", "a")
    (tmp_path / "open/a").symlink_to(path)
    own(tmp_path / "open", 0o777)
    own(tmp_path / "shut", 0o755)
    assert distrust(tmp_path / "open/a").endswith(f"chmod go-w {tmp_path}/open")


def test_a_loop_of_links_is_a_letter(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert "cannot be looked at" in distrust(tmp_path / "a")


def test_a_file_that_is_not_there_is_a_letter(tmp_path: Path) -> None:
    assert distrust(tmp_path / "a", "the job file").startswith(
        f"The job file cannot be looked at: {tmp_path}/a.\n- No such file or directory\n"
    )


# --- settings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything:
    """Settings of every type."""

    text: str
    count: int
    ratio: float
    on: bool
    feed: Path
    price: Decimal
    day: date
    at: datetime
    key: tuple[str, ...]
    sizes: list[int]
    names: dict[str, int]
    mode: Literal["fast", "safe"]
    limit: int | None
    password: Secret


GOOD: dict[str, Any] = tomllib.loads("""
text = "a"
count = 3
ratio = 2
on = true
feed = "in/feed.tsv"
price = "1.50"
day = 2026-01-31
at = 2026-01-31T09:00:00Z
key = ["sku", "site"]
sizes = [1, 2]
names = { a = 1 }
mode = "safe"
limit = 5
password = "S3cr3t"
""")


def settings_letter(cls: type, raw: dict[str, Any], **more: Any) -> str:  # noqa: ANN401
    with pytest.raises(ConfigurationError) as caught:
        build_settings(cls, raw, job="a", **{"folder": Path("/shop"), **more})
    return str(caught.value)


def test_settings_are_of_their_declared_types(tmp_path: Path) -> None:
    made: Any = build_settings(Everything, GOOD, job="a", folder=tmp_path)
    assert made.ratio == 2.0
    assert type(made.ratio) is float
    assert made.feed == tmp_path / "in/feed.tsv"
    assert made.price == Decimal("1.50")
    assert made.key == ("sku", "site")
    assert (made.day, made.names, made.limit) == (date(2026, 1, 31), {"a": 1}, 5)
    assert made.at.isoformat() == "2026-01-31T09:00:00+00:00"
    assert made.password.reveal() == "S3cr3t"


def test_overrides_are_read_by_the_declared_type() -> None:
    spoken = {"text": "3", "count": "7", "ratio": "0.5", "on": "false", "feed": "/x", "price": "2"}
    spoken |= {"day": "2026-02-01", "key": "a,b", "sizes": "4,5", "mode": "fast", "limit": "none"}
    made: Any = build_settings(Everything, GOOD, job="a", folder=Path("/shop"), overrides=spoken)
    assert (made.text, made.count, made.ratio, made.on) == ("3", 7, 0.5, False)
    assert (made.feed, made.price, made.day) == (Path("/x"), Decimal(2), date(2026, 2, 1))
    assert (made.key, made.sizes, made.mode, made.limit) == (("a", "b"), [4, 5], "fast", None)


def test_every_missing_setting_stands_in_one_letter_with_its_type() -> None:
    assert settings_letter(Everything, {}).splitlines() == [
        'The settings of job "a" cannot be used.',
        "- text: is missing; a value of type str is wanted",
        "- count: is missing; a value of type int is wanted",
        "- ratio: is missing; a value of type float is wanted",
        "- on: is missing; a value of type bool is wanted",
        "- feed: is missing; a value of type Path is wanted",
        "- price: is missing; a value of type Decimal is wanted",
        "- day: is missing; a value of type date is wanted",
        "- at: is missing; a value of type datetime is wanted",
        "- key: is missing; a value of type tuple[str, ...] is wanted",
        "- sizes: is missing; a value of type list[int] is wanted",
        "- names: is missing; a value of type dict[str, int] is wanted",
        "- mode: is missing; a value of type Literal['fast', 'safe'] is wanted",
        "- limit: is missing; a value of type int | None is wanted",
        "- password: is missing; a value of type Secret is wanted",
        "Nothing was changed.",
        "Correct [jobs.a] in the config file or the --set options; type it again.",
    ]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("text", 3, "str"),
        ("count", True, "int"),
        ("count", 1.0, "int"),
        ("count", "3", "int"),
        ("ratio", True, "float"),
        ("ratio", 10**400, "float"),
        ("on", 1, "bool"),
        ("feed", 1, "Path"),
        ("price", 1.5, "Decimal"),
        ("price", "x", "Decimal"),
        ("day", "2026-01-31", "date"),
        ("day", datetime(2026, 1, 31), "date"),  # noqa: DTZ001
        ("at", date(2026, 1, 31), "datetime"),
        ("key", "sku", "tuple[str, ...]"),
        ("key", [1], "tuple[str, ...]"),
        ("names", {"a": "b"}, "dict[str, int]"),
        ("mode", "fats", "Literal['fast', 'safe']"),
        ("limit", "x", "int | None"),
        ("text", {"enw": "X"}, "str"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object, wanted: str) -> None:
    shown = settings_letter(Everything, {**GOOD, name: value}).splitlines()[1]
    assert shown == f"- {name}: a value of type {wanted} is wanted"


def test_a_wrong_override_is_answered_with_its_type() -> None:
    shown = settings_letter(
        Everything, GOOD, overrides={"count": "x", "on": "1", "key2": "y", "limit": "1\n_a = 2"}
    )
    assert shown.splitlines()[1:5] == [
        "- count: a value of type int is wanted",
        "- on: a value of type bool is wanted",
        "- limit: a value of type int | None is wanted",
        "- key2: there is no such setting; did you mean key?",
    ]


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("text", "3", "3"),
        ("text", "true", "true"),
        ("text", '"a"', '"a"'),
        ("text", "", ""),
        ("text", "none", "none"),
        ("key", "", ()),
        ("key", "a", ("a",)),
        ("key", "1,2", ("1", "2")),
        ("key", '["a,b", "c"]', ("a,b", "c")),
        ("names", "{ a = 2, b = 3 }", {"a": 2, "b": 3}),
        ("price", "1.50", Decimal("1.50")),
        ("ratio", "2", 2.0),
        ("limit", "none", None),
        ("at", "2026-01-31T09:00:00", datetime(2026, 1, 31, 9)),  # noqa: DTZ001
        ("mode", "safe", "safe"),
    ],
)
def test_the_text_of_an_override_means_what_fits_the_declared_type(
    name: str, text: str, made: object
) -> None:
    settings: Any = build_settings(
        Everything, GOOD, job="a", folder=Path("/shop"), overrides={name: text}
    )
    assert (type(getattr(settings, name)), getattr(settings, name)) == (type(made), made)


@pytest.mark.parametrize("raw", ["~/feed.tsv", "", "feed\0.tsv"])
def test_a_path_among_the_settings_has_no_home_either(raw: str) -> None:
    shown = settings_letter(Everything, {**GOOD, "feed": raw}).splitlines()[1]
    assert shown == ('- feed: a path without "~", relative to the config file or whole, is wanted')


def test_a_secret_is_not_taken_from_the_command_line() -> None:
    shown = settings_letter(Everything, GOOD, overrides={"password": "hunter2"})
    assert "password: a secret on a command line is seen by others; put it in the config" in shown
    assert "hunter2" not in shown


def test_a_mistyped_option_is_named_where_it_is_met_as_a_setting() -> None:
    shown = settings_letter(Everything, {**GOOD, "batch_sise": 3})
    assert "- batch_sise: there is no such setting; did you mean batch_size?" in shown


def test_a_setting_named_like_an_option_is_refused() -> None:
    @dataclass(frozen=True)
    class Settings:
        batch_size: int = 3

    shown = settings_letter(Settings, {})
    assert "- batch_size: is an option of batchrun; rename the setting" in shown


def test_an_error_of_the_settings_class_itself_is_a_letter_without_its_secrets() -> None:
    @dataclass(frozen=True)
    class Settings:
        password: str

        def __post_init__(self) -> None:
            raise ValueError("too short: " + self.password)

    assert "- too short: ***\n" in settings_letter(Settings, {"password": "hunter2"})


def test_text_is_read_from_the_environment_or_a_file_and_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Settings:
        url: str
        token: Secret | None = None

    monkeypatch.setenv("STOCK_URL", "https://stock")
    (tmp_path / "token").write_text("abcd1234\n")
    raw = {"url": {"env": "STOCK_URL"}, "token": {"file": "token"}}
    made: Any = build_settings(Settings, raw, job="a", folder=tmp_path)
    assert (made.url, made.token.reveal()) == ("https://stock", "abcd1234")
    assert mask_secrets("got abcd1234 from https://stock") == "got *** from ***"


def test_a_missing_environment_variable_or_file_is_a_letter(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Settings:
        url: str
        token: Secret | None

    raw = {"url": {"env": "NOT_SET_ANYWHERE"}, "token": {"file": "no"}}
    shown = settings_letter(Settings, raw, folder=tmp_path)
    assert "- url: the environment variable NOT_SET_ANYWHERE is not set\n" in shown
    assert f"- token: {tmp_path}/no cannot be read: No such file or directory\n" in shown


# --- secrets --------------------------------------------------------------------------------------


def test_a_secret_is_shown_as_its_mask_only() -> None:
    secret = Secret("S3cr3t")
    assert f"{secret} {secret!r} {secret!s:>5}" == "*** ***   ***"
    assert secret.reveal() == "S3cr3t"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgres://u:S3cr3t@h:5432/db failed", "postgres://u:***@h:5432/db failed"),
        ("redis://:S3@cr3t@h", "redis://:***@h"),
        ("postgres://u:S3/cr3t@h/db", "postgres://u:***@h/db"),
        ("http://h:8080/a@b ssh://git@h", "http://h:8080/a@b ssh://git@h"),
        ('{"url":"http://h:80","mail":"x@y"}', '{"url":"http://h:80","mail":"x@y"}'),
        ("host=h password=S3cr3t user=u", "host=h password=*** user=u"),
        ("password='S3 cr3t' x", "password='***' x"),
        ("https://h/?token=S3cr3t&a=1", "https://h/?token=***&a=1"),
        ('{"api_key": "S3\\"cr3t", "a": 1}', '{"api_key": "***", "a": 1}'),
        ("{'client_secret': 'S3cr3t', 'a': 1}", "{'client_secret': '***', 'a': 1}"),
        (r'"{\"token\":\"S3cr3t\",\"a\":1}"', r'"{\"token\":\"***\",\"a\":1}"'),
        ("connect(password=S3cr3t)", "connect(password=***)"),
        ('password="S3cr3t cut off', 'password="***'),
        ("DB_PASS=S3cr3t bypass=1 compass=n", "DB_PASS=*** bypass=1 compass=n"),
        ("Authorization: Bearer S3cr3t.x", "Authorization: Bearer ***"),
        ('"authorization": "Basic UzM=", "a"', '"authorization": "Basic ***", "a"'),
        ("X-Api-Key: S3cr3t", "X-Api-Key: ***"),
        ("tool --db-password S3cr3t --x 1", "tool --db-password *** --x 1"),
        ("tool --api-key S3cr3t --password-file f", "tool --api-key *** --password-file f"),
        ('password = { env = "DB" }', 'password = { env = "DB" }'),
        ("max_tokens=5 secretary=x if token == 1", "max_tokens=5 secretary=x if token == 1"),
        ("", ""),
    ],
)
def test_secrets_are_masked_by_their_form_and_the_rest_stays(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked


def test_no_secret_of_a_settings_url_is_left_in_an_error_about_it() -> None:  # K41
    @dataclass(frozen=True)
    class Settings:
        database: str

    build_settings(
        Settings, {"database": "postgres://u:S3%40cr3t@h/db"}, job="a", folder=Path("/shop")
    )
    shown = mask_secrets("cannot log in with 'S3@cr3t' (S3%40cr3t) at postgres://u:S3%40cr3t@h/db")
    assert shown == "cannot log in with '***' (***) at postgres://u:***@h/db"


def test_a_secret_in_a_table_of_settings_is_masked_by_the_name_of_its_key() -> None:
    @dataclass(frozen=True)
    class Settings:
        headers: dict[str, str]

    headers = {"X-Api-Key": "S3cr3t", "Accept": "text/csv"}
    build_settings(Settings, {"headers": headers}, job="a", folder=Path("/shop"))
    assert mask_secrets("S3cr3t for text/csv") == "*** for text/csv"


def test_a_password_that_is_also_a_name_is_masked_in_its_place_only() -> None:
    @dataclass(frozen=True)
    class Settings:
        database: str

    build_settings(
        Settings, {"database": "postgres://stock:stock@h/stock"}, job="a", folder=Path("/shop")
    )
    assert mask_secrets("stock in postgres://stock:stock@h") == "stock in postgres://stock:***@h"


def test_a_remembered_secret_is_masked_as_python_json_and_urls_write_it() -> None:
    secret = 'p"w\n\\x y'
    batchrun.remember_secret(secret)
    for form in (secret, repr(secret), json.dumps(secret), "p%22w%0A%5Cx%20y"):
        assert "x y" not in mask_secrets(f"<{form}>").replace("%20", " ")


def test_a_short_value_is_not_remembered() -> None:
    batchrun.remember_secret("abc")
    assert mask_secrets("abc") == "abc"


@pytest.mark.parametrize(
    "unit", ["a", "://", "://a:b", "password=", 'password="', "password", " ", "\\", 'token=\\"',
             "--a-", "---", "Authorization: ", "bearer ", ")", "pass=)", "'", "\0", "://a:b/", "=:"]
)  # fmt: skip
def test_masking_takes_linear_time_on_hostile_text(unit: str) -> None:
    def seconds(size: int) -> float:
        text = "password=" + unit * (size // len(unit))
        begun = time.process_time()
        mask_secrets(text)
        return time.process_time() - begun

    assert seconds(400_000) < 8 * seconds(100_000) + 0.2


def test_a_secret_looking_name_or_value_is_recognised() -> None:
    for name in ("password", "DB_PASSWORD", "api-key", "apiToken", "client_secret", "db_pass"):
        assert looks_secret(name, "x"), name
    assert looks_secret("database", "postgres://u:p@h/db")
    for name in ("key", "feed", "compass", "max_tokens", "password_file"):
        assert not looks_secret(name, "x"), name


# --- identity -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identified:
    """Settings of which some make a run what it is."""

    feed: Path = Path("/app/1/feed.tsv")
    url: str = "postgres://u:one@h/db"
    token: Secret | None = None
    login: Secret | None = None
    api_key: str = "k1"
    workers: int = field(default=1, metadata={"identity": False})
    key: tuple[str, ...] = ("sku",)


APP = Path("/app/1")


def changed(before: object, after: object) -> list[str]:
    return changed_settings(identity(before, APP), after, APP)


def test_a_changed_setting_is_named() -> None:
    assert sorted(identity(Identified(), APP)) == ["feed", "key", "login", "url"]
    assert all(len(digest) == 16 for digest in identity(Identified(), APP).values())
    assert changed(Identified(), Identified()) == []
    assert changed(Identified(), Identified(key=("sku", "site"))) == ["key"]
    assert changed(Identified(), Identified(key=("x",), feed=Path("x"))) == ["feed", "key"]
    assert changed(None, None) == []


def test_the_digest_of_all_settings_follows_each_of_them() -> None:
    digests = {
        settings_digest(identity(settings, APP))
        for settings in (Identified(), Identified(key=("x",)), Identified(feed=Path("x")), None)
    }
    assert len(digests) == 4
    assert all(len(digest) == 64 for digest in digests)


def test_a_changed_secret_is_no_changed_setting() -> None:
    after = Identified(
        url="postgres://u:two@h/db", token=Secret("S3cr3t"), login=Secret("u:p1"), api_key="k2"
    )
    assert changed(Identified(workers=9), after) == []
    assert changed(after, Identified()) == []
    assert identity(replace(Identified(), workers=9), APP) == identity(Identified(), APP)
    assert changed(Identified(), Identified(url="postgres://u:one@h2/db")) == ["url"]


def test_a_secret_that_was_remembered_does_not_change_what_is_identified() -> None:
    before = identity(Identified(key=("stock",)), APP)
    batchrun.remember_secret("stock")
    assert identity(Identified(key=("stock",)), APP) == before


def test_a_deploy_into_another_folder_is_no_changed_setting() -> None:
    old = identity(Identified(), APP)
    new = identity(Identified(feed=Path("/app/2/feed.tsv")), Path("/app/2"))
    assert old == new


@dataclass(frozen=True)
class Newer(Identified):
    """The settings of a later version of the job."""

    site: str = "north"
    rows: list[str] = field(default_factory=list)


def test_a_setting_that_a_newer_version_adds_has_changed_only_if_it_is_not_its_default() -> None:
    assert changed(Identified(), Newer()) == []
    assert changed(Identified(), Newer(site="south")) == ["site"]
    assert changed(Identified(), Newer(rows=["a"])) == ["rows"]
    assert changed(Newer(site="south"), Newer()) == ["site"]


def test_a_setting_that_a_newer_version_adds_without_a_default_has_changed() -> None:
    @dataclass(frozen=True)
    class Settings:
        site: str

    assert changed(None, Settings("north")) == ["site"]


def test_a_setting_that_the_job_does_not_have_any_more_has_changed() -> None:
    assert changed(Newer(), Identified()) == ["rows", "site"]


def test_identities_are_the_same_in_every_process() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport test_03_configuration as t\n"
    code += "print(t.settings_digest(t.identity(t.Identified(), t.APP)))"
    shown = {
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tests")},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert shown == {settings_digest(identity(Identified(), APP)).encode() + b"\n"}


def test_every_config_key_is_a_field_of_its_row() -> None:
    keys = config_keys()
    of_jobs = set(batchrun.JobConfig._fields)
    assert {key.field for key in keys[""].values()} < set(batchrun.Config._fields)
    assert {key.field for key in keys["jobs.NAME"].values()} < of_jobs
    assert keys["jobs.NAME"].keys() - keys["defaults"].keys() == {"uses", "tags", "ping"}
    assert keys[""]["min_free"].field == "min_free_bytes"
    assert keys["defaults"]["stop_grace"].field == "stop_grace_s"
