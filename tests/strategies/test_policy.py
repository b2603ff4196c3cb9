"""Strategies that are connected by hand, step by step and without a fit, as Lightning's tests of its own ones are."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.callbacks._elastic import ElasticCallback
from tests.helpers import Points, Regressor, run_ranks, trainer_of

CLASSES = (HeteroDDPStrategy, HeteroElasticStrategy)
OWN = {HeteroDDPStrategy: PolicyCallback, HeteroElasticStrategy: ElasticCallback}
NAMES = ("ddp", "hetero_ddp", "hetero_elastic")


class Loaded(Regressor):
    """Has loaders of its own."""

    def train_dataloader(self):
        return DataLoader(Points(16), 4)

    def val_dataloader(self):
        return DataLoader(Points(8), 4)

    def test_dataloader(self):
        return DataLoader(Points(8), 4)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    test_step = validation_step


def connected(strategy, devices=1, model=None, **kwargs):
    """A trainer whose strategy has a module before the module has a trainer."""
    trainer, model = trainer_of(strategy, devices, **kwargs), Loaded() if model is None else model
    trainer.strategy.connect(model)
    return trainer, model


@pytest.mark.parametrize("cls", CLASSES)
def test_the_timeout_goes_to_the_process_group(cls, monkeypatch):
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: met.append((given, named)))
    trainer, model = connected(cls(timeout=timedelta(seconds=30)))
    model.trainer = trainer
    trainer.strategy.setup_environment()
    ((given, named),) = met
    assert given == ("gloo",)
    expected = {"rank": 0, "world_size": 1, "timeout": timedelta(seconds=30)}
    assert {key: named[key] for key in expected} == expected
    assert named.get("device_id") is None  # which only a GPU has


def _wrapped(rank, cls):
    trainer, model = connected(cls())
    trainer.state.fn = TrainerFn.FITTING
    model.trainer = trainer
    trainer.strategy.setup_environment()
    before = trainer.model is model
    own = [isinstance(callback, OWN[cls]) for callback in trainer.callbacks]
    trainer.strategy.setup(trainer)
    fitting = type(trainer.model)
    trainer, model = connected(cls())
    trainer.state.fn = TrainerFn.VALIDATING
    model.trainer = trainer
    trainer.strategy.setup_environment()
    trainer.strategy.setup(trainer)
    return before, own, fitting, trainer.model is model


@pytest.mark.parametrize("cls", CLASSES)
def test_a_model_is_wrapped_for_a_fit_only(cls):
    ((before, own, fitting, plain),) = run_ranks(_wrapped, 1, cls)
    assert before
    assert own[0]  # before all others
    assert sum(own) == 1
    assert issubclass(fitting, DistributedDataParallel) == (cls is HeteroDDPStrategy)
    assert plain


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("fn", "loop"), [(TrainerFn.VALIDATING, "validate_loop"), (TrainerFn.TESTING, "test_loop")])
def test_the_warning_of_repeated_samples_comes_with_several_devices(name, fn, loop):
    trainer, model = connected(name, devices=2)
    trainer._data_connector.attach_data(model)
    trainer.state.fn = fn
    with pytest.warns(UserWarning, match="multi-device settings use `DistributedSampler`"):
        getattr(trainer, loop).setup_data()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_shuffles_if_its_loader_does(name, shuffle):
    class Shuffled(Loaded):
        def val_dataloader(self):
            return DataLoader(Points(64), shuffle=shuffle)

    trainer, model = connected(name, devices=2, model=Shuffled())
    trainer._data_connector.attach_data(model)
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    assert trainer.val_dataloaders.sampler.shuffle == shuffle


@pytest.mark.parametrize("use_distributed_sampler", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_samplers_of_combined_loaders_are_distributed(name, use_distributed_sampler):
    points = Points(10)
    combined = CombinedLoader({"a": DataLoader(points), "b": [DataLoader(points, sampler=RandomSampler(points))]})
    trainer, model = connected(name, devices=2, use_distributed_sampler=use_distributed_sampler)
    trainer._data_connector.attach_data(model, train_dataloaders=combined)
    trainer.fit_loop.setup_data()
    expected = DistributedSampler if use_distributed_sampler else SequentialSampler | RandomSampler
    assert [isinstance(loader.sampler, expected) for loader in combined.flattened] == [True, True]


@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:The 'train_dataloader' does not have many")
@pytest.mark.parametrize("name", ["ddp_spawn", "hetero_ddp_spawn", "hetero_elastic_spawn"])
def test_overfitting_leaves_the_order_of_the_samples(name):
    trainer = trainer_of(name, 2, overfit_batches=1)
    model = Loaded()
    model.trainer = trainer
    trainer.strategy.connect(model)
    trainer._data_connector.attach_dataloaders(model)
    trainer.fit_loop.setup_data()
    assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
    assert trainer.train_dataloader.sampler.shuffle is False


@pytest.mark.parametrize("cls", CLASSES)
def test_a_train_loader_before_the_processes_have_met_is_left_even_and_said_so(cls, caplog, monkeypatch):
    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    trainer, model = connected(cls(), devices=2)
    trainer._data_connector.attach_data(model)
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    given = model.train_dataloader()
    assert trainer.strategy.process_dataloader(given) is given
    assert caplog.text.count("before the processes have met") == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_a_value_can_be_reduced_before_the_processes_have_met(cls):
    value = cls(parallel_devices=[torch.device("cpu")]).reduce(torch.tensor(3))
    assert float(value) == 3.0


@pytest.mark.parametrize("cls", CLASSES)
def test_a_checkpoint_can_be_read_where_nothing_is_set_up(cls, tmp_path):
    """As after a training in processes that were spawned, in the one that spawned them."""
    model = Loaded()
    states = {"optimizer_states": [model.configure_optimizers().state_dict()]}
    trainer, _ = connected(cls(), model=model)
    torch.save({"state_dict": model.state_dict(), **states}, tmp_path / "last.ckpt")
    checkpoint = trainer.strategy.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert set(checkpoint) == {"state_dict", "optimizer_states"}
    trainer.strategy.optimizers = [model.configure_optimizers()]
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    assert trainer.strategy.optimizers[0].state_dict() == states["optimizer_states"][0]


def test_the_accelerator_may_be_the_first_argument_as_that_of_ddp():
    accelerator = CPUAccelerator()
    assert trainer_of(HeteroDDPStrategy(accelerator), 1, accelerator="auto").accelerator is accelerator
