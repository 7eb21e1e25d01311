"""The ledger's views: true, named with their units, and open to any other SQLite tool."""

import contextlib
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from conftest import ROOT, run_in_two_attempts

import batchrun
from batchrun import Host, open_ledger

README = (ROOT / "README.md").read_text(encoding="utf-8")
VIEWS = re.findall(r"CREATE VIEW (\w+)", batchrun.VIEWS)


@pytest.fixture(scope="module")
def ledger_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a run of two attempts, at rest."""
    begin = ('ctx.on_exit(print, "gone")', "ctx.on_exit(lambda: 1 / 0)")
    folder = tmp_path_factory.mktemp("views")
    project, code = run_in_two_attempts(folder, *begin, reason="odd", error="not yet")
    assert code == 3  # one of its releases fails
    return project.state / "ledger.db"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger as a stranger would: with Python's own SQLite, for reading."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def rows(path: Path, sql: str) -> list[dict[str, Any]]:
    with opened(path) as connection:
        return [dict(row) for row in connection.execute(sql)]


def columns(path: Path, view: str) -> list[str]:
    with opened(path) as connection:
        return [column[0] for column in connection.execute(f"SELECT * FROM {view}").description]


@pytest.mark.parametrize("view", VIEWS)
def test_the_readme_names_each_view_with_all_its_columns(ledger_path: Path, view: str) -> None:
    [told] = re.findall(rf"^\| `{view}` \|[^|]*\|(.*)\|$", README, re.MULTILINE)
    assert re.findall(r"`(\w+)`", told) == columns(ledger_path, view)


def test_a_number_that_has_a_unit_has_it_at_the_end_of_its_name(ledger_path: Path) -> None:
    counted = {
        *("generation", "exit_code", "signal", "charged", "place", "number", "connections"),
        *("open_files", "threads", "children", "operations"),
        *("attempts", "commits", "batches", "records", "rejected"),
    }
    for view in VIEWS:
        with opened(ledger_path) as connection:
            found = connection.execute(f"SELECT * FROM {view}").fetchall()
        for row in found:
            numbers = {n for n in row.keys() if isinstance(row[n], int | float)}  # noqa: SIM118
            unnamed = {n for n in numbers if not re.search(r"_(s|bytes|percent)$", n)} - counted
            assert (view, unnamed) == (view, set())


def test_a_run_is_summed_up_the_same_in_each_view(ledger_path: Path) -> None:
    [run] = rows(ledger_path, "SELECT * FROM run_summary")
    assert (run["job"], run["state"], run["records"], run["rejected"]) == (
        "sync",
        "succeeded",
        50,
        1,
    )
    assert (run["attempts"], run["batches"], run["until_at"]) == (2, 5, run["ended_at"])
    apart_s = batchrun.seconds_between(run["began_at"], run["ended_at"])
    assert run["duration_s"] == pytest.approx(apart_s, abs=0.002)
    sums = "sum(records) AS records, sum(rejected) AS rejected"
    both = {"records": 50, "rejected": 1}
    assert rows(ledger_path, f"SELECT {sums} FROM attempt_summary") == [both]
    minutes = rows(ledger_path, f"SELECT {sums}, sum(batches) AS batches FROM batch_rate")
    assert minutes == [both | {"batches": 5}]
    [worked] = rows(ledger_path, "SELECT sum(duration_s) AS s FROM attempt_summary")
    assert run["at_work_s"] == pytest.approx(worked["s"], abs=0.01)
    assert run["at_work_s"] < run["duration_s"]
    assert run["records_per_s"] == pytest.approx(50 / run["at_work_s"], rel=0.01)


def test_attempts_tell_how_they_ended_and_what_they_released_in_order(ledger_path: Path) -> None:
    sql = "SELECT ending, charged, commits, records FROM attempt_summary ORDER BY generation"
    assert [tuple(row.values()) for row in rows(ledger_path, sql)] == [
        ("raised", 1, 3, 30),
        ("succeeded", 0, 3, 20),  # two batches, and the end of the loop
    ]
    sql = "SELECT place, name, error FROM release_order WHERE generation = 2 ORDER BY place"
    assert [tuple(row.values()) for row in rows(ledger_path, sql)] == [
        (1, "the job's own frame", None),
        (2, "<lambda>", "ZeroDivisionError: division by zero"),
        (3, "print", None),
    ]


def test_a_minute_has_its_rate_and_its_shortest_and_longest_batch(tmp_path: Path) -> None:
    path = filled(
        tmp_path,
        "INSERT INTO batch (run, number, generation, kind, loop, cursor, read, rejected, counts,"
        " hash, at, elapsed_s) VALUES"
        " (1, 1, 1, 'batch', 'main', '', 100, 0, '{}', '', '2026-01-31T10:00:01.000Z', 1.0),"
        " (1, 2, 1, 'batch', 'main', '', 200, 3, '{}', '', '2026-01-31T10:00:59.999Z', 3.0),"
        " (1, 3, 1, 'batch', 'main', '', 60, 0, '{}', '', '2026-01-31T10:01:00.000Z', 2.0),"
        " (1, 4, 1, 'loop end', 'main', '', 0, 0, '{}', '', '2026-01-31T10:01:01.000Z', 0.0)",
    )
    assert [tuple(row.values())[2:] for row in rows(path, "SELECT * FROM batch_rate")] == [
        ("2026-01-31T10:00:00Z", 2, 300, 3, 5.0, 1.0, 2.0, 3.0),
        ("2026-01-31T10:01:00Z", 1, 60, 0, 1.0, 2.0, 2.0, 2.0),
    ]


def test_health_checks_readings_and_operations_are_told_by_the_runs_id(tmp_path: Path) -> None:
    path = filled(
        tmp_path,
        "INSERT INTO health_check VALUES (1, '2026-01-31T10:00:00.000Z', 1, 1,"
        " 'bad: 3 MB: low', 'ok: all answer', 'unknown: none', 'pause', 'low', 0.5)",
        "INSERT INTO reading (at, run, generation, number, rss_bytes, pressure)"
        " VALUES ('2026-01-31T10:00:00.000Z', 1, 1, 7, 1000, 1.5)",
        "INSERT INTO operation (key, claimed_at, outcome, ended_at, job, run, generation, number,"
        " arguments) SELECT *, 'sync', 1, 1, 1, x'' FROM (VALUES"
        " ('a', '2026-01-31T10:00:00.000Z', NULL, NULL),"
        " ('b', '2026-01-31T10:00:01.000Z', 'done', '2026-01-31T10:00:02.000Z'),"
        " ('c', '2026-01-31T10:00:02.000Z', 'done', '2026-01-31T10:00:03.000Z'))",
    )
    [check] = rows(path, "SELECT * FROM health_timeline")
    assert (check["run"], check["memory"], check["connections"], check["dependencies"]) == (
        *("r1", "bad", "ok", "unknown"),
    )
    [reading] = rows(path, "SELECT * FROM reading_timeline")
    assert (reading["run"], reading["number"], reading["pressure_percent"]) == ("r1", 7, 1.5)
    assert [tuple(row.values()) for row in rows(path, "SELECT * FROM operation_summary")] == [
        ("r1", "sync", "done", 2, "2026-01-31T10:00:01.000Z", "2026-01-31T10:00:03.000Z"),
        ("r1", "sync", "open", 1, "2026-01-31T10:00:00.000Z", None),
    ]


def test_an_attempt_whose_owner_vanished_is_at_work_until_the_last_that_is_known(
    tmp_path: Path,
) -> None:
    path = filled(
        tmp_path,
        "UPDATE run SET number = 1, read = 90, generation = 2",
        "INSERT INTO attempt (run, generation, supervisor, began_at, ended_at, from_number)"
        " VALUES (1, 1, '{}', '2026-01-31T10:00:00.000Z', NULL, 0),"
        " (1, 2, '{}', '2026-01-31T10:01:00.000Z', NULL, 0)",
        "INSERT INTO batch (run, number, generation, kind, loop, cursor, read, rejected, counts,"
        " hash, at, elapsed_s) VALUES"
        " (1, 1, 2, 'batch', 'main', '', 90, 0, '{}', '', '2026-01-31T10:01:30.000Z', 1.0)",
    )
    [run] = rows(path, "SELECT * FROM run_summary")
    known = ("until_at", "duration_s", "at_work_s", "records_per_s", "ended_at")
    assert [run[name] for name in known] == ["2026-01-31T10:01:30.000Z", 90.0, 30.0, 3.0, None]
    assert [
        (a["records"], a["duration_s"]) for a in rows(path, "SELECT * FROM attempt_summary")
    ] == [
        *((0, None), (90, None)),
    ]


def test_a_question_about_one_run_reads_no_other(ledger_path: Path) -> None:
    for view in VIEWS:
        plan = rows(ledger_path, f"EXPLAIN QUERY PLAN SELECT * FROM {view} WHERE run = 'x'")
        read = [
            row["detail"] for row in plan if re.match(r"SCAN (?!j VIRTUAL|CONST)", row["detail"])
        ]
        assert (view, read) == (view, [line for line in read if line == f"SCAN {view}"])


def test_the_command_in_the_readme_and_its_copy_work(ledger_path: Path) -> None:
    if not shutil.which("sqlite3"):
        pytest.skip("NO SQLITE3: the shell is not here to try the README's commands")
    text = README.partition("# Open the ledger")[2]
    [query] = re.findall(r"^\$ (sqlite3 (?:.*\\\n)*.*)", text, re.MULTILINE)
    [copy] = re.findall(r"`(sqlite3 .* \"\.backup copy\.db\")`", text)
    folder = ledger_path.parent.parent
    for words in (query.replace("inventory_sync", "sync"), copy):
        told = subprocess.run(
            ["sh", "-c", words], cwd=folder, capture_output=True, text=True, check=True
        )
        assert told.stderr == ""
        assert words is copy or re.search(r"succeeded +50 +\d", told.stdout)
    assert rows(folder / "copy.db", "SELECT records FROM run_summary") == [{"records": 50}]


def filled(folder: Path, *statements: str) -> Path:
    """Make a ledger with one run, `r1`, that runs since 10:00:00, and more rows; let go of it."""
    folder.chmod(0o700)
    path = folder / "ledger.db"
    open_ledger(path, Host(), create=True).close()
    begun = "'2026-01-31T10:00:00.000Z'"
    columns = "id, job, state, generation, created_at, changed_at"
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        values = f"'r1', 'sync', 'reserved', 1, {begun}, {begun}"
        connection.execute(f"INSERT INTO run ({columns}) VALUES ({values})")
        for statement in statements:
            connection.execute(statement)
    return path
