"""Records of runs that never took place: rounds of a cluster whose times follow the time model exactly."""

import numpy as np

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


def header(workers=3, policy="perf_model", **more):
    table = tuple(WorkerRecord(f"host/cpu:{i}", f"device {i}", 1e12, 1, None) for i in range(workers))
    return RunHeader(1_790_000_000, "0.2.0", "Trainer", "hetero_ddp", policy, table, 16 * workers, **more)


def a_round(generator, sizes, *, step=10, count=10, accumulation=1, nodes=None, link=0.004, data=None, **more):
    """A round whose medians are those of the time model; ``nodes`` has ``(q, s, k, m)`` of each worker."""
    sizes = tuple(int(size) for size in sizes)
    b = np.array(sizes, dtype=float)
    q, s, k, m = np.array(nodes).T
    data = np.zeros(len(b)) if data is None else np.array(data, dtype=float)
    forward, backward, optimizer = 0.8 * (q * b + s), k * b + m, 0.2 * (q * b + s)
    compute = accumulation * (data + forward + backward + optimizer)
    time = float(compute.max() + link)
    even = np.full(len(b), b.sum() / len(b))
    slowest = float((accumulation * ((q + k) * even + s + m)).max() + link)
    fields = {
        "predicted": time * float(generator.uniform(0.98, 1.02)),
        "even": slowest,
        "nodes": tuple(tuple(map(float, row)) for row in nodes),
        "gamma": 1.0,
        "t_o": 0.0,
        "t_u": link,
        **more,
    }
    return RoundRecord(
        time=step * time,
        epoch=0,
        step=step,
        count=count,
        timed=min(count, 8),
        sizes=sizes,
        accumulation=accumulation,
        step_time=time,
        data=tuple(data),
        forward=tuple(forward),
        backward=tuple(backward),
        optimizer=tuple(optimizer),
        sync=tuple(time - compute),
        link=link,
        jitter=(0.03,) * len(b),
        **fields,
    )


def a_run(seed=0, workers=3, policy="perf_model", **header_fields):
    """A run that begins with even sizes and ends with those of its optimum, with one straggler on the way."""
    generator = np.random.default_rng(seed)
    nodes = generator.uniform(0.2, 1.0, (workers, 4)) * [0.002, 0.004, 0.004, 0.004]
    even = (16,) * workers
    speed = 1.0 / (nodes[:, 0] + nodes[:, 2])
    shares = np.maximum(1, np.floor(16 * workers * speed / speed.sum())).astype(int)
    shares[int(speed.argmax())] += 16 * workers - int(shares.sum())
    rounds = [a_round(generator, even, step=10 * i, nodes=nodes) for i in (1, 2)]
    rounds += [a_round(generator, shares, step=10 * i, nodes=nodes, kept="optimum: runs already") for i in (3, 4, 5)]
    change = ChangeRecord(2.0, 0, 20, tuple(map(int, shares)), "optimum of the time model", rounds[2].predicted)
    gain = GainRecord(3.0, 0, 20, rounds[1].step_time, rounds[2].step_time, rounds[2].predicted)
    begin = StragglerRecord(3.5, "begin", 1, "data", 0, 35, 0.01, 0.0)
    end = StragglerRecord(4.5, "end", 1, "data", 0, 45, 0.0, 0.1, "recovered")
    over = EndRecord(5.0, 0, 50, 50, "finished", (1e9,) * workers, 0.01, 0)
    return RunRecord.of(
        [header(workers, policy, **header_fields), *rounds[:2], change, *rounds[2:], gain, begin, end, over]
    )
