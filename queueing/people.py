"""Who a person is: a login, else a name this server signed, else an address that many may share.

It knows no page, no queue and no clock. The session hash that a browser sends is chosen by the
browser, so it is never a person.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from queueing.work import Invalid

LONGEST = 128  # characters of a token; longer ones are not ours


@dataclass(frozen=True, slots=True)
class Person:
    """The unit of fairness. An address may be shared, so a cap per person would be unjust there."""

    name: str
    capped: bool = True


class Signer:
    """Gives out names and knows its own again; a forged or foreign one is nobody's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self) -> str:
        """A new name with its signature."""
        name = secrets.token_urlsafe(12)
        return f"{name}.{self._signature(name)}"

    def name(self, token: object) -> str | None:
        """The name in a token that this server signed, else None; takes whatever a caller sent."""
        if not isinstance(token, str) or len(token) > LONGEST or not token.isascii():
            return None
        name, dot, signature = token.partition(".")
        return name if dot and hmac.compare_digest(signature, self._signature(name)) else None

    def person(self, login: str | None, token: object, address: str) -> Person:
        """What is known of a caller: its login, its signed name, or where it calls from."""
        if login:
            return Person(f"login:{login}")
        name = self.name(token)
        return Person(f"token:{name}") if name else Person(f"address:{address}", capped=False)

    def _signature(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:32]


def secret(given: str, folder: Path) -> bytes:
    """The given secret, else the one kept in the folder, made once; two processes agree on one.

    Raises Invalid where nothing can be kept.
    """
    if given:
        return given.encode()
    try:
        return _kept(folder / "secret")
    except OSError as error:
        raise Invalid(
            f"CARPOOL_CACHE is {folder}, where no secret can be kept ({error.strerror}); "
            "name a folder that can be written, or set CARPOOL_SECRET."
        ) from error


def _kept(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.parent / f".secret.{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first, and its secret is the one
        finally:
            draft.unlink()
    return path.read_bytes()
