"""The complete study in one run: do models retrieve a fact in the same way in the trained direction and in reverse?

It follows Ashish Rai's study of SMDM on the reversal curse (raishish.github.io, 2025-07-14): recall by denoising steps
next to the published numbers; causal traces of one fact in both directions at every step that reveals its answer;
average effects over people; and a comparison of k* and v* of all people in both directions, in the block whose MLP has
the largest effect at the subject.
OUT contains report.md and report.html, figures, and a folder for each part. An interrupted run resumes from there;
other settings need another OUT.
The default models are the bundled ones, which take about a minute. The diffusion model recalls everything with eight
steps, the autoregressive (AR) baseline nothing in reverse. The average effect is at the subject's last token in the
first blocks, in both directions. Among people trained in both directions, the two keys of a person are slightly more
similar than by chance in the diffusion model (CKA .09, chance below .04). These models demonstrate the tools and the
reversal curse. They are no evidence about SMDM, which needs a GPU and these options:

    --model smdm-1028m-reverse ar-1028m --finetune ar-1028m --limit 300 --facts 30 --window 10 --first-tokens 3
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, analysis, plots
from diffusion_lens.analysis.causal_tracing.average_result import ROLES
from diffusion_lens.analysis.over_facts.folder import FactFolder, content
from diffusion_lens.data.fact_files import default_source, open_source
from diffusion_lens.evaluation import Recall, recall_by_steps
from diffusion_lens.evaluation.recall import TRAINED, cell_name
from diffusion_lens.records.results import provenance, weights_sha256
from diffusion_lens.training import finetune, smdm_reverse

COMPARED = {
    "the two keys of a person": ("keys", "keys"),
    "the two values of a person": ("values", "values"),
    "a name as key and as value": ("keys", "values"),
}
AT_STEPS = ["subject_last", "prompt_last", "answer", "answer_revealed"]
# Templates of the report's blocks: {0} is the text, {1} the file of a figure or link.
MARKDOWN = {"h1": "# {0}", "h2": "## {0}", "pre": "```text\n{0}\n```", "img": "![{0}]({1})\n\n{0}", "a": "[{0}]({1})"}
HTML = {"img": '<p><img src="{1}" alt=""><br>{0}</p>', "a": '<p><a href="{1}">{0}</a></p>'}
STYLE = "body {max-width: 64rem; margin: auto; font-family: sans-serif} pre {overflow: auto} img {max-width: 100%}"


class Reproduction:
    """Models, facts and settings of the study, and the blocks of its report."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.source = open_source(args.data or default_source(args.model[0]))
        self.layout = {"length": args.length or self.source.length or 52, "first_tokens": args.first_tokens}
        self.directions = (args.trained, "d2p" if args.trained == "p2d" else "p2d")  # trained direction and reverse
        self.models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
        self.record = {name: value for name, value in vars(args).items() if name != "out"}
        self.record["weights_sha256"] = {name: weights_sha256(model) for name, model in self.models.items()}
        facts = {fact.id: content(fact) for fact in self.source.facts}
        FactFolder.start(self.out, {**self.record, "facts": facts})  # raises an error if OUT contains another run
        self.blocks: list[tuple[str, str, str]] = []

    def add(self, tag: str, text: str, file: str = "") -> None:
        self.blocks.append((tag, text, file))
        print(text, end="\n\n")

    def picture(self, figure: plots.Figure, file: str, text: str) -> None:
        figure.savefig(self.out / file, dpi=110)
        self.add("img", text, file)

    def write(self) -> None:
        markdown = [MARKDOWN.get(tag, "{0}").format(text, file) for tag, text, file in self.blocks]
        html = [HTML.get(tag, f"<{tag}>{{0}}</{tag}>").format(escape(text), file) for tag, text, file in self.blocks]
        head = f'<!doctype html><meta charset="utf-8"><title>{self.blocks[0][1]}</title><style>{STYLE}</style>'
        (self.out / "report.md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
        (self.out / "report.html").write_text("\n".join([head, *html]) + "\n", encoding="utf-8")
        print(*(f"wrote {path}" for path in sorted(self.out.iterdir())), sep="\n")

    def train(self) -> None:
        """Fine-tune the models of --finetune."""
        self.add("h2", "Fine-tuning")
        for name, model in self.models.items():
            if self.args.finetune is None or (self.args.finetune and name not in self.args.finetune):
                self.add("p", f"{name} was not fine-tuned here.")
                continue
            texts, precision = list(self.source.training), "bf16" if "cuda" in str(model.cfg.device) else "no"
            recipe = smdm_reverse(len(texts), self.args.epochs, 32, mixed_precision=precision, seed=self.args.seed)
            recipe = replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
            losses = finetune(model, texts, recipe, self.out / "finetuned" / name, progress=False).losses
            run = f"{name}: {recipe.steps} updates of 32 texts of {self.source.name} with SMDM's recipe"
            loss = f"loss {losses[0]:.3f} at first, {losses[-100:].mean():.3f} in the end"
            self.add("p", f"{run}; {loss}; the weights are now {weights_sha256(model)[:12]}.")

    def recall(self) -> Recall:
        """Recall by denoising steps next to the published numbers. Returns the recall of the first model."""
        self.add("h2", "Recall by denoising steps")
        facts = [fact for fact in self.source.pick(limit=self.args.limit) if fact.trained != "both"]
        settings = {"length": self.layout["length"], "cfg_scale": self.source.cfg_scale, "seed": self.args.seed}
        figure, axes = plots.panels(len(self.models), 1, width=9.0, height=3.5 * len(self.models))
        results = []
        for (name, model), ax in zip(self.models.items(), axes, strict=True):
            recall = recall_by_steps(model, facts, self.source.steps, **settings, out=self.out / "recall" / name)
            recall.plot(ax=ax)
            self.add("pre", recall.to_text())
            reverse, hits = torch.tensor([fact.is_reverse for fact in recall.facts]), recall.contained[:, -1].double()
            shares = [f"{hits[rows].mean():.0%}" for rows in (~reverse, reverse)]
            self.add("p", f"In the last column, {name} recalls {shares[0]} as trained, and {shares[1]} in reverse.")
            results.append(recall)
        self.picture(figure, "recall.png", "Recall by steps. Dashed lines are published numbers of the named models.")
        return results[0]

    def trace(self, recalled: Recall) -> None:
        """Trace one fact in both directions, at every step that starts with a masked token of its answer."""
        self.add("h2", "One fact, traced while its answer is revealed")
        right = {fact_id for fact_id, hits in zip(recalled.ids, recalled.contained.tolist(), strict=True) if hits[-1]}
        cells = [(self.args.trained, direction) for direction in self.directions]
        forward, reverse = ([fact for fact in recalled.facts if (fact.trained, fact.asked) == cell] for cell in cells)
        pairs = [(fact, other) for fact in forward for other in reverse if fact.person == other.person]
        known = [pair for pair in pairs if {fact.id for fact in pair} <= right]
        if not known:
            self.add("p", f"{recalled.record['model']} recalled nobody in both directions; this is the first person.")
        self.add(
            "p",
            "Noise corrupts the subject, and one state of the residual stream is restored. p(answer) is the joint "
            "probability of the tokens that are still masked, given the revealed ones. While several are masked, no "
            "single state can restore all of them.",
        )
        for direction, fact in zip(self.directions, (known or pairs)[0], strict=True):
            cell, panels, titles = cell_name(self.args.trained, direction), [], []
            self.add("p", f"{cell}: {fact.prompt} …{fact.answer}")
            for name, model in self.models.items():
                file = self.out / "trace" / f"{name}_{direction}.safetensors"
                if not file.exists():
                    self.trace_fact(model, fact).save(file)
                trace = analysis.TrajectoryTrace.load(file)
                self.add("pre", f"{name}, which wrote {'this' if trace.known else 'something else'}\n{by_step(trace)}")
                best = int(trace.indirect_effect.nan_to_num().flatten(1).amax(dim=1).argmax())
                steps = dict.fromkeys([trace.steps[0], trace.steps[best], trace.steps[-1]])
                panels.append([trace.at_step(step) for step in steps])
                titles.append([f"{name}, step {step}" for step in steps])
                if model.cfg.has_mask:
                    page = plots.write_page(trace.page(), self.out / f"trace_{name}_{direction}.html")
                    self.add("a", f"{name}, {cell}: every step, with a slider", page.name)
            figure = plots.trace_panels(panels, titles, limits=(0.0, 1.0))
            caption = f"{cell}: the first step, the step with the largest effect, and the last step."
            self.picture(figure, f"trace_{direction}.png", caption)

    def trace_fact(self, model: HookedDiffusionTransformer, fact: Fact) -> analysis.TrajectoryTrace:
        """Trace a run with about one token per step. The AR baseline's run is from left to right."""
        n_masks, written = self.layout["length"] - len(fact.tokenize(model)[0]), None
        query = fact.to_query(model, n_masks=n_masks)
        if model.cfg.has_mask:
            written = model.denoise(query.tokens[None], steps=n_masks, cfg_scale=self.source.cfg_scale)
        noise = analysis.noise_scale(model, [query])
        settings = {"noise": noise, "samples": self.args.samples, "seed": self.args.seed}
        return analysis.trace_trajectory(model, query, trajectory=written, **settings)

    def average(self) -> dict[str, int]:
        """Average effects over people. Returns each model's block whose MLP has the largest effect at the subject."""
        self.add("h2", "Average effects over people")
        self.add(
            "p",
            f"First, effects on the first {self.args.first_tokens} token(s) of the answer, before the first step. MLPs "
            f"and attention layers are restored {self.args.window} at a time. A fact whose tokens the denoising run "
            "does not write is unknown and excluded. Then, effects on the whole answer at the steps that write it, "
            "counted from the step that completes it.",
        )
        sampling: dict[str, Any] = {"samples": self.args.samples, "seed": self.args.seed}
        settings: dict[str, Any] = {**self.layout, **sampling, "window": self.args.window}
        steps: dict[str, Any] = {**sampling, "length": self.layout["length"], "roles": AT_STEPS}
        steps["loop"] = loop = analysis.LoopSettings(steps=max(self.source.steps), cfg_scale=self.source.cfg_scale)
        settings |= {"roles": [role for role in ROLES if role != "other_masks"], "known": "recalled", "loop": loop}
        warnings.filterwarnings("ignore", "the average has no facts")  # The report says so.
        blocks: dict[str, int] = {}
        for name, model in self.models.items():
            at_subject = []
            for direction in self.directions:
                facts = self.source.pick(self.args.trained, direction, self.args.facts)
                label = f"{name}, {cell_name(self.args.trained, direction)}"
                figure, axes = plots.panels(3, 1, width=8.0, height=9.6)
                lines = []
                for kind, ax in zip(("resid", "mlp", "attn"), axes, strict=True):
                    folder = self.out / "average" / f"{name}_{direction}_{kind}"
                    effect = analysis.average_indirect_effect(model, facts, kind, **settings, out=folder)
                    lines.append(f"  {kind:5} knows {len(effect.ids)} of {len(facts)}{peaks(effect)}")
                    if effect.ids:
                        effect.plot(ax=ax, title=f"{label}: {kind}").set_ylim(-0.05, 1.05)
                    if effect.ids and kind == "mlp":
                        at_subject.append(effect.aie[effect.roles.index("subject_last"), :-1])
                self.add("pre", "\n".join([label, *lines]))
                folder = folder.with_name(f"{name}_{direction}")
                by_step = analysis.average_trajectory_effect(model, facts, **steps, out=folder)
                self.add("pre", f"{label}, by step: {by_step.rule}\n{step_peaks(by_step)}")
                if effect.ids:
                    caption = f"{label}: average effects with 95 % intervals."
                    self.picture(figure, f"average_{name}_{direction}.png", caption)
            if at_subject:  # Without the last block, whose MLP output is read at its own position only.
                blocks[name] = int(torch.stack(at_subject).mean(dim=0).argmax())
        return blocks

    def keys_and_values(self, blocks: dict[str, int]) -> None:
        """Compare k* and v* of both directions in one block, within each group of people by trained direction."""
        self.add("h2", "Keys and values in both directions")
        self.add(
            "p",
            "In a query by name, the name is the key k* and the description the value v*; in a query by description it "
            "is the opposite. The search for v* maximises the probability of the model's own fact. The comparison of "
            "the two directions pairs people: unbiased CKA is 0 by chance, and 1 for sets that agree up to a rotation. "
            "It compares only people trained in the same way, because a difference between groups would look like "
            "similarity. p is for one comparison; the verdict after it corrects for the three of a group (Bonferroni).",
        )
        groups: dict[str, dict[str, list[Fact]]] = {}  # Questions by person, by direction of training.
        for fact in self.source.facts:
            groups.setdefault(str(fact.trained), {}).setdefault(fact.person, []).append(fact)
        largest = max(groups, key=lambda trained: len(groups[trained]))
        for name, model in self.models.items():
            if name not in blocks:
                self.add(
                    "p", f"{name} knows none of the facts above, so no block is selected and no keys are compared."
                )
                continue
            block = blocks[name]
            lines = [f"{name}, block {block}, whose MLP has the largest effect at the subject's last token"]
            figure, axes = plots.panels(2, 2, width=13.0, height=8.0)
            for trained, people in groups.items():
                queries = [{fact.asked: fact for fact in reversed(own)} for own in people.values()][: self.args.people]
                facts = [fact for by_direction in queries for fact in by_direction.values()]
                folder = self.out / "keys_and_values" / f"{name}_{trained}"
                study = analysis.key_value_study(model, facts, [block], **self.layout, out=folder)
                lines.append(f"{len(queries)} people {TRAINED[trained]}")
                queried = [study.record["facts"][fact_id]["asked"] for fact_id in study.ids]
                for direction in ("p2d", "d2p"):
                    rows = [row for row, other in enumerate(queried) if other == direction]
                    before, after = study.before[rows].mean(), study.after[rows].mean()
                    lines.append(f"  {cell_name(trained, direction)}: p(answer) {before:.2f}, with v* {after:.2f}")
                for pair, kinds in COMPARED.items():
                    comparison = study.compare(
                        *kinds, only=["cka"], rank=2, resamples=self.args.resamples, seed=self.args.seed
                    ).at[block]
                    lines.append(f"  {pair}: {similarity(comparison)}")
                    if trained == largest and kinds[0] == kinds[1]:
                        left = 2 * (kinds[0] == "values")
                        comparison.plot(ax=axes[left], title=f"{name}: {pair}")
                        comparison.plot_spectra(ax=axes[left + 1], title=f"{name}: {kinds[0]}")
            self.add("pre", "\n".join(lines))
            caption = f"{name}, people {TRAINED[largest]}: principal components and singular values of both directions."
            self.picture(figure, f"vectors_{name}.png", caption)


def by_step(trace: analysis.TrajectoryTrace) -> str:
    """One line per step: p(answer), the largest effect of a state of the subject, and the largest effect of all."""
    lines = ["  step  p(answer)  with noise  subject at most  all at most"]
    for i, step in enumerate(trace.steps):
        effect = trace.indirect_effect[i].nan_to_num(-1.0)
        position, block = divmod(int(effect.argmax()), effect.shape[1])
        numbers = f"{trace.clean[i]:9.2f}  {trace.corrupted[i]:10.2f}  {effect[slice(*trace.subject)].max():15.2f}"
        word = trace.str_canvases[i][position].strip()
        lines.append(f"  {step:4}  {numbers}  {effect.max():11.2f} at position {position} ({word}) after block {block}")
    return "\n".join(lines)


def peaks(effect: analysis.AverageEffect) -> str:
    """The total effect, and the largest effects of the strongest role and of the subject's last token."""
    if not effect.ids:
        return f", p(answer) {max(effect.unknown.values()):.2f} at most: there is nothing to restore"
    text, (low, high) = f", total effect {effect.ate:.2f}", effect.aie_interval()
    for row in dict.fromkeys([int(effect.aie.nan_to_num().amax(dim=1).argmax()), effect.roles.index("subject_last")]):
        block = int(effect.aie[row].argmax())
        interval = f"{low[row, block]:.2f} to {high[row, block]:.2f}"
        text += f"; {effect.roles[row]} {effect.aie[row, block]:.2f} ({interval}) in block {block}"
    return text


def step_peaks(effect: analysis.AverageTrajectoryEffect) -> str:
    """One line per step: number of facts, total effect, and the largest effect of each role."""
    lines = []
    for i, offset in enumerate(effect.offsets if effect.ids else []):
        largest = zip(effect.roles, effect.aie[i].amax(dim=1).tolist(), strict=True)
        roles = ", ".join(f"{role} {p:.2f}" for role, p in largest if p == p)
        lines.append(f"  step {offset:3}: {effect.n_facts[i]} facts, total effect {effect.ate[i]:.2f}; at most {roles}")
    return "\n".join(lines)


def similarity(comparison: analysis.Comparison) -> str:
    """CKA with its confidence interval and the range of chance."""
    row = comparison.table()["cka"]
    more = "more" if row["p"] * len(COMPARED) <= 0.05 else "no more"
    numbers = "{value:.2f} ({low:.2f} to {high:.2f}), chance {chance_low:.2f} to {chance_high:.2f}, p {p:.2f}"
    return f"CKA {numbers.format(**row)}: {more} similar than by chance"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m-reverse "
        "ar-1028m --finetune ar-1028m --window 10 --first-tokens 3. Data are downloaded or read from --data FOLDER.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--data", help="site, toy, reversal-curse or a folder of its files (default: the model's)")
    parser.add_argument("--finetune", nargs="*", metavar="MODEL", help="models to fine-tune on the facts first, or all")
    parser.add_argument("--epochs", type=float, default=10, help="passes over the training texts (default 10)")
    parser.add_argument("--trained", default="p2d", choices=["p2d", "d2p"], help="trained direction of traced people")
    parser.add_argument("--length", type=int, help="positions of the canvas with the prompt (default: the data set's)")
    parser.add_argument("--limit", type=int, default=20, help="questions per cell of recall (default 20)")
    parser.add_argument("--facts", type=int, default=8, help="facts to average over (default 8)")
    parser.add_argument("--people", type=int, help="people per group in the comparison of keys (default: all)")
    parser.add_argument("--window", type=int, default=1, help="MLPs or attention layers restored at once (default 1)")
    parser.add_argument("--first-tokens", type=int, default=1, help="first tokens of the answer to score (default 1)")
    parser.add_argument("--samples", type=int, default=10, help="noise samples of each trace (default 10)")
    parser.add_argument("--resamples", type=int, default=99, help="random pairings that estimate chance (default 99)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random number generators (default 1)")
    parser.add_argument("--out", type=Path, default=Path("study"), help="folder for the report (default: study)")
    study = Reproduction(parser.parse_args(argv))
    study.add("h1", f"Trained direction and reverse: {' and '.join(study.models)} on {study.source.name}")
    study.add(
        "p",
        "This report follows Ashish Rai's study of SMDM on the reversal curse (raishish.github.io, 2025-07-14). A cell "
        "has two names: Berglund et al. (arXiv 2309.12288) name the direction of training, SMDM (arXiv 2410.18514) the "
        "direction of the question.",
    )
    if study.source.name in ("toy", "site"):
        study.add("p", "The facts are fictional and few. Nothing that follows is evidence about SMDM.")
    study.train()
    study.trace(study.recall())
    study.keys_and_values(study.average())
    study.add("h2", "Settings")
    models = {name: provenance(model, model.cfg) for name, model in study.models.items()}
    study.add("pre", json.dumps({"settings": study.record, "models": models}, indent=1))
    study.write()


if __name__ == "__main__":
    main()
