"""Batches of a session's training loader, and the error for a copy of such a loader."""

from collections.abc import Iterator
from typing import Any, Protocol

from lightning_hetero.data.broadcast_stream import BroadcastStream
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine import HeteroEngine

__all__ = ["CopiedSession", "Session", "SessionBatches"]


class Session(Protocol):
    """The part of a session that its batches need."""

    engine: HeteroEngine

    @property
    def running(self) -> bool:
        """``True`` while a pass over the data runs."""

    @property
    def stream(self) -> IndexStream | SampleStream | LoaderSet | None:
        """Order of the samples."""


class CopiedSession:
    """The session of a copied or unpickled front end, which only raises errors."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this is a copy of an accelerator, a strategy or a training loader, or was unpickled: it has settings, but "
            "no process group and no plans. Use the original in its process, or make and prepare a new one."
        )

    def close(self) -> None:
        """Do nothing: the original ends the run."""


class SessionBatches:
    """Batch sampler of a session on this rank; it stays the same object when plans and positions change.

    Where the data is a stream, it yields batches in place of indices.

    Args:
        session: session that gives the batches.
    """

    split_batches = True  # the batch size is the total, for Accelerate
    even_batches = False

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def sampler(self) -> Any:
        """The sampler that the session draws from when a pass begins; frameworks may replace it."""
        stream = self.session.stream
        return stream.sampler if isinstance(stream, BroadcastStream) else None

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        stream = self.session.stream
        if isinstance(stream, BroadcastStream):
            stream.draw_from(sampler)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.session.engine.sampler
        assert sampler is not None
        if self.session.engine.world_size > 1 and not self.session.running:
            raise RuntimeError(
                "the training data is split unevenly and was iterated by a loader that does not weight its batches, "
                "such as one of accelerate.skip_first_batches(). Iterate the prepared loader, or use the accelerator's "
                "own skip_first_batches()."
            )
        return iter(sampler)

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
        """``True`` if the ragged last batch is dropped."""
        return bool(self.session.engine.sampler is not None and self.session.engine.sampler.drop_last)
