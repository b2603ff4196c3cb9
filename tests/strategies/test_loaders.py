"""Train loaders of a Trainer that are not plain: gradients of one process, each sample once, decisions that count."""

import time

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import BatchPlan, HeteroDDPStrategy
from tests.helpers import Points, Regressor, collected, run_ranks, trainer_of

N = 46
EXACT = {"rtol": 1e-12, "atol": 1e-13}
ENV = {"OMP_NUM_THREADS": "1"}


class Buckets:
    """Batches of neighbours in another order each epoch, some longer than others: duck-typed, without a length."""

    def __init__(self, n=N):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng(self.epoch)
        borders = [0, *sorted(rng.choice(np.arange(2, self.n), 8 + self.epoch, replace=False).tolist()), self.n]
        yield from (list(range(borders[i], borders[i + 1])) for i in rng.permutation(len(borders) - 1))


class Planned(Regressor):
    """Adopts plans and saves checkpoints behind given steps."""

    def __init__(self, plans=None, save=None, **kwargs):
        super().__init__(**kwargs)
        self.plans, self.save, self.sizes = plans or {}, save or {}, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.sizes.append(self.trainer.strategy.engine.own_size)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        at = self.trainer.current_epoch, batch_idx
        if at in self.plans:
            self.trainer.strategy.adopt(BatchPlan(sum(self.plans[at]), self.plans[at]))
        if at in self.save:
            self.trainer.save_checkpoint(self.save[at])


def _fit(rank, world_size, job):
    model = job["model"]()
    trainer = trainer_of(HeteroDDPStrategy(**job.get("strategy", {})), world_size, **job.get("trainer", {}))
    trainer.fit(model, job["loader"](), ckpt_path=job.get("resume"))
    plans = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in trainer.strategy.plan_history]
    return {"weights": model.flat(), "seen": model.seen, "steps": trainer.global_step, "plans": plans}


def run(world_size, **job):
    return run_ranks(_fit, world_size, world_size, job, env=ENV)


def own_batches(**kwargs):
    return DataLoader(Points(N), batch_sampler=Buckets(), **kwargs)


def every_sample_once(results, epochs, n=N):
    for epoch in range(epochs):
        taken = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        np.testing.assert_array_equal(taken, np.arange(n))
    assert len({tuple(entry[:2] for entry in r["seen"]) for r in results}) == 1


def replayed(results, n=N):
    """Weights of one process on the union of what all ranks saw in each step."""
    model, data = Regressor(), Points(n)
    optimizer = model.configure_optimizers()
    for parts in zip(*(r["seen"] for r in results), strict=True):
        indices = [i for _, _, own in parts for i in own]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[indices]), data.y[indices]).backward()
        optimizer.step()
    return model.flat()


def check(results, epochs=2):
    every_sample_once(results, epochs)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_an_own_sampler_are_shared_by_the_plan(workers):
    results = run(
        2, model=Planned, loader=lambda: own_batches(num_workers=workers), strategy={"local_batch_sizes": [6, 2]}
    )
    check(results)
    for epoch in (0, 1):
        sampler = Buckets()
        sampler.set_epoch(epoch)
        units = list(sampler)
        steps = [sorted(sum(units[i : i + 2], [])) for i in range(0, len(units), 2)]
        seen = [[e for e in r["seen"] if e[0] == epoch] for r in results]
        assert [sorted(a[2] + b[2]) for a, b in zip(*seen, strict=True)] == steps
        for union, (first, second) in zip(steps, zip(*seen, strict=True), strict=True):
            assert abs(len(first[2]) - 0.75 * len(union)) < 1.01
            assert len(second[2]) < len(first[2])


def cost_of(index):
    return 1.0 + 9.0 * (index % 5 == 0)


