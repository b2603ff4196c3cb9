"""Contexts of averagers with no process group behind them."""

from types import SimpleNamespace

from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer


def context_of(parameters, world_size=1, rank=0, **more):
    control = SimpleNamespace(rank=rank, world_size=world_size)
    return AveragerContext(parameters, control, StepTimer(HostClock()), **more)
