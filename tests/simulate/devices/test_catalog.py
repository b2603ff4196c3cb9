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
    price_per_hour,
    published_clusters,
    published_devices,
    workloads,
)
from lightning_hetero.simulate.devices.names import UnknownNameError

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


def test_a_reported_time_is_printed_in_the_paper():
    reported = {(e["device"], e["workload"]): e for e in TABLE["profiles"] if e["basis"] == "reported"}
    assert len(reported) == 9
    printed = {"resnet152-imagenet100": (118, 183, 270), "vit-b16-imagenet100": (99, 148, 300)}
    printed["swin-b-imagenet100"] = (80, 112, 217)
    for workload, rates in printed.items():
        for device, rate in zip(("RTX 2080 Ti", "RTX 3090", "RTX 4090"), rates, strict=True):
            entry = reported[device, workload]
            assert 1 / (entry["q"] + entry["k"]) == pytest.approx(rate, rel=1e-6)
            assert device_profile(device, workload).seconds(rate) == pytest.approx(1.0, rel=1e-6)


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


@pytest.mark.parametrize("name", list(published_clusters()))
def test_every_cluster_has_profiles(name):
    profiles = cluster_profiles(name, "resnet50-imagenet")
    assert [profile.name for profile in profiles] == cluster_devices(name)
    assert {profile.memory is None for profile in profiles} <= {True, False}


def test_clusters_have_the_workers_of_the_papers():
    assert len(cluster_devices("B")) == len(cluster_devices("C")) == 16
    assert cluster_devices("B").count("RTX6000") == 8
    assert [sum(int(name.split()[0]) for name in cluster_devices(f"D-{level}")) for level in ("H2", "H10")] == [39, 39]


def test_workloads_are_those_of_the_papers():
    by_cannikin = [w for w in workloads().values() if w.source == "Cannikin, Table 5"]
    assert [w.total_batch_size for w in by_cannikin] == [100, 64, 12, 9, 64]
    assert [w.parameters for w in by_cannikin] == [25_600_000, 11_000_000, 52_000_000, 110_000_000, 5_200_000]
    assert all(w.gradient_bytes == 4 * w.parameters for w in workloads().values())
    by_stella = [w.parameters for w in workloads().values() if w.source.startswith("StellaTrain")]
    assert by_stella == [58_000_000, 88_000_000, 139_000_000, 123_600_000]


def test_memory_is_that_of_the_largest_batch_that_a_paper_names():
    assert device_profile("RTX 4090", "resnet50-imagenet").memory == 256
    assert device_profile("P4000", "resnet50-imagenet").memory == 85
    assert device_profile("RTX 4090", "bert-squad").memory is None


def test_a_share_of_a_device_has_a_share_of_its_memory():
    whole, half = (device_profile(name, "resnet50-imagenet") for name in ("RTX 4090", "RTX 4090@50%"))
    assert (whole.memory, half.memory) == (256, 128)
    assert device_profile("RTX 4090@0.1%", "resnet50-imagenet").memory == 1
    assert device_profile("12 cores", "resnet50-imagenet").memory is None, "the memory is that of the whole server"


def test_a_batch_has_a_fixed_time_for_each_launch_of_a_tensor():
    profile, rules = device_profile("A100", "resnet50-imagenet"), TABLE["rules"]
    assert ("A100", "resnet50-imagenet") not in {(e["device"], e["workload"]) for e in TABLE["profiles"]}
    expected = 2 * workloads()["resnet50-imagenet"].tensors * rules["launch_seconds"]
    assert (profile.s, profile.m) == pytest.approx((expected, expected))
    half = device_profile("A100@50%", "resnet50-imagenet")
    assert (half.s, half.m) == pytest.approx((2 * expected, 2 * expected))


def test_shares_and_cores():
    whole, quarter = device_profile("rtx-6000", "bert-squad"), device_profile("RTX6000@25%", "bert-squad")
    assert quarter.seconds(10) == pytest.approx(4 * whole.seconds(10))
    assert (whole.name, quarter.name) == ("RTX6000", "RTX6000@25%")
    assert device_profile("1 core", "bert-squad").q == pytest.approx(12 * device_profile("12 cores", "bert-squad").q)
    assert price_per_hour("A100@50%") == pytest.approx(0.5 * price_per_hour("A100"))


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


def test_unknown_names_are_an_error_of_their_own():
    with pytest.raises(UnknownNameError):
        device_profile("A100", "?")


def test_a_name_of_another_type_is_refused():
    with pytest.raises(TypeError, match="must be a string"):
        device_profile(100, "bert-squad")


def test_the_table_is_package_data():
    listed = (ROOT / "pyproject.toml").read_text().split("[tool.setuptools.package-data]")[1].split("]")[0]
    assert f'"{catalog.FILE.relative_to(ROOT / "lightning_hetero").as_posix()}"' in listed
