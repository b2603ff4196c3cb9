"""DDP's communication hook, and what it takes and gives."""

__all__: list[str] = []
