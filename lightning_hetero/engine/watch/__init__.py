"""Watch over a run at its sync rounds: its record in a file, stragglers, measured gains, and the summary at its end."""

__all__: list[str] = []
