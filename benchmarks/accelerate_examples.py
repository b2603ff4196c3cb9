"""Run Accelerate's own examples unchanged under the flag, and compare each with one process.

    git clone --branch v1.15.0 https://github.com/huggingface/accelerate
    python benchmarks/accelerate_examples.py accelerate/examples

Two CPU processes take 13 and 3 sixteenths of each batch, one process the same total. As a control, the two
processes train once more with equal weights of their losses (the other ``loss_reduction``), which has to give another
result. The table goes to the page ``docs/accelerate.md``.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.ranks import free_port

RUN = Path(__file__).with_name("_accelerate_example.py")
BIN = Path(sys.executable).parent
WITHOUT = {
    "deepspeed_with_config_support.py": "DeepSpeed shards the optimizer; the flag is refused beside it",
    "fsdp_with_peak_mem_tracking.py": "FSDP; the flag is refused beside it",
    "megatron_lm_gpt_pretraining.py": "Megatron-LM, not plain data parallelism",
    "local_sgd.py": "refused at the first averaging: LocalSGD gives the models of all workers equal weights",
}
AUTOREGRESSIVE = "gradient_accumulation_for_autoregressive_models.py"
ARGUMENTS = {
    "gradient_accumulation.py": ["--gradient_accumulation_steps", "2"],
    AUTOREGRESSIVE: ["--gradient_accumulation_steps", "2", "--per_device_batch_size"],
}
PICTURES = ("cv_example.py", "complete_cv_example.py")
SIZES = {  # batch sizes of 256 and 64 on each process, and 16 in the others
    "automatic_gradient_accumulation.py": "416,96",
    **dict.fromkeys(PICTURES, "104,24"),
}
NOTES = {
    AUTOREGRESSIVE: ", with `ACCELERATE_HETERO_LOSS_REDUCTION=sum`, for which an error asks",
    "early_stopping.py": ", and stops when the loss of any worker's part is low, so not at the same step",
}


def run(script, processes, folder, **env):
    """Weights that the script ends with, or the last line of what it says."""
    reduction = env.get("ACCELERATE_HETERO_LOSS_REDUCTION", "")
    result = Path(folder) / f"{script.stem}-{processes}-{reduction}.json"
    started = [sys.executable]
    if processes > 1:
        port = f"--master_port={free_port()}"
        started = [str(BIN / "torchrun"), f"--nproc_per_node={processes}", port]
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    variables["PICTURES"] = str(Path(folder) / "pictures")
    variables["PYTHONPATH"] = str(Path(__file__).parents[1])
    arguments = list(ARGUMENTS.get(script.name, []))
    if script.name == AUTOREGRESSIVE:  # its loader does not shuffle, so that its size is left alone
        arguments.append(str(32 // processes))
    if script.name in PICTURES:
        arguments += ["--data_dir", variables["PICTURES"]]
    command = [*started, str(RUN), str(script), str(result), *arguments, "--cpu"]
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks as well
        process.communicate()
        return None, "not done within 300 s"
    if processes > 1 and "plan from epoch" not in said:
        return None, "the flag had no effect"
    if not result.exists():
        errors = [line for line in said.splitlines() if "Error" in line]
        return None, errors[0] if errors else said[-300:]
    return json.loads(result.read_text()), ""


def largest(one, two):
    """Largest difference of a weight."""
    return f"{max(abs(a - b) for a, b in zip(one, two, strict=True)):.0e}"


def compare(script, folder):
    """Return how one process differs from two unequal ones, weighted rightly and wrongly, or why there are none."""
    one, why = run(script, 1, folder, REFERENCE="2")
    if one is None:
        return f"no: fails in one process as well: {why}", "", ""
    flag = {"ACCELERATE_USE_HETERO": "true", "ACCELERATE_HETERO_LOCAL_BATCH_SIZES": SIZES.get(script.name, "26,6")}
    right, wrong = ("sum", "mean") if script.name == AUTOREGRESSIVE else ("mean", "sum")
    two, why = run(script, 2, folder, **flag, ACCELERATE_HETERO_LOSS_REDUCTION=right)
    if two is None:
        return f"no: {why}", "", ""
    control, _ = run(script, 2, folder, **flag, ACCELERATE_HETERO_LOSS_REDUCTION=wrong)
    differences = largest(one, two), "an error" if control is None else largest(one, control)
    return f"yes{NOTES.get(script.name, '')}", *differences


def main(folder):
    """Print a row for each script."""
    folder = Path(folder)
    scripts = sorted((folder / "by_feature").glob("*.py"))
    scripts += [folder / f"{name}_example.py" for name in ("nlp", "complete_nlp", "cv", "complete_cv")]
    sys.stdout.write("| script | runs unchanged | difference from one process | with wrong weights |\n")
    sys.stdout.write("| --- | --- | --- | --- |\n")
    with tempfile.TemporaryDirectory() as temporary:
        for script in scripts:
            known = script.name in WITHOUT
            row = (f"no: {WITHOUT[script.name]}", "", "") if known else compare(script, temporary)
            sys.stdout.write(f"| `{script.name}` | {' | '.join(row)} |\n".replace("|  |", "| |").replace("|  |", "| |"))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
