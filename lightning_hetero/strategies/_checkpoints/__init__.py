"""Parts of checkpoints that all strategies share: whole files, and the residuals of all ranks."""
