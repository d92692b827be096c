"""Names, files and tokenizers: what `from_pretrained` finds, fetches, checks and says when it cannot."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from diffusion_lens import HookedDiffusionTransformer, list_pretrained
from diffusion_lens.loading.catalogue import BUNDLED, DELTAS, PUBLISHED, REPOSITORIES, SMDM, TOKENIZER_REPO
from weight_conversion import PUBLISHED_SIZES, sha256_of_file

load = HookedDiffusionTransformer.from_pretrained
MDM = Path(__file__).parent / "golden" / "lit_gpt" / "gqa" / "mdm"
AR = MDM.parent / "ar"

# Every file of nieshen/SMDM that was seen, by folder (without "_safetensors") and stem.
SEEN = {
    "mdm": """
        mdm-19M-10e18 mdm-34M-6e18 mdm-48M-10e18 mdm-113M-10e18 mdm-113M-30e18 mdm-170M-100e18 mdm-170M-100e18-rsl-0.01
        mdm-231M-10e18 mdm-231M-100e18 mdm-336M-6e18 mdm-336M-10e18 mdm-336M-100e18 mdm-472M-10e18 mdm-472M-100e18
        mdm-551M-60e18 mdm-629M-100e18 mdm-717M-60e18 mdm-831M-100e18 mdm-944M-60e18 mdm-1028M-60e18 mdm-1028M-100e18
        mdm-1028M-1600e18 mdm-1028M-3300e18-rsl-0.01-bs-1024 mdm-1476M-100e18""",
    "ar": """
        ar-19M-10e18 ar-170M-6e18 ar-170M-100e18 ar-717M-30e18 ar-717M-60e18 ar-831M-30e18 ar-831M-60e18 ar-831M-100e18
        ar-944M-60e18 ar-1028M-60e18 ar-1028M-100e18 ar-1233M-60e18 ar-1476M-60e18 ar-1476M-100e18 ar-1678M-100e18
        ar-2121M-100e18""",
    "reverse": "mdm-1028M-1600e18-reverse",
    "gsm8k": "mdm-1028M-3300e18-rsl-gsm8k",
    "sharegpt": "mdm-1028M-1600e18-sharegpt ar-1028M-100e18-sharegpt",
}
SHA256 = {
    "mdm-170M-100e18": "2d8c9b9a730715f2c772d5bc740e12951fc160e5e8511a16835f3537401ea9bb",
    "mdm-336M-100e18": "3cd6ec869fc29be1943d0ab2e74f47b59b28d40a2f22314021d60e8ccbb031b2",
    "mdm-472M-100e18": "aa672982e20eecb5fd850b3e22053846638cbc65b73a06e304da6588deb6799d",
    "mdm-1028M-100e18": "ed7d52165307e231c3d1882566512d93a6fbf35f8487aa9593a2c6e795964ec6",
    "mdm-1028M-1600e18": "ce96ce67a051613b6d7feb419c99c0b4db5bfcfaaa0833ed7f7ecbc6632841d6",
    "mdm-1028M-3300e18-rsl-gsm8k": "1e968c26419d5b041adf3b1825e6d2b10887c45cdab76e60ea2d8341df31618f",
    "mdm-336M-6e18": "7b71fda282a31dddad4ccd769aaa3e50469a881c16be35c9a6be8fd53b020af7",
    "mdm-170M-100e18-rsl-0.01": "0d09fe4ab201025ccf973111ab235f791b86c626e975c0dcb69e0a2a493c663e",
}
# Sizes that were seen: to the byte, as the page rounds them, or of a .pth, which is a little larger than the other.
BYTES = {
    "mdm-336M-6e18": (1_604_508_816, 0),
    "mdm-170M-100e18-rsl-0.01": (876_215_712, 0),
    "mdm-1028M-1600e18-reverse": (4_570_000_000, 5_000_000),
    "mdm-1028M-3300e18-rsl-gsm8k": (4_570_000_000, 5_000_000),
    "mdm-48M-10e18": (339_000_000, 600_000),
    "mdm-113M-30e18": (650_000_000, 600_000),
    "mdm-1476M-100e18": (6_430_323_069, 200_000),
}


class Hub:
    """`hf_hub_download` with files of our own behind it; remembers its calls."""

    def __init__(self, files, error=EntryNotFoundError):
        self.files = files
        self.error = error
        self.calls = []

    def __call__(self, repo, file, **settings):
        self.calls.append((repo, file, settings))
        if file not in self.files:
            raise self.error(file)
        return str(self.files[file])

    @property
    def files_fetched(self):
        return [file for _, file, _ in self.calls]


@pytest.fixture
def hub(monkeypatch):
    """Put a hub in the place of Hugging Face's."""

    def install(files, error=EntryNotFoundError):
        stand_in = Hub(files, error)
        monkeypatch.setattr("diffusion_lens.loading.hub.hf_hub_download", stand_in)
        return stand_in

    return install


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer built like Llama's, with as many words as the golden models write: 512, the mask, comes next."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["<unk>", "<s>", "</s>", "▁", "▁Ada", "▁was", "▁the", "▁pilot", "ship", "."]
    words += [f"▁w{i}" for i in range(512 - len(words))]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "pad_token": None, "add_bos_token": True}))
    return folder


