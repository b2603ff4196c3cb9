"""One training through each front end, written as users write it, and its replay on one process in plain torch.

Every function trains on one rank and returns the weights, the plans, and what it saw as (epoch, step, samples that
count) of each batch. ``plans`` maps (epoch, step) to sizes to adopt then, ``save`` a number of steps to a place.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.helpers import Points, Regressor, trainer_of

SAMPLES = 73  # a prime number: every total batch below leaves a ragged last one


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def flat_grads(model):
    return torch.cat([p.grad.detach().flatten() for p in model.parameters()]).numpy().copy()


def masked_loss(output, x, y):
    """Mean over the samples whose first feature is positive, as over the tokens that are no padding."""
    keep = (x[:, :1] > 0).to(x.dtype)
    return ((output - y).square() * keep).sum() / keep.sum().clamp(min=1.0)


def masked_count(batch):
    return (batch[0][:, 0] > 0).sum()


LOSSES = {
    "mean": lambda output, x, y: nn.functional.mse_loss(output, y),
    "sum": lambda output, x, y: 0.02 * nn.functional.mse_loss(output, y, reduction="sum"),
    "masked": masked_loss,
}


def loss_of(kind):
    """A loss by its name, or a function of ``(output, x, y)`` as it is."""
    return kind if callable(kind) else LOSSES[kind]


LOSS_SETTINGS = {"mean": {}, "sum": {"loss_reduction": "sum"}, "masked": {"weight_fn": masked_count}}


def shuffled(rank, batch_size, dataset, **kwargs):
    """The loader of a training; others take the same arguments."""
    return DataLoader(dataset, batch_size, shuffle=True, **kwargs)


def accelerate_loop(
    rank,
    plugin,
    batch_size,
    *,
    epochs=2,
    accumulate=1,
    clip=None,
    loss="mean",
    plans=None,
    workers=0,
    loader=None,
    save=None,
    resume=None,
    scheduled=True,
    another=False,
    **kwargs,
):
    """Accelerate; also a schedule, and what ``gather_for_metrics`` returns. ``another``: a further training follows."""
    from accelerate.utils import set_seed

    from lightning_hetero import BatchPlan
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    dtype = torch.float32 if "mixed_precision" in kwargs else torch.float64
    accelerator = HeteroAccelerator(
        cpu=True, hetero_plugin=HeteroPlugin(**plugin), gradient_accumulation_steps=accumulate, **kwargs
    )
    dataset = Points(SAMPLES, dtype=dtype)
    model = network(dtype)
    set_seed(3 if resume is None else 4)  # a run that goes on may be started with another seed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    loader = (loader or shuffled)(rank, batch_size, dataset, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen, grads, metrics, steps, norms = [], [], [], 0, []
    first, skipped = 0, None
    if resume is not None:
        accelerator.load_state(resume)
        first, skipped = accelerator.hetero_session.position[0], accelerator.skip_first_batches(loader)
    for epoch in range(first, epochs):
        for batch in loader if skipped is None else skipped:
            x, y, index = batch
            step = accelerator.hetero_session.position[1] - 1
            counted = accelerator.hetero_session.engine.own_size
            seen.append((epoch, step, index[:counted].tolist()))
            with accelerator.accumulate(model):
                output = model(x)
                accelerator.backward(loss_of(loss)(output, x, y))
                if accelerator.sync_gradients:
                    grads.append(flat_grads(model))
                if clip is not None and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                if scheduled:
                    scheduler.step()
                optimizer.zero_grad()
            metrics.append(accelerator.gather_for_metrics(index).tolist())
            if plans and (epoch, step) in plans:
                accelerator.adopt(BatchPlan(sum(plans[epoch, step]), plans[epoch, step]))
            steps += 1
            if save is not None and steps in save:
                accelerator.save_state(save[steps])
        skipped = None
    result = {
        "weights": flat(model),
        "grads": np.stack(grads),
        "seen": seen,
        "metrics": metrics,
        "norms": norms,
        "lr": scheduler.get_last_lr()[0],
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in accelerator.plan_history],
        "rows": [e.rows for e in accelerator.plan_history],
    }
    if not another:
        accelerator.end_training()
    return result


def fabric_loop(
    rank,
    settings,
    batch_size,
    *,
    world_size,
    epochs=2,
    accumulate=1,
    clip=None,
    loss="mean",
    plans=None,
    loader=None,
    save=None,
    resume=None,
    another=False,
    **kwargs,
):
    """Fabric, with its own way to accumulate."""
    from lightning.fabric import Fabric

    from lightning_hetero import BatchPlan
    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=HeteroDDPStrategy(**settings), **kwargs)
    fabric.launch()
    model = network(torch.float32 if "precision" in kwargs else torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    dtype = torch.float32 if "precision" in kwargs else torch.float64
    loader = fabric.setup_dataloaders((loader or shuffled)(rank, batch_size, Points(SAMPLES, dtype=dtype)))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    if resume is not None:
        fabric.load(resume, state)
    session, seen, grads, steps = fabric.strategy.session, [], [], 0
    for epoch in range(state["epoch"], epochs):
        for x, y, index in loader:
            step = session.position[1] - 1
            seen.append((epoch, step, index[: session.engine.own_size].tolist()))
            final = (step + 1) % accumulate == 0 or step + 1 == len(loader)
            with fabric.no_backward_sync(model, enabled=not final):
                fabric.backward(loss_of(loss)(model(x), x, y) / accumulate)
            if final:
                grads.append(flat_grads(model))
                if clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
            if plans and (epoch, step) in plans:
                fabric.strategy.adopt(BatchPlan(sum(plans[epoch, step]), plans[epoch, step]))
            steps += 1
            if save is not None and steps in save:
                fabric.save(save[steps], {**state, "epoch": epoch})
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in fabric.strategy.plan_history]
    result = {"weights": flat(model), "grads": np.stack(grads), "seen": seen, "history": history}
    result["rows"] = [e.rows for e in fabric.strategy.plan_history]
    fabric.strategy.teardown()
    return result


def lightning_loop(
    rank,
    settings,
    batch_size,
    *,
    world_size,
    epochs=2,
    accumulate=1,
    clip=None,
    loss="mean",
    plans=None,
    loader=None,
    save=None,
    resume=None,
    another=False,
    **kwargs,
):
    """Lightning's Trainer."""
    from lightning_hetero import HeteroDDPStrategy

    model = Planned(plans or {}, save or {}, loss)
    trainer = trainer_of(
        HeteroDDPStrategy(**settings) if isinstance(settings, dict) else settings,
        world_size,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        **kwargs,
    )
    return _fitted(rank, trainer, model, batch_size, loader, resume)


