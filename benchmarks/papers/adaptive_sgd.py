"""Adaptive SGD's evaluation on emulated devices: elastic averaging against averaged gradients, both of them tuned.

    adaptive_sgd.py shapes      the data's shapes against Table I
    adaptive_sgd.py grid        time to a precision: methods x optimizers x rates, replayed in a virtual clock
    adaptive_sgd.py curves      the best of the grid, trained on: precision by epoch and by second (Fig. 4, 6)
    adaptive_sgd.py scaling     1 to 4 workers (Fig. 5)
    adaptive_sgd.py confirm     the best of the grid with real processes on emulated devices

All but the last compute real gradients and merges, in one process; only the clock is virtual. The data are synthetic,
with the non-zeros and labels of the real sets' samples, so a precision says nothing of the real sets. Evaluation takes
no time, as in the paper. Trainings are kept in ``--runs`` and not repeated, so a command may be stopped and continued.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _adaptive_sgd_replay import balanced, replay
from _adaptive_sgd_task import BATCH, BATCH_SECONDS, CLUSTERS, METHODS, SCALE, SHAPES, data
from hardware import write_table

from lightning_hetero.data import synthetic_multilabel

RESULTS = Path(__file__).parents[1] / "results"
RUNS = Path(tempfile.gettempdir()) / "adaptive_sgd_runs"
RATES = {
    "SGD": (1.0, 2.0, 4.0, 8.0, 16.0),
    "momentum": (0.5, 1.0, 2.0, 4.0, 8.0),
    "Adam": (0.004, 0.008, 0.016, 0.032, 0.064, 0.128),
}
SEEDS = (0, 1, 2)
JOBS = 2
TARGET, EPOCHS = {"amazon": 0.85, "delicious": 0.5}, {"amazon": 2, "delicious": 2}
EXCHANGES = (0.0, 1.0, 3.0)
"""Times of an exchange over that of the fastest device's largest batch; the middle one is the headline's."""
CELLS = [("amazon", "unequal"), ("amazon", "paper"), ("delicious", "paper")]
"""Shapes of data and clusters of the grid; the first has all methods and optimizers."""
REPLAYED = [name for name in METHODS if name != "hetero_ddp"]  # which computes what ddp does
OF_PAPER = ("adaptive", "elastic, even", "crossbow, every batch", "ddp")
"""The paper's own four methods; its SLIDE is a program for CPUs."""
METHODS_AT = {
    ("amazon", "unequal"): REPLAYED,
    ("amazon", "paper"): (*OF_PAPER, "elastic"),
    ("delicious", "paper"): OF_PAPER,
}
FINALISTS = {("amazon", "unequal"): 2, ("amazon", "paper"): 1, ("delicious", "paper"): 1}
"""Cells of a method whose other seeds are trained, by the first seed."""


# trainings


class Runs:
    """Trainings that are done, in a file of one JSON record a line."""

    def __init__(self, folder, name, minutes):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.until = folder / f"{name}.jsonl", time.monotonic() + 60 * minutes
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.done = {_key(record): record for record in map(json.loads, lines)}

    def of(self, specs, **kwargs):
        """Records of these trainings; ends the program when its time is up."""
        due = [spec for spec in specs if _key(spec) not in self.done]
        for shape in {spec["shape"] for spec in due}:
            data(shape, kwargs.get("quick", False))  # before the processes fork
        with ProcessPoolExecutor(JOBS) as pool, self.path.open("a") as file:
            waiting = [pool.submit(self._run, spec, kwargs) for spec in due]
            for future in as_completed(waiting):
                record = future.result()
                if record is not None:
                    self.done[_key(record)] = record
                    print(json.dumps(record), file=file, flush=True)
        left = [spec for spec in due if _key(spec) not in self.done]
        if left:
            raise SystemExit(f"{len(left)} of {len(specs)} trainings are left; run the command again.")
        return [self.done[_key(spec)] for spec in specs]

    def _run(self, spec, kwargs):
        return replay(spec, **kwargs) if time.monotonic() < self.until else None

    def __getstate__(self):
        return {"until": self.until}  # all that a process of the pool needs