@pytest.fixture(scope="module")
def speaking(tokenizer_folder):
    """A masked diffusion model with that tokenizer."""
    return load(MDM / "model.safetensors", tokenizer=tokenizer_folder, device="cpu")


# --- names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("smdm-1028", "smdm-1028m"),
        ("smdm-170m-rsl", "smdm-170m-rsl-0.01"),
        ("ar1028m", "ar-1028m"),
        ("tiny", "tiny-ar"),
    ],
)
def test_an_unknown_name_offers_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as caught:
        load(name)
    offered = str(caught.value).split("nearest names: ")[1].split(" (")[0].split(", ")
    assert nearest in offered
    assert set(offered) <= {*PUBLISHED, *BUNDLED, *DELTAS}
    assert "list_pretrained()" in str(caught.value)


def test_a_path_that_does_not_exist_is_not_read_as_a_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"no checkpoint at {tmp_path / 'smdm.pth'}")):
        load(tmp_path / "smdm.pth")
    with pytest.raises(ValueError, match=re.escape(f"'{tmp_path / 'folder'}' is neither a published name nor a file")):
        load(tmp_path / "folder")


def test_names_are_read_whatever_their_case(hub):
    assert load("Tiny-MDM", device="cpu").cfg.model_name == "tiny-mdm"
    stand_in = hub({})
    with pytest.raises(FileNotFoundError):
        load("SMDM-1028M")
    assert stand_in.files_fetched[0] == "mdm_safetensors/mdm-1028M-1600e18.safetensors"


def test_a_folder_of_that_name_comes_before_the_catalogue(tmp_path, monkeypatch, hub):
    stand_in = hub({})
    monkeypatch.chdir(tmp_path)
    for name in ("smdm-1028m", "tiny-mdm"):
        load(MDM / "model.safetensors", device="cpu").save_pretrained(tmp_path / name)
        assert load(name, device="cpu").cfg.model_name == "t"
    assert stand_in.calls == []


