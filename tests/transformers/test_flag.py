"""Unchanged scripts under the flag, Transformers' own scripts among them, and the names that we rely on."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers.trainer as module

import lightning_hetero.transformers
from lightning_hetero.transformers import HeteroTrainer, adapt, restore
from lightning_hetero.transformers.flag import adapt_if_switched_on
from tests.accelerate.test_launch import BIN, execute
from tests.helpers import free_port

HERE = Path(__file__).parent
FLAGGED = HERE / "flagged.py"
SCRIPTS = os.environ.get("TRANSFORMERS_SCRIPTS")

SCRIPT = """
import json, sys
from transformers import HfArgumentParser, Trainer, TrainingArguments
from tests.transformers.runs import llama, padded, texts, trained

args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
trainer = Trainer(model=llama(), args=args, train_dataset=texts(), data_collator=padded)
result = trained(trainer)
if args.process_index == 0:
    found = {"weights": result["weights"].tolist(), "plans": result["plans"], "losses": result["losses"]}
    print("RESULT", json.dumps(found), flush=True)
"""
OPTIONS = {
    "report_to": "none",
    "num_train_epochs": 1,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "disable_tqdm": "true",
    "max_grad_norm": 1e9,
}


@pytest.fixture
def put_back():
    yield
    restore()


def imported():
    """The name as a script gets it."""
    from transformers import Trainer

    return Trainer


def test_adapting_is_undone(put_back):
    original = imported()
    assert original is module.Trainer
    adapt()
    mine = imported()
    assert mine is module.Trainer
    assert mine is not original
    adapt()
    assert module.Trainer is mine
    assert issubclass(mine, HeteroTrainer)
    assert issubclass(mine, original)
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    assert [getattr(mine, name) for name in names] == [getattr(original, name) for name in names]
    assert inspect.signature(mine) == inspect.signature(original)
    derived = type("Derived", (mine,), {})
    assert lightning_hetero.transformers.hetero_trainer(derived) is derived
    restore()
    assert imported() is module.Trainer is original
    restore()
    assert module.Trainer is original


def test_the_switch_adapts_an_import_of_ours(put_back, monkeypatch):
    """As when our package is what imports Transformers first."""
    for text, adapted in (("", False), ("off", False), ("maybe", True), ("true", True)):
        monkeypatch.setenv("ACCELERATE_USE_HETERO", text)
        adapt_if_switched_on()
        assert issubclass(module.Trainer, HeteroTrainer) == adapted
        restore()


def test_an_import_changes_nothing():
    assert module.Trainer.__mro__ == (module.Trainer, object)
    assert module.Accelerator.__module__ == "accelerate.accelerator"
    assert module.skip_first_batches.__module__ == "accelerate.data_loader"


def test_without_transformers_the_extra_is_named():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "import lightning_hetero.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "ImportError: lightning_hetero.transformers needs transformers: pip install" in done.stderr
    assert "lightning-hetero[transformers]" in done.stderr


USED = "lightning_hetero/transformers/trainer.py overrides this of transformers.Trainer: "
OVERRIDDEN = {
    "create_accelerator_and_postprocess": ["self"],
    "_get_dataloader": ["self", "dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"],
    "get_total_train_batch_size": ["self", "args"],
    "_get_num_items_in_batch": ["self", "batch_samples", "device"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "log": ["self", "logs", "start_time"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_canaries(name):
    method = getattr(module.Trainer, name, None)
    assert method is not None, USED + name
    assert list(inspect.signature(method).parameters) == OVERRIDDEN[name], USED + name


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("create_accelerator_and_postprocess", "self.accelerator = Accelerator("),
        ("_inner_training_loop", "self.get_train_dataloader()"),
        ("_finalize_training", "self._total_loss_scalar += self._tr_loss.item()"),
        ("_run_epoch", "skip_first_batches(train_dataloader,"),
        ("_run_epoch", "self.training_step(model, inputs, num_items_in_batch)"),
        ("get_batch_samples", "self._get_num_items_in_batch(batch_samples, device)"),
        ("compute_loss", "self.args.average_tokens_across_devices"),
        ("_get_num_items_in_batch", 'batch["shift_labels"]'),
        ("_save_checkpoint", "self._save_optimizer_and_scheduler(output_dir)"),
        ("_prepare_for_training", "self._load_optimizer_and_scheduler(resume_from_checkpoint)"),
        ("evaluation_loop", "self.accelerator.prepare_model(model, evaluation_mode=True)"),
    ],
)
def test_canaries_of_the_source(where, text):
    source = inspect.getsource(getattr(module.Trainer, where))
    assert text in source, f"lightning_hetero/transformers relies on this in transformers.Trainer.{where}: {text}"


@pytest.mark.parametrize(
    "first",
    ["import torch; from trl import SFTTrainer as Trainer", "from lightning_hetero.transformers import hetero_trainer"],
)
def test_the_switch_adapts_whatever_is_imported_first(first):
    code = (
        f"{first}\nimport sys\nfrom transformers import Trainer as stock\n"
        "print([cls.__module__ for cls in globals().get('Trainer', stock).__mro__])\n"
        "print(type(sys.modules['transformers.trainer']).__name__)"
    )
    command = (sys.executable, "-W", "ignore", "-c", code)
    variables = {"PYTHONPATH": str(HERE.parents[1]), "ACCELERATE_USE_HETERO": "true"}
    code_of_exit, output = execute(*command, warm=False, **variables)
    assert code_of_exit == 0, output
    assert "lightning_hetero.transformers.trainer" in output.splitlines()[-2], output
    assert output.splitlines()[-1] == "module"


def result_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


def test_an_unchanged_script_is_launched(tmp_path):
    """``--hetero_local_batch_sizes`` of the launcher, for a script with a stock ``HfArgumentParser``."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = {"PYTHONPATH": str(HERE.parents[1])}
    launch = [BIN / "lightning-hetero", "launch", "--cpu", "--num_processes", "2", "--main_process_port", free_port()]
    launch += ["--hetero_local_batch_sizes", "2,6"]
    options = [text for name, value in OPTIONS.items() for text in (f"--{name}", value)]
    common = [script, "--output_dir", tmp_path / "out", "--use_cpu", *options]
    common += ["--per_device_train_batch_size"]
    code, output = execute(*launch, *common, 4, **paths)
    assert code == 0, output
    two = result_of(output)
    code, output = execute(sys.executable, *common, 8, **paths, ACCELERATE_USE_HETERO="false")
    assert code == 0, output
    one = result_of(output)
    assert two["plans"] == [[2, 6]]
    assert one["plans"] == []
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-6)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)


