"""Files of a tokenizer that are not what they should be, and tokenizers that are saved over others."""

import json
import re
import shutil
from pathlib import Path

import pytest
from small_repositories import bytes_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.loading import load_tokenizer
from diffusion_lens.loading.tokenizers import read_mask

load = HookedDiffusionTransformer.from_pretrained
MDM = Path(__file__).parent / "golden" / "lit_gpt" / "gqa" / "mdm"
WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(509))]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of 512 words, then the mask of the golden models."""
    folder = tmp_path / "words"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_settings(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return folder


def write_settings(folder, **content):
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def changed(folder, change):
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def refused(folder, *words):
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        load_tokenizer(folder)
    assert type(caught.value) is ValueError
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(bos_token=5), ["bos_token='5'", 'an object with "content"']),
        (dict(bos_token={"special": True}), ["bos_token="]),
        (dict(eos_token={"content": 3}), ["eos_token="]),
        (dict(eos_token="<eos>"), ["eos_token '<eos>'", "no such token", "remove the entry"]),
        (dict(pad_token="[PAD]"), ["pad_token '[PAD]'", "no such token"]),
        (dict(add_bos_token="false"), ["add_bos_token='false'", "true or false"]),
        (dict(added_tokens_decoder=[]), None),
        (dict(added_tokens_decoder=[1]), ["added_tokens_decoder="]),
        (dict(added_tokens_decoder={"x": {"content": "a"}}), ["added_tokens_decoder="]),
        (dict(added_tokens_decoder={"1": "a"}), ["added_tokens_decoder="]),
        (dict(added_tokens_decoder={"1": {"content": "a", "odd": 1}}), ["added_tokens_decoder="]),
        (dict(chat_template=5), ["chat_template='5'", '"template"']),
        (dict(chat_template=["a"]), ["chat_template="]),
        (dict(chat_template=[{"name": "default"}]), ["chat_template="]),
        (dict(chat_template="{% if %}"), ["chat template 'default'", "not a Jinja template", "remove it"]),
        (dict(chat_template="{{ a"), ["not a Jinja template"]),
        (dict(chat_template="(" * 10 + "{{ " + "(" * 50_000), ["not a Jinja template"]),
        (dict(chat_template="{% generation %}{{ messages[0].content }}{% endgeneration %}"), None),
        (dict(chat_template="{% for m in messages %}{% break %}{% endfor %}"), None),
        (dict(chat_template=None, add_bos_token=None), None),
    ],
    ids=range(20),
)
def test_settings_of_another_form(folder, settings, words):
    write_settings(folder, **settings)
    if words is None:
        assert load_tokenizer(folder).convert_tokens_to_ids("w0") == 3
    else:
        refused(folder, "tokenizer_config.json", *words)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"bos_token": "<s>", "bos_token": "</s>"}', "[" * 99_999, '{"a": "\\ud800"}']
)
def test_settings_that_are_no_json_object(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    refused(folder, "tokenizer_config.json")


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
@pytest.mark.parametrize(("content", "word"), [(b"\xff\xfe", "is not UTF-8 text"), (b"{% if", "not a Jinja template")])
def test_a_template_file_of_another_form(folder, file, content, word):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    refused(folder, file, word)


def test_two_tokens_of_one_id(folder):
    changed(folder, lambda content: content["model"]["vocab"].update(w7=11))
    refused(folder, "tokenizer.json", "gives the id 11 to 2 tokens, ['w7', 'w8']")


def test_an_added_token_that_comes_out_at_another_id(folder):
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    changed(folder, lambda content: content["added_tokens"].append({"id": 600, "content": "<new>", **more}))
    refused(folder, "'<new>' has the id 600", "after the vocabulary it gets the id 512")


def test_a_special_token_that_the_model_has_no_row_for(folder):
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

    def grow(content):
        content["model"]["vocab"]["w509"] = 512
        content["added_tokens"].append({"id": 513, "content": "<end>", **more})

    changed(folder, grow)
    write_settings(folder, eos_token="<end>", bos_token="<s>")
    with pytest.raises(ValueError, match=r"eos_token '<end>' has the id 513, and the model embeds 513.*that belongs"):
        load(MDM / "model.safetensors", tokenizer=folder, device="cpu")


# --- saved over another


def test_a_model_without_a_tokenizer_is_not_saved_over_one_with(folder, tmp_path):
    target = load(MDM / "model.safetensors", tokenizer=folder, device="cpu").save_pretrained(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match=r"saved contains a tokenizer, and this model has none.*Nothing was written"):
        load(MDM / "model.safetensors", device="cpu").save_pretrained(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_saved_tokenizer_replaces_all_files_of_another(folder, tmp_path):
    target = tmp_path / "saved"
    (shutil.copytree(folder, target) / "chat_template.jinja").write_text("{{ stale }}")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tools.jinja").write_text("{{ stale }}")
    model = load(MDM / "model.safetensors", tokenizer=folder, device="cpu")
    again = load(model.save_pretrained(target), device="cpu")
    assert again.tokenizer.chat_template is None
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert not [path for path in target.rglob("*") if path.name.startswith(".")]


def test_a_tokenizer_that_fails_to_be_saved_leaves_the_old_one(folder, tmp_path, monkeypatch):
    model = load(MDM / "model.safetensors", tokenizer=folder, device="cpu")
    target = model.save_pretrained(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full_disk(where, **_):
        (Path(where) / "tokenizer.json").write_text("ha")
        raise OSError("no space left on device")

    monkeypatch.setattr(model.tokenizer, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


# --- names of files, and texts


@pytest.mark.parametrize("name", ["half \ud800", "~nobody-of-that-name/model.safetensors"])
def test_a_name_that_no_file_can_have(name):
    for do in (lambda: load(name), lambda: load(MDM / "model.safetensors", tokenizer=name)):
        with pytest.raises(ValueError, match=r"is not a path to a file or folder.*write the path out") as caught:
            do()
        str(caught.value).encode()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="is neither a published name nor a file or folder"):
        load(name)


def test_half_a_character_is_no_text(folder):
    model = load(MDM / "model.safetensors", tokenizer=folder, device="cpu")
    for do in (lambda: model.to_tokens(["w1", "w2 \ud800"]), lambda: model.to_single_token("\ud800")):
        with pytest.raises(ValueError, match=r"'.*\\ud800' contains half of a surrogate pair.*the whole character"):
            do()


def test_a_model_adds_the_mask_to_a_copy_of_the_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    ar = load(MDM.parent / "ar" / "model.safetensors", config=MDM.parent / "ar" / "lit_config.json", device="cpu")
    mdm = load(MDM / "model.safetensors", config=MDM / "lit_config.json", device="cpu")
    for model in (mdm, ar):
        model.set_tokenizer(tokenizer)
    assert mdm.to_tokens("w1 [MASK]", prepend_bos=False).tolist() == [[4, 512]]
    assert len(tokenizer) == len(ar.tokenizer) == 512 == len(mdm.tokenizer) - 1


def test_an_ordinary_token_that_is_the_mask_changes_no_text():
    """As in DiffuLLaMA: training took a token of Llama's vocabulary for [MASK], so that it is written by its id."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer())
    texts = ("where the mask is", "a [MASK] here")
    before = [tokenizer(text)["input_ids"] for text in texts]
    read_mask(tokenizer, before[0][1])
    assert [tokenizer(text)["input_ids"] for text in texts] == before


def test_an_ordinary_token_is_not_the_mask_if_the_tokenizer_has_one():
    """A wrong id in the config; without this error the loop would write an ordinary token for every mask."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer(), mask_token="[MASK]")
    with pytest.raises(ValueError, match=r"to the tokens \[\d+\], and the model's mask has the id 5"):
        read_mask(tokenizer, 5)
