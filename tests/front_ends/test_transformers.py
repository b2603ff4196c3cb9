"""Transformers' Trainer and TRL's on unequal ranks: losses of one process, plans, logs, evaluation, checkpoints."""

import json
import logging
import math
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from tqdm import tqdm
from transformers import TrainerCallback, trainer_jit_checkpoint

from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.transformers import HeteroTrainer, HeteroTrainingArguments, hetero_trainer
from lightning_hetero.transformers.requirements import check_trainer, inexact_loss
from tests.helpers import collected
from tests.ranks import run_ranks
from tests.transformers.runs import VOCABULARY, Rows, arguments, bert, labelled, llama, of, padded, texts, trained

tqdm.monitor_interval = 0  # no thread that outlives a test
Trainer = transformers.Trainer
SIZES = (2, 6)
TWO = {"gradient_accumulation_steps": 2}


def trainer_of(sizes=SIZES, total=8, rows=42, data=None, cls=Trainer, callbacks=None, **settings):
    args = arguments(total, sizes, **settings)
    data = texts(rows) if data is None else data
    return of(cls)(model=llama(), args=args, train_dataset=data, data_collator=padded, callbacks=callbacks)


def same(two, one, rel=1e-6):
    assert two["steps"] == one["steps"] > 1
    assert two["losses"] == pytest.approx(one["losses"], rel=rel, abs=1e-6)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert abs(two["weights"] - one["weights"]).max() < 1e-6


# losses, however their code normalises them


def language_model(sizes=SIZES, model=llama, loss=None, data=texts, **settings):
    given = arguments(8, sizes, **settings)
    made = of(Trainer)(model=model(), args=given, train_dataset=data(), data_collator=padded, compute_loss_func=loss)
    return trained(made)


def classifier(**settings):
    return trained(of(Trainer)(model=bert(), args=arguments(8, SIZES, **settings), train_dataset=labelled()))


def gpt2():
    """Its class has no loss type: it uses the fallback of Transformers, which shifts labels."""
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2, **off)
    return transformers.GPT2LMHeadModel(config)


def deaf():
    """A language model that is not given the number of items."""
    made = llama()
    made.accepts_loss_kwargs = False
    return made


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


