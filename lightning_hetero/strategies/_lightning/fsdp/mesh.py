"""The device mesh of a sharded training, which later trainings in the same process use again.

A mesh has process groups. A model that was sharded over it keeps it, so its groups cannot be left when another training
begins.
"""

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_hetero.comm.agreement.group_lifetime import leave_soon

__all__ = ["lasting_mesh"]

_kept: dict[Any, tuple[Any, DeviceMesh]] = {}


def lasting_mesh(given: DeviceMesh, replicas: int) -> DeviceMesh:
    """Return the mesh for the ranks of a given one: the same in all trainings of this process; a collective call.

    Args:
        given: mesh that a strategy of Lightning has made for this training.
        replicas: number of replicas of the model; several need a mesh of their own, ``(replicate, shard)``.
    """
    mesh = _first_of_its_kind(given)
    if replicas == 1:
        return mesh
    shape = replicas, given.size() // replicas
    return _first_of_its_kind(init_device_mesh(given.device_type, shape, mesh_dim_names=("replicate", "shard")))


def _first_of_its_kind(mesh: DeviceMesh) -> DeviceMesh:
    """Return the first mesh under this default group with the same ranks and names; leave those of any other soon."""
    kind, default = (mesh.device_type, str(mesh.mesh.tolist()), mesh.mesh_dim_names), dist.group.WORLD
    made_in, first = _kept.get(kind, (None, mesh))
    if made_in is None or made_in() is not default:
        _kept[kind] = weakref.ref(default), mesh
        return mesh
    used = [default, *first.get_all_groups()]
    for group in mesh.get_all_groups():
        if not any(group is other for other in used):
            leave_soon(group)
    return first
