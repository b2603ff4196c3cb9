"""Data-parallel training on unequal workers, as a strategy for Lightning: ``Trainer(strategy="hetero_ddp")``.

Importing the package registers the strategy's names. The public names below are imported on first use, which loads
torch and Lightning only when they are needed.
"""

from typing import TYPE_CHECKING

from _lightning_hetero_autoload import boot
from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.callbacks import AdaptiveBatchCallback as AdaptiveBatchCallback
    from lightning_hetero.callbacks import DynamicBatchPIDCallback as DynamicBatchPIDCallback
    from lightning_hetero.callbacks import GNSCallback as GNSCallback
    from lightning_hetero.callbacks import LookAheadCallback as LookAheadCallback
    from lightning_hetero.callbacks import PerfModelCallback as PerfModelCallback
    from lightning_hetero.callbacks import TTACallback as TTACallback
    from lightning_hetero.compression import BlockTopK as BlockTopK
    from lightning_hetero.core import BatchPlan as BatchPlan
    from lightning_hetero.core import ClusterTimeModel as ClusterTimeModel
    from lightning_hetero.core import NodeTimeModel as NodeTimeModel
    from lightning_hetero.core import solve_optperf as solve_optperf
    from lightning_hetero.strategies.lightning_ddp import HeteroDDPStrategy as HeteroDDPStrategy
    from lightning_hetero.strategies.lightning_elastic import HeteroElasticStrategy as HeteroElasticStrategy
    from lightning_hetero.strategies.lightning_fsdp import HeteroFSDPStrategy as HeteroFSDPStrategy

__version__ = "0.2.0"

_EXPORTS = {
    "AdaptiveBatchCallback": "lightning_hetero.callbacks",
    "BatchPlan": "lightning_hetero.core",
    "BlockTopK": "lightning_hetero.compression",
    "ClusterTimeModel": "lightning_hetero.core",
    "DynamicBatchPIDCallback": "lightning_hetero.callbacks",
    "GNSCallback": "lightning_hetero.callbacks",
    "HeteroDDPStrategy": "lightning_hetero.strategies.lightning_ddp",
    "HeteroElasticStrategy": "lightning_hetero.strategies.lightning_elastic",
    "HeteroFSDPStrategy": "lightning_hetero.strategies.lightning_fsdp",
    "LookAheadCallback": "lightning_hetero.callbacks",
    "NodeTimeModel": "lightning_hetero.core",
    "PerfModelCallback": "lightning_hetero.callbacks",
    "TTACallback": "lightning_hetero.callbacks",
    "solve_optperf": "lightning_hetero.core",
}
"""Public names, and the modules that they are imported from."""

__all__ = ["__version__", *_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)

boot()
