"""Adam's view of a gradient, against the formula and against what the optimizers do."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.optim import AdamPreconditioner, is_adam
from lightning_hetero.optim.adam_preconditioner import PIECES, PieceSizes

FAMILY = {
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "amsgrad-w": (torch.optim.AdamW, {"amsgrad": True}),
    "foreach": (torch.optim.Adam, {"foreach": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
}


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64)), torch.nn.Parameter(torch.randn(4).double())]


def gradients(steps):
    """Shrinking, so that the largest second moment is not the last one."""
    torch.manual_seed(1)
    return [[torch.randn(shape).double() * 0.5**t for shape in ((3, 2), (4,))] for t in range(steps)]


def train(optimizer, steps):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for row in steps:
        for parameter, gradient in zip(weights, row, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("steps", [1, 7])
def test_divides_by_the_root_of_the_second_moment(name, steps):
    cls, arguments = FAMILY[name]
    weights, beta, eps = parameters(), 0.9, 1e-3
    optimizer = cls(weights, lr=0.1, betas=(0.8, beta), eps=eps, **arguments)
    past = gradients(steps)
    train(optimizer, past)
    for i, parameter in enumerate(weights):
        moment = largest = torch.zeros_like(parameter)
        for row in past:
            moment = beta * moment + (1 - beta) * row[i] ** 2
            largest = torch.maximum(largest, moment)
        used = largest if arguments.get("amsgrad") else moment
        new = torch.randn_like(parameter)
        expected = new / ((used / (1 - beta**steps)).sqrt() + eps)
        torch.testing.assert_close(AdamPreconditioner([optimizer])(parameter, new), expected, rtol=1e-6, atol=0)
        (square,) = AdamPreconditioner([optimizer]).squares(parameter, new)
        torch.testing.assert_close(square, expected.square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_is_the_direction_of_the_step(cls, amsgrad):
    """Without momentum, and with gradients that do not change, the step is ``lr`` times this."""
    weights = parameters()
    optimizer = cls(weights, lr=0.1, betas=(0.0, 0.999), weight_decay=0.0, amsgrad=amsgrad)
    same = gradients(1)[0]
    train(optimizer, [same] * 3)
    scale = AdamPreconditioner([optimizer])
    expected = [scale(p, g) * 0.1 for p, g in zip(weights, same, strict=True)]
    before = [p.detach().clone() for p in weights]
    train(optimizer, [same])  # leaves v / (1 - beta^t) where it is
    for start, parameter, direction in zip(before, weights, expected, strict=True):
        torch.testing.assert_close(start - parameter.detach(), direction, rtol=1e-4, atol=0)


def test_squares_of_16_bit_values_are_added_up_in_float32():
    torch.manual_seed(2)
    weight = torch.nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight], betas=(0.9, 0.99))
    train(optimizer, [[torch.randn(5000).bfloat16()]])
    new = torch.randn(5000).bfloat16()
    (square,) = AdamPreconditioner([optimizer]).squares(weight, new)
    moment = optimizer.state[weight]["exp_avg_sq"].double()
    expected = (new.double() / ((moment / 0.01).sqrt() + 1e-8)).square().sum()
    assert square.dtype == torch.float32
    assert square.item() == pytest.approx(expected.item(), rel=1e-4)


def test_parameters_without_state_give_zero():
    (known, unknown), (stranger,) = parameters(), [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.Adam([known, unknown])
    known.grad = torch.ones_like(known)
    optimizer.step()
    scale = AdamPreconditioner([optimizer])
    assert scale(known, torch.ones_like(known)).ne(0).all()
    assert scale(unknown, torch.ones_like(unknown)).eq(0).all()
    assert scale(stranger, torch.ones(2)).eq(0).all()
    unknown.grad = torch.ones_like(unknown)
    optimizer.step()  # and does count once it has one
    assert scale(unknown, torch.ones_like(unknown)).ne(0).all()


def test_groups_and_optimizers_have_their_own_numbers():
    (a, b), (c,) = parameters(), [torch.nn.Parameter(torch.ones(2).double())]
    first = torch.optim.Adam([{"params": [a], "eps": 1.0}, {"params": [b], "betas": (0.9, 0.5)}])
    second = torch.optim.AdamW([c], eps=2.0)
    for optimizer in (first, second):
        train(optimizer, [[torch.full_like(p, 4.0) for g in optimizer.param_groups for p in g["params"]]])
    scale = AdamPreconditioner([first, second])
    for parameter, expected in ((a, 10 / 5), (b, 10 / 4), (c, 10 / 6)):
        assert scale(parameter, torch.full_like(parameter, 10.0)).mean().item() == pytest.approx(expected, rel=1e-4)


def test_follows_a_state_that_is_loaded_and_groups_that_are_added():
    (a, b) = parameters()
    optimizer = torch.optim.Adam([a])
    scale = AdamPreconditioner([optimizer])
    train(optimizer, [[torch.full_like(a, 4.0)]])
    other = torch.optim.Adam([torch.nn.Parameter(torch.zeros_like(a))])
    train(other, [[torch.full_like(a, 2.0)]])
    optimizer.load_state_dict(other.state_dict())
    assert scale(a, torch.full_like(a, 8.0)).mean().item() == pytest.approx(4.0, rel=1e-4)
    optimizer.add_param_group({"params": [b]})  # layers that are unfrozen
    train(optimizer, [[torch.full_like(a, 2.0), torch.full_like(b, 4.0)]])
    assert scale(b, torch.full_like(b, 8.0)).mean().item() == pytest.approx(2.0, rel=1e-4)


def test_gradient_and_state_stay_as_they_are():
    weights = parameters()
    optimizer = torch.optim.Adam(weights)
    train(optimizer, gradients(3))
    moment = optimizer.state[weights[0]]["exp_avg_sq"].clone()
    gradient = torch.ones_like(weights[0])
    AdamPreconditioner([optimizer])(weights[0], gradient)
    assert gradient.eq(1).all()
    torch.testing.assert_close(optimizer.state[weights[0]]["exp_avg_sq"], moment, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (torch.optim.Adam, True),
        (torch.optim.AdamW, True),
        (torch.optim.NAdam, True),
        (torch.optim.RAdam, True),
        (torch.optim.Adamax, False),  # keeps a largest gradient, no second moment
        (torch.optim.SGD, False),
        (torch.optim.RMSprop, False),
        (torch.optim.Adagrad, False),
        (torch.optim.Adadelta, False),
    ],
)
def test_family(cls, expected):
    assert is_adam(cls(parameters(), lr=0.1)) is expected


class Largest(TorchDispatchMode):
    """Most elements of a tensor that an operation makes anew."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


