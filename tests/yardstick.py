"""Train 60 configurations with this tree and with a wheel of an earlier commit: is everything the same?

A rebuilt room may not change what users get. Each configuration trains on two ranks for 20 steps in float64; weights,
sizes and order of samples have to be equal (weights to 1e-12), and so do the errors of those that are refused::

    python tests/yardstick.py            # builds the wheel once, then runs all configurations under both
    python tests/yardstick.py --only accelerate

The wheel is built from the history of this repository into ``build/yardstick``, and is not committed.
"""

import argparse
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "yardstick"
COMMIT = "4861109f"
STEPS, ROWS, SIZES = 20, 76, (5, 3)  # two epochs of ten steps; the last of each has four samples
PLANS = {3: (2, 6), 9: (6, 2), 14: (1, 7)}
"""Sizes that are adopted after so many steps."""

Row = namedtuple("Row", "front_end data mode settings options")

MODES = {
    "fixed": ({}, {}),
    "plans": ({"local_batch_sizes": None}, {"plans": PLANS}),
    "even": ({"local_batch_sizes": None, "policy": "even"}, {}),
    "accumulate": ({}, {"accumulate": 3}),
    "clip": ({}, {"clip": 0.1}),
    "sum": ({"loss_reduction": "sum"}, {"loss": "sum"}),
    "masked": ({"weight_fn": "count"}, {"loss": "masked"}),
    "block_topk": ({"compression": "block_topk(density=0.2, block=8)"}, {}),
    "powersgd": ({"compression": "powersgd"}, {}),
    "bf16": ({"compression": "bf16"}, {}),
    "hierarchy": ({"hierarchy": [[0], [1]]}, {}),
    "resume": ({}, {"resume": 7}),
    "refused": ({"local_batch_sizes": (5, 0, 3)}, {}),
}
DATA = ("batches", "batch_sampler", "mine", "whole", "cost")
"""Besides ``map``, which all modes have."""


def rows():
    """Return the configurations by name."""
    found = []
    for front_end in ("lightning", "fabric", "accelerate"):
        found += [Row(front_end, "map", mode, *MODES[mode]) for mode in MODES]
        found += [Row(front_end, data, "fixed", *MODES["fixed"]) for data in DATA]
    found += [Row("transformers", "map", mode, *MODES[mode]) for mode in ("fixed", "accumulate", "block_topk")]
    sparse = {"compression": "block_topk(density=0.2, block=8)", "sparse_optimizer": True}
    found += [
        Row("lightning", "map", "sparse", sparse, {}),
        Row("lightning", "map", "stale", {"staleness": 1, "replan": 8}, {}),
        Row("fsdp", "map", "fixed", {}, {}),
    ]
    return {f"{row.front_end}-{row.data}-{row.mode}": row for row in found}


def data_of(row, rank):  # noqa: C901 - a table of kinds
    """Return a loader of the kind of data, and the settings that it needs."""
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    chance = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, generator=chance, dtype=torch.float64)
    y = torch.randn(ROWS, 1, generator=chance, dtype=torch.float64)

    class Points(Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, i):
            return x[i], y[i], i

    class Batches(Dataset):
        def __len__(self):
            return ROWS // 4

        def __getitem__(self, i):
            own = torch.arange(4 * i, 4 * i + 4)
            return x[own], y[own], own

    class Stream(IterableDataset):
        def __iter__(self):
            own = range(ROWS) if row.data == "whole" else range(rank * ROWS // 2, (rank + 1) * ROWS // 2)
            return ((x[i], y[i], i) for i in own)

    class Sampler:
        def __iter__(self):
            return iter([list(range(first, first + 4)) for first in range(0, ROWS, 4)])

        def __len__(self):
            return ROWS // 4

    if row.data == "batches":
        return DataLoader(Batches(), batch_size=None), {}
    if row.data == "batch_sampler":
        return DataLoader(Points(), batch_sampler=Sampler()), {}
    if row.data in ("mine", "whole"):
        return DataLoader(Stream(), 4), {"shard": row.data}
    settings = {"cost_fn": lambda sample: 1.0 + sample[2] % 5} if row.data == "cost" else {}
    return DataLoader(Points(), 4, shuffle=True), settings


def train(rank, row, folder):
    """Train one configuration on this rank; weights, and the indices of each batch."""
    import torch
    from torch import nn

    def network():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def loss_of(output, x, y):
        kind = row.options.get("loss", "mean")
        if kind == "masked":
            keep = (x[:, :1] > 0).double()
            return ((output - y).square() * keep).sum() / keep.sum().clamp(min=1.0)
        return nn.functional.mse_loss(output, y, reduction=kind) * (0.02 if kind == "sum" else 1.0)

    loader, needed = data_of(row, rank)
    settings = {"local_batch_sizes": SIZES, "report": False, **needed, **row.settings}
    if "weight_fn" in settings:
        settings["weight_fn"] = lambda batch: (batch[0][:, 0] > 0).sum()
    torch.manual_seed(3)
    loops = {"fabric": fabric, "accelerate": accelerate, "transformers": trainer}
    loop, seen = loops.get(row.front_end, lightning), []
    if stop := row.options.get("resume"):
        loop(row, settings, network, loader, loss_of, seen, stop, save=folder)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    weights = loop(row, settings, network, loader, loss_of, seen, STEPS, load=folder if stop else None)
    return weights.double().numpy(), seen


def flat(model):
    import torch

    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()]).cpu()