def _key(record):
    return tuple(record[name] for name in ("shape", "cluster", "workers", "method", "optimizer", "lr", "seed"))


def spec(shape, cluster, method, optimizer, lr, seed, workers=None):
    """One training."""
    known = {"shape": shape, "cluster": cluster, "workers": workers or len(CLUSTERS[cluster])}
    return {**known, "method": method, "optimizer": optimizer, "lr": lr, "seed": seed}


# figures of a training


def time_to(record, target, exchange=1.0):
    """Seconds until a precision is reached, interpolated between evaluations; ``None`` if it never is."""
    cost, before = exchange * BATCH_SECONDS, None
    for _, seconds, exchanges, found in record["points"]:
        now = seconds + exchanges * cost
        if found >= target:
            if before is None:
                return now
            share = (target - before[1]) / (found - before[1])
            return before[0] + share * (now - before[0])
        before = now, found
    return None


def samples_to(record, target):
    """Samples until a precision is reached: the same with a clock that counts samples."""
    points = [(samples, samples, 0, found) for samples, _, _, found in record["points"]]
    return time_to({"points": points}, target)


def best_precision(record):
    """Highest precision of the curve."""
    return max(point[3] for point in record["points"] if point[3] == point[3])


def median(values):
    """Median, ``None`` if one of the values is missing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(list(values)) else None


def _order(seconds, precision):
    """Key by which trainings are compared: the time to the target, and the precision if it is not reached."""
    return (seconds is None, seconds if seconds is not None else -precision)


def with_equals(records):
    """Records with those of methods that compute the same: ``hetero_ddp`` and ``mean``."""
    return [one for r in records for one in (r, *_equals(r))]


def _equals(record):
    """``hetero_ddp`` is ``ddp`` in less time; ``mean`` is ``elastic`` where the global model has no momentum."""
    if record["method"] == "elastic" and record["optimizer"] != "SGD":
        return ({**record, "method": "mean"},)
    return (balanced(record),) if record["method"] == "ddp" else ()


# grid


def grid_records(runs, shape, cluster):
    """Trainings of a grid: the first seed of each rate, and all seeds of the best rates of each optimizer."""
    settings = {"epochs": EPOCHS[shape], "stop_at": TARGET[shape]}
    optimizers = RATES if (shape, cluster) == CELLS[0] else ("Adam",)  # which is the best of all methods there
    cells = [(m, o, lr) for m in METHODS_AT[shape, cluster] for o in optimizers for lr in RATES[o] if _fits(m, o)]
    first = runs.of([spec(shape, cluster, *cell, SEEDS[0]) for cell in cells], **settings)
    groups = defaultdict(list)
    for record in sorted(first, key=_rank):
        groups[record["method"]].append(record)
    best = [r for group in groups.values() for r in group[: FINALISTS[shape, cluster]]]
    rest = [{**_spec_of(r), "seed": seed} for r in best for seed in SEEDS[1:]]
    return with_equals(first + runs.of(rest, **settings))


def _fits(method, optimizer):
    """Whether a method differs from the others with an optimizer.

    With an optimizer of its own momentum the global model has none, and `mean` is `elastic`. The rule as printed is
    for plain SGD, and CROSSBOW's after every batch takes long.
    """
    if method in ("adaptive, as printed", "mean"):
        return optimizer == "SGD"
    return optimizer != "momentum" or method in ("adaptive", "elastic", "ddp")


def _rank(record):
    return _order(time_to(record, TARGET[record["shape"]]), best_precision(record))


def _spec_of(record):
    return {name: value for name, value in record.items() if name not in ("points", "merges")}


def cells_of(records):
    """A row for each cell of a grid: medians over its seeds."""
    groups = defaultdict(list)
    for r in records:
        groups[r["shape"], r["cluster"], r["method"], r["optimizer"], r["lr"]].append(r)
    rows = []
    for (shape, cluster, method, optimizer, lr), group in groups.items():
        row = {"shape": shape, "cluster": cluster, "method": method, "optimizer": optimizer, "lr": lr}
        row["seeds"] = len(group)
        for exchange in EXCHANGES:
            found = median([time_to(r, TARGET[shape], exchange) for r in group])
            row[f"seconds_{exchange:g}"] = found and round(found, 2)
        samples = median([samples_to(r, TARGET[shape]) for r in group])
        row["samples"] = samples and round(samples)
        row["precision"] = round(statistics.median(map(best_precision, group)), 4)
        rows.append(row)
    return rows


def best_of(cells):
    """The best cell of each method and optimizer, and which of them is the method's best."""
    rows = []
    for shape, cluster in CELLS:
        for method in METHODS:
            own = [c for c in cells if (c["shape"], c["cluster"], c["method"]) == (shape, cluster, method)]
            known = [c for c in own if c["seeds"] == len(SEEDS)]
            if not known:
                continue
            chosen = min(known, key=_cell_rank)
            for optimizer in RATES:
                some = [c for c in known if c["optimizer"] == optimizer]
                some = some or [c for c in own if c["optimizer"] == optimizer]
                if some:
                    row = min(some, key=_cell_rank)
                    ends = (RATES[optimizer][0], RATES[optimizer][-1])
                    rows.append({**row, "inside": row["lr"] not in ends, "best": row is chosen})
    for row in rows:
        ddp = next(r for r in rows if r["method"] == "ddp" and r["best"] and _where(r) == _where(row))
        for exchange in EXCHANGES:
            name = f"seconds_{exchange:g}"
            row[f"over_ddp_{exchange:g}"] = row[name] and round(ddp[name] / row[name], 3)
    return rows


