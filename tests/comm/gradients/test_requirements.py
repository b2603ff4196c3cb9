"""What is refused before training, or said, and what is not."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from lightning_hetero.comm.gradients import requirements
from lightning_hetero.comm.gradients.requirements import (
    check_parameters,
    check_rescaled,
    check_sparse_gradients,
    check_trained,
    warn_of_untrained,
)
from lightning_hetero.config import HeteroConfig


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_real_dense_parameters_can_be_compressed(dtype):
    check_parameters({"w": torch.zeros(2, dtype=dtype)})


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64 and torch.strided"),
        (torch.zeros(2, dtype=torch.int32), "torch.int32 and torch.strided"),
        (torch.eye(2).to_sparse(), "torch.float32 and torch.sparse_coo"),
    ],
    ids=["complex", "integers", "sparse"],
)
def test_the_first_parameter_that_cannot_be_compressed_is_named(tensor, shown):
    with pytest.raises(ValueError, match=f"the gradient of second, which is {shown}; .*Set compression=None"):
        check_parameters({"first": torch.zeros(2), "second": tensor, "third": tensor})


class Words(nn.Module):
    def __init__(self, sparse=True, kind=nn.Embedding):
        super().__init__()
        self.dense, self.words = nn.Embedding(3, 2), kind(5, 2, sparse=sparse)


@pytest.fixture
def backend(monkeypatch):
    """Lets a test say which backend carries tensors."""
    return lambda name: monkeypatch.setattr(requirements, "backend_of", lambda device: name)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"compression": "block_topk"}, r"compression=BlockTopK\(.*\) cannot send .* or leave compression out"),
        ({"hierarchy": "nodes"}, "hierarchy='nodes' cannot send .* or leave hierarchy out"),
        ({"staleness": 1}, "staleness=1 cannot send .* or leave staleness out"),
    ],
    ids=str,
)
def test_sparse_gradients_and_the_setting_that_cannot_send_them(given, shown, kind, backend):
    backend("gloo")
    with pytest.raises(ValueError, match=shown) as error:
        check_sparse_gradients(Words(kind=kind), HeteroConfig(**given))
    assert "words.weight has them" in str(error.value)
    check_sparse_gradients(Words(kind=kind, sparse=False), HeteroConfig(**given))


def test_sparse_gradients_go_in_plain_sums_over_gloo_alone(backend):
    backend("gloo")
    check_sparse_gradients(Words(), HeteroConfig())
    backend("nccl")
    with pytest.raises(ValueError, match=r"the nccl backend cannot send .* or use process_group_backend='gloo'"):
        check_sparse_gradients(Words(), HeteroConfig())
    check_sparse_gradients(Words(sparse=False), HeteroConfig())


def test_sparse_gradients_of_what_is_frozen_are_none(backend):
    backend("nccl")
    words = Words()
    words.words.weight.requires_grad_(False)
    check_sparse_gradients(words, HeteroConfig())


def test_an_embedding_may_be_the_module_itself(backend):
    backend("nccl")
    with pytest.raises(ValueError, match="and weight has them"):
        check_sparse_gradients(nn.Embedding(3, 2, sparse=True), HeteroConfig())


def test_hooks_of_torch_cannot_send_sparse_gradients_and_others_are_left_alone(backend):
    backend("gloo")
    with pytest.raises(ValueError, match="ddp_comm_hook='fp16_compress_hook' cannot send"):
        check_sparse_gradients(Words(), HeteroConfig(), fp16_compress_hook)
    check_sparse_gradients(Words(), HeteroConfig(), allreduce_hook)
    check_sparse_gradients(Words(), HeteroConfig(), lambda state, bucket: None)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_forward_pass_rescales_are_refused(kind):
    rescaled = kind(5, 2, max_norm=1.5, norm_type=3.0)
    with pytest.raises(ValueError, match=rf"^{kind.__name__} has max_norm=1.5: .*renorm_\(3.0, 0, 1.5\)"):
        check_rescaled(rescaled)
    with pytest.raises(ValueError, match="^1 has max_norm"):
        check_rescaled(nn.Sequential(kind(5, 2), rescaled))
    rescaled.weight.requires_grad_(False)
    check_rescaled(rescaled)


def with_gradients(module, *names):
    for name in names:
        module.get_parameter(name).grad = torch.ones_like(module.get_parameter(name))
    return module


def test_a_gradient_that_no_optimizer_takes_is_named(caplog):
    module = with_gradients(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)), "0.weight", "0.bias", "1.weight")
    warn_of_untrained([torch.optim.SGD([module[0].weight], lr=1.0)], module)
    (line,) = caplog.messages
    assert line.startswith("block top-k: no optimizer has 0.bias and 1 other parameters, whose gradient")
    caplog.clear()
    both = (
        torch.optim.SGD([module[0].bias], lr=1.0),
        torch.optim.SGD([{"params": [module[1].bias]}, {"params": [module[0].weight]}], lr=1.0),
    )
    warn_of_untrained(both, module)
    assert caplog.messages[0].startswith("block top-k: no optimizer has 1.weight, whose gradient")


def test_nothing_is_said_of_parameters_without_a_gradient(caplog):
    warn_of_untrained([], nn.Linear(2, 1))
    warn_of_untrained([], None)
    assert not caplog.messages


def test_an_optimizer_trains_nothing_but_what_is_compressed():
    known, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3), requires_grad=False)
    check_trained([torch.optim.SGD([known, frozen], lr=1.0)], {known: 0})
    strangers = [nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(6))]
    with pytest.raises(ValueError, match=r"trains 2 parameters outside of the module \(the first has shape \(4, 5\)\)"):
        check_trained([torch.optim.SGD([known], lr=1.0), torch.optim.SGD(strangers, lr=1.0)], {known: 0})
