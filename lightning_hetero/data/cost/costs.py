"""Cost of each sample of a dataset: from its columns where they can be read cheaply, or by a function."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from lightning_hetero.data.index_stream import seeded

__all__ = ["LENGTH_COLUMNS", "TOKEN_COLUMNS", "check_costs", "computed_costs", "known_lengths"]

Array = npt.NDArray[np.float64]

LENGTH_COLUMNS = ("length", "lengths", "num_tokens", "seq_length")
"""Columns that hold the number of tokens of a sample."""
TOKEN_COLUMNS = ("input_ids", "attention_mask", "labels")
"""Columns that hold a list with one entry per token."""
ROWS_AT_ONCE = 20_000


def known_lengths(dataset: Any) -> Array | None:
    """Return the number of tokens of each sample, if that can be read without loading samples; else ``None``.

    Read are columns of ``datasets.Dataset``, dicts in a list or tuple, an attribute ``lengths`` of the dataset, and a
    ``torch.utils.data.Subset`` of any of these.

    Args:
        dataset: a map-style dataset.

    Example:
        >>> known_lengths([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]).tolist()
        [3.0, 1.0]
    """
    if isinstance(dataset, Subset):
        whole = known_lengths(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and hasattr(dataset, "select_columns"):
        return _of_columns(dataset, names)
    if isinstance(dataset, list | tuple) and dataset and isinstance(dataset[0], Mapping):
        return _of_dicts(dataset)
    for name in ("lengths", "num_tokens"):
        try:
            numbers = np.asarray(getattr(dataset, name, None))
        except Exception:  # noqa: BLE001 - something else has this name
            continue
        if numbers.dtype.kind in "iuf" and numbers.shape == (len(dataset),) and np.isfinite(numbers).all():
            return numbers.astype(np.float64)
    return None


def _of_columns(dataset: Any, names: Sequence[str]) -> Array | None:
    """Read a ``datasets.Dataset`` in its columnar form, so that no sample is decoded."""
    for name in (*LENGTH_COLUMNS, *TOKEN_COLUMNS):
        found = _of_column(dataset, name) if name in names else None
        if found is not None:
            return found
    return None


def _of_column(dataset: Any, name: str) -> Array | None:
    """Read one column: numbers, or the lengths of lists; ``None`` if it holds anything else."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = dataset.select_columns([name]).with_format("arrow")
    parts: list[Array] = []
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        values = column[start : start + ROWS_AT_ONCE][name]
        kind = values.type
        if name in TOKEN_COLUMNS and not (
            pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        ):
            return None
        if name in LENGTH_COLUMNS and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return None
        numbers = pc.list_value_length(values) if name in TOKEN_COLUMNS else values
        parts.append(np.asarray(numbers.to_numpy(), dtype=np.float64))
    found = np.concatenate(parts) if parts else np.zeros(0)
    return found if len(found) and np.isfinite(found).all() else None


def _of_dicts(samples: Sequence[Mapping[str, Any]]) -> Array | None:
    for name in (*LENGTH_COLUMNS, *TOKEN_COLUMNS):
        if name not in samples[0]:
            continue
        number: Callable[[Any], float] = float if name in LENGTH_COLUMNS else _tokens
        try:
            found = np.array([number(sample[name]) for sample in samples])
            if np.isfinite(found).all():
                return found
        except Exception:  # noqa: BLE001 - no length: a label for the whole sample, say
            continue
    return None


def _tokens(values: Any) -> float:
    """Return the length of a list of tokens; a text, such as the name of a class, is none."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{values!r} is no list of tokens.")
    return float(len(values))


def computed_costs(function: Callable[..., Any], dataset: Any, indices: Iterable[int], seed: int = 0) -> list[float]:
    """Return the cost of some samples by a function of the sample, or of its index if its argument is named ``index``.

    The global random generators are restored afterwards, so that loading samples here changes no later random number.

    Args:
        function: ``cost_fn(sample)`` or ``cost_fn(index)``.
        dataset: a map-style dataset.
        indices: samples to compute the cost of.
        seed: seed of the generators meanwhile.

    Example:
        >>> computed_costs(len, ["ab", "c"], [0, 1]), computed_costs(lambda index: index + 1.0, None, [0, 1])
        ([2.0, 1.0], [1.0, 2.0])
    """
    by_index = _takes_index(function)
    with seeded(seed):
        return [float(function(index if by_index else dataset[index])) for index in indices]


def _takes_index(function: Callable[..., Any]) -> bool:
    try:
        return next(iter(inspect.signature(function).parameters), None) == "index"
    except (TypeError, ValueError):  # a builtin
        return False


def check_costs(costs: Array, number: int, where: str) -> Array:
    """Check that there is a finite cost above 0 for each of ``number`` samples, and return the costs.

    Args:
        costs: cost of each sample.
        number: samples of the dataset.
        where: what gave the costs, for the error.

    Raises:
        ValueError: if there is not.
    """
    if costs.shape != (number,):
        raise ValueError(
            f"{where} gave costs of the shape {costs.shape}; give one number for each of {number} samples."
        )
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))
    if len(wrong):
        raise ValueError(
            f"{where} gave the cost {costs[wrong[0]]} for sample {wrong[0]} ({len(wrong)} of {number} samples "
            "have such a cost). Costs must be finite and above 0."
        )
    return costs
