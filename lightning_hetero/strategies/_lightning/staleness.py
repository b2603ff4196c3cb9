"""Connection of stale gradients to Lightning's DDP strategy: its module, precision and communication hook."""

from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.comm.staleness.base import MeasuredStaleness
from lightning_hetero.comm.staleness.block_topk import BlockTopKStaleAverager
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.frontend.log import log
from lightning_hetero.frontend.model_setup import loss_scaler

if TYPE_CHECKING:
    from lightning_hetero.strategies._lightning.ddp import HeteroDDPMixin

__all__ = ["attach_staleness"]


def attach_staleness(strategy: "HeteroDDPMixin") -> None:
    """Set up stale gradients for a strategy's module, if the settings ask for them; a collective call.

    With ``staleness=0`` it only takes over what a run with stale gradients left in its checkpoint. A probe training
    runs without staleness if its script does not allow it.

    Raises:
        MisconfigurationException: if a stale gradient would be lost, or be applied in the step of another loss.
    """
    engine = strategy.engine
    assert engine is not None
    state, limit = engine.hook_state, engine.config.staleness
    parameters: dict[str, torch.Tensor] = {
        name: p for name, p in strategy._pl_module.named_parameters() if p.requires_grad
    }
    restored, before = state.take_restored(), state.staleness
    state.set_staleness(None)
    topology = None if before is None else before.topology
    earlier = None  # staleness of this module: of a training that was interrupted, or other parameters are trained
    if before is not None and not restored and _of_module(before, strategy._pl_module):
        earlier, restored = before, before.state_dict()
    if not restored.get("sums") and (limit == 0 or engine.world_size == 1):
        return
    reason = _unsupported_reason(strategy, state)
    if reason is not None and strategy._probes:
        log.info("no gradient of this probe training is stale: %s", reason)
        return
    if reason is not None:
        cure = "or set staleness=0" if limit else "or end the run that saved this checkpoint as it was begun"
        raise strategy._misconfiguration(f"{reason}, {cure}.")
    if limit and engine.world_size > 1 and topology is None:
        assert state.topology is not None
        topology = state.topology.with_own_groups()
    limit = limit if engine.world_size > 1 else 0
    settings: dict[str, Any] = {
        "clock": engine.observer.clock,
        "hysteresis": 0.03 if engine.config.hysteresis is None else engine.config.hysteresis,
        "topology": topology,
        "restored": restored,
        "hold": state.hold,
    }
    averager: MeasuredStaleness
    blocks = None if engine.compression is None else engine.compression.blocks
    if blocks is not None:
        averager = BlockTopKStaleAverager(limit, blocks, parameters, **settings)
    else:
        averager = DenseStaleAverager(
            limit,
            parameters,
            world_size=engine.world_size,
            synchronous=state.topology,
            priority=engine.config.transfer_priority,
            **settings,
        )
    if earlier is not None and earlier.parameters.keys() != parameters.keys():
        averager.follow(earlier)
    state.set_staleness(averager)


def _of_module(before: StaleAverager, module: torch.nn.Module) -> bool:
    """Return whether the gradients in flight belong to this module, whichever of its parameters are trained now."""
    there = dict(module.named_parameters())
    return all(there.get(name) is p for name, p in before.parameters.items())


def _unsupported_reason(strategy: "HeteroDDPMixin", state: HookState) -> str | None:
    """Return the reason why gradients cannot be stale here, ``None`` if they can."""
    module = strategy._pl_module
    if not module.automatic_optimization:
        return (
            "staleness=1 and manual optimization: a stale gradient could reach the step of another loss. Use "
            "automatic optimization"
        )
    if not state.averager.may_be_stale:
        return (
            "staleness=1 sends gradients by itself, and so does the communication hook or compressor that is given as "
            "well. Of compressors, only block_topk can be stale: use compression='block_topk', keep one of them"
        )
    if strategy._ddp_kwargs.get("find_unused_parameters", False):
        return (
            "staleness=1 and find_unused_parameters=True: the stale gradient of a parameter that is left out in the "
            "next step would be lost. Use all parameters in every step"
        )
    complex_ones = [name for name, p in module.named_parameters() if p.requires_grad and p.is_complex()]
    if complex_ones:
        return (
            f"staleness=1 and complex parameters ({complex_ones[0]}): sums of theirs are kept as real numbers. Make "
            "them real, with torch.view_as_complex where they are used"
        )
    if loss_scaler(strategy.precision_plugin) is not None:
        return "staleness=1 and a loss scaler: a stale gradient carries the scale of the step before. Use bf16-mixed"
    return None