def stateful(shape, device, memory_format=torch.contiguous_format):
    """A parameter with a second moment, laid out in memory as asked for."""
    weight = torch.nn.Parameter(torch.zeros(shape, device=device).to(memory_format=memory_format))
    optimizer = torch.optim.Adam([weight])
    moment = torch.rand(shape, device=device).to(memory_format=memory_format)
    optimizer.state[weight] = {"exp_avg_sq": moment, "step": 3}
    return weight, AdamPreconditioner([optimizer])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("device", "most"), [("cpu", PIECES.host), ("meta", PIECES.device)])
def test_temporaries_are_small_whatever_the_parameter(device, most, memory_format):
    """On a GPU each stream keeps what was allocated on it; the meta device stands for one here."""
    weight, scale = stateful((64, 512, 10, 10), device, memory_format)
    gradient = torch.empty_like(weight)
    with Largest() as largest:
        scale.squares(weight, gradient)
    assert largest.numel <= most


@pytest.mark.parametrize("shape", [(3, 5, 40, 31), (2, 3, 5, 40, 7), (1, 1, 1, 1), (70_000,), (), (0, 3)])
def test_pieces_add_up_to_the_whole(shape, monkeypatch):
    monkeypatch.setattr("lightning_hetero.optim.adam_preconditioner.PIECES", PieceSizes(host=1000))
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for memory_format in {torch.contiguous_format, formats.get(len(shape), torch.contiguous_format)}:
        weight, scale = stateful(shape, "cpu", memory_format)
        gradient = torch.randn(shape)  # laid out in another way than the moment, in half of the cases
        whole = scale(weight, gradient).square().sum()
        torch.testing.assert_close(sum(scale.squares(weight, gradient)), whole, rtol=1e-4, atol=1e-5)
        same = torch.empty_like(weight).copy_(gradient)
        torch.testing.assert_close(sum(scale.squares(weight, same)), whole, rtol=1e-4, atol=1e-5)
