"""Accelerate's own tests of an ``Accelerator`` on two processes, under the flag or with ``HeteroAccelerator``.

They are run as they are installed; what they leave out on CPUs is called one by one.
"""

import importlib
import itertools
import os

import accelerate
import pytest
import torch
from accelerate.state import GradientState
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_hetero.accelerate import HeteroAccelerator, flag
from tests.helpers import run_ranks


def _ours(name):
    """A script of Accelerate's: its accelerators are uneven by the flag, or are ours in place of its own."""
    if "ACCELERATE_USE_HETERO" in os.environ:
        flag.install(accelerate.accelerator)
        return importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    accelerate.Accelerator = accelerate.accelerator.Accelerator = HeteroAccelerator
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    script.Accelerator = HeteroAccelerator
    return script


def _sync(rank):
    script = _ours("test_sync")
    for function in (script.test_gradient_accumulation, script.test_gradient_accumulation_with_opt_and_scheduler):
        for split, dispatch, each in itertools.product((True, False), repeat=3):
            function(split, dispatch, each)
    script.main()


def _ops(rank):
    script = _ours("test_ops")
    accelerate.Accelerator(cpu=True)
    script.main()


def _loaders(rank):
    script = _ours("test_distributed_data_loop")
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    script.test_pickle_accelerator()
    data = script.DummyDataset()
    sampler = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
    for settings in ({"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_sampler": sampler}):
        GradientState._reset_state()
        script.test_data_loader(DataLoader(data, **settings), script.create_accelerator())


def _hooks(rank):
    script = _ours("test_ddp_comm_hook")
    kind = accelerate.DDPCommunicationHookType
    # what it compares with names devices, which torch refuses for a model on a CPU
    torch.nn.parallel.DistributedDataParallel = lambda model, **devices: DistributedDataParallel(model)
    for hook, wrapper in ((kind.NO, kind.NO), (kind.FP16, kind.NO), (kind.POWER_SGD, kind.FP16)):
        script.test_ddp_comm_hook(hook, wrapper, {})


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize(
    ("part", "settings"),
    [
        *((_sync, {"MAX_LOCAL_BATCH_SIZES": "20,12"}), (_ops, {}), (_hooks, {})),
        *((_loaders, {}), (_loaders, {"LOCAL_BATCH_SIZES": "5,3"})),
    ],
)
def test_accelerates_own_scripts_pass(part, settings, flagged):
    variables = {f"ACCELERATE_HETERO_{name}": value for name, value in settings.items()}
    switch = {"ACCELERATE_USE_HETERO": "true"} if flagged else {}
    run_ranks(part, 2, env={"ACCELERATE_USE_CPU": "true", **switch, **variables})
