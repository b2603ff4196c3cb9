"""The all-reduced gradient of a compressed step: the blocks that were sent, without a tensor of the model's size."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lightning_hetero.compression.layout import Slot
from lightning_hetero.compression.reference import Pack
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["BlockGradient", "BlockMarks", "GradientParts"]


@checked_keywords
@dataclass(frozen=True, eq=False)
class BlockGradient:
    """Gradient of one parameter.

    Args:
        rows: numbers of the parameter's touched blocks, ascending.
        values: their elements, shape ``(len(rows), block)``, in the order of memory; 0 after the parameter's end.
        grad: the same as ``p.grad``, a sparse torch tensor that shares the memory of ``values``, so that loss scalers
            and clipping change both.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2, 12))
        >>> one = BlockGradient.of(p, torch.tensor([1]), torch.arange(16.0).view(1, 16))
        >>> one.grad.to_dense()[1].tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        >>> _ = one.grad.div_(2)
        >>> one.values[0, :3].tolist(), one.stands(p)
        ([0.0, 0.5, 1.0], False)
    """

    rows: torch.Tensor
    values: torch.Tensor
    grad: torch.Tensor

    def stands(self, parameter: torch.Tensor) -> bool:
        """Return whether this is still the parameter's gradient, whose values may have been changed in place.

        Torch's ``mul_`` moves a sparse tensor to other memory; values are then copied from there.
        """
        if parameter.grad is not self.grad:
            return False
        held = self.grad._values() if self.grad.is_sparse and len(self.rows) else self.values
        if held.data_ptr() == self.values.data_ptr():
            return True
        behind = max(0, int(self.rows[-1] + 1) * self.values.shape[1] - parameter.numel())
        own = self.values.view(-1)[: self.values.numel() - behind]
        if held.shape != own.shape or (self.grad.is_coalesced() and not parameter.is_contiguous()):
            return False  # other places, or in another order
        own.copy_(held)
        return True

    @classmethod
    def of(cls, parameter: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> "BlockGradient":
        """Return the gradient of a parameter from its touched blocks; elements after its end have to be 0."""
        block = values.shape[1]
        if parameter.dim() == 0:  # has no sparse form, and one element
            values = values if len(rows) else values.new_zeros(1, block)
            return cls(rows, values[: len(rows)], values[0, 0])
        return cls(rows, values, _sparse(parameter, rows, values.view(-1), _places(parameter, rows, block), block))


def _sparse(
    parameter: torch.Tensor, rows: torch.Tensor, flat: torch.Tensor, places: torch.Tensor, block: int
) -> torch.Tensor:
    """Return blocks as a sparse torch tensor that shares their memory, without the elements after the end."""
    rest = parameter.numel() % block
    if rest and len(rows) and int(rows[-1]) == parameter.numel() // block:
        flat, places = flat[: rest - block], places[:, : rest - block]
    whole = parameter.is_contiguous()
    checks = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():  # off by default, too, but torch 2.11 warns until it is set
        checks.disable()
    return torch.sparse_coo_tensor(places, flat, parameter.shape, is_coalesced=whole, check_invariants=False)


def _places(parameter: torch.Tensor, rows: torch.Tensor, block: int) -> torch.Tensor:
    """Return the coordinates of the elements of blocks, shape ``(dimensions, elements)``, on the device of ``rows``."""
    left, lanes = rows.cpu().numpy()[:, None] * block, np.arange(block)
    places, strides = np.empty((parameter.dim(), len(rows), block), np.int64), parameter.stride()
    if parameter.is_contiguous() and not any(stride % block for stride in strides[:-1]):
        for place, stride in zip(places, strides[:-1], strict=False):  # the same in the whole block
            at, left = np.divmod(left, stride)
            place[:] = at
        np.add(left, lanes, out=places[-1])
    else:
        for place, stride, size in zip(places, strides, parameter.shape, strict=True):
            place[:] = (left + lanes) // stride % size
    return torch.from_numpy(places.reshape(parameter.dim(), -1)).to(rows.device)


@dataclass(frozen=True, eq=False)
class BlockMarks:
    """Gradient of one parameter on a GPU, where the host does not know which blocks were sent, nor how many.

    Args:
        marks: whether each block is touched, bool.
        grad: ``p.grad``, 0 in all other blocks.
    """

    marks: torch.Tensor
    grad: torch.Tensor

    def stands(self, parameter: torch.Tensor) -> bool:
        """Return whether it is still the parameter's gradient."""
        return parameter.grad is self.grad


class GradientParts:
    """Split of each step's sum into parts for the parameters, which are the same in every step.

    Vectors, and matrices whose rows are whole blocks, are processed together: on a small model, the overhead of a call
    for each exceeds the work.

    Args:
        slots: places of the parameters, in their order, in whole blocks of the sum.
        block: elements of a block.
    """

    def __init__(self, slots: Mapping[torch.Tensor, Slot], block: int) -> None:
        self._parameters, self._block = list(slots), block
        self._bounds = np.array([0, *((slot.start + slot.padded) // block for slot in slots.values())])
        self._widths = np.array([_width(p, block) for p in slots])
        self._usual = [_is_usual(p, block) for p in slots]
        self._lanes = np.arange(block)

    def of(self, total: Pack) -> dict[torch.Tensor, BlockGradient]:
        """Return each parameter's part of a sum, whose indices ascend."""
        indices, block = total.indices.numpy(), self._block
        ends = np.searchsorted(indices, self._bounds)
        counts = np.diff(ends)
        rows = indices - np.repeat(self._bounds[:-1], counts)
        places = np.empty((2, len(rows), block), np.int64)
        places[0], left = (part[:, None] for part in np.divmod(rows * block, np.repeat(self._widths, counts)))
        np.add(left, self._lanes, out=places[1])
        sizes, lengths = counts.tolist(), (counts * block).tolist()
        parts = zip(
            self._parameters, self._usual, torch.from_numpy(rows).split(sizes), total.values.split(sizes),
            torch.from_numpy(places.reshape(2, -1)).split(lengths, 1), total.values.view(-1).split(lengths),
            strict=True,
        )  # fmt: skip
        gradients = {}
        for p, usual, own, values, where, flat in parts:
            if usual and values.dtype == p.dtype:
                grad = _sparse(p, own, flat, where if p.dim() == 2 else where[1:], block)
                gradients[p] = BlockGradient(own, values, grad)
            else:
                gradients[p] = BlockGradient.of(p, own.to(p.device), values.to(p.device, p.dtype))
        return gradients


def _width(parameter: torch.Tensor, block: int) -> int:
    """Return the elements of a row of a usual matrix; of a vector, all elements, rounded up to whole blocks."""
    return parameter.shape[1] if parameter.dim() == 2 else -(-parameter.numel() // block) * block


def _is_usual(parameter: torch.Tensor, block: int) -> bool:
    """Return whether a parameter is a vector, or a matrix whose rows are whole blocks, on the host."""
    whole = parameter.dim() == 1 or (parameter.dim() == 2 and parameter.shape[1] % block == 0)
    return whole and parameter.is_contiguous() and parameter.device.type == "cpu"
