"""Options that ``plan`` and ``simulate`` share: the cluster, and what goes before what its file says."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_hetero.cli._parser import Parser, UserError, option
from lightning_hetero.core.keywords import closest
from lightning_hetero.simulate.devices.catalog import (
    cluster_devices,
    published_clusters,
    published_devices,
    workload_named,
    workloads,
)
from lightning_hetero.simulate.devices.names import UnknownNameError
from lightning_hetero.simulate.planning.cluster import Cluster, Worker
from lightning_hetero.simulate.planning.cluster_file import (
    Given,
    named_workers,
    read_cluster,
)
from lightning_hetero.simulate.planning.picture import check_picture
from lightning_hetero.simulate.planning.tables import table
from lightning_hetero.simulate.planning.units import (
    parse_count,
    parse_jitter,
    parse_model,
    parse_prices,
    parse_rate,
    parse_seconds,
)

__all__ = [
    "add_cluster_options",
    "changed",
    "check_prices",
    "cluster_of",
    "drawn",
    "given_of",
    "list_published",
    "write_json",
]


def add_cluster_options(parser: Parser) -> None:
    """Add the options."""
    parser.accept_negative_values()
    add = parser.add_argument
    what = "a YAML or recorded file, a published cluster ('B'), or devices ('4xA100,8xRTX6000')"
    add("cluster", nargs="?", metavar="CLUSTER", help=what)
    add("--total-batch", type=option(parse_count), metavar="N", help="samples of a step")
    add("--workload", type=option(lambda name: workload_named(name).name), metavar="NAME", help="what devices train")
    add("--model", type=option(parse_model), metavar="params=124M", help="size of the gradients, or bytes=248MB")
    add("--link", type=option(parse_rate), metavar="100Mbit", help="rate that each worker can send; inf for no limit")
    add("--latency", type=option(parse_seconds), metavar="1ms", help="time of each bucket beside its bytes (default 0)")
    add("--jitter", type=option(parse_jitter), metavar="X", help="relative deviation of the times of named devices")
    add("--add", action="append", default=[], metavar="2xT4", help="workers to add; may be repeated")
    add("--drop", action="append", default=[], metavar="2xT4", help="workers to leave out; may be repeated")
    prices = "price of an hour, of a device or of all"
    add("--price", action="append", default=[], metavar="A100=4.10", help=f"{prices}; may be repeated")
    add("--samples", type=option(parse_count), metavar="N", help="samples of an epoch")
    add("--json", action="store_true", help="write JSON instead of a table")
    picture = "draw it, too (.png, .svg, .pdf); needs Matplotlib"
    add("--picture", type=option(check_picture), metavar="FILE", help=picture)
    add("--list", action="store_true", help="list the devices, workloads and clusters of the papers, and end")


def given_of(options: argparse.Namespace) -> Given:
    """Return what the options say of the cluster.

    Raises:
        ValueError: if a price is none.
    """
    return Given(
        workload=options.workload,
        gradient_bytes=options.model,
        rate=options.link,
        latency=options.latency,
        jitter=options.jitter,
        prices=parse_prices(options.price),
        total_batch_size=options.total_batch,
        samples=options.samples,
    )


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster before ``--add`` and ``--drop``.

    Raises:
        ValueError: if it is not given, or something is wrong with it.
    """
    if options.cluster is None:
        raise ValueError("which cluster? Give a file, a published cluster ('B'), or devices ('4xA100,8xRTX6000').")
    return read_cluster(options.cluster, given_of(options))


def changed(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    """Return the cluster after ``--add`` and ``--drop``; the same one if there are none.

    Raises:
        ValueError: if a worker is unknown, or a price belongs to none.
    """
    given = replace(given_of(options), workload=cluster.workload, jitter=cluster.jitter)
    before = len(cluster.workers)
    if options.add:
        more = [worker for text in options.add for worker in _added(text, given)]
        cluster = cluster.added(more).priced(given.prices or {})
    check_prices(given.prices or {}, [worker.name for worker in cluster.workers])
    if options.drop:
        names = [name.strip() for text in options.drop for name in text.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--drop {options.drop[-1]!r} names no worker; give one such as 2xT4, or no --drop.")
        cluster = cluster.dropped(names, of=before)
    return cluster


def _added(text: str, given: Given) -> list[Worker]:
    try:
        return named_workers(text, given)
    except UnknownNameError as error:
        raise UnknownNameError(f"--add {text}: {error}") from None
    except ValueError as error:
        raise ValueError(f"--add {text!r}: {error}") from None


def check_prices(prices: Mapping[str, float], names: Sequence[str]) -> None:
    """Check that each price is that of a worker.

    Raises:
        UnknownNameError: if one is not.

    Example:
        >>> check_prices({"A100": 4.1, "*": 1.0}, ["a100", "T4"])
    """
    there, known = list(dict.fromkeys(names)), {name.lower() for name in names}
    for name in prices:
        if name != "*" and name.lower() not in known:
            raise UnknownNameError(
                f"--price {name}=...: there is no worker {name!r}.{closest(name, there)} The workers are "
                f"{', '.join(there[:20])}."
            )


def write_json(value: Any) -> None:
    """Write plain values to the terminal."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def drawn(path: str, draw: Callable[[str], None]) -> None:
    """Draw a picture.

    Raises:
        UserError: if its file cannot be written.
    """
    try:
        draw(path)
    except OSError as error:
        why = error.strerror or "it cannot be written"
        raise UserError(f"--picture {path}: {why}. Give a file that can be written.") from error


def list_published(*, as_json: bool = False) -> None:
    """Write the devices, workloads and clusters of the papers to the terminal."""
    if as_json:
        write_json(
            {
                "devices": [asdict(device) for device in published_devices().values()],
                "workloads": [asdict(workload) for workload in workloads().values()],
                "clusters": [
                    {"name": name, "what": what, "workers": cluster_devices(name)}
                    for name, what in published_clusters().items()
                ],
            }
        )
        return
    devices = [
        (name, f"{d.tflops:.3g}", f"{d.memory_gb:g}", "-" if d.price_per_hour is None else f"{d.price_per_hour:g}")
        for name, d in published_devices().items()
    ]
    known = [
        (name, w.model, f"{w.parameters:.3g}", str(w.total_batch_size or "-"), str(w.samples or "-"))
        for name, w in workloads().items()
    ]
    parts: Sequence[Sequence[str]] = (
        ["devices ('core' is written '12 cores', a share 'A100@50%'; sources in published.json)"],
        table(devices, ("device", "TFLOP/s", "GB", "an hour")),
        [""],
        table(known, ("workload", "model", "parameters", "total", "samples")),
        [""],
        [f"{name:15}{what}" for name, what in published_clusters().items()],
    )
    sys.stdout.write("\n".join(line for part in parts for line in part) + "\n")
