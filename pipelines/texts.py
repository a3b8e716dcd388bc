"""Texts become token ids as a model was taught, cut to what it takes, and nothing a user can forge:
the text of a control token is plain text. Without torch, by several threads at once.

It does not know tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipelines.oneshot import Item


@dataclass(frozen=True, slots=True)
class Text:
    """A text as token ids, and how many tokens were cut off its end."""

    item: Item
    cut: int


class Texts:
    """The tokenizer of one model folder, for items of at most `limit` tokens."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(limit)
        self._tokenizer.encode_special_tokens = True
        self._special = _special(Path(folder))
        self.limit = limit

    def singles(self, texts: Sequence[str]) -> list[Text]:
        """Each by itself, with the control tokens that the model wants around it."""
        return [_text(found) for found in self._tokenizer.encode_batch(list(texts))]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Text]:
        """Two texts in one item; what is too long is cut off the longer one."""
        return [_text(found) for found in self._tokenizer.encode_batch(list(pairs))]

    def plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids without control tokens, however many, and which characters each stands for."""
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        parts = [whole, *whole.overflowing]
        ids = [token for part in parts for token in part.ids]
        return ids, [offset for part in parts for offset in part.offsets]

    def special(self, name: str) -> tuple[str, int] | None:
        """A control token, such as mask_token, and its id; None where the model has none."""
        token = self._special.get(name)
        number = None if token is None else self._tokenizer.token_to_id(token)
        return None if token is None or number is None else (token, number)

    def word(self, token: int) -> str:
        """A token as people read it."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.removeprefix("##")


@lru_cache(maxsize=16)
def texts(folder: str, limit: int) -> Texts:
    """One tokenizer for all tasks of a model."""
    return Texts(folder, limit)


def _text(found: Any) -> Text:
    item = Item(tuple(found.ids), sum(found.type_ids))
    cut = sum(_own(part) for part in found.overflowing)
    return Text(item, cut)


def _own(found: Any) -> int:
    """Tokens of the text itself."""
    masks: Sequence[int] = found.special_tokens_mask
    return len(masks) - sum(masks)


def _special(folder: Path) -> dict[str, str]:
    """Control tokens by name, from tokenizer_config.json or the older file."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for key, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
