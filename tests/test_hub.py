"""Whole repositories of the hub: tiny checkpoints of the published formats in a cache like Hugging Face's own."""

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from small_repositories import (
    FIRST,
    LLADA_ADDED,
    MASK,
    TEXT,
    bytes_tokenizer,
    dream_words,
    llada_words,
    ours,
    shard,
    words,
)
from tokenizers import processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.loading import shape_of
from diffusion_lens.loading.catalogue import PUBLISHED, REPOSITORIES, STATES
from diffusion_lens.loading.hub import fetch_repository
from diffusion_lens.model.text import token_spans
from diffusion_lens.training import TrainingConfig, finetune
from weight_conversion import RotaryScaling, export, n_params

load = HookedDiffusionTransformer.from_pretrained
CHAT = [{"role": "user", "content": " Hi "}]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

SHAPE = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def publish(folder: Path, repo: str, cache: Path) -> Path:
    """Put a folder into a cache as `huggingface_hub` leaves a download there."""
    home = cache / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, home / "snapshots" / COMMIT))


def theirs(folder: Path, family: str, **settings):
    """A random model of Hugging Face's, saved by its own code in several shards."""
    config, network = FAMILIES[family]
    torch.manual_seed(0)
    model = network(config(**SHAPE, **settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


@pytest.fixture
def llada(tmp_path):
    """A folder as GSAI-ML/LLaDA-8B-Base is one, with code and a pickle beside it."""
    folder = tmp_path / "llada"
    model = ours(folder, "llada")
    shard(folder)
    llada_words(folder)
    (folder / "modeling_llada.py").write_text("raise SystemExit('remote code ran')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return folder, model


class Hub:
    """`snapshot_download` over a folder: only the requested files come into the cache."""

    def __init__(self, source: Path, cache: Path, error: Exception | None = None):
        self.source, self.error, self.calls = source, error, []
        self.target = cache / "snapshots" / COMMIT

    def __call__(self, repo, *, allow_patterns, **settings):
        self.calls.append((repo, allow_patterns, settings))
        if self.error:
            raise self.error
        for path in self.source.rglob("*"):
            name = path.relative_to(self.source).as_posix()
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (self.target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self.target / name)
        return str(self.target)


@pytest.fixture
def online(monkeypatch, tmp_path):
    def install(source, error=None):
        hub = Hub(source, tmp_path / "cache", error)
        monkeypatch.setattr("diffusion_lens.loading.hub.snapshot_download", hub)
        monkeypatch.setattr("diffusion_lens.loading.hub.HF_HUB_OFFLINE", False)
        return hub

    return install


def same_weights(left, right):
    pairs = zip(left.named_parameters(), right.named_parameters(), strict=True)
    return all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)


def refused(kind, match, words, name="owner/name", **settings):
    """Loading raises exactly this kind of error, with these words in its message."""
    with pytest.raises(kind, match=match) as caught:
        load(name, **settings)
    assert type(caught.value) is kind
    assert [word for word in words if word not in str(caught.value)] == []


# --- repositories in the cache


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_repository_of_hugging_faces_own(family, tmp_path):
    reference = theirs(tmp_path / "saved", family)
    assert len([*(tmp_path / "saved").glob("model-*.safetensors")]) > 2
    publish(tmp_path / "saved", "Owner/Some-Model.v1", tmp_path / "cache")
    model = load("Owner/Some-Model.v1", cache_dir=tmp_path / "cache", device="cpu")
    tokens = torch.arange(40).reshape(2, 20) * 7
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, atol=1e-5, rtol=1e-4)
    assert model.cfg.model_name == "Owner/Some-Model.v1"
    assert model.cfg.family == family
    assert model.tokenizer is None


def test_a_name_of_the_catalogue_and_its_repository_are_one(llada, tmp_path):
    folder, model = llada
    publish(folder, "GSAI-ML/LLaDA-8B-Base", tmp_path / "cache")
    for name in ("llada-8b-base", "LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Base"):
        loaded = load(name, cache_dir=tmp_path / "cache", local_files_only=True, device="cpu")
        assert same_weights(loaded, model)
        assert loaded.cfg.model_name == "llada-8b-base"
        # The file's own numbers, not the catalogue's.
        assert (loaded.cfg.mask_token_id, loaded.cfg.d_model, loaded.cfg.n_ctx) == (MASK, 32, 128)
        assert not loaded.cfg.default_prepend_bos


def test_dream_is_read_shifted(tmp_path):
    model = ours(tmp_path / "dream", "dream")
    publish(tmp_path / "dream", "Dream-org/Dream-v0-Base-7B", tmp_path / "cache")
    loaded = load("dream-7b-base", cache_dir=tmp_path / "cache", device="cpu")
    assert same_weights(loaded, model)
    assert (loaded.cfg.readout, loaded.cfg.attention_dir) == ("shifted", "bidirectional")


def test_our_own_format_may_be_published_too(tmp_path):
    load("tiny-mdm", device="cpu").save_pretrained(tmp_path / "saved")
    publish(tmp_path / "saved", "owner/mine", tmp_path / "cache")
    assert load("owner/mine", cache_dir=tmp_path / "cache", device="cpu").cfg.mask_token_id is not None


def test_a_folder_here_comes_before_the_hub(tmp_path, monkeypatch, llada, online):
    folder, model = llada
    hub = online(folder)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "GSAI-ML" / "LLaDA-8B-Base")
    assert same_weights(load("GSAI-ML/LLaDA-8B-Base", device="cpu"), model)
    assert hub.calls == []