def test_a_home_folder_is_understood(tmp_path, monkeypatch, tokenizer_folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model.safetensors", "lit_config.json"):
        shutil.copy(MDM / name, tmp_path)
    shutil.copytree(tokenizer_folder, tmp_path / "words")
    model = load("~/model.safetensors", config="~/lit_config.json", tokenizer="~/words", device="cpu")
    assert model.cfg.n_layers == 3
    assert len(model.tokenizer) == 513


# --- the catalogue


def test_every_file_seen_has_one_entry():
    seen = [(folder, stem) for folder, stems in SEEN.items() for stem in stems.split()]
    assert sorted((entry.folder, entry.stem) for entry in SMDM) == sorted(seen)


def test_names_are_unique_and_state_kind_and_size():
    assert len(SMDM) == len({entry.stem for entry in SMDM}) == 44
    assert len(PUBLISHED) == len(SMDM) + len(REPOSITORIES)
    assert not {*BUNDLED} & {*PUBLISHED}
    for name, entry in PUBLISHED.items():
        assert name == entry.name == name.lower()
    for entry in SMDM:
        name = entry.name
        kind, size = entry.stem.split("-")[:2]
        assert name.split("-")[:2] == [{"mdm": "smdm", "ar": "ar"}[kind], size.lower()]


def test_plain_names_are_the_most_trained():
    for entry in SMDM:
        name = entry.name
        if name.count("-") == 1:
            rivals = [
                int(re.search(r"-(\d+)e18$", other.stem)[1])
                for other in SMDM
                if other.name.startswith(f"{name}-") and re.search(r"M-\d+e18$", other.stem)
            ]
            assert int(re.search(r"-(\d+)e18$", entry.stem)[1]) > max(rivals, default=0), name


@pytest.mark.parametrize("entry", SMDM, ids=lambda entry: entry.name)
def test_an_entry_agrees_with_its_file_name(entry):
    safetensors, pth = entry.files
    assert safetensors == f"{entry.folder}_safetensors/{entry.stem}.safetensors"
    assert pth == f"{entry.folder}/{entry.stem}.pth"
    kind, size = entry.stem.split("-")[:2]
    n_layer, n_head, n_embd, hidden = PUBLISHED_SIZES[size.upper()]
    shape = entry.architecture
    assert (shape.n_layers, shape.n_heads, shape.d_model, shape.d_mlp) == (n_layer, n_head, n_embd, hidden)
    assert shape.attention_dir == {"mdm": "bidirectional", "ar": "causal"}[kind]
    assert shape.mask_token_id == {"mdm": 32000, "ar": None}[kind]
    # The name counts millions of weights outside the two embeddings; a weight is four bytes, a header a few kilobytes.
    body = entry.n_bytes - 4 * (shape.d_vocab + shape.d_vocab_out) * n_embd
    assert body / 4e6 == pytest.approx(int(size[:-1]), abs=0.6)
    n_bytes, within = BYTES.get(entry.stem, (entry.n_bytes, 0))
    assert abs(entry.n_bytes - n_bytes) <= within
    assert entry.sha256 == SHA256.get(entry.stem)
    assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)


def test_the_list_shows_every_name_with_size_and_source(capsys):
    list_pretrained()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*BUNDLED, *DELTAS, *PUBLISHED]
    rows = {line.split()[0]: line for line in lines}
    for entry in SMDM:
        name = entry.name
        shown = f"{entry.n_bytes / 1e9:.2f} GB" if entry.n_bytes >= 1e9 else f"{entry.n_bytes / 1e6:.1f} MB"
        assert shown in rows[name]
        assert rows[name].endswith(f"nieshen/SMDM/{entry.files[0]}")
    assert "4.57 GB" in rows["smdm-1028m"]
    assert "bidirectional" in rows["smdm-19m"]
    assert "causal" in rows["ar-19m"]
    assert "3.7 MB" in rows["tiny-mdm"]
    assert "causal" in rows["tiny-ar"]


# --- the hub


@pytest.fixture
def stand_in_files(tokenizer_folder):
    """smdm-19m (no hash known) and smdm-1028m (one known) as the golden checkpoint, and a tokenizer."""
    return {
        "mdm_safetensors/mdm-19M-10e18.safetensors": MDM / "model.safetensors",
        "mdm_safetensors/mdm-1028M-1600e18.safetensors": MDM / "model.safetensors",
        "tokenizer.json": tokenizer_folder / "tokenizer.json",
        "tokenizer_config.json": tokenizer_folder / "tokenizer_config.json",
    }


def test_a_download_passes_its_settings_on(hub, stand_in_files, tmp_path):
    stand_in = hub(stand_in_files)
    model = load(
        "smdm-19m",
        config=MDM / "lit_config.json",
        device="cpu",
        revision="bcda56b",
        cache_dir=tmp_path,
        token="hf_x",
        local_files_only=True,
    )
    settings = {"cache_dir": tmp_path, "token": "hf_x", "local_files_only": True}
    assert stand_in.calls == [
        ("nieshen/SMDM", "mdm_safetensors/mdm-19M-10e18.safetensors", {**settings, "revision": "bcda56b"}),
        (TOKENIZER_REPO, "tokenizer.json", settings),  # another repository: the revision is not its own
        (TOKENIZER_REPO, "tokenizer_config.json", settings),
    ]
    assert model.cfg.model_name == "smdm-19m"
    assert model.cfg.default_prepend_bos
    assert model.to_tokens("Ada").tolist() == [[1, 4]]
    plain = load(MDM / "model.safetensors", device="cpu")
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), plain.parameters(), strict=True))


