"""Warnings of silent failures: losses and gradients that are not finite, weights that differ between ranks.

Each warning is given once, with rank and step. Nothing here waits for the device within a step, unless the settings say
that non-finite steps are left out or end the training.
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
from lightning_hetero.comm.gradients.nonfinite import DroppedSteps, StepSkipper, all_finite, clear
from lightning_hetero.comm.gradients.weight_check import WeightCheck
from lightning_hetero.comm.timing.clock import Clock

__all__ = ["Health", "NonFiniteError"]

log = logging.getLogger("lightning_hetero")

SINGLE = (
    "This rank's batch had a single sample, of which a variance, a standard deviation or batch normalization is not "
    "finite: min_local_batch_size=2, or local_batch_multiple=2 with drop_last=True, avoids such batches. "
)


class NonFiniteError(RuntimeError):
    """Raised if a gradient is not finite and the settings say to end the training (``on_nonfinite="raise"``)."""


class Health:
    """Checks of losses, averaged gradients and weights of one rank.

    Args:
        mode: action on a gradient that is not finite: ``"ignore"``, ``"skip"`` or ``"raise"``.
        control: control plane of the ranks.
        hook: state of the gradient hook, which averages gradients.
        clock: clock of the device.

    Attributes:
        scaled: whether a loss scaler already leaves out steps that are not finite.
        weights: compares weights of all ranks.
    """

    def __init__(self, mode: str, control: ControlPlane, hook: HookState, clock: Clock) -> None:
        self.mode, self._control, self._hook, self._clock = mode, control, hook, clock
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.scaled = False
        self._losses: deque[tuple[torch.Tensor, Any, tuple[int, int], int]] = deque()
        self._step, self._bytes = (0, 0), 0
        self._told, self._dropped = False, DroppedSteps()
        self._skipper: StepSkipper | None = None
        self._bad: tuple[int, int] | None = None  # epoch and batch of the loss that was reported
        self.weights = WeightCheck(control)

    def begin(self) -> None:
        """Begin a training: warnings of an earlier one can be given again."""
        self._modules.clear()
        self._losses.clear()
        self.weights.begin()
        self._told, self._bad = False, None

    def attach(self, module: nn.Module, *, scaled: bool = False) -> None:
        """Watch a module; several may be watched.

        Args:
            module: the module inside DDP's wrapper.
            scaled: whether a loss scaler already leaves out steps that are not finite.
        """
        self._modules[module], self.scaled = None, scaled
        if self.mode == "skip" and not scaled and self._skipper is None:
            self._skipper = StepSkipper()

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name; from the second module on, names contain its number."""
        return {
            f"{name} (model {number})" if number else name: p
            for number, module in enumerate(self._modules)
            for name, p in module.named_parameters()
            if p.requires_grad
        }

    def close(self) -> None:
        """Let optimizers take all steps from now on."""
        if self._skipper is not None:
            self._skipper.remove()
        self._skipper = None

    # losses

    def see(self, loss: torch.Tensor, step: tuple[int, int], rows: int = 0) -> None:
        """Record a loss that enters backward; it is read in a later step, once the device has it.

        Args:
            loss: loss of this rank's batch.
            step: epoch and batch.
            rows: samples of the batch, 0 if unknown.
        """
        self._step = step
        if self._told:
            return
        self._read()
        value = loss.detach().sum() if loss.numel() > 1 else loss.detach()
        if value.device.type == "cuda":
            there = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            value = there.copy_(value, non_blocking=True)
        self._losses.append((value, self._clock.mark(), step, rows))

    def _read(self, *, wait: bool = False) -> None:
        now = wait or self._clock.synchronous
        while self._losses and (now or self._clock.ready(self._losses[0][1])):
            value, _, (epoch, batch), rows = self._losses.popleft()
            number = float(value)
            if math.isfinite(number) or self._told:
                continue
            self._told, self._bad = True, (epoch, batch)
            log.warning(
                "rank %d: the loss is %s in batch %d of epoch %d; nothing is said of later ones. %s%s",
                self._control.rank,
                number,
                batch,
                epoch,
                SINGLE if rows == 1 else "",
                self._what_follows(),
            )

    def _what_follows(self) -> str:
        if self.scaled or self.mode == "skip" or self._hook.averager.skips_nonfinite:
            return "Such gradients are left out on all ranks"
        if self.mode == "raise":
            return "Training ends with such a gradient, because of on_nonfinite='raise'"
        if self._hook.averager.shards:  # no rank sees a whole gradient
            return "Sharded gradients cannot be left out; Trainer(detect_anomaly=True) finds what made it"
        return "on_nonfinite='skip' leaves such gradients out on all ranks, on_nonfinite='raise' ends the training"

    # gradients

    def after_backward(self) -> None:
        """Check the gradient, if the settings ask for an action; a collective call if it is not finite.

        Raises:
            NonFiniteError: on all ranks, if the gradient is not finite and the mode is ``"raise"``.
        """
        if self.mode == "ignore" or self.scaled or self._hook.num_bytes == self._bytes:
            return
        self._bytes = self._hook.num_bytes
        epoch, batch = self._step
        parameters = self._parameters().values()
        finite = all_finite(parameters)
        if finite and not bool(self._hook.step_skipped):  # compression may have left it out
            return
        if self._skipper is not None:
            if not finite:
                clear(parameters)
                self._hook.skip_step()
                self._dropped.add(batch, f"of epoch {epoch}")
            self._skipper.skip(parameters)
            return
        self._clock.wait()
        self._read(wait=True)
        mine = np.array([-1.0, -1.0] if self._bad is None else self._bad, dtype=np.float64)
        bad = {rank: row for rank, row in enumerate(self._control.gather(mine).astype(int).tolist()) if row[1] >= 0}
        whose = ", ".join(f"the loss of rank {rank} was not, in batch {row[1]}" for rank, row in bad.items())
        whose = whose or "the losses of all ranks were"
        raise NonFiniteError(
            f"the averaged gradient is not finite in batch {batch} of epoch {epoch}; {whose}. Training ends before the "
            "optimizer takes it, because of on_nonfinite='raise'. Look at that rank's data, lower the learning rate, "
            "clip gradients, or set on_nonfinite='skip'."
        )

    # weights

    def pack(self) -> npt.NDArray[np.float64]:
        """Return some weights of this rank for the message of a sync round."""
        return self.weights.sample(self._parameters())

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Compare the weights of all ranks."""
        self.weights.judge(everyone, self._step)

    def finish(self) -> None:
        """End a training: read the last losses, and check the weights; a collective call."""
        self._clock.wait()
        self._read(wait=True)
        self.unpack(self._control.gather(self.pack()), self._control)
        weights = self._parameters().values()
        if self._control.rank == 0 and not self._told and not all(bool(torch.isfinite(p).all()) for p in weights):
            self._told = True
            log.warning("training has ended with weights that are not finite, after losses that all were")
