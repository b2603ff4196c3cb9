"""Figures of a recorded run, its optimum and what-ifs against brute force, and what verdict, table and advice say."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lightning_hetero.core.report.advice import advice
from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.limit import limit_of
from lightning_hetero.core.report.records import EndRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.summary import summary_of
from lightning_hetero.core.report.what_if import what_if
from tests.recorded import a_round, a_run, header

NODES = [(0.001, 0.002, 0.002, 0.001), (0.002, 0.002, 0.004, 0.001)]
UNKNOWN = ("step_time", "speed_up", "idle", "rate", "optimum", "share_of_optimum", "link_share", "even", "predicted")


def at(sizes=(16, 16), nodes=NODES, **more):
    return a_round(np.random.default_rng(0), sizes, nodes=nodes, **more)


def figures(*rounds, policy="perf_model", **fields):
    return RunFigures(RunRecord.of([header(len(rounds[0].sizes), policy, **fields), *rounds]))


def test_figures_are_those_of_the_lines(seed):
    run = a_run(seed, workers=2 + seed % 4)
    found, rounds = RunFigures(run), [json.loads(as_line(one)) for one in run.rounds]
    last = [one for one in rounds if one["sizes"] == rounds[-1]["sizes"]]
    mean = {
        name: np.average([one[name] for one in last], axis=0, weights=[one["count"] for one in last])
        for name in (*PHASES, "step_time", "even", "predicted", "link")
        if name in last[0]
    }
    step, compute = mean["step_time"], sum(mean[name] for name in PHASES if name in mean)
    sizes, rate = np.array(last[-1]["sizes"]), sum(last[-1]["sizes"]) / step
    even = [one["step_time"] if i < 2 else one["even"] for i, one in enumerate(rounds)]
    expected = {
        "step_time": step,
        "even": mean["even"],
        "predicted": mean["predicted"],
        "speed_up": mean["even"] / step,
        "step_time_before": np.mean([one["step_time"] for one in rounds[:2]]),
        "idle": 1 - compute.mean() / step,
        "rate": rate,
        "share_of_solo": rate / (sizes / compute).sum(),
        "link_share": mean["link"] / step,
        "speed_up_of_run": np.sum(even) / sum(one["step_time"] for one in rounds),
        "lost": 0.1,
    }
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-4)
    workers = {
        "idle": 1 - compute / step,
        "rate": sizes / step,
        "share": sizes / sizes.sum(),
        "waiting": step - compute,
    }
    for name, values in workers.items():
        assert [getattr(one, name) for one in found.workers] == pytest.approx(values, rel=1e-3), name
    for row, one in zip(summary_of(run).rows, found.workers, strict=True):
        assert row[:3] == (str(one.rank), f"device {one.rank}", f"{one.size:.0f} ({100 * one.share:.0f} %)")
        numbers = [float(cell.split()[0]) for cell in row[3:6]]
        assert numbers == pytest.approx([one.rate, 1e3 * one.compute, 1e3 * one.waiting], rel=5e-3)


def test_means_are_over_steps_and_ratios_over_the_rounds_in_which_both_are_known():
    one = at((20, 12), even=0.3)
    found = figures(
        replace(one, step_time=0.9, even=math.nan, link=0.09, count=7),
        replace(one, step_time=0.1, link=math.nan, count=20),
        replace(one, step_time=0.2, link=0.04, count=10),
    )
    assert found.step_time == pytest.approx((7 * 0.9 + 20 * 0.1 + 10 * 0.2) / 37)
    assert found.speed_up == found.speed_up_of_run == pytest.approx(30 * 0.3 / (20 * 0.1 + 10 * 0.2))
    assert found.link_share == pytest.approx((7 * 0.09 + 10 * 0.04) / (7 * 0.9 + 10 * 0.2))
    assert math.isnan(figures(one, at()).step_time_before), "it began with other sizes"
    measured = [figures(at(sizes, even=99.0)).even for sizes in ((16, 16), (17, 16), (18, 15))]
    assert [value == 99.0 for value in measured] == [False, False, True]
    four = figures(at(accumulation=4))
    assert four.workers[1].compute == pytest.approx(4 * figures(at()).workers[1].compute)
    assert (four.rate, four.workers[0].rate) == pytest.approx((128 / four.step_time, 64 / four.step_time))
    ran = figures(at((20, 12), rows=(16.0, 16.0), count=1), at((20, 12), rows=(18.0, 14.0), count=3))
    assert [worker.size for worker in ran.workers] == [17.5, 14.5]
    empty = RunRecord.of([header(2)])
    found = RunFigures(empty)
    assert found.last == found.workers == what_if(found) == advice(found) == ()
    assert all(math.isnan(getattr(found, name)) for name in UNKNOWN)
    assert limit_of(found)
    assert summary_of(empty).text()


# the optimum, and other workers: against all integer splits


def best(nodes, total, link, most=None, least=1):
    ranges = [range(least, (total if most is None else min(total, most[i])) + 1) for i in range(len(nodes))]
    splits = [sizes for sizes in product(*ranges) if sum(sizes) == total]
    times = [max((q + k) * b + s + m for (q, s, k, m), b in zip(nodes, sizes, strict=True)) for sizes in splits]
    return min(times) + link if times else None


def test_the_optimum_and_every_change_of_workers_are_the_best_of_all_splits(seed):
    rng = np.random.default_rng(seed)
    workers, link = 2 + seed % 2, 0.003
    nodes = [tuple(row) for row in rng.uniform(0.1, 1.0, (workers, 4)) * [0.002, 0.02, 0.004, 0.02]]
    total, bounds = 4 * workers, [int(rng.integers(4, 7)) for _ in range(workers)] if seed % 3 != 1 else None
    one = at((4,) * workers, nodes, link=link, **({"max_local": tuple(bounds)} if bounds else {}))
    run, now = figures(one), best(nodes, total, link, bounds)
    assert run.optimum == pytest.approx(now)
    assert run.share_of_optimum == pytest.approx(now / run.step_time), "measured as the model says"
    longer = figures(replace(one, step_time=one.step_time + 0.05))
    saved = [found.step_time * (1 - found.share_of_optimum) for found in (run, longer)]
    assert saved[0] == pytest.approx(saved[1], abs=1e-9), "time that no split saves"
    found = {(change.change, change.rank): change for change in what_if(run)}
    for rank in range(workers):
        rest = [i for i in range(workers) if i != rank]
        free = None if bounds is None or bounds[rank] > 4 else [total if i == rank else b for i, b in enumerate(bounds)]
        for change, order, most in (
            ("without", rest, bounds and [bounds[i] for i in rest]),
            ("one more like", [*range(workers), rank], bounds and [*bounds, bounds[rank]]),
            *([("no bound on", list(range(workers)), free)] if free else []),
        ):
            time, one = best([nodes[i] for i in order], total, link, most), found.pop((change, rank), None)
            assert (one is None) == (time is None)
            assert one is None or (one.step_time, one.gain) == pytest.approx((time, now / time - 1))
    assert not found


def test_bounds_the_newest_model_and_damage_count_for_the_optimum():
    least = header(2)
    least = replace(least, workers=tuple(replace(worker, min_local=16) for worker in least.workers))
    assert RunFigures(RunRecord.of([least, at()])).optimum == pytest.approx(at().step_time)
    for sizes, optimum in (((24, 8), at((24, 8)).step_time), ((25, 8), math.nan)):
        of_eight = figures(at(sizes), settings={"local_batch_multiple": "8"})
        assert of_eight.optimum == pytest.approx(optimum, nan_ok=True)
    equal = replace(at(), nodes=(NODES[0],) * 2)
    assert figures(at(), equal).share_of_optimum == 1.0 > 0.9 > figures(equal, at()).share_of_optimum
    assert figures(replace(at((31, 1)), step_time=0.001)).share_of_optimum == 0.0
    assert RunFigures(RunRecord.of([header(0), at()])).optimum == figures(at()).optimum, "of unknown workers"
    for one in (at(max_local=(15, 15)), replace(at((18, 14)), nodes=(), even=math.nan)):
        found = figures(one)
        assert math.isnan(found.optimum)
        assert math.isnan(found.share_of_optimum)
        assert what_if(found) == ()


# words: what limits the step, and what to do


def noisy(share, jitter):
    one = at(nodes=[NODES[0]] * 2)
    later = {name: (getattr(one, name)[0], getattr(one, name)[0] * share) for name in PHASES}
    return replace(one, **later, timed=9, jitter=(0.01 * jitter, jitter))


LIMITS = [
    ("rank 1's backward", at()),
    ("rank 1's loader", at(data=(0.0, 0.3))),
    (r"the link \(67%", at(link=0.2)),
    ("computing, balanced", at((20, 10))),
    ("computing, balanced", noisy(1.08, 0.1)),  # three standard errors of nine steps are a tenth
    ("rank 1's", noisy(1.12, 0.1)),
    ("loading, balanced", at((20, 10), data=(0.06, 0.06))),
    ("computing of 4 of 5", at((16, 4, 16, 16, 16), [NODES[0], NODES[1], *[NODES[0]] * 3])),
    ("computing, balanced", replace(at((20, 10)), step_time=at((20, 10)).step_time / 0.76)),
    ("the training loop", replace(at((20, 10)), step_time=at((20, 10)).step_time / 0.74)),
]


@pytest.mark.parametrize(("words", "one"), LIMITS)
def test_what_limits_the_step_is_named(words, one):
    assert re.match(words, limit_of(figures(one)))


SLOW = (0.0, 0.2, 0.0, 0.1)
SHORT = [(1e-5, 1e-3, 1e-5, 1e-4), (1e-5, 4e-3, 1e-5, 1e-4)]
BOUND = [NODES[0]] * 2 + [(0.004, 0.002, 0.008, 0.001)] * 2
THIN = at((21, 11), link=0.1)
ADVICE = {  # and the patterns of all that is said, in order
    "balanced": ([at((21, 11))], ""),
    "a link that makes steps wait": ([THIN], "communication.*59%.*2.4x"),
    "a loader": ([at((21, 11), data=(0.0, 0.05))], "rank 1 .*4.%.*num_workers"),
    "a worker that costs time": ([at((29, 18, 1), [*NODES, SLOW])], "rank 2 .*without it"),
    "memory of two": ([at((6, 4, 16, 16), BOUND, max_local=(6, 4, 100, 100))], "rank 1 .*memory;rank 0 .*memory"),
    "even": ([at()], "even policy.*optimum"),
    "short steps": ([at((21, 11), SHORT, link=1e-4)], "rank 1 .*without it;4.42 ms.*hetero_elastic"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_each_advice_stands_where_its_figure_says_so(name):
    rounds, expected = ADVICE[name]
    found = advice(figures(*rounds, policy="even" if name == "even" else "perf_model"))
    patterns = expected.split(";") if expected else []
    assert len(found) == len(patterns)
    assert all(re.search(pattern, text) for pattern, text in zip(patterns, found, strict=True)), found


def test_the_summary_says_what_was_decided_what_is_missing_and_how_it_ended():
    run = a_run()
    found, text = RunFigures(run), summary_of(run).text()
    for words in (
        *(f"{found.speed_up:.2f}x", f"{100 * found.idle:.0f} % idle", limit_of(found), "1 change of"),
        *("optimum: runs already", "1 straggler, 0.1 s", "rank 1 (data)", "epoch 0 step 20"),
        *(f"{1e3 * found.step_time_before:.4g}", f"{1e3 * found.step_time:.4g}", f"{1e3 * found.predicted:.4g}"),
    ):
        assert words in text
    texts = text, summary_of(a_run(by_cost=True)).text()
    assert [one.count("even sizes") for one in texts] == [2, 0], "in the verdict and in the line on steps"
    assert [one.count("equal work") for one in texts] == [0, 2]
    failed = replace(run, end=EndRecord(1.0, 0, 3, 3, "RuntimeError: boom"))
    assert "RuntimeError: boom" in summary_of(failed).lines[-1]
    for rank, name in ((-1, "the link"), (0, "rank 0 (data)")):
        others = replace(run, stragglers=tuple(replace(one, rank=rank) for one in run.stragglers))
        assert f"most by {name}" in summary_of(others).text()
    seen = sum(one.count for one in run.rounds)
    for more, said in ((1, False), (40, True)):
        ended = replace(run, end=EndRecord(1.0, 0, 3, seen + more))
        assert ended.unseen == more
        assert (f"last {more} of {seen + more} steps" in summary_of(ended).text()) is said
    many = figures(at((16,) * 40, [(0.001, 0.0, 0.002, 0.001 * i) for i in range(40)])).run
    table = summary_of(many).rows
    assert [row[0] for row in table] == [str(i) for i in range(40 - len(table), 40)], "those that wait least"
    assert len(table) < 40
    assert "(<= 20)" in summary_of(figures(at((16,), NODES[:1], max_local=(20,))).run).text()
