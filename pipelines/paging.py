"""Who holds which page: an allocator in plain Python, with pages that several owners share.

Full pages have names that say what is in them; a named page that nobody holds rests until it is
asked for by name again or its room is needed, least recently used first. Page 0 is nobody's
(padding reads it). It does not know tensors, tokens' values or why an owner wants pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Table:
    """One owner's pages in the order of its tokens; the first ones, which are full, have names."""

    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)


class PageTables:
    """`pages` pages of `size` tokens; each is free, or resting under its name, or in tables."""

    def __init__(self, pages: int, size: int) -> None:
        if pages < 1 or size < 1:
            raise ValueError(f"{pages} pages of {size} tokens hold nothing.")
        self.pages = pages
        self.size = size
        self._free = list(range(pages, 0, -1))  # the lowest number is given first
        self._tables: dict[Hashable, _Table] = {}
        self._holders = [0] * (pages + 1)
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._resting: dict[int, None] = {}  # the longest unused one first

    @property
    def free(self) -> int:
        """Pages that can be given, resting ones among them."""
        return len(self._free) + len(self._resting)

    @property
    def resting(self) -> int:
        """Pages kept only because their contents may be asked for again."""
        return len(self._resting)

    @property
    def used(self) -> int:
        """Pages in some table, each counted once."""
        return len({page for table in self._tables.values() for page in table.pages})

    @property
    def owners(self) -> int:
        """Owners with at least one page."""
        return len(self._tables)

    def reserve(self, owner: Hashable, tokens: int) -> int:
        """Grow the owner's table toward `tokens` tokens; returns how many of them it has room for.

        What there is is given, also when that is less than asked; a repeat takes nothing more.
        """
        table = self._tables.get(owner) or _Table()
        missing = min(-(-tokens // self.size) - len(table.pages), self.free)
        if missing > 0:
            table.pages.extend(self._take() for _ in range(missing))
            self._tables[owner] = table
        return min(tokens, len(table.pages) * self.size)

    def share(self, owner: Hashable, names: Sequence[bytes]) -> int:
        """Begin a stranger's table with the pages that bear these names, as far as they are there;
        returns how many.
        """
        table = _Table()
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            self._resting.pop(page, None)
            self._holders[page] += 1
            table.pages.append(page)
            table.names.append(name)
        if table.pages:
            self._tables[owner] = table
        return len(table.pages)

    def names(self, owner: Hashable) -> Sequence[bytes]:
        """The names of the owner's first pages."""
        table = self._tables.get(owner)
        return () if table is None else table.names

    def name(self, owner: Hashable, names: Sequence[bytes]) -> None:
        """Name the owner's next pages, which are full; a name that is taken stays where it is."""
        table = self._tables[owner]
        for name in names:
            page = table.pages[len(table.names)]
            table.names.append(name)
            if name not in self._named:
                self._named[name], self._names[page] = page, name

    def table(self, owner: Hashable) -> Sequence[int]:
        """The owner's pages in the order of its tokens; empty for a stranger."""
        table = self._tables.get(owner)
        return () if table is None else table.pages

    def release(self, owner: Hashable) -> int:
        """Take all pages back; returns how many: none the second time, and none of a stranger."""
        table = self._tables.pop(owner, None) or _Table()
        for page in reversed(table.pages):  # of what rests, ends go before their beginnings
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._names:
                    self._resting[page] = None
                else:
                    self._free.append(page)
        return len(table.pages)

    def check(self) -> None:
        """Raise when a page is lost, or in two states at once."""
        held = {page for table in self._tables.values() for page in table.pages}
        counted = sorted([*self._free, *self._resting, *held])
        if counted != list(range(1, self.pages + 1)):
            raise RuntimeError(
                f"{len(self._free)} free, {len(self._resting)} resting and {len(held)} held pages "
                f"of {self.pages}. This is a bug."
            )

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._resting))
            del self._resting[page], self._named[self._names.pop(page)]
        self._holders[page] = 1
        return page
