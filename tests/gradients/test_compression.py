"""The life of a compressor: models and optimizers that come and go, what a planner chooses, what ``auto`` finds."""

import gc
import logging
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.compressors import auto
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.compressors.residuals import ResidualPayout
from lightning_hetero.comm.gradients import requirements
from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.requirements import check_rescaled, check_sparse_gradients
from lightning_hetero.comm.link.link_benchmark import BENCHMARK
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.auto import Computing, LinkMeasurement, choose_density
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.compression.settings import Automatic, parse_compression
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.optim import SparseAdamW, SparseSGD
from tests.gradients.runs import ALL, Crossed, Run, Way, flat
from tests.helpers import collected
from tests.ranks import run_ranks

BLOCKS = "block_topk(density=0.4, block=4, warmup_steps=1)"
SPARSE = "block_topk(density=0.2, block=4, warmup_steps=0)"


def alone(settings=BLOCKS, **given):
    """The compression of a single worker."""
    state = HookState(StepTimer(HostClock()), 1)
    return GradientCompression(parse_compression(settings), ControlPlane(0, 1), state, **given), state


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=0.1, **more)


# one worker


def test_there_is_none_without_a_setting_and_one_worker_sends_nothing():
    compression, state = alone()
    assert GradientCompression.of(HeteroConfig(), ControlPlane(0, 1), state) is None
    made = GradientCompression.of(HeteroConfig(compression=BLOCKS), ControlPlane(0, 1), state)
    assert (made.settings, made.sparse) == (parse_compression(BLOCKS), False)
    compression, state = alone(sparse=True)
    model = Crossed()
    compression.bind_optimizers([optimizer := sgd(model)])
    compression.attach(model)
    assert (compression.averager, compression.blocks, compression.steps_of(optimizer)) == (None, None, None)
    assert isinstance(state.averager, DDPMean)
    assert (compression.metrics(), compression.link(), compression.pack().size) == ({}, None, 0)
    for nothing in (lambda: compression.set_density(0.5), compression.after_backward, compression.end_step):
        nothing()
    compression.close()


def test_one_worker_pays_out_what_several_had_not_sent_into_one_sum_and_saves_it_until_then():
    compression, state = alone()
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    unsent = {"kind": "BlockExchange", "residuals": {"weight": torch.ones(3), "bias": torch.zeros(1)}, "extra": {}}
    compression.load_state_dict({"ranks": [unsent, unsent], "clusters": ((0,), (1,))})
    assert state.residual_payout is None
    compression.attach(model)
    assert state.residual_payout is not None
    saved = compression.state_dict()["ranks"][0]["residuals"]
    assert {name: value.tolist() for name, value in saved.items()} == {"weight": [2.0] * 3}
    compression.load_state_dict({})
    assert state.residual_payout is None
    with pytest.raises(ValueError, match="compression"):
        compression.attach(other)
    compression.reset()
    compression.attach(other)


class Bucket:
    """Gradients of parameters, as DDP hands them to a hook."""

    def __init__(self, *pairs):
        self.pairs = pairs

    def parameters(self):
        return [p for p, _ in self.pairs]

    def gradients(self):
        return [g for _, g in self.pairs]


