"""The parts of the strategies for Lightning Fabric."""

__all__: list[str] = []
