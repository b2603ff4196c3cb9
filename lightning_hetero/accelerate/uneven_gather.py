"""Gathering of values from unequal batches, rank by rank; Accelerate's own gather returns garbage for them.

Before sending any tensor, every rank announces what it brings. A mismatch then raises on all ranks; an error on one
rank alone would leave the others waiting.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather, recursively_apply

from lightning_hetero.comm import ControlPlane

__all__ = ["gather_uneven"]


@dataclass(frozen=True)
class _Offer:
    """Announcement of a rank: the rows of its tensors, or its samples as pickled objects."""

    outline: str
    counted: bool
    rows: tuple[int, ...] | None = None
    pickled: bytes = field(default=b"", repr=False)
    problem: str | None = None


def gather_uneven(
    data: Any, control: ControlPlane, *, counted: bool = True, objects: bool = False, only_tensors: bool = False
) -> Any:
    """Gather the samples of all ranks, rank by rank; a collective call.

    Tensors may be nested in any structure, and differ in their first dimension between ranks. In lists and tuples of
    other values, each item is a sample; dicts and namedtuples are joined entry by entry.

    Args:
        data: values of the same kind on all ranks.
        control: control plane over which ranks announce what they bring.
        counted: whether this rank's samples count; a rank with share 0 runs some that do not.
        objects: whether tensors are taken apart into samples, which may then have different shapes.
        only_tensors: whether anything but tensors is refused.

    Raises:
        TypeError: on every rank, if a value of one rank cannot be taken apart into samples.
        ValueError: on every rank, if what they bring does not fit together.

    Example:
        >>> gather_uneven({"text": ["a", "b"], "label": torch.tensor([1, 0])}, ControlPlane(0, 1))
        {'text': ['a', 'b'], 'label': tensor([1, 0])}
    """
    offers: list[_Offer] = control.gather_objects(_offer(data, counted, objects))
    _check(offers, only_tensors)
    if any(offer.rows is None for offer in offers):
        return _joined([pickle.loads(offer.pickled) for offer in offers if offer.counted], apart=objects)
    kept = data if counted else recursively_apply(lambda tensor: _as_rows(tensor)[:0], data)
    return _gathered(kept, [offer.rows or () for offer in offers])


def _offer(data: object, counted: bool, objects: bool) -> _Offer:
    if not objects and _only_tensors(data):
        rows = [len(_as_rows(tensor)) if counted else 0 for tensor in _tensors(data)]
        return _Offer(_outline(data, lists=True), counted, rows=tuple(rows))
    if not counted:
        return _Offer("", counted)
    problem, pickled = _unsupported_reason(data), b""
    try:
        pickled = pickle.dumps(recursively_apply(lambda tensor: tensor.detach().cpu(), data))
    except Exception as error:  # noqa: BLE001 - pickling calls the objects' own code, and every rank has to hear of it
        problem = problem or f"a {type(data).__name__} that cannot be sent: {error}"
    return _Offer(_outline(data, lists=False, shapes=not objects), counted, pickled=pickled, problem=problem)


def _check(offers: Sequence[_Offer], only_tensors: bool) -> None:
    problems = [f"rank {rank} has {offer.problem}" for rank, offer in enumerate(offers) if offer.problem]
    if problems:
        raise TypeError(
            f"samples cannot be gathered: {', '.join(problems)}. Give tensors, a list with an entry for each "
            "sample, or a dict or namedtuple of these; a single number as a tensor."
        )
    uses = {offer.rows is None for offer in offers}
    if only_tensors and True in uses:
        raise TypeError("gather() takes tensors, nested in any structure. Use gather_for_metrics() for other things.")
    outlines = {rank: offer.outline for rank, offer in enumerate(offers) if offer.counted or offer.rows is not None}
    if len(set(outlines.values())) > 1 or len(uses) > 1:
        listing = ", ".join(f"rank {rank}: {outline}" for rank, outline in outlines.items())
        raise ValueError(
            f"ranks gather different things ({listing}). Give every rank the same structure, with tensors that differ "
            "in their first dimension only: pad_across_processes() pads the others, and gather_for_metrics(..., "
            "use_gather_object=True) takes them as they are."
        )


def _is_record(data: object) -> bool:
    return isinstance(data, tuple) and hasattr(data, "_fields")


def _entries(data: Any) -> list[Any]:
    """Return the values that a dict, a list or a tuple holds."""
    return list(data.values() if isinstance(data, Mapping) else data)


def _only_tensors(data: object) -> bool:
    if isinstance(data, Mapping | list | tuple):
        entries = _entries(data)
        return len(entries) > 0 and all(map(_only_tensors, entries))
    return isinstance(data, torch.Tensor)


def _tensors(data: object) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
        return
    for entry in _entries(data):
        yield from _tensors(entry)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[None] if tensor.ndim == 0 else tensor


def _outline(data: object, lists: bool, shapes: bool = True) -> str:
    """Describe what must be equal on all ranks: the structure, and each tensor's type and dimensions but the first.

    Args:
        data: what a rank brings.
        lists: whether lists are part of the structure, or hold samples.
        shapes: whether tensors stay whole, so that their dimensions matter.
    """
    name = type(data).__name__
    if isinstance(data, torch.Tensor):
        shape = ", ".join(["rows", *map(str, data.shape[1:])])
        return f"{str(data.dtype).removeprefix('torch.')}[{shape}]" if shapes else "rows"
    if isinstance(data, Mapping):
        parts = [f"{key}: {_outline(value, lists, shapes)}" for key, value in data.items()]
    elif _is_record(data) or (lists and isinstance(data, list | tuple)):
        parts = [_outline(value, lists, shapes) for value in _entries(data)]
    else:
        return "samples" if isinstance(data, list | tuple) else name
    return f"{name}({', '.join(parts)})"


def _unsupported_reason(data: object) -> str | None:
    """Return why a value cannot be taken apart into samples; ``None`` if it can."""
    if isinstance(data, Mapping) or _is_record(data):
        return next((reason for reason in map(_unsupported_reason, _entries(data)) if reason is not None), None)
    if isinstance(data, list | tuple):
        mixed = len({isinstance(item, torch.Tensor) for item in data}) > 1
        return f"a {type(data).__name__} of tensors and other things" if mixed else None
    rows = isinstance(data, torch.Tensor) or (isinstance(data, np.ndarray) and data.ndim > 0)
    return None if rows else f"a {type(data).__name__}"


def _joined(values: list[Any], apart: bool) -> Any:
    """Concatenate the objects of the ranks; their tensors become rows of one, or items of a list if ``apart``."""
    first = values[0]
    if isinstance(first, Mapping):
        kind: Any = type(first)
        return kind({key: _joined([value[key] for value in values], apart) for key in first})
    if _is_record(first):
        return type(first)(*(_joined(list(entries), apart) for entries in zip(*values, strict=True)))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, torch.Tensor):
        values = list(map(_as_rows, values))
        if not apart:
            return torch.cat(values)
    return [item for value in values for item in value]


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks, each of which has the same number."""
    everyone: torch.Tensor = gather(tensor)
    return everyone


def _gathered(data: Any, rows: Sequence[tuple[int, ...]]) -> Any:
    """Gather every tensor's rows from all ranks; a rank has ``rows[rank][i]`` rows of the ``i``-th tensor."""
    each = iter(list(zip(*rows, strict=True)))

    def of_all(tensor: torch.Tensor) -> torch.Tensor:
        lengths, tensor = next(each), _as_rows(tensor)
        most = max(lengths)
        if min(lengths) == most:
            return _stacked(tensor.contiguous()) if most else tensor
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        everyone = _stacked(padded)
        return torch.cat([everyone[i * most : i * most + n] for i, n in enumerate(lengths)])

    return recursively_apply(of_all, data)
