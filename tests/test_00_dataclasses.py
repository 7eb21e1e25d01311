"""The dataclasses of batchrun.py behave as the standard library's, without being compiled."""

from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from typing import Any

import pytest

import batchrun
from batchrun import Launch, ProcessIdentity

ME: Any = ProcessIdentity  # called wrongly on purpose, which type checkers refuse


def test_they_are_equal_hashed_and_shown_by_their_fields() -> None:
    one, same = ProcessIdentity(1, 2, "boot"), ProcessIdentity(boot_id="boot", ticks=2, pid=1)
    assert (one, hash(one), {one, same}) == (same, hash(same), {one})
    assert one != replace(one, pid=3)
    assert repr(same) == "ProcessIdentity(pid=1, ticks=2, boot_id='boot')"
    assert list(vars(same)) == [each.name for each in fields(same)] == ["pid", "ticks", "boot_id"]
    assert is_dataclass(same)
    assert asdict(same) == vars(same)


def test_defaults_are_made_anew_for_each() -> None:
    one, other = Launch("stock"), Launch("stock", fresh=True)
    assert one.overrides == {}
    assert one.overrides is not other.overrides
    assert list(vars(one)) == [each.name for each in fields(one)]


@pytest.mark.parametrize(
    ("values", "named", "message"),
    [
        ((1, 2), {}, "ProcessIdentity needs boot_id"),
        ((1, 2, "b", 4), {}, "ProcessIdentity takes each of pid, ticks, boot_id once"),
        ((1, 2, "b"), {"pid": 1}, "ProcessIdentity takes each of pid, ticks, boot_id once"),
        ((1, 2, "b"), {"age": 1}, "ProcessIdentity takes each of pid, ticks, boot_id once"),
    ],
)
def test_what_does_not_fit_the_fields_is_refused(
    values: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        ME(*values, **named)
    assert str(refused.value) == message


def test_a_frozen_one_cannot_be_changed() -> None:
    one: Any = ProcessIdentity(1, 2, "boot")
    with pytest.raises(FrozenInstanceError, match="pid of a ProcessIdentity cannot be changed"):
        one.pid = 3
    with pytest.raises(FrozenInstanceError):
        del one.pid


def test_one_that_is_not_frozen_can_be_changed_and_not_hashed() -> None:
    class Count:
        number: int

    made: Any = vars(batchrun)["dataclass"](Count)(1)
    made.number = 2
    assert repr(made) == "Count(number=2)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


@pytest.mark.parametrize(
    "text", ["PASSWORD=abc", "pa\u017f\u017fword=abc", "toKen: abcd", "x://u:abcd@h/"]
)
def test_no_form_of_a_secret_slips_past_the_look_that_comes_before_the_patterns(text: str) -> None:
    assert "abc" not in batchrun.mask_secrets(text)
