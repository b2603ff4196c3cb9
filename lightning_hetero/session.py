"""Custom training loops under the engine: Accelerate, Fabric, plain torch.

A custom loop need not say when a step begins and ends: it does when the loop asks for the next batch.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lightning_hetero.comm.agreement.control_plane import let_threads_go
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.checkpoint_state import reading_state, with_checksums
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies import DEFAULT, POLICIES
from lightning_hetero.core.policies.base import Planner, check_planner, load_planner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.adaptation import Adaptation
from lightning_hetero.frontend.log import show_log
from lightning_hetero.frontend.report.session_report import SessionReport
from lightning_hetero.frontend.session.batches import CopiedSession, SessionBatches
from lightning_hetero.frontend.session.data import INTERVAL_CHECKSUMS, SessionData, Stream
from lightning_hetero.frontend.session.steps import SessionSteps
from lightning_hetero.frontend.total_access import TotalAccess
from lightning_hetero.frontend.without_effect import tell

__all__ = ["CopiedSession", "HeteroSession", "SessionBatches", "planner_of"]

show_log()


def planner_of(config: HeteroConfig) -> Planner | None:
    """Make the planner that the settings name; ``None`` for a split that never changes.

    Example:
        >>> type(planner_of(HeteroConfig())).__name__, planner_of(HeteroConfig(policy="even"))
        ('PerfModelPlanner', None)
    """
    if config.max_total_batch_size is not None:
        return POLICIES["goodput"].factory(config.max_total_batch_size, config.min_total_batch_size)
    return None if config.fixes_split else POLICIES[config.policy or DEFAULT].factory()


@checked_keywords
class HeteroSession(TotalAccess):
    """Passes over the training data, one after another, each a sequence of steps under the engine's plan.

    Args:
        engine: engine that runs the steps.
        planner: decides on plans; by default the one that the engine's settings name.
        on_metrics: called on every rank with the metrics of each sync round.
        directory: folder for the record of the run and the table of candidates for the total batch, if any.
        front_end: what runs the loop, for the record.

    Raises:
        ValueError: if a planner is given beside the setting ``max_total_batch_size``, which has its own.

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
        directory: Path | None = None,
        front_end: str = "own loop",
    ) -> None:
        self.engine, self.directory, self.report = engine, directory, SessionReport(engine, front_end, directory, self)
        # a custom loop may fetch several batches before a backward pass, and accumulates as it likes
        engine.weighting.hold_several()
        engine.rounds.keep_window()
        deciders = ("max_total_batch_size", "policy", "local_batch_sizes")
        given = {name: getattr(engine.config, name) for name in deciders} if planner is not None else {}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"planner={type(planner).__name__} and {name}={value!r} both say who decides. Give one of them."
                )
        self.planner = planner_of(engine.config) if planner is None else check_planner(planner)
        self.on_metrics = on_metrics
        self._adaptation = Adaptation(engine)
        self._data, self._steps = SessionData(engine), SessionSteps(engine)
        self._epoch, self._step = 0, 0
        self._pass: object | None = None
        self._skip: int | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Give a copy or a pickle no part in the run: it has no process group."""
        return CopiedSession, ()

    @property
    def running(self) -> bool:
        """``True`` while a pass over the data runs."""
        return self._pass is not None

    @property
    def position(self) -> tuple[int, int]:
        """Current pass over the data, and the number of its batches handed out so far."""
        return self._epoch, self._step

    @property
    def stream(self) -> Stream | None:
        """Order of the samples, ``None`` before :meth:`shard`."""
        return self._data.stream

    def shard(
        self, stream: Stream, batch_size: int = 0, *, drop_last: bool = False, dataset: Any = None
    ) -> SessionBatches:
        """Split the training data by the engine's plan; a collective call, see :meth:`HeteroEngine.shard`.

        Earlier data is dropped with its plan if no pass over it has begun. A :class:`SampleStream` has a batch size of
        its own, and what is returned then yields batches in place of indices.
        """
        if self._data.stream is not None and self.position == (0, 0) and self._data.restored is None:
            self.engine.data.plans.forget()
        self._data.give(stream, batch_size, drop_last=drop_last, dataset=dataset)
        self._data.shard(self.planner, self._epoch, 0)
        return SessionBatches(self)

    def reshard(self) -> None:
        """Split the data again after a new bound became known; a collective call."""
        if self._pass is None:
            self._data.shard(self.planner, self._epoch, 0)

    # one pass

    def skip(self, steps: int | None = None) -> None:
        """Skip the first steps of the next pass; by default those that the loaded state has done."""
        self._skip = self.restored_step if steps is None else steps

    @property
    def restored_step(self) -> int:
        """Steps of its pass that the loaded state has done; 0 once a pass has begun."""
        return self._data.restored_step

    def steps(self, open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one pass; what happens between two of them is a step.

        Leaving the loop early ends the pass; the next one begins with a new order of the samples.

        Args:
            open_loader: starts the loader whose batch sampler is that of :meth:`shard`.
        """
        self._begin_pass()
        self.engine.weighting.trace.forget()
        mine = self._pass = object()
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
                self._steps.begin()
                yield batch
        finally:
            if self._pass is mine:
                self._end_pass()

    def _begin_pass(self) -> None:
        if self._pass is not None:
            self._end_pass()
        if self._step > 0:  # the last pass was left early
            self._epoch, self._step = self._epoch + 1, 0
        tell(self.engine, self.planner)
        skip, self._skip = self._skip or 0, None
        if skip:
            self._data.shard(self.planner, self._epoch, skip)
        self._step, interval = skip, self._data.begin_pass(skip)
        self.planner = self._adaptation.starts(self.planner)
        self._adaptation.resume(interval)
        self.engine.observer.interrupt()
        if self._steps.synced > 0 and self.engine.sync_due_at_epoch(self.planner):
            self._exchange()
        assert self.engine.sampler is not None
        self.engine.sampler.set_epoch(self._epoch)

    def _end_pass(self) -> None:
        """End the pass; its last batch keeps its weight, for ``next(iter(loader))``."""
        self._pass = None
        self._steps.close(*self.position)
        if self.engine.sampler is not None:
            self.engine.sampler.set_epoch(self._epoch)

    def on_other_loader(self) -> None:
        """Begin a loader that is not split: the step is not measured, and outside a pass losses have weight 1."""
        self.engine.observer.discard()
        if self._pass is None:
            self.engine.hook_state.require_weighting(False)
            self.engine.weighting.reset()

    def beside(self, batches: Iterator[Any], evaluates: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches of a loader that is not split, see :meth:`LossWeighting.beside`."""
        self.on_other_loader()
        return self.engine.weighting.beside(batches, evaluates)

    # which batch a loss belongs to

    def watch(self, model: torch.nn.Module) -> RemovableHandle:
        """Record which batch each forward pass of a model runs; return the handle of the hook.

        A loop that fetches several batches before their backward passes needs it to weight each loss by its own batch.
        Give the model that the loop calls, i.e. the wrapped one. Fabric and Accelerate do this for you. Known losses
        over the worker's own batch are named.
        """
        self.engine.weighting.see_model(model)
        return self.engine.weighting.trace.watch(model)

    def select(self, batch: object) -> None:
        """Assign the losses up to the next batch to this one, where the model's inputs do not show it."""
        self.engine.weighting.trace.select(batch)

    def _end_step(self) -> None:
        self._steps.close(*self.position)
        if self.engine.sync_due:
            self._exchange()

    def _exchange(self) -> None:
        plan = self.engine.plan
        self.report.begin(self.planner)
        self.planner = self._adaptation.begun(self.planner)
        done = self.engine.exchange(self.planner, not_before=self.position)
        self.planner = done.planner if done.planner is not None else self.planner
        self.planner, metrics = self._adaptation.follow(self.planner, self.directory)
        if self.on_metrics is not None and plan is not None:
            self.on_metrics({**self.engine.metrics(done, plan), **metrics})

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        return self.engine.adopt(plan, reason, not_before=self.position)

    def close(self) -> None:
        """Close the engine; let the process group's threads finish, for which its destructor would wait in vain."""
        self._adaptation.close()
        self.report.end()
        self.engine.close()
        if self.engine.world_size > 1:
            let_threads_go()

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the plans and what rank 0 has learned, as plain Python values and tensors."""
        if self._data.stream is None or self._data.restored is not None:
            return self._data.restored or {}
        planner = None if self.planner is None else self.planner.state_dict()
        learned = {"policy": self._policy, "planner": planner, **self._adaptation.state_dict()}
        return with_checksums({**self._data.state_dict(*self.position), **learned})

    def interval(self) -> dict[str, Any]:
        """Return what all ranks have to be asked for, to be added to :meth:`state_dict`; a collective call.

        It is the noise since the last sync round, and how far claimed shards were read, if there are any. Call it when
        the step whose batch was handed out last is over.
        """
        if self._data.stream is None or self._data.restored is not None:
            return {}
        self._steps.close(*self.position)
        found = {"interval": self._adaptation.interval(), "shards": self.engine.data.shards(self.engine.position)}
        return with_checksums({name: value for name, value in found.items() if value}, INTERVAL_CHECKSUMS)

    @property
    def _policy(self) -> str:
        return "fixed" if self.planner is None else type(self.planner).__name__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the pass of the state, at its first step or where :meth:`skip` says; a collective call.

        Samples keep their order, also with another number of ranks.

        Raises:
            DamagedCheckpointError: if the state has changed since it was saved.
            CheckpointStateError: if it is malformed.
        """
        if not state:
            return
        if self._pass is not None:
            self._end_pass()
        self._data.load(state)
        with reading_state("what the policy has learned"):
            if self.planner is not None and state["policy"] == self._policy:
                self.planner = load_planner(self.planner, state["planner"])
        self._adaptation.load_state_dict(state)
        self._epoch, self._step = int(state["epoch"]), 0
        self._data.shard(self.planner, self._epoch, 0)
