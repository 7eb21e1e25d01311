"""The shipped export is whole, of one moment, and leaves nothing behind when interrupted."""

import contextlib
import csv
import runpy
import sqlite3
from pathlib import Path

import pytest
from conftest import ROOT, Project, clean_environment, wait_for

ROWS = [
    (f"sku-{n:03}", n, 'a "quoted", text\nof two lines' if n % 7 == 0 else None) for n in range(95)
]
CONFIG = """\
[defaults]
batch_size = 10
[jobs.stock_export]
file = "stock.csv"
"""


@pytest.fixture
def shop(project: Project) -> Project:
    job = (ROOT / "jobs" / "stock_export.py").read_text(encoding="utf-8")
    project.write(CONFIG, stock_export=job)
    ask(project, "CREATE TABLE stock (sku TEXT PRIMARY KEY, quantity INTEGER, note TEXT)")
    with contextlib.closing(sqlite3.connect(project.folder / "stock.db")) as stock, stock:
        stock.executemany("INSERT INTO stock VALUES (?, ?, ?)", ROWS)
    return project


def ask(project: Project, sql: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(project.folder / "stock.db")) as stock, stock:
        return stock.execute(sql).fetchall()


def exported(project: Project) -> list[list[str]]:
    with (project.folder / "stock.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def as_text(rows: list[tuple[str, int, str | None]]) -> list[list[str]]:
    return [["sku", "quantity", "note"], *([sku, str(n), note or ""] for sku, n, note in rows)]


def left(project: Project) -> list[str]:
    """Return what only belongs to an export that is not complete: tables and files."""
    tables = ask(project, "SELECT name FROM sqlite_master WHERE name LIKE 'export%'")
    return [str(name) for (name,) in tables] + [p.name for p in project.folder.glob(".stock.csv*")]


def test_a_table_is_exported_as_it_is(shop: Project) -> None:
    ended = shop.run("run", "stock_export")
    assert (ended.code, ended.err) == (0, "")
    assert exported(shop) == as_text(ROWS)
    assert left(shop) == []


def test_an_empty_table_is_a_file_with_a_header(shop: Project) -> None:
    ask(shop, "DELETE FROM stock")
    assert shop.run("run", "stock_export").code == 0
    assert exported(shop) == as_text([])


def test_a_paused_export_goes_on_with_the_table_as_it_was(shop: Project) -> None:
    (shop.folder / "stock.csv").write_text("yesterday's\n")
    assert shop.run("run", "stock_export", "--batches", "3").code == 75
    assert (shop.folder / "stock.csv").read_text() == "yesterday's\n"
    assert len(left(shop)) == 2
    ask(shop, "UPDATE stock SET quantity = -1")
    assert shop.run("resume").code == 0
    assert exported(shop) == as_text(ROWS)
    assert left(shop) == []


def test_a_cancelled_export_leaves_neither_table_nor_file(shop: Project) -> None:
    shop.run("run", "stock_export", "--batches", "3")
    assert len(left(shop)) == 2
    assert shop.run("cancel", "stock_export").code == 0
    assert left(shop) == []
    assert not (shop.folder / "stock.csv").exists()


def test_a_fresh_export_removes_what_the_one_before_left(shop: Project) -> None:
    shop.run("run", "stock_export", "--batches", "3")
    assert shop.run("run", "stock_export", "--fresh").code == 0
    assert exported(shop) == as_text(ROWS)
    assert left(shop) == []


POINTS = [  # commits 1 and 2 are steps, 3 to 12 batches, 13 the end of the loop, 14 the publishing
    "cleanup.recorded@1",
    "target.commit@1",
    "commit.begun@2",
    "batch.handed_out@4",
    "batch.yielded@4",
    "ledger.committed@6",
    "commit.begun@14",
    "cleanup.begun@2",
    "cleanup.done@1",
    "worker.ended",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_of_both_processes_leaves_a_whole_export_and_nothing_else(
    shop: Project, point: str
) -> None:
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": f"{point}=kill-both"}
    assert shop.run("run", "stock_export", env=env).code == -9
    wait_for(lambda: not shop.living(), "the worker to be gone")
    assert shop.run("resume").code == 0
    assert exported(shop) == as_text(ROWS)
    assert left(shop) == []


def test_a_killed_export_that_is_cancelled_leaves_nothing(shop: Project) -> None:
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": "batch.handed_out@5=kill-both"}
    shop.run("run", "stock_export", env=env)
    wait_for(lambda: not shop.living(), "the worker to be gone")
    assert len(left(shop)) == 2
    assert shop.run("cancel", "stock_export").code == 0
    assert left(shop) == []


@pytest.mark.parametrize("lost", ["cut", "removed"])
def test_a_file_that_lost_rows_is_not_published_and_a_new_export_can_be_made(
    shop: Project, lost: str
) -> None:
    shop.run("run", "stock_export", "--batches", "3")
    (growing,) = shop.folder.glob(".stock.csv*")
    growing.write_text("sku\n") if lost == "cut" else growing.unlink()
    ended = shop.run("resume")
    assert ended.code == 1
    said = f"{growing} has lost rows that were written. Cancel this export and run it again"
    assert said in ended.err
    assert not (shop.folder / "stock.csv").exists()
    assert shop.run("cancel", "stock_export").code == 0
    assert shop.run("run", "stock_export").code == 0
    assert exported(shop) == as_text(ROWS)


def test_a_longer_batch_that_was_not_committed_leaves_no_tail(tmp_path: Path) -> None:
    write_at = runpy.run_path(str(ROOT / "jobs" / "stock_export.py"))["write_at"]
    growing = tmp_path / "growing"
    growing.write_text("committed, and a batch as an older version wrote it")
    write_at(growing, len("committed"), b" anew")
    assert growing.read_text() == "committed anew"
