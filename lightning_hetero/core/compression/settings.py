"""Settings of each gradient compressor, and one table of them.

Settings are values, and say which other features they can be combined with (:data:`Feature`).
:mod:`lightning_hetero.compression` (blocks, selection, messages) and
:mod:`lightning_hetero.comm.compressors.manager` (the exchange) implement them.
"""

import ast
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from lightning_hetero.core.keywords import checked_keywords, closest
from lightning_hetero.core.validation import check_choice, check_int, check_number

__all__ = [
    "COMPRESSORS",
    "SELECTORS",
    "VALUE_DTYPES",
    "Automatic",
    "BlockTopK",
    "Compressor",
    "Feature",
    "HalfPrecision",
    "LowRank",
    "blocks_per_rank",
    "parse_compression",
]

Feature = Literal["hierarchy", "stale", "sparse_optimizer", "density"]
"""Features that a compressor may support: messages between clusters only; stale gradients; an optimizer that takes
blocks; a density that changes during training."""

BLOCK_FEATURES: frozenset[Feature] = frozenset(("hierarchy", "stale", "sparse_optimizer", "density"))

SELECTORS = ("exact", "histogram", "sample", "aimd")
SCORES = ("magnitude", "balanced")
VALUE_DTYPES = {"float32": 64.0, "bfloat16": 32.0, "int8": 18.0}
"""Types of values on the wire, and the bytes of 16 of them."""


class Compressor:
    """Settings of one compressor; the base of all of them.

    Attributes:
        supports: features that it can be combined with.
        averager: ``module:Class`` that implements the averaging, with ``build(settings, context)``.

    Example:
        >>> isinstance(BlockTopK(), Compressor), "density" in BlockTopK.supports
        (True, True)
    """

    supports: ClassVar[frozenset[Feature]] = frozenset()
    averager: ClassVar[str]


@checked_keywords
@dataclass(frozen=True)
class BlockTopK(Compressor):
    """Send the blocks of ``residual + weight * gradient`` with the largest sums of magnitudes (S sec. 3.2).

    Blocks that are not sent stay in the residual and are sent later. As in StellaTrain, ``density`` is the share that
    all workers send together: each of ``N`` workers sends ``density / N`` of the blocks. ``density=1`` sends every
    block of every worker, which gives the dense all-reduce.

    Args:
        density: share of all blocks that all workers together send in a step, above 0, to 1.
        block: contiguous elements that are selected together, 1 to 128, a power of two. Small blocks converge in fewer
            samples but take more time and bytes: in bfloat16, 2.1 bytes per element at 16 and 4 at 1.
        value_dtype: type of values on the wire: ``"bfloat16"``, ``"float32"``, or ``"int8"`` with a scale per block;
            rounding errors stay in the residual.
        selector: ``"exact"`` (default on CPU), ``"histogram"`` (default on GPU), ``"sample"`` (threshold of a sample),
            or ``"aimd"`` (the paper's threshold, for comparison).
        warmup_steps: first steps that are dense, at least 0.
        dense_every: send every n-th step densely, ``None`` for never; the residual is left alone in such a step.
        scores: criterion of the selection: ``"magnitude"``, or ``"balanced"``, magnitude over the root mean square of
            what the parameter has sent, for optimizers such as AdamW, whose steps do not depend on a gradient's scale.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.

    Example:
        >>> BlockTopK(density=0.03).block
        16
    """

    supports: ClassVar[frozenset[Feature]] = BLOCK_FEATURES
    averager: ClassVar[str] = "lightning_hetero.comm.compressors.block_topk.averager:BlockTopKAverager"

    density: float = 0.01
    block: int = 16
    value_dtype: str = "bfloat16"
    selector: str | None = None
    warmup_steps: int = 0
    dense_every: int | None = None
    scores: str = "magnitude"

    def __post_init__(self) -> None:
        check_number("density", self.density, low=0.0, high=1.0, include_low=False)
        check_choice("block", self.block, (1, 2, 4, 8, 16, 32, 64, 128))
        check_choice("value_dtype", self.value_dtype, tuple(VALUE_DTYPES))
        check_choice("selector", self.selector, (None, *SELECTORS))
        check_choice("scores", self.scores, SCORES)
        check_int("warmup_steps", self.warmup_steps, minimum=0)
        if self.dense_every is not None:
            check_int("dense_every", self.dense_every, minimum=2)


