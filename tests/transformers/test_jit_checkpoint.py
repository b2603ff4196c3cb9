"""Transformers' checkpoint at SIGTERM: all ranks save after the same step, whichever of them is told."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import transformers
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager

from tests.helpers import run_ranks
from tests.transformers.runs import arguments, llama, of, padded, texts, trained


class TellIn(TrainerCallback):
    """Sends SIGTERM to this process in a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class AtOnce:
    """In place of the timer by which Transformers waits for three seconds."""

    def __init__(self, seconds, call):
        self.start = call


def _told(rank, told, folder, resume=None):
    """Train on this rank, which is told in the step that ``told`` has for it."""
    from transformers import trainer_jit_checkpoint

    trainer_jit_checkpoint.threading.Timer, before = AtOnce, trainer_jit_checkpoint.threading.Timer
    try:
        args = arguments(8, (2, 6), output_dir=folder, enable_jit_checkpoint=True, max_steps=9)
        callbacks = [TellIn(told[rank])] if rank in told else []
        trainer = of(transformers.Trainer)(
            model=llama(), args=args, train_dataset=texts(42), data_collator=padded, callbacks=callbacks
        )
        handler = signal.getsignal(signal.SIGTERM)
        result = trained(trainer, **({"resume_from_checkpoint": resume} if resume else {}))
        manager = next(c.jit_manager for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
        assert isinstance(manager, CheckpointManager)
        assert signal.getsignal(signal.SIGTERM) is not handler
    finally:
        trainer_jit_checkpoint.threading.Timer = before
    return result


@pytest.mark.parametrize("told", [{0: 2}, {1: 2}, {0: 2, 1: 2}, {0: 3, 1: 2}], ids=str)
def test_all_ranks_save_after_the_step_that_follows_a_signal(told, tmp_path):
    first, second = run_ranks(_told, 2, told, str(tmp_path), timeout=60.0)
    assert first["steps"] == second["steps"] == 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    folder = tmp_path / "checkpoint-3"
    assert not (folder / "checkpoint-is-incomplete.txt").exists()
    assert (folder / "hetero_state.pt").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3


def test_a_training_that_was_told_goes_on_as_if_it_had_not_been(tmp_path):
    whole = run_ranks(_told, 2, {}, tempfile.mkdtemp(dir=tmp_path))
    run_ranks(_told, 2, {1: 2}, str(tmp_path / "told"))
    resumed = run_ranks(_told, 2, {}, str(tmp_path / "told"), str(tmp_path / "told" / "checkpoint-3"))
    for one, other in zip(whole, resumed, strict=True):
        assert other["steps"] == 9
        assert (one["weights"] == other["weights"]).all()


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    first, second = run_ranks(_told, 2, {0: 9}, str(tmp_path))
    assert first["steps"] == second["steps"] == 9
    assert not list(Path(tmp_path).glob("checkpoint-*"))
