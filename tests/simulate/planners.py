"""A planner that goes through given splits, and keeps what it is told."""

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner


class Watching(StaticPlanner):
    """Proposes one of the splits in each round, and predicts as many seconds as the first worker has samples.

    Args:
        splits: local batch sizes of each round; the last ones stay.
        sends: density of messages from the first round on.
    """

    def __init__(self, splits=(), sends=None):
        self.splits, self.sends, self.seen = list(splits), sends, []

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        self.seen.append((observations, context))
        density = proposal = None
        if self.splits:
            sizes = self.splits.pop(0)
            proposal = Proposal(BatchPlan(sum(sizes), sizes), "onwards")
        if self.sends:
            density = DensityChoice(self.sends, current.total_batch_size, 1.0, 1.0, 1.0, 1.0)
        return Decision(self, proposal, density=density, error=0.5)

    def predict(self, plan, context):
        return float(plan.local_batch_sizes[0])
