"""The header of a message: magic and version, address, step, flags, blocks, two sums of the payload, fingerprint.

Eight 64-bit words. The sums are those of Fletcher's checksum over 32-bit words, modulo 2^64, which can be taken on any
device. The first one also covers the header's own fields.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "HEADER_WEIGHTS",
    "MAGIC",
    "MESSAGE_KIND",
    "NON_FINITE",
    "Bytes",
    "Checksum",
    "Header",
    "Words",
    "address",
    "checksum",
    "foreign",
    "refusal",
    "seal",
]

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int64]
Checksum = Callable[[Bytes, Words], tuple[int, int]]

HEADER_BYTES = 64
MAGIC = 0x4C48424B << 8
FORMAT_VERSION = 3
MESSAGE_KIND = MAGIC | FORMAT_VERSION
"""First word of a header."""

HEADER_WEIGHTS = (0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
"""Odd factors of address, step, flags and number of blocks in the first sum."""

NON_FINITE = 1
"""Flag: the sender's gradient was not finite, so that all ranks skip the step."""


class Header(NamedTuple):
    """Words of a header.

    Args:
        kind: magic and version.
        address: sender and bucket, see :func:`address`.
        step: number of the step.
        flags: :data:`NON_FINITE` or 0.
        blocks: number of blocks.
        first_sum: of the payload, with the fields of the header, see :func:`seal`.
        second_sum: of the payload, weighted by position.
        fingerprint: of the format.
    """

    kind: int
    address: int
    step: int
    flags: int
    blocks: int
    first_sum: int
    second_sum: int
    fingerprint: int

    @classmethod
    def of(cls, message: Bytes) -> "Header":
        """Read the header of a message on the host."""
        return cls(*message[:HEADER_BYTES].view(np.int64).tolist())

    @property
    def sealed_fields(self) -> tuple[int, int, int, int]:
        """Fields that the first sum covers besides the payload."""
        return self.address, self.step, self.flags, self.blocks


def address(rank: int, bucket: int) -> int:
    """Return sender and bucket as one word, which exposes a message in another rank's row.

    Example:
        >>> hex(address(3, 1))
        '0x300000001'
    """
    return rank << 32 | bucket


def checksum(payload: Bytes, positions: Words) -> tuple[int, int]:
    """Return ``(sum w_i, sum (i + 1) w_i)`` of the 32-bit words, modulo 2^64, as signed numbers.

    Example:
        >>> checksum(np.array([1, 0, 0, 0, 2, 0, 0, 0], dtype=np.uint8), np.arange(1, 3))
        (3, 5)
    """
    words = payload.view(np.int32).astype(np.int64)
    return int(words.sum()), int((words * positions).sum())


def seal(first: int, fields: Iterable[int]) -> int:
    """Return the first sum with address, step, flags and number of blocks added, so that it covers the header, too.

    Example:
        >>> seal(5, [0, 0, 0, 0])
        5
    """
    total = first + sum(weight * field for weight, field in zip(HEADER_WEIGHTS, fields, strict=True))
    return (total + 2**63) % 2**64 - 2**63


def refusal(what: str, *, rank: int, bucket: int, step: int) -> ValueError:
    """Return the error of a malformed message."""
    return ValueError(
        f"the gradient message of rank {rank}, bucket {bucket}, step {step} is refused: {what}. Nothing of it was "
        "applied. Check that all ranks run the same code and settings, and the link between them."
    )


def foreign(kind: int) -> str:
    """Return the error text for the first word of a header that is not of this version.

    Example:
        >>> foreign(MAGIC | 2)
        'it is in version 2 of the message format, not 3; install the same version of lightning-hetero on all ranks'
    """
    if kind >> 8 != MAGIC >> 8:
        return "it is no message of this program: magic and version differ"
    return (
        f"it is in version {kind & 0xFF} of the message format, not {FORMAT_VERSION}; install the same version of "
        "lightning-hetero on all ranks"
    )
