"""The callback that decides on a strategy's split: the user's own, or the one that the settings name."""

from typing import TYPE_CHECKING

from lightning_hetero.callbacks import PolicyCallback, policy_callback
from lightning_hetero.callbacks._display.without_effect import callbacks_without_effect
from lightning_hetero.callbacks._lightning import callbacks_of
from lightning_hetero.config import HeteroConfig
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.without_effect import tell
from lightning_hetero.strategies._lightning.base import LightningMixin
from lightning_hetero.strategies._lightning.probes.begin import begin_probe
from lightning_hetero.strategies._lightning.probes.convergence import ConvergenceProbe

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["PolicyMixin"]


class PolicyMixin(LightningMixin):
    """A strategy with the callback of its policy, and the callbacks that came with it."""

    config: HeteroConfig
    engine: HeteroEngine | None
    _callback: PolicyCallback | None = None
    _brought: "tuple[Callback, ...]" = ()

    @property
    def _probes(self) -> bool:
        """``True`` if the strategy runs a probe training."""
        return isinstance(self._callback, ConvergenceProbe)

    def _attach_policy(self) -> None:
        """Put the callback of the policy before all others, once the strategy's module has a trainer.

        Lightning sets the module's trainer before it connects the strategy; code that connects a strategy by hand may
        set it later.

        Raises:
            MisconfigurationException: if two policies were given.
        """
        if self._trainer_if_any is None:
            return
        self.config = begin_probe(self)
        callbacks = callbacks_of(self._trainer)
        given = [callback for callback in callbacks if isinstance(callback, PolicyCallback)]
        if self._callback in given:
            return
        sizes = self.config.local_batch_sizes if self.config.fixes_split else None
        named = f"local_batch_sizes={sizes}" if sizes else self.config.policy
        if len(given) > 1 or (given and named is not None and named != given[0].policy):
            names = [type(callback).__name__ for callback in given] + ([str(named)] if named is not None else [])
            raise self._misconfiguration(
                f"several policies would decide on the same split: {', '.join(names)}. Keep one of them."
            )
        if given:
            callbacks.remove(given[0])
        callback = self._callback = given[0] if given else policy_callback("fixed" if sizes else self.config.policy)
        companions = callback.companions(callbacks)
        self._brought = tuple(companions) if given else (callback, *companions)
        callbacks[:0] = [callback, *companions]

    def _tell_settings(self) -> None:
        """Log which settings and callbacks of the user do nothing, now that training begins and the data is known."""
        if self._probes:
            return
        assert self.engine is not None
        assert self._callback is not None
        given = [callback for callback in callbacks_of(self._trainer) if callback not in self._brought]
        others = callbacks_without_effect(given, self.config, self.engine.world_size)
        tell(self.engine, self._callback.planner, others, split=self.engine.sampler is not None)
