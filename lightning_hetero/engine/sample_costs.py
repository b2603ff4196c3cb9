"""Costs of a dataset's samples, computed in equal parts by all ranks and gathered."""

import logging
import time
from typing import Any

import numpy as np

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.data.cost.costs import Array, check_costs, computed_costs, known_lengths

__all__ = ["SampleCosts"]

log = logging.getLogger("lightning_hetero")


class SampleCosts:
    """Costs of the dataset that was split last, so that another split of it computes nothing again.

    Args:
        config: settings, of which ``cost_fn`` is used.
        control: control plane by which ranks gather the costs.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane) -> None:
        self._given, self._control = config.cost_fn, control
        self._dataset: Any = None
        self._costs: Array | None = None

    @property
    def first_weights(self) -> CostWeights:
        """Cost of a share before any step was timed: known lengths are taken to be padded, given costs add up."""
        return CostWeights.of("padded_cost" if self._given == "auto" else "cost")

    def of(self, dataset: Any) -> Array | None:
        """Return the cost of each sample, ``None`` if all are equal or not known; a collective call.

        Args:
            dataset: map-style dataset of the training loader, the same on all ranks.

        Raises:
            ValueError: if there is no dataset, or a cost is not a finite number above 0.
            RuntimeError: if ``cost_fn`` raises on a rank.
        """
        if self._given is None or self._control.world_size == 1:
            return None
        if dataset is None:
            raise ValueError(
                f"cost_fn={self._given!r} needs the dataset: give shard(..., dataset=loader.dataset), or leave it out."
            )
        if dataset is not self._dataset or self._dataset is None:
            self._dataset, self._costs = dataset, self._known(dataset) if self._given == "auto" else None
            if self._given != "auto":
                self._costs = self._computed(dataset)
        return self._costs

    def _known(self, dataset: Any) -> Array | None:
        lengths, number = known_lengths(dataset), len(dataset)
        reason = None
        if lengths is None:
            reason = f"the lengths of the samples of {type(dataset).__name__} cannot be read without loading them"
        elif len(lengths) != number or lengths.min() == lengths.max():
            reason = "all samples have the same length"
        if reason is not None:
            if self._control.rank == 0:
                log.warning(
                    "cost_fn='auto' has no effect: %s, so that batches are divided by the number of samples. Give "
                    "cost_fn=a function of the sample, or leave it out.",
                    reason,
                )
            return None
        assert lengths is not None
        return np.maximum(lengths, 1.0)

    def _computed(self, dataset: Any) -> Array:
        """Compute the costs of every ``W``-th sample here, and gather those of the other ranks."""
        begin, (rank, world_size) = time.perf_counter(), (self._control.rank, self._control.world_size)
        function: Any = self._given
        own: Any
        try:
            own = computed_costs(function, dataset, range(rank, len(dataset), world_size))
        except Exception as error:
            own = f"{type(error).__name__}: {error}"
        everyone = self._control.gather_objects(own)
        failed = [(i, text) for i, text in enumerate(everyone) if isinstance(text, str)]
        if failed:
            raise RuntimeError(
                f"cost_fn failed on rank {failed[0][0]} with {failed[0][1]}. It is called with a sample of the "
                "dataset, or with its index if its first argument is named index, and returns a number above 0."
            )
        costs = np.zeros(len(dataset))
        for i, part in enumerate(everyone):
            costs[i::world_size] = part
        if rank == 0:
            log.info("cost_fn: costs of %d samples in %.2g s", len(costs), time.perf_counter() - begin)
        return check_costs(costs, len(dataset), "cost_fn")
