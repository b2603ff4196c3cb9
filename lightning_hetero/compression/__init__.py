"""Block top-k gradient compression: reference, selectors, values, messages, and the fast paths."""

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.compression.encoder_protocol import BlockEncoder, DeviceEncoder, HostEncoder
from lightning_hetero.compression.host.encoder import TorchEncoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.reference import Pack, block_scores, compress, merge, select_exact
from lightning_hetero.compression.selectors import SELECT
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import Automatic, BlockTopK, HalfPrecision, LowRank, parse_compression

__all__ = [
    "SELECT",
    "Automatic",
    "BlockEncoder",
    "BlockGradient",
    "BlockTopK",
    "DeviceEncoder",
    "HalfPrecision",
    "HostEncoder",
    "Layout",
    "LowRank",
    "MessageFormat",
    "Pack",
    "TorchEncoder",
    "block_scores",
    "compress",
    "merge",
    "parse_compression",
    "select_exact",
]
