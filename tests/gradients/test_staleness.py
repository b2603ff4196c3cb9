"""What is stale follows the measured link, the same on all ranks; what is awaited crosses it first; what comes next."""

import logging
import threading

import numpy as np
import pytest
import torch

from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.staleness.deadline_queue import TransferQueue
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.core.compression.objective import DensityChoice
from tests.gradients.runs import INPUT, Run, Way, flat
from tests.helpers import collected
from tests.ranks import run_ranks

Future = torch.futures.Future


def test_sums_of_a_checkpoint_have_to_fit_what_is_trained(caplog):
    weights = {"w": torch.zeros(8)}
    given = {"world_size": 2, "clock": HostClock()}
    state = {"delayed": ["gone", "w"], "sums": {"w": torch.ones(8), "gone": torch.ones(3)}, "rate": 7.0}
    for limit in (0, 1):
        averager = DenseStaleAverager(limit, weights, restored=state, **given)
        assert averager.stale_share == limit, "its sums are owed with and without staleness"
        assert {name: value.tolist() for name, value in averager.state_dict()["sums"].items()} == {"w": [1.0] * 8}
        assert "gone" in caplog.text
        averager.load_state_dict({})
        assert (averager.stale_share, averager.drain()) == (0.0, {}), "they belong to steps that are undone"
    for number in (3, 9):
        with pytest.raises(ValueError, match=r"\bw\b"):
            DenseStaleAverager(1, weights, restored={"sums": {"w": torch.ones(number)}}, **given)


# earliest deadline first


def test_a_transfer_that_cannot_begin_is_an_error_of_who_waits_for_it_and_others_go_on():
    queue, buffer, sync, done = TransferQueue(), torch.zeros(1), Future(), Future()
    done.set_result("there")
    queue.begin_step()
    queue.before(sync)
    failed, other = queue.add(buffer, lambda: 1 / 0), queue.add(buffer, lambda: done)
    sync.set_result(None)
    assert other.wait() == "there"
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
        failed.wait()


def _crossing(rank, priority):
    """Which transfers began while a synchronous sum was still under way, on a link that a test lets through by hand."""
    run, order, go = Run(rank, Way(stale={2: INPUT}, priority=priority)), [], threading.Event()
    plain = async_ops.async_all_reduce

    def slow(buffer, group=None):
        order.append(("begin", buffer.numel()))
        done, slowed = plain(buffer, group), Future()

        def over(future):
            go.wait(0.02)
            order.append(("end", buffer.numel()))
            slowed.set_result(future.value())

        done.then(over)
        return slowed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_ops, "async_all_reduce", slow)
        for step in range(6):
            run.step(step)
        run.late.drain()
    trace = [(step, bucket) for step, bucket, *_ in run.late.trace()]
    run.close()
    return order, trace


def test_the_order_of_transfers_is_by_deadline_on_all_ranks():
    """The input's gradients come last, and would share the link with those that the step waits for."""
    results = run_ranks(_crossing, 2, True)
    assert results[0][1] == results[1][1], "transfers of a step set out in one order"
    for order, _ in results:
        begun = [i for i, event in enumerate(order) if event == ("begin", 54)]
        assert len(begun) == 5
        for size in (8, 72):
            over = [i for i, event in enumerate(order) if event == ("end", size)]
            assert all(late > end for late, end in zip(begun[-3:], over[-3:], strict=True))


# what the optimizer will get


def _predicted(rank, ways):
    """Predictions of the next sums, as full tensors; once more after all ranks have seen the sums themselves."""
    found = {}
    for name, way in ways.items():
        run, rows = Run(rank, way), []
        run.late.keep_own()
        for step in range(4):
            run.step(step, bad=name == "blocks" and step == 3 and rank == 1)
            predictions = []
            for look in (False, True):
                if look:
                    _, left_out = run.late.wait_in_flight()
                    owed = run.owed()
                sums = run.late.predicted_sums([run.share], run.share)
                parts = None if sums is None else []
                for p in run.parameters.values() if sums is not None else ():
                    places, values = sums.get(p, (None, None))
                    full = torch.zeros(p.numel(), dtype=p.dtype)
                    if values is not None:
                        full[slice(None) if places is None else places] = values
                    parts.append(full)
                predictions.append(parts and flat(parts, run.parameters.values()))
            rows.append((*predictions, owed, left_out))
        found[name] = rows, run.seen["own"]
        run.close()
    return found


def test_sums_are_foretold_from_the_own_part_and_known_after_a_checkpoint():
    ways = {
        "dense": Way(stale={1: True}),
        "in part": Way(stale={1: INPUT}),
        "blocks": Way("block_topk(density=1.0, block=8, value_dtype='float32', warmup_steps=0)", stale={1: True}),
        "never": Way(stale={}),
    }
    for rank, found in enumerate(run_ranks(_predicted, 2, ways)):
        for name, (rows, own) in found.items():
            for step, (first, known, owed, left_out) in enumerate(rows):
                if step == 0 or name == "never":
                    assert first is None, "nothing is stale"
                    continue
                bad = name == "blocks" and step == 3
                assert left_out == bad
                expected = own[step] * min(1 / (0.75, 0.25)[rank], 2)
                if name == "in part":
                    expected = expected * (owed != 0)
                    assert owed.any()
                np.testing.assert_allclose(first, expected * (not (bad and rank == 1)), rtol=1e-5, atol=1e-7)
                np.testing.assert_allclose(known, owed, rtol=1e-6, atol=1e-9)


def _controlled(rank):
    """What a controller's choices change, and what is said of it."""
    run, lines = Run(rank, Way("block_topk(density=0.4, block=8, warmup_steps=0)", stale={})), collected()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    run.compression.measure_link()
    rates, found = run.compression.link().rates, []
    for density, least in ((0.4, 0.1), (0.2, 0.1), (0.2, 0.1), (0.2, 2.0), (0.2, 2.0), (0.2, 0.1)):
        lines.clear()
        run.compression.apply_choice(DensityChoice(density, 10, 1.0, 1.0, 0.5, least))
        run.backward(0)
        found.append((run.compression.blocks.density, len(lines)))
    run.compression.measure_link()
    found.append((run.compression.link().density, run.compression.link().rates == rates))
    run.close()
    return found


def test_a_controllers_choices_reach_messages_and_rank_0_says_what_changes():
    for rank, found in enumerate(run_ranks(_controlled, 2)):
        says = [0, 1, 0, 1, 0, 1] if rank == 0 else [0] * 6
        assert found == [*zip([0.4] + [0.2] * 5, says, strict=True), (0.2, True)]
