"""`adapt`: from a causal model to a masked diffusion model with the same knowledge, its twin.

The twin has the weights of the causal model, sees the text on both sides, and has a [MASK]. Only its first token sees
no other (`causal_first`), so that it stays the attention sink that it is in the causal model (Xiao et al. 2023, arXiv
2309.17453). It is trained on texts that the causal model wrote itself (`training/corpus.py`), so that it learns to read
in both directions and nothing else, by its masked loss and by predicting what the causal model predicts
(`training/distillation.py`). That the readout may stay shifted is from DiffuLLaMA (Gong et al. 2024, arXiv 2410.17891),
as is attention that grows from causal to bidirectional.

With a rank, low-rank additions to the projections are trained (`training/distillation.py`), and the twin is saved as a
`Delta` of some megabytes; without, all weights are trained, and the twin is saved as a model. `from_pretrained(out)`
loads both.
"""

import hashlib
import math
import os
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.denoising import DenoiseSettings, denoise, lay_out
from diffusion_lens.facts.fact import Fact
from diffusion_lens.loading import base_of, save_pretrained
from diffusion_lens.loading.delta import CARD, Base, Delta, LowRank, require_projections, twin_tensors
from diffusion_lens.loading.tokenizers import mask_token_of, read_mask
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.loss import autoregressive_loss
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.text import require_tokenizer
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance, require_same_settings, shown_model
from diffusion_lens.settings import own_seed, takes
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import AdaptSettings
from diffusion_lens.training.corpus import HAS_MASK, Corpus, plain, prompts_of, read_corpus, read_texts, write_corpus
from diffusion_lens.training.distillation import TwinLoss, begin_mask_row, low_rank, masked_loss, trained_row
from diffusion_lens.training.finetune import RUN, WEIGHTS, load_weights, require_own_folder
from diffusion_lens.training.trainer import RunFolder, TrainingConfig, evaluation_steps, train
from weight_conversion import Architecture, as_json, write_json

Questions = Sequence[tuple[list[int], int]]  # the tokens of prompts, and the first token of each answer
RESULT, IDENTITY, CORPUS = "adaptation.safetensors", "adapt.json", "corpus"
_NAMED = {"one_mask": "at one [MASK]", "many_masks": "at the first of many", "by_loop": "by the denoising loop"}
_TOGETHER = 32  # canvases in one pass
_LOOP_STEPS = 8
_BOUND_TEXTS, _BOUND_SAMPLES = 64, 8  # that estimate the bound on the likelihood
_SAMPLES = 3


