"""Decide ``compression="auto"`` while training: time dense gradients and messages, then keep the better."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.link.link_benchmark import (
    FEW,
    LATEST,
    PROBE_BYTES,
    STEPS,
    _encode_seconds,
    _exchange_seconds,
    log,
)
from lightning_hetero.comm.timing.step_rows import FIELDS, match_rows
from lightning_hetero.comm.timing.step_timer import KEPT_ROWS, StepObserver
from lightning_hetero.core.compression.auto import CompressionChoice, Computing, LinkMeasurement, choose_density
from lightning_hetero.core.compression.settings import Automatic, BlockTopK
from lightning_hetero.core.observations import StepObservations

__all__ = ["Undecided", "measure"]


class Undecided:
    """``compression="auto"`` while the first steps run with dense sums and are timed.

    Args:
        settings: candidates.
        parameters: the module's parameters that need gradients, by name.
        control: for what ranks agree on.
        topology: way of messages.
    """

    def __init__(
        self, settings: Automatic, parameters: Mapping[str, torch.Tensor], control: ControlPlane, topology: Topology
    ) -> None:
        self.settings, self.control = settings, control
        self.measured = measure(parameters, control, topology, settings)
        self._rows: dict[float, npt.NDArray[np.float64]] = {}

    @property
    def meanwhile(self) -> BlockTopK:
        """Block top-k that can be set to any of the candidates."""
        return BlockTopK(density=self.settings.densities[0], value_dtype=self.settings.value_dtype)

    def look(self, observer: StepObserver, *, hidden: bool = False) -> CompressionChoice | None:
        """The choice, once steps enough were timed on all ranks: in the same step on all of them.

        To be called at the end of each synchronised step; collective from the eighth on.

        Args:
            observer: has timed this rank's steps.
            hidden: whether gradients may come a step late.
        """
        self._rows |= {row[0]: row[: FIELDS + 1] for row in observer.rows}
        if observer.synced_steps < STEPS:
            return None
        table = np.full((KEPT_ROWS, FIELDS + 1), np.nan)
        for place, row in enumerate(list(self._rows.values())[-KEPT_ROWS:]):
            table[place] = row
        seen = match_rows(self.control.gather(table))
        observer.interrupt()
        late = observer.synced_steps >= LATEST
        return self._choose(seen, hidden) if seen.num_steps >= FEW or late else None

    def _choose(self, seen: StepObservations, hidden: bool) -> CompressionChoice:
        """Block top-k at the density that the measurements speak for, or dense sums; rank 0 says so and why."""
        settings = self.settings
        choice = choose_density(
            self.measured, settings.densities, settings.value_dtype, Computing.of(seen), hidden=hidden
        )
        if self.control.rank == 0:
            log.info("compression='auto': %s", choice.describe())
        return choice


def measure(
    parameters: Mapping[str, torch.Tensor], control: ControlPlane, topology: Topology, settings: Automatic
) -> LinkMeasurement:
    """Latency and rate of the exchange and cost of selection: the best of three, of the slowest rank."""
    device = next(iter(parameters.values())).device
    numel = sum(p.numel() for p in parameters.values())
    small, large = (_exchange_seconds(size, topology, device) for size in (64, PROBE_BYTES))
    middle = settings.densities[len(settings.densities) // 2]
    encode = _encode_seconds(numel, middle, settings.value_dtype) if device.type == "cpu" else 0.0
    mine = np.array([small, max(large - small, 1e-9), encode])
    latency, transfer, encode = control.gather(mine).max(axis=0)
    rate = (topology.size - 1) * PROBE_BYTES / transfer
    size = max(p.element_size() for p in parameters.values())
    return LinkMeasurement(float(latency), float(rate), float(encode), topology.size, numel, size)
