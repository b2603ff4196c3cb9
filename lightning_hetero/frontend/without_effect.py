"""Report of settings that do nothing in a run, with the reason: once, on rank 0, when training begins.

A wrong setting is an error where it is given. The settings here are valid, but do nothing with the workers, the policy
or the data of the run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.link.clusters import Clusters
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.data.units.sampler import UnitSampler
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine import HeteroEngine

__all__ = ["ALONE", "Run", "given", "tell", "tell_left", "without_effect"]

ALONE = "there is one worker, who has nobody to share batches or exchange gradients with", "Start more, or leave it out"
"""Reason and cure for settings that need several workers."""

FOR_SEVERAL = (
    *("policy", "weight_fn", "cost_fn", "hysteresis", "change_cost", "balance_evaluation"),
    *("compression", "hierarchy", "sparse_optimizer", "staleness", "transfer_priority"),
    *("max_total_batch_size", "min_total_batch_size", "lr_scaling", "noise_scale"),
)
"""Settings that need several workers."""
FOR_SPLIT = (
    *("min_local_batch_size", "max_local_batch_sizes", "local_batch_multiple", "replan", "probe_memory"),
    *("max_total_batch_size", "min_total_batch_size", "lr_scaling", "noise_scale"),
    *("local_batch_sizes", "cost_fn", "change_cost", "batch_sampler", "slice_fn", "concat_fn"),
)
"""Settings that need a training loader that is split."""
FUNCTIONS = ("weight_fn", "cost_fn", "slice_fn", "concat_fn")


@dataclass(frozen=True)
class Run:
    """A run, as far as it is known when its training begins.

    Args:
        world_size: number of ranks.
        planner: decides on the split; ``None`` if it is fixed.
        clusters: clusters that the setting ``hierarchy`` gave, if any.
        flat: whether gradients are exchanged without clusters.
        on_cpu: whether all ranks compute on CPUs.
        scaled: whether a loss scaler skips steps that are not finite.
        batch_size: batch size of the training DataLoader, ``None`` if it is not split, or not known yet.
        split: whether the training loader is split.
        own_batches: whether it has a batch sampler of the user; ``None`` if that is not known yet.
        whole_batches: whether its dataset yields batches; ``None`` if that is not known yet.
    """

    world_size: int
    planner: Planner | None = None
    clusters: Clusters = ()
    flat: bool = True
    on_cpu: bool = False
    scaled: bool = False
    batch_size: int | None = None
    split: bool = True
    own_batches: bool | None = None
    whole_batches: bool | None = None


def given(config: HeteroConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the named settings that are not at their defaults, as the user wrote them.

    Example:
        >>> given(HeteroConfig(policy="pid", local_batch_sizes=[3, 1]), ("policy", "local_batch_sizes", "replan"))
        ("policy='pid'", 'local_batch_sizes=[3, 1]')
    """
    defaults = {field.name: field.default for field in fields(HeteroConfig)}
    values = {name: getattr(config, name) for name in names if getattr(config, name) != defaults[name]}
    return tuple(
        name if callable(value) and name in FUNCTIONS else f"{name}={_written(value)}" for name, value in values.items()
    )


