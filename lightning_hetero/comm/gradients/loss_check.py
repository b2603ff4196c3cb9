"""Recognition of losses that the weight ``W b_i / B`` does not make those of one process, to name what to set.

A loss is recognized by its autograd graph, so it does not matter whether a module, a function or the model computed it.
Where the graph does not tell, nothing is said.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import nan
from typing import Any

import torch

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.gradients.batch_trace import HandedOut, tensors_in
from lightning_hetero.config import HeteroConfig

__all__ = ["LossCheck"]

LOOKS = {4**i for i in range(8)}  # losses whose graphs are walked: ignored labels, or another split, may come late
MOST_NODES = 256
MEAN, SUM = 1, 2  # torch's numbers of reductions
PAGE = "See 'What gets averaged' in the documentation."
CLASS_WEIGHTS = (
    "the loss is a cross entropy with class weights: a mean over the weights of the labels, not over samples. With "
    "unequal batches it is not that of one process. Set weight_fn=..., a function that returns the sum of the class "
    f"weights of a batch's labels. {PAGE}"
)
IGNORED_LABELS = (
    "the loss ignores labels (ignore_index) that occur in the data: it is a mean over the other labels, not over "
    "samples. With unequal batches it is not that of one process. Set weight_fn=..., a function that returns how many "
    f"labels of a batch count. {PAGE}"
)
SUMMED = (
    "the loss is a sum over the batch, and is weighted like a mean. Set loss_reduction='sum', or divide it by the "
    f"samples of the batch. {PAGE}"
)
OWN_BATCH = (
    "the loss relates the samples of a worker's batch to each other (as contrastive losses and Dice over the batch "
    "do), so it changes with the split; a contrastive loss learns nothing from a batch of one. Gather the rows of all "
    f"workers, set min_local_batch_size=..., or keep equal sizes with policy='even'. {PAGE}"
)
OTHER_ROWS = (
    "a batch has other rows than the split gave it samples, as if its collate_fn drops some: its loss is weighted by "
    "the samples. If the loss is a mean over the rows, set weight_fn=..., a function that returns the rows of a batch. "
    f"{PAGE}"
)

LAYERS = {"Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm"}
PASSED = {"ToCopy", "Clone", "Alias", "Neg", "View", "Squeeze"}
"""Operations of which a sum stays a sum."""

OVER_THE_BATCH = {
    *("NTXentLoss", "DCLLoss", "BarlowTwinsLoss", "VICRegLoss", "SupConLoss", "BaseMetricLossFunction", "BaseMiner"),
    *("MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "GISTEmbedLoss", "CoSENTLoss"),
    *("AnglELoss", "OnlineContrastiveLoss", "BatchHardTripletLoss", "BatchAllTripletLoss", "LovaszLoss"),
}
"""Classes of losses that relate the samples of their batch, whatever their settings."""
LEARNED_CLASSES = "WeightRegularizerMixin"
"""Base of the losses of pytorch-metric-learning that compare samples with learned classes, not with each other."""
REGIONS = ("Dice", "Jaccard", "Tversky")
"""Losses over regions, which take all samples for one region with ``batch=True``."""


class LossCheck:
    """Notices of losses and batches that need a setting, each given once; for the rank that speaks.

    Args:
        config: settings of the run.
        notices: notices to the user.

    Example:
        >>> notices = Notices(speaks=True)
        >>> check = LossCheck(HeteroConfig(), notices)
        >>> loss = torch.nn.functional.cross_entropy(
        ...     torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, 1]), weight=torch.tensor([0.2, 0.8])
        ... )
        >>> check.see(loss, HandedOut(1.0, rows=(3, 1)))
        >>> "weight_fn" in notices.said[0]
        True
    """

    def __init__(self, config: HeteroConfig, notices: Notices) -> None:
        self._notices, self._seen, self._compared = notices, 0, 0
        self._counted = defaultdict[tuple[int, int], set[float]](set)
        # A user who bounds the local batches knows that the loss depends on them.
        self._own_batch = config.min_local_batch_size is None

    @staticmethod
    def of(config: HeteroConfig, world_size: int, notices: Notices | None) -> "LossCheck | None":
        """Return the check of a run; ``None`` if its sizes never differ, or if it says how its losses are reduced."""
        if notices is None or not notices.speaks or world_size == 1:
            return None
        sizes = config.local_batch_sizes if config.fixes_split else None
        equal = (config.policy == "even" or len(set(sizes or (0, 1))) == 1) and config.shard != "mine"
        return None if equal or config.weight_fn or config.loss_reduction == "sum" else LossCheck(config, notices)

    def see_batch(self, batch: Any, planned: int) -> None:
        """Look for a batch that arrives with other rows than the samples that were planned."""
        if OTHER_ROWS not in self._notices.said and _has_other_rows(batch, planned):
            self._notices.say(OTHER_ROWS, loses=True)

    def see(self, loss: torch.Tensor, handed: HandedOut, *, counted: bool = False) -> None:
        """Look at the graph of a loss, a few times in a run.

        Args:
            loss: the loss.
            handed: the batch that it came from.
            counted: whether the trainer counts labels itself, so that sums and ignored ones are right.
        """
        if not handed.rows or handed.beside is not None:
            return
        self._seen += 1
        if self._seen in LOOKS and loss.grad_fn is not None:
            with suppress(Exception):  # of a graph that torch describes otherwise, nothing is known
                self._look(loss.grad_fn, handed.rows, counted)

    def see_model(self, model: torch.nn.Module) -> None:
        """Look for known losses over the own batch among the modules of a model, whose graphs do not tell."""
        if self._own_batch and any(map(_is_over_the_batch, model.modules())):
            self._notices.say(OWN_BATCH, loses=True)

    def _look(self, root: Any, sizes: tuple[int, ...], counted: bool) -> None:
        own, total = sizes[0], sum(sizes)  # rank 0 alone speaks
        entropies = [
            (node, _saved(node, "target"))
            for node in _nodes(root)
            if _name(node) in ("NllLoss", "NllLoss2D") and node._saved_reduction == MEAN
        ]
        # Labels may be the numbers of the rows by chance, in a small batch, but not again and again.
        compared = any(_compares_rows(*one, own, total) for one in entropies)
        self._compared = self._compared + 1 if compared else 0
        found = {
            CLASS_WEIGHTS: any(_weights_classes(node) for node, _ in entropies),
            IGNORED_LABELS: not counted and self._ignores(entropies, own),
            OWN_BATCH: self._own_batch and self._compared > 1,
            SUMMED: not counted and own > 0 and _is_sum(root, own),
        }
        for text in (text for text, holds in found.items() if holds):
            self._notices.say(text, loses=True)

    def _ignores(self, entropies: list[tuple[Any, Any]], own: int) -> bool:
        """Return whether samples differ in how many of their labels are ignored, in this batch or over those seen.

        Language models ignore one label of each sample, which changes no weight.
        """
        for place, (node, target) in enumerate(entropies):
            if target is not None:
                counts = target != _signed(node._saved_ignore_index)
                rows = counts.reshape(own if own and counts.numel() % own == 0 else 1, -1)
                self._counted[place, rows.shape[1]].update(rows.double().mean(1).tolist())
        return any(len(shares) > 1 for shares in self._counted.values())


def _has_other_rows(batch: Any, planned: int) -> bool:
    """Return whether no part of a batch has the planned rows or a multiple, as several views of a sample are."""
    if any(len(tensor) % planned == 0 for tensor in tensors_in(batch) if tensor.ndim):  # in most runs the first one
        return False
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim]
    rows_second = all(tensor.ndim > 1 and tensor.shape[1] == planned for tensor in tensors)  # also without tensors
    return not rows_second and all(length % planned for length in _lengths(batch))


def _lengths(data: Any) -> Iterator[int]:
    """Yield the lengths of the lists and tuples of a batch, which may be of samples."""
    if isinstance(data, list | tuple):
        yield len(data)
    if isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _lengths(value)


# the graph


def _name(node: Any) -> str:
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes from a loss down to the last layers of the model, the nearest first."""
    waiting, seen = deque([root]), {root}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.popleft()
        yield node
        made = [] if _name(node) in LAYERS else [one for one, _ in node.next_functions if one is not None]
        following = dict.fromkeys(one for one in made if one not in seen)
        seen.update(following)
        waiting.extend(following)


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved; ``None`` if it has nothing, or is not to be asked.

    Under activation checkpointing, to ask for a tensor would run a forward pass again, with its collectives, on this
    rank alone.
    """
    try:
        raw = getattr(node, f"_raw_saved_{name}", None)  # only tensors have one
        if raw is not None:
            raw.register_hooks(_same, _same)  # refused if there are hooks already
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _signed(number: int) -> int:
    """Return an integer of C++ that Python shows without its sign."""
    return number - 2**64 if number >= 2**63 else number


# cross entropies


def _weights_classes(node: Any) -> bool:
    weight = _saved(node, "weight")
    return weight is not None and bool(weight.min() != weight.max())


def _compares_rows(node: Any, target: Any, own: int, total: int) -> bool:
    """Return whether the classes of a cross entropy are the rows of this worker's batch, each labelled as itself."""
    scores = node.next_functions[0][0]._input_metadata[0].shape
    if target is None or own < 1 or target.numel() % own or scores[-1] % own or (own == 1 and scores[-1] > 1):
        return False
    views = target.reshape(-1, own)
    gathered = scores[-1] % total == 0
    return not gathered and bool((views == torch.arange(own, device=target.device)).all())


