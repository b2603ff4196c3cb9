"""What trainings, and their steps, leave in a process: as much after many of them as after two.

Steps are trained and counted by ``benchmarks/leaks.py``.
"""

import gc
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.group_lifetime import (
    ended,
    leave_all,
)
from tests import loops
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

COMPRESSED = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2), "staleness": 1}
HIERARCHY = {"hierarchy": [[0, 1], [2]]}
TRAININGS = 4
MORE = pytest.mark.slow("the same as in the cases that are always tried, in another front end or with other settings")
QUIET = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def groups():
    return len(dist.distributed_c10d._world.pg_map)


def until(condition, seconds=20):
    """Whether it came true: a thread of gloo's may hold the last sum, and all that hangs on it, a moment longer."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()
    return condition()


def threads():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("Threads:") + 1])


def left(before=()):
    """Process groups, threads and open files of this process, and keys in the store that it shares with the others.

    A thread that ends by itself has time to do so: until there are no more than after the second training ``before``.
    No rank goes on while another one counts.
    """
    gc.collect()
    until(lambda: len(before) < 2 or threads() <= before[1][1])
    dist.barrier()
    keys = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return groups(), threads(), len(os.listdir("/proc/self/fd")), keys


# trainings, one after the other


def loader():
    return DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True)


class Sharded(Regressor):
    """Keeps no gradients, of which a rank has shards."""

    def on_before_optimizer_step(self, optimizer):
        pass


def _trainings(rank, world_size, settings, front_end, fails):
    """Strategies are kept, and with them what they own; every other training may end in an error, in a batch."""
    counts, kept = [], []
    for training in range(TRAININGS):
        batches = iter(range(5 if fails and training % 2 else 10**6))

        def loss(output, x, y, batches=batches):
            if next(batches, None) is None:
                raise ZeroDivisionError
            return torch.nn.functional.mse_loss(output, y)

        own = isinstance(front_end, type)
        given = front_end(**settings) if own else settings
        train = loops.FRONT_ENDS.get("lightning" if own else front_end, loops.sharded_loop)
        kept.append(given)
        with suppress(ZeroDivisionError):
            train(rank, given, 5, world_size=world_size, loss=loss, another=True)
        counts.append(left(counts))
    return counts


@pytest.mark.parametrize(
    ("front_end", "ranks", "settings", "fails"),
    [
        (HeteroDDPStrategy, 3, {**HIERARCHY, **COMPRESSED}, True),
        ("accelerate", 2, {"replan": 2}, True),
        (HeteroElasticStrategy, 2, {"mega_batch_batches": 4}, False),
        pytest.param(HeteroDDPStrategy, 2, COMPRESSED, False, marks=MORE),
        pytest.param("fabric", 3, HIERARCHY, False, marks=MORE),
        pytest.param("accelerate", 3, HIERARCHY, False, marks=MORE),
        pytest.param("fsdp", 4, {"replicate_size": 2}, False, marks=MORE),
    ],
)
@QUIET
def test_many_trainings_in_one_process_leave_as_much_as_two(front_end, ranks, settings, fails):
    """Sockets are closed a little later, by the other end."""
    for counts in run_ranks(_trainings, ranks, ranks, settings, front_end, fails):
        assert len({count[0] for count in counts[1:]}) == 1, counts
        assert max(count[1] for count in counts[2:]) <= counts[1][1], counts
        assert counts[-1][2] < counts[1][2] + 10, counts
        assert counts[-1][3] < counts[1][3] + 2, counts  # a last note may come late; each training would leave one


def _destroyed(rank, strategy, model):
    """Train again after the default group was destroyed, as a script does that makes one of its own."""
    for attempt in range(2):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)
        trainer_of(strategy, 2, max_epochs=1).fit(model(dtype=torch.float32), loader())
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize(("strategy", "model"), [("hetero_ddp", Regressor), ("hetero_fsdp", Sharded)])
@QUIET
def test_a_training_begins_after_the_default_group_was_destroyed(strategy, model):
    run_ranks(_destroyed, 2, strategy, model)


# the lifetime of groups


def _leaves(rank, folder):
    """Rank 0 begins anew while sums wait for rank 1, which takes no part until that is done."""
    dist.init_process_group("gloo")
    owner, begun = ControlPlane(rank, 2), folder / "begun"
    made = list(dist.distributed_c10d._world.pg_map)
    dist.barrier()
    if rank == 1:
        seen = until(begun.exists)
        del owner, made
        leave_all()
        return seen
    waits = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in made]
    gone = [weakref.ref(group) for group in made]
    ended(owner)
    held = made.pop()
    del owner, made
    leave_all()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo", rank=0, world_size=1)
    del held
    x = torch.ones(1)
    dist.all_reduce(x)
    stuck = [not work.is_completed() for work in waits]
    begun.touch()
    assert until(lambda: "lightning_hetero-leave" not in {thread.name for thread in threading.enumerate()})
    return x.item(), stuck, [group() for group in gone]


def test_a_worker_begins_anew_while_a_call_of_its_earlier_groups_is_stuck(tmp_path):
    """Whoever frees the last reference to a group waits for its calls: not the worker, for which all others wait."""
    first, seen = run_ranks(_leaves, 2, tmp_path)
    assert first == (1.0, [True, True], [None, None])
    assert seen


# steps

COUNTED = ("files", "threads", "groups", "keys", "hooks")
KEYS = {"elastic": 3}  # of the mega-batch that runs: what was claimed, and the ranks that are at its end
OBJECTS = {"adaptive": 5}  # in each step: its total still moves, and plans are kept
STEPS = {"adaptive": 400}  # so that one number in each would be more than its batches differ by


def _counts(rank, mode, marks):
    """What ``benchmarks/leaks.py`` counts, whose trainings are the same ones."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import _modes
    import leaks

    _modes.settle(rank)
    _modes.quiet()
    os.environ.update(ACCELERATE_USE_CPU="true")
    watch = leaks.Watch(marks)
    _modes.train(mode, marks[1] + 1, watch)
    return watch.counts


@pytest.mark.parametrize(
    "mode",
    ["stale block top-k"]
    + [
        pytest.param(mode, marks=MORE)
        for mode in ("plain", "adaptive", "hierarchy", "elastic", "fsdp", "fabric", "accelerate")
    ],
)
def test_steps_leave_nothing(mode):
    """Arrays, of which Python keeps no account, would show in the memory of the process. 256 step times are kept."""
    first, last = 300, 300 + STEPS.get(mode, 60)
    for before, after in run_ranks(_counts, 2, mode, (first, last), start="fork"):
        grown = {name: after[name] - before[name] for name in COUNTED}
        assert abs(grown.pop("keys")) <= KEYS.get(mode, 0)
        assert set(grown.values()) == {0}, grown
        assert after["objects"] - before["objects"] < OBJECTS.get(mode, 1) * (last - first)
        assert after["tensor_bytes"] - before["tensor_bytes"] < 4 * (last - first), "one number in each step"
        assert after["rss_kib"] - before["rss_kib"] < 8192
