"""Picture of a plan: what its bars show."""

import numpy as np
import pytest

from lightning_hetero.simulate.planning import Cluster, Link, Worker, picture, plan_cluster

FAST, SLOW = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)


def test_a_bar_is_the_step_of_a_kind_of_workers(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: figures.append(figure))
    answer = plan_cluster(Cluster((FAST, FAST, SLOW), Link(4e7, 1e9)), 60)
    picture.draw_plan(answer, "plan.png", "lab")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2 x fast", "slow"]
    compute, idle = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert compute == pytest.approx([1e3 * answer.workers[i].compute_time for i in (0, 2)])
    assert [a + b for a, b in zip(compute, idle, strict=True)] == pytest.approx([1e3 * answer.step_time] * 2)
    assert [bar.get_x() for bar in axes.containers[1]] == pytest.approx(compute)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("kinds", [1, 8, 16, 40, 50])
def test_a_split_s_lines_have_a_legend_that_fits(monkeypatch, kinds):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: figures.append(figure))
    names = [f"dev{i // 2}" for i in range(2 * kinds)]
    sizes = np.arange(2 * kinds)[None, :].repeat(3, axis=0)
    picture.draw_split(range(3), sizes, np.ones(3), names, "split.svg", "lab")
    (figure,) = figures
    assert legend(figure) == [f"2 x dev{i}" for i in range(min(kinds, 40))]
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 < figure.axes[1].get_window_extent().y0
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()}
    assert len(styles) == min(kinds, 40)
    title = figure.axes[0].get_title()
    assert title == ("lab" if kinds <= 40 else "lab (without 10 more kinds of workers)")


def test_the_lines_of_a_simulation_are_its_sizes_and_its_share_of_the_optimum(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: figures.append(figure))
    sizes, shares = [[3, 3, 2], [4, 3, 1]], [0.5, 1.0]
    picture.draw_split([0, 1], sizes, shares, ["fast", "fast", "slow"], "split.png", "lab")
    above, below = figures[0].axes
    drawn = [list(line.get_ydata()) for line in above.lines if len(line.get_ydata())]
    assert drawn == [[3, 4], [3, 3], [2, 1]]
    colors = [line.get_color() for line in above.lines]
    assert colors[0] == colors[1] != colors[2]
    assert list(below.lines[0].get_ydata()) == shares
    assert legend(figures[0]) == ["2 x fast", "slow"]
