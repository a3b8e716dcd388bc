"""What becomes of a model, as the application sees it, by what its worker says.

It does not know workers or pages.
"""

from __future__ import annotations

from collections.abc import Mapping

from queueing.messages import Loaded, Loading
from queueing.work import Policy, TaskState


def after(state: TaskState, message: Loading | Loaded) -> TaskState:
    """A card stays known while its model is away; one that was put away comes when asked for."""
    if isinstance(message, Loading):
        away = state.card is not None
        return TaskState(state.card, message.fraction, message.text, away=away)
    text = "" if message.card else "Not in memory; it is loaded when somebody asks."
    known = message.card or state.card
    return TaskState(known, 1.0, text, message.error, known is not message.card)


def joined(states: Mapping[str, TaskState], policies: Mapping[str, Policy]) -> dict[str, TaskState]:
    """When a worker is there: what is not loaded before anybody asks says so."""
    waits = TaskState(text="Loaded when somebody asks.")
    return {
        task: state if state.card or policies[task].preload else waits
        for task, state in states.items()
    }
