"""Reasons for which a split stays: each kind is said once, on one rank."""

from lightning_hetero.comm.agreement.plan_log import SplitLog
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.base import Decision, Proposal


def test_each_kind_of_reason_is_said_once(caplog):
    kept = SplitLog(speaks=True)
    with caplog.at_level("INFO", logger="lightning_hetero"):
        for reason in ("dead band: 3 %", "dead band: 2 %", "bounds hold: rank 1", None, "dead band: 1 %"):
            kept.note_kept(Decision(None, kept=reason))
        kept.note_kept(Decision(None, Proposal(BatchPlan(8, (6, 2)), "faster"), kept="another reason"))
        SplitLog(speaks=False).note_kept(Decision(None, kept="of another rank"))
    assert caplog.messages == ["the split stays: dead band: 3 %", "the split stays: bounds hold: rank 1"]
