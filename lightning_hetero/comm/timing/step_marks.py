"""Marks of a step: values of a clock at the moments when its parts begin and end."""

from typing import NamedTuple

from lightning_hetero.comm.timing.clock import Mark

__all__ = ["BackwardMarks", "BatchMarks", "Span", "StepMarks", "UpdateMarks"]

Span = tuple[Mark, Mark]


class BackwardMarks(NamedTuple):
    """Marks of one backward pass.

    Args:
        start: when it began.
        ready: when each gradient bucket was complete.
        done: when each bucket was averaged.
        processor: processor seconds of the process at the start and at the last gradient, where there is a quota.
        end: when the backward call returned; ``None`` if it has not, or failed.
    """

    start: Mark
    ready: list[Mark]
    done: dict[int, Mark]
    processor: tuple[float, float] = (0.0, 0.0)
    end: Mark = None


class UpdateMarks(NamedTuple):
    """Marks of an optimizer step: start, end, and what is excluded in between."""

    start: Mark
    end: Mark
    excluded: list[Span]


class BatchMarks(NamedTuple):
    """Marks of one micro-batch.

    Args:
        size: samples.
        fetched: before and after its batch was taken from the loader, ``None`` if nobody saw that.
        start: when it began.
        backwards: its backward passes.
        updates: its optimizer steps.
        excluded: spans in which the worker waited for others.
        end: when it was over; ``None`` while it runs.
        processor: processor seconds, where there is a quota.
    """

    size: int
    fetched: Span | None
    start: Mark
    backwards: list[BackwardMarks]
    updates: list[UpdateMarks]
    excluded: list[Span]
    end: Mark = None
    processor: float = 0.0

    @property
    def last_marks(self) -> list[Mark]:
        """The last mark of each of its parts; those before lie on the same streams."""
        done = [mark for passage in self.backwards for mark in passage.done.values()]
        ends = [*(passage.end for passage in self.backwards), *(update.end for update in self.updates)]
        return [self.start, self.end, *ends, *done]


class StepMarks(NamedTuple):
    """Marks of one synchronised step.

    Args:
        number: of the step.
        window: its micro-batches.
        synced: the last backward pass that was synchronised; others may follow it under ``no_sync``.
        previous: end of the synchronisation before, ``None`` if something that is no step came between.
    """

    number: int
    window: list[BatchMarks]
    synced: BackwardMarks
    previous: Mark
