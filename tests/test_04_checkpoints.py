"""Section 4: a checkpoint is valid or refused, never almost; a cursor comes back as it went."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

import batchrun
from batchrun import (
    BrokenCheckpoint,
    Checkpoint,
    CheckpointStore,
    CursorError,
    NewerFormat,
    checkpoint_bytes,
    decode_cursor,
    encode_cursor,
    parse_checkpoint,
    require_round_trip,
)

A = Checkpoint(
    ledger="1f" * 16,
    event=7,
    operation=0,
    job="sync",
    job_version=1,
    run="a1b2c3d4e5",
    generation=1,
    number=2,
    kind="batch",
    loop="main",
    cursor="10",
    ended=False,
    passed=[["step", "make table", None]],
    marks={"main": 2},
    totals={"read": 10, "rejected": 0, "batches": 1, "counts": {"new": 10}},
    link={
        "read": 10,
        "rejected": 0,
        "staged": 1,
        "counts": {"new": 10},
        "first_key": "1",
        "last_key": "10",
        "elapsed_s": 0.25,
    },
    source=None,
    settings="5e" * 32,
    previous="9a" * 32,
    at="2026-01-31T00:00:00.000Z",
)
CONTENT, DIGEST = checkpoint_bytes(A)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints" / "sync")
    made.open()
    return made


def sealed(body: bytes, *, format_: str = "1") -> bytes:
    """Return a body under a header that fits it."""
    digest = hashlib.sha256(body).hexdigest()
    return f"batchrun-checkpoint {format_} {digest} {len(body)}\n".encode() + body


def changed(**fields: Any) -> bytes:  # noqa: ANN401 - any wrong value
    """Return a checkpoint's file with other fields, under a header that fits."""
    return sealed(json.dumps({**A._asdict(), **fields}).encode())


# --- the file -------------------------------------------------------------------------------------


def test_a_checkpoint_reads_back_as_it_was_written() -> None:
    assert parse_checkpoint(CONTENT) == (A, DIGEST)


def test_a_checkpoint_is_one_header_line_and_a_body_with_a_value_a_line() -> None:
    header, _, body = CONTENT.partition(b"\n")
    assert header.decode() == f"batchrun-checkpoint 1 {DIGEST} {len(body)}"
    assert hashlib.sha256(body).hexdigest() == DIGEST
    lines = body.decode().splitlines()
    assert [line for line in lines if line.startswith('"number": ')] == ['"number": 2,']
    assert body.endswith(b'"}\n')
    assert json.loads(body) == A._asdict()


def test_a_checkpoint_cut_to_any_length_is_refused() -> None:
    for length in range(len(CONTENT)):
        with pytest.raises(BrokenCheckpoint):
            parse_checkpoint(CONTENT[:length])


def test_a_checkpoint_with_any_bit_flipped_is_refused() -> None:
    for place in range(len(CONTENT)):
        for bit in range(8):
            flipped = bytearray(CONTENT)
            flipped[place] ^= 1 << bit
            with pytest.raises((BrokenCheckpoint, NewerFormat)):
                parse_checkpoint(bytes(flipped))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (CONTENT + b"\n", "it is torn or changed"),
        (CONTENT + CONTENT, "it is torn or changed"),
        (bytes(400), "it does not begin with a header of batchrun-checkpoint"),
        (b"", "it does not begin with a header of batchrun-checkpoint"),
        (sealed(CONTENT.partition(b"\n")[2] * 2), "its body is not JSON"),
        (changed(event=float("nan")), "its body is not JSON"),
        (changed(totals={**A.totals, "read": float("inf")}), "its body is not JSON"),
        (sealed(b"[" * 100_000 + b"]" * 100_000), "its body is not JSON"),
        (sealed(b'{"ledger": "\xff\xfe"}'), "its body is not JSON"),
        (sealed(b"[]"), "its body has not the fields of a checkpoint"),
        (sealed(b"{}"), "its body has not the fields of a checkpoint"),
        (changed(more=1), "its body has not the fields of a checkpoint"),
        (changed(number="2"), "its field `number` is not what it should be"),
        (changed(number=True), "its field `number` is not what it should be"),
        (changed(ended=0), "its field `ended` is not what it should be"),
        (changed(passed={}), "its field `passed` is not what it should be"),
        (changed(totals={}), "its field `totals` is not what it should be"),
        (changed(link={**A.link, "x": 1}), "its field `link` is not what it should be"),
        (changed(cursor="{"), "its cursor cannot be decoded"),
        (changed(cursor='{"$set": []}'), "its cursor cannot be decoded"),
        (sealed(CONTENT.partition(b"\n")[2], format_="0"), "there never was a format 0"),
        (
            sealed(b"", format_="9" * 5_000),
            "it does not begin with a header of batchrun-checkpoint",
        ),
        (
            CONTENT.replace(b" 1 ", b" ", 1),
            "it does not begin with a header of batchrun-checkpoint",
        ),
        (changed(source=" " * 2**20), "it is larger than 1,048,576 bytes"),
    ],
)
def test_what_is_no_checkpoint_is_refused_and_says_why(content: bytes, why: str) -> None:
    with pytest.raises(BrokenCheckpoint) as refusal:
        parse_checkpoint(content)
    assert refusal.value.what.startswith(why)


