"""Block top-k: send the blocks of a gradient with the largest norms, keep the rest for later steps (S sec. 3.2)."""

from lightning_hetero.comm.compressors.block_topk.averager import BlockTopKAverager

__all__ = ["BlockTopKAverager"]