def test_no_tokenizer_is_fetched_if_one_is_passed(hub, stand_in_files, tokenizer_folder):
    stand_in = hub(stand_in_files)
    load("smdm-19m", config=MDM / "lit_config.json", tokenizer=tokenizer_folder, device="cpu")
    assert stand_in.files_fetched == ["mdm_safetensors/mdm-19M-10e18.safetensors"]


def test_a_wrong_hash_is_refused(hub, stand_in_files, tmp_path):
    blob = shutil.copy(MDM / "model.safetensors", tmp_path / "blob")
    link = tmp_path / "mdm-1028M-1600e18.safetensors"
    link.symlink_to(blob)
    hub({**stand_in_files, "mdm_safetensors/mdm-1028M-1600e18.safetensors": link})
    with pytest.raises(ValueError, match="is not the published 'smdm-1028m'") as caught:
        load("smdm-1028m", config=MDM / "lit_config.json", device="cpu")
    for word in (link, sha256_of_file(MDM / "model.safetensors"), SHA256["mdm-1028M-1600e18"]):
        assert str(word) in str(caught.value)
    # In the hub's cache the file is a link: deleting that alone would bring the same bytes back.
    assert f"Delete {blob} and fetch it again" in str(caught.value)


def test_a_file_with_a_wrong_hash_is_removed_from_the_cache(hub, stand_in_files, tmp_path):
    link = tmp_path / "snapshots" / "0" / "mdm-1028M-1600e18.safetensors"
    link.parent.mkdir(parents=True)
    blob = Path(shutil.copy(MDM / "model.safetensors", tmp_path / "blob"))
    link.symlink_to(blob)
    hub({**stand_in_files, "mdm_safetensors/mdm-1028M-1600e18.safetensors": link})
    with pytest.raises(ValueError, match=r"SHA-256.*removed from the cache: call again to fetch it again"):
        load("smdm-1028m", config=MDM / "lit_config.json", device="cpu")
    assert not blob.exists()
    assert not link.is_symlink()


def test_the_right_hash_is_accepted(hub, stand_in_files, monkeypatch):
    stand_in = hub(stand_in_files)
    right = dataclasses.replace(PUBLISHED["smdm-1028m"], sha256=sha256_of_file(MDM / "model.safetensors"))
    monkeypatch.setitem(PUBLISHED, "smdm-1028m", right)
    model = load("smdm-1028m", config=MDM / "lit_config.json", device="cpu")
    assert model.cfg.model_name == "smdm-1028m"
    assert len(stand_in.calls) == 3


@pytest.mark.parametrize("error", [EntryNotFoundError, LocalEntryNotFoundError])
def test_the_pth_is_fetched_if_there_is_no_safetensors(hub, stand_in_files, tmp_path, error):
    path = tmp_path / "mdm-1028M-1600e18.pth"
    torch.save({"model": load_file(MDM / "model.safetensors")}, path)
    del stand_in_files["mdm_safetensors/mdm-1028M-1600e18.safetensors"]
    stand_in = hub({**stand_in_files, "mdm/mdm-1028M-1600e18.pth": path}, error)
    model = load("smdm-1028m", config=MDM / "lit_config.json", device="cpu")
    assert stand_in.files_fetched[:2] == ["mdm_safetensors/mdm-1028M-1600e18.safetensors", "mdm/mdm-1028M-1600e18.pth"]
    plain = load(MDM / "model.safetensors", device="cpu")
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_dead_network_is_tried_once(hub):
    stand_in = hub({}, LocalEntryNotFoundError)
    with pytest.raises(FileNotFoundError):
        load("smdm-1028m")
    assert [settings["local_files_only"] for *_, settings in stand_in.calls] == [False, True]


