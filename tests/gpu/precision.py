"""Loss scaling, batch normalisation over ranks, and a memory probe whose bound holds in training."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.common import noted, place, ranks
from tests.helpers import Points, Regressor, trainer_of

MEMORY = 4 * 2**30


class Unseen(Regressor):
    """Keeps no gradient."""

    def on_before_optimizer_step(self, optimizer):
        pass


def _overflow(rank, device):
    """Two ranks, of which one overflows once: scales of the loss, where there are any, and the weights."""
    from lightning_hetero import HeteroDDPStrategy

    scales, real = [], device.type == "cuda"

    class Overflows(Unseen):
        def loss(self, batch):
            factor = float("inf") if rank == 1 and self.trainer.fit_loop.total_batch_idx == 3 else 1.0
            return super().loss(batch) * factor

    class Scales(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if real:
                scales.append(trainer.precision_plugin.scaler.get_scale())

    own = {} if real else {"on_nonfinite": "skip"}  # a scaler is for GPUs
    strategy = HeteroDDPStrategy(local_batch_sizes=[6, 2], process_group_backend="gloo", report=False, **own)
    model, kind = Overflows(dtype=torch.float32), "16-mixed" if real else "32-true"
    trainer = trainer_of(strategy, 1, max_epochs=1, precision=kind, callbacks=[Scales()], **place(rank, 2, device))
    trainer.fit(model, DataLoader(Points(64, dtype=torch.float32), 4))
    return scales, model.cpu().flat().tolist()


def _normalised(rank, device, world_size):
    """Gradients of some steps of a model with normalisation, on unequal batches; over the samples of all ranks."""
    from lightning_hetero import HeteroDDPStrategy

    class Normalised(Regressor):
        def __init__(self):
            super().__init__()
            norm = nn.BatchNorm1d(7) if device.type == "cuda" else nn.LayerNorm(7)  # SyncBatchNorm is for GPUs
            self.net = nn.Sequential(nn.Linear(5, 7), norm, nn.Tanh(), nn.Linear(7, 1)).double()

    sizes = {"local_batch_sizes": [6, 2]} if world_size == 2 else {}
    strategy = HeteroDDPStrategy(process_group_backend="gloo", report=False, **sizes)
    torch.manual_seed(0)
    model, where = Normalised(), place(rank, world_size, device)
    trainer = trainer_of(strategy, 1, max_epochs=1, max_steps=3, sync_batchnorm=device.type == "cuda", **where)
    trainer.fit(model, DataLoader(Points(64), 8 // world_size, shuffle=False))
    return torch.stack([gradient.cpu() for gradient in model.grads])


def _probed(rank, device, compression, width, limit):
    """The bound that is found by trial in 4 GiB, and GiB reserved by steps there; on a CPU nothing is tried."""
    from lightning_hetero import HeteroDDPStrategy
    from lightning_hetero.strategies._lightning.probes.memory import largest_training_batch, later_bytes

    real = device.type == "cuda"

    class Wide(Unseen):
        """Keeps 8 bytes of activations for each sample and unit."""

        def __init__(self):
            super().__init__(dtype=torch.float32)
            self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    where, kind = place(rank, 1, device), "nccl" if real else "gloo"
    strategy = HeteroDDPStrategy(compression=compression, process_group_backend=kind, report=False)
    points, size = Points(limit, dtype=torch.float32), limit
    if real:
        torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(device).total_memory)
        model = Wide().to(device)
        later = later_bytes(model, strategy.config)
        found = largest_training_batch(model, DataLoader(points, 4), device, limit=limit, reserved=later)
        size = max(1, int(0.85 * found))
        del model
        torch.cuda.empty_cache()
    trainer = trainer_of(strategy, 1, max_steps=6, max_epochs=-1, **where)
    trainer.fit(Wide(), DataLoader(points, size, drop_last=True))
    return size, torch.cuda.max_memory_reserved() / 2**30 if real else 0.0


def precision(figures, device):
    from lightning_hetero import BlockTopK

    real = device.type == "cuda"
    with noted(figures, "an overflow"):
        (scales, weights), (other_scales, other_weights) = ranks(_overflow, 2, device)
        halved = sum(after == before / 2 for before, after in zip(scales, scales[1:], strict=False))
        figures["loss scale halved"] = halved
        figures.must(scales == other_scales and halved == real, f"the loss scale was halved {halved} times")
        figures.must(weights == other_weights, "replicas differ after an overflow")
        figures.must(bool(torch.isfinite(torch.tensor(weights)).all()), "weights are not finite")
    with noted(figures, "SyncBatchNorm"):
        (one,), (two, _) = ranks(_normalised, 1, device, 1), ranks(_normalised, 2, device, 2)
        apart = figures["SyncBatchNorm: furthest gradient"] = float((one - two).abs().max())
        figures.must(apart < 1e-9, "normalised gradients are not those of one process")
    for name, compression in {"dense": None, "block top-k": BlockTopK(density=0.01)}.items():
        with noted(figures, f"memory probe, {name}"):
            ((size, reserved),) = ranks(_probed, 1, device, compression, *((2**20, 2048) if real else (64, 4)))
            figures.add({"samples": size, "GiB reserved": reserved}, f"probe in 4 GiB, {name}")
            figures.must(not real or 1 < size < 2048, "the probe has found no bound")
