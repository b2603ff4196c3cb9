"""All-reduce and all-gather of gradients, flat or by clusters."""

__all__: list[str] = []
