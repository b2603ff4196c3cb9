"""Evidence of Adaptive SGD: the replay computes what real workers do, and each row's figure comes from its result."""

import importlib.util
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def loaded(path, name):
    """A module of the benchmarks, which find each other beside themselves."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    """`benchmarks/papers/adaptive_sgd.py`, with the threads of torch and the paths of import as they were after it."""
    threads, before = torch.get_num_threads(), list(sys.path)
    sys.path.insert(0, str(BENCHMARKS / "papers"))
    try:
        yield loaded(BENCHMARKS / "papers" / "adaptive_sgd.py", "adaptive_sgd")
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = before


@pytest.fixture(scope="module")
def evidence():
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS / "evidence"))
    try:
        yield loaded(BENCHMARKS / "evidence" / "adaptive_sgd.py", "evidence_of_adaptive_sgd")
    finally:
        sys.path[:] = before


def trained(bench, method, optimizer="SGD", lr=1.0, **kwargs):
    spec = bench.spec("amazon", "unequal", method, optimizer, lr, 0)
    return bench.replay(spec, kwargs.pop("epochs", 1), quick=True, **kwargs)


def test_a_replay_trains_on_every_sample_once_and_faster_workers_take_more(bench):
    record = trained(bench, "elastic")
    assert record["points"][-1][0] == 1500
    updates = [sum(merge[1][rank] for merge in record["merges"]) for rank in range(3)]
    assert updates[0] > updates[1] > updates[2] > 0


def test_sizes_of_the_adaptive_rule_equalize_updates_and_workers_hardly_wait(bench):
    record = trained(bench, "adaptive", epochs=4)
    sizes, updates, _, _ = record["merges"][-1]
    assert sizes[0] > sizes[1] > sizes[2]
    assert max(updates) - min(updates) <= 2


def test_even_batches_make_fast_workers_wait(bench):
    even, claimed = (trained(bench, method)["points"][-1][1] for method in ("elastic, even", "elastic"))
    assert even > 1.1 * claimed


def test_a_merge_after_one_batch_each_with_the_plain_mean_is_averaged_gradients(bench, monkeypatch):
    """Anchor: `mean` after every batch and `ddp` are the same training."""
    task = sys.modules["_adaptive_sgd_task"]
    monkeypatch.setitem(task.METHODS, "mean, every batch", task.Method("mean", even=True, every=True))
    merged, averaged = (trained(bench, m)["points"] for m in ("mean, every batch", "ddp"))
    # the last steps of an epoch differ: its ragged tail is not as even
    assert [p[3] for p in merged[:-1]] == pytest.approx([p[3] for p in averaged[:-1]], abs=0.011)


def test_one_worker_trains_alike_with_all_merges(bench):
    specs = [bench.spec("amazon", "paper", method, "SGD", 1.0, 0, 1) for method in ("adaptive", "elastic", "crossbow")]
    first, *others = ([p[3] for p in bench.replay(spec, 1, quick=True)["points"]] for spec in specs)
    assert others == [first, first]


def test_balanced_batches_take_less_time_and_compute_the_same(bench):
    record = trained(bench, "ddp", epochs=6)
    balanced = bench.balanced(record, quick=True)
    assert [p[3] for p in balanced["points"]] == [p[3] for p in record["points"]]
    assert balanced["points"][-1][1] < 0.9 * record["points"][-1][1]


def test_a_step_of_averaged_gradients_lasts_as_long_as_its_slowest_worker(bench):
    replay = sys.modules["_adaptive_sgd_replay"]
    task = sys.modules["_adaptive_sgd_task"]
    devices = [replay.Device(p, rank) for rank, p in enumerate(task.profiles("unequal"))]
    again = [replay.Device(p, rank) for rank, p in enumerate(task.profiles("unequal"))]
    ends = replay.step_ends(devices, 1500, balanced=False)
    first, second = next(ends), next(ends)
    expected = [max(device.seconds(task.BATCH) for device in again) for _ in range(2)]
    assert [first, second - first] == pytest.approx(expected)


def test_time_to_a_precision_counts_exchanges_and_interpolates(bench):
    record = {"points": [(0, 0.0, 0, 0.1), (10, 1.0, 5, 0.3), (20, 2.0, 10, 0.5)]}
    assert bench.time_to(record, 0.4, exchange=0.0) == pytest.approx(1.5)
    assert bench.time_to(record, 0.4, exchange=1.0) == pytest.approx(1.5 + 7.5 * bench.BATCH_SECONDS)
    assert bench.samples_to(record, 0.4) == pytest.approx(15)
    assert bench.time_to(record, 0.6) is None


def test_trainings_that_are_done_are_not_repeated(bench, tmp_path):
    specs = [bench.spec("amazon", "unequal", "mean", "SGD", lr, 0) for lr in (0.5, 1.0)]
    first = bench.Runs(tmp_path, "grid", 1).of(specs, epochs=1, quick=True)
    assert bench.Runs(tmp_path, "grid", 0).of(specs, epochs=1, quick=True) == json.loads(json.dumps(first))
    with pytest.raises(SystemExit, match="1 of 1 trainings are left"):
        bench.Runs(tmp_path, "grid", 0).of([{**specs[0], "seed": 1}], epochs=1, quick=True)


def test_the_best_rate_of_each_method_is_inside_the_grid():
    rows = json.loads((BENCHMARKS / "results" / "adaptive_sgd_time.json").read_text())["rows"]
    best = [row for row in rows if row["best"]]
    assert all(row["inside"] and row["seeds"] >= 3 for row in best)
    headline = {row["method"] for row in best if (row["shape"], row["cluster"]) == ("amazon", "unequal")}
    assert headline >= {"ddp", "hetero_ddp", "adaptive", "elastic", "crossbow", "mean"}


def test_every_row_has_a_figure_from_its_result_and_is_placed_once(evidence):
    texts = [row.found() for row in evidence.ROWS]
    assert all(len(text) > 20 and "None" not in text and "nan" not in text for text in texts)
    assert max(Counter((row.where, row.reported) for row in evidence.ROWS).values()) == 1
    commands = {row.command.split()[-1] for row in evidence.ROWS if row.command}
    assert commands <= {"shapes", "grid", "curves", "scaling", "confirm"}


def test_results_are_small_and_say_on_what_they_were_measured(evidence):
    for row in evidence.ROWS:
        if row.result:
            path = BENCHMARKS / "results" / row.result
            assert path.stat().st_size < 100_000
            assert {"title", "hardware", "date", "rows"} <= set(json.loads(path.read_text()))


def test_real_processes_take_the_time_that_was_replayed():
    rows = json.loads((BENCHMARKS / "results" / "adaptive_sgd_confirm.json").read_text())["rows"]
    assert {row["method"] for row in rows} >= {"ddp", "hetero_ddp", "adaptive"}
    assert all(math.isclose(row["over_replayed"], 1.0, abs_tol=0.35) for row in rows)
