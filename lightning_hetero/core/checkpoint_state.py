"""State of this package in checkpoints and files: its checksums, and errors if it cannot be read."""

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = [
    "CHECKSUMS",
    "CheckpointStateError",
    "DamagedCheckpointError",
    "changed_since",
    "check_checksums",
    "check_tensors",
    "reading_state",
    "with_checksums",
]

CHECKSUMS = "checksums"
"""Key of a state under which the checksums of its values are."""


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


def with_checksums(state: Mapping[str, Any], key: str = CHECKSUMS) -> dict[str, Any]:
    """Return a state with the checksum of each of its values, for :func:`check_checksums`.

    They are those of the values, not of bytes in a file, so that the state may be saved in any way that keeps numbers
    as they are, JSON included, and more may be added to it. A state without values stays one.

    Args:
        state: plain Python values, arrays and tensors; what else there is has no checksum.
        key: key of the checksums.

    Example:
        >>> with_checksums({"epoch": 3})
        {'epoch': 3, 'checksums': {'epoch': '6dd28e9b'}}
    """
    if not state:
        return {}
    return {**state, key: {name: f"{_checksum(value, 0):08x}" for name, value in state.items()}}


def changed_since(state: Any, key: str = CHECKSUMS) -> str | None:
    """Return the first value of a state that has changed since it got its checksum, ``None`` if there is none.

    A state without checksums, as of an earlier version, has none that changed.

    Example:
        >>> state = with_checksums({"epoch": 3, "step": 7})
        >>> changed_since(state), changed_since({**state, "step": 6}), changed_since({"step": 6})
        (None, 'step', None)
    """
    checksums = state.get(key) if isinstance(state, Mapping) else None
    if checksums is None:
        return None
    if not isinstance(checksums, Mapping):
        return key
    for name, checksum in checksums.items():
        if name not in state or checksum != f"{_checksum(state[name], 0):08x}":
            return str(name)
    return None


def check_checksums(state: Any, what: str, key: str = CHECKSUMS) -> None:
    """Check that no value of a state has changed since it got its checksum.

    Raises:
        DamagedCheckpointError: if one has.

    Example:
        >>> check_checksums({**with_checksums({"epoch": 3}), "epoch": 2}, "the session")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        lightning_hetero.core.checkpoint_state.DamagedCheckpointError: the state of the session is damaged: 'epoch' ...
    """
    name = changed_since(state, key)
    if name is not None:
        raise DamagedCheckpointError(
            f"the state of {what} is damaged: {name!r} is not what was saved. The file that it was read from has "
            f"changed since. Use an earlier one; if the change was intended, take {key!r} out of the state."
        )


def _checksum(value: Any, begin: int) -> int:
    """Return the CRC-32 of a value; tuples count as lists and keys as text, which is what JSON makes of them."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            begin = _checksum(value[name], zlib.crc32(f"{str(name)!r}:".encode(errors="replace"), begin))
        return zlib.crc32(b"}", begin)
    if isinstance(value, list | tuple):
        for one in value:
            begin = _checksum(one, zlib.crc32(b",", begin))
        return zlib.crc32(b"]", begin)
    return zlib.crc32(_content(value), begin)


def _content(value: Any) -> bytes:
    """Return the bytes of a single value; of what has none that stay the same, its type."""
    torch = sys.modules.get("torch")  # no state has tensors before it is loaded
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        plain: bytes = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}".encode() + plain
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value).encode()
    return value if isinstance(value, bytes) else type(value).__name__.encode()
