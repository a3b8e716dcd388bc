"""All tasks as people meet them: fields, words, examples.

Data for pages and endpoints; what the values mean is for the fronts to judge. It knows no page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines import drawing
from pipelines.classify import TEMPLATE
from pipelines.embed import POOLINGS
from pipelines.forms import Field, Form, Lines, Shown
from pipelines.talk import SAMPLING, Question

FIRST = "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty"
LATER = "min_p", "presence_penalty", "frequency_penalty"  # came later, and are last for old callers
MESSAGES = list[dict[str, Any]]
PLACED = "answer", "score", "start", "end"  # of an answer, and columns of a file
FILLED = "filled", "words", "scores"  # columns: the text, then words and their scores alike


def _question(values: Mapping[str, Any]) -> Question:
    sampling = {name: values[name] for name in SAMPLING}
    return Question(values["system"], values["history"], values["message"], sampling)


def _first(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first that came of a list."""
    found: Mapping[str, Any] = next(each for each in result["results"] if each is not None)
    return found


def _classified(seen: Mapping[str, Any]) -> str:
    pairs = zip(seen["texts"], seen["results"], strict=True)
    rows = [(drawing.short(text), one["label"], one["score"]) for text, one in pairs if one]
    return drawing.table(("Text", "Label", "Score"), rows) if len(rows) > 1 else ""


def _vectors(seen: Mapping[str, Any]) -> Sequence[Any]:
    vectors: Sequence[Any] = seen["embeddings"]
    return vectors[: drawing.MOST]


def _filled(seen: Mapping[str, Any]) -> str:
    return drawing.table(("Filled in",), [(one["text"],) for one in seen["results"] if one])


def _labelled(asked: Mapping[str, Any]) -> Sequence[str]:
    return "label", "score", *(f"score {label.strip()}" for label in asked["labels"])


def _scored(one: Mapping[str, Any], asked: Mapping[str, Any]) -> Sequence[Any]:
    scores = [one["scores"][label.strip()] for label in asked["labels"]]
    return one["label"], one["score"], *scores


def _words(one: Mapping[str, Any], _: Mapping[str, Any]) -> Sequence[Any]:
    blanks = [", ".join(each["word"] for each in blank) for blank in one["blanks"]]
    scores = [each["score"] for blank in one["blanks"] for each in blank]
    return one["text"], " | ".join(blanks), scores


def _answered(seen: Mapping[str, Any]) -> str:
    rows = [
        ("" if place else drawing.short(question), each["answer"] or "nothing", each["score"])
        for question, one in zip(seen["questions"], seen["results"], strict=True)
        for place, each in enumerate((one, *one["others"]) if one else ())
    ]
    return drawing.table(("Question", "Answer", "Score"), rows)