def own(script, folder, *options, processes=2, flag="true", **environment):
    """Run a script of Transformers' own distributed tests on CPUs; it must succeed."""
    launch = [BIN / "torchrun", "--nnodes=1", f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
    paths = {"PYTHONPATH": str(HERE.parents[1])}
    arguments = [FLAGGED, Path(SCRIPTS) / f"{script}.py", "--output_dir", folder, *options]
    code, output = execute(*launch, *arguments, **paths, ACCELERATE_USE_HETERO=flag, **environment)
    assert code == 0, output


@pytest.mark.skipif(SCRIPTS is None, reason="TRANSFORMERS_SCRIPTS names no folder of tests/trainer/distributed/scripts")
class TestOwnScripts:
    """Scripts of Transformers' ``tests/trainer/distributed/scripts`` under the flag."""

    cpu = ("--use_cpu", "--report_to", "none")

    @pytest.mark.parametrize("script", ["eval_ddp", "worker_seed", "dispatch_batches"])
    def test_succeeds(self, script, tmp_path):
        own(script, tmp_path, *self.cpu)

    def test_batches_that_are_rebalanced(self, tmp_path):
        own("batch_rebalance_ddp", tmp_path)
        assert json.loads((tmp_path / "result.json").read_text())["ok"]

    def test_losses_are_those_of_one_process(self, tmp_path):
        sizes = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "2,6"}
        own("training_parity", tmp_path / "2", *self.cpu, "--per_device_train_batch_size", "4", **sizes)
        own(
            "training_parity",
            tmp_path / "1",
            *self.cpu,
            "--per_device_train_batch_size",
            "8",
            processes=1,
            flag="false",
        )
        two, one = (json.loads((tmp_path / name / "losses.json").read_text()) for name in "21")
        assert two == pytest.approx(one, rel=1e-6)

    def test_a_step_by_hand_is_that_of_plain_trainer(self, tmp_path):
        for flag in ("true", "false"):
            own("moe_aux_loss", tmp_path / flag, "--use_cpu", flag=flag)
        mine, plain = (torch.load(tmp_path / flag / "result.pt") for flag in ("true", "false"))
        assert mine["loss"] == plain["loss"]
        for name, gradient in plain["gradients"].items():
            torch.testing.assert_close(mine["gradients"][name], gradient)

    @pytest.mark.parametrize("options", [[], ["--bf16"], ["--gradient_accumulation_steps", "2"]])
    def test_language_model(self, options, tmp_path):
        """``train.py`` with its checks: losses of every step, and a resumed run that ends alike."""
        common = [
            *self.cpu,
            "--max_steps",
            "4",
            "--logging_steps",
            "1",
            "--save_steps",
            "2",
            "--save_strategy",
            "steps",
        ]
        common += ["--per_device_train_batch_size", "4", "--learning_rate", "1e-3", *options]
        losses = [tmp_path / f"{name}.json" for name in ("through", "resumed", "one")]
        sizes = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "3,5"}
        own(
            "train",
            tmp_path / "a",
            *common,
            "--loss_output_file",
            losses[0],
            "--eval_output_file",
            tmp_path / "e.json",
            **sizes,
        )
        resume = ["--resume_from_checkpoint", tmp_path / "a/checkpoint-2"]
        own("train", tmp_path / "b", *common, "--loss_output_file", losses[1], *resume, **sizes)
        one = [*common, "--per_device_train_batch_size", "8"]
        own("train", tmp_path / "c", *one, "--loss_output_file", losses[2], processes=1, flag="false")
        through, resumed, single = (json.loads(path.read_text()) for path in losses)
        tolerance = 2e-3 if "--bf16" in options else 1e-5
        assert len(through) == 4
        assert through == pytest.approx(single, rel=tolerance)
        assert resumed == pytest.approx(single, rel=tolerance)
        assert json.loads((tmp_path / "e.json").read_text())["eval_loss"] > 0


def test_the_flag_adapts_a_script_that_imports_transformers_first():
    """Transformers itself then imports torch, and with it our hook, while its module is not executed to its end."""
    code = "from transformers import Trainer; print('RESULT', [base.__name__ for base in Trainer.__mro__])"
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ACCELERATE_USE_HETERO": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HeteroTrainer" in done.stdout
    assert "has no effect" not in done.stdout + done.stderr
