"""A fit whose workers are lost where faults say so, and what it must have done nevertheless."""

import json
import os
import signal
import sys
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.comm.gradients.averager import DDPMean
from tests.kept import run_kept
from tests.promises.faults import LinkCut

SAMPLES, LOCAL, SLOTS, EPOCHS = 180, 4, 3, 2
STEPS = EPOCHS * SAMPLES // (LOCAL * SLOTS)
KILL, STOP, CUT, FAIL = signal.SIGKILL, signal.SIGSTOP, "cut", "a call to the others fails"
EXIT, ENDLESS, TERM = "the script exits", "a sum does not end", signal.SIGTERM


class Numbers(Dataset):
    """Inputs that depend on the index alone."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(5, dtype=torch.float64, generator=generator), i


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 1, dtype=torch.float64))


def loss_of(net, x):
    return (net(x).squeeze(1) - x.sum(1).sin()).square().mean()


class EndlessMean(DDPMean):
    """A sum that gloo does not end, as after a connection that ended in the middle of a message."""

    def average(self, *args):
        super().average(*args)
        return torch.futures.Future()


class Suffers(L.LightningModule):
    """Notes the samples of each step that begins, and that it was completed; is lost where the faults say so."""

    def __init__(self, folder, faults):
        super().__init__()
        self.net, self.folder = network(), folder
        self.slot, self.life = (int(os.environ[f"LIGHTNING_HETERO_{name}"]) for name in ("SLOT", "LIFE"))
        self.faults = [fault for fault in faults if fault[:2] == (self.slot, self.life)]
        self.file = open(folder / f"steps-{self.slot}-{self.life}.jsonl", "w")  # noqa: SIM115

    def suffer(self, where):
        due = [fault for fault in self.faults if where == fault[3] and self.trainer.global_step >= fault[2]]
        if not due:
            return
        self.faults.remove(due[0])
        if due[0][4] == CUT:
            LinkCut().strike(None, None)
        elif due[0][4] == EXIT:
            sys.exit(3)
        elif due[0][4] == FAIL:
            raise RuntimeError("gloo: Connection closed by peer")
        elif due[0][4] == ENDLESS:
            self.trainer.strategy.engine.hook_state.use(EndlessMean(self.trainer.world_size))
        else:
            os.kill(os.getpid(), due[0][4])

    def setup(self, stage):
        self.suffer("setup")

    def suffer_joining(self):
        for _, _, generation, where, _ in self.faults:
            if where in JOINING:
                JOINING[where](generation)

    def training_step(self, batch, batch_idx):
        x, indices = batch
        strategy = self.trainer.strategy
        self.note = {
            "step": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
            "indices": indices[: strategy.engine.own_size].tolist(),
            "sizes": strategy.plan.local_batch_sizes,
            "rank": self.global_rank,
            "batch": batch_idx,
            "logged": self.trainer.fit_loop.epoch_loop._batches_that_stepped,
        }
        self.write(self.note)
        self.window.append(batch_idx)
        self.suffer("forward")
        if len(self.window) == 2:
            self.suffer("second batch")
        self.wait_for_newcomers()
        return loss_of(self.net, x)

    def wait_for_newcomers(self):
        """The others train four steps alone before a newcomer may come, and leave the last steps to it."""
        if self.trainer.world_size < SLOTS and self.steps_here >= 4:
            (self.folder / "alone").touch()
        self.steps_here += 1
        until = time.monotonic() + 60
        while (
            self.trainer.estimated_stepping_batches - self.trainer.global_step <= 3
            and self.missing()
            and time.monotonic() < until
        ):
            if self.trainer.strategy._roster.next_is_open:
                return
            time.sleep(0.01)

    def missing(self):
        return len(list(self.folder.glob("expects-*"))) > len(list(self.folder.glob("joined-*")))

    def write(self, note):
        self.file.write(json.dumps(note) + "\n")
        self.file.flush()

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.write({**self.note, "done": self.window})
        self.window = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.suffer("between batches")
        return batch

    def validation_step(self, batch, batch_idx):
        self.suffer("validation")
        self.log("loss", loss_of(self.net, batch[0]), sync_dist=True)

    def on_validation_epoch_end(self):
        path = self.folder / f"validated-{self.slot}-{self.life}"
        path.write_text(path.read_text() + "+" if path.exists() else "+")

    def on_train_start(self):
        self.steps_here, self.window = 0, []
        if self.life:
            (self.folder / f"joined-{self.slot}-{self.life}").touch()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _suffers(where):
    return lambda self, *args, **kwargs: self.suffer(where)


HOOKS = {
    "optimizer": "on_before_optimizer_step",
    "epoch start": "on_train_epoch_start",
    "batch start": "on_train_batch_start",
    "batch end": "on_train_batch_end",
    "epoch end": "on_train_epoch_end",
    "validation start": "on_validation_start",
    "validation end": "on_validation_end",
}
for _where, _name in HOOKS.items():
    setattr(Suffers, _name, _suffers(_where))


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def train(folder, faults, *, arguments=None, late=True, accumulation=1, validates=True, interval=1.0, saves=False):
    """Fit a model that suffers; with ``late``, a newcomer waits until the others have trained without it."""
    model = Suffers(folder, faults)
    model.suffer_joining()
    if model.life and late:
        wait_for(folder / "alone")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=SLOTS,
        plugins=[TorchElasticEnvironment()],
        strategy=HeteroDDPStrategy(**{"replan": 4, **(arguments or {})}),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulation,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
        val_check_interval=interval,
        logger=False,
        enable_checkpointing=saves,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=0, save_last=True)] * saves,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(), batch_size=LOCAL, shuffle=True)
    trainer.fit(model, loader, DataLoader(Numbers(), batch_size=30))
    weights = model.net.state_dict() | moments(trainer.optimizers[0])
    end = {"weights": weights, "step": trainer.global_step, "world": trainer.world_size}
    torch.save(end, folder / f"end-{model.slot}.pt")


def moments(optimizer):
    """What the optimizer keeps of each parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{number} {name}": value for number, kept in state.items() for name, value in kept.items()}


