"""Records of runs on clusters of exactly known speed, made event by event; nothing of the reports is used for them."""

import math
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class Event:
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


def round_of(cluster, sizes, steps, *, begun, epoch, step, first, sampled=3):
    """Run the steps up to a sync round and return its line."""
    rows = np.stack([cluster.step(sizes) for _ in range(steps)])
    if first:
        rows[0, :, 6] = np.nan  # something other than a step came before
    medians = np.nanmedian(rows, axis=0)
    n, model = cluster.accumulation, cluster.model
    lengths = (
        [model.step_time(sizes), model.step_time(even_sizes(sum(sizes), len(sizes)))] if n == 1 else [math.nan] * 2
    )
    return RoundRecord(
        time=float(cluster.ended + begun + 0.01),
        epoch=epoch,
        step=step,
        count=steps,
        timed=steps,
        sizes=tuple(int(b) for b in sizes),
        accumulation=n,
        step_time=float(np.nanmedian(rows[:, 0, 6])),
        data=tuple(medians[:, 7]),
        forward=tuple(medians[:, 1]),
        backward=tuple(medians[:, 2]),
        optimizer=tuple(medians[:, 8]),
        sync=tuple(medians[:, 4] + medians[:, 5]),
        link=float(np.min(medians[:, 5])),
        jitter=tuple([cluster.jitter] * len(sizes)),
        predicted=lengths[0],
        error=0.01 * lengths[0],
        even=lengths[1],
        nodes=tuple(map(tuple, np.asarray(model.array).tolist())) if n == 1 else (),
        gamma=model.gamma if n == 1 else math.nan,
        t_o=model.t_o if n == 1 else math.nan,
        t_u=model.t_u if n == 1 else math.nan,
        max_local=tuple(400 if v > 0.4 else 40 for v in cluster.speeds),
        sample=tuple(tuple(map(tuple, row)) for row in rows[-sampled:]),
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
    count = len(cluster.speeds)
    sizes, reason, predicted = even_sizes(total, count), "", math.nan
    lines, changes, gains, stragglers = [], [], [], []
    for i in range(rounds):
        begins, ends = straggler and i == rounds // 2, straggler and i == 3 * rounds // 4
        if begins:
            cluster.slow = {(count - 1, "data"): 25.0}
        if ends:
            cluster.slow = {}
        one = round_of(
            cluster, sizes, steps, begun=0.0, epoch=i // 6, step=(i % 6 + 1) * steps - 1, first=True, sampled=3
        )
        noise = {"noise_scale": 900.0 + 40 * i, "goodput": 500.0 + 10 * i} if i >= 2 else {}
        noise |= {"density": 0.1 - 0.002 * i, "sent_bytes": 4.1e6, "stale": True} if sends else {}
        best = solve_optperf(cluster.model, total, min_local=[1] * count, max_local=list(one.max_local))
        wanted = best.local_batch_sizes if cluster.accumulation == 1 else sizes
        stays = wanted == tuple(sizes)
        kept = "kept: the best split would gain 0.4 %, below hysteresis 2 %" if stays else ""
        lines.append(replace(one, kept=kept, **noise))
        after = {"epoch": i // 6, "step": (i % 6 + 1) * steps + 2}
        if begins or ends:
            event, relieved = ("begin", "") if begins else ("end", "recovered")
            stragglers.append(
                StragglerRecord(
                    one.time, event, count - 1, "data", i // 6, one.step, 0.05, 3.25 if ends else 0.0, relieved
                )
            )
        if changes and not gains:
            change, before = changes[0], lines[0].step_time
            gains.append(GainRecord(one.time, change.epoch, change.step, before, one.step_time, change.predicted))
        if not stays:
            predicted = cluster.model.step_time(wanted)
            gain = cluster.model.step_time(sizes) / predicted - 1
            reason = f"predicted {1e3 * predicted:.0f} ms a step, {gain:.1%} faster"
            changes.append(ChangeRecord(one.time, *after.values(), tuple(wanted), reason, predicted))
            sizes = wanted
    end = EndRecord(lines[-1].time + 0.5, 1, 40, rounds * steps, memory=(3.2e9,) * count, overhead=0.02)
    return RunRecord(
        header(cluster.speeds, total, **changed),
        tuple(lines),
        tuple(changes),
        tuple(gains),
        tuple(stragglers),
        end if ended else None,
    )


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
