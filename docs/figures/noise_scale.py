"""Draw the variance of three ways to weigh the workers' local estimates of ``tr(Sigma)`` and ``|G|^2``.

    python docs/figures/noise_scale.py

Monte-Carlo with a fixed seed: mean gradients of batches ``b_i`` are drawn from a Gaussian of known mean and covariance,
and every method of ``estimate_noise_scale`` makes its estimates of the same draws. Prints the table, and writes
``noise_scale.svg`` and ``noise_scale.png`` next to this file. Lines are exact formulas.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from lightning_hetero.core.noise.estimators import METHODS, estimate_noise_scale

HERE = Path(__file__).parent
SPLITS = ((4, 4, 4, 4), (8, 4, 2, 2), (16, 4, 2, 2), (64, 8, 4, 2), (125, 1, 1, 1))
TRIALS = 20_000
NOISE_SCALE = 100.0
SIGMA = np.geomspace(0.1, 10.0, 64)  # variances of the gradient of one sample, by parameter
MEAN = np.full(64, np.sqrt(SIGMA.sum() / NOISE_SCALE / 64))

# The palette of Okabe and Ito, which the colour-blind can tell apart; the markers differ besides.
STYLES = {"pooled": ("#0072B2", "o"), "mean": ("#E69F00", "s"), "cannikin": ("#CC79A7", "^")}
LABELS = {"pooled": "pooled (default)", "mean": "mean: equal weights", "cannikin": "cannikin: weights of Theorem 4.1"}


def squared_norms(sizes: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """``|g_i|^2`` of all workers and ``|g|^2``, shape ``(trials, n + 1)``."""
    b = np.array(sizes, dtype=float)
    local = MEAN + rng.standard_normal((TRIALS, len(b), len(MEAN))) * np.sqrt(SIGMA / b[:, None])
    whole = np.einsum("i,tid->td", b / b.sum(), local)
    return np.column_stack([(local**2).sum(-1), (whole**2).sum(-1)])


def estimates(method: str, sizes: tuple[int, ...], norms: np.ndarray) -> np.ndarray:
    """Estimates of ``tr(Sigma)`` and ``|G|^2``, shape ``(trials, 2)``; they are linear in the norms."""
    units = [estimate_noise_scale(row[:-1], row[-1], sizes, method=method) for row in np.eye(len(sizes) + 1)]
    return norms @ np.array([(unit.trace, unit.grad_sq_norm) for unit in units])


def formulas(sizes: tuple[int, ...]) -> np.ndarray:
    """Exact variances of the pooled estimates of ``tr(Sigma)`` and ``|G|^2``."""
    n, total, square = len(sizes), sum(sizes), float(SIGMA @ SIGMA)
    signal = 4 * float(MEAN**2 @ SIGMA) / total
    return np.array([2 * square / (n - 1), signal + 2 * square * n / ((n - 1) * total**2)])


def draw(axes: Axes, variances: dict[str, np.ndarray], exact: np.ndarray, title: str, formula: str) -> None:
    """One panel: a group of markers for each split, and the formula as a line."""
    places = np.arange(len(SPLITS))
    for i, value in enumerate(exact):
        axes.plot(
            [i - 0.4, i + 0.4], [value, value], color="black", lw=1.2, label=formula if i == 0 else None, zorder=1
        )
    for shift, (method, (color, marker)) in zip((-0.2, 0.0, 0.2), STYLES.items(), strict=True):
        axes.plot(places + shift, variances[method], marker, color=color, ms=7, label=LABELS[method])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(places, [",".join(map(str, sizes)) for sizes in SPLITS], fontsize=9)
    axes.set_xlabel("samples of the four workers")
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Print the table and draw both panels."""
    rng = np.random.default_rng(0)
    truth = np.array([SIGMA.sum(), MEAN @ MEAN])
    norms = {sizes: squared_norms(sizes, rng) for sizes in SPLITS}
    relative = {
        method: np.array([estimates(method, sizes, norms[sizes]).var(0) for sizes in SPLITS]) / truth**2
        for method in METHODS
    }
    exact = np.array([formulas(sizes) for sizes in SPLITS]) / truth**2

    print(f"{'variance / truth^2':>20} {'split':>16} {'formula':>10}", *(f"{method:>10}" for method in STYLES))
    for column, name in enumerate(("tr(Sigma)", "|G|^2")):
        for row, sizes in enumerate(SPLITS):
            values = (exact[row, column], *(relative[method][row, column] for method in STYLES))
            print(f"{name:>20} {','.join(map(str, sizes)):>16}", *(f"{value:10.4f}" for value in values))

    plt.rcParams.update({"svg.hashsalt": "noise_scale", "font.family": "DejaVu Sans"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    titles = (r"Variance of the estimate of tr($\Sigma$)", r"Variance of the estimate of $|G|^2$")
    for column, (axes, title) in enumerate(zip((left, right), titles, strict=True)):
        panel = {method: values[:, column] for method, values in relative.items()}
        draw(axes, panel, exact[:, column], title, "exact variance of pooled")
    left.set_ylabel("variance / truth$^2$")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(HERE / "noise_scale.svg", metadata={"Date": None})
    figure.savefig(HERE / "noise_scale.png", dpi=150)


if __name__ == "__main__":
    main()
