"""Which callback decides on the split of a strategy: that of the user, or the one that its settings name.

And what of settings and callbacks does nothing in a run.
"""

from typing import Any

from lightning_hetero.callbacks import PolicyCallback, policy_callback
from lightning_hetero.callbacks._without_effect import callbacks_without_effect
from lightning_hetero.frontend.without_effect import tell
from lightning_hetero.strategies._lightning.convergence_probe import begin_probe, probes

__all__ = ["attach_policy", "tell_settings"]


def attach_policy(strategy: Any) -> None:
    """Put the callback of the policy before all others, once the strategy's module has a trainer.

    Lightning's own trainer gives the module its trainer before the strategy gets the module; who connects a strategy by
    hand may do it later.

    Raises:
        MisconfigurationException: if two policies were given.
    """
    module = strategy.lightning_module
    if getattr(module, "_trainer", None) is None:
        return
    begin_probe(strategy)
    callbacks = strategy._trainer.callbacks
    given = [callback for callback in callbacks if isinstance(callback, PolicyCallback)]
    if strategy._callback in given:
        return
    sizes = strategy.config.local_batch_sizes if strategy.config.fixes_split else None
    named = f"local_batch_sizes={sizes}" if sizes else strategy.config.policy
    if len(given) > 1 or (given and named is not None and named != given[0].policy):
        names = [type(callback).__name__ for callback in given] + ([str(named)] if named is not None else [])
        raise strategy._misconfiguration(
            f"several policies would decide on the same split: {', '.join(names)}. Keep one of them."
        )
    if given:
        strategy._callback = given[0]
        callbacks.remove(given[0])
    else:
        strategy._callback = policy_callback("fixed" if sizes else strategy.config.policy)
    companions = strategy._callback.companions(callbacks)
    strategy._brought = companions if given else [strategy._callback, *companions]
    callbacks[:0] = [strategy._callback, *companions]


def tell_settings(strategy: Any) -> None:
    """Say which settings of a strategy, and of the user's callbacks, do nothing; training begins, data is known."""
    if probes(strategy):
        return
    engine = strategy.engine
    given = [callback for callback in strategy._trainer.callbacks if callback not in strategy._brought]
    others = callbacks_without_effect(given, strategy.config, engine.world_size)
    tell(engine, strategy._callback.planner, others, split=engine.sampler is not None)
