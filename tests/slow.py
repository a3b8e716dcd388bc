"""A pretended model that takes as long to load as SLOW_LOAD says; imports no page."""

from __future__ import annotations

import os

from pipelines.fake import FakePipeline


def slow_pipeline() -> FakePipeline:
    return FakePipeline(load=float(os.environ["SLOW_LOAD"]))
