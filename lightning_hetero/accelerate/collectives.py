"""Collectives of an ``Accelerator`` under unequal batches: no row is lost, and waiting does not count as computing."""

from typing import Any

import torch

from lightning_hetero.accelerate.base import SessionAccelerator
from lightning_hetero.accelerate.hooks import HookedDDP
from lightning_hetero.accelerate.loaders import refuse_local_sgd
from lightning_hetero.accelerate.uneven_gather import gather_uneven
from lightning_hetero.frontend.collectives import not_computing

__all__ = ["CollectivesAccelerator"]


class CollectivesAccelerator(SessionAccelerator):
    """Accelerate's gather and reduce, with each sample of a total batch once."""

    @property
    def _in_pass(self) -> bool:
        """``True`` if the current batch is one of the uneven loader, split over several ranks."""
        loader = self._hetero_loader
        return self.num_processes > 1 and loader is not None and self.gradient_state.active_dataloader is loader

    def gather(self, tensor: Any) -> Any:
        """Gather as ``Accelerator.gather`` does; rows of unequal batches come rank by rank, none lost, none padded."""
        with not_computing(self.engine):
            if self.engine is not None and self.num_processes > 1:
                return gather_uneven(tensor, self.engine.control, only_tensors=True)
            return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather each sample of the total batch once, whatever the split.

        In lists of other values than tensors, each item is a sample; dicts and namedtuples are gathered by entry.

        Raises:
            TypeError: on every rank, if a value of one rank cannot be taken apart into samples.
            ValueError: on every rank, if the ranks' values do not fit together.
        """
        with not_computing(self.engine):
            if not self._in_pass:
                return super().gather_for_metrics(input_data, use_gather_object)
            engine = self._session().engine
            counted = bool(engine.own_size)  # a rank with share 0 runs samples that do not count
            return gather_uneven(input_data, engine.control, counted=counted, objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce as ``Accelerator.reduce`` does, which gives all ranks equal weights.

        Raises:
            RuntimeError: if it would average the models of Accelerate's LocalSGD.
        """
        engine, handler = self.engine, self.ddp_handler
        split = engine is not None and engine.config.policy != "even" and self._hetero_loader is not None
        if split and self.num_processes > 1 and reduction == "mean" and isinstance(tensor, torch.Tensor):
            refuse_local_sgd(handler.wrapped if isinstance(handler, HookedDDP) else (), tensor)
        with not_computing(self.engine):
            return super().reduce(tensor, reduction, scale)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; waiting does not count as computing."""
        with not_computing(self.engine):
            super().wait_for_everyone()
