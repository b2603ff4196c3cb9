"""Peak half-precision FLOP/s of devices, for open-loop splits (D sec. III-B).

Figures are dense (no sparsity), in the format of multiplications in mixed-precision training: float16 or bfloat16 with
sums in float32; where hardware has no fast half precision, float32. Sources: NVIDIA's data sheets of each product; for
GeForce and Quadro its Turing, Ampere, Ada and Blackwell architecture whitepapers; AMD's data sheets of the Instinct
series. A GPU that is not in the table gets multiprocessors x clock x FLOP per clock of its compute capability (CUDA C++
Programming Guide, "Arithmetic Instructions", and the same whitepapers), within 3 % of the table's figures.
"""

import re
from dataclasses import dataclass

__all__ = ["cpu_peak_flops", "gpu_peak_flops"]


@dataclass(frozen=True)
class UnknownGPU:
    """Figures of a GPU that is not in the table.

    Args:
        clock_hz: clock in Hz of a GPU that does not report one.
        gtx_per_clock: greatest FLOP per clock and multiprocessor of a GTX: it has no tensor cores, and a Turing GTX has
            128 float16 units per multiprocessor.
        geforce_share: share of the full rate at which GeForce tensor cores work with sums in float32 (from capability
            7.5 on).
    """

    clock_hz: float = 1.5e9
    gtx_per_clock: float = 256.0
    geforce_share: float = 0.5


UNKNOWN = UnknownGPU()

TERA = {
    # NVIDIA, data center
    "p4": 5.5,  # float32; its 22 TOPS are of int8
    "p40": 11.8,  # float32
    "p100 pcie": 18.7,
    "p100": 21.2,
    "v100 pcie": 112.0,
    "v100s": 130.0,
    "v100": 125.0,
    "t4": 65.0,
    "a2": 18.0,
    "a10": 125.0,
    "a10g": 70.0,
    "a30": 165.0,
    "a40": 150.0,
    "a100": 312.0,
    "a800": 312.0,
    "l4": 121.0,
    "l20": 119.5,
    "l40": 181.0,
    "l40s": 362.0,
    "h100 pcie": 756.0,
    "h100 nvl": 835.0,
    "h100": 989.0,
    "h800": 989.0,
    "h20": 148.0,
    "gh200": 989.0,
    "h200 nvl": 835.0,
    "h200": 989.0,
    "b200": 2250.0,
    "gb200": 2500.0,
    # NVIDIA, workstations: sums in float32 at full rate
    "titan v": 110.0,
    "titan rtx": 130.5,
    "quadro rtx 6000": 130.5,
    "quadro rtx 8000": 130.5,
    "a4000": 76.7,
    "a5000": 111.1,
    "a6000": 154.8,
    "rtx 6000 ada": 364.0,
    # GeForce: sums in float32 at half the rate of sums in float16; the whitepapers list both
    "1080 ti": 11.3,  # float32
    "2080 ti": 53.8,
    "3070": 40.6,
    "3080": 59.5,
    "3090": 71.0,
    "3090 ti": 80.0,
    "4080": 97.5,
    "4090": 165.2,
    "5080": 112.6,
    "5090": 209.5,
    # AMD; each half of an MI250 is a device of its own
    "mi100": 184.6,
    "mi210": 181.0,
    "mi250": 181.0,
    "mi250x": 191.5,
    "mi300a": 980.6,
    "mi300x": 1307.4,
    "mi325x": 1307.4,
    "mi350x": 2307.0,
    "mi355x": 2516.6,
}
"""TFLOP/s by words of the device's name, dense, in float16 or bfloat16."""

VARIANTS = {"ti", "super", "d", "laptop", "mobile", "max", "mig", "nvl", "pcie"}
"""Words that mark another device of the same name; unless an entry has them, the device's own clocks count."""
SAME = {name: {"pcie"} for name in ("v100", "v100s", "a100", "a800", "a30", "a40", "p4")}
"""Words among them that do not mark another device, by name."""

PER_CLOCK = {
    (5, 0): 256,
    (5, 3): 512,
    (6, 0): 256,
    (6, 1): 256,  # float32, because its float16 runs at 1/64 of that
    (6, 2): 512,
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 7): 2048,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
"""FLOP per clock and multiprocessor by compute capability."""
AMD_PER_CLOCK = {"gfx908": 1024, "gfx90a": 1024, "gfx942": 2048, "gfx950": 4096}

LANES = {"AVX512": (64, 1.4e9), "AVX2": (32, 1.8e9), "SVE256": (32, 2.6e9), "DEFAULT": (16, 2.1e9)}
"""FLOP per clock and core in float32, and the clock that all cores sustain, by vector instructions.

Each core has two units of fused multiply-add for 16, 8 or 4 numbers. Clocks are the base frequencies of a Xeon Platinum
8160 for each (Intel, Xeon Scalable specification update). With them, 48 cores have 4.3 TFLOP/s and a P100 has 4.3 times
as much, as in the paper.
"""


def gpu_peak_flops(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    clock: float | None = None,
    *,
    architecture: str = "",
) -> float:
    """Return the dense half-precision FLOP/s of a GPU, from the table by name or else from its clocks.

    Args:
        name: device name as the driver gives it.
        capability: compute capability of CUDA.
        multiprocessors: number of streaming multiprocessors, or compute units.
        clock: Hz, ``None`` if unknown.
        architecture: architecture of an AMD GPU, such as ``"gfx942"``; ``capability`` is then ignored.

    Example:
        >>> gpu_peak_flops("Tesla T4", (7, 5), 40) / gpu_peak_flops("Tesla P4", (6, 1), 20)
        11.818181818181818
        >>> round(gpu_peak_flops("unheard of", (8, 0), 108, 1.41e9) / 1e12)
        312
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    for entry in sorted(TERA, key=lambda text: -len(text.split())):
        wanted = entry.split()
        others = (VARIANTS & set(words)) - set(wanted) - SAME.get(wanted[0], set())
        if set(wanted) <= set(words) and not others:
            return TERA[entry] * 1e12
    if architecture:
        per_clock: float = AMD_PER_CLOCK.get(architecture.split(":")[0], 1024)
    else:
        known = [known for known in PER_CLOCK if known <= capability]
        per_clock = PER_CLOCK[max(known, default=min(PER_CLOCK))]
        if "gtx" in words:
            per_clock = min(per_clock, UNKNOWN.gtx_per_clock)
        elif "geforce" in words and capability >= (7, 5):
            per_clock *= UNKNOWN.geforce_share
    return multiprocessors * (clock or UNKNOWN.clock_hz) * per_clock


def cpu_peak_flops(cores: float, instructions: str = "DEFAULT") -> float:
    """Return the FLOP/s of processor cores: cores x vector lanes x two units of fused multiply-add x clock.

    Args:
        cores: cores, or the share of them that a quota leaves.
        instructions: widest vectors, as ``torch.backends.cpu.get_cpu_capability`` names them; others count as 128 bits.

    Example:
        >>> cpu_peak_flops(2, "AVX512") / cpu_peak_flops(1, "AVX512")
        2.0
        >>> round(18.7e12 / cpu_peak_flops(48, "AVX512"), 1)  # a P100 and 48 cores of a Xeon Platinum in the paper: 4.3
        4.3
    """
    per_clock, clock = LANES.get(instructions, LANES["DEFAULT"])
    return cores * per_clock * clock
