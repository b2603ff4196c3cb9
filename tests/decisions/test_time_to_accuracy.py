"""The controller of density and total end to end: it changes the next messages, and follows a link that moves."""

import re
from dataclasses import replace
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hetero import BlockTopK, LookAheadCallback, TTACallback
from lightning_hetero.comm.agreement import sync_schedule
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from tests.counted import CountedTime
from tests.helpers import Points, Regressor, fit, raised
from tests.ranks import at_end, run_ranks

BATCH = 5
FAT, THIN = 50e6, 2e5  # bytes per second


class Wide(Regressor):
    """Computes for 15 ms and more by the sample; 480 kB of gradients, 36 kB in a message at a density of 0.3."""

    def __init__(self, counted, by_sample, adam=False):
        super().__init__()
        torch.manual_seed(1)
        self.counted, self.by_sample, self.adam = counted, by_sample, adam
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 20_000), torch.nn.AvgPool1d(5_000), torch.nn.Linear(4, 1)
        ).float()

        self.used = []

    def forward(self, x):
        seconds = 0.015 + self.by_sample * len(x)
        self.counted.spend(seconds / 3)
        y = self.net(x)
        y.register_hook(lambda _: self.counted.spend(2 * seconds / 3))
        return y

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.lr) if self.adam else super().configure_optimizers()
        optimizer.register_step_post_hook(lambda o, *_: self.used.append(o.param_groups[0]["lr"]))
        return optimizer


