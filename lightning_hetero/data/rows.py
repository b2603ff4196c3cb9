"""Rows of batches that a dataset or a loader yields whole: counted, cut, and put together along the first dimension."""

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

__all__ = ["BatchRows", "concat_batches", "require_rows", "rows_by", "rows_of", "slice_batch"]


class BatchRows:
    """Counting, cutting and joining of the rows of batches: along the first dimension, or by functions of the user.

    Args:
        slice_fn: returns rows of a batch: ``slice_fn(batch, start, stop)``.
        concat_fn: puts parts of batches together: ``concat_fn(parts)``.

    Example:
        >>> rows = BatchRows()
        >>> batch = {"x": torch.arange(3), "text": ["a", "b", "c"]}
        >>> rows.count(batch), rows.join([rows.cut(batch, 2, 3), rows.cut(batch, 0, 1)])["text"]
        (3, ['c', 'a'])
    """

    def __init__(
        self,
        slice_fn: Callable[[Any, int, int], Any] | None = None,
        concat_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._slice_fn, self._concat_fn = slice_fn, concat_fn

    def count(self, batch: Any) -> int:
        """Return the rows of a batch.

        Raises:
            TypeError: if they cannot be counted.
            ValueError: if its tensors have different numbers of rows, and no function cuts them.
        """
        if self._slice_fn is not None:
            return rows_by(batch, self._slice_fn)
        rows = rows_of(batch)
        require_rows(batch, rows)
        return rows

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return the rows from ``start`` to ``stop - 1``."""
        return slice_batch(batch, start, stop) if self._slice_fn is None else self._slice_fn(batch, start, stop)

    def join(self, parts: list[Any]) -> Any:
        """Put parts of batches together."""
        if len(parts) == 1:
            return parts[0]
        return concat_batches(parts) if self._concat_fn is None else self._concat_fn(parts)


def rows_of(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch, or the length of a list or object of other things.

    Raises:
        TypeError: if it has neither.

    Example:
        >>> rows_of({"x": torch.zeros(3, 2)}), rows_of([{"x": 1}, {"x": 2}])
        (3, 2)
    """
    found = _rows(batch)
    found = _length(batch) if found is None else found
    if found is None:
        raise TypeError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted. Let the batch have a tensor whose "
            "first dimension is that of the samples, or a length (__len__), or let a DataLoader with a batch_size make "
            "batches of single samples."
        )
    return found


def rows_by(batch: Any, slice_fn: Callable[[Any, int, int], Any]) -> int:
    """Return the rows of a batch that a function of the user cuts: so many that it cuts one row to one row.

    Args:
        batch: the batch.
        slice_fn: returns rows of a batch: ``slice_fn(batch, start, stop)``.

    Raises:
        TypeError: if neither its first tensor nor its length is the number of rows.

    Example:
        >>> images = [torch.zeros(3, 8, 8)] * 5
        >>> rows_by(images, lambda batch, start, stop: batch[start:stop])
        5
    """
    one = slice_fn(batch, 0, 1)
    found = [n for rule in (_rows, _length) if (n := rule(batch)) is not None and (n == 0 or rule(one) == 1)]
    if not found:
        raise TypeError(
            f"the rows of a batch of type {type(batch).__name__} cannot be counted: of slice_fn(batch, 0, 1), neither "
            "the first tensor nor the length (__len__) is one row. Let the batch have one of them."
        )
    return max(found)


def _length(batch: Any) -> int | None:
    sized = hasattr(batch, "__len__") and not _is_tensor(batch) and not isinstance(batch, str | bytes | Mapping)
    return len(batch) if sized and not _is_namedtuple(batch) else None


def _is_namedtuple(batch: Any) -> bool:
    return isinstance(batch, tuple) and hasattr(batch, "_fields")


def _is_tensor(batch: Any) -> bool:
    return isinstance(batch, torch.Tensor) or hasattr(batch, "__array__")


def _is_scalar(batch: Any) -> bool:
    return batch is None or isinstance(batch, str | bytes | int | float | complex | bool)


def _holds_values(batch: Sequence[Any]) -> bool:
    """Return whether a list or tuple holds a value of each row, such as a text or a dict, or a constant of values."""
    if _is_namedtuple(batch) or not batch:
        return False
    return all(isinstance(value, Mapping) for value in batch) or all(_rows(value) is None for value in batch)


