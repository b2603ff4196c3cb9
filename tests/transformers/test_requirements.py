"""What a Trainer cannot split unevenly is refused by the name of its argument when it is made, on every rank."""

import types
import warnings

import pytest
import transformers

from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.transformers import HeteroTrainer, HeteroTrainingArguments
from lightning_hetero.transformers.requirements import check_trainer
from tests.helpers import collected, run_ranks
from tests.transformers.runs import arguments, llama, of, padded, texts

QUIET = {"use_cpu": True, "report_to": [], "bf16": False}
REFUSED = {
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, {}, r"deepspeed=.*Leave it out"),
    "fsdp": ({"fsdp": True}, {}, r"fsdp=True: unequal batches are for plain data parallelism. Leave it out"),
    "parallelism_config": ({"parallelism_config": object()}, {}, r"parallelism_config=.*ACCELERATE_USE_HETERO=false"),
    "dispatch_batches": (
        {"accelerator_config": types.SimpleNamespace(dispatch_batches=True)},
        {},
        r"accelerator_config dispatch_batches=True.*Leave it out",
    ),
    "split_batches": (
        {"accelerator_config": types.SimpleNamespace(split_batches=True)},
        {},
        r"split_batches=True.*divide the total by the number of workers",
    ),
    "max_total_batch_size": ({}, {"max_total_batch_size": 64}, r"max_total_batch_size=64: .*Leave it out"),
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},
        {"local_batch_sizes": [2, 6]},
        r"auto_find_batch_size=True.*local_batch_sizes=\(2, 6\).*Give one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name):
    given, settings, message = REFUSED[name]
    args = HeteroTrainingArguments(output_dir="out", **QUIET)
    check_trainer(args, None, HeteroPlugin())
    vars(args).update(given)
    with pytest.raises(ValueError, match=message):
        check_trainer(args, None, HeteroPlugin(**settings))


def test_tensor_parallel_models_are_refused():
    args = HeteroTrainingArguments(output_dir="out", **QUIET)
    check_trainer(args, types.SimpleNamespace(tp_size=1), HeteroPlugin())
    with pytest.raises(ValueError, match="loaded with tensor parallelism.*Load it without tp_plan"):
        check_trainer(args, types.SimpleNamespace(tp_size=2), HeteroPlugin())


def _made(rank, sizes, settings):
    args = arguments(8, sizes, **settings)
    try:
        of(transformers.Trainer)(model=llama(), args=args, train_dataset=texts(), data_collator=padded).train()
    except (TypeError, ValueError) as error:
        return str(error)
    return None


class ORPOTrainer(HeteroTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Own(HeteroTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def _said(rank):
    warnings.simplefilter("ignore")
    counts = {"hetero_weight_fn": lambda batch: len(batch["labels"])}
    cases = ((HeteroTrainer, {}), (Own, {}), (ORPOTrainer, {}), (Own, counts))
    said = []
    for cls, more in cases:
        lines = collected()
        args = arguments(8, (2, 6), max_steps=2, **more)
        cls(model=llama(), args=args, train_dataset=texts(), data_collator=padded).train()
        names = ("Own.compute_loss", "ORPOTrainer")
        said.append([name for line in lines for name in names if name in line])
    return said


def test_a_loss_that_may_differ_from_one_process_is_named_once():
    assert run_ranks(_said, 2) == [[[], ["Own.compute_loss"], ["ORPOTrainer"], []], [[]] * 4]


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ((2, 6), {"auto_find_batch_size": True}, "auto_find_batch_size"),
        ((2, 6), {"accelerator_config": {"split_batches": True}}, "split_batches"),
        ((2, 6, 1), {}, "local_batch_sizes"),
        ((-1, 9), {}, "local_batch_sizes"),
    ],
)
def test_on_every_rank(sizes, settings, message):
    errors = run_ranks(_made, 2, sizes, settings)
    assert all(message in (error or "") for error in errors), errors


def test_switched_off_it_is_a_plain_trainer(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_HETERO", "false")
    args = transformers.TrainingArguments(output_dir="out", auto_find_batch_size=True, **QUIET)
    trainer = HeteroTrainer(model=llama(), args=args)
    assert type(trainer.accelerator).__module__ == "accelerate.accelerator"