def _where(row):
    return row["shape"], row["cluster"]


def _cell_rank(cell):
    return _order(cell["seconds_1"], cell["precision"])


def grid(args):
    """Time to the target, tuned: `adaptive_sgd_grid.json` has all cells, `adaptive_sgd_time.json` the best ones."""
    runs, cells = Runs(args.runs, "grid", args.minutes), []
    about = f"seconds to a precision of {TARGET} in {EPOCHS} epochs; an exchange takes 0, 1, 3 times a batch"
    for where in CELLS:
        cells += cells_of(grid_records(runs, *where))
        write_table(cells, RESULTS / "adaptive_sgd_grid.json", f"grid: {about}")
        write_table(best_of(cells), RESULTS / "adaptive_sgd_time.json", f"best rates by the median of 3 seeds: {about}")


# the best cells, trained on

LONG = 4
"""Epochs of the curves."""
CURVE_SEEDS = 1


def chosen(where):
    """Best cell of each method at a place, from `adaptive_sgd_time.json`."""
    rows = json.loads((RESULTS / "adaptive_sgd_time.json").read_text())["rows"]
    return [row for row in rows if _where(row) == where and row["best"]]


def curve_row(where, records, target):
    """Precision after each epoch, speed, and what the merges did: medians over seeds."""
    first, size = records[0], len(data(where[0])[0])
    row = {"shape": where[0], "cluster": where[1], "method": first["method"]}
    row |= {"optimizer": first["optimizer"], "lr": first["lr"], "seeds": len(records)}
    ends = [size * epoch for epoch in range(1, LONG + 1)]
    at = [[next(p for p in r["points"] if p[0] >= end * 0.999) for end in ends] for r in records]
    row["precision_by_epoch"] = [round(statistics.median(p[epoch][3] for p in at), 4) for epoch in range(LONG)]
    row["best"] = round(statistics.median(map(best_precision, records)), 4)
    samples = median([samples_to(r, target) for r in records])
    row["epochs_to_target"] = samples and round(samples / size, 3)
    for exchange in EXCHANGES:
        last = [r["points"][-1] for r in records]
        speed = statistics.median(p[0] / (p[1] + p[2] * exchange * BATCH_SECONDS) for p in last)
        found = median([time_to(r, target, exchange) for r in records])
        row[f"samples_per_s_{exchange:g}"] = round(speed, 1)
        row[f"seconds_{exchange:g}"] = found and round(found, 2)
    merges = [merge for r in records for merge in r["merges"]]
    row["perturbed_%"] = round(100 * statistics.mean(m[2] for m in merges), 1) if merges else None
    row["idle_%"] = round(100 * statistics.mean(m[3] for m in merges), 2) if merges else None
    return row


