"""TRL's trainers on unequal ranks give the gradients of one process."""

import os
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_hetero.transformers import hetero_trainer
from tests.helpers import run_ranks
from tests.transformers.runs import VOCABULARY, arguments, llama, of, trained

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(*columns, number=42):
    generator = random.Random(5)

    def words():
        return " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(generator.randint(2, 9)))

    return datasets.Dataset.from_list([{column: words() for column in columns} for _ in range(number)])


def fine_tuned(*columns, config=None, **settings):
    settings = {"max_length": 24, "gradient_checkpointing": False, **settings}
    args = arguments(8, (2, 6), cls=trl.SFTConfig, **settings)
    rows = data(*(columns or ("text",)))
    return trained(
        of(trl.SFTTrainer)(
            model=llama(), args=args, train_dataset=rows, processing_class=tokenizer(), peft_config=config
        )
    )


def preferred(**settings):
    args = arguments(8, (2, 6), cls=trl.DPOConfig, max_length=24, gradient_checkpointing=False, **settings)
    rows = data("prompt", "chosen", "rejected")
    return trained(
        of(trl.DPOTrainer)(
            model=llama(), ref_model=llama(), args=args, train_dataset=rows, processing_class=tokenizer()
        )
    )


TWO = {"gradient_accumulation_steps": 2}
RUNS = {
    "sft": lambda: fine_tuned(),
    "sft_in_micro_batches": lambda: fine_tuned(average_tokens_across_devices=False, **TWO),
    "completions": lambda: fine_tuned("prompt", "completion", completion_only_loss=True, **TWO),
    "packed": lambda: fine_tuned(packing=True),
    "packed_and_cut": lambda: fine_tuned(packing=True, packing_strategy="wrapped"),
    "without_padding": lambda: fine_tuned(padding_free=True, max_length=None, **TWO),
    "another_loss": lambda: fine_tuned(loss_type="dft"),
    "smoothed": lambda: fine_tuned(label_smoothing_factor=0.1, **TWO),
    "lora": lambda: fine_tuned(config=peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0), **TWO),
    "dpo": lambda: preferred(),
    "dpo_in_micro_batches": lambda: preferred(**TWO),
}


def generated(rank):
    """Rewards of generated texts, by the switch alone."""
    given = {"num_generations": 4, "max_completion_length": 4, "max_steps": 2, "gradient_checkpointing": False}
    args = arguments(8, None, cls=trl.GRPOConfig, **given)
    switched_on = os.environ["ACCELERATE_USE_HETERO"] == "true"
    cls = hetero_trainer(trl.GRPOTrainer) if switched_on else trl.GRPOTrainer  # as after a start with the switch
    return trained(
        cls(
            model=llama(longest=64),
            args=args,
            train_dataset=data("prompt"),
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(one) % 5) for one in completions],
        )
    )


def test_grpo_is_plain_with_one_worker():
    plain, flagged = (run_ranks(generated, 1, env={"ACCELERATE_USE_HETERO": on})[0] for on in ("false", "true"))
    assert flagged["steps"] == 2
    assert abs(flagged["weights"] - plain["weights"]).max() == 0.0


def test_grpo_is_refused_on_several_workers():
    errors = run_ranks(generated, 2, env={"ACCELERATE_USE_HETERO": "true"}, expect_errors=True)
    assert len(errors) == 2
    assert all("ValueError" in str(one) and "num_generations=4" in str(one) for one in errors), errors


def all_of(rank):
    datasets.disable_progress_bars()
    return {name: run() for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def both():
    return run_ranks(all_of, 1, timeout=200)[0], run_ranks(all_of, 2, timeout=200)[0]


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(both, name):
    one, two = (runs[name] for runs in both)
    assert two["steps"] == one["steps"] > 1
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert abs(two["weights"] - one["weights"]).max() < 1e-6
    assert two["plans"] == [(2, 6)]


def test_metrics_are_those_of_one_process(both):
    """What TRL gathers of every step: tokens, entropy, rewards."""
    one, two = both
    for name, key in (("sft", "num_tokens"), ("sft", "mean_token_accuracy"), ("dpo", "rewards/margins")):
        values = [[entry[key] for entry in runs[name]["history"] if key in entry] for runs in (one, two)]
        assert len(values[0]) > 1
        assert values[1] == pytest.approx(values[0], abs=1e-5)