def test_each_residual_is_added_once_in_the_order_of_memory_and_waits_for_a_gradient(caplog):
    """``mean_i (g_i + W r_i) = mean_i g_i + sum_i r_i``; under a loss scaler, which may skip that step, it waits."""
    caplog.set_level(logging.INFO, "lightning_hetero")
    module = nn.ParameterDict({"a": torch.zeros(3, 2).t(), "b": torch.zeros(2)})
    a, b, stranger = *module.values(), nn.Parameter(torch.zeros(2))
    state = {"residuals": {"a": torch.tensor([10.0, 20, 30, 40, 50, 60]), "b": torch.ones(2)}}
    assert ResidualPayout.of(state, module, 2, scaled=True) is None
    payout = ResidualPayout.of(state, module, 2, scaled=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    used, unused, other = torch.arange(1.0, 7.0).view(3, 2).t(), torch.zeros(2), torch.tensor([3.0, 3.0])
    assert not payout(Bucket((a, used), (b, unused), (stranger, other)))
    again = torch.tensor([1.0, 0.0])
    assert payout(Bucket((a, used), (b, again))), "nothing is left"
    assert used.t().reshape(-1).tolist() == [21, 42, 63, 84, 105, 126]
    assert [one.tolist() for one in (unused, other, again)] == [[0, 0], [3, 3], [3, 2]]


class Words(nn.Module):
    def __init__(self, kind=nn.Embedding, **given):
        super().__init__()
        self.dense, self.words = nn.Embedding(3, 2), kind(5, 2, **{"sparse": True, **given})


REFUSED = {
    "compression": (HeteroConfig(compression="block_topk"), None, {}, "words.weight"),
    "hierarchy": (HeteroConfig(hierarchy="nodes"), None, {}, "words.weight"),
    "staleness": (HeteroConfig(staleness=1), None, {}, "words.weight"),
    "ddp_comm_hook": (HeteroConfig(), fp16_compress_hook, {}, "words.weight"),
    "nccl": (HeteroConfig(), None, {}, "words.weight"),
    "gloo": (HeteroConfig(), None, {}, None),
    "a hook that sums": (HeteroConfig(), allreduce_hook, {}, None),
    "a hook of the user's": (HeteroConfig(), lambda state, bucket: None, {}, None),
    "dense": (HeteroConfig(compression="block_topk"), None, {"sparse": False}, None),
}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("name", REFUSED)
def test_sparse_gradients_are_refused_with_the_setting_that_cannot_send_them(name, kind, monkeypatch):
    monkeypatch.setattr(requirements, "backend_of", lambda device: "nccl" if name == "nccl" else "gloo")
    config, hook, given, weight = REFUSED[name]
    module = Words(kind, **given)
    if weight is None:
        check_sparse_gradients(module, config, hook)
    else:
        for text in (name, weight):
            with pytest.raises(ValueError, match=text):
                check_sparse_gradients(module, config, hook)
        module.words.weight.requires_grad_(False)
        check_sparse_gradients(module, config, hook)
        with pytest.raises(ValueError, match=name):
            check_sparse_gradients(kind(3, 2, sparse=True), config, hook)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_forward_pass_rescales_are_refused(kind):
    """By the rank's own batch, so that ranks would train different models."""
    module = Words(kind, max_norm=1.5, sparse=False)
    with pytest.raises(ValueError, match=r"words.*max_norm"):
        check_rescaled(module)
    with pytest.raises(ValueError, match=kind.__name__):
        check_rescaled(module.words)
    module.words.weight.requires_grad_(False)
    check_rescaled(module)


@pytest.mark.parametrize(
    "odd", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()], ids=["complex", "sparse"]
)
def test_parameters_that_cannot_be_compressed_are_refused_by_name(odd):
    model = nn.Linear(2, 2)
    model.small = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    alone()[0].attach(model)
    model.odd = nn.Parameter(odd)
    with pytest.raises(ValueError, match="odd"):
        alone()[0].attach(model)
    model.odd.requires_grad_(False)
    alone()[0].attach(model)


def test_optimizers_of_a_model_that_is_gone_are_forgotten_with_it():
    compression, _ = alone(sparse=True)
    first = Crossed()
    compression.attach(first)
    compression.bind_optimizers([sgd(first)])
    compression.attach(first)
    with pytest.raises(ValueError, match=r"sparse_optimizer.* 2"):
        compression.bind_optimizers([sgd(first)], more=True)
    del first
    gc.collect()
    compression.attach(second := Crossed())
    compression.bind_optimizers([sgd(second)], more=True)


# optimizers that take blocks


