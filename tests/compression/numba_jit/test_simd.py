"""Vectors in Numba's loops: each operation on lanes and on single numbers, against numpy and torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba", exc_type=ImportError)

from numba import njit

from lightning_hetero.compression.numba_jit import simd
from lightning_hetero.compression.numba_jit.simd import WIDTH, load, store

X, Y, Z = np.random.default_rng(0).standard_normal((3, WIDTH + 3)).astype(np.float32)
EDGES = np.array([0.0, -0.0, 1.0, -1.5, 3.4e38, -3.4e38, 1e-45, 257.0, 1.00390625, 1.01171875, 2.0**-130], np.float32)


def on_lanes_and_singles(operation):
    """A loop that takes whole vectors, and then the elements behind the last one."""

    @njit
    def loop(x, y, out):
        store(out, 0, operation(load(x, 0), load(y, 0)))
        for i in range(WIDTH, len(x)):
            out[i] = operation(x[i], y[i])

    def apply(x, y):
        out = np.empty_like(x)
        loop(x, y, out)
        return out

    return apply


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_is_numpys(name):
    expected = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name](X, Y)
    np.testing.assert_array_equal(on_lanes_and_singles(getattr(simd, name))(X, Y), expected)


def test_a_number_stands_in_each_lane():
    @njit
    def loop(x, number, out):
        store(out, 0, simd.mul(load(x, 0), number))
        store(out, WIDTH, simd.spread(number))

    out = np.empty(2 * WIDTH, np.float32)
    loop(X, np.float32(3.0), out)
    np.testing.assert_array_equal(out[:WIDTH], X[:WIDTH] * np.float32(3.0))
    np.testing.assert_array_equal(out[WIDTH:], np.full(WIDTH, 3.0, np.float32))


def test_fma_rounds_once():
    """``x x - 1`` of a number near 1, whose square has more digits than float32."""

    @njit
    def loop(x, y, z, out):
        store(out, 0, simd.fma(load(x, 0), load(y, 0), load(z, 0)))
        for i in range(WIDTH, len(x)):
            out[i] = simd.fma(x[i], y[i], z[i])

    out, near = np.empty_like(X), np.full_like(X, 1 + 2.0**-23)
    loop(near, near, np.full_like(X, -1.0), out)
    np.testing.assert_array_equal(out, np.full_like(X, 2.0**-22 + 2.0**-46))


def test_roots_and_magnitudes():
    @njit
    def loop(x, out):
        store(out, 0, simd.sqrt(simd.absolute(load(x, 0))))
        for i in range(WIDTH, len(x)):
            out[i] = simd.sqrt(simd.absolute(x[i]))

    out = np.empty_like(X)
    loop(X, out)
    np.testing.assert_array_equal(out, np.sqrt(np.abs(X)))


def test_bfloat16_is_torchs_and_never_infinite():
    @njit
    def loop(x, out, upper):
        store(out, 0, simd.bfloat16(load(x, 0)))
        simd.store_high(upper, 0, simd.bfloat16(load(x, 0)))
        for i in range(WIDTH, len(x)):
            out[i] = simd.bfloat16(x[i])
            upper[i] = simd.high(out[i])

    @njit
    def back(upper, out):
        for i in range(len(upper)):
            out[i] = simd.from_high(upper[i])

    largest = torch.finfo(torch.bfloat16).max
    for values in (EDGES, EDGES[::-1].copy(), X):
        out, upper, again = np.empty_like(values), np.empty(len(values), np.uint16), np.empty_like(values)
        loop(values, out, upper)
        back(upper, again)
        expected = torch.from_numpy(values).clamp(-largest, largest).bfloat16().float().numpy()
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(again, expected)
        np.testing.assert_array_equal(np.signbit(out), np.signbit(values))


def test_lanes_are_summed_and_compared():
    @njit
    def loop(x, threshold):
        return simd.total(load(x, 0)), simd.any_reaches(load(x, 0), threshold)

    whole = np.arange(1, WIDTH + 1, dtype=np.float32)
    assert loop(whole, np.float32(WIDTH)) == (WIDTH * (WIDTH + 1) / 2, True)
    assert loop(whole, np.float32(WIDTH + 0.5))[1] is False
    assert loop(np.full(WIDTH, np.nan, np.float32), np.float32(0.0))[1] is False


def test_arrays_are_found_by_their_address():
    @njit
    def loop(numbers, at, size):
        simd.prefetch(simd.floats(at, size), 0)
        return simd.floats(at, size).sum() + simd.integers(numbers, 2).sum()

    values, numbers = np.array([1.5, 2.5], np.float32), np.array([3, 4])
    assert loop(numbers.ctypes.data, values.ctypes.data, 2) == 11.0
