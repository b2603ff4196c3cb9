"""Marks of a step: clock values at the start and end of its parts, in lists that grow while the step runs."""

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
        ends: when the backward call returned; empty while it runs, or if it failed.
        processor: with a CPU quota, CPU seconds of the process at the start and after each bucket; else empty.
        waits: spans in which the worker waited for others: a sharded model for parameters or gradients, or the hook
            that averages a bucket; else empty.
        waited: how many of these came before each bucket was complete.
    """

    start: Mark
    ready: list[Mark]
    done: dict[int, Mark]
    ends: list[Mark]
    processor: list[float]
    waits: list[Span]
    waited: list[int]

    @property
    def inner_waits(self) -> list[Span]:
        """Spans that are no computing although they come before the last gradient."""
        return self.waits[: self.waited[-1]] if self.waited else self.waits

    @property
    def processor_seconds(self) -> float:
        """CPU seconds from the start to the last gradient bucket."""
        return self.processor[-1] - self.processor[0] if self.processor else 0.0


class BatchMarks(NamedTuple):
    """Marks of one micro-batch.

    Args:
        size: samples.
        fetched: marks before and after its batch came from the loader, ``None`` if that was not timed.
        start: when it began.
        backwards: its backward passes.
        updates: start and end of each optimizer step, and the spans excluded in between.
        excluded: spans in which the worker waited for others.
        ends: when it was over; empty while it runs.
        processor: with a CPU quota, its CPU seconds; else empty.
        waits: spans outside its backward passes in which a sharded model waited for parameters; else empty.
        work: features of its work, where its size does not say how much work it was.
    """

    size: int
    fetched: Span | None
    start: Mark
    backwards: list[BackwardMarks]
    updates: list[tuple[Mark, Mark, list[Span]]]
    excluded: list[Span]
    ends: list[Mark]
    processor: list[float]
    waits: list[Span]
    work: tuple[float, ...] = ()

    @property
    def last_marks(self) -> list[Mark]:
        """Last mark of each of its parts; earlier marks are on the same streams, hence passed before."""
        done = [mark for passage in self.backwards for mark in passage.done.values()]
        ends = [passage.ends[-1] for passage in self.backwards]
        return [self.start, self.ends[-1], *ends, *(end for _, end, _ in self.updates), *done]


class StepMarks(NamedTuple):
    """Marks of one synchronized step.

    Args:
        number: of the step.
        window: its micro-batches.
        synced: the last synchronized backward pass; others may follow it under ``no_sync``.
        previous: end of the previous synchronization, ``None`` if something other than a step came between.
    """

    number: int
    window: list[BatchMarks]
    synced: BackwardMarks
    previous: Mark
