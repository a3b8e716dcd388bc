"""The registry of tasks: for each name, where its pipeline and its front are found, as dotted
paths.

Nothing is imported before it is asked for: the application process takes fronts, a worker takes
pipelines, and neither pays for the other. It does not know policies, pages or queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from queueing.work import Policy


@dataclass(frozen=True, slots=True)
class Task:
    """Dotted paths, `module:name`, of things to call without arguments or with settings by name."""

    pipeline: str
    front: str
    policy: Policy = Policy()


TASKS: dict[str, Task] = {
    "chat": Task(
        pipeline="pipelines.text:TextPipeline",
        front="pipelines.fronts:ChatFront",
        policy=Policy(rows=32, units=2048),
    ),
}


def factory(dotted: str) -> Callable[..., Any]:
    """What a dotted path `module:name` names; imports its module."""
    module, _, name = dotted.partition(":")
    if not name:
        raise ValueError(f"{dotted!r} names no factory; write it as module:name.")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
