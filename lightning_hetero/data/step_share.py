"""Share of each rank in one step, and the interface of all samplers that an engine can run."""

from typing import Any, NamedTuple, Protocol

__all__ = ["StepSampler", "StepShare"]


class StepShare(NamedTuple):
    """Samples of every rank in a step, and the work that this rank's samples are.

    Args:
        sizes: samples of every rank; ``()`` where a rank knows only its own batch, so that weights come from counts.
        regular: ``True`` for a full step, whose times a planner may use; ``False`` for a ragged tail.
        planned: samples that the plan gives this rank, where its batch is not of that size; ``None`` where it is.
        work: features of this rank's work, such as its tokens, equally many on all ranks; ``()`` where the number of
            samples says how much work a batch is.
        counted: samples of this rank that count, where ``sizes`` is ``()``.

    Example:
        >>> StepShare((6, 2), True).own(1), StepShare((), True, counted=5).own(1)
        (2, 5)
    """

    sizes: tuple[int, ...]
    regular: bool
    planned: int | None = None
    work: tuple[float, ...] = ()
    counted: int = 0

    def own(self, rank: int) -> int:
        """Return the samples of this rank that count."""
        return self.sizes[rank] if self.sizes else self.counted


class StepSampler(Protocol):
    """Sampler of one rank: how many samples every rank takes at each step, and up to where batches are drawn."""

    start: tuple[int, int]
    drawn: tuple[int, int]
    stream: Any

    @property
    def min_local(self) -> int:
        """Smallest batch that a rank can run."""

    @property
    def drop_last(self) -> bool:
        """True if the ragged last batch is dropped."""

    def __len__(self) -> int:
        """Return the steps of the coming epoch."""

    def __iter__(self) -> Any:
        """Begin a pass over the coming epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch at the next ``iter``."""

    def num_batches(self, epoch: int) -> int:
        """Return the steps of an epoch, the same on every rank."""

    def step_at(self, epoch: int, step: int) -> StepShare:
        """Return what each rank takes of a step."""

    def sizes_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the samples of every rank at a step."""

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position at which an epoch can resume."""

    def taken(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return what the steps before a position have taken, as far as the plans do not tell; plain values."""
