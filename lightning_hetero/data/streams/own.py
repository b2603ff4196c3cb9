"""Batches of one rank from a stream of its own: ranks agree on the sizes of the next steps ahead of time.

Ranks agree on a block of steps at a time. Each tells how many samples it holds beyond those of the block before, and
whether its stream has ended; the message is in flight while that block is trained on, so no step waits for it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_hetero.core.batching.stream_steps import StreamBlock, next_block, wanted_samples
from lightning_hetero.data.streams.claims import ClaimLedger, Counter, claim_order
from lightning_hetero.data.streams.fingerprint import fingerprint
from lightning_hetero.data.streams.sampler import COMPARED, Array, StreamSampler
from lightning_hetero.data.streams.source import Drawing

__all__ = ["BLOCK", "ClaimedStreamSampler", "OwnStreamSampler"]

log = logging.getLogger("lightning_hetero")

BLOCK = 4
"""Steps on which ranks agree at a time. A rank holds the samples of up to two blocks, and a plan waits as long."""


@dataclass
class _Pass:
    """State of one pass over the streams.

    Args:
        drawing: samples that this rank has drawn.
        epoch: epoch of the pass.
        held: samples of each rank that belong to no step yet, as ranks have told.
        ended: whether each rank's stream has ended.
        taken: samples that each rank has taken in the epoch.
        assigned: samples in this rank's buffer that belong to agreed steps.
        level: samples that this rank's buffer is filled up to.
        length: steps of the next block.
        stand_in: samples to run with weight 0.
    """

    drawing: Drawing
    epoch: int
    held: tuple[int, ...]
    ended: tuple[bool, ...]
    taken: Array
    assigned: int = 0
    level: int = 0
    length: int = 1
    stand_in: list[Any] | None = None

    def fill(self, wanted: int) -> None:
        """Draw until that many samples belong to no agreed step, or the stream has ended; draw longer blocks later."""
        self.length, self.level = min(2 * self.length, BLOCK), self.assigned + wanted
        self.drawing.fill(max(self.level, COMPARED))

    def assign(self, block: StreamBlock, held: tuple[int, ...], ended: tuple[bool, ...], rank: int) -> None:
        """Assign samples to the steps of a block, given what ranks held before it."""
        used = np.array(block.sizes, dtype=int).reshape(-1, len(held)).sum(axis=0)
        self.held, self.ended = tuple((np.array(held) - used).tolist()), ended
        self.assigned += int(used[rank])

    def take(self, sizes: tuple[int, ...], rank: int, least: int) -> tuple[list[Any], list[Any]]:
        """Take a rank's samples of a step and draw as many in their place.

        Returns:
            What its batch is made of, and those samples of it that count.
        """
        own, buffer = sizes[rank], self.drawing.buffer
        if own >= least or (own and not self.stand_in):
            self.stand_in = buffer.peek(min(own, least))
        pieces = buffer.take(own) if own else self.stand_in or buffer.peek(least)
        self.taken = self.taken + np.array(sizes)
        self.assigned -= own
        self.drawing.fill(self.level)
        return pieces, pieces if own else []

    def lend(self, samples: list[Any]) -> None:
        """Run with these samples, of another rank, where there are none to train on."""
        self.stand_in = samples


class OwnStreamSampler(StreamSampler):
    """Each rank draws a stream of its own, in batches of the plan's sizes; when one ends, others take its share."""

    _warned = False

    def _batches(self, epoch: int, step: int) -> Iterator[Any]:
        run = self._begun(epoch, step)
        plans, wait = self._report(run, step)
        first = True
        while True:
            block = self._agreed(run, plans, wait(), first)
            first, following = False, step + len(block.sizes)
            if not block.over:
                plans, wait = self._report(run, following)
            for sizes in block.sizes:
                self._note(epoch, step, sizes, run.taken.astype(int).tolist())
                pieces, counted = run.take(sizes, self.rank, self.rules.stand_in)
                self._trained(step, counted)
                yield run.drawing.buffer.batch(pieces)
                step += 1
            if block.over:
                return

    def _begun(self, epoch: int, step: int) -> _Pass:
        ranks = self._peers.world_size
        drawing = Drawing(lambda: self.stream.open(epoch), self.stream.buffer())
        before = self._before(epoch, step)
        drawing.skip(before[self.rank])
        return _Pass(drawing, epoch, (0,) * ranks, (False,) * ranks, np.array(before, dtype=float))

    def _report(self, run: _Pass, step: int) -> tuple[list[tuple[int, ...]], Callable[[], Array]]:
        """Draw what the next steps need, and begin to tell the others how much is there."""
        plans = [self._planned(run.epoch, step + i) for i in range(run.length)]
        self.drawn = (run.epoch, step + run.length)
        run.fill(wanted_samples(plans, run.held, run.ended, self.rules)[self.rank])
        drawing = run.drawing
        spare = len(drawing.buffer) - run.assigned
        begins = fingerprint(drawing.buffer.peek(COMPARED)) if run.stand_in is None else 0
        told = [spare, drawing.ended, drawing.error is not None, begins]
        return plans, self._peers.gather_later(np.array(told, dtype=float))

    def _agreed(self, run: _Pass, plans: list[tuple[int, ...]], told: Array, first: bool) -> StreamBlock:
        """Return the next steps by what all ranks have told."""
        self._require_streams(run.drawing, told[:, 2] > 0)
        held, ended = tuple(told[:, 0].astype(int).tolist()), tuple((told[:, 1] > 0).tolist())
        if first:
            self._compare(told[:, 3])
            self._find_stand_in(run, held)
        block = next_block(plans, held, ended, self.rules)
        run.assign(block, held, ended, self.rank)
        return block

    def _trained(self, step: int, pieces: list[Any]) -> None:
        """Note which samples a step takes, where that has to be known."""

    # agreement

    def _require_streams(self, drawing: Drawing, failed: np.ndarray) -> None:
        """Check that no rank's stream has raised; a collective call if one has.

        Raises:
            RuntimeError: on every rank if one has; on that rank itself, what it has raised.
        """
        if not failed.any():
            return
        error = drawing.error
        told = self._peers.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        which = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None)
        raise RuntimeError(f"the data stream of another rank has raised an error, so this rank ends as well ({which}).")

    def _compare(self, begins: Array) -> None:
        """Warn once if ranks' streams begin with the same samples."""
        known = [crc for crc in begins.tolist() if crc]
        if len(set(known)) == len(known) or self._warned:
            return
        self._warned = True
        same = [rank for rank, crc in enumerate(begins.tolist()) if crc and known.count(crc) > 1]
        if self.rank == 0:
            log.warning(
                "the data streams of ranks %s begin with the same samples: these ranks seem to train on the same data. "
                "Split the stream by rank in the dataset (for datasets.IterableDataset: "
                "datasets.distributed.split_dataset_by_node), or set shard='whole' to have it split by speed",
                ", ".join(map(str, same)),
            )

    def _find_stand_in(self, run: _Pass, held: tuple[int, ...]) -> None:
        """Give ranks without any sample some of another rank's, to run with weight 0; collective if there are such."""
        if min(held) > 0 or max(held) == 0:
            return
        giver = next(rank for rank, number in enumerate(held) if number)
        given = run.drawing.buffer.peek(self.rules.stand_in) if self.rank == giver else None
        received = self._peers.gather_objects(given)[giver]
        if held[self.rank] == 0:
            run.lend(received)

    # state

    def _before(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the samples that each rank has taken in the steps of an epoch before ``step``."""
        ranks = self._peers.world_size
        if step == 0:
            return (0,) * ranks
        if self._restored.get("epoch") == epoch:
            known: Mapping[int, Any] = self._restored["taken"]
            if self._restored["ranks"] != ranks:
                raise ValueError(
                    f"the state was saved inside an epoch by {self._restored['ranks']} ranks with a data stream each "
                    f"(shard='mine'), and there are {ranks} now: no rank could go on with another's stream. Resume "
                    f"with {self._restored['ranks']} ranks, or from a state between two epochs."
                )
            if step in known:
                return tuple(known[step])
        return tuple(np.array([self._planned(epoch, s) for s in range(step)]).sum(axis=0).tolist())

    def taken(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return the samples that each rank has taken before a position, and before the next one."""
        epoch, step = position
        before = {}
        last = self._steps.get((epoch, step))
        if last is not None:
            behind = [int(a + b) for a, b in zip(last.before, last.share.sizes, strict=True)]
            before = {step: list(last.before), step + 1: behind}
        return {**super().taken(position), "taken": before}


class ClaimedStreamSampler(OwnStreamSampler):
    """Each rank draws the shards that it claims; shards are given out by a counter that all ranks share.

    Args:
        args: those of :class:`StreamSampler`.
        counter: shared by all ranks.
        kwargs: those of :class:`StreamSampler`.
    """

    def __init__(self, *args: Any, counter: Counter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counter = counter
        self._ledger = ClaimLedger()
        self._progress: dict[int, int] = {}
        self._passes = 0

    def _begun(self, epoch: int, step: int) -> _Pass:
        progress: dict[int, int] = {}
        if step:
            if self._restored.get("epoch") != epoch or step not in self._restored.get("shards", {}):
                raise ValueError(
                    f"it is not known which shards the first {step} steps of epoch {epoch} have read (shard='claim'): "
                    "the state was saved at another step. Resume at the step of a state, or at the start of an epoch."
                )
            progress = self._restored["shards"][step]
        claims = self.stream.claims
        order = claim_order(self.stream.dataset.num_shards, epoch, progress)  # type: ignore[union-attr]
        self._passes += 1
        claims.begin(self._counter, f"{self._passes}", epoch, order)
        self._ledger.begin({})
        self._progress = progress
        ranks = self._peers.world_size
        drawing = Drawing(lambda: self.stream.open(epoch), self.stream.buffer())
        return _Pass(drawing, epoch, (0,) * ranks, (False,) * ranks, np.zeros(ranks))

    def _trained(self, step: int, pieces: list[Any]) -> None:
        self._ledger.note(step, pieces)

    def _compare(self, begins: Array) -> None:
        """Claimed shards are different."""

    def shards(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return how far all ranks have trained on each shard before a position, and before the next; collective."""
        epoch, step = position
        mine = {s: self._ledger.before(s) for s in (step, step + 1)}
        done: dict[int, dict[int, int]] = {s: dict(self._progress) for s in mine}
        for one in self._peers.gather_objects(mine):
            for s, progress in one.items():
                done[s].update(progress)
        return {"epoch": epoch, "shards": done}
