"""The checks on texts: the loss on a page, ten facts that every model should know, and recall after fine-tuning.

1. The page is the opening of Jane Austen's "Pride and Prejudice" (1813). If a tokenizer does not know its words, as the
   bundled models' do not, the texts are training sentences and facts of that pair of bundled models whose words it
   knows. The loss of a correct model is far lower in order than with shuffled words. The noise of a diffusion loss is
   the same in both cases, and for all alternatives that a diagnosis tries, so that small differences are significant.
2. In one pass a fact is known if the first token of its answer is likelier than the first tokens of the nine other
   answers: a model that prefers " a" to " Paris" can still distinguish the capitals. On the canvas the answer is hidden
   by the model's noise, [MASK] or random tokens. By the loop a fact is known if the text that the model writes contains
   the answer, which small base models may fail.
3. Recall of a model that was fine-tuned on the reversal curse: 40 questions, ten per pair of directions, with Wilson's
   interval at 99 %: of four correct cells, one is outside by chance in one check of 25. Published results of one
   checkpoint differ by up to 7 points, which are allowed in addition.
"""

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.report import Finding
from diffusion_lens.checks.weights import Expected
from diffusion_lens.data import site_facts, toy_facts
from diffusion_lens.data.fact_files import FactSource, default_source, open_source
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.evaluation.recall import (
    DTN_REVERSE,
    DTN_SAME,
    NTD_REVERSE,
    NTD_SAME,
    DirectionPair,
    cell_name,
    contained,
    published_rows,
)
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.loading.catalogue import ASSETS, BUNDLED
from diffusion_lens.model.loss import masked_batch, next_token_batch, noised
from diffusion_lens.model.noise import HeadAt, hidden_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import n_params

SHUFFLE_SEED = 0
# Enough tokens to show the effect of word order; one or two rows in any published context.
MOST_TOKENS = 512
# Share of unknown tokens above which a tokenizer does not fit the page. Tokenizers of bytes or pieces know all words.
MOST_UNKNOWN = 0.5
N_SENTENCES = 32
PAGE = "pride_and_prejudice.txt"
# The capitals have different first letters, so that the answers have different first tokens.
CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Austria": "Vienna",
    "Cuba": "Havana",
}
NOISE_SEED = 0
# Noise samples per row: the times t cover (0, 1) evenly in four parts.
N_SAMPLES = 4
# Most positions in one forward pass, which limits the memory of their logits.
MAX_POSITIONS = 2048
# Least gain from the order of words, in nats per token. Word frequencies alone gain nothing, the smallest published
# models gain more than one nat, and a model that is read wrongly gains almost nothing.
LEAST_GAIN = 0.5
# Share of ln(vocabulary) above which a loss is no better than chance. Word frequencies alone reduce it by a fifth.
CHANCE = 0.9
# Losses on the page of checkpoints that are known to be correct. Rounding changes them by about 1e-5 of their size.
KNOWN_LOSS = {
    "site-mdm": 1.413825,
    "site-ar": 1.132883,
    "tiny-mdm": 0.614472,
    "tiny-ar": 0.506850,
    "tiny-block": 0.641329,
    "tiny-uniform": 1.087115,
}
# Largest deviation of a correct model from its known loss, relative to that loss.
TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.05}
# By guessing, five or more of ten are right once in 600 checks.
LEAST_CHOSEN = 5
# The bundled models answer all ten; one may be lost by rounding in half precision.
LEAST_OWN = 9
# Numbers of parameters below which no number of facts is required, because it is unknown what such models know.
CHOOSING_SIZE = 1_000_000_000
WRITING_SIZE = 5_000_000_000
LEAST_WRITTEN = 4
NEW_TOKENS = 16
FACT_STEPS = 16
LONGEST_OWN = 6  # tokens of the longest of the ten prompts for the bundled models
CELLS = (NTD_SAME, NTD_REVERSE, DTN_SAME, DTN_REVERSE)
A_CELL = 10
RECALL_STEPS = 8
LEVEL = 0.99
BETWEEN_RUNS = 0.07
HOLDS = (
    'It has to contain facts with a prompt, a subject, an answer and two directions, "trained" and "asked" (the '
    f"direction of the query), each p2d or d2p, and facts of all {len(CELLS)} pairs of directions"
)
OWN_DATA = {model.data for model in BUNDLED.values()}
# Recall of the bundled models, from their own results.
OWN: dict[str, dict[DirectionPair, float]] = {
    "site-mdm": {NTD_SAME: 1.0, NTD_REVERSE: 1.0, DTN_SAME: 1.0, DTN_REVERSE: 1.0},
    "site-ar": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-mdm": {NTD_SAME: 1.0, NTD_REVERSE: 1.0, DTN_SAME: 1.0, DTN_REVERSE: 1.0},
    "tiny-ar": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-block": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-uniform": {NTD_SAME: 1.0, NTD_REVERSE: 0.77, DTN_SAME: 0.94, DTN_REVERSE: 0.58},
}


