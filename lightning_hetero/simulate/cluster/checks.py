"""Checks of what a simulation is given."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.policies import POLICIES
from lightning_hetero.core.policies.base import Planner, check_planner
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.validation import check_choice, check_number
from lightning_hetero.simulate.cluster.truth.messages import MessageExchange
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.devices.device_profile import Device

__all__ = ["checked_capacities", "checked_devices", "checked_names", "checked_policy", "exchange_of"]


def exchange_of(compression: Any, staleness: int, cluster: ClusterState) -> MessageExchange:
    """Return the exchange of compressed gradients."""
    if not isinstance(compression, BlockTopK):
        raise TypeError(f"compression={compression!r} must be BlockTopK settings, such as BlockTopK(density=0.01).")
    if cluster.size < 2:
        raise ValueError("compression needs two workers at least: one sends nothing. Leave it out.")
    return MessageExchange(compression, cluster.link, cluster.size, stale=bool(staleness))


def checked_devices(devices: Any) -> tuple[Device, ...]:
    """Return the profiles of at least one device."""
    found = tuple(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else ()
    if not found or not all(callable(getattr(device, "times", None)) for device in found):
        raise TypeError(
            f"devices={devices!r} must be a list of one DeviceProfile per worker, such as [fast, slow], or of objects "
            "whose times(batch_size) gives the seconds outside of the backward pass and in it."
        )
    return found


def checked_names(devices: Sequence[Device], names: Sequence[str] | None) -> tuple[str, ...]:
    """Return one name for each device, all of them different."""
    if names is None:
        return tuple(f"{getattr(device, 'name', '') or 'device'} {i}" for i, device in enumerate(devices))
    if len(set(names)) != len(devices) or len(names) != len(devices):
        raise ValueError(f"names={list(names)!r} must be {len(devices)} different strings, one for each device.")
    return tuple(names)


def checked_capacities(devices: Sequence[Device], capacities: Sequence[float]) -> tuple[float, ...]:
    """Return one capacity for each device, or none at all."""
    if len(capacities) not in (0, len(devices)):
        raise ValueError(f"capacities has {len(capacities)} entries for {len(devices)} devices; give one for each.")
    return tuple(
        check_number(f"capacities[{i}]", capacity, low=0.0, include_low=False) for i, capacity in enumerate(capacities)
    )


def checked_policy(policy: Any, total: int) -> Planner | None:
    """Return the planner of a policy, as a run begins with it."""
    if isinstance(policy, str):
        check_choice("policy", policy, tuple(POLICIES))
        entry = POLICIES[policy]
        if entry.needs:
            raise ValueError(
                f"policy={policy!r} needs {', '.join(entry.needs)}; give its planner instead, such as "
                "policy=GoodputPlanner(max_total_batch_size=4096)."
            )
        planner = entry.factory()
    else:
        planner = None if policy is None else check_planner(policy)
    if isinstance(planner, GoodputPlanner) and planner.initial_total is None:
        planner = replace(planner, initial_total=total)
    return planner
