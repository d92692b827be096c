"""The study: what a causal model and its twin know, where it is, in which direction, and what an edit changes.

Its parts run one after the other, each with the library's own studies, which keep one file per fact. A part that is
done is in `parts/NAME.json` and is not computed again; an interrupted one continues with the fact that it was at.

    recall       the facts that each model names, at one [MASK] and at the first of many; then what it writes, by
                 number of denoising steps ("loop": with most of them)
    traces       of the residual stream, MLPs and attention, by role of the token and by layer
    by_step      traces of the twin at the step that writes the attribute, somewhere in a longer text
    directions   log odds ratios of pairs of facts, forward and in reverse (`real_words.associations`)
    vectors      keys and values of both directions: are they similar?
    edits        ROME's edits, with paraphrases, neighbours and the question in reverse
    signatures   evidence, routes and gradients of both directions

All parts but the first use facts that both models name at one [MASK], and the traces and edits held-out ones, whose
subjects the twin's training did not name. The early site of a model is the layer whose MLPs have the largest effect at
the subject's last token. Vectors and edits are computed there, and in a layer drawn at random from those further away.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.analysis import (
    CanvasLayout,
    EditSettings,
    LoopSettings,
    average_indirect_effect,
    average_trajectory_effect,
    compare_along,
    edit_study,
    key_value_study,
    reversal_signatures,
    second_moment,
)
from diffusion_lens.denoising.samplers import Confidence
from diffusion_lens.evaluation import rank_answer, recall_by_steps
from diffusion_lens.facts.fact import Fact
from diffusion_lens.facts.taught_pairs import lay_out_pairs, pairs_in_common
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.records.results import provenance, require_same_settings
from diffusion_lens.settings.shared import CorpusSettings, ValueSettings
from diffusion_lens.training.corpus import write_corpus
from real_words.associations import FORMS, Rival, agreement, log_odds, summary
from real_words.questions import SHIPPED, Questions, first_token
from weight_conversion import as_json, read_json, sha256_of_file, write_json

ROLES = ("subject_first", "subject_middle", "subject_last", "prompt_last")
KINDS = ("resid", "mlp", "attn")
FEWEST = 12  # facts for a comparison of vectors
FEWEST_LAYERS = 3
AT_RANDOM = 1e6  # a temperature at which the order of writing is random
RANK = 2  # of the comparison, which needs 3 (rank + 2) facts
DIGITS = 4


@dataclass(frozen=True)
class Settings:
    """Settings of the study; the defaults took 42 minutes on two cores.

    Attributes:
        facts: File of facts (`real_words.questions`).
        limit: Number of facts that are read, spread over the file; 0 is all.
        n_facts: Largest number of facts that are traced.
        n_steps: Of those traced by step.
        n_vectors: Of those whose keys and values are computed.
        n_edits: Of edits.
        n_pairs: Of pairs of a statement and a question in reverse.
        n_texts: Texts of the corpus whose keys an edit preserves, which the causal model writes.
        samples: Noise samples of each trace.
        every: Every how many layers are traced.
        window: MLPs or attention layers that are restored together.
        iterations: Iterations of the search for v*.
        steps: Numbers of denoising steps of the recall.
        continuation: Tokens that the twin writes in the traces by step, in as many steps.
        masks: Canvas of the twin in traces, vectors and edits: "one" [MASK] after the prompt, or "many".
        resamples: Random pairings and subsets of each comparison of vectors.
        seed: Seed of noise, texts, samples of layers and resamples.
    """

    facts: str = str(SHIPPED)
    limit: int = 0
    n_facts: int = 50
    n_steps: int = 30
    n_vectors: int = 36
    n_edits: int = 24
    n_pairs: int = 24
    n_texts: int = 512
    samples: int = 5
    every: int = 3
    window: int = 10
    iterations: int = 20
    steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    continuation: int = 4
    masks: str = "one"
    resamples: int = 1000
    seed: int = 1


def real_words_study(
    causal: HookedDiffusionTransformer,
    twin: HookedDiffusionTransformer,
    settings: Settings,
    out: Path,
    progress: bool = False,
) -> dict[str, Any]:
    """Compute the parts that are not in `out` yet; returns all, and writes them to `out/real_words.json`.

    Raises:
        ValueError: `out` has another study, or the models have no fact in common.
    """
    study = _Study({"causal": causal, "twin": twin}, settings, out, progress)
    parts = {name: study.part(name, compute) for name, compute in study.parts.items()}
    result = {"command": "real-words", "settings": study.described, "results": parts, "record": study.record}
    write_json(_rounded(result), out / "real_words.json")
    return result


class _Study:
    def __init__(
        self, models: dict[str, HookedDiffusionTransformer], settings: Settings, out: Path, progress: bool
    ) -> None:
        self.models, self.settings, self.out, self.progress = models, settings, out, progress
        self.twin = models["twin"]
        if self.twin.cfg.n_layers < FEWEST_LAYERS:
            raise ValueError(f"the models have {self.twin.cfg.n_layers} layers; two sites need {FEWEST_LAYERS}")
        self.questions = Questions.read(settings.facts, out, settings.limit)
        self.record = {name: provenance(model, model.cfg) for name, model in models.items()}
        self.described = {
            **as_json(asdict(settings)),
            "facts": Path(settings.facts).name,
            "facts_sha256": sha256_of_file(Path(settings.facts)),
        }
        identity = {**self.described, **{name: each["weights_sha256"] for name, each in self.record.items()}}
        require_same_settings(out, identity)
        write_json(identity, out / "run.json")
        self.length = self.twin.cfg.trained_length
        self.layout = {"n_masks": 1} if settings.masks == "one" else {"length": self.length}
        self.done: dict[str, Any] = {}

    @property
    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        names = ("recall", "traces", "by_step", "directions", "vectors", "edits", "signatures")
        return {name: getattr(self, name) for name in names}

    def part(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A part of the result, from its file if it is there."""
        file = self.out / "parts" / f"{name}.json"
        if not file.exists():
            began = time.perf_counter()
            computed = compute()
            write_json({**computed, "seconds": time.perf_counter() - began}, file)
        self.done[name] = read_json(file)
        return self.done[name]

    def say(self, what: str) -> None:
        if self.progress:
            print(what, flush=True)

    def options(self, *path: str) -> dict[str, Any]:
        """Folder and progress of a study of the library."""
        self.say(" ".join(path))
        return {"out": self.out / Path(*path), "progress": self.progress}

    @property
    def known(self) -> set[str]:
        """Ids of the facts that both models name."""
        known = set.intersection(*(set(each[self.settings.masks]) for each in self.done["recall"]["known"].values()))
        if not known:
            raise ValueError("the models have no fact in common that both name; give other facts, or masks='many'")
        return known

    @property
    def known_held_out(self) -> set[str]:
        """Ids of those that were held out."""
        held_out = self.known & self.questions.held_out
        if not held_out:
            raise ValueError("both models name none of the held-out facts; give other facts, or masks='many'")
        return held_out

    def held_out(self, most: int) -> list[Fact]:
        """Held-out facts that both models know, with the first token of each answer; spread over the file."""
        known = self.known_held_out
        facts = [first_token(self.twin, fact) for fact in self.questions.facts if fact.id in known]
        return random.Random(self.settings.seed).sample(facts, min(most, len(facts)))

    def recall(self) -> dict[str, Any]:
        known: dict[str, dict[str, list[str]]] = {}
        said: dict[str, str] = {}
        facts, unusable = self.answerable()
        for name, model in self.models.items():
            self.say(f"recall {name}")
            many = dict.fromkeys((fact.id for fact in facts), 1)
            if model.cfg.has_mask and self.length:
                many |= {fact.id: max(1, self.length - len(model.encode(fact.prompt))) for fact in facts}
            ranks = {
                canvas: {
                    fact.id: rank_answer(model, fact.prompt, fact.answer, n_masks=n[fact.id], top_k=1) for fact in facts
                }
                for canvas, n in (("one", dict.fromkeys(many, 1)), ("many", many))
            }
            known[name] = {canvas: [i for i, each in of.items() if not each.rank[0]] for canvas, of in ranks.items()}
            said |= {i: each.top[0][0] for i, each in ranks["one"].items() if name == "twin" and each.rank[0]}
        by_steps: dict[str, Any] = {}
        whole = [fact for fact in self.questions.facts if fact.id not in unusable]
        for group in ("held_out", "other"):
            asked = [fact for fact in whole if (fact.id in self.questions.held_out) == (group == "held_out")]
            for name, model in self.models.items() if asked else ():
                of_steps = recall_by_steps(
                    model, asked, steps=self.settings.steps, length=self.length, **self.options("recall", name, group)
                )
                (table,) = of_steps.table().values()
                shares = {str(steps or "left to right"): list(share) for steps, share in table.items()}
                by_steps.setdefault(group, {})[name] = shares
                written = zip(of_steps.ids, of_steps.contained[:, -1].tolist(), strict=True)
                known[name].setdefault("loop", []).extend(i for i, has in written if has)
        lost = [i for i in known["causal"]["one"] if i in said]
        return {
            "facts": len(facts),
            "set_aside": unusable,
            "held_out": sorted({fact.id for fact in facts} & self.questions.held_out),
            "known": known,
            "lost": [
                {"prompt": fact.prompt, "attribute": fact.description, "twin": said[fact.id]}
                for fact in facts
                if fact.id in lost
            ],
            "by_steps": by_steps,
        }

    def answerable(self) -> tuple[list[Fact], dict[str, str]]:
        """The facts with the first token of their answer, and why the others have none, by id."""
        facts, unusable = [], {}
        for fact in self.questions.facts:
            try:
                facts.append(first_token(self.twin, fact))
                for model in self.models.values():
                    CanvasLayout(length=self.length).query(model, facts[-1])
            except ValueError as error:
                unusable[fact.id] = str(error)
        return [fact for fact in facts if fact.id not in unusable], unusable

    def traces(self) -> dict[str, Any]:
        facts = self.held_out(self.settings.n_facts)
        return {name: {kind: self.trace(name, kind, facts) for kind in KINDS} for name in self.models}

    def trace(self, name: str, kind: str, facts: Sequence[Fact]) -> dict[str, Any]:
        average = average_indirect_effect(
            self.models[name],
            facts,
            kind,
            known="all",
            roles=ROLES,
            first_tokens=1,
            **self.layout,
            **self.of_traces(),
            **self.options("traces", name, kind),
        )
        return {
            "facts": len(average.ids),
            "layers": average.layers,
            "total": [average.ate, *average.ate_interval()],
            "effects": {
                role: _curve(average.aie[i], average.aie_interval(), i) for i, role in enumerate(average.roles)
            },
        }

    def of_traces(self) -> dict[str, Any]:
        settings = self.settings
        layers = range(0, self.twin.cfg.n_layers, settings.every)
        return {"window": settings.window, "samples": settings.samples, "layers": layers, "seed": settings.seed}

    def by_step(self) -> dict[str, Any]:
        """The first token of the attribute at the step that writes it, while the twin writes its text in random order.

        By confidence the twin would write that token first, on a canvas without other text.
        """
        n = self.settings.continuation
        average = average_trajectory_effect(
            self.twin,
            self.held_out(self.settings.n_steps),
            loop=LoopSettings(steps=n, sampler=Confidence(choice_temperature=AT_RANDOM)),
            n_masks=n,
            first_tokens=1,
            roles=(*ROLES, "answer"),
            **{**self.of_traces(), "window": 1},
            **self.options("traces", "twin", "by_step"),
        )
        lows, highs = average.aie_interval()
        totals = average.ate_interval()
        return {
            "facts": len(average.ids),
            "layers": average.layers,
            "steps": [
                {
                    "offset": offset,
                    "facts": average.n_facts[i],
                    "total": [average.ate[i].item(), *(end[i].item() for end in totals)],
                    "effects": {
                        role: _curve(average.aie[i, row], (lows[i], highs[i]), row)
                        for row, role in enumerate(average.roles)
                    },
                }
                for i, offset in enumerate(average.offsets)
            ],
        }

    def directions(self) -> dict[str, Any]:
        """Of held-out facts against each other, and of the other facts against each other, which were trained on."""
        results: dict[str, Any] = {}
        subjects = {fact.subject for fact in self.questions.facts}
        for label, ids in (("held_out", self.known_held_out), ("other", self.known - self.questions.held_out)):
            groups = self.questions.by_relation(ids)
            for name, model in self.models.items():
                of_forms: dict[str, dict[str, Rival]] = {}
                for form in FORMS:
                    if form == "masked" and model.cfg.is_autoregressive:
                        continue
                    self.say(f"directions {label} {name} {form}")
                    of_forms[form] = {}
                    for relation, facts in groups.items():
                        of_forms[form] |= log_odds(model, self.questions.relations[relation], facts, form, subjects)
                for form, rivals in of_forms.items():
                    found = results.setdefault(name, {}).setdefault(form, {})
                    found[label] = summary(list(rivals.values()), self.settings.seed)
                    if form != "forward":
                        found[label]["agreement"] = agreement(of_forms["forward"], rivals, self.settings.seed)
        return results

    def sites(self, name: str) -> dict[str, int]:
        """The early site of a model, and a layer drawn at random from those further away."""
        trace = self.done["traces"][name]["mlp"]
        effects, last = trace["effects"]["subject_last"]["mean"], self.twin.cfg.n_layers - 1
        early = max((effect, layer) for effect, layer in zip(effects, trace["layers"], strict=True) if layer < last)[1]
        away = [layer for layer in range(last) if abs(layer - early) > last // 5]
        return {"early": early, "random": random.Random(self.settings.seed).choice(away)}

    @property
    def search(self) -> ValueSettings:
        return ValueSettings(steps=self.settings.iterations)

    def vectors(self) -> dict[str, Any]:
        pairs = self.questions.in_both_directions(self.known, self.settings.n_vectors)
        relation_of = {fact.person: self.questions.relation_of[fact.id] for fact, _ in pairs}
        facts = [first_token(self.twin, fact) for pair in pairs for fact in pair]
        results: dict[str, Any] = {}
        for name, model in self.models.items():
            sites = self.sites(name)
            study = key_value_study(
                model,
                facts,
                layers=list(sites.values()),
                search=self.search,
                **self.layout,
                **self.options("vectors", name),
            )
            results[name] = {"sites": sites, "facts": len(study.ids), "p": {}, "compared": {}}
            for asked in ("p2d", "d2p"):
                rows = [i for i, fact_id in enumerate(study.ids) if study.record["facts"][fact_id]["asked"] == asked]
                after = study.after[rows].mean(dim=0).tolist()
                results[name]["p"][asked] = {
                    "before": study.before[rows].mean().item(),
                    **dict(zip(sites, (after[study.layers.index(layer)] for layer in sites.values()), strict=True)),
                }
            for kind in ("keys", "values"):
                sides = [study.by_person(kind, asked) for asked in ("p2d", "d2p")]
                both = [person for person in sides[0] if person in sides[1]]
                # The mean of each relation is subtracted, which leaves nothing of a fact that is alone in it.
                alone = {name for name, count in Counter(relation_of[person] for person in both).items() if count == 1}
                people = [person for person in both if relation_of[person] not in alone]
                if len(people) < FEWEST:
                    continue
                comparisons = compare_along(
                    "layer",
                    {
                        layer: tuple(
                            torch.stack([side[person][study.layers.index(layer)] for person in people])
                            for side in sides
                        )
                        for layer in sites.values()
                    },
                    ids=people,
                    names=("forward", "in reverse"),
                    groups=[relation_of[person] for person in people],
                    only=["cka", "subspace"],
                    rank=RANK,
                    resamples=self.settings.resamples,
                    seed=self.settings.seed,
                )
                results[name]["compared"][kind] = {
                    site: {"facts": len(people), **comparisons.at[layer].table()} for site, layer in sites.items()
                }
        return results

    def edits(self) -> dict[str, Any]:
        requests = self.questions.edits(self.twin, self.known_held_out, self.settings.n_edits)
        n_texts, length = self.settings.n_texts, self.length or 32
        texts = write_corpus(
            self.models["causal"],
            CorpusSettings(n_texts=n_texts, length=length, seed=self.settings.seed),
            [],
            never=self.twin.cfg.mask_token_id,
            folder=self.out / "texts",
            progress=self.progress,
        ).tokens
        results: dict[str, Any] = {}
        for name, model in self.models.items():
            for site, layer in self.sites(name).items():
                moment = second_moment(model, texts, layer, folder=self.out / "moments" / f"{name}_{layer}")
                study = edit_study(
                    model,
                    requests,
                    EditSettings(layer=layer, search=self.search, layout=CanvasLayout(**self.layout)),
                    covariance=moment,
                    **self.options("edits", name, site),
                )
                table = {group: asdict(score) for group, score in study.table().items()}
                results.setdefault(name, {})[site] = {"layer": layer, "edits": len(study.ids), "groups": table}
        return results

    def signatures(self) -> dict[str, Any]:
        both = self.questions.in_both_directions(self.known, self.settings.n_pairs)
        pairs = [(self.questions.forward(fact), reverse) for fact, reverse in both]
        laid_out = pairs_in_common({name: lay_out_pairs(model, pairs) for name, model in self.models.items()})
        results = {}
        for name, model in self.models.items():
            study = reversal_signatures(model, laid_out[name], **self.options("signatures", name))
            curves = study.curves()
            drawn = {
                panel: {
                    label: {end: values.tolist() for end, values in vars(curve).items() if values is not None}
                    for label, curve in getattr(curves, panel).items()
                }
                for panel in ("evidence", "cuts", "routes", "gradients")
            }
            results[name] = {
                "pairs": len(study.ids),
                **drawn,
                "why_no_routes": curves.why_no_routes,
                "embeddings": dict(curves.embeddings),
                "probability": study.probability.tolist(),
                "first_order": list(study.first_order),
            }
        return results


def _curve(mean: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor], row: int) -> dict[str, list[float]]:
    return {"mean": mean.tolist(), "low": ends[0][row].tolist(), "high": ends[1][row].tolist()}


def _rounded(value: Any) -> Any:
    """The result with few digits, for a small file."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
