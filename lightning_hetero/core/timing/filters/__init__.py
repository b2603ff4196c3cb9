"""Bank of Kalman filters that learns the times of each worker."""

__all__: list[str] = []
