"""Workers that join and leave a simulated training, each by a restart from its checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.simulate.devices.device_profile import Device

__all__ = ["Join", "Leave", "WorkerChange", "checked_changes"]


@checked_keywords
@dataclass(frozen=True)
class Join:
    """A device that joins.

    Args:
        step: from which step on, ``>= 0``.
        device: its profile, whose slowdowns count from its own first pass, or any other device.
        name: its hardware identity; by default the profile's name and the step.
        capacity: its peak FLOP/s, where a simulation is given those of its workers.

    Example:
        >>> from lightning_hetero.simulate import DeviceProfile
        >>> Join(100, DeviceProfile(0.001, 0, 0.002, 0, name="A100")).identity
        'A100 of step 100'
    """

    step: int
    device: Device
    name: str | None = None
    capacity: float | None = None

    def __post_init__(self) -> None:
        check_int("step", self.step, minimum=0)
        if self.capacity is not None:
            check_number("capacity", self.capacity, low=0.0, include_low=False)
        if not callable(getattr(self.device, "times", None)):
            raise TypeError(f"device={self.device!r} of a Join must be a DeviceProfile, or have times(batch_size).")

    @property
    def identity(self) -> str:
        """Hardware identity of the device."""
        return self.name or f"{getattr(self.device, 'name', '') or 'device'} of step {self.step}"


@checked_keywords
@dataclass(frozen=True)
class Leave:
    """A worker that leaves.

    Args:
        step: from which step on, ``>= 0``.
        name: its hardware identity.

    Example:
        >>> Leave(100, "device 0").name
        'device 0'
    """

    step: int
    name: str

    def __post_init__(self) -> None:
        check_int("step", self.step, minimum=0)


WorkerChange = Join | Leave


def checked_changes(
    names: Sequence[str], changes: Sequence[WorkerChange], capacities: bool = False
) -> tuple[WorkerChange, ...]:
    """Return the changes in order, after a check that each can happen.

    Args:
        names: hardware identity of each worker at the beginning.
        changes: in any order.
        capacities: whether the capacities of these workers are known.

    Raises:
        TypeError: if one is neither a :class:`Join` nor a :class:`Leave`.
        ValueError: if a worker joins twice, leaves that is not there, or none would be left, or if the capacities of
            some workers only are known.

    Example:
        >>> [change.step for change in checked_changes(["a", "b"], [Leave(9, "b"), Leave(3, "a")][:1])]
        [9]
    """
    for change in changes:
        if not isinstance(change, Join | Leave):
            raise TypeError(f"events={list(changes)!r} must be Join and Leave objects, such as Leave(100, 'device 0').")
    ordered = tuple(sorted(changes, key=lambda change: change.step))
    there = list(names)
    for change in ordered:
        if isinstance(change, Join):
            if change.identity in there:
                raise ValueError(f"{change.identity!r} joins at step {change.step} and is there already; name it anew.")
            if (change.capacity is not None) != capacities:
                raise ValueError(
                    f"{change.identity!r} joins with capacity={change.capacity!r}; give the capacity of all workers "
                    "(capacities= of the simulator, capacity= of each Join) or of none."
                )
            there.append(change.identity)
        elif change.name not in there:
            raise ValueError(f"{change.name!r} leaves at step {change.step}; there are only {', '.join(there)}.")
        else:
            there.remove(change.name)
            if not there:
                raise ValueError(f"nobody is left when {change.name!r} leaves at step {change.step}; keep one worker.")
    return ordered
