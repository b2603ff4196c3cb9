"""Connection of gradient compression to the optimizers and the precision of a framework."""

from typing import Any

from lightning_hetero.comm.compressors.manager import GradientCompression

__all__ = ["clip_blocks", "lead_optimizers"]


def lead_optimizers(strategy: Any) -> None:
    """Let a strategy's optimizer take sparse steps, if the settings ask for them.

    Raises:
        MisconfigurationException: under manual optimization.
        ValueError: if the optimizer has no sparse steps.
    """
    compression = strategy.engine.compression
    if compression is None:
        return
    if compression.sparse and not strategy.lightning_module.automatic_optimization:
        raise strategy._misconfiguration(
            "sparse_optimizer and manual optimization: a step that takes another gradient than that of the backward "
            "pass before it would miss the blocks. Use automatic optimization, or set sparse_optimizer=False."
        )
    compression.bind_optimizers(strategy.optimizers)
    clip_blocks(strategy.precision_plugin, compression)


def clip_blocks(precision: Any, compression: GradientCompression) -> None:
    """Let a precision plugin clip sparse gradients by their values; torch's clipping has no form for them."""
    plain = type(precision).main_params
    precision.main_params = lambda optimizer: compression.clip_targets(plain(precision, optimizer))
