"""From a policy or a setting to the next batches, the log, the progress bar and the checkpoint."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from tqdm import tqdm

from lightning_hetero import AdaptiveBatchCallback, BatchPlan, DynamicBatchPIDCallback, PerfModelCallback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.metrics import plan_metrics
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import NAMED
from lightning_hetero.core.policies.base import Decision
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.hardware import identity
from tests.decisions.told import told_time
from tests.helpers import Points, Regressor, collected, fit
from tests.learned import knowing
from tests.loops import FRONT_ENDS
from tests.ranks import run_ranks

tqdm.monitor_interval = 0  # no thread that outlives a test
CPU = torch.device("cpu")

# the next batches

EVEN_ENOUGH = (0.98 * 5 / 6, 1.0)
"""Seconds of a sample on each rank: 6/4 takes 2 % less than 5/5."""
CASES = {
    "whatever pays": ({}, True),
    "more than the gain is asked for": ({"hysteresis": 0.06}, False),
    "less than the gain is asked for": ({"hysteresis": 0.01}, True),
    "a dear change": ({"change_cost": 1e6}, False),
}


def _changes(rank, front_end, cases, seconds):
    """Plans of trainings whose steps take so many seconds by the sample, one after another."""
    found = []
    for number, settings in enumerate(cases):
        with told_time() as clock:

            def loss(output, x, y, clock=clock):
                clock.spend(len(x) * seconds[rank])
                return nn.functional.mse_loss(output, y)

            more = {"world_size": 2, "epochs": 2, "another": number + 1 < len(cases), "loss": loss}
            found.append(FRONT_ENDS[front_end](rank, {"replan": 5, **settings}, 5, **more)["history"])
    return found


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_hysteresis_and_costs_of_a_change_decide_whether_the_split_changes(front_end):
    first, second = run_ranks(_changes, 2, front_end, [settings for settings, _ in CASES.values()], EVEN_ENOUGH)
    assert first == second
    for (name, (_, changes)), history in zip(CASES.items(), first, strict=True):
        assert {sizes for *_, sizes in history} == ({(5, 5), (6, 4)} if changes else {(5, 5)}), name


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_each_policy_by_name_moves_the_split_or_keeps_it(front_end):
    """Rank 1 takes three times as long; whatever moves ends near 7.5 and 2.5."""
    first, _ = run_ranks(_changes, 2, front_end, [{"policy": name} for name in NAMED], (0.1, 0.3))
    for name, history in zip(NAMED, first, strict=True):
        sizes = [sizes for *_, sizes in history]
        assert sizes[0] == (5, 5)
        if name in ("static", "even"):
            assert len(sizes) == 1, name
        else:
            assert sizes[-1] in ((7, 3), (8, 2)), name


def _begins(rank):
    """Rank 0 was seen before; rank 1 is new, with three times the cores."""
    torch.distributed.init_process_group("gloo")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: (1, 3)[rank])
        patch.setattr("lightning_hetero.hardware.cpu_share", lambda: 8.0)
        for planner in (knowing({identity(CPU, 0): (0.001, 0.0, 0.002, 0.0)}), StaticPlanner(), None):
            engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=2, device=CPU, local_rank=rank)
            engine.shard(PermutationStream(400, shuffle=False, seed=0), batch_size=20, planner=planner)
            found.append((engine.plan.local_batch_sizes, engine.plan_history[0].describe()))
            engine.close()
    return found


def test_a_new_rank_starts_with_what_its_hardware_promises():
    for known, static, even in run_ranks(_begins, 2):
        assert [sizes for sizes, _ in (known, static, even)] == [(10, 30), (10, 30), (20, 20)]
        assert "rank 1 " in known[1]
        assert re.search(r"step 30\.\d \+- \d", known[1])


def test_arguments_of_proportional_control_are_those_of_its_planner():
    given = {"dead_band": 0.3, "decay": 0.99}
    planner = DynamicBatchPIDCallback(**given).planner
    assert {name: getattr(planner, name) for name in given} == given


# planners of one's own


def test_a_planner_that_lacks_something_is_refused_at_once():
    class Half:
        moves_total = False

        def decide(self, observations, current, context):
            return self, None

    with pytest.raises(TypeError, match="initial, predict, state_dict, loaded"):
        PolicyCallback(Half())
    with pytest.raises(TypeError, match="Decision"):
        Decision.of(None)


# metrics


def observations(step_time=(1.0, 2.0)):
    fields = {name: np.zeros((2, 2)) for name in StepObservations.FIELDS}
    fields["forward"] = np.array([[0.25, 0.5], [0.25, 0.5]])
    fields["backward"] = np.array([[0.25, 0.5], [0.75, 0.5]])
    fields["step_time"] = np.repeat(np.array(step_time)[:, None], 2, axis=1)
    return StepObservations(**fields)


def test_metrics_by_hand():
    """Computing 0.75 s (median of 0.5 and 1) and 1 s in a step of 1.5 s: idle for 1 - 0.875 / 1.5."""
    found = plan_metrics(observations(), BatchPlan(8, (6, 2)), 1.25, error=0.03)
    assert {name.removeprefix("hetero/"): value for name, value in found.items()} == {
        "total_batch_size": 8.0,
        "local_batch_size/rank0": 6.0,
        "local_batch_size/rank1": 2.0,
        "predicted_step_time": 1.25,
        "predicted_step_time_error": 0.03,
        "compute_time/rank0": 0.75,
        "compute_time/rank1": 1.0,
        "step_time": 1.5,
        "idle_fraction": pytest.approx(1 - 0.875 / 1.5),
    }
    by_cost = BatchPlan(8, (6, 2), cost=CostWeights.of("cost"))
    found = plan_metrics(observations(), by_cost, None, rows=(5.5, 2.5))
    assert [found[f"hetero/local_batch_size/rank{rank}"] for rank in range(2)] == [5.5, 2.5]
    assert [found[f"hetero/work_share/rank{rank}"] for rank in range(2)] == [0.75, 0.25]


# what Lightning's own callbacks show


class Told(Regressor):
    """Takes three times as long on rank 1 by the sample, as its clock is told."""

    def __init__(self, clock, speeds=(0.01, 0.03)):
        super().__init__()
        self.clock, self.speeds = clock, speeds

    def loss(self, batch):
        self.clock.spend(len(batch[0]) * self.speeds[self.trainer.global_rank])
        return super().loss(batch)


class Watch(Callback):
    """What the bar is given, and what that of tqdm says."""

    def __init__(self):
        self.given, self.texts = [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        bar = trainer.progress_bar_callback
        self.given.append(bar.get_metrics(trainer, pl_module))
        if isinstance(bar, TQDMProgressBar):
            self.texts.append(str(bar.train_progress_bar))


def _bars(rank):
    """What progress bars show of a given split, of one that is found, and whether they are left as they were."""
    found = []
    for bar, settings in ((TQDMProgressBar(), {"local_batch_sizes": [5, 3]}), (RichProgressBar(), {"replan": 4})):
        before, watch = bar.get_metrics, Watch()
        with told_time() as clock:
            more = {"dataset": Points(116), "max_epochs": 1, "enable_progress_bar": True, "callbacks": [bar, watch]}
            fit(rank, settings, 2, 4, model=Told(clock), **more)
        found.append((watch.given, watch.texts, bar.get_metrics == before))
    return found


def test_a_progress_bar_shows_split_idle_time_and_speed_over_even_sizes():
    (given, texts, left), (found, _, left_too) = run_ranks(_bars, 2)[0]
    assert {metrics["split"] for metrics in given[:-1]} == {"5/3"}
    assert given[-1]["split"] == "3/1", "of the last batch"
    assert any("split=" in text for text in texts)
    assert "idle" not in found[0], "nothing was measured yet"
    assert re.fullmatch(r"\d+%", found[-1]["idle"])
    assert re.fullmatch(r"\d+\.\d\dx", found[-1]["vs even"])
    assert left
    assert left_too


class Notes(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


def samples_of(batch):
    return len(batch[0])


def _counted(rank, settings):
    lines, notes, model = collected(), Notes(), Regressor()
    model.flops_per_batch = 10
    monitor = ThroughputMonitor(samples_of, length_fn=lambda batch: 5 * len(batch[0]), window_size=2)
    more = {"callbacks": [monitor], "logger": notes, "max_epochs": 1, "log_every_n_steps": 1}
    fit(rank, settings, 2, 4, model=model, dataset=Points(30), **more)
    found = [(row["train/samples"], row["train/lengths"]) for row in notes.rows if "train/samples" in row]
    return found, monitor.batch_size_fn is samples_of, len([line for line in lines if "ThroughputMonitor" in line])


@pytest.mark.parametrize("settings", [{"local_batch_sizes": [0, 8]}, "ddp"], ids=str)
def test_a_throughput_monitor_counts_the_samples_of_all_ranks_as_under_ddp(settings):
    """Three batches of eight and a ragged one of six; it multiplies by the number of ranks."""
    (found, put_back, said), (_, _, elsewhere) = run_ranks(_counted, 2, settings)
    assert put_back
    assert found == [(4, 20), (8, 40), (12, 60), (15, 75)]
    assert (said, elsewhere) == (settings != "ddp", 0)


# state


def test_what_was_learned_rides_in_the_state_of_its_policy_alone():
    planner = replace(knowing({"a": (0.0, 0.1, 0.01, 0.2)}, t_u=0.02), credit=0.5)
    state = PolicyCallback(planner).state_dict()
    restored, other = PerfModelCallback(), DynamicBatchPIDCallback()
    restored.load_state_dict(state)
    assert restored.planner == replace(planner, ranks=()), "of whom a trial was about is not kept"
    assert restored.state_dict() == state
    before = other.planner
    other.load_state_dict(state)
    assert other.planner == before
    saved, resumed = AdaptiveBatchCallback(64), AdaptiveBatchCallback(64)
    saved.planner = replace(saved.planner, initial_total=10, steps=50)
    resumed.load_state_dict(saved.state_dict() | {"policy": "lightning_hetero.core.adaptive.GoodputPlanner"})
    assert (resumed.planner.initial_total, resumed.planner.steps) == (10, 50), "under its former name"


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _resumed(rank, folder):
    """Plans of a run by one policy, and of those that go on with it by others."""
    path, histories = str(folder / "saved.ckpt"), []
    for callback in ([Saves(path)], [DynamicBatchPIDCallback(dead_band=0.9)], [PolicyCallback(StaticPlanner())]):
        with told_time() as clock:
            more = {"ckpt_path": path if histories else None, "max_epochs": 2, "dataset": Points(120)}
            done = fit(rank, {"replan": 4}, 2, 5, model=Told(clock), callbacks=callback, **more)
        histories.append(done["history"])
    return histories


def test_another_policy_goes_on_with_the_plan_of_a_checkpoint(tmp_path):
    (whole, *rests), _ = run_ranks(_resumed, 2, tmp_path)
    running = [sizes for epoch, _, sizes in whole if epoch == 0][-1]
    assert running[0] > running[1]
    for rest in rests:
        assert rest[0][2] == running
        assert len(rest) == 1
