"""The accelerator of a trainer: it is told which loader trains, and counts the labels that a loss is a mean of."""

import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from lightning_hetero.accelerate import HeteroAccelerator
from lightning_hetero.accelerate.plugin import SWITCH
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.frontend.checkpoint_folder import TRAINER_STATE, begin_folder, end_folder
from lightning_hetero.frontend.collectives import not_computing
from lightning_hetero.frontend.loaders import length_of
from lightning_hetero.frontend.without_effect import ALONE, tell_left
from lightning_hetero.transformers.arguments import by_tokens

__all__ = ["LabelCount", "TrainerAccelerator"]

PREPARED = "_is_accelerate_prepared"
IGNORED = -100  # label of what is no target, for torch's losses and Transformers'


class LabelCount:
    """Count of the labels of a batch that are targets, as ``Trainer`` counts them for ``num_items_in_batch``.

    Args:
        trainer: knows whether its loss shifts the labels by one.

    Example:
        >>> count = LabelCount(LabelCount)  # anything whose losses shift nothing
        >>> int(count({"labels": torch.tensor([[3, -100, 4]])})), count({"input_ids": torch.ones(2, 3)})
        (2, None)
    """

    def __init__(self, trainer: object) -> None:
        self._trainer = weakref.ref(trainer)

    def __call__(self, batch: Any) -> torch.Tensor | None:
        """Return the number of targets; ``None`` without labels, so that samples count."""
        labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        shifts = "shift_labels" not in batch and labels.ndim > 1 and _shifts_labels(self._trainer())
        return (labels[..., 1:] if shifts else labels).ne(IGNORED).sum()


def _shifts_labels(trainer: Any) -> bool:
    """Return whether a trainer's loss compares each output with the next label, as losses of language models do.

    A model whose ``loss_type`` Transformers does not know, such as ``GPT2LMHeadModel``, has the loss of a causal
    language model as its ``loss_function``.
    """
    model: Any = getattr(trainer, "model", None)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind = str(getattr(model, "loss_type", None))
    if kind in LOSS_MAPPING:
        return LOSS_MAPPING[kind] is ForCausalLMLoss
    return isinstance(model, PreTrainedModel) and _calls(type(model).forward, "loss_function")


