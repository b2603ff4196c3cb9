"""The page of a run: its numbers follow from the recorded file, it needs nothing else, and odd runs have one, too."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lightning_hetero.core.report.records import ChangeRecord, RoundRecord, StragglerRecord, WorkerRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report import read_run, write_picture, write_report
from lightning_hetero.report.page import page_of
from lightning_hetero.report.run_file import usable
from tests.report.runs import Cluster, header, simulated, written

PHASES = ("data", "forward", "backward", "optimizer")
RECORDED = Path(__file__).parent / "recorded"
UNBOUND = 10**9
VOID = ("meta", "link", "br", "hr", "img", "input")
UNITS = {
    **{"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01, "x": 1.0, "": 1.0, "B": 1.0},
    **{f"{p}{unit}": f for p, f in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)) for unit in ("B", "FLOP/s")},
}


class Page(HTMLParser):
    """A page, read: its numbers by key, its text, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.numbers, self.ids, self.words, self._open, self._key = {}, [], [], [], None
        self.addresses, self.elements = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "data":
            self._key = given["data-key"], float(given.get("value", "nan"))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag
        self._key = None if tag == "data" else self._key

    def handle_data(self, data):
        if "style" not in self._open and "script" not in self._open:
            self.words.append(data)
        if self._key:
            key, value = self._key
            assert self.numbers.setdefault(key, (value, data)) == (value, data) or math.isnan(value), key

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def lines(path):
    """Lines of a record as JSON, by their kind."""
    found = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        found.setdefault(one["kind"], []).append(one)
    return found


def step_time(nodes, gamma, t_o, t_u, sizes):
    """Seconds of a step by the time model (C eq. 7): the last bucket waits for the others, or for the last worker."""
    q, s, k, m = np.array(nodes).T
    a, p = q * sizes + s, k * sizes + m
    return max(np.max(a + p) + t_u, np.max(a + gamma * p) + t_o + t_u)


def best_time(one, low, high):
    """Shortest step over all splits, from sizes that are moved one sample at a time."""
    model = one["nodes"], one["gamma"], one["t_o"], one["t_u"]
    sizes = np.clip(np.array(one["sizes"]), low, high)
    assert sizes.sum() == sum(one["sizes"])
    best = step_time(*model, sizes)
    while True:
        moves = []
        for i in range(len(sizes)):
            for j in range(len(sizes)):
                if i != j and sizes[i] > low[i] and sizes[j] < high[j]:
                    other = sizes.copy()
                    other[i] -= 1
                    other[j] += 1
                    moves.append((step_time(*model, other), i, j))
        took, i, j = min(moves, default=(math.inf, 0, 0))
        if took >= best - 1e-12:
            return best
        sizes[i] -= 1
        sizes[j] += 1
        best = took


