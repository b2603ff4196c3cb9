"""Launch parameters of the kernels: tiles, warps, and how many blocks a model may have."""

from dataclasses import dataclass
from typing import Any

__all__ = ["EIGHT_WARPS", "MAX_BLOCKS", "OPTIONS", "TILING", "Tiling"]


@dataclass(frozen=True)
class Tiling:
    """Sizes of the parts that a program processes.

    Args:
        blocks: blocks, or slots of a message, at once.
        repeats: tiles that a program processes one after the other, if it has several.
        scores: scores, words or counts at once.
    """

    blocks: int = 128
    repeats: int = 8
    scores: int = 1024

    @property
    def chunk(self) -> int:
        """Blocks of a program with several tiles."""
        return self.blocks * self.repeats


TILING = Tiling()

MAX_BLOCKS = 2**31 - 2**20
"""Most blocks of a model: their numbers, and those of a program beyond the last, have to fit into 32 bits."""

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fusion, a product and a sum are rounded separately, as on CPU."""

EIGHT_WARPS: dict[str, Any] = {**OPTIONS, "num_warps": 8}
"""Options for kernels that would need more than 64 registers with four warps."""
