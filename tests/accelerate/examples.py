"""Run Accelerate's own examples unchanged under the flag, and compare each with one process.

    git clone --branch v1.15.0 https://github.com/huggingface/accelerate
    python tests/accelerate/examples.py accelerate/examples

Two CPU processes take 13 and 3 sixteenths of each batch, one process the same total. The table goes to the page
``docs/accelerate.md``.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers import free_port

RUN = Path(__file__).with_name("example_run.py")
BIN = Path(sys.executable).parent
WITHOUT = {
    "deepspeed_with_config_support.py": "DeepSpeed shards the optimizer; the flag is refused beside it",
    "fsdp_with_peak_mem_tracking.py": "FSDP; the flag is refused beside it",
    "megatron_lm_gpt_pretraining.py": "Megatron-LM, not plain data parallelism",
    "local_sgd.py": "refused at the first averaging: LocalSGD gives the models of all workers equal weights",
    "schedule_free.py": "needs the package schedulefree, which is not installed here",
    "cv_example.py": "needs timm and torchvision, which are not installed here",
    "complete_cv_example.py": "needs timm and torchvision, which are not installed here",
}
SETTINGS = {"gradient_accumulation_for_autoregressive_models.py": {"ACCELERATE_HETERO_LOSS_REDUCTION": "sum"}}
AUTOREGRESSIVE = "gradient_accumulation_for_autoregressive_models.py"
ARGUMENTS = {
    "gradient_accumulation.py": ["--gradient_accumulation_steps", "2"],
    AUTOREGRESSIVE: ["--gradient_accumulation_steps", "2", "--per_device_batch_size"],
}
SIZES = {"automatic_gradient_accumulation.py": "416,96"}  # its batch size is 256 on each process, the others' 16
NOTES = {"early_stopping.py": ", and stops when the loss of any worker's part is low, so not at the same step"}


def run(script, processes, folder, **env):
    """Weights that the script ends with, or the last line of what it says."""
    result = Path(folder) / f"{script.stem}-{processes}.json"
    started = [sys.executable]
    if processes > 1:
        port = f"--master_port={free_port()}"
        started = [str(BIN / "torchrun"), f"--nproc_per_node={processes}", port]
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    arguments = list(ARGUMENTS.get(script.name, []))
    if script.name == AUTOREGRESSIVE:  # its loader does not shuffle, so that example_run.py leaves its size alone
        arguments.append(str(32 // processes))
    command = [*started, str(RUN), str(script), str(result), *arguments, "--cpu"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=folder, capture_output=True, text=True, timeout=300
    )
    if processes > 1 and "plan from epoch" not in done.stderr + done.stdout:
        return None, "the flag had no effect"
    if not result.exists():
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return None, errors[0] if errors else done.stderr[-300:]
    return json.loads(result.read_text()), ""


def compare(script, folder):
    """Largest difference of a weight between one process and two unequal ones, or why there is none."""
    one, why = run(script, 1, folder, REFERENCE="2")
    if one is None:
        return f"fails in one process as well: {why}"
    sizes = {"ACCELERATE_USE_HETERO": "true"}
    sizes["ACCELERATE_HETERO_LOCAL_BATCH_SIZES"] = SIZES.get(script.name, "26,6")
    two, why = run(script, 2, folder, **sizes, **SETTINGS.get(script.name, {}))
    if two is None:
        return f"fails: {why}"
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def main(folder):
    """Print a row for each script."""
    folder = Path(folder)
    scripts = sorted((folder / "by_feature").glob("*.py"))
    scripts += [folder / name for name in ("nlp_example.py", "complete_nlp_example.py", "cv_example.py")]
    sys.stdout.write(
        "| script | runs unchanged | largest difference of a weight from one process |\n| --- | --- | --- |\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for script in scripts:
            if script.name in WITHOUT:
                row = f"no: {WITHOUT[script.name]}", ""
            else:
                found = compare(script, temporary)
                setting = (
                    ", with `ACCELERATE_HETERO_LOSS_REDUCTION=sum`"
                    if script.name in SETTINGS
                    else NOTES.get(script.name, "")
                )
                row = (f"yes{setting}", f"{found:.0e}") if isinstance(found, float) else (f"no: {found}", "")
            sys.stdout.write(f"| `{script.name}` | {row[0]} | {row[1]} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
