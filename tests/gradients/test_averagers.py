"""What every way of averaging owes its users, on ranks with unequal shares of a batch.

What was applied, is on its way or was not sent yet makes up all gradients; all ranks get the same; a resumed run goes
on as if it had never ended. A new compressor or kind of staleness is one more row of ``WAYS``.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_hetero.core.compression.settings import COMPRESSORS, SELECTORS
from tests.gradients.runs import ALL, INPUT, Crossed, Run, Way, flat
from tests.ranks import run_ranks

STEPS, CUT, BAD = 9, 4, 6
BLOCKS = "block_topk(density=0.4, block=8, warmup_steps=1)"
FEW = "block_topk(density=0.2, block=4, value_dtype='float32', warmup_steps=0)"
DENSE_STEPS = "block_topk(density=0.4, block=8, value_dtype='int8', warmup_steps=1, dense_every=6)"
QUICK = {"block_topk": BLOCKS, "powersgd": "powersgd(rank=1, start=2)"}
CLUSTERS = ((0, 1), (2,))
TURNS = {1: INPUT, 3: True, 4: ("0.weight",), 5: (), 6: True}
ON_OFF = {2: True, 4: False, 5: True}

WAYS = {
    "plain": Way(ranks=3),
    "plain, clusters": Way(clusters=CLUSTERS, ranks=3),
    "stale": Way(stale={0: True}),
    "stale, by turns": Way(stale=TURNS, priority=True),
    "stale, by turns, clusters": Way(stale=TURNS, clusters=CLUSTERS, ranks=3),
    "stale, from the first step on, one bucket": Way(stale={0: INPUT, 3: True, 6: INPUT}, cap=25),
    "stale, parts of buckets": Way(stale={2: ("0.weight", "4.bias"), 6: ()}, cap=25),
    **{name: Way(QUICK.get(name, name), close=0.2 if "16" in name else 2e-4) for name in COMPRESSORS},
    **{f"blocks, {name}": Way(f"{BLOCKS[:-1]}, selector='{name}')") for name in SELECTORS},
    "blocks, balanced": Way(f"{BLOCKS[:-1]}, scores='balanced')"),
    "blocks, int8, dense steps": Way(DENSE_STEPS),
    "blocks, clusters": Way(BLOCKS, cap=25, clusters=CLUSTERS, ranks=3),
    "blocks, loss scaler": Way(BLOCKS, scale=8.0),
    "blocks, sparse optimizer later, loss scaler": Way(FEW, sparse="later", scale=8.0),
    "blocks, densities": Way(BLOCKS, density={3: 0.1, 4: 1.0, 7: 0.4}),
    "blocks, stale, on and off, dense steps": Way(DENSE_STEPS, stale=ON_OFF),
    "blocks, stale, clusters": Way(BLOCKS, stale={1: True, 3: False, 4: True}, clusters=CLUSTERS, ranks=3),
    "blocks, stale, densities": Way(BLOCKS, stale={1: True, 6: False, 7: True}, density={3: 0.1, 4: 0.8, 6: 0.2}),
    "blocks, stale, sparse optimizer": Way(FEW, stale={1: True, 6: False}, sparse=True),
    "powersgd, three ranks": Way(QUICK["powersgd"], cap=25, ranks=3),
}
BLOCKWISE = [name for name, way in WAYS.items() if "block_topk" in str(way.compression)]


def _walk(rank, ways):
    """Each way from its beginning to its end, looked at in each step; and once more, saved and resumed in between."""
    found = {}
    for name, way in ways.items():
        whole, first = Run(rank, way), Run(rank, way)
        for step in range(STEPS):
            if step == CUT:
                whole.save()  # updates that a sparse optimizer has put off are made then
            whole.step(step, look=True)
        for step in range(CUT):
            first.step(step)
        saved = first.save()
        before, residuals = first.compression and first.compression.metrics(), first.left()
        torch.manual_seed(9)
        rest = Run(rank, way, saved=saved)
        if rest.late and CUT not in way.stale:
            assert rest.late.stale_share == first.late.stale_share
        if way.density:
            rest.compression.set_density(first.compression.blocks.density)
        for step in range(CUT, STEPS):
            rest.step(step)
        owed = whole.owed()
        drained = whole.late.drain() if whole.late else {}
        drained = flat([drained.get(one) for one in whole.parameters], whole.parameters.values())
        left = {"drained": drained, "owed at last": owed, "metrics": before, "left at the cut": residuals}
        again = not whole.late or whole.late.drain() == {}
        found[name] = (
            whole.result() | left | {"once": again}, first.result()["given"], rest.result()["given"], saved
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def walked():
    found = {}
    for ranks in (2, 3):
        ways = {name: way for name, way in WAYS.items() if way.ranks == ranks}
        results = run_ranks(_walk, ranks, ways)
        found |= {name: [result[name] for result in results] for name in ways}
    return found


def total(results, name):
    return sum(result[name] for result in results)


def close(name):
    return (
        {"rtol": WAYS[name].close, "atol": WAYS[name].close / 100}
        if WAYS[name].compression
        else {"rtol": 1e-12, "atol": 1e-15}
    )


@pytest.mark.parametrize("name", WAYS)
def test_applied_and_on_its_way_and_not_sent_make_up_all_gradients_at_every_step(name, walked):
    """Wherever a run is cut: ``sum_t given + owed + sum_i residual_i = sum_t sum_i r_i g_i``."""
    results = [result for result, *_ in walked[name]]
    one = results[0]
    everything = total(results, "own").cumsum(0)
    assert np.abs(everything[-1]).max() > 0.05
    np.testing.assert_allclose(one["given"].cumsum(0) + one["owed"] + total(results, "left"), everything, **close(name))
    for other in results:
        for same in ("given", "owed", "weights", "exact", "skipped", "drained"):
            np.testing.assert_array_equal(other[same], one[same], err_msg=same)
        np.testing.assert_array_equal(other["drained"], other["owed at last"], err_msg="the end of a training")
        assert other["once"], "a sum was handed out twice"
        assert not other["skipped"].any()


@pytest.mark.parametrize("name", WAYS)
def test_a_resumed_run_goes_on_identically(name, walked):
    """Nobody has looked at it before it was saved: to look waits for messages, and changes nothing else."""
    way = WAYS[name]
    for whole, first, rest, _ in walked[name]:
        both = np.concatenate([first, rest])
        # DDP lays out its buckets anew after a first step, and PowerSGD and a ring of three ranks round by that
        near = {"rtol": 0, "atol": 1e-6 if way.compression else 1e-15}
        if "powersgd" in name or way.sparse or way.ranks > 2:
            np.testing.assert_allclose(both, whole["given"], **near)
        else:
            np.testing.assert_array_equal(both, whole["given"])


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if not way.compression])
def test_dense_sums_are_the_weighted_mean_a_step_later_where_they_are_stale(name, walked):
    """By hand, parameter by parameter: what is stale is owed, and what is owed is applied in the next step."""
    results = [result for result, *_ in walked[name]]
    owed, stale, sizes = {}, (), [p.numel() for p in Crossed().parameters()]
    for step, sums in enumerate(total(results, "own")):
        stale = (WAYS[name].stale or {}).get(step, stale)
        stale = ALL if stale is True else stale
        mixed, expected = not set(owed) <= set(stale), []
        for parameter, own in zip(ALL, np.split(sums, np.cumsum(sizes)[:-1]), strict=True):
            before = owed.pop(parameter, np.zeros_like(own))
            if parameter in stale:
                owed[parameter] = own
            expected.append(before if parameter in stale else before + own)
        for result in results:
            np.testing.assert_allclose(result["given"][step], np.concatenate(expected), **close(name))
            assert result["kind"][step] == (None if WAYS[name].stale is None else None if mixed else set(stale))


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blocks_are_applied_at_once_or_a_step_later(name, walked):
    way = WAYS[name]
    (result, *_), *_ = walked[name]
    warmup, every = int("warmup_steps=1" in way.compression), 6 if "every" in way.compression else None
    stale = owes = False
    for step in range(STEPS):
        stale = (way.stale or {}).get(step, stale)
        dense = step < warmup or (every is not None and step % every == 0)
        assert result["exact"][step] == (dense and not owes), "with the sum of another step, it is that of none"
        assert result["owed"][step].any() == (stale and not dense)
        if stale and not dense:
            np.testing.assert_array_equal(result["given"][step], result["owed"][step - 1] * owes)
        elif not (owes or way.density):
            assert (np.count_nonzero(result["given"][step]) == 152) == dense
        if way.stale is not None:
            assert result["kind"][step] == (set(ALL) if stale and not dense else set())
        owes = stale and not dense


def test_traffic_of_blocks_grows_with_what_is_sent_and_is_that_of_leaders(walked):
    sent = {name: [result["metrics"]["hetero/bytes_sent"] for result, *_ in walked[name]] for name in BLOCKWISE}
    one = sent["blocks, clusters"]
    assert one[0] == one[2] > one[1] == 0.0
    assert sent["blocks, densities"] < sent["block_topk"], "a tenth of the blocks in one step"
    plain = walked["block_topk"][0][0]
    shares = plain["metrics"]["hetero/compression_density"], (1.0 + (CUT - 1) * 10 / 21) / CUT
    assert shares[0] == pytest.approx(shares[1]), "five blocks of each of two ranks, of 21"
    assert plain["metrics"]["hetero/encode_time"] > 0


# other numbers of ranks


def _go_on(rank, cases):
    """What a rank has not sent after it has loaded the state of others; and what one more dense sum then holds."""
    found = {}
    for name, (way, saved) in cases.items():
        run = Run(rank, way, saved=saved)
        left, again = run.left(), run.save()["compression"]
        run.step(CUT)
        paid = run.hook.residual_payout is None
        found[name] = left, again, run.result(), paid, run.save()["compression"]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_not_sent_goes_on_to_other_numbers_of_ranks(ranks, walked):
    """To whoever speaks for somebody, in equal shares; where one rank is left, into its next sum."""
    cases, before = {}, {}
    for name in ("blocks, clusters", "block_topk", "powersgd", "powersgd, three ranks"):
        now = replace(WAYS[name], clusters=None, ranks=ranks)
        cases[name], before[name] = (now, walked[name][0][3]), sum(one[0]["left at the cut"] for one in walked[name])
    results = run_ranks(_go_on, ranks, cases)
    for name, expected in before.items():
        assert np.abs(expected).max() > 0
        mine = [result[name] for result in results]
        if ranks > 1:
            np.testing.assert_allclose(sum(left for left, *_ in mine), expected, rtol=1e-5, atol=1e-7)
            same = WAYS[name].ranks == ranks and WAYS[name].clusters is None
            parts = [one[0]["left at the cut"] for one in walked[name]] if same else [expected / ranks] * ranks
            for (left, *_), part in zip(mine, parts, strict=True):
                np.testing.assert_allclose(left, part, rtol=1e-5, atol=1e-7)
            continue
        ((_, again, result, paid, after),) = mine
        saved = sum(flat([one["residuals"].get(n) for n in ALL], Crossed().parameters()) for one in again["ranks"])
        np.testing.assert_allclose(saved, expected, rtol=1e-5, atol=1e-7, err_msg="until it is added, it is saved")
        np.testing.assert_allclose(result["given"][0], result["own"][0] + expected, rtol=1e-5, atol=1e-6)
        assert paid
        assert after == {}, "it would be added twice"


# gradients that are not finite


FINITE = {
    name: way
    for name, way in WAYS.items()
    if way.compression and not way.scale and "16" not in name and name != "auto" and not way.density
}
"""Ways that leave out a step whose gradient is not finite, by themselves."""


def _left_out(rank, ways):
    """Trainings in which a gradient is not finite once: of blocks, in the last bucket alone."""
    found = {}
    for name, way in ways.items():
        run, in_part = Run(rank, way), name in BLOCKWISE
        if in_part:
            run.model.get_submodule("0").weight.register_hook(
                lambda g, run=run: g * (float("nan") if rank == 1 and len(run.seen["own"]) == BAD else 1.0)
            )
        for step in range(STEPS):
            run.step(step, bad=not in_part and step == BAD and rank == 1, look=True)
        dropped = run.compression.averager.dropped.count
        found[name] = run.result() | {"dropped": dropped}
    return found


@pytest.fixture(scope="module")
def left_out():
    found = {}
    for ranks in (2, 3):
        ways = {name: way for name, way in FINITE.items() if way.ranks == ranks}
        results = run_ranks(_left_out, ranks, ways)
        found |= {name: [result[name] for result in results] for name in ways}
    return found


@pytest.mark.parametrize("name", FINITE)
def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks_and_nothing_else_is_lost(name, left_out):
    """Of stale messages the others learn a step later, when only the gradient of the rank itself is gone."""
    results, way = left_out[name], FINITE[name]
    dense = "every" in way.compression
    stale = way.stale is not None and not dense and (way.stale.get(6, True))
    for result in results:
        at = BAD + 1 if stale else BAD
        assert np.flatnonzero(result["skipped"]).tolist() == [at]
        assert not result["given"][at].any() or (way.stale is not None and not stale)
        assert np.isfinite(result["weights"]).all()
        assert result["dropped"] == 1
        np.testing.assert_array_equal(result["given"], results[0]["given"])
        result["own"] = result["own"].copy()
    for rank, result in enumerate(results):
        if rank == 1 or (way.clusters == CLUSTERS and rank == 0) or not stale:
            result["own"][BAD] = 0.0
    everything = total(results, "own").cumsum(0)
    found = results[0]["given"].cumsum(0) + results[0]["owed"] + total(results, "left")
    np.testing.assert_allclose(found, everything, **close(name))


def _deferred(rank):
    found = []
    for deferred in (False, True):
        run = Run(rank, Way(QUICK["powersgd"]))
        run.compression.averager.deferred = deferred
        for step in range(STEPS):
            run.step(step, bad=step == BAD and rank == 1, look=step != BAD)
        found.append(run.result() | {"dropped": run.compression.averager.dropped.count})
    return found


def test_low_rank_products_are_left_out_by_a_device_as_by_the_host():
    """Where nothing is read: the state is chosen by a number on the device when it is needed next."""
    for host, device in run_ranks(_deferred, 2):
        assert host["dropped"] == device["dropped"] == 1
        for name in ("given", "left", "skipped", "weights"):
            np.testing.assert_array_equal(device[name], host[name], err_msg=name)
