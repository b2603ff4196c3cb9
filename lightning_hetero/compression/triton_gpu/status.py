"""Status of received messages, which kernels write and the host reads without waiting.

The status of a step has a row each for the codes, the blocks and the flags of all ranks, then the verdict. A code has a
bit for each fault and, above these, the version of a message in another version of the format.
"""

import torch

from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.message_header import MAGIC, foreign, refusal

__all__ = ["FAULTS", "VERSION_SHIFT", "StatusReadback", "faults", "status_length"]

FAULTS = {
    1: "magic or version differs",
    2: "format fingerprint differs",
    4: "sender or bucket differs",
    8: "step differs",
    16: "checksum does not match",
    32: "its number of blocks or its flags are not allowed",
    64: "its indices do not match its number of blocks",
    128: "its indices are not ascending numbers of the model's blocks",
    256: "it has values that are not finite",
}
"""Faults of a message, by bit of its code."""

VERSION_SHIFT = 16
"""Bits of a code below the message's version."""


def status_length(world_size: int) -> int:
    """Return the number of integers in a status.

    Example:
        >>> status_length(2)
        7
    """
    return 3 * world_size + 1


def faults(code: int) -> str:
    """Return the faults of a message as text.

    Example:
        >>> faults(4 | 16)
        'sender or bucket differs; checksum does not match'
    """
    if code & 1:
        its_version = code >> VERSION_SHIFT
        return foreign(MAGIC | its_version if its_version else 0)
    return "; ".join(text for bit, text in FAULTS.items() if code & bit)


class StatusReadback:
    """Copy of the status on the host, which is started in one step and read in the next.

    Args:
        status: status on the device.
        world_size: number of ranks.
    """

    def __init__(self, status: torch.Tensor, world_size: int) -> None:
        self._status, self._world_size = status, world_size
        on_gpu = status.device.type == "cuda"
        # Only a copy to pinned memory does not block the host.
        self._seen = torch.zeros(len(status), dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._unread: tuple[int, int] | None = None

    def start(self, *, step: int, bucket: int) -> None:
        """Start a copy of this step's status."""
        self._seen.copy_(self._status, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._unread = step, bucket

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last step, ``None`` if it was returned before; wait until the device has it.

        Raises:
            ValueError: naming rank and bucket of a malformed message.
        """
        if self._unread is None:
            return None
        (step, bucket), self._unread = self._unread, None
        if self._copied is not None:
            self._copied.synchronize()
        status, world = self._seen.tolist(), self._world_size
        for rank, code in enumerate(status[:world]):
            if code:
                raise refusal(faults(code), rank=rank, bucket=bucket, step=step)
        verdict = status[3 * world]
        return Outcome(step, bool(verdict), 0 if verdict else sum(status[world : 2 * world]))
