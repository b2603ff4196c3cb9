"""Cluster from what a user writes: a YAML file, a recorded file, a published cluster's name, or a list of devices."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_hetero.simulate.devices.catalog import (
    cluster_devices,
    device_profile,
    price_per_hour,
    published_clusters,
    workload_named,
)
from lightning_hetero.simulate.devices.names import UnknownNameError, find_name
from lightning_hetero.simulate.planning.cluster import Cluster, Link, Worker
from lightning_hetero.simulate.planning.document import Entry, can_be_read, read_document
from lightning_hetero.simulate.planning.recorded import (
    WORKER_KEYS,
    is_planner_state,
    of_planner_state,
    of_record,
    worker_of,
)
from lightning_hetero.simulate.planning.units import (
    parse_count,
    parse_jitter,
    parse_model,
    parse_number,
    parse_rate,
    parse_seconds,
)
from lightning_hetero.simulate.planning.wording import check_name

__all__ = ["Given", "named_workers", "read_cluster"]

KEYS = ("workers", "workload", "model", "total_batch_size", "samples", "link", "jitter", "price", "name")
LINK_KEYS = ("rate", "latency", "buckets", "gamma", "t_o", "t_u")
DEVICE_KEYS = ("device", "count", "memory", "error", "jitter", "price", "name")
TIMES_KEYS = (*WORKER_KEYS, "count")
PROFILE_KEYS = ("profile", "count", "memory", "price", "name")
COUNTED = re.compile(r"(?P<count>-?\d+)\s*[xX*]\s*(?P<name>.+)")
FILES = (".yaml", ".yml", ".json")
MOST_WORKERS, MOST_BUCKETS = 100_000, 10_000


@dataclass(frozen=True)
class Given:
    """Options that go before what a file says.

    Args:
        workload: published workload.
        gradient_bytes: bytes of all gradients of a worker.
        rate: bytes per second of the link.
        latency: seconds of each bucket beside its bytes.
        jitter: relative standard deviation of the times of devices from the table.
        prices: of an hour by name of the device; ``"*"`` for all others.
        total_batch_size: samples of a step.
        samples: samples of an epoch.
    """

    workload: str | None = None
    gradient_bytes: float | None = None
    rate: float | None = None
    latency: float | None = None
    jitter: float | None = None
    prices: Mapping[str, float] | None = None
    total_batch_size: int | None = None
    samples: int | None = None


def read_cluster(text: str, given: Given | None = None) -> Cluster:
    """Return the cluster that a user names.

    Args:
        text: path of a YAML or recorded file, name of a published cluster, or devices such as ``4xA100,T4``.
        given: options, which go before what the file says.

    Raises:
        ValueError: if something is wrong; in a file, the message names the line.

    Example:
        >>> cluster = read_cluster("4xA100,2xT4", Given(workload="resnet50-imagenet", rate=12.5e6))
        >>> len(cluster.workers), cluster.total_batch_size, cluster.link.gradient_bytes
        (6, 100, 102400000)
    """
    given = given or Given()
    if can_be_read(text) or (text.endswith(FILES) and "," not in text and _counted(text)[1] == text):
        cluster = _of_file(read_document(text), given)
    else:
        try:
            workers, recorded = _listed(text, given)
        except UnknownNameError:
            if os.path.isdir(text) or "/" in text:
                what = "is a folder" if os.path.isdir(text) else "does not exist"
                raise ValueError(f"{text!r} {what}; give a YAML or JSON file.") from None
            raise
        link, samples = _learned(Link(), recorded)
        cluster = Cluster(tuple(workers), link, None, samples, text, given.workload, given.jitter or 0.0)
    return _completed(cluster, given)


def named_workers(text: str, given: Given) -> list[Worker]:
    """Return the workers of a list of devices, such as ``4xA100,T4`` or ``2xmine.json``.

    Raises:
        ValueError: if a name is unknown, or the workload is needed and not given.

    Example:
        >>> [worker.name for worker in named_workers("2xT4,12 cores", Given(workload="bert-squad"))]
        ['T4', 'T4', '12 cores']
    """
    return _listed(text, given)[0]


def _listed(text: str, given: Given) -> tuple[list[Worker], list[Cluster]]:
    """Return the workers of a list of devices, and the recorded files among them."""
    found: list[Worker] = []
    recorded: list[Cluster] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        count, name = _counted(part)
        if name.endswith(FILES):
            recorded.append(_recorded(read_document(name)))
            found += list(recorded[-1].workers) * count
            continue
        found += [_published(device, given) for device in _devices(name)] * count
    if not found:
        raise ValueError(f"{text!r} names no worker; give devices such as 4xA100,T4, a cluster's name, or a file.")
    _workers_count(len(found))
    return found, recorded


def _devices(name: str) -> list[str]:
    """Return the devices of a published cluster, or else the name itself."""
    try:
        return cluster_devices(find_name("cluster", name, published_clusters()))
    except UnknownNameError:
        return [name]


def _learned(link: Link, recorded: Sequence[Cluster]) -> tuple[Link, int | None]:
    """Return the link with what recorded files of devices say of the model, and the samples of an epoch."""
    for cluster in recorded:
        if cluster.link.gradient_bytes is not None:
            return replace(link, gradient_bytes=cluster.link.gradient_bytes, gamma=cluster.link.gamma), cluster.samples
    return link, None


def _published(name: str, given: Given) -> Worker:
    try:
        price = price_per_hour(name)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error} A file's name ends in .yaml, .yml or .json.") from None
    if given.workload is None:
        raise ValueError(
            f"the time of {name!r} depends on the model. Give a workload, such as --workload resnet50-imagenet "
            "(`lightning-hetero plan --list` shows all), or measure yours: lightning-hetero profile script.py."
        )
    return Worker.of(device_profile(name, given.workload, given.jitter or 0.0), price)


def _counted(text: str) -> tuple[int, str]:
    match = COUNTED.fullmatch(text.strip())
    return (_workers_count(match["count"]), match["name"].strip()) if match else (1, text.strip())


def _workers_count(text: object) -> int:
    """Return a number of workers that a plan can be made for."""
    try:
        return parse_count(text, MOST_WORKERS)
    except ValueError as error:
        raise ValueError(f"the number of workers, {error}") from None


def _of_file(entry: Entry, given: Given) -> Cluster:
    if "version" in set(entry.keys()) or is_planner_state(entry):
        return replace(_recorded(entry), workload=given.workload)
    fields = entry.fields(KEYS, ("workers",))
    workload = fields["workload"].parsed(lambda name: workload_named(name).name) if "workload" in fields else None
    workload = given.workload or workload
    jitter = fields["jitter"].parsed(parse_jitter) if "jitter" in fields else None
    inner = replace(given, workload=workload, jitter=jitter if given.jitter is None else given.jitter)
    recorded: list[Cluster] = []
    workers = [worker for each in fields["workers"].elements() for worker in _workers(each, inner, recorded)]
    if not workers:
        raise fields["workers"].error("the list is empty; give one worker at least.")
    prices = _prices(fields["price"], [worker.name for worker in workers]) if "price" in fields else {}
    bytes_ = fields["model"].parsed(parse_model) if "model" in fields else None
    learned, samples = _learned(Link(), recorded)
    link = _link(fields["link"], len(workers), learned) if "link" in fields else learned
    whole = {name: fields[name].parsed(parse_count) for name in ("total_batch_size", "samples") if name in fields}
    name = fields["name"].parsed(check_name) if "name" in fields else Path(entry.file).stem
    link = link if bytes_ is None else replace(link, gradient_bytes=bytes_)
    totals = whole.get("total_batch_size"), whole.get("samples", samples)
    return Cluster(tuple(workers), link, *totals, name, workload, inner.jitter or 0.0).priced(prices)


def _recorded(entry: Entry) -> Cluster:
    return of_planner_state(entry) if is_planner_state(entry) else of_record(entry)


def _workers(entry: Entry, given: Given, recorded: list[Cluster]) -> list[Worker]:
    """Return the workers of one element of the list; note what is read of recorded files."""

    def listed(text: str) -> list[Worker]:
        workers, files = _listed(text, given)
        recorded.extend(files)
        return workers

    if entry.is_null or entry.is_list:
        raise entry.error(
            f"this worker is {'a list' if entry.is_list else 'empty'}; give a device such as '4 x A100', or a mapping."
        )
    if not entry.is_mapping:
        return entry.parsed(listed)
    keys = entry.keys()
    if "profile" in keys:
        fields = entry.fields(PROFILE_KEYS, ("profile",))
        path = Path(entry.file).parent / fields["profile"].text()
        recorded.append(_recorded(read_document(path)))
        found = list(recorded[-1].workers)
    elif "device" in keys:
        fields = entry.fields(DEVICE_KEYS, ("device",))
        found = fields["device"].parsed(listed)
    else:
        fields = entry.fields(TIMES_KEYS, ("q", "s", "k", "m"))
        return [_times(entry)] * (fields["count"].parsed(_workers_count) if "count" in fields else 1)
    parsers = {"error": parse_jitter, "jitter": parse_jitter, "price": parse_number}
    changes = {name: fields[name].parsed(parse) for name, parse in parsers.items() if name in fields}
    memory = {"memory": fields["memory"].parsed(parse_count)} if "memory" in fields else {}
    named = {"name": fields["name"].parsed(check_name)} if "name" in fields else {}
    count = fields["count"].parsed(_workers_count) if "count" in fields else 1
    return [replace(worker, **changes, **memory, **named) for worker in found] * count  # type: ignore[arg-type]


def _times(entry: Entry) -> Worker:
    """Return the worker of explicit coefficients, with or without a count."""
    node = type(entry.node)(
        entry.node.tag,
        [pair for pair in entry.pairs() if pair[0].value != "count"],
        entry.node.start_mark,
        entry.node.end_mark,
    )
    return worker_of(Entry(node, entry.file, entry.where))


def _prices(entry: Entry, workers: Sequence[str]) -> dict[str, float]:
    """Return the prices by name of a worker."""
    if not entry.is_mapping:
        return {"*": entry.parsed(parse_number)}
    there = {name.lower(): name for name in workers}
    spelled = [key for key in entry.keys() if key.lower() in there]  # noqa: SIM118 - it is no dict
    given = entry.fields(list(dict.fromkeys(["*", *there.values(), *spelled])))
    for name, value in given.items():
        if [other.lower() for other in given].count(name.lower()) > 1:
            raise value.error("this device has two prices; give one.")
    return {name: value.parsed(parse_number) for name, value in given.items()}


def _link(entry: Entry, workers: int, learned: Link) -> Link:
    if not entry.is_mapping:
        return replace(learned, rate=entry.parsed(parse_rate))
    fields = entry.fields(LINK_KEYS)
    measured = {name: fields[name].parsed(parse_seconds) for name in ("t_o", "t_u") if name in fields}
    if measured and "rate" in fields:
        raise fields["rate"].error("the link has measured times (t_o, t_u) as well; give them or the rate.")
    gamma = fields["gamma"].parsed(partial(parse_number, high=1.0)) if "gamma" in fields else learned.gamma
    buckets = (
        fields["buckets"].parsed(partial(parse_count, most=MOST_BUCKETS)) if "buckets" in fields else Link().buckets
    )
    return Link(
        learned.gradient_bytes,
        rate=fields["rate"].parsed(parse_rate) if "rate" in fields else Link().rate,
        latency=fields["latency"].parsed(parse_seconds) if "latency" in fields else 0.0,
        buckets=buckets,
        gamma=gamma,
        measured_on=workers if measured else 0,
        **measured,
    )


def _completed(cluster: Cluster, given: Given) -> Cluster:
    """Return the cluster with the options, and with what the workload says of all that is not given."""
    known, link = workload_named(cluster.workload) if cluster.workload else None, cluster.link
    of_workload = (known.gradient_bytes, known.total_batch_size, known.samples) if known else (None, None, None)
    if given.gradient_bytes is not None:
        link = replace(link, gradient_bytes=given.gradient_bytes)
    elif link.gradient_bytes is None:
        link = replace(link, gradient_bytes=of_workload[0])
    if given.rate is not None:
        link = link.at_rate(given.rate)
    if given.latency is not None:
        link = replace(link, latency=given.latency)
    if link.gradient_bytes is None and not link.measured_on:
        link.at_rate(link.rate)  # raises if a rate is given that no size belongs to
    total = given.total_batch_size or cluster.total_batch_size or of_workload[1]
    samples = given.samples or cluster.samples or of_workload[2]
    return replace(cluster, link=link, total_batch_size=total, samples=samples).priced(given.prices or {})
