"""The shipped push changes each listing once, through kills and refusals, and can be taken back."""

import contextlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, clean_environment, wait_for

CONFIG = """\
[defaults]
batch_size = 10
settle = "1s"
max_rejects = 5
retry_for = "0"
[jobs.stock_push]
marketplace = "{url}"
workers = 4
rate = "1000/s"
"""
STOCK = {f"sku/{n:02}": n for n in range(35)}


class Shop:
    """A stock table, and a marketplace that really runs."""

    def __init__(self, project: Project, url: str, market: Path) -> None:
        self.project, self.url, self.market = project, url, market
        job = (ROOT / "jobs" / "stock_push.py").read_text(encoding="utf-8")
        project.write(CONFIG.format(url=url), stock_push=job)
        self.sql("CREATE TABLE stock (sku TEXT PRIMARY KEY, quantity INTEGER)")
        for sku, quantity in STOCK.items():
            self.sql("INSERT INTO stock VALUES (?, ?)", sku, quantity)

    def sql(self, text: str, *values: object) -> None:
        with contextlib.closing(sqlite3.connect(self.project.folder / "stock.db")) as stock, stock:
            stock.execute(text, values)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.market)) as market:
            return market.execute(sql).fetchall()

    def listings(self) -> dict[object, object]:
        return dict(self.rows("SELECT sku, quantity FROM listing"))

    def keys(self) -> int:
        return len(self.rows("SELECT key FROM operation"))

    def push(self, *words: str) -> dict[str, int]:
        """Push, and return what the report counts."""
        assert self.project.run(*(words or ("run", "stock_push"))).code in (0, 10)
        report = json.loads(self.project.run("--json", "report", "stock_push").out)
        return dict(report["counts"])


@pytest.fixture
def shop(project: Project, tmp_path: Path) -> Iterator[Shop]:
    market = tmp_path / "marketplace.db"
    words = [sys.executable, str(ROOT / "jobs" / "marketplace.py"), "0", str(market)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Shop(project, server.stdout.readline().strip(), market)
        finally:
            server.kill()


def test_what_changed_is_pushed_and_nothing_else(shop: Shop) -> None:
    assert shop.push()["called"] == 35
    assert shop.listings() == STOCK
    assert "called" not in shop.push()
    shop.sql("UPDATE stock SET quantity = 99 WHERE sku = 'sku/07'")
    shop.sql("DELETE FROM stock WHERE sku = 'sku/08'")
    assert shop.push()["called"] == 2
    expected = {**STOCK, "sku/07": 99}
    del expected["sku/08"]
    assert shop.listings() == expected
    assert shop.keys() == 37


def test_a_quantity_that_returns_is_pushed_again(shop: Shop) -> None:
    shop.push()
    for quantity in (50, 7):
        shop.sql(f"UPDATE stock SET quantity = {quantity} WHERE sku = 'sku/07'")
        assert shop.push()["called"] == 1
    assert shop.listings() == STOCK


def test_what_the_marketplace_refuses_is_rejected_and_the_rest_is_pushed(shop: Shop) -> None:
    shop.sql("UPDATE stock SET quantity = -1 WHERE sku = 'sku/07'")
    ended = shop.project.run("run", "stock_push")
    assert ended.code == 10
    rejects = json.loads(shop.project.run("--json", "rejects", "list", "stock_push").out)
    assert "422" in json.dumps(rejects)
    del (expected := dict(STOCK))["sku/07"]
    assert shop.listings() == expected


POINTS = [
    "operation.claimed",
    "operation.called@12",
    "operation.settled",
    "target.commit@4",
    "target.committed@4",
    "commit.begun@4",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_pushes_nothing_twice_and_forgets_nothing(shop: Shop, point: str) -> None:
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": f"{point}=kill-both"}
    assert shop.project.run("run", "stock_push", env=env).code == -9
    wait_for(lambda: not shop.project.living(), "the worker to be gone")
    shop.sql("UPDATE stock SET quantity = quantity + 1")  # the plan stands
    shop.push("resume")
    assert shop.listings() == STOCK
    assert shop.keys() == 35


def test_a_rollback_shows_again_what_was_shown_before(shop: Shop) -> None:
    shop.push()
    shop.sql("UPDATE stock SET quantity = quantity + 100 WHERE sku < 'sku/20'")
    shop.sql("DELETE FROM stock WHERE sku = 'sku/30'")
    shop.sql("INSERT INTO stock VALUES ('sku/99', 1)")
    shop.push()
    assert shop.listings() != STOCK
    assert shop.project.run("rollback", "stock_push").code == 0
    assert shop.listings() == STOCK
    assert shop.push()["called"] == 22


def test_what_a_run_pushed_that_was_given_up_is_pushed_over(shop: Shop) -> None:
    shop.push()
    shop.sql("UPDATE stock SET quantity = quantity + 100")
    env = {**clean_environment(), "BATCHRUN_TEST_POINT": "target.commit@3=kill-both"}
    assert shop.project.run("run", "stock_push", env=env).code == -9
    wait_for(lambda: not shop.project.living(), "the worker to be gone")
    assert shop.project.run("cancel", "stock_push").code == 0
    assert shop.listings() != STOCK
    shop.sql("UPDATE stock SET quantity = quantity - 100")
    shop.push()
    assert shop.listings() == STOCK


def test_an_outage_of_the_marketplace_rejects_nothing(shop: Shop) -> None:
    away = CONFIG.format(url="http://127.0.0.1:9")
    shop.project.write_file("batchrun.toml", away)
    assert shop.project.run("run", "stock_push").code == 13
    shop.project.write_file("batchrun.toml", CONFIG.format(url=shop.url))
    shop.push("resume", "--accept-settings")
    assert shop.listings() == STOCK


def test_a_revision_that_runs_given_up_have_used_does_not_come_back(shop: Shop) -> None:
    assert shop.project.run("run", "stock_push").code == 0
    run = shop.project.run("--json", "status", "stock_push").document["jobs"][0]["run"]
    shop.sql("UPDATE listing SET revision = 7")  # planned, pushed and cancelled, six times
    assert shop.project.run("rollback", run).code == 0
    with contextlib.closing(sqlite3.connect(shop.project.folder / "stock.db")) as stock:
        assert stock.execute("SELECT DISTINCT revision FROM listing").fetchall() == [(8,)]