@dataclass(frozen=True)
class Texts:
    """A page and ten facts.

    Attributes:
        name: Description of the page.
        pieces: Pieces of the page, which are read separately.
        facts: Facts to query.
        ending: Text after an answer, which is on the canvas of an MDM in a query by one pass.
        length: Length in positions of the rows and canvases in training, which were filled with the end token; `None`
            if the model takes any length.
    """

    name: str
    pieces: tuple[str, ...]
    facts: tuple[Fact, ...]
    ending: str
    length: int | None

    def shuffled(self) -> tuple[str, ...]:
        """The pieces with shuffled words, in the same order on every machine."""
        generator = random.Random(SHUFFLE_SEED)
        pieces = []
        for piece in self.pieces:
            words = piece.split()
            generator.shuffle(words)
            pieces.append(" ".join(words))
        return tuple(pieces)


class Page(NamedTuple):
    """The page in order and shuffled, both as Int[batch pos] of the same shape."""

    ordered: Tensor
    shuffled: Tensor


def texts_for(model: HookedDiffusionTransformer) -> Texts:
    """The page and the facts for a model, depending on the words that its tokenizer knows."""
    page = (ASSETS / "check" / PAGE).read_text(encoding="utf-8")
    facts = tuple(
        Fact(f"The capital of {country} is", country, f" {city}", id=f"capital-{country}")
        for country, city in CAPITALS.items()
    )
    if _share_unknown(model, page) < MOST_UNKNOWN:
        return Texts('the opening of "Pride and Prejudice"', (page,), facts, ".", None)
    return min(
        (_site_texts(N_SENTENCES), _toy_texts(N_SENTENCES)),
        key=lambda texts: _share_unknown(model, " ".join(texts.pieces)),
    )


def read_page(model: HookedDiffusionTransformer, texts: Texts) -> Page:
    """The page in the model's tokens."""
    ordered, shuffled = (_rows(model, pieces, texts.length) for pieces in (texts.pieces, texts.shuffled()))
    n_row, n_pos = map(min, ordered.shape, shuffled.shape)
    return Page(ordered[:n_row, :n_pos], shuffled[:n_row, :n_pos])


