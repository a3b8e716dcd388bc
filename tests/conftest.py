"""The application in a process of its own, on the pretended model and a free port.

Knows how to start it, how to read what it says, and that nothing of it may outlive a test.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
START = 60.0  # seconds an application may take to come up on a busy machine


@dataclass(slots=True, eq=False)
class App:
    """A running application."""

    process: subprocess.Popen[str]
    url: str
    report: Path
    lines: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    up: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Follow what it prints, to its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self.times.setdefault(line.split(" ")[0].strip("\n*"), time.monotonic())
            if "Running on local URL" in line:
                self.times["running"] = time.monotonic()
                self.up.set()
        self.process.stdout.close()
        self.up.set()

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> list[psutil.Process]:
        """End it as a system would, and return what is left of it."""
        family = self.family() if self.process.poll() is None else []
        self.process.terminate()
        left: list[psutil.Process] = psutil.wait_procs(family, timeout=20)[1]
        for process in left:
            process.kill()
        self.process.wait(10)
        self._reader.join(10)
        return left


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Launch = Callable[..., App]


@pytest.fixture
def library() -> ctypes.CDLL:
    """The C++ of kernels/."""
    from kernels import native  # only here, as most tests want no torch

    found = native.library()
    if found is None:
        pytest.skip("There is no C++ compiler on this machine.")
    return found


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, which many small models are quickest on."""
    import torch  # only here, as most tests want none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Starts applications; keyword arguments become environment variables."""
    apps: list[App] = []

    def start(**environment: str) -> App:
        folder, port = tmp_path_factory.mktemp("app"), free_port()
        settings = {
            "CARPOOL_PIPELINE": "fake",
            "CARPOOL_PORT": str(port),
            "CARPOOL_CACHE": str(folder / "cache"),
            "REPORT": str(folder / "modules"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        process = subprocess.Popen(
            [sys.executable, "tests/launcher.py"],
            cwd=ROOT,
            env={**os.environ, **settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        app = App(process, f"http://127.0.0.1:{port}", folder / "modules")
        apps.append(app)
        app.up.wait(START)
        assert process.poll() is None, "\n".join(app.lines)
        return app

    yield start
    for app in apps:
        app.stop()


@pytest.fixture(scope="session")
def app(launch: Launch) -> App:
    """The application that most tests share."""
    return launch()


@pytest.fixture(scope="session")
def narrow_app(launch: Launch) -> App:
    """One that runs a single request at a time, so that a second one waits."""
    return launch(CARPOOL_ROWS="1")


@pytest.fixture(scope="session")
def real_app(launch: Launch) -> App:
    """One on the default models, prepared in the user's own cache folder."""
    return launch(CARPOOL_PIPELINE="text", CARPOOL_CACHE="", CARPOOL_DTYPE="float32")