def sharded_loop(
    rank, settings, batch_size, *, world_size, epochs=2, accumulate=1, clip=None, loss="mean", plans=None, loader=None,
    save=None, resume=None, another=False,
):  # fmt: skip
    """Lightning's Trainer and a model of which each rank has a part."""
    from lightning_hetero import HeteroFSDPStrategy

    model = PlannedShards(plans or {}, save or {}, loss)
    settings_of_trainer = {"max_epochs": epochs, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    trainer = trainer_of(HeteroFSDPStrategy(**settings), world_size, **settings_of_trainer)
    return _fitted(rank, trainer, model, batch_size, loader, resume)


def _fitted(rank, trainer, model, batch_size, loader, resume):
    trainer.fit(model, (loader or shuffled)(rank, batch_size, Points(SAMPLES)), ckpt_path=resume)
    plans = getattr(trainer.strategy, "plan_history", ())  # elastic averaging has none
    return {
        "weights": model.flat(),
        "grads": np.stack([g.numpy() for g in model.grads]) if model.grads else np.zeros((0, 0)),
        "seen": model.seen,
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in plans],
        "rows": [e.rows for e in plans],
        "steps": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


class Planned(Regressor):
    """Adopts plans and saves at given steps."""

    def __init__(self, plans, save, kind):
        super().__init__()
        self.plans, self.save, self.kind, self.steps = plans, save, kind, 0

    def loss(self, batch):
        x, y, _ = batch
        return loss_of(self.kind)(self(x), x, y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        from lightning_hetero import BatchPlan

        self.steps += 1
        sizes = self.plans.get((self.trainer.current_epoch, batch_idx))
        if sizes is not None:
            self.trainer.strategy.adopt(BatchPlan(sum(sizes), sizes))
        if self.steps in self.save:
            self.trainer.save_checkpoint(self.save[self.steps])


def whole(tensor):
    """A sharded tensor of all ranks, a collective call; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Sharded(Regressor):
    """Knows its whole gradients and weights, of which a rank has shards."""

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(torch.cat([whole(p.grad).detach().flatten().clone() for p in self.net.parameters()]))

    def flat(self):
        return torch.cat([whole(p).detach().flatten() for p in self.parameters()]).numpy()


class PlannedShards(Sharded, Planned):
    """Both."""


def plain_loop(
    rank, settings, batch_size, *, world_size, epochs=2, loss="mean", plans=None, clip=None, stream=None, another=False
):
    """Plain torch, as docs/engines.md has it; ``stream`` makes the loader of a stream and says how it is shared."""
    from lightning_hetero import BatchPlan
    from lightning_hetero.comm import gradient_hook
    from lightning_hetero.config import HeteroConfig
    from lightning_hetero.data import PermutationStream, SampleStream
    from lightning_hetero.engine import HeteroEngine
    from lightning_hetero.session import HeteroSession

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config, device = HeteroConfig(**settings), torch.device("cpu")
    engine = HeteroEngine(config, rank=rank, world_size=world_size, device=device, local_rank=rank)
    metrics = []
    session = HeteroSession(engine, on_metrics=metrics.append)
    if stream is None:
        batches = session.shard(PermutationStream(SAMPLES, shuffle=True, seed=0), batch_size=batch_size)
        loader = DataLoader(Points(SAMPLES), batch_sampler=batches)
    else:
        loader = session.shard(SampleStream(stream[0](rank), stream[1]))
    model = DistributedDataParallel(network())
    model.register_comm_hook(engine.hook_state, gradient_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen, grads = [], []
    for epoch in range(epochs):
        for step, (x, y, index) in enumerate(session.steps(lambda: iter(loader))):
            seen.append((epoch, step, index[: engine.own_size].tolist()))
            with engine.backward():
                engine.scale_loss(loss_of(loss)(model(x), x, y)).backward()
            grads.append(flat_grads(model))
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if plans and (epoch, step) in plans:
                engine.adopt(BatchPlan(sum(plans[epoch, step]), plans[epoch, step]), "by hand")
    history = [(e.epoch, e.step, e.plan.local_batch_sizes) for e in engine.plan_history]
    session.close()
    result = {"weights": flat(model), "grads": np.stack(grads), "seen": seen, "history": history}
    return {**result, "metrics": metrics}


def _accelerate(rank, settings, batch_size, *, world_size, **kwargs):
    return accelerate_loop(rank, settings, batch_size, scheduled=False, **kwargs)


FRONT_ENDS = {"lightning": lightning_loop, "fabric": fabric_loop, "accelerate": _accelerate}


def global_batches(results):
    """Samples of all ranks in each step, in order of time."""
    return [sum((r["seen"][i][2] for r in results), []) for i in range(len(results[0]["seen"]))]


def one_process(results, *, accumulate=1, clip=None, loss="mean", schedule=0):
    """The same global batches on one process in plain torch: weights, gradients of each optimizer step, their norms.

    A sum-reduced loss is divided by the number of workers, because DDP averages over them. ``schedule`` is how often
    the schedule moves in each step.
    """
    model = network()
    data = Points(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    batches, epochs = global_batches(results), [epoch for epoch, _, _ in results[0]["seen"]]
    divided = accumulate * (len(results) if loss == "sum" else 1)
    waiting, grads, norms = 0, [], []
    for i, indices in enumerate(batches):
        x, y = data.x[indices], data.y[indices]
        (loss_of(loss)(model(x), x, y) / divided).backward()
        waiting += 1
        last = i + 1 == len(batches) or epochs[i + 1] != epochs[i]
        if waiting < accumulate and not last:
            continue
        grads.append(flat_grads(model))
        norms.append(float(np.linalg.norm(grads[-1])))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(schedule):
            scheduler.step()
        waiting = 0
    return {"weights": flat(model), "grads": np.stack(grads), "norms": norms}


def replay(results, *, schedule=1, **kwargs):
    """Weights of one process; the schedule moves as often as Accelerate's does."""
    return one_process(results, schedule=schedule, **kwargs)["weights"]


def every_sample_once(results, epochs=2):
    for epoch in range(epochs):
        taken = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        np.testing.assert_array_equal(taken, np.arange(SAMPLES))
