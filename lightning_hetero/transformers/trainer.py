"""``HeteroTrainer``: Transformers' ``Trainer`` on unequal workers, with the gradients of one process.

A loss may be divided by ``num_items_in_batch``, the targets of all ranks, or be a mean over this rank's batch, or have
a part of each kind; its code does not say which. So ``compute_loss`` runs as in one process that has ``N`` targets, but
is given ``N s``, where ``s`` is this rank's share of the micro-batch, and its result is weighted by ``W s``. DDP's mean
over ``W`` ranks then has the weight 1 for what is divided by ``N`` and ``s`` for what is a mean.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers.trainer as module

from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.transformers.accelerator import TrainerAccelerator
from lightning_hetero.transformers.arguments import plugin_of
from lightning_hetero.transformers.jit_checkpoint import share_requests
from lightning_hetero.transformers.requirements import check_trainer, inexact_loss

__all__ = ["HeteroTrainer", "hetero_trainer"]

REBALANCED = (
    "train_sampling_strategy='batch_rebalance' gives every worker an equal share of the tokens by itself, so that "
    "batches do not follow the speeds. Leave it out; cost_fn='tokens' divides batches by tokens and speed"
)


class HeteroTrainer(module.Trainer):
    """Transformers' ``Trainer`` on unequal workers.

    The settings are fields of the arguments (:class:`~lightning_hetero.transformers.HeteroTrainingArguments`), or
    variables of the environment; ``ACCELERATE_USE_HETERO=false`` without such fields makes this a plain ``Trainer``.
    ``per_device_train_batch_size`` is the average over the workers.

    Args:
        args: arguments of ``Trainer``, all of them.

    Raises:
        TypeError: if a setting has the wrong type.
        ValueError: if a setting is out of range, or the arguments ask for what cannot be uneven.

    Example:
        >>> issubclass(HeteroTrainer, module.Trainer)
        True
    """

    hetero_plugin: ClassVar[HeteroPlugin | None] = None
    """Settings of a class made by ``hetero_trainer(cls, hetero_plugin=...)``."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, one that splits batches by speed."""
        plugin = plugin_of(self.args, self.hetero_plugin)
        if plugin is None:
            super().create_accelerator_and_postprocess()
            return
        check_trainer(self.args, self.model, plugin)
        with _replaced("Accelerator", partial(TrainerAccelerator, trainer=self, hetero_plugin=plugin)):
            super().create_accelerator_and_postprocess()

    @property
    def _hetero(self) -> TrainerAccelerator | None:
        """The accelerator, if it splits batches over several ranks."""
        accelerator = getattr(self, "accelerator", None)
        split = isinstance(accelerator, TrainerAccelerator) and accelerator.engine is not None
        return accelerator if split else None

    @property
    def _engine(self) -> HeteroEngine | None:
        return None if self._hetero is None else self._hetero.engine

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._hetero is None:
            return super()._inner_training_loop(*args, **kwargs)
        hetero = self._hetero
        if hetero.engine is not None:
            share_requests(self, hetero.engine.control)
            known = hetero.engine.config.weight_fn is not None or hetero.num_processes == 1
            if not known and (said := inexact_loss(self)) is not None:
                hetero.engine.notices.say(said)
        try:
            with _replaced("skip_first_batches", hetero.skip_first_batches), self._announced():
                done = super()._inner_training_loop(*args, **kwargs)
            hetero.check_health()
            return done
        finally:
            hetero.end_run()

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Say for a while that what ``get_train_dataloader`` prepares trains, whoever has overridden it."""
        own, hetero = vars(self).get("get_train_dataloader"), self._hetero
        get_loader = self.get_train_dataloader

        def get_train_dataloader() -> Any:
            with nullcontext() if hetero is None else hetero.announced(True):
                return get_loader()

        vars(self)["get_train_dataloader"] = get_train_dataloader
        try:
            yield
        finally:
            del vars(self)["get_train_dataloader"]
            if own is not None:
                vars(self)["get_train_dataloader"] = own

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._hetero is not None:  # since the last log, it has this rank's part of the losses
            self._tr_loss = self._hetero.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)

    # data

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        given = (dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        if self._hetero is None:
            return super()._get_dataloader(*given)
        rebalanced = is_training and getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance"
        if rebalanced:
            self._hetero.leave_even(REBALANCED)
        with self._hetero.announced(is_training and not rebalanced):
            return super()._get_dataloader(*given)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step, those of the plan."""
        engine = self._engine
        if engine is None or engine.plan is None:
            return int(super().get_total_train_batch_size(args))
        return int(engine.plan.total_batch_size * args.gradient_accumulation_steps)

    # one step

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> Any:
        hetero = self._hetero
        if hetero is None or not batch_samples or hetero.counts(batch_samples[0]) is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        with _as_one_process(self.args):
            own = super()._get_num_items_in_batch(batch_samples, device)
            if own is None:
                return None
            counted = [batch for batch in batch_samples if hetero.counts(batch)]
            if len(counted) < len(batch_samples):
                own = super()._get_num_items_in_batch(counted, device) if counted else 0 * own
        return hetero.reduce(torch.as_tensor(own, device=device).clone(), "sum")

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Perform a training step as ``Trainer`` does; the loss is weighted by this rank's share of the batch."""
        hetero = self._hetero
        weight = None if hetero is None else hetero.weight_of(inputs)
        if hetero is None or weight is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:
            num_items_in_batch = _share_of(num_items_in_batch, weight / hetero.num_processes)
        with _as_one_process(self.args):
            loss = super().training_step(model, inputs, num_items_in_batch)
        weight = weight.to(loss)
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))  # a mean of nothing is not a number

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch as ``Trainer`` does in one process, with the mean over this rank's batch as its loss."""
        if self._hetero is None:
            return super().prediction_step(*args, **kwargs)
        with _as_one_process(self.args):
            return super().prediction_step(*args, **kwargs)

    # checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does; a checkpoint to resume from has to be whole.

        Raises:
            DamagedCheckpointError: if a file of it has changed since it was saved. With
                ``resume_from_checkpoint=True``, training resumes from the newest whole one instead.
        """
        if self._hetero is not None and resume_from_checkpoint:
            resume_from_checkpoint = self._hetero.whole_checkpoint(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._hetero is None or self.args.save_only_model:
            super()._save_checkpoint(model, trial)
            return
        name = f"{module.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._hetero.writing(str(Path(self._get_output_dir(trial=trial), name)), self.state):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._hetero is not None:  # the last file of each rank is there before rank 0 takes the checksums
            self._hetero.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._hetero is not None:
            self._hetero.save_beside(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._hetero is not None and checkpoint is not None:
            self._hetero.resume_from(checkpoint)

    # logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as ``Trainer`` does; logs of the training get the newest metrics ``hetero/...``."""
        if self._hetero is not None and not {"loss", "train_loss"}.isdisjoint(logs):
            logs.update(self._hetero.take_metrics())
        super().log(logs, *args, **kwargs)


