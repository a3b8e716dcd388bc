"""OpenVINO GenAI's continuous batching, on a model that optimum-intel exported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy
import openvino
import openvino_genai
from wire import Ask, serve


class OpenVino:
    """Tokens in, tokens out; prefix caching is off, since rounds repeat the same prompts."""

    def __init__(self, job: dict[str, Any]) -> None:
        setting = dict(job["setting"])
        plan = openvino_genai.SchedulerConfig()
        plan.cache_size = 2  # GB
        plan.enable_prefix_caching = False
        plan.max_num_batched_tokens = setting.pop("batched_tokens")
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            job["folder"], plan, "CPU", setting
        )
        self.version = importlib.metadata.version("openvino-genai")

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        inputs = [openvino.Tensor(numpy.array([ask.prompt], numpy.int64)) for ask in asks]
        results = self._pipeline.generate(inputs, [wanted(ask.tokens) for ask in asks])
        return [list(result.m_generation_ids[0]) for result in results]


def wanted(tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVino)
