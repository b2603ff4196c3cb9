"""Decision of ``compression="auto"`` during training: time dense gradients and messages, then keep the better."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.registry import AveragerContext
from lightning_hetero.comm.link.link_benchmark import BENCHMARK, encode_seconds, exchange_seconds
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_rows import FIELDS, match_rows
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.compression.auto import CompressionChoice, Computing, LinkMeasurement, choose_density
from lightning_hetero.core.compression.settings import Automatic, BlockTopK
from lightning_hetero.core.observations import StepObservations

__all__ = ["AutoAverager", "AutoCompression", "measure"]

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class AutoSettings:
    """Numbers of dense steps that are timed before the choice.

    Args:
        first_try_step: synchronized steps before the first try.
        min_timed_steps: timed steps, on all ranks, that suffice for the choice.
        max_step: step at which the choice is made even with fewer timed steps.
    """

    first_try_step: int = 8
    min_timed_steps: int = 3
    max_step: int = 32


AUTO = AutoSettings()


class AutoCompression:
    """Choice between dense sums and block top-k at each density, once enough dense steps were timed.

    Args:
        settings: candidates.
        parameters: the module's parameters that need gradients, by name.
        control: control plane by which ranks agree.
        topology: topology of messages.
    """

    def __init__(
        self, settings: Automatic, parameters: Mapping[str, torch.Tensor], control: ControlPlane, topology: Topology
    ) -> None:
        self.settings, self.control = settings, control
        self.measured = measure(parameters, control, topology, settings)
        self._rows: dict[float, npt.NDArray[np.float64]] = {}

    @property
    def placeholder(self) -> BlockTopK:
        """Block top-k settings whose density can be set to any of the candidates later."""
        return BlockTopK(density=self.settings.densities[0], value_dtype=self.settings.value_dtype)

    def try_decide(self, observer: StepTimer, *, may_be_stale: bool = False) -> CompressionChoice | None:
        """Return the choice, in the same step on all ranks, once enough steps were timed on all; ``None`` before.

        Call it at the end of each synchronized step; it is collective from the eighth step on.

        Args:
            observer: timer of this rank's steps.
            may_be_stale: whether gradients may be stale.
        """
        self._rows |= {row[0]: row[: FIELDS + 1] for row in observer.rows}
        if observer.synced_steps < AUTO.first_try_step:
            return None
        table = np.full((SETTINGS.max_steps, FIELDS + 1), np.nan)
        for place, row in enumerate(list(self._rows.values())[-SETTINGS.max_steps :]):
            table[place] = row
        seen = match_rows(self.control.gather(table))
        observer.interrupt()
        enough = seen.num_steps >= AUTO.min_timed_steps or observer.synced_steps >= AUTO.max_step
        return self._decide(seen, may_be_stale) if enough else None

    def _decide(self, seen: StepObservations, may_be_stale: bool) -> CompressionChoice:
        """Choose by the measurements; rank 0 logs the choice and why."""
        settings = self.settings
        choice = choose_density(
            self.measured, settings.densities, settings.value_dtype, Computing.of(seen), stale=may_be_stale
        )
        if self.control.rank == 0:
            log.info("compression='auto': %s", choice.describe())
        return choice


class AutoAverager(BlockTopKAverager):
    """Averager that is dense until the choice is made; then it goes on with block top-k, or plain DDP replaces it.

    Args:
        choice: makes the choice.
        context: context of the run.
    """

    def __init__(self, choice: AutoCompression, context: AveragerContext) -> None:
        super().__init__(choice.placeholder, context)
        self._choice: AutoCompression | None = choice
        self._observer = context.observer
        self.pause(True)

    @classmethod
    def build(cls, settings: Any, context: AveragerContext) -> "AutoAverager":
        """Measure the link, and begin with dense sums; a collective call."""
        topology = context.topology or Topology.flat_over(context.control.rank, context.control.world_size)
        return cls(AutoCompression(settings, context.parameters, context.control, topology), context)

    @property
    def undecided(self) -> bool:
        """True while the choice is still to be made."""
        return self._choice is not None

    def end_step(self, *, may_be_stale: bool) -> bool:
        """Try to decide; return whether to go on with this averager. A collective call while it has not decided."""
        if self._choice is None:
            return True
        choice = self._choice.try_decide(self._observer, may_be_stale=may_be_stale)
        if choice is None:
            return True
        self._choice = None
        if choice.density is None:
            return False
        self.pause(False)
        self.set_density(choice.density)
        return True


def measure(
    parameters: Mapping[str, torch.Tensor], control: ControlPlane, topology: Topology, settings: Automatic
) -> LinkMeasurement:
    """Measure latency, rate and encoding time (0 on a GPU): best of three, on the slowest rank; a collective call."""
    device = next(iter(parameters.values())).device
    numel = sum(p.numel() for p in parameters.values())
    small, large = (
        exchange_seconds(size, topology, device) for size in (BENCHMARK.latency_bytes, BENCHMARK.probe_bytes)
    )
    middle = settings.densities[len(settings.densities) // 2]
    encode = encode_seconds(numel, middle, settings.value_dtype) if device.type == "cpu" else 0.0
    mine = np.array([small, max(large - small, 1e-9), encode])
    latency, transfer, encode = control.gather(mine).max(axis=0)
    rate = (topology.size - 1) * BENCHMARK.probe_bytes / transfer
    size = max(p.element_size() for p in parameters.values())
    return LinkMeasurement(float(latency), float(rate), float(encode), topology.size, numel, size)
