"""Connects gradient compression to what Lightning's DDP strategy knows: module, loss scaler, unused parameters."""

from typing import Any

__all__ = ["attach_compression"]


def attach_compression(strategy: Any) -> None:
    """Compress the gradients of a strategy's module, if it was asked to; a collective call."""
    compression = strategy.engine.compression
    if compression is None:
        return
    scaler = getattr(strategy.precision_plugin, "scaler", None)
    compression.attach(
        strategy.lightning_module,
        grad_scale=None if scaler is None else scaler.get_scale,
        hold_unused=bool(strategy._ddp_kwargs.get("find_unused_parameters", False)),
    )
