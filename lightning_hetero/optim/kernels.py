"""Triton kernels of the sparse optimizers: a step of SGD or AdamW on the touched blocks of one parameter.

Each program looks at the marks of some blocks, 1 byte each, and moves what is marked: it pays what the block owes, then
applies the gradient, as :mod:`lightning_hetero.optim.sparse` defines it, in one pass with float32 arithmetic, which is
that of Numba's loops and of torch's operations, bit by bit. The host need not know which blocks, or how many. Import
this module only where Triton is.
"""

import triton
import triton.language as tl

from lightning_hetero.optim import kernel_step

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


@triton.jit(do_not_specialize=["step", "paid"])
def sparse_sgd(
    p_ptr, g_ptr, m_ptr, touched_ptr, noted_ptr, table_ptr, paid, step, lr, decay, momentum, rest, numel, num_blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, AHEAD: tl.constexpr,
    OWES: tl.constexpr,
):  # fmt: skip
    """Momentum SGD on touched blocks.

    Args:
        p_ptr: parameter, ``numel`` elements of float32, bfloat16 or float16.
        g_ptr: its gradient, of any of these types.
        m_ptr: its momentum buffer, of any of these types (``MOMENTUM``).
        touched_ptr: a byte per block, not 0 where the gradient touches it.
        noted_ptr: when each block was touched last, and how long it waits, as
            :data:`~lightning_hetero.optim.kernel_step.SHIFT` says (``OWES``).
        table_ptr: float32 coefficients of what 0, 1, ... owed steps do, four each (``OWES``).
        paid: step up to which all blocks are settled.
        step: number of this step.
        lr: learning rate.
        decay: weight decay.
        momentum: momentum.
        rest: what momentum would still move a block by, the learning rate included (``AHEAD``).
        numel: elements of the parameter.
        num_blocks: blocks of the parameter.
        BLOCK: elements of a block.
        TILE: blocks of a program.
        MOMENTUM: whether there is momentum.
        NESTEROV: whether it is Nesterov's.
        AHEAD: whether momentum is paid ahead; the second coefficient is then the share of it that is kept (``OWES``).
        OWES: whether a block owes anything.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = tl.load(touched_ptr + row, mask=row < num_blocks, other=0) != 0
    if tl.max(live.to(tl.int32), axis=0) > 0:
        at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (at < numel)
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
    p_ptr, g_ptr, m_ptr, v_ptr, touched_ptr, noted_ptr, table_ptr, paid, step, shrink, one_minus_beta1, beta2,
    one_minus_beta2, root, size, eps, small, numel, num_blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AdamW on touched blocks.

    Args:
        p_ptr: parameter, ``numel`` elements of float32, bfloat16 or float16.
        g_ptr: its gradient, of any of these types.
        m_ptr: its first moment, of any of these types.
        v_ptr: its second moment, of any of these types.
        touched_ptr: a byte per block, not 0 where the gradient touches it.
        noted_ptr: 1 plus the step in which each block was touched last.
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
        numel: elements of the parameter.
        num_blocks: blocks of the parameter.
        BLOCK: elements of a block.
        TILE: blocks of a program.
        AHEAD: whether the first moment is paid ahead.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = tl.load(touched_ptr + row, mask=row < num_blocks, other=0) != 0
    if tl.max(live.to(tl.int32), axis=0) > 0:
        at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (at < numel)
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
