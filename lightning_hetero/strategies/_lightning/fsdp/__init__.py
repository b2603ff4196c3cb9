"""Sharded models (FSDP2) whose ranks have unequal batches, under Lightning's Trainer."""
