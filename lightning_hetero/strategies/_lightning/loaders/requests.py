"""Train loaders as the user gives them to a Trainer, before Lightning distributes their samplers.

Lightning replaces the sampler of every train loader by a distributed one, and makes a new instance of its batch sampler
for that: it cannot with a batch sampler of the user, and a loader without a batch size would get equal shares. It says
how many train loaders there are only after all of them were processed.
"""

import copy
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hetero.frontend.loaders import as_given
from lightning_hetero.frontend.units.loaders import is_made_of_units

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["LoaderRequests"]


class LoaderRequests:
    """Notes the train loaders when a trainer asks for them, and keeps Lightning from those that are split by units.

    It replaces two methods on the trainer's own objects, not on Lightning's classes, and each calls the method that was
    there before.

    Args:
        trainer: the trainer.
        namespace: ``lightning.pytorch`` or ``pytorch_lightning``.
        leaves: returns whether Lightning leaves the samplers of all train loaders alone.

    Attributes:
        combined: Lightning's combination of several train loaders, ``None`` if there is one.
    """

    def __init__(self, trainer: "Trainer", namespace: str, leaves: Callable[[], bool]) -> None:
        self.combined: Any = None
        self._loader_class = importlib.import_module(f"{namespace}.utilities.combined_loader").CombinedLoader
        self._leaves = leaves
        source: Any = trainer.fit_loop._data_source
        connector: Any = trainer._data_connector
        self._request, self._prepare = source.dataloader, connector._prepare_dataloader
        source.dataloader, connector._prepare_dataloader = self._requested, self._prepared

    def _requested(self) -> Any:
        given = self._request()
        if isinstance(given, self._loader_class):
            given = copy.copy(given)  # Lightning writes the loaders that were split into it: the user's stays whole
        combined = given if isinstance(given, self._loader_class) else self._loader_class(given, "max_size_cycle")
        self.combined = combined if len(combined.flattened) > 1 else None
        return given if self.combined is None else combined

    def _prepared(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        if mode == "train" and (self.combined is not None or is_made_of_units(dataloader) or self._leaves()):
            return dataloader
        return self._prepare(as_given(dataloader) if mode == "train" else dataloader, shuffle, mode)

    def number_of(self, dataloader: object) -> int:
        """Return which of several loaders this is."""
        return next(i for i, loader in enumerate(self.combined.flattened) if loader is dataloader)
