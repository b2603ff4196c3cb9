"""Bytes of messages without the messages: equal to what is sent, at a cost that no number of parameters raises."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.value_codecs import CODECS
from lightning_hetero.compression.wire_format import MessageFormat, message_size
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.settings import BlockTopK, blocks_per_rank
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from tests.comm.contexts import context_of


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("num_blocks", [1, 37, 70_000, 1_000_003])
def test_sizes_are_those_of_messages(num_blocks, world_size, dtype):
    size = message_size(num_blocks, 16, dtype, world_size)
    densities = np.array([*np.geomspace(1e-4, 1.0, 60), 0.1, 0.2, 0.5])
    np.testing.assert_array_equal(size.bytes(densities), [size.bytes(density) for density in densities.tolist()])
    for density in densities:
        form = MessageFormat(num_blocks, blocks_per_rank(num_blocks, density, world_size), 16, dtype, layout=7)
        assert size.bytes(density) == (world_size - 1) * form.num_bytes


def test_a_decision_reads_no_parameter(monkeypatch):
    """300 tensors were hashed thousands of times in one decision, which took seconds while all ranks waited."""
    parameters = {f"layer.{i}.weight": nn.Parameter(zeros_of(i)) for i in range(300)}
    exchange = BlockTopKAverager(BlockTopK(0.1), context_of(parameters, 2))
    asked, hashed = [], []
    fingerprint, sized = Layout.fingerprint, MessageSize.bytes
    monkeypatch.setattr(Layout, "fingerprint", lambda self: hashed.append(1) or fingerprint(self))
    monkeypatch.setattr(MessageSize, "bytes", lambda self, d: asked.extend(np.ravel(d)) or sized(self, d))
    link = MessageLink(0.1, exchange.message_size, (LinkEstimate(1e5),) * 2, seconds=0.4, step=40_000)
    sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 20)
    zeros = np.zeros_like(sizes)
    seen = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
    context = PlanContext(40, ("a", "b"), (1, 1), link=link)
    planner = TimeToAccuracyPlanner(initial_total=40).decide(seen, BatchPlan(40, (30, 10)), context).planner
    assert planner.choice is not None
    assert len(asked) > 20
    assert hashed == []
    assert replace(exchange.message_size) == exchange.message_size, "a value, with no exchange behind it"


def zeros_of(i):
    return torch.zeros(16 * (1 + i % 7))
