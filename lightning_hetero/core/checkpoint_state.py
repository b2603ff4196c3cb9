"""Errors of a checkpoint whose state of this package cannot be read: edited, damaged, or saved by another version."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["CheckpointStateError", "DamagedCheckpointError", "check_tensors", "reading_state"]


class DamagedCheckpointError(RuntimeError):
    """Raised for a checkpoint file that was cut off, or that has changed since it was written.

    Example:
        >>> issubclass(DamagedCheckpointError, RuntimeError)
        True
    """


class CheckpointStateError(ValueError):
    """Error of a checkpoint in which this package's state is malformed.

    Example:
        >>> issubclass(CheckpointStateError, ValueError)
        True
    """


@contextmanager
def reading_state(what: str) -> Iterator[None]:
    """Name the state in the error if reading it fails; a context manager and a decorator.

    Args:
        what: the state, such as "what the policy has learned".

    Raises:
        CheckpointStateError: if the body raises what malformed values cause (``KeyError``, ``TypeError`` and others).

    Example:
        >>> try:
        ...     with reading_state("the plans"):
        ...         {"entries": []}["history"]
        ... except CheckpointStateError as error:
        ...     str(error)[:75]
        "the checkpoint's state cannot be read, of: the plans (KeyError: 'history')."
    """
    try:
        yield
    except CheckpointStateError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointStateError(
            f"the checkpoint's state cannot be read, of: {what} ({type(error).__name__}: {error}). It was edited or "
            "damaged, or another version saved it. Use another checkpoint, or only the weights of this one: "
            'model.load_state_dict(torch.load(path)["state_dict"]).'
        ) from error


def check_tensors(name: str, values: Any) -> None:
    """Check that a state maps names of parameters to tensors.

    Raises:
        TypeError: if it does not.

    Example:
        >>> import torch
        >>> check_tensors("sums", {"weight": torch.zeros(2)})
    """
    import torch  # planners' states are read by this module, too, and hold none

    if not isinstance(values, Mapping):
        raise TypeError(f"{name} is a {type(values).__name__}, not a dict of tensors")
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}[{key!r}] is a {type(value).__name__}, not a tensor")
