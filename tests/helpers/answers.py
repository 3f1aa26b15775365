"""A target whose distributions are given."""

from torch import Tensor

from draftree.sampling.keyed_noise import RandomSource


class Answers(RandomSource):
    """Answers as it is told, and keeps what it was asked.

    Args:
        yes: to each question in turn; no to all others.
    """

    def __init__(self, *yes: bool) -> None:
        self._yes = list(yes)
        self.asked = list[tuple[float, int, int, int]]()
        self.drawn = list[tuple[list[float], int, int]]()

    def categorical(self, p: Tensor, row: int, depth: int) -> int:
        self.drawn.append(([round(x, 9) for x in p.tolist()], row, depth))
        return int(p.argmax())

    def bernoulli(self, p: float, row: int, depth: int, index: int = 0) -> bool:
        self.asked.append((round(p, 9), row, depth, index))
        return self._yes.pop(0) if self._yes else False
