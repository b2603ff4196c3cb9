"""Count the micro-batches of an accumulation window in a loop that nobody but the user knows."""

from lightning_hetero.engine import HeteroEngine

__all__ = ["SessionSteps"]


class SessionSteps:
    """The step that runs, and how many of them the window that it belongs to has had so far.

    Args:
        engine: of the run.
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
        """End the step whose batch was handed out last; count the micro-batches of a window that is complete.

        Args:
            epoch: pass over the data.
            step: steps of it whose batches were handed out.
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
