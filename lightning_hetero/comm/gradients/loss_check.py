"""Recognition of losses that the weight ``W b_i / B`` does not make those of one process, to name what to set.

A loss is recognized by its autograd graph, so it does not matter whether a module, a function or the model computed it.
Where the graph does not tell, nothing is said.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from math import nan
from typing import Any, NamedTuple

import torch

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.gradients.batch_trace import HandedOut, tensors_in
from lightning_hetero.config import HeteroConfig

__all__ = ["LossCheck"]

LOOKS = {4**i for i in range(8)}  # losses whose graphs are walked: ignored labels, or another split, may come late
MOST_NODES, NEAR = 256, 8
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
    "the loss relates the samples of a worker's batch to each other (as contrastive losses, Dice over the batch or the "
    "root of a mean do), so it changes with the split; a contrastive loss learns nothing from a batch of one. Gather "
    "the rows of all workers, set min_local_batch_size=..., or keep equal sizes with policy='even'. "
    f"{PAGE}"
)
OTHER_ROWS = (
    "a batch has other rows than the split gave it samples, as if its collate_fn drops some: its loss is weighted by "
    "the samples. If the loss is a mean over the rows, set weight_fn=..., a function that returns the rows of a batch. "
    f"{PAGE}"
)

SCANS = {"Topk", "Sort", "Logsumexp", "Logcumsumexp"}
PRODUCTS, DISTANCES = {"Mm", "Bmm"}, {"Cdist", "EuclideanDist"}
LAYERS = {*PRODUCTS, *DISTANCES, "Addmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm"}
LINEAR = {
    *("Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Mean", "Sum", "Where", "ToCopy", "Clone", "Alias"),
    *("View", "UnsafeView", "Unsqueeze", "Squeeze", "Expand", "Select", "Slice", "Index", "Stack", "Cat"),
}
CURVED = {"Sqrt", "Rsqrt", "Reciprocal", "Pow", "Exp", "Log"}


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
        self._notices, self._seen, self._sums = notices, 0, 0
        self._counted = defaultdict[int, set[float]](set)
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

    def see(self, loss: torch.Tensor, handed: HandedOut, *, counted: bool = False, accumulation: int = 0) -> None:
        """Look at the graph of a loss, a few times in a run.

        Args:
            loss: the loss.
            handed: the batch that it came from.
            counted: whether the trainer counts labels itself, so that sums and ignored ones are right.
            accumulation: number by which the trainer has divided the loss; 0 if it has not.
        """
        if not handed.rows or handed.beside is not None:
            return
        self._seen += 1
        if self._seen in LOOKS and loss.grad_fn is not None:
            with suppress(Exception):  # of a graph that torch describes otherwise, nothing is known
                self._look(loss.grad_fn, handed.rows, counted, accumulation)

    def _look(self, root: Any, sizes: tuple[int, ...], counted: bool, accumulation: int) -> None:
        own, total = sizes[0], sum(sizes)
        nodes = list(_nodes(root))
        entropies = [
            node for node in nodes if _name(node) in ("NllLoss", "NllLoss2D") and node._saved_reduction == MEAN
        ]
        terms = list(_terms(root, own, accumulation)) if own else []
        related = any(term.curved and term.over_rows for term in terms)
        related = related or (own > 0 and any(_relates_rows(node, own, total) for node in nodes))
        # A batch of one or two is often divided by 1 or 2, and a loss that is divided by a count may meet a count of 1.
        if own > 2 and self._sums >= 0:
            sums = bool(terms) and all(term.sums for term in terms) and any(term.over_rows for term in terms)
            self._sums = self._sums + 1 if sums else -1
        found = {
            CLASS_WEIGHTS: any(map(_weights_classes, entropies)),
            IGNORED_LABELS: not counted and self._ignores(entropies, own),
            OWN_BATCH: self._own_batch and related,
            SUMMED: not counted and not related and self._sums > 1,
        }
        for text in (text for text, holds in found.items() if holds):
            self._notices.say(text, loses=True)

    def _ignores(self, entropies: list[Any], own: int) -> bool:
        """Return whether samples differ in how many of their labels are ignored, in this batch or over those seen.

        Language models ignore one label of each sample, which changes no weight.
        """
        for place, node in enumerate(entropies):
            target = _saved(node, "target")
            if target is not None:
                counts = target != _signed(node._saved_ignore_index)
                rows = counts.reshape(own if own and counts.numel() % own == 0 else 1, -1)
                self._counted[place].update(rows.double().mean(1).tolist())
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


def _inputs(node: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the nodes of the inputs that need gradients, with the inputs' shapes."""
    made = [(one, number) for one, number in node.next_functions if one is not None]
    return [(one, tuple(one._input_metadata[number].shape)) for one, number in made]


