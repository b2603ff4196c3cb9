"""Emulated and simulated hardware: devices of exactly known speed, stragglers, slow links; training does not need it.

The names below are imported on first use: a simulation needs no trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.simulate.cluster.link_profile import LinkProfile as LinkProfile
    from lightning_hetero.simulate.cluster.result import SimulationResult as SimulationResult
    from lightning_hetero.simulate.cluster.simulator import ClusterSimulator as ClusterSimulator
    from lightning_hetero.simulate.devices.device_profile import DeviceProfile as DeviceProfile
    from lightning_hetero.simulate.devices.emulated_device import EmulatedDevice as EmulatedDevice
    from lightning_hetero.simulate.devices.lightning_callback import EmulatedDeviceCallback as EmulatedDeviceCallback
    from lightning_hetero.simulate.thin_link import ThinLink as ThinLink
    from lightning_hetero.simulate.throttle import Throttle as Throttle

_EXPORTS = {
    "LinkProfile": "lightning_hetero.simulate.cluster.link_profile",
    "SimulationResult": "lightning_hetero.simulate.cluster.result",
    "ClusterSimulator": "lightning_hetero.simulate.cluster.simulator",
    "DeviceProfile": "lightning_hetero.simulate.devices.device_profile",
    "EmulatedDevice": "lightning_hetero.simulate.devices.emulated_device",
    "EmulatedDeviceCallback": "lightning_hetero.simulate.devices.lightning_callback",
    "ThinLink": "lightning_hetero.simulate.thin_link",
    "Throttle": "lightning_hetero.simulate.throttle",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
