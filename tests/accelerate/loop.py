"""A training loop of Accelerate's as users write it, and its replay on one process."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points

SAMPLES = 70  # ragged: no total below divides it


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def train(
    rank,
    plugin,
    batch_size,
    *,
    epochs=2,
    accumulate=1,
    clip=None,
    plans=None,
    workers=0,
    save=None,
    resume=None,
    **kwargs,
):
    """Train on this rank; ``plans`` maps (epoch, step) to sizes to adopt, ``save`` a step of all to a folder."""
    from accelerate.utils import set_seed

    from lightning_hetero import BatchPlan
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    set_seed(3)
    dtype = torch.float32 if "mixed_precision" in kwargs else torch.float64
    accelerator = HeteroAccelerator(
        cpu=True, hetero_plugin=HeteroPlugin(**plugin), gradient_accumulation_steps=accumulate, **kwargs
    )
    dataset = Points(SAMPLES, dtype=dtype)
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen, metrics, steps, norms = [], [], 0, []
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
                accelerator.backward(nn.functional.mse_loss(output, y))
                if clip is not None and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
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
        "seen": seen,
        "metrics": metrics,
        "norms": norms,
        "lr": scheduler.get_last_lr()[0],
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in accelerator.plan_history],
    }
    accelerator.end_training()
    return result


def global_batches(results):
    """Samples of all ranks in each step, in order of time."""
    return [sum((r["seen"][i][2] for r in results), []) for i in range(len(results[0]["seen"]))]


def replay(results, *, accumulate=1, clip=None, lr=0.05, schedule=1):
    """The same global batches on one process in plain torch; the schedule steps as often as Accelerate does."""
    model = network()
    data = Points(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    batches, epochs = global_batches(results), [epoch for epoch, _, _ in results[0]["seen"]]
    waiting = 0
    for i, indices in enumerate(batches):
        loss = nn.functional.mse_loss(model(data.x[indices]), data.y[indices])
        (loss / accumulate).backward()
        waiting += 1
        last = i + 1 == len(batches) or epochs[i + 1] != epochs[i]
        if waiting < accumulate and not last:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(schedule):
            scheduler.step()
        waiting = 0
    return flat(model)


def every_sample_once(results, epochs=2):
    for epoch in range(epochs):
        taken = sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)
        np.testing.assert_array_equal(taken, np.arange(SAMPLES))
