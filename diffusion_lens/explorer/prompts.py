"""The runs with which an explorer begins, a prompt or a fact on each of its models, and suggestions for a prompt.

Suggestions are for a fact that is traced. Subjects are names of the session's facts that occur in the prompt, the
longest first, and then capitalised words. Answers are those of facts with this prompt, and then what each model wrote
after it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diffusion_lens.denoising.samplers import fitting_samplers
from diffusion_lens.explorer.spec import RUN_SETTINGS, Spec
from diffusion_lens.facts.fact import Fact, mentions
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.text import token_spans
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import check_keywords

NEW_TOKENS = 16  # of a canvas whose length nothing decides
MOST_DEFAULT_STEPS = 16


def first_specs(models: Sequence[HookedDiffusionTransformer], prompt: str | Fact | Spec, **settings: Any) -> list[Spec]:
    """The run of a prompt on each model with the settings of `spec_on`; a `Spec` is one run, with these settings."""
    if isinstance(prompt, Spec):
        return [replace(prompt, **settings)]
    return [spec_on(models, index, prompt, settings) for index in range(len(models))]


def greedy_spec(
    models: Sequence[HookedDiffusionTransformer], index: int, prompt: str, settings: Mapping[str, Any]
) -> Spec:
    """The greedy run of any prompt on one of several models, on a canvas of the length in `settings`, or of the
    training, if the prompt leaves room there."""
    model = models[index]
    n_given, length = len(model.encode(prompt)), settings.get("length") or model.cfg.trained_length
    fits = length is not None and n_given < length
    return spec_on(models, index, prompt, {"length": length if fits else n_given + NEW_TOKENS})


def spec_on(
    models: Sequence[HookedDiffusionTransformer], index: int, prompt: str | Fact, settings: Mapping[str, Any]
) -> Spec:
    """The run of a prompt or fact on one of several models.

    A canvas is by default as long as those of the training. By default a run has a step for each position to write, 16
    at most: more steps than positions would be steps that write nothing.

    Args:
        settings: Settings of `denoise`: length, steps, sampler, cfg_scale, temperature, seed. Models side by side may
            be of different kinds: where a sampler or guidance does not fit one of them, it takes its own.

    Raises:
        TypeError: An unknown setting.
        ValueError: A setting that does not fit, or a fact that the model cannot be queried for.
    """
    check_keywords("explore", settings, RUN_SETTINGS)
    model, fact = models[index], prompt if isinstance(prompt, Fact) else None
    given: dict[str, Any] = {
        "model": index,
        "prompt": prompt.prompt if isinstance(prompt, Fact) else prompt,
        **settings,
    }
    n_given = len(model.encode(given["prompt"]))
    if given.get("length") is None and model.cfg.trained_length is None:
        given["length"] = n_given + NEW_TOKENS
    if given.get("steps") is None:
        # Blocks that are opened one after another share the steps.
        by_block = model.cfg.opens_blocks and not model.cfg.is_autoregressive
        n_open = (given.get("length") or model.cfg.trained_length or 0) - n_given
        given["steps"] = MOST_DEFAULT_STEPS if by_block else min(MOST_DEFAULT_STEPS, max(1, n_open))
    if len(models) > 1:
        fits_one = any(settings.get("sampler") in fitting_samplers(each.cfg) for each in models)
        if fits_one and settings["sampler"] not in fitting_samplers(model.cfg):
            given["sampler"] = None
        if not model.cfg.has_mask:
            given["cfg_scale"] = 0.0
    if fact is not None:
        given["answer"] = fact.answer
        if fact.subject:
            given["subject"] = list(fact.to_query(model).subject)
    return Spec.of(given)


MOST = 8  # suggestions of each kind
_ARTICLES = ("the", "a", "an")
_WORD = re.compile(r"[^\W\d_][\w'’-]*")


def subjects_of(models: Sequence[DiffusionTransformer], prompt: str, facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """Subjects that occur in a prompt, each as {"text", "spans", "why"}: its text, by the index of each model its first
    token's position on that model's canvas and one past its last, and where it comes from. A model whose tokenizer does
    not know the prompt has no span."""
    tokens = {str(index): spans for index, model in enumerate(models) if (spans := _token_spans(model, prompt))}
    names = sorted({name for fact in facts for name in (fact.subject, fact.person) if name.strip()}, key=len)
    found = [(start, start + len(name), "a subject of the table") for name in names for start in mentions(name, prompt)]
    found.sort(key=lambda span: (span[0] - span[1], span[0]))
    subjects: dict[str, dict[str, Any]] = {}  # by their places
    for start, stop, why in (*found, *((*span, "capitalised") for span in capitalised(prompt))):
        within = {
            index: [i for i, (first, last) in enumerate(spans) if first < stop and last > start]
            for index, spans in tokens.items()
        }
        places = {index: [inside[0], inside[-1] + 1] for index, inside in within.items() if inside}
        if places and str(places) not in subjects:
            subjects[str(places)] = {"text": prompt[start:stop], "spans": places, "why": why}
    return list(subjects.values())[:MOST]


def _token_spans(model: DiffusionTransformer, prompt: str) -> list[tuple[int, int]]:
    """First character, and one past the last, of each token; none where the model's tokenizer refuses the prompt."""
    try:
        return list(token_spans(model, prompt))
    except ValueError:
        return []


def capitalised(prompt: str) -> Iterator[tuple[int, int]]:
    """First character, and one past the last, of each span of words that begin with a capital letter."""
    span: tuple[int, int] | None = None
    for word in _WORD.finditer(prompt):
        is_name = word[0][0].isupper() and word[0].lower() not in _ARTICLES
        if is_name and span is not None and prompt[span[1] : word.start()] == " ":
            span = span[0], word.end()
            continue
        if span is not None:
            yield span
        span = word.span() if is_name else None
    if span is not None:
        yield span


def answers_of(prompt: str, facts: Sequence[Fact], written: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Answers to a prompt, each as {"text", "why"}, with the leading space that the prompt leaves to them.

    Args:
        written: Name of a model, and what it wrote after the prompt, for each run.
    """
    found = [(fact.answer, "an answer of the table") for fact in facts if fact.prompt == prompt]
    said = [(name, text.strip()) for name, text in written if any(map(str.isalnum, text))]
    found += [(text if prompt[-1:].isspace() else f" {text}", f"{name} wrote this") for name, text in said]
    answers: dict[str, list[str]] = {}
    for text, why in found:  # Two models may write the same, and the answer of a fact; one may write it twice.
        if why not in answers.setdefault(text, []):
            answers[text].append(why)
    return [{"text": text, "why": "; ".join(reasons)} for text, reasons in answers.items()][:MOST]
