"""Checksum of samples, by which ranks notice that they read the same stream, or different ones."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["fingerprint"]


def fingerprint(samples: Iterable[Any]) -> int:
    """Return a checksum of the numbers and texts in samples, or in batches of them; 0 for no samples.

    Example:
        >>> fingerprint([]), fingerprint([torch.zeros(2)]) == fingerprint([torch.zeros(2)])
        (0, True)
        >>> fingerprint([{"x": 1.0}]) == fingerprint([{"x": 2.0}])
        False
    """
    crc = 0
    for sample in samples:
        crc = _added(crc, sample)
    return crc


def _added(crc: int, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return zlib.crc32(
            value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"", crc
        )
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes() if value.dtype != object else repr(value).encode(), crc)
    if isinstance(value, dict):
        for key, item in value.items():
            crc = _added(zlib.crc32(repr(key).encode(), crc), item)
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = _added(crc, item)
        return crc
    if isinstance(value, bytes):
        return zlib.crc32(value, crc)
    if value is None or isinstance(value, str | bool | int | float | complex | np.generic):
        return zlib.crc32(repr(value).encode(), crc)
    return zlib.crc32(type(value).__name__.encode(), crc)  # an object, whose address would differ between ranks
