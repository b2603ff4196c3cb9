"""What is done where the kernels of a sparse optimizer cannot be had."""

import logging

import pytest
import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.compression import TorchEncoder
from lightning_hetero.optim import SparseAdamW
from lightning_hetero.optim.sparse import warmup as warming
from tests.comm.contexts import context_of

pytest.importorskip("triton")

from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels work here")
def test_where_kernels_of_the_optimizer_fail_messages_are_read_on_the_host_and_the_log_says_why_once(
    monkeypatch, caplog
):
    """Triton has no driver here, which is what it says."""
    monkeypatch.setattr(
        BlockTopKAverager,
        "_encoder",
        lambda exchange, *_: TritonEncoder(exchange.model.layout, exchange._form(0.5), torch.device("cpu"), 1),
    )
    p = torch.nn.Parameter(torch.ones(64))
    exchange = BlockTopKAverager(BlockTopK(density=0.5), context_of({"p": p}))
    exchange.encoder.residual[3] = 5.0
    optimizer = SparseAdamW([p])
    with caplog.at_level(logging.WARNING, logger="lightning_hetero"):
        for _ in range(2):
            exchange.bind([optimizer.sparse])
    assert isinstance(exchange.encoder, TorchEncoder)
    assert exchange.encoder.residual[3] == 5.0
    (record,) = caplog.records
    assert "block top-k works on the host: kernels of SparseAdamW fail on cpu: " in record.getMessage()
    assert exchange.sparse_steps == optimizer.sparse.max_sparse_density


def test_what_takes_dense_steps_needs_no_kernels(caplog):
    """Neither a frozen parameter nor a group with an option that only dense steps have, of which nothing is said."""
    frozen = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    groups = [{"params": [torch.nn.Parameter(torch.ones(64))], "amsgrad": True}, {"params": [frozen]}]
    with caplog.at_level(logging.WARNING, logger="lightning_hetero"):
        assert warming.kernels_work(SparseAdamW(groups).sparse, 16, torch.device("cpu"))
    assert not caplog.records
