"""Lists of texts through an encoder: one-shot, no memory between calls, no padding where the model
allows it.

A row is a list of items. A call computes whole items of many rows, as many as the engine grants
tokens for; what came of them is the row's mark, so that it continues anywhere. It does not know who
asks or what the results are for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from pipelines import models
from pipelines.device import guarded, settle, step_seconds
from pipelines.encoder_loading import Loaded, bring
from pipelines.oneshot import Item, ItemsJob, ItemsState, work
from pipelines.readings import READINGS, finite
from queueing.work import Advance, Card, Invalid, Key, Mark, Output, Request, Row, Tell, Work


class EncodePipeline:
    """One encoder with the head that a task asks for, until `load` brings it."""

    def __init__(
        self,
        task: str = "embed",  # of READINGS
        model: str | None = None,  # a folder or a name on the Hub; else the task's setting
        device: str = "auto",
        dtype: str | None = None,  # else CARPOOL_DTYPE, else what the hardware computes in
        threads: int | None = None,  # of torch on a host; None means one a core
    ) -> None:
        self._task = task
        self._wanted = model or os.environ.get(models.SETTINGS[task]) or None
        self._device = device
        self._dtype = dtype or os.environ.get("CARPOOL_DTYPE") or "auto"
        self._threads = threads
        self._reading: Any = READINGS[task]()
        self._brought: Loaded | None = None

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        """Any number of rows."""
        return None

    def load(self, tell: Tell) -> Card:
        """Prepare, load and check the model."""
        device, dtype = settle(self._device, self._dtype, self._threads)
        found = models.find_to_load(self._wanted, self._task, tell)
        brought = guarded(lambda: bring(found.folder, self._reading, device, dtype))
        self._brought = brought
        tell(1.0, f"{found.name} is ready")
        return Card(
            limits={"context": brought.context},
            details={
                **found.details(device, dtype),
                "path": brought.path,
                "why": brought.why,
                **brought.details,
            },
            target=step_seconds(device),
            held=brought.held,
        )

    def unload(self) -> None:
        """Free the model."""
        if self._brought is not None:
            self._brought.let_go()
        self._brought = None

    def open(self, request: Request, mark: Mark | None = None) -> ItemsState:
        """A mark has the results of the first items."""
        job: ItemsJob = request.payload
        longest = max((len(item.tokens) for item in job.items), default=0)
        least = min((len(item.tokens) for item in job.items), default=0)
        context = self._known().context
        if not 1 <= least <= longest <= context:
            raise Invalid(f"Items must have 1 to {context:,} tokens. Tokenise them again.")
        vocabulary = self._known().vocabulary
        if not all(0 <= min(i.tokens) <= max(i.tokens) < vocabulary for i in job.items):
            raise Invalid(f"There are token ids outside 0 to {vocabulary - 1}. Tokenise again.")
        return ItemsState(tuple(mark or ()))

    def next(self, row: Row) -> Work | None:
        """The items that are left, in any parts."""
        left = row.request.payload.items[len(row.state.results) :]
        return work(row.request.plan[0].key, left) if left else None

    def reserve(self, row: Row, units: int) -> int:
        """Nothing is kept in the model, so there is always room."""
        return units

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        """One forward for all items that fit the grants."""
        parts = [_granted(row, grant) for row, grant in zip(rows, grants, strict=True)]
        results = guarded(lambda: self._run([item for part in parts for item in part]))
        source = iter(results)
        return [
            _outcome(row, part, tuple(islice(source, len(part))))
            for row, part in zip(rows, parts, strict=True)
        ]

    def park(self, row: Row) -> Mark:
        """What came of it so far."""
        mark: Mark = row.state.results
        return mark

    def close(self, row: Row) -> None:
        """Nothing is held."""

    @torch.inference_mode()
    def _run(self, items: Sequence[Item]) -> list[Any]:
        found = self._known().encoder.run(items)
        return [
            self._reading.result(item, numbers) for item, numbers in zip(items, found, strict=True)
        ]

    def _known(self) -> Loaded:
        if self._brought is None:
            raise RuntimeError("A row before load. This is a bug.")
        return self._brought


def _granted(row: Row, grant: int) -> list[Item]:
    """The next items of a row, one at least, as long as they fit."""
    items: Sequence[Item] = row.request.payload.items
    first = place = len(row.state.results)
    left = grant
    while place < len(items) and (place == first or len(items[place].tokens) <= left):
        left -= len(items[place].tokens)
        place += 1
    return list(items[first:place])


def _outcome(row: Row, items: Sequence[Item], results: tuple[Any, ...]) -> Advance | Exception:
    """What one call made of a row."""
    if not all(finite(result) for result in results):
        return ArithmeticError("The model's numbers for this row are not finite.")
    state: ItemsState = row.state.after(results)
    done, count = len(state.results), len(row.request.payload.items)
    output = Output(progress=done / count, result=state.results if done == count else None)
    units = sum(len(item.tokens) for item in items)
    # The last results travel once: with all others, as the result.
    return Advance(state, units, output, results if done < count else ())
