"""The Lightning strategy that mixins extend, and what all of them need from it.

At run time a mixin is combined with a strategy of either of Lightning's packages, so it has no base class of its own.
For type checkers it extends the ``DDPStrategy`` of ``lightning.pytorch``; ``ModelParallelStrategy`` has the same
methods.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object

__all__ = ["LightningMixin"]


class LightningMixin(DDPStrategy):
    """Access to the module, the trainer and the namespace of a Lightning strategy."""

    @property
    def _pl_module(self) -> "LightningModule":
        """The module, once it is connected."""
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def _trainer(self) -> "Trainer":
        return self._pl_module.trainer

    @property
    def _trainer_if_any(self) -> "Trainer | None":
        """The trainer, ``None`` for a strategy that was connected by hand before it has one."""
        module = self.lightning_module
        return None if module is None else module._trainer

    @property
    def _namespace(self) -> str:
        """``lightning.pytorch`` or ``pytorch_lightning``, whichever package the class extends."""
        base = next(c for c in type(self).__mro__ if c.__name__ == "ParallelStrategy")
        return base.__module__.rpartition(".strategies")[0]

    @property
    def _misconfiguration(self) -> type[Exception]:
        """``MisconfigurationException`` of the namespace in use."""
        module = importlib.import_module(f"{self._namespace}.utilities.exceptions")
        error: type[Exception] = module.MisconfigurationException
        return error

    def _keep_signal(self) -> None:
        """Keep a signal that was noted and not obeyed yet, for the next fit."""

    @property
    def _members_change(self) -> Callable[[], bool] | None:
        """Function that returns whether a worker waits to join, ``None`` if none can."""
        return None
