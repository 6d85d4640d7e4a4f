"""RULER's generators: what is hidden is there to be found, once, and the length is kept."""

import json
import random
import re
from collections import Counter

import pytest

from rapid.errors import DocumentError, InvalidParameter
from rapid.evals.tasks.ruler.extraction import frequent_words
from rapid.evals.tasks.ruler.tasks import NAMES, ruler, weighted_average
from rapid.evals.tasks.ruler.words import essay, sentences

pytest.importorskip("wonderwords")

LENGTH = 2048
MADE = [name for name in NAMES if not name.startswith("qa")]


def count(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


def total(task, item):
    prompt = task.prompt(item)
    return count(prompt.text + prompt.answer_prefix) + task.form(item).max_new_tokens


@pytest.mark.parametrize("name", MADE)
def test_every_sample_fits_and_is_nearly_full(name):
    task = ruler(name, length=LENGTH, count_tokens=count, num_samples=4)
    lengths = [total(task, item) for item in task.items]
    assert len({item.context for item in task.items}) == 4
    assert max(lengths) <= LENGTH
    assert min(lengths) > 0.9 * LENGTH


@pytest.mark.parametrize("name", MADE)
def test_answers_score_and_samples_repeat(name):
    task = ruler(name, length=LENGTH, count_tokens=count, num_samples=2)
    for item in task.items:
        assert task.score(item, " ".join(item.answers)) == 1.0
        assert task.score(item, "none of it") == 0.0
        assert item.fields["length"] == str(LENGTH)
    assert ruler(name, length=LENGTH, count_tokens=count, num_samples=2).data_hash() == task.data_hash()
    other = ruler(name, length=LENGTH, count_tokens=count, num_samples=2, seed=1)
    assert other.items[0].context != task.items[0].context


@pytest.mark.parametrize(
    ("name", "answers", "pattern"),
    [
        ("niah_single_1", 1, r"\d{7}"),
        ("niah_single_3", 1, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"),
        ("niah_multikey_1", 1, r"\d{7}"),
        ("niah_multikey_3", 1, r"[0-9a-f-]{36}"),
        ("niah_multivalue", 4, r"\d{7}"),
        ("niah_multiquery", 4, r"\d{7}"),
    ],
)
def test_needles(name, answers, pattern):
    task = ruler(name, length=LENGTH, count_tokens=count, num_samples=3)
    for item in task.items:
        prompt = task.prompt(item)
        assert len(set(item.answers)) == answers
        assert all(re.fullmatch(pattern, answer) for answer in item.answers)
        assert all(item.context.count(answer) == 1 for answer in item.answers)
        single = answers == 1
        assert ("What is the special magic" in prompt.after) is single
        assert prompt.before.startswith("A special magic" if single else "Some special magic")
        assert prompt.answer_prefix.endswith("mentioned in the provided text " + ("is" if single else "are"))
        retrieved = task.retrieved_prompt(item, "passages")
        assert "within the following retrieved text chunks." in retrieved.before
        assert retrieved.answer_prefix == prompt.answer_prefix


def test_multikey_1_hides_four_keys():
    item = ruler("niah_multikey_1", length=LENGTH, count_tokens=count, num_samples=1).items[0]
    assert item.context.count("One of the special magic numbers for ") == 4


def test_variable_tracking_leads_to_all_five_names():
    task = ruler("vt", length=LENGTH, count_tokens=count, num_samples=3)
    for item in task.items:
        found = {}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", item.context):
            found[name] = found.get(value, value)
        value = item.fields["value"]
        assert {name for name, of in found.items() if of == value} == set(item.answers)
        assert len(item.answers) == 5
        # the worked example ends in its five answers
        example = item.fields["example"]
        assert re.search(r"they are: (?:[A-Z]{3} ?){5}\n\n$", example)
        assert task.prompt(item).before.startswith(example)


def test_common_words_are_the_most_common():
    item = ruler("cwe", length=8192, count_tokens=count, num_samples=1).items[0]
    counts = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", item.context))
    top = [word for word, _ in counts.most_common(10)]
    assert set(top) == set(item.answers)
    assert {counts[word] for word in item.answers} == {30}
    assert counts.most_common(11)[10][1] == 3


@pytest.mark.parametrize("size", [53, 60, 72, 79, 100, 2000])
def test_frequent_words_are_unambiguous(size):
    sample = frequent_words(4096).make(random.Random(0), 0, size)
    ranked = Counter(sample.context.split()).most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(sample.answers)
    assert ranked[3][1] > ranked[4][1]


def squad(path):
    def paragraph(article, number):
        text = f"Article {article} paragraph {number} says {article * 10 + number}."
        questions = [
            {
                "question": f"What says {article}/{number}?",
                "answers": [{"text": str(article * 10 + number)}, {"text": "alias"}],
                "is_impossible": False,
            },
            {"question": "Nothing?", "answers": [], "is_impossible": True},
        ]
        return {"context": text, "qas": questions}

    data = {"data": [{"paragraphs": [paragraph(a, n) for n in range(4)]} for a in range(1, 9)]}
    path.write_text(json.dumps(data))
    return path


def test_question_answering_over_squad(tmp_path):
    path = squad(tmp_path / "dev.json")
    task = ruler("qa_1", length=200, count_tokens=count, num_samples=50, source=path)
    assert len(task.items) == 32  # no more than there are questions that can be answered
    for item in task.items:
        article, number = re.search(r"(\d)/(\d)", item.question).groups()
        assert f"Article {article} paragraph {number} says" in item.context
        # the paragraphs of the same article come before any other
        assert all(f"Article {article} paragraph {n} " in item.context for n in range(4))
        assert item.context.startswith("Document 1:\n")
        assert total(task, item) <= 200
        assert task.score(item, "it is an Alias") == 1.0  # any of the references is enough
    places = {
        re.search(rf"Document (\d+):\n{re.escape(gold)}", item.context).group(1)
        for item in task.items
        for gold in [f"Article {item.question[10]} paragraph {item.question[12]} says"]
    }
    assert len(places) > 2


def test_question_answering_over_hotpotqa(tmp_path):
    rows = [
        {
            "question": f"Q{i}?",
            "answer": f"A{i}",
            "context": [[f"T{i}", ["One. ", f"A{i} two."]], ["Shared", ["Same."]]],
        }
        for i in range(6)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(rows))
    task = ruler("qa_2", length=150, count_tokens=count, num_samples=6, source=path)
    for i, item in enumerate(task.items):
        assert f"T{i}\nOne. A{i} two." in item.context
        assert item.context.count("Shared\nSame.") == 1
        assert task.score(item, f"a{i}.") == 1.0


def test_bad_requests_are_named(tmp_path):
    with pytest.raises(InvalidParameter, match="must be one of"):
        ruler("niah", length=LENGTH, count_tokens=count)
    with pytest.raises(InvalidParameter, match="too short"):
        ruler("niah_single_2", length=100, count_tokens=count)
    with pytest.raises(InvalidParameter, match="at least 1"):
        ruler("vt", length=LENGTH, count_tokens=count, num_samples=0)
    with pytest.raises(DocumentError, match="local copy of SQuAD"):
        ruler("qa_1", length=LENGTH, count_tokens=count)
    with pytest.raises(DocumentError, match="cannot be read"):
        ruler("qa_2", length=LENGTH, count_tokens=count, source=tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"data": [{}]}')
    with pytest.raises(DocumentError, match="not in the format of SQuAD"):
        ruler("qa_1", length=LENGTH, count_tokens=count, source=tmp_path / "other.json")


def test_haystack():
    words = essay(5000)
    assert words.startswith("Persuasion by Jane Austen (1818) Chapter 1 Sir Walter Elliot, of Kellynch Hall,")
    assert len(words.split(" ")) == 5000
    assert essay(200_000).count("Sir Walter Elliot, of Kellynch Hall, in Somersetshire") == 3
    text = 'He left. "Why?" she said. Mr. smith (so named) stayed! “No.” The end'
    parts = sentences(text)
    assert parts == ["He left.", '"Why?" she said.', "Mr. smith (so named) stayed!", "“No.”", "The end"]
    assert " ".join(sentences(words)) == words


def test_weighted_average():
    scores = {4096: 90.0, 8192: 60.0, 16384: 30.0}
    assert weighted_average(scores, "inc") == pytest.approx((90 + 2 * 60 + 3 * 30) / 6)
    assert weighted_average(scores, "dec") == pytest.approx((3 * 90 + 2 * 60 + 30) / 6)
    with pytest.raises(InvalidParameter):
        weighted_average({}, "inc")
