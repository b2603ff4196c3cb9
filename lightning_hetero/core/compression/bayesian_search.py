"""Search for the convergence profile of a model with few probe trainings (S Alg. 1).

A Gaussian process models ``g(r, x)``, the cost of compression rate ``r`` and total batch ``x``. Each probe takes a
random rate, to explore all of them, and the batch with the greatest expected improvement at that rate.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.normal import normal_cdf, normal_pdf
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["ConvergenceSurrogate", "ProfilePenalty", "expected_improvement", "profile_convergence"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _SearchSettings:
    """Constants of the search.

    Args:
        max_rate: greatest compression rate of a probe.
        candidates: number of total batches that are compared.
        random_probes: number of first probes whose total batch is random.
        diverged: relative extra loss assumed for a training that diverged: ten times the loss.
        grid: number of densities and of total batches for which the penalty is tabulated.
        min_penalty: least penalty; above -1, so that samples never become free.
    """

    max_rate: float = 0.999
    candidates: int = 64
    random_probes: int = 3
    diverged: float = 9.0
    grid: tuple[int, int] = (32, 17)
    min_penalty: float = -0.9


_SEARCH = _SearchSettings()


@checked_keywords
class ConvergenceSurrogate:
    """Gaussian process over a profile: extra loss and its uncertainty at any compression rate and total batch.

    The process measures rates by ``log10(1 - r + 0.001)``, so that 0.99 is about as far from 0.999 as from 0.9, and
    batches by their logarithm.

    Args:
        profile: probe trainings.

    Raises:
        ImportError: if scikit-learn is missing.

    Example:
        >>> profile = ConvergenceProfile(16, 256, 1.0, ((0.0, 64, 0.0), (0.9, 64, 0.2), (0.99, 64, 0.4)))
        >>> surrogate = ConvergenceSurrogate(profile)
        >>> bool(0.0 < surrogate.extra_loss(0.7, 64) < surrogate.extra_loss(0.97, 64) < 0.4)
        True
    """

    def __init__(self, profile: ConvergenceProfile) -> None:
        try:
            from sklearn.gaussian_process import GaussianProcessRegressor
            from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
        except ImportError as error:
            raise ImportError("convergence profiles need scikit-learn; install lightning-hetero[demo].") from error
        self.profile = profile
        rates, totals, extra = np.array(profile.points).T
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern([1.0, 1.0], (0.2, 10.0), nu=2.5) + WhiteKernel(
            1e-2, (1e-4, 1.0)
        )
        self._process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few points may put a length scale at its bound
            self._process.fit(self._features(rates, totals), extra)

    def _features(self, rates: npt.ArrayLike, totals: npt.ArrayLike) -> Array:
        rates, totals = np.broadcast_arrays(np.asarray(rates, dtype=float), np.asarray(totals, dtype=float))
        low, high = math.log(self.profile.min_total), math.log(self.profile.max_total)
        batches = (np.log(totals) - low) / max(high - low, 1e-9)
        return np.stack([-np.log10(1.0 - rates + 1e-3) / 3.0, batches], axis=-1)

    def predict(self, rate: float, totals: npt.ArrayLike) -> tuple[Array, Array]:
        """Return mean and standard deviation of the relative extra loss at a compression rate and total batches."""
        features = self._features(rate, np.atleast_1d(totals))
        mean, deviation = self._process.predict(features, return_std=True)
        return mean, deviation

    def extra_loss(self, rate: float, total: float) -> float:
        """Return ``g(r, x)``: relative extra loss at compression rate ``r``, 0 to 1, and total batch ``x``."""
        return float(self.predict(check_number("rate", rate, low=0.0, high=1.0), total)[0][0])


class ProfilePenalty:
    """Table of the penalty ``g(density, total)`` of a profile: the surrogate on a grid, log-linearly interpolated.

    A controller asks for hundreds of values at a time; the Gaussian process itself would take too long for that.
    Totals outside the range of the profile get the value at its nearest end.

    Args:
        profile: probe trainings.

    Raises:
        ImportError: if scikit-learn is missing.

    Example:
        >>> profile = ConvergenceProfile(16, 256, 1.0, ((0.0, 64, 0.0), (0.9, 64, 0.2), (0.99, 64, 0.4)))
        >>> penalty = ProfilePenalty(profile)
        >>> bool(abs(penalty(0.1, 64) - ConvergenceSurrogate(profile).extra_loss(0.9, 64)) < 0.01)
        True
    """

    def __init__(self, profile: ConvergenceProfile) -> None:
        self.profile = profile
        surrogate = ConvergenceSurrogate(profile)
        densities, batches = _SEARCH.grid
        self._densities = np.linspace(math.log(1.0 - _SEARCH.max_rate), 0.0, densities)
        self._totals = np.linspace(
            math.log(profile.min_total), math.log(max(profile.max_total, profile.min_total + 1)), batches
        )
        totals = np.exp(self._totals)
        table = [surrogate.predict(1.0 - math.exp(density), totals)[0] for density in self._densities]
        self._extra = np.maximum(np.array(table), _SEARCH.min_penalty)

    def __call__(self, density: float | Array, total: float | Array) -> Array:
        """Return the extra samples, as a share, at densities (above 0, to 1) and total batches, with broadcasting."""
        (i, x), (j, y) = _place(np.log(density), self._densities), _place(np.log(total), self._totals)
        below, above = (self._extra[k, j] * (1.0 - y) + self._extra[k, j + 1] * y for k in (i, i + 1))
        extra: Array = below * (1.0 - x) + above * x
        return extra


def _place(values: Array, grid: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return each value's cell of an even grid and its position in that cell, 0 to 1; outside the grid, its end."""
    places = np.interp(values, grid, np.arange(len(grid)))
    cells = np.minimum(places.astype(np.int64), len(grid) - 2)
    return cells, places - cells


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Return the expected decrease of normally distributed values below the best one so far (minimization).

    Example:
        >>> expected_improvement(np.array([1.0, 1.0]), np.array([0.0, 1.0]), best=1.5).round(3).tolist()
        [0.5, 0.698]
    """
    spread = np.maximum(deviation, 1e-12)
    z = (best - mean) / spread
    improvement: Array = (best - mean) * normal_cdf(z) + spread * normal_pdf(z)
    return improvement


@checked_keywords
def profile_convergence(
    probe: Callable[[float, int, int], float],
    *,
    min_total: int,
    max_total: int,
    probes: int = 30,
    rng: np.random.Generator | None = None,
    on_profile: Callable[[ConvergenceProfile], None] | None = None,
) -> ConvergenceProfile:
    """Choose and run probe trainings (S Alg. 1).

    Args:
        probe: ``(compression rate, total batch, staleness) -> smoothed loss`` of a short training on some of the data.
        min_total: least total batch.
        max_total: greatest total batch.
        probes: number of probe trainings besides the baseline, ``>= 1``.
        rng: source of the random rates.
        on_profile: called with the profile so far after each probe training, e.g. to save it.

    Raises:
        ImportError: if scikit-learn is missing.
        ValueError: if an argument is out of range, or the first probe's loss is not above 0.

    Example:
        >>> def probe(rate, total, staleness):
        ...     return 1.0 + 0.2 * rate + 0.1 * abs(np.log2(total / 64))
        >>> profile = profile_convergence(probe, min_total=16, max_total=256, probes=4)
        >>> len(profile.points)
        4
    """
    check_int("min_total", min_total, minimum=1)
    check_int("max_total", max_total, minimum=min_total)
    check_int("probes", probes, minimum=1)
    rng = np.random.default_rng(0) if rng is None else rng
    baseline = float(probe(0.0, (min_total + max_total) // 2, 0))
    if not (math.isfinite(baseline) and baseline > 0):
        raise ValueError(f"the probe without compression ended with a loss of {baseline}; it must be finite, above 0.")
    points: list[tuple[float, float, float]] = []
    for _ in range(probes):
        rate = float(rng.uniform(0.0, _SEARCH.max_rate))
        total = _next_total(rate, points, min_total, max_total, baseline, rng)
        loss = float(probe(rate, total, 1))
        points.append((rate, total, _extra(loss, baseline)))
        profile = ConvergenceProfile(min_total, max_total, baseline, tuple(points))
        if on_profile is not None:
            on_profile(profile)
    return profile


def _extra(loss: float, baseline: float) -> float:
    """Return the relative extra loss; a training that diverged counts as ten times the loss."""
    return min(loss / baseline - 1.0, _SEARCH.diverged) if math.isfinite(loss) else _SEARCH.diverged


def _next_total(
    rate: float,
    points: list[tuple[float, float, float]],
    min_total: int,
    max_total: int,
    baseline: float,
    rng: np.random.Generator,
) -> int:
    """Return the total batch of the greatest expected improvement; a random one while there are too few points."""
    totals = np.unique(np.geomspace(min_total, max_total, _SEARCH.candidates).round().astype(int))
    if len(points) < _SEARCH.random_probes:
        return int(rng.choice(totals))
    surrogate = ConvergenceSurrogate(ConvergenceProfile(min_total, max_total, baseline, tuple(points)))
    mean, deviation = surrogate.predict(rate, totals)
    return int(totals[int(np.argmax(expected_improvement(mean, deviation, best=float(mean.min()))))])
