"""On which path a model would run here, and why: `python -m pipelines.judge NAME`.

It loads the model exactly as a worker does, self-check included, and tells what the card says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pipelines.text import TextPipeline
from queueing.work import Card, CarpoolError


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when it would run, 1 with a sentence when not."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.judge", description=__doc__)
    parser.add_argument("model", help="a folder, or a name on the Hub")
    pipeline = TextPipeline(parser.parse_args(arguments).model)
    try:
        card = pipeline.load(lambda fraction, text: None)
    except CarpoolError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(_told(card))
    pipeline.unload()
    return 0


def _told(card: Card) -> str:
    """The card in lines."""
    limits, details = card.limits, card.details
    row = (limits["context"] + limits["fixed"]) * card.bytes_per_unit
    lines = {
        "model": details["model"],
        "path": details["path"],
        "because": details["why"],
        "computes in": f"{details['dtype']} on {details['device']}",
        "context": f"{limits['context']:,} tokens",
        "a full row": f"{row / 1e6:,.1f} MB, of {card.bytes / 1e6:,.0f} MB for all rows",
    }
    return "".join(f"{name + ':':<13}{text}\n" for name, text in lines.items() if text)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    raise SystemExit(main())
