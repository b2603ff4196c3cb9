"""The training data of a session: its order, its shards, and the position at which a loaded state resumes."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from lightning_hetero.core.checkpoint_state import CHECKSUMS, check_checksums, check_tensors, reading_state
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.validation import check_int
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.engine import HeteroEngine

__all__ = ["INTERVAL_CHECKSUMS", "SavedStream", "SessionData", "Stream"]

INTERVAL_CHECKSUMS = "interval_checksums"
"""Key of the checksums of what all ranks were asked for, apart from those of the state that it is added to."""

Stream: TypeAlias = IndexStream | SampleStream | LoaderSet
"""Training data: an order of samples that ranks share, or a loader's stream."""


@runtime_checkable
class SavedStream(Protocol):
    """A stream whose order has to be saved, because it cannot be drawn again."""

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the order of a pass, and what later ones are drawn from."""

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Restore the order of the pass, and of later ones as they would have been."""


class SessionData:
    """The data that an engine shards, once it is given, and the loaded state that the first pass resumes from.

    Args:
        engine: engine that shards the data.
    """

    def __init__(self, engine: HeteroEngine) -> None:
        self._engine = engine
        self.stream: Stream | None = None
        self._batch_size, self._drop_last = 0, False
        self._dataset: Any = None
        self.restored: dict[str, Any] | None = None

    @property
    def restored_step(self) -> int:
        """Steps of its pass that the loaded state has done; 0 once a pass has begun."""
        return 0 if self.restored is None else int(self.restored["step"])

    def give(self, stream: Stream, batch_size: int = 0, *, drop_last: bool = False, dataset: Any = None) -> None:
        """Replace the data, and take the order of the loaded state if there is one."""
        self.stream, self._batch_size, self._drop_last, self._dataset = stream, batch_size, drop_last, dataset
        self._restore_order()

    def shard(self, planner: Planner | None, epoch: int, step: int) -> None:
        """Split the data from a step on, with the plans of the loaded state if there is one; a collective call."""
        if self.stream is None:
            return
        if self.restored is not None:
            self._engine.data.plans.forget_running()
            with reading_state("the plans, and the place in the training data"):
                check_tensors("sums", self.restored["engine"].get("staleness", {}).get("sums", {}))
                self._engine.load_state_dict(self.restored["engine"])
                self._engine.data.streams.add_shards(self.restored.get("shards", {}))
        self._engine.resume_at(epoch, step)
        engine = self._engine
        if isinstance(self.stream, SampleStream):
            engine.shard_stream(self.stream, planner=planner, epoch=epoch)
        elif isinstance(self.stream, LoaderSet):
            engine.shard_units(self.stream, planner=planner, epoch=epoch, dataset=self._dataset)
        else:
            engine.shard(
                self.stream,
                self._batch_size,
                drop_last=self._drop_last,
                planner=planner,
                epoch=epoch,
                dataset=self._dataset,
            )

    def load(self, state: dict[str, Any]) -> None:
        """Take the state that the first pass resumes from.

        Raises:
            DamagedCheckpointError: if it has changed since it was saved.
            CheckpointStateError: if it lacks something.
        """
        for key in (CHECKSUMS, INTERVAL_CHECKSUMS):
            check_checksums(state, "the session", key)
        with reading_state("the session"):
            for name in ("epoch", "step"):
                check_int(name, state[name], minimum=0)
        self.restored = state
        self._restore_order()

    def begin_pass(self, step: int) -> dict[str, Any]:
        """Drop the loaded state; return its interval since the last sync round, if the pass begins where it ends.

        Args:
            step: step at which the pass begins.
        """
        interval: dict[str, Any] = {}
        if self.restored is not None and step == self.restored_step:
            interval = self.restored.get("interval", {})
        self.restored = None
        return interval

    def _restore_order(self) -> None:
        """Restore the order of the samples in the run of the loaded state."""
        if self.restored is None:
            return
        with reading_state("the order of the samples"):
            order = self.restored["stream"]
            if order is not None and isinstance(self.stream, SavedStream):
                self.stream.load_state_dict(order, int(self.restored["epoch"]))

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """Return a position, the state of the engine, and the order of the pass as far as it has to be saved."""
        order = self.stream.state_dict(epoch) if isinstance(self.stream, SavedStream) else None
        return {"epoch": epoch, "step": step, "engine": self._engine.state_dict(), "stream": order}
