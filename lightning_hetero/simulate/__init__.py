"""Emulation of unequal hardware on one machine, and simulation of clusters; training does not need it."""

from lightning_hetero.simulate.cluster.changes import Join, Leave
from lightning_hetero.simulate.cluster.control.noise_trajectory import NoiseTrajectory
from lightning_hetero.simulate.cluster.elastic import ElasticSimulator
from lightning_hetero.simulate.cluster.result import SimulationResult
from lightning_hetero.simulate.cluster.simulator import ClusterSimulator
from lightning_hetero.simulate.cluster.truth.link_profile import LinkProfile
from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.thin_link import ThinLink
from lightning_hetero.simulate.throttle import Throttle

__all__ = [
    "ClusterSimulator",
    "DeviceProfile",
    "ElasticSimulator",
    "Join",
    "Leave",
    "LinkProfile",
    "NoiseTrajectory",
    "SimulationResult",
    "ThinLink",
    "Throttle",
]