def expected(path, epoch=None):
    """Every number of the page, computed from the lines of the record; all steps of the run were recorded.

    Args:
        path: the record.
        epoch: steps of an epoch, by default six rounds of one length.
    """
    found = lines(path)
    (head,), rounds, end = found["run"], found["round"], found["end"][0]
    for one in rounds:
        one.setdefault("max_local", [UNBOUND] * len(one["sizes"]))
    last = [one for one in rounds if one["sizes"] == rounds[-1]["sizes"]]
    last = last[-next((i for i, one in enumerate(rounds[::-1]) if one["sizes"] != rounds[-1]["sizes"]), len(last)) :]
    first = rounds[: next(i for i, one in enumerate(rounds) if one["sizes"] != rounds[0]["sizes"])]
    weight = [one["count"] for one in last]
    even = [max(one["sizes"]) - min(one["sizes"]) <= 1 for one in rounds]
    even = [one["step_time"] if is_even else one["even"] for one, is_even in zip(rounds, even, strict=True)]
    took = np.average([one["step_time"] for one in last], weights=weight)
    sizes, counts = np.array(rounds[-1]["sizes"]), np.array([one["count"] for one in rounds])
    phases = {name: np.average([one[name] for one in last], axis=0, weights=weight) for name in PHASES}
    compute = sum(phases.values())
    low = [worker.get("min_local", 1) for worker in head["workers"]]
    high = rounds[-1]["max_local"]
    optimum = best_time(rounds[-1], low, high)
    saving = step_time(*(rounds[-1][name] for name in ("nodes", "gamma", "t_o", "t_u")), sizes) - optimum
    known = of_predictions(rounds, last)
    numbers = {
        "step_time": took,
        "rate": sizes.sum() / took,
        "speed_up": np.average(even[-len(last) :], weights=weight) / took,
        "speed_up_of_run": counts @ even / (counts @ [one["step_time"] for one in rounds]),
        "step_time_before": np.average([one["step_time"] for one in first], weights=[one["count"] for one in first]),
        "even": np.average(even[-len(last) :], weights=weight),
        "predicted": known["predicted"],
        "idle": np.mean(1 - compute / took),
        "share_of_optimum": max(1 - saving / took, 0),
        "share_of_solo": sizes.sum() / took / np.sum(sizes / compute),
        "model_error": known["model_error"],
        "link_share": np.average([one["link"] for one in last], weights=weight) / took,
        **({"lost": sum(o["lost"] for o in found["straggler"] if o["event"] == "end")} if "straggler" in found else {}),
        **{name: rounds[-1][name] for name in ("density", "sent_bytes") if name in rounds[-1]},
        "run.time": end["time"],
        "run.steps": end["steps"],
        "run.unseen": end["steps"] - sum(one["count"] for one in rounds),
        "run.rounds": len(rounds),
        "run.workers": len(head["workers"]),
        "run.total_batch_size": head["total_batch_size"],
        "run.overhead": end["overhead"],
    }
    for rank, size in enumerate(sizes):
        own = {name: phases[name][rank] for name in PHASES}
        own |= {"size": size, "share": size / sizes.sum(), "rate": size / took, "idle": 1 - compute[rank] / took}
        own |= {"waiting": took - compute[rank], **({"max_local": high[rank]} if high[rank] < UNBOUND else {})}
        numbers |= {f"worker.{rank}.{name}": value for name, value in own.items()}
    numbers |= of_the_hardware(head, end)
    numbers |= of_events(found, epoch or 6 * rounds[0]["count"])
    return numbers | of_other_workers(head, rounds[-1], optimum, low, high)


def of_predictions(rounds, last):
    """Of the steps before the first sync round nothing was predicted."""
    both = [one for one in rounds if "predicted" in one]
    assert [one for one in rounds if one not in both] in ([], rounds[:1])
    at_end = [one for one in last if one in both]
    return {
        "predicted": np.average([one["predicted"] for one in at_end], weights=[one["count"] for one in at_end]),
        "model_error": np.mean([abs(one["predicted"] / one["step_time"] - 1) for one in both]),
    }


def of_the_hardware(head, end):
    """Devices in one row are those of the same kind; the row has the number of the first."""
    kinds = {}
    for rank, worker in enumerate(head["workers"]):
        kinds.setdefault(json.dumps(worker), []).append(rank)
    numbers = {}
    for ranks in kinds.values():
        worker, key = head["workers"][ranks[0]], f"hardware.{ranks[0]}"
        numbers |= {f"{key}.capacity": worker["capacity"], f"{key}.memory": max(end["memory"][i] for i in ranks)}
        bounds = {"min_local": worker.get("min_local", 1), "max_local": worker.get("max_local")}
        numbers |= {f"{key}.{name}": value for name, value in bounds.items() if value is not None}
    return numbers


