"""Plain ``ddp`` against ``hetero_ddp`` on three workers of unequal speed: ``make demo``, two to four minutes.

Both train the same network on the same batches of scikit-learn's handwritten digits. The speeds are emulated: a worker
is stopped and continued many times a second, so that it runs for its share of the time. No privileges are needed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STRATEGIES = ("ddp", "hetero_ddp")
COLORS = {"ddp": "#888888", "hetero_ddp": "#0b6e99"}
RANKS = ("rank 0 (share 0.8)", "rank 1 (share 0.4)", "rank 2 (share 0.24)")


def run(strategy, folder, record, *, quick, limit):
    """Train in a process tree of its own; what rank 0 measured.

    Raises:
        SystemExit: if the training fails or is not done within ``limit`` seconds; all its processes are ended.
    """
    out = folder / f"{strategy}.json"
    command = [sys.executable, str(HERE / "_demo_train.py"), "--strategy", strategy, "--out", str(out)]
    command += ["--record", str(record)]
    process = subprocess.Popen(
        command + ["--quick"] * quick,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        start_new_session=True,  # so that all workers can be ended together
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"demo: the training with strategy={strategy!r} was not done within {limit:.0f} s. Is the machine busy? "
            f"Give it longer with --limit {2 * limit:.0f}."
        ) from None
    finally:
        end_group(process)
    if code != 0 or not out.is_file():
        raise SystemExit(
            f"demo: the training with strategy={strategy!r} failed (exit code {code}); its output is above."
        )
    return json.loads(out.read_text())


def end_group(process):
    """End what is left of the process tree; nothing is, unless the training failed."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def step_times(result):
    """Seconds of each step."""
    clock = result["clock"]
    return [after - before for before, after in zip(clock, clock[1:], strict=False)]


def samples_per_second(result, start=0):
    """Samples per second of wall time from a step on."""
    steps = len(result["clock"]) - 1 - start
    return steps * result["total_batch_size"] / (result["clock"][-1] - result["clock"][start])


def predictions(hetero):
    """Step time that the time model expects of the equal and of the last split, in seconds (``None``: not known)."""
    names = ("hetero/speed_up", "hetero/step_time")  # the speed over equal sizes, whose step is predicted
    known = [row[names[0]] * row[names[1]] for row in hetero["metrics"] if all(name in row for name in names)]
    return {"ddp": known[-1] if known else None, "hetero_ddp": hetero["plans"][-1]["predicted"]}


def sizes(split):
    return "/".join(map(str, split))


def milliseconds(seconds):
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def report(results):
    """The report as text."""
    ddp, hetero = (results[name] for name in STRATEGIES)
    half = len(ddp["splits"]) // 2
    predicted = predictions(hetero)
    overall = {name: samples_per_second(result) for name, result in results.items()}
    settled = {name: samples_per_second(result, half) for name, result in results.items()}
    measured = {name: statistics.median(step_times(result)[half:]) for name, result in results.items()}
    rows = [
        ("split at the end", lambda name: sizes(results[name]["splits"][-1])),
        ("predicted step time (1)", lambda name: milliseconds(predicted[name])),
        ("measured step time (2)", lambda name: milliseconds(measured[name])),
        ("samples/s, whole training", lambda name: f"{overall[name]:.0f}"),
        ("samples/s, second half (2)", lambda name: f"{settled[name]:.0f}"),
        ("speed-up, whole training", lambda name: f"{overall[name] / overall['ddp']:.2f}x"),
        ("speed-up, second half (2)", lambda name: f"{settled[name] / settled['ddp']:.2f}x"),
        ("samples trained on", lambda name: str(len(results[name]["splits"]) * results[name]["total_batch_size"])),
        ("test accuracy", lambda name: f"{results[name]['accuracy']:.1%}"),
    ]
    lines = [f"{'':28}{'ddp':>14}{'hetero_ddp':>14}"]
    lines += [f"{label:28}" + "".join(f"{value(name):>14}" for name in STRATEGIES) for label, value in rows]
    lines += [
        "",
        "(1) by the time model of the hetero_ddp run: for equal sizes at its last sync round,",
        "    for the last split before its first step",
        f"(2) from step {half} of {len(ddp['splits'])} on, well after the first splits; step times are medians",
        "The log of hetero_ddp compares with what its time model predicts for equal sizes if all workers",
        "compute all the time. Under ddp the others wait, and leave more of the machine to the slow one.",
        "",
        "Splits of hetero_ddp:",
    ]
    lines += [f"  from step {plan['step']:3}: {sizes(plan['split']):>10}  {plan['reason']}" for plan in hetero["plans"]]
    return "\n".join(lines)


def draw(results, path):
    """Step times of both, and the split of ``hetero_ddp``, over steps."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
    for name, result in results.items():
        top.plot([1e3 * t for t in step_times(result)], color=COLORS[name], label=name, linewidth=1.2)
    predicted = predictions(results["hetero_ddp"])["hetero_ddp"]
    if predicted is not None:
        top.axhline(1e3 * predicted, color=COLORS["hetero_ddp"], linestyle=":", label="predicted for the last split")
    for plan in results["hetero_ddp"]["plans"][1:]:
        for axes in (top, bottom):
            axes.axvline(plan["step"], color="#cccccc", linewidth=0.8, zorder=0)
    longest = 1e3 * max(statistics.quantiles(step_times(result), n=50)[-1] for result in results.values())
    top.set(ylabel="step time (ms)", ylim=(0, 1.25 * longest), title="Three workers of unequal speed, same batches")
    top.legend(loc="upper right", ncols=3, frameon=False)
    for rank, own in enumerate(zip(*results["hetero_ddp"]["splits"], strict=True)):
        bottom.step(range(len(own)), own, where="post", label=RANKS[rank])
    bottom.axhline(results["ddp"]["splits"][0][0], color=COLORS["ddp"], linestyle=":", label="ddp: all equal")
    most = max(max(split) for split in results["hetero_ddp"]["splits"])
    bottom.set(xlabel="step", ylabel="samples of the worker", ylim=(0, 1.3 * most), title="Split of hetero_ddp")
    bottom.legend(loc="upper right", ncols=4, frameon=False, fontsize="small")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small steps, to see that everything runs")
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds of one training")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "demo-report", help="folder of the picture and the record"
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    print(
        "Three workers with 0.8, 0.4 and 0.24 of a core train a small convolutional network on handwritten digits.\n"
        "Their speeds are emulated: a worker is stopped and continued (SIGSTOP, SIGCONT) 100 times a second.\n"
    )
    if (os.cpu_count() or 1) < len(RANKS):
        print(
            f"Only {os.cpu_count()} cores: workers that run at the same time get in each other's way, which costs\n"
            "hetero_ddp more than ddp, because it lets none of them wait.\n"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in STRATEGIES:
            print(f"Training with strategy={name!r}", flush=True)
            results[name] = run(name, Path(folder), arguments.output, quick=arguments.quick, limit=arguments.limit)
    print(f"\n{report(results)}\n")
    picture = arguments.output / "demo.png"
    draw(results, picture)
    print(f"Picture: {picture} ({time.perf_counter() - begin:.0f} s in all)")
    print(f"Page on the run of hetero_ddp: lightning-hetero report {arguments.output}")


if __name__ == "__main__":
    main()
