"""Emulated and simulated hardware: devices of exactly known speed, stragglers, slow links; training does not need it.

The names below are imported on first use: a simulation needs no trainer.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.simulate.cluster.changes import Join as Join
    from lightning_hetero.simulate.cluster.changes import Leave as Leave
    from lightning_hetero.simulate.cluster.control.noise_trajectory import NoiseTrajectory as NoiseTrajectory
    from lightning_hetero.simulate.cluster.elastic import ElasticSimulator as ElasticSimulator
    from lightning_hetero.simulate.cluster.link_profile import LinkProfile as LinkProfile
    from lightning_hetero.simulate.cluster.result import SimulationResult as SimulationResult
    from lightning_hetero.simulate.cluster.simulator import ClusterSimulator as ClusterSimulator
    from lightning_hetero.simulate.devices.catalog import PublishedDevice as PublishedDevice
    from lightning_hetero.simulate.devices.catalog import PublishedWorkload as PublishedWorkload
    from lightning_hetero.simulate.devices.catalog import cluster_profiles as cluster_profiles
    from lightning_hetero.simulate.devices.catalog import device_profile as device_profile
    from lightning_hetero.simulate.devices.catalog import published_clusters as published_clusters
    from lightning_hetero.simulate.devices.catalog import published_devices as published_devices
    from lightning_hetero.simulate.devices.catalog import workloads as workloads
    from lightning_hetero.simulate.devices.device_profile import Device as Device
    from lightning_hetero.simulate.devices.device_profile import DeviceProfile as DeviceProfile
    from lightning_hetero.simulate.devices.emulated_device import EmulatedDevice as EmulatedDevice
    from lightning_hetero.simulate.devices.lightning_callback import EmulatedDeviceCallback as EmulatedDeviceCallback
    from lightning_hetero.simulate.planning.answer import Epoch as Epoch
    from lightning_hetero.simulate.planning.answer import LinkAnswer as LinkAnswer
    from lightning_hetero.simulate.planning.answer import PlanAnswer as PlanAnswer
    from lightning_hetero.simulate.planning.answer import WorkerAnswer as WorkerAnswer
    from lightning_hetero.simulate.planning.cluster import Cluster as Cluster
    from lightning_hetero.simulate.planning.cluster import Link as Link
    from lightning_hetero.simulate.planning.cluster import Worker as Worker
    from lightning_hetero.simulate.planning.cluster_file import Given as Given
    from lightning_hetero.simulate.planning.cluster_file import read_cluster as read_cluster
    from lightning_hetero.simulate.planning.figures import plan_cluster as plan_cluster
    from lightning_hetero.simulate.planning.learned import LearnedAnswer as LearnedAnswer
    from lightning_hetero.simulate.planning.learned import simulate_cluster as simulate_cluster
    from lightning_hetero.simulate.planning.recorded import record as record
    from lightning_hetero.simulate.thin_link import ThinLink as ThinLink
    from lightning_hetero.simulate.throttle import Throttle as Throttle

_EXPORTS = {
    "Cluster": "lightning_hetero.simulate.planning.cluster",
    "ClusterSimulator": "lightning_hetero.simulate.cluster.simulator",
    "Device": "lightning_hetero.simulate.devices.device_profile",
    "DeviceProfile": "lightning_hetero.simulate.devices.device_profile",
    "ElasticSimulator": "lightning_hetero.simulate.cluster.elastic",
    "EmulatedDevice": "lightning_hetero.simulate.devices.emulated_device",
    "EmulatedDeviceCallback": "lightning_hetero.simulate.devices.lightning_callback",
    "Epoch": "lightning_hetero.simulate.planning.answer",
    "Given": "lightning_hetero.simulate.planning.cluster_file",
    "Join": "lightning_hetero.simulate.cluster.changes",
    "LearnedAnswer": "lightning_hetero.simulate.planning.learned",
    "Leave": "lightning_hetero.simulate.cluster.changes",
    "Link": "lightning_hetero.simulate.planning.cluster",
    "LinkAnswer": "lightning_hetero.simulate.planning.answer",
    "LinkProfile": "lightning_hetero.simulate.cluster.link_profile",
    "NoiseTrajectory": "lightning_hetero.simulate.cluster.control.noise_trajectory",
    "PlanAnswer": "lightning_hetero.simulate.planning.answer",
    "PublishedDevice": "lightning_hetero.simulate.devices.catalog",
    "PublishedWorkload": "lightning_hetero.simulate.devices.catalog",
    "SimulationResult": "lightning_hetero.simulate.cluster.result",
    "ThinLink": "lightning_hetero.simulate.thin_link",
    "Throttle": "lightning_hetero.simulate.throttle",
    "Worker": "lightning_hetero.simulate.planning.cluster",
    "WorkerAnswer": "lightning_hetero.simulate.planning.answer",
    "cluster_profiles": "lightning_hetero.simulate.devices.catalog",
    "device_profile": "lightning_hetero.simulate.devices.catalog",
    "plan_cluster": "lightning_hetero.simulate.planning.figures",
    "published_clusters": "lightning_hetero.simulate.devices.catalog",
    "published_devices": "lightning_hetero.simulate.devices.catalog",
    "read_cluster": "lightning_hetero.simulate.planning.cluster_file",
    "record": "lightning_hetero.simulate.planning.recorded",
    "simulate_cluster": "lightning_hetero.simulate.planning.learned",
    "workloads": "lightning_hetero.simulate.devices.catalog",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
