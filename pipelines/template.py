"""A conversation becomes token ids: the model's own chat template, and nothing a user can forge.

Control tokens come from the template alone. The whole text is encoded at once, as the model was
taught; if it then holds other control tokens than the same template around harmless text, somebody
wrote one into a message, and contents are encoded apart from the template, as plain text. No torch,
no transformers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from queueing.work import Invalid


class Generation(Extension):
    """The tag by which some templates mark answers for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Conversation:
    """The tokenizer and the chat template of one model folder; used by several threads at once."""

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = _tokenizer(Path(folder))
        self._plain = _tokenizer(Path(folder))
        self._plain.encode_special_tokens = True  # control tokens in a text are letters to this one
        self._controls = {
            number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        settings = _read(Path(folder) / "tokenizer_config.json")
        self._words = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token(settings.get(name))) is not None
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(_source(Path(folder), settings))
        except TemplateSyntaxError as error:
            raise Invalid(f"This model's chat template cannot be read: {error}") from error

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The prompt that asks for the next answer; raises Invalid if the template refuses."""
        whole: list[int] = self._encode(self._tokenizer, self._render(messages))
        mark = secrets.token_hex(8)  # nobody can have written it
        harmless = self._render(
            [{**message, "content": f"{mark}:{place}:"} for place, message in enumerate(messages)]
        )
        if self._controls_of(whole) == self._controls_of(self._encode(self._tokenizer, harmless)):
            return tuple(whole)
        return self._apart(harmless, mark, messages)

    def plain(self, text: str) -> tuple[int, ...]:
        """A text by itself, control tokens in it as letters."""
        return tuple(self._encode(self._plain, text))

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say."""
        said: str = self._tokenizer.decode(list(tokens))
        return said

    def public(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start are the template's own, as in everybody's first prompt."""
        return _common(self._opening, tokens)

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        """With what prompts begin when nobody gives a system message."""
        first, second = (self.tokens([{"role": "user", "content": text}]) for text in ("a", "b"))
        return first[: _common(first, second)]

    def _apart(
        self, harmless: str, mark: str, messages: Sequence[Mapping[str, str]]
    ) -> tuple[int, ...]:
        """The template's own pieces with control tokens, the contents between them without."""
        tokens: list[int] = []
        pieces = re.split(rf"{mark}:(\d+):", harmless)
        for place, piece in enumerate(pieces):
            if place % 2:
                tokens += self._encode(self._plain, messages[int(piece)]["content"])
            elif mark in piece:
                raise Invalid(
                    "There is the text of a control token in messages, which this model's template "
                    "cannot carry safely; remove it."
                )
            elif piece:
                tokens += self._encode(self._tokenizer, piece)
        return tuple(tokens)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._words
            )
        except TemplateError as error:
            raise Invalid(
                f"This model's chat template does not take messages as they are: {error}"
            ) from error

    def _controls_of(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self._controls]

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@lru_cache(maxsize=8)
def conversation(folder: str) -> Conversation:
    """One for all tasks of a model."""
    return Conversation(folder)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens they share at their start."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), shorter)


def _tokenizer(folder: Path) -> Tokenizer:
    """As it lies in the folder, but neither cutting nor filling up."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template's text, from a file of its own or from the tokenizer's settings."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template") or _read(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise Invalid(
            "This model has no chat template, so it cannot chat; choose an instruct model."
        )
    return found


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _token(value: Any) -> str | None:
    """A token's text, which older files wrap in an object."""
    found: str | None = value.get("content") if isinstance(value, dict) else value
    return found


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _json(value: Any, ensure_ascii: bool = False, **fields: Any) -> str:
    """Jinja's own escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **fields)
