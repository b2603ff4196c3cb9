"""Show users the progress bar, throughput and settings without effect of a run."""
