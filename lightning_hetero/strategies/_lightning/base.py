"""The strategy of Lightning's that mixins extend, and what all of them ask of it.

At run time a mixin is mixed into the ``DDPStrategy`` of either of Lightning's packages, so that it extends none by
itself. Type checkers take it for one of ``lightning.pytorch``.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = object

__all__ = ["LightningMixin"]


class LightningMixin(DDPStrategy):
    """Know module, trainer and namespace of a strategy of Lightning's."""

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
        """The trainer, ``None`` for a strategy that was connected by hand and has none yet."""
        module = self.lightning_module
        return None if module is None else module._trainer

    @property
    def _namespace(self) -> str:
        """``lightning.pytorch`` or ``pytorch_lightning``, whichever the class was mixed into."""
        return next(c.__module__ for c in type(self).__mro__ if c.__name__ == "DDPStrategy").rpartition(".strategies")[
            0
        ]

    @property
    def _misconfiguration(self) -> type[Exception]:
        """``MisconfigurationException`` of the namespace in use."""
        module = importlib.import_module(f"{self._namespace}.utilities.exceptions")
        error: type[Exception] = module.MisconfigurationException
        return error