def test_neither_file_on_the_hub(hub):
    hub({})
    with pytest.raises(FileNotFoundError, match="contains neither") as caught:
        load("ar-1028m")
    for word in ("ar_safetensors/ar-1028M-100e18.safetensors", "ar/ar-1028M-100e18.pth", "'ar-1028m'", "pass the path"):
        assert word in str(caught.value)


def test_offline_with_an_empty_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="'smdm-1028m' is not in the Hugging Face cache") as caught:
        load("smdm-1028m", cache_dir=tmp_path)
    assert type(caught.value) is FileNotFoundError
    for word in (
        "mdm_safetensors/mdm-1028M-1600e18.safetensors",
        "4,569,486,608 bytes",
        "huggingface.co/nieshen/SMDM",
        "on a connected machine",
        "from_pretrained('mdm-1028M-1600e18.safetensors', tokenizer='folder')",
    ):
        assert word in str(caught.value)


@pytest.mark.parametrize("cached", [set(), {"tokenizer.json"}])
def test_offline_without_the_tokenizer(hub, stand_in_files, cached):
    for name in {"tokenizer.json", "tokenizer_config.json"} - cached:
        del stand_in_files[name]
    hub(stand_in_files, LocalEntryNotFoundError)
    with pytest.raises(
        FileNotFoundError, match="the tokenizer is not in the Hugging Face cache, and the hub cannot be reached"
    ) as caught:
        load("smdm-19m", config=MDM / "lit_config.json")
    message = str(caught.value)
    assert set(re.findall(r"[\w.]+\.json", message)) == {"tokenizer.json", "tokenizer_config.json"}
    assert f"huggingface.co/{TOKENIZER_REPO}" in message
    assert "tokenizer='that folder'" in message
    assert message.endswith(f"put both beside the checkpoint, into {MDM}")


# --- tokenizers


def test_a_bare_file_takes_ids_only():
    model = load(MDM / "model.safetensors", device="cpu")
    with pytest.raises(ValueError, match=r"loaded without a tokenizer.*tokenizer='folder'"):
        model.to_tokens("Ada")


def test_a_tokenizer_beside_the_checkpoint_is_found(tmp_path, tokenizer_folder):
    for file in (MDM / "model.safetensors", MDM / "lit_config.json", *tokenizer_folder.iterdir()):
        shutil.copy(file, tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert load(path, device="cpu").to_tokens("Ada was the pilot").tolist() == [[1, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    "gone", [["tokenizer.json"], ["tokenizer_config.json"], ["tokenizer.json", "tokenizer_config.json"]]
)
def test_a_tokenizer_folder_that_lacks_files(tmp_path, tokenizer_folder, gone):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "words")
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{folder} lacks {' and '.join(gone)}; put")):
        load(MDM / "model.safetensors", tokenizer=folder)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, tokenizer_folder):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "words")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(f"{folder / 'tokenizer.json'} is not a fast tokenizer")):
        load(MDM / "model.safetensors", tokenizer=folder)


def test_bos_comes_first_unless_it_is_switched_off(speaking):
    text = "Ada was the pilot"
    assert speaking.cfg.default_prepend_bos
    assert speaking.to_tokens(text).tolist() == [[1, 4, 5, 6, 7]]
    assert speaking.to_tokens(text, prepend_bos=True).tolist() == [[1, 4, 5, 6, 7]]
    assert speaking.to_tokens(text, prepend_bos=False).tolist() == [[4, 5, 6, 7]]
    speaking.cfg.default_prepend_bos = False
    try:
        assert speaking.to_tokens(text).tolist() == [[4, 5, 6, 7]]
    finally:
        speaking.cfg.default_prepend_bos = True