def _is_over_the_batch(module: torch.nn.Module) -> bool:
    names = {one.__name__ for one in type(module).__mro__}
    if any(region in type(module).__name__ for region in REGIONS):  # segmentation_models_pytorch knows no other way
        return getattr(module, "batch", type(module).__module__.startswith("segmentation_models_pytorch")) is True
    return bool(names & OVER_THE_BATCH) and LEARNED_CLASSES not in names


# sums


def _is_sum(node: Any, own: int) -> bool:
    """Return whether a loss is a sum over rows, or consists of such sums only.

    Who divides by the number of rows makes it a mean; Lightning divides by the batches that it accumulates, often one.
    """
    name = _name(node)
    made = [one for one, _ in node.next_functions if one is not None]
    if name in PASSED or (name == "Mul" and abs(_number(node)) >= 0.5) or (name == "Div" and _number(node) == 1):
        return len(made) == 1 and _is_sum(made[0], own)
    if name in ("Add", "Sub"):
        return bool(made) and all(_is_sum(one, own) for one in made)
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == SUM)
    if name != "Sum" or _name(made[0]).endswith("AccumulateGrad"):
        return False
    shape, dims = node._saved_self_sym_sizes, getattr(node, "_saved_dim", ())
    over_first = not dims or any(_signed(dim) % len(shape) == 0 for dim in dims)
    return bool(shape) and over_first and shape[0] % own == 0


def _number(node: Any) -> float:
    """Return the number by which a node multiplies or divides; NaN if it is none."""
    other = _saved(node, "other")
    if isinstance(other, torch.Tensor):
        return nan if other.requires_grad or other.numel() != 1 else float(other)
    return nan if other is None else float(other)
