"""Watch for failures that raise no error: losses and gradients that are not finite, weights that differ.

Each is told once, with rank and step. Nothing here asks the device in a step, unless steps that are not finite are to
be left out or to end the training.
"""

import logging
import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, all_finite, clear
from lightning_hetero.comm.timing.clock import Clock

__all__ = ["Health", "NonFiniteError"]

log = logging.getLogger("lightning_hetero")

SAMPLED = 32
"""Weights that are compared each time, each of another parameter as long as there are so many."""
TOLERANCE, ROUNDINGS = 1e-3, 8
"""Largest difference of two replicas' weights, as a share of their size; or so many roundings of their type.

Devices of different kinds round differently in the optimizer's step, and the replicas on them drift apart by that.
"""


class NonFiniteError(RuntimeError):
    """A step's loss or gradient was not finite, and the settings say to end the training then."""


class Health:
    """Watches losses, averaged gradients and weights of one rank.

    Args:
        mode: what to do about a gradient that is not finite: ``"warn"``, ``"drop"`` or ``"stop"``.
        control: of the ranks.
        hook: averages gradients.
        clock: of the device.
    """

    def __init__(self, mode: str, control: ControlPlane, hook: HookState, clock: Clock) -> None:
        self.mode, self._control, self._hook, self._clock = mode, control, hook, clock
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.scaled = False
        self._losses: deque[tuple[torch.Tensor, Any, tuple[int, int]]] = deque()
        self._step, self._bytes, self._looks = (0, 0), 0, 0
        self._told = self._told_of_weights = False
        self._bad: tuple[int, int] | None = None  # epoch and batch of the loss that was told of
        self._chosen: list[tuple[str, int]] = []
        self._limits: list[float] = []
        self._dropped = DroppedSteps()

    def begin(self) -> None:
        """Begin a training: what was said of an earlier one can be said again."""
        self._modules.clear()
        self._losses.clear()
        self._told, self._told_of_weights, self._bad = False, False, None

    def attach(self, module: nn.Module, *, scaled: bool = False) -> None:
        """Watch a module, one of several perhaps.

        Args:
            module: inside of DDP's wrapper.
            scaled: whether a loss scaler leaves out steps that are not finite by itself.
        """
        self._modules[module], self.scaled = None, scaled

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name; those of a second module and so on are told apart by its number."""
        return {
            f"{name} (model {number})" if number else name: p
            for number, module in enumerate(self._modules)
            for name, p in module.named_parameters()
            if p.requires_grad
        }

    # losses

    def see(self, loss: torch.Tensor, step: tuple[int, int]) -> None:
        """Take a loss that enters backward; it is read when the device has come to it, in a later step."""
        self._step = step
        if self._told:
            return
        self._read()
        value = loss.detach().sum() if loss.numel() > 1 else loss.detach()
        if value.device.type == "cuda":
            there = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            value = there.copy_(value, non_blocking=True)
        self._losses.append((value, self._clock.mark(), step))

    def _read(self, *, wait: bool = False) -> None:
        now = wait or self._clock.synchronous
        while self._losses and (now or self._clock.ready(self._losses[0][1])):
            value, _, (epoch, batch) = self._losses.popleft()
            number = float(value)
            if math.isfinite(number) or self._told:
                continue
            self._told, self._bad = True, (epoch, batch)
            log.warning(
                "rank %d: the loss is %s in batch %d of epoch %d; nothing is said of later ones. %s",
                self._control.rank,
                number,
                batch,
                epoch,
                self._what_follows(),
            )

    def _what_follows(self) -> str:
        if self.scaled or self.mode == "drop" or self._hook.averager.skips_nonfinite:
            return "Such gradients are left out on all ranks"
        if self.mode == "stop":
            return "Training ends with such a gradient, because of nonfinite='stop'"
        return "nonfinite='drop' leaves such gradients out on all ranks, nonfinite='stop' ends the training"

    # gradients

    def after_backward(self) -> None:
        """Look at the gradient, if the settings say to do something about it; a collective call if it is not finite.

        Raises:
            NonFiniteError: on all ranks, if the gradient is not finite and training is to end then.
        """
        if self.mode == "warn" or self.scaled or self._hook.num_bytes == self._bytes:
            return
        self._bytes = self._hook.num_bytes
        epoch, batch = self._step
        parameters = self._parameters().values()
        finite = all_finite(parameters)
        if self.mode == "drop" and not finite:
            clear(parameters)
            self._hook.skip_step()
            self._dropped.add(batch, f"of epoch {epoch}")
        if self.mode == "drop" or (finite and not bool(self._hook.step_skipped)):  # compression may have left it out
            return
        self._clock.wait()
        self._read(wait=True)
        mine = np.array([-1.0, -1.0] if self._bad is None else self._bad, dtype=np.float64)
        bad = {rank: row for rank, row in enumerate(self._control.gather(mine).astype(int).tolist()) if row[1] >= 0}
        whose = ", ".join(f"the loss of rank {rank} was not, in batch {row[1]}" for rank, row in bad.items())
        whose = whose or "the losses of all ranks were"
        raise NonFiniteError(
            f"the averaged gradient is not finite in batch {batch} of epoch {epoch}; {whose}. Training ends before the "
            "optimizer takes it, because of nonfinite='stop'. Look at that rank's data, lower the learning rate, clip "
            "gradients, or set nonfinite='drop'."
        )

    # weights

    def sample(self) -> npt.NDArray[np.float64]:
        """Return some weights of this rank, the same on all ranks, for :meth:`judge`; NaN where one is missing.

        They travel with what ranks send each other anyway when they look at their plan.
        """
        parameters = {name: p for name, p in self._parameters().items() if p.numel()}
        names, picked = list(parameters), np.random.default_rng(self._looks)
        chosen = [names[(self._looks * SAMPLED + i) % len(names)] for i in range(min(SAMPLED, len(names)))]
        self._looks += 1
        self._chosen = [(name, int(picked.integers(parameters[name].numel()))) for name in chosen]
        sampled = np.full(SAMPLED, np.nan)
        if self._control.world_size > 1 and chosen:
            values = [_element(parameters[name].detach(), place).double() for name, place in self._chosen]
            sampled[: len(values)] = torch.stack([value.to(values[0].device) for value in values]).cpu().numpy()
            self._limits = [_tolerance(parameters[name]) for name in chosen]
        return sampled

    def pack(self) -> npt.NDArray[np.float64]:
        """Return some weights of this rank."""
        return self.sample()

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Compare the weights of all ranks."""
        self.judge(everyone)

    def judge(self, everyone: npt.NDArray[np.float64]) -> None:
        """Compare the weights that all ranks have sampled, a row of each."""
        if self._told_of_weights or self._control.rank > 0:
            return
        finite = np.all(np.isfinite(everyone), axis=0).tolist()
        size = float(np.sqrt(np.mean(everyone[0, finite] ** 2))) if any(finite) else 0.0
        for i, (name, place) in enumerate(self._chosen):
            if not finite[i]:
                continue
            apart = np.abs(everyone[:, i] - everyone[0, i]) > self._limits[i] * (abs(everyone[0, i]) + size)
            if bool(np.any(apart)):
                self._tell_of_weights(name, place, everyone[:, i], int(np.argmax(apart)))
                return

    def _tell_of_weights(self, name: str, place: int, values: "np.ndarray[Any, Any]", rank: int) -> None:
        self._told_of_weights = True
        log.warning(
            "ranks hold different weights behind batch %d of epoch %d: element %d of %s is %.6g on rank 0 and %.6g on "
            "rank %d. They train different models from here on, and nothing will make them equal again. Change weights "
            "on all ranks alike",
            *(self._step[1], self._step[0], place, name, values[0], values[rank], rank),
        )

    def finish(self) -> None:
        """Training is over: read the last losses, and look at the weights; a collective call."""
        self._clock.wait()
        self._read(wait=True)
        self.judge(self._control.gather(self.sample()))
        weights = self._parameters().values()
        if self._control.rank == 0 and not self._told and not all(bool(torch.isfinite(p).all()) for p in weights):
            self._told = True
            log.warning("training has ended with weights that are not finite, after losses that all were")


def _tolerance(parameter: torch.Tensor) -> float:
    return max(TOLERANCE, ROUNDINGS * torch.finfo(parameter.dtype).eps)


def _element(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return one element by its number, of a tensor in any layout, without a copy of it."""
    value = tensor[tuple(int(i) for i in np.unravel_index(place, tensor.shape))] if tensor.ndim else tensor
    return value.real if value.is_complex() else value
