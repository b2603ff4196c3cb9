"""Block top-k gradient compression: reference, selectors, values, messages, and the fast paths."""

from lightning_hetero.compression.host.encoder import BlockEncoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.reference import Pack, block_scores, compress, merge, select_exact
from lightning_hetero.compression.selectors import SELECT
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import BlockTopK, parse_compression

__all__ = [
    "SELECT",
    "BlockEncoder",
    "BlockTopK",
    "Layout",
    "MessageFormat",
    "Pack",
    "block_scores",
    "compress",
    "merge",
    "parse_compression",
    "select_exact",
]
