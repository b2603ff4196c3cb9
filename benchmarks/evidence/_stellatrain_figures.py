"""Figures of StellaTrain's rows: a text from the contents of a result each."""

MODELS = ("ResNet-152", "ViT-B", "Swin-B", "GPT-2")
DENSE = "dense at 1 Gbit/s"
LINKS = {"100": 1, "500": 5, "1000": 10}
"""Rates in Mbit/s, and the percentage that the paper's baselines send there."""


def rows_where(result, **values):
    """Return the rows that have these values."""
    return [row for row in result["rows"] if all(row.get(name) == value for name, value in values.items())]


def one(result, **values):
    """Return the only row that has these values."""
    (row,) = rows_where(result, **values)
    return row


def between(values, form="{:.1f}"):
    """Return the least and the greatest value as text.

    Example:
        >>> between([3.0, 1.25]), between([2.0])
        ('1.2 to 3.0', '2.0')
    """
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def listed(result, text):
    """Return a text for each model with a controller, joined; ``text`` is a function of the model's name."""
    present = {row["model"] for row in result["rows"] if row["kind"].startswith("controller")}
    return "; ".join(f"{model}: {text(model)}" for model in MODELS if model in present)


def step(result, model, link, kind):
    """Return milliseconds of a step."""
    return one(result, model=model, link=link, kind=kind)["step_ms"]


def our_step(result, model, link):
    """Return the shortest step with compression and staleness on a link, fixed or chosen, in milliseconds."""
    return min(row["step_ms"] for row in rows_where(result, model=model, link=link) if row["kind"].endswith("late"))


def compared(result, link, kind):
    """Return how many times as long a step of another kind takes as ours, for each model."""
    models = [model for model in MODELS if rows_where(result, model=model, link=link, kind=kind)]
    return [step(result, model, link, kind) / our_step(result, model, link) for model in models]


# iteration speed


def measured(result):
    """Return the names of the models that a result has, in the order of the paper."""
    present = {row["model"] for row in result["rows"]}
    return ", ".join(model for model in MODELS if model in present)


def figure_11a(result):
    parts = [
        f"{link} Mbit/s: {between(compared(result, link, 'ddp'), '{:.0f}')} times over DDP, "
        f"{between(compared(result, link, 'powersgd'))} over PowerSGD, "
        f"{between(compared(result, link, f'top-k {share} %'), '{:.2f}')} over the same compression without staleness"
        for link, share in LINKS.items()
    ]
    return f"{measured(result)}: {'; '.join(parts)}."


def figure_8b(result):
    names = {
        "fp16": "fp16",
        "powersgd": "PowerSGD",
        "top-k 5 %": "synchronous top-k of 5 %",
        "top-k 1 %": "synchronous top-k of 1 %",
    }
    others = [f"{name} {between(compared(result, 'trace', kind), '{:.2f}')}" for kind, name in names.items()]
    return f"{measured(result)}, length of a step over ours: {', '.join(others)}."


def figure_8c(result):
    def text(model):
        rows = {kind: one(result, model=model, link="trace", kind=kind) for kind in ("ddp", "controller, late")}
        device = rows["controller, late"]["device_ms"]
        ours = [1e3 / part[2] for part in rows["controller, late"]["trace"]]
        least, most = min(ours), max(ours)
        return (
            f"{least:.2f} to {most:.2f} steps/s with the controller (mean "
            f"{1e3 / rows['controller, late']['step_ms']:.2f}), "
            f"{1e3 / rows['ddp']['step_ms']:.3f} with DDP, {1e3 / device:.2f} computing only"
        )

    return listed(result, text) + "."


def utilization(result):
    rows = [row for row in rows_where(result, link="1000") if row["kind"] in ("dense", DENSE)]
    return (
        "With dense sums at 1 Gbit/s the devices compute for "
        f"{between([100 * r['device_ms'] / r['step_ms'] for r in rows])}"
        f" % of a step ({', '.join(row['model'] for row in rows)})."
    )


def language(result):
    row = one(result, what="language")
    return (
        f"{row['over_ddp']:.1f} times as fast as DDP, {row['over_dense']:.1f} times as fast as DDP split by speed; "
        f"{100 * row['over_one_node'] - 100:+.0f} % against two RTX 4090 alone, where the four GPUs without a network "
        "would give +33 %."
    )