def _calls(function: Any, name: str) -> bool:
    """Return whether the code of a function, without its decorators, has an attribute of this name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and name in code.co_names


class TrainerAccelerator(HeteroAccelerator):
    """A :class:`HeteroAccelerator` that Transformers' trainers make.

    Args:
        trainer: the trainer, which weights its losses with :class:`LabelCount`.
        kwargs: arguments of :class:`HeteroAccelerator`.
    """

    def __init__(self, *args: Any, trainer: object, **kwargs: Any) -> None:
        self._arguments = getattr(trainer, "args", None)
        super().__init__(*args, **kwargs)
        self._trains: bool | None = None
        if self.engine is not None:
            self.engine.weighting.count_with(LabelCount(trainer))

    def _record(self) -> tuple[Path | None, str]:
        """Return the folder of the trainer's logs, else that of its output."""
        folder = getattr(self._arguments, "logging_dir", None) or getattr(self._arguments, "output_dir", None)
        return Path(folder) if folder else None, "Transformers"

    def _begin(self) -> None:
        assert self.hetero_plugin is not None
        if self.num_processes == 1:
            switch = f"{SWITCH}={os.environ[SWITCH]}" if SWITCH in os.environ else "HeteroTrainer"
            Notices(True).tell([NoEffect((switch,), *ALONE)])
        else:
            self.hetero_plugin = by_tokens(self.hetero_plugin)
        super()._begin()

    # loaders

    @contextmanager
    def announced(self, trains: bool) -> Iterator[None]:
        """Say for a while whether the loaders that are prepared train."""
        before, self._trains = self._trains, trains
        try:
            yield
        finally:
            self._trains = before

    def leave_even(self, reason: str) -> None:
        """Say that the training data is not split by speed.

        Raises:
            ValueError: if the settings fix the sizes.
        """
        session = self._session()
        if session.engine.config.local_batch_sizes is not None:
            raise ValueError(f"{reason}, or leave local_batch_sizes out.")
        tell_left(session.engine, session.planner, f"{reason}.")

    def _training_loader(self, objects: Sequence[object]) -> DataLoader | None:
        if self._trains is None:
            return super()._training_loader(objects)
        return next((obj for obj in objects if isinstance(obj, DataLoader)), None) if self._trains else None

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        uneven: bool | None = None,
    ) -> Any:
        """Prepare a loader as :class:`HeteroAccelerator` does; one that evaluates is left to Accelerate."""
        uneven = False if uneven is None and self._trains is False else uneven
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch, uneven)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model as :class:`HeteroAccelerator` does; one that has evaluated first is still to be wrapped.

        Accelerate marks a model that it prepares for evaluation as prepared, and leaves it unwrapped in a training that
        follows: each rank would train by itself.
        """
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode and prepared is model:
            vars(model).pop(PREPARED, None)
        return prepared

    # batches

    def counts(self, batch: Any) -> bool | None:
        """Return whether a batch of the training counts, as that of a worker with share 0 does not.

        ``None`` for a batch that is not split: of a single worker, of another loader, or one that no loader of ours
        has handed out.
        """
        handed = None if self.engine is None else self.engine.weighting.trace.find(batch)
        return None if handed is None or handed.beside is not None else not handed.idle

    def weight_of(self, batch: Any) -> torch.Tensor | None:
        """Return the weight of the losses up to the next batch, those of this one; ``None`` if it is not split.

        Raises:
            ValueError: if it is none of the batches of the pass, nor was made of one.
        """
        if self.num_processes == 1:
            return None
        engine = self._session().engine
        handed = engine.weighting.trace.find(batch)
        if (handed is None and not self._session().running) or (handed is not None and handed.beside is not None):
            return None
        with not_computing(engine):
            return torch.as_tensor(engine.weighting.select(batch))

    # checkpoints, which are the trainer's own

    @contextmanager
    def writing(self, folder: str, state: Any) -> Iterator[None]:
        """Let a trainer write a checkpoint; its checksums are taken as soon as the trainer's state, its last, is there.

        Only then may the trainer delete older checkpoints.

        Args:
            folder: the folder of the checkpoint.
            state: state of the trainer, which it saves by ``save_to_json``.
        """
        if not self.is_main_process:
            yield
            return
        begin_folder(folder)
        save = state.save_to_json

        def save_to_json(path: str) -> None:
            save(path)
            end_folder(folder)

        vars(state)["save_to_json"] = save_to_json
        try:
            yield
        finally:
            del vars(state)["save_to_json"]

    def whole_checkpoint(self, given: str | bool, output: str | None) -> str | bool:
        """Return the checkpoint to resume from: the given one if it is whole, or for ``True`` the newest whole one.

        A collective call.

        Raises:
            DamagedCheckpointError: if there is none.
        """
        if given is True and output is not None:
            return self._whole_newest(output, (TRAINER_STATE,)) or given
        return self._whole(str(given)) or given

    def save_beside(self, folder: str) -> None:
        """Write the plans and what was learned into the folder of a checkpoint; a collective call."""
        self._save_session(folder)

    def resume_from(self, folder: str) -> None:
        """Go on from the plans of a checkpoint, if it has any; a collective call."""
        loader = self._hetero_loader
        if loader is None:
            return
        self._load_hetero([], folder)
        length = length_of(loader)  # a stream tells none
        if length is not None and 0 < self._session().restored_step >= length:
            for _ in self.skip_first_batches(loader):  # its pass is over; Trainer begins the next one
                pass

    def check_health(self) -> None:
        """Check losses and weights once more, when training has ended on all ranks; a collective call."""
        self._session().engine.health.finish()

    def end_run(self) -> None:
        """End the record of a training, with the error that is being handled if there is one."""
        self._session().report.end()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics ``hetero/...`` since the last call."""
        kept, self._metrics = self._metrics, {}
        return kept
