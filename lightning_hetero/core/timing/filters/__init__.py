"""Learn the times of each worker by a bank of Kalman filters."""

__all__: list[str] = []
