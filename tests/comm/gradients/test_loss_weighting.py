"""The weight of a loss: ``W b_i / B``, counts of a batch, sums, and ranks that have nothing to add."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.config import HeteroConfig
from tests.helpers import run_ranks

CPU = torch.device("cpu")


def weight(own, total, workers=2, **config):
    weighting = LossWeighting(HeteroConfig(**config), workers, CPU)
    weighting.begin(own, total, None)
    return float(weighting.scale(torch.tensor(1.0, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("own", "total", "workers", "expected"), [(6, 8, 2, 1.5), (2, 8, 2, 0.5), (0, 8, 2, 0.0), (8, 8, 1, 1.0)]
)
def test_weight_of_a_mean(own, total, workers, expected):
    assert weight(own, total, workers) == expected


@pytest.mark.parametrize(("own", "expected"), [(6, 1.0), (2, 1.0), (0, 0.0)])
def test_weight_of_a_sum(own, expected):
    assert weight(own, 8, loss_reduction="sum") == expected


@pytest.mark.parametrize("sizes", [(6, 2), (4, 4), (0, 5), (7, 2, 1)], ids=str)
def test_weights_average_to_one(sizes):
    """So that DDP's mean over ranks is the mean over samples."""
    assert np.mean([weight(b, sum(sizes), len(sizes)) for b in sizes]) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("config", [{}, {"loss_reduction": "sum"}])
def test_weight_one_is_the_very_same_tensor(config):
    weighting = LossWeighting(HeteroConfig(**config), 2, CPU)
    weighting.begin(4, 8, None)
    loss = torch.tensor(2.0, requires_grad=True)
    assert weighting.scale(loss) is loss


def test_gradient_is_scaled_and_the_loss_itself_is_not():
    weighting = LossWeighting(HeteroConfig(), 2, CPU)
    weighting.begin(6, 8, None)
    x = torch.tensor(3.0, requires_grad=True)
    loss = x.square()
    weighting.scale(loss).backward()
    assert (float(loss.detach()), float(x.grad)) == (9.0, 9.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"weight_fn": len}])
def test_precision_of_the_loss_is_kept(dtype, config):
    weighting = LossWeighting(HeteroConfig(**config), 1, CPU)
    weighting.begin(3, 6, [0, 0, 0])
    assert weighting.scale(torch.tensor(1.0, dtype=dtype)).dtype == dtype


def test_several_losses_of_one_batch_have_one_weight():
    """As with two optimizers, each with a backward pass of its own; counts are added up once."""
    calls = []
    weighting = LossWeighting(HeteroConfig(weight_fn=lambda batch: calls.append(batch) or 4), 1, CPU)
    weighting.begin(3, 3, "batch")
    assert [float(weighting.scale(torch.tensor(x))) for x in (1.0, 2.0)] == [1.0, 2.0]
    assert calls == ["batch"]


def _counts(rank, counts, own):
    dist.init_process_group("gloo")
    weighting = LossWeighting(HeteroConfig(weight_fn=lambda batch: batch["n"]), len(counts), CPU)
    weights = []
    for count in counts[rank]:
        weighting.begin(own[rank], sum(own), {"n": count})
        assert weighting.waits
        weights.append(float(weighting.scale(torch.tensor(1.0, dtype=torch.float64))))
        assert not weighting.waits, "counts are there"
    dist.destroy_process_group()
    return weights


def test_counts_take_the_place_of_sizes():
    """10 and 30 tokens, then 5 and 0, then none at all, although both ranks have 2 samples."""
    counts = [[10, torch.tensor(5), 0], [torch.tensor([30.0]), 0, 0]]
    assert run_ranks(_counts, 2, counts, (2, 2)) == [[0.5, 2.0, 0.0], [1.5, 0.0, 0.0]]


def test_a_count_that_is_no_number_is_no_weight_of_0():
    """Training would stand still without a word."""
    nan = torch.tensor(float("nan"))  # on a GPU, to look at it would have to wait
    assert str(run_ranks(_counts, 2, [[nan], [30]], (2, 2))) == "[[nan], [nan]]"


def test_rank_without_a_share_is_not_counted():
    """It runs some samples with weight 0, whatever their count."""
    assert run_ranks(_counts, 2, [[10], [30]], (2, 0)) == [[2.0], [0.0]]


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (None, TypeError),
        ("3", TypeError),
        (torch.ones(2), TypeError),
        ([3], TypeError),
        (-1, ValueError),
        (float("nan"), ValueError),
    ],
)
def test_a_count_that_is_none_is_refused_by_name(count, error):
    weighting = LossWeighting(HeteroConfig(weight_fn=lambda batch: count), world_size=1, device=torch.device("cpu"))
    with pytest.raises(error, match="weight_fn returned"):
        weighting.begin(own=3, total=8, batch=None)


def test_a_batch_in_which_nothing_counts_adds_nothing():
    """The mean over its tokens is nan; torch's own losses have a gradient of 0 there."""
    weighting = LossWeighting(HeteroConfig(weight_fn=lambda batch: (batch != -100).sum()), 1, CPU)
    labels, outputs = torch.full((4,), -100), torch.randn(4, 7, requires_grad=True)
    weighting.begin(4, 4, labels)
    weighting.scale(torch.nn.functional.cross_entropy(outputs, labels)).backward()
    assert not outputs.grad.any()


