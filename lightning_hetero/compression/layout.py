"""Layout of all parameters in one flat buffer: padded to whole blocks, so that no block spans two parameters."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["Layout", "Slot", "flat_view", "put_rows", "split", "take_rows"]


@dataclass(frozen=True)
class Slot:
    """Place of one parameter.

    Args:
        name: its name in the module.
        start: its first element in the flat buffer, a multiple of the block.
        numel: its elements.
        padded: elements that it occupies, the next multiple of the block.
    """

    name: str
    start: int
    numel: int
    padded: int


@checked_keywords
@dataclass(frozen=True)
class Layout:
    """Places of all parameters, in the order in which the module names them: the same on all ranks.

    Args:
        slots: places.
        block: elements of a block.

    Example:
        >>> layout = Layout.of([("weight", 20), ("bias", 4)], block=16)
        >>> [slot.start for slot in layout.slots], layout.num_blocks
        ([0, 32], 3)
    """

    slots: tuple[Slot, ...]
    block: int
    by_name: dict[str, Slot] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, int]], block: int) -> "Layout":
        """Lay out parameters of these names and sizes one after the other."""
        slots, start = [], 0
        for name, numel in parameters:
            padded = -(-numel // block) * block
            slots.append(Slot(name, start, numel, padded))
            start += padded
        return cls(tuple(slots), block, {slot.name: slot for slot in slots})

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.slots[-1].start + self.slots[-1].padded if self.slots else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the flat buffer."""
        return self.numel // self.block

    def fingerprint(self) -> int:
        """Return a 32-bit fingerprint of names, sizes and block."""
        return zlib.crc32(repr((self.block, [(slot.name, slot.numel) for slot in self.slots])).encode())

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {"block": self.block, "parameters": [[slot.name, slot.numel] for slot in self.slots]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Layout":
        """Return the layout that :meth:`state_dict` described."""
        return cls.of([(name, numel) for name, numel in state["parameters"]], state["block"])


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of memory, with no copy.

    Raises:
        ValueError: if the tensor has gaps or overlaps in memory.

    Example:
        >>> flat_view(torch.arange(6).view(2, 3).t()).tolist()
        [0, 1, 2, 3, 4, 5]
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense in memory, so it "
                "cannot be cut into blocks. Make the parameter contiguous."
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def split(flat: torch.Tensor, slots: Sequence[Slot]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Split a flat tensor into parameters that lie one after the other without padding, as in a DDP bucket.

    Example:
        >>> slots = Layout.of([("weight", 3), ("bias", 1)], block=16).slots
        >>> [(slot.name, part.tolist()) for slot, part in split(torch.arange(4), slots)]
        [('weight', [0, 1, 2]), ('bias', [3])]
    """
    return zip(slots, flat.split([slot.numel for slot in slots]), strict=True)


def _records(t: torch.Tensor) -> np.ndarray:
    """Return the rows of a matrix as one item each, which numpy copies as a whole."""
    records: np.ndarray = t.detach().view(torch.uint8).numpy().view(f"V{t.shape[1] * t.element_size()}")[:, 0]
    return records


def take_rows(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of a matrix.

    Example:
        >>> take_rows(torch.arange(6.0).view(3, 2), torch.tensor([0, 2])).tolist()
        [[0.0, 1.0], [4.0, 5.0]]
    """
    if t.device.type != "cpu":
        return t.index_select(0, rows)
    part = t.new_empty(len(rows), t.shape[1])
    np.take(_records(t), rows.numpy(), out=_records(part), mode="clip")
    return part


def put_rows(t: torch.Tensor, rows: torch.Tensor, part: torch.Tensor) -> None:
    """Write some rows of a matrix, each once."""
    if t.device.type != "cpu":
        t.index_copy_(0, rows, part)
    else:
        np.put(_records(t), rows.numpy(), _records(part), mode="clip")
