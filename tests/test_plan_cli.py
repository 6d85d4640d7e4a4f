"""`rapid plan`, the configs it reads, and the refusal of what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest

import rapid
from rapid.cli import main as command
from rapid.errors import ModelError
from rapid.models.config import count_parameters, read_config
from rapid.models.sources import resolve
from rapid.planning import GIB, HARDWARE, ModelShape, check_loading, plan

TINY_CACHE_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values; layers, heads, dimensions; float32
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = command.run(["plan", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def write_gguf(path: Path, *, tied: bool) -> Path:
    """Two layers of a Llama, 32 wide, 10 tokens, in the gguf package's own writing."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.token_type", [1] * 10)
    writer.add_token_list([f"token {i} é" for i in range(10)])
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestPlan:
    def test_a_model_directory(self, run, tiny_model_dir):
        status, out, err = run("--target", tiny_model_dir, "--contexts", "100,1500", "--hardware", "cpu", "--json")
        assert (status, err) == (0, "")
        report = json.loads(out)
        assert report.keys() == {"target", "drafter", "model", "hardware", "available_bytes", "plans"}
        assert report["model"]["num_parameters"] == count_parameters(resolve(tiny_model_dir))
        first, second = report["plans"]
        assert second["target_cache_bytes"] - first["target_cache_bytes"] == 1400 * TINY_CACHE_BYTES
        assert first["fits"]
        assert first["within_window"]
        assert not run_json(run, "--target", tiny_model_dir, "--contexts", "2000")["plans"][0]["within_window"]

    def test_a_config_of_a_model_that_is_not_here(self, run, config):
        report = run_json(run, "--config", config, "--hardware", "h200", "--contexts", "131072", "--retrieved", "5400")
        expected = plan(ModelShape.from_config(LLAMA_8B), HARDWARE["h200"], 131072, retrieved=5400)
        (found,) = report["plans"]
        assert found["decode_s"] == expected.decode_s
        assert found["speed_up"] == expected.speed_up
        assert report["model"]["dtype"] == "bfloat16"

    def test_the_table(self, run, config):
        status, out, _ = run("--config", config, "--hardware", "a800", "--contexts", "4096,120000,1000000")
        assert status == 0
        head, columns, *rows, speed, note = out.splitlines()
        assert "8,030 M parameters, 14.96 GiB as bfloat16; A800-80GB" in head
        assert columns.split()[0] == "context"
        assert [row.split()[0] for row in rows] == ["4,096", "120,000", "1,000,000*"]
        assert [row.split()[5] for row in rows] == ["yes", "yes", "NO"]
        assert speed.startswith("speed-up: of drafting 10 tokens")
        assert note == "* with its answer longer than the model's window of 131,072 tokens"

    def test_what_is_retrieved_follows_the_rule_of_ask(self, run, config):
        report = run_json(run, "--config", config, "--hardware", "a800", "--contexts", "1000,8192,120000")
        assert [p["retrieved"] for p in report["plans"]] == [1000, 4096, 5120]

    def test_a_quantised_drafter_streams_less(self, run, config):
        def draft_step_s(drafter: str) -> float:
            report = run_json(
                run, "--config", config, "--drafter", drafter, "--hardware", "h200", "--contexts", "131072"
            )
            return report["plans"][0]["draft_step_s"]

        assert draft_step_s("self:4bit") < 0.6 * draft_step_s("self:8bit") < 0.6 * draft_step_s("self")

    def test_this_machine(self, run, tiny_model_dir):
        report = run_json(run, "--target", tiny_model_dir, "--contexts", "100")
        assert report["hardware"]["name"] == "this CPU"
        assert report["plans"][0]["decode_s"] > 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--hardware", "tpu"), "a800"),
            (("--contexts", "4k"), "whole numbers"),
            (("--contexts", ""), "whole numbers"),
            (("--contexts", "0"), "at least 1"),
            (("--acceptance-rate", "2"), "between 0 and 1"),
            (("--config", "/no/such/config.json"), "config.json"),
            (("--target", "/no/such/model"), "does not exist"),
            (("--drafter", "self:3bit"), "self:8bit"),
            (("--dtype", "float8"), "float8"),
        ],
    )
    def test_bad_usage_is_one_line(self, run, tiny_model_dir, arguments, message):
        defaults = {"--target": tiny_model_dir, "--hardware": "cpu"}
        given = [part for pair in defaults.items() if pair[0] not in arguments for part in pair]
        status, out, err = run(*given, *arguments)
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert message in err


def run_json(run, *arguments: str):
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


