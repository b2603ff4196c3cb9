"""Steps that go on after one rank has run out of memory: that rank computes its gradient again, in smaller pieces.

Where collectives are at that moment: in the forward pass, no bucket of this rank has been sent, and the other ranks
wait in the first one. In the backward pass some may have been sent, with the gradient of the whole batch, and DDP waits
for the other parameters. Either way the missing gradients are computed beside DDP, and then handed to it by a backward
pass that needs no memory, which sends the missing buckets in their order.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.failures.failure import of_connection
from lightning_hetero.config import HeteroConfig
from lightning_hetero.data.rows import BatchRows
from lightning_hetero.frontend.model_setup import loss_scaler
from lightning_hetero.hardware import is_out_of_memory
from lightning_hetero.strategies._lightning.out_of_memory.pieces import (
    NotInPiecesError,
    loss_with_gradients,
    release_memory,
    sum_in_pieces,
)
from lightning_hetero.strategies._lightning.probes.memory import SETTINGS, swapped
from lightning_hetero.strategies._lightning.signals import SharedSignals
from lightning_hetero.strategies._lightning.uneven_steps import Marks, RetriedStepsMixin

__all__ = ["OutOfMemoryMixin"]

log = logging.getLogger("lightning_hetero")


class OutOfMemoryMixin(RetriedStepsMixin):
    """A strategy whose step goes on if memory runs out on a rank: no sample is lost, and the rank's bound falls.

    Mix it in before the class that weights losses: what it returns is a loss like any other.
    """

    config: HeteroConfig
    _signals: SharedSignals | None
    _times = 0

    def _forward_again(self, step: tuple[Any, ...], told: str) -> torch.Tensor:
        loss = self._again(step, [p for p in self._parameters if p.requires_grad], told, "forward")
        prepare = importlib.import_module(f"{self._namespace}.overrides.distributed").prepare_for_backward
        prepare(self.model, loss)  # DDP has not seen the end of a forward pass
        return loss

    def _backward_again(self, step: tuple[Any, ...], before: Marks, told: str) -> torch.Tensor:
        marked = zip(self._parameters, before, strict=True)
        missing = [p for p, mark in marked if p.requires_grad and not _has_moved(p, mark)]
        return self._again(step, missing, told, "backward", before) / self._trainer.accumulate_grad_batches

    # conditions

    def _passes_on(self, error: RuntimeError) -> bool:
        """Return whether an error is none of this rank's memory, or no other rank could take over samples."""
        alone = self.engine is None or self.engine.world_size == 1
        return alone or of_connection(error) or not is_out_of_memory(error)

    def _obstacle(self, missing: list[torch.Tensor], before: Marks) -> str | None:
        """Return why the step cannot be done again in pieces, ``None`` if it can."""
        engine, module, model = self.engine, self._pl_module, self.model
        assert engine is not None
        if not isinstance(model, DistributedDataParallel) or engine.sampler is None or engine.workers is None:
            return "this training's data is not split by the strategy"
        if not module.automatic_optimization:
            return "a training_step that runs its own optimizers would train twice"
        if model.static_graph:
            return "DDP is given static_graph=True"
        if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
            return "SyncBatchNorm waits for the other ranks in each forward pass"
        if getattr(module.forward, "__name__", "") == "wrapped_forward":  # Lightning's, until the forward pass begins
            return "it ran out before training_step, where DDP lays out its buckets"
        if any(p._backward_hooks for p in missing):
            return "a parameter has a hook of the user's, which would run twice"
        if engine.hook_state.backwards.sending or not missing:
            return "it ran out while gradients were sent"
        if model.gradient_as_bucket_view and any(gradient is not None for gradient, _ in before):
            return "gradients are accumulated in DDP's buckets (gradient_as_bucket_view=True)"
        return None

    # the second attempt

    def _again(
        self, step: tuple[Any, ...], missing: list[torch.Tensor], told: str, where: str, before: Marks | None = None
    ) -> torch.Tensor:
        """Return a loss with the gradients of the missing parameters, computed in pieces."""
        try:
            reason = self._obstacle(missing, before or [])
            if reason is not None:
                raise NotInPiecesError(reason)
            release_memory()
            return self._loss_in_pieces(step, missing, where)
        except NotInPiecesError as error:
            reason = str(error)
        raise torch.OutOfMemoryError(
            f"{told} The step cannot be done again in smaller pieces: {reason}. Set max_local_batch_sizes to what this "
            "rank can hold."
        )

    def _loss_in_pieces(self, step: tuple[Any, ...], missing: list[torch.Tensor], where: str) -> torch.Tensor:
        engine, module, config, batch = self.engine, self._pl_module, self.config, step[0]
        assert engine is not None
        assert engine.workers is not None
        rows, workers = BatchRows(config.slice_fn, config.concat_fn), engine.workers
        try:
            count = rows.count(batch)
            rows.cut(batch, 0, 1)
        except (TypeError, ValueError, IndexError) as error:
            raise NotInPiecesError(str(error)) from error
        weigh = None if config.loss_reduction == "sum" else config.weight_fn or rows.count
        whole = 1.0 if weigh is None else max(float(weigh(batch)), 1e-300)

        def loss_of(start: int, stop: int) -> torch.Tensor:
            piece = rows.cut(batch, start, stop)
            with self._alone_with(stop - start, logs=where == "forward"), self.precision_plugin.train_step_context():
                output: Any = module.training_step(piece, *step[1:])
            if where == "forward" and isinstance(output, dict) and set(output) != {"loss"}:
                raise NotInPiecesError("training_step returns more than its loss")
            loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
            return loss if weigh is None else loss * (float(weigh(piece)) / whole)

        scaler = loss_scaler(self.precision_plugin)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        full = count % workers.multiple == 0 and count >= 2 * workers.least  # else smaller pieces, before none at all
        sizes = {"least": workers.least, "multiple": workers.multiple} if full else {"least": workers.min_local}
        loss, gradients, largest = sum_in_pieces(loss_of, count, missing, **sizes, scale=scale)
        self._lower_bound(count, max(workers.least, int(count * SETTINGS.used_share)), where, largest)
        return loss_with_gradients(loss, missing, gradients)

    @contextmanager
    def _alone_with(self, rows: int, *, logs: bool) -> Iterator[None]:
        """Refuse collectives inside, which the other ranks do not run; values that are logged count so many rows."""

        def nothing(*args: object, **kwargs: object) -> None:
            """Discard values: the first attempt has logged them."""

        engine, module, trainer = self.engine, self._pl_module, self._trainer
        assert engine is not None
        size = None if trainer._results is None else trainer._results.batch_size
        try:
            with ExitStack() as stack:
                refusal = NotInPiecesError("training_step waits for the other ranks")
                stack.enter_context(engine.collectives.refused(refusal))
                for name in () if logs else ("log", "log_dict"):
                    stack.enter_context(swapped(module, name, nothing))
                if trainer._results is not None:
                    trainer._results.batch_size = rows
                yield
        finally:
            if trainer._results is not None:
                trainer._results.batch_size = size

    def _lower_bound(self, rows: int, bound: int, where: str, largest: int) -> None:
        """Lower this rank's bound, let the ranks agree on a plan within it, and say so."""
        engine = self.engine
        assert engine is not None
        engine.observer.discard()
        engine.data.lower_memory_bound(bound)
        if self._signals is not None:
            self._signals.note_round()
        self._times += 1
        if self._times & (self._times - 1):
            return
        kept = "the given split stays" if self.config.fixes_split else f"the split gives it at most {bound} from now on"
        log.warning(
            "rank %d ran out of memory with %d samples, in the %s pass of batch %d of epoch %d. They are trained on in "
            "pieces of at most %d samples, with the same gradient; %s (%d so far)",
            *(engine.rank, rows, where, engine.position[1], engine.position[0], largest, kept, self._times),
        )


def _has_moved(parameter: torch.Tensor, mark: tuple[torch.Tensor | None, int]) -> bool:
    """Return whether a parameter has got a gradient since it was marked."""
    gradient = parameter.grad
    return gradient is not mark[0] or (gradient is not None and gradient._version != mark[1])
