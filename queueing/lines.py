"""What people read: a sentence for every state of a model and of a request, and its dot on a page.

It changes nothing and knows no transport.
"""

from __future__ import annotations

import html

from queueing.bulk import Progress
from queueing.forecast import Place
from queueing.stream import Stream
from queueing.work import Status, TaskState


def loading_line(state: TaskState, then: str = "Your turn comes right after") -> str:
    what = state.text.rstrip(". ") or "starting"
    return f"The model is loading, {state.fraction:.0%}: {what}. {then}"


def restarting_line(state: TaskState, stream: Stream) -> str:
    """The worker died under a request that was in: nothing of it is lost."""
    if state.error:
        return f"The model could not be loaded again. {state.error}"
    begun = "Your answer continues after that" if stream.text else "Your turn comes right after"
    return loading_line(state, begun)


def waiting_line(place: Place | None) -> str:
    if place is None:
        return "About to start"
    where = "Next in line" if place.position == 1 else f"Number {place.position} in line"
    return where if place.seconds is None else f"{where}, about {spell(place.seconds)} to go"


def running_line(stream: Stream) -> str:
    if stream.status is Status.PARKED:
        return "Paused while others ride, continues soon"
    drawn = stream.preview is not None
    doing = "Writing" if stream.text else "Drawing" if drawn else "Reading"
    if stream.progress is not None and not stream.text:
        doing = f"{doing}, {stream.progress:.0%}"
    if stream.riders == 0:
        return doing
    return f"{doing}, {'alone' if stream.riders == 1 else f'{stream.riders} share'} in this batch"


def carrying_line(progress: Progress) -> str:
    """Of a file: how many lines are done and how many of them failed, and what is left."""
    done, total = progress.done, progress.total
    where = f"{done:,} of {total:,} lines" if done < total else lined(total)
    if progress.failed:
        where += f", {progress.failed:,} with an error"
    if progress.status is Status.FINISHED:
        return f"{where}, in {spell(progress.seconds)}"
    if progress.status is not Status.RUNNING:
        why = "" if progress.status is Status.CANCELLED else f". {progress.error}"
        return f"Stopped after {where}{why}"
    if progress.eta is None or not done:
        return f"{where} so far; those who wait for an answer come first"
    return f"{where}, about {spell(progress.eta)} left"


def lined(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines:,} lines"


def bar(fraction: float) -> str:
    """How much is done, drawn; HTML in one line."""
    return f'<div class="bar"><b style="width: {fraction:.0%}"></b></div>'


def spell(seconds: float) -> str:
    """A duration in the words of a waiting room."""
    if seconds < 1:
        return "a second"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def dot(phase: str, line: str, why: str = "") -> str:
    """A sentence behind a dot whose colour says the same at a glance; HTML in one line. `why` is
    shown to whoever points at it.
    """
    line, why = (html.escape(" ".join(text.split())) for text in (line, why))
    title = f' title="{why}"' if why else ""
    return f'<p class="{phase}" role="status"{title}><i></i><span>{line}</span></p>'


def badge(state: TaskState) -> str:
    """The model's name when it is there, else what is being done about it."""
    if state.card is not None and state.away and state.fraction == 1.0:
        return dot("idle", f"{state.card.details.get('model', 'The model')} rests", state.text)
    if state.card is not None and not state.away:
        said = state.card.details
        name, why = said.get("model", "The model is there"), said.get("why", "")
        return dot("ready", f"{name}, {said.get('path')}" if why else name, why)
    if state.error:
        return dot("failed", state.error)
    line = f"{state.text.rstrip('.')}, {state.fraction:.0%}"
    return dot("loading", line) + bar(state.fraction)