@dataclass(frozen=True, eq=False, repr=False)
class Adaptation(PicturedResult, Saved):
    """What became of a causal model.

    Columns of the data frame: step, loss.

    Attributes:
        settings: Settings of the adaptation.
        losses: Loss of every update.
        numbers: Of the facts and of those that were held out (`held_out_...`): their number, the share `known` whose
            answer's first token the causal model names greedily, and the shares of these that the twin names at the
            first [MASK] of a canvas with one [MASK] and with many, and by the denoising loop. Then the bound on the
            negative log-likelihood of held-out texts, estimated with a few samples of noise, beside that of the causal
            model, in nats per token. All are of the weights after the last update. If `patience` ended the training, it
            did so by the recall of the same held-out facts, which then is no estimate of the recall of others.
        samples: Texts that the twin wrote after a few prompts.
        evaluations: Recall of the held-out facts that the causal model knows, in the course of the training.
        record: Seconds of the training (without those of the texts and of the measurements after it), number and hash
            of the texts that were trained on, the facts that the causal model does not know (`unknown`, held-out ones
            first), its hash, the twin, versions.
        model: The twin, of a result that `adapt` returned; of one that was loaded, `None`.
        delta: The delta that makes it of the causal model, if there is one, likewise.
    """

    KIND = "adaptation"
    SHOWS = "the loss of every update of the adaptation"

    settings: dict[str, Any]
    losses: Float[Tensor, "step"]
    numbers: dict[str, float]
    samples: tuple[str, ...]
    evaluations: tuple[dict[str, Any], ...]
    record: dict[str, Any]

    model: ClassVar[Any] = None
    delta: ClassVar[Delta | None] = None

    def summary(self) -> str:
        """What a user wants to know, in a few lines."""
        numbers, lines = self.numbers, []
        for prefix, facts in (("held_out_", "held-out facts"), ("", "other facts")):
            if prefix + "facts" in numbers:
                shares = [
                    f"{numbers[prefix + key]:.3f} {words}" for key, words in _NAMED.items() if prefix + key in numbers
                ]
                lines.append(
                    f"{numbers[prefix + 'facts']:.0f} {facts}: the causal model knows {numbers[prefix + 'known']:.3f} "
                    f"({numbers[prefix + 'facts'] * numbers[prefix + 'known']:.0f}); of these the twin names "
                    f"{', '.join(shares) or 'none'}"
                )
        if len(self.losses) < self.settings["steps"]:
            lines.append(
                f"the training ended after {len(self.losses)} of {self.settings['steps']} updates by the recall of "
                "these held-out facts, which is therefore no estimate of that of others"
            )
        said = (
            f"{numbers['bound']:.3f} of the twin (a bound, estimated), {numbers['causal_nll']:.3f} of the causal model"
        )
        return "\n".join([*lines, f"nats per token: {said}", *(f"sample: {text!r}" for text in self.samples)])

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The loss of every update; returns the matplotlib axes."""
        from diffusion_lens import plots  # when it is drawn

        title = title or f"{shown_model(self.record)}: adaptation"
        return plots.curves_by_iteration({"loss": self.losses}, "update", "loss (nats)", ax, title)

    def _table(self) -> Table:
        return Table({"step": range(1, len(self.losses) + 1), "loss": self.losses})


@takes(AdaptSettings)
def adapt(
    model: DiffusionTransformer,
    *,
    facts: Sequence[Fact] = (),
    held_out: Sequence[Fact] = (),
    prompts: Sequence[str] = (),
    texts: str | Path | Sequence[str] | None = None,
    out: str | Path | None = None,
    corpus: str | Path | None = None,
    settings: AdaptSettings,
    progress: bool = True,
) -> Adaptation:
    """Make a masked diffusion model of a causal model, which stays as it is.

    Args:
        model: Causal model in float32: a Llama, Qwen2 or Qwen3, or with rank=0 one of any family.
        facts: Facts about which the model writes texts, the likeliest way to keep them known; those with a subject of a
            held-out one are left out. Beside `texts` they are only measured.
        held_out: Facts whose subjects no text may name; their recall is measured.
        prompts: Texts that the model continues, beside those of the facts. Without either it writes freely.
        texts: Texts to train on instead: the path of a text file, or several texts. The first `n_texts` rows are read.
        out: Folder for the twin, which `from_pretrained(out)` loads: a delta, or with rank=0 a model. In the subfolder
            `training` is what the same call needs to continue after an interruption, and the result of a complete one,
            which is read.
        corpus: Folder for the texts that the model writes. Adaptations may share it that give the same
            facts, prompts, [MASK] and settings of texts, `n_texts` to `seed`. By default the texts are in `out` until
            the training is complete.
        settings: Settings of the adaptation.
        progress: Whether to show progress bars.

    Raises:
        ValueError: There are several processes; the model is not causal, not in float32, or of another family; for a
            delta, its name does not give it again; a setting, text or fact does not fit it; or `out` contains another
            adaptation or weights.
        FileNotFoundError: There is no file `texts`.
    """
    # 1. The twin, before its training.
    _require_adaptable(model, settings)
    given = read_texts(texts, prompts)
    facts = _without_held_out(facts, held_out)
    base = base_of(model) if settings.rank else None
    mask = mask_token_of(require_tokenizer(model), model.cfg.d_vocab, settings.mask_token)
    twin = _twin(model, settings, mask)
    questions = {prefix: _questions(model, these, mask) for prefix, these in (("", facts), ("held_out_", held_out))}
    known = {key: _known(model, these, progress) for key, these in questions.items()}
    if settings.patience and not known["held_out_"]:
        raise ValueError("patience= needs held_out= facts that the causal model knows, whose recall ends the training")

    # 2. The folder, which may have a result or a part of one.
    said = [repr(list(each)) for each in (facts, held_out, prompts, given or ())]
    identity = {
        **described(settings),
        "given_sha256": hashlib.sha256("\n".join(said).encode()).hexdigest(),
        **provenance(model, model.cfg),
    }
    home = None if out is None else Path(out).expanduser()
    if home is not None:
        require_same_adaptation(home, identity)
        if (home / RUN / RESULT).exists():
            return _complete(home, twin, settings, corpus)

    # 3. The texts.
    own = None if home is None else home / RUN / CORPUS
    folder = own if corpus is None else Path(corpus).expanduser()
    subjects = sorted({fact.subject for fact in held_out})
    if given is None:
        begun = [*prompts, *prompts_of(facts)]
        whole = write_corpus(model, settings, begun, left_out=subjects, never=mask, folder=folder, progress=progress)
    else:
        whole = read_corpus(model, settings, given, left_out=subjects, never=mask)
    trained, kept = _divided(whole, settings.seed)
    rows = TwinLoss(model, trained, settings)

    # 4. The training. From here on the folder is that of this adaptation; the texts depend on some settings only.
    if home is not None:
        write_json(identity, home / RUN / IDENTITY)
    begun_as = "its own" if twin.cfg.causal_first else begin_mask_row(twin, rows, model.cfg.d_vocab)
    record, delta = _train(twin, rows, settings, base, known["held_out_"], home, progress)
    if delta is not None:
        _write(delta, twin)

    # 5. What became of it.
    numbers: dict[str, float] = {}
    for prefix, these in questions.items():
        if these:
            of_facts = {"facts": float(len(these)), "known": len(known[prefix]) / len(these)}
            # The loop takes several passes for each fact; with held-out facts, those of the training are left out.
            by_loop = bool(prefix) or not held_out
            recall = _recall(twin, known[prefix], settings.length, by_loop=by_loop, progress=progress)
            numbers |= {prefix + key: value for key, value in {**of_facts, **recall}.items()}
    noise, texts_kept = torch.Generator().manual_seed(settings.seed), kept.to(model.cfg.device)
    bound = _nats(partial(masked_loss, twin, generator=noise), texts_kept.repeat(_BOUND_SAMPLES, 1), progress)
    numbers |= {"bound": bound, "causal_nll": _nats(partial(autoregressive_loss, model), texts_kept, progress)}
    openings = [prompt for prompt, _ in (known["held_out_"] or known[""])[:_SAMPLES]]
    samples = _samples(twin, openings or kept[:_SAMPLES, : -(-settings.length // 8)].tolist(), settings)
    made_of = {
        "mask_row": begun_as,
        "causal_model": model.cfg.model_name,
        "causal_weights_sha256": identity["weights_sha256"],
    }
    of_known = {(tuple(prompt), first) for these in known.values() for prompt, first in these}
    unknown = [
        fact.prompt + fact.answer
        for prefix, these in (("held_out_", held_out), ("", facts))
        for fact, (prompt, first) in zip(these, questions[prefix], strict=True)
        if (tuple(prompt), first) not in of_known
    ]
    about = {**made_of, "texts": len(rows.corpus), "texts_sha256": rows.sha256(), "seconds": record.record["seconds"]}
    result = Adaptation(
        as_json(settings.describe()),
        record.losses,
        numbers,
        tuple(samples),
        record.evaluations,
        {**about, "unknown": unknown, "starts": record.record["starts"], **provenance(twin, twin.cfg)},
    )
    card = _card(result, model.cfg.model_name)
    if delta is not None:
        of_result = {"settings": result.settings, "numbers": numbers, "versions": result.record["versions"]}
        delta = replace(delta, about={**about, **of_result}, card=card)
    vars(result).update(model=twin, delta=delta)

    # 6. The folder. The result comes last, because it marks the adaptation as complete.
    if home is not None:
        if delta is None:
            save_pretrained(home, twin.state_dict(), twin.cfg, twin.tokenizer)
            (home / CARD).write_text(card, encoding="utf-8")
        else:
            delta.save(home)
        result.save(home / RUN / RESULT)
        _tidy(home, corpus)
    return result


def rows_measured(settings: AdaptSettings, n_facts: int, n_held_out: int) -> int:
    """At most how many rows pass a network in the measurements, of facts before, during and after the training, of the
    likelihood and of samples."""
    n_during = 2 * n_held_out * len(evaluation_steps(settings.evaluate_every, settings.steps))
    n_after = 2 * (n_facts + n_held_out) + _LOOP_STEPS * (n_held_out or n_facts)
    of_texts = _n_kept(settings.n_texts) * (1 + _BOUND_SAMPLES) + _SAMPLES * settings.length
    return n_facts + n_held_out + n_during + n_after + of_texts


def described(settings: AdaptSettings) -> dict[str, Any]:
    """The settings in the identity of an adaptation: all but how often it is saved."""
    return {"settings": {name: value for name, value in settings.describe().items() if name != "checkpoint_every"}}


def require_same_adaptation(home: Path, identity: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a folder has other weights, another training, or an adaptation with other entries."""
    require_own_folder(home)
    if RunFolder(home / RUN).run.exists() and not (home / RUN / IDENTITY).exists():
        raise ValueError(f"{home / RUN} contains a training that is no adaptation; pass another folder as out=")
    require_same_settings(home, identity, f"{RUN}/{IDENTITY}")


