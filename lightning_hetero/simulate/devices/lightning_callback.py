"""Callback of a Lightning Trainer that lets each worker take the time of an emulated device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hetero.callbacks._lightning import Callback, LightningModule, Trainer
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.hardware import call_device
from lightning_hetero.simulate.devices.batch_size import check_size_function, first_dimension, size_of
from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.devices.emulated_device import EmulatedDevice

__all__ = ["EmulatedDeviceCallback"]


@checked_keywords
class EmulatedDeviceCallback(Callback):
    """Callback that makes each worker of a Trainer as fast as a device of a given profile, with any strategy.

    A micro-batch takes ``a = q b + s`` until its first layer has run, or at the latest until its first backward pass
    begins, and ``P = k b + m`` in that pass. Batches of validation, test and prediction take ``a``. See
    :class:`EmulatedDevice` for what exactly is emulated.

    Args:
        profiles: profile of all workers, or one per rank.
        seed: of the jitter; rank ``i`` uses ``seed + i``.
        batch_size: function of a batch that returns its number of samples.

    Raises:
        TypeError: if a profile is none.
        ValueError: if there are not as many profiles as ranks (when training begins, on every rank).

    Example:
        >>> callback = EmulatedDeviceCallback([DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.004, 0, 0.008, 0)])
        >>> callback.profiles[1].seconds(10)
        0.12
    """

    def __init__(
        self,
        profiles: DeviceProfile | Sequence[DeviceProfile],
        *,
        seed: int = 0,
        batch_size: Callable[[Any], int] = first_dimension,
    ) -> None:
        given = [profiles] if isinstance(profiles, DeviceProfile) else profiles
        if not isinstance(given, Sequence) or not given:
            raise TypeError(f"profiles={profiles!r} must be a DeviceProfile, or a list of one for each rank.")
        for profile in given:
            EmulatedDevice(profile, seed)
        self.profiles = profiles if isinstance(profiles, DeviceProfile) else tuple(profiles)
        self.seed, self.batch_size, self._resumed = seed, check_size_function(batch_size), 0
        self.device: EmulatedDevice | None = None
        """The device of this rank, from the start of a run on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the profile of this rank."""
        profiles, ranks, rank = self.profiles, trainer.world_size, trainer.global_rank
        if not isinstance(profiles, DeviceProfile):
            if len(profiles) != ranks:
                raise ValueError(
                    f"EmulatedDeviceCallback has {len(profiles)} profiles for {ranks} ranks. Give one for each rank, "
                    "or a single profile for all."
                )
            profiles = profiles[rank]
        if self.device is None:
            self.device = EmulatedDevice(profiles, self.seed + rank)
        call_device(f"{profiles.name or 'a device'} (emulated)")

    def state_dict(self) -> dict[str, Any]:
        """Return the passes so far: a resumed training goes on with the jitter and the slowdown of the next one."""
        return {"passes": 0 if self.device is None else self.device.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the passes of an earlier training."""
        self._resumed = int(state_dict["passes"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pace the gradients of the module's parameters, and its forward passes.

        A forward pass ends in its first layer. Lightning calls :meth:`on_before_backward` inside the strategy's
        ``backward``, all of which the strategy's timers take for the backward pass.
        """
        self._known.skip(max(self._resumed - self._known.passes, 0))
        self._known.attach_parameters(pl_module.parameters())
        self._known.attach_layers(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self._known.forget()
        self._known.begin_forward(size_of(self.batch_size, batch))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """End the forward pass, and begin the backward pass when its first gradient is there."""
        self._known.end_forward()
        if loss.requires_grad:
            loss.register_hook(self._known.begin_backward)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the forward pass of a batch without a backward pass."""
        self._known.end_forward()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin the forward pass of a batch of validation, test or prediction."""
        self._known.begin_forward(size_of(self.batch_size, batch), gradients=False)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """End the forward pass of a batch of validation, test or prediction."""
        self._known.end_forward()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pace nothing any more."""
        self._known.detach()
        call_device("")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Pace nothing any more."""
        call_device("")
        if self.device is not None:
            self.device.detach()

    @property
    def _known(self) -> EmulatedDevice:
        assert self.device is not None
        return self.device
