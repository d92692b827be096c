/** Interventions: the sentences of a run, the drawer in which one more is written, and the run that follows from them. */

import { button, fillSelect, h, setText } from "./elements.js";
import { describe, interventionsOf, lastStep, nameIn } from "./runs.js";

/** @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Intervention} Intervention @typedef {import("./types.js").Run} Run */

/** A token is changed in the canvas that is shown, which the next step reads; after the last step, in that step's.
 * @param {Seen} seen */
const forcedStep = ({ run, shown }) => Math.min(shown + 1, lastStep(run));

/** The interventions of a run as sentences, each with a button that undoes it where a run can be computed.
 * @param {any} explorer @param {Run} run */
export function sentences(explorer, run) {
  return interventionsOf(run).map((edit, i) => {
    const text = describe(edit, explorer.runs);
    return h("span", { class: "dl-edit" }, text, run.spec && button("×", () => explorer.undo(run, i), { "aria-label": `Undo: ${text}` }));
  });
}

/** The drawer: a sentence about the selected token, and one about the selected block. */
export class ChangesDrawer {
  constructor(/** @type {any} */ explorer) {
    this.explorer = explorer;
    const changed = () => this.draw(this.seen);
    const select = (/** @type {string} */ name) => h("select", { "aria-label": name, onchange: changed });
    this.token = h("input", { type: "text", spellcheck: "false", "aria-label": "Token" });
    this.forceIt = button("Write it", () => this.token.value && this.add(this.force(this.token.value)));
    this.remask = button("Mask it instead", () => this.add(this.force(null)));
    this.tokenPlace = h("span");
    this.what = select("Change");
    this.site = select("Site");
    this.layer = h("select", { "aria-label": "Block", onchange: () => this.seen.select({ layer: Number(this.layer.value) }) });
    this.source = select("From");
    this.where = select("Positions");
    this.when = select("Steps");
    this.from = h("span", {}, " from ", this.source);
    this.said = h("p", { class: "dl-numbers" });
    this.apply = button("Apply", () => this.add(this.ablation()), { class: "dl-primary" });
    this.list = h("div", { class: "dl-edits" });
    this.close = button("Close", () => this.toggle(false));
    this.heading = h("h3");
    this.element = h("aside", { class: "dl-drawer dl-changes-drawer", "aria-label": "Change the run", hidden: true },
      h("header", {}, this.heading, this.close), this.list,
      h("div", { class: "dl-card" }, h("p", { class: "dl-sentence" }, "Write ", this.token, this.tokenPlace),
        h("div", { class: "dl-buttons" }, this.remask, this.forceIt)),
      h("div", { class: "dl-card" },
        h("p", { class: "dl-sentence" }, this.what, " ", this.site, " of block ", this.layer, this.from, " at ", this.where, ", at ", this.when),
        this.said, h("div", { class: "dl-buttons" }, this.apply)));
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.toggle(false));
    /** @type {Seen} */ this.seen = null;
  }

  get open() { return !this.element.hidden; }

  /** Open it, for a site of the selected block perhaps, or close it. */
  toggle(open = !this.open, site = "") {
    const opener = open ? document.activeElement : this.opener;
    this.element.hidden = !open;
    if (open) {
      this.opener = opener;
      this.draw(this.explorer.seen());
      if (site) this.site.value = site;
      this.draw(this.explorer.seen());
      (site ? this.what : this.token).focus({ preventScroll: true });
    } else opener?.focus?.({ preventScroll: true });
    this.explorer.fit();
  }

  draw(/** @type {Seen} */ seen) {
    if (!this.open || !seen) return;
    this.seen = seen;
    const { run, model, position, step, block } = seen, { explorer } = this;
    setText(this.heading, `Change the run of ${model.name}`);
    this.remask.hidden = !model.masks; // Where there is no [MASK], no position is masked again.
    setText(this.tokenPlace, ` at position ${position}, before step ${forcedStep(seen)}`);
    fillSelect(this.what, [["zero", "Set to zero"], ["mean", "Set to the mean"], ["patch", "Patch from a run"]], this.what.value || "zero");
    fillSelect(this.site, [["attn", "the attention"], ["mlp", "the MLP"], ["resid", "the residual stream"],
      ...Array.from({ length: model.n_heads }, (_, i) => [`head ${i}`, `head ${i}`])], this.site.value || "attn");
    fillSelect(this.layer, Array.from({ length: model.n_layers }, (_, i) => [i, i]), block);
    fillSelect(this.where, [["all", "all positions"], ["this", `position ${position}`]], this.where.value || "all");
    fillSelect(this.when, [["all", "all steps"], ["this", `step ${step}`]], this.when.value || "all");
    const others = explorer.runs.filter((/** @type {Run} */ other) => other.model === run.model && other.spec);
    const sources = others.map((/** @type {Run} */ one) => [one.id, nameIn(explorer.runs, one)]);
    fillSelect(this.source, [["", "the run without interventions"], ...sources], this.source.value);
    this.from.hidden = this.what.value === "zero";
    const fromItself = this.what.value === "patch" && !this.source.value && !run.spec?.interventions.length;
    setText(this.said, fromItself ? "This run has no interventions, so a patch from it changes nothing. Choose another run." :
      describe(this.ablation(), explorer.runs));
    this.apply.disabled = fromItself || explorer.working;
    this.forceIt.disabled = this.remask.disabled = explorer.working;
    this.list.replaceChildren(...sentences(explorer, run));
    this.list.hidden = !this.list.childElementCount;
  }

  /** @returns {Intervention} */
  force(/** @type {string|null} */ token) {
    return { what: "force", step: forcedStep(this.seen), position: this.seen.position, token };
  }

  /** @returns {Intervention} */
  ablation() {
    const { step, position, block } = this.seen, [site, head] = this.site.value.split(" ");
    return {
      what: this.what.value, site, layer: block, head: head ? Number(head) : null,
      positions: this.where.value === "this" ? [position] : null, steps: this.when.value === "this" ? [step] : null,
      source: this.what.value === "zero" ? null : this.source.value || null,
    };
  }

  add(/** @type {Intervention} */ edit) { return this.explorer.change(this.seen.run, edit); }
}