def lose(*args, **kwargs):
    os.kill(os.getpid(), KILL)


def lost_in(name):
    """Return a function that lets this process be lost in a call of torch's, from the given generation on."""

    def strike(first):
        call = getattr(dist, name)

        def lossy(*args, **kwargs):
            return (lose if int(os.environ["LIGHTNING_HETERO_GENERATION"]) >= first else call)(*args, **kwargs)

        setattr(dist, name, lossy)

    return strike


JOINING = {
    "setup": lambda first: None,  # a hook of the module
    "group": lost_in("init_process_group"),
    "steps": lost_in("all_gather_object"),
    "state": lost_in("broadcast_object_list"),
    "control plane": lost_in("new_group"),
}


class Outcome:
    """What a training has left in its folder."""

    def __init__(self, folder):
        self.ends = [torch.load(path, weights_only=True) for path in sorted(folder.glob("end-*.pt"))]
        self.lives, begun, done = set(), {}, {}
        for path in sorted(folder.glob("steps-*.jsonl")):
            notes = [json.loads(line) for line in path.read_text().splitlines()]
            for before, after in pairwise(notes):
                assert after["step"] >= before["step"] + ("done" in before), "no completed step is done again"
            if notes:
                self.lives.add(tuple(map(int, path.stem.split("-")[1:])))
            for note in notes:
                note["sizes"] = tuple(note["sizes"])
                if "done" in note:  # on one rank: then the gradient of all was complete
                    done.setdefault(note["step"], set()).add((note["epoch"], note["sizes"], tuple(note["done"])))
                else:
                    begun.setdefault((note["epoch"], note["batch"], note["sizes"]), {})[note["rank"]] = note
        self.sizes, self.steps, self.batches = {}, {}, {}
        for step, ((epoch, sizes, window),) in done.items():
            self.sizes[step] = sizes
            self.batches[step] = [list(begun[epoch, batch, sizes].values()) for batch in window]
            self.steps[step] = [note for batch in self.batches[step] for note in batch]

    def check(self, steps):
        """Each sample once an epoch, one plan and the whole total in each step, equal replicas, all steps done."""
        for epoch in range(EPOCHS):
            taken = Counter(
                i for notes in self.steps.values() for n in notes if n["epoch"] == epoch for i in n["indices"]
            )
            assert taken == Counter(range(SAMPLES)), epoch
        assert sorted(self.steps) == list(range(steps))
        logged = {step: {note["logged"] for note in notes} for step, notes in self.steps.items()}
        assert logged == {step: {step} for step in self.steps}, "steps of loggers"
        for step, sizes in self.sizes.items():
            assert sum(sizes) == LOCAL * SLOTS, step
            assert all(len(batch) == len(sizes) for batch in self.batches[step]), step
        assert {end["step"] for end in self.ends} == {steps}
        first = self.ends[0]["weights"]
        for end in self.ends[1:]:
            assert all(torch.equal(first[name], end["weights"][name]) for name in first)

    def worlds(self):
        return {len(sizes) for sizes in self.sizes.values()}

    def alone(self):
        """Weights of one process that trains on the same samples in each step, by plain torch."""
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        data = Numbers()
        for step in sorted(self.batches):
            optimizer.zero_grad()
            for batch in self.batches[step]:
                indices = sorted(i for note in batch for i in note["indices"])
                loss = loss_of(net, torch.stack([data[i][0] for i in indices]))
                (loss / len(self.batches[step])).backward()
            optimizer.step()
        return net.state_dict() | moments(optimizer)

    def difference(self):
        """Largest difference from them."""
        alone = self.alone()
        return max(float((self.ends[0]["weights"][name] - alone[name]).abs().max()) for name in alone)


def outcome(folder, faults, *, rejoin=True, restarts=9, silence=5.0, accumulation=1, **given):
    """Train with faults; the last steps are left to the newcomers, unless nobody is to ``rejoin``."""
    joining = [where in JOINING for _, _, _, where, _ in faults]
    for number in range(rejoin * (len(lost(faults)) - sum(joining))):
        (folder / f"expects-{number}").touch()
    function = partial(train, folder, faults, accumulation=accumulation, **given)
    assert run_kept(function, SLOTS, restarts=restarts, silence=silence) == [0] * SLOTS
    found = Outcome(folder)
    found.check(STEPS // accumulation)
    return found


def lost(faults):
    """Faults by which a worker is lost; the others only end what it is doing."""
    return [fault for fault in faults if fault[4] in (KILL, STOP, EXIT)]


def lives_of(faults):
    return {(slot, 0) for slot in range(SLOTS)} | {(slot, life + 1) for slot, life, *_ in lost(faults)}