def hetero_trainer(cls: type, hetero_plugin: HeteroPlugin | None = None) -> type:
    """Return a trainer class for unequal workers, derived from any trainer class.

    Args:
        cls: ``Trainer`` or a class derived from it, such as TRL's ``SFTTrainer``.
        hetero_plugin: settings of all its trainers; by default those of their arguments and the environment.

    Raises:
        TypeError: if the class is no trainer.

    Example:
        >>> hetero_trainer(module.Trainer).__name__
        'HeteroTrainer'
    """
    if not (isinstance(cls, type) and issubclass(cls, module.Trainer)):
        raise TypeError(f"hetero_trainer({cls!r}): give transformers.Trainer or a class derived from it.")
    bases = (cls,) if issubclass(cls, HeteroTrainer) else (HeteroTrainer, cls)
    if hetero_plugin is None and len(bases) == 1:
        return cls
    names = {"__module__": __name__, "__doc__": cls.__doc__, "hetero_plugin": hetero_plugin}
    return type(f"Hetero{cls.__name__}", bases, names)


def _share_of(items: Any, share: torch.Tensor) -> torch.Tensor:
    """Return the share of a number of items, and all of them for a rank whose share, as its weight, is 0."""
    items = torch.as_tensor(items)
    kind = items.dtype if items.is_floating_point() else torch.get_default_dtype()
    share = share.to(device=items.device, dtype=torch.float64)
    return torch.where(share > 0, items * share, items).to(kind)


@contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    """Replace a name in the module of ``Trainer`` for a while."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def _as_one_process(args: Any) -> Iterator[None]:
    """Let a trainer neither gather the number of items nor multiply the loss by the number of processes."""
    given, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    try:
        yield
    finally:
        args.average_tokens_across_devices = given