def _rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor, or the length of a list of values; ``None`` without these."""
    if _is_tensor(batch):
        return len(batch) if batch.ndim else None
    if isinstance(batch, Mapping):
        return next((rows for value in batch.values() if (rows := _rows(value)) is not None), None)
    if not isinstance(batch, list | tuple):
        return None
    if _holds_values(batch):
        return len(batch) if isinstance(batch, list) else None
    return next((rows for value in batch if (rows := _rows(value)) is not None), None)


def require_rows(batch: Any, rows: int) -> None:
    """Check that all tensors of a batch have so many rows.

    Raises:
        ValueError: if one has not.
    """
    if _is_tensor(batch):
        if batch.ndim and len(batch) != rows:
            raise ValueError(
                f"a batch has parts of {rows} and {len(batch)} rows, so that it cannot be cut along the first "
                "dimension. Give slice_fn, a function slice_fn(batch, start, stop)."
            )
    elif isinstance(batch, Mapping):
        for value in batch.values():
            require_rows(value, rows)
    elif isinstance(batch, list | tuple) and not _holds_values(batch):
        for value in batch:
            require_rows(value, rows)


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return rows of a batch: of tensors, and of the mappings, lists, tuples and named tuples that hold them.

    A list or tuple of texts, numbers or dicts is cut if it has one for each row, and stays whole otherwise.

    Raises:
        TypeError: if a part of the batch cannot be sliced.
        ValueError: if a part has another number of rows.

    Example:
        >>> slice_batch({"x": torch.arange(4), "name": "train"}, 1, 3)
        {'x': tensor([1, 2]), 'name': 'train'}
    """
    rows = rows_of(batch)
    require_rows(batch, rows)
    return _sliced(batch, start, stop, rows)


def _sliced(batch: Any, start: int, stop: int, rows: int) -> Any:
    if _is_tensor(batch):
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: _sliced(value, start, stop, rows) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if _holds_values(batch):
            return batch[start:stop] if len(batch) == rows else batch
        return _made(batch, [_sliced(value, start, stop, rows) for value in batch])
    if _is_scalar(batch):
        return batch
    raise TypeError(
        f"a batch holds a {type(batch).__name__}, which cannot be cut along the first dimension. Give slice_fn, a "
        "function slice_fn(batch, start, stop), and concat_fn, a function concat_fn(parts)."
    )


def _made(like: Any, values: list[Any]) -> Any:
    return type(like)(*values) if _is_namedtuple(like) else type(like)(values)


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return the values in a mapping of the batch's class, such as transformers' ``BatchEncoding``."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]
    clone = copy.copy(batch)
    clone.update(values)
    return clone


def concat_batches(parts: list[Any]) -> Any:
    """Put parts of batches together along the first dimension.

    A list or tuple of texts, numbers or dicts is joined if each part has one for each of its rows.

    Raises:
        ValueError: if their other dimensions differ, as those of batches padded to different lengths.
        TypeError: if they cannot be put together.

    Example:
        >>> concat_batches([[torch.zeros(2, 3)], [torch.zeros(1, 3)]])[0].shape
        torch.Size([3, 3])
    """
    return _joined(parts, [rows_of(part) for part in parts])


def _joined(parts: list[Any], rows: list[int]) -> Any:
    first = parts[0]
    if _is_tensor(first):
        return _cat(parts)
    if isinstance(first, Mapping):
        return _like(first, {key: _joined([part[key] for part in parts], rows) for key in first})
    if isinstance(first, list | tuple):
        if not _holds_values(first):
            return _made(first, [_joined(list(values), rows) for values in zip(*parts, strict=True)])
        if [len(part) for part in parts] != rows:
            return first
        return type(first)(value for part in parts for value in part)
    if _is_scalar(first):
        return first
    raise TypeError(
        f"parts of batches that hold a {type(first).__name__} cannot be put together. Give concat_fn, a function "
        "concat_fn(parts)."
    )


def _cat(parts: list[Any]) -> Any:
    first = parts[0]
    if first.ndim == 0:
        return first
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(
            f"rows of two batches with shapes {' and '.join(str(tuple(part.shape)) for part in parts)} make up one "
            "rank's batch, and cannot be put together without padding. Pad all batches of the dataset to one length, "
            "or give concat_fn, a function concat_fn(parts) that pads."
        )
    joined = torch.cat([torch.as_tensor(part) for part in parts])
    return joined if isinstance(first, torch.Tensor) else joined.numpy()
