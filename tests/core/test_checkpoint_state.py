"""State of a checkpoint that cannot be read is told as what it is, once."""

import json

import numpy as np
import pytest
import torch

from lightning_hetero.core.checkpoint_state import (
    CheckpointStateError,
    DamagedCheckpointError,
    changed_since,
    check_checksums,
    check_tensors,
    reading_state,
    with_checksums,
)


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError])
def test_what_malformed_values_raise_is_named_with_what_was_read(error):
    with (
        pytest.raises(CheckpointStateError, match=rf"of: the plans \({error.__name__}: .*lost") as raised,
        reading_state("the plans"),
    ):
        raise error("lost")
    assert isinstance(raised.value.__cause__, error)


def test_the_innermost_state_is_the_one_that_is_named():
    with pytest.raises(CheckpointStateError, match="of: the plans "), reading_state("all"), reading_state("the plans"):
        raise KeyError("history")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="out of memory"), reading_state("the plans"):
        raise RuntimeError("out of memory")


def test_a_function_can_be_marked_as_one_that_reads():
    @reading_state("the plans")
    def read(state):
        return state["entries"]

    assert read({"entries": 3}) == 3
    with pytest.raises(CheckpointStateError, match="the plans"):
        read({})


@pytest.mark.parametrize("values", [[torch.zeros(1)], {"weight": 1.0}, {0: torch.zeros(1)}])
def test_tensors_by_name_are_that(values):
    check_tensors("sums", {"weight": torch.zeros(1)})
    with pytest.raises(TypeError, match="sums"):
        check_tensors("sums", values)


STATE = {
    "number": 0.1,
    "none": None,
    "deep": {1: [(2, "a"), True], "x": {"y": -0.0}},
    "array": np.arange(4.0),
    "scalar": np.float32(0.5),
    "tensor": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}


def test_a_value_that_changed_is_named_whatever_it_is():
    state = with_checksums(STATE)
    assert changed_since(state) is None
    others = {
        "number": [0.10000000000000002, "0.1", None],
        "none": [0, False, "null"],
        "deep": [{1: [(2, "a"), 1], "x": {"y": -0.0}}, {1: [(2, "a"), True], "x": {"y": 0.0}}, {1: [2, "a", True]}, {}],
        "array": [np.arange(4.0)[:3], np.arange(4.0) + 1e-15, np.arange(4.0).reshape(2, 2)],
        "scalar": [0.25],
        "tensor": [torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)],
        "empty": [torch.zeros(1), torch.zeros(0, dtype=torch.int32)],
    }
    for name, values in others.items():
        for value in values:
            assert changed_since({**state, name: value}) == name
        with pytest.raises(DamagedCheckpointError, match=f"the state of the session is damaged: '{name}'"):
            check_checksums({key: value for key, value in state.items() if key != name}, "the session")


def test_a_state_may_be_kept_in_any_way_and_be_a_part_of_another():
    plain = {"steps": 3.0, "by": {2: [1.5, None]}, "name": "é\ud800"}
    state = with_checksums(plain)
    for again in (json.loads(json.dumps(state)), {**state, "other": 1}, dict(reversed(list(state.items())))):
        assert changed_since(again) is None
    apart = {**state, **with_checksums({"interval": 1}, "others")}
    assert changed_since(apart) is changed_since(apart, "others") is None
    assert changed_since({**apart, "interval": 2}, "others") == "interval"


@pytest.mark.parametrize("state", [{}, {"steps": 3}, None, [1], "text"])
def test_a_state_without_checksums_has_nothing_to_compare(state):
    assert changed_since(state) is None


@pytest.mark.parametrize("checksums", [[1], "text", {"steps": None}, {"steps": 1}, {1: "00000000"}])
def test_checksums_that_are_none_are_a_damage(checksums):
    assert changed_since({"steps": 3, "checksums": checksums})


def test_what_has_no_bytes_of_its_own_does_not_count():
    state = with_checksums({"own": [object()], "steps": 1})
    assert changed_since({**state, "own": [object()]}) is None
