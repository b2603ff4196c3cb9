"""Whatever a file holds, each reader of ours returns what was written, or raises one error that names the file."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetero.accelerate.plugin import HeteroPlugin
from lightning_hetero.cli.launch import read_config
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import CheckpointStateError, DamagedCheckpointError
from lightning_hetero.core.checkpoint_state import CHECKSUMS
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.report.run_file import read_run
from lightning_hetero.session import HeteroSession
from lightning_hetero.simulate.planning import Cluster, Given, Link, Worker, plan_cluster, read_cluster, record
from tests.cli.ran import ran
from tests.learned import knowing
from tests.report.runs import lines_of, simulated

WORKERS = (Worker("a", 1e-3, 0.01, 2e-3, 0.02, 64, 0.01, 0.02, 1.5), Worker("b", 2e-3, 0.0, 3e-3, 0.0))
PLANNER = knowing({"one": (1e-3, 0.01, 2e-3, 0.02), "two": (3e-3, 0.01, 6e-3, 0.02)})
CLUSTER = """
name: mine
workload: resnet50-imagenet
total_batch_size: 256
link: {rate: 10Gbit, latency: 50us, buckets: 4}
price: {"*": 1.5, A100: 3}
workers:
  - 2 x A100
  - {device: V100, count: 2, memory: 64, jitter: 0.02}
  - {q: 0.001, s: 0.01, k: 0.002, m: 0.02, name: own}
"""
CONFIG = "num_processes: 2\nuse_cpu: true\nhetero_config:\n  policy: pid\n  max_local_batch_sizes: [3, 4]\n"


def planned(path):
    return plan_cluster(read_cluster(str(path), Given(total_batch_size=100))).to_dict()


def by_variable(path):
    with mock.patch.dict(os.environ, {"ACCELERATE_HETERO_CONFIG_FILE": str(path)}):
        return HeteroPlugin()


@dataclass(frozen=True)
class Reader:
    """A kind of file, with what reads it."""

    name: str
    content: str
    read: Callable

    def without_checksums(self):
        """The same file, of an earlier version."""
        values = json.loads(self.content)
        return Reader(self.name, json.dumps({k: v for k, v in values.items() if k != CHECKSUMS}), self.read)


OURS = [
    Reader("convergence.json", ConvergenceProfile(32, 512, 0.5, ((0.9, 64, 0.1),)).to_json(), ConvergenceProfile.load),
    Reader("device.json", json.dumps(record(Cluster(WORKERS, Link(4e6, 1e8, 1e-3, 4, 0.2), 100))), planned),
    Reader("state.json", json.dumps(PLANNER.state_dict()), planned),
]
THEIRS = [
    Reader("cluster.yaml", CLUSTER, planned),
    Reader("config.yaml", CONFIG, lambda path: read_config(str(path))),
    Reader("plugin.yaml", CONFIG, by_variable),
]
by_name = pytest.mark.parametrize("reader", [*OURS, *THEIRS], ids=lambda reader: reader.name)
RUN = simulated(rounds=3, steps=3)
quickly = settings(suppress_health_check=[HealthCheck.too_slow])

HOSTILE = (
    *("NaN", "Infinity", "-1", "1e999", "1e-320", "-0.0", "1" * 400, "9" * 5000, "null", "true", "[]", "{}", '"x"'),
    *("[" * 1200, "{" * 1200, '{"a": ' * 1200, "&a [*a]", "*a", "&a", "<<", "? [a]: b", "{[1]: 2}", "0x1F", ".inf"),
    *("!!python/object/apply:os.system [false]", "!!python/name:os.system", "!!int ''", "!!bool x", "!!timestamp x"),
    *("2026-13-45", "!!binary x", "!!set {a}", "!!omap 1", "1:60:1", "\0", "\ufeff", "\u2028", "%YAML 9.9\n---"),
)
VALUE = re.compile(r'(?<=[ :\[,])(?:-?[0-9.][0-9a-zA-Z.+-]*|"[^"\n]*"|null|true|\w+)')


@st.composite
def damage(draw, content):
    """Bytes of a file after something happened to them."""
    at = draw(st.integers(0, len(content) - 1))
    count = draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["flip", "cut", "delete", "insert", "replace", "copy", "zero", "other"]))
    new = draw(st.binary(min_size=count, max_size=count))
    return {
        "flip": lambda: content[:at] + bytes([content[at] ^ (1 << count % 8)]) + content[at + 1 :],
        "cut": lambda: content[:at],
        "delete": lambda: content[:at] + content[at + count :],
        "insert": lambda: content[:at] + new + content[at:],
        "replace": lambda: content[:at] + new + content[at + count :],
        "copy": lambda: content[:at] + content[: 9 * count] + content[at + 9 * count :],
        "zero": lambda: content[:at] + bytes(count) + content[at + count :],
        "other": lambda: draw(st.binary(max_size=200)),
    }[kind]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


def outcome(reader, folder, content):
    """What a reader makes of a file: a value, or ``None`` for an error that names it."""
    path = folder / reader.name
    path.write_bytes(content)
    try:
        return reader.read(path)
    except (TypeError, ValueError) as error:
        why = str(error)
    assert reader.name in why
    return None


@pytest.mark.parametrize("reader", OURS, ids=lambda reader: reader.name)
def test_a_damaged_file_of_ours_is_what_was_written_or_an_error(reader, folder):
    whole = outcome(reader, folder, reader.content.encode())
    assert whole is not None

    @quickly
    @given(damage(reader.content.encode()))
    def check(content):
        assert outcome(reader, folder, content) in (whole, None)

    check()


@by_name
def test_whatever_a_file_holds_it_is_read_or_named(reader, folder):
    assert outcome(reader, folder, reader.content.encode()) is not None

    @quickly
    @given(damage(reader.content.encode()))
    def check(content):
        outcome(reader, folder, content)

    check()


OLDER = [reader.without_checksums() for reader in OURS]


@pytest.mark.parametrize("reader", [*OURS, *OLDER, *THEIRS], ids=lambda reader: reader.name)
def test_whatever_a_value_is_the_file_is_read_or_named(reader, folder):
    whole = outcome(reader, folder, reader.content.encode())
    values = list(VALUE.finditer(reader.content))

    @quickly
    @given(st.sampled_from(values), st.sampled_from(HOSTILE))
    def check(value, other):
        content = reader.content[: value.start()] + other + reader.content[value.end() :]
        found = outcome(reader, folder, content.encode())
        assert reader not in OURS or found in (whole, None)

    check()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"])
@by_name
def test_a_file_in_another_encoding_is_read_or_named(reader, encoding, folder):
    whole = outcome(reader, folder, reader.content.encode())
    assert outcome(reader, folder, reader.content.encode(encoding)) in (whole, None)


@pytest.mark.parametrize("content", ["", " ", "\n\n", "[]", "{}", "null", "3", '"text"', "---\n---\n", "a: 1\na: 2\n"])
@by_name
def test_a_file_without_what_is_needed_is_named(reader, content, folder):
    found = outcome(reader, folder, content.encode())
    assert found is None or reader in THEIRS[1:]


def test_a_damaged_line_of_a_run_is_left_out_and_named(folder):
    """What is read was written, in its order, and something is told if it is not all."""
    lines = "".join(lines_of(RUN)).encode()
    kinds = ("rounds", "changes", "gains", "stragglers")
    reader = Reader("run.jsonl", "", read_run)
    whole = outcome(reader, folder, lines)
    assert whole.rounds

    @quickly
    @given(damage(lines))
    def check(content):
        found = outcome(reader, folder, content)
        if found is None:
            return
        assert found.header == whole.header
        for kind in kinds:
            assert set(map(str, getattr(found, kind))) <= set(map(str, getattr(whole, kind)))

    check()


def session_of():
    engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
    session = HeteroSession(engine, planner=PLANNER)
    return session, session.shard(PermutationStream(10, shuffle=True, seed=0), 4)


def loaded(path):
    """Return what a session has read of a file, ``None`` for an error that is named."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 - torch has many; what it refuses does not come to us
        return None
    session, _ = session_of()
    try:
        session.load_state_dict(state)
    except (DamagedCheckpointError, CheckpointStateError):
        return None
    restored = session.state_dict()
    return session.planner, [restored[key] for key in ("epoch", "step", "engine", "stream")]


