"""Whatever a file holds, each reader of ours returns what was written, or raises one error that names the file."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetero.cli.launch import read_config
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import CheckpointStateError, DamagedCheckpointError
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.report import read_run
from lightning_hetero.session import HeteroSession
from lightning_hetero.simulate import Cluster, Given, Link, Worker, plan_cluster, read_cluster, record
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


@dataclass(frozen=True)
class Reader:
    """A kind of file, with what reads it, and whether it is ours, so that a change of it can be found."""

    name: str
    content: str
    read: Callable
    ours: bool = True


READERS = [
    Reader("convergence.json", ConvergenceProfile(32, 512, 0.5, ((0.9, 64, 0.1),)).to_json(), ConvergenceProfile.load),
    Reader("device.json", json.dumps(record(Cluster(WORKERS, Link(4e6, 1e8, 1e-3, 4, 0.2), 100))), planned),
    Reader("state.json", json.dumps(PLANNER.state_dict()), planned),
    Reader("cluster.yaml", CLUSTER, planned, ours=False),
    Reader("config.yaml", CONFIG, lambda path: read_config(str(path)), ours=False),
]
each = pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
quickly = settings(suppress_health_check=[HealthCheck.too_slow])

HOSTILE = (
    *("NaN", "Infinity", "-1", "1e999", "1e-320", "-0.0", "1" * 400, "9" * 5000, "null", "true", "[]", "{}", '"x"'),
    *("[" * 1200, "{" * 1200, '{"a": ' * 1200, "&a [*a]", "*a", "&a", "<<", "? [a]: b", "{[1]: 2}", "0x1F", ".inf"),
    *("!!python/object/apply:os.system [false]", "!!python/name:os.system", "!!int ''", "!!bool x", "!!timestamp x"),
    *("2026-13-45", "!!binary x", "!!set {a}", "!!omap 1", "1:60:1", "\0", "\ufeff", "\u2028", "%YAML 9.9\n---"),
)
VALUE = re.compile(r'(?<=[ :\[,])(?:-?[0-9.][0-9a-zA-Z.+-]*|"[^"\n]*"|null|true|\w+)')
CONTENTS = ("", " ", "\n\n", "[]", "{}", "null", "3", '"text"', "---\n---\n", "a: 1\na: 2\n")


@st.composite
def damage(draw, content):
    """Bytes of a file after some of them were flipped, lost, inserted, replaced or repeated."""
    at, count = draw(st.integers(0, len(content) - 1)), draw(st.integers(1, 8))
    new = draw(
        st.sampled_from([b"", bytes(count), content[: 9 * count], bytes([content[at] ^ (1 << count % 8)])])
        | st.binary(min_size=count, max_size=count)
    )
    return content[:at] + new + content[at + draw(st.sampled_from([0, 1, len(new), count, len(content)])) :]


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


@each
def test_a_file_is_what_was_written_or_an_error_whatever_happened_to_its_bytes_and_values(reader, folder):
    whole = outcome(reader, folder, reader.content.encode())
    values = list(VALUE.finditer(reader.content))
    assert whole is not None

    def check(content):
        found = outcome(reader, folder, content)
        assert found in (whole, None) or not reader.ours

    def replaced(pair):
        value, other = pair
        return (reader.content[: value.start()] + other + reader.content[value.end() :]).encode()

    quickly(given(damage(reader.content.encode()))(check))()
    quickly(given(st.tuples(st.sampled_from(values), st.sampled_from(HOSTILE)).map(replaced))(check))()
    for encoding in ("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"):
        assert outcome(reader, folder, reader.content.encode(encoding)) in (whole, None)
    for content in CONTENTS:
        assert outcome(reader, folder, content.encode()) is None or reader.name == "config.yaml"


def test_a_damaged_line_of_a_run_is_left_out(folder):
    """What is read was written, in its order."""
    lines, reader = "".join(lines_of(simulated(rounds=3, steps=3))).encode(), Reader("run.jsonl", "", read_run)
    whole = outcome(reader, folder, lines)
    assert whole.rounds

    @quickly
    @given(damage(lines))
    def check(content):
        found = outcome(reader, folder, content)
        for kind in ("rounds", "changes", "gains", "stragglers") if found else ():
            assert set(map(str, getattr(found, kind))) <= set(map(str, getattr(whole, kind)))
        assert found is None or found.header == whole.header

    check()


def session_of():
    engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
    session = HeteroSession(engine, planner=PLANNER)
    return session, session.shard(PermutationStream(10, shuffle=True, seed=0), 4)


def loaded(path):
    """What a session has read of a file, ``None`` for an error that is named."""
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


def test_a_flipped_bit_in_the_state_of_a_session_is_found(folder):
    """torch does not compare its checksums: without ours, many flips would be another state."""
    path, (session, batches) = folder / "session.pt", session_of()
    next(session.steps(lambda: iter(batches)))
    torch.save(session.state_dict(), path)
    content, whole = path.read_bytes(), loaded(path)
    assert whole is not None
    begin, end = content.index(b"data.pkl"), content.index(b"PK\x01\x02")
    for i in range(300):
        at = begin + (end - begin) * i // 300
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << i % 8)]) + content[at + 1 :])
        assert loaded(path) in (whole, None)


COMMANDS = {
    "cluster.yaml": ["plan", "simulate --steps 2"],
    "device.json": ["plan --total-batch 64", "simulate --total-batch 64 --steps 2"],
    "state.json": ["plan --total-batch 64"],
    "run.jsonl": ["report", "compare run.jsonl"],
    "config.yaml": ["launch --config_file"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_ends_with_a_traceback(name, tmp_path, monkeypatch, capsys):
    """It ends with exit code 2 and a line that names the file."""
    monkeypatch.chdir(tmp_path)
    script = ["script.py"] if name == "config.yaml" else []
    for content in (b"", b"\xff\xfe\0", b"[" * 9000, b"!!python/object/apply:os.system [false]", b"3", b"- 1\n- [\n"):
        (tmp_path / name).write_bytes(content)
        for command in COMMANDS[name]:
            code, _, err = ran(capsys, *command.split(), name, *script)
            assert code == 2, (content, err)
            assert name in err
            assert "Traceback" not in err
