"""Members of a generation: the workers that train together until one is lost or comes."""

from dataclasses import dataclass

from lightning_hetero.comm.membership.slots import SlotBoard

__all__ = ["Generation", "Member", "MembershipError", "TrainingOverError", "is_open"]


class MembershipError(RuntimeError):
    """Raised if a worker was lost, and training cannot go on with those that are left."""


class TrainingOverError(RuntimeError):
    """Raised if a worker comes after the others have finished training."""


@dataclass(frozen=True, order=True)
class Member:
    """Worker: one life of a slot."""

    slot: int
    life: int

    def lives(self, board: SlotBoard) -> bool:
        """Return whether this life runs."""
        return board.lives(self.slot, self.life)


@dataclass(frozen=True)
class Generation:
    """Workers that train together.

    Args:
        number: number of the generation.
        members: its workers; the place of each is its rank.
    """

    number: int
    members: tuple[Member, ...]

    def text(self) -> str:
        """Return the members as the store holds them."""
        return " ".join(f"{one.slot}.{one.life}" for one in self.members)

    @classmethod
    def of(cls, number: int, text: str) -> "Generation":
        """Return the generation of a text.

        Example:
            >>> Generation.of(1, "0.0 2.1").members
            (Member(slot=0, life=0), Member(slot=2, life=1))
        """
        pairs = (one.split(".") for one in text.split())
        return cls(number, tuple(Member(int(slot), int(life)) for slot, life in pairs))

    @classmethod
    def read(cls, board: SlotBoard, number: int) -> "Generation | None":
        """Return a generation as it was written down, ``None`` before that."""
        text = board.read(f"{number}/members")
        return None if text is None else cls.of(number, text)

    @classmethod
    def newest(cls, board: SlotBoard) -> "Generation | None":
        """Return the newest generation, ``None`` before the first."""
        number = board.read("newest")
        return None if number is None else cls.read(board, int(number))

    def write(self, board: SlotBoard) -> None:
        """Write the generation down as the newest."""
        board.store.set(f"{self.number}/members", self.text())
        board.store.set("newest", str(self.number))

    def lost(self, board: SlotBoard, me: Member) -> list[Member]:
        """Return the members besides ``me`` that do not live any more."""
        return [one for one in self.members if one != me and not one.lives(board)]

    def left(self, board: SlotBoard, me: Member) -> list[Member]:
        """Return the members besides ``me`` that have left it and have come for the next generation."""
        came = {one: board.read(f"{self.number + 1}/in/{one.slot}") for one in self.members if one != me}
        return [one for one, life in came.items() if life == str(one.life)]


def is_open(board: SlotBoard, number: int) -> bool:
    """Return whether someone has come for a generation."""
    return bool(board.store.check([f"{number}/led by"]))
