"""Blanks filled on a causal model: one call for the next step of many rows, packed and without
pages.

What a row has read stays as keys and values of its own until its blank is filled. A model that
cannot be packed computes each candidate whole. It does not know where requests come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kernels.reference import Shape
from kernels.within import Stretch, Within
from pipelines.alone import AloneModel
from pipelines.cloze import Candidate, ClozeState, Filled, Read
from pipelines.packed import PackedModel
from queueing.work import Advance, Output, Row

CANDIDATES = 24  # of what continues the text, and as many by the prompt
FIRST = 96  # the same where the text begins with the blank, so that nothing narrows them
ROWS = 256  # of scores over a whole vocabulary, at once


@dataclass(slots=True)
class _Part:
    """One row in one call: texts to read, or candidates to score after what was read."""

    state: ClozeState
    texts: Sequence[Candidate]
    kept: Sequence[Sequence[int]]  # of each text, the places after which scores are wanted
    starts: list[int] = field(default_factory=list)  # of the texts in the packed tokens

    @property
    def before(self) -> int:
        """Tokens that were read."""
        return 0 if self.state.read is None else len(self.state.begun)

    @property
    def units(self) -> int:
        return sum(map(len, self.texts))


def _part(state: ClozeState, grant: int) -> _Part:
    if state.read is not None:
        texts = state.granted(grant)
        return _Part(state, texts, [range(len(text) - 1) for text in texts])
    texts = [state.begun] if state.candidates else [state.begun, state.hint]
    return _Part(state, texts, [[len(text) - 1] for text in texts])


class _Attending:
    """Rows within themselves and what each of them has read, and what is read now."""

    causal = True

    def __init__(self, parts: Sequence[_Part], device: torch.device) -> None:
        self.calls = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # of this call's tokens
        self._read = [part.state.read for part in parts if part.state.read is not None]
        self._offset = sum(part.before for part in parts)
        stretches, before = [], 0
        for part in parts:
            prefix = (before, part.before) if part.before else None
            for start, text in zip(part.starts, part.texts, strict=True):
                stretches.append(Stretch(self._offset + start, len(text), prefix))
            before += part.before
        self._within = Within(stretches, device, causal=True)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """A layer's packed queries [tokens, heads, width], to results of the values' width."""
        self.calls += 1
        self.layers[index] = key, value
        if self._offset:
            earlier = [read.layers[index] for read in self._read]
            key = torch.cat([*(pair[0] for pair in earlier), key])
            value = torch.cat([*(pair[1] for pair in earlier), value])
            query = torch.cat([query.new_zeros(self._offset, *query.shape[1:]), query])
        return self._within.attend(index, query, key, value, shape)[self._offset :]

    def read(self, start: int, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """What is to be kept of tokens of this call."""
        own = slice(start, start + count)
        return {at: (k[own].clone(), v[own].clone()) for at, (k, v) in self.layers.items()}


class Scorer:
    """A model, and the words that its tokens are."""

    def __init__(self, body: PackedModel | AloneModel, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance | Exception]:
        """One forward for all rows."""
        parts = [_part(row.state, grant) for row, grant in zip(rows, grants, strict=True)]
        if isinstance(self._body, AloneModel):
            return [self._advance(part, _alone(self._body.model, part), {}) for part in parts]
        return self._packed(self._body, parts)

    def _packed(self, body: PackedModel, parts: Sequence[_Part]) -> list[Advance | Exception]:
        device = body.model.device
        tokens, positions, kept = list[int](), list[int](), list[int]()
        for part in parts:
            for text, places in zip(part.texts, part.kept, strict=True):
                part.starts.append(len(tokens))
                kept += [len(tokens) + place for place in places]
                positions += range(part.before, part.before + len(text))
                tokens += text
        attending = _Attending(parts, device)
        logits = body.run(
            torch.tensor([tokens], device=device),
            torch.tensor([positions], device=device),
            torch.tensor(kept, dtype=torch.long, device=device),
            attending,
        )
        own = torch.split(logits, [sum(map(len, part.kept)) for part in parts])
        return [
            self._advance(part, scores, attending.read(part.starts[0], len(part.texts[0])))
            if part.state.read is None
            else self._advance(part, scores, {})
            for part, scores in zip(parts, own, strict=True)
        ]

    def _advance(
        self, part: _Part, logits: Tensor, layers: dict[int, tuple[Tensor, Tensor]]
    ) -> Advance | Exception:
        """What a call made of a row, from the scores after its kept places [kept, vocabulary]."""
        if not bool(logits.isfinite().all()):
            return ArithmeticError("The model's numbers for this row are not finite.")
        state = part.state
        if state.read is None:
            found = state.candidates or self._candidates(state, logits)
            return Advance(state.begins(Read(layers, logits[0].clone()), found), part.units)
        known = (*state.scores, *_scores(part, logits, state.read.after))
        shares = _shares(state, known) if len(known) == len(state.candidates) else None
        after = state.scored(known, shares)
        progress = len(after.filled) / len(after.job.blanks)
        output = Output(progress=progress, result=after.filled if after.done else None)
        mark = () if shares is None or after.done else (shares,)
        return Advance(after, part.units, output, mark)

    def _candidates(self, state: ClozeState, logits: Tensor) -> list[Candidate]:
        """The likeliest words after the text before the blank and after the prompt."""
        words = self._words[0 if state.spaced else 1]
        count = CANDIDATES if state.left else FIRST
        found = (token for row in logits for token in _best(row, words, count))
        return [(token,) for token in dict.fromkeys(found)]

    @cached_property
    def _words(self) -> tuple[Tensor, Tensor]:
        """Tokens that are words with a space before them, and without one."""
        count = self._tokenizer.get_vocab_size()
        texts = self._tokenizer.decode_batch([[token] for token in range(count)])
        spaced = [n for n, text in enumerate(texts) if text[:1] == " " and text[1:].isalnum()]
        bare = [n for n, text in enumerate(texts) if text.isalnum()]
        # A tokenizer that marks a word's first piece otherwise has none with a space.
        return torch.tensor(spaced or bare), torch.tensor(bare)


def _best(logits: Tensor, words: Tensor, count: int) -> list[int]:
    """Of the tokens that are words, the likeliest; a model may know fewer than its tokenizer."""
    own = words[words < len(logits)].to(logits.device)
    order = logits[own].topk(min(count, len(own))).indices
    found: list[int] = own[order].tolist()
    return found


def _alone(model: Any, part: _Part) -> Tensor:
    """The scores after the kept places of all texts, each computed whole."""
    before = part.state.begun if part.before else ()
    found = []
    for text, places in zip(part.texts, part.kept, strict=True):
        tokens = torch.tensor([[*before, *text]], device=model.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, len(before) :]
        found.append(logits[list(places)])
    return torch.cat(found)


def _scores(part: _Part, logits: Tensor, after: Tensor) -> list[float]:
    """Log-likelihoods of candidates with all that follows: of their first tokens from the scores
    after what was read, of the others from those after the one before.
    """
    scores, at = list[float](), 0
    for text in part.texts:
        rows = [after[None], *torch.split(logits[at : at + len(text) - 1], ROWS)]
        at += len(text) - 1
        follows = torch.split(torch.tensor(text, device=logits.device), [len(row) for row in rows])
        pairs = zip(rows, follows, strict=True)
        scores.append(sum(float(_likelihoods(row, tokens).sum()) for row, tokens in pairs))
    return scores


def _likelihoods(logits: Tensor, follows: Tensor) -> Tensor:
    own = logits.float()
    return own.gather(1, follows[:, None])[:, 0] - own.logsumexp(-1)


def _shares(state: ClozeState, scores: Sequence[float]) -> Filled:
    """Of all candidates together 1; the likeliest first, no more than were asked for."""
    shares = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    pairs = zip(state.candidates, shares, strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return tuple((candidate, float(share)) for candidate, share in ordered[: state.job.top])
