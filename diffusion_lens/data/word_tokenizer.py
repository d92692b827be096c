"""A word-level tokenizer for texts over a small vocabulary, in Llama's notation: "▁Ada", "▁Marsh", ",", "."."""

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weight_conversion import write_json


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of all words in `texts`. The token `<eos>` (0) also pads rows.

    A word is the same token at the beginning of a text and after a space. Therefore the tokens of an answer do not
    depend on the prompt, and decoding drops the space of the first word. The vocabulary does not contain [MASK]; the
    mask id of a model is the next free id.
    """
    words = sorted({"▁" + word for text in texts for word in text.replace(",", "").replace(".", "").split()})
    vocabulary = {word: i for i, word in enumerate(["<eos>", "<unk>", ",", ".", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Split(Regex("[,.]"), behavior="isolated"),
            # A single space, at the end of a prompt or before [MASK], is not a word.
            pre_tokenizers.Split(Regex("^▁$"), behavior="removed"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def word_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """A function from a text to its ids and `<eos>`, for many short texts: it tokenizes every word only once."""
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for word in text.split():
            if word not in known:
                known[word] = tokenizer(word)["input_ids"]
            ids += known[word]
        return [*ids, int(tokenizer.eos_token_id)]

    return encode


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, n_ctx: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, for models with a context of `n_ctx` positions."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    # Written here, because transformers 4 does not know the class name that transformers 5 would save.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx,
    }
    write_json(settings, folder / "tokenizer_config.json")
