"""Place of this process in a job, by the environment, and what is wrong with that environment."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.cli.doctor.facts import SOCKETS, ProcessFacts

__all__ = ["START", "Job", "group_problems", "interface_problems", "job_of"]

START = "torchrun --nproc-per-node N -m lightning_hetero doctor"
"""How the ranks of a job are checked."""


@dataclass(frozen=True)
class Job:
    """Place of a process.

    Args:
        rank: of the process.
        world_size: number of processes.
        local_rank: rank on this machine.
        problems: sentences on what is wrong; then the process is checked alone.

    Example:
        >>> Job(1, 4, 1).alone
        False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    problems: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """True if there is no other process."""
        return self.world_size == 1


def job_of(environment: Mapping[str, str]) -> Job:
    """Return the place that torchrun's variables give a process.

    Example:
        >>> job_of({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
        Job(rank=1, world_size=2, local_rank=0, problems=())
        >>> job_of({"WORLD_SIZE": "2"}).problems[0][:66]
        'WORLD_SIZE=2 is set, and RANK, MASTER_ADDR and MASTER_PORT are not'
    """
    numbers = {}
    for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        text = environment.get(name, "").strip() or str(default)
        if not text.isdecimal():
            return Job(problems=(f"{name}={text!r} is no whole number. Unset it, or start with {START}.",))
        numbers[name] = int(text)
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if world_size <= 1:
        return Job(local_rank=numbers["LOCAL_RANK"], problems=_alone_with_rank(rank, environment))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        named = missing[0] if len(missing) == 1 else f"{', '.join(missing[:-1])} and {missing[-1]}"
        problem = (
            f"WORLD_SIZE={world_size} is set, and {named} {'is' if len(missing) == 1 else 'are'} not: a script would "
            f"wait for processes that do not exist. Unset WORLD_SIZE, or start with {START}."
        )
        return Job(problems=(problem,))
    if rank >= world_size:
        return Job(problems=(f"RANK={rank} is not below WORLD_SIZE={world_size}. Start with {START}.",))
    return Job(rank, world_size, numbers["LOCAL_RANK"])


def _alone_with_rank(rank: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a problem for a rank that a process of its own cannot have."""
    if rank == 0:
        return ()
    size = environment.get("WORLD_SIZE", "")
    why = f"is not below WORLD_SIZE={size}" if size.strip() else "is set, and WORLD_SIZE is not"
    return (f"RANK={rank} {why}. Unset RANK, or start with {START}.",)


def group_problems(rows: Sequence[ProcessFacts]) -> list[str]:
    """Return sentences on ranks that do not go together: one GPU for two, other versions, too many threads."""
    found = []
    places: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.device.kind == "cuda":
            places[row.device.identity].append(row.rank)
    for ranks in places.values():
        if len(ranks) > 1:
            found.append(
                f"ranks {_listed(ranks)} share one GPU: NCCL refuses that, and they slow each other down. Start one "
                "process per GPU, or leave CUDA_VISIBLE_DEVICES to torchrun and read LOCAL_RANK."
            )
    found += _versions_differ(rows)
    sharing: dict[tuple[str, str], list[ProcessFacts]] = defaultdict(list)
    for row in rows:
        sharing[row.host, row.cpus].append(row)
    for own in sharing.values():
        threads, cores = sum(row.threads for row in own), max(row.cores for row in own)
        if len(own) > 1 and threads > 1.5 * cores and all(row.device.kind == "cpu" for row in own):
            found.append(
                f"ranks {_listed([row.rank for row in own])} run {threads} threads on {cores:.3g} cores and wait for "
                f"each other. Set OMP_NUM_THREADS={max(1, int(cores // len(own)))}."
            )
    return found


def _versions_differ(rows: Sequence[ProcessFacts]) -> list[str]:
    found = []
    for name in ("lightning-hetero", "python", "torch", "lightning", "nccl"):
        versions = {row.versions.get(name) for row in rows}
        if len(versions) > 1:
            listing = ", ".join(f"rank {row.rank}: {row.versions.get(name) or 'none'}" for row in rows)
            found.append(f"{name} differs between ranks ({listing}). Install the same everywhere.")
    return found


def interface_problems(rows: Sequence[ProcessFacts]) -> list[str]:
    """Return sentences on the interfaces that gloo and NCCL are told to use, by each rank's own environment."""
    found = []
    several = len({row.host for row in rows}) > 1
    for variable in SOCKETS:
        for row in rows:
            given = row.sockets.get(variable, "")
            missing = _missing(variable, given, row.interfaces) if given else ""
            if missing:
                found.append(
                    f"{variable}={given}: {missing} is no interface of rank {row.rank}'s machine, which has "
                    f"{', '.join(row.interfaces)}. Give one of these, or unset it."
                )
                break
        if several and any(row.sockets.get(variable, "").lstrip("=") == "lo" for row in rows):
            found.append(f"{variable}=lo reaches no other machine, and the ranks are on several. Name the network's.")
    return found


def _missing(variable: str, given: str, interfaces: Sequence[str]) -> str:
    """Return what is told and not there; gloo needs each name, NCCL one.

    NCCL takes prefixes, ``=`` for whole names, ``^`` for all but these.
    """
    if variable.startswith("GLOO"):
        return ", ".join(name or "''" for name in given.split(",") if name not in interfaces)
    names = given.lstrip("^=").split(",")
    if given.startswith("^"):
        there = any(not any(own.startswith(name) for name in names) for own in interfaces)
    else:
        whole = given.startswith("=")
        there = any(own == name if whole else own.startswith(name) for own in interfaces for name in names)
    return "" if there else given


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