def _taken(rank):
    """Whether an optimizer gets blocks: by when it comes, by its kind, by what else it trains, by density."""
    found = {}
    for early in (True, False):
        run = Run(rank, Way(SPARSE, sparse=True))
        run.compression.reset()
        optimizer = sgd(run.model)
        if early:
            run.compression.bind_optimizers([optimizer])
        run.compression.attach(run.model)
        if not early:
            run.compression.bind_optimizers([optimizer])
        found["early" if early else "late"] = run.compression.steps_of(optimizer) is not None
    for density in (0.3, 0.31, 1.0):
        run.compression.set_density(density)
        found[density] = run.compression.steps_of(optimizer) is not None
    run.compression.reset()
    run.compression.attach(Crossed())
    found["of a model before"] = run.compression.steps_of(optimizer) is not None
    run = Run(rank, Way(SPARSE))
    names = run.parameters
    kinds = {
        "dense": [sgd(run.model)],
        "ours": [SparseSGD(run.model.parameters(), lr=0.1)],
        "ours, two": [SparseAdamW([names[n] for n in ALL[:2]], lr=0.1), SparseSGD([names[n] for n in ALL[2:]], lr=0.1)],
        "one dense": [
            SparseAdamW([names[n] for n in ALL[:2]], lr=0.1),
            torch.optim.SGD([names[n] for n in ALL[2:]], 0.1),
        ],
    }
    for name, optimizers in kinds.items():
        run.compression.bind_optimizers(optimizers)
        run.backward(0)
        found[name] = [p.grad is not None and p.grad.is_sparse for p in names.values()].count(True)
        run.model.zero_grad()
        run.backward(1)
    run = Run(rank, Way(SPARSE, sparse=True))
    with pytest.raises(ValueError, match=r"sparse_optimizer.*\(64,\)"):
        run.compression.bind_optimizers(
            [torch.optim.SGD([*run.parameters.values(), nn.Parameter(torch.ones(64))], lr=0.1)]
        )
    tiny = Run(rank, Way("block_topk(density=0.01, block=16, warmup_steps=0)", sparse=True), model=nn.Linear(6, 1))
    found["tiny"] = tiny.compression.steps_of(tiny.optimizer) is not None
    return found


def test_an_optimizer_takes_blocks_if_all_can_and_they_are_few():
    """Of a tiny model one block of each rank is most of it."""
    for found in run_ranks(_taken, 2):
        assert found.pop("ours") > 2 < found.pop("ours, two")
        expected = {"early": True, "late": True, 0.3: True, 0.31: False, 1.0: False, "of a model before": False}
        assert found == {**expected, "dense": 0, "one dense": 0, "tiny": False}


def _clipped(rank):
    run = Run(rank, Way(SPARSE, sparse=True))
    run.compression.attach(run.model)  # anew: the optimizer goes on with the new averager
    run.backward(0)
    sparse = [p for p in run.parameters.values() if p.grad is not None and p.grad.is_sparse]
    targets = run.compression.clip_targets(list(run.parameters.values()))
    norm = flat([p.grad for p in run.parameters.values()], run.parameters.values())
    clipped = nn.utils.clip_grad_norm_(targets, 0.5 * float(np.linalg.norm(norm)))
    after = flat([p.grad for p in run.parameters.values()], run.parameters.values())
    dense = nn.Parameter(torch.ones(3))
    dense.grad = torch.ones(3)
    same = run.compression.clip_targets([dense])[0] is dense
    run.optimizer.zero_grad()
    with run.ddp.no_sync():
        run.loss(run.ddp, 1, bad=False).backward()
    local = [p.grad for p in run.parameters.values()]
    run.compression.after_backward()
    kept = all(p.grad is own for p, own in zip(run.parameters.values(), local, strict=True))
    run.close()
    return len(sparse), float(clipped), np.linalg.norm(norm), np.linalg.norm(after), same, kept


def test_norms_are_clipped_over_the_sent_blocks():
    """And within an accumulation window an optimizer gets no blocks of an earlier step."""
    for sparse, seen, norm, after, same, kept in run_ranks(_clipped, 2):
        assert sparse > 2
        assert (seen, after) == (pytest.approx(norm, rel=1e-5), pytest.approx(norm / 2, rel=1e-4))
        assert same
        assert kept, "the local gradient was replaced by that of the step before"


