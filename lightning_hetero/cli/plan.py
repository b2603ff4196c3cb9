"""``lightning-hetero plan``: what a cluster will gain, by its time model and the package's own solver."""

import argparse
import sys
from collections.abc import Sequence

from lightning_hetero.cli._cluster_options import add_cluster_options, changed, cluster_of, drawn, parsed, write_json
from lightning_hetero.simulate.planning.figures import plan_cluster
from lightning_hetero.simulate.planning.picture import draw_plan
from lightning_hetero.simulate.planning.tables import compared_text, plan_text

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Plan a cluster; with ``--add`` or ``--drop``, the changed one beside it."""
    options = parsed(_parser(), argv)
    if options is None:
        return 0
    try:
        cluster = cluster_of(options)
        after = changed(cluster, options)
        before = None if after is cluster else plan_cluster(cluster)
        answer = plan_cluster(after)
    except (TypeError, ValueError) as error:
        sys.stderr.write(f"lightning-hetero plan: {error}\n")
        return 2
    if options.json:
        write_json({"plan": answer.to_dict(), "before": before and before.to_dict()})
    else:
        sys.stdout.write(plan_text(answer, after.name))
        if before is not None:
            sys.stdout.write(compared_text(before, answer))
    if options.picture:
        return drawn("plan", options.picture, lambda path: draw_plan(answer, path, after.name))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-hetero plan",
        description="Say how a cluster would train: split, speed, idling, gain over even sizes, link, cost.",
    )
    add_cluster_options(parser)
    return parser
