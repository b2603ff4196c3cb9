"""Facts of ranks for the tests of ``lightning-hetero doctor``."""

from lightning_hetero.cli.doctor.autoload import Autoload
from lightning_hetero.cli.doctor.facts import DeviceFacts, ProcessFacts
from lightning_hetero.cli.doctor.speed import Speed


def process(rank, host="lab1", kind="cuda", card=None, memory=24e9, **facts):
    """Facts of a rank; a GPU of its own unless a card is given."""
    identity = f"{host}/{rank if card is None else card}"
    given = {"cores": 8.0, "threads": 1, "host_memory": 64 * 10**9, "interfaces": ("lo", "eth0"), **facts}
    return ProcessFacts(rank, host, DeviceFacts(kind, "RTX 3090", identity, int(memory), int(memory) // 2), **given)


def speed(flops, lost=0.0):
    return Speed(flops, (flops,) * 15, lost)


def autoload(**state):
    given = {"entry_points": 1, "dangling": False, "switched_off": False, "names": (), "error": "", **state}
    return Autoload(**given)