def _divided(corpus: Corpus, seed: int) -> tuple[Corpus, Tokens]:
    """The texts of the training, and up to 64 that are none of these, which estimate the bound."""
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(seed))
    n_kept = _n_kept(len(corpus))
    kept = corpus.tokens[order[:n_kept]]
    without = set(map(tuple, kept.tolist()))
    others = [i for i in order[n_kept:].tolist() if tuple(corpus.tokens[i].tolist()) not in without]
    if not others:
        raise ValueError(
            f"the {len(corpus)} texts are alike, or too few to train on some and measure others: raise n_texts= "
            "or temperature=, or give more prompts or texts"
        )
    return corpus.select(torch.tensor(others)), kept


def _n_kept(n_texts: int) -> int:
    """Number of texts that measure the likelihood."""
    return max(1, min(_BOUND_TEXTS, n_texts // 10))


def _train(
    twin: DiffusionTransformer,
    rows: TwinLoss,
    settings: AdaptSettings,
    base: Base | None,
    held_out: Questions,
    home: Path | None,
    progress: bool,
) -> tuple[Any, Delta | None]:
    """Train all weights of the twin, or of a base a delta, rounded as it is saved; returns the record and the delta."""
    shared = ("steps", "batch_size", "lr_end", "betas", "weight_decay", "warmup", "clip", "mixed_precision", "seed")
    config = TrainingConfig(
        **{name: getattr(settings, name) for name in shared}, lr=settings.lr or (1.5e-3 if settings.rank else 2e-4)
    )

    def recall(model: DiffusionTransformer) -> Mapping[str, float]:
        return _recall(model, held_out, settings.length)

    def ends(evaluations: Sequence[Mapping[str, float]]) -> bool:
        recalls = [each["one_mask"] + each["many_masks"] for each in evaluations]
        return bool(recalls) and len(recalls) - 1 - recalls.index(max(recalls)) >= settings.patience

    with ExitStack() as attached:
        if base is not None:
            generator = torch.Generator().manual_seed(own_seed(settings.seed, "additions"))
            factors = attached.enter_context(low_rank(twin, settings.rank, _alpha(settings), generator))
            embed = attached.enter_context(trained_row(twin, twin.cfg.blank))
        record = train(
            twin,
            rows,
            config,
            objective=rows,
            folder=None if home is None else home / RUN,
            checkpoint_every=settings.checkpoint_every,
            evaluate=recall if held_out else None,
            evaluate_every=settings.evaluate_every,
            stop=ends if settings.patience else None,
            progress=progress,
        )
        if base is None:
            return record, None
        rounded = {
            name: LowRank(*(part.detach().cpu().to(torch.bfloat16) for part in pair)) for name, pair in factors.items()
        }
        row = embed.row.detach().cpu()
        return record, Delta(rounded, twin.cfg.architecture, base, _alpha(settings), row, settings.length)


def _alpha(settings: AdaptSettings) -> float:
    return float(settings.rank) if settings.alpha is None else settings.alpha


def require_causal(architecture: Architecture, rank: int) -> None:
    """Raise a `ValueError` unless a model is causal and, with a rank, of a family that has deltas."""
    if not architecture.is_autoregressive:
        raise ValueError(f"{architecture.name!r} is no causal model, so there is no twin to make of it")
    if rank:
        require_projections(architecture)


def _require_adaptable(model: DiffusionTransformer, settings: AdaptSettings) -> None:
    """Raise a `ValueError` unless the model can be adapted with these settings."""
    cfg, n_processes = model.cfg, int(os.environ.get("WORLD_SIZE", 1))
    if n_processes > 1:
        raise ValueError(
            f"adapt works in one process, and this is one of {n_processes}: start it without `accelerate launch` or "
            "torchrun"
        )
    require_causal(cfg.architecture, settings.rank)
    if cfg.dtype != torch.float32:
        raise ValueError(f"the weights of {cfg.model_name!r} are {cfg.dtype}: load it with dtype=torch.float32")
    if settings.anneal and settings.block_size is not None:
        raise ValueError(
            "anneal= grows attention over the whole canvas, and block_size= is attention by blocks: give one"
        )


def _twin(model: DiffusionTransformer, settings: AdaptSettings, mask: int) -> DiffusionTransformer:
    """The causal model read as the twin, in weights of its own."""
    shape, size = model.cfg.architecture, settings.block_size
    n_rows = max(shape.d_vocab, mask + 1)
    readout: Any = settings.readout
    architecture = replace(
        shape,
        name=f"{shape.name}-mdm",
        attention_dir="bidirectional" if size is None else "block_causal",
        causal_block=size,
        causal_first=settings.causal_first and size is None,
        readout=readout,
        mask_token_id=mask,
        d_vocab=n_rows,
        d_vocab_out=n_rows if shape.tied else shape.d_vocab_out,
    )
    cfg = DiffusionConfig.from_architecture(
        architecture,
        device=model.cfg.device,
        dtype=model.cfg.dtype,
        default_prepend_bos=model.cfg.default_prepend_bos,
        trained_length=settings.length,
    )
    tokenizer = deepcopy(model.tokenizer)
    read_mask(tokenizer, mask)
    return type(model)(cfg, tokenizer, tensors=twin_tensors(model.named_parameters(), architecture))


@torch.no_grad()
def _write(delta: Delta, twin: DiffusionTransformer) -> None:
    """Write a delta into the weights for good, as `from_pretrained` does."""
    for name, tensor in twin_tensors(twin.named_parameters(), twin.cfg.architecture, delta):
        twin.get_parameter(name).copy_(tensor)


def _tidy(home: Path, corpus: str | Path | None) -> None:
    """Delete what a complete adaptation no longer needs."""
    RunFolder(home / RUN).checkpoint.unlink(missing_ok=True)
    if corpus is None:
        shutil.rmtree(home / RUN / CORPUS, ignore_errors=True)


def _complete(home: Path, twin: DiffusionTransformer, settings: AdaptSettings, corpus: str | Path | None) -> Adaptation:
    """The result of a complete adaptation."""
    _tidy(home, corpus)  # the process may have ended before it did
    result, delta = Adaptation.load(home / RUN / RESULT), None
    if settings.rank:
        delta = Delta.load(home)
        _write(delta, twin)
    else:
        load_weights(twin, home / WEIGHTS)
    vars(result).update(model=twin, delta=delta)
    return result


def _without_held_out(facts: Sequence[Fact], held_out: Sequence[Fact]) -> list[Fact]:
    """The facts whose subject is not held out; a `ValueError` if a held-out one has no subject."""
    for fact in held_out:
        if not fact.subject.strip():
            raise ValueError(
                f"the held-out fact {fact.prompt + fact.answer!r} has no subject, which texts could leave out"
            )
    subjects = {plain(fact.subject) for fact in held_out}
    return [fact for fact in facts if plain(fact.subject) not in subjects]


def _questions(model: DiffusionTransformer, facts: Sequence[Fact], mask: int) -> Questions:
    tokens = [fact.tokenize(model) for fact in facts]
    for fact, (prompt, answer) in zip(facts, tokens, strict=True):
        if mask in (*prompt, *answer):
            raise ValueError(f"the fact {fact.prompt + fact.answer!r} {HAS_MASK}")
    return [(prompt, answer[0]) for prompt, answer in tokens]


def _by_length(questions: Questions, progress: bool) -> Iterator[tuple[Tokens, Int[Tensor, "batch"]]]:
    """Prompts of one length, and the first tokens of their answers."""
    groups = defaultdict[int, list[tuple[list[int], int]]](list)
    for prompt, first in questions:
        groups[len(prompt)].append((prompt, first))
    parts = [same[i : i + _TOGETHER] for same in groups.values() for i in range(0, len(same), _TOGETHER)]
    for part in tqdm(parts, desc="facts", disable=not (progress and parts)):
        prompts, answers = zip(*part, strict=True)
        yield torch.tensor(prompts), torch.tensor(answers)


def _known(model: DiffusionTransformer, questions: Questions, progress: bool) -> Questions:
    """The questions whose answer's first token a causal model names greedily."""
    known: list[tuple[list[int], int]] = []
    for prompts, answers in _by_length(questions, progress):
        right = _first_tokens(model, prompts, 0) == answers
        known += [(prompt, int(a)) for prompt, a in zip(prompts[right].tolist(), answers[right], strict=True)]
    return known


@torch.no_grad()
def _first_tokens(model: DiffusionTransformer, prompts: Tokens, n_masks: int) -> Int[Tensor, "batch"]:
    """The likeliest token after each prompt, on canvases with this number of masks."""
    n_prompt, device = prompts.shape[1], model.cfg.device
    canvas = torch.nn.functional.pad(prompts, (0, n_masks), value=model.cfg.mask_token_id or 0).to(device)
    row = model.readout.rows(torch.tensor([n_prompt], device=device))
    logits: Tensor = model(canvas, attention_mask=torch.ones_like(canvas), logits_at=row)[:, 0]
    names = torch.arange(logits.shape[1], device=device)
    return logits.masked_fill(~model.cfg.writable(names), -torch.inf).argmax(dim=-1).cpu()


def _recall(
    twin: DiffusionTransformer, known: Questions, length: int, by_loop: bool = False, progress: bool = False
) -> dict[str, float]:
    """The shares of the answers whose first token the twin names at the first [MASK], on canvases of one [MASK], of
    `length` positions, and of these by the denoising loop."""
    found: dict[str, list[bool]] = defaultdict(list)
    for prompts, answers in _by_length(known, progress):
        n_prompt = prompts.shape[1]
        n_masks = max(1, length - n_prompt)
        found["one_mask"] += (_first_tokens(twin, prompts, 1) == answers).tolist()
        found["many_masks"] += (_first_tokens(twin, prompts, n_masks) == answers).tolist()
        if by_loop:
            tokens = prompts.to(twin.cfg.device)
            canvas = lay_out(twin, tokens, max_new_tokens=n_masks, attention_mask=torch.ones_like(tokens))
            written = denoise(twin, canvas, DenoiseSettings(steps=_LOOP_STEPS)).tokens[:, n_prompt].cpu()
            found["by_loop"] += (written == answers).tolist()
    return {name: sum(right) / len(right) for name, right in found.items()}


@torch.no_grad()
def _nats(loss: Callable[[Tokens], Tensor], texts: Tokens, progress: bool) -> float:
    """The mean of a loss over texts."""
    parts = tqdm(texts.split(_TOGETHER), desc="likelihood", disable=not progress)
    return math.fsum(len(rows) * float(loss(rows)) for rows in parts) / len(texts)


def _samples(twin: DiffusionTransformer, openings: Sequence[list[int]], settings: AdaptSettings) -> list[str]:
    """What the twin writes after each of these tokens."""
    texts = []
    for opening in openings:
        tokens = torch.tensor([opening], device=twin.cfg.device)
        n_masks = max(1, settings.length - len(opening))
        canvas = lay_out(twin, tokens, max_new_tokens=n_masks, attention_mask=torch.ones_like(tokens))
        texts += denoise(twin, canvas, DenoiseSettings(seed=settings.seed)).text
    return texts


def _card(result: Adaptation, base: str) -> str:
    """README.md of a twin."""
    s, record, shape = result.settings, result.record, result.record["architecture"]
    what = f"additions of rank {s['rank']} to all projections" if s["rank"] else "all weights"
    done = (
        f"Training: {what}, {len(result.losses)} updates of {s['batch_size']} rows, on {record['texts']} texts of "
        f"{s['length']} tokens, seed {s['seed']}, {record['seconds']:.0f} seconds without those of the texts. [MASK] "
        f"is the token {shape['mask_token_id']}, the readout {s['readout']}, attention {shape['attention_dir']}"
        f"{', but the first token sees only itself' if shape.get('causal_first') else ''}."
    )
    return f"""# {record["model"]}

A masked diffusion language model, made of the causal model `{base}` by `diffusion_lens.training.adapt`. Its licence is
that of `{base}`, of whose weights it is made (SHA-256 {record["causal_weights_sha256"]}).

    from diffusion_lens import HookedDiffusionTransformer

    model = HookedDiffusionTransformer.from_pretrained("this folder")

{textwrap.fill(done, 120)}

{result.summary()}
"""
