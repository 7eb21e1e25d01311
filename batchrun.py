"""batchrun: a lightweight supervisor for long batch jobs, in one file, backed by one SQLite ledger.

The one idea: **a batch is committed when its checkpoint file is renamed into place.** Before the
rename the batch is done again; after it, the ledger is repaired from the checkpoint. The checkpoint
says where to go on; the ledger says what happened. Pause, failure, crash, deploy and reboot are one
thing: the attempt ends, and `resume` starts a new attempt at the checkpoint.

    cron, systemd, a person
      |  batchrun run JOB
      v
    supervisor -- holds the job's lock, admits the run, watches health, makes the run's edges
      |  starts, signals                                   |
      v                                                    v
    worker ---- reads the source, drives the job's      ledger      state/ledger.db
      |         generator, commits each batch  -------> checkpoint  state/checkpoints/JOB/RUN.json
      v
    target ---- the job's rows and batchrun's mark, in one transaction

The two processes talk through the ledger and by signals. A run moves between the nine states of
`RunState` along the edges of `TRANSITIONS` and no others. `waiting` is a start that is still to be
begun; `awaiting` a run that a person, or the outside, has to answer first:

    waiting --> reserved --> running --> succeeded, or cancelled: finished, nothing leaves
                 ^    ^         |
                 |    +---------+ the same supervisor begins the next attempt
                 |              v
                 +-- paused, interrupted, failed, awaiting: a start or `resume --all` goes on

The sections, bottom first; each uses only what stands above it:

     1. Vocabulary                nouns, states, edges, errors with exit codes
     2. Host                      clocks, processes, file systems; files replaced whole
     3. Configuration             TOML to rows that cannot change; settings, secrets
     4. Checkpoints               where to go on; the encoding of cursors
     5. Ledger                    what happened; one verb, one transaction
     6. Locks and maintenance     who may run
     7. Health                    readings and answers in, verdict out; probes
     8. Jobs                      what a job is, and what it is given; targets and sources
     9. Operations                effects in the outside world, each under a key, once ever
    10. Recovery                  what is found at rest: agrees, is kept, is fit, may go on
    11. Worker                    one attempt: gate, batch, commit, cleanup
    12. Supervisor                admission, attempts, retries, endings; drains, alerts
    13. Reports                   rows to text, JSON, Markdown and HTML; units
    14. Command line              words to calls

Twenty minutes of reading: the comment at the head of section 11 (the commit), the one of section 4
(the file), `Ledger.commit`; `VERDICTS` in section 10 (what a start finds) and `REPLIES` there (who
goes on with what stopped), `Ledger.admit`; then `Context.batches` and `Worker.drive`; for effects
outside the comment at the head of section 9 and `Operations.perform`. The head of every section
says its rules before the code does.
"""

from __future__ import annotations

import fcntl
import gc

import apsw

# The collector is off from here to the end of this file, where all that was made is made old at
# once, so that no look for garbage goes through it: a twentieth of a short command's time.
COLLECTS = gc.isenabled()
gc.disable()

import contextlib
import errno
import functools
import io
import json
import os
import re
import signal
import stat
import sys
import time
from _thread import allocate_lock, get_ident, start_new_thread
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from enum import IntEnum, StrEnum
from itertools import accumulate, chain, islice, pairwise, product
from operator import attrgetter, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Never,
    NoReturn,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

if TYPE_CHECKING:
    import hashlib
    import subprocess
    from dataclasses import Field
    from typing import IO, NamedTuple
    from urllib.parse import SplitResult

VERSION = "0.1.0"
T = TypeVar("T")

if not TYPE_CHECKING:

    class _RowKind(type):
        """Makes what typing.NamedTuple makes, but compiles nothing: a tenth of the start."""

        def __new__(cls, name, bases, body):  # noqa: ANN001, ANN204 - no type checker sees this
            fields = body["_fields"] = tuple(body.get("__annotations__", ()))
            body["_field_defaults"] = {field: body[field] for field in fields if field in body}
            body |= {field: property(itemgetter(place)) for place, field in enumerate(fields)}
            return super().__new__(cls, name, bases, {"__slots__": (), **body})

    class NamedTuple(tuple, metaclass=_RowKind):
        """The base of all rows: a tuple whose places have names."""

        __slots__ = ()

        def __new__(cls, *values, **named):  # noqa: ANN002, ANN003, ANN204, D102
            if len(values) == len(cls._fields) and not named:
                return tuple.__new__(cls, values)
            if not values and tuple(named) == cls._fields:
                return tuple.__new__(cls, named.values())
            rest = cls._fields[len(values) :]
            given = cls._field_defaults | named
            if len(values) > len(cls._fields) or not named.keys() <= set(rest) <= given.keys():
                raise TypeError(f"{cls.__name__} has the fields {cls._fields}; given: {[*named]}")
            return tuple.__new__(cls, (*values, *map(given.get, rest)))

        @classmethod
        def _make(cls, values):  # noqa: ANN001, ANN206
            return cls(*values)

        def _asdict(self):  # noqa: ANN202
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **named):  # noqa: ANN003, ANN202
            return type(self)(**(self._asdict() | named))

        def __getnewargs__(self):  # noqa: ANN204 - to be copied, or sent to another process
            return tuple(self)

        def __repr__(self):  # noqa: ANN204
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"


# ======================================================================================
# 1. Vocabulary: nouns, states, edges, errors with exit codes
# ======================================================================================
#
# Wish and fact are two columns of a run: `request` (what somebody asks for) and `state` (what is).
# Every edge of the state table stands below with its sentence; the ledger enforces the same table
# by triggers. Nothing leaves a finished state; a rollback is a run of its own.


class RunState(StrEnum):
    """The nine states of a run."""

    WAITING = "waiting"  # asked for and durably stored, not admitted yet
    RESERVED = "reserved"  # admitted and owned by a live supervisor; no batch has begun
    RUNNING = "running"  # a live worker holds the job's lock
    AWAITING = "awaiting"  # stopped until a person or the outside answers; no process is needed
    PAUSED = "paused"  # stopped at a safe point on purpose; will go on
    INTERRUPTED = "interrupted"  # the process went away without deciding
    FAILED = "failed"  # the batch was not to be tried again, and plan B was to fail
    SUCCEEDED = "succeeded"  # everything was read and committed
    CANCELLED = "cancelled"  # someone decided that it shall not go on


FINISHED = (RunState.SUCCEEDED, RunState.CANCELLED)

NEW = "new"  # the state before the first: a run that is not in the ledger yet

TRANSITIONS: dict[tuple[str, str], str] = {
    (NEW, "waiting"): "a start was stored to be begun later",
    (NEW, "reserved"): "a start was admitted",
    ("waiting", "reserved"): "a stored start was admitted",
    ("waiting", "cancelled"): "a stored start was withdrawn",
    ("reserved", "running"): "the worker is about to hand out its first batch",
    ("reserved", "succeeded"): "the source was empty, or everything had been committed already",
    ("reserved", "awaiting"): "a person is needed before the first batch",
    ("reserved", "paused"): "a stop was asked for before the first batch",
    ("reserved", "interrupted"): "the process went away before the first batch",
    ("reserved", "failed"): "the job raised before its first batch",
    ("reserved", "cancelled"): "cancelled before the first batch",
    ("running", "reserved"): "the attempt ended; the same supervisor begins the next one",
    ("running", "succeeded"): "the generator returned: all was read, or the job said it is done",
    ("running", "awaiting"): "the job stopped to wait for an answer, or used its tries up",
    ("running", "paused"): "stopped at a safe point on purpose",
    ("running", "interrupted"): "the worker went away without an ending",
    ("running", "failed"): "the job raised, or its worker died, and plan B was to fail",
    ("running", "cancelled"): "cancelled at a safe point",
    ("awaiting", "reserved"): "the answer is there; a new attempt was admitted",
    ("awaiting", "cancelled"): "cancelled while it waited for an answer",
    ("paused", "reserved"): "a new attempt was admitted after a pause",
    ("paused", "cancelled"): "cancelled while it was paused",
    ("interrupted", "reserved"): "a new attempt was admitted after an interruption",
    ("interrupted", "cancelled"): "cancelled after an interruption",
    ("failed", "reserved"): "a new attempt was admitted after a failure",
    ("failed", "cancelled"): "cancelled after a failure",
}


class Request(StrEnum):
    """What somebody asks of a run that is going on; honoured at its next safe point."""

    PAUSE = "pause"
    CANCEL = "cancel"
    DRAIN = "drain"


class Reason(StrEnum):
    """Why a run is in its state, where the state alone does not say it."""

    NONE = ""
    PERSON = "person"
    STOP = "stop"
    HEALTH = "health"
    MAINTENANCE = "maintenance"
    DRAIN = "drain"
    RETRY = "retry"
    POISON = "poison"
    APPROVAL = "approval"
    OPERATION = "operation"


class Ending(StrEnum):
    """How an attempt ended, as its own generation recorded it."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    RAISED = "raised"
    REFUSED = "refused"
    CHANGED = "source changed"
    CLEANED = "cleaned up"
    AWAITS = "awaits an answer"
    DIED = "died"
    OVERDUE = "overdue"
    RECYCLED = "recycled"


class ExitCode(IntEnum):
    """What a command's exit status says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FINDINGS = 3
    NOT_FOUND = 4
    STATE_DIRECTORY = 5
    DONE_WITH_REJECTS = 10
    BUSY = 11
    MAINTENANCE = 12
    PERSON_NEEDED = 13
    LOST_OWNERSHIP = 14
    STOPPED = 75
    INTERRUPTED = 130


EXIT_SENTENCES = {
    ExitCode.DONE: "done, every record",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "usage or configuration",
    ExitCode.FINDINGS: "findings: something needs someone",
    ExitCode.NOT_FOUND: "no such job or run",
    ExitCode.STATE_DIRECTORY: "the state directory cannot be used: full, read-only, I/O error, ...",
    ExitCode.DONE_WITH_REJECTS: "done; records were rejected within the limits",
    ExitCode.BUSY: "busy: another process runs this job (13 once that is stalled)",
    ExitCode.MAINTENANCE: "maintenance: refused",
    ExitCode.PERSON_NEEDED: "a person is needed; the message ends with what to type",
    ExitCode.LOST_OWNERSHIP: "lost ownership: another generation took over",
    ExitCode.STOPPED: "stopped at a safe point because somebody asked; `run` or `resume` goes on,"
    " unless it was cancelled",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C at a safe point; `run` or `resume` goes on",
}


class BatchrunError(Exception):
    """A letter to the person who reads it: what, why, what is unchanged, what to type."""

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, why: str = "", unchanged: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.unchanged, self.todo = what, why, unchanged, todo

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.unchanged, self.todo) if part)


class JobError(BatchrunError):
    """The job broke its contract with batchrun."""


class Unreachable(JobError):
    """A database does not let the job in now; trying again may help, and costs no try."""


class SourceError(BatchrunError):
    """A source cannot be read as it was declared."""


class TooManyRejects(BatchrunError):
    """More records were rejected than `max_rejects` allows."""


class Incomplete(BatchrunError):
    """What was asked for is shown but for a part that cannot be read."""

    exit_code = ExitCode.FINDINGS


class ConfigurationError(BatchrunError):
    """The configuration or the command line is wrong; nothing was begun."""

    exit_code = ExitCode.USAGE


class NotFound(BatchrunError):
    """There is no such job or run."""

    exit_code = ExitCode.NOT_FOUND


class StateDirectoryError(BatchrunError):
    """The state directory cannot be used as it is."""

    exit_code = ExitCode.STATE_DIRECTORY


class OutcomeUnknown(StateDirectoryError):
    """A write may or may not have happened; only the next start can find out."""


class Busy(BatchrunError):
    """Another process owns the job, or holds the ledger for too long."""

    exit_code = ExitCode.BUSY


class Stalled(Busy):
    """The process that owns the job gets nothing done; a person is to end it."""

    exit_code = ExitCode.PERSON_NEEDED


class MaintenanceOn(BatchrunError):
    """The maintenance lockfile is there: nothing new starts."""

    exit_code = ExitCode.MAINTENANCE


class MaintenanceOverdue(MaintenanceOn):
    """The maintenance should be over by now: a person is to end it, or to say that it goes on."""

    exit_code = ExitCode.PERSON_NEEDED


class PersonNeeded(BatchrunError):
    """Going on needs a decision that only a person can take."""

    exit_code = ExitCode.PERSON_NEEDED


class SourceChanged(PersonNeeded):
    """The source is not the one that the checkpoint was written for."""


class KeyReused(PersonNeeded):
    """An idempotency key was claimed before, for other arguments."""


class LostOwnership(BatchrunError):
    """Another generation took the run over; this process may not write any more."""

    exit_code = ExitCode.LOST_OWNERSHIP


class OutputRefused(BatchrunError):
    """What a command has to say cannot be written."""

    def __init__(self, error: OSError) -> None:
        lost = "What the command was to do is done; only its words are lost."
        super().__init__(f"Standard output cannot be written: {error.strerror}.", unchanged=lost)


class IllegalTransition(BatchrunError):
    """A verb found the run in a state from which it has no edge."""


class Fatal(Exception):
    """For a job to raise, or to derive from: trying the batch again would not help."""


class CannotTell(Exception):
    """For a `lookup` to raise: the destination cannot say whether the operation was done."""


class Interrupted(BaseException):
    """Raised in the job's own frame when a batch is to be given up at once."""


class ProcessIdentity(NamedTuple):
    """A process, told apart from a later one with the same number."""

    pid: int  # process number
    ticks: int  # start time in clock ticks since boot (field 22 of /proc/PID/stat)
    boot_id: str  # the kernel's random id of this boot


class Run(NamedTuple):
    """One row of the table `run`: a job from its first start to its end, over all attempts.

    Counts are totals over the committed batches; `number` is the newest commit, 0 before the first.
    """

    key: int
    id: str
    job: str
    state: RunState
    reason: str
    request: str | None
    generation: int
    created_at: str
    changed_at: str
    ended_at: str | None
    number: int
    hash: str
    checkpoint: bytes | None
    batches: int
    read: int
    rejected: int
    expected: int | None
    counts: dict[str, int]
    settings: dict[str, str]
    overrides: dict[str, str]
    job_version: int | None
    fresh_in_a_row: int
    read_s: float
    work_s: float
    own_s: float
    error: str | None
    retry_of: str | None  # id of the run whose rejects this one takes up again
    rollback_of: str | None  # id of the run whose batches this one undoes
    rollback_to: int | None  # the newest commit of that run which it leaves as it is
    tried: str | None  # the armed try, as JSON: loop, cursor, limit, of one record its end
    tries: int  # how many tries of it were charged
    paused_s: float  # for how long supervisors kept it paused because it was not well
    checks_at: str | None  # paused with a live owner: when that looks again whether it is well
    deferred: dict[str, Any] | None  # a start that is to be begun: at, who, acceptances, batches
    size: int | None  # the limit where isolation looks for a bad record; 0: it is the next one

    @property
    def finished(self) -> bool:
        """Whether nothing can go on here any more."""
        return self.state in FINISHED

    @property
    def is_whole(self) -> bool:
        """Whether it does the job itself: no retry of rejects, no rollback."""
        return self.retry_of is None and self.rollback_of is None


class Attempt(NamedTuple):
    """One row of the table `attempt`: one generation of a run and how it ended."""

    generation: int
    supervisor: ProcessIdentity
    worker: ProcessIdentity | None
    began_at: str
    ended_at: str | None
    ending: str | None
    reason: str | None
    exit_code: int | None
    signal: int | None
    error: str | None
    unchanged: str | None
    todo: str | None
    peak_rss_bytes: int | None
    from_number: int
    to_number: int | None
    releases: list[dict[str, Any]]
    charged: int  # whether its ending was charged as a try of the batch
    # whether trying again may help, or IN_HALVES, or AT_NO_COST; None if that is no question
    retry: int | None

    @property
    def may_be_followed(self) -> bool:
        """Whether the same supervisor may begin the next attempt without being asked."""
        return bool(self.retry) or self.ending == Ending.RECYCLED


IN_HALVES = 2  # `attempt.retry`: a batch failed, and its bad record may be looked for
AT_NO_COST = 3  # likewise: what the job needs was not there, which is charged to no batch


class BatchRow(NamedTuple):
    """One row of the table `batch`: one link of a run's chain of commits."""

    number: int
    generation: int
    kind: str
    loop: str
    cursor: str
    first_key: str | None
    last_key: str | None
    read: int
    rejected: int
    counts: dict[str, int]
    hash: str
    at: str
    elapsed_s: float
    remembered: int  # rows
    images: str | None  # the file that has them


class Cleanup(NamedTuple):
    """One row of the table `cleanup`: what `ctx.cleanup` recorded; pending while not done."""

    id: int
    run: str
    job: str
    function: str  # module:name
    arguments: dict[str, Any]
    made_at: str
    done_at: str | None
    error: str | None
    elapsed_s: float | None
    of_run: int = 0  # 1: recorded by `ctx.on_finish`, not called before the run is finished

    @property
    def call(self) -> str:
        """The call as it would be written."""
        return f"{self.function}({', '.join(f'{n}={v!r}' for n, v in self.arguments.items())})"


class Approval(NamedTuple):
    """One row of the table `approval`: what a job asks a person, and the answer if there is one."""

    name: str  # of the question, once in a run
    summary: str  # what is to be approved, in the job's words
    asked_at: str
    answered_at: str | None
    who: str | None
    why: str | None

    @property
    def words(self) -> str:
        """The question in words."""
        return f"It asks for the approval {self.name!r}: {self.summary}"


class Operation(NamedTuple):
    """One row of the table `operation`: an effect in the outside world, claimed under its key."""

    id: int  # rises, also over runs
    job: str
    key: str  # the idempotency key; once in a job
    run: int  # key of the row of the run that claimed it last
    generation: int
    number: int  # of the commit that it belongs to
    arguments: bytes  # SHA-256 of what the call was given
    lookup: str | None  # JSON: what `reconcile` calls to ask the destination; empty: it cannot
    irreversible: int  # whether a rollback cannot take it back, as the job says
    claimed_at: str
    outcome: str | None  # done, confirmed, freed; None: open
    receipt: str | None  # what the call, the lookup or a person gave, as JSON
    ended_at: str | None
    who: str | None  # gave the outcome, if it was not the call: lookup, worker, a person
    why: str | None  # the outcome is so; of an open one, the error of its call


def reason_of(request: str) -> Reason:
    """Return why a run rests that has honoured a request."""
    return Reason.DRAIN if request == Request.DRAIN else Reason.PERSON


def is_paused_by_person(run: Run) -> bool:
    """Tell whether a person paused a run, or asked for it and its owner went away before."""
    decided = run.state == RunState.PAUSED and run.reason == Reason.PERSON
    return decided or run.request == Request.PAUSE


class Event(NamedTuple):
    """One row of the table `event`; ids only rise and are the ledger's clock."""

    id: int
    at: str
    run: str | None
    job: str | None
    who: str
    what: str
    why: str


class Lockfile(NamedTuple):
    """The maintenance lockfile as it was found."""

    device: int  # with the next one, what tells it from another one of that name; 0 if unknown
    inode: int
    since: str  # wall time of its last writing; empty if it cannot be looked at
    by: str  # who, as it says, else its owner
    reason: str
    until: str | None  # when the maintenance is to end, as it says
    scopes: list[str]  # what it closes: `job:NAME`, `tag:NAME`, `version:NAME<N`; none: everything
    overdue: str  # why the maintenance should be over by now, in words; empty if it should not


class Barrier(NamedTuple):
    """One row of the table `barrier`: a maintenance, between two events of the ledger's clock."""

    id: int
    device: int
    inode: int
    at: str
    who: str
    reason: str
    until: str | None
    scopes: list[str]
    opened: int  # the event before which starts were admitted
    overdue: int | None  # the event by which it was first found overdue
    closed: int | None  # the event after which starts are admitted again
    closed_at: str | None
    closed_why: str | None

    def is_of(self, found: Lockfile | None) -> bool:
        """Tell whether a lockfile is still the one of this barrier, and closes the same."""
        mine = (self.device, self.inode, self.scopes)
        return found is not None and mine == (found.device, found.inode, found.scopes)


class Drain(NamedTuple):
    """One row of the table `drain`: what brings the runs that a barrier found to a stop."""

    id: int
    barrier: int
    at: str
    who: str
    deadline_s: float
    ended_at: str | None
    exit_code: int | None  # None as long as it goes on, or if it was killed
    report: dict[str, Any] | None  # how it ended: an Account, but for its barrier


class Reject(NamedTuple):
    """A record that was left out, and the reason in words."""

    record: object
    reason: str
    number: int | None = None  # of the record in its source, from 1, if that is known
    raw: bool = False  # whether it is the source's own record, which `parse` has refused
    handed: bool = True  # whether it is a record of the batch, or raw; a retry needs that


class RejectRow(NamedTuple):
    """One row of the table `reject`."""

    id: int  # place among the rejects of a run and of its retries, from 1; it never changes
    run: str  # id of the run that rejected it, which may be a retry
    number: int
    generation: int
    place: int
    loop: str
    record: str  # as text, secrets masked
    reason: str
    at: str
    value: str | None  # as typed JSON (`encode_cursor`); None if it cannot be had back
    raw: int
    record_number: int | None
    tries: int  # which try of its batch it was, from 1
    state: str  # open, dropped or retried
    retry: str | None  # id of the newest run that took it up again
    why: str | None  # why it was dropped
    spot: tuple[int, int, int]  # key of the run, commit number, place: their order


FACTORS = ("memory", "connections", "dependencies")  # of a health check


class Wellness(StrEnum):
    """What is known of a factor of health; unknown is not bad."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"


class Reading(NamedTuple):
    """One row of the table `reading`: what a sample saw; None for what could not be seen."""

    id: int
    at: str
    generation: int
    number: int  # the run's newest commit at that time
    available_bytes: int | None
    limit_bytes: int | None
    limit_source: str | None  # which limit leaves the least: `cgroup /a/b`, `RLIMIT_AS`, `host`
    rss_bytes: int | None  # of the worker and all below it, as are the counts that follow
    connections: int | None  # to the declared databases
    open_files: int | None
    threads: int | None
    children: int | None
    pressure: float | None  # per cent of the last 10 s in which somebody waited for memory


class HealthCheck(NamedTuple):
    """One row of the table `health_check`: each factor as `bad: why`, and what followed."""

    id: int
    at: str
    generation: int
    memory: str
    connections: str
    dependencies: str
    verdict: str
    why: str
    elapsed_s: float


class Finding(NamedTuple):
    """Something that a check found: what is wrong, and what to type."""

    what: str
    why: str = ""
    todo: str = ""


# What people are told of, in the order in which it is told.
ALERTS = ("failed", "awaiting", "paused", "stalled", "overdue", "late", "recovered")
PINGS = {"ping start": "/start", "ping success": "", "ping fail": "/fail"}  # kind -> end of its URL


class Alert(NamedTuple):
    """What people are told, once: one row of the table `alert` as soon as it is raised."""

    kind: str  # one of ALERTS or PINGS
    about: str  # with the kind, what it is known by as long as it stands
    job: str | None
    run: str | None  # id
    why: str
    todo: str = ""
    id: int | None = None
    at: str = ""
    event: int = 0  # the ledger's clock when it was raised
    pending: Sequence[str] = ()  # the ways by which it is still to be told
    closed_at: str | None = None  # until then it stands


class Delivery(NamedTuple):
    """One try to tell an alert: its row in the table `delivery`, and how often it was tried."""

    id: int
    alert: Alert
    way: str
    tries: int


# ======================================================================================
# 2. Host: all that is asked of the machine
# ======================================================================================
#
# The only reader of clocks and processes. Intervals are monotonic; wall time is UTC and a label.
# A file is replaced in two steps, so that the slow one needs no lock:
#
#   prepare   unique temporary file in the same directory (O_EXCL, O_NOFOLLOW, 0600), written whole
#             and fsynced. Nothing is visible yet; a failure removes the temporary file.
#   publish   rename over the final name, fsync of the directory. Visible and durable.
#
# An fsync that failed is never repeated: the kernel marks the pages clean, and the second call
# would succeed without the bytes being on the disk.
#
# systemd is told by datagrams (sd_notify), said by `Systemd.turn` and by nothing else:
#
#   READY=1              first of all, before any wait, also by a start that is refused; once
#   STATUS=...           what is done now, one line; when it changed, at most once a second
#   STOPPING=1           at the first stop; once
#   EXTEND_TIMEOUT_USEC  once a second while a safe point is awaited after a stop, and never
#                        longer than our own rule lets a worker live
#   WATCHDOG=1           every half WATCHDOG_USEC. No thread says it: each wait of the supervisor's
#                        loop is a turn, so a loop that hangs falls silent
#
# A full socket or one that is gone holds nobody up: what could not be said is said at a later turn.
#
# Gauges never raise: processes vanish while they are looked at, and some may not be seen; what
# cannot be read is left out or None. Memory is what is left within the limit that would kill us
# first, the file cache that the kernel gives back discounted. Every group above us is asked:
#
#   cgroup v2   memory.max - (memory.current - inactive_file); memory.high only slows down
#   cgroup v1   memory.limit_in_bytes - (memory.usage_in_bytes - total_inactive_file)
#   RLIMIT_AS   the limit - the address space of the process itself
#   host        what the kernel calls available
#
# Connections are counted from outside. A socket of a process is one of its descriptors, and the
# kernel's tables tell the other end of each: /proc/PID/net/tcp and tcp6 for TCP, its sock_diag
# messages for unix sockets (the client's end has no name in /proc). An SQLite database is a file.

TEMPORARY_SUFFIX = ".tmp"
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse.", "9p", "afs", "ceph", "glusterfs", "lustre")
VOLATILE_FILE_SYSTEMS = ("tmpfs", "ramfs")
VOLATILE_FOLDERS = ("/tmp", "/var/tmp", "/run")  # noqa: S108 - named in order to warn about them
FRAME_BYTES = os.sysconf("SC_PAGE_SIZE")  # what the kernel counts memory in
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
TIME_ERROR = 5  # <sys/timex.h>
ANSWER_S = 10.0  # what a command of the machine may take
STATUS_EVERY_S = EXTEND_EVERY_S = 1.0
EXTEND_BY_S = 10.0  # a supervisor that falls silent gets this much, and no more
LONGEST_MESSAGE = 4_096  # bytes; Kubernetes takes no more
LONGEST_STATUS = 500  # characters; systemd drops a datagram of more than 4,096 bytes

NAMED_POINT = os.environ.get("BATCHRUN_TEST_POINT", "")


def reach(point: str, number: int = 0) -> None:
    """Pass a named point: a place where a test may hold, kill or fail this process.

    BATCHRUN_TEST_POINT is `POINT[@NUMBER]=ACTION`; unset, a point costs one comparison.
    """
    if NAMED_POINT:
        where, _, action = NAMED_POINT.partition("=")
        if where in (point, f"{point}@{number}"):
            _act(action)


def _act(action: str) -> None:
    """Do what a named point asks for: kill, kill-supervisor, kill-both, stop, or an errno name."""
    if action in ("kill-supervisor", "kill-both"):
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.001)
    if action in ("kill", "kill-both"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if hasattr(errno, action):
        raise OSError(getattr(errno, action), "at a named point")


class Memory(NamedTuple):
    """How much memory is left until the limit of `source` kills somebody."""

    available_bytes: int
    limit_bytes: int
    source: str


class Peer(NamedTuple):
    """The other end of a connection: address and port, or the path of a socket or file."""

    address: str
    port: int = 0


class Usage(NamedTuple):
    """What a process and all below it use; memory that they share is counted for each."""

    rss_bytes: int
    open_files: int | None  # None if they may not be seen; then connections are not known either
    threads: int
    children: int
    connections: dict[str, int]  # how many, by the name of what is at their other end


class Host:
    """The machine: clocks, processes, file systems. Tests pass a Host of their own."""

    proc = Path("/proc")
    cgroups = Path("/sys/fs/cgroup")
    root_units = Path("/etc/systemd/system")

    def now(self) -> str:
        """Return wall time as UTC text with milliseconds, `2026-01-31T23:59:59.123Z`."""
        return self.later(0)

    def later(self, seconds: float) -> str:
        """Return what wall time will be in so many seconds, if nobody sets it."""
        return utc_text(time.time_ns() + int(seconds * 1e9))

    def monotonic(self) -> float:
        """Return seconds on a clock that no one can set."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait; signals that have a Python action cut in."""
        time.sleep(seconds)

    def boot_id(self) -> str:
        """Return the kernel's random id of this boot."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def identify(self, pid: int | None = None) -> ProcessIdentity | None:
        """Return who a process is (by default this one), or None if there is no such process."""
        pid = os.getpid() if pid is None else pid
        fields = self._stat_fields(pid)
        return ProcessIdentity(pid, int(fields[19]), self.boot_id()) if fields else None

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Tell whether exactly this process still lives; a zombie does not."""
        fields = self._stat_fields(process.pid)
        return (
            bool(fields)
            and int(fields[19]) == process.ticks
            and fields[0] != "Z"
            and process.boot_id == self.boot_id()
        )

    def is_stopped(self, process: ProcessIdentity) -> bool:
        """Tell whether a process is frozen (SIGSTOP, or a debugger)."""
        fields = self._stat_fields(process.pid)
        return bool(fields) and fields[0] in ("T", "t")

    def send(self, process: ProcessIdentity, number: signal.Signals) -> None:
        """Send a signal to exactly this process, or to nobody: its number may be another's soon."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            try:
                if self.is_alive(process):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def _stat_fields(self, pid: int) -> list[str]:
        """Return /proc/PID/stat from field 3 (the state) on; empty if there is no such process."""
        return _text_of(self.proc / f"{pid}/stat").rpartition(")")[2].split()

    def holders(self, descriptor: int) -> list[int]:
        """Return the processes that have the file of this descriptor open, this one excepted."""
        wanted = os.fstat(descriptor)
        others = (f for f in Path("/proc").glob("[0-9]*") if int(f.name) != os.getpid())
        return sorted(int(folder.name) for folder in others if _has_open(folder, wanted))

    def age_s(self, process: ProcessIdentity) -> float:
        """Return for how long a process has lived."""
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime_s - process.ticks / os.sysconf("SC_CLK_TCK"))

    def children(self, pid: int | None = None) -> list[int]:
        """Return the direct children of a process (by default this), reparented ones included."""
        found: list[int] = []
        with contextlib.suppress(OSError):  # it may vanish, or a thread of it, at any moment
            for thread in (self.proc / f"{pid or os.getpid()}/task").iterdir():
                found += map(int, _text_of(thread / "children").split())
        return found

    def memory(self, pid: int | None = None) -> Memory | None:
        """Return what is left within the limit that kills a process first; None if unreadable."""
        place = self.proc / str(pid or "self")
        found = [*self._host_memory(), *self._group_memory(place), *_address_space(place)]
        return min(found, default=None)

    def _host_memory(self) -> Iterator[Memory]:
        import psutil  # 40 ms; not before the first sample

        with contextlib.suppress(OSError, LookupError, ValueError):
            psutil.PROCFS_PATH = str(self.proc)
            host = psutil.virtual_memory()
            yield Memory(host.available, host.total, "host")

    def _groups(self, place: Path) -> Iterator[tuple[Path, str, GroupFiles]]:
        """Yield where the control groups of a process are that count memory: root, name, files."""
        for line in _text_of(place / "cgroup").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                alone = (self.cgroups / "cgroup.controllers").exists()
                yield self.cgroups if alone else self.cgroups / "unified", group, GROUP_V2
            elif "memory" in controllers.split(","):
                yield self.cgroups / "memory", group, GROUP_V1

    def _group_memory(self, place: Path) -> Iterator[Memory]:
        """Yield what each control group above a process leaves of memory, if it has a limit."""
        for root, group, files in self._groups(place):
            for each in (Path(group), *Path(group).parents):
                yield from _room_in_group(root / str(each).lstrip("/"), files, str(each))

    def memory_pressure(self) -> float | None:
        """Return the per cent of the last 10 s in which somebody waited for memory (PSI)."""
        found = re.match(r"some avg10=([0-9.]+)", _text_of(self.proc / "pressure/memory"))
        return float(found[1]) if found else None

    def usage(self, pid: int, peers: Mapping[str, Iterable[Peer]] = {}) -> Usage | None:
        """Return what a process and all below it use; None if it is gone.

        `peers` are the other ends of the connections to be counted, by name.
        """
        pids = [pid]
        for each in pids:  # grows while it is walked
            pids += [child for child in self.children(each) if child not in pids]
        stats = [fields for each in pids if (fields := self._stat_fields(each))]
        seen = [_links(self.proc / f"{each}/fd") for each in pids]
        if not self._stat_fields(pid):
            return None
        links = [link for each in seen for link in each or ()]
        return Usage(
            sum(int(fields[21]) for fields in stats) * FRAME_BYTES,
            None if seen[0] is None else len(links),
            sum(int(fields[17]) for fields in stats),
            len(stats) - 1,
            {} if seen[0] is None else self._connections(pid, links, peers),
        )

    def _connections(
        self, pid: int, links: list[str], peers: Mapping[str, Iterable[Peer]]
    ) -> dict[str, int]:
        """Count the descriptors, given by what they link to, whose other end is a peer."""
        counts = dict.fromkeys(peers, 0)
        sockets = {int(link[8:-1]) for link in links if link.startswith("socket:[")}
        names = {place: name for name, ends in peers.items() for e in ends for place in _places(e)}
        ends = [link for link in links if link in names]
        for table in ("tcp", "tcp6") if names and sockets else ():
            for line in _text_of(self.proc / f"{pid}/net/{table}").splitlines()[1:]:
                fields = line.split(None, 10)
                if fields[2] in names and int(fields[9]) in sockets:
                    ends.append(fields[2])
        if sockets and any(Path(place).is_socket() for place in names if place[0] == "/"):
            ends += [path for inode, path in _unix_peers() if inode in sockets and path in names]
        for end in ends:
            counts[names[end]] += 1
        return counts

    def user_name(self, uid: int) -> str:
        """Return a user's name, or the number of one without a name."""
        import pwd  # only in events and letters

        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    def free_bytes(self, path: Path) -> int:
        """Return what an ordinary user may still write beside a path; 0 without a free inode."""
        room = os.statvfs(path)
        no_inode = room.f_files > 0 and room.f_favail == 0  # btrfs has no number of them
        return 0 if no_inode else room.f_bavail * room.f_frsize

    def can_map(self, folder: Path, size_bytes: int) -> bool:
        """Tell whether a file of that size there could be written to by a map of it.

        Where blocks are smaller than a page, a file that SQLite has made for its map has holes, and
        a process that writes to one is killed (SIGBUS) if no block is free. What statvfs calls free
        is not all to be had: only trying tells.
        """
        if os.statvfs(folder).f_frsize >= os.sysconf("SC_PAGESIZE"):
            return True
        try:
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            with os.fdopen(file, "wb", buffering=0) as tried:
                return tried.write(bytes(size_bytes)) == size_bytes
        except OSError as error:
            return error.errno not in (errno.ENOSPC, errno.EDQUOT)

    def is_synchronised(self) -> bool:
        """Tell whether the kernel believes that its clock is right (adjtimex)."""
        import ctypes

        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))) != TIME_ERROR

    def limits(self) -> tuple[float, float]:
        """Return how many files this process may open, and of what size write; inf: no limit."""
        import resource

        ways = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
        files, size = (float(resource.getrlimit(way)[0]) for way in ways)
        return (files if files >= 0 else float("inf")), (size if size >= 0 else float("inf"))

    def answer_of(self, *words: str) -> str:
        """Return what a command of the machine prints; empty if there is none or it fails."""
        import subprocess

        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(
                words,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                timeout=ANSWER_S,
                text=True,
            )
        return ""

    def file_system(self, path: Path) -> str:
        """Return the type of the file system that holds a path, `ext4`; empty if unknown."""
        best, found = "", ""
        for line in self.mount_table():
            fields, _, rest = line.partition(" - ")
            mounted_on = fields.split()[4].replace("\\040", " ").rstrip("/") + "/"
            if f"{path}/".startswith(mounted_on) and len(mounted_on) >= len(best):
                best, found = mounted_on, rest.split()[0]
        return found

    def mount_table(self) -> list[str]:
        """Return the lines of /proc/self/mountinfo; empty where there is none."""
        return _text_of(Path("/proc/self/mountinfo")).splitlines()

    def is_journal(self) -> bool:
        """Tell whether stderr is the systemd journal."""
        try:
            device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
            found = os.fstat(2)
            return (int(device), int(inode)) == (found.st_dev, found.st_ino)
        except (ValueError, OSError):
            return False

    def terminal_columns(self, descriptor: int = 2) -> int:
        """Return the width of a terminal, by default stderr; 0 if it is none to be drawn on."""
        return self.terminal_size(descriptor)[0]

    def terminal_size(self, descriptor: int) -> tuple[int, int]:
        """Return columns and lines of a terminal; zeros if it is none that can be drawn on."""
        if not os.isatty(descriptor) or os.environ.get("TERM") == "dumb":
            return 0, 0
        size = os.get_terminal_size(descriptor)
        return size.columns or 80, size.lines or 24

    def become_subreaper(self) -> None:
        """Inherit the orphans of our descendants, so that none outlives us unseen."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def ask_for_signal_at_parents_death(self) -> None:
        """Have the kernel send this process SIGTERM when its parent goes away."""
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def volunteer_for_oom_kill(self) -> None:
        """Make this process the one to be killed when memory runs out."""
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")

    def own_gauges(self, *, dear: bool) -> dict[str, int]:
        """Return what this process holds: `rss_bytes`, `open_files`, `threads`, `children`; 10 us.

        The kernel counts files and threads in what it says of their folders; before Linux 6.2 the
        files are listed. `dear` adds `connections` (open sockets), which cost a call for each file.
        """
        files, threads_at = "/proc/self/fd", "/proc/self/task"
        look, listed = os.stat, os.listdir  # Path takes longer
        threads = look(threads_at).st_nlink - 2  # as each folder in it has its `..`
        open_files = look(files).st_size or len(listed(files)) - 1  # the listing is one
        gauges = {"threads": threads, "open_files": open_files}
        gauges["rss_bytes"] = int(_small_file("/proc/self/statm").split()[1]) * FRAME_BYTES
        owners = [str(os.getpid())] if threads == 1 else listed(threads_at)
        lists = [_small_file(f"{threads_at}/{owner}/children") for owner in owners]
        gauges["children"] = sum(len(children.split()) for children in lists)
        if dear:
            gauges["connections"] = sum(map(_is_socket, map(int, listed(files))))
        return gauges

    def oom_kills(self) -> int | None:
        """Return how many processes the kernel has killed for want of memory; None if unknown.

        Those of our own cgroup, plus those of the machine where it counts them: only a rise tells.
        """
        found = self._groups(self.proc / "self")
        ours = [root / group.lstrip("/") / files.kills for root, group, files in found]
        texts = map(_text_of, (self.proc / "vmstat", *ours))
        counted = [n for text in texts for n in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)]
        return sum(map(int, counted)) if counted else None

    @property
    def unit_folder(self) -> Path:
        """Where systemd looks for units that we may write: root's, or this user's own."""
        if os.geteuid() == 0:
            return self.root_units
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(home) / "systemd/user"

    @property
    def end_is_heard(self) -> bool:
        """Whether `show_end` has anybody to tell."""
        return self.systemd.listens or "BATCHRUN_TERMINATION_MESSAGE" in os.environ

    def show_end(self, text: str) -> None:
        """Tell who started us how it ended: systemd, and the file that Kubernetes reads."""
        self.systemd.show(text, at_once=True)
        content = text.encode(errors="replace")[:LONGEST_MESSAGE].decode(errors="ignore").encode()
        if path := os.environ.get("BATCHRUN_TERMINATION_MESSAGE"):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, WRITE_ANEW, 0o600)
                with os.fdopen(descriptor, "wb", buffering=0) as file:
                    file.write(content)

    @functools.cached_property
    def systemd(self) -> Systemd:
        """Who started us, perhaps, and wants to know; made before any child is started."""
        return Systemd(self)


class Systemd:
    """What systemd is told, if it started us and wants to know; see the head of this section.

    Its variables are taken out of the environment, so that no job speaks in our name.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        address, period, pid = (os.environ.pop(name, "") for name in names)
        self.listens = bool(address)
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        watched = period.isdecimal() and int(period) > 0 and pid in ("", str(os.getpid()))
        half_s = int(period) / 2e6 if watched else float("inf")
        self.longest_wait_s = half_s / 2  # from one turn to the next, for the watchdog's sake
        self._always = {"WATCHDOG": "1"} if watched else {}
        self._every_s = {
            "STATUS": STATUS_EVERY_S,
            "EXTEND_TIMEOUT_USEC": EXTEND_EVERY_S,
            "WATCHDOG": half_s,
        }
        self._owed: dict[str, str] = {}
        self._said_at: dict[str, float] = {}
        self._shown = ""

    def ready(self) -> None:
        """Say that we have started; before any wait."""
        self._owed["READY"] = "1"
        self.turn()

    def stopping(self) -> None:
        """Say that we are about to end."""
        self._owed["STOPPING"] = "1"
        self.turn()

    def extend(self, seconds: float) -> None:
        """Ask that we be given so much time to stop in; said for a while ahead, so ask again."""
        if seconds > 0:
            self._owed["EXTEND_TIMEOUT_USEC"] = str(int(min(seconds, EXTEND_BY_S) * 1_000_000))

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Show the first line of a masked text as what is done now; at_once: before the end."""
        line = text.partition("\n")[0][:LONGEST_STATUS]
        if line != self._shown:
            self._shown = self._owed["STATUS"] = line
        if at_once:
            self._said_at.pop("STATUS", None)
            self.turn()

    def turn(self) -> None:
        """Say what is due. The watchdog is fed by this, so only real progress may lead here."""
        if not self._address:
            return
        now, owed = self._host.monotonic(), self._owed | self._always
        due = {
            name: value
            for name, value in owed.items()
            if name not in self._said_at or now - self._said_at[name] >= self._every_s.get(name, 0)
        }
        if due and self._send("\n".join(f"{name}={value}" for name, value in due.items())):
            self._said_at |= dict.fromkeys(due, now)
            self._owed = {name: value for name, value in owed.items() if name not in due}

    def _send(self, text: str) -> bool:
        """Send a datagram without waiting; tell whether it has been taken."""
        import socket  # only under systemd

        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(text.encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def utc_text(moment_ns: int) -> str:
    """Return nanoseconds since 1970 as UTC text with milliseconds, in order: of 1970 to 9999."""
    seconds, rest_ns = divmod(min(max(moment_ns, 0), 253_402_300_799_999_999_999), 1_000_000_000)
    return f"{_second_text(seconds)}.{rest_ns // 1_000_000:03d}Z"


@functools.lru_cache(maxsize=1)  # batches are shorter than a second
def _second_text(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def seconds_between(earlier: str, later: str) -> float:
    """Return the seconds from one UTC text to another; negative if they stand the other way."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def _has_open(process_folder: Path, wanted: os.stat_result) -> bool:
    """Tell whether a process has an inode open; a process that may not be seen has not."""
    with contextlib.suppress(OSError):
        for descriptor in (process_folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    return False


class GroupFiles(NamedTuple):
    """What the files of a control group are called, and the cache in its memory.stat."""

    limit: str
    used: str
    cache: str
    kills: str


GROUP_V2 = GroupFiles("memory.max", "memory.current", "inactive_file", "memory.events")
GROUP_V1 = GroupFiles(
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    kills="memory.oom_control",
)


def _text_of(path: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _room_in_group(folder: Path, files: GroupFiles, group: str) -> Iterator[Memory]:
    """Yield what one control group leaves of memory; nothing without a limit ("max")."""
    with contextlib.suppress(OSError, ValueError):
        limit_bytes = int((folder / files.limit).read_text())
        used_bytes = int((folder / files.used).read_text())
        cached = _text_of(folder / "memory.stat")
        found = re.search(rf"^{files.cache} ([0-9]+)$", cached, re.MULTILINE)
        left = limit_bytes - used_bytes + (int(found[1]) if found else 0)
        yield Memory(max(left, 0), limit_bytes, f"cgroup {group}")


def _address_space(place: Path) -> Iterator[Memory]:
    """Yield what RLIMIT_AS leaves to a process, if it has that limit."""
    found = re.search(r"^Max address space +([0-9]+) ", _text_of(place / "limits"), re.MULTILINE)
    used = _text_of(place / "statm").split()
    if found and used:
        left = int(found[1]) - int(used[0]) * FRAME_BYTES
        yield Memory(max(left, 0), int(found[1]), "RLIMIT_AS")


def _links(folder: Path) -> list[str] | None:
    """Return what a process's descriptors link to; None if they may not be seen."""
    found: list[str] = []
    try:
        for descriptor in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(str(descriptor.readlink()))
    except PermissionError:
        return None
    except OSError:  # gone
        return []
    return found


def _places(peer: Peer) -> list[str]:
    """Return a peer as descriptors and /proc/net write it; an IPv4 one has a form in IPv6 too."""
    import socket
    import struct

    if not peer.port:
        return [peer.address]
    wide = ":" in peer.address
    family = socket.AF_INET6 if wide else socket.AF_INET
    content = socket.inet_pton(family, peer.address.partition("%")[0])
    words = "".join(f"{word:08X}" for word in struct.unpack(f"={len(content) // 4}I", content))
    mapped = "".join(f"{word:08X}" for word in struct.unpack("=3I", bytes(10) + b"\xff\xff"))
    return [f"{form}:{peer.port:04X}" for form in ([words] if wide else [words, mapped + words])]


def _unix_peers() -> list[tuple[int, str]]:
    """Return the sockets that are connected to a named unix socket: inode and that name."""
    import struct

    names, peers = dict[int, str](), dict[int, int]()
    for message in _unix_sockets():
        inode, at = struct.unpack_from("=I", message, 4)[0], 16
        while at < len(message):  # attributes, each padded to 4 bytes
            size, what = struct.unpack_from("=HH", message, at)
            value = message[at + 4 : at + size]
            if what == 0:  # UNIX_DIAG_NAME
                names[inode] = os.fsdecode(value.rstrip(b"\0"))
            elif what == 2:  # UNIX_DIAG_PEER
                peers[inode] = struct.unpack("=I", value)[0]
            at += (size + 3) & ~3
    return [(inode, names[end]) for inode, end in peers.items() if end in names]


def _unix_sockets() -> Iterator[bytes]:
    """Yield what the kernel tells of each unix socket, see sock_diag(7); nothing if it refuses."""
    import socket
    import struct

    by_family, all_states, name_and_peer = 20, 0xFFFFFFFF, 1 | 4
    asked = struct.pack("=IHHII", 40, by_family, 0x301, 1, 0)  # length, type, REQUEST | DUMP
    asked += struct.pack("=BBHIIIQ", socket.AF_UNIX, 0, 0, all_states, 0, name_and_peer, 0)
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel,
    ):
        kernel.settimeout(1)
        kernel.send(asked)
        while answer := kernel.recv(65_536):
            while answer:
                size, kind = struct.unpack_from("=IH", answer)
                if kind != by_family:  # the end, or an error
                    return
                yield answer[16:size]
                answer = answer[(size + 3) & ~3 :]


def _small_file(path: str) -> bytes:
    """Return a file of /proc in one read, for each batch, where Path costs more; b"" if gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65_536)
    finally:
        os.close(descriptor)


def _is_socket(descriptor: int) -> bool:
    """Tell whether a descriptor of this process is an open socket."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    """Call prctl(2); where the kernel has no such option nothing changes."""
    import ctypes  # only in a supervisor or worker

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def own_interpreter(function: str, *words: str) -> list[str]:
    """Return the command that calls a function of this file in a fresh interpreter."""
    boot = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import batchrun; del sys.path[0]; "
        f"batchrun.{function}()"
    )
    return [sys.executable, "-P", "-c", boot, str(Path(__file__).resolve().parent), *words]


def own_command() -> list[str]:
    """Return how this very batchrun is called from anywhere: its console script, or this file."""
    script = Path(sys.argv[0]).absolute()
    if script.name == "batchrun" and os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, str(Path(__file__).resolve())]


def sha256(content: bytes) -> hashlib._Hash:
    """Return the SHA-256 of bytes so far, as hashlib does."""
    import hashlib  # 4 ms; status and refused starts hash nothing

    return hashlib.sha256(content)


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte, whatever the system writes at a time."""
    while content:
        content = content[os.write(descriptor, content) :]


def write_line(descriptor: int, text: str) -> None:
    """Write a line past all buffers; a closed or full output never stops a run."""
    with contextlib.suppress(OSError):
        write_all(descriptor, f"{visible(text)}\n".encode(errors="replace"))


def visible(text: str) -> str:
    """Return text without what commands a terminal: control characters, written as escapes."""
    if text.replace("\n", "").isprintable():
        return text  # most text: the pattern takes 0.6 ms to compile
    return re.sub(_CONTROL, lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = "[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"


def occupy_standard_descriptors() -> None:
    """Let no file of ours become stdin, stdout or stderr where those are closed.

    Output to what is put there is refused, as it is by a closed one.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)


READ_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, no waiting pipe
WRITE_ANEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
MAKE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare_file(directory: int, name: str, content: bytes, mode: int = 0o600) -> str:
    """Write a file whole and durable under a temporary name, and return it; or leave nothing.

    It is its owner's alone, unless a `mode` says otherwise, of which the umask takes its part.
    """
    temporary = f".{name}.{os.getpid()}.{time.monotonic_ns():x}{TEMPORARY_SUFFIX}"
    descriptor = os.open(temporary, MAKE_NEW, mode, dir_fd=directory)
    try:
        try:
            write_all(descriptor, content)
            reach("file.fsync")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        discard_file(directory, temporary)
        raise
    return temporary


def publish_file(directory: int, temporary: str, name: str) -> None:
    """Rename a prepared file to its final name and make the directory durable."""
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def discard_file(directory: int, temporary: str) -> None:
    """Remove a prepared file if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(temporary, dir_fd=directory)


@contextlib.contextmanager
def prepared_file(directory: int, name: str, content: bytes, mode: int = 0o600) -> Iterator[str]:
    """Prepare a file and yield its temporary name; remove it at the end if it still has that."""
    temporary = prepare_file(directory, name, content, mode)
    try:
        yield temporary
    finally:
        discard_file(directory, temporary)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Hold a folder open and yield its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file by a whole and durable new one, or leave it as it was."""
    with (
        open_folder(path.parent) as folder,
        prepared_file(folder, path.name, content, mode) as temporary,
    ):
        publish_file(folder, temporary, path.name)


def place_of_report(name: str) -> Path:
    """Return where a report is to be written; refuse a place that holds anything but a report.

    Raises:
        ConfigurationError: it is a folder, a device, another file, or its folder is not there.
    """
    path = Path(name).resolve()
    is_free = path.parent.is_dir() and not path.exists()
    if name == "-" or not (is_free or (path.is_file() and begins_as_report(path))):
        raise ConfigurationError(
            f"A report cannot be written to {name}.",
            why="It takes the place of an older report or of no file, in a folder that is there.",
            unchanged="Nothing was written.",
            todo="Name another file: --html report.html",
        )
    return path


@contextlib.contextmanager
def writing_of(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a letter that names the file that was asked for.

    Raises:
        ConfigurationError: it cannot be written there.
        BatchrunError: the disk is full, or broken.
    """
    try:
        yield
    except OSError as error:
        broken = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        what = f"{path} cannot be written: {error.strerror}."
        raise (BatchrunError if broken else ConfigurationError)(what) from error


def begins_as_report(path: Path) -> bool:
    """Tell whether a file is empty or begins as a report does."""
    with path.open("rb") as file:
        return file.read(9) in (b"", b"<!doctype")


def make_private_file(path: Path) -> None:
    """Make an empty file with mode 0600, whatever the umask; it must not be there."""
    descriptor = os.open(path, MAKE_NEW, 0o600)
    os.fchmod(descriptor, 0o600)
    os.close(descriptor)


def make_private_folder(path: Path) -> None:
    """Make one folder with mode 0700, whatever the umask; its parent must be there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    path.chmod(0o700)
    with open_folder(path.parent) as parent:
        os.fsync(parent)


# ======================================================================================
# 3. Configuration: TOML to rows that cannot change; durations, sizes, settings, secrets
# ======================================================================================
#
# The config file is TOML and is read whole, before anything is opened or written:
#
#     state = "state"      TOP_KEYS
#     [defaults]           OPTIONS of every job
#     [jobs.NAME]          uses, the same options, and the settings of the job
#     [health]             HEALTH_KEYS: when to look, and what is too little
#     [[health.dependency]], [[health.database]]   what jobs need, one table each
#     [alerts]             ALERT_KEYS: who is told, and of what
#
# A key has the name of its field without the unit, which is part of its value ("60s"). Relative
# paths are relative to the config file, never to the working directory.
#
# A config is valid if and only if every table and key is known, every value is of its type and in
# its range, every NAME can be a folder's name and every job names a function. A dependency has a
# name of its own and either a url or a command; its url may be read by { env = } or { file = }, as
# secrets are, which happens each time it is asked and never here. The *settings* of a
# job stay as TOML has them until the worker has imported the job: build_settings() then checks them
# against the job's own dataclass. A setting's type is one of str, int, float, bool, Path, Decimal,
# date, datetime, Secret, Literal, list[T], tuple[T, ...], dict[str, T], or a union of these and
# None. Nothing is guessed: an int is no bool, "5" is no 5; only int to float and text to Path,
# Decimal and Secret are converted.
#
# Secrets: what a Secret holds, what is read by { env = } or { file = }, what is named like a secret
# and passwords inside other settings are remembered by this process, and mask_secrets() replaces
# them wherever they appear. A new password is not a changed setting: see identity(). The URL of a
# webhook or ping is one too, as a whole and in its pieces: whoever knows it can speak in our name.
# An address that cannot be read is refused without being quoted, as all of it may be misplaced.

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_UNITS_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_duration(text: object) -> float:
    """Return a duration in seconds: "90s", "3m", "1h30m", "500ms", "2d", "1.5h".

    Units run from large to small, each at most once. A bare number is refused, except 0: the
    ValueError says what is wanted, the caller puts the name of the key or option in front.
    """
    if text == "0" or (type(text) in (int, float) and text == 0):
        return 0.0
    number_and_unit = r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([a-z]{1,2})"
    parts = re.findall(number_and_unit, text) if isinstance(text, str) else []
    units = [unit for _, unit in parts]
    is_whole = "".join(chain(*parts)) == text
    if not (parts and is_whole) or units != [unit for unit in _UNITS_S if unit in units]:
        raise ValueError('a duration with its unit is wanted, such as "90s", "3m" or "1h30m"')
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def parse_limit(text: object) -> float:
    """Return a duration in seconds that is a limit, and so above 0."""
    if seconds := parse_duration(text):
        return seconds
    raise ValueError('a duration above 0 is wanted, such as "30s"')


def duration_text(seconds: float) -> str:
    """Return a duration for people, `2h05m`, `3m20s`, `8s`."""
    whole = int(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def several(count: int, noun: str) -> str:
    """Return a number of things, `1 run`, `2,000 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def parse_size(text: object) -> int:
    """Return a size in bytes: kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024.

    KB is read as kB. A bare number is refused, except 0; so are M and mb, which people read in
    two ways. Fractions ("1.5GB") are cut off below one byte. ValueErrors as in parse_duration().
    """
    if text == "0" or (type(text) is int and text == 0):
        return 0
    pattern = r"([0-9]{1,12})(?:\.([0-9]{1,3}))? ?([A-Za-z]{1,3})"
    found = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if found is None or found[3] not in _UNITS_BYTES:
        raise ValueError(
            'a size with its unit is wanted, such as "512MB" (1000-based) or "512MiB" (1024-based)'
        )
    thousandths = int(found[1]) * 1000 + int((found[2] or "").ljust(3, "0"))
    return thousandths * _UNITS_BYTES[found[3]] // 1000


def _reader(
    fits: Callable[[Any], object], wanted: str, make: Callable[[Any], T]
) -> Callable[[object], T]:
    """Return what makes a Python value of a TOML value that fits, or says what is wanted."""

    def read(value: object) -> Any:
        if fits(value):
            return make(value)
        raise ValueError(f"{wanted} is wanted")

    return read


def _whole(low: int, high: int) -> Callable[[object], int]:
    """Return a reader of whole numbers from low to high, both included."""
    wanted = f"a whole number from {low} to {high}"
    return _reader(lambda value: type(value) is int and low <= value <= high, wanted, int)


def _text(make: Callable[[str], T], pattern: str, wanted: str) -> Callable[[object], T]:
    """Return a reader of text that matches."""
    return _reader(lambda v: isinstance(v, str) and re.fullmatch(pattern, v), wanted, make)


def _one_of(*words: str) -> Callable[[object], str]:
    """Return a reader of one of these words."""
    *most, last = map(json.dumps, words)
    return _reader(lambda value: value in words, f"{', '.join(most)} or {last}", str)


def _lasting(low_s: float) -> Callable[[object], float]:
    """Return a reader of durations that are not shorter."""
    return _reader(lambda v: parse_duration(v) >= low_s, f"at least {low_s:g} s", parse_duration)


def _settling(value: object) -> float | None:
    """Read the duration `settle`; empty means that it follows from call_timeout."""
    return None if value == "" else parse_duration(value)


def _listed(read: Callable[[object], T], wanted: str) -> Callable[[object], tuple[T, ...]]:
    """Return a reader of lists, each element read by itself."""
    wanted = f"a list of {wanted}"
    return _reader(lambda v: isinstance(v, list), wanted, lambda v: tuple(map(read, v)))


_yes_or_no = _reader(lambda value: isinstance(value, bool), "true or false", bool)


SHARE_FLOOR = 1_000  # records


class RejectLimit(NamedTuple):
    """Which rejects a run may have: a number of records, a share of them, or both.

    A share is of the records read so far; until the end at least SHARE_FLOOR count as read, so that
    a bad record among the first ones fails no run. At the end what was read counts.
    """

    records: int | None
    per_million: int | None

    def exceeded(self, rejected: int, read: int, *, at_end: bool = False) -> str:
        """Return the limit that so many rejects are over, in words; empty if they are within."""
        if self.records is not None and rejected > self.records:
            return f"{self.records} records"
        base = read if at_end else max(read, SHARE_FLOOR)
        if self.per_million is not None and rejected * 1_000_000 > self.per_million * base:
            return f"{self.per_million / 10_000:g}% of {base:,} records"
        return ""


def _reject_limit(value: object) -> RejectLimit:
    """Read `max_rejects`: a whole number, a share such as "0.5%", or a list of the two."""
    parts: dict[type, Any] = {}
    for part in value if isinstance(value, list) else [value]:
        share = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)%", part) if type(part) is str else None
        is_count = type(part) is int and 0 <= part <= 10**9
        if type(part) in parts or not (is_count or share):
            wanted = 'a number of records, a share below "100%", or a list of one of each'
            raise ValueError(f"{wanted} is wanted")
        parts[type(part)] = round(float(share[1]) * 10_000) if share else part
    if not parts:
        raise ValueError("a number of records or a share is wanted")
    return RejectLimit(parts.get(int), parts.get(str))


def _zone(value: object) -> str:
    """Read the name of a time zone that this machine knows."""
    try:
        zone_of(str(value))
    except (ValueError, KeyError, OSError):
        wanted = 'a time zone of this machine, such as "Europe/Berlin",'
        raise ValueError(f"{wanted} is wanted") from None
    return str(value)


def zone_of(name: str) -> tzinfo:
    """Return the time zone of that name; UTC is known on every machine."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo  # few configurations name one

    return ZoneInfo(name)


def period_of(at: str, once_per: str, zone: str) -> str:
    """Return the day, week or month of a moment in a zone: `2026-10-25`, `2026-W43`, `2026-10`."""
    form = {"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}[once_per]
    return datetime.fromisoformat(at).astimezone(zone_of(zone)).strftime(form)


class ConfigKey(NamedTuple):
    """One key of the config file."""

    field: str  # of Config, JobConfig, HealthConfig, AlertConfig or Need
    default: object  # as it stands in TOML
    read: Callable[[object], object]  # TOML value to Python value; ValueError says what is wanted
    meaning: str


def _key(default: object, read: Callable[[object], object], meaning: str) -> Any:
    """Declare that a field of a row is a key of the config file; see `_keys_of`."""
    return default, read, meaning


def _switch(meaning: str) -> Any:
    """Declare a key that is true or false; false unless it is set."""
    return _key(default=False, read=_yes_or_no, meaning=meaning)


def _keys_of(row: Any) -> dict[str, ConfigKey]:
    """Take the keys that a class of rows declares, by name: its field's without the unit."""
    declared, row._field_defaults = row._field_defaults, {}
    suffixes = ("_s", "_bytes", "_given")
    names = {field: functools.reduce(str.removesuffix, suffixes, field) for field in declared}
    return {names[field]: ConfigKey(field, *key) for field, key in declared.items()}


SCHEMES = ("tcp:", "http:", "https:", "redis:", "unix:", "sqlite:", "postgresql:", "postgres:")
LOCAL_SCHEMES = ("unix", "sqlite")  # a path follows


def _url(value: object, begins: tuple[str, ...] = SCHEMES) -> str | dict[str, object]:
    """Read the address of a dependency: text that is one, or where the text is read from."""
    if _is_reference(value):
        return cast("dict[str, object]", value)
    if not isinstance(value, str) or (value and not value.startswith(begins)):
        raise ValueError(f"an address that begins with one of {', '.join(begins)} is wanted")
    return value and require_url(value)


def _is_reference(value: object) -> bool:
    """Tell whether text is to be read from elsewhere: { env = } or { file = }."""
    return isinstance(value, dict) and len(value) == 1 and value.keys() <= {"env", "file"}


def _secret_url(value: object) -> str | dict[str, object]:
    """Read the address of a webhook or ping; all of it is masked from now on."""
    for text in _texts_in(value) if not _is_reference(value) else ():
        remember_url(text)
    return _url(value, ("http://", "https://"))


def _texts_in(value: object) -> list[str]:
    """Return each text in a value of TOML, however deep: what is refused may be secret too."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts_in(each)]


def _header(value: object) -> str | dict[str, object]:
    """Read a header of HTTP, its value masked from now on, or where it is read from."""
    if _is_reference(value) or value == "":
        return cast("dict[str, object]", value)
    for each in _texts_in(value):
        remember_secret(each)
    text = value if isinstance(value, str) else ""
    found = re.fullmatch(r"[A-Za-z0-9-]+: *(\S[^\r\n]*)", text)
    if found is None:
        raise ValueError('a header is wanted, "Name: value"')
    remember_secret(found[1])
    return text


def require_url(url: str) -> str:
    """Return an address that can be asked, its password masked from now on; or ValueError."""
    _remember_parts("", url)
    try:
        parts, ports = _split_url(url)
    except ValueError as error:
        remember_url(url)  # nobody can tell which part of it is secret
        raise ValueError(f"{error} (the address is not shown: it may hold a secret)") from None
    if parts.scheme in LOCAL_SCHEMES:
        if not url_path(url):
            raise ValueError(f'a path is wanted, "{parts.scheme}:PATH"')
    elif not parts.hostname and not parts.scheme.startswith("postgres"):  # libpq needs none
        raise ValueError(f'a host is wanted, "{parts.scheme}://HOST"')
    if parts.scheme == "tcp" and not any(ports):
        raise ValueError('a port is wanted, "tcp://HOST:PORT"')
    return url


def _split_url(url: str) -> tuple[SplitResult, list[int]]:
    """Return the parts of an address and its ports, if it can be read; or ValueError, in our words.

    The parser's own words are never shown: they quote what was written.
    """
    from urllib.parse import urlsplit  # only where there is a dependency

    local = url.partition(":")[0] in LOCAL_SCHEMES  # a path may have spaces
    if re.search(r"[\0-\x1f\x7f]" if local else r"[\0-\x20\x7f]", url):
        raise ValueError("an address without spaces and control characters is wanted")
    try:
        parts = urlsplit(url)
        hosts = "" if local else parts.netloc.rpartition("@")[2]  # of libpq, several by comma
        ports = [int(port or 0) for port in re.findall(r":([^:,\]]*)(?=,|\Z)", hosts)]
    except ValueError:
        ports = [-1]
    if not all(0 <= port < 65_536 for port in ports):
        raise ValueError('an address with a port from 1 to 65535 or none, "HOST:PORT", is wanted')
    return parts, ports


def url_path(url: str) -> str:
    """Return the path in `unix:PATH` or `sqlite:PATH`; `sqlite:///PATH` is the same."""
    scheme, _, path = url.partition(":")
    return path.removeprefix("///") if scheme == "sqlite" else path  # unix:///PATH is below /


def _is_path(value: object) -> bool:
    """Tell whether text is a path; ~ is none: cron, systemd, sudo disagree on whose home it is."""
    return isinstance(value, str) and value[:1] not in ("", "~") and "\0" not in value


def _path_or_none(value: object) -> Path | None:
    """Read a path; empty means that there is none."""
    return None if value == "" else _PATH(value)


def _is_function(value: object) -> bool:
    """Tell whether text names a function, or a module and a function in it."""
    return isinstance(value, str) and all(part.isidentifier() for part in value.split(":", 1))


_PATH_WANTED = 'a path without "~", relative to the config file or whole,'
_PATH = _reader(_is_path, _PATH_WANTED, Path)
_FUNCTION = _reader(_is_function, '"function" or "module:function"', str)
_JOB_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"  # it becomes a folder's name, and is typed


BATCH_SIZE_MAX = 1_000_000

_NAME = _text(str, r"\S(.{0,62}\S)?", "a name of 1 to 64 characters")
_WORDS = _listed(_text(str, r"[^\0]+", "text"), "words")
_TAGS = _listed(_text(str, _JOB_NAME, "a name like a job's"), "names")

# One line is one key, and from it come the field, the reading, the messages and the lists that
# tests compare.


class Need(NamedTuple):
    """What jobs need: one [[health.dependency]], or one [[health.database]]."""

    factor: str  # of health, that it belongs to
    name: str
    url: str | Mapping[str, object]  # or where it is read from; "" if there is a command
    timeout_s: float
    critical: bool
    jobs: tuple[str, ...]  # that need it; none: all
    command: tuple[str, ...] = ()
    expect: int = 200  # 0: any answer from 200 to 299
    normal: int = 0  # how many connections to it a job normally has; 0: they are not counted
    header: str | Mapping[str, object] = ""
    body: str = ""  # what it is told: posted to the url, or on the command's stdin
    suffix: str = ""  # of the url

    def resolved(self, folder: Path) -> Need:
        """Return it with its url and header as text, read from elsewhere if they say so.

        Raises:
            ValueError: one of them cannot be had, or is not what it should be; says why.
        """
        url, header = self.url, self.header
        if not isinstance(url, str):
            url = str(_fetched(dict(url), folder))
            remember_url(url)
            if not (_secret_url if self.factor == "alerts" else _url)(url):
                raise ValueError("its address is empty")
        if not isinstance(header, str):
            header = str(_header(_fetched(dict(header), folder)))
        return self._replace(url=url + self.suffix, header=header)

    @property
    def address(self) -> str:
        """The url, once it is resolved."""
        return cast("str", self.url)

    @property
    def headers(self) -> dict[str, str]:
        """The header by its name, once it is resolved."""
        name, _, value = str(self.header).partition(":")
        return {name: value.strip()} if name else {}

    @property
    def silence(self) -> str:
        """What is said if no answer comes."""
        return f"gives no answer within {self.timeout_s:g} s"


NEED_KEYS = {
    "name": ConfigKey("name", "NAME", _NAME, "what it is called in messages; must be given"),
    "url": ConfigKey("url", "", _url, "where it is"),
    "timeout": ConfigKey("timeout_s", "5s", _lasting(0.1), "to answer in"),
    "critical": ConfigKey("critical", *_switch("whether it pauses alone")),
    "jobs": ConfigKey("jobs", [], _WORDS, "that need it; none: all"),
}
DEPENDENCY_KEYS = NEED_KEYS | {
    "command": ConfigKey("command", [], _WORDS, "instead of a url; exit 0: well"),
    "expect": ConfigKey("expect", 200, _whole(100, 599), "HTTP answer"),
}
DATABASE_KEYS = NEED_KEYS | {
    "normal": ConfigKey("normal", 10, _whole(1, 100_000), "connections of a job; more is bad"),
}


class HealthConfig(NamedTuple):
    """The [health] table and what stands below it."""

    needs: tuple[Need, ...]
    sample_interval_s: float = _key("60s", _lasting(0.1), "between two readings")
    check_interval_s: float = _key("3m", _lasting(0.1), "between two checks")
    recheck_after_s: float = _key("10s", _lasting(0.1), "a first bad one")
    bad_in_a_row: int = _key(3, _whole(1, 100), "checks that make a factor bad")
    good_in_a_row: int = _key(2, _whole(1, 100), "checks that make it good")
    min_available_bytes: int = _key("64MB", parse_size, "memory; less is bad")
    critical: tuple[str, ...] = _key([], _listed(_one_of(*FACTORS), "factors"), "that pause alone")

    def needs_of(self, job: str | None) -> list[Need]:
        """Return what a job needs; without one what any needs."""
        return [need for need in self.needs if job is None or not need.jobs or job in need.jobs]


class AlertConfig(NamedTuple):
    """The [alerts] table."""

    command: tuple[str, ...] = _key([], _WORDS, "that is given each event as JSON")
    webhook: str | Mapping[str, object] = _key(
        "", _secret_url, "to which each event is posted as JSON"
    )
    header: str | Mapping[str, object] = _key("", _header, "of the webhook's requests")
    on: tuple[str, ...] = _key([*ALERTS], _listed(_one_of(*ALERTS), "kinds"), "what is told")
    paused_after_s: float = _key("30m", parse_duration, "by health; then it is told")
    timeout_s: float = _key("10s", _lasting(0.1), "of each try")

    @property
    def way(self) -> Need:
        """What all ways have in common."""
        return Need("alerts", "", "", self.timeout_s, critical=False, jobs=(), expect=0)

    @property
    def ways(self) -> dict[str, Need]:
        """The ways by which people are told, by name."""
        ways = {"command": self.way._replace(command=self.command)} if self.command else {}
        posted = self.way._replace(url=self.webhook, header=self.header)
        return ways | ({"webhook": posted} if self.webhook else {})


class JobConfig(NamedTuple):
    """One [jobs.NAME] table: which function it uses, its options and its unchecked settings."""

    name: str
    path: Path  # of the job's file: jobs_folder/module.py; it need not exist yet
    settings: Mapping[str, object]  # raw TOML values
    uses: str = _key("NAME", _FUNCTION, "the job's function")
    tags: tuple[str, ...] = _key([], _TAGS, "names of groups that the job belongs to")
    ping: str | Mapping[str, object] = _key(
        "", _secret_url, "asked for at each start (/start) and end (or /fail)"
    )
    batch_size: int = _key(5000, _whole(1, BATCH_SIZE_MAX), "records, at most")
    stop_grace_s: float = _key("60s", parse_duration, "to reach a safe point in")
    cleanup_timeout_s: float = _key("30s", parse_limit, "of each release")
    call_timeout_s: float = _key("30s", parse_limit, "of each call of an operation")
    settle_given_s: float | None = _key("", _settling, "until an effect is surely visible")
    max_rejects: RejectLimit = _key(0, _reject_limit, "of a run that still succeeds")
    isolate: bool = _switch("find the bad record")
    on_changed_source: str = _key("refuse", _one_of("refuse", "fresh"), "what to do")
    max_fresh: int = _key(2, _whole(0, 1000), "fresh starts in a row, at most")
    max_tries: int = _key(5, _whole(1, 1000), "of one batch, then it is poison")
    retry_for_s: float = _key("30m", parse_duration, "from the batch's first failure")
    retry_first_wait_s: float = _key("1s", parse_duration, "then 4 times that")
    retry_max_wait_s: float = _key("5m", parse_duration, "between two tries")
    on_exhausted: str = _key(
        "pause", _one_of("pause", "fail", "reject"), "when trying again is over"
    )
    batch_timeout_s: float = _key("30m", parse_duration, "to commit in; 0: none")
    recycle_above_bytes: int = _key("0", parse_size, "RSS of a worker; 0: none")
    max_rss_bytes: int = _key(0, parse_size, "of the worker; more is bad; 0: no limit")
    max_pause_s: float = _key("2h", parse_duration, "to wait until it is well")
    when_blocked: str = _key("refuse", _one_of("refuse", "defer"), "by maintenance")
    once_per: str = _key("", _one_of("day", "week", "month", ""), "in which one success is enough")
    zone: str = _key("UTC", _zone, "whose days those are")
    max_remembered_bytes: int = _key("64MB", parse_size, "by one batch")
    critical: bool = _switch("needs a rollback")
    expect_every_s: float = _key("0", parse_duration, "a success; else it is late")
    stalled_after_s: float = _key("15m", parse_duration, "without a commit")

    @property
    def module(self) -> str:
        """The name of the job's file without .py."""
        return self.uses.partition(":")[0]

    @property
    def function(self) -> str:
        """The name of the job's function in its file."""
        return self.uses.rpartition(":")[2]

    @property
    def settle_s(self) -> float:
        """For how long an effect may be on its way to where a lookup sees it."""
        return 2 * self.call_timeout_s if self.settle_given_s is None else self.settle_given_s

    @property
    def longest_stop_s(self) -> float:
        """How long a stop may take: to the safe point, interrupted, one release, and killed."""
        return self.stop_grace_s + min(self.stop_grace_s, 10.0) + self.cleanup_timeout_s + 4.0

    @property
    def isolates(self) -> bool:
        """Whether a batch that fails is done in halves, at once or as plan B."""
        return self.isolate or self.on_exhausted == "reject"


class Config(NamedTuple):
    """The config file, checked. All paths are whole."""

    path: Path
    folder: Path  # of the config file; its symbolic links are resolved, the file's own is not
    jobs: Mapping[str, JobConfig]
    health: HealthConfig
    alerts: AlertConfig
    state: Path = _key("state", _PATH, "folder of ledger, checkpoints, locks and logs")
    jobs_folder: Path = _key("jobs", _PATH, "folder of the job files")
    min_free_bytes: int = _key("16MB", parse_size, "below it no run starts")
    keep_s: float = _key("90d", parse_duration, "finished runs, then they go; 0: for ever")
    max_maintenance_s: float = _key("1d", parse_duration, "older is overdue")
    metrics_folder: Path | None = _key("", _path_or_none, "of node_exporter's files")

    def way(self, name: str, alert: Alert) -> Need | None:
        """Return how an alert is told by the way of that name, if there still is one."""
        if name != "ping":
            return self.alerts.ways.get(name)
        job = self.jobs.get(alert.job or "")
        url = job.ping if job else ""
        return self.alerts.way._replace(url=url, suffix=PINGS[alert.kind]) if url else None

    @property
    def tells(self) -> bool:
        """Whether somebody is told how runs end."""
        ping = any(job.ping for job in self.jobs.values())
        return bool(self.alerts.ways or self.metrics_folder or ping)

    def job(self, name: str) -> JobConfig:
        """Return the configured job of that name.

        Raises:
            NotFound: names the configured jobs and gives the lines that add this one.
        """
        if name in self.jobs:
            return self.jobs[name]
        raise NotFound(
            f"There is no job {json.dumps(name)} in {self.path}{_meant(name, self.jobs) or '.'}",
            why=f"Configured: {', '.join(sorted(self.jobs)) or 'none'}.",
            unchanged="Nothing was changed.",
            todo=f'To add it, write there:\n{_heading(name)}\nuses = "FUNCTION"',
        )

    def unit(self, job: str, installed: Path) -> str:
        """Return the name, without its ending, of a job's systemd units; without a job the tick's.

        The folder is part of it: several configurations may have units on one machine. Where one of
        another folder of that name has `installed` its units, a digest of our path is part of it.
        """
        name = unit_name(self.folder.name, job)
        with contextlib.suppress(OSError):
            mark = (installed / f"{name}.service").read_text().partition("\n")[0]
            by = mark.partition(" of ")[2]
            if mark.startswith(UNIT_MARK) and by != str(self.path) and Path(by).exists():
                digest = sha256(bytes(self.path)).hexdigest()[:8]
                return unit_name(f"{self.folder.name}-{digest}", job)
        return name


TOP_KEYS, JOB_KEYS = _keys_of(Config), _keys_of(JobConfig)
HEALTH_KEYS, ALERT_KEYS = _keys_of(HealthConfig), _keys_of(AlertConfig)
OPTIONS = {n: key for n, key in JOB_KEYS.items() if n not in ("uses", "tags", "ping")}
UNIT_MARK = "# Written by "  # what wrote the unit follows, and " of " its configuration


def unit_name(place: str, job: str) -> str:
    """Return what the units of a job, or of the tick, are called that belong to a place."""
    words = ["batchrun", place, job] if job else ["batchrun-tick", place]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(words))


def places_written(config: Config, jobs: Iterable[JobConfig]) -> list[Path]:
    """Return the folders that jobs write to as far as is known: ours, and of SQLite targets."""
    state = config.state if config.state.exists() else config.state.parent
    values = [value for job in jobs for value in job.settings.values() if isinstance(value, str)]
    paths = [config.folder / url_path(url) for url in values if url.startswith("sqlite:")]
    found = [config.folder, state, *(path.parent for path in paths)]
    found += [config.metrics_folder] if config.metrics_folder else []
    return [
        a for a in dict.fromkeys(found) if not any(a != b and a.is_relative_to(b) for b in found)
    ]


def config_keys() -> dict[str, dict[str, ConfigKey]]:
    """Return every key by table and name; "" is the top of the file."""
    return {
        "": TOP_KEYS,
        "defaults": OPTIONS,
        "jobs.NAME": JOB_KEYS,
        "health": HEALTH_KEYS,
        "health.dependency": DEPENDENCY_KEYS,
        "health.database": DATABASE_KEYS,
        "alerts": ALERT_KEYS,
    }


def _defaults(keys: Mapping[str, ConfigKey]) -> dict[str, Any]:
    """Return the default of each key by field."""
    return {key.field: key.read(key.default) for key in keys.values()}


def require_text(path: Path) -> None:
    """Refuse a path that is not UTF-8: SQLite cannot open it, and no message can show it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"The path {str(path)!r} is not UTF-8.",
            why="The ledger cannot be kept below it.",
            unchanged="Nothing was changed.",
            todo="Use a folder whose whole path is UTF-8.",
        ) from error


TABLES_OF_TOP = ("defaults", "jobs", "health", "alerts")


def load_config(path: Path) -> Config:
    """Read and check a config file; write nothing.

    Whether others can change the file is not asked here (reading a config harms nobody):
    see check_trusted().

    Raises:
        ConfigurationError: one letter with everything that is wrong in the file.
    """
    with contextlib.suppress(FileNotFoundError):  # a deleted working directory; nothing is found
        path = path.absolute()
    require_text(path)
    problems: list[str] = []
    document, folder = _read_toml(path, problems), path.parent.resolve()
    own, rest = _read_keys("", document, TOP_KEYS, problems, TABLES_OF_TOP)
    top = {**_defaults(TOP_KEYS), **own}
    for field in ("state", "jobs_folder", "metrics_folder"):
        top[field] = top[field] and Path(os.path.normpath(folder / top[field]))
    options, _ = _read_keys("[defaults] ", rest.get("defaults", {}), OPTIONS, problems)
    _, tables = _read_keys("[jobs] ", rest.get("jobs", {}), {}, problems, None)
    jobs: dict[str, JobConfig] = {}
    health = _read_health(rest.get("health", {}), tables, problems)
    told, _ = _read_keys("[alerts] ", rest.get("alerts", {}), ALERT_KEYS, problems)
    alerts = AlertConfig(**{**_defaults(ALERT_KEYS), **told})
    config, usual = Config(path, folder, jobs, health, alerts, **top), _defaults(JOB_KEYS)
    for name, table in tables.items():
        if not re.fullmatch(_JOB_NAME, name):
            rule = "a job's name is 1 to 64 letters, digits, _ - . and begins with neither . nor -"
            problems.append(f"{_heading(name)}: {rule}")
        named = {"uses": name, **table} if isinstance(table, dict) else table
        own, settings = _read_keys(f"{_heading(name)} ", named, JOB_KEYS, problems, None)
        values = {**usual, "uses": name, **options, **own}
        file = config.jobs_folder / f"{values['uses'].partition(':')[0]}.py"
        jobs[name] = JobConfig(name, file, settings=settings, **values)
    if problems:
        todo = f"Correct it, then type: batchrun --config {_typed(path)} jobs"
        raise _refusal(f"The config file {path} cannot be used.", problems, todo)
    return config


def _read_health(table: object, jobs: Iterable[str], problems: list[str]) -> HealthConfig:
    """Return the [health] table and what stands below it; add to problems."""
    lists = {
        "dependency": ("dependencies", DEPENDENCY_KEYS),
        "database": ("connections", DATABASE_KEYS),
    }
    own, rest = _read_keys("[health] ", table, HEALTH_KEYS, problems, lists)
    needs: list[Need] = []
    for kind, (factor, keys) in lists.items():
        rows = rest.get(kind, [])
        if not isinstance(rows, list):
            problems.append(f"health.{kind} must be a list: write [[health.{kind}]] above each")
            continue
        for number, row in enumerate(rows, 1):
            where = f"[[health.{kind}]] number {number} "
            values, _ = _read_keys(where, row, keys, problems)
            need = Need(factor, **{**_defaults(keys), **values})
            taken = {each.name for each in needs}
            if isinstance(row, dict):
                problems += [where + why for why in _need_problems(need, row, taken, jobs)]
                needs.append(need)
    return HealthConfig(tuple(needs), **{**_defaults(HEALTH_KEYS), **own})


def _need_problems(
    need: Need, given: Mapping[str, Any], taken: Container[str], jobs: Iterable[str]
) -> Iterator[str]:
    """Yield what is wrong with a need whose keys are all right by themselves."""
    if "name" not in given:
        yield "name: is missing; it says what messages call it"
    elif need.name in taken:
        yield f"name = {json.dumps(need.name)}: another one has that name"
    ways = ["url"] if need.factor == "connections" else ["url", "command"]
    asked = [way for way in ways if given.get(way)]
    if len(asked) != 1:
        yield f"{' or '.join(ways)}: {'only one of them can be asked' if asked else 'is missing'}"
    url = given.get("url", "")
    if "expect" in given and "command" in ways and isinstance(url, str) and url[:4] != "http":
        yield "expect: only a url that begins with http: or https: has such an answer"
    for name in need.jobs:
        if name not in jobs:
            yield f"jobs: there is no job {json.dumps(name)}{_meant(name, jobs)}"


def _read_toml(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the TOML document in a file; a byte order mark is allowed."""
    import tomllib  # only where a config is read

    try:
        return tomllib.loads(path.read_bytes().decode().removeprefix("\ufeff"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"There is no config file {path}.",
            unchanged="Nothing was changed.",
            todo="To make one, type: batchrun init\nTo use another: batchrun --config PATH ...",
        ) from error
    except OSError as error:
        todo = f"To see who may read it, type: ls -ld {_typed(path.parent, path)}"
        raise _refusal(f"The config file {path} cannot be read.", [error.strerror], todo) from error
    except (ValueError, RecursionError) as error:  # with line and column; or not UTF-8
        problems.append(f"it is not valid TOML: {error}")
        return {}


def _read_keys(
    where: str,
    table: object,
    keys: Mapping[str, ConfigKey],
    problems: list[str],
    others: Iterable[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a table's keys by field, and what else is there; add to problems.

    `others` are the names that may stand there too; None: any.
    """
    if not isinstance(table, dict):
        problems.append(f"{where}must be a table, with a heading of its own")
        return {}, {}
    values: dict[str, Any] = {}
    for name in filter(keys.__contains__, table):
        try:
            values[keys[name].field] = keys[name].read(table[name])
        except ValueError as error:
            problems.append(f"{where}{name} = {json.dumps(table[name], default=str)}: {error}")
    rest = {name: value for name, value in table.items() if name not in keys}
    if others is not None:
        for name in (name for name in rest if name not in others):
            meant = _elsewhere(name) or _meant(name, [*keys, *others])
            problems.append(f"{where}{name}: there is no such key or table{meant}")
    return values, rest


def _elsewhere(name: str) -> str:
    """Return where in the file a key has its place, in words, or ""."""
    tables = [table for table, keys in config_keys().items() if name in keys]
    if not tables:
        return ""
    if "" in tables:
        return " here; it stands at the top of the file"
    shown = [f"[[{each}]]" if each.startswith("health.") else f"[{each}]" for each in tables]
    return f" here; it stands in {' or '.join(shown)}"


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the question for the closest known name, or ""."""
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _heading(name: str) -> str:
    """Return the heading of a job's table; quoted if it has a dot, which would mean a subtable."""
    plain = re.fullmatch(_JOB_NAME, name) and "." not in name
    return f"[jobs.{name if plain else json.dumps(name)}]"


def _typed(*words: Path | str) -> str:
    """Return words as they are typed in a shell."""
    import shlex  # only for letters

    return shlex.join(map(str, words))


def typed_elsewhere(text: str, config: Path, commands: str = "[a-z]+") -> str:
    """Return text whose lines to type name configuration and program: for any folder and PATH."""
    import shutil

    first = ["batchrun"] if shutil.which("batchrun") else own_command()
    here = _typed(*first, "--config", config)
    return re.sub(rf"\bbatchrun (?=(?:{commands})\b)", lambda _: f"{here} ", text)


def _refusal(what: str, problems: Iterable[str | None], todo: str) -> ConfigurationError:
    """Return a letter that lists problems."""
    why = "\n".join(f"- {problem}" for problem in problems)
    return ConfigurationError(what, why=why, unchanged="Nothing was changed.", todo=todo)


def check_trusted(path: Path, *, what: str, euid: int | None = None) -> None:
    """Refuse a file or folder that another user could change or replace.

    Looked at are it and the folders that contain it: the one it is named in and, behind a symbolic
    link, the real one. Higher folders are not: their owner is trusted with the machine anyway.
    `what` is its name in the letter ("the jobs folder"); `euid` who is to trust it, if not we.

    Raises:
        ConfigurationError: who can change it and the line that ends this.
    """
    me = os.geteuid() if euid is None else euid
    try:
        path.stat()  # a loop of links is an OSError here, but none in resolve()
        real = path.resolve(strict=True)
        places = dict.fromkeys((real, real.parent, path.absolute().parent))
        found = {place: place.stat() for place in places}
    except OSError as error:
        todo = f"To see it, type: ls -ld {_typed(path.parent, path)}"
        what = f"{what[0].upper()}{what[1:]} cannot be looked at: {path}."
        raise _refusal(what, [error.strerror], todo) from error
    for place, seen in found.items():
        why, todo = _distrust(place, seen, me, contains=place != real)
        if why:
            why = f"{place} {why}, and jobs are code that runs with your rights"
            todo = f"To end this, type: {todo}"
            raise _refusal(f"Other users could change {what}: {path}.", [why], todo)


def _distrust(place: Path, seen: os.stat_result, me: int, *, contains: bool) -> tuple[str, str]:
    """Return why a place is not trusted and the line that mends it, or two empty strings."""
    mode, owner = stat.S_IMODE(seen.st_mode), Host().user_name(seen.st_uid)
    if seen.st_uid not in (me, 0):
        line = f"chown {Host().user_name(me)} {_typed(place)}"
        again = f"sudo -u {owner} {_typed('batchrun', *sys.argv[1:])}"
        return f"belongs to {owner}", line if me else again
    shared = mode & stat.S_IWGRP and not _is_private(seen.st_gid, owner)
    who = "everyone" if mode & stat.S_IWOTH else "its group" if shared else ""
    if not who or (contains and mode & stat.S_ISVTX):  # sticky: nobody replaces what is not theirs
        return "", ""
    return f"can be written to by {who} (mode {mode:04o})", f"chmod go-w {_typed(place)}"


def _is_private(gid: int, owner: str) -> bool:
    """Tell whether a group is its owner's alone, as useradd makes it for umask 002."""
    import grp  # only where a group may write

    with contextlib.suppress(KeyError):
        group = grp.getgrgid(gid)
        return group.gr_name == owner and set(group.gr_mem) <= {owner}
    return False


_MASK = "***"
_LEAST_CHARS = 4  # a shorter value would tear up text that has nothing to do with it
LEAST_PIECE_CHARS = 6  # the same of a piece of a secret address, whose pieces may be words
_REMEMBERED: set[str] = set()  # the secrets this process has met, in the forms they are printed in


class Secret:
    """Text that is never shown: not in str(), repr(), f-strings, log, ledger or report."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        remember_secret(text)

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __repr__(self) -> str:
        return _MASK


def remember_secret(value: str) -> None:
    """Have a literal value masked from now on, also as Python, JSON and URLs write it.

    Of a value of several lines each line is masked. Below 4 characters nothing is.
    """
    from urllib.parse import quote, unquote  # only where there is a secret

    for part in {value, *value.splitlines()}:
        url = quote(part, safe="", errors="replace")
        forms = (part, unquote(part), url, repr(part)[1:-1], json.dumps(part)[1:-1])
        _REMEMBERED.update(form for form in forms if min(len(part), len(form)) >= _LEAST_CHARS)


def remember_url(url: str) -> None:
    """Have an address masked from now on that is a secret, and the pieces after its host.

    A piece that is short or one word in small letters (https://h/services/T0AB1XYZ) is none.
    """
    remember_secret(url)
    for piece in re.split(r"[/?&=#]", url)[3:] if url.startswith("http") else ():
        if len(piece) >= LEAST_PIECE_CHARS and not re.fullmatch("[a-z_-]*", piece):
            remember_secret(piece)


def mask_secrets(text: str) -> str:
    """Return text with every secret in it as ***, and the rest exactly as it was.

    Masked are values that were remembered, and by their form: the password in
    scheme://user:pass@, what follows password=, token=, secret=, api_key= and names that end so
    (also as "name": "value" and --name value), and Authorization values. Takes linear time and
    raises nothing. What no file can hold (half a character, as in an undecodable file name) is
    written as Python writes it.
    """
    text = text.encode(errors="backslashreplace").decode()
    for secret in sorted(_REMEMBERED, key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return _masked_by_form(text)


_BEGUN = list[str]()  # the level of the log's last line, if that is not at its end


def write_log(at: str, level: str, text: str, *, ends: bool = True) -> None:
    """Write text to a run's log, which is standard error: each line with its time and level.

    Without a secret and what commands a terminal. It never fails who writes. If it does not end its
    last line, the next text of its level goes on there, and one of another below it.
    """
    lines = "\n".join(f"{at} {level} {line}" for line in mask_secrets(text).split("\n"))
    if level in _BEGUN:
        lines = lines.partition(f" {level} ")[2]
    elif _BEGUN:
        lines = f"\n{lines}"
    _BEGUN[:] = [] if ends else [level]
    with contextlib.suppress(OSError):
        write_all(2, (visible(lines) + "\n" * ends).encode())


def _masked_by_form(text: str) -> str:
    """Return text with those secrets masked that their form gives away."""
    folded = text.casefold()
    if not any(sign in folded for sign in _SECRET_SIGNS):
        return text  # most text: the patterns take 10 ms to compile
    for pattern in _secret_forms():
        text = pattern.sub(rf"\g<1>{_MASK}", text)
    return text


# Every form has one of these in it, whatever the case of its letters.
_SECRET_SIGNS = (
    *("://", "author", "bearer", "pass", "pwd"),
    *("token", "secret", "credent", "key"),
)
_SECRET_NAME = (
    r"(?:passw(?:or)?d|passphrase|pwd|(?<![a-z])pass|token|secret|credentials?"
    r"|(?:api|access|private|secret)[_-]?key)[0-9]*"
)


@functools.cache
def _secret_forms() -> tuple[re.Pattern[str], ...]:
    """Return the patterns of secrets: group 1 stays, what group 2 matches is masked.

    Linear: no two attempts of a pattern scan the same stretch without a bound (possessive ++).
    """
    is_next = r"\\?[\"']?\s*[:=]\s*\\?[\"']?"  # also "name": "value", and inside JSON in a string
    value = (
        r"((?<=\\\")(?:[^\"\\\n]|\\\\)++"  # between backslash quotes
        r"|(?<=\")(?<!\\\")(?:[^\"\\\n]|\\.)++"  # between double quotes, or cut off
        r"|(?<=')(?:[^'\\\n]|\\.)++"
        r"|(?<![\"'])(?![({\[=\\\"'])[^\s&;,]*[^\s&;,\"')}\]])"  # bare, without closing brackets
    )
    password = r"([^\s\"'<>/]+(?=@)|(?![0-9]{1,5}[/?#])[^\s\"'<>@]{1,256}(?=@))"
    scheme = r"(?:(?:bearer|basic|digest|token|negotiate)\s+)?"
    forms = (
        rf"(://[^\s/:@\"']*:){password}",
        rf"(authorization{is_next}{scheme})([^\s\"'\\,({{\[][^\s\"'\\,]*)",
        r"(\bbearer\s+)([\w.~+/-]{8,}=*)",
        rf"({_SECRET_NAME}{is_next}){value}",
        rf"(--(?:[a-z0-9]+-)*{_SECRET_NAME}\s+)([^\s\"'-][^\s\"']*)",
    )
    return tuple(re.compile(form, re.IGNORECASE) for form in forms)


def looks_secret(name: str, value: str) -> bool:
    """Tell whether a setting's name or value looks like a secret, so that --set must refuse it."""
    named_so = re.search(rf"{_SECRET_NAME}\Z", name, re.IGNORECASE)
    return bool(named_so) or _masked_by_form(value) != value


def _remember_parts(name: str, value: str) -> None:
    """Have a setting named like a secret masked, or the passwords inside one that is not.

    Not those that the setting shows elsewhere (postgres://stock:stock@h/stock): they are words.
    """
    if looks_secret(name, ""):
        remember_secret(value)
    for pattern in _secret_forms():
        for found in pattern.finditer(value):
            if value.count(found[2]) == 1:
                remember_secret(found[2])


def build_settings(
    cls: type,
    raw: Mapping[str, object],
    *,
    job: str,
    folder: Path,
    overrides: Mapping[str, str] | None = None,
) -> object:
    """Return an instance of a job's settings dataclass, each value of its declared type.

    `raw` are the values in TOML's types, `overrides` the text of --set, which counts more. Relative
    paths are relative to `folder`, that of the config file.

    Raises:
        ConfigurationError: one letter with everything missing, unknown or of a wrong type.
    """
    kinds, spoken = _declared(cls, job), overrides or {}
    given = {**raw, **spoken}
    values: dict[str, object] = {}
    problems = [
        f"{each.name}: is missing; a value of type {_type_name(kinds[each.name])} is wanted"
        for each in _declared_fields(cls)
        if each.init and each.name not in given and not _defaults_of(each)
    ]
    for name, value in given.items():
        try:
            values[name] = _setting(name, value, kinds, folder, spoken=name in spoken)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if not problems:
        try:
            return cls(**values)
        except ValueError as error:  # the job's own __post_init__
            problems.append(mask_secrets(str(error)))
    todo = f"Correct {_heading(job)} in the config file or the --set options; type it again."
    raise _refusal(f"The settings of job {json.dumps(job)} cannot be used.", problems, todo)


def _declared(cls: type, job: str) -> dict[str, object]:
    """Return the type of each setting by name."""
    try:
        from dataclasses import fields

        hints = get_type_hints(cls)
        kinds = {each.name: hints[each.name] for each in fields(cls) if each.init}
    except (NameError, TypeError) as error:  # a type that is nowhere; not a dataclass
        problems = [str(error)]
    else:
        taken = [name for name in config_keys()["jobs.NAME"] if name in kinds]
        problems = [f"{name}: is an option of batchrun; rename the setting" for name in taken]
    if problems:
        what = f"The settings class of job {json.dumps(job)} cannot be used."
        raise _refusal(what, problems, "Correct the job's file, then type it again.")
    return kinds


def _declared_fields(settings: object) -> tuple[Field[Any], ...]:
    """Return the fields of a settings class or of its instance; none if it is no dataclass."""
    from dataclasses import fields, is_dataclass  # 2 ms, and only where settings are made

    return fields(settings) if is_dataclass(settings) else ()


def _defaults_of(each: Field[Any]) -> list[object]:
    """Return the default of a setting as the only element; none if it must be given."""
    from dataclasses import MISSING

    factory: Any = each.default_factory
    default = each.default if factory is MISSING else factory()
    return [] if default is MISSING else [default]


def _type_name(kind: object) -> str:
    """Return a type as the settings class has it: str, list[str], int | None, Secret."""
    return re.sub(r"<class '|'>|\b[a-z]\w*\.", "", str(kind)).replace("NoneType", "None")


def _setting(
    name: str, value: object, kinds: Mapping[str, object], folder: Path, *, spoken: bool
) -> object:
    """Return a setting as its declared type has it; the ValueError says what is wrong."""
    if name not in kinds:
        options = config_keys()["jobs.NAME"]
        meant = _meant(name, kinds if spoken else [*kinds, *options])
        if name in options:
            meant = "; it is an option of the job, which stands in [jobs.NAME]"
        raise ValueError(f"there is no such setting{meant}")
    candidates = _said(str(value)) if spoken else [value]
    try:
        made = _first_fit(candidates, functools.partial(_fitted, name, kinds[name], folder))
    except TypeError:
        raise ValueError(f"a value of type {_type_name(kinds[name])} is wanted") from None
    if spoken and isinstance(made, Secret):
        raise ValueError("a secret on a command line is seen by others; put it in the config")
    return made


def _said(text: str) -> Iterator[object]:
    """Yield what the text of --set may mean, in TOML's types; the first that fits is meant."""
    import tomllib  # only where a config is read

    if text == "none":
        yield None
    for toml, literal in ((text, text), (f"[{text}]", text.split(","))):
        with contextlib.suppress(ValueError, RecursionError):
            (read,) = tomllib.loads(f"_ = {toml}").values()
            if not isinstance(read, str):  # text needs no quotes here, and keeps those it has
                yield read
        yield literal


def _first_fit(candidates: Iterable[T], fit: Callable[[T], object]) -> object:
    """Return what the first candidate that fits gives; TypeError if none does."""
    for each in candidates:
        with contextlib.suppress(TypeError):
            return fit(each)
    raise TypeError


def _fitted(name: str, kind: Any, folder: Path, value: object) -> object:
    """Return a TOML value as the declared type has it.

    Raises:
        TypeError: it is not of that type.
        ValueError: it is, but its value cannot be had; says why.
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return _first_fit(args, lambda each: _fitted(name, each, folder, value))
    if origin is Literal and (type(value), value) in [(type(each), each) for each in args]:
        return value
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_fitted(name, (*args, Any)[0], folder, each) for each in value)
    if origin is dict and isinstance(value, dict):
        of = (*args, Any, Any)[1]
        return {key: _fitted(key, of, folder, each) for key, each in value.items()}
    return value if origin in (Any, object) else _fitted_scalar(name, kind, folder, value)


def _fitted_scalar(name: str, kind: Any, folder: Path, value: Any) -> object:
    """Return a single value as the declared type has it; raises as _fitted() does."""
    from decimal import Decimal  # only where settings are read

    if kind in (str, Secret) and isinstance(value, dict):
        value = _fetched(value, folder)
    made_from = {float: (int,), Path: (str,), Decimal: (int, str), Secret: (str,)}
    if type(value) not in (kind, *made_from.get(kind, ())):
        raise TypeError
    if isinstance(value, str):
        _remember_parts(name, value)
    try:
        if kind is Path:
            return folder / _PATH(value)
        return value if type(value) is kind else kind(value)
    except ArithmeticError:  # Decimal("x"), or a float out of range
        raise TypeError from None


def _fetched(reference: dict[str, object], folder: Path) -> object:
    """Return the text behind { env = "NAME" } or { file = "PATH" }, or a table that is neither."""
    match list(reference.items()):
        case [("env", str(name))]:
            if name not in os.environ:
                raise ValueError(f"the environment variable {name} is not set")
            text = os.environ[name]
        case [("file", str(name))]:
            path = folder / _PATH(name)
            try:
                text = path.read_text("utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise ValueError(f"{path} cannot be read: {reason}") from None
        case _:
            return reference
    remember_secret(text)
    return text


def identity(settings: object, folder: Path) -> dict[str, str]:
    """Return by name a digest (16 hex digits) of each setting that makes a run what it is.

    Left out: secrets, settings named like secrets, and fields marked
    field(metadata={"identity": False}); passwords inside other settings are masked. Paths below the
    folder of the config file count relative to it: a deploy into another folder is no change.
    """
    values = {
        each.name: getattr(settings, each.name)
        for each in _declared_fields(settings)
        if each.metadata.get("identity", True) and not looks_secret(each.name, "")
    }
    identified = {name: value for name, value in values.items() if not isinstance(value, Secret)}
    return {name: _setting_digest(value, folder) for name, value in identified.items()}


def _setting_digest(value: object, folder: Path) -> str:
    """Return the digest of one setting."""

    def plain(value: object) -> object:  # what JSON does not know, as something it knows
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        if isinstance(value, Path) and value.is_relative_to(folder):
            return value.relative_to(folder).as_posix()
        return str(value)

    text = _masked_by_form(json.dumps(value, sort_keys=True, default=plain))
    return sha256(text.encode()).hexdigest()[:16]


def settings_digest(identities: Mapping[str, str]) -> str:
    """Return the digest (64 hex digits) of what identity() returned."""
    return sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()


def changed_settings(before: Mapping[str, str], settings: object, folder: Path) -> list[str]:
    """Return the sorted names of settings that are not what an earlier identity() says.

    A setting that was not known then (a newer version of the job has it) counts as changed if it is
    not its default; one that the job does not have any more counts as changed.
    """
    declared = {each.name: each for each in _declared_fields(settings)}
    changed = before.keys() - declared.keys()
    for name, digest in identity(settings, folder).items():
        usual = _setting_digest(next(iter(_defaults_of(declared[name])), None), folder)
        changed |= {name} if digest != before.get(name, usual) else set()
    return sorted(changed)


# ======================================================================================
# 4. Checkpoints: where to go on
# ======================================================================================
#
# state/checkpoints/JOB/RUN.json is one header line and one body:
#
#   batchrun-checkpoint FORMAT SHA256 LENGTH\n      SHA256 and LENGTH (bytes) of the body
#   {"ledger": "...",                               the body: a JSON object, one value a line,
#   ...}\n                                          ended by a newline; nothing follows it
#
# A checkpoint is valid if and only if its header has these four words, FORMAT is known, the body
# has exactly LENGTH bytes, its SHA-256 is SHA256, nothing follows, the whole is not larger than
# CHECKPOINT_MAX_BYTES, and the body is strict JSON that has every field of `Checkpoint` with its
# type and no other, and a cursor that can be decoded. The same function judges it before it is
# written and after it is read.
#
# SHA256 is the commit's hash. Each body carries `previous`, the hash of the commit before it, so
# the commits of a run are a chain; commit 1 hangs on `first_hash`, made from the ledger's uuid,
# the run and the settings.
#
# state/images/JOB/RUN/NUMBER-GENERATION-SHA256 is the *image* of a batch, the rows that it has
# remembered: of commit NUMBER, staged by GENERATION. It has a header of the same form, with
# `batchrun-image` and the SHA256 of its name. Its body is a zlib stream of the rows, encoded as
# cursors are, in JSON lists of 100, one a line; the last may have less.
#
# An image is written once, durable with its folder before its batch is committed anywhere, and
# counts if and only if a commit names it. One above the newest commit is left of an older try, and
# is removed when that batch begins again.

CHECKPOINT, IMAGE = "batchrun-checkpoint", "batchrun-image"
FORMAT = 1  # of both
HEADER_MAX_BYTES = 200
CHECKPOINT_MAX_BYTES = 1_048_576
CURSOR_MAX_BYTES = 65_536
PLAIN_INT_MAX = 2**53


def _encoder(**ways: Any) -> Callable[[Any], str]:
    """Return what JSONEncoder(...).encode is, but which makes one C encoder, not one a call."""
    whole = json.JSONEncoder(ensure_ascii=False, allow_nan=False, **ways)
    kinds: Any = json.encoder
    ways_of = (whole.key_separator, whole.item_separator, whole.sort_keys, whole.skipkeys)
    values = (None, whole.default, kinds.encode_basestring, None, *ways_of, whole.allow_nan)
    try:
        pieces = kinds.c_make_encoder(*values)
    except (AttributeError, TypeError):  # it is CPython's own affair, and may be None
        return whole.encode

    def encode(value: Any) -> str:
        try:
            return "".join(pieces(value, 0))
        except RecursionError as error:
            raise ValueError("it is nested too deep, or holds itself") from error

    return encode


_compact = _encoder()
_a_value_a_line = _encoder(separators=(",\n", ": "))


class CursorError(JobError):
    """A cursor that cannot be stored and read back as the same value."""


class BrokenCheckpoint(BatchrunError):
    """A file of ours that is not valid; says in which way."""

    exit_code = ExitCode.PERSON_NEEDED


class NewerFormat(StateDirectoryError):
    """A file that a newer batchrun wrote; it is not touched."""

    def __init__(self, subject: str, has: int | str, known: int) -> None:
        super().__init__(
            f"{subject} {has}; this batchrun knows {known}.",
            why="A newer batchrun wrote it.",
            unchanged="It was not touched.",
            todo="Install that version again.",
        )


def sealed(kind: str, body: bytes) -> tuple[bytes, str]:
    """Return a file's bytes, a header line before its body, and the body's hash."""
    digest = sha256(body).hexdigest()
    return f"{kind} {FORMAT} {digest} {len(body)}\n".encode() + body, digest


def read_header(kind: str, line: bytes) -> tuple[str, str]:
    """Return the hash and the length of a body, as the header line before it has them.

    Raises:
        BrokenCheckpoint: it is no such header; says why.
        NewerFormat: a newer batchrun wrote it.
    """
    words = line[:HEADER_MAX_BYTES].decode("ascii", "replace").removesuffix("\n").split(" ")
    if line[-1:] != b"\n" or len(words) != 4 or words[0] != kind or not words[1].isdecimal():
        raise BrokenCheckpoint(f"it does not begin with a header of {kind}")
    if int(words[1]) > FORMAT:
        raise NewerFormat(f"A file of {kind} has format", words[1], FORMAT)
    if words[1] != str(FORMAT):
        raise BrokenCheckpoint(f"there never was a format {words[1]}")
    return words[2], words[3]


def encode_cursor(value: object) -> str:
    """Return a cursor as JSON text that `decode_cursor` turns back into the same value.

    Text, truth values, None, lists and integers below 2**53 stand as they are; every other type
    is `{"$type": text}`.

    Raises:
        CursorError: a type without an encoding, NaN or infinity, or more than 64 KB.
    """
    if type(value) is int and abs(value) < PLAIN_INT_MAX:  # of most jobs, three times a commit
        return str(value)
    try:
        text = _compact(_to_plain(value))
        size = len(text.encode())
    except (ValueError, RecursionError) as error:
        raise CursorError(f"The cursor {value!r} cannot be stored: {error}.") from error
    if size > CURSOR_MAX_BYTES:
        raise CursorError(f"The cursor takes {size} bytes; {CURSOR_MAX_BYTES} are allowed.")
    return text


def encode_restorable(value: object) -> str | None:
    """Return a value as `encode_cursor` does, if it comes back as the same; else None."""
    with contextlib.suppress(Exception):  # the value may be of any type, and break at any touch
        require_round_trip(value)
        return encode_cursor(value)
    return None


def decode_cursor(text: str) -> Any:
    """Return the value that `encode_cursor` was given."""
    return _from_plain(json.loads(text))


def cursor_text(text: str) -> str:
    """Return an encoded cursor or key as a person writes it: `"Rotterdam", 10` of a tuple."""
    return _written(decode_cursor(text), "{}")


def _written(value: Any, around: str = "({})") -> str:
    if isinstance(value, dict):
        return around.format(", ".join(f"{name}: {_written(each)}" for name, each in value.items()))
    if isinstance(value, tuple | list):
        return around.format(", ".join(map(_written, value)))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value.hex() if isinstance(value, bytes) else str(value)


def require_round_trip(value: object) -> None:
    """Refuse a cursor that would come back as another value or another type.

    Encodings are compared, not values: Python calls a moment in the hour that a zone has twice
    unequal to itself in any other zone.

    Raises:
        CursorError: says which value, and what it would have become.
    """
    text = encode_cursor(value)
    back = decode_cursor(text)
    if type(back) is not type(value) or encode_cursor(back) != text:
        raise CursorError(
            f"The cursor {value!r} would come back as {back!r}.",
            why="Going on from it would skip or repeat records.",
            unchanged="Nothing was committed.",
            todo="Use int, str, bytes, bool, float, Decimal, date, datetime, UUID, or tuples.",
        )


def _to_plain(value: Any) -> Any:
    """Return the JSON form of a cursor value."""
    kind = type(value).__name__
    if value is None or kind in ("str", "bool") or (kind == "int" and abs(value) < PLAIN_INT_MAX):
        return value
    if kind == "list":
        return _all_plain(value)
    if kind not in _TAGGED or type(value).__module__ != _TAGGED[kind][0]:
        raise ValueError(f"it has a value of type {kind}")
    return {f"${kind}": _TAGGED[kind][1](value)}


def _from_plain(plain: Any) -> Any:
    """Return the cursor value of its JSON form."""
    if isinstance(plain, dict):
        ((tag, inner),) = plain.items()
        return _TAGGED[tag[1:]][2](inner)
    return list(map(_from_plain, plain)) if isinstance(plain, list) else plain


def _all_plain(values: Iterable[Any]) -> list[Any]:
    return list(map(_to_plain, values))


def _finite(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return an encoding that refuses NaN and infinity."""

    def encode(value: Any) -> str:
        if "n" in str(value).lower():  # nan, snan, inf, Infinity; no digit has an n
            raise ValueError("NaN and infinity have no place in an order")
        return text_of(value)

    return encode


def _named(module: str, name: str) -> Callable[[str], Any]:
    """Return a type's constructor; its module is loaded only where a cursor is of that type."""
    return lambda text: getattr(__import__(module), name)(text)  # noqa: PLW0108 - not before


# Type -> its module, how a value becomes JSON, and how it comes back.
_TAGGED: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": ("builtins", hex, lambda text: int(text, 16)),
    "float": ("builtins", _finite(float.hex), float.fromhex),
    "bytes": ("builtins", bytes.hex, bytes.fromhex),
    "tuple": ("builtins", _all_plain, lambda items: tuple(map(_from_plain, items))),
    "dict": (
        "builtins",
        lambda value: _all_plain(value.items()),
        lambda items: dict(map(_from_plain, items)),
    ),
    "datetime": (
        "datetime",
        lambda moment: [moment.isoformat(), moment.fold],
        lambda parts: datetime.fromisoformat(parts[0]).replace(fold=parts[1]),
    ),
    "date": ("datetime", date.isoformat, date.fromisoformat),
    "Decimal": ("decimal", _finite(str), _named("decimal", "Decimal")),
    "UUID": ("uuid", str, _named("uuid", "UUID")),
}


class Checkpoint(NamedTuple):
    """Where a run goes on: the body of one checkpoint file."""

    ledger: str  # uuid of the ledger this belongs to
    event: int  # newest event id when the writer's attempt began
    operation: int  # newest operation id known to the writer
    job: str
    job_version: int
    run: str
    generation: int
    number: int  # commit number, from 1
    kind: str  # what the commit was: `batch`, `loop` (the end of one), `step` or `approval`
    loop: str  # the loop, step or approval that the commit belongs to
    cursor: str  # encoded cursor of that loop after the commit; `null` before its first record
    ended: bool  # whether the source said that nothing follows
    # finished loops, steps and approvals in order, `["loop", name]` or `["step", name, result]`
    passed: list[list[Any]]
    marks: dict[str, int]  # loop or step -> number last marked in its target
    # records `read` and `rejected`, `batches`, and the job's own counts, over the run
    totals: dict[str, Any]
    # read, rejected, counts, first and last key (encoded) and duration of this commit
    link: dict[str, Any]
    source: str | None  # fingerprint of the loop's source, if it has one
    settings: str  # digest of the settings
    previous: str  # hash of the commit before; of the run's beginning for commit 1
    at: str  # wall time


CHECKPOINT_TYPES = tuple(  # of each field in order: those that JSON gives it
    {"int": (int,), "str": (str,), "bool": (bool,), "str | None": (str, type(None))}.get(
        annotation, (list,) if annotation.startswith("list") else (dict,)
    )
    for annotation in Checkpoint.__annotations__.values()
)
CHECKPOINT_KINDS = set(product(*CHECKPOINT_TYPES))
CHECKPOINT_FIELDS, OF_BODY = set(Checkpoint._fields), itemgetter(*Checkpoint._fields)
INNER_FIELDS: dict[str, set[str]] = {
    "totals": {"read", "rejected", "batches", "counts"},
    "link": {"read", "rejected", "staged", "counts", "first_key", "last_key", "elapsed_s"},
}
IMAGE_FIELDS = ("remembered", "images")  # of a link, where the batch has remembered rows
SELDOM = {*IMAGE_FIELDS, "undoes"}  # fields that a link has only if there is something to say


def first_hash(ledger: str, run: str, settings: str) -> str:
    """Return the hash that commit 1 of a run hangs on."""
    return sha256(f"{ledger}\n{run}\n{settings}".encode()).hexdigest()


def checkpoint_bytes(checkpoint: Checkpoint) -> tuple[bytes, str]:
    """Return a checkpoint as its file's bytes, and its hash; CursorError if not read back so."""
    try:
        body = f"{_a_value_a_line(checkpoint._asdict())}\n".encode()
        content, digest = sealed(CHECKPOINT, body)
        if parse_checkpoint(content)[0] == checkpoint:
            return content, digest
        why = "it is not the same"
    except BrokenCheckpoint as error:
        why = error.what
    except ValueError as error:  # half a character, NaN
        why = str(error)
    raise CursorError(
        f"The checkpoint would not read back as it was written: {why}.",
        unchanged="Nothing was committed.",
    )


def parse_checkpoint(content: bytes) -> tuple[Checkpoint, str]:
    """Return the checkpoint that the bytes of a file hold, and its hash.

    Raises:
        BrokenCheckpoint: the bytes are not a valid checkpoint; says why.
        NewerFormat: a newer batchrun wrote it.
    """
    header, newline, body = content.partition(b"\n")
    digest, length = read_header(CHECKPOINT, header + newline)
    if len(content) > CHECKPOINT_MAX_BYTES:
        raise BrokenCheckpoint(f"it is larger than {CHECKPOINT_MAX_BYTES:,} bytes")
    if length != str(len(body)) or digest != sha256(body).hexdigest():
        raise BrokenCheckpoint(f"it is torn or changed: {len(body)} bytes, {length} were written")
    return _checkpoint_of(body), digest


def _no_such_number(name: str) -> NoReturn:
    raise ValueError(name)


_strict = json.JSONDecoder(parse_constant=_no_such_number)


def _checkpoint_of(body: bytes) -> Checkpoint:
    """Return a body as a checkpoint, or say which field is wrong."""
    try:
        fields = _strict.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint("its body is not JSON") from error
    if not isinstance(fields, dict) or fields.keys() != CHECKPOINT_FIELDS:
        raise BrokenCheckpoint("its body has not the fields of a checkpoint")
    checkpoint, wrong = Checkpoint._make(OF_BODY(fields)), list[str]()
    if (kinds := tuple(map(type, checkpoint))) not in CHECKPOINT_KINDS:
        found = zip(Checkpoint._fields, kinds, CHECKPOINT_TYPES, strict=True)
        wrong = [name for name, kind, types in found if kind not in types]
    wrong = wrong or [n for n, inner in INNER_FIELDS.items() if fields[n].keys() - SELDOM != inner]
    if wrong:
        raise BrokenCheckpoint(f"its field `{wrong[0]}` is not what it should be")
    try:
        decode_cursor(checkpoint.cursor)
    except Exception as error:
        raise BrokenCheckpoint("its cursor cannot be decoded") from error
    return checkpoint


class CheckpointStore:
    """The checkpoint files of one job, in a folder of their own.

    Every file is replaced whole by rename; whoever writes holds the job's lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._directory = -1

    def open(self) -> None:
        """Make the folder if it is not there, and hold it open."""
        if self._directory < 0:
            make_private_folder(self.folder.parent)
            make_private_folder(self.folder)
            ways = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._directory = os.open(self.folder, ways)

    def path(self, run: str) -> Path:
        """Return where the checkpoint of a run is."""
        return self.folder / f"{run}.json"

    def runs(self) -> list[str]:
        """Return the runs that have a checkpoint file here."""
        return sorted(path.stem for path in self.folder.glob("[!.]*.json"))

    def read(self, run: str) -> bytes | None:
        """Return the bytes of a run's file, None without one; BrokenCheckpoint if no file."""
        try:
            descriptor = os.open(self.path(run), READ_PLAIN)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BrokenCheckpoint("it is a link or a socket, not a file") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BrokenCheckpoint("it is a directory or a pipe, not a file")
        with os.fdopen(descriptor, "rb") as file:
            return file.read(CHECKPOINT_MAX_BYTES + 1)

    def prepare(self, run: str, content: bytes) -> str:
        """Make the bytes of a checkpoint durable under a temporary name; return that name."""
        return prepare_file(self._directory, f"{run}.json", content)

    def publish(self, run: str, temporary: str, number: int = 0) -> None:
        """Put prepared bytes in place. This rename is the commit."""
        at = self._directory
        reach("checkpoint.rename", number)
        os.rename(temporary, f"{run}.json", src_dir_fd=at, dst_dir_fd=at)
        reach("checkpoint.fsync", number)
        os.fsync(at)

    def discard(self, temporary: str) -> None:
        """Remove prepared bytes that were not put in place."""
        discard_file(self._directory, temporary)

    def replace(self, run: str, content: bytes) -> None:
        """Write a run's checkpoint anew, in a new inode; leave no temporary file if that fails."""
        with prepared_file(self._directory, f"{run}.json", content) as temporary:
            self.publish(run, temporary)

    def remove(self, run: str) -> None:
        """Remove the checkpoint of a run that can need it no more."""
        self.path(run).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove temporary files that killed writers left; only under the job's lock."""
        for path in self.folder.glob(f".*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(IsADirectoryError):
                path.unlink(missing_ok=True)


ROWS_A_LINE = 100
EXACT = {str, int, float, bool, type(None)}  # come back from JSON as they were; NaN is refused


class BrokenImage(PersonNeeded):
    """An image that is not there or not valid; says which and in which way."""


class ImageInMaking:
    """What one batch remembers, packed as it comes; `too_much` is raised beyond `limit` bytes."""

    def __init__(self, limit: int, too_much: BatchrunError) -> None:
        import zlib  # only batches that remember

        self._packer, self._packed = zlib.compressobj(1), list[bytes]()
        self._waiting, self._limit, self._too_much = list[object](), limit, too_much
        self.rows = self._size = 0

    def add(self, rows: Iterable[object]) -> None:
        """Add rows; CursorError if one could not be had back."""
        for row in rows:
            try:  # JSON is exact for most rows: a third of the time
                plain = type(row) is tuple and EXACT.issuperset(map(type, row))
                self._waiting.append({"$tuple": row} if plain else _to_plain(row))
            except (ValueError, RecursionError) as error:
                raise CursorError(
                    f"{row!r:.300} cannot be remembered: {error}.",
                    why="A remembered row is text, a number, a date, bytes, None, or a tuple, list"
                    " or dict of those.",
                    unchanged="Nothing was committed.",
                    todo="Let the job remember the row as such values.",
                ) from error
            self.rows += 1
            if len(self._waiting) == ROWS_A_LINE:
                self._pack()

    def _pack(self) -> None:
        try:
            line = f"{_compact(self._waiting)}\n".encode("utf-8", "surrogatepass")
        except ValueError as error:
            raise CursorError(f"NaN or infinity cannot be remembered: {error}.") from error
        self._packed.append(self._packer.compress(line))
        self._size, self._waiting = self._size + len(line), []
        if self._size > self._limit:
            raise self._too_much

    def content(self) -> tuple[bytes, str]:
        """Return the image as its file's bytes, and its hash; nothing can be added any more."""
        self._pack()
        return sealed(IMAGE, b"".join([*self._packed, self._packer.flush()]))


class ImageStore:
    """The images of one run, in a folder of their own; whoever writes holds the job's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, number: int, generation: int, content: bytes, digest: str) -> str:
        """Write an image, durable with its folder, and return its name."""
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            make_private_folder(folder)
        name = f"{number}-{generation}-{digest}"
        reach("image.write", number)
        write_atomically(self.folder / name, content)
        reach("image.written", number)
        return name

    def look(self, name: str) -> None:
        """Refuse an image that is not there, or has another header or length than it should."""
        try:
            with os.fdopen(os.open(self.folder / name, READ_PLAIN), "rb") as file:
                header, size = file.readline(HEADER_MAX_BYTES), os.fstat(file.fileno()).st_size
            _, length = read_header(IMAGE, header)
        except OSError as error:
            raise self._broken(name, error.strerror or "") from error
        except BrokenCheckpoint as error:
            raise self._broken(name, error.what) from error
        if str(size - len(header)) != length:
            raise self._broken(name, f"{size - len(header)} bytes follow its header, not {length}")

    def lines(self, name: str) -> list[bytes]:
        """Return the lines of an image, of ROWS_A_LINE rows each; the whole of it is checked."""
        import zlib

        self.look(name)
        body = (self.folder / name).read_bytes().partition(b"\n")[2]
        if sha256(body).hexdigest() != name.rpartition("-")[2]:
            raise self._broken(name, "it has other bytes than were written")
        return zlib.decompress(body).split(b"\n")[:-1]

    def sweep(self, newest: int) -> None:
        """Remove what older tries have left above the newest commit; only under the job's lock."""
        for path in self.folder.glob("*"):
            number = path.name.partition("-")[0]
            if path.name.startswith(".") or (number.isdecimal() and int(number) > newest):
                path.unlink(missing_ok=True)

    def _broken(self, name: str, why: str) -> BrokenImage:
        return BrokenImage(
            f"What batch {name.partition('-')[0]} of run {self.folder.name} has remembered cannot"
            " be read.",
            why=f"{self.folder / name}: {why}",
            unchanged="Nothing was done with it.",
            todo="Put that file back from a backup, then type this again.",
        )


# ======================================================================================
# 5. Ledger: what happened
# ======================================================================================
#
# One SQLite file, state/ledger.db, in WAL mode with synchronous=FULL: a commit that was
# acknowledged survives a power cut. Rules that hold for every public method that writes:
#
#   one verb, one transaction   BEGIN IMMEDIATE, short, never around the job's code
#   every state change          as compare-and-set; 0 rows = IllegalTransition or LostOwnership. An
#                               admission may make several: settle, cancel, begin anew
#   one event each              its AUTOINCREMENT id is the ledger's clock; wall time is a label
#
# A ledger is ours if and only if application_id and user_version are known and the one row of the
# table `ledger` is there. It is made whole under another name and renamed into place, and only
# where there is no ledger, no write-ahead log and no checkpoint either (but for `repair`): a ledger
# that lost its rows looks healthy to SQLite, and only the checkpoints can tell.
#
# A cleanup is recorded before its resource is made. Its row is pending until the function has
# returned, whoever calls it: the attempt that recorded it, or the next one of the job, of whatever
# run. From just before the call to its end the row's error is CUT_OFF, so that a call that took the
# process along is known by it. Registered again while pending, it has one row: the newer, which
# keeps the error. A person can let go those of a run; then they are done, with who and why. One of
# the run (`of_run`) is passed over by every attempt of its run but one that succeeds.
#
# A reject is staged under (run, number, generation) before its commit and confirmed by it; what an
# older try staged goes then. It is open until a person drops it or a retry has done it. A retry is
# a run with `retry_of`: its admission lets it take up open rejects (`reject.retry`), and each of
# its commits marks those up to its cursor as retried, in the same transaction. What it rejects
# again is a new row, listed with the old ones. A retry is no success of the whole job.
#
# A rollback is a run with `rollback_of`: it undoes the batches of that run above the commit
# `rollback_to`, newest first, from what they have remembered (section 4). What a succeeded rollback
# has undone is remembered no more, and a run that was rolled back, or that is a rollback, is no
# success of the job. It begins if and only if none of REFUSED_ROLLBACKS applies, which is judged
# inside its admission: what later runs have changed is undone before, so that the rows come back
# in the order in which they went.
#
# A *barrier* is the row of a maintenance. It is made and closed in the transaction that looks at
# the lockfile (section 6): `raise_barrier` and `lower_barrier` write and remove it in there. Write
# transactions are serial, so every admission stands before the event that opened a barrier, or
# after the one that closed it, or has seen the lockfile; `attempt.admitted` proves it.
#
# A start is *deferred* by the note in `run.deferred`: of a waiting run that begins with it, or of
# the unfinished run that it would have gone on with. The edge to `reserved` takes the note away in
# the admission's own transaction: it is begun once, by whoever comes first.
#
# A *drain* belongs to one barrier, however often it is begun. It asks the runs that are owned to
# stop (`request` = drain), which any edge to a state without an owner honours. Which runs there are
# to account for is known from event ids alone: those unfinished before the event that opened the
# barrier, and those stored behind it. What became of each is known from its row and processes.
#
# The *views* are for people with any other SQLite tool, and for the reports here: a run by its id,
# moments in UTC, units at the end of names. What a view has is never taken away.
#
# A run that is *paused by health* with `checks_at` is kept: its supervisor lives, holds the job's
# lock, and looks again at that time. Every edge takes `checks_at` away but the one into that pause.
#
# A run is *pruned*, with all its rows and files, if it ended before the time that is kept and
# nothing needs it any more. Needed are a job's newest run and newest success, what has an open
# reject, a pending cleanup or an open operation, and whatever is a retry or rollback of a needed
# run, or was retried or rolled back by one. The newest go first: a retry before what it retried.
# First its copy of the checkpoint goes, so that no rollback of it begins, then its commits in
# slices; then its files, while no transaction is open; last its row, which alone knows of them. An
# operation means once ever: its row stays, and its run's with it. Events stay that others refer to,
# without the run, and the one that says since when a job is expected; the newest is the clock. An
# alert goes once it is closed and told.
#
# An *alert* is raised once for what stands: (kind, about) is unique among those not closed. It is
# closed when its job is configured no more, or by the job's next success, which is known by event
# ids, and is one itself: recovered. What stands is looked at in the transaction that raises and
# closes. An alert is pending in each way by which it is to be told, until a try arrived or
# DELIVERY_TRIES did not. A try is a row made before it, with the error CUT_OFF: killed anywhere, an
# alert is told once at least, and each try is kept.
#
# A COMMIT that raised may have happened. It is never repeated in the same process: the process
# ends, and the next start finds out. The connection is not usable in a forked child.

APPLICATION_ID = 0x62726E31
SCHEMA_VERSION = 3
SQLITE_OLDEST = (3, 51, 3)
SQLITE_WITHDRAWN = (3, 52)
BUSY_LIMIT_S = 10.0
BUSY_STEP_S = 0.01
BACKUP_STEP = 1_000  # of SQLite's blocks of 4 kB
LEDGER_ROOM_BYTES = 262_144  # below this SQLite cannot even make its wal-index

SCHEMA = """
CREATE TABLE ledger (uuid TEXT NOT NULL, created_at TEXT NOT NULL, ticked_at TEXT) STRICT;
CREATE TABLE edge (
  from_state TEXT NOT NULL, to_state TEXT NOT NULL, sentence TEXT NOT NULL,
  PRIMARY KEY (from_state, to_state)
) STRICT, WITHOUT ROWID;
CREATE TABLE run (
  key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', request TEXT,
  generation INTEGER NOT NULL DEFAULT 0,
  created_at TEXT NOT NULL, changed_at TEXT NOT NULL, ended_at TEXT,
  number INTEGER NOT NULL DEFAULT 0, hash TEXT NOT NULL DEFAULT '', checkpoint BLOB,
  batches INTEGER NOT NULL DEFAULT 0, read INTEGER NOT NULL DEFAULT 0,
  rejected INTEGER NOT NULL DEFAULT 0, expected INTEGER, counts TEXT NOT NULL DEFAULT '{}',
  settings TEXT NOT NULL DEFAULT '{}', overrides TEXT NOT NULL DEFAULT '{}', job_version INTEGER,
  fresh_in_a_row INTEGER NOT NULL DEFAULT 0, read_s REAL NOT NULL DEFAULT 0,
  work_s REAL NOT NULL DEFAULT 0, own_s REAL NOT NULL DEFAULT 0, error TEXT,
  tried TEXT, tries INTEGER NOT NULL DEFAULT 0, size INTEGER,
  paused_s REAL NOT NULL DEFAULT 0, checks_at TEXT, deferred TEXT,
  retry_of TEXT REFERENCES run (id), rollback_of TEXT REFERENCES run (id), rollback_to INTEGER
) STRICT;
CREATE UNIQUE INDEX one_unfinished_run_a_job ON run (job)
  WHERE state NOT IN ('succeeded', 'cancelled');
CREATE INDEX run_of_job ON run (job, key);
CREATE TABLE attempt (
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  supervisor TEXT NOT NULL, worker TEXT, began_at TEXT NOT NULL, ended_at TEXT,
  ending TEXT, reason TEXT, exit_code INTEGER, signal INTEGER,
  error TEXT, unchanged TEXT, todo TEXT,
  peak_rss_bytes INTEGER, from_number INTEGER NOT NULL, to_number INTEGER,
  releases TEXT NOT NULL DEFAULT '[]', charged INTEGER NOT NULL DEFAULT 0, retry INTEGER,
  cleans_until REAL, admitted INTEGER REFERENCES event, PRIMARY KEY (run, generation)
) STRICT, WITHOUT ROWID;
CREATE TABLE batch (
  run INTEGER NOT NULL REFERENCES run, number INTEGER NOT NULL,
  generation INTEGER NOT NULL, kind TEXT NOT NULL, loop TEXT NOT NULL, cursor TEXT NOT NULL,
  first_key TEXT, last_key TEXT, read INTEGER NOT NULL, rejected INTEGER NOT NULL,
  counts TEXT NOT NULL, hash TEXT NOT NULL, at TEXT NOT NULL, elapsed_s REAL NOT NULL,
  rss_bytes INTEGER, open_files INTEGER, connections INTEGER, threads INTEGER, children INTEGER,
  remembered INTEGER NOT NULL DEFAULT 0, images TEXT,
  PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE reject (
  run INTEGER NOT NULL REFERENCES run, number INTEGER NOT NULL, generation INTEGER NOT NULL,
  place INTEGER NOT NULL, loop TEXT NOT NULL, record TEXT NOT NULL, reason TEXT NOT NULL,
  at TEXT NOT NULL, confirmed INTEGER NOT NULL DEFAULT 0,
  value TEXT, raw INTEGER NOT NULL DEFAULT 0, record_number INTEGER,
  tries INTEGER NOT NULL DEFAULT 1, state TEXT NOT NULL DEFAULT 'open',
  retry INTEGER REFERENCES run, why TEXT,
  PRIMARY KEY (run, number, generation, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE event (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at TEXT NOT NULL, run INTEGER REFERENCES run, job TEXT,
  who TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX event_of_run ON event (run, id);
CREATE INDEX event_of_job ON event (job, id);
CREATE TRIGGER run_begins_as BEFORE INSERT ON run
  WHEN NOT EXISTS (SELECT 1 FROM edge WHERE from_state = 'new' AND to_state = NEW.state)
  BEGIN SELECT RAISE(ABORT, 'illegal transition: a run does not begin like this'); END;
CREATE TRIGGER run_goes_on_as BEFORE UPDATE OF state ON run
  WHEN NOT EXISTS (SELECT 1 FROM edge WHERE from_state = OLD.state AND to_state = NEW.state)
  BEGIN SELECT RAISE(ABORT, 'illegal transition: no edge between these states'); END;
CREATE TRIGGER events_stay BEFORE DELETE ON event
  WHEN OLD.id = (SELECT max(id) FROM event)
  BEGIN SELECT RAISE(ABORT, 'the newest event is the ledger''s clock'); END;
"""

SINCE_VERSION_2 = """
CREATE TABLE reading (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL, number INTEGER NOT NULL,
  available_bytes INTEGER, limit_bytes INTEGER, limit_source TEXT, rss_bytes INTEGER,
  connections INTEGER, open_files INTEGER, threads INTEGER, children INTEGER, pressure REAL
) STRICT;
CREATE INDEX reading_of_run ON reading (run, id);
CREATE TABLE health_check (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  memory TEXT NOT NULL, connections TEXT NOT NULL, dependencies TEXT NOT NULL,
  verdict TEXT NOT NULL, why TEXT NOT NULL, elapsed_s REAL NOT NULL
) STRICT;
CREATE INDEX health_check_of_run ON health_check (run, id);
CREATE TABLE cleanup (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL,
  function TEXT NOT NULL, arguments TEXT NOT NULL, made_at TEXT NOT NULL,
  done_at TEXT, error TEXT, elapsed_s REAL
) STRICT;
CREATE INDEX cleanup_of_run ON cleanup (run, id);
CREATE INDEX pending_cleanup ON cleanup (run, id) WHERE done_at IS NULL;
CREATE TABLE barrier (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  device INTEGER NOT NULL, inode INTEGER NOT NULL,
  at TEXT NOT NULL, who TEXT NOT NULL, reason TEXT NOT NULL, until TEXT,
  scopes TEXT NOT NULL DEFAULT '[]', opened INTEGER NOT NULL REFERENCES event,
  overdue INTEGER REFERENCES event, closed INTEGER REFERENCES event, closed_at TEXT, closed_why TEXT
) STRICT;
CREATE UNIQUE INDEX one_barrier_at_a_time ON barrier (closed IS NULL) WHERE closed IS NULL;
CREATE TABLE drain (
  id INTEGER PRIMARY KEY AUTOINCREMENT, barrier INTEGER NOT NULL REFERENCES barrier,
  at TEXT NOT NULL, who TEXT NOT NULL, deadline_s REAL NOT NULL, ended_at TEXT,
  exit_code INTEGER, report TEXT
) STRICT;
CREATE TABLE approval (
  run INTEGER NOT NULL REFERENCES run, name TEXT NOT NULL, summary TEXT NOT NULL,
  asked_at TEXT NOT NULL, answered_at TEXT, who TEXT, why TEXT,
  PRIMARY KEY (run, name)
) STRICT, WITHOUT ROWID;
"""
SINCE_VERSION_3 = """
CREATE TABLE operation (
  id INTEGER PRIMARY KEY, job TEXT NOT NULL, key TEXT NOT NULL,
  run INTEGER NOT NULL REFERENCES run, generation INTEGER NOT NULL, number INTEGER NOT NULL,
  arguments BLOB NOT NULL, lookup TEXT, irreversible INTEGER NOT NULL DEFAULT 0,
  claimed_at TEXT NOT NULL, outcome TEXT, receipt TEXT, ended_at TEXT,
  who TEXT, why TEXT, UNIQUE (job, key)
) STRICT;
CREATE INDEX operation_of_run ON operation (run);
CREATE INDEX retry_of_run ON run (retry_of) WHERE retry_of IS NOT NULL;
CREATE INDEX open_operation ON operation (run, id) WHERE outcome IS NULL;
CREATE INDEX rollback_of_run ON run (rollback_of) WHERE rollback_of IS NOT NULL;
CREATE INDEX batch_that_remembers ON batch (run, number) WHERE images IS NOT NULL;
CREATE TABLE alert (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, event INTEGER NOT NULL,
  kind TEXT NOT NULL, about TEXT NOT NULL, job TEXT, run TEXT, why TEXT NOT NULL,
  todo TEXT NOT NULL, pending TEXT NOT NULL, closed_at TEXT
) STRICT;
CREATE UNIQUE INDEX standing_alert ON alert (kind, about) WHERE closed_at IS NULL;
CREATE INDEX pending_alert ON alert (id) WHERE pending <> '[]';
CREATE TABLE delivery (
  id INTEGER PRIMARY KEY, alert INTEGER NOT NULL REFERENCES alert, way TEXT NOT NULL,
  at TEXT NOT NULL, error TEXT, elapsed_s REAL
) STRICT;
CREATE INDEX delivery_of_alert ON delivery (alert, way);
-- of tables that version 2 brought, and that a ledger of version 1 gets above
ALTER TABLE cleanup ADD COLUMN of_run INTEGER NOT NULL DEFAULT 0;
"""
# For people with any other SQLite tool, and for the reports: see the head of this section.
VIEWS = """
CREATE VIEW run_summary AS
SELECT run, job, state, reason, began_at, ended_at, until_at,
  round(max(0, julianday(until_at) - julianday(began_at)) * 86400, 3) AS duration_s,
  round(at_work_d * 86400, 3) AS at_work_s, paused_s, attempts, commits, batches, records, rejected,
  iif(at_work_d > 0, round(records / (at_work_d * 86400), 3), NULL) AS records_per_s,
  error, retry_of, rollback_of
FROM (SELECT *, (SELECT count(*) FROM attempt WHERE run = key) AS attempts,
    (SELECT sum(max(0, julianday(coalesce(ended_at, iif(generation = owner, until_at, began_at)))
      - julianday(began_at))) FROM attempt WHERE run = key) AS at_work_d
  FROM (SELECT key, generation AS owner, id AS run, job, state, reason, created_at AS began_at,
    ended_at, coalesce(ended_at, max(changed_at,
      coalesce((SELECT at FROM batch WHERE run = key AND number = r.number), ''))) AS until_at,
    paused_s, number AS commits, batches, read AS records, rejected, error, retry_of, rollback_of
    FROM run r));
CREATE VIEW attempt_summary AS
SELECT r.id AS run, r.job, a.generation, a.began_at, a.ended_at,
  round((julianday(a.ended_at) - julianday(a.began_at)) * 86400, 3) AS duration_s,
  a.ending, a.reason, a.exit_code, a.signal, a.charged, count(b.number) AS commits,
  coalesce(sum(b.read), 0) AS records, coalesce(sum(b.rejected), 0) AS rejected,
  a.peak_rss_bytes, a.error
FROM run r JOIN attempt a ON a.run = r.key LEFT JOIN batch b ON b.run = a.run
  AND b.number BETWEEN a.from_number + 1 AND coalesce(a.to_number, r.number)
  AND b.generation = a.generation
GROUP BY r.id, a.generation;
CREATE VIEW release_order AS
SELECT r.id AS run, r.job, a.generation, j.key + 1 AS place,
  json_extract(j.value, '$.name') AS name,
  json_extract(j.value, '$.elapsed_s') AS elapsed_s,
  nullif(json_extract(j.value, '$.error'), '') AS error
FROM run r JOIN attempt a ON a.run = r.key, json_each(a.releases) j;
CREATE VIEW batch_rate AS
SELECT r.id AS run, r.job, substr(b.at, 1, 16) || ':00Z' AS minute_at, count(*) AS batches,
  sum(b.read) AS records, sum(b.rejected) AS rejected, sum(b.read) / 60.0 AS records_per_s,
  min(b.elapsed_s) AS shortest_s, avg(b.elapsed_s) AS mean_s, max(b.elapsed_s) AS longest_s
FROM run r JOIN batch b ON b.run = r.key WHERE b.kind = 'batch' GROUP BY r.id, minute_at;
CREATE VIEW reading_timeline AS
SELECT r.id AS run, r.job, g.at, g.generation, g.number, g.available_bytes, g.limit_bytes,
  g.limit_source, g.rss_bytes, g.connections, g.open_files, g.threads, g.children,
  g.pressure AS pressure_percent FROM run r JOIN reading g ON g.run = r.key;
CREATE VIEW health_timeline AS
SELECT r.id AS run, r.job, h.at, h.generation,
  substr(h.memory, 1, instr(h.memory, ':') - 1) AS memory,
  substr(h.connections, 1, instr(h.connections, ':') - 1) AS connections,
  substr(h.dependencies, 1, instr(h.dependencies, ':') - 1) AS dependencies,
  h.verdict, h.why, h.elapsed_s FROM run r JOIN health_check h ON h.run = r.key;
CREATE VIEW operation_summary AS
SELECT r.id AS run, o.job, coalesce(o.outcome, 'open') AS outcome, count(*) AS operations,
  min(o.claimed_at) AS first_claimed_at, max(o.ended_at) AS last_ended_at
FROM run r JOIN operation o ON o.run = r.key GROUP BY r.id, o.job, coalesce(o.outcome, 'open');
"""
SINCE_VERSION_3 += VIEWS
SCHEMA += SINCE_VERSION_2 + SINCE_VERSION_3


def added(table: str, columns: str) -> str:
    """Return the statements that add to a table the columns that SCHEMA names in these words."""
    return "".join(f"ALTER TABLE {table} ADD COLUMN {column};\n" for column in columns.split(", "))


# One entry a step: MIGRATIONS[n] turns a ledger of user_version n into n + 1.
MIGRATIONS = {
    1: added("run", "tried TEXT, tries INTEGER NOT NULL DEFAULT 0, size INTEGER")
    + added("run", "paused_s REAL NOT NULL DEFAULT 0, checks_at TEXT, deferred TEXT")
    + added("run", "retry_of TEXT REFERENCES run (id)")
    + added("attempt", "charged INTEGER NOT NULL DEFAULT 0, retry INTEGER, cleans_until REAL")
    + added("attempt", "admitted INTEGER REFERENCES event")
    + added("batch", "rss_bytes INTEGER, open_files INTEGER, connections INTEGER")
    + added("batch", "threads INTEGER, children INTEGER")
    + added("reject", "value TEXT, raw INTEGER NOT NULL DEFAULT 0, record_number INTEGER")
    + added("reject", "tries INTEGER NOT NULL DEFAULT 1, state TEXT NOT NULL DEFAULT 'open'")
    + added("reject", "retry INTEGER REFERENCES run, why TEXT")
    + SINCE_VERSION_2,
    2: added("ledger", "ticked_at TEXT")
    + added("run", "rollback_of TEXT REFERENCES run (id), rollback_to INTEGER")
    + added("batch", "remembered INTEGER NOT NULL DEFAULT 0, images TEXT")
    + SINCE_VERSION_3,
}

UNFINISHED = "state NOT IN ('succeeded', 'cancelled')"
OWNED = (RunState.RESERVED, RunState.RUNNING)

# A commit moves the run's row on, only if its generation and number are still those.
MOVE_ON = """UPDATE run SET number = ?3, hash = ?4, checkpoint = ?5,
  batches = ?6, read = ?7, rejected = ?8, counts = ?9,
  read_s = read_s + ?10, work_s = work_s + ?11, own_s = own_s + ?12,
  tried = ?13, tries = 0, size = ?14
  WHERE key = ?1 AND generation = ?2 AND number = ?3 - 1 RETURNING request"""
# What a source was expected to have may be an estimate; at its end it is known.
READ_WHOLE = "UPDATE run SET expected = read WHERE key = ?1 AND expected IS NOT NULL"
# What a run (:run) has of commit :number and above, but what that has staged for its rejects.
TAKE_BACK = """DELETE FROM batch WHERE run = :run AND number >= :number;
  DELETE FROM reject WHERE run = :run AND number >= :number
  AND (number, generation) <> (:number, :staged)"""
# The edge that honours a request clears it; a start outdates a pause, never a cancel. It also takes
# up a deferred start. From running to reserved it is the same supervisor: nobody started anything.
# A run that is paused by health is looked after from now on.
MOVE = """UPDATE run SET state = :to, reason = :reason, changed_at = :now, error = :error,
  checks_at = iif(:to = 'paused' AND :reason = 'health', :now, NULL),
  ended_at = iif(:ends, :now, NULL), request = iif(
    :ends OR (request = 'pause' AND (:to = 'paused' OR (:to = 'reserved' AND state <> 'running')))
    OR (request = 'drain' AND :to NOT IN ('reserved', 'running')), NULL, request),
  deferred = iif(:ends OR :to = 'reserved', NULL, deferred)
  WHERE key = :key AND state = :state RETURNING 1"""
CUT_OFF = "the process ended during the call"
# The outcome of an open operation, or why it is open still: what is Told, and the time.
OUTCOME = """UPDATE operation SET outcome = ?2, receipt = ?3, who = ?4, why = ?5,
  ended_at = iif(?2 IS NULL, NULL, ?6) WHERE id = ?1 AND outcome IS NULL"""
# Claims, also of freed keys; :claims are [key, digest in hex] as JSON, a third of the time of a
# statement for each.
CLAIM = """INSERT INTO operation
  (job, key, arguments, run, generation, number, lookup, irreversible, claimed_at)
  SELECT :job, value ->> 0, unhex(value ->> 1), :run, :generation, :number, :lookup,
    :irreversible, :now FROM json_each(:claims) WHERE true
  ON CONFLICT (job, key) DO UPDATE SET arguments = excluded.arguments, run = :run,
  generation = :generation, number = :number, lookup = :lookup, irreversible = :irreversible,
  claimed_at = :now, outcome = NULL, receipt = NULL, ended_at = NULL, who = NULL, why = NULL
  WHERE outcome = 'freed' RETURNING key, id"""
DONE, CONFIRMED, FREED = "done", "confirmed", "freed"
DELIVERY_TRIES, DELIVERIES_AT_ONCE = 12, 32
TRIED = "SELECT count(*), coalesce(max(at), '') FROM delivery WHERE alert = ? AND way = ?"
DELIVERY_WAITS_S = (60, 240, 960, 3600)  # between two tries; the last one again and again
EVENTS = """(SELECT e.id, e.at, r.id AS run, e.job, e.who, e.what, e.why, e.run AS key
  FROM event e LEFT JOIN run r ON r.key = e.run)"""
CLEANUPS = """(SELECT c.id, r.id AS run, r.job, c.function, c.arguments, c.made_at, c.done_at,
  c.error, c.elapsed_s, c.of_run, c.run AS key, r.state
  FROM cleanup c JOIN run r ON r.key = c.run)"""
# The rejects of a run (?1) and of its retries, numbered over all of them.
REJECTS = """(SELECT row_number() OVER (ORDER BY j.run, j.number, j.place) AS id, r.id AS run,
    j.number, j.generation, j.place, j.loop, j.record, j.reason, j.at, j.value, j.raw,
    j.record_number, j.tries, j.state, n.id AS retry, j.why, j.run AS key,
    json_array(j.run, j.number, j.place) AS spot
  FROM reject j JOIN run r ON r.key = j.run LEFT JOIN run n ON n.key = j.retry
  WHERE j.confirmed AND j.run IN (SELECT key FROM run WHERE id = ?1 OR retry_of = ?1))"""
# What is remembered and not undone: key of the run r, number and image of its batch b.
REMEMBERED = """SELECT r.key, b.number, b.images FROM batch b JOIN run r ON r.key = b.run
  WHERE b.images IS NOT NULL AND r.checkpoint IS NOT NULL
  AND b.number <= coalesce((SELECT min(u.rollback_to) FROM run u
    WHERE u.rollback_of = r.id AND u.state = 'succeeded'), b.number)"""
# The runs not finished before event ?1 and begun by event ?2, and whether ?1 accounts for each.
FOUND = """SELECT key, first < ?1 OR stored IS NOT NULL FROM (SELECT key,
    (SELECT min(id) FROM event WHERE run = key) AS first,
    (SELECT min(id) FROM event WHERE run = key AND what = 'waiting') AS stored,
    (SELECT min(id) FROM event WHERE run = key
      AND (what LIKE 'succeeded%' OR what LIKE 'cancelled%')) AS final FROM run)
  WHERE first <= ?2 AND (final IS NULL OR final > ?1) ORDER BY key"""
# The successes of jobs: of whole runs that were not rolled back.
SUCCESSES = """(SELECT s.key, s.job FROM run s WHERE s.state = 'succeeded' AND s.retry_of IS NULL
  AND s.rollback_of IS NULL AND NOT EXISTS
  (SELECT 1 FROM run u WHERE u.rollback_of = s.id AND u.state = 'succeeded'))"""
# The finished runs that ended before ?1, but what is needed for its own sake; newest first. A run
# that is only kept for its operations has nothing left.
PRUNABLE = f"""SELECT key, id FROM run r
  WHERE ended_at < ?1
  AND key NOT IN (SELECT max(key) FROM run GROUP BY job)
  AND (state = 'cancelled' OR EXISTS
    (SELECT 1 FROM {SUCCESSES} WHERE job = r.job AND key > r.key))
  AND NOT EXISTS (SELECT 1 FROM reject WHERE run = r.key AND confirmed AND state = 'open')
  AND NOT EXISTS (SELECT 1 FROM cleanup WHERE run = r.key AND done_at IS NULL)
  AND NOT EXISTS (SELECT 1 FROM operation WHERE run = r.key AND outcome IS NULL)
  AND (EXISTS (SELECT 1 FROM attempt WHERE run = r.key)
    OR NOT EXISTS (SELECT 1 FROM operation WHERE run = r.key)) ORDER BY key DESC"""
KIN = """SELECT id, retry_of FROM run WHERE retry_of IS NOT NULL
  UNION ALL SELECT id, rollback_of FROM run WHERE rollback_of IS NOT NULL"""
ROWS_OF_A_RUN = ("reading", "health_check", "cleanup", "approval", "reject", "batch", "attempt")
REFERRED = """SELECT admitted FROM attempt WHERE admitted IS NOT NULL
  UNION SELECT opened FROM barrier UNION SELECT overdue FROM barrier WHERE overdue IS NOT NULL
  UNION SELECT closed FROM barrier WHERE closed IS NOT NULL UNION SELECT max(id) FROM event
  UNION SELECT id FROM event WHERE run IS NULL AND what = 'expected'"""
# What was over before a moment and is of no run; readings and health checks also of one that stays.
PRUNE_THE_REST = f"""DELETE FROM reading WHERE at < :before;
DELETE FROM health_check WHERE at < :before;
DELETE FROM drain WHERE barrier IN (SELECT id FROM barrier WHERE closed_at < :before);
DELETE FROM barrier WHERE closed_at < :before;
DELETE FROM delivery WHERE alert IN
  (SELECT id FROM alert WHERE closed_at < :before AND pending = '[]');
DELETE FROM alert WHERE closed_at < :before AND pending = '[]';
DELETE FROM event WHERE run IS NULL AND at < :before AND id NOT IN ({REFERRED})"""
COMMITS_AT_ONCE = 5_000  # commits of a run that go in one transaction
# A run (?1, its id ?2) in spans of ?4 s from ?3, at most ?5: one row a span, never one a batch.
SPANS = """SELECT ?4 * max(0, min(?5 - 1,
    CAST((julianday(at) - julianday(?3)) * 86400 / ?4 AS INTEGER))) AS at_s,
  count(elapsed_s) AS batches, sum(read) AS records, sum(rejected) AS rejected,
  min(elapsed_s) AS shortest_s, avg(elapsed_s) AS mean_s, max(elapsed_s) AS longest_s,
  max(rss_bytes) AS rss_bytes, max(held) AS open_connections,
  min(available_bytes) AS available_bytes, min(memory) AS memory, min(connections) AS connections,
  min(dependencies) AS dependencies
FROM (SELECT at, read, rejected, elapsed_s, rss_bytes, NULL AS held, NULL AS available_bytes,
    NULL AS memory, NULL AS connections, NULL AS dependencies
    FROM batch WHERE run = ?1 AND kind = 'batch'
  UNION ALL SELECT at, NULL, NULL, NULL, rss_bytes, connections, available_bytes, NULL, NULL, NULL
    FROM reading_timeline WHERE run = ?2
  UNION ALL SELECT at, NULL, NULL, NULL, NULL, NULL, NULL, memory, connections, dependencies
    FROM health_timeline WHERE run = ?2)
GROUP BY at_s ORDER BY at_s"""
SPANS_MOST = 120  # enough for a page: 90 s each in three hours
SPAN_BATCHES = 5  # in a span, or their edges would look like changes of the rate
# 95 of 100 batches of a run (?1) took no longer.
SLOW = """SELECT elapsed_s FROM batch WHERE run = ?1 AND kind = 'batch' ORDER BY elapsed_s LIMIT 1
  OFFSET (SELECT (count(*) * 95 + 99) / 100 - 1 FROM batch WHERE run = ?1 AND kind = 'batch')"""
OPEN = "SELECT key, claimed_at, why FROM operation WHERE run = ? AND outcome IS NULL LIMIT 20"
ADD_PAUSE = "UPDATE run SET paused_s = paused_s + ? WHERE key = ?"
# A record that was found bad is tried once more: it may have been mended.
TRY_ANEW = "UPDATE run SET tries = 0, size = max(size, 1) WHERE key = :key"
# Another key is another batch, of which no try was charged yet.
ARM = """UPDATE run SET tries = iif(tried IS :tried, tries, 0), tried = :tried WHERE key = :key"""
SAID, LEAK = "said", "said (leak)"  # events whose `why` is a line for people
REFUSED, DEFERRED = "refused: maintenance", "deferred"
REMOVED, CHANGED = "removed by hand", "changed by hand"
GAUGES = ("rss_bytes", "open_files", "connections", "threads", "children")  # of a worker
OF_TOTALS = itemgetter("batches", "read", "rejected")
COMMIT_COLUMNS = ("number", "generation", "kind", "loop", "cursor", "at")  # of the checkpoint
LINK_COLUMNS = ("first_key", "last_key", "read", "rejected", "elapsed_s")
OF_COMMIT, OF_LINK = attrgetter(*COMMIT_COLUMNS), itemgetter(*LINK_COLUMNS)
BATCH_COLUMNS = ("run", "hash", "counts", *COMMIT_COLUMNS, *LINK_COLUMNS, *IMAGE_FIELDS, *GAUGES)
ADD_COMMIT = (
    f"INSERT INTO batch ({', '.join(BATCH_COLUMNS)}) VALUES ({', '.join('?' * len(BATCH_COLUMNS))})"
)


class Commit(NamedTuple):
    """One commit, as the ledger records it."""

    checkpoint: Checkpoint
    content: bytes  # of its file
    digest: str  # their hash, the commit's own
    # seconds of reading, of the job's own work, and of batchrun since the commit before
    spent: tuple[float, float, float] = (0.0, 0.0, 0.0)
    following: str | None = None  # the try that is armed by it
    gauges: Mapping[str, int] = {}  # what the worker holds
    size: int | None = None  # the limit that isolation goes on with


class Admission(NamedTuple):
    """A run that this process owns: what `admit` gives."""

    run: Run  # the run as it stands after the admission, in state `reserved`
    generation: int  # the number that fences every write of this owner; 0 if nothing was begun
    said: list[str]  # what a person should be told (going on, repairs), in order
    deferred: Mapping[str, Any] = {}  # the start that was deferred and is begun by this one


class AttemptEnd(NamedTuple):
    """How an attempt ended, in the words that are kept."""

    ending: Ending
    exit_code: ExitCode
    reason: Reason = Reason.NONE  # why the run is paused or awaiting, where it is
    error: str = ""
    unchanged: str = ""
    todo: str = ""
    retry: int | None = None  # as in Attempt


DIED = AttemptEnd(Ending.DIED, ExitCode.FAILED)


class Agreement(NamedTuple):
    """What recovery decided about a run's ledger rows and its checkpoint file."""

    said: str = ""  # one line for a person; empty if all agreed
    forward: Checkpoint | None = None  # a commit that the ledger lacks and the checkpoint proves
    content: bytes | None = None  # bytes to write as the checkpoint file anew, or None to leave it


class Basis(NamedTuple):
    """What the commits of a run stand on."""

    settings: dict[str, str]  # name -> digest of each setting that belongs to the run's identity
    job_version: int
    first_hash: str  # what commit 1 hangs on


class Told(NamedTuple):
    """What is recorded of an open operation; without an outcome it stays open."""

    id: int
    outcome: str | None
    receipt: str | None = None  # JSON
    who: str | None = None
    why: str | None = None


class Retry(NamedTuple):
    """The rejects to run again: of which run, and where they are."""

    of: Run
    spots: Sequence[tuple[int, int, int]]


class Rollback(NamedTuple):
    """What is undone: the commits of a run above one, and not above another."""

    of: Run
    to: int  # the newest commit that stays
    top: int  # the newest that no rollback has undone yet
    why: str = ""


Find = Callable[[], Lockfile | None]  # looks for the lockfile of a maintenance


class Start(NamedTuple):
    """One start, as an admission judges it."""

    owner: ProcessIdentity  # the supervisor
    who: str  # the same in words, for events
    run_id: str  # the id for a new run
    require_admission: Find  # raises if it closes this job
    require_may_go_on: Callable[[Run], None]  # raises if the unfinished run needs a person
    write_checkpoint: Callable[[str, bytes], None]  # writes a run's checkpoint anew
    overrides: Mapping[str, str] = {}
    accept_settings: bool = False
    only_resume: bool = False  # whether no new run is to begin if nothing is unfinished
    fresh: bool = False  # whether an unfinished run is to be cancelled first, with `fresh_reason`
    fresh_reason: str = "a fresh start was asked for"
    fresh_in_a_row: int = 0
    retry: Retry | None = None  # what a new run takes up in the place of its sources
    rollback: Rollback | None = None  # what a new run undoes, in the place of doing the job
    # whether the unfinished run is to be left as it stands
    leaves: Callable[[Run], bool] = lambda _: False


class After(NamedTuple):
    """What becomes of a run after an attempt; `why` is for people, and kept where nothing goes on.

    A run that stays `reserved` is kept by its supervisor, which begins the next attempt. `size` is
    the limit of records that isolation goes on with; None: as it is.
    """

    state: RunState
    reason: str = ""
    why: str = ""
    size: int | None = None


STATE_AFTER = {
    Ending.SUCCEEDED: RunState.SUCCEEDED,
    Ending.STOPPED: RunState.PAUSED,
    Ending.AWAITS: RunState.AWAITING,
    Ending.DIED: RunState.INTERRUPTED,
}  # and failed after every other ending


def after_ending(run: Run, attempt: Attempt) -> After:
    """Return what becomes of a run whose next attempt nobody is there to begin."""
    state = STATE_AFTER.get(cast("Ending", attempt.ending), RunState.FAILED)
    reason = attempt.reason or ""
    not_begun = attempt.ending == Ending.REFUSED and run.state == RunState.RESERVED
    if attempt.may_be_followed or not_begun:
        # plan B is the supervisor's, and it went away; or what is installed can be put back
        state = RunState.INTERRUPTED
    if attempt.ending in (Ending.STOPPED, Ending.AWAITS) and run.request == Request.CANCEL:
        state, reason = RunState.CANCELLED, Reason.PERSON
    return After(state, reason, attempt.error or "")


# Class of a row -> its table, or a select that knows runs by their ids.
READ_FROM: dict[type, str] = {Run: "run", Attempt: "attempt", BatchRow: "batch", Event: EVENTS}
READ_FROM |= {Barrier: "barrier", Reading: "reading", HealthCheck: "health_check"}
READ_FROM |= {Approval: "approval", Drain: "drain", Operation: "operation", Alert: "alert"}
READ_FROM |= {Cleanup: CLEANUPS, RejectRow: REJECTS}
READ_AS: dict[str, Callable[[Any], Any]] = {  # annotation of a row's field -> value of a column
    "RunState": RunState,
    "ProcessIdentity": lambda text: ProcessIdentity(**json.loads(text)),
    "ProcessIdentity | None": lambda text: text and ProcessIdentity(**json.loads(text)),
    "dict[str, Any] | None": lambda text: text and json.loads(text),
    "tuple[int, int, int]": lambda text: tuple(json.loads(text)),
}
READ_AS |= dict.fromkeys(("dict[str, int]", "dict[str, str]", "dict[str, Any]"), json.loads)
READ_AS |= dict.fromkeys(("list[dict[str, Any]]", "list[str]", "Sequence[str]"), json.loads)


class Ledger:
    """What happened, in verbs: each public method that writes is one transaction.

    Use `open_ledger`. One process, one connection; never shared with a forked child. A verb that is
    given a generation raises LostOwnership, and changes nothing, if another one took the run over.
    """

    def __init__(self, path: Path, host: Host, connection: apsw.Connection) -> None:
        self.path, self._host, self._connection = path, host, connection
        self._sql: Callable[..., Any] = connection.execute
        self._pid = os.getpid()
        self._patience_s, self._waiting_since = BUSY_LIMIT_S, 0.0
        connection.set_busy_handler(self._wait_for_the_other_writer)
        self.uuid: str = ""

    # -- the connection ---------------------------------------------------------------

    def _wait_for_the_other_writer(self, tries: int) -> bool:
        """Sleep a little in Python, where signals are handled, and give up after the limit."""
        now = self._host.monotonic()
        if tries == 0:
            self._waiting_since = now
        if now - self._waiting_since >= self._patience_s:
            return False
        self._host.sleep(BUSY_STEP_S)
        return True

    def close(self) -> None:
        """Close the connection; a ledger that belongs to a parent process is left alone."""
        if self._pid == os.getpid():
            with contextlib.suppress(apsw.Error):  # what was committed is durable already
                self._connection.close(force=True)

    def make_durable(self) -> None:
        """Move everything from the WAL into the ledger's own pages and sync them.

        Raises:
            StateDirectoryError: the disk or a reader was in the way; what was read may not last.
        """
        if not self.empty_log(BUSY_LIMIT_S):
            raise StateDirectoryError(
                f"The log of the ledger {self.path} cannot be written back.",
                why="The last owner did not end cleanly, and another process has kept the"
                f" ledger open for reading for {BUSY_LIMIT_S:g} s.",
                unchanged="Nothing was started.",
                todo=f"See who reads it: fuser -v {self.path}; then start again.",
            )

    def empty_log(self, patience_s: float = 0) -> bool:
        """Empty the WAL to its end, if nobody is in the way for longer; tell whether it is empty.

        A checkpoint by someone else is busy without any wait.
        """
        until = self._host.monotonic() + patience_s
        self._patience_s = patience_s
        try:
            with self._letters():
                while True:
                    with contextlib.suppress(apsw.BusyError, apsw.LockedError):
                        self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                        return True
                    if self._host.monotonic() >= until:
                        return False
                    self._host.sleep(BUSY_STEP_S)
        finally:
            self._patience_s = BUSY_LIMIT_S

    @contextlib.contextmanager
    def _letters(self) -> Iterator[None]:
        """Turn what SQLite raises into letters."""
        if self._pid != os.getpid():
            raise JobError(
                "The ledger was opened by another process and is not used in its children.",
                todo="Start children with subprocess, not by fork.",
            )
        try:
            yield
        except apsw.Error as error:
            told = self._connection.system_errno
            raise ledger_letter(error, self.path, self._host, told) from error
        except UnicodeEncodeError as error:
            what = f"{error.object!r:.300} is not UTF-8, and cannot be kept or found in the ledger."
            raise ConfigurationError(what, unchanged="Nothing was changed.") from error

    @contextlib.contextmanager
    def _writing(self, run: Run | None = None, generation: int = 0) -> Iterator[None]:
        """Hold the write lock for one transaction; OutcomeUnknown if the COMMIT itself raised."""
        with self._letters():
            self._sql("BEGIN IMMEDIATE")
            try:
                sql = "SELECT 1 FROM run WHERE key = ? AND generation = ?"
                if run is not None and not self._sql(sql, (run.key, generation)).fetchone():
                    raise lost_ownership(run, generation)
                yield
            except BaseException:
                self._roll_back()
                raise
            try:
                self._sql("COMMIT")
            except apsw.Error as error:
                letter = ledger_letter(error, self.path, self._host, self._connection.system_errno)
                self._roll_back()
                raise OutcomeUnknown(
                    f"The ledger's COMMIT failed. {letter.what}",
                    why="Whether it is on the disk cannot be known from here.",
                    unchanged="The next start finds out from what is really there.",
                    todo=f"Check the disk of {self.path.parent}, then type this again.",
                ) from error

    def _roll_back(self) -> None:
        with contextlib.suppress(apsw.Error):  # SQLite may have rolled it back already
            self._sql("ROLLBACK")

    # -- reading ----------------------------------------------------------------------

    def _rows(self, sql: str, *bindings: object) -> list[Any]:
        with self._letters():
            return cast("list[Any]", self._sql(sql, bindings).fetchall())

    def _all(self, kind: type[T], where: str, *bindings: object) -> list[T]:
        """Return the rows of one class."""
        notes = kind.__annotations__
        rows = self._rows(f"SELECT {', '.join(notes)} FROM {READ_FROM[kind]} {where}", *bindings)
        reads = [READ_AS.get(note) for note in notes.values()]
        if not any(reads):
            return [kind(*row) for row in rows]
        return [
            kind(*(read(value) if read else value for read, value in zip(reads, row, strict=True)))
            for row in rows
        ]

    def _one(self, kind: type[T], where: str, *bindings: object) -> T | None:
        return next(iter(self._all(kind, where, *bindings)), None)

    def _value(self, kind: Callable[[Any], T], sql: str, *bindings: object) -> T | None:
        """Return the value that a query finds first; None if it finds none or NULL."""
        value = next((row[0] for row in self._rows(sql, *bindings)), None)
        return None if value is None else kind(value)

    def run(self, key: int) -> Run:
        """Return a run as it stands now."""
        return self._all(Run, "WHERE key = ?", key)[0]

    def unfinished(self, job: str) -> Run | None:
        """Return the one unfinished run of a job."""
        return self._one(Run, f"WHERE job = ? AND {UNFINISHED}", job)

    def all_unfinished(self) -> list[Run]:
        """Return every unfinished run, oldest first."""
        return self._all(Run, f"WHERE {UNFINISHED} ORDER BY key")

    def latest(self, job: str) -> Run | None:
        """Return a job's newest run: the unfinished one, if there is one."""
        return self._one(Run, "WHERE job = ? ORDER BY key DESC LIMIT 1", job)

    def latest_of_each_job(self) -> list[Run]:
        """Return the newest run of every job that ever ran; only those can be unfinished."""
        return self._all(Run, "WHERE key IN (SELECT max(key) FROM run GROUP BY job) ORDER BY key")

    def last_success(self, job: str) -> Run | None:
        """Return a job's newest whole run that succeeded and was not rolled back."""
        newest = f"SELECT key FROM {SUCCESSES} WHERE job = ? ORDER BY key DESC LIMIT 1"
        return self._one(Run, f"WHERE key = ({newest})", job)

    def run_with_id(self, name: str) -> Run | None:
        """Return the run of exactly this id."""
        return self._one(Run, "WHERE id = ?", name)

    def newest_runs(self, count: int = 100) -> list[Run]:
        """Return the newest runs of all jobs, newest first."""
        return self._all(Run, "ORDER BY key DESC LIMIT ?", count)

    def runs_like(self, prefix: str) -> list[Run]:
        """Return the runs whose id begins so, at most a few."""
        return self._all(Run, "WHERE id >= ?1 AND id < ?1 || char(1114111) LIMIT 5", prefix)

    def attempts(self, run: Run) -> list[Attempt]:
        """Return a run's attempts, oldest first."""
        return self._all(Attempt, "WHERE run = ? ORDER BY generation", run.key)

    def last_attempt(self, run: Run) -> Attempt | None:
        """Return a run's newest attempt."""
        return self._one(Attempt, "WHERE run = ? ORDER BY generation DESC LIMIT 1", run.key)

    def why_halved(self, run: Run) -> str:
        """Return the error of the newest attempt after which a batch went on in halves."""
        sql = "WHERE run = ? AND retry = ? ORDER BY generation DESC LIMIT 1"
        halved = self._one(Attempt, sql, run.key, IN_HALVES)
        return (halved and halved.error) or ""

    def commit_row(self, run: Run, number: int) -> BatchRow | None:
        """Return the row of one commit of a run."""
        return self._one(BatchRow, "WHERE run = ? AND number = ?", run.key, number)

    def rejects(self, run: Run) -> list[RejectRow]:
        """Return the rejects of a run and of its retries, by id; of a retry: of its whole kin."""
        return self._all(RejectRow, "ORDER BY id", run.retry_of or run.id)

    def rejects_taken_up(
        self, run: Run, loop: str, after: tuple[int, int, int] | None, limit: int
    ) -> list[RejectRow]:
        """Return the rejects of one loop that a retry has taken up, behind a spot, in order."""
        where = (
            "WHERE retry = ?2 AND loop = ?3 AND state = 'open'"
            " AND (key, number, place) > (?4, ?5, ?6) ORDER BY id LIMIT ?7"
        )
        behind = after or (0, 0, -1)
        return self._all(RejectRow, where, run.retry_of, run.id, loop, *behind, limit)

    def runs_with_open_rejects(self) -> list[tuple[Run, int]]:
        """Return the runs of which rejects wait for a person, and how many, a retry's own too."""
        sql = (
            "SELECT (SELECT key FROM run WHERE id = coalesce(r.retry_of, r.id)), count(*)"
            " FROM reject j JOIN run r ON r.key = j.run"
            " WHERE j.confirmed AND j.state = 'open' GROUP BY 1 ORDER BY 1"
        )
        return [(self.run(key), count) for key, count in self._rows(sql)]

    def rollbacks(self, run: Run) -> list[Run]:
        """Return the runs that undo a run's batches, oldest first."""
        return self._all(Run, "WHERE rollback_of = ? ORDER BY key", run.id)

    def rollback(self, of: Run, to: int, why: str = "", by: Run | None = None) -> Rollback:
        """Return what a rollback of a run to a commit undoes; `by`: it, if it has begun."""
        before = [each for each in self.rollbacks(of) if by is None or each.key < by.key]
        done = [each.rollback_to for each in before if each.state == RunState.SUCCEEDED]
        return Rollback(of, to, min(cast("list[int]", done), default=of.number), why)

    def rollback_by(self, run: Run) -> Rollback:
        """Return what a run undoes that is a rollback."""
        of = cast("Run", self.run_with_id(run.rollback_of or ""))
        return self.rollback(of, run.rollback_to or 0, by=run)

    def batches_of(self, rollback: Rollback) -> list[BatchRow]:
        """Return the batches that a rollback undoes, newest first, with or without an image."""
        sql = "WHERE run = ? AND number > ? AND number <= ? AND kind = 'batch' ORDER BY number DESC"
        return self._all(BatchRow, sql, rollback.of.key, rollback.to, rollback.top)

    def operations_of(self, rollback: Rollback) -> list[Operation]:
        """Return the operations of those batches and of one never committed, oldest first."""
        number = "number > ? AND (number <= ? OR number > ?)"
        where = f"WHERE run = ? AND {number} AND outcome IS NOT '{FREED}'"
        bounds = (rollback.of.key, rollback.to, rollback.top, rollback.of.number)
        return self._all(Operation, f"{where} ORDER BY id", *bounds)

    def images_needed(self) -> list[tuple[Run, list[tuple[int, str]]]]:
        """Return the runs whose images a rollback may still read: numbers and names, in order."""
        found: dict[int, list[tuple[int, str]]] = {}
        for key, number, name in self._rows(f"{REMEMBERED} ORDER BY r.key, b.number"):
            found.setdefault(key, []).append((number, name))
        return [(self.run(key), images) for key, images in found.items()]

    def require_can_roll_back(self, rollback: Rollback) -> None:
        """Refuse a rollback that must not begin; says why, and what to do first."""
        run, to, top, _ = rollback
        going_on, unknown = self.unfinished(run.job), len(self.open_operations(run))
        others = f"{REMEMBERED} AND r.job = ? AND r.key != ? ORDER BY r.key DESC LIMIT 1"
        newest = self._value(int, others, run.job, run.key)
        remembers = run.checkpoint and any(row.images for row in self.batches_of(rollback))
        applies: dict[str, object] = {
            "is one": run.rollback_of,
            "unfinished": not run.finished,
            "another goes on": going_on,
            "unknown": unknown,
            "later": newest and newest > run.key,
            "no such batch": to < 0 or to > run.number,
            "done": to >= top and top < run.number,
            "nothing": not remembers,
        }
        clause = next((clause for clause, so in applies.items() if so), "")
        if clause:
            other = going_on or (self.run(newest) if newest else run)
            left = [row.key for row in self.operations_of(rollback)]
            facts = {"run": run, "to": to, "top": top, "unknown": unknown, "other": other}
            has_rows = f"The newest run that has remembered rows: batchrun rollback {other.id}"
            facts["next"] = has_rows if other.id != run.id else f"See: batchrun report {run.id}"
            facts["left"] = f"\n{not_undone(len(left), '', left)}" if left else ""
            what, why, todo = filled(REFUSED_ROLLBACKS[clause], facts)
            kind = ConfigurationError if clause == "no such batch" else PersonNeeded
            raise kind(what, why=why, unchanged="Nothing was undone.", todo=todo)

    def releases_until(self, run: Run) -> float | None:
        """Return by when a run's worker has released what it holds; None if it is not at that."""
        sql = "SELECT cleans_until FROM attempt WHERE run = ? AND generation = ?"
        return self._value(float, sql, run.key, run.generation)

    def called_cleanup(self, run: Run) -> Cleanup | None:
        """Return the cleanup that a run's worker, which releases what it holds, is calling."""
        if self.releases_until(run) is None:
            return None
        mine = f"WHERE done_at IS NULL AND job = ? AND error = '{CUT_OFF}' ORDER BY id LIMIT 1"
        return self._one(Cleanup, mine, run.job)

    def ticked_at(self) -> str | None:
        """Return when the tick ran last."""
        return self._value(str, "SELECT ticked_at FROM ledger")

    def first_met(self, job: str) -> str | None:
        """Return when a job was first heard of."""
        return self._value(str, "SELECT at FROM event WHERE job = ? ORDER BY id LIMIT 1", job)

    def alerts(self, where: str = "closed_at IS NULL") -> list[Alert]:
        """Return the alerts that stand, oldest first."""
        return self._all(Alert, f"WHERE {where} ORDER BY id")

    def undelivered(self) -> list[tuple[int, str, str]]:
        """Return which alerts the last try did not tell, by which way, and its error."""
        sql = (
            "SELECT alert, way, error FROM delivery d JOIN alert a ON a.id = alert WHERE d.id IN"
            " (SELECT max(id) FROM delivery GROUP BY alert, way) AND error IS NOT NULL"
            " AND (closed_at IS NULL OR pending <> '[]') ORDER BY d.id"
        )
        return self._rows(sql)

    def success_since(self, alert: Alert) -> Run | None:
        """Return the newest success of an alert's job, if it came after the alert."""
        run = self.last_success(alert.job or "")
        return run if self._succeeded_at(run) > alert.event else None

    def _succeeded_at(self, run: Run | None) -> int:
        """Return the event by which a run succeeded; what is done to it later has others."""
        sql = "SELECT max(id) FROM event WHERE run = ? AND what LIKE 'succeeded%'"
        return self._value(int, sql, run and run.key) or 0

    def left_open(self, job: str) -> tuple[int, int]:
        """Return how many operations of a job have no outcome, and how many rejects wait."""
        sql = (
            "SELECT (SELECT count(*) FROM operation INDEXED BY open_operation"
            " WHERE outcome IS NULL AND job = ?1),"
            " (SELECT count(*) FROM reject j JOIN run r ON r.key = j.run"
            " WHERE j.confirmed AND j.state = 'open' AND r.job = ?1)"
        )
        return cast("tuple[int, int]", self._rows(sql, job)[0])

    def cleanups(self, run: Run) -> list[Cleanup]:
        """Return the cleanups that a run recorded, in order."""
        return self._all(Cleanup, "WHERE key = ? ORDER BY id", run.key)

    def pending_cleanups(self, job: str, kept_for: Run | None = None) -> list[Cleanup]:
        """Return the cleanups that are still to be run for a job, in order, of all its runs.

        Without those that are to wait until a run, which goes on, is finished.
        """
        mine = "WHERE done_at IS NULL AND job = ?1 AND NOT (of_run AND key IS ?2) ORDER BY id"
        return self._all(Cleanup, mine, job, kept_for and kept_for.key)

    def stuck_cleanups(self) -> list[Cleanup]:
        """Return the pending cleanups that failed, or whose run does not go on; nobody is at it."""
        return self._all(
            Cleanup,
            "WHERE done_at IS NULL AND state NOT IN ('reserved', 'running')"
            " AND (state IN ('succeeded', 'cancelled') OR error IS NOT NULL) ORDER BY id",
        )

    def readings(self, run: Run, newest: int = 100) -> list[Reading]:
        """Return the newest readings of a run, oldest first."""
        return self._all(Reading, "WHERE run = ? ORDER BY id DESC LIMIT ?", run.key, newest)[::-1]

    def health_checks(self, run: Run, newest: int = 100) -> list[HealthCheck]:
        """Return the newest health checks of a run, oldest first."""
        where = "WHERE run = ? ORDER BY id DESC LIMIT ?"
        return self._all(HealthCheck, where, run.key, newest)[::-1]

    def safe_points(
        self, run: Run, generation: int, newest: int = 200
    ) -> dict[str, list[tuple[int, int]]]:
        """Return, by gauge, an attempt's newest safe points at which it was read, oldest first.

        Each is the number of the commit and what was used.
        """
        sql = (
            "SELECT number, {0} FROM batch WHERE run = ? AND generation = ?"
            " AND {0} IS NOT NULL ORDER BY number DESC LIMIT ?"
        )
        found = {each: self._rows(sql.format(each), run.key, generation, newest) for each in GAUGES}
        return {gauge: [(row[0], row[1]) for row in rows[::-1]] for gauge, rows in found.items()}

    def batch_times(self, run: Run, newest: int = 200) -> list[float]:
        """Return for how long each of a run's newest batches was at work, shortest first, in s."""
        sql = (
            "SELECT elapsed_s FROM batch WHERE run = ? AND kind = 'batch'"
            " ORDER BY number DESC LIMIT ?"
        )
        return sorted(row[0] for row in self._rows(sql, run.key, newest))

    def _named(self, sql: str, *bindings: object) -> list[dict[str, Any]]:
        """Return rows by the names of their columns, as JSON has them."""
        with self._letters():
            cursor = self._sql(sql, bindings)
            return [
                dict(zip((d[0] for d in cursor.description), row, strict=True)) for row in cursor
            ]

    def course(self, run: Run) -> dict[str, Any]:
        """Return how a run went over time, added up in here, as fields of its report."""
        columns = "until_at, duration_s, at_work_s, records_per_s"
        [total] = self._named(f"SELECT {columns} FROM run_summary WHERE run = ?", run.id)
        batch_s = (total["at_work_s"] or 0.0) / max(1, run.batches)
        span_s = max(total["duration_s"] / SPANS_MOST, SPAN_BATCHES * batch_s, 1 / SPANS_MOST)
        spans = self._named(SPANS, run.key, run.id, run.created_at, span_s, SPANS_MOST)
        counts = "SELECT outcome, operations FROM operation_summary WHERE run = ?"
        return {
            **total,
            "batch_p95_s": self._value(float, SLOW, run.key),
            "span_s": span_s,
            "spans": spans,
            "operations": self._named(counts, run.id),
            "open_operations": self._named(OPEN, run.key),
        }

    def summaries(self, since: str, job: str | None, newest: int) -> list[dict[str, Any]]:
        """Return the newest runs begun since a moment, of a job or of all, newest first."""
        where = "WHERE began_at >= ? AND job = coalesce(?, job) ORDER BY began_at DESC, run LIMIT ?"
        return self._named(f"SELECT * FROM run_summary {where}", since, job, newest)

    def slow_batch_s(self, run: Run | None) -> float:
        """Return how long one of 20 of a run's newest batches takes or more; 0 if there is none."""
        times = self.batch_times(run) if run else []
        return times[len(times) * 95 // 100] if times else 0.0

    def approvals(self, run: Run) -> list[Approval]:
        """Return what a run has asked, oldest first."""
        return self._all(Approval, "WHERE run = ? ORDER BY asked_at, name", run.key)

    def open_question(self, run: Run) -> Approval | None:
        """Return what a run has asked and nobody has answered; it asks one at a time."""
        return self._one(Approval, "WHERE run = ? AND answered_at IS NULL LIMIT 1", run.key)

    def operations_with(self, job: str, keys: Iterable[str]) -> dict[str, Operation]:
        """Return the operations of a job that have one of these keys, by key."""
        where = "WHERE job = ? AND key IN (SELECT value FROM json_each(?))"
        return {row.key: row for row in self._all(Operation, where, job, _compact(list(keys)))}

    def open_operations(self, run: Run) -> list[Operation]:
        """Return the claims of a run without an outcome, oldest first."""
        return self._all(Operation, "WHERE run = ? AND outcome IS NULL ORDER BY id", run.key)

    def runs_with_open_operations(self) -> list[tuple[Run, int]]:
        """Return the runs that have claims without an outcome, and how many."""
        sql = "SELECT run, count(*) FROM operation WHERE outcome IS NULL GROUP BY run ORDER BY run"
        return [(self.run(key), count) for key, count in self._rows(sql)]

    def newest_operation(self) -> int:
        """Return the highest operation id that was ever given; no row is ever deleted."""
        return self._value(int, "SELECT max(id) FROM operation") or 0

    def newest_event(self) -> int:
        """Return the highest event id that was ever given."""
        return self._value(int, "SELECT seq FROM sqlite_sequence WHERE name = 'event'") or 0

    def events(self, run: Run | None = None, *, what: str = "%", after: int = 0) -> list[Event]:
        """Return events in the order of their ids: of a run, or all.

        `what` is a pattern for SQL's LIKE; only ids above `after` are returned.
        """
        where = "WHERE id > ? AND what LIKE ?"
        if run is None:
            return self._all(Event, f"{where} ORDER BY id", after, what)
        return self._all(Event, f"{where} AND key = ? ORDER BY id", after, what, run.key)

    def refused_since_success(self, job: str) -> int:
        """Return how many starts of a job were refused since it last succeeded."""
        sql = "SELECT count(*) FROM event WHERE job = ? AND what LIKE 'refused%' AND id > ?"
        return self._value(int, sql, job, self._succeeded_at(self.last_success(job))) or 0

    def barrier(self) -> Barrier | None:
        """Return the barrier that is up, as far as the ledger has met it."""
        return self._one(Barrier, "WHERE closed IS NULL")

    def turned_away(self, barrier: Barrier) -> list[tuple[str, str, int]]:
        """Return what a barrier did to starts: `refused` or `deferred`, the job, how often."""
        sql = (
            f"SELECT iif(what = '{REFUSED}', 'refused', what) AS done, job, count(*) FROM event"
            f" WHERE what IN ('{REFUSED}', '{DEFERRED}') AND id > ?1 AND (?2 IS NULL OR id < ?2)"
            " GROUP BY done, job ORDER BY done, job"
        )
        return self._rows(sql, barrier.opened, barrier.closed)

    def admitted_behind(self, barrier: Barrier) -> list[tuple[str, str, int, int]]:
        """Return the attempts admitted while a barrier was up: job, run, generation, event.

        Of the jobs that it closes there is none: that is what a barrier is.
        """
        sql = (
            "SELECT job, id, a.generation, admitted FROM attempt a JOIN run r ON r.key = a.run"
            " WHERE admitted > ?1 AND (?2 IS NULL OR admitted < ?2) ORDER BY admitted"
        )
        return self._rows(sql, barrier.opened, barrier.closed)

    def found_by(self, barrier: Barrier, until: int) -> list[tuple[Run, bool]]:
        """Return what a barrier found, and what came until an event; and if it is accounted for.

        Accounted for are the runs that were unfinished then, and the starts stored since. Any other
        was admitted behind the barrier.
        """
        rows = self._rows(FOUND, barrier.opened, until)
        return [(self.run(key), bool(counts)) for key, counts in rows]

    def pace(self, run: Run, newest: int = 20) -> tuple[float, float, str] | None:
        """Return what a run's newest batches took on average, in seconds and records, and when."""
        sql = (
            "SELECT avg(elapsed_s), avg(read), max(at) FROM (SELECT * FROM batch WHERE run = ?"
            " AND kind = 'batch' ORDER BY number DESC LIMIT ?) HAVING count(*)"
        )
        return next(iter(self._rows(sql, run.key, newest)), None)

    def rate(self, run: Run, newest: int = 20) -> float:
        """Return the records a second of an attempt's newest batches, from commit to commit."""
        sql = (
            "SELECT read, at FROM batch WHERE run = ? AND generation = ? AND kind = 'batch'"
            " ORDER BY number DESC LIMIT ?"
        )
        rows = self._rows(sql, run.key, run.generation, newest + 1)
        took_s = seconds_between(rows[-1][1], rows[0][1]) if rows else 0.0
        return sum(read for read, _ in rows[:-1]) / took_s if took_s > 0 else 0.0

    def operation_outcomes(self, run: Run) -> dict[str, int]:
        """Return how many operations of a run had which outcome; `open`: none is known yet."""
        sql = "SELECT coalesce(outcome, 'open'), count(*) FROM operation WHERE run = ? GROUP BY 1"
        return dict(self._rows(sql, run.key))

    def reject_states(self, run: Run) -> dict[str, int]:
        """Return how many rejects of a run are open, dropped, retried."""
        sql = "SELECT state, count(*) FROM reject WHERE run = ? AND confirmed GROUP BY 1"
        return dict(self._rows(sql, run.key))

    def barrier_of(self, drain: Drain) -> Barrier:
        """Return the barrier that a drain belongs to."""
        return self._all(Barrier, "WHERE id = ?", drain.barrier)[0]

    def drain(self, number: int | None = None) -> Drain | None:
        """Return a drain by its id, or the newest."""
        return self._one(Drain, "WHERE ?1 IN (id, 0) ORDER BY id DESC LIMIT 1", number or 0)

    def drain_of(self, barrier: Barrier | None) -> Drain | None:
        """Return the drain of a barrier, if one was begun."""
        return barrier and self._one(Drain, "WHERE barrier = ?", barrier.id)

    # -- verbs: the tick and alerts --------------------------------------------------------

    def tick(self, expected: Iterable[str]) -> None:
        """Record that the tick runs, and which expected jobs nothing is known of yet."""
        with self._writing():
            self._sql("UPDATE ledger SET ticked_at = ?", (self._host.now(),))
            for job in expected:
                if self.first_met(job) is None:
                    self._event(job, "tick", "expected")

    def raise_alerts(
        self, look: Callable[[], tuple[list[Alert], list[Alert]]], ways: Iterable[str]
    ) -> None:
        """Raise what `look` finds new and close what it finds over; a job's newest ping counts."""
        with self._writing():
            raised, over = look()
            now = self._host.now()
            for alert in over:
                self._set("alert", {"id": alert.id}, closed_at=now)
            for each in raised:
                if each.kind in PINGS:
                    older = "UPDATE alert SET pending = '[]' WHERE job = ? AND kind LIKE 'ping %'"
                    self._sql(older, (each.job,))
                new = each._replace(
                    at=now,
                    event=self._event(each.job, "alerts", f"alert: {each.kind}", each.why),
                    pending=["ping"] if each.kind in PINGS else list(ways),
                    closed_at=now if each.kind in ("recovered", *PINGS) else None,
                )
                self._insert("alert", **new._asdict())
        reach("alert.raised")

    def begin_deliveries(self, can: Callable[[str, Alert], object]) -> list[Delivery]:
        """Take up the tries that are due, a few at once; what can be told no more is let go."""
        if not self.alerts("pending <> '[]'"):
            return []
        with self._writing():
            due, new = list[Delivery](), {"at": self._host.now(), "error": CUT_OFF}
            for alert, way in ((a, w) for a in self.alerts("pending <> '[]'") for w in a.pending):
                [(tries, last)] = self._rows(TRIED, alert.id, way)
                if not can(way, alert):
                    self._end_way(alert, way)
                elif self._is_due(tries, last) and len(due) < DELIVERIES_AT_ONCE:
                    key = self._insert("delivery", alert=alert.id, way=way, **new)
                    due.append(Delivery(key, alert, way, tries + 1))
            return due

    def _is_due(self, tries: int, last: str) -> bool:
        """Tell whether a wait is over; also if somebody has set the clock back meanwhile."""
        wait_s = DELIVERY_WAITS_S[min(tries, len(DELIVERY_WAITS_S)) - 1]
        return not last or not 0 <= seconds_between(last, self._host.now()) < wait_s

    def _end_way(self, alert: Alert, way: str) -> None:
        sql = (
            "UPDATE alert SET pending = (SELECT json_group_array(value) FROM json_each(pending)"
            " WHERE value <> ?) WHERE id = ?"
        )
        self._sql(sql, (way, alert.id))

    def end_delivery(self, tried: Delivery, error: str | None, elapsed_s: float) -> None:
        """Record what came of a try; after the last one it is given up."""
        with self._writing():
            self._set("delivery", {"id": tried.id}, error=error, elapsed_s=elapsed_s)
            if error is None or tried.tries >= DELIVERY_TRIES:
                self._end_way(tried.alert, tried.way)
            if error is not None and tried.tries >= DELIVERY_TRIES:
                what = f"alert {tried.alert.id} was not told by {tried.way}"
                self._event(tried.alert.job, "alerts", what, error)

    # -- verbs: maintenance ----------------------------------------------------------------

    def begin_drain(self, who: str, deadline_s: float, find: Find) -> Drain | None:
        """Begin the drain of the barrier that is up, or go on with it; None if none is up.

        One that has ended well stays so until it is found otherwise.
        """
        with self._writing():
            self._know_barrier(find(), who)
            barrier = self.barrier()
            if barrier is None:
                return None
            wish: dict[str, Any] = {"who": who, "deadline_s": deadline_s}
            drain = self.drain_of(barrier)
            if drain is None:
                self._insert("drain", barrier=barrier.id, at=self._host.now(), **wish)
                self._event(None, who, "drain", barrier.reason)
            elif drain.exit_code != ExitCode.DONE:
                wish |= {"ended_at": None, "exit_code": None, "report": None}
                self._set("drain", {"id": drain.id}, **wish)
                self._event(None, who, "drain goes on", barrier.reason)
        reach("drain.begun")
        return self.drain_of(barrier)

    def ask_to_drain(self, run: Run, who: str) -> None:
        """Ask a run to stop for a drain, if somebody owns it and nothing else is asked of it."""
        with self._writing():
            run = self.run(run.key)
            if run.state in OWNED and run.request is None:
                self._wish(run, Request.DRAIN, who)

    def settle_left(self, run: Run, who: str) -> None:
        """Bring a run that its owner left to the state it earned; the caller holds its lock."""
        with self._writing():
            run = self.run(run.key)
            if run.state in OWNED:
                self._supersede(self._settle(run, DIED, who))

    def end_drain(
        self, drain: Drain, who: str, code: ExitCode, find: Find, report: Mapping[str, object]
    ) -> Drain:
        """Record how a drain ended: failed, whatever it found, if its barrier fell before."""
        with self._writing():
            self._know_barrier(find(), who)
            barrier = self.barrier()
            if barrier is None or barrier.id != drain.barrier:
                code = ExitCode.FAILED
            ended = {"ended_at": self._host.now(), "exit_code": code, "report": report}
            self._set("drain", {"id": drain.id}, **ended)
            self._event(None, who, "drain ended", f"exit {int(code)}")
            reach("drain.ended")
        return self._all(Drain, "WHERE id = ?", drain.id)[0]

    def raise_barrier(
        self, who: str, find: Find, make: Callable[[], Lockfile]
    ) -> tuple[Lockfile, bool]:
        """Make the lockfile and its row, if none is there; return it, and whether it was made."""
        with self._writing():
            found = find()
            self._know_barrier(found, who)
            lockfile = found or make()
            if found is None:
                self._know_barrier(lockfile, who)
                reach("barrier.row")
        reach("barrier.raised")
        return lockfile, found is None

    def lower_barrier(
        self, who: str, why: str, find: Find, remove: Callable[[], None]
    ) -> Barrier | None:
        """Remove the lockfile and close its row, which is returned; None if none was there."""
        with self._writing():
            self._know_barrier(find(), who)
            barrier = self.barrier()
            if barrier is not None:
                remove()
                self._close_barrier(barrier, who, why)
                reach("barrier.closed")
        reach("barrier.lowered")
        return self._one(Barrier, "WHERE id = ?", barrier.id) if barrier else None

    def refuse(self, job: str, who: str, why: str, find: Find, *, counts: bool = True) -> None:
        """Record the barrier that refused a start, if it was not known, and the start if it counts.

        The tick's does not: it comes again every few minutes, and nothing is missed without it.
        """
        with self._writing():
            self._know_barrier(find(), who)
            if counts:
                self._event(job, who, REFUSED, why)

    def _know_barrier(self, found: Lockfile | None, who: str) -> None:
        """Let the rows say what was found; the lockfile decides, whoever made or removed it."""
        barrier = self.barrier()
        if barrier and not barrier.is_of(found):
            self._close_barrier(barrier, who, REMOVED if found is None else CHANGED)
            barrier = None
        if found is None:
            return
        told: dict[str, Any] = {"who": found.by, "reason": found.reason, "until": found.until}
        if barrier is None:
            told |= {"device": found.device, "inode": found.inode, "scopes": found.scopes}
            opened = self._event(None, who, "maintenance on", found.reason)
            self._insert("barrier", at=found.since or self._host.now(), opened=opened, **told)
        elif any(getattr(barrier, name) != value for name, value in told.items()):
            self._set("barrier", {"closed": None}, **told)
        if found.overdue and (barrier is None or barrier.overdue is None):
            event = self._event(None, who, "maintenance overdue", found.overdue)
            self._set("barrier", {"closed": None}, overdue=event)

    def _close_barrier(self, barrier: Barrier, who: str, why: str) -> None:
        closed = self._event(None, who, "maintenance off", why)
        ended = {"closed_at": self._host.now(), "closed_why": why}
        self._set("barrier", {"id": barrier.id, "closed": None}, closed=closed, **ended)

    # -- verbs: admission and the ends of attempts ---------------------------------------

    def note(
        self, who: str, what: str, why: str = "", *, job: str | None = None, run: Run | None = None
    ) -> int:
        """Record something that changes no run, such as a refused start; return the event's id."""
        with self._writing():
            return self._event(run or job, who, what, why)

    def admit(self, job: str, start: Start, agree: Callable[[Run], Agreement]) -> Admission:
        """Take the job's unfinished run, or begin a new one, under a new generation.

        The caller holds the job's lock. Everything is judged inside the transaction: a start that
        loses a race sees the winner. `agree` judges ledger and checkpoint of a run, writes nothing,
        and raises to refuse, as `start` does: for maintenance, or because a person is needed.
        """
        with self._writing():
            said: list[str] = []
            run, kept = self._judged(job, start, said)
            if start.only_resume and (run is None or (start.leaves(run) and not kept)):
                return Admission(run or self._finished_meanwhile(job), 0, said)
            deferred = (run and run.deferred) or {}
            if run is None:
                run = self._insert_run(job, start, RunState.RESERVED)
            else:
                self._take_over(run, start, agree(run), said, kept=kept)
            generation = self._insert_attempt(run, start.owner, admitted=self.newest_event())
            reach("admit.commit")
        reach("admit.committed")
        return Admission(self.run(run.key), generation, said, deferred)

    def defer(self, job: str, start: Start, note: Mapping[str, Any], why: str) -> Run:
        """Store a start that maintenance turned away, to be begun once, by the tick or any start.

        It is judged as by `admit`, but `start.require_admission` is only to find the lockfile here;
        a second one is the same one. `note` is what else is to be known when it is begun.
        """
        with self._writing():
            run, _ = self._judged(job, start, [])
            if run is None:
                if start.only_resume:
                    return self._finished_meanwhile(job)
                run = self._insert_run(job, start, RunState.WAITING)
            self._keep_overrides(run, start)
            first = {"at": self._host.now(), "who": start.who} | (run.deferred or {})
            # a start outdates a pause here too
            request = None if run.request == Request.PAUSE else run.request
            self._set_run(run, deferred={**first, **note}, request=request)
            self._event(run, start.who, DEFERRED, why)
            reach("defer.commit")
        reach("defer.committed")
        return self.run(run.key)

    def _judged(self, job: str, start: Start, said: list[str]) -> tuple[Run | None, bool]:
        """Return the unfinished run that a start finds, settled, and whether its owner keeps it."""
        require_known_version(self._connection, self.path)
        self._know_barrier(start.require_admission(), start.who)
        reach("admit.judged")
        run = self.unfinished(job)
        if run is None:
            return None, False
        kept = self._is_kept(run, start.owner)
        run = self._settled(run, start, said, kept=kept)
        if run.finished:
            return None, False
        if start.retry and not kept:
            raise unfinished_before_retry(self, run)
        if start.rollback and not kept:
            self.require_can_roll_back(start.rollback)  # it cannot: this run is unfinished
        return run, kept

    def _finished_meanwhile(self, job: str) -> Run:
        run = self.latest(job)
        if run is None:
            raise NotFound(f"The job {job} has never run.", todo=f"Type: batchrun run {job}")
        return run

    def _insert_run(self, job: str, start: Start, state: RunState) -> Run:
        """Insert a new run in state `reserved` or `waiting`."""
        retry, undoes = start.retry, start.rollback
        if undoes:
            self.require_can_roll_back(undoes)
        columns: dict[str, object] = {
            "overrides": start.overrides,
            "fresh_in_a_row": start.fresh_in_a_row,
            "retry_of": retry and (retry.of.retry_of or retry.of.id),
            "rollback_of": undoes and undoes.of.id,
            "rollback_to": undoes and undoes.to,
        }
        run = self._make_run(start.run_id, job, state, self._host.now(), **columns)
        said = "started" if state == RunState.RESERVED else str(state)
        self._event(run, start.who, said, TRANSITIONS[NEW, state])
        if retry:
            self._take_up(retry, run.key)
        if undoes:
            why = f"to batch {undoes.to}, by run {run.id}{undoes.why and f': {undoes.why}'}"
            self._event(undoes.of, start.who, "rollback begun", why)
        return run

    def _make_run(self, name: str, job: str, state: RunState, at: str, **columns: object) -> Run:
        """Insert the row of a run that was begun at a moment, and return it."""
        begun = {"id": name, "job": job, "state": state, "created_at": at}
        return self.run(self._insert("run", **begun, changed_at=self._host.now(), **columns))

    def _take_up(self, retry: Retry, key: int) -> None:
        """Let a new run have the rejects that it is to run again, and no other."""
        sql = (
            "UPDATE reject SET retry = ? WHERE (run, number, place) = (?, ?, ?)"
            " AND confirmed AND state = 'open' AND value IS NOT NULL RETURNING 1"
        )
        taken = self._connection.executemany(sql, [(key, *spot) for spot in retry.spots])
        if not taken.fetchall():
            raise NotFound(
                f"Run {retry.of.id} of {retry.of.job} has no open reject that can be run again.",
                why="Each one is retried or dropped already, or only its text is kept.",
                unchanged="Nothing was started.",
                todo=f"See: batchrun rejects list {retry.of.id}",
            )

    def _is_kept(self, run: Run, owner: ProcessIdentity) -> bool:
        """Tell whether this very supervisor keeps a run between two of its attempts."""
        last = self.last_attempt(run) if run.state == RunState.RESERVED else None
        followed = last is not None and (last.may_be_followed or run.reason == Reason.HEALTH)
        return last is not None and followed and last.supervisor == owner

    def _settled(self, run: Run, start: Start, said: list[str], *, kept: bool) -> Run:
        """Bring a run whose owner is gone to the state that its last attempt earned."""
        if run.state in OWNED and not kept:
            run = self._settle(run, DIED, start.who)
            said.append(f"run {run.id} was left by its owner: {run.state}")
        if run.finished:
            return run
        why = "cancelling was asked for before it ended"
        if run.request != Request.CANCEL:
            start.require_may_go_on(run)
            why = start.fresh_reason if start.fresh else ""
        if why:
            run = self._cancel(run, start.who, why)
            said.append(f"run {run.id} cancelled: {why}")
        return run

    def _take_over(
        self, run: Run, start: Start, agreement: Agreement, said: list[str], *, kept: bool
    ) -> None:
        """Bring an unfinished run to `reserved`, with ledger and checkpoint made to agree."""
        if agreement.forward is not None:
            forward = agreement.forward
            size = None if run.size is None else max(1, run.size)  # the batch was done
            commit = Commit(forward, *checkpoint_bytes(forward), size=size)
            self._apply_commit(run, commit, run.generation)
            self._confirm_rejects(run, forward)
        if not kept:
            self._move(run, RunState.RESERVED, who=start.who, why=agreement.said)
        elif agreement.said:
            self._event(run, start.who, RunState.RESERVED, agreement.said)
        decided = run.state in (RunState.FAILED, RunState.AWAITING)
        if decided or is_paused_by_person(run):  # and now decided anew: all tries are free again
            self._sql(TRY_ANEW, {"key": run.key})
        self._keep_overrides(run, start)
        if agreement.content is not None:
            start.write_checkpoint(run.id, agreement.content)
        if agreement.said:
            said.append(agreement.said)

    def _keep_overrides(self, run: Run, start: Start) -> None:
        """Keep the settings given with this start, as long as nothing was committed with others."""
        if not start.overrides or start.overrides == run.overrides:
            return
        if run.number and not start.accept_settings:
            raise PersonNeeded(
                f"Run {run.id} of {run.job} is unfinished and was started with other settings.",
                why=f"It was started with {run.overrides or 'none of its own'}.",
                unchanged="Nothing was changed.",
                todo="Leave out --set, or add --accept-settings, or start anew with --fresh.",
            )
        self._set_run(run, overrides=start.overrides)

    def _insert_attempt(self, run: Run, owner: ProcessIdentity, **columns: object) -> int:
        """Raise the generation and insert its attempt."""
        generation, number = self._supersede(run), self.run(run.key).number
        columns |= {"run": run.key, "generation": generation, "supervisor": owner._asdict()}
        self._insert("attempt", began_at=self._host.now(), from_number=number, **columns)
        return generation

    def open_attempt(self, run: Run, generation: int, worker: ProcessIdentity, basis: Basis) -> Run:
        """Record who works, and, before the first commit, what the run is based on."""
        with self._owning(run, generation):
            self._set_attempt(run, generation, worker=worker._asdict())
            self._set_run(run, settings=basis.settings, job_version=basis.job_version)
            self._set("run", {"key": run.key, "number": 0}, hash=basis.first_hash)
        return self.run(run.key)

    def begin_batches(
        self, run: Run, generation: int, expected: int | None, tried: str | None = None
    ) -> None:
        """Move a run from `reserved` to `running`: its worker hands out the first batch now."""
        with self._owning(run, generation):
            self._set_run(run, expected=expected)
            self._sql(ARM, {"key": run.key, "tried": tried})
            self._move(run, RunState.RUNNING, who="worker")

    def arm(self, run: Run, generation: int, tried: str) -> None:
        """Record the try that begins now, where neither `begin_batches` nor a commit foresaw it."""
        with self._owning(run, generation):
            self._sql(ARM, {"key": run.key, "tried": tried})

    def commit(self, run: Run, commit: Commit, publish: Callable[[], None]) -> str | None:
        """Record one commit and put its checkpoint in place, under one write lock.

        The checkpoint's generation fences the write; its bytes are durable under a temporary name,
        which `publish` renames into place inside the transaction. Returns what is requested of the
        run; OutcomeUnknown if rename, fsync or COMMIT failed.
        """
        number = commit.checkpoint.number
        with self._writing():
            reach("ledger.begun", number)
            request = self._apply_commit(run, commit, commit.checkpoint.generation)
            self._confirm_rejects(run, commit.checkpoint)
            publish()
            reach("ledger.commit", number)
        reach("ledger.committed", number)
        return request

    def _apply_commit(self, run: Run, commit: Commit, generation: int) -> str | None:
        """Write a commit's two rows: the fenced one of the run, and its own."""
        checkpoint, content, digest, spent, following, gauges, size = commit
        totals, link = checkpoint.totals, checkpoint.link
        fence = (run.key, generation, checkpoint.number)
        added = (*OF_TOTALS(totals), _compact(totals["counts"]), *spent)
        fenced = self._sql(MOVE_ON, (*fence, digest, content, *added, following, size)).fetchone()
        if fenced is None:
            raise lost_ownership(run, generation)
        counts = (run.key, digest, _compact(link["counts"]))
        held = (link.get("remembered", 0), link.get("images"), *map(gauges.get, GAUGES))
        self._sql(ADD_COMMIT, (*counts, *OF_COMMIT(checkpoint), *OF_LINK(link), *held))
        if checkpoint.kind == "loop":
            self._sql(READ_WHOLE, (run.key,))
        return cast("str | None", fenced[0])

    def stage_rejects(
        self,
        run: Run,
        generation: int,
        number: int,
        loop: str,
        rejects: Sequence[Mapping[str, object]],
    ) -> None:
        """Store rejected records of a batch that is not committed yet; they do not count so far.

        Each reject is `record`, `reason`, and what else of its columns is known.
        """
        of_batch = {"run": run.key, "generation": generation, "number": number, "loop": loop}
        with self._owning(run, generation):
            staged = "DELETE FROM reject WHERE run = ? AND number = ? AND generation = ?"
            self._sql(staged, (run.key, number, generation))
            for place, reject in enumerate(rejects):
                self._insert("reject", **of_batch, place=place, at=self._host.now(), **reject)

    def _settle_retried(self, run: Run, checkpoint: Checkpoint) -> None:
        """Mark what a retry has done up to its cursor; what it rejected again is a row of its own.

        Such a row waits under the same run, with its new error.
        """
        sql = (
            "UPDATE reject SET state = 'retried' WHERE retry = ? AND loop = ? AND state = 'open'"
            " AND (run, number, place) <= (?, ?, ?)"
        )
        if spot := decode_cursor(checkpoint.cursor):
            self._sql(sql, (run.key, checkpoint.loop, *spot))

    def drop_rejects(self, run: Run, rows: Sequence[RejectRow], who: str, why: str) -> int:
        """Let open rejects go, as a person decided; return how many there still were.

        Raises:
            IllegalTransition: a retry that is going on has taken some of them up.
        """
        sql = (
            "UPDATE reject SET state = 'dropped', why = ? WHERE (run, number, place) = (?, ?, ?)"
            " AND confirmed AND state = 'open' RETURNING 1"
        )
        with self._writing():
            going_on = self.unfinished(run.job)
            if going_on is not None and going_on.retry_of == (run.retry_of or run.id):
                raise unfinished_before_retry(self, going_on)
            open_yet = self._connection.executemany(sql, [(why, *row.spot) for row in rows])
            dropped = len(open_yet.fetchall())
            if dropped:
                self._event(run, who, f"{dropped} rejects dropped", why)
            return dropped

    def _confirm_rejects(self, run: Run, checkpoint: Checkpoint) -> None:
        """Count the rejects staged for a commit by the generation that did its work; no others.

        What an older try has staged can only be there for the first commit after `run` was read.
        """
        of_commit = {"run": run.key, "number": checkpoint.number}
        if checkpoint.link["rejected"]:
            staged = {"generation": checkpoint.link["staged"]}
            self._set("reject", {**of_commit, **staged}, confirmed=1)
        if checkpoint.number == run.number + 1:
            sql = "DELETE FROM reject WHERE run = :run AND number = :number AND NOT confirmed"
            self._sql(sql, of_commit)
        if run.retry_of and checkpoint.kind == "batch":
            self._settle_retried(run, checkpoint)

    def end_attempt(
        self, run: Run, generation: int, end: AttemptEnd, releases: list[dict[str, Any]]
    ) -> None:
        """Record, fenced, how the worker's own attempt ended; the run's edge is made from it."""
        with self._owning(run, generation):
            self._write_end(run, generation, end)
            self._set_attempt(run, generation, releases=releases)

    def _write_end(self, run: Run, generation: int, end: AttemptEnd) -> None:
        """Record how an attempt ended, unless its worker has said it already."""
        said: dict[str, object] = {"run": run.key, "generation": generation, "ending": None}
        if end.ending in (Ending.OVERDUE, Ending.RECYCLED):  # the worker knew only: stop
            self._set("attempt", said | {"ending": Ending.STOPPED}, ending=None)
        number, now = self.run(run.key).number, self._host.now()
        ended = {"ended_at": now, "to_number": number, "cleans_until": None, **end._asdict()}
        self._set("attempt", said, **ended)

    def settle(
        self,
        run: Run,
        generation: int,
        seen: AttemptEnd,
        decide: Callable[[Run, Attempt], After] = after_ending,
        *,
        excused: bool = False,
        **diagnosis: int | None,
    ) -> Run:
        """Make the run's edge from what the attempt recorded; only with the job's lock held.

        `seen` is recorded if the worker recorded nothing; `decide` is asked what follows, inside
        the transaction, when the try is charged, unless it is `excused`; `diagnosis` is `signal`
        and `peak_rss_bytes` of the worker's process.
        """
        with self._owning(run, generation):
            self._set_attempt(run, generation, **diagnosis)
            return self._settle(self.run(run.key), seen, "supervisor", decide, excused=excused)

    def _settle(
        self,
        run: Run,
        seen: AttemptEnd,
        who: str,
        decide: Callable[[Run, Attempt], After] = after_ending,
        *,
        excused: bool = False,
    ) -> Run:
        """Turn the newest attempt's ending into the run's state, and charge its try."""
        self._write_end(run, run.generation, seen)
        run = run if excused else self._charge(run, cast("Attempt", self.last_attempt(run)))
        attempt = cast("Attempt", self.last_attempt(run))
        state, reason, why, size = decide(run, attempt)
        if size is not None:
            self._set_attempt(run, attempt.generation, retry=IN_HALVES)
            self._set_run(run, size=size)
        if state != run.state:
            return self._move(run, state, who=who, why=why, reason=reason)
        self._event(run, who, state, why)
        return run

    def _charge(self, run: Run, attempt: Attempt) -> Run:
        """Charge the armed try once, if the batch caused the ending; see section 12."""
        no_batch_open = attempt.ending == Ending.DIED and run.state != RunState.RUNNING
        if attempt.retry in (None, AT_NO_COST) or no_batch_open or attempt.charged:
            return run
        self._set_attempt(run, attempt.generation, charged=1)
        self._set_run(run, tries=run.tries + 1)
        return self.run(run.key)

    def rest(self, run: Run, reason: Reason, why: str) -> Run:
        """Let a run rest that is kept between two attempts: paused, or as was requested."""
        with self._owning(run, run.generation):
            run = self.run(run.key)
            if run.request == Request.PAUSE:
                reason, why = Reason.PERSON, ""
            if run.request == Request.CANCEL:
                return self._move(run, RunState.CANCELLED, who="supervisor", why=why)
            if run.state == RunState.PAUSED:
                self._change(run, RunState.RESERVED)
                run = self.run(run.key)
            self._move(run, RunState.PAUSED, who="supervisor", why=why, reason=reason)
            self._set_run(run, checks_at=None)
            return self.run(run.key)

    def keep_paused(self, run: Run, why: str, checks_at: str, paused_s: float) -> Run:
        """Record that a run is kept paused until it is well, and when that is looked at again."""
        with self._owning(run, run.generation):
            if run.state == RunState.RESERVED:
                self._move(run, RunState.PAUSED, who="supervisor", why=why, reason=Reason.HEALTH)
            self._sql(ADD_PAUSE, (paused_s, run.key))
            self._set_run(run, checks_at=checks_at)
            return self.run(run.key)

    def count_pause(self, run: Run, paused_s: float) -> None:
        """Add to the time for which a run was kept paused."""
        with self._owning(run, run.generation):
            self._sql(ADD_PAUSE, (paused_s, run.key))

    def end_pause(self, run: Run, why: str) -> Run:
        """Keep a run on that is well again, unless somebody asks for something else meanwhile."""
        with self._owning(run, run.generation):
            run = self.run(run.key)
            if run.request is not None:
                return run
            to, reason = RunState.RESERVED, Reason.HEALTH
            return self._move(run, to, who="supervisor", why=why, reason=reason)

    # -- verbs: cleanups -------------------------------------------------------------------

    def record_cleanup(
        self, run: Run, generation: int, function: str, arguments: dict[str, Any], of_run: int
    ) -> Cleanup | None:
        """Record a cleanup whose resource is about to be made; None if this attempt has it already.

        What an earlier attempt of the job left pending of it is done, and its error the new row's.
        """
        same = (
            "done_at IS NULL AND function = ?1 AND arguments = ?2 AND of_run = ?3"
            " AND run IN (SELECT key FROM run WHERE job = ?4)"
        )
        bindings = (function, _compact(arguments), of_run, run.job)
        newest = f"SELECT run, generation, error FROM cleanup WHERE {same} ORDER BY id DESC LIMIT 1"
        anew = f"UPDATE cleanup SET done_at = ?5, error = ?6 WHERE {same} AND id <> ?7"
        now = self._host.now()
        made: dict[str, Any] = {"run": run.key, "generation": generation, "made_at": now}
        made |= {"function": function, "arguments": arguments, "of_run": of_run}
        with self._owning(run, generation):
            key, older, error = self._sql(newest, bindings).fetchone() or (None, 0, None)
            if (key, older) == (run.key, generation):
                return None
            row = self._insert("cleanup", **made, error=error)
            self._sql(anew, (*bindings, now, f"recorded anew: {row}", row))
        reach("cleanup.recorded", row)
        return Cleanup(row, run.id, run.job, function, arguments, now, None, error, None, of_run)

    def begin_cleanup(self, run: Run, generation: int, row: int) -> None:
        """Record, fenced, that a cleanup is about to be called."""
        with self._owning(run, generation):
            self._set("cleanup", {"id": row}, error=CUT_OFF)
        reach("cleanup.begun", row)

    def end_cleanup(
        self, run: Run, generation: int, row: int, error: str | None, elapsed_s: float
    ) -> None:
        """Record that a cleanup is done, or why it is still pending."""
        reach("cleanup.called", row)
        done_at = None if error else self._host.now()
        with self._owning(run, generation):
            self._set("cleanup", {"id": row}, done_at=done_at, error=error, elapsed_s=elapsed_s)
        reach("cleanup.done", row)

    def forget_cleanups(self, run: Run, who: str, why: str) -> None:
        """Let a run's pending cleanups go: they are done, and nobody calls them any more."""
        error = f"let go by {who}: {why}"
        with self._writing():
            pending: dict[str, object] = {"run": run.key, "done_at": None}
            self._set("cleanup", pending, done_at=self._host.now(), error=error)

    def note_releases(self, run: Run, generation: int, until: float | None) -> None:
        """Record by when (CLOCK_MONOTONIC) a worker has released what it holds; None: it has."""
        with self._owning(run, generation):
            self._set_attempt(run, generation, cleans_until=until)

    def begin_cleaning(self, run: Run, owner: ProcessIdentity, who: str) -> Run:
        """Begin an attempt that only runs pending cleanups, before a cancel or after the end.

        The run is fenced and stays in its state; the caller holds the job's lock.
        """
        with self._writing():
            run = self._left(run, who)
            if not run.finished:
                self._wish(run, Request.CANCEL, who)
            self._insert_attempt(run, owner)
            return self.run(run.key)

    def end_cleaning(
        self, run: Run, generation: int, seen: AttemptEnd, who: str, **diagnosis: int | None
    ) -> Run:
        """End such an attempt, whatever came of it, and cancel its run if it is unfinished."""
        with self._owning(run, generation):
            self._set_attempt(run, generation, **diagnosis)
            self._write_end(run, generation, seen)
            run = self.run(run.key)
            return run if run.finished else self._cancel(run, who, "a person decided so")

    # -- verbs: operations -----------------------------------------------------------------

    def operate(
        self,
        run: Run,
        generation: int,
        told: Iterable[Told],
        claims: Sequence[tuple[str, bytes]],
        **of_all: object,
    ) -> dict[str, int]:
        """Record, fenced, what became of operations, and claim others; return ids by their keys.

        A claim is a key with the digest of its arguments; `of_all` is `number`, `lookup` and
        `irreversible`. Claims are durable when this returns. What is only told survives a kill, but
        a power cut not before the next commit: then it is unknown, which is true.
        """
        now, ids = self._host.now(), dict[str, int]()
        mine = {"job": run.job, "run": run.key, "generation": generation, "now": now}
        mine |= {"lookup": None, "irreversible": 0, **of_all}
        try:
            if not claims:
                self._sql("PRAGMA synchronous = NORMAL")
            with self._owning(run, generation):
                self._connection.executemany(OUTCOME, [(*row, now) for row in told])
                if claims:
                    mine["claims"] = _compact([(key, digest.hex()) for key, digest in claims])
                    ids = dict(self._sql(CLAIM, mine))
                if len(ids) < len(claims):
                    raise IllegalTransition("An operation was claimed by somebody else meanwhile.")
                reach("operation.claiming" if claims else "operation.settling", run.number + 1)
        finally:
            if not claims:
                self._sql("PRAGMA synchronous = FULL")
        return ids

    def sync(self, run: Run, generation: int) -> None:
        """Make durable what was told of operations, before a checkpoint is built on it."""
        with self._owning(run, generation):
            self._sql("UPDATE run SET generation = generation WHERE key = ?", (run.key,))

    def take_up(self, run: Run, generation: int, number: int, rows: Iterable[Operation]) -> None:
        """Let a run's next commit answer for open operations that an older run had claimed."""
        sql = "UPDATE operation SET run = ?, generation = ?, number = ? WHERE id = ?"
        mine = [(run.key, generation, number, row.id) for row in rows]
        with self._owning(run, generation):
            self._connection.executemany(f"{sql} AND outcome IS NULL", mine)

    def answer(self, operation: Operation, told: Told, by: str) -> None:
        """Record what a person, or a lookup outside a run, says of an open operation; `by` types.

        Raises:
            Busy: its run is owned; the caller holds the job's lock, and settles a dead owner first.
            IllegalTransition: it is not open any more.
        """
        with self._writing():
            run = self.run(operation.run)
            if run.state in OWNED:
                raise Busy(
                    f"Run {run.id} of {run.job} is going on, and finds out by itself.",
                    unchanged="Nothing was changed.",
                    todo=f"See: batchrun status {run.job}",
                )
            if not self._sql(f"{OUTCOME} RETURNING 1", (*told, self._host.now())).fetchone():
                raise IllegalTransition(
                    f"The operation {operation.key!r} has its outcome already.",
                    unchanged="Nothing was changed.",
                    todo=f"See: batchrun reconcile {run.id}",
                )
            self._event(run, by, f"operation {told.outcome}: {operation.key}", told.why or "")

    # -- verbs: health -------------------------------------------------------------------

    def record_reading(
        self,
        run: Run,
        generation: int,
        memory: Memory | None,
        usage: Usage | None,
        pressure: float | None,
    ) -> None:
        """Record, fenced, what a sample saw."""
        columns: dict[str, object] = {"pressure": pressure}
        if memory:
            columns |= zip(("available_bytes", "limit_bytes", "limit_source"), memory, strict=True)
        if usage:
            columns |= usage._asdict()
            known = usage.open_files is not None
            columns["connections"] = sum(usage.connections.values()) if known else None
        columns |= {"run": run.key, "generation": generation, "at": self._host.now()}
        with self._owning(run, generation):
            self._insert("reading", number=self.run(run.key).number, **columns)

    def record_health_check(
        self,
        run: Run,
        generation: int,
        factors: Mapping[str, str],
        verdict: str,
        why: str,
        elapsed_s: float,
    ) -> None:
        """Record, fenced, what a health check found: each factor in words, and what follows."""
        columns = {**factors, "verdict": verdict, "why": why, "elapsed_s": elapsed_s}
        columns |= {"run": run.key, "generation": generation, "at": self._host.now()}
        with self._owning(run, generation):
            self._insert("health_check", **columns)

    # -- verbs: wishes and decisions -----------------------------------------------------

    def request(self, run: Run, request: Request, who: str) -> None:
        """Ask something of a run that has a live owner; nothing outranks a cancel."""
        with self._writing():
            run = self.run(run.key)
            if run.finished or (run.request == Request.CANCEL and request != Request.CANCEL):
                raise IllegalTransition(
                    f"Run {run.id} has finished, or is to be cancelled already.",
                    unchanged="Nothing was changed.",
                    todo=f"See: batchrun status {run.job}",
                )
            self._wish(run, request, who)

    def ask(self, run: Run, generation: int, name: str, summary: str) -> Approval:
        """Store a job's question, unless it was asked before, and return it as it stands."""
        with self._owning(run, generation):
            sql = "INSERT INTO approval (run, name, summary, asked_at) VALUES (?, ?, ?, ?)"
            values = (run.key, name, summary, self._host.now())
            if self._sql(f"{sql} ON CONFLICT DO NOTHING RETURNING 1", values).fetchone():
                self._event(run, "worker", f"asked: {name}", summary)
        return next(question for question in self.approvals(run) if question.name == name)

    def approve(self, run: Run, name: str, by: str, why: str, who: str) -> None:
        """Record a person's answer; `who` types it, perhaps for somebody else.

        Raises:
            NotFound: the run has never asked this.
            IllegalTransition: it is answered already, or the run is finished.
        """
        with self._writing():
            asked = {question.name: question for question in self.approvals(run)}
            require_unanswered(self.run(run.key), name, asked)
            answer = {"who": by, "why": why, "answered_at": self._host.now()}
            self._set("approval", {"run": run.key, "name": name, "answered_at": None}, **answer)
            told = f"by {by}: {why}" if by != who else why
            self._event(run, who, f"approved: {name}", told)

    def cancel(self, run: Run, who: str, why: str) -> None:
        """Cancel a run that nobody owns, unless it is finished; the caller holds the lock."""
        with self._writing():
            run = self._left(run, who)
            if not run.finished:
                self._cancel(run, who, why)

    def _cancel(self, run: Run, who: str, why: str) -> Run:
        """Cancel under a new generation, so that no earlier owner can write any more."""
        self._supersede(run)
        return self._move(run, RunState.CANCELLED, who=who, why=why)

    def pause(self, run: Run, who: str) -> None:
        """Pause a run that nobody owns, as a person's decision; the caller holds the job's lock.

        A run that waits for its turn or for an answer goes on waiting, with the wish kept. To
        paused the edges lead from a live owner only: nobody sees the state between, and one event
        says what happened.
        """
        with self._writing():
            self._pause(run, who, Reason.PERSON)

    def stop_at_barrier(self, run: Run, who: str, why: str, find: Find) -> None:
        """Pause a run whose next attempt maintenance turned away; the caller holds its lock."""
        with self._writing():
            self._know_barrier(find(), who)
            run = self.run(run.key)
            if run.state == RunState.RESERVED:  # kept between two attempts
                self._move(run, RunState.PAUSED, who=who, why=why, reason=Reason.MAINTENANCE)
            elif run.reason != Reason.MAINTENANCE:  # else the worker was turned away
                self._pause(run, who, Reason.MAINTENANCE, why)

    def _wish(self, run: Run, request: Request, who: str) -> None:
        """Keep a wish that whoever has the run, or takes it next, will honour."""
        self._set_run(run, request=request)
        self._event(run, who, f"requested: {request}")

    def _left(self, run: Run, who: str) -> Run:
        """Return a run that nobody owns as it stands now, settled if its owner is gone."""
        run = self.run(run.key)
        return self._settle(run, DIED, who) if run.state in OWNED else run

    def _pause(self, run: Run, who: str, reason: Reason, why: str = "") -> None:
        run = self._left(run, who)
        if run.finished:
            return
        if run.state in (RunState.WAITING, RunState.AWAITING):
            self._wish(run, Request.PAUSE, who)
            if run.state == RunState.AWAITING:
                self._set_run(run, deferred=None)
            return
        self._supersede(run)
        self._change(run, RunState.RESERVED)
        why = why or f"a person paused it; it was {run.state}"
        self._move(self.run(run.key), RunState.PAUSED, who=who, why=why, reason=reason)
        self._set_run(run, error=run.error)  # what it stood on before is still to be mended

    def adopt(self, checkpoint: Checkpoint, who: str) -> None:
        """Take a run over from its checkpoint alone, as a person decided; see `repair`.

        Rows that the ledger lacks stay lost, and an event says which; rows of what came after that
        checkpoint go, as it is done again.
        """
        with self._writing():
            run = self._known_or_made(checkpoint, who)
            generation, newest = max(run.generation, checkpoint.generation + 1), checkpoint.number
            self._set_run(run, generation=generation, number=newest - 1)
            self._catch_up(run, checkpoint, who)
            stays = {"run": run.key, "number": newest, "staged": checkpoint.link["staged"]}
            self._sql(TAKE_BACK, stays)
            self._apply_commit(run, Commit(checkpoint, *checkpoint_bytes(checkpoint)), generation)
            self._confirm_rejects(run, checkpoint)
            said = f"checkpoint {newest} adopted"
            if newest > run.number + 1:
                said += f"; {gap_text(run.number + 1, newest - 1)}"
            if newest < run.number:
                said += "; what came after it is done again"
            self._event(run, who, "repaired", said)
            if run.state in OWNED:
                self._move(run, RunState.INTERRUPTED, who=who, why="taken over by repair")

    def _known_or_made(self, checkpoint: Checkpoint, who: str) -> Run:
        """Return the run of a checkpoint, which is its job's newest; make it if it was lost."""
        if run := self.run_with_id(checkpoint.run):
            return run
        if older := self.unfinished(checkpoint.job):
            self._cancel(older, who, "repair found a later run of the job")
        begun = (checkpoint.run, checkpoint.job, RunState.RESERVED, checkpoint.at)
        return self._make_run(*begun, job_version=checkpoint.job_version)

    def _catch_up(self, run: Run, checkpoint: Checkpoint, who: str) -> None:
        """Let new events and operations have ids above all that a checkpoint knows of."""
        now, newest = self._host.now(), self.newest_operation()
        behind = checkpoint.event - self.newest_event()
        if behind > 0:
            why = f"{behind} events were lost before this one"
            event = {"id": checkpoint.event + 1, "at": now, "who": who}
            self._insert("event", what="repaired", why=why, **event)
        if checkpoint.operation > newest:
            lost = f"operations {newest + 1} to {checkpoint.operation} were lost"
            fence = {"run": run.key, "generation": 0, "number": 0, "arguments": b""}
            of_whom = {"id": checkpoint.operation, "job": run.job, "key": f"({lost})"}
            ended = {"claimed_at": now, "outcome": FREED, "ended_at": now, "who": who, "why": lost}
            self._insert("operation", **of_whom, **fence, **ended)
            self._event(run, who, "repaired", lost)

    # -- verbs: pruning -------------------------------------------------------------------

    def prunable(self, before: str) -> list[int]:
        """Return the keys of runs that ended before a moment and nothing needs, newest first."""
        old = {name: key for key, name in self._rows(PRUNABLE, before)}
        kin = self._rows(KIN) if old else []
        while parted := [pair for pair in kin if (pair[0] in old) != (pair[1] in old)]:
            for name in (name for pair in parted for name in pair):
                old.pop(name, None)
        return list(old.values())

    def prune(self, run: Run, before: str) -> tuple[bool, int]:
        """Remove a slice of a run's commits; return whether its files are next, and how many rows.

        It is asked again whether anything needs the run; if so, nothing of it goes.
        """
        with self._writing():
            if run.key not in self.prunable(before):
                return False, 0
            self._set_run(run, checkpoint=None)
            number = "number < (SELECT min(number) FROM batch WHERE run = ?1) + ?2"
            slice_of_it = f"DELETE FROM batch WHERE run = ?1 AND {number}"
            self._sql(slice_of_it, (run.key, COMMITS_AT_ONCE))
            rows = self._connection.changes()
            is_last = not self._rows("SELECT 1 FROM batch WHERE run = ? LIMIT 1", run.key)
            reach("prune.commit")
            return is_last, rows

    def forget(self, run: Run) -> int:
        """Remove what a run has beside commits and files, and its row; return how many rows.

        The row stays if the run has made operations.
        """
        key, rows = (run.key,), self._connection.total_changes()
        with self._writing():
            self._sql("UPDATE reject SET retry = NULL WHERE retry = ?", key)
            for table in ROWS_OF_A_RUN:
                self._sql(f"DELETE FROM {table} WHERE run = ?", key)
            self._sql(f"UPDATE event SET run = NULL WHERE run = ? AND id IN ({REFERRED})", key)
            self._sql("DELETE FROM event WHERE run = ?", key)
            made = "SELECT 1 FROM operation WHERE run = ?1"
            self._sql(f"DELETE FROM run WHERE key = ?1 AND NOT EXISTS ({made})", key)
            return self._connection.total_changes() - rows

    def prune_the_rest(self, before: str) -> int:
        """Remove old readings, closed barriers and alerts, events of no run; return how many."""
        rows = self._connection.total_changes()
        with self._writing():
            self._sql(PRUNE_THE_REST, {"before": before})
            return self._connection.total_changes() - rows

    # -- one state change, one event ------------------------------------------------------

    def _move(self, run: Run, to: RunState, *, who: str, why: str = "", reason: str = "") -> Run:
        """Change a run's state, append the event, and return the run."""
        self._change(run, to, why=why, reason=reason)
        said = f"{to} ({reason})" if reason else str(to)
        self._event(run, who, said, why or TRANSITIONS[run.state, to])
        return self.run(run.key)

    def _change(self, run: Run, to: RunState, *, why: str = "", reason: str = "") -> None:
        """Change a run's state as compare-and-set."""
        if (run.state, to) not in TRANSITIONS:
            raise IllegalTransition(
                f"Run {run.id} is {run.state}; there is no edge from there to {to}."
            )
        bound = {"key": run.key, "state": run.state, "to": to, "reason": reason}
        bound |= {"now": self._host.now(), "ends": to in FINISHED}
        told = to in (RunState.FAILED, RunState.INTERRUPTED, RunState.AWAITING)
        told |= to == RunState.PAUSED and reason in (Reason.RETRY, Reason.HEALTH)
        bound["error"] = why if told else None
        if self._sql(MOVE, bound).fetchone() is None:
            raise IllegalTransition(f"Run {run.id} was no longer {run.state}.")

    def _event(self, of: Run | str | None, who: str, what: str, why: str = "") -> int:
        """Append an event about a run, about a job, or about neither; return its id."""
        key, job = (of.key, of.job) if isinstance(of, Run) else (None, of)
        at = self._host.now()
        return self._insert("event", at=at, run=key, job=job, who=who, what=what, why=why)

    def _supersede(self, run: Run) -> int:
        """Raise a run's generation, so that no earlier owner can write; return it."""
        sql = "UPDATE run SET generation = generation + 1 WHERE key = ? RETURNING generation"
        return int(self._sql(sql, (run.key,)).fetchone()[0])

    def _owning(self, run: Run, generation: int) -> contextlib.AbstractContextManager[None]:
        """Hold the write lock as the run's owner of this generation, or raise LostOwnership."""
        return self._writing(run, generation)

    def _insert(self, table: str, **columns: object) -> int:
        """Insert a row and return its rowid; lists and dicts become JSON."""
        self._sql(insert_sql(table, *columns), bound_values(columns))
        return self._connection.last_insert_rowid()

    def _set(self, table: str, which: Mapping[str, object], **columns: object) -> None:
        """Change columns of the rows that have these values; lists and dicts become JSON."""
        changes = ", ".join(f"{name} = :{name}" for name in columns)
        fits = " AND ".join(f"{name} IS :_{name}" for name in which)
        values = bound_values(columns) | {f"_{name}": value for name, value in which.items()}
        self._sql(f"UPDATE {table} SET {changes} WHERE {fits}", values)

    def _set_run(self, run: Run, **columns: object) -> None:
        self._set("run", {"key": run.key}, **columns)

    def _set_attempt(self, run: Run, generation: int, **columns: object) -> None:
        if columns:
            self._set("attempt", {"run": run.key, "generation": generation}, **columns)

    # -- a copy ---------------------------------------------------------------------------

    def back_up(self, target: Path, named: Path | None = None) -> dict[str, int]:
        """Copy the ledger as it is now, while others go on writing, to a new private file.

        `named` is what a letter calls it, if it is to be renamed.

        Returns:
            The newest ids that the copy has to hold, by table.
        """
        with self._letters():
            self._sql("BEGIN")  # one moment of it all, however long the copy takes
            try:
                newest = newest_ids(self._connection)
                reach("backup.begun")
                _back_up(self._connection, target)
            except (apsw.FullError, apsw.IOError, apsw.CantOpenError) as error:
                full = isinstance(error, apsw.FullError) or is_full(target.parent, self._host)
                lost = "the system refused to write"  # SQLite has no words of its own for it
                why = "the disk is full" if full else str(error).replace("not an error", lost)
                what = f"The copy {named or target} cannot be written: {why}."
                todo = f"Make room, or choose another place: df {_typed(target.parent)}"
                raise StateDirectoryError(what, unchanged="No copy was made.", todo=todo) from error
            finally:
                self._roll_back()
        return newest

    # -- integrity ----------------------------------------------------------------------

    def damage(self) -> str:
        """Return what SQLite finds wrong with the file's structure; empty if nothing."""
        with self._letters():
            try:
                found = [str(row[0]) for row in self._sql("PRAGMA quick_check(3)")]
                count, size = (self._connection.pragma(of) for of in ("page_count", "page_size"))
                if size_of(self.path) < count * size and not self.log_bytes():
                    return f"the file ends within page {count}"  # SQLite reads zeros there
            except (apsw.CorruptError, apsw.NotADBError) as error:
                return str(error)
        return "" if found == ["ok"] else "; ".join(found)

    def log_bytes(self) -> int:
        """Return the size of the write-ahead log, which a reader can keep from being reused."""
        return size_of(beside(self.path, "-wal"))

    def gaps(self, run: Run) -> list[tuple[int, int]]:
        """Return the ranges of commit numbers that have no row, first and last included."""
        sql = (
            "SELECT before + 1, number - 1 FROM (SELECT number, lag(number, 1, 0) OVER"
            " (ORDER BY number) AS before FROM (SELECT number FROM batch WHERE run = ?1 UNION ALL"
            " SELECT ?2 + 1)) WHERE number > before + 1"
        )
        return [(int(first), int(last)) for first, last in self._rows(sql, run.key, run.number)]


@functools.cache
def insert_sql(table: str, *columns: str) -> str:
    """Return the statement that inserts named values, always the same text for the same columns."""
    places = ", ".join(f":{name}" for name in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"


def bound_values(columns: Mapping[str, object]) -> dict[str, object]:
    """Return values as SQLite takes them."""
    return {n: _compact(v) if isinstance(v, (dict, list)) else v for n, v in columns.items()}


def beside(path: Path, suffix: str) -> Path:
    """Return the file that SQLite keeps beside a database: `-wal` or `-shm`."""
    return path.with_name(path.name + suffix)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# -- letters ---------------------------------------------------------------------------


def approve_line(run: Run, name: str) -> str:
    """Return what to type to approve what a run asks."""
    if name.startswith("-"):  # which would be an option
        return f'batchrun approve {run.id} --why "..." -- {_typed(name)}'
    return f'{_typed("batchrun", "approve", run.id, name)} --why "..."'


def reconcile_line(run: Run) -> str:
    """Return what to type to see a run's unknown operations, and how to answer."""
    return f"batchrun reconcile {run.id}"


def unfinished_before_retry(ledger: Ledger, run: Run) -> PersonNeeded:
    """Return the letter for rejects that cannot be touched while a run goes on."""
    todo = f"batchrun resume {run.id}"
    if asked := ledger.open_question(run):
        todo = approve_line(run, asked.name)
    elif ledger.open_operations(run):
        todo = reconcile_line(run)
    return PersonNeeded(
        f"Run {run.id} of {run.job} is unfinished.",
        why="A job has one unfinished run at most, and a retry is a run of its own.",
        unchanged="Nothing was started; the rejects are as they were.",
        todo=f"First type one of:\n  {todo}\n  batchrun cancel {run.id}",
    )


REFUSED_ROLLBACKS = {  # why a rollback must not begin, first that applies: what, why, what to do
    "is one": """Run {run.id} of {run.job} is a rollback itself, of run {run.rollback_of}.
It put back what was there before; what it has overwritten is not kept.
Begin the job anew: batchrun run {run.job}""",
    "unfinished": """Run {run.id} of {run.job} is {run.state}, so it is not rolled back.
Whoever goes on with it would do again what is undone.
First give it up: batchrun cancel {run.id}""",
    "another goes on": """Run {other.id} of {run.job} is {other.state}.
A job has one unfinished run at most, and a rollback is a run of its own.
First type one of:
  batchrun resume {other.id}
  batchrun cancel {other.id}""",
    "unknown": """{unknown} operations of run {run.id} of {run.job} have no known outcome.
Whether there is something to undo in the outside world is to be known first.
Type: batchrun reconcile {run.id}""",
    "later": """\
Run {other.id} of {run.job} is newer and has remembered rows that are not rolled back.
It has changed what run {run.id} left; the newest changes are undone first.
First type: batchrun rollback {other.id}""",
    "no such batch": """\
Run {run.id} of {run.job} has no batch {to}; its newest commit is {run.number}.
Batches above --to-batch are undone, and 0 undoes all.
See: batchrun report {run.id}""",
    "done": """Run {run.id} of {run.job} is rolled back to batch {top} already.
There is nothing above batch {to} that is not undone.
See: batchrun report {run.id}""",
    "nothing": """Run {run.id} of {run.job} has nothing to undo above batch {to}.
None of those batches has remembered a row, or what they had is being pruned.{left}
{next}""",
}


def filled(letter: str, facts: Mapping[str, object]) -> list[str]:
    """Return what, why and what to do of a letter in a table; a fact may have lines of its own."""
    return [part.format(**facts) for part in letter.split("\n", 2)]


KEYS_SHOWN = 10


def not_undone(count: int, which: str, keys: Sequence[str]) -> str:
    """Return that operations are not undone: how many, which ones, the keys of the first."""
    more = ", ..." * (count > KEYS_SHOWN)
    return f"NOT UNDONE: {count:,} operations{which}: {', '.join(keys[:KEYS_SHOWN])}{more}"


def lost_ownership(run: Run, generation: int) -> LostOwnership:
    """Return the letter of an owner that was superseded."""
    return LostOwnership(
        f"Lost ownership of run {run.id}: generation {generation} was superseded.",
        why="Another process took the run over; this one may not write any more.",
        unchanged="Neither ledger nor checkpoint was changed; the new owner goes on from them.",
        todo=f"See `batchrun status {run.job}`.",
    )


def require_unanswered(run: Run, name: str, asked: Mapping[str, Approval]) -> None:
    """Refuse to answer what was never asked (NotFound) or is decided (IllegalTransition)."""
    unchanged = "Nothing was changed."
    if name not in asked:
        names = ", ".join(map(repr, asked)) or "nothing"
        what = f"Run {run.id} of {run.job} has not asked for the approval {name!r}."
        raise NotFound(what, why=f"It has asked for: {names}.", unchanged=unchanged)
    question = asked[name]
    if question.answered_at is not None:
        what = f"{name!r} of run {run.id} was approved already, by {question.who}."
        why = f"At {question.answered_at}: {question.why}"
        raise IllegalTransition(what, why=why, unchanged=unchanged)
    if run.finished:
        what = f"Run {run.id} of {run.job} is {run.state}; nothing can go on there."
        raise IllegalTransition(what, unchanged=unchanged)


def is_gone(path: Path) -> bool:
    """Tell whether a ledger's disk answers no more: SQLite calls that a malformed image too."""
    try:
        beside(path, "-wal").read_bytes()  # closing the ledger itself would drop SQLite's locks
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def is_full(folder: Path, host: Host, told: int = 0) -> bool:
    """Tell whether a disk is full: the system told so by errno, or room or inodes are at an end."""
    return told in (errno.ENOSPC, errno.EDQUOT) or host.free_bytes(folder) < LEDGER_ROOM_BYTES


def ledger_letter(error: apsw.Error, path: Path, host: Host, told: int = 0) -> BatchrunError:
    """Return what SQLite raised as a letter; a full disk, `told` by errno, is no corruption."""
    unchanged = "Nothing was changed."
    if isinstance(error, apsw.BusyError):
        why = f"Another process has held its write lock for {BUSY_LIMIT_S:g} s."
        return Busy(
            f"The ledger {path} is busy.", why=why, unchanged=unchanged, todo="Start again."
        )
    if isinstance(error, apsw.NotADBError | apsw.CorruptError) and not is_gone(path):
        left = "It is left as it is; the checkpoints are beside it."
        todo = "See `batchrun check`, then `batchrun repair`."
        return PersonNeeded(f"The ledger {path} is damaged: {error}.", unchanged=left, todo=todo)
    if isinstance(error, apsw.ConstraintError) and "illegal transition" in str(error):
        return IllegalTransition(f"The ledger refused: {error}.")
    what = f"The ledger {path} cannot be used: {type(error).__name__}: {error}."
    todo = f"Check the disk and the permissions of {path.parent}, then type this again."
    if isinstance(error, apsw.FullError) or is_full(path.parent, host, told):
        what = f"Disk full: the ledger {path} cannot be written ({error})."
        todo = f"Make room on the disk of {path.parent}, then type this again."
    return StateDirectoryError(what, unchanged=unchanged, todo=todo)


def ledger_lost(path: Path, how: str) -> PersonNeeded:
    """Return the letter for a ledger that is gone while checkpoints tell of runs."""
    return PersonNeeded(
        f"The ledger {path} does not hold what the checkpoints tell of: {how}.",
        why="Without it batchrun would begin at record 1 again.",
        unchanged="Nothing was changed; it is never made anew by itself.",
        todo="Put the ledger back from a backup, or see `batchrun repair`.",
    )


# -- opening, making, migrating --------------------------------------------------------


def sqlite_version() -> str:
    """Return the version of the SQLite that is in use."""
    return apsw.sqlite_lib_version()


def require_sqlite(version: str) -> None:
    """Refuse an SQLite that can corrupt a ledger (the WAL-reset bug, or the withdrawn 3.52)."""
    numbers = tuple(map(int, version.split(".")))
    if numbers < SQLITE_OLDEST or numbers[:2] == SQLITE_WITHDRAWN:
        raise ConfigurationError(
            f"SQLite {version} is not fit for a ledger.",
            why="Versions before 3.51.3 can corrupt a WAL file; 3.52 was withdrawn.",
            unchanged="Nothing was opened.",
            todo="Type: python -m pip install 'apsw>=3.51.3.0,!=3.52.*'",
        )


def require_known_version(connection: apsw.Connection, path: Path) -> int:
    """Return the ledger's version: ours, or one from which there is a way to ours.

    Raises:
        NewerFormat: a newer batchrun wrote it, or migrated it meanwhile.
        StateDirectoryError: there is no way from its version to ours; untouched.
    """
    version = int(cast("int", connection.pragma("user_version")))
    if version > SCHEMA_VERSION:
        raise NewerFormat(f"The ledger {path} has version", version, SCHEMA_VERSION)
    if any(step not in MIGRATIONS for step in range(version, SCHEMA_VERSION)):
        raise StateDirectoryError(
            f"The ledger {path} has version {version}, older than any that can be migrated.",
            unchanged="It was not touched.",
            todo="Put the ledger back from a backup; if there is none, move it away, then type:"
            " batchrun repair",
        )
    return version


def open_ledger(
    path: Path, host: Host, *, create: bool, witnesses: bool = False, write: bool = True
) -> Ledger:
    """Open the ledger, after checking that it is one, of a version that we know.

    With `create` it is made if there is none, but not if checkpoints exist, its `witnesses`: then a
    missing or empty one is a loss. Not to `write` means to read also another owner's ledger, or one
    on a full disk, making no file and migrating nothing.

    Raises:
        PersonNeeded: it is missing, empty or not ours while checkpoints exist.
        StateDirectoryError: it cannot be used, or a newer batchrun made it, or an older one that
            is to be read only; untouched.
        NotFound: there is none, and it was not to be made.
    """
    require_sqlite(sqlite_version())
    reach("ledger.open")
    if is_missing(path):
        if witnesses or size_of(beside(path, "-wal")):
            raise ledger_lost(path, "it is missing or empty")
        if not create:
            raise NotFound(f"There is no ledger at {path}.", todo="Type: batchrun run JOB")
        create_ledger(path, host, os.urandom(16).hex())
    try:
        has_room = host.can_map(path.parent, 2 * LOG_MAP_BYTES)
        if write and not has_room:
            raise apsw.FullError("there is no room to map its log")
        if write or (has_room and path.stat().st_uid == os.geteuid()):
            with contextlib.suppress(*(() if write else NO_ROOM_TO_WRITE)):
                return _open_known(path, host, str(path), apsw.SQLITE_OPEN_READWRITE, write=write)
        return _open_known(path, host, uri_to_read(path), READ_ONLY, write=False)
    except apsw.Error as error:
        raise ledger_letter(error, path, host) from error


LOG_MAP_BYTES = 32_768  # by which SQLite's map of the log grows
READ_ONLY = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
NO_ROOM_TO_WRITE = (apsw.CantOpenError, apsw.IOError, apsw.FullError, apsw.ReadOnlyError)


def uri_to_read(path: Path) -> str:
    """Return how to open a database so that nothing is made or changed, not even beside it.

    Without -shm nobody has it open, and all of it is in its own pages; with one, SQLite reads the
    log through it, or through memory if nobody is there.
    """
    way = "readonly_shm=1" if beside(path, "-shm").exists() else "immutable=1"
    return f"{path.absolute().as_uri()}?mode=ro&{way}"


def gap_text(first: int, last: int) -> str:
    """Return which commits have no row; an event of a repair, and what `check` compares with it."""
    if first == last:
        return f"commit {first} has no row"
    return f"commits {first} to {last} have no rows"


def is_missing(path: Path) -> bool:
    """Tell whether there is no ledger; refuse what is no plain file of ours."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise StateDirectoryError(
            f"{path} is not a plain file.",
            why="It is a link, a directory, a pipe, or has a second name.",
            unchanged="It is left as it is.",
            todo=f"See what it is: ls -l {path}",
        )
    return found.st_size == 0


@contextlib.contextmanager
def _alone_in(folder: Path, host: Host) -> Iterator[int]:
    """Hold the folder's lock, within the ledger's own limit, and yield its descriptor."""
    with open_folder(folder) as directory:
        until = host.monotonic() + BUSY_LIMIT_S
        while not _flock(directory):
            if host.monotonic() > until:
                what = "Another process has been making or migrating the ledger for too long."
                raise Busy(what, unchanged="Nothing was changed.")
            host.sleep(BUSY_STEP_S)
        yield directory


def _flock(descriptor: int) -> bool:
    """Take the kernel's lock on an open file if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create_ledger(path: Path, host: Host, uuid: str) -> None:
    """Make an empty ledger under another name and rename it: it is whole or not there."""
    with _alone_in(path.parent, host) as directory:
        if not is_missing(path):
            return
        new = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        for suffix in ("", "-journal", "-wal", "-shm"):
            beside(new, suffix).unlink(missing_ok=True)
        try:
            make_private_file(new)
            connection = apsw.Connection(str(new), flags=apsw.SQLITE_OPEN_READWRITE)
            with contextlib.closing(connection):
                _write_schema(connection, host, uuid)
        except apsw.Error as error:
            raise ledger_letter(error, path, host) from error
        reach("ledger.made")
        publish_file(directory, new.name, path.name)


def _write_schema(connection: apsw.Connection, host: Host, uuid: str) -> None:
    """Make all tables by a COMMIT, which tells if the disk refuses; only then enter WAL mode."""
    connection.pragma("synchronous", "FULL")
    connection.execute(f"BEGIN IMMEDIATE; {SCHEMA}")
    _write_edges(connection)
    connection.execute("INSERT INTO ledger VALUES (?, ?, NULL)", (uuid, host.now()))
    numbers = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}"
    connection.execute(f"{numbers}; COMMIT")
    _configure(connection)


def _write_edges(connection: apsw.Connection) -> None:
    """Let the table `edge` say what TRANSITIONS says."""
    edges = [(*pair, sentence) for pair, sentence in TRANSITIONS.items()]
    connection.execute("DELETE FROM edge")
    connection.executemany("INSERT INTO edge VALUES (?, ?, ?)", edges)


def _configure(connection: apsw.Connection) -> None:
    """Enter WAL mode and full synchronisation, and verify both by reading them back."""
    mode = connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "FULL")
    connection.pragma("foreign_keys", 1)
    if mode != "wal" or connection.pragma("synchronous") != 2:
        raise apsw.IOError("write-ahead logging or full synchronisation cannot be had here")


def _open_known(path: Path, host: Host, name: str, ways: int, *, write: bool) -> Ledger:
    """Connect, and look at what it is before anything is switched or migrated."""
    connection = apsw.Connection(name, flags=ways)
    try:
        ledger = Ledger(path, host, connection)
        if connection.pragma("application_id") != APPLICATION_ID:
            raise ledger_lost(path, "it is not a batchrun ledger")
        version = require_known_version(connection, path)
        ledger.uuid = _uuid_in(connection, path)
        if not write and version < SCHEMA_VERSION:
            raise StateDirectoryError(
                f"The ledger {path} has version {version}, not migrated to {SCHEMA_VERSION} yet.",
                unchanged="It was not touched.",
                todo="Type, as its owner: batchrun resume --all\nThat migrates it, as every command"
                " that writes does, and goes on with what is due.",
            )
        if ways != READ_ONLY:
            if version < SCHEMA_VERSION:
                _migrate(path, connection, host)
            _configure(connection)
    except BaseException:
        connection.close(force=True)
        raise
    return ledger


def _uuid_in(connection: apsw.Connection, path: Path) -> str:
    """Return the ledger's uuid: the one row that makes it ours."""
    try:
        rows = connection.execute("SELECT uuid FROM ledger").fetchall()
    except apsw.SQLError as error:
        raise ledger_lost(path, f"{error}") from error
    if len(rows) != 1:
        raise ledger_lost(path, "its own row is gone")
    return str(rows[0][0])


def _migrate(path: Path, connection: apsw.Connection, host: Host) -> None:
    """Bring an older ledger to our version in one transaction, after an online backup.

    Raises:
        Busy: a job is running, perhaps in an older batchrun that does not know the new version.
    """
    with _alone_in(path.parent, host), _all_jobs_stopped(path.parent / "locks"):
        version = require_known_version(connection, path)
        steps = range(version, SCHEMA_VERSION)
        if steps:
            _back_up(connection, beside(path, f".version{version}"))
        connection.execute("BEGIN IMMEDIATE")
        for step in steps:
            connection.execute(MIGRATIONS[step])
        _write_edges(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        reach("migrate.commit")
        connection.execute("COMMIT")


@contextlib.contextmanager
def _all_jobs_stopped(locks: Path) -> Iterator[None]:
    """Hold the lock of every job that ever ran."""
    with contextlib.ExitStack() as held:
        for path in sorted(locks.glob("*.lock")):
            descriptor = os.open(path, READ_PLAIN)
            held.callback(os.close, descriptor)
            if not _flock(descriptor):
                raise Busy(
                    f"The ledger must be migrated, but {path.stem} is running.",
                    why="Its process may be an older batchrun.",
                    unchanged="Nothing was changed.",
                    todo=f"Wait for its end, or type: batchrun pause {path.stem}",
                )
        yield


def newest_ids(connection: apsw.Connection) -> dict[str, int]:
    """Return the highest id of each table whose rows are counted on."""
    sql = "SELECT coalesce(max({0}), 0) FROM {1}"
    tables = {"event": "id", "operation": "id", "run": "key"}
    return {t: int(connection.execute(sql.format(k, t)).get) for t, k in tables.items()}


def fault_of_copy(path: Path, uuid: str, newest: Mapping[str, int]) -> str:
    """Make a copy one plain file, and return what is wrong with it; empty if nothing is."""
    try:
        with contextlib.closing(apsw.Connection(str(path))) as copy:
            copy.pragma("journal_mode", "delete")
            found = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(3)")]
            ids, owner = newest_ids(copy), copy.execute("SELECT uuid FROM ledger").get
    except apsw.Error as error:
        return str(error)
    wrong = [] if found == ["ok"] else found
    if owner != uuid:
        wrong.append(f"it is of ledger {owner}")
    wrong += [f"its newest {t} is {ids[t]}, not {n}" for t, n in newest.items() if ids[t] < n]
    return "; ".join(wrong)


def _back_up(connection: apsw.Connection, target: Path) -> None:
    """Copy a ledger in use, whole and consistent, to a file that only its owner can read."""
    target.unlink(missing_ok=True)
    make_private_file(target)
    with (
        contextlib.closing(apsw.Connection(str(target))) as copy,
        copy.backup("main", connection, "main") as backup,
    ):
        while not backup.done:  # in steps: signals are heard between them
            backup.step(BACKUP_STEP)


# ======================================================================================
# 6. Locks and maintenance: who may run
# ======================================================================================
#
# state/locks/JOB.lock decides who is alive: a kernel lock, gone when the last process that has it
# open is gone. The ledger's generation decides who may write. Lock files are never unlinked, and
# the lock is never stolen: an operator ends the owner.
#
# LOCK_UN through any copy of the descriptor frees the lock for all, also under a living worker,
# and filelock calls it when its object dies. So the object is kept in a module-level name until
# the process ends. Who started a worker calls `release` only when the worker's process group is
# proven empty; every other way out of such a supervisor is os._exit. Who holds a lock without a
# worker, to look (`is_owned`) or to write rows (Stopper, Drainer, repair), releases it when it has.
#
# state/maintenance.lock closes the door if and only if the name is there, whatever it is: a file,
# empty, unreadable, a directory, a link to nowhere. Only "no such file" means open. Every admission
# looks inside its own write transaction, of a run's first attempt and of every later one.
#
#   on    the content goes to a temporary file, fsynced; BEGIN IMMEDIATE; link() to the name, which
#         never writes over anything; the temporary name is removed; fsync of the directory; the
#         barrier's row; COMMIT
#   off   BEGIN IMMEDIATE; the name is removed; fsync of the directory; the row is closed; COMMIT
#
# Killed anywhere in between it is fully on or fully off, for the name decides. The rows follow it:
# who meets a lockfile that no row knows makes its row; who finds it gone ("removed by hand"), or
# another by device and inode in its place, or one that closes something else ("changed by hand"),
# closes the row first. One that was touched, or says another reason, is the same barrier; so is one
# made anew in the same inode before anybody looked, since nothing was admitted meanwhile.
#
# A lockfile closes everything unless it is JSON with a list of scopes, all of which are understood.
# The version of a job is known only after its import: `version:NAME<N` lets the admission pass and
# stops the worker before its first batch. `until` over, or older than max_maintenance: still on,
# and loud.

_held_locks: list[Any] = []  # keeps filelock's objects, and so the locks, until the process ends


class JobLock:
    """The one lock of a configured job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self._lock: Any = None

    def acquire(self) -> bool:
        """Take the lock without waiting; tell whether it was free."""
        from filelock import Timeout, UnixFileLock  # 60 ms, supervisors only

        make_private_folder(self.path.parent)  # filelock would make any missing folder
        self._require_plain()
        take = functools.partial(setattr, self, "descriptor")
        lock = UnixFileLock(
            self.path, timeout=0, mode=0o600, fallback_to_soft=False, on_acquired=take
        )
        try:
            lock.acquire()
        except Timeout:
            return False
        except OSError as error:
            raise self._unfit(f"cannot be taken: {error.strerror}") from error
        self._lock = lock
        _held_locks.append(lock)
        if not self.is_ours():
            self.release()
            return False
        return True

    def _require_plain(self) -> None:
        """Refuse what filelock would follow, or wait for: links, directories, pipes."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise self._unfit("is a link, a directory or a pipe, not a file")

    def _unfit(self, why: str) -> StateDirectoryError:
        what, todo = f"The lock {self.path} {why}.", f"See what it is: ls -l {self.path}"
        return StateDirectoryError(what, unchanged="Nothing was changed.", todo=todo)

    def is_ours(self) -> bool:
        """Tell whether the path still names the file that we hold locked."""
        return holds_lock(self.descriptor, self.path)

    def release(self) -> None:
        """Free the lock; only when no process of ours can still be writing."""
        _held_locks.remove(self._lock)
        self._lock.release()
        self.descriptor = -1

    def owners(self, host: Host) -> list[int]:
        """Return the processes that keep the lock file open."""
        with os.fdopen(os.open(self.path, READ_PLAIN)) as file:
            return host.holders(file.fileno())


def holds_lock(descriptor: int, path: Path) -> bool:
    """Tell whether a lock's descriptor and path mean the same file; OSError tells nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


_SCOPE = rf"(?:job|tag):{_JOB_NAME}|version:{_JOB_NAME}<[0-9]{{1,9}}"


class Maintenance:
    """The maintenance lockfile, whoever made it."""

    def __init__(self, path: Path, host: Host, max_s: float) -> None:
        self.path, self._host, self._max_s = path, host, max_s
        self._names: dict[int, str] = {}  # uid of an owner -> name

    def name_owner(self) -> None:
        """Learn the name of a lockfile's owner: not in a transaction, it may ask a server."""
        with contextlib.suppress(OSError):
            uid = self.path.lstat().st_uid
            self._names[uid] = self._names.get(uid) or self._host.user_name(uid)

    def find(self) -> Lockfile | None:
        """Return what is there, or None if the door is open; anything unclear counts as closed.

        An admission asks this in its transaction: it waits for nothing but the disk.
        """
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            why = f"it cannot be looked at: {error.strerror}"
            return Lockfile(0, 0, "", "somebody", why, None, [], "")
        said = self._contents() if stat.S_ISREG(found.st_mode) else {}
        since, until = utc_text(found.st_mtime_ns), _moment(said.get("until"))
        return Lockfile(
            device=found.st_dev & sys.maxsize,  # some are unsigned, SQLite's integers are not
            inode=found.st_ino & sys.maxsize,
            since=since,
            by=_one_line(said.get("by")) or self._names.get(found.st_uid, f"uid {found.st_uid}"),
            reason=_one_line(said.get("reason")),
            until=until,
            scopes=_scopes(said.get("scopes")),
            overdue=self._overdue(since, until),
        )

    def _contents(self) -> dict[str, Any]:
        try:
            with os.fdopen(os.open(self.path, READ_PLAIN), "rb") as file:
                said = json.loads(file.read(65_536))
        except (OSError, ValueError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}

    def _overdue(self, since: str, until: str | None) -> str:
        """Return why a maintenance should be over by now, in words, or nothing."""
        now = self._host.now()
        if until is not None and seconds_between(until, now) > 0:
            return f"It was to end at {until}."
        if seconds_between(since, now) > self._max_s:
            return f"It is older than {duration_text(self._max_s)} (max_maintenance)."
        return ""

    def require_open(self, job: JobConfig) -> Lockfile | None:
        """Refuse a job that the lockfile closes (MaintenanceOn); return one that closes others."""
        found = self.find()
        if found is not None and closes(found.scopes, job.name, job.tags):
            raise self.refusal(found)
        return found

    def require_version(self, job: JobConfig, version: int) -> None:
        """Refuse a job whose installed version the lockfile closes (MaintenanceOn)."""
        found = self.find()
        if found and closes_version(found.scopes, job.name, version):
            raise self.refusal(found, f"It has version {version} of {job.name} installed.")

    def refusal(self, found: Lockfile, *more: str) -> MaintenanceOn:
        """Return the letter of a start that is refused, as loud as the lockfile is old."""
        age = max(0.0, seconds_between(found.since, self._host.now())) if found.since else 0.0
        words = [f"since {found.since}, for {duration_text(age)},"] if found.since else []
        words += [f"by {found.by}", *([f"({found.reason})"] if found.reason else [])]
        only = f"It closes {', '.join(found.scopes)}." if found.scopes else ""
        loud = f"IT IS OVERDUE. {found.overdue}" if found.overdue else ""
        return (MaintenanceOverdue if found.overdue else MaintenanceOn)(
            f"Maintenance is on: {self.path} is there, {' '.join(words)}.",
            why="\n".join(part for part in (loud, only, *more) if part),
            unchanged="Nothing was started; the refusal is recorded.",
            todo="When the maintenance is over: batchrun maintenance off",
        )

    def begin(
        self,
        ledger: Ledger,
        who: str,
        *,
        by: str,
        reason: str,
        until: str | None,
        scopes: list[str],
    ) -> Lockfile:
        """Close the door and record it; see the head of this section.

        Raises:
            MaintenanceOn: it is closed already; by whom and since when.
            StateDirectoryError: the lockfile or its row cannot be written; says which of both is.
        """
        said: dict[str, object] = {"by": by, "reason": reason, "since": self._host.now()}
        said |= {"until": until, "scopes": scopes}
        text = json.dumps({name: value for name, value in said.items() if value}, indent=1)
        with (
            self._letters("written"),
            open_folder(self.path.parent) as folder,
            prepared_file(folder, self.path.name, f"{text}\n".encode()) as temporary,
        ):
            reach("barrier.prepared")
            make = functools.partial(self._link, folder, temporary)
            lockfile, made = ledger.raise_barrier(who, self.find, make)
        if not made:
            raise self._on_already(lockfile)
        self._sweep()
        return lockfile

    @contextlib.contextmanager
    def _letters(self, done: str) -> Iterator[None]:
        """Let what goes wrong say how the door stands now."""
        try:
            yield
        except OSError as error:
            what = f"{self.path} cannot be {done}: {error.strerror}."
            todo = f"See what it is: ls -la {self.path}"
            raise StateDirectoryError(what, unchanged=self._stands(), todo=todo) from error
        except StateDirectoryError as error:
            error.unchanged = self._stands()
            raise

    def _stands(self) -> str:
        is_on = self.find() is not None
        return f"Maintenance is {'on: the lockfile is there' if is_on else 'off'}."

    def _link(self, folder: int, temporary: str) -> Lockfile:
        """Give a prepared file the lockfile's name as its only one, durably."""
        name = self.path.name
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            found = self.find()
            if found is None:
                raise  # made and removed by hand in this moment
            raise self._on_already(found) from None
        reach("barrier.linked")
        os.unlink(temporary, dir_fd=folder)
        os.fsync(folder)
        reach("barrier.synced")
        found = self.find()
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "it was removed by hand at once")
        return found

    def _sweep(self) -> None:
        """Remove what an `on` left that was killed; none of it is the lockfile of now."""
        for path in self.path.parent.glob(f".{self.path.name}.*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                if self._host.identify(int(path.name.split(".")[-3])) is None:
                    path.unlink()

    def _on_already(self, found: Lockfile) -> MaintenanceOn:
        letter = self.refusal(found)
        letter.unchanged = "It stays as it is; nothing was changed."
        return letter

    def end(self, ledger: Ledger, who: str, why: str) -> Barrier | None:
        """Open the door and close the row, which is returned; None if it was open."""
        with self._letters("removed"):
            return ledger.lower_barrier(who, why, self.find, self._remove)

    def _remove(self) -> None:
        """Remove the lockfile durably."""
        with contextlib.suppress(FileNotFoundError):  # somebody was faster
            is_folder = stat.S_ISDIR(self.path.lstat().st_mode)
            self.path.rmdir() if is_folder else self.path.unlink()
        reach("barrier.unlinked")
        with open_folder(self.path.parent) as folder:
            os.fsync(folder)


def closes(scopes: Sequence[str], job: str, tags: Iterable[str]) -> bool:
    """Tell whether a lockfile of these scopes closes a job, whatever its version."""
    return not scopes or bool({f"job:{job}", *(f"tag:{tag}" for tag in tags)} & {*scopes})


def closes_version(scopes: Sequence[str], job: str, version: int) -> bool:
    """Tell whether a lockfile of these scopes closes a version of a job."""
    limits = [scope.removeprefix(f"version:{job}<") for scope in scopes]
    return any(limit.isdecimal() and version < int(limit) for limit in limits)


def _one_line(value: object) -> str:
    """Return text from a lockfile so that it can stand in a message."""
    text = "".join(c if c.isprintable() else " " for c in value) if isinstance(value, str) else ""
    return " ".join(text.split())[:200]


def _moment(value: object) -> str | None:
    """Return a moment with its zone as UTC text, or None if it is none."""
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return None
    return utc_text(int(moment.timestamp() * 1000) * 1_000_000) if moment.tzinfo else None


def _scopes(value: object) -> list[str]:
    """Return the scopes of a lockfile, or none, which is everything, unless all are understood."""
    scopes = value if isinstance(value, list) else []
    known = all(isinstance(scope, str) and re.fullmatch(_SCOPE, scope) for scope in scopes)
    return scopes if known else []


class StateDirectory:
    """The folder that holds ledger, checkpoints, locks and logs, and where each of them is."""

    def __init__(self, config: Config, host: Host) -> None:
        self._config, self._host = config, host
        self.path = config.state
        self.ledger_path = config.state / "ledger.db"
        lockfile = config.state / "maintenance.lock"
        self.maintenance = Maintenance(lockfile, host, config.max_maintenance_s)

    def require_fit(self, *, create: bool, write: bool = True, starts: bool = False) -> None:
        """Check that the folder can be trusted with a ledger, and make it if allowed.

        Only what `starts` a run needs min_free: what ends, answers or mends must go on without it.

        Raises:
            NotFound: it is not there and was not to be made.
            StateDirectoryError: owner, mode, file system, or room.
        """
        if not self.path.exists():
            if not create:
                raise NotFound(
                    f"There is no state directory at {self.path}.",
                    unchanged="Nothing was made.",
                    todo="Is it the right configuration? A first run makes it: batchrun run JOB",
                )
            self._require_file_system(self.path.parent)
            try:
                make_private_folder(self.path)
            except OSError as error:
                todo = f"Make its parent writable for this user: ls -ld {self.path.parent}"
                raise self._unfit(f"it cannot be made: {error.strerror}", todo) from error
        found = self.path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise self._unfit("it is not a folder", f"See what it is: ls -ld {self.path}")
        if write:
            self._require_owner(found)
        self._require_file_system(self.path)
        if starts and self._host.free_bytes(self.path) < self._config.min_free_bytes:
            raise StateDirectoryError(
                f"Disk full: less than {self._config.min_free_bytes:,} bytes are free"
                f" at {self.path}.",
                why="A run that cannot record what it does must not begin (min_free).",
                unchanged="Nothing was started.",
                todo="Make room, or lower min_free in the configuration.",
            )

    def _require_owner(self, found: os.stat_result) -> None:
        if found.st_uid != os.geteuid():
            owner = self._host.user_name(found.st_uid)
            again = _typed("batchrun", *sys.argv[1:])
            raise self._unfit(f"it belongs to {owner}", f"Type: sudo -u {owner} {again}")
        if found.st_mode & 0o022:
            todo = f"Type: chmod go-w {self.path}"
            raise self._unfit("others may write to it", todo)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise self._unfit("it is read-only", f"See: ls -ld {self.path}; df {self.path}")

    def _require_file_system(self, path: Path) -> None:
        kind = self._host.file_system(path.resolve())
        if kind.startswith(NETWORK_FILE_SYSTEMS):
            why = f"it is on a network file system ({kind}), where locks are not reliable"
            raise self._unfit(why, "Put `state` on a local disk in the configuration.")

    def warning(self) -> str:
        """Return why files here may vanish, or nothing."""
        path = self.path.resolve()
        kind = self._host.file_system(path)
        if kind in VOLATILE_FILE_SYSTEMS:
            return f"warning: {self.path} is on {kind}: a reboot loses every checkpoint"
        if any(map(path.is_relative_to, VOLATILE_FOLDERS)):
            where = "where cleaners delete files, lock files in use included"
            return f"warning: {self.path} is {where}"
        return ""

    def _unfit(self, why: str, todo: str) -> StateDirectoryError:
        what = f"The state directory {self.path} cannot be used: {why}."
        return StateDirectoryError(what, unchanged="Nothing was changed.", todo=todo)

    def open_ledger(self, *, create: bool, write: bool = True) -> Ledger:
        """Open the ledger; a missing one is a loss if there are checkpoints."""
        self.maintenance.name_owner()
        witnesses = any((self.path / "checkpoints").glob("*/*.json"))
        how = {"create": create, "witnesses": witnesses, "write": write}
        return open_ledger(self.ledger_path, self._host, **how)

    def reading(self) -> contextlib.closing[Ledger]:
        """Open the ledger that is there to read it, and close it."""
        return contextlib.closing(self.open_ledger(create=False, write=False))

    def lock_path(self, job: str) -> Path:
        """Return where the lock of a job is."""
        return self.path / "locks" / f"{job}.lock"

    def log_path(self, run: Run) -> Path:
        """Return where a run's job prints and logs to."""
        return self.path / "logs" / run.job / f"{run.id}.log"

    def files_of(self, run: Run) -> list[Path]:
        """Return what there is of a run in files: its checkpoint, its log, its images."""
        places = [self.path / kind / run.job for kind in ("checkpoints", "logs", "images")]
        return [
            path for place in places for path in (*place.glob(f"{run.id}.*"), *place.glob(run.id))
        ]

    def store(self, job: str) -> CheckpointStore:
        """Return the checkpoints of a job."""
        return CheckpointStore(self.path / "checkpoints" / job)

    def images(self, run: Run) -> ImageStore:
        """Return what the batches of a run have remembered."""
        return ImageStore(self.path / "images" / run.job / run.id)

    def stores(self) -> list[CheckpointStore]:
        """Return the checkpoints of every job that has some, also of one no longer configured."""
        return [CheckpointStore(path) for path in sorted((self.path / "checkpoints").glob("*/"))]


# ======================================================================================
# 7. Health: is it well enough to go on?
# ======================================================================================
#
# Readings in, verdict out; only the probes look at the world, in a process of their own.
#
#   factor         bad if and only if                                        unknown if
#   memory         less than min_available is left, or the worker uses       it cannot be read
#                  more than max_rss
#   connections    a declared database does not answer, or has more than     one cannot be asked
#                  `normal` connections of the worker, or these grow
#   dependencies   a declared dependency, the state folder's disk or the     one cannot be asked
#                  ledger is not as it should be
#
# Unknown is not bad. A factor *becomes* bad by `bad_in_a_row` checks in a row, and good again by
# `good_in_a_row`; an unknown one stays bad if it is. A critical one is bad at once, and stays
# critical until `good_in_a_row` checks find it only bad. Critical are memory below a quarter of
# min_available, a disk below min_free, a ledger that cannot be written, a need marked critical, a
# factor that [health] calls so. The verdict:
#
#   pause if and only if two factors or more are bad, or one that is critical
#
# While no worker runs, a declared need that is bad pauses alone too, critical or not: no attempt
# begins that cannot do its work.
#
# Only what changes is told. While anything is bad, checks come `recheck_after` apart, then twice as
# far each time, up to check_interval; each wait is drawn from 0.75 to 1.25 of that, so that many
# jobs do not come at once.
#
# A probe can hang for ever: in a resolver, in a connection that is accepted and never answered. All
# probes of a round run in one child process, each in a thread; what has not answered in its time is
# bad, and at the end the whole process group is killed. The child gets its questions in a file
# without a name, as they may hold passwords. What cannot be asked (no driver, no room for a
# process) is unknown. A tcp: or unix: probe only sees whether the kernel takes a connection, and a
# frozen server's kernel does: http:, redis: and databases are asked for an answer and do not have
# that blind spot.
#
# A leak is a gauge that rose over the last 12, 24, 48, 96 or 192 safe points of an attempt: by more
# than chance gives to one that goes up and down as it does (noise, saw teeth and one step are not),
# as fast at the end as before (warming up is not), above what it was ever before, and by an amount
# that matters. Where each change is up or down by chance, their sum is over x times the root of
# their squares with a chance below e^(-x*x/2) (Hoeffding): of 100 random walks of 150 batches, all
# looked at after each, one to four are called a leak. Ten even steps are one. A saw tooth longer
# than those points looks like a leak the first time, and never again.

KILL_SHARE = 4  # below a quarter of min_available the kernel's killer is near
PROBE_START_S = 10.0  # what a busy machine may take to start the probes' process
LEAK_POINTS = (192, 96, 48, 24, 12)  # with the warm-up fewer than safe_points() gives
LEAK_WARM_UP = 3
LEAK_CHANCE = 10  # x*x; twelve points that rise evenly have 11
LEAK_LEAST = {"rss_bytes": 16_000_000}  # over all points; 4 of any other gauge


class Factor(NamedTuple):
    """One of the `FACTORS` as a check found it: its state, and why in words."""

    name: str
    state: Wellness
    why: str
    critical: bool = False  # if it is bad, it pauses alone
    wanted: bool = False  # no worker runs, and none is started while it is bad

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


class Answer(NamedTuple):
    """What came back from asking for one need."""

    name: str
    state: Wellness
    why: str
    elapsed_s: float = 0.0
    peers: Sequence[Peer] = ()  # the other ends that connections to it may have


class Verdict(NamedTuple):
    """Whether to pause, and why in one line."""

    pause: bool
    why: str

    def __str__(self) -> str:
        return "pause" if self.pause else "go on"


WELL = Verdict(pause=False, why="well")


# -- from what was seen to factors ---------------------------------------------------------------


def memory_factor(
    memory: Memory | None, usage: Usage | None, health: HealthConfig, max_rss_bytes: int = 0
) -> Factor:
    """Judge memory: what is left of it, and what the worker uses."""
    state, why = Wellness.UNKNOWN, "what is left cannot be read"
    if memory:
        left, limit = size_text(memory.available_bytes), size_text(memory.limit_bytes)
        why = f"{left} available of {limit} ({memory.source})"
        if memory.available_bytes * KILL_SHARE < health.min_available_bytes:
            return Factor("memory", Wellness.BAD, f"{why}, about to be killed", critical=True)
        low = memory.available_bytes < health.min_available_bytes
        state = Wellness.BAD if low else Wellness.OK
    if usage and max_rss_bytes and usage.rss_bytes > max_rss_bytes:
        used, most = size_text(usage.rss_bytes), size_text(max_rss_bytes)
        state, why = Wellness.BAD, f"the worker uses {used}, over its max_rss of {most}"
    return Factor("memory", state, why, state == Wellness.BAD and "memory" in health.critical)


def needs_factor(
    name: str,
    answers: Iterable[tuple[Need, Answer]],
    health: HealthConfig,
    usage: Usage | None = None,
) -> Factor:
    """Judge what belongs to a factor: it is as well as the worst of that."""
    mine = [pair for pair in answers if pair[0].factor == name]
    judged = [(need, with_count(need, answer, usage)) for need, answer in mine]
    for state in (Wellness.BAD, Wellness.UNKNOWN):
        found = [(need, answer) for need, answer in judged if answer.state == state]
        if found:
            why = ", ".join(f"{asked(need)} {answer.why}".strip() for need, answer in found)
            critical = name in health.critical or any(need.critical for need, _ in found)
            return Factor(name, state, why, critical and state == Wellness.BAD)
    return Factor(name, Wellness.OK, "all answer" if judged else "none is declared")


def with_count(need: Need, answer: Answer, usage: Usage | None) -> Answer:
    """Return an answer in which the number of connections that the worker has is judged too."""
    count = usage.connections.get(need.name) if usage else None
    if answer.state != Wellness.OK or not need.normal or count is None:
        return answer
    why = f"{count} connection{'s' * (count != 1)}, {need.normal} are normal"
    state = Wellness.BAD if count > need.normal else Wellness.OK
    return answer._replace(state=state, why=why)


def asked(need: Need) -> str:
    """Return what is asked for a need, `cache tcp://10.0.0.5:6379`; without a password."""
    where = need.url if isinstance(need.url, str) else ""
    return mask_secrets(" ".join(filter(None, (need.name, where, _typed(*need.command)))))


def size_text(size_bytes: float) -> str:
    """Return a size for people, `120 MB`, `3.1 GB`."""
    unit, name = next(pair for pair in SIZE_UNITS if size_bytes >= pair[0] or pair[0] == 1)
    amount = size_bytes / unit
    return f"{amount:.1f} {name}" if amount < 10 and unit > 1 else f"{amount:.0f} {name}"


SIZE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
DISK = Need("dependencies", "the state folder's disk", "", 0, critical=True, jobs=())
LEDGER = DISK._replace(name="the ledger")
GROWTH = Need("connections", "", "", 0, critical=False, jobs=())


def disk_answer(free_bytes: int, min_free_bytes: int) -> Answer:
    """Judge the disk that the ledger and the checkpoints are on."""
    low = free_bytes < min_free_bytes
    why = f"has {size_text(free_bytes)} free, min_free is {size_text(min_free_bytes)}"
    return Answer(DISK.name, Wellness.BAD if low else Wellness.OK, why)


# -- from factors to a verdict ---------------------------------------------------------------------


def verdict_of(factors: Iterable[Factor]) -> Verdict:
    """Judge factors: two that are bad pause, or one critical or wanted; unknown is not bad."""
    bad = [factor for factor in factors if factor.state == Wellness.BAD]
    why = "; ".join(f"{factor.name}: {factor.why}" for factor in bad)
    if len(bad) == 1 and bad[0].critical:
        return Verdict(pause=True, why=f"a critical factor is bad: {why}")
    if len(bad) == 1 and bad[0].wanted:
        why = f"a declared need is bad: {why}; no attempt begins until it answers"
        return Verdict(pause=True, why=why)
    if len(bad) > 1:
        count = "two" if len(bad) == 2 else "three"
        return Verdict(pause=True, why=f"{count} factors are bad: {why}")
    if bad:
        return Verdict(pause=False, why=f"one factor is bad, which alone does not pause: {why}")
    return WELL


def _badness(factor: Factor | None) -> int:
    """Return how bad a factor is: 2 if it is critical, 1, 0 if it is good, -1 if nobody knows."""
    if factor is None or factor.state == Wellness.OK:
        return 0
    return -1 if factor.state == Wellness.UNKNOWN else 1 + factor.critical


class HealthMonitor:
    """Makes of one check after another a verdict that does not flap."""

    def __init__(self, health: HealthConfig, random: Callable[[], float]) -> None:
        self._health, self._random = health, random  # random: from 0 to below 1
        self._bad: dict[str, Factor] = {}  # the factors that have become bad, as last seen so
        self._in_a_row = dict.fromkeys(FACTORS, (0, 0))  # how bad it was, in how many checks
        self._since_well = 0
        self.verdict = WELL  # the newest

    def judge(self, factors: Sequence[Factor]) -> str:
        """Take one check's factors up; return a line for people, empty if nothing changed."""
        before, paused = set(self._bad), self.verdict.pause
        for factor in factors:
            self._take(factor)
        self.verdict = verdict_of(self._bad.values())
        well_now = not any(factor.state == Wellness.BAD for factor in factors)
        self._since_well = 0 if well_now else self._since_well + 1
        changed = set(self._bad) != before or self.verdict.pause != paused
        return self._told(before, factors) if changed else ""

    def _take(self, factor: Factor) -> None:
        """Let one factor become worse or better, if it was so often enough in a row."""
        name, was = factor.name, _badness(self._bad.get(factor.name))
        now, (seen, count) = _badness(factor), self._in_a_row[factor.name]
        count = count + 1 if now == seen else 1
        self._in_a_row[name] = now, count
        most = self._health.good_in_a_row if was else self._health.bad_in_a_row
        at_once = now > 0 and (now >= was > 0 or factor.critical or factor.wanted)
        if now < 0 or not (at_once or (now != was and count >= most)):
            return
        if now:
            self._bad[name] = factor
        else:
            del self._bad[name]

    def _told(self, before: set[str], factors: Sequence[Factor]) -> str:
        """Return the line for a change: what is bad now, or what is well again."""
        well = [f for f in factors if f.name in before - self._bad.keys()]
        said = "; ".join(f"{factor.name}: {factor.why}" for factor in well)
        again = f"; well again: {said}" if well else ""
        return f"health: {self.verdict}: {self.verdict.why}{again}"

    def wait_s(self) -> float:
        """Return how long to wait: seconds after a first bad check, then longer and longer."""
        health = self._health
        wait_s = health.check_interval_s
        if self._since_well or self._bad:
            doubled = health.recheck_after_s * 2 ** min(max(self._since_well - 1, 0), 30)
            wait_s = min(doubled, wait_s)
        return wait_s * (0.75 + self._random() / 2)


# -- leaks --------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """A gauge that rises from safe point to safe point."""

    gauge: str
    slope: float  # a batch
    batches: int

    def __str__(self) -> str:
        amount = size_text(self.slope) if self.gauge == "rss_bytes" else f"{self.slope:.2g}"
        name = self.gauge.removesuffix("_bytes").replace("_", " ")
        return f"{name} grew {amount} a batch over {self.batches} batches"


def growth(gauge: str, points: Sequence[tuple[int, int]]) -> Growth | None:
    """Return how a gauge leaks, if it does.

    `points` are an attempt's safe points, oldest first: the commit's number and what was used.
    """
    points = points[LEAK_WARM_UP:]
    for count in LEAK_POINTS:
        before, newest = points[:-count], points[-count:]
        values = [used for _, used in newest]
        highest = max((used for _, used in before), default=-1)
        if len(values) == count and values[-1] > highest and _rises(values):
            rose, batches = values[-1] - values[0], newest[-1][0] - newest[0][0]
            if rose >= LEAK_LEAST.get(gauge, 4):
                return Growth(gauge, rose / batches, batches + 1)
    return None


def _rises(values: Sequence[int]) -> bool:
    """Tell whether values rise by more than chance, and as fast at the end as before."""
    rose, half = values[-1] - values[0], values[len(values) // 2] - values[0]
    squares = sum((after - before) ** 2 for before, after in pairwise(values))
    return rose > 0 and rose * rose >= LEAK_CHANCE * squares and 3 * half <= 2 * rose


# -- probes: the process that asks ---------------------------------------------------------------


class Unwell(Exception):
    """An answer came back, and it was not the right one; says which."""


class NotAsked(Exception):
    """The question could not be put; says why."""


def probe_main() -> None:
    """Answer the questions in the file handed over, a line of JSON each; end the whole group."""
    import threading

    host, pen = Host(), threading.Lock()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # a supervisor blocks its stops
    host.ask_for_signal_at_parents_death()

    def tell(answer: Answer) -> None:
        with pen:
            write_line(1, json.dumps(answer))

    def ask(need: Need) -> None:
        tell(answer_to(need, host))

    try:
        with os.fdopen(int(sys.argv[1])) as file:
            needs = [Need(*row) for row in json.load(file)]
        began = host.monotonic()
        needs.sort(key=attrgetter("timeout_s"))
        asking = [threading.Thread(target=ask, args=(n,), daemon=True) for n in needs]
        for thread in asking:
            thread.start()
        for need, thread in zip(needs, asking, strict=True):
            thread.join(max(began + need.timeout_s - host.monotonic(), 0))
            if thread.is_alive():
                passed_s = host.monotonic() - began
                tell(Answer(need.name, Wellness.BAD, need.silence, passed_s))
    finally:
        os.killpg(0, signal.SIGKILL)  # commands that hang, and this process


def answer_to(need: Need, host: Host) -> Answer:
    """Ask for one need and return the answer, whatever happens."""
    began, peers = host.monotonic(), list[Peer]()
    for secret in need.headers.values():
        remember_secret(secret)
    remember_url(need.address)
    _remember_parts("", need.address)
    ask = PROBES[need.address.partition(":")[0]]
    try:
        state, why = Wellness.OK, ask(need, peers)
    except TimeoutError:
        state, why = Wellness.BAD, need.silence
    except (NotAsked, ImportError) as error:
        state, why = Wellness.UNKNOWN, f"cannot be asked: {error}"
    except BaseException as error:  # noqa: BLE001 - a driver may raise anything
        state, why = Wellness.BAD, _said_why(error)
    why = mask_secrets(" ".join(why.split()))[:300]
    return Answer(need.name, state, why, host.monotonic() - began, [*dict.fromkeys(peers)])


def _said_why(error: BaseException) -> str:
    """Return in words why a probe failed."""
    import http.client

    match error:
        case Unwell():
            return str(error)
        case ConnectionRefusedError():
            return "refuses connections"
        case BlockingIOError():
            return "takes no more connections, its backlog is full"
        case OSError(strerror=str(why)):
            return f"cannot be reached: {why}"
        case ValueError() | http.client.InvalidURL():  # parsers quote what they were given
            return f"cannot be asked as it is written ({type(error).__name__})"
    return f"does not answer as it should: {str(error) or type(error).__name__}"


def _connected(need: Need, peers: list[Peer], port: int) -> Any:
    """Connect to the host of a URL and return the socket; note all addresses it has."""
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(need.address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise Unwell(f"its name cannot be resolved: {getattr(error, 'strerror', error)}") from error
    peers += dict.fromkeys(Peer(str(address[0]), int(address[1])) for *_, address in found)
    for peer in peers[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection(peer, need.timeout_s)
    return socket.create_connection(peers[-1], need.timeout_s)


def _ask_tcp(need: Need, peers: list[Peer]) -> str:
    _connected(need, peers, 0).close()
    return "takes connections"


def _ask_unix(need: Need, peers: list[Peer]) -> str:
    import socket

    path = str(Path(url_path(need.address)).absolute())
    peers.append(Peer(path))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(need.timeout_s)
        try:
            client.connect(path)
        except FileNotFoundError:
            raise Unwell("is not there") from None
    return "takes connections"


def _ask_redis(need: Need, peers: list[Peer]) -> str:
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(need.address)
    login = [unquote(part) for part in (parts.username, parts.password) if part]
    with _connected(need, peers, 6379) as server, server.makefile("rwb") as stream:
        for words in (["AUTH", *login], ["PING"])[not parts.password :]:
            line = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            stream.write(f"*{len(words)}\r\n{line}".encode())
            stream.flush()
            reply = stream.readline(500).decode(errors="replace").strip()
            if not reply.startswith("+"):
                raise Unwell(f"answers {words[0]} with {reply or 'nothing'}")
    return f"answers PING with {reply[1:]}"


def _ask_http(need: Need, peers: list[Peer]) -> str:
    import base64
    import http.client
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(need.address)
    secure, headers = parts.scheme == "https", {"User-Agent": f"batchrun/{VERSION}"}
    headers |= {"Content-Type": "application/json"} if need.body else {}
    headers |= need.headers
    if parts.password is not None:
        login = f"{unquote(parts.username or '')}:{unquote(parts.password)}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
    server = _connected(need, peers, 443 if secure else 80)
    if secure:
        import ssl

        server = ssl.create_default_context().wrap_socket(server, server_hostname=parts.hostname)
    connection = http.client.HTTPConnection(parts.netloc.rpartition("@")[2])
    connection.sock = server
    path = (parts.path or "/") + f"?{parts.query}" * bool(parts.query)
    method, body = ("POST", need.body.encode()) if need.body else ("GET", None)
    connection.request(method, path, body, headers)
    code = connection.getresponse().status
    if code != need.expect and (need.expect or code // 100 != 2):
        raise Unwell(f"answers HTTP {code} instead of {need.expect or '2xx'}")
    return f"answers HTTP {code}"


def _ask_sqlite(need: Need, peers: list[Peer]) -> str:
    path = Path(url_path(need.address)).resolve()
    peers.append(Peer(str(path)))
    if not path.exists():
        raise Unwell("is not there")
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(int(need.timeout_s * 1000))
    count = connection.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'table'").get
    return f"can be read, {count} tables"


def _ask_postgres(need: Need, peers: list[Peer]) -> str:
    import socket
    from urllib.parse import urlsplit

    import psycopg  # an extra

    if urlsplit(need.address).hostname and "," not in need.address:
        _connected(need, peers, 5432).close()
    try:
        psycopg.conninfo.conninfo_to_dict(need.address)
    except psycopg.Error:
        raise ValueError from None  # its words quote the address
    limit_s = max(2, int(need.timeout_s))
    with psycopg.connect(need.address, autocommit=True, connect_timeout=limit_s) as connection:
        end = socket.socket(fileno=os.dup(connection.fileno())).getpeername()
        peers.append(Peer(end) if isinstance(end, str) else Peer(*end[:2]))
        connection.execute("SELECT 1")
    return "answers SELECT 1"


def _ask_command(need: Need, peers: list[Peer]) -> str:
    import subprocess

    del peers
    pipe, out, told = subprocess.PIPE, subprocess.STDOUT, os.memfd_create("told")
    write_all(told, need.body.encode())
    os.lseek(told, 0, os.SEEK_SET)
    try:
        command = subprocess.Popen(need.command, stdin=told, stdout=pipe, stderr=out)
    except OSError as error:
        raise NotAsked(error.strerror) from error
    said, output = b"", cast("IO[bytes]", command.stdout).fileno()
    while piece := os.read(output, 65_536):
        said = (said + piece)[-1000:]
    code = command.wait()
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    ended = f"ended with exit {code}" if code >= 0 else f"was killed by signal {-code}"
    if code:
        raise Unwell(f"{ended}: {last}" if last else ended)
    return ended


PROBES: dict[str, Callable[[Need, list[Peer]], str]] = {
    "": _ask_command,
    "tcp": _ask_tcp,
    "unix": _ask_unix,
    "redis": _ask_redis,
    "http": _ask_http,
    "https": _ask_http,
    "sqlite": _ask_sqlite,
    "postgres": _ask_postgres,
    "postgresql": _ask_postgres,
}


# -- probes: the process that waits --------------------------------------------------------------


class Inquiry:
    """One round of probes, in a child process; never waits but in `wait`.

    Call `poll` until it is true, or `end` at any time; a supervisor before it reaps the children
    of others. One object is one round.
    """

    def __init__(self, needs: Iterable[Need], folder: Path, host: Host) -> None:
        self._host, self._rest = host, b""
        self._process: subprocess.Popen[bytes] | None = None
        self.answers: dict[str, Answer] = {}  # what has come back so far, by the need's name
        self._waiting: dict[str, Need] = {}
        for need in needs:
            try:
                self._waiting[need.name] = need.resolved(folder)
            except ValueError as error:
                self.answers[need.name] = Answer(need.name, Wellness.UNKNOWN, str(error))
        limits = [need.timeout_s for need in self._waiting.values()]
        self._until_s = host.monotonic() + PROBE_START_S + max(limits, default=0)
        if self._waiting:
            self._start(folder)

    def _start(self, folder: Path) -> None:
        import subprocess  # 25 ms, where something is asked

        file = os.memfd_create("questions")
        try:
            reach("probe.start")
            write_all(file, json.dumps(list(self._waiting.values())).encode())
            os.lseek(file, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                own_interpreter("probe_main", str(file)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[file],
                process_group=0,
                cwd=folder,
            )
            os.set_blocking(cast("IO[bytes]", self._process.stdout).fileno(), False)
        except OSError as error:
            self._give_up(f"cannot be asked: {error.strerror}")
        finally:
            os.close(file)

    def poll(self) -> bool:
        """Take up what has come back; tell whether nothing is waited for any more."""
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(self._process.stdout.fileno(), 65_536):
                    self._take(piece)
                self._give_up("cannot be asked: the probes' process went away")
            if self._waiting and self._host.monotonic() > self._until_s:
                self._give_up("cannot be asked: the probes' process does not get on")
            if not self._waiting:
                self.end()
        return not self._waiting

    def _take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, state, why, elapsed_s, peers = json.loads(line)
            found = tuple(Peer(*peer) for peer in peers)
            if self._waiting.pop(name, None):  # the first word counts
                why, state = mask_secrets(why), Wellness(state)
                self.answers[name] = Answer(name, state, why, elapsed_s, found)

    def _give_up(self, why: str) -> None:
        for name in self._waiting:
            self.answers[name] = Answer(name, Wellness.UNKNOWN, why)
        self._waiting.clear()

    def end(self) -> None:
        """Kill the probes, whatever they are at."""
        process, self._process = self._process, None
        if process is None:
            return
        self._give_up("was not asked to the end")
        with contextlib.suppress(OSError):  # it may have killed itself
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):  # one that hangs in the kernel is reaped later
            process.wait(0.5)
        if process.stdout:
            process.stdout.close()

    def wait(self) -> dict[str, Answer]:
        """Wait for the end of the round and return the answers."""
        try:
            while not self.poll():
                self._host.sleep(BUSY_STEP_S)
        finally:
            self.end()
        return self.answers


# -- on time -------------------------------------------------------------------------------------


class HealthWatch:
    """Takes the readings and makes the checks of one run when they are due; never waits.

    Attributes:
        due_s: when the next check is due, on the monotonic clock.
    """

    def __init__(self, config: Config, job: str, ledger: Ledger, host: Host) -> None:
        self._config, self._job, self._ledger, self._host = config, config.job(job), ledger, host
        self._health, self._needs = config.health, config.health.needs_of(job)
        self._monitor = HealthMonitor(self._health, lambda: os.urandom(1)[0] / 256)
        self._peers: dict[str, Sequence[Peer]] = {}
        self._inquiry: Inquiry | None = None
        self._began_s = now_s = host.monotonic()
        self._sample_s = now_s + self._health.sample_interval_s
        run = ledger.unfinished(job)
        was_well = run is None or run.reason != Reason.HEALTH
        self.due_s = now_s + self._health.check_interval_s * was_well
        self._of_ledger = Answer(LEDGER.name, Wellness.OK, "")
        self._leaks: set[tuple[int, str]] = set()  # that were named: generation and gauge

    @property
    def verdict(self) -> Verdict:
        """The newest verdict."""
        return self._monitor.verdict

    @property
    def is_due(self) -> bool:
        """Whether a check is due, or on its way."""
        return self._inquiry is not None or self._host.monotonic() >= self.due_s

    def beat(self, run: Run, generation: int, worker: int | None) -> Verdict:
        """Do what is due, for a worker's pid if there is one; call it a few times a second.

        Raises:
            LostOwnership: another generation took the run over.
            OutcomeUnknown: the ledger's disk cannot be trusted any more.
        """
        now_s = self._host.monotonic()
        if now_s >= self._sample_s:
            self._sample_s = now_s + self._health.sample_interval_s
            seen = self._host.memory(worker), self._used(worker), self._host.memory_pressure()
            self._keep(self._ledger.record_reading, run, generation, *seen)
        if self._inquiry is None and now_s >= self.due_s:
            self._began_s = now_s
            self._inquiry = Inquiry(self._needs, self._config.folder, self._host)
        if self._inquiry is not None and self._inquiry.poll():
            answers, self._inquiry = self._inquiry.answers, None
            self._check(run, generation, worker, answers)
        return self.verdict

    def check_soon(self) -> None:
        """Let the next beat begin a check, as before a new attempt."""
        self.due_s = self._host.monotonic()

    def end(self) -> None:
        """Kill the probes that are on their way; the next beat asks anew."""
        if self._inquiry is not None:
            self._inquiry.end()
            self._inquiry = None

    def _used(self, worker: int | None) -> Usage | None:
        return None if worker is None else self._host.usage(worker, self._peers)

    def _check(
        self, run: Run, generation: int, worker: int | None, answers: Mapping[str, Answer]
    ) -> None:
        """Judge what came back, and record it; say what changed."""
        self._peers |= {
            need.name: answers[need.name].peers or self._peers.get(need.name, ())
            for need in self._needs
            if need.normal
        }
        factors = self._factors(worker, answers, self._grown(run, generation) if worker else None)
        told, now_s = self._monitor.judge(factors), self._host.monotonic()
        self.due_s = now_s + self._monitor.wait_s()
        found = {factor.name: str(factor) for factor in factors}
        judged = found, str(self.verdict), self.verdict.why, now_s - self._began_s
        self._keep(self._ledger.record_health_check, run, generation, *judged)
        if told:
            self._tell(run, SAID, told)

    def _factors(
        self, worker: int | None, answers: Mapping[str, Answer], grown: Growth | None
    ) -> list[Factor]:
        config, health, usage = self._config, self._health, self._used(worker)
        pairs = [(need, answers[need.name]) for need in self._needs]
        disk = disk_answer(self._host.free_bytes(config.state), config.min_free_bytes)
        pairs += [(DISK, disk), (LEDGER, self._of_ledger)]
        if grown:
            pairs.append((GROWTH, Answer("", Wellness.BAD, str(grown))))
        of_needs = [
            needs_factor(name, pairs, health, usage)._replace(wanted=worker is None)
            for name in ("connections", "dependencies")
        ]
        left, most_bytes = self._host.memory(worker), self._job.max_rss_bytes
        return [memory_factor(left, usage, health, most_bytes), *of_needs]

    def _grown(self, run: Run, generation: int) -> Growth | None:
        """Name what leaks, once a gauge and attempt; return the growth of connections, if any."""
        points = self._ledger.safe_points(run, generation)
        found = {gauge: grown for gauge in points if (grown := growth(gauge, points[gauge]))}
        for gauge, grown in found.items():
            if (generation, gauge) not in self._leaks:
                self._leaks.add((generation, gauge))
                self._tell(run, LEAK, str(grown))
        return found.get("connections")

    def _tell(self, run: Run, what: str, line: str) -> None:
        self._keep(functools.partial(self._ledger.note, "health", what, line, run=run))

    def _keep(self, record: Callable[..., object], *what: object) -> None:
        """Record something; a ledger that cannot be written is a finding of the next check."""
        self._of_ledger = Answer(LEDGER.name, Wellness.OK, "")
        try:
            record(*what)
        except OutcomeUnknown:
            raise
        except (StateDirectoryError, Busy) as error:
            self._of_ledger = Answer(LEDGER.name, Wellness.BAD, f"cannot be written: {error.what}")


# -- all of it once, explained -------------------------------------------------------------------


class Examined(NamedTuple):
    """What `doctor` asked once: what came back, how long it took, and what it means."""

    name: str
    asked: str
    state: Wellness
    answer: str
    means: str
    elapsed_s: float = 0.0
    todo: str = ""  # what to type, or to do, if it is not well


def examine_host(state: StateDirectory, config: Config, host: Host) -> Iterator[Examined]:
    """Look at memory, the state directory and the ledger; changes nothing."""
    memory = memory_factor(host.memory(), None, config.health)
    least = f"below {size_text(config.health.min_available_bytes)} (min_available)"
    means = f"{least} memory is bad, below a quarter of it critical"
    todo = "ps -eo pid,rss,args --sort=-rss | head" * (memory.state != Wellness.OK)
    yield Examined("memory", "memory", memory.state, memory.why, means, todo=todo)
    per_cent = host.memory_pressure()
    found = "not told by this kernel" if per_cent is None else f"{per_cent:g} % in the last 10 s"
    means = "how much somebody waits for memory; it is recorded and not judged"
    yield Examined("pressure", "memory pressure", Wellness.OK, found, means)
    fit, found, todo = Wellness.OK, "is not there yet; a first run makes it", ""
    try:
        state.require_fit(create=False, starts=True)
        state.open_ledger(create=False, write=False).close()
        found = state.warning() or "can be used"
    except NotFound:
        pass
    except BatchrunError as error:
        fit, found, todo = Wellness.BAD, error.what, error.todo.removeprefix("Type: ")
    means = "without it no run starts, and one that runs is paused at once"
    yield Examined("state", f"state {state.path}", fit, found, means, todo=todo)


def examine_needs(
    state: StateDirectory, config: Config, job: str | None, host: Host
) -> Iterator[Examined]:
    """Ask once for what a job needs, or any does, and how its worker stands; changes nothing."""
    needs, usage = config.health.needs_of(job), None
    answers = Inquiry(needs, config.folder, host).wait()
    if job and (worker := _living_worker(state, job, host)):
        ends = {need.name: answers[need.name].peers for need in needs if need.normal}
        began, usage = host.monotonic(), host.usage(worker, ends)
        said, took_s = usage_text(usage) if usage else "is gone", host.monotonic() - began
        means = "growth from safe point to safe point is a leak"
        yield Examined("worker", f"worker {worker}", Wellness.OK, said, means, round(took_s, 6))
    for need in needs:
        answer = with_count(need, answers[need.name], usage)
        yield examined(need, answer, _consequence(need, answer.state, config.health), config)


def examined(need: Need, answer: Answer, means: str, config: Config) -> Examined:
    """Return what came back from asking for a need, and what it means."""
    about, elapsed_s = asked(need), round(answer.elapsed_s, 6)
    todo = f"see to it, or correct its entry in {config.path}" * (answer.state != Wellness.OK)
    return Examined(need.name, about, answer.state, answer.why, means, elapsed_s, todo)


def slow_batches(state: StateDirectory, job: JobConfig) -> Iterator[Examined]:
    """Yield a warning if a stop of a job would often interrupt a batch."""
    with contextlib.suppress(BatchrunError), state.reading() as ledger:
        run = ledger.latest(job.name)
        often_s = ledger.slow_batch_s(run)
        if often_s > job.stop_grace_s:
            why = f"one of 20 takes {often_s:.3g} s or more; stop_grace is {job.stop_grace_s:g} s"
            means = "a stop interrupts such a batch, which is done again"
            todo = f"set a smaller batch_size or a longer stop_grace in [jobs.{job.name}]"
            about = f"batches of {job.name}"
            yield Examined(job.name, about, Wellness.BAD, why, means, todo=todo)


def _consequence(need: Need, state: Wellness, health: HealthConfig) -> str:
    """Return what it means that a need is as it is."""
    if state == Wellness.UNKNOWN:
        return "unknown is not bad: nobody would notice if it went away"
    alone = need.critical or need.factor in health.critical
    follows = "that pauses a run alone" if alone else "two bad factors pause a run"
    return f"while it is bad, {need.factor} is bad: {follows}"


def _living_worker(state: StateDirectory, job: str, host: Host) -> int | None:
    """Return the pid of the worker of a job's run that goes on now."""
    with contextlib.suppress(BatchrunError), state.reading() as ledger:
        run = ledger.unfinished(job)
        attempt = run and ledger.last_attempt(run)
        if attempt and attempt.worker and host.is_alive(attempt.worker):
            return attempt.worker.pid
    return None


def usage_text(usage: Usage) -> str:
    """Return what a worker uses, for people."""
    files = "?" if usage.open_files is None else usage.open_files
    rest = f"{files} open files, {usage.threads} threads, {usage.children} children"
    return f"{size_text(usage.rss_bytes)} of memory, {rest}"


# ======================================================================================
# 8. Jobs: what a job is, and what it is given; sources
# ======================================================================================
#
# A job is a generator function. It does the work of a batch, then yields the batch; yielding
# commits. Every attempt runs the function from its first line: finished loops yield nothing,
# finished steps return their recorded result. Stopping is `close()` on the generator, so cleanup
# in reverse order is Python's own.
#
# What an attempt holds is released at its end, last in, first out: first the job's own frame, then
# what enter(), connect(), on_exit() and cleanup() were given. Each release is tried, whatever the
# others did; cut off after `cleanup_timeout`; named with its time and its error in the report; and
# hides no error of the job. cleanup() alone outlives the process: it is recorded before its
# resource is made, and called once at least after that, so its function must take a resource that
# is not there, or not any more. on_finish() records likewise what is to be removed with the run,
# not with the attempt: it is called after all else in the attempt that succeeds, or before the run
# is cancelled.
#
# A recorded cleanup whose last call failed, or ended its process, is called in a child process from
# then on: whatever it does there, the others are called, and the job gets to its batches.
#
# An approval is a commit like a step, whose result is a person's answer. While that is not there
# the attempt ends: the question is in the ledger, once, and no process waits. The answer belongs to
# the name of the question, whatever a later version of the job says in its summary.
#
# What the job's calls of batchrun raise is final: whoever swallows it gets it again with the next
# call, and no commit is made any more. Only connect(), enter() and on_exit() raise like any other
# code: they touch neither loop nor commit.
#
# A target is a connection in which batchrun keeps one row per run and loop in `batchrun_mark`.
# The mark commits together with the batch's rows, fenced by the generation:
#
#   claim   before the first read and before any other use of the target, in a transaction of its
#           own: generation = ours where it is lower. So it waits behind an old transaction.
#   judge   number = the checkpoint's: agreed. One more than the run's newest commit, in a loop that
#           is not finished: that batch is done, roll forward. Anything else: the target was
#           restored, or is another one.
#   mark    the last statement of `batch.transaction()`: where generation = ours and number is
#           lower. 0 rows = lost ownership.
#
# In a retry of rejects each loop reads what was taken up for it in the place of its source, with
# the source's key and, for raw records, its parse=. No fingerprint is compared then.
#
# A rollback is driven like the job, by the generator that @job(rollback=) names. What it reads is
# `ctx.remembered`: the rows of the batches that are undone, newest batch first, last row first.
#
# With a target each record is applied exactly once; without, at least once, and at most one batch
# is repeated. No batch is committed while another connection that connect() or enter() was asked
# for has open writes, as far as its driver tells: its release would roll them back.

S = TypeVar("S")

MARK_TABLE = """CREATE TABLE IF NOT EXISTS batchrun_mark (
  run TEXT NOT NULL, loop TEXT NOT NULL, number BIGINT NOT NULL, generation BIGINT NOT NULL,
  first_key TEXT, last_key TEXT, cursor TEXT, counts TEXT NOT NULL, PRIMARY KEY (run, loop))"""


# -- declaring a job -----------------------------------------------------------------


class Job(NamedTuple):
    """A job's function and what it declares; what the `job` decorator returns; see there."""

    function: Callable[..., Iterator[Any]]
    settings: type | None = None
    version: int = 1
    resumes: Mapping[int, Callable[[Any], Any]] | None = None
    retry_if: Callable[[BaseException], object] | None = None
    not_done: Callable[[BaseException], object] | None = None
    rollback: Callable[..., Iterator[Any]] | None = None

    @property
    def words(self) -> str:
        """The function's or module's docstring."""
        module = sys.modules.get(self.function.__module__)
        text = self.function.__doc__ or (module and module.__doc__) or ""
        return "\n".join(line.strip() for line in text.strip().split("\n"))

    def cursor_from(self, checkpoint: Checkpoint) -> Any:
        """Return a checkpoint's cursor as one of this version, converted if it is an older one's.

        Raises:
            PersonNeeded: there is no converter, or it gives no cursor; says which versions do.
        """
        cursor, version = decode_cursor(checkpoint.cursor), checkpoint.job_version
        converters = self.resumes or {}
        known = sorted({self.version, *converters})
        written = f"The checkpoint of run {checkpoint.run} was written by version {version}"
        stands = "Nothing was done; the checkpoint stands."
        if version not in known:
            raise PersonNeeded(
                f"{written} of the job {checkpoint.job}.",
                why=f"The job's file understands: {', '.join(map(str, known))}.",
                unchanged=stands,
                todo="Add a converter to @job(resumes={...}), install that version again, or type:"
                f" batchrun run {checkpoint.job} --fresh",
            )
        ours = "undoes" in checkpoint.link  # a cursor of ctx.remembered, or of another loop there
        if ours or version == self.version or checkpoint.kind != "batch":  # no loop was under way
            return cursor
        try:
            converted = converters[version](cursor)
            require_round_trip(converted)
            if converted is None and cursor is not None:
                raise CursorError("It returned None, from which the run would begin at record 1.")
        except (Exception, SystemExit) as error:
            raise PersonNeeded(
                f"{written}, and the converter to version {self.version} fails.",
                why=f"It was given {mask_secrets(repr(cursor))}. {error_text(error)}",
                unchanged=stands,
                todo=f"Mend it in @job(resumes={{{version}: ...}}), or install version {version}"
                " again.",
            ) from error
        return converted

    def settings_from(
        self, job_config: JobConfig, overrides: Mapping[str, str], folder: Path
    ) -> Any:
        """Return the settings of configuration and `--set`, or say all that is wrong with them."""
        name, raw = job_config.name, job_config.settings
        if self.settings is not None:
            return build_settings(self.settings, raw, job=name, overrides=overrides, folder=folder)
        if raw or overrides:
            given = ", ".join([*raw, *overrides])
            message = f"The job {name} has no settings, but {given} is given."
            raise ConfigurationError(message, unchanged="Nothing was begun.")
        return None

    def undoing(self, run: Run) -> Callable[..., Iterator[Any]]:
        """Return what undoes a run, or goes on with undoing one; ConfigurationError without it."""
        if self.rollback is not None:
            return self.rollback
        of = run.rollback_of or run.id
        raise ConfigurationError(
            f"The job {run.job} has no rollback, so run {of} cannot be undone.",
            why="How to undo a batch, only the job can say: @job(rollback=undo).",
            unchanged="Nothing was undone.",
            todo="Give it a rollback that reads ctx.remembered, then type this again.",
        )

    def __call__(self, context: Any) -> Iterator[Any]:
        """Begin the job's generator."""
        return self.function(context)


@overload
def job(function: Callable[..., Iterator[Any]], /) -> Job: ...


@overload
def job(
    *,
    settings: type | None = None,
    version: int = 1,
    resumes: dict[int, Callable[[Any], Any]] | None = None,
    retry_if: Callable[[BaseException], object] | None = None,
    not_done: Callable[[BaseException], object] | None = None,
    rollback: Callable[..., Iterator[Any]] | None = None,
) -> Callable[[Callable[..., Iterator[Any]]], Job]: ...


def job(function: Callable[..., Any] | None = None, /, **declared: Any) -> Any:
    """Declare a generator function as a job.

    Args:
        function: the generator function, when used without parentheses.
        **declared: any of these:
            settings: a frozen dataclass; its fields are the keys that `[jobs.NAME]` may have.
            version: raise it when older checkpoints do not fit any more.
            resumes: older version -> function from its cursor to one of this version.
            retry_if: called with an exception of the job; whether trying the batch again may help.
            not_done: called with an exception of an operation's call; whether it says for sure that
                nothing was sent, or that the destination refused. Else the outcome is unknown.
            rollback: a generator function like the job, which reads ctx.remembered and undoes it.

    Raises:
        JobError: one of the functions is no generator function.
    """

    def declare(function: Callable[..., Any]) -> Job:
        for each in filter(None, (function, declared.get("rollback"))):
            if not each.__code__.co_flags & 0x20:  # inspect.CO_GENERATOR, without importing it
                raise JobError(
                    f"The job {each.__name__} never yields.",
                    why="A job yields each batch after its work; yielding is what commits it.",
                    unchanged="Nothing was begun.",
                    todo="End the loop's body with: yield batch",
                )
        return Job(function, **declared)

    return declare if function is None else declare(function)


def load_job(job_config: JobConfig) -> Job:
    """Import a configured job's file and return the job; ConfigurationError says what is wrong."""
    path, name = job_config.path, job_config.module
    check_trusted(path.parent, what="the jobs folder")
    if not path.exists():
        raise ConfigurationError(
            f"There is no file {path}, which the job {job_config.name} is to be in.",
            unchanged="Nothing was begun.",
            todo="Write it, or name the file it is in: "
            f'uses = "FILE:FUNCTION" in {_heading(job_config.name)}.',
        )
    check_trusted(path, what="the job's file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) != str(path):
        module = _imported(name, path)
    found = getattr(module, job_config.function, None)
    if isinstance(found, Job):
        return found
    jobs = sorted(key for key, value in vars(module).items() if isinstance(value, Job))
    raise ConfigurationError(
        f"{path} has no job named {job_config.function!r}.",
        why=f"Its jobs are: {', '.join(jobs) or 'none; is @job missing?'}",
        unchanged="Nothing was begun.",
        todo=f'Set uses = "{job_config.module}:FUNCTION" in [jobs.{job_config.name}].',
    )


def settings_main() -> None:
    """Say on standard output what is wrong with a job's file, or settings; nothing if all fits.

    Standard input is JSON: the configuration's path, the job, what `--set` said; the answer is a
    letter's four parts. What the job prints goes to standard error.
    """
    answer = os.dup(1)
    os.dup2(2, 1)
    path, name, overrides = json.load(sys.stdin)
    config = load_config(Path(path))
    os.chdir(config.folder)
    job_config = config.job(name)
    try:
        load_job(job_config).settings_from(job_config, overrides, config.folder)
    except ConfigurationError as error:
        write_line(answer, json.dumps([error.what, error.why, error.unchanged, error.todo]))


def _imported(name: str, path: Path) -> Any:
    """Run a job's file as a module; its mistakes become letters.

    The text is compiled anew each time: cached bytecode is told apart by second and size only, and
    a job that was just mended must not run as it was.
    """
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))  # noqa: S102 - jobs are code
    except BatchrunError:
        raise
    except (Exception, SystemExit) as error:
        line, where = getattr(error, "lineno", None), error.__traceback__
        while where is not None:
            line = where.tb_lineno if where.tb_frame.f_code.co_filename == str(path) else line
            where = where.tb_next
        raise ConfigurationError(
            f"The job's file {path} cannot be imported.",
            why=f"{type(error).__name__}: {error} (line {line or '?'})",
            unchanged="Nothing was begun.",
            todo="Mend the file, then start again.",
        ) from error
    return module


# -- what a job must not do --------------------------------------------------------------------

LOOP_NAME_MAX = 200
CONTRACT = {  # what a job must not do: what it did, why that is refused, what to do instead
    "read on": """Batch {number} was not yielded before the job read on.
Yielding commits a batch; reading on would lose it.
End the loop's body with: yield batch""",
    "yielded": """The job yielded {what}; expected was {expected}.
Yielding commits the batch that was handed out last.
Write: for batch in ctx.batches(...): ...; yield batch""",
    "yielded inside": """Batch {number} was yielded inside its transaction().
Yielding commits the batch; its rows are not committed yet.
Move the yield out of the `with` block.""",
    "not entered": """Batch {number} has a target but never entered transaction().
Its mark was not written, so the batch could be applied twice.
Write its rows inside `with batch.transaction() as rows:`.""",
    "entered twice": """Batch {number} entered transaction() twice.
Its rows and its mark commit together, once.
Put all writes of the batch into one `with batch.transaction() as rows:`.""",
    "rolled back": """Batch {number} was yielded although its transaction() was rolled back.
An error ended it and the job went on; its rows would be missing.
Let the error out of the job, or reject the records that cause it.""",
    "wrote after": """Batch {number} was yielded while its target has an open transaction.
Writes after transaction() would be lost, or committed without the mark.
Put all writes of the batch into its transaction().""",
    "wrote aside": """Batch {number} was yielded while a connection of {driver} has open writes.
At the end they would be rolled back, and the batch would count as done without them.
Commit or roll back before the yield, or name it: ctx.batches(source, target=connection)""",
    "wrote before": """The target of {loop!r} has an open transaction with writes.
batchrun would commit them together with its own mark, or roll them back.
Commit them before, or write inside `with batch.transaction() as rows:`.""",
    "ended it": """The job ended the transaction of {loop!r} inside transaction().
Rows and mark commit together; what was committed alone may be applied twice.
Leave commit() and rollback() to the end of the `with` block.""",
    "too late": """{call} of batch {number} was called after the batch was closed.
Its transaction() or its yield has committed it already.
Call {call} before the yield, and inside transaction() if there is one.""",
    "count": """count({name}={more}) is no number of records.
The report adds these up; only whole numbers from 0 on can be added.
Write for example: batch.count({name}=len(changed))""",
    "no reason": """reject() of batch {number} was given {reason} as its reason.
The reason is what a person reads who has to decide about the record.
Write a text or the exception: batch.reject(record, "no price")""",
    "no name": """No {kind} can be named {name}.
Its name stands in the checkpoint and in reports, and is compared on resume.
Use 1 to 200 printable characters.""",
    "no size": """Loop {loop!r} cannot have batches of {size} records.
A batch is what is held in memory and done again after a crash.
Use a whole number from 1 to {most:,}.""",
    "too much": """Batch {number} remembers more than {limit:,} bytes.
What a rollback needs of a batch is kept in one file, and held in memory while it is packed.
Remember only rows that change, lower batch_size, or raise max_remembered in [jobs.{job}].""",
    "undoing": """Batch {number} of a rollback called remember().
A rollback is not rolled back itself; the job is begun anew.
Leave it out of the function that @job(rollback=) names.""",
    "no rollback": """ctx.remembered was asked for in a run that is no rollback.
Only `batchrun rollback RUN` hands out what a run has remembered.
Read it in the function that @job(rollback=) names.""",
    "no target": """Loop {loop!r} has no target, so its batches have no transaction().
Its mark is kept where the rows are.
Name the connection: ctx.batches(source, target=connection)""",
    "isolated without": """Loop {loop!r} has no target, but [jobs.{job}] has {key}.
A batch that failed half-way is done again in halves, and only a target tells what was done.
Name it, ctx.batches(source, target=connection), or leave that out.""",
    "unsplit": """The record that fails loop {loop!r} after {after!r} cannot be isolated.
Its source gives {count} records in one answer, whatever is asked for.
Let its read(after, limit) give no more than `limit` records, or leave isolate out.""",
    "unfit target": """A {kind} cannot be a target.
A target is an open connection of sqlite3, apsw, psycopg or another DB-API driver.
Pass the connection itself, for example: target=ctx.connect(ctx.settings.database)""",
    "one name": """Two loops or steps are named {name!r}.
Each has a cursor or a result of its own in the checkpoint.
Give each a name: ctx.batches(source, name="...")""",
    "two at once": """{kind} {name!r} began before loop {loop!r} was read to its end.
Commits are one chain: loops and steps come one after another.
Read the first loop to its end, or join the two sources in one loop.""",
    "not JSON": """The result of step {step!r} is not JSON: {result!r}.
It is recorded once and given back in every later attempt.
Return None, text, numbers, lists and dicts with text keys.""",
    "no cleanup": """{name} cannot be a cleanup: {reason}.
Another process may have to call it, knowing only its name and its arguments.
Use a plain function at the top level of a module: def drop(*, table): ...""",
    "no arguments": """The cleanup {name} cannot have these arguments: {reason}.
They are kept in the ledger as JSON, and given back to the function by name.
Use None, text, numbers, lists and dicts with text keys; secrets the function finds itself.""",
    "inside a step": """The {kind} {name!r} began inside the step {step!r}.
Commits are one chain: a step is recorded before the next thing begins.
Move it behind the step.""",
    "no key": """An operation cannot have the key {key}.
It is recorded, sent on to the destination and typed by people.
Give printable text of 1 to {most} characters, such as ANNOUNCE/SKU/REVISION.""",
    "no digest": """The arguments of operation {key!r} have no digest: {reason}.
It tells the same operation, met again, from another one under the same key.
Give text, numbers, dates, bytes, UUIDs; lists, tuples, dicts, dataclasses of these.""",
    "no receipt": """The operation {key!r} was done, but its receipt is not JSON: {receipt}.
It is recorded as done, without a receipt, and is not called again.
Return None, text, numbers, lists and dicts with text keys.""",
    "no rate": """once_each() cannot go on at the rate {rate!r}.
A rate is how many calls may begin in a second, a minute or an hour, evenly spread.
Write for example rate="20/s", "100/m" or "5000/h".""",
    "no such way": """once_each() cannot go on with workers={workers!r}, on_error={on_error!r}.
Workers are threads, at least one; an error ends the attempt, or rejects its record.
Write a whole number from 1, and "raise" or "reject".""",
    "no call": """An operation cannot be made by {name}.
Calling it would not run it yet: it is a coroutine or a generator.
Give a plain function; one that calls asyncio.run(...) is one.""",
    "not awaited": """The operation {key!r} was not made: its {what} returned a {kind}, not awaited.
What is to be awaited has not run yet, or not to its end.
Give a plain function; one that calls asyncio.run(...) is one.""",
    "another thread": """The job used its context in a thread of its own.
The ledger, the signals and the time limits of calls belong to the job's main thread.
Do that in the main thread; once_each(workers=...) makes calls in threads.""",
    "inside a call": """An operation's call, or a source that reads ahead, used the job's context.
Those run beside other work, and the ledger is used by one thread alone.
Do that before or after.""",
    "no batch": """once_each() was called while no batch was open.
What it does belongs to a commit.
Call it inside the loop over ctx.batches(...), before the batch is yielded.""",
    "no loop": """The job returned without a loop.
A job reads its source by ctx.batches(...); without one nothing is recorded.
Write: for batch in ctx.batches(source): ...; yield batch""",
    "unread": """The job returned before loop {loop!r} was read to its end.
What was not read would be missing although the run had succeeded.
Leave out the break or return, or call ctx.finish("why") before it.""",
}


def broken(clause: str, **facts: object) -> JobError:
    """Return the letter for a job that broke a clause of its contract."""
    what, why, todo = filled(CONTRACT[clause], facts)
    return JobError(what, why=why, unchanged="Nothing more was committed.", todo=todo)


# -- what guards it, and what it holds -----------------------------------------------


class JobFrame:
    """Whether the job's own code runs at this moment; only then it may be interrupted, once."""

    def __init__(self) -> None:
        self.inside = self.interrupted = self._wanted = False

    def interrupt(self) -> None:
        """Raise `Interrupted` in the job's frame: at once, or when it is entered next."""
        self._wanted = True
        self._heed()

    @contextlib.contextmanager
    def switched(self, *, inside: bool) -> Iterator[None]:
        """Run the job's code (inside), or our own code that the job calls."""
        before = self.inside
        try:
            self.inside = inside
            self._heed()
            yield
        finally:
            self.inside = before
            self._heed()

    def _heed(self) -> None:
        if self._wanted and self.inside and not self.interrupted:
            self.interrupted = True
            raise Interrupted


TOLD_MAX_CHARS = 300


def error_text(error: BaseException) -> str:
    """Return type and words of an exception, masked; of one that cannot be shown, its type."""
    name, words = type(error).__name__, ""
    with contextlib.suppress(Exception):  # the words are made by the job's own code
        words = mask_secrets(str(error))
    if type(error) is EndedApart:
        return words
    return f"{name}: {words}" if words else name


def shortened(text: str) -> str:
    """Return text that stands whole in the log so that a letter with it fits on a screen."""
    if len(text) <= TOLD_MAX_CHARS:
        return text
    return f"{text[:TOLD_MAX_CHARS]}... ({len(text):,} characters; all of it is in the log)"


class EndedApart(Exception):
    """How a call in a child process failed: in the words of `error_text`."""


class Overdue(BaseException):
    """Raised in a release that did not end in time; `except Exception` does not swallow it."""


Releasing = Callable[[BaseException | None], object]  # given why the attempt did not succeed
Around = contextlib.AbstractContextManager[object]


class CleanupStack:
    """What has to be released at the end of an attempt, in reverse order.

    A release that does not come back to Python is not cut off: only a signal from outside ends it.
    """

    def __init__(self, host: Host, limit_s: float) -> None:
        self._host, self._limit_s = host, limit_s
        self._entries: list[tuple[str, Releasing, Around]] = []
        self.releases: list[dict[str, Any]] = []

    def push(
        self, name: str, call: Releasing, around: Around | None = None, *, last: bool = False
    ) -> None:
        """Add a release before all added earlier, or after all of them.

        `around` is entered around it, outside its time limit.
        """
        at = 0 if last else len(self._entries)
        self._entries.insert(at, (name, call, around or contextlib.nullcontext()))

    @property
    def limit_s(self) -> float:
        """How long all releases together may take, and one more that a release may add."""
        return self._limit_s * (len(self._entries) + 1)

    def unwind(self, reason: BaseException | None = None) -> None:
        """Release everything, last in, first out."""
        alarm = Alarm(self._limit_s)
        while self._entries:
            name, call, around = self._entries.pop()
            began, error = self._host.monotonic(), ""
            try:
                with around:
                    alarm.call(call, reason)
            except BaseException as raised:  # noqa: BLE001 - one failing release must not stop the next
                error = error_text(raised)
            elapsed_s = round(self._host.monotonic() - began, 6)
            self.releases.append({"name": name, "elapsed_s": elapsed_s, "error": error})


class Alarm:
    """Ends calls of the main thread that take too long, one at a time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._armed = limit_s, False
        signal.signal(signal.SIGALRM, self._ring)

    def call(self, call: Callable[..., T], *arguments: Any) -> Any:
        """Return what a call returns; `Overdue` in it, then TimeoutError, if its time is over."""
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, self._limit_s)
                return call(*arguments)
            finally:
                self._armed = False
        except Overdue:
            raise TimeoutError(f"did not end within {self._limit_s:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise Overdue


def require_recordable(
    function: Any, arguments: dict[str, Any], unnamed: Sequence[object] = ()
) -> str:
    """Return the name by which another process finds a cleanup's function, `module:name`."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    text = f"{module}:{name}" if module and name else f"A {type(function).__name__}"
    for is_so, reason in unfit_for_cleanup(function, module, name):
        if is_so:
            raise broken("no cleanup", name=text, reason=reason)
    if unnamed:
        reason = f"{len(unnamed)} of them {'has' if len(unnamed) == 1 else 'have'} no name"
    else:
        reason = misfit(function, arguments)
    if reason:
        raise broken("no arguments", name=text, reason=reason)
    return text


def unfit_for_cleanup(function: Any, module: Any, name: Any) -> Iterator[tuple[bool, str]]:
    """Yield what may make a function unfit to be called by another process, and whether it does."""
    is_function = isinstance(function, FunctionType | BuiltinFunctionType)
    yield not is_function, "it is no plain function"
    yield name == "<lambda>", "it is a lambda"
    yield "." in name, "it is defined inside something else"
    yield module == "__main__", "it stands in __main__"
    found = getattr(sys.modules.get(module), name, None)
    yield found is not function, "its module has something else under this name"
    yield is_lazy(function), "calling it would not run it yet"


def is_lazy(function: Any) -> bool:
    """Tell whether calling it would not run it yet: a generator or a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    found = function if hasattr(function, "__code__") else type(function).__call__
    return bool(getattr(getattr(found, "__code__", None), "co_flags", 0) & 0x2A0)


def misfit(function: Any, arguments: dict[str, Any]) -> str:
    """Return why a function cannot be called with these arguments later, or nothing."""
    import inspect  # 10 ms, only for jobs that record cleanups

    try:
        kept = _compact(arguments)
        if mask_secrets(kept) != kept:
            return "a secret is among them"
        if json.loads(kept) != arguments:
            return "JSON gives back others"
    except (TypeError, ValueError):
        return "they are no JSON"
    try:
        with contextlib.suppress(ValueError):  # a builtin that does not tell
            inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def call_cleanup(cleanup: Cleanup) -> None:
    """Find a recorded cleanup's function and call it."""
    import importlib

    module, _, name = cleanup.function.partition(":")
    call = functools.partial(getattr(importlib.import_module(module), name), **cleanup.arguments)
    if cleanup.error is None:
        call()
    else:
        call_apart(call)


def call_apart(call: Callable[[], object]) -> None:
    """Call it in a child process, which may end during the call and is gone after it."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answer:
        child = os.fork()
        if child == 0:
            answer_and_exit(call, writer)
        try:
            os.close(writer)
            said = answer.read().decode()
        finally:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still its own
            os.waitpid(child, 0)
    if said != "done":
        raise EndedApart(said or "its process ended during the call")


def answer_and_exit(call: Callable[[], object], answer: int) -> NoReturn:
    """Call it, write how it ended to a descriptor, and end this process there and then."""
    said = "done"
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        call()
        sys.stdout.flush()
    except BaseException as raised:  # noqa: BLE001 - whatever it raised is the answer
        said = error_text(raised)
    finally:
        os.write(answer, said.encode(errors="replace"))
        os._exit(0)


# -- where a run stands --------------------------------------------------------------


class Link:
    """One commit in the making: a `batch`, the end of a `loop`, a `step` or an `approval`."""

    records: Sequence[Any] = ()  # of a batch, as the source gave them
    cursor: Any = None  # of the loop after this commit
    ended = False  # whether the source said that nothing follows
    read = 0  # records consumed, rejected ones included
    rejected = 0
    # generation under which rejects and image are kept already; None if they are not
    staged: int | None = None
    remembered = 0  # rows, in `image` until they are staged
    image: ImageInMaking | None = None
    images: str | None = None  # the name of the file
    following: str | None = None  # the try that is armed by it, as JSON; None: not foreseen
    first_key: Any = None
    last_key: Any = None
    marked = False  # whether the loop's target holds this number now
    source: str | None = None  # fingerprint of the loop's source
    result: Any = None  # of a step, JSON
    began = 0.0

    def __init__(self, kind: str, loop: str, **facts: Any) -> None:
        self.kind, self.loop = kind, loop
        self.rejects: list[Reject] = []
        self.counts: dict[str, int] = {}
        vars(self).update(facts)

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """Cursor, first and last key, encoded once for all who keep them."""
        return {name: encode_cursor(getattr(self, name)) for name in KEYS}


class Course:
    """Where a run stands in memory: the newest checkpoint, and what is being done after it.

    `place` is the cursor of the loop under way, encoded.
    """

    number = read = rejected = batches = 0
    loop, place, ended = "", "null", False
    source: str | None = None

    def __init__(self, run: Run, generation: int, checkpoint: Checkpoint | None = None) -> None:
        self.run, self.generation, self.hash = run, generation, run.hash
        self.passed, self.marks, self.counts = list[list[Any]](), dict[str, int](), dict[str, int]()
        if checkpoint is not None:
            self.move_to(checkpoint, run.hash)

    def move_to(self, checkpoint: Checkpoint, digest: str) -> None:
        """Stand at a checkpoint, after its commit as at a resume."""
        self.number, self.hash = checkpoint.number, digest
        self.passed, self.marks = checkpoint.passed, checkpoint.marks
        totals = checkpoint.totals
        self.read, self.rejected = totals["read"], totals["rejected"]
        self.batches, self.counts = totals["batches"], totals["counts"]
        self.loop, self.place, self.ended, self.source = "", "null", False, None
        if checkpoint.kind == "batch":
            self.loop, self.ended = checkpoint.loop, checkpoint.ended
            self.place, self.source = checkpoint.cursor, checkpoint.source

    @property
    def cursor(self) -> Any:
        """The cursor of the loop under way; None before its first commit."""
        return decode_cursor(self.place)

    @property
    def order(self) -> list[tuple[str, str]]:
        """Kind and name of the loops and steps that the checkpoint knows, in their order."""
        begun = [("loop", self.loop)] if self.loop else []
        return [(kind, name) for kind, name, *_ in self.passed] + begun


# -- targets -------------------------------------------------------------------------


class Target:
    """A connection that keeps batchrun's mark. This one is of any DB-API driver.

    The subclasses know their drivers better; `open_target` chooses.
    """

    def __init__(self, connection: Any, placeholder: str) -> None:
        self.connection, self._placeholder = connection, placeholder

    def begin(self) -> None:
        """Begin a transaction, unless the first statement does so."""

    def end(self, how: str) -> None:
        """End the open transaction; `how` is `commit` or `rollback`."""
        getattr(self.connection, how)()

    def is_open(self) -> bool:
        """Tell whether a transaction is open, or may be."""
        return True

    def has_written(self) -> bool:
        """Tell whether the open transaction has written, if the driver can tell."""
        return False

    def loses_writes(self) -> bool:
        """Tell likewise of a connection that is the job's own: closed maybe, or a thread's."""
        with contextlib.suppress(Exception):
            return self.is_open() and self.has_written()
        return False

    def run_sql(self, sql: str, *bindings: object) -> Any:
        """Execute a statement written with `?`, and return its cursor."""
        cursor = self.connection.cursor()
        cursor.execute(sql.replace("?", self._placeholder), bindings)
        return cursor

    def changes(self, cursor: Any) -> int:
        """Return how many rows the cursor's last statement changed."""
        return int(cursor.rowcount)


class SqliteTarget(Target):
    """A connection of apsw, or of the standard library's sqlite3 in any transaction mode."""

    def begin(self) -> None:
        """Begin by statement, unless the connection keeps a transaction open by itself."""
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")

    def end(self, how: str) -> None:
        """End it by statement, which works in all modes but one."""
        if getattr(self.connection, "autocommit", None) is False:  # it begins the next by itself
            super().end(how)
        elif self.connection.in_transaction:
            self.connection.execute(how)

    def is_open(self) -> bool:
        """Ask the connection."""
        return bool(self.connection.in_transaction)

    def has_written(self) -> bool:
        """Ask SQLite, through sqlite3 in a roundabout way."""
        if isinstance(self.connection, apsw.Connection):
            return bool(self.connection.txn_state() == apsw.SQLITE_TXN_WRITE)
        return _has_written(self.connection)

    def changes(self, cursor: Any) -> int:
        """Ask the connection where the cursor does not know."""
        is_apsw = isinstance(self.connection, apsw.Connection)
        return self.connection.changes() if is_apsw else super().changes(cursor)


def _has_written(connection: Any) -> bool:
    """Tell whether sqlite3's transaction has: SQLite then lets no backup of its database begin."""
    import sqlite3

    codes: list[int] = []

    def look(code: int, *_: int) -> None:
        codes.append(code)
        raise InterruptedError  # one page is enough

    for row in connection.execute("PRAGMA database_list").fetchall():
        scratch = contextlib.closing(sqlite3.connect(":memory:"))
        with scratch as copy, contextlib.suppress(InterruptedError):
            connection.backup(copy, pages=1, progress=look, name=_tuple(row)[1])
    return sqlite3.SQLITE_BUSY in codes


class PsycopgTarget(Target):
    """A psycopg 3 connection, autocommit or not."""

    def begin(self) -> None:
        """Begin by statement; not under autocommit psycopg does so before any, an empty one too.

        Otherwise one that nothing was sent in would look like one that the job has ended.
        """
        self.connection.execute("BEGIN" if self.connection.autocommit else "", prepare=False)

    def is_open(self) -> bool:
        """Ask the connection; one that is lost has none, and the next use says so."""
        return self.connection.info.transaction_status.name not in ("IDLE", "UNKNOWN")

    def has_written(self) -> bool:
        """Ask the server whether the transaction has an id yet, which only writers have."""
        if self.connection.info.transaction_status.name != "INTRANS":
            return True  # it failed: what it wrote is lost already
        from psycopg.rows import tuple_row  # the job's own rows may be of any class

        with self.connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL")
            return bool(cursor.fetchone()[0])

    def loses_writes(self) -> bool:
        """Disturb nothing that is under way, and ask no server that may not know the question."""
        about = self.connection.info
        if not self.is_open() or about.transaction_status.name == "ACTIVE":  # it gives rows
            return False
        tells = about.vendor == "PostgreSQL" and about.server_version >= POSTGRES_TELLS
        return tells and self.has_written()


POSTGRES_TELLS = 130_000  # the version from which a server tells whether a transaction has written


KEYS = ("first_key", "last_key", "cursor")
DRIVERS: dict[str, type[Target]] = {  # module of a connection -> its target
    "apsw": SqliteTarget,
    "sqlite3": SqliteTarget,
    "psycopg": PsycopgTarget,
}
PLACEHOLDERS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


def drivers_of(connection: Any) -> list[str]:
    """Return the modules that the classes of a connection are from."""
    return [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]


def placeholder_of(connection: Any) -> str:
    """Return what stands for a value in a connection's SQL; empty if its driver does not tell."""
    styles = [getattr(sys.modules.get(of), "paramstyle", "") for of in drivers_of(connection)]
    return next((PLACEHOLDERS[style] for style in styles if style in PLACEHOLDERS), "")


def open_target(connection: Any) -> Target:
    """Return the target for a connection; JobError if no mark can be kept in it."""
    placeholder, drivers = placeholder_of(connection), drivers_of(connection)
    for kind, driver in zip(type(connection).__mro__, drivers, strict=True):
        if driver in DRIVERS and kind.__name__ == "Connection":
            return DRIVERS[driver](connection, placeholder or "?")
    if placeholder and not DRIVERS.keys() & drivers and hasattr(connection, "commit"):
        return Target(connection, placeholder)
    raise broken("unfit target", kind=type(connection).__name__)


class Mark:
    """The row of one run and loop in a target: claimed, judged, and written with each batch."""

    def __init__(self, target: Target, course: Course, loop: str, host: Host) -> None:
        self.target, self._course, self._key = target, course, (course.run.id, loop)
        self._host, self.spent_s = host, 0.0

    def claim(self) -> tuple[Any, ...]:
        """Take the mark for our generation, in a transaction of its own, and return its row."""
        target, generation = self.target, self._course.generation
        self._require_clean()
        self._make_table()
        insert = "INSERT INTO batchrun_mark VALUES (?, ?, 0, ?, NULL, NULL, NULL, '{}')"
        where = "WHERE run = ? AND loop = ?"
        update = f"UPDATE batchrun_mark SET generation = ? {where} AND generation < ?"
        columns = f"generation, number, {', '.join(KEYS)}, counts"
        with self._undone_by_error():
            target.begin()
            target.run_sql(f"{insert} ON CONFLICT DO NOTHING", *self._key, generation)
            target.run_sql(update, generation, *self._key, generation)
            found = target.run_sql(f"SELECT {columns} FROM batchrun_mark {where}", *self._key)
            holder, *row = _tuple(found.fetchone())
            target.end("commit")
        if holder > generation:
            raise lost_ownership(self._course.run, generation)
        return tuple(row)

    def ahead(self, kind: str, *, passed: bool) -> Link | None:
        """Claim the mark and compare it with the checkpoint.

        Returns:
            The commit that the target has and the checkpoint lacks, or None if they agree.

        Raises:
            PersonNeeded: the target is behind or ahead of what this run has done.
        """
        number, *position, counts = self.claim()
        course, loop = self._course, self._key[1]
        expected = course.marks.get(loop, 0)
        if number == expected:
            return None
        if number == course.number + 1 and not passed:
            done = dict(zip(KEYS, map(decode_cursor, position), strict=True))
            return Link(kind, loop, marked=True, **done, **json.loads(counts))
        raise PersonNeeded(
            f"The target of {loop!r} does not fit the checkpoint:"
            f" it is marked {number}, the checkpoint says {expected}.",
            why="It was restored from an older copy, or it is another database."
            if number < expected
            else "Another copy of this run has written to it.",
            unchanged="No record was written to it.",
            todo="Bring the right database back, or start anew:"
            f" batchrun run {course.run.job} --fresh",
        )

    @contextlib.contextmanager
    def _undone_by_error(self) -> Iterator[None]:
        """Roll back for an error; that this fails too must not hide it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.target.end("rollback")
            raise

    def _require_clean(self) -> None:
        """End a read transaction that was left open; refuse one that has written."""
        if not self.target.is_open():
            return
        if self.target.has_written():
            raise broken("wrote before", loop=self._key[1])
        self.target.end("commit")  # not rollback: psycopg would forget what it has prepared

    def _make_table(self) -> None:
        """Make the table of marks where it is not; looking first needs no right to make tables."""
        if self._has_table():
            return
        try:
            with self._undone_by_error():
                self.target.begin()
                self.target.run_sql(MARK_TABLE)
                self.target.end("commit")
        except Exception as error:
            if self._has_table():  # another job has made it in the meantime
                return
            if may_pass(error):
                raise
            raise JobError(
                f"The target of {self._key[1]!r} lets batchrun make no table for its marks.",
                why=f"{type(error).__name__}: {mask_secrets(str(error).strip())}",
                unchanged="Nothing more was committed.",
                todo=f"Let its owner run this, and grant SELECT, INSERT, UPDATE:\n{MARK_TABLE};",
            ) from error

    def _has_table(self) -> bool:
        with contextlib.suppress(Exception), self._undone_by_error():
            self.target.run_sql("SELECT number FROM batchrun_mark WHERE run = '' LIMIT 1")
            self.target.end("commit")
            return True
        return False  # every driver has an error class of its own

    @contextlib.contextmanager
    def transaction(self, context: Context[Any], link: Link) -> Iterator[Any]:
        """Run the job's writes and our mark in one transaction, and yield the driver's cursor."""
        target, number = self.target, self._course.number + 1
        with context._own_code():
            self._require_clean()
            target.begin()
        with self._undone_by_error():
            yield target.connection.cursor()
            with context._own_code():
                if not target.is_open():
                    raise broken("ended it", loop=link.loop)
                link.staged = self._course.generation
                context._driver.stage(number, link)  # durable before the mark counts it
                self._write(link)
                reach("target.commit", number)
                target.end("commit")
                link.marked = True
                reach("target.committed", number)

    def _write(self, link: Link) -> None:
        """Write the mark; it changes a row only if we still own it and the number is new."""
        began = self._host.monotonic()
        course, number = self._course, self._course.number + 1
        kept = ("read", "rejected", "staged", "counts", "ended", "source", "result", *IMAGE_FIELDS)
        written = self.target.run_sql(
            "UPDATE batchrun_mark SET number = ?, first_key = ?, last_key = ?, cursor = ?,"
            " counts = ? WHERE run = ? AND loop = ? AND generation = ? AND number < ?",
            number,
            *[link.texts[name] for name in KEYS],
            _compact({name: getattr(link, name) for name in kept}),
            *self._key,
            course.generation,
            number,
        )
        if self.target.changes(written) == 0:
            raise lost_ownership(course.run, course.generation)
        self.spent_s += self._host.monotonic() - began


CAUSES_MAX = 20  # of an error, looked at
MYSQL_PASSES = (1040, 1053, 1205, 1213, 1317, 1927)  # too many, shutdown, lock, deadlock, killed


def may_pass(error: BaseException) -> bool:
    """Tell whether a driver's error may pass by itself: a lock is held, or the server is lost."""
    if (code := getattr(error, "sqlite_errorcode", None)) is not None:  # sqlite3's
        return code & 0xFF in (apsw.SQLITE_BUSY, apsw.SQLITE_LOCKED)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds.isdisjoint({"BusyError", "LockedError", "OperationalError"}):
        return False
    code = error.args[0] if error.args else None
    if isinstance(code, int):  # MySQL's drivers call all else an OperationalError, too
        return code in MYSQL_PASSES or 2000 <= code < 3000
    limit_exceeded = str(getattr(error, "sqlstate", None)).startswith("54")  # by a record, that is
    return not limit_exceeded and type(error).__module__ != "sqlite3"


def comes_of_loss(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it was raised for, may pass by itself."""
    for _ in range(CAUSES_MAX):
        if error is None or may_pass(error):
            break
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None and may_pass(error)


def mark_in(path: Path, run: str, loop: str) -> int | None:
    """Return the number of a mark in an SQLite file, changing nothing; None if it has none."""
    sql = "SELECT number FROM batchrun_mark WHERE run = ? AND loop = ?"
    try:
        with contextlib.closing(apsw.Connection(uri_to_read(path), flags=READ_ONLY)) as target:
            return cast("int | None", target.execute(sql, (run, loop)).get)
    except apsw.Error:
        return None


# -- batches, loops, and what a job is given -----------------------------------------


class Batch:
    """Up to `batch_size` records, to be worked on and then yielded.

    Attributes:
        records: the records, as the source gives them.
        number: the commit's number in the run, from 1.
        first_key: key of the first record; None if the source has no key.
        last_key: key of the last record, likewise.
        loop: name of the loop it belongs to.
    """

    def __init__(self, context: Context[Any], portion: Portion, loop: Loop) -> None:
        self.records: list[Any] = portion.records
        self.number = context._course.number + 1
        self.first_key, self.last_key = portion.first_key, portion.last_key
        self.loop = loop.name
        self._context, self._mark = context, loop.mark
        self._entered = self._inside = False
        self._link = loop.link_of(portion)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the records."""
        return iter(self.records)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.records)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Open the one transaction of this batch in the loop's target; yields a cursor.

        Rows and mark commit together at the end of the `with`; an exception rolls both back.

        Raises:
            JobError: there is no target, or the transaction was entered before.
            LostOwnership: a newer generation owns the run; nothing was changed.
        """
        with self._context._own_code():
            if self._mark is None:
                raise broken("no target", loop=self.loop)
            if self._entered:
                raise broken("entered twice", number=self.number)
        self._entered = self._inside = True
        try:
            with self._mark.transaction(self._context, self._link) as cursor:
                yield cursor
        finally:
            self._inside = False

    def reject(self, record: object, reason: str | BaseException) -> None:
        """Leave a record out, with a reason; it counts when the batch is committed.

        Of an exception its type and text are the reason.

        One of the batch's own records can be run again later; of anything else the text is kept.

        Raises:
            JobError: the batch is closed already, or the reason is neither.
        """
        with self._context._own_code():
            self._require_open("reject()")
            if isinstance(reason, BaseException):
                reason = error_text(reason)
            if not isinstance(reason, str):
                raise broken("no reason", number=self.number, reason=type(reason).__name__)
            self._link.rejects.append(Reject(record, reason, handed=self._handed_out(record)))
            self._link.rejected += 1

    def remember(self, rows: Iterable[object]) -> None:
        """Keep rows as they are before this batch changes them, for a rollback of the run.

        They count when the batch is committed. A row is what a cursor may be: text, numbers, dates,
        bytes, None, and tuples, lists and dicts of those. More calls add to the first.

        Raises:
            JobError: the batch is closed, a row could not be had back, or there are too many.
        """
        context, link = self._context, self._link
        with context._own_code():
            self._require_open("remember()")
            if context._course.run.rollback_of:
                raise broken("undoing", number=self.number)
            if link.image is None:
                limit, job = context._max_remembered, context._course.run.job
                facts = {"number": self.number, "limit": limit, "job": job}
                link.image = ImageInMaking(limit, broken("too much", **facts))
            with context._frame.switched(inside=True):  # the rows may be read as they are taken
                link.image.add(rows)
            link.remembered = link.image.rows

    def _handed_out(self, record: object) -> bool:
        """Tell whether something is one of the records, or equal to one."""
        if any(record is each for each in self.records):
            return True
        with contextlib.suppress(Exception):  # how to compare is the job's own code
            return record in self.records
        return False

    def count(self, **counts: int) -> None:
        """Add to the job's own counts, such as inserted=, updated=, unchanged=.

        Raises:
            JobError: the batch is closed already.
        """
        with self._context._own_code():
            self._require_open("count()")
            for name, more in counts.items():
                if type(more) is not int or more < 0:
                    raise broken("count", name=name, more=repr(more))
                self._link.counts[name] = self._link.counts.get(name, 0) + more

    def _require_open(self, call: str) -> None:
        if self._context._current is not self or (self._entered and not self._inside):
            raise broken("too late", call=call, number=self.number)

    def _require_settled(self) -> None:
        """Refuse to commit a batch whose rows are not committed in its target."""
        if self._mark is None:
            return
        if self._inside:
            raise broken("yielded inside", number=self.number)
        if not self._link.marked:
            raise broken("rolled back" if self._entered else "not entered", number=self.number)
        target = self._mark.target
        if target.is_open() and target.has_written():
            raise broken("wrote after", number=self.number)


class Loop:
    """One pass over a source: an iterator of batches, each to be yielded before the next."""

    _source: Any  # all three only of a loop that was not finished already
    _reader: Reader
    reads_ahead: bool  # whether the source may be read before it is told of a commit

    def __init__(self, context: Context[Any], name: str, size: int, mark: Mark | None) -> None:
        self.name, self.size, self.mark = name, size, mark
        self._limit = size  # of the batch that is open; less where isolation looks for a record
        self.exhausted = False
        self.fingerprint: str | None = None
        self._context = context
        self._is_first = True
        self._ahead: Portion | BaseException | None = None  # what reading ahead has come to

    def __iter__(self) -> Loop:
        """Return itself: a loop is passed once."""
        return self

    def __next__(self) -> Batch:
        """Hand out the next batch, or commit the end of the loop."""
        with self._context._own_code():
            batch = self._next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def _next_batch(self) -> Batch | None:
        driver = self._context._driver
        self._context._require_yielded()
        while not self.exhausted:
            driver.pass_gate()
            self._limit = driver.limit(self)
            portion = self._read()
            if self._is_first:
                self._is_first = False
                require_round_trip(portion.cursor)
            tried = self._try_of(portion)
            why = driver.why_bad(tried)
            if portion.records and not why:
                driver.pass_gate()
                return self._hand_out(portion, tried)
            if portion.records or portion.rejects:
                driver.commit(self._left_out(portion, why))
                self.tell_committed()
            else:
                driver.commit(Link("loop", self.name, source=self.fingerprint))
                self.exhausted = True
        return None

    def _read(self) -> Portion:
        """Return what was read ahead; raise what that raised; else read now."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, BaseException):
            raise ahead
        if ahead is not None:
            return ahead
        with self._in_source():
            return self._reader.read_batch(self._limit)

    def read_ahead(self) -> None:
        """Read the next batch while the one in hand is committed; raises nothing yet."""
        context = self._context
        context._is_beside = True
        try:
            self._ahead = self._read()
        except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
            self._ahead = error
        finally:
            context._is_beside = False

    def link_of(self, portion: Portion) -> Link:
        """Return the commit of what was read; the source alone has rejected some of it yet."""
        count, refused = len(portion.records), len(portion.rejects)
        began = self._context._host.monotonic()
        facts = {"source": self.fingerprint, "began": began, **portion._asdict()}
        link = Link("batch", self.name, read=count + refused, rejected=refused, **facts)
        link.following = self._try_after(link.texts["cursor"])
        return link

    def _try_after(self, place: str, *end: str) -> str:
        """Return the key of the try of the batch that begins after an encoded cursor, as JSON."""
        return _compact([self.name, place, self._limit, *end])

    def _try_of(self, portion: Portion) -> str:
        """Return the key of the try of a batch that was read; of one record it names the end too.

        Only that tells the record from another one in its place, and that it was handed out.
        """
        context = self._context
        if self._limit < self.size:  # halve what there is, not what there might have been
            self._limit = max(1, min(self._limit, len(portion.records) + len(portion.rejects)))
        end = [encode_cursor(portion.cursor)] if context._isolates and self._limit == 1 else []
        return self._try_after(context._course.place, *end)

    def _left_out(self, portion: Portion, why: str) -> Link:
        """Return the commit that passes over what is not handed to the job.

        That is what the source has refused, and the record that isolation has found.
        """
        link, count = self.link_of(portion), len(portion.records)
        if count > 1:
            raise broken("unsplit", loop=self.name, after=self._context.cursor, count=count)
        link.rejects += [Reject(record, why) for record in portion.records]
        link.rejected += count
        return link

    def tell_committed(self) -> None:
        """Tell the source, if it wants to know, up to which cursor all is committed."""
        committed = getattr(self._source, "committed", None)
        if committed is not None:
            reach("source.committed", self._context._course.number)
            with self._in_source():
                committed(self._context.cursor)

    @contextlib.contextmanager
    def _in_source(self) -> Iterator[None]:
        """Run the source's code, and take the time; it may be interrupted."""
        host = self._context._host
        began = host.monotonic()
        try:
            with self._context._frame.switched(inside=True):
                yield
        finally:
            self._context._read_s += host.monotonic() - began

    def _hand_out(self, portion: Portion, tried: str) -> Batch:
        """Make the batch that the job works on now."""
        context = self._context
        if not context._handed_out:
            context._handed_out = True
            expected = (getattr(self._source, "total", None) or (lambda: None))()
            context._driver.begin_batches(expected, tried)
        context._driver.begin_try(tried)
        context._current = batch = Batch(context, portion, self)
        reach("batch.handed_out", batch.number)
        return batch


class _Driver(Protocol):
    """What a context asks of the worker that drives it; the worker says what each does."""

    def commit(self, link: Link, meanwhile: Callable[[], None] | None = None) -> None: ...
    def begin_batches(self, expected: int | None, tried: str) -> None: ...
    def begin_try(self, tried: str) -> None: ...
    def stage(self, number: int, link: Link) -> None: ...
    def remembered(self) -> Source: ...
    def taken_up(self, loop: str, after: Any, limit: int) -> list[RejectRow]: ...
    def ask(self, name: str, summary: str) -> Approval: ...
    def limit(self, loop: Loop) -> int: ...
    def why_bad(self, tried: str) -> str: ...
    def pass_gate(self) -> None: ...
    def stop_is_asked(self) -> bool: ...
    def say(self, text: str) -> None: ...
    def note_target(self, loop: str, target: Target) -> None: ...
    def record_cleanup(self, function: str, arguments: dict[str, Any], *, of_run: bool) -> None: ...
    def await_answer(self, end: AttemptEnd) -> NoReturn: ...
    def operate(self, wanted: Sequence[tuple[str, tuple[Any, ...]]], how: How) -> list[Claim]: ...


class How(NamedTuple):
    """How operations are done, all of one call of `once` or `once_each`."""

    call: Callable[..., Any]
    lookup: Callable[[str], Any] | None = None
    irreversible: bool = False
    workers: int = 1
    rate: str | None = None
    on_error: str = "raise"


class Claim:
    """An operation that is to be done: what is called with what, and what became of it."""

    id = 0
    began = 0.0  # when the call began
    since = 0.0  # when its destination first asked to wait
    result: Any = None  # the receipt, or what a lookup says
    error: BaseException | None = None  # why it was not done, or is unknown
    is_late = False  # whether its call was not awaited, and may be at work still
    counts_as = ""  # called, confirmed, already done; nothing if it was not done

    def __init__(self, key: str, arguments: tuple[Any, ...], digest: bytes) -> None:
        self.key, self.arguments, self.digest = key, arguments, digest


class Context(Generic[S]):
    """What a job is given.

    Attributes:
        settings: the job's settings, an instance of its dataclass.
        run_id: the run's id.
        generation: the attempt's number, rising.
        batch_size: records a batch, unless a loop says otherwise.
    """

    def __init__(
        self,
        settings: S,
        course: Course,
        driver: _Driver,
        job_config: JobConfig,
        host: Host,
        cleanups: CleanupStack,
        *,
        acceptances: frozenset[str],
        last_success_read: int | None,
    ) -> None:
        self.settings = settings
        self.run_id, self.generation = course.run.id, course.generation
        self.batch_size = job_config.batch_size
        self._course, self._driver, self._acceptances = course, driver, acceptances
        self._thread = get_ident()
        self._host, self._last_success_read = host, last_success_read
        self._frame, self._cleanups = JobFrame(), cleanups
        self._isolates, self._max_remembered = job_config.isolates, job_config.max_remembered_bytes
        self._loops: list[Loop] = []
        self._held: list[Target] = []  # all connections of this attempt that can be targets
        self._met: list[tuple[str, str]] = []
        self._current: Batch | None = None
        self._broken: BaseException | None = None
        self._step = ""  # the one that is being done
        self._is_beside = False  # whether an operation is at work, or a source reads ahead
        self._finished = self._handed_out = False
        self._read_s = 0.0  # spent reading since the last commit

    @functools.cached_property
    def log(self) -> Any:
        """The job's logger; lines go to the run's log with UTC time, secrets masked."""
        import logging  # 25 ms, and only jobs that log need it

        host = self._host

        class Lines(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                try:
                    write_log(host.now(), record.levelname, self.format(record))
                except Exception:  # noqa: BLE001 - logging's rule: no log line fails a program
                    self.handleError(record)

        logger = logging.getLogger(f"batchrun.job.{self._course.run.job}")
        logger.handlers[:] = [Lines()]
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return logger

    @property
    def cursor(self) -> Any:
        """The cursor of the current loop's newest commit; None before the first."""
        return self._course.cursor

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for; a long batch may end itself early by raising."""
        with self._frame.switched(inside=False):
            return self._driver.stop_is_asked()

    @property
    def remembered(self) -> Source:
        """In a rollback: the rows that the run has remembered which is undone, newest first."""
        with self._own_code():
            if not self._course.run.rollback_of:
                raise broken("no rollback")
            return self._driver.remembered()

    def batches(
        self,
        source: Any,
        *,
        key: Any = None,
        name: str = "main",
        target: Any = None,
        size: int | None = None,
    ) -> Loop:
        """Return the loop over a source, standing behind its last committed batch.

        Args:
            source: a Source, a callable `read(after, limit)`, or an iterable.
            key: of a record, for callables and iterables: a name, an index, or a function.
            name: needed as soon as a job has two loops.
            target: an open connection; then `batch.transaction()` makes each batch exactly-once.
            size: records a batch, if not the configured `batch_size`.

        Raises:
            JobError: the loop does not fit the job's contract.
            SourceChanged: the source is not the one that the checkpoint was written for.
            PersonNeeded: loops or target do not fit the checkpoint.
        """
        with self._own_code():
            records = self.batch_size if size is None else size
            if type(records) is not int or not 1 <= records <= BATCH_SIZE_MAX:
                raise broken("no size", loop=name, size=repr(size), most=BATCH_SIZE_MAX)
            loop = Loop(self, name, records, self._meet("loop", name, target))
            self._loops.append(loop)
            loop.exhausted = self._is_passed
            if not loop.exhausted:
                self._place(loop, as_source(source, key))
            return loop

    def step(self, name: str, call: Callable[..., Any], *, target: Any = None) -> Any:
        """Do something once per run and return its result, recorded as a commit.

        Args:
            name: of the step; not that of a loop.
            call: called with a cursor of the target, or without arguments if there is none.
            target: an open connection; then the writes and the record commit together. Without
                it the call may happen twice, if the process dies before its commit.

        Returns:
            What the call returned, as JSON keeps it.
        """
        with self._own_code():
            mark = self._meet("step", name, target)
            if self._is_passed:
                return _through_json(self._course.passed[len(self._met) - 1][2])
            self._driver.pass_gate()
        link = Link("step", name, began=self._host.monotonic())
        self._step = name
        try:
            with mark.transaction(self, link) if mark else contextlib.nullcontext() as cursor:
                result = call(cursor) if mark else call()
                link.result = self._as_json(name, result)
        except BaseException as error:
            self._broken = self._broken or error  # a step that failed is not passed over
            raise
        with self._own_code():
            self._driver.commit(link)
            self._step = ""
        return result

    def once(
        self,
        key: str,
        call: Callable[..., Any],
        *arguments: Any,
        lookup: Callable[[str], Any] | None = None,
        irreversible: bool = False,
    ) -> Any:
        """Have an effect in the outside world once ever, and return its receipt.

        The key is claimed durably, then `call(key, *arguments)` is made, then its receipt is
        recorded. A recorded key is never called again, in any attempt or run of the job.

        Args:
            key: made from the data, so that it means this effect and no other, ever.
            call: given the key first, to send it on; returns the receipt, JSON.
            arguments: the same whenever the key is met again.
            lookup: `lookup(key)` asks the destination what became of a call that was cut off:
                the receipt, None if nothing was done, or CannotTell.
            irreversible: a rollback cannot take it back, and says so.

        Raises:
            KeyReused: the key was claimed with other arguments.
            Exception: what the call raised. Unless the job's `not_done` says that nothing was
                done, that is unknown from now on, and the attempt ends.
        """
        how = How(call, lookup, irreversible)
        (done,) = self._operated([(key, arguments)], how)
        if done.error is not None:
            raise done.error
        return done.result

    def once_each(
        self,
        batch: Iterable[Any],
        *,
        idempotency_key: Callable[[Any], str],
        call: Callable[[str, Any], Any],
        lookup: Callable[[str], Any] | None = None,
        workers: int = 8,
        rate: str | None = None,
        on_error: Literal["raise", "reject"] = "raise",
        irreversible: bool = False,
    ) -> list[tuple[Any, Any]]:
        """Have an effect for each record, as `once` does; return pairs (record, receipt).

        They are in the order of the records; a record that was rejected has none. It is a place to
        stop: then calls in flight are awaited and recorded, and the batch is done again later.

        Args:
            batch: the open batch, or some of its records.
            idempotency_key: of a record.
            call: `call(key, record)` returns the receipt.
            lookup: as for `once`.
            workers: threads that make calls and lookups; 1: they are made in the main thread.
            rate: how many calls begin, evenly spread: "20/s", "100/m", "5000/h".
            on_error: what is done about an error of which `not_done` says that nothing was done:
                it ends the attempt, or its record is rejected. If it carries a Retry-After that
                fits into `retry_for`, all calls wait for so long, and the key is called again.
            irreversible: as for `once`.
        """
        how = How(call, lookup, irreversible, workers, rate, on_error)
        with self._own_code():
            if self._current is None:
                raise broken("no batch")
            if on_error not in ("raise", "reject") or type(workers) is not int or workers < 1:
                raise broken("no such way", workers=workers, on_error=on_error)
        records = list(batch)
        wanted = [(idempotency_key(record), (record,)) for record in records]
        pairs = list(zip(records, self._operated(wanted, how), strict=True))
        for record, each in pairs:
            if each.error is not None:
                if on_error == "raise":
                    raise each.error
                self._current.reject(record, each.error)
        return [(record, each.result) for record, each in pairs if each.error is None]

    def _operated(self, wanted: list[tuple[str, tuple[Any, ...]]], how: How) -> list[Claim]:
        """Have operations done by the worker, and count them with the open batch."""
        with self._own_code():
            for made in filter(is_lazy, (how.call, how.lookup)):
                raise broken("no call", name=getattr(made, "__qualname__", repr(made)))
            if self._current is not None:  # a batch that its target has would be forgotten here
                self._current._require_open("once()")
            self._driver.pass_gate()
            self._is_beside = True
            try:
                done = self._driver.operate(wanted, how)
            finally:
                self._is_beside = False
        if self._current is not None:
            counts, met = self._current._link.counts, set[str]()
            for each in (each for each in done if each.counts_as):
                name = "already done" if each.key in met else each.counts_as
                counts[name] = counts.get(name, 0) + 1
                met.add(each.key)
        return done

    def approval(self, name: str, summary: str) -> Approval:
        """Return a person's answer; until `batchrun approve RUN NAME` gives it, end the attempt.

        What ends the attempt passes by `except Exception`. The answer is recorded as a commit: a
        run asks once, and every later attempt gets the same answer.

        Args:
            name: of the question, and not that of a loop or step. What a new version of the job
                must not go on with on the old answer belongs into the name.
            summary: what is to be approved, for the person who reads `status`.
        """
        with self._own_code():
            self._meet("approval", name, None)
            if self._is_passed:
                return Approval(**self._course.passed[len(self._met) - 1][2])
            self._driver.pass_gate()
            answer = self._driver.ask(name, summary)
            self._driver.commit(Link("approval", name, result=answer._asdict()))
        return answer

    def finish(self, reason: str) -> None:
        """Declare the job done although a loop has more; returning is then no mistake."""
        with self._own_code():
            self._finished = True
            self._driver.say(f"the job finished by itself: {reason or 'no reason given'}")

    def connect(self, url: str | Secret) -> Any:
        """Open a database for this attempt; it is rolled back and closed at its end.

        Args:
            url: `sqlite:PATH` (an apsw connection; a relative path starts at the config's
                folder), or `postgres://...` (a psycopg connection; needs the extra `postgres`).

        Raises:
            ConfigurationError: the URL, or a missing driver.
            JobError: the database cannot be opened, or has no such name or password.
            Unreachable: it does not let us in now; a job that lets this out is tried again.
        """
        text = url.reveal() if isinstance(url, Secret) else url
        with self._frame.switched(inside=False):
            connection = open_database(text)
            name = f"connection {mask_secrets(text)}"
            self._cleanups.push(name, lambda _: close_connection(connection))
            self._held.append(open_target(connection))
        return connection

    def enter(self, resource: Any) -> Any:
        """Enter a resource for this attempt and return what it gives; released in reverse order.

        Its `__exit__` is given an exception if the attempt does not succeed. A DB-API connection
        is rolled back and closed, never committed.
        """
        kind, push = type(resource), self._cleanups.push
        is_dbapi = hasattr(resource, "rollback") and hasattr(resource, "cursor")
        if is_dbapi or isinstance(resource, apsw.Connection) or not hasattr(kind, "__enter__"):
            push(kind.__name__, lambda _: close_connection(resource))
            with contextlib.suppress(JobError):  # it is none
                self._held.append(open_target(resource))
            return resource
        entered, leave = kind.__enter__(resource), kind.__exit__
        push(kind.__name__, lambda why: leave(resource, why and type(why), why, None))
        return entered

    def on_exit(self, function: Callable[..., object], *arguments: object) -> None:
        """Have a function called at the end of this attempt, in reverse order of all of them."""
        name = getattr(function, "__name__", type(function).__name__)
        self._cleanups.push(name, lambda _: function(*arguments))

    def cleanup(
        self, function: Callable[..., object], /, *unnamed: Never, **arguments: Any
    ) -> None:
        """Record, before a resource is made, what will remove it; also if this process is killed.

        It is called at the end of this attempt, in reverse order with all other releases, or else
        before the job's first line in the next one. Registered twice in an attempt it is called
        once, in its first place.

        Args:
            function: a plain function at the top level of a module, the job's or any other. It
                may be called more than once, and also if the resource was never made.
            unnamed: refused; the ledger keeps arguments by name.
            arguments: given to it by name; JSON.

        Raises:
            JobError: another process could not make this call; nothing is recorded.
        """
        with self._own_code():
            name = require_recordable(function, arguments, unnamed)
            self._driver.record_cleanup(name, arguments, of_run=False)

    def on_finish(
        self, function: Callable[..., object], /, *unnamed: Never, **arguments: Any
    ) -> None:
        """Record, before a resource of the whole run is made, what will remove it with the run.

        Like `cleanup()`, but it is called when the run is finished: after all else at the end of
        the attempt that succeeds, or when the run is cancelled. Until then the resource stays.
        """
        with self._own_code():
            name = require_recordable(function, arguments, unnamed)
            self._driver.record_cleanup(name, arguments, of_run=True)

    # -- where the loops stand -----------------------------------------------------------------

    def _meet(self, kind: str, name: str, target: Any) -> Mark | None:
        """Take the next of the checkpoint's loops, steps and approvals; return its mark, judged."""
        self._require_free(kind, name)
        self._met.append((kind, name))
        if any(met != known for met, known in zip(self._met, self._course.order, strict=False)):
            raise self._other_order()
        if target is None:
            return None
        mark = Mark(open_target(target), self._course, name, self._host)
        with self._frame.switched(inside=True):  # it may wait for an old transaction for long
            done = "batch" if kind == "loop" else kind
            ahead = mark.ahead(done, passed=self._is_passed)
        self._driver.note_target(name, mark.target)
        if ahead is not None:
            number = self._course.number + 1
            self._driver.say(f"commit {number} is in the target already: rolled forward")
            self._driver.commit(ahead)
        return mark

    def _require_free(self, kind: str, name: str) -> None:
        """Refuse a loop, step or approval that has no name of its own or begins inside another."""
        self._require_yielded()
        if not (name and name.isprintable() and len(name) <= LOOP_NAME_MAX):
            raise broken("no name", kind=kind, name=repr(name)[:LOOP_NAME_MAX])
        if self._step:
            raise broken("inside a step", kind=kind, name=name, step=self._step)
        if any(met_name == name for _, met_name in self._met):
            raise broken("one name", name=name)
        if self._loops and not self._loops[-1].exhausted:
            raise broken("two at once", kind=kind, name=name, loop=self._loops[-1].name)

    @property
    def _is_passed(self) -> bool:
        """Whether the loop or step met last is a finished one of the checkpoint."""
        return len(self._met) <= len(self._course.passed)

    def _other_order(self) -> PersonNeeded:
        def words(order: list[tuple[str, str]]) -> str:
            return ", ".join(f"{kind} {name!r}" for kind, name in order) or "none"

        return PersonNeeded(
            "The job's loops and steps are not those of the checkpoint.",
            why=f"The checkpoint has: {words(self._course.order)}."
            f" The job met: {words(self._met)}.",
            unchanged="Nothing was done; the checkpoint stands.",
            todo="Give them their old names and order back, or start anew:"
            f" batchrun run {self._course.run.job} --fresh",
        )

    def _place(self, loop: Loop, source: Any) -> None:
        """Put a loop behind the last committed batch of its source.

        If the checkpoint stands in a loop, it is this one: loops are met in their order.
        """
        course = self._course
        if course.run.retry_of:
            source = _TakenUp(source, functools.partial(self._driver.taken_up, loop.name))
        if hasattr(source, "last_success_read"):
            source.last_success_read = self._last_success_read
        loop.fingerprint = now = (getattr(source, "fingerprint", None) or (lambda: None))()
        if course.loop and course.source != now and "source" not in self._acceptances:
            raise SourceChanged(
                f"The source of loop {loop.name!r} changed since commit {course.number}.",
                why=f"Then its fingerprint was {course.source}, now it is {now}.",
                unchanged="Nothing was done; the checkpoint stands.",
                todo=f"Bring the old source back, or type one of:\n"
                f"  batchrun run {course.run.job} --fresh\n"
                f"  batchrun resume {course.run.id} --accept-source",
            )
        loop._source, wants_to_know = source, hasattr(source, "committed")
        loop.reads_ahead = getattr(source, "reads_ahead", False) and not wants_to_know
        loop._reader = Reader(source, course.cursor, ended=course.ended, name=loop.name)
        if course.loop:
            loop.tell_committed()

    # -- between the job and the worker: the guards --------------------------------------------

    @contextlib.contextmanager
    def _own_code(self) -> Iterator[None]:
        """Run our own code: nothing interrupts it, and the job cannot swallow what it raises."""
        if get_ident() != self._thread and not self._is_beside:
            self._broken = broken("another thread")
            raise self._broken
        with self._frame.switched(inside=False):
            self._require_unbroken()
            try:
                yield
            except BaseException as error:
                self._broken = error
                raise

    def _require_unbroken(self) -> None:
        """Raise again what the job has swallowed."""
        if self._is_beside:
            raise broken("inside a call")
        if self._broken is not None:
            raise self._broken
        if self._frame.interrupted:
            raise Interrupted

    def _require_yielded(self) -> None:
        if self._current is not None:
            raise broken("read on", number=self._current.number)

    def _as_json(self, step: str, result: Any) -> Any:
        """Return a copy of a step's result; refuse one that is not the same in JSON."""
        with contextlib.suppress(TypeError, ValueError):
            kept = _through_json(result)
            if kept == result:
                return kept
        raise broken("not JSON", step=step, result=result)

    def _receive(self, yielded: object) -> None:
        """Check what the job yielded, and commit it."""
        self._require_unbroken()
        batch = self._current
        if batch is None or yielded is not batch:
            kind = f"a value of type {type(yielded).__name__}"
            what = f"batch {yielded.number}" if isinstance(yielded, Batch) else kind
            expected = f"batch {batch.number}" if batch else "nothing: no batch is open"
            raise broken("yielded", what=what, expected=expected)
        batch._require_settled()
        self._require_no_writes(batch)
        reach("batch.yielded", batch.number)
        loop = self._loops[-1]
        self._driver.commit(batch._link, loop.read_ahead if loop.reads_ahead else None)
        self._current = None
        loop.tell_committed()

    def _require_no_writes(self, batch: Batch) -> None:
        """Refuse writes that the end of the attempt would roll back, though the batch is done."""
        own = batch._mark.target.connection if batch._mark else None
        for held in self._held:
            if held.connection is not own and held.loses_writes():
                driver = type(held.connection).__module__.partition(".")[0]
                raise broken("wrote aside", number=batch.number, driver=driver)

    def _require_complete(self) -> None:
        """Refuse a return that left something undone."""
        self._require_unbroken()
        in_hand = self._current is not None and self._current._entered
        if in_hand or not self._finished:
            self._require_yielded()
        if self._finished:
            return
        if not self._loops:
            raise broken("no loop")
        if not self._loops[-1].exhausted:
            raise broken("unread", loop=self._loops[-1].name)
        if len(self._met) < len(self._course.order):
            raise self._other_order()


def _through_json(value: Any) -> Any:
    """Return a copy of a value, whatever its owner does to it later."""
    return json.loads(_compact(value))


# -- databases -----------------------------------------------------------------------


class CountingCursor(apsw.Cursor):
    """An apsw cursor with the DB-API's `rowcount`: rows changed by the last call, in all."""

    _before = 0

    def execute(self, *arguments: Any, **named: Any) -> Any:
        """Execute, with the count begun anew."""
        self._before = self.connection.total_changes()
        return super().execute(*arguments, **named)

    def executemany(self, *arguments: Any, **named: Any) -> Any:
        """Execute for each row of bindings, with the count begun anew."""
        self._before = self.connection.total_changes()
        return super().executemany(*arguments, **named)

    @property
    def rowcount(self) -> int:
        """How many rows were changed since the last call began."""
        return self.connection.total_changes() - self._before


def open_database(url: str) -> Any:
    """Open a database as `Context.connect` says.

    Like elsewhere, `sqlite:///PATH` is `sqlite:PATH`, so that `sqlite:////PATH` is absolute.
    """
    _remember_parts("", url)
    scheme, path = url.partition(":")[0], url_path(url)
    if scheme == "sqlite" and path and not path.startswith("//"):
        return _open_sqlite(Path(path))
    if scheme in ("postgres", "postgresql"):
        return _open_postgres(url)
    raise ConfigurationError(
        f"The database {mask_secrets(url)!r} is none that batchrun can open.",
        unchanged="Nothing was opened.",
        todo='Write "sqlite:stock.db" or "postgres://user@host/name".',
    )


# Signals are looked at where Python runs, and a long statement runs none: it is made to, now and
# then. So an interrupted batch ends inside its statement; `executemany` of a list, too.
STEPS_BETWEEN_SIGNALS = 100_000  # of SQLite's machine: some 15 ms, and below what can be measured


def _open_sqlite(path: Path) -> apsw.Connection:
    try:
        is_new = not path.exists()
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(int(BUSY_LIMIT_S * 1000))
        connection.cursor_factory = CountingCursor
        connection.set_progress_handler(lambda: False, STEPS_BETWEEN_SIGNALS)
        if is_new:
            connection.pragma("journal_mode", "wal")
        connection.pragma("synchronous", "FULL")
        connection.pragma("foreign_keys", 1)
    except (apsw.Error, OSError) as error:
        raise JobError(
            f"The database {path} cannot be opened: {error}.",
            unchanged="Nothing was changed.",
            todo=f"Is its folder there and writable? ls -ld {path.absolute().parent}",
        ) from error
    return connection


# What trying again does not mend. libpq keeps no code for it; a server that speaks another
# language is tried again.
NO_ENTRY = r"password authentication failed|no password supplied|no pg_hba\.conf|does not exist\Z"


def _open_postgres(url: str) -> Any:
    try:
        import psycopg  # an extra
    except ImportError as error:
        raise ConfigurationError(
            "PostgreSQL needs the driver psycopg, which is not installed.",
            unchanged="Nothing was opened.",
            todo="Type: python -m pip install 'psycopg[binary]'",
        ) from error
    try:
        return psycopg.connect(url)
    except psycopg.Error as error:
        why, kind = "Its address cannot be read.", JobError  # such errors quote it
        if isinstance(error, psycopg.OperationalError):
            why = mask_secrets(str(error).strip())
            kind = JobError if re.search(NO_ENTRY, why) else Unreachable
            why += "." * (not why.endswith((".", "?")))
        raise kind(
            f"The database {mask_secrets(url)} does not let us in.",
            why=why,
            unchanged="Nothing was changed.",
            todo="Check that it runs, and the name and password in the configuration.",
        ) from None


CANCEL_LIMIT_S = 5.0


def close_connection(connection: Any) -> None:
    """Roll back what is open and close; what was not committed was not meant to be."""
    with contextlib.suppress(Exception):  # a statement that was interrupted goes on in its server
        if connection.info.transaction_status.name == "ACTIVE":  # psycopg's; others have none
            connection.cancel_safe(timeout=CANCEL_LIMIT_S)
    with contextlib.suppress(Exception):  # closing rolls back too; this lets locks go at once
        if hasattr(connection, "rollback"):
            connection.rollback()
    connection.close()


# -- sources --------------------------------------------------------------------------
#
# Where records come from, in an order that can be taken up again. read(after, limit) goes on
# behind the cursor `after` (None: at the start) and returns one of
#
#   keyset   [record, ...]          cursor = key(last record); keys ascend strictly; [] is the end
#   opaque   ([record, ...], next)  cursor = next; no order is demanded; next = None is the end
#
# A short answer is never the end. Every answer moves the cursor: a source that stands still or
# goes in a circle is stopped, never looped over. Our own sources are opaque, with the cursors
#
#   Query                  key of the last row. The database alone judges order and equality, by
#                          the key's own type and collation, so that its index serves.
#   Delimited, JsonLines   (byte offset, records, digest): bytes and records before the next record,
#                          counted from 0 in the uncompressed bytes, header and BOM included;
#                          digest = "LENGTH:SHA256[:32]" of the last bytes read, 4 KB at most
#   an iterable            (records, digest): records consumed, SHA256[:32] of the last one's text
#
# A source with committed() is told of each commit of its loop, before anything more is read, and of
# the newest one again when an attempt begins: the last one may have died in between. One answer of
# it that has records or rejects is one batch, for it may withhold more until it is told. What
# committed() raises ends the attempt like an error of read(); the batch stays committed.
#
# A source with `reads_ahead` true is read for the next batch while the one that was yielded is
# committed: before the job's line behind that `yield`, and in the job's own thread. Query has it;
# with committed() it is of no account.
#
# A cursor with a digest is valid if and only if what stands directly before it has that digest. An
# invalid one needs a person: going on in another source would skip or repeat records.

UNCHANGED = "Nothing was taken from it; the checkpoint stays as it is."
MAX_RECORD_LINES = 100
OPEN_QUOTE = "a quote that opens in it is still open at the end of the file"
LONG_QUOTE = f"a quote that opens in it is still open after {MAX_RECORD_LINES} lines"
MAX_LINE_BYTES = 16 * 2**20
DIGEST_BYTES = 4096
FINGERPRINT_BYTES = 32 * 2**20  # of the head, and of the tail
ESTIMATE_BYTES = 2**20
BUFFER_BYTES = 2**18
MAX_SETTLE_ROUNDS = 60

Key = str | int | Sequence[str] | Sequence[int] | Callable[[Any], Any]


def _source_letter(what: str, why: str, todo: str = "", kind: Any = JobError) -> BatchrunError:
    return cast("BatchrunError", kind(what, why=why, unchanged=UNCHANGED, todo=todo))


def _stale(what: str, why: str) -> BatchrunError:
    return _source_letter(
        what, why, "Bring the old one back, or start the job with --fresh.", PersonNeeded
    )


class Source(Protocol):
    """Where records come from.

    Optional, and used where present: `reads_ahead` (see above; its read() may use nothing of the
    context but `should_stop`), `fingerprint() -> str | None` (equal for equal content),
    `total() -> int | None` (records of the whole run, maybe an estimate), `close()`,
    `take_rejects() -> list[Reject]` (what reads have refused since the last call, in order),
    `parse` (makes a record of what stands in a raw reject, or raises ValueError or KeyError), and
    `committed(cursor)` (all that was read up to `cursor` is committed, and may be acknowledged).
    """

    def read(self, after: Any, limit: int, /) -> Any:
        """Return at most `limit` records behind `after`, in one of the two shapes above."""

    def key(self, record: Any, /) -> Any:
        """Return what identifies the record; None if the source has no key."""


def _getter(key: Key | None) -> Callable[[Any], Any]:
    """Return what takes the key from a record: by item from mappings, else by attribute."""
    if key is None or callable(key):
        return key or (lambda _record: None)
    names = tuple(key) if isinstance(key, list | tuple) else (key,)
    if {*map(type, names)} not in ({str}, {int}):
        why = "A key is a field's name, its position from 0, several of these, or a callable."
        raise ConfigurationError(f"key={key!r} is no key.", why=why)
    by_item: Callable[[Any], Any] = itemgetter(*names)
    by_name = by_item if isinstance(names[0], int) else attrgetter(*map(str, names))

    def get(record: Any) -> Any:
        try:
            return by_item(record) if hasattr(record, "keys") else by_name(record)
        except (LookupError, AttributeError, TypeError) as error:
            why = f"{type(error).__name__}: {error}, in {repr(record)[:200]}"
            raise _source_letter(f"A record has no key={key!r}.", mask_secrets(why)) from error

    return get


def _plain_key(key: Any) -> Any:
    """Return the key as a cursor: zones with a history become the fixed offset of the moment.

    Two datetimes of one zone compare by their wall clocks, wrongly where clocks are put back.
    """
    if isinstance(key, tuple):
        return tuple(map(_plain_key, key))
    if isinstance(key, datetime) and (ahead := key.utcoffset()) is not None:
        return key.replace(tzinfo=timezone(ahead), fold=0)
    return key


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:32]


class Query:
    """The rows of a SELECT in the order of a unique key, by keyset and never by OFFSET.

    `connection` is sqlite3's, apsw's, psycopg's, or another DB-API 2.0 connection with `?` or `%s`
    as placeholder, row values and standard "quoting"; it stays the caller's, and a transaction
    that a read began in it is ended. Rows come as the driver gives them. `key` names columns of
    the SELECT, unique together; an index on them makes each read cheap.

    The next rows are read while the batch before them is committed, so before the job's line behind
    that `yield`.

    The first read of an attempt refuses what keyset reading would lose rows over: NULL in the key,
    equal keys behind the cursor, a cursor of another type than the key. Each full read asks whether
    other rows, written since, have its last key.

    Timestamps are set early in a transaction and seen after its end. `lag` (seconds) leaves out
    rows whose first key column, a timestamp or its ISO 8601 text, was younger than that when the
    attempt first read: make it longer than the longest writing transaction. `zone` says which zone
    timestamps without one are in.
    """

    host = Host()  # whose clock lag= is measured by
    reads_ahead = True

    def __init__(
        self,
        connection: Any,
        select: str,
        *,
        key: str | Sequence[str],
        parameters: Sequence[Any] = (),
        lag: float | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        self._names = (key,) if isinstance(key, str) else tuple(key)
        self._columns = ['s."{}"'.format(name.replace('"', '""')) for name in self._names]
        self._key_columns = ", ".join(self._columns)
        self._take: Callable[[Any], Any] | None = None  # the key from a row, once one was met
        self._connection, self._placeholder = connection, placeholder_of(connection) or "?"
        self._select, self._parameters = select.strip().rstrip(";"), tuple(parameters)
        self._lag_s, self._zone, self._is_judged = lag, zone, False  # the first read judges
        self._until: object = None  # what lag= leaves
        self._described: list[str] = []  # the columns of the newest answer that had rows

    def key(self, row: Any) -> Any:
        """Return a row's key, also of one that is there no more and comes from a reject."""
        if self._take is None:
            columns = f"(SELECT 1 AS one) AS o LEFT JOIN (\n{self._select}\n) AS s ON 1 = 0"
            self._run(f"SELECT s.* FROM {columns}", self._parameters)  # a row of NULL: not none
            self._take = self._taker(row)
        return self._take(row)

    def read(self, after: Any, limit: int) -> tuple[list[Any], Any]:
        """Return the next rows and the last one's key; ([], None) at the end."""
        if not self._is_judged:
            self._check(after)
        if not self._is_judged:
            return [], None  # no row was there
        rows = self._ask("s.*", f"ORDER BY {self._key_columns} LIMIT {limit}", behind=after)
        if not rows:
            return [], None
        first, last = _plain_key(self.key(rows[0])), _plain_key(self.key(rows[-1]))
        if first == after:
            why = f"The row behind {after!r} has that key again, as of a type that loses digits."
            raise _source_letter("The query does not advance.", why)
        if len(rows) == limit and (count := self._count(equal=last)) > 1:
            raise self._not_unique(last, count)
        return rows, last

    def fingerprint(self) -> str:
        """Return what a cursor depends on; rows may come and go between attempts."""
        return f"rows by {', '.join(self._names)}"

    def total(self) -> int:
        """Return the number of rows of the whole run, by one count(*) at each call."""
        return self._count()

    def _check(self, after: Any) -> None:
        """Learn from one row what rows are like, and refuse what would lose some."""
        for row in self._ask("s.*", "LIMIT 1"):
            take, key = self._taker(row), ", ".join(self._names)
            nulls = " OR ".join(f"{column} IS NULL" for column in self._columns)
            if self._ask("1 AS one", "LIMIT 1", also=nulls):
                raise _source_letter(
                    f"The key ({key}) is NULL in some rows.",
                    "NULL is neither before nor behind any key: such rows would never be read.",
                    f"Add WHERE {' IS NOT NULL AND '.join(self._names)} IS NOT NULL.",
                )
            sample = take(row) if len(self._names) > 1 else (take(row),)
            stored = _kinds(after if isinstance(after, tuple) else (after,))
            if after is not None and stored != _kinds(sample):
                why = f"It is {stored}; the key is {_kinds(sample)} now."
                raise _stale(f"The cursor {after!r} is not of the key ({key}).", why)
            if self._lag_s is not None:
                self._until = self._newest(sample[0], self._lag_s)
            self._refuse_ties(after)
            self._take, self._is_judged = take, True

    def _taker(self, row: Any) -> Callable[[Any], Any]:
        """Return what takes the key from rows like this one: by name, else by place."""
        names = self._described
        if missing := [name for name in self._names if name not in names]:
            what = f"The SELECT has no column {missing[0]} for key=."
            raise ConfigurationError(what, why=f"Its columns are {', '.join(names)}.")
        if isinstance(row, tuple) or not hasattr(row, "keys"):
            return itemgetter(*map(names.index, self._names))
        return _getter(self._names)

    def _refuse_ties(self, after: Any) -> None:
        """Refuse equal keys behind the cursor; those before it were refused as they were read."""
        tail = f"GROUP BY {self._key_columns} HAVING count(*) > 1 LIMIT 1"
        for row in self._ask(f"{self._key_columns}, count(*) AS n_rows", tail, behind=after):
            *key, count = _tuple(row)
            raise self._not_unique(key[0] if len(key) == 1 else tuple(key), count)

    def _not_unique(self, key: object, count: int) -> BatchrunError:
        return _source_letter(
            f"The key ({', '.join(self._names)}) is not unique: {count:,} rows have {key!s}.",
            "A batch may end between rows of equal key; the others would be skipped.",
            f"Add columns that make it unique, as key={json.dumps([*self._names, 'id'])}.",
        )

    def _newest(self, sample: Any, lag_s: float) -> object:
        """Return the latest first key column that is read, written as the sample is."""
        own = sample
        with contextlib.suppress(ValueError):
            own = datetime.fromisoformat(sample) if isinstance(sample, str) else sample
        zone = getattr(own, "tzinfo", None) or self._zone
        if isinstance(own, datetime) and zone is not None:
            newest = datetime.fromisoformat(self.host.now()) - timedelta(seconds=lag_s)
            newest = newest.astimezone(zone).replace(tzinfo=own.tzinfo and zone)
            if own is sample:
                return newest
            gap, zero = sample[10:11] or " ", "Z" if sample.endswith("Z") else "+00:00"
            for unit in ("seconds", "milliseconds", "microseconds"):
                texts = [m.isoformat(gap, unit).replace("+00:00", zero) for m in (own, newest)]
                if texts[0] == sample:
                    return texts[1]
        raise ConfigurationError(
            f"lag= cannot judge the key column {self._names[0]}: it holds {sample!r}.",
            why="It takes timestamps and ISO 8601 text, with a zone or with zone= given.",
            todo="Give zone=UTC (from datetime) or zone=ZoneInfo(...), or leave lag= out.",
        )

    # -- asking --

    def _count(self, equal: Any = None) -> int:
        return int(_tuple(self._ask("count(*) AS n_rows", equal=equal)[0])[0])

    def _ask(
        self, what: str, tail: str = "", *, behind: Any = None, equal: Any = None, also: str = ""
    ) -> list[Any]:
        """Return what the SELECT's rows give, of those behind or with a key, within lag=."""
        conditions, values = [f"({also})"] if also else [], list[Any]()
        for sign, key in ((">", behind), ("=", equal)):
            if key is not None:
                parts = key if isinstance(key, tuple) else (key,)
                marks = ", ".join([self._placeholder] * len(parts))
                conditions.append(f"({self._key_columns}) {sign} ({marks})")
                values += parts
        if self._until is not None:
            conditions.append(f"{self._columns[0]} <= {self._placeholder}")
            values.append(self._until)
        select = self._select
        if self._placeholder == "%s" and values and not self._parameters:
            select = select.replace("%", "%%")  # literal, as it is without parameters
        where = " WHERE " + " AND ".join(conditions) if conditions else ""
        text = f"SELECT {what} FROM (\n{select}\n) AS s{where} {tail}"
        return self._run(text, (*self._parameters, *values))

    def _run(self, text: str, values: tuple[Any, ...]) -> list[Any]:
        """Return the rows; a transaction that this began is over then."""
        state = getattr(getattr(self._connection, "info", None), "transaction_status", None)
        begins_one = state == 0  # psycopg's IDLE
        cursor = self._connection.cursor()
        try:
            cursor.execute(text, *([values] if values else []))
            with contextlib.suppress(apsw.ExecutionCompleteError):  # no rows
                self._described = [column[0] for column in cursor.description]
            rows: list[Any] = cursor.fetchall()
        except Exception:
            if begins_one:
                self._connection.rollback()
            raise
        finally:
            cursor.close()
        if begins_one:
            self._connection.commit()  # not rollback: psycopg would forget what it has prepared
        return rows


def _tuple(row: Any) -> tuple[Any, ...]:
    """Return the row as a tuple, whatever the connection makes of rows."""
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)


def _kinds(key: tuple[Any, ...]) -> str:
    """Return the kinds of a key's parts: a database may compare others with them, but wrongly."""
    from numbers import Number

    names = ["number" if isinstance(part, Number) else type(part).__name__ for part in key]
    zoned = [" with zone" if getattr(part, "tzinfo", None) else "" for part in key]
    return ", ".join(map(str.__add__, names, zoned))


class _Parsing:
    """A source that makes records of raw ones by `parse`, if it has one, and keeps the rejects."""

    def __init__(self, parse: Callable[[Any], Any] | None) -> None:
        self.parse, self._rejects = parse, list[Reject]()

    def take_rejects(self) -> list[Reject]:
        """Return the records that parse= has refused since the last call."""
        rejects, self._rejects = self._rejects, []
        return rejects

    def _parsed(
        self, parse: Callable[[Any], Any], numbered: Iterable[tuple[int | None, Any]]
    ) -> list[Any]:
        """Return what `parse` makes of raw records and their numbers."""
        records = []
        for number, record in numbered:
            try:
                records.append(parse(record))
            except (ValueError, KeyError) as error:
                which = f"record {number}: " if number is not None else ""
                reason = f"{which}{type(error).__name__}: {error}"
                self._rejects.append(Reject(record, reason, number, raw=True))
        return records


class _RecordFile(_Parsing):
    """What Delimited and JsonLines share: a held file, positions in it, and what is refused."""

    host = Host()  # whose sleep settle= waits by
    last_success_read: int | None = None  # records that the last success read; set by the context
    _torn: tuple[type[Exception], ...] = (OSError, EOFError)  # what reading may raise
    _position: object  # what the next read in a row passes as `after`

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: Key | None = None,
        encoding: str = "utf-8",
        parse: Callable[[Any], Any] | None = None,
        settle: float = 0,
        min_records: int = 0,
        min_of_last: float = 0,
    ) -> None:
        super().__init__(parse)
        self.path, self.key = Path(path), _getter(key)
        self._encoding = _encoding(encoding, self.path)
        self._settle_s, self._min_records, self._min_of_last = settle, min_records, min_of_last
        self._stream: Any = None  # the uncompressed bytes

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; a later read opens whatever has its name then."""
        if self._stream is not None:
            self._stream.close()
            self._file.close()
            self._stream = None

    def read(self, after: Any, limit: int) -> tuple[list[Any], Any]:
        """Return what parse= lets through of the next `limit` records, and where to go on."""
        self._open()
        try:
            if after != self._position:
                self._go_to(after)
            self._position = self  # nowhere, should this read fail
            raw, taken = self._take(limit)
            numbered = enumerate(raw, self._number + 1)
            records = raw if self.parse is None else self._parsed(self.parse, numbered)
        finally:
            self._refuse_changed()
        if not taken:
            self._refuse_thin()
            return [], None
        self._byte_offset += len(taken)
        self._number += len(raw)
        last = taken[-DIGEST_BYTES:]
        self._position = self._byte_offset, self._number, f"{len(last)}:{_digest(last)}"
        return records, self._position

    def fingerprint(self) -> str:
        """Return size and SHA-256 of the file as stored: all of it, or beyond 64 MB both ends."""
        self._open()
        size, part, found = self._stat.st_size, FINGERPRINT_BYTES, sha256(b"")
        head = range(0, min(part, size), BUFFER_BYTES)
        for at in (*head, *range(max(part, size - part), size, BUFFER_BYTES)):
            found.update(os.pread(self._file.fileno(), BUFFER_BYTES, at))
        self._refuse_changed()
        return f"{size}:{found.hexdigest()}"

    def total(self) -> int | None:
        """Return about how many records there are, from the lines of the first MB; None: gzip."""
        self._open()
        size = self._stat.st_size - self._first
        if self._stream is not self._file or not size:
            return None if size else 0
        head = os.pread(self._file.fileno(), min(ESTIMATE_BYTES, size), self._first)
        lines = head.count(b"\n") + (size == len(head) and not head.endswith(b"\n"))
        return round(lines * size / len(head))

    def _split(self, text: str, limit: int, why: str) -> tuple[list[Any], int, str]:
        """Return up to `limit` records, the lines they take, and what is wrong with the next.

        `why` is what is wrong behind the end of the text.
        """
        raise NotImplementedError

    def _begin(self) -> None:
        """Read what stands before the first record."""

    def _open(self) -> None:
        if self._stream is not None:
            return
        try:
            self._await_stillness()
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise ConfigurationError(f"{self.path} is no regular file: it has no positions.")
            self._stream = self._file = self.path.open("rb", buffering=BUFFER_BYTES)
        except OSError as error:
            why = f"The working folder is {Path.cwd()}."
            what = f"{self.path} cannot be read: {error.strerror}."
            raise _source_letter(what, why, kind=SourceError) from error
        self._stat = os.fstat(self._file.fileno())
        self._byte_offset = self._number = 0
        self._position = None
        self._lines, self._trouble = list[bytes](), ""  # read ahead, and why there are no more
        try:
            self._unpack()
            self._begin()
        except BaseException:
            self.close()
            raise
        self._first = self._byte_offset

    def _await_stillness(self) -> None:
        """Wait until size and time of change stay equal over settle=."""
        for _ in range(MAX_SETTLE_ROUNDS):
            before = _version(self.path.stat())
            if self._settle_s:
                self.host.sleep(self._settle_s)
            if _version(self.path.stat()) == before:
                return
        why = f"It was not still for {self._settle_s:g} s in any of {MAX_SETTLE_ROUNDS} tries."
        raise _source_letter(f"{self.path} is still being written.", why, kind=SourceError)

    def _unpack(self) -> None:
        """Go through gzip, and past a UTF-8 byte order mark; refuse UTF-16 and UTF-32."""
        if os.pread(self._file.fileno(), 2, 0) == b"\x1f\x8b":
            import gzip  # only where a file is packed
            import io
            import zlib

            unpacked: Any = gzip.GzipFile(fileobj=self._file)
            self._stream = io.BufferedReader(unpacked, BUFFER_BYTES)
            self._torn = (OSError, EOFError, zlib.error)
        try:
            head = self._stream.peek(4)[:4]
        except self._torn as error:
            raise self._unreadable(str(error)) from error
        if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
            wide = head == b"\xff\xfe\x00\x00"
            raise _not_ascii("UTF-32" if wide else "UTF-16", self.path)
        if head.startswith(b"\xef\xbb\xbf"):
            self._byte_offset = len(self._stream.read(3))

    def _refuse_changed(self) -> None:
        if _version(os.fstat(self._file.fileno())) != _version(self._stat):
            why = "Write feeds under another name and rename them: then none is a mixture."
            raise _stale(f"{self.path} was changed in place while it was read.", why)

    def _go_to(self, after: Any) -> None:
        """Go to a position, if what stands before it is what stood there."""
        if after is None:
            after = (self._first, 0, f"0:{_digest(b'')}")
        if not isinstance(after, tuple) or len(after) != 3:
            raise _stale(f"{after!r} is no position in {self.path}.", "Another source has made it.")
        self._byte_offset, self._number, digest = after
        length = int(digest.partition(":")[0])
        self._lines, self._trouble, self._rejects = [], "", []
        try:
            self._stream.seek(self._byte_offset - length)
            last = self._stream.read(length)
        except self._torn as error:
            raise self._unreadable(str(error)) from error
        if digest != f"{length}:{_digest(last)}":
            ends = f"another record {self._number:,} ends at byte {self._byte_offset:,}"
            why = "It was replaced, sorted or cut between two attempts."
            raise _stale(f"{self.path} has changed: {ends}.", why)

    def _take(self, limit: int) -> tuple[list[Any], bytes]:
        """Return up to `limit` records and their bytes; without bytes at the end.

        What cannot be read is refused when it comes first; what stands before it is given out.
        """
        self._read_ahead(limit + MAX_RECORD_LINES)
        content, why = b"".join(self._lines), self._trouble
        try:
            text = content.decode(self._encoding)
        except UnicodeDecodeError as error:
            why = f"byte {content[error.start]:#04x} is no {error.encoding}: {error.reason}"
            text = content[: content.rfind(b"\n", 0, error.start) + 1].decode(self._encoding)
        records, used, why = self._split(text, limit, why)
        if why and not used:
            raise self._unreadable(why)
        taken = b"".join(self._lines[:used])
        del self._lines[:used]
        return records, taken

    def _read_ahead(self, count: int) -> None:
        """Have `count` lines in hand, or all that can be read."""
        if self._trouble:
            return
        following = iter(functools.partial(self._stream.readline, MAX_LINE_BYTES), b"")
        try:
            for line in islice(following, max(0, count - len(self._lines))):
                if len(line) == MAX_LINE_BYTES:
                    self._trouble = f"it has a line of {MAX_LINE_BYTES:,} bytes or more"
                    break
                self._lines.append(line)
        except self._torn as error:
            self._trouble = str(error)

    def _unreadable(self, why: str) -> BatchrunError:
        number, at = self._number + 1, self._byte_offset
        what = f"{self.path}: record {number:,}, which begins at byte {at:,}, cannot be read."
        return _source_letter(what, f"{why[:1].upper()}{why[1:]}.", kind=SourceError)

    def _refuse_thin(self) -> None:
        of_last = (self.last_success_read or 0) * self._min_of_last
        if self._number < max(self._min_records, of_last):
            raise _source_letter(
                f"{self.path} ended after {self._number:,} records: too few.",
                f"min_records = {self._min_records:,}; min_of_last = {self._min_of_last:g}, and the"
                f" last success read {self.last_success_read or 0:,}.",
                "Look at the feed; if it is right, lower the limit and resume.",
                PersonNeeded,
            )


def _version(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _lines_of(text: str, limit: int) -> list[str]:
    """Return up to `limit` lines without their ends; the last one may have none."""
    lines = text.replace("\r\n", "\n").split("\n", limit)
    if len(lines) > limit or not lines[-1]:
        lines.pop()  # no line: the rest, or nothing behind the last line's end
    return lines


def _not_ascii(encoding: str, path: Path) -> ConfigurationError:
    from shlex import quote

    source, target = quote(str(path)), quote(f"{path}.utf8")
    return ConfigurationError(
        f"{path}: {encoding} cannot be read by byte positions.",
        why="A byte of it may look like a line end or a delimiter and be part of a character.",
        todo=f"iconv -f {encoding} -t UTF-8 {source} > {target}",
    )


def _encoding(name: str, path: Path) -> str:
    """Return the encoding if in it every byte is a character, and ASCII is ASCII; or UTF-8."""
    from codecs import lookup

    everything = bytes(range(256)) + b"\x1b$B!!\x1b(B"
    try:
        found = lookup(name).name.removesuffix("-sig")
        texts = [everything.decode(encoding, "replace") for encoding in (found, "latin-1")]
    except (LookupError, UnicodeError) as error:
        what = f"{name!r} is no encoding that can be read."
        raise ConfigurationError(what, why=str(error)) from error
    own, plain = (text[:128] + text[256:] for text in texts)
    if found != "utf-8" and (own != plain or len(texts[0]) != len(everything)):
        raise _not_ascii(name, path)
    return found


class Delimited(_RecordFile):
    """The records of a CSV or TSV file, plain or gzip, as dicts or as parse= makes them.

    Without `columns` the first record names them; `.columns` are these, once the file is open. Tab
    is the delimiter of *.tsv and *.tab (also *.gz), else comma; `quoting` is on unless the
    delimiter is tab. Every record must have a field for each column; an empty line is no record
    (with one column it is one, with an empty field). Records are counted from 1.
    `parse` gets a dict and rejects it by raising ValueError or KeyError. `key` is as in as_source;
    positions do not depend on it.

    The file is held open: replaced by rename, the old one is read to its end; changed in place, it
    needs a person. `settle` (seconds) waits at open until it was still for that long. At the end,
    fewer records (rejected ones included) than `min_records`, or than the share `min_of_last` of
    what the last success read, need a person; the last, partial batch is not given out then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        quoting: bool | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(path, **shared)
        if delimiter is None:
            is_tsv = self.path.name.lower().removesuffix(".gz").endswith((".tsv", ".tab"))
            delimiter = "\t" if is_tsv else ","
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise ConfigurationError(f"delimiter={delimiter!r} must be one ASCII character.")
        self._delimiter = delimiter
        self._quoting = delimiter != "\t" if quoting is None else quoting
        self._given = list(columns or [])
        self._width = 0  # fields of a record; 0 while they are not known
        self.columns: list[str] = []

    def _begin(self) -> None:
        self._width, names = 0, self._given
        while not names:
            rows, taken = super()._take(1)
            if not taken:
                break
            self._byte_offset += len(taken)
            names = rows[0] if rows else []
        if twice := {name for name in names if names.count(name) > 1}:
            what = f"{self.path} has two columns of one name: {', '.join(sorted(twice))}."
            why = "A file without a header line needs columns= with names of your own."
            raise _source_letter(what, why, kind=SourceError)
        self._width, self.columns = len(names), names

    def _take(self, limit: int) -> tuple[list[Any], bytes]:
        rows, taken = super()._take(limit)
        columns = self.columns  # one for each field: strict= would be checked twice, at 10 %
        return [dict(zip(columns, row)) for row in rows], taken  # noqa: B905

    def _split(self, text: str, limit: int, why: str) -> tuple[list[Any], int, str]:
        rows, why = self._rows(text, limit, why)
        if self._width == 1:
            rows = [row or [""] for row in rows]
        is_even = {self._width}.issuperset(map(len, rows))
        if is_even and not (self._quoting and '"' in text) and "\ufeff" not in text:
            return rows, len(rows), why
        used = 0
        for index, row in enumerate(rows):
            lines = 1 + "".join(row).count("\n")
            if wrong := self._what_is_wrong(row, lines):
                return [row for row in rows[:index] if row], used, wrong
            used += lines
        return [row for row in rows if row], used, why

    def _rows(self, text: str, limit: int, why: str) -> tuple[list[list[str]], str]:
        """Return the fields of up to `limit` records, none for an empty line."""
        if not (self._quoting and ('"' in text or "\r" in text.replace("\r\n", "\n"))):
            lines = _lines_of(text, limit)
            return [line.split(self._delimiter) if line else [] for line in lines], why
        import csv  # only for what needs it: splitting is faster
        import io

        rows: list[list[str]] = []
        lines_in_c = io.StringIO(text, newline="\n")
        reader = csv.reader(lines_in_c, delimiter=self._delimiter, strict=True)
        try:
            rows.extend(islice(reader, limit))  # keeps the rows before an error
        except csv.Error as error:
            if str(error) != "unexpected end of data":
                why = str(error)
            elif not why:
                why = LONG_QUOTE if text.count("\n") > MAX_RECORD_LINES else OPEN_QUOTE
        return rows, why

    def _what_is_wrong(self, row: list[str], lines: int) -> str:
        if lines > MAX_RECORD_LINES:
            return LONG_QUOTE
        if row and row[0].startswith("\ufeff"):
            return "a byte order mark stands before it, as where files were joined"
        if row and len(row) != (self._width or len(row)):
            return f"it has {len(row)} fields; the columns are {self._width}"
        return ""


class JsonLines(_RecordFile):
    """The records of a file of one JSON value a line, plain or gzip.

    An empty line is no record. The other arguments, and what ends the reading, are Delimited's.
    """

    def _split(self, text: str, limit: int, why: str) -> tuple[list[Any], int, str]:
        records = []
        for used, line in enumerate(lines := _lines_of(text, limit)):
            try:
                if line:
                    records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                return records, used, f"it is no JSON: {error}"
        return records, len(lines), why


class _Iterated:
    """An iterable as a source; cursor = (records consumed, digest of the last one)."""

    def __init__(self, iterable: Iterable[Any], key: Key | None) -> None:
        self.key, self._is_keyed = _getter(key), key is not None
        self._iterable, self._rest = iterable, iter(iterable)
        self._position: tuple[int, str] = (0, "")

    def total(self) -> int | None:
        return len(self._iterable) if isinstance(self._iterable, Sized) else None

    def read(self, after: Any, limit: int) -> tuple[list[Any], Any]:
        self._skip_to((0, "") if after is None else after)
        records = list(islice(self._rest, limit))
        if not records:
            return [], None
        self._position = self._position[0] + len(records), self._identity(records[-1])
        return records, self._position

    def _skip_to(self, wanted: Any) -> None:
        count = wanted[0] if isinstance(wanted, tuple) else 0
        if count < self._position[0]:
            self._rest, self._position = iter(self._iterable), (0, "")
            if self._rest is self._iterable:
                what = "An iterator cannot be read again from an earlier record."
                raise JobError(what, todo="Pass a list, or a Delimited, JsonLines or Query.")
        skipped = count - self._position[0]
        for last in islice(self._rest, max(skipped - 1, 0), skipped):
            self._position = count, self._identity(last)
        if self._position != wanted:
            why = f"Its record {count:,} is another one, or missing."
            raise _stale("The iterable gives other records than before.", why)

    def _identity(self, record: Any) -> str:
        """Return the digest of the record's key, or of its text without a key."""
        text = repr(self.key(record) if self._is_keyed else record)
        if " at 0x" in text:
            raise ConfigurationError(
                f"A record cannot be known again by its text {text[:80]}.",
                why="The text holds a memory address, which is another one in each process.",
                todo="Give key=, or make the records dicts, tuples or dataclasses.",
            )
        return _digest(text.encode("utf-8", "surrogatepass"))


class _TakenUp(_Parsing):
    """The rejects that a retry has taken up; cursor = the spot of the last one.

    The source that they came from is not read, and demands nothing of a whole reading.
    """

    def __init__(self, source: Any, fetch: Callable[[Any, int], list[RejectRow]]) -> None:
        super().__init__(getattr(source, "parse", None))
        self.key, self._fetch = source.key, fetch

    def total(self) -> int:
        return len(self._fetch(None, -1))

    def read(self, after: Any, limit: int) -> tuple[list[Any], Any]:
        rows, records = self._fetch(after, limit), list[Any]()
        for row in rows:
            value = decode_cursor(cast("str", row.value))
            if row.raw and self.parse is not None:
                records += self._parsed(self.parse, [(row.record_number, value)])
            else:
                records.append(value)
        return records, rows[-1].spot if rows else None


class Remembered:
    """The rows that batches have remembered, newest batch first, last row first.

    `batches` are in that order; cursor = (commit number, rows of its image that are left).
    """

    def __init__(self, batches: Sequence[BatchRow], store: ImageStore) -> None:
        self._batches = [batch for batch in batches if batch.images]
        self._lines_of = functools.lru_cache(maxsize=1)(store.lines)  # of one image at a time

    def key(self, _record: Any) -> None:
        """Return nothing: what a row is, only the job knows."""

    def total(self) -> int:
        """Return the number of all rows."""
        return sum(batch.remembered for batch in self._batches)

    def read(self, after: tuple[int, int] | None, limit: int) -> tuple[list[Any], Any]:
        """Return rows of one image, which is checked whole when it is opened."""
        newest, there = after or (sys.maxsize, 0)
        for batch in self._batches:
            left = there if batch.number == newest else batch.remembered
            if left and batch.number <= newest:
                line, last = divmod(left - 1, ROWS_A_LINE)
                first = max(0, last + 1 - limit)
                text = self._lines_of(batch.images)[line].decode("utf-8", "surrogatepass")
                rows = decode_cursor(text)[first : last + 1]
                return rows[::-1], (batch.number, left - len(rows))
        return [], None


def as_source(source: Any, key: Key | None = None) -> Source:
    """Return a source for a Source, a callable read(after, limit), or an iterable.

    `key` is a field or attribute name, a position from 0, several of these, or a callable.
    """
    kind = type(source).__name__
    if callable(getattr(source, "read", None)) and callable(getattr(source, "key", None)):
        if key is not None:
            raise ConfigurationError(f"Give key= to {kind}(...) itself, not beside it.")
        return cast("Source", source)
    if callable(source):
        return cast("Source", SimpleNamespace(read=source, key=_getter(key)))
    no_records = isinstance(source, set | frozenset | dict | str | bytes | bytearray)
    if no_records or not isinstance(source, Iterable):
        raise ConfigurationError(
            f"A {kind} is no source of records in a lasting order.",
            todo="Pass a list, sorted() of a set, items() of a dict, or a read(after, limit).",
        )
    return _Iterated(source, key)


class Portion(NamedTuple):
    """The records of one batch, and where the next one begins."""

    records: list[Any]
    cursor: Any  # behind the last record; the one before if nothing was read or this is the end
    ended: bool  # no more can come
    rejects: list[Reject]  # read and refused by the source, up to the cursor
    first_key: Any = None  # None without records, or without a key
    last_key: Any = None


class Reader:
    """Fills batches from a source and checks that it advances.

    A batch holds at most `limit` records and rejects together, unless one opaque answer is longer:
    that is not split, and waits for a batch of its own. It is shorter only at the end, before such
    an answer, or if the source has committed(). `after` and `ended` are those of the last Portion
    that was committed.
    """

    def __init__(
        self, source: Source, after: Any, *, ended: bool = False, name: str = "main"
    ) -> None:
        self._source, self._cursor, self._ended, self._name = source, after, ended, name
        self._waiting: Portion | None = None
        self._answers, self._landmark = 0, after
        self._one_answer = hasattr(source, "committed")

    def read_batch(self, limit: int) -> Portion:
        """Return the next batch; without records and rejects, and ended, once all was read.

        Rejects may come without a record.
        """
        start, records, rejects = self._cursor, list[Any](), list[Reject]()
        while (room := limit - len(records) - len(rejects)) > 0 and not self._ended:
            portion, self._waiting = self._waiting or self._read(room), None
            if len(portion.records) + len(portion.rejects) > room and room < limit:
                self._waiting = portion
                break
            records += portion.records
            rejects += portion.rejects
            self._cursor, self._ended = portion.cursor, portion.ended
            if self._one_answer and (records or rejects):
                break
        if not records:
            return Portion([], self._cursor if rejects else start, self._ended, rejects)
        first, last = (_plain_key(self._source.key(records[index])) for index in (0, -1))
        return Portion(records, self._cursor, self._ended, rejects, first, last)

    def _read(self, room: int) -> Portion:
        got = self._source.read(self._cursor, room)
        rejects = list(getattr(self._source, "take_rejects", list)())
        if isinstance(got, list):
            cursor = self._checked_keys(got[:room]) if got else self._cursor
            return Portion(got[:room], cursor, not got, rejects)
        if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], list)):
            raise self._broken_contract(f"returned a {type(got).__name__}")
        records, following = got
        if following is None:
            return Portion(records, self._cursor, ended=True, rejects=rejects)
        self._check_advance(following)
        return Portion(records, following, ended=False, rejects=rejects)

    def _checked_keys(self, records: list[Any]) -> Any:
        """Return the last key, if keys ascend strictly from the cursor on."""
        keys = [_plain_key(self._source.key(record)) for record in records]
        if keys[0] is None:
            raise self._broken_contract("returned a list, so it needs a key")
        way = keys if self._cursor is None else [self._cursor, *keys]
        try:
            for before, after in pairwise(way):
                if not before < after:
                    why = f"does not advance: after {before!r} came {after!r}"
                    raise self._broken_contract(why)
        except TypeError as error:
            why = f"has keys that cannot be compared: {error}, after {self._cursor!r}"
            raise self._broken_contract(why) from error
        return keys[-1]

    def _check_advance(self, following: Any) -> None:
        """Refuse a next cursor that was there before: the last one, or a landmark of the way."""
        if following in (self._cursor, self._landmark):
            why = f"does not advance: after {self._cursor!r} it goes on at {following!r}"
            raise self._broken_contract(why)
        self._answers += 1
        if self._answers.bit_count() == 1:  # 1, 2, 4, 8 ...: far enough apart for any circle
            self._landmark = following

    def _broken_contract(self, why: str) -> BatchrunError:
        return _source_letter(
            f"The source of loop {self._name} {why}.",
            "read(after, limit) returns a list of records, their keys ascending strictly from"
            " `after` on, or (list of records, next cursor).",
            "Order by the whole key, ascending, and add columns until it is unique.",
        )


# ======================================================================================
# 9. Operations: effects in the outside world, each under a key, once ever
# ======================================================================================
#
# An operation is a call that changes something outside: claim, call, outcome. Its row is never
# deleted, and (job, key) is unique: what is recorded is called never again, in no attempt and no
# run. The claim is durable before the call begins; it keeps a digest of the call's arguments.
#
#   open        claimed, no outcome. While its claimant lives the call may be at work; after that it
#               is *unknown*. `why` is the error of the call, if there was one
#   done        the call returned
#   confirmed   lookup found it, or a person did; `who` says which
#   freed       surely not done, and may be claimed again: never begun, refused (the job's
#               `not_done`), not found by lookup, or a person said so
#
# Who may write: the run's owner, fenced by its generation; where no owner is, `reconcile`. Nothing
# but an update of an open row gives an outcome, nothing but a claim takes `freed` away.
#
#   crash before the claim is committed     nothing: it is claimed and called by the next attempt
#   between claim and call, or in the call  open: unknown
#   between the call's return and the       open: unknown, though it was done
#     outcome's commit
#   power cut after the outcome             as before it, unless a commit of the batch, or another
#                                           claim, followed: an outcome alone waits for no disk
#
# The next attempt that meets an unknown key asks `lookup` first. Found = confirmed. Absent is
# believed only when `settle` has passed since this attempt began (its admission proved that the
# claimant is gone), for a request that was under way may arrive later; then lookup is asked once
# more. Without a lookup, or where it raises CannotTell, all that can be told is recorded and the
# run awaits a person; so does one that would end with an unknown operation whose key it never met.
#
# A batch's keys are claimed in slices just ahead of the calls: one transaction tells what ended and
# claims as many. At most two slices are open at a time, and a slice is as small as the calls are
# slow (SLICE_S), 64 or the number of workers at most. Only calls and lookups run in threads. An
# error that ends the calls, a stop, or a wait that the destination asks for (Retry-After) halts
# them: none begins any more, those in flight are awaited, all is recorded, what was claimed and
# not begun is freed. A call over its time limit is not awaited: it stays unknown.

KEY_MAX_CHARS = 512
SLICE = 64
SLICE_S = 0.1  # a slice takes about so long, if it can
TICK_S = 0.1  # between two looks at stops and time limits
PER_S = {"s": 1, "m": 60, "h": 3600}
POINTS = {"call": "operation.called", "lookup": "operation.looked_up"}  # named ones, after it
TWO_RECORDS = "Two records of this batch have it, and what is to be called for them differs."
MET_AGAIN = "operations were recorded before and are not called again; the first is"


def digest_of(key: str, arguments: tuple[Any, ...]) -> bytes:
    """Return the digest of a call's arguments; equal ones have equal digests in every process."""
    try:
        return sha256(_canonical(arguments).encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise broken("no digest", key=key, reason=error) from error


def _plain_argument(value: Any) -> Any:
    """Return what JSON has no form for as something that it has."""
    kind = type(value).__name__
    if kind in ("Decimal", "date", "datetime", "UUID", "bytes"):
        return _to_plain(value)
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None:
        raise TypeError(f"a {kind} is among them")
    return {name: getattr(value, name) for name in fields}


_canonical = _encoder(sort_keys=True, default=_plain_argument)
_from_json = json.JSONDecoder().raw_decode  # half the time of json.loads


class Crew:
    """Makes calls, at the same time and at a rate, in threads; a crew of one in the main thread.

    Attributes:
        ready: what is to be called, in order.
        out: what was given to the threads and has not come back, by key.
        halted: whether no call may begin any more; what was not begun comes back as it was.
        due: when the next call may begin.
    """

    def __init__(self, of: Operations, how: How, call: Callable[[Claim], Any], what: str) -> None:
        import queue  # only for jobs that have operations

        self._of, self._host, self._limit_s = of, of.host, of.options.call_timeout_s
        self._call, self._what = call, what
        self._interval_s = interval_of(how.rate)
        self._room = how.workers if self._interval_s else sys.maxsize
        # threads sleep on the first bell, the main thread on the second; a ring says: look
        self._bells: list[Any] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._given, self._back = deque[Claim](), deque[Claim]()
        self._silence = queue.Empty
        self._threads = how.workers if how.workers > 1 else 0
        self._looked_at = 0.0
        self.ready: deque[Claim] = deque()
        self.out: dict[str, Claim] = {}
        self.halted, self.due = False, 0.0

    def __enter__(self) -> Self:
        """Let the threads begin; they are daemons, so that a call that hangs holds nobody up."""
        if self._threads:
            import threading

            for _ in range(self._threads):
                threading.Thread(target=self._labour, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the threads end; after an error they begin no call that still waits for one."""
        self.halted = True
        for _thread in range(self._threads):
            self._bells[0].put(None)

    def add(self, claims: Iterable[Claim]) -> None:
        """Have calls made, in order; what an earlier crew has made of the claims is forgotten."""
        for claim in claims:
            claim.began, claim.result, claim.error = 0.0, None, None
            self.ready.append(claim)

    def _labour(self) -> None:
        given, back, (work, ended) = self._given, self._back, self._bells
        while work.get():
            with contextlib.suppress(IndexError):  # until nothing is left
                while True:
                    claim = given.popleft()
                    if not self.halted:
                        self._make(claim)
                    back.append(claim)
                    if ended.empty():
                        ended.put(1)

    def _make(self, claim: Claim) -> None:
        claim.began = self._host.monotonic()
        try:
            claim.result = self._call(claim)
            if hasattr(type(claim.result), "__await__"):
                self._refuse_awaitable(claim)
        except BaseException as error:  # noqa: BLE001 - it belongs to the main thread
            claim.error = error
        reach(POINTS[self._what], claim.id)

    def _refuse_awaitable(self, claim: Claim) -> None:
        """Refuse what is to be awaited; a coroutine that has not begun was surely not made."""
        import inspect

        if inspect.iscoroutine(claim.result):
            if inspect.getcoroutinestate(claim.result) == inspect.CORO_CREATED:
                claim.began = 0.0
            claim.result.close()
        claim.is_late = bool(claim.began)  # it may be at work
        kind = type(claim.result).__name__
        raise broken("not awaited", key=claim.key, kind=kind, what=self._what)

    def _make_here(self, claim: Claim) -> None:
        """Make a call in the main thread, within its time limit."""
        try:
            self._of.alarm.call(self._make, claim)
        except TimeoutError:
            claim.error = Overdue()
        if isinstance(claim.error, Overdue):
            claim.error = self._late(claim)

    def turn(self) -> list[Claim]:
        """Begin what is due, wait for a moment, and return what has ended or may not begin."""
        if self._of.driver.stop_is_asked():
            self.halted = True
        if self.halted:
            back = list(self.ready)
            self.ready.clear()
            return back or self._landed(TICK_S)
        now, before = self._host.monotonic(), len(self.out)
        while self.ready and len(self.out) < self._room and now >= self.due:
            claim = self.ready.popleft()
            if self._interval_s:
                self.due = max(now, self.due) + self._interval_s
            if not self._threads:
                self._make_here(claim)
                return [claim]
            self.out[claim.key] = claim
            self._given.append(claim)
        for _ in range(min(self._threads, len(self.out) - before)):
            self._bells[0].put(1)
        left_s = self.due - now if self.ready and len(self.out) < self._room else TICK_S
        return self._landed(min(left_s, TICK_S))

    def _landed(self, wait_s: float) -> list[Claim]:
        """Return what has come back within a moment, or is overdue."""
        if not self.out:
            self._host.sleep(wait_s)
            return []
        with contextlib.suppress(self._silence):
            self._bells[1].get(timeout=wait_s)
        back = [self._back.popleft() for _ in range(len(self._back))]
        return [claim for claim in back if self.out.pop(claim.key, None)] + self._overdue()

    def _overdue(self) -> list[Claim]:
        """Give up what is over its time limit."""
        now = self._host.monotonic()
        if now < self._looked_at + TICK_S:
            return []
        self._looked_at = now
        late = [c for c in self.out.values() if c.began and now - c.began > self._limit_s]
        for claim in late:
            del self.out[claim.key]
            claim.error = self._late(claim)
        return late

    def _late(self, claim: Claim) -> TimeoutError:
        claim.is_late = True
        what = f"the {self._what} of operation {claim.key!r}"
        return TimeoutError(f"{what} did not end within {self._limit_s:g} s")


def interval_of(rate: str | None) -> float:
    """Return how long it is from one call to the next at a rate, in s; 0: no limit."""
    if rate is None:
        return 0.0
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)/([smh])", str(rate))
    if found is None or not float(found[1]):
        raise broken("no rate", rate=rate)
    return PER_S[found[2]] / float(found[1])


def retry_after_s(error: Any, now: str) -> float | None:
    """Return how long a destination asks to wait, in seconds or by an HTTP date, if it does."""
    asked: Any = getattr(error, "retry_after", None)
    for place in (error, getattr(error, "response", None)):
        headers: Any = getattr(place, "headers", None)
        if asked is None and hasattr(headers, "get"):
            asked = headers.get("Retry-After")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0.0, float(asked))
    with contextlib.suppress(TypeError, ValueError):
        from email.utils import parsedate_to_datetime

        return max(0.0, seconds_between(now, parsedate_to_datetime(asked).isoformat()))
    return None


class Operations:
    """All operations of one attempt.

    Attributes:
        newest: the highest operation id that this attempt knows of.
        host, options, driver: of the attempt.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: Run,
        generation: int,
        host: Host,
        options: JobConfig,
        not_done: Callable[[BaseException], object] | None,
        driver: _Driver,
    ) -> None:
        self._ledger, self._run, self._generation = ledger, run, generation
        self.host, self.options, self._not_done, self.driver = host, options, not_done, driver
        self._settled_at = host.monotonic() + options.settle_s  # the claimants before us are gone
        self._told = self._said = False  # whether that waits for the disk; and of one met again
        self.newest = ledger.newest_operation()

    @functools.cached_property
    def alarm(self) -> Alarm:
        """What ends calls that are made in the main thread."""
        return Alarm(self.options.call_timeout_s)

    # -- what the worker asks for ----------------------------------------------------------

    def perform(
        self, number: int, wanted: Sequence[tuple[str, tuple[Any, ...]]], how: How
    ) -> list[Claim]:
        """Do what was never done under these keys; say of each what became of it, in order."""
        claims = self._claims_for(wanted)
        known = self._ledger.operations_with(self._run.job, claims)
        unknown, todo = dict[Claim, Operation](), deque[Claim]()
        for key, claim in claims.items():
            row = known.get(key)
            if row is None or row.outcome == FREED:
                todo.append(claim)
                continue
            if row.arguments != claim.digest:
                by = self._ledger.run(row.run)
                raise self._reused(key, f"It was claimed at {row.claimed_at} by run {by.id}.")
            claim.id = row.id
            if row.outcome is None:
                unknown[claim] = row
            else:
                claim.result = _from_json(row.receipt or "null")[0]
                claim.counts_as = self._known(row, number)
        if unknown:
            todo.extend(self._find_out(unknown, number, how))
        if todo:
            Effects(self, number, how, todo).make_all()
        return [claims[key] for key, _ in wanted]

    def sync(self) -> int:
        """Make durable what was told, before a commit is built on it; return the newest id."""
        if self._told:
            self._ledger.sync(self._run, self._generation)
            self._told = False
        return self.newest

    def require_none_open(self) -> None:
        """Let the run await a person if it would end with an operation whose outcome is unknown."""
        if unknown := self._ledger.open_operations(self._run):
            self.driver.await_answer(unknown_end(self._run, unknown))

    # -- keys ------------------------------------------------------------------------------

    def _claims_for(self, wanted: Sequence[tuple[str, tuple[Any, ...]]]) -> dict[str, Claim]:
        """Return a claim for each key; the same key twice is one operation."""
        claims: dict[str, Claim] = {}
        for key, arguments in wanted:
            if type(key) is not str or not 0 < len(key) <= KEY_MAX_CHARS or not key.isprintable():
                raise broken("no key", key=repr(key)[:KEY_MAX_CHARS], most=KEY_MAX_CHARS)
            digest = digest_of(key, arguments)
            if key not in claims:
                claims[key] = Claim(key, arguments, digest)
            elif claims[key].digest != digest:
                raise self._reused(key, TWO_RECORDS)
        return claims

    def _reused(self, key: str, why: str) -> KeyReused:
        """Return the letter for a key that means two different things."""
        return KeyReused(
            f"The idempotency key {key!r} was used for other arguments.",
            why=why,
            unchanged="Nothing was called for it now.",
            todo="A key means one effect, once ever: make it of all that tells one from another,"
            f" such as a revision.\nWhen the job is mended: batchrun resume {self._run.id}",
        )

    def _known(self, row: Operation, number: int) -> str:
        """Return what a recorded operation counts as, and name the first that is met again."""
        if (row.run, row.number) == (self._run.key, number):
            return "called" if row.outcome == DONE else "confirmed"
        if not self._said:
            self._said = True
            told = self._ledger.events(self._run, what=SAID)
            if not any(event.why.startswith(MET_AGAIN) for event in told):
                by = self._ledger.run(row.run).id
                self.driver.say(f"{MET_AGAIN} {row.key!r}, of run {by}, {row.claimed_at}")
        return "already done"

    # -- the ledger ------------------------------------------------------------------------

    def tell(self, told: Sequence[Told], claims: Sequence[Claim] = (), **of_all: object) -> None:
        """Record what became of operations, and claim others."""
        if not told and not claims:
            return
        keys = [(claim.key, claim.digest) for claim in claims]
        ids = self._ledger.operate(self._run, self._generation, told, keys, **of_all)
        for claim in claims:
            claim.id = ids[claim.key]
        self.newest = max(self.newest, *ids.values(), 0)
        self._told = not claims
        reach("operation.claimed" if claims else "operation.settled", self.newest)

    # -- what is unknown -------------------------------------------------------------------

    def _find_out(self, unknown: dict[Claim, Operation], number: int, how: How) -> list[Claim]:
        """Return which operations of unknown outcome are surely not done; record what is found.

        Where nobody can tell, the attempt ends.
        """
        if foreign := [row for row in unknown.values() if row.run != self._run.key]:
            self._ledger.take_up(self._run, self._generation, number, foreign)
        absent = self._look_up(list(unknown), how) if how.lookup else []
        if absent and self.host.monotonic() < self._settled_at:
            self._wait_until(self._settled_at)
            absent = self._look_up(absent, how)
        why = f"lookup did not find it, {self.options.settle_s:g} s after its call was cut off"
        self.tell([Told(claim.id, FREED, who="lookup", why=why) for claim in absent])
        if len(absent) + sum(bool(claim.counts_as) for claim in unknown) < len(unknown):
            self.require_none_open()
        return absent

    def _look_up(self, claims: Sequence[Claim], how: How) -> list[Claim]:
        """Ask the destination for each; record what is found, return what is absent."""
        lookup = cast("Callable[[str], Any]", how.lookup)
        ended = list[Claim]()
        with Crew(self, how, lambda claim: lookup(claim.key), "lookup") as crew:
            crew.add(claims)
            while crew.ready or crew.out:
                for claim in crew.turn():
                    ended.append(claim)
                    crew.halted |= not isinstance(claim.error, CannotTell | None)
        unasked = [claim for claim in ended if not claim.began]  # for a stop, maybe withdrawn since
        found = [c for c in ended if c.error is None and c.result is not None]
        texts = [(claim, self.receipt_text(claim)) for claim in found]
        self.tell([Told(c.id, CONFIRMED, text, "lookup") for c, text in texts if text])
        self.driver.pass_gate()
        for claim, text in texts:
            claim.counts_as = "confirmed"
            if text is None:
                raise broken("no receipt", key=claim.key, receipt=repr(claim.result)[:200])
        for claim in ended:
            if claim.error is not None and not isinstance(claim.error, CannotTell):
                raise claim.error
        absent = [c for c in ended if c.began and c.error is None and c.result is None]
        return absent + (self._look_up(unasked, how) if unasked else [])

    def receipt_text(self, claim: Claim) -> str | None:
        """Return a receipt as JSON; None if it is not the same there."""
        try:
            text = _compact(claim.result)
            text.encode()  # half a character is none
            return text if _from_json(text)[0] == claim.result else None
        except (TypeError, ValueError, RecursionError):
            return None

    def _wait_until(self, moment: float) -> None:
        """Wait, as a place to stop."""
        while (left_s := moment - self.host.monotonic()) > 0:
            self.driver.stop_is_asked()  # looks what the ledger says
            self.driver.pass_gate()
            self.host.sleep(min(left_s, TICK_S))

    def is_not_done(self, error: BaseException) -> bool:
        """Ask the job whether an error says for sure that nothing was done."""
        if self._not_done is None:
            return False
        try:
            return bool(self._not_done(error))
        except Exception as raised:  # noqa: BLE001 - the job's own code; then nobody knows
            write_line(2, mask_secrets(f"not_done raised {error_text(raised)}"))
            return False


class Effects:
    """The calls of one batch: claimed in slices just ahead, paced, halted, recorded."""

    def __init__(self, of: Operations, number: int, how: How, todo: deque[Claim]) -> None:
        self._of, self._todo, self._how = of, todo, how
        name, call = recorded_lookup(how.lookup) if how.lookup else None, how.call
        self._of_all = {"number": number, "lookup": name, "irreversible": int(how.irreversible)}
        self._crew = Crew(of, how, lambda c: call(c.key, *c.arguments), "call")
        self._most = max(SLICE, how.workers)
        self._size = min(how.workers, len(todo))
        self._claimed = 0  # and not come back
        self._told: list[Told] = []
        self._turned_at = of.host.monotonic()
        self._errors: list[BaseException] = []  # for which the attempt ends
        self._is_over = False  # whether no call follows, for an error that tells all
        self._waits_until = 0.0

    def make_all(self) -> None:
        """Make all calls, and record what became of each."""
        with self._crew as crew:
            while self._todo or self._claimed or self._told:
                if crew.halted and not self._claimed:
                    self._pause()
                elif self._is_due():
                    self._turn()
                if self._claimed:
                    for claim in crew.turn():
                        self._take(claim)

    def _is_due(self) -> bool:
        """Tell whether it is time to tell and to claim."""
        more = bool(self._todo) and not self._crew.halted and self._claimed <= self._size
        return more or not self._claimed or len(self._told) >= self._size

    def _turn(self) -> None:
        """Tell what ended, and claim the next slice, in one transaction."""
        now = self._of.host.monotonic()
        if len(self._told) >= self._size:  # a whole slice has ended
            if now - self._turned_at < SLICE_S:
                self._size = min(2 * self._size, self._most)
            self._turned_at = now
        room = 0 if self._crew.halted else self._size
        claims = [self._todo.popleft() for _ in range(min(room, len(self._todo)))]
        told, self._told = self._told, []
        self._of.tell(told, claims, **self._of_all)
        self._claimed += len(claims)
        self._crew.add(claims)

    def _pause(self) -> None:
        """With no call in flight, end the calls, or wait as the destination asked to."""
        told, self._told = self._told, []
        self._of.tell(told)
        if self._errors:
            raise self._errors[0]
        if self._is_over:
            self._todo.clear()
            return
        self._of.driver.pass_gate()
        self._of._wait_until(self._waits_until)
        self._todo = deque(sorted(self._todo, key=lambda claim: claim.id or sys.maxsize))
        self._crew.halted = False

    def _take(self, claim: Claim) -> None:
        """Take what came back: done, refused, unknown, or not begun."""
        self._claimed -= 1
        if not claim.began:
            if claim.error is not None:  # of a call that has made nothing
                self._end(claim.error)
            self._again(claim, "it was not begun")
        elif claim.error is not None:
            self._failed(claim, claim.error)
        else:
            text = self._of.receipt_text(claim)
            claim.counts_as = "called"
            self._told.append(Told(claim.id, DONE, text, None, None))
            if text is None:
                self._end(broken("no receipt", key=claim.key, receipt=repr(claim.result)[:200]))

    def _failed(self, claim: Claim, error: BaseException) -> None:
        """Judge the error of a call: unknown, to be called again later, or surely not done."""
        of, why = self._of, shortened(error_text(error))
        if claim.is_late or not of.is_not_done(error):
            self._told.append(Told(claim.id, None, why=why))
            self._end(error)
            return
        now, asked_s = of.host.monotonic(), retry_after_s(error, of.host.now())
        claim.since = claim.since or now
        waits_until = now + max(asked_s or 0.0, of.options.retry_first_wait_s)
        if asked_s is not None and waits_until <= claim.since + of.options.retry_for_s:
            self._waits_until = max(self._waits_until, waits_until)
            self._crew.halted = True
            self._again(claim, why)
            return
        self._told.append(Told(claim.id, FREED, who="worker", why=why))
        if self._how.on_error == "raise":
            self._is_over = self._crew.halted = True

    def _again(self, claim: Claim, why: str) -> None:
        """Free a claim that was surely not done, and let it be claimed anew."""
        self._told.append(Told(claim.id, FREED, who="worker", why=why))
        claim.error = None
        self._todo.append(claim)

    def _end(self, error: BaseException) -> None:
        """Let no call begin any more; when all are back, the error ends the attempt."""
        self._errors.append(error)
        self._crew.halted = True


def recorded_lookup(lookup: Any) -> str:
    """Return a lookup as JSON that `reconcile` can call: module:name, arguments before the key.

    Empty if another process could not: it is no plain function, nor a functools.partial of one with
    arguments in JSON and no secret among them.
    """
    inner = lookup if isinstance(lookup, functools.partial) else functools.partial(lookup)
    call: Any = inner.func
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", "<")
    with contextlib.suppress(TypeError, ValueError):
        text = _compact([f"{module}:{name}", inner.args, inner.keywords])
        if module and not set("<.").intersection(name) and mask_secrets(text) == text:
            return text
    return ""


def called_lookup(recorded: str, key: str) -> Any:
    """Call a recorded lookup and return what it says."""
    import importlib

    where, arguments, named = json.loads(recorded)
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments, key, **named)


def lookup_main() -> None:
    """Ask destinations for what `reconcile` hands over on standard input; a line of JSON for each.

    Each is a key with its recorded lookup; the answer [key, outcome, receipt, why], an outcome of
    None being: cannot tell. What the job prints goes to standard error.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    path, job, questions = json.load(sys.stdin)
    config = load_config(Path(path))
    os.chdir(config.folder)
    try:
        load_job(config.job(job))
    except BatchrunError as error:
        why = " ".join([error.what, *error.why.splitlines()[-1:]])
        for key, _ in questions:
            write_line(answers, json.dumps([key, None, None, why]))
        return
    alarm = Alarm(config.job(job).call_timeout_s)
    for key, recorded in questions:
        try:
            found = alarm.call(called_lookup, recorded, key)
            answer = [CONFIRMED, _compact(found), ""] if found is not None else [FREED, None, ""]
        except Exception as error:  # noqa: BLE001 - the job's own code: it cannot tell
            answer = [None, None, error_text(error)]
        write_line(answers, json.dumps([key, *answer]))


# -- letters -------------------------------------------------------------------------------


def answer_lines(run: str, key: str) -> list[str]:
    """Return what a person types to say that an operation was done, and that it was not."""
    said = (_typed("batchrun", "reconcile", run, way, key) for way in ("--confirm", "--absent"))
    return [f'{line} --why "..." --apply' for line in said]


def unknown_text(unknown: Sequence[Operation]) -> str:
    """Return which operations nobody knows the outcome of."""
    first, more = unknown[0], f" It is one of {len(unknown):,}." * (len(unknown) > 1)
    cut = first.why or "Its process ended before the outcome was recorded."
    what = f"Whether the operation {first.key!r} was done is unknown; claimed {first.claimed_at}."
    return f"{what}{more}\n{cut}"


def unknown_end(run: Run, unknown: Sequence[Operation]) -> AttemptEnd:
    """Return the end of an attempt that cannot find out what became of operations."""
    asked = [f"{reconcile_line(run)} --lookup --apply"] * any(row.lookup for row in unknown)
    lines = (reconcile_line(run), *asked, *answer_lines(run.id, unknown[0].key))
    how = (Ending.AWAITS, ExitCode.PERSON_NEEDED, Reason.OPERATION, unknown_text(unknown))
    unchanged = "It is not called again before that is known; all others are recorded."
    todo = "\n  ".join(("Look at the destination, then type:", *lines))
    return AttemptEnd(*how, unchanged=unchanged, todo=todo)


def no_fresh_start(run: Run, unknown: Sequence[Operation]) -> PersonNeeded:
    """Return the letter for a fresh start that would forget operations of unknown outcome."""
    return PersonNeeded(
        f"Run {run.id} of {run.job} has unknown operations, which no fresh start forgets.",
        why=unknown_text(unknown),
        unchanged="Nothing was started.",
        todo=f"To see them, and answer: {reconcile_line(run)}",
    )


# ======================================================================================
# 10. Recovery: what is found at rest: whether it agrees, is kept, is fit, and may go on
# ======================================================================================
#
# What a start finds, first row that applies. Nothing is written before the verdict; the admission
# then does what it says, in its own transaction. Nothing here ever begins at record 1 silently.
# A file that holds another run's checkpoint than its name says is as a broken one: it tells nothing
# of this run, and is moved aside where the ledger does not know that name.
#
# What a start refuses, `repair` mends: it copies everything aside, then lets the ledger stand where
# the checkpoints do.
#
# A copy (`backup`) is one snapshot, verified before it has its name. What is let go (`prune`) is
# finished, old, and nothing that a resume, an answer or a rollback may still need. `doctor` only
# looks: each of its rows is a reason for which a run may not begin, or may not end.
#
# Whether a start goes on with an unfinished run at all is said by one table, REPLIES, which the
# admission, the tick and `status` share.

LOG_LIMIT_BYTES = 64_000_000


class Action(StrEnum):
    """What a start has to do with what it finds."""

    START = "start"
    GO_ON = "go on"
    FORWARD = "forward"  # the ledger, by the commit that only the checkpoint has
    REWRITE = "rewrite"  # the checkpoint, from the ledger's copy
    REFUSE = "refuse"


class Found(NamedTuple):
    """What a start finds of one run."""

    run: Run  # the ledger's row
    newest_event: int  # the highest event id in the ledger
    newest_operation: int  # likewise
    checkpoint: Checkpoint | None  # what the file holds; None if missing, broken or another run's
    digest: str  # its hash
    broken: str  # why it is no valid file of this run; empty if it is one or missing
    ancestor: str | None  # the hash that the ledger has for the checkpoint's number, if it has one
    copy: bytes | None  # the ledger's own copy of the newest checkpoint, if it is valid

    @property
    def file(self) -> Checkpoint:
        """The checkpoint of a file that is known to be valid."""
        return cast("Checkpoint", self.checkpoint)

    @property
    def ahead(self) -> int:
        """By how many commits the file is ahead of the ledger."""
        return self.file.number - self.run.number

    @property
    def fault(self) -> str:
        """What is wrong with the file, in words."""
        return self.broken or f"it is {'older than the ledger' if self.checkpoint else 'missing'}"


VERDICTS: tuple[tuple[Action, str, Callable[[Found], bool]], ...] = (
    (
        Action.START,
        "no checkpoint and no commit in the ledger",
        lambda f: f.checkpoint is None and not f.broken and f.run.number == 0,
    ),
    (
        Action.REFUSE,
        "the checkpoint is missing or broken, and the ledger has no valid copy of it",
        lambda f: f.checkpoint is None and f.copy is None,
    ),
    (
        Action.REWRITE,
        "the checkpoint is missing or broken; the ledger has its bytes",
        lambda f: f.checkpoint is None,
    ),
    (
        Action.REFUSE,
        "the checkpoint's generation is newer than the ledger's",
        lambda f: f.file.generation > f.run.generation,
    ),
    (
        Action.REFUSE,
        "the ledger is behind the events that the checkpoint names",
        lambda f: f.file.event > f.newest_event,
    ),
    (
        Action.REFUSE,
        "the ledger is behind the operations that the checkpoint names",
        lambda f: f.file.operation > f.newest_operation,
    ),
    (
        Action.GO_ON,
        "checkpoint and ledger agree",
        lambda f: f.ahead == 0 and f.digest == f.run.hash,
    ),
    (
        Action.FORWARD,
        "the checkpoint is one commit ahead and hangs on the ledger's newest",
        lambda f: f.ahead == 1 and f.file.previous == f.run.hash,
    ),
    (
        Action.REWRITE,
        "the checkpoint is older than the ledger and is that link of its chain",
        lambda f: f.ahead < 0 and f.digest == f.ancestor and f.copy is not None,
    ),
    (Action.REFUSE, "the checkpoint does not fit the ledger's chain of commits", lambda _: True),
)


def verdict(found: Found) -> tuple[Action, str]:
    """Return what a start has to do, and the sentence that says why."""
    return next((action, why) for action, why, applies in VERDICTS if applies(found))


def look(ledger: Ledger, store: CheckpointStore, run: Run) -> Found:
    """Read what there is of a run, changing nothing; NewerFormat if a newer batchrun wrote it."""
    checkpoint, digest, broken = None, "", ""
    try:
        content = store.read(run.id)
        if content is not None:
            checkpoint, digest = parse_checkpoint(content)
            if digest != run.hash:
                require_own(ledger, run, checkpoint)
    except BrokenCheckpoint as error:
        checkpoint, digest, broken = None, "", error.what
    behind = checkpoint is not None and checkpoint.number < run.number
    row = ledger.commit_row(run, checkpoint.number) if checkpoint and behind else None
    ancestor, copy = row.hash if row else None, valid_copy(run)
    newest = (ledger.newest_event(), ledger.newest_operation())
    return Found(run, *newest, checkpoint, digest, broken, ancestor, copy)


def whose(checkpoint: Checkpoint) -> str:
    """Return in words which run a checkpoint is of, where its file's name says another."""
    return f"it is of run {checkpoint.run} of {checkpoint.job}"


def require_own(ledger: Ledger, run: Run, checkpoint: Checkpoint) -> None:
    """Refuse the checkpoint of another run under this one's name: it tells nothing of this one."""
    if (checkpoint.job, checkpoint.run) != (run.job, run.id):
        raise BrokenCheckpoint(whose(checkpoint))
    if checkpoint.ledger != ledger.uuid:
        raise BrokenCheckpoint("it is of another ledger")


def valid_copy(run: Run) -> bytes | None:
    """Return the ledger's copy of a run's newest checkpoint, if it is what it should be."""
    with contextlib.suppress(BrokenCheckpoint):
        if parse_checkpoint(run.checkpoint or b"")[1] == run.hash:
            return run.checkpoint
    return None


def agree(ledger: Ledger, store: CheckpointStore, run: Run, *, anew: bool) -> Agreement:
    """Judge a run's ledger and checkpoint and return what makes them agree.

    With `anew` the accepted checkpoint is written anew even if nothing is wrong: after an unclean
    end what was read may be in memory only.

    Raises:
        PersonNeeded: they cannot both be true.
    """
    found = look(ledger, store, run)
    action, why = verdict(found)
    path = store.path(run.id)
    if action == Action.REFUSE:
        raise cannot_agree(found, why, path)
    if action == Action.REWRITE:
        said = f"the checkpoint {path} was restored from the ledger's copy of commit {run.number}"
        return Agreement(f"{said}: {found.fault}", content=found.copy)
    content = checkpoint_bytes(found.file)[0] if anew and action != Action.START else None
    if action == Action.FORWARD:
        held = f"commit {found.file.number} was in the checkpoint only"
        said = f"{held}: the ledger is rolled forward"
        return Agreement(said, forward=found.file, content=content)
    return Agreement(content=content)


def cannot_agree(found: Found, why: str, path: Path) -> PersonNeeded:
    """Return the letter for a run whose ledger and checkpoint contradict each other."""
    run, held, lost = found.run, f"{path}: {found.fault}", "where it stood"
    if found.checkpoint is not None:
        held = f"{path}: commit {found.file.number} of generation {found.file.generation}"
        first, last = run.number + 1, found.file.number - 1
        lost = f"the rows of commits {first} to {last}" if last >= first else "no row known"
        if (named := found.file.operation) > found.newest_operation:
            lost += f"; operations {found.newest_operation + 1} to {named}, whose keys nothing"
            lost += " keeps from being called again"
    return PersonNeeded(
        f"Run {run.id} of {run.job} cannot go on: {why}.",
        why=f"Found {held}; in the ledger: commit {run.number} of generation {run.generation}."
        f" Known to be lost: {lost}.",
        unchanged="Nothing was changed.",
        todo=way_out(found),
    )


def way_out(found: Found) -> str:
    """Return what to do about what a start refuses: a repair needs a file that names the run."""
    anew = f"begin anew: batchrun run {found.run.job} --fresh"
    way = "see: batchrun repair" if found.checkpoint else anew
    return f"Put the right files back from a backup, or {way}"


def require_witnesses_known(ledger: Ledger, store: CheckpointStore) -> None:
    """Refuse a ledger that does not know a run, or what it did, of which a checkpoint tells.

    One commit ahead that hangs on the ledger's newest is no loss: the run was killed within that
    commit, and cancelled.

    Raises:
        PersonNeeded: `repair` lists what it is about.
    """
    for name in store.runs():
        run = ledger.run_with_id(name)
        if run is None:
            raise ledger_lost(ledger.path, f"it does not know the run of {store.path(name)}")
        if run.finished:
            found = look(ledger, store, run)
            if found.checkpoint and found.ahead > 0 and verdict(found)[0] == Action.REFUSE:
                ahead = several(found.ahead, "commit")
                raise ledger_lost(ledger.path, f"{store.path(name)} is {ahead} ahead")


def retire_witnesses(ledger: Ledger, store: CheckpointStore) -> None:
    """Remove the checkpoints of finished runs but the newest; only under the job's lock.

    One is enough to tell that a ledger was lost; a file a run would make each start slower.
    """
    known = [run for name in store.runs() if (run := ledger.run_with_id(name)) and run.finished]
    for run in sorted(known, key=attrgetter("key"))[:-1]:
        store.remove(run.id)


def check(
    ledger: Ledger, store_of: Callable[[str], CheckpointStore], jobs: Container[str]
) -> Iterator[Finding]:
    """Yield what is wrong with ledger, checkpoints and marks; changes nothing."""
    if damage := ledger.damage():
        yield Finding(f"the ledger {ledger.path} is damaged", damage, "batchrun repair")
        return
    log_bytes = ledger.log_bytes()
    if log_bytes > LOG_LIMIT_BYTES:
        what = f"the ledger's log has grown to {log_bytes // 1_000_000} MB"
        why = "a process that reads the ledger without end keeps it from being reused"
        yield Finding(what, why, f"fuser -v {ledger.path}")
    for cleanup in ledger.stuck_cleanups():
        yield stuck_cleanup(ledger, cleanup)
    for run in ledger.latest_of_each_job():
        yield from check_run(ledger, store_of(run.job), run)
        if run.job not in jobs and not run.finished:
            what = f"run {run.id} of {run.job} is unfinished, and the job is configured no more"
            yield Finding(what, "nothing goes on with it", f"batchrun cancel {run.id}")


def gaps_of(ledger: Ledger, run: Run) -> list[tuple[str, Event | None]]:
    """Return which commits of a run have no row, and the event by which a repair accepted that."""
    repairs = {event.why.partition("; ")[2]: event for event in ledger.events(run, what="repaired")}
    gaps = [gap_text(first, last) for first, last in ledger.gaps(run)]
    return [(gap, repairs.get(gap)) for gap in gaps]


def known_losses(ledger: Ledger) -> list[str]:
    """Return a line for each loss that a repair has accepted: nothing is to be done about it."""
    return [
        f"note: run {run.id} of {run.job}: {gap}, since a repair at {known.at}"
        for run in ledger.latest_of_each_job()
        for gap, known in gaps_of(ledger, run)
        if known
    ]


def stuck_cleanup(ledger: Ledger, cleanup: Cleanup) -> Finding:
    """Return the finding about a cleanup that failed, or that nothing goes on to call."""
    run = ledger.run_with_id(cleanup.run)
    verb = "resume" if run is not None and not run.finished else "cancel"
    todo = f"batchrun {verb} {cleanup.run}"
    if cleanup.error:
        todo += f", or cancel {cleanup.run} --forget-cleanups WHY"
    what = (
        f"run {cleanup.run} of {cleanup.job}: the cleanup {mask_secrets(cleanup.call)} is pending"
    )
    why = cleanup.error or f"the run is {run and run.state} and nothing has called it"
    return Finding(what, why, todo)


def check_run(ledger: Ledger, store: CheckpointStore, run: Run) -> Iterator[Finding]:
    """Yield what is wrong with one run: its chain of commits, its checkpoint, its marks."""
    name = f"run {run.id} of {run.job}"
    for gap, known in gaps_of(ledger, run):
        if not known:
            yield Finding(f"{name}: {gap}", "they were lost", f"batchrun report {run.id}")
    newest = ledger.commit_row(run, run.number)
    if newest is not None and newest.hash != run.hash:
        what = f"{name}: the row of its newest commit has another hash than the run"
        why = "only an older checkpoint, if one is put back, would be judged by it"
        yield Finding(what, why, f"batchrun {'report' if run.finished else 'resume'} {run.id}")
    try:
        found = look(ledger, store, run)
    except NewerFormat as error:
        yield Finding(f"{name}: {error.what}", error.why, error.todo)
        return
    yield from check_found(name, found)
    stands = parse_checkpoint(found.copy)[0] if found.copy else None
    if found.checkpoint is not None and found.ahead >= 0:
        stands = found.checkpoint
    if stands is not None:
        yield from check_marks(ledger, run, stands)


def check_found(name: str, found: Found) -> Iterator[Finding]:
    """Yield what a start of a run would refuse, or repair."""
    action, why = verdict(found)
    if action == Action.REFUSE:
        yield Finding(f"{name}: {why}", found.broken, way_out(found))
    elif found.run.finished:
        return
    elif action in (Action.FORWARD, Action.REWRITE):
        yield Finding(f"{name}: {why}", found.broken, f"batchrun resume {found.run.id}")
    elif found.run.checkpoint and not found.copy:
        what = f"{name}: the ledger's copy of its checkpoint is not valid"
        yield Finding(what, "its next commit makes it anew", f"batchrun resume {found.run.id}")


def check_images(ledger: Ledger, state: StateDirectory) -> Iterator[Finding]:
    """Yield which images a rollback could not read, by their headers and sizes alone."""
    for run, images in ledger.images_needed():
        for _, name in images:
            try:
                state.images(run).look(name)
            except BatchrunError as error:
                todo = "put that file back from a backup; only a rollback needs it"
                yield Finding(error.what, error.why, todo)


def installed_job(config: Config, job_config: JobConfig) -> Job:
    """Load a job's file as a command does; the working directory is the config's afterwards."""
    check_trusted(config.path, what="the configuration")
    os.chdir(config.folder)
    with contextlib.redirect_stdout(sys.stderr):  # what a job's file prints is no result
        return load_job(job_config)


def check_rollbacks(config: Config) -> Iterator[Finding]:
    """Yield which critical jobs have no rollback; imports their files."""
    for job_config in (each for each in config.jobs.values() if each.critical):
        try:
            job = installed_job(config, job_config)
        except BatchrunError as error:
            what = f"whether the critical job {job_config.name} has a rollback is unknown"
            yield Finding(what, error.what, error.todo or "batchrun jobs")
        else:
            if job.rollback is None:
                what = f"the critical job {job_config.name} has no rollback"
                todo = f"add @job(rollback=...) in {job_config.path}"
                yield Finding(what, "a run of it cannot be taken back", todo)


def look_at_rollback(
    config: Config, state: StateDirectory, ledger: Ledger, rollback: Rollback
) -> int:
    """Check all that a rollback needs, changing nothing; return the bytes of its rows.

    Raises:
        ConfigurationError: the job has none.
        PersonNeeded: it must not begin, its settings are other ones, or an image cannot be read.
    """
    run, job_config = rollback.of, config.job(rollback.of.job)
    ledger.require_can_roll_back(rollback)
    job = installed_job(config, job_config)
    job.undoing(run)
    settings = job.settings_from(job_config, run.overrides, config.folder)
    if changed := changed_settings(run.settings, settings, config.folder):
        raise PersonNeeded(
            f"Settings of {run.job} changed since run {run.id}: {', '.join(changed)}.",
            why="What it has remembered belongs to the old ones.",
            unchanged="Nothing was undone.",
            todo="Put them back in the configuration, then type this again.",
        )
    images = [batch.images for batch in ledger.batches_of(rollback) if batch.images]
    return sum(len(line) for each in images for line in state.images(run).lines(each))


TARGET = "target"  # an event whose `why` is a loop and the SQLite file that has its mark


def check_marks(ledger: Ledger, run: Run, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compare a checkpoint with the marks in the SQLite files that the run's workers wrote to.

    A target one commit ahead is a batch whose checkpoint was not renamed: going on adopts it.
    """
    kept = dict(json.loads(event.why) for event in ledger.events(run, what=TARGET))
    for loop, path in kept.items():
        expected, number = checkpoint.marks.get(loop, 0), mark_in(Path(path), run.id, loop)
        if number not in (expected, checkpoint.number + 1):
            what = f"run {run.id} of {run.job}: the target {path} is not where the checkpoint is"
            has = "no mark" if number is None else f"the mark {number}"
            why = f"loop {loop!r} has {has} there, and {expected} in the checkpoint"
            yield Finding(what, why, "put back the target that belongs to the run")


def contradiction(ledger: Ledger, store: CheckpointStore, checkpoint: Checkpoint) -> str:
    """Return why a checkpoint and the ledger cannot both be true, or nothing."""
    run = ledger.run_with_id(checkpoint.run)
    if run is None:
        return "the ledger does not know this run"
    found = look(ledger, store, run)
    action, why = verdict(found)
    return why if action == Action.REFUSE and found.checkpoint else ""


def readable_checkpoints(
    store: CheckpointStore,
) -> tuple[list[Checkpoint], list[tuple[str, Path]]]:
    """Return a job's valid checkpoints, oldest first, and the files that hold another run's."""
    own, foreign = list[Checkpoint](), list[tuple[str, Path]]()
    for name in store.runs():
        with contextlib.suppress(BrokenCheckpoint):
            checkpoint, _ = parse_checkpoint(store.read(name) or b"")
            if checkpoint.run == name and checkpoint.job == store.folder.name:
                own.append(checkpoint)
            else:
                foreign.append((whose(checkpoint), store.path(name)))
    return sorted(own, key=attrgetter("event", "number")), foreign


def set_aside(paths: list[Path], folder: Path) -> list[Path]:
    """Copy files whole into a folder of their own before anything is repaired."""
    make_private_folder(folder.parent)
    make_private_folder(folder)
    there = [path for path in paths if path.exists()]
    for path in there:
        write_atomically(folder / path.name, path.read_bytes())
    return [folder / path.name for path in there]


def require_same_settings(run: Run, checkpoint: Checkpoint, settings: object, folder: Path) -> None:
    """Refuse other settings than the commits so far were made with (PersonNeeded)."""
    if checkpoint.settings == settings_digest(identity(settings, folder)):
        return
    changed = changed_settings(run.settings, settings, folder)
    if changed:
        raise PersonNeeded(
            f"Settings of {run.job} changed since run {run.id} began: {', '.join(changed)}.",
            why=f"Its {run.number} commits were made with the old ones.",
            unchanged="Nothing was done; the checkpoint stands.",
            todo=f"Put them back, or type one of:\n  batchrun run {run.job} --fresh\n"
            f"  batchrun resume {run.id} --accept-settings",
        )


def rehearsal(
    config: Config, state: StateDirectory, ledger: Ledger, versions: Mapping[str, int]
) -> list[Finding]:
    """Return which unfinished runs could not go on with the jobs that are installed now.

    `versions`: job -> a version to ask about instead, whose file need not be installed. Imports
    the jobs' files and tries their converters on the stored cursors; changes nothing but the
    working directory, which is the config's afterwards.
    """
    found = (cannot_go_on(config, state, ledger, run, versions) for run in ledger.all_unfinished())
    return [finding for finding in found if finding]


def cannot_go_on(
    config: Config, state: StateDirectory, ledger: Ledger, run: Run, versions: Mapping[str, int]
) -> Finding | None:
    """Return why an unfinished run could not go on with its job as it is installed now."""
    os.chdir(config.folder)
    try:
        stands = standing_checkpoint(ledger, state.store(run.job), run)
        with contextlib.redirect_stdout(sys.stderr):  # what a job's file prints is no result
            require_loads(config, run, stands, versions.get(run.job))
    except BatchrunError as error:
        what = f"run {run.id} of {run.job} could not go on: {error.what}"
        return Finding(what, error.why, error.todo or f"batchrun cancel {run.id}")
    return None


def standing_checkpoint(ledger: Ledger, store: CheckpointStore, run: Run) -> Checkpoint | None:
    """Return the checkpoint that a start would go on at, also while the run is going on."""
    found = look(ledger, store, run)
    while (now := ledger.run(run.key)).number != run.number:  # it went on between the two looks
        run = now
        found = look(ledger, store, run)
    action, why = verdict(found)
    if action == Action.REFUSE:
        raise cannot_agree(found, why, store.path(run.id))
    return parse_checkpoint(found.copy or b"")[0] if action == Action.REWRITE else found.checkpoint


def require_loads(
    config: Config, run: Run, checkpoint: Checkpoint | None, version: int | None
) -> None:
    """Refuse a run that the installed job, or the version asked about, does not understand."""
    job_config = config.job(run.job)
    if version is not None and (checkpoint is None or checkpoint.job_version == version):
        return
    job = load_job(job_config)
    if run.rollback_of:
        job.undoing(run)
    if checkpoint is not None and version not in (None, job.version):
        raise PersonNeeded(
            f"its checkpoint was written by version {checkpoint.job_version}, and version {version}"
            " is not installed.",
            why=f"Only the resumes= of version {version}'s own file can say that it understands;"
            f" installed is version {job.version}.",
            todo=f"Ask again with that file installed, or keep version {job.version}.",
        )
    settings = job.settings_from(job_config, run.overrides, config.folder)
    if checkpoint is not None:
        job.cursor_from(checkpoint)
        accepted = (run.deferred or {}).get("acceptances", ())
        if version is None and "settings" not in accepted:
            require_same_settings(run, checkpoint, settings, config.folder)


class Repair(NamedTuple):
    """What makes the ledger agree with the checkpoints again."""

    lost: str  # why the ledger must be made anew; empty if it can be kept
    adopt: list[tuple[str, Checkpoint]]  # the checkpoints to take over, each with the reason
    # files of runs that the ledger does not know, which hold another run's, each with the reason
    strays: Sequence[tuple[str, Path]] = ()


def find_repair(state: StateDirectory) -> Repair:
    """Return what has to be repaired, changing nothing."""
    found, strays = list[Checkpoint](), list[tuple[str, Path]]()
    for store in state.stores():
        own, foreign = readable_checkpoints(store)
        found += own
        strays += foreign
    adopt = list[tuple[str, Checkpoint]]()
    try:
        with state.reading() as ledger:
            lost = ledger.damage()
            for checkpoint in found if not lost else ():
                if why := contradiction(ledger, state.store(checkpoint.job), checkpoint):
                    adopt.append((why, checkpoint))
            if not lost:
                strays = [pair for pair in strays if not ledger.run_with_id(pair[1].stem)]
    except PersonNeeded as error:
        lost = error.what
    if lost:
        adopt = [("the ledger is lost", checkpoint) for checkpoint in found]
    return Repair(lost, adopt, strays)


def apply_repair(state: StateDirectory, repair: Repair, host: Host) -> list[Path]:
    """Copy ledger and checkpoints aside, let the ledger stand where they do; return the copies.

    Raises:
        Busy: one of the jobs runs, or has run since the look; nothing was changed.
    """
    with contextlib.ExitStack() as held:
        for store in state.stores():
            lock = JobLock(state.lock_path(store.folder.name))
            if not lock.acquire():
                what = "A job that is to be repaired runs right now."
                raise Busy(what, unchanged="Nothing was changed.", todo="See: batchrun status")
            held.callback(lock.release)
        return _repair_at_rest(state, repair, host)


def _repair_at_rest(state: StateDirectory, repair: Repair, host: Host) -> list[Path]:
    """Repair with all locks held: nothing moves any more."""
    now = find_repair(state)
    same = {*repair.strays} <= {*now.strays} and all(pair in now.adopt for pair in repair.adopt)
    if now.lost != repair.lost or not same:
        what = "Something ran since the look at what is to be repaired."
        raise Busy(what, unchanged="Nothing was changed.", todo="Look again: batchrun repair")
    path, checkpoints = state.ledger_path, [checkpoint for _, checkpoint in repair.adopt]
    files = [beside(path, suffix) for suffix in ("", "-wal", "-shm")]
    stored = [state.store(c.job).path(c.run) for c in checkpoints]
    folder = state.path / "aside" / host.now().replace(":", "")
    aside = set_aside(files + stored if repair.lost or stored else [], folder)
    for _, stray in repair.strays:
        aside += set_aside([stray], folder / stray.parent.name)
        stray.unlink()
    if repair.lost:
        for file in files:
            file.unlink(missing_ok=True)
        create_ledger(path, host, checkpoints[0].ledger if checkpoints else os.urandom(16).hex())
    adopt_newest(state, checkpoints, host)
    return aside


def adopt_newest(state: StateDirectory, checkpoints: list[Checkpoint], host: Host) -> None:
    """Let the ledger take over each job's newest checkpoint; older ones are kept aside only."""
    newest = {c.job: c for c in checkpoints}  # oldest come first: the last of each job
    with contextlib.closing(open_ledger(state.ledger_path, host, create=False)) as ledger:
        for checkpoint in checkpoints:
            if newest[checkpoint.job] is checkpoint:
                ledger.adopt(checkpoint, host.user_name(os.getuid()))
            else:  # of a run before it, whose ending nobody knows any more
                state.store(checkpoint.job).remove(checkpoint.run)


# -- copies and old runs -------------------------------------------------------------------------


def back_up(state: StateDirectory, ledger: Ledger, path: Path, *, force: bool) -> int:
    """Write a verified copy of the ledger under a name, whole or not at all; return its size.

    It holds the newest checkpoint of every run, so that it alone is enough to go on from.
    """
    if path.is_dir() or path.resolve().is_relative_to(state.path.resolve()):
        what = f"{path} is a folder, or in the state directory."
        todo = "Name a file elsewhere, best on another disk: batchrun backup FILE"
        raise ConfigurationError(what, unchanged="Nothing was written.", todo=todo)
    if path.is_symlink() or path.exists():
        is_older = is_a_copy(path)
        if not (force and is_older):
            raise ConfigurationError(
                f"{path} is there already{'' if is_older else ', and is no copy of a ledger'}.",
                unchanged="It was not touched.",
                todo=f"Choose another name{', or add --force' * is_older}.",
            )
    with open_folder(path.parent) as folder:
        copy = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        try:
            newest = ledger.back_up(copy, path)
            if fault := fault_of_copy(copy, ledger.uuid, newest):
                what = f"The copy of {ledger.path} is not what it should be: {fault}."
                unchanged = f"It was removed; {path} is as it was."
                raise StateDirectoryError(what, unchanged=unchanged, todo="See: batchrun check")
            size = size_of(copy)
            reach("backup.publish")
            publish_file(folder, copy.name, path.name)
        finally:
            for suffix in ("", "-journal", "-wal", "-shm"):
                discard_file(folder, beside(copy, suffix).name)
    return size


def is_a_copy(path: Path) -> bool:
    """Tell whether a path is a ledger's file, by its SQLite header, and no link or device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        header = file.read(72)
    known = header.startswith(b"SQLite format 3\0")
    return known and int.from_bytes(header[68:], "big") == APPLICATION_ID


PRUNE_AT_ONCE = 20  # runs, by whoever prunes beside something else


@contextlib.contextmanager
def in_no_way() -> Iterator[None]:
    """Do without what the ledger does not take, unless its disk cannot be trusted any more."""
    try:
        yield
    except OutcomeUnknown:
        raise
    except (BatchrunError, OSError):
        pass


class Pruned(NamedTuple):
    """What was pruned, or would be."""

    before: str
    runs: list[Run]
    rows: int = 0
    files_bytes: int = 0

    def __str__(self) -> str:
        return f"{several(len(self.runs), 'run')} that ended before {self.before}"


def prune(
    state: StateDirectory,
    ledger: Ledger,
    keep_s: float,
    host: Host,
    who: str,
    *,
    most: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Let go of what is older than is kept, a run at a time; of at most so many runs, if said.

    Behind an open barrier all stays that it found.
    """
    barrier = ledger.barrier()
    before = min(host.later(-keep_s), barrier.at if barrier else "~")
    keys = ledger.prunable(before) if keep_s else []
    pruned = Pruned(before, [ledger.run(key) for key in keys[:most]])
    if dry_run or not keep_s:
        return pruned
    rows = size = 0
    for run in pruned.runs:
        is_last, more = False, 1
        while more and not is_last:
            is_last, more = ledger.prune(run, pruned.before)
            rows += more
        if is_last:
            files = state.files_of(run)
            size += sum(map(size_of, files))
            remove_files(files)
            rows += ledger.forget(run)
    rows += ledger.prune_the_rest(pruned.before)
    if pruned.runs:
        ledger.note(who, "pruned", str(pruned))
    return pruned._replace(rows=rows, files_bytes=size)


def prune_beside(
    state: StateDirectory, ledger: Ledger, config: Config, host: Host, who: str, stays: str = ""
) -> None:
    """Prune a few runs beside something else, which it may not fail or hold up for long.

    Raises:
        OutcomeUnknown: the ledger's COMMIT failed; this process is not to go on writing. `stays`
            is what it says of that something.
    """
    try:
        with in_no_way():  # the next one tries again
            prune(state, ledger, config.keep_s, host, who, most=PRUNE_AT_ONCE)
    except OutcomeUnknown as error:
        error.unchanged = stays or error.unchanged
        raise


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files and folders of ours, durably: what knows of them is removed next."""
    import shutil  # only where there is something to remove

    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        with open_folder(folder) as place:
            os.fsync(place)


# -- whether all is there that a run needs ---------------------------------------------------------

FEWEST_FILES = 256  # open ones of a supervisor, a worker and what it connects to
CLOCK_SLACK_S = 60.0
TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("held")
else:
    print("free")
"""
Look = tuple[str, str, str, str]  # what was looked at, what was seen, what it means, what to type


def doctor(state: StateDirectory, config: Config, job: str | None, host: Host) -> list[Examined]:
    """Look once at all that a run needs: health, machine, files, jobs; leave nothing behind."""
    jobs = [each for name, each in config.jobs.items() if job in (None, name)]
    slow = (row for each in jobs for row in slow_batches(state, each))
    looks = [look_at_machine(state, host), look_at_files(state, host)]
    looks.append(look_at_telling(state, config, jobs, host))
    looks += [look_at_job(config, each, host) for each in jobs]
    rows = (
        Examined(name, name, Wellness.BAD if todo else Wellness.OK, answer, means, todo=todo)
        for name, answer, means, todo in chain.from_iterable(looks)
    )
    gauges, needs = examine_host(state, config, host), examine_needs(state, config, job, host)
    return [*timed(gauges, host), *needs, *timed(chain(slow, rows), host)]


def timed(rows: Iterable[Examined], host: Host) -> Iterator[Examined]:
    """Yield rows with the time that each took."""
    began = host.monotonic()
    for row in rows:
        yield row._replace(elapsed_s=round(host.monotonic() - began, 6))
        began = host.monotonic()


def look_at_machine(state: StateDirectory, host: Host) -> Iterator[Look]:
    """Look at SQLite, the limits of this process, and wall time against the newest event."""
    todo, version = "", sqlite_version()
    try:
        require_sqlite(version)
    except ConfigurationError as error:
        todo = error.todo
    yield "SQLite", version, "some versions can damage a ledger", todo
    files, size = host.limits()
    said = f"{files:g} open files, {f'of {size_text(size)}' if size < 1e18 else 'of any size'}"
    todo = f"ulimit -n {4 * FEWEST_FILES}" * (files < FEWEST_FILES)
    todo = "ulimit -f unlimited" if size < 1e18 else todo
    yield "limits", said, "beyond them nothing is opened or written", todo
    newest, now = list[Event](), host.now()
    with contextlib.suppress(BatchrunError), state.reading() as ledger:
        newest = ledger.events(after=ledger.newest_event() - 1)
    behind_s = seconds_between(now, newest[-1].at) if newest else 0.0
    said = f"{now}, {'' if host.is_synchronised() else 'not '}synchronised as the kernel knows"
    said += f", {duration_text(behind_s)} before the newest event" * (behind_s > CLOCK_SLACK_S)
    means = "ages, `keep` and `once_per` are reckoned by it; the order of events is not"
    yield "clock", said, means, "timedatectl" * (behind_s > CLOCK_SLACK_S)


def look_at_files(state: StateDirectory, host: Host) -> Iterator[Look]:
    """Look whose the files are (a run under sudo leaves strange ones), and try a lock twice."""
    if not state.path.exists() or (owner := state.path.stat().st_uid) != os.geteuid():
        return
    paths, strange = list(state.path.rglob("*")), list[str]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a job that runs replaces its checkpoint
            found = path.lstat()
            if found.st_uid != owner or found.st_mode & 0o022:
                strange += [str(path)] * (path != state.maintenance.path)  # anybody may make that
    said = ", ".join(strange[:3]) + f" and {len(strange) - 3} more" * (len(strange) > 3)
    place = _typed(state.path)
    todo = f"chown -R {host.user_name(owner)} {place}; chmod -R go= {place}" * bool(strange)
    means = "what another user owns or may write to stops a run, or cannot be trusted"
    yield "files", said or f"{len(paths)}, all its owner's", means, todo
    lock = JobLock(state.lock_path(f"doctor.{os.getpid()}"))
    ask = (sys.executable, "-I", "-c", TRY_LOCK, str(lock.path))
    try:
        lock.acquire()
        held = host.answer_of(*ask)
        lock.release()
        answers = f"{held.strip()} while it is held, {host.answer_of(*ask).strip()} when it is not"
    except (OSError, BatchrunError) as error:
        answers = str(error)
    with contextlib.suppress(OSError):
        lock.path.unlink()
    todo = f"df -T {_typed(state.path)}" * (answers != "held while it is held, free when it is not")
    yield "lock", answers, "without it two runs of a job could write", todo


def look_at_job(config: Config, job: JobConfig, host: Host) -> Iterator[Look]:
    """Look whether a job can be imported, and how long its installed unit lets a stop take."""
    todo = ""
    try:
        found = installed_job(config, job)
        found.settings_from(job, {}, config.folder)
        said = f"version {found.version} can be loaded, and its settings fit"
    except BatchrunError as error:
        said, todo = " ".join([error.what, *error.why.splitlines()[-1:]]), "batchrun jobs"
    yield f"job {job.name}", said, "otherwise its runs end before their first batch", todo
    wanted = "--property=LoadState,Type,TimeoutStopUSec"
    unit = f"{config.unit(job.name, host.unit_folder)}.service"
    told = host.answer_of("systemctl", "show", unit, wanted)
    if "LoadState=loaded\n" in told:
        spans = re.findall(r"([0-9.]+)(h|min|s|ms|us)\b", told.partition("TimeoutStopUSec=")[2])
        limit_s = sum(float(number) * SPANS_S[name] for number, name in spans) or float("inf")
        said = f"TimeoutStopSec is {limit_s:g} s; a stop may take {job.longest_stop_s:g} s"
        short = "Type=notify\n" not in told and limit_s < job.longest_stop_s
        means = "systemd kills it then; of Type=notify it is asked for more time"
        yield f"unit of {job.name}", said, means, f"batchrun unit {job.name} --install" * short


TICK_LATELY_S = 3600.0


def look_at_telling(
    state: StateDirectory, config: Config, jobs: Iterable[JobConfig], host: Host
) -> Iterator[Look]:
    """Look who would not be told what: of a job that is late, of an alert, of how jobs stand."""
    at, untold = None, list[tuple[int, str, str]]()
    with contextlib.suppress(BatchrunError), state.reading() as ledger:
        at, untold = ledger.ticked_at(), ledger.undelivered()
    if at is None or seconds_between(at, host.now()) >= TICK_LATELY_S:
        said = f"no tick was seen since {at}" if at else "no tick was ever seen"
        means = "nobody would notice: let batchrun resume --all run every five minutes, or set ping"
        for each in jobs:
            if each.expect_every_s and not each.ping:
                yield f"expect_every of {each.name}", said, means, "batchrun unit --tick"
    for alert, way, error in untold:
        means = "somebody does not know it; here every way is tried with a test"
        yield f"alert {alert} by {way}", error, means, "batchrun doctor --alerts"
    if folder := config.metrics_folder:
        fits = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        said = f"{folder} can{'not' * (not fits)} be written to"
        means = "otherwise Prometheus sees what was written last, which grows old"
        yield "metrics_folder", said, means, f"ls -ld {_typed(folder)}" * (not fits)


SPANS_S = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6}


# -- who goes on with an unfinished run ------------------------------------------------------------


class Reply(StrEnum):
    """What a start does with an unfinished run."""

    GO_ON = "go on"
    REFUSE = "refuse"  # 13
    BUSY = "busy"  # 11
    SKIP = "skip"


STARTS = ("run", "fresh", "resume", "tick")  # `run`, `run --fresh`, `resume RUN`, `resume --all`

_GO_ON, _REFUSE, _BUSY, _SKIP = Reply

REPLIES = {  # how an unfinished run stands -> what each of STARTS does
    "has a live owner": (_BUSY, _BUSY, _BUSY, _SKIP),  # the lock says so before anybody looks here
    "has a start that was deferred": (_GO_ON, _GO_ON, _GO_ON, _GO_ON),  # defer asked the rest
    "awaits a person: its next batch is poison": (_REFUSE, _REFUSE, _GO_ON, _SKIP),
    "waits for an answer": (_REFUSE, _REFUSE, _REFUSE, _SKIP),
    "was paused by a person": (_REFUSE, _GO_ON, _GO_ON, _SKIP),
    "has its answer": (_GO_ON, _REFUSE, _GO_ON, _GO_ON),
    "failed": (_GO_ON, _GO_ON, _GO_ON, _SKIP),
    "was refused as it is installed": (_GO_ON, _GO_ON, _GO_ON, _GO_ON),  # it may be mended
    "was tried for retry_for in vain": (_GO_ON, _GO_ON, _GO_ON, _GO_ON),  # likewise
    "is due": (_GO_ON, _GO_ON, _GO_ON, _GO_ON),
}


GAVE_UP = (RunState.PAUSED, Reason.RETRY)
NEEDS_A_PERSON = (  # though the tick may go on with it
    "awaits a person: its next batch is poison",
    "waits for an answer",
    "was refused as it is installed",
    "was tried for retry_for in vain",
)


def situation(ledger: Ledger, run: Run) -> str:
    """Return how an unfinished run stands: a key of REPLIES, the first that applies."""
    awaits = run.state == RunState.AWAITING
    answered = run.reason == Reason.APPROVAL and ledger.open_question(run) is None
    answered |= run.reason == Reason.OPERATION and not ledger.open_operations(run)
    last = ledger.last_attempt(run) if run.state == RunState.INTERRUPTED else None
    refused = last is not None and last.ending == Ending.REFUSED
    stands = {
        "has a live owner": run.state in OWNED,
        "has a start that was deferred": run.deferred is not None and run.request != Request.PAUSE,
        "awaits a person: its next batch is poison": awaits and run.reason == Reason.POISON,
        "waits for an answer": awaits and not answered,
        "was paused by a person": is_paused_by_person(run),
        "has its answer": awaits,
        "failed": run.state == RunState.FAILED,
        "was refused as it is installed": refused,
        "was tried for retry_for in vain": (run.state, run.reason) == GAVE_UP,
        "is due": True,
    }
    return next(words for words, applies in stands.items() if applies)


def reply_to(start: str, ledger: Ledger, run: Run) -> Reply:
    """Return what a start does with an unfinished run."""
    return REPLIES[situation(ledger, run)][STARTS.index(start)]


def require_may_go_on(start: str, ledger: Ledger, run: Run) -> None:
    """Refuse a start where the table does (PersonNeeded): how the run stands, what to type."""
    if start == "fresh" and (unknown := ledger.open_operations(run)):
        raise no_fresh_start(run, unknown)
    if reply_to(start, ledger, run) != Reply.REFUSE:
        return
    why, todo = what_next(ledger, run)
    give_up = f"\nTo give it up: batchrun cancel {run.id}" * (run.state == RunState.AWAITING)
    raise PersonNeeded(
        f"Run {run.id} of {run.job} {situation(ledger, run)}.",
        why=why or f"Since {run.changed_at}.",
        unchanged="Nothing was started.",
        todo=f"To go on: {todo}{give_up}",
    )


def what_next(ledger: Ledger, run: Run) -> tuple[str, str]:
    """Return why an unfinished run stands as it does, and the line to type."""
    todo = f"batchrun resume {run.id}"
    held = f"A pause was asked for; only {todo} goes on." * (run.request == Request.PAUSE)
    if run.request == Request.CANCEL:
        held, todo = "A cancel was asked for, and is not done yet.", f"batchrun cancel {run.id}"
    elif run.deferred is not None:
        begins = f"only {todo} begins it" if is_paused_by_person(run) else "the tick begins it"
        held = f"A start was deferred at {run.deferred['at']}; {begins}."
    if run.request == Request.CANCEL or run.deferred or run.state != RunState.AWAITING:
        return f"{run.error or ''}\n{held}".strip(), todo
    if run.reason == Reason.APPROVAL and (asked := ledger.approvals(run)):
        if asked[-1].answered_at is None:
            return asked[-1].words, approve_line(run, asked[-1].name)
        approved = f"{asked[-1].name!r} is approved by {asked[-1].who}: {asked[-1].why}"
        return f"{approved}\n{held}".strip(), todo
    last, of_operations = ledger.last_attempt(run), run.reason == Reason.OPERATION
    if of_operations and (unknown := ledger.open_operations(run)):
        failed = f"\nThe last time: {last.error}" if last and last.ending != Ending.AWAITS else ""
        return unknown_text(unknown) + failed, reconcile_line(run)
    answered = "All its operations have their outcome." * of_operations
    why = answered or run.error or (last and last.error) or ""
    return f"{why}\n{held}".strip(), todo


class Standing(NamedTuple):
    """How a run stands in truth; the ledger's row alone does not know that its owner died."""

    state: RunState  # one of the nine
    why: str  # a sentence, or nothing
    todo: str  # the line to type next
    # whether the tick goes on with it: nobody decided against it, nobody owns it
    is_due: bool = False
    needs_someone: bool = False  # whether a person is to look at it, also where the tick tries on


def standing(ledger: Ledger, run: Run, host: Host) -> Standing:
    """Return how a run stands, after looking at its processes."""
    if run.finished:
        if unknown := ledger.open_operations(run):
            why, todo = unknown_text(unknown), reconcile_line(run)
            return Standing(run.state, why, todo, needs_someone=True)
        return Standing(run.state, rolled_back_text(ledger, run), f"batchrun report {run.id}")
    if alive := owners_of(ledger, run, host):
        return owned_standing(ledger, run, alive, host)
    if run.state in OWNED:
        words = last_error_of(ledger.path.parent / "logs" / run.job / f"{run.id}.log")
        why = "Its processes are gone without a word: killed, or the machine was switched off."
        why += f"\nWhat it did last: batchrun logs {run.id}"
        why = f"Its processes are gone; its log ends with: {words}" if words else why
        run = run._replace(state=RunState.INTERRUPTED, reason="", error=why)
    elif run.checks_at:
        why = f"{run.error}\nNobody keeps it any more; the tick goes on with it."
        run = run._replace(error=why)
    stands = situation(ledger, run)
    is_due = REPLIES[stands][STARTS.index("tick")] == Reply.GO_ON
    needs_someone = not is_due or stands in NEEDS_A_PERSON
    return Standing(run.state, *what_next(ledger, run), is_due, needs_someone)


def last_error_of(log: Path) -> str:
    """Return the error with which a log ends: a letter's first line, a traceback's last; or ""."""
    with contextlib.suppress(OSError), os.fdopen(os.open(log, READ_PLAIN), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65_536))
        text = file.read().decode(errors="replace")
        stamped = re.findall(r"^(\d{4}-\S{18}Z [A-Z]+) (.*)$", text, re.MULTILINE)
        last = [words for stamp, words in stamped if stamp == stamped[-1][0]]
        if last and stamped[-1][0].endswith("ERROR"):
            return str(last[-1 if last[0].startswith("Traceback") else 0])
    return ""


def rolled_back_text(ledger: Ledger, run: Run) -> str:
    """Return which rollback has undone a run, and how far; nothing if none has."""
    undone = [each for each in ledger.rollbacks(run) if each.state == RunState.SUCCEEDED]
    return "".join(f"rolled back to batch {r.rollback_to} by run {r.id}" for r in undone[-1:])


def in_hand(ledger: Ledger, run: Run | None) -> Attempt | None:
    """Return the attempt that has a run in hand, by the ledger's word alone; None of one at rest.

    Who made the last attempt of a run at rest may be at another run now, as a tick is. An attempt
    without an end has its run in hand whatever the state: it calls its cleanups.
    """
    last = ledger.last_attempt(run) if run else None
    is_kept = run is not None and (run.state in OWNED or run.checks_at)
    return last if last and (is_kept or last.ending is None) else None


def owners_of(ledger: Ledger, run: Run | None, host: Host) -> list[ProcessIdentity]:
    """Return the living processes that have a run in hand: supervisor, worker, or one as both."""
    attempt = in_hand(ledger, run)
    recorded = dict.fromkeys((attempt.supervisor, attempt.worker) if attempt else ())
    return [process for process in recorded if process and host.is_alive(process)]


def stopped_owner(owners: Iterable[ProcessIdentity], host: Host) -> tuple[str, str] | None:
    """Return which owner is stopped, in words, and what to type; None if none is."""
    for process in filter(host.is_stopped, owners):
        why = f"Process {process.pid} is stopped (SIGSTOP, or a debugger)."
        return why, f"kill -CONT {process.pid}"
    return None


def closed_standing(stands: Standing, *, closed: bool) -> Standing:
    """Return how a run stands whose job may be closed by maintenance: what to type is refused."""
    if not closed or not stands.todo.startswith(("batchrun run", "batchrun resume")):
        return stands
    why = f"{stands.why}\nMaintenance is on and closes the job: nothing of it starts.".strip()
    return stands._replace(why=why, todo=f"batchrun maintenance off && {stands.todo}")


# What is asked of a run that goes on -> what to type next.
NEXT_WHILE_ASKED: dict[str | None, str] = {
    None: "batchrun logs -f {}",
    Request.PAUSE: "batchrun pause --wait {}",
    Request.DRAIN: "batchrun drain",
    Request.CANCEL: "batchrun cancel --kill {}",
}


def owned_standing(
    ledger: Ledger, run: Run, alive: Sequence[ProcessIdentity], host: Host
) -> Standing:
    """Return how a run stands that living processes own."""
    attempt = cast("Attempt", ledger.last_attempt(run))
    if held := stopped_owner(alive, host):
        return Standing(run.state, *held, needs_someone=True)
    if alive[0] != attempt.supervisor:
        why = f"Its supervisor is gone; worker {alive[0].pid} commits its last batch and leaves."
        return Standing(run.state, why, f"batchrun resume {run.id}", is_due=True)
    why = f"{attempt.error}\nAnother attempt follows." if attempt.may_be_followed else ""
    if run.checks_at:
        why = kept_text(run, alive, host)
    if run.request:
        why = f"{why}\nIt stops at its next safe point: {run.request} is asked for.".strip()
    return Standing(run.state, why, NEXT_WHILE_ASKED[run.request].format(run.id))


def stalled(ledger: Ledger, job: JobConfig, run: Run | None, host: Host) -> Finding | None:
    """Return that a run with a live owner gets nothing done, and what ends it; None if it does.

    It has stalled_after since its last commit, or ten times what one of 20 batches takes, if more.
    """
    attempt = ledger.last_attempt(run) if run and run.state in OWNED else None
    if run is None or attempt is None or not job.stalled_after_s:
        return None
    alive = owners_of(ledger, run, host)
    held = stopped_owner(alive[::-1], host)  # the worker first
    newest = ledger.commit_row(run, run.number)
    quiet_s = seconds_between(max(attempt.began_at, newest.at if newest else ""), host.now())
    slow_s = ledger.slow_batch_s(run) or ledger.slow_batch_s(ledger.last_success(job.name))
    limit_s = max(job.stalled_after_s, 10 * slow_s)
    if quiet_s <= limit_s or not (held or attempt.worker in alive):
        return None
    what = f"no commit for {duration_text(quiet_s)}, at most {duration_text(limit_s)} is usual"
    if held:
        return Finding(what, *held)
    why = f"Worker {alive[-1].pid} lives. Once it is killed its batch is done again."
    return Finding(what, why, f"kill -KILL {alive[-1].pid}")


def late(ledger: Ledger, job: JobConfig, host: Host, lockfile: Lockfile | None) -> str:
    """Return since when a job has not succeeded, if that is longer than it may be; or nothing."""
    success = ledger.last_success(job.name)
    since = success.ended_at if success else ledger.first_met(job.name)
    if not job.expect_every_s or since is None:
        return ""
    age_s = seconds_between(since, host.now())
    if age_s <= job.expect_every_s:
        return ""
    every = duration_text(job.expect_every_s)
    words = f"no success for {duration_text(age_s)}, one is expected every {every}"
    words += ", it never had one" * (success is None)
    if lockfile and closes(lockfile.scopes, job.name, job.tags):
        words += f"; maintenance is on, by {lockfile.by}"
    return words


def kept_text(run: Run, owners: Sequence[ProcessIdentity], host: Host) -> str:
    """Return why a run is kept paused, by whom, and when that looks again whether it is well."""
    left_s = seconds_between(host.now(), cast("str", run.checks_at))
    when = f"in {duration_text(left_s)}" if left_s >= 1 else "now"
    who = f"Process {owners[0].pid} keeps it, goes on when it is well, and checks again {when}."
    return f"It is paused by health: {run.error}\n{who}"


def only_unfinished(ledger: Ledger) -> Run:
    """Return the one unfinished run; NotFound if there is none, a list if there are several."""
    found = ledger.all_unfinished()
    if not found:
        raise NotFound("There is no unfinished run.", todo="To begin one: batchrun run JOB")
    if len(found) > 1:
        lines = "\n".join(f"  batchrun resume {run.id}   ({run.job})" for run in found)
        what = f"{len(found)} runs are unfinished."
        raise ConfigurationError(what, todo=f"Type one of:\n{lines}")
    return found[0]


# ======================================================================================
# 11. Worker: drive one attempt: gate, batch, commit, cleanup
# ======================================================================================
#
# Commit n by the owner of generation g, in this order and no other:
#
#   1  the records are handed to the job
#   2  the job's own work; its writes are committed by the job, or with the mark (section 8)
#   3  the checkpoint's bytes, verified, go to a temporary file and are fsynced; no lock is held
#   4  the lock's path still names the inode we hold, else lost ownership
#   5  BEGIN IMMEDIATE; the run's generation is still g and its number n - 1, else lost ownership;
#      the commit's row, the run's totals and its copy of the bytes; what is requested is read
#   6  the temporary file is renamed to its final name, the directory fsynced: the commit
#   7  COMMIT
#   8  only now: the source's committed() (section 8), the gate, the next batch
#
# A source that allows it is read for the next batch during steps 3 to 7, which have a thread of
# their own then: so the reading hides what the disk takes. What it gives, or raises, stays in the
# loop (section 8) until step 8; then the gate may still throw it away.
#
# Before step 6 the batch is done again; after it the ledger is repaired from the checkpoint. Fence
# and rename share one write lock, which a takeover must also take. A failed fsync, rename or
# COMMIT has an unknown outcome: the process cleans up, writes nothing more, and ends with 5.
#
# What the worker holds is recorded with each commit; past `recycle_above` the attempt ends at that
# safe point, and a fresh worker goes on. An exception of the job ends the attempt; whether trying
# again may help is asked here, where the exception is at hand, and recorded (`attempt.retry`).
#
# What the attempt holds is released after its last commit and before its end is recorded (section
# 8), and before the job's first line what earlier attempts of the job recorded and could not
# release. While that goes on, nothing in it is interrupted but by its own time limit, and the
# ledger says by when it is over: the supervisor waits until then. Only who can record a cleanup's
# call may make it: if the ledger cannot be written, or ownership is lost, it is left pending.
#
# What the worker prints and logs goes line by line to the run's log, with time and level: `ctx.log`
# and `LogStream`. Descriptors 1 and 2 are that file: what a library or a child writes stands there
# as it is. It may be moved, cut or removed: at each commit the worker sees if it is still there,
# and makes it anew. No run fails for its log.
#
# An attempt whose ending cannot be recorded (UNRECORDED) says so in its last words: a file without
# a name, made by the supervisor, which takes them on a full disk too.

DEAR_GAUGES_EVERY_S = 1.0
ASK_EVERY_S = 0.1  # whether something is requested, while a batch is long
UNRECORDED = (ExitCode.STATE_DIRECTORY, ExitCode.LOST_OWNERSHIP, ExitCode.BUSY)


class Order(NamedTuple):
    """What a supervisor tells its worker, as JSON on its command line; no secret is in it."""

    config: str
    job: str
    run: int  # key of the run's row
    generation: int
    lock: int  # descriptor of the job's lock
    supervisor: int  # pid of the process whose end ends the attempt
    batches: int | None  # stop after so many
    acceptances: list[str]  # changes that are accepted: `source`, `settings`
    cleans: bool = False  # run what is pending of cleanups and nothing else
    last_words: int = -1  # descriptor of the file for what the ledger cannot be told


class SafeStop(BaseException):
    """Raised at a safe point inside the job's frame: the attempt ends here."""


class Gate:
    """The place between commits where an attempt may stop, and why it should.

    Attributes:
        stop: whether a stop was asked for.
        request: what is requested of the run in the ledger.
        shut: whether the job was told to end, by `SafeStop` or `Interrupted`; it may have caught
            that, so from then on nothing is committed.
        outgrown_bytes: what the worker holds, if that is more than it may.
    """

    def __init__(self, supervisor: int, batches: int | None) -> None:
        self._supervisor, self._batches_left = supervisor, batches
        self.stop = self.shut = False
        self.request: str | None = None
        self.outgrown_bytes = 0

    def reason_to_stop(self) -> Reason:
        """Return why to stop here, or `Reason.NONE`."""
        if self.request is not None:
            return reason_of(self.request)
        if self.stop or self._batches_left == 0 or os.getppid() != self._supervisor:
            return Reason.STOP
        return Reason.NONE

    def is_closed(self) -> bool:
        """Tell whether the attempt is to end at its next safe point."""
        return bool(self.reason_to_stop() or self.outgrown_bytes)

    def require_open(self) -> None:
        """Raise `SafeStop` if the attempt is to end at this safe point."""
        if self.shut or self.is_closed():
            self.shut = True
            raise SafeStop

    def expects_more(self) -> bool:
        """Tell whether another batch follows the one in hand, as far as can be known."""
        return self._batches_left != 1 and not self.is_closed()

    def passed_a_batch(self) -> None:
        """Count one more batch of those that were asked for."""
        if self._batches_left is not None:
            self._batches_left -= 1


def in_parallel(call: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """Return what `call` returns or raise what it raises, when both have ended.

    `call` has a thread of its own for that long; `meanwhile`, which may be interrupted, has ours.
    """
    returned, raised, ended = list[T](), list[BaseException](), allocate_lock()

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)
        finally:
            ended.release()

    ended.acquire()
    try:
        start_new_thread(run, ())
    except RuntimeError:  # there is none to be had
        run()
    try:
        meanwhile()
    finally:
        ended.acquire()
    for error in raised:
        raise error
    return returned[0]


class Worker:
    """Drives the job's generator through one attempt.

    Attributes:
        recorded: whether the ledger knows how the attempt ended.
        asked: how the attempt ends until a person has answered.
        log_path: of the log that this process's output goes to, if it is its own.
    """

    _course: Course  # from `_prepare` on
    _job: Job
    _operations: Operations

    def __init__(self, order: Order, config: Config, ledger: Ledger, host: Host) -> None:
        self._order, self._config, self._ledger, self._host = order, config, ledger, host
        self._job_config = config.job(order.job)
        state = StateDirectory(config, host)
        self._store, self._lock_path = state.store(order.job), state.lock_path(order.job)
        self._maintenance = state.maintenance
        self._run = ledger.run(order.run)
        self._images, self._images_of = state.images(self._run), state.images
        self._event, self._settings_digest = 0, ""
        self._context: Context[Any] | None = None
        self._generator: Any = None
        self._marked_at, self._own_s = host.monotonic(), 0.0
        self._armed, self._dear_at = "", float("-inf")
        self._asked_at = float("-inf")
        self._cleanups = CleanupStack(host, self._job_config.cleanup_timeout_s)
        self._silenced: BatchrunError | None = None  # why nothing may be written any more
        self._size = self._run.size
        self.gate = Gate(order.supervisor, order.batches)
        self.recorded = False
        self.asked: AttemptEnd | None = None
        self.log_path: Path | None = None

    # -- one attempt -----------------------------------------------------------------------

    def drive(self) -> AttemptEnd:
        """Run the attempt to its end, release what it holds, record how it ended if that can be."""
        try:
            end = self._clean_only() if self._order.cleans else self._run_generator(self._prepare())
        except BaseException as error:  # noqa: BLE001 - whatever a job raises ends the attempt
            end = self._end_of(error)
        end, releases = self._clean_up(end)
        if end.exit_code not in UNRECORDED:
            try:
                self._ledger.end_attempt(self._run, self._order.generation, end, releases)
            except BatchrunError as error:
                return letter_end(error)
            self.recorded = True
            reach("worker.ended")
        return end

    def _prepare(self) -> Context[Any]:
        """Import the job, check what its commits stand on, and make its context."""
        order, host = self._order, self._host
        os.chdir(self._config.folder)
        self._job = job = load_job(self._job_config)
        self._maintenance.require_version(self._job_config, job.version)
        settings = job.settings_from(self._job_config, self._run.overrides, self._config.folder)
        identities = identity(settings, self._config.folder)
        self._settings_digest = settings_digest(identities)
        with disk_letters(self._store.folder, host):
            checkpoint = self._read_checkpoint()
            self._store.open()
        cursor = job.cursor_from(checkpoint) if checkpoint is not None else None
        if checkpoint is not None and "settings" not in order.acceptances:
            require_same_settings(self._run, checkpoint, settings, self._config.folder)
        first = first_hash(self._ledger.uuid, self._run.id, self._settings_digest)
        me = cast("ProcessIdentity", host.identify())
        basis = Basis(identities, job.version, first)
        self._run = self._ledger.open_attempt(self._run, order.generation, me, basis)
        self.gate.request = self._run.request
        self._release_what_was_left()
        self._event = self._ledger.newest_event()
        made_of = (self._ledger, self._run, order.generation, host, self._job_config)
        self._operations = Operations(*made_of, job.not_done, self)
        self._course = course = Course(self._run, order.generation, checkpoint)
        if course.loop:
            course.place = encode_cursor(cursor)
        success = self._ledger.last_success(order.job)
        self._context = Context(
            settings,
            course,
            self,
            self._job_config,
            host,
            self._cleanups,
            acceptances=frozenset(order.acceptances),
            last_success_read=success.read if success else None,
        )
        return self._context

    def _read_checkpoint(self) -> Checkpoint | None:
        """Return where to go on; the admission has made file and ledger agree."""
        content = self._store.read(self._run.id)
        if content is None and self._run.number == 0:
            return None
        try:
            checkpoint, digest = parse_checkpoint(content or b"")
        except BrokenCheckpoint as error:
            raise PersonNeeded(
                f"The checkpoint of run {self._run.id} was spoilt since the run was admitted.",
                why=f"{self._store.path(self._run.id)}: {error.what}",
                unchanged="Nothing was done; the ledger has a copy.",
                todo=f"To restore it and go on: batchrun resume {self._run.id}",
            ) from error
        if digest != self._run.hash:
            raise lost_ownership(self._run, self._order.generation)
        undoes = checkpoint.link.get("undoes")
        if undoes != self._run.rollback_of:
            raise PersonNeeded(
                f"Run {self._run.id} is a rollback of run {undoes}, which the ledger has lost.",
                unchanged="Nothing was done; the checkpoint stands.",
                todo=f"Give it up, then mend by hand what is left: batchrun cancel {self._run.id}",
            )
        return checkpoint

    def _run_generator(self, context: Context[Any]) -> AttemptEnd:
        """Commit whatever the job yields, until it returns or the gate says stop."""
        self.gate.require_open()
        begin = self._job.undoing(self._run) if self._run.rollback_of else self._job
        self._generator = begin(context)
        self._marked_at = self._host.monotonic()
        while True:
            with context._frame.switched(inside=True):
                yielded = next(self._generator, self)
            if yielded is self:
                context._require_complete()
                self._operations.require_none_open()
                self._require_within_limits()
                rejected = self._course.rejected
                code = ExitCode.DONE_WITH_REJECTS if rejected else ExitCode.DONE
                return AttemptEnd(Ending.SUCCEEDED, code)
            context._receive(yielded)
            self.gate.passed_a_batch()
            self.gate.require_open()

    # -- endings ---------------------------------------------------------------------------

    def _end_of(self, error: BaseException) -> AttemptEnd:
        """Return the attempt's end for what was raised; a job told to end may raise anything."""
        if isinstance(error, BatchrunError) and error.exit_code in UNRECORDED:
            return letter_end(error)
        if self.asked is not None:
            return self.asked
        if self.gate.shut or isinstance(error, SafeStop | Interrupted):
            return self._stopped()
        if isinstance(error, BatchrunError) and not isinstance(error, Unreachable):
            return letter_end(error)
        return self._raised(error)

    def _raised(self, error: BaseException) -> AttemptEnd:
        """Return the end after which trying again may help; the traceback goes to the log."""
        log_traceback(error)
        current = self._context._current if self._context else None
        where = f" in batch {current.number}" if current else ""
        retry, said = self._may_retry(error)
        raised = f"{shortened(error_text(error)).removesuffix('.')}{where}"
        end = AttemptEnd(Ending.RAISED, ExitCode.FAILED, error=f"The job raised {raised}.")
        if isinstance(error, Unreachable):
            end, retry = letter_end(error), retry and AT_NO_COST
        end = end._replace(error=f"{end.error}{said}", retry=retry)
        if retry and (reason := self.gate.reason_to_stop()):  # which may have caused it
            return AttemptEnd(Ending.STOPPED, ExitCode.STOPPED, reason, error=end.error)
        return end

    def _stopped(self) -> AttemptEnd:
        """Return the end at a safe point: somebody asked for it, or the worker has outgrown."""
        reason, held = self.gate.reason_to_stop(), self.gate.outgrown_bytes
        if reason or not held:
            return AttemptEnd(Ending.STOPPED, ExitCode.STOPPED, reason or Reason.STOP)
        what = f"The worker held {size_text(held)}, more than recycle_above."
        return AttemptEnd(Ending.RECYCLED, ExitCode.STOPPED, error=what)

    def _may_retry(self, error: BaseException) -> tuple[int, str]:
        """Return whether trying again may help, see `Attempt`, and why not, in words."""
        asked = getattr(self, "_job", None)
        if isinstance(error, Fatal):
            return False, "\nIt is not tried again: that is Fatal."
        is_open = self._context is not None and self._context._current is not None
        in_halves = is_open and self._job_config.isolates and not comes_of_loss(error)
        if asked is None or asked.retry_if is None:
            return IN_HALVES if in_halves else True, ""
        try:
            retry = bool(asked.retry_if(error))
        except BaseException as raised:  # noqa: BLE001 - the job's own code, at the end of the attempt
            log_traceback(raised)
            words = shortened(error_text(raised)).removesuffix(".")
            return False, f"\nIt is not tried again: retry_if raised {words}."
        if in_halves and not retry:
            return IN_HALVES, ""
        return retry, "" if retry else "\nIt is not tried again: retry_if said so."

    def _clean_up(self, end: AttemptEnd) -> tuple[AttemptEnd, list[dict[str, Any]]]:
        """Release what the job holds, in reverse order; outside its frame, so uninterrupted.

        Returns:
            The end, to which failed releases are added but which they never hide; all releases.
        """
        cleanups = self._cleanups
        if self._context is not None:
            self._context._frame.inside = False
        if self._generator is not None:
            cleanups.push("the job's own frame", lambda _: self._generator.close())
        if end.exit_code in UNRECORDED:
            self._silenced = BatchrunError("left to the next attempt")
        succeeded = end.ending == Ending.SUCCEEDED
        if succeeded:
            self._push_those_of_run()
        self._unwind(None if succeeded else JobError(end.error or end.ending))
        if end.exit_code not in UNRECORDED and self._silenced is not None:
            letter = letter_end(self._silenced)
            end = letter._replace(error=f"{end.error}\n{letter.error}".strip())
        failed = [f"{r['name']}: {r['error']}" for r in cleanups.releases if r["error"]]
        if failed:
            done = "Everything was committed." if succeeded else ""
            fine = end.ending in (Ending.SUCCEEDED, Ending.CLEANED)
            code = ExitCode.FINDINGS if fine else end.exit_code
            said = f"{end.error or done}\nA cleanup failed: {'; '.join(failed)}.".strip()
            end = end._replace(exit_code=code, error=said)
        return end, cleanups.releases

    # -- cleanups --------------------------------------------------------------------------

    def record_cleanup(self, function: str, arguments: dict[str, Any], *, of_run: bool) -> None:
        """Record a cleanup, and have it called at the end of the attempt, or of the run."""
        record = self._ledger.record_cleanup
        cleanup = record(self._run, self._order.generation, function, arguments, int(of_run))
        if cleanup is not None and not of_run:
            self._push(cleanup)

    def _push(self, cleanup: Cleanup, *, last: bool = False) -> None:
        name, recorded = mask_secrets(cleanup.call), self._recorded(cleanup)
        self._cleanups.push(name, lambda _: call_cleanup(cleanup), recorded, last=last)

    def _push_those_of_run(self) -> None:
        """Have the run's own cleanups called after all else; they stay pending if that fails."""
        with contextlib.suppress(BatchrunError):
            for cleanup in reversed(self._ledger.cleanups(self._run)):
                if cleanup.of_run and cleanup.done_at is None:
                    self._push(cleanup, last=True)

    def _release_what_was_left(self) -> None:
        """Run what attempts of this job that were killed, of whatever run, have left pending."""
        kept_for = None if self._order.cleans else self._run
        pending = self._ledger.pending_cleanups(self._order.job, kept_for)
        for cleanup in pending:
            self._push(cleanup)
        if pending:
            self._unwind()
            if self._silenced is not None:
                raise self._silenced
            self._note_releases(None)
            failed = sum(bool(release["error"]) for release in self._cleanups.releases)
            said = f", {failed} failed" if failed else ""
            self.say(f"{len(pending)} cleanups were left by an earlier attempt: called{said}")

    def _clean_only(self) -> AttemptEnd:
        """Run what is pending of the job's cleanups, and none of the job's own code."""
        os.chdir(self._config.folder)
        load_job(self._job_config)
        self._release_what_was_left()
        return AttemptEnd(Ending.CLEANED, ExitCode.DONE)

    def _unwind(self, reason: BaseException | None = None) -> None:
        """Release all, and let the supervisor know meanwhile how long that may take."""
        self._note_releases(self._host.monotonic() + self._cleanups.limit_s)
        self._cleanups.unwind(reason)

    def _note_releases(self, until: float | None) -> None:
        with contextlib.suppress(BatchrunError), self._writing():
            self._ledger.note_releases(self._run, self._order.generation, until)

    @contextlib.contextmanager
    def _recorded(self, cleanup: Cleanup) -> Iterator[None]:
        """Record a cleanup's call: before it that it begins, after it how it ended."""
        ledger, fence, began = self._ledger, self._order.generation, self._host.monotonic()
        with self._writing():
            ledger.begin_cleanup(self._run, fence, cleanup.id)
        error = None
        try:
            yield
        except BaseException as raised:
            error = error_text(raised)
            raise
        finally:
            elapsed_s = round(self._host.monotonic() - began, 6)
            with self._writing():
                ledger.end_cleanup(self._run, fence, cleanup.id, error, elapsed_s)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write to the ledger; after a write that failed or was fenced off, nothing any more."""
        if self._silenced is not None:
            raise self._silenced
        try:
            yield
        except BatchrunError as error:
            self._silenced = error
            raise

    def interrupt(self) -> None:
        """Raise `Interrupted` in the job's own frame, and commit nothing more."""
        self.gate.stop = self.gate.shut = True
        if self._context is not None:
            self._context._frame.interrupt()

    # -- what the context asks for ------------------------------------------------------------

    def commit(self, link: Link, meanwhile: Callable[[], None] | None = None) -> None:
        """Make one commit: the protocol at the head of this section.

        `meanwhile` reads what comes next, and is called if that will be wanted; it raises nothing.
        """
        if self.gate.shut:
            raise SafeStop
        began = self._host.monotonic()
        course = self._course
        self._require_within_limits(link)
        number = course.number + 1
        if link.staged is None:
            self.stage(number, link)
        checkpoint = self._next_checkpoint(link)
        content, digest = checkpoint_bytes(checkpoint)
        reach("commit.begun", number)
        spent, gauges, size = self._spent(began), self._gauges(), self._size_after(link)
        commit = Commit(checkpoint, content, digest, spent, link.following, gauges, size)
        self._asked_at = float("inf")  # meanwhile the ledger is in use, maybe by a thread beside
        if meanwhile is not None and self._size is None and self.gate.expects_more():
            self.gate.request = in_parallel(functools.partial(self._record, commit), meanwhile)
        else:
            self.gate.request = self._record(commit)
        keep_log(self.log_path)
        course.move_to(checkpoint, digest)
        self._armed, self._size = link.following or "", size
        if 0 < self._job_config.recycle_above_bytes < gauges["rss_bytes"]:
            self.gate.outgrown_bytes = gauges["rss_bytes"]
        self._asked_at = self._marked_at = self._host.monotonic()
        self._marked_at -= cast("Context[Any]", self._context)._read_s  # ahead: the next batch's
        self._own_s = self._marked_at - began

    def _record(self, commit: Commit) -> str | None:
        """Do steps 3 to 7 of a commit; return what is requested of the run."""
        run, number, temporary = self._course.run, commit.checkpoint.number, ""  # none yet
        letters = functools.partial(disk_letters, self._store.folder, self._host)

        def publish() -> None:
            with letters(known=False):
                self._store.publish(run.id, temporary, number)

        try:
            with letters():
                temporary = self._store.prepare(run.id, commit.content)
                reach("commit.prepared", number)
                is_ours = holds_lock(self._order.lock, self._lock_path)
            if not is_ours:
                raise lost_ownership(run, self._order.generation)
            return self._ledger.commit(run, commit, publish)
        except BaseException:
            self._store.discard(temporary)
            raise

    def _require_within_limits(self, link: Link | None = None) -> None:
        """Refuse a commit, or the end, by which more records are rejected than the job allows.

        The records of a retry were within the limits already.

        Raises:
            TooManyRejects: names the first of the batch, at the end the first of the run.
        """
        course = self._course
        rejected, read = course.rejected, course.read
        if link is not None:
            rejected, read = rejected + link.rejected, read + link.read
        over = self._job_config.max_rejects.exceeded(rejected, read, at_end=link is None)
        if not over or self._run.retry_of:
            return
        if link is None:
            kept = self._ledger.rejects(self._run)
            of_whom, whole = "", [(row.record, row.reason) for row in kept[:1]]
        else:
            of_whom = " of this batch"
            whole = [(plain_text(first.record), first.reason) for first in link.rejects[:1]]
        words = [mask_secrets(word).removesuffix(".") for pair in whole for word in pair]
        short = [shortened(word) for word in words]
        if short != words:
            write_log(self._host.now(), "ERROR", f"Rejected: {': '.join(words)}")
        first = [f", the first{of_whom}: {': '.join(short)}"] * bool(words)
        undone = "The batch is not committed; commit" if link else "No commit was undone; commit"
        raise TooManyRejects(
            f"More than {over} were rejected{''.join(first)}.",
            unchanged=f"{undone} {course.number} stands.",
            todo=f"Mend the records, or raise max_rejects in [jobs.{self._order.job}].",
        )

    def _gauges(self) -> dict[str, int]:
        """Return what this process holds; the dear ones at most once a second."""
        now = self._host.monotonic()
        dear = now - self._dear_at >= DEAR_GAUGES_EVERY_S
        self._dear_at = now if dear else self._dear_at
        return self._host.own_gauges(dear=dear)

    def _spent(self, began: float) -> tuple[float, float, float]:
        """Return seconds of reading, of the job's work, and of batchrun, since the last commit."""
        context = cast("Context[Any]", self._context)
        batch = context._current
        mark_s = 0.0
        if batch is not None and batch._mark is not None:
            mark_s, batch._mark.spent_s = batch._mark.spent_s, 0.0
        work_s = began - batch._link.began - mark_s if batch is not None else 0.0
        read_s, context._read_s = context._read_s, 0.0
        own_s = self._own_s + max(0.0, began - self._marked_at - read_s - work_s)
        return read_s, work_s, own_s

    def _next_checkpoint(self, link: Link) -> Checkpoint:
        """Return the body of the next checkpoint; the course itself is not advanced yet."""
        course, number = self._course, self._course.number + 1
        result = [link.result] if link.kind in ("step", "approval") else []
        passed = [] if link.kind == "batch" else [[link.kind, link.loop, *result]]
        before, more = course.counts, link.counts
        counts = {name: before.get(name, 0) + more.get(name, 0) for name in before | more}
        return Checkpoint(
            ledger=self._ledger.uuid,
            event=self._event,
            operation=self._operations.sync(),
            job=course.run.job,
            job_version=self._job.version,
            run=course.run.id,
            generation=course.generation,
            number=number,
            kind=link.kind,
            loop=link.loop,
            cursor=link.texts["cursor"],
            ended=link.ended,
            passed=course.passed + passed,
            marks={**course.marks, link.loop: number} if link.marked else course.marks,
            totals={
                "read": course.read + link.read,
                "rejected": course.rejected + link.rejected,
                "batches": course.batches + (link.kind == "batch"),
                "counts": counts,
            },
            link=self._link_fields(link),
            source=link.source,
            settings=self._settings_digest,
            previous=course.hash,
            at=self._host.now(),
        )

    def _link_fields(self, link: Link) -> dict[str, Any]:
        """Return what a checkpoint says of its own commit."""
        fields = {
            "read": link.read,
            "rejected": link.rejected,
            "staged": link.staged or self._order.generation,
            "counts": link.counts,
            "first_key": link.texts["first_key"],
            "last_key": link.texts["last_key"],
            "elapsed_s": round(self._host.monotonic() - link.began, 6) if link.began else 0.0,
        }
        if self._run.rollback_of:
            fields["undoes"] = self._run.rollback_of
        if link.images:
            self._images.look(link.images)  # a batch that is in the target may have lost it since
            fields |= {name: getattr(link, name) for name in IMAGE_FIELDS}
        return fields

    def begin_batches(self, expected: int | None, tried: str) -> None:
        """Move the run to `running`, right before its first batch is handed out."""
        with self._image_letters():
            self._images.sweep(self._course.number)
        self._ledger.begin_batches(self._run, self._order.generation, expected, tried)
        self._armed = tried

    def begin_try(self, tried: str) -> None:
        """See that the try of a batch is armed; only the first of a later loop is not yet."""
        if tried != self._armed:
            self._ledger.arm(self._run, self._order.generation, tried)
            self._armed = tried

    def stage(self, number: int, link: Link) -> None:
        """Store what does not count before its batch is committed: its image, its rejects.

        Raises:
            TooManyRejects: for the job's limits.
            StateDirectoryError: the image cannot be written; nothing is committed.
        """
        if link.image is not None and link.image.rows:
            with self._image_letters():
                content = link.image.content()
                link.images = self._images.write(number, self._order.generation, *content)
            link.image = None
        if not link.rejects:
            return
        self._require_within_limits(link)
        tries = self._run.tries + (self._size != 0) if number == self._run.number + 1 else 1
        kept = [{**kept_reject(reject), "tries": tries} for reject in link.rejects]
        self._ledger.stage_rejects(self._run, self._order.generation, number, link.loop, kept)

    def _image_letters(self) -> contextlib.AbstractContextManager[None]:
        folder = self._images.folder.parent.parent
        return disk_letters(folder, self._host, what="what a batch remembers")

    def remembered(self) -> Source:
        """Return the rows that this run, a rollback, has to undo."""
        rollback = self._ledger.rollback_by(self._run)
        return Remembered(self._ledger.batches_of(rollback), self._images_of(rollback.of))

    def taken_up(self, loop: str, after: Any, limit: int) -> list[RejectRow]:
        """Return the rejects that this run, a retry, has to read in the place of a source."""
        return self._ledger.rejects_taken_up(self._run, loop, after, limit)

    def ask(self, name: str, summary: str) -> Approval:
        """Return the answer to a question; raise `SafeStop` while there is none."""
        words = mask_secrets(summary)
        question = self._ledger.ask(self._run, self._order.generation, name, words)
        reach("approval.asked", self._order.generation)
        if question.answered_at is None:
            self.await_answer(question_end(self._run, question))
        return question

    def await_answer(self, end: AttemptEnd) -> NoReturn:
        """End the attempt here, until a person has answered."""
        self.asked, self.gate.shut = end, True
        raise SafeStop

    def operate(self, wanted: Sequence[tuple[str, tuple[Any, ...]]], how: How) -> list[Claim]:
        """Do what was never done under these keys; say of each what became of it, in order."""
        return self._operations.perform(self._course.number + 1, wanted, how)

    def limit(self, loop: Loop) -> int:
        """Return how many records the next batch may have."""
        if loop.mark is None and self._job_config.isolates:
            key = "isolate = true" if self._job_config.isolate else 'on_exhausted = "reject"'
            raise broken("isolated without", loop=loop.name, job=self._order.job, key=key)
        return loop.size if self._size is None else max(1, min(self._size, loop.size))

    def _size_after(self, link: Link) -> int | None:
        """Return the limit that isolation goes on with after a commit; None: the usual one.

        The first batch of an attempt, a half, is followed by another, in which the record is if it
        was not in the first; after that the limit doubles.
        """
        if self._size is None or link.kind != "batch":
            return self._size
        size = max(1, self._size)
        if self._course.batches == self._run.batches:
            return size
        return 2 * size if 2 * size < cast("Context[Any]", self._context)._loops[-1].size else None

    def why_bad(self, tried: str) -> str:
        """Return the error of a try of one record that isolation has found, else nothing."""
        found = self._size == 0 and tried == self._run.tried
        return self._ledger.why_halved(self._run) if found else ""

    def pass_gate(self) -> None:
        """Raise `SafeStop` if the attempt is to end at this safe point."""
        self.gate.require_open()

    def stop_is_asked(self) -> bool:
        """Tell whether the attempt is to stop at its next safe point; the ledger is asked, too."""
        now = self._host.monotonic()
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at, self.gate.request = now, self._ledger.run(self._run.key).request
        return self.gate.is_closed()

    def say(self, text: str) -> None:
        """Record a line that the supervisor shows."""
        self._ledger.note("worker", SAID, text, run=self._run)

    def note_target(self, loop: str, target: Target) -> None:
        """Record the SQLite file that keeps the mark of a loop, so that `check` can look there."""
        if not isinstance(target, SqliteTarget):
            return
        path = _tuple(target.connection.execute("PRAGMA database_list").fetchone())[2]
        where = _compact([loop, path])
        known = [event.why for event in self._ledger.events(self._run, what=TARGET)]
        if path and where not in known:
            self._ledger.note("worker", TARGET, where, run=self._run)


REJECT_MAX_CHARS = 65_536


def kept_reject(reject: Reject) -> dict[str, object]:
    """Return the columns of a reject: its text, and its value if that holds no secret.

    Both have a bound; what is too large, of a type that no cursor has, or no record of the source
    is kept as text only.
    """
    plain = plain_text(reject.record)
    value = encode_restorable(reject.record) if reject.handed else None
    text = mask_secrets(plain)
    if value is not None and (text != plain or mask_secrets(value) != value):
        value = None
    if len(text) > REJECT_MAX_CHARS:
        text = f"{text[:REJECT_MAX_CHARS]}... (cut: {len(text):,} characters)"
    reason = mask_secrets(reject.reason)[:REJECT_MAX_CHARS]
    return {
        "record": text,
        "value": value,
        "raw": reject.raw,
        "record_number": reject.number,
        "reason": reason,
    }


def plain_text(record: object) -> str:
    """Return a record as text; of one that cannot be shown, its type."""
    try:
        return repr(record)
    except Exception as error:  # noqa: BLE001 - the text is made by the job's own code
        return f"<{type(record).__name__}, which cannot be shown: {type(error).__name__}>"


# -- letters -------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_letters(
    folder: Path,
    host: Host,
    *,
    known: bool = True,
    what: str = "a checkpoint",
    todo: str = "type: batchrun resume",
) -> Iterator[None]:
    """Turn what the file system refuses into a letter; `known`: what is on the disk is as before.

    Raises:
        StateDirectoryError: nothing was changed.
        OutcomeUnknown: in step 6 or 7 of a commit.
    """
    try:
        yield
    except OSError as error:
        todo = f"Check the disk of {folder}, then {todo}"
        said = f"{what.capitalize()} cannot be read or written in {folder}: {error.strerror}."
        if is_full(folder.parent, host, error.errno or 0):
            said = f"Disk full: {what} cannot be written to {folder} ({error.strerror})."
        if known:
            stands = "The last commit stands."
            raise StateDirectoryError(said, unchanged=stands, todo=todo) from error
        why = "Whether it is on the disk cannot be known from here; the next start finds out."
        raise OutcomeUnknown(said, why=why, todo=todo) from error


def letter_end(error: BatchrunError) -> AttemptEnd:
    """Return a letter as an attempt's end."""
    ending, reason = Ending.RAISED, Reason.NONE
    if isinstance(error, MaintenanceOn):
        ending, reason = Ending.STOPPED, Reason.MAINTENANCE
    elif isinstance(error, SourceChanged):
        ending = Ending.CHANGED
    elif error.exit_code in (ExitCode.PERSON_NEEDED, ExitCode.USAGE, ExitCode.NOT_FOUND):
        ending = Ending.REFUSED
    said = "\n".join(part for part in (error.what, error.why) if part)
    error_text, unchanged, todo = map(mask_secrets, (said, error.unchanged, error.todo))
    return AttemptEnd(ending, error.exit_code, reason, error_text, unchanged, todo)


def question_end(run: Run, asked: Approval) -> AttemptEnd:
    """Return the end of an attempt that waits for a person's answer."""
    how = (Ending.AWAITS, ExitCode.PERSON_NEEDED, Reason.APPROVAL, asked.words)
    return AttemptEnd(*how, todo=f"To go on: {approve_line(run, asked.name)}")


def letter_text(end: AttemptEnd | Attempt) -> str:
    """Return how an attempt ended as the text of a letter."""
    return "\n".join(part for part in (end.error, end.unchanged, end.todo) if part)


def log_traceback(error: BaseException) -> None:
    """Write a traceback to standard error, which is a worker's log."""
    import traceback  # only when something went wrong

    text = "".join(traceback.format_exception(error)).rstrip("\n")
    write_log(Host().now(), "ERROR", text)


# -- the log -------------------------------------------------------------------------------


class LogStream(io.RawIOBase):
    """What a worker prints: each line goes to its log at once, with its time, and never fails it.

    What is written to the descriptor itself, by a library in C or a child process, has no time.
    """

    def __init__(self, level: str, host: Host) -> None:
        self._level, self._host = level, host

    def writable(self) -> bool:
        """Tell what it is for."""
        return True

    def fileno(self) -> int:
        """Return the descriptor for what writes past this stream."""
        return 2

    def write(self, content: Any) -> int:
        """Write text that io.TextIOWrapper has encoded."""
        if not (text := bytes(content).decode(errors="replace")):
            return 0
        ends = text.endswith("\n")
        write_log(self._host.now(), self._level, text.removesuffix("\n"), ends=ends)
        return len(content)


def print_to_log(host: Host) -> None:
    """Let what the job prints stand in the log, whatever its characters and this process's locale.

    A line that was begun is written when it is ended, or flushed.
    """
    how: Any = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
    sys.stdout = io.TextIOWrapper(cast("Any", LogStream("OUT", host)), **how)
    sys.stderr = io.TextIOWrapper(cast("Any", LogStream("ERR", host)), **how)


def keep_log(path: Path | None) -> None:
    """Go on in a new log if a worker's was moved or removed; without one if it cannot be made."""
    if path is None:
        return
    with contextlib.suppress(OSError, StateDirectoryError):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(2), path.lstat()):
                return
        log = open_log(path)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def open_log(path: Path) -> int:
    """Open a run's log file for appending, private and never through a link.

    Raises:
        StateDirectoryError: it cannot be opened, or is no plain file.
    """
    ways = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        make_private_folder(path.parent.parent)
        make_private_folder(path.parent)
        log = os.open(path, ways, 0o600)
        if stat.S_ISREG(os.fstat(log).st_mode):
            os.set_blocking(log, True)
            return log
        os.close(log)
        why = "it is not a plain file"
    except OSError as error:
        why = error.strerror or str(error)
    raise StateDirectoryError(f"The log {path} cannot be written: {why}.")


# -- the process -----------------------------------------------------------------------------


def worker_main() -> NoReturn:
    """Be the worker of the order on the command line, and leave without running anything else."""
    order = Order(**json.loads(sys.argv[1]))
    for descriptor in (order.lock, order.last_words):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    end, recorded = AttemptEnd(Ending.DIED, ExitCode.FAILED, error="The worker failed."), False
    try:
        host = Host()
        print_to_log(host)
        host.volunteer_for_oom_kill()
        host.ask_for_signal_at_parents_death()
        config = load_config(Path(order.config))
        state = StateDirectory(config, host)
        ledger = open_ledger(state.ledger_path, host, create=False)
        worker = Worker(order, config, ledger, host)
        worker.log_path = state.log_path(ledger.run(order.run))
        listen(worker)
        end = worker.drive()
        recorded = worker.recorded
        ledger.close()
    except BatchrunError as error:
        end = letter_end(error)
    except BaseException as error:  # noqa: BLE001 - the process ends here, whatever it is
        log_traceback(error)
    finally:
        if not recorded:
            write_log(Host().now(), "ERROR", letter_text(end))
            write_line(order.last_words, json.dumps(end._asdict()))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.exit_code)


def listen(worker: Worker, by_key: Callable[..., object] | None = None) -> None:
    """Let SIGTERM stop at the next safe point and SIGUSR1 interrupt the job's own frame.

    Args:
        worker: the worker of this process.
        by_key: what Ctrl-C does, in process; without it, it is the supervisor's alone.
    """

    def stop(*_: object) -> None:
        worker.gate.stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, lambda *_: worker.interrupt())
    signal.signal(signal.SIGINT, by_key or signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


# ======================================================================================
# 12. Supervisor: admission, attempts, endings; telling; what is done to a run from outside
# ======================================================================================
#
# A supervisor owns one job's lock, admits one run, and watches one worker at a time. It has no job
# code, no threads and no signal handlers (--in-process has the worker's): the signals that it
# counts are blocked and taken up in its loop, so nothing can cut into a ledger verb or a lock.
#
# Order at start: state directory, ledger (a refused start is a row too), maintenance, job lock, and
# last the admission, which looks at all of them again. A worker's exit code is diagnosis and never
# evidence: the run's edge is made from the row that the worker recorded under its own
# generation. The lock is released if and only if nothing that the worker started lives any more;
# on every other way out it stays locked until the last process that has it open is gone.
#
# After an attempt its run finishes, rests, or is kept `reserved` by the same supervisor, which
# waits and begins the next attempt through the same admission:
#
#   a try is the work on one batch: (loop, cursor that it begins after, limit of records). It is
#   armed durably before the work: by `begin_batches`, and by a commit for the batch after it.
#
#   charged    +1 to the armed try, by the edge that is made from the attempt's ending, if and only
#              if the batch caused that: its job raised an exception of its own; its worker died
#              while a batch was open, and the supervisor, alive, had not asked for it; or it did
#              not commit within batch_timeout
#   not        stops, and what a job or its worker does once one was asked for; recycling, lost
#              ownership, letters; a database that lets no job in (`Unreachable`). Nor a death that
#              no supervisor saw: killed together they leave the rows of a deploy or a power cut.
#              Only an exception that the worker had recorded before is proof enough, and charged by
#              the next start
#
#   tried again    after RAISED, if `attempt.retry` says so, after a death and after OVERDUE, with
#                  waits of 1, 4, 16, ... s and jitter; after RECYCLED at once. In process
#                  nothing is: there the run fails, and after RECYCLED is paused
#   plan B         at max_tries charged or retry_for after the batch's first failure: on_exhausted
#   isolation      a batch that was charged is tried again in halves, at once: with isolate = true,
#                  or as plan B ("reject"). The edge halves the limit (`run.size`); each commit
#                  moves it on: a half is followed by another, after that it doubles, up to the
#                  usual size. Half of one record is 0: the next worker passes that very record
#                  over, in a commit with read 1 and rejected 1, without calling the job. Not for an
#                  error to which retry_if says yes (the record did not cause it), nor for a lost
#                  server or a held lock, nor outside a batch. It needs a target: only that tells
#                  what of a batch was done
#   poison         max_tries charged, and plan B is not to fail: the run awaits a person, whose
#                  `resume` begins to count anew, as every start of a failed run does. Where the
#                  outcome of operations is unknown, as of a lookup that fails, it awaits those
#
# While a worker runs, health (section 7) is watched. A verdict to pause asks the worker to stop as
# the first stop does, with the same stop_grace; no try is charged. Then, or where a check follows a
# failure and says pause (which excuses the failure), the run is *paused by health*: its worker is
# gone, its supervisor keeps it and the lock, checks on, and begins the next attempt when it is
# well. Past max_pause the run stays paused and a person is told (13); the tick tries again. The
# time of pauses counts neither for retry_for nor for the rate.
# No start waits for a check: a job that cannot work without what it needs fails, and is excused.
#
# A supervisor that is killed while it waits leaves the run to the next start, as interrupted.
# So does an attempt that is refused before its first batch (another version, a file that cannot be
# imported, other settings): each tick tries it, until what was installed fits again.
# Every admission asks whether maintenance closes the job. Where it does, a run that was going on is
# paused (75); a start is refused (12; 13 once the maintenance is overdue) or deferred (75, once it
# is stored). A fresh one is not deferred while a run is unfinished: nothing is cancelled behind the
# barrier. A second one replaces what it asks for itself, and takes nothing else away. What is
# stored begins no run in a period that has its success, and none that a person paused since.
#
#   first stop     SIGTERM to the worker: it ends at its next safe point
#   second stop    SIGUSR1, also when stop_grace is over: the batch is given up and rolled back
#   third stop     SIGKILL, also 10 s or stop_grace (the less) after the SIGUSR1: out; the run can
#                  be resumed
#
# While a worker releases what it holds, the second stop waits and stop_grace does not end it; only
# the third counts. (The first one is as ever: the job's first line is not reached.) It has
# `cleanup_timeout` for each release, once more, and 10 s or stop_grace (the less); then it hangs
# where no time limit reaches, and is killed, stop or no stop; the next attempt calls what it had
# recorded by cleanup(). Who ends during a cleanup's call charges no batch: none was open.
#
# Every wait of a supervisor is `StopCounter.wait`, in a loop: there stops are counted, and systemd
# hears what is due. In process Ctrl-C is both first and second stop, and raises in the job's own
# frame only, as SIGUSR1 does; there is no loop then, so no watchdog.
#
# A run with pending cleanups that is to go on no more has one more worker, under a new generation,
# that calls them and does nothing else; then it is cancelled, whatever came of them. That begins no
# attempt of the job, so `cancel` does it under maintenance too; the tick waits. A fresh start
# needs none: the new run's worker calls what is pending of its job, of whatever run.
#
# People are told after the run's edge, when the lock is free, by whoever ends: `run`, `resume`, the
# tick. `Alerts.look` compares what stands with what was raised; `begin` asks one process of probes
# (section 7) to post and call, which is killed if it hangs. What did not arrive is tried again by
# whoever comes after its wait; where the ledger takes nothing it is told without a record, by each
# who comes. A job's ping of its start is sent beside its first batches.

COUNTED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCH_INTERVAL_S = 0.2
ONE_STOP_S = {signal.SIGINT: 0.2}  # a second signal sooner than this is the same one
ONE_STOP_DEFAULT_S = 1.0
KILL_AFTER_INTERRUPT_S = 10.0  # or stop_grace again, if that is less
RETRY_FACTOR = 4  # each wait is so much longer than the one before
ORPHAN_GRACE_S = 2.0
DEFER_WAIT_S = 5.0  # for the lock, which another start that is stored holds for a moment


# -- telling people ------------------------------------------------------------------------------


def troubles(
    config: Config, ledger: Ledger, host: Host, lockfile: Lockfile | None
) -> Iterator[Alert]:
    """Yield what stands now that people may be told of."""
    for job in config.jobs.values():
        name, run = job.name, ledger.unfinished(job.name)
        if run and (found := run_trouble(config, ledger, run, host)):
            yield found
        if why := late(ledger, job, host, lockfile):
            todo = f"batchrun status {name}"
            yield Alert("late", name, name, None, f"{name} is late: {why}.", todo)
    if lockfile and lockfile.overdue:
        why = f"Maintenance is overdue. {lockfile.overdue} It is on by {lockfile.by}."
        yield Alert("overdue", "maintenance", None, None, why, "batchrun maintenance off")


def run_trouble(config: Config, ledger: Ledger, run: Run, host: Host) -> Alert | None:
    """Return what people may be told of an unfinished run."""
    stands: Finding | Standing = standing(ledger, run, host)
    at = (run.state, run.reason)
    age_s = seconds_between(run.changed_at, host.now())
    if stuck := stalled(ledger, config.job(run.job), run, host):
        kind, what, stands = "stalled", f"is stalled: {stuck.what}", stuck
    elif run.state == RunState.FAILED:
        kind, what = "failed", "failed"
    elif situation(ledger, run) in NEEDS_A_PERSON:
        kind, what = "awaiting", "needs a person"
    elif at == (RunState.PAUSED, Reason.HEALTH) and age_s > config.alerts.paused_after_s:
        kind, what = "paused", f"is paused by health for {duration_text(age_s)}"
    else:
        return None
    asked = ledger.open_question(run)
    about = f"{run.id} {run.number} {run.reason} {asked.name if asked else ''}".strip()
    why = f"{run.job}: run {run.id} {what}.\n{stands.why}".strip()
    return Alert(kind, about, run.job, run.id, why, stands.todo)


class Alerts:
    """Raises what stands, once, and tells it in a process of its own; see the head."""

    def __init__(self, config: Config, ledger: Ledger, host: Host) -> None:
        self._config, self._ledger, self._host = config, ledger, host
        self._inquiry: Inquiry | None = None
        self._tried: dict[str, Delivery] = {}  # by the name of its question
        self._has_pinged = False

    def look(self, lockfile: Lockfile | None, ended: Sequence[Alert] = ()) -> None:
        """Raise what is new and close what is over; `ended` is what a start's end is worth."""
        changes = functools.partial(self._changes, lockfile, ended)
        if any(changes()):
            self._ledger.raise_alerts(changes, self._config.alerts.ways)

    def ping(self, run: Run) -> None:
        """Begin to tell that a run has begun, once."""
        if self._config.job(run.job).ping and run.is_whole and not self._has_pinged:
            self._has_pinged = True
            ping = Alert("ping start", run.job, run.job, run.id, f"{run.job} has begun.")
            with in_no_way():
                self._ledger.raise_alerts(lambda: ([ping], []), ())
                self.begin()

    def _changes(
        self, lockfile: Lockfile | None, ended: Sequence[Alert]
    ) -> tuple[list[Alert], list[Alert]]:
        here = (self._config, self._ledger, self._host, lockfile)
        found = [*troubles(*here), *ended] if self._config.alerts.ways else []
        is_overdue = lockfile is not None and lockfile.overdue
        stand = self._ledger.alerts()
        known = {(alert.kind, alert.about) for alert in stand}
        raised = [a for a in found if (a.kind, a.about) not in known and a.kind not in PINGS]
        over = [a for a in stand if (self._ledger.success_since(a) if a.job else not is_overdue)]
        raised += [self._recovered(job, over) for job in dict.fromkeys(a.job for a in over)]
        raised = [each for each in raised if each.kind in self._config.alerts.on]
        over += [a for a in stand if a.job and a.job not in self._config.jobs and a not in over]
        pings = [each for each in ended if each.kind in PINGS]
        return raised + [each for each in pings if self._config.way("ping", each)], over

    def _recovered(self, job: str | None, over: Sequence[Alert]) -> Alert:
        """Return that a job has succeeded after alerts, or that maintenance is over."""
        told = ", ".join(f"{alert.kind} since {alert.at}" for alert in over if alert.job == job)
        run, why = None, "Maintenance is not overdue any more."
        if job and (run := self._ledger.last_success(job)):
            why = f"{job} has recovered: run {run.id} succeeded."
        about = job or "maintenance"
        return Alert("recovered", about, job, run and run.id, f"{why}\nIt was {told}.")

    def begin(self) -> None:
        """Begin every try that is due, if none is on its way; never waits."""
        if self._inquiry is None:
            needs = []
            for tried in self._ledger.begin_deliveries(self._config.way):
                needs.append(self._need(tried.way, tried.alert))
                self._tried[needs[-1].name] = tried
            reach("delivery.begun", len(needs))
            if needs:
                self._inquiry = Inquiry(needs, self._config.folder, self._host)

    def _need(self, way: str, alert: Alert) -> Need:
        body = "" if way == "ping" else event_text(alert, self._config)
        need = cast("Need", self._config.way(way, alert))
        return need._replace(name=f"{alert.id} {way}", body=body)

    def tell_unrecorded(self, lockfile: Lockfile | None, ended: Sequence[Alert]) -> None:
        """Tell what is new where the ledger takes nothing; so whoever comes next tells it again."""
        needs = []
        for number, alert in enumerate(self._changes(lockfile, ended)[0]):
            found = alert._replace(id=-number, at=self._host.now())
            ways = ["ping"] if alert.kind in PINGS else self._config.alerts.ways
            needs += [self._need(way, found) for way in ways]
        Inquiry(needs, self._config.folder, self._host).wait()

    def poll(self) -> bool:
        """Record what has come back; tell whether nothing is on its way any more."""
        is_over = self._inquiry is None or self._inquiry.poll()
        if is_over:
            self.end()
        return is_over

    def end(self) -> None:
        """Kill what is on its way, and record what came of each try."""
        inquiry, self._inquiry = self._inquiry, None
        if inquiry is not None:
            inquiry.end()
            reach("delivery.answered")
            for name, answer in inquiry.answers.items():
                error = None if answer.state == Wellness.OK else answer.why
                with in_no_way():
                    self._ledger.end_delivery(self._tried.pop(name), error, answer.elapsed_s)

    def deliver(self) -> None:
        """Tell what is due, and wait for the answers; a probe's time limits bound it."""
        self.begin()
        while not self.poll():
            self._host.systemd.turn()
            self._host.sleep(BUSY_STEP_S)


def event_text(alert: Alert, config: Config) -> str:
    """Return an alert as the JSON object that commands and webhooks are given."""
    names = ("kind", "job", "run", "at", "why", "todo")
    event: dict[str, Any] = {name: mask_secrets(getattr(alert, name) or "") for name in names}
    event["todo"] = typed_elsewhere(event["todo"], config.path)
    event["text"] = event["why"] + f"\nto type: {event['todo']}" * bool(event["todo"])
    more = {"alert": alert.id, "host": os.uname().nodename, "config": str(config.path)}
    return json.dumps({**event, **more})


def ping_of(run: Run | None, launch: Launch, code: ExitCode) -> list[Alert]:
    """Return the ping that a start's end is worth: none if it was refused, stopped or skipped."""
    name, job = run and run.id, launch.job
    if launch.retry or launch.rollback or (run and not run.is_whole):
        return []
    if run and run.state == RunState.SUCCEEDED:
        return [Alert("ping success", job, job, name, f"{job} has succeeded.")]
    failed = (ExitCode.FAILED, ExitCode.USAGE, ExitCode.STATE_DIRECTORY, ExitCode.PERSON_NEEDED)
    why = f"{job}: exit {int(code)}."
    return [Alert("ping fail", job, job, name, why)] if code in failed else []


def unfit(outcome: Outcome, job: str) -> list[Alert]:
    """Return what people are told of a start whose state directory was full, or not to be used."""
    if outcome.exit_code != ExitCode.STATE_DIRECTORY:
        return []
    why = f"{job} needs a person: its state directory cannot be used.\n{outcome.letter}"
    run, todo = outcome.run and outcome.run.id, f"batchrun doctor {job}"
    return [Alert("awaiting", f"{job} state directory", job, run, why, todo)]


def sent_tests(config: Config, job: str | None, host: Host) -> Iterator[Examined]:
    """Send a test by every way that is configured, and yield what came back."""
    why = "This is a test of batchrun's alerts; nothing is wrong."
    test = Alert("test", "", job, None, why, id=0, at=host.now())
    body = event_text(test, config)
    needs = [need._replace(name=way, body=body) for way, need in config.alerts.ways.items()]
    ping = test._replace(kind="ping success")
    for name in config.jobs if job is None else [job]:
        need = config.way("ping", ping._replace(job=name))
        needs += [need._replace(name=f"ping of {name}")] if need else []
    answers = Inquiry(needs, config.folder, host).wait()
    for need in needs:
        answer, means = answers[need.name], "an alert that does not arrive is tried again"
        yield examined(need, answer, means, config)
    if not needs:
        means = "only exit codes, status and metrics tell"
        todo, unknown = f"add [alerts] to {config.path}", Wellness.UNKNOWN
        yield Examined("alerts", "[alerts]", unknown, "names no way", means, todo=todo)


# -- one job's run, from a start to its rest -----------------------------------------------------


class Launch(NamedTuple):
    """How a run is started: what a person or a timer asked for."""

    job: str
    only_resume: bool = False  # go on with an unfinished run, begin no new one
    by_person: bool = False  # a person's pause is lifted by this start
    fresh: bool = False  # cancel the unfinished run first
    overrides: Mapping[str, str] = {}  # settings for this run, name -> text
    acceptances: tuple[str, ...] = ()  # changes that are accepted: `source`, `settings`
    batches: int | None = None  # stop after so many
    when_blocked: str = ""  # by maintenance: `refuse` or `defer`; empty: as the job says
    in_process: bool = False  # run the worker's code in this interpreter
    cancels: str = ""  # id of a run to be cancelled after its cleanups, and nothing else
    retry: Retry | None = None  # begin a run that takes up these rejects
    rollback: Rollback | None = None  # begin a run that undoes this

    @property
    def start(self) -> str:
        """Which of STARTS this is."""
        if not self.only_resume:
            return "fresh" if self.fresh else "run"
        return "resume" if self.by_person else "tick"


class Outcome(NamedTuple):
    """How a command that runs a job ended: exit code, the run as it stands, a letter if any."""

    exit_code: ExitCode
    run: Run | None = None
    letter: str = ""
    signalled: bool = False  # whether this process is to stop, and not only the run


def deferred_letter(before: Run | None, run: Run, refusal: MaintenanceOn) -> str:
    """Return that a start is stored, what it replaces, when it begins, how to withdraw it."""
    note = cast("dict[str, Any]", run.deferred)
    withdraw = "cancel" if run.state == RunState.WAITING else "pause"
    lines = [
        f"{run.job}: the start is deferred since {note['at']}, as run {run.id}.",
        refusal.what,
        refusal.why,
        refusal.todo if isinstance(refusal, MaintenanceOverdue) else "",
    ]
    if before is not None and before.deferred:
        was, now = stored_words(before), stored_words(run)
        first = "the one that was deferred before"
        replaced = f"It replaces {first} as run {before.id}: {was}; now {now}."
        is_same = (before.id, was) == (run.id, now)
        lines += [f"It is the same as {first}." if is_same else replaced]
    lines += [
        "The tick (batchrun resume --all) begins it once when that is over.",
        f"To withdraw it: batchrun {withdraw} {run.id}",
    ]
    return "\n".join(filter(None, lines))


def stored_words(run: Run) -> str:
    """Return what a deferred start asks for beyond its run, as the words of its options."""
    note = run.deferred or {}
    words = [f"--set {name}={text}" for name, text in run.overrides.items()]
    words += [f"--accept-{each}" for each in note.get("acceptances", ())]
    words += [f"--batches {note['batches']}"] if note.get("batches") else []
    return " ".join([*words, *["--fresh"] * bool(note.get("fresh"))]) or "nothing more"


class Watcher(Protocol):
    """What a supervisor tells while it works."""

    def say(self, text: str) -> None:
        """Show one line."""

    def draw(self, line: str) -> None:
        """Show a line in the place of the last one, if somebody looks on; empty: none."""

    def progress(self, run: Run) -> None:
        """Show where the run stands; called a few times a second."""


class Supervisor:
    """Starts, watches and ends the attempts of one job's run."""

    _ledger: Ledger  # from `run` on
    _health: HealthWatch
    _alerts: Alerts

    def __init__(self, config: Config, launch: Launch, host: Host, watcher: Watcher) -> None:
        self._config, self._launch, self._host, self._watcher = config, launch, host, watcher
        self._job_config = config.job(launch.job)
        self._state = StateDirectory(config, host)
        self._store = self._state.store(launch.job)
        self._lock = JobLock(self._state.lock_path(launch.job))
        self._me = cast("ProcessIdentity", host.identify())
        self._who = f"supervisor {self._me.pid}"
        self._stops = StopCounter(host)
        self._patience = Patience(self._job_config, host)
        self._told_stop = False  # whether the watcher was told of the first stop
        self._shown = 0  # the event up to which the watcher was told
        self._follows = ""  # what follows a failure, to be said when the write lock is given back
        self._due_s = 0.0  # the check up to which a pause was recorded
        self._began_with: dict[int, int] = {}  # key of a run -> its batches when we admitted it
        self._nothing_lives = True  # of what our workers started
        # whether, and as what in a row, the next admission begins anew; fields of its Start
        self._anew: dict[str, Any] = {"fresh": True} if launch.fresh else {}

    # -- from start to end -------------------------------------------------------------------

    def run(self) -> Outcome:
        """Admit a run and see it to its end.

        Raises:
            BatchrunError: nothing was admitted, or its end could not be recorded; says which.
        """
        self._stops.begin()
        self._state.require_fit(create=not self._launch.only_resume, starts=True)
        self._ledger = self._state.open_ledger(create=not self._launch.only_resume)
        try:
            if not self._launch.cancels:
                self._require_open()  # the admission looks again
            reach("start.looked")
            if not self._take_lock():
                self._watcher.say("stopped while waiting; nothing was started")
                return Outcome(self._stops.exit_code(), signalled=True)
            self._host.become_subreaper()
            self._code = code_digest()
            self._health = HealthWatch(self._config, self._launch.job, self._ledger, self._host)
            self._alerts = Alerts(self._config, self._ledger, self._host)
            self._shown = self._ledger.newest_event()
            outcome = self._run_until_done()
            if (run := outcome.run) and run.finished:
                stays = f"Run {run.id} of {run.job} stays {run.state}: only old ones were to go."
                prune_beside(self._state, self._ledger, self._config, self._host, self._who, stays)
            with in_no_way():  # what is recorded is durable already
                self._ledger.empty_log()
            return outcome._replace(signalled=self._stops.count > 0)
        except MaintenanceOn as refusal:
            return self._turned_away(refusal)._replace(signalled=self._stops.count > 0)
        finally:
            self._ledger.close()
            if self._lock.descriptor >= 0 and self._nothing_lives:
                self._lock.release()

    def _require_open(self) -> Lockfile | None:
        """Refuse what the maintenance lockfile closes; not in a transaction."""
        self._state.maintenance.name_owner()
        return self._state.maintenance.require_open(self._job_config)

    def _turned_away(self, refusal: MaintenanceOn) -> Outcome:
        """End at the barrier: a run that was going on is paused, a start is deferred or refused.

        Raises:
            MaintenanceOn: it is refused.
        """
        wanted = self._launch.when_blocked or self._job_config.when_blocked
        run = self._ledger.unfinished(self._launch.job)
        is_ours = run is not None and any(  # and was not turned away itself
            attempt.supervisor == self._me and attempt.reason != Reason.MAINTENANCE
            for attempt in self._ledger.attempts(run)
        )
        if wanted == "defer" and (self._anew or not is_ours):
            return self._defer(refusal)
        find = self._state.maintenance.find
        if run is None or not is_ours:
            job, counts = self._launch.job, self._launch.start != "tick"
            with in_no_way():  # the refusal is what the person must read
                self._ledger.refuse(job, self._who, refusal.what, find, counts=counts)
            refusal.unchanged = refusal.unchanged if counts else "Nothing was started."
            raise refusal
        self._ledger.stop_at_barrier(run, self._who, refusal.what, find)
        letter = f"{run.job}: run {run.id} is paused.\n{refusal.what}\nThe tick goes on with it."
        return Outcome(self._stops.exit_code(), self._ledger.run(run.key), letter)

    def _defer(self, refusal: MaintenanceOn) -> Outcome:
        """Store the start durably, under the job's lock, and say so only then."""
        if self._lock.descriptor < 0 and not self._take_lock(defers=True):
            return Outcome(self._stops.exit_code())
        before, launch = self._ledger.unfinished(self._launch.job), self._launch
        start = self._start()._replace(require_admission=self._state.maintenance.find)
        if before is None and (skipped := self._skipped(None)):
            return skipped
        if before and before.state != RunState.WAITING and launch.fresh and start.fresh:
            unfinished = f"while run {before.id} is unfinished"
            what = f"A fresh start of {launch.job} is not deferred {unfinished}."
            self._ledger.note(self._who, REFUSED, what, job=launch.job)
            raise type(refusal)(
                what,
                why=f"{refusal.what}\n{refusal.why}".strip(),
                unchanged="Nothing was stored; the refusal is recorded.",
                todo=f"Give the run up, then type this again: batchrun cancel {before.id}",
            )
        names = ("acceptances", "batches", "fresh")
        note = {name: value for name in names if (value := getattr(launch, name))}
        run = self._ledger.defer(launch.job, start, note, refusal.what)
        if run.finished:
            return Outcome(ExitCode.DONE, run)
        return Outcome(ExitCode.STOPPED, run, deferred_letter(before, run, refusal))

    def _take_lock(self, *, defers: bool = False) -> bool:
        """Take the job's lock; wait only for an orphaned worker that commits its last batch.

        Who defers waits a little, too, for another start that is turned away just now.

        Returns:
            False if a stop was asked for while waiting.
        """
        began_s, told = self._host.monotonic(), False
        self._stops.look()
        while not self._stops.count and not self._lock.acquire():
            waited_s = self._host.monotonic() - began_s
            attempt = in_hand(self._ledger, self._ledger.unfinished(self._launch.job))
            is_orphaned = attempt is not None and not self._host.is_alive(attempt.supervisor)
            is_brief = defers and attempt is None and waited_s < DEFER_WAIT_S
            if not is_brief and (not is_orphaned or waited_s > self._job_config.stop_grace_s):
                raise self._busy()
            if not is_brief and not told:
                owners = ", ".join(map(str, self._lock.owners(self._host)))
                said = f"waiting for pid {owners}, which a killed supervisor left behind"
                self._watcher.say(said)
                self._show(said)
                told = True
            self._stops.wait(WATCH_INTERVAL_S)
        return not self._stops.count

    def _show(self, doing: str) -> None:
        """Have `systemctl status` show what the run does now."""
        self._host.systemd.show(mask_secrets(f"{self._launch.job}: {doing}"))

    def _busy(self) -> Busy:
        """Record the refused start and return the letter that names who is in the way."""
        run = self._ledger.unfinished(self._launch.job)
        attempt, alive = in_hand(self._ledger, run), owners_of(self._ledger, run, self._host)
        who = processes_text(alive or holders(self._lock, self._host), self._host)
        times = self._ledger.refused_since_success(self._launch.job) + 1
        since = f", since {attempt.began_at}" if attempt else ""
        again = f" This is refusal {times} since its last success." if times > 2 else ""
        run_it = "run it" if " and " in who else "runs it"
        what = f"{self._launch.job} is busy: {who} {run_it}{since}.{again}"
        self._ledger.note(self._who, "refused: busy", what, job=self._launch.job)
        unchanged = "Nothing was started; the refusal is recorded."
        if stuck := stalled(self._ledger, self._job_config, run, self._host):
            to = "let it go on" if stuck.todo.startswith("kill -CONT") else "end it"
            why, todo = f"It is stalled: {stuck.what}. {stuck.why}", f"To {to}: {stuck.todo}"
            return Stalled(what, why=why, unchanged=unchanged, todo=todo)
        return Busy(
            what,
            why=kept_text(run, alive, self._host) if run and run.checks_at and alive else "",
            unchanged=unchanged,
            todo=f"See `batchrun status {self._launch.job}`.",
        )

    def _run_until_done(self) -> Outcome:
        """Make attempts until the run is not kept any more, also of a run begun anew."""
        if (cancelled := self._to_cancel()) is not None:
            return self._clean_and_cancel(cancelled)
        if skipped := self._skipped(self._ledger.unfinished(self._launch.job)):
            return skipped
        outcome = self._attempt(self._admit())
        while (run := outcome.run) is not None:
            kept = run.state == RunState.RESERVED or run.checks_at
            if kept and not self._launch.in_process:
                outcome = self._attempt_again(run)
            elif not self._found_another_source(run):
                break
            elif run.fresh_in_a_row >= self._job_config.max_fresh:
                return self._too_many_fresh(run)
            else:
                reason, in_a_row = "its source changed", run.fresh_in_a_row + 1
                self._watcher.say(f"run {run.id} is cancelled, {reason}; a new one begins")
                self._anew = {"fresh": True, "fresh_reason": reason, "fresh_in_a_row": in_a_row}
                outcome = self._attempt(self._admit())
        return self._run_until_done() if self._was_no_whole_run(outcome) else outcome

    def _too_many_fresh(self, run: Run) -> Outcome:
        what = f"The source of {run.job} changed {run.fresh_in_a_row + 1} times in a row."
        todo = f"Let the source stand still, or type: batchrun run {run.job} --fresh"
        letter = str(PersonNeeded(what, unchanged=f"Run {run.id} stands as it is.", todo=todo))
        return Outcome(ExitCode.PERSON_NEEDED, run, letter)

    def _was_no_whole_run(self, outcome: Outcome) -> bool:
        """Tell whether a start that wanted a whole run has only gone on with another kind."""
        launch, run = self._launch, outcome.run
        if launch.only_resume or launch.retry or launch.rollback or self._stops.count:
            return False
        return run is not None and not run.is_whole and run.state == RunState.SUCCEEDED

    def _skipped(self, unfinished: Run | None) -> Outcome | None:
        """End a start that finds nothing to go on with, or whose period has its success already.

        A run that waits has not begun: it is cancelled, with the same words.
        """
        if self._launch.only_resume and unfinished is None:
            return Outcome(ExitCode.DONE, self._ledger.latest(self._launch.job))
        if unfinished is not None and unfinished.state != RunState.WAITING:
            return None
        if not (said := self._succeeded_in_this_period(unfinished)):
            return None
        self._ledger.note(self._who, "skipped: once per period", said, job=self._launch.job)
        self._watcher.say(said)
        if unfinished is not None:
            self._ledger.cancel(unfinished, self._who, said)
        return Outcome(ExitCode.DONE)

    def _succeeded_in_this_period(self, waiting: Run | None) -> str:
        """Return that no run is to begin before the next period, or nothing.

        A run counts for the period in which it succeeded, by the days of the job's zone.
        """
        job, success = self._job_config, self._ledger.last_success(self._launch.job)
        launch = self._launch
        asked = waiting and (not waiting.is_whole or (waiting.deferred or {}).get("fresh"))
        anyway = launch.fresh or launch.retry or launch.rollback or asked
        if not job.once_per or anyway or success is None:
            return ""
        moments = (self._host.now(), cast("str", success.ended_at))
        now, then = (period_of(at, job.once_per, job.zone) for at in moments)
        if now != then:
            return ""
        return (
            f"{job.name} has succeeded in this {job.once_per} already ({now}, {job.zone}: run"
            f" {success.id}); to run it once more: batchrun run {job.name} --fresh"
        )

    def _found_another_source(self, run: Run) -> bool:
        """Tell whether the attempt found a changed source that the job wants to begin anew with."""
        wants = self._job_config.on_changed_source == "fresh" and not self._launch.only_resume
        attempt = self._ledger.last_attempt(run)
        changed = attempt is not None and attempt.ending == Ending.CHANGED
        return wants and changed and run.state == RunState.FAILED

    def _admit(self) -> Admission:
        """Make what was read durable after an unclean end, then admit in one transaction."""
        job = self._launch.job
        if code_digest() != self._code:
            raise CodeChanged(
                f"{__file__} was replaced while this batchrun was running.",
                unchanged="No other attempt was started.",
                todo=f"The next `batchrun run {job}` goes on with the new one.",
            )
        require_witnesses_known(self._ledger, self._store)
        run, unclean = self._ledger.unfinished(job), False
        if run and (last := self._ledger.last_attempt(run)):
            left = run.state in OWNED and last.supervisor != self._me
            unclean = left or last.ending in (None, Ending.DIED, Ending.OVERDUE)
        with disk_letters(self._store.folder, self._host, todo="type this again."):
            if unclean:
                self._ledger.make_durable()
            else:
                self._ledger.empty_log()  # frames whose sync failed are not to be built upon
            self._store.open()
            self._store.sweep()
            retire_witnesses(self._ledger, self._store)
            judge = functools.partial(agree, self._ledger, self._store, anew=unclean)
            admission = self._ledger.admit(job, self._start(), judge)
        self._anew = {}  # the next ones go on with it
        launch, deferred = self._launch, admission.deferred  # a start that this one begins
        accepted = dict.fromkeys([*launch.acceptances, *deferred.get("acceptances", ())])
        batches = launch.batches or deferred.get("batches")
        self._launch = launch._replace(acceptances=tuple(accepted), batches=batches)
        return admission

    def _start(self) -> Start:
        """Return this start as the ledger judges it."""
        launch, start = self._launch, self._launch.start
        if self._anew or start == "fresh":
            start = "fresh" if self._anew else "run"  # the next attempts go on with the new run
        return Start(
            owner=self._me,
            who=self._who,
            run_id=os.urandom(5).hex(),
            require_admission=functools.partial(
                self._state.maintenance.require_open, self._job_config
            ),
            require_may_go_on=functools.partial(require_may_go_on, start, self._ledger),
            leaves=lambda run: reply_to(start, self._ledger, run) == Reply.SKIP,
            write_checkpoint=self._store.replace,
            overrides=launch.overrides,
            accept_settings="settings" in launch.acceptances,
            only_resume=launch.only_resume,
            retry=launch.retry,
            rollback=launch.rollback,
            **self._anew,
        )

    # -- between two attempts ------------------------------------------------------------------

    def _attempt_again(self, run: Run) -> Outcome:
        """Make the next attempt of a run that is kept, or let it rest."""
        reason, why = self._wait_to_begin(run)
        if not reason:
            try:
                admission = self._admit()
            except CodeChanged as refusal:
                reason, why = Reason.STOP, refusal.what
            else:
                return self._attempt(admission)
        run = self._ledger.run(run.key)
        if run.request == Request.CANCEL and self._ledger.pending_cleanups(run.job):
            outcome = self._clean_and_cancel(run)  # and end as without cleanups
            return outcome._replace(exit_code=outcome.exit_code or ExitCode.STOPPED)
        return self._outcome(self._ledger.rest(run, reason, why))

    def _wait_to_begin(self, run: Run) -> tuple[Reason, str]:
        """Wait as long as the last ending and health demand; return why not to begin even then."""
        until = self._host.monotonic() + self._patience.wait_s
        failed = f"batch {run.number + 1} failed, try {run.tries + 1} comes next"
        attempt = self._ledger.last_attempt(run)
        is_charged = attempt is not None and attempt.charged
        self._show(failed if is_charged else "the next attempt comes next")
        try:
            while not (rest := self._reason_to_rest(run))[0]:
                run = self._heed_health(run)
                left_s = until - self._host.monotonic()
                if left_s <= 0 and run.state == RunState.RESERVED:
                    break
                self._stops.wait(min(left_s if left_s > 0 else WATCH_INTERVAL_S, WATCH_INTERVAL_S))
        finally:
            self._health.end()
            if more_s := self._patience.end_pause():
                self._ledger.count_pause(run, more_s)
        return rest

    def _heed_health(self, run: Run) -> Run:
        """Keep a run paused while it is not well, and no longer."""
        health, patience = self._health, self._patience
        verdict = health.beat(run, run.generation, None)
        self._say_what_is_new(run)
        if not verdict.pause and run.state == RunState.PAUSED:
            return self._ledger.end_pause(run, "it is well again")
        if verdict.pause and (self._due_s != health.due_s or run.state == RunState.RESERVED):
            self._due_s = health.due_s
            checks_at = self._host.later(health.due_s - self._host.monotonic())
            run = self._ledger.keep_paused(run, verdict.why, checks_at, patience.count_pause())
            self._show(f"paused by health, checks again at {checks_at[11:19]}Z: {verdict.why}")
        return run

    def _look_for_cause(self, run: Run, seen: AttemptEnd) -> bool:
        """Check after a failure that may be retried; tell whether that excuses it."""
        attempt = cast("Attempt", self._ledger.last_attempt(run))
        if not (attempt.retry if attempt.ending else seen.retry):
            return False
        self._health.check_soon()
        while not self._stops.count and self._health.is_due:
            self._health.beat(run, run.generation, None)
            if self._health.is_due:
                self._stops.wait(WATCH_INTERVAL_S)
        self._health.end()
        return self._health.verdict.pause

    def _reason_to_rest(self, run: Run) -> tuple[Reason, str]:
        """Answer the one question between two attempts: may a new one begin? And if not, why."""
        self._stops.look()
        if self._stops.count:
            return Reason.STOP, "a stop was asked for between two attempts"
        if (request := self._ledger.run(run.key).request) is not None:
            return reason_of(request), ""
        self._require_open()
        if self._patience.paused_s > self._job_config.max_pause_s:
            limit = duration_text(self._job_config.max_pause_s)
            return Reason.HEALTH, f"It was not well for {limit}: {self._health.verdict.why}"
        return Reason.NONE, ""

    def _decide(self, run: Run, attempt: Attempt, unwell: str = "") -> After:
        """Decide what follows an attempt: what its ending says, the next one, or plan B.

        `unwell` is why the worker was asked to stop for the sake of health, if it was.
        """
        patience, recycled = self._patience, attempt.ending == Ending.RECYCLED
        if self._launch.in_process and attempt.may_be_followed:
            state, reason = (RunState.PAUSED, Reason.STOP) if recycled else (RunState.FAILED, "")
            return After(state, reason, attempt.error or "")
        if recycled:
            patience.wait_s = 0.0
            return After(RunState.RESERVED, why=f"{attempt.error} A fresh worker goes on.")
        killed = attempt.ending == Ending.DIED and attempt.exit_code == ExitCode.FAILED
        gave_way = killed or attempt.ending == Ending.STOPPED
        others = self._stops.count or run.request or attempt.retry is not None
        if unwell and gave_way and not others:
            patience.wait_s = 0.0
            return After(RunState.PAUSED, Reason.HEALTH, unwell)
        return self._try_again(run, attempt) if attempt.retry else after_ending(run, attempt)

    def _try_again(self, run: Run, attempt: Attempt) -> After:
        """Decide what follows a failure: a pause until it is well, the next attempt, or plan B."""
        patience = self._patience
        patience.lose(run)
        is_over, unwell = patience.is_over(run), self._health.verdict.pause
        after = None if unwell else halved(run, attempt, self._job_config)
        if after and (is_over or self._job_config.isolate or run.size is not None):
            patience.wait_s = 0.0
        elif is_over:
            return plan_b(run, attempt, self._job_config, self._ledger.open_operations(run))
        elif unwell:
            why = f"{attempt.error} No try is charged: {self._health.verdict.why}"
            after = After(RunState.PAUSED, Reason.HEALTH, why)
        else:
            tries = f": try {run.tries + 1} of {self._job_config.max_tries}" * attempt.charged
            why = f"{attempt.error} The next attempt begins in {patience.wait_s:.1f} s{tries}."
            after = After(RunState.RESERVED, why=why)
        self._follows = after.why
        return after

    # -- one attempt ---------------------------------------------------------------------------

    def _attempt(self, admission: Admission) -> Outcome:
        """Run one worker to its end and make the run's edge from what it recorded."""
        run = admission.run
        for line in admission.said:
            self._watcher.say(line)
        if admission.generation == 0:
            return self._outcome(run)
        if run.number:
            where = f"after commit {run.number}, {run.read:,} records read"
            self._watcher.say(f"run {run.id} goes on {where}")
        if self._launch.in_process:
            return self._attempt_in_process(run)
        self._alerts.ping(run)
        seen, worker = self._work(run, self._order(run))
        if worker is None:
            return self._outcome(self._ledger.settle(run, run.generation, seen))
        run = self._settle(worker, run, seen)
        if run.state == RunState.RESERVED and not self._nothing_lives:
            run = self._ledger.rest(run, Reason.RETRY, "What its worker left behind still lives.")
        self._watcher.progress(run)
        return self._outcome(run)

    def _work(self, run: Run, order: Order) -> tuple[AttemptEnd, WorkerProcess | None]:
        """See a worker through to the end of all that it started; None if it could not start.

        The end is what is to be recorded where it has recorded none.
        """
        log, self._nothing_lives = self._open_log(run), False
        try:
            worker = WorkerProcess(order, log, run, self._host)
        except BatchrunError as refusal:
            self._nothing_lives = True
            return letter_end(refusal)._replace(ending=Ending.DIED), None
        self._watch(worker, run)
        self._nothing_lives = worker.end_group()
        run = self._ledger.run(run.key)
        return worker.seen_end(run, self._ledger.called_cleanup(run)), worker

    def _settle(self, worker: WorkerProcess, run: Run, seen: AttemptEnd) -> Run:
        """Make the run's edge; what follows is said only when the write lock is given back."""
        was_at_cleanup = self._ledger.called_cleanup(self._ledger.run(run.key)) is not None
        excused = self._look_for_cause(run, seen) or was_at_cleanup
        decide = functools.partial(self._decide, unwell=worker.unwell)
        how = worker.diagnosis
        run = self._ledger.settle(run, run.generation, seen, decide, excused=excused, **how)
        if self._follows:
            self._watcher.say(self._follows)
            self._follows = ""
        return run

    def _to_cancel(self) -> Run | None:
        """Return the run that is only to be cleaned up after, and cancelled."""
        if self._launch.cancels:
            return self._ledger.run_with_id(self._launch.cancels)
        run = self._ledger.unfinished(self._launch.job) if self._launch.only_resume else None
        asked = run is not None and run.request == Request.CANCEL
        return run if asked and self._ledger.pending_cleanups(self._launch.job) else None

    def _clean_and_cancel(self, run: Run) -> Outcome:
        """Let a worker call what is pending of a run's job; then cancel the run if that is due."""
        ledger = self._ledger
        run = ledger.begin_cleaning(run, self._me, self._who)
        seen, worker = self._work(run, self._order(run)._replace(cleans=True))
        ended = worker.diagnosis if worker else {}
        run = ledger.end_cleaning(run, run.generation, seen, self._who, **ended)
        attempt = cast("Attempt", ledger.last_attempt(run))
        if not any(cleanup.run == run.id for cleanup in ledger.pending_cleanups(run.job)):
            return Outcome(ExitCode.DONE, run)
        stands = f"Run {run.id} is {run.state}; what its cleanups should remove may still be there."
        letter = f"{letter_text(attempt)}\n{stands}\nTo try again: batchrun cancel {run.id}"
        return Outcome(ExitCode.FINDINGS, run, letter)

    def _order(self, run: Run) -> Order:
        launch, began_with = self._launch, self._began_with.setdefault(run.key, run.batches)
        left = launch.batches and max(0, launch.batches - (run.batches - began_with))
        return Order(
            config=str(self._config.path),
            job=run.job,
            run=run.key,
            generation=run.generation,
            lock=self._lock.descriptor,
            supervisor=os.getppid() if launch.in_process else os.getpid(),
            batches=left,
            acceptances=list(launch.acceptances),
        )

    def _attempt_in_process(self, run: Run) -> Outcome:
        """Run the worker's code here, for debuggers and tests; the lock is kept to our end."""
        self._nothing_lives = False
        worker = Worker(self._order(run), self._config, self._ledger, self._host)

        def give_up(number: int, _: object) -> None:
            self._stops.take(signal.Signals(number))
            worker.interrupt()

        listen(worker, by_key=give_up)
        end = worker.drive()
        sys.stdout.flush()
        if not worker.recorded:
            return Outcome(end.exit_code, self._ledger.run(run.key), letter_text(end))
        return self._outcome(self._ledger.settle(run, run.generation, end, self._decide))

    def _open_log(self, run: Run) -> int:
        """Open a run's log; no run fails for one that cannot be written, it is said."""
        try:
            return open_log(self._state.log_path(run))
        except StateDirectoryError as error:
            said = f"warning: {error.what} The run goes on; the worker tries again at each commit."
            self._ledger.note(self._who, SAID, said, run=run)
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _watch(self, worker: WorkerProcess, run: Run) -> None:
        """Wait for the worker, look after its health, pass stops on to it, show what it does."""
        generation = run.generation
        while not worker.has_ended():
            self._say_what_is_new(run)
            run = self._ledger.run(run.key)
            self._watcher.progress(run)
            self._show(doing_text(run, self._stops.count))
            self._alerts.poll()
            if run.state in OWNED:
                verdict = self._health.beat(run, generation, worker.pid)
                if verdict.pause and not worker.unwell:
                    worker.unwell, worker.unwell_at = verdict.why, self._host.monotonic()
            releases_until = self._ledger.releases_until(run)
            self._pass_stops_on(worker, releases_until)
            self._tell_stop(run, releases=releases_until is not None)
            self._limit_batch(worker, run, releases=releases_until is not None)
            self._stops.wait(WATCH_INTERVAL_S)
        self._say_what_is_new(run)
        self._health.end()
        self._alerts.end()

    def _tell_stop(self, run: Run, *, releases: bool) -> None:
        """Say once that a stop was heard, what it waits for, and what another one does."""
        if not self._stops.first or self._told_stop:
            return
        self._told_stop = True
        name = self._stops.first.name.removeprefix("SIG").replace("INT", "Ctrl-C")
        said = f"stopping before the next batch; {name} again stops at once"
        if run.state == RunState.RUNNING:
            said = f"stopping after this batch; {name} again interrupts it"
        if releases or run.state not in OWNED:
            said = "stopping when it has cleaned up"
        self._watcher.say(said)

    def _say_what_is_new(self, run: Run) -> None:
        """Show the lines for people that were recorded since the last time."""
        for event in self._ledger.events(run, what=f"{SAID}%", after=self._shown):
            self._watcher.say(event.why)
            self._shown = event.id

    def _limit_batch(self, worker: WorkerProcess, run: Run, *, releases: bool) -> None:
        """Interrupt a batch that does not commit in time; kill its worker if that is no use."""
        open_s = worker.batch_open_s(run, releases=releases)
        limit_s = self._job_config.batch_timeout_s
        if not limit_s or open_s <= limit_s:
            return
        text = duration_text(limit_s).removesuffix("00s") if limit_s >= 60 else f"{limit_s:g}s"
        now, words = self._host.monotonic(), batch_text(run, f" did not end within {text}")
        worker.overdue = worker.overdue or LateBatch(now, run.number, words)
        late = now - worker.overdue.at > self._job_config.stop_grace_s
        worker.ask(signal.SIGKILL if late else signal.SIGUSR1)

    def _pass_stops_on(self, worker: WorkerProcess, releases_until: float | None) -> None:
        """Ask the worker as strongly as the stops so far demand; see the head of this section."""
        stops, now = self._stops.count or int(bool(worker.unwell)), self._host.monotonic()
        until, cleans = releases_until, releases_until is not None
        if until is None:
            until = self._patient_until(worker, stops)
        left_s = until + min(self._job_config.stop_grace_s, KILL_AFTER_INTERRUPT_S) - now
        if self._stops.count:
            self._host.systemd.extend(left_s + 2 * ORPHAN_GRACE_S)
        if cleans and left_s < 0:
            worker.killed_for = "The worker did not end its cleanups, and was killed."
            worker.ask(signal.SIGKILL)
        elif stops >= 3 or (stops and left_s < 0):
            worker.ask(signal.SIGKILL)
        elif until <= now and not cleans:
            worker.ask(signal.SIGUSR1)
        elif stops:
            worker.ask(signal.SIGTERM)

    def _patient_until(self, worker: WorkerProcess, stops: int) -> float:
        """Return when a worker's batch is, or was, interrupted by a stop; `inf` without one."""
        if stops >= 2:
            worker.given_up_at = min(worker.given_up_at, self._host.monotonic())
        asked_at = min(self._stops.first_at, worker.unwell_at)
        return min(worker.given_up_at, asked_at + self._job_config.stop_grace_s)

    # -- endings ---------------------------------------------------------------------------------

    def _outcome(self, run: Run) -> Outcome:
        """Return exit code and letter for the state that a run has come to."""
        reach("attempt.settled")
        attempt = self._ledger.last_attempt(run)
        if attempt is None:  # finished by a person meanwhile
            return Outcome(ExitCode.DONE, run)
        code = ExitCode(attempt.exit_code or ExitCode.DONE)
        if run.state == RunState.SUCCEEDED:
            return Outcome(code, run, attempt.error or "")
        if run.state == RunState.AWAITING or run.reason in (Reason.RETRY, Reason.HEALTH):
            return Outcome(ExitCode.PERSON_NEEDED, run, self._letter(run, attempt))
        asked = code if code == ExitCode.INTERRUPTED else self._stops.exit_code()
        if run.state == RunState.PAUSED and run.reason == Reason.MAINTENANCE:
            kind = MaintenanceOverdue if code == ExitCode.PERSON_NEEDED else MaintenanceOn
            words = {"unchanged": attempt.unchanged or "", "todo": attempt.todo or ""}
            raise kind(attempt.error or "", **words)
        if run.state in (RunState.PAUSED, RunState.CANCELLED):
            by_itself = code in (ExitCode.STOPPED, ExitCode.INTERRUPTED)
            return Outcome(asked, run, (by_itself and attempt.error) or "")
        if run.state == RunState.INTERRUPTED and self._stops.count:
            code = asked
        return Outcome(code, run, self._letter(run, attempt))

    def _letter(self, run: Run, attempt: Attempt) -> str:
        """Return what happened, what stands, and what to type."""
        if run.reason == Reason.OPERATION:
            awaits = unknown_end(run, self._ledger.open_operations(run))
            todo, unchanged = awaits.todo, awaits.unchanged
            attempt = attempt._replace(error=run.error, unchanged=unchanged, todo=todo)
        of_run = run.reason in (Reason.POISON, Reason.RETRY, Reason.HEALTH)
        log = f"The log: {self._state.log_path(run)}\nTo go on: batchrun resume {run.id}"
        said = [run.error if of_run else attempt.error, attempt.unchanged if not of_run else ""]
        if not attempt.unchanged:
            said.append(f"Commit {run.number} stands: {run.read:,} records are done.")
        said.append(attempt.todo or log)
        if run.overrides and attempt.exit_code == ConfigurationError.exit_code:
            said.append(f"Without its --set, from the start: batchrun run {run.job} --fresh")
        return "\n".join([f"{run.job}: run {run.id} {run.state}.", *filter(None, said)])


LOAD_LIMIT_S = 60.0  # for a job that is only loaded, to be asked about a start


def require_settings(config: Config, launch: Launch) -> None:
    """Refuse a start by its settings, or the job's file, before anything is cancelled for it.

    The job is loaded in a process of its own; where that cannot tell, the worker will.

    Raises:
        ConfigurationError: what the worker would have said.
    """
    import subprocess

    order = json.dumps([str(config.path), launch.job, dict(launch.overrides)])
    ways: dict[str, Any] = {"text": True, "capture_output": True, "timeout": LOAD_LIMIT_S}
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        words = own_interpreter("settings_main")
        ended = subprocess.run(words, input=order, check=False, **ways)
        what, why, unchanged, todo = json.loads(ended.stdout)
        raise ConfigurationError(what, why=why, unchanged=unchanged, todo=todo)


def doing_text(run: Run, stops: int) -> str:
    """Return what a watched run does now, and whether it was asked to stop."""
    of_all = f" of {run.expected:,}" if run.expected else ""
    stopping = ", asked to stop" if stops else ""
    return f"batch {run.batches + 1}, {run.read:,}{of_all} records{stopping}"


class Patience:
    """For how long one batch is tried again, and how long to wait before its next try.

    Pauses for health are counted here, and are no time in which the batch is tried.

    Attributes:
        wait_s: before the next attempt.
    """

    def __init__(self, job_config: JobConfig, host: Host) -> None:
        self._job_config, self._host = job_config, host
        self._batch, self._losses, self._since = (0, 0), 0, 0.0
        self._paused_at: float | None = None
        self._counted_at = 0.0  # up to here the pause is in the run's row
        self.wait_s = 0.0

    def lose(self, run: Run) -> None:
        """Take note of another failure of the batch that follows the run's newest commit."""
        options, now = self._job_config, self._host.monotonic()
        batch = (run.key, run.number)
        if batch != self._batch:
            self._batch, self._losses, self._since = batch, 0, now
        longest_s = min(options.retry_max_wait_s, options.retry_for_s - (now - self._since))
        wait_s = options.retry_first_wait_s * RETRY_FACTOR ** min(self._losses, 20)
        jitter = 0.5 + os.urandom(1)[0] / 512  # of many jobs that lost the same database at once
        self.wait_s = max(0.0, min(wait_s * jitter, longest_s))
        self._losses += 1

    def is_over(self, run: Run) -> bool:
        """Tell whether the batch is not to be tried again."""
        options = self._job_config
        tried_for_s = self._host.monotonic() - self._since
        return run.tries >= options.max_tries or tried_for_s >= options.retry_for_s

    @property
    def paused_s(self) -> float:
        """For how long the pause has lasted; 0 if there is none."""
        return 0.0 if self._paused_at is None else self._host.monotonic() - self._paused_at

    def count_pause(self) -> float:
        """Begin or go on to count a pause; return the seconds since it was last counted."""
        now = self._host.monotonic()
        if self._paused_at is None:
            self._paused_at = self._counted_at = now
        more_s, self._counted_at = now - self._counted_at, now
        self._since += more_s
        return more_s

    def end_pause(self) -> float:
        """End the pause, if there is one; return the seconds since it was last counted."""
        more_s = 0.0 if self._paused_at is None else self.count_pause()
        self._paused_at = None
        return more_s


def halved(run: Run, attempt: Attempt, options: JobConfig) -> After | None:
    """Return how a batch that failed goes on in halves; None if it cannot, or was no batch.

    The record that failed alone is passed over by the next attempt, if it was handed out and is
    still there.
    """
    died = attempt.ending != Ending.RAISED and run.state == RunState.RUNNING and options.isolates
    if run.tried is None or not (died or attempt.retry == IN_HALVES):
        return None
    size = json.loads(run.tried)[2] // 2
    then = f"at most {size:,} records are tried next" if size else "its one record is passed over"
    return After(RunState.RESERVED, why=f"{attempt.error} To isolate it, {then}.", size=size)


def plan_b(run: Run, attempt: Attempt, options: JobConfig, unknown: list[Operation]) -> After:
    """Return what becomes of a run whose batch is not to be tried again."""
    if options.on_exhausted == "fail":
        return After(RunState.FAILED, why=attempt.error or "")
    poison = run.tries >= options.max_tries
    limit = f"max_tries = {options.max_tries}" if poison else "retry_for"
    times = "once" if run.tries == 1 else f"{run.tries} times"
    failed = batch_text(run, f" failed {times}, and {limit} is reached")
    if run.tries == 0:
        failed = f"no batch was open, and {limit} is reached"
    if attempt.retry == AT_NO_COST:
        failed = f"what the job needs was not there, and {limit} is reached"
    why = f"{failed[0].upper()}{failed[1:]}.\nThe last time: {attempt.error}"
    if poison and unknown:
        return After(RunState.AWAITING, Reason.OPERATION, f"{unknown_text(unknown)}\n{why}")
    if poison:
        return After(RunState.AWAITING, Reason.POISON, why)
    return After(RunState.PAUSED, Reason.RETRY, why)


def batch_text(run: Run, said: str = "") -> str:
    """Return which batch is tried, what is said of it, its records, loop, and where it begins."""
    number = f"batch {run.number + 1}{said}"
    if run.tried is None:
        return number
    loop, cursor, limit, *_ = json.loads(run.tried)
    last = run.read + limit
    if run.expected is not None and run.expected > run.read:
        last = min(last, run.expected)
    after = f"after cursor {mask_secrets(cursor_text(cursor))}"
    place = "at the beginning" if cursor == "null" else after
    return f"{number} (records {run.read + 1:,} to {last:,}, loop {loop}, {place})"


def processes_text(processes: Iterable[ProcessIdentity], host: Host, *, aged: bool = True) -> str:
    """Return processes for people, with their age, and which of them are frozen."""
    found = []
    for process in sorted(processes):
        notes = [f"for {duration_text(host.age_s(process))}"] * aged
        notes += ["stopped"] * host.is_stopped(process)
        found.append(f"pid {process.pid}" + f" ({', '.join(notes)})" * bool(notes))
    return " and ".join(found) or "a process that has just ended"


def holders(lock: JobLock, host: Host) -> list[ProcessIdentity]:
    """Return the processes that keep a lock's file open; none if nobody made it."""
    try:
        return list(filter(None, map(host.identify, lock.owners(host))))
    except FileNotFoundError:
        return []


class CodeChanged(BatchrunError):
    """batchrun itself was replaced under a running supervisor."""

    exit_code = ExitCode.STOPPED


def code_digest() -> str:
    """Return the digest of the file that this code is in."""
    return sha256(Path(__file__).read_bytes()).hexdigest()


def block_stops() -> list[signal.Signals]:
    """Hold back the signals that are counted, until `StopCounter.wait` takes them up."""
    counted = [s for s in COUNTED_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, counted)
    return counted


class StopCounter:
    """Counts the stops that people and systemd ask for, without signal handlers.

    Signals stay blocked and are taken up by `wait`; several within a moment are one stop.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.count = 0
        self.first: signal.Signals | None = None
        self.first_at, self._last_at = float("inf"), 0.0  # on the monotonic clock

    def begin(self) -> None:
        """Block what is counted, SIGCHLD (`wait` ends early with a worker), and our timer's."""
        self._waited_for = {*block_stops(), signal.SIGCHLD, signal.SIGALRM}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._waited_for)

    def look(self) -> None:
        """Take up the stops that have come already, also behind what is only waited for."""
        while signal.sigpending() & self._waited_for & {*COUNTED_SIGNALS}:
            self.wait(WATCH_INTERVAL_S)

    def wait(self, seconds: float) -> None:
        """Wait for the next signal, but not longer than so many seconds; more than 0.

        It may be much less, so call it in a loop. Each call is a turn of that loop to systemd.

        Not by sigtimedwait: CPython's makes signals up when the process is stopped and continued.
        """
        systemd = self._host.systemd
        systemd.turn()
        signal.setitimer(signal.ITIMER_REAL, min(seconds, systemd.longest_wait_s))
        number = signal.Signals(signal.sigwait(self._waited_for))
        if number in COUNTED_SIGNALS:
            self.take(number)

    def take(self, number: signal.Signals) -> None:
        """Count a stop; the same one within a moment only once."""
        now = self._host.monotonic()
        if self.count == 0:
            self.first, self.first_at = number, now
            self._host.systemd.stopping()
        elif now - self._last_at < ONE_STOP_S.get(number, ONE_STOP_DEFAULT_S):
            return
        self.count += 1
        self._last_at = now

    def exit_code(self) -> ExitCode:
        """Return what a stop ends with: 130 if Ctrl-C was the first that was asked for."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.STOPPED


class LateBatch(NamedTuple):
    """A batch that was interrupted because it took too long."""

    at: float  # moment of the interruption, on the monotonic clock
    number: int  # the newest commit at that moment
    words: str  # which batch, and how long it may take


class WorkerProcess:
    """The worker's process: started with the job's lock, in a process group of its own.

    Raises:
        BatchrunError: the system has no room for another process.
    """

    def __init__(self, order: Order, log: int, run: Run, host: Host) -> None:
        import subprocess  # 25 ms, supervisors only

        self._host, self._asked = host, 0
        self._exit, self._peak_rss_bytes = 0, 0
        self.killed_for = "The worker did not stop when it was asked to, and was killed."
        self.overdue: LateBatch | None = None
        # why it is to stop for the sake of health, and since when
        self.unwell, self.unwell_at = "", float("inf")
        self.given_up_at = float("inf")  # when a second stop interrupted it
        self._open = (run.number, host.monotonic())  # since when the batch after it is open
        self._oom_kills = host.oom_kills()
        self._strangers = set(host.children())  # of whoever became this process by exec
        self._last_words = os.memfd_create("last words")
        order = order._replace(last_words=self._last_words)
        context = {"BATCHRUN_RUN_ID": run.id, "BATCHRUN_GENERATION": str(order.generation)}
        try:
            self._process = subprocess.Popen(
                own_interpreter("worker_main", json.dumps(order._asdict())),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(order.lock, order.last_words),
                process_group=0,
                env={**os.environ, **context},
            )
        except OSError as error:
            os.close(self._last_words)
            message = f"The worker's process cannot be started: {error.strerror}."
            raise BatchrunError(message, unchanged="Nothing was done.") from error
        finally:
            os.close(log)
        self.pid = self._process.pid
        reach("worker.started")

    def has_ended(self) -> bool:
        """Tell whether the worker is gone, and keep how."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self._exit = self._process.returncode = os.waitstatus_to_exitcode(status)
            self._peak_rss_bytes = usage.ru_maxrss * 1024
        return bool(pid)

    @property
    def diagnosis(self) -> dict[str, int | None]:
        """The signal that ended the worker, if one did, and its peak of memory."""
        ended_by = -self._exit if self._exit < 0 else None
        return {"signal": ended_by, "peak_rss_bytes": self._peak_rss_bytes}

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to the worker, once each, and only ever a stronger one."""
        rank = (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL).index(number) + 1
        if rank > self._asked:
            self._asked = rank
            os.kill(self.pid, number)  # not reaped yet, so the number is still its own

    def batch_open_s(self, run: Run, *, releases: bool) -> float:
        """Return the time since the worker's start, its last commit, or what it released since."""
        now = self._host.monotonic()
        if releases or run.number != self._open[0]:
            self._open = (run.number, now)
        return now - self._open[1]

    def end_group(self) -> bool:
        """End everything that the worker left behind; tell whether all of it is gone.

        Who is left is our child, whatever its group or session, as soon as its parent is gone:
        we are the subreaper.
        """
        began = self._host.monotonic()
        while left := self._left_behind():
            waited_s = self._host.monotonic() - began
            if waited_s > 2 * ORPHAN_GRACE_S:
                return False
            number = signal.SIGKILL if waited_s > ORPHAN_GRACE_S else signal.SIGTERM
            for pid in left:
                with contextlib.suppress(PermissionError):
                    os.kill(pid, number)
            self._host.systemd.turn()
            self._host.sleep(BUSY_STEP_S)
        return True

    def _left_behind(self) -> list[int]:
        """Reap what has ended, and return our living children; no number can be used again."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return [pid for pid in self._host.children() if pid not in self._strangers]

    def seen_end(self, run: Run, called: Cleanup | None) -> AttemptEnd:
        """Return the end of a worker that recorded none: its last words, or how it went away.

        An exit code counts only with last words: a job's library may leave with any.
        """
        with contextlib.suppress(ValueError), os.fdopen(self._last_words) as file:
            file.seek(0)
            return AttemptEnd(**{**json.load(file), "ending": Ending.DIED})
        if self.overdue is not None and self.overdue.number == run.number:
            text = f"The worker was stopped: {self.overdue.words}."
            return AttemptEnd(Ending.OVERDUE, ExitCode.FAILED, error=text, retry=True)
        if self.overdue is not None:
            text = f"{self.overdue.words}, but was committed before it was interrupted."
            return AttemptEnd(Ending.RECYCLED, ExitCode.STOPPED, error=text)
        where = f"in {batch_text(run)}" if run.state == RunState.RUNNING else "before any batch"
        text = self.killed_for if self._asked == 3 else f"{self._went_away()} {where}."
        if called is not None:
            how = self.killed_for.rstrip(".") + "," if self._asked == 3 else self._went_away()
            which = f"the cleanup {mask_secrets(called.call)} of run {called.run}"
            text = f"{how} during {which}. All records committed stand."
        retry = None if self._asked else True
        return AttemptEnd(Ending.DIED, ExitCode.FAILED, error=text, retry=retry)

    def _went_away(self) -> str:
        """Return how the worker died, with its peak of memory."""
        peak = f"peak {size_text(self._peak_rss_bytes)}"
        if self._exit >= 0:
            return f"The worker left with exit code {self._exit} and no ending ({peak})"
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-self._exit, f"signal {-self._exit}")
        if self._exit == -signal.SIGKILL:
            killed = self._host.oom_kills()
            memory = killed is None or killed != self._oom_kills
            cause = "probably out of memory" if memory else "not by the kernel for want of memory"
            peak = f"{cause}: {peak}"
        return f"The worker was killed by {name} ({peak})"


# -- stopping a run from outside -----------------------------------------------------------------
#
# Nobody takes a run from a live owner. It is asked, by a request in the ledger; `cancel --kill`
# ends the owner itself: TERM (and CONT, for one that is frozen), after a while KILL, always to a
# process known by pid, start ticks and boot id, never to a bare pid. Only when the job's lock is
# free the run is cancelled, under a new generation.

WAIT_LIMIT_S = 3600.0
LOCK_LIMIT_S = 10.0  # for the lock to be free after the KILL


@contextlib.contextmanager
def holding(lock: JobLock) -> Iterator[bool]:
    """Hold a job's lock for a moment, if nobody else does; gives whether it is held."""
    is_held = lock.acquire()
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()


def is_owned(state: StateDirectory, job: str) -> bool:
    """Tell whether some process holds a job's lock at this moment."""
    with holding(JobLock(state.lock_path(job))) as was_free:
        return not was_free


class Stopper:
    """Pauses or cancels one run that another process may own."""

    def __init__(
        self, state: StateDirectory, ledger: Ledger, run: Run, request: Request, who: str
    ) -> None:
        self._state, self._ledger, self._request, self._who = state, ledger, request, who
        self._key, self._lock = run.key, JobLock(state.lock_path(run.job))
        self._sent: set[tuple[ProcessIdentity, signal.Signals]] = set()

    def stop(self) -> bool:
        """Stop the run at once if nobody owns it, else ask for it; tell whether it is done."""
        is_done = self._stop_idle()
        if not is_done:
            self._ledger.request(self._run, self._request, self._who)
        return is_done

    @property
    def _run(self) -> Run:
        return self._ledger.run(self._key)

    def _stop_idle(self) -> bool:
        """Stop the run if its lock is free."""
        with holding(self._lock) as is_idle:
            if is_idle and self._request == Request.CANCEL:
                self._ledger.cancel(self._run, self._who, "a person decided so")
            elif is_idle:
                self._ledger.pause(self._run, self._who)
        return is_idle

    def wait(
        self, host: Host, say: Callable[[str], None], *, kill_after_s: float | None = None
    ) -> None:
        """Wait until the run has stopped and its lock is free; `say` tells for whom.

        `kill_after_s` is the time between TERM and KILL; without it the owners are left alone.

        Raises:
            Busy: it did not stop within the limit; what was asked for stands.
            OSError: the owners belong to another user.
        """
        limit_s = WAIT_LIMIT_S if kill_after_s is None else kill_after_s + LOCK_LIMIT_S
        began, told, known = host.monotonic(), "", set[ProcessIdentity]()
        while not self._has_stopped(host):
            waited_s = host.monotonic() - began
            known = {p for p in known.union(self._owners(host)) if host.is_alive(p)}
            blocks = known or holders(self._lock, host)
            words = f"waiting for {processes_text(blocks, host, aged=False)}"
            if words != told:
                say(words)
            told = words
            if waited_s > limit_s:
                raise Busy(
                    f"Run {self._run.id} has not stopped within {duration_text(limit_s)}.",
                    why=f"Still {words}.",
                    unchanged=f"The {self._request} is asked for, and stays so.",
                    todo=f"To end its processes: batchrun cancel --kill {self._run.id}",
                )
            if kill_after_s is not None and self._is_owned:
                self._end(known, host, late=waited_s > kill_after_s)
            host.sleep(WATCH_INTERVAL_S)

    @property
    def _is_owned(self) -> bool:
        """Whether the ledger says that somebody has the run in hand; that may be dead."""
        run = self._run
        return run.state in OWNED or run.request is not None

    def _has_stopped(self, host: Host) -> bool:
        if self._run.finished:
            return True
        if self._is_owned:
            return not self._owners(host) and self._stop_idle()
        return not is_owned(self._state, self._run.job)

    def _owners(self, host: Host) -> list[ProcessIdentity]:
        """Return the living owners: those recorded, and what holds the lock below them."""
        alive = owners_of(self._ledger, self._run, host)
        below = {pid for process in alive for pid in host.children(process.pid)}
        below |= {pid for child in below for pid in host.children(child)}
        held = holders(self._lock, host)
        return alive + [each for each in held if each.pid in below and each not in alive]

    def _end(self, owners: Iterable[ProcessIdentity], host: Host, *, late: bool) -> None:
        """Send what is due to each owner, once: TERM and CONT, then KILL; leave a row of it."""
        numbers = (signal.SIGKILL,) if late else (signal.SIGTERM, signal.SIGCONT)
        due = [(owner, number) for owner in owners for number in numbers]
        for owner, number in [each for each in due if each not in self._sent]:
            self._sent.add((owner, number))
            if number != signal.SIGCONT:
                words = f"{number.name} to {processes_text([owner], host)}"
                self._ledger.note(self._who, "ends the owner", words, run=self._run)
            host.send(owner, number)


# -- reconciling ---------------------------------------------------------------------------------


class Answered(NamedTuple):
    """An operation of unknown outcome, and what would be, or was, recorded of it."""

    operation: Operation
    run: Run
    told: Told  # without an outcome: maybe why nobody can tell


class Reconciler:
    """Finds out what became of operations; a person's answers and the destinations' own.

    Whoever has the job's lock has the proof that no claimant lives. What a lookup does not find is
    believed absent only `settle` after that.
    """

    def __init__(
        self, config: Config, ledger: Ledger, host: Host, say: Callable[[str], None]
    ) -> None:
        self._config, self._ledger, self._host, self._say = config, ledger, host, say
        self._state = StateDirectory(config, host)

    def unknown(self, run: Run | None) -> list[Answered]:
        """Return the operations of unknown outcome, of a run or of all."""
        runs = [run] if run else [found for found, _ in self._ledger.runs_with_open_operations()]
        return [
            Answered(operation, each, Told(operation.id, None))
            for each in runs
            for operation in self._ledger.open_operations(each)
        ]

    def settled(
        self, rows: list[Answered], who: str, *, lookup: bool, applies: bool
    ) -> list[Answered]:
        """Add what lookups say where no person has answered; if it applies, record all of it.

        Raises:
            Busy: a job of which a person has answered is running; nothing was changed.
        """
        told = {row.operation.id: row.told for row in rows}
        with contextlib.ExitStack() as held:
            for job in sorted({row.run.job for row in rows if lookup or row.told.outcome}):
                mine = [row for row in rows if row.run.job == job]
                asked = [row.operation for row in mine if lookup and not row.told.outcome]
                try:
                    if applies:
                        held.enter_context(self._owning(job, who))
                    told |= self._looked_up(job, asked, settled=applies) if asked else {}
                except Busy as error:
                    if len(asked) < len(mine):
                        raise
                    told |= {row.id: Told(row.id, None, why=error.what) for row in asked}
            rows = [row._replace(told=told[row.operation.id]) for row in rows]
            for row in rows:
                if applies and row.told.outcome:
                    self._ledger.answer(row.operation, row.told, who)
        return rows

    @contextlib.contextmanager
    def _owning(self, job: str, who: str) -> Iterator[None]:
        """Hold a job's lock, so that no claimant is left; Busy if somebody else has it."""
        with holding(JobLock(self._state.lock_path(job))) as is_held:
            if not is_held:
                raise Busy(
                    f"{job} is running, and finds out by itself.",
                    unchanged="Nothing was changed.",
                    todo=f"See: batchrun status {job}",
                )
            if run := self._ledger.unfinished(job):
                self._ledger.settle_left(run, who)
            yield

    def _looked_up(self, job: str, rows: list[Operation], *, settled: bool) -> dict[int, Told]:
        """Return, by id, what is known after lookups; `settled` waits until absent is true."""
        told = self._asked(job, rows)
        absent = [row for row in rows if told[row.id].outcome == FREED]
        if settled and absent:
            settle_s = self._config.job(job).settle_s
            self._say(f"{job}: {len(absent)} are absent; asked again in {settle_s:g} s")
            self._host.sleep(settle_s)
            told |= self._asked(job, absent)
        return told

    def _asked(self, job: str, rows: list[Operation]) -> dict[int, Told]:
        """Return what the job's lookups say, called in a process of their own."""
        import subprocess

        try:
            call_s = self._config.job(job).call_timeout_s
        except NotFound as error:
            return {row.id: told_by_lookup(row, None, None, error.what) for row in rows}
        asked = [(row.key, row.lookup) for row in rows if row.lookup]
        order = json.dumps([str(self._config.path), job, asked])
        limit_s = PROBE_START_S + len(asked) * (call_s + 1)
        answers: dict[str, list[Any]] = {}
        cut = "it did not end in time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            words = own_interpreter("lookup_main")
            ways: dict[str, Any] = {"text": True, "capture_output": True, "timeout": limit_s}
            ended = subprocess.run(words, input=order, check=False, **ways)
            answers = {key: answer for key, *answer in map(json.loads, ended.stdout.splitlines())}
            cut = "its process ended during the call"
        none = [None, None, cut]
        return {row.id: told_by_lookup(row, *answers.get(row.key, none)) for row in rows}


def told_by_lookup(
    operation: Operation, outcome: str | None, receipt: str | None, why: str
) -> Told:
    """Return what a lookup says of an operation, or why nobody but a person or the job can."""
    if outcome:
        return Told(operation.id, outcome, receipt, "lookup")
    if operation.lookup:
        return Told(operation.id, None, why=f"cannot tell: {mask_secrets(why)}")
    why = "its lookup is no plain function, so only the job itself can ask"
    if operation.lookup is None:
        why = "it has no lookup, so only a person can tell"
    return Told(operation.id, None, why=f"{operation.why or ''}\n{why}".strip())


def by_person(
    rows: list[Answered], keys_of: Mapping[str, Sequence[str]], told: Told, *, of_run: bool
) -> list[Answered]:
    """Return the operations with a person's answers: which keys have which outcome.

    `told` has who, why and the receipt; `of_run`: whether all are of one run that was named.

    Raises:
        NotFound: a key is none of theirs.
        ConfigurationError: it may be meant of more than one run, or the answers of two things.
    """
    outcomes: dict[int, str] = {}
    for outcome, keys in keys_of.items():
        for row in (row for key in keys for row in meant_by(rows, key, of_run=of_run)):
            if outcomes.setdefault(row.operation.id, outcome) != outcome:
                raise half_answer(f"{row.operation.key!r} is confirmed and absent.")
    if told.receipt and [*outcomes.values()].count(CONFIRMED) != 1:
        raise half_answer("--receipt is for one --confirm.")
    answers = {row: told._replace(id=row, outcome=outcome) for row, outcome in outcomes.items()}
    return [row._replace(told=answers.get(row.operation.id, row.told)) for row in rows]


def meant_by(rows: list[Answered], key: str, *, of_run: bool) -> list[Answered]:
    """Return the operation with a key; or those of a run that begin with what a `*` follows."""
    found = [row for row in rows if row.operation.key == key]
    several = not found and key.endswith("*")
    if several:
        found = [row for row in rows if row.operation.key.startswith(key[:-1])]
    if not found:
        what = f"There is no operation of unknown outcome with the key {key!r}."
        raise NotFound(what, unchanged="Nothing was changed.", todo="See: batchrun reconcile")
    if not of_run and (several or len(found) > 1):
        lines = {f"\n  {reconcile_line(row.run)} ...  ({row.run.job})": row for row in found}
        what = f"Say of which run {key!r} is meant."
        todo = f"Name it:{''.join(lines)}"
        raise ConfigurationError(what, unchanged="Nothing was changed.", todo=todo)
    return found


def half_answer(what: str) -> ConfigurationError:
    """Return the letter for half an answer."""
    todo = 'Write: batchrun reconcile --confirm KEY --receipt \'{"id": 7}\' --why "..." --apply'
    return ConfigurationError(what, unchanged="Nothing was changed.", todo=todo)


# -- draining ------------------------------------------------------------------------------------
#
# A drain brings the runs that a barrier found to a stop, and proves it. Behind the barrier nothing
# is admitted, so what can still write was there when it was raised: a run is *free* if and only if
# none of its recorded processes lives and its lock can be taken. Once free it stays free, and who
# was killed without a word is settled with that lock held. Of each job the newest run is looked at,
# also if it has finished: its supervisor may not be gone yet. The classes are:
#
#   finished    succeeded or cancelled since
#   stopped     at its newest commit; a later start goes on
#   awaiting    stopped until a person answers
#   deferred    a start that is to be begun when maintenance is over
#   running     not free, and its supervisor lives
#   orphaned    not free, and its supervisor is gone
#
# A run is in one class, by what it is when the drain ends, and never moved to reach zero. It ends
# with 0 if and only if all are free, no operation of a job that it closes is unknown, the runs
# counted by event ids are the runs found, nothing was admitted behind the barrier, and each of its
# scopes names a job or a tag (else 3); with 13 if an owner is orphaned or frozen, or heeded no
# stop, or if an operation is unknown, which no waiting will change; with 11 if others still run;
# with 75 or 130 if it was stopped itself; with 1 if its barrier fell meanwhile. What was asked for
# stands, and the next drain goes on.
#
#   first ask      a request in the ledger, as soon as the barrier is up (not with --finish)
#   deadline       with --then interrupt: TERM to the supervisor, and once more as a second stop; to
#                  a worker without one SIGUSR1. What follows is the supervisor's, as for any stop
#   bound          stop_grace, 10 s or stop_grace (the less) and 2 s later: who is not gone by then
#                  heeds no stop

DRAINED_AS = ("finished", "stopped", "awaiting", "deferred", "running", "orphaned")
SECOND_STOP_AFTER_S = ONE_STOP_DEFAULT_S + 0.5  # surely not taken for the same one
GONE_AFTER_S = 2.0  # for an owner to be gone after its KILL


class DrainWish(NamedTuple):
    """What a drain is to do."""

    deadline_s: float
    finish: bool = False  # let runs end by themselves
    interrupts: bool = False  # interrupt what still runs at the deadline


class Drained(NamedTuple):
    """How a drain found one run; what is kept of it in the drain's report."""

    run: str  # its id
    job: str
    stands: str  # one of DRAINED_AS
    number: int  # of its newest commit
    state: str
    reason: str
    owners: list[dict[str, Any]]  # the processes that may still write: pid, ticks, boot_id
    frozen: bool  # whether one of them is stopped (SIGSTOP, or a debugger)
    operations: int = 0  # of unknown outcome


class Account(NamedTuple):
    """What a drain can be held to: what it found, against what the ledger's clock says."""

    barrier: Barrier
    runs: list[Drained]  # as they were found
    counted: list[str]  # ids of the runs that there should be, by event ids alone
    behind: list[tuple[str, str, int, int]]  # as `Ledger.admitted_behind`, of jobs that were closed
    until: int  # the event up to which it was found
    unknown: list[str]  # scopes of the barrier that name no job and no tag
    is_up: bool  # whether the barrier is up at this moment
    left: list[dict[str, Any]]  # job, run, operations: the unknown ones of other finished runs

    @property
    def adds_up(self) -> bool:
        """Whether every run is in one class, none came behind the barrier, and it is understood."""
        found = sorted(each.run for each in self.runs)
        return sorted(self.counted) == found and not self.behind and not self.unknown


class Drainer:
    """Brings what a barrier found to a stop."""

    _drain: Drain  # from `run` on
    _left: list[Run]  # those that are not known to be free, of each job its newest

    def __init__(
        self, config: Config, ledger: Ledger, host: Host, watcher: Watcher, who: str
    ) -> None:
        self._config, self._ledger, self._host = config, ledger, host
        self._watcher, self._who = watcher, who
        self._state = StateDirectory(config, host)
        self._stops = StopCounter(host)
        self._free = set[int]()  # keys of runs that nobody can write to any more
        self._sent: dict[tuple[ProcessIdentity, int], float] = {}
        self._said = set[int]()  # keys of runs that were said to block

    def run(self, wish: DrainWish) -> Drain | None:
        """Wait until every run is free or the deadline is over; None if no barrier is up."""
        self._stops.begin()
        find = self._state.maintenance.find
        begun = self._ledger.begin_drain(self._who, wish.deadline_s, find)
        if begun is None:
            return None
        self._drain, began = begun, self._host.monotonic()
        barrier = self._ledger.barrier_of(begun)
        self._left = [
            run for run in self._ledger.latest_of_each_job() if self._concerns(barrier, run)
        ]
        self._stops.look()
        while self._look_again() and not self._stops.count and self._is_up(barrier):
            late_s = self._host.monotonic() - began - wish.deadline_s
            self._press(wish, late_s)
            self._tell(wish, late_s)
            if late_s >= self._limit_s(wish):
                break
            self._stops.wait(WATCH_INTERVAL_S)
        self._watcher.draw("")
        return self._end(wish, find)

    def _is_up(self, barrier: Barrier) -> bool:
        return barrier.closed is None and barrier.is_of(self._state.maintenance.find())

    def _limit_s(self, wish: DrainWish) -> float:
        """Return how long to wait past the deadline, for those that are interrupted."""
        if not wish.interrupts:
            return 0.0
        jobs = self._config.jobs
        graces_s = [jobs[run.job].stop_grace_s for run in self._left if run.job in jobs]
        grace_s = max(graces_s, default=KILL_AFTER_INTERRUPT_S)
        return grace_s + min(grace_s, KILL_AFTER_INTERRUPT_S) + GONE_AFTER_S

    def _concerns(self, barrier: Barrier, run: Run) -> bool:
        """Tell whether the barrier closes a run's job; a version that is not known yet counts."""
        version = run.job_version or 0
        return self._closes(barrier, run.job) or closes_version(barrier.scopes, run.job, version)

    def _closes(self, barrier: Barrier, job: str) -> bool:
        known = self._config.jobs.get(job)
        return closes(barrier.scopes, job, known.tags if known else ())

    def _look_again(self) -> bool:
        """Keep those of the runs that are not free, as they stand now; tell whether there are."""
        self._left = [self._ledger.run(run.key) for run in self._left if not self._is_free(run)]
        return bool(self._left)

    def _is_free(self, run: Run) -> bool:
        """Tell whether nobody can write to a run any more; its lock is the proof."""
        run = self._ledger.run(run.key)
        if self._ledger.last_attempt(run) is None:
            return True
        if owners_of(self._ledger, run, self._host):
            return False
        with holding(JobLock(self._state.lock_path(run.job))) as is_free:
            if is_free:
                self._ledger.settle_left(run, self._who)
                self._free.add(run.key)
        return is_free

    # -- while it waits ------------------------------------------------------------------------

    def _press(self, wish: DrainWish, late_s: float) -> None:
        """Ask for what is due now: a stop at the safe point, or to give the batch up."""
        for run in self._left:
            if not wish.finish and run.request is None and run.state in OWNED:
                self._ledger.ask_to_drain(run, self._who)
            if wish.interrupts and late_s >= 0:
                self._interrupt(run)

    def _interrupt(self, run: Run) -> None:
        """Send the supervisor two stops, far enough apart; a worker without one, its own."""
        attempt = cast("Attempt", self._ledger.last_attempt(run))
        for owner in owners_of(self._ledger, run, self._host)[:1]:
            is_supervisor = owner == attempt.supervisor
            self._send(run, owner, signal.SIGTERM if is_supervisor else signal.SIGUSR1, 1)
            since_s = self._host.monotonic() - self._sent[owner, 1]
            if is_supervisor and since_s > SECOND_STOP_AFTER_S:
                self._send(run, owner, signal.SIGTERM, 2)

    def _send(self, run: Run, to: ProcessIdentity, number: signal.Signals, stop: int) -> None:
        """Send a stop to a run's owner, each once, and leave a row of it."""
        if (to, stop) not in self._sent:
            self._sent[to, stop] = self._host.monotonic()
            words = f"{number.name} to pid {to.pid}: the deadline is over"
            self._ledger.note(self._who, "drain interrupts", words, run=run)
            self._host.send(to, number)

    def _tell(self, wish: DrainWish, late_s: float) -> None:
        """Say what blocks, each once, and show in short what is left of it on a terminal."""
        texts = []
        for run in self._left:
            attempt, pace = cast("Attempt", self._ledger.last_attempt(run)), self._ledger.pace(run)
            open_since = max(attempt.began_at, pace[2] if pace else "")
            due = due_text(run, pace, open_since, self._host.now(), finish=wish.finish)
            batch = f"batch {run.batches + 1}"
            texts.append(f"{run.job}, {batch}, {due.rpartition(', ')[2]}")
            if run.key not in self._said:
                self._said.add(run.key)
                self._watcher.say(f"waiting for {run.job}: run {run.id}, {batch}{due}")
        over = "past its deadline" if late_s >= 0 else f"{duration_text(-late_s)} left"
        self._watcher.draw(f"drain, {over}, waits for {len(texts)}: {'; '.join(texts)}")

    # -- its end -------------------------------------------------------------------------------

    def _end(self, wish: DrainWish, find: Callable[[], Lockfile | None]) -> Drain:
        """Record how every run was found, and what follows from it."""
        account = self._look(self._ledger.barrier_of(self._drain))
        runs = [each._asdict() for each in account.runs]
        kept = account._asdict() | {"runs": runs}
        del kept["barrier"]  # the drain's own row names it
        code = self._code(wish, account)
        return self._ledger.end_drain(self._drain, self._who, code, find, kept)

    def account(self, drain: Drain) -> Account:
        """Return what a drain is held to: as kept if it has ended, else as it is now."""
        barrier, kept = self._ledger.barrier_of(drain), drain.report
        if kept is None:
            return self._look(barrier)
        runs = [Drained(**each) for each in kept["runs"]]
        now = {"barrier": barrier, "runs": runs, "is_up": self._is_up(barrier)}
        return Account(**kept | now)

    def _look(self, barrier: Barrier) -> Account:
        """Return what there is to account for now."""
        until, admitted = self._ledger.newest_event(), self._ledger.admitted_behind(barrier)
        found = self._ledger.found_by(barrier, until)
        concerned = [each for each in found if self._concerns(barrier, each[0])]
        runs = [self._found(run) for run, _ in concerned]
        met, left = {run.run for run in runs}, self._ledger.runs_with_open_operations()
        return Account(
            barrier=barrier,
            runs=runs,
            counted=[run.id for run, is_counted in concerned if is_counted],
            behind=[row for row in admitted if self._closes(barrier, row[0])],
            until=until,
            unknown=[scope for scope in barrier.scopes if not self._is_known(scope)],
            is_up=self._is_up(barrier),
            left=[
                {"job": run.job, "run": run.id, "operations": count}
                for run, count in left
                if run.id not in met and self._concerns(barrier, run)
            ],
        )

    def _is_known(self, scope: str) -> bool:
        """Tell whether a scope names something; who writes a lockfile by hand may mistype it."""
        kind, _, name = scope.partition(":")
        if kind == "tag":
            return any(name in job.tags for job in self._config.jobs.values())
        job = name.partition("<")[0]
        return job in self._config.jobs or self._ledger.latest(job) is not None

    def _found(self, run: Run) -> Drained:
        """Return how a run stands, without taking its lock."""
        attempt, owners = self._ledger.last_attempt(run), list[ProcessIdentity]()
        if attempt is not None and run.key not in self._free:
            owners = owners_of(self._ledger, run, self._host)
            held = holders(JobLock(self._state.lock_path(run.job)), self._host)
            owners += [each for each in held if each not in owners]
        return Drained(
            run=run.id,
            job=run.job,
            stands=drained_as(run, attempt, owners),
            number=run.number,
            state=run.state,
            reason=run.reason,
            owners=[owner._asdict() for owner in owners],
            frozen=any(map(self._host.is_stopped, owners)),
            operations=len(self._ledger.open_operations(run)),
        )

    def _code(self, wish: DrainWish, account: Account) -> ExitCode:
        """Return what the drain ends with; see the head of this part."""
        if not account.adds_up:
            return ExitCode.FINDINGS
        if not self._left:
            unknown = account.left or any(each.operations for each in account.runs)
            return ExitCode.PERSON_NEEDED if unknown else ExitCode.DONE
        if self._stops.count:
            return self._stops.exit_code()
        stuck = any(each.frozen or each.stands == "orphaned" for each in account.runs)
        return ExitCode.PERSON_NEEDED if stuck or wish.interrupts else ExitCode.BUSY


def drained_as(run: Run, attempt: Attempt | None, owners: Sequence[ProcessIdentity]) -> str:
    """Return in which class a drain finds a run: one of DRAINED_AS."""
    if owners:
        return "running" if attempt and attempt.supervisor in owners else "orphaned"
    if run.finished:
        return "finished"
    if run.deferred is not None:
        return "deferred"
    return "awaiting" if run.state == RunState.AWAITING else "stopped"


def due_text(
    run: Run, pace: tuple[float, float, str] | None, since: str, now: str, *, finish: bool
) -> str:
    """Return how long a run's batches take, and when the open one, or all, should be done."""
    open_s = max(0.0, seconds_between(since, now))
    if pace is None:
        return f", its first, open for {duration_text(open_s)}"
    took_s, read, _ = pace
    batches = (run.expected - run.read) / read if finish and run.expected and read else 1.0
    left_s = took_s * max(1.0, batches) - open_s
    due = f"due in {duration_text(left_s)}" if left_s >= 0 else f"late by {duration_text(-left_s)}"
    return f", which take {took_s:.1f} s each, {due}"


# ======================================================================================
# 13. Reports: rows to text, JSON, Markdown and HTML; units of systemd and cron; pure
# ======================================================================================
#
# Everything here turns rows into words and changes nothing. A summary is one JSON document; its
# fields are only ever added to. Names carry their units.
#
# A *sheet* is a report in parts: what is shown is said once, and each form only shows it. A run's
# time is cut into SPANS_MOST spans, added up by the ledger, and every plot is made of boxes over
# them: no report grows with the batches. Amounts reach from the span before to their own, health
# from a check to the next one, and neither over a gap in which no attempt was under way.
# Whatever others wrote goes through `as_html` or `as_markdown`, or at last through the console.
#
# Looking costs what it shows: the table of jobs a few rows of each, the screen of one job what
# fits on a screen. `status --watch` and `logs --follow` open the ledger for each look and close it,
# so that no reader keeps its log from being emptied.
#
# A line of a run's log is `TIME LEVEL text`; one without a time has those of the line before. An
# event is such a line too (`batchrun: ...`); both are shown in the order of their times.

BAR_WIDTH = 40  # at most; a narrow terminal gets a shorter one, or none
CELL_WIDTH = 60  # of text that others wrote
NOT_SUMMARISED = ("key", "checkpoint", "settings", "hash")


def summarise_reject(row: RejectRow) -> dict[str, Any]:
    """Return a reject as one JSON document; `can_retry`: its record can be had back."""
    hidden = ("value", "raw", "spot")
    kept = {name: value for name, value in row._asdict().items() if name not in hidden}
    return {**kept, "raw": bool(row.raw), "can_retry": row.value is not None}


def render_rejects(rejects: list[dict[str, Any]], columns: int) -> str:
    """Return rejects as a table."""
    rows = [["id", "state", "commit", "loop", "record", "reason"]]
    for reject in rejects:
        state = reject["state"] + ("" if reject["can_retry"] else ", text only")
        where = (str(reject["number"]), reject["loop"], reject["record"], reject["reason"])
        rows.append([str(reject["id"]), state, *where])
    return render_table(rows, columns)


def render_reject(reject: dict[str, Any]) -> str:
    """Return all that is kept of one reject as text."""
    what = "the source's own record, which parse= refused" if reject["raw"] else "the job's record"
    can = "" if reject["can_retry"] else "; only its text is kept, so it cannot be retried"
    count = reject["record_number"]
    number = f"  number    {count:,} in its source\n" if count else ""
    retried = f", taken up by run {reject['retry']}" if reject["retry"] else ""
    why = f": {reject['why']}" if reject["why"] else ""
    return (
        f"reject {reject['id']} of run {reject['run']}: {reject['state']}{why}{retried}\n"
        f"  commit    {reject['number']} of attempt {reject['generation']}, loop {reject['loop']},"
        f" {moment_text(reject['at'])}, try {reject['tries']}\n{number}"
        f"  kept is   {what}{can}\n"
        f"  reason    {reject['reason']}\n"
        f"  record    {reject['record']}"
    )


def summarise_answered(row: Answered, *, applied: bool) -> dict[str, Any]:
    """Return an operation of unknown outcome, and what is known of it now, as one document."""
    operation, told = row.operation, row.told
    return {
        "key": operation.key,
        "run": row.run.id,
        "job": row.run.job,
        "commit": operation.number,
        "claimed_at": operation.claimed_at,
        "can_look_up": bool(operation.lookup),
        "outcome": told.outcome,
        "receipt": told.receipt and json.loads(told.receipt),
        "who": told.who,
        "why": told.why or operation.why or "",
        "applied": applied and told.outcome is not None,
    }


def render_answered(documents: list[dict[str, Any]], columns: int) -> str:
    """Return operations of unknown outcome as a table."""
    words = {DONE: "done", CONFIRMED: "was done", FREED: "was not done", None: "unknown"}
    rows = [["key", "job", "run", "claimed at", "answer", "why"]]
    for each in documents:
        answer = words[each["outcome"]] + " (recorded)" * each["applied"]
        claimed_at = moment_text(each["claimed_at"])
        rows.append([each["key"], each["job"], each["run"], claimed_at, answer, each["why"]])
    return render_table(rows, columns)


def summarise_rollback(ledger: Ledger, rollback: Rollback) -> dict[str, Any]:
    """Return what a rollback undoes as one JSON document, batches by number, newest first."""
    batches, operations = ledger.batches_of(rollback), ledger.operations_of(rollback)
    done = [row for row in operations if row.number <= rollback.of.number]
    fixed = [row.key for row in done if row.irreversible]
    uncommitted = [row.key for row in operations if row.number > rollback.of.number]
    return {
        "run": rollback.of.id,
        "to_batch": rollback.to,
        "batches": [batch.number for batch in batches if batch.remembered],
        "rows": sum(batch.remembered for batch in batches),
        "without_rows": [batch.number for batch in batches if not batch.remembered],
        "operations": len(done) - len(fixed),
        "irreversible": len(fixed),
        "irreversible_keys": fixed[:KEYS_SHOWN],
        "uncommitted": len(uncommitted),
        "uncommitted_keys": uncommitted[:KEYS_SHOWN],
    }


def render_rollback(document: dict[str, Any]) -> list[str]:
    """Return what a rollback undoes, and what it does not, as lines."""
    count = document["operations"]
    size = f", {document['bytes']:,} bytes" if "bytes" in document else ""
    undone = f"{several(document['rows'], 'row')}{size}"
    lines = [f"  undone    {undone}, of {ranges_text(document['batches'])}"]
    if document["without_rows"]:
        lines.append(f"  no row    remembered by {ranges_text(document['without_rows'])}")
    if count:
        lines.append(f"  outside   {count:,} operations, left to the job's rollback")
    never = " of a batch that was never committed"
    for name, which in (("irreversible", " that are irreversible"), ("uncommitted", never)):
        if document[name]:
            lines.append(f"  {not_undone(document[name], which, document[f'{name}_keys'])}")
    return lines


def ranges_text(numbers: Sequence[int]) -> str:
    """Return batches for people, `2 batches: 9 to 8`; they are numbered downwards."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = ", ".join(f"{a} to {b}" if a > b else str(a) for a, b in ranges)
    return f"{len(numbers):,} batch{'es' * (len(numbers) != 1)}: {words}"


def summarise(
    run: Run,
    attempts: list[Attempt],
    rejects: list[RejectRow],
    events: list[Event],
    cleanups: Sequence[Cleanup] = (),
    undoes: dict[str, Any] | None = None,
    rollbacks: Sequence[Run] = (),
) -> dict[str, Any]:
    """Return all that is known of a run as one JSON document."""
    return {
        **{name: value for name, value in run._asdict().items() if name not in NOT_SUMMARISED},
        "exit_code": attempts[-1].exit_code if attempts else None,
        "attempts": [summarise_attempt(each, run) for each in attempts],
        "rejects": [summarise_reject(row) for row in rejects if row.run == run.id],
        "cleanups": [{**c._asdict(), "call": mask_secrets(c.call)} for c in cleanups],
        "undoes": undoes,
        "rollbacks": [
            {"run": r.id, "to_batch": r.rollback_to, "state": r.state} for r in rollbacks
        ],
        "events": [event._asdict() for event in events],
    }


def summarise_attempt(attempt: Attempt, run: Run) -> dict[str, Any]:
    """Return an attempt as one JSON document, with what it has committed, also so far."""
    supervisor, worker = attempt.supervisor._asdict(), attempt.worker and attempt.worker._asdict()
    until = run.number if attempt.to_number is None else attempt.to_number
    committed = {"commits": max(0, until - attempt.from_number)}
    return {**attempt._asdict(), **committed, "supervisor": supervisor, "worker": worker}


def summarise_job(
    job: str,
    run: Run | None,
    standing: Standing,
    success: Run | None,
    refused: int,
    *,
    stuck: Sequence[Finding] = (),
    rate: float = 0.0,
    stalls: Finding | None = None,
    late: str = "",
    left_open: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Return how a job stands as one JSON document.

    `stuck` are its cleanups that need somebody, `rate` is the records a second of a run that goes
    on, `stalls` and `late` say that it is so, `left_open` counts unknown operations and rejects.
    """
    left = max(0, run.expected - run.read) / rate if run and run.expected and rate else None
    again = late and (run is None or standing.state in FINISHED) and f"batchrun run {job}"
    ended = success and (success.created_at, success.ended_at or success.created_at)
    kept = ("rollback_of", "reason", "read", "expected", "rejected", "batches", "error", "paused_s")
    return {
        "job": job,
        "run": run and run.id,
        "state": standing.state if run else "never run",
        **{name: run and getattr(run, name) for name in kept},
        "since": run and run.changed_at,
        "records_per_s": round(rate, 1),
        "left_s": left and round(left, 1),
        "last_success": success and success.ended_at,
        "last_success_elapsed_s": ended and seconds_between(*ended),
        "refused_since_success": refused,
        "why": standing.why,
        "next": stalls.todo if stalls else again or standing.todo,
        "needs_someone": standing.needs_someone or bool(stuck or stalls or late),
        "cleanups": [finding._asdict() for finding in stuck],
        "deferred_since": run and run.deferred and run.deferred["at"],
        "leaks": [],
        "stalled": f"{stalls.what}; {stalls.why}" if stalls else "",
        "late": late,
        "unknown_operations": left_open[0],
        "open_rejects": left_open[1],
    }


def summarise_barrier(ledger: Ledger, barrier: Barrier | None) -> dict[str, Any]:
    """Return a maintenance as one JSON document: its row, the starts it met, what is deferred."""
    unfinished = ledger.all_unfinished()
    return {
        "barrier": barrier and barrier._asdict(),
        "turned_away": summarise_turned_away(ledger, barrier) if barrier else [],
        "deferred": [{"job": r.job, "run": r.id, **r.deferred} for r in unfinished if r.deferred],
    }


def summarise_turned_away(ledger: Ledger, barrier: Barrier) -> list[dict[str, Any]]:
    """Return the starts that a barrier met: what became of them, of which job, how many."""
    names = ("done", "job", "starts")
    return [dict(zip(names, row, strict=True)) for row in ledger.turned_away(barrier)]


def render_barrier(document: dict[str, Any]) -> str:
    """Return how a maintenance went, now that it is over."""
    first = "maintenance was not on"
    if barrier := document["barrier"]:
        lasted = age_text(barrier["at"], barrier["closed_at"])
        by = f"by {barrier['who']}{in_brackets(barrier['reason'])}, {barrier['closed_why']}"
        first = f"maintenance is off; it was on for {lasted}, since {barrier['at']} {by}"
    return "\n".join([first, *render_turned_away(document)])


def in_brackets(reason: str | None) -> str:
    """Return a reason as what is said in brackets, or nothing."""
    return f" ({reason})" if reason else ""


def render_turned_away(document: dict[str, Any]) -> list[str]:
    """Return a line for each job that maintenance turned away, and for each start that waits."""
    away = document["turned_away"]
    lines = [f"  {row['done']:<8}  {row['job']}: {row['starts']}" for row in away]
    waiting = document["deferred"]
    lines += [f"  waits     {w['job']}: run {w['run']}, since {w['at']}" for w in waiting]
    then = "the tick begins them once it is off" if document.get("maintenance") else ""
    return [*lines, then or "to type: batchrun resume --all"] if waiting else lines


def render_lockfile(found: Lockfile, now: str) -> list[str]:
    """Return the lines that say that maintenance is on, loud if it should be over."""
    since = f" since {found.since}, for {age_text(found.since, now)}," if found.since else ""
    until = f", until {found.until}" if found.until else ""
    only = f", only {', '.join(found.scopes)}" if found.scopes else ""
    line = f"maintenance is on{since} by {found.by}{in_brackets(found.reason)}{until}{only}"
    if not found.overdue:
        return [line]
    return [f"MAINTENANCE IS OVERDUE. {found.overdue}", line, "to type: batchrun maintenance off"]


DRAIN_ENDS = {  # exit code of a drain -> what it says
    None: "it goes on, or was killed; batchrun drain goes on with it",
    ExitCode.DONE: "nobody{of} may write any more",
    ExitCode.FAILED: "its barrier fell before it had ended; nothing is proven",
    ExitCode.FINDINGS: "IT DOES NOT ADD UP; what is below is not to be trusted",
    ExitCode.BUSY: "some still run past its deadline; batchrun drain goes on with it, or interrupts"
    " them: batchrun drain --then interrupt",
    ExitCode.PERSON_NEEDED: "a person is needed: an owner is orphaned, frozen or heeds no stop, or"
    " an operation is unknown",
    ExitCode.STOPPED: "it was stopped; batchrun drain goes on with it",
    ExitCode.INTERRUPTED: "it was stopped by Ctrl-C; batchrun drain goes on with it",
}


def summarise_drain(drain: Drain, account: Account, away: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a drain as one JSON document: the runs that there were, their classes, the proof."""
    sums, runs = dict.fromkeys(DRAINED_AS, 0), [run._asdict() for run in account.runs]
    for run in account.runs:
        sums[run.stands] += 1
    adds_up = account.adds_up and sum(sums.values()) == len(account.counted)
    found = drain if adds_up else drain._replace(exit_code=ExitCode.FINDINGS)
    return {
        **{name: value for name, value in drain._asdict().items() if name != "report"},
        "barrier": account.barrier._asdict(),
        "is_up": account.is_up,
        "unknown_scopes": account.unknown,
        "runs": runs,
        "total": len(account.counted),
        "sums": sums,
        "operations": sum(each["operations"] for each in (*runs, *account.left)),
        "operations_of_others": account.left,
        "adds_up": adds_up,
        "ended": drain_text(found, account.barrier, is_up=account.is_up),
        "turned_away": away,
        "admitted_behind": account.behind,
        "until_event": account.until,
    }


def drain_text(drain: Drain, barrier: Barrier, *, is_up: bool = True) -> str:
    """Return how a drain stands, in one line: of which jobs, and whether it tells of now."""
    ended = DRAIN_ENDS[cast("ExitCode | None", drain.exit_code)]
    of = f" of {', '.join(barrier.scopes)}" if barrier.scopes else ""
    since = f" since {barrier.closed_at}" if barrier.closed_at else ""
    over = "" if is_up else f", of a maintenance that is over{since}"
    return f"drain {drain.id}{over}: {ended.format(of=of)}"


def render_drain(summary: dict[str, Any]) -> str:
    """Return a drain's report as text."""
    barrier, sums, rows = summary["barrier"], summary["sums"], summary["turned_away"]
    unknown = ", ".join(summary["unknown_scopes"])
    wrong = f"  scopes      {unknown}: no job or tag has that name, so nothing of it was closed"
    only = f", only {', '.join(barrier['scopes'])}" if barrier["scopes"] else ""
    classes = " + ".join(f"{count} {name}" for name, count in sums.items())
    by = f"{barrier['who']}{in_brackets(barrier['reason'])}{only}"
    end = "the drain's end" if summary["ended_at"] else "now"
    between = f"event {barrier['opened']} and {end}"
    door = "is over, so this is of then; to begin anew: batchrun drain"
    if summary["is_up"]:
        door = "is still on; when the deploy is done: batchrun maintenance off"
    behind = [f"{job}: run {run}, event {at}" for job, run, _, at in summary["admitted_behind"]]
    starts = [f"{row['starts']} of {row['job']} {row['done']}" for row in rows]
    has_ended = summary["exit_code"] is not None
    left = "  unknown     {operations} of run {run} of {job}; to find out: batchrun reconcile {run}"
    lines = [
        summary["ended"],
        f"  barrier     {barrier['id']}, since {barrier['at']} by {by}",
        *([wrong] * bool(unknown)),
        f"  unfinished  {several(summary['total'], 'run')} = {classes}",
        *(render_drained(run, ended=has_ended) for run in summary["runs"]),
        f"  operations  {summary['operations']} of unknown outcome",
        *(left.format(**row) for row in summary["operations_of_others"]),
        f"  starts      {', '.join(starts) or 'none was turned away'}",
        f"  admitted    {', '.join(behind) or 'nothing'} between {between}",
        f"  maintenance {door}",
    ]
    return "\n".join(lines)


def render_drained(run: dict[str, Any], *, ended: bool) -> str:
    """Return one run of a drain as text: its class, where it stands, who owns it."""
    owners = " and ".join(f"pid {o['pid']} (start {o['ticks']})" for o in run["owners"])
    by = f", owned by {owners}{', frozen' if run['frozen'] else ''}" if owners else ""
    stuck = run["frozen"] or run["stands"] == "orphaned" or (ended and by)
    todo = f"\n{'':14}to end it: batchrun cancel --kill {run['run']}" * bool(stuck)
    where = f"run {run['run']} at commit {run['number']}, {state_text(run)}"
    if run["operations"]:
        find_out = f"{'':14}to find out: batchrun reconcile {run['run']}"
        todo += f"\n{'':14}operations of unknown outcome: {run['operations']}\n{find_out}"
    return f"  {run['stands']:<11} {run['job']}: {where}{by}{todo}"


# A column of the table of jobs -> its cell, of how a job stands at a moment; `-`: nothing.
STATUS: dict[str, Callable[[dict[str, Any], str], str]] = {
    "job": lambda job, _: "! " * job["needs_someone"] + job["job"],
    "state": lambda job, _: state_text(job),
    "for": lambda job, now: age_text(job["since"], now),
    "batches": lambda job, _: number_text(job["batches"]),
    "records": lambda job, _: number_text(job["read"]),
    "of": lambda job, _: number_text(total_of(job)),
    "done": lambda job, _: share_text(job["read"], total_of(job)),
    "rate": lambda job, _: f"{job['records_per_s']:,.0f}/s" if job["records_per_s"] else "-",
    "left": lambda job, _: duration_text(job["left_s"]) if job["left_s"] is not None else "-",
    "success": lambda job, now: age_text(job["last_success"], now, " ago"),
    "skipped": lambda job, _: number_text(job["refused_since_success"] or None),
}
# The order in which a narrow terminal does without them.
NARROWED = ("batches", "of", "skipped", "rate", "done", "success", "left")
LEAST_NAME = 20
NOTHING_TO_DO = ("batchrun report", "batchrun pause")


def render_status(jobs: list[dict[str, Any]], now: str, columns: int = 0) -> str:
    """Return a table of jobs as text, and below it what to type for those that began something.

    `!` stands before a job that needs someone; such jobs come first. `columns`: the width of the
    terminal, 0 if none.
    """
    ordered = sorted(jobs, key=itemgetter("needs_someone"), reverse=True)
    rows = ([cell(job, now) for cell in STATUS.values()] for job in ordered)
    lines = [fit_table([list(STATUS), *rows], columns)]
    deferred = [(job["job"], job["deferred_since"]) for job in jobs if job["deferred_since"]]
    lines += [f"deferred: {job}, for {age_text(since, now)}" for job, since in deferred]
    lines += [f"{k}: {j['job']}, {j[k]}" for j in jobs for k in ("stalled", "late") if j[k]]
    for job in ordered:
        which = f" for {job['job']}" if len(jobs) > 1 else ""
        if (job["run"] or not which) and not job["next"].startswith(NOTHING_TO_DO):
            lines.append(f"to type{which}: {job['next']}")
    return "\n".join([*lines, *chain.from_iterable(map(render_stuck, jobs))])


def total_of(run: Mapping[str, Any]) -> int | None:
    """Return how many records a run has to read, if that is known; never less than it has read."""
    return max(run["read"], run["expected"]) if run["expected"] else None


def share_text(read: int, total: int | None) -> str:
    """Return how much of all was read, or `-`."""
    return f"{read / total:.0%}" if total else "-"


def fit_table(rows: list[list[str]], columns: int) -> str:
    """Return a table that fits: without columns that say nothing, then without NARROWED ones.

    Names are cut, down to LEAST_NAME before any column goes.
    """
    names, *kept = zip(*rows, strict=True)
    kept = [each for each in kept if {*each[1:]} - {"-"}]
    longest, room = width_of(names), columns or sys.maxsize
    for name in NARROWED:
        taken = sum(width_of(each) + 2 for each in kept)
        if taken + min(longest, LEAST_NAME) > room:
            kept = [each for each in kept if each[0] != name]
    left = room - sum(width_of(each) + 2 for each in kept)
    shown = zip([cut(name, max(left, 12)) for name in names], *kept, strict=True)
    lines = render_table(list(map(list, shown))).split("\n")
    return "\n".join(cut(line, room) for line in lines)


def cut(text: str, columns: int) -> str:
    """Return text in so many columns of a terminal, with dots where it was cut."""
    taken = widths_of(text)
    if sum(taken) <= columns:
        return text
    kept = sum(so_far <= columns - 3 for so_far in accumulate(taken))
    return text[:kept] + "..."[:columns]


def widths_of(text: str) -> list[int]:
    """Return how many columns of a terminal each letter takes: 0, 1 or 2."""
    if text.isascii():
        return [1] * len(text)
    from unicodedata import combining, east_asian_width

    return [0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text]


def width_of(column: Iterable[str]) -> int:
    """Return how many columns of a terminal the widest of some cells takes."""
    return max(sum(widths_of(cell)) for cell in column)


def render_stuck(job: dict[str, Any]) -> list[str]:
    """Return the lines about a job's cleanups that somebody has to see to."""
    return [f"{c['what']}: {c['why']}\nto type: {c['todo']}" for c in job["cleanups"]]


def age_text(at: str | None, now: str, ago: str = "") -> str:
    """Return how long ago a moment was, for people, or `-`."""
    return f"{duration_text(max(0.0, seconds_between(at, now)))}{ago}" if at else "-"


def render_one_status(job: dict[str, Any], now: str) -> str:
    """Return how one job stands, on one screen: what is known, why, and the line to type."""
    since = f" since {moment_text(job['since'])}" if job["since"] else ""
    lines = [f"{job['job']}: {state_text(job)}{since}"]
    lines += [f"  {name:<12}  {line}" for name, line in about_job(job, now)]
    return "\n".join([*lines, f"to type: {job['next']}", *render_stuck(job)])


def about_job(job: dict[str, Any], now: str) -> Iterator[tuple[str, str]]:
    """Yield what is known of a job, line by line: its name and its words."""
    if job["run"]:
        yield from about_run(job, now)
    yield "last success", moment_text(job["last_success"])
    yield "skipped", f"{job['refused_since_success']} starts since"
    yield from ((kind, job[kind]) for kind in ("stalled", "late") if job[kind])
    yield from (("leak", line) for line in job["leaks"])
    if job["paused_s"]:
        yield "paused", f"{duration_text(job['paused_s'])} by health"
    yield from (("why", line) for line in job["why"].splitlines())


def about_run(job: dict[str, Any], now: str) -> Iterator[tuple[str, str]]:
    """Yield what is known of a job's run, line by line: its name and its words."""
    about = job["about"]
    undoes = f", a rollback of run {job['rollback_of']}" * bool(job["rollback_of"])
    yield "run", job["run"] + undoes + f", owned by {about['owners']}" * bool(about["owners"])
    yield "records", ", ".join([of_all_text(job), *speed_text(job)])
    if about["last_commit"]:
        times = (f"{about[name]:.2f} s" for name in ("batch_median_s", "batch_p95_s"))
        words = "median {}, 95th percentile {}".format(*times) if about["batch_median_s"] else "-"
        ago = age_text(about["last_commit"], now)
        yield "batches", f"{job['batches']:,}, newest commit {ago} ago, {words}"
        yield "loops", about["course"]
    yield "attempts", f"{len(about['attempts']):,}"
    for row in map(row_of_attempt, about["attempts"][-ATTEMPTS_SHOWN:]):
        yield "attempt", "{}  {}  {}: {}, commits {}, peak {}".format(*row[:6])
    if seen := about["reading"]:
        yield "reading", f"{reading_text(seen)}, {age_text(seen['at'], now)} ago"
    if check := about["health_check"]:
        yield "health", f"{check['verdict']}, {age_text(check['at'], now)} ago"
        yield from ((name, check[name]) for name in FACTORS)
    for name in ("operations", "rejects", "cleanups"):
        if about[name]:
            yield name, ", ".join(f"{count:,} {state}" for state, count in about[name].items())


ATTEMPTS_SHOWN = 4


def speed_text(job: dict[str, Any]) -> list[str]:
    """Return how fast a job goes on, and what time is left, as far as that is known."""
    speed = [f"{job['records_per_s']:,.0f}/s"] * bool(job["records_per_s"])
    return speed + [f"{duration_text(job['left_s'] or 0)} left"] * (job["left_s"] is not None)


def reading_text(reading: Mapping[str, Any]) -> str:
    """Return what a sample saw, as far as it could be seen."""
    words = []
    if reading["rss_bytes"] is not None:
        words.append(f"{size_text(reading['rss_bytes'])} of memory used")
    if reading["available_bytes"] is not None:
        where = f"({reading['limit_source']})"
        words.append(f"{size_text(reading['available_bytes'])} available {where}")
    counts = ("connections", "open_files")
    words += [f"{reading[n]} {n.replace('_', ' ')}" for n in counts if reading[n]]
    return ", ".join(words) or "nothing could be seen"


NOT_LIVE = ("attempts", "attempt", "last success", "skipped", "rejects", "cleanups")
LIVE_ROWS = 60  # of the newest readings and events
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def render_live(job: dict[str, Any], now: str, columns: int, bars: str) -> list[str]:
    """Return the live view of one job: how far, how fast, how well, and what happened last."""
    width = max(8, columns - 32)
    lines = [f"{job['job']}: {state_text(job)} for {age_text(job['since'], now)}", ""]
    if total := total_of(job):
        left = " ".join(speed_text(job)[1:])
        share = share_text(job["read"], total)
        lines.append(f"{bar_text(job['read'], total, width)} {share:>4}  {left}")
    lines += [f"{name:<13} {line}" for name, line in about_job(job, now) if name not in NOT_LIVE]
    for name, gauge in (("memory", "rss_bytes"), ("connections", "connections")):
        values = [value or 0 for value in job["live"][gauge][-width:]]
        if most := max(values, default=0):
            drawn = "".join(bars[round(value / most * (len(bars) - 1))] for value in values)
            text = size_text(most) if gauge == "rss_bytes" else f"{most}"
            lines.append(f"{name:<13} {drawn}  at most {text}")
    return [*lines, f"to type: {job['next']}"]


def frame(head: list[str], tail: list[str], columns: int, rows: int) -> list[str]:
    """Return lines that fit a screen: the head from its top, and of the tail the newest."""
    newest = tail[-max(1, rows - len(head)) :]
    lines = [cut(visible(line), columns) for line in [*head, *newest]]
    more = f"... and {len(lines) - rows + 1} lines more: batchrun status"
    return lines if len(lines) <= rows else [*lines[: rows - 1], cut(more, columns)]


def summarise_about(ledger: Ledger, run: Run, host: Host) -> dict[str, Any]:
    """Return what the screen about one run has beyond its line in the table."""
    attempts, times = ledger.attempts(run), ledger.batch_times(run)
    last, owners = ledger.commit_row(run, run.number), owners_of(ledger, run, host)
    reading, check = ledger.readings(run, 1), ledger.health_checks(run, 1)
    return {
        "owners": processes_text(owners, host) if owners else "",
        "attempts": [summarise_attempt(each, run) for each in attempts],
        "last_commit": last and last.at,
        "batch_median_s": times[len(times) // 2] if times else None,
        "batch_p95_s": ledger.slow_batch_s(run) or None,
        "course": course_text(run, last),
        "reading": reading[0]._asdict() if reading else None,
        "health_check": check[0]._asdict() if check else None,
        "operations": ledger.operation_outcomes(run),
        "rejects": ledger.reject_states(run) if run.rejected else {},
        "cleanups": Counter("done" if c.done_at else "PENDING" for c in ledger.cleanups(run)),
    }


def course_text(run: Run, last: BatchRow | None) -> str:
    """Return which loops and steps a run has done, and where it is."""
    if last is None or run.checkpoint is None:
        return ""
    done = list[str]()
    with contextlib.suppress(BrokenCheckpoint):  # `check` tells of that
        passed = parse_checkpoint(run.checkpoint)[0].passed
        done += [f"{kind} {name} done" for kind, name, *_ in passed]
    if last.kind == "batch" and not run.finished:
        last_key = last.last_key or "null"
        key = f" after key {cut(cursor_text(last_key), CELL_WIDTH)}" * (last_key != "null")
        done.append(f"now loop {last.loop}{key}")
    return mask_secrets(", ".join(done))


def summarise_configured(config: Config, job_config: JobConfig) -> dict[str, Any]:
    """Import a configured job and return what it declares; its mistakes are letters."""
    found = installed_job(config, job_config)
    found.settings_from(job_config, {}, config.folder)
    kinds = _declared(found.settings, job_config.name) if found.settings else {}
    settings = []
    for each in _declared_fields(found.settings):
        default = next((mask_secrets(repr(value)) for value in _defaults_of(each)), None)
        kind = _type_name(kinds.get(each.name, ""))
        settings.append({"name": each.name, "type": kind, "default": default})
    title = found.words.split("\n")[0]
    return {"version": found.version, "title": title, "words": found.words, "settings": settings}


def render_jobs(jobs: list[dict[str, Any]], now: str) -> str:
    """Return the configured jobs as text: each with what it does, and its settings below it."""
    lines = []
    for job in jobs:
        ran = "never run"
        if last := job["last_run"]:
            ran = f"run {last['run']} {last['state']} {age_text(last['since'], now)} ago"
        version = f"version {job['version']}" if "version" in job else "CANNOT BE USED"
        lines.append(f"{job['job']}  {version}, {ran}")
        lines.append(f"  {job.get('title') or job.get('error') or '-'}")
        for each in job.get("settings", ()):
            default = f" = {each['default']}" if each["default"] is not None else ", must be set"
            lines.append(f"  {each['name']}: {each['type']}{default}")
    return "\n".join(lines) or "no job is configured"


# -- a run's log -----------------------------------------------------------------------------------


class LogLine(NamedTuple):
    """One line of a run's log, or an event of the run as one."""

    at: str  # UTC, milliseconds; of a line without time, that of the line before
    level: str  # a key of LEVELS, or the job's own
    text: str

    def __str__(self) -> str:
        return f"{self.at} {self.level:<7} {self.text}"


# `OUT` and `ERR` is what was printed; a level that is not named here counts as INFO.
LEVELS = {"DEBUG": 10, "OUT": 20, "INFO": 20, "ERR": 30, "WARN": 30, "WARNING": 30}
LEVELS |= {"ERROR": 40, "CRITICAL": 50}
LOG_LINE = r"(?s)(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) (.*)"
WARNED_OF = ("failed", "interrupted", "awaiting", "refused", LEAK)


def event_line(event: Event) -> LogLine:
    """Return an event as a line of the log: said by batchrun."""
    words = event.why if event.what.startswith(SAID) else f"{event.what}: {event.why}"
    level = "WARNING" if event.what.startswith(WARNED_OF) else "INFO"
    return LogLine(event.at, level, f"batchrun: {' '.join(words.split()).removesuffix(':')}")


class LogFile:
    """A run's log, read as it grows, also where it is moved, removed, made anew or cut short."""

    def __init__(self, path: Path, begins: str) -> None:
        self._path, self._rest = path, b""
        self._file: IO[bytes] = io.BytesIO()  # empty, until there is a log
        self.refused = ""  # why it cannot be read although it is there
        self._last = LogLine(begins, "INFO", "")

    def new_lines(self, *, to_end: bool) -> Iterator[LogLine]:
        """Yield what was written since the last time; `to_end`: a line that is not ended too."""
        yield from self._lines(to_end=to_end or not self._is_there())
        if not self._is_there():
            self.close()
            try:
                self._file = os.fdopen(os.open(self._path, READ_PLAIN), "rb")
                yield from self._lines(to_end=to_end)
            except OSError as error:
                is_there = not isinstance(error, FileNotFoundError)
                self.refused = is_there * f"The log {self._path} cannot be read: {error.strerror}."

    def close(self) -> None:
        """Close the file; the next look opens it anew, from its beginning."""
        self._file.close()
        self._file, self._rest = io.BytesIO(), b""

    def _is_there(self) -> bool:
        with contextlib.suppress(OSError):
            found, mine = self._path.lstat(), os.fstat(self._file.fileno())
            return os.path.samestat(found, mine) and found.st_size >= self._file.tell()
        return False

    def _lines(self, *, to_end: bool) -> Iterator[LogLine]:
        for piece in self._file:
            self._rest += piece
            if piece.endswith(b"\n"):
                yield self._taken()
        if to_end and self._rest:
            yield self._taken()

    def _taken(self) -> LogLine:
        text, self._rest = self._rest.decode(errors="replace").rstrip("\n"), b""
        stamped = re.fullmatch(LOG_LINE, text)
        raw = LogLine(self._last.at, "INFO", text)
        self._last = LogLine(*stamped.groups()) if stamped else raw
        return self._last


def state_text(summary: dict[str, Any]) -> str:
    """Return a run's state with its reason."""
    return f"{summary['state']}{in_brackets(summary['reason'])}"


def moment_text(at: str | None) -> str:
    """Return a moment in UTC to the second for people, `2026-01-31 23:59:59Z`, or `-`."""
    return f"{at[:10]} {at[11:19]}Z" if at else "-"


def of_all_text(summary: dict[str, Any]) -> str:
    """Return how many records were read, and of how many, if that is known."""
    if summary["read"] is None:
        return "-"
    total = total_of(summary)
    return f"{summary['read']:,} of {total:,}" if total else f"{summary['read']:,}"


def counts_text(summary: dict[str, Any]) -> str:
    """Return what was read and what became of it."""
    counts = [f"{count:,} {name}" for name, count in summary["counts"].items()]
    return ", ".join([f"{of_all_text(summary)} read", *counts, f"{summary['rejected']:,} rejected"])


def time_text(summary: dict[str, Any]) -> str:
    """Return where the time went, and batchrun's own share of it."""
    read_s, work_s, own_s = summary["read_s"], summary["work_s"], summary["own_s"]
    rest_s = read_s + work_s  # of less than 0.1 s the share says nothing
    share = f" ({100 * own_s / rest_s:.1f} % of that)" if rest_s >= 0.1 else ""
    return f"{read_s:.2f} s reading, {work_s:.2f} s the job's work, {own_s:.2f} s batchrun{share}"


def progress_line(run: Run, rate: float, columns: int) -> str:
    """Return one line that fits a terminal: bar, records, rate a second, the time that is left."""
    words, total = progress_text(run, rate), total_of(run._asdict())
    width = min(BAR_WIDTH, columns - len(f"{run.job} [] {words}"))
    if width < 8 or not total:
        return f"{run.job} {words}"[:columns]
    return f"{run.job} {bar_text(run.read, total, width)} {words}"


def bar_text(read: int, total: int, width: int) -> str:
    """Return a bar of so many letters, and its ends: how far it is."""
    return f"[{'#' * (width * read // total):-<{width}}]"


def progress_text(run: Run, rate: float) -> str:
    """Return how far a run is in words, of the same width from beginning to end."""
    speed = f"{rate:>9,.0f}/s" if rate else " " * 11
    total = total_of(run._asdict())
    if not total:
        return f"{run.read:>12,} records {speed}"
    left_s = (total - run.read) / rate if rate else 0
    left = f"{duration_text(left_s):>6} left" if left_s else " " * 11
    read = f"{run.read:>{len(f'{total:,}')},} of {total:,}"
    return f"{share_text(run.read, total):>4}  {read} {speed} {left}"


# -- units of systemd, lines of cron ---------------------------------------------------------------

# Word of --every -> OnCalendar=, and the same in cron's fields. A minute of the job's own keeps
# jobs apart, and the hour from 3 is there once on every day on which clocks are changed.
EVERY = {
    "hourly": ("*-*-* *:{0:02}:00", "{0} * * * *"),
    "daily": ("*-*-* 03:{0:02}:00", "{0} 3 * * *"),
    "weekly": ("Mon *-*-* 03:{0:02}:00", "{0} 3 * * 1"),
    "monthly": ("*-*-01 03:{0:02}:00", "{0} 3 1 * *"),
}
# The least and the most of each field of a crontab, and names for numbers in the last two.
CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
CRON_NAMES = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|sun|mon|tue|wed|thu|fri|sat"


def is_cron(text: str) -> bool:
    """Tell whether text is the five fields of a crontab, each within its bounds."""
    fields = re.sub(CRON_NAMES, "1", text.lower()).split()
    return len(fields) == len(CRON) and all(map(_fits_cron, fields, CRON))


def _fits_cron(field: str, bounds: tuple[int, int]) -> bool:
    one = r"(?:\*|(\d+)(?:-(\d+))?)(?:/0*[1-9]\d*)?"
    parts = [re.fullmatch(one, part) for part in field.split(",")]
    ends = [[int(end) for end in part.groups() if end] for part in parts if part]
    return all(parts) and all([bounds[0], *e, bounds[1]] == sorted([*bounds, *e]) for e in ends)


UNIT_TYPES = "service|socket|target|path|timer|mount|automount|swap|device|slice|scope"


def are_units(text: str) -> bool:
    """Tell whether text is names of units, with specifiers or without, as OnFailure= takes them."""
    one = rf"(?!-)(?:[a-zA-Z0-9:_.\\@-]|%[a-zA-Z%])+\.(?:{UNIT_TYPES})"
    return bool(re.fullmatch(rf"{one}(?: {one})*", text))


# What no job can miss: each =yes. MemoryDenyWriteExecute and ProcSubset are not here: ctypes makes
# code at run time, and health reads /proc. A user's own systemd cannot make what is root's.
SANDBOX = "NoNewPrivileges LockPersonality RestrictRealtime RestrictSUIDSGID"
SANDBOX_OF_ROOT = """PrivateDevices ProtectClock ProtectControlGroups ProtectHostname
  ProtectKernelLogs ProtectKernelModules ProtectKernelTunables RestrictNamespaces"""
SANDBOX_MORE = """SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
ProtectSystem=strict
ProtectHome=read-only"""
NETWORK = "Wants=network-online.target\nAfter=network-online.target"
CAPABILITIES_OF_ROOT = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER"


class Timed(NamedTuple):
    """What is to be started by a timer, and how."""

    unit: str  # the name of its units, without the ending
    words: list[str]  # the command
    user: str  # "" in a user's own systemd
    writes: list[Path]  # the folders that it writes to; first that of the configuration
    stop_s: float  # how long a stop may take
    slow: str  # what a reader should know of that; comment lines, or nothing
    every: str  # a key of EVERY, OnCalendar= or cron's fields; "": the tick
    on_failure: str  # a unit, or nothing

    def when(self, way: int) -> str:
        """Return when it is started, as systemd (0) or cron (1) reads it."""
        return EVERY.get(self.every, (self.every,) * 2)[way].format(sum(self.unit.encode()) % 60)


def unit_word(text: object) -> str:
    """Return a word as a unit has it: quoted where that is needed, `%` doubled."""
    said = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return said if re.fullmatch(r"[\w/.,:=@%+-]+", said) else f'"{said}"'


def render_units(timed: Timed, marker: str) -> dict[str, str]:
    """Return the units that start something by a timer: name of the file -> its text."""
    title = f"[Unit]\nDescription=Batch job: {' '.join(timed.words[-2:])}"
    starts, restart, limit = "OnBootSec=2min\nOnUnitInactiveSec=5min", "no", ""
    if timed.every:
        starts = f"OnCalendar={timed.when(0)}\nPersistent=true\nRandomizedDelaySec=60"
        # exit codes are decisions and never restarted; the limit counts the timer's own starts too
        restart, limit_s = "on-abnormal\nRestartSec=30", "1h" if timed.every in EVERY else "5min"
        limit = f"StartLimitIntervalSec={limit_s}\nStartLimitBurst=5"
    first, *words = map(unit_word, timed.words)
    started = f"""{marker}
{title}
{NETWORK * bool(timed.user)}
{limit}
{f"OnFailure={timed.on_failure}" * bool(timed.on_failure)}
[Service]
Type=notify
NotifyAccess=main
{f"User={timed.user}" * bool(timed.user)}
ExecStart={first} {" ".join(words).replace("$", "$$")}
# A file of NAME=VALUE for settings that are read from the environment; it need not be there.
EnvironmentFile=-{f"{timed.writes[0]}/batchrun.env".replace("%", "%%")}
Restart={restart}
SuccessExitStatus=10 11 12 75
KillMode=mixed
{timed.slow}
TimeoutStopSec={timed.stop_s:.0f}
WatchdogSec=5min
OOMPolicy=continue
{sandbox_of(timed)}
"""
    timer = f"{marker}\n{title}\n[Timer]\n{starts}\n[Install]\nWantedBy=timers.target\n"
    files = {f"{timed.unit}.service": started, f"{timed.unit}.timer": timer}
    return {n: re.sub("\n+", "\n", text).replace("\n[", "\n\n[") for n, text in files.items()}


def sandbox_of(timed: Timed) -> str:
    """Return the lines that keep a service from all but what a job needs."""
    names, lines = SANDBOX.split(), ["SystemCallArchitectures=native", "UMask=0077"]
    if timed.user:
        names += SANDBOX_OF_ROOT.split()
        if not any(path.is_relative_to(tmp) for path in timed.writes for tmp in VOLATILE_FOLDERS):
            names.append("PrivateTmp")
        lines += [SANDBOX_MORE, f"ReadWritePaths={' '.join(map(unit_word, timed.writes))}"]
        lines += [f"CapabilityBoundingSet={CAPABILITIES_OF_ROOT * (timed.user == 'root')}"]
    return "\n".join([*(f"{name}=yes" for name in names), *lines])


# -- tables and the like ---------------------------------------------------------------------------
LABEL = "batch_job"  # whose it is; Prometheus keeps `job` for what it asked, and renames ours
METRICS = {  # of a job: name -> what it means, and its value in the job's document
    "last_success_timestamp_seconds": ("When it succeeded last.", "last_success"),
    "last_success_duration_seconds": ("From begin to end of that run.", "last_success_elapsed_s"),
    "run_records": ("Records read by the newest run.", "read"),
    "run_expected_records": ("Records that its source has, if that is known.", "expected"),
    "run_rejected_records": ("Records rejected by the newest run.", "rejected"),
    "run_paused_seconds": ("For how long health kept the newest run paused.", "paused_s"),
    "skipped_starts": ("Starts refused since the last success.", "refused_since_success"),
    "open_operations": ("External operations whose outcome is not known.", "unknown_operations"),
    "open_rejects": ("Rejected records that wait for a person.", "open_rejects"),
    "late": ("1 if no success came within expect_every.", "late"),
    "stalled": ("1 if the newest run has an owner and gets nothing done.", "stalled"),
}


def render_metrics(
    jobs: list[dict[str, Any]],
    lockfile: Lockfile | None,
    now: str,
    ticked_at: str | None,
    untold: int,
) -> str:
    """Return the metrics in Prometheus's text format 0.0.4 (not OpenMetrics); all are gauges."""
    age_s = seconds_between(lockfile.since, now) if lockfile and lockfile.since else None
    is_overdue = bool(lockfile and lockfile.overdue)
    pairs = [(job, state) for job in jobs for state in RunState]
    states = [({LABEL: j["job"], "state": s}, j["state"] == s) for j, s in pairs]
    gauges: dict[str, tuple[str, list[tuple[dict[str, str], Any]]]] = {
        "build_info": ("The version of batchrun.", [({"version": VERSION}, 1)]),
        "tick_timestamp_seconds": ("When the tick ran last.", [({}, ticked_at)]),
        "untold_alerts": ("Alerts that have not reached somebody.", [({}, untold)]),
        "maintenance": ("1 while maintenance is on.", [({}, bool(lockfile))]),
        "maintenance_age_seconds": ("For how long it is on.", [({}, age_s)]),
        "maintenance_overdue": ("1 if it should be over by now.", [({}, is_overdue)]),
    }
    for name, (means, key) in METRICS.items():
        gauges[name] = (means, [({LABEL: job["job"]}, job[key]) for job in jobs])
    gauges["run_state"] = ("1 for its state.", states)
    lines = chain.from_iterable(render_metric(name, *gauge) for name, gauge in gauges.items())
    return "\n".join([*lines, ""])


def render_metric(
    name: str, means: str, samples: Iterable[tuple[Mapping[str, str], Any]]
) -> list[str]:
    """Return the lines of one gauge; a sample without value is left out, a moment is in seconds."""
    lines = [f"# HELP batchrun_{name} {means}", f"# TYPE batchrun_{name} gauge"]
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    for labels, value in samples:
        shown = ",".join(f'{key}="{text.translate(escapes)}"' for key, text in labels.items())
        number = value if type(value) in (int, float) else int(bool(value))
        if name.endswith("timestamp_seconds") and value:
            number = datetime.fromisoformat(value).timestamp()
        lines += [f"batchrun_{name}{{{shown}}} {number}".replace("{}", "")] * (value is not None)
    return lines if len(lines) > 2 else []


def render_examined(rows: Iterable[Examined]) -> str:
    """Return what `doctor` asked, what came back, and what it means."""
    return "\n".join(
        f"{row.state:8} {row.asked} {row.answer}"
        + f" ({row.elapsed_s * 1000:.0f} ms)" * (row.elapsed_s >= 0.0005)
        + f"\n         {row.means}"
        + f"\n         to mend it: {row.todo}" * bool(row.todo)
        for row in rows
    )


def render_table(rows: Sequence[Sequence[str]], room: int = 0) -> str:
    """Return rows of text as columns; the first row is the heading.

    Its first cell is whole, for it may be typed, and so is its last one; in between CELL_WIDTH is
    the most. Each row is one line; in a terminal of so many columns, the cells that do not fit
    are below it, each with its name.
    """
    most = [sys.maxsize, *[CELL_WIDTH] * (len(rows[0]) - 2), sys.maxsize][-len(rows[0]) :]
    lines = [
        [cut(" ".join(cell.split()), width) for cell, width in zip(row, most, strict=True)]
        for row in rows
    ]
    columns = []
    for column in zip(*lines, strict=True):
        width = width_of(column)
        columns.append([cell + " " * (width - width_of([cell])) for cell in column])
    names = [name.strip() for name, *_ in columns]
    placed = (placed_cells(names, row, room) for row in zip(*columns, strict=True))
    return "\n".join(chain.from_iterable(placed))


def placed_cells(names: list[str], row: Sequence[str], room: int) -> Iterator[str]:
    """Yield a row's line, and one for each cell that has no room there."""
    beside = len(row)
    while beside > 1 and 0 < room < width_of(["  ".join(row[:beside]).rstrip()]):
        beside -= 1
    yield "  ".join(row[:beside]).rstrip()
    if list(map(str.strip, row)) != names:
        below = zip(names[beside:], map(str.strip, row[beside:]), strict=True)
        yield from (f"    {name}: {cell}" for name, cell in below if cell)


# What is broken only where it does not fit on a line of its own: a word, what is to be typed, and
# a number with its unit; and what comes before a line's text: its time, or its name.
WORD = r"""\s*(?:(?<=:\ )(?:batchrun|cd|chmod|chown|fuser|kill|ls|sudo|systemctl)\ .*
  |(?<=\ \ )batchrun\ .*|\d\S*\ (?:m?s|.B)\b\S*|\S+)"""
BEFORE_TEXT = r"\S+Z [A-Z]+ +|\s*\S.*?  +"


def fold(text: str, columns: int) -> str:
    """Return text whose lines fit a terminal, broken between words; 0 columns: as it is."""
    if not columns:
        return text
    lines = text.split("\n")
    pieces = ([n] if width_of([n]) <= columns else folded(n, columns) for n in lines)
    return "\n".join(chain.from_iterable(pieces))


def folded(line: str, columns: int) -> Iterator[str]:
    """Yield a line that is too long in pieces; each goes on below where its text began."""
    begin, piece = len(line) - len(line.lstrip()), ""
    if before := re.match(BEFORE_TEXT, line):
        begin = before.end() if before.end() <= columns // 2 else begin + 4
    for word in re.findall(WORD, line, re.VERBOSE):
        below = " " * begin + word.lstrip()
        if len(piece) > begin and width_of([piece + word]) > columns >= width_of([below]):
            yield piece
            piece = below
        else:
            piece += word
    yield piece


# -- sheets: what a report shows, once for HTML, Markdown and text ---------------------------------

LISTED_MOST = 100  # rows of a table on a sheet
KEPT_MOST = 20  # letters of a cell that is kept on one line: a moment
COMPARED_MOST = 500
GOOD_ENDS = (Ending.STOPPED, Ending.RECYCLED, Ending.CLEANED, Ending.AWAITS)
Box = tuple[float, float, float, float]  # from and to, in s; bottom and top, 0 to 1


class Bar(NamedTuple):
    """A cell of a table with a small bar, and how it differs from the median."""

    words: str
    share: float  # of the longest bar, 0 to 1
    change: str = ""

    def __str__(self) -> str:
        return f"{self.words} {self.change}".rstrip()


class Plot(NamedTuple):
    """A picture over the time of a run, made of boxes; flat ones are lines."""

    title: str
    words: str  # what it shows, for whoever does not see it
    layers: list[tuple[str, str, list[Box]]]  # its kind (a CSS class), what it is, the boxes
    ticks: list[tuple[float, str]]  # the vertical axis: where, 0 to 1, and what


class Part(NamedTuple):
    """One part of a sheet: sentences, what to type, pairs, pictures, a table, in this order."""

    title: str
    lines: Sequence[str] = ()
    todo: str = ""
    pairs: Sequence[tuple[str, str]] = ()
    plots: Sequence[Plot] = ()
    table: Sequence[Sequence[str | Bar]] = ()  # its first row is the heading


class Sheet(NamedTuple):
    """A report in parts, and the time that its plots have in common."""

    title: str
    parts: list[Part]
    began_at: str = ""
    until_s: float = 1.0
    gaps: Sequence[tuple[float, float]] = ()  # in which no attempt was under way


def sheet_of_run(summary: dict[str, Any]) -> Sheet:
    """Return a run's sheet, from its summary with its course."""
    began_at, free_at, gaps = summary["created_at"], summary["created_at"], []
    for attempt in summary["attempts"]:
        if free_at < attempt["began_at"]:
            ends = (free_at, attempt["began_at"])
            gaps.append((seconds_between(began_at, ends[0]), seconds_between(began_at, ends[1])))
        free_at = max(free_at, attempt["ended_at"] or attempt["began_at"])
    until_s = max(summary["duration_s"], 1.0)
    sheet = Sheet(f"{summary['job']}: {state_text(summary)}", [], began_at, until_s, gaps)
    shaded = seconds_text(sum(end - begin for begin, end in gaps))
    words = f"Time is in UTC. Shaded: no attempt was under way, {shaded} in all."
    plots = [*plots_of(summary, sheet), band_plot(summary, sheet)]
    parts = [part_of_end(summary), Part("Over time", [words], plots=plots), *tables_of(summary)]
    return sheet._replace(parts=parts)


def part_of_end(summary: dict[str, Any]) -> Part:
    """Return how a run stands, in words and numbers, and what to type."""
    pairs = [
        ("records read", of_all_text(summary)),
        *((name, f"{count:,}") for name, count in summary["counts"].items()),
        ("rejected", f"{summary['rejected']:,}"),
        ("records per second", number_text(summary["records_per_s"])),
        ("took", seconds_text(summary["duration_s"])),
        ("at work", seconds_text(summary["at_work_s"])),
        ("paused by health", seconds_text(summary["paused_s"])),
        ("attempts", f"{len(summary['attempts']):,}"),
        ("commits", f"{summary['number']:,}"),
        ("batches", f"{summary['batches']:,}"),
        ("95 of 100 batches within", seconds_text(summary["batch_p95_s"])),
    ]
    end = summary["ended_at"]
    ended = f"ended {moment_text(end)}" if end else "is not finished"
    lines = [
        f"It began {moment_text(summary['created_at'])} and {ended}.",
        *kin_of(summary),
        *dict.fromkeys(text for text in (summary["error"], summary["why"]) if text),
        f"Where the time went: {time_text(summary)}.",
    ]
    todo = summary["next"] if " report " not in summary["next"] else ""
    return Part(f"Run {summary['id']}", lines, todo, pairs)


def kin_of(summary: dict[str, Any]) -> Iterator[str]:
    """Yield what a run was begun to undo or to try again, and which rollbacks undo it."""
    if summary["retry_of"]:
        yield f"It is a retry of rejects of run {summary['retry_of']}."
    if undoes := summary["undoes"]:
        yield f"It is a rollback of run {undoes['run']} to batch {undoes['to_batch']}."
        yield from render_rollback(undoes)
    for each in summary["rollbacks"]:
        state = "has" if each["state"] == RunState.SUCCEEDED else f"is {each['state']} and has not"
        yield f"Run {each['run']} {state} rolled it back to batch {each['to_batch']}."


def tables_of(summary: dict[str, Any]) -> list[Part]:
    """Return what happened in a run as tables."""
    name = summary["id"]
    outcomes = [(row["outcome"], f"{row['operations']:,}") for row in summary["operations"]]
    unknown = [
        [o["key"], moment_text(o["claimed_at"]), o["why"] or ""] for o in summary["open_operations"]
    ]
    rejects = [
        [str(r["id"]), f"{r['number']:,}", r["loop"], r["state"], r["record"], r["reason"]]
        for r in summary["rejects"]
    ]
    released = [
        [f"{a['generation']}.{place}", r["name"], seconds_text(r["elapsed_s"]), r["error"] or ""]
        for a in summary["attempts"]
        for place, r in enumerate(a["releases"], 1)
    ]
    recorded = [
        [
            *(str(c["id"]), c["call"], moment_text(c["done_at"]) if c["done_at"] else "PENDING"),
            *(seconds_text(c["elapsed_s"]), c["error"] or ""),
        ]
        for c in summary["cleanups"]
    ]
    events = [[moment_text(e["at"]), e["what"], e["who"], e["why"]] for e in summary["events"]]
    return [
        listed("Attempts", ATTEMPT_HEADING, [row_of_attempt(a) for a in summary["attempts"]]),
        listed("Operations", OPERATION_HEADING, unknown, f"batchrun reconcile {name}", outcomes),
        listed("Rejects", REJECT_HEADING, rejects, f"batchrun rejects list {name}", first=True),
        listed("Releases, last in, first out", RELEASE_HEADING, released),
        listed("Recorded cleanups", ["id", "call", "done (UTC)", "took", "error"], recorded),
        listed("Events", ["when (UTC)", "what", "who", "why"], events),
    ]


ATTEMPT_HEADING = ["attempt", "began (UTC)", "took", "how it ended", "commits", "peak", "error"]
OPERATION_HEADING = ["operation of unknown outcome", "claimed (UTC)", "why"]
REJECT_HEADING = ["id", "commit", "loop", "state", "record", "reason"]
RELEASE_HEADING = ["attempt and place", "released", "took", "error"]


def row_of_attempt(attempt: dict[str, Any]) -> list[str]:
    """Return an attempt as a row of a table."""
    began_at, ended_at, peak = attempt["began_at"], attempt["ended_at"], attempt["peak_rss_bytes"]
    ending = attempt["ending"] or "going on, or left by its owner"
    ending += in_brackets(attempt["reason"])
    return [
        *(str(attempt["generation"]), moment_text(began_at)),
        seconds_text(seconds_between(began_at, ended_at) if ended_at else None),
        ending + ", charged as a try" * attempt["charged"],
        f"{attempt['commits']:,}",
        *(size_text(peak) if peak else "-", attempt["error"] or ""),
    ]


def listed(
    title: str,
    heading: list[str],
    rows: list[list[str]],
    todo: str = "",
    pairs: Sequence[tuple[str, str]] = (),
    *,
    first: bool = False,
) -> Part:
    """Return a part with a table of the newest rows, or the first, and how many there are."""
    if not rows:
        return Part(title, [] if pairs else ["None."], pairs=pairs)
    shown = rows[:LISTED_MOST] if first else rows[-LISTED_MOST:]
    which = f"The {'first' if first else 'newest'} {len(shown)} of {len(rows):,}; --json has all."
    return Part(title, [which] * (len(shown) < len(rows)), todo, pairs, table=[heading, *shown])


def number_text(amount: float | None) -> str:
    """Return a number, whole unless it is small, or `-`."""
    if amount is None:
        return "-"
    return f"{amount:,.0f}" if amount >= 10 or amount == int(amount) else f"{amount:.3g}"


def seconds_text(seconds: float | None) -> str:
    """Return a time for people, `85 ms`, `2.5 s`, `3m20s`, or `-`, as over a clock set back."""
    if seconds is None or seconds < 0:
        return "-"
    if seconds >= 60:
        return duration_text(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1000:.3g} ms"


# -- plots -----------------------------------------------------------------------------------------


def plots_of(summary: dict[str, Any], sheet: Sheet) -> Iterator[Plot]:
    """Yield the plots of amounts over time; one of which nothing is known is left out."""
    spans, span_s, p95_s = summary["spans"], summary["span_s"], summary["batch_p95_s"]
    worked = list(stretched(sheet, [span for span in spans if span["batches"]], span_s))
    if worked:
        rates = [(begin, end, span["records"] / (end - begin)) for begin, end, span in worked]
        yield step_plot("Records per second", "records/s", rates, number_text)
        end_s, ticks = up_to(max(span["longest_s"] for *_, span in worked), seconds_text)
        ranges, means = (
            [(begin, end, span[low] / end_s, span[high] / end_s) for begin, end, span in worked]
            for low, high in (("shortest_s", "longest_s"), ("mean_s", "mean_s"))
        )
        words = f"95 of 100 within {seconds_text(p95_s)}"
        limit = (0.0, sheet.until_s, p95_s / end_s, p95_s / end_s)
        layers = [("range", "shortest to longest", ranges), ("mean", "mean", means)]
        yield Plot("Batch durations", words, [*layers, ("limit", words, [limit])], ticks)
    for name, title, label, text in (
        ("rss_bytes", "Memory of the worker", "the most, RSS", size_text),
        ("available_bytes", "Memory available", "the least", size_text),
        ("open_connections", "Database connections", "the most", number_text),
    ):
        known = [span for span in spans if span[name] is not None]
        steps = [(begin, end, span[name]) for begin, end, span in stretched(sheet, known, span_s)]
        if steps:
            yield step_plot(title, label, steps, text)


def stretched(
    sheet: Sheet, spans: list[dict[str, Any]], span_s: float, *, forward: bool = False
) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """Yield spans with from and to: from the one before, or to the next; never over a gap."""
    times = [span["at_s"] + (0.0 if forward else span_s) for span in spans]
    times = [*times, sheet.until_s] if forward else [0.0, *times]
    for span, (begin, end) in zip(spans, pairwise(times), strict=True):
        # an attempt ends and begins amid a span
        gaps = [g for g in sheet.gaps if begin - span_s <= g[0] and g[1] <= end + span_s]
        first, last = (gaps[0][0], gaps[-1][1]) if gaps else (end, begin)
        if forward:
            yield begin, min(end, max(first, begin + span_s)), span
        else:
            yield max(begin, min(last, end - span_s)), end, span


def up_to(top: float, text: Callable[[float], str]) -> tuple[float, list[tuple[float, str]]]:
    """Return the end of an axis with room for `top`, and its ticks: each 1, 2 or 5 times 10^n."""
    ten = float(f"1e{f'{top or 1:e}'.partition('e')[2]}")
    step = next(ten * part for part in (0.2, 0.5, 1, 2) if top <= 5 * ten * part)
    count = max(1, -int(-top / step // 1))
    return step * count, [(n / count, text(step * n)) for n in range(count + 1)]


def step_plot(
    title: str, label: str, steps: list[tuple[float, float, float]], text: Callable[[float], str]
) -> Plot:
    """Return a plot of one amount over time: from, to, amount."""
    amounts = [amount for *_, amount in steps]
    end, ticks = up_to(max(amounts), text)
    boxes = [(begin, until, 0.0, amount / end) for begin, until, amount in steps]
    tops = [(begin, until, high, high) for begin, until, _, high in boxes]
    words = f"{label}: {text(min(amounts))} to {text(max(amounts))}, at last {text(amounts[-1])}"
    return Plot(title, words, [("range", "", boxes), ("mean", label, tops)], ticks)


def band_plot(summary: dict[str, Any], sheet: Sheet) -> Plot:
    """Return bands: attempts by how they ended, and each factor of health as it was found."""
    rows, words = [*FACTORS[::-1], "attempts"], []
    height, found = 1 / len(rows), {kind: list[Box]() for kind in BANDS}
    for place, factor in enumerate(FACTORS[::-1]):
        spans, bottom, bad_s = [s for s in summary["spans"] if s[factor]], place * height, 0.0
        for begin, end, span in stretched(sheet, spans, summary["span_s"], forward=True):
            is_bad = span[factor] == Wellness.BAD
            bad_s += (end - begin) * is_bad
            top = bottom + height * (0.8 if is_bad else 0.4)  # told apart in black and white too
            found[span[factor]].append((begin, end, bottom + 0.1 * height, top))
        said = f"bad for {seconds_text(bad_s)}" if spans else "not checked"
        words.append(f"{factor} {said}")
    for a in summary["attempts"]:
        moments = a["began_at"], a["ended_at"] or summary["until_at"]
        begin, end = (seconds_between(sheet.began_at, moment) for moment in moments)
        kind = "stopped" if a["ending"] in GOOD_ENDS else "bad" if a["ending"] else "unknown"
        kind = "ok" if a["ending"] == Ending.SUCCEEDED else kind
        found[kind].append((begin, end, 1 - 0.9 * height, 1 - 0.3 * height))
    layers = [(kind, BANDS[kind], boxes) for kind, boxes in found.items() if boxes]
    ticks = [((place + 0.4) * height, row) for place, row in enumerate(rows)]
    return Plot("Attempts and health", "; ".join(words[::-1]), layers, ticks)


BANDS = {"ok": "ok", "bad": "bad", "unknown": "unknown", "stopped": "stopped on purpose"}


# -- a comparison of runs --------------------------------------------------------------------------


def summarise_runs(rows: list[dict[str, Any]], since: str, job: str | None) -> dict[str, Any]:
    """Return runs beside each other as one JSON document; a change is 0.1 for a tenth more.

    Each is compared with the median of its job's runs that succeeded whole.
    """
    from statistics import median  # only where runs are compared

    jobs: dict[str, dict[str, Any]] = {row["job"]: {} for row in rows}
    for name, usual in jobs.items():
        mine = [row for row in rows if row["job"] == name]
        whole = [
            r for r in mine if r["state"] == "succeeded" and not (r["retry_of"] or r["rollback_of"])
        ]
        usual |= {"runs": len(mine), "succeeded": len(whole)}
        for amount in ("duration_s", "records_per_s"):
            known = [row[amount] for row in whole if row[amount] is not None]
            middle = usual[amount] = median(known) if known else None
            for row in mine:
                is_known = middle and row[amount] is not None
                row[f"{amount}_change"] = round(row[amount] / middle - 1, 4) if is_known else None
    return {"since": since, "job": job, "newest": COMPARED_MOST, "jobs": jobs, "runs": rows}


def sheet_of_runs(document: dict[str, Any]) -> Sheet:
    """Return a sheet that compares runs, job by job."""
    since = moment_text(document["since"])
    parts = [Part("Runs", [f"No run began since {since}."])] * (not document["runs"])
    if len(document["runs"]) == document["newest"]:
        parts = [Part("Not all", [f"Only the newest {document['newest']} runs are shown."])]
    for job, usual in sorted(document["jobs"].items()):
        runs = [run for run in document["runs"] if run["job"] == job]
        medians = seconds_text(usual["duration_s"]), number_text(usual["records_per_s"])
        counted = f"{several(usual['runs'], 'run')}, of them {usual['succeeded']} succeeded"
        said = f"{counted}; the median of those: {medians[0]}, {medians[1]} records/s."
        parts.append(Part(job, [said], table=[RUN_HEADING, *(row_of_run(r, runs) for r in runs)]))
    return Sheet(f"{document['job'] or 'All jobs'} since {since}", parts)


RUN_HEADING = ["run", "began (UTC)", "how it ended", "records", "took", "records/s"]
RUN_HEADING += ["rejected", "attempts", "paused"]


def row_of_run(run: dict[str, Any], runs: list[dict[str, Any]]) -> list[str | Bar]:
    """Return one run of a comparison as a row; its bars are relative to the job's other runs."""

    def bar(name: str, text: Callable[[float | None], str]) -> Bar:
        share = (run[name] or 0) / (max(other[name] or 0 for other in runs) or 1)
        change = run[f"{name}_change"]
        return Bar(text(run[name]), share, "" if change is None else f"{change:+.0%}")

    kind = "retry of rejects, " * bool(run["retry_of"]) + "rollback, " * bool(run["rollback_of"])
    return [
        *(run["run"], moment_text(run["began_at"]), kind + state_text(run), f"{run['records']:,}"),
        *(bar("duration_s", seconds_text), bar("records_per_s", number_text)),
        *(f"{run['rejected']:,}", str(run["attempts"]), seconds_text(run["paused_s"])),
    ]


# -- sheets as text, as Markdown, as HTML ----------------------------------------------------------


def render_sheet(sheet: Sheet, columns: int = 0) -> str:
    """Return a sheet as text for a terminal so wide; of its plots, what they show in words."""
    shown = [sheet.title]
    for part in sheet.parts:
        pairs = [*part.pairs, *((plot.title, plot.words) for plot in part.plots)]
        shown += ["", part.title, *part.lines, *(f"  {name:<24}  {value}" for name, value in pairs)]
        rows = [
            [f"{c} {'#' * round(8 * c.share)}" if isinstance(c, Bar) else c for c in row]
            for row in part.table
        ]
        shown += [render_table(rows, columns)] if rows else []
        shown += [f"to type: {part.todo}"] * bool(part.todo)
    return "\n".join(shown)


def render_markdown(sheet: Sheet) -> str:
    """Return a sheet as Markdown; of its plots, what they show in words."""
    shown = [f"# {as_markdown(sheet.title)}"]
    for part in sheet.parts:
        shown += ["", f"## {as_markdown(part.title)}"]
        shown += [text for line in part.lines for text in ("", as_markdown(line))]
        shown += ["", f"    {part.todo}"] * bool(part.todo)
        pairs = [*part.pairs, *((plot.title, plot.words) for plot in part.plots)]
        shown += [""] * bool(pairs)
        shown += [f"- **{as_markdown(name)}**: {as_markdown(value)}" for name, value in pairs]
        rows = [f"| {' | '.join(as_markdown(str(cell)) for cell in row)} |" for row in part.table]
        shown += ["", rows[0], "|" + " --- |" * len(part.table[0]), *rows[1:]] if rows else []
    return "\n".join(shown)


def as_markdown(text: str) -> str:
    """Return text of others on one line, so that Markdown shows it and does nothing else."""
    line = " ".join(mask_secrets(text).split())
    signs = r"(\*{3})|([\\`*_\[\]<>|#~&])"
    line = re.sub(signs, lambda found: found[1] or f"\\{found[2]}", line)
    begun = r"^\d+(?=[.)]\s)|^(?=[-+]\s|--|=)"  # else a list or a heading
    return re.sub(begun, r"\g<0>\\", line)


def as_html(text: str) -> str:
    """Return text of others so that a browser shows it and does nothing else."""
    signs = {38: "&amp;", 60: "&lt;", 62: "&gt;", 34: "&quot;"}
    return visible(mask_secrets(text)).translate(signs)


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b2026; --soft: #57606b; --line: #d5dae0;
  --shade: #e9ecf0; --blue: #2a6db0; --pale: #a9c9e8; --ok: #35855a; --bad: #c2352b;
  --grey: #8b95a1; --amber: #b26a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e7eaee; --soft: #a5afba;
  --line: #343c46; --shade: #252b33; --blue: #6fb0ee; --pale: #2f5578; --ok: #5fbf8b;
  --bad: #ff7f73; --grey: #77818d; --amber: #f0a840; } }
* { box-sizing: border-box; print-color-adjust: exact; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; } p { margin: .4rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p, td { white-space: pre-line; } dt, th, footer, caption, small, .legend { color: var(--soft); }
pre { margin: .6rem 0; padding: .5rem .8rem; background: var(--shade); white-space: pre-wrap; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .5rem 1rem;
  margin: 1rem 0; } dl div { border-left: 3px solid var(--pale); padding-left: .6rem; }
dt, caption, .legend { font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption, th, td { text-align: left; vertical-align: top; } th, .kept { white-space: nowrap; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
td:last-child:not(.kept) { min-width: 14rem; }
td i { display: block; height: .3rem; background: var(--blue); min-width: 1px; }
h2, caption { break-after: avoid; } tr, figure { break-inside: avoid; }
figure { margin: 1.2rem 0 1.8rem; } figcaption { margin-bottom: .4rem; }
.legend { margin-left: .8rem; display: inline-block; }
.legend::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .3em;
  background: var(--c); }
.legend.mean::before, .legend.limit::before { height: 2px; vertical-align: .3em; }
.plot { position: relative; height: 8rem; margin: 0 .8rem 1.4rem 6.2rem; }
.plot svg { width: 100%; height: 100%; display: block; overflow: visible; }
.plot span { position: absolute; font-size: .8rem; line-height: 1; color: var(--soft);
  white-space: nowrap; }
.y { right: 100%; margin-right: .4rem; transform: translateY(50%); }
.x { top: 100%; margin-top: .4rem; transform: translateX(-50%); }
path { vector-effect: non-scaling-stroke; fill: none; shape-rendering: crispEdges; }
.grid { stroke: var(--line); } .gap { fill: var(--shade); } .range { --c: var(--pale); }
.mean { --c: var(--blue); } .limit { --c: var(--amber); stroke-dasharray: 6 4; }
path.mean, path.limit { stroke: var(--c); stroke-width: 2; } .stopped { --c: var(--blue); }
.ok { --c: var(--ok); } .bad { --c: var(--bad); } .unknown { --c: var(--grey); }
path.range, path.ok, path.bad, path.unknown, path.stopped { fill: var(--c); }
@media (max-width: 40rem) { .x:nth-last-of-type(even) { display: none; }
  .plot { margin-left: 5.4rem; } }
@media screen and (max-width: 60rem) { table, tbody, tr, td, caption { display: block; }
  thead, td:empty { display: none; } tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .kept { white-space: pre-line; } td { border: 0; padding: 0; }
  td::before { content: attr(title) ": "; color: var(--soft); } }
@media print { body { font-size: 12px; padding: 0; } }
"""


def render_html(sheet: Sheet, now: str) -> str:
    """Return a sheet as one HTML file: nothing is fetched, and no script is in it."""
    title, parts = as_html(sheet.title), "".join(html_part(part, sheet) for part in sheet.parts)
    made = f"Written by batchrun {VERSION} at {moment_text(now)}. All times are UTC."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main><h1>{title}</h1>{parts}"
        f"</main>\n<footer>{made}</footer></body></html>\n"
    )


def html_part(part: Part, sheet: Sheet) -> str:
    """Return one part of a sheet as HTML."""
    lines = "".join(f"<p>{as_html(line)}</p>" for line in part.lines)
    lines += f"<pre>{as_html(part.todo)}</pre>" * bool(part.todo)
    pairs = "".join(f"<div><dt>{as_html(n)}</dt><dd>{as_html(v)}</dd></div>" for n, v in part.pairs)
    pairs = f"<dl>{pairs}</dl>" * bool(pairs)
    plots = "".join(html_plot(plot, sheet) for plot in part.plots)
    table = html_table(part.title, part.table) if part.table else ""
    return f"\n<section><h2>{as_html(part.title)}</h2>{lines}{pairs}{plots}{table}</section>"


def html_table(caption: str, rows: Sequence[Sequence[str | Bar]]) -> str:
    """Return a table as HTML; on a narrow screen each cell is shown with its column's name."""
    names = [as_html(str(name)) for name in rows[0]]
    heading = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "\n".join(
        f"<tr>{''.join(html_cell(n, cell) for n, cell in zip(names, row, strict=True))}</tr>"
        for row in rows[1:]
    )
    caption = f"<caption>{as_html(caption)}, {several(len(rows) - 1, 'row')}</caption>"
    return f"<table>{caption}<thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>"


def html_cell(name: str, cell: str | Bar) -> str:
    """Return a cell of the column of that name as HTML; a short one is kept on one line."""
    kept = ' class="kept"' if len(str(cell)) <= KEPT_MOST else ""
    if isinstance(cell, str):
        return f'<td title="{name}"{kept}>{as_html(cell)}</td>'
    words = f"{as_html(cell.words)} <small>{as_html(cell.change)}</small>"
    return f'<td title="{name}"{kept}>{words}<i style="width:{cell.share:.0%}"></i></td>'


def html_plot(plot: Plot, sheet: Sheet) -> str:
    """Return a plot as HTML: boxes in SVG that is stretched, labels that are not."""
    title, words = as_html(plot.title), as_html(plot.words)
    legends = [(kind, as_html(label)) for kind, label, _ in plot.layers if label]
    legend = "".join(f'<span class="legend {kind}">{label}</span>' for kind, label in legends)
    shaded = [(begin, end, 0.0, 1.0) for begin, end in sheet.gaps]
    lines = [(0.0, sheet.until_s, at, at) for at, _ in plot.ticks]
    layers = [("gap", "", shaded), ("grid", "", lines), *plot.layers]
    shapes = "".join(svg_path(kind, boxes, sheet.until_s) for kind, _, boxes in layers if boxes)
    labels = [f'<span class="y" style="bottom:{y:.1%}">{text}</span>' for y, text in plot.ticks]
    labels += [f'<span class="x" style="left:{x:.1%}">{text}</span>' for x, text in times_of(sheet)]
    return (
        f"<figure><figcaption><strong>{title}</strong>{legend}</figcaption>"
        '<div class="plot"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img">'
        f"<title>{title}</title><desc>{words}</desc>{shapes}</svg>{''.join(labels)}</div></figure>"
    )


def svg_path(kind: str, boxes: list[Box], until_s: float) -> str:
    """Return boxes as one SVG path; a flat one is a line."""
    drawn = []
    for begin, end, low, high in boxes:
        left, right = 1000 * begin / until_s, 1000 * end / until_s
        up = f"V{100 - 100 * high:.1f}H{left:.1f}Z" if high > low else ""
        drawn.append(f"M{left:.1f} {100 - 100 * low:.1f}H{right:.1f}{up}")
    return f'<path class="{kind}" d="{"".join(drawn)}"/>'


DAY_S = 86_400
TIME_STEPS_S = [n * unit_s for unit_s in (1, 60) for n in (1, 2, 5, 10, 15, 30)]
TIME_STEPS_S += [3600 * n for n in (1, 2, 3, 6, 12)]


def times_of(sheet: Sheet) -> Iterator[tuple[float, str]]:
    """Yield up to seven round moments of the time axis: where, 0 to 1, and what they say."""
    at_least = sheet.until_s / 6
    steps = (step for step in TIME_STEPS_S if step >= at_least)
    step = next(steps, DAY_S * (1 + int(at_least / DAY_S)))
    began = datetime.fromisoformat(sheet.began_at)
    at_s = -began.timestamp() % step
    while at_s <= sheet.until_s:
        moment = began + timedelta(seconds=at_s)
        is_midnight = moment.timestamp() % DAY_S < 1
        form = "%d %b" if is_midnight else "%H:%M:%S" if step < 60 else "%H:%M"
        yield at_s / sheet.until_s, moment.strftime(form)
        at_s += step


# ======================================================================================
# 14. Command line: words to calls; no decisions
# ======================================================================================
#
# Results go to stdout, progress and errors to stderr. A terminal gets one live line; the journal,
# or -v, plain lines; everything else (cron, pipes) nothing on success and one letter otherwise.
# Output that cannot be written never stops a run. A result that cannot be written is OutputRefused,
# unless its reader went away. What is shown has no control characters but those that draw, and on
# a terminal its lines are broken between words, unless they are pasted into a file.
#
# click takes 40 ms to load and a worker parses nothing: `command` only keeps what a command is
# made of, and `build_command_line` makes click's objects of it. A command returns its Result, which
# is written once it has closed what it opened, or an exit code if it has written for itself.

GROUPS = {  # of commands, as --help shows them: the first words of each
    "Every day": "run resume status report logs",
    "Deploy": "maintenance drain rehearse pause cancel",
    "Answer and mend": "approve reconcile check repair rejects rollback",
    "Set up": "init jobs metrics doctor backup prune unit",
}
FIRST_WORDS = " ".join(GROUPS.values()).split()
PLAIN_LINE_EVERY_S = 60.0
ERROR, WARNING, NEWS = 3, 4, 6  # priorities of the journal's lines, those of syslog


class Result(NamedTuple):
    """What a command found out: written as text, or with --json as one document."""

    text: str
    document: dict[str, Any]
    found: bool = False  # something that a person should look at: exit code 3
    is_pasted: bool = False  # into a file, so that its lines are as long as they are


Ended = Result | ExitCode  # how a command ended, which may have written its result by itself


class CommandParts(NamedTuple):
    """What a command is made of."""

    name: str
    function: Callable[..., Ended]
    parameters: Sequence[tuple[Sequence[str], dict[str, Any]]]
    exits: list[ExitCode]


COMMANDS: list[CommandParts] = []


def word(*names: str, **more: Any) -> tuple[Sequence[str], dict[str, Any]]:
    """Declare an argument ("run") or an option ("--all") of a command, for click.

    `reads` makes of its text what the command is given, or says by ValueError what is wanted.
    """
    return names, more


class OneOf(tuple[str, ...]):
    """Reads one of some words, in upper or lower case."""

    __slots__ = ()

    def __call__(self, text: str) -> str:
        """Return the word as it is declared."""
        for each in self:
            if each.lower() == text.lower():
                return each
        raise ValueError(f"{', '.join(self[:-1])} or {self[-1]} is wanted")


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that are no smaller."""

    def read(text: str) -> int:
        if re.fullmatch(r"\d{1,18}", text) and int(text) >= least:  # as the ledger can keep it
            return int(text)
        raise ValueError(f"a whole number is wanted, {least} or more")

    return read


def compact_json(text: str) -> str:
    """Read JSON."""
    try:
        return _compact(json.loads(text))
    except ValueError as error:
        raise ValueError(f"JSON is wanted ({error})") from error


GLOBAL = (
    word("--config", metavar="PATH", help="Default: BATCHRUN_CONFIG, else ./batchrun.toml."),
    word("--json", "as_json", is_flag=True, help="Write results as JSON."),
    word("-q", "--quiet", is_flag=True, help="Write nothing but results and errors."),
    word("-v", "--verbose", is_flag=True, help="Write plain lines about what happens."),
)
BLOCKED = OneOf(["refuse", "defer"])
RUNNING = (
    word("--accept-source", is_flag=True, help="Go on although the source changed."),
    word("--accept-settings", is_flag=True, help="Go on although settings changed."),
    word("--batches", reads=at_least(1), metavar="N", help="Stop after N batches (exit 75)."),
    word("--when-blocked", reads=BLOCKED, help="By maintenance. Default: as the job says."),
    word("--in-process", is_flag=True, help="Run the job in this interpreter, to debug it."),
)
RUN_EXITS = list(ExitCode)


def command(*parameters: Any, exits: Iterable[Any] = ()) -> Callable[..., Any]:
    """Declare a command: its parameters, its exit codes beyond 0, 2 and 5.

    Its words are those of the function's name: `maintenance_on_command` is `maintenance on`.
    """
    always = (ExitCode.DONE, ExitCode.USAGE, ExitCode.STATE_DIRECTORY)

    def declare(function: Callable[..., Ended]) -> Callable[..., Ended]:
        name = function.__name__.removesuffix("_command").replace("_", " ")
        COMMANDS.append(CommandParts(name, function, parameters, sorted({*always, *exits})))
        return function

    return declare


# -- where words go ------------------------------------------------------------------------------


class Console:
    """Where a command's words go; a Watcher of supervisors."""

    def __init__(self, host: Host) -> None:
        self.as_json = False  # results are JSON
        self.as_lines = False  # what happens is JSON too, in lines before the result
        self.quiet = False  # only results and letters
        self.verbose = False  # plain lines about what happens, also on a terminal
        self.tells = False  # say in words what happens, whoever reads it; without progress
        self.config = ""  # the path given by --config or BATCHRUN_CONFIG
        self._host = host
        self._drawn = False  # whether a live line is there now
        self._began = (0, 0.0, 0)  # the run whose progress is shown, since when, and records then
        # the clock of it stands still while a run is paused by health
        self._written = (0, 0.0)  # the tenth of the last plain line, and when

    @property
    def plain(self) -> bool:
        """Whether what happens is written as plain lines."""
        return not self.quiet and (self.verbose or self._host.is_journal())

    @property
    def live(self) -> bool:
        """Whether progress is one line, drawn again and again."""
        written = self.quiet or self.as_json or self.plain
        return not written and self._host.terminal_columns() > 0

    def result(self, shown: Result) -> None:
        """Write a command's result: text, or with --json one document.

        Raises:
            OutputRefused: it cannot be written; a reader that has gone away is no error.
        """
        with contextlib.suppress(BrokenPipeError):
            self.write(shown.text, shown.document, is_pasted=shown.is_pasted)

    def write(self, text: str, document: Any, *, is_pasted: bool = False) -> None:
        """Write a result, or a part of one, to a reader that may go away: BrokenPipeError."""
        columns = 0 if is_pasted else self._host.terminal_columns(1)
        shown = fold(visible(self.typed(text)), columns)
        shown = json.dumps(document, default=str) if self.as_json else shown
        try:
            write_all(1, f"{mask_secrets(shown)}\n".encode())
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputRefused(error) from error

    def say(self, text: str, *, aloud: bool = False) -> None:
        """Show one line about what happens; `aloud`: whoever reads, also where all is silent."""
        if self.as_lines:
            write_line(1, json.dumps({"type": "said", "text": mask_secrets(text)}))
        elif aloud or self.tells or self.live or self.plain:
            self._tell(text, WARNING if text.startswith("warning: ") else NEWS)

    def progress(self, run: Run) -> None:
        """Draw the live line anew, or write a line now and then: each tenth, and each minute."""
        now = self._host.monotonic() - run.paused_s
        if run.key != self._began[0]:
            self._began, self._written = (run.key, now, run.read), (0, 0.0)
        _, began, read_before = self._began
        rate = (run.read - read_before) / (now - began) if now > began else 0.0
        if self.live:
            self.draw(progress_line(run, rate, self._host.terminal_columns() - 3))
            return
        tenth = 10 * run.read // run.expected if run.expected else 0
        if tenth > self._written[0] or now > max(began, self._written[1]) + PLAIN_LINE_EVERY_S:
            self._written = (tenth, now)
            if self.as_lines:
                document = {"type": "progress", "run": run.id, "read": run.read}
                document |= {"expected": run.expected, "records_per_s": round(rate, 1)}
                write_line(1, json.dumps(document))
            elif self.plain:
                self._tell(f"{run.job} {progress_text(run, rate)}".rstrip(), NEWS)

    def draw(self, line: str) -> None:
        """Put a live line in place of the one that is there; an empty one takes it away."""
        if self.live if line else self._drawn:
            line = line[: self._host.terminal_columns() - 1]
            with contextlib.suppress(OSError):
                write_all(2, f"\r\x1b[K{line}".encode(errors="replace"))
            self._drawn = bool(line)

    def letter(self, text: str, code: int) -> None:
        """Write an error; with --json the last line of stderr is an object."""
        self.show_end(text)
        if self.as_json:
            text = visible(mask_secrets(self.typed(text)))
            write_line(2, json.dumps({"type": "error", "exit_code": int(code), "text": text}))
        else:
            self._tell(text, NEWS if code in FINE else ERROR)

    def show_end(self, text: str) -> None:
        """Tell who started us how it ended, if they listen: it is read elsewhere."""
        if not self._host.end_is_heard:
            return
        config = Path(self.config or "batchrun.toml").absolute()
        text = typed_elsewhere(text, config, "|".join(FIRST_WORDS))
        self._host.show_end(visible(mask_secrets(text)))

    def _tell(self, text: str, priority: int) -> None:
        """Write lines to standard error; the journal is told how much each matters."""
        self.draw("")
        text = mask_secrets(self.typed(text))
        if self._host.is_journal():
            text = re.sub("^", f"<{priority}>", text, flags=re.MULTILINE)
        write_line(2, text)

    def typed(self, text: str) -> str:
        """Return text whose lines to type can be typed anywhere: with --config, if it was given."""
        if not self.config:
            return text
        here = f"batchrun --config {_typed(self.config)} "
        return re.sub(rf"\bbatchrun (?=(?:{'|'.join(FIRST_WORDS)})\b)", lambda _: here, text)


# -- what every command starts from --------------------------------------------------------------


class App:
    """The machine, the configuration, and where words go; made once for one command."""

    def __init__(self) -> None:
        self.host = Host()
        self.console = Console(self.host)

    def take(self, config: str | None, **ways: bool) -> None:
        """Keep the global options, given before the command or after it."""
        self.console.config = str(Path(config).absolute()) if config else self.console.config
        for name, is_on in ways.items():
            setattr(self.console, name, getattr(self.console, name) or is_on)

    @property
    def columns(self) -> int:
        """The width of the terminal that results go to; 0 if it is none."""
        return self.host.terminal_columns(1)

    @functools.cached_property
    def who(self) -> str:
        """The user who asks."""
        return self.host.user_name(os.getuid())

    @functools.cached_property
    def config(self) -> Config:
        """The configuration; read on first use."""
        return load_config(Path(self.console.config or "batchrun.toml").absolute())

    def require_trusted(self) -> None:
        """Refuse a configuration that another user could change: it says what is run."""
        check_trusted(self.config.path, what="the configuration")

    @functools.cached_property
    def state(self) -> StateDirectory:
        """The state directory that the configuration names."""
        return StateDirectory(self.config, self.host)

    def ledger(self, *, write: bool, create: bool = False) -> contextlib.closing[Ledger]:
        """Open the ledger that is there; make one only if that is said."""
        if write:
            self.require_trusted()
        self.state.require_fit(create=create, write=write)
        return contextlib.closing(self.state.open_ledger(create=create, write=write))

    def find_run(self, ledger: Ledger, name: str) -> Run:
        """Return the run that is meant: a job's unfinished or latest one, or an id's beginning."""
        if name in self.config.jobs:
            run = ledger.latest(name)
            if run is None:
                raise NotFound(f"The job {name} has never run.", todo=f"Type: batchrun run {name}")
            return run
        found = ledger.runs_like(name)
        if len(found) == 1:
            return found[0]
        count = f"There are {len(found)} runs" if found else "There is no run"
        what = f"{count} whose id begins with {name!r}, and no job of that name."
        raise NotFound(what, todo="See: batchrun status")

    def supervise(self, launch: Launch) -> Outcome:
        """Run a job to its end, write how it ended, and tell whoever is to be told."""
        self.require_trusted()
        self.console.as_lines, may_write = self.console.as_json, True
        try:
            outcome = self._supervise(launch)
        except (Busy, MaintenanceOn):
            raise  # at once: nothing has changed
        except BatchrunError as error:
            self.console.letter(str(error), error.exit_code)
            outcome = Outcome(error.exit_code, letter=str(error))
            may_write = not isinstance(error, OutcomeUnknown)
        ended = ping_of(outcome.run, launch, outcome.exit_code) + unfit(outcome, launch.job)
        if self.config.tells and may_write:
            may_write = self.tell(ended, waits=not outcome.signalled)
        elif self.config.tells:
            self._tell_unrecorded(ended)
        return outcome if may_write else outcome._replace(signalled=True)

    def tell(self, ended: Sequence[Alert] = (), *, ticks: bool = False, waits: bool = True) -> bool:
        """Raise and tell alerts, write the metrics; whatever goes wrong here fails no run.

        Returns:
            Whether this process may write more: the outcome of no commit is unknown.
        """
        expected = [j.name for j in self.config.jobs.values() if ticks and j.expect_every_s]
        try:
            with self.ledger(write=True, create=bool(expected)) as ledger:
                if ticks:
                    ledger.tick(expected)
                alerts = Alerts(self.config, ledger, self.host)
                alerts.look(self.state.maintenance.find(), ended)
                if waits:  # else somebody waits for our end; the next one tells
                    alerts.deliver()
                if self.config.metrics_folder:
                    self._keep_metrics(self.config.metrics_folder, ledger, aloud=not ticks)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run has ended as it has
            self.console.say(f"warning: not everybody was told: {error}")
            if waits and isinstance(error, StateDirectoryError):
                self._tell_unrecorded(ended)
            return not isinstance(error, OutcomeUnknown)
        return True

    def _tell_unrecorded(self, ended: Sequence[Alert]) -> None:
        """Tell alerts where the ledger can only be read; not for who has taken the wrong user."""
        with contextlib.suppress(BatchrunError, OSError), self.state.reading() as ledger:
            if self.state.path.stat().st_uid == os.geteuid():
                alerts = Alerts(self.config, ledger, self.host)
                alerts.tell_unrecorded(self.state.maintenance.find(), ended)

    def _keep_metrics(self, folder: Path, ledger: Ledger, *, aloud: bool) -> None:
        """Write the metrics; say that they cannot be written, `aloud` or where all is said."""
        try:
            write_metrics(folder, self.metrics(ledger))
        except BatchrunError as error:
            said = f"warning: metrics_folder: {error.what} No run is changed by that."
            self.console.say(said, aloud=aloud)

    def metrics(self, ledger: Ledger) -> str:
        """Return how all jobs stand, as Prometheus reads it."""
        lockfile, untold = self.state.maintenance.find(), len(ledger.undelivered())
        stuck = ledger.stuck_cleanups()
        jobs = [stand(self, ledger, name, lockfile, stuck, None) for name in self.config.jobs]
        return render_metrics(jobs, lockfile, self.host.now(), ledger.ticked_at(), untold)

    def _supervise(self, launch: Launch) -> Outcome:
        warning = self.state.warning()
        if warning and (self.console.live or self.console.plain):
            self.console.say(warning)
        began = self.host.monotonic()
        outcome = Supervisor(self.config, launch, self.host, self.console).run()
        if outcome.letter:
            self.console.letter(outcome.letter, outcome.exit_code)
        if outcome.run is None:
            return outcome
        run = outcome.run._asdict()
        self.console.tells = False
        took = duration_text(self.host.monotonic() - began)
        text = f"{run['job']}: run {run['id']} {state_text(run)} after {took}: {counts_text(run)}"
        if not outcome.letter:
            self.console.show_end(text)
        if self.console.as_json:
            document = {"type": "result", "exit_code": int(outcome.exit_code), "run": run["id"]}
            names = ("job", "state", "reason", "read", "rejected", "counts")
            write_line(1, json.dumps({**document, **{name: run[name] for name in names}}))
        elif not outcome.letter:
            todo = f"\nto go on: batchrun resume {run['id']}" * (not outcome.run.finished)
            self.console.say(text + todo)
        return outcome


# -- every day -----------------------------------------------------------------------------------


@command(
    word("job"),
    word("--fresh", is_flag=True, help="Begin at record 1; an unfinished run is cancelled first."),
    word("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting, for this run."),
    *RUNNING,
    exits=RUN_EXITS,
)
def run_command(app: App, *, job: str, **asked: Any) -> ExitCode:
    """Run a job, or go on with its unfinished run."""
    app.host.systemd.ready()  # before any wait, and also if the start is refused
    launch = launch_of(job, **asked)
    if launch.fresh or launch.overrides:
        require_settings(app.config, launch)
    return app.supervise(launch).exit_code


@command(
    word("run", required=False),
    word("--all", "everything", is_flag=True, help="The tick: go on with all that is due."),
    *RUNNING,
    exits=RUN_EXITS,
)
def resume_command(app: App, *, run: str | None, everything: bool, **asked: Any) -> Ended:
    """Go on with an unfinished run; without RUN, the only one."""
    app.host.systemd.ready()
    if everything:
        if run or any(asked.values()):
            what = "--all goes on with all that is due, each as it was started."
            raise ConfigurationError(what, todo="Write: batchrun resume --all, or resume RUN")
        return tick(app)
    with app.ledger(write=True) as ledger:
        found = app.find_run(ledger, run) if run else only_unfinished(ledger)
    if found.finished:
        return already(found)
    app.console.tells = not app.console.quiet
    launch = launch_of(found.job, only_resume=True, by_person=True, **asked)
    return app.supervise(launch).exit_code


def launch_of(job: str, **asked: Any) -> Launch:
    """Return what the options of a command that runs a job ask for."""
    names = ("source", "settings")
    accepted = tuple(name for name in names if asked.pop(f"accept_{name}", False))
    overrides = parse_overrides(asked.pop("settings", ()))
    when = asked.pop("when_blocked") or ""
    return Launch(job, overrides=overrides, acceptances=accepted, when_blocked=when, **asked)


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return `--set NAME=VALUE` options as a dict; refuse what must not stand on a command line."""
    overrides = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {pair!r} has no '='.", todo="Write: --set NAME=VALUE")
        if looks_secret(name, value):
            raise ConfigurationError(
                f"--set {name} looks like a secret.",
                why="A command line can be read by everyone on the machine.",
                unchanged="Nothing was started.",
                todo=f'Write in the configuration: {name} = {{ env = "NAME" }}',
            )
        overrides[name] = value
    return overrides


def already(run: Run) -> Result:
    """Return that a run is finished."""
    has = "was" if run.state == RunState.CANCELLED else "has"
    document = {"type": "result", "exit_code": 0, "run": run.id, "state": run.state}
    return Result(f"run {run.id} of {run.job} {has} {run.state} already", document)


FINE = (ExitCode.DONE, ExitCode.DONE_WITH_REJECTS, ExitCode.STOPPED)


def worst_of(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code that most needs to be seen: one that is fine hides no other."""
    return max(codes, key=lambda code: (code not in FINE, code))


def tick(app: App) -> ExitCode:
    """Go on with every run that is due, one after another; 0 if none was, else the worst end."""
    app.console.as_lines = app.console.as_json
    if not app.tell(ticks=True):
        raise OutcomeUnknown(
            "What the tick has recorded may or may not be on the disk.",
            unchanged="Nothing was started.",
            todo=f"Check the disk of {app.state.path}; the next tick goes on.",
        )
    try:
        with app.ledger(write=True) as ledger:
            unfinished = ledger.all_unfinished()
            known = [run for run in unfinished if run.job in app.config.jobs]
            due = [run for run in known if standing(ledger, run, app.host).is_due]
            prune_beside(app.state, ledger, app.config, app.host, "tick")
    except NotFound:
        return ExitCode.DONE
    codes = [ExitCode.DONE]
    for run in due:
        try:
            outcome = app.supervise(Launch(run.job, only_resume=True, when_blocked="refuse"))
        except BatchrunError as error:
            if error.exit_code in (ExitCode.BUSY, ExitCode.MAINTENANCE):
                app.console.say(str(error))
                continue
            app.console.letter(str(error), error.exit_code)
            outcome = Outcome(error.exit_code)
        codes.append(outcome.exit_code)
        if outcome.signalled:
            break  # it was the tick that was to stop; the next one goes on
    return worst_of(codes)


@command(
    word("name", required=False, metavar="[RUN|JOB]"),
    word("--watch", is_flag=True, help="Draw it anew each second, on a terminal, until q."),
    exits=(ExitCode.FINDINGS, ExitCode.NOT_FOUND),
)
def status_command(app: App, *, name: str | None, watch: bool) -> Ended:
    """Show how jobs stand, why, and what to type next."""
    if watch:
        return watch_status(app, name)
    said, document = status_of(app, name, screen_of)
    jobs, maintenance, now = document["jobs"], document["maintenance"], app.host.now()
    text = render_one_status(jobs[0], now) if name else render_status(jobs, now, app.columns)
    for job in jobs:
        job["next"] = app.console.typed(job["next"])
    needs_someone = any(job["needs_someone"] for job in jobs)
    is_overdue = maintenance is not None and maintenance["overdue"]
    return Result("\n".join([*said, text]), document, found=bool(needs_someone or is_overdue))


DRAW_EVERY_S, LOOK_EVERY_S = 1.0, 0.2


@contextlib.contextmanager
def whole_screen() -> Iterator[None]:
    """Take all of the terminal to draw on; it is given back as it was on every way out."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        tty.setcbreak(0)
        ways = termios.tcgetattr(0)
        ways[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell this screen
        termios.tcsetattr(0, termios.TCSANOW, ways)
        write_all(1, b"\x1b[?1049h\x1b[?25l")
        yield
    finally:
        with contextlib.suppress(OSError):
            write_all(1, b"\x1b[?25h\x1b[?1049l")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def show(host: Host, lines: list[str], encoding: str) -> bool:
    """Draw lines and wait until they are to be drawn anew; False if it is to end.

    They are drawn anew each second, and at once if the terminal has another size.
    """
    import select

    size, until = host.terminal_size(1), host.monotonic() + DRAW_EVERY_S
    text = "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J"
    try:
        write_all(1, text.encode(encoding, "replace"))
        while host.monotonic() < until and size == host.terminal_size(1):
            if select.select([0], [], [], LOOK_EVERY_S)[0]:
                return bool(typed := os.read(0, 100)) and b"q" not in typed.lower()
    except OSError:  # the terminal is gone
        return False
    return True


def watch_status(app: App, name: str | None) -> ExitCode:
    """Draw how jobs stand until q or Ctrl-C is typed or the terminal is gone; reads only."""
    if app.console.as_json or not (os.isatty(0) and app.columns):
        what = "status --watch draws on a terminal, and here is none (or TERM is dumb, or --json)."
        raise ConfigurationError(what, todo=f"Type: batchrun status {name or ''}".rstrip())
    encoding = sys.stdout.encoding or "ascii"
    bars = PLAIN_BARS if "█".encode(encoding, "ignore") == b"" else BARS
    status_of(app, name)  # what is wrong is told before the screen is taken
    with contextlib.suppress(KeyboardInterrupt), whole_screen():
        while show(app.host, live_view(app, name, bars), encoding):
            pass
    return ExitCode.DONE


def live_view(app: App, name: str | None, bars: str) -> list[str]:
    """Return what the screen shows now, line by line."""
    now, tail, (columns, rows) = app.host.now(), list[str](), app.host.terminal_size(1)
    said, document = status_of(app, name, live_of)
    head = [f"{now[:10]} {now[11:19]}Z  q quits", *said, ""]
    if name and (job := document["jobs"][0])["run"]:
        tail = ["", *job["live"]["events"]]
        head += render_live(job, now, columns, bars)
    else:
        head += render_status(document["jobs"], now, columns).splitlines()
    return frame(list(map(app.console.typed, head)), tail, columns, rows)


# What a job's document is to have beyond its line in the table.
More = Callable[[App, Ledger, Run], dict[str, Any]]


def status_of(
    app: App, name: str | None, more: More | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Return what is to be said before all else, and how jobs stand, as one JSON document."""
    lockfile = app.state.maintenance.find()
    with app.ledger(write=False) as ledger:
        known = lockfile, ledger.stuck_cleanups(), more if name else None
        jobs = [stand(app, ledger, each, *known) for each in ([name] if name else app.config.jobs)]
        barrier = ledger.barrier()
        drain = ledger.drain_of(barrier)
    said = render_lockfile(lockfile, app.host.now()) if lockfile else []
    said += [drain_text(drain, barrier)] if drain and barrier and lockfile else []
    said += [warning] if (warning := app.state.warning()) else []
    document = {"jobs": jobs, "maintenance": lockfile and lockfile._asdict(), "warning": warning}
    return said, {**document, "drain": drain and drain._asdict()}


def stand(
    app: App,
    ledger: Ledger,
    name: str,
    lockfile: Lockfile | None,
    stuck: list[Cleanup],
    more: More | None,
) -> dict[str, Any]:
    """Return how one job, or a run by its id, stands."""
    run = ledger.latest(name) if name in app.config.jobs else app.find_run(ledger, name)
    job = run.job if run else name
    never = Standing(RunState.WAITING, "", f"batchrun run {job}")
    stands = standing(ledger, run, app.host) if run else never
    known, success = app.config.jobs.get(job), ledger.last_success(job)
    closed = lockfile is not None and closes(lockfile.scopes, job, known.tags if known else ())
    made = summarise_job(
        *(job, run, closed_standing(stands, closed=closed), success),
        ledger.refused_since_success(job),
        stuck=[stuck_cleanup(ledger, cleanup) for cleanup in stuck if cleanup.job == job],
        rate=ledger.rate(run) if run and stands.state in OWNED else 0.0,
        stalls=stalled(ledger, known, run, app.host) if known else None,
        late=late(ledger, known, app.host, lockfile) if known else "",
        left_open=ledger.left_open(job),
    )
    if run and more:
        about = {"about": summarise_about(ledger, run, app.host), **more(app, ledger, run)}
        obstacles = about.pop("obstacles", [])
        made["why"] = "\n".join(filter(None, [made["why"], *obstacles]))
        made |= {**about, "needs_someone": made["needs_someone"] or bool(obstacles)}
    return made


def screen_of(app: App, ledger: Ledger, run: Run) -> dict[str, Any]:
    """Return what the screen of a run has and the live view has not: leaks, and what is in its way.

    Of one that rests its job's file is imported to know that, if it is this user's own.
    """
    leaks, obstacles = [event.why for event in ledger.events(run, what=LEAK)], list[str]()
    if run.finished or owners_of(ledger, run, app.host):
        return {"leaks": leaks}
    with contextlib.suppress(OSError):
        if holders := JobLock(app.state.lock_path(run.job)).owners(app.host):
            obstacles.append(f"The job's lock is held by pid {', '.join(map(str, holders))}.")
    if run.job in app.config.jobs and app.state.path.stat().st_uid == os.geteuid():
        sys.dont_write_bytecode = True
        try:
            app.require_trusted()
            finding = cannot_go_on(app.config, app.state, ledger, run, {})
        except BatchrunError as error:
            finding = Finding(error.what, error.why, error.todo)
        if finding:
            obstacles += [finding.what, finding.why]
            obstacles += [finding.todo] * (not finding.todo.startswith("batchrun cancel"))
    return {"leaks": leaks, "obstacles": obstacles}


def live_of(_: App, ledger: Ledger, run: Run) -> dict[str, Any]:
    """Return what the live view of a run has beyond its screen."""
    events = ledger.events(run, after=max(0, ledger.newest_event() - 10 * LIVE_ROWS))
    readings = ledger.readings(run, LIVE_ROWS)
    live: dict[str, Any] = {"events": [f"{event_line(event)}" for event in events[-LIVE_ROWS:]]}
    for gauge in ("rss_bytes", "connections"):
        live[gauge] = [getattr(reading, gauge) for reading in readings]
    return {"live": live}


@command(
    word("run", required=False, metavar="[RUN|drain]"),
    word("number", required=False, reads=at_least(1), metavar="[ID]"),
    word("--since", metavar="30d", help="Compare the runs begun since then: of RUN's job, or all."),
    word("--html", reads=Path, metavar="FILE", help="Write a page for a browser."),
    word("--markdown", is_flag=True, help="Write it as Markdown."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND],
)
def report_command(app: App, *, run: str | None, number: int | None, **how: Any) -> Result:
    """Tell what happened in a run, attempt by attempt; or in a drain, run by run."""
    is_drain = run == "drain" and not any(how.values())
    if not is_drain and (number is not None or run == "drain"):
        what = "A report is of one RUN or JOB, or of `drain` and its number without options."
        raise ConfigurationError(what, todo=f"Write: batchrun report {run}")
    if not (run or how["since"]) or (how["markdown"] and (how["html"] or app.console.as_json)):
        what = "A report is of a run, or --since a moment; in one of its forms."
        raise ConfigurationError(what, todo="Write: batchrun report RUN --html FILE")
    with app.ledger(write=False) as ledger:
        if is_drain:
            return result_of_drain(app, ledger, ledger.drain(number))
        found = app.find_run(ledger, run) if run else None
        if how["since"]:
            since = moment_of("--since", how["since"], app.host.now())
            rows = ledger.summaries(since, found and found.job, COMPARED_MOST)
            for row in (row for row in rows if row["state"] in OWNED):  # the ledger's word alone
                one = app.find_run(ledger, row["run"])
                row["state"] = standing(ledger, one, app.host).state
            document = summarise_runs(rows, since, found and found.job)
            return result_of_report(app, document, sheet_of_runs(document), how)
        document = summary_of(app, ledger, cast("Run", found))
    return result_of_report(app, document, sheet_of_run(document), how)


def summary_of(app: App, ledger: Ledger, run: Run) -> dict[str, Any]:
    """Return all that is known of a run, with its course, why it is as it is, and what to type."""
    rows = ledger.attempts(run), ledger.rejects(run), ledger.events(run)
    undoes = summarise_rollback(ledger, ledger.rollback_by(run)) if run.rollback_of else None
    of_rollbacks = undoes, ledger.rollbacks(run)
    stands = standing(ledger, run, app.host)
    summary = summarise(run, *rows, ledger.cleanups(run), *of_rollbacks) | ledger.course(run)
    return summary | {"state": stands.state, "why": stands.why, "next": stands.todo}


def result_of_report(
    app: App, document: dict[str, Any], sheet: Sheet, how: Mapping[str, Any]
) -> Result:
    """Return a report in the form that was asked for, or write it to its file."""
    if how["html"]:
        path = place_of_report(str(how["html"]))
        parts = [part._replace(todo=app.console.typed(part.todo)) for part in sheet.parts]
        content = render_html(sheet._replace(parts=parts), app.host.now()).encode()
        with writing_of(path):
            write_atomically(path, content, mode=0o666)
        text, document = f"written: {path}", {"html": str(path), "bytes": len(content)}
    else:
        text = render_markdown(sheet) if how["markdown"] else render_sheet(sheet, app.columns)
    return Result(text, document, is_pasted=how["markdown"])


FOLLOW_EVERY_S = 0.25
LEVEL_HELP = "No lower ones: INFO, WARNING, ERROR."


@command(
    word("run"),
    word("-f", "--follow", is_flag=True, help="Go on until the run stops, or Ctrl-C."),
    word("--level", reads=OneOf(LEVELS), default="DEBUG", metavar="LEVEL", help=LEVEL_HELP),
    word("--since", metavar="2h|TIME", help="Nothing older."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND],
)
def logs_command(app: App, *, run: str, follow: bool, level: str, since: str | None) -> ExitCode:
    """Show what a run's job logged and printed, and what batchrun did, in order."""
    after = moment_of("--since", since, app.host.now()) if since else ""
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in log_lines(app, run, follow=follow):
            if line.at >= after and LEVELS.get(line.level, LEVELS["INFO"]) >= LEVELS[level]:
                app.console.write(str(line), {"type": "log", **line._asdict()})
    return ExitCode.DONE


def log_lines(app: App, name: str, *, follow: bool) -> Iterator[LogLine]:
    """Yield the lines of a run's log and its events, ordered by their time at each look."""
    import heapq

    log, seen, goes_on = None, 0, True
    while goes_on:
        with app.ledger(write=False) as ledger:  # never kept open: that would keep the WAL
            run = app.find_run(ledger, name)
            events = ledger.events(run, after=seen)
            goes_on = follow and bool(owners_of(ledger, run, app.host))
        name, seen = run.id, events[-1].id if events else seen
        log = log or LogFile(app.state.log_path(run), run.created_at)
        lines = log.new_lines(to_end=not goes_on)
        yield from heapq.merge(map(event_line, events), lines, key=attrgetter("at"))
        if goes_on:
            app.host.sleep(FOLLOW_EVERY_S)
    if log and log.refused:
        raise Incomplete(log.refused)


def result_of_drain(app: App, ledger: Ledger, drain: Drain | None) -> Result:
    """Return what became of the runs that a drain found; sums that do not add up are a finding."""
    if drain is None:
        raise NotFound("There is no such drain.", todo="To begin one: batchrun drain")
    account = Drainer(app.config, ledger, app.host, app.console, app.who).account(drain)
    summary = summarise_drain(drain, account, summarise_turned_away(ledger, account.barrier))
    return Result(render_drain(summary), summary, found=not summary["adds_up"])


# -- deploy, answer and mend ---------------------------------------------------------------------


@command(
    word("--reason", default="", metavar="TEXT", help="Why, for all who meet it."),
    word("--until", metavar="+30m|TIME", help="When it is to end; after that it is loud."),
    word("--job", "jobs", multiple=True, metavar="NAME", help="Close this job, not everything."),
    word("--tag", "tags", multiple=True, metavar="NAME", help="Close the jobs with this tag."),
    word("--version", "versions", multiple=True, metavar="NAME<N", help="... below version N."),
    word("--by", default="", metavar="WHO", help="Who. Default: the user."),
    exits=[ExitCode.NOT_FOUND, ExitCode.MAINTENANCE, ExitCode.PERSON_NEEDED],
)
def maintenance_on_command(
    app: App, *, by: str, reason: str, until: str | None, **scopes: tuple[str, ...]
) -> Result:
    """Close the door: nothing new starts, what runs goes on."""
    closed = scopes_of(app.config, **scopes)
    moment = moment_of("--until", until, app.host.now(), sign="+") if until else None
    words = {"by": by or app.who, "reason": mask_secrets(reason)}
    with app.ledger(write=True, create=True) as ledger:
        begin = app.state.maintenance.begin
        lockfile = begin(ledger, app.who, until=moment, scopes=closed, **words)
    text = "\n".join(render_lockfile(lockfile, app.host.now()))
    return Result(text, {"maintenance": lockfile._asdict()})


@command(
    word("--force", is_flag=True, help="Also if unfinished runs could not go on; recorded."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND],
)
def maintenance_off_command(app: App, *, force: bool) -> Result:
    """Open the door; begins nothing, that is for the tick."""
    with app.ledger(write=True) as ledger:
        closed = app.state.maintenance.find() is not None
        findings = rehearsal(app.config, app.state, ledger, {}) if closed else []
        if findings and not force:
            said = [line for finding in findings for line in (finding.what, finding.why) if line]
            document = {"findings": [finding._asdict() for finding in findings]}
            return Result("\n".join([*said, STAYS_ON]), document, found=True)
        overridden = "; ".join(finding.what for finding in findings)
        why = f"by --force, although: {overridden}" if findings else "switched off"
        document = summarise_barrier(ledger, app.state.maintenance.end(ledger, app.who, why))
    return Result(render_barrier(document), document)


STAYS_ON = """Maintenance stays on: nothing was changed, and nothing starts. Type one of:
  batchrun maintenance off           once it is mended (converter, old file, setting)
  batchrun maintenance off --force   to open it all the same, which is recorded"""


@command(exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND])
def maintenance_status_command(app: App) -> Result:
    """Tell whether the door is closed, since when, by whom, and whom it turned away."""
    with app.ledger(write=False) as ledger:
        document = summarise_barrier(ledger, ledger.barrier())
    lockfile = app.state.maintenance.find()
    lines = render_lockfile(lockfile, app.host.now()) if lockfile else ["maintenance is off"]
    document["maintenance"] = lockfile and lockfile._asdict()
    document["barrier"] = document["barrier"] if lockfile else None
    is_overdue = bool(lockfile and lockfile.overdue)
    return Result("\n".join([*lines, *render_turned_away(document)]), document, found=is_overdue)


@command(
    word("--deadline", reads=parse_duration, default="10m", metavar="10m", help="Wait so long."),
    word("--finish", is_flag=True, help="Let runs end by themselves; ask none to stop."),
    word("--then", reads=OneOf(["leave", "interrupt"]), default="leave", help="At the deadline."),
    word("--reason", default="", metavar="TEXT", help="Why, if the door is still open."),
    exits=[code for code in DRAIN_ENDS if code is not None],
)
def drain_command(app: App, *, deadline: float, finish: bool, then: str, reason: str) -> ExitCode:
    """Close the door, let what runs stop at its next safe point, and prove it."""
    app.console.tells = not app.console.quiet
    wish = DrainWish(deadline, finish, interrupts=then == "interrupt")
    with app.ledger(write=True, create=True) as ledger:
        with contextlib.suppress(MaintenanceOn):  # as it is closed already
            words = {"by": app.who, "reason": mask_secrets(reason)}
            app.state.maintenance.begin(ledger, app.who, until=None, scopes=[], **words)
        drain = Drainer(app.config, ledger, app.host, app.console, app.who).run(wish)
        if drain is None:
            what = "Maintenance was ended in this moment; nothing was drained."
            raise BatchrunError(what, todo="To begin anew: batchrun drain")
        app.console.result(result_of_drain(app, ledger, drain))
        return ExitCode(cast("int", drain.exit_code))


def scopes_of(
    config: Config, *, jobs: Sequence[str], tags: Sequence[str], versions: Sequence[str]
) -> list[str]:
    """Return what is to be closed as scopes; none is everything."""
    known = {tag for job in config.jobs.values() for tag in job.tags}
    for tag in [tag for tag in tags if tag not in known]:
        what, why = f"No job has the tag {tag!r}.", f"Tags: {', '.join(sorted(known)) or 'none'}."
        raise ConfigurationError(what, why=why, unchanged="Nothing was changed.")
    scopes = [f"job:{config.job(name).name}" for name in jobs] + [f"tag:{tag}" for tag in tags]
    for version in versions:
        name, _, below = version.partition("<")
        if not re.fullmatch("[0-9]{1,9}", below):
            what, todo = f"--version {version!r} is not NAME<N.", "Write: --version 'NAME<4'"
            raise ConfigurationError(what, unchanged="Nothing was changed.", todo=todo)
        scopes.append(f"version:{config.job(name).name}<{below}")
    return scopes


def moment_of(option: str, text: str, now: str, sign: str = "") -> str:
    """Return a moment as UTC text: a duration before now, or a time; local without a zone.

    With sign "+" it is a duration after now, and is to come.
    """
    with contextlib.suppress(ValueError, OverflowError):
        try:
            seconds = parse_duration(text.removeprefix(sign))
            begun = datetime.fromisoformat(now)
            moment = begun + timedelta(seconds=seconds if sign else -seconds)
        except ValueError:
            moment = datetime.fromisoformat(text).astimezone()
        found = utc_text(int(moment.timestamp() * 1000) * 1_000_000)
        if not sign or found > now:
            return found
        raise ConfigurationError(f"{option} {text!r} has passed.", unchanged="Nothing was changed.")
    what = f"{option} {text!r} is neither a duration nor a moment."
    todo = f"Write: {option} {sign}30m, or {option} 2026-01-31T17:30"
    raise ConfigurationError(what, unchanged="Nothing was changed.", todo=todo)


@command(
    word("--as-version", multiple=True, metavar="[JOB=]N", help="Ask about version N instead."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND],
)
def rehearse_command(app: App, *, as_version: tuple[str, ...]) -> Result:
    """Ask if every unfinished run could go on with the jobs as installed."""
    app.require_trusted()
    versions = parse_versions(app.config, as_version)
    with app.ledger(write=False) as ledger:
        count = len(ledger.all_unfinished())
        findings = rehearsal(app.config, app.state, ledger, versions)
    said = [line for found in findings for line in (found.what, found.why, found.todo) if line]
    text = "\n".join(said) or f"all of {count} unfinished runs could go on"
    document = {"runs": count, "findings": [finding._asdict() for finding in findings]}
    return Result(text, document, found=bool(findings))


def parse_versions(config: Config, words: tuple[str, ...]) -> dict[str, int]:
    """Return `--as-version JOB=N` or `N`, which means all jobs, as job -> version."""
    versions: dict[str, int] = {}
    for each in words:
        job, _, number = each.rpartition("=")
        if not number.isdecimal():
            raise ConfigurationError(f"--as-version {each!r} has no number.", todo="Write: JOB=3")
        versions |= dict.fromkeys([config.job(job).name] if job else config.jobs, int(number))
    return versions


WAIT = word("--wait", is_flag=True, help="Return when it has stopped, an hour at most.")


@command(word("run"), WAIT, exits=[ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.INTERRUPTED])
def pause_command(app: App, *, run: str, wait: bool) -> Result:
    """Pause a run at its next safe point, until `resume RUN`."""
    return stopped(app, run, Request.PAUSE, wait=wait)


@command(
    word("run"),
    WAIT,
    word("--kill", is_flag=True, help="End its processes: TERM, after 10 s or stop_grace KILL."),
    word("--forget-cleanups", metavar="WHY", help="Call none of its pending cleanups any more."),
    exits=RUN_EXITS,
)
def cancel_command(
    app: App, *, run: str, wait: bool, kill: bool, forget_cleanups: str | None
) -> Ended:
    """Cancel a run at its next safe point, for good; call the cleanups that are left of it."""
    if forget_cleanups is not None:
        with app.ledger(write=True) as ledger:
            ledger.forget_cleanups(app.find_run(ledger, run), app.who, forget_cleanups)
    if (found := with_cleanups_left(app, run)) is None:
        told = stopped(app, run, Request.CANCEL, wait=wait, kill=kill)
        found = with_cleanups_left(app, told.document["run"]) if kill or wait else None
        if found is None:
            return told
    launch = Launch(found.job, cancels=found.id, when_blocked="refuse")
    outcome = Supervisor(app.config, launch, app.host, app.console).run()
    if outcome.letter:
        app.console.letter(outcome.letter, outcome.exit_code)
    with app.ledger(write=False) as ledger:
        run_left = cast("Run", outcome.run)
        app.console.result(result_of_stop(app, ledger, run_left, Request.CANCEL, is_done=True))
    return outcome.exit_code


def with_cleanups_left(app: App, name: str) -> Run | None:
    """Return the run of that name if nobody owns it and cleanups of it are still to be called."""
    with app.ledger(write=True) as ledger:
        found = app.find_run(ledger, name)
        left = any(c.run == found.id for c in ledger.pending_cleanups(found.job))
    can = (found.finished or found.job in app.config.jobs) and left
    return found if can and not is_owned(app.state, found.job) else None


def stopped(app: App, name: str, request: Request, *, wait: bool, kill: bool = False) -> Result:
    """Pause or cancel a run; return which of both happened: it is done, or it is asked for."""
    app.console.tells = not app.console.quiet
    with app.ledger(write=True) as ledger:
        run = app.find_run(ledger, name)
        if run.finished:
            return already(run)
        stopper = Stopper(app.state, ledger, run, request, app.who)
        is_done = stopper.stop()
        if (kill or wait) and not is_done:
            known = [app.config.jobs[run.job].stop_grace_s] * (run.job in app.config.jobs)
            grace_s = min([KILL_AFTER_INTERRUPT_S, *known]) if kill else None
            stopper.wait(app.host, app.console.say, kill_after_s=grace_s)
            is_done = True
        return result_of_stop(app, ledger, ledger.run(run.key), request, is_done=is_done)


def result_of_stop(
    app: App, ledger: Ledger, run: Run, request: Request, *, is_done: bool
) -> Result:
    """Return what became of a wish to stop a run."""
    stands = standing(ledger, run, app.host)
    has = "has" if run.state in (RunState.SUCCEEDED, RunState.FAILED) else "is"
    asked = f" ({run.request} is asked for)" * bool(run.request)
    unknown = f"\n{stands.why}\nto find out: {stands.todo}"
    text = f"{has} {run.state}{asked}" + unknown * (run.finished and stands.needs_someone)
    if not is_done:
        done = "paused" if request == Request.PAUSE else "cancelled"
        frozen = f"\n{stands.why}\nto end it: batchrun cancel --kill {run.id}"
        text = f"will be {done} at its next safe point" + frozen * stands.needs_someone
    elif run.state == RunState.WAITING:
        text = f"waits; only batchrun resume {run.id} begins it"
    document = {"run": run.id, "request": request, "done": is_done, "state": run.state}
    return Result(f"run {run.id} of {run.job} {text}", document)


@command(
    word("run"),
    word("name"),
    word("--why", required=True, metavar="TEXT", help="The reason, kept with the answer."),
    word("--by", metavar="WHO", help="Who decided, if it is not you."),
    exits=[ExitCode.FAILED, ExitCode.NOT_FOUND],
)
def approve_command(app: App, *, run: str, name: str, why: str, by: str | None) -> Result:
    """Approve what a run asks for; the tick or `resume` goes on."""
    who, reason = mask_secrets(by or app.who), mask_secrets(why)
    with app.ledger(write=True) as ledger:
        found = app.find_run(ledger, run)
        ledger.approve(found, name, who, reason, app.who)
        stands = standing(ledger, ledger.run(found.key), app.host)
    text = f"run {found.id} of {found.job}: {name!r} is approved by {who}"
    then = "the tick goes on with it; at once" if stands.is_due else "to type"
    document = {"run": found.id, "approval": name, "who": who, "why": reason}
    return Result(f"{text}\n{then}: {stands.todo}", document)


@command(
    word("run", required=False),
    word("--lookup", is_flag=True, help="Ask the destinations by the jobs' own lookups."),
    word("--confirm", multiple=True, metavar="KEY", help="It was done."),
    word("--receipt", reads=compact_json, metavar="JSON", help="What the destination gave for it."),
    word("--absent", multiple=True, metavar="KEY", help="It was not done, and may be called."),
    word("--why", default="", metavar="TEXT", help="How you know, kept with the answer."),
    word("--by", default="", metavar="WHO", help="Who decided, if it is not you."),
    word("--apply", "applies", is_flag=True, help="Record it; without, only show it."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND, ExitCode.BUSY],
)
def reconcile_command(
    app: App, *, run: str | None, lookup: bool, applies: bool, **said: Any
) -> Result:
    """List operations of unknown outcome, and answer what became of them."""
    if (said["confirm"] or said["absent"]) and not said["why"].strip():
        raise half_answer("An answer needs --why.")
    who = said["by"] or app.who
    told = Told(0, None, said["receipt"], mask_secrets(who), mask_secrets(said["why"]))
    app.console.tells = not app.console.quiet
    with app.ledger(write=applies) as ledger:
        reconciler = Reconciler(app.config, ledger, app.host, app.console.say)
        found = app.find_run(ledger, run) if run else None
        keys_of = {FREED: said["absent"], CONFIRMED: said["confirm"]}
        rows = by_person(reconciler.unknown(found), keys_of, told, of_run=found is not None)
        rows = reconciler.settled(rows, app.who, lookup=lookup, applies=applies)
        return result_of_answers(app, ledger, rows, applies=applies)


def result_of_answers(app: App, ledger: Ledger, rows: list[Answered], *, applies: bool) -> Result:
    """Return what is known of operations; a finding while the outcome of one is unknown."""
    documents = [summarise_answered(row, applied=applies) for row in rows]
    left = sum(not each["applied"] for each in documents)
    text = render_answered(documents, app.columns) if documents else "no operation is unknown"
    if any(each["outcome"] and not applies for each in documents):
        text += "\nnothing is recorded yet: type it again with --apply"
    elif left:
        first = next(each for each in documents if not each["applied"])
        asks = ["batchrun reconcile --lookup --apply"] * any(d["can_look_up"] for d in documents)
        lines = [*asks, *answer_lines(first["run"], first["key"])]
        text += "\nto type: " + "\n     or: ".join(lines)
    else:
        runs = {row.run.key: row.run for row in rows}.values()
        text += "".join([f"\n{answered_text(ledger, run, app.host)}" for run in runs])
    return Result(text, {"operations": documents, "open": left}, found=left > 0)


def answered_text(ledger: Ledger, run: Run, host: Host) -> str:
    """Return what follows for a run whose operations all have their outcome now."""
    stands, of = standing(ledger, ledger.run(run.key), host), f"run {run.id} of {run.job}"
    if stands.is_due:
        return f"the tick goes on with {of}; at once: {stands.todo}"
    return f"{of} is {stands.state}; {'see' if run.finished else 'to type'}: {stands.todo}"


@command(exits=[ExitCode.FINDINGS, ExitCode.PERSON_NEEDED])
def check_command(app: App) -> Result:
    """Compare ledger, checkpoints, marks and images; changes nothing."""
    with app.ledger(write=False) as ledger:
        findings = [*check(ledger, app.state.store, app.config.jobs)]
        findings += [*check_images(ledger, app.state), *check_rollbacks(app.config)]
        for store in app.state.stores():
            require_witnesses_known(ledger, store)
        notes = known_losses(ledger)
    said = [f"{f.what}\n  {f.why}\n  to type: {f.todo}" for f in findings]
    text = "\n".join([*(said or ["ledger and checkpoints agree"]), *notes])
    document = {"findings": [finding._asdict() for finding in findings], "notes": notes}
    return Result(text, document, found=bool(findings))


@command(
    word("run", required=False),
    word("--apply", is_flag=True, help="Do it; without, only show what would be done."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND, ExitCode.BUSY],
)
def repair_command(app: App, *, run: str | None, apply: bool) -> Result:
    """Make the ledger agree with the checkpoints (copied aside)."""
    app.state.require_fit(create=False)
    repair = find_repair(app.state)
    adopt = [(why, c) for why, c in repair.adopt if repair.lost or c.run.startswith(run or "")]
    strays = [(why, path) for why, path in repair.strays if path.stem.startswith(run or "")]
    if run and not repair.lost and not adopt and not strays:
        with app.ledger(write=False) as ledger:
            app.find_run(ledger, run)
    repair = Repair(repair.lost, adopt, strays)
    lines = [f"the ledger is made anew: {repair.lost}"] if repair.lost else []
    lines += [f"run {c.run} of {c.job}: {why}; adopt its commit {c.number}" for why, c in adopt]
    lines += [f"{path}: {why}; move it aside" for why, path in strays]
    documents = [{"run": c.run, "job": c.job, "number": c.number, "why": why} for why, c in adopt]
    aside: list[Path] = []
    if apply and lines:
        app.require_trusted()
        aside = apply_repair(app.state, repair, app.host)
        lines.append(f"done; copied aside before: {', '.join(map(str, aside))}")
    todo = "to do it: " + " ".join(["batchrun repair", *([run] if run else []), "--apply"])
    lines += [todo] * (bool(lines) and not apply)
    document = {"lost": repair.lost, "repairs": documents, "applied": apply, "aside": aside}
    document["strays"] = [path for _, path in strays]
    text = "\n".join(lines) or "nothing to repair"
    return Result(text, document, found=bool(lines) and not apply)


IDS = word("ids", nargs=-1, reads=at_least(1), metavar="[ID]...")


@command(word("run", required=False), IDS, exits=[ExitCode.NOT_FOUND])
def rejects_list_command(app: App, *, run: str | None, ids: tuple[int, ...]) -> Result:
    """List rejected records; without RUN, the runs of which some wait for a person."""
    if run is not None:
        table = functools.partial(render_rejects, columns=app.columns)
        return result_of_rejects(app, run, ids, table)
    with app.ledger(write=False) as ledger:
        found = ledger.runs_with_open_rejects()
    rows = [["run", "job", "ended", "open rejects"]]
    rows += [[run.id, run.job, moment_text(run.ended_at), str(count)] for run, count in found]
    documents = [{"run": run.id, "job": run.job, "open": count} for run, count in found]
    text = render_table(rows, app.columns) if found else "no open rejects"
    return Result(text, {"runs": documents})


@command(word("run"), IDS, exits=[ExitCode.NOT_FOUND])
def rejects_show_command(app: App, *, run: str, ids: tuple[int, ...]) -> Result:
    """Show all that is kept of rejected records."""
    return result_of_rejects(app, run, ids, lambda each: "\n".join(map(render_reject, each)))


def result_of_rejects(
    app: App, name: str, ids: Sequence[int], render: Callable[[list[dict[str, Any]]], str]
) -> Result:
    """Return rejects of a run."""
    with app.ledger(write=False) as ledger:
        run, rows = rejects_of(app, ledger, name, ids)
    rejects = [summarise_reject(row) for row in rows]
    return Result(render(rejects) if rejects else "no rejects", {"run": run.id, "rejects": rejects})


def rejects_of(
    app: App, ledger: Ledger, name: str, ids: Sequence[int]
) -> tuple[Run, list[RejectRow]]:
    """Return a run and the rejects of it that are meant: without ids, all."""
    run = app.find_run(ledger, name)
    rows = ledger.rejects(run)
    if unknown := set(ids) - {row.id for row in rows}:
        what = f"Run {run.id} has no reject {min(unknown)}; it has {len(rows)}."
        raise NotFound(what, todo=f"See: batchrun rejects list {run.id}")
    return run, [row for row in rows if not ids or row.id in ids]


@command(word("run"), IDS, *RUNNING[2:], exits=RUN_EXITS)
def rejects_retry_command(app: App, *, run: str, ids: tuple[int, ...], **asked: Any) -> ExitCode:
    """Run open rejects again through their job, as a run of their own."""
    with app.ledger(write=True) as ledger:
        found, rows = rejects_of(app, ledger, run, ids)
        if not found.finished and not found.rollback_of:
            raise unfinished_before_retry(ledger, found)
    if found.rollback_of:
        what = f"Run {found.id} is a rollback; its rejects are no records of the job."
        raise ConfigurationError(what, todo=f"Mend them by hand: batchrun rejects show {found.id}")
    retry = Retry(found, [row.spot for row in rows])
    launch = launch_of(found.job, **asked)
    launch = launch._replace(by_person=True, overrides=found.overrides, retry=retry)
    return app.supervise(launch).exit_code


@command(
    word("run"),
    IDS,
    word("--why", required=True, metavar="TEXT", help="Why they may go, for the record."),
    exits=[ExitCode.NOT_FOUND, ExitCode.PERSON_NEEDED],
)
def rejects_drop_command(app: App, *, run: str, ids: tuple[int, ...], why: str) -> Result:
    """Let rejected records go, for good."""
    with app.ledger(write=True) as ledger:
        found, rows = rejects_of(app, ledger, run, ids)
        dropped = ledger.drop_rejects(found, rows, app.who, mask_secrets(why))
    text = f"{dropped} rejects of run {found.id} dropped"
    return Result(text, {"run": found.id, "dropped": dropped})


@command(
    word("run"),
    word("--to-batch", reads=at_least(0), metavar="N", help="Undo only what came after batch N."),
    word("--dry-run", is_flag=True, help="Only show what would be done."),
    word("--why", default="", metavar="TEXT", help="The reason, for the record."),
    *RUNNING[2:],
    exits=RUN_EXITS,
)
def rollback_command(
    app: App, *, run: str, to_batch: int | None, dry_run: bool, why: str, **asked: Any
) -> Ended:
    """Undo the batches of a run, newest first, as a run of its own."""
    app.require_trusted()
    launch = launch_of("", **asked)
    with app.ledger(write=not dry_run) as ledger:
        found = app.find_run(ledger, run)
        rollback, begun = rollback_of(ledger, found, to_batch, mask_secrets(why))
        document = summarise_rollback(ledger, rollback)
        if not begun:
            document["bytes"] = look_at_rollback(app.config, app.state, ledger, rollback)
    if dry_run:
        undone, to = document["run"], document["to_batch"]
        first = f"a rollback of run {undone} to batch {to} would do this; nothing was written"
        todo = f"to do it: batchrun rollback {undone}" + f" --to-batch {to}" * bool(to)
        return Result("\n".join([first, *render_rollback(document), todo]), document)
    how = {"only_resume": True} if begun else {"overrides": found.overrides, "rollback": rollback}
    return app.supervise(launch._replace(job=found.job, by_person=True, **how)).exit_code


def rollback_of(ledger: Ledger, run: Run, to_batch: int | None, why: str) -> tuple[Rollback, bool]:
    """Return what is asked to be undone, and whether its rollback has begun and is unfinished."""
    begun = ledger.unfinished(run.job)
    if begun is None or not begun.rollback_of or run.id not in (begun.id, begun.rollback_of):
        return ledger.rollback(run, to_batch or 0, why), False
    if to_batch not in (None, begun.rollback_to):
        raise PersonNeeded(
            f"Run {begun.id} rolls it back to batch {begun.rollback_to}, and is unfinished.",
            unchanged="Nothing was changed.",
            todo=f"To go on with that: batchrun resume {begun.id}",
        )
    return ledger.rollback_by(begun), True


# -- set up --------------------------------------------------------------------------------------


@command(word("folder", reads=Path, default="."))
def init_command(_: App, *, folder: Path) -> Result:
    """Make a configuration and a starter job that runs."""
    require_text(folder.absolute())
    feed = [f"SKU-{number:06d},{number * 7919 % 500}" for number in range(1, 12_001)]
    files = {
        folder / "batchrun.toml": STARTER_CONFIG,
        folder / "jobs/inventory_sync.py": STARTER_JOB,
        folder / "jobs/feed.csv": "\n".join(["sku,quantity", *feed, ""]),
    }
    for path in filter(Path.exists, files):
        what, todo = f"{path} is there already.", "Choose another folder: batchrun init FOLDER"
        raise ConfigurationError(what, unchanged="Nothing was written.", todo=todo)
    for path, content in files.items():
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(path, content.encode())
    change = "" if folder == Path() else f"cd {_typed(folder)} && "
    text = f"made {', '.join(map(str, files))}\nto go on: {change}batchrun run inventory_sync"
    return Result(text, {"files": list(files)})


STARTER_CONFIG = """\
# batchrun's configuration. Relative paths start at this file. The README has all keys.

[jobs.inventory_sync]
feed = "jobs/feed.csv"
database = "sqlite:stock.db"
"""

STARTER_JOB = '''\
"""Bring the local stock table level with the supplier's feed."""

from dataclasses import dataclass

from batchrun import Context, Delimited, job

TABLE = "CREATE TABLE IF NOT EXISTS stock (sku TEXT PRIMARY KEY, quantity INTEGER NOT NULL)"
UPSERT = """INSERT INTO stock VALUES (?, ?)
    ON CONFLICT (sku) DO UPDATE SET quantity = excluded.quantity"""


@dataclass(frozen=True)
class Settings:
    feed: str
    database: str = "sqlite:stock.db"


@job(settings=Settings, version=1)
def inventory_sync(ctx: Context[Settings]):
    feed = ctx.enter(Delimited(ctx.settings.feed, key="sku"))
    stock = ctx.connect(ctx.settings.database)
    ctx.step("make table", lambda rows: rows.execute(TABLE) and None, target=stock)

    for batch in ctx.batches(feed, target=stock):
        with batch.transaction() as rows:  # rows and the batch's mark commit together
            rows.executemany(UPSERT, [(r["sku"], int(r["quantity"])) for r in batch])
        yield batch  # the commit point
'''


@command()
def jobs_command(app: App) -> ExitCode:
    """Load the configured jobs and list them: what they do, their settings, their last run."""
    app.require_trusted()
    last: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(BatchrunError), app.ledger(write=False) as ledger:
        for run in ledger.latest_of_each_job():
            state = standing(ledger, run, app.host).state
            last[run.job] = {"run": run.id, "state": state, "since": run.changed_at}
    documents: list[dict[str, Any]] = []
    wrong: list[BatchrunError] = []
    for name, job_config in app.config.jobs.items():
        document: dict[str, Any] = {"job": name, "file": str(job_config.path)}
        document["last_run"] = last.get(name)
        try:
            document |= summarise_configured(app.config, job_config)
        except BatchrunError as error:
            wrong.append(error)
            document["error"] = error.what
        documents.append(document)
    app.console.result(Result(render_jobs(documents, app.host.now()), {"jobs": documents}))
    for letter in wrong:
        app.console.letter(str(letter), letter.exit_code)
    return wrong[0].exit_code if wrong else ExitCode.DONE


def write_metrics(folder: Path, text: str) -> None:
    """Replace the file that node_exporter reads, whatever the umask."""
    path = folder / "batchrun.prom"
    with writing_of(path):
        write_atomically(path, text.encode(), mode=0o644)
        path.chmod(0o644)


@command(
    word("--write", reads=Path, metavar="FOLDER", help="Write FOLDER/batchrun.prom, for all."),
)
def metrics_command(app: App, *, write: Path | None) -> Ended:
    """Show how all jobs stand as metrics for Prometheus."""
    with app.ledger(write=False) as ledger:
        text = app.metrics(ledger)
    if write is None:
        return Result(text.rstrip("\n"), {"metrics": text}, is_pasted=True)
    write_metrics(write, text)
    return ExitCode.DONE


@command(
    word("job", required=False),
    word("--alerts", is_flag=True, help="Send a test by every way of [alerts], and by pings."),
    exits=[ExitCode.FINDINGS, ExitCode.NOT_FOUND],
)
def doctor_command(app: App, *, job: str | None, alerts: bool) -> Result:
    """Look once at all that a run needs: health, machine, files, jobs; explain each answer."""
    app.require_trusted()
    if job is not None:
        app.config.job(job)
    of = (app.config, job, app.host)
    rows = list(sent_tests(*of)) if alerts else doctor(app.state, *of)
    is_wrong = any(row.state != Wellness.OK for row in rows)
    document = {"examined": [row._asdict() for row in rows]}
    return Result(render_examined(rows), document, found=is_wrong)


@command(
    word("file", reads=Path),
    word("--force", is_flag=True, help="Also in the place of an older copy."),
    exits=[ExitCode.PERSON_NEEDED],
)
def backup_command(app: App, *, file: Path, force: bool) -> Result:
    """Copy the ledger while jobs run, and verify the copy."""
    app.state.require_fit(create=False)
    path = file.absolute()
    with app.ledger(write=False) as ledger:
        size = back_up(app.state, ledger, path, force=force)
    text = f"{path}: {size_text(size)}, verified; the README says how it is put back"
    return Result(text, {"file": path, "size_bytes": size})


@command(
    word("--keep", reads=parse_duration, metavar="90d", help="Not as it is configured."),
    word("--dry-run", is_flag=True, help="Only show what would go."),
)
def prune_command(app: App, *, keep: float | None, dry_run: bool) -> Result:
    """Let finished runs go that are older than `keep`, and that nothing needs."""
    keep_s = app.config.keep_s if keep is None else keep
    with app.ledger(write=not dry_run) as ledger:
        pruned = prune(app.state, ledger, keep_s, app.host, app.who, dry_run=dry_run)
    runs, names = pruned.runs, ("id", "job", "state", "ended_at")
    text = f"{pruned} {'would go' if dry_run else 'went'}"
    gone = f", with {several(pruned.rows, 'row')} and {size_text(pruned.files_bytes)} of files"
    rows = [[str(getattr(run, name)) for name in names] for run in runs]
    table = [["run", "job", "state", "ended"], *rows]
    shown = [render_table(table, app.columns)] if rows and dry_run else []
    documents = [{name: getattr(run, name) for name in names} for run in runs]
    counts = {"before": pruned.before, "rows": pruned.rows, "files_bytes": pruned.files_bytes}
    document = {"runs": documents, "dry_run": dry_run, **counts}
    return Result("\n".join([*shown, text + gone * (not dry_run)]), document)


@command(
    word("job", required=False),
    word("--every", metavar="WHEN", help="hourly, daily (default), weekly, monthly, OnCalendar."),
    word("--tick", is_flag=True, help="What goes on with all that is due, every five minutes."),
    word("--cron", is_flag=True, help="The line of a crontab instead; WHEN may be cron's fields."),
    word("--on-failure", metavar="UNIT", help="What systemd starts when it fails."),
    word("--install", is_flag=True, help="Write them where systemd looks."),
    word("--force", is_flag=True, help="Also over units that somebody else wrote."),
    exits=[ExitCode.NOT_FOUND],
)
def unit_command(app: App, *, job: str | None, install: bool, force: bool, **asked: Any) -> Result:
    """Print systemd units, or a crontab's line, that start a job or the tick."""
    own = install and os.geteuid() != 0
    timed = timed_by(app, job, asked | {"install": install, "force": force}, own=own)
    if asked["cron"]:
        fields = timed.when(1) if timed.every else "*/5 * * * *"
        line = f"{fields}  {_typed(*timed.words)}".replace("%", "\\%")  # a plain one ends the line
        return Result(line, {"line": line}, is_pasted=True)
    marker = f"{UNIT_MARK}`unit {job or '--tick'}` of {app.config.path}"
    files = render_units(timed, marker).items()
    paths = {app.host.unit_folder / name: text for name, text in files}
    if install:
        install_units(paths, force=force)
    systemctl = "systemctl --user" if own else "systemctl"
    todo = [f"{systemctl} daemon-reload", f"{systemctl} enable --now {timed.unit}.timer"]
    shown = [f"# {'wrote ' * install}{path}\n{text}" for path, text in paths.items()]
    text = "\n".join([*shown, "# to start it, type:", *(f"#   {line}" for line in todo)])
    documents = [{"path": path, "text": text} for path, text in paths.items()]
    return Result(text, {"files": documents, "written": install, "todo": todo}, is_pasted=True)


def timed_by(app: App, job: str | None, asked: Mapping[str, Any], *, own: bool) -> Timed:
    """Return what `unit` is to start by a timer, a job or the tick; refuse what is not clear."""
    config, every, on_failure = app.config, asked["every"], asked["on_failure"] or ""
    words = [*own_command(), "--config", str(config.path)]
    never = f"--every {every!r} is not when something can be started."
    no_unit = f"--on-failure {on_failure!r} is no name of a unit."
    odd = f"The path {words[0]} or {config.path} cannot stand in a unit or crontab."
    wrong = {
        "Name a job, or --tick.": not (job or asked["tick"]),
        "Name a job or --tick, not both.": job and asked["tick"],
        "--tick comes every five minutes; it takes no --every.": asked["tick"] and every,
        "--every takes one line of text.": every and not every.isprintable(),
        never: every and not is_when(app.host, every, cron=asked["cron"]),
        no_unit: on_failure and not are_units(on_failure),
        "--cron only prints a line.": asked["cron"] and (asked["install"] or on_failure),
        "--force is for --install.": asked["force"] and not asked["install"],
        odd: not "".join(words).isprintable() or {*"\"'\\"} & {*words[0]},
    }
    for what in (what for what, is_wrong in wrong.items() if is_wrong):
        fields = '"30 4 * * 1-5"' if asked["cron"] else '"Mon..Fri 4:15"'
        times = f"Write {', '.join(EVERY)}, or for example {fields}."
        todos = {never: times, no_unit: "Write: --on-failure mail@%n.service"}
        todo = todos.get(what, "See: batchrun unit --help")
        raise ConfigurationError(what, unchanged="Nothing was written.", todo=todo)
    jobs = [config.job(job)] if job else list(config.jobs.values())
    path = config.state if config.state.exists() else config.path
    slow = [row.answer for each in jobs for row in slow_batches(app.state, each)]
    return Timed(
        config.unit(job or "", app.host.unit_folder),
        [*words, *(["run", job] if job else ["resume", "--all"])],
        "" if own else app.host.user_name(path.stat().st_uid),
        places_written(config, jobs),
        max([each.longest_stop_s for each in jobs], default=90.0),
        "\n".join(f"# A stop interrupts batches: {why}" for why in slow),
        every or ("daily" if job else ""),
        on_failure,
    )


def is_when(host: Host, every: str, *, cron: bool) -> bool:
    """Tell whether a timer can be made of --every; systemd is asked, where there is one."""
    import shutil

    if every in EVERY or cron:
        return every in EVERY or is_cron(every)
    if shutil.which("systemd-analyze"):
        return bool(host.answer_of("systemd-analyze", "calendar", "--", every))
    return bool(re.fullmatch(r"(?=.*[0-9*])[A-Za-z0-9*.,:/~ -]+", every))


def install_units(paths: Mapping[Path, str], *, force: bool) -> None:
    """Write units where systemd looks, but not over what somebody else wrote there."""
    for path, text in paths.items():
        if path.exists() and not force and path.read_text().split("\n")[0] != text.split("\n")[0]:
            what = f"{path} is there, and was not written by this command."
            todo = "Move it away, or add --force."
            raise ConfigurationError(what, unchanged="Nothing was written.", todo=todo)
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        path.chmod(0o644)


# -- click ---------------------------------------------------------------------------------------


def build_command_line(app: App | None = None, arguments: Sequence[str] = ("--help",)) -> Any:
    """Return click's group of the commands that the arguments name; of all, if they ask for help.

    Making one command takes a tenth of the time of making all.
    """
    import click

    group_kind = lettered(click, click.Group)

    class Grouped(group_kind):  # type: ignore[misc,valid-type]
        def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
            for group, words in GROUPS.items():
                named = [parts for parts in COMMANDS if parts.name.split()[0] in words.split()]
                rows = [(parts.name, str(parts.function.__doc__).split("\n")[0]) for parts in named]
                with formatter.section(group):
                    formatter.write_dl(rows)

    app = app or App()
    root = Grouped("batchrun", help="Run long batch jobs so that they survive.")
    root.params = global_options(click, hidden=False)
    version, meaning = f"batchrun, version {VERSION}", "Show the version and exit."
    root.params.insert(-1, answered_at_once(click, "--version", meaning, version))
    root.callback, root.add_help_option = app.take, False
    root.epilog = exit_text(list(ExitCode))
    named = [parts for parts in COMMANDS if parts.name.split()[0] in arguments]
    for parts in COMMANDS if "--help" in arguments or not named else named:
        first, _, second = parts.name.partition(" ")
        if second and first not in root.commands:
            title = f"{first.capitalize()}, by a second word."
            group = group_kind(first, params=global_options(click), callback=app.take, help=title)
            group.add_help_option = False
            root.add_command(group)
        above: Any = root.commands[first] if second else root
        above.add_command(build_command(click, app, parts))
    return root


def lettered(click: Any, kind: Any) -> Any:
    """Return a class of click's commands or groups whose mistakes are letters of ours."""

    class Lettered(kind):  # type: ignore[misc]
        def parse_args(self, context: Any, arguments: list[str]) -> Any:
            try:
                return super().parse_args(context, arguments)
            except click.UsageError as error:
                raise refused_by_click(click, error, context) from error

        def resolve_command(self, context: Any, arguments: list[str]) -> Any:
            if context.resilient_parsing or (name := arguments[0]) in self.commands:
                return super().resolve_command(context, arguments)
            path = context.command_path
            known = FIRST_WORDS if path == "batchrun" else self.commands
            what = f"{path} has no command {name!r}{_meant(name, known) or '.'}"
            raise refused_word(what, f"See: {path} --help")

    return Lettered


def global_options(click: Any, *, hidden: bool = True) -> list[Any]:
    """Return the global options; behind a command they are taken, and only --help is shown."""
    options = [click.Option(list(names), **more, hidden=hidden) for names, more in GLOBAL]
    return [*options, answered_at_once(click, "--help", "Show this message and exit.")]


def answered_at_once(click: Any, name: str, meaning: str, answer: str = "") -> Any:
    """Return an option that is answered, by default with the help page, and then nothing is done.

    click's own --help and --version look for translations of their sentences at each start: 2 ms.
    """

    def show(context: Any, _: Any, is_given: bool) -> None:  # noqa: FBT001 - as click calls it
        if is_given and not context.resilient_parsing:
            with contextlib.suppress(BrokenPipeError):  # its reader went away
                click.echo(answer or context.get_help(), color=context.color)
            context.exit()

    option = click.Option([name], is_flag=True, is_eager=True, expose_value=False, help=meaning)
    option.callback = show
    return option


def build_command(click: Any, app: App, parts: CommandParts) -> Any:
    """Return one click command whose return value is its exit code."""
    made = [build_word(click, app, names, **more) for names, more in parts.parameters]

    def call(config: str | None, **given: Any) -> ExitCode:
        ways = {name: given.pop(name) for name in ("as_json", "quiet", "verbose")}
        app.take(config, **ways)
        ended = parts.function(app, **given)
        if isinstance(ended, ExitCode):
            return ended
        app.console.result(ended)
        return ExitCode.FINDINGS if ended.found else ExitCode.DONE

    return lettered(click, click.Command)(
        parts.name.rpartition(" ")[2],
        params=[*made, *global_options(click)],
        add_help_option=False,
        callback=call,
        help=parts.function.__doc__,
        epilog=exit_text(parts.exits),
    )


def build_word(
    click: Any, app: App, names: Sequence[str], *, reads: Callable[[str], Any] = str, **more: Any
) -> Any:
    """Return an argument or option of click: what it shows, completes and gives to the command."""
    if isinstance(reads, OneOf):
        more.setdefault("metavar", f"[{'|'.join(reads)}]")
    more["shell_complete"] = functools.partial(complete, app, reads)
    kind = click.Option if names[0].startswith("-") else click.Argument
    return kind(list(names), callback=functools.partial(read_word, reads), **more)


def read_word(reads: Callable[[str], Any], context: Any, parameter: Any, value: Any) -> Any:
    """Return what was given as it is read; refuse what is of the wrong kind, or says nothing."""
    name, is_many = parameter.opts[-1], isinstance(value, tuple)
    is_option = name.startswith("-")
    is_blank = isinstance(value, str) and not value.strip() and parameter.default != ""
    if is_option and (is_blank or value == "..."):
        todo = f"Write: {name} {parameter.metavar}"
        raise ConfigurationError(f"{name} says nothing: {value!r}.", todo=todo)
    if reads is str or value is None:
        return value
    try:
        return tuple(map(reads, value)) if is_many else reads(value)
    except ValueError as error:
        shown = name if is_option else named_word(parameter)
        what = f"{shown} {' '.join(value) if is_many else value!r}: {error}."
        raise refused_word(what, f"See: {context.command_path} --help") from error


def complete(
    app: App, reads: Callable[[str], Any], context: Any, parameter: Any, begun: str
) -> list[Any]:
    """Return what a shell may complete a word to: files, jobs, ids of runs, words it may be."""
    if reads is Path:
        from click.shell_completion import CompletionItem

        return [CompletionItem(begun, type="file")]
    names = [*reads] if isinstance(reads, OneOf) else [*EVERY] * (parameter.name == "every")
    with contextlib.suppress(BatchrunError, OSError):
        if parameter.name in ("job", "jobs", "run", "name"):
            app.take(context.find_root().params.get("config"))
            names += app.config.jobs
        if parameter.name in ("run", "name"):
            with app.ledger(write=False) as ledger:
                names += [run.id for run in ledger.newest_runs()]
    return [name for name in names if name.lower().startswith(begun.lower())]


def exit_text(codes: list[ExitCode]) -> str:
    """Return the part of a help page that explains exit codes."""
    lines = [f"{int(code):>3}  {EXIT_SENTENCES[code]}" for code in codes]
    return "\b\nExit status:\n" + "\n".join(lines)


def run_command_line(arguments: list[str]) -> int:
    """Run one command and return its exit code; mistakes become letters."""
    import click

    app = App()
    app.take(os.environ.get("BATCHRUN_CONFIG"), as_json="--json" in arguments)
    try:
        root = build_command_line(app, arguments)
        return int(root.main(arguments, "batchrun", standalone_mode=False) or 0)
    except SystemExit as leaving:
        if "_BATCHRUN_COMPLETE" in os.environ:  # a shell was told by click what completes a word
            return int(leaving.code or 0)
        raise
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except click.UsageError as error:
        letter: BatchrunError = refused_by_click(click, error, error.ctx)
    except BatchrunError as error:
        letter = error
    except OSError as error:
        letter = refused_by_system(error, arguments)
    app.console.letter(str(letter), letter.exit_code)
    return letter.exit_code


def refused_by_click(click: Any, error: Any, context: Any) -> ConfigurationError:
    """Return what click refused as a letter."""
    said, path = error.format_message(), context.command_path
    if said.startswith("Usage: "):  # a help page
        return ConfigurationError(said)
    todo = f"See: {path} --help"
    options = {name: each for each in context.command.params for name in each.opts}
    option = getattr(error, "option_name", "")
    needed = [named_word(each) for each in options.values() if each.required]
    words = context.command.collect_usage_pieces(context) + [n for n in needed if "-" in n]
    usage = f"Write: {' '.join([path, *words])}"
    if isinstance(error, click.NoSuchOption):
        return refused_word(f"{path} has no option {option}{_meant(option, options) or '.'}", todo)
    if isinstance(error, click.BadOptionUsage):
        asked = named_word(options[option])
        what = f"{option} takes no value." if asked == option else f"{option} needs a value."
        return refused_word(what, f"Write: {asked}")
    if isinstance(error, click.MissingParameter):
        return refused_word(f"{path} needs {named_word(error.param)}.", usage)
    if isinstance(context.command, click.Group):
        return refused_word(f"{path} needs a command.", todo)
    extra = said.partition("(")[2].rpartition(")")[0]
    return refused_word(f"{path} has no use for {extra!r}.", usage)


def refused_word(what: str, todo: str) -> ConfigurationError:
    """Return the letter for a wrong word on the command line."""
    return ConfigurationError(what, unchanged="Nothing was changed.", todo=todo)


def named_word(parameter: Any) -> str:
    """Return an argument or option for people: `JOB`, `--batches N`, `--fresh`."""
    if not parameter.opts[0].startswith("-"):
        return str(parameter.metavar or parameter.name.upper()).strip("[].")
    return f"{parameter.opts[-1]} {'' if parameter.is_flag else parameter.metavar}".rstrip()


def refused_by_system(error: OSError, arguments: list[str]) -> BatchrunError:
    """Return what the system refused as a letter."""
    if {"--help", "--version"} & set(arguments):  # which click writes by itself
        return OutputRefused(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    return StateDirectoryError(
        f"{'Disk full' if full else 'The system refused'}: {text}.",
        unchanged="Nothing more was changed.",
        todo=f"Mend that, then start again: {_typed('batchrun', *sys.argv[1:])}",
    )


SHORT_COMMAND = 20_000  # objects that a command makes that is over before garbage matters


def main() -> NoReturn:
    """Run the command line and leave by os._exit: a held lock is never given back on the way."""
    if "--in-process" not in sys.argv:  # else jobs make objects here
        gc.set_threshold(SHORT_COMMAND)
    occupy_standard_descriptors()
    code = int(ExitCode.FAILED)
    named = next((word for word in sys.argv[1:] if word in FIRST_WORDS), "")
    if named in ("run", "resume", "drain"):
        block_stops()  # a stop that comes this early is counted too
    reach("main.begun")
    try:
        code = run_command_line(sys.argv[1:])
    except BaseException:  # noqa: BLE001 - a fault of batchrun's own, told before the end
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if COLLECTS:
    if not gc.get_freeze_count():  # else objects that somebody else keeps out of it came back too
        gc.freeze()
        gc.unfreeze()
    gc.enable()

if __name__ == "__main__":
    from batchrun import main as imported_main  # jobs import batchrun too: one copy, not two

    imported_main()
