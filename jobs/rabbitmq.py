"""A source that reads a RabbitMQ queue and acknowledges what batchrun has committed.

    source = ctx.enter(Queue(ctx, url, "orders", parse=as_order, idle="5s"))
    for batch in ctx.batches(source, target=database): ...

A message is acknowledged after the commit of its batch and never before. So it may come again: its
process was killed in between, the connection was lost, the broker was restarted. It is told by its
message_id, which the job has to keep where its rows are, under a unique key; one without is
rejected. Rejected messages are acknowledged with the batch that they were read for.

A batch is handed out when it is full, or after `idle` with what has come until then; nothing in
that time is the end. When a stop is asked for while it is filled, what has come goes back to the
queue. A broker sends at most one batch that is not acknowledged; nothing is lost with that.

While the job works on a batch nobody looks after the connection, so heartbeats are asked for each
half an hour only (`?heartbeat=SECONDS` in the URL says otherwise), and the kernel finds out if the
broker's machine is gone. Should the connection end meanwhile, the batch is committed all the same,
its messages come again on a new connection, and one line in the log says so.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from batchrun import ConfigurationError, Context, Interrupted, Reject, Secret, parse_duration

HEARTBEAT_S = 1800  # longer than batch_timeout makes no sense: RabbitMQ's consumer_timeout is equal
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
PREFETCH_MAX = 65_535  # of the protocol
LOOK_EVERY_S = 0.1  # whether a stop is asked for
IDLE_LEAST_S = 0.1


class Delivery(NamedTuple):
    """A message that was sent to us and is not acknowledged."""

    tag: int  # counts the deliveries of one connection, from 1
    raw: dict[str, Any]  # `message_id`, text or None, and `body`, bytes


class Queue:
    """The messages of a queue, each parsed from JSON; batchrun's cursor is (how many, last id)."""

    def __init__(
        self,
        ctx: Context[Any],
        url: str | Secret,
        queue: str,
        *,
        parse: Callable[[dict[str, Any]], Any] | None = None,
        idle: str = "5s",
    ) -> None:
        """Name the queue; it is connected to at the first read.

        Args:
            ctx: the job's context; its batch_size is how many messages the broker sends ahead.
            url: amqp://user:password@host:5672/vhost, or amqps.
            queue: its name; the queue must be there.
            parse: makes a record, which has a `message_id`, of `{"message_id": ..., "body": ...}`;
                a ValueError or KeyError rejects the message. Without it, that is the record.
            idle: how long the queue must be silent to end the run.
        """
        self._ctx, self._queue, self._parse = ctx, queue, parse
        self._idle_s = idle_s(idle)
        self._pika = pika = client()
        self._lost = (pika.exceptions.AMQPError, OSError)
        self._parameters = pika.URLParameters(url.reveal() if isinstance(url, Secret) else url)
        if self._parameters.heartbeat is None:
            self._parameters.heartbeat = HEARTBEAT_S
        self._parameters.tcp_options = self._parameters.tcp_options or KEEPALIVE
        self._parameters.client_properties = {"connection_name": f"batchrun {ctx.run_id}"}
        self._connection: Any = None
        self._channel: Any = None
        self._inbox = deque[Delivery]()  # not given to batchrun yet
        self._given = 0  # tag of the last one that was given, and is not acknowledged
        self._rejects: list[Reject] = []
        self._expected = 0

    def key(self, record: Any) -> Any:
        """Return the id of a message."""
        return record["message_id"]

    def total(self) -> int:
        """Return how many messages there were when the queue was connected to."""
        return self._expected

    def read(self, after: tuple[int, str] | None, limit: int) -> tuple[list[Any], Any]:
        """Return the next `limit` messages, or those that came within `idle`; none is the end."""
        count, limit = after[0] if after else 0, min(limit, PREFETCH_MAX)
        try:
            self._receive(count, limit)
        except self._lost as error:
            if self._connection is None:  # could not connect
                raise
            self._lose(error)
            self._receive(count, limit)
        taken = [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]
        if not taken:
            return [], None
        self._given = taken[-1].tag
        return self._parsed(taken, count), (count + len(taken), taken[-1].raw["message_id"] or "")

    def committed(self, _cursor: Any) -> None:
        """Acknowledge what was given; an attempt that begins has nothing yet: that comes again."""
        if not self._given:
            return
        try:
            self._channel.basic_ack(self._given, multiple=True)
        except self._lost as error:
            self._lose(error)
        self._given = 0

    def take_rejects(self) -> list[Reject]:
        """Return the messages that were refused since the last call."""
        rejects, self._rejects = self._rejects, []
        return rejects

    def parse(self, raw: dict[str, Any]) -> Any:
        """Return the record that a message is; a ValueError or KeyError says why it is none."""
        if not raw["message_id"]:
            raise ValueError("it has no message_id, by which it could be told if it came again")
        try:
            message = {"message_id": raw["message_id"], "body": json.loads(raw["body"])}
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        return message if self._parse is None else self._parse(message)

    def close(self) -> None:
        """Leave the queue; what is not acknowledged goes back to it, in its old place."""
        connection, self._connection = self._connection, None
        self._inbox.clear()
        self._given = 0
        if connection is not None and connection.is_open:
            with suppress(*self._lost):
                connection.close()

    def _parsed(self, taken: list[Delivery], count: int) -> list[Any]:
        records = []
        for number, message in enumerate(taken, count + 1):
            try:
                records.append(self.parse(message.raw))
            except (ValueError, KeyError) as error:
                reason = f"message {number}: {type(error).__name__}: {error}"
                self._rejects.append(Reject(message.raw, reason, number, raw=True))
        return records

    def _receive(self, count: int, limit: int) -> None:
        """Wait until there are `limit` messages, for `idle` at most."""
        if self._connection is None:
            self._connect(count)
        else:  # a broker that answers knows of our acks, and what hangs is no empty queue
            self._channel.queue_declare(self._queue, passive=True)
        until = time.monotonic() + self._idle_s
        while len(self._inbox) < limit and (left_s := until - time.monotonic()) > 0:
            if self._ctx.should_stop:
                raise Interrupted
            self._connection.process_data_events(time_limit=min(left_s, LOOK_EVERY_S))
            if not self._channel.consumer_tags:
                raise ConnectionAbortedError(f"the broker gives no more of {self._queue}")

    def _connect(self, count: int) -> None:
        where = f"{self._parameters.host}:{self._parameters.port}"
        try:
            connection = self._pika.BlockingConnection(self._parameters)
            self._channel = channel = connection.channel()
            declared = channel.queue_declare(self._queue, passive=True)
            self._expected = count + declared.method.message_count
            channel.basic_qos(prefetch_count=min(self._ctx.batch_size, PREFETCH_MAX))
            channel.basic_consume(self._queue, self._keep)
        except self._lost as error:
            raise ConnectionError(f"{self._queue} of RabbitMQ at {where}: {error!r}") from error
        self._connection = connection

    def _keep(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        raw = {"message_id": properties.message_id, "body": body}
        self._inbox.append(Delivery(method.delivery_tag, raw))

    def _lose(self, error: BaseException) -> None:
        self._ctx.log.warning(
            "The connection to RabbitMQ was lost, and is made anew; what was not acknowledged"
            " comes again, and is told by its message_id. (%r)",
            error,
        )
        self.close()


def client() -> Any:
    """Return the client library; ConfigurationError says how to install it."""
    try:
        import pika  # noqa: PLC0415 - an extra, which the settings of a job do without
    except ImportError as error:
        raise ConfigurationError(
            "A RabbitMQ queue cannot be read: the package pika is not installed.",
            unchanged="Nothing was begun.",
            todo="Type: python -m pip install pika",
        ) from error
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # it raises what it logs
    return pika


def idle_s(text: str) -> float:
    """Return `idle` in seconds; a ValueError says what is wrong with it."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ValueError(f"idle: {error}") from None
    if seconds < IDLE_LEAST_S:
        raise ValueError(f"idle: {text} is no time in which messages could come")
    return seconds
