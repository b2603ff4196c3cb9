"""The sum of a compressed step as the optimizer gets it: blocks that were sent, no tensor of the model's size."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lightning_hetero.compression.layout import Slot
from lightning_hetero.compression.reference import Pack

__all__ = ["BlockGradient", "BlockMarks", "block_gradients"]


@dataclass(frozen=True, eq=False)
class BlockGradient:
    """Gradient of one parameter.

    Args:
        rows: numbers of the parameter's touched blocks, ascending.
        values: their elements, shape ``(len(rows), block)``, in the order of memory; 0 behind the parameter's end.
        grad: the same as ``p.grad`` holds it, a sparse tensor of torch's over the memory of ``values``, so that what
            loss scalers and clipping do to one of them counts.

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
        """Whether this is still the parameter's gradient, in the same memory (torch's ``mul_`` gives it another)."""
        if parameter.grad is not self.grad:
            return False
        return not self.grad.is_sparse or self.grad._values().data_ptr() == self.values.data_ptr() or not len(self.rows)

    @classmethod
    def of(cls, parameter: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> "BlockGradient":
        """Gradient of a parameter from its touched blocks; what lies behind its end has to be 0."""
        block, numel = values.shape[1], parameter.numel()
        if parameter.dim() == 0:  # has no sparse form, and one element
            values = values if len(rows) else values.new_zeros(1, block)
            return cls(rows, values[: len(rows)], values[0, 0])
        places = _places(parameter, rows, block)
        inside = values.numel()
        if numel % block and len(rows) and int(rows[-1]) == numel // block:
            inside -= block - numel % block
        grad = torch.sparse_coo_tensor(
            places[:, :inside],
            values.view(-1)[:inside],
            parameter.shape,
            is_coalesced=parameter.is_contiguous(),
            check_invariants=False,
        )
        return cls(rows, values, grad)


def _places(parameter: torch.Tensor, rows: torch.Tensor, block: int) -> torch.Tensor:
    """Coordinates of the elements of blocks, shape ``(dimensions, elements)``, on the device of ``rows``."""
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
        """Whether it is still what ``p.grad`` holds."""
        return parameter.grad is self.grad


def block_gradients(total: Pack, slots: Mapping[torch.Tensor, Slot]) -> dict[torch.Tensor, BlockGradient]:
    """Each parameter's part of a sum.

    Args:
        total: the sum, its indices ascending.
        slots: places of the parameters, in their order, in whole blocks of the sum.
    """
    block = total.values.shape[1]
    bounds = np.array([0, *((slot.start + slot.padded) // block for slot in slots.values())])
    indices = total.indices.numpy()
    ends = np.searchsorted(indices, bounds).tolist()
    gradients = {}
    for parameter, begin, end, bound in zip(slots, ends, ends[1:], bounds.tolist(), strict=False):
        rows, values = torch.from_numpy(indices[begin:end] - bound), total.values[begin:end]
        if values.dtype != parameter.dtype or parameter.device.type != "cpu":
            rows, values = rows.to(parameter.device), values.to(parameter.device, parameter.dtype)
        gradients[parameter] = BlockGradient.of(parameter, rows, values)
    return gradients
