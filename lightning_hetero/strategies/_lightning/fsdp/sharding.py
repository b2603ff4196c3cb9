"""Default sharding of a module that does not shard itself: blocks of its networks, then the networks, by FSDP2."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard
except ImportError as error:  # torch 2.5
    raise ImportError("strategy='hetero_fsdp' shards models by FSDP2 (fully_shard), from torch 2.6 on.") from error

__all__ = ["blocks_of", "free_gathered", "is_sharded", "networks_of", "shard_module", "spread_from_first", "stand_in"]


def is_sharded(module: nn.Module) -> bool:
    """Return whether the module or one of its sub-modules is sharded by FSDP2."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def free_gathered(module: nn.Module) -> None:
    """Free the parameters that an evaluation has left gathered, so that the module has its shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def networks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the networks of a module by name: its children that have parameters and a forward pass.

    Of an ``nn.ModuleList`` or ``nn.ModuleDict``, which have no forward pass, the members are networks. Nor has an
    ``nn.ParameterList`` or ``nn.ParameterDict``, so it is none.

    Raises:
        ValueError: if a parameter is outside of all networks, or shared by two of them.

    Example:
        >>> gan = nn.ModuleDict({"generator": nn.Linear(2, 3), "loss": nn.MSELoss(), "critic": nn.Linear(3, 1)})
        >>> list(networks_of(gan))
        ['generator', 'critic']
    """
    found = dict(_networks(module, ""))
    owners: dict[nn.Parameter, str] = {}
    for name, network in found.items():
        for parameter in network.parameters():
            first = owners.setdefault(parameter, name)
            if first != name:
                raise ValueError(
                    f"{first} and {name} share a parameter, which would be sharded twice and trained apart. Make them "
                    "parts of one nn.Module, or call fully_shard([first, second]) on them in configure_model."
                )
    alone = [name for name, p in module.named_parameters() if p.requires_grad and p not in owners]
    if alone:
        raise ValueError(
            f"the parameter {alone[0]} belongs to the LightningModule itself, or to a container without a forward "
            "pass, so that no forward pass gathers its shards. Make it part of an nn.Module that uses it in forward, "
            "or shard the model in configure_model."
        )
    return found


def _networks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _networks(child, f"{prefix}{name}.")
        elif not isinstance(child, nn.ParameterList | nn.ParameterDict) and any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def blocks_of(network: nn.Module, kinds: Collection[type[nn.Module]] | None = None) -> list[nn.Module]:
    """Return the blocks of a network whose parameters are gathered together, inner ones first.

    Args:
        network: network with a forward pass.
        kinds: classes of the blocks. By default, blocks are the members of each ``nn.ModuleList`` and
            ``nn.Sequential`` that consist of several modules, such as the layers of a transformer.

    Returns:
        Blocks with parameters that no module outside of the block uses; the rest is gathered with the network.

    Example:
        >>> encoder = nn.TransformerEncoderLayer(4, 1, 8)
        >>> [type(block).__name__ for block in blocks_of(nn.Sequential(nn.Linear(4, 4), encoder, encoder.linear1))]
        []
        >>> len(blocks_of(nn.TransformerEncoder(encoder, 3, enable_nested_tensor=False)))
        3
    """
    parts = list(network.modules())
    if kinds is None:
        lists = [part for part in parts if isinstance(part, nn.ModuleList | nn.Sequential)]
        members = {member for one in lists for member in one.children() if any(True for _ in member.children())}
    else:
        members = {part for part in parts if isinstance(part, tuple(kinds))}
    members = {m for m in members if m is not network and not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    uses = _uses(network)
    return [m for m in reversed(parts) if m in members and _is_closed(m, uses)]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the places of each parameter in a module; a sub-module that is there twice has two."""
    places = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(p for part in places for p in part.parameters(recurse=False))


def _is_closed(block: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    """Return whether the block has parameters, and is the only one that uses them."""
    own = _uses(block)
    return bool(own) and all(uses[p] == count for p, count in own.items())


def spread_from_first(module: nn.Module, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of rank 0, as DDP does; a collective call.

    FSDP shards what each rank has, so that replicas, and buffers, would begin with what differs between ranks. What has
    no values yet (``meta``) is left to Lightning.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            value = tensor.detach().to(device)
            dist.broadcast(value, 0)
            tensor.detach().copy_(value)


def shard_module(module: nn.Module, mesh: DeviceMesh, kinds: Collection[type[nn.Module]] | None, **how: Any) -> None:
    """Shard a module that is not sharded yet; a collective call.

    Args:
        module: whose networks are sharded.
        mesh: ranks of the shards; with two dimensions, the first holds replicas.
        kinds: classes of the blocks, ``None`` for the default of :func:`blocks_of`.
        how: arguments of ``fully_shard``. By default, networks free their gathered parameters after each forward pass
            too. Otherwise, what is done to parameters after one without backward is lost, such as an optimizer's step.

    Raises:
        ValueError: if a parameter is outside of all networks or shared by two of them, or no block is of these classes.
    """
    networks = networks_of(module).values()
    if kinds is not None and not any(isinstance(part, tuple(kinds)) for one in networks for part in one.modules()):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"auto_wrap_policy={{{names}}}: the model has no module of these classes. Give the class of its blocks, or "
            "leave it out."
        )
    how.setdefault("reshard_after_forward", True)
    for network in networks:
        for part in (*blocks_of(network, kinds), network):
            fully_shard(part, mesh=mesh, **how)


def stand_in(module: nn.Module) -> None:
    """Give a module that the strategy has sharded the hook ``configure_model``, without which Lightning refuses it."""
    vars(module)["configure_model"] = _already_sharded


def _already_sharded() -> None:
    """Do nothing, in place of a hook that shards the module."""
