"""Distribution function of the normal distribution, in NumPy.

SciPy has it, too, but is no dependency of the package: where SciPy is installed, ``import lightning`` loads it through
torchmetrics, which takes most of a second.
"""

import math

import numpy as np
import numpy.typing as npt

__all__ = ["normal_cdf", "normal_pdf"]

Array = npt.NDArray[np.float64]

# Rational approximation of the tail over the density, for 0 to FAR (Hart et al., Computer Approximations, 1968, no.
# 5666), highest power first.
NUMERATOR = (
    *(3.52624965998911e-02, 0.700383064443688, 6.37396220353165, 33.912866078383),
    *(112.079291497871, 221.213596169931, 220.206867912376),
)
DENOMINATOR = (
    *(8.83883476483184e-02, 1.75566716318264, 16.064177579207, 86.7807322029461),
    *(296.564248779674, 637.333633378831, 793.826512519948, 440.413735824752),
)
ROOT = math.sqrt(2.0 * math.pi)
FAR = 5.0 * math.sqrt(2.0)
"""Deviations from which on a continued fraction takes its place."""


def normal_cdf(z: Array) -> Array:
    """Return ``Phi(z)``, the share of a standard normal distribution below ``z``, to 1e-15.

    Args:
        z: deviations from the mean, of any shape.

    Example:
        >>> normal_cdf(np.array([0.0, 1.0, -40.0])).round(4).tolist()
        [0.5, 0.8413, 0.0]
    """
    size = np.abs(z)
    near = np.minimum(size, FAR)
    above, below = np.zeros_like(near), np.full_like(near, DENOMINATOR[0])
    for p, q in zip(NUMERATOR, DENOMINATOR[1:], strict=True):
        above = above * near + p
        below = below * near + q
    tail = np.exp(-0.5 * near * near) * above / below
    far = size > FAR
    if far.any():
        x = np.minimum(size[far], 40.0)  # where the tail is 0 in double precision
        fraction = x + 0.65
        for step in (4.0, 3.0, 2.0, 1.0):
            fraction = x + step / fraction
        tail[far] = np.exp(-0.5 * x * x) / (ROOT * fraction)
    return np.where(z > 0.0, 1.0 - tail, tail)


def normal_pdf(z: Array) -> Array:
    """Return the density of the standard normal distribution.

    Example:
        >>> normal_pdf(np.array([0.0, 1.0])).round(4).tolist()
        [0.3989, 0.242]
    """
    density: Array = np.exp(-0.5 * z * z) / ROOT
    return density
