"""Comparison of the weights of all ranks, because replicas that differ train different models from then on."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["WeightCheck", "WeightSettings"]

log = logging.getLogger("lightning_hetero")


@dataclass(frozen=True)
class WeightSettings:
    """Number of compared weights, and differences that count as rounding.

    Devices of different kinds round differently in the optimizer step, so replicas on them drift apart slightly.

    Args:
        sampled: weights that are compared each time, each of another parameter if there are enough.
        max_relative_difference: largest allowed difference of two replicas' weights, as a share of their size.
        max_roundings: largest allowed difference in roundings (``eps``) of their type; the larger limit applies.
    """

    sampled: int = 32
    max_relative_difference: float = 1e-3
    max_roundings: int = 8


SETTINGS = WeightSettings()


class WeightCheck:
    """Sample of this rank's weights, and comparison of all ranks' samples on rank 0.

    Args:
        control: control plane of the ranks.
        settings: samples and tolerances.
    """

    def __init__(self, control: ControlPlane, settings: WeightSettings = SETTINGS) -> None:
        self._control, self._settings = control, settings
        self._rounds, self._told = 0, False
        self._chosen: list[tuple[str, int]] = []
        self._limits: list[float] = []

    def begin(self) -> None:
        """Begin a training: a difference can be reported again."""
        self._told = False

    def sample(self, parameters: Mapping[str, nn.Parameter]) -> npt.NDArray[np.float64]:
        """Return some weights, at the same places on all ranks, for :meth:`judge`; NaN for missing ones.

        Args:
            parameters: parameters of the trained models, by name.
        """
        filled = {name: p for name, p in parameters.items() if p.numel()}
        names, count = list(filled), self._settings.sampled
        picked = np.random.default_rng(self._rounds)
        chosen = [names[(self._rounds * count + i) % len(names)] for i in range(min(count, len(names)))]
        self._rounds += 1
        self._chosen = [(name, int(picked.integers(filled[name].numel()))) for name in chosen]
        sampled = np.full(count, np.nan)
        if self._control.world_size > 1 and chosen:
            values = [_element(filled[name].detach(), place).double() for name, place in self._chosen]
            sampled[: len(values)] = torch.stack([value.to(values[0].device) for value in values]).cpu().numpy()
            self._limits = [self._limit(filled[name]) for name in chosen]
        return sampled

    def _limit(self, parameter: torch.Tensor) -> float:
        settings = self._settings
        return max(settings.max_relative_difference, settings.max_roundings * torch.finfo(parameter.dtype).eps)

    def judge(self, everyone: npt.NDArray[np.float64], step: tuple[int, int]) -> None:
        """Compare the weights that all ranks have sampled; rank 0 logs the first that differs, once.

        Args:
            everyone: samples, one row for each rank.
            step: epoch and batch of the last step.
        """
        if self._told or self._control.rank > 0:
            return
        finite = np.all(np.isfinite(everyone), axis=0).tolist()
        size = float(np.sqrt(np.mean(everyone[0, finite] ** 2))) if any(finite) else 0.0
        for i, (name, place) in enumerate(self._chosen):
            if not finite[i]:
                continue
            apart = np.abs(everyone[:, i] - everyone[0, i]) > self._limits[i] * (abs(everyone[0, i]) + size)
            if bool(np.any(apart)):
                self._tell(name, place, everyone[:, i], int(np.argmax(apart)), step)
                return

    def _tell(self, name: str, place: int, values: npt.NDArray[np.float64], rank: int, step: tuple[int, int]) -> None:
        self._told = True
        log.warning(
            "ranks hold different weights behind batch %d of epoch %d: element %d of %s is %.6g on rank 0 and %.6g on "
            "rank %d. They train different models from here on, and nothing will make them equal again. Change weights "
            "on all ranks alike",
            *(step[1], step[0], place, name, values[0], values[rank], rank),
        )


def _element(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return the element at flat index ``place`` of a tensor with any strides, without copying the tensor."""
    value = tensor[tuple(int(i) for i in np.unravel_index(place, tensor.shape))] if tensor.ndim else tensor
    return value.real if value.is_complex() else value
