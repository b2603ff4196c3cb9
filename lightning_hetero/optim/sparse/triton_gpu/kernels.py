"""Triton kernels of the sparse optimizers: a step of SGD or AdamW on the touched blocks of many parameters at once.

The table ``addresses`` has a row for each parameter: the addresses of the parameter, its gradient, two buffers, its
marks and the history of its blocks. The table ``chunks`` assigns a part of a parameter to each program: the number of
the row, the first block, the number of blocks, and the elements from there on, counted in ``UNIT``. A unit of 8 means
that addresses are multiples of 16 bytes, and that a chunk ends with a whole unit.

Each program reads the marks of its blocks, 1 byte each, and updates the marked ones: it applies the block's deferred
updates, then the gradient, as :mod:`lightning_hetero.optim.sparse.update_rule` defines it. It does so in one pass in
float32, with the bits of Numba's loops and of torch's operations. The host need not know which blocks are marked, or
how many. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.optim.sparse import kernel_interface

__all__ = ["sparse_adamw", "sparse_sgd"]

# Kernels read globals of their module only, and those only as constexpr.
INTERVAL_SHIFT = tl.constexpr(kernel_interface.INTERVAL_SHIFT)
FRACTION_BITS = tl.constexpr(kernel_interface.FRACTION_BITS)
NEWEST_SHIFT = tl.constexpr(kernel_interface.NEWEST_SHIFT)
LAST_TOUCH_MASK = tl.constexpr(kernel_interface.LAST_TOUCH_MASK)
MAX_DEFERRED_STEPS = tl.constexpr(kernel_interface.MAX_DEFERRED_STEPS)


@triton.jit
def _stored(x, pointer):
    """Return ``x`` in the type of a buffer, rounded to nearest even, on every device and in the interpreter alike."""
    # Rounds the bits itself, because conversions differ between devices and the interpreter.
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def _coefficients(table_ptr, skipped, live, column):
    """Return one coefficient of each block for the steps that it skipped, shape ``(blocks, 1)``."""
    return tl.load(table_ptr + skipped * 4 + column, mask=live, other=0.0)[:, None]


@triton.jit
def _chunk(addresses_ptr, chunks_ptr, UNIT: tl.constexpr):
    """Return the addresses of this program's parameter, its first block, number of blocks, and elements from there."""
    row = chunks_ptr + tl.program_id(0).to(tl.int64) * 4
    left = tl.load(row + 3).to(tl.int32) * UNIT
    return addresses_ptr + tl.load(row) * 6, tl.load(row + 1), tl.load(row + 2).to(tl.int32), left


@triton.jit
def _tensor(own, column: tl.constexpr, begin, KIND: tl.constexpr, UNIT: tl.constexpr):
    """Return a pointer to an element of one of the parameter's tensors."""
    pointer = tl.load(own + column).to(tl.pointer_type(KIND))
    if UNIT > 1:  # else the compiler knows no alignment of a loaded address, and does not load 16 bytes at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer + begin


@triton.jit(do_not_specialize=["step", "flushed_at"])
def sparse_sgd(
    addresses_ptr, chunks_ptr, table_ptr, flushed_at, step, lr, decay, momentum, remaining,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, AHEAD: tl.constexpr, DEFERS: tl.constexpr,
):  # fmt: skip
    """Step with momentum SGD on touched blocks.

    Args:
        addresses_ptr: parameter, gradient, momentum, nothing, marks, and history of its blocks, see
            :data:`~lightning_hetero.optim.sparse.kernel_interface.INTERVAL_SHIFT` (``DEFERS``).
        chunks_ptr: a row for each program.
        table_ptr: float32 coefficients of what 0, 1, ... skipped steps do, four each (``DEFERS``).
        flushed_at: step up to which all blocks are flushed.
        step: number of this step.
        lr: learning rate.
        decay: weight decay.
        momentum: momentum.
        remaining: factor of the move that momentum would still make, learning rate included (``AHEAD``).
        P: type of the parameters.
        G: type of their gradients.
        M: type of their momentum.
        BLOCK: elements of a block.
        TILE: blocks that are processed at once.
        UNIT: elements that are counted as one.
        MOMENTUM: whether there is momentum.
        NESTEROV: whether it is Nesterov's.
        AHEAD: whether momentum is applied ahead; the second coefficient is then the share that is kept (``DEFERS``).
        DEFERS: whether a step without a gradient changes a block.
    """
    own, first, blocks, left = _chunk(addresses_ptr, chunks_ptr, UNIT)
    p_ptr = _tensor(own, 0, first * BLOCK, P, UNIT)
    g_ptr = _tensor(own, 1, first * BLOCK, G, UNIT)
    m_ptr = _tensor(own, 2, first * BLOCK, M, UNIT)
    touched_ptr = _tensor(own, 4, first, tl.uint8, 1)
    history_ptr = _tensor(own, 5, first, tl.int64, 1)
    for begin in range(0, blocks, TILE):
        row = begin + tl.arange(0, TILE)
        live = tl.load(touched_ptr + row, mask=row < blocks, other=0) != 0
        if tl.max(live.to(tl.int32), axis=0) > 0:
            at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = live[:, None] & (at < left)
            p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.zeros_like(p)
            if MOMENTUM:
                m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if DEFERS:
                history = tl.load(history_ptr + row, mask=live, other=0)
                touched = history & LAST_TOUCH_MASK
                skipped = step - tl.maximum(touched, flushed_at)
                before, second = p, _coefficients(table_ptr, skipped, live, 1)
                p = before * _coefficients(table_ptr, skipped, live, 0)
                interval = tl.zeros_like(history)
                if AHEAD:
                    mean, newest = history >> INTERVAL_SHIFT, ((step - touched) << FRACTION_BITS) + 1
                    interval = tl.where(mean > 0, mean + ((newest - mean) >> NEWEST_SHIFT), newest)
                    interval = tl.where(touched == 0, 0, interval)
                    whole = tl.where(interval > 0, (interval - 1) >> FRACTION_BITS, 0)
                    kept = _coefficients(table_ptr, tl.minimum(whole, MAX_DEFERRED_STEPS), live, 1)
                    second = tl.where((interval > 0)[:, None], kept, 0.0)
                else:
                    p += m * second
                    through = before * _coefficients(table_ptr, skipped, live, 2)
                    m = m * _coefficients(table_ptr, skipped, live, 3) + through
                tl.store(history_ptr + row, (interval << INTERVAL_SHIFT) + (step + 1), mask=live)
            g += decay * p
            if MOMENTUM:
                m = m * momentum + g
                if NESTEROV:
                    g += momentum * m
                else:
                    g = m
            p -= lr * g
            if AHEAD:
                p -= (1.0 - second) * remaining * m
                m = m * second
            tl.store(p_ptr + at, _stored(p, p_ptr), mask=inside)
            if MOMENTUM:
                tl.store(m_ptr + at, _stored(m, m_ptr), mask=inside)


