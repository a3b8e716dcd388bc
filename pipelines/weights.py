"""A model's configuration and its weights, read from a folder by transformers.

What cannot be read is refused in a sentence that says what to do, and so are weights that are not
there, which would be drawn at random. It does not know what a model is for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines import proof
from pipelines.fetch import Unprepared, quiet


def configuration(folder: Path) -> Any:
    """All that config.json says."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unprepared(
            f"The config.json of {folder.name} cannot be read ({proof.reason(error)}); choose a "
            "model that this version of transformers knows."
        ) from None


def opened(
    folder: Path, head: str, dtype: torch.dtype, kind: str, instead: str = "choose another model"
) -> tuple[Any, list[str]]:
    """A model of a class of transformers, and the names of the weights that it lacks."""
    import transformers
    from safetensors import SafetensorError

    try:
        with quiet(), _unreported():
            loaded: Any = getattr(transformers, head).from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        proof.unless_memory(error)
        raise Unprepared(
            f"{folder.name} cannot be loaded as {kind} ({proof.reason(error)}); check its files, "
            f"or {instead}."
        ) from None
    model, report = loaded
    return model, sorted(report["missing_keys"])


def must_be_whole(
    folder: Path,
    missing: Sequence[str],
    what: str = "of its weights",
    instead: str = "fetch its files again",
) -> None:
    """Refuse a model that lacks weights."""
    if missing:
        raise Unprepared(
            f"{folder.name} lacks {len(missing)} {what}, such as {missing[0]}; {instead}."
        )


@contextmanager
def _unreported() -> Iterator[None]:
    """transformers' table of weights that are missing or not used is told only where loading fails:
    otherwise whoever loads judges them.
    """
    logger = logging.getLogger("transformers.modeling_utils")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        table = "LOAD REPORT" in record.getMessage()
        if table:
            held.append(record)
        return not table

    logger.addFilter(hold)
    try:
        yield
    except Exception:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)
        raise
    finally:
        logger.removeFilter(hold)