def _nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes from a loss down to the last layers of the model, the nearest first."""
    waiting, seen = deque([root]), {root}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.popleft()
        yield node
        following = {} if _name(node) in LAYERS else {made: None for made, _ in _inputs(node) if made not in seen}
        seen.update(following)
        waiting.extend(following)


def _chain(node: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield what the first input of a node was made from, step by step."""
    for _ in range(NEAR):
        inputs = _inputs(node)
        if not inputs:
            return
        node, shape = inputs[0]
        yield node, shape


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


# losses that relate the rows of a batch


def _relates_rows(node: Any, own: int, total: int) -> bool:
    """Return whether a node sorts or accumulates rows, or multiplies, subtracts or measures rows by rows."""
    inputs, name = _inputs(node), _name(node)
    if name in SCANS:
        return own > 1 and len(inputs[0][1]) == 1 and _is_over_rows(node, own)
    if len(inputs) != 2 or name not in {"Sub", *PRODUCTS, *DISTANCES} or any(_is_of_one_row(one) for one, _ in inputs):
        return False
    (one, left), (other, right) = inputs
    if name == "Sub":  # a column less a row
        left, right = (right, left) if left[:1] == (1,) else (left, right)
        return len(left) == len(right) > 1 == left[1] == right[0] and _are_rows(left[0], right[1], own, total)
    left, right = (shape[1:] if len(shape) == 3 and shape[0] == 1 else shape for shape in (left, right))  # an einsum's
    if len(left) != 2 or len(right) != 2:
        return False
    first, second = left[0], right[name in PRODUCTS]
    if name in PRODUCTS and left[1] == own > 1:  # sums over rows, as for correlations of features
        if max(first, second) in (total, 2 * total):  # gathered, with as many features as rows
            return False
        first = second = own
    elif not _are_rows(first, second, own, total):
        return False
    return not (_is_of_parameters(one, first) or _is_of_parameters(other, second))


def _are_rows(first: int, second: int, own: int, total: int) -> bool:
    if own == 1:
        return first == second == 1
    return first % own == 0 and second % own == 0 and max(first, second) % total > 0  # else gathered from all ranks


def _is_of_parameters(node: Any, size: int) -> bool:
    """Return whether a parameter of this size is close by, as the weights of a layer, normalized or cast, are."""
    close = islice(_nodes(node), NEAR)
    return any(_name(one).endswith("AccumulateGrad") and size in one._input_metadata[0].shape for one in close)


def _is_of_one_row(node: Any) -> bool:
    """Return whether a node uses one row at a time, as a loop over the samples does."""
    chain = (node, *(one for one, _ in _chain(node)))
    return any(_name(one) in ("Select", "Unbind") and _signed(one._saved_dim) == 0 for one in chain)


def _is_over_rows(node: Any, own: int) -> bool:
    """Return whether a reduction is over the rows of the batch: not of one row, and not of a parameter."""
    chain = list(_chain(node))
    if not chain or _is_of_one_row(node):
        return False
    (_, reduced), (last, shape) = chain[0], chain[-1]
    if _name(last).endswith("AccumulateGrad") and shape == reduced:
        return False
    return any(shape[:1] == (own,) for _, shape in chain)


class _Term(NamedTuple):
    """A reduction in a loss: whether it is a plain sum, whether a nonlinear function of it is taken."""

    sums: bool
    curved: bool
    over_rows: bool


def _terms(root: Any, own: int, accumulation: int) -> Iterator[_Term]:
    """Yield the means and sums over rows that a loss is made of."""
    if _name(root) == "Div" and _number(root) == accumulation:
        root = root.next_functions[0][0]
    waiting = [(root, True, False)]
    for _ in range(MOST_NODES):
        if not waiting:
            return
        node, plain, curved = waiting.pop()
        name, reduction = _name(node), _reduction(node, own)
        if reduction:
            yield _Term(plain and reduction == SUM, curved, _is_over_rows(node, own))
        if name in LINEAR | CURVED and not (reduction and _inputs(node)[0][1][0] == own):
            # Who divides a sum, or multiplies it by a small number, makes it a mean.
            plain = plain and not reduction and name != "Div" and (name != "Mul" or abs(_number(node)) >= 0.5)
            for place, (made, _) in enumerate(node.next_functions):
                if made is not None:
                    waiting.append((made, plain, curved or name in CURVED or (name == "Div" and place == 1)))


def _reduction(node: Any, own: int) -> int:
    """Return ``MEAN`` or ``SUM`` if a node reduces rows, else 0."""
    if hasattr(node, "_saved_reduction"):
        return int(node._saved_reduction)
    if _name(node) not in ("Mean", "Sum"):
        return 0
    shape, dims = _inputs(node)[0][1], getattr(node, "_saved_dim", ())
    over_first = not dims or any(_signed(dim) % len(shape) == 0 for dim in dims)
    return (MEAN if _name(node) == "Mean" else SUM) if shape and over_first and shape[0] % own == 0 else 0


def _number(node: Any) -> float:
    """Return the number by which a node multiplies or divides; NaN if it is none."""
    other = _saved(node, "other")
    if isinstance(other, torch.Tensor):
        return nan if other.requires_grad or other.numel() != 1 else float(other)
    return nan if other is None else float(other)
