"""The page of a run: its numbers follow from the recorded file, it needs nothing else, and odd runs have one, too."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero.core.report.records import ChangeRecord, RoundRecord, StragglerRecord, WorkerRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report import read_run, write_picture, write_report
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


def paged(path):
    """A record in a file, and its page."""
    write_report(read_run(path), path.with_name("report.html"))
    return path, Page(path.with_name("report.html").read_text())


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three workers."""
    return paged(written(simulated(sends=True), tmp_path_factory.mktemp("run")))


def five(folder):
    """A run of five workers of three kinds."""
    return paged(written(simulated(Cluster(speeds=(1.0, 1.0, 0.5, 0.3, 0.3)), total=64, sends=True), folder))


def recorded(name, folder):
    """A run that took place (``tests/report/recorded``)."""
    path = folder / "hetero_run.jsonl"
    path.write_text((RECORDED / f"{name}.jsonl").read_text())
    return paged(path)


@pytest.mark.parametrize(
    ("run", "epoch"),
    [
        ("three", None),
        ("five", None),
        ("demo", 5),
        pytest.param("emulated", 25, marks=pytest.mark.slow("solves for sixteen workers one sample at a time")),
    ],
)
def test_every_number_follows_from_the_recorded_file(run, epoch, three, tmp_path):
    path, page = recorded(run, tmp_path) if epoch else three if run == "three" else five(tmp_path)
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


def round_at(epoch, step, count, **more):
    phases = dict.fromkeys(PHASES, (0.01,) * 3)
    return RoundRecord(
        float(200 * epoch + step), epoch, step, count, count, (32, 32, 32), step_time=0.1, **phases | more
    )


@pytest.mark.parametrize(
    ("rounds", "places"),
    [
        (  # by the round of the next one, the first epoch has 30 steps
            [(0, 9, 10), (0, 19, 10), (1, 4, 15), (1, 14, 10)],
            {(0, 0): 0, (0, 12): 12, (0, 25): 25, (0, 35): 30, (1, 0): 30, (1, 15): 45, (1, 20): 50, (2, 3): 48},
        ),
        ([(0, 9, 10), (4, 9, 90)], {(0, 3): 3, (1, 3): 30, (3, 3): 70, (5, 3): 103}),
        (  # four batches a step, and two in the last round
            [*((0, 40 * k - 1, 10, 4) for k in (1, 2, 3)), (0, 139, 10, 2)],
            {(0, 0): 0, (0, 20): 5, (0, 88): 22, (0, 119): 29.75, (0, 130): 35, (0, 150): 45},
        ),
    ],
)
def test_a_change_has_its_place_among_the_steps_of_all_epochs(rounds, places, tmp_path):
    kept = [round_at(*one[:3], accumulation=one[3] if len(one) > 3 else 1) for one in rounds]
    changes = [ChangeRecord(0.01 * i, *place, (40, 40, 16), "x") for i, place in enumerate(places)]
    _, page = paged(written(RunRecord(header(), tuple(kept), tuple(changes)), tmp_path))
    assert [page.numbers[f"change.{i}.step"][0] for i in range(len(places))] == list(places.values())


def test_a_page_stands_for_itself(three):
    path, page = three
    text = path.with_name("report.html").read_text()
    assert f"{page.numbers['speed_up'][0]:.2f}x over even sizes" in page.text
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
    "untimed": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 0, (32, 32, 32)),)),
    "all NaN": RunRecord(
        header(),
        tuple(RoundRecord(float(i), 0, i, 1, 5, (32, 32, 32), **UNKNOWN) for i in range(3)),
        (ChangeRecord(1.0, 0, 1, (40, 40, 16), "x"),),
    ),
    "times are missing": RunRecord(header(), (RoundRecord(1.0, 0, 9, 10, 8, (32, 32, 32), step_time=0.1),)),
    "more sizes than workers": RunRecord(header(), (replace(round_at(0, 9, 10), sizes=(8,) * 7),)),
    "no size": RunRecord(header(), (replace(round_at(0, 9, 10), sizes=()),)),
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
        assert page.numbers["rate"][0] == pytest.approx(samples / page.numbers["step_time"][0])
        assert 0 < page.numbers["idle"][0] < 0.9
    else:
        assert "No step was timed" in page.text


@pytest.mark.slow("makes a page of 3000 rounds; of a few, they are made above")
def test_many_rounds_and_changes_stay_small(tmp_path):
    rounds = tuple(replace(TWO.rounds[1], time=float(i), epoch=i, step=2, sample=()) for i in range(3000))
    changes = tuple(ChangeRecord(float(i), i, 1, (40, 30, 26), f"reason {i}") for i in range(3000))
    path, page = paged(written(replace(TWO, rounds=rounds, changes=changes), tmp_path))
    assert path.with_name("report.html").stat().st_size < 2_000_000
    assert "reason 2999" in page.text
