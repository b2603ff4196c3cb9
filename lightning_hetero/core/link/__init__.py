"""The link that gradients cross: bandwidth, messages, staleness, clusters."""

__all__: list[str] = []
