"""Our folder `kernels` beside the PyPI package of that name (a stand-in here), and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What transformers 5.24 imports from it, which is what dies when a folder shadows the package.
CLASSES = (
    "CUDAProperties Device KernelizeFallback LayerRepository "
    "LocalLayerRepository Mode ROCMProperties"
).split()
FUNCTIONS = (
    "register_kernel_mapping replace_kernel_forward_from_hub "
    "use_kernel_mapping get_kernel kernelize"
).split()
PROGRAM = """
import json, kernels, kernels.attention
from transformers.models.llama import modeling_llama
from transformers.utils.import_utils import is_kernels_available
found = {"available": is_kernels_available(), "ours": kernels.attention.__file__}
found["get"] = hasattr(kernels, "get_kernel")
try:
    from kernels.layer import depth
    found["layer"] = depth
except ImportError:
    found["layer"] = None
print(json.dumps(found))
"""


def start(*paths: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A distribution called kernels, of a version that transformers accepts."""
    package, info = tmp_path / "kernels", tmp_path / "kernels-0.18.2.dist-info"
    (package / "layer").mkdir(parents=True)
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    info.joinpath("RECORD").write_text("kernels/__init__.py,,\n")
    lines = [
        "from kernels.layer import depth",
        "from .layer import depth as again",
        "__version__ = '0.18.2'",
    ]
    lines += [f"class {name}: pass" for name in CLASSES]
    lines += [f"def {name}(*args, **fields): return None" for name in FUNCTIONS]
    lines += ["def use_kernel_forward_from_hub(name): return lambda made: made"]
    lines += ["def use_kernelized_func(*names): return lambda made: made"]
    package.joinpath("__init__.py").write_text("\n".join(lines) + "\n")
    package.joinpath("layer", "__init__.py").write_text("depth = 3\n")
    return tmp_path


def test_beside_the_package(stand_in: Path) -> None:
    found = start(stand_in)
    assert found == {
        "available": True,
        "ours": str(ROOT / "kernels" / "attention.py"),
        "get": True,
        "layer": 3,
    }


def test_without_the_package() -> None:
    found = start()
    assert (found["ours"], found["get"]) == (str(ROOT / "kernels" / "attention.py"), False)


def test_a_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    assert start(tmp_path)["get"] is False
