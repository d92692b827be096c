"""Low-rank deltas: their folder, and what they do to the weights of their base."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.hooked_diffusion_transformer import load_source
from diffusion_lens.loading import Delta, catalogue
from diffusion_lens.loading.catalogue import BundledDelta, find_pretrained
from diffusion_lens.loading.delta import Base, LowRank, base_sha256

RANK, ALPHA = 3, 6.0


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(model, weights):
    return all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


def of_random_factors(model, base, *, new_row=False, mask_row=False, dtype=torch.float32):
    shape, generator = model.cfg.architecture, torch.Generator().manual_seed(1)
    rows = shape.d_vocab + new_row
    of_head = {"d_vocab_out": rows} if shape.tied else {}
    twin = replace(shape, name="a twin", attention_dir="bidirectional", mask_token_id=rows - 1, d_vocab=rows, **of_head)
    factors = {
        name: LowRank(
            torch.randn(RANK, weight.shape[1], generator=generator).to(dtype),
            torch.randn(len(weight), RANK, generator=generator).to(dtype) / 10,
        )
        for name, weight in model.named_parameters()
        if re.fullmatch(r"blocks\.\d+\.(attn|mlp)\.\w+\.weight", name) and weight.dim() == 2
    }
    found = Base(str(base), base_sha256(model.named_parameters(), shape.d_vocab), shape.d_vocab)
    row = torch.randn(shape.d_model, generator=generator) if mask_row else None
    return Delta(factors, twin, found, ALPHA, row, trained_length=12, about={"seed": 1}, card="# A card\n")


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def base(request, tmp_path, specimen, configs):
    """A causal model, as a folder of transformers."""
    return specimen(configs[request.param]).model.export_hf(tmp_path / request.param)


@pytest.fixture
def model(base):
    return HookedDiffusionTransformer.from_pretrained(base, device="cpu")


@pytest.fixture
def llama(tmp_path, specimen, configs):
    folder = specimen(configs["llama"]).model.export_hf(tmp_path / "base")
    return HookedDiffusionTransformer.from_pretrained(folder, device="cpu"), folder


@pytest.fixture
def saved(llama, tmp_path):
    return of_random_factors(*llama).save(tmp_path / "delta")


def test_a_delta_adds_its_products_and_is_taken_off_bit_for_bit(model, base):
    delta, before = of_random_factors(model, base), copies(model)
    with delta.on(model):
        for name, weight in model.named_parameters():
            expected = before[name]
            if name in delta.factors:
                a, b = delta.factors[name]
                expected = expected + ALPHA / RANK * b @ a
            assert torch.allclose(weight, expected, atol=1e-6)
    assert same(model, before)
    with pytest.raises(ArithmeticError), delta.on(model):
        raise ArithmeticError
    assert same(model, before)
    assert not model._edits


def test_a_model_that_attends_otherwise_is_no_reading_of_the_base(model, base):
    delta = of_random_factors(model, base)
    twin = replace(delta, architecture=replace(delta.architecture, causal_first=True))
    cfg = DiffusionConfig.from_architecture(delta.architecture, device="cpu")
    with pytest.raises(ValueError, match=r"attends neither causally nor as .*: it has causal_first=False and not True"):
        twin.on(HookedDiffusionTransformer(cfg, seed=0))
    with twin.on(model):
        pass


@pytest.mark.parametrize(
    ("new_row", "mask_row", "dtype"),
    [
        (False, False, torch.float32),
        (False, True, torch.bfloat16),
        (True, False, torch.bfloat16),
        (True, True, torch.float32),
    ],
)
def test_a_saved_delta_loads_as_the_model_that_it_makes(new_row, mask_row, dtype, model, base, tmp_path):
    delta = of_random_factors(model, base, new_row=new_row, mask_row=mask_row, dtype=dtype)
    without, before = of_random_factors(model, base, new_row=new_row, dtype=dtype), copies(model)
    assert (delta.sha256 == without.sha256) == (not mask_row)
    folder = delta.save(tmp_path / "delta")
    again = Delta.load(folder)
    assert again.sha256 == delta.sha256
    assert (again.architecture, again.about, again.card) == (delta.architecture, {"seed": 1}, "# A card\n")
    twin = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    assert (twin.cfg.attention_dir, twin.cfg.trained_length, twin.cfg.model_name) == ("bidirectional", 12, "a twin")
    with delta.on(model):
        for name, weight in twin.named_parameters():
            assert torch.equal(weight[: len(model.get_parameter(name))], model.get_parameter(name)), name
    assert same(model, before)
    if mask_row:
        assert torch.equal(twin.W_E[twin.cfg.mask_token_id], delta.mask_row)
    elif new_row:
        rows = twin.W_E[:-1].double().mean(dim=0)
        assert torch.allclose(twin.W_E[-1].double(), rows, atol=1e-7)
    assert twin.cfg.mask_token_id == model.cfg.d_vocab - (not new_row)


def test_the_names_in_the_file_are_those_of_transformers(llama, saved):
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(llama[1])
    modules = dict(network.named_modules())
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * network.config.num_hidden_layers
    for key, tensor in tensors.items():
        path, kind = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key).groups()
        sizes = (RANK, modules[path].in_features) if kind == "A" else (modules[path].out_features, RANK)
        assert tensor.shape == sizes


def test_records_say_which_delta_the_weights_contain(llama, saved):
    model, _ = llama
    delta, tokens = Delta.load(saved), torch.arange(5)[None]
    assert "deltas" not in model.denoise(tokens, max_new_tokens=1).record
    with delta.on(model):
        assert model.denoise(tokens, max_new_tokens=1).record["deltas"] == [delta.sha256]
    twin = HookedDiffusionTransformer.from_pretrained(saved, device="cpu")
    assert twin.denoise(tokens, max_new_tokens=1).record["deltas"] == [delta.sha256]


def test_deltas_nest_with_edits_of_the_same_weights(llama, saved):
    model, _ = llama
    before, edit = copies(model), Delta.load(saved).on(model)
    edit.apply()
    with pytest.raises(ValueError, match="is applied already"):
        edit.apply()
    with pytest.raises(ValueError, match="take other edits and deltas out of it first"):
        Delta.load(saved).on(model).apply()
    model.restore_edits()
    assert same(model, before)
    once, twice = (Delta.load(saved).on(model) for _ in range(2))
    with once:
        changed = copies(model)
        with pytest.raises(ValueError, match="take other edits and deltas out of it first"), twice:
            pytest.fail("the same delta was applied twice")
        assert same(model, changed)
    assert same(model, before)
    with twice:
        assert same(model, changed)


def test_a_delta_is_applied_to_its_base_in_half_precision(llama, saved):
    delta, (_, folder) = Delta.load(saved), llama
    half = HookedDiffusionTransformer.from_pretrained(folder, device="cpu", dtype="bfloat16")
    with delta.on(half):
        pass
    with pytest.raises(ValueError, match="load that model in float32 or bfloat16"):
        delta.on(HookedDiffusionTransformer.from_pretrained(folder, device="cpu", dtype="float16")).apply()


def test_a_delta_of_another_base_is_refused(saved, specimen, configs, tmp_path):
    delta = Delta.load(saved)
    with pytest.raises(ValueError, match="the weights are not those of"):
        delta.on(specimen(configs["llama"], seed=1).model).apply()
    with pytest.raises(ValueError, match="is another architecture than"):
        delta.on(specimen({**configs["llama"], "num_hidden_layers": 2}).model)
    other = specimen(configs["llama"], seed=1).model.export_hf(tmp_path / "other")
    replace(delta, base=replace(delta.base, name=str(other))).save(saved)
    with pytest.raises(ValueError, match="the weights are not those of"):
        HookedDiffusionTransformer.from_pretrained(saved, device="cpu")
    replace(delta, base=replace(delta.base, name="smollm-of-nobody")).save(saved)
    told = r"its base 'smollm-of-nobody' \(named in delta\.json\), which cannot be used.*write its name or path there"
    with pytest.raises(ValueError, match=told):
        HookedDiffusionTransformer.from_pretrained(saved, device="cpu")


def test_the_model_of_a_delta_loads_in_other_ways_too(saved):
    twin = HookedDiffusionTransformer.from_pretrained(saved, device="cpu")
    half = HookedDiffusionTransformer.from_pretrained(saved, device="cpu", dtype="bfloat16")
    assert same(half, {name: weight.bfloat16() for name, weight in copies(twin).items()})
    assert same(load_source(twin.source, "cpu", mapped=True), copies(twin))
    folded = HookedDiffusionTransformer.from_pretrained(saved, device="cpu", fold_ln=True)
    tokens = torch.tensor([[3, 1, 4, twin.cfg.mask_token_id]])
    assert torch.allclose(folded(tokens), twin(tokens), atol=1e-4)
    with pytest.raises(ValueError, match="without folded norms"):
        Delta.load(saved).on(folded).apply()


def test_another_checkpoint_beside_a_delta_is_loaded_by_its_own_name(llama, saved, tmp_path):
    model, folder = llama
    for name in ("model.safetensors", "config.json"):
        (saved / name).write_bytes((folder / name).read_bytes())
    beside = HookedDiffusionTransformer.from_pretrained(saved / "model.safetensors", device="cpu")
    assert beside.cfg.architecture.attention_dir == "causal"
    assert same(beside, copies(model))
    twin = HookedDiffusionTransformer.from_pretrained(saved / "adapter_model.safetensors", device="cpu")
    assert twin.cfg.architecture.attention_dir == "bidirectional"


def test_a_delta_is_not_converted(saved, tmp_path):
    done = CliRunner(env={"COLUMNS": "999"}).invoke(app, ["convert", str(saved), str(tmp_path / "new.safetensors")])
    assert "is a delta, which has no weights of its own: the model that it makes of its base is written" in done.stderr


def test_a_base_beside_a_delta_comes_before_one_where_the_program_runs(llama, saved, tmp_path, monkeypatch):
    _, folder = llama
    folder.rename(saved / "a_base")
    (tmp_path / "a_base").mkdir()
    monkeypatch.chdir(tmp_path)
    delta = Delta.load(saved)
    replace(delta, base=replace(delta.base, name="a_base")).save(saved)
    assert HookedDiffusionTransformer.from_pretrained(saved, device="cpu").cfg.model_name == "a twin"


def test_a_delta_says_itself_what_model_it_makes(saved):
    with pytest.raises(ValueError, match="leave out mode=, block_size="):
        HookedDiffusionTransformer.from_pretrained(saved, mode="block", block_size=4)


def test_unfit_factors_are_refused(llama):
    model, folder = llama
    delta = of_random_factors(model, folder)
    name, (a, b) = next(iter(delta.factors.items()))
    for factors, message in (
        ({}, "changes nothing"),
        ({"embed.weight": LowRank(a, b)}, "no projection of a block"),
        ({name: LowRank(a, b[1:])}, "need A"),
        ({**delta.factors, name: LowRank(a[1:], b[:, 1:])}, "and the rank 2 need A"),
        ({name: LowRank(a * float("nan"), b)}, "are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(delta, factors=factors)
    with pytest.raises(TypeError, match="model=3 is an int"):
        delta.on(3)
    with pytest.raises(ValueError, match="deltas are of models of the families llama, qwen2, qwen3"):
        replace(delta, architecture=replace(delta.architecture, family="lit_gpt"))


def test_a_damaged_folder_is_refused(saved):
    def broken(file, change, message):
        before = (saved / file).read_bytes()
        content = json.loads(before)
        change(content)
        (saved / file).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            Delta.load(saved)
        (saved / file).write_bytes(before)

    broken("adapter_config.json", lambda config: config.update(use_dora=True), "another update than B A: use_dora")
    broken("adapter_config.json", lambda config: config.update(r=2), "says r=2, and the factors have rank 3")
    broken("delta.json", lambda said: said.update(format="x"), "its format is 'x'")
    broken("delta.json", lambda said: said["architecture"].pop("d_mlp"), "lacks")
    tensors = load_file(saved / "adapter_model.safetensors")
    save_file({**tensors, "x.lora_A.weight": torch.zeros(3, 3)}, saved / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="is no factor of"):
        Delta.load(saved)
    save_file(dict(list(tensors.items())[1:]), saved / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="one factor only"):
        Delta.load(saved)
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks adapter_model\.safetensors"):
        Delta.load(saved)


def test_a_delta_is_not_written_beside_other_weights(llama, tmp_path):
    model, folder = llama
    delta = of_random_factors(model, folder)
    with pytest.raises(ValueError, match=r"contains model\.safetensors"):
        delta.save(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        delta.save(tmp_path / "file")


def test_a_bundled_delta_is_a_name(llama, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "ASSETS", saved.parent)
    for name in list(catalogue.DELTAS):
        monkeypatch.delitem(catalogue.DELTAS, name)
    monkeypatch.setitem(catalogue.DELTAS, "delta", BundledDelta("delta", "base", "bidirectional", "llama", 12))
    twin = HookedDiffusionTransformer.from_pretrained("delta", device="cpu")
    assert (twin.cfg.model_name, twin.cfg.trained_length) == ("delta", 12)
    (listed,) = find_pretrained("a delta of base")
    assert (listed.name, listed.sees, listed.evidence) == ("delta", "bidirectional", catalogue.NUMBERS)


@pytest.mark.parametrize("entry", catalogue.DELTAS.values(), ids=lambda entry: entry.name)
def test_the_deltas_in_the_package_are_small_and_say_what_they_are(entry):
    delta = Delta.load(entry.folder)
    assert entry.n_bytes < 12e6
    assert (delta.architecture.name, delta.base.name) == (entry.name, entry.base)
    assert (delta.architecture.attention_dir, delta.architecture.family) == (entry.attention_dir, entry.family)
    assert delta.trained_length == entry.trained_length
    assert delta.mask_row is not None
    assert "Apache-2.0" in delta.card
