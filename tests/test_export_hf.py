"""`model.export_hf`: transformers goes on from the folder, or the message says what does."""

import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.loading import source
from weight_conversion import export

TEXT = "Gustav Geisser is the brave drummer of Rolsen."


def test_a_bundled_baseline_goes_on_in_transformers_as_measured(tmp_path):
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    tokens = model.to_tokens(TEXT)
    with pytest.warns(UserWarning, match="'tiny-ar' rounds its rotary tables to bfloat16") as caught:
        folder = model.export_hf(tmp_path / "llama")
    most = float(re.search(r"differ by at most ([\d.e+-]+)", str(caught[0].message)).group(1))
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT, return_tensors="pt")["input_ids"].tolist() == tokens.tolist()
    assert theirs.config.eos_token_id == model.tokenizer.eos_token_id
    assert theirs.config.bos_token_id is model.tokenizer.bos_token_id is None  # not 1, the default of a Llama
    assert theirs.config.architectures == ["LlamaForCausalLM"]
    logits = theirs(tokens).logits
    assert 1e-4 < (logits - model(tokens)).abs().max() <= most < 0.1
    again = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    assert_close(logits, again(tokens), rtol=1e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"cannot express rotary_dtype='bfloat16'.*model.export_hf\(folder\)"):
        export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors", "llama")


@pytest.mark.filterwarnings("ignore:'tiny-ar' rounds:UserWarning")
def test_the_present_folder_may_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu").export_hf(".")
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_causal_model_of_transformers_is_written_as_it_is(family, specimen, configs, tmp_path):
    """Without a warning, which would be an error."""
    model, tokens = specimen(configs[family]).model, torch.arange(12)[None]
    theirs = AutoModelForCausalLM.from_pretrained(model.export_hf(tmp_path / "one"))
    assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=2e-4)
    native = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "native"), device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(native.export_hf(tmp_path / "two"))  # the family that expresses it
    assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_twin_with_a_shifted_readout_goes_on_in_transformers(family, specimen, configs, tmp_path):
    """Also a padded text, and what transformers writes again; without a warning, which would be an error."""
    twin = {**configs[family], "mode": "bidirectional", "mask_token_id": 7}
    model, tokens = specimen(twin).model, torch.arange(24).view(2, 12)
    theirs = AutoModelForCausalLM.from_pretrained(model.export_hf(tmp_path / "twin"))
    assert theirs.config.architectures == [source.CAUSAL[family]]
    real = torch.ones_like(tokens)
    real[1, :3] = 0
    # Positions of the padded text count from its first token.
    theirs_of = theirs(tokens, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits
    assert_close(theirs_of[real.bool()], model(tokens, attention_mask=real)[real.bool()], rtol=1e-4, atol=2e-4)
    later = tokens.clone()
    later[:, -1] += 1
    assert (theirs(later).logits - theirs(tokens).logits)[:, 0].abs().max() > 1e-3
    theirs.save_pretrained(tmp_path / "again")
    for folder in ("twin", "again"):
        read = HookedDiffusionTransformer.from_pretrained(tmp_path / folder, device="cpu")
        assert (read.cfg.attention_dir, read.cfg.readout, read.cfg.mask_token_id) == ("bidirectional", "shifted", 7)
        assert torch.equal(read(tokens), model(tokens))
    blocks = specimen({**twin, "block_size": 4}).model
    with pytest.raises(ValueError, match=r"attends by blocks.*model.save_pretrained\(folder\).*Nothing was written"):
        blocks.export_hf(tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_twin_whose_first_token_is_alone_goes_on_in_transformers_with_a_mask(family, specimen, configs, tmp_path):
    model = specimen({**configs[family], "mode": "bidirectional", "mask_token_id": 7, "causal_first": True}).model
    tokens = torch.arange(24).view(2, 12)
    with pytest.warns(
        UserWarning, match=r"the first token of .* sees only itself.* pass texts of one length with an attention_mask"
    ):
        folder = model.export_hf(tmp_path / "twin")
    theirs, mask = AutoModelForCausalLM.from_pretrained(folder), torch.zeros(2, 1, 12, 12)
    mask[:, :, 0, 1:] = -torch.inf
    with pytest.raises(
        ValueError, match=r"config says causal_first, of a model that sees the whole canvas.*leave block"
    ):
        HookedDiffusionTransformer.from_pretrained(folder, block_size=4, device="cpu")
    assert_close(theirs(tokens, attention_mask=mask).logits, model(tokens), rtol=1e-4, atol=2e-4)
    assert not torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-3)
    theirs.save_pretrained(tmp_path / "again")
    for name in ("twin", "again"):
        read = HookedDiffusionTransformer.from_pretrained(tmp_path / name, device="cpu")
        assert read.cfg.architecture == replace(model.cfg.architecture, name=read.cfg.model_name)
        assert torch.equal(read(tokens), model(tokens))


def test_a_diffusion_model_is_written_for_the_code_of_its_authors(specimen, configs, tmp_path):
    model, tokens = specimen(configs["llada"]).model, torch.arange(12)[None]
    with pytest.warns(UserWarning, match="transformers has no class for 'llada'"):
        folder = model.export_hf(tmp_path / "llada")
    assert torch.equal(HookedDiffusionTransformer.from_pretrained(folder, device="cpu")(tokens), model(tokens))
    tiny = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with pytest.raises(ValueError, match=r"family 'lit_gpt'.*model.save_pretrained\(folder\)"):
        tiny.export_hf(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["llada"]


@pytest.mark.filterwarnings("ignore:'tiny-ar' rounds")
def test_an_error_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    model, folder = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu"), tmp_path / "model"

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(source, "save_tokenizer", full)
        with pytest.raises(OSError, match="no space left"):
            model.export_hf(folder)
    assert not list(tmp_path.iterdir())
    model.export_hf(folder)
    written = sorted(path.name for path in model.export_hf(folder).iterdir())  # again, in the place of the first
    assert written == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    (folder / "adapter.safetensors").touch()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"contains other files \(adapter.safetensors\): name another folder"):
        model.export_hf(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="is a file; export_hf needs a folder"):
        model.export_hf(folder / "config.json")