@pytest.mark.parametrize("path", ["../owner/name", "a/b/c", "/owner/name", "owner/", "ow ner/name"])
def test_names_that_cannot_be_an_id_are_not_looked_up(path, tmp_path, monkeypatch, online):
    hub = online(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="neither a published name nor a file or folder"):
        load(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load("owner/model.safetensors")
    with pytest.raises(ValueError, match="neither a published name nor a file or folder"):
        load(Path("owner/name"))
    assert hub.calls == []


# --- what is fetched


def test_only_config_weights_and_tokenizer_are_fetched(llada, online, tmp_path):
    folder, model = llada
    (folder / "original").mkdir()
    for name in ("consolidated.safetensors", "original/model.safetensors", "original/config.json"):
        (folder / name).write_bytes(b"?")
    hub = online(folder)
    loaded = load(
        "GSAI-ML/LLaDA-8B-Base", revision="v1", cache_dir=tmp_path / "c", token="hf_x", local_files_only=False
    )
    assert same_weights(loaded.to("cpu"), model)
    (_, small, first), (_, single, second), (_, large, third) = hub.calls
    settings = {"cache_dir": tmp_path / "c", "token": "hf_x", "local_files_only": False}
    assert first == {**settings, "revision": "v1"}
    assert second == third == {**settings, "revision": COMMIT}
    assert single == ["model.safetensors"]  # which transformers takes before shards
    assert not any(fnmatch("model-00001-of-00002.safetensors", pattern) for pattern in small)
    assert large == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert {path.relative_to(hub.target).as_posix() for path in hub.target.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        *large,
    }


def test_one_file_without_an_index(online, tmp_path):
    model = ours(tmp_path / "dream", "dream")
    hub = online(tmp_path / "dream")
    assert same_weights(load("owner/name", device="cpu"), model)
    assert [patterns for _, patterns, _ in hub.calls[1:]] == [["model.safetensors"]]


def test_the_single_file_is_fetched_before_the_shards(llada, online):
    folder, model = llada
    other = ours(folder.parent / "other", "llada")
    with torch.no_grad():
        other.ln_final.weight.add_(1.0)
    shutil.copy(export(other.state_dict(), other.cfg.architecture, folder.parent / "w" / "model.safetensors"), folder)
    hub = online(folder)
    loaded = load("owner/name", device="cpu")
    assert same_weights(loaded, other)
    assert not same_weights(loaded, model)
    assert [patterns for _, patterns, _ in hub.calls[1:]] == [["model.safetensors"]]


def test_an_unknown_family_is_refused_before_its_weights_are_fetched(online, tmp_path):
    folder = tmp_path / "gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    (folder / "model.safetensors").write_bytes(b"?")
    hub = online(folder)
    words = ("huggingface.co/EleutherAI/pythia-70m", "model_type='gpt_neox'", "llada", "dream", "qwen3")
    refused(ValueError, "no known family", words, "EleutherAI/pythia-70m")
    assert len(hub.calls) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"has no model\.safetensors at its top level.*not as pickles"),
        (["pytorch_model.bin", "model.safetensors"], r"has no config\.json or lit_config\.json at its top"),
    ],
)
def test_what_a_repository_lacks(names, message, online, tmp_path):
    ours(tmp_path / "whole", "dream")
    (tmp_path / "whole" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "part").mkdir()
    for name in names:
        shutil.copy(tmp_path / "whole" / name, tmp_path / "part")
    online(tmp_path / "part")
    with pytest.raises(FileNotFoundError, match=rf"huggingface\.co/owner/name {message}"):
        load("owner/name")


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret.safetensors", "pytorch_model.bin", "x.py"])
def test_an_index_names_safetensors_beside_it(file, llada, online):
    folder, _ = llada
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    hub = online(folder)
    refused(ValueError, r"should name \.safetensors files beside it", [file])
    assert len(hub.calls) == 1


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (GatedRepoError, PermissionError, ("accepted its terms", "token='hf_...'", "hf auth login")),
        (RepositoryNotFoundError, FileNotFoundError, ("there is no", "private", "no file or folder 'owner/name'")),
        (RevisionNotFoundError, ValueError, ("no revision 'v9'", "the newest")),
        (
            LocalEntryNotFoundError,
            FileNotFoundError,
            ("not complete", "connected machine", "from_pretrained('folder')"),
        ),
    ],
)
def test_errors_of_the_hub_are_explained(error, kind, words, online, tmp_path):
    online(tmp_path, error.__new__(error))
    refused(kind, r"huggingface\.co/owner/name", words, revision="v9")


