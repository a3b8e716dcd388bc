"""What an idle application costs: processor seconds of Carpool beside a bare Gradio page.

Both are started, left alone, and watched over the same minute; children count.
Run: python -m tests.benchmarks.idle [seconds]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
BARE = """
import gradio as gr
with gr.Blocks(analytics_enabled=False) as page:
    gr.Chatbot()
    gr.Textbox()
page.queue(api_open=False)
page.launch(server_port={port}, enable_monitoring=False, run_history=False)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def begin(command: list[str], port: int, cache: str) -> psutil.Process:
    environment = {
        **os.environ,
        "GRADIO_SERVER_PORT": str(port),
        "CARPOOL_PORT": str(port),
        "CARPOOL_PIPELINE": "fake",
        "CARPOOL_CACHE": cache,
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(300):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/", timeout=5).status_code == 200:
                return psutil.Process(process.pid)
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError("the page did not come up")


def used(process: psutil.Process) -> float:
    """Processor seconds of a process and its children so far."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def main(seconds: float = 60.0) -> None:
    ports = free_port(), free_port()
    with tempfile.TemporaryDirectory() as cache:
        ours = begin([sys.executable, "app.py"], ports[0], cache)
        bare = begin([sys.executable, "-c", BARE.format(port=ports[1])], ports[1], cache)
        try:
            time.sleep(5)
            before = used(ours), used(bare)
            time.sleep(seconds)
            spent = used(ours) - before[0], used(bare) - before[1]
        finally:
            for process in (ours, bare):
                process.terminate()
            psutil.wait_procs([ours, bare], timeout=20)
    shares = [100 * one / seconds for one in spent]
    sys.stdout.write("| idle page | percent of a core |\n|---|---|\n")
    sys.stdout.write(f"| Carpool, worker included | {shares[0]:.2f} |\n")
    sys.stdout.write(f"| bare Gradio | {shares[1]:.2f} |\n")
    sys.stdout.write(f"| difference | {shares[0] - shares[1]:.2f} |\n")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
