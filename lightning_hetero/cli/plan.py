"""``lightning-hetero plan``: what a cluster will gain, by its time model and the package's own solver."""

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
from lightning_hetero.cli._parser import Parser, UserError
from lightning_hetero.simulate.planning.figures import plan_cluster
from lightning_hetero.simulate.planning.picture import draw_plan
from lightning_hetero.simulate.planning.tables import compared_text, plan_text

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Add the options of ``plan``."""
    add_cluster_options(parser)


def run(options: argparse.Namespace) -> int:
    """Plan a cluster; with ``--add`` or ``--drop``, the changed one beside it."""
    if options.list:
        list_published(as_json=options.json)
        return 0
    try:
        cluster = cluster_of(options)
        after = changed(cluster, options)
        before = None if after is cluster else plan_cluster(cluster)
        answer = plan_cluster(after)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    if options.json:
        write_json({"plan": answer.to_dict(), "before": before and before.to_dict()})
    else:
        sys.stdout.write(plan_text(answer, after.name))
        if before is not None:
            sys.stdout.write(compared_text(before, answer))
    if options.picture:
        drawn(options.picture, lambda path: draw_plan(answer, path, after.name))
    return 0
