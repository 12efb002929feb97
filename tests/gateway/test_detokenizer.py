"""Streamed text: never a torn character, stop strings wherever they fall, the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.detokenizer import StopScanner, TextStream
from actors.gateway.tokenizer import CheckpointTokenizer
from tests.gateway.checkpoint import byte_level_tokenizer, sentence_piece_like_tokenizer, write_checkpoint

KINDS = {"bytes": byte_level_tokenizer, "window": sentence_piece_like_tokenizer}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointTokenizer]:
    return {
        kind: CheckpointTokenizer(write_checkpoint(tmp_path_factory.mktemp(kind), make()))
        for kind, make in KINDS.items()
    }


def stream(tokenizer: CheckpointTokenizer, ids: list[int], *, skip: bool = True, **options: object) -> list[str]:
    """Pieces of text, the flushed rest last."""
    text = TextStream(tokenizer.detokenizer(skip_special_tokens=skip), **options)  # type: ignore[arg-type]
    pieces = []
    for token_id in ids:
        step = text.push(token_id)
        pieces.append(step.text)
        if step.stopped:
            break
    return [*pieces, text.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_pieces_joined_equal_the_full_decode_of_any_tokens(
    tokenizers: dict[str, CheckpointTokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text("the héllo你👋\n", max_size=8), max_size=5), skip=st.booleans())
def test_a_decoder_that_looks_at_neighbours_gives_the_full_decode_of_any_valid_text(
    tokenizers: dict[str, CheckpointTokenizer], texts: list[str], skip: bool
) -> None:
    tokenizer = tokenizers["window"]
    ids = [token for text in texts for token in (*tokenizer.encode(text), 1)]  # 1: a special token in between
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), kind=st.sampled_from(sorted(KINDS)))
def test_no_piece_of_valid_text_ever_holds_a_torn_character(
    tokenizers: dict[str, CheckpointTokenizer], text: str, kind: str
) -> None:
    tokenizer = tokenizers[kind]
    text = text.replace("\ufffd", "")
    pieces = stream(tokenizer, list(tokenizer.encode(text)), skip=False)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_appears_with_its_last_one(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    ids = [tokenizer.encode(text)[0] for text in ("!",)] + list(tokenizer.encode("🙂"))
    assert len(ids) > 3
    assert stream(tokenizer, ids) == ["!", *[""] * (len(ids) - 2), "🙂", ""]


def test_a_sequence_that_ends_inside_a_character_ends_as_the_full_decode_does(
    tokenizers: dict[str, CheckpointTokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = list(tokenizer.encode("🙂"))[:-1]
    assert stream(tokenizer, ids)[-1] == tokenizer.decode(ids) == "\ufffd"


def test_a_stop_string_over_two_tokens_is_found_and_the_text_is_cut_before_it(
    tokenizers: dict[str, CheckpointTokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = [token for text in ("x", "S", "T", "y") for token in tokenizer.encode(text)]
    text = TextStream(tokenizer.detokenizer(), stops=["ST"])
    steps = [text.push(token) for token in ids[:3]]
    assert [step.text for step in steps] == ["x", "", ""]
    assert [step.stopped for step in steps] == [False, False, True]
    assert (text.token_count, text.stop) == (3, "ST")


def test_text_held_back_for_a_stop_string_that_does_not_come_is_shown() -> None:
    scanner = StopScanner(["abcd"])
    assert [scanner.push(text) for text in ("xa", "b", "c", "e")] == ["x", "", "", "abce"]
    scanner.push("ab")
    assert scanner.flush() == "ab"


def test_the_stop_string_that_is_completed_first_wins() -> None:
    scanner = StopScanner(["abcX", "bc", "c!"])
    assert scanner.push("--abcX") == "--a"
    assert scanner.hit == "bc"
    longer = StopScanner(["c", "abc"])
    assert (longer.push("-abc"), longer.hit) == ("-", "abc")


def test_the_stop_string_may_be_included() -> None:
    scanner = StopScanner(["END"], include=True)
    assert [scanner.push(text) for text in ("a E", "N", "D and more")] == ["a E", "N", "D"]
    assert scanner.hit == "END"


def naive(text: str, stops: list[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if include else end - max(map(len, done))]
    return text


@settings(max_examples=500, deadline=None)
@given(data=st.data(), include=st.booleans())
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(data: st.DataObject, include: bool) -> None:
    pieces = data.draw(st.lists(st.text("ab", max_size=4), max_size=10))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
    scanner = StopScanner(stops, include=include)
    shown = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()
    assert shown == naive("".join(pieces), stops, include)
    assert bool(scanner.hit) == any(stop in "".join(pieces) for stop in stops)


def test_an_end_token_s_text_is_left_out_unless_the_stop_is_included(
    tokenizers: dict[str, CheckpointTokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = [tokenizer.encode("x")[0], tokenizer.encode("!")[0]]
    assert "".join(stream(tokenizer, ids, ending_ids=[ids[1]])) == "x"
    assert "".join(stream(tokenizer, ids, ending_ids=[ids[1]], include_stop=True)) == "x!"


def test_no_stop_string_ends_a_text_before_its_least_number_of_tokens(
    tokenizers: dict[str, CheckpointTokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = [tokenizer.encode(text)[0] for text in ("S", "a", "S", "b")]
    assert "".join(stream(tokenizer, ids, stops=["S"], min_tokens=2)) == "Sa"
    assert "".join(stream(tokenizer, ids, stops=["aS"], min_tokens=2)) == "S"
    assert "".join(stream(tokenizer, ids, stops=["aS"], min_tokens=3)) == "Sa"  # what was shown stays shown
    assert "".join(stream(tokenizer, ids, stops=["S"], min_tokens=4)) == "SaSb"


def test_offsets_say_where_each_token_s_text_begins(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    ids = [token for text in ("x", "🙂", "y") for token in tokenizer.encode(text)]
    text = TextStream(tokenizer.detokenizer())
    offsets = [text.push(token).offset for token in ids]
    assert offsets == [0, *[1] * (len(ids) - 2), 2]
