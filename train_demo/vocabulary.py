"""The vocabulary: turns characters into numbers, and numbers into characters."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from train_demo.errors import UserError


@dataclass(frozen=True)
class Vocabulary:
    """The tokens: the distinct characters of the data, in the order of their code points.

    Example:
      >>> Vocabulary("ab").encode("abba")
      array([0, 1, 1, 0], dtype=int32)
    """

    characters: str

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Vocabulary":
        return cls("".join(sorted(set[str]().union(*texts))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        known, codes = (
            np.frombuffer(each.encode("utf-32-le", "surrogatepass"), np.uint32) for each in (self.characters, text)
        )
        numbers = np.searchsorted(known, codes).astype(np.int32)
        unknown = known[np.minimum(numbers, len(known) - 1)] != codes
        if unknown.any():
            named = " ".join(repr(chr(code)) for code in np.unique(codes[unknown]).tolist())
            raise UserError(f"the training text does not contain {named}: remove these characters")
        return numbers

    def decode(self, numbers: Iterable[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


def visible(text: str) -> str:
    """Replaces white space by visible characters, so that a text is on one line."""
    return text.translate({32: "␣", 10: "↵", 9: "⇥"})
