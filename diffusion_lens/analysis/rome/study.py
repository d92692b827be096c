"""Keys and values of many facts, at several layers, asked either way: is a fact encoded alike in both directions?

For every fact and layer, k* (`rome.keys`) and v* (`rome.values`, towards the fact's own answer). A person asked for
forwards ("Daphne Barrington was once ...") has the name as key and the description as value; asked for in reverse
("... was directed by ...") the description as key and the name as value. `KeyValueStudy.compare` pairs the two
directions person by person and measures how alike they are (`representations.compare`), against chance.

Every fact finds what it finds alone, up to round-off, which Adam at ROME's rate of 0.5 makes larger with each step. So
the batches are part of the run, and a batch is always searched for whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.resumable import (
    FactFolder,
    Shard,
    content,
    name_facts,
    pick_shard,
    work_through_batches,
)
from diffusion_lens.analysis.rome.keys import PLACES, compute_keys
from diffusion_lens.analysis.rome.prompts import ask_with_prefixes
from diffusion_lens.analysis.rome.search import ValueSettings
from diffusion_lens.analysis.rome.study_result import FactVectors, KeyValueStudy
from diffusion_lens.analysis.rome.values import optimize_values
from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, pick_indices


@begins_run
def key_value_study(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    layers: Iterable[Whole] | None = None,
    *,
    prefixes: Sequence[str] = (),
    at: str = "subject_last",
    settings: ValueSettings | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    batch_size: Whole = 32,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
) -> KeyValueStudy:
    """k* and v* of every fact at every layer.

    Args:
        facts: with `person` and `asked` if the directions are to be compared.
        layers: blocks whose MLP is asked; by default all but the last, whose output nothing but its own place reads.
        prefixes: short texts before every request (`rome.sample_prefixes`), over which k* and the loss are averaged.
        at: where the key is taken, as in `compute_key`.
        settings: of the search for v*.
        length: places of every canvas of a masked diffusion model, those of prefix and prompt included; by default, as
            in `average_indirect_effect`, the length that it was trained on, if that is known. The record's `length`
            says which. A fact that needs more places is set aside.
        first_tokens, occurrence: as in `rome.ask_with_prefixes`.
        batch_size: facts searched for together.
        out: a folder for a file a fact. A run that finds its facts there goes on after them. By default nothing is
            written.
        shard: (i, n) or "i/n": do the batches i, i + n, i + 2n, ... only; `KeyValueStudy.merge` joins the shards, bit
            for bit what one run gives on the same machine.
        progress: show a bar.

    Raises:
        ValueError: a setting out of range, two facts with one id, a folder that holds another run, what
            `rome.optimize_value` refuses, or no fact that can be asked. A single one that `rome.ask_with_prefixes`
            refuses is set aside, with the reason in `KeyValueStudy.set_aside`.
    """
    settings = settings or ValueSettings()
    batch_size = at_least(1, "batch_size", batch_size)
    blocks = pick_indices("layers", range(model.cfg.n_layers - 1) if layers is None else layers, model.cfg.n_layers)
    if at not in PLACES:
        raise ValueError(f"at={at!r} is no place of a key; it is one of {', '.join(PLACES)}")
    length = CanvasLayout(length).on(model).length
    layout: dict[str, Any] = {"length": length, "first_tokens": first_tokens, "occurrence": occurrence}
    named = name_facts(facts)
    requests, set_aside = sort_out(named, lambda fact: ask_with_prefixes(model, fact, prefixes, **layout))
    batches = [list(requests)[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    run = {
        "layers": blocks,
        "prefixes": list(prefixes),
        "at": at,
        "settings": asdict(settings),
        "batch_size": batch_size,
        **layout,
        "facts": {fact_id: content(named[fact_id]) for fact_id in requests},
        "set_aside": set_aside,
        **provenance(model, model.cfg),
    }

    def work(ids: Sequence[str]) -> list[FactVectors]:
        return _find(model, [requests[fact_id] for fact_id in ids], blocks, at, settings)

    folder = None if out is None else FactFolder.start(out, run)
    mine = pick_shard(batches, shard)
    return KeyValueStudy.collect(dict(work_through_batches(mine, work, FactVectors.load, folder, progress)), run)


def _find(
    model: DiffusionTransformer, requests: list[list[Query]], layers: Sequence[int], at: str, settings: ValueSettings
) -> list[FactVectors]:
    keys = [compute_keys(model, requests, layer, at) for layer in layers]
    values = [optimize_values(model, requests, layer, settings=settings) for layer in layers]
    return [
        FactVectors(
            keys=torch.stack([each[row].vector for each in keys]),
            outputs=torch.stack([each[row].initial for each in values]),
            deltas=torch.stack([each[row].delta for each in values]),
            before=values[0][row].probability_before,
            after=torch.tensor([each[row].probability_after for each in values]),
        )
        for row in range(len(requests))
    ]
