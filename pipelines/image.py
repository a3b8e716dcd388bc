"""Pictures by diffusion, which people join and leave at every step: encode, denoise, decode.

A denoise call is one forward for all rows of equal size, whatever their steps, guidance, seeds,
solvers and adapters. A row is a function of its job and of its steps, and continues anywhere from
its mark. It does not know who asks, who else rides, or what time it is.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelines import families, lora_files, models, parts
from pipelines.autoencoder import Autoencoder
from pipelines.device import guarded, settle, step_seconds
from pipelines.drawn import Adapter, Facts, ImageJob, check, told
from pipelines.lora import Adapters
from pipelines.readers import Asked, Condition, Read, Reader, Remembering
from pipelines.safety import Checker
from pipelines.sketch import Sketch
from pipelines.solvers import Solvers, generators
from queueing.work import Advance, Card, CarpoolError, Key, Mark, Output, Request, Row, Tell, Work

EXACT = 8  # rows of every call in exact mode: the most that one request takes
_BAD = (
    "The numbers of this picture are not finite, so there is nothing to show. Try less guidance, "
    "another solver, or another prompt."
)


class Family(Protocol):
    """A kind of model that draws."""

    facts: Facts
    denoiser: Any
    reader: Reader
    autoencoder: Autoencoder
    solvers: Solvers

    def length(self, height: int, width: int) -> int:
        """Of a picture in tokens, for solvers that look at it."""
        ...

    def condition(self, job: ImageJob, read: Read) -> Condition:
        """A text of a job, and what else the denoiser is told of the picture."""
        ...

    def predict(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """One forward, every row at its own time and under its own conditions."""
        ...


class ImagePipeline:
    """A few settings, whose defaults suit most machines, until `load` brings the model."""

    def __init__(
        self,
        model: str | None = None,  # a folder or a name on the Hub; else CARPOOL_IMAGE_MODEL
        device: str = "auto",
        dtype: str | None = None,  # else CARPOOL_DTYPE, else what the hardware computes in
        threads: int | None = None,  # of torch on a host; None means one a core
        exact: bool | None = None,  # every call has as many rows; None: as CARPOOL_EXACT says
        adapters: Mapping[str, Path] | None = None,  # by name; else the files in CARPOOL_LORA
        words: str | None = None,  # the folder of the encoder that the emoji model reads with
    ) -> None:
        self._wanted = model or os.environ.get(models.SETTINGS["image"]) or None
        self._device = device
        self._dtype = dtype or os.environ.get("CARPOOL_DTYPE") or "auto"
        self._threads = threads
        said = os.environ.get("CARPOOL_EXACT", "").lower() in ("1", "true", "yes")
        self._rows = EXACT if (said if exact is None else exact) else None
        self._files = adapters
        self._words = words
        self._family: Family | None = None

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        """One, in exact mode; pictures are decoded one by one anyway."""
        padded = self._rows and isinstance(key, tuple) and key[0] != "decode"
        return (self._rows,) if padded and self._rows else None

    def load(self, tell: Tell) -> Card:
        """Find and load the model."""
        device, dtype = settle(self._device, self._dtype, self._threads)
        found = models.find_to_load(self._wanted, "image", tell)
        family: Family = guarded(
            lambda: families.bring(found.folder, dtype, device, lambda: self._encoder(tell))
        )
        self._adapters = self._adapted(family)
        self._reader = Remembering(family.reader, self._adapters.rows, self._rows)
        has_checker = parts.has(found.folder, "safety_checker")
        self._checker = Checker(found.folder, device) if has_checker else None
        with torch.inference_mode():
            guarded(family.autoencoder.learn)
        self._on = device
        self._family = family
        tell(1.0, f"{found.name} is ready")
        details = {
            **found.details(device, dtype),
            **told(family.facts),
            "solvers": json.dumps(family.solvers.names),
            "adapters": json.dumps(self._adapters.names),
            "checked": "yes" if has_checker else "no",
        }
        modules = [family.denoiser, family.autoencoder.model, *family.reader.models]
        held = sum(each.nbytes for m in modules for each in (*m.parameters(), *m.buffers()))
        held += self._adapters.bytes
        return Card(details=details, target=step_seconds(device), held=held)

    def unload(self) -> None:
        """Free the model and all that was read."""
        if self._family is not None:
            self._adapters.close()
            del self._adapters, self._reader, self._checker
        self._family = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def open(self, request: Request, mark: Mark | None = None) -> Sketch:
        """Nothing is computed; a mark has the latents after some steps."""
        job: ImageJob = request.payload
        family = self._known()
        check(job, family.facts, self._adapters.names)
        length = family.length(job.height, job.width)
        solver = family.solvers.begin(job.solver, job.steps, job.begin, length)
        return Sketch.opened(job, solver, mark or ())

    def next(self, row: Row) -> Work | None:
        """Encode, then steps, then pictures."""
        sketch: Sketch = row.state
        return sketch.next()

    def reserve(self, row: Row, units: int) -> int:
        """A state holds all its memory; how many rows fit is learned."""
        return units

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        """One call of one kind."""
        return guarded(lambda: self._step(rows, grants))

    def park(self, row: Row) -> Mark:
        """Steps and pictures are kept; what was read is read again."""
        sketch: Sketch = row.state
        return sketch.mark()

    def close(self, row: Row) -> None:
        """A state goes with its row."""

    @torch.inference_mode()
    def _step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        work = self.next(rows[0])
        if work is None:
            raise RuntimeError("A finished row in a call. This is a bug.")
        kind = work.key[0]  # type: ignore[index]
        if kind == "encode":
            return self._encode(rows)
        return (self._denoise if kind == "denoise" else self._decode)(rows, grants)

    def _encode(self, rows: Sequence[Row]) -> list[Advance | Exception]:
        """Read all texts together, and begin what has not been begun."""
        family = self._known()
        jobs: list[ImageJob] = [row.request.payload for row in rows]
        reads = iter(self._reader.read([asked for job in jobs for asked in self._asked(job)]))
        found: list[Advance | Exception] = []
        for row, job in zip(rows, jobs, strict=True):
            own = [next(reads) for _ in self._asked(job)]
            latents = self._begun(row.state) if row.state.latents is None else row.state.latents
            sketch = replace(
                row.state,
                latents=latents.to(self._on),
                conditions=tuple(family.condition(job, read) for read in own),
                cut=(own[-1].cut, own[0].cut if job.guided else 0),
            )
            found.append(Advance(sketch, 1, Output(progress=sketch.progress)))
        return found

    def _asked(self, job: ImageJob) -> list[Asked]:
        """What is read for a job, in the order of its conditions."""
        adapter = job.adapter if job.adapter and job.adapter[0] in self._adapters.reading else None
        texts = [job.negative, job.prompt] if job.guided else [job.prompt]
        return [(text, adapter) for text in texts]

    def _begun(self, sketch: Sketch) -> Tensor:
        """Noise, over a picture where there is one: [count, channels, height, width] on the
        host.
        """
        job, autoencoder = sketch.job, self._known().autoencoder
        sources = generators(job.seeds, 0)
        under = None
        if job.image is not None:
            image = job.image
            under = torch.cat([autoencoder.encode(image, source) for source in sources]).cpu()
        sides = job.height // autoencoder.factor, job.width // autoencoder.factor
        shape = (1, autoencoder.channels, *sides)
        noise = torch.cat([torch.randn(shape, generator=source) for source in sources])
        if under is None:
            return sketch.solver.begun(noise)
        return sketch.solver.noised(under, noise, sketch.step)

    def _denoise(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance | Exception]:
        """As many forwards as the largest grant; a row leaves after its own, or when cancelled."""
        sketches: list[Sketch] = [row.state for row in rows]
        for turn in range(max(grants)):
            going = [
                place
                for place, row in enumerate(rows)
                if turn < grants[place] and not (turn and row.cancelled)
            ]
            if not going:
                break
            ahead = self._forward([sketches[place] for place in going])
            for place, sketch in zip(going, ahead, strict=True):
                sketches[place] = sketch
        finite = torch.stack([torch.isfinite(each.known()).all() for each in sketches]).tolist()
        every = self._known().autoencoder.every
        due = [
            place
            for place, row in enumerate(rows)
            if finite[place] and sketches[place].due(row.state.done, every)
        ]
        previews = dict(zip(due, self._previews([sketches[n] for n in due]), strict=True))
        return [
            _advanced(row, sketches[place], previews.get(place))
            if finite[place]
            else CarpoolError(_BAD)
            for place, row in enumerate(rows)
        ]

    def _forward(self, sketches: Sequence[Sketch]) -> list[Sketch]:
        """One denoiser forward for all."""
        weights = [each.job.weight for each in sketches]
        times = [each.solver.time(each.step) for each in sketches for _ in range(each.job.weight)]
        predicted = self._predict(
            torch.cat([each.sample() for each in sketches]),
            torch.tensor(times, device=self._on),  # [rows]
            [condition for each in sketches for condition in each.told()],
            [each.job.adapter for each in sketches for _ in range(each.job.weight)],
        )
        parts = zip(sketches, torch.split(predicted, weights), strict=True)
        return [sketch.advanced(part) for sketch, part in parts]

    def _predict(
        self,
        latents: Tensor,
        times: Tensor,
        conditions: Sequence[Condition],
        adapters: Sequence[Adapter | None],
    ) -> Tensor:
        """In exact mode always of so many rows; those that are added repeat the first."""
        count, size = len(conditions), self._rows or len(conditions)
        parts = []
        for start in range(0, count, size):
            places = list(range(start, min(start + size, count)))
            spare = size - len(places)
            rows = places + [places[0]] * spare
            condition = {
                name: torch.stack([conditions[row][name] for row in rows]) for name in conditions[0]
            }
            with self._adapters.rows([adapters[row] for row in places] + [None] * spare):
                found = self._known().predict(latents[rows], times[rows], condition)
            parts.append(found[: len(places)])
        return torch.cat(parts)

    def _previews(self, sketches: Sequence[Sketch]) -> list[tuple[Any, ...]]:
        """For every row the small pictures that it aims at."""
        if not sketches:
            return []
        aims = torch.cat([each.known() if each.aim is None else each.aim for each in sketches])
        pictures = iter(self._known().autoencoder.rough(aims))
        return [tuple(next(pictures) for _ in range(each.job.count)) for each in sketches]

    def _decode(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance | Exception]:
        """Picture after picture, so that memory is needed for one."""
        return [self._painted(row, grant) for row, grant in zip(rows, grants, strict=True)]

    def _painted(self, row: Row, grant: int) -> Advance | Exception:
        sketch: Sketch = row.state
        autoencoder = self._known().autoencoder
        for turn in range(grant):
            if turn and row.cancelled:
                break
            place = len(sketch.images)
            latents = sketch.known()[place : place + 1].to(self._on)
            try:
                image = autoencoder.decode(latents)
            except ArithmeticError:
                return CarpoolError(_BAD)
            hidden = self._checker is not None and self._checker.hides(image)
            sketch = sketch.painted(None if hidden else image)
        output = Output(progress=sketch.progress, result=sketch.result())
        return Advance(sketch, len(sketch.images) - len(row.state.images), output)

    def _adapted(self, family: Family) -> Adapters:
        """A model with the adapters that settings name; raises Unprepared for what fits none."""
        files = lora_files.named(os.environ) if self._files is None else self._files
        adapters = Adapters(family.denoiser, family.reader.models, exact=self._rows is not None)
        for name, path in files.items():
            guarded(partial(adapters.load, name, path))
        return adapters

    def _encoder(self, tell: Tell) -> Any:
        return models.find(self._words, "embed", tell).folder

    def _known(self) -> Family:
        if self._family is None:
            raise RuntimeError("A row before load. This is a bug.")
        return self._family


def _advanced(row: Row, sketch: Sketch, preview: Any) -> Advance:
    output = Output(preview=preview, progress=sketch.progress)
    return Advance(sketch, sketch.done - row.state.done, output)
