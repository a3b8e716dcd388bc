"""Summaries by a model that reads with an encoder and writes with a decoder: many rows in one call.

Two keys: texts are read in one piece, which gives their first token; then rows write token by
token. A row is a function of its text and of the tokens it has, always the likeliest; those are its
mark, and from them it continues anywhere. It does not know who asks, or what time it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipelines import models
from pipelines.chat import ChatJob
from pipelines.device import guarded, memory_for_rows, settle, step_seconds
from pipelines.paging import PageTables
from pipelines.ride import Ride, TextState, Words
from pipelines.seq2seq_attention import Part
from pipelines.seq2seq_loading import Loaded, Manner, bring
from pipelines.summary import DECODE, ENCODE, SummaryJob
from queueing.work import Advance, Card, CarpoolError, Invalid, Key, Mark, Request, Row, Tell, Work

ROWS = 32  # as long as can be, for which there is memory at most


class Seq2SeqPipeline:
    """A few settings, whose defaults suit most machines, until `load` brings the model."""

    def __init__(
        self,
        model: str | None = None,  # a folder or a name on the Hub; else CARPOOL_SUMMARISE_MODEL
        device: str = "auto",
        dtype: str | None = None,  # else CARPOOL_DTYPE, else what the hardware computes in
        threads: int | None = None,  # of torch on a host; None means one a core
        memory_bytes: int | None = None,  # for keys and values; None means a share of what there is
        page: int = 16,  # tokens
    ) -> None:
        self._wanted = model or os.environ.get(models.SETTINGS["summarise"]) or None
        self._device = device
        self._dtype = dtype or os.environ.get("CARPOOL_DTYPE") or "auto"
        self._threads = threads
        self._memory = memory_bytes
        self._page = page
        self._brought: Loaded | None = None
        self._words: Words | None = None
        self._tables = PageTables(1, page)

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        """Any number of rows."""
        return None

    def load(self, tell: Tell) -> Card:
        """Prepare, load and check the model, then make its pages."""
        device, dtype = settle(self._device, self._dtype, self._threads)
        found = models.find_to_load(self._wanted, "summarise", tell)
        brought = guarded(lambda: bring(found.folder, device, dtype, self._page))
        self._make_room(brought, device)
        self._words = Words.read(found.folder, brought.manner.ends)
        self._brought = brought
        tell(1.0, f"{found.name} is ready")
        return self._card(found, device, dtype)

    def unload(self) -> None:
        """Free the model and everything rows held."""
        if self._brought is not None:
            self._brought.body.unload()
        self._brought = self._words = None
        self._tables = PageTables(1, self._page)

    def open(self, request: Request, mark: Mark | None = None) -> TextState:
        """Nothing is computed; the tokens of a mark count as chosen, their text as given out."""
        job: SummaryJob = request.payload
        brought, words = self._known()
        if not 1 <= len(job.source) <= brought.source:
            raise Invalid(
                f"The text has {len(job.source)} tokens; 1 to {brought.source} are taken. "
                "Shorten it."
            )
        if not 0 <= min(job.source) <= max(job.source) < brought.vocabulary:
            raise Invalid(
                f"The text has token ids outside 0 to {brought.vocabulary - 1}. Tokenise it again."
            )
        if not 0 <= job.least <= job.settings.max_tokens <= brought.answer:
            raise Invalid(
                f"max_tokens is {job.settings.max_tokens} and at least {job.least} are wanted; "
                f"at most {brought.answer} are written. Lower both."
            )
        begun = ChatJob(brought.manner.opening, job.settings)
        return TextState.begin(begun).replayed(mark or (), words)

    def next(self, row: Row) -> Work | None:
        """The whole text, with what was written of it before; then token after token."""
        state: TextState = row.state
        if state.reason is not None:
            return None
        if not state.computed:
            units = len(row.request.payload.source) + state.pending
            return Work(ENCODE, units, units)
        return Work(DECODE, 1, state.left, serial=True, behind=self._behind(row))

    def reserve(self, row: Row, units: int) -> int:
        """Pages for a text and what is written of it, or none; then for `units` more tokens."""
        behind = self._behind(row)
        if row.state.computed:
            return max(self._tables.reserve(row.request.id, behind + units) - behind, 0)
        wanted = behind + row.state.pending
        return units if self._tables.reserve(row.request.id, wanted) == wanted else 0

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        """One forward for all rows, then more for those that write and were granted more."""
        rides = [
            Ride(row, grant, self._tables.table(row.request.id)[self._pages(row) :], self._page)
            for row, grant in zip(rows, grants, strict=True)
        ]
        reads = not rows[0].state.computed  # all or none, since these have another key
        guarded(lambda: self._run(rows, rides, reads))
        found = [ride.outcome() for ride in rides]
        if not reads:
            return found
        return [
            replace(advance, units=grant) if isinstance(advance, Advance) else advance
            for advance, grant in zip(found, grants, strict=True)
        ]

    def park(self, row: Row) -> Mark:
        """Pages are dropped; the tokens are enough to compute them again."""
        self.close(row)
        mark: Mark = row.state.answer.flat()
        return mark

    def close(self, row: Row) -> None:
        """Idempotent."""
        self._tables.release(row.request.id)
        if not self._tables.owners:
            self._tables.check()

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that can be given and pages used."""
        return self._tables.free, self._tables.used

    def _pages(self, row: Row) -> int:
        """How many of a row's pages, the first ones, are its text's."""
        return -(-len(row.request.payload.source) // self._page)

    def _behind(self, row: Row) -> int:
        """Tokens in pages, those of the text in whole ones."""
        computed: int = row.state.computed
        return self._pages(row) * self._page + computed

    @torch.inference_mode()
    def _run(self, rows: Sequence[Row], rides: Sequence[Ride], reads: bool) -> None:
        running = list(zip(rows, rides, strict=True))
        while running:
            self._forward(running, reads)
            running = [] if reads else [pair for pair in running if pair[1].goes_on]

    def _forward(self, running: Sequence[tuple[Row, Ride]], reads: bool) -> None:
        """Compute and choose; a row whose numbers are bad gets an error and no token."""
        brought, words = self._known()
        own = [ride.tokens() for _, ride in running]
        parts = [
            Part(
                len(row.request.payload.source),
                mine,
                ride.state.computed,
                self._tables.table(row.request.id)[: self._pages(row)],
                ride.pages_for(len(mine)),
            )
            for (row, ride), mine in zip(running, own, strict=True)
        ]
        if reads:
            logits = brought.body.begin([row.request.payload.source for row, _ in running], parts)
        else:
            logits = brought.body.go_on(parts)
        never = [
            barred(ride.state, row.request.payload.least, brought.manner) for row, ride in running
        ]
        for (_, ride), mine, token in zip(running, own, choose(logits, never), strict=True):
            ride.advance(len(mine), token, words)

    def _make_room(self, brought: Loaded, device: torch.device) -> None:
        per_page = brought.body.bytes_per_token * self._page
        memory = memory_for_rows(device) if self._memory is None else self._memory
        written = brought.answer + len(brought.manner.opening)
        longest = -(-brought.source // self._page) + -(-written // self._page)
        if memory < longest * per_page:
            raise CarpoolError(
                f"There are {memory:,} bytes for rows; a single one takes {longest * per_page:,}. "
                "Give more, or choose a smaller model."
            )
        count = min(memory // per_page, ROWS * longest)
        guarded(lambda: brought.body.make_pages(count))
        self._tables = PageTables(count, self._page)

    def _card(self, found: models.Found, device: torch.device, dtype: torch.dtype) -> Card:
        brought, _ = self._known()
        per_token = brought.body.bytes_per_token
        memory = self._tables.pages * self._page * per_token
        return Card(
            limits={
                "context": brought.source,
                "answer": brought.answer,
                "opening": len(brought.manner.opening),
                "page": self._page,
            },
            bytes=memory,
            bytes_per_unit=float(per_token),
            target=step_seconds(device),
            held=brought.weights + memory,
            details=found.details(device, dtype) | {"prefix": brought.manner.prefix},
        )

    def _known(self) -> tuple[Loaded, Words]:
        if self._brought is None or self._words is None:
            raise RuntimeError("A row before load. This is a bug.")
        return self._brought, self._words


def barred(state: TextState, least: int, manner: Manner) -> set[int]:
    """Tokens that may not come next: an end that is too early, and what would repeat itself."""
    never = set(manner.ends) if len(state.answer) < least else set[int]()
    size = manner.repeats
    if not size:
        return never
    known = state.known()
    last = known[max(len(known) - size + 1, 0) :]
    if len(last) < size - 1:
        return never
    starts = range(len(known) - size + 1)
    return never | {known[n + size - 1] for n in starts if known[n : n + size - 1] == last}


def choose(logits: Tensor, never: Sequence[set[int]]) -> list[int | None]:
    """The likeliest token of every row [rows, vocabulary], or None where numbers are bad."""
    fine = logits.isfinite().all(-1)
    pairs = [(row, token) for row, tokens in enumerate(never) for token in sorted(tokens)]
    if pairs:
        rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
        logits = logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))
    likeliest = logits.argmax(-1).where(fine, -1)
    return [None if token < 0 else token for token in likeliest.tolist()]
