"""Sixteen gradio_client sessions in sixteen processes chat at once with the default model.

Prints tokens a second of one client alone and of all together, rows a decode call, and whether
each answer equals the one that the same request gets alone (fp32, greedy and sampled).
Run: python -m tests.benchmarks.clients [clients]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.idle import ROOT, free_port, used

TOKENS = 48
ANIMALS = (
    "cat dog horse bird whale wolf bear lion tiger mouse snake frog duck goose cow fox".split()
)

# One client process: says that it is ready, waits for a line, asks, and tells what it got.
CLIENT = """
import json, sys, time
from gradio_client import Client
url, asked = sys.argv[1], json.loads(sys.argv[2])
client = Client(url, verbose=False)
for _ in sys.stdin:
    began = time.monotonic()
    job = client.submit(api_name="/chat", **asked)
    first = None
    for text in job:
        if text and first is None:
            first = time.monotonic() - began
    answer = {"text": job.result(), "seconds": time.monotonic() - began, "first": first}
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


def question(number: int) -> dict[str, Any]:
    """Every second one is sampled."""
    animal = ANIMALS[number % len(ANIMALS)]
    warm = {"temperature": 0.8, "top_p": 0.9} if number % 2 else {"temperature": 0.0}
    return {
        "message": f"Tell me a long story about a {animal}.",
        "max_tokens": TOKENS,
        "seed": number,
        "repetition_penalty": 1.0,
        **warm,
    }


class Page:
    """The application with the default model, in a process of its own."""

    def __init__(self, folder: str, rows: int) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._report = Path(folder) / "calls"
        environment = {
            **os.environ,
            "CARPOOL_PORT": str(port),
            "CARPOOL_ROWS": str(rows),
            "CARPOOL_DTYPE": "float32",
            "REPORT": str(self._report),
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, "tests/watched.py"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stdout or ():
            if "Running on local URL" in line:
                return
        raise RuntimeError("the page did not come up")

    def calls(self) -> list[dict[str, Any]]:
        self._report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(100):
            if self._report.exists():
                found: list[dict[str, Any]] = json.loads(self._report.read_text())
                return found
            time.sleep(0.1)
        raise RuntimeError("the page does not answer")

    def stop(self) -> None:
        self.process.terminate()
        psutil.wait_procs([psutil.Process(self.process.pid)], timeout=20)


class Caller:
    """A client process."""

    def __init__(self, url: str, number: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, json.dumps(question(number))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError("a client died")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(page: Page, callers: list[Caller]) -> None:
    for caller in callers:  # warm, and the answers that each request gets alone
        caller.ask()
        caller.answer()
    alone = []
    began = time.monotonic()
    for caller in callers:
        caller.ask()
        alone.append(caller.answer())
    one = TOKENS * len(callers) / (time.monotonic() - began)
    before, spent = len(page.calls()), processors(page, callers)
    began = time.monotonic()
    for caller in callers:
        caller.ask()
    together = [caller.answer() for caller in callers]
    took = time.monotonic() - began
    every = TOKENS * len(callers) / took
    spent = [now - then for now, then in zip(processors(page, callers), spent, strict=True)]
    calls = page.calls()[before:]
    decode = [call for call in calls if call["units"] == call["rows"] * call["forwards"]]
    equal = sum(a["text"] == b["text"] for a, b in zip(alone, together, strict=True))
    write = sys.stdout.write
    write("| figure | value |\n|---|---|\n")
    write(f"| clients | {len(callers)} |\n")
    write(f"| one client alone, tokens/s | {one:.1f} |\n")
    write(f"| all together, tokens/s | {every:.1f} |\n")
    write(f"| ratio | {every / one:.2f} |\n")
    write(f"| rows a decode call, mean | {statistics.mean(c['rows'] for c in decode):.1f} |\n")
    write(f"| device calls, seconds | {len(calls)}, {sum(c['seconds'] for c in calls):.1f} |\n")
    parts = " + ".join(f"{part:.1f}" for part in spent)
    write(f"| processor seconds of page + worker + clients, in {took:.1f} s | {parts} |\n")
    first = statistics.median(a["first"] for a in together)
    write(f"| first words, median s alone, together | {alone[0]['first']:.2f}, {first:.2f} |\n")
    write(f"| answers equal to those alone | {equal} of {len(callers)} |\n")


def processors(page: Page, callers: list[Caller]) -> list[float]:
    """Processor seconds so far of the page, its worker, and all clients."""
    whole = used(psutil.Process(page.process.pid))
    own = sum(psutil.Process(page.process.pid).cpu_times()[:2])
    return [own, whole - own, sum(used(psutil.Process(c.process.pid)) for c in callers)]


def main(clients: int = 16) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Page(folder, rows=clients)
        callers: list[Caller] = []
        try:
            callers = [Caller(page.url, number) for number in range(clients)]
            measure(page, callers)
        finally:
            for caller in callers:
                caller.stop()
            page.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
