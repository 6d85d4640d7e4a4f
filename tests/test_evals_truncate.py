"""Middle cuts, against the one-line rule of the benchmarks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.errors import InvalidParameter, PromptTooLong
from rapid.evals.schema import Form, Item, Task
from rapid.evals.scorers import longbench_choice
from rapid.evals.tasks.longbench_v2 import ANSWER_TOKENS, ZERO_SHOT
from rapid.evals.truncate import cut_context, cut_text, middle_cut


@given(st.integers(0, 60), st.integers(1, 70))
def test_middle_cut_is_the_benchmarks_rule(length, limit):
    ids = list(range(length))
    expected = ids if length <= limit else ids[: limit // 2] + ids[-limit // 2 :]
    cut = middle_cut(ids, limit)
    assert cut == expected
    assert len(cut) == min(length, limit)


def test_odd_limits_keep_the_longer_half_at_the_end():
    assert middle_cut(range(10), 5) == [0, 1, 7, 8, 9]
    assert middle_cut(range(10), 1) == [9]


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(InvalidParameter, match="at least 1"):
        middle_cut([1, 2], 0)


@given(st.integers(0, 40), st.integers(0, 200), st.integers(0, 40), st.integers(1, 300))
def test_the_prompt_around_the_document_stays_whole(before, context, after, limit):
    head, tail = [-1] * before, [-2] * after
    ids = list(range(context))
    if before + context + after > limit and before + after >= limit:
        with pytest.raises(PromptTooLong):
            cut_context(ids, before, after, limit)
        return
    cut = cut_context(ids, before, after, limit)
    assert before + len(cut) + after == min(limit, before + context + after)
    assert cut == sorted(set(cut))
    if limit // 2 >= before and limit - limit // 2 >= after:
        assert head + cut + tail == middle_cut(head + ids + tail, limit)


def words(text):
    return text.split(" ") if text else []


def test_cut_text_keeps_both_ends():
    ids = {}

    def encode(text):
        return [ids.setdefault(word, len(ids)) for word in words(text)]

    def decode(numbers):
        names = {number: word for word, number in ids.items()}
        return "".join(f"{names[number]} " for number in numbers)

    text = " ".join(f"w{i}" for i in range(100)) + " "
    cut = cut_text(text, before=5, after=7, max_tokens=41, encode=lambda t: encode(t.rstrip()), decode=decode)
    assert cut.startswith("w0 w1 ")
    assert cut.endswith(" w99 ")
    assert len(words(cut.rstrip())) == 41 - 12
    assert cut_text("w0 w1", 1, 1, 4, encode, decode) == "w0 w1"


@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 20), st.integers(1, 80), st.integers(0, 3))
def test_cut_text_obeys_the_count_of_the_whole_prompt(context, before, after, limit, seams):
    """Joining the parts costs `seams` tokens that no part shows."""
    text = "x" * context

    def count_prompt(cut):
        return before + len(cut) + after + seams

    try:
        cut = cut_text(text, before, after, limit, list, "".join, count_prompt)
    except PromptTooLong:
        assert count_prompt("x") > limit
    else:
        assert count_prompt(cut) == min(limit, count_prompt(text))


def test_question_choices_and_markers_survive_a_document_three_times_the_window():
    """Case B39, with every character a token and a chat template of fixed markers."""
    window = 1200
    item = Item(
        id="i",
        context="<text> $Q$ </text> " * (3 * window // 19),
        question="Which one is it?",
        answers=("second",),
        metric="mc_accuracy",
        choices=("first", "second", "third", "fourth"),
        answer_letter="B",
    )
    form = Form(ZERO_SHOT, ANSWER_TOKENS, longbench_choice())
    task = Task("t", (item,), {"mc_accuracy": form})
    whole = task.prompt(item)
    start, end = f"<|user|>{whole.before}", f"{whole.after}<|assistant|>"
    limit = window - form.max_new_tokens
    cut = cut_text(item.context, len(start), len(end), limit, list, "".join)
    rendered = f"<|user|>{task.prompt(item, cut).text}<|assistant|>"
    assert len(rendered) == limit
    assert rendered.startswith(start)
    assert rendered.endswith(end)
    assert "(A) first\n(B) second\n(C) third\n(D) fourth\n" in rendered


@given(st.text(min_size=1, max_size=60), st.integers(1, 40))
def test_cut_text_fits_where_a_cut_changes_the_tokens(text, limit):
    """Bytes as tokens, with runs of one byte merged: a cut can both split characters and join runs."""

    def encode(text):
        return list(text.encode())

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    def encode_longer(text):
        # every seam that is not in the original costs a further token
        return encode(text) + ([0] if text != original else [])

    original = text
    for encoder in (encode, encode_longer):
        try:
            cut = cut_text(text, 0, 0, limit, encoder, decode)
        except PromptTooLong:
            continue
        assert len(encoder(cut)) <= max(limit, 0)
        assert "\ufffd" not in cut or "\ufffd" in text
