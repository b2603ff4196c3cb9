"""Loops of the sparse optimizers on CPU in Numba: a step of SGD or AdamW on the touched blocks of some parameters.

Each block is read once and written once: its deferred updates are applied, then its gradient, as
:mod:`lightning_hetero.optim.sparse.update_rule` defines it. Every operation is rounded separately, so all ranks get the
same bits, whatever calculates their steps. Blocks lie far apart in memory, so the next ones are prefetched. Import this
module only where Numba is.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from lightning_hetero.compression.numba_jit.simd import (
    PREFETCH_BLOCKS,
    WIDTH,
    Value,
    add,
    div,
    floats,
    integers,
    load,
    mul,
    prefetch,
    spread,
    sqrt,
    store,
    sub,
)
from lightning_hetero.optim.sparse.kernel_interface import FRACTION_BITS, INTERVAL_SHIFT, LAST_TOUCH_MASK, NEWEST_SHIFT

__all__ = ["sparse_adamw", "sparse_sgd"]

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Coefficients = tuple[np.float32, np.float32, np.float32, np.float32]

# Loops read globals as constants, and keep their types: with Python's floats they would calculate in float64.
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@njit(nogil=True, cache=True)
def _found(place: Integers, block: int) -> tuple[Integers, Integers, Floats, Floats, Floats, Floats, int]:
    """Return the content of a row of places, as arrays over memory that the caller keeps alive.

    Args:
        place: elements of the parameter; touched blocks; blocks that have a history; buffers; the step up to which all
            blocks are flushed; and the addresses of the numbers of touched blocks, of the history of each block of the
            parameter (``INTERVAL_SHIFT``), of the parameter, of the gradient's touched blocks, the last one filled up
            to a whole block, and of both buffers.
        block: elements of a block.

    Returns:
        Numbers of touched blocks, history, parameter, gradient, both buffers (empty if there is none), and that step.
    """
    numel, touched, noted, buffers, flushed_at, rows, history, p, g, first, second = place
    return (
        integers(rows, touched), integers(history, noted), floats(p, numel), floats(g, touched * block),
        floats(first, numel if buffers > 0 else 0), floats(second, numel if buffers > 1 else 0), flushed_at,
    )  # fmt: skip


@njit(forceinline=True)
def _sgd(
    p: Value,
    b: Value,
    g: Value,
    c: Coefficients,
    lr: np.float32,
    decay: np.float32,
    momentum: np.float32,
    ahead: np.float32,
    kept: np.float32,
    nesterov: bool,
) -> tuple[Value, Value]:
    """Return parameter and momentum after the step, numbers or vectors; ignore the latter if there is no momentum."""
    before = p
    p = add(mul(p, c[0]), mul(b, c[1]))
    b = add(mul(b, c[3]), mul(before, c[2]))
    g = add(g, mul(p, decay))
    b = add(mul(b, momentum), g)
    p = sub(p, mul(add(g, mul(b, momentum)) if nesterov else b, lr))
    return sub(p, mul(b, ahead)), mul(b, kept)


@njit(forceinline=True)
def _kept(history: int, skipped: int, step: int, table: Floats, ahead: bool) -> tuple[int, np.float32, np.float32]:
    """Return a block's mean interval, the share of momentum that it keeps, and the coefficient of deferred momentum."""
    if not ahead:
        return 0, ONE, table[skipped, 1]
    touched = history & LAST_TOUCH_MASK
    if touched == 0:  # for the first time
        return 0, ZERO, ZERO
    interval, newest = history >> INTERVAL_SHIFT, ((step - touched) << FRACTION_BITS) + 1
    interval = interval + ((newest - interval) >> NEWEST_SHIFT) if interval > 0 else newest
    return interval, table[min((interval - 1) >> FRACTION_BITS, len(table) - 1), 1], ZERO


@njit(forceinline=True)
def _fetch(row: int, block: int, p: Floats, b: Floats, history: Integers) -> None:
    """Prefetch a block that is touched soon."""
    prefetch(p, row * block)
    if len(b):
        prefetch(b, row * block)
    if len(history):
        prefetch(history, row)


