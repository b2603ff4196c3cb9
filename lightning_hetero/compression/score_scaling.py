"""Scores that are comparable between parameters with gradients of different scale.

An optimizer such as AdamW moves every parameter by about its learning rate, however small its gradient. Selected by
magnitude, a parameter with small gradients would still wait long for its turn. So the residual is divided by the root
mean square of the values that its parameter sends. It is then measured in steps of the optimizer, because the second
moment of AdamW follows the same mean square.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.compression.layout import Layout

__all__ = ["ScalingSettings", "ScoreScaling"]


@dataclass(frozen=True)
class ScalingSettings:
    """Constants of the scaling.

    Args:
        decay_per_step: decay of the mean squares, as of AdamW's second moment.
        min_factor: least factor of a score. An ``rms`` below ``min_factor`` times the largest one, such as that of a
            parameter that was never sent, is raised to it.
    """

    decay_per_step: float = 0.99
    min_factor: float = 2.0**-10


class ScoreScaling:
    """Factor of the scores of each parameter: ``1 / rms_p``, times the least ``rms``, so that it is never above 1.

    ``rms_p^2 = q rms_p^2 + (1 - q) sum s^2 / n_p`` in each step, with ``q`` = 0.99, the values ``s`` of the parameter
    that this rank sends in a step, and its number of elements ``n_p``. The cost grows with the message, not the model.

    Args:
        layout: places of the parameters.
        settings: constants of the scaling.

    Example:
        >>> layout = Layout.of([("large", 2), ("small", 2)], block=2)
        >>> scaling = ScoreScaling(layout)
        >>> scaling.follow(np.array([0, 1]), np.array([[4.0, 0.0], [1.0, 0.0]]))
        >>> [scaling.factors[slot.name] for slot in layout.slots]
        [0.25, 1.0]
    """

    def __init__(self, layout: Layout, settings: ScalingSettings = ScalingSettings()) -> None:  # noqa: B008 - frozen
        self._settings = settings
        self._names = [slot.name for slot in layout.slots]
        self._begins = np.array([slot.start // layout.block for slot in layout.slots] + [layout.num_blocks])
        self._sizes = np.array([max(1, slot.numel) for slot in layout.slots], dtype=np.float64)
        self._squares = np.zeros(len(self._names))
        self._set_factors()

    def _set_factors(self) -> None:
        rms = np.sqrt(self._squares)
        least = self._settings.min_factor * float(rms.max(initial=0.0))
        scale = np.maximum(rms, least)
        factors = scale.min() / scale if least > 0.0 else np.ones_like(rms)
        self.factors = dict(zip(self._names, factors.tolist(), strict=True))

    def follow(self, indices: npt.NDArray[np.int64], values: npt.NDArray[np.floating]) -> None:
        """Update the mean squares by the blocks of a message.

        Args:
            indices: their numbers, ascending.
            values: values that are sent, shape ``(len(indices), block)``.
        """
        # Indices ascend, so the blocks of a parameter are one run, and its sum is a difference of two prefix sums.
        sums = np.concatenate([[0.0], np.cumsum(np.square(values, dtype=np.float64).sum(axis=1))])
        sent = np.diff(sums[np.searchsorted(indices, self._begins)])
        decay = self._settings.decay_per_step
        self._squares = decay * self._squares + (1 - decay) * sent / self._sizes
        self._set_factors()

    def state_dict(self) -> dict[str, float]:
        """Return the mean squares by parameter."""
        return dict(zip(self._names, self._squares.tolist(), strict=True))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what :meth:`state_dict` returned; parameters that are not named start over."""
        self._squares = np.array([state.get(name, 0.0) for name in self._names])
        self._set_factors()
