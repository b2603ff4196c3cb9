"""Checkpoint files are whole under their final name at every moment; what is damaged is named, or passed over."""

import multiprocessing
import os
import pickle
import random
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

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.helpers import Points, collected, fit
from tests.ranks import run_ranks

SHM, FORK = Path("/dev/shm"), multiprocessing.get_context("fork")


@pytest.fixture
def io():
    return HeteroDDPStrategy().checkpoint_io


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.ckpt"


def _save_for_ever(io, path):
    state = {"weights": torch.zeros(4_000_000)}
    while True:
        io.save_checkpoint(state, path)


@pytest.mark.slow("writes for two seconds, and is killed")
def test_a_file_is_whole_at_every_moment(io, tmp_path):
    """On another file system than that for temporary files, while a process saves there until it is killed."""
    if not SHM.is_dir() or SHM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    path = SHM / f"lightning-hetero-{os.getpid()}.ckpt"
    process = FORK.Process(target=_save_for_ever, args=(io, str(path)))
    process.start()
    seen, end = set(), time.monotonic() + 60.0
    try:
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.001)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            seen.add(path.stat().st_size)
        process.kill()
        process.join()
        assert len(seen) == 1
        assert torch.load(path, weights_only=True)["weights"].shape == (4_000_000,)
    finally:
        process.kill()
        for left in SHM.glob(f"*{path.stem}*"):
            left.unlink()


def _on_a_full_disk(rank, io, path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(OSError, match="too large"):
        io.save_checkpoint({"weights": torch.ones(1_000_000)}, path)


def test_a_disk_that_is_full_leaves_the_file_that_was_there(io, path):
    io.save_checkpoint({"weights": torch.zeros(3)}, path)
    run_ranks(_on_a_full_disk, 1, io, path)
    assert io.load_checkpoint(path)["weights"].tolist() == [0.0, 0.0, 0.0]
    assert list(path.parent.iterdir()) == [path]


def test_a_name_is_given_to_what_is_on_the_disk_and_then_kept_there(io, tmp_path, monkeypatch):
    """The power may fail at any time: contents first, then the name, then the folder that has it."""
    done, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(stat.S_ISDIR(os.fstat(number).st_mode)))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append(to.name) or replace(path, to))
    io.save_checkpoint({}, tmp_path / "new" / "last.ckpt")
    assert done == [False, "last.ckpt", True]


# damage


def truncate(path, share=0.6):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_what_is_truncated_is_named_with_those_that_are_whole(io, tmp_path, share):
    for i, name in enumerate(["a", "b", "c", "d"]):
        io.save_checkpoint({"weights": torch.full((1000 - 100 * i,), float(i))}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (i, i))
    truncate(tmp_path / "d.ckpt", share)
    truncate(tmp_path / "b.ckpt", share)
    (tmp_path / "folder.ckpt").mkdir()  # as of a sharded checkpoint
    with pytest.raises(DamagedCheckpointError, match=r"d\.ckpt.* c\.ckpt, a\.ckpt"):
        io.load_checkpoint(tmp_path / "d.ckpt")
    (path := tmp_path / "alone" / "a.ckpt").parent.mkdir()
    path.write_bytes(b"PK\x03\x04" + bytes(400))
    with pytest.raises(DamagedCheckpointError, match="none"):
        io.load_checkpoint(path)
    assert io.load_checkpoint(tmp_path / "c.ckpt")["weights"][0] == 2.0


@pytest.mark.parametrize("seconds", [(1, 2, 3), (2, 3, 1), (3, 1, 2)])
def test_the_latest_step_of_the_same_run_stands_in_for_a_damaged_last_one(io, tmp_path, seconds):
    """Whatever the clock said: files may have been copied. What has come later than the last one is of another run."""
    for name, step in (("a", 7), ("b", 28), ("c", 90), ("last", 30)):
        io.save_checkpoint({"global_step": step, "weights": torch.full((1000,), 0.5)}, tmp_path / f"{name}.ckpt")
    for name, second in zip("abc", seconds, strict=True):
        os.utime(tmp_path / f"{name}.ckpt", (second, second))
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[content.index(torch.full((1000,), 0.5).numpy().tobytes())] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 28


