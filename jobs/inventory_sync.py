"""Bring a stock table level with the supplier's feed: insert what is new, update what changed.

What changes nothing is not written. If a key comes twice, the last record wins; one replaced in
its own batch counts as unchanged, so that read = inserted + updated + unchanged + rejected.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
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


@job(settings=Settings, version=1)
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
            cursor.executemany(insert, rows)
            inserted = cursor.rowcount
            cursor.executemany(update, rows)
            updated = cursor.rowcount
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
    table = ".".join(map(quoted, s.table.split(".")))
    key = ", ".join(map(quoted, s.key))
    typed = ", ".join(f"{quoted(n)} {SQL_TYPES[s.types.get(n, 'text')]}" for n in names)
    create = f"CREATE TABLE IF NOT EXISTS {table} ({typed}, PRIMARY KEY ({key}))"
    mark = "?" if s.database.startswith("sqlite:") else "%s"
    values = f"({', '.join(map(quoted, names))}) VALUES ({', '.join(mark for _ in names)})"
    insert = f"INSERT INTO {table} AS old {values} ON CONFLICT ({key}) DO "
    rest = [quoted(name) for name in names if name not in s.key]
    update = f"UPDATE SET {', '.join(f'{n} = excluded.{n}' for n in rest)} WHERE " + " OR ".join(
        f"old.{n} IS DISTINCT FROM excluded.{n}" for n in rest
    )
    return create, f"{insert} NOTHING", insert + (update if rest else "NOTHING")


def quoted(name: str) -> str:
    """Return the name of a column or table as SQL has it; only harmless ones pass."""
    if not re.fullmatch(r'[^"%?\x00-\x1f]{1,63}', name):
        raise ValueError(f"{name!r} cannot name a column or table: set `columns` or `table`")
    return f'"{name}"'
