"""Costs of a dataset's samples, computed in equal parts by all ranks and gathered."""

import logging
import time
import zlib
from typing import Any

import numpy as np

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.policies.base import Planner, moves_total
from lightning_hetero.data.cost.costs import Array, check_costs, computed_costs, known_lengths

__all__ = ["SampleCosts"]

log = logging.getLogger("lightning_hetero")


class SampleCosts:
    """Costs of the dataset that was split last; another split of it calls no function of the user again.

    Args:
        config: settings, of which ``cost_fn`` is used, and those that leave ``"auto"`` at the number of samples.
        control: control plane by which ranks gather the costs.
    """

    def __init__(self, config: HeteroConfig, control: ControlPlane) -> None:
        self._config, self._control = config, control
        self._given = None if control.world_size == 1 else config.cost_fn
        self._dataset: Any = None
        self._costs: Array | None = None
        self._said = ""
        self._compared = config.noise_scale

    @property
    def first_weights(self) -> CostWeights:
        """Cost of a share before any step was timed: tokens are taken to be padded, costs of a function to add up."""
        return CostWeights.of("cost" if callable(self._given) else "padded_cost")

    def compare(self, on: bool) -> None:
        """Note whether the gradient noise scale compares the shares of ranks, which must then be drawn at random."""
        self._compared = on

    def of(self, dataset: Any, planner: Planner | None = None) -> Array | None:
        """Return the cost of each sample, ``None`` if batches are divided by number; a collective call.

        Args:
            dataset: map-style dataset of the training loader, the same on all ranks.
            planner: decides on the split.

        Raises:
            ValueError: if there is no dataset, a cost is not a finite number above 0, or the total batch moves.
            RuntimeError: if ``cost_fn`` raises on a rank, or ranks have different costs.
        """
        if self._given is None or (dataset is None and self._given == "auto"):
            return None
        if dataset is None:
            raise ValueError(
                f"cost_fn={self._given!r} needs the dataset: give shard(..., dataset=loader.dataset), or leave it out."
            )
        if self._given == "auto":
            return self._unless_by_number(dataset, planner)
        if moves_total(planner):
            raise ValueError(
                f"{type(planner).__name__} changes the total batch by the gradient noise scale, which compares shares "
                "drawn at random; cost_fn gives workers samples by their cost. Leave one of them out."
            )
        costs = self._of(dataset)
        self._control.require_equal("the costs of the samples (cost_fn)", _fingerprint(costs))
        return costs

    def refuse_unknown(self, what: str, instead: str) -> None:
        """Refuse a ``cost_fn`` that cannot be followed, or say that batches are divided by number.

        Args:
            what: the training data, which has no samples that are known by index.
            instead: what to train on instead.

        Raises:
            ValueError: if ``cost_fn`` is a function.
        """
        if callable(self._config.cost_fn):
            raise ValueError(
                f"cost_fn={self._config.cost_fn!r} divides batches whose samples are known by index, and the training "
                f"data is {what}. Leave cost_fn out, or {instead}."
            )
        self._leave(f"the training data is {what}")

    def _unless_by_number(self, dataset: Any, planner: Planner | None) -> Array | None:
        """Return the lengths of samples, unless the settings need numbers of samples: the rule of ``"auto"``."""
        config, reason = self._config, None
        if config.policy == "even":
            reason = "policy='even' gives all workers equal numbers of samples"
        elif config.local_batch_sizes is not None:
            reason = f"local_batch_sizes={list(config.local_batch_sizes)} are numbers of samples"
        elif config.local_batch_multiple > 1:
            reason = f"local_batch_multiple={config.local_batch_multiple} is of numbers of samples"
        elif self._compared or moves_total(planner):
            reason = "the gradient noise scale compares shares that are drawn at random"
        elif config.weight_fn is None:
            reason = (
                "it is not known whether the loss is a mean over tokens: if it is, give weight_fn=the number of tokens"
            )
        if reason is None:
            costs = self._of(dataset)
            if len(set(self._control.gather_objects(_fingerprint(costs)))) == 1:
                return costs
            reason = "the lengths are not the same on all ranks"
        elif self._control.rank or self._of(dataset) is None:
            return None
        self._say(f"samples differ in length, and batches are divided by their number, because {reason}", "tokens")
        return None

    def _of(self, dataset: Any) -> Array | None:
        if not callable(self._given):
            return self._known(dataset)  # anew, because a dataset may change between two epochs
        same = dataset is self._dataset and self._costs is not None and len(self._costs) == len(dataset)
        if not same:
            self._dataset, self._costs = dataset, self._computed(dataset)
        return self._costs

    def _leave(self, reason: str) -> None:
        if self._given == "tokens" or (self._given == "auto" and self._config.weight_fn is not None):
            self._say(f"batches are divided by the number of samples, because {reason}")

    def _say(self, text: str, instead: str = "") -> None:
        """Log on rank 0, once for each text."""
        if self._control.rank == 0 and text != self._said:
            cure = f"; cost_fn={instead!r} divides by tokens, None by number" if instead else ""
            log.info("cost_fn=%r: %s%s.", self._given, text, cure)
            self._said = text

    def _known(self, dataset: Any) -> Array | None:
        lengths, number = known_lengths(dataset), len(dataset)
        if lengths is None:
            self._leave(f"the lengths of the samples of {type(dataset).__name__} cannot be read without loading them")
            return None
        if len(lengths) != number or lengths.min() == lengths.max():
            self._leave("all samples have the same length")
            return None
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


def _fingerprint(costs: Array | None) -> str:
    return "none" if costs is None else f"{zlib.crc32(np.ascontiguousarray(costs).tobytes()):08x}"
