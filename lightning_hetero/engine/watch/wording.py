"""Log lines on stragglers."""

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
}


def describe_straggler(one: Straggler, at: tuple[int, int], device: str = "") -> str:
    """Return the log line of a straggler that begins or ends.

    Example:
        >>> describe_straggler(Straggler(2, "data", 0, 0.05, 0.06), (0, 40), "V100")
        'rank 2 (V100) makes all others wait since epoch 0 step 40: waiting for its loader costs 50 ms of each step'
    """
    who = "the link" if one.rank == LINK else f"rank {one.rank}" + (f" ({device})" if device else "")
    where = f"epoch {at[0]} step {at[1]}"
    if one.relieved:
        how = RELIEVED.get(one.relieved, one.relieved)
        cost = f"{'at least ' if one.earlier else ''}{one.lost:.3g} s"
        return f"{who} no longer makes the others wait from {where}: {how}; it has cost {cost}"
    where += " or earlier" if one.earlier else ""
    if one.rank == LINK:
        return f"{who} is slower since {where}: the all-reduce takes {one.cost * 1e3:.3g} ms more of each step"
    slower = "slower than all others" if one.lasting else NAMES[one.phase]
    costs = f"({NAMES[one.phase]}) costs" if one.lasting else "costs"
    return f"{who} makes all others wait since {where}: {slower} {costs} {one.cost * 1e3:.3g} ms of each step"
