"""The queue and the app's side of the pipelines stand alone: no torch, no gradio, no transformers.

Each program runs in a process of its own in which the heavy packages, and every module of this
house that needs torch, cannot be imported. It knows nothing of what the modules do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ["torch", "triton", "transformers", "diffusers", "accelerate", "gradio", "spaces"]
NEEDS_TORCH = re.compile(r"^\s*(?:import|from) (?:torch|transformers|diffusers)\b", re.MULTILINE)
SIMULATE = """
from tests.worlds import chaos
made = chaos(5, events=400)
made.verdict()
assert made.simulation.events >= 400
"""


def house(room: str) -> dict[str, Path]:
    """The modules of a room."""
    paths = sorted((ROOT / room).glob("*.py"))
    return {f"{room}.{path.stem}": path for path in paths if path.stem != "__init__"}


def blocked() -> list[str]:
    """Packages that are not to be imported, and our own modules that need them."""
    ours = [n for n, path in house("pipelines").items() if NEEDS_TORCH.search(path.read_text())]
    return [*HEAVY, "kernels", *ours]


def must_run(modules: list[str], more: str = "") -> None:
    """Import modules, and do more, where nothing heavy can be had."""
    program = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({blocked()}))\n"
        f"for name in {modules}: importlib.import_module(name)\n{more}\n"
        f"assert not any(sys.modules[name] for name in {blocked()})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_the_whole_queue_imports_and_simulates_without_torch_and_gradio() -> None:
    must_run(list(house("queueing")), SIMULATE)


@pytest.mark.parametrize("name", ["pipelines", "pipelines.fronts", "pipelines.fake"])
def test_the_app_side_of_the_pipelines_needs_nothing_heavy(name: str) -> None:
    must_run([name])


def test_what_needs_torch_is_known_and_really_blocked() -> None:
    assert "pipelines.text" in blocked()
    with pytest.raises(AssertionError, match="import of pipelines.text halted"):
        must_run(["pipelines.text"])