def _damage(kind, content, rng):
    at, to = rng.randrange(len(content)), rng.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "delete":
        del content[at : at + rng.randrange(1, 9)]
    elif kind == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "append":
        content.extend(rng.randbytes(rng.randrange(1, 3000)))
    elif kind == "mix":
        part = content[to : to + 512]
        content[at : at + len(part)] = part


STATE = {"weights": {i: torch.full((20, 20), float(i)) for i in range(4)}, "epoch": 3}


def loads_what_was_saved(io, path):
    found = io.load_checkpoint(path)
    same = all(torch.equal(found["weights"][i], w) for i, w in STATE["weights"].items())
    return same and found["epoch"] == STATE["epoch"]


@pytest.mark.parametrize("kind", ["flip", "cut", "delete", "zero", "append", "mix"])
def test_a_damaged_file_is_named_or_loads_what_was_saved(kind, io, path, seed):
    """Never anything else. Damage at its end is as likely as in all of the rest, because its directory is there."""
    io.save_checkpoint(STATE, path)
    saved, rng, found = path.read_bytes(), random.Random(seed), 0
    for _ in range(40):
        content = bytearray(saved)
        begin = rng.choice([0, len(saved) - 900])
        part = content[begin:]
        _damage(kind, part, rng)
        path.write_bytes(content[:begin] + part)
        try:
            assert loads_what_was_saved(io, path)
        except DamagedCheckpointError as error:
            assert "a.ckpt" in str(error)  # noqa: PT017
            found += 1
    assert found > 5 or kind == "append"


def test_every_bit_of_the_directory_matters_or_does_not(io, path):
    """It is where a single bit can make torch read zeros for a tensor."""
    io.save_checkpoint(STATE, path)
    saved = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    for at in range(begin, len(saved)):
        content = bytearray(saved)
        content[at] ^= 1 << (at % 8)
        path.write_bytes(content)
        with suppress(DamagedCheckpointError):
            assert loads_what_was_saved(io, path), at - begin


def test_a_large_record_is_read_to_its_end(io, path):
    weights = torch.full((2_500_000,), 0.5)
    io.save_checkpoint({"weights": weights}, path)
    content, saved = bytearray(path.read_bytes()), weights.numpy().tobytes()
    content[content.index(saved) + len(saved) - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="data/0"):
        io.load_checkpoint(path)


def test_older_files_are_read_and_other_errors_are_as_they_were(io, tmp_path):
    torch.save({"a": 1}, tmp_path / "last.ckpt", _use_new_zipfile_serialization=False)
    assert io.load_checkpoint(tmp_path / "last.ckpt") == {"a": 1}
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")
    torch.save({"a": Points(1)}, tmp_path / "last.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        io.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def _fit(rank, path, folder):
    warnings.filterwarnings("ignore", "The dirpath has changed from")
    lines = collected()
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3, filename="{step}", save_last=True)]
    given = {"callbacks": callbacks, "ckpt_path": path, "enable_checkpointing": True, "max_epochs": 1}
    result = fit(rank, "hetero_ddp", 2, 5, dataset=Points(60), **given)
    return len(result["seen"]), [line for line in lines if "last.ckpt" in line]


def test_a_training_goes_on_from_the_newest_whole_file_where_the_last_is_damaged(tmp_path):
    assert run_ranks(_fit, 2, None, str(tmp_path)) == [(6, [])] * 2
    truncate(tmp_path / "last.ckpt")
    truncate(tmp_path / "step=6.ckpt")
    for steps, lines in run_ranks(_fit, 2, str(tmp_path / "last.ckpt"), str(tmp_path / "new")):
        assert steps == 3
        assert len(lines) == 1
        assert str(tmp_path / "step=3.ckpt") in lines[0]


def test_plugins_of_the_users_stay_and_ours_can_be_sent_to_another_process(io):
    class Own(TorchCheckpointIO):
        pass

    assert type(HeteroDDPStrategy(checkpoint_io=Own()).checkpoint_io) is Own
    wrapping = HeteroDDPStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapping) is AsyncCheckpointIO
    others = [strategy().checkpoint_io for strategy in (HeteroElasticStrategy, FabricStrategy)]
    for plugin in (io, wrapping.checkpoint_io, *others):
        assert type(plugin) is type(io) is not TorchCheckpointIO
        assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)
