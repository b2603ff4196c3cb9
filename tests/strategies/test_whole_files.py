"""Checkpoint files are whole under their final name at every moment; what is damaged is named, or passed over."""

import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import stat
import time
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.core.whole_file import damage_of
from lightning_hetero.strategies._checkpoints.whole_files import read_or_fall_back, write_whole
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.helpers import Points, fit, run_ranks

STRATEGIES = [HeteroDDPStrategy, HeteroElasticStrategy, FabricStrategy]
SHM = Path("/dev/shm")
FORK = multiprocessing.get_context("fork")


def _save_for_ever(strategy, path):
    state = {"weights": torch.zeros(4_000_000)}
    while True:
        strategy().checkpoint_io.save_checkpoint(state, path)


def sizes_seen(strategy, path, seconds=2.0):
    """Sizes under the final name while another process saves there again and again, until that is killed."""
    process = FORK.Process(target=_save_for_ever, args=(strategy, str(path)))
    process.start()
    seen, end = set(), time.monotonic() + 60.0
    try:
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.001)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seen.add(path.stat().st_size)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return seen


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system than that for temporary files."""
    if not SHM.is_dir() or SHM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    folder = SHM / f"lightning-hetero-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_is_whole_at_every_moment(strategy, elsewhere):
    path = elsewhere / "last.ckpt"
    seen = sizes_seen(strategy, path)
    assert len(seen) == 1
    assert torch.load(path, weights_only=True)["weights"].shape == (4_000_000,)


@pytest.mark.alone
def test_with_lightnings_own_plugin_it_is_not(elsewhere):
    """Else the test above would tell nothing."""
    assert len(sizes_seen(DDPStrategy, elsewhere / "last.ckpt", 5.0)) > 1


def _on_a_full_disk(strategy, path, answer):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        strategy().checkpoint_io.save_checkpoint({"weights": torch.ones(1_000_000)}, path)
    except OSError as error:
        answer.send(type(error).__name__)
    else:
        answer.send(None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_disk_that_is_full_leaves_the_file_that_was_there(strategy, tmp_path):
    path = tmp_path / "last.ckpt"
    strategy().checkpoint_io.save_checkpoint({"weights": torch.zeros(3)}, path)
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_on_a_full_disk, args=(strategy, str(path), theirs))
    process.start()
    assert ours.poll(60.0)
    assert ours.recv() == "OSError"
    process.join()
    assert torch.load(path, weights_only=True)["weights"].tolist() == [0.0, 0.0, 0.0]
    assert list(tmp_path.iterdir()) == [path]


def truncate(path, share=0.6):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_what_is_truncated_is_named_with_those_that_are_whole(tmp_path, share):
    plugin = HeteroDDPStrategy().checkpoint_io
    for i, name in enumerate(["a", "b", "c", "d"]):
        plugin.save_checkpoint({"weights": torch.full((1000 - 100 * i,), float(i))}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (i, i))
    truncate(tmp_path / "d.ckpt", share)
    truncate(tmp_path / "b.ckpt", share)
    (tmp_path / "folder.ckpt").mkdir()  # as of a sharded checkpoint
    with pytest.raises(DamagedCheckpointError, match=r"d\.ckpt is not a whole .*newest first: c\.ckpt, a\.ckpt\."):
        plugin.load_checkpoint(tmp_path / "d.ckpt")
    assert plugin.load_checkpoint(tmp_path / "c.ckpt")["weights"][0] == 2.0


@pytest.mark.parametrize("seconds", [(1, 2, 3), (2, 3, 1), (3, 1, 2)])
def test_the_latest_step_of_the_same_run_stands_in_for_a_damaged_last_one(tmp_path, seconds):
    """Whatever the clock said: files may have been copied. What has come later than the last one is of another run."""
    plugin = HeteroDDPStrategy().checkpoint_io
    for name, step in (("a", 7), ("b", 28), ("c", 90), ("last", 30)):
        plugin.save_checkpoint({"global_step": step, "weights": torch.full((1000,), 0.5)}, tmp_path / f"{name}.ckpt")
    for name, second in zip("abc", seconds, strict=True):
        os.utime(tmp_path / f"{name}.ckpt", (second, second))
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[content.index(torch.full((1000,), 0.5).numpy().tobytes())] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 28


def _load(path):
    return torch.load(path, weights_only=True)


def _equal(one, other):
    return one["epoch"] == other["epoch"] and all(
        torch.equal(one["weights"][i], w) for i, w in other["weights"].items()
    )


def _flip(content, rng):
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _replace(content, rng):
    content[rng.randrange(len(content))] = rng.randrange(256)


def _cut(content, rng):
    del content[rng.randrange(len(content)) :]


def _insert(content, rng):
    at = rng.randrange(len(content))
    content[at:at] = rng.randbytes(rng.randrange(1, 9))


def _delete(content, rng):
    at = rng.randrange(len(content))
    del content[at : at + rng.randrange(1, 9)]


def _zero(content, rng):
    at = rng.randrange(len(content) - 64)
    content[at : at + 64] = bytes(64)


def _append(content, rng):
    content.extend(rng.randbytes(rng.randrange(1, 3000)))


def _mix(content, rng):
    at, to = rng.randrange(len(content) - 512), rng.randrange(len(content) - 512)
    content[at : at + 512] = content[to : to + 512]


DAMAGES = [_flip, _replace, _cut, _insert, _delete, _zero, _append, _mix]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_or_loads_what_was_saved(damage, tmp_path):
    """Never anything else. Damage at its ends is as likely as in all of the rest, because its directory is there."""
    path, rng, found = tmp_path / "a.ckpt", random.Random(0), []
    state = {"weights": {i: torch.randn(20, 20) for i in range(4)}, "epoch": 3}
    write_whole(state, path)
    saved = path.read_bytes()
    for _ in range(150):
        content = bytearray(saved)
        begin = rng.choice([0, 0, len(saved) - 900])
        part = content[begin:]
        damage(part, rng)
        path.write_bytes(content[:begin] + part)
        try:
            assert _equal(read_or_fall_back(_load, path), state)
        except DamagedCheckpointError as error:
            found.append(str(error))
    assert len(found) > 20 or damage is _append
    assert all("a.ckpt is not a whole checkpoint" in text for text in found)


def test_every_bit_of_the_directory_matters_or_does_not(tmp_path):
    """It is where a single bit can make torch read zeros for a tensor."""
    path, state = tmp_path / "a.ckpt", {"weights": {0: torch.ones(4)}, "epoch": 1}
    write_whole(state, path)
    saved = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    for at in range(begin, len(saved)):
        for bit in range(8):
            content = bytearray(saved)
            content[at] ^= 1 << bit
            path.write_bytes(content)
            with suppress(DamagedCheckpointError):
                assert _equal(read_or_fall_back(_load, path), state), (at - begin, bit)


@pytest.mark.parametrize("kind", [1, 8, 9, 12, 14, 93, 99])
def test_a_record_that_seems_compressed_is_named(kind, tmp_path):
    """Each way of compressing has errors of its own."""
    path = tmp_path / "a.ckpt"
    write_whole({"weights": torch.randn(100)}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record, begin = archive.infolist()[0], archive.start_dir
    for at in (record.header_offset + 8, begin + 10):
        content[at : at + 2] = kind.to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=re.escape(f"; {record.filename}: ")):
        read_or_fall_back(_load, path)


def test_a_record_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_hetero.core.whole_file.CHUNK", 1000)
    path = tmp_path / "a.ckpt"
    weights = torch.full((10_000,), 0.5)
    write_whole({"weights": weights}, path)
    content, saved = bytearray(path.read_bytes()), weights.numpy().tobytes()
    content[content.index(saved) + len(saved) - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="data/0"):
        read_or_fall_back(_load, path)


@pytest.mark.parametrize(("text", "known"), [("PytorchStreamReader failed", True), ("a size mismatch", False)])
def test_what_only_torch_finds_damaged_is_passed_over_too(text, known, tmp_path):
    for name in ("last.ckpt", "a.ckpt"):
        write_whole({"name": name}, tmp_path / name)

    def load(path):
        if path.name == "last.ckpt":
            raise RuntimeError(text)
        return _load(path)

    os.utime(tmp_path / "a.ckpt", (1, 1))
    if known:
        assert read_or_fall_back(load, tmp_path / "last.ckpt") == {"name": "a.ckpt"}
    else:
        with pytest.raises(RuntimeError, match="a size mismatch"):
            read_or_fall_back(load, tmp_path / "last.ckpt")


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": 1}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert damage_of(tmp_path / "a.ckpt") == ""
    assert read_or_fall_back(_load, tmp_path / "a.ckpt") == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"PK", b"text", bytes(5000), b"{}", b"PK\x03\x04" + bytes(400)])
def test_what_is_no_checkpoint_at_all_is_named(content, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="Whole ones beside it, newest first: none"):
        read_or_fall_back(_load, tmp_path / "a.ckpt")


def test_other_errors_of_reading_are_as_they_were(tmp_path):
    plugin = HeteroDDPStrategy().checkpoint_io
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    torch.save({"a": Points(1)}, tmp_path / "last.ckpt")
    plugin.save_checkpoint({}, tmp_path / "other.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)


def test_options_that_lightning_refuses_are_refused(tmp_path):
    for strategy in (DDPStrategy, HeteroDDPStrategy):
        with pytest.raises(TypeError, match="storage_options"):
            strategy().checkpoint_io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def test_the_older_kind_of_file_is_read(tmp_path):
    torch.save({"a": 1}, tmp_path / "last.ckpt", _use_new_zipfile_serialization=False)

    def load(path):
        return torch.load(path, weights_only=True)

    assert read_or_fall_back(load, tmp_path / "last.ckpt") == {"a": 1}
    (tmp_path / "last-v1.ckpt").write_bytes(b"PK")
    assert read_or_fall_back(load, tmp_path / "last-v1.ckpt") == {"a": 1}


def test_a_name_is_given_to_what_is_on_the_disk_and_then_kept_there(tmp_path, monkeypatch):
    """The power may fail at any time: contents first, then the name, then the folder that has it."""
    done, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(stat.S_ISDIR(os.fstat(number).st_mode)))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append(to.name) or replace(path, to))
    HeteroDDPStrategy().checkpoint_io.save_checkpoint({}, tmp_path / "new" / "last.ckpt")
    assert done == [False, "last.ckpt", True]


def _fit(rank, path, folder):
    warnings.filterwarnings("ignore", "The dirpath has changed from")
    said = []
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3, filename="{step}", save_last=True)]
    result = fit(
        rank, "hetero_ddp", 2, 5, dataset=Points(60), callbacks=callbacks, ckpt_path=path, enable_checkpointing=True,
        max_epochs=1,
    )  # fmt: skip
    return len(result["seen"]), [line for line in said if "is not a whole checkpoint" in line]


def test_a_training_goes_on_from_the_newest_whole_file_where_the_last_is_damaged(tmp_path):
    assert run_ranks(_fit, 2, None, str(tmp_path)) == [(6, [])] * 2
    truncate(tmp_path / "last.ckpt")
    truncate(tmp_path / "step=6.ckpt")
    for steps, lines in run_ranks(_fit, 2, str(tmp_path / "last.ckpt"), str(tmp_path / "new")):
        assert steps == 3
        assert len(lines) == 1
        assert "the newest one beside it that is whole: " + str(tmp_path / "step=3.ckpt") in lines[0]


def test_plugins_of_the_users_stay():
    class Own(TorchCheckpointIO):
        pass

    assert type(HeteroDDPStrategy(checkpoint_io=Own()).checkpoint_io) is Own
    wrapping = HeteroDDPStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapping) is AsyncCheckpointIO
    assert type(wrapping.checkpoint_io) is not TorchCheckpointIO
    assert isinstance(wrapping.checkpoint_io, TorchCheckpointIO)


def test_the_plugin_can_be_sent_to_another_process():
    plugin = HeteroDDPStrategy().checkpoint_io
    assert isinstance(plugin, TorchCheckpointIO)
    assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)
