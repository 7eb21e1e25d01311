"""The shipped job brings a table level with real stock data: sums are what awk says."""

import contextlib
import gzip
import json
import re
import shutil
import sqlite3
import subprocess
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project

INVENTORY = """
    columns = ["product", "location", "shelf", "bin", "quantity", "rowguid", "modified"]
    key = ["product", "location"]
    types = { product = "integer", location = "integer", bin = "integer", quantity = "integer" }
    """
ORDERS = """
    columns = ["order_id", "detail_id", "due", "ordered", "product", "price", "total",
               "received", "rejected", "stocked", "modified"]
    key = ["detail_id"]
    keep = ["detail_id", "order_id", "ordered", "price", "total"]
    types = { detail_id = "integer", ordered = "integer", price = "numeric", total = "numeric" }
    """


def awk_sum(path: Path, column: int) -> Decimal:
    """Return the sum of a column, exact: awk adds ten-thousandths, which are whole numbers."""
    program = f"{{ s += sprintf('%.0f', ${column} * 10000) }} END {{ printf '%.0f', s }}"
    words = ["awk", "-F", "\t", program.replace("'", '"'), str(path)]
    return Decimal(subprocess.check_output(words, text=True)) / 10000


@dataclass
class Shop:
    """A project with the shipped job, a feed, and a database."""

    project: Project
    database: str
    feed: str = "feed.tsv"

    def configure(self, settings: str) -> None:
        (self.project.folder / "jobs").mkdir(mode=0o700, exist_ok=True)
        job = (ROOT / "jobs" / "inventory_sync.py").read_text(encoding="utf-8")
        self.project.write(
            "[defaults]\nbatch_size = 400\n[jobs.inventory_sync]\n"
            f'feed = "{self.feed}"\ndatabase = "{self.database}"\n' + settings.replace("    ", ""),
            inventory_sync=job,
        )

    def sync(self) -> dict[str, int]:
        """Run the job and return what its report counts."""
        ended = self.project.run("run", "inventory_sync", "--in-process")
        assert (ended.code, ended.err) == (0, ""), ended
        with contextlib.closing(sqlite3.connect(self.project.state / "ledger.db")) as ledger:
            sql = "SELECT read, rejected, counts FROM run ORDER BY key DESC LIMIT 1"
            read, rejected, counts = ledger.execute(sql).fetchone()
        return {"read": read, "rejected": rejected, **json.loads(counts)}

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        if self.database.startswith("sqlite:"):
            path = self.project.folder / self.database.removeprefix("sqlite:")
            with contextlib.closing(sqlite3.connect(path)) as connection:
                return connection.execute(sql).fetchall()
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(self.database) as connection:
            return list(connection.execute(sql).fetchall())


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, project: Project) -> Shop:
    if request.param == "sqlite":
        return Shop(project, "sqlite:stock.db")
    return Shop(project, request.getfixturevalue("postgres_dsn"))


def counts(read: int, *, inserted: int = 0, updated: int = 0, rejected: int = 0) -> dict[str, int]:
    unchanged = read - inserted - updated - rejected
    given = {"read": read, "rejected": rejected, "inserted": inserted, "updated": updated}
    return {**given, "unchanged": unchanged}


def test_the_inventory_is_loaded_once_and_only_changed_rows_are_updated(
    shop: Shop, shared_data: Path
) -> None:
    source, feed = shared_data / "product_inventory.tsv", shop.project.folder / "feed.tsv"
    lines = source.read_text().splitlines(keepends=True)
    feed.write_text("".join(lines))
    shop.configure(INVENTORY)
    assert shop.sync() == counts(1069, inserted=1069)
    total = "SELECT count(*), sum(quantity), sum(bin) FROM stock"
    assert shop.ask(total) == [(1069, awk_sum(source, 5), awk_sum(source, 4))]
    assert shop.ask("SELECT * FROM stock ORDER BY product, location LIMIT 1") == [
        (1, 1, "A", 1, 408, "47A24246-6C43-48EB-968F-025738A8A410", "2025-08-07 00:00:00.000")
    ]

    assert shop.sync() == counts(1069)

    for number in (3, 500, 1068):
        fields = lines[number].split("\t")
        lines[number] = "\t".join([*fields[:4], str(int(fields[4]) + 7), *fields[5:]])
    lines.append(lines[0].replace("1\t1\t", "1\t999\t"))
    feed.write_text("".join(lines))
    assert shop.sync() == counts(1070, inserted=1, updated=3)
    assert shop.ask(total) == [(1070, awk_sum(feed, 5), awk_sum(feed, 4))]


