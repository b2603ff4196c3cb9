"""Data-parallel training on unequal workers, as a strategy for Lightning: ``Trainer(strategy="hetero_ddp")``.

Importing the package registers the strategy's names; the public names below are imported when they are first used, so
that neither torch nor Lightning is loaded before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from _lightning_hetero_autoload import boot

if TYPE_CHECKING:
    from lightning_hetero.callbacks import (
        AdaptiveBatchCallback,
        DynamicBatchPIDCallback,
        GNSCallback,
        LookAheadCallback,
        PerfModelCallback,
        TTACallback,
    )
    from lightning_hetero.compression import BlockTopK
    from lightning_hetero.core import BatchPlan, ClusterTimeModel, NodeTimeModel, solve_optperf
    from lightning_hetero.strategies.lightning_ddp import HeteroDDPStrategy
    from lightning_hetero.strategies.lightning_elastic import HeteroElasticStrategy

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatchCallback",
    "BatchPlan",
    "BlockTopK",
    "ClusterTimeModel",
    "DynamicBatchPIDCallback",
    "GNSCallback",
    "HeteroDDPStrategy",
    "HeteroElasticStrategy",
    "LookAheadCallback",
    "NodeTimeModel",
    "PerfModelCallback",
    "TTACallback",
    "__version__",
    "solve_optperf",
]

_HOMES = {
    "AdaptiveBatchCallback": "lightning_hetero.callbacks",
    "BatchPlan": "lightning_hetero.core",
    "BlockTopK": "lightning_hetero.compression",
    "ClusterTimeModel": "lightning_hetero.core",
    "DynamicBatchPIDCallback": "lightning_hetero.callbacks",
    "GNSCallback": "lightning_hetero.callbacks",
    "HeteroDDPStrategy": "lightning_hetero.strategies.lightning_ddp",
    "HeteroElasticStrategy": "lightning_hetero.strategies.lightning_elastic",
    "LookAheadCallback": "lightning_hetero.callbacks",
    "NodeTimeModel": "lightning_hetero.core",
    "PerfModelCallback": "lightning_hetero.callbacks",
    "TTACallback": "lightning_hetero.callbacks",
    "solve_optperf": "lightning_hetero.core",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


boot()
