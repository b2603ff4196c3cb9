"""Table of published devices: each entry is well-formed and says where it comes from; names are found or refused."""

import json
import re
from pathlib import Path

import pytest

from lightning_hetero.simulate.devices import catalog
from lightning_hetero.simulate.devices.catalog import (
    cluster_devices,
    cluster_profiles,
    device_profile,
    published_devices,
    workloads,
)

ROOT = Path(__file__).parents[3]
TABLE = json.loads(catalog.FILE.read_text())
PAPERS = ("Cannikin", "dynamic batching", "Adaptive SGD", "StellaTrain")
NAMES = [name for name, device in published_devices().items() if not device.per_core] + ["12 cores"]


def entries():
    for kind in ("devices", "workloads", "clusters", "links"):
        yield from ((f"{kind}/{name}", entry) for name, entry in TABLE[kind].items())
    yield from ((f"profiles/{entry['device']}/{entry['workload']}", entry) for entry in TABLE["profiles"])


@pytest.mark.parametrize(("where", "entry"), [pytest.param(*pair, id=pair[0]) for pair in entries()])
def test_an_entry_says_where_it_comes_from(where, entry):
    assert entry["source"].startswith(PAPERS)
    assert re.search(r"Table|Fig\.|section|footnote", entry["source"])
    if where.split("/")[0] in ("devices", "workloads", "profiles"):
        assert entry["basis"] in ("reported", "derived")
        assert entry["how"].endswith("."), "one sentence says how the figure was derived or read"
    for key in entry:
        known = {"samples": "samples_from", "memory_gb": "memory_from", "price_per_hour": "price_from"}
        assert key not in known or entry[key] is None or entry[known[key]]


def test_ratios_are_those_that_the_papers_print():
    speed = {name: device.tflops for name, device in published_devices().items()}
    assert speed["A100"] / speed["RTX6000"] == pytest.approx(3.42, rel=1e-3)
    assert speed["V100"] / speed["A100"] == pytest.approx(31.4 / 77.97, rel=1e-3)
    assert speed["H100"] / speed["A100"] == pytest.approx(204.9 / 77.97, rel=1e-3)
    assert speed["P100"] / (48 * speed["core"]) == pytest.approx(0.813 / 0.187, rel=0.02)
    even, split = 4 * speed["P4"], 2 * speed["T4"] + 2 * speed["P4"]
    assert split / even == pytest.approx(90 / 20, rel=1e-3), "minutes of dynamic batching, sec. IV-B"
    gap = [1 / profile.q for profile in cluster_profiles("HeteroGPU", "mlp-amazon670k")]
    assert max(gap) / min(gap) == pytest.approx(1.32, rel=1e-3)
    shared = [1 / profile.q for profile in cluster_profiles("C", "resnet50-imagenet")]
    assert max(shared) / min(shared) == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("workload", list(workloads()))
@pytest.mark.parametrize("device", NAMES)
def test_every_device_has_a_profile_for_every_workload(device, workload):
    profile = device_profile(device, workload, jitter=0.03)
    assert profile.name == device
    assert profile.jitter == 0.03
    assert 0 < profile.seconds(1) < profile.seconds(2)
    assert profile.k == pytest.approx(2 * profile.q, rel=1e-4)


def test_clusters_have_the_workers_of_the_papers():
    assert len(cluster_devices("B")) == len(cluster_devices("C")) == 16
    assert cluster_devices("B").count("RTX6000") == 8
    assert [sum(int(name.split()[0]) for name in cluster_devices(f"D-{level}")) for level in ("H2", "H10")] == [39, 39]


def test_a_share_of_a_device_has_a_share_of_its_memory():
    whole, half = (device_profile(name, "resnet50-imagenet") for name in ("RTX 4090", "RTX 4090@50%"))
    assert (whole.memory, half.memory) == (256, 128)
    assert device_profile("RTX 4090@0.1%", "resnet50-imagenet").memory == 1
    assert device_profile("12 cores", "resnet50-imagenet").memory is None, "the memory is that of the whole server"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: device_profile("A10", "bert-squad"), ["device 'A10' is unknown", "Did you mean A100", "RTX 4090"]),
        (lambda: device_profile("qqq", "bert-squad"), ["device 'qqq' is unknown. Allowed are A100"]),
        (lambda: device_profile("A100", "bert-squat"), ["workload 'bert-squat'", "Did you mean bert-squad"]),
        (lambda: cluster_profiles("D-H3", "bert-squad"), ["cluster 'D-H3'", "D-H2", "Stella-cloud"]),
        (lambda: device_profile("A100@0%", "bert-squad"), ["share of 'A100' in percent", "above 0"]),
        (lambda: device_profile("A100@200%", "bert-squad"), ["share of 'A100' in percent", "100"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(call, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_table_is_package_data():
    listed = (ROOT / "pyproject.toml").read_text().split("[tool.setuptools.package-data]")[1].split("]")[0]
    assert f'"{catalog.FILE.relative_to(ROOT / "lightning_hetero").as_posix()}"' in listed
