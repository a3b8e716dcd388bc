"""Who holds which page: an allocator in plain Python, one table of pages per owner.

Page 0 is nobody's (padding reads it). It does not know tensors, tokens' values or why an owner
wants pages; owners are told apart by identity or by equality, whichever their class has.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class PageTables:
    """`pages` pages of `size` tokens; every page is either free or in exactly one owner's table."""

    def __init__(self, pages: int, size: int) -> None:
        if pages < 1 or size < 1:
            raise ValueError(f"{pages} pages of {size} tokens hold nothing.")
        self.pages = pages
        self.size = size
        self._free = list(range(pages, 0, -1))  # the lowest number is given first
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages in some table."""
        return sum(len(table) for table in self._tables.values())

    @property
    def owners(self) -> int:
        """Owners with at least one page."""
        return len(self._tables)

    def reserve(self, owner: Hashable, tokens: int) -> int:
        """Grow the owner's table toward `tokens` tokens; returns how many of them it has room for.

        What there is is given, also when that is less than asked; a repeat takes nothing more.
        """
        table = self._tables.get(owner, [])
        missing = min(-(-tokens // self.size) - len(table), len(self._free))
        if missing > 0:
            table.extend(self._free.pop() for _ in range(missing))
            self._tables[owner] = table
        return min(tokens, len(table) * self.size)

    def table(self, owner: Hashable) -> Sequence[int]:
        """The owner's pages in the order of its tokens; empty for a stranger."""
        return self._tables.get(owner, ())

    def release(self, owner: Hashable) -> int:
        """Take all pages back; returns how many: none the second time, and none of a stranger."""
        table = self._tables.pop(owner, [])
        self._free.extend(reversed(table))
        return len(table)
