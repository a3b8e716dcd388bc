"""Names of full pages: each says which tokens are in it and in all pages before it, and whose.

Chained hashes, as in vLLM's automatic prefix caching, salted on this side of the wire: what one
person wrote is never found by another, so that nobody learns it from how fast an answer comes
(CVE-2025-46570). It does not know pages or who holds them.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

_WIDTH = 16  # bytes of a name


class Names:
    """Names for pages of `size` tokens, worth nothing outside the object that gave them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._secret = secrets.token_bytes(32)

    def salt(self, *owner: str) -> bytes:
        """What stands for a person in names."""
        return blake2b("\0".join(owner).encode(), key=self._secret, digest_size=_WIDTH).digest()

    def of(
        self, tokens: Sequence[int], salt: bytes, public: int = 0, known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Names of the full pages of `tokens` that come after the `known` ones.

        A page within the first `public` tokens, which the application itself wrote, has the same
        name for everybody.
        """
        names: list[bytes] = []
        before = known[-1] if known else b""
        size = self.size
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            whose = b"" if start + size <= public else salt
            page = array("q", tokens[start : start + size]).tobytes()
            before = blake2b(before + whose + page, key=self._secret, digest_size=_WIDTH).digest()
            names.append(before)
        return names
