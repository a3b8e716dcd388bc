"""Who is compared on embeddings, and in which ways each is asked; of settings the best counts."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass

from queueing.process import CALM
from tests.benchmarks.peers.entrants import Entrant, Setting
from tests.benchmarks.peers.homes import long_texts

ROWS = (8, 16, 32, 64)  # of a padded batch
OURS, SORTED, SINGLE = "Carpool, each text a request", "transformers, sorted", "transformers, one"


@dataclass(frozen=True, slots=True)
class Way:
    """One row of the table: an entrant by key, asked like this; the best setting counts."""

    key: str
    name: str
    settings: tuple[Setting, ...]
    note: str = ""
    slow: bool = False  # has every second round only


def embedders() -> list[Entrant]:
    """Each in a process of its own. Threads of ours wait as those of a worker process do; others
    as they come, which is quicker for them on a machine that nobody else uses.
    """
    packages = {"PYTHONPATH": sysconfig.get_paths()["purelib"]}  # torch and transformers of ours
    return [
        Entrant("ours", "Carpool", "", "embed_with_carpool", (), environment=CALM),
        Entrant("transformers", "transformers", "", "embed_with_transformers", ()),
        Entrant("batched", "batched", "batched", "embed_with_batched", (), environment=packages),
        Entrant(
            *("infinity", "infinity-emb", "infinity", "embed_with_infinity", ()),
            model=long_texts,
        ),
    ]


def ways() -> list[Way]:
    """The rows of the table."""

    def batches(way: str) -> tuple[Setting, ...]:
        return tuple({"rows": rows, "way": way} for rows in ROWS)

    nested = "its layers run on nested tensors, so padding is counted where texts come in"
    return [
        Way("ours", OURS, ({"way": "callers"},)),
        Way("ours", "Carpool, one list", ({"way": "list"},)),
        Way("transformers", SORTED, batches("list"), "padded batches, sorted by length"),
        Way("transformers", SINGLE, ({"rows": 1, "way": "list"},), "one by one", slow=True),
        Way("batched", "batched, callers at once", batches("callers"), "padded"),
        Way("batched", "batched, one list", batches("list"), "padded, short texts first"),
        Way("infinity", "infinity-emb, callers at once", batches("callers"), nested),
        Way("infinity", "infinity-emb, one list", batches("list"), nested),
    ]