@checked_keywords
@dataclass(frozen=True)
class LowRank(Compressor):
    """Send two low-rank factors in place of each gradient matrix: PowerSGD, by torch's own implementation.

    Args:
        rank: columns of the factors, at least 1.
        start: dense steps before compression begins, at least 2 (torch keys its residuals by DDP's buckets, which
            change after the first step).

    Example:
        >>> LowRank().rank
        4
    """

    averager: ClassVar[str] = "lightning_hetero.comm.compressors.powersgd:PowerSGDAverager"

    rank: int = 4
    start: int = 10

    def __post_init__(self) -> None:
        check_int("rank", self.rank, minimum=1)
        check_int("start", self.start, minimum=2)


@checked_keywords
@dataclass(frozen=True)
class HalfPrecision(Compressor):
    """Send gradients as 16-bit numbers, by torch's own hooks.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``.

    Example:
        >>> HalfPrecision("float16")
        HalfPrecision(dtype='float16')
    """

    averager: ClassVar[str] = "lightning_hetero.comm.compressors.half:HalfPrecisionAverager"

    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("float16", "bfloat16"))


@checked_keywords
@dataclass(frozen=True)
class Automatic(Compressor):
    """Measure the link, the cost of selection and the first steps; compress only where that pays.

    Args:
        densities: candidates, each above 0, to 1.
        value_dtype: as in :class:`BlockTopK`.

    Example:
        >>> Automatic().densities[0]
        0.001
    """

    supports: ClassVar[frozenset[Feature]] = BLOCK_FEATURES
    averager: ClassVar[str] = "lightning_hetero.comm.compressors.auto:AutoAverager"

    densities: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    value_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "densities", tuple(sorted(self.densities)))
        if not self.densities:
            raise ValueError("densities is empty; give at least one density above 0, to 1.")
        for density in self.densities:
            BlockTopK(density=density, value_dtype=self.value_dtype)


COMPRESSORS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "block_topk": (BlockTopK, {}),
    "powersgd": (LowRank, {}),
    "fp16": (HalfPrecision, {"dtype": "float16"}),
    "bf16": (HalfPrecision, {"dtype": "bfloat16"}),
    "auto": (Automatic, {}),
}
"""Class of the settings by the name in configuration files, with the settings that the name implies."""


def parse_compression(value: Any) -> Compressor | None:
    """Return the settings of a compressor: from ``None``, settings, or a string such as ``"block_topk"``.

    A string may carry settings as keywords, ``"block_topk(density=0.03, value_dtype='int8')"``.

    Raises:
        TypeError: if it is none of these.
        ValueError: if the name or a setting is unknown or out of range.

    Example:
        >>> parse_compression("block_topk(density=0.03)").density
        0.03
        >>> parse_compression(None) is None
        True
    """
    if value is None or isinstance(value, Compressor):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"compression={value!r} is a {type(value).__name__}; give None, BlockTopK(...), or one of "
            f"{', '.join(map(repr, COMPRESSORS))}."
        )
    name, given = _split(value)
    check_choice("compression", name, tuple(COMPRESSORS))
    settings, meant = COMPRESSORS[name]
    allowed = [f.name for f in fields(settings) if f.name not in meant]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        near = closest(unknown[0], allowed)
        raise ValueError(f"compression={value!r}: {name} has no setting {unknown[0]!r}.{near} It has {allowed}.")
    compressor: Compressor = settings(**meant, **given)
    return compressor


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and keywords of ``"name"`` or ``"name(key=value, ...)"``."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    raise ValueError(
        f"compression={shown!r} is unknown; give one of {', '.join(map(repr, COMPRESSORS))}, with settings as in "
        "'block_topk(density=0.03)'."
    )


def blocks_per_rank(num_blocks: int, density: float, world_size: int) -> int:
    """Return the blocks that one rank sends: ``k / N`` (S sec. 6), rounded up; all of them at density 1.

    Example:
        >>> blocks_per_rank(1000, 0.01, 2), blocks_per_rank(1000, 1.0, 2), blocks_per_rank(3, 0.01, 8)
        (5, 1000, 1)
    """
    if density >= 1.0:
        return num_blocks
    # In fractions of 2^20: rounding errors just above a whole number must not add a block.
    return min(num_blocks, max(1, -(-round(num_blocks * density * 2**20) // (world_size * 2**20))))
