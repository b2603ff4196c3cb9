"""Index of the papers: each equation, algorithm and rule, the code that implements it, and the test that checks it.

Letters: C is "Cannikin: Optimal Adaptive Distributed DNN Training over Heterogeneous Clusters", D "Taming Resource
Heterogeneity In Distributed ML Training With Dynamic Batching", A "Adaptive Elastic Training for Sparse Deep Learning
on Heterogeneous Multi-GPU Servers" (Adaptive SGD), S "Accelerating Model Training in Multi-cluster Environments with
Consumer-grade GPUs" (StellaTrain). Code cites them as ``C eq. 9``. C is numbered as in its long version, which alone
has eq. 12. Places are names, not imports, because some of them lie above this package.
"""

from typing import NamedTuple

__all__ = ["INDEX", "PAPERS", "PaperEntry"]

PAPERS = {"C": "Cannikin", "D": "dynamic batching", "A": "Adaptive SGD", "S": "StellaTrain"}
"""The papers by letter."""


class PaperEntry(NamedTuple):
    """An equation, algorithm or rule of a paper, and its place.

    Args:
        paper: letter of the paper.
        where: number of the equation or algorithm, or the section.
        what: its content, in a few words.
        code: ``module:name`` below ``lightning_hetero``.
        test: ``file::function`` below ``tests``.

    Example:
        >>> next(entry.code for entry in INDEX if entry.cited == "C eq. 7")
        'core.timing.step_time:ClusterTimeModel.step_time'
    """

    paper: str
    where: str
    what: str
    code: str
    test: str

    @property
    def cited(self) -> str:
        """The citation that code uses, ``C eq. 9``."""
        return f"{self.paper} {self.where}"


_GOODPUT = "core.batching.goodput:"
_OPTPERF = "core.batching.optperf:"
_TEST_OPTPERF = "core/batching/test_optperf.py::"

