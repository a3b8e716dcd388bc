"""Two real models in a real worker process that has room for one: asked in turns, fifty times."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_encoders import write_encoder

from pipelines import Model
from queueing.work import Policy
from tests.benchmarks.residency import Narrow, growth

TURNS = 50


@pytest.mark.timeout(300)
def test_fifty_turns_leave_memory_flat_and_answers_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARPOOL_DTYPE", "float32")
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}  # 19 MB
    models = {}
    for task in ("embed", "classify"):
        folder = str(write_encoder(tmp_path / task, "bert", task, **wide))
        arguments = {"task": task, "model": folder, "device": "cpu", "threads": 1}
        models[task] = Model(("pipelines.encode:EncodePipeline", arguments), Policy())
    fronts = {"embed": "pipelines.embed:EmbedFront", "classify": "pipelines.entail:EntailFront"}
    texts = ["the dog barked", "a lake is water"]
    asked = {"embed": {"texts": texts}, "classify": {"texts": texts, "labels": ["dog", "lake"]}}
    seen = asyncio.run(Narrow(models, fronts).alternate(asked, TURNS))
    assert seen.loads == TURNS
    assert seen.wrong == 0
    assert growth(seen.bytes) < 0.02
