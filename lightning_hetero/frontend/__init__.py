"""The parts that all adapters to trainers share."""

__all__: list[str] = []