def divided_by_cost(results, steps, part):
    """Whether rank 0 has this part of the cost of these steps, as near as samples allow, and not of the samples."""
    seen = [[own for _, _, own in parts] for parts in zip(*(r["seen"] for r in results), strict=True)][steps]
    costs = [[sum(map(cost_of, own)) for own in parts] for parts in seen]
    near = all(abs(first - part * (first + second)) <= 5.0 for first, second in costs)
    return near and any(abs(len(first) / len(first + second) - part) > 0.1 for first, second in seen)


def test_batches_of_an_own_sampler_are_divided_by_cost():
    """And a plan changes the shares."""
    given = {"local_batch_sizes": [6, 2], "cost_fn": cost_of}
    results = run(2, model=lambda: Planned({(0, 3): (2, 6)}), loader=own_batches, strategy=given)
    check(results)
    assert divided_by_cost(results, slice(4), 0.75)
    assert divided_by_cost(results, slice(5, None), 0.25)


class Batched(Dataset):
    """Yields whole batches of 3 to 7 rows of the points; with ``padded``, of different widths."""

    def __init__(self, n=N, padded=False):
        self.points, self.padded = Points(n), padded
        sizes = [3 + 2 * (i % 3) for i in range(n)]
        borders = np.minimum(np.cumsum([0, *sizes]), n)
        self.ranges = [(a, b) for a, b in zip(borders, borders[1:], strict=False) if b > a]

    def __len__(self):
        return len(self.ranges)

    def __getitem__(self, i):
        first, end = self.ranges[i]
        x, y, index = self.points.x[first:end], self.points.y[first:end], torch.arange(first, end)
        if self.padded:
            x = nn.functional.pad(x, (0, i))
        return x, y, index


def datasets_of_batches(**kwargs):
    return DataLoader(Batched(), batch_size=None, shuffle=True, **kwargs)


LOADERS = {"batch sampler": own_batches, "batch_size=None": datasets_of_batches}
every_kind = pytest.mark.parametrize("kind", LOADERS)


@every_kind
def test_an_adopted_plan_changes_the_next_batches(kind):
    plans = {(0, 0): (7, 1)}
    results = run(2, model=lambda: Planned(plans), loader=LOADERS[kind], strategy={"local_batch_sizes": [4, 4]})
    check(results)
    assert results[0]["plans"] == [(0, 0, (4, 4)), (0, 1, (7, 1))]
    first, second = ([len(entry[2]) for entry in r["seen"] if entry[0] == 0] for r in results)
    assert abs(first[0] - second[0]) <= 2
    assert sum(first[1:-1]) > 3 * sum(second[1:-1])


@pytest.mark.alone
@every_kind
def test_a_decision_changes_the_next_batches(kind):
    """The default policy, with a rank that takes longer for each sample."""
    results = run(2, model=Slow, loader=LOADERS[kind], strategy={"replan": 2}, trainer={"max_epochs": 4})
    check(results, epochs=4)
    plans = results[0]["plans"]
    assert len(plans) > 1
    assert plans[-1][2][0] > plans[-1][2][1]


class Slow(Regressor):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1:
            time.sleep(0.004 * len(batch[0]))
        return loss


@every_kind
@pytest.mark.parametrize("ranks", [2, 3])
def test_resuming_inside_an_epoch_trains_on_the_rest_once(tmp_path, kind, ranks):
    path = str(tmp_path / "inside.ckpt")
    save, resume = {"model": lambda: Planned(save={(0, 1): path})}, {"model": Planned, "resume": path}
    whole = run(2, loader=LOADERS[kind], strategy={"local_batch_sizes": [6, 2]}, **save)
    rest = run(ranks, loader=LOADERS[kind], strategy={"local_batch_sizes": [6, 2, 1][:ranks]}, **resume)
    done = sorted(i for r in whole for e, b, indices in r["seen"] if (e, b) < (0, 2) for i in indices)
    later = sorted(i for r in rest for e, _, indices in r["seen"] if e == 0 for i in indices)
    assert sorted(done + later) == list(range(N))
    assert sorted(i for r in rest for e, _, indices in r["seen"] if e == 1 for i in indices) == list(range(N))
    if ranks == 2:
        for full, part in zip(whole, rest, strict=True):
            assert part["seen"] == full["seen"][2:]
            np.testing.assert_array_equal(part["weights"], full["weights"])


