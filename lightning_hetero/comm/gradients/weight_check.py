"""Comparison of the weights of all ranks, because replicas that differ train different models from then on."""

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.hardware import device_name

__all__ = ["WeightCheck", "WeightSettings"]

log = logging.getLogger("lightning_hetero")

Row = npt.NDArray[np.float64]
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers, by the bytes of one."""


@dataclass(frozen=True)
class WeightSettings:
    """Number of compared weights, and differences that count as rounding.

    Devices of different kinds round differently in the optimizer step, so replicas on them drift apart slightly. On
    devices of one kind, replicas are equal bit by bit.

    Args:
        sampled: weights that are compared each time, each of another parameter if there are enough.
        digested: most elements of such a parameter whose bits are compared, between devices of one kind.
        max_relative_difference: largest allowed difference of two replicas' weights, as a share of their size.
        max_roundings: largest allowed difference in roundings (``eps``) of their type; the larger limit applies.
    """

    sampled: int = 32
    digested: int = 1 << 20
    max_relative_difference: float = 1e-3
    max_roundings: int = 8


SETTINGS = WeightSettings()


class WeightCheck:
    """Sample and digests of this rank's weights, and comparison with those of all ranks on rank 0.

    Args:
        control: control plane of the ranks.
        settings: samples and tolerances.
    """

    def __init__(self, control: ControlPlane, settings: WeightSettings = SETTINGS) -> None:
        self._control, self._settings = control, settings
        self._rounds, self._told = 0, False
        self._chosen: list[tuple[str, int]] = []
        self._limits: list[float] = []
        self._kinds: dict[torch.device, float] = {}

    def begin(self) -> None:
        """Begin a training: a difference can be reported again."""
        self._told = False

    def sample(self, parameters: Mapping[str, nn.Parameter]) -> Row:
        """Return some weights, at the same places on all ranks, digests of bits around them, and the kind of device.

        Args:
            parameters: parameters of the trained models, by name.

        Returns:
            Three rows of equal length for :meth:`judge`, one after the other; NaN for missing weights.
        """
        filled = {name: p for name, p in parameters.items() if p.numel()}
        names, count = list(filled), self._settings.sampled
        picked = np.random.default_rng(self._rounds)
        chosen = [names[(self._rounds * count + i) % len(names)] for i in range(min(count, len(names)))]
        self._rounds += 1
        self._chosen = [(name, int(picked.integers(filled[name].numel()))) for name in chosen]
        rows = np.full((3, count), np.nan)
        if self._control.world_size > 1 and chosen:
            places = [(filled[name].detach(), place) for name, place in self._chosen]
            numbers = [_element(*place).double() for place in places]
            numbers += [_digest(*place, self._settings.digested).double() for place in places]
            read = torch.stack([number.to(numbers[0].device) for number in numbers]).cpu().numpy()
            rows[:2, : len(places)] = read.reshape(2, -1)
            rows[2, : len(places)] = [self._kind(p.device) for p, _ in places]
            self._limits = [self._limit(filled[name]) for name in chosen]
        return rows.ravel()

    def _kind(self, device: torch.device) -> float:
        """Return a number for the device and the software, on which rounding depends."""
        if device not in self._kinds:
            threads = torch.get_num_threads() if device.type == "cpu" else 0
            kind = f"{device_name(device)}, {torch.__version__}, {threads}"
            self._kinds[device] = float(zlib.crc32(kind.encode()))
        return self._kinds[device]

    def _limit(self, parameter: torch.Tensor) -> float:
        settings = self._settings
        return max(settings.max_relative_difference, settings.max_roundings * torch.finfo(parameter.dtype).eps)

    def judge(self, everyone: Row, step: tuple[int, int]) -> None:
        """Compare the weights that all ranks have sampled; rank 0 logs the first that differs, once.

        Args:
            everyone: what :meth:`sample` returns, one row for each rank.
            step: epoch and batch of the last step.
        """
        if self._told or self._control.rank > 0:
            return
        everyone, digests, kinds = everyone.reshape(len(everyone), 3, -1).transpose(1, 0, 2)
        finite = np.all(np.isfinite(everyone), axis=0).tolist()
        size = float(np.sqrt(np.mean(everyone[0, finite] ** 2))) if any(finite) else 0.0
        for i, (name, place) in enumerate(self._chosen):
            if not finite[i]:
                continue
            apart = np.abs(everyone[:, i] - everyone[0, i]) > self._limits[i] * (abs(everyone[0, i]) + size)
            if bool(np.any(apart)):
                self._tell(name, place, everyone[:, i], int(np.argmax(apart)), step)
                return
        for i, (name, _) in enumerate(self._chosen):
            if finite[i]:
                self._compare_bits(name, digests[:, i], kinds[:, i], step)

    def _compare_bits(self, name: str, digests: Row, kinds: Row, step: tuple[int, int]) -> None:
        first = [int(np.argmax(kinds == kind)) for kind in kinds]  # of the ranks on devices of this kind
        apart = digests != digests[first]
        if self._told or not np.any(apart):
            return
        self._told, rank = True, int(np.argmax(apart))
        log.warning(
            "ranks hold different weights behind batch %d of epoch %d: bits of %s are not the same on rank %d and rank "
            "%d, whose devices are of one kind. They are, unless something changes weights on one rank only, or "
            "computes in another order there. Nothing will make them equal again",
            *(step[1], step[0], name, first[rank], rank),
        )

    def _tell(self, name: str, place: int, values: Row, rank: int, step: tuple[int, int]) -> None:
        self._told = True
        log.warning(
            "ranks hold different weights behind batch %d of epoch %d: element %d of %s is %.6g on rank 0 and %.6g on "
            "rank %d. They train different models from here on, and nothing will make them equal again. Change weights "
            "on all ranks alike",
            *(step[1], step[0], place, name, values[0], values[rank], rank),
        )


def _digest(tensor: torch.Tensor, place: int, most: int) -> torch.Tensor:
    """Return the sum of the bits around ``place``, read as whole numbers: those of at most ``most`` elements."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    begin = place // most * most
    bits = flat[begin : begin + most].view(WHOLE[flat.element_size()])
    return bits.sum(dtype=torch.int64).remainder(1 << 52)  # a float64 holds it exactly


def _element(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return the element at flat index ``place`` of a tensor with any strides, without copying the tensor."""
    value = tensor[tuple(int(i) for i in np.unravel_index(place, tensor.shape))] if tensor.ndim else tensor
    return value.real if value.is_complex() else value
