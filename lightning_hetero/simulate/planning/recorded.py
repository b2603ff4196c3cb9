"""Recorded time models in a file: those of a run, or of one device that ``lightning-hetero profile`` measured.

Version 1 of the format is::

    {"version": 1,
     "workers": [{"name": "a", "q": 0.001, "s": 0.01, "k": 0.002, "m": 0.02, "memory": 96, "error": 0.01, ...}],
     "gamma": 0.12, "t_o": 0.03, "t_u": 0.01, "total_batch_size": 256, "gradient_bytes": 102400000}

``memory``, ``error``, ``jitter`` and ``price`` of a worker, the total and the bytes may be missing or ``null``. ``t_o``
and ``t_u`` are those of as many workers as there are, or of ``measured_on``. A file that is written has ``checksums``
too; without them, it may be edited. The state of a
:class:`~lightning_hetero.core.planning.planner.PerfModelPlanner` is read, too.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_hetero.core.checkpoint_state import CHECKSUMS, changed_since, with_checksums
from lightning_hetero.simulate.planning.cluster import Cluster, Link, Worker
from lightning_hetero.simulate.planning.document import Entry
from lightning_hetero.simulate.planning.units import MOST_NUMBER, parse_count, parse_number

if TYPE_CHECKING:
    from lightning_hetero.core.planning.link_times import LinkTimes
    from lightning_hetero.core.planning.worker_times import WorkerTimes

__all__ = ["VERSION", "WORKER_KEYS", "is_planner_state", "of_planner_state", "of_record", "record", "worker_of"]

VERSION = 1
NUMBERS = ("q", "s", "k", "m", "error", "jitter", "price")
WORKER_KEYS = ("name", *NUMBERS, "memory")
KEYS = ("version", "workers", "gamma", "t_o", "t_u", "measured_on", "gradient_bytes", "total_batch_size", "samples")


def record(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as :func:`of_record` reads it, in plain values.

    Example:
        >>> record(Cluster((Worker("a", 0.001, 0.0, 0.002, 0.0),)))["workers"][0]["k"]
        0.002
    """
    t_o, t_u = cluster.link.times(len(cluster.workers))
    workers = [{name: getattr(worker, name) for name in WORKER_KEYS} for worker in cluster.workers]
    values = {
        "version": VERSION,
        "workers": [{name: value for name, value in entry.items() if value is not None} for entry in workers],
        "gamma": cluster.link.gamma,
        "t_o": t_o,
        "t_u": t_u,
        "gradient_bytes": cluster.link.gradient_bytes,
        "total_batch_size": cluster.total_batch_size,
        "samples": cluster.samples,
    }
    return with_checksums(values)


def of_record(entry: Entry) -> Cluster:
    """Return the cluster of a recorded file.

    Raises:
        DocumentError: if something in it is wrong; the line is named.
    """
    fields = entry.fields((*KEYS, CHECKSUMS), ("version", "workers"))
    if CHECKSUMS in fields:
        _check(entry)
    if fields["version"].text() != str(VERSION):
        raise fields["version"].error(f"version {fields['version'].text()} is unknown; this package reads {VERSION}.")
    workers = tuple(worker_of(each) for each in fields["workers"].elements())
    if not workers:
        raise fields["workers"].error("the list is empty; give one worker at least.")
    most = {"t_o": MOST_NUMBER, "t_u": MOST_NUMBER, "gradient_bytes": 1e18}
    number = {name: fields[name].parsed(partial(parse_number, high=most[name])) for name in most if name in fields}
    gamma = fields["gamma"].parsed(lambda text: parse_number(text, high=1.0)) if "gamma" in fields else Link().gamma
    whole = {
        name: fields[name].parsed(parse_count)
        for name in ("total_batch_size", "samples", "measured_on")
        if name in fields
    }
    link = Link(
        number.get("gradient_bytes"),
        gamma=gamma,
        t_o=number.get("t_o", 0.0),
        t_u=number.get("t_u", 0.0),
        measured_on=whole.get("measured_on", len(workers)) if "t_u" in number or "t_o" in number else 0,
    )
    return Cluster(workers, link, whole.get("total_batch_size"), whole.get("samples"), Path(entry.file).stem)


def worker_of(entry: Entry) -> Worker:
    """Return the worker of a mapping with its coefficients.

    Raises:
        DocumentError: if something in it is wrong.
    """
    fields = entry.fields(WORKER_KEYS, ("q", "s", "k", "m"))
    numbers = {name: fields[name].parsed(parse_number) for name in NUMBERS if name in fields}
    memory = fields["memory"].parsed(parse_count) if "memory" in fields else None
    name = fields["name"].text() if "name" in fields else "worker"
    try:
        return Worker(name, memory=memory, **numbers)
    except (TypeError, ValueError) as error:
        raise entry.error(str(error)) from None


def _check(entry: Entry) -> dict[str, Any]:
    """Return the values of a mapping, none of which has changed since it was written.

    Raises:
        DocumentError: if one has.
    """
    try:
        values: dict[str, Any] = entry.plain()
    except RecursionError:
        raise entry.error("a list or a mapping in it contains itself, or is nested too deeply.") from None
    if (name := changed_since(values)) is not None:
        raise entry.error(
            f"{name!r} has changed since the file was written. If that was intended, delete {CHECKSUMS!r} in it."
        )
    return values


def is_planner_state(entry: Entry) -> bool:
    """Return whether the file holds the state of a planner."""
    return {"times", "link"} <= set(entry.keys())


def of_planner_state(entry: Entry) -> Cluster:
    """Return the cluster that a planner has learned; its total batch is not part of the state.

    Raises:
        DocumentError: if it is no such state, or an empty one.
    """
    from lightning_hetero.core.planning.link_times import LinkTimes
    from lightning_hetero.core.planning.worker_times import WorkerTimes

    state = _check(entry)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused as a worker's time
            times, link = WorkerTimes.from_state_dict(state["times"]), LinkTimes.from_state_dict(state["link"])
            return _learned_cluster(times, link, Path(entry.file).stem)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise entry.error(f"this is no state of a time model, or an empty one ({error!r}).") from None


def _learned_cluster(times: "WorkerTimes", link: "LinkTimes", name: str) -> Cluster:
    """Return the cluster of learned times.

    Raises:
        ArithmeticError, ValueError: if a time is none that a worker can have.
    """
    sizes = (times.steps * times.size).sum(axis=1) / times.steps.sum(axis=1)
    rows = zip(times.names, times.lines(sizes), times.errors(sizes), times.jitter, strict=True)
    workers = tuple(
        Worker(worker, q, s, k, m, error=float(error), jitter=float(jitter))
        for worker, (q, s, k, m), error, jitter in rows
    )
    count = max(link.rounds, default=1)
    gamma, t_o, t_u = link.at(count)
    learned = Link(gamma=min(max(gamma, 0.0), 1.0), t_o=max(t_o, 0.0), t_u=max(t_u, 0.0), measured_on=count)
    return Cluster(workers, learned, name=name)