class Joint(Planned):
    """A loss of the batches of both loaders; the tasks are learned by one net."""

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, dict) else {"a": batch}
        own = self.trainer.strategy.engine.own_size
        seen = {name: [] if own == 0 or part is None else part[2].tolist() for name, part in parts.items()}
        self.seen.append((self.trainer.current_epoch, batch_idx, seen))
        given = {name: part for name, part in parts.items() if part is not None}
        return sum((1 + (name == "b")) * self.loss(part) for name, part in given.items())


SIZES = {"a": (37, 4), "b": (22, 6)}


def loaders(mode, drop_last=False, sizes=SIZES):
    made = {name: DataLoader(Points(n), size, shuffle=True, drop_last=drop_last) for name, (n, size) in sizes.items()}
    return lambda: made if mode is None else CombinedLoader(made, mode)


def replayed_jointly(results, n=64):
    """Weights of one process on the unions, each part of the loss a mean over one loader's samples."""
    model = Regressor()
    data = {name: Points(size) for name, (size, _) in SIZES.items()}
    optimizer = model.configure_optimizers()
    for parts in zip(*(r["seen"] for r in results), strict=True):
        optimizer.zero_grad()
        for name in parts[0][2]:
            indices = [i for _, _, own in parts for i in own.get(name, [])]
            if indices:
                x, y = data[name].x[indices], data[name].y[indices]
                ((1 + (name == "b")) * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
    return model.flat()


# steps of two ranks, and how often each sample is trained on in an epoch: loader a has 5 steps, b has 2
MODES = {None: (5, 1, None), "max_size_cycle": (5, 1, None), "min_size": (2, None, 1), "max_size": (5, 1, 1)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_several_loaders_have_one_weight_in_each_step(mode, drop_last):
    split = {"local_batch_sizes": [15, 5]}
    results = run(2, model=Joint, loader=loaders(mode, drop_last), strategy=split)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed_jointly(results), **EXACT)
    steps, a, b = MODES[mode]
    full = {"a": 4, "b": 1} if drop_last else {"a": 5, "b": 2}
    expected = {None: max, "max_size_cycle": max, "min_size": min, "max_size": max}[mode](full.values())
    for epoch in (0, 1):
        seen = [[e for e in r["seen"] if e[0] == epoch] for r in results]
        assert {len(part) for part in seen} == {expected}
        for name, times in (("a", a), ("b", b)):
            taken = [i for part in seen for e in part for i in e[2].get(name, [])]
            if times is not None and not drop_last:
                assert sorted(taken) == list(range(SIZES[name][0]))


def test_the_parts_of_a_step_have_equal_shares_and_follow_the_plan():
    results = run(
        2, model=lambda: Joint({(0, 0): (5, 15)}), loader=loaders("max_size"), strategy={"local_batch_sizes": [15, 5]}
    )
    for step, (first, second) in enumerate(zip(*(r["seen"] for r in results), strict=True)):
        parts = {n: (len(first[2][n]), len(second[2][n])) for n in "ab" if first[2].get(n) or second[2].get(n)}
        shares = {part[0] / sum(part) for part in parts.values()}
        assert len(shares) == 1
        if all(sum(part) == 2 * SIZES[name][1] for name, part in parts.items()) and len(parts) == 2:
            assert shares == ({0.75} if step == 0 else {0.25})


@pytest.mark.parametrize("mode", [None, "max_size"])
def test_several_loaders_resume_inside_an_epoch(tmp_path, mode):
    path = str(tmp_path / "inside.ckpt")
    split = {"strategy": {"local_batch_sizes": [15, 5]}, "loader": loaders(mode)}
    whole = run(2, model=lambda: Joint(save={(0, 2): path}), **split)
    rest = run(2, model=Joint, resume=path, **split)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][3:]
        np.testing.assert_array_equal(part["weights"], full["weights"])


