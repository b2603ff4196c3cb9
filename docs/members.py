"""Members that the reference describes of each class, beside its arguments: those that users call or read."""

MEMBERS = {
    "lightning_hetero.HeteroDDPStrategy": "plan, plan_history, observations, adopt",
    "lightning_hetero.HeteroElasticStrategy": "merges",
    "lightning_hetero.HeteroFSDPStrategy": ("plan, plan_history, observations, adopt, data_parallel_mesh"),
    "lightning_hetero.accelerate.HeteroAccelerator": (
        "plan, plan_history, observations, adopt, prepare_data_loader, gather_for_metrics, skip_first_batches"
    ),
    "lightning_hetero.strategies.fabric_ddp.HeteroDDPStrategy": "plan, plan_history, observations, adopt",
    "lightning_hetero.engine.HeteroEngine": (
        "shard, begin_step, scale_loss, backward, end_step, exchange, adopt, state_dict, load_state_dict"
    ),
    "lightning_hetero.session.HeteroSession": (
        "position, shard, steps, skip, lead, noise_scale, lr_gain, "
        "scale_invariant_steps, candidates, adopt, state_dict, interval, load_state_dict, close"
    ),
    "lightning_hetero.GNSCallback": "estimate",
    "lightning_hetero.AdaptiveBatchCallback": "lr_gain, scale_invariant_steps",
    "lightning_hetero.TTACallback": "density_range",
    "lightning_hetero.callbacks.PolicyCallback": "policy",
    "lightning_hetero.BatchPlan": "world_size, shares, state_dict, from_state_dict",
    "lightning_hetero.core.PlanEntry": "describe",
    "lightning_hetero.core.PlanHistory": "at, sizes_at, offset, num_batches, digest",
    "lightning_hetero.NodeTimeModel": "forward_time, backward_time, compute_time, accumulated",
    "lightning_hetero.ClusterTimeModel": "step_time, finish_times, fit, accumulated",
    "lightning_hetero.core.StepObservations": "num_steps, compute, outside_backward",
    "lightning_hetero.core.Planner": "initial, decide, predict, state_dict, loaded",
    "lightning_hetero.core.PerfModelPlanner": "optimum, cluster, error",
    "lightning_hetero.core.WorkerTimes": "observe, parts, errors, lines",
    "lightning_hetero.core.GoodputPlanner": "windows, candidates, current",
    "lightning_hetero.core.NoiseScaleEstimate": "noise_scale",
    "lightning_hetero.core.RunningNoiseScale": (
        "update, left_out, trace, grad_sq_norm, noise_scale, posterior, efficiency, state_dict, from_state_dict"
    ),
    "lightning_hetero.optim.LearningRateMultiplier": "steps, remove",
    "lightning_hetero.optim.AdamPreconditioner": "squares",
    "lightning_hetero.core.Computing": "of",
    "lightning_hetero.core.TimeToAccuracyPlanner": "choose, extra",
    "lightning_hetero.compression.BlockGradient": "stands",
    "lightning_hetero.core.ConvergenceProfile": "to_json, from_json, save, load",
    "lightning_hetero.core.ConvergenceSurrogate": "predict, extra_loss",
    "lightning_hetero.elastic.ElasticEngine": (
        "attach, shard, begin_batch, end_batch, lr_factor, steps_done, state_dict, load_state_dict, resume_at"
    ),
    "lightning_hetero.core.MergeRule": "weights, update",
    "lightning_hetero.data.SparseShape": "scaled",
    "lightning_hetero.simulate.DeviceProfile": "factors, model, seconds, slowdown_at, times",
    "lightning_hetero.simulate.EmulatedDevice": (
        "attach, detach, attach_parameters, begin_forward, end_forward, begin_backward, advance_backward, end_backward"
    ),
    "lightning_hetero.simulate.ClusterSimulator": (
        "run, advance, sync_round, optimum, slow_down, change_workers, adopt"
    ),
    "lightning_hetero.simulate.SimulationResult": (
        "sizes, idle, idle_share, share_of_optimum, share_since, first_within"
    ),
    "lightning_hetero.simulate.LinkProfile": "seconds, rate_at, slowed",
    "lightning_hetero.simulate.ElasticSimulator": "run",
    "lightning_hetero.simulate.Throttle": "start, stop, set_share",
    "lightning_hetero.simulate.ThinLink": "start, stop",
    "lightning_hetero.simulate.Cluster": "model, added, dropped, priced, with_link",
    "lightning_hetero.simulate.Worker": "of, profile, seconds",
    "lightning_hetero.simulate.Link": "times, at_rate, effective_rate, scaled",
    "lightning_hetero.simulate.PlanAnswer": "local_batch_sizes, to_dict",
    "lightning_hetero.simulate.LearnedAnswer": "to_dict",
    "lightning_hetero.data.IndexStream": "indices, fingerprint",
    "lightning_hetero.data.PermutationStream": "indices, fingerprint",
    "lightning_hetero.data.SamplerStream": "indices, fingerprint",
    "lightning_hetero.report.RunRecord": "of, from_lines, damaged, unseen, workers",
    "lightning_hetero.report.RunFigures": (
        "step_time, step_time_before, even, predicted, speed_up, speed_up_of_run, rate, optimum, share_of_optimum, "
        "share_of_solo, idle, link_share, lost, workers"
    ),
}
