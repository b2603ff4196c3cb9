"""Settings of elastic averaging that have no effect in a run; see :mod:`lightning_hetero.frontend.without_effect`."""

from collections.abc import Iterable, Iterator
from dataclasses import fields

from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.elastic.config import ElasticConfig

__all__ = ["elastic_without_effect"]

SCALING = ("min_batch_size", "beta", "damped")
"""Settings that control how batch sizes follow updates."""
PERTURBING = ("perturbation", "perturbation_threshold", "renormalize")
"""Settings that control how weights follow updates."""


def elastic_without_effect(config: ElasticConfig, world_size: int, samples: int, mega_samples: int) -> list[NoEffect]:
    """Return the settings of a configuration that have no effect in a run, with the reasons.

    Args:
        config: settings.
        world_size: number of ranks.
        samples: samples of an epoch.
        mega_samples: samples of a mega-batch.

    Example:
        >>> [one.settings for one in elastic_without_effect(ElasticConfig("mean", settings={"beta": 2.0}), 2, 640, 64)]
        [('beta=2.0',)]
    """
    return [one for one in (*_of_weights(config, world_size), *_of_rule(config, samples, mega_samples)) if one.settings]


def _of_weights(config: ElasticConfig, world_size: int) -> Iterator[NoEffect]:
    rule, leave = config.rule, "Leave it out, or set merge='adaptive'"
    if not rule.scales:
        yield NoEffect(_given(config, SCALING), f"merge={config.merge!r} keeps batches equal", leave)
        yield NoEffect(_given(config, PERTURBING), f"merge={config.merge!r} weights all replicas alike", leave)
    elif world_size == 1:
        reason = "there is one worker, with whose updates there is nothing to compare"
        yield NoEffect(_given(config, (*SCALING, *PERTURBING)), reason, "Start more, or leave it out")
    elif 0 in (config.settings.get("perturbation"), config.settings.get("perturbation_threshold")):
        off = [name for name in PERTURBING[:2] if config.settings.get(name) == 0]
        others = [name for name in PERTURBING if name not in off]
        yield NoEffect(_given(config, others), f"with {off[0]}=0 no weight is perturbed", "Leave one of them out")


def _of_rule(config: ElasticConfig, samples: int, mega_samples: int) -> Iterator[NoEffect]:
    if not config.rule.momentum and config.momentum:
        reason, cure = f"merge={config.merge!r} has none", "Leave it out, or set merge='elastic' or 'adaptive'"
        yield NoEffect((f"momentum={config.momentum}",), reason, cure)
    if mega_samples > samples:
        reason = f"an epoch has {samples} samples, and replicas are merged at its end at the latest"
        names = ("mega_batch_size", "mega_batch_batches")
        sizes = tuple(f"{name}={getattr(config, name)}" for name in names if getattr(config, name) is not None)
        yield NoEffect(sizes, reason, "Leave it out, or give less to merge more often")


def _given(config: ElasticConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the settings among ``names`` that differ from their defaults, as ``name=value``."""
    defaults = {field.name: field.default for field in fields(AdaptiveSettings)}
    values = {name: config.settings.get(name, defaults[name]) for name in names}
    return tuple(f"{name}={value!r}" for name, value in values.items() if value != defaults[name])
