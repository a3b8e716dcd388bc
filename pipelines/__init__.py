"""The registry: which models run in a worker, and which tasks people may ask of them, as dotted
paths.

Nothing is imported before it is asked for: the application process takes fronts, a worker takes
pipelines, and neither pays for the other. Several tasks may share a model, and with it their calls.
It does not know pages or queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeAlias

from queueing.work import Policy

Factory: TypeAlias = "str | tuple[str, Mapping[str, Any]]"  # a path, or one and its arguments


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline, `module:name` of something to call, and how it is batched."""

    pipeline: Factory
    policy: Policy = Policy()


@dataclass(frozen=True, slots=True)
class Tables:
    """Models by name, and for each task its front, which knows the name of its model."""

    models: dict[str, Model] = field(default_factory=dict)
    fronts: dict[str, str] = field(default_factory=dict)


CHAT = Model("pipelines.text:TextPipeline", Policy(rows=32, units=2048))
ITEMS = Policy(rows=256, units=16_384)  # of tokens of texts that are computed in one piece
SUMMARIES = Policy(rows=32, units=4096, preload=False)  # of tokens: of texts, or one a row
IMAGES = Model("pipelines.image:ImagePipeline", Policy(rows=32, units=1024, preload=False))
FRONTS = {
    "chat": "pipelines.fronts:ChatFront",
    "embed": "pipelines.embed:EmbedFront",
    "classify": "pipelines.classify:ClassifyFront",
    "answer": "pipelines.answer:AnswerFront",
    "fill": "pipelines.fill:FillFront",
    "summarise": "pipelines.summarise:SummariseFront",
    "image": "pipelines.image_front:ImageFront",
}


def encodes(task: str, preload: bool = True) -> Model:
    """An encoder with a task's head."""
    policy = replace(ITEMS, preload=preload)
    return Model(("pipelines.encode:EncodePipeline", {"task": task}), policy)


OWN: dict[str, tuple[str, Model]] = {  # of tasks to which a setting gives a model of their own
    "classify": ("pipelines.entail:EntailFront", encodes("classify", preload=False)),
    "answer": ("pipelines.extract:ExtractFront", encodes("answer", preload=False)),
    "fill": ("pipelines.mask:MaskFront", encodes("fill", preload=False)),
    "summarise": (
        "pipelines.summary:SummaryFront",
        Model("pipelines.seq2seq:Seq2SeqPipeline", SUMMARIES),
    ),
}


def served(own: Mapping[str, str]) -> Tables:
    """What is served; `own` names the tasks for which a setting names a model."""
    made = Tables({"chat": CHAT, "embed": encodes("embed"), "image": IMAGES}, dict(FRONTS))
    for task in own.keys() & OWN.keys():
        made.fronts[task], made.models[task] = OWN[task]
    return made


FAKE = Tables({"chat": Model("pipelines.fake:FakePipeline")}, {"chat": "pipelines.fake:ChatFront"})


def factory(dotted: str) -> Callable[..., Any]:
    """What a dotted path `module:name` names; imports its module."""
    module, _, name = dotted.partition(":")
    if not name:
        raise ValueError(f"{dotted!r} names no factory; write it as module:name.")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
