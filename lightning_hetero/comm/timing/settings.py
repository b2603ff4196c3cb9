"""Settings of the timers."""

from dataclasses import dataclass, replace

__all__ = ["SETTINGS", "TimingSettings"]


@dataclass(frozen=True)
class TimingSettings:
    """Numbers of steps that are timed and that are left out.

    Args:
        max_steps: newest steps that each timer keeps for a sync round, one row of an exchanged table each.
        warm_up_steps: first synchronized steps of a process, which are left out.
        change_costs: newest measured costs of a change of batch size; the lowest counts.
        min_steps: fewest steps that are kept, however many ranks there are.
        all_rows: rows of all ranks together that rank 0 gathers in a sync round.
    """

    max_steps: int = 32
    warm_up_steps: int = 3
    change_costs: int = 2
    min_steps: int = 8
    all_rows: int = 64_000

    def of(self, ranks: int) -> "TimingSettings":
        """Return the settings for a number of ranks: the more there are, the fewer steps of each are sent.

        The newest ones are. They are sent as they were measured: a mean over them would hide the jitter, by which a
        step takes longer than its slowest worker does on average.

        Example:
            >>> [TimingSettings().of(ranks).max_steps for ranks in (2, 2_000, 4_000, 10_000)]
            [32, 32, 16, 8]
        """
        most = max(self.all_rows // ranks, self.min_steps)
        return replace(self, max_steps=min(self.max_steps, most))


SETTINGS = TimingSettings()