def curves(args):
    """Precision by epoch and speed (`adaptive_sgd_curves.json`), sizes and updates (`adaptive_sgd_merges.json`)."""
    runs, rows, evolution = Runs(args.runs, "curves", args.minutes), [], []
    for where in CELLS:
        cells = [cell for cell in chosen(where) if cell["method"] not in ("hetero_ddp", "mean")]
        specs = [spec(*where, c["method"], c["optimizer"], c["lr"], s) for c in cells for s in SEEDS[:CURVE_SEEDS]]
        groups = defaultdict(list)
        for record in with_equals(runs.of(specs, epochs=LONG)):
            groups[record["method"]].append(record)
        rows += [
            curve_row(where, groups[method], TARGET[where[0]])
            for method in METHODS
            if method in groups and method != "mean"
        ]
        evolution += [r for name in groups for r in evolution_of(where, groups[name][0])]
    about = f"{LONG} epochs at the best rates, medians of the seeds; an exchange takes 0, 1, 3 times a batch"
    write_table(rows, RESULTS / "adaptive_sgd_curves.json", f"precision by epoch and speed: {about}")
    write_table(evolution, RESULTS / "adaptive_sgd_merges.json", "batch sizes and perturbation by mega-batch, seed 0")


def evolution_of(where, record):
    """A row for each merge of the adaptive rules."""
    if not record["method"].startswith("adaptive"):
        return []
    rows = []
    for index, (sizes, updates, perturbed, idle) in enumerate(record["merges"]):
        row = {"shape": where[0], "cluster": where[1], "method": record["method"], "merge": index}
        row |= {"sizes": "/".join(map(str, sizes)), "updates": "/".join(map(str, updates))}
        rows.append({**row, "perturbed": bool(perturbed), "idle_%": round(100 * idle, 1)})
    return rows


# workers

COUNTED = {1: ("ddp",), 2: ("adaptive", "ddp"), 3: ("adaptive", "ddp"), 4: ("adaptive", "ddp")}
"""Methods by number of workers; one worker trains alike with all."""


def scaling(args):
    """Time to the target on the first 1 to 4 workers of the paper's cluster, tuned (`adaptive_sgd_scaling.json`)."""
    runs, rows, settings = (
        Runs(args.runs, "grid", args.minutes),
        [],
        {"epochs": EPOCHS["amazon"], "stop_at": TARGET["amazon"]},
    )
    for workers in range(1, 5):
        for method in COUNTED[workers]:
            for optimizer in ("Adam",):
                ofs = [spec("amazon", "paper", method, optimizer, lr, 0, workers) for lr in RATES[optimizer]]
                best = sorted(runs.of(ofs, **settings), key=_rank)[:1]
                rest = [{**_spec_of(r), "seed": seed} for r in best for seed in SEEDS[1:]]
                cells = cells_of(best + runs.of(rest, **settings))
                rows.append({"workers": workers, **min(cells, key=_cell_rank)})
    about = f"seconds to a precision of {TARGET['amazon']}, medians of {len(SEEDS)} seeds"
    write_table(rows, RESULTS / "adaptive_sgd_scaling.json", f"1 to 4 workers: {about}")


# data


def shapes(args):
    """Sizes and means of the data against Table I, at a tenth and as trained on (`adaptive_sgd_shapes.json`)."""
    rows = []
    for name, paper in SHAPES.items():
        rows.append({"shape": name, "made": "Table I", **_sizes(paper)})
        for made, sets in (("a tenth", synthetic_multilabel(paper.scaled(0.1))), ("as trained on", data(name))):
            rows.append({"shape": name, "made": made, **_measured(*sets)})
    scales = ", ".join(f"{name} {scale:g}" for name, scale in SCALE.items())
    write_table(rows, RESULTS / "adaptive_sgd_shapes.json", f"shapes of the data; scale of the columns: {scales}")


