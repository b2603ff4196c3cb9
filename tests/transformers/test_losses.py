"""Losses of Trainer on unequal ranks are those of one process, however their code normalises them."""

import math

import pytest
import torch
import transformers
from torch import nn

from lightning_hetero.transformers import HeteroTrainer, hetero_trainer
from lightning_hetero.transformers.accelerator import LabelCount
from lightning_hetero.transformers.trainer import _share_of
from tests.helpers import collected, run_ranks
from tests.transformers.runs import Rows, arguments, bert, labelled, llama, of, padded, texts, trained

Trainer = transformers.Trainer


def language_model(total=8, sizes=(2, 6), model=llama, loss=None, data=texts, **settings):
    given = arguments(total, sizes, **settings)
    return trained(
        of(Trainer)(model=model(), args=given, train_dataset=data(), data_collator=padded, compute_loss_func=loss)
    )


def classifier(sizes=(2, 6), **settings):
    return trained(of(Trainer)(model=bert(), args=arguments(8, sizes, **settings), train_dataset=labelled()))


def token_classifier(**settings):
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=40, num_labels=40, **small, **off)
    return transformers.BertForTokenClassification(config)


def deaf():
    """A language model that is not given the number of items."""
    model = llama()
    model.accepts_loss_kwargs = False
    return model