def test_one_batch_can_be_that_of_all_ranks():
    results = run(2, model=Planned, loader=own_batches, strategy={"batch_sampler": "global"})
    check(results)
    sampler = Buckets()
    taken = [[e for e in r["seen"] if e[0] == 0] for r in results]
    assert [sorted(a[2] + b[2]) for a, b in zip(*taken, strict=True)] == [sorted(unit) for unit in sampler]


def test_batch_samplers_of_torch_kind_are_not_made_anew():
    class Shuffled(BatchSampler):
        """Lightning cannot make a new instance of it."""

        def __init__(self, data, size, *, name):
            super().__init__(RandomSampler(data), size, drop_last=False)
            self.name = name

    check(run(2, model=Planned, loader=lambda: DataLoader(Points(N), batch_sampler=Shuffled(Points(N), 5, name="x"))))


class Halves(DistributedSampler):
    """The first rank holds two thirds of the data, in another order each epoch."""

    def __iter__(self):
        border = 2 * len(self.dataset) // 3
        own = [range(border), range(border, len(self.dataset))][self.rank]
        return iter(np.random.default_rng(self.epoch).permutation(np.asarray(own)).tolist())

    def __len__(self):
        return sum(1 for _ in iter(self))


def own_data(rank):
    """A loader of one rank's own data: rank 0 has 8 batches, rank 1 has 4."""
    return DataLoader(Points(N), 4, sampler=Halves(Points(N), 2, rank))


def _fit_own(rank, world_size, job):
    return _fit(rank, world_size, {**job, "loader": lambda: own_data(rank)})


def run_own(**job):
    return run_ranks(_fit_own, 2, 2, job, env=ENV)


def test_ranks_that_hold_their_own_data_are_weighted_by_their_samples():
    results = run_own(model=Planned, strategy={"shard": "mine"}, trainer={"use_distributed_sampler": False})
    check(results)
    assert [sum(len(e[2]) > 0 for e in r["seen"] if e[0] == 0) for r in results] == [8, 4]
    assert {r["steps"] for r in results} == {16}


def test_own_data_resumes_inside_an_epoch(tmp_path):
    path = str(tmp_path / "inside.ckpt")
    job = {"strategy": {"shard": "mine"}}
    whole = run_own(model=lambda: Planned(save={(0, 5): path}), **job)
    rest = run_own(model=Planned, resume=path, **job)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == full["seen"][6:]
        np.testing.assert_array_equal(part["weights"], full["weights"])


class Transposed(Planned):
    """Gets batches whose first dimension is not that of the samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step([part.movedim(-1, 0) for part in batch], batch_idx)


def transposed(samples):
    return [part.movedim(0, -1) for part in torch.utils.data.default_collate(samples)]


def _fit_transposed(rank, job):
    """Rank 0 has three times as many samples in a batch."""
    own = torch.utils.data.Subset(Points(N), range(33) if rank == 0 else range(33, N))
    loader = lambda: DataLoader(own, 9 if rank == 0 else 3, collate_fn=transposed, shuffle=True)  # noqa: E731
    return _fit(rank, 2, {**job, "loader": loader})


def test_own_data_is_weighted_by_samples_whatever_the_shape_of_a_batch():
    results = run_ranks(_fit_transposed, 2, {"model": Transposed, "strategy": {"shard": "mine"}}, env=ENV)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)


def test_own_data_in_random_order_resumes_inside_an_epoch(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    job = {"strategy": {"shard": "mine"}}
    whole = run_ranks(_fit_transposed, 2, {**job, "model": lambda: Saving({(1, 1): path})}, env=ENV)
    rest = run_ranks(_fit_transposed, 2, {**job, "model": Transposed, "resume": path}, env=ENV)
    for full, part in zip(whole, rest, strict=True):
        assert part["seen"] == [entry for entry in full["seen"] if entry[:2] > (1, 1)]
        np.testing.assert_allclose(part["weights"], full["weights"], **EXACT)


class Saving(Transposed):
    def __init__(self, save):
        super().__init__(save=save)


class Growing(Buckets):
    """More batches on one rank, and more in later epochs."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def __iter__(self):
        own = np.array_split(np.arange(self.n)[self.rank :: 2], 3 + self.rank + 2 * self.epoch)
        yield from (part.tolist() for part in own)

    def __len__(self):
        return 3 + self.rank + 2 * self.epoch

    @property
    def sampler(self):
        return self