def _untrained(rank):
    run, lines = Run(rank, Way(BLOCKS)), collected()
    run.compression.bind_optimizers([torch.optim.SGD([p for n, p in run.parameters.items() if "4" not in n], lr=0.1)])
    for step in range(2):
        run.step(step)
    run.close()
    return lines


def test_a_gradient_that_no_optimizer_takes_is_named_once():
    first, second = run_ranks(_untrained, 2)
    assert ["4.weight and 1 other" in line for line in first] == [True]
    assert second == []


def _frozen(rank):
    """Residuals of a run of which a layer is frozen for a while, through a checkpoint."""
    run = Run(rank, Way(BLOCKS))
    for step in range(3):
        run.step(step)
    before, paid = run.left(), []
    run.hook.pay_out(lambda bucket: True)
    run.compression.attach(run.model)
    same = run.left(), run.compression.averager.step, run.hook.residual_payout
    run.model.get_submodule("4").requires_grad_(False)
    run.compression.attach(run.model)
    paid.append(run.left())
    run.model.get_submodule("4").requires_grad_(True)
    run.compression.load_state_dict(run.save()["compression"])
    run.compression.attach(run.model)
    paid.append(run.left())
    run.compression.load_state_dict({})
    return before, same, paid, run.left()


def test_a_model_that_is_attached_anew_keeps_what_was_not_sent_also_of_what_is_frozen():
    for before, (same, step, payout), later, none in run_ranks(_frozen, 2):
        assert before.any()
        for after in (same, *later):
            np.testing.assert_array_equal(after, before)
        assert (step, payout) == (3, None), "residuals would go into a dense sum and into a message"
        assert not none.any(), "an empty state sets them to 0"


def _chosen(rank):
    """What a message costs by the density that a planner chooses, and what is reported of it."""
    run, found = Run(rank, Way(BLOCKS)), []
    run.step(0)
    run.compression.metrics()
    for choice in (None, DensityChoice(1.0, 10, 7.0, 0.1, 0.01, 0.001), DensityChoice(0.05, 10, 5.0, 0.1, 0.01, 0.001)):
        run.compression.apply_choice(choice, None)
        for step in range(1, 5):
            run.step(step)
        everyone = run.control.gather(run.compression.pack())
        run.compression.unpack(everyone, run.control)
        seen, link = run.compression.metrics(), run.compression.link()
        found.append(
            (
                link.density,
                link.message_size.bytes(link.density),
                seen["hetero/bytes_sent"],
                seen.get("hetero/time_to_accuracy"),
            )
        )
    run.compression.set_density(None)
    kept = run.compression.blocks.density
    run.compression.reset()
    gone = run.compression.averager, run.compression.link(), run.compression.metrics(), run.compression.pack().size
    run.close()
    return found, kept, gone


def test_a_choice_of_density_changes_the_next_message():
    for found, kept, gone in run_ranks(_chosen, 2):
        densities, sizes, sent, objectives = zip(*found, strict=True)
        assert densities == (0.4, 1.0, 0.05)
        assert sizes == sent, "its size is what is sent"
        assert sent[2] < sent[0] < sent[1]
        assert objectives == (None, 7.0, 5.0)
        assert kept == 0.05
        assert gone == (None, None, {}, 0)


class Malformed(DDPMean):
    """Learns of a malformed message only when it is asked for the outcome of its last step."""

    def settle(self):
        raise ValueError("a message of the last step was malformed")


def test_the_end_of_a_run_reports_the_outcome_of_its_last_step():
    compression, _ = alone()
    compression.averager = Malformed(1)
    with pytest.raises(ValueError, match="malformed"):
        compression.close()
    with pytest.raises(ValueError, match="malformed"):
        compression.take_report()


# auto


SLOW, FAST = (LinkMeasurement(1e-3, rate, 1e-3, 2, 1_000_000, 4) for rate in (1e6, 1e12))
HIDDEN = LinkMeasurement(1e-5, 4e6 / 0.02, 1e-3, 2, 1_000_000, 4)
"""A link on which a step of computing hides a dense sum."""
SECONDS = {"local_batch_sizes": 8.0, "step_time": 0.05, "forward": 0.01, "backward": 0.02, "first_bucket": 0.005}


