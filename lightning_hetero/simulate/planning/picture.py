"""Picture of a plan, or of what a simulated planner does over time; needs Matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hetero.core.rounded import rounded
from lightning_hetero.simulate.planning.answer import PlanAnswer, WorkerAnswer
from lightning_hetero.simulate.planning.tables import group_label, worker_groups
from lightning_hetero.simulate.planning.units import format_seconds
from lightning_hetero.simulate.planning.wording import counted

__all__ = ["FORMATS", "check_picture", "draw_plan", "draw_split"]

FORMATS = (".png", ".svg", ".pdf")
MOST_BARS = 40
LEGEND_COLUMNS = 4
STYLES = ("-", "--", ":", "-.")
"""Line of each ten kinds of workers, which have ten colors."""


def check_picture(path: str) -> str:
    """Return the path of a picture if its ending names a format.

    Raises:
        ValueError: if it does not, or cannot be written.

    Example:
        >>> check_picture("plan.svg")
        'plan.svg'
    """
    if Path(path).suffix not in FORMATS:
        raise ValueError(f"{path!r} does not end in {', '.join(FORMATS)}, of which one chooses the format.")
    if find_spec("matplotlib") is None:
        raise ValueError("a picture needs Matplotlib. Install it with: pip install 'lightning-hetero[demo]'")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"{path!r} cannot be written: give a file in a folder that exists.")
    return path


def draw_plan(answer: PlanAnswer, path: str, title: str = "") -> None:
    """Draw a bar for each kind of worker: the time that it computes and that it idles, and its samples.

    Raises:
        ModuleNotFoundError: if there is no Matplotlib.
    """
    every = worker_groups(answer.workers)
    names = [_plain(group_label(label, len(group))) for label, group in list(every.items())[:MOST_BARS]]
    groups = list(every.values())[:MOST_BARS]
    figure, axes = _figure(max(1.2 + 0.32 * len(groups), 2.2))
    compute = np.array([np.mean([worker.compute_time for worker in group]) for group in groups])
    places = np.arange(len(groups))
    axes.barh(places, 1e3 * compute, color="#3b6ea5", label="computes")
    idle = 1e3 * (answer.step_time - compute)
    axes.barh(places, idle, left=1e3 * compute, color="#d9d9d9", label="waits or exchanges gradients")
    for place, group in enumerate(groups):
        axes.text(0, place, f" {_samples(group)} samples", va="center", color="white", fontsize=8)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("ms in a step")
    speed = f"{rounded(answer.samples_per_second, 4)} samples/s, {format_seconds(answer.expected_step_time)} a step"
    axes.set_title(_plain(f"{title}: {speed}" if title else speed), fontsize=10)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    _save(figure, path)


def _samples(group: Sequence[WorkerAnswer]) -> str:
    sizes = sorted({worker.local_batch_size for worker in group})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"


def draw_split(steps: Sequence[int], sizes: Any, shares: Any, names: Sequence[str], path: str, title: str = "") -> None:
    """Draw the local batch sizes over steps, and the share of the optimum that each step reaches.

    Args:
        steps: number of each step.
        sizes: samples of each worker in each step, shape ``(steps, workers)``.
        shares: share of the speed of the optimum in each step.
        names: names of the workers.
        path: of the picture.
        title: above it.

    Raises:
        ModuleNotFoundError: if there is no Matplotlib.
    """
    first = list(dict.fromkeys(names))[:MOST_BARS]
    rows = -(-len(first) // LEGEND_COLUMNS)
    figure, axes = _figure(4.0 + 0.2 * rows, rows=2)
    every = np.unique(np.asarray(sizes), axis=1, return_index=True)[1]
    lines = sorted({names.index(kind) for kind in first} | {int(i) for i in every[:MOST_BARS] if names[i] in first})
    styles = {kind: {"color": f"C{i % 10}", "linestyle": STYLES[i // 10]} for i, kind in enumerate(first)}
    for i in lines:  # equal devices whose sizes differ have one color
        axes[0].plot(steps, np.asarray(sizes)[:, i], drawstyle="steps-post", linewidth=1.2, **styles[names[i]])
    axes[0].set_ylabel("samples")
    for kind in first:
        axes[0].plot([], [], label=_plain(group_label(kind, list(names).count(kind))), **styles[kind])
    columns = min(LEGEND_COLUMNS, len(first))
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=columns, handlelength=3)
    more = len(dict.fromkeys(names)) - len(first)
    title += f" (without {counted(more, 'more kind')} of workers)" if more else ""
    axes[0].set_title(_plain(title), fontsize=10)
    axes[1].plot(steps, np.asarray(shares), color="#3b6ea5", drawstyle="steps-post", linewidth=1.2)
    axes[1].axhline(1.0, color="#999999", linewidth=0.8)
    axes[1].set_ylabel("share of the optimum")
    axes[1].set_xlabel("step")
    axes[1].set_ylim(0, 1.05)
    _save(figure, path)


def _plain(text: str) -> str:
    """Return a text in which a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=rows > 1)


def _save(figure: Any, path: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "lightning-hetero"}):  # the same picture is the same file
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)