@torch.no_grad()
def page_losses(model: DiffusionTransformer, tokens: Tensor) -> Float[Tensor, "batch pos"]:
    """The contribution of each token of clean text to the training loss, with fixed noise.

    Their sum is the loss in nats per token. That of a diffusion model is a bound, for which each row of the text has
    `N_SAMPLES` rows, one after the other. It bounds what the loss of next tokens is, so both can be compared.
    """
    if model.cfg.is_autoregressive:
        batch = next_token_batch(model, tokens)
    else:
        tokens = tokens.repeat_interleave(N_SAMPLES, dim=0)
        noisy, p = noised(model, tokens, generator=torch.Generator().manual_seed(NOISE_SEED))
        # If the id of [MASK] is wrong, the text may contain it; such a token is not predicted.
        batch = masked_batch(model, tokens, noisy, p, real=model.cfg.writable(tokens))
    n_row, n_pos = batch.tokens.shape
    size = max(1, MAX_POSITIONS // n_pos)
    losses = []
    for start in range(0, n_row, size):
        part = batch.part(start, min(start + size, n_row))
        real = model.padding.all_real(part.tokens)
        losses.append(part.by_position(model(part.tokens, attention_mask=real, logits_at=part.rows, **part.beside)))
    return torch.cat(losses).cpu() / batch.n_counted


def page_loss(model: DiffusionTransformer, tokens: Tensor) -> float:
    """The loss on rows of clean text, in nats per token."""
    return float(page_losses(model, tokens).sum())


def no_better_than_chance(loss: float, vocabulary: int) -> bool:
    """Whether a loss is NaN or that of a model that knows nothing."""
    return not loss <= CHANCE * math.log(vocabulary)


def right_loss(expected: Expected | None, dtype: torch.dtype) -> tuple[float, float] | None:
    """The least and the largest loss on the page of the expected model; `None` if it was never measured."""
    known = KNOWN_LOSS.get(expected.name) if expected else None
    return None if known is None else (known * (1 - TOLERANCE[dtype]), known * (1 + TOLERANCE[dtype]))


def check_page(
    model: DiffusionTransformer, texts: Texts, page: Page, right: tuple[float, float] | None, in_order: float
) -> Finding:
    """Compare the loss in order with the shuffled one, with chance, and with the correct one if it is known."""
    name = "page loss"
    shuffled = page_loss(model, page.shuffled)
    chance = math.log(model.cfg.d_vocab_out)
    numbers = {"in_order": in_order, "shuffled": shuffled, "chance": chance, "tokens": page.ordered.numel()}
    said = (
        f"{in_order:.3f} nats a token on {texts.name}, {shuffled:.3f} with its words shuffled, {chance:.2f} by chance"
    )
    if right is not None:
        numbers |= {"least": right[0], "most": right[1]}
        said += f"; known to be {sum(right) / 2:.3f}"
    problems = []
    if not math.isfinite(in_order):
        problems.append("the loss is not finite: weights that are not finite, or overflow")
    elif no_better_than_chance(in_order, model.cfg.d_vocab_out):
        problems.append("the model predicts no better than chance")
    elif shuffled - in_order < LEAST_GAIN:
        problems.append(f"the order of words lowers the loss by less than {LEAST_GAIN} nats")
    elif right is not None and not right[0] <= in_order <= right[1]:
        problems.append("the loss is not the one that was measured with these weights")
    return Finding(name, "off" if problems else "ok", "; ".join([said, *problems]), numbers=numbers)


def check_facts(model: HookedDiffusionTransformer, texts: Texts) -> list[Finding]:
    """The findings for one pass and for the loop."""
    tokenized: dict[Fact, tuple[list[int], list[int]]] = {}
    for fact in texts.facts:
        with suppress(ValueError):
            tokenized[fact] = fact.tokenize(model)
    facts = list(tokenized)
    if len(facts) < len(texts.facts) / 2:
        said = "the tokenizer merges most answers into their prompts, so they cannot be queried"
        return [Finding("facts, one pass", "not run", said)]
    own = texts.length is not None
    size = n_params(model.cfg.architecture)
    chosen = _chosen(model, tokenized, texts)
    written = _written(model, facts, texts)
    right = [contained(fact.answer, text) for fact, text in zip(facts, written, strict=True)]
    least_chosen = LEAST_OWN if own else LEAST_CHOSEN if size >= CHOOSING_SIZE else None
    least_written = LEAST_OWN if own else LEAST_WRITTEN if size >= WRITING_SIZE else None
    answers, prefers = [fact.answer for fact in facts], "prefers the right answer to the others"
    return [
        _finding("facts, one pass", prefers, answers, chosen, least_chosen),
        _finding("facts, by the loop", "writes the right answer", written, right, least_written),
    ]


def open_questions(data: str) -> FactSource:
    """The 40 questions of a data set or file, an argument of `open_source`; a `ValueError` if it has no such facts."""
    try:
        source = open_source(data)
        return replace(source, facts=[fact for cell in CELLS for fact in source.pick(*cell, A_CELL)])
    except ValueError as error:
        raise ValueError(f"data={data!r} cannot be used to check recall: {error}. {HOLDS}") from error


def require_known_words(model: HookedDiffusionTransformer, questions: FactSource) -> None:
    """Raise a `ValueError` unless the model's tokenizer knows the words of at least one question."""
    refused = ""
    for fact in questions.facts:
        try:
            fact.check_words(model)
            fact.tokenize(model)
        except ValueError as error:
            refused = refused or str(error)
        else:
            return
    raise ValueError(
        f"data={questions.name!r} contains no fact that {model.cfg.model_name!r} can be queried for: {refused}"
    )


def check_recall(
    model: HookedDiffusionTransformer,
    expected: Expected | None,
    questions: FactSource | None = None,
    requested: bool | None = None,
) -> Finding:
    """Measure recall on 40 questions and compare each cell with the published number.

    By default the questions are the facts that the expected model was tuned on, if it was.
    """
    name = "recall"
    if requested is None:
        requested = expected is not None and expected.tuned_on_reversals
    if not requested:
        return Finding(name, "not run", "not requested: the catalogue lists no fine-tuning on the reversal curse")
    try:
        source = questions or open_questions(default_source(expected.name if expected else ""))
    except (FileNotFoundError, OSError) as error:
        return Finding(name, "not run", f"the facts are not on this machine, name them with --data: {error}")
    recall = recall_by_steps(model, source.facts, [RECALL_STEPS], length=source.length, cfg_scale=source.cfg_scale)
    known = _known(expected, model.cfg.has_mask) if _is_data_of(expected, source) else {}
    lines, numbers, wrong = [], {}, []
    for cell, rows in recall.cells.items():
        right, n = int(recall.contained[rows, 0].sum()), len(rows)
        lower, upper = binomial_interval(right, n)
        label, share = cell_name(*cell), known.get(cell)
        numbers[label] = {"right": right, "queried": n, "low": lower, "high": upper, "known": share}
        comparison = "nothing to compare" if share is None else f"known {share:.0%}"
        lines.append(f"{label} {right}/{n} ({100 * lower:.0f}-{100 * upper:.0f} %), {comparison}")
        if share is not None and not lower - BETWEEN_RUNS <= share <= upper + BETWEEN_RUNS:
            wrong.append(label)
    how = "from left to right" if model.cfg.is_autoregressive else f"in {RECALL_STEPS} steps"
    said = f"{how}: " + "; ".join(lines)
    if not wrong:
        return Finding(name, "ok" if known else "noted", said, numbers=numbers)
    cause = (
        f"recall of {', '.join(wrong)} differs from the published value: the weights or the fine-tuning do not match "
        "the claimed model"
    )
    return Finding(name, "off", said, cause, numbers)


def binomial_interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's interval of a share, at `LEVEL`."""
    from scipy.stats import binomtest  # imported here, because importing scipy takes long

    lower, upper = binomtest(right, n).proportion_ci(LEVEL, method="wilson")
    return float(lower), float(upper)


@cache
def _toy_texts(n_sentences: int) -> Texts:
    """Training sentences and facts of the tiny pair."""
    toy = toy_facts.load()
    sentences = toy.sentences()
    # Both tiny models know facts that are queried in the trained direction. First names differ, so answers do too.
    people = {fact.person.split()[0]: fact for fact in toy.facts(trained="d2p", asked="d2p")[::5]}
    facts = tuple(people.values())[: len(CAPITALS)]
    stride = len(sentences) // n_sentences - 1  # not a multiple of the 20 templates, so that all of them occur
    pieces = tuple(sentences[::stride][:n_sentences])
    return Texts(f"{n_sentences} sentences of the bundled models", pieces, facts, "", toy_facts.SENTENCE_LENGTH)


@cache
def _site_texts(n_rows: int) -> Texts:
    """Training documents and attributes of the site pair; the documents fill rows, as in training."""
    world = site_facts.load()
    documents, rng = Documents(world, 0.5, 0.05, 0.5), random.Random(0)
    length = BUNDLED["site-mdm"].trained_length
    # The shortest document, a tag, has five tokens with its end token.
    pieces = tuple(" <eos> ".join(documents(rng) for _ in range(length // 5 + 1)) for _ in range(n_rows))
    by_answer = {fact.answer: fact for fact in world.facts("attribute")[::61]}
    facts = tuple(by_answer.values())[: len(CAPITALS)]
    return Texts(f"{n_rows} rows of the bundled models", pieces, facts, "", length)


def _rows(model: HookedDiffusionTransformer, pieces: Sequence[str], length: int | None) -> Tensor:
    if length is not None:
        end = int(model.tokenizer.eos_token_id)
        rows = [[*_ids(model, piece), *[end] * length][:length] for piece in pieces]
        return torch.tensor(rows, device=model.cfg.device)
    start = [model.tokenizer.bos_token_id] if model.cfg.default_prepend_bos and model.tokenizer.bos_token_id else []
    ids = [*start, *(token for piece in pieces for token in _ids(model, piece))][:MOST_TOKENS]
    n_pos = min(model.cfg.n_ctx, len(ids))
    n_row = len(ids) // n_pos
    return torch.tensor(ids[: n_row * n_pos], device=model.cfg.device).view(n_row, n_pos)


def _share_unknown(model: HookedDiffusionTransformer, text: str) -> float:
    ids = _ids(model, text)
    return ids.count(model.tokenizer.unk_token_id) / len(ids)


def _ids(model: HookedDiffusionTransformer, text: str) -> list[int]:
    # `to_tokens` would warn of unknown words.
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _finding(name: str, what: str, texts: list[str], right: list[bool], least: int | None) -> Finding:
    n_right = sum(right)
    said = f"{what} to {n_right} of {len(right)} questions"
    numbers = {"right": n_right, "queried": len(right), "texts": texts, "each": right}
    if least is None:
        return Finding(name, "noted", f"{said}; no number is required of so small a model", numbers=numbers)
    needed = round(least * len(right) / 10)
    return Finding(name, "ok" if n_right >= needed else "off", f"{said}; {needed} are needed", numbers=numbers)


@torch.no_grad()
def _chosen(
    model: HookedDiffusionTransformer, tokenized: dict[Fact, tuple[list[int], list[int]]], texts: Texts
) -> list[bool]:
    """For each fact, whether the first token of its answer is likelier than those of the other answers."""
    first_tokens = torch.tensor([answer[0] for _, answer in tokenized.values()], device=model.cfg.device)
    chosen = []
    for fact, (prompt, answer) in tokenized.items():
        canvas = torch.tensor(_canvas(model, fact, prompt, answer, texts), device=model.cfg.device)
        at_answer = torch.tensor([len(prompt)], device=model.cfg.device)
        output: Tensor = model(canvas[None], logits_at=model.readout.rows(at_answer))
        # The next token of a text that grows is not on the canvas.
        present = None if model.cfg.is_autoregressive else canvas[at_answer][None]
        logits = HeadAt.of(model, present).clean_logits(output)[0, 0]
        chosen.append(bool(logits[first_tokens].max() == logits[answer[0]]))
    return chosen


def _canvas(
    model: HookedDiffusionTransformer, fact: Fact, prompt: list[int], answer: list[int], texts: Texts
) -> list[int]:
    """The prompt; for a diffusion model followed by the answer, hidden by noise, and the rest of the text."""
    if model.cfg.is_autoregressive:
        return prompt
    tokens = [int(token) for token in model.to_tokens(fact.prompt + fact.answer + texts.ending)[0]]
    rest = tokens[len(prompt) + len(answer) :]
    canvas = prompt + hidden_tokens(model.cfg, len(answer), fact.prompt) + rest
    n_end = 0 if texts.length is None else texts.length - len(canvas)
    return canvas + [int(model.tokenizer.eos_token_id)] * n_end if n_end > 0 else canvas


def _written(model: HookedDiffusionTransformer, facts: list[Fact], texts: Texts) -> list[str]:
    """The text that the loop writes after each prompt."""
    n_new = NEW_TOKENS if texts.length is None else texts.length - LONGEST_OWN
    trajectory = model.denoise([fact.prompt for fact in facts], max_new_tokens=n_new, steps=FACT_STEPS)
    rows = zip(trajectory.tokens, trajectory.revealed_at, strict=True)
    return [model.to_string(tokens[revealed >= 0]) for tokens, revealed in rows]


def _is_data_of(expected: Expected | None, source: FactSource) -> bool:
    """Whether the questions are from the data set for which the expected model's recall is known."""
    default = default_source(expected.name if expected else "")
    return bool(source.training) and (source.name == default or not OWN_DATA & {source.name, default})


def _known(expected: Expected | None, masked: bool) -> dict[DirectionPair, float]:
    """The known recall: of a bundled model its own, otherwise the published one at this number of steps."""
    if expected is not None and expected.name in OWN:
        return OWN[expected.name]
    if expected is None or not masked or not expected.tuned_on_reversals:
        return {}
    known: dict[DirectionPair, float] = {}
    for cell in CELLS:
        rows = [row for row in published_rows(cell, "contained").values() if RECALL_STEPS in row]
        if rows:
            known[cell] = rows[0][RECALL_STEPS].value
    return known
