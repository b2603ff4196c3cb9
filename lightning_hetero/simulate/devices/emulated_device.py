"""Emulation of a device on a CPU: a module's passes end exactly when the device's would, and the CPU waits meanwhile.

The computation is real; the device's time is kept by sleeping until a moment that is counted from the start of the
pass. So what the host computes meanwhile is part of the device's time as long as it is shorter. Only what the host
takes beyond it comes on top, and is measured.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int
from lightning_hetero.simulate.devices.batch_size import check_size_function, first_dimension, size_of
from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.devices.module_hook import ModuleHook

__all__ = ["EmulatedDevice", "HostClock", "PassTimes"]


@dataclass(frozen=True)
class PassTimes:
    """Times of one forward or backward pass.

    Args:
        kind: ``"forward"`` (all that is outside of the backward pass) or ``"backward"``.
        batch_size: samples of the pass; of a backward pass, those of all forward passes that it belongs to.
        device: seconds that the device takes.
        host: seconds by which the pass ended later than that: what the host added.

    Example:
        >>> PassTimes("forward", 8, device=0.02, host=0.0001).taken
        0.0201
    """

    kind: str
    batch_size: int
    device: float
    host: float

    @property
    def taken(self) -> float:
        """Seconds that the pass took."""
        return self.device + self.host


@dataclass(frozen=True)
class HostClock:
    """Clock of the host and its sleep; tests give their own.

    Args:
        now: returns seconds.
        sleep: waits for a number of seconds.

    Example:
        >>> HostClock().now() > 0.0
        True
    """

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class _Pass:
    """A pass that runs, or is to come: its start, the device's seconds, and its samples."""

    start: float
    seconds: float
    batch_size: int


