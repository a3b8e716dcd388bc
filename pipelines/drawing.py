"""Results drawn for a page: how alike texts are, as a map of heat, and lists of results, as tables.

HTML with everything a person wrote escaped; it knows no page.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 24  # texts in a map
ROWS = 200  # of a table
SHORT, MORE = 40, 300  # characters of a text beside its row, and where one points at it


def heat(result: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The cosines of all pairs of texts, warmer where they are more alike."""
    given = enumerate(zip(texts, result["embeddings"], strict=True), 1)
    found = [(number, text, vector) for number, (text, vector) in given if vector is not None]
    rows = found[:MOST]
    heads = "".join(f"<th>{number}</th>" for number, _, _ in rows)
    lines = []
    for number, text, vector in rows:
        cells = "".join(_cell(_cosine(vector, other)) for _, _, other in rows)
        name = (
            f'<td class="text" title="{html.escape(text[:MORE])}">{html.escape(short(text))}</td>'
        )
        lines.append(f"<tr><th>{number}</th>{name}{cells}</tr>")
    more = _more(len(found) - len(rows))
    return f'<table class="heat"><tr><th></th><td></td>{heads}</tr>{"".join(lines)}</table>{more}'


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Plain rows, the first of them; numbers with three digits after the point."""
    kinds = [_kind(cell) for cell in rows[0]] if rows else [""] * len(heads)
    pairs = zip(heads, kinds, strict=True)
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in pairs)
    lines = [
        "".join(f"<td{_kind(cell)}>{_written(cell)}</td>" for cell in row) for row in rows[:ROWS]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = _more(len(rows) - ROWS)
    return f'<table class="results"><tr>{head}</tr>{body}</table>{more}'


def _cell(value: float) -> str:
    share = round(100 * min(max(value, 0.0), 1.0))
    hot = " hot" if share > 60 else ""
    return f'<td class="cell{hot}" style="--warm: {share}%">{value:.2f}</td>'


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = sum(a * a for a in one) * sum(b * b for b in other)
    return float(product / lengths**0.5) if lengths else 0.0


def short(text: str) -> str:
    """A text as it stands beside a result."""
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _more(left: int) -> str:
    return f"<p>and {left:,} more, not drawn</p>" if left > 0 else ""


def _kind(cell: Any) -> str:
    return ' class="number"' if isinstance(cell, float) else ""


def _written(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else html.escape(str(cell))
