"""All that was found on the ranks, as a value: what advice, table and JSON are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_hetero.cli.doctor.autoload import Autoload
from lightning_hetero.cli.doctor.facts import ProcessFacts
from lightning_hetero.cli.doctor.link import LinkFacts
from lightning_hetero.cli.doctor.speed import Speed

__all__ = ["Checkup"]


@dataclass(frozen=True)
class Checkup:
    """Findings.

    Args:
        rows: the ranks that answered, or the devices of this process.
        world_size: number of ranks, 1 for a process of its own.
        seconds: how long each device was timed.
        precision: of the matrices.
        speeds: speed by rank.
        autoload: state of the entry point.
        link: between the ranks.
        environment: variables that matter to a job.
        problems: sentences on what is wrong.
        failures: sentences on checks that failed.
    """

    rows: tuple[ProcessFacts, ...]
    world_size: int = 1
    seconds: float = 5.0
    precision: str = "float32"
    speeds: Mapping[int, Speed] = field(default_factory=dict)
    autoload: Autoload | None = None
    link: LinkFacts | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Word for a row."""
        return "rank" if self.world_size > 1 else "device"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the machines, in the order of their first rank."""
        return tuple(dict.fromkeys(row.host for row in self.rows))
