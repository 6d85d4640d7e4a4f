"""Small tokenizers of every kind, built in the test run: bytes, byte-level BPE, and unigram with a metaspace."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

# ChatML, with the begin token written by the template itself, as Llama's does.
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = [
    "Please read the following text and answer the question below.",
    "user assistant system What is the name of the valve? The valve is called Seven.",
    "Orla walked along the shore and looked for the lamp. The lamp stood on the table, and the table was old.",
    "naïve café 雪 🦉 1234567890 ()[]{}<>|_/ \n\n ... !? the and of to in",
] * 4


def _wrap(
    backend: Tokenizer, chat_template: str | None, *, normalized: bool = False, rstrip: bool = False
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=normalized, rstrip=rstrip) for token in SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _begins_with_bos(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[begin])
    return backend


def byte_tokenizer(*, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, no merges; its post-processor puts `<s>` in front of whatever it encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(_begins_with_bos(backend), chat_template)


@lru_cache
def _trained_bpe() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return str(backend.to_str())


def bpe_tokenizer(*, chat_template: str | None = CHATML, nfc: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges, in the manner of GPT-2 and SmolLM2. With `nfc` it normalizes, special tokens too."""
    backend = Tokenizer.from_str(_trained_bpe())
    if nfc:
        backend.normalizer = normalizers.NFC()
    return _wrap(backend, chat_template, normalized=nfc)


@lru_cache
def _trained_unigram(prepend_scheme: str) -> str:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return str(backend.to_str())


def unigram_tokenizer(prepend_scheme: str, *, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Unigram over metaspaces, in the manner of Llama 2 and Mistral; `prepend_scheme` is always, first or never."""
    return _wrap(_begins_with_bos(Tokenizer.from_str(_trained_unigram(prepend_scheme))), chat_template)


def legacy_tokenizer(*, rstrip: bool = False) -> PreTrainedTokenizerFast:
    """The metaspace as a normalizer, as in the first Llama conversions: each stretch of text gets one in front.

    With `rstrip` its special tokens swallow the white space behind them, as Phi-3's do.
    """
    backend = Tokenizer.from_str(_trained_unigram("never"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    return _wrap(backend, CHATML, rstrip=rstrip)
