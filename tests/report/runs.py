"""Records of runs on clusters of exactly known speed, made event by event; nothing of the reports is used for them."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import (
    ChangeRecord,
    EndRecord,
    GainRecord,
    RoundRecord,
    RunHeader,
    StragglerRecord,
    WorkerRecord,
)
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels

DEVICES = {1.0: "NVIDIA A100-SXM4-40GB", 0.5: "NVIDIA Tesla V100-PCIE-16GB", 0.3: "NVIDIA Quadro RTX 6000"}
PHASES = ("data", "forward", "backward", "optimizer")


class Event(NamedTuple):
    """What a rank did from one second to another; of an all-reduce, since its bucket was ready on this rank."""

    rank: int
    what: str
    start: float
    end: float


@dataclass
class Cluster:
    """Workers that share a batch, their link, and the clock."""

    speeds: tuple = (1.0, 0.5, 0.3)
    accumulation: int = 1
    shares: tuple = (0.25, 0.6, 1.0)  # of the backward pass, after which each bucket is ready
    link: tuple = (0.003, 0.003, 0.004)  # seconds of each bucket's all-reduce
    jitter: float = 0.02
    seed: int = 0
    slow: dict = field(default_factory=dict)  # (rank, phase) -> factor

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.free = np.zeros(len(self.speeds))  # when each rank ended its optimizer's step
        self.ended, self.events = 0.0, []

    def seconds(self, phase, sizes):
        """Seconds of a micro-batch's phase on each worker, without jitter."""
        sizes, speeds = np.asarray(sizes, dtype=float), np.asarray(self.speeds)
        fixed, each, scaled = {
            "data": (0.001, 0.00005, 1.0),
            "forward": (0.003, 0.0004, speeds),
            "backward": (0.003, 0.0009, speeds),
            "optimizer": (0.002, 0.0, speeds),
        }[phase]
        factors = np.array([self.slow.get((rank, phase), 1.0) for rank in range(len(speeds))])
        return factors * (fixed + each * sizes) / scaled

    @property
    def model(self):
        """True time model of a step without accumulation."""
        at = {p: (self.seconds(p, [0] * len(self.speeds)), self.seconds(p, [1] * len(self.speeds))) for p in PHASES}
        s = sum(at[p][0] for p in PHASES if p != "backward")
        q = sum(at[p][1] - at[p][0] for p in PHASES if p != "backward")
        m, k = at["backward"][0], at["backward"][1] - at["backward"][0]
        nodes = NodeModels(np.stack([q, s, k, m], axis=1))
        return ClusterTimeModel(nodes, self.shares[0], sum(self.link[:-1]), self.link[-1])

    def step(self, sizes):
        """Run a step; return the row that each rank's timer would report."""
        n, ranks = self.accumulation, len(self.speeds)
        noise = 1.0 + self.jitter * self.rng.standard_normal((4, ranks)).clip(-2, 2)
        spent = {p: self.seconds(p, sizes) * noise[i] for i, p in enumerate(PHASES)}
        now = self.free.copy()
        for i in range(n):
            for phase in ("data", "forward", "backward"):
                started = now
                now = now + spent[phase]
                if phase == "backward" and i == n - 1:
                    begun = started
                self._note(phase, started, now)
        ready = begun[:, None] + spent["backward"][:, None] * np.asarray(self.shares)
        done, end = np.empty(len(self.shares)), -math.inf
        since = np.empty_like(ready)
        for j, seconds in enumerate(self.link):
            since[:, j] = np.maximum(ready[:, j], end)
            end = max(end, ready[:, j].max()) + seconds
            done[j] = end
            self._note(f"all-reduce {j}", since[:, j], np.full(ranks, end))
        sync = done - since
        self.free = end + spent["optimizer"]
        self._note("optimizer", np.full(ranks, end), self.free)
        fields = [
            *(sizes, spent["forward"], spent["backward"], ready[:, 0] - begun, sync[:, :-1].sum(axis=1), sync[:, -1]),
            *(np.full(ranks, end - self.ended), spent["data"], spent["optimizer"] / n),
        ]
        self.ended = end
        return np.column_stack([*fields, done - begun[:, None]])

    def _note(self, what, starts, ends):
        self.events += [Event(rank, what, *span) for rank, span in enumerate(zip(starts, ends, strict=True))]


def header(speeds=(1.0, 0.5, 0.3), total=96, **changed):
    """First line of a record."""
    workers = tuple(
        WorkerRecord(f"gpu:{DEVICES.get(v, v)}", DEVICES.get(v, f"device {v:g}"), 1e13 * v, 1, 400 if v > 0.4 else 40)
        for v in speeds
    )
    given = {
        "settings": {"hysteresis": "0.02", "replan": "'auto'"},
        "command": ("train.py", "--epochs", "3", "--data dir", "/data/imagenet"),
        "versions": {"python": "3.11.9", "torch": "2.13.0", "lightning": "2.6.6"},
        "hostname": "gpu-box-1",
    }
    front = ("0.2.0", "Trainer", "hetero_ddp", "perf_model")
    return replace(RunHeader(1_780_000_000, *front, workers, total, **given), **changed)


