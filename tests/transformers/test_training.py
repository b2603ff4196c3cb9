"""A training by Trainer on unequal ranks: plans, logs, evaluation, checkpoints, and what is refused."""

import io
import json
import logging
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.accelerate import HeteroPlugin
from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.frontend.checkpoint_folder import damage_in
from lightning_hetero.transformers import HeteroTrainer, HeteroTrainingArguments, hetero_trainer
from lightning_hetero.transformers.requirements import check_trainer
from tests.helpers import collected, run_ranks, save_late
from tests.transformers.runs import Rows, arguments, bert, labelled, llama, of, padded, texts, trained

Trainer = transformers.Trainer
METRIC = "hetero/local_batch_size/rank0"


def trainer_of(sizes=(2, 6), total=8, rows=42, **settings):
    args = arguments(total, sizes, **settings)
    return of(Trainer)(model=llama(), args=args, train_dataset=texts(rows), data_collator=padded)


class Stream(IterableDataset):
    def __init__(self, rows=64):
        self.rows = rows

    def __iter__(self):
        return iter(texts(self.rows).rows)


# decisions


@pytest.mark.alone
@pytest.mark.parametrize(("data", "accumulation"), [(texts, 1), (texts, 2), (Stream, 1)])
def test_a_decision_changes_the_next_batches(data, accumulation):
    def made():
        settings = {"max_steps": 30} if data is Stream else {}
        args = arguments(16, None, gradient_accumulation_steps=accumulation, logging_steps=4, **settings)
        return of(Trainer)(model=llama(), args=args, train_dataset=data(480), data_collator=padded)

    def run(rank):
        trainer, seen = made(), []

        def slow(model, args, kwargs):
            seen.append(len(kwargs["input_ids"]))
            time.sleep((0.012 if rank else 0.004) * seen[-1])

        trainer.model.register_forward_pre_hook(slow, with_kwargs=True)
        return {**trained(trainer), "seen": seen, "total": trainer.get_total_train_batch_size(trainer.args)}

    def single(rank):
        return trained(made())

    first, second = run_ranks(run, 2)
    one = run_ranks(single, 1)[0]
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


@pytest.mark.parametrize("number", [None, "8,4"], ids=["tokens", "number"])
def test_the_sizes_that_are_shown_are_those_that_ran(number, tmp_path):
    settings = {"hetero_replan": 2, "hetero_hysteresis": 1.0, "output_dir": str(tmp_path), "num_train_epochs": 3}

    def run(rank):
        args, seen = arguments(12, number, **settings), []
        trainer = of(Trainer)(model=llama(), args=args, train_dataset=texts(60).rows, data_collator=padded)
        note = lambda model, args, kwargs: seen.append(len(kwargs["input_ids"]))  # noqa: E731
        trainer.model.register_forward_pre_hook(note, with_kwargs=True)
        history = trained(trainer)["history"]
        return seen, history, [entry.rows for entry in trainer.accelerator.plan_history]

    (first, history, rows), (second, _, others) = run_ranks(run, 2)
    ran, before = np.array([first, second]).T, 0
    (path,) = tmp_path.rglob("hetero_run.jsonl")
    record = RunRecord.from_lines(path.read_text().splitlines())
    assert record.header.by_cost is (number is None)
    for one in record.rounds:  # five steps of an epoch, none of them ragged
        steps = slice(max(before, 5 * one.epoch), before + one.count)
        possible = [ran[steps][first:].mean(axis=0) for first in range(len(ran[steps]))]
        assert np.isclose(one.ran, possible, rtol=1e-5).all(axis=1).any(), (one.ran, possible)
        before += one.count
    assert rows == others
    newest = [each for each in rows if each][-1]  # a plan of the last round has not run
    assert newest == pytest.approx(record.rounds[-1].ran, rel=1e-5)
    logged = [[one[f"hetero/local_batch_size/rank{rank}"] for rank in (0, 1)] for one in history if METRIC in one]
    assert all(np.isclose(one, [each.ran for each in record.rounds], rtol=1e-5).all(axis=1).any() for one in logged)
    assert len(logged) > 1
    assert (ran == (8, 4)).all() != (number is None)
    assert {"hetero/work_share/rank0" in one for one in history if METRIC in one} == {number is None}