CHAT = Form(
    name="chat",
    title="Chat",
    about='Answer a message, streaming all text so far. history: {"role", "content"} before it.',
    fields=(
        Field("message", "text", needed=True),
        Field("history", "text", taken=MESSAGES),
        Field("system", "text", value=""),
        *(
            Field(name, "number", value=SAMPLING[name], taken=type(SAMPLING[name]))
            for name in FIRST
        ),
        Field("seed", "number"),
        Field("stop", "lines"),
        *(Field(name, "number", value=SAMPLING[name], taken=float) for name in LATER),
    ),
    streams=True,
    ask=_question,
)
EMBED = Form(
    name="embed",
    title="Embeddings",
    about="""Turn texts into vectors that are near one another where the texts mean alike.

    Gives {"embeddings": a list of numbers for each text, or null where it was none, "dimensions",
    "tokens", "model", "errors": [{"index", "error"}], "cut": [{"index", "tokens"}], "unknown":
    [{"index", "words"}]}, and before it {"status"} while it waits. A text beyond the model's limit
    is cut, and "cut" says by how many tokens; "unknown" says how many words of a text the model
    does not know. pooling: mean, cls or last; without it, as the model was trained.""",
    intro="How near in meaning are these texts? A line each.",
    verb="Compare",
    fields=(
        Field("texts", "lines", "Texts", needed=True, hint="One text a line"),
        Field("pooling", "choice", "Pooling", choices=("", *POOLINGS)),
        Field("normalise", "switch", "Normalise to length 1", value=True),
    ),
    shows=(
        Shown("drawing", "How alike", lambda seen: drawing.heat(seen, seen["texts"])),
        Shown("data", f"Vectors, of the first {drawing.MOST} texts", _vectors),
    ),
    examples=(
        (
            "A cat sleeps on the sofa.\nThe kitten naps on the couch.\nShares fell in early "
            "trading.\nThe stock market opened lower today.\nBake the bread for forty minutes.",
        ),
    ),
    lines=Lines(
        "texts",
        "vector, a list of numbers",
        lambda _: ("vector",),
        lambda one, _: (one,),
        "embeddings",
    ),
)
CLASSIFY = Form(
    name="classify",
    title="Classify",
    about="""Say which of your own labels fits each text, without training.

    Gives {"results": for each text {"label", "score", "scores": {label: score}}, or null where it
    was none, "tokens", "errors", "cut", "unknown"}. The template makes a sentence of a label, in
    place of {}. multi: several labels may be right, and each is scored by itself.""",
    intro="Labels of your own, no training. One text, or one a line.",
    verb="Classify",
    fields=(
        Field("texts", "lines", "Texts", needed=True, hint="One text a line"),
        Field("labels", "words", "Labels", needed=True, hint="billing, delivery, praise"),
        Field("template", "text", "Template", value=TEMPLATE),
        Field("multi", "switch", "Several may be right", value=False),
    ),
    shows=(
        Shown("bars", "First text", lambda seen: _first(seen)["scores"]),
        Shown("drawing", "All", _classified),
    ),
    examples=(
        ("I was charged twice for my subscription this month.", "billing, delivery, praise"),
        ("The striker scored twice before half time.", "politics, sport, cooking, science"),
    ),
    lines=Lines("texts", "label, score, and a score for each label", _labelled, _scored),
)
ANSWER = Form(
    name="answer",
    title="Answers",
    about="""Answer questions from a document you send: the words that say it, where they stand.

    Gives {"results": for each question {"answer", "score", "start", "end", "others"}, or null where
    it was none, "tokens", "errors", "cut", "unknown", "partly_read"}; start and end are characters
    of the document. "partly_read": [{"start", "end", "cut", "unknown"}], where tokens of it were
    too many for the model, or words are unknown to it.""",
    intro="Paste a document and ask; the words that answer are marked. Nothing is made up.",
    verb="Ask",
    fields=(
        Field("questions", "lines", "Question", needed=True, hint="One question a line"),
        Field("document", "long", "Document", needed=True),
    ),
    shows=(
        Shown("marked", "Where it stands", lambda seen: marked(seen["document"], _first(seen))),
        Shown("drawing", "Likeliest answers", _answered),
    ),
    examples=(
        (
            "When does the library close on Saturday?",
            "The town library opened in 1906. It is open from nine to six on weekdays. On Saturdays"
            " it closes at two in the afternoon. On Sundays it stays shut. Members may borrow eight"
            " books at a time, for three weeks. Late books cost ten cents a day.",
        ),
    ),
    lines=Lines(
        "questions",
        ", ".join(PLACED),
        lambda _: PLACED,
        lambda one, _: [one[name] for name in PLACED],
    ),
)
FILL = Form(
    name="fill",
    title="Fill in",
    about="""Find the words that fit the blanks of texts, written ___ or [MASK].

    Gives {"results": for each text {"text": filled with the best, "blanks": lists of
    {"word", "score"}}, or null where it was none, "errors", "cut", "unknown"}. targets: choose
    among these words only. top: how many words for a blank.""",
    intro="Write ___ where a word is missing; the whole text decides which word fits.",
    verb="Fill in",
    fields=(
        Field("texts", "lines", "Texts", needed=True, hint="One text a line, with ___ in it"),
        Field("targets", "words", "Only these words", hint="dog, cat, horse"),
        Field("top", "number", "Words for a blank", value=5, choices=(1, 20, 1)),
    ),
    shows=(
        Shown("bars", "First blank", lambda seen: _bars(_first(seen)["blanks"][0])),
        Shown("drawing", "All", _filled),
    ),
    examples=(
        ("The ___ barked at the postman all morning.",),
        ("She put the cake in the ___ and set the ___ for an hour.",),
    ),
    lines=Lines("texts", ", ".join(FILLED), lambda _: FILLED, _words),
)
SUMMARISE = Form(
    name="summarise",
    title="Summaries",
    about="Summarise a text, streaming all so far. length: short, medium or long.",
    intro="Paste a text; its summary shows as it is written.",
    verb="Summarise",
    fields=(
        Field("text", "long", "Text", needed=True),
        Field("length", "choice", "Length", value="medium", choices=("short", "medium", "long")),
    ),
    shows=(Shown("text", "Summary", lambda seen: seen["summary"]),),
    examples=(
        (
            "The council met on Monday to decide about the old bridge, which has been closed since"
            " the flood in March. Engineers told the meeting that repairs would take eight months"
            " and cost two million euros, while a new bridge would take three years. Shop owners on"
            " the east bank asked for a ferry until then. After two hours the council voted nine to"
            " four for the repairs, and promised a free ferry from May.",
            "medium",
        ),
    ),
    streams=True,
)
IMAGE = Form(
    name="image",
    title="Pictures",
    about="""Draw pictures of what a prompt says; what is left out is as the model suggests.

    Gives {"status", "progress": 0 to 1 or null} again and again, and at the end {"images": a PNG
    file for each, or null where the model's safety checker hides it, "seeds": the seed of each,
    "cut", "cut_negative": how many tokens of the prompt and of the negative were too many for the
    model, "status"}. negative: what should not be there. seed: the same seed, prompt and settings
    give the same picture; several take the seeds after it. count: 1 to 4 pictures. solver, adapter:
    a refusal names those that there are; weight: how much of the adapter. image: a picture to draw
    over, gradio_client.handle_file("name.png"), and strength, how much of it is drawn anew.""",
    intro="Say what to draw. People join and leave a batch at any step, each with settings of "
    "their own.",
    verb="Draw",
    fields=(
        Field("prompt", "text", "Prompt", needed=True, hint="A red apple with a green leaf"),
        Field("negative", "text", "Negative prompt", hint="What should not be there"),
        Field("width", "number", "Width", choices=(8, 2048, 8)),
        Field("height", "number", "Height", choices=(8, 2048, 8)),
        Field("steps", "number", "Steps", choices=(1, 100, 1)),
        Field("guidance", "number", "Guidance", choices=(0, 20, 0.5), taken=float),
        Field("seed", "number", "Seed", hint="A new one each time"),
        Field("count", "number", "Pictures", value=1, choices=(1, 4, 1)),
        Field("solver", "choice", "Solver"),
        Field("adapter", "choice", "Adapter"),
        Field("weight", "number", "Weight of the adapter", 1.0, choices=(-2, 2, 0.05), taken=float),
        Field("image", "picture", "Draw over a picture"),
        Field("strength", "number", "Drawn anew", 0.8, choices=(0.05, 1, 0.05), taken=float),
    ),
    examples=(
        ("red apple",),
        ("blue heart",),
        ("smiling face with sunglasses",),
        ("yellow duck",),
    ),
    draws=True,
)
FORMS = {form.name: form for form in (CHAT, EMBED, CLASSIFY, ANSWER, FILL, SUMMARISE, IMAGE)}


def _bars(words: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {each["word"]: each["score"] for each in words}


def marked(document: str, answer: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """A document in pieces, the answer's with a name."""
    begin, end = answer["start"], answer["end"]
    pieces = [(document[:begin], None), (document[begin:end], "answer"), (document[end:], None)]
    return [(piece, name) for piece, name in pieces if piece]
