"""Take the orders of a RabbitMQ queue into a table: each once, however often it is delivered.

A message has a message_id and a body like {"order": "A-17", "sku": "X1", "quantity": 3}. One that
came before, by its id, is counted as a duplicate and changes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rabbitmq import Queue, idle_s

from batchrun import Batch, Context, Secret, job

TABLE = """CREATE TABLE IF NOT EXISTS orders (
  message_id TEXT PRIMARY KEY, "order" TEXT NOT NULL, sku TEXT NOT NULL,
  quantity BIGINT NOT NULL)"""
INSERT = "INSERT INTO orders VALUES ({0}, {0}, {0}, {0}) ON CONFLICT (message_id) DO NOTHING"


@dataclass(frozen=True)
class Settings:
    """What `[jobs.queue_orders]` may say."""

    url: Secret  # amqp://user:password@host:5672/vhost
    queue: str = "orders"
    database: str = "sqlite:orders.db"  # or postgresql://user@host/name
    # how long the queue must be silent to end the run; a resume may have another
    idle: str = field(default="5s", metadata={"identity": False})

    def __post_init__(self) -> None:
        """Refuse an `idle` that is none before anything begins."""
        idle_s(self.idle)


@job(settings=Settings, version=1)
def queue_orders(ctx: Context[Settings]) -> Iterator[Batch]:
    """Insert what is new; acknowledge it once it is committed."""
    s = ctx.settings
    orders = ctx.enter(Queue(ctx, s.url, s.queue, parse=as_order, idle=s.idle))
    database = ctx.connect(s.database)
    insert = INSERT.format("?" if s.database.startswith("sqlite:") else "%s")

    def make_table(cursor: Any) -> None:
        cursor.execute(TABLE)

    ctx.step("make table", make_table, target=database)
    for batch in ctx.batches(orders, target=database):
        rows = [(o["message_id"], o["order"], o["sku"], o["quantity"]) for o in batch]
        with batch.transaction() as cursor:
            cursor.executemany(insert, rows)
            inserted = cursor.rowcount
            batch.count(inserted=inserted, duplicates=len(batch) - inserted)
        yield batch


def as_order(message: dict[str, Any]) -> dict[str, Any]:
    """Return the row that a message is; a ValueError rejects it."""
    match message["body"]:
        case {"order": str(order), "sku": str(sku), "quantity": quantity}:
            row = {"message_id": message["message_id"], "order": order, "sku": sku}
            is_whole = type(quantity) is int and 0 < quantity < 2**63
            if is_whole and "".join(row.values()).isprintable():  # so every database takes it
                return {**row, "quantity": quantity}
    raise ValueError(f"{json.dumps(message)[:200]} is no order")