@pytest.mark.parametrize("older", [False, True])
def test_a_flipped_bit_in_the_state_of_a_session_is_found(older, folder):
    """torch does not compare its checksums: without ours, many flips would be another state."""
    session, batches = session_of()
    next(session.steps(lambda: iter(batches)))
    state = session.state_dict()
    if older:
        state = {key: value for key, value in state.items() if key != CHECKSUMS}
        state["planner"] = {key: value for key, value in state["planner"].items() if key != CHECKSUMS}
    path, others = folder / "session.pt", 0
    torch.save(state, path)
    content, whole = path.read_bytes(), loaded(path)
    assert whole is not None
    begin, end = content.index(b"data.pkl"), content.index(b"PK\x01\x02")
    for i in range(300):
        at = begin + (end - begin) * i // 300
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << i % 8)]) + content[at + 1 :])
        others += loaded(path) not in (whole, None)
    assert (others > 20) if older else (others == 0)


@quickly
@given(st.recursive(st.none() | st.floats() | st.text(max_size=3) | st.integers(), lambda x: st.lists(x, max_size=3)))
def test_a_state_of_another_form_is_a_named_error(value):
    session, batches = session_of()
    next(session.steps(lambda: iter(batches)))
    state = {key: one for key, one in session.state_dict().items() if key != CHECKSUMS}
    for key in ("epoch", "step", "engine", "planner"):
        if state[key] == value or (value is None and key == "engine"):
            continue
        again, _ = session_of()
        with pytest.raises((CheckpointStateError, DamagedCheckpointError)):
            again.load_state_dict({**state, key: value})


COMMANDS = {
    "cluster.yaml": [("plan",), ("simulate", "--steps", "2")],
    "device.json": [("plan", "--total-batch", "64"), ("simulate", "--total-batch", "64", "--steps", "2")],
    "state.json": [("plan", "--total-batch", "64")],
    "run.jsonl": [("report",), ("compare", "run.jsonl")],
    "config.yaml": [("launch", "--config_file", "config.yaml", "script.py")],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_ends_with_a_traceback(name, tmp_path, monkeypatch, capsys):
    """It ends with exit code 2 and a line that names the file."""
    monkeypatch.chdir(tmp_path)
    for content in (b"", b"\xff\xfe\0", b"[" * 9000, b"!!python/object/apply:os.system [false]", b"3", b"- 1\n- [\n"):
        (tmp_path / name).write_bytes(content)
        for command, *options in COMMANDS[name]:
            given_to = [] if name == "config.yaml" else [name]
            code, _, err = ran(capsys, command, *given_to, *options)
            assert code == 2, (content, err)
            assert name in err
            assert "Traceback" not in err