class TestConfig:
    @pytest.mark.parametrize("tied", [True, False])
    def test_a_gguf_header_is_what_the_gguf_package_wrote(self, tmp_path, tied):
        source = resolve(str(write_gguf(tmp_path / "tiny.gguf", tied=tied)))
        found = read_config(source)
        expected = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 512,
            "vocab_size": 10,
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "model_type": "llama",
        }
        assert found == expected
        assert count_parameters(source) == (1 if tied else 2) * 320

    @pytest.mark.parametrize("keep", [4, 20, 100, 300])
    def test_a_torn_gguf_is_an_error(self, tmp_path, keep):
        path = write_gguf(tmp_path / "tiny.gguf", tied=True)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelError, match="cannot be read"):
            read_config(resolve(str(path)))

    def test_a_config_of_pictures_and_text_is_the_part_for_text(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"text_config": LLAMA_8B}))
        from rapid.models.config import read_config_file

        assert ModelShape.from_config(read_config_file(path)).num_parameters == 8_030_261_248


class TestWeights:
    def test_packed_linears_of_an_untied_model(self):
        """Table and norms in float32, everything else in 16 bits."""
        packed = ModelShape.from_config(LLAMA_8B, "float32-packed")
        whole = ModelShape.from_config(LLAMA_8B, "float32")
        table, norms = 128256 * 4096, (2 * 32 + 1) * 4096
        assert packed.weight_bytes == 4 * (table + norms) + 2 * (whole.num_parameters - table - norms)
        assert packed.read_bytes == packed.weight_bytes - 4 * table
        assert packed.cache_bytes_per_token == whole.cache_bytes_per_token

    def test_a_tied_head_is_packed_beside_its_table(self):
        tied = {**LLAMA_8B, "tie_word_embeddings": True}
        packed, untied = (ModelShape.from_config(c, "float32-packed") for c in (tied, LLAMA_8B))
        assert packed.weight_bytes == untied.weight_bytes


class TestRefusal:
    def test_a_model_that_does_not_fit_is_refused_before_it_is_read(self, tiny_model_dir, monkeypatch):
        monkeypatch.setattr("rapid.backends.memory.available_bytes", lambda device: 1000)
        monkeypatch.setattr("rapid.backends.local.load_weights", lambda *a, **k: pytest.fail("read the weights"))
        with pytest.raises(ModelError, match=r"need 0\.0 GiB of memory and 0\.0 GiB are free: use a smaller"):
            rapid.Engine.load(tiny_model_dir)

    def test_one_that_just_fits_is_loaded(self, tiny_model_dir, monkeypatch):
        needed = 4 * count_parameters(resolve(tiny_model_dir))
        monkeypatch.setattr("rapid.backends.memory.available_bytes", lambda device: needed)
        rapid.Engine.load(tiny_model_dir)
        monkeypatch.setattr("rapid.backends.memory.available_bytes", lambda device: needed - 1)
        with pytest.raises(ModelError):
            rapid.Engine.load(tiny_model_dir)

    def test_a_document_whose_cache_does_not_fit_is_refused_before_it_is_read(self, tiny_model_dir, monkeypatch):
        text = rapid.Document("The mill stands by the river. " * 40, "a.txt")
        session = rapid.Engine.load(tiny_model_dir).open(text, prefill=False)
        with monkeypatch.context() as patch:
            patch.setattr("rapid.backends.memory.available_bytes", lambda device: 1000)
            patch.setattr("rapid.models.hf.HFModel.run", lambda *a, **k: pytest.fail("read the document"))
            for read in (session.prefill, lambda: session.ask("Where is the mill?")):
                with pytest.raises(ModelError, match=r"needs 0\.0 GiB more .* 0\.0 GiB are free: use a shorter"):
                    read()
        sampling = rapid.Sampling(max_new_tokens=4)
        assert session.ask("Where is the mill?", sampling=sampling).token_ids
        # What it holds already needs no memory.
        monkeypatch.setattr("rapid.backends.memory.available_bytes", lambda device: 0)
        assert session.ask("Where is the mill?", sampling=sampling).token_ids

    def test_the_figures(self):
        check_loading(16 * GIB, 16 * GIB)
        with pytest.raises(ModelError, match=r"16\.0 GiB of memory and 8\.0 GiB are free") as caught:
            check_loading(16 * GIB, 8 * GIB)
        assert "\n" not in str(caught.value)

    def test_what_is_free_is_a_part_of_what_there_is(self):
        from rapid.backends.memory import available_bytes

        assert 2**24 < available_bytes("cpu") < 2**50
