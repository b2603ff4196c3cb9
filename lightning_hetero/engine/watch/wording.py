"""Log lines on stragglers."""

from lightning_hetero.core.rounded import rounded
from lightning_hetero.core.stragglers.detector import LINK, Straggler

__all__ = ["describe_straggler"]

NAMES = {
    "data": "waiting for its loader",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer",
}
RELIEVED = {
    "split": "relieved by a smaller share",
    "recovered": "it has recovered",
    "others": "others are slower now",
    "slower": "it has become slower still",
}


def describe_straggler(one: Straggler, at: tuple[int, int], device: str = "") -> str:
    """Return the log line of a straggler that begins or ends.

    Example:
        >>> describe_straggler(Straggler(2, "data", 0, 0.05, 0.06), (0, 40), "V100")
        'rank 2 (V100) has made all others wait since epoch 0 step 40: waiting for its loader costs 50 ms of each step'
    """
    who = f"rank {one.rank}" + (f" ({device})" if device else "")
    where = f"epoch {at[0]} step {at[1]}"
    if one.relieved:
        how = RELIEVED.get(one.relieved, one.relieved)
        over = "the link is no longer slower" if one.rank == LINK else f"{who} no longer makes the others wait"
        least = "at least " if one.earlier else ""
        return f"{over} as of {where}: {how}; it has cost {least}{rounded(one.lost)} s"
    where += " or earlier" if one.earlier else ""
    costs = f"costs {rounded(one.cost * 1e3)} ms of each step"
    if one.rank == LINK:
        return f"the link has been slower since {where}: this {costs}"
    why = f"it is slower than all others, mostly in {NAMES[one.phase]}, and" if one.lasting else NAMES[one.phase]
    return f"{who} has made all others wait since {where}: {why} {costs}"
