"""A marketplace to try `stock_push` on.

    python jobs/marketplace.py [PORT] [DATABASE]

    PUT    /listings/SKU      {"quantity": 4}; with the header Idempotency-Key it is done once
    DELETE /listings/SKU      likewise
    GET    /operations/KEY    the receipt of what was done under that key, else 404

Answers are JSON. More than RATE_LIMIT requests in a second are refused with 429 and Retry-After, a
quantity below 0 with 422.
"""

import json
import sqlite3
import sys
import time
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import unquote

RATE_LIMIT = 500
SCHEMA = """
CREATE TABLE IF NOT EXISTS listing (sku TEXT PRIMARY KEY, quantity INTEGER);
CREATE TABLE IF NOT EXISTS operation (key TEXT PRIMARY KEY, receipt TEXT, requests INTEGER);
"""


class Marketplace(ThreadingHTTPServer):
    """The listings, what was done under which key, and the requests of the last second."""

    def __init__(self, port: int, database: str) -> None:
        super().__init__(("127.0.0.1", port), Answer)
        self.store = sqlite3.connect(database, check_same_thread=False)
        self.store.executescript(SCHEMA)
        self.lock = Lock()
        self.requests: deque[float] = deque()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that was killed while it waited for its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def is_too_much(self) -> bool:
        """Count a request and tell whether there were too many in the last second."""
        now = time.monotonic()
        while self.requests and self.requests[0] < now - 1:
            self.requests.popleft()
        self.requests.append(now)
        return len(self.requests) > RATE_LIMIT

    def change(self, key: str | None, sku: str, quantity: int | None) -> str:
        """Set or end (None) a listing, once for each key, and return the receipt."""
        with self.lock, self.store as store:
            known = store.execute("SELECT receipt FROM operation WHERE key = ?", (key,)).fetchone()
            receipt = known[0] if known else json.dumps({"sku": sku, "quantity": quantity})
            if not known and quantity is None:
                store.execute("DELETE FROM listing WHERE sku = ?", (sku,))
            elif not known:
                store.execute("INSERT OR REPLACE INTO listing VALUES (?, ?)", (sku, quantity))
            if key is not None:
                again = "ON CONFLICT DO UPDATE SET requests = requests + 1"
                store.execute(f"INSERT INTO operation VALUES (?, ?, 1) {again}", (key, receipt))
            return str(receipt)

    def receipt(self, key: str) -> str | None:
        """Return what was done under a key, or None."""
        with self.lock:
            found = self.store.execute("SELECT receipt FROM operation WHERE key = ?", (key,))
            return next((str(row[0]) for row in found), None)


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: Marketplace
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Tell what was done under a key."""
        receipt = self.server.receipt(unquote(self.path.removeprefix("/operations/")))
        self._answer(HTTPStatus.OK if receipt else HTTPStatus.NOT_FOUND, receipt or "null")

    def do_PUT(self) -> None:
        """Set a listing."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._change(body["quantity"])

    def do_DELETE(self) -> None:
        """End a listing."""
        self._change(None)

    def _change(self, quantity: int | None) -> None:
        if self.server.is_too_much():
            self._answer(HTTPStatus.TOO_MANY_REQUESTS, '"slower"', ("Retry-After", "1"))
        elif quantity is not None and quantity < 0:
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, '"a quantity below 0"')
        else:
            sku = unquote(self.path.removeprefix("/listings/"))
            key = self.headers.get("Idempotency-Key")
            self._answer(HTTPStatus.OK, self.server.change(key, sku, quantity))

    def _answer(self, code: HTTPStatus, body: str, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (("Content-Length", str(len(body.encode()))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing: a push is thousands of requests."""


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    with Marketplace(int(given.get(1, 8099)), given.get(2, "marketplace.db")) as marketplace:
        sys.stdout.write(f"http://127.0.0.1:{marketplace.server_address[1]}\n")
        sys.stdout.flush()
        marketplace.serve_forever()