COPIES = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class NoCopies(TorchDispatchMode):
    """Refuses what copies from the host to a device, for which a stream waits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in COPIES and any(isinstance(arg, torch.Tensor) and arg.device.type == "cpu" for arg in args):
            raise AssertionError(f"{func} from the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [5, 5.0, np.int64(5), torch.tensor(5), torch.tensor([5.0]), "there"], ids=repr)
def test_a_count_gets_to_its_device_without_a_copy(monkeypatch, count):
    """The meta device stands for one; what it computes has no value, so that filling it is watched as well."""
    meta, filled, full = torch.device("meta"), [], torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, **kw: filled.append(value) or full(size, value, **kw))
    given = torch.ones((1,), dtype=torch.int64, device=meta) if isinstance(count, str) else count
    weighting = LossWeighting(HeteroConfig(weight_fn=lambda batch: given), 1, meta)
    with NoCopies():
        weighting.begin(3, 3, "batch")
        loss = weighting.scale(torch.ones((), device=meta))
    assert loss.device == meta
    assert filled == ([] if isinstance(count, str) else [5.0])


def test_batch_whose_loss_never_came_does_not_disturb_the_next():
    weighting = LossWeighting(HeteroConfig(weight_fn=len), 1, CPU)
    weighting.begin(2, 2, [1, 1])
    weighting.begin(2, 2, [1, 1])
    assert float(weighting.scale(torch.tensor(3.0))) == 3.0


def test_a_loss_after_a_reset_belongs_to_no_batch():
    """As of a loop that goes on without the loader: the last batch has nothing to do with it."""
    weighting = LossWeighting(HeteroConfig(), 2, torch.device("cpu"))
    weighting.begin(6, 8, None, (6, 2))
    loss = torch.tensor(1.0)
    assert weighting.scale(loss) == 1.5
    weighting.reset()
    assert weighting.scale(loss) is loss


def test_counts_of_a_front_end():
    """Where the settings name none: ``None`` stands for samples, and a batch that is selected has its own weight."""
    weighting = LossWeighting(HeteroConfig(), 1, CPU)
    weighting.hold_several()
    weighting.count_with(lambda batch: None if batch is other else len(batch))
    batch, other = torch.ones(3, 2), torch.ones(5, 2)
    weighting.begin(4, 4, batch)
    weighting.begin(0, 4, other)
    found = weighting.trace.find(batch)
    assert found is not None
    assert float(weighting.select(batch)) == 1.0
    assert not found.idle
    assert float(weighting.select(other)) == 0.0
    assert weighting.trace.find(other).idle
    assert weighting.trace.find(torch.ones(3, 2)) is None
    assert weighting.trace.check is None


def test_counts_of_a_front_end_go_behind_the_settings():
    for config in (HeteroConfig(weight_fn=len), HeteroConfig(loss_reduction="sum")):
        weighting = LossWeighting(config, 2, CPU)
        weighting.count_with(lambda batch: 1 / 0)
        assert weighting.trace.check is None
    weighting.begin(3, 8, None, (3, 5))
    assert float(weighting.scale(torch.tensor(2.0))) == 2.0


SIX, FIVE = torch.ones(6, 3), torch.ones(5, 3)
ARRIVED = {
    "as planned": ([SIX, SIX[:, 0]], False),
    "two views": ([torch.cat([SIX, SIX]), SIX[:, 0]], False),
    "sequence first": ([torch.ones(4, 6, 3), torch.ones(4, 6)], False),
    "images of different sizes": ([[torch.ones(3, size, size) for size in range(4, 10)], [{}] * 6], False),
    "graphs": ([torch.ones(40, 3), torch.ones(2, 90), SIX[:, 0]], False),
    "nothing to count": ({"texts": "one", "scale": torch.tensor(2.0)}, False),
    "dropped": ([FIVE, FIVE[:, 0]], True),
    "dropped, by names": ({"inputs": FIVE, "labels": FIVE[:, 0]}, True),
    "packed": ({"input_ids": torch.ones(1, 40), "labels": torch.ones(1, 40)}, True),
}


@pytest.mark.parametrize("kind", ARRIVED)
def test_a_batch_of_other_rows_than_planned_is_named_once(kind):
    batch, expected = ARRIVED[kind]
    notices = Notices(speaks=True)
    weighting = LossWeighting(HeteroConfig(), 2, CPU, notices)
    for _ in range(2):
        weighting.begin(6, 8, batch, (6, 2))
    assert ["weight_fn" in line for line in notices.said] == [True] * expected


def test_to_name_a_loss_never_runs_a_checkpointed_forward_pass_again():
    """It may have collectives, and other ranks would not take part in them."""
    forwards = []

    def loss(x):
        forwards.append(x)
        return torch.nn.functional.cross_entropy(x, torch.tensor([0, 1]), weight=torch.tensor([0.2, 0.8]))

    weighting = LossWeighting(HeteroConfig(), 2, CPU, Notices(speaks=True))
    weighting.begin(2, 3, None, (2, 1))
    weighted = weighting.scale(checkpoint(loss, torch.zeros(2, 2, requires_grad=True), use_reentrant=False))
    assert len(forwards) == 1
    weighted.backward()
    assert len(forwards) == 2
