"""Launcher of fits that survive the loss of workers: after each change of the members, the fit goes on.

The members leave the loop, meet again, and fit from the newest state that one of them has, as from a checkpoint that
was saved in that very step. A newcomer takes the same way.
"""

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_hetero.comm.agreement.group_lifetime import leave_all
from lightning_hetero.comm.membership.group_sockets import connect, shut_down_groups
from lightning_hetero.comm.membership.members import MembershipError, TrainingOverError
from lightning_hetero.comm.membership.roster import Roster
from lightning_hetero.comm.membership.slots import GENERATION
from lightning_hetero.comm.membership.state_transfer import WorkerState, newest_state

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.exceptions import SIGTERMException
else:
    try:
        from lightning.pytorch.utilities.exceptions import SIGTERMException
    except ImportError:  # only the standalone package is installed, or an old one
        from pytorch_lightning.utilities.exceptions import SIGTERMException

__all__ = ["PEERS", "MembersChangeError", "MembershipLauncher", "lost_connection"]

log = logging.getLogger("lightning_hetero")

PEERS = "the workers that go on"
"""In the place of a checkpoint's path: the state comes from other workers."""

STEP, SAVED = "step", "saved"
"""What is written down of a fit: the step that it is in, and the newest checkpoint from which it can go on."""

PATIENCE_S = 10.0
"""Longest wait, after a connection was lost, for a word that a worker is lost."""

MEETINGS = 3
"""How often workers of which none is lost meet in a row without a step between."""

SYSTEM: Any = sys
"""The module, of which a hook is put back."""

SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "connection was closed", "Broken pipe", "Socket")


class MembersChangeError(RuntimeError):
    """Raised on all ranks before the same batch, because a worker waits to join."""


def lost_connection(error: BaseException | None) -> bool:
    """Return whether an error, or one that it comes from, is about the connection to another worker.

    Example:
        >>> lost_connection(RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer"))
        True
        >>> lost_connection(ValueError("a bug of the user's"))
        False
    """
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