# time to a loss


def samples_at_best(result, kind):
    """Return the least steps to the target of a kind over its learning rates."""
    found = [row["steps_to_target"] for row in result["rows"] if row["kind"].startswith(f"{kind}, rate")]
    return min(steps for steps in found if steps)


def dense_seconds(result, link, kind="ddp"):
    """Return seconds to the target with as many steps as dense sums need, which PowerSGD needs too at the same rate."""
    return samples_at_best(result, "dense") * one(result, link=link, kind=f"{kind}, steps")["step_ms"] / 1e3


def least_seconds(result, link, start):
    """Return the least seconds to the target among kinds that begin so, over learning rates."""
    found = [row["seconds_to_target"] for row in rows_where(result, link=link) if row["kind"].startswith(start)]
    return min(seconds for seconds in found if seconds)


def ours_seconds(result, link):
    """Return the least seconds to the target with staleness, fixed or chosen by the controller."""
    late = [row["seconds_to_target"] for row in rows_where(result, link=link) if ", late" in row["kind"]]
    return min(seconds for seconds in late if seconds)


def figure_8a(result):
    ours = ours_seconds(result, "trace")
    others = {kind: dense_seconds(result, "trace", kind) / ours for kind in ("ddp", "dense", "fp16", "powersgd")}
    return (
        f"To a loss of 0.15 on the trace {others['ddp']:.0f} times as fast as DDP, "
        f"{others['dense']:.0f} as DDP split by "
        f"speed, {others['fp16']:.0f} as fp16, {others['powersgd']:.1f} as PowerSGD."
    )


def figure_9(result):
    parts = []
    for link, share in LINKS.items():
        ours = ours_seconds(result, link)
        others = {kind: dense_seconds(result, link, kind) / ours for kind in ("ddp", "dense", "powersgd")}
        same = least_seconds(result, link, f"top-k {share} %, {link}") / ours
        parts.append(
            f"{link} Mbit/s: {others['ddp']:.0f} times over DDP, {others['dense']:.0f} over DDP split by speed, "
            f"{others['powersgd']:.1f} over PowerSGD, {same:.2f} over the same compression without staleness"
        )
    return "; ".join(parts) + "."


def figure_14b(result):
    fixed = {share: least_seconds(result, "trace", f"top-k {share} %, late") for share in (10, 5, 1)}
    density, both = (
        least_seconds(result, "trace", kind) for kind in ("controller, late", "controller and batch, late")
    )
    return (
        f"To a loss of 0.15 on the trace: {both:.1f} s if density and total move, {density:.1f} s if only the density "
        "moves, fixed " + ", ".join(f"{seconds:.1f} s at {share} %" for share, seconds in fixed.items()) + "."
    )


def figure_15(result):
    dense = samples_at_best(result, "dense")
    ours = one(result, link="100", kind="ddp, steps")["step_ms"]
    points = []
    for name, kind, steps in (
        ("DDP", "ddp, steps", dense),
        ("fp16", "fp16, steps", dense),
        ("PowerSGD", "powersgd, steps", dense),
        ("top-k 1 %", "top-k 1 %, 100, rate 0.05", None),
        ("the same, late", "top-k 1 %, late, 100, rate 0.05", None),
    ):
        row = one(result, link="100", kind=kind)
        needed = steps or row["steps_to_target"]
        points.append(
            f"{name}: {ours / row['step_ms']:.1f}, {needed / dense:.2f}" if needed else f"{name}: not reached"
        )
    return "Iteration speed over DDP at 100 Mbit/s, and samples to the loss over dense sums: " + "; ".join(points) + "."


# parts left out


def slower(result, kind, link="100"):
    """Return by how many percent iteration speed falls without a part."""
    return 100 * (1 - step(result, "ViT-B", link, "all of it") / step(result, "ViT-B", link, kind))


def table_1(result):
    parts = ("without compression", "without staleness", "without sparse optimizer", "single elements")
    falls = ", ".join(f"{part} by {slower(result, part):.0f} %" for part in parts)
    return f"Iteration speed of ViT-B at 100 Mbit/s falls {falls} (for blocks of 16)."