def mixed():
    generator = torch.Generator().manual_seed(0)
    rows = Rows([{"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(i % 5))} for i in range(42)])
    return trained(of(Trainer)(model=Mixed(), args=arguments(8, SIZES), train_dataset=rows))


def mean(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def whole_texts():
    """Texts whose first tokens are labels as well, and no targets."""
    rows = texts().rows
    return Rows([{**row, "labels": row["input_ids"]} if i % 2 else row for i, row in enumerate(rows)])


def measured(number):
    """Texts with their lengths, as Trainer's own balanced batches need them."""
    return Rows([{**row, "length": len(row["input_ids"])} for row in texts(number).rows])


def sparse():
    """Texts of which every second one has a label, which is 5: a rank often has none."""
    labels = [[-100] * (len(row["input_ids"]) - 1) + [5 if i % 2 else -100] for i, row in enumerate(texts().rows)]
    return Rows([{**row, "labels": label} for row, label in zip(texts().rows, labels, strict=True)])


def lora():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


# rows of TRL


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def columns(*names, number=42):
    import datasets

    datasets.disable_progress_bars()
    generator = random.Random(5)

    def words():
        return " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(generator.randint(2, 9)))

    return datasets.Dataset.from_list([{name: words() for name in names} for _ in range(number)])


def with_trl(kind, names, given=None, **settings):
    import trl

    config, cls = getattr(trl, f"{kind}Config"), of(getattr(trl, f"{kind}Trainer"))
    args = arguments(8, SIZES, cls=config, **{"max_length": 24, "gradient_checkpointing": False, **settings})
    data = {"train_dataset": columns(*names), "processing_class": word_tokenizer()}
    return trained(cls(model=llama(), args=args, **data, **(given or {})))


def fine_tuned(*names, **settings):
    return with_trl("SFT", names or ("text",), **settings)


def preferred(**settings):
    return with_trl("DPO", ("prompt", "chosen", "rejected"), {"ref_model": llama()}, **settings)


RUNS = {
    "language_model": language_model,
    "two_micro_batches": partial(language_model, **TWO),
    "tokens_not_averaged": partial(language_model, average_tokens_across_devices=False, **TWO),
    "a_rank_without_share": partial(language_model, sizes=(0, 8), **TWO),
    "no_number_of_items": partial(language_model, model=deaf, **TWO),
    "own_loss_that_is_a_mean": partial(language_model, loss=mean, **TWO),
    "label_smoothing": partial(language_model, label_smoothing_factor=0.1, **TWO),
    "classifier_in_micro_batches": partial(classifier, **TWO),
    "gpt2": partial(language_model, model=gpt2, data=whole_texts, **TWO),
    "batches_without_a_label": partial(
        language_model, model=partial(bert, "TokenClassification", 40), data=sparse, logging_nan_inf_filter=False
    ),
    "never_logged": partial(language_model, logging_strategy="no", **TWO),
    "both_kinds_in_one_loss": mixed,
    "linear_schedule": partial(language_model, num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=2),
    "drop_last": partial(language_model, dataloader_drop_last=True, torch_empty_cache_steps=2, **TWO),
    "balanced_by_length": partial(
        language_model, sizes=None, data=partial(measured, 40), train_sampling_strategy="batch_rebalance"
    ),
    "grouped_by_length": partial(language_model, data=partial(texts, 64), train_sampling_strategy="group_by_length"),
    "clipped_adam": partial(language_model, optim="adamw_torch", learning_rate=1e-3, max_grad_norm=0.5, **TWO),
    "sft_in_micro_batches": partial(fine_tuned, average_tokens_across_devices=False, **TWO),
    "dpo": preferred,
}
PLANS = {"a_rank_without_share": [(0, 8)], "balanced_by_length": []}
VARIANTS = {
    "lora": partial(language_model, model=lora, **TWO),
    "compiled": partial(language_model, torch_compile=True, torch_compile_backend="eager"),
    "max_steps": partial(language_model, max_steps=9, lr_scheduler_type="linear", dataloader_num_workers=1),
    "in_sequence": partial(
        language_model, train_sampling_strategy="sequential", include_num_input_tokens_seen="non_padding"
    ),
    "sft_of_completions": partial(fine_tuned, "prompt", "completion", completion_only_loss=True, **TWO),
    "sft_packed": partial(fine_tuned, packing=True),
    "sft_without_padding": partial(fine_tuned, padding_free=True, max_length=None, **TWO),
}


def all_of(rank, names):
    """What each run returns, and its warnings of losses that need a setting."""
    found = {}
    for name in names:
        lines = collected()
        result = {**RUNS, **VARIANTS}[name]()
        settings = ("weight_fn", "loss_reduction", "min_local_batch_size")
        found[name] = {**result, "told": {one for line in lines for one in settings if one in line}}
    return found


@pytest.fixture(scope="module")
def both(request):
    """Runs of one process and of two ranks, of those rows that are asked for."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    rows = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    names = [name for name in {**RUNS, **VARIANTS} if name in rows]
    return [run_ranks(all_of, ranks, names, timeout=250, start="fork")[0] for ranks in (1, 2)]


@pytest.mark.parametrize(
    "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow("a variant of another row")) for name in VARIANTS)]
)
def test_a_training_equals_one_process(both, name):
    if name.startswith(("sft", "dpo")):
        pytest.importorskip("trl")
    one, two = (runs[name] for runs in both)
    same(two, one, rel=1e-5 if name.startswith(("sft", "dpo")) else 1e-6)
    assert (two["epoch"], two["rates"]) == (one["epoch"], one["rates"])
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert all(map(math.isfinite, two["losses"]))
    assert two["plans"] == PLANS.get(name, [SIZES])
    assert two["told"] == ({"weight_fn"} if "own" in name else set()) or "sft" in name or "dpo" in name
    for key in ("num_tokens", "mean_token_accuracy", "rewards/margins"):  # what TRL gathers of every step
        values = [[entry[key] for entry in runs["history"] if key in entry] for runs in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-5)


def gathering(outputs, labels, num_items_in_batch=None):
    rows = outputs["logits"][:, 0].detach()
    torch.distributed.all_gather([torch.zeros_like(rows) for _ in range(2)], rows.contiguous())
    return mean(outputs, labels)


def _wrong(rank, what):
    if what == "gathers":
        language_model(loss=gathering)
    else:
        sizes, settings = what
        trainer_of(sizes, **settings).train()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("gathers", "all_gather()"),
        ((SIZES, {"auto_find_batch_size": True}), "auto_find_batch_size"),
        ((SIZES, {"accelerator_config": {"split_batches": True}}), "split_batches"),
        (((2, 6, 1), {}), "local_batch_sizes"),
    ],
)
def test_what_cannot_be_right_is_an_error_on_every_rank(what, says):
    errors = run_ranks(_wrong, 2, what, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in text for *_, text in errors), errors


@pytest.mark.parametrize(
    ("given", "model", "settings", "says"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, None, {}, "deepspeed"),
        ({"fsdp": True}, None, {}, "fsdp"),
        ({"num_generations": 4}, None, {}, "num_generations=4"),
        ({"parallelism_config": object()}, None, {}, "parallelism_config"),
        ({"accelerator_config": SimpleNamespace(dispatch_batches=True)}, None, {}, "dispatch_batches"),
        ({}, None, {"max_total_batch_size": 64}, "max_total_batch_size"),
        ({}, SimpleNamespace(tp_size=2), {}, "tp_plan"),
    ],
)
def test_arguments_that_cannot_be_split_unevenly_are_refused_by_name(given, model, settings, says):
    args = HeteroTrainingArguments(output_dir="out", use_cpu=True, report_to=[], bf16=False)
    check_trainer(args, SimpleNamespace(tp_size=1), HeteroPlugin())
    check_trainer(SimpleNamespace(**vars(args), world_size=1, num_generations=4), None, HeteroPlugin())
    args = SimpleNamespace(**{**vars(args), "world_size": 2, **given})
    with pytest.raises(ValueError, match=says):
        check_trainer(args, model, HeteroPlugin(**settings))


@pytest.mark.parametrize("name", ["ORPOTrainer", "CPOTrainer", "DPOTrainer"])
def test_a_trainer_of_trl_whose_loss_mixes_two_means_is_named(name):
    trainer = type(name, (), {"compute_loss": mean, "__module__": "trl.trainer"})()
    assert (name in (inexact_loss(trainer) or "")) == (name != "DPOTrainer")


def test_any_trainer_becomes_one_of_unequal_workers():
    plugin = HeteroPlugin(policy="pid")
    cls = hetero_trainer(Trainer, plugin)
    assert (cls.hetero_plugin, hetero_trainer(cls), hetero_trainer(HeteroTrainer)) == (plugin, cls, HeteroTrainer)
    assert hetero_trainer(cls, HeteroPlugin()).hetero_plugin != plugin
    assert issubclass(hetero_trainer(transformers.Seq2SeqTrainer), HeteroTrainer)
    for wrong in (nn.Linear, Trainer.train, None):
        with pytest.raises(TypeError, match="transformers.Trainer"):
            hetero_trainer(wrong)


# decisions, logs


class Stream(IterableDataset):
    def __init__(self, rows=64):
        self.rows = rows

    def __iter__(self):
        return iter(texts(self.rows).rows)


def _decides(rank, data, accumulation, slow, steps=30):
    """Ranks whose forward passes take what a clock is told: rank 1 three times as long by the sample."""
    with pytest.MonkeyPatch.context() as patch:
        now, seen = [0.0], []
        patch.setattr("time.perf_counter", lambda: now[0])
        patch.setattr("time.process_time", lambda: now[0])
        more = {"max_steps": steps} if data is Stream else {}
        trainer = trainer_of(
            None, 16, data=data(480), gradient_accumulation_steps=accumulation, logging_steps=4, **more
        )

        def spend(model, args, kwargs):
            seen.append(len(kwargs["input_ids"]))
            now[0] += (0.012 if rank and slow else 0.004) * seen[-1]

        trainer.model.register_forward_pre_hook(spend, with_kwargs=True)
        return {**trained(trainer), "seen": seen, "total": trainer.get_total_train_batch_size(trainer.args)}


@pytest.mark.parametrize(("data", "accumulation"), [(texts, 1), (texts, 2), (Stream, 1)])
def test_a_decision_changes_the_next_batches(data, accumulation):
    first, second = run_ranks(_decides, 2, data, accumulation, True)
    one = run_ranks(_decides, 1, data, accumulation, False)[0]
    assert first["plans"][0] == (8, 8)
    assert len(first["plans"]) > 1
    assert first["plans"][-1][0] > 8
    assert (first["seen"][-1], second["seen"][-1]) == first["plans"][-1]
    assert [a + b for a, b in zip(first["seen"], second["seen"], strict=True)] == [16] * 30
    assert first["steps"] == one["steps"]
    assert abs(first["weights"] - one["weights"]).max() < 1e-6
    assert first["total"] == 16 * accumulation
    logged = [entry for entry in first["history"] if "hetero/step_time" in entry]
    assert [entry["hetero/total_batch_size"] for entry in logged] == [16] * len(logged) != []
    assert json.loads(json.dumps(logged)) == logged  # as in trainer_state.json


# checkpoints

SAVES = {"num_train_epochs": 2, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2}


def _saves(rank, folder):
    how = {"output_dir": folder, "save_strategy": "steps", "save_steps": 1} if folder else {}
    return trained(trainer_of(SIZES if folder else None, **how, **SAVES))


def _resumes(rank, folder, sizes, steps):
    """In the middle of the first epoch, at its end, in the middle of the second."""
    results = []
    for step in steps:
        trainer = trainer_of(sizes if len(sizes) > 1 else None, **SAVES)
        results.append(trained(trainer, resume_from_checkpoint=f"{folder}/checkpoint-{step}"))
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with a checkpoint of each step of a run on two ranks, and the result of one process."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    through, one = run_ranks(_saves, 2, folder)[0], run_ranks(_saves, 1, None)[0]
    same(through, one)
    return folder, one


@pytest.mark.parametrize(
    "sizes",
    [(2, 6), (5, 3), pytest.param((1, 2, 5), marks=pytest.mark.slow("a third number of ranks")), (8,)],
    ids=str,
)
def test_a_training_resumes_from_every_step(saved, sizes):
    folder, one = saved
    for resumed in run_ranks(_resumes, len(sizes), folder, sizes, (1, 3, 4))[0]:
        assert resumed["steps"] == 6
        assert abs(resumed["weights"] - one["weights"]).max() < 1e-6
        assert resumed["rates"] == one["rates"]
        assert resumed["plans"][-1:] in ([sizes], [])


def _passes_over(rank, folder, newest):
    lines = collected()
    with pytest.raises(DamagedCheckpointError) as error:
        trainer_of(output_dir=folder, **SAVES).train(resume_from_checkpoint=newest)
    resumed = trained(trainer_of(output_dir=folder, **SAVES), resume_from_checkpoint=True)
    return resumed, str(error.value), lines


def test_a_checkpoint_that_changed_is_named_on_every_rank_or_passed_over(saved, tmp_path):
    """The newest ones were damaged, edited, killed while they were written, or lack a file."""
    folder, one = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    newest = [tmp_path / f"checkpoint-{step}" for step in (6, 5, 4, 3)]
    content = bytearray((newest[0] / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest[0] / "model.safetensors").write_bytes(content)
    state = (newest[1] / "trainer_state.json").read_text()
    (newest[1] / "trainer_state.json").write_text(state.replace('"global_step": 5', '"global_step": 4'))
    (newest[2] / "hetero_state.sha256").write_bytes(b"")
    (newest[3] / "hetero_state.sha256").unlink()
    (newest[3] / "trainer_state.json").unlink()
    results = run_ranks(_passes_over, 2, str(tmp_path), str(newest[0]))
    for resumed, error, _ in results:
        assert resumed["steps"] == 6
        assert abs(resumed["weights"] - one["weights"]).max() < 1e-6
        assert "checkpoint-6" in error
        assert "model.safetensors" in error
    assert any(line.endswith(str(tmp_path / "checkpoint-2")) for line in results[0][2])


def _limited(rank, folder):
    """Keep the newest checkpoint alone; which folders were whole whenever one was removed."""
    from lightning_hetero.frontend.checkpoint_folder import damage_in

    whole, rotate = [], transformers.trainer.rotate_checkpoints

    def watched(output_dir, **kwargs):
        whole.append([damage_in(one) for one in Path(output_dir).glob("checkpoint-*")])
        rotate(output_dir=output_dir, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.trainer, "rotate_checkpoints", watched)
        how = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
        trained(trainer_of(output_dir=folder, **how))
    return whole


def test_older_checkpoints_are_deleted_only_when_the_new_one_is_whole(tmp_path):
    assert run_ranks(_limited, 2, str(tmp_path))[0] == [[""], ["", ""], ["", ""]]
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def _goes_on(rank, folder, part, stream):
    """A run that saves, the rest of it, or a plain one of Transformers' own."""
    how = {"save_strategy": "steps", "save_steps": 2, "output_dir": folder} if part != "rest" else {}
    data = Stream() if stream else texts(42)
    trainer = trainer_of(None if part == "plain" else SIZES, data=data, max_steps=5, **how)
    return trained(trainer, **({"resume_from_checkpoint": f"{folder}/checkpoint-2"} if part == "rest" else {}))


@pytest.mark.parametrize(("part", "ranks", "stream"), [("whole", 2, True), ("plain", 1, False)])
def test_a_stream_and_a_plain_checkpoint_are_resumed(tmp_path, part, ranks, stream):
    whole = run_ranks(_goes_on, ranks, str(tmp_path), part, stream)[0]
    rest = run_ranks(_goes_on, 2, str(tmp_path), "rest", stream)[0]
    assert rest["steps"] == whole["steps"] == 5
    assert rest["losses"][-3:] == pytest.approx(whole["losses"][-3:], rel=1e-6)
    assert abs(rest["weights"] - whole["weights"]).max() < 1e-6


class TellIn(TrainerCallback):
    """Sends SIGTERM to this process in a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class AtOnce:
    """In place of the timer by which Transformers waits for three seconds."""

    def __init__(self, seconds, call):
        self.start = call


def _told(rank, told, folder):
    """Train on this rank, which is told in the step that ``told`` has for it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_jit_checkpoint.threading, "Timer", AtOnce)
            callbacks = [TellIn(told[rank])] if rank in told else []
            how = {"output_dir": folder, "enable_jit_checkpoint": True, "max_steps": 9}
            return trained(trainer_of(callbacks=callbacks, **how))
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("told", [{0: 2}, {0: 3, 1: 2}], ids=str)
def test_all_ranks_save_after_the_step_that_follows_a_signal(told, tmp_path):
    first, second = run_ranks(_told, 2, told, str(tmp_path), timeout=60.0)
    assert first["steps"] == second["steps"] == 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    folder = tmp_path / "checkpoint-3"
    assert not (folder / "checkpoint-is-incomplete.txt").exists()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3


# evaluation, and other parts of Trainer


def right(predicted):
    chosen = predicted.predictions.argmax(-1)
    return {"right": float((chosen == predicted.label_ids).mean()), "number": len(chosen)}


def _evaluates(rank, folder):
    lines = collected()
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "per_device_eval_batch_size": 4}
    args = arguments(8, SIZES, output_dir=folder, **often, **best)
    trainer = of(Trainer)(
        model=bert(), args=args, train_dataset=labelled(), eval_dataset=labelled(24), compute_metrics=right
    )
    before = trainer.evaluate()  # and only then train
    result = trained(trainer)
    keys = ("eval_loss", "eval_right", "eval_number")
    evaluations = [entry[key] for entry in result["history"] if "eval_loss" in entry for key in keys]
    assert not [line for line in lines if "taken for an evaluation's" in line]  # Trainer has said so
    return result["weights"], [before["eval_loss"], *evaluations], trainer.predict(labelled(23)).predictions


def test_evaluation_is_that_of_one_process(tmp_path):
    one, two = (run_ranks(_evaluates, ranks, str(tmp_path / str(ranks)))[0] for ranks in (1, 2))
    assert abs(one[0] - two[0]).max() < 1e-6  # of the best model
    assert len(one[1]) > 9
    assert two[1] == pytest.approx(one[1], rel=1e-6)
    assert two[2] == pytest.approx(one[2], abs=1e-6)
    assert len(two[2]) == 23


def _finds(rank):
    """A batch size that is found when a step has failed."""
    finds, calls = trainer_of(None, 16, auto_find_batch_size=True), []

    def fail_once(model, args, kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("CUDA out of memory.")

    finds.model.register_forward_pre_hook(fail_once, with_kwargs=True)
    return trained(finds)["plans"][-1], finds.args.average_tokens_across_devices


def test_a_batch_size_is_found_and_what_was_switched_is_put_back():
    assert run_ranks(_finds, 2) == [((7, 7), True)] * 2


class OtherBatches(HeteroTrainer):
    """Trains on batches that no loader has handed out."""

    def training_step(self, model, inputs, *given):
        return super().training_step(model, padded(texts(3).rows), *given)


def _plain(rank):
    lines = collected()
    logging.getLogger("lightning_hetero").setLevel(logging.INFO)
    refused = {"auto_find_batch_size": True} if os.environ.get("ACCELERATE_USE_HETERO") == "false" else {}
    given = {"model": llama(), "args": arguments(8, None, **refused), "train_dataset": texts(), "data_collator": padded}
    trainer = OtherBatches(**given)
    return type(trainer.accelerator).__module__, trained(trainer)["steps"], [x for x in lines if "no effect" in x]


@pytest.mark.parametrize(("ranks", "env"), [(2, "false"), (1, "true"), (1, None)])
def test_switched_off_it_is_plain_and_one_process_is_told_that_the_switch_does_nothing(ranks, env):
    module, steps, lines = run_ranks(_plain, ranks, env={"ACCELERATE_USE_HETERO": env} if env else {})[0]
    assert steps == 6
    assert (module == "accelerate.accelerator") == (env == "false")
    assert len(lines) == (ranks == 1)
    assert not lines or ("ACCELERATE_USE_HETERO" if env else "HeteroTrainer") in lines[0]