def test_a_checkpoint_may_have_a_mebibyte_and_not_a_byte_more() -> None:
    missing = 2**20 - len(checkpoint_bytes(A._replace(source="x" * 10**6))[0])
    most = A._replace(source="x" * (10**6 + missing))
    content, digest = checkpoint_bytes(most)
    assert len(content) == 2**20
    assert parse_checkpoint(content) == (most, digest)
    with pytest.raises(CursorError, match="it is larger than 1,048,576 bytes"):
        checkpoint_bytes(most._replace(source=f"{most.source}x"))


def test_a_newer_format_is_refused_with_the_line_to_type() -> None:
    with pytest.raises(NewerFormat) as refusal:
        parse_checkpoint(sealed(b"anything", format_="2"))
    assert str(refusal.value) == (
        "A file of batchrun-checkpoint has format 2; this batchrun knows 1.\n"
        "A newer batchrun wrote it.\n"
        "It was not touched.\n"
        "Install that version again."
    )
    assert refusal.value.exit_code == 5


def test_a_checkpoint_that_could_not_be_read_back_is_not_written() -> None:
    for bad in (
        A._replace(passed=[["step", "big", "x" * 2**20]]),
        A._replace(passed=[["step", "no text", "\udcff"]]),
        A._replace(passed=[["step", "no number", float("nan")]]),
        A._replace(totals={}),
        A._replace(cursor="{"),
        A._replace(marks={1: 2}),  # type: ignore[dict-item]
    ):
        with pytest.raises(CursorError, match=r"^The checkpoint would not read back"):
            checkpoint_bytes(bad)


WITHOUT_C = """
import json, sys
json.encoder.c_make_encoder = None
from batchrun import Checkpoint, checkpoint_bytes
print(checkpoint_bytes(Checkpoint(**json.loads(sys.argv[1])))[1])
"""


def test_a_checkpoint_has_the_same_bytes_where_json_has_no_encoder_in_c() -> None:
    folder = Path(batchrun.__file__).parent
    command = [sys.executable, "-c", WITHOUT_C, json.dumps(A._asdict())]
    assert subprocess.check_output(command, cwd=folder, text=True) == f"{DIGEST}\n"


# --- the store ------------------------------------------------------------------------------------


def test_a_replaced_checkpoint_is_a_new_inode_with_mode_0600(store: CheckpointStore) -> None:
    before = os.umask(0)
    store.replace("r", b"one")
    os.umask(before)
    first = store.path("r").stat()
    with store.path("r").open() as held:  # keeps the number of the old inode in use
        store.replace("r", b"two")
        assert held.read() == "one"
    second = store.path("r").stat()
    assert store.read("r") == b"two"
    assert (second.st_mode & 0o777, second.st_ino != first.st_ino) == (0o600, True)


def test_a_replacement_that_fails_leaves_the_old_file_and_no_temporary_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace("r", b"one")
    for point in ("checkpoint.rename", "file.fsync"):
        monkeypatch.setattr(batchrun, "NAMED_POINT", f"{point}=EIO")
        with pytest.raises(OSError, match="at a named point"):
            store.replace("r", b"two")
        assert [path.name for path in store.folder.iterdir()] == ["r.json"]
        assert store.read("r") == b"one"


def test_only_temporary_files_are_swept(store: CheckpointStore) -> None:
    store.replace("r", b"one")
    store.prepare("r", b"left by a killed writer")
    (store.folder / ".folder.tmp").mkdir()
    store.sweep()
    assert sorted(path.name for path in store.folder.iterdir()) == [".folder.tmp", "r.json"]
    assert store.runs() == ["r"]


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling_link(path: Path, _: Path) -> None:
    path.symlink_to("nowhere")


