"""Rules of optimizers for sparse steps: one for each class, free of hooks, kernels and process groups.

A block that a gradient does not touch has a gradient of 0, and a dense optimizer still moves it: momentum goes on,
weight decay shrinks it. Here that update is deferred until the block is touched again, and then applied in full before
the new gradient. Each rule states the update by ``n`` steps without a gradient in closed form.

StellaTrain (S sec. 3.1) leaves untouched blocks as they are and calls the error small.

Between two touches, which may be a hundred steps apart with error feedback, the forward pass sees a block without its
deferred updates. Gradients then repeat a move that the deferred momentum already contains, and training overshoots. So
by default momentum is applied *ahead*: a touched block makes the whole move by its momentum until the next touch at
once, and the sum of all moves is the dense optimizer's. With ``momentum_mode="later"`` momentum is deferred as well,
and flushed parameters equal the dense optimizer's. Weight decay is always deferred.

Torch's operations, Numba's loops and Triton's kernels round every operation separately and in the same order, so
replicas are equal bit by bit on all devices.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from lightning_hetero.core.validation import check_choice
from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates, Kind
from lightning_hetero.optim.sparse.kernel_interface import Group, KernelStep, Tensors

__all__ = ["State", "UpdateRule", "has_buffer"]

State = dict[str, Any]
"""State that torch's optimizer keeps of one parameter."""

DENSE_ONLY = ("fused", "dampening", "maximize", "amsgrad", "capturable", "differentiable")
"""Options of a parameter group that have no sparse form."""


class UpdateRule(ABC):
    """Step of one class of optimizers on blocks, and its deferred updates of blocks that it skipped.

    Args:
        momentum_mode: whether momentum moves a block that is no longer touched ``"ahead"`` or ``"later"``.
    """

    optimizer_class: ClassVar[type[torch.optim.Optimizer]]
    counts_steps: ClassVar[bool] = False
    """Whether the optimizer counts the steps of each parameter."""

    def __init__(self, momentum_mode: str = "ahead") -> None:
        self.momentum_mode = check_choice("pay", momentum_mode, ("ahead", "later"))

    @staticmethod
    def unsupported_option(group: Group) -> str | None:
        """Return an option of the group that only dense steps support, ``None`` if there is none."""
        for name in DENSE_ONLY:
            if group.get(name):
                return f"{name}={group[name]}"
        if "betas" in group and group["betas"][1] == 0:
            return f"betas={group['betas']}"
        return "a learning rate that is a tensor" if isinstance(group["lr"], torch.Tensor) else None

    @abstractmethod
    def has_state(self, group: Group, p: torch.Tensor, state: State) -> bool:
        """Return whether dense steps have made the state that sparse ones need."""

    @abstractmethod
    def kind(self, group: Group) -> Kind | None:
        """Return which updates are deferred, ``None`` if a step without a gradient changes nothing."""

    def steps_taken(self, state: State) -> int:
        """Return the steps that a parameter has taken, 0 if the optimizer does not count them."""
        return 0

    def count_step(self, state: State) -> None:  # noqa: B027 - nothing to do unless steps are counted
        """Count one more step of a parameter."""

    @abstractmethod
    def buffers(self, state: State, kind: Kind | None) -> list[torch.Tensor]:
        """Return the state tensors of a parameter's shape, as far as steps use them."""

    def begin_step(self, deferred: DeferredUpdates, group: Group) -> None:  # noqa: B027 - most rules need nothing
        """Set the share of momentum that blocks keep in this step."""

    @abstractmethod
    def defer_step(self, deferred: DeferredUpdates, group: Group, number: int) -> None:
        """Add a step without a gradient, of this number in the bias corrections, to the deferred updates."""

    @abstractmethod
    def apply_deferred(self, parts: list[torch.Tensor], c: torch.Tensor, deferred: DeferredUpdates) -> None:
        """Update blocks of parameter and buffers, in place, by the coefficients of the steps that they skipped."""

    @abstractmethod
    def apply_gradient(
        self, group: Group, parts: list[torch.Tensor], g: torch.Tensor, number: int, kept: torch.Tensor | None
    ) -> None:
        """Take the step of this number on blocks of parameter and buffers, in place.

        Args:
            group: the parameter's group of settings.
            parts: blocks of the parameter and of its buffers.
            g: their gradient.
            number: number of the step in the bias corrections.
            kept: share of its momentum that each block keeps, if momentum is applied ahead by intervals.
        """

    @abstractmethod
    def apply_in_kernel(
        self, kernel: KernelStep[Tensors], tensors: Tensors, group: Group, number: int, deferred: DeferredUpdates | None
    ) -> None:
        """Do :meth:`apply_deferred` and :meth:`apply_gradient` of the touched blocks in one kernel.

        Args:
            kernel: touched blocks, in the form that the kernel takes.
            tensors: parameter, gradient and buffers: of one parameter on a GPU, of each in the cohort on CPU.
            group: the parameters' group of settings.
            number: number of the step in the bias corrections.
            deferred: updates of blocks that were skipped, ``None`` if there are none.
        """

    @abstractmethod
    def kept_share(self, group: Group, interval: torch.Tensor | None) -> torch.Tensor | None:
        """Return the share of momentum that elements keep if the next step touches them; ``None`` in mode ``"later"``.

        Args:
            group: the elements' group of settings.
            interval: mean interval of their blocks as :func:`~.kernel_interface.mean_intervals` gives it, ``None``
                unless :meth:`kind` is ``"interval"``.
        """


def has_buffer(p: torch.Tensor, state: State, name: str) -> bool:
    """Return whether there is state of this name, and lay its elements out in the parameter's order of memory.

    Torch makes state in the order of the first gradient, which may differ.
    """
    if state.get(name) is None:
        return False
    if state[name].stride() != p.stride():
        state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])
    return True