def _fit_growing(rank, world_size, job):
    return _fit(rank, world_size, {**job, "loader": lambda: DataLoader(Points(N), batch_sampler=Growing(rank))})


def test_own_data_whose_number_of_batches_changes():
    job = {"model": Planned, "strategy": {"shard": "mine"}, "trainer": {"use_distributed_sampler": False}}
    results = run_ranks(_fit_growing, 2, 2, job, env=ENV)
    check(results)
    assert [e[:2] for e in results[0]["seen"]] == [(0, b) for b in range(4)] + [(1, b) for b in range(6)]


def test_data_that_nobody_distributes_can_be_split_or_left():
    job = {"model": Planned, "trainer": {"use_distributed_sampler": False}}
    for loader in (own_batches, lambda: DataLoader(Points(N), 4, shuffle=True)):
        check(run(2, loader=loader, strategy={"shard": "whole"}, **job))
        errors = run_ranks(_fit, 2, 2, {**job, "loader": loader}, env=ENV, expect_errors=True)
        assert [rank for rank, *_ in errors] == [0, 1]
        assert all("shard='whole'" in message and "shard='mine'" in message for *_, message in errors)


class Halved(RandomSampler):
    """A subclass that does what its parent does not."""

    def __iter__(self):
        return iter(list(super().__iter__())[: len(self)])

    def __len__(self):
        return len(self.data_source) // 2


SIZED = {"local_batch_sizes": [6, 2]}


def test_torchs_own_batch_sampler_is_that_of_a_plain_loader():
    def loader():
        data = Points(N)
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))

    check(run(2, model=lambda: Planned({(0, 1): (1, 7)}), loader=loader, strategy=SIZED))


SAMPLERS = {
    "replacement": lambda data: RandomSampler(data, replacement=True, num_samples=33),
    "replacement of all": lambda data: RandomSampler(data, replacement=True),
    "number": lambda data: RandomSampler(data, num_samples=20),
    "subclass": Halved,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_that_lightning_would_replace_are_obeyed(name):
    data = Points(N)
    sampler = SAMPLERS[name](data)
    results = run(2, model=Planned, loader=lambda: DataLoader(data, 4, sampler=sampler), strategy=SIZED)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed(results), **EXACT)
    taken = [i for r in results for e, _, own in r["seen"] if e == 0 for i in own]
    assert len(taken) == len(sampler)
    assert (len(set(taken)) < len(taken)) == name.startswith("replacement")


@pytest.mark.parametrize("trainer", [{"reload_dataloaders_every_n_epochs": 1}, {}])
def test_a_combined_loader_can_be_used_again(trainer):
    results = run_ranks(_fit_again, 2, {"trainer": trainer}, env=ENV)
    for result in results:
        np.testing.assert_allclose(result["weights"], replayed_jointly(results), **EXACT)


def _fit_again(rank, job):
    """Two epochs of one fit, or of two fits of a model."""
    model, combined = Joint(), loaders("min_size")()
    for _ in range(1 if job["trainer"] else 2):
        settings = {"max_epochs": 2, **job["trainer"]} if job["trainer"] else {"max_epochs": 1}
        trainer = trainer_of(HeteroDDPStrategy(local_batch_sizes=[15, 5]), 2, **settings)
        model.configure_optimizers = lambda: _kept(model)
        trainer.fit(model, combined)
    assert all(type(loader) is DataLoader for loader in combined.flattened)
    return {"weights": model.flat(), "seen": model.seen}