def directory(path: Path, _: Path) -> None:
    path.mkdir()


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [link, dangling_link, directory, pipe])
def test_what_is_no_file_is_never_read_as_a_checkpoint(
    store: CheckpointStore, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(CONTENT)
    make(store.path("r"), outside)
    with pytest.raises(BrokenCheckpoint, match=r"^it is a (link|directory)"):
        store.read("r")
    assert outside.read_bytes() == CONTENT


def test_a_link_at_the_checkpoint_is_replaced_and_what_it_points_to_is_untouched(
    store: CheckpointStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    for make in (Path.symlink_to, Path.hardlink_to):
        store.path("r").unlink(missing_ok=True)
        make(store.path("r"), outside)
        store.replace("r", CONTENT)
        assert (store.read("r"), outside.read_bytes()) == (CONTENT, b"precious")


# --- cursors --------------------------------------------------------------------------------------

NEW_YORK = ZoneInfo("America/New_York")
CURSORS: list[object] = [
    None,
    True,
    0,
    -1,
    2**53 - 1,
    2**53,
    -(2**53),
    "",
    "SKU-1 ü \x00 \n \U0001f600",
    b"",
    bytes(range(256)),
    0.1,
    -0.0,
    1e308,
    5e-324,
    Decimal("1.10"),
    Decimal("-1E+400"),
    date(2026, 3, 29),
    datetime(2026, 3, 29, 2, 30),  # noqa: DTZ001 - naive stays naive
    datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001
    datetime(2026, 3, 29, 2, 30, 0, 1, tzinfo=UTC),
    datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
    datetime(2026, 11, 1, 1, 30, tzinfo=NEW_YORK),
    datetime(2026, 11, 1, 1, 30, tzinfo=NEW_YORK, fold=1),
    UUID("12345678-1234-5678-1234-567812345678"),
    (),
    (1, ("a", b"b", None), Decimal("0.10")),
    [1, "opaque", {"next": [2.5, None]}],
    {"page": "x", 3: (1,)},
]


@pytest.mark.parametrize("value", CURSORS, ids=lambda value: f"{value!r:.40}")
def test_every_cursor_type_comes_back_as_the_same_value_of_the_same_type(value: object) -> None:
    require_round_trip(value)
    back = decode_cursor(encode_cursor(value))
    assert type(back) is type(value)
    if isinstance(value, datetime):
        assert isinstance(back, datetime)
        assert (back.replace(tzinfo=None), back.fold, back.utcoffset()) == (
            value.replace(tzinfo=None),
            value.fold,
            value.utcoffset(),
        )
    else:
        assert repr(back) == repr(value)


def test_an_integer_of_any_size_comes_back() -> None:
    assert decode_cursor(encode_cursor(10**5000)) == 10**5000


class Colour(str):
    """A subclass would come back as its base."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "NaN and infinity have no place in an order"),
        (float("-inf"), "NaN and infinity have no place in an order"),
        (Decimal("NaN"), "NaN and infinity have no place in an order"),
        (Decimal("sNaN"), "NaN and infinity have no place in an order"),
        ((1, Decimal("Infinity")), "NaN and infinity have no place in an order"),
        ({1}, "it has a value of type set"),
        (Colour("red"), "it has a value of type Colour"),
        (type("date", (), {})(), "it has a value of type date"),
        ((object(),), "it has a value of type object"),
        ("\ud800", "'utf-8' codec can't encode character '\\ud800' in position 1: surrogates"),
    ],
)
def test_what_has_no_order_or_no_encoding_is_refused(value: object, why: str) -> None:
    with pytest.raises(CursorError) as refusal:
        encode_cursor(value)
    assert refusal.value.what.startswith(f"The cursor {value!r} cannot be stored: {why}")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (17, "17"),
        (10**20, "100000000000000000000"),
        (0.5, "0.5"),
        ("SKU-7", '"SKU-7"'),
        ("Käse", '"Käse"'),
        (("Rotterdam", 10), '"Rotterdam", 10'),
        ((date(2026, 1, 31), ("a", 1)), '2026-01-31, ("a", 1)'),
        (Decimal("1.50"), "1.50"),
        (datetime(2026, 1, 31, 8, 30, tzinfo=UTC), "2026-01-31 08:30:00+00:00"),
        (b"\x01\xff", "01ff"),
        ({"page": "x", "at": [1, 2]}, 'page: "x", at: (1, 2)'),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    ],
)
def test_a_cursor_is_shown_as_a_person_would_write_it(value: object, written: str) -> None:
    assert batchrun.cursor_text(encode_cursor(value)) == written


def test_a_cursor_may_have_64_kb_of_bytes_and_no_more() -> None:
    most = "x" * (65_536 - 2)
    assert decode_cursor(encode_cursor(most)) == most
    with pytest.raises(CursorError) as refusal:
        encode_cursor(most + "x")
    assert str(refusal.value) == "The cursor takes 65537 bytes; 65536 are allowed."
    with pytest.raises(CursorError):
        encode_cursor("ü" * 40_000)
