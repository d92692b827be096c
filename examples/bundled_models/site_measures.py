"""What a trained pair knows, where it looks an attribute up, and what v* and edits of that place change."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

import torch

from diffusion_lens.analysis.causal_tracing import average_indirect_effect, noise_scale
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.rome import EditSettings, ValueSettings, edit_study, optimize_value, second_moment
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.data.site_edits import edit_requests
from diffusion_lens.data.site_facts import SiteFacts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.interventions import add_noise

DENOISING_STEPS = 8
ROOM = 8  # Positions after the longest prompt.
WINDOW, SAMPLES, SIGMAS = 2, 10, 3.0
N_TRACED, N_VALUES = 30, 20
ROLES = ("subject_first", "subject_last", "prompt_last", "answer")
KINDS = ("resid", "mlp", "attn")
# The settings under which v* is searched, for the first two blocks.
SEARCH = ValueSettings(steps=60, weight_decay=0.1, clamp_norm_factor=8.0, kl_factor=0.0)
SEARCHED_BLOCKS = (0, 1)
# The settings of edits: a search that stops early, so that v* writes no more than it must.
EDITED_BLOCK = 1
EDIT_SEARCH = ValueSettings(steps=40, lr=0.2, kl_factor=0.0, stop_below=0.3)
MIXTURE, N_DOCUMENTS = (0.4, 0.1, 0.6), 1500  # Documents for C, in the mixture of the AR baseline.
SETTINGS: dict[str, Any] = {
    "steps": DENOISING_STEPS,
    "cfg_scale": 0.0,
    "positions_after_longest_prompt": ROOM,
    "window": WINDOW,
    "samples": SAMPLES,
    "sigmas": SIGMAS,
    "search": asdict(SEARCH),
    "edited_block": EDITED_BLOCK,
    "edit_search": asdict(EDIT_SEARCH),
    "documents_of_second_moment": N_DOCUMENTS,
}


def measure(model: HookedDiffusionTransformer, world: SiteFacts) -> dict[str, Any]:
    """Everything that `results.json` records about a trained model. One that knows nothing has nothing to trace."""
    shares = recall(model, world)
    facts = known_attributes(model, world, N_TRACED)
    if not facts:
        return {"recall": shares}
    return {
        "recall": shares,
        "effects": effects(model, facts),
        "v_star": {f"block {layer}": recovered(model, facts[:N_VALUES], layer) for layer in SEARCHED_BLOCKS},
        "edits": edits(model, world, facts[:N_VALUES]),
    }


def canvas_length(model: HookedDiffusionTransformer, facts: Sequence[Fact]) -> int:
    """Length of the canvas on which these questions are measured."""
    return max(len(model.encode(fact.prompt)) for fact in facts) + ROOM


def recall(model: HookedDiffusionTransformer, world: SiteFacts) -> dict[str, float]:
    """Share of held-out questions whose text begins with the answer, by cell.

    The cells are "p2d p2d" to "d2p p2d" (trained, then queried) of the people trained in one direction, 75 questions
    each, and "attribute" with 720, one for each person and relation.
    """
    cells = {
        f"{trained} {asked}": world.facts("description", trained, asked)
        for trained in ("p2d", "d2p")
        for asked in get_args(Direction)
    }
    # Every tenth question is one verb of a relation; the shift visits all verbs and templates.
    questions = world.facts("attribute")
    cells["attribute"] = [questions[i + i // 10 % 10] for i in range(0, len(questions), 10)]
    return {cell: _share(model, facts) for cell, facts in cells.items()}


def known_attributes(model: HookedDiffusionTransformer, world: SiteFacts, count: int) -> list[Fact]:
    """Attributes of different people that the model knows in a held-out template, spread over relations."""
    questions = world.facts("attribute")
    per_person = len(questions) // len(world.people)
    found: list[Fact] = []
    for i in range(len(world.people)):
        fact = questions[i * per_person + (7 * i) % per_person]
        if _share(model, [fact]) == 1.0:
            found.append(fact)
        if len(found) == count:
            break
    return found


def effects(model: HookedDiffusionTransformer, facts: Sequence[Fact]) -> dict[str, Any]:
    """Average indirect effects by role and layer on these facts, one table per kind of state."""
    length = canvas_length(model, facts)
    tables: dict[str, Any] = {}
    for kind in KINDS:
        average = average_indirect_effect(
            model,
            facts,
            kind,
            window=WINDOW,
            samples=SAMPLES,
            length=length,
            first_tokens=None,
            known="all",
            roles=ROLES,
        )
        rows = dict(zip(average.roles, average.aie.tolist(), strict=True))
        # A causal model's canvas has no position of the answer.
        tables[kind] = {role: row for role, row in rows.items() if not math.isnan(row[0])}
    clean, corrupted = average.clean.mean().item(), average.corrupted.mean().item()
    return {"facts": len(average.ids), "clean": clean, "corrupted": corrupted, **tables}


def recovered(
    model: HookedDiffusionTransformer, facts: Sequence[Fact], layer: int, search: ValueSettings = SEARCH
) -> dict[str, float]:
    """Mean p(answer) with v* at the subject's last token of a corrupted run, and the share of facts that reach .9."""
    scale = noise_scale(model, [fact.to_query(model) for fact in facts], SIGMAS)
    length = canvas_length(model, facts)
    generator = torch.Generator().manual_seed(0)
    after = []
    for fact in facts:
        n_masks = None if model.cfg.is_autoregressive else length - len(model.encode(fact.prompt))
        query = fact.to_query(model, n_masks=n_masks)
        start, stop = query.subject
        noise = scale * torch.randn(1, stop - start, model.cfg.d_model, generator=generator)
        with model.hooks(fwd_hooks=[("hook_embed", add_noise(noise, range(start, stop)))]):
            after.append(optimize_value(model, query, layer, **vars(search)).probability_after)
    shares = torch.tensor(after)
    return {"mean": shares.mean().item(), "share": (shares >= 0.9).double().mean().item(), "facts": len(after)}


def edits(model: HookedDiffusionTransformer, world: SiteFacts, facts: Sequence[Fact]) -> dict[str, Any]:
    """Scores of edits of each of these attributes to another value, by group of probes."""
    corpus = Documents(world, *MIXTURE).sample(N_DOCUMENTS)
    length = None if model.cfg.is_autoregressive else canvas_length(model, facts)
    settings = EditSettings(EDITED_BLOCK, EDIT_SEARCH, layout=CanvasLayout(length))
    moment = second_moment(model, corpus, EDITED_BLOCK)
    study = edit_study(model, edit_requests(world, facts), settings, covariance=moment)
    return {group: asdict(score) for group, score in study.table().items()}


def _share(model: HookedDiffusionTransformer, facts: Sequence[Fact]) -> float:
    written = recall_by_steps(model, facts, [DENOISING_STEPS], length=canvas_length(model, facts), cfg_scale=0.0)
    answers = {fact.id: fact.answer.strip() for fact in facts}
    pairs = zip(written.ids, written.written, strict=True)
    return sum(texts[0].strip().startswith(answers[id]) for id, texts in pairs) / len(facts)
