"""The training data of a session: its order, how it is sharded, and where a state that was loaded goes on in it."""

from typing import Any, Protocol, runtime_checkable

from lightning_hetero.core.policies.base import Planner
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.engine import HeteroEngine

__all__ = ["SavedStream", "SessionData"]


@runtime_checkable
class SavedStream(Protocol):
    """A stream whose order cannot be drawn anew, so that it is saved."""

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Order of a pass, and what the later ones are drawn from."""

    def load_state_dict(self, state: dict[str, Any], epoch: int) -> None:
        """Draw the pass as it was drawn, and the later ones as they would have been."""


class SessionData:
    """The data that an engine shards, once it is given, and the state that the first pass over it goes on from.

    Args:
        engine: shards it.
    """

    def __init__(self, engine: HeteroEngine) -> None:
        self._engine = engine
        self.stream: IndexStream | None = None
        self._batch_size, self._drop_last = 0, False
        self.restored: dict[str, Any] | None = None

    @property
    def restored_step(self) -> int:
        """Steps of its pass that the loaded state had behind it; 0 once a pass has begun."""
        return 0 if self.restored is None else int(self.restored["step"])

    def give(self, stream: IndexStream, batch_size: int, *, drop_last: bool) -> None:
        """Take data in place of what was given before, in the order of the loaded state if there is one."""
        self.stream, self._batch_size, self._drop_last = stream, batch_size, drop_last
        self._restore_order()

    def shard(self, planner: Planner | None, epoch: int, step: int) -> None:
        """Split the data from a step on, with the plans of the loaded state if there is one; a collective call."""
        if self.stream is None:
            return
        if self.restored is not None:
            self._engine.data.plans.forget_running()
            self._engine.load_state_dict(self.restored["engine"])
        self._engine.resume_at(epoch, step)
        self._engine.shard(self.stream, self._batch_size, drop_last=self._drop_last, planner=planner, epoch=epoch)

    def load(self, state: dict[str, Any]) -> None:
        """Take the state that the first pass goes on from."""
        self.restored = state
        self._restore_order()

    def begin_pass(self, step: int) -> dict[str, Any]:
        """Let go of the loaded state; return its interval between two sync rounds, if the pass begins in it.

        Args:
            step: of the pass, with which it begins.
        """
        interval: dict[str, Any] = {}
        if self.restored is not None and step == self.restored_step:
            interval = self.restored.get("interval", {})
        self.restored = None
        return interval

    def _restore_order(self) -> None:
        """Draw the samples as they were drawn in the run of the loaded state."""
        order = None if self.restored is None else self.restored["stream"]
        if order is not None and self.restored is not None and isinstance(self.stream, SavedStream):
            self.stream.load_state_dict(order, int(self.restored["epoch"]))

    def order(self, epoch: int) -> dict[str, Any] | None:
        """Return the order of a pass, as far as it has to be saved."""
        return self.stream.state_dict(epoch) if isinstance(self.stream, SavedStream) else None
