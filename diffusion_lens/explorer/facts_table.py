"""The table of facts of a session: which of them each model recalls, how surely, from which step on, and why.

The values of a fact on a model are

    recalled     whether what the run writes after the prompt, up to the end token, has the answer as whole words
                 (`explorer.page_of_run`)
    p            probability of the answer on the first canvas of the run, on which all of it is masked: the product of
                 its tokens' probabilities, as in a trace; on a causal model by the chain rule
    commitment   step from which every position of the answer keeps the token that is finally written: the largest of
                 their steps (`analysis.commitment`); `None` if one of them keeps none
    effect       p less the mean of p over samples with noise at the subject: the total effect of a causal trace

They are those of a run with the settings of the session's facts. Saved results of a study fill in what they contain,
which is not measured again: `Recall` whether a fact is recalled, at the largest number of steps and by its own score
"contained", and `AverageEffect` p and the effect. `studied` names the values that come from a result.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from diffusion_lens.analysis.causal_tracing.average_result import AverageEffect
from diffusion_lens.evaluation.recall import Recall
from diffusion_lens.explorer.live_run import LiveRun
from diffusion_lens.explorer.prompts import spec_on
from diffusion_lens.explorer.spec import Spec
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.records.identity import weights_sha256
from diffusion_lens.records.results import shown_model

MOST_FACTS = 2048
VALUES = ("recalled", "p", "commitment", "effect")


class FactsTable:
    """Facts, and what is known of each on each model.

    Args:
        models: Models of the session.
        facts: The facts; the index of a fact is its id.
        settings: Settings of the runs as in `spec_on`.
        results: `Recall` or `AverageEffect` of these facts, on these models.

    Raises:
        ValueError: There are too many facts, or a result of another model or without a fact of the table.
        TypeError: Something that is no fact, or no such result.
    """

    def __init__(
        self,
        models: Sequence[HookedDiffusionTransformer],
        facts: Iterable[Fact] = (),
        settings: Mapping[str, Any] | None = None,
        results: Iterable[Any] = (),
    ) -> None:
        self.models, self.facts, self.settings = models, list(facts), dict(settings or {})
        if strangers := [fact for fact in self.facts if not isinstance(fact, Fact)]:
            raise TypeError(
                f"facts= contains {strangers[0]!r:.60}, which is no Fact: give Fact(prompt, subject, answer)"
            )
        if len(self.facts) > MOST_FACTS:
            raise ValueError(f"facts= has {len(self.facts):,} facts; a table has at most {MOST_FACTS:,}: give fewer")
        self._values: dict[tuple[int, int], dict[str, Any]] = {}
        for result in results:
            self._fill(result)

    def entries(self) -> list[dict[str, Any]]:
        """The facts for the manifest, with the values of each model by its index as text; what is not known is null."""
        return [
            {
                "id": index,
                "prompt": fact.prompt,
                "subject": fact.subject or None,
                "answer": fact.answer,
                "asked": fact.asked,
                "trained": fact.trained,
                "values": {str(m): self.values(index, m) for m in range(len(self.models))},
            }
            for index, fact in enumerate(self.facts)
        ]

    def values(self, index: int, model: int) -> dict[str, Any]:
        """The values of a fact on a model, the id of its run, why there is none, and which come from a result."""
        return {**dict.fromkeys((*VALUES, "run", "error")), "studied": [], **self._values.get((index, model), {})}

    def computed(self) -> list[tuple[int, int]]:
        """Index of each fact, and of the model, of which there is a run."""
        return sorted(key for key, values in self._values.items() if values.get("run"))

    def spec(self, index: int, model: int) -> Spec:
        """The run of a fact on a model.

        Raises:
            KeyError: There is no such fact.
            ValueError: There is no such model, or it cannot be queried for the fact.
        """
        if index >= len(self.facts):
            raise KeyError(f"there is no fact {index}: the table has {len(self.facts)}, counted from 0")
        if model >= len(self.models):
            raise ValueError(f"model={model}, but the session has {len(self.models)} models, counted from 0")
        return spec_on(self.models, model, self.facts[index], self.settings)

    def fail(self, index: int, model: int, error: Exception) -> None:
        """Keep the reason why there are no values of a fact on a model."""
        self._keep(index, model, error=str(error))

    def lacks(self, index: int, model: int, effect: bool) -> bool:
        """Whether a value of a fact is not known: those of its run, or with `effect` that of its subject, if any."""
        values = self.values(index, model)
        return values["run"] is None or (effect and bool(self.facts[index].subject) and values["effect"] is None)

    def measure(self, index: int, model: int, live: LiveRun, effect: bool) -> None:
        """Keep what is not known yet of the values of a fact's run.

        Args:
            effect: Whether to corrupt the subject, too; a fact without a subject has no effect.
        """
        assert live.asked.query is not None
        known = self.values(index, model)
        committed = [live.entry["predictions"]["committed"][at] for at in live.asked.query.answer_positions]
        values: dict[str, Any] = {"commitment": max(committed) if min(committed) >= 0 else None}
        if known["recalled"] is None:
            values["recalled"] = live.entry["verdict"]["right"]
        p = values["p"] = live.answer_probability() if known["p"] is None else known["p"]
        if effect and known["effect"] is None and live.plan.spec.subject is not None:
            values["effect"] = p - live.answer_probability(corrupted=True)
        self._keep(index, model, run=live.plan.spec.id, error=None, **values)

    def _keep(self, index: int, model: int, **values: Any) -> None:
        kept = {name: None if isinstance(x, float) and isnan(x) else x for name, x in values.items()}
        self._values[index, model] = {**self._values.get((index, model), {}), **kept}

    def _fill(self, result: Any) -> None:
        """Take the values that a saved result has."""
        if not isinstance(result, Recall | AverageEffect):
            raise TypeError(
                f"results= contains {type(result).__name__}; give a Recall or an AverageEffect of these facts, such as "
                "Recall.load(path)"
            )
        if (n_tokens := result.record.get("first_tokens")) is not None:
            raise ValueError(
                f"results= contains an average over the first {n_tokens} tokens of each answer, and the table is of "
                "whole answers: give one made with first_tokens=None"
            )
        model, by_question = self._model_of(result), dict[Fact, int]()
        for index, fact in enumerate(self.facts):
            by_question.setdefault(_question(fact), index)
        found, most = (
            0,
            max(range(len(result.steps)), key=lambda i: result.steps[i] or 0) if isinstance(result, Recall) else 0,
        )
        for row, fact_id in enumerate(result.ids):
            question = _question(Fact(**{**result.record["facts"][fact_id], "id": fact_id}))
            if question not in by_question:
                continue
            found, index = found + 1, by_question[question]
            read: dict[str, Any]
            if isinstance(result, Recall):
                read = {"recalled": bool(result.contained[row, most])}
            else:
                clean = result.clean[row].item()
                read = {"p": clean, "effect": clean - result.corrupted[row].item()}
            studied = sorted({*self.values(index, model)["studied"], *read})
            self._keep(index, model, studied=studied, **read)
        if not found:
            raise ValueError(
                f"results= contains a {type(result).__name__} without any of the {len(self.facts)} facts of the table "
                f"(its first is {result.ids[:1]}): give the facts of its study"
            )

    def _model_of(self, result: Any) -> int:
        """The model of a result, by its name and weights."""
        shown = shown_model(result.record)
        for index, model in enumerate(self.models):
            if model.cfg.name_and_mode == shown and weights_sha256(model) == result.record["weights_sha256"]:
                return index
        names = " and ".join(model.cfg.name_and_mode for model in self.models)
        raise ValueError(f"results= contains a result of {shown!r}, and the explorer shows {names}, with their weights")


def _question(fact: Fact) -> Fact:
    """What two files may call differently: prompt, subject and answer."""
    return Fact(fact.prompt, fact.subject, fact.answer)