PAGE = b"<!DOCTYPE html>\n<html><body><script>{{ login }}</script></body></html>\n"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("merges.txt", PAGE),
        ("merges.txt", "#version: 0.2\nĠ t\nĠt he\nh".encode()),
        ("merges.txt", b""),
        ("chat_template.jinja", PAGE),
        ("chat_template.jinja", b"Access denied"),
        ("chat_template.jinja", b"{% for message in messages %}{{ mess"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("additional_chat_templates/tools.jinja", PAGE),
        ("config.json", b"[]"),
        ("tokenizer.json", b'{"error": "try again later"}'),
        ("model.safetensors.index.json", b'{"error": "try again later"}'),
        ("model-00001-of-00002.safetensors", b""),
        *((file, PAGE) for file in ("config.json", "tokenizer.json", "model-00002-of-00002.safetensors")),
        *((file, "half") for file in ("config.json", "tokenizer.json", "model-00002-of-00002.safetensors")),
    ],
)
def test_a_damaged_download_is_removed_from_the_cache(file, content, llada, online):
    folder, model = llada
    (folder / file).parent.mkdir(exist_ok=True)
    whole = (folder / file).read_bytes() if (folder / file).exists() else None
    (folder / file).write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    hub = online(folder)
    refused(ValueError, "removed from the cache: call again to fetch it again", [str(hub.target / file)], device="cpu")
    assert not (hub.target / file).exists()
    if whole is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(whole)
    assert same_weights(load("owner/name", device="cpu"), model)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("merges.txt", "#version: 0.2\nĠ t\nĠt he\n".encode()),
        ("merges.txt", "Ġ t\r\n# #version\r\n\u2028 x".encode()),
        ("chat_template.jinja", b"<|im_start|>{{ messages[0]['content'] }}"),
        ("chat_template.jinja", b"\xef\xbb\xbf{% generation %}{{ messages }}{% endgeneration %}"),
        ("chat_template.jinja", b"\n"),
        ("generation_config.json", b"?"),
    ],
)
def test_a_good_file_stays(file, content, llada, online):
    """And so does one that is nothing to us."""
    folder, model = llada
    (folder / file).write_bytes(content)
    hub = online(folder)
    shutil.copytree(folder, hub.target)
    assert same_weights(load("owner/name", device="cpu"), model)
    assert (hub.target / file).read_bytes() == content


