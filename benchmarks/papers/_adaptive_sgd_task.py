"""What `adaptive_sgd.py` trains, on which emulated devices: the same for the replay and for real processes.

A device takes ``0.1 s`` times its factor for a batch of 64 samples. The time of a batch varies by 10 %, which is what
the non-zeros of 64 samples of Amazon-670k vary by. An exchange of gradients, or of models, is as large in all methods
(one model), so its time is one number; as default it is that of the fastest device's largest batch.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from _sparse_mlp import SparseMLP

from lightning_hetero.data import AMAZON_670K, DELICIOUS_200K, synthetic_multilabel
from lightning_hetero.simulate import DeviceProfile

SHAPES = {"amazon": AMAZON_670K, "delicious": DELICIOUS_200K}
SCALE = {"amazon": 0.025, "delicious": 0.005}
SAMPLES = {"amazon": 16000, "delicious": 8000}
CLASSES = {"amazon": 250, "delicious": 500}
CLUSTERS = {"paper": (1.0, 1.107, 1.213, 1.32), "unequal": (1.0, 2.0, 10 / 3)}
"""Times of the workers over the first one's: 32 % from the fastest to the slowest (Fig. 1), and more than that."""
BATCH, MEGA_BATCH, HIDDEN = 64, 2000, 64
BATCH_SECONDS = 0.1
JITTER = 0.1
OPTIMIZERS = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, fused=True),
}


@dataclass(frozen=True)
class Method:
    """How workers train: a merge rule of the package, or averaged gradients.

    Args:
        merge: rule, empty for averaged gradients.
        even: whether each worker does the same number of batches of the same size, and waits for the others.
        every: whether replicas are merged after each batch, instead of after a mega-batch.
        printed: whether perturbation and batch scaling are as printed in the paper.
        balanced: whether averaged gradients are of batches that all workers finish together.
    """

    merge: str = ""
    even: bool = False
    every: bool = False
    printed: bool = False
    balanced: bool = False


METHODS = {
    "adaptive": Method("adaptive"),
    "adaptive, as printed": Method("adaptive", printed=True),
    "elastic": Method("elastic"),
    "elastic, even": Method("elastic", even=True),
    "crossbow": Method("crossbow"),
    "crossbow, every batch": Method("crossbow", even=True, every=True),
    "mean": Method("mean"),
    "hetero_ddp": Method(balanced=True),
    "ddp": Method(),
}


def profiles(cluster, workers=None):
    """Profiles of the first workers of a cluster."""
    base = {"q": 0.0005, "s": 0.004, "k": 0.0009, "m": 0.0064}
    return [
        DeviceProfile(**{name: factor * value for name, value in base.items()}, jitter=JITTER, name=f"x{factor:.3g}")
        for factor in CLUSTERS[cluster][:workers]
    ]


@cache
def data(shape, quick=False):
    """Training and test set: non-zeros and labels of the real set's samples, and a part of its columns."""
    sizes = {"classes": CLASSES[shape], "train": SAMPLES[shape], "test": 1000}
    sizes = {"classes": 60, "train": 1500, "test": 200} if quick else sizes
    return synthetic_multilabel(replace(SHAPES[shape].scaled(SCALE[shape]), **sizes))


def model(train, optimizer, seed):
    """The perceptron with weights of this seed; sparse gradients where the optimizer takes them."""
    made = SparseMLP(train.num_features, train.num_classes, HIDDEN, sparse=optimizer == "SGD")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.embedding.weight.normal_(0, HIDDEN**-0.5, generator=generator)
        made.output.weight.normal_(0, HIDDEN**-0.5, generator=generator)
    return made