def round_of(cluster, sizes, steps, epoch, step):
    """Run the steps up to a sync round and return its line."""
    rows = np.stack([cluster.step(sizes) for _ in range(steps)])
    rows[0, :, 6] = np.nan  # something other than a step came before
    median = dict(zip(RoundRecord.SAMPLED, np.nanmedian(rows, axis=0).T, strict=False))
    known = {}
    if cluster.accumulation == 1:
        model = cluster.model
        predicted, even = model.step_time(sizes), model.step_time(even_sizes(sum(sizes), len(sizes)))
        known = {"predicted": predicted, "error": 0.01 * predicted, "even": even, "gamma": model.gamma}
        known |= {"nodes": tuple(map(tuple, np.asarray(model.array).tolist())), "t_o": model.t_o, "t_u": model.t_u}
    return RoundRecord(
        *(float(cluster.ended + 0.01), epoch, step, steps, steps, tuple(int(b) for b in sizes)),
        accumulation=cluster.accumulation,
        step_time=float(median["step_time"][0]),
        sync=tuple(median["overlapped_sync"] + median["last_sync"]),
        link=float(median["last_sync"].min()),
        jitter=(cluster.jitter,) * len(sizes),
        max_local=tuple(400 if v > 0.4 else 40 for v in cluster.speeds),
        sample=tuple(tuple(map(tuple, row)) for row in rows[-3:]),
        **{name: tuple(median[name]) for name in PHASES},
        **known,
    )


def simulated(cluster=None, *, total=96, rounds=12, steps=20, straggler=True, ended=True, sends=False, **changed):
    """Record of a run that begins with equal sizes, finds the best split, and meets a straggler that a split relieves.

    Args:
        cluster: what trains.
        total: samples of a micro-batch.
        rounds: sync rounds.
        steps: steps of each.
        straggler: whether the loader of the last rank is slow in the third quarter.
        sends: whether gradients are compressed.
        ended: whether the run came to its end.
        changed: fields of the header.
    """
    cluster = cluster or Cluster()
    last = len(cluster.speeds) - 1
    sizes, records = even_sizes(total, last + 1), [header(cluster.speeds, total, **changed)]
    change = before = None
    for i in range(rounds):
        place, noise = {"epoch": i // 6, "step": (i % 6 + 1) * steps - 1}, {}
        event = {rounds // 2: "begin", 3 * rounds // 4: "end"}.get(i) if straggler else None
        if event:
            cluster.slow = {(last, "data"): 25.0} if event == "begin" else {}
        one = round_of(cluster, sizes, steps, **place)
        if i >= 2:
            noise = {"noise_scale": 900.0 + 40 * i, "goodput": 500.0 + 10 * i}
        if sends:
            noise |= {"density": 0.1 - 0.002 * i, "sent_bytes": 4.1e6, "stale": True}
        best = solve_optperf(cluster.model, total, min_local=[1] * (last + 1), max_local=list(one.max_local))
        wanted = best.local_batch_sizes if cluster.accumulation == 1 else sizes
        stays = tuple(wanted) == tuple(sizes)
        records.append(replace(one, kept="kept: the best split would gain 0.4 %, below 2 %" if stays else "", **noise))
        if event:
            lost, relieved = (3.25, "recovered") if event == "end" else (0.0, "")
            records.append(StragglerRecord(one.time, event, last, "data", *place.values(), 0.05, lost, relieved))
        if change and before:
            gained = (change.epoch, change.step, before, one.step_time, change.predicted)
            records.append(GainRecord(one.time, *gained))
            before = None
        if not stays:
            predicted = cluster.model.step_time(wanted)
            gain = cluster.model.step_time(sizes) / predicted - 1
            reason = f"predicted {1e3 * predicted:.0f} ms a step, {gain:.1%} faster"
            before = one.step_time if change is None else None
            change = ChangeRecord(one.time, place["epoch"], place["step"] + 3, tuple(wanted), reason, predicted)
            records.append(change)
            sizes = wanted
    if ended:
        records.append(EndRecord(one.time + 0.5, 1, 40, rounds * steps, memory=(3.2e9,) * (last + 1), overhead=0.02))
    return RunRecord.of(records)


def lines_of(run):
    """Lines of a record, in the order of their times."""
    rest = [*run.rounds, *run.changes, *run.gains, *run.stragglers, *([run.end] if run.end else [])]
    return [as_line(one) for one in (run.header, *sorted(rest, key=lambda one: one.time))]


def written(run, folder, name="hetero_run.jsonl"):
    """Write a record into a folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(lines_of(run)), encoding="utf-8")
    return path
