"""The averager of a compressor is the class that its settings name, built for the run at hand."""

import importlib
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.compressors.registry import averager_for
from lightning_hetero.comm.gradients.averager import GradientAverager
from lightning_hetero.core.compression.settings import COMPRESSORS, Compressor
from tests.comm.contexts import context_of
from tests.helpers import run_ranks


class Built:
    """Remembers what it was built from."""

    def __init__(self, settings, context):
        self.settings, self.context = settings, context

    @classmethod
    def build(cls, settings, context):
        return cls(settings, context)


class Other(Built):
    pass


class ForBuilt(Compressor):
    averager = f"{__name__}:Built"


class ForOther(Compressor):
    averager = f"{__name__}:Other"


@pytest.mark.parametrize(("settings", "kind"), [(ForBuilt(), Built), (ForOther(), Other)])
def test_the_named_class_gets_settings_and_context(settings, kind):
    context = context_of({"a": torch.zeros(3)})
    built = averager_for(settings, context)
    assert type(built) is kind
    assert built.settings is settings
    assert built.context is context


def test_a_name_that_is_not_there_fails():
    class Nowhere(Compressor):
        averager = f"{__name__}:Nobody"

    with pytest.raises(AttributeError, match="Nobody"):
        averager_for(Nowhere(), context_of({}))


def _kinds(rank):
    """The averager of each compressor of the table, on one rank alone."""
    dist.init_process_group("gloo")
    context, kinds = replace(context_of({"a": torch.zeros(8, 8)}), control=ControlPlane(0, 1)), {}
    for name, (settings, given) in COMPRESSORS.items():
        averager = averager_for(settings(**given), context)
        assert isinstance(averager, GradientAverager)
        kinds[name] = f"{type(averager).__module__}:{type(averager).__name__}", averager.kind, averager.world_size
    return kinds


def test_each_compressor_of_the_table_has_one():
    (kinds,) = run_ranks(_kinds, 1)
    assert list(kinds) == list(COMPRESSORS)
    for name, (path, kind, world_size) in kinds.items():
        assert path == COMPRESSORS[name][0].averager
        assert kind, "checkpoints tell averagers apart by it"
        assert world_size == 1
        assert importlib.import_module(path.partition(":")[0]).__all__.count(path.partition(":")[2]) == 1


def test_a_context_is_a_value_with_the_mean_of_plain_ddp_as_default():
    context = context_of({})
    assert (context.topology, context.grad_scale, context.hold_unused) == (None, None, False)
    with pytest.raises(FrozenInstanceError):
        context.hold_unused = True
