"""Signals that end a training on several ranks: noted by the rank that gets one, obeyed by all at the same batch.

Lightning's own handlers call collectives from within the signal, whatever the rank is doing: a rank in the middle of
another collective then waits forever, or ends without its checkpoint.
"""

import logging
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.async_ops import SharedNotes
from lightning_hetero.strategies._lightning.membership.launcher import MembersChangeError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.exceptions import SIGTERMException
else:
    try:
        from lightning.pytorch.utilities.exceptions import SIGTERMException
    except ImportError:  # only the standalone package is installed, or an old one
        from pytorch_lightning.utilities.exceptions import SIGTERMException

__all__ = ["CHECK", "SharedSignals", "restore_sigterm", "sigterm_at_next_merge"]

log = logging.getLogger("lightning_hetero")

CHECK = "_broadcast_sigterm_tensor"
"""Lightning's own check before each batch, from 2.6 on: all ranks wait for a message of rank 0."""
NOTIFIER, REQUEUE = "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"


class _Note(IntEnum):
    """Index in a rank's notes: of a signal, or of what else all ranks have to know soon."""

    END = 0
    REQUEUE = 1
    MEMBERS = 2
    ROUND = 3


def sigterm_at_next_merge(trainer: "Trainer", note: Callable[[], None]) -> None:
    """Put ``note`` in the place of Lightning's handler, which broadcasts to all ranks from within the signal.

    Call it before Lightning registers its handlers. Those of users stay, and so does the forwarding to processes that
    Lightning started.

    Args:
        trainer: trainer whose handler is replaced, until :func:`restore_sigterm`.
        note: called at each SIGTERM.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        note()

    setattr(trainer._signal_connector, NOTIFIER, handler)


def restore_sigterm(trainer: "Trainer") -> None:
    """Restore Lightning's handler."""
    vars(trainer._signal_connector).pop(NOTIFIER, None)


class SharedSignals:
    """SIGTERM, and the signal of SLURM that asks to requeue, as all ranks together see them.

    A handler only notes its signal. Before each batch, ranks exchange their notes, four numbers over the host-side
    group, and read those of the batch before. So no rank waits, the device is not synchronized, and all ranks know the
    same at the same batch.

    Args:
        trainer: trainer whose handlers and check are replaced.
        control: control plane of the ranks.
        members_change: returns whether a worker waits to join; ``None`` if none can.
        hasten: called at the same batch on all ranks after one has asked for a sync round.
    """

    def __init__(
        self,
        trainer: "Trainer",
        control: ControlPlane,
        members_change: Callable[[], bool] | None = None,
        hasten: Callable[[], None] = lambda: None,
    ) -> None:
        self._trainer, self._control, self._hasten = trainer, control, hasten
        self._noted: dict[_Note, int] = {}  # numbers of the signals that came
        self._notes = SharedNotes(control, len(_Note))
        self._members_change = members_change
        self._requeue: Callable[[int, FrameType | None], None] | None = None
        self._requeued = False  # at the check before
        self.agreed = self.asked = False  # asked: whether Lightning checks before each batch

    @property
    def told_to_end(self) -> int | None:
        """Number of the signal by which this rank was told to end, ``None`` if it was not."""
        return self._noted.get(_Note.END)

    def install(self, kept: int | None = None) -> "SharedSignals":
        """Replace the handlers; before Lightning registers them.

        Args:
            kept: number of a signal that came before and was not obeyed.
        """
        if kept is not None:
            self._noted[_Note.END] = kept
        connector = self._trainer._signal_connector
        self._requeue = getattr(connector, REQUEUE, None)
        setattr(connector, NOTIFIER, self._term)
        if self._requeue is not None:
            setattr(connector, REQUEUE, self._again)
        return self

    def _term(self, signum: int, frame: FrameType | None) -> None:
        trainer = self._trainer
        log.info("rank %d received SIGTERM; training ends before the next batch but one", self._control.rank)
        if _Note.END not in self._noted and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._noted[_Note.END] = signum
        if self._control.world_size == 1:
            trainer._signal_connector.received_sigterm = True

    def _again(self, signum: int, frame: FrameType | None) -> None:
        self._noted[_Note.REQUEUE] = signum
        if self._control.world_size == 1 and self._requeue is not None:
            self._requeue(signum, frame)

    def note_round(self) -> None:
        """Ask for a sync round soon: this rank has run out of memory, or steps have become long."""
        self._noted[_Note.ROUND] = 1

    def start(self) -> None:
        """Check before each batch from now on."""
        self.asked = hasattr(self._trainer.fit_loop.epoch_loop, CHECK) and self._control.world_size > 1
        if self.asked:
            setattr(self._trainer.fit_loop.epoch_loop, CHECK, self.check)

    def check(self) -> None:
        """Read what ranks have noted up to the batch before, and send what this one has.

        Raises:
            SIGTERMException: on all ranks, if one was told to end.
            MembersChangeError: on all ranks, if a worker waits to join.
        """
        if self._control.world_size == 1:
            if self._members_change is not None and self._members_change():
                raise MembersChangeError("a worker waits to join")
            return
        self._obey(self._exchange())

    def finish(self) -> None:
        """Finish training: a signal that came since the last check ends it on all ranks after all.

        Raises:
            SIGTERMException: on all ranks, if one was told to end.
        """
        if self._control.world_size == 1:
            return
        before = self._exchange()
        told = [max(pair) for pair in zip(before, self._notes.take(), strict=True)]
        told[_Note.MEMBERS] = 0  # training has ended
        self._obey(told)

    def settle(self) -> None:
        """Wait for the message in flight, and ignore it."""
        self._notes.take()

    def remove(self) -> None:
        """Restore Lightning's handlers and check."""
        vars(self._trainer.fit_loop.epoch_loop).pop(CHECK, None)
        for name in (NOTIFIER, REQUEUE):
            vars(self._trainer._signal_connector).pop(name, None)

    def _exchange(self) -> list[int]:
        """Return what ranks had noted at the last call, and send what this one has noted since."""
        if self._members_change is not None:
            self._noted[_Note.MEMBERS] = int(self._members_change())
        sent = [self._noted.get(note, 0) for note in _Note]
        for note in (_Note.REQUEUE, _Note.ROUND):  # not after the exchange: a signal may come while that waits
            sent[note] = self._noted.pop(note, 0)
        return self._notes.exchange(sent)

    def _obey(self, told: list[int]) -> None:
        # SLURM signals all ranks, some of which may note it one check later than the others
        if told[_Note.REQUEUE] and not self._requeued and self._requeue is not None:
            self._requeue(told[_Note.REQUEUE], None)
        self._requeued = bool(told[_Note.REQUEUE])
        if told[_Note.END]:
            self.agreed = True
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        if told[_Note.ROUND]:
            self._hasten()
        if told[_Note.MEMBERS]:
            raise MembersChangeError("a worker waits to join")