class MembershipLauncher:
    """Launcher in front of Lightning's own.

    Args:
        inner: Lightning's launcher.
        strategy: strategy of the fits.
        roster: the members, as this worker sees them.
    """

    def __init__(self, inner: Any, strategy: Any, roster: Roster) -> None:
        self._inner, self._strategy, self._roster = inner, strategy, roster
        self._hooks = sys.excepthook, sys.excepthook  # before torch has made a group, and since
        self._in_vain = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: "Trainer", **kwargs: Any) -> Any:
        """Run the function; a fit again after each change of the members."""
        if trainer.state.fn != "fit":
            return self._inner.launch(function, *args, trainer=trainer, **kwargs)
        refuse_weight_averaging(trainer)
        brought: WorkerState | None = None
        self._roster.begin_fit()
        while True:
            fitting = False
            try:
                found = self._join(brought)
                fitting = trainer.training = True  # the step that has failed may have been one of validation
                given = args if found is None else with_checkpoint(function, args, found)
                result = function(*given, **kwargs)
                self._roster.finish()
                return result
            except SIGTERMException:  # all were told to end together: nobody is to begin anew
                self._roster.finish()
                raise
            except TrainingOverError as error:
                log.warning("%s", error)
                raise SystemExit(0) from None
            except Exception as error:
                if not self._is_change(error):
                    raise
                since = time.monotonic()
            if fitting:
                brought = self._strategy.outlive_members(trainer)
            if dist.is_initialized():
                shut_down_groups()
                leave_all()
            log.debug("rank %d left its group within %.2f s", self._roster.rank, time.monotonic() - since)

    def _is_change(self, error: Exception) -> bool:
        """Return whether an error means that the members change, or meet again because their connections are lost.

        If nobody is lost, they do so a few times only without a step that they have completed: else they might meet for
        ever.
        """
        if self._roster.generation is None:
            return False
        if isinstance(error, MembersChangeError):
            return True
        if not lost_connection(error):
            return False
        self._in_vain = 0 if self._strategy.has_stepped() else self._in_vain + 1
        return self._in_vain <= MEETINGS or self._roster.changes(PATIENCE_S)

    def _join(self, brought: WorkerState | None) -> str | None:
        """Meet the other members, and return the checkpoint to go on from; ``None`` for what the script gives."""
        roster, strategy = self._roster, self._strategy
        if roster.generation is not None and dist.is_initialized():  # another fit of the same members
            strategy.begin_generation(roster)
            roster.watch()
            return self._newest_saved()
        generation = roster.meet()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(roster.rank), str(roster.world_size)
        os.environ[GENERATION] = str(generation.number)
        strategy.begin_generation(roster)
        self._make_group()
        state = newest_state(brought)
        if state is not None and state.progress[0] != roster.fits:
            raise MembershipError(
                f"worker {roster.me.slot} was started again and is in fit {roster.fits} of its script, and the others "
                f"are in fit {state.progress[0]}. A worker can be replaced in the first fit only; run the script again."
            )
        strategy.go_on_from(state)
        if state is None:
            return self._newest_saved()
        if roster.rank == 0:
            slots = ", ".join(str(one.slot) for one in generation.members)
            log.warning(
                "training goes on in step %d with workers %s, from the state that they have", state.progress[1], slots
            )
        return PEERS

    def _newest_saved(self) -> str | None:
        """Return the checkpoint that workers without a state go on from, if one was lost; a collective call.

        Raises:
            MembershipError: on all workers, if they are in different fits of their scripts.
        """
        roster = self._roster
        step, saved = roster.noted(STEP), roster.noted(SAVED)
        everyone: list[Any] = [None] * roster.world_size
        # The first worker's words count for all: others may have read before or after a worker wrote.
        dist.all_gather_object(everyone, (roster.fits, step, saved, saved is not None and os.path.exists(saved)))
        fits = [one[0] for one in everyone]
        if len(set(fits)) > 1:
            raise MembershipError(
                f"workers are in fits {fits} of their scripts: some were started again. A worker can be replaced in "
                "the first fit only; run the script again."
            )
        _, step, saved, _ = everyone[0]
        if step is None:
            return None
        found = saved if all(one[2:] == (saved, True) for one in everyone) else None
        if roster.rank == 0:
            log.warning(
                "all workers that had the state of the training in step %s are lost: it goes on from %s",
                *(step, found or "the ckpt_path that the script gives to fit, or else from the first step"),
            )
        return found

    def _make_group(self) -> None:
        """Make the default group; take away what torch has put before the lines of uncaught errors for the last one."""
        before, since = self._hooks
        if sys.excepthook is since:
            SYSTEM.excepthook = before
        before = sys.excepthook
        dist.distributed_c10d._world.group_count = 0  # it names the group, and counts one whose making has failed here
        roster, backend = self._roster, self._strategy._get_process_group_backend()
        place: dict[str, Any] = {"store": roster.make_store(), "rank": roster.rank, "world_size": roster.world_size}
        connect(partial(dist.init_process_group, backend, **place), self._strategy._timeout)
        self._hooks = before, sys.excepthook


def refuse_weight_averaging(trainer: "Trainer") -> None:
    """Refuse a callback whose schedule would begin anew on some workers only.

    Raises:
        MembershipError: with ``StochasticWeightAveraging``, which cannot be set up twice in a process.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(one.__name__ == "StochasticWeightAveraging" for one in type(callback).__mro__):
            raise MembershipError(
                "StochasticWeightAveraging cannot begin twice in a process, as it would when a worker is lost. Start "
                "the script without lightning_hetero.keeper, or leave the callback out."
            )


def with_checkpoint(function: Callable[..., Any], args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Return the arguments of a fit with another ``ckpt_path``.

    Example:
        >>> with_checkpoint(lambda model, ckpt_path=None, weights_only=None: 0, ("a model",), "last.ckpt")
        ('a model', 'last.ckpt')
    """
    bound = inspect.signature(function).bind(*args)
    bound.arguments["ckpt_path"] = path
    return bound.args