def test_a_block_diffusion_model_is_refused_before_weights_are_fetched(llada, online):
    folder, _ = llada
    (folder / "config.json").write_text(
        json.dumps({"model_type": "a2d-qwen3", "architectures": ["A2DQwen3LMHeadModel"]})
    )
    hub = online(folder)
    with pytest.raises(ValueError, match=r"huggingface\.co/dllm-hub/\S+ is a block-diffusion model"):
        load("dllm-hub/another-diffusion-bd3lm")
    assert len(hub.calls) == 1


@pytest.mark.parametrize(
    "error",
    [HfHubHTTPError.__bases__[0]("timed out"), OSError("no space left on device"), RuntimeError("CAS service error")],
)
def test_a_failed_connection_is_reported(error, online, tmp_path):
    online(tmp_path, error)
    words = rf"huggingface\.co/owner/name was not fetched: {type(error).__name__} \({error}\)\. Try again.*folder"
    with pytest.raises(ConnectionError, match=words):
        load("owner/name")


def test_a_name_that_no_repository_can_have(online, tmp_path):
    online(tmp_path, HFValidationError("Repo id must use alphanumeric chars"))
    with pytest.raises(ValueError, match=r"huggingface\.co/owner/na\.\.me cannot be a repository.*alphanumeric"):
        load("owner/na..me")


def test_the_repository_of_smdm_is_not_one_model(online, tmp_path):
    hub = online(tmp_path)
    with pytest.raises(ValueError, match=r"nieshen/SMDM contains many checkpoints.*'smdm-1028m'"):
        load("nieshen/SMDM")
    assert hub.calls == []


# --- offline


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llada-8b-base", ("'llada-8b-base'", "huggingface.co/GSAI-ML/LLaDA-8B-Base", "(16.0 GB)")),
        ("GSAI-ML/iLLaDA-8B-Base", ("huggingface.co/GSAI-ML/iLLaDA-8B-Base", "there is no file or folder")),
        ("owner/name", ("huggingface.co/owner/name", "there is no file or folder 'owner/name' here")),
    ],
)
def test_offline_with_an_empty_cache(name, words, tmp_path):
    words = (*words, "config.json", "*.safetensors", "index", "tokenizer", "from_pretrained('folder')")
    refused(FileNotFoundError, "is not complete in the Hugging Face cache", words, name, cache_dir=tmp_path)


@pytest.mark.parametrize("gone", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_offline_with_an_incomplete_cache(gone, llada, tmp_path):
    folder, _ = llada
    (publish(folder, "owner/name", tmp_path / "cache") / gone).unlink()
    with pytest.raises(FileNotFoundError, match=r"owner/name is not complete in the Hugging Face cache"):
        load("owner/name", cache_dir=tmp_path / "cache")


# --- what a config leaves unsaid


def a2d(folder: Path, family: str, **settings) -> None:
    """A checkpoint as dllm publishes them: a causal model's config under another model_type."""
    theirs(folder, family, tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": f"a2d-{family}", "block_size": None, **settings})
    )
    words(folder, bytes_tokenizer("<|endoftext|>", "<|mask|>"), eos_token="<|endoftext|>", mask_token="<|mask|>")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_mask_of_dllms_models_is_their_tokenizers(family, tmp_path):
    a2d(tmp_path / "a2d", family)
    publish(tmp_path / "a2d", "owner/name", tmp_path / "cache")
    for source in ("owner/name", tmp_path / "a2d"):
        model = load(source, cache_dir=tmp_path / "cache", device="cpu")
        cfg = model.cfg
        assert (cfg.mask_token_id, cfg.attention_dir, cfg.readout) == (MASK, "bidirectional", "in_place")
        assert model.to_tokens("[MASK]").tolist() == [[MASK]]
    assert shape_of(tmp_path / "a2d").mask_token_id == MASK
    (tmp_path / "elsewhere").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "a2d" / name).rename(tmp_path / "elsewhere" / name)
    assert load(tmp_path / "a2d", tokenizer=tmp_path / "elsewhere", device="cpu").cfg.mask_token_id == MASK


