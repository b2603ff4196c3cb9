"""Accelerate's ``Accelerator`` with a session for its training loop."""

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from lightning_hetero.accelerate.loaders import HeteroDataLoader
from lightning_hetero.accelerate.plugin import HeteroPlugin
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.session import HeteroSession

__all__ = ["SessionAccelerator"]


class SessionAccelerator(PlanAccess, Accelerator):
    """An ``Accelerator`` whose training loop is a session; without a plugin it is a plain one."""

    hetero_plugin: HeteroPlugin | None = None
    hetero_session: HeteroSession | None = None
    ddp_handler: DistributedDataParallelKwargs | None
    _hetero_loader: HeteroDataLoader | None = None
    _no_engine = "ACCELERATE_USE_HETERO=false: there are no plans. Set it to true, or give a HeteroPlugin."

    @property
    def engine(self) -> HeteroEngine | None:
        """The engine of the session; ``None`` for a plain ``Accelerator``."""
        return None if self.hetero_session is None else self.hetero_session.engine

    @property
    def _reached(self) -> tuple[int, int]:
        return self._session().position

    def _session(self) -> HeteroSession:
        self._known_engine()
        assert self.hetero_session is not None
        return self.hetero_session
