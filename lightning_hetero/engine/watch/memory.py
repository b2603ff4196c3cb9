"""Most memory that each worker has used, exchanged with each sync round."""

import sys

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["MemoryUse"]

Array = npt.NDArray[np.float64]


class MemoryUse:
    """Payload of a sync round with the most bytes that this rank has used so far.

    Args:
        device: device of this rank. On CUDA these are the bytes of tensors, on a CPU those of the process.

    Attributes:
        everyone: bytes of each rank, empty before the first round.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.everyone: tuple[float, ...] = ()

    def pack(self) -> Array:
        """Return the bytes of this rank."""
        if self.device.type == "cuda":
            return np.array([float(torch.cuda.max_memory_allocated(self.device))])
        return np.array([_process_bytes()])

    def unpack(self, everyone: Array, control: ControlPlane) -> None:
        """Take in the bytes of all ranks."""
        self.everyone = tuple(map(float, everyone[:, 0]))


def _process_bytes() -> float:
    """Return the most bytes that this process had in memory, NaN where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
