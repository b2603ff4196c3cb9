"""What follows from StellaTrain's own tables and figures: rates that models need, eq. 3 and 6, choices, cloud costs."""

import json
from pathlib import Path

import numpy as np

from lightning_hetero.core.as_published import ThroughputModel
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.compression.objective import density_penalty, minimise_time_to_accuracy
from lightning_hetero.core.link.message_size import MessageSize

RESULTS = Path(__file__).parents[1] / "results"
ELEMENTS = {"ResNet-152": 58e6, "ViT-B": 88e6, "Swin-B": 139e6, "GPT-2": 123.6e6}
TABLE_2 = {
    "ResNet-152": {"RTX 2080 Ti": (32, 118), "RTX 3090": (48, 183), "RTX 4090": (64, 270)},
    "ViT-B": {"RTX 2080 Ti": (20, 99), "RTX 3090": (32, 148), "RTX 4090": (28, 300)},
    "Swin-B": {"RTX 2080 Ti": (16, 80), "RTX 3090": (36, 112), "RTX 4090": (40, 217)},
}
WAN_MBIT = 600.0
"""Greatest rate between the paper's two CloudLab clusters."""
GAIN, SAVED_FP32, SAVED_FP16 = 1.407, 0.645, 0.451
"""Throughput of 6 RTX and 4 V100 over that of 8 V100, and the shares of the cloud costs that the paper saves."""


def printed_radicand(times):
    """Return what stands under the root of eq. 3 as printed: ``sum t^2 - (sum t)^2``.

    Example:
        >>> printed_radicand([0.3, 0.3])
        -0.18
    """
    return round(float(np.sum(np.square(times)) - np.sum(times) ** 2), 12)


def variation(times):
    """Return the relative standard deviation, which eq. 3 means.

    Example:
        >>> variation([0.3, 0.3]), round(variation([0.2, 0.4]), 3)
        (0.0, 0.333)
    """
    return float(np.std(times) / np.mean(times))


def needed_rates():
    """Rows of Fig. 2: rate at which a model's gradient fits into the time of a batch, at saturation (Table 2)."""
    rows = []
    for model, devices in TABLE_2.items():
        for device, (alpha, beta) in devices.items():
            mbit = 32 * ELEMENTS[model] / ThroughputModel(alpha, beta).seconds(alpha) / 1e6
            rows.append({"what": "needed rate", "model": model, "device": device, "mbit": mbit})
    return rows


def splits():
    """Rows of eq. 3 and Fig. 14 (c): a total of each model over two RTX 4090 and two RTX 2080 Ti, even and by speed."""
    rows = []
    for model, devices in TABLE_2.items():
        workers = [ThroughputModel(*devices[name]) for name in ("RTX 4090", "RTX 4090", "RTX 2080 Ti", "RTX 2080 Ti")]
        for how, sizes in (("even", (60,) * 4), ("by speed", proportional_sizes(240, [w.beta for w in workers]))):
            times = [worker.seconds(size) for worker, size in zip(workers, sizes, strict=True)]
            rows.append(
                {"what": "split", "model": model, "how": how, "sizes": list(sizes), "step_ms": 1e3 * max(times)}
                | {"variation": variation(times), "printed_radicand": printed_radicand(times)}
            )
    return rows


def choices(noise_scale=1000.0):
    """Rows of Fig. 14 (a): density and total of least time to accuracy, by the rate of the link.

    The convergence profile of ViT-B is not published, so the costs are the package's assumptions.

    Args:
        noise_scale: samples at which a total costs twice as many as the least one.
    """
    devices = TABLE_2["ViT-B"]
    workers = [ThroughputModel(*devices[name]) for name in ("RTX 4090", "RTX 4090", "RTX 2080 Ti", "RTX 2080 Ti")]
    speed, least = sum(w.beta for w in workers), max(w.seconds(1) for w in workers)
    totals = {int(x): max(x / speed, least) for x in np.geomspace(32, 1024, 61)}
    blocks = int(ELEMENTS["ViT-B"] // 16)
    messages = MessageSize(blocks, 2, parts=(32,), listed=80, marked=80 + blocks // 8)

    def penalty(density, total):
        return (1.0 + density_penalty(density)) * (1.0 + total / noise_scale) - 1.0

    rows = []
    for mbit in (50, 100, 200, 500, 1000):
        rate = mbit * 1e6 / 8
        found = minimise_time_to_accuracy(
            totals,
            np.geomspace(0.001, 0.3, 41),
            transfer=lambda d, rate=rate: messages.bytes(d) / rate,
            penalty=penalty,
            stale=True,
        )
        best = min(found, key=lambda choice: choice.objective)
        rows.append({"what": "choice", "mbit": mbit, "density": best.density, "total": best.total_batch_size})
    return rows


def cloud(share):
    """Rows of Fig. 10: what the paper's figures say of each other, and ours.

    Half the cloud GPUs for ``1 / gain`` of the time cost ``0.5 / gain`` of what all cost, whatever their price.

    Args:
        share: of the speed that all GPUs together have, which a step reaches on the link that fluctuates.
    """
    vit = TABLE_2["ViT-B"]
    own = 4 * vit["RTX 4090"][1] + 2 * vit["RTX 3090"][1]
    v100 = vit["RTX 2080 Ti"][1]
    ideal = (own + 4 * v100) / (8 * v100)
    return [
        {
            "what": "cloud",
            "saved_by_its_gain": 1 - 0.5 / GAIN,
            "time_by_its_gain": 1 / GAIN - 1,
            "gain_by_its_saving_fp16": 0.5 / (1 - SAVED_FP16),
            "time_by_its_saving_fp16": (1 - SAVED_FP16) / 0.5 - 1,
            "ideal_gain": ideal,
            "paper_share_of_ideal": GAIN / ideal,
            "our_share": share,
            "our_gain": ideal * share,
            "our_time": 1 / (ideal * share) - 1,
            "our_saving": 1 - 0.5 / (ideal * share),
        }
    ]


def language(share):
    """Row of GPT-2 in sec. 5.1: seconds of a dense sum over 1 Gbit/s, and steps of two RTX 4090 and two RTX 2080 Ti.

    A step of 8 samples is split by speed or evenly, at the paper's 17.8 a second of two RTX 4090.

    Args:
        share: of the devices' speed that a step with compression and staleness reaches at 1 Gbit/s.
    """
    sent, fast, slow = 4 * ELEMENTS["GPT-2"], 17.8, 17.8 * 99 / 300
    seconds, by_speed, even = 8 * sent / 1e9, max(6 / fast, 2 / slow), 4 / slow
    ours = by_speed / share
    row = {"what": "language", "dense_bytes": sent, "least_seconds": seconds, "reported_seconds": 1 / 1.58}
    steps = {"over_ddp": (seconds + even) / ours, "over_dense": (seconds + by_speed) / ours}
    return [{**row, **steps, "over_one_node": 8 / ours / fast}]


def rows():
    """All rows; the costs use the committed speeds."""
    speeds = json.loads((RESULTS / "stellatrain_speed.json").read_text())["rows"]
    late = [row for row in speeds if row["model"] == "ViT-B" and "late" in row["kind"]]
    shares = {
        link: max(row["device_ms"] / row["step_ms"] for row in late if row["link"] == link)
        for link in ("trace", "1000")
    }
    return [*needed_rates(), *splits(), *choices(), *cloud(shares["trace"]), *language(shares["1000"])]
