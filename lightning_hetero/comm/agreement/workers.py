"""Workers of a run: their hardware, capacity and batch-size limits, and the plan that the run begins with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.integer_split import proportional_sizes, whole_multiple
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.policies.base import PlanContext, Planner, Proposal, check_proposal

if TYPE_CHECKING:
    from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["Workers"]


@dataclass(frozen=True)
class Workers:
    """Hardware and limits of all ranks, the same on each of them.

    Args:
        identities: hardware identity of each rank.
        capacities: open-loop capacity of each rank (peak FLOP/s).
        min_local: smallest batch that every rank can run.
        max_local: most samples of each rank, given or probed, as a multiple; ``None`` for no limit.
        devices: name of each rank's device, for people to read.
        multiple: samples of which each rank's size is a multiple in every plan.

    Raises:
        ValueError: if a rank cannot hold one multiple.
    """

    identities: tuple[str, ...]
    capacities: tuple[float, ...]
    min_local: int = 1
    max_local: tuple[int, ...] | None = None
    devices: tuple[str, ...] = ()
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.max_local is None or self.multiple == 1:
            return
        if min(self.max_local) < self.least:
            raise ValueError(
                f"local_batch_multiple={self.multiple} gives each rank at least {self.least} samples, and the ranks "
                f"hold at most {list(self.max_local)}. Lower it, or raise max_local_batch_sizes."
            )
        object.__setattr__(self, "max_local", tuple(most // self.multiple * self.multiple for most in self.max_local))

    @property
    def least(self) -> int:
        """Fewest samples of a rank in a plan: ``min_local`` as a multiple."""
        return whole_multiple(self.min_local, self.multiple)

    @classmethod
    def gather(
        cls,
        control: "ControlPlane",
        name: str,
        capacity: float,
        *,
        min_local: int,
        bounds: Sequence[int | None],
        multiple: int = 1,
        device: str = "",
    ) -> "Workers":
        """Exchange worker information between all ranks; collective. The smallest of this rank's ``bounds`` applies."""
        bound = min((b for b in bounds if b is not None), default=NO_LIMIT)
        names, capacities, minima, maxima, devices = zip(
            *control.gather_objects((name, capacity, min_local, bound, device)), strict=True
        )
        names = tuple(f"{name}#{names[:i].count(name)}" if name in names[:i] else name for i, name in enumerate(names))
        return cls(names, capacities, max(minima), None if min(maxima) == NO_LIMIT else maxima, devices, multiple)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.identities)

    def context(self, config: HeteroConfig, total: int, accumulation: int = 1, **known: Any) -> PlanContext:
        """Return the planner's context for a total batch: limits, capacities, and the further fields in ``known``."""
        if config.change_cost is not None:
            known["change_cost"] = config.change_cost
        return PlanContext(
            total,
            self.identities,
            (self.least,) * self.world_size,
            self.max_local,
            config.hysteresis or 0.0,
            accumulation,
            self.capacities,
            given=config.local_batch_sizes,  # type: ignore[arg-type]
            multiple=self.multiple,
            **known,
        )

    def bounded(self, bounds: Sequence[int]) -> "Workers":
        """Return these workers with at most ``bounds`` samples each, where that is less than before.

        Example:
            >>> Workers(("a", "b"), (1.0, 1.0), max_local=(8, 8)).bounded([6, NO_LIMIT]).max_local
            (6, 8)
        """
        held = self.max_local or (NO_LIMIT,) * self.world_size
        now = tuple(min(pair) for pair in zip(held, map(int, bounds), strict=True))
        return self if now == held else replace(self, max_local=now)

    def within_bounds(self, plan: BatchPlan) -> Proposal | None:
        """Return the plan of the same total that fits a bound which has fallen; ``None`` if the plan fits.

        Raises:
            ValueError: if the workers together cannot hold the total.

        Example:
            >>> Workers(("a", "b"), (1.0, 1.0), max_local=(8, 4)).within_bounds(BatchPlan(10, (4, 6))).plan
            BatchPlan(total_batch_size=10, local_batch_sizes=(6, 4), ...)
        """
        sizes, high = plan.local_batch_sizes, self.max_local
        if high is None or all(size <= most for size, most in zip(sizes, high, strict=True)):
            return None
        self._require_room(plan.total_batch_size)
        low = [min(self.min_local, size) for size in sizes]  # a worker that was left out stays so
        fitting = proportional_sizes(
            plan.total_batch_size, sizes, min_local=low, max_local=high, multiple=self.multiple
        )
        over = [rank for rank, size in enumerate(sizes) if size > high[rank]]
        return Proposal(
            BatchPlan(plan.total_batch_size, fitting, cost=plan.cost),
            f"rank {', '.join(map(str, over))} cannot hold more than {', '.join(str(high[rank]) for rank in over)}",
        )

    def check(self, plan: BatchPlan, min_local: int | None = None) -> None:
        """Check that a plan fits these workers.

        Raises:
            ValueError: if it has another number of workers, or a size that is outside the bounds or no multiple.
        """
        sizes = plan.local_batch_sizes
        low = self.min_local if min_local is None else min_local
        high = self.max_local or (NO_LIMIT,) * self.world_size
        if len(sizes) != self.world_size or any(not low <= b <= h for b, h in zip(sizes, high, strict=True)):
            most = "no upper bound" if self.max_local is None else f"at most {list(self.max_local)}"
            raise ValueError(
                f"local batch sizes {list(sizes)} do not fit {self.world_size} workers with at least {low} and {most} "
                "samples each. Change the sizes or the bounds."
            )
        if not self.in_multiples(plan):
            raise ValueError(
                f"local batch sizes {list(sizes)} are not multiples of local_batch_multiple={self.multiple}. Change "
                "the sizes, or the setting."
            )

    def in_multiples(self, plan: BatchPlan) -> bool:
        """Return whether every size is a multiple of the setting."""
        return all(size % self.multiple == 0 for size in plan.local_batch_sizes)

    def initial_plan(
        self,
        config: HeteroConfig,
        total: int,
        planner: Planner | None,
        running: BatchPlan | None,
        even: str = "equal sizes",
    ) -> Proposal | None:
        """Return the plan to begin or to go on with; ``None`` to keep the one that ran before.

        Args:
            config: may fix the split.
            total: total batch size.
            planner: may know these workers from an earlier run.
            running: plan that the run or its checkpoint had for the same workers.
            even: reason of the plan that gives all the same.

        Raises:
            ValueError: if the bounds cannot give the total, or the given, known or running split does not fit them.
        """
        if total % self.multiple:
            least = self.least * self.world_size
            fitting = {
                max(one, least)
                for one in (total // self.multiple * self.multiple, whole_multiple(total, self.multiple))
            }
            raise ValueError(
                f"a total batch of {total} samples cannot be shared in multiples of local_batch_multiple="
                f"{self.multiple}. Change the DataLoader's batch_size (here for {self.world_size} workers), so that "
                f"the total is {' or '.join(map(str, sorted(fitting)))}, or the multiple."
            )
        if running is not None and not self.in_multiples(running):
            running = None  # it ran before the setting was given
        if config.fixes_split:
            proposal = Proposal(BatchPlan(total, tuple(config.local_batch_sizes or ())), "given split")
            self.check_user_split(proposal.plan)
        elif running is not None and running.total_batch_size == total and planner is not None:
            self.check(running)
            return None
        else:
            known = None
            if planner is not None:
                whose, kept = f"initial() of {type(planner).__name__}", None if planner.moves_total else total
                known = check_proposal(planner.initial(self.context(config, total)), whose, kept)
            proposal = known or Proposal(self._even(total), even)
            self.check(proposal.plan)
        kept = running is not None and proposal.plan.local_batch_sizes == running.local_batch_sizes
        return None if kept else proposal

    def check_user_split(self, plan: BatchPlan) -> None:
        """Check a user's split: a size may be 0, which leaves the worker out, but not between 0 and its minimum.

        Raises:
            ValueError: if it does not fit these workers.
        """
        self.check(plan, min_local=0)
        if any(0 < size < self.min_local for size in plan.local_batch_sizes):
            raise ValueError(
                f"local_batch_sizes={list(plan.local_batch_sizes)} has a size below min_local_batch_size="
                f"{self.min_local}, which is 2 unless given if the model has batch normalisation. Raise the size, or "
                "set min_local_batch_size=1 if the model can run a single sample."
            )

    def _even(self, total: int) -> BatchPlan:
        if total < self.least * self.world_size:
            lower = "min_local_batch_size" if self.least == self.min_local else "local_batch_multiple"
            raise ValueError(
                f"a total batch of {total} samples cannot give each of {self.world_size} workers at least "
                f"{self.least}. Raise the DataLoader's batch_size or lower {lower}."
            )
        self._require_room(total)
        bounds: Any = {"min_local": self.min_local, "max_local": self.max_local, "multiple": self.multiple}
        return BatchPlan(total, proportional_sizes(total, [1.0] * self.world_size, **bounds))

    def has_room(self, total: int) -> bool:
        """Return whether the workers together can hold a total batch."""
        return self.max_local is None or sum(self.max_local) >= total

    def _require_room(self, total: int) -> None:
        if self.max_local is not None and not self.has_room(total):
            raise ValueError(
                f"a total batch of {total} samples does not fit: the workers hold at most {list(self.max_local)}, "
                f"together {sum(self.max_local)}. Let the DataLoader's batch_size, or your batch sampler, give "
                f"batches of at most {sum(self.max_local) // self.world_size}, and accumulate gradients over several."
            )
