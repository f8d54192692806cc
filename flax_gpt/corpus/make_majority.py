"""Writes majority.tsv and majority_lengths.tsv: distinct strings of 0 and 1, TAB, 1 when more than half of the string are 1, else 0.

`python -m flax_gpt.corpus.make_majority [FOLDER]`. All strings of the first are 16 long, those of the second 4 to 16.
"""

import random
import sys
from pathlib import Path

FILES = {"majority.tsv": (2500, 16, 16), "majority_lengths.tsv": (4000, 4, 16)}
"""{name: (strings, shortest, longest)}."""


def lines(count: int, shortest: int, longest: int) -> list[str]:
    draw, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        found["".join(draw.choice("01") for _ in range(draw.randint(shortest, longest)))] = None
    return [f"{text}\t{int(2 * text.count('1') > len(text))}" for text in found]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, sizes in FILES.items():
        (folder / name).write_text("\n".join(lines(*sizes)) + "\n", encoding="utf-8", newline="")
