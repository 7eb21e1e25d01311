"""Bring a stock table level with the supplier's feed: insert what is new, update what changed.

What changes nothing is not written. If a key comes twice, the last record wins; one replaced in
its own batch counts as unchanged, so that read = inserted + updated + unchanged + rejected.

With `remember` each batch keeps the rows that it is about to change, and the keys of those that it
inserts. `batchrun rollback RUN` puts the former back and deletes the latter.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from batchrun import Batch, Context, Delimited, job

WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)
# What `types` may say -> SQL that means the same in both databases (SQLite's numeric is a float).
SQL_TYPES = {"text": "text", "integer": "bigint", "real": "double precision", "numeric": "numeric"}


@dataclass(frozen=True)
class Settings:
    """What `[jobs.inventory_sync]` may say."""

    feed: str  # a .csv or .tsv file, plain or .gz
    key: list[str]  # the columns that together name a row
    database: str = "sqlite:stock.db"  # or postgresql://user@host/name
    table: str = "stock"  # made if absent; "schema.table" is understood
    columns: list[str] | None = None  # names for a feed without a header line
    keep: list[str] | None = None  # the columns to keep; None: all
    types: dict[str, str] = field(default_factory=dict)  # column -> a key of SQL_TYPES, else text
    delimiter: str | None = None  # None: by the name of the file
    quoting: bool | None = None  # None: by the name of the file
    encoding: str = "utf-8"
    remember: bool = field(default=True, metadata={"identity": False})  # what a rollback needs


def undo(ctx: Context[Settings]) -> Iterator[Batch]:
    """Put back the rows that a run has changed, delete those that it has inserted."""
    stock = ctx.connect(ctx.settings.database)
    for batch in ctx.batches(ctx.remembered, target=stock):
        with batch.transaction() as cursor:
            for (was_there, names), rows in groupby(batch, key=itemgetter(0, 1)):
                sql = put_back(ctx.settings, names.split("\t"), was_there=was_there)
                cursor.executemany(sql, [row[2:] for row in rows])
        yield batch


@job(settings=Settings, version=1, rollback=undo)
def inventory_sync(ctx: Context[Settings]) -> Iterator[Batch]:
    """Insert new rows, update changed ones, leave the others alone."""
    s = ctx.settings
    parse = partial(as_row, key=s.key, types=s.types, keep=s.keep)
    form: dict[str, Any] = {"delimiter": s.delimiter, "quoting": s.quoting, "encoding": s.encoding}
    feed = ctx.enter(Delimited(s.feed, key=tuple(s.key), columns=s.columns, parse=parse, **form))
    names = kept(feed.columns, s)
    create, insert, update = statements(s, names)
    stock = ctx.connect(s.database)

    def make_table(cursor: Any) -> None:
        cursor.execute(create)

    ctx.step("make table", make_table, target=stock)
    for batch in ctx.batches(feed, target=stock):
        latest = {tuple(r[name] for name in s.key): r for r in batch.records}
        rows = [tuple(r[name] for name in names) for r in latest.values()]
        with batch.transaction() as cursor:
            if s.remember:
                old = dict(zip(rows, rows_there(cursor, s, names, list(latest)), strict=True))
                rows = [row for row in rows if differs(old[row], row)]
                batch.remember(as_it_was(s, names, old[row], row) for row in rows)
            inserted = written(cursor, insert, rows)
            updated = written(cursor, update, rows) if inserted < len(rows) else 0
            left = len(batch) - inserted - updated
            batch.count(inserted=inserted, updated=updated, unchanged=left)
        yield batch


def kept(columns: list[str], s: Settings) -> list[str]:
    """Return the feed's columns that are kept, in its order."""
    wanted = columns if s.keep is None else s.keep
    if absent := [name for name in [*wanted, *s.key, *s.types] if name not in columns]:
        raise ValueError(f"keep, key or types name columns that the feed lacks: {absent}")
    if dropped := [name for name in [*s.key, *s.types] if name not in wanted]:
        raise ValueError(f"key or types name columns that are not kept: {dropped}")
    return [name for name in columns if name in wanted]


def as_row(
    record: dict[str, str], key: list[str], types: dict[str, str], keep: list[str] | None
) -> dict[str, Any]:
    """Return the record with its columns typed; a ValueError rejects it."""
    wanted = record if keep is None else keep
    row = {name: as_value(types.get(name, "text"), name, record[name]) for name in wanted}
    if empty := [name for name in key if row[name] in (None, "")]:
        raise ValueError(f"key column {empty[0]} is empty")
    return row


def as_value(kind: str, name: str, text: str) -> str | int | float | None:
    """Return a field as the database takes it; an empty number is NULL."""
    if kind == "text" or not text:
        return text if kind == "text" else None
    if kind == "integer" and WHOLE.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    if kind != "integer" and NUMBER.fullmatch(text):
        return float(text) if kind == "real" else text
    raise ValueError(f"{name} is {text!r}, which is not of type {kind}")