def test_a_tokenizer_without_bos_prepends_none(tmp_path, tokenizer_folder):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "words")
    (folder / "tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    model = load(MDM / "model.safetensors", tokenizer=folder, device="cpu")
    assert not model.cfg.default_prepend_bos
    assert model.to_tokens("Ada").tolist() == [[4]]
    with pytest.raises(ValueError, match="'t' has no BOS token"):
        model.to_tokens("Ada", prepend_bos=True)


def test_mask_is_a_word_of_a_model_that_has_one(speaking, tokenizer_folder):
    assert speaking.to_tokens("Ada was[MASK][MASK]").tolist() == [[1, 4, 5, 512, 512]]
    assert speaking.to_tokens("Ada [MASK] was [MASK]").tolist() == [[1, 4, 512, 5, 512]]
    assert speaking.to_string(torch.tensor([1, 4, 512])) == "<s> Ada[MASK]"
    assert speaking.to_str_tokens(torch.tensor([4, 512]))[1] == "[MASK]"
    assert speaking.to_single_token("[MASK]") == speaking.cfg.mask_token_id == 512
    causal = load(AR / "model.safetensors", tokenizer=tokenizer_folder, device="cpu")
    assert len(causal.tokenizer) == 512
    with pytest.warns(UserWarning, match="MASK"):
        assert 512 not in causal.to_tokens("Ada was[MASK]")[0]


def test_a_saved_tokenizer_still_knows_mask_and_bos(speaking, tmp_path):
    again = load(speaking.save_pretrained(tmp_path / "saved"), device="cpu")
    assert again.to_tokens("Ada was[MASK]").tolist() == [[1, 4, 5, 512]]
    assert again.to_tokens("Ada", prepend_bos=False).tolist() == [[4]]
    assert len(again.tokenizer) == 513


def test_text_and_ids(speaking):
    ids, _ = speaking.tokenize(["Ada was the pilot", "Ada"])
    assert ids.tolist() == [[1, 4, 5, 6, 7], [1, 4, 2, 2, 2]]
    assert speaking.to_string(ids[0]) == "<s> Ada was the pilot"
    assert speaking.to_string(ids)[1] == "<s> Ada</s></s></s>"
    assert [word.strip() for word in speaking.to_str_tokens("Ada was the pilot")] == [
        "<s>",
        "Ada",
        "was",
        "the",
        "pilot",
    ]
    assert [word.strip() for word in speaking.to_str_tokens("Ada was", prepend_bos=False)] == ["Ada", "was"]
    assert speaking.to_single_token("pilot") == 7
    with pytest.raises(ValueError, match=r"'pilotship' is 2 tokens, not one: \['pilot', 'ship'\]"):
        speaking.to_single_token("pilotship")
    with pytest.raises(ValueError, match="'' is 0 tokens"):
        speaking.to_single_token("")


# --- device and dtype


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, torch.device("cpu")),
        (torch.bfloat16, "cpu"),
        (torch.float16, "cpu"),
        (torch.float64, "cpu"),
    ],
)
def test_device_and_dtype(either, device, dtype):
    model = load(either.checkpoint, config=either.config, device=device, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {model.cfg.dtype} == {dtype}
    assert {str(parameter.device) for parameter in model.parameters()} == {model.cfg.device} == {"cpu"}
    for (name, weight), expected in zip(model.named_parameters(), either.model.parameters(), strict=True):
        assert torch.equal(weight, expected.to(dtype)), name
    tokens = either.tensors("forward")["tokens"]
    with torch.no_grad():
        logits, reference = model(tokens), either.model(tokens)
    assert logits.dtype == dtype
    tolerance = {torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.01, torch.float64: 1e-5}[dtype]
    assert (logits.float() - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.double(), torch.float64),
    ],
)
def test_the_config_follows_the_weights(either, convert, dtype, tmp_path):
    model = load(either.checkpoint, config=either.config, device="cpu")
    assert convert(model) is model
    assert model.cfg.dtype == dtype
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    with torch.no_grad():
        assert model(either.tensors("forward")["tokens"]).dtype == dtype
    assert load(model.save_pretrained(tmp_path), device="cpu", dtype=dtype).cfg.dtype == dtype


def test_a_loaded_model_is_independent_of_its_file(tmp_path):
    for name in ("model.safetensors", "lit_config.json"):
        shutil.copy(MDM / name, tmp_path)
    model = load(tmp_path, device="cpu")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 700_000)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes()[5000] == 0xFF
