"""Attention over paged keys and values, and the bridge to the PyPI package of the same name.

transformers imports PyPI `kernels` as soon as it is installed, and this folder would shadow it:
importing a Llama model then dies. So the other package, when there is one on the path, is continued
in here: its names are re-exported and its submodules found. Without it nothing happens. It does not
know any model.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _elsewhere() -> ModuleSpec | None:
    """The spec of another package called `kernels`, in any folder of the path that is not ours."""
    folders = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE.parent]
    spec = PathFinder.find_spec(__name__, folders)
    return spec if spec is not None and spec.origin is not None else None


def _bridge(spec: ModuleSpec) -> None:
    """Run the other package's code as ours; our own folder is searched first for submodules."""
    if spec.submodule_search_locations is None or spec.loader is None:
        return
    __path__.extend(spec.submodule_search_locations)
    spec.loader.exec_module(sys.modules[__name__])


_other = _elsewhere()
if _other is not None:
    _bridge(_other)