@checked_keywords
class EmulatedDevice:
    """Device of a given profile, whose time the passes of a module take.

    :meth:`attach` it to a module *before* the module is wrapped (``DistributedDataParallel(...)``, ``fabric.setup``,
    ``accelerator.prepare``); in a Lightning Trainer use :class:`EmulatedDeviceCallback` instead. A forward pass takes
    ``a``, which stands for loading, forward and update together. A backward pass takes ``P``, and each trainable
    parameter its share of it, by its number of elements: so DDP's gradient buckets become ready one after the other.
    No processor time is used while the device "computes", so many workers share a few cores.

    A forward pass with gradients and the backward pass that follows are one pass of the profile. If several forward
    passes precede one backward pass, it takes their ``P`` together; further backward passes take nothing. Without
    gradients (evaluation), a forward pass takes ``a`` with the slowdown of the moment and without jitter.

    Args:
        profile: of the device.
        seed: of its jitter, ``>= 0``; a different one for each device.
        keep: newest passes whose times are kept, ``>= 1``.
        host: clock of the host.

    Attributes:
        passes: passes with gradients so far.
        times: times of the newest passes.

    Raises:
        TypeError: if the profile is none.
        torch.OutOfMemoryError: in a forward pass of more samples than the profile's memory holds.

    Example:
        >>> device = EmulatedDevice(DeviceProfile(q=0.001, s=0.0, k=0.002, m=0.0))
        >>> model = nn.Linear(4, 1)
        >>> with device.attach(model):
        ...     model(torch.zeros(8, 4)).sum().backward()
        >>> [(one.kind, round(one.device, 6)) for one in device.times]
        [('forward', 0.008), ('backward', 0.016)]
    """

    def __init__(
        self, profile: DeviceProfile, seed: int = 0, *, keep: int = 10_000, host: HostClock = HostClock()
    ) -> None:
        if not isinstance(profile, DeviceProfile):
            raise TypeError(f"profile={profile!r} must be a DeviceProfile, such as DeviceProfile(1e-3, 0, 2e-3, 0).")
        self.profile, self.seed, self.host, self.passes = profile, seed, host, 0
        self.times: deque[PassTimes] = deque(maxlen=check_int("keep", keep, minimum=1))
        self._factors = profile.factors(seed)
        self._forward: _Pass | None = None
        self._coming: _Pass | None = None
        self._backward: _Pass | None = None
        self._done = 0.0  # share of the running backward pass
        self._handles: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the hooks and the running passes: a copy is attached to nothing."""
        return {"profile": self.profile, "seed": self.seed, "host": self.host, "times": self.times, "at": self.passes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["profile"], state["seed"], keep=state["times"].maxlen, host=state["host"])  # type: ignore[misc]
        self.times.extend(state["times"])
        self.skip(state["at"])

    # passes

    def skip(self, passes: int) -> None:
        """Go on as after some more passes with gradients, in a resumed training."""
        for _ in range(check_int("passes", passes, minimum=0)):
            next(self._factors)
        self.passes += passes

    def begin_forward(self, batch_size: int, *, gradients: bool = True) -> None:
        """Begin a forward pass.

        Args:
            batch_size: its samples.
            gradients: whether a backward pass follows.

        Raises:
            torch.OutOfMemoryError: if so many samples do not fit into the device's memory.
        """
        profile = self.profile
        if profile.memory is not None and batch_size > profile.memory:
            raise torch.OutOfMemoryError(
                f"out of memory: the emulated device {profile.name or 'without a name'} holds {profile.memory} samples "
                f"and got {batch_size}."
            )
        if gradients:
            forward, backward = next(self._factors)
            before, seconds = self._coming or _Pass(0.0, 0.0, 0), backward * profile.model.backward_time(batch_size)
            self._coming = _Pass(0.0, before.seconds + seconds, before.batch_size + batch_size)
            self.passes += 1
        else:
            forward = profile.slowdown_at(self.passes)
        self._forward = _Pass(self.host.now(), forward * profile.model.forward_time(batch_size), batch_size)

    def end_forward(self) -> None:
        """End the forward pass when the device's would end; nothing if none runs."""
        if self._forward is not None:
            ran, self._forward = self._forward, None
            self._end("forward", ran)

    def begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Begin the backward pass, unless it runs already or has none to come; also a hook of a tensor's gradient."""
        if self._backward is None and self._coming is not None:
            self._backward = _Pass(self.host.now(), self._coming.seconds, self._coming.batch_size)
            self._coming, self._done = None, 0.0
            # torch calls it at the end of this backward pass, before DDP waits for its buckets
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def advance_backward(self, share: float) -> None:
        """Let a share of the backward pass take its time.

        Args:
            share: of the whole, 0 to 1.
        """
        self.begin_backward()
        if self._backward is not None:
            self._done = min(self._done + share, 1.0)
            self._wait(self._backward.start + self._done * self._backward.seconds)

    def end_backward(self) -> None:
        """End the backward pass when the device's would end; nothing if none runs."""
        if self._backward is not None:
            ran, self._backward = self._backward, None
            self._end("backward", ran)

    def forget(self) -> None:
        """Forget a pass that failed on its way."""
        self._forward = self._coming = self._backward = None

    def _wait(self, until: float) -> None:
        left = until - self.host.now()
        if left > 0.0:
            self.host.sleep(left)

    def _end(self, kind: str, ran: _Pass) -> None:
        self._wait(ran.start + ran.seconds)
        self.times.append(PassTimes(kind, ran.batch_size, ran.seconds, self.host.now() - ran.start - ran.seconds))

    # hooks

    def attach(self, module: nn.Module, *, batch_size: Callable[..., int] = first_dimension) -> "EmulatedDevice":
        """Let the passes of a module take the device's time, until :meth:`detach` or the end of a ``with`` block.

        A copy of the module, as a saved one, runs on no device. Attach before the first call of a compiled module.

        Args:
            module: model whose forward passes are the device's.
            batch_size: function of the module's arguments that returns the batch size.

        Raises:
            TypeError: if an argument has the wrong type.
            RuntimeError: if the device is attached already.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module={module!r} must be a torch.nn.Module, the model whose passes take the time.")
        check_size_function(batch_size)
        self.attach_parameters(module.parameters())

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._forward is not None or self._backward is not None:  # of a step that failed
                self.forget()
            self.begin_forward(size_of(batch_size, *args, *kwargs.values()), gradients=torch.is_grad_enabled())

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self.end_forward()
            for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self.begin_backward)

        self._handles += [
            module.register_forward_pre_hook(ModuleHook(begin), with_kwargs=True, prepend=True),
            module.register_forward_hook(ModuleHook(end)),
        ]
        return self

    def attach_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the gradients of these parameters become ready one after the other in the backward pass.

        Args:
            parameters: of the model; those without gradient are left out.

        Raises:
            RuntimeError: if the device is attached already.
        """
        if self._handles:
            raise RuntimeError(
                "This device is attached to a model already. Call detach() first, or make one device each."
            )
        trained = [one for one in parameters if one.requires_grad]
        elements = sum(one.numel() for one in trained)
        for one in trained:
            self._handles.append(one.register_hook(partial(self._of_parameter, one.numel() / elements)))

    def attach_layers(self, module: nn.Module) -> None:
        """Let a forward pass that runs take its time in the first layer of a module that it calls.

        Args:
            module: whose layers these are, itself among them.
        """
        self._handles += [layer.register_forward_hook(ModuleHook(self._of_layer)) for layer in module.modules()]

    def _of_layer(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.end_forward()

    def _of_parameter(self, share: float, gradient: torch.Tensor) -> None:
        self.advance_backward(share)

    def detach(self) -> None:
        """Remove all hooks; what runs afterwards takes its own time."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def __enter__(self) -> "EmulatedDevice":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()
