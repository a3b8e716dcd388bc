"""What the environment decides about the application, read once; the README lists all names.

It knows what a name is called and what holds when it is not set, not what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one application."""

    pipeline: str = "text"  # or "fake"
    rows: int = 16  # in one batch
    port: int | None = None
    share: bool = False
    secret: str = ""
    grace: float = 0.0  # seconds
    log: str = "WARNING"

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        given = {name: text for name, text in environment.items() if text}
        port = given.get("CARPOOL_PORT") or given.get("GRADIO_SERVER_PORT")
        return cls(
            pipeline=given.get("CARPOOL_PIPELINE", "text"),
            rows=int(given.get("CARPOOL_ROWS", 16)),
            port=int(port) if port else None,
            share=given.get("CARPOOL_SHARE", "").lower() in ("1", "true", "yes"),
            secret=given.get("CARPOOL_SECRET", ""),
            grace=float(given.get("CARPOOL_GRACE", 0)),
            log=given.get("CARPOOL_LOG", "WARNING").upper(),
        )
