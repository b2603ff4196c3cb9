"""Loops of the sparse optimizers on CPU in Numba: a step of SGD or AdamW on the touched blocks of some parameters.

Each block is read once and written once: it pays what it owes, then takes its gradient, as
:mod:`lightning_hetero.optim.sparse.rules` defines it, every operation rounded by itself, so that each rank gets the
same bits whatever its steps are made with. Blocks lie far apart in memory, so those that are next are fetched ahead.
Import this module only where Numba is.
"""

from typing import Any

import numpy as np
from numba import njit

from lightning_hetero.compression.numba_jit.simd import (
    WIDTH,
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
from lightning_hetero.optim.sparse.kernel_interface import FINE, NEWEST, SHIFT, UNDER

__all__ = ["sparse_adamw", "sparse_sgd"]

SOON = 16
"""Blocks that are fetched ahead."""

ZERO, ONE = np.float32(0.0), np.float32(1.0)


@njit(nogil=True, cache=True)
def _found(place: Any, block: int) -> Any:
    """What a row of places says: numbers of touched blocks, steps, and the parameter, its gradient and two buffers.

    Args:
        place: elements of the parameter; touched blocks; blocks whose step is noted; buffers; the step up to which all
            blocks are settled; and the addresses of the numbers of touched blocks, of what is noted of each block of
            the parameter (``SHIFT``), of the parameter, of the gradient's touched blocks, the last one filled up to a
            whole block, and of both buffers.
        block: elements of a block.

    Returns:
        Flat arrays, those of buffers that are not there empty, and that step.
    """
    numel, touched, noted, buffers, paid, rows, notes, p, g, first, second = place
    return (
        integers(rows, touched), integers(notes, noted), floats(p, numel), floats(g, touched * block),
        floats(first, numel if buffers > 0 else 0), floats(second, numel if buffers > 1 else 0), paid,
    )  # fmt: skip


@njit(forceinline=True)
def _sgd(
    p: Any, b: Any, g: Any, owed: Any, lr: Any, decay: Any, momentum: Any, soon: Any, kept: Any, nesterov: bool
) -> Any:
    """Parameter and momentum after the step, numbers or vectors; without momentum the latter is of no use."""
    before = p
    p = add(mul(p, owed[0]), mul(b, owed[1]))
    b = add(mul(b, owed[3]), mul(before, owed[2]))
    g = add(g, mul(p, decay))
    b = add(mul(b, momentum), g)
    p = sub(p, mul(add(g, mul(b, momentum)) if nesterov else b, lr))
    return sub(p, mul(b, soon)), mul(b, kept)


@njit(forceinline=True)
def _keeps(noted: Any, owed: Any, step: Any, table: Any, ahead: bool) -> Any:
    """A touched block's mean wait, 1 plus 256 times that, the share of momentum it keeps, and what it owes of it."""
    if not ahead:
        return 0, ONE, table[owed, 1]
    touched = noted & UNDER
    if touched == 0:  # for the first time
        return 0, ZERO, ZERO
    wait, newest = noted >> SHIFT, ((step - touched) << FINE) + 1
    wait = wait + ((newest - wait) >> NEWEST) if wait > 0 else newest
    return wait, table[min((wait - 1) >> FINE, len(table) - 1), 1], ZERO


@njit(forceinline=True)
def _fetch(row: Any, block: int, p: Any, b: Any, noted: Any) -> None:
    """Fetch what a step works on of a block that is touched soon."""
    prefetch(p, row * block)
    if len(b):
        prefetch(b, row * block)
    if len(noted):
        prefetch(noted, row)


@njit(nogil=True, cache=True)
def sparse_sgd(
    places: Any, table: Any, step: int, block: int, lr: Any, decay: Any, momentum: Any, rest: Any, nesterov: bool,
    ahead: bool,
) -> None:  # fmt: skip
    """Momentum SGD on touched blocks; all numbers are float32.

    Args:
        places: a row for each parameter, see :func:`_found`; its buffer is the momentum.
        table: coefficients of what 0, 1, ... owed steps do, four each; empty if nothing is owed.
        step: number of this step.
        block: elements of a block.
        lr: learning rate.
        decay: weight decay.
        momentum: momentum.
        rest: what momentum would still move a block by, the learning rate included; 0 if it is paid later.
        nesterov: whether momentum is Nesterov's.
        ahead: whether momentum is paid ahead; the table's second coefficient is then the share of it that is kept.
    """
    owed, nothing = (ONE, ZERO, ZERO, ONE), spread(ZERO)
    soon, kept = ZERO, ONE
    for place in places:
        rows, noted, p, g, b, _, paid = _found(place, block)
        for n in range(len(rows)):
            begin, end = rows[n] * block, min((rows[n] + 1) * block, len(p))
            if n + SOON < len(rows):
                _fetch(rows[n + SOON], block, p, b, noted)
            if len(table):
                row = step - max(noted[rows[n]] & UNDER, paid)
                wait, kept, second = _keeps(noted[rows[n]], row, step, table, ahead)
                owed, soon = (table[row, 0], second, table[row, 2], table[row, 3]), (ONE - kept) * rest
                noted[rows[n]] = step + 1 + (wait << SHIFT)
            i, j = begin, n * block
            while i + WIDTH <= end:
                old = load(b, i) if len(b) else nothing
                new, left = _sgd(load(p, i), old, load(g, j), owed, lr, decay, momentum, soon, kept, nesterov)
                store(p, i, new)
                if len(b):
                    store(b, i, left)
                i, j = i + WIDTH, j + WIDTH
            while i < end:
                old_one = b[i] if len(b) else ZERO
                new, left = _sgd(p[i], old_one, g[j], owed, lr, decay, momentum, soon, kept, nesterov)
                p[i] = new
                if len(b):
                    b[i] = left
                i, j = i + 1, j + 1


@njit(forceinline=True)
def _adamw(p: Any, m: Any, v: Any, g: Any, owed: Any, rates: Any) -> Any:
    """Parameter and both moments after the step, numbers or vectors."""
    shrink, weight, beta2, square, root, size, eps, small = rates
    pull = div(mul(m, owed[1]), add(sqrt(v), small))
    p = mul(sub(mul(p, owed[0]), pull), shrink)
    m = mul(m, owed[2])
    m = add(m, mul(sub(g, m), weight))
    v = add(mul(mul(v, owed[3]), beta2), mul(mul(g, g), square))
    return add(p, div(mul(m, size), add(mul(sqrt(v), root), eps))), m, v


@njit(nogil=True, cache=True)
def sparse_adamw(places: Any, table: Any, step: int, block: int, rates: Any, ahead: bool) -> None:
    """AdamW on touched blocks; all numbers are float32.

    Args:
        places: a row for each parameter, see :func:`_found`; its buffers are the first and the second moment.
        table: coefficients of what 0, 1, ... owed steps do, four each.
        step: number of this step.
        block: elements of a block.
        rates: ``1 - lr w``; ``1 - beta_1``; ``beta_2``; ``1 - beta_2``; ``1 / sqrt(1 - beta_2^t)``; ``-lr /
            (1 - beta_1^t)``, times the geometric sum of what is paid ahead; ``eps``; what is added to the root of ``v``
            in what is owed.
        ahead: whether the first moment is paid ahead.
    """
    nothing = spread(ZERO)
    for place in places:
        rows, noted, p, g, m, v, paid = _found(place, block)
        for n in range(len(rows)):
            begin, end = rows[n] * block, min((rows[n] + 1) * block, len(p))
            if n + SOON < len(rows):
                prefetch(p, rows[n + SOON] * block)
                prefetch(m, rows[n + SOON] * block)
                prefetch(v, rows[n + SOON] * block)
            row = step - max(noted[rows[n]], paid)
            owed = (table[row, 0], table[row, 1], table[row, 2], table[row, 3])
            noted[rows[n]] = step + 1
            i, j = begin, n * block
            while i + WIDTH <= end:
                new, first, second = _adamw(load(p, i), load(m, i), load(v, i), load(g, j), owed, rates)
                store(p, i, new)
                store(m, i, nothing if ahead else first)
                store(v, i, second)
                i, j = i + WIDTH, j + WIDTH
            while i < end:
                new, first, second = _adamw(p[i], m[i], v[i], g[j], owed, rates)
                p[i], m[i], v[i] = new, ZERO if ahead else first, second
                i, j = i + 1, j + 1
