"""Windows of any shape against Gaussian gradients of known moments; equal ones against the plain estimators."""

import math

import numpy as np
import pytest

from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.estimators import METHODS, estimate_from_two_sizes, estimate_noise_scale

TRIALS, DIMENSION, SIGMAS = 20_000, 12, 4.5
MEAN = np.linspace(-1.0, 1.5, DIMENSION)
VARIANCES = np.geomspace(0.05, 20.0, DIMENSION)
SIGNAL, TRACE = float(MEAN @ MEAN), float(VARIANCES.sum())
PHI = TRACE / SIGNAL


def norms(sizes, divisor=None, summed=False):
    """Squared norms as a step has them, shape ``(trials, ranks, 3)``."""
    b = np.array(sizes, float)
    rng = np.random.default_rng([5, *b.astype(int).ravel()])
    noise = rng.standard_normal((TRIALS, *b.shape, DIMENSION)) * np.sqrt(VARIANCES)
    own = MEAN + noise / np.sqrt(np.maximum(b, 1e-9))[..., None] * (b > 0)[..., None]
    weights = b / (b.shape[1] if summed else b.sum(axis=1, keepdims=True)) / (divisor or len(b))
    parts = weights[..., None] * own
    first, local = b.shape[1] * parts[:, 0], b.shape[1] * parts.sum(axis=1)
    whole = parts.sum(axis=(1, 2))
    each = [(first**2).sum(-1), (local**2).sum(-1), np.repeat((whole**2).sum(-1)[:, None], b.shape[1], axis=1)]
    return np.stack(each, axis=-1)


def estimates(sizes, divisor=None, summed=False, **how):
    """``S`` and ``|G|^2`` of all trials."""
    estimator = window_estimator(sizes, divisor=divisor, summed=summed, **how)
    trace, square = np.einsum("tin,ikn->kt", norms(sizes, divisor, summed), np.array(estimator.parts))
    return trace, square - trace / estimator.samples


def assert_mean_is(values, expected):
    assert abs(values.mean() - expected) < SIGMAS * values.std() / math.sqrt(len(values))


WINDOWS = {
    "one batch": (((9, 3),), None),
    "micro-batches": (((9, 3), (9, 3), (9, 3)), None),
    "ragged tail": (((9, 3), (5, 1)), None),
    "another split": (((6, 2, 4), (4, 4, 4)), None),
    "a very different split": (((20, 2), (1, 4)), None),
    "cut short": (((5, 4, 3), (5, 4, 3)), 4),
    "cut to one": (((5, 4, 3),), 4),
    "a worker without samples": (((8, 0, 4), (8, 0, 4)), None),
    "none at first": (((8, 0, 4), (8, 2, 4)), None),
}


@pytest.mark.parametrize("summed", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_estimates_are_unbiased(window, nested, summed):
    sizes, divisor = WINDOWS[window]
    trace, signal = estimates(sizes, divisor, summed, nested=nested, noise_scale=PHI)
    scale = 1.0  # of a mean loss, whatever the loss is
    assert_mean_is(trace, scale * TRACE)
    assert_mean_is(signal, scale * SIGNAL)


@pytest.mark.parametrize("sizes", [((4,), (4,)), ((4,), (4,), (4,)), ((5,), (4,)), ((8, 0), (8, 0))], ids=str)
def test_one_worker_with_micro_batches_is_unbiased(sizes):
    trace, signal = estimates(sizes, nested=True)
    assert_mean_is(trace, TRACE)
    assert_mean_is(signal, SIGNAL)
    assert window_estimator(sizes) is None


def test_one_worker_compares_the_first_micro_batch_with_the_window():
    (part,) = window_estimator(((4,), (4,), (4,)), nested=True).parts
    small, big = 5.0, 2.0
    trace, square = np.array(part) @ [small / 9, big, big]
    expected = estimate_from_two_sizes(small, 4, big, 12)
    assert (trace, square) == pytest.approx((expected.trace, big))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [(2, 6), (16, 4, 2, 2), (1, 1, 1, 125), (8, 0, 4)], ids=str)
def test_equal_windows_are_the_plain_estimators(sizes, method):
    """Both values of Theorem 4.1 with the printed weights, also with micro-batches."""
    total, n = sum(sizes), len(sizes)
    for count, divisor in ((1, None), (3, None), (2, 4)):
        cut = 1.0 if divisor is None else (count / divisor) ** 2
        estimator = window_estimator((sizes,) * count, divisor=divisor, method=method)
        local, whole = np.linspace(2.0, 5.0, n), 1.5
        weighted = [p * (n * b / total) ** 2 * cut for p, b in zip(local, sizes, strict=True)]
        rows = [np.array(part) @ [0.0, w, whole * cut] for part, w in zip(estimator.parts, weighted, strict=True)]
        trace, square = np.sum(rows, axis=0)
        expected = estimate_noise_scale(local, whole, [count * b for b in sizes], method=method)
        assert estimator.samples == pytest.approx(count * total)
        assert trace == pytest.approx(expected.trace)
        assert square - trace / (count * total) == pytest.approx(expected.grad_sq_norm)


@pytest.mark.parametrize("method", ["mean", "cannikin"])
def test_other_methods_compare_workers_alone(method):
    """Degrees of freedom, by which first micro-batches count, are known of the pooled estimator only."""
    sizes = ((6, 2, 4),) * 3
    assert window_estimator(sizes, method=method, nested=True) == window_estimator(sizes, method=method)
    assert window_estimator(sizes, nested=True) != window_estimator(sizes)


@pytest.mark.parametrize("phi", [0.1 * PHI, PHI, 10 * PHI, math.inf])
def test_first_micro_batches_make_the_variance_smaller(phi):
    """With two workers they are worth most; a wrong guess of the noise scale costs little."""
    sizes = ((6, 2),) * 4
    plain, _ = estimates(sizes)
    better, _ = estimates(sizes, nested=True, noise_scale=phi)
    assert better.var() < 0.9 * plain.var()


def test_they_count_for_little_where_the_signal_is_strong():
    """Their first-order noise does not cancel, as that between workers does: the noise scale weighs it."""
    sizes, calm = ((64, 32),) * 2, PHI / 100
    parts = np.array(window_estimator(sizes, nested=True, noise_scale=calm).parts)
    plain = np.array(window_estimator(sizes).parts)
    assert np.abs(parts - plain).max() < 0.05 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        (((4,),), {"nested": True}),
        (((7,), (2,)), {"nested": True}),  # the mean of both is noisier than the first
        (((4, 0),), {}),
        (((0, 0),), {}),
        (((100, 0), (0, 2)), {}),  # the mean of both is hardly one over samples
        (((60, 2), (1, 4)), {}),  # a comparison of both workers would keep less than half of its degree of freedom
        (((4, 4),), {"exact": False}),
    ],
    ids=str,
)
def test_what_tells_nothing_is_left_out(sizes, how):
    with np.errstate(invalid="ignore"):
        assert window_estimator(sizes, **how) is None


def test_local_norms_alone_are_unbiased():
    """The sum is compressed: what is seen of it is not used."""
    sizes = ((9, 3, 2), (9, 3, 2))
    estimator = window_estimator(sizes, exact=False)
    seen = norms(sizes)
    seen[..., [0, 2]] = np.nan
    parts = np.array(estimator.parts)
    assert not parts[..., [0, 2]].any()
    trace, square = np.einsum("ti,ik->kt", seen[..., 1], parts[..., 1])
    assert_mean_is(trace, TRACE)
    assert_mean_is(square - trace / estimator.samples, SIGNAL)
