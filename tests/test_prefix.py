"""Names of pages: the same for the same words of the same person, and for nobody else."""

from __future__ import annotations

from pipelines.prefix import Names

TOKENS = list(range(40))


def test_equal_beginnings_have_equal_names_up_to_the_first_difference() -> None:
    names = Names(4)
    salt = names.salt("somebody")
    changed = [*TOKENS[:21], 99, *TOKENS[22:]]
    first, second = names.of(TOKENS, salt), names.of(changed, salt)
    assert len(first) == 10
    assert [one == other for one, other in zip(first, second, strict=True)] == [True] * 5 + [
        False
    ] * 5


def test_a_page_that_is_not_full_has_no_name() -> None:
    names = Names(4)
    assert len(names.of(TOKENS[:7], b"salt")) == 1
    assert names.of(TOKENS[:3], b"salt") == []


def test_a_chain_continues_from_the_names_that_are_known() -> None:
    names = Names(4)
    whole = names.of(TOKENS, b"salt")
    assert names.of(TOKENS, b"salt", known=whole[:3]) == whole[3:]


def test_two_people_share_no_name_but_those_of_public_words() -> None:
    names = Names(4)
    mine, yours = (names.of(TOKENS, names.salt(who), public=10) for who in ("me", "you"))
    assert mine[:2] == yours[:2]  # the third page has private words as well
    assert not set(mine[2:]) & set(yours[2:])


def test_a_narrower_salt_parts_two_tabs_of_one_address() -> None:
    names = Names(4)
    assert names.salt("address", "one tab") != names.salt("address", "another")
    assert names.salt("a", "b") != names.salt("ab")


def test_names_mean_nothing_to_another_worker() -> None:
    assert Names(4).of(TOKENS, b"") != Names(4).of(TOKENS, b"")
