"""lit-gpt checkpoints in and out: row order, identity, published sizes to the byte, and the other containers."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import weight_conversion.convert
from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import (
    PUBLISHED_SIZES,
    Architecture,
    export,
    export_size,
    n_params,
    open_checkpoint,
    published_architecture,
    tensor_shapes,
)
from weight_conversion.files import TensorSource, safetensors_size

GOLDEN = Path(__file__).parents[1] / "golden" / "lit_gpt"

# ML-GSAI/SMDM lit_gpt/config.py, and the non-embedding counts of pretrain/train_mdm.py:
# size, n_layer, n_head, n_embd, intermediate_size, non-embedding parameters.
PUBLISHED = [
    ("6M", 6, 4, 256, 1024, 6_294_784),
    ("19M", 8, 6, 384, 1536, 18_880_896),
    ("34M", 8, 8, 512, 2048, 33_563_136),
    ("48M", 9, 9, 576, 2304, 47_786_688),
    ("66M", 10, 10, 640, 2560, 65_549_440),
    ("85M", 13, 10, 640, 2560, 85_214_080),
    ("75M", 16, 8, 640, 1600, 75_387_520),
    ("113M", 12, 12, 768, 3072, 113_265_408),
    ("142M", 15, 12, 768, 3072, 141_581_568),
    ("170M", 18, 12, 768, 3072, 169_897_728),
    ("180M", 14, 14, 896, 3584, 179_856_768),
    ("206M", 16, 14, 896, 3584, 205_550_464),
    ("231M", 18, 14, 896, 3584, 231_244_160),
    ("268M", 16, 16, 1024, 4096, 268_469_248),
    ("302M", 18, 16, 1024, 4096, 302_027_776),
    ("336M", 20, 16, 1024, 4096, 335_586_304),
    ("472M", 18, 10, 1280, 5120, 471_906_560),
    ("551M", 21, 10, 1280, 5120, 550_557_440),
    ("571M", 18, 11, 1408, 5632, 571_001_728),
    ("629M", 24, 10, 1280, 5120, 629_208_320),
    ("666M", 21, 11, 1408, 5632, 666_168_448),
    ("717M", 19, 12, 1536, 6144, 717_285_888),
    ("761M", 24, 11, 1408, 5632, 761_335_168),
    ("831M", 22, 12, 1536, 6144, 830_541_312),
    ("944M", 25, 12, 1536, 6144, 943_796_736),
    ("1028M", 20, 14, 1792, 7168, 1_027_677_952),
    ("1233M", 24, 14, 1792, 7168, 1_233_213_184),
    ("1476M", 22, 16, 2048, 8192, 1_476_487_168),
    ("1678M", 25, 16, 2048, 8192, 1_677_826_048),
    ("2121M", 28, 17, 2176, 8704, 2_121_393_280),
]


@pytest.fixture(params=["gqa/mdm", "gqa/ar", "mha/mdm", "mha/ar"])
def folder(request):
    return GOLDEN / request.param


def read(path, config=None):
    """Architecture and all tensors, copied out of the file."""
    checkpoint = open_checkpoint(path, config)
    return checkpoint.architecture, {name: tensor.clone() for name, tensor in checkpoint.tensors()}


def same(left, right):
    """Whether two mappings hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def assert_same_files(written, source):
    """Both have the same tensors, metadata and bytes of data in all; the order of the tensors may differ."""
    assert same(load_file(written), load_file(source))
    metadata = []
    for path in (written, source):
        with safe_open(path, framework="pt") as file:
            metadata.append(file.metadata() or {})
    assert metadata[0] == metadata[1]
    assert len(data_of(written)) == len(data_of(source))


