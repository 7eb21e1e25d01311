"""Write a table to a CSV file that is there whole or not at all, as the table stood at one moment.

The rows are first copied into a staging table, once per run, so that an export that takes hours, is
paused or crashes and goes on is still of that one moment. They go to a file beside the final one,
which takes its place when the last row is in it. Both belong to the run and go with it, whether it
succeeds, is cancelled or was killed: `ctx.on_finish` is recorded before they are made.
"""

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from batchrun import Batch, Context, Fatal, job


@dataclass(frozen=True)
class Settings:
    """What `[jobs.stock_export]` may say."""

    file: Path  # is replaced when the export is complete
    database: str = "sqlite:stock.db"  # SQLite only
    table: str = "stock"


@job(settings=Settings, version=1)
def stock_export(ctx: Context[Settings]) -> Iterator[Batch]:
    """Freeze the table, write it batch by batch, publish the file."""
    s = ctx.settings
    staging, growing = f"export {ctx.run_id}", s.file.with_name(f".{s.file.name}.{ctx.run_id}")
    stock = ctx.connect(s.database)
    ctx.on_finish(drop, database=s.database.removeprefix("sqlite:"), table=staging)
    ctx.on_finish(remove, path=str(growing))

    def freeze(cursor: Any) -> list[str]:
        cursor.execute(f"CREATE TABLE {quoted(staging)} AS SELECT * FROM {quoted(s.table)}")
        names = cursor.execute("SELECT name FROM pragma_table_info(?)", (staging,))
        return [name for (name,) in names.fetchall()]

    def read(after: Any, limit: int) -> tuple[list[str], Any]:
        row, size = after or (0, len(header))
        where = f"FROM {quoted(staging)} WHERE rowid > ? ORDER BY rowid LIMIT ?"
        rows = stock.execute(f"SELECT rowid, * {where}", (row, limit)).fetchall()
        lines = [csv_line(values) for _, *values in rows]
        return lines, [rows[-1][0], size + len("".join(lines).encode())] if rows else None

    header = csv_line(ctx.step("freeze", freeze, target=stock)).encode()
    inode = ctx.step("begin", lambda: begin(growing, header))
    for batch in ctx.batches(read):
        _, size = ctx.cursor or (0, len(header))  # of the file, as the last commit left it
        write_at(growing, size, "".join(batch.records).encode())
        yield batch
    ctx.step("publish", lambda: publish(growing, s.file, inode))


def csv_line(values: Iterable[Any]) -> str:
    """Return values as one record of a CSV file; NULL is an empty field, bytes are hexadecimal."""
    values = (value.hex() if isinstance(value, bytes) else value for value in values)
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def begin(path: Path, header: bytes) -> int:
    """Make the file, with nothing but its header line, and return what tells it from another."""
    path.touch()
    write_at(path, 0, header)
    return path.stat().st_ino


def write_at(path: Path, size: int, content: bytes) -> None:
    """Let a file of which `size` bytes are committed go on with this content, durably.

    What a batch that was not committed has written behind them is cut off.
    """
    if not path.exists() or path.stat().st_size < size:
        raise Fatal(f"{path} has lost rows that were written. Cancel this export and run it again")
    with path.open("r+b") as file:
        file.seek(size)
        file.truncate()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(growing: Path, final: Path, inode: int) -> None:
    """Give the complete file its name, which may have been done before the process was killed."""
    if growing.exists():
        growing.replace(final)
    if not final.exists() or final.stat().st_ino != inode:
        raise Fatal(f"{growing} is gone, not published. Cancel this export and run it again")
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def drop(*, database: str, table: str) -> None:
    """Drop a staging table, if it is there."""
    with contextlib.closing(apsw.Connection(database)) as stock:
        stock.set_busy_timeout(10_000)
        stock.execute(f"DROP TABLE IF EXISTS {quoted(table)}")


def remove(*, path: str) -> None:
    """Remove a file that was not published, if it is there."""
    Path(path).unlink(missing_ok=True)


def quoted(name: str) -> str:
    """Return a table's name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'
