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
from queueing.work import Invalid

TOKENS = 1_000_000  # of all items of a request whose items are made of several texts
CONTROL = 4  # control tokens in a pair, at most


@dataclass(frozen=True, slots=True)
class Text:
    """A text as token ids, how many tokens were cut off its end, and how many stand for words that
    the model does not know.
    """

    item: Item
    cut: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One text of a pair with all control tokens: what stands before and after the other text."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    second: int  # how many of `after` a model takes for the second text's
    other: bool  # whether it takes the other text for the second
    count: int  # tokens of the whole text
    cut: int  # of them, that were cut off its end
    unknown: int  # of the others, that stand for words the model does not know

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def item(self, tokens: Sequence[int]) -> Item:
        """The pair with this other text."""
        second = self.second + (len(tokens) if self.other else 0)
        return Item((*self.before, *tokens, *self.after), second)


class Texts:
    """The tokenizer of one model folder, for items of at most `limit` tokens; a control token that
    is `open` may be written by anybody.
    """

    def __init__(self, folder: str | Path, limit: int, open: str = "") -> None:
        self._special = _special(Path(folder))
        self._tokenizer = _tokenizer(Path(folder), self._special.get(open, ""))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(limit)
        self._tokenizer.encode_special_tokens = True
        self.limit = limit
        own = self.special("unk_token")
        self._unknown = None if own is None else own[1]

    def singles(self, texts: Sequence[str]) -> list[Text]:
        """Each by itself, with the control tokens that the model wants around it."""
        return [self._text(found) for found in self._tokenizer.encode_batch(list(texts))]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Text]:
        """Two texts in one item; what is too long is cut off the longer one."""
        return [self._text(found) for found in self._tokenizer.encode_batch(list(pairs))]

    def _text(self, found: Any) -> Text:
        item = Item(tuple(found.ids), sum(found.type_ids))
        cut = sum(map(_own, found.overflowing))
        pairs = zip(found.ids, found.special_tokens_mask, strict=True)
        return Text(item, cut, self.unknown([id for id, control in pairs if not control]))

    def unknown(self, ids: Sequence[int]) -> int:
        """How many of these tokens stand for what the model does not know."""
        return sum(id == self._unknown for id in ids)

    def plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids without control tokens, however many, and which characters each stands for."""
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        parts = [whole, *whole.overflowing]
        ids = [token for part in parts for token in part.ids]
        return ids, [offset for part in parts for offset in part.offsets]

    def frame(self, text: str, most: int, second: bool) -> Frame:
        """A text, at most so many tokens of it, as the first or the second of pairs."""
        given = self._tokenizer.encode(text, add_special_tokens=False)
        count = sum(len(part.ids) for part in (given, *given.overflowing))
        given.truncate(most)
        other = self._tokenizer.encode("a", add_special_tokens=False)
        pair = (other, given) if second else (given, other)
        whole = self._tokenizer.post_process(*pair)
        places = [place for place, control in enumerate(whole.special_tokens_mask) if not control]
        begin = places[0 if second else len(given.ids)]
        end = begin + len(other.ids)
        ids, types = tuple(whole.ids), whole.type_ids
        cut, unknown = max(count - most, 0), self.unknown(given.ids)
        return Frame(
            ids[:begin], ids[end:], sum(types[end:]), types[begin] > 0, count, cut, unknown
        )

    def special(self, name: str) -> tuple[str, int] | None:
        """A control token, such as mask_token, and its id; None where the model has none."""
        token = self._special.get(name)
        number = None if token is None else self._tokenizer.token_to_id(token)
        return None if token is None or number is None else (token, number)

    def forms(self, word: str) -> list[int]:
        """The tokens that are all of a word, with a space before it and without; maybe none."""
        spaced, bare = (self.plain(f"{space}{word}")[0] for space in (" ", ""))
        found = dict.fromkeys(ids[0] for ids in (spaced, bare) if len(ids) == 1)
        return [id for id in found if id != self._unknown]

    def word(self, token: int) -> str:
        """A token as people read it."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.removeprefix("##")


@lru_cache(maxsize=16)
def texts(folder: str, limit: int, open: str = "") -> Texts:
    """One tokenizer for all tasks of a model."""
    return Texts(folder, limit, open)


def half(limit: int) -> int:
    """The most tokens of one text of a pair, when the other has as many; control tokens beside."""
    return max((limit - CONTROL) // 2, 1)


def bounded(what: str, count: int) -> None:
    """Raises Invalid when a request has too many tokens to be computed in any time."""
    if count > TOKENS:
        raise Invalid(
            f"{what} make {count:,} tokens; at most {TOKENS:,} are taken at once. Send fewer."
        )


def _tokenizer(folder: Path, open: str) -> Tokenizer:
    """As the file says, but for one control token that becomes a word like others."""
    file = folder / "tokenizer.json"
    if not open:
        return Tokenizer.from_file(str(file))
    settings = json.loads(file.read_text(encoding="utf-8"))
    for token in settings["added_tokens"]:
        token["special"] = token["special"] and token["content"] != open
    return Tokenizer.from_str(json.dumps(settings))


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
