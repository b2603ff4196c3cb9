"""Parts of a sum as gradients: all parameters together as each alone, and dense as torch reads them."""

import pytest
import torch

from lightning_hetero.compression.block_gradient import BlockGradient, GradientParts
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.reference import Pack

BLOCK = 16
SHAPES = [(8, 32), (3, 20), (40,), (48,), (2, 3, 4, 5), (), (7,), (2, 16)]


@pytest.mark.parametrize("touched", ["all", "some", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_the_sum_of_each_parameter(touched, dtype):
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)))
    layout = Layout.of(((str(i), p.numel()) for i, p in enumerate(parameters)), BLOCK)
    every = torch.arange(layout.num_blocks)
    indices = {"all": every, "some": every[1::3], "none": every[:0]}[touched]
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        flat[slot.start : slot.start + slot.numel] = torch.randn(slot.numel).bfloat16().float()
    total = Pack(indices, flat.view(-1, BLOCK)[indices])
    gradients = GradientParts(dict(zip(parameters, layout.slots, strict=True)), BLOCK).of(total)
    merged = torch.zeros_like(flat).view(-1, BLOCK).index_copy(0, indices, total.values).view(-1)
    for p, slot in zip(parameters, layout.slots, strict=True):
        due = merged[slot.start : slot.start + slot.numel].to(dtype)
        got, one = gradients[p], BlockGradient.of(p, gradients[p].rows, gradients[p].values)
        p.grad = got.grad
        assert got.stands(p)
        dense = got.grad.to_dense() if got.grad.is_sparse else got.grad
        laid_out = torch.empty_like(p).copy_(dense)  # in the parameter's order of memory
        assert torch.equal(laid_out.as_strided((p.numel(),), (1,)), due)
        assert torch.equal(dense, one.grad.to_dense() if one.grad.is_sparse else one.grad)


@pytest.mark.parametrize("enabled", [False, True])
def test_checks_of_sparse_tensors_stay_as_the_user_has_them(monkeypatch, enabled):
    """Torch 2.11 warns of sparse tensors, also of ours, until somebody has said whether to check them."""
    checks, said = torch.sparse.check_sparse_tensor_invariants, []
    monkeypatch.setattr(checks, "is_enabled", lambda: enabled)
    monkeypatch.setattr(checks, "disable", lambda: said.append("not"))
    BlockGradient.of(torch.nn.Parameter(torch.zeros(2, 12)), torch.tensor([1]), torch.arange(16.0).view(1, 16))
    assert said == ([] if enabled else ["not"])
