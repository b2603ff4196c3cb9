"""Sparse optimizers against torch's dense ones: the same parameters and state once all debts are paid."""

import copy
import inspect

import pytest
import torch
from torch import nn

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.optim import SparseAdamW, SparseSGD
from lightning_hetero.optim.sparse import lazy_update as module
from lightning_hetero.optim.sparse import torch_backend
from lightning_hetero.optim.sparse.kernel_interface import MAX_DEFERRED_STEPS
from lightning_hetero.optim.sparse.optimizers import attach_lazy_update
from lightning_hetero.optim.sparse.sgd import SGDRule

SIZES = (16 * 40, 16 * 25 + 5, 3)
KINDS = {
    "sgd": (SparseSGD, torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (SparseSGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "momentum decay": (SparseSGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (
        SparseSGD,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    ),
    "adamw": (SparseAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}),
}


def made(kind, touched, dtype=torch.float64):
    ours, theirs, settings = KINDS[kind]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, dtype=dtype)) for n in SIZES]
    sparse = ours(parameters, pay="later", **settings)
    sparse.sparse.follow(lambda: touched["now"], 16)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    return parameters, sparse, twins, theirs(twins, **settings)


def gradients(parameters, twins, touched, step, dense=False):
    """The same gradient for both: 0 but for some blocks; every block of the last parameter is touched at times."""
    generator = torch.Generator().manual_seed(step)
    touched["now"] = None if dense else {}
    for p, twin in zip(parameters, twins, strict=True):
        rows = -(-p.numel() // 16)
        few = (torch.rand(rows, generator=generator) < (0.05 if rows > 1 else 0.4)).nonzero().view(-1)
        g = torch.randn(p.numel(), generator=generator, dtype=p.dtype)
        if dense:
            p.grad, twin.grad = g, g.clone()
            continue
        one = BlockGradient.of(p, few, nn.functional.pad(g, (0, -len(g) % 16)).view(rows, 16)[few])
        touched["now"][p], p.grad = one, one.grad
        twin.grad = one.grad.to_dense()


def same(parameters, twins, **tolerance):
    for p, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_settled_it_is_the_dense_optimizer(kind):
    """Over 60 steps with a learning rate that changes in each: parameters and state, to rounding."""
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    behind = 0
    for step in range(60):
        gradients(parameters, twins, touched, step, dense=step in (0, 1, 30))
        for optimizer in (sparse, dense):
            optimizer.param_groups[0]["lr"] = KINDS[kind][2]["lr"] * (1 + step % 7) / 7
            optimizer.step()
        behind += any(not torch.allclose(p, t, rtol=1e-9) for p, t in zip(parameters, twins, strict=True))
    assert behind > 40 or kind == "sgd", "nothing was owed, so nothing was tested"
    state = sparse.state_dict()
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if kind != "adamw" else {"rtol": 1e-6, "atol": 1e-8}
    same(parameters, twins, **tolerance)
    for ours, theirs in zip(state["state"].values(), dense.state_dict()["state"].values(), strict=True):
        assert set(ours) == set(theirs)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def test_what_was_owed_is_paid_when_nothing_is_owed_any_more():
    """A weight decay that is switched off and on again: blocks of the time in between owe what was before."""
    touched = {}
    parameters, sparse, twins, dense = made("sgd decay", touched)
    for step in range(24):
        gradients(parameters, twins, touched, step, dense=step == 0)
        for optimizer in (sparse, dense):
            optimizer.param_groups[0]["weight_decay"] = (0.05, 0.0, 0.3)[step // 4 % 3]
            optimizer.step()
    sparse.sparse.flush()
    same(parameters, twins, rtol=1e-9, atol=1e-11)


def test_a_decay_that_is_switched_off_is_paid_when_saving():
    """Momentum is paid ahead, so that without decay a save would have nothing to pay."""
    found = []
    for late in (False, True):
        touched = {}
        parameters, _, twins, _ = made("momentum decay", touched)
        sparse = SparseSGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
        sparse.sparse.follow(lambda touched=touched: touched["now"], 16)
        for step in range(6):
            gradients(parameters, twins, touched, step, dense=step == 0)
            sparse.step()
        before = [p.detach().clone() for p in parameters]
        if late:
            sparse.param_groups[0]["weight_decay"] = 0.0
        sparse.state_dict()
        assert any(not torch.equal(p, was) for p, was in zip(parameters, before, strict=True)), "nothing was owed"
        found.append(parameters)
    same(*found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_debts_end(kind, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEFERRED_STEPS", 7)
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(22):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
        if step and step % 7 == 0:
            same(parameters, twins, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_who_follows_another_source_has_paid(kind):
    """As where gradients are dense from now on."""
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(5):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
    sparse.sparse.follow(None, 16)
    same(parameters, twins, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum decay", "adamw"])
def test_who_loads_a_state_owes_nothing(kind):
    """As where training is taken back to a checkpoint; what later steps owed is over."""
    touched = {}
    parameters, sparse, twins, _ = made(kind, touched)
    for step in range(6):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        if step == 2:
            state, weights = copy.deepcopy(sparse.state_dict()), [p.detach().clone() for p in parameters]
    sparse.load_state_dict(state)
    for p, saved in zip(parameters, weights, strict=True):
        p.data.copy_(saved)
    sparse.sparse.flush()
    same(parameters, weights, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (SparseSGD, torch.optim.SGD, {"momentum": 1.0}),
        (SparseAdamW, torch.optim.AdamW, {"betas": (0.9, 0.3), "eps": 1e-12}),
    ],
    ids=["sgd", "adamw"],
)
def test_momentum_whose_sum_has_no_end_is_paid_later(ours, theirs, settings):
    p, twin = (nn.Parameter(torch.ones(48, dtype=torch.float64)) for _ in range(2))
    sparse, dense, given = ours([p], lr=0.1, **settings), theirs([twin], lr=0.1, **settings), {}
    for step in range(6):
        rows = torch.tensor([0, 1] if step % 2 else [2])
        one = BlockGradient.of(p, rows, torch.ones(len(rows), 16, dtype=torch.float64))
        p.grad, twin.grad = torch.ones_like(p), torch.ones_like(p)
        if step:
            p.grad, twin.grad, given[p] = one.grad, one.grad.to_dense(), one
        sparse.step()
        dense.step()
        if step == 0:
            sparse.sparse.follow(lambda: given, 16)
    sparse.sparse.flush()
    same([p], [twin], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_how_many_blocks_are_worked_on_at_once(kind, monkeypatch):
    found = []
    for at_once in (3, 1000):
        monkeypatch.setattr(torch_backend, "AT_ONCE", torch_backend.BlocksAtOnce(at_once, 2 * at_once))
        touched = {}
        parameters, sparse, twins, _ = made(kind, touched)
        for step in range(12):
            gradients(parameters, twins, touched, step, dense=step == 0)
            sparse.step()
        sparse.sparse.flush()
        found.append(parameters)
    same(*found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_is_owed_is_paid_in_every_type(dtype):
    p, given = nn.Parameter(torch.ones(48, dtype=dtype)), {}
    sparse = SparseSGD([p], lr=0.5, weight_decay=0.5)
    sparse.sparse.follow(lambda: given, 16)
    given[p] = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16, dtype=dtype))
    for _ in range(3):
        p.grad = given[p].grad
        sparse.step()
    sparse.sparse.flush()
    assert p[0].item() == pytest.approx(0.75**3, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pay", ["ahead", "later"])
def test_a_block_may_wait_for_longer_than_debts_are_counted(pay, dtype):
    p, given = nn.Parameter(torch.ones(32, dtype=dtype)), {}
    sparse = SparseSGD([p], lr=0.01, momentum=0.9, weight_decay=1e-3, pay=pay)
    p.grad = torch.ones_like(p)
    sparse.step()
    sparse.sparse.follow(lambda: given, 16)
    for step in range(2 * MAX_DEFERRED_STEPS + 11):
        rows = torch.tensor([0, 1] if step in (0, MAX_DEFERRED_STEPS + 5, 2 * MAX_DEFERRED_STEPS + 10) else [0])
        given[p] = BlockGradient.of(p, rows, torch.full((len(rows), 16), 0.1, dtype=dtype))
        p.grad = given[p].grad
        sparse.step()
    sparse.sparse.flush()
    assert torch.isfinite(p).all()
    assert p[16] > 0.5 > p[0]


def test_only_touched_blocks_are_written():
    touched = {}
    parameters, sparse, twins, _ = made("momentum decay", touched)
    for step in range(2):
        gradients(parameters, twins, touched, step, dense=step == 0)
        before = [p.detach().clone() for p in parameters]
        sparse.step()
    for p, was in zip(parameters, before, strict=True):
        changed = torch.nn.functional.pad((p != was).detach(), (0, -p.numel() % 16)).view(-1, 16).any(1).nonzero()
        assert set(changed.view(-1).tolist()) <= set(touched["now"][p].rows.tolist())
        assert len(changed) < 10
        assert p.grad is touched["now"][p].grad, "the gradient is there after the step as well"


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_and_from_torch(kind):
    touched = {}
    parameters, sparse, twins, dense = made(kind, touched)
    for step in range(4):
        gradients(parameters, twins, touched, step, dense=step == 0)
        sparse.step()
        dense.step()
    ours, theirs = copy.deepcopy(sparse.state_dict()), copy.deepcopy(dense.state_dict())
    sparse.load_state_dict(theirs)
    dense.load_state_dict(ours)
    for p, twin in zip(parameters, twins, strict=True):
        p.data.copy_(twin.data)
    sparse.state_dict()
    gradients(parameters, twins, touched, 9, dense=True)
    sparse.step()
    dense.step()
    same(parameters, twins, rtol=1e-4, atol=1e-5)


def test_without_a_source_and_with_a_gradient_of_the_users_it_is_dense():
    touched = {}
    parameters, sparse, twins, dense = made("momentum decay", touched)
    sparse.sparse.follow(None, 16)
    for step in range(3):
        gradients(parameters, twins, touched, step, dense=True)
        sparse.step()
        dense.step()
    same(parameters, twins, rtol=0, atol=0)
    sparse.sparse.follow(lambda: touched["now"], 16)
    for step in range(3):
        gradients(parameters, twins, touched, step)
        for p, twin in zip(parameters, twins, strict=True):
            p.grad = twin.grad.clone()
        sparse.step()
        dense.step()
        same(parameters, twins, rtol=0, atol=0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_done_to_a_gradient_in_place_counts(channels_last):
    """A step stays sparse then, as on a GPU, where the host cannot see it; torch's ``mul_`` takes other memory."""
    touched = {}
    parameters, sparse, twins, dense = made("momentum decay", touched)
    if channels_last:
        for p in (parameters[0], twins[0]):
            p.data = p.data.view(4, 8, 5, 4).to(memory_format=torch.channels_last)
    for step in range(6):
        generator, touched["now"] = torch.Generator().manual_seed(step), None if step == 0 else {}
        for p, twin in zip(parameters, twins, strict=True):
            rows = torch.tensor([0, -(-p.numel() // 16) - 1]).unique()
            values = torch.randn(len(rows), 16, generator=generator, dtype=p.dtype)
            values.view(-1)[values.numel() + min(0, p.numel() - 16 * (int(rows[-1]) + 1)) :] = 0
            one = BlockGradient.of(p, rows, values)
            twin.grad = one.grad.to_dense() * 0.5
            p.grad = twin.grad.clone() if step == 0 else one.grad
            if step:
                touched["now"][p] = one
                p.grad.mul_(0.5)
                assert p.grad is one.grad
        before = parameters[0].detach().clone()
        sparse.step()
        dense.step()
        assert ((parameters[0] != before).sum() <= 32) == (step > 0)
    sparse.sparse.flush()
    same(parameters, twins, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "settings"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_torchs_own_optimizer_stays_itself(kind, settings):
    """With a closure, a scheduler that was there before, and a loss scaler; state_dict is torch's."""
    p = nn.Parameter(torch.ones(16 * 40))
    optimizer = getattr(torch.optim, kind)([p], lr=0.1, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    touched = {"now": None}
    attach_lazy_update(optimizer).follow(lambda: touched["now"], 16)

    def closure():
        p.grad = torch.full_like(p, 1e-3)
        return 7.0

    assert optimizer.step(closure) == 7.0
    schedule.step()

    def blocks():
        one = BlockGradient.of(p, torch.tensor([3]), torch.full((1, 16), 4.0))
        touched["now"], p.grad = {p: one}, one.grad
        return 8.0

    before = p.detach().clone()
    assert optimizer.step(closure=blocks) == 8.0
    assert (p != before).nonzero().view(-1).tolist() == list(range(48, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value, moves in ((4.0, True), (float("inf"), False)):
        one = BlockGradient.of(p, torch.tensor([5]), torch.full((1, 16), value))
        scaler.scale(torch.ones(()))
        touched["now"], p.grad = {p: one}, one.grad
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert bool((p != before).any()) == moves
        assert one.values[0, 0] == (1.0 if moves else value)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_a_large_eps_counts_as_in_the_step_that_is_owed():
    """Of AdamW, also in the first steps, whose second moment is far from its mean."""
    p, twin = (nn.Parameter(torch.ones(32, dtype=torch.float64)) for _ in range(2))
    settings, given = {"lr": 0.1, "eps": 0.3}, {}
    sparse, dense = SparseAdamW([p], pay="later", **settings), torch.optim.AdamW([twin], **settings)
    for step in range(3):
        rows = torch.tensor([0, 1] if step < 2 else [0])
        given[p] = BlockGradient.of(p, rows, torch.ones(len(rows), 16, dtype=torch.float64))
        p.grad, twin.grad = given[p].grad if step else given[p].grad.to_dense(), given[p].grad.to_dense()
        sparse.step()
        dense.step()
        if step == 0:
            sparse.sparse.follow(lambda: given, 16)
    sparse.sparse.flush()
    same([p], [twin], rtol=1e-4, atol=0.0)


def test_an_optimizer_of_torchs_pays_when_it_is_told_to():
    p = [nn.Parameter(torch.zeros(3))]
    assert attach_lazy_update(torch.optim.SGD(p, lr=0.1), "later").momentum_mode == "later"


def test_what_has_no_sparse_steps_is_refused_by_name():
    p = [nn.Parameter(torch.zeros(3))]
    for optimizer, words in (
        (torch.optim.Adam(p), "Adam has no sparse steps; allowed are torch.optim.SGD, torch.optim.AdamW"),
        (torch.optim.SGD(p, lr=0.1, fused=True), "cannot go with fused=True"),
        (torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "cannot go with dampening=0.5"),
        (torch.optim.SGD(p, lr=0.1, maximize=True), "cannot go with maximize=True"),
        (torch.optim.AdamW(p, amsgrad=True), "cannot go with amsgrad=True"),
        (torch.optim.AdamW(p, differentiable=True), "cannot go with differentiable=True"),
        (torch.optim.AdamW(p, lr=torch.tensor(0.1)), "a learning rate that is a tensor"),
        (torch.optim.AdamW(p, betas=(0.9, 0.0)), r"cannot go with betas=\(0.9, 0.0\)"),
    ):
        with pytest.raises(ValueError, match=words):
            attach_lazy_update(optimizer)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw"])
def test_paid_ahead_a_block_is_at_once_where_the_dense_optimizer_takes_it(kind):
    """One touch, then nothing: the dense optimizer gets there after hundreds of steps without a gradient."""
    ours, theirs, settings = KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}
    p = nn.Parameter(torch.randn(16 * 40, dtype=torch.float64))
    twin = nn.Parameter(p.detach().clone())
    sparse, dense = ours([p], **settings), theirs([twin], **settings)
    for parameter, optimizer in ((p, sparse), (twin, dense)):
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
    for state in (sparse.state[p], dense.state[twin]):
        state["momentum_buffer" if "exp_avg" not in state else "exp_avg"].zero_()
        if kind == "adamw":
            state["step"].fill_(20_000)  # its bias corrections would change for thousands of steps
    given = {}
    for parameter in (p, twin):
        one = BlockGradient.of(parameter, torch.tensor([2]), torch.linspace(-2, 2, 16, dtype=torch.float64)[None])
        parameter.grad = one.grad if parameter is p else one.grad.to_dense()
        given.setdefault(p, one)
    sparse.sparse.follow(lambda: given, 16)
    sparse.step()
    dense.step()
    twin.grad.zero_()
    for _ in range(400):
        dense.step()
    torch.testing.assert_close(p.detach()[32:48], twin.detach()[32:48], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("waits", [(0,), (2,), (7,), (2, 2, 5, 5, 0)])
@pytest.mark.parametrize("times", [1, SGDRule.intervals_ahead])
@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_momentum_is_paid_ahead_for_twice_the_mean_wait_and_the_rest_is_kept(kind, times, waits, monkeypatch):
    """For once that wait, and a wait that stays, it would be the dense optimizer at each touch; no momentum is lost."""
    monkeypatch.setattr(SGDRule, "intervals_ahead", times)
    ours, theirs, settings = KINDS[kind]
    settings = {**settings, "weight_decay": 0.0}
    lr, m = settings["lr"], settings["momentum"]
    p, twin = (nn.Parameter(torch.zeros(16 * 8, dtype=torch.float64)) for _ in range(2))
    sparse, dense = ours([p], **settings), theirs([twin], **settings)
    for parameter, optimizer in ((p, sparse), (twin, dense)):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    given, touches = {}, [waits[0], *(waits * 4)[: max(4, len(waits))]]
    sparse.sparse.follow(lambda: given, 16)
    for number, wait in enumerate(touches):
        before, factor = sparse.state[p]["momentum_buffer"][80:96].clone(), m ** (times * touches[number - 1])
        for step in range(wait + 1):
            rows = torch.tensor([5] if step == 0 else [], dtype=torch.int64)
            values = (number + 1) * torch.linspace(-2, 2, 16, dtype=torch.float64).expand(len(rows), 16).contiguous()
            given[p] = BlockGradient.of(p, rows, values)
            p.grad, twin.grad = given[p].grad, given[p].grad.to_dense()
            sparse.step()
            dense.step()
        if number == 0:  # its wait was not known, and nothing was left
            assert not sparse.state[p]["momentum_buffer"].any()
            twin.data.copy_(p.data)
            dense.state[twin]["momentum_buffer"].zero_()
        rest, left = (state[q]["momentum_buffer"][80:96] for state, q in ((sparse.state, p), (dense.state, twin)))
        if len(set(waits)) == 1 and number:
            whole_of_it = m * before + (number + 1) * torch.linspace(-2, 2, 16, dtype=torch.float64)
            torch.testing.assert_close(rest, factor * whole_of_it)
        if len(set(waits)) == 1 and times * wait == wait:
            torch.testing.assert_close(rest, left)
            torch.testing.assert_close(p.detach()[80:96], twin.detach()[80:96])
        whole = lr * m / (1 - m) * (m if kind == "nesterov" else 1.0)
        torch.testing.assert_close(p.detach()[80:96] - whole * rest, twin.detach()[80:96] - whole * left)
    assert p.detach().any()


@pytest.mark.parametrize(
    ("ours", "theirs", "values"),
    [
        (SparseSGD, torch.optim.SGD, (0.1, 0.9, 0, 0.01, True)),
        (SparseAdamW, torch.optim.AdamW, (0.1, (0.8, 0.99), 1e-6, 0.1)),
    ],
)
def test_arguments_are_torchs(ours, theirs, values):
    """By name, kind and default, and by position; ``pay`` comes besides."""
    parameters = dict(inspect.signature(ours).parameters)
    pay = parameters.pop("pay")
    assert (pay.kind, pay.default) == (pay.KEYWORD_ONLY, "ahead")
    assert parameters == dict(inspect.signature(theirs).parameters)
    p = nn.Parameter(torch.ones(3))
    made, expected = ours([p], *values), theirs([p], *values)
    assert made.defaults == expected.defaults
    assert [{**group, "params": None} for group in made.param_groups] == [
        {**group, "params": None} for group in expected.param_groups
    ]


def test_pay_is_one_of_two():
    with pytest.raises(ValueError, match="pay='never' is unknown; allowed are 'ahead', 'later'"):
        SparseSGD([nn.Parameter(torch.zeros(3))], lr=0.1, pay="never")
