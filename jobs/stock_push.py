"""Push what changed in the stock table to a marketplace, each change once, whatever happens.

What is to be pushed is planned once per run in the table `listing`: per SKU what the marketplace
should show, under a revision that rises whenever that changes, and the revision that it was last
told. SKU and revision make the idempotency key, so a batch that is done again asks for the very
same, also if the stock has changed since; and what a run pushed that was given up before its commit
is pushed over by the next one. `python jobs/marketplace.py` is a marketplace to try it on.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from batchrun import Batch, Context, Query, job

CREATE = """CREATE TABLE IF NOT EXISTS listing (
  sku TEXT PRIMARY KEY, revision INTEGER NOT NULL, wanted INTEGER, pushed INTEGER,
  quantity INTEGER)"""  # NULL: not pushed yet; not listed
PLAN = """INSERT INTO listing SELECT sku, 1, quantity, NULL, NULL FROM {table} WHERE true
  ON CONFLICT (sku) DO UPDATE SET wanted = excluded.wanted, revision = listing.revision + 1
  WHERE listing.wanted IS NOT excluded.wanted"""
PLAN_ENDS = """UPDATE listing SET wanted = NULL, revision = revision + 1
  WHERE wanted IS NOT NULL AND sku NOT IN (SELECT sku FROM {table})"""
CHANGED = "SELECT sku, revision, wanted, quantity FROM listing WHERE pushed IS NOT revision"
REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.CONFLICT,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
)


@dataclass(frozen=True)
class Settings:
    """What `[jobs.stock_push]` may say."""

    marketplace: str = "http://127.0.0.1:8099"
    database: str = "sqlite:stock.db"  # SQLite only
    table: str = "stock"  # with the columns sku and quantity
    rate: str = "400/s"  # calls, at most
    workers: int = 8  # calls at a time


def was_refused(error: BaseException) -> bool:
    """Tell whether the marketplace has refused this very change, or asks to wait."""
    return isinstance(error, HTTPError) and error.code in REFUSALS


def take_back(ctx: Context[Settings]) -> Iterator[Batch]:
    """Push what the marketplace showed before, in reverse order, under keys of its own."""
    s = ctx.settings
    stock = ctx.connect(s.database)
    for batch in ctx.batches(ctx.remembered, target=stock):
        done = ctx.once_each(
            batch,
            idempotency_key=lambda shown: f"stock/{shown[0]}/{shown[1]}/back",
            call=lambda key, shown: push(s.marketplace, key, shown[0], shown[2]),
            lookup=partial(receipt_of, s.marketplace),
            workers=s.workers,
            rate=s.rate,
        )
        with batch.transaction() as rows:
            rows.executemany(
                "UPDATE listing SET wanted = ?3, quantity = ?3, revision = max(revision, ?2) + 1,"
                " pushed = max(revision, ?2) + 1 WHERE sku = ?1",
                [shown for shown, _ in done],
            )
        yield batch


@job(settings=Settings, version=1, not_done=was_refused, rollback=take_back)
def stock_push(ctx: Context[Settings]) -> Iterator[Batch]:
    """Plan, then push batch by batch; a quantity that the marketplace refuses is rejected."""
    s = ctx.settings
    stock = ctx.connect(s.database)

    def plan(rows: Any) -> None:
        rows.execute(CREATE)
        for planned in (PLAN, PLAN_ENDS):
            rows.execute(planned.format(table=s.table))

    ctx.step("plan", plan, target=stock)
    for batch in ctx.batches(Query(stock, CHANGED, key="sku"), target=stock):
        done = ctx.once_each(
            batch,
            idempotency_key=lambda row: f"stock/{row[0]}/{row[1]}",
            call=lambda key, row: push(s.marketplace, key, row[0], row[2]),
            lookup=partial(receipt_of, s.marketplace),
            workers=s.workers,
            rate=s.rate,
            on_error="reject",
        )
        with batch.transaction() as rows:
            batch.remember((sku, revision, before) for (sku, revision, _, before), _ in done)
            rows.executemany(
                "UPDATE listing SET pushed = revision, quantity = wanted"
                " WHERE sku = ? AND revision = ?",
                [(sku, revision) for (sku, revision, *_), _ in done],
            )
        yield batch


def push(marketplace: str, key: str, sku: str, quantity: int | None) -> Any:
    """Set a listing, or end it (None), under an idempotency key; return the receipt."""
    url = f"{marketplace}/listings/{quote(sku, safe='')}"
    return answer(url, "DELETE" if quantity is None else "PUT", {"quantity": quantity}, key)


def receipt_of(marketplace: str, key: str) -> Any:
    """Return what the marketplace has done under a key; None if nothing."""
    try:
        return answer(f"{marketplace}/operations/{quote(key, safe='')}")
    except HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return None


def answer(url: str, method: str = "GET", body: object = None, key: str = "") -> Any:
    """Send a request and return the JSON of its answer."""
    content = None if method == "GET" else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = Request(url, content, headers, method=method)  # noqa: S310 - the config's own url
    with urlopen(request, timeout=10) as answered:  # noqa: S310
        return json.load(answered)
