"""Tokens to text: never half a character, never a piece of a stop string, always the whole in the
end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from text_models import tokenizer
from tokenizers import Tokenizer, decoders, models

from pipelines.detokenize import Text, finish, push

BYTES = tokenizer()
TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "🎉👩‍👩‍👧‍👦🇫🇷 done",
    "a\ufffdb\ufffd",
    "",
    "\x00\x01tab\there",
]


def decode(tokens: Sequence[int]) -> str:
    return BYTES.decode(list(tokens))


def run(tokens: Sequence[int], stops: Sequence[str] = (), using=decode) -> tuple[list[str], Text]:
    text, deltas = Text(), []
    for token in tokens:
        before = text.at
        text, delta = push(text, token, using, stops)
        assert text.at == before + len(delta)
        deltas.append(delta)
        if text.stopped:
            break
    text, delta = finish(text, using, stops)
    return [*deltas, delta], text


@pytest.mark.parametrize("written", TEXTS)
def test_every_character_whole_and_as_soon_as_it_can_be(written: str) -> None:
    tokens = BYTES.encode(written).ids
    deltas, text = run(tokens)
    assert "".join(deltas) == written
    assert text.at == len(written)
    if "\ufffd" not in written:
        assert all("\ufffd" not in delta for delta in deltas)
        assert deltas[-1] == ""  # nothing had to wait for the end


def test_any_ids_give_what_decoding_them_at_once_gives() -> None:
    chance = random.Random(1)
    for _ in range(200):
        tokens = [chance.randrange(320) for _ in range(chance.randrange(150))]
        deltas, _ = run(tokens)
        assert "".join(deltas) == decode(tokens)


def test_endless_halves_do_not_pile_up() -> None:
    half = BYTES.encode("日").ids[0]
    text = Text()
    for _ in range(500):
        text, _ = push(text, half, decode, ())
        assert len(text.window) <= 32
    assert text.at >= 460


def test_a_decoder_that_joins_words_keeps_its_spaces() -> None:
    words = [
        "<unk>",
        "▁Hello",
        "▁there",
        ",",
        "▁wor",
        "ld",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    spaced = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
    )
    spaced.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )

    def using(tokens: Sequence[int]) -> str:
        return spaced.decode(list(tokens))

    euro = [6 + byte for byte in "é€".encode()]
    tokens = [1, 3, 2, *euro, *euro, 4, 5, 1]
    deltas, _ = run(tokens, using=using)
    assert "".join(deltas) == using(tokens) == "Hello, thereé€é€ world Hello"
    assert all("\ufffd" not in delta for delta in deltas)


def test_control_tokens_say_nothing() -> None:
    tokens = [*BYTES.encode("ab").ids, 256, 257, *BYTES.encode("cd").ids]
    assert "".join(run(tokens)[0]) == "abcd"


@pytest.mark.parametrize(
    ("written", "stops", "wanted"),
    [
        ("one END two", ("END",), "one "),
        ("one ENDE", ("ENDX",), "one ENDE"),
        ("aaaaab", ("aab",), "aaa"),
        ("xyzxyw", ("xyw", "zz"), "xyz"),
        ("ends in EN", ("END",), "ends in EN"),
        ("END", ("END",), ""),
        ("stop 日本 here", ("日本",), "stop "),
        ("first second", ("second", "first"), ""),
        ("no stops", (), "no stops"),
    ],
)
def test_stop_strings_over_tokens(written: str, stops: tuple[str, ...], wanted: str) -> None:
    deltas, text = run(BYTES.encode(written).ids, stops)
    assert "".join(deltas) == wanted
    assert text.stopped == (wanted != written)


def test_nothing_of_a_stop_string_leaks_and_little_is_held() -> None:
    chance = random.Random(2)
    for _ in range(300):
        written = "".join(chance.choice("abc") for _ in range(40))
        stops = tuple(
            "".join(chance.choice("abc") for _ in range(chance.randrange(2, 6))) for _ in range(2)
        )
        found = [written.find(stop) for stop in stops if stop in written]
        text, given = Text(), ""
        for token in BYTES.encode(written).ids:
            text, delta = push(text, token, decode, stops)
            given += delta
            held = text.held
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
            if text.stopped:
                break
        text, delta = finish(text, decode, stops)
        given += delta
        ends = [place + len(stop) for stop in stops if (place := written.find(stop)) >= 0]
        if ends:  # it stops where the first stop string is complete
            first = min(ends)
            seen = written[:first]
            assert given == seen[: min(place for stop in stops if (place := seen.find(stop)) >= 0)]
        else:
            assert given == written
        assert bool(found) == text.stopped


def test_deltas_do_not_depend_on_when_it_was_interrupted() -> None:
    tokens = BYTES.encode("héllo wörld END more").ids
    whole = Text()
    states = [whole]
    for token in tokens:
        whole, _ = push(whole, token, decode, ("END",))
        states.append(whole)
    replayed = Text()
    for token, state in zip(tokens, states[1:], strict=True):
        replayed, _ = push(replayed, token, decode, ("END",))
        assert replayed == state