def of_events(found, epoch):
    """Steps are counted from the beginning."""
    rounds, numbers = found["round"], {}
    ends = np.cumsum([one["count"] for one in rounds])

    def step_of(one):
        return one["epoch"] * epoch + one["step"]

    for i, one in enumerate(found.get("change", [])):
        gain = next((g for g in found.get("gain", []) if (g["epoch"], g["step"]) == (one["epoch"], one["step"])), {})
        numbers[f"change.{i}.step"], numbers[f"change.{i}.predicted"] = step_of(one), one["predicted"]
        numbers[f"change.{i}.before"], numbers[f"change.{i}.after"] = gain.get("before"), gain.get("after")
    begins, stops = [[o for o in found.get("straggler", []) if o["event"] == event] for event in ("begin", "end")]
    for i, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
        numbers |= {f"straggler.{i}.from": step_of(begin), f"straggler.{i}.to": step_of(stop)}
        numbers |= {f"straggler.{i}.cost": begin["cost"], f"straggler.{i}.lost": stop["lost"]}
    spans, before = [], None
    for i, one in enumerate(rounds):
        kept = one.get("kept")
        if kept:
            since = spans.pop()[0] if kept == before else ends[i - 1] if i else 0
            spans.append((since, ends[i]))
        before = kept
    for i, (start, stop) in enumerate(spans):
        numbers |= {f"kept.{i}.from": start, f"kept.{i}.to": stop}
    return numbers


def of_other_workers(head, one, optimum, low, high):
    """Leave out or repeat one worker, begin with the sizes in proportion, and move samples to the shortest step."""
    numbers, count = {}, len(low)
    for change, orders in (
        ("without", [[j for j in range(count) if j != i] for i in range(count)]),
        ("one_more_like", [[*range(count), i] for i in range(count)]),
    ):
        for i, order in enumerate(orders):
            own_low, own_high = [low[j] for j in order], [high[j] for j in order]
            if sum(own_high) < sum(one["sizes"]):
                continue
            sizes = np.array(own_low)
            while sizes.sum() < sum(one["sizes"]):
                room = [step_time(*_model(one, order), sizes + step) if sizes[j] < own_high[j] else math.inf
                        for j, step in enumerate(np.eye(len(order), dtype=int))]  # fmt: skip
                sizes[int(np.argmin(room))] += 1
            nodes = [one["nodes"][j] for j in order]
            time = best_time({**one, "nodes": nodes, "sizes": sizes.tolist()}, own_low, own_high)
            key = f"what_if.{change}.{i}"
            numbers |= {f"{key}.step_time": time, f"{key}.gain": optimum / time - 1}
    return numbers


def _model(one, order):
    return [one["nodes"][j] for j in order], one["gamma"], one["t_o"], one["t_u"]