def adopted(row, step, adopt):
    from lightning_hetero import BatchPlan

    if sizes := row.options.get("plans", {}).get(step):
        adopt(BatchPlan(sum(sizes), sizes))


def lightning(row, settings, network, loader, loss_of, seen, stop, save=None, load=None):
    import lightning as L
    import torch

    from lightning_hetero import HeteroDDPStrategy, HeteroFSDPStrategy

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            x, y, index = batch
            seen.append(index.tolist())
            return loss_of(self.net(x), x, y)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            adopted(row, len(seen), self.trainer.strategy.adopt)
            if save and len(seen) == stop:
                self.trainer.save_checkpoint(f"{save}/lightning.ckpt")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        def configure_model(self):
            if row.front_end == "fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh)

    strategy = (HeteroFSDPStrategy if row.front_end == "fsdp" else HeteroDDPStrategy)(**settings)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    accumulate = row.options.get("accumulate", 1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, limit_train_batches=None,
        max_steps=stop if save else -1, accumulate_grad_batches=accumulate,
        gradient_clip_val=row.options.get("clip"), **dict.fromkeys(quiet, False),
    )  # fmt: skip
    model = Module()
    trainer.fit(model, loader, ckpt_path=load and f"{load}/lightning.ckpt")
    return flat(model)


def fabric(row, settings, network, loader, loss_of, seen, stop, save=None, load=None):
    import torch
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    run = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**settings))
    run.launch()
    model = network()
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = run.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
    if load:
        run.load(f"{load}/fabric.ckpt", state)
    every, clip = row.options.get("accumulate", 1), row.options.get("clip")
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        for x, y, index in loader:
            seen.append(index.tolist())
            final = len(seen) % every == 0
            with run.no_backward_sync(model, enabled=not final):
                run.backward(loss_of(model(x), x, y) / every)
            if final:
                if clip:
                    run.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
            adopted(row, len(seen), run.strategy.adopt)
            if len(seen) == stop and save:
                run.save(f"{save}/fabric.ckpt", state)
                run.strategy.teardown()
                return None
    weights = flat(model)
    run.strategy.teardown()
    return weights


def accelerate(row, settings, network, loader, loss_of, seen, stop, save=None, load=None):
    import torch
    from accelerate.state import AcceleratorState

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    every, clip = row.options.get("accumulate", 1), row.options.get("clip")
    run = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings), gradient_accumulation_steps=every)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    first, passes = 0, None
    if load:
        run.load_state(f"{load}/state")
        first, passes = run.hetero_session.position[0], run.skip_first_batches(loader)
    for _ in range(first, 2):
        for x, y, index in passes or loader:
            seen.append(index.tolist())
            with run.accumulate(model):
                run.backward(loss_of(model(x), x, y))
                if clip and run.sync_gradients:
                    run.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            adopted(row, len(seen), run.adopt)
            if len(seen) == stop and save:
                run.save_state(f"{save}/state")
                run.end_training()
                AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
                return None
        passes = None
    weights = flat(model)
    run.end_training()
    return weights


def trainer(row, settings, network, loader, loss_of, seen, stop, save=None, load=None):
    import torch

    from lightning_hetero.transformers import HeteroTrainer, HeteroTrainingArguments

    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, i):
            return dict(zip(("x", "y", "index"), loader.dataset[i], strict=True))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, y, index):
            seen.append(index.tolist())
            return {"loss": loss_of(self.net(x), x, y)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = HeteroTrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=4, save_strategy="no", report_to=[], use_cpu=True,
            gradient_accumulation_steps=row.options.get("accumulate", 1), remove_unused_columns=False,
            disable_tqdm=True, learning_rate=0.05, optim="sgd", max_grad_norm=0.0,
            **{f"hetero_{name}": value if isinstance(value, (bool, str)) else ",".join(map(str, value))
               for name, value in settings.items() if name != "report"},
        )  # fmt: skip
        run = HeteroTrainer(model=Model(), args=arguments, train_dataset=Named())
        run.train()
        return flat(run.model)


