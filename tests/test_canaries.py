"""Names of Lightning, Accelerate, Transformers and torch that are not public, and that the package relies on.

Each is there and acts as used. When a new version of a dependency changes one of them, its test fails here, by a name
that says what is gone, before fits fail for reasons that are hard to find.
"""

import importlib
import inspect
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.frontend.loaders import stream_of, with_batch_sampler
from lightning_hetero.strategies._lightning.resumption import resume_position
from tests.helpers import Points
from tests.ranks import run_ranks

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=NAMESPACES)
def pl(request):
    return pytest.importorskip(request.param)


def submodule(pl, name):
    return importlib.import_module(f"{pl.__name__}.{name}")


def module_of(pl):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(5, 1).double()

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("train", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fitted(pl, callback=None, loader=None, **kwargs):
    """A short fit on one process with plain Lightning."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(off, False), **kwargs}
    trainer = pl.Trainer(callbacks=[callback] if callback else [], **settings)
    trainer.fit(module_of(pl), DataLoader(Points(8), 2) if loader is None else loader)
    return trainer


def watch(pl, hook, look):
    """A callback that calls ``look(trainer)`` at a hook, once."""
    seen = []

    def call(self, trainer, *args, **kwargs):
        if not seen:
            seen.append(look(trainer))

    return type("Watch", (pl.Callback,), {hook: call})(), seen


# the length of an epoch


def test_an_epoch_ends_when_a_callback_says_so(pl):
    """What elastic averaging does: the number of batches is not known before, the last one is told at its end."""
    batches, validated = [], []

    class Ends(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches.append((trainer.current_epoch, batch_idx))
            self.tell(trainer, False)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.tell(trainer, True)
                trainer.val_check_batch = 1

        def on_validation_start(self, trainer, pl_module):
            validated.append(batches[-1])

        def tell(self, trainer, last):
            loop = trainer.fit_loop
            loop.max_batches = loop.epoch_loop.batch_progress.current.ready if last else float("inf")
            loop.epoch_loop.batch_progress.is_last_batch = last
            loop._data_fetcher.done, loop._data_fetcher.length = last, sys.maxsize
            trainer.val_check_batch = sys.maxsize

    trainer = pl.Trainer(callbacks=[Ends()], accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, **QUIET)
    module = module_of(pl)
    type(module).validation_step = lambda self, batch, batch_idx: None
    trainer.fit(module, DataLoader(Points(8), 2), DataLoader(Points(2), 2))
    assert batches == [(e, i) for e in range(2) for i in range(3)]
    assert validated == [(0, 2), (1, 2)]


def test_the_signal_to_end_is_broadcast_in_every_batch(pl):
    loop = submodule(pl, "loops.training_epoch_loop")._TrainingEpochLoop
    if hasattr(loop, "_broadcast_sigterm_tensor"):  # from 2.6 on
        assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)


def test_the_handler_of_sigterm_is_found_by_its_name(pl):
    callback, seen = watch(pl, "on_train_start", lambda trainer: signal.getsignal(signal.SIGTERM).signal_handlers)
    trainer = fitted(pl, callback)
    assert "_sigterm_notifier_fn" in [handler.__name__ for handler in seen[0]]
    assert trainer._signal_connector.received_sigterm is False


def test_checkpoints_and_timers_say_when_they_act(pl):
    assert pl.callbacks.ModelCheckpoint(every_n_train_steps=3)._every_n_train_steps == 3
    assert pl.callbacks.ModelCheckpoint()._every_n_train_steps == 0
    assert pl.callbacks.Timer()._interval.endswith("step")


def test_the_jobs_store_counts():
    assert run_ranks(_count, 2) == [[1, 3], [1, 3]]


def _count(rank):
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    own = store.add(f"own{rank}", 1)
    store.add("common", rank + 1)
    dist.barrier()
    found = [own, int(store.add("common", 0))]
    dist.barrier()
    return found


def test_limits_and_max_batches_say_how_long_an_epoch_is(pl):
    """Both are lowered in the first epoch to two batches; the second epoch then has two."""
    batches = []

    class Shortens(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                combined = trainer.fit_loop._combined_loader
                assert [type(loader) for loader in combined.flattened] == [DataLoader]
                assert combined.limits == [4]
                assert trainer.fit_loop.max_batches == 4
                combined.limits = [2]
                trainer.fit_loop.max_batches = 2

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches.append((trainer.current_epoch, batch_idx))

    fitted(pl, Shortens(), max_epochs=2)
    assert batches == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_parse_num_batches(pl):
    connector = submodule(pl, "trainer.connectors.data_connector")
    stage = submodule(pl, "trainer.states").RunningStage.TRAINING
    cases = {(10, 1.0): 10, (10, 4): 4, (10, 0.5): 5, (3, 8): 3}
    for (length, limit), expected in cases.items():
        assert connector._parse_num_batches(stage, length, limit) == expected


def test_val_check_batch_is_a_share_of_the_epoch(pl):
    callback, seen = watch(pl, "on_train_start", lambda trainer: (trainer.val_check_interval, trainer.val_check_batch))
    fitted(pl, callback, val_check_interval=0.5)
    assert seen == [(0.5, 2)]


def test_stage_is_compared_with_its_name(pl):
    callback, seen = watch(pl, "on_train_start", lambda trainer: trainer.state.stage == "train")
    fitted(pl, callback)
    assert seen == [True]


def test_number_of_epochs_that_are_done(pl):
    callback, seen = watch(
        pl, "on_train_epoch_start", lambda trainer: trainer.fit_loop.epoch_progress.current.processed
    )
    trainer = fitted(pl, callback)
    assert [*seen, trainer.fit_loop.epoch_progress.current.processed] == [0, 1]


def test_steps_that_loggers_count(pl):
    trainer = fitted(pl, accumulate_grad_batches=2, max_epochs=2)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 4


def test_batch_size_of_logged_means_can_be_set_before_a_step(pl):
    """A batch that is said to have no samples does not count in the mean of an epoch."""
    values = []

    class Weightless(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert trainer._results is trainer.fit_loop.epoch_loop._results
            if batch_idx == 1:
                trainer._results.batch_size = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            values.append(float(outputs["loss"]))

    trainer = fitted(pl, Weightless(), DataLoader(Points(4), 2))
    assert float(trainer.callback_metrics["train"]) == pytest.approx(values[0], rel=1e-6)


# checkpoints


@pytest.mark.parametrize(
    ("step", "expected"), [(1, (0, 1)), (3, (0, 3)), (4, (1, 0)), (6, (1, 2)), (8, (2, 0))], ids=str
)
def test_checkpoint_says_where_the_data_goes_on(pl, tmp_path, step, expected):

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    fitted(pl, Saves(), max_epochs=2)
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert {"epoch_progress", "epoch_loop.batch_progress"} <= set(checkpoint["loops"]["fit_loop"])
    assert resume_position(checkpoint) == expected


def test_loader_with_a_state_counts_as_stateful(pl):
    stateful = submodule(pl, "utilities.combined_loader")._Stateful
    loader = DataLoader(Points(4), 2)
    assert not isinstance(loader, stateful)
    loader.state_dict, loader.load_state_dict = dict, lambda state: None
    assert isinstance(loader, stateful)


# strategy and precision


def test_attributes_of_the_ddp_strategy(pl):
    timeout, state = object(), object()
    strategy = pl.strategies.DDPStrategy(
        timeout=timeout, ddp_comm_state=state, ddp_comm_hook=len, ddp_comm_wrapper=repr
    )
    assert strategy._timeout is timeout
    assert strategy._ddp_comm_state is state
    assert (strategy._ddp_comm_hook, strategy._ddp_comm_wrapper) == (len, repr)


def _hooks_on_cpu(rank, name):
    pl, wrapped = importlib.import_module(name), []

    class Looks(pl.strategies.DDPStrategy):
        def configure_ddp(self):
            wrapped.append(isinstance(self.model, DistributedDataParallel))
            super().configure_ddp()

        def _register_ddp_hooks(self):
            wrapped.append(isinstance(self.model, DistributedDataParallel))

    fitted(pl, strategy=Looks())
    return wrapped


@pytest.mark.parametrize("name", NAMESPACES)
def test_hooks_are_registered_by_a_method_that_runs_on_every_device(name):
    """Called by ``configure_ddp`` once the module is wrapped."""
    pytest.importorskip(name)
    assert run_ranks(_hooks_on_cpu, 1, name) == [[False, True]]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("connect", ["self", "model"]),
        ("setup_environment", ["self"]),
        ("configure_ddp", ["self"]),
        ("_register_ddp_hooks", ["self"]),
        ("process_dataloader", ["self", "dataloader"]),
        ("on_train_start", ["self"]),
        ("on_train_batch_start", ["self", "batch", "batch_idx"]),
        ("backward", ["self", "closure_loss", "optimizer", "args", "kwargs"]),
        ("optimizer_step", ["self", "optimizer", "closure", "model", "kwargs"]),
        ("reduce", ["self", "tensor", "group", "reduce_op"]),
        ("barrier", ["self", "args", "kwargs"]),
    ],
)
def test_methods_that_the_strategy_extends(pl, method, parameters):
    found = list(inspect.signature(getattr(pl.strategies.DDPStrategy, method)).parameters)
    assert found == parameters


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("setup_environment", ["self"]),
        ("setup", ["self", "trainer"]),
        ("block_backward_sync", ["self"]),
        ("lightning_module_state_dict", ["self"]),
        ("set_world_ranks", ["self"]),
    ],
)
def test_methods_that_the_strategy_of_sharded_models_extends(pl, method, parameters):
    found = list(inspect.signature(getattr(pl.strategies.ModelParallelStrategy, method)).parameters)
    assert found == parameters


def test_sizes_of_the_mesh_of_sharded_models(pl):
    """What ``setup_environment`` makes the mesh of; ``configure_model`` of an instance counts as one of the class."""
    given = vars(pl.strategies.ModelParallelStrategy(data_parallel_size=3))
    assert (given["_data_parallel_size"], given["_tensor_parallel_size"]) == (3, "auto")
    assert given["_device_mesh"] is None
    module = module_of(pl)
    overrides = submodule(pl, "utilities.model_helpers").is_overridden
    assert not overrides("configure_model", module)
    vars(module)["configure_model"] = lambda: None
    assert overrides("configure_model", module)


def test_loader_of_the_training_data_before_it_is_set_up(pl):
    callback, seen = watch(pl, "setup", lambda trainer: type(trainer.fit_loop._data_source.dataloader()).__name__)
    fitted(pl, callback)
    assert seen == ["DataLoader"]


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precision_plugin_converts_and_wraps(pl, precision, dtype):
    plugin = pl.Trainer(accelerator="cpu", devices=1, precision=precision, logger=False).precision_plugin
    assert plugin.convert_input([torch.zeros(1)])[0].dtype == dtype
    with plugin.train_step_context():
        assert torch.zeros(1).dtype == dtype


def test_progress_bars_show_what_get_metrics_returns(pl):
    """An attribute of the instance takes the place of the method, and leaves with ``del``."""

    class Bar(pl.callbacks.ProgressBar):
        def disable(self):
            pass

        def enable(self):
            pass

    callback, seen = watch(pl, "on_train_start", lambda trainer: trainer.progress_bar_callback)
    bar = Bar()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[bar, callback], **off)
    trainer.fit(module_of(pl), DataLoader(Points(8), 2))
    assert seen == [bar]
    for name in ("RichProgressBar", "TQDMProgressBar"):
        source = inspect.getsource(getattr(pl.callbacks, name))
        assert "self.get_metrics(trainer, pl_module)" in source


# samplers and loaders


def test_loaders_are_asked_for_and_prepared_by_methods_of_the_trainers_own_objects(pl):
    """An attribute of each object takes the place of its method."""
    asked = []

    def replace(trainer):
        source, connector = trainer.fit_loop._data_source, trainer._data_connector
        request, prepare = source.dataloader, connector._prepare_dataloader

        def requested():
            asked.append("request")
            return request()

        def prepared(dataloader, shuffle, mode):
            asked.append((type(dataloader).__name__, getattr(mode, "value", mode)))
            return prepare(dataloader, shuffle, mode)

        source.dataloader, connector._prepare_dataloader = requested, prepared

    callback, _ = watch(pl, "setup", replace)
    module = module_of(pl)
    type(module).training_step = lambda self, batch, batch_idx: self.net(batch[0][0]).mean()
    trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    trainer.fit(module, [DataLoader(Points(8), 2), DataLoader(Points(4), 2)])
    assert asked == ["request", ("DataLoader", "train"), ("DataLoader", "train")]


@pytest.mark.parametrize(
    ("mode", "steps"), [("min_size", 2), ("max_size", 5), ("max_size_cycle", 5), ("sequential", 7)]
)
def test_steps_of_several_loaders(pl, mode, steps):
    modes = submodule(pl, "utilities.combined_loader")._SUPPORTED_MODES
    assert modes[mode]["fn"]([5, 2]) == steps


def test_fabric_distributes_a_loader_by_two_functions(pl):
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[pl.__name__]
    sampler = importlib.import_module(fabric).Fabric._get_distributed_sampler(
        DataLoader(Points(8), 2), num_replicas=2, rank=1
    )
    assert isinstance(sampler, DistributedSampler)
    assert list(sampler) == [1, 3, 5, 7]
    update = importlib.import_module(f"{fabric}.utilities.data")._update_dataloader
    assert update(DataLoader(Points(8), 2), sampler).sampler is sampler


def test_users_sampler_inside_lightnings_distributed_one(pl):
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[pl.__name__]
    wrapper_of = importlib.import_module(f"{fabric}.utilities.distributed").DistributedSamplerWrapper
    sampler = WeightedRandomSampler([1.0] * 6, 6)
    wrapper = wrapper_of(sampler, num_replicas=2, rank=0)
    assert isinstance(wrapper, DistributedSampler)
    assert wrapper.dataset._sampler is sampler


def test_batch_sampler_inside_lightnings_wrapper_for_predictions(pl):
    wrapper_of = submodule(pl, "overrides.distributed")._IndexBatchSamplerWrapper
    batches = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    wrapper = wrapper_of(batches)
    assert wrapper._batch_sampler is batches
    assert list(wrapper_of(batches)) == [[0, 1], [2, 3]]


def test_random_samplers_keep_what_the_user_asked_for():
    assert RandomSampler(range(4))._num_samples is None
    given = DataLoader(range(8), 2, sampler=RandomSampler(range(8), num_samples=4))
    assert given.sampler._num_samples == 4
    assert len(stream_of(given)) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_copied_loader_takes_another_batch_sampler(workers):
    """Torch refuses to set the attribute; a copy that has it from the start iterates by it, in workers as well."""
    loader = DataLoader(range(8), 4, num_workers=workers, persistent_workers=workers > 0)
    with pytest.raises(ValueError, match="batch_sampler"):
        loader.batch_sampler = [[1]]
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    clone = with_batch_sampler(loader, [[0], [5, 6]])
    for _ in range(2):
        assert [batch.tolist() for batch in clone] == [[0], [5, 6]]
    assert len(clone) == 2
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_distributed_sampler_tells_its_seed_and_order():
    loader = DataLoader(range(9), 3, sampler=DistributedSampler(range(9), 1, 0, shuffle=True, seed=7))
    loader.sampler.set_epoch(2)
    assert stream_of(loader).indices(2) == list(loader.sampler)


# torch


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_base_of_batch_normalisation(norm):
    assert issubclass(norm, _BatchNorm)


def test_bucket_of_a_communication_hook():
    assert {"buffer", "index", "gradients"} <= set(dir(dist.GradBucket))


def test_out_of_memory_is_an_error_of_its_own():
    assert issubclass(torch.OutOfMemoryError, RuntimeError)


def test_accelerate_defines_its_accelerator_where_the_flag_hooks_it():
    """The hook replaces ``Accelerator.__init__``, the only thing of Accelerate that the flag touches."""
    accelerate = pytest.importorskip("accelerate")
    owner = importlib.import_module("accelerate.accelerator")
    assert owner.Accelerator is accelerate.Accelerator
    assert owner.Accelerator.__module__ == "accelerate.accelerator"
    assert inspect.isfunction(vars(owner.Accelerator).get("__init__"))
    assert "__slots__" not in vars(owner.Accelerator)


def test_accelerate_keeps_the_state_by_which_a_further_accelerator_is_known():
    state = pytest.importorskip("accelerate.state")
    assert isinstance(state.AcceleratorState._shared_state, dict)
    for name in ("_dataloaders", "_optimizers", "_models"):
        source = inspect.getsource(importlib.import_module("accelerate.accelerator").Accelerator)
        assert f"self.{name}" in source


TRAINER = (
    *("_inner_training_loop", "_finalize_training", "_get_dataloader", "_get_num_items_in_batch", "_save_checkpoint"),
    *("_get_output_dir", "_save_rng_state", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
)


@pytest.mark.parametrize("method", TRAINER)
def test_methods_that_the_trainer_of_transformers_has(method):
    assert inspect.isfunction(vars(pytest.importorskip("transformers").Trainer).get(method))