class Timer:
    """Steps that this rank has timed."""

    def __init__(self):
        self.rows, self.synced_steps, self.interrupts, self.clock = deque(), 0, 0, HostClock()

    def step(self, timed):
        self.synced_steps += 1
        if timed:
            values = [SECONDS.get(name, 0.001) for name in StepObservations.FIELDS]
            self.rows.append(np.array([float(self.synced_steps), *values, 0.03]))

    def interrupt(self):
        self.interrupts += 1


def _auto(rank, cases):
    """Step at which each run has chosen, and what it sends from then on."""
    dist.init_process_group("gloo")
    found, lines = {}, collected()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    for name, (link, first_timed, late) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto, "measure", lambda *_, link=link: link)
            timer, model, control = Timer(), Crossed(), ControlPlane(rank, 2)
            state = HookState(timer, 2)
            compression = GradientCompression(parse_compression("auto"), control, state)
            compression.attach(model)
            if late:
                state.set_staleness(SimpleNamespace(limit=1, for_dense_sums=lambda topology: None, stale_share=0.0))
            averager = compression.averager
            undecided = averager.undecided, averager.sends_blocks
            averager.load_residuals({"4.bias": torch.ones(1)})
            lines.clear()
            while compression.averager is averager and averager.undecided and timer.synced_steps < 50:
                timer.step(timer.synced_steps + 1 >= first_timed[rank])
                compression.end_step()
            compression.end_step()
            sends = compression.averager and compression.averager.density
            plain = type(state.averager) is DDPMean, state.residual_payout is not None
            found[name] = undecided, timer.synced_steps, timer.interrupts, sends, plain, list(lines)
            control.close()
    return found


def test_auto_chooses_once_from_the_measured_link_and_steps_that_all_ranks_have_timed():
    """Nobody is asked before the eighth step; three steps are enough; without any the link alone decides in the end."""
    cases = {
        "slow": (SLOW, (6, 6), False),
        "fast": (FAST, (6, 6), False),
        "late": (SLOW, (1, 10), False),
        "never": (SLOW, (99, 99), False),
        "hidden": (HIDDEN, (6, 6), False),
        "hidden, stale": (HIDDEN, (6, 6), True),
    }
    for rank, found in enumerate(run_ranks(_auto, 2, cases)):
        assert {name: seen[1:3] for name, seen in found.items()} == {
            **dict.fromkeys(("slow", "fast", "hidden", "hidden, stale"), (8, 1)),
            **{"late": (12, 5), "never": (32, 25)},
        }
        sends = {name: seen[3] for name, seen in found.items()}
        assert sends["fast"] is sends["hidden, stale"] is None
        assert sends["hidden"] is not None
        settings = Automatic()
        assert sends["never"] == choose_density(SLOW, settings.densities, "bfloat16", Computing()).density
        assert {sends["slow"], sends["late"]} <= set(settings.densities)
        for undecided, _, _, density, (plain, paid), lines in found.values():
            assert undecided == (True, False)
            assert (plain, paid) == (density is None,) * 2, "what was not sent goes into the next dense sum"
            assert sum("compression='auto'" in line for line in lines) == (rank == 0)


def test_the_link_is_measured_by_the_slowest_rank():
    parameters, topology = {"w": torch.zeros(3)}, SimpleNamespace(size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "exchange_seconds", lambda size, topology, device: 1e-6 * size)
        patch.setattr(auto, "encode_seconds", lambda *_: 0.25)
        control = SimpleNamespace(gather=lambda mine: np.stack([mine, [3.0, 2.0, 4.0] * mine]))
        found = auto.measure(parameters, control, topology, Automatic())
    small, large = BENCHMARK.latency_bytes, BENCHMARK.probe_bytes
    assert found.latency == pytest.approx(3e-6 * small)
    assert found.rate == pytest.approx(large / (2e-6 * (large - small)))
    assert found.encode == 1.0