class Link(L.Callback):
    """A link whose rate changes at given steps; keeps what the messages of each step were."""

    def __init__(self, counted, rates):
        self.counted, self.rates = counted, rates
        self.densities, self.sizes, self.totals, self.late, self.moments = [], [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.counted.rate = self.rates.get(trainer.global_step, self.counted.rate)

    def on_after_backward(self, trainer, pl_module):
        exchange = trainer.strategy.engine.compression.averager
        self.densities.append(exchange.density)
        late = trainer.strategy.engine.hook_state.staleness
        self.late.append(late is not None and late.stale_share > 0)
        self.sizes.append(self.counted.sent)
        self.totals.append(trainer.strategy.plan.total_batch_size)
        self.moments.append(self.counted.now)


def _run(rank, rates, settings, kwargs):
    counted = CountedTime(rank, rates.get(0, FAT))
    callback, usual = TTACallback(**settings), sync_schedule.SETTINGS
    at_end(partial(setattr, sync_schedule, "SETTINGS", usual))
    sync_schedule.SETTINGS = replace(usual, min_steps_density=kwargs.pop("every", 2))
    link = Link(counted, rates)
    strategy = {"compression": BlockTopK(density=0.3), "replan": 8, **kwargs.pop("strategy", {})}
    model = Wide(counted, kwargs.pop("by_sample", (1e-4, 1e-4))[rank], kwargs.pop("adam", False))
    batch, callbacks = kwargs.pop("batch", BATCH), [callback, link, *kwargs.pop("callbacks", [])]
    more = {"dataset": Points(4000, dtype=torch.float32), "max_steps": 8, "max_epochs": -1, **kwargs}
    done = fit(rank, strategy, 2, batch, model=model, callbacks=callbacks, **more)
    keep = {name: getattr(link, name) for name in ("densities", "sizes", "totals", "late", "moments")}
    return {**done, **keep, "lr": sorted(set(model.used)), "state": callback.state_dict()["planner"]}


def run(rates, settings=None, **kwargs):
    results = run_ranks(_run, 2, rates, settings or {}, kwargs)
    assert results[0]["densities"] == results[1]["densities"], "ranks send different shares in the same step"
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    return results


def changes(values):
    return [(a, b) for a, b in zip(values, values[1:], strict=False) if a != b]


@pytest.mark.parametrize("at", [28, 40])
def test_a_resumed_run_keeps_the_density_until_eight_new_steps_were_measured(at, tmp_path):
    """Between two sync rounds; the first time with messages that were timed and not compared yet."""
    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", every_n_train_steps=at)
    whole = run({0: FAT, 16: THIN}, callbacks=[saving], enable_checkpointing=True, max_steps=72)[0]["densities"]
    rest = run({at: FAT}, ckpt_path=str(tmp_path / f"step={at}.ckpt"), max_steps=160)[0]["densities"]
    assert rest[:8] == [whole[at - 1]] * 8
    assert whole[-1] < whole[15] / 10
    assert rest[-1] > 1.5 * rest[0], "up slowly"


def test_messages_and_split_follow_link_and_workers_within_seconds_and_stay_where_nothing_happens():
    """Rank 0 is three times as fast by the sample; the link is thin for 56 steps. Seconds are those that are counted.

    What counts is what was done: bytes that set out, and samples that each rank was given.
    """
    results = run({56: THIN, 112: FAT}, max_steps=320, batch=20, by_sample=(5e-4, 1.5e-3))
    moments, sent = results[0]["moments"], results[0]["sizes"]
    assert sent == results[1]["sizes"]
    fat, thin, again = sent[55], sent[111], sent[-1]
    assert thin < fat / 3
    assert again > 1.5 * thin, "up slowly"
    assert len(changes(sent[56:112])) == 1, "to and fro on the thin link, or step by step"
    assert all(later > earlier for earlier, later in changes(sent[112:])), "to and fro on the fat link"
    first = next(step for step in range(56, 112) if sent[step] == thin)
    assert moments[first] - moments[56] < 5
    given = [[len(indices) for *_, indices in r["seen"]] for r in results]
    assert [first + second for first, second in zip(*given, strict=True)] == [40] * 320
    assert given[0][0] == 20
    assert 28 <= min(given[0][40:]) <= max(given[0][40:]) <= 32, "the link was taken for a worker, or to and fro"


def test_messages_come_late_where_the_user_chose_it_and_take_no_longer_than_computing():
    results = run({0: FAT, 16: THIN}, {"min_density": 0.005}, max_steps=104, strategy={"staleness": 1})
    assert all(results[0]["late"])
    assert all(results[1]["late"])
    assert results[0]["sizes"][15] > 3 * results[0]["sizes"][-1]
    assert 0.003 < results[0]["sizes"][-1] / THIN < 0.018


def test_the_first_message_is_as_dense_as_the_measured_link_asks_for():
    fat, thin = (run({0: rate}, max_steps=1)[0]["densities"] for rate in (FAT, THIN))
    assert thin[0] < fat[0] < 0.1, "as the user gave it"


def test_computing_counts_from_the_third_step_on():
    for late in (0, 1):
        strategy = {"replan": "auto", "staleness": late}
        first, second, third = run({0: 2e6}, max_steps=3, by_sample=(0.02, 0.02), strategy=strategy)[0]["densities"]
        assert first == second < third / 3


def test_a_link_that_stalls_hastens_the_next_round():
    """Rounds come every 50 steps of 17 ms; a message of some seconds is late."""
    sent = run({60: 1e3}, {"max_density": 0.03}, max_steps=76, every=50, strategy={"replan": "auto"})[0]["sizes"]
    assert next(step for step in range(60, 76) if sent[step] < sent[59]) <= 64


def test_the_total_follows_link_and_profile_at_the_rate_of_the_script(tmp_path):
    """Larger totals cost nothing by the profile; on a thin link, with messages of one size, they pay."""
    points = [(rate, total, 0.0) for rate in (0.0, 0.9, 0.99) for total in (10, 20, 80)]
    ConvergenceProfile(10, 80, 1.0, tuple(points)).save(tmp_path / "profile.json")
    settings = {"max_total_batch_size": 40, "profile": tmp_path / "profile.json", "min_density": 0.3, "min_steps": 8}
    results = run({0: 2e6}, settings, max_steps=64, adam=True)
    assert results[0]["totals"][0] == 10
    assert results[0]["totals"][-1] == 40
    assert results[0]["lr"] == [0.05], "the profile's probes ran with the rate of the script"
    assert results[0]["state"]["density"] == 0.3
    sizes = [sum(len(part[2]) for part in step) for step in zip(*(r["seen"] for r in results), strict=True)]
    assert sizes[-1] == 40, "the next batches are those of the plan"


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"min_density": 0.1, "max_density": 0.01}, ValueError, "max_density=0.01"),
        ({"bandwidth": "guess"}, ValueError, "bandwidth='guess'"),
        ({"profile": 3}, TypeError, "profile=3 is a int"),
        ({"min_total_batch_size": 8}, ValueError, "min_total_batch_size=8 has no meaning"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(given, error, says):
    with pytest.raises(error, match=re.escape(says)):
        TTACallback(**given)


def _refused(rank):
    return raised(partial(_run, rank, {}, {}, {"strategy": {"compression": "bf16"}}))


def test_gradients_that_have_no_density_are_refused_on_every_rank():
    assert all("compression='block_topk'" in text for text in run_ranks(_refused, 2))


def test_it_brings_a_noise_scale_only_where_it_needs_one():
    assert [type(c).__name__ for c in TTACallback(64).companions([])] == ["GNSCallback", "LookAheadCallback"]
    assert TTACallback().companions([LookAheadCallback()]) == []
    profile = ConvergenceProfile(32, 512, 0.5, ((0.9, 64, 0.1),))
    assert [type(c).__name__ for c in TTACallback(64, profile).companions([])] == ["LookAheadCallback"]
