"""Passages: offsets, limits and coverage, whatever the text and however tokens are counted."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rapid.retrieval import chunk_document
from rapid.types import Document


def count_words(text: str) -> int:
    return len(text.split())


def count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


@pytest.fixture(scope="module")
def count_bpe():
    """A byte-level BPE, trained here: its counts are not additive."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f"tick tock {i} the valve, the pump. " * 3 for i in range(50)], trainer)
    return lambda text: len(tokenizer.encode(text).ids)


def check(text, count, limit):
    """Every promise of `chunk_document`; returns the chunks."""
    chunks = chunk_document(Document(text), 7, count, limit)
    position = 0
    for chunk in chunks:
        assert chunk.document == 7
        assert chunk.start >= position, "overlapping or out of order"
        assert text[chunk.start : chunk.end] == chunk.text
        assert chunk.text.strip(), "blank"
        assert not text[position : chunk.start].strip(), "a character was lost"
        assert count(chunk.text) <= limit
        position = chunk.end
    assert not text[position:].strip(), "the end was lost"
    return chunks


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(["\n", "\n\n", "\n\n\n", " ", "  ", "\t", "\r\n", "\u2028", "\x1f", "\u3000"]),
        st.sampled_from(["The valve is shut. ", "na na na", "word" * 20, "(a) [b] “c”; d, e—f"]),
        st.sampled_from(["阀门关闭了。", "他说：“走吧！”", "于是，我们等了很久；", "……", "日本語。"]),
        st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "e\u0301\u0323", "نص", "\u200b", "क्षि", "\ud800"]),
    ),
    max_size=40,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    TEXTS,
    st.one_of(
        st.tuples(st.sampled_from([count_words, len]), st.sampled_from([1, 3, 16, 50])),
        st.tuples(st.just(count_bytes), st.sampled_from([4, 16, 50])),
    ),
)
def test_promises(text, counting):
    check(text, *counting)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS.map(lambda t: t.replace("\ud800", "")))
def test_promises_with_a_counter_that_is_not_additive(count_bpe, text):
    check(text, count_bpe, 16)


@pytest.mark.parametrize("text", ["", " \n\t ", "\u2028\u3000\r\n"])
def test_blank_document_has_no_passages(text):
    assert check(text, count_words, 10) == []


def test_short_document_is_one_passage():
    (chunk,) = check("Ok.", count_words, 10)
    assert (chunk.start, chunk.end) == (0, 3)


def test_repeated_passages_keep_their_own_offsets():
    # case B33: a search for the text would put the repeats at 3, and at 0 again
    assert [c.start for c in check("na na na\n\nna na", count_words, 3)] == [0, 10]
    text = "Valve 7 is shut.\n\nPump 3 is on.\n\nValve 7 is shut.\n\nPump 9 is on."
    spans = [(c.start, c.end) for c in check(text, count_words, 4)]
    assert spans == [(0, 16), (18, 31), (33, 49), (51, 64)]


def test_the_strongest_boundary_is_taken():
    text = "One two three. Four five six.\n\nSeven eight nine. Ten eleven twelve."
    assert [c.text for c in check(text, count_words, 6)] == text.split("\n\n")
    assert [c.text for c in check(text, count_words, 4)] == re.split(r"(?<=\.)\s+", text)


def test_chinese_is_cut_at_sentences_then_at_clauses():
    sentences = ["第一个阀门在三号房间。", "第二个阀门坏了，所以关闭了！", "谁知道？", "“没有人。”"]
    assert [c.text for c in check("".join(sentences), len, 15)] == [
        "第一个阀门在三号房间。",
        "第二个阀门坏了，所以关闭了！",
        "谁知道？“没有人。”",
    ]
    assert [c.text for c in check("我们等了很久，然后走了；他没来，我们就睡了", len, 12)] == [
        "我们等了很久，然后走了；",
        "他没来，我们就睡了",
    ]
    assert [c.text for c in check("第一 句。第二 句。", len, 6)] == ["第一 句。", "第二 句。"]


def test_text_that_holds_the_separators_used_inside():
    marks = "\x1f\x1e\x1d\x1c\u2028\u2029"
    for i in range(len(marks) + 1):
        check(f"第一句。{marks[:i]}第二句，第三句。" * 20, len, 16)


def test_endless_word(count_bpe):
    chunks = check("x" * 5000, count_bytes, 512)
    assert [len(c.text) for c in chunks] == [512] * 9 + [392]
    check("Donaudampfschifffahrt" * 300, count_bpe, 512)


def test_a_character_beyond_the_limit_stands_alone():
    assert [c.text for c in chunk_document(Document("a👍b"), 0, count_bytes, 1)] == ["a", "👍", "b"]


def test_passages_are_well_filled(count_bpe):
    text = " ".join(f"Pump {i} is on, and valve {i * 7} is shut." for i in range(2000))
    chunks = check(text, count_bpe, 512)
    assert sum(count_bpe(c.text) for c in chunks) / len(chunks) > 450


@pytest.mark.parametrize(
    "text",
    [
        "tick " * 200_000,
        "abcdefghij" * 100_000,
        "\n".join("a" + " " * n + "b" for n in range(1500)),
        "阀门关闭了" * 100_000,
    ],
    ids=["one word repeated", "one word", "1,500 widths of space", "no punctuation"],
)
def test_a_megabyte_takes_linear_time(text):
    """Each character is counted only a few times; wall time is only a net for a hang."""
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return (len(piece) + 3) // 4

    start = time.monotonic()
    check(text, count, 512)
    assert counted < 100 * len(text)
    assert time.monotonic() - start < 60
