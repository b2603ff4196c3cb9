"""Timings of all workers over some steps, in the form that planners and users get."""

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["StepObservations"]

Array = npt.NDArray[np.float64]


@checked_keywords
@dataclass(frozen=True)
class StepObservations:
    """Timings of all workers over some steps; every array but the last two has the shape ``(steps, workers)``.

    Each worker measures with its own clock. Only the times of synchronization include waiting for other workers. In an
    accumulation window, the times of data, forward, backward and optimizer are means over its micro-batches.

    Args:
        local_batch_sizes: samples that each worker ran.
        forward: seconds of the forward pass, and of everything in a step that no other field covers.
        backward: ``P_i``, seconds from the start of the backward pass to the last gradient.
        first_bucket: seconds from the start of the backward pass until the first bucket is ready.
        overlapped_sync: seconds of synchronizing all buckets but the last, waiting for others included.
        last_sync: seconds of synchronizing the last bucket, waiting for others included.
        step_time: seconds from the end of one synchronization to the end of the next; NaN if anything but a step came
            between them.
        data_wait: seconds for which the device was idle until the loader gave the batch; 0 by default.
        optimizer: seconds of the optimizer's step, without the passes of a closure inside it; 0 by default.
        bucket_ends: seconds from the start of the backward pass until each bucket is averaged, shape
            ``(steps, workers, buckets)``, in the order in which they are ready; NaN for a bucket that a step did not
            have; no buckets by default. With several synchronized backward passes, the last one counts.
        work: features of each worker's work, shape ``(steps, workers, features)``, where the number of samples does
            not say how much it was; the mean over the micro-batches of an accumulation window. No features by default;
            with them, ``local_batch_sizes`` holds the sizes of the plan.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> StepObservations.empty(3).num_steps
        0
    """

    local_batch_sizes: Array
    forward: Array
    backward: Array
    first_bucket: Array
    overlapped_sync: Array
    last_sync: Array
    step_time: Array
    data_wait: Array = None  # type: ignore[assignment]
    optimizer: Array = None  # type: ignore[assignment]
    bucket_ends: Array = None  # type: ignore[assignment]
    work: Array = None  # type: ignore[assignment]

    FIELDS = (
        "local_batch_sizes",
        "forward",
        "backward",
        "first_bucket",
        "overlapped_sync",
        "last_sync",
        "step_time",
        "data_wait",
        "optimizer",
    )

    def __post_init__(self) -> None:
        for name, shape in (("data_wait", ()), ("optimizer", ()), ("bucket_ends", (0,)), ("work", (0,))):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros((*self.forward.shape, *shape)))
        shapes = {getattr(self, name).shape for name in self.FIELDS}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(f"all observations must have one shape (steps, workers); got {sorted(shapes)}.")
        for name, last in (("bucket_ends", "buckets"), ("work", "features")):
            if getattr(self, name).shape[:-1] != self.forward.shape:
                raise ValueError(
                    f"{name} must have the shape (steps, workers, {last}), of which {self.forward.shape} are the "
                    f"first two; got {getattr(self, name).shape}."
                )

    @classmethod
    def from_array(cls, values: Array, features: int = 0) -> "StepObservations":
        """Read an array of shape ``(steps, workers, 9 + buckets + features)``.

        Args:
            values: :attr:`FIELDS`, then the ends of the buckets, then the features of the work.
            features: number of the latter.
        """
        count, end = len(cls.FIELDS), values.shape[2] - features
        fields = {name: values[:, :, i] for i, name in enumerate(cls.FIELDS)}
        return cls(**fields, bucket_ends=values[:, :, count:end], work=values[:, :, end:])

    @classmethod
    def empty(cls, workers: int) -> "StepObservations":
        """Return observations of ``workers`` workers without a single step."""
        return cls.from_array(np.zeros((0, workers, len(cls.FIELDS))))

    @property
    def num_steps(self) -> int:
        """Number of observed steps."""
        return int(self.forward.shape[0])

    def rows(self, which: slice | npt.NDArray[np.bool_]) -> "StepObservations":
        """Return the observations of some steps.

        Example:
            >>> StepObservations.empty(3).rows(slice(2, None)).num_steps
            0
        """
        return replace(self, **{one.name: getattr(self, one.name)[which] for one in fields(self)})

    def followed_by(self, newer: "StepObservations") -> "StepObservations":
        """Return the observations of both, without the ends of buckets, of which steps may have different numbers.

        Example:
            >>> ones = StepObservations(*[np.ones((2, 3))] * 7)
            >>> ones.followed_by(ones).num_steps
            4
        """
        names = (*self.FIELDS, "work")
        return StepObservations(**{name: np.concatenate([getattr(self, name), getattr(newer, name)]) for name in names})

    def splits(self) -> list[tuple[Array, slice]]:
        """Return each stretch of steps at one split: its sizes, and the slice of its steps.

        Example:
            >>> sizes = np.array([[2.0, 2.0], [2.0, 2.0], [3.0, 1.0]])
            >>> [(split.tolist(), own) for split, own in StepObservations(*[sizes] * 7).splits()]
            [([2.0, 2.0], slice(0, 2, None)), ([3.0, 1.0], slice(2, 3, None))]
        """
        sizes = self.local_batch_sizes
        if len(sizes) == 0:
            return []
        starts = [0, *(np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1).tolist()]
        return [(sizes[i], slice(i, j)) for i, j in zip(starts, [*starts[1:], len(sizes)], strict=True)]

    @property
    def outside_backward(self) -> Array:
        """``a_i`` of every step and worker, for loading, forward pass and update."""
        return self.data_wait + self.forward + self.optimizer

    @property
    def compute(self) -> Array:
        """``a_i + P_i`` of every step and worker."""
        return self.outside_backward + self.backward
