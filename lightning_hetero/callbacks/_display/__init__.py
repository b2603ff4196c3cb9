"""Display for users: progress bar, throughput, and settings without effect in a run."""
