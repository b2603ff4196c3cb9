"""Place where a fit is to go on after a step that has failed, in the counts that Lightning keeps in a checkpoint."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "begin_of_step",
    "count_from_epoch_start",
    "count_logged_steps",
    "end_epoch_as_usual",
    "end_validation",
    "forget_failed_batch",
    "metrics_of_callbacks",
    "steps_added",
    "validate_again",
]


def count_from_epoch_start(trainer: "Trainer") -> None:
    """Make a step that has failed before the first batch of an epoch one that has failed in that batch.

    Lightning still counts the batches of the epoch before, would take them for those of the new one, and leave it out.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.total
    if epochs.started < epochs.ready:
        loop = trainer.fit_loop.epoch_loop
        for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
            progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
        loop.batch_progress.increment_ready()


def count_logged_steps(checkpoint: dict[str, Any], added: int, *, automatic: bool) -> None:
    """Set the counter of loggers to the steps that were done, less those that Lightning adds when it resumes.

    Example:
        >>> counts = {"ready": 7, "started": 7, "processed": 6, "completed": 6}
        >>> loops = {"epoch_loop.batch_progress": {"total": counts}, "epoch_loop.state_dict": {}}
        >>> state = {"global_step": 6, "loops": {"fit_loop": loops}}
        >>> count_logged_steps(state, 1, automatic=True)
        >>> loops["epoch_loop.state_dict"]
        {'_batches_that_stepped': 5}
    """
    loops = checkpoint["loops"]["fit_loop"]
    done = checkpoint["global_step"] if automatic else loops["epoch_loop.batch_progress"]["total"]["processed"]
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = done - added


def steps_added(trainer: "Trainer", checkpoint: dict[str, Any]) -> int:
    """Return how many steps Lightning adds to the counter of loggers when it resumes from this.

    It adds one unless all counts of batches are equal, because its own checkpoints are saved before it counts, but none
    inside a window of accumulation; and it counts a step behind the validation that follows it.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    ends = current["ready"] >= trainer.num_training_batches or progress["is_last_batch"]
    steps = ends or current["ready"] % trainer.accumulate_grad_batches == 0
    again = current["processed"] < current["ready"]
    return int(steps and len(set(progress["total"].values())) > 1) + (trainer.validating and not again)


def end_validation(trainer: "Trainer") -> None:
    """Leave a validation that has failed: its loop forgets that it ran, and modules go back to training mode."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._on_evaluation_model_train()
    loop._has_run = False


def begin_of_step(checkpoint: dict[str, Any], accumulation: int, *, validating: bool = False) -> int:
    """Set a checkpoint back to the first batch of an optimizer step that was not done; return the batches before.

    Gradients that were accumulated in that step are not part of it. It is as if that batch had failed; also if it had
    not begun, because Lightning would take the place between two batches for one behind a validation.

    Example:
        >>> counts = {"ready": 9, "started": 9, "processed": 8, "completed": 8}
        >>> progress = {"current": counts, "total": {name: 10 + count for name, count in counts.items()}}
        >>> epochs = {"total": {"ready": 2, "started": 2, "processed": 1, "completed": 1}}
        >>> loops = {"epoch_progress": epochs, "epoch_loop.batch_progress": {**progress, "is_last_batch": False}}
        >>> begin_of_step({"loops": {"fit_loop": loops}}, 3), counts["processed"], progress["total"]["processed"]
        (6, 6, 16)
    """
    loops = checkpoint["loops"]["fit_loop"]
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["total"]
    current = progress["current"]["processed"]
    done = current == progress["current"]["ready"]
    between = done and current == progress["current"]["completed"] and not validating
    between = between and epochs["processed"] < epochs["started"]
    inside = 0 if progress["is_last_batch"] and done and not between else current % accumulation
    if inside or between or not done:
        progress["is_last_batch"] = False
        for counts in (progress["current"], progress["total"]):
            begin = counts["processed"] - inside
            counts.update(ready=begin + 1, started=begin + 1, processed=begin, completed=begin)
    return int(current - inside)


def forget_failed_batch(trainer: "Trainer") -> None:
    """Let the batches begun in all epochs be those that were done; call it when Lightning has resumed.

    Lightning does so for the running epoch only, and would not know by these counts where the next failure was.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    state = progress.state_dict()
    done = state["total"]["processed"]
    progress.load_state_dict({**state, "total": {**state["total"], "ready": done, "started": done}})


def validate_again(checkpoint: dict[str, Any]) -> None:
    """Make a checkpoint say that its validation is not done: it runs again, from its first batch.

    Example:
        >>> done = {"ready": 2, "started": 2, "processed": 2, "completed": 2}
        >>> loops = {"epoch_loop.val_loop.batch_progress": {"total": done, "current": dict(done)}}
        >>> validate_again({"loops": {"fit_loop": loops}})
        >>> done
        {'ready': 1, 'started': 1, 'processed': 0, 'completed': 0}
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(ready=1, started=1, processed=0, completed=0)


def end_epoch_as_usual(trainer: "Trainer") -> None:
    """Let schedulers that follow a metric step at the end of the epoch; call it when Lightning has resumed.

    Lightning leaves them out in an epoch in which it has resumed, because it has not saved the metric.
    """
    trainer.fit_loop._restarting = False  # the loops inside it are still to know that they go on


def metrics_of_callbacks(trainer: "Trainer") -> dict[str, Any]:
    """Return the metrics that callbacks and schedulers look at, without computing any: the group may be gone."""
    metrics: dict[str, Any] = trainer._logger_connector._callback_metrics
    return metrics
