"""States of an ``Accelerator`` under unequal batches: plans, what was learned, and gradients that were not sent yet."""

import io
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.accelerate.base import SessionAccelerator
from lightning_hetero.accelerate.loaders import SkippedLoader
from lightning_hetero.core.checkpoint_state import DamagedCheckpointError, check_tensors, reading_state
from lightning_hetero.core.whole_file import write_file
from lightning_hetero.frontend.checkpoint_folder import (
    STATE_FILE,
    begin_folder,
    end_folder,
    newest_folder,
    whole_folder,
)
from lightning_hetero.frontend.log import log

__all__ = ["CheckpointAccelerator"]


class CheckpointAccelerator(SessionAccelerator):
    """An ``Accelerator`` that saves the session's state beside Accelerate's own, and resumes from it."""

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """Skip batches as ``Accelerator.skip_first_batches`` does; by default those that the loaded state has done."""
        if dataloader is self._hetero_loader and self._hetero_loader is not None:
            return SkippedLoader(self._hetero_loader, num_batches)
        return super().skip_first_batches(dataloader, num_batches or 0)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save a state as ``Accelerator.save_state`` does, with checksums of its files."""
        folder = super().save_state(*args, **kwargs)
        if self.engine is not None:
            self.wait_for_everyone()  # until all ranks have written their files
            if self.is_main_process:
                end_folder(folder)
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load a state as ``Accelerator.load_state`` does; ranks that had no part in it accumulate with the others.

        Accelerate keeps how many batches it has counted, which says when gradients are summed, in a file of each rank.

        Raises:
            DamagedCheckpointError: if a file of the state has changed since it was saved. If no folder is given, the
                newest whole one is loaded instead.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = self._whole_newest(os.path.join(self.project_dir, "checkpoints"))
        elif input_dir is not None:
            input_dir = self._whole(os.path.expanduser(input_dir))
        super().load_state(input_dir, *args, **kwargs)
        if self.engine is None and input_dir is not None and os.path.isfile(os.path.join(input_dir, STATE_FILE)):
            log.warning(
                "%s is a state of several workers, and one plain worker cannot go on inside their epoch: "
                "skip_first_batches skips nothing by itself, and the order of samples is another one. Begin the next "
                "epoch, use HeteroAccelerator in the script, or resume with several workers.",
                input_dir,
            )
        if self.engine is not None:
            counted: int = self.step  # type: ignore[has-type]
            self.step = self.engine.control.broadcast_object(counted)

    def _whole(self, folder: str) -> str | None:
        """Return the folder of a checkpoint if it is whole as rank 0 sees it; a collective call."""
        return self._decided(lambda: str(whole_folder(folder)) if os.path.isdir(folder) else folder, folder)

    def _whole_newest(self, above: str, needed: Collection[str] = ()) -> str | None:
        """Return the newest whole checkpoint in a folder as rank 0 sees it, ``None`` if there is none at all."""

        def choose() -> str | None:
            found = newest_folder(above)
            return None if found is None else str(whole_folder(found, newest=True, needed=needed))

        return self._decided(choose, None)

    def _decided(self, choose: Callable[[], str | None], plain: str | None) -> str | None:
        """Return what rank 0 chooses; several plain workers choose nothing."""
        if self.engine is None:
            return choose() if self.num_processes == 1 else plain
        chosen: str | None = self.engine.control.decide(choose)
        return chosen

    def _save_hetero(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if self.is_main_process:
            begin_folder(folder)
        self._save_session(folder)

    def _save_session(self, folder: str) -> None:
        """Write the session's state into a folder; a collective call."""
        if self._hetero_loader is None:
            return
        session = self._session()
        interval = session.interval()  # collective
        session.engine.observer.discard()
        compression = session.engine.compression
        unsent = {} if compression is None else compression.state_dict()  # collective
        if self.is_main_process:
            extra = {"loader": {"iteration": self._hetero_loader.iteration}, "residuals": unsent}
            content = io.BytesIO()
            torch.save({**session.state_dict(), **interval, **extra}, content)
            write_file(Path(folder, STATE_FILE), content.getbuffer())

    def _load_hetero(self, models: list[torch.nn.Module], folder: str) -> None:
        """Load the state that rank 0 reads on all ranks; a checkpoint of plain Accelerate has none."""
        session, path = self._session(), os.path.join(folder, STATE_FILE)

        def read() -> Any:
            try:
                return torch.load(path, weights_only=True, map_location="cpu") if os.path.isfile(path) else {}
            except Exception as error:
                raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error

        state = session.engine.control.decide(read)
        with reading_state(f"{path}: what Accelerate's loop has done, and gradients that were not sent yet"):
            state = dict(state)
            loader, unsent = state.pop("loader", {}), state.pop("residuals", {})
            iteration = int(loader["iteration"]) if loader else None
            for one in unsent["ranks"] if unsent else ():
                check_tensors("residuals", one.get("residuals", {}))
        if session.engine.compression is not None:
            session.engine.compression.load_state_dict(unsent)
        elif unsent:
            log.warning("the state has gradients that compression has not sent yet; without it they are left out.")
        session.load_state_dict(state)
        if self._hetero_loader is not None and iteration is not None:
            self._hetero_loader.go_on(iteration)
