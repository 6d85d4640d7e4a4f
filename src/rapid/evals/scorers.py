"""Scores of one prediction, between 0 and 1, exactly as the benchmarks compute them.

Sources: LongBench v2 (THUDM/LongBench 2e00731), InfiniteBench (OpenBMB/InfiniteBench 88b3daa), RULER
(NVIDIA/RULER c3f5e3b). The InfiniteBench scorers give its published scores on its released predictions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from rapid.errors import InvalidParameter
from rapid.evals.extraction import Extraction, extract_letter
from rapid.evals.optional import require
from rapid.evals.schema import LETTERS, Item, Scorer

if TYPE_CHECKING:
    from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHOICE_NOISE = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
# In this order: the first one found decides, wherever it stands.
_ANSWER_PREFIXES = ("answer is:", "answer:", "answer is", "option is")
_CONTROL = re.compile(r"[\x00-\x1f]")


def normalised_words(text: str) -> list[str]:
    """Lower-cased words without ASCII punctuation and English articles."""
    text = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def qa_f1(prediction: str, item: Item) -> float:
    """InfiniteBench En.QA: F1 of word multisets, the best over the references."""
    predicted = normalised_words(prediction)
    best = 0.0
    for answer in item.answers:
        reference = normalised_words(answer)
        common = (Counter(predicted) & Counter(reference)).total()
        if common:
            precision, recall = common / len(predicted), common / len(reference)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def _label(item: Item) -> tuple[str, str]:
    if item.answer_letter is None or item.choices is None:
        raise InvalidParameter(f"item {item.id} has no choices; score it by another metric")
    return item.choices[LETTERS.index(item.answer_letter)], item.answer_letter


def infinitebench_choice(prediction: str, item: Item) -> float:
    """InfiniteBench En.MC: first letter, whole text, answer prefix, then the first letter-like word."""
    label = _label(item)
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in LETTERS:
        return float(text[0] in label)
    if text == label[0]:
        return 1.0
    text = re.sub(" +", " ", text.translate(_CHOICE_NOISE))
    for prefix in _ANSWER_PREFIXES:
        position = text.find(prefix)
        if position != -1:
            # One more character is skipped, whatever it is: normally the space.
            rest = text[position + len(prefix) + 1 :]
            return float(rest.startswith(label))
    for word in text.split():
        if word in LETTERS:  # a substring of "ABCD", as in the original
            return float(word in label)
    return 0.0


def longbench_choice(mode: Extraction = "strict", *, compensated: bool = False) -> Scorer:
    """LongBench v2 accuracy. `compensated` gives 0.25, the odds of a guess, where no letter is found."""

    def score(prediction: str, item: Item) -> float:
        letter = extract_letter(prediction, mode)
        if letter is None and compensated:
            return 0.25
        return float(letter == _label(item)[1])

    return score


@cache
def _rouge_scorer() -> Any:
    return require("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rougeLsum"], use_stemmer=False)


def rouge_l_sum(prediction: str, item: Item) -> float:
    """InfiniteBench En.Sum: ROUGE-L-Sum F over newline-separated sentences, the best over the references."""
    scores = _rouge_scorer().score_multi(item.answers, prediction)
    return float(scores["rougeLsum"].fmeasure)


def _matches(prediction: str, item: Item) -> list[bool]:
    text = _CONTROL.sub("\n", prediction).strip().lower()
    return [answer.lower() in text for answer in item.answers]


def string_match_all(prediction: str, item: Item) -> float:
    """RULER: the fraction of the references that occur in the prediction, case ignored."""
    found = _matches(prediction, item)
    return sum(found) / len(found)


def string_match_part(prediction: str, item: Item) -> float:
    """RULER's question answering: 1 where any reference occurs in the prediction, case ignored."""
    return float(any(_matches(prediction, item)))
