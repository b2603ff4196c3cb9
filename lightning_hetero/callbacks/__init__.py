"""Policies as Lightning callbacks: they read observations and propose plans to the strategy.

``PerfModelCallback``, ``DynamicBatchPIDCallback``, ``AdaptiveBatchCallback`` and ``TTACallback`` exclude each other.
The strategy installs the one that its ``policy`` names, unless the user gives one of them. ``GNSCallback`` only
measures; ``LookAheadCallback`` computes stale gradients at the weights to which they will be applied.
"""

from lightning_hetero.callbacks.adaptive_batch import AdaptiveBatchCallback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.callbacks.noise_scale import GNSCallback
from lightning_hetero.callbacks.perf_model import PerfModelCallback
from lightning_hetero.callbacks.pid import DynamicBatchPIDCallback
from lightning_hetero.callbacks.table import policy_callback
from lightning_hetero.callbacks.time_to_accuracy import TTACallback
from lightning_hetero.callbacks.weight_prediction import LookAheadCallback

__all__ = [
    "AdaptiveBatchCallback",
    "DynamicBatchPIDCallback",
    "GNSCallback",
    "LookAheadCallback",
    "PerfModelCallback",
    "PolicyCallback",
    "TTACallback",
    "policy_callback",
]
