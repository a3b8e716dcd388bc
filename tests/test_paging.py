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


def test_a_named_page_rests_and_is_found_again() -> None:
    tables = PageTables(4, 4)
    tables.reserve("a", 10)
    tables.name("a", [b"1", b"2"])
    pages = list(tables.table("a"))
    tables.release("a")
    assert (tables.free, tables.resting, tables.used) == (4, 2, 0)
    assert tables.share("b", [b"1", b"2", b"3"]) == 2
    assert list(tables.table("b")) == pages[:2]
    assert tables.resting == 0
    tables.check()


def test_shared_pages_stay_until_their_last_owner_leaves() -> None:
    tables = PageTables(4, 4)
    tables.reserve("a", 4)
    tables.name("a", [b"1"])
    assert tables.share("b", [b"1"]) == 1
    tables.release("a")
    assert (tables.used, tables.resting) == (1, 0)
    tables.release("b")
    assert (tables.used, tables.resting) == (0, 1)


def test_a_run_of_names_ends_where_one_is_missing() -> None:
    tables = PageTables(4, 4)
    tables.reserve("a", 8)
    tables.name("a", [b"1", b"2"])
    assert tables.share("b", [b"other", b"2"]) == 0
    assert list(tables.table("b")) == []


def test_rest_gives_way_to_need_the_longest_unused_and_the_ends_first() -> None:
    tables = PageTables(4, 4)
    for owner in ("old", "new"):
        tables.reserve(owner, 8)
        tables.name(owner, [owner.encode() + b"1", owner.encode() + b"2"])
    tables.release("old")
    tables.release("new")
    assert tables.reserve("c", 4) == 4
    assert tables.share("d", [b"old1", b"old2"]) == 1
    assert tables.share("e", [b"new1", b"new2"]) == 2
    tables.check()


def test_a_name_that_is_taken_stays_where_it_is() -> None:
    tables = PageTables(4, 4)
    for owner in ("a", "b"):
        tables.reserve(owner, 4)
        tables.name(owner, [b"same"])
    assert list(tables.names("b")) == [b"same"]
    tables.release("a")
    tables.release("b")
    assert tables.resting == 1
    tables.check()


def test_pages_are_never_lost_whoever_shares_with_whom() -> None:
    chance, tables, names = random.Random(5), PageTables(30, 4), [bytes([i]) for i in range(12)]
    for _ in range(5000):
        owner = chance.randrange(8)
        if not tables.table(owner) and chance.random() < 0.5:
            tables.share(owner, names[: chance.randrange(12)])
        elif chance.random() < 0.3:
            tables.release(owner)
        else:
            tables.reserve(owner, chance.randrange(50))
            known = len(tables.names(owner))
            full = chance.randrange(known, len(tables.table(owner)) + 1)
            if tables.table(owner):
                tables.name(owner, names[known : min(full, 12)])
        tables.check()
        assert tables.free + tables.used == 30
    assert tables.resting or tables.used


def test_a_lost_page_is_told() -> None:
    tables = PageTables(3, 4)
    tables._free.pop()
    with pytest.raises(RuntimeError, match="This is a bug"):
        tables.check()


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0), (-1, 16)])
def test_needs_pages(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        PageTables(pages, size)
