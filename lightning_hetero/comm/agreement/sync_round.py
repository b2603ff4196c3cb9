"""What ranks tell each other when they look at their plan: how far each has drawn, and what each has measured."""

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.control_plane import ControlPlane, check_digests
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.health import Health
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.noise.window_sums import NOISE_FIELDS
from lightning_hetero.comm.timing.step_rows import common_steps, match_rows
from lightning_hetero.comm.timing.step_timer import StepObserver
from lightning_hetero.core.observations import StepObservations

__all__ = ["look"]


def look(
    control: ControlPlane,
    held: tuple[int, int, int],
    observer: StepObserver,
    noise: NoiseCollector | None,
    compression: GradientCompression | None,
    health: Health,
) -> tuple[list[tuple[int, int]], StepObservations]:
    """Gather all of it in one message, and let noise scale and compression take what is theirs; a collective call.

    Args:
        control: gathers.
        held: digest of the plans that this rank holds; epoch and step up to which it has drawn batches.
        observer: times of this rank's steps.
        noise: sums for the noise scale, ``None`` without.
        compression: times of messages, ``None`` without.
        health: compares some weights.

    Returns:
        ``(epoch, step)`` up to which each rank has drawn, and the steps that all of them have observed.

    Raises:
        PlanMismatchError: if a rank holds other plans.
    """
    header = np.array(held, dtype=float)
    sums = np.zeros(NOISE_FIELDS) if noise is None else noise.sums.peek()
    messages = np.zeros(0) if compression is None else compression.pack()
    table, weights = observer.take(), health.sample()
    everyone = control.gather(np.concatenate([header, sums, messages, weights, table.ravel()]))
    check_digests(everyone[:, 0])
    behind: list[npt.NDArray[np.float64]] = np.split(
        everyone, np.cumsum([3, NOISE_FIELDS, len(messages), len(weights)]), axis=1
    )
    tables = behind[4].reshape(len(everyone), *table.shape)
    observer.put_back(max(common_steps(tables), default=0.0))
    health.judge(behind[3])
    if compression is not None:
        compression.unpack(behind[2])
    if noise is not None:
        noise.absorb(behind[1], control)
    return [(int(row[1]), int(row[2])) for row in everyone], match_rows(tables)