def test_given_sizes_are_the_total():
    def run(rank):
        trainer = trainer_of((2, 9), 8, max_steps=6)  # 8 is not their sum
        return trained(trainer), trainer.get_total_train_batch_size(trainer.args)

    result, total = run_ranks(run, 2)[0]
    assert total == 11
    assert result["epoch"] == pytest.approx(1.5)  # 42 samples in 4 steps


# checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with a checkpoint of each step of a run on two ranks, its result, and that of one process."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    settings = {"num_train_epochs": 2, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2}

    def run(rank):
        return trained(trainer_of(output_dir=folder, save_strategy="steps", save_steps=1, **settings))

    def single(rank):
        return trained(trainer_of(None, **settings))

    return folder, run_ranks(run, 2)[0], run_ranks(single, 1)[0], settings


@pytest.mark.parametrize("sizes", [(2, 6), (5, 3), (1, 2, 5), (8,)], ids=["same", "other", "three", "one"])
def test_resumes_from_every_step(saved, sizes):
    folder, through, one, settings = saved
    assert through["steps"] == one["steps"] == 6
    assert abs(through["weights"] - one["weights"]).max() < 1e-6

    def run(rank):
        results = []
        for step in (1, 3, 4):  # in the middle of the first epoch, at its end, in the middle of the second
            trainer = trainer_of(sizes if len(sizes) > 1 else None, **settings)
            results.append(trained(trainer, resume_from_checkpoint=f"{folder}/checkpoint-{step}"))
        return results

    for resumed in run_ranks(run, len(sizes))[0]:
        assert resumed["steps"] == 6
        assert abs(resumed["weights"] - one["weights"]).max() < 1e-6
        assert resumed["rates"] == one["rates"]
        assert resumed["plans"][-1:] in ([sizes], [])


@pytest.mark.alone
def test_goes_on_with_what_was_learned(tmp_path):
    def run(rank, resumed):
        trainer = trainer_of(None, 16, 480, output_dir=str(tmp_path), save_strategy="steps", save_steps=24)
        seen = []

        def slow(model, args, kwargs):
            seen.append(len(kwargs["input_ids"]))
            time.sleep((0.012 if rank else 0.004) * seen[-1])

        trainer.model.register_forward_pre_hook(slow, with_kwargs=True)
        trained(trainer, resume_from_checkpoint=f"{tmp_path}/checkpoint-24" if resumed else None)
        return seen

    before, after = run_ranks(run, 2, False), run_ranks(run, 2, True)
    assert before[0][23] > 8
    assert after[0][0] == before[0][24]
    assert len(after[0]) == 6


def test_a_plain_checkpoint_is_resumed(tmp_path):
    def plain(rank):
        return trained(trainer_of(None, output_dir=str(tmp_path), save_strategy="steps", save_steps=2))

    one = run_ranks(plain, 1)[0]

    def run(rank):
        return trained(trainer_of(), resume_from_checkpoint=f"{tmp_path}/checkpoint-2")

    assert abs(run_ranks(run, 2)[0]["weights"] - one["weights"]).max() < 1e-6
    assert not list(Path(tmp_path).rglob("hetero_state.pt"))


def test_a_checkpoint_that_changed_is_named_on_every_rank_or_passed_over(saved, tmp_path):
    """The newest ones were damaged, edited, killed while they were written, or lack a file."""
    folder, _, one, settings = saved
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

    def run(rank):
        told = io.StringIO()
        logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(told))
        with pytest.raises(DamagedCheckpointError) as error:
            trainer_of(output_dir=str(tmp_path), **settings).train(resume_from_checkpoint=str(newest[0]))
        resumed = trained(trainer_of(output_dir=str(tmp_path), **settings), resume_from_checkpoint=True)
        return resumed, str(error.value), told.getvalue()

    results = run_ranks(run, 2)
    for resumed, error, _ in results:
        assert resumed["steps"] == 6
        assert abs(resumed["weights"] - one["weights"]).max() < 1e-6
        assert "checkpoint-6 is not a whole checkpoint (model.safetensors is not as it was written)" in error
        assert "The newest whole one beside it: checkpoint-5" not in error
    assert f"the newest one beside it that is whole: {tmp_path / 'checkpoint-2'}" in results[0][2]


