"""Settings of heterogeneous data parallelism, checked in one place at construction."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any

from lightning_hetero.core.batching.integer_split import whole_multiple
from lightning_hetero.core.batching.lr_scaling import check_lr_scaling
from lightning_hetero.core.compression.settings import Compressor, Feature, parse_compression
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.clusters import check_clusters, check_hierarchy
from lightning_hetero.core.policies import DEFAULT, NAMED
from lightning_hetero.core.validation import check_choice, check_int, check_number, check_sizes, check_totals

__all__ = ["FOR_OWN_LOOPS", "HeteroConfig"]

FOR_OWN_LOOPS = {
    "max_total_batch_size": "AdaptiveBatchCallback(max_total_batch_size=...)",
    "min_total_batch_size": "AdaptiveBatchCallback(max_total_batch_size=..., min_total_batch_size=...)",
    "lr_scaling": "AdaptiveBatchCallback(max_total_batch_size=..., lr_scaling=...)",
    "noise_scale": "GNSCallback()",
}
"""Settings for custom training loops, each with the callback that does the same under Lightning's Trainer."""


@checked_keywords
@dataclass(frozen=True)
class HeteroConfig:
    """Settings of :class:`~lightning_hetero.engine.HeteroEngine`, shared by all front ends.

    Args:
        policy: policy that splits the batch: ``"perf_model"`` (default: learned time model, exact optimum), ``"pid"``
            (proportional control), ``"static"`` (by cores or peak FLOPs, once), ``"even"`` (equal sizes, as DDP).
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of the batch, ``"sum"`` if it is their sum.
        local_batch_sizes: fixed split, one size per rank; the sum is the total batch size. With ``policy="pid"``, the
            split to start with.
        min_local_batch_size: fewest samples of a rank; default 1, or 2 if the model has batch normalization.
        max_local_batch_sizes: most samples of a rank (memory), one number or one per rank.
        local_batch_multiple: number, ``>= 1``, of which each rank's samples of a step are a multiple, by default 1; in
            the ragged last batch of an epoch, one rank takes the remainder.
        weight_fn: returns the number of items (tokens, pixels) that the mean loss of a batch averages over:
            ``weight_fn(batch) -> number``.
        replan: interval of sync rounds, in which ranks reconsider the plan: ``"auto"`` (at each epoch, and within it as
            often as costs at most 0.5 % of the training time), ``"epoch"``, or a number of optimizer steps.
        hysteresis: least predicted gain, as a share of the step time, for which the plan changes, 0 to 1. By default
            the split changes for any significant gain above the cost of the change, and the choice of stale gradients
            for 3 %.
        change_cost: seconds that a change of the split costs (recompiling, autotuning), 0 or more; measured by default.
        balance_evaluation: split validation, test and predict data by speed, without repeating samples.
        probe_memory: find each rank's largest batch by trial before training (CUDA).
        compression: compression of gradients: ``None`` (off), settings such as ``BlockTopK(density=0.01)``, or a name
            of :data:`~lightning_hetero.core.compression.settings.COMPRESSORS`.
        hierarchy: clusters of ranks with fast links inside and a low-bandwidth link between them: lists such as
            ``[[0, 1, 2], [3]]``, ``"nodes"`` (by host), ``"env"`` (by ``LIGHTNING_HETERO_CLUSTER`` of each process) or
            ``"auto"`` (by timing links). Gradients are summed inside each cluster; the leaders exchange the sums.
        sparse_optimizer: let the optimizer, ``torch.optim.SGD`` or ``AdamW``, update only the blocks that block top-k
            sends. ``True`` is ``"ahead"``: a block at once makes all moves that momentum would make until its next
            update. With ``"later"`` these moves are deferred to that update. ``False`` updates all elements.
        staleness: 0, or 1 to apply one step late those gradients that would make every step wait for the link.
        on_nonfinite: action on a gradient that is not finite: ``"ignore"`` (train on as DDP does, and log it once),
            ``"skip"`` (skip the step on all ranks) or ``"raise"`` (raise on all ranks before the optimizer takes it).
        max_total_batch_size: largest total batch, ``>= 1``, all micro-batches of an optimizer step together. If given,
            the total moves to where goodput is highest; ``None`` keeps it fixed. This setting and the next three are
            for custom training loops; Lightning's Trainer has callbacks for them.
        min_total_batch_size: smallest total batch, ``>= 1``; ``None`` for what the bounds of the ranks allow.
        lr_scaling: rule by which the learning rate follows the total: ``"auto"`` (AdaScale for SGD, else the square
            root), one of :data:`~lightning_hetero.core.batching.lr_scaling.LR_RULES`, or a function
            ``(total, initial, trace, grad_sq_norm) -> factor``.
        noise_scale: measure the gradient noise scale; ``max_total_batch_size`` needs it and turns it on by itself.
        shard: who has which training samples: ``"mine"`` if each rank's loader has data of its own, ``"whole"`` if all
            ranks' loaders have the same, or ``"claim"`` to let ranks claim the shards of a dataset one after another.
            ``None`` is what the front end does without us: under Accelerate ``"whole"``; under Lightning and Fabric
            ``"mine"`` for an ``IterableDataset``; other data that Lightning does not distribute is refused. A map-style
            loader with ``"mine"`` is left as it is: losses are weighted, and no sample moves.
        transfer_priority: send all-reduces that a step waits for before stale ones; it takes effect where dense
            gradients on CPUs are stale. Off by default, because it has not shortened steps in our benchmarks.
        batch_sampler: what a batch of your own batch sampler is: ``"per_rank"``, as under DDP, so that a step takes one
            for each rank and splits their union, or ``"global"``, so that a step takes one and splits it.
        slice_fn: returns rows of a batch, ``slice_fn(batch, start, stop)``, where the dataset yields whole batches
            (``batch_size=None``); by default along the first dimension of all tensors.
        concat_fn: puts parts of such batches together, ``concat_fn(parts)``; by default along the first dimension.
        cost_fn: divides each global batch by the cost of its samples (tokens) in place of their number:
            ``cost_fn(sample) -> float`` above 0, called once for each sample of the dataset, or ``cost_fn(index)`` if
            its first argument is named ``index``. ``"tokens"`` takes the lengths of token lists where they can be read
            without loading samples, and ``"auto"`` the same if ``weight_fn`` counts what the loss is a mean of and no
            other setting needs numbers of samples; ``None`` divides by number.
        report: record the run at its sync rounds in ``hetero_run.jsonl`` of the logger's directory, or of a folder
            that is given by its name or path, and log a summary when training ends; ``False`` for neither.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range, or two settings contradict each other.

    Example:
        >>> HeteroConfig(local_batch_sizes=[24, 12, 16]).local_batch_sizes
        (24, 12, 16)
    """

    policy: str | None = None
    loss_reduction: str = "mean"
    local_batch_sizes: Sequence[int] | None = None
    min_local_batch_size: int | None = None
    max_local_batch_sizes: int | Sequence[int] | None = None
    local_batch_multiple: int = 1
    weight_fn: Callable[[Any], Any] | None = None
    replan: str | int = "auto"
    hysteresis: float | None = None
    change_cost: float | None = None
    balance_evaluation: bool = False
    probe_memory: bool = False
    compression: Compressor | str | None = None
    hierarchy: str | Sequence[Sequence[int]] | None = None
    sparse_optimizer: bool | str = False
    staleness: int = 0
    on_nonfinite: str = "ignore"
    max_total_batch_size: int | None = None
    min_total_batch_size: int | None = None
    lr_scaling: str | Callable[[float, float, float, float], float] = "auto"
    noise_scale: bool = False
    transfer_priority: bool = False
    shard: str | None = None
    batch_sampler: str = "per_rank"
    slice_fn: Callable[[Any, int, int], Any] | None = None
    concat_fn: Callable[[list[Any]], Any] | None = None
    cost_fn: Callable[..., Any] | str | None = "auto"
    report: bool | str | PathLike[str] = True

    def __post_init__(self) -> None:
        if self.policy is not None:
            check_choice("policy", self.policy, NAMED)
        object.__setattr__(self, "compression", parse_compression(self.compression))
        self._check_sparse_optimizer()
        check_choice("on_nonfinite", self.on_nonfinite, ("ignore", "skip", "raise"))
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        self._check_sizes()
        for name in ("weight_fn", "slice_fn", "concat_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TypeError(f"{name}={given!r} is not callable; give a function of the batch, or None.")
        self._check_data_and_report()
        if self.weight_fn is not None and self.loss_reduction == "sum":
            raise ValueError(
                "weight_fn says what a mean loss is a mean of; with loss_reduction='sum' it has no meaning. Give one."
            )
        self._check_cost()
        if isinstance(self.replan, str):
            check_choice("replan", self.replan, ("auto", "epoch"), "or a number of steps")
        else:
            check_int("replan", self.replan, minimum=1)
        self._check_numbers()
        object.__setattr__(self, "hierarchy", check_hierarchy(self.hierarchy))
        if self.hierarchy is not None and not self._supports("hierarchy"):
            raise ValueError(
                f"hierarchy={self.hierarchy!r} and compression={self.compression!r}: such gradients, like those of "
                "torch's own hooks, are summed over all ranks. Use block_topk or no compression, or leave the "
                "hierarchy out."
            )
        check_choice("staleness", check_int("staleness", self.staleness, minimum=0), (0, 1))
        if self.staleness and not self._supports("stale"):
            raise ValueError(
                f"staleness=1 and compression={self.compression!r}: of compressed gradients, only those of block_topk "
                "can be stale. Use block_topk or no compression, or set staleness=0."
            )
        self._check_totals()
        for name in ("balance_evaluation", "probe_memory", "transfer_priority", "noise_scale"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False.")

    def _check_data_and_report(self) -> None:
        report = fspath(self.report) if isinstance(self.report, PathLike) else self.report
        if not isinstance(report, bool | str) or report == "":
            raise TypeError(f"report={self.report!r} must be True, False, or the name or path of a folder.")
        object.__setattr__(self, "report", report)
        check_choice("shard", self.shard, (None, "mine", "whole", "claim"))
        check_choice("batch_sampler", self.batch_sampler, ("per_rank", "global"))

    def _check_cost(self) -> None:
        if self.cost_fn in (None, "auto"):
            return
        if self.cost_fn != "tokens" and not callable(self.cost_fn):
            raise TypeError(
                f"cost_fn={self.cost_fn!r} must be a function of the sample (or of its index), 'tokens', 'auto', or "
                "None."
            )
        if self.local_batch_multiple > 1:
            raise ValueError(
                f"local_batch_multiple={self.local_batch_multiple} is of numbers of samples, and cost_fn divides "
                "batches by cost. Leave one of them out."
            )
        for name in ("max_total_batch_size", "noise_scale"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs the gradient noise scale, which compares shares drawn at "
                    "random; cost_fn gives workers samples by their cost. Leave one of them out."
                )

    def _supports(self, feature: Feature) -> bool:
        """Return whether a feature goes with the compressor, if there is one."""
        return not isinstance(self.compression, Compressor) or feature in self.compression.supports

    def _check_numbers(self) -> None:
        for name, high in (("hysteresis", 1.0), ("change_cost", math.inf)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), low=0.0, high=high)

    def _check_sparse_optimizer(self) -> None:
        check_choice("sparse_optimizer", self.sparse_optimizer, (False, True, "ahead", "later"))
        if self.sparse_optimizer and (self.compression is None or not self._supports("sparse_optimizer")):
            raise ValueError(
                f"sparse_optimizer={self.sparse_optimizer!r} updates the blocks that block top-k sends, and "
                f"compression={self.compression} sends none. Set compression='block_topk' or 'auto', or leave it out."
            )

    def _check_totals(self) -> None:
        check_lr_scaling(self.lr_scaling)
        if self.max_total_batch_size is not None:
            check_totals(self.max_total_batch_size, self.min_total_batch_size)
            fixed = self.local_batch_sizes is not None
            if fixed or self.policy not in (None, DEFAULT):
                other = f"local_batch_sizes={self.local_batch_sizes}" if fixed else f"policy={self.policy!r}"
                raise ValueError(
                    f"max_total_batch_size={self.max_total_batch_size} moves the total batch together with the split, "
                    f"by the time model, and {other} says otherwise. Give one of them."
                )
            return
        for name, least in (("min_total_batch_size", None), ("lr_scaling", "auto")):
            if getattr(self, name) != least:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no meaning where the total stays as it is. Give "
                    "max_total_batch_size as well, or leave it out."
                )

    def _check_sizes(self) -> None:
        if self.local_batch_sizes is not None:
            sizes = check_sizes("local_batch_sizes", self.local_batch_sizes, minimum=0)
            if sum(sizes) == 0:
                raise ValueError(f"local_batch_sizes={list(sizes)} has no samples; one entry at least must be above 0.")
            object.__setattr__(self, "local_batch_sizes", sizes)
            if self.policy not in (None, "pid"):
                raise ValueError(
                    f"local_batch_sizes={list(sizes)} fixes the split and policy={self.policy!r} decides on it. Give "
                    'one; only policy="pid" starts with a given split.'
                )
        if self.min_local_batch_size is not None:
            check_int("min_local_batch_size", self.min_local_batch_size, minimum=1)
        unit = check_int("local_batch_multiple", self.local_batch_multiple, minimum=1)
        if any(size % unit for size in self.local_batch_sizes or ()):
            raise ValueError(
                f"local_batch_sizes={list(self.local_batch_sizes or ())} has a size that is no multiple of "
                f"local_batch_multiple={unit}. Change the sizes, or the multiple."
            )
        if self.max_local_batch_sizes is not None:
            self._check_upper_bounds(unit)

    def _check_upper_bounds(self, unit: int) -> None:
        if isinstance(self.max_local_batch_sizes, Sequence):
            most = check_sizes("max_local_batch_sizes", self.max_local_batch_sizes, minimum=1)
            object.__setattr__(self, "max_local_batch_sizes", most)
        else:
            most = (check_int("max_local_batch_sizes", self.max_local_batch_sizes, minimum=1),)
        if min(most) < (self.min_local_batch_size or 1):
            raise ValueError(
                f"max_local_batch_sizes={list(most)} is below min_local_batch_size={self.min_local_batch_size}. "
                "Raise the one or lower the other."
            )
        if min(most) < (least := whole_multiple(self.min_local_batch_size or 1, unit)):
            raise ValueError(
                f"max_local_batch_sizes={list(most)} is below {least}, the fewest samples of a rank in multiples of "
                f"local_batch_multiple={unit}. Raise the one or lower the other."
            )
        given = self.local_batch_sizes or ()
        bounds = most if isinstance(self.max_local_batch_sizes, tuple) else most * len(given)
        if any(size > bound for size, bound in zip(given, bounds, strict=False)):
            raise ValueError(
                f"local_batch_sizes={list(given)} has a size above max_local_batch_sizes={list(most)}. Lower the size "
                "or raise the bound."
            )

    @property
    def fixes_split(self) -> bool:
        """``True`` if ``local_batch_sizes`` is the split of the whole run, not the start of a policy."""
        return self.local_batch_sizes is not None and self.policy is None

    def check_world_size(self, world_size: int) -> None:
        """Check what depends on the number of ranks.

        Raises:
            ValueError: if a list does not have one entry per rank.
        """
        for name in ("local_batch_sizes", "max_local_batch_sizes"):
            if isinstance(getattr(self, name), tuple):
                check_sizes(name, getattr(self, name), minimum=0, length=world_size)
        if isinstance(self.hierarchy, tuple):
            check_clusters(self.hierarchy, world_size)

    def fingerprint(self) -> str:
        """Return the text of all settings that must be equal on all ranks."""
        own = ("probe_memory", "report")  # each rank may have its own
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
        return ", ".join(f"{name}={'a function' if callable(given) else given}" for name, given in values.items())
