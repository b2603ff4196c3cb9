"""Marks of a step: values of a clock at the moments when its parts begin and end, in lists that grow while it runs."""

from typing import NamedTuple

from lightning_hetero.comm.timing.clock import Mark

__all__ = ["BackwardMarks", "BatchMarks", "Span", "StepMarks"]

Span = tuple[Mark, Mark]


class BackwardMarks(NamedTuple):
    """Marks of one backward pass.

    Args:
        start: when it began.
        ready: when each gradient bucket was complete.
        done: when each bucket was averaged.
        ends: when the backward call returned; empty if it has not, or failed.
        processor: where there is a quota, processor seconds of the process at the start and after each gradient.
    """

    start: Mark
    ready: list[Mark]
    done: dict[int, Mark]
    ends: list[Mark]
    processor: list[float]

    @property
    def processor_seconds(self) -> float:
        """Processor seconds up to the last gradient."""
        return self.processor[-1] - self.processor[0] if self.processor else 0.0


class BatchMarks(NamedTuple):
    """Marks of one micro-batch.

    Args:
        size: samples.
        fetched: before and after its batch was taken from the loader, ``None`` if nobody saw that.
        start: when it began.
        backwards: its backward passes.
        updates: start and end of its optimizer steps, and what is excluded in between.
        excluded: spans in which the worker waited for others.
        ends: when it was over; empty while it runs.
        processor: where there is a quota, its processor seconds.
    """

    size: int
    fetched: Span | None
    start: Mark
    backwards: list[BackwardMarks]
    updates: list[tuple[Mark, Mark, list[Span]]]
    excluded: list[Span]
    ends: list[Mark]
    processor: list[float]

    @property
    def last_marks(self) -> list[Mark]:
        """The last mark of each of its parts; those before lie on the same streams."""
        done = [mark for passage in self.backwards for mark in passage.done.values()]
        ends = [passage.ends[-1] for passage in self.backwards]
        return [self.start, self.ends[-1], *ends, *(end for _, end, _ in self.updates), *done]


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
