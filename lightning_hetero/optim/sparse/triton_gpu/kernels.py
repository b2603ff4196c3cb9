"""Triton kernels of the sparse optimizers: a step of SGD or AdamW on the touched blocks of many parameters at once.

Where tensors are is in a table of ``owners``: a row of addresses for each parameter, of itself, its gradient, two
buffers, its marks and its notes. Which part of which parameter a program works on is in a table of ``chunks``: the
number of the row, the first block, how many there are, and the elements from there on, counted in ``UNIT``. A unit of 8
says that addresses are multiples of 16 bytes, and that a chunk ends with a whole unit.

Each program looks at the marks of its blocks, 1 byte each, and moves what is marked: it pays what the block owes, then
applies the gradient, as :mod:`lightning_hetero.optim.sparse.rules` defines it, in one pass with float32 arithmetic,
which is that of Numba's loops and of torch's operations, bit by bit. The host need not know which blocks, or how many.
Import this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.optim.sparse import kernel_interface as kernel_step

__all__ = ["sparse_adamw", "sparse_sgd"]

SHIFT, FINE = tl.constexpr(kernel_step.SHIFT), tl.constexpr(kernel_step.FINE)
NEWEST, UNDER = tl.constexpr(kernel_step.NEWEST), tl.constexpr(kernel_step.UNDER)
LONGEST = tl.constexpr(kernel_step.LONGEST)


@triton.jit
def _stored(x, pointer):
    """``x`` in the type of a buffer, rounded to nearest even, the same on every device and interpreted."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def _coefficients(table_ptr, owed, live, column):
    """One coefficient of each block for the steps that it owes, shape ``(blocks, 1)``."""
    return tl.load(table_ptr + owed * 4 + column, mask=live, other=0.0)[:, None]


@triton.jit
def _chunk(owners_ptr, chunks_ptr, UNIT: tl.constexpr):
    """The addresses of this program's parameter, its first block, its blocks, and its elements from there on."""
    row = chunks_ptr + tl.program_id(0).to(tl.int64) * 4
    left = tl.load(row + 3).to(tl.int32) * UNIT
    return owners_ptr + tl.load(row) * 6, tl.load(row + 1), tl.load(row + 2).to(tl.int32), left


@triton.jit
def _tensor(owner, column: tl.constexpr, begin, KIND: tl.constexpr, UNIT: tl.constexpr):
    """Pointer to an element of one of the parameter's tensors."""
    pointer = tl.load(owner + column).to(tl.pointer_type(KIND))
    if UNIT > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + begin


@triton.jit(do_not_specialize=["step", "paid"])
def sparse_sgd(
    owners_ptr, chunks_ptr, table_ptr, paid, step, lr, decay, momentum, rest,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, AHEAD: tl.constexpr, OWES: tl.constexpr,
):  # fmt: skip
    """Momentum SGD on touched blocks.

    Args:
        owners_ptr: addresses: parameter, gradient, momentum, nothing, marks, and notes, which say when each block was
            touched last, and how long it waits, see :data:`~lightning_hetero.optim.sparse.kernel_interface.SHIFT`
            (``OWES``).
        chunks_ptr: a row for each program.
        table_ptr: float32 coefficients of what 0, 1, ... owed steps do, four each (``OWES``).
        paid: step up to which all blocks are settled.
        step: number of this step.
        lr: learning rate.
        decay: weight decay.
        momentum: momentum.
        rest: what momentum would still move a block by, the learning rate included (``AHEAD``).
        P: type of the parameters.
        G: of their gradients.
        M: of their momentum.
        BLOCK: elements of a block.
        TILE: blocks that are worked on at once.
        UNIT: elements that are counted as one.
        MOMENTUM: whether there is momentum.
        NESTEROV: whether it is Nesterov's.
        AHEAD: whether momentum is paid ahead; the second coefficient is then the share of it that is kept (``OWES``).
        OWES: whether a block owes anything.
    """
    owner, first, blocks, left = _chunk(owners_ptr, chunks_ptr, UNIT)
    p_ptr = _tensor(owner, 0, first * BLOCK, P, UNIT)
    g_ptr = _tensor(owner, 1, first * BLOCK, G, UNIT)
    m_ptr = _tensor(owner, 2, first * BLOCK, M, UNIT)
    touched_ptr = _tensor(owner, 4, first, tl.uint8, 1)
    noted_ptr = _tensor(owner, 5, first, tl.int64, 1)
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
            if OWES:
                noted = tl.load(noted_ptr + row, mask=live, other=0)
                touched = noted & UNDER
                owed = step - tl.maximum(touched, paid)
                before, second = p, _coefficients(table_ptr, owed, live, 1)
                p = before * _coefficients(table_ptr, owed, live, 0)
                wait = tl.zeros_like(noted)
                if AHEAD:
                    mean, newest = noted >> SHIFT, ((step - touched) << FINE) + 1
                    wait = tl.where(mean > 0, mean + ((newest - mean) >> NEWEST), newest)
                    wait = tl.where(touched == 0, 0, wait)
                    expected = tl.minimum(tl.where(wait > 0, (wait - 1) >> FINE, 0), LONGEST)
                    second = tl.where((wait > 0)[:, None], _coefficients(table_ptr, expected, live, 1), 0.0)
                else:
                    p += m * second
                    m = m * _coefficients(table_ptr, owed, live, 3) + before * _coefficients(table_ptr, owed, live, 2)
                tl.store(noted_ptr + row, (wait << SHIFT) + (step + 1), mask=live)
            g += decay * p
            if MOMENTUM:
                m = m * momentum + g
                if NESTEROV:
                    g += momentum * m
                else:
                    g = m
            p -= lr * g
            if AHEAD:
                p -= (1.0 - second) * rest * m
                m = m * second
            tl.store(p_ptr + at, _stored(p, p_ptr), mask=inside)
            if MOMENTUM:
                tl.store(m_ptr + at, _stored(m, m_ptr), mask=inside)


