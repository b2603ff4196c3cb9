"""Evidence on "Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching" (D), in its order."""

from statistics import median
from typing import Any

from row import Paper, Row

PAPER = Paper(
    "D",
    "Dynamic batching",
    "S. Tyagi, P. Sharma. *Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching.* "
    "ACSOS 2020.",
)

COMMAND = "python benchmarks/papers/dynamic_batching.py {}"
LEVELS, CONTROL, MIXED, CURVE, ACCURACY, EMULATED = (
    {"command": COMMAND.format(name), "result": f"dynamic_batching_{name}.json"}
    for name in ("levels", "control", "mixed", "curve", "accuracy", "emulated")
)
SIMULATED, ON_CPU, ON_DEVICES, ON_GPU = "simulated", "measured on CPU", "emulated devices", "needs a GPU"


def chosen(data: Any, **where: Any) -> list[dict[str, Any]]:
    """Rows of a result with these values, numbers within a thousandth."""

    def same(found: Any, wanted: Any) -> bool:
        numbers = isinstance(wanted, float) and isinstance(found, (int, float))
        return abs(found - wanted) < 1e-3 if numbers else bool(found == wanted)

    return [row for row in data["rows"] if all(same(row.get(name), value) for name, value in where.items())]


def one(data: Any, **where: Any) -> dict[str, Any]:
    """The first of them."""
    return chosen(data, **where)[0]


def level(data: Any, model: str, number: int, *, gbit: float | None = None, serial: float = 0.0) -> dict[str, Any]:
    """Row of an H-level; by default with a link that takes no time, and cores that add up."""
    return one(data, model=model, level=number, gbit=gbit, **{"serial_%": 100 * serial})


def gains(row: dict[str, Any], *, total: bool = True) -> str:
    """What each policy gains over equal batches in 500 steps, and in the last third of them."""
    texts = [
        f"static by cores or FLOP/s {row['static']:.2f}x",
        f"control as printed {row['printed']:.2f}x from equal batches and {row['printed open']:.2f}x from open loop",
        f"ours {row['pid']:.2f}x (late {row['pid late']:.2f}x) and {row['pid open']:.2f}x",
        f"time model (default) {row['perf_model']:.2f}x (late {row['perf_model late']:.2f}x)",
        f"best split of the same total {row['optimum']:.2f}x",
    ]
    grown = f" As printed, the total batch becomes {row['printed_total']:.2f} times as large." if total else ""
    return ", ".join(texts) + "." + grown


def late(row: dict[str, Any]) -> float:
    """Time per sample over all steps, beside the best."""
    return float(row["us_per_sample"]) / float(row["optimum_us_per_sample"])


def controlled(data: Any, kind: str, **where: Any) -> dict[str, Any]:
    """Row of a controller with a dead band of 5 % and 3 % jitter, if nothing else is said."""
    usual: dict[str, Any] = {"jitter_%": 3.0, "away": False}
    usual |= {} if kind in ("perf_model", "even", "static") else {"dead_band": 0.05}
    usual |= {"every": 1} if kind.startswith("as printed") else {}
    return one(data, kind=kind, **{**usual, **where})


def best_controlled(data: Any, kind: str, **where: Any) -> dict[str, Any]:
    """The fastest of all dead bands and intervals of a controller."""
    return min(chosen(data, kind=kind, **where), key=lambda row: row["us_per_sample"])


def middle(data: Any, kind: str, name: str, dead_band: float = 0.05) -> float:
    """Median over seeds of a figure of the runs under Lightning."""
    where = {} if kind == "changes of plan" else {"dead_band": dead_band}
    return float(median(row[name] for row in chosen(data, kind=kind, **where)))


