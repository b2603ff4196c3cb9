"""Loss scaling, batch normalisation over ranks, what is refused, and a memory probe whose bound holds in training."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.common import CPU, GPU, ranks
from tests.gpu.outcome import require

FRACTION = 4 * 2**30


def _scaled(rank):
    """16-mixed on two ranks of one GPU; rank 1 overflows once. Scales, weights, and steps that were taken."""
    import lightning as L

    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import Points, Regressor, trainer_of

    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    scales = []

    class Overflows(Regressor):
        def loss(self, batch):
            factor = float("inf") if rank == 1 and self.trainer.fit_loop.total_batch_idx == 3 else 1.0
            return super().loss(batch) * factor

    class Scales(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            scales.append(trainer.precision_plugin.scaler.get_scale())

    strategy = HeteroDDPStrategy(local_batch_sizes=[6, 2], process_group_backend="gloo")
    settings = {"num_nodes": 2, "accelerator": "gpu", "precision": "16-mixed", "max_epochs": 1, "callbacks": [Scales()]}
    model = Overflows(dtype=torch.float32)
    trainer_of(strategy, 1, **settings).fit(model, DataLoader(Points(64, dtype=torch.float32), 4))
    return scales, model.cpu().flat().tolist()


def _normalised(rank, world_size):
    """Gradients of the first step of a model with batch normalisation over all ranks, on unequal batches."""
    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import Points, Regressor, trainer_of

    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))

    class Normalised(Regressor):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).double()

    sizes = {"local_batch_sizes": [6, 2]} if world_size == 2 else {}
    strategy = HeteroDDPStrategy(process_group_backend="gloo", **sizes)
    torch.manual_seed(0)
    model, settings = Normalised(), {"num_nodes": world_size, "accelerator": "gpu", "max_epochs": 1, "max_steps": 3}
    trainer = trainer_of(strategy, 1, sync_batchnorm=True, **settings)
    trainer.fit(model, DataLoader(Points(64), 8 // world_size, shuffle=False))
    return torch.stack([gradient.cpu() for gradient in model.grads]).tolist()


def _probed(rank):
    """The bound that is found in 4 GiB, then 20 steps with AdamW and block top-k at that bound."""
    from lightning_hetero import BlockTopK, HeteroDDPStrategy
    from tests.helpers import Points, Regressor, trainer_of

    torch.cuda.set_per_process_memory_fraction(FRACTION / torch.cuda.get_device_properties(GPU).total_memory)

    class Wide(Regressor):
        """Keeps 4 MiB of activations a sample, and 40 M parameters."""

        def __init__(self):
            super().__init__(dtype=torch.float32)
            self.net = nn.Sequential(nn.Linear(5, 2**20), nn.Tanh(), nn.Linear(2**20, 32), nn.Tanh(), nn.Linear(32, 1))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_before_optimizer_step(self, optimizer):
            """Keep no gradient."""

    found = []
    for probing in (True, False):
        size = 2048 if probing else min(2048, found[0])
        strategy = HeteroDDPStrategy(
            probe_memory=probing,
            compression=None if probing else BlockTopK(density=0.01),
            process_group_backend="nccl",
        )
        if probing:  # the probe leaves room for the compression that the second training has
            strategy = HeteroDDPStrategy(
                probe_memory=True, compression=BlockTopK(density=0.01), process_group_backend="nccl"
            )
        trainer = trainer_of(strategy, 1, accelerator="gpu", max_steps=0 if probing else 20, max_epochs=-1)
        loader = DataLoader(Points(4096, dtype=torch.float32), size, drop_last=True)
        if probing:
            found.append(_bound_of(strategy, trainer, Wide(), loader))
        else:
            trainer.fit(Wide(), loader)
            found.append(torch.cuda.max_memory_reserved() / 2**30)
        torch.cuda.empty_cache()
    return found


def _bound_of(strategy, trainer, model, loader):
    from lightning_hetero.strategies._lightning.probes.memory import largest_training_batch, later_bytes

    reserved = later_bytes(model, strategy.config)
    found = largest_training_batch(model.to(GPU), loader, GPU, limit=2048, reserved=reserved)
    return max(1, int(found * 0.85))


def refusals(device):
    """What would train wrongly is refused when it is made."""
    from lightning_hetero.optim import SparseAdamW, SparseSGD

    for kind in (SparseSGD, SparseAdamW):
        try:
            kind([nn.Parameter(torch.zeros(4, device=device))], lr=0.1, fused=True)
        except (TypeError, ValueError) as error:
            require("fused" in str(error), f"{kind.__name__} refuses fused=True without naming it", {})
        else:
            require(False, f"{kind.__name__} takes fused=True", {})
    return {"fused sparse optimizers": "refused"}


def gpu():
    figures = refusals(GPU)
    (scales, weights), (other_scales, other_weights) = ranks(_scaled, 2)
    halved = sum(after == before / 2 for before, after in zip(scales, scales[1:], strict=False))
    figures["scale halved"] = halved
    require(scales == other_scales and halved == 1, "the loss scale was not halved once on both ranks", figures)
    weights, other_weights = torch.tensor(weights), torch.tensor(other_weights)
    require(bool(torch.isfinite(weights).all()), "weights are not finite", figures)
    figures["replicas apart under loss scaling"] = float((weights - other_weights).abs().max())
    require(figures["replicas apart under loss scaling"] == 0.0, "replicas differ", figures)
    (one,), (two, _) = ranks(_normalised, 1, 1), ranks(_normalised, 2, 2)
    figures["SyncBatchNorm, furthest gradient"] = float((torch.tensor(one) - torch.tensor(two)).abs().max())
    require(figures["SyncBatchNorm, furthest gradient"] < 1e-9, "SyncBatchNorm is not that of one process", figures)
    ((bound, reserved),) = ranks(_probed, 1)
    figures |= {"samples in 4 GiB": bound, "GiB reserved in training": reserved}
    require(1 < bound < 2048, "the probe has found no bound", figures)
    return figures


def stand_in():
    return refusals(CPU)
