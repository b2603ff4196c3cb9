"""Count of the micro-batches in an accumulation window, for a custom loop of which only the fetches are known."""

from lightning_hetero.engine import HeteroEngine

__all__ = ["SessionSteps"]


class SessionSteps:
    """The running step, and the number of steps so far in its accumulation window.

    Args:
        engine: engine of the run.
    """

    def __init__(self, engine: HeteroEngine) -> None:
        self._engine = engine
        self._micro = 0
        self._open = False
        self.synced = 0
        """Steps so far at whose end gradients were averaged."""

    def begin(self) -> None:
        """Open a step: its batch is handed out."""
        self._open = True

    def close(self, epoch: int, step: int) -> None:
        """End the step whose batch was handed out last; set the number of micro-batches when a window is complete.

        Args:
            epoch: pass over the data.
            step: number of its batches handed out so far.
        """
        engine = self._engine
        self._micro, self._open = self._micro + self._open, False
        engine.end_step()
        if engine.observer.synced_steps > self.synced:
            assert engine.sampler is not None
            cut = self._micro < engine.accumulation and step >= engine.sampler.num_batches(epoch)
            if not cut:  # by the end of the data
                engine.rounds.accumulate(max(self._micro, 1))
            self.synced, self._micro = engine.observer.synced_steps, 0
