"""The life of a compressor: models and optimizers that come and go, what a planner chooses, what ``auto`` finds."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.compressors import auto
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.compressors.residuals import ResidualPayout
from lightning_hetero.comm.gradients import requirements
from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.link.link_benchmark import BENCHMARK
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.settings import Automatic, parse_compression
from lightning_hetero.optim import SparseAdamW, SparseSGD
from tests.gradients.runs import ALL, Run, Way
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
    def __init__(self):
        super().__init__()
        self.dense, self.words = nn.Embedding(3, 2), nn.EmbeddingBag(5, 2, sparse=True)


@pytest.mark.parametrize(
    ("given", "hook", "backend", "says"),
    [
        ({"hierarchy": "nodes"}, None, "gloo", "hierarchy"),
        ({}, fp16_compress_hook, "gloo", "ddp_comm_hook"),
        ({}, None, "nccl", "nccl"),
        ({}, allreduce_hook, "gloo", None),
    ],
)
def test_sparse_gradients_are_refused_with_the_setting_that_cannot_send_them(given, hook, backend, says, monkeypatch):
    monkeypatch.setattr(requirements, "backend_of", lambda device: backend)
    module = Words()
    with pytest.raises(ValueError, match=rf"{says}.*words\.weight") if says else nullcontext():
        requirements.check_sparse_gradients(module, HeteroConfig(**given), hook)
    module.words.weight.requires_grad_(False)
    requirements.check_sparse_gradients(module, HeteroConfig(**given), hook)


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


# optimizers that take blocks


def _taken(rank):
    """Whether an optimizer gets blocks: by when it comes, by its kind, by what else it trains, by density."""
    run, found = Run(rank, Way(SPARSE, sparse=True)), {}
    found["late"] = run.compression.steps_of(run.optimizer) is not None
    run.compression.reset()
    optimizer = sgd(run.model)
    run.compression.bind_optimizers([optimizer])
    run.compression.attach(run.model)
    found["early"] = run.compression.steps_of(optimizer) is not None
    for density in (0.3, 0.31):
        run.compression.set_density(density)
        found[density] = run.compression.steps_of(optimizer) is not None
    run = Run(rank, Way(SPARSE))
    names = run.parameters
    kinds = {
        "dense": [sgd(run.model)],
        "ours": [SparseSGD(run.model.parameters(), lr=0.1)],
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
    return found


def test_an_optimizer_takes_blocks_if_all_can_and_they_are_few():
    for found in run_ranks(_taken, 2):
        assert found.pop("ours") > 2
        assert found == {"early": True, "late": True, 0.3: True, 0.31: False, "dense": 0, "one dense": 0}


def _accumulated(rank):
    run = Run(rank, Way(SPARSE, sparse=True))
    run.compression.attach(run.model)  # anew: the optimizer goes on with the new averager
    run.backward(0)
    sparse = [p.grad.is_sparse for p in run.parameters.values() if p.grad is not None]
    run.optimizer.zero_grad()
    with run.ddp.no_sync():
        run.loss(run.ddp, 1, bad=False).backward()
    local = [p.grad for p in run.parameters.values()]
    run.compression.after_backward()
    kept = all(p.grad is own for p, own in zip(run.parameters.values(), local, strict=True))
    run.close()
    return any(sparse), kept


def test_within_an_accumulation_window_an_optimizer_gets_no_blocks_of_an_earlier_step():
    assert run_ranks(_accumulated, 2) == [(True, True)] * 2


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
