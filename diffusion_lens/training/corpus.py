"""The texts with which a causal model is adapted: by default it writes them itself.

A text begins with a prompt, and the model continues it to the length of a row by sampling. Prompts come from the user,
from facts (`prompts_of`), or there are none, and texts begin with BOS. Texts of the user's own are cut into rows
instead. A text that names the subject of a held-out fact, in whatever case, spacing and form
of Unicode, is left out, so that whatever the twin answers about it, it did not learn in its training.

The work is divided into parts of up to 128 texts, each with a seed and a file of its own, so that an interrupted call
continues, and several adaptations may share the texts.
"""

import hashlib
import random
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.facts.fact import Fact
from diffusion_lens.model.attention import KeyValueCache
from diffusion_lens.model.inputs import check_length
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.text import encode_all, require_tokenizer
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import load_result, network_of, provenance, read_run, require_same_run, save_result
from diffusion_lens.settings import fields_of, own_seed, warn_user
from diffusion_lens.settings.shared import CorpusSettings
from weight_conversion import as_json, write_json

ENDINGS = (" is", " was", " has", ",")  # after the subject of a fact
_TOGETHER = 128  # texts in a part
HAS_MASK = "contains the token that becomes [MASK]: write it otherwise, or choose another mask_token="
_PART = "texts of a corpus"
_NAMES = "names the subject of a held-out fact: hold out fewer facts"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts of one length.

    Attributes:
        tokens: The texts.
        starts: Position of each text from which on the model wrote it; 1 if no prompt came before.
    """

    tokens: Int[Tensor, "batch pos"]
    starts: Int[Tensor, "batch"]

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Tensor | slice) -> "Corpus":
        """Some of the texts."""
        return Corpus(**{name: tensor[rows] for name, tensor in vars(self).items()})


def read_texts(texts: str | Path | Sequence[str] | None, prompts: Sequence[str] = ()) -> list[str] | None:
    """The texts of a file, or those given; a `ValueError` if there are none, or prompts too."""
    if texts is None:
        return None
    if prompts:
        raise ValueError("prompts= are continued by the model, and texts= are read instead: give one of them")
    if not isinstance(texts, str | Path):
        if not texts:
            raise ValueError("texts= has no text: give one, or leave it out")
        return list(texts)
    path = Path(texts).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no text file at {path}")
    try:
        return [path.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def prompts_of(facts: Iterable[Fact]) -> list[str]:
    """The beginnings of texts about facts: of each its prompt, its subject in the prompts of two others, and its
    subject with one of `ENDINGS`. So the twin meets each kind of prompt with many subjects."""
    facts = list(facts)
    order = random.Random(0)
    prompts = []
    for i, fact in enumerate(facts):
        prompts.append(fact.prompt)
        if fact.subject:
            others = [facts[order.randrange(len(facts))] for _ in range(2)]
            prompts += [other.prompt.replace(other.subject, fact.subject) for other in others if other.subject]
            prompts.append(fact.subject + ENDINGS[i % len(ENDINGS)])
    return prompts


def write_corpus(
    model: DiffusionTransformer,
    settings: CorpusSettings,
    prompts: Sequence[str],
    *,
    left_out: Sequence[str] = (),
    never: int | None = None,
    folder: Path | None = None,
    progress: bool = True,
) -> Corpus:
    """Let a causal model write texts after prompts, all as often; without prompts after its first token.

    Args:
        left_out: Words that no text may contain, in whatever case, spacing and form of Unicode.
        never: Token that is never written.
        folder: Folder for the files of the parts; those that exist are read.

    Raises:
        ValueError: A prompt contains `never`, no prompt fits, every text contains one of the words, or the folder has
            other texts.
    """
    check_length(settings.length, model.cfg)
    words = list(map(plain, left_out))
    given = [prompt for prompt in prompts if not any(word in plain(prompt) for word in words)]
    encoded = encode_all(model, given, None) if given else []
    for prompt, row in zip(given, encoded, strict=True):
        if never in row:
            raise ValueError(f"the prompt {prompt!r} {HAS_MASK}")
    rows = [row for row in encoded if 0 < len(row) <= (settings.longest_prompt or 0)]
    if prompts and not rows:
        raise ValueError(
            f"none of the {len(prompts)} prompts has 1 to {settings.longest_prompt} tokens (longest_prompt=) and no "
            "subject of a held-out fact: give others"
        )
    rows = rows or [[_first_token(model)]]
    random.Random(settings.seed).shuffle(rows)
    by_length = defaultdict[int, list[list[int]]](list)
    for i in range(settings.n_texts):
        by_length[len(rows[i % len(rows)])].append(rows[i % len(rows)])
    begun = [
        torch.tensor(same[i : i + _TOGETHER])
        for _, same in sorted(by_length.items())
        for i in range(0, len(same), _TOGETHER)
    ]
    jobs = [partial(_written, model, part, settings, never, own_seed(settings.seed, i)) for i, part in enumerate(begun)]
    whole = _whole(jobs, _folder(folder, model, settings, rows, never), progress)
    allowed = ~_naming(model, whole.tokens, words)
    if not bool(allowed.any()):
        raise ValueError(f"each of the {len(allowed)} texts {_NAMES}")
    return whole.select(allowed)


def read_corpus(
    model: DiffusionTransformer,
    settings: CorpusSettings,
    texts: Sequence[str],
    *,
    left_out: Sequence[str] = (),
    never: int | None = None,
) -> Corpus:
    """Cut texts into rows of one length, one after the other with an end token after each.

    The arguments are those of `write_corpus`. At most `settings.n_texts` rows are taken, and none that contains `never`
    or a part of one of the words, which may go on in the next row.

    Raises:
        ValueError: The texts do not fill a row, or every row is left out.

    Warns:
        UserWarning: There are more rows.
    """
    check_length(settings.length, model.cfg)
    end = require_tokenizer(model).eos_token_id
    ends = [] if end is None else [end]
    tokens = torch.tensor([token for row in encode_all(model, texts, None) for token in (*row, *ends)])
    rows = tokens[: len(tokens) // settings.length * settings.length].view(-1, settings.length)
    if not len(rows):
        raise ValueError(f"the texts have {len(tokens)} tokens, which do not fill a row of length={settings.length}")
    words = list(map(plain, left_out))
    most = max((1 + -(-len(word.encode()) // settings.length) for word in words), default=0)
    allowed = (rows != (-1 if never is None else never)).all(dim=1) & ~_naming(model, rows, words, most)
    if not bool(allowed.any()):
        raise ValueError(f"each of the {len(rows)} rows of the texts contains [MASK], or {_NAMES}")
    rows = rows[allowed]
    if len(rows) > settings.n_texts:
        warn_user(
            f"the texts have {len(rows)} rows of {settings.length} tokens, of which the first {settings.n_texts} are "
            f"taken: pass n_texts={len(rows)} for all"
        )
        rows = rows[: settings.n_texts]
    return Corpus(rows, torch.ones(len(rows), dtype=torch.long))


@torch.no_grad()
def _written(
    model: DiffusionTransformer, begun: Tokens, settings: CorpusSettings, never: int | None, seed: int
) -> Corpus:
    """Texts that continue these beginnings."""
    generator = torch.Generator().manual_seed(seed)
    n_texts, start = begun.shape
    kept = min(settings.top_k, model.cfg.d_vocab_out)
    cache, tokens, new = KeyValueCache(model.cfg.n_layers), begun, begun.to(model.cfg.device)
    for _ in range(start, settings.length):
        real = torch.ones_like(new)  # the model may write its padding token
        logits = model(new, attention_mask=real, past_kv_cache=cache, logits_at=torch.tensor([new.shape[1] - 1]))
        logits = logits[:, 0].float()
        if never is not None and never < logits.shape[-1]:
            logits[:, never] = -torch.inf
        values, likeliest = logits.topk(kept)
        shares = (values.cpu() / settings.temperature).softmax(dim=-1)
        among = shares.cumsum(dim=-1) - shares < settings.top_p
        among[:, 0] = True
        drawn = likeliest.cpu().gather(1, torch.multinomial(shares * among, 1, generator=generator))
        tokens, new = torch.cat([tokens, drawn], dim=1), drawn.to(model.cfg.device)
    return Corpus(tokens, torch.full((n_texts,), start))


def _folder(
    folder: Path | None, model: DiffusionTransformer, settings: CorpusSettings, rows: list[list[int]], never: int | None
) -> Path | None:
    """The folder of the parts, which says whose texts it has; a `ValueError` if they are others."""
    if folder is not None:
        of_corpus = {name: getattr(settings, name) for name in fields_of(CorpusSettings)}
        said = {"rows_sha256": hashlib.sha256(repr(rows).encode()).hexdigest(), "never": never}
        described = as_json({"settings": of_corpus, **said, **network_of(provenance(model, model.cfg))})
        file = folder / "corpus.json"
        if file.exists():
            require_same_run(read_run(file), described, str(folder))
        write_json(described, file)
    return folder


def _whole(jobs: Sequence[Callable[[], Corpus]], folder: Path | None, progress: bool) -> Corpus:
    """The texts of all parts."""
    parts = list(_parts(jobs, folder, progress))
    return Corpus(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def plain(text: str) -> str:
    """A text as it is searched for names: without differences of case, spacing and form of Unicode."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def _naming(model: DiffusionTransformer, rows: Tokens, words: Sequence[str], most: int = 1) -> Bool[Tensor, "batch"]:
    """The rows that contain one of these plain words, or a part of one that goes on over up to `most` rows."""
    named = torch.zeros(len(rows), dtype=torch.bool)
    found: list[Any] = [0]  # how often each word is in the text of so many rows from each row on
    for size in range(1, min(most, len(rows)) + 1):
        together = rows.unfold(0, size, 1).transpose(1, 2).flatten(1)
        texts = map(plain, model.tokenizer.batch_decode(together.tolist(), clean_up_tokenization_spaces=False))
        found.append(torch.tensor([[text.count(word) for word in words] for text in texts]))
        less = found[-2][:-1] + found[-2][1:] - (found[-3][1:-1] if size > 2 else 0) if size > 1 else 0
        whole = (found[-1] > less).any(dim=1)  # what all these rows contain, and fewer do not
        for i in range(size):
            named[i : i + len(whole)] |= whole
    return named


def _parts(jobs: Sequence[Callable[[], Corpus]], folder: Path | None, progress: bool) -> Iterator[Corpus]:
    """The result of each job, from its file if it exists."""
    for i, job in enumerate(tqdm(jobs, desc="texts", disable=not progress)):
        path = None if folder is None else folder / f"{i:04d}.safetensors"
        if path is not None and path.exists():
            yield Corpus(**load_result(path, _PART)[0])
            continue
        part = job()
        if path is not None:
            save_result(path, _PART, vars(part), {})
        yield part


def _first_token(model: DiffusionTransformer) -> int:
    """The token with which texts begin that have no prompt."""
    tokenizer = require_tokenizer(model)
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(f"the tokenizer of {model.cfg.model_name!r} has no BOS or end token to begin with: give prompts")
