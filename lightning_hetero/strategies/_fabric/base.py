"""The Fabric strategy that mixins extend, and the session that all of them use.

At run time a mixin is combined with the ``DDPStrategy`` of either of Lightning's packages, so it has no base class of
its own. For type checkers it extends that of ``lightning.fabric``.
"""

from typing import TYPE_CHECKING

from lightning_hetero.config import HeteroConfig
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.loaders import NOT_MET
from lightning_hetero.frontend.log import log
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.session import HeteroSession

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy
else:
    DDPStrategy = object

__all__ = ["FabricMixin"]


class FabricMixin(PlanAccess, DDPStrategy):
    """A strategy that runs a custom training loop as a session, once the process group exists."""

    config: HeteroConfig
    session: HeteroSession | None
    _no_engine = "there are no plans and observations yet: they come with fabric.launch()."

    @property
    def engine(self) -> HeteroEngine | None:
        """The engine, ``None`` before the process group exists."""
        return None if self.session is None else self.session.engine

    @property
    def _reached(self) -> tuple[int, int]:
        return self._running().position

    def _running(self) -> HeteroSession:
        self._known_engine()
        assert self.session is not None
        return self.session

    def _met(self) -> HeteroSession | None:
        """Return the session; if there is none yet, warn that the set-up is that of plain DDP."""
        if self.session is None:
            log.warning(NOT_MET, "fabric.launch()")
        return self.session
