"""Success of an edit: whether it changed the requested fact, and no other (Meng et al. 2022, arXiv 2202.05262, 3.2).

    efficacy          the request itself has the new object
    paraphrase        paraphrases of the request have the new object
    neighbourhood     other subjects with the same object keep it
    shared_name       other subjects that share a word of the subject's name keep their own objects
    other_relations   the subject's other attributes keep their objects
    reverse           the reverse question, given the new object, has the subject
    reverse_old       the reverse question, given the old object, still has the subject

The first three groups are the paper's. Each probe is a query whose answer should win after the edit. It may have a
rival, a query whose answer should lose: the old object against the new one, and in the group neighbourhood the new one
against the old one. As in ROME's code, the answer then wins if the mean log-probability of its tokens is above the
rival's. Without a rival the criterion is stricter: the answer wins if each of its tokens is the likeliest of those that
the model may write (never [MASK]).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.rome.prompts import PromptBatch
from diffusion_lens.analysis.rome.weight_edit import WeightEdit, say_layers
from diffusion_lens.display import PicturedResult, Table
from diffusion_lens.facts import Probe, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Whole, at_least

GROUPS = ("efficacy", "paraphrase", "neighbourhood", "shared_name", "other_relations", "reverse", "reverse_old")


@dataclass(frozen=True)
class Score:
    """One group of probes.

    Attributes:
        before, after: Share of probes whose answer wins, without the edit and with it.
        probability_before, probability_after: Mean p(answer), all positions read from one canvas.
        count: Number of probes.
    """

    before: float
    after: float
    probability_before: float
    probability_after: float
    count: int


@dataclass(frozen=True, eq=False, repr=False)
class EditReport(PicturedResult):
    """The effect of an edit on each probe.

    Columns of the data frame: probe, group, wins_before, wins_after, probability_before, probability_after.

    Attributes:
        wins: Float[state probe], 1 if the answer wins, else 0; state 0 is without the edit, state 1 with it.
        probabilities: Float[state probe], p(answer).
        groups: Group of each probe.
        record: Prompts and answers, `describe()` of the edit, model, hash of the unedited weights, hooks, modules,
            versions.
    """

    wins: Float[Tensor, "state probe"]
    probabilities: Float[Tensor, "state probe"]
    groups: list[str]
    record: dict[str, Any]

    def table(self) -> dict[str, Score]:
        """The scores of the groups that have probes, in the order of `GROUPS`."""
        return {group: self._score(group) for group in GROUPS if group in self.groups}

    def _table(self) -> Table:
        return Table({"probe": range(len(self.groups)), **by_probe(self.groups, self.wins, self.probabilities)})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "edit report", self)

    @classmethod
    def load(cls, path: str | Path) -> "EditReport":
        """Read what `save` wrote."""
        return load_fields(path, "edit report", cls)

    def plot(self, ax: Any = None) -> Any:
        """Share of wins by group, before and after. Returns the matplotlib axes."""
        table = self.table()
        return plots.share_bars(
            {state: [getattr(score, state) for score in table.values()] for state in ("before", "after")},
            list(table),
            ax=ax,
            title=f"Edit of {say_layers(edited_layers(self.record))}",
        )

    def _score(self, group: str) -> Score:
        selected = torch.tensor([probe_group == group for probe_group in self.groups])
        before, after = self.wins[:, selected].mean(dim=1).tolist()
        p_before, p_after = self.probabilities[:, selected].mean(dim=1).tolist()
        return Score(before, after, p_before, p_after, int(selected.sum()))


def by_probe(
    groups: Sequence[str], wins: Float[Tensor, "state probe"], probabilities: Float[Tensor, "state probe"]
) -> dict[str, Any]:
    """Columns with a row for each probe."""
    return {
        "group": groups,
        "wins_before": wins[0],
        "wins_after": wins[1],
        "probability_before": probabilities[0],
        "probability_after": probabilities[1],
    }


@begins_run
@torch.no_grad()
def edit_success(
    model: DiffusionTransformer,
    edit: WeightEdit,
    probes: Mapping[str, Sequence[Probe | Query]],
    *,
    max_batch: Whole = 256,
) -> EditReport:
    """Score the probes without and with the edit.

    Args:
        edit: A `RankOneEdit` or `MemitEdit` that is not applied; this function applies and reverts it.
        probes: Probes by group, of the groups above; a bare query has no rival. `EditRequest.probes` makes them.
        max_batch: Largest number of canvases in one forward pass.

    Raises:
        ValueError: A group is unknown, there are no probes, the model cannot write an answer, or the edit is applied
            already or belongs to another model.
    """
    if unknown := [group for group in probes if group not in GROUPS]:
        raise ValueError(f"{unknown[0]!r} is not a group of probes; the groups are {', '.join(GROUPS)}")
    if edit.model is not model:
        raise ValueError("the edit belongs to another model object than `model`; pass edit.model")
    if edit.is_applied:
        raise ValueError("the edit is applied already, but it is compared with the unedited model; revert it first")
    max_batch = at_least(1, "max_batch", max_batch)
    grouped = [
        (group, Probe(probe) if isinstance(probe, Query) else probe) for group in probes for probe in probes[group]
    ]
    if not grouped:
        raise ValueError("there are no probes: give queries, at least for 'efficacy'")
    record = {
        "prompts": [model.words(probe.query.tokens.tolist()) for _, probe in grouped],
        "answers": [model.words(probe.query.answer_tokens) for _, probe in grouped],
        **edit.describe(),
        **provenance(model, model.cfg),
    }
    all_probes = [probe for _, probe in grouped]
    before = judge(model, all_probes, max_batch)
    with edit:
        after = judge(model, all_probes, max_batch)
    wins, probabilities = (torch.stack(pair) for pair in zip(before, after, strict=True))
    return EditReport(wins, probabilities, [group for group, _ in grouped], record)


def edited_layers(record: Mapping[str, Any]) -> list[int]:
    """The blocks that an edit changed, from the record of its result."""
    return record["layers"] if "layers" in record else [record["layer"]]


@torch.no_grad()
def judge(
    model: DiffusionTransformer, probes: Sequence[Probe], max_batch: int = 256
) -> tuple[Float[Tensor, "probe"], Float[Tensor, "probe"]]:
    """Whether each answer wins on the model as it is now, 1 or 0, and the probability of each answer."""
    queries = [probe.query for probe in probes] + [probe.rival for probe in probes if probe.rival is not None]
    read = [each for i in range(0, len(queries), max_batch) for each in _read(model, queries[i : i + max_batch])]
    answers, rivals = read[: len(probes)], iter(read[len(probes) :])
    wins = []
    for probe, (log_probs, is_first) in zip(probes, answers, strict=True):
        wins.append(is_first if probe.rival is None else bool(log_probs.mean() > next(rivals)[0].mean()))
    probabilities = [log_probs.sum().exp() for log_probs, _ in answers]
    return torch.tensor(wins, dtype=torch.float32), torch.stack(probabilities).cpu()


def _read(model: DiffusionTransformer, queries: Sequence[Query]) -> list[tuple[Tensor, bool]]:
    """Log-probability of each answer's tokens, and whether each is the first choice of those that may be written."""
    answers = [Answer.of(model, query) for query in queries]
    counts = [len(answer.tokens) for answer in answers]
    batch = PromptBatch.of(model, [query.tokens for query in queries])
    canvas = torch.arange(len(queries)).repeat_interleave(torch.tensor(counts)).to(batch.tokens.device)
    rows, tokens = (torch.cat([getattr(answer, name) for answer in answers]) for name in ("rows", "tokens"))
    logits = model(batch.tokens, attention_mask=batch.real, logits_at=(canvas, rows))
    of_answers = logits.to(torch.promote_types(logits.dtype, torch.float32)).split(counts)
    clean = torch.cat([answer.head.clean_logits(x[None])[0] for answer, x in zip(answers, of_answers, strict=True)])
    log_probs = torch.log_softmax(clean, dim=-1).gather(-1, tokens[:, None])[:, 0]
    parts = zip(answers, log_probs.split(counts), of_answers, strict=True)
    return [(each, answer.is_likeliest(model, of_answer[None])) for answer, each, of_answer in parts]
