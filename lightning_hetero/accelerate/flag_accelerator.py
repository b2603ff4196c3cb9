"""The class of accelerators under the flag: a ``HeteroAccelerator`` that keeps out of the way where it can."""

from typing import Any

import torch
from accelerate.state import AcceleratorState

from lightning_hetero.accelerate.accelerator import HeteroAccelerator
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.frontend.without_effect import ALONE

__all__ = ["FlagAccelerator"]


class FlagAccelerator(HeteroAccelerator):
    """A :class:`HeteroAccelerator` for scripts that do not know of it, made by the hook of ``ACCELERATE_USE_HETERO``.

    It differs in two ways. With one worker it is a plain ``Accelerator``, and says so. If the process has made an
    ``Accelerator`` before, its session begins when something is prepared with it: scripts make further ones to ask for
    the rank, perhaps on one rank only, and a session begins on all ranks together.
    """

    _no_engine = "there are no plans: there is one worker, or nothing was prepared with this Accelerator yet."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._postponed = bool(AcceleratorState._shared_state)
        super().__init__(*args, **kwargs)

    def _begin(self) -> None:
        if self.num_processes == 1:
            self._postponed = False
            Notices(True).tell([NoEffect(("ACCELERATE_USE_HETERO=true",), *ALONE)])
        elif not self._postponed:
            super()._begin()

    def _begin_postponed(self) -> None:
        if self._postponed:
            self._postponed = False
            self._begin()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as ``HeteroAccelerator.prepare`` does; a session that was put off begins."""
        self._begin_postponed()
        return super().prepare(*args, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: torch.utils.data.DataLoader, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as ``HeteroAccelerator.prepare_data_loader`` does; a session that was put off begins."""
        self._begin_postponed()
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Prepare a model as ``HeteroAccelerator.prepare_model`` does; a session that was put off begins."""
        self._begin_postponed()
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer as ``HeteroAccelerator.prepare_optimizer`` does; a session that was put off begins."""
        self._begin_postponed()
        return super().prepare_optimizer(optimizer, *args, **kwargs)
