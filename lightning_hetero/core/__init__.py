"""The mathematics of the package: numpy and plain Python values in, values out; no process group, clock or logger.

:data:`INDEX` says where each equation of the papers is, and which test holds it. Code cites papers by letter: C is
Cannikin, D dynamic batching, A Adaptive SGD, S StellaTrain, as in ``C eq. 9``.
"""

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.control_settings import ControlSettings
from lightning_hetero.core.batching.goodput import (
    Candidate,
    TotalSettings,
    candidate_totals,
    choose_total,
    efficiency,
    goodput_of,
    windows_of,
)
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.batching.lr_scaling import LR_RULES, adascale, lr_gain
from lightning_hetero.core.batching.optperf import overlap_state, solve_optperf, solve_step_times, static_sizes
from lightning_hetero.core.batching.optperf_cache import SolvedTotals, goodput_table
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.compression.auto import Computing, choose_density
from lightning_hetero.core.compression.bayesian_search import ConvergenceSurrogate, profile_convergence
from lightning_hetero.core.compression.convergence_profile import ConvergenceProfile
from lightning_hetero.core.compression.objective import (
    assumed_penalty,
    cut_penalty,
    density_penalty,
    minimise_time_to_accuracy,
)
from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MergeRule
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.noise.accumulation import WindowEstimator, window_estimator
from lightning_hetero.core.noise.estimators import (
    NoiseScaleEstimate,
    estimate_from_local_norms,
    estimate_from_two_sizes,
    estimate_noise_scale,
    local_estimates,
)
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.paper_index import INDEX, PAPERS, PaperEntry
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.split_rule import RuleSettings, cost, doubt, horizon
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from lightning_hetero.core.timing.expected_maximum import expected_maximum
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.timing.step_times import SmoothingSettings
from lightning_hetero.core.timing.times import EstimatorSettings, Times

__all__ = [
    "AdaptiveSettings",
    "BatchPlan",
    "Candidate",
    "ClusterTimeModel",
    "Computing",
    "ControlSettings",
    "ConvergenceProfile",
    "ConvergenceSurrogate",
    "Decision",
    "EstimatorSettings",
    "GoodputPlanner",
    "INDEX",
    "LR_RULES",
    "LinkTimes",
    "MergeRule",
    "NodeTimeModel",
    "NoiseScaleEstimate",
    "PAPERS",
    "PaperEntry",
    "PerfModelPlanner",
    "PlanContext",
    "PlanEntry",
    "PlanHistory",
    "Planner",
    "ProportionalPlanner",
    "Proposal",
    "Residual",
    "RuleSettings",
    "RunningNoiseScale",
    "SmoothingSettings",
    "SolvedTotals",
    "StaticPlanner",
    "StepObservations",
    "TimePosterior",
    "TimeToAccuracyPlanner",
    "Times",
    "TotalSettings",
    "WindowEstimator",
    "adascale",
    "assumed_penalty",
    "bootstrap_sizes",
    "candidate_totals",
    "choose_density",
    "choose_total",
    "cost",
    "cut_penalty",
    "density_penalty",
    "doubt",
    "efficiency",
    "estimate_from_local_norms",
    "estimate_from_two_sizes",
    "estimate_noise_scale",
    "expected_maximum",
    "goodput_of",
    "goodput_table",
    "horizon",
    "local_estimates",
    "lr_gain",
    "minimise_time_to_accuracy",
    "overlap_state",
    "profile_convergence",
    "proportional_sizes",
    "scale_batch_sizes",
    "solve_optperf",
    "solve_step_times",
    "static_sizes",
    "window_estimator",
    "windows_of",
]
