"""Policies as callbacks: metrics, progress bar, log lines, state that rides in a checkpoint."""

import logging
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_hetero import AdaptiveBatchCallback, DynamicBatchPIDCallback, HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.callbacks import PolicyCallback, policy_callback
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import BatchPlan
from lightning_hetero.core.metrics import plan_metrics
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies import NAMED
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.engine import HeteroEngine
from tests.helpers import Points, fit, run_ranks, trainer_of
from tests.learned import knowing


class Swings(StaticPlanner):
    """Another split at every look, as a user might write it."""

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        big, small = sorted(current.local_batch_sizes, reverse=True)
        sizes = (small - 1, big + 1) if current.local_batch_sizes[0] == big else (small, big)
        return self, Proposal(BatchPlan(sum(sizes), sizes), "swings by 10 %")


# what the engine reads of a planner


@dataclass(frozen=True)
class Chooses(StaticPlanner):
    """Has fields with names that others of ours have."""

    choice: str = "mine"
    density: str = "high"
    probe: str = "no"

    def decide(self, observations, current, context):
        return Decision(self, kept="nothing to gain: by my own rule")


def _chooses(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning_hetero").addHandler(handler)
    result = fit(rank, {"replan": 2}, 2, 4, dataset=Points(80), callbacks=[PolicyCallback(Chooses())], max_epochs=2)
    return result["steps"], [line for line in lines if line.startswith("the split stays")]


def test_fields_of_a_planner_are_its_own():
    """And why it keeps the split is said once, by rank 0, after however many looks."""
    results = run_ranks(_chooses, 2)
    assert [steps for steps, _ in results] == [20, 20]
    first = [line for line in results[0][1] if "too few" not in line]
    assert first == ["the split stays: nothing to gain: by my own rule"]
    assert results[1][1] == []


def test_a_planner_that_lacks_something_is_refused_at_once():
    class Half:
        moves_total = False

        def decide(self, observations, current, context):
            return self, None

    with pytest.raises(TypeError, match=r"lacks initial, predict, state_dict, loaded. See .*Planner; moves_total"):
        PolicyCallback(Half())
    with pytest.raises(TypeError, match=r"decide\(\) of a planner returned None; return Decision"):
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
    assert plan_metrics(observations(), BatchPlan(8, (6, 2)), 1.25, error=0.03) == {
        "hetero/total_batch_size": 8.0,
        "hetero/local_batch_size/rank0": 6.0,
        "hetero/local_batch_size/rank1": 2.0,
        "hetero/predicted_step_time": 1.25,
        "hetero/predicted_step_time_error": 0.03,
        "hetero/compute_time/rank0": 0.75,
        "hetero/compute_time/rank1": 1.0,
        "hetero/step_time": 1.5,
        "hetero/idle_fraction": pytest.approx(1 - 0.875 / 1.5),
    }


@pytest.mark.parametrize(
    ("step_time", "known"),
    [((np.nan, 2.0), True), ((np.nan, np.nan), False), ((0.0, 0.0), False), ((np.inf, np.inf), False)],
)
def test_metrics_leave_out_what_is_not_known(step_time, known):
    metrics = plan_metrics(observations(step_time), BatchPlan(8, (6, 2)), None)
    assert ("hetero/step_time" in metrics) == ("hetero/idle_fraction" in metrics) == known
    assert "hetero/predicted_step_time" not in metrics
    assert all(np.isfinite(value) and type(value) is float for value in metrics.values())


def test_idle_fraction_is_a_share():
    """More computing than time in a step (accumulation, jitter) is no negative idleness."""
    assert plan_metrics(observations((0.1, 0.1)), BatchPlan(8, (6, 2)), None)["hetero/idle_fraction"] == 0.0


# names


@pytest.mark.parametrize("name", NAMED)
def test_policies_by_name(name):
    assert policy_callback(name).policy == ("fixed" if name == "even" else name)


def test_names_of_policies():
    assert PerfModelCallback().policy == "perf_model"
    assert DynamicBatchPIDCallback().policy == "pid"
    assert PolicyCallback(Swings()).policy == f"{__name__}.Swings"
    assert PolicyCallback().policy == "fixed"


# progress bar


class Shown(RichProgressBar):
    """Keeps what it shows."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _update_metrics(self, trainer, pl_module):
        self.seen.append(self.get_metrics(trainer, pl_module))
        super()._update_metrics(trainer, pl_module)


class ShownByTQDM(TQDMProgressBar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        if trainer.is_global_zero:
            assert "split=" in str(self.train_progress_bar)
            self.seen.append(self.get_metrics(trainer, pl_module))


def _bars(rank, cls, ranks):
    bar = cls()
    fit(rank, {"local_batch_sizes": [5, 3][:ranks]}, ranks, 4, callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    return [metrics.get("split") for metrics in bar.seen], "get_metrics" in vars(bar)


@pytest.mark.parametrize("cls", [Shown, ShownByTQDM])
def test_progress_bar_shows_the_split(cls):
    (shown, left), (_, left_elsewhere) = run_ranks(_bars, 2, cls, 2)
    assert shown
    assert set(shown) == {"5/3"}
    assert not left
    assert not left_elsewhere


def _gained(rank):
    bar = Shown()
    fit(rank, {"replan": 4}, 2, 4, dataset=Points(120), callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    return bar.seen


def test_progress_bar_shows_idle_time_and_the_speed_over_even_sizes():
    seen, _ = run_ranks(_gained, 2)
    assert "idle" not in seen[0], "nothing was measured yet"
    assert re.fullmatch(r"\d+%", seen[-1]["idle"])
    assert re.fullmatch(r"\d+\.\d\dx", seen[-1]["vs even"])


def test_progress_bar_of_one_process_is_as_it_was():
    ((shown, _),) = run_ranks(_bars, 1, Shown, 1)
    assert set(shown) == {None}


# log


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def _logged(rank, planner, strategy):
    handler, logger = Lines(), logging.getLogger("lightning_hetero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    callbacks = [PolicyCallback(planner)] if planner else []
    result = fit(rank, strategy, 2, 5, dataset=Points(120), callbacks=callbacks, max_epochs=1)
    return handler.lines, result["history"]


def test_one_line_for_each_plan_with_its_reason():
    (lines, history), (others, _) = run_ranks(_logged, 2, Swings(), {"replan": 4})
    assert others == []
    assert len(history) > 2
    plans = [message for level, message in lines if level == "INFO" and message.startswith("plan from")]
    assert plans == [
        f"plan from epoch {epoch} step {step}: {'/'.join(map(str, sizes))} of 10 samples "
        f"({'equal sizes' if i == 0 else 'swings by 10 %'})"
        for i, (epoch, step, sizes) in enumerate(history)
    ]


class Learned(PerfModelPlanner):
    """Sees two workers of which the first is three times as fast."""

    def decide(self, observations, current, context):
        scale = np.array([1e-3, 3e-3])
        sizes = np.broadcast_to(np.array(current.local_batch_sizes, dtype=float), (5, 2))
        zeros = np.zeros((5, 2))
        return super().decide(
            StepObservations(sizes, zeros, sizes * scale, zeros, zeros, zeros, zeros), current, context
        )


def test_line_of_a_plan_says_why_and_what_it_gains():
    (lines, history), _ = run_ranks(_logged, 2, Learned(), {"replan": 4})
    assert history[1][2] in ((7, 3), (8, 2))
    second = [message for _, message in lines if message.startswith("plan from")][1]
    gain = r"step 15\.0 -> \d\.\d ms \(\d\d\.\d% less\)"
    assert re.search(
        rf"first split, in proportion to measured speed: {gain}.*predicted step \d\.\d \+- \d\.\d ms", second
    )


# state


def test_state_round_trip():
    planner = replace(knowing({"a": (0.0, 0.1, 0.01, 0.2)}, t_u=0.02), arrivals={"a": (0.004, 1e-6)})
    state = PolicyCallback(planner).state_dict()
    assert state["policy"] == "perf_model"
    restored = PerfModelCallback()
    restored.load_state_dict(state)
    assert restored.planner == planner
    assert restored.state_dict() == state


def test_state_of_another_policy_leaves_what_was_learned_alone():
    restored = DynamicBatchPIDCallback()
    before = restored.planner
    restored.load_state_dict(PerfModelCallback().state_dict())
    assert restored.planner == before


def engine_of_one():
    """A callback that is set up on one process, with the engine behind it."""
    strategy = HeteroDDPStrategy()
    trainer = trainer_of(strategy, 1)
    strategy.engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=strategy.root_device)
    return trainer, strategy.engine


def plan_state(sizes=(7, 3)):
    entry = {"epoch": 1, "step": 4, "plan": BatchPlan(sum(sizes), sizes).state_dict(), "reason": "learned"}
    return {"history": {"entries": [entry]}, "workers": ["a", "b"]}


@pytest.mark.parametrize("stored", ["other policy", "same policy", "none of ours"])
def test_plan_is_taken_over_from_a_checkpoint(stored):
    trainer, engine = engine_of_one()
    loaded = []
    engine.load_state_dict = loaded.append
    callback = DynamicBatchPIDCallback()
    callback.setup(trainer, None, "fit")
    ours = {"policy": "perf_model", "planner": PerfModelPlanner().state_dict(), "engine": plan_state()}
    states = {
        "other policy": {"EarlyStopping": {"wait_count": 1}, "PerfModelCallback": ours},
        "same policy": {callback.state_key: ours},
        "none of ours": {"EarlyStopping": {"wait_count": 1}},
    }[stored]
    callback.on_load_checkpoint(trainer, None, {"callbacks": states})
    # of the same policy, Lightning itself calls load_state_dict
    assert loaded == {"other policy": [plan_state()], "same policy": [], "none of ours": [{}]}[stored]


def test_checkpoint_of_an_earlier_version_without_callbacks():
    trainer, _ = engine_of_one()
    callback = PerfModelCallback()
    callback.setup(trainer, None, "fit")
    callback.on_load_checkpoint(trainer, None, {})


# proportional control


def _decided(callback, compute_times, **bounds):
    """Sizes of the next batches of 40 samples, after steps of 20 and 20 that took so long."""
    zeros = np.zeros((len(compute_times), 2))
    fields = dict.fromkeys(StepObservations.FIELDS, zeros)
    seen = StepObservations(**{**fields, "local_batch_sizes": zeros + 20, "forward": np.array(compute_times)})
    context = PlanContext(40, ("a", "b"), **{"min_local": (1, 1), **bounds})
    _, proposal = callback.planner.decide(seen, BatchPlan(40, (20, 20)), context)
    return None if proposal is None else proposal.plan.local_batch_sizes


def test_the_dead_band_of_the_callback_decides_whether_sizes_change():
    slower = [(0.10, 0.12)] * 8
    assert _decided(DynamicBatchPIDCallback(), slower) == (22, 18)
    assert _decided(DynamicBatchPIDCallback(dead_band=0.3), slower) is None


def test_the_decay_of_the_callback_decides_how_soon_sizes_follow():
    changed = [(0.10, 0.10)] * 12 + [(0.10, 0.30)] * 4
    assert _decided(DynamicBatchPIDCallback(decay=0.0), changed) == (30, 10)
    assert _decided(DynamicBatchPIDCallback(decay=0.99), changed) == (24, 16)


def test_proportional_control_keeps_bounds():
    slower = [(0.10, 0.30)] * 8
    assert _decided(DynamicBatchPIDCallback(), slower) == (30, 10)
    assert _decided(DynamicBatchPIDCallback(), slower, max_local=(24, 40)) == (24, 16)
    assert _decided(DynamicBatchPIDCallback(), slower, min_local=(1, 14)) == (26, 14)


def test_what_was_learned_under_a_policys_former_name_is_taken_over():
    saved = AdaptiveBatchCallback(64)
    saved.planner = replace(saved.planner, initial_total=10, steps=50)
    state = saved.state_dict() | {"policy": "lightning_hetero.core.adaptive.GoodputPlanner"}
    resumed = AdaptiveBatchCallback(64)
    resumed.load_state_dict(state)
    assert (resumed.planner.initial_total, resumed.planner.steps) == (10, 50)


def test_a_planner_that_a_checkpoint_does_not_give_back_ends_the_resume():
    class Forgetful(StaticPlanner):
        def loaded(self, state):
            return None

    callback = PolicyCallback(Forgetful())
    with pytest.raises(RuntimeError, match=r"loaded\(\) of Forgetful returned None"):
        callback.load_state_dict(callback.state_dict())