@triton.jit(do_not_specialize=["step", "paid"])
def sparse_adamw(
    owners_ptr, chunks_ptr, table_ptr, paid, step, shrink, one_minus_beta1, beta2, one_minus_beta2, root, size, eps,
    small, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AdamW on touched blocks.

    Args:
        owners_ptr: addresses: parameter, gradient, both moments, marks, and notes, 1 plus the step in which each block
            was touched last.
        chunks_ptr: a row for each program.
        table_ptr: float32 coefficients of what 0, 1, ... owed steps do, four each.
        paid: step up to which all blocks are settled.
        step: number of this step.
        shrink: ``1 - lr w``.
        one_minus_beta1: ``1 - beta_1``.
        beta2: decay of the second moment.
        one_minus_beta2: ``1 - beta_2``.
        root: ``1 / sqrt(1 - beta_2^t)``.
        size: ``-lr / (1 - beta_1^t)``, times the geometric sum of what is paid ahead.
        eps: of AdamW.
        small: added to the root of ``v`` in what is owed.
        P: type of the parameters.
        G: of their gradients.
        M: of their first moments.
        V: of their second moments.
        BLOCK: elements of a block.
        TILE: blocks that are worked on at once.
        UNIT: elements that are counted as one.
        AHEAD: whether the first moment is paid ahead.
    """
    owner, first, blocks, left = _chunk(owners_ptr, chunks_ptr, UNIT)
    p_ptr = _tensor(owner, 0, first * BLOCK, P, UNIT)
    g_ptr = _tensor(owner, 1, first * BLOCK, G, UNIT)
    m_ptr = _tensor(owner, 2, first * BLOCK, M, UNIT)
    v_ptr = _tensor(owner, 3, first * BLOCK, V, UNIT)
    touched_ptr = _tensor(owner, 4, first, tl.uint8, 1)
    noted_ptr = _tensor(owner, 5, first, tl.int64, 1)
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
            owed = step - tl.maximum(tl.load(noted_ptr + row, mask=live, other=0), paid)
            pull = tl.div_rn(m * _coefficients(table_ptr, owed, live, 1), tl.sqrt_rn(v) + small)
            p = p * _coefficients(table_ptr, owed, live, 0) - pull
            m = m * _coefficients(table_ptr, owed, live, 2)
            v = v * _coefficients(table_ptr, owed, live, 3)
            tl.store(noted_ptr + row, step + 1, mask=live)
            p = p * shrink
            m += (g - m) * one_minus_beta1
            v = v * beta2 + g * g * one_minus_beta2
            p += tl.div_rn(m * size, tl.sqrt_rn(v) * root + eps)
            if AHEAD:
                m = tl.zeros_like(m)
            tl.store(p_ptr + at, _stored(p, p_ptr), mask=inside)
            tl.store(m_ptr + at, _stored(m, m_ptr), mask=inside)
            tl.store(v_ptr + at, _stored(v, v_ptr), mask=inside)