def quiet(data: Any, kind: str) -> dict[str, Any]:
    """Row of the seed of median speed, of the runs under Lightning with a dead band of 5 %."""
    rows = sorted(chosen(data, kind=kind, dead_band=0.05), key=lambda row: row["step_ms"])
    return rows[len(rows) // 2]


# sentences


def headline(data: Any) -> str:
    rows = [level(data, "ResNet-50", number) for number in (2, 4, 6, 8, 10)]
    found = ", ".join(f"{row['static']:.2f}x at H-level {row['level']} (at most {row['bound']:.2f}x)" for row in rows)
    models = [f"{row['perf_model']:.2f}x (late {row['perf_model late']:.2f}x)" for row in rows]
    return f"Static by cores: {found}. Time model, with nothing told of the cores: {', '.join(models)}."


def slower(data: Any) -> str:
    texts = []
    for model in ("ResNet-50", "MNIST CNN", "linear regression"):
        even = [level(data, model, number)["even_ms"] for number in (1, 2, 10)]
        texts.append(f"{model} {even[1] / even[0]:.2f} and {even[2] / even[0]:.2f} times")
    return f"Equal batches take at H-level 2 and 10: {'; '.join(texts)} as long as on equal workers."


def equation_3(data: Any) -> str:
    rows = chosen(data, policy="eq. 3")

    def steps(value: float | None) -> str:
        return "not within 500" if value is None else f"{value:.0f}"

    texts = [f"rate {row['rate']}: {steps(row['steps'])} against {steps(row['steps_with_1/K'])}" for row in rows]
    return f"Steps to 97 % by the weighted mean, and with the further 1/K as printed (K = 3): {'; '.join(texts)}."


def histograms(data: Any) -> str:
    even, pid, model = (quiet(data, kind) for kind in ("ddp", "pid", "perf_model"))
    return (
        f"5 %/50 %/95 % of each worker's milliseconds under DDP: {even['after_ms']}; under DynamicBatchPIDCallback: "
        f"{pid['after_ms']}; under the time model: {model['after_ms']}. Steps: {middle(data, 'ddp', 'step_ms'):.0f}, "
        f"{middle(data, 'pid', 'step_ms'):.0f} and {middle(data, 'perf_model', 'step_ms'):.0f} ms "
        f"(static by cores {middle(data, 'static', 'step_ms'):.0f} ms). Last splits: "
        f"{middle(data, 'pid', 'share_of_optimum_%'):.1f} and {middle(data, 'perf_model', 'share_of_optimum_%'):.1f} % "
        f"of the exact optimum, static {middle(data, 'static', 'share_of_optimum_%'):.1f} %."
    )


def sums(data: Any) -> str:
    rows = {number: level(data, "ResNet-50", number) for number in (2, 6, 10)}
    grown = ", ".join(f"{row['printed_total']:.2f} times at H-level {number}" for number, row in rows.items())
    return f"From equal batches the rule as printed changes the total batch: {grown}. Ours keeps it exactly."


def sums_emulated(data: Any) -> str:
    total = middle(data, "as printed", "last_total")
    return (
        f"Under Lightning, from 3 x 32 = 96 samples: {total:.0f} as printed; {middle(data, 'pid', 'last_total'):.0f} "
        "under ours."
    )


def adjustments(data: Any) -> str:
    texts = [
        f"{name}: within 5 % of the optimum from step {row['steps_to_5%']:.0f} on, changes in 900 steps: "
        f"{row['changes']:.0f}"
        for name, row in (
            ("as printed, decision after every step", controlled(data, "as printed")),
            ("ours", controlled(data, "pid")),
            ("time model", controlled(data, "perf_model")),
        )
    ]
    return "; ".join(texts) + "."


def oscillation(data: Any) -> str:
    texts = []
    for jitter in (0.0, 1.0, 3.0, 8.0):
        off, on = (controlled(data, "as printed", dead_band=band, **{"jitter_%": jitter}) for band in (0.0, 0.05))
        own = [controlled(data, "pid", dead_band=band, **{"jitter_%": jitter}) for band in (0.0, 0.05)]
        texts.append(
            f"{jitter:.0f} % jitter: {off['changes']:.0f} against {on['changes']:.0f} "
            f"(ours {own[0]['changes']:.0f} against {own[1]['changes']:.0f})"
        )
    return f"Changes in 900 steps without and with a dead band of 5 %: {'; '.join(texts)}."


def oscillation_emulated(data: Any) -> str:
    texts = [
        f"{name} {middle(data, kind, 'changes', 0.0):.0f} against {middle(data, kind, 'changes'):.0f}"
        for name, kind in (("as printed", "as printed"), ("ours", "pid"))
    ]
    return (
        f"Changes in 120 steps under Lightning, without and with a dead band of 5 %: {', '.join(texts)}; time model "
        f"{middle(data, 'perf_model', 'changes'):.0f}."
    )


def lasting_bounds(data: Any) -> str:
    off = controlled(data, "as printed", dead_band=0.0)
    noisy = controlled(data, "as printed", dead_band=0.0, **{"jitter_%": 8.0})
    moved = controlled(data, "as printed", away=True)
    return (
        f"As printed, the total batch ends at {off['total']:.2f} times what it was (3 % jitter, no dead band), at "
        f"{noisy['total']:.2f} (8 %), and with the dead band at {moved['total']:.2f} after half of a server was away "
        f"for 300 steps and is back: {late(moved):.2f} times the best time per sample, time model "
        f"{late(controlled(data, 'perf_model', away=True)):.2f}."
    )


def availability(data: Any) -> str:
    where = {"away": True, "jitter_%": 3.0}
    kept, free = (best_controlled(data, f"as printed, total kept{end}", **where) for end in ("", ", no bounds"))
    texts = [
        f"{name} {late(row):.3f}"
        for name, row in (
            ("equal batches", controlled(data, "even", away=True)),
            ("static by cores", controlled(data, "static", away=True)),
            ("as printed, best of six settings", best_controlled(data, "as printed", **where)),
            ("the same with its total kept", kept),
            ("and without learned bounds", free),
            ("ours", controlled(data, "pid", away=True)),
            ("ours, best of three dead bands", best_controlled(data, "pid", **where)),
            ("time model", controlled(data, "perf_model", away=True)),
        )
    ]
    return f"Time over that of an oracle that has the best split at every step: {', '.join(texts)}."


def changes_cost(data: Any) -> str:
    return (
        f"The first step after a change takes {middle(data, 'changes of plan', 'change_ms'):.1f} ms more than others "
        f"(95 %: {middle(data, 'changes of plan', 'change_95%_ms'):.0f} ms) of "
        f"{middle(data, 'changes of plan', 'step_ms'):.0f} ms, with nothing restarted. From a launch to the end of the "
        f"first step: {middle(data, 'changes of plan', 'start_s'):.0f} s on the same machine."
    )


def throughput(data: Any) -> str:
    rows = chosen(data, kind="measured")
    most = max(rows, key=lambda row: row["images_s"])
    texts = [f"{row['batch']}: {row['images_s']:.0f}" for row in rows]
    return f"Images per second at each batch size: {', '.join(texts)}. The most at {most['batch']}."


def knee(data: Any) -> str:
    texts = []
    for kind in ("even", "as printed, total kept, no bound", "as printed, total kept", "pid", "perf_model"):
        rows = [one(data, kind=kind, **{"jitter_%": jitter}) for jitter in (0.0, 3.0)]
        shares = " and ".join(f"{row['late_share_of_optimum_%']:.0f}" for row in rows)
        texts.append(f"{kind} {shares} % ({rows[0]['changes']:.0f} and {rows[1]['changes']:.0f} changes)")
    return f"Share of the best split's speed without and with 3 % jitter: {', '.join(texts)}."


def resnet(number: int) -> Any:
    def found(data: Any) -> str:
        row, amdahl = level(data, "ResNet-50", number), level(data, "ResNet-50", number, serial=0.03)
        return (
            f"At most {row['bound']:.2f}x for any split of one total: {gains(row)} If 3 % of the work of a sample runs "
            f"on one core: static {amdahl['static']:.2f}x, time model {amdahl['perf_model']:.2f}x, best "
            f"{amdahl['optimum']:.2f}x."
        )

    return found


def mnist(data: Any) -> str:
    rows = [level(data, "MNIST CNN", number) for number in (2, 4, 6, 8, 10)]
    texts = [
        f"H-level {row['level']}: static {row['static']:.2f}x, time model {row['perf_model']:.2f}x (late "
        f"{row['perf_model late']:.2f}x)"
        for row in rows
    ]
    return "; ".join(texts) + "."


def linear(data: Any) -> str:
    return gains(level(data, "linear regression", 10), total=False)


def flat(data: Any) -> str:
    texts = []
    for model in ("ResNet-50", "MNIST CNN", "linear regression"):
        row, equal = level(data, model, 6), level(data, model, 1)
        times = [row["even_ms"] / row[name] / equal["even_ms"] for name in ("static", "perf_model late")]
        texts.append(f"{model} {times[0]:.2f} and {times[1]:.2f}")
    return f"Time at H-level 6 over that of equal workers, static by cores and time model: {', '.join(texts)}."


def bound_by(data: Any) -> str:
    texts = []
    for model in ("ResNet-50", "MNIST CNN"):
        free, slow = (level(data, model, 10, gbit=gbit) for gbit in (None, 10.0))
        texts.append(
            f"{model} {free['perf_model late']:.2f}x without a link and {slow['perf_model late']:.2f}x at 10 Gbit/s"
        )
    return f"Time model at H-level 10: {'; '.join(texts)}."


def time_to_accuracy(data: Any) -> str:
    names = {
        "static": "static",
        "printed": "as printed",
        "printed open": "as printed from open loop",
        "pid": "ours",
        "perf_model": "time model",
    }
    texts = []
    for number in (2, 6, 10):
        rows = chosen(data, level=number)
        even = min(row["seconds"] for row in rows if row["policy"] == "even")
        first = {name: next(row for row in rows if row["policy"] == name) for name in ("even", *names)}
        best = {name: min(row["seconds"] for row in rows if row["policy"] == name) for name in names}
        gain = ", ".join(
            f"{text} {first['even']['seconds'] / first[name]['seconds']:.2f}x ({even / best[name]:.2f}x)"
            for name, text in names.items()
        )
        texts.append(
            f"H-level {number}: {gain}; as printed the total ends at {first['printed']['total']:.2f} of itself"
        )
    return f"Gain at a total of 96 (and with the best of three totals on both sides). {'. '.join(texts)}."


def gpu_and_cpu(model: str) -> Any:
    def found(data: Any) -> str:
        rows = chosen(data, cluster="P100 + 48 cores", model=model)
        row = one(data, cluster="P100 + 48 cores", model=model, ratio=4.35)
        needed = ", ".join(f"{other['optimum']:.2f}x at {other['ratio']}" for other in rows)
        return (
            f"At the paper's ratio of 4.35, at most {row['bound']:.2f}x: {gains(row)} Best at other ratios: {needed}."
        )

    return found


def dynamic_over_static(data: Any) -> str:
    texts = []
    for model in ("MNIST CNN", "ResNet-50"):
        rows = chosen(data, cluster="P100 + 48 cores", model=model)
        parts = [
            f"{100 * (row['pid open'] / row['static'] - 1):+.1f} % (time model, late, "
            f"{100 * (row['perf_model late'] / row['static'] - 1):+.1f} %) if the truth is {row['ratio']}"
            for row in rows
        ]
        texts.append(f"{model}: {', '.join(parts)}")
    return f"Over a static split at 4.35: {'; '.join(texts)}."


def two_gpus(data: Any) -> str:
    rows = chosen(data, cluster="T4 + P4", model="ResNet-50")
    texts = [
        f"{row['ratio']}: static {row['static']:.2f}x, ours {row['pid late']:.2f}x, time model "
        f"{row['perf_model late']:.2f}x (both late), best "
        f"{row['optimum']:.2f}x of at most {row['bound']:.2f}x"
        for row in rows
    ]
    return f"If a T4 is as many times as fast as a P4: {'; '.join(texts)}."


def no_gpu(data: Any) -> str:
    return "No device of these was at hand."


ROWS: list[Row] = [
    Row(
        "abstract",
        "Training times fall by more than 4x on heterogeneous clusters (TensorFlow, parameter servers).",
        SIMULATED,
        "holds in part",
        headline,
        note="On servers with 39 cores in all, ResNet-50 on CIFAR-10, times in proportion to samples over cores, and a "
        "link that takes no time. The gain of any split of the same total is at most the mean of the speeds over the "
        "least: 4x needs an H-level above 6; ours is there at 10, and not if a few percent of the work are serial or a "
        "link of 10 Gbit/s counts (rows of Fig. 6 and sec. IV-A).",
        **LEVELS,
    ),
    Row(
        "Fig. 1",
        "Equal batches on unequal workers take longer than on equal ones with the same resources, for three workloads.",
        SIMULATED,
        "holds",
        slower,
        note="The text gives no numbers.",
        **LEVELS,
    ),
    Row(
        "sec. III-A, eq. 2-3",
        "The weighted average of gradients keeps the convergence of SGD.",
        ON_CPU,
        "holds in part",
        equation_3,
        note="The weights `b_i / B` of eq. 2 sum to 1 and give the gradient of the whole batch; that holds, and is "
        "ours. Eq. 3 divides by K once more, which divides the learning rate by the number of workers.",
        **ACCURACY,
    ),
    Row(
        "Fig. 3",
        "Iteration times of three workers (3, 5 and 12 cores; ResNet-50) differ with equal batches and have similar "
        "distributions with variable ones.",
        ON_DEVICES,
        "holds",
        histograms,
        note="Emulated servers under Amdahl's law with 3 % of serial work, 3 % jitter, 6 ms of fixed time, 3 x 32 "
        "samples. The caption's ratios (3x and 2x) are not those of 3, 5 and 12 cores.",
        **EMULATED,
    ),
    Row(
        "sec. III-B and eq. 4-5",
        "Variable batches keep the total batch: it is invariant.",
        SIMULATED,
        "does not hold",
        sums,
        note="The static formula as printed, `b_0 X_k / sum X_i`, sums to `b_0` and lacks a factor K. The control rule "
        "`b t_mean / t` keeps no sum: from equal batches the total grows by the arithmetic over the harmonic mean of "
        "the times. Larger batches hide fixed times, so that samples per second flatter the rule.",
        **LEVELS,
    ),
    Row("sec. III-B and eq. 4-5", "The same, in a run.", ON_DEVICES, "does not hold", sums_emulated, **EMULATED),
    Row(
        "Fig. 4a",
        "From equal batches, sizes are stable after two adjustments (3, 5 and 12 cores).",
        SIMULATED,
        "holds",
        adjustments,
        note="A decision after every step, as the paper has it, takes a gathering of times in each; ours come after 8 "
        "steps or more.",
        **CONTROL,
    ),
    Row(
        "Fig. 4b",
        "Without a dead band, sizes oscillate; with one of 5 % they do not.",
        SIMULATED,
        "holds",
        oscillation,
        note="Ours waits for differences that exceed what jitter gives by chance, and needs no dead band for that. The "
        "text wants all sizes to change by 5 %, the pseudo-code one; the latter is used.",
        **CONTROL,
    ),
    Row(
        "Fig. 4b",
        "The same, in a run.",
        ON_DEVICES,
        "holds in part",
        oscillation_emulated,
        note="A decision every four steps. With the dead band, the printed rule still changes up to four times; on a "
        "busy host, whose steps were late by more than the dead band, as often as without. Ours compares with the "
        "jitter that it sees.",
        **EMULATED,
    ),
    Row(
        "sec. III-C1, bounds",
        "An upper bound of the batch size, set where throughput fell after a rise, keeps throughput from falling.",
        SIMULATED,
        "does not hold",
        lasting_bounds,
        note="Any fall counts as printed, jitter and a neighbour's visit too, and a bound never ends: sizes only "
        "fall, and with no sum kept the total does. In ours a fall has to exceed the noise, and bounds lapse unless it "
        "recurs.",
        **CONTROL,
    ),
    Row(
        "sec. III-C, contributions 1 and 3",
        "The controller handles dynamic resource availability; the evaluation has no experiment on it.",
        SIMULATED,
        "holds in part",
        availability,
        note="The largest of three servers loses half of its speed from step 300 to 600 of 900; 3 % jitter. The "
        "printed rule decides after every step for free, and its best setting was chosen afterwards.",
        **CONTROL,
    ),
    Row(
        "sec. III-C1, cost of adjusting",
        "A change of sizes terminates and restarts the training, and is to be rare.",
        ON_DEVICES,
        "holds in part",
        changes_cost,
        note="That a restart is dear holds; here a change needs none, it only alters what the loader draws. Their "
        "TensorFlow was not measured. Both times are of a "
        "machine of two cores.",
        **EMULATED,
    ),
    Row(
        "Fig. 5, CPU",
        "Throughput rises with the batch size, then declines gradually on CPUs.",
        ON_CPU,
        "holds in part",
        throughput,
        note="The MNIST network on one core, by CPU time. The rise holds; the decline "
        "is no more than runs differ on a busy machine.",
        **CURVE,
    ),
    Row("Fig. 5, GPU", "Throughput falls sharply where a GPU's memory ends.", ON_GPU, "open", no_gpu),
    Row(
        "Fig. 5, learned bounds",
        "Where throughput falls with size, the learned bound keeps workers below.",
        SIMULATED,
        "holds in part",
        knee,
        note="3, 5 and 12 cores; the largest takes 1.6 times as long per sample above 90 samples. As printed the bound "
        "is the size before the rise, far below 90, for good. The default takes times to be linear in the size, which "
        "is wrong here, and goes back and forth; policy='pid' is the better choice on such devices.",
        **CURVE,
    ),
    Row(
        "Fig. 6, ResNet-50, H-level 2",
        "Variable batches are 2x as fast as equal ones (9, 12 and 18 cores).",
        SIMULATED,
        "holds in part",
        resnet(2),
        note="The slowest worker has 9 of a mean of 13 cores: no split of one total gains more than 13/9, unless fewer "
        "samples on a worker make each of them cheaper.",
        **LEVELS,
    ),
    Row(
        "Fig. 6, ResNet-50, H-level 10",
        "Variable batches are 2.4x as fast (2, 17 and 20 cores); small workers still are stragglers.",
        SIMULATED,
        "holds in part",
        resnet(10),
        note="A gain holds, and is larger; what remains of a straggler is its fixed time.",
        **LEVELS,
    ),
    Row(
        "Fig. 6, MNIST CNN",
        "Variable batches are 2x to 4x as fast.",
        SIMULATED,
        "holds in part",
        mnist,
        note="2x and more from H-level 4 on, as bounded by the speeds.",
        **LEVELS,
    ),
    Row(
        "Fig. 6, linear regression",
        "Variable batches gain about 15 %: it is bound by communication and synchronization.",
        SIMULATED,
        "holds in part",
        linear,
        note="At H-level 10, for static batches; ours is slower than equal ones at first. Its three weights take "
        "no time by the table; the reported gain needs samples to take "
        "2.8 % of the fixed time on 13 cores, which is what is simulated. 500 "
        "steps are 50 ms here, which a few sync rounds of ours exceed; later they are rare.",
        **LEVELS,
    ),
    Row(
        "Fig. 6, flattened curve",
        "At H-level 6, ResNet-50 takes only 2x as long as on equal workers, MNIST 4x, linear regression 1.05x.",
        SIMULATED,
        "holds in part",
        flat,
        note="The shape. Times are flatter than reported, because cores add up here.",
        **LEVELS,
    ),
    Row(
        "sec. IV-A, result",
        "The gain is larger where computing bounds the step, not communication.",
        SIMULATED,
        "holds",
        bound_by,
        note="A ring of three, buckets of 25 MB.",
        **LEVELS,
    ),
    Row(
        "Fig. 6, time to accuracy",
        "Training time to the desired accuracy falls by up to 4x.",
        ON_CPU,
        "holds",
        time_to_accuracy,
        note="scikit-learn's digits to 97 %, Adam at the best of three rates for each policy and total, medians of six "
        "seeds; gradients are computed, the clock is simulated (MNIST CNN, 3 % serial work). Policies that keep the "
        "total take the same steps, about 130, the first of them at equal batches. As printed, the total moves, and "
        "with it the number of steps.",
        **ACCURACY,
    ),
    Row(
        "Fig. 7a, ResNet-50",
        "P100 and 48 cores: variable batches are more than 4x as fast as equal ones; FLOP/s 0.813 : 0.187.",
        SIMULATED,
        "holds in part",
        gpu_and_cpu("ResNet-50"),
        note="A CPU with 0.187 of the batch in place of half of it takes 0.374 of the time: 2.67x at most, whatever "
        "the GPU does, unless a CPU's time per sample falls with its batch. 4x needs a ratio of 7 or more.",
        **MIXED,
    ),
    Row(
        "Fig. 7a, MNIST CNN",
        "P100 and 48 cores: 20 % less time; not bound by computing.",
        SIMULATED,
        "holds in part",
        gpu_and_cpu("MNIST CNN"),
        note="It is bound by computing in our table (0.3 ms of fixed time), so that the gain is larger.",
        **MIXED,
    ),
    Row(
        "Fig. 7a, dynamic over static",
        "Closed loop gains 3 % over open loop for MNIST and nothing for ResNet-50.",
        SIMULATED,
        "holds in part",
        dynamic_over_static,
        note="Where FLOP/s tell the truth there is nothing to gain; where they do not, the closed loop gains more, "
        "for ResNet-50, too.",
        **MIXED,
    ),
    Row(
        "sec. IV-B, T4 and P4",
        "Two T4 and two P4: ResNet-50 takes 20 in place of 90 minutes, 4.5x.",
        SIMULATED,
        "holds in part",
        two_gpus,
        note="A gain holds; 4.5x needs T4s that are eight times as fast or more. By the float32 of data sheets they "
        "are 1.47 times as fast, and a static split by half-precision FLOP/s (11.8) is slower than equal batches. The "
        "P4's smaller memory may have been at work.",
        **MIXED,
    ),
    Row("Fig. 7", "P100 and 48 cores; T4 and P4.", ON_GPU, "open", no_gpu, note="On the devices themselves."),
]
