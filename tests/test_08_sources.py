"""Sources: where records come from, in an order that can be taken up again."""

# ruff: noqa: ANN401 - records, cursors and connections are of many types
# ruff: noqa: DTZ001 - moments without a zone are what some tests are about
# ruff: noqa: FBT001, FBT003 - parameters of tests, and of Reader
# ruff: noqa: PLC0415 - psycopg is not installed everywhere

import contextlib
import gzip
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import apsw
import pytest
from conftest import ROOT

from batchrun import (
    ConfigurationError,
    Delimited,
    Host,
    JobError,
    JsonLines,
    PersonNeeded,
    Query,
    Reader,
    Reject,
    SourceError,
    as_source,
)

SIZES = [0, 1, 4_999, 5_000, 5_001, 10_000, 12_345]
T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(params=["sqlite3", "apsw"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    path = str(tmp_path / "stock.db")
    connection = sqlite3.connect(path) if request.param == "sqlite3" else apsw.Connection(path)
    yield connection
    connection.close()


@pytest.fixture
def postgres(postgres_dsn: str) -> Iterator[Any]:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS sources_test")
        connection.execute("SET search_path TO sources_test")
        connection.commit()
        yield connection
        connection.rollback()
        connection.execute("DROP SCHEMA sources_test CASCADE")
        connection.commit()


OPENED: list[Any] = []


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    """Close the files of records that a test has opened."""
    yield
    while OPENED:
        OPENED.pop().close()


def delimited(*words: Any, **how: Any) -> Delimited:
    """Return a Delimited that is closed when the test is over."""
    feed = Delimited(*words, **how)
    OPENED.append(feed)
    return feed


def json_lines(*words: Any, **how: Any) -> JsonLines:
    """Return a JsonLines that is closed when the test is over."""
    feed = JsonLines(*words, **how)
    OPENED.append(feed)
    return feed


def fill(connection: Any, create: str, rows: list[tuple[Any, ...]]) -> None:
    mark = "%s" if type(connection).__module__.startswith("psycopg") else "?"
    cursor = connection.cursor()
    cursor.execute("BEGIN") if mark == "?" else None
    cursor.execute(create)
    table = create.split()[2]
    marks = ", ".join([mark] * len(rows[0])) if rows else ""
    if rows:
        cursor.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    cursor.execute("COMMIT")


def batches(source: Any, limit: int = 5_000, after: Any = None) -> list[Any]:
    reader = Reader(source, after)
    found = []
    while True:
        portion = reader.read_batch(limit)
        if portion.records or portion.rejects:
            found.append(portion)
        if portion.ended:
            return found


def records(source: Any, limit: int = 5_000, after: Any = None) -> list[Any]:
    return [record for portion in batches(source, limit, after) for record in portion.records]


def write(path: Path, lines: int, end: str = "\n", header: str = "sku,qty") -> Path:
    body = "".join(f"S{number},{number * 3}{end}" for number in range(1, lines + 1))
    path.write_bytes((header + end + body).encode())
    return path


# --- Query ---


@pytest.mark.parametrize("size", SIZES)
def test_a_query_is_read_to_its_end_in_full_batches_whatever_its_size(
    database: Any, size: int
) -> None:
    fill(database, "CREATE TABLE stock (id INTEGER PRIMARY KEY)", [(n,) for n in range(size)])
    query = Query(database, "SELECT id FROM stock;", key="id")
    portions = batches(query)
    assert [len(portion.records) for portion in portions] == [
        min(5_000, size - start) for start in range(0, size, 5_000)
    ]
    assert [row for portion in portions for row in portion.records] == [(n,) for n in range(size)]
    assert [(portion.first_key, portion.cursor) for portion in portions] == [
        (portion.records[0][0], portion.records[-1][0]) for portion in portions
    ]
    assert query.total() == size


def tied_rows() -> list[tuple[str, int]]:
    moments = [
        T0 + timedelta(seconds=min(max(n - 4_000, 0), 1) + n // 9_501 * n + min(n, 4_000))
        for n in range(10_000)
    ]
    return [(moment.isoformat(), n) for n, moment in enumerate(moments)]


def test_k04_a_timestamp_with_ties_is_refused_and_with_the_id_reads_every_row(
    database: Any,
) -> None:
    rows = tied_rows()
    fill(database, "CREATE TABLE stock (updated_at TEXT, id INTEGER)", rows)
    select = "SELECT * FROM stock"
    with pytest.raises(JobError) as refusal:
        Query(database, select, key="updated_at").read(None, 5_000)
    assert "(updated_at) is not unique: 5,500 rows" in str(refusal.value)
    assert 'key=["updated_at", "id"]' in str(refusal.value)
    assert records(Query(database, select, key=("updated_at", "id"))) == rows


def test_k04_a_tie_written_after_the_check_is_seen_at_the_end_of_a_batch(database: Any) -> None:
    fill(database, "CREATE TABLE stock (t INTEGER, id INTEGER)", [(n, n) for n in range(20)])
    query = Query(database, "SELECT * FROM stock", key="t")
    query.read(None, 5)
    database.execute("INSERT INTO stock VALUES (9, 99)")
    with pytest.raises(JobError, match="not unique: 2 rows have 9"):
        query.read(4, 5)


def test_k04_a_source_that_stands_still_is_stopped() -> None:
    reader = Reader(as_source(lambda _after, _limit: [1, 2, 3], key=lambda n: n), None)
    with pytest.raises(JobError, match="does not advance: after 3 came 1"):
        reader.read_batch(5)
    reader = Reader(as_source(lambda after, _limit: ([], after or "x")), None)
    with pytest.raises(JobError, match="does not advance"):
        reader.read_batch(5)


def test_a_source_that_goes_in_a_circle_is_stopped() -> None:
    circle = {None: "a", "a": "b", "b": "c", "c": "a"}
    reader = Reader(as_source(lambda after, _limit: ([], circle[after])), None)
    with pytest.raises(JobError, match="does not advance"):
        reader.read_batch(5)


def test_k34_rows_marked_done_on_the_way_do_not_hide_others(database: Any) -> None:
    fill(
        database,
        "CREATE TABLE stock (id INTEGER PRIMARY KEY, done)",
        [(n, 0) for n in range(10_000)],
    )
    query = Query(database, "SELECT id FROM stock WHERE NOT done", key="id")
    reader, found = Reader(query, None), []
    while portion := reader.read_batch(5_000):
        if not portion.records:
            break
        found += portion.records
        database.execute("UPDATE stock SET done = 1 WHERE id <= ?", (portion.cursor,))
    assert len(found) == 10_000


def test_null_in_a_key_is_refused(database: Any) -> None:
    fill(database, "CREATE TABLE stock (sku, id)", [("a", 1), (None, 2)])
    with pytest.raises(JobError, match=r"The key \(sku\) is NULL in some rows"):
        Query(database, "SELECT * FROM stock", key="sku").read(None, 5)


def test_a_query_that_was_asked_for_a_key_first_is_judged_like_any(database: Any) -> None:
    """A retry asks for the keys of rejects and reads no row; who reads after that loses none."""
    then, now = "2020-01-01 00:00:00", "2999-01-01 00:00:00"
    rows = [(then, 1), (None, 2), (now, 3)]
    fill(database, "CREATE TABLE stock (t, id)", rows)
    query = Query(database, "SELECT * FROM stock", key="t")
    assert query.key(rows[0]) == then
    with pytest.raises(JobError, match=r"The key \(t\) is NULL in some rows"):
        query.read(None, 5)
    select = "SELECT * FROM stock WHERE t IS NOT NULL"
    late = Query(database, select, key="t", lag=60, zone=UTC)
    late.host = HostAt()
    late.key(rows[0])
    assert late.read(None, 5) == ([rows[0]], then)


def test_text_is_read_in_the_order_of_its_own_collation_and_equal_keys_are_refused(
    database: Any,
) -> None:
    fill(database, "CREATE TABLE stock (sku TEXT COLLATE NOCASE)", [("a",), ("B",), ("c",)])
    query = Query(database, "SELECT sku FROM stock", key="sku")
    assert records(query, 1) == [("a",), ("B",), ("c",)]
    database.execute("INSERT INTO stock VALUES ('C')")
    with pytest.raises(JobError, match=r"The key \(sku\) is not unique: 2 rows"):
        query.read("B", 1)
    with pytest.raises(JobError, match=r"The key \(sku\) is not unique: 2 rows"):
        Query(database, "SELECT sku FROM stock", key="sku").read(None, 5)


def test_a_query_uses_the_index_of_its_key_on_every_read(database: Any) -> None:
    fill(database, "CREATE TABLE stock (a INTEGER, b TEXT COLLATE NOCASE, c)", [(1, "x", 0)])
    database.execute("CREATE UNIQUE INDEX stock_key ON stock (a, b)")
    query = Query(database, "SELECT * FROM stock", key=("a", "b"))
    asked: list[str] = []
    ask = query._run

    def run(text: str, values: tuple[Any, ...]) -> list[Any]:
        asked.extend(str(row) for row in database.execute("EXPLAIN QUERY PLAN " + text, values))
        return ask(text, values)

    query.read(None, 1)
    query._run = run  # type: ignore[method-assign]
    query.read((0, "a"), 1)
    assert len(asked) == 2  # the rows, and how many have the last one's key
    assert all("USING" in plan and "stock_key" in plan and "TEMP" not in plan for plan in asked)


def test_a_select_may_have_parameters_a_comment_and_a_column_named_like_a_keyword(
    database: Any,
) -> None:
    fill(database, 'CREATE TABLE stock ("order" INTEGER, shelf)', [(n, n % 2) for n in range(9)])
    select = 'SELECT "order" FROM stock WHERE shelf = ? -- odd ones'
    query = Query(database, select, key="order", parameters=(1,))
    assert records(query, 2) == [(1,), (3,), (5,), (7,)]
    assert query.total() == 4


def test_a_key_that_the_select_does_not_have_is_refused_with_its_columns(database: Any) -> None:
    fill(database, "CREATE TABLE stock (sku, id)", [("a", 1)])
    with pytest.raises(ConfigurationError) as refusal:
        Query(database, "SELECT * FROM stock", key="nr").read(None, 5)
    assert str(refusal.value) == "The SELECT has no column nr for key=.\nIts columns are sku, id."


def test_rows_may_be_dicts_or_sqlite3_rows() -> None:
    connection = sqlite3.connect(":memory:")
    fill(connection, "CREATE TABLE stock (qty, id INTEGER)", [(n, n) for n in range(7)])
    connection.row_factory = sqlite3.Row
    query = Query(connection, "SELECT * FROM stock", key="id")
    assert [row["id"] for row in records(query, 3)] == list(range(7))


def test_a_cursor_of_another_kind_is_refused_even_where_the_database_would_find_nothing(
    database: Any,
) -> None:
    fill(database, "CREATE TABLE stock (id INTEGER PRIMARY KEY)", [(1,), (2,)])
    with pytest.raises(PersonNeeded, match="It is str; the key is number now"):
        Query(database, "SELECT id FROM stock", key="id").read("S1", 5)


class HostAt(Host):
    """A host whose clock says T0, later each time it is asked, and whose sleep is noted."""

    def __init__(self, moment: datetime = T0) -> None:
        self.moment, self.slept = moment, list[float]()

    def now(self) -> str:
        moment, self.moment = self.moment, self.moment + timedelta(hours=9)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.mark.parametrize(
    ("gap", "unit", "zero"),
    [(" ", "seconds", ""), ("T", "milliseconds", "Z"), ("T", "microseconds", "+00:00")],
)
def test_lag_leaves_out_what_is_younger_than_it_when_the_attempt_first_reads(
    database: Any, gap: str, unit: str, zero: str
) -> None:
    def text(age_s: int) -> str:
        return (T0 - timedelta(seconds=age_s)).isoformat(gap, unit).removesuffix("+00:00") + zero

    ages = (90, 61, 60, 59)
    fill(database, "CREATE TABLE stock (t TEXT, id INTEGER)", [(text(s), s) for s in ages])
    query = Query(database, "SELECT * FROM stock", key=("t", "id"), lag=60, zone=UTC)
    query.host = HostAt()
    assert [row[1] for row in records(query, 1)] == [90, 61, 60]
    assert query.total() == 3


def test_lag_refuses_what_it_cannot_judge(database: Any) -> None:
    fill(database, "CREATE TABLE stock (t TEXT, id INTEGER)", [("2026-01-31 23:59:59", 1)])
    for key, zone, held in (("t", None, "'2026-01-31 23:59:59'"), ("id", UTC, "1")):
        with pytest.raises(ConfigurationError) as refusal:
            Query(database, "SELECT * FROM stock", key=key, lag=60, zone=zone).read(None, 1)
        assert str(refusal.value) == (
            f"lag= cannot judge the key column {key}: it holds {held}.\n"
            "It takes timestamps and ISO 8601 text, with a zone or with zone= given.\n"
            "Give zone=UTC (from datetime) or zone=ZoneInfo(...), or leave lag= out."
        )


@pytest.mark.parametrize("size", SIZES)
def test_postgres_is_read_to_its_end_and_left_idle(postgres: Any, size: int) -> None:
    fill(postgres, "CREATE TABLE stock (id integer PRIMARY KEY)", [(n,) for n in range(size)])
    query = Query(postgres, "SELECT id FROM stock WHERE 'a%' LIKE 'a%'", key="id")
    assert records(query) == [(n,) for n in range(size)]
    assert postgres.info.transaction_status == 0


def test_postgres_keeps_a_transaction_that_was_open_before(postgres: Any) -> None:
    fill(postgres, "CREATE TABLE stock (id integer PRIMARY KEY)", [(1,)])
    postgres.execute("INSERT INTO stock VALUES (2)")
    assert Query(postgres, "SELECT id FROM stock", key="id").read(None, 5)[0] == [(1,), (2,)]
    assert postgres.info.transaction_status == 2
    postgres.rollback()
    with pytest.raises(Exception, match="nothing_here"):
        Query(postgres, "SELECT id FROM nothing_here", key="id").read(None, 5)
    assert postgres.info.transaction_status == 0


def test_postgres_rows_may_be_dicts_and_the_connection_autocommit(postgres: Any) -> None:
    from psycopg.rows import dict_row, tuple_row

    rows = [(T0 - timedelta(hours=n), n) for n in range(9)]
    fill(postgres, "CREATE TABLE stock (t timestamptz, id integer)", rows)
    postgres.autocommit, postgres.row_factory = True, dict_row
    query = Query(postgres, "SELECT * FROM stock", key=("t", "id"), lag=3_600)
    query.host = HostAt()
    assert [row["id"] for row in records(query, 4)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert query.total() == 8
    postgres.autocommit, postgres.row_factory = False, tuple_row


def test_postgres_refuses_citext_that_is_equal_and_reads_it_as_text(postgres: Any) -> None:
    postgres.execute("CREATE EXTENSION IF NOT EXISTS citext SCHEMA sources_test")
    fill(postgres, "CREATE TABLE stock (sku citext)", [("b",), ("B",), ("a",)])
    with pytest.raises(JobError, match=r"The key \(sku\) is not unique: 2 rows"):
        Query(postgres, "SELECT sku FROM stock", key="sku").read(None, 5)
    select = 'SELECT sku::text COLLATE "C" AS sku FROM stock'
    assert records(Query(postgres, select, key="sku"), 1) == [("B",), ("a",), ("b",)]


def test_postgres_sees_equal_keys_that_are_written_later_as_the_column_compares_them(
    postgres: Any,
) -> None:
    postgres.execute("CREATE EXTENSION IF NOT EXISTS citext SCHEMA sources_test")
    fill(postgres, "CREATE TABLE stock (sku citext)", [("a",), ("b",)])
    query = Query(postgres, "SELECT sku FROM stock", key="sku")
    assert query.read(None, 1) == ([("a",)], "a")
    postgres.execute("INSERT INTO stock VALUES ('B')")
    with pytest.raises(JobError, match=r"The key \(sku\) is not unique: 2 rows"):
        query.read("a", 1)


def test_a_key_of_a_type_that_loses_digits_is_stopped(postgres: Any) -> None:
    fill(postgres, "CREATE TABLE stock (weight real)", [(0.1,), (0.7,)])
    reader = Reader(Query(postgres, "SELECT * FROM stock", key="weight"), None)
    assert reader.read_batch(1).records == [(0.1,)]
    with pytest.raises(JobError, match="The query does not advance"):
        reader.read_batch(1)


def test_postgres_refuses_ties_and_nulls(postgres: Any) -> None:
    fill(postgres, "CREATE TABLE stock (t timestamptz, id integer)", [(T0, 1), (T0, 2), (None, 3)])
    with pytest.raises(JobError, match="is not unique: 2 rows"):
        Query(postgres, "SELECT * FROM stock WHERE id < 3", key="t").read(None, 5)
    with pytest.raises(JobError, match="is NULL in some rows"):
        Query(postgres, "SELECT * FROM stock", key=("t", "id")).read(None, 5)


@pytest.mark.parametrize("collation", ["C", "und-x-icu", "en-x-icu"])
def test_postgres_reads_text_in_the_order_of_its_collation(postgres: Any, collation: str) -> None:
    skus = ["a", "B", "_", "Z", "é", "a b", "ab", "A"]
    fill(postgres, f'CREATE TABLE stock (sku text COLLATE "{collation}")', [(s,) for s in skus])
    select = "SELECT sku FROM stock WHERE sku LIKE %s OR sku LIKE '%%'"
    query = Query(postgres, select, key="sku", parameters=("%",))
    found = records(query, 1)
    assert found == postgres.execute("SELECT sku FROM stock ORDER BY sku").fetchall()
    assert query.total() == len(found) == len(skus)


def test_k38_timestamps_read_on_exactly_where_clocks_are_put_back(postgres: Any) -> None:
    postgres.execute("SET TIME ZONE 'Europe/Berlin'")
    postgres.commit()
    start = datetime(2025, 10, 26, 0, 0, tzinfo=UTC)
    rows = [(start + timedelta(minutes=10 * n), n) for n in range(24)]
    fill(postgres, "CREATE TABLE stock (t timestamptz PRIMARY KEY, id integer)", rows)
    portions = batches(Query(postgres, "SELECT * FROM stock", key="t"), 5)
    assert [row[1] for portion in portions for row in portion.records] == list(range(24))
    assert all(isinstance(portion.cursor.tzinfo, timezone) for portion in portions)
    with pytest.raises(PersonNeeded, match="It is datetime; the key is datetime with zone now"):
        Query(postgres, "SELECT * FROM stock", key="t").read(datetime(2025, 10, 26, 2, 30), 5)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_k38_a_naive_timestamp_is_the_same_in_every_zone(postgres: Any, zone: str) -> None:
    postgres.execute(f"SET TIME ZONE '{zone}'")
    postgres.commit()
    rows = [(datetime(2026, 3, 8, 2, n), n) for n in range(60)]
    fill(postgres, "CREATE TABLE stock (t timestamp PRIMARY KEY, id integer)", rows)
    query = Query(postgres, "SELECT * FROM stock", key="t")
    assert query.read(datetime(2026, 3, 8, 2, 30), 1)[0] == [rows[31]]


def test_lag_takes_naive_timestamps_to_be_in_the_zone_that_was_said(postgres: Any) -> None:
    tokyo = ZoneInfo("Asia/Tokyo")
    rows = [(datetime(2026, 3, 1, 21, n), n) for n in range(60)]  # T0 is 21:00 there
    fill(postgres, "CREATE TABLE stock (t timestamp PRIMARY KEY, id integer)", rows)
    query = Query(postgres, "SELECT * FROM stock", key="t", lag=60, zone=tokyo)
    query.host = HostAt(T0 + timedelta(minutes=30))
    assert records(query, 7) == rows[:30]


# --- files ---


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["feed.csv", "feed.tsv", "feed.jsonl"])
def test_k17_a_file_is_read_to_its_end_whatever_its_size(
    tmp_path: Path, size: int, name: str
) -> None:
    path = tmp_path / name
    if name == "feed.jsonl":
        path.write_text("".join(json.dumps({"sku": n}) + "\n" for n in range(size)))
        source: Any = json_lines(path, key="sku")
    else:
        path.write_text("sku\n" + "".join(f"{n}\n" for n in range(size)))
        source = delimited(path, key="sku")
    with source:
        assert source.total() == size
        portions = batches(source)
    assert [len(portion.records) for portion in portions] == [
        min(5_000, size - start) for start in range(0, size, 5_000)
    ]
    assert sum(len(portion.records) for portion in portions) == size
    if size:
        assert portions[-1].last_key in (size - 1, str(size - 1))


def k15(path: Path, opener: Any = open) -> Path:
    lines = ["\ufeffsku,name,qty\r\n"]
    for n in range(1, 12_001):
        name = f'"two\r\nlines ""{n}"""' if n % 100 == 0 else "nul\0byte" if n == 77 else "plain"
        lines.append(f"S{n},{name},{n}\r\n")
    with opener(path, "wb") as file:
        file.write("".join(lines).removesuffix("\r\n").encode())
    return path


@pytest.mark.parametrize("opener", [open, gzip.open])
def test_k15_the_file_from_the_field_is_read_and_resumed_exactly(
    tmp_path: Path, opener: Any
) -> None:
    path = k15(tmp_path / "feed.csv", opener)
    with delimited(path, key="sku") as feed:
        first = Reader(feed, None).read_batch(5_000)
    with delimited(path, key="sku") as feed:
        rest = records(feed, after=first.cursor)
    found = first.records + rest
    assert [record["sku"] for record in found] == [f"S{n}" for n in range(1, 12_001)]
    assert found[76]["name"] == "nul\0byte"
    assert found[99] == {"sku": "S100", "name": 'two\r\nlines "100"', "qty": "100"}
    assert rest[0]["sku"] == "S5001"


def test_a_position_is_bytes_and_records_before_the_next_one(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 3)
    for quoting in (True, False):
        _, position = delimited(path, quoting=quoting).read(None, 2)
        assert position[:2] == (len(b"sku,qty\nS1,3\nS2,6\n"), 2)
        assert position[2].startswith("10:")


@pytest.mark.parametrize("quoting", [True, False])
def test_every_position_is_one_to_go_on_from(tmp_path: Path, quoting: bool) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes("sku,näme\r\na,1\r\n\r\nb,é2\r\n\nc,3\n\n\nd,4".encode())
    whole = records(delimited(path, quoting=quoting))
    assert [record["sku"] for record in whole] == ["a", "b", "c", "d"]
    after: Any = None
    found: list[Any] = []
    while True:
        got, following = delimited(path, quoting=quoting).read(after, 1)
        if following is None:
            break
        found, after = found + got, following
    assert found == whole


def test_k05_a_sorted_or_cut_file_is_refused_and_another_batch_size_is_exact(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "feed.csv", 12_000)
    with delimited(path) as feed:
        before = feed.fingerprint()
        cursor = Reader(feed, None).read_batch(5_000).cursor
    with delimited(path) as feed:
        assert records(feed, 1_000, cursor)[0]["sku"] == "S5001"
        assert feed.fingerprint() == before
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in ([lines[0], *sorted(lines[1:])], lines[:3_001]):
        path.write_bytes(b"".join(changed))
        with delimited(path) as feed:
            assert feed.fingerprint() != before
            with pytest.raises(PersonNeeded, match="another record 5,000 ends at byte"):
                feed.read(cursor, 5_000)


def test_a_stray_quote_in_a_tsv_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "feed.tsv"
    path.write_text('sku\tname\n1\t"open\n2\t5" pipe\n')
    assert [record["name"] for record in records(delimited(path))] == ['"open', '5" pipe']


def test_a_quote_open_at_the_end_names_where_its_record_began(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_text('sku,name\n1,a\n2,"open\n3,c\n')
    with pytest.raises(SourceError) as refusal:
        records(delimited(path))
    assert "record 2, which begins at byte 13, cannot be read" in str(refusal.value)
    assert "still open at the end of the file" in str(refusal.value)


def test_a_record_of_101_lines_is_refused_and_one_of_100_is_read(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_text('sku,name\n1,"' + "x\n" * 99 + 'x"\n')
    assert len(records(delimited(path))) == 1
    path.write_text('sku,name\n1,a\n2,"' + "x\n" * 100 + 'x"\n')
    with pytest.raises(SourceError, match="record 2, which begins at byte 13"):
        records(delimited(path))


@pytest.mark.parametrize("quoting", [True, False])
def test_a_wrong_number_of_fields_names_record_and_byte(tmp_path: Path, quoting: bool) -> None:
    path = tmp_path / "feed.csv"
    path.write_text("sku,qty\na,1\n\nb,2,3\n")
    with pytest.raises(SourceError) as refusal:
        records(delimited(path, quoting=quoting))
    assert "record 2, which begins at byte 13" in str(refusal.value)
    assert "It has 3 fields; the columns are 2." in str(refusal.value)


@pytest.mark.parametrize("name", ["feed.csv", "feed.tsv", "feed.jsonl"])
def test_a_truncated_gzip_ends_the_read_and_names_a_byte(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = "".join(f'{{"{n}": {n * n % 7919}}}\n' for n in range(50_000))
    packed = gzip.compress(text.encode())
    path.write_bytes(packed[: len(packed) // 2])
    source = (
        json_lines(path)
        if name == "feed.jsonl"
        else delimited(path, columns=["line"], delimiter="|", quoting=False)
    )
    reader = Reader(source, None)
    with pytest.raises(SourceError) as refusal:
        list(islice(iter(lambda: reader.read_batch(5_000).ended, True), 100))
    number, byte = str(refusal.value).split("record ")[1].split(", which begins at byte ")
    start = int(byte.split(", cannot")[0].replace(",", ""))
    assert text[:start].count("\n") + 1 == int(number.replace(",", ""))
    assert "end-of-stream marker" in str(refusal.value)


def test_undecodable_bytes_name_their_record(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes(b"sku,qty\na,1\nb\xff,2\n")
    for quoting in (True, False):
        with pytest.raises(SourceError, match="record 2, which begins at byte 12"):
            records(delimited(path, quoting=quoting))


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-32", "utf-7", "iso-2022-jp", "shift_jis", "gbk", "hz", "cp037"]
)
def test_encodings_whose_bytes_may_be_part_of_a_character_are_refused_with_iconv(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "the feed.csv"
    path.write_text("sku\nä\n", encoding="utf-16")
    with pytest.raises(ConfigurationError) as refusal:
        delimited(path, encoding=encoding)
    assert f"iconv -f {encoding} -t UTF-8 '{path}' > '{path}.utf8'" in str(refusal.value)
    with pytest.raises(ConfigurationError, match="iconv -f UTF-16 -t UTF-8"):
        delimited(path).read(None, 5)


def test_encodings_of_one_byte_a_character_are_read(tmp_path: Path) -> None:
    for encoding, text in (("cp1252", "Größe"), ("koi8_r", "размер"), ("utf-8-sig", "Größe")):
        path = tmp_path / "feed.csv"
        path.write_text(f"sku,{text}\n1,{text}\n", encoding=encoding)
        assert records(delimited(path, encoding=encoding)) == [{"sku": "1", text: text}]


def test_a_file_replaced_by_rename_is_read_to_its_old_end(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 10)
    feed = delimited(path)
    first, after = feed.read(None, 4)
    write(tmp_path / "new", 3).replace(path)
    rest = records(feed, after=after)
    assert [record["sku"] for record in first + rest] == [f"S{n}" for n in range(1, 11)]


def test_a_file_changed_in_place_needs_a_person(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 10)
    feed = delimited(path)
    _, after = feed.read(None, 4)
    write(path, 11)
    with pytest.raises(PersonNeeded, match="was changed in place"):
        feed.read(after, 4)


def test_settle_waits_until_the_file_is_still(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 1)

    class Writing(HostAt):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) < 3 or seconds == 60:
                write(path, len(self.slept) + 1)

    feed = delimited(path, settle=30)
    feed.host = Writing()
    assert len(records(feed)) == 3
    assert feed.host.slept == [30, 30, 30]
    feed = delimited(path, settle=60)
    feed.host = Writing()
    with pytest.raises(SourceError, match="It was not still for 60 s in any of 60 tries"):
        feed.read(None, 1)


def test_parse_rejects_a_record_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_text("sku,qty\na,1\nb,x\nc,3\nd,4\n")
    feed = delimited(
        path,
        key="sku",
        parse=lambda r: {"sku": r["sku"], "qty": int(r["qty"])},
    )
    portion = Reader(feed, None).read_batch(10)
    assert [record["qty"] for record in portion.records] == [1, 3, 4]
    [reject] = portion.rejects
    assert reject.record == {"sku": "b", "qty": "x"}
    assert reject.reason.startswith("record 2: ValueError: invalid literal")
    assert (portion.first_key, portion.last_key) == ("a", "d")


def test_a_batch_counts_rejects_so_that_a_bad_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    feed = delimited(write(tmp_path / "feed.csv", 12), parse=lambda r: int(r["sku"]))
    portion = Reader(feed, None).read_batch(5)
    assert (len(portion.records), len(portion.rejects), portion.ended) == (0, 5, False)
    assert portion.cursor[1] == 5


def test_a_thin_file_needs_a_person_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 10)
    with pytest.raises(PersonNeeded, match=r"ended after 10 records: too few"):
        records(delimited(path, min_records=11))
    feed = delimited(path, min_records=10, min_of_last=0.8)
    feed.last_success_read = 12
    assert len(records(feed)) == 10
    feed = delimited(path, min_of_last=0.8)
    feed.last_success_read = 13
    with pytest.raises(PersonNeeded, match=r"min_of_last = 0\.8, and the last success read 13"):
        records(feed)
    path.write_text("")
    assert records(delimited(path)) == []


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "feed.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(SourceError, match="record 2, which begins at byte 10"):
        records(json_lines(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_text("sku,sku\n1,2\n")
    with pytest.raises(SourceError, match="two columns of one name: sku"):
        records(delimited(path))


def test_a_key_that_records_do_not_have_is_refused_with_the_record(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 3)
    with pytest.raises(JobError) as refusal:
        Reader(delimited(path, key="nr"), None).read_batch(5)
    assert str(refusal.value) == (
        "A record has no key='nr'.\nKeyError: 'nr', in {'sku': 'S1', 'qty': '3'}\n"
        "Nothing was taken from it; the checkpoint stays as it is."
    )
    for wrong in ([], [1, "sku"], 1.5):
        with pytest.raises(ConfigurationError, match="is no key"):
            Delimited(path, key=wrong)


def test_a_fingerprint_is_of_the_content_not_of_the_time(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 3)
    before = delimited(path).fingerprint()
    assert before.startswith(f"{path.stat().st_size}:")
    os.utime(path, (0, 0))
    assert delimited(path).fingerprint() == before
    with path.open("r+b") as file:
        file.truncate(100 * 2**20)
    large = delimited(path).fingerprint()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert delimited(path).fingerprint() != large


def test_one_column_may_have_empty_fields(tmp_path: Path) -> None:
    for name in ("feed.tsv", "feed.csv"):
        path = tmp_path / name
        path.write_text("size\nL\n\nM\n")
        assert [record["size"] for record in records(delimited(path))] == ["L", "", "M"]


def test_a_directory_or_a_pipe_is_no_file_of_records(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match="is no regular file"):
            delimited(path).read(None, 5)


def test_a_file_whose_header_is_refused_is_refused_again(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_text("sku,sku\n1,2\n")
    feed = delimited(path)
    for _ in range(2):
        with pytest.raises(SourceError, match="two columns of one name"):
            feed.read(None, 5)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere\.csv cannot be read"):
        delimited(tmp_path / "nowhere.csv").fingerprint()


def test_the_real_stock_is_read_whole_in_batches_of_any_size(shared_data: Path) -> None:
    path = shared_data / "product_inventory.tsv"
    columns = ["product_id", "location_id", "shelf", "bin", "quantity", "rowguid", "modified"]
    raw = path.read_text().splitlines()
    for limit in (1, 100, 5_000):
        found = records(delimited(path, columns=columns, key=("product_id", "location_id")), limit)
        assert ["\t".join(record.values()) for record in found] == raw
    assert sum(int(r["quantity"]) for r in found) == sum(int(x.split("\t")[4]) for x in raw)


def test_k04_the_real_stock_is_read_by_modified_and_key(database: Any, shared_data: Path) -> None:
    path = shared_data / "product_inventory.tsv"
    rows = [tuple(line.split("\t")) for line in path.read_text().splitlines()]
    fill(database, "CREATE TABLE stock (product, location, shelf, bin, qty, guid, modified)", rows)
    with pytest.raises(JobError, match="not unique"):
        Query(database, "SELECT * FROM stock", key="modified").read(None, 100)
    query = Query(database, "SELECT * FROM stock", key=("modified", "product", "location"))
    assert len(set(records(query, 100))) == len(rows)


# --- iterables, callables, batches ---


def test_a_set_a_dict_and_a_string_are_no_sources() -> None:
    wrong: Any
    for wrong in ({1}, frozenset(), {"a": 1}, "text", b"", 7):
        with pytest.raises(ConfigurationError, match="is no source"):
            as_source(wrong)


def test_an_iterable_goes_on_behind_the_record_it_knows() -> None:
    for make in (lambda: list(range(12)), lambda: (n for n in range(12))):
        portion = Reader(as_source(make()), None).read_batch(5)
        assert portion.cursor[0] == 5
        assert records(as_source(make()), after=portion.cursor) == [5, 6, 7, 8, 9, 10, 11]
    for other in ([1, 2, 3], [0, 1, 2, 3, 5, 4], []):
        with pytest.raises(PersonNeeded, match="other records than before"):
            as_source(other).read(portion.cursor, 5)


def test_a_record_without_a_stable_text_needs_a_key() -> None:
    with pytest.raises(ConfigurationError, match="Give key="):
        as_source([object()]).read(None, 1)
    assert as_source([object()], key=lambda _: 1).read(None, 1)[1][0] == 1


@pytest.mark.parametrize("key", ["id", ("id", "x"), lambda r: r["id"]])
def test_a_callable_with_a_key_is_a_keyset_source(key: Any) -> None:
    rows = [{"id": n, "x": 0} for n in range(12)]

    def read(after: Any, limit: int) -> list[Any]:
        start = after[0] if isinstance(after, tuple) else after
        return [row for row in rows if start is None or row["id"] > start][: min(limit, 3)]

    portions = batches(as_source(read, key=key), 5)
    assert [len(portion.records) for portion in portions] == [5, 5, 2]
    assert [row for portion in portions for row in portion.records] == rows


def test_a_list_from_a_source_without_a_key_is_refused() -> None:
    with pytest.raises(JobError, match="returned a list, so it needs a key"):
        Reader(as_source(lambda _after, _limit: [1]), None).read_batch(5)


def test_keys_out_of_order_equal_or_of_two_types_are_refused() -> None:
    for wrong, text in (
        ([1, 3, 2], "does not advance: after"),
        ([(1, 0), (1, 9)], "does not advance: after"),
        ([1, None], "cannot be compared"),
        ([1, "a"], "cannot be compared"),
    ):

        def key(record: Any) -> Any:
            return record[0] if isinstance(record, tuple) else record

        source = as_source(lambda after, _limit, wrong=wrong: [] if after else wrong, key=key)
        with pytest.raises(JobError, match=text):
            Reader(source, None).read_batch(5)


def in_answers(answers: list[list[int]]) -> Any:
    def read(after: Any, _limit: int) -> tuple[list[int], int | None]:
        here = after or 0
        return answers[here], here + 1 if here + 1 < len(answers) else None

    return as_source(read, key=lambda n: n)


def test_k17_short_and_wholly_filtered_answers_are_read_on_from() -> None:
    portions = batches(in_answers([[1, 2], [], [], [3], [4, 5, 6], [], [7]]), 3)
    assert [portion.records for portion in portions] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [portion.cursor for portion in portions] == [4, 5, 6]
    assert portions[-1].ended


def test_an_answer_that_does_not_fit_waits_for_the_next_batch() -> None:
    reader = Reader(in_answers([[1, 2], [3, 4, 5], [6, 7, 8, 9]]), None)
    assert [reader.read_batch(3)[:3] for _ in range(4)] == [
        ([1, 2], 1, False),
        ([3, 4, 5], 2, False),
        ([6, 7, 8, 9], 2, True),
        ([], 2, True),
    ]


def test_an_answer_of_rejects_alone_is_a_batch_of_a_source_that_waits_to_be_told() -> None:
    source: Any = in_answers([[], [], [3]])
    source.committed = lambda _cursor: None
    source.take_rejects = iter([[], [Reject("x", "bad")], []]).__next__
    reader = Reader(source, None)
    portions = [reader.read_batch(5) for _ in range(2)]
    assert [(p.records, p.cursor, len(p.rejects)) for p in portions] == [([], 2, 1), ([3], 2, 0)]


def test_a_reader_that_had_ended_reads_nothing() -> None:
    assert Reader(in_answers([[1]]), 3, ended=True).read_batch(5)[:3] == ([], 3, True)


def test_an_empty_source_leaves_the_cursor_alone() -> None:
    assert Reader(in_answers([[], []]), None).read_batch(5)[:3] == ([], None, True)


def test_a_keyset_answer_longer_than_asked_is_cut() -> None:
    source = as_source(lambda after, _limit: list(range((after or 0) + 1, 13)), key=lambda n: n)
    assert [portion.records for portion in batches(source, 5)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12],
    ]


# --- holes ---


def test_gzip_members_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv.gz"
    path.write_bytes(gzip.compress(b"sku,qty\na,1\nb") + gzip.compress(b",2\nc,3\n"))
    assert [record["sku"] for record in records(delimited(path), 1)] == ["a", "b", "c"]
    _, after = delimited(path).read(None, 2)
    assert records(delimited(path), after=after) == [{"sku": "c", "qty": "3"}]
    path.write_bytes(path.read_bytes() + b"garbage")
    with pytest.raises(SourceError, match="Not a gzipped file"):
        records(delimited(path))


def test_what_is_wrong_is_said_when_it_comes_first_and_what_stands_before_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "feed.csv"
    for tail in (b"b\xff,2\n", b"b,2,3\n", b'"b,2\n', b'"b"x,2\n', b"\xef\xbb\xbfb,2\n"):
        path.write_bytes(b'sku,qty\n"a",1\n\n' + tail)
        feed = delimited(path)
        found, after = feed.read(None, 5)
        assert found == [{"sku": "a", "qty": "1"}]
        for _ in range(2):
            with pytest.raises(SourceError, match="record 2, which begins at byte 15, cannot be"):
                feed.read(after, 5)


def test_a_byte_order_mark_in_the_middle_is_no_part_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "feed.tsv"
    path.write_bytes("\ufeffsku\tqty\na\t1\n\ufeffsku\tqty\nb\t2\n".encode())
    with pytest.raises(SourceError) as refusal:
        records(delimited(path))
    assert str(refusal.value) == (
        f"{path}: record 2, which begins at byte 15, cannot be read.\n"
        "A byte order mark stands before it, as where files were joined.\n"
        "Nothing was taken from it; the checkpoint stays as it is."
    )
    path.write_bytes("sku\tname\na\tx\ufeffy\n".encode())
    assert records(delimited(path)) == [{"sku": "a", "name": "x\ufeffy"}]


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes(b"sku,qty\na,1\n")
    with path.open("r+b") as file:
        file.truncate(2**31)  # a hole: two gigabytes of NUL, no line end
    for feed in (delimited(path), delimited(path, quoting=False)):
        before = peak_rss_bytes()
        with pytest.raises(SourceError) as refusal:
            records(feed)
        assert "record 2, which begins at byte 12, cannot be read" in str(refusal.value)
        assert "It has a line of 16,777,216 bytes or more." in str(refusal.value)
        assert peak_rss_bytes() - before < 100 * 2**20


def peak_rss_bytes() -> int:
    [line] = [li for li in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in li]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("quoting", [True, False])
def test_a_file_without_records_is_read_to_its_end(tmp_path: Path, quoting: bool) -> None:
    path = tmp_path / "feed.csv"
    for content in (
        b"",
        b"\xef\xbb\xbf",
        b"\n\r\n",
        b"sku,qty",
        b"\nsku,qty\n\n",
        gzip.compress(b""),
    ):
        path.write_bytes(content)
        assert Reader(delimited(path, quoting=quoting), None).read_batch(5)[:3] == ([], None, True)
    with pytest.raises(PersonNeeded, match="ended after 0 records: too few"):
        delimited(path, quoting=quoting, min_records=1).read(None, 5)


def test_a_stray_carriage_return_is_refused_in_csv_and_kept_in_tsv(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes(b"sku,qty\na,1\nb\rc,2\n")
    with pytest.raises(SourceError, match="record 2, which begins at byte 12"):
        records(delimited(path))
    assert records(delimited(path, quoting=False))[1] == {"sku": "b\rc", "qty": "2"}


def test_a_file_changed_in_place_between_open_and_read_needs_a_person(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 10)
    with delimited(path) as feed:
        with path.open("r+b") as file:
            file.write(b"qty,sku")
        os.utime(path, (1, 1))
        for reads in (lambda: feed.read(None, 4), feed.fingerprint):
            with pytest.raises(PersonNeeded, match="was changed in place"):
                reads()


def test_a_replaced_file_is_finished_by_this_run_and_read_by_the_next(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 10)
    with delimited(path) as feed:
        old = feed.fingerprint()
        write(tmp_path / "new", 3).replace(path)
        assert feed.fingerprint() == old
        assert len(records(feed)) == 10
    with delimited(path) as feed:
        assert feed.fingerprint() != old
        assert len(records(feed)) == 3


def test_a_file_that_is_missing_or_closed_to_us_is_named_with_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as refusal:
        Delimited("nowhere.csv").read(None, 1)
    assert str(refusal.value) == (
        f"nowhere.csv cannot be read: No such file or directory.\n"
        f"The working folder is {tmp_path}.\n"
        "Nothing was taken from it; the checkpoint stays as it is."
    )
    path = write(tmp_path / "feed.csv", 1)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # root may read anything
    try:
        with pytest.raises(SourceError, match="cannot be read: Permission denied"):
            Delimited(path).read(None, 1)
    finally:
        os.seteuid(user)


def test_a_long_circle_is_stopped_after_at_most_three_turns() -> None:
    asked: list[Any] = []

    def read(after: int | None, _limit: int) -> tuple[list[int], int]:
        asked.append(after)
        return [], ((after or 0) + 1) % 1_000

    with pytest.raises(JobError, match="does not advance"):
        Reader(as_source(read), None).read_batch(5)
    assert len(asked) < 3_100


MEMORY = """
import resource
import sqlite3
import sys
from batchrun import Delimited, Query, Reader
kind, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if kind == "iterable":
    from batchrun import as_source
    source = as_source({"sku": f"S{n:08}", "qty": n} for n in range(count))
elif kind == "query":
    connection = sqlite3.connect(path)
    source = Query(connection, f"SELECT * FROM stock WHERE id <= {count}", key="id")
else:
    source = Delimited(path, key="id")
reader, read = Reader(source, None), 0
while True:
    portion = reader.read_batch(5_000)
    read += len(portion.records)
    if portion.ended:
        break
assert read == count, read
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("kind", ["iterable", "query", "delimited", "quoted"])
def test_memory_is_the_same_for_n_records_and_for_three_n(tmp_path: Path, kind: str) -> None:
    count = 1_000_000 if os.environ.get("BATCHRUN_TEST_LONG") else 40_000
    peaks = []
    for times in (1, 3):
        total = count * times
        path = tmp_path / f"{times}"
        if kind == "query":
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("CREATE TABLE stock (id INTEGER PRIMARY KEY, sku TEXT)")
                rows = ((n, f"S{n:08}") for n in range(1, total + 1))
                connection.executemany("INSERT INTO stock VALUES (?, ?)", rows)
        elif kind != "iterable":
            quote = '"' if kind == "quoted" else ""
            with path.open("w") as file:
                file.write("id,sku\n")
                file.writelines(f"{n},{quote}S{n:08}{quote}\n" for n in range(total))
        words = [sys.executable, "-c", MEMORY, kind, str(total), str(path)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    print(f"{kind}: peak {peaks[0]:,} bytes with {count:,} records, {peaks[1]:,} with 3 times")
    assert peaks[1] < 1.1 * peaks[0]


def test_a_cursor_that_another_kind_of_source_has_made_is_refused_in_words(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 3)
    wrong: Any
    for wrong in (5, "S1", (3, "abc")):
        with pytest.raises(PersonNeeded, match="is no position in"):
            delimited(path).read(wrong, 1)
    for wrong in (5, "S1", (9, 2, "5:abc")):
        with pytest.raises(PersonNeeded, match="gives other records than before"):
            as_source([1, 2, 3]).read(wrong, 1)


def test_an_emptied_table_is_the_end_and_not_an_error(database: Any) -> None:
    fill(database, "CREATE TABLE stock (id INTEGER PRIMARY KEY)", [])
    query = Query(database, "SELECT id FROM stock", key="id")
    assert query.read(None, 5) == query.read(7, 5) == ([], None)
    database.execute("INSERT INTO stock VALUES (8)")
    assert query.read(7, 5) == ([(8,)], 8)


def test_a_read_that_failed_is_read_again_from_where_it_began(tmp_path: Path) -> None:
    path = write(tmp_path / "feed.csv", 9)
    failing = [True]

    def parse(record: dict[str, str]) -> str:
        if record["sku"] == "S5" and failing.pop():
            raise RuntimeError
        return record["sku"]

    feed = delimited(path, parse=parse)
    _, after = feed.read(None, 3)
    failing[:] = [False, True]
    with pytest.raises(RuntimeError):
        feed.read(after, 3)
    assert feed.read(after, 3)[0] == ["S4", "S5", "S6"]


def test_a_header_may_stand_behind_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes(b"\r\n\nsku,qty\na,1\n")
    for quoting in (True, False):
        assert records(delimited(path, quoting=quoting)) == [{"sku": "a", "qty": "1"}]


def test_a_circle_that_is_entered_later_is_stopped() -> None:
    reader = Reader(
        as_source(lambda after, _limit: ([], 7 if after == 9 else (after or 0) + 1)), None
    )
    with pytest.raises(JobError, match="does not advance: after"):
        reader.read_batch(5)


def test_the_reason_is_that_of_the_record_and_not_of_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "feed.csv"
    path.write_bytes(b'sku,name\na,"two\nl\xffnes"\n')
    with pytest.raises(SourceError, match="Byte 0xff is no utf-8"):
        records(delimited(path))
    path.write_bytes(b'sku,name\na,"x"y\nb\xff,z\n')
    with pytest.raises(SourceError, match="expected after"):
        records(delimited(path))
