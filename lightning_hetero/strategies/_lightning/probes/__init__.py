"""Short trainings that measure something before the real one."""
