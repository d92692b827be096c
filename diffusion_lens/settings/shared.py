"""Settings that functions of the library share with commands, without the code that uses them.

A command has to know its options before torch is imported, which takes seconds, and a module beside the function
imports torch. So each setting is declared here, and the settings object of the function has these fields:

| Fields | Settings of | Command |
|---|---|---|
| `DenoiseFields` | `DenoiseSettings`, of `model.denoise` | `denoise`, `explore`; `lens`, `patch`, `trace` |
| `CanvasFields` | `CanvasLayout`, of every analysis of facts | `trace`, `rome`, `compare` |
| `TraceFields` | `TraceSettings`, of `causal_trace`, `trace_trajectory`, `temporal_effect` | `trace` |
| `AverageFields` | `AverageSettings`, of the averages of traces | `aie` |
| `RecallFields` | `recall_by_steps` | `recall` |
| `ValueSettings` | `optimize_value` | `rome` |
| `VectorFields` | `key_value_study` | `compare` |
| `PatchFields` | `patch_grid` | `patch` |
| `LensSettings` | `logit_lens` | `lens` |
| `SignatureSettings` | `reversal_signatures` | `signatures` |
| `DictionarySettings` | `train_dictionary` | `dictionary train` |
| `AdaptSettings`, with `CorpusSettings` | `adapt` | `adapt` |

`finetune` and `TrainingConfig` share two of their settings.

A field with a default of `None` leaves the choice to the function or to the data set; its help says which it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusion_lens.settings import (
    Settings,
    Whole,
    as_given,
    at_least,
    check_numpy_seed,
    check_seed,
    not_negative,
    one_of,
    plain_number,
    positive,
    setting,
    text_tuple,
    unique_indices,
    whole_number,
    whole_numbers,
)

Number = int | float  # Type checks in tests would refuse the integer 4 for a float.

KINDS = ("resid", "mlp", "attn")
NOISE = ("gaussian", "uniform", "replace")
CORRUPTIONS = (*NOISE, "mask", "swap")
CONTROLS = ("random_site", "random_subject")

# How an answer of several tokens is searched for on a masked diffusion model, and where an essence is read.
STATES = ("masked", "partial")
ESSENCE_AT = ("readout", "subject_last")
check_key_position = one_of("subject_last", "subject_first")

SAMPLER = setting(
    None,
    'A sampler, by its name or that of a preset of the authors\' code. Default: "confidence" for a masked model, '
    '"block_confidence" for one that writes block after block ("block_posterior" if the network is conditioned on the '
    'time), "uniform_posterior" under uniform noise. A causal model supports only "left_to_right". A name that does '
    "not fit the model is refused with those that do.",
    as_given,  # `named_sampler` checks it where it is used, because it needs torch
)
ACCUMULATE = setting(
    1,
    "Number of parts into which each process divides its rows, to hold the activations of one part only.",
    partial(at_least, 1),
)
FIRST_TOKENS = setting(
    1,
    "Score only this many first tokens of the answer; 1 as in ROME. In Python, None is all.",
    lambda name, count: None if count is None else at_least(1, name, count),
)
MASK_ENTITIES = setting(
    False,
    "Mask the tokens of an entity, such as a name, together or not at all: the subject and the answer of a fact, or "
    'the "entities" of a row.',
)
MIXED_PRECISION = setting(
    "no",
    'Precision of autocast: "no", "bf16" or "fp16" (not on a CPU). The weights keep their dtype.',
    one_of("no", "bf16", "fp16"),
    option="precision",
)
TEMPERATURE = setting(
    0.0,
    "Sampling temperature, of Gumbel noise in float64. 0 selects the likeliest token. Samplers by transitions draw at "
    "any temperature when a position changes; their authors' is 1.",
    partial(not_negative, zero="the likeliest token"),
)


@dataclass(frozen=True)
class DenoiseFields(Settings):
    """Settings of the denoising loop."""

    steps: int | None = setting(
        None,
        'Number of denoising steps. Default: 32, for "llada" and "threshold" one per masked position. A causal model '
        "writes one position per step, whatever the number.",
        partial(at_least, 1, reason="only a step reveals positions"),
    )
    sampler: str | Any | None = SAMPLER
    cfg_scale: float = setting(
        0.0,
        "Weight of unsupervised classifier-free guidance. 0 is no guidance.",
        partial(not_negative, zero="no guidance"),
    )
    temperature: float = TEMPERATURE
    seed: int | Any = setting(
        0,
        "Seed of the random number generator, from which each row derives its own by a hash. In Python also one seed "
        "per row, such as those of a record, or a torch.Generator.",
        lambda name, seed: check_seed(name, seed) if isinstance(seed, int) else seed,
    )


@dataclass(frozen=True)
class CanvasFields(Settings):
    """How facts are laid out on canvases."""

    length: int | None = setting(
        None,
        "Number of positions of the canvas, including the prompt. Default: the length that a masked diffusion model "
        "was trained on, as in denoise; where the text grows or that is unknown, the length of prompt and answer.",
        partial(at_least, 1),
    )
    n_masks: int | None = setting(
        None, "Number of masked positions after the prompt, instead of length.", partial(at_least, 1)
    )
    first_tokens: int | None = setting(
        None, "Score only this many first tokens of the answer; by default all. ROME uses 1.", partial(at_least, 1)
    )
    occurrence: int | None = setting(
        None,
        "Index of the mention of the subject, counted from 0, if the prompt contains several.",
        partial(at_least, 0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and self.n_masks is not None:
            raise ValueError(f"length={self.length} and n_masks={self.n_masks}; give one of them")


@dataclass(frozen=True)
class TraceFields(Settings):
    """What a causal trace corrupts and restores."""

    kind: str = setting(
        "resid",
        'State to restore: "resid", the residual stream after a block; "mlp" or "attn", the outputs of a window of '
        "blocks, those of an MLP with its shared expert's.",
        one_of(*KINDS),
    )
    window: int = setting(
        10,
        "Number of blocks restored around each layer l, from l - window // 2 to l + ceil(window / 2) exclusive; not "
        'used for "resid".',
        partial(at_least, 1),
    )
    noise: float | None = setting(
        None,
        "Scale of the noise. Default: ROME's, 3 standard deviations of the embeddings of the subject's tokens, or of "
        "those of all subjects of an average (noise_scale). For mask and swap there is none.",
        not_negative,
    )
    samples: int = setting(10, "Number of samples of the noise.", partial(at_least, 1))
    seed: int = setting(
        1,
        "Seed of the random numbers. A trace gives it to numpy.random.RandomState, as ROME's code does, so that "
        "published traces are reproduced exactly.",
        check_numpy_seed,
    )
    corruption: str = setting(
        "gaussian",
        'Corruption of the subject: "gaussian", "uniform" or "replace" noise, "mask" or "swap".',
        one_of(*CORRUPTIONS),
    )
    swap: str | Any | None = setting(
        None,
        'For the corruption "swap", another subject with as many tokens: its text (with the space before it, if the '
        "subject has one), its tokens, or a query, whose subject is taken.",
    )
    severed: str | None = setting(
        None,
        '"mlp" or "attn", outputs of the restored position that keep their corrupted values in the blocks above, '
        'which shows the path that the effect takes. With the kind "resid" only.',
        one_of("mlp", "attn"),
    )
    positions: Iterable[Whole] | None = setting(
        None, "Positions to restore, negative ones from the end; by default all.", unique_indices
    )
    layers: Iterable[Whole] | None = setting(
        None, "Layers to restore, negative ones from the end; by default all.", unique_indices
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.severed and self.kind != "resid":
            raise ValueError(f"severed={self.severed!r} requires kind='resid'; kind is {self.kind!r}")
        if (self.swap is not None) != (self.corruption == "swap"):
            raise ValueError(
                "corruption='swap' requires swap=, another subject's tokens; no other corruption takes swap="
            )


def _refuse_positions(name: str, value: Any) -> None:
    raise ValueError(
        f"{name}={value!r} has no meaning in an average, whose facts differ in length: choose roles= instead"
    )


def _controls(name: str, value: Sequence[str]) -> tuple[str, ...] | None:
    chosen = [one_of(*CONTROLS)(name, each) for each in text_tuple(name, value)]
    return tuple(each for each in CONTROLS if each in chosen) or None


@dataclass(frozen=True)
class AverageFields(CanvasFields, TraceFields):
    """How every fact of an average is traced."""

    positions: Iterable[int] | None = setting(
        None, "Not for averages, because facts differ in length: choose roles instead.", _refuse_positions
    )
    roles: Sequence[str] | None = setting(
        None,
        "Roles of the tokens whose states are restored; by default all. On a long canvas of masks most of the work is "
        'in "other_masks".',
    )
    known: str | Any | None = setting(
        None,
        'Facts to average: "recalled", whose answer the loop writes; "one_canvas", whose answer\'s tokens are the '
        'likeliest at all its positions at once; "all"; or in Python the ids of facts, such as those that both models '
        'of a pair recall (recalled_facts). Default: "recalled", but for the first token alone on one canvas, if no '
        'settings of the loop are given, "one_canvas", since one canvas answers that question.',
    )
    controls: Sequence[str] | None = setting(
        None,
        'Controls of every fact: "random_site", as many states restored at random other positions, and '
        '"random_subject", the same trace of a random span of the prompt with as many tokens as the subject, which '
        "takes as long as the trace itself. By default none.",
        _controls,
    )


def _step_columns(name: str, steps: Sequence[int]) -> tuple[int, ...]:
    columns = whole_numbers(name, steps)
    if not columns or min(columns) < 1 or len(set(columns)) < len(columns):
        raise ValueError(f"steps={columns}; give one or more numbers of steps, each at least 1 and each once")
    return tuple(columns)


@dataclass(frozen=True)
class RecallFields(Settings):
    """How a model writes the answers that are scored; see `recall_by_steps`."""

    steps: Sequence[int] | None = setting(
        None,
        "Numbers of denoising steps, each once. Default: 1, 2, 4, 8, 16 and 32; of a command, those of the data set.",
        _step_columns,
    )
    length: int | None = setting(
        None,
        "Number of positions of the canvas, including the prompt. Default: the length that the model was trained on, "
        "or 52; of a command, that of the data set, if it is shorter.",
        partial(at_least, 1),
    )
    cfg_scale: float | None = setting(
        None,
        "Weight of classifier-free guidance; 0 is none. Default: 0; of a command, that of the data set, 0.8 for "
        "reversal-curse, as in SMDM.",
        partial(not_negative, zero="no guidance"),
    )
    sampler: str | Any | None = SAMPLER
    temperature: float = TEMPERATURE
    seed: int = setting(
        1234,
        "Seed of the study; each fact has its own seed, made of this one and its id, the same for all steps.",
        check_seed,
    )
    batch_size: int = setting(
        32,
        "Largest number of prompts in one batch; on a causal model only prompts of equal length share one. A sampler "
        "by which the runs of a batch depend on one another gets one prompt at a time.",
        partial(at_least, 1),
    )


@dataclass(frozen=True)
class ValueSettings(Settings):
    """Settings of the search for v*; the defaults are those of ROME for GPT-2 XL."""

    steps: int = setting(
        20,
        "Largest number of iterations of the search for v*; the last one is only evaluated.",
        partial(at_least, 1),
        option="iterations",
    )
    lr: Number = setting(0.5, "Learning rate of the search (Adam).", positive)
    weight_decay: Number = setting(0.5, "Factor w of the penalty on ‖δ‖².", not_negative)
    clamp_norm_factor: Number = setting(
        4.0, "Largest ‖δ‖, in norms of the MLP's own output (for memit, of the residual stream).", not_negative
    )
    kl_factor: Number = setting(
        0.0625, "Factor λ of the penalty on a changed essence; 0 leaves the essence out.", not_negative
    )
    stop_below: Number = setting(0.05, "Loss below which a request stops.", not_negative)
    essence_at: str = setting(
        "readout",
        'Position at which the essence is read: "readout" (its [MASK], or the next token) or, as in ROME, '
        '"subject_last".',
        one_of(*ESSENCE_AT),
    )
    over_states: str = setting(
        "masked",
        'States of the object on a masked diffusion model: "masked" searches with the whole object masked, "partial" '
        "also with part of it revealed (see rome.canvases). A causal model is teacher-forced either way.",
        one_of(*STATES),
    )


@dataclass(frozen=True)
class VectorFields(Settings):
    """Whose keys and values a study computes, and how."""

    layers: Iterable[Whole] | None = setting(
        None,
        "Blocks whose MLPs are studied, negative ones from the end; by default all but the last, whose output reaches "
        "no other position.",
        unique_indices,
    )
    prefixes: Sequence[str] = setting(
        (),
        "Short texts before every request (rome.sample_prefixes), over which k* and the loss are averaged.",
        text_tuple,
        option=False,
    )
    at: str = setting(
        "subject_last",
        'Token at which the key is taken: "subject_last" or "subject_first", the last or first one of the subject.',
        check_key_position,
    )
    search: ValueSettings = setting(ValueSettings(), "Settings of the search for v*.", option=False)
    batch_size: int = setting(32, "Number of facts searched together.", partial(at_least, 1))
    first_tokens: int | None = FIRST_TOKENS


@dataclass(frozen=True)
class CompareSettings(Settings):
    """How two sets of vectors of the same facts are compared."""

    rank: int = setting(
        5,
        "Number of principal components that subspace and procrustes use, at least 2. A comparison needs 3 (rank + 2) "
        "facts.",
        partial(at_least, 2),
    )
    resamples: int = setting(
        1000,
        "Number of random pairings, and of random subsets of the facts; 1000 gives p-values down to 0.001.",
        partial(at_least, 1),
    )
    seed: int = setting(
        0, "Seed of numpy.random.default_rng; one seed gives the same pairings at every layer.", check_seed
    )


def _neurons(name: str, given: Iterable[Any]) -> tuple[int | tuple[int, ...], ...] | None:
    """Neurons as plain numbers, those that are patched together as a tuple."""
    groups = [isinstance(each, Iterable) for each in given] if isinstance(given, Iterable) else []
    if not any(groups):
        return unique_indices(name, given)
    cells = tuple(
        unique_indices(name, each) or () if isinstance(each, Iterable) else whole_number(name, each) for each in given
    )
    if len({frozenset([each] if isinstance(each, int) else each) for each in cells}) < len(cells):
        raise ValueError(f"{name}={list(cells)} contains duplicates; give each once")
    return cells


@dataclass(frozen=True)
class PatchFields(Settings):
    """The cells that a sweep patches besides their positions, and how."""

    layers: Iterable[Whole] | None = setting(
        None, "Layers to patch, negative ones from the end; by default all.", unique_indices
    )
    heads: Iterable[Whole] | None = setting(
        None, "Heads to patch, negative ones from the end; by default all.", unique_indices
    )
    neurons: Iterable[Whole] | Any | None = setting(
        None,
        'Hidden neurons of the MLP to patch at the site "post", each alone, negative ones from the end; in Python a '
        "list in the list are neurons that are patched together. By default all of a position, together.",
        _neurons,
    )
    method: str = setting(
        "exact",
        '"exact", or "attribution": an estimate by gradients, with its largest cells checked.',
        one_of("exact", "attribution"),
    )
    check: int = setting(
        8,
        "With attribution, number of cells of each site (and step) to patch exactly as well: those with the largest "
        "estimates.",
        partial(at_least, 0),
    )


@dataclass(frozen=True)
class LensSettings(Settings):
    """What a logit lens reads."""

    layers: Iterable[Whole] | None = setting(
        None,
        "States to read, 0 to n_layers, negative ones from the end: l is the one that enters block l, and n_layers the "
        "last one. By default all.",
        unique_indices,
    )
    positions: Iterable[Whole] | None = setting(
        None,
        "Positions of the predicted tokens, negative ones from the end; by default all that the model predicts. On a "
        "causal model these begin at 1. After texts and tokens, they include the position after the last token, to "
        "which -1 refers.",
        unique_indices,
    )
    top_k: int = setting(5, "Number of likeliest tokens.", partial(at_least, 1), option=False)


@dataclass(frozen=True)
class SignatureSettings(Settings):
    """How the signatures of pairs are computed."""

    batch_size: int | None = setting(
        None,
        "Largest number of pairs computed together, which are each other's baseline of shuffled pairs; a pair alone "
        "would have none. In batches of 2, an odd number of pairs has one batch of 3. Default: as many as the memory "
        "allows, at most 32.",
        partial(at_least, 1),
    )
    max_bytes: int = setting(
        2**30, "Most memory for one batch in bytes, in addition to the weights.", partial(at_least, 1)
    )


def _share(name: str, value: Any) -> float:
    if not 0 <= (number := plain_number(name, value)) <= 1:  # This also rejects NaN.
        raise ValueError(f"{name}={number}; it must be a share, from 0 to 1")
    return number


@dataclass(frozen=True)
class DictionarySettings(Settings):
    """How a sparse dictionary is trained."""

    n_features: int | None = setting(
        None, "Number of features. Default: 8 times the width of what they write.", partial(at_least, 1)
    )
    k: int = setting(16, "Mean number of active features at a position.", partial(at_least, 1))
    conditioned: bool = setting(
        False, "Give each feature a bias that is proportional to the share of masked positions of the canvas."
    )
    updates: int = setting(2000, "Number of updates.", partial(at_least, 1))
    batch_size: int = setting(512, "Rows per update.", partial(at_least, 1))
    lr: float | None = setting(
        None,
        "Learning rate of Adam, which falls to 0 in the last fifth of the updates. Default: 0.1 / √(number of "
        "features).",
        positive,
    )
    seed: int = setting(0, "Seed of the noise, the directions at the beginning and the order of rows.", check_seed)


@dataclass(frozen=True)
class CorpusSettings(Settings):
    """The texts that a causal model writes itself."""

    n_texts: int = setting(
        3800,
        "Number of texts that the model writes, or of rows of given texts at most. Those that name the subject of a "
        "held-out fact are left out, and a tenth, at most 64, measures the likelihood.",
        partial(at_least, 1),
    )
    length: int = setting(
        32, "Number of tokens of each text, and the default length of the twin's canvas.", partial(at_least, 2)
    )
    longest_prompt: int | None = setting(
        None,
        "Largest number of tokens of a prompt; longer ones are left out. Default: three quarters of the length.",
        partial(at_least, 1),
    )
    temperature: float = setting(0.8, "Temperature at which texts are sampled.", positive)
    top_p: float = setting(
        0.95, "Tokens are sampled from the likeliest ones that have this probability together.", _share
    )
    top_k: int = setting(32, "Number of likeliest next tokens from which one is sampled.", partial(at_least, 1))
    seed: int = setting(0, "Seed of the texts, the additions, the order of the rows and the noise.", check_seed)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest_prompt is None:
            vars(self)["longest_prompt"] = self.length * 3 // 4
        elif self.longest_prompt >= self.length:
            raise ValueError(
                f"longest_prompt={self.longest_prompt} leaves nothing to write of length={self.length} tokens"
            )


@dataclass(frozen=True)
class AdaptSettings(CorpusSettings):
    """How a causal model becomes a masked diffusion model, its twin."""

    mask_token: str | Whole | None = setting(
        None,
        "Token that becomes [MASK], or the number that is its id; not one that texts contain. Default: a special token "
        "named mask, reserved, unused, fim or repo that is not used otherwise, else an unused row of the embedding, "
        "else a new row. [MASK] itself, if the tokenizer has no such token, is an unused or a new row.",
        lambda name, token: token if isinstance(token, str) else at_least(0, name, token),
    )
    readout: str = setting(
        "shifted",
        'Row of the logits that predicts token i: "shifted" keeps the row of the causal model, i - 1, as in DiffuLLaMA '
        'and Dream; "in_place" is row i, as in LLaDA and dllm.',
        one_of("shifted", "in_place"),
    )
    block_size: int | None = setting(
        None,
        "Positions in a block, for a block diffusion model. Default: none, the whole canvas.",
        partial(at_least, 1),
    )
    causal_first: bool = setting(
        True,
        "Whether the first token of a twin without blocks sees only itself, as in the causal model, and stays the "
        "attention sink that it is there. A [MASK] there, or read in its row, is then predicted from it alone.",
    )
    anneal: int = setting(
        0,
        "Number of updates in which attention grows from causal to that of the twin, by positions to the right; 0 "
        "begins with that of the twin.",
        partial(at_least, 0),
    )
    rank: int = setting(
        16,
        "Rank of the additions to the projections that are trained and saved as a delta. 0 trains all weights, and "
        "saves a model.",
        lambda name, rank: at_least(0, name, 0 if rank is None else rank),
    )
    alpha: float | None = setting(
        None, "Factor of the additions, times the rank (LoRA's alpha). Default: the rank, a factor of 1.", positive
    )
    steps: int = setting(240, "Number of updates.", partial(at_least, 1))
    batch_size: int = setting(48, "Rows per update.", partial(at_least, 1))
    lr: float | None = setting(
        None, "Highest learning rate. Default: 1.5e-3 for additions, 2e-4 for all weights.", positive
    )
    lr_end: float = setting(0.0, "Learning rate at the end of the cosine.", not_negative)
    betas: tuple[float, float] = setting((0.9, 0.95), "Betas of AdamW.", as_given, option=False)
    weight_decay: float = setting(0.0, "Weight decay of AdamW.", not_negative)
    warmup: int | None = setting(
        None,
        "Number of updates of the linear warm-up. Default: an eighth of the updates, 30 at most.",
        partial(at_least, 0),
    )
    clip: float = setting(1.0, "Largest norm of the gradient.", positive)
    crop: int | None = setting(
        None,
        "Largest number of tokens by which the rows of an update are shortened at random. Default: an eighth of the "
        "length.",
        partial(at_least, 0),
    )
    distil: float = setting(
        3.0,
        "Weight of the distillation: what the causal model predicts after the beginning of a text, the twin learns to "
        "predict at the first [MASK] after it. 0 turns it off.",
        partial(not_negative, zero="no distillation"),
    )
    states: float = setting(
        3.0,
        "Weight of the residual streams in the distillation: where the twin predicts the first [MASK], they are to be "
        "those with which the causal model predicts its next token. With the readout in place there are none such.",
        partial(not_negative, zero="the predictions alone"),
    )
    distil_share: float = setting(0.8, "Share of the rows of an update that is distilled.", _share)
    one_mask: float = setting(
        0.4, "Share of the distilled rows in which one [MASK] follows; in the others it is a random number.", _share
    )
    evaluate_every: int = setting(40, "Number of updates between measurements of recall.", partial(at_least, 1))
    patience: int = setting(
        0,
        "Number of measurements without a better recall of the held-out facts that the causal model knows, after which "
        "the training ends, with the weights of the last measurement and not of the best. 0 does all updates.",
        partial(at_least, 0),
    )
    checkpoint_every: int = setting(40, "Number of updates between checkpoints.", partial(at_least, 1))
    mixed_precision: str = MIXED_PRECISION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup is None:
            vars(self)["warmup"] = min(30, self.steps // 8)
        if self.crop is None:
            vars(self)["crop"] = self.length // 8
        elif self.crop > self.length - 2:
            raise ValueError(f"crop={self.crop} leaves less than two of length={self.length} tokens")
