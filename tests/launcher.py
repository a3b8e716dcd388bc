"""Runs the application as `python app.py` does, and tells a test what it asks for.

On SIGUSR1 it writes the names of all imported modules to the file named by REPORT. SLOW_LOAD makes
the pretended model take that many seconds to load. LISTS is how many seconds a call takes of a
pretended model for lists of texts, which is there only then.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import app
from pipelines import Model
from queueing.work import Policy


def report(*_: object) -> None:
    draft = Path(os.environ["REPORT"] + ".draft")
    draft.write_text("\n".join(sys.modules))
    draft.rename(os.environ["REPORT"])


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, report)
    if "SLOW_LOAD" in os.environ:
        app.FAKE.models["chat"] = Model("tests.slow:slow_pipeline")
    if "LISTS" in os.environ:
        knobs = {"forward": float(os.environ["LISTS"])}
        app.FAKE.models["lists"] = Model(("tests.lists:ListPipeline", knobs), Policy(units=2000))
        for task in ("embed", "classify", "fill"):
            app.FAKE.fronts[task] = f"tests.list_fronts:{task.title()}Front"
    sys.stdout.write("Imported\n")
    sys.stdout.flush()
    app.main()