@njit(nogil=True, cache=True)
def sparse_sgd(
    places: Integers,
    table: Floats,
    step: int,
    block: int,
    lr: np.float32,
    decay: np.float32,
    momentum: np.float32,
    remaining: np.float32,
    nesterov: bool,
    ahead: bool,
) -> None:
    """Step with momentum SGD on touched blocks; all numbers are float32.

    Args:
        places: a row for each parameter, see :func:`_found`; its buffer is the momentum.
        table: coefficients of what 0, 1, ... skipped steps do, four each; empty if nothing is deferred.
        step: number of this step.
        block: elements of a block.
        lr: learning rate.
        decay: weight decay.
        momentum: momentum.
        remaining: factor of the move that momentum would still make, learning rate included; 0 if it is deferred.
        nesterov: whether momentum is Nesterov's.
        ahead: whether momentum is applied ahead; the table's second coefficient is then the share of it that is kept.
    """
    c, nothing = (ONE, ZERO, ZERO, ONE), spread(ZERO)
    moved_ahead, kept = ZERO, ONE
    for place in places:
        rows, history, p, g, b, _, flushed_at = _found(place, block)
        for n in range(len(rows)):
            begin, end = rows[n] * block, min((rows[n] + 1) * block, len(p))
            if n + PREFETCH_BLOCKS < len(rows):
                _fetch(rows[n + PREFETCH_BLOCKS], block, p, b, history)
            if len(table):
                skipped = step - max(history[rows[n]] & LAST_TOUCH_MASK, flushed_at)
                interval, kept, second = _kept(history[rows[n]], skipped, step, table, ahead)
                c = (table[skipped, 0], second, table[skipped, 2], table[skipped, 3])
                moved_ahead = (ONE - kept) * remaining
                history[rows[n]] = step + 1 + (interval << INTERVAL_SHIFT)
            i, j = begin, n * block
            while i + WIDTH <= end:
                old = load(b, i) if len(b) else nothing
                new, left = _sgd(load(p, i), old, load(g, j), c, lr, decay, momentum, moved_ahead, kept, nesterov)
                store(p, i, new)
                if len(b):
                    store(b, i, left)
                i, j = i + WIDTH, j + WIDTH
            while i < end:
                old_one = b[i] if len(b) else ZERO
                new, left = _sgd(p[i], old_one, g[j], c, lr, decay, momentum, moved_ahead, kept, nesterov)
                p[i] = new
                if len(b):
                    b[i] = left
                i, j = i + 1, j + 1


@njit(forceinline=True)
def _adamw(
    p: Value, m: Value, v: Value, g: Value, c: Coefficients, rates: tuple[np.float32, ...]
) -> tuple[Value, Value, Value]:
    """Return parameter and both moments after the step, numbers or vectors."""
    shrink, weight, beta2, square, root, size, eps, deferred_eps = rates
    pull = div(mul(m, c[1]), add(sqrt(v), deferred_eps))
    p = mul(sub(mul(p, c[0]), pull), shrink)
    m = mul(m, c[2])
    m = add(m, mul(sub(g, m), weight))
    v = add(mul(mul(v, c[3]), beta2), mul(mul(g, g), square))
    return add(p, div(mul(m, size), add(mul(sqrt(v), root), eps))), m, v


@njit(nogil=True, cache=True)
def sparse_adamw(
    places: Integers, table: Floats, step: int, block: int, rates: tuple[np.float32, ...], ahead: bool
) -> None:
    """Step with AdamW on touched blocks; all numbers are float32.

    Args:
        places: a row for each parameter, see :func:`_found`; its buffers are the first and the second moment.
        table: coefficients of what 0, 1, ... skipped steps do, four each.
        step: number of this step.
        block: elements of a block.
        rates: ``1 - lr w``; ``1 - beta_1``; ``beta_2``; ``1 - beta_2``; ``1 / sqrt(1 - beta_2^t)``; ``-lr /
            (1 - beta_1^t)``, times the geometric sum that is applied ahead; ``eps``; the number that is added to the
            root of ``v`` in deferred updates.
        ahead: whether the first moment is applied ahead.
    """
    nothing = spread(ZERO)
    for place in places:
        rows, history, p, g, m, v, flushed_at = _found(place, block)
        for n in range(len(rows)):
            begin, end = rows[n] * block, min((rows[n] + 1) * block, len(p))
            if n + PREFETCH_BLOCKS < len(rows):
                prefetch(p, rows[n + PREFETCH_BLOCKS] * block)
                prefetch(m, rows[n + PREFETCH_BLOCKS] * block)
                prefetch(v, rows[n + PREFETCH_BLOCKS] * block)
            skipped = step - max(history[rows[n]], flushed_at)
            c = (table[skipped, 0], table[skipped, 1], table[skipped, 2], table[skipped, 3])
            history[rows[n]] = step + 1
            i, j = begin, n * block
            while i + WIDTH <= end:
                new, first, second = _adamw(load(p, i), load(m, i), load(v, i), load(g, j), c, rates)
                store(p, i, new)
                store(m, i, nothing if ahead else first)
                store(v, i, second)
                i, j = i + WIDTH, j + WIDTH
            while i < end:
                new, first, second = _adamw(p[i], m[i], v[i], g[j], c, rates)
                p[i], m[i], v[i] = new, ZERO if ahead else first, second
                i, j = i + 1, j + 1