# both trees


def rank_of(rank, row, folder, port, pipe):
    import torch

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        result = train(rank, row, folder)
    except Exception as error:  # noqa: BLE001
        result = type(error).__name__, str(error)
    pipe.send_bytes(pickle.dumps(result))
    pipe.recv_bytes()
    os._exit(isinstance(result[0], str))


def run(names, out):
    """Run configurations in this interpreter, and write what came of them."""
    import lightning_hetero.transformers  # noqa: F401 - once, before the forks

    found, context = {"package": lightning_hetero.__file__}, multiprocessing.get_context("fork")
    for name in names:
        with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            s.close()
            pipes = [context.Pipe() for _ in range(2)]
            ranks = [
                context.Process(target=rank_of, args=(rank, rows()[name], folder, port, pipe))
                for rank, (_, pipe) in enumerate(pipes)
            ]
            for one in ranks:
                one.start()
            results = [pickle.loads(ours.recv_bytes()) if ours.poll(60) else ("TimeoutError", "") for ours, _ in pipes]
            for (ours, _), one in zip(pipes, ranks, strict=True):
                ours.send_bytes(b"all are done")
                one.join(10)
                one.kill()
        found[name] = results, [one.exitcode for one in ranks]
    Path(out).write_bytes(pickle.dumps(found))


def build():
    """Build the wheel of the earlier commit, and unpack it; return its folder."""
    site = PLACE / COMMIT
    if not site.exists():
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
            wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(PLACE), "."]
            subprocess.run(wheel, cwd=folder, check=True)
        (found,) = PLACE.glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "-t", str(site), str(found)], check=True)
        found.rename(PLACE / f"{COMMIT}.{found.name}")
    return site


def differences(name, old, new):
    """Say how two runs of a configuration differ, in one sentence each."""
    import numpy as np

    (before, codes), (after, now) = old, new
    if codes != now:
        yield f"exit codes {codes} -> {now}: {[one[:2] if isinstance(one[0], str) else '' for one in after]}"
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        if isinstance(one[0], str) or isinstance(other[0], str):
            kinds = [side[0] if isinstance(side[0], str) else "trained" for side in (one, other)]
            if kinds[0] != kinds[1]:
                yield f"rank {rank}: {kinds[0]} -> {kinds[1]}"
            continue
        sizes = [[len(indices) for indices in side[1]] for side in (one, other)]
        if sizes[0] != sizes[1]:
            yield f"rank {rank}: sizes {sizes[0]} -> {sizes[1]}"
        elif one[1] != other[1]:
            step = next(i for i, pair in enumerate(zip(one[1], other[1], strict=True)) if pair[0] != pair[1])
            yield f"rank {rank}: samples of step {step}: {one[1][step]} -> {other[1][step]}"
        if one[0].shape != other[0].shape or not np.allclose(one[0], other[0], rtol=1e-12, atol=1e-12):
            yield f"rank {rank}: weights differ by {np.abs(one[0] - other[0]).max():.1e}"


def main():
    """Run both trees and compare them; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose names contain this")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [name for name in rows() if options.only in name]
    if options.run:
        run(names, options.run)
        return
    sides, results = {"old": build(), "new": ROOT}, {}
    for side, place in sides.items():
        out = PLACE / f"{side}.pickle"
        variables = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-P", __file__, "--only", options.only, "--run", str(out)]
        with (PLACE / f"{side}.log").open("w") as log:
            subprocess.run(command, env=variables, check=True, stdout=log, stderr=log, cwd=PLACE)
        results[side] = pickle.loads(out.read_bytes())
        if not Path(results[side].pop("package")).is_relative_to(place):
            raise SystemExit(f"the {side} package was not imported from {place}")
    wrong = 0
    for name in names:
        found = list(differences(name, results["old"][name], results["new"][name]))
        outcome = results["new"][name][0][0]
        steps = outcome[0] if isinstance(outcome[0], str) else f"{len(outcome[1])} steps"
        print(f"{name:32} {'; '.join(found) or f'equal ({steps})'}")
        wrong += bool(found)
    print(f"{len(names) - wrong} of {len(names)} configurations are equal to those of {COMMIT}")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