def shown(text):
    """Number that a text stands for, and half a unit of its last digit."""
    digits, _, unit = text.replace(",", "").partition(" ")
    if digits.endswith("x"):
        digits, unit = digits[:-1], "x"
    decimals = len(digits.partition(".")[2])
    mantissa, _, power = digits.partition("e")
    scale = UNITS[unit] * 10.0 ** int(power or 0)
    return float(mantissa) * scale, 0.5 * 10.0**-decimals * scale


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Record of three workers in a file, and its page."""
    path = written(simulated(sends=True), tmp_path_factory.mktemp("run"))
    write_report(read_run(path), path.with_name("report.html"))
    return path, Page(path.with_name("report.html").read_text())


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    """As ``three``, with sixteen workers of three kinds."""
    cluster = Cluster(speeds=(1.0,) * 4 + (0.5,) * 4 + (0.3,) * 8)
    path = written(simulated(cluster, total=512, sends=True), tmp_path_factory.mktemp("run"))
    write_report(read_run(path), path.with_name("report.html"))
    return path, Page(path.with_name("report.html").read_text())


def recorded(name, folder):
    """A record of a run that took place (``tests/report/recorded``), and its page."""
    path = folder / "hetero_run.jsonl"
    path.write_text((RECORDED / f"{name}.jsonl").read_text())
    write_report(read_run(path), path.with_name("report.html"))
    return path, Page(path.with_name("report.html").read_text())


@pytest.mark.parametrize(("run", "epoch"), [("three", None), ("sixteen", None), ("demo", 5), ("emulated", 25)])
def test_every_number_follows_from_the_recorded_file(run, epoch, request, tmp_path):
    path, page = recorded(run, tmp_path) if epoch else request.getfixturevalue(run)
    numbers = expected(path, epoch)
    assert set(page.numbers) <= set(numbers), "compute these, too"
    for key in set(numbers) - set(page.numbers):
        kind, change, rank, value = key.split(".")
        assert kind == "what_if", key
        assert any(
            numbers[key] == pytest.approx(numbers[f"what_if.{change}.{first}.{value}"], rel=1e-9)
            for first in range(int(rank))
            if f"what_if.{change}.{first}.{value}" in page.numbers
        ), "a worker of the same kind stands for it"
    assert len(page.numbers) > 60
    for key, (value, text) in page.numbers.items():
        if numbers[key] is None:
            assert (math.isnan(value), text) == (True, "–"), key
            continue
        assert value == pytest.approx(numbers[key], rel=2e-5, abs=1e-12), key
        number, unit = shown(text)
        digits = max(unit, 0.005 * abs(number) if "," not in text else 0.0)
        assert abs(number - value) <= 1.001 * digits, (key, text, value)


def test_the_verdict_is_made_of_these_numbers(three):
    _, page = three
    speed_up, idle = page.numbers["speed_up"][0], page.numbers["idle"][0]
    assert f"{speed_up:.2f}x over even sizes (predicted); {100 * idle:.0f} % idle; limited by: " in page.text
    assert speed_up > 1.5


def test_lines_of_the_figures_are_the_recorded_rounds(three):
    """Measured step times lie on the line where the axis says."""
    path, _ = three
    text = path.with_name("report.html").read_text()
    svg = re.search(r'<figure class="wide">(<svg.*?</svg>)</figure>', text[text.index('id="steps"') :], re.S)[1]
    root = ElementTree.fromstring(svg.replace("&nbsp;", " "))
    name = "{http://www.w3.org/2000/svg}"
    measured = [e for e in root.iter(f"{name}path") if "stroke: var(--measured)" in e.get("style", "")]
    points = [np.array(re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", e.get("d")), dtype=float) for e in measured]
    drawn = max(points, key=len)[:, 1]
    recorded = np.array([one["step_time"] for one in lines(path)["round"]])
    heights = (drawn.max() - drawn) / (drawn.max() - drawn.min())
    wanted = (recorded - recorded.min()) / (recorded.max() - recorded.min())
    assert np.abs(heights[:, None] - wanted[None]).min(axis=0).max() < 0.01


def test_a_page_stands_for_itself(three):
    path, page = three
    text = path.with_name("report.html").read_text()
    assert [one for one in page.addresses if not one.startswith("#")] == []
    assert {one[1:] for one in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)), "identifiers are unique"
    assert "default-src 'none'" in text
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert page.elements.count("script") == 1
    assert "@media (prefers-color-scheme: dark)" in text
    assert "#0072b3" not in text[text.index("<main>") :], "figures have the colors of the theme"


HOSTILE = "<script>alert(1)</script>\"'>&{{ 7*7 }}{% raw %}$\\frac{ \x00\ud800\u202e</style>"


def test_hostile_strings_stay_text(three, tmp_path):
    run = simulated(rounds=4, steps=4)
    workers = tuple(WorkerRecord(HOSTILE, HOSTILE) for _ in run.header.workers)
    changed = replace(
        run.header,
        workers=workers,
        settings={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        command=(HOSTILE, f"{HOSTILE}.py"),
        **dict.fromkeys(("hostname", "policy", "strategy", "front_end", "package"), HOSTILE),
    )
    run = replace(
        run,
        header=changed,
        changes=tuple(replace(one, reason=HOSTILE) for one in run.changes),
        rounds=tuple(replace(one, kept=HOSTILE) for one in run.rounds),
        stragglers=(StragglerRecord(1.0, HOSTILE, 1, HOSTILE, 0, 3, 0.1, 0.2, HOSTILE),),
        end=replace(run.end, status=HOSTILE),
    )
    write_report(usable(run), tmp_path / "report.html")
    write_picture(usable(run), tmp_path / "figure.png")
    text = (tmp_path / "report.html").read_bytes().decode("utf-8")
    page, without = Page(text), three[1]
    assert page.elements.count("script") == without.elements.count("script") == 1
    assert set(page.elements) <= set(without.elements)
    assert "<script>alert" not in text
    assert "alert(1)" in page.text, "the text itself is shown"
    assert "49" not in re.findall(r"\w+", page.text[page.text.index("The run") :]), "nothing is evaluated"
    assert not re.search("[\x00-\x08\ud800-\udfff\u202e]", text)


NAN = math.nan
ODD = {
    "no round": RunRecord(header()),
    "no worker": RunRecord(header(speeds=())),
    "untimed": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 0, (32, 32, 32)),)),
    "no end": simulated(rounds=3, steps=3, ended=False),
    "one worker": simulated(Cluster(speeds=(1.0,)), total=32, rounds=3, steps=3, straggler=False),
    "all NaN": RunRecord(
        header(),
        tuple(
            RoundRecord(
                *(float(i), 0, i, 1, 5, (32, 32, 32)), data=(NAN,) * 3, forward=(NAN,) * 3, backward=(NAN,) * 3,
                optimizer=(NAN,) * 3, nodes=((NAN,) * 4,) * 3, sample=(((NAN,) * 12,) * 3,),
            )
            for i in range(3)
        ),
        (ChangeRecord(1.0, 0, 1, (40, 40, 16), "x"),),
    ),
    "accumulation": simulated(Cluster(accumulation=3), rounds=3, steps=3, straggler=False),
    "times are missing": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 8, (32, 32, 32), step_time=0.1),)),
    "more sizes than workers": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 8, (8,) * 7, step_time=0.1),)),
    "no size": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 8, (), step_time=0.1),)),
    "no time": RunRecord(
        header(),
        (RoundRecord(1.0, 0, 9, 10, 8, (9, 9, 9), step_time=0.0, **dict.fromkeys(PHASES, (0.0,) * 3)),),
    ),
    "not finite": RunRecord(
        header(started=math.inf, total=0),
        (RoundRecord(1.0, 0, 9, 10, 8, (9, 9, 9), step_time=math.inf, **dict.fromkeys(PHASES, (math.inf,) * 3)),),
    ),
    "bounds below the total": replace(
        simulated(rounds=2, steps=3, straggler=False),
        rounds=tuple(replace(o, max_local=(1, 1, 1)) for o in simulated(rounds=2, steps=3, straggler=False).rounds),
    ),
}  # fmt: skip


UNWRITTEN = ("no worker", "not finite")  # no run writes these


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_give_a_page_and_a_picture(name, tmp_path):
    run = usable(ODD[name]) if name in UNWRITTEN else read_run(written(ODD[name], tmp_path))
    write_report(run, tmp_path / "report.html")
    write_picture(run, tmp_path / "figure.png")
    page = Page((tmp_path / "report.html").read_text())
    for word in ("nan", "inf", "None"):
        assert word not in page.text.replace("None was found", "").split(), page.text
    assert "The run" in page.text
    if name in ("no end",):
        assert "the run was killed, or it still runs" in page.text
        assert page.numbers["step_time"][0] > 0
    elif name in ("one worker", "accumulation", "bounds below the total"):
        micro_batches = 3 if name == "accumulation" else 1
        samples = micro_batches * sum(run.rounds[-1].sizes)
        assert page.numbers["rate"][0] == pytest.approx(samples / page.numbers["step_time"][0])
        assert 0 < page.numbers["idle"][0] < 0.9
    else:
        assert "No step was timed" in page.text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_many_rounds_and_changes_stay_small():
    one = simulated(rounds=2, steps=3, straggler=False)
    rounds = tuple(replace(one.rounds[1], time=float(i), epoch=i, step=2, sample=()) for i in range(3000))
    changes = tuple(ChangeRecord(float(i), i, 1, (40, 30, 26), f"reason {i}") for i in range(3000))
    text = page_of(usable(replace(one, rounds=rounds, changes=changes)))
    assert len(text) < 2_000_000
    assert "reason 2999" in text
    assert "2940 earlier changes" in text
