"""Low-rank adapters of a diffusion model: several are loaded, and every row of a call has its own
with a weight of its own, or none.

What an adapter adds is added behind the layers it was made for, to the rows that want it, by hooks;
weights are never touched. It does not know what a row draws, or who asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from pipelines import lora_names
from pipelines.drawn import Adapter
from pipelines.fetch import Unprepared
from pipelines.lora_weights import LowRank, Part, read
from queueing.work import Invalid


@dataclass(frozen=True, slots=True)
class Run:
    """Rows beside one another that want the same."""

    rows: slice
    name: str
    weight: float


@dataclass(slots=True)
class Call:
    """The call that is being made: how many rows it has, and which want something."""

    count: int = 0
    runs: Sequence[Run] = ()


@dataclass(slots=True, eq=False)
class Changed:
    """A hook on a layer, with the layer's changes by adapter; adds what the call wants of them."""

    name: str
    call: Call
    changes: dict[str, LowRank] = field(default_factory=dict)

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if not self.call.runs:
            return
        rows: Tensor = inputs[0]  # [rows, ...]
        if len(rows) != self.call.count:
            raise RuntimeError(
                f"{self.name} has {len(rows)} rows in a call in which adapters were named for "
                f"{self.call.count}. This is a bug."
            )
        for run in self.call.runs:
            change = self.changes.get(run.name)
            if change is not None:
                added = _through(layer, change, rows[run.rows])
                output[run.rows].add_(added, alpha=run.weight * change.scale)


def _through(layer: nn.Module, change: LowRank, rows: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        # mypy knows the paddings of conv2d as two functions, of which neither takes both.
        padding: Any = layer.padding
        narrow = conv2d(rows, change.down, None, layer.stride, padding, layer.dilation)
        return conv2d(narrow, change.up)
    return linear(linear(rows, change.down), change.up)


class Adapters:
    """Those of a denoiser and its text encoders, which stay where they are while it has any.

    `exact` computes every row's change by itself, so that its bits do not depend on who else rides;
    otherwise neighbours that want the same are computed together.
    """

    def __init__(
        self, model: nn.Module, text_encoders: Sequence[nn.Module] = (), exact: bool = False
    ) -> None:
        self._parts = [
            Part(model, lora_names.denoiser),
            *(Part(each, lora_names.text_encoder) for each in text_encoders),
        ]
        self._exact = exact
        self._call = Call()
        self._bytes: dict[str, int] = {}
        self._reading: set[str] = set()
        self._hooks: dict[nn.Module, Changed] = {}
        self._handles: list[Any] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are loaded."""
        return tuple(self._bytes)

    @property
    def bytes(self) -> int:
        """That all of them hold on the device."""
        return sum(self._bytes.values())

    @property
    def reading(self) -> frozenset[str]:
        """Those that change how texts are read: what is kept of a text is another with each."""
        return frozenset(self._reading)

    def load(self, name: str, path: Path) -> None:
        """An adapter from its file, whole or not at all; raises Unprepared."""
        if name in self._bytes:
            raise Unprepared(f"There is an adapter {name} already; give {path.name} another name.")
        found = read(path, self._parts)
        for layer, change in found.changes.items():
            if layer not in self._hooks:
                self._hooks[layer] = Changed(found.names[layer], self._call)
                self._handles.append(layer.register_forward_hook(self._hooks[layer]))
            self._hooks[layer].changes[name] = change
        self._bytes[name] = found.bytes
        if found.reads:
            self._reading.add(name)

    def check(self, adapter: Adapter | None) -> None:
        """Raises Invalid for one that is not loaded, or a weight that is no number."""
        if adapter is None:
            return
        name, weight = adapter
        if name not in self._bytes:
            known = ", ".join(self._bytes) or "none"
            raise Invalid(f"adapter is {name!r}; there are: {known}.")
        if not math.isfinite(weight):
            raise Invalid(f"The weight of adapter {name} is {weight}; give a finite number.")

    @contextmanager
    def rows(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Around a call of the denoiser or of a text encoder: what each of its rows wants.

        A weight of 0 is the same as none, to the bit. Rows that want the same cost least beside one
        another. Raises Invalid, see `check`.
        """
        for adapter in adapters:
            self.check(adapter)
        self._call.count, self._call.runs = len(adapters), self._runs(adapters)
        try:
            yield
        finally:
            self._call.count, self._call.runs = 0, ()

    def close(self) -> None:
        """Take all of them off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._bytes.clear()
        self._reading.clear()

    def _runs(self, adapters: Sequence[Adapter | None]) -> tuple[Run, ...]:
        runs, start = [], 0
        for adapter, group in groupby(adapters):
            end = start + len(list(group))
            if adapter is not None and adapter[1] != 0:
                step = 1 if self._exact else end - start
                parts = [slice(each, each + step) for each in range(start, end, step)]
                runs += [Run(part, *adapter) for part in parts]
            start = end
        return tuple(runs)