def components(result):
    return (
        "ViT-B at 100 Mbit/s: single elements for blocks cost "
        f"{slower(result, 'single elements'):.0f} % of the iteration "
        f"speed, a dense optimizer {slower(result, 'without sparse optimizer'):.0f} %, both "
        f"{slower(result, 'single elements, without sparse optimizer'):.0f} %."
    )


def without_staleness(result):
    falls = []
    for link, share in LINKS.items():
        late, same = (step(result, "Swin-B", link, f"top-k {share} %{end}") for end in (", late", ""))
        falls.append(f"by {100 * (1 - late / same):.0f} % at {link} Mbit/s")
    return f"Without staleness, iteration speed of Swin-B falls {', '.join(falls)}."


# samples


def over_dense(result, kind):
    """Return samples to the target over those of dense sums, as text."""
    value = next(row for row in result["rows"] if row["kind"] == kind)["over_dense"]
    return "not reached" if value is None else f"{value:.2f}"


def figure_3(result):
    rows = [row for row in rows_where(result, what="bandwidth") if row["over_dense"] is not None]
    return (
        "Samples to a loss over dense sums, with the same bytes per second and staleness: "
        + ", ".join(f"{row['kind'].removesuffix(', late')}: {row['over_dense']:.2f}" for row in rows)
        + "."
    )


def figure_11b(result):
    return (
        f"Samples to a loss over dense sums: 1 %: {over_dense(result, '1 %')}, 1 % and late: "
        f"{over_dense(result, '1 %, late')}, dense and late: {over_dense(result, 'dense, late')}."
    )


def staleness_samples(result):
    def extra(kind, base):
        values = [next(row for row in result["rows"] if row["kind"] == name)["over_dense"] for name in (kind, base)]
        return "not reached" if None in values else f"{100 * (values[0] / values[1] - 1):+.0f} %"

    return (
        f"One step of delay takes {extra('dense, late', 'dense')} samples with dense gradients and "
        f"{extra('1 %, late', '1 %')} at 1 %; with 15 % of the parameters fresh "
        f"{extra('dense, late but for 15 %', 'dense')}"
        f" and {extra('1 %, late but for 15 %', '1 %')}."
    )


def figure_13b(result):
    kinds = [row["kind"] for row in rows_where(result, what="selection")][1:]
    return (
        "Samples to a loss over dense sums at 1 %: "
        + ", ".join(f"{kind}: {over_dense(result, kind)}" for kind in kinds)
        + "."
    )


def probes(result):
    row, profile = one(result, what="surrogate"), one(result, what="profile")["points"][3]
    high = sum(rate > 0.97 for rate, *_ in profile)
    return (
        f"After 30 probes, the extra loss of {row['kind'].split(', ')[1]} at random "
        "settings is predicted with a median error of "
        f"{row['error']:.3f} (correlation {row['correlation']:.2f}; {row['error_of_the_mean']:.3f} if the mean of the "
        f"probes is the prediction; true values from {row['least']:.2f} to "
        f"{row['most']:.2f}). {high} of the probes have "
        "more than 97 % compression."
    )


# costs


def cost(result, what, name, density=0.01, model="ViT-B"):
    """Return milliseconds of one thread."""
    return one(result, what=what, candidate=name, density=density, model=model)["ms"]


def figure_12(result):
    times = {
        name: cost(result, "optimizer", name) for name in ("SGD", "elements, torch", "SparseSGD", "SparseSGD, numba")
    }
    dense = times["SGD"]
    return (
        f"88 M parameters, 1 %, one thread: dense {dense:.0f} ms (fused "
        f"{cost(result, 'optimizer', 'SGD fused'):.0f}), single "
        f"elements {times['elements, torch']:.0f}, blocks {times['SparseSGD']:.1f}, with Numba "
        f"{times['SparseSGD, numba']:.1f}: {dense / times['SparseSGD, numba']:.0f} times as fast as dense."
    )


