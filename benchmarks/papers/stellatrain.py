"""StellaTrain's evaluation on a CPU: emulated GPUs with real gradients and links, real small tasks, its own tables.

==============  =====================================================================================================
``speed``       steps of four models on links of 100, 500 and 1000 Mbit/s and on a trace, for dense sums, compressors,
                staleness and the controller (needs root; about 7 minutes a model: ``--models`` takes them one by one)
``ablations``   the same with parts left out (needs root, 5 minutes)
``task``        time to a loss of a small task whose steps compute and send as those of ViT-B (needs root, 8 minutes)
``convergence`` samples to that loss by selection, staleness, batch and density, and the profile of Alg. 1 (6 minutes)
``costs``       processor time of compression and optimizer steps at the sizes of the four models (4 minutes)
``tables``      what follows from the paper's tables, and from the results of ``speed``
==============  =====================================================================================================

    python benchmarks/papers/stellatrain.py speed --models ViT-B
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _stella_costs
import _stella_speed
import _stella_tables
import _stella_task
import torch
from cluster import ClusterError
from hardware import write_record, write_table

RESULTS = Path(__file__).parents[1] / "results"


def kept_rows(path, model, kinds):
    """Rows of an earlier run for other models and kinds."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["model"] != model or row["kind"] not in kinds]


def speed(args, kinds, name, title):
    """Measure models one by one; rows of other models in the file stay."""
    path = args.out / name
    order, names = list(_stella_speed.WORKLOADS), list(_stella_speed.KINDS)
    for model in args.models:
        chosen = args.kinds or kinds[model]
        rows = kept_rows(path, model, chosen) + _stella_speed.measure(model, chosen)
        rows.sort(key=lambda row: (order.index(row["model"]), names.index(row["kind"])))
        write_table([{k: v for k, v in row.items() if k != "trace"} for row in rows], path, title)
        write_record(rows, path, title)


def costs(args):
    rows = _stella_costs.rows()
    write_table(rows, args.out / "stellatrain_costs.json", "StellaTrain: processor time of one thread at four sizes")


def convergence(args):
    torch.set_num_threads(1)
    rows = [*_stella_task.rows_of(), *_stella_task.surrogate_rows()]
    write_table(rows, args.out / "stellatrain_convergence.json", "StellaTrain: samples to a loss on the digits")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "ablations", "task", "convergence", "costs", "tables"))
    parser.add_argument("--models", nargs="+", choices=list(_stella_speed.WORKLOADS))
    parser.add_argument("--kinds", nargs="+", choices=list(_stella_speed.KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.what == "speed":
        args.models = args.models or [name for name in _stella_speed.WORKLOADS if name != "digits"]
        speed(args, _stella_speed.MAIN, "stellatrain_speed.json", "StellaTrain: steps on two emulated nodes")
    elif args.what == "ablations":
        args.models = args.models or ["ViT-B"]
        title = "StellaTrain: steps on two emulated nodes with parts left out"
        speed(
            args,
            dict.fromkeys(_stella_speed.WORKLOADS, list(_stella_speed.ABLATIONS)),
            "stellatrain_ablations.json",
            title,
        )
    elif args.what == "task":
        args.models = ["digits"]
        speed(
            args,
            {"digits": list(_stella_speed.TASKS)},
            "stellatrain_task.json",
            "StellaTrain: time to a loss of the digits",
        )
    elif args.what == "convergence":
        convergence(args)
    elif args.what == "costs":
        costs(args)
    else:
        title = "StellaTrain: what follows from its tables"
        write_table(_stella_tables.rows(), args.out / "stellatrain_tables.json", title)


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        raise SystemExit(str(error)) from error
