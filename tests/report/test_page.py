"""The page of a run: its numbers are the figures of its record, it needs nothing else, and odd runs have one, too."""

import html
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.records import (
    ChangeRecord,
    EndRecord,
    GainRecord,
    RoundRecord,
    StragglerRecord,
    WorkerRecord,
)
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.what_if import what_if
from lightning_hetero.report import read_run, write_picture, write_report
from tests.report.runs import Cluster, header, simulated, written

RECORDED = Path(__file__).parent / "recorded"


class Page:
    """What is on a page: its text, and its elements, identifiers, addresses, and numbers by their keys."""

    def __init__(self, text):
        plain = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.S)
        self.text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", plain)).split())
        self.elements = re.findall(r"<([a-zA-Z]\w*)", text)
        self.ids = re.findall(r'\bid="([^"]*)"', text)
        self.addresses = re.findall(r'\b(?:src|href|action)="([^"]*)"', text)
        numbers = re.findall(r'<data data-key="([^"]*)"(?: value="([^"]*)")?[^>]*>', text)
        self.numbers = {key: float(value or "nan") for key, value in numbers}
        assert len(set(numbers)) == len(self.numbers), "a number that is repeated is the same"


def paged(path):
    """A record in a file, and its page."""
    write_report(read_run(path), path.with_name("report.html"))
    return path, Page(path.with_name("report.html").read_text())


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three workers, two of which are alike."""
    run = simulated(Cluster(speeds=(1.0, 0.5, 0.5)), sends=True)
    return paged(written(run, tmp_path_factory.mktemp("run")))


def of_events(page):
    """Numbers of what happened when, and of the hardware."""
    kinds = ("run", "hardware", "change", "kept", "straggler")
    return {key: value for key, value in page.numbers.items() if key.partition(".")[0] in kinds}


FIGURES = (
    *("speed_up", "speed_up_of_run", "rate", "step_time", "step_time_before", "idle", "share_of_optimum"),
    *("share_of_solo", "predicted", "even", "lost", "link_share"),
)


@pytest.mark.parametrize("name", ["simulated", "recorded"])
def test_every_number_is_a_figure_of_the_record_and_its_text_is_that_number(name, three, tmp_path):
    path, page = three
    if name == "recorded":
        path = tmp_path / "hetero_run.jsonl"
        path.write_text((RECORDED / "demo.jsonl").read_text())
        path, page = paged(path)
    run = read_run(path)
    figures, last = RunFigures(run), run.rounds[-1]
    expected = {name: getattr(figures, name) for name in FIGURES if name != "lost" or run.stragglers}
    both = [one for one in run.rounds if math.isfinite(one.predicted)]
    expected["model_error"] = sum(abs(one.predicted / one.step_time - 1) for one in both) / len(both)
    expected |= {name: getattr(last, name) for name in ("density", "sent_bytes") if math.isfinite(getattr(last, name))}
    for one in figures.workers:
        fields = {name: getattr(one, name) for name in ("size", "share", "rate", "idle", "waiting")} | one.phases
        fields |= {"max_local": one.max_local} if one.max_local else {}
        expected |= {f"worker.{one.rank}.{name}": value for name, value in fields.items()}
    for one in what_if(figures):
        key = f"what_if.{one.change.replace(' ', '_')}.{one.rank}"
        expected |= {f"{key}.step_time": one.step_time, f"{key}.gain": one.gain}
    for key in [key for key in expected if name == "simulated" and re.match(r"what_if\.\w+\.2\.", key)]:
        del expected[key]  # the worker that is alike stands for it
    assert set(page.numbers) - set(of_events(page)) == set(expected)
    for key, value in expected.items():
        assert page.numbers[key] == pytest.approx(value, rel=1e-9), key


def round_at(epoch, step, count, **more):
    phases = dict.fromkeys(PHASES, (0.01,) * 3)
    return RoundRecord(
        float(200 * epoch + step), epoch, step, count, count, (32, 32, 32), step_time=0.1, **phases | more
    )


def test_what_happened_and_the_hardware_are_those_of_the_record(tmp_path):
    """Two epochs of 40 steps: changes with and without a gain, stragglers without begin or end, three workers."""
    rounds = [round_at(i // 4, 10 * (i % 4) + 9, 10, kept=why) for i, why in enumerate(["", "a", "a", "", "a", "b"])]
    changes = [ChangeRecord(10.0, 0, 12, (40, 40, 16), "x", 0.09), ChangeRecord(20.0, 1, 5, (40, 30, 26), "y")]
    gains = [GainRecord(19.0, 0, 12, 0.1, 0.08, 0.09)]
    stragglers = [
        StragglerRecord(9.0, "end", 0, "data", 0, 9, 0.1, 2.0, "recovered"),
        StragglerRecord(19.0, "begin", 1, "forward", 0, 19, 0.1, 0.0),
        StragglerRecord(29.0, "end", 1, "forward", 0, 29, 0.2, 3.0, "split"),
        StragglerRecord(39.0, "begin", -1, "link", 0, 39, 0.3, 0.0),
    ]
    fast, slow = WorkerRecord("gpu:0", "A100", 2e12, 2, 400), WorkerRecord("gpu:1", "T4")
    over = EndRecord(300.0, 1, 23, 63, memory=(1e9, 2e9, 3e9), overhead=0.02, dropped=4)
    records = [replace(header(), workers=(fast, slow, fast)), *rounds, *changes, *gains, *stragglers, over]
    _, page = paged(written(RunRecord.of(records), tmp_path))
    found = of_events(page)
    expected = {
        **{"run.time": 300.0, "run.steps": 63, "run.unseen": 3, "run.rounds": 6, "run.workers": 3},
        **{"run.total_batch_size": 96, "run.overhead": 0.02, "run.dropped": 4},
        **{"hardware.0.capacity": 2e12, "hardware.0.min_local": 2, "hardware.0.max_local": 400},
        **{"hardware.0.memory": 3e9, "hardware.1.capacity": math.nan, "hardware.1.min_local": 1},
        **{"hardware.1.memory": 2e9},
        **{"change.0.step": 12, "change.0.predicted": 0.09, "change.0.before": 0.1, "change.0.after": 0.08},
        **{"change.1.step": 45, "change.1.predicted": math.nan, "change.1.before": math.nan},
        **{"change.1.after": math.nan},
        **{"kept.0.from": 10, "kept.0.to": 30, "kept.1.from": 40, "kept.1.to": 50, "kept.2.from": 50},
        **{"kept.2.to": 60},
        **{"straggler.0.to": 9, "straggler.0.cost": 0.1, "straggler.0.lost": 2.0},
        **{"straggler.1.from": 19, "straggler.1.to": 29, "straggler.1.cost": 0.1, "straggler.1.lost": 3.0},
        **{"straggler.2.from": 39, "straggler.2.cost": 0.3, "straggler.2.lost": 20 * 0.3},
    }
    assert found == pytest.approx(expected, nan_ok=True)
    assert page.numbers["lost"] == pytest.approx(11.0)


def test_a_change_has_its_place_among_the_steps_of_all_epochs(tmp_path):
    """By the round of the next one, the first epoch has 30 steps."""
    places = {(0, 0): 0, (0, 12): 12, (0, 25): 25, (0, 35): 30, (1, 0): 30, (1, 15): 45, (1, 20): 50, (2, 3): 48}
    kept = [round_at(*one) for one in ((0, 9, 10), (0, 19, 10), (1, 4, 15), (1, 14, 10))]
    changes = [ChangeRecord(0.01 * i, *place, (40, 40, 16), "x") for i, place in enumerate(places)]
    _, page = paged(written(RunRecord(header(), tuple(kept), tuple(changes)), tmp_path))
    assert [page.numbers[f"change.{i}.step"] for i in range(len(places))] == list(places.values())


def test_a_page_stands_for_itself(three):
    path, page = three
    text = path.with_name("report.html").read_text()
    assert f"{page.numbers['speed_up']:.2f}x over even sizes" in page.text
    assert [one for one in page.addresses if not one.startswith("#")] == []
    assert {one[1:] for one in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "identifiers are unique"
    assert "default-src 'none'" in text
    assert re.findall(r"url\((?!#)|@import", text) == []
    assert page.elements.count("script") == 1
    assert "prefers-color-scheme: dark" in text


HOSTILE = "<script>alert(1)</script>\"'>&{{ 7*7 }}{% raw %}$\\frac{ \x00\u202e</style>"


def test_hostile_strings_stay_text(three, tmp_path):
    run = simulated(rounds=4, steps=4)
    texts = dict.fromkeys(("hostname", "policy", "strategy", "front_end", "package"), HOSTILE)
    texts |= {"settings": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}, "command": (HOSTILE, f"{HOSTILE}.py")}
    workers = tuple(WorkerRecord(HOSTILE, HOSTILE) for _ in run.header.workers)
    run = replace(
        run,
        header=replace(run.header, workers=workers, **texts),
        changes=tuple(replace(one, reason=HOSTILE) for one in run.changes),
        rounds=tuple(replace(one, kept=HOSTILE) for one in run.rounds),
        stragglers=(StragglerRecord(1.0, "begin", 1, HOSTILE, 0, 3, 0.1, 0.2, HOSTILE),),
        end=replace(run.end, status=HOSTILE),
    )
    path, page = paged(written(run, tmp_path))
    write_picture(read_run(path), tmp_path / "figure.png")
    text = path.with_name("report.html").read_bytes().decode("utf-8")
    assert page.elements.count("script") == 1
    assert set(page.elements) <= set(three[1].elements)
    assert "<script>alert" not in text
    assert "alert(1)" in page.text, "the text itself is shown"
    assert "49" not in re.findall(r"\w+", page.text[page.text.index("The run") :]), "nothing is evaluated"
    assert not re.search("[\x00-\x08\u202e]", text)


NAN = math.nan
TWO = simulated(rounds=3, steps=3, straggler=False)
UNKNOWN = {**dict.fromkeys(PHASES, (NAN,) * 3), "nodes": ((NAN,) * 4,) * 3, "sample": (((NAN,) * 12,) * 3,)}
ODD = {
    "no end": simulated(rounds=3, steps=3, ended=False),
    "one worker": simulated(Cluster(speeds=(1.0,)), total=32, rounds=3, steps=3, straggler=False),
    "accumulation": simulated(Cluster(accumulation=3), rounds=3, steps=3, straggler=False),
    "bounds below the total": replace(TWO, rounds=tuple(replace(one, max_local=(1, 1, 1)) for one in TWO.rounds)),
    "no round": RunRecord(header()),
    "all NaN": RunRecord(
        header(),
        tuple(RoundRecord(float(i), 0, i, 1, 5, (32, 32, 32), **UNKNOWN) for i in range(3)),
        (ChangeRecord(1.0, 0, 1, (40, 40, 16), "x"),),
    ),
    "more sizes than workers": RunRecord(header(), (replace(round_at(0, 9, 10), sizes=(8,) * 7),)),
    "no time": RunRecord(header(), (replace(round_at(0, 9, 10), step_time=0.0, **dict.fromkeys(PHASES, (0.0,) * 3)),)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_give_a_page_and_a_picture(name, tmp_path):
    path, page = paged(written(ODD[name], tmp_path))
    write_picture(read_run(path), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {"nan", "inf", "None"} & set(page.text.replace("None was found", "").split()) == set()
    if name in ("no end", "one worker", "accumulation", "bounds below the total"):
        samples = (3 if name == "accumulation" else 1) * sum(ODD[name].rounds[-1].sizes)
        assert page.numbers["rate"] == pytest.approx(samples / page.numbers["step_time"])
        assert 0 < page.numbers["idle"] < 0.9
    else:
        assert "rate" not in page.numbers
