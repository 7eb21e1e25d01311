"""A destination outside: an HTTP server in a process of its own that counts effects durably.

    with outside(folder) as server:
        ... job text CLIENT, settings: url = server.url, kind = one of KINDS ...
        server.effects("shop")  # -> how often each key had its effect

Three kinds of destination, by the path of the request (/SPACE/KIND/KEY): `keys` honours idempotency
keys; `lookup` repeats an effect that is sent twice, but can be asked; `neither` repeats it and
cannot tell. A fault is planned for one key of a space (`server.plan`), and happens once; an effect
that is `late` is not seen by so many lookups.
"""

import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

KINDS = ("keys", "lookup", "neither")

SCHEMA = """
CREATE TABLE IF NOT EXISTS effect (id INTEGER PRIMARY KEY, space TEXT, key TEXT, body TEXT,
  at REAL, hidden INTEGER);
CREATE TABLE IF NOT EXISTS fault (space TEXT, key TEXT, name TEXT, detail TEXT, times INTEGER);
CREATE TABLE IF NOT EXISTS asked (space TEXT, key TEXT, at REAL);
"""

# What a job of a test begins with: how to reach the destination.
CLIENT = '''
import http.client, json
from urllib.parse import quote, urlsplit


class Answered(Exception):
    """The destination answered with anything but 200."""

    def __init__(self, status, headers):
        super().__init__(f"HTTP {status}")
        self.status, self.headers = status, headers


def send(url, method, key, body=None, timeout_s=5):
    """Return what the destination answers, as JSON; None for 404."""
    to = urlsplit(url)
    connection = http.client.HTTPConnection(to.netloc, timeout=timeout_s)
    try:
        connection.request(method, f"{to.path}/{quote(key, safe='')}", body and json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise Answered(answer.status, answer.headers)
    return json.loads(text)
'''


@dataclass
class Outside:
    """A running destination, as a test sees it."""

    url: str
    store: Path

    def _query(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.store, timeout=10)) as store, store:
            return store.execute(sql, values).fetchall()

    def of(self, space: str, kind: str) -> str:
        """Return the URL of one test's part of one kind of destination."""
        return f"{self.url}/{space}/{kind}"

    def plan(self, space: str, key: str, name: str, detail: str = "", times: int = 1) -> None:
        """Let a request for a key go wrong, so many times."""
        values = (space, key, name, detail, times)
        self._query("INSERT INTO fault VALUES (?, ?, ?, ?, ?)", *values)

    def effects(self, space: str) -> dict[str, int]:
        """Return how often each key had its effect."""
        sql = "SELECT key, count(*) FROM effect WHERE space = ? GROUP BY key"
        return {str(key): int(str(count)) for key, count in self._query(sql, space)}

    def times(self, space: str) -> list[float]:
        """Return when effects happened, by the clock of `time.monotonic`."""
        rows = self._query("SELECT at FROM effect WHERE space = ? ORDER BY id", space)
        return [float(str(row[0])) for row in rows]

    def lookups(self, space: str) -> dict[str, int]:
        """Return how often each key was looked up."""
        sql = "SELECT key, count(*) FROM asked WHERE space = ? GROUP BY key"
        return {str(key): int(str(count)) for key, count in self._query(sql, space)}


@contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    """A destination that is gone afterwards; what it has counted stays in the folder."""
    store = folder / "effects.db"
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(store)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield Outside(process.stdout.readline().strip(), store)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- the server's own process ---------------------------------------------------------------------


class Destination(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    store = ""

    def do_PUT(self) -> None:
        """Have an effect."""
        _, space, kind, key = map(unquote, self.path.split("/"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        fault, detail = self._fault(space, key)
        if fault in ("reset before", "refuse", "busy"):
            return self._fail(fault, detail)
        if fault == "slow":
            time.sleep(float(detail))
        receipt = self._effect(space, kind, key, body, int(detail) if fault == "late" else 0)
        if fault in ("reset after", "hang after", "error after"):
            return self._fail(fault, "500")
        return self._answer(200, receipt)

    def _fail(self, fault: str, detail: str) -> None:
        """Answer nothing, or an error."""
        if fault.startswith("reset"):
            self._reset()
        elif fault.startswith("hang"):
            self.connection.recv(1)  # until the caller gives up
        elif fault == "busy":
            self._answer(429, b"later", **{"Retry-After": detail})
        else:
            self._answer(int(detail), b"an error")

    def do_GET(self) -> None:
        """Tell whether a key had its effect."""
        _, space, kind, key = map(unquote, self.path.split("/"))
        fault, detail = self._fault(space, f"GET {key}")
        with closing(self._open()) as store, store:
            store.execute("INSERT INTO asked VALUES (?, ?, ?)", (space, key, time.monotonic()))
            mine = "WHERE space = ? AND key = ?"
            sql = f"SELECT id FROM effect {mine} AND hidden = 0"
            found = store.execute(sql, (space, key)).fetchone()
            sql = f"UPDATE effect SET hidden = hidden - 1 {mine} AND hidden > 0"
            store.execute(sql, (space, key))
        if fault in ("refuse", "hang"):
            return self._fail(fault, detail)
        if fault == "nonsense":
            return self._answer(200, b"<html>")
        if kind == "neither":
            return self._answer(501, b"cannot tell")
        if found is None:
            return self._answer(404, b"none")
        return self._answer(200, json.dumps({"id": found[0]}).encode())

    def _open(self) -> sqlite3.Connection:
        store = sqlite3.connect(self.store, timeout=10)
        store.execute("PRAGMA synchronous = OFF")  # it survives its own kill, which is enough
        return store

    def _fault(self, space: str, key: str) -> tuple[str, str]:
        """Return the fault that is planned for this request, which happens now."""
        with closing(self._open()) as store, store:
            sql = (
                "UPDATE fault SET times = times - 1 WHERE rowid = (SELECT min(rowid) FROM fault"
                " WHERE space = ? AND key = ? AND times > 0) RETURNING name, detail"
            )
            found = store.execute(sql, (space, key)).fetchone()
        return found or ("", "")

    def _effect(self, space: str, kind: str, key: str, body: str, hidden: int) -> bytes:
        with closing(self._open()) as store, store:
            store.execute("BEGIN IMMEDIATE")
            sql = "SELECT id FROM effect WHERE space = ? AND key = ?"
            found = kind == "keys" and store.execute(sql, (space, key)).fetchone()
            if not found:
                values = (space, key, body, time.monotonic(), hidden)
                columns = "(space, key, body, at, hidden)"
                sql = f"INSERT INTO effect {columns} VALUES (?, ?, ?, ?, ?) RETURNING id"
                found = store.execute(sql, values).fetchone()
        return json.dumps({"id": found[0]}).encode()

    def _answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        """End the connection as a crash would: RST, not FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def finish(self) -> None:
        """End the connection, whoever has gone away."""
        with contextlib.suppress(OSError, ValueError):
            super().finish()


class Server(ThreadingHTTPServer):
    """The destination; a caller that was killed is nothing to be told of."""

    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that broke."""


def main() -> None:
    """Serve until killed; the first line of output is the URL."""
    Destination.store = sys.argv[1]
    with closing(sqlite3.connect(sys.argv[1])) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.executescript(SCHEMA)
    server = Server(("127.0.0.1", 0), Destination)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
