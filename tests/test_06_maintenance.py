"""Section 6: the maintenance lockfile decides, whoever made it; the ledger's rows follow it."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_05_ledger import admit

import batchrun
from batchrun import (
    Barrier,
    ExitCode,
    Host,
    Ledger,
    Lockfile,
    Maintenance,
    MaintenanceOn,
    MaintenanceOverdue,
    StateDirectoryError,
    open_ledger,
)

NOON = "2026-01-31T12:00:00.000Z"
NOON_S = 1_769_860_800


class Clock(Host):
    """A host whose wall clock stands where it was put."""

    def __init__(self) -> None:
        self.at = NOON

    def now(self) -> str:
        return self.at

    def user_name(self, uid: int) -> str:  # noqa: ARG002 - all files are Bob's
        return "bob"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(tmp_path: Path, clock: Clock) -> Maintenance:
    made = Maintenance(tmp_path / "maintenance.lock", clock, 86_400.0)
    made.path.touch()
    made.name_owner()
    made.path.unlink()
    return made


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    made = open_ledger(tmp_path / "ledger.db", clock, create=True)
    yield made
    made.close()


def job(name: str = "sync", *tags: str) -> Any:  # noqa: ANN401 - what require_open asks a job for
    """Return a configured job."""
    values = dict.fromkeys(batchrun.JobConfig._fields)
    return batchrun.JobConfig(**{**values, "name": name, "tags": tags})  # type: ignore[arg-type]


def begin(door: Maintenance, ledger: Ledger, *scopes: str, until: str | None = None) -> Lockfile:
    """Raise the barrier as the command does."""
    return door.begin(ledger, "ann", by="ann", reason="deploy 12", until=until, scopes=[*scopes])


def write_at_noon(path: Path, content: str) -> None:
    """Write a lockfile by hand, at noon."""
    path.write_text(content)
    os.utime(path, (NOON_S, NOON_S))


def start(ledger: Ledger, door: Maintenance, name: str = "sync", run_id: str = "r1") -> None:
    """Admit a start of a job as a supervisor does, or raise."""
    admit(ledger, name, run_id, require_admission=lambda: door.require_open(job(name)))


def barriers(ledger: Ledger) -> list[Barrier]:
    """Return every row."""
    return ledger._all(Barrier, "ORDER BY id")


def told(ledger: Ledger) -> list[str]:
    """Return what the ledger's events say, in order."""
    return [f"{event.what} {event.why}".strip() for event in ledger.events()]


# --- what closes the door -----------------------------------------------------------------------


def test_without_a_lockfile_the_door_is_open(door: Maintenance) -> None:
    assert door.find() is None
    assert door.require_open(job()) is None


def test_a_lockfile_made_by_touch_closes_the_door(door: Maintenance, clock: Clock) -> None:
    write_at_noon(door.path, "")
    clock.at = "2026-01-31T12:03:20.000Z"
    with pytest.raises(MaintenanceOn) as refusal:
        door.require_open(job())
    assert str(refusal.value) == (
        f"Maintenance is on: {door.path} is there, since {NOON}, for 3m20s, by bob.\n"
        "Nothing was started; the refusal is recorded.\n"
        "When the maintenance is over: batchrun maintenance off"
    )
    assert refusal.value.exit_code == 12