def figure_13a(result):
    names = ("elements, topk", "elements, threshold", "blocks, exact", "blocks, exact, numba", "add_")
    ms = {name: cost(result, "compress", name) for name in names}
    ours = ms["blocks, exact, numba"]
    return (
        f"88 M parameters, 1 %, one thread: {ours:.0f} ms ({ms['blocks, exact']:.0f} "
        "without Numba), single elements by a "
        f"threshold {ms['elements, threshold']:.0f}, by top-k {ms['elements, topk']:.0f}: "
        f"{ms['elements, threshold'] / ours:.1f}"
        f" and {ms['elements, topk'] / ours:.0f} times as long "
        f"({ms['elements, threshold'] / ms['blocks, exact']:.1f} and {ms['elements, topk'] / ms['blocks, exact']:.0f} "
        "without Numba on both sides); adding the gradient to the "
        f"residual alone takes {ms['add_']:.0f}."
    )


def threshold(result):
    rows = {row["candidate"]: row for row in rows_where(result, what="controller")}
    return (
        "Of the magnitudes that an exact top-k takes, the threshold takes "
        f"{100 * rows['aimd']['mass, 50-150']:.0f} % in steps 50 "
        f"to 150 of a test problem; the selector of this package takes {100 * rows['exact']['mass, 50-150']:.0f} %."
    )


def priority(result):
    first, ruled = (rows_where(result, priority=flag)[0]["step_ms"] for flag in (False, True))
    return (
        f"A step takes {first:.0f} ms first come, first served and {ruled:.0f} ms by "
        f"deadline: {100 * (first / ruled - 1):.0f} %."
    )


# from its tables


def figure_2(result):
    rates = [row["mbit"] / 1e3 for row in rows_where(result, what="needed rate")]
    return f"With the batches and speeds of Table 2, {between(rates)} Gbit/s: all above the 0.05 to 0.6 of the link."


def equation_3(result):
    rows = rows_where(result, what="split", how="by speed")
    return (
        "For splits by speed, which make times equal to "
        f"{100 * max(row['variation'] for row in rows):.1f} %, what stands "
        f"under the root as printed is {between([row['printed_radicand'] for row in rows], '{:.2f}')}: no real number."
    )


def figure_14a(result):
    rows = rows_where(result, what="choice")
    return (
        "Chosen: "
        + ", ".join(
            f"{row['mbit']} Mbit/s: {row['total']} samples at {100 * (1 - row['density']):.1f} %" for row in rows
        )
        + " compression."
    )


def figure_14c(result):
    even, by_speed = (one(result, what="split", model="ViT-B", how=how) for how in ("even", "by speed"))
    return (
        f"ViT-B, 240 samples: {by_speed['sizes'][0]} for an RTX 4090 and "
        f"{by_speed['sizes'][2]} for an RTX 2080 Ti; a step "
        f"takes {by_speed['step_ms']:.0f} ms for {even['step_ms']:.0f} with an even split."
    )


def cloud(result):
    row = one(result, what="cloud")
    return (
        f"Simulated with our share of all devices' speed on the trace ({100 * row['our_share']:.0f} %, ViT-B): "
        f"{100 * row['our_gain'] - 100:+.0f} % throughput, {100 * row['our_time']:+.0f} % time, "
        f"{100 * -row['our_saving']:+.0f} % cost; the paper's gain is "
        f"{100 * row['paper_share_of_ideal']:.0f} % of the sum."
    )


def cloud_fp16(result):
    row = one(result, what="cloud")
    return (
        f"Half the cloud GPUs at {100 * row['time_by_its_gain']:+.1f} % time cost "
        f"{100 * row['saved_by_its_gain']:.1f} % less, "
        f"whatever the price. 45.1 % less is possible only with {100 * row['time_by_its_saving_fp16']:+.1f} % time."
    )


def iterations(result):
    row = one(result, what="language")
    return (
        f"A dense sum of {row['dense_bytes'] / 1e6:.0f} MB takes {row['least_seconds']:.1f} s on 1 Gbit/s, so steps of "
        f"{row['reported_seconds']:.2f} s are impossible: the iterations must be of single workers or samples."
    )


def unknown(reason):
    """Return a function that gives the reason why a row is open."""
    return lambda _: reason
