"""State of a checkpoint that cannot be read is told as what it is, once."""

import pytest
import torch

from lightning_hetero.core.checkpoint_state import CheckpointStateError, check_tensors, reading_state


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