def test_the_configs_mask_comes_before_the_tokenizers(tmp_path):
    a2d(tmp_path / "a2d", "qwen3", mask_token_id=FIRST)
    assert load(tmp_path / "a2d", device="cpu").cfg.mask_token_id == FIRST


def test_the_tokenizers_mask_comes_before_the_catalogues(tmp_path):
    a2d(tmp_path / "a2d", "qwen3")
    publish(tmp_path / "a2d", "JetLM/SDAR-4B-Chat", tmp_path / "cache")
    model = load("sdar-4b-chat", cache_dir=tmp_path / "cache", device="cpu")
    assert (model.cfg.mask_token_id, model.cfg.block_size) == (MASK, 4)
    assert PUBLISHED["sdar-4b-chat"].architecture.mask_token_id != MASK


def test_without_a_mask_anywhere_there_is_no_diffusion_model(tmp_path):
    a2d(tmp_path / "a2d", "qwen3")
    (tmp_path / "a2d" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="mask_token_id is None"):
        load(tmp_path / "a2d")


@pytest.mark.parametrize(
    ("parameters", "base"), [(None, 10000.0), ({"rope_type": "default", "rope_theta": 77.0}, 77.0)]
)
def test_a_llama_2_config_without_a_rotary_base(parameters, base, tmp_path):
    theirs(tmp_path / "llama", "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_parameters")}
    rotary = {} if parameters is None else {"rope_parameters": parameters}
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, **rotary}))
    publish(tmp_path / "llama", "meta-llama/Llama-2-7b-hf", tmp_path / "cache")
    assert load("llama-2-7b", cache_dir=tmp_path / "cache", device="cpu").cfg.rotary_base == base


# --- tokenizers


@pytest.fixture(scope="module")
def llada_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llada")
    ours(folder, "llada")
    llada_words(folder)
    return load(folder, device="cpu")


def test_bos_is_prepended_where_the_tokenizer_does_it_itself(tmp_path):
    ours(tmp_path, "dream")
    begins = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", FIRST)])
    for settings, does, expected in [
        ({"bos_token": "<b>"}, True, True),  # Llama-3
        ({"bos_token": "<b>"}, False, False),  # Dream
        ({"bos_token": "<b>", "add_bos_token": True}, False, True),  # Llama-2
        ({"bos_token": "<b>", "add_bos_token": False}, True, False),  # LLaDA
        ({"bos_token": None}, False, False),  # Qwen
        ({"bos_token": None, "add_bos_token": True}, False, False),
    ]:
        tokenizer = bytes_tokenizer("<b>")
        if does:
            tokenizer.post_processor = begins
        model = load(words(tmp_path, tokenizer, **settings), device="cpu")
        assert model.cfg.default_prepend_bos is expected, (settings, does)
        ids = model.to_tokens("Ada")[0].tolist()
        assert ids == ([FIRST] if expected else []) + tokenizer.encode("Ada", add_special_tokens=False).ids
        again = load(model.save_pretrained(tmp_path / "again"), device="cpu")
        assert again.cfg.default_prepend_bos is expected, (settings, does)
        assert again.to_tokens("Ada")[0].tolist() == ids


def test_a_chat_template(llada_model, tmp_path):
    for model in (llada_model, load(llada_model.save_pretrained(tmp_path), device="cpu")):
        text = model.tokenizer.apply_chat_template(CHAT, tokenize=False)
        header = "<|start_header_id|>{}<|end_header_id|>\n\n"
        assert text == f"<|startoftext|>{header.format('user')}Hi<|eot_id|>{header.format('assistant')}"
        ids = model.to_tokens(text)[0].tolist()
        assert ids[:2] == [FIRST, FIRST + 2]
        assert ids.count(FIRST) == 1
        assert ids == list(model.tokenizer.apply_chat_template(CHAT)["input_ids"])


