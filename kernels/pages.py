"""Keys and values put into pages by a kernel of our own, both in one launch.

`reference.write` says what is right, but for one thing: nothing is wiped, because kernels never
read what a row has not written. Triton is imported here, so import this where it is. It does not
know rows or layers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers a program moves


def write(key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor, at: Tensor) -> None:
    """Put keys and values [tokens, heads, width] at flat slots [tokens]; none at slots below 0."""
    if not len(key):
        return
    key, value = _dense(key), _dense(value)
    most = max(key[0].numel(), value[0].numel())
    _write[(len(key), triton.cdiv(most, BLOCK))](
        key, value, key_pages, value_pages, at,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KEY=key[0].numel(), KEY_WIDTH=key.shape[-1],
        VALUE=value[0].numel(), VALUE_WIDTH=value.shape[-1], BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _write(
    key, value, key_pages, value_pages, at,
    key_token, key_head, value_token, value_head,
    KEY: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(at + token).to(tl.int64)
    mask = (place < KEY) & (slot >= 0)
    source = token * key_token + (place // KEY_WIDTH) * key_head + place % KEY_WIDTH
    tl.store(key_pages + slot * KEY + place, tl.load(key + source, mask=mask), mask=mask)
    mask = (place < VALUE) & (slot >= 0)
    source = token * value_token + (place // VALUE_WIDTH) * value_head + place % VALUE_WIDTH
    tl.store(value_pages + slot * VALUE + place, tl.load(value + source, mask=mask), mask=mask)


def _dense(tokens: Tensor) -> Tensor:
    """With the numbers of a head side by side, which is how models give them."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()