def test_the_purchase_orders_are_loaded_from_gzip_with_the_columns_that_are_kept(
    shop: Shop, shared_data: Path
) -> None:
    source = shared_data / "purchase_order_detail.tsv"
    with source.open("rb") as plain, gzip.open(shop.project.folder / "feed.tsv.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    shop.feed = "feed.tsv.gz"
    shop.configure(ORDERS)
    assert shop.sync() == counts(8845, inserted=8845)
    ((rows, ordered, price, total),) = shop.ask(
        "SELECT count(*), sum(ordered), sum(price), sum(total) FROM stock"
    )
    assert (rows, ordered) == (8845, awk_sum(source, 4))
    assert round(Decimal(price), 4) == awk_sum(source, 6)
    assert round(Decimal(total), 4) == awk_sum(source, 7)
    assert len(shop.ask("SELECT * FROM stock LIMIT 1")[0]) == 5

    assert shop.sync() == counts(8845)


def test_a_record_that_does_not_fit_its_types_is_named_and_nothing_of_its_batch_is_written(
    project: Project,
) -> None:
    shop = Shop(project, "sqlite:stock.db")
    project.write_file("feed.tsv", "sku\tquantity\na\t1\nb\tmany\nc\t3\n")
    settings = 'key = ["sku"]\ntypes = { quantity = "integer" }\n'
    shop.configure(settings)
    ended = project.run("run", "inventory_sync", "--in-process")
    assert ended.code == 1
    assert "quantity is 'many', which is not of type integer" in ended.err
    assert shop.ask("SELECT * FROM stock") == []
    shop.configure(settings + "max_rejects = 1\n")
    assert project.run("run", "inventory_sync", "--in-process").code == 10
    assert shop.ask("SELECT * FROM stock") == [("a", 1), ("c", 3)]


def test_the_report_shows_counts_that_add_up(project: Project) -> None:
    shop = Shop(project, "sqlite:stock.db")
    project.write_file("feed.tsv", "sku\tquantity\na\t1\nb\t2\na\t3\n")
    shop.configure('key = ["sku"]\n')
    assert shop.sync() == counts(3, inserted=2)
    report = project.run("report", "inventory_sync").out
    assert re.search("records read +3( of [0-9]+)?\n", report)
    for words in ("inserted", "updated", "unchanged"):
        assert words in report
    assert shop.ask("SELECT * FROM stock ORDER BY sku") == [("a", "3"), ("b", "2")]


def test_a_rollback_brings_back_the_rows_that_a_run_has_changed(shop: Shop) -> None:
    feed = "sku\tname\tquantity\tprice\na\tbolt\t1\t1.50\nb\tnut\t\t0.10\nc\trod\t3\t\n"
    settings = 'key = ["sku"]\ntypes = { quantity = "integer", price = "numeric" }\n'
    shop.project.write_file("feed.tsv", feed)
    shop.configure(settings)
    assert shop.sync() == counts(3, inserted=3)
    before = shop.ask("SELECT * FROM stock ORDER BY sku")
    assert shop.sync() == counts(3)
    assert len(list(shop.project.state.glob("images/*/*/*"))) == 1  # what is the same is not kept

    shop.project.write_file("feed.tsv", feed.replace("nut\t\t", "nut\t7\t") + "d\tpin\t4\t2\n")
    assert shop.sync() == counts(4, inserted=1, updated=1)
    assert shop.project.run("rollback", "inventory_sync", "--in-process").code == 0
    assert shop.ask("SELECT * FROM stock ORDER BY sku") == before


def test_without_remember_nothing_is_kept_for_a_rollback(shop: Shop) -> None:
    shop.project.write_file("feed.tsv", "sku\tquantity\na\t1\n")
    shop.configure('key = ["sku"]\nremember = false\n')
    assert shop.sync() == counts(1, inserted=1)
    assert not (shop.project.state / "images").exists()
    ended = shop.project.run("rollback", "inventory_sync")
    assert (ended.code, "has nothing to undo above batch 0" in ended.err) == (13, True)
