"""Tokens to text: whatever was shown is never taken back, and all of it together is the whole text (B26)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.textstream import TextStream


def decode_bytes(ids):
    """A byte-level tokenizer: one token per byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def collect(ids, decode=decode_bytes, stop=(), block=1) -> tuple[list[str], TextStream, int]:
    """(pieces, the stream, tokens pushed): `block` tokens between two looks, as a round of decoding emits them."""
    stream = TextStream(decode, stop)
    pieces = []
    pushed = 0
    for token in ids:
        pushed += 1
        stopped = stream.push(token)
        if stopped:
            break
        if pushed % block == 0:
            pieces.append(stream.take())
    pieces.append(stream.take() + stream.finish())
    return [piece for piece in pieces if piece], stream, pushed


@pytest.mark.parametrize("block", [1, 2, 4, 9])
@pytest.mark.parametrize("text", ["plain", "ok 🦉雪é fin", "e\u0301👩‍👩‍👧", "a\r\n\tb ", "🦉"])
def test_pieces_are_whole_characters_and_join_to_the_text(text, block):
    pieces, stream, _ = collect(text.encode(), block=block)
    assert "".join(pieces) == stream.text == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_is_shown_as_soon_as_it_is_whole():
    pieces, _, _ = collect("é雪🦉.".encode())
    assert pieces == ["é", "雪", "🦉", "."]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_character_that_stays_unfinished_is_left_out(missing):
    pieces, stream, _ = collect("ok 🦉".encode()[:-missing])
    assert "".join(pieces) == stream.text == "ok "


def test_bytes_that_are_no_character_do_not_block_what_follows():
    pieces, stream, _ = collect(b"a\xffb\xf0\x9fc")
    assert "".join(pieces) == stream.text == "a\ufffdb\ufffdc"


class TestDecodersWithAMemory:
    """Decoders that treat the first token differently, as SentencePiece's, and tokens without text."""

    WORDS = ("▁The", "▁mill", "s", "▁", "▁stand", "", "▁still", ".")

    def decode(self, ids):
        text = "".join(self.WORDS[i] for i in ids).replace("▁", " ")
        return text[1:] if text.startswith(" ") else text

    def test_spaces_between_words_stay(self):
        ids = [0, 1, 2, 4, 5, 6, 7, 3, 1]
        pieces, stream, _ = collect(ids, self.decode)
        assert "".join(pieces) == stream.text == self.decode(ids) == "The mills stand still.  mill"

    def test_tokens_without_text_give_no_piece(self):
        pieces, stream, _ = collect([5, 5], self.decode)
        assert pieces == []
        assert stream.text == ""


class TestStopStrings:
    @pytest.mark.parametrize("block", [1, 3, 8])
    @pytest.mark.parametrize(
        ("text", "stop", "shown"),
        [
            ("one. two. three", (". ",), "one"),
            ("one\n\ntwo", ("\n\n",), "one"),
            ("aaab", ("aab",), "a"),  # a beginning of the stop string that goes on otherwise
            ("abcabd!", ("abd",), "abc"),
            ("stop here", ("stop",), ""),
            ("a 🦉 b", ("🦉",), "a "),
            ("first END second STOP", ("STOP", "END"), "first "),
            ("END", ("ND", "END"), ""),  # the earlier beginning wins
        ],
    )
    def test_text_ends_before_the_first_one(self, text, stop, shown, block):
        pieces, stream, pushed = collect(text.encode(), stop=stop, block=block)
        assert "".join(pieces) == stream.text == shown
        assert stream.stopped
        # Found at its last byte, not later.
        assert pushed == min(text.encode().index(s.encode()) + len(s.encode()) for s in stop if s in text)

    def test_a_beginning_of_one_is_held_back_until_it_is_decided(self):
        stream = TextStream(decode_bytes, ("\nQ:",))
        shown = []
        for byte in b"a\nQa\n":
            stream.push(byte)
            shown.append(stream.take())
        assert shown == ["a", "", "", "\nQa", ""]
        assert stream.finish() == "\n"
        assert not stream.stopped

    def test_one_inside_a_token(self):
        def decode(ids):
            return "".join(("Yes. Q", ": No")[i] for i in ids)

        pieces, _, pushed = collect([0, 1, 1], decode, stop=("Q:",))
        assert ("".join(pieces), pushed) == ("Yes. ", 2)


PIECES = st.text(alphabet="ab.\n🦉é", max_size=12)


@given(
    text=PIECES, stop=st.lists(st.text(alphabet="ab.\né", min_size=1, max_size=3), max_size=2), block=st.integers(1, 5)
)
def test_the_stream_is_the_text_up_to_the_first_stop(text, stop, block):
    """Against the plain twin: search every prefix, byte by byte."""
    pieces, stream, _ = collect(text.encode(), stop=stop, block=block)
    expected = text
    for end in range(len(text) + 1):
        found = [text[:end].find(s) for s in stop if s in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == any(s in text for s in stop)
