"""Workers are lost and come during a fit: the others go on at once, with the same total and the same mathematics."""

import inspect
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.callbacks.base import policy_states
from lightning_hetero.comm.gradients.averager import DDPMean
from lightning_hetero.comm.membership.members import TrainingOverError
from lightning_hetero.comm.membership.state_transfer import WorkerState
from lightning_hetero.config import HeteroConfig
from lightning_hetero.strategies._checkpoints.residuals import KEY
from lightning_hetero.strategies._lightning.membership import launcher
from lightning_hetero.strategies._lightning.membership.launcher import PEERS
from lightning_hetero.strategies._lightning.membership.strategy import STALE, MembershipMixin, config_of_members
from tests.faults.faults import LinkCut
from tests.kept import run_kept

SAMPLES, LOCAL, SLOTS, EPOCHS = 180, 4, 3, 2
STEPS = EPOCHS * SAMPLES // (LOCAL * SLOTS)


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

    def on_before_optimizer_step(self, optimizer):
        self.suffer("optimizer")

    def on_train_epoch_start(self):
        self.suffer("epoch start")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.suffer("between batches")
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        self.suffer("batch start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.suffer("batch end")

    def on_train_epoch_end(self):
        self.suffer("epoch end")

    def on_validation_start(self):
        self.suffer("validation start")

    def on_validation_end(self):
        self.suffer("validation end")

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


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def train(folder, faults, arguments, late, accumulation=1, validates=True, validation_interval=1.0, saves=False):
    model = Suffers(folder, faults)
    model.suffer_joining()
    if model.life and late:
        wait_for(folder / "alone")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=SLOTS,
        plugins=[TorchElasticEnvironment()],
        strategy=HeteroDDPStrategy(**{"replan": 4, **arguments}),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulation,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
        val_check_interval=validation_interval,
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
    end["prefixes"] = prefixes_of_errors()
    torch.save(end, folder / f"end-{model.slot}.pt")


def moments(optimizer):
    """What the optimizer keeps of each parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{number} {name}": value for number, kept in state.items() for name, value in kept.items()}


def prefixes_of_errors():
    """How often torch puts a rank before each line of an uncaught error."""
    hook, count = sys.excepthook, 0
    while hook.__name__ == "_distributed_excepthook":
        hook, count = inspect.getclosurevars(hook).nonlocals["old_hook"], count + 1
    return count


class GivesAddress(dist.Store):
    """Store of a process that is lost when the others know its address, and have no connection to it yet."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, *args):
        lose()


def lose(*args, **kwargs):
    os.kill(os.getpid(), KILL)


def connect(*args, store, make=dist.init_process_group, **kwargs):
    make(*args, store=GivesAddress(store), **kwargs)


def lost_in(name, what=lose):
    """Return a function that lets this process be lost in a call of torch's, from the given generation on."""

    def strike(first):
        call = getattr(dist, name)

        def lossy(*args, **kwargs):
            return (what if int(os.environ["LIGHTNING_HETERO_GENERATION"]) >= first else call)(*args, **kwargs)

        setattr(dist, name, lossy)

    return strike


JOINING = {
    "group": lost_in("init_process_group"),
    "connection": lost_in("init_process_group", connect),
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
        assert {end["prefixes"] for end in self.ends} == {1}
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


def outcome(
    folder,
    faults,
    *,
    rejoin=True,
    arguments=None,
    late=True,
    accumulation=1,
    validates=True,
    validation_interval=1.0,
    **kwargs,
):
    if rejoin:
        for slot, life, *_ in faults:
            (folder / f"expects-{slot}-{life}").touch()
    given = (folder, faults, arguments or {}, late, accumulation, validates, validation_interval)
    assert run_kept(train, SLOTS, *given, **kwargs) == [0] * SLOTS
    found = Outcome(folder)
    found.check(STEPS // accumulation)
    return found


KILL, STOP, CUT, FAIL = signal.SIGKILL, signal.SIGSTOP, "cut", "a call to the others fails"
EXIT, ENDLESS = "the script exits", "a sum does not end"


def lives_of(faults):
    return {(slot, 0) for slot in range(SLOTS)} | {(slot, life + 1) for slot, life, *_ in faults}


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_the_others_go_on_and_a_newcomer_joins(tmp_path, lost, where):
    faults = [(lost, 0, 6, where, KILL)]
    found = outcome(tmp_path, faults)
    assert found.lives == lives_of(faults), "nobody else was started again"
    assert found.worlds() == {SLOTS - 1, SLOTS}
    assert found.difference() < 1e-12


def test_a_script_that_exits_in_training_is_lost_like_any_other(tmp_path):
    faults = [(1, 0, 6, "forward", EXIT)]
    found = outcome(tmp_path, faults)
    assert found.lives == lives_of(faults)
    assert found.difference() < 1e-12


HOOKS = ["epoch start", "between batches", "batch start", "forward", "optimizer", "batch end", "epoch end"]
VALIDATION_HOOKS = ["validation start", "validation", "validation end"]
PLACES = [(where, True) for where in HOOKS + VALIDATION_HOOKS] + [(where, False) for where in HOOKS]


@pytest.mark.parametrize(("where", "validates"), PLACES)
def test_a_worker_is_lost_between_two_epochs(tmp_path, where, validates):
    found = outcome(tmp_path, [(0, 0, STEPS // EPOCHS, where, KILL)], validates=validates)
    assert found.difference() < 1e-12


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("where", "validates"), PLACES)
@pytest.mark.parametrize("first", [True, False])
def test_links_fail_between_two_epochs(tmp_path, where, validates, first, accumulation):
    """All fail in the same place, in the last step of the first epoch, or after it, and once more in the second."""
    step = STEPS // EPOCHS // accumulation - (not first)
    faults = [(slot, 0, *fault, FAIL) for slot in range(SLOTS) for fault in ((step, where), (step + 2, "forward"))]
    given = {"validates": validates, "accumulation": accumulation, "validation_interval": 1 / accumulation}
    found = outcome(tmp_path, faults, rejoin=False, **given)
    assert found.lives == {(slot, 0) for slot in range(SLOTS)}
    assert found.difference() < 1e-12


@pytest.mark.parametrize("where", VALIDATION_HOOKS)
def test_links_fail_in_a_validation_inside_a_step(tmp_path, where):
    """It follows the second of three batches, which are all done again, and the validation with them."""
    faults = [(slot, 0, 1, where, FAIL) for slot in range(SLOTS)]
    found = outcome(tmp_path, faults, rejoin=False, accumulation=3, validation_interval=1 / 3)
    assert found.difference() < 1e-12
    for slot in range(SLOTS):
        assert (tmp_path / f"validated-{slot}-0").read_text() in ("+" * 6, "+" * 7), "three an epoch, one maybe again"


def test_links_fail_between_the_batches_behind_a_validation(tmp_path):
    faults = [(slot, 0, 5, "between batches", FAIL) for slot in range(SLOTS)]
    found = outcome(tmp_path, faults, rejoin=False, validation_interval=1 / 3)
    assert found.difference() < 1e-12
    for slot in range(SLOTS):
        assert (tmp_path / f"validated-{slot}-0").read_text() == "+" * 6, "none is repeated, and none left out"


@pytest.mark.parametrize("where", HOOKS)
def test_links_fail_again_and_a_worker_is_lost(tmp_path, where):
    """What Lightning counts is right also behind a batch that has failed."""
    first = [(slot, 0, 6, "forward", FAIL) for slot in range(SLOTS)]
    faults = [*first, (2, 0, 9, where, KILL), *((slot, 0, 9, where, FAIL) for slot in range(SLOTS - 1))]
    (tmp_path / "expects-2-0").touch()
    found = outcome(tmp_path, faults, rejoin=False)
    assert found.lives == lives_of([(2, 0)])
    assert found.difference() < 1e-12


def test_a_newcomer_that_comes_at_once_is_there_before_the_next_step(tmp_path):
    faults = [(1, 0, 6, "forward", KILL)]
    found = outcome(tmp_path, faults, late=False)
    assert found.lives == lives_of(faults)
    assert found.difference() < 1e-12


def test_a_stopped_worker_is_replaced(tmp_path):
    faults = [(1, 0, 6, "forward", STOP)]
    found = outcome(tmp_path, faults, silence=1.0)
    assert found.lives == lives_of(faults)
    assert found.difference() < 1e-12


@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_links_are_cut_and_nobody_is_lost(tmp_path, where):
    found = outcome(tmp_path, [(1, 0, 6, where, CUT)], rejoin=False)
    assert found.lives == {(slot, 0) for slot in range(SLOTS)}, "nobody was started again"
    assert found.worlds() == {SLOTS}
    assert found.difference() < 1e-12


def test_who_waits_for_a_sum_that_gloo_does_not_end_goes_on(tmp_path):
    (tmp_path / "expects-2-0").touch()
    found = outcome(tmp_path, [(1, 0, 6, "forward", ENDLESS), (2, 0, 6, "forward", KILL)], rejoin=False)
    assert found.lives == lives_of([(2, 0)]), "it was not started again"
    assert found.difference() < 1e-12


def test_links_are_cut_again_before_a_step(tmp_path):
    faults = [(1, 0, 6, "forward", CUT)] * (launcher.MEETINGS + 1)
    found = outcome(tmp_path, faults, rejoin=False)
    assert found.lives == {(slot, 0) for slot in range(SLOTS)}, "nobody was started again"
    assert found.difference() < 1e-12


def test_links_that_are_cut_again_and_again_before_a_step_are_an_error(tmp_path, monkeypatch):
    """No group gets a step further, so that the workers would meet for ever."""
    monkeypatch.setattr(launcher, "PATIENCE_S", 1.0)
    faults = [(1, 0, 6, "forward", CUT)] * (launcher.MEETINGS + 2)
    run_kept(train, SLOTS, tmp_path, faults, {}, False, restarts=0)
    assert len(list(tmp_path.glob("end-*.pt"))) < SLOTS


@pytest.mark.parametrize("mode", ["plain", "block top-k"])
def test_a_newcomer_is_lost_while_the_others_set_up_the_training_with_it(tmp_path, mode):
    faults = [(1, 0, 6, "forward", KILL), (1, 1, 0, "setup", KILL)]
    (tmp_path / "expects-1").touch()  # the second newcomer
    found = outcome(tmp_path, faults, rejoin=False, arguments=MODES.get(mode))
    assert {life for life in found.lives if life[0] != 1} == {(0, 0), (2, 0)}, "the others kept their state"
    assert mode != "plain" or found.difference() < 1e-12


@pytest.mark.parametrize(
    "deaths",
    [
        [(1, 1, 0, "group")],
        [(1, 1, 0, "connection")],
        [(1, 1, 0, "steps"), (1, 2, 0, "state"), (1, 3, 0, "control plane"), (1, 4, 0, "forward")],
        [(1, 1, 0, "state"), (0, 0, 2, "state")],
    ],
    ids=["before the group", "connecting", "one after another", "two at once"],
)
def test_nobody_else_ends_when_workers_are_lost_while_they_join(tmp_path, deaths):
    """The others go on from their own state, wherever a newcomer is lost, and another worker with it."""
    faults = [(1, 0, 6, "forward", KILL), *((*death, KILL) for death in deaths)]
    for number in range(sum(where == "forward" for *_, where, _ in faults)):
        (tmp_path / f"expects-{number}").touch()
    found = outcome(tmp_path, faults, rejoin=False, restarts=len(faults))
    others = set(range(SLOTS)) - {slot for slot, *_ in faults}
    assert {life for life in found.lives if life[0] in others} == {(slot, 0) for slot in others}
    assert SLOTS in found.worlds()
    assert found.difference() < 1e-12


def test_two_are_lost_at_once_and_one_again(tmp_path):
    faults = [(0, 0, 6, "forward", KILL), (2, 0, 6, "forward", KILL), (2, 1, 14, "forward", KILL)]
    found = outcome(tmp_path, faults)
    assert found.lives == lives_of(faults)
    assert 1 in found.worlds()
    assert found.difference() < 1e-12


def test_all_are_lost_at_once_and_begin_anew(tmp_path):
    """Nobody is left who has a state: the fit starts over, as after a restart by the launcher."""
    faults = [(slot, 0, 6, "forward", KILL) for slot in range(SLOTS)]
    assert run_kept(train, SLOTS, tmp_path, faults, {}, False) == [0] * SLOTS
    for path in tmp_path.glob("steps-*-0.jsonl"):
        path.unlink()
    found = Outcome(tmp_path)
    found.check(STEPS)
    assert found.worlds() == {SLOTS}
    assert found.difference() < 1e-12


def test_all_are_lost_at_once_and_go_on_from_the_newest_checkpoint(tmp_path):
    faults = [(slot, 0, 7, "forward", KILL) for slot in range(SLOTS)]
    assert run_kept(partial(train, saves=True), SLOTS, tmp_path, faults, {}, False) == [0] * SLOTS
    for path in tmp_path.glob("steps-*-1.jsonl"):
        assert json.loads(path.read_text().partition("\n")[0])["step"] == 6
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "saved" / "last.ckpt", weights_only=False)["global_step"] == STEPS


def train_without_the_disk_of_the_others(folder, faults):
    """The first life saves; in the second one, a worker does not see the file."""
    exists = os.path.exists
    if os.environ["LIGHTNING_HETERO_SLOT"] == "1":
        os.path.exists = lambda path: exists(path) and "saved" not in str(path)
    train(folder, faults, {}, False, saves=True)


def test_a_checkpoint_that_not_all_workers_see_is_not_taken(tmp_path):
    faults = [(slot, 0, 7, "forward", KILL) for slot in range(SLOTS)]
    assert run_kept(train_without_the_disk_of_the_others, SLOTS, tmp_path, faults) == [0] * SLOTS
    begun = [path.read_text().partition("\n")[0] for path in tmp_path.glob("steps-*-1.jsonl")]
    assert [json.loads(one)["step"] for one in begun] == [0] * SLOTS


def train_twice(folder, faults):
    for name, suffered in (("first", []), ("second", faults)):
        (folder / name).mkdir(exist_ok=True)
        train(folder / name, suffered, {}, False, saves=True)


def test_all_are_lost_in_a_second_fit_and_go_on_from_its_newest_checkpoint(tmp_path):
    faults = [(slot, 0, 7, "forward", KILL) for slot in range(SLOTS)]
    assert run_kept(train_twice, SLOTS, tmp_path, faults) == [0] * SLOTS
    begun = [path.read_text().partition("\n")[0] for path in tmp_path.glob("*/steps-*-1.jsonl")]
    assert [json.loads(one)["step"] for one in begun if one] == [6] * SLOTS, "the first fit was over"


def test_lost_in_validation(tmp_path):
    faults = [(1, 0, STEPS // EPOCHS, "validation", KILL)]
    found = outcome(tmp_path, faults)
    ended = len((tmp_path / "validated-0-0").read_text())
    assert ended >= EPOCHS, "the validation that has failed runs again"
    assert found.lives == lives_of(faults)
    assert found.difference() < 1e-12


def test_lost_inside_an_accumulated_step(tmp_path):
    """The whole step is done again, with the batches whose gradients are gone."""
    faults = [(2, 0, 2, "second batch", KILL)]
    found = outcome(tmp_path, faults, accumulation=3)
    assert found.lives == lives_of(faults)
    assert found.worlds() == {SLOTS - 1, SLOTS}
    assert found.difference() < 1e-12


def test_lost_too_often_the_others_end_without_it(tmp_path):
    faults = [(1, life, 6, "forward", KILL) for life in range(3)]
    found = outcome(tmp_path, faults, rejoin=False, late=False, restarts=2)
    assert found.worlds() >= {SLOTS - 1}
    assert len(found.ends) == SLOTS - 1
    assert found.difference() < 1e-12


MODES = {
    "block top-k": {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)},
    "powersgd": {"compression": "powersgd"},
    "stale": {"staleness": 1},
    "stale blocks": {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2), "staleness": 1},
    "hierarchy": {"hierarchy": [[0, 1], [2]]},
    "fixed": {"local_batch_sizes": [6, 4, 2]},
    "bounds": {"max_local_batch_sizes": [8, 8, 8]},
    "pid": {"policy": "pid"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on(tmp_path, mode):
    faults = [(0, 0, 6, "forward", KILL)]
    found = outcome(tmp_path, faults, arguments=MODES[mode])
    assert found.lives == lives_of(faults)
    assert found.worlds() == {SLOTS - 1, SLOTS}
    if mode in ("hierarchy", "fixed", "bounds", "pid"):
        assert found.difference() < 1e-12


def _stream(folder):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (Numbers()[i] for i in range(SAMPLES))

    model = Suffers(folder, [])
    model.note, model.training_step = None, lambda batch, batch_idx: _dies_in_batch(model, batch, batch_idx)
    model.optimizer_step = lambda *args, **kwargs: L.LightningModule.optimizer_step(model, *args, **kwargs)
    _trainer(HeteroDDPStrategy()).fit(model, DataLoader(Stream(), batch_size=LOCAL))


def _dies_in_batch(model, batch, batch_idx):
    if (model.slot, model.life, batch_idx) == (1, 0, 3):
        os.kill(os.getpid(), KILL)
    return loss_of(model.net, batch[0])


def _trainer(strategy, **kwargs):
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="cpu",
        devices=SLOTS,
        plugins=kwargs.pop("plugins", [TorchElasticEnvironment()]),
        strategy=strategy,
        max_epochs=1,
        enable_model_summary=False,
        **quiet,
    )


def told(folder, function, *arguments, restarts=0):
    """Exit codes, and what workers have written when they ended with an error."""
    codes = run_kept(_tells, SLOTS, folder, function, arguments, restarts=restarts)
    return codes, [path.read_text() for path in sorted(folder.glob("error-*"))]


def _tells(folder, function, arguments):
    try:
        function(folder, *arguments)
    except BaseException as error:
        name = f"error-{os.environ['LIGHTNING_HETERO_SLOT']}-{os.environ['LIGHTNING_HETERO_LIFE']}"
        (folder / name).write_text(f"{type(error).__name__}: {error}")
        raise


def test_data_that_cannot_be_split_anew_ends_with_an_error(tmp_path):
    codes, errors = told(tmp_path, _stream)
    assert all(codes)
    assert len(errors) == SLOTS - 1
    assert all(
        error.startswith("MembershipError: a worker is lost, and the others cannot take over") for error in errors
    )


def _with_strategy(folder, name, kwargs):
    _trainer(name, **kwargs).fit(Suffers(folder, []), DataLoader(Numbers(), batch_size=LOCAL))


@pytest.mark.parametrize("name", ["hetero_elastic", "hetero_fsdp"])
def test_other_strategies_refuse_a_keeper(tmp_path, name):
    codes, errors = told(tmp_path, _with_strategy, name, {})
    assert all(codes)
    assert len(errors) == SLOTS
    assert all("which works with Trainer(strategy='hetero_ddp') only" in error for error in errors)


def test_ranks_that_are_not_torchruns_are_refused(tmp_path):
    codes, errors = told(tmp_path, _with_strategy, "hetero_ddp", {"plugins": [LightningEnvironment()]})
    assert all(codes)
    assert all(
        "the keeper needs ranks that torchrun gives, and these are from LightningEnvironment" in e for e in errors
    )
    assert len(errors) == SLOTS


def test_a_backend_whose_calls_do_not_end_is_refused(tmp_path):
    codes, errors = told(tmp_path, _with_strategy, HeteroDDPStrategy(process_group_backend="nccl"), {})
    assert all(codes)
    assert all("the keeper needs process_group_backend='gloo', and this one is 'nccl'" in error for error in errors)
    assert len(errors) == SLOTS


def _fits_twice(folder):
    model = Suffers(folder, [])
    model.faults = []
    for number in range(2):
        if number and (model.slot, model.life) == (1, 0):
            model.faults = [(1, 0, 4, "forward", KILL)]
        _trainer(HeteroDDPStrategy(replan=4)).fit(model, DataLoader(Numbers(), batch_size=LOCAL))
    (folder / f"fitted-{model.slot}").touch()


def _averages_weights(folder):
    trainer = _trainer(HeteroDDPStrategy())
    trainer.callbacks.append(StochasticWeightAveraging(0.1))
    trainer.fit(Suffers(folder, []), DataLoader(Numbers(), batch_size=LOCAL))


def test_a_callback_that_cannot_begin_twice_is_refused(tmp_path):
    codes, errors = told(tmp_path, _averages_weights)
    assert all(codes)
    assert all("StochasticWeightAveraging cannot begin twice in a process" in error for error in errors)
    assert len(errors) == SLOTS


class Adversaries(L.LightningModule):
    """Trains two networks in turn, each with the other frozen, as Lightning's examples of GANs do."""

    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
        self.automatic_optimization, self.folder = False, folder
        self.slot, self.life = (int(os.environ[f"LIGHTNING_HETERO_{name}"]) for name in ("SLOT", "LIFE"))

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = self.second(self.first(batch[0]).tanh()).square().mean()
            if (self.slot, self.life, batch_idx, number) == (1, 0, 5, 1):
                os.kill(os.getpid(), KILL)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


def _adversaries(folder):
    model = Adversaries(folder)
    trainer = _trainer(HeteroDDPStrategy(find_unused_parameters=True))
    trainer.fit(model, DataLoader(Numbers(), batch_size=LOCAL))
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.save(model.state_dict(), folder / f"end-{model.slot}.pt")


def test_toggled_optimizers_of_a_lost_step_are_untoggled(tmp_path):
    codes, errors = told(tmp_path, _adversaries, restarts=1)
    assert codes == [0, 0, 0]
    assert set(errors) <= {"SystemExit: 0"}, "at most, the newcomer is late"
    ends = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("end-*.pt"))]
    assert all(torch.equal(end[name], ends[0][name]) for end in ends for name in end)


def _told_while_others_are_lost(folder):
    model = Suffers(folder, [])
    if (model.slot, model.life) == (1, 0):
        model.faults = [(1, 0, 4, "forward", KILL)]
    if (model.slot, model.life) == (2, 0):
        model.faults = [(2, 0, 4, "forward", signal.SIGTERM)]
    _trainer(HeteroDDPStrategy(replan=4)).fit(model, DataLoader(Numbers(), batch_size=LOCAL))
    (folder / f"fitted-{model.slot}").touch()


def test_a_signal_is_not_forgotten_when_a_worker_is_lost(tmp_path):
    told(tmp_path, _told_while_others_are_lost, restarts=1)
    assert not list(tmp_path.glob("fitted-*")), "training was told to end"


def test_in_a_second_fit_the_others_go_on_and_nobody_joins(tmp_path):
    codes, errors = told(tmp_path, _fits_twice, restarts=1)
    assert {path.name for path in tmp_path.glob("fitted-*")} == {"fitted-0", "fitted-2"}
    assert not (tmp_path / "steps-1-1.jsonl").read_text(), "a newcomer is in the first fit of its script"
    assert codes == [0, 0, 0]
    assert all("can be replaced in the first fit only" in error or error == "SystemExit: 0" for error in errors)


def _signalled(folder):
    model = Suffers(folder, [])
    model.faults = [(1, 0, 4, "forward", signal.SIGTERM)] if model.slot == 1 else []
    try:
        _trainer(HeteroDDPStrategy(replan=4)).fit(model, DataLoader(Numbers(), batch_size=LOCAL))
    finally:
        (folder / f"stopped-{model.slot}-{model.life}").write_text(str(model.trainer.global_step))


def test_sigterm_ends_all_and_nothing_starts_again(tmp_path):
    codes, _ = told(tmp_path, _signalled, restarts=3)
    assert {path.name for path in tmp_path.glob("stopped-*")} == {f"stopped-{slot}-0" for slot in range(SLOTS)}
    assert len({path.read_text() for path in tmp_path.glob("stopped-*")}) == 1, "all stop before the same batch"
    assert codes == [0, 0, 0]


# the launcher and the settings alone, in this process

LOST = "gloo: Connection closed by peer"


class Meets(launcher.MembershipLauncher):
    """Launcher of workers that meet at once, or whose meetings fail; notes what it brings along, and what it says."""

    def __init__(self, function="fit", failing=()):
        self.said, self.brought, self.failing = [], [], failing
        say = self.said.append
        roster = SimpleNamespace(generation=0, rank=0, changes=lambda patience: False, noted=lambda what: None)
        roster.begin_fit, roster.finish = (lambda: say("begins")), (lambda: say("is over"))
        outlive = lambda trainer: f"state of {len(self.brought)}"  # noqa: E731
        strategy = SimpleNamespace(has_stepped=lambda: True, outlive_members=outlive)
        super().__init__(SimpleNamespace(launch=self.launch_alone), strategy, roster)
        self.trainer = SimpleNamespace(state=SimpleNamespace(fn=function), callbacks=[])

    def launch_alone(self, function, *args, trainer):
        self.said.append("alone")
        return function(*args)

    def _join(self, brought):
        self.brought.append(brought)
        if len(self.brought) in self.failing:
            raise RuntimeError(LOST)

    def fit(self, *errors):
        """Launch a fit that fails with these errors, one after another, and then ends well."""
        left = list(errors)

        def fits():
            if left:
                raise left.pop(0)
            return "done"

        return self.launch(fits, trainer=self.trainer)


def test_what_a_worker_brings_along_stays_if_others_are_lost_while_they_meet():
    meets = Meets(failing=(2, 3))
    assert meets.fit(RuntimeError(LOST)) == "done"
    assert meets.brought == [None, "state of 1", "state of 1", "state of 1"]
    assert meets.said == ["begins", "is over"]


@pytest.mark.parametrize("error", [ValueError("a bug of the user's"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_an_error_of_the_users_ends_the_fit(error):
    meets = Meets()
    with pytest.raises(type(error)):
        meets.fit(error)
    assert meets.brought == [None]
    assert meets.said == ["begins"], "its keeper starts the worker again"


def test_an_error_that_comes_from_a_lost_connection_is_one():
    error, outer = ValueError("could not log"), RuntimeError("hook failed")
    error.__context__ = RuntimeError(LOST)
    outer.__cause__ = RuntimeError(LOST)
    assert Meets().fit(error, outer) == "done"


def test_who_is_told_to_end_says_that_the_training_is_over():
    meets = Meets()
    with pytest.raises(SIGTERMException):
        meets.fit(SIGTERMException())
    assert meets.said == ["begins", "is over"]


def test_a_script_that_exits_says_nothing_for_the_others():
    meets = Meets()
    with pytest.raises(SystemExit):
        meets.fit(SystemExit(3))
    assert meets.said == ["begins"]


def test_only_a_fit_goes_on_without_lost_workers():
    meets = Meets("validate")
    assert meets.fit() == "done"
    assert meets.said == ["alone"]


def test_the_script_of_a_worker_that_comes_after_the_end_ends_in_peace(caplog, monkeypatch):
    def meet():
        raise TrainingOverError("nothing is left to do")

    monkeypatch.setattr(launcher.log, "propagate", True)
    roster = SimpleNamespace(generation=None, begin_fit=lambda: None, meet=meet)
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), callbacks=[])
    with pytest.raises(SystemExit) as end:
        launcher.MembershipLauncher(None, None, roster).launch(lambda: None, trainer=trainer)
    assert end.value.code == 0
    assert caplog.messages == ["nothing is left to do"]


def test_stale_gradients_in_flight_are_those_of_the_source_on_all_workers():
    """A worker that kept its own checkpoint may have got more of the messages in which another was lost."""
    checkpoint = {"callbacks": {"HeteroPolicy": {"policy": {}, "engine": {STALE: "its own", "steps": 3}}}}
    strategy = HeteroDDPStrategy(staleness=1)
    strategy.go_on_from(WorkerState((1, 0, 0, 0), 0, checkpoint, {STALE: "the source's"}))
    (found,) = policy_states(strategy.load_checkpoint(PEERS))
    assert found["engine"] == {STALE: "the source's", "steps": 3}


def test_deferred_updates_are_applied_before_a_module_may_copy_its_weights():
    done = []

    def dump_checkpoint(weights_only):
        done.append("dump")
        raise LookupError

    optimizers = SimpleNamespace(flush=lambda: done.append("flush"))
    engine = SimpleNamespace(
        compression=SimpleNamespace(optimizers=optimizers, state_dict_of_rank=dict),
        hook_state=SimpleNamespace(stale_state=dict),
    )
    trainer = SimpleNamespace(_checkpoint_connector=SimpleNamespace(dump_checkpoint=dump_checkpoint))
    with pytest.raises(LookupError):
        MembershipMixin._state_of(SimpleNamespace(_roster=object()), trainer, engine)
    assert done == ["flush", "dump"]


def test_settings_with_an_entry_for_each_worker_are_those_of_the_members():
    given = HeteroConfig(max_local_batch_sizes=[8, 4, 2, 1], hierarchy=[[0], [1, 2], [3]])
    found = config_of_members(given, [1, 2, 3])
    assert found.max_local_batch_sizes == (4, 2, 1)
    assert found.hierarchy == ((0, 1), (2,))
    given = HeteroConfig(local_batch_sizes=[4, 2, 2], local_batch_multiple=2)
    assert config_of_members(given, [0, 2]).local_batch_sizes == (6, 2)


def test_evaluation_data_are_split_among_the_members(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(SLOTS - 1))
    devices, environment = [torch.device("cpu")] * SLOTS, TorchElasticEnvironment()
    strategy = HeteroDDPStrategy(parallel_devices=devices, cluster_environment=environment)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": SLOTS - 1, "rank": 1}


def test_what_was_not_sent_is_put_back_once_although_the_set_up_fails():
    asked, residuals = [], {"weights": torch.ones(2)}
    strategy = HeteroDDPStrategy()
    compression = SimpleNamespace(checkpoint=SimpleNamespace(topology=SimpleNamespace(clusters=None)))
    strategy.engine = SimpleNamespace(world_size=2, compression=compression)
    strategy._state = WorkerState((1, 6), 0, {}, {KEY: {}}, lambda again: asked.append(again) or residuals)
    for _ in range(2):
        checkpoint = MembershipMixin.load_checkpoint(strategy, launcher.PEERS)
        assert checkpoint[KEY]["ranks"] == [{"residuals": residuals}] * 2
    assert asked == [True]
