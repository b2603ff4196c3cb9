"""The trace of sampled steps against steps whose every event is known."""

import json
from collections import defaultdict

import numpy as np
import pytest

from lightning_hetero.report import read_run, trace_events
from tests.report.runs import Cluster, simulated, written

BUSY = ("data", "forward", "backward", "optimizer")
EXACT = {
    "two buckets": {"shares": (0.3, 1.0), "link": (0.003, 0.004)},
    "one bucket": {"shares": (1.0,), "link": (0.005,)},
    "a link that limits": {"shares": (0.3, 1.0), "link": (0.08, 0.05)},
    "accumulation": {"shares": (0.3, 1.0), "link": (0.003, 0.004), "accumulation": 3},
    "one worker": {"speeds": (1.0,), "shares": (0.3, 1.0), "link": (0.001, 0.001)},
    "a slow loader": {"shares": (0.3, 1.0), "link": (0.003, 0.004), "slow": {(1, "data"): 30.0}},
    "a slow optimizer": {"shares": (0.3, 1.0), "link": (0.003, 0.004), "slow": {(2, "optimizer"): 9.0}},
}


def traced(run):
    """Events of a trace that have a length: rank, row, name, start and end in seconds."""
    trace = trace_events(run)
    json.dumps(trace, allow_nan=False)
    rows = {
        (one["pid"], one["tid"]): one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"
    }
    return [
        (one["pid"], rows[one["pid"], one["tid"]], one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6)
        for one in trace["traceEvents"]
        if one["ph"] == "X"
    ]


def by_row(events):
    found = defaultdict(list)
    for rank, row, _, start, end in events:
        found[rank, row].append((start, end))
    return {key: sorted(spans) for key, spans in found.items()}


def ends_of_steps(events):
    """Ends of the last bucket's all-reduce on each rank."""
    last = max((row for _, row, *_ in events if row.startswith("all-reduce")), default="")
    return {rank: [end for _, end in spans] for (rank, row), spans in by_row(events).items() if row == last}


def check(events):
    """What holds for every trace."""
    for (rank, row), spans in by_row(events).items():
        assert all(end >= start for start, end in spans), (rank, row)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False)), (rank, row)
    ends = ends_of_steps(events)
    assert all(own == pytest.approx(next(iter(ends.values())), abs=1e-9) for own in ends.values())
    busy = defaultdict(list)
    for rank, row, _, start, end in events:
        if row in (*BUSY, "waiting"):
            busy[rank].append((start, end))
    for spans in busy.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False)), "one thing at a time"
    return ends


@pytest.mark.parametrize("name", EXACT)
def test_parts_are_where_they_were(name):
    cluster = Cluster(**EXACT[name], jitter=0.05)
    rounds = 2
    run = simulated(cluster, total=48, rounds=rounds, steps=12, straggler=False)
    events = traced(run)
    ends = check(events)
    true_ends = sorted({one.end for one in cluster.events if one.what == f"all-reduce {len(cluster.link) - 1}"})
    shift = ends[0][-1] - true_ends[-1]
    since = true_ends[-3]  # of the last round's sample, all but its first step, of which less is known
    true = [one for one in cluster.events if one.start >= since - 1e-9]
    assert len(true) >= 10 * len(cluster.speeds)
    for one in true:
        near = [e for e in events if (e[0], e[2]) == (one.rank, one.what) and abs(e[3] - shift - one.start) < 2e-6]
        assert any(abs(e[4] - shift - one.end) < 2e-6 for e in near), one


def test_who_is_waited_for_is_named():
    cluster = Cluster(**EXACT["a slow loader"], jitter=0.0)
    events = traced(simulated(cluster, total=48, rounds=1, steps=5, straggler=False))
    waits = {(rank, name) for rank, row, name, *_ in events if row == "waiting" and name != "waiting for the link"}
    assert waits == {(0, "waiting for rank 1"), (2, "waiting for rank 1")}


def test_buckets_between_first_and_last_end_where_they_were_averaged():
    cluster = Cluster(shares=(0.2, 0.5, 0.7, 1.0), link=(0.002,) * 4)
    events = traced(simulated(cluster, total=48, rounds=1, steps=5, straggler=False))
    check(events)
    ends = ends_of_steps(events)
    true = [sorted({one.end for one in cluster.events if one.what == f"all-reduce {i}"})[-1] for i in range(4)]
    for rank in range(3):
        found = [by_row(events)[rank, f"all-reduce of bucket {i}"][-1][1] for i in range(4)]
        assert np.array(found) - ends[0][-1] == pytest.approx(np.array(true) - true[-1], abs=1e-6)


def test_rounds_follow_each_other_and_end_at_their_marks(tmp_path):
    run = read_run(written(simulated(rounds=8, steps=6), tmp_path))
    events = traced(run)
    check(events)
    assert len(ends_of_steps(events)[0]) == 8 * 3
    assert max(end for *_, end in events) == pytest.approx(run.rounds[-1].time, abs=2e-4)
    assert min(start for _, _, _, start, _ in events) >= 0