def test_a_lockfile_that_says_why_is_quoted_in_one_plain_line(door: Maintenance) -> None:
    said = {"reason": "deploy\n\x1b[31m12" + "!" * 300, "by": "ann\t"}
    write_at_noon(door.path, json.dumps(said))
    with pytest.raises(MaintenanceOn) as refusal:
        door.require_open(job())
    assert refusal.value.what == (
        f"Maintenance is on: {door.path} is there, since {NOON}, for 0s, by ann"
        f" ({'deploy [31m12'.ljust(200, '!')})."
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 70_000, b" " * 70_000, b'{"reason": 1}']
)
def test_a_lockfile_closes_the_door_whatever_it_holds(door: Maintenance, content: bytes) -> None:
    door.path.write_bytes(content)
    with pytest.raises(MaintenanceOn):
        door.require_open(job())


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link", "link", "hard link"])
def test_a_lockfile_closes_the_door_whatever_it_is_and_off_opens_it(
    door: Maintenance, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    if kind == "directory":
        door.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(door.path)
    elif kind == "hard link":
        door.path.hardlink_to(outside)
    else:
        door.path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(MaintenanceOn):
        door.require_open(job())
    assert door.end(ledger, "ann", "switched off") is not None
    assert not door.path.is_symlink()
    assert not door.path.exists()
    assert outside.read_text() == "precious"


def test_a_directory_with_something_in_it_is_not_removed(door: Maintenance, ledger: Ledger) -> None:
    (door.path / "kept").mkdir(parents=True)
    with pytest.raises(StateDirectoryError) as letter:
        door.end(ledger, "ann", "switched off")
    assert str(letter.value) == (
        f"{door.path} cannot be removed: Directory not empty.\n"
        "Maintenance is on: the lockfile is there.\n"
        f"See what it is: ls -la {door.path}"
    )
    assert (door.path / "kept").is_dir()
    assert barriers(ledger) == []


def test_a_lockfile_that_cannot_be_looked_at_closes_the_door(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").touch()
    door = Maintenance(tmp_path / "file" / "maintenance.lock", clock, 60)
    with pytest.raises(MaintenanceOn) as refusal:
        door.require_open(job())
    assert refusal.value.what == (
        f"Maintenance is on: {door.path} is there,"
        " by somebody (it cannot be looked at: Not a directory)."
    )


def test_nobody_is_asked_for_a_name_within_a_transaction(
    tmp_path: Path, ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def user_name(uid: int) -> str:
        asked.append(ledger._connection.in_transaction)
        return f"user {uid}"

    monkeypatch.setattr(clock, "user_name", user_name)
    door = Maintenance(tmp_path / "maintenance.lock", clock, 86_400.0)
    door.path.touch()
    with pytest.raises(MaintenanceOn) as refusal:
        start(ledger, door)  # nobody has looked before
    assert refusal.value.what.endswith(f", by uid {os.getuid()}.")
    ledger.refuse("sync", "me", "no", door.find)
    assert asked == []
    door.name_owner()
    with pytest.raises(MaintenanceOn, match=f", by user {os.getuid()}\\."):
        start(ledger, door)
    assert asked == [False]


# --- scopes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scopes", "closed"),
    [
        ([], True),
        (["job:sync"], True),
        (["job:syn"], False),
        (["job:other"], False),
        (["job:other", "tag:nightly"], True),
        (["tag:sync"], False),
        (["version:sync<4"], False),  # it is judged when the version is known
        (["version:sync<4", "job:sync"], True),
        (["jobs:sync"], True),  # what is not understood may mean everything
        (["job:other", "host:mars"], True),
        (["job:other", 7], True),
        ("job:other", True),
        ({"job": "other"}, True),
        (["job:other\n"], True),
        (["version:other<-1"], True),
    ],
)
def test_a_lockfile_closes_what_it_names_and_everything_if_that_is_unclear(
    door: Maintenance, scopes: object, *, closed: bool
) -> None:
    door.path.write_text(json.dumps({"scopes": scopes}))
    if closed:
        with pytest.raises(MaintenanceOn):
            door.require_open(job("sync", "nightly", "stock"))
    else:
        assert door.require_open(job("sync", "nightly", "stock")) == door.find()


@pytest.mark.parametrize(
    ("name", "version", "closed"),
    [("sync", 3, True), ("sync", 4, False), ("sync", 5, False), ("other", 1, False)],
)
def test_a_version_is_closed_below_the_one_that_is_named(
    door: Maintenance, name: str, version: int, *, closed: bool
) -> None:
    write_at_noon(door.path, json.dumps({"scopes": ["job:x", "version:sync<4"], "by": "ann"}))
    if not closed:
        door.require_version(job(name), version)
        return
    with pytest.raises(MaintenanceOn) as refusal:
        door.require_version(job(name), version)
    assert str(refusal.value) == (
        f"Maintenance is on: {door.path} is there, since {NOON}, for 0s, by ann.\n"
        "It closes job:x, version:sync<4.\n"
        "It has version 3 of sync installed.\n"
        "Nothing was started; the refusal is recorded.\n"
        "When the maintenance is over: batchrun maintenance off"
    )


# --- overdue --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "now", "why"),
    [
        (None, "2026-02-01T12:00:00.000Z", ""),
        (None, "2026-02-01T12:00:00.001Z", "It is older than 1d00h (max_maintenance)."),
        (None, "2026-01-30T12:00:00.000Z", ""),  # a clock that was set back
        ("2026-01-31T12:30:00Z", "2026-01-31T12:30:00.000Z", ""),
        (
            "2026-01-31T13:30:00+01:00",
            "2026-01-31T12:30:00.001Z",
            "It was to end at 2026-01-31T12:30:00.000Z.",
        ),
        ("2026-01-31T12:30:00", "2026-01-31T13:00:00.000Z", ""),  # no zone: no moment
        ("soon", "2026-01-31T13:00:00.000Z", ""),
        ("9999-12-31T23:59:59-14:00", "2026-01-31T13:00:00.000Z", ""),
        (7, "2026-01-31T13:00:00.000Z", ""),
    ],
)
def test_a_maintenance_is_overdue_past_its_end_or_when_it_is_too_old(
    door: Maintenance, clock: Clock, until: object, now: str, why: str
) -> None:
    write_at_noon(door.path, json.dumps({"until": until}))
    clock.at = now
    with pytest.raises(MaintenanceOn) as refusal:
        door.require_open(job())
    assert refusal.value.why == (f"IT IS OVERDUE. {why}" if why else "")
    assert refusal.value.exit_code == (13 if why else 12)


def test_that_a_maintenance_is_overdue_is_recorded_once(
    door: Maintenance, ledger: Ledger, clock: Clock
) -> None:
    write_at_noon(door.path, "")
    ledger.refuse("sync", "me", "no", door.find)
    clock.at = "2026-02-03T12:00:00.000Z"
    for _ in range(3):
        ledger.refuse("sync", "me", "no", door.find)
    why = "maintenance overdue It is older than 1d00h (max_maintenance)."
    assert told(ledger) == [
        "maintenance on",
        "refused: maintenance no",
        why,
        *["refused: maintenance no"] * 3,
    ]
    assert barriers(ledger)[0].overdue == 3
    assert MaintenanceOverdue.exit_code == ExitCode.PERSON_NEEDED


# --- on and off -----------------------------------------------------------------------------------


def test_on_writes_a_private_lockfile_and_its_row(door: Maintenance, ledger: Ledger) -> None:
    until = "2026-01-31T12:30:00.000Z"
    found = begin(door, ledger, "job:sync", until=until)
    seen = door.path.stat()
    assert (stat.S_IMODE(seen.st_mode), seen.st_nlink) == (0o600, 1)
    said = {"by": "ann", "reason": "deploy 12", "since": NOON, "until": until}
    assert json.loads(door.path.read_text()) == {**said, "scopes": ["job:sync"]}
    row = barriers(ledger)[0]
    assert row[1:3] == found[:2] == (seen.st_dev, seen.st_ino)
    assert row[4:8] == ("ann", "deploy 12", until, ["job:sync"])
    assert (row.opened, row.closed) == (1, None)
    assert [path.name for path in door.path.parent.glob(".*")] == []


def test_a_second_on_is_refused_and_changes_nothing(door: Maintenance, ledger: Ledger) -> None:
    begin(door, ledger)
    os.utime(door.path, (NOON_S, NOON_S))
    before = door.path.read_bytes(), barriers(ledger), told(ledger)
    with pytest.raises(MaintenanceOn) as refusal:
        begin(door, ledger, "job:sync")
    assert str(refusal.value) == (
        f"Maintenance is on: {door.path} is there, since {NOON}, for 0s, by ann (deploy 12).\n"
        "It stays as it is; nothing was changed.\n"
        "When the maintenance is over: batchrun maintenance off"
    )
    assert (door.path.read_bytes(), barriers(ledger), told(ledger)) == before
    assert list(door.path.parent.glob(".*")) == []


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_on_never_writes_over_what_a_hand_made_and_makes_its_row(
    door: Maintenance, ledger: Ledger, kind: str
) -> None:
    if kind == "file":
        door.path.write_text("mine")
    elif kind == "directory":
        door.path.mkdir()
    else:
        door.path.symlink_to("nowhere")
    before = door.path.lstat()
    with pytest.raises(MaintenanceOn):
        begin(door, ledger)
    assert door.path.lstat().st_ctime_ns == before.st_ctime_ns
    assert [(row.who, row.inode) for row in barriers(ledger)] == [("bob", before.st_ino)]


def test_a_lockfile_made_by_hand_at_the_last_moment_is_not_written_over(
    door: Maintenance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, looks = door.find, iter([None])
    door.path.write_text("mine")
    monkeypatch.setattr(door, "find", lambda: next(looks, find()))
    with pytest.raises(MaintenanceOn, match="by bob"):
        begin(door, ledger)
    assert door.path.read_text() == "mine"
    assert list(door.path.parent.glob(".*")) == []


def test_off_removes_the_file_and_closes_the_row(
    door: Maintenance, ledger: Ledger, clock: Clock
) -> None:
    begin(door, ledger)
    clock.at = "2026-01-31T12:10:00.000Z"
    row = door.end(ledger, "ann", "switched off")
    assert row is not None
    assert (row.closed, row.closed_at, row.closed_why) == (2, clock.at, "switched off")
    assert not door.path.exists()
    assert door.end(ledger, "ann", "switched off") is None
    assert told(ledger) == ["maintenance on deploy 12", "maintenance off switched off"]


# --- the rows follow the file ---------------------------------------------------------------------


def test_whoever_meets_a_lockfile_made_by_hand_makes_its_row(
    door: Maintenance, ledger: Ledger
) -> None:
    write_at_noon(door.path, "")
    for _ in range(2):
        with pytest.raises(MaintenanceOn) as refusal:
            start(ledger, door)
        ledger.refuse("sync", "me", refusal.value.exit_code.name, door.find)
    assert told(ledger) == ["maintenance on", *["refused: maintenance MAINTENANCE"] * 2]
    assert [(row.at, row.who, row.opened) for row in barriers(ledger)] == [(NOON, "bob", 1)]


def test_a_start_that_finds_the_lockfile_gone_closes_the_row_before_it_is_admitted(
    door: Maintenance, ledger: Ledger
) -> None:
    begin(door, ledger)
    door.path.unlink()
    start(ledger, door)
    assert told(ledger)[1:] == ["maintenance off removed by hand", "started a start was admitted"]
    row = barriers(ledger)[0]
    assert (row.closed, row.closed_why) == (2, "removed by hand")
    assert ledger.admitted_behind(row) == []
    assert ledger._rows("SELECT admitted FROM attempt") == [(3,)]


def test_another_lockfile_in_the_place_of_the_known_one_is_another_barrier(
    door: Maintenance, ledger: Ledger
) -> None:
    begin(door, ledger)
    door.path.rename(door.path.with_name("kept"))  # so that its inode is not used again
    door.path.touch()
    ledger.refuse("sync", "me", "no", door.find)
    first, second = barriers(ledger)
    assert (first.closed_why, second.closed, second.who) == ("changed by hand", None, "bob")
    assert first.closed is not None
    assert first.closed < second.opened


def test_a_lockfile_touched_again_is_the_same_barrier(door: Maintenance, ledger: Ledger) -> None:
    begin(door, ledger)
    door.path.touch()
    door.path.chmod(0o640)
    ledger.refuse("sync", "me", "no", door.find)
    (row,) = barriers(ledger)
    assert (row.closed, row.reason) == (None, "deploy 12")


def test_a_lockfile_that_was_edited_in_place_tells_its_row(
    door: Maintenance, ledger: Ledger
) -> None:
    begin(door, ledger)
    door.path.write_text('{"reason": "deploy 13", "until": "2026-01-31T13:00:00Z", "by": "cid"}')
    ledger.refuse("sync", "me", "no", door.find)
    (row,) = barriers(ledger)
    assert (row.closed, row.reason, row.until) == (None, "deploy 13", "2026-01-31T13:00:00.000Z")
    assert row.who == "cid"


def test_a_lockfile_that_closes_something_else_now_is_another_barrier(
    door: Maintenance, ledger: Ledger
) -> None:
    begin(door, ledger, "job:other")
    start(ledger, door)
    door.path.write_text("")
    ledger.refuse("sync", "me", "no", door.find)
    first, second = barriers(ledger)
    assert (first.closed_why, second.scopes) == ("changed by hand", [])
    assert ledger.admitted_behind(second) == []


def test_a_start_out_of_scope_is_admitted_and_knows_the_barrier(
    door: Maintenance, ledger: Ledger
) -> None:
    door.path.write_text('{"scopes": ["job:sync"]}')
    start(ledger, door, "other")
    with pytest.raises(MaintenanceOn):
        start(ledger, door, "sync", "r2")
    (row,) = barriers(ledger)
    assert ledger.admitted_behind(row) == [("other", "r1", 1, 2)]


def test_a_barrier_knows_whom_it_turned_away(door: Maintenance, ledger: Ledger) -> None:
    ledger.refuse("sync", "me", "before", door.find)
    begin(door, ledger)
    for name in ("sync", "other", "sync"):
        ledger.refuse(name, "me", "no", door.find)
    row = door.end(ledger, "ann", "switched off")
    ledger.refuse("sync", "me", "after", door.find)
    assert row is not None
    assert ledger.turned_away(row) == [("refused", "other", 1), ("refused", "sync", 2)]


def test_a_drain_whose_barrier_gave_way_to_another_has_failed(
    door: Maintenance, ledger: Ledger
) -> None:
    begin(door, ledger)
    drain = ledger.begin_drain("me", 60.0, door.find)
    assert drain is not None
    door.end(ledger, "ann", "switched off")
    begin(door, ledger)
    ended = ledger.end_drain(drain, "me", ExitCode.DONE, door.find, {})
    assert (ended.id, ended.exit_code) == (drain.id, ExitCode.FAILED)


def test_a_ledger_that_cannot_be_written_leaves_the_door_as_it_was(
    door: Maintenance, ledger: Ledger
) -> None:
    ledger._sql("PRAGMA query_only = ON")
    with pytest.raises(StateDirectoryError) as letter:
        begin(door, ledger)
    assert letter.value.unchanged == "Maintenance is off."
    assert ledger.barrier() is None
    assert door.find() is None


def test_a_row_that_cannot_be_written_leaves_the_door_closed_and_says_so(
    door: Maintenance, ledger: Ledger
) -> None:
    ledger._sql(
        "CREATE TEMP TRIGGER t BEFORE INSERT ON barrier BEGIN SELECT RAISE(FAIL, 'no'); END"
    )
    with pytest.raises(StateDirectoryError) as letter:
        begin(door, ledger)
    assert letter.value.unchanged == "Maintenance is on: the lockfile is there."
    ledger._sql("DROP TRIGGER t")
    ledger.refuse("sync", "me", "no", door.find)
    assert [row.who for row in barriers(ledger)] == ["ann"]


@pytest.mark.parametrize(
    ("point", "is_on"),
    [
        ("file.fsync", False),
        ("barrier.prepared", False),
        ("barrier.linked", True),
        ("barrier.synced", True),
    ],
)
def test_on_that_the_disk_refuses_says_how_the_door_stands(
    door: Maintenance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, point: str, *, is_on: bool
) -> None:
    monkeypatch.setattr(batchrun, "NAMED_POINT", f"{point}=EIO")
    with pytest.raises(StateDirectoryError) as letter:
        begin(door, ledger)
    assert str(letter.value) == (
        f"{door.path} cannot be written: at a named point.\n"
        f"Maintenance is {'on: the lockfile is there' if is_on else 'off'}.\n"
        f"See what it is: ls -la {door.path}"
    )
    assert (door.find() is not None) == is_on
    assert list(door.path.parent.glob(".*")) == []


def test_what_a_killed_on_left_is_removed_by_the_next_and_a_living_ones_is_not(
    door: Maintenance, ledger: Ledger
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, being_written = (
        door.path.with_name(f".{door.path.name}.{pid}.1f.tmp") for pid in (gone.pid, os.getpid())
    )
    left.touch()
    being_written.touch()
    begin(door, ledger)
    assert list(door.path.parent.glob(".*")) == [being_written]


def test_off_that_the_disk_refuses_says_how_the_door_stands(
    door: Maintenance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(door, ledger)
    monkeypatch.setattr(batchrun, "NAMED_POINT", "barrier.unlinked=EIO")
    with pytest.raises(StateDirectoryError) as letter:
        door.end(ledger, "ann", "switched off")
    assert letter.value.unchanged == "Maintenance is off."
    monkeypatch.setattr(batchrun, "NAMED_POINT", "")
    assert door.end(ledger, "ann", "switched off") is None
    assert [row.closed_why for row in barriers(ledger)] == ["removed by hand"]


@pytest.mark.parametrize("moment_s", [-(10**10), 10**12])
def test_a_lockfile_of_any_age_can_be_told(door: Maintenance, moment_s: int) -> None:
    assert batchrun.utc_text(moment_s * 10**9)[:5] in ("1970-", "9999-")
    door.path.touch()
    os.utime(door.path, (0, min(moment_s, 2**34)))
    with pytest.raises(MaintenanceOn):
        door.require_open(job())


def test_a_pipe_put_in_the_place_of_a_file_holds_nobody_up(door: Maintenance) -> None:
    os.mkfifo(door.path)
    assert door._contents() == {}
