"""``lightning-hetero profile``: times of this machine's device for a script's batches, as ``plan`` reads them.

The script itself is started, on one worker; its strategy obeys an order in the environment
(:mod:`lightning_hetero.probe_job`) and times a few steps at each of several batch sizes.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from lightning_hetero.cli._parser import Parser, UserError, option
from lightning_hetero.cli._script_run import (
    ProbeError,
    RefusedError,
    ScriptRun,
    add_script_options,
    file_name,
    misplaced,
    whole_option,
)
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.whole_file import write_file
from lightning_hetero.probe_job import DeviceReport, ProbeOrder
from lightning_hetero.simulate.planning.cluster import Cluster, Link, Worker
from lightning_hetero.simulate.planning.recorded import record
from lightning_hetero.simulate.planning.units import format_seconds, parse_count, parse_number
from lightning_hetero.simulate.planning.wording import check_name

__all__ = ["add_options", "fitted", "run"]

MOST_JITTER = 0.15
MOST_SIZE = 10**9


def add_options(parser: Parser) -> None:
    """Add the options of ``profile``."""
    add = parser.add_argument
    add(
        "--output",
        type=option(file_name),
        default=Path("device.json"),
        metavar="FILE",
        help="profile to write (device.json)",
    )
    add("--name", type=option(check_name), help="name of the device in plans (default: as torch names it)")
    add("--steps", type=whole_option(2), default=12, metavar="N", help="steps to time at each size (default 12)")
    sizes = "batch sizes in order (default: a quarter to twice the script's own, up and down)"
    add("--sizes", type=option(_sizes), default=(), metavar="8,16,32", help=sizes)
    add("--price", type=option(parse_number), metavar="X", help="price of an hour of this device, for the cost")
    add_script_options(parser, timeout=1800.0, longest="run", where=" on one device")


def run(options: argparse.Namespace) -> int:
    """Measure the times of a script's steps and write the device's profile.

    Returns:
        0 if the profile is written, 1 if the script fails.

    Raises:
        UserError: if an argument is wrong, or the script cannot train with these sizes.
    """
    if not options.script.is_file():
        what = "is a folder" if options.script.is_dir() else "does not exist"
        raise UserError(f"there is no script {options.script}: it {what}. Give the file that trains.")
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise UserError(f"--output {options.output} cannot be written: give a file in a folder that exists.")
    probes = ScriptRun([*options.launcher, str(options.script), *options.arguments], timeout=options.timeout)
    try:
        report = probes.ask(
            lambda answer: ProbeOrder(answer, steps=options.steps, sizes=options.sizes),
            DeviceReport.read,
            "the training that times this device",
            "raise --timeout, or lower --steps",
        )
        cluster = fitted(report, options.name, options.price)
        write_file(options.output, f"{json.dumps(record(cluster), indent=2)}\n".encode())
    except OSError as error:
        why = error.strerror or "it cannot be written"
        raise UserError(f"--output {options.output}: {why}. Give a file in another folder.") from error
    except (ProbeError, ValueError) as error:
        told = f"{error}{misplaced('profile', options)}"
        if isinstance(error, RefusedError):
            raise UserError(told) from error
        sys.stderr.write(f"lightning-hetero profile: {told}\n")
        return 1
    sys.stdout.write(_text(report, cluster, options.output))
    return 0


def fitted(report: DeviceReport, name: str | None = None, price: float | None = None) -> Cluster:
    """Return a cluster of one worker whose time model is fitted to the timed steps (C eq. 3).

    The jitter is the relative deviation of single steps from the model, the error that of the model's prediction in
    the middle of the sizes.

    Args:
        report: the timed steps.
        name: of the device; as the script reports it by default.
        price: of an hour.

    Raises:
        ValueError: if fewer than two sizes were timed.

    Example:
        >>> rows = [[b, 0.001 * b + 0.01, 0.002 * b + 0.02, 0.0] for b in (8, 16, 32)]
        >>> worker = fitted(DeviceReport("gpu", rows, None, 10, 40, 16, 100)).workers[0]
        >>> worker.q, worker.s, worker.k, worker.m, worker.jitter
        (0.001, 0.01, 0.002, 0.02, 0.0)
    """
    rows = np.array(report.rows, dtype=float).reshape(len(report.rows), 4)
    sizes, outside, backward, first = (rows[:, i : i + 1] for i in range(4))
    if len(np.unique(sizes)) < 2:
        raise ValueError("fewer than two batch sizes were timed, so that fixed and variable time cannot be told apart.")
    zeros = np.zeros_like(sizes)
    model = ClusterTimeModel.fit(StepObservations(sizes, outside, backward, first, zeros, zeros, zeros))
    q, s, k, m = (float(f"{value:.9g}") for value in model.array[0].tolist())
    found = np.concatenate([outside / (q * sizes + s), backward / np.maximum(k * sizes + m, 1e-12)])
    jitter = _typical_deviation(found - np.median(found))
    middle = float(sizes.mean())
    a, backward_time = q * middle + s, k * middle + m
    error = jitter * float(np.hypot(a, backward_time)) / (a + backward_time) / np.sqrt(len(rows))
    worker = Worker(
        name or report.name,
        q,
        s,
        k,
        m,
        memory=report.memory,
        error=float(f"{error:.3g}"),
        jitter=float(f"{jitter:.3g}"),
        price=price,
    )
    link = Link(float(report.gradient_bytes), gamma=float(np.clip(model.gamma, 0.0, 1.0)))
    return Cluster((worker,), link, report.total, report.dataset)


def _typical_deviation(values: np.ndarray) -> float:
    """Return the standard deviation that the middle half of the values suggests; single long steps do not count."""
    value = 1.4826 * float(np.median(np.abs(values)))
    return value if value > 1e-9 else 0.0


def _text(report: DeviceReport, cluster: Cluster, output: Path) -> str:
    worker, sizes = cluster.workers[0], sorted({int(row[0]) for row in report.rows})
    noisy = worker.jitter > MOST_JITTER
    lines = [
        f"{worker.name}: {len(report.rows)} steps at batch sizes {', '.join(map(str, sizes))}",
        f"outside of the backward pass  {format_seconds(worker.q)} a sample and {format_seconds(worker.s)}",
        f"backward pass                 {format_seconds(worker.k)} a sample and {format_seconds(worker.m)}",
        f"jitter of a step              {worker.jitter:.1%}",
        f"gradients                     {report.gradient_bytes / 1e6:.4g} MB ({report.parameters} parameters)",
        *(["so much jitter makes the profile unsure: run it again when nothing else runs"] if noisy else []),
        f"wrote {output}; plan with it: lightning-hetero plan 4x{output} --link 1Gbit",
    ]
    return "\n".join(lines) + "\n"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_count(part, MOST_SIZE) for part in text.split(",") if part.strip())
    if len(set(sizes)) < 2:
        raise ValueError(
            f"{text!r} has fewer than two different sizes, which cannot tell fixed from variable time; give "
            "two at least, such as 8,16,32."
        )
    return sizes
