"""A RabbitMQ queue is consumed by the shipped job: each order once, whatever dies in between.

The broker is a real one, which .ci/run starts. Every test has a queue of its own; the one that
restarts the broker waits until the others that use it have ended, and keeps them out.
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TEMPORARY, Project, clean_environment, wait_for
from test_11_worker import at, rows, run_row, worker_of

CONFIG = """\
min_free = "1MB"
[defaults]
batch_size = 10
[jobs.queue_orders]
url = { env = "ORDERS_URL" }
queue = "QUEUE"
idle = "250ms"
"""
Message = tuple[str | None, str | bytes]  # id and body


def order(number: int) -> Message:
    body = {"order": f"A-{number}", "sku": "x", "quantity": number}
    return f"id-{number}", json.dumps(body)


def is_held(worker: int) -> bool:
    """Tell whether a worker waits at its named point."""
    return " T " in Path(f"/proc/{worker}/stat").read_text()[:99]


def ctl(*words: str) -> str:
    """Run the broker's own rabbitmqctl."""
    command = [os.environ["BATCHRUN_TEST_RABBITMQCTL"], "--quiet", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@dataclass
class Shop:
    """A project with the shipped job, and a durable queue."""

    project: Project
    pika: Any
    url: str
    queue: str

    def configure(self, more: str = "", database: str = "sqlite:orders.db") -> None:
        """Write the configuration; `more` are lines of the job, which count more than CONFIG's."""
        given = {line.partition(" = ")[0]: line for line in CONFIG.split("\n")[4:]}
        given |= {line.partition(" = ")[0]: line for line in more.split("\n")}
        lines = [*CONFIG.split("\n")[:4], *given.values(), f'database = "{database}"']
        names = ("queue_orders", "rabbitmq")
        jobs = {name: (ROOT / "jobs" / f"{name}.py").read_text("utf-8") for name in names}
        self.project.write("\n".join(lines).replace("QUEUE", self.queue), **jobs)

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        with self.pika.BlockingConnection(self.pika.URLParameters(self.url)) as connection:
            yield connection.channel()

    def send(self, *messages: Message) -> None:
        with self.channel() as channel:
            for message_id, body in messages:
                how = self.pika.BasicProperties(message_id=message_id, delivery_mode=2)
                channel.basic_publish("", self.queue, body, how)

    def environment(self, point: str = "") -> dict[str, str]:
        return {**(at(point) if point else clean_environment()), "ORDERS_URL": self.url}

    def start(self, *words: str, point: str = "") -> subprocess.Popen[str]:
        return self.project.start(*words, env=self.environment(point))

    def consume(self, *words: str, code: int = 0, point: str = "") -> str:
        """Run or go on, expect an exit code, and return what it said."""
        words = words or ("run", "queue_orders")
        ended = self.project.run(*words, env=self.environment(point))
        assert ended.code == code, ended
        return ended.err

    def ready(self) -> tuple[int, int]:
        """Return how many messages nobody holds, and how many consumers there are."""
        with self.channel() as channel:
            found = channel.queue_declare(self.queue, passive=True).method
            return found.message_count, found.consumer_count

    def left(self) -> int:
        """Return how many messages there are; no consumer, so none is unacknowledged."""
        wait_for(lambda: self.ready()[1] == 0, "the consumer to be gone")
        return self.ready()[0]

    def orders(self) -> list[str]:
        path = self.project.folder / "orders.db"
        with contextlib.closing(sqlite3.connect(path)) as database:
            try:
                found = database.execute("SELECT message_id FROM orders ORDER BY quantity")
            except sqlite3.OperationalError:
                return []
            return [message_id for (message_id,) in found]

    def counts(self) -> dict[str, int]:
        """Return what the newest run has counted."""
        sql = "SELECT read, rejected, counts FROM run ORDER BY key DESC LIMIT 1"
        read, rejected, counts = rows(self.project, sql)[0]
        return {"read": read, "rejected": rejected, **json.loads(counts)}

    def cut_off(self) -> None:
        """Have the broker close the connection of the run."""
        run = rows(self.project, "SELECT id FROM run")[0][0]
        lines = ctl("list_connections", "pid", "client_properties").split("\n")
        (open_one,) = [line.split("\t")[0] for line in lines if f'"batchrun {run}"' in line]
        ctl("close_connection", open_one, "for a test")

    def log(self) -> str:
        return "".join(path.read_text() for path in (self.project.state / "logs").rglob("*.log"))

    def require_each_once(self, count: int, *, again: int = 0) -> None:
        """Require that all orders are in the table, and none in the queue; `again`: came twice."""
        assert self.orders() == [f"id-{number}" for number in range(1, count + 1)]
        assert self.left() == 0
        more = {"inserted": count, "duplicates": again}
        assert self.counts() == {"read": count + again, "rejected": 0, **more}


def counted(read: int, *, rejected: int = 0, inserted: int = 0) -> dict[str, int]:
    more = {"inserted": inserted, "duplicates": read - rejected - inserted}
    return {"read": read, "rejected": rejected, **more}


@pytest.fixture
def shop(project: Project, request: pytest.FixtureRequest) -> Iterator[Shop]:
    url = os.environ.get("BATCHRUN_TEST_RABBITMQ")
    if not url:
        pytest.skip("NO RABBITMQ: BATCHRUN_TEST_RABBITMQ names no broker (.ci/run starts one)")
    pika = pytest.importorskip("pika", reason="NO PIKA: install '.[test]'")
    made = Shop(project, pika, url, f"orders-{secrets.token_hex(6)}")
    alone = request.node.get_closest_marker("alone") is not None
    with (TEMPORARY / "rabbitmq.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        with made.channel() as channel:
            channel.queue_declare(made.queue, durable=True)
        made.configure()
        yield made
        project.kill_all()
        with made.channel() as channel:
            channel.queue_delete(made.queue)


# --- what it does --------------------------------------------------------------------------------


def test_every_order_is_in_the_table_and_none_in_the_queue(shop: Shop) -> None:
    shop.send(*map(order, range(1, 26)))
    assert shop.consume() == ""
    shop.require_each_once(25)
    assert rows(shop.project, "SELECT read FROM batch WHERE kind = 'batch'") == [(10,), (10,), (5,)]
    assert shop.consume() == ""  # nothing there is a success, too
    assert shop.counts() == {"read": 0, "rejected": 0}


def test_postgresql_takes_them_as_well(shop: Shop, postgres_dsn: str) -> None:
    shop.configure(database=postgres_dsn)
    shop.send(*map(order, [*range(1, 16), 3]))
    shop.consume()
    assert shop.counts() == counted(16, inserted=15)
    assert shop.left() == 0


def test_an_order_that_was_sent_again_is_a_duplicate_in_the_same_batch_and_in_a_later_run(
    shop: Shop,
) -> None:
    shop.send(order(1), order(2), order(1))
    shop.consume()
    shop.require_each_once(2, again=1)
    shop.send(order(2), order(3))
    shop.consume()
    assert shop.counts() == counted(2, inserted=1)
    assert shop.orders() == ["id-1", "id-2", "id-3"]


WITH = '{"order": "A", "sku": "x", "quantity": %s}'


def no_order(body: str) -> str:
    return f'ValueError: {{"message_id": "bad", "body": {body}}} is no order'


BAD: list[tuple[Message, str]] = [  # a message, and why it is rejected
    (
        (None, order(9)[1]),
        "ValueError: it has no message_id, by which it could be told if it came again",
    ),
    (("bad", "{"), "JSONDecodeError: Expecting property name enclosed in double quotes"),
    (("bad", b"\xff\xfe\x00"), "UnicodeDecodeError: 'utf-16-le' codec can't decode"),
    (("bad", "[" * 100_000), "ValueError: its JSON is nested too deeply"),
    (("bad", "[1]"), no_order("[1]")),
    (("bad", '{"order": "A", "sku": "x"}'), no_order('{"order": "A", "sku": "x"}')),
    (("bad", WITH % "true"), no_order(WITH % "true")),
    (("bad", WITH % 2**63), no_order(WITH % 2**63)),
    (("bad", WITH.replace("x", r"\ud800") % 1), no_order(WITH.replace("x", r"\ud800") % 1)),
]


def test_messages_that_are_no_orders_are_rejected_and_acknowledged_with_their_commit(
    shop: Shop,
) -> None:
    shop.configure("max_rejects = 9")
    shop.send(order(1), *[message for message, _ in BAD], order(2))
    shop.consume(code=10)
    assert (shop.orders(), shop.left()) == (["id-1", "id-2"], 0)
    assert shop.counts() == counted(11, rejected=9, inserted=2)
    kept = rows(shop.project, "SELECT record_number, reason FROM reject ORDER BY record_number")
    for (number, reason), expected, (_, why) in zip(kept, range(2, 11), BAD, strict=True):
        assert number == expected
        assert reason.startswith(f"message {number}: {why}")


def test_a_message_that_must_not_be_rejected_stays_in_the_queue_with_its_batch(shop: Shop) -> None:
    shop.send(order(1), ("bad", "{"), order(2))
    assert "message 2: JSONDecodeError" in shop.consume(code=1)
    assert (shop.orders(), shop.left()) == ([], 3)


def test_a_batch_of_rejects_alone_is_acknowledged_and_can_be_run_again(shop: Shop) -> None:
    shop.configure("max_rejects = 20")
    shop.send(*[(f"id-{number}", "{}") for number in range(1, 13)])
    shop.consume(code=10)
    assert (shop.orders(), shop.left()) == ([], 0)
    job = shop.project.folder / "jobs" / "queue_orders.py"
    mended = '{"order": "A", "sku": "x", "quantity": int(message["message_id"][3:])}'
    job.write_text(job.read_text().replace('match message["body"]', f"match {mended}"))
    shop.consume("rejects", "retry", "queue_orders")
    assert shop.orders() == [f"id-{number}" for number in range(1, 13)]


def test_a_record_that_the_table_refuses_is_isolated_and_the_others_are_done(shop: Shop) -> None:
    shop.configure("max_rejects = 1\nisolate = true")
    job = shop.project.folder / "jobs" / "queue_orders.py"
    guarded = job.read_text().replace("quantity BIGINT", "quantity BIGINT CHECK (quantity != 17)")
    job.write_text(guarded)
    shop.send(*map(order, range(1, 26)))
    shop.consume(code=10)
    assert shop.orders() == [f"id-{number}" for number in range(1, 26) if number != 17]
    assert shop.counts() == counted(25, rejected=1, inserted=24)
    assert shop.left() == 0


def test_what_trickles_in_is_committed_without_waiting_for_a_full_batch(shop: Shop) -> None:
    process = shop.start("run", "queue_orders", "--set", "idle=600ms")
    for number in range(1, 4):
        shop.send(order(number))
        wait_for(lambda: len(shop.orders()) == number, f"order {number}")  # noqa: B023 - at once
    assert shop.project.finish(process).code == 0
    shop.require_each_once(3)


# --- killed ---------------------------------------------------------------------------------------

# 30 orders: commit 1 makes the table, 2 to 4 are batches. Behind the target's commit the batch is
# done, and was not acknowledged: its ten messages come again.
KILLED = [
    ("batch.handed_out@3=kill", 0),
    ("target.commit@3=kill", 0),
    ("target.committed@3=kill", 10),
    ("batch.yielded@3=kill", 10),
    ("commit.prepared@3=kill", 10),
    ("checkpoint.fsync@3=kill", 10),
    ("ledger.committed@3=kill", 10),
    ("source.committed@3=kill", 10),
    ("source.committed@4=kill", 10),  # the last one: the run is not over before it is acknowledged
    ("target.committed@3=kill-both", 10),
    ("source.committed@3=kill-both", 10),
]


@pytest.mark.parametrize(("point", "again"), KILLED)
def test_killed_anywhere_it_has_every_order_once_and_leaves_none_behind(
    shop: Shop, point: str, again: int
) -> None:
    shop.send(*map(order, range(1, 31)))
    shop.consume(code=-signal.SIGKILL if "both" in point else 1, point=point)
    assert shop.left() > 0
    shop.consume("resume", "queue_orders")
    shop.require_each_once(30, again=again)


def test_a_worker_whose_supervisor_is_killed_acknowledges_the_batch_that_it_commits(
    shop: Shop,
) -> None:
    shop.send(*map(order, range(1, 31)))
    shop.consume(code=-signal.SIGKILL, point="batch.handed_out@3=kill-supervisor")
    wait_for(lambda: not shop.project.living(), "the worker to end")
    assert (len(shop.orders()), shop.left()) == (20, 10)
    shop.consume("resume", "queue_orders")
    shop.require_each_once(30)


# --- stopped --------------------------------------------------------------------------------------


STOPS = {  # how -> why the run is stopped then, and what goes on
    "TERM": ("stop", "resume queue_orders"),
    "pause": ("person", "resume queue_orders"),
    "drain": ("drain", "run queue_orders"),
    "cancel": ("person", "run queue_orders"),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_stop_while_it_waits_for_messages_gives_those_in_flight_back_at_once(
    shop: Shop, how: str
) -> None:
    shop.configure('idle = "1h"')
    shop.send(*map(order, range(1, 16)))
    process = shop.start("run", "queue_orders")
    wait_for(lambda: len(shop.orders()) == 10, "the first batch")
    wait_for(lambda: shop.ready() == (0, 1), "five messages in flight")
    if how == "TERM":
        process.send_signal(signal.SIGTERM)
    else:
        shop.consume(how, *["queue_orders"] * (how != "drain"))
    assert shop.project.finish(process, limit_s=10).code == 75
    reason, go_on = STOPS[how]
    assert run_row(shop.project)[1:] == (reason, 2)
    assert (len(shop.orders()), shop.left()) == (10, 5)
    shop.configure()
    if how == "drain":
        shop.consume("maintenance", "off")
    shop.consume(*go_on.split())
    assert (len(shop.orders()), shop.left()) == (15, 0)


def test_a_drain_in_the_middle_acknowledges_the_batch_that_is_going_on(shop: Shop) -> None:
    shop.send(*map(order, range(1, 31)))
    process = shop.start("run", "queue_orders", point="batch.handed_out@3=stop")
    worker = worker_of(process)
    wait_for(lambda: is_held(worker), "the second batch")
    draining = shop.start("drain")
    wait_for(lambda: rows(shop.project, "SELECT request FROM run") == [("drain",)], "the wish")
    os.kill(worker, signal.SIGCONT)
    assert shop.project.finish(process).code == 75
    assert shop.project.finish(draining).code == 0
    assert (len(shop.orders()), shop.left()) == (20, 10)
    shop.consume("maintenance", "off")
    shop.consume("resume", "queue_orders")
    shop.require_each_once(30)


# --- the connection -------------------------------------------------------------------------------


def test_a_connection_lost_during_the_work_is_made_anew_and_the_commit_stands(shop: Shop) -> None:
    shop.send(*map(order, range(1, 31)))
    process = shop.start("run", "queue_orders", point="batch.handed_out@3=stop")
    worker = worker_of(process)
    wait_for(lambda: is_held(worker), "the second batch")
    shop.cut_off()
    os.kill(worker, signal.SIGCONT)
    ended = shop.project.finish(process)
    assert (ended.code, ended.err) == (0, "")
    shop.require_each_once(30, again=10)
    (said,) = [line for line in shop.log().split("\n") if "RabbitMQ" in line]
    assert (
        "WARNING The connection to RabbitMQ was lost, and is made anew; what was not acknowledged"
        " comes again, and is told by its message_id." in said
    )


def test_a_connection_lost_while_it_waits_is_made_anew_and_what_was_in_flight_comes_again(
    shop: Shop,
) -> None:
    shop.configure('idle = "1h"')
    shop.send(*map(order, range(1, 6)))
    process = shop.start("run", "queue_orders")
    wait_for(lambda: shop.ready() == (0, 1), "five messages in flight")
    shop.cut_off()
    wait_for(lambda: "The connection to RabbitMQ was lost" in shop.log(), "it to be noticed")
    shop.send(*map(order, range(6, 11)))
    wait_for(lambda: len(shop.orders()) == 10, "a full batch")
    process.send_signal(signal.SIGTERM)
    assert shop.project.finish(process).code == 75
    shop.require_each_once(10)


@pytest.mark.alone
def test_messages_that_the_broker_takes_back_during_the_work_come_again(shop: Shop) -> None:
    def hold_at_most(held_ms: int, look_every_ms: int) -> None:
        limits = {"consumer_timeout": held_ms, "channel_tick_interval": look_every_ms}
        settings = (f"application:set_env(rabbit,{name},{ms})" for name, ms in limits.items())
        ctl("eval", ",".join(settings) + ".")

    shop.send(*map(order, range(1, 31)))
    hold_at_most(1_000, 100)
    try:
        process = shop.start("run", "queue_orders", point="batch.handed_out@3=stop")
        worker = worker_of(process)
        wait_for(lambda: is_held(worker), "the second batch")
        wait_for(lambda: shop.ready() == (20, 0), "the broker to take ten messages back")
    finally:
        hold_at_most(1_800_000, 60_000)
    os.kill(worker, signal.SIGCONT)
    assert shop.project.finish(process).code == 0
    shop.require_each_once(30, again=10)
    assert shop.log().count("The connection to RabbitMQ was lost") == 1


@pytest.mark.alone
def test_a_broker_that_hangs_is_not_taken_for_an_empty_queue(shop: Shop) -> None:
    shop.send(*map(order, range(1, 31)))
    broker = int(ctl("eval", "os:getpid().").strip().strip('"'))
    process = shop.start("run", "queue_orders", point="batch.handed_out@3=stop")
    worker = worker_of(process)
    wait_for(lambda: is_held(worker), "the second batch")
    os.kill(broker, signal.SIGSTOP)
    try:
        os.kill(worker, signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)  # six times as long as the queue must be silent
    finally:
        os.kill(broker, signal.SIGCONT)
    assert shop.project.finish(process).code == 0
    shop.require_each_once(30)


@pytest.mark.alone
@pytest.mark.slow
def test_a_broker_that_is_restarted_costs_tries_and_no_order(shop: Shop) -> None:
    shop.configure('max_tries = 50\nretry_first_wait = "500ms"\nretry_max_wait = "500ms"')
    shop.send(*map(order, range(1, 31)))
    process = shop.start("run", "queue_orders", point="batch.handed_out@3=stop")
    worker = worker_of(process)
    wait_for(lambda: is_held(worker), "the second batch")
    ctl("stop_app")
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: "ConnectionError" in shop.log(), "an attempt to find no broker")
    ctl("start_app")
    assert shop.project.finish(process).code == 0
    shop.require_each_once(30, again=10)


def test_a_queue_that_is_not_there_or_cannot_be_reached_is_named(shop: Shop) -> None:
    shop.configure('queue = "nowhere"')
    assert "nowhere of RabbitMQ at 127.0.0.1:" in (said := shop.consume(code=1))
    assert "NOT_FOUND" in said
    shop.configure('url = "amqp://guest:hidden-word@127.0.0.1:1"')
    said = shop.consume("run", "queue_orders", "--accept-settings", code=1)
    assert "of RabbitMQ at 127.0.0.1:1: " in said
    assert "Connection refused" in said
    assert "hidden-word" not in said + shop.log()


def test_a_queue_that_is_deleted_is_not_taken_for_one_that_is_empty(shop: Shop) -> None:
    shop.configure('idle = "1h"')
    shop.send(order(1))
    process = shop.start("run", "queue_orders")
    wait_for(lambda: shop.ready() == (0, 1), "the consumer")
    with shop.channel() as channel:
        channel.queue_delete(shop.queue)
    ended = shop.project.finish(process)
    assert ended.code == 1
    assert "NOT_FOUND" in ended.err
    with shop.channel() as channel:
        channel.queue_declare(shop.queue, durable=True)


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        ("soon", 'idle: a duration with its unit is wanted, such as "90s", "3m" or "1h30m"'),
        ("0", "idle: 0 is no time in which messages could come"),
    ],
)
def test_an_idle_that_is_none_is_refused_before_anything_begins(
    shop: Shop, idle: str, said: str
) -> None:
    shop.configure(f'idle = "{idle}"')
    assert said in shop.consume(code=2)
