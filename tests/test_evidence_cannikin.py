"""Rows of evidence on Cannikin: they are made of the committed results, and a small part of each shows the same."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "papers"))

import _cannikin_clusters as clusters
import _cannikin_training as trainings
from _clusters import Cluster

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.simulate import LinkProfile

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def module(name, path):
    """A script of this name, which another folder has, too."""
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(path.parent))
    return found


benchmark = module("cannikin_figures", BENCHMARKS / "papers" / "cannikin.py")
evidence = module("cannikin_evidence", BENCHMARKS / "evidence" / "cannikin.py")
MADE = [row for row in evidence.ROWS if row.result]


def test_all_parts_of_the_script_have_a_row():
    commands = {row.command for row in MADE}
    assert {f"{evidence.SCRIPT} {part}" for part in benchmark.PARTS} <= commands


@pytest.mark.parametrize("row", MADE, ids=lambda row: f"{row.where} {row.ours.__name__}")
def test_rows_are_made_of_committed_results(row):
    text = row.found()
    assert len(text) > 30
    assert "nan" not in text
    assert "None" not in text


@pytest.mark.parametrize("part", benchmark.PARTS)
def test_results_are_small(part):
    assert (BENCHMARKS / "results" / f"cannikin_{part}.json").stat().st_size < 100_000


# Algorithm 1


def test_algorithm_1_is_the_optimum_where_fixed_times_are_equal():
    truth = clusters.cluster("B", "ResNet-50")
    model = clusters.model_of(truth)
    for total in (200, 1600, 12_800):
        found = clusters.algorithm_1(model, total)
        assert found.found
        assert np.abs(found.sizes - solve_optperf(model, total).local_batch_sizes).max() <= 1.0


def test_algorithm_1_gives_a_worker_with_a_long_fixed_time_a_negative_size():
    equal, fixed = np.ones(2), np.array([0.0, 1.0])
    truth = Cluster.of(0.001 * equal, fixed, 0.002 * equal, 0 * equal, LinkProfile())
    found = clusters.algorithm_1(clusters.model_of(truth), 64)
    assert found.sizes.min() < 0
    assert found.sizes.sum() == pytest.approx(64)


# step times


def test_no_split_of_cluster_b_saves_53_percent_at_its_own_ratios():
    assert benchmark.limit(1.377) == pytest.approx(0.41, abs=0.005)
    assert benchmark.limit(3.09) == pytest.approx(0.53, abs=0.005)


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_lb_bsp_at_its_best_is_near_the_optimum(name):
    truth = clusters.cluster(name, "ResNet-50")
    for total in (200, 1600):
        seconds, sizes = clusters.lb_bsp_best(truth, total)
        assert sizes.sum() == total
        assert 1.0 - 1e-9 <= seconds / truth.optimum(total) <= 1.03


def test_the_optimum_saves_what_the_row_says():
    found = benchmark.of_totals(("B", "ResNet-50", 25.0, "same", 0))
    assert 0.3 < max(found["over_even"]) < 0.42
    assert max(found["over_lb_bsp"]) < 0.05
    assert benchmark.learned(clusters.cluster("B", "ResNet-50"), 1600, 0) > 0.97


def test_the_third_epoch_has_the_optimum_and_lb_bsp_does_not_settle():
    job = ("A", "ResNet-50", 128)
    assert benchmark.reach_one((*job, "ours, once an epoch", 0))["to 1 %"] <= 3
    assert benchmark.reach_one((*job, "LB-BSP, step 5, once an epoch", 0))["to 1 %"] == np.inf


# predictions


def test_predictions_hold_and_plain_averages_do_not():
    found = benchmark.prediction_one(("ResNet-50", 25.0, "same", 0.0, 0))
    assert found["ours, a second total seen"] < 0.03
    assert found["as printed"] < 0.1
    assert found["plain averages"] > 0.21


def test_printed_weights_are_worse_than_pooled_ones():
    for row in benchmark.noise_scale(True, 1):
        for name in ("trace", "signal"):
            assert row["pooled"][name] <= 1.02 * min(row["cannikin"][name], row["mean"][name])


# trainings


@pytest.fixture(scope="module")
def seconds():
    """Seconds of trainings of ResNet-18 on cluster B."""
    job, truth = clusters.WORKLOADS["ResNet-18"], clusters.cluster("B", "ResNet-18")
    found = {name: total_seconds for name, (_, total_seconds) in trainings.fixed(job, truth).items()}
    for name, (planner, total) in trainings.systems(job, truth).items():
        if name in ("ours", "AdaptDL", "all known"):
            found[name] = trainings.train(job, truth, planner, total, 0).seconds
    return found


def test_the_saving_at_the_initial_total_is_not_that_at_a_tuned_one(seconds):
    assert 1 - seconds["ours"] / seconds["DDP at B_0"] > 0.85
    assert 0.2 < 1 - seconds["ours"] / seconds["DDP at its best total"] < 0.42


def test_adaptive_totals_with_equal_sizes_are_slower_by_less_than_the_paper_says(seconds):
    assert 0.1 < 1 - seconds["ours"] / seconds["AdaptDL"] < 0.42
    assert seconds["ours"] / seconds["all known"] < 1.05


def test_a_simulated_training_takes_as_long_as_the_sum_over_its_steps():
    """Equal sizes and one total: the loop that looks now and then agrees with the integral."""
    job, truth = clusters.WORKLOADS["BERT"], clusters.cluster("B", "BERT")
    expected = trainings.seconds_at(job, lambda total: clusters.even_time(truth, total), 384)
    assert trainings.train(job, truth, None, 384, 0).seconds == pytest.approx(expected, rel=0.02)


def test_workers_that_leave_are_made_up_for_at_once():
    found = benchmark.workers_one(("B loses four RTX6000", 0))
    assert found["first"] > 0.9 > found["even"]
    assert found["to 5 %"] <= 8