def statements(s: Settings, names: list[str]) -> tuple[str, str, str]:
    """Return the SQL that makes the table, inserts new rows, updates changed ones."""
    if unknown := set(s.types.values()) - set(SQL_TYPES):
        raise ValueError(f"types: {sorted(unknown)} should be of {', '.join(SQL_TYPES)}")
    typed = ", ".join(f"{quoted(n)} {sql_type(s, n)}" for n in names)
    key, rest = listed(s.key), [quoted(name) for name in names if name not in s.key]
    create = f"CREATE TABLE IF NOT EXISTS {table(s)} ({typed}, PRIMARY KEY ({key}))"
    values = f"({listed(names)}) VALUES ({places(s, names)})"
    insert = f"INSERT INTO {table(s)} AS old {values} ON CONFLICT ({key}) DO "
    update = f"UPDATE SET {', '.join(f'{n} = excluded.{n}' for n in rest)} WHERE " + " OR ".join(
        f"old.{n} IS DISTINCT FROM excluded.{n}" for n in rest
    )
    return create, f"{insert} NOTHING", insert + (update if rest else "NOTHING")


def table(s: Settings) -> str:
    """Return the table's name as SQL has it."""
    return ".".join(map(quoted, s.table.split(".")))


def listed(names: Iterable[str]) -> str:
    """Return columns as SQL lists them."""
    return ", ".join(map(quoted, names))


def places(s: Settings, values: Iterable[object]) -> str:
    """Return what stands for these values in SQL."""
    return ", ".join("?" if s.database.startswith("sqlite:") else "%s" for _ in values)


def sql_type(s: Settings, name: str) -> str:
    """Return the type of a column."""
    return SQL_TYPES[s.types.get(name, "text")]


def written(cursor: Any, sql: str, rows: list[tuple[Any, ...]]) -> int:
    """Execute a statement once for each row; return how many rows it has written."""
    if not rows:
        return 0
    cursor.executemany(sql, rows)
    return int(cursor.rowcount)


# -- what a rollback needs -------------------------------------------------------------------------


def rows_there(
    cursor: Any, s: Settings, names: list[str], keys: list[tuple[Any, ...]], at_once: int = 500
) -> Iterator[tuple[Any, ...] | None]:
    """Yield for each key the row that the table has; which one that is, the database says."""
    match = " AND ".join(
        f"old.{quoted(name)} = CAST(given.column{n} AS {sql_type(s, name)})"
        for n, name in enumerate(s.key, start=2)
    )
    columns = ", ".join(f"old.{quoted(name)}" for name in names)
    for first in range(0, len(keys), at_once):
        some = keys[first : first + at_once]
        given = ", ".join(f"({n}, {places(s, key)})" for n, key in enumerate(some))
        cursor.execute(
            f"SELECT given.column1, {columns} FROM (VALUES {given}) AS given"
            f" JOIN {table(s)} AS old ON {match}",
            list(chain.from_iterable(some)),
        )
        found = {row[0]: tuple(row[1:]) for row in cursor.fetchall()}
        yield from map(found.get, range(len(some)))


def differs(old: tuple[Any, ...] | None, new: tuple[Any, ...]) -> bool:
    """Tell whether a record may change a row; a number that is kept as text counts as a number."""
    if old is None or old == new:
        return old is None
    return not all(a == b or is_number(a, b) for a, b in zip(old, new, strict=True))


def is_number(old: object, text: object) -> bool:
    """Tell whether a number of the database is the one that the feed's text says."""
    if not isinstance(text, str) or not isinstance(old, (int, float, Decimal)):
        return False
    try:
        return bool(old == (float(text) if isinstance(old, float) else Decimal(text)))
    except (ValueError, InvalidOperation):
        return False


def as_it_was(
    s: Settings, names: list[str], old: tuple[Any, ...] | None, new: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return what undo needs of a row: whether it was there, its columns, its key or all of it."""
    if old is None:
        return (False, "\t".join(s.key), *(new[names.index(name)] for name in s.key))
    return (True, "\t".join(names), *old)


def put_back(s: Settings, names: list[str], *, was_there: bool) -> str:
    """Return the SQL that puts a row back as it was, or deletes the one of a key."""
    if was_there:
        values = f"({listed(names)}) VALUES ({places(s, names)})"
        changes = ", ".join(f"{n} = excluded.{n}" for n in map(quoted, names))
        return (
            f"INSERT INTO {table(s)} {values} ON CONFLICT ({listed(s.key)}) DO UPDATE SET {changes}"
        )
    fits = " AND ".join(f"{quoted(name)} = {places(s, [name])}" for name in names)
    return f"DELETE FROM {table(s)} WHERE {fits}"


def quoted(name: str) -> str:
    """Return the name of a column or table as SQL has it; only harmless ones pass."""
    if not re.fullmatch(r'[^"%?\x00-\x1f]{1,63}', name):
        raise ValueError(f"{name!r} cannot name a column or table: set `columns` or `table`")
    return f'"{name}"'
