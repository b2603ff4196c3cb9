"""What is said of a failure, and which errors may follow from another rank's."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.failures.failure import Failure, is_ordinary, of_connection


def raised(kind, text):
    try:
        raise kind(text)
    except kind as error:
        return error


def test_a_failure_by_an_exception_has_the_end_of_its_traceback():
    failure = Failure.of(2, raised(ValueError, "bad batch"))
    assert (failure.rank, failure.what, failure.lost) == (2, "ValueError: bad batch", False)
    assert "raise kind(text)" in failure.trace
    assert Failure.from_json(failure.to_json()) == failure


def test_a_long_message_is_cut():
    failure = Failure.of(0, raised(ValueError, "x" * 100_000))
    assert len(failure.what) <= 1000
    assert len(failure.trace) <= 4000


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            Failure(1, "silent", lost=True),
            "rank 0 ends the training, which cannot go on: rank 1 is lost (silent). Look",
        ),
        (
            Failure(1, "KeyError: 3"),
            "rank 0 ends the training, which cannot go on: rank 1 failed first: KeyError: 3. L",
        ),
        (Failure(None, "gone"), "rank 0 ends the training, which cannot go on: the launcher failed first: gone. Look"),
        (Failure(0, "silent", lost=True), "rank 0 ends: the other ranks have ended without it, because it was lost"),
    ],
)
def test_a_rank_says_why_it_ends(failure, said):
    assert failure.farewell(0).startswith(said)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("Timed out waiting 4000ms for recv operation to complete"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (ConnectionResetError("reset"), True),
        (caused(ValueError("of the user"), RuntimeError("Broken pipe")), True),
        (ValueError("the connection of the user's own database"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_which_errors_may_follow_from_those_of_other_ranks(error, follows):
    assert of_connection(error) is follows


def test_errors_that_cause_each_other_are_followed_once():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not of_connection(one)


@pytest.mark.parametrize(
    ("error", "ordinary"),
    [
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(3), False),
        (SystemExit("bad"), False),
        (StopIteration(), True),
        (GeneratorExit(), True),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_exceptions_are_no_failure(error, ordinary):
    assert is_ordinary(error) is ordinary