@triton.jit(do_not_specialize=["step", "flushed_at"])
def sparse_adamw(
    addresses_ptr, chunks_ptr, table_ptr, flushed_at, step, shrink, one_minus_beta1, beta2, one_minus_beta2, root, size,
    eps, deferred_eps, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Step with AdamW on touched blocks.

    Args:
        addresses_ptr: parameter, gradient, both moments, marks, and history of its blocks: 1 plus the step in which
            each was touched last.
        chunks_ptr: a row for each program.
        table_ptr: float32 coefficients of what 0, 1, ... skipped steps do, four each.
        flushed_at: step up to which all blocks are flushed.
        step: number of this step.
        shrink: ``1 - lr w``.
        one_minus_beta1: ``1 - beta_1``.
        beta2: decay of the second moment.
        one_minus_beta2: ``1 - beta_2``.
        root: ``1 / sqrt(1 - beta_2^t)``.
        size: ``-lr / (1 - beta_1^t)``, times the geometric sum that is applied ahead.
        eps: AdamW's ``eps``.
        deferred_eps: added to the root of ``v`` in deferred updates.
        P: type of the parameters.
        G: type of their gradients.
        M: type of their first moments.
        V: type of their second moments.
        BLOCK: elements of a block.
        TILE: blocks that are processed at once.
        UNIT: elements that are counted as one.
        AHEAD: whether the first moment is applied ahead.
    """
    own, first, blocks, left = _chunk(addresses_ptr, chunks_ptr, UNIT)
    p_ptr = _tensor(own, 0, first * BLOCK, P, UNIT)
    g_ptr = _tensor(own, 1, first * BLOCK, G, UNIT)
    m_ptr = _tensor(own, 2, first * BLOCK, M, UNIT)
    v_ptr = _tensor(own, 3, first * BLOCK, V, UNIT)
    touched_ptr = _tensor(own, 4, first, tl.uint8, 1)
    history_ptr = _tensor(own, 5, first, tl.int64, 1)
    for begin in range(0, blocks, TILE):
        row = begin + tl.arange(0, TILE)
        live = tl.load(touched_ptr + row, mask=row < blocks, other=0) != 0
        if tl.max(live.to(tl.int32), axis=0) > 0:
            at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            inside = live[:, None] & (at < left)
            p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
            skipped = step - tl.maximum(tl.load(history_ptr + row, mask=live, other=0), flushed_at)
            pull = tl.div_rn(m * _coefficients(table_ptr, skipped, live, 1), tl.sqrt_rn(v) + deferred_eps)
            p = p * _coefficients(table_ptr, skipped, live, 0) - pull
            m = m * _coefficients(table_ptr, skipped, live, 2)
            v = v * _coefficients(table_ptr, skipped, live, 3)
            tl.store(history_ptr + row, step + 1, mask=live)
            p = p * shrink
            m += (g - m) * one_minus_beta1
            v = v * beta2 + g * g * one_minus_beta2
            p += tl.div_rn(m * size, tl.sqrt_rn(v) * root + eps)
            if AHEAD:
                m = tl.zeros_like(m)
            tl.store(p_ptr + at, _stored(p, p_ptr), mask=inside)
            tl.store(m_ptr + at, _stored(m, m_ptr), mask=inside)
            tl.store(v_ptr + at, _stored(v, v_ptr), mask=inside)
