"""Section 1: every state, edge, exit code and error says what it is."""

import copy
from collections.abc import Callable

import pytest

from batchrun import (
    EXIT_SENTENCES,
    FINISHED,
    NEW,
    TRANSITIONS,
    BatchrunError,
    ExitCode,
    Reject,
    RunState,
)


def every_kind(kind: type[BatchrunError]) -> list[type[BatchrunError]]:
    return [kind, *(below for each in kind.__subclasses__() for below in every_kind(each))]


def test_every_exit_code_has_a_sentence_of_its_own() -> None:
    assert set(EXIT_SENTENCES) == set(ExitCode)
    assert len(set(EXIT_SENTENCES.values())) == len(ExitCode)


def test_every_state_can_be_reached_and_only_a_finished_one_is_the_end() -> None:
    reached = {NEW}
    for _ in RunState:
        reached |= {after for before, after in TRANSITIONS if before in reached}
    assert reached == {NEW, *RunState}
    ends = {state for state in RunState if state not in {before for before, _ in TRANSITIONS}}
    assert ends == set(FINISHED)


def test_a_letter_is_what_why_unchanged_and_what_to_type_in_this_order() -> None:
    letter = BatchrunError("What.", todo="Type.", why="Why.", unchanged="Unchanged.")
    assert str(letter) == "What.\nWhy.\nUnchanged.\nType."
    assert str(BatchrunError("What.", todo="Type.")) == "What.\nType."


@pytest.mark.parametrize("kind", every_kind(BatchrunError))
def test_every_error_has_an_exit_code_and_a_sentence(kind: type[BatchrunError]) -> None:
    assert isinstance(kind.exit_code, ExitCode)
    assert kind.exit_code != ExitCode.DONE
    assert (kind.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_row_can_be_copied_as_any_tuple(way: Callable[[Reject], Reject]) -> None:
    row = Reject({"sku": [1]}, "no price", raw=True)
    copied = way(row)
    assert copied == row
    assert (type(copied), copied.record, copied.raw) == (Reject, {"sku": [1]}, True)