def test_older_checkpoints_are_deleted_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    rotate, whole = transformers.trainer.rotate_checkpoints, []

    def watched(output_dir, **kwargs):
        whole.append([damage_in(one) for one in Path(output_dir).glob("checkpoint-*")])
        if len(whole) == 1:
            assert "rng_state_1.pth\n" in (tmp_path / "checkpoint-1" / "hetero_state.sha256").read_text()
        rotate(output_dir=output_dir, **kwargs)

    def run(rank):
        monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", watched)
        if rank == 1:
            save_late(monkeypatch, tmp_path / "checkpoint-1" / "hetero_state.sha256")
        how = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
        trained(trainer_of(output_dir=str(tmp_path), **how))
        return whole

    assert run_ranks(run, 2)[0] == [[""], ["", ""], ["", ""]]
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


# evaluation


def test_evaluation_is_that_of_one_process(tmp_path):
    def metrics(predicted):
        chosen = predicted.predictions.argmax(-1)
        return {"right": float((chosen == predicted.label_ids).mean()), "number": len(chosen)}

    def run(rank):
        told = io.StringIO()
        logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(told))
        often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "per_device_eval_batch_size": 4}
        args = arguments(8, (2, 6), output_dir=str(tmp_path), **often, **best)
        trainer = of(Trainer)(
            model=bert(), args=args, train_dataset=labelled(), eval_dataset=labelled(24), compute_metrics=metrics
        )
        before = trainer.evaluate()  # and only then train
        result = trained(trainer)
        predictions = trainer.predict(labelled(23))
        keys = ("eval_loss", "eval_right", "eval_number")
        evaluations = [[entry[key] for key in keys] for entry in result["history"] if "eval_loss" in entry]
        assert "taken for an evaluation's" not in told.getvalue()  # Trainer has said so
        return result, [before["eval_loss"], *map(tuple, evaluations)], predictions.predictions

    one, two = run_ranks(run, 1)[0], run_ranks(run, 2)[0]
    assert abs(one[0]["weights"] - two[0]["weights"]).max() < 1e-6  # of the best model
    assert len(one[1]) > 3
    for mine, theirs in zip(two[1], one[1], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert two[2] == pytest.approx(one[2], abs=1e-6)
    assert len(two[2]) == 23


# arguments of Trainer


def test_a_batch_size_is_found():
    def run(rank):
        trainer = trainer_of(None, 16, auto_find_batch_size=True)
        calls = []

        def fail_once(model, args, kwargs):
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("CUDA out of memory.")

        trainer.model.register_forward_pre_hook(fail_once, with_kwargs=True)
        return trained(trainer)

    assert run_ranks(run, 2)[0]["plans"][-1] == (7, 7)


def test_trains_twice_and_with_noise():
    def run(rank):
        trainer = trainer_of(neftune_noise_alpha=1.0)
        trainer.train()
        return trained(trainer)

    result = run_ranks(run, 2)[0]
    assert result["steps"] == 6
    assert torch.isfinite(torch.tensor(result["losses"])).all()


def test_callbacks_see_every_step():
    class Steps(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, **kwargs):
            self.seen.append((state.global_step, round(state.epoch, 3)))
            control.should_training_stop = state.global_step == 5

    def run(rank):
        steps = Steps()
        trainer = trainer_of(num_train_epochs=2)
        trainer.add_callback(steps)
        trained(trainer)
        return steps.seen

    assert run_ranks(run, 2)[0] == run_ranks(run, 1)[0] == [(n, round(n / 6, 3)) for n in range(1, 6)]


def test_a_training_on_a_stream_resumes(tmp_path):
    def run(rank, part):
        settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
        args = arguments(8, (2, 6), **{**settings, **({"save_strategy": "no"} if part == "rest" else {})})
        trainer = of(Trainer)(model=llama(), args=args, train_dataset=Stream(), data_collator=padded)
        how = {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-2")} if part == "rest" else {}
        return trained(trainer, **how)

    whole, rest = (run_ranks(run, 2, part)[0] for part in ("whole", "rest"))
    assert rest["steps"] == whole["steps"] == 5
    assert rest["losses"][-3:] == pytest.approx(whole["losses"][-3:], rel=1e-6)
    assert abs(rest["weights"] - whole["weights"]).max() < 1e-6


def test_what_is_not_split_trains_as_before():
    """Loaders that the Trainer shards itself, or streams, are weighted as they were."""

    def run(rank):
        rows = Rows([{**row, "length": len(row["input_ids"])} for row in texts(40).rows])
        args = arguments(8, None, train_sampling_strategy="batch_rebalance")
        balanced = trained(of(Trainer)(model=llama(), args=args, train_dataset=rows, data_collator=padded))
        args = arguments(8, None, max_steps=5)
        streamed = trained(of(Trainer)(model=llama(), args=args, train_dataset=Stream(), data_collator=padded))
        return balanced, streamed

    for one, two in zip(run_ranks(run, 1)[0], run_ranks(run, 2)[0], strict=True):
        assert two["steps"] == one["steps"] == 5
        assert abs(two["weights"] - one["weights"]).max() < 1e-6


class InOrder(Trainer):
    """Prepares a training loader of its own, in the order of the dataset, which looks like one that evaluates."""

    def get_train_dataloader(self):
        loader = DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=padded)
        return self.accelerator.prepare(loader)


def test_own_loaders_in_order_are_split():
    def run(rank):
        return trained(of(InOrder)(model=llama(), args=arguments(8, (2, 6)), train_dataset=texts()))

    one, two = run_ranks(run, 1)[0], run_ranks(run, 2)[0]
    assert two["plans"] == [(2, 6)]
    assert two["steps"] == one["steps"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert abs(two["weights"] - one["weights"]).max() < 1e-6


def test_batches_that_come_from_elsewhere_are_refused():
    class Copies(HeteroTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            wrong = {key: torch.cat([value, value[:1]]) for key, value in inputs.items()}
            return super().training_step(model, wrong, num_items_in_batch)

    def run(rank):
        args = arguments(8, (2, 6), gradient_accumulation_steps=2)
        trainer = Copies(model=llama(), args=args, train_dataset=texts(), data_collator=padded)
        with pytest.raises(ValueError, match="not one of the batches handed out"):
            trainer.train()
        return True

    assert run_ranks(run, 2) == [True, True]


REFUSED = {
    "fsdp": ({}, {"fsdp": True}),
    "deepspeed": ({}, {"deepspeed": "config.json"}),
    "parallelism_config": ({}, {"parallelism_config": object()}),
    "dispatch_batches": ({"accelerator_config": {"dispatch_batches": True}}, {}),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, {}),
    "max_total_batch_size": ({"hetero_max_total_batch_size": 64}, {}),
    "auto_find_batch_size": ({"auto_find_batch_size": True, "hetero_local_batch_sizes": "1,2"}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    given, later = REFUSED[name]

    def run(rank):
        args = HeteroTrainingArguments(output_dir="out", use_cpu=True, report_to=[], bf16=False, **given)
        for key, value in later.items():
            setattr(args, key, value)
        with pytest.raises(ValueError, match=rf"{name}.*(Leave|Give)"):
            HeteroTrainer(model=llama(), args=args, train_dataset=texts())
        return True

    assert all(run_ranks(run, 1))


def test_tensor_parallel_models_are_refused():
    args = HeteroTrainingArguments(output_dir="out", use_cpu=True, report_to=[], bf16=False)
    model = type("Model", (), {"tp_size": 2})()
    with pytest.raises(ValueError, match="tensor parallelism.*Load it without"):
        check_trainer(args, model, HeteroPlugin())
    check_trainer(args, None, HeteroPlugin())


def test_switched_off_it_is_plain():
    def run(rank):
        trainer = hetero_trainer(Trainer)(
            model=llama(), args=arguments(8, None), train_dataset=texts(), data_collator=padded
        )
        return type(trainer.accelerator).__module__, trained(trainer)["steps"]

    found = run_ranks(run, 2, env={"ACCELERATE_USE_HETERO": "false"})
    assert found == [("accelerate.accelerator", 6)] * 2


@pytest.mark.parametrize("env", [{"ACCELERATE_USE_HETERO": "true"}, {}], ids=["switched", "explicit"])
def test_one_process_is_told_that_the_switch_does_nothing(env):
    """And not a setting that nobody gave."""

    def run(rank):
        lines = collected()
        logging.getLogger("lightning_hetero").setLevel(logging.INFO)
        args = arguments(8, None)
        trained(hetero_trainer(Trainer)(model=llama(), args=args, train_dataset=texts(), data_collator=padded))
        return [line for line in lines if "has no effect" in line]

    (line,) = run_ranks(run, 1, env=env)[0]
    assert line.startswith("ACCELERATE_USE_HETERO=true has no effect" if env else "HeteroTrainer has no effect")
    assert "there is one worker" in line
