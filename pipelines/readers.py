"""Prompts as a denoiser takes them: token states and vectors of the text encoders of each family.

A prompt always becomes as many tokens as its family reads, so that nobody's length shows in another
row. It does not know denoisers or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from pipelines import proof
from pipelines.drawn import Adapter
from pipelines.fetch import Unprepared
from pipelines.weights import must_be_whole, opened

Condition: TypeAlias = "dict[str, Tensor]"  # what a denoiser is told, by the names of its arguments
Asked: TypeAlias = "tuple[str | None, Adapter | None]"  # a text, and what changes how it is read
Around: TypeAlias = "Callable[[Sequence[Adapter | None]], AbstractContextManager[None]]"


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One text, without a dimension for rows, and how many of its tokens were too many."""

    condition: Condition
    cut: int = 0

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.condition.values())


class Reader(Protocol):
    """The text encoders of a family."""

    @property
    def models(self) -> Sequence[Any]: ...

    def read(self, texts: Sequence[str | None]) -> list[Read]:
        """All in one call; None is no negative prompt, which need not be an empty one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Texts as token ids, [texts, length] each."""

    ids: Tensor
    mask: Tensor
    cut: tuple[int, ...]


class Tokenizer:
    """A tokenizer of transformers that always gives the same length."""

    def __init__(self, folder: Path, length: int | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self._own: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise Unprepared(
                f"The tokenizer in {folder.parent.name}/{folder.name} cannot be read "
                f"({proof.reason(error)}); fetch its files again."
            ) from None
        self.length = length or min(self._own.model_max_length, 512)

    def __call__(self, texts: Sequence[str]) -> Tokens:
        found = self._own(
            list(texts),
            padding="max_length",
            max_length=self.length,
            truncation=True,
            return_tensors="pt",
        )
        whole = self._own(list(texts), verbose=False).input_ids
        cut = tuple(max(len(ids) - self.length, 0) for ids in whole)
        return Tokens(found.input_ids, found.attention_mask, cut)


def encoder(folder: Path, name: str, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A text encoder of transformers."""
    model, missing = opened(folder / name, kind, dtype, f"the {kind} of {folder.name}")
    must_be_whole(folder, missing, f"weights of its {name}")
    return model.to(device).eval().requires_grad_(False)


class OneClip:
    """Stable Diffusion 1: the last states of one CLIP; no negative prompt is an empty one."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._tokenizer = Tokenizer(folder / "tokenizer")
        self._model = encoder(folder, "text_encoder", "CLIPTextModel", dtype, device)
        self.models = (self._model,)

    def read(self, texts: Sequence[str | None]) -> list[Read]:
        tokens = self._tokenizer([text or "" for text in texts])
        states = self._model(tokens.ids.to(self._model.device)).last_hidden_state
        pairs = zip(states, tokens.cut, strict=True)
        return [Read({"encoder_hidden_states": each}, cut) for each, cut in pairs]


class TwoClips:
    """SDXL: the last states but one of two CLIPs side by side, and the vector of the second; no
    negative prompt is nothing at all, where the model says so.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, zeros: bool) -> None:
        self._tokenizers = [Tokenizer(folder / name) for name in ("tokenizer", "tokenizer_2")]
        kinds = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}
        self.models = [encoder(folder, *each, dtype, device) for each in kinds.items()]
        self._zeros = zeros

    def read(self, texts: Sequence[str | None]) -> list[Read]:
        states, tokens, vectors = [], [], None
        for tokenizer, model in zip(self._tokenizers, self.models, strict=True):
            tokens.append(tokenizer([text or "" for text in texts]))
            found = model(tokens[-1].ids.to(model.device), output_hidden_states=True)
            states.append(found.hidden_states[-2])
            vectors = getattr(found, "text_embeds", None)
        made = []
        for place, text in enumerate(texts):
            one = {
                "encoder_hidden_states": torch.cat([each[place] for each in states], dim=-1),
                "text_embeds": vectors[place],  # type: ignore[index]
            }
            if text is None and self._zeros:
                one = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
            made.append(Read(one, max(each.cut[place] for each in tokens)))
        return made


class ClipAndT5:
    """Flux: the vector of a CLIP, and the states of a T5."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, length: int) -> None:
        self._first = Tokenizer(folder / "tokenizer")
        self._second = Tokenizer(folder / "tokenizer_2", length)
        self._clip = encoder(folder, "text_encoder", "CLIPTextModel", dtype, device)
        self._t5 = encoder(folder, "text_encoder_2", "T5EncoderModel", dtype, device)
        self.models = self._clip, self._t5

    def read(self, texts: Sequence[str | None]) -> list[Read]:
        words = [text or "" for text in texts]
        tokens = self._second(words)
        vectors = self._clip(self._first(words).ids.to(self._clip.device)).pooler_output
        states = self._t5(tokens.ids.to(self._t5.device))[0]
        return [
            Read({"encoder_hidden_states": state, "pooled_projections": vector}, cut)
            for state, vector, cut in zip(states, vectors, tokens.cut, strict=True)
        ]


class Sentences:
    """Emoji: token states of a sentence encoder, masked behind the text, and their mean where the
    denoiser wants it; no negative prompt is an empty one.
    """

    LENGTH = 16

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, mean: bool) -> None:
        self._tokenizer = Tokenizer(folder, self.LENGTH)
        # Its pooler is not used, and may be missing.
        model, missing = opened(folder, "AutoModel", dtype, "an encoder")
        must_be_whole(folder, [name for name in missing if "pooler" not in name])
        self._model = model.to(device).eval().requires_grad_(False)
        self.models = (self._model,)
        self._mean = mean

    def read(self, texts: Sequence[str | None]) -> list[Read]:
        tokens = self._tokenizer([text or "" for text in texts])
        device = self._model.device
        mask = tokens.mask.to(device)
        found = self._model(input_ids=tokens.ids.to(device), attention_mask=mask)
        weights = mask[..., None].to(found.last_hidden_state.dtype)
        states = found.last_hidden_state * weights
        means = states.sum(1) / weights.sum(1)
        made = []
        for place, cut in enumerate(tokens.cut):
            one = {"encoder_hidden_states": states[place], "encoder_attention_mask": mask[place]}
            made.append(Read(one | ({"class_labels": means[place]} if self._mean else {}), cut))
        return made


class Remembering:
    """A reader that keeps what it read last, so many bytes, by text and adapter; `rows` puts the
    adapters around a reading. With `size`, it always reads that many texts together.
    """

    def __init__(
        self, reader: Reader, rows: Around, size: int | None = None, most: int = 64 << 20
    ) -> None:
        self._reader = reader
        self._rows = rows
        self._size = size
        self._most = most
        self._kept: dict[Asked, Read] = {}  # what was asked for last comes last

    def read(self, asked: Sequence[Asked]) -> list[Read]:
        """What each text is, in their order."""
        found = {each: self._kept.pop(each) for each in dict.fromkeys(asked) if each in self._kept}
        missing = [each for each in dict.fromkeys(asked) if each not in found]
        size = self._size or max(len(missing), 1)
        for start in range(0, len(missing), size):
            some = missing[start : start + size]
            full = some + some[:1] * (size - len(some)) if self._size else some
            with self._rows([adapter for _, adapter in full]):
                found |= zip(some, self._reader.read([text for text, _ in full]), strict=False)
        self._kept |= found
        total = sum(read.bytes for read in self._kept.values())
        while total > self._most:
            total -= self._kept.pop(next(iter(self._kept))).bytes
        return [found[each] for each in asked]