class Mixed(nn.Module):
    """A loss with a part that is divided by the number of items and a part that is a mean over samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        out = self.net(x)[:, 0]
        squared = (out - labels).square()
        normalised = squared.mean() if num_items_in_batch is None else squared.sum() / num_items_in_batch
        return {"loss": normalised + out.abs().mean(), "logits": out}


def mixed(**settings):
    generator = torch.Generator().manual_seed(0)
    rows = Rows([{"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(i % 5))} for i in range(42)])
    return trained(of(Trainer)(model=Mixed(), args=arguments(8, (2, 6), **settings), train_dataset=rows))


def tokens_of(outputs, labels, reduction):
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def divided(outputs, labels, num_items_in_batch=None):
    return tokens_of(outputs, labels, "sum") / num_items_in_batch


def mean(outputs, labels, num_items_in_batch=None):
    return tokens_of(outputs, labels, "mean")


def gpt2():
    """Its class has no loss type: it uses the fallback of Transformers, which shifts labels."""
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2, **off)
    return transformers.GPT2LMHeadModel(config)


def deaf_gpt2():
    model = gpt2()
    model.accepts_loss_kwargs = False
    return model


def whole_texts():
    """Texts whose first tokens are labels as well, and no targets."""
    rows = texts().rows
    return Rows([{**row, "labels": row["input_ids"]} if i % 2 else row for i, row in enumerate(rows)])


def sparse():
    """Texts of which every second one has a label, which is 5: a rank often has none."""
    return Rows(
        [
            {**row, "labels": [-100] * (len(row["input_ids"]) - 1) + [5 if i % 2 else -100]}
            for i, row in enumerate(texts().rows)
        ]
    )


def lora():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


TWO, THREE = {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}
RUNS = {
    "language_model": lambda: language_model(),
    "two_micro_batches": lambda: language_model(**TWO),
    "three_micro_batches": lambda: language_model(**THREE),
    "tokens_not_averaged": lambda: language_model(average_tokens_across_devices=False, **TWO),
    "a_rank_without_share": lambda: language_model(sizes=(0, 8), **TWO),
    "no_number_of_items": lambda: language_model(model=deaf, **TWO),
    "own_loss_that_divides": lambda: language_model(loss=divided, **TWO),
    "own_loss_that_is_a_mean": lambda: language_model(loss=mean, **TWO),
    "label_smoothing": lambda: language_model(label_smoothing_factor=0.1, **TWO),
    "label_smoothing_of_means": lambda: language_model(model=deaf, label_smoothing_factor=0.1),
    "classifier": lambda: classifier(),
    "classifier_in_micro_batches": lambda: classifier(**TWO),
    "gpt2": lambda: language_model(model=gpt2, data=whole_texts, **TWO),
    "gpt2_without_number_of_items": lambda: language_model(model=deaf_gpt2, data=whole_texts, **TWO),
    "gpt2_with_own_mean": lambda: language_model(model=gpt2, data=whole_texts, loss=mean, **TWO),
    "batches_without_a_label": lambda: language_model(
        model=token_classifier, data=sparse, logging_nan_inf_filter=False
    ),
    "seldom_logged": lambda: language_model(logging_steps=4),
    "never_logged": lambda: language_model(logging_strategy="no", **TWO),
    "token_classifier": lambda: language_model(model=token_classifier, **TWO),
    "both_kinds_in_one_loss": lambda: mixed(),
    "lora": lambda: language_model(model=lora, **TWO),
    "gradient_checkpointing": lambda: language_model(activation_checkpointing=True, **TWO),
    "compiled": lambda: language_model(torch_compile=True, torch_compile_backend="eager"),
    "linear_schedule": lambda: language_model(num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=2),
    "max_steps": lambda: language_model(max_steps=9, lr_scheduler_type="linear"),
    "drop_last": lambda: language_model(dataloader_drop_last=True, torch_empty_cache_steps=2, **TWO),
    "loader_workers": lambda: language_model(dataloader_num_workers=1),
    "in_sequence": lambda: language_model(
        train_sampling_strategy="sequential", include_num_input_tokens_seen="non_padding"
    ),
    "grouped_by_length": lambda: language_model(data=lambda: texts(64), train_sampling_strategy="group_by_length"),
    "clipped_adam": lambda: language_model(optim="adamw_torch", learning_rate=1e-3, max_grad_norm=0.5, **TWO),
}


def told(run):
    """What a run returns, and its warnings of losses that need a setting."""
    lines = collected()
    result = run()
    names = ("weight_fn", "loss_reduction", "min_local_batch_size")
    return {**result, "told": [name for line in lines for name in names if name in line]}


def all_of(rank, names):
    return {name: told(RUNS[name]) for name in names}


@pytest.fixture(scope="module")
def both():
    one = run_ranks(all_of, 1, list(RUNS), timeout=200)[0]
    return one, run_ranks(all_of, 2, list(RUNS), timeout=200)[0]


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(both, name):
    one, two = (runs[name] for runs in both)
    assert two["steps"] == one["steps"] > 1
    assert two["epoch"] == one["epoch"]
    assert two["rates"] == one["rates"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6, abs=1e-6)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert abs(two["weights"] - one["weights"]).max() < 1e-6
    assert two["plans"] == [(0, 8) if name == "a_rank_without_share" else (2, 6)]
    assert set(two["told"]) <= ({"weight_fn"} if "own" in name else set())


def test_class_weights_in_a_loss_of_ones_own_are_named():
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            weight = torch.tensor([1.0, 2.0, 4.0])
            return nn.functional.cross_entropy(model(inputs["input_ids"]).logits, inputs["labels"], weight=weight)

    def run(rank):
        return told(lambda: trained(of(Weighted)(model=bert(), args=arguments(8, (2, 6)), train_dataset=labelled())))[
            "told"
        ]

    assert [set(told) for told in run_ranks(run, 2)] == [{"weight_fn"}, set()]


def test_bf16_differs_by_its_rounding():
    def run(rank):
        return language_model(bf16=True)

    one, two = run_ranks(run, 1)[0], run_ranks(run, 2)[0]
    assert two["losses"] == pytest.approx(one["losses"], abs=2e-3)
    assert two["norms"] == pytest.approx(one["norms"], rel=2e-2)


def test_labels_are_counted_as_the_loss_counts_them():
    model = llama()
    trainer = type("Trainer", (), {"model": model})()
    count = LabelCount(trainer)
    batch = padded(texts(20).rows)
    losses = nn.functional.cross_entropy(
        model(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
    )
    assert count(batch) == (losses != 0).sum() < batch["labels"].ne(-100).sum()
    assert count({**batch, "shift_labels": batch["labels"]}) == batch["labels"].ne(-100).sum()
    assert count({"labels": torch.tensor([1, -100, 2])}) == 2
    for other, expected in (
        (bert(), batch["labels"].ne(-100).sum()),
        (nn.Linear(1, 1), batch["labels"].ne(-100).sum()),
        (gpt2(), count(batch)),
    ):
        trainer = type("Trainer", (), {"model": other})()
        assert LabelCount(trainer)(batch) == expected
    assert count({"input_ids": batch["input_ids"]}) is None
    assert count({"labels": [{"boxes": 1}]}) is None
    assert count(batch["labels"]) is None


def test_trainer_class_of_any_trainer():
    assert hetero_trainer(HeteroTrainer) is HeteroTrainer
    assert issubclass(hetero_trainer(transformers.Seq2SeqTrainer), HeteroTrainer)
    assert hetero_trainer(transformers.Seq2SeqTrainer).__name__ == "HeteroSeq2SeqTrainer"
    for wrong in (nn.Linear, Trainer.train, None):
        with pytest.raises(TypeError, match=r"give transformers.Trainer or a class derived from it"):
            hetero_trainer(wrong)


def test_without_the_number_of_processes_nothing_is_left_over():
    """What the switch of the arguments is: as it was given, also when a step raises."""

    def run(rank):
        args = arguments(8, (2, 6))
        trainer = of(Trainer)(model=llama(), args=args, train_dataset=texts(), data_collator=padded)

        def fail(*given, **named):
            raise ArithmeticError(args.average_tokens_across_devices)

        trainer.compute_loss = fail
        with pytest.raises(ArithmeticError, match="False"):
            trainer.train()
        return args.average_tokens_across_devices

    assert run_ranks(run, 2) == [True, True]


def test_a_share_of_the_items():
    assert _share_of(torch.tensor(8), torch.tensor(0.25)).item() == 2.0
    assert _share_of(8, torch.tensor(0.0)).item() == 8.0  # nothing is divided by 0
    assert _share_of(torch.tensor(8.0, dtype=torch.float64), torch.tensor(0.25)).dtype == torch.float64


def test_losses_are_finite(both):
    assert all(math.isfinite(loss) for run in both[1].values() for loss in run["losses"])


def gathering(outputs, labels, num_items_in_batch=None):
    rows = outputs["logits"][:, 0].detach()
    torch.distributed.all_gather([torch.zeros_like(rows) for _ in range(2)], rows.contiguous())
    return tokens_of(outputs, labels, "mean")


def _gathers(rank):
    return language_model(loss=gathering)


def test_a_loss_that_gathers_by_itself_is_an_error_on_every_rank():
    errors = run_ranks(_gathers, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all("all_gather()" in text and "gather_across_devices" in text for *_, text in errors)
