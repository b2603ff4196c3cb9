"""All-gather with gradients for unequal numbers of rows per rank, for which torch's own aborts the process.

Before any tensor is sent, every rank tells the others its shape. Shapes that do not fit together are then an error on
all ranks; an error on one alone would leave the others waiting.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["gather_rows", "refuse_own_gather"]

MOST_DIMENSIONS = 64  # torch's limit
DTYPES = {zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def gather_rows(
    tensor: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], control: ControlPlane, group: Any = None
) -> torch.Tensor:
    """Gather the tensors of all ranks; a collective call.

    Tensors of equal shape are stacked: ``(W, b, ...)``. If their first dimensions differ, the rows are concatenated in
    the order of the ranks, behind a first dimension of 1: ``(1, b_0 + b_1 + ..., ...)``. The number of dimensions is
    the same in both cases, and joining the first two, as by ``flatten(0, 1)``, gives the rows of all ranks.

    Args:
        tensor: this rank's tensor.
        gather: stacks tensors that have one shape on all ranks.
        control: control plane that exchanges the shapes.
        group: ranks that take part; all of them by default.

    Raises:
        ValueError: on every rank, if tensors differ in anything but their first dimension.
    """
    shapes = _shapes(tensor, control, group)
    if all(shape == shapes[0] for shape in shapes):
        return gather(tensor)
    if min(map(len, shapes)) == 1 or len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
        listing = ", ".join(
            f"rank {rank}: {str(dtype).removeprefix('torch.')}{list(shape)}"
            for rank, (dtype, *shape) in enumerate(shapes)
        )
        raise ValueError(
            f"all_gather() was given tensors that do not fit together ({listing}). They may differ in their first "
            "dimension only: pad the others to one size before."
        )
    rows = [shape[1] for shape in shapes]
    missing = tensor.new_zeros((max(rows) - len(tensor), *tensor.shape[1:]))
    everyone = gather(torch.cat([tensor, missing]))
    return torch.cat([padded[:count] for padded, count in zip(everyone, rows, strict=True)])[None]


def _shapes(tensor: torch.Tensor, control: ControlPlane, group: Any) -> list[tuple[Any, ...]]:
    """Gather type and dimensions of each rank's tensor."""
    own: npt.NDArray[np.float64] = np.zeros(2 + MOST_DIMENSIONS)
    own[: 2 + tensor.ndim] = zlib.crc32(str(tensor.dtype).encode()), tensor.ndim, *tensor.shape
    everyone: Any
    if group is None or group is dist.group.WORLD:
        everyone = control.gather(own)
    else:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
    return [(DTYPES[int(each[0])], *(int(size) for size in each[2 : 2 + int(each[1])])) for each in everyone]


def refuse_own_gather(
    model: torch.nn.Module, world_size: int, policy: str | None, error: type[Exception] = ValueError
) -> None:
    """Refuse a part of the model that itself gathers over ranks and assumes equal batches.

    Self-supervised losses announce this by ``gather_distributed=True`` or ``sinkhorn_gather_distributed=True``.

    Raises:
        Exception: of type ``error``, if the model has such a part and batches may be unequal.
    """
    if world_size < 2 or policy == "even":
        return
    for name, module in model.named_modules():
        for flag in ("gather_distributed", "sinkhorn_gather_distributed"):
            if getattr(module, flag, False) is True:
                raise error(
                    f"{name or 'the model'} ({type(module).__name__}) has {flag}=True: it gathers over ranks by itself "
                    "and takes their batches to be of equal size. Set it to False and gather with self.all_gather(..., "
                    "sync_grads=True) or fabric.all_gather(), or set policy='even' and drop_last=True."
                )
