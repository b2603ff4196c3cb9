"""Construction of the averager that a compressor's settings name.

The one table of compressors is :data:`~lightning_hetero.core.compression.settings.COMPRESSORS`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import GradientAverager
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.compression.settings import Compressor

__all__ = ["AveragerContext", "averager_for"]


@dataclass(frozen=True)
class AveragerContext:
    """All that an averager may need to know of a run.

    Args:
        parameters: the module's parameters that need gradients, by name, in the order of the module.
        control: connects the ranks.
        observer: times this rank's steps.
        topology: topology of gradients, ``None`` for the flat one.
        grad_scale: factor that the gradients carry at present (a loss scaler's), or ``None``.
        hold_unused: whether parameters may be left out by all ranks (``find_unused_parameters``).
    """

    parameters: Mapping[str, torch.Tensor]
    control: ControlPlane
    observer: StepTimer
    topology: Topology | None = None
    grad_scale: Callable[[], float] | None = None
    hold_unused: bool = False


class _Buildable(Protocol):
    @classmethod
    def build(cls, settings: Any, context: AveragerContext) -> GradientAverager: ...


def averager_for(settings: Compressor, context: AveragerContext) -> GradientAverager:
    """Build the averager that a compressor's settings name; a collective call.

    Args:
        settings: settings whose ``averager`` is ``"module:class"``, a class with ``build(settings, context)``.
        context: context of the run.
    """
    module, _, name = settings.averager.partition(":")
    averager: _Buildable = getattr(importlib.import_module(module), name)
    return averager.build(settings, context)
