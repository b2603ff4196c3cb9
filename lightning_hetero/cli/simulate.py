"""``lightning-hetero simulate``: what a policy does on a cluster over time, by the discrete-event simulator."""

import argparse
import sys

from lightning_hetero.cli._cluster_options import (
    add_cluster_options,
    changed,
    cluster_of,
    drawn,
    list_published,
    write_json,
)
from lightning_hetero.cli._parser import Parser, UserError, option
from lightning_hetero.core.policies import NAMED
from lightning_hetero.core.validation import check_choice
from lightning_hetero.simulate.planning.learned import learned_text, simulate_cluster
from lightning_hetero.simulate.planning.picture import draw_split
from lightning_hetero.simulate.planning.units import parse_count

__all__ = ["add_options", "run"]

MOST_STEPS = 100_000
MOST_SEED = 2**31


def add_options(parser: Parser) -> None:
    """Add the options of ``simulate``."""
    add_cluster_options(parser)
    add, names = parser.add_argument, tuple(NAMED)
    add("--steps", type=option(_steps), default=200, metavar="N", help="steps to simulate (default 200)")
    policies = f"who splits the batch: {', '.join(names)} (default perf_model)"
    known = option(lambda text: str(check_choice("policy", text, names)))
    add("--policy", type=known, default="perf_model", metavar="NAME", help=policies)
    add("--seed", type=option(_seed), default=0, metavar="N", help="of the jitter (default 0)")


def run(options: argparse.Namespace) -> int:
    """Simulate a cluster, after ``--add`` and ``--drop``."""
    if options.list:
        list_published(as_json=options.json)
        return 0
    try:
        cluster = changed(cluster_of(options), options)
        answer = simulate_cluster(cluster, steps=options.steps, policy=options.policy, seed=options.seed)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    if options.json:
        write_json(answer.to_dict())
    else:
        sys.stdout.write(learned_text(answer, cluster.name))
    if options.picture:
        result = answer.result
        shares = result.optimum / result.exact
        steps = range(result.steps)
        drawn(options.picture, lambda path: draw_split(steps, result.sizes, shares, answer.names, path, cluster.name))
    return 0


def _steps(text: str) -> int:
    return parse_count(text, MOST_STEPS)


def _seed(text: str) -> int:
    return parse_count(text, MOST_SEED, 0)
