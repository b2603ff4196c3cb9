"""A short training on one worker that times its steps at several batch sizes, by order of the environment."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.callbacks._lightning import LightningModule, Trainer
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.probe_job import DeviceReport, ProbeOrder
from lightning_hetero.strategies._lightning.probes.convergence import ConvergenceProbe, strategy_of

__all__ = ["DeviceProbe", "SizeSweep", "sizes_around"]

Row = tuple[float, float, float, float]


def sizes_around(total: int, most: int, multiple: int = 1) -> tuple[int, ...]:
    """Return sizes from a quarter to twice the script's own, up and down again, so that drift cancels.

    Args:
        total: the script's batch size.
        most: largest size that can run.
        multiple: samples of which each size is a multiple.

    Example:
        >>> sizes_around(32, 48)
        (8, 16, 32, 48, 32, 16, 8)
    """
    sizes = [min(round(total * factor), most) // multiple * multiple for factor in (0.25, 0.5, 1.0, 1.5, 2.0)]
    up = sorted({max(multiple, size) for size in sizes})
    return (*up, *up[-2::-1])


@dataclass(frozen=True)
class SizeSweep(StaticPlanner):
    """Planner that goes through batch sizes and keeps the times of each.

    Args:
        sizes: sizes in order.
        steps: steps to time at each.
        rows: size and seconds of each timed step.
        place: number of the size that runs.
    """

    moves_total: ClassVar[bool] = True

    sizes: tuple[int, ...] = ()
    steps: int = 1
    rows: tuple[Row, ...] = field(default=())
    place: int = 0

    @property
    def done(self) -> bool:
        """``True`` once all sizes have their steps."""
        return self.place >= len(self.sizes)

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose the first size."""
        return Proposal(BatchPlan(self.sizes[0], (self.sizes[0],)), "the first size to time")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Keep the times; propose the next size once this one has its steps."""
        o = observations
        columns = (o.local_batch_sizes, o.outside_backward, o.backward, o.first_bucket)
        rows = (*self.rows, *zip(*(column[:, 0].tolist() for column in columns), strict=True))
        place, before = self.place, self.sizes[: self.place]
        wanted = self.steps * (1 + before.count(self.sizes[place]))
        if sum(row[0] == self.sizes[place] for row in rows) >= wanted:
            place += 1
        planner = replace(self, rows=rows, place=place)
        if planner.done or place == self.place:
            return Decision(planner, kept="this size is not timed yet: more steps", soon=True)
        size = self.sizes[place]
        return Decision(planner, Proposal(BatchPlan(size, (size,)), "the next size to time"), soon=True)


class DeviceProbe(ConvergenceProbe):
    """Callback that carries out an order to time this worker at several batch sizes.

    Args:
        order: how many steps, and which sizes.
    """

    def __init__(self, order: ProbeOrder) -> None:
        super().__init__(order, None)
        self._largest = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the callbacks that save or stop.

        Raises:
            MisconfigurationException: if there is more than one worker.
        """
        super().setup(trainer, pl_module, stage)
        if trainer.world_size != 1:
            raise self._refused(
                trainer,
                f"`lightning-hetero profile` measures one device, and the Trainer has {trainer.world_size} workers. "
                "Give it devices=1, num_nodes=1 while profiling.",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the sizes, and begin with the first.

        Raises:
            MisconfigurationException: if the batch size cannot be chosen.
        """
        PolicyCallback.on_train_start(self, trainer, pl_module)
        assert self._engine is not None
        if self._engine.sampler is None or self._engine.plan is None or self._engine.workers is None:
            raise self._refused(
                trainer,
                "`lightning-hetero profile` times several batch sizes, and this script's loader makes its batches by "
                "itself. Give the Trainer a DataLoader with a batch_size and a map-style dataset while profiling.",
            )
        own, dataset = self._engine.plan.total_batch_size, len(self._engine.sampler.stream)
        bound = self._engine.workers.max_local
        most = min(dataset // 2, *(bound or (dataset,)))
        least, unit = self._engine.workers.least, self._engine.workers.multiple
        sizes = self.order.sizes or sizes_around(own, max(most, least), unit)
        if len(set(sizes)) < 2 or not all(least <= size <= most and size % unit == 0 for size in sizes):
            raise self._refused(
                trainer,
                f"the batch sizes {', '.join(map(str, sizes))} cannot be timed: give at least two different --sizes "
                f"from {least} to {most} (half of the dataset, or what fits into memory), multiples of "
                f"local_batch_multiple={unit}, or profile with more data.",
            )
        self.planner = SizeSweep(sizes=sizes, steps=self.order.steps)
        self._own, self._dataset = own, dataset
        self._engine.adopt(BatchPlan(sizes[0], (sizes[0],)), "the first size to time", not_before=(0, 0))
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        for config in trainer.lr_scheduler_configs:
            config.strict = False

    def _refused(self, trainer: Trainer, reason: str) -> Exception:
        """Tell the command why this script cannot be timed, and return the error that ends the script."""
        self.order.refuse(reason)
        error: Exception = strategy_of(trainer)._misconfiguration(reason)
        return error

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the plan, as other policies do."""
        PolicyCallback.on_train_epoch_start(self, trainer, pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Leave the loss alone: only times count."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Close the step's observation; end once all sizes are timed."""
        PolicyCallback.on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)
        assert self._engine is not None
        self._largest = max(self._largest, self._engine.own_size or 0)
        if isinstance(self.planner, SizeSweep) and self.planner.done:
            self._answer(trainer, pl_module, self.planner.rows, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Answer with what was timed if a larger size does not fit into memory."""
        rows = self.planner.rows if isinstance(self.planner, SizeSweep) else ()
        if isinstance(exception, torch.OutOfMemoryError) and len({row[0] for row in rows}) > 1:
            self._answer(trainer, pl_module, rows, self._largest)

    def _answer(self, trainer: Trainer, pl_module: LightningModule, rows: tuple[Row, ...], memory: int | None) -> None:
        """Answer, and end the script's process with success."""
        assert self._engine is not None
        assert self._engine.workers is not None
        trained = [p for p in pl_module.parameters() if p.requires_grad]
        bound = self._engine.workers.max_local
        report = DeviceReport(
            name=_device_name(strategy_of(trainer).root_device),
            rows=[list(row) for row in rows],
            memory=memory if memory is not None else (bound[0] if bound else None),
            parameters=sum(p.numel() for p in trained),
            gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
            total=self._own,
            dataset=self._dataset,
        )
        report.write(self.order.report)
        raise SystemExit(0)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        name: Any = torch.cuda.get_device_name(device)
        return str(name)
    return device.type
