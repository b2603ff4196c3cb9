"""A bucket whose sums are stale: one of two buffers is in flight while the other is read."""

import torch

from lightning_hetero.comm.collectives.async_ops import tensor_of
from lightning_hetero.comm.gradients.averager import Future

__all__ = ["StaleBucket"]


class StaleBucket:
    """A DDP bucket with two buffers for its sums, and the sum in flight.

    Args:
        names: names of its parameters.
        sizes: elements of each parameter.
        num_bytes: bytes of the bucket.

    Attributes:
        sums: sum in flight, ``None`` without one.
        own: this rank's own part of the sum, ``None`` if it is not kept.
        known: whether all ranks know the sum in flight already, as after a checkpoint.
    """

    def __init__(self, names: tuple[str, ...], sizes: list[int], num_bytes: int) -> None:
        self.names, self.sizes, self.num_bytes = names, sizes, num_bytes
        self.sums: Future | None = None
        self.own: torch.Tensor | None = None
        self.known = False
        self._buffers: list[torch.Tensor] = []
        self._current = 0

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer whose sum was read in the last step."""
        if not self._buffers:
            self._buffers = [torch.empty_like(like), torch.empty_like(like)]
        self._current ^= 1
        return self._buffers[self._current]

    def keep_own(self, sent: torch.Tensor) -> None:
        """Keep this rank's own part of the sum that is about to be sent."""
        self.own, self.known = sent.clone() if self.own is None else self.own.copy_(sent), False

    def send(self, sums: Future) -> None:
        """Hold a sum in flight."""
        self.sums = sums

    def wait(self) -> torch.Tensor:
        """Wait for the sum in flight, and return it flat.

        Raises:
            RuntimeError: if there is none.
        """
        if self.sums is None:
            raise RuntimeError("no sum of this bucket is in flight; call send() first.")
        return tensor_of(self.sums.wait())

    def share(self) -> torch.Tensor:
        """Wait for the sum in flight and return it flat, for a checkpoint; all ranks know it from now on."""
        self.known = True
        return self.wait()

    def take(self) -> dict[str, torch.Tensor]:
        """Wait for the sum in flight, return it by parameter, and hold it no longer."""
        if self.sums is None:
            return {}
        flat, self.sums, self.known = self.wait(), None, False
        return {name: part.clone() for name, part in zip(self.names, flat.split(self.sizes), strict=True)}
