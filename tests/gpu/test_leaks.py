"""The check of what steps keep on a GPU: it has all modes, and finds on CPUs what it is to find on a GPU."""

import json

import pytest

from tests.gpu import leaks
from tests.gpu.outcome import Figures
from tests.ranks import run_ranks

COUNTED = "a number of each step"


def measured(folder, parts, device):
    """Figures of the parts, and what is wrong with them."""
    figures = Figures(folder / "leaks.json")
    leaks.measure(figures, parts, device)
    figures.end()
    return dict(figures), json.loads((folder / "leaks.json").read_text())["why"]


def _modes(rank):
    """The benchmark's modes, and the steps between its sync rounds."""
    modes = leaks.benchmark()._modes
    return list(modes.MODES), modes.ROUND


def test_each_mode_belongs_to_one_part():
    ((modes, between),) = run_ranks(_modes, 1)
    assert sorted(mode for part in leaks.PARTS.values() for mode in part) == sorted(modes)
    assert between == leaks.ROUND


def _keeps(rank, modes, kept):
    """A part of which the first mode keeps something with each step."""
    import torch

    modes_of = leaks.benchmark()._modes
    train, mine = modes_of.train, []

    def leaky(mode, steps, after_step, **given):
        def keeps(number, model):
            if mode == modes[0]:
                mine.append(torch.zeros(kept // 4))
            after_step(number, model)

        train(mode, steps, keeps, **given)

    modes_of.train = leaky
    return leaks._part(rank, modes, "cpu")


@pytest.mark.parametrize("kept", [0, 64])
def test_what_each_step_keeps_is_found(monkeypatch, tmp_path, kept):
    def forked(part, world_size, modes, device, timeout):
        assert (part, device) == (leaks._part, "cpu")
        return run_ranks(_keeps, world_size, modes, kept, timeout=timeout)

    monkeypatch.setattr(leaks, "ranks", forked)
    figures, wrong = measured(tmp_path, {"lightning": ("plain", "ddp")}, "cpu")
    steps = leaks.LAST - leaks.FIRST
    expected = {f"lightning: bytes of {COUNTED}": (64 + kept) * steps, "plain: bytes": kept * steps, "ddp: bytes": 0}
    assert figures == pytest.approx(expected, abs=511), "at another mark, a batch may have a few samples more"
    assert wrong == (f"steps of plain keep {figures['plain: bytes']} bytes" if kept else "")


@pytest.mark.parametrize(
    ("counted", "kept", "wrong"),
    [
        (512 * 200, 5119, ""),
        (512 * 200, 5120, "steps of plain keep 5120 bytes"),
        (512 * 100, 0, ""),
        (512 * 100 - 1, 0, f"lightning: {COUNTED} is not found, 51199 bytes"),
    ],
)
def test_a_gpu_may_keep_less_than_an_allocation_with_each_sync_round(monkeypatch, tmp_path, counted, kept, wrong):
    """The rank that keeps most counts, and a check that finds nothing at all fails, too."""
    found = [{COUNTED: counted, "plain": 0}, {COUNTED: counted, "plain": kept}]
    monkeypatch.setattr(leaks, "ranks", lambda part, world_size, modes, device, timeout: found)
    expected = {f"lightning: bytes of {COUNTED}": counted, "plain: bytes": kept}
    assert measured(tmp_path, {"lightning": ("plain",)}, "cuda") == (expected, wrong)


def _fails(rank):
    raise RuntimeError("gloo cannot do this\nat some place")


def test_a_part_that_fails_does_not_silence_the_others(monkeypatch, tmp_path):
    def ranks(part, world_size, modes, device, timeout):
        return run_ranks(_fails, 1) if modes == ("fsdp",) else [{COUNTED: 512 * 200, "plain": 0}] * 2

    monkeypatch.setattr(leaks, "ranks", ranks)
    figures, wrong = measured(tmp_path, {"fsdp": ("fsdp",), "lightning": ("plain",)}, "cuda")
    assert wrong.startswith("fsdp: RankError: ")
    assert figures["plain: bytes"] == 0
