"""A training loop that belongs to the user, run under the engine: Accelerate, Fabric, plain torch.

Lightning tells its strategy when a step begins and ends. A loop of the user's own only asks for batches, and that is
enough: a step begins when its batch is handed out and ends when the next one is asked for.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_hetero.comm.control import let_threads_go
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.plan import BatchPlan, PlanEntry
from lightning_hetero.core.planner import PLANNERS, Planner
from lightning_hetero.core.proposal import check_planner
from lightning_hetero.data.live import LiveStream
from lightning_hetero.data.stream import IndexStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.without_effect import tell

__all__ = ["CopiedSession", "HeteroSession", "PlanAccess", "SessionBatches", "log", "planner_of", "show_log"]

log = logging.getLogger("lightning_hetero")


def show_log() -> None:
    """Show our lines at level INFO unless logging is set up already, as Lightning does: nothing changes silently."""
    if not logging.getLogger().hasHandlers() and not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


show_log()


def planner_of(config: HeteroConfig) -> Planner | None:
    """The planner that the settings name; ``None`` for a split that never changes.

    Example:
        >>> type(planner_of(HeteroConfig())).__name__, planner_of(HeteroConfig(policy="even"))
        ('PerfModelPlanner', None)
    """
    if config.fixes_split or config.policy == "even":
        return None
    return PLANNERS[config.policy or "perf_model"]()


class PlanAccess:
    """What users read and change of a run's plans, the same through every front end.

    A front end has an ``engine`` once its processes have met; ``_no_engine`` is its error until then.
    """

    engine: HeteroEngine | None
    _no_engine = "there are no plans and observations yet: they come when training begins."

    @property
    def plan(self) -> BatchPlan | None:
        """The split of the running step."""
        return None if self.engine is None else self.engine.plan

    @property
    def plan_history(self) -> tuple[PlanEntry, ...]:
        """All plans of this run, with the step from which each held and the reason."""
        return () if self.engine is None else self.engine.plan_history

    def observations(self) -> StepObservations:
        """What all ranks measured up to the last exchange."""
        return self._known_engine().observations()

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        return self._known_engine().adopt(plan, reason, not_before=self._reached)

    @property
    def _reached(self) -> tuple[int, int]:
        """Earliest epoch and step at which a new plan may hold."""
        return (0, 0)

    def _known_engine(self) -> HeteroEngine:
        if self.engine is None:
            raise RuntimeError(self._no_engine)
        return self.engine


class HeteroSession:
    """Passes over the training data, one after another, each a sequence of steps under the engine's plan.

    Args:
        engine: the mechanism.
        planner: decides on plans; that of the engine's settings by default.
        on_metrics: called on every rank with the metrics of each comparison of the ranks.

    Example:
        >>> import torch
        >>> from lightning_hetero.data import PermutationStream
        >>> engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
        >>> session = HeteroSession(engine)
        >>> batches = session.shard(PermutationStream(5, shuffle=False, seed=0), batch_size=2)
        >>> [batch for batch in session.steps(lambda: iter(batches))]
        [[0, 1], [2, 3], [4]]
        >>> session.position
        (1, 0)
    """

    def __init__(
        self,
        engine: HeteroEngine,
        planner: Planner | None = None,
        on_metrics: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self.engine = engine
        engine.weighting.trace.several = True  # the loop is the user's: it may fetch several batches before a backward
        self.planner = planner_of(engine.config) if planner is None else check_planner(planner)
        self.on_metrics = on_metrics
        self._data: tuple[IndexStream, int, bool] | None = None
        self._epoch, self._step, self._micro, self._synced = 0, 0, 0, 0
        self._pass: object | None = None
        self._skip: int | None = None
        self._restored: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave the run to the original: a copy or a pickle has no process group."""
        return CopiedSession, ()

    @property
    def running(self) -> bool:
        """Whether a pass over the data is under way."""
        return self._pass is not None

    @property
    def position(self) -> tuple[int, int]:
        """Pass over the data, and the steps of it whose batches were handed out."""
        return self._epoch, self._step

    # data

    @property
    def stream(self) -> IndexStream | None:
        """Order of the samples, ``None`` before :meth:`shard`."""
        return None if self._data is None else self._data[0]

    def shard(self, stream: IndexStream, batch_size: int, *, drop_last: bool = False) -> "SessionBatches":
        """Split the training data by the engine's plan; a collective call, see :meth:`HeteroEngine.shard`.

        Data that no pass has begun with is forgotten, with its plan.
        """
        if self._data is not None and self.position == (0, 0) and self._restored is None:
            self.engine.history = None
            self.engine.log.clear()
        self._data = (stream, batch_size, drop_last)
        self._restore_order()
        self._shard_at(self._epoch, 0)
        return SessionBatches(self)

    def reshard(self) -> None:
        """Split anew, because a bound became known after the data was; a collective call."""
        if self._data is not None and self._pass is None:
            self._shard_at(self._epoch, 0)

    def _shard_at(self, epoch: int, step: int) -> None:
        if self._data is None:
            return
        (stream, batch_size, drop_last), engine = self._data, self.engine
        if self._restored is not None:
            engine.history = None
            engine.load_state_dict(self._restored["engine"])
        engine.resume_at(epoch, step)
        engine.shard(stream, batch_size, drop_last=drop_last, planner=self.planner, epoch=epoch)

    # one pass

    def skip(self, steps: int | None = None) -> None:
        """Let the next pass begin behind its first steps; by default behind those of the state that was loaded."""
        self._skip = self.restored_step if steps is None else steps

    @property
    def restored_step(self) -> int:
        """Steps of its pass that the loaded state had behind it; 0 once a pass has begun."""
        return 0 if self._restored is None else int(self._restored["step"])

    def steps(self, open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of one pass; what happens between two of them is a step.

        A loop that is left early ends its pass: the next one begins anew, with a new order of the samples.

        Args:
            open_loader: starts the loader whose batch sampler is that of :meth:`shard`.
        """
        self._begin_pass()
        self.engine.weighting.trace.forget()
        mine = self._pass = object()
        self._micro = -1  # the first call of _end_step ends no step
        iterator = open_loader()
        try:
            while self._pass is mine:
                self._end_step()
                try:
                    batch = self.engine.fetch(iterator)
                except StopIteration:
                    self._epoch, self._step = self._epoch + 1, 0
                    break
                self.engine.begin_step(self._epoch, self._step, batch)
                self._step += 1
                yield batch
        finally:
            if self._pass is mine:
                self._leave()

    def _begin_pass(self) -> None:
        if self._pass is not None:
            self._leave()
        if self._step > 0:  # the last pass was left early
            self._epoch, self._step = self._epoch + 1, 0
        tell(self.engine, self.planner)
        skip, self._skip = self._skip or 0, None
        if skip:
            self._shard_at(self._epoch, skip)
        self._step, self._restored = skip, None
        self.engine.observer.interrupt()
        if self._synced > 0 and self.engine.due_at_epoch:
            self._exchange()
        assert self.engine.sampler is not None
        self.engine.sampler.set_epoch(self._epoch)

    def _leave(self) -> None:
        """The pass is over; the weight of its last batch holds on, for ``next(iter(loader))``."""
        self._pass = None
        self.engine.end_step()
        self._synced = self.engine.observer.synced_steps
        if self.engine.sampler is not None:
            self.engine.sampler.set_epoch(self._epoch)

    def another_loader(self) -> None:
        """A loader that is not split begins: the running step is not measured, and outside a pass losses have weight 1.

        Inside a pass, as in an evaluation every so many steps, losses of the pass's batches keep their weights.
        """
        self.engine.observer.discard()
        if self._pass is None:
            self.engine.hook_state.weighted = False
            self.engine.weighting.reset()

    def beside(self, batches: Iterator[Any], evaluates: Callable[[], bool]) -> Iterator[Any]:
        """The batches of a loader that is not split, see :meth:`LossWeighting.beside`."""
        self.another_loader()
        return self.engine.weighting.beside(batches, evaluates)

    # which batch a loss belongs to

    def watch(self, model: torch.nn.Module) -> Any:
        """Let the forward passes of a model tell which batch they ran; gives the handle of its hook.

        For a loop without a trainer that fetches several batches before their backward passes: each loss then has the
        weight of its own batch. Give the model that is called, the wrapped one; Fabric and Accelerate do it for you.
        """
        return self.engine.weighting.trace.watch(model)

    def select(self, batch: Any) -> None:
        """Let the losses up to the next batch belong to this one, where the model's inputs do not tell."""
        self.engine.weighting.trace.select(batch)

    def _end_step(self) -> None:
        engine = self.engine
        self._micro += 1
        engine.end_step()
        if engine.observer.synced_steps > self._synced:
            self._synced = engine.observer.synced_steps
            engine.accumulation, self._micro = max(self._micro, 1), 0
        if engine.due:
            self._exchange()

    def _exchange(self) -> None:
        plan = self.engine.plan
        done = self.engine.exchange(self.planner, not_before=self.position)
        self.planner = done.planner if done.planner is not None else self.planner
        if self.on_metrics is not None and plan is not None:
            self.on_metrics(self.engine.metrics(done, plan))

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        return self.engine.adopt(plan, reason, not_before=self.position)

    def close(self) -> None:
        """Before the process group is destroyed: let its threads go, which a destructor would wait for in vain."""
        self.engine.close()
        if self.engine.world_size > 1:
            let_threads_go()

    # state

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, its plans and what rank 0 has learned: plain Python values and tensors."""
        if self._data is None or self._restored is not None:
            return {} if self._restored is None else self._restored
        stream: Any = self._data[0]
        return {
            "epoch": self._epoch,
            "step": self._step,
            "engine": self.engine.state_dict(),
            "policy": self._policy,
            "planner": None if self.planner is None else self.planner.state_dict(),
            "stream": stream.state_dict(self._epoch) if hasattr(stream, "state_dict") else None,
        }

    @property
    def _policy(self) -> str:
        return "fixed" if self.planner is None else type(self.planner).__name__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the pass of the state: at its first step, or where :meth:`skip` says; a collective call.

        The samples come in the order that they had, also with another number of ranks.
        """
        if not state:
            return
        if self._pass is not None:
            self._leave()
        if self.planner is not None and state["policy"] == self._policy:
            self.planner = self.planner.loaded(state["planner"])
        self._epoch, self._step, self._restored = int(state["epoch"]), 0, state
        self._restore_order()
        self._shard_at(self._epoch, 0)

    def _restore_order(self) -> None:
        stream: Any = None if self._data is None else self._data[0]
        if self._restored is not None and self._restored["stream"] is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(self._restored["stream"], self._epoch)


class CopiedSession:
    """What the copy or the unpickled form of a front end has in place of its session; all that it does is to refuse."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this is a copy of an accelerator, a strategy or a training loader, or was unpickled: it has settings, but "
            "no process group and no plans. Use the original in its process, or make and prepare a new one."
        )

    def close(self) -> None:
        """Leave the run to the original."""


class SessionBatches:
    """The session's batches of this rank, in the shape of a batch sampler; it stays when plans and positions change.

    Args:
        session: whose batches these are.
    """

    split_batches = True  # the batch size is the total, for Accelerate
    even_batches = False

    def __init__(self, session: HeteroSession) -> None:
        self.session = session

    @property
    def sampler(self) -> Any:
        """The sampler that the session draws from when a pass begins; frameworks put another in its place."""
        stream = self.session.stream
        return stream.sampler if isinstance(stream, LiveStream) else None

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        stream = self.session.stream
        if isinstance(stream, LiveStream):
            stream.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        assert self.session.engine.sampler is not None
        if self.session.engine.world_size > 1 and not self.session.running:
            raise RuntimeError(
                "the training data is split unevenly and was iterated by a loader that does not weight its batches, "
                "such as one of accelerate.skip_first_batches(). Iterate the prepared loader, or use the accelerator's "
                "own skip_first_batches()."
            )
        return iter(self.session.engine.sampler)

    def __len__(self) -> int:
        assert self.session.engine.sampler is not None
        return len(self.session.engine.sampler)

    @property
    def batch_size(self) -> int:
        """Total batch size of the running plan."""
        plan = self.session.engine.plan
        return 0 if plan is None else plan.total_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the ragged last batch is dropped."""
        return bool(self.session.engine.sampler is not None and self.session.engine.sampler.drop_last)
