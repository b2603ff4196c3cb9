"""Emulation of unequal hardware on one machine, for demonstrations and tests; training does not need it."""

from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.thin_link import ThinLink
from lightning_hetero.simulate.throttle import Throttle

__all__ = ["DeviceProfile", "ThinLink", "Throttle"]