def _written(value: object) -> str:
    """Write a value as users do: with lists in place of tuples, and without defaults."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if not is_dataclass(value):
        return repr(value)
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    changed = [f"{field.name}={own[field.name]!r}" for field in fields(value) if own[field.name] != field.default]
    return f"{type(value).__name__}({', '.join(changed)})"


def without_effect(config: HeteroConfig, run: Run) -> list[NoEffect]:
    """Return the settings of a configuration that do nothing in a run.

    Example:
        >>> [str(one) for one in without_effect(HeteroConfig(staleness=1), Run(1))][0][:30]
        'staleness=1 has no effect: the'
        >>> without_effect(HeteroConfig(), Run(2))
        []
    """
    rules = (_of_one_worker, _of_policy, _of_loader, _of_devices, _of_staleness, _of_hierarchy)
    return [one for rule in rules for one in rule(config, run) if one.settings]


def _of_one_worker(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    if run.world_size == 1:
        names = [name for name in FOR_SEVERAL if (name, config.policy) != ("policy", "even")] + _of_report(config)
        yield NoEffect(given(config, names), *ALONE)


def _of_report(config: HeteroConfig) -> list[str]:
    """Return the setting of the record, if it asks for one: runs without sync rounds have none."""
    return ["report"] if isinstance(config.report, str) else []


def _of_policy(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    if run.world_size == 1 or not run.split:
        return
    # hysteresis also applies to the rule of staleness
    unused = given(config, ["change_cost"] if config.staleness else ["hysteresis", "change_cost"])
    if isinstance(run.planner, ProportionalPlanner):
        reason = "proportional control goes by the dead band of its controller"
        yield NoEffect(unused, reason, "Under Lightning, give DynamicBatchPIDCallback(dead_band=...)")
    elif run.planner is None or isinstance(run.planner, StaticPlanner):
        (why,) = given(config, ["local_batch_sizes"]) if config.fixes_split else (f"policy={config.policy!r}",)
        yield NoEffect(unused, f"with {why} the split never changes", "Leave it out, or choose another policy")


def _of_loader(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    sizes, batch_size = config.local_batch_sizes, run.batch_size
    if sizes is not None and batch_size is not None and sum(sizes) != batch_size * run.world_size:
        reason = f"local_batch_sizes={list(sizes)} are the total batch, {sum(sizes)} samples"
        cure = f"For {batch_size * run.world_size} samples, give sizes that add up to it"
        yield NoEffect((f"the DataLoader's batch_size ({batch_size} per worker)",), reason, cure)
    if not run.split:
        reason, cure = "the training loader is left as it is", "Give one that can be split, or leave it out"
        names = [*FOR_SPLIT, *_of_report(config), *(["policy"] if config.policy != "even" else [])]
        names += [] if config.staleness else ["hysteresis"]  # which also applies to the rule of staleness
        yield NoEffect(given(config, names), reason, cure, loses=config.max_local_batch_sizes is not None)
    if run.own_batches is False:
        reason = "the training loader has no batch sampler of your own"
        yield NoEffect(given(config, ["batch_sampler"]), reason, "Leave it out")
    if run.whole_batches is False:
        reason = "the training loader makes its batches of single samples, which are divided as they are"
        yield NoEffect(given(config, ["slice_fn", "concat_fn"]), reason, "Leave it out")


def _of_devices(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    if run.on_cpu and run.split:
        reason = "all workers compute on CPUs, which swap where a GPU runs out of memory"
        yield NoEffect(given(config, ["probe_memory"]), reason, "Give max_local_batch_sizes")
    if run.scaled:
        reason = "the loss scaler leaves out steps that are not finite"
        yield NoEffect(given(config, ["on_nonfinite"]), reason, "Leave it out, or train without a scaler, in bf16")


def _of_staleness(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    if run.world_size == 1:
        return
    priority = given(config, ["transfer_priority"])
    if config.staleness == 0:
        yield NoEffect(priority, "no gradient is stale", "Set staleness=1, or leave it out")
    elif config.compression is not None:
        yield NoEffect(priority, "a compressed gradient travels in one message", "Leave it out")


def _of_hierarchy(config: HeteroConfig, run: Run) -> Iterator[NoEffect]:
    if run.world_size == 1 or not run.flat:
        return
    reason = "all workers are one cluster" if len(run.clusters) == 1 else "each worker is a cluster of its own"
    cure = "Name several clusters, one of them with several ranks, or leave it out"
    yield NoEffect(given(config, ["hierarchy"]), reason, cure)


def tell(engine: HeteroEngine, planner: Planner | None, others: Iterable[NoEffect] = (), *, split: bool = True) -> None:
    """Log on rank 0 which settings of a run do nothing, each only once.

    Args:
        engine: engine of the run.
        planner: decides on the split; ``None`` if it is fixed.
        others: settings of callbacks that do nothing.
        split: whether the training loader is split, as far as is known.
    """
    topology, names = engine.hook_state.topology, [] if engine.workers is None else engine.workers.identities
    sampler = engine.sampler
    units = sampler.stream if isinstance(sampler, UnitSampler) else None
    run = Run(
        engine.world_size,
        planner,
        clusters=() if topology is None else topology.given,
        flat=topology is None or topology.flat,
        on_cpu=bool(names) and all("/cpu:" in name for name in names),
        scaled=engine.health.scaled,
        batch_size=None if units is not None else engine.data.batch_size or None,
        split=split,
        own_batches=None if sampler is None else units is not None and units.own_batches,
        whole_batches=None if sampler is None else _yields_batches(sampler, units),
    )
    engine.notices.tell([*without_effect(engine.config, run), *others])


def _yields_batches(sampler: Any, units: LoaderSet | None) -> bool:
    """Return whether a loader's batches are cut along their rows."""
    stream = getattr(sampler, "stream", None)
    return units.counted if units is not None else isinstance(stream, SampleStream) and not stream.single


def tell_left(engine: HeteroEngine, planner: Planner | None, text: str) -> None:
    """Warn on rank 0 that the training loader is left as it is, and of the settings that do nothing for that reason.

    Args:
        engine: engine of the run.
        planner: planner that would decide on the split.
        text: the reason, and what happens to the loader.
    """
    engine.notices.say(text, loses=True)
    tell(engine, planner, split=False)