def test_fine_tuning_writes_the_same_tokenizer(tmp_path):
    ours(tmp_path / "llada", "llada")
    llada_words(tmp_path / "llada")
    settings = json.loads((tmp_path / "llada" / "tokenizer_config.json").read_text())
    (tmp_path / "llada" / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|eot_id|>"}))
    model = load(tmp_path / "llada", device="cpu")
    rows = [{"prompt": "Ada was", "completion": " a pilot"}]
    finetune(model, rows, TrainingConfig(steps=1, batch_size=1), tmp_path / "tuned", progress=False)
    again = load(tmp_path / "tuned", device="cpu")
    assert again.cfg.family == "llada"
    assert not again.cfg.default_prepend_bos
    for text in ("Ada[MASK]", model.tokenizer.apply_chat_template(CHAT, tokenize=False)):
        assert again.to_tokens(text).tolist() == model.to_tokens(text).tolist()
    assert again.tokenizer.chat_template == model.tokenizer.chat_template


def test_a_template_in_a_file_of_its_own(tmp_path):
    ours(tmp_path, "llada")
    llada_words(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load(tmp_path, device="cpu").tokenizer.apply_chat_template(CHAT, tokenize=False) == " Hi !"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("tools: {{ messages[0].content }}")
    for model in (load(tmp_path, device="cpu"), load(load(tmp_path).save_pretrained(tmp_path / "again"), device="cpu")):
        template = model.tokenizer.apply_chat_template
        assert template(CHAT, tokenize=False) == " Hi !"
        assert template(CHAT, chat_template="tools", tokenize=False) == "tools:  Hi "


def test_templates_by_name_in_the_config(tmp_path):
    ours(tmp_path, "llada")
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    words(tmp_path, bytes_tokenizer(*LLADA_ADDED), chat_template=named)
    template = load(tmp_path, device="cpu").tokenizer.apply_chat_template
    assert (template(CHAT, tokenize=False), template(CHAT, chat_template="rag", tokenize=False)) == ("a", "b")


def test_templates_are_fetched(llada, online):
    folder, _ = llada
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("?")
    online(folder)
    tokenizer = load("owner/name", device="cpu").tokenizer
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == " Hi !"
    assert tokenizer.apply_chat_template(CHAT, chat_template="tools", tokenize=False) == "?"


def test_mask_is_written_as_in_every_model(llada_model, tmp_path):
    again = load(load(llada_model.save_pretrained(tmp_path), device="cpu").save_pretrained(tmp_path), device="cpu")
    for model in (llada_model, again):
        plain = model.to_tokens("Ada").tolist()[0]
        for mask in ("[MASK]", "<|mdm_mask|>"):
            assert model.to_tokens(f"Ada{mask}{mask}Ada{mask}").tolist() == [[*plain, MASK, MASK, *plain, MASK]]
        assert model.tokenizer.mask_token_id == model.cfg.mask_token_id == MASK
        assert len(model.tokenizer) == FIRST + 5
        assert model.to_single_token("[MASK]") == MASK
        assert model.to_str_tokens(torch.tensor([MASK])) == ["[MASK]"]
        # Spans still refer to the text as it was given.
        text = "a[MASK]b <|eot_id|>é"
        spans = token_spans(model, text)
        ids = model.to_tokens(text)[0].tolist()
        letters = [text[a:b] for (a, b), token in zip(spans, ids, strict=True) if token != MASK]
        assert letters == ["a", "b", " ", "<|eot_id|>", "é", "é"]


def test_dreams_tokenizer_is_qwen2s(tmp_path):
    ours(tmp_path, "dream")
    model = load(dream_words(tmp_path), device="cpu")
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    merges = [tuple(line.split()) for line in (tmp_path / "merges.txt").read_text().splitlines() if line[0] != "#"]
    reference = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    for text in (TEXT, "I'LLx Ada'Sun  pay 1,234.50€\r\n\r\n  (e\u0301té)", "変換 x=3;\n\tdef f(): pass  "):
        ids = model.to_tokens(text)[0].tolist()
        assert ids == reference(text)["input_ids"]
        # So few merges would not show every split.
        splits = [
            tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
            for tokenizer in (model.tokenizer, reference)
        ]
        assert splits[0] == splits[1]
        assert model.to_string(torch.tensor(ids)) == reference.decode(ids)
    assert not model.cfg.default_prepend_bos
    assert model.to_tokens("a", prepend_bos=True)[0, 0] == FIRST + 2
    assert model.to_tokens("a[MASK]").tolist()[0][1:] == [MASK]
    again = load(model.save_pretrained(tmp_path / "again"), device="cpu")
    assert again.to_tokens(TEXT + "[MASK]").tolist() == model.to_tokens(TEXT + "[MASK]").tolist()


def test_parts_that_do_not_make_a_tokenizer(tmp_path):
    ours(tmp_path, "dream")
    with pytest.raises(ValueError, match=r"of a 'GPT2Tokenizer'.*add its tokenizer\.json"):
        load(dream_words(tmp_path, tokenizer_class="GPT2Tokenizer"))
    token = {"content": "<|mask|>", "special": True}
    with pytest.raises(
        ValueError, match=r"'<\|mask\|>' has the id 300 in .*, but after the vocabulary it gets the id 266"
    ):
        load(dream_words(tmp_path, added_tokens_decoder={"300": token}))
    dream_words(tmp_path)
    (tmp_path / "merges.txt").write_text("no merge\n")
    with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt in .* do not fit together"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer_config\.json"):
        load(tmp_path)


# --- the catalogue's repositories

# Weights in all, as the hub's pages or the arithmetic of the published tensors give them.
WEIGHTS = {
    **dict.fromkeys(["llada-8b-base", "llada-8b-instruct"], 8_015_581_184),
    **dict.fromkeys(["dream-7b-base", "dream-7b-instruct", "dream-coder-7b-instruct"], 7_615_616_512),
    **dict.fromkeys(["diffucoder-7b-base", "qwen2.5-7b", "qwen2.5-7b-instruct"], 7_615_616_512),
    **dict.fromkeys(["llama-2-7b", "diffullama-7b"], 6_738_415_616),
    **dict.fromkeys(["llama-3-8b", "llama-3-8b-instruct"], 8_030_261_248),
    **dict.fromkeys(["llama-3.1-8b", "llama-3.1-8b-instruct"], 8_030_261_248),
    **dict.fromkeys(["llama-3.2-1b", "llama-3.2-1b-instruct"], 1_235_814_400),
    **dict.fromkeys(["qwen2.5-0.5b", "qwen2.5-coder-0.5b-instruct"], 494_032_768),
    "qwen3-0.6b": 596_049_920,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m-instruct": 134_515_008,
}
# As the hub rounds them: bytes of the files in GB, or weights in billions.
GB = {
    "sdar-4b-chat": 8.82,
    **dict.fromkeys(["nemotron-labs-diffusion-3b", "nemotron-labs-diffusion-3b-base"], 7.66),
    **dict.fromkeys(["mdlm-owt", "mdlm-no_flashattn-fp32-owt"], 0.679),
    **dict.fromkeys([f"bd3lm-owt-block_size{size}" for size in (4, 8, 16)], 0.679),
}
BILLIONS = {
    "nemotron-labs-diffusion-14b": 14,
    "llada2.0-mini": 16,
    "llada2.1-mini": 16,
    "llada2.0-flash": 103,
    **dict.fromkeys(["stable-diffcoder-8b-base", "stable-diffcoder-8b-instruct"], 8.25),
    "rnd1-base-0910": 30.5,
}


def test_every_name_has_its_published_number_of_weights():
    assert {*WEIGHTS, *GB, *BILLIONS} == {entry.name for entry in REPOSITORIES}
    for name, size in GB.items():
        assert PUBLISHED[name].n_bytes / 1e9 == pytest.approx(size, abs=0.006 if size > 1 else 0.0006)
    for name, size in BILLIONS.items():
        assert n_params(shape_of(name)) / 1e9 == pytest.approx(size, abs=0.5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_shape_is_known_before_a_download(name):
    assert n_params(shape_of(name)) == WEIGHTS[name]


@pytest.mark.parametrize(
    ("name", "factor"), [("llama-3.1-8b-instruct", 8.0), ("llama-3.2-1b", 32.0), ("llama-3-8b", None)]
)
def test_the_scaling_of_rotary_frequencies_is_known_before_a_download(name, factor):
    scaling = None if factor is None else RotaryScaling(factor, 1.0, 4.0, 8192)
    assert (shape_of(name).rotary_scaling, shape_of(name).rotary_base) == (scaling, 500000.0)


def test_the_bytes_of_llada_and_diffucoder_are_those_of_their_shards():
    assert PUBLISHED["llada-8b-base"].n_bytes / 1e9 == pytest.approx(2.11 + 2.95 + 2.99 + 2.95 + 2.92 + 2.11, abs=0.03)
    assert PUBLISHED["diffucoder-7b-base"].n_bytes / 1e9 == pytest.approx(4.88 + 4.93 + 4.33 + 1.09, abs=0.03)


SHIFTED = ("dream", "diffucoder", "diffullama", "rnd1")
DIFFUSION = ("llada", "nemotron", "sdar", "stable-diffcoder", "mdlm", "bd3lm", *SHIFTED)


def test_every_repository_has_one_name_and_a_shape():
    assert len({entry.repo for entry in REPOSITORIES}) == len(REPOSITORIES)
    for entry in REPOSITORIES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo)
        shape, diffusion = entry.architecture, entry.name.startswith(DIFFUSION)
        by_blocks = "block_size" in entry.known and not entry.name.startswith("nemotron")
        sees = "block_causal" if by_blocks else "bidirectional"
        assert shape.attention_dir == (sees if diffusion else "causal"), entry.name
        assert (shape.noise == "absorbing") == diffusion
        shifted = not diffusion or entry.name.startswith(SHIFTED)
        assert shape.readout == ("shifted" if shifted else "in_place")
        assert shape.name == entry.repo


def test_the_command_line_describes_what_was_never_downloaded():
    shown = CliRunner().invoke(app, ["info", "dream-7b-base", "--json"])
    facts = json.loads(shown.stdout)["results"]
    assert shown.exit_code == 0
    assert (facts["parameters"], facts["mask_token_id"], facts["readout"]) == (7_615_616_512, 151666, "shifted")
    listed = CliRunner().invoke(app, ["models"]).stdout.splitlines()
    rows = {line.split()[0]: line for line in listed}
    assert re.search("16.03 GB +bidirectional +numbers equal the authors' code", rows["llada-8b-base"])
    assert rows["llada-8b-base"].endswith("GSAI-ML/LLaDA-8B-Base")
    assert "config and shapes seen" in rows["nemotron-labs-diffusion-14b"]
    assert [line.partition(":")[0] for line in listed[-3:]] == list(STATES)
    assert "causal" in rows["qwen2.5-7b"]
    question = ["--prompt", "x", "--subject", "x", "--answer", " y"]
    dry = CliRunner().invoke(app, ["trace", "mdlm-owt", *question, "--dry-run", "--flops", "1e12"])
    assert dry.exit_code == 0, dry.output


def test_a_shape_that_is_known_only_from_the_files(llada, tmp_path, monkeypatch):
    folder, model = llada
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match="is not complete in the Hugging Face cache"):
        shape_of("GSAI-ML/iLLaDA-8B-Base")
    publish(folder, "GSAI-ML/iLLaDA-8B-Base", tmp_path / "cache")
    publish(folder, "owner/name", tmp_path / "cache")
    assert shape_of("GSAI-ML/iLLaDA-8B-Base") == shape_of("owner/name") == model.cfg.architecture


def test_an_offline_fetch_returns_the_snapshot(llada, tmp_path):
    snapshot = publish(llada[0], "owner/name", tmp_path / "cache")
    assert fetch_repository("owner/name", None, {"cache_dir": tmp_path / "cache"}) == snapshot
