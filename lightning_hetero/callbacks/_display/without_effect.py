"""Callbacks, and settings of callbacks, that do nothing in a run."""

import inspect
from collections.abc import Iterator, Sequence

from lightning_hetero.callbacks._lightning import Callback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.callbacks.noise_scale import GNSCallback
from lightning_hetero.callbacks.pid import DynamicBatchPIDCallback
from lightning_hetero.callbacks.time_to_accuracy import TTACallback
from lightning_hetero.callbacks.weight_prediction import LookAheadCallback
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.core.policies.base import moves_total
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.frontend.without_effect import ALONE

__all__ = ["callbacks_without_effect"]


def callbacks_without_effect(callbacks: Sequence[Callback], config: HeteroConfig, world_size: int) -> list[NoEffect]:
    """Return the settings of a user's callbacks that do nothing.

    Args:
        callbacks: those that the user gave, in their order.
        config: settings of the strategy.
        world_size: number of ranks.

    Example:
        >>> [str(one)[:34] for one in callbacks_without_effect([LookAheadCallback()], HeteroConfig(), 2)]
        ['LookAheadCallback has no effect: s']
    """
    return [one for callback in callbacks for one in _of(callback, callbacks, config, world_size)]


def _of(callback: Callback, callbacks: Sequence[Callback], config: HeteroConfig, world_size: int) -> Iterator[NoEffect]:
    name = (type(callback).__name__,)
    if isinstance(callback, TTACallback) and not callback.tta_planner.moves_batch:
        idle = tuple(f"TTACallback({text})" for text in _of_total(callback))
        if idle:
            cure = "Give max_total_batch_size as well, or leave it out"
            yield NoEffect(idle, "without max_total_batch_size the total batch stays", cure)
    if world_size == 1 and isinstance(callback, PolicyCallback | LookAheadCallback) and not _moves_total(callback):
        yield NoEffect(name, *ALONE)
    elif isinstance(callback, LookAheadCallback) and config.staleness == 0:
        yield NoEffect(name, "staleness=0 delays no gradient", "Set staleness=1, or leave it out")
    elif config.local_batch_sizes is not None and _starts_equal(callback):
        reason = f"training begins with local_batch_sizes={list(config.local_batch_sizes)}"
        yield NoEffect((f"{name[0]}(start='equal')",), reason, "Leave one of them out")
    if isinstance(callback, GNSCallback):
        if world_size == 1 and callback.method != "pooled":
            reason = "it says how the estimates of several workers are weighted, and there is one"
            yield NoEffect((f"{name[0]}(method={callback.method!r})",), reason, "Leave it out")
        later = [other for other in callbacks[callbacks.index(callback) + 1 :] if isinstance(other, GNSCallback)]
        if later and world_size > 1:
            reason = f"gradients are given to one callback that measures their noise, and {type(later[-1]).__name__} is"
            yield NoEffect(name, f"{reason} the last", "Keep one of them", loses=True)


def _of_total(callback: TTACallback) -> Iterator[str]:
    """Yield the settings that say how a total batch moves, as they were given."""
    planner = callback.tta_planner
    if callback.given_lr_scaling not in ("auto", "none"):
        yield f"lr_scaling={callback.given_lr_scaling!r}"
    usual = inspect.signature(TTACallback).parameters
    for name, value in (("hysteresis", planner.hysteresis), ("min_steps", planner.min_steps)):
        if value != usual[name].default:
            yield f"{name}={value}"


def _starts_equal(callback: Callback) -> bool:
    planner = callback.planner if isinstance(callback, DynamicBatchPIDCallback) else None
    return isinstance(planner, ProportionalPlanner) and planner.start == "equal"


def _moves_total(callback: Callback) -> bool:
    """Return whether a policy moves the total batch, which it can do for one worker, too."""
    if isinstance(callback, TTACallback):
        return callback.tta_planner.moves_batch
    return isinstance(callback, PolicyCallback) and moves_total(callback.planner)
