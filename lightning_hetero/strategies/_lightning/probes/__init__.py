"""Trainings of a few steps that measure something before the real one."""