INDEX: tuple[PaperEntry, ...] = tuple(
    PaperEntry(*entry)
    for entry in (
        ("C", "eq. 1", "mean gradient of a worker's samples", "comm.gradients.loss_weighting:LossWeighting",
         "comm/gradients/test_loss_weighting.py::test_gradient_is_scaled_and_the_loss_itself_is_not"),
        ("C", "eq. 2", "plain mean of the workers' gradients", "comm.gradients.averager:DDPMean.average",
         "comm/gradients/test_ddp_hook.py::test_average_is_that_of_ddp_with_the_same_hook"),
        ("C", "eq. 3", "compute time of a worker, linear in its samples", "core.timing.step_time:NodeTimeModel",
         "core/timing/test_step_time.py::test_times_of_a_worker_are_lines_in_its_samples"),
        ("C", "eq. 4", "start of a worker's first all-reduce", "core.timing.step_time:ClusterTimeModel.coefficients",
         "core/timing/test_step_time.py::test_step_time_is_equation_7"),
        ("C", "eq. 5", "finish time if computing is the bottleneck",
         "core.timing.step_time:ClusterTimeModel.coefficients",
         "core/timing/test_step_time.py::test_step_time_is_equation_7"),
        ("C", "eq. 6", "finish time if the link is the bottleneck",
         "core.timing.step_time:ClusterTimeModel.coefficients",
         "core/timing/test_step_time.py::test_step_time_is_equation_7"),
        ("C", "eq. 7", "time of a step", "core.timing.step_time:ClusterTimeModel.step_time",
         "core/timing/test_step_time.py::test_step_time_is_equation_7"),
        ("C", "sec. 3.3", "optimal split of a total (OptPerf)", _OPTPERF + "solve_optperf",
         _TEST_OPTPERF + "test_integer_optimum_is_never_worse_than_the_integer_programmes"),
        ("C", "Alg. 1", "overlap state: which workers computing bounds", _OPTPERF + "overlap_state",
         _TEST_OPTPERF + "test_overlap_states_are_the_bottlenecks_and_grow_with_the_total"),
        ("C", "appendix A", "conditions of the optimum", _OPTPERF + "solve_optperf",
         _TEST_OPTPERF + "test_cannikin_appendix_a"),
        ("C", "eq. 8", "split before a time model is known", "core.as_published:bootstrap_sizes",
         "core/test_as_published.py::test_bootstrap_goes_by_time_per_sample_and_keeps_bounds"),
        ("C", "eq. 9", "weighted mean of gradients", "comm.gradients.ddp_hook:gradient_hook",
         "strategies/test_equality.py::test_module_kinds"),
        ("C", "eq. 9", "weight of a worker's loss", "comm.gradients.loss_weighting:LossWeighting.scale",
         "comm/gradients/test_loss_weighting.py::test_weight_of_a_mean"),
        ("C", "eq. 10", "unbiased estimates of each worker", "core.noise.estimators:local_estimates",
         "core/noise/test_estimators.py::test_each_local_estimate_is_unbiased"),
        ("C", "eq. 11", "weights as printed (Theorem 4.1)", "core.noise.estimators:estimate_noise_scale",
         "core/noise/test_estimators.py::test_cannikin_has_the_printed_weights"),
        ("C", "sec. 4.4", "weights, corrected", "core.noise.estimators:estimate_noise_scale",
         "core/noise/test_estimators.py::test_no_weights_have_less_variance_than_pooled"),
        ("C", "eq. 12", "overlap, by inverse variance", "core.timing.fitting:estimate_gamma",
         "core/timing/test_fitting.py::test_gamma_weighs_workers_by_inverse_variance"),
        ("C", "eq. 12", "times of the all-reduce", "core.timing.fitting:estimate_sync_times",
         "core/timing/test_fitting.py::test_network_times_are_those_of_whoever_waits_least"),
        ("C", "sec. 4.5", "fit of the step time model", "core.timing.step_time:ClusterTimeModel.fit",
         "core/timing/test_step_time.py::test_fit_is_near_under_noise_with_gross_outliers"),
        ("C", "sec. 4.1", "goodput of a total", _GOODPUT + "goodput_of",
         "core/batching/test_optperf_cache.py::test_goodput_is_throughput_times_efficiency"),
        ("C", "sec. 4.1", "statistical efficiency of a total", _GOODPUT + "efficiency",
         "core/batching/test_goodput.py::test_efficiency_is_the_formula"),
        ("C", "sec. 4.5", "optimal splits of all totals, kept", "core.batching.optperf_cache:SolvedTotals",
         "core/batching/test_optperf_cache.py::test_a_changed_overlap_state_leaves_nothing_known"),
        ("C", "sec. 3-4", "policy of the split", "core.policies.perf_model:PerfModelPlanner.decide",
         "core/policies/test_perf_model.py::test_optimum_is_reached_within_three_decisions"),
        ("C", "sec. 4", "policy of the total", "core.policies.goodput:GoodputPlanner.decide",
         "core/policies/test_goodput.py::test_repeated_decisions_settle"),
        ("D", "eq. 1", "plain mean of the workers' gradients", "comm.gradients.averager:DDPMean.average",
         "comm/gradients/test_ddp_hook.py::test_average_is_that_of_ddp_with_the_same_hook"),
        ("D", "eq. 2", "share of a worker", "core.batching.plan:BatchPlan.shares",
         "core/batching/test_plan.py::test_shares_are_sizes_over_the_total"),
        ("D", "eq. 3", "weighted mean of gradients, without the 1/K that is printed",
         "comm.gradients.loss_weighting:LossWeighting.scale", "strategies/test_equality.py::test_module_kinds"),
        ("D", "sec. III-B", "open-loop split by capacity", _OPTPERF + "static_sizes",
         _TEST_OPTPERF + "test_static_is_proportional"),
        ("D", "sec. III-B", "peak FLOP/s of a device", "core.batching.peak_flops:gpu_peak_flops",
         "core/batching/test_peak_flops.py::test_ratios_of_the_papers_clusters"),
        ("D", "sec. III-B", "policy that keeps that split", "core.policies.static:StaticPlanner",
         "core/policies/test_static.py::test_static_is_proportional_to_capacities_and_never_changes"),
        ("D", "eq. 4", "proportional control of batch sizes", "core.batching.proportional_control:control",
         "core/batching/test_proportional_control.py::test_one_step_is_equations_4_and_5"),
        ("D", "eq. 5", "next batch sizes", "core.batching.proportional_control:control",
         "core/batching/test_proportional_control.py::test_one_step_is_equations_4_and_5"),
        ("D", "sec. III-C", "dead band: all sizes change or none", "core.batching.proportional_control:control",
         "core/batching/test_proportional_control.py::test_noise_causes_no_oscillation"),
        ("D", "sec. III-C", "exponential smoothing of times", "core.batching.proportional_control:smooth",
         "core/batching/test_proportional_control.py::"
         "test_smoothing_is_a_mean_first_and_an_exponential_moving_average_then"),
        ("D", "sec. III-C", "learned upper bound of a batch", "core.batching.learned_bound:learn_bound",
         "core/batching/test_learned_bound.py::test_upper_bound_is_learned_where_throughput_fell_after_a_rise"),
        ("D", "sec. III-C", "policy of proportional control", "core.policies.proportional:ProportionalPlanner",
         "core/policies/test_proportional.py::test_proportional_makes_compute_times_equal"),
        ("A", "Alg. 1", "batch sizes that equalise updates", "core.merging.batch_scaling:scale_batch_sizes",
         "core/merging/test_batch_scaling.py::test_printed_algorithm_1"),
        ("A", "Alg. 1", "learning rate of a worker", "elastic.engine:ElasticEngine.lr_factor",
         "elastic/test_engine.py::test_batch_sizes_of_a_checkpoint_count_within_the_bounds_that_hold_now"),
        ("A", "Alg. 2", "weights of the replicas", "core.merging.rules:AdaptiveMerge.weights",
         "core/merging/test_rules.py::test_equal_updates_weigh_by_batch_size_which_breaks_the_tie_of_the_perturbation"),
        ("A", "Alg. 2", "momentum of the global model", "core.merging.rules:MomentumMerge.update",
         "elastic/test_engine.py::test_merges_are_the_printed_equations"),
        ("A", "sec. III", "batches claimed one by one", "data.mega_batch:MegaBatch",
         "data/test_mega_batch.py::test_an_epoch_is_covered_once_in_any_order_of_claims"),
        ("A", "sec. IV", "weighted all-reduce of models", "elastic.merging.weighted_average:weighted_sums",
         "elastic/test_weighted_average.py::"
         "test_sums_are_weighted_and_a_weight_of_zero_hides_what_is_not_finite"),
        ("A", "Table I", "sparse data of this shape", "datasets.synthetic:synthetic_multilabel",
         "datasets/test_synthetic.py::test_means_and_spread_are_those_of_the_shape"),
        ("S", "sec. 3.1", "sparse optimizer", "optim.sparse.lazy_update:LazyUpdate",
         "optim/sparse/test_optimizers.py::test_only_touched_blocks_are_written"),
        ("S", "sec. 3.2", "blocks by the sum of their magnitudes", "compression.reference:block_scores",
         "compression/test_reference.py::test_a_block_scores_by_the_sum_of_its_magnitudes"),
        ("S", "sec. 3.2", "block top-k with error feedback", "compression.reference:compress",
         "compression/test_reference.py::test_what_is_sent_and_what_stays_make_up_what_there_was"),
        ("S", "sec. 3.2", "feedback loop of the threshold", "compression.selectors:aimd",
         "compression/test_selectors.py::test_the_papers_threshold_rises_by_a_step_and_falls_by_a_share"),
        ("S", "sec. 3.3", "which buckets are stale", "core.link.staleness:choose_synchronous",
         "core/link/test_staleness.py::test_as_many_are_fresh_as_fit"),
        ("S", "sec. 3.3", "gradients one step late", "comm.staleness.dense:DenseStaleAverager",
         "comm/staleness/test_dense.py::test_every_sum_is_applied_once_and_a_step_late"),
        ("S", "sec. 3.3", "earliest deadline first", "comm.staleness.deadline_queue:TransferQueue",
         "comm/staleness/test_deadline_queue.py::test_the_order_of_transfers_follows_the_plan_on_all_ranks"),
        ("S", "sec. 4.1", "bandwidth by the share of idle time", "core.link.bandwidth:LinkEstimate.observe_idle",
         "core/link/test_bandwidth.py::test_the_idle_rule_finds_the_rate_from_either_side"),
        ("S", "sec. 4.1", "bandwidth by messages, not by idle time", "core.link.message_times:MessageTimes",
         "core/link/test_message_times.py::test_two_sizes_tell_latency_and_rate"),
        ("S", "eq. 1", "density, total and split together", "core.compression.objective:minimise_time_to_accuracy",
         "core/compression/test_objective.py::test_search_is_as_good_as_trying_every_split_and_density"),
        ("S", "eq. 2", "throughput of a worker, and Table 2", "core.as_published:ThroughputModel",
         "core/test_as_published.py::test_table_2_is_found_from_its_own_times"),
        ("S", "eq. 3", "equal times of all workers, by the exact optimum", _OPTPERF + "solve_optperf",
         "core/batching/test_finish_lines.py::test_all_finish_together_where_no_bound_holds"),
        ("S", "eq. 4", "time of the slowest worker", "core.timing.step_time:ClusterTimeModel.step_time",
         "core/timing/test_step_time.py::test_step_time_is_equation_7"),
        ("S", "eq. 5", "time to accuracy", "core.compression.objective:time_to_accuracy",
         "core/compression/test_objective.py::"
         "test_time_to_accuracy_is_seconds_per_sample_times_the_extra_samples"),
        ("S", "eq. 6", "largest density for a step's time", "core.as_published:largest_density",
         "core/test_as_published.py::test_bytes_are_compared_with_bytes"),
        ("S", "eq. 6", "stale messages fit into a step", "core.compression.objective:penalised_time",
         "core/compression/test_objective.py::"
         "test_hidden_messages_fit_into_a_step_whatever_more_of_them_would_be_worth"),
        ("S", "sec. 4", "policy of the density", "core.policies.time_to_accuracy:TimeToAccuracyPlanner.decide",
         "core/policies/test_time_to_accuracy.py::test_density_follows_the_link_within_a_few_windows"),
        ("S", "Alg. 1", "search of the convergence profile", "core.compression.bayesian_search:profile_convergence",
         "core/compression/test_bayesian_search.py::"
         "test_thirty_probes_tell_where_the_best_batch_is_at_every_rate"),
        ("S", "Alg. 1", "a probe training", "strategies._lightning.probes.convergence:ConvergenceProbe",
         "strategies/test_convergence_probe.py::test_the_order_decides_on_batches_and_delay_and_on_nothing_else"),
        ("S", "sec. 6", "each worker sends k / N blocks", "core.compression.settings:blocks_per_rank",
         "core/compression/test_settings.py::test_budget_is_k_over_n_rounded_up"),
    )
)  # fmt: skip
"""All entries, paper by paper."""
