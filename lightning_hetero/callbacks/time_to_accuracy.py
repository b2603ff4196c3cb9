"""Density of compressed gradients, total batch and split while training, by time to accuracy (StellaTrain, sec. 4)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning_hetero.callbacks.adaptive_batch import AdaptiveBatchCallback
from lightning_hetero.callbacks.base import MisconfigurationException
from lightning_hetero.callbacks.weight_prediction import LookAheadCallback
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.core.compression.bayesian_search import ProfilePenalty
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.core.compression.settings import Automatic, BlockTopK
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from lightning_hetero.core.validation import check_choice, check_number

__all__ = ["TTACallback"]


@checked_keywords
class TTACallback(AdaptiveBatchCallback):
    """Adaptive density of compressed gradients, and with it total batch and split, as the link allows.

    Minimizes predicted time to accuracy, ``(1 + g(density, B)) T(density, B) / B`` in seconds per sample (StellaTrain,
    eq. 5). ``T`` follows from the time model of the workers and the measured rate of the link. ``g`` is the share of
    extra samples that density and total cost. It comes from a convergence profile of the model; without one, from 10 %
    for each factor of ten in density and, for the total, the gradient noise scale. Rank 0 chooses the density, from the
    measured link before the first step and in each sync round, and all ranks adopt it in the same step. The density
    changes for a predicted gain of 0.5 %, the total only for ``hysteresis``. With ``staleness=1`` all messages are
    stale. Needs ``compression=BlockTopK(...)`` or ``"auto"``.

    If even the least density takes longer to send than computing takes, a warning says ``communication-bound``, with
    the numbers. Logs the predicted ``hetero/time_to_accuracy`` (seconds per sample) besides what
    :class:`AdaptiveBatchCallback` logs.

    Args:
        max_total_batch_size: largest total, ``>= 1``; ``None`` keeps the total, and then no noise scale is needed.
        profile: a :class:`~lightning_hetero.core.compression.convergence_profile.ConvergenceProfile` or the path of its
            file; ``None`` for the rule above.
        min_density: least density, above 0.
        max_density: greatest density, at most 1.
        bandwidth: ``"measured"`` takes the link's rate from the messages' own times; ``"idle"`` moves it by the share
            of time that workers idle, as the paper does, from the first measured rate on.
        lr_scaling: as for :class:`AdaptiveBatchCallback`; with a profile ``"auto"`` is ``"none"``, because the probe
            trainings of the profile ran with the rate of the script at every total.
        min_total_batch_size: smallest total; by default what the workers' bounds allow.
        hysteresis: least predicted gain, as a share, for which the total changes, 0 to 1.
        min_steps: steps to observe between two changes of the total, ``>= 1``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or the file is no profile.
        FileNotFoundError: if there is no such file.
        ImportError: if a profile is given and scikit-learn is missing.

    Example:
        >>> TTACallback(max_density=0.1).density_range
        (0.001, 0.1)
    """

    def __init__(
        self,
        max_total_batch_size: int | None = None,
        profile: str | Path | ConvergenceProfile | None = None,
        *,
        min_density: float = 0.001,
        max_density: float = 0.3,
        bandwidth: str = "measured",
        lr_scaling: str | Callable[[float, float, float, float], float] = "auto",
        min_total_batch_size: int | None = None,
        hysteresis: float = 0.02,
        min_steps: int = 4,
    ) -> None:
        moves = max_total_batch_size is not None
        if min_total_batch_size is not None and not moves:
            raise ValueError(
                f"min_total_batch_size={min_total_batch_size} has no meaning where the total stays as it is. Give "
                "max_total_batch_size as well, or leave it out."
            )
        super().__init__(
            NO_LIMIT if max_total_batch_size is None else max_total_batch_size,
            "none" if profile is not None and lr_scaling == "auto" else lr_scaling,
            min_total_batch_size=min_total_batch_size,
            hysteresis=hysteresis,
            min_steps=min_steps,
        )
        check_number("min_density", min_density, low=0.0, high=1.0, include_low=False)
        check_number("max_density", max_density, low=min_density, high=1.0)
        check_choice("bandwidth", bandwidth, ("measured", "idle"))
        if isinstance(profile, str | Path):
            profile = ConvergenceProfile.load(profile)
        elif profile is not None and not isinstance(profile, ConvergenceProfile):
            raise TypeError(f"profile={profile!r} is a {type(profile).__name__}; give a file or a ConvergenceProfile.")
        goodput = self.goodput_planner
        self.planner = TimeToAccuracyPlanner(
            max_total_batch_size=goodput.max_total_batch_size,
            min_total_batch_size=goodput.min_total_batch_size,
            hysteresis=goodput.hysteresis,
            min_steps=goodput.min_steps,
            min_density=min_density,
            max_density=max_density,
            moves_batch=moves,
            profile=None if profile is None else ProfilePenalty(profile),
            idle_rule=bandwidth == "idle",
        )

    @property
    def tta_planner(self) -> TimeToAccuracyPlanner:
        """The planner in its present state."""
        return cast(TimeToAccuracyPlanner, self.planner)

    @property
    def density_range(self) -> tuple[float, float]:
        """Least and greatest density."""
        return self.tta_planner.min_density, self.tta_planner.max_density

    def companions(self, callbacks: list[Any]) -> list[Any]:
        """Return a noise scale callback, if the total moves by it and there is none, and one for weight prediction."""
        needed = self.tta_planner.moves_batch and self.tta_planner.profile is None
        given = any(isinstance(callback, LookAheadCallback) for callback in callbacks)
        ahead = [] if given else [LookAheadCallback(partial(getattr, self, "lr_gain"))]
        return [*(super().companions(callbacks) if needed else []), *ahead]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the engine of the strategy.

        Raises:
            MisconfigurationException: if gradients are not compressed by block top-k, or as of the base class.
        """
        super().setup(trainer, pl_module, stage)
        assert self._engine is not None
        given = self._engine.config.compression
        if not isinstance(given, BlockTopK | Automatic):
            raise MisconfigurationException(
                f"TTACallback moves the density of block top-k, and the strategy has compression={given!r}. Use "
                "HeteroDDPStrategy(compression='block_topk'), or AdaptiveBatchCallback without compression."
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Close the step as the base class does; ask for a round if the link has made steps much longer."""
        super().on_train_batch_end(trainer, pl_module, *args)
        assert self._engine is not None
        if self._engine.rounds.late:
            trainer.strategy.ask_for_round()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin as the base class does, with the density of an earlier run if there was one."""
        super().on_train_start(trainer, pl_module)
        assert self._engine is not None
        assert self._engine.compression is not None
        compression, staleness = self._engine.compression, self._engine.hook_state.staleness
        if staleness is not None:  # until "auto" chooses dense sums, which have a rule
            staleness.control_externally(compression.link() is not None)
            if staleness.externally_controlled and staleness.limit:
                staleness.make_all_stale()
        compression.measure_link()
        link, planner = compression.link(), self.tta_planner
        new = link is not None and planner.density is None
        if link is not None and new:
            planner = planner.begin(link)
        density, new = self._engine.control.broadcast_object((planner.density, new))
        if new:
            self._engine.observer.shorten_warm_up()
            self._engine.rounds.schedule.begin_early(self._engine.observer.synced_steps)
        self.planner = replace(planner, density=density)
        compression.set_density(density)
