"""Text of any Hugging Face causal model, many rows in one call, keys and values in pages.

One key for answers: a call mixes rows that decode with chunks of prompts; a model that cannot be
packed computes them one after the other, and pages only count. A row is a function of its request
and of the tokens it has; those are its mark, and from them it continues anywhere. It does not know
who asks, who else rides, or what time it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference import Span
from pipelines import models
from pipelines.alone import AloneModel
from pipelines.chat import ChatJob
from pipelines.cloze import ClozeJob, ClozeState, begin
from pipelines.device import guarded, memory_for_rows, settle, step_seconds
from pipelines.loading import Loaded, bring
from pipelines.packed import PackedModel
from pipelines.paging import PageTables
from pipelines.prefix import Names
from pipelines.ride import Ride, TextState, Words
from pipelines.sampling import choose
from pipelines.scoring import Scorer
from queueing.work import (
    Advance,
    Card,
    CarpoolError,
    Invalid,
    Key,
    Mark,
    Request,
    Row,
    Tell,
    Work,
)

KEY = "text"


class TextPipeline:
    """A few settings, whose defaults suit most machines, until `load` brings the model."""

    def __init__(
        self,
        model: str
        | None = None,  # a folder or a name on the Hub; else CARPOOL_CHAT_MODEL, else the default
        device: str = "auto",
        dtype: str | None = None,  # else CARPOOL_DTYPE, else what the hardware computes in
        threads: int | None = None,  # of torch on a host; None means one a core
        memory_bytes: int | None = None,  # for keys and values; None means a share of what there is
        page: int = 16,  # tokens
    ) -> None:
        self._wanted = model or os.environ.get("CARPOOL_CHAT_MODEL") or None
        self._device = device
        self._dtype = dtype or os.environ.get("CARPOOL_DTYPE") or "auto"
        self._threads = threads
        self._memory = memory_bytes
        self._page = page
        self._loaded: Loaded | None = None
        self._tables = PageTables(1, page)
        self._names = Names(page)
        self._words: Words | None = None
        self._scorer: Scorer | None = None
        self._context = 0
        self._fixed = 0  # tokens that a row counts for beyond those it has

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        """Any number of rows."""
        return None

    def load(self, tell: Tell) -> Card:
        """Prepare, load and check the model, then make its pages."""
        device, dtype = settle(self._device, self._dtype, self._threads)
        found = models.find_to_load(self._wanted, "chat", tell)
        loaded = guarded(lambda: bring(found.folder, device, dtype, self._page))
        tell(0.95, "Making room for conversations")
        self._make_room(loaded, device)
        self._words = Words.read(found.folder, loaded.ends)
        self._scorer = Scorer(loaded.body, self._words.tokenizer)
        self._loaded = loaded
        tell(1.0, f"{found.name} is ready")
        return self._card(found, device, dtype)

    def unload(self) -> None:
        """Free the model and everything rows held."""
        if self._loaded is not None:
            self._loaded.body.unload()
        self._loaded = self._words = self._scorer = None
        self._tables = PageTables(1, self._page)

    def open(self, request: Request, mark: Mark | None = None) -> TextState | ClozeState:
        """Nothing is computed; the tokens of a mark count as chosen, their text as given out.

        What the same person's earlier rows left in full pages counts as computed, except for the
        last token, whose logits are wanted.
        """
        if isinstance(request.payload, ClozeJob):
            return begin(request.payload, mark or ())
        job: ChatJob = request.payload
        tokens = len(job.prompt) + job.settings.max_tokens
        if not job.prompt or tokens > self._context:
            raise Invalid(
                f"The prompt has {len(job.prompt)} tokens and max_tokens is "
                f"{job.settings.max_tokens}; together they may be 2 to {self._context}. Shorten "
                "the conversation or lower max_tokens."
            )
        vocabulary = self._known().vocabulary
        if not 0 <= min(job.prompt) <= max(job.prompt) < vocabulary:
            raise Invalid(
                f"The prompt has token ids outside 0 to {vocabulary - 1}. Tokenise it again."
            )
        state = TextState.begin(job).replayed(mark or (), self._known_words())
        if isinstance(self._known().body, AloneModel):
            return state
        known = state.known()[:-1]
        names = self._names.of(known, self._salt(request), job.public)
        return state.found(self._tables.share(request.id, names) * self._page)

    def next(self, row: Row) -> Work | None:
        """The rest of the prompt, in any chunks the model can take; then token after token."""
        if isinstance(row.state, ClozeState):
            return row.state.work()
        state: TextState = row.state
        if state.reason is not None:
            return None
        if state.pending > 1:
            body = self._known().body
            whole = isinstance(body, AloneModel) and body.whole
            return Work(KEY, state.pending if whole else 1, state.pending, behind=state.computed)
        return Work(KEY, 1, state.left, serial=True, behind=state.computed)

    def reserve(self, row: Row, units: int) -> int:
        """Pages for `units` more tokens; blanks are filled without."""
        if isinstance(row.state, ClozeState):
            return units
        self._remember(row)
        before: int = self._fixed + row.state.computed
        return max(self._tables.reserve(row.request.id, before + units) - before, 0)

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        """One forward for all rows, then more for those that decode and were granted more."""
        if self._scorer is not None and any(isinstance(row.state, ClozeState) for row in rows):
            scorer = self._scorer
            return guarded(lambda: scorer.step(rows, grants))
        rides = [
            Ride(row, grant, self._tables.table(row.request.id), self._page)
            for row, grant in zip(rows, grants, strict=True)
        ]
        guarded(lambda: self._run(rides))
        return [ride.outcome() for ride in rides]

    def park(self, row: Row) -> Mark:
        """Pages are dropped; the tokens are enough to compute them again."""
        self.close(row)
        if isinstance(row.state, ClozeState):
            return row.state.filled
        mark: Mark = row.state.answer.flat()
        return mark

    def close(self, row: Row) -> None:
        """Idempotent; full pages rest, for the next turn of the conversation."""
        self._remember(row)
        self._tables.release(row.request.id)
        if not self._tables.owners:
            self._tables.check()

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that can be given and pages used."""
        return self._tables.free, self._tables.used

    def _remember(self, row: Row) -> None:
        """Name the pages that are full by what is committed; a step may still be repeated."""
        known = self._tables.names(row.request.id)
        if not self._tables.table(row.request.id) or isinstance(self._known().body, AloneModel):
            return
        state: TextState = row.state
        full = state.computed // self._page
        if full > len(known):
            tokens = state.known()[: full * self._page]
            names = self._names.of(tokens, self._salt(row.request), state.job.public, known)
            self._tables.name(row.request.id, names)

    def _salt(self, request: Request) -> bytes:
        return self._names.salt(request.session, request.salt)

    @torch.inference_mode()
    def _run(self, rides: Sequence[Ride]) -> None:
        words = self._known_words()
        running = list(rides)
        while running:
            self._forward(running, words)
            running = [ride for ride in running if ride.goes_on]

    def _forward(self, rides: Sequence[Ride], words: Words) -> None:
        """Pack, compute, choose; a row whose numbers are bad gets an error and no token."""
        own = [ride.tokens() for ride in rides]
        choosing = [place for place, ride in enumerate(rides) if ride.completes(len(own[place]))]
        body = self._known().body
        if isinstance(body, AloneModel):
            logits = _one_by_one(body, rides, own)[choosing]
        else:
            logits = _packed(body, rides, own, choosing)
        chosen: list[int | None] = [None] * len(rides)
        picked = choose(logits, [rides[place].draw() for place in choosing]) if choosing else []
        for place, token in zip(choosing, picked, strict=True):
            chosen[place] = token
        for place, ride in enumerate(rides):
            ride.advance(len(own[place]), chosen[place], words)

    def _make_room(self, loaded: Loaded, device: torch.device) -> None:
        body = loaded.body
        per_page = body.bytes_per_token * self._page
        memory = memory_for_rows(device) if self._memory is None else self._memory
        count = memory // per_page
        self._fixed = body.fixed if isinstance(body, AloneModel) else 0
        self._context = min(loaded.context, count * self._page - self._fixed)
        if count < 2 or self._context < 2:
            least = max(2 * per_page, (self._fixed + self._page) * body.bytes_per_token)
            raise CarpoolError(
                f"memory_bytes is {memory:,}; a single row takes {least:,} at least. Give it more."
            )
        if isinstance(body, PackedModel):
            guarded(lambda: body.make_pages(count))
        self._tables = PageTables(count, self._page)

    def _card(self, found: models.Found, device: torch.device, dtype: torch.dtype) -> Card:
        loaded = self._known()
        per_token = loaded.body.bytes_per_token
        return Card(
            limits={
                "context": self._context,
                "vocabulary": loaded.vocabulary,
                "page": self._page,
                "fixed": self._fixed,
            },
            bytes=self._tables.pages * self._page * per_token,
            bytes_per_unit=float(per_token),
            target=step_seconds(device),
            held=loaded.weights + self._tables.pages * self._page * per_token,
            details=found.details(device, dtype) | {"path": loaded.path, "why": loaded.why},
        )

    def _known(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError("A row before load. This is a bug.")
        return self._loaded

    def _known_words(self) -> Words:
        if self._words is None:
            raise RuntimeError("A row before load. This is a bug.")
        return self._words


def _packed(
    body: PackedModel,
    rides: Sequence[Ride],
    own: Sequence[Sequence[int]],
    choosing: Sequence[int],
) -> Tensor:
    """Logits of the rides that choose, from one forward for all."""
    tokens: list[int] = []
    spans: list[Span] = []
    for ride, mine in zip(rides, own, strict=True):
        length, pages = ride.state.computed + len(mine), ride.pages_for(len(mine))
        spans.append(Span(len(tokens), len(mine), length, pages))
        tokens.extend(mine)
    return body.forward(
        tokens, spans, [spans[place].start + spans[place].count - 1 for place in choosing]
    )


def _one_by_one(body: AloneModel, rides: Sequence[Ride], own: Sequence[Sequence[int]]) -> Tensor:
    """Logits of all rides, a forward for each."""
    found = []
    for ride, mine in zip(rides, own, strict=True):
        logits, memory = body.forward(mine, ride.state.memory)
        ride.remember(memory)
        found.append(logits)
    return torch.stack(found)