def data_of(path):
    """What follows the header of a safetensors file."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def lit_shapes(n_layer, n_head, n_embd, hidden, rows):
    """What a published file holds, from its documentation: fused QKV is [(n_head + 2 n_head) head_size, n_embd]."""
    shapes = {"transformer.wte.weight": (rows, n_embd), "transformer.ln_f.weight": (n_embd,)}
    for i in range(n_layer):
        block = f"transformer.h.{i}."
        shapes[block + "norm_1.weight"] = shapes[block + "norm_2.weight"] = (n_embd,)
        shapes[block + "attn.attn.weight"] = (3 * n_embd, n_embd)
        shapes[block + "attn.proj.weight"] = (n_embd, n_embd)
        shapes[block + "mlp.swiglu.w1.weight"] = shapes[block + "mlp.swiglu.w2.weight"] = (hidden, n_embd)
        shapes[block + "mlp.swiglu.w3.weight"] = (n_embd, hidden)
    return {**shapes, "lm_head.weight": (32000, n_embd)}


class ShapesOnly(TensorSource):
    """A checkpoint nobody may read from."""

    def __init__(self, shapes):
        self.path = Path("/nowhere/mdm.safetensors")
        self._shapes = shapes

    def shapes(self):
        return self._shapes

    def read(self, name, start=0, stop=None):
        raise AssertionError(f"{name} was read")


def test_fused_rows_are_group_by_group(folder):
    config = json.loads((folder / "lit_config.json").read_text())
    heads, groups = config["n_head"], config["n_query_groups"]
    d_head = config["n_embd"] // heads
    theirs = load_file(folder / "model.safetensors")
    _, ours = read(folder / "model.safetensors")
    for i in range(config["n_layer"]):
        rows = iter(theirs[f"transformer.h.{i}.attn.attn.weight"])
        expected = {"q": [], "k": [], "v": []}
        for _ in range(groups):
            for part, n_rows in (("q", heads // groups * d_head), ("k", d_head), ("v", d_head)):
                for _ in range(n_rows):
                    expected[part].append(next(rows))
        assert next(rows, None) is None
        for part, rows in expected.items():
            assert torch.equal(ours[f"blocks.{i}.attn.{part}.weight"], torch.stack(rows)), (i, part)


def test_every_other_tensor_is_taken_as_it_is(folder):
    theirs = load_file(folder / "model.safetensors")
    _, ours = read(folder / "model.safetensors")
    renamed = {
        "attn.o": "attn.proj", "ln1": "norm_1", "ln2": "norm_2",
        "mlp.gate": "mlp.swiglu.w1", "mlp.up": "mlp.swiglu.w2", "mlp.down": "mlp.swiglu.w3",
    }  # fmt: skip
    for i in range(json.loads((folder / "lit_config.json").read_text())["n_layer"]):
        for mine, lit in renamed.items():
            assert torch.equal(ours[f"blocks.{i}.{mine}.weight"], theirs[f"transformer.h.{i}.{lit}.weight"]), mine
    assert torch.equal(ours["embed.weight"], theirs["transformer.wte.weight"])
    assert torch.equal(ours["ln_final.weight"], theirs["transformer.ln_f.weight"])
    assert torch.equal(ours["unembed.weight"], theirs["lm_head.weight"])


@pytest.mark.parametrize(
    ("folder", "most_bytes"),
    [("gqa/ar", 5000), ("mha/mdm", 5000), ("mha/ar", 1 << 24)],
    indirect=["folder"],
)
def test_joined_pieces_are_the_tensors(folder, most_bytes):
    checkpoint = open_checkpoint(folder / "model.safetensors")
    pieces = in_pieces(checkpoint, most_bytes)
    if most_bytes < 10_000:
        assert len(pieces["embed.weight"]) > 1
        assert len(pieces["blocks.0.attn.q.weight"]) == checkpoint.architecture.n_key_value_heads
    _, whole = read(folder / "model.safetensors")
    assert same({name: torch.cat(parts) for name, parts in pieces.items()}, whole)


def in_pieces(checkpoint, most_bytes):
    """The pieces of each tensor, of at most so many bytes or one row."""
    pieces = {}
    for name, piece in checkpoint.key_map.to_ours(checkpoint.source.read, most_bytes):
        pieces.setdefault(name, []).append(piece.clone())
    return pieces


def test_convert_then_export_is_the_identity(folder, tmp_path):
    source = folder / "model.safetensors"
    architecture, tensors = read(source)
    written = export(tensors, architecture, tmp_path / "again.safetensors")
    assert_same_files(written, source)
    again, _ = read(written)
    assert again == architecture
    theirs, ours = (json.loads((config_folder / "lit_config.json").read_text()) for config_folder in (folder, tmp_path))
    # "org" means nothing to the network, and of the vocabulary it is the padded size that does.
    assert {**theirs, **ours} == {**theirs, "vocab_size": theirs["padded_vocab_size"]}
    assert ours.keys() >= theirs.keys() - {"org", "padding_multiple"}


def test_a_loaded_model_exports_the_tensors_it_came_from(golden, tmp_path):
    written = export(golden.model.state_dict(), golden.model.cfg.architecture, tmp_path / "model.safetensors")
    assert_same_files(written, golden.checkpoint)


def test_the_mask_row(folder):
    architecture, tensors = read(folder / "model.safetensors")
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    if folder.name == "mdm":
        assert architecture.d_vocab == architecture.d_vocab_out + 1 == len(embedding) == 513
        assert architecture.mask_token_id == 512
        assert torch.equal(tensors["embed.weight"][architecture.mask_token_id], embedding[-1])
        assert (architecture.attention_dir, architecture.readout) == ("bidirectional", "in_place")
    else:
        assert architecture.d_vocab == architecture.d_vocab_out == len(embedding) == 512
        assert architecture.mask_token_id is None
        assert (architecture.attention_dir, architecture.readout) == ("causal", "shifted")
    assert architecture.rotary_dtype == "bfloat16"


def test_a_vocabulary_that_was_not_padded_yet_is_padded_as_in_training(folder):
    config = json.loads((folder / "lit_config.json").read_text())
    del config["padded_vocab_size"]
    assert open_checkpoint(folder / "model.safetensors", config).architecture.d_vocab_out == 512


def test_thirty_sizes_are_published():
    assert [size for size, *_ in PUBLISHED] == list(PUBLISHED_SIZES)


@pytest.mark.parametrize("kind", ["mdm", "ar"])
@pytest.mark.parametrize(("size", "n_layer", "n_head", "n_embd", "hidden", "n_in_blocks"), PUBLISHED)
def test_a_published_size_is_recognised_from_shapes(
    size, n_layer, n_head, n_embd, hidden, n_in_blocks, kind, monkeypatch, tmp_path
):
    rows = 32001 if kind == "mdm" else 32000
    shapes = lit_shapes(n_layer, n_head, n_embd, hidden, rows)
    monkeypatch.setattr(weight_conversion.convert, "open_tensors", lambda path: ShapesOnly(shapes))
    checkpoint = open_checkpoint(tmp_path / "downloaded.safetensors")
    shape = checkpoint.architecture
    assert checkpoint.key_map.their_shapes == shapes
    assert shape == published_architecture(size, kind) == published_architecture(f"Diff_LLaMA_{size}", kind)
    assert (shape.n_layers, shape.n_heads, shape.d_model, shape.d_mlp) == (n_layer, n_head, n_embd, hidden)
    assert (shape.n_key_value_heads, shape.d_head, shape.n_ctx) == (n_head, n_embd // n_head, 2048)
    assert (shape.d_vocab, shape.d_vocab_out) == (rows, 32000)
    assert shape.mask_token_id == (32000 if kind == "mdm" else None)
    assert n_params(shape) == n_in_blocks + (rows + 32000) * n_embd == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize(
    ("size", "kind", "n_bytes"),
    [
        ("336M", "mdm", 1_604_508_816),
        ("170M", "mdm", 876_215_712),
        ("1028M", "mdm", 4_569_486_608),
        ("19M", "mdm", 173_835_280),
        ("19M", "ar", 173_833_744),
    ],
)
def test_file_sizes_to_the_byte(size, kind, n_bytes):
    assert export_size(published_architecture(size, kind)) == n_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_file_that_was_written(folder, tmp_path, dtype):
    architecture, tensors = read(folder / "model.safetensors")
    path = export(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, architecture, tmp_path / "a.safetensors"
    )
    theirs, by_library = load_file(path), tmp_path / "b.safetensors"
    save_file(theirs, by_library)
    if dtype == torch.float32:
        assert export_size(architecture) == by_library.stat().st_size
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert safetensors_size(shapes, "F32" if dtype == torch.float32 else "BF16") == by_library.stat().st_size
    assert len(data_of(path)) == len(data_of(by_library))


@pytest.mark.parametrize(
    ("folder", "wrap"),
    [
        ("gqa/mdm", "flat"),
        ("gqa/ar", "model"),
        ("mha/mdm", "state_dict"),
        ("mha/ar", "training state"),
        ("gqa/mdm", "before torch 1.6"),
    ],
    indirect=["folder"],
)
def test_a_pth_holds_the_same_as_the_safetensors(folder, tmp_path, wrap):
    tensors = load_file(folder / "model.safetensors")
    content = {
        "model": {"model": tensors},
        "state_dict": {"state_dict": tensors},
        "training state": {"model": tensors, "iter_num": 7, "hparams": {"lr": 2e-4}, "optimizer": {"state": {}}},
    }.get(wrap, tensors)
    path = tmp_path / "model.pth"
    torch.save(content, path, _use_new_zipfile_serialization=wrap != "before torch 1.6")
    architecture, tensors = read(path, folder / "lit_config.json")
    expected_architecture, expected = read(folder / "model.safetensors")
    assert architecture == expected_architecture
    assert same(tensors, expected)


@pytest.mark.parametrize("folder", ["gqa/mdm"], indirect=True)
def test_a_pth_is_the_same_in_pieces(folder, tmp_path, monkeypatch):
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "model.pth")
    monkeypatch.setattr("weight_conversion.files.REOPEN_BYTES", 20_000)
    pieces = in_pieces(open_checkpoint(tmp_path / "model.pth", folder / "lit_config.json"), 5000)
    assert same({name: torch.cat(parts) for name, parts in pieces.items()}, read(folder / "model.safetensors")[1])


def test_a_checkpoint_in_shards(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
    where = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "lit_config.json").write_bytes((folder / "lit_config.json").read_bytes())
    assert same(read(tmp_path)[1], read(folder / "model.safetensors")[1])


@pytest.mark.parametrize("beside", [{"model_type": "llama", "hidden_size": 2048}, {"format": "diffusion_lens"}])
def test_the_config_of_another_family_beside_the_checkpoint_is_ignored(folder, tmp_path, beside):
    for name in ("model.safetensors", "lit_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(beside))
    expected = open_checkpoint(folder / "model.safetensors").architecture
    assert open_checkpoint(tmp_path).architecture == expected


@st.composite
def architectures(draw):
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 3))
    d_head = 2 * draw(st.integers(1, 3))
    d_vocab_out = draw(st.integers(1, 9))
    masked = draw(st.booleans())
    return Architecture(
        family="lit_gpt",
        name=draw(st.sampled_from(["a", "Diff_LLaMA_19M"])),
        n_layers=draw(st.integers(1, 3)),
        d_model=heads * d_head,
        n_heads=heads,
        n_key_value_heads=groups,
        d_head=d_head,
        d_mlp=draw(st.integers(1, 9)),
        d_vocab=d_vocab_out + masked,
        d_vocab_out=d_vocab_out,
        n_ctx=draw(st.integers(1, 64)),
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=d_vocab_out if masked else None,
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rotary_dtype="bfloat16",
    )


@settings(max_examples=8, deadline=None, database=None)
@given(architecture=architectures(), seed=st.integers(0, 2**31), half=st.booleans(), ours=st.booleans())
def test_whatever_is_exported_is_read_back(architecture, seed, half, ours):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in tensor_shapes(architecture).items()
    }
    family = "diffusion_lens" if ours else None
    with tempfile.TemporaryDirectory() as scratch:
        path = export(tensors, architecture, Path(scratch) / "model.safetensors", family)
        for source in (path, path.parent):
            again, read_back = read(source)
            assert again == architecture
            assert same(read_back, tensors)
        rows = in_pieces(open_checkpoint(path), most_bytes=1)
        assert same({name: torch.cat(parts) for name, parts in rows.items()}, tensors)
        assert len(rows["embed.weight"]) == architecture.d_vocab


def test_our_own_format_is_the_identity(either, tmp_path):
    model = either.model
    folder = model.save_pretrained(tmp_path / "saved")
    again = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    tokens = either.tensors("forward")["tokens"]
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
    assert again.cfg.architecture == model.cfg.architecture
    assert again.tokenizer is None
    # and from there back into the family's format
    written = export(again.state_dict(), again.cfg.architecture, tmp_path / "back" / "model.safetensors")
    assert_same_files(written, either.checkpoint)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_our_own_format_keeps_the_tokenizer(tiny, tmp_path):
    again = HookedDiffusionTransformer.from_pretrained(tiny.save_pretrained(tmp_path / "saved"), device="cpu")
    text = "today Ada is the brave " + ("pilot." if tiny.cfg.is_autoregressive else "[MASK].")
    assert again.to_tokens(text).tolist() == tiny.to_tokens(text).tolist()
    assert again.cfg.model_name == tiny.cfg.model_name
    assert again.cfg.default_prepend_bos == tiny.cfg.default_prepend_bos
    with torch.no_grad():
        plain = "today Ada is the brave pilot."
        assert torch.equal(again(plain), tiny(plain))


def test_our_own_format_keeps_bfloat16(either, tmp_path):
    load = HookedDiffusionTransformer.from_pretrained
    model = load(either.checkpoint, config=either.config, device="cpu", dtype=torch.bfloat16)
    folder = model.save_pretrained(tmp_path / "saved")
    on_disk = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in on_disk.values()} == {torch.bfloat16}
    again = load(folder, device="cpu", dtype=torch.bfloat16)
    assert again.cfg.dtype == torch.bfloat16
    assert same(again.state_dict(), model.state_dict())
    assert load(folder, device="cpu").cfg.dtype == torch.float32
