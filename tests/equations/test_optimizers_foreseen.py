"""What is known of an optimizer's next step: Adam's view of a gradient, and the move that a step will make."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.compression import BlockGradient
from lightning_hetero.optim import AdamPreconditioner, SparseAdamW, SparseSGD, is_adam
from lightning_hetero.optim.adam_preconditioner import common_preconditioner
from lightning_hetero.optim.weight_prediction import expected_move, foresees

FAMILY = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
}


def train(optimizer, steps):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for row in steps:
        for p, gradient in zip(parameters, row, strict=True):
            p.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("steps", [1, 7])
def test_a_gradient_is_divided_by_the_root_of_the_second_moment(name, steps):
    """``g / (sqrt(v / (1 - beta^t)) + eps)``; gradients shrink, so that the largest moment is not the last one."""
    generator = torch.Generator().manual_seed(0)
    shapes, beta, (cls, arguments) = ((3, 2), (4,)), 0.9, FAMILY[name]
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes]
    past = [[0.5**t * torch.randn(s, generator=generator).double() for s in shapes] for t in range(steps)]
    optimizer = cls(parameters, lr=0.1, betas=(0.8, beta), eps=1e-3, **arguments)
    train(optimizer, past)
    scale = common_preconditioner([optimizer])
    assert is_adam(optimizer)
    assert common_preconditioner([optimizer, torch.optim.Adamax(parameters)]) is None
    for i, p in enumerate(parameters):
        moment = greatest = torch.zeros_like(p)
        for row in past:
            moment = beta * moment + (1 - beta) * row[i] ** 2
            greatest = torch.maximum(greatest, moment)
        used, new = greatest if arguments.get("amsgrad") else moment, torch.ones_like(p)
        expected = new / ((used / (1 - beta**steps)).sqrt() + 1e-3)
        torch.testing.assert_close(scale(p, new), expected, rtol=1e-6, atol=0)
        (square,) = scale.squares(p, new)
        torch.testing.assert_close(square, expected.square().sum(), rtol=1e-6, atol=0)
        assert new.eq(1).all()


def test_groups_optimizers_loaded_states_and_parameters_without_state():
    a, b, c, stranger = (nn.Parameter(torch.ones(2).double()) for _ in range(4))
    first = torch.optim.Adam([{"params": [a], "eps": 1.0}])
    second = torch.optim.AdamW([c], eps=2.0)
    scale = AdamPreconditioner([first, second])
    assert not scale(a, torch.ones(2)).any()
    first.add_param_group({"params": [b], "betas": (0.9, 0.5)})  # layers that are unfrozen
    for optimizer in (first, second):
        train(optimizer, [[torch.full_like(p, 4.0) for g in optimizer.param_groups for p in g["params"]]])
    for p, expected in ((a, 10 / 5), (b, 10 / 4), (c, 10 / 6), (stranger, 0.0)):
        assert scale(p, torch.full_like(p, 10.0)).mean().item() == pytest.approx(expected, rel=1e-4)
    assert scale.squares(stranger, torch.ones(2)) == []
    second.state[c]["exp_avg_sq"].mul_(4.0)
    second.load_state_dict(second.state_dict())
    assert scale(c, torch.full_like(c, 10.0)).mean().item() == pytest.approx(1.0, rel=1e-4)


class Largest(TorchDispatchMode):
    """Most elements of a tensor that an operation makes anew."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(
    ("shape", "order", "dtype"),
    [
        ((600_000,), torch.contiguous_format, torch.bfloat16),
        ((64, 100, 10, 10), torch.channels_last, torch.float32),
        ((2, 3, 50, 40, 7), torch.channels_last_3d, torch.bfloat16),
        ((), torch.contiguous_format, torch.float32),
        ((0, 3), torch.contiguous_format, torch.float32),
    ],
    ids=str,
)
def test_squares_of_pieces_add_up_to_the_whole_and_temporaries_are_small(shape, order, dtype):
    """In float32 also of 16-bit values. On a GPU each stream keeps what was allocated on it."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(shape, dtype=dtype).to(memory_format=order))
    optimizer = torch.optim.Adam([p], betas=(0.9, 0.99))
    moment = torch.rand(shape, generator=generator).to(dtype).to(memory_format=order)
    optimizer.state[p] = {"exp_avg_sq": moment, "step": 3}
    gradient = torch.randn(shape, generator=generator).to(dtype)
    exact = gradient.double() / ((moment.double() / (1 - 0.99**3)).sqrt() + 1e-8)
    for laid_out in (gradient, torch.empty_like(p).copy_(gradient).detach()):
        with Largest() as largest:
            found = AdamPreconditioner([optimizer]).squares(p, laid_out)
        assert sum(found).item() == pytest.approx(exact.square().sum().item(), rel=1e-3)
        assert found[0].dtype == torch.float32
        assert largest.numel <= 2**17 or laid_out.stride() != p.stride()


# the next move

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.0),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_expected_move_is_the_optimizers_own(kind):
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64))
    optimizer = OPTIMIZERS[kind]([p])
    assert foresees(optimizer)
    assert not foresees(torch.optim.Rprop([p]))
    for gradient in (*torch.randn(4, 4, 5, generator=generator, dtype=torch.float64), torch.zeros_like(p)):
        state = {name: value for name, value in optimizer.state.get(p, {}).items() if isinstance(value, torch.Tensor)}
        known = gradient if gradient.any() else None  # a step with a gradient of 0 still has its momentum
        move = expected_move(optimizer, optimizer.param_groups[0], state, known)
        before, p.grad = p.detach().clone(), gradient.clone()
        optimizer.step()
        taken = before - p.detach()
        torch.testing.assert_close(torch.zeros_like(taken) if move is None else move, taken)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw"])
def test_momentum_that_is_paid_ahead_is_foreseen(kind):
    p, current = nn.Parameter(torch.zeros(1024)), {}
    optimizer = SparseAdamW([p], weight_decay=0.0)
    if kind != "adamw":
        optimizer = SparseSGD([p], lr=0.1, momentum=0.9, nesterov=kind == "nesterov")
    optimizer.sparse.follow(lambda: current, block=16)
    for step in range(12):
        rows = torch.tensor([1, 3] if step in (0, 1, 2, 5, 6, 9) else [2])  # waits of 0 and of 2 steps
        places = (rows[:, None] * 16 + torch.arange(16)).view(-1)
        values = torch.randn(len(rows), 16, generator=torch.Generator().manual_seed(step))
        current[p] = BlockGradient.of(p, rows, values)
        p.grad, (group,) = current[p].grad, optimizer.param_groups
        state = {
            name: value[places] if value.dim() else value
            for name, value in optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }
        kept, whole = optimizer.sparse.kept(group, p, places), optimizer.sparse.kept(group, p, None)
        assert kind == "adamw" or torch.equal(whole[places], kept)
        move = expected_move(optimizer, group, state, values.view(-1), kept=kept)
        before = p.detach().clone()
        optimizer.step()
        if step:  # before the first step there is no momentum that could be paid
            torch.testing.assert_close(before[places] - p.detach()[places], move, rtol=1e-3, atol=1e-6)