def _kept(model):
    """The same optimizer in each fit."""
    if not hasattr(model, "kept"):
        model.kept = torch.optim.SGD(model.parameters(), lr=model.lr, momentum=model.momentum)
    return model.kept


def test_several_loaders_of_own_data_are_refused():
    job = {"model": Joint, "loader": loaders("min_size"), "strategy": {"shard": "mine"}}
    errors = run_ranks(_fit, 2, 2, job, env=ENV, expect_errors=True)
    assert all("shard='mine' is for one torch DataLoader" in message for *_, message in errors)


class Normed(Planned):
    """Batch normalization, which a single row would fail."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x):
        return self.net(self.norm(x))


def test_batches_that_the_dataset_yields_are_large_enough_for_batch_normalization():
    loader = lambda: DataLoader(Batched(45), batch_size=None, shuffle=True)  # noqa: E731
    results = run(2, model=Normed, loader=loader, strategy={"local_batch_sizes": [9, 2]})
    every_sample_once(results, 2, n=45)
    assert all(len(own) != 1 for r in results for _, _, own in r["seen"])


def _says(rank, job):
    lines = collected()
    _fit(rank, 2, job)
    return lines


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"loader": own_batches, "strategy": {"local_batch_sizes": [30, 10]}}, []),
        (
            {"loader": own_batches, "strategy": {"slice_fn": len, "concat_fn": len}},
            ["slice_fn, concat_fn have no effect: the training loader makes its batches of single samples"],
        ),
        (
            {"loader": datasets_of_batches, "strategy": {"batch_sampler": "global"}},
            ["batch_sampler='global' has no effect: the training loader has no batch sampler of your own"],
        ),
        (
            {
                "loader": lambda: DataLoader(Points(N), 4),
                "strategy": {"shard": "mine", "local_batch_sizes": [9, 1], "policy": "pid", "cost_fn": cost_of},
            },
            [
                "local_batch_sizes=[9, 1], cost_fn, policy='pid' have no effect: the training loader is left as it is",
                "shard='mine': ranks 0, 1 begin with the same batch",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_said(job, expected):
    said = run_ranks(_says, 2, {"model": Planned, **job}, env=ENV)[0]
    for text in expected:
        assert any(text in line for line in said), said
    if not expected:
        assert not [line for line in said if "no effect" in line]


class Drifting(Buckets):
    """Another order, and another number of batches, on one rank from the second epoch on."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def set_epoch(self, epoch):
        super().set_epoch(epoch + self.rank * (epoch > 0))


def _drifts(rank, job):
    return _fit(rank, 2, {**job, "loader": lambda: DataLoader(Points(N), batch_sampler=Drifting(rank))})


def test_orders_that_drift_apart_are_refused_on_all_ranks():
    errors = run_ranks(_drifts, 2, {"model": Planned}, env=ENV, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("the batches of epoch 1 of Drifting" in message for *_, message in errors)


def test_a_moving_total_is_refused_by_name():
    from lightning_hetero import AdaptiveBatchCallback

    job = {"model": Planned, "loader": own_batches}
    callbacks = {"callbacks": [AdaptiveBatchCallback(max_total_batch_size=64)]}
    errors = run_ranks(_fit, 2, 2, {**job, "trainer": callbacks}, env=ENV, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("GoodputPlanner moves the total batch" in message for *_, message in errors)


def test_multiples_of_whole_batches_are_refused_by_name():
    job = {"model": Planned, "loader": own_batches, "strategy": {"local_batch_multiple": 2}}
    errors = run_ranks(_fit, 2, 2, job, env=ENV, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all("local_batch_multiple=2" in message for *_, message in errors)
