"""A document in sentences, each with the characters it stands at. By plain rules, for any language
that ends sentences with a mark: it does not know words beyond some abbreviations.
"""

from __future__ import annotations

import re

from pipelines.checks import shows

# A mark, closing quotes, then space or the end; marks of East Asian scripts want no space.
_END = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s|$)|[。！？｡]+["'”’」』）]*|\n\s*\n|\n(?=\s*[-*•\d])""")
_SHORT = re.compile(  # what ends with a point and ends no sentence
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|cf|No|Fig|approx|Inc|Ltd|Co)"
    r"|\b[A-Z]|^\s*\d{1,2})\.$"
)


def sentences(document: str) -> list[tuple[int, int]]:
    """Where each begins and ends, without the space around it."""
    found, begin = [], 0
    for end in [*(match.end() for match in _END.finditer(document)), len(document)]:
        piece = document[begin:end]
        if end < len(document) and _SHORT.search(piece) and not piece.endswith("\n"):
            continue
        if shows(piece):
            found.append((end - len(piece.lstrip()), begin + len(piece.rstrip())))
        begin = end
    return found