def _sizes(shape):
    names = ("features", "classes", "train", "test", "features_per_sample", "classes_per_sample")
    return {name: getattr(shape, name) for name in names}


def _measured(train, test):
    labels = train.label_indptr[-1] / len(train)
    row = {"features": train.num_features, "classes": train.num_classes, "train": len(train), "test": len(test)}
    row |= {"features_per_sample": round(float(train.nonzeros.mean()), 2), "classes_per_sample": round(labels, 2)}
    batches = train.nonzeros[: len(train) // BATCH * BATCH].reshape(-1, BATCH).sum(axis=1)
    return {**row, "batch_spread_%": round(100 * float(batches.std() / batches.mean()), 2)}


# real processes

CONFIRMED = ("ddp", "hetero_ddp", "adaptive", "elastic")


def confirm(args):
    """The best cells with real processes, against their replays (`adaptive_sgd_confirm.json`)."""
    where, runs, until = CELLS[0], Runs(args.runs, "grid", args.minutes), time.monotonic() + 60 * args.minutes
    path = args.runs / "confirm.json"
    done = {_key(record): record for record in (json.loads(path.read_text()) if path.exists() else [])}
    rows = []
    for cell in (c for c in chosen(where) if c["method"] in CONFIRMED):
        specs = [spec(*where, cell["method"], cell["optimizer"], cell["lr"], seed) for seed in SEEDS]
        replays = replays_of(specs, runs, where[0])
        due = [(one, again) for one, again in zip(specs, replays, strict=True) if _key(one) not in done]
        if due and time.monotonic() > until:
            raise SystemExit("trainings are left; run the command again.")
        with ThreadPoolExecutor(len(SEEDS)) as pool:  # most of their time they wait, so they hardly disturb each other
            for record in pool.map(lambda pair: real(pair[0], epochs_for(pair[1])), due):
                done[_key(record)] = record
        path.write_text(json.dumps(list(done.values())))
        rows += [confirm_row(done[_key(one)], r, TARGET[where[0]]) for one, r in zip(specs, replays, strict=True)]
    write_table(rows, RESULTS / "adaptive_sgd_confirm.json", "real processes on emulated devices against the replay")


def replays_of(specs, runs, shape):
    """The replays of these trainings."""
    same = [{**one, "method": "ddp"} if one["method"] == "hetero_ddp" else one for one in specs]
    found = runs.of(same, epochs=EPOCHS[shape], stop_at=TARGET[shape])
    return [
        balanced(record) if one["method"] == "hetero_ddp" else record for one, record in zip(specs, found, strict=True)
    ]


def epochs_for(record):
    """Epochs in which the target is surely reached."""
    return math.ceil(samples_to(record, TARGET[record["shape"]]) / len(data(record["shape"])[0]) + 0.2)


def confirm_row(measured, replayed, target):
    """Seconds to the target of a real run, whose exchanges take gloo's time on top, and of its replay."""
    row = {name: measured[name] for name in ("method", "optimizer", "lr", "seed")}
    row |= {"seconds": round(time_to(measured, target, 0.0), 2), "replayed": round(time_to(replayed, target, 1.0), 2)}
    row["over_replayed"] = round(row["seconds"] / row["replayed"], 3)
    row["host_added_ms"] = round(1000 * measured["host_median"], 2)
    merges = measured["merges"]
    return {**row, "last_sizes": "/".join(map(str, merges[-1][0])) if merges else None}


def real(one, epochs, exchange=1.0):
    """One training in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(one["workers"]),
            "--standalone",
        ]
        command += [str(Path(__file__).with_name("_adaptive_sgd_worker.py")), "--spec", json.dumps(one)]
        command += ["--epochs", str(epochs), "--exchange", str(exchange), "--out", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
        if found.returncode:
            raise SystemExit(found.stdout[-2000:] + found.stderr[-4000:])
        return json.loads(out.read_text())


COMMANDS = {"shapes": shapes, "grid": grid, "curves": curves, "scaling": scaling, "confirm": confirm}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of trainings that are done")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no training after this time")
    args = parser.parse_args()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
