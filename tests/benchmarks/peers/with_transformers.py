"""transformers' own ways to generate: one by one, in static batches, by continuous batching."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from wire import Ask, serve


class Static:
    """`generate` on batches padded to the left, in the order of arrival; a batch of one is one by
    one.

    A batch runs until its longest answer is complete, and only then the next one begins.
    """

    version = transformers.__version__

    def __init__(self, job: dict[str, Any]) -> None:
        setting = job["setting"]
        torch.set_num_threads(setting["threads"])
        self._rows: int = setting["rows"]
        self._model = load(job["folder"], setting["dtype"])

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        tokens: list[list[int]] = []
        for start in range(0, len(asks), self._rows):
            tokens += self._generate(asks[start : start + self._rows])
        return tokens

    def replay(self, asks: Sequence[Ask]) -> list[list[float]]:
        """Requests in real time: whoever waits when a batch ends is in the next one."""
        seen: list[list[float]] = []
        began = time.perf_counter()
        while len(seen) < len(asks):
            first, now = asks[len(seen)].at, time.perf_counter() - began
            time.sleep(max(first - now, 0.0))
            now = max(first, now)
            batch = [ask for ask in asks[len(seen) :] if ask.at <= now][: self._rows]
            watch = Watch()
            self._generate(batch, watch)
            times = [moment - began for moment in watch.moments]
            seen += [[moment - ask.at for moment in times[: ask.tokens]] for ask in batch]
        return seen

    @torch.inference_mode()
    def _generate(self, asks: Sequence[Ask], watch: Watch | None = None) -> list[list[int]]:
        width = max(len(ask.prompt) for ask in asks)
        pads = [width - len(ask.prompt) for ask in asks]
        ids = [[0] * pad + ask.prompt for pad, ask in zip(pads, asks, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        made = self._model.generate(
            torch.tensor(ids),  # [rows, width]
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(ask.tokens for ask in asks),
            do_sample=False,
            streamer=watch,
        )[:, width:]
        return [row[: ask.tokens].tolist() for row, ask in zip(made, asks, strict=True)]


class Watch:
    """Notes when each token of a batch was there, as if all readers had it at once."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._prompted = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompted:
            self.moments.append(time.perf_counter())
        self._prompted = True

    def end(self) -> None:
        """Nothing is held back."""


class Continuous:
    """transformers' continuous batching; blocks are not shared, since rounds repeat prompts."""

    version = transformers.__version__

    def __init__(self, job: dict[str, Any]) -> None:
        setting = job["setting"]
        torch.set_num_threads(setting["threads"])
        model = load(job["folder"], setting["dtype"])
        config = transformers.ContinuousBatchingConfig(
            max_batch_tokens=setting["batch_tokens"], num_blocks=256, allow_block_sharing=False
        )
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=128
        )
        self._manager = model.init_continuous_batching(generation, config)
        self._manager.start()

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        ids = [
            self._manager.add_request(ask.prompt, max_new_tokens=ask.tokens, eos_token_id=-1)
            for ask in asks
        ]
        done: dict[str, list[int]] = {}
        while len(done) < len(ids):
            result = self._manager.get_result(timeout=60.0)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching gave {result and result.error}")
            done[result.request_id] = result.generated_tokens
        return [done[id] for id in ids]


def load(folder: str, dtype: str) -> Any:
    """The model, told that no token ends an answer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    serve(lambda job: (Static if "rows" in job["setting"] else Continuous)(job))
