"""The whole study in one run: is a fact retrieved alike as it was told and in reverse, by either kind of model?

After Ashish Rai's study of SMDM on the reversal curse (raishish.github.io, 2025-07-14): recall by denoising steps, with
the published numbers; one fact traced both ways, at every step at which its answer is being unmasked; effects averaged
over people; then k* and v* of everybody, both ways, in the block where the MLPs do most at the subject, compared.
OUT gets report.md and report.html, pictures, and a folder for each part. A run that is interrupted goes on from there;
other settings need another OUT.
By default this is the embedded pair, in less than a minute. The diffusion model recalls all, the twin nothing in
reverse. Of those told both ways the two keys of a person, and the two values, are more alike than by chance in the
diffusion model (CKA .11 and .10, chance below .04), and not in the twin. That is a toy: it shows the tools and the
curse, and is no evidence about SMDM, which takes a GPU and

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
from diffusion_lens.analysis.average_effects.token_roles import ROLES
from diffusion_lens.analysis.resumable import FactFolder, content
from diffusion_lens.data.sources import default_source, open_source
from diffusion_lens.evaluation import Recall, recall_by_steps
from diffusion_lens.evaluation.naming import TOLD, cell_name
from diffusion_lens.records import provenance, weights_sha256
from diffusion_lens.training import finetune, smdm_reverse

COMPARED = {
    "the two keys of a person": ("keys", "keys"),
    "the two values of a person": ("values", "values"),
    "a name as key and as value": ("keys", "values"),
}
AT_STEPS = ["subject_last", "prompt_last", "answer", "answer_revealed"]
# Blocks of the report: {0} is the text, {1} the file shown or linked to.
MARKDOWN = {"h1": "# {0}", "h2": "## {0}", "pre": "```text\n{0}\n```", "img": "![{0}]({1})\n\n{0}", "a": "[{0}]({1})"}
HTML = {"img": '<p><img src="{1}" alt=""><br>{0}</p>', "a": '<p><a href="{1}">{0}</a></p>'}
STYLE = "body {max-width: 64rem; margin: auto; font-family: sans-serif} pre {overflow: auto} img {max-width: 100%}"


class Study:
    """Models, facts and settings, and the report as it grows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.source = open_source(args.data or default_source(args.model[0]))
        self.layout = {"length": args.length or self.source.length or 52, "first_tokens": args.first_tokens}
        self.ways = (args.trained, "d2p" if args.trained == "p2d" else "p2d")  # as told, and in reverse
        self.models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
        self.record = {name: value for name, value in vars(args).items() if name != "out"}
        self.record["weights_sha256"] = {name: weights_sha256(model) for name, model in self.models.items()}
        asked = {fact.id: content(fact) for fact in self.source.facts}
        FactFolder.start(self.out, {**self.record, "facts": asked})  # refuses the folder of another run
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

    def teach(self) -> None:
        """Fine-tune the models that are named."""
        self.add("h2", "Fine-tuning")
        for name, model in self.models.items():
            if self.args.finetune is None or (self.args.finetune and name not in self.args.finetune):
                self.add("p", f"{name} was not fine-tuned here: it is asked as it was loaded.")
                continue
            texts, precision = list(self.source.training), "bf16" if "cuda" in str(model.cfg.device) else "no"
            recipe = smdm_reverse(len(texts), self.args.epochs, 32, mixed_precision=precision, seed=self.args.seed)
            recipe = replace(recipe, warmup=min(recipe.warmup, recipe.steps // 10))
            losses = finetune(model, texts, recipe, self.out / "finetuned" / name, progress=False).losses
            told = f"{name}: {recipe.steps} updates of 32 texts of {self.source.name} by SMDM's recipe"
            fell = f"loss {losses[0]:.3f} at first, {losses[-100:].mean():.3f} in the end"
            self.add("p", f"{told}; {fell}; the weights are now {weights_sha256(model)[:12]}.")

    def recall(self) -> Recall:
        """Recall by denoising steps beside the published numbers; returns that of the first model."""
        self.add("h2", "Recall by denoising steps")
        facts = [fact for fact in self.source.pick(limit=self.args.limit) if fact.trained != "both"]
        settings = {"length": self.layout["length"], "cfg_scale": self.source.cfg_scale, "seed": self.args.seed}
        figure, axes = plots.panels(len(self.models), 1, width=9.0, height=3.5 * len(self.models))
        results = []
        for (name, model), ax in zip(self.models.items(), axes, strict=True):
            found = recall_by_steps(model, facts, self.source.steps, **settings, out=self.out / "recall" / name)
            found.plot(ax=ax)
            self.add("pre", found.to_text())
            reverse, hits = torch.tensor([fact.is_reverse for fact in found.facts]), found.contained[:, -1].double()
            told, back = (f"{hits[rows].mean():.0%}" for rows in (~reverse, reverse))
            self.add("p", f"In the last column {name} recalls {told} as it was told, and {back} in reverse.")
            results.append(found)
        self.picture(figure, "recall.png", "Recall by steps; dashed, what is published, of the models named.")
        return results[0]

    def trace(self, recalled: Recall) -> None:
        """One fact, both ways, at every step at which a token of its answer is open."""
        self.add("h2", "One fact, traced while its answer is unmasked")
        right = {fact_id for fact_id, hits in zip(recalled.ids, recalled.contained.tolist(), strict=True) if hits[-1]}
        cells = [(self.args.trained, way) for way in self.ways]
        told, back = ([fact for fact in recalled.facts if (fact.trained, fact.asked) == cell] for cell in cells)
        pairs = [(fact, other) for fact in told for other in back if fact.person == other.person]
        known = [pair for pair in pairs if {fact.id for fact in pair} <= right]
        if not known:
            self.add("p", f"{recalled.record['model']} recalled nobody both ways: this is the first person asked for.")
        self.add(
            "p",
            "The subject is hidden under noise, and one state of the residual stream is put back. p(answer) is the "
            "joint probability of the tokens still masked, those revealed before being context. While several are "
            "masked, no one state can be expected to bring all of them back.",
        )
        for way, fact in zip(self.ways, (known or pairs)[0], strict=True):
            cell, panels, titles = cell_name(self.args.trained, way), [], []
            self.add("p", f"{cell}: {fact.prompt} …{fact.answer}")
            for name, model in self.models.items():
                file = self.out / "trace" / f"{name}_{way}.safetensors"
                if not file.exists():
                    self.trace_fact(model, fact).save(file)
                found = analysis.TrajectoryTrace.load(file)
                self.add("pre", f"{name}, which wrote {'this' if found.known else 'something else'}\n{by_step(found)}")
                best = int(found.indirect_effect.nan_to_num().flatten(1).amax(dim=1).argmax())
                shown = dict.fromkeys([found.steps[0], found.steps[best], found.steps[-1]])
                panels.append([found.at_step(step) for step in shown])
                titles.append([f"{name}, step {step}" for step in shown])
                if model.cfg.has_mask:
                    page = plots.write_page(found.page(), self.out / f"trace_{name}_{way}.html")
                    self.add("a", f"{name}, {cell}: every step, with a slider", page.name)
            figure = plots.trace_panels(panels, titles, limits=(0.0, 1.0))
            self.picture(figure, f"trace_{way}.png", f"{cell}: the first step, that with the largest effect, the last.")

    def trace_fact(self, model: HookedDiffusionTransformer, fact: Fact) -> analysis.TrajectoryTrace:
        """About a token a step; the twin writes its own, from left to right."""
        blanks, written = self.layout["length"] - len(fact.tokenize(model)[0]), None
        query = fact.to_query(model, answer_places=blanks)
        if model.cfg.has_mask:
            written = model.denoise(query.tokens[None], steps=blanks, cfg_scale=self.source.cfg_scale)
        noise = analysis.noise_scale(model, [query])
        return analysis.trace_trajectory(model, query, trajectory=written, noise=noise, seed=self.args.seed)

    def average(self) -> dict[str, int]:
        """Effects averaged over people; returns the block of each model where MLPs do most at the subject."""
        self.add("h2", "Effects averaged over people")
        self.add(
            "p",
            f"On the first {self.args.first_tokens} token(s) of the answer, before the first step; MLPs and attentions "
            f"are put back {self.args.window} at a time. A fact whose tokens the loop does not write is not known, and "
            "left out. Then on the whole answer, at the steps that write it, counted from the one that ends it.",
        )
        settings: dict[str, Any] = {**self.layout, "window": self.args.window, "seed": self.args.seed}
        steps: dict[str, Any] = {"length": self.layout["length"], "seed": self.args.seed, "roles": AT_STEPS}
        steps["loop"] = loop = analysis.LoopSettings(steps=max(self.source.steps), cfg_scale=self.source.cfg_scale)
        settings |= {"roles": [role for role in ROLES if role != "unasked"], "known": "recalled", "loop": loop}
        warnings.filterwarnings("ignore", "the average is over nothing")  # the page says so
        blocks: dict[str, int] = {}
        for name, model in self.models.items():
            at_subject = []
            for way in self.ways:
                facts = self.source.pick(self.args.trained, way, self.args.facts)
                label = f"{name}, {cell_name(self.args.trained, way)}"
                figure, axes = plots.panels(1, 3, width=20.0, height=3.6)
                lines = []
                for kind, ax in zip(("resid", "mlp", "attn"), axes, strict=True):
                    folder = self.out / "average" / f"{name}_{way}_{kind}"
                    found = analysis.average_indirect_effect(model, facts, kind, **settings, out=folder)
                    lines.append(f"  {kind:5} knows {len(found.ids)} of {len(facts)}{peaks(found)}")
                    if found.ids:
                        found.plot(ax=ax, title=f"{label}: {kind}").set_ylim(-0.05, 1.05)
                    if found.ids and kind == "mlp":
                        at_subject.append(found.aie[found.roles.index("subject_last"), :-1])
                self.add("pre", "\n".join([label, *lines]))
                whole = analysis.average_trajectory_effect(model, facts, **steps, out=folder.with_name(f"{name}_{way}"))
                self.add("pre", f"{label}, step by step: {whole.rule}\n{step_peaks(whole)}")
                if found.ids:
                    self.picture(figure, f"average_{name}_{way}.png", f"{label}: average effects with 95 % intervals.")
            if at_subject:  # the last block is left out: nothing but its own place reads what its MLP writes
                blocks[name] = int(torch.stack(at_subject).mean(dim=0).argmax())
        return blocks

    def keys_and_values(self, blocks: dict[str, int]) -> None:
        """k* and v* both ways, in one block, and how alike the two are among people told alike."""
        self.add("h2", "Keys and values, both ways")
        self.add(
            "p",
            "Asked by name, the name is the key k* and the description the value v*; asked by description it is the "
            "other way round. v* is searched for so that the model says its own fact. The two directions are compared "
            "person by person: CKA without its bias is 0 by chance, and 1 where they agree up to a rotation. Only "
            "people told alike are compared: groups that a model knows differently would look alike as groups. p is of "
            "one comparison alone; the words after it allow for the three of a group (Bonferroni).",
        )
        groups: dict[str, dict[str, list[Fact]]] = {}  # by how they were told, each person's questions
        for fact in self.source.facts:
            groups.setdefault(str(fact.trained), {}).setdefault(fact.person, []).append(fact)
        largest = max(groups, key=lambda told: len(groups[told]))
        for name, model in self.models.items():
            if name not in blocks:
                self.add("p", f"{name} knows none of the facts above: no block stands out, and no keys are taken.")
                continue
            block = blocks[name]
            lines = [f"{name}, block {block}, where MLPs did most at the subject's last token"]
            figure, axes = plots.panels(1, 4, width=19.0, height=4.0)
            for told, people in groups.items():
                asked = [{fact.asked: fact for fact in reversed(own)} for own in people.values()][: self.args.people]
                facts = [fact for own in asked for fact in own.values()]
                folder = self.out / "keys_and_values" / f"{name}_{told}"
                study = analysis.key_value_study(model, facts, [block], **self.layout, out=folder)
                lines.append(f"{len(asked)} people {TOLD[told]}")
                for way in ("p2d", "d2p"):
                    rows = [row for row, each in enumerate(study.ids) if study.record["facts"][each]["asked"] == way]
                    before, after = study.before[rows].mean(), study.after[rows].mean()
                    lines.append(f"  {cell_name(told, way)}: p(answer) {before:.2f}, with v* {after:.2f}")
                for what, kinds in COMPARED.items():
                    found = study.compare(*kinds, rank=2, draws=self.args.draws, seed=self.args.seed).at[block]
                    lines.append(f"  {what}: {likeness(found)}")
                    if told == largest and kinds[0] == kinds[1]:
                        left = 2 * (kinds[0] == "values")
                        found.plot(ax=axes[left], title=f"{name}: {what}")
                        found.plot_spectra(ax=axes[left + 1], title=f"{name}: {kinds[0]}")
            self.add("pre", "\n".join(lines))
            caption = f"{name}, people {TOLD[largest]}: principal components and singular values of both directions."
            self.picture(figure, f"vectors_{name}.png", caption)


def by_step(found: analysis.TrajectoryTrace) -> str:
    """A line a step: p(answer), the state that brings back most of it, and the most that one of the subject's does."""
    lines = ["  step  p(answer)  with noise  subject at most  all at most"]
    for i, step in enumerate(found.steps):
        effect = found.indirect_effect[i].nan_to_num(-1.0)
        place, block = divmod(int(effect.argmax()), effect.shape[1])
        numbers = f"{found.clean[i]:9.2f}  {found.corrupted[i]:10.2f}  {effect[slice(*found.subject)].max():15.2f}"
        word = found.str_canvases[i][place].strip()
        lines.append(f"  {step:4}  {numbers}  {effect.max():11.2f} at place {place} ({word}) after block {block}")
    return "\n".join(lines)


def peaks(found: analysis.AverageEffect) -> str:
    """The total effect, and where the subject's last token and the strongest role bring back most."""
    if not found.ids:
        return f", p(answer) {max(found.unknown.values()):.2f} at most: there is nothing to bring back"
    said, (low, high) = f", total effect {found.ate:.2f}", found.aie_interval()
    for row in dict.fromkeys([int(found.aie.nan_to_num().amax(dim=1).argmax()), found.roles.index("subject_last")]):
        block = int(found.aie[row].argmax())
        interval = f"{low[row, block]:.2f} to {high[row, block]:.2f}"
        said += f"; {found.roles[row]} {found.aie[row, block]:.2f} ({interval}) in block {block}"
    return said


def step_peaks(found: analysis.AverageTrajectoryEffect) -> str:
    """A line a step: how many facts have it, the total effect, and the most that each role brings back."""
    lines = []
    for i, offset in enumerate(found.offsets if found.ids else []):
        most = zip(found.roles, found.aie[i].amax(dim=1).tolist(), strict=True)
        said = ", ".join(f"{role} {effect:.2f}" for role, effect in most if effect == effect)
        lines.append(f"  step {offset:3}: {found.n_facts[i]} facts, total effect {found.ate[i]:.2f}; at most {said}")
    return "\n".join(lines)


def likeness(found: analysis.Comparison) -> str:
    """CKA with its interval, beside what chance gives."""
    row = found.table()["cka"]
    more = "more" if row["p"] * len(COMPARED) <= 0.05 else "no more"
    numbers = "{value:.2f} ({low:.2f} to {high:.2f}), chance {chance_low:.2f} to {chance_high:.2f}, p {p:.2f}"
    return f"CKA {numbers.format(**row)}: {more} alike than by chance"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m-reverse "
        "ar-1028m --finetune ar-1028m --window 10 --first-tokens 3; its data are fetched, or read from --data FOLDER.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--data", help="toy, reversal-curse or a folder of its files (default: what the model learned)")
    parser.add_argument("--finetune", nargs="*", metavar="MODEL", help="teach these models the facts first, or all")
    parser.add_argument("--epochs", type=float, default=10, help="passes over the texts of fine-tuning (default 10)")
    parser.add_argument("--trained", default="p2d", choices=["p2d", "d2p"], help="how those traced were told")
    parser.add_argument("--length", type=int, help="places of the canvas, the prompt included (default: the data's)")
    parser.add_argument("--limit", type=int, default=20, help="questions of each cell of recall (default 20)")
    parser.add_argument("--facts", type=int, default=8, help="facts to average over (default 8)")
    parser.add_argument("--people", type=int, help="people of each group to take keys and values of (default: all)")
    parser.add_argument("--window", type=int, default=1, help="MLPs, or attentions, restored at once (default 1)")
    parser.add_argument("--first-tokens", type=int, default=1, help="tokens of the answer asked for (default 1)")
    parser.add_argument("--draws", type=int, default=99, help="random pairings that say what chance gives")
    parser.add_argument("--seed", type=int, default=1, help="of every random draw (default 1)")
    parser.add_argument("--out", type=Path, default=Path("study"), help="folder for the report (default: study)")
    study = Study(parser.parse_args(argv))
    study.add("h1", f"As told and in reverse: {' and '.join(study.models)} on {study.source.name}")
    study.add(
        "p",
        "After Ashish Rai's study of SMDM on the reversal curse (raishish.github.io, 2025-07-14). A cell has two "
        "names: Berglund et al. (arXiv 2309.12288) say how people were told, SMDM (arXiv 2410.18514) what is asked.",
    )
    if study.source.name == "toy":
        study.add("p", "The facts are made up, and few: nothing that follows is evidence about SMDM.")
    study.teach()
    study.trace(study.recall())
    study.keys_and_values(study.average())
    study.add("h2", "Settings")
    made = {name: provenance(model, model.cfg) for name, model in study.models.items()}
    study.add("pre", json.dumps({"settings": study.record, "models": made}, indent=1))
    study.write()


if __name__ == "__main__":
    main()
