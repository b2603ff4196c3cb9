"""The mathematics of the package: numpy and plain Python values in, values out; no process group, clock or logger.

The page "Equations and code" says where each equation of the papers is. Code cites papers by letter: C is
Cannikin, D dynamic batching, A Adaptive SGD, S StellaTrain, as in ``C eq. 9``. The names below are imported on first
use: a run loads no policy but its own.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.core.as_published import bootstrap_sizes as bootstrap_sizes
    from lightning_hetero.core.batching.control_settings import ControlSettings as ControlSettings
    from lightning_hetero.core.batching.goodput import Candidate as Candidate
    from lightning_hetero.core.batching.goodput import candidate_totals as candidate_totals
    from lightning_hetero.core.batching.goodput import choose_total as choose_total
    from lightning_hetero.core.batching.goodput import efficiency as efficiency
    from lightning_hetero.core.batching.goodput import goodput_of as goodput_of
    from lightning_hetero.core.batching.goodput import goodput_table as goodput_table
    from lightning_hetero.core.batching.goodput import windows_of as windows_of
    from lightning_hetero.core.batching.integer_split import proportional_sizes as proportional_sizes
    from lightning_hetero.core.batching.lr_scaling import LR_RULES as LR_RULES
    from lightning_hetero.core.batching.lr_scaling import adascale as adascale
    from lightning_hetero.core.batching.lr_scaling import lr_gain as lr_gain
    from lightning_hetero.core.batching.optperf import solve_optperf as solve_optperf
    from lightning_hetero.core.batching.optperf import solve_step_times as solve_step_times
    from lightning_hetero.core.batching.optperf import static_sizes as static_sizes
    from lightning_hetero.core.batching.plan import BatchPlan as BatchPlan
    from lightning_hetero.core.batching.plan import PlanEntry as PlanEntry
    from lightning_hetero.core.batching.plan import PlanHistory as PlanHistory
    from lightning_hetero.core.checkpoint_state import CheckpointStateError as CheckpointStateError
    from lightning_hetero.core.checkpoint_state import DamagedCheckpointError as DamagedCheckpointError
    from lightning_hetero.core.compression.auto import Computing as Computing
    from lightning_hetero.core.compression.auto import choose_density as choose_density
    from lightning_hetero.core.compression.bayesian_search import ConvergenceSurrogate as ConvergenceSurrogate
    from lightning_hetero.core.compression.bayesian_search import profile_convergence as profile_convergence
    from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile as ConvergenceProfile
    from lightning_hetero.core.compression.objective import DensityChoice as DensityChoice
    from lightning_hetero.core.compression.objective import density_penalty as density_penalty
    from lightning_hetero.core.compression.objective import minimise_time_to_accuracy as minimise_time_to_accuracy
    from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes as scale_batch_sizes
    from lightning_hetero.core.merging.rules import MergeRule as MergeRule
    from lightning_hetero.core.merging.settings import AdaptiveSettings as AdaptiveSettings
    from lightning_hetero.core.noise.accumulation import WindowEstimator as WindowEstimator
    from lightning_hetero.core.noise.accumulation import window_estimator as window_estimator
    from lightning_hetero.core.noise.estimators import NoiseScaleEstimate as NoiseScaleEstimate
    from lightning_hetero.core.noise.estimators import estimate_from_local_norms as estimate_from_local_norms
    from lightning_hetero.core.noise.estimators import estimate_from_two_sizes as estimate_from_two_sizes
    from lightning_hetero.core.noise.estimators import estimate_noise_scale as estimate_noise_scale
    from lightning_hetero.core.noise.estimators import local_estimates as local_estimates
    from lightning_hetero.core.noise.running import RunningNoiseScale as RunningNoiseScale
    from lightning_hetero.core.observations import StepObservations as StepObservations
    from lightning_hetero.core.planning.planner import PerfModelPlanner as PerfModelPlanner
    from lightning_hetero.core.planning.worker_times import WorkerTimes as WorkerTimes
    from lightning_hetero.core.policies.base import Decision as Decision
    from lightning_hetero.core.policies.base import PlanContext as PlanContext
    from lightning_hetero.core.policies.base import Planner as Planner
    from lightning_hetero.core.policies.base import Proposal as Proposal
    from lightning_hetero.core.policies.goodput import GoodputPlanner as GoodputPlanner
    from lightning_hetero.core.policies.proportional import ProportionalPlanner as ProportionalPlanner
    from lightning_hetero.core.policies.static import StaticPlanner as StaticPlanner
    from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner as TimeToAccuracyPlanner
    from lightning_hetero.core.timing.expected_maximum import expected_maximum as expected_maximum
    from lightning_hetero.core.timing.step_time import ClusterTimeModel as ClusterTimeModel
    from lightning_hetero.core.timing.step_time import NodeTimeModel as NodeTimeModel
    from lightning_hetero.core.timing.step_times import SmoothingSettings as SmoothingSettings

_EXPORTS = {
    "bootstrap_sizes": "lightning_hetero.core.as_published",
    "ControlSettings": "lightning_hetero.core.batching.control_settings",
    "Candidate": "lightning_hetero.core.batching.goodput",
    "candidate_totals": "lightning_hetero.core.batching.goodput",
    "choose_total": "lightning_hetero.core.batching.goodput",
    "efficiency": "lightning_hetero.core.batching.goodput",
    "goodput_of": "lightning_hetero.core.batching.goodput",
    "windows_of": "lightning_hetero.core.batching.goodput",
    "proportional_sizes": "lightning_hetero.core.batching.integer_split",
    "LR_RULES": "lightning_hetero.core.batching.lr_scaling",
    "adascale": "lightning_hetero.core.batching.lr_scaling",
    "lr_gain": "lightning_hetero.core.batching.lr_scaling",
    "solve_optperf": "lightning_hetero.core.batching.optperf",
    "solve_step_times": "lightning_hetero.core.batching.optperf",
    "static_sizes": "lightning_hetero.core.batching.optperf",
    "goodput_table": "lightning_hetero.core.batching.goodput",
    "BatchPlan": "lightning_hetero.core.batching.plan",
    "PlanEntry": "lightning_hetero.core.batching.plan",
    "PlanHistory": "lightning_hetero.core.batching.plan",
    "CheckpointStateError": "lightning_hetero.core.checkpoint_state",
    "DamagedCheckpointError": "lightning_hetero.core.checkpoint_state",
    "Computing": "lightning_hetero.core.compression.auto",
    "choose_density": "lightning_hetero.core.compression.auto",
    "ConvergenceSurrogate": "lightning_hetero.core.compression.bayesian_search",
    "profile_convergence": "lightning_hetero.core.compression.bayesian_search",
    "ConvergenceProfile": "lightning_hetero.core.compression.convergence_profile",
    "DensityChoice": "lightning_hetero.core.compression.objective",
    "density_penalty": "lightning_hetero.core.compression.objective",
    "minimise_time_to_accuracy": "lightning_hetero.core.compression.objective",
    "scale_batch_sizes": "lightning_hetero.core.merging.batch_scaling",
    "MergeRule": "lightning_hetero.core.merging.rules",
    "AdaptiveSettings": "lightning_hetero.core.merging.settings",
    "WindowEstimator": "lightning_hetero.core.noise.accumulation",
    "window_estimator": "lightning_hetero.core.noise.accumulation",
    "NoiseScaleEstimate": "lightning_hetero.core.noise.estimators",
    "estimate_from_local_norms": "lightning_hetero.core.noise.estimators",
    "estimate_from_two_sizes": "lightning_hetero.core.noise.estimators",
    "estimate_noise_scale": "lightning_hetero.core.noise.estimators",
    "local_estimates": "lightning_hetero.core.noise.estimators",
    "RunningNoiseScale": "lightning_hetero.core.noise.running",
    "StepObservations": "lightning_hetero.core.observations",
    "PerfModelPlanner": "lightning_hetero.core.planning.planner",
    "WorkerTimes": "lightning_hetero.core.planning.worker_times",
    "Decision": "lightning_hetero.core.policies.base",
    "PlanContext": "lightning_hetero.core.policies.base",
    "Planner": "lightning_hetero.core.policies.base",
    "Proposal": "lightning_hetero.core.policies.base",
    "GoodputPlanner": "lightning_hetero.core.policies.goodput",
    "ProportionalPlanner": "lightning_hetero.core.policies.proportional",
    "StaticPlanner": "lightning_hetero.core.policies.static",
    "TimeToAccuracyPlanner": "lightning_hetero.core.policies.time_to_accuracy",
    "expected_maximum": "lightning_hetero.core.timing.expected_maximum",
    "ClusterTimeModel": "lightning_hetero.core.timing.step_time",
    "NodeTimeModel": "lightning_hetero.core.timing.step_time",
    "SmoothingSettings": "lightning_hetero.core.timing.step_times",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
