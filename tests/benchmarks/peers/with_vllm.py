"""vLLM's offline engine on the CPU, in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from wire import Ask, serve


class Vllm:
    """Tokens in, tokens out; prefix caching is off, since rounds repeat the same prompts."""

    def __init__(self, job: dict[str, Any]) -> None:
        setting = dict(job["setting"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = setting.pop("cores")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(
            job["folder"],
            enable_prefix_caching=False,
            max_model_len=2048,
            disable_log_stats=True,
            **setting,
        )
        self.version = vllm.__version__

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        wanted = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=ask.tokens, ignore_eos=True)
            for ask in asks
        ]
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        results = self._engine.generate(prompts, wanted, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


if __name__ == "__main__":
    serve(Vllm)
