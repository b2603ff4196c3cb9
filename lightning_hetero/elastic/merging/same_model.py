"""Check that all ranks hold the same model, because a merge sums tensors by position, whatever their names are."""

import zlib
from typing import Any

from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane, PlanMismatchError

__all__ = ["require_same_model"]


def require_same_model(module: nn.Module, control: ControlPlane) -> None:
    """Compare names, order, shapes and types of parameters and buffers over ranks; a collective call.

    Values may differ: all ranks get rank 0's.

    Raises:
        PlanMismatchError: on every rank, naming the first tensor that differs, as each rank has it.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors]
    digests = control.gather_objects(zlib.crc32(repr(mine).encode()))
    if len(set(digests)) == 1:
        return
    everyone = control.gather_objects(mine)
    place = next(i for i in range(max(map(len, everyone))) if len({repr(rank[i : i + 1]) for rank in everyone}) > 1)
    listing = ", ".join(f"rank {rank}: {_describe(rows[place : place + 1])}" for rank, rows in enumerate(everyone))
    raise PlanMismatchError(
        f"the models of the ranks differ; the first tensor that does is number {place + 1}: {listing}. Build the same "
        "layers in the same order on every rank."
    )


def _describe(row: list[Any]) -> str:
    return "nothing" if not row else "{} {} {}".format(*row[0])
