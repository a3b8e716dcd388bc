"""The page allocator: every page is free or in one table, whatever is asked in whatever order."""

from __future__ import annotations

import random

import pytest

from pipelines.paging import PageTables


def test_reserve_grows_and_repeats_take_nothing() -> None:
    tables = PageTables(10, 16)
    assert tables.reserve("a", 17) == 17
    assert tables.used == 2
    assert tables.reserve("a", 32) == 32
    assert tables.reserve("a", 5) == 5
    assert (tables.free, tables.used) == (8, 2)
    assert tables.reserve("a", 33) == 33
    assert len(tables.table("a")) == 3


def test_gives_what_there_is() -> None:
    tables = PageTables(3, 4)
    assert tables.reserve("a", 8) == 8
    assert tables.reserve("b", 9) == 4
    assert tables.reserve("c", 1) == 0
    assert tables.owners == 2
    tables.release("a")
    assert tables.reserve("b", 9) == 9


def test_release_is_idempotent_and_strangers_hold_nothing() -> None:
    tables = PageTables(3, 4)
    tables.reserve("a", 9)
    assert tables.release("a") == 3
    assert tables.release("a") == 0
    assert tables.release("never seen") == 0
    assert list(tables.table("a")) == []
    assert tables.free == 3


def test_nobody_gets_page_zero_and_nobody_shares() -> None:
    chance = random.Random(3)
    tables = PageTables(50, 4)
    for _ in range(3000):
        owner = chance.randrange(12)
        if chance.random() < 0.3:
            tables.release(owner)
        else:
            asked = chance.randrange(60)
            got = tables.reserve(owner, asked)
            assert 0 <= got <= asked
            assert got <= len(tables.table(owner)) * 4
        held = [page for each in range(12) for page in tables.table(each)]
        assert len(held) == len(set(held)) == tables.used
        assert tables.free + tables.used == 50
        assert all(1 <= page <= 50 for page in held)


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0), (-1, 16)])
def test_needs_pages(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        PageTables(pages, size)
