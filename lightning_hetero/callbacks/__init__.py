"""Policies as Lightning callbacks: they read observations and propose plans to the strategy.

``PerfModelCallback``, ``DynamicBatchPIDCallback`` and ``AdaptiveBatchCallback`` exclude each other. The strategy
installs the one that its ``policy`` names; a callback of the user's takes its place. ``GNSCallback`` measures and
decides nothing.
"""

from lightning_hetero.callbacks.adaptive_batch import AdaptiveBatchCallback
from lightning_hetero.callbacks.noise_scale import GNSCallback
from lightning_hetero.callbacks.policy import (
    DynamicBatchPIDCallback,
    PerfModelCallback,
    PolicyCallback,
    policy_callback,
)

__all__ = [
    "AdaptiveBatchCallback",
    "DynamicBatchPIDCallback",
    "GNSCallback",
    "PerfModelCallback",
    "PolicyCallback",
    "policy_callback",
]
