/** One run on the page: its head, its canvas, its layers, and a pane for each view. */

import { LayerBand } from "./band.js";
import { RunCanvas } from "./canvas.js";
import { sentences } from "./changes.js";
import { button, h, setText } from "./elements.js";
import { decisiveStep, differenceInWords, differences, listed, verdictAt } from "./runs.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./explorer.js").Explorer} Explorer */

export class Column {
  constructor(/** @type {Explorer} */ explorer) {
    this.explorer = explorer;
    /** @type {Run|null} */ this.run = null;
    this.name = h("h2");
    this.verdict = h("span", { class: "dl-verdict" });
    this.ask = button("Mark the answer…", () => explorer.answers.open(this.run), { class: "dl-code" });
    this.change = button("Change…", () => { explorer.activate(this); explorer.drawer.toggle(true); }, { class: "dl-change" });
    this.why = button("Why?", () => explorer.why(this.run), { class: "dl-code" });
    this.warnings = h("p", { class: "dl-bad dl-warnings" });
    this.edits = h("span", { class: "dl-edits" });
    this.differs = h("div", { class: "dl-differs" });
    this.canvas = new RunCanvas((seen, position) => explorer.hover(position ?? -1));
    this.band = new LayerBand();
    this.element = h("section", { class: "dl-run" },
      h("header", {}, this.name, this.verdict, this.why, this.ask, this.change),
      h("div", { class: "dl-notes" }, this.warnings, this.edits), this.differs, this.canvas.element);
    /** @type {Map<string, {pane: Pane, box: HTMLElement, note: HTMLElement}>} */ this.panes = new Map();
    for (const part of [this.element, this.band.element]) {
      part.addEventListener("pointerdown", () => explorer.activate(this));
      part.addEventListener("focusin", () => explorer.activate(this));
    }
  }

  /** The pane of a view in its box, made when it is first shown. */
  pane(/** @type {import("./types.js").View} */ view) {
    if (!this.panes.has(view.name)) {
      const pane = view.create(), note = h("p", { class: "dl-note", hidden: true });
      const box = h("div", { class: `dl-pane dl-${view.name}` }, note, pane.element);
      for (const name of ["pointerdown", "focusin"]) box.addEventListener(name, () => this.explorer.activate(this));
      this.panes.set(view.name, { pane, box, note });
    }
    return this.panes.get(view.name);
  }

  /** What belongs to this run on the page. @returns {HTMLElement[]} */
  get parts() { return [this.element, this.band.element, ...[...this.panes.values()].map(({ box }) => box)]; }

  /** Draw a view, or say why there is none. */
  async drawPane(/** @type {import("./types.js").View} */ view, /** @type {Seen} */ seen) {
    const { pane, box, note } = this.pane(view);
    const show = (/** @type {string|null} */ reason) => {
      pane.element.hidden = reason !== null;
      note.hidden = reason === null;
      note.replaceChildren(...(reason === null ? [] : [reason, " ", ...this.ways(view, seen)]));
    };
    const reason = view.missing(seen);
    show(reason);
    if (reason !== null) return;
    box.setAttribute("aria-busy", "true");
    try {
      await pane.draw(seen);
    } catch (error) {
      if (seen.current()) show(`This view could not be read: ${error.message}`);
    }
    if (seen.current()) box.removeAttribute("aria-busy");
  }

  /** Buttons that lead to what a view lacks: the step that wrote the token, or the question that a trace needs. */
  ways(/** @type {import("./types.js").View} */ view, /** @type {Seen} */ seen) {
    const { run, model, position } = seen, step = decisiveStep(run, model, seen.step, position);
    if (step !== seen.step && view.missing({ ...seen, step }) === null) return [button(`Go to step ${step}, which wrote it`, () => seen.select({ written: true }))];
    return view.name === "trace" && !run.traces.length && seen.ask ? [button("Give answer and subject", seen.ask)] : [];
  }

  async draw(/** @type {Seen} */ seen) {
    const { run } = seen, { explorer } = this, { verdict } = run;
    setText(this.name, run.spec || run.changes ? seen.model.name : run.label); // Its prompt and its interventions stand beside it.
    const decided = verdictAt(run, seen.shown), answer = verdict?.answer.trim();
    this.verdict.hidden = !verdict;
    this.verdict.className = `dl-verdict ${!decided ? "dl-open" : decided.right ? "dl-good" : "dl-bad"}`;
    setText(this.verdict, !verdict ? "" : !decided ? `The answer is ${answer}` : decided.right ? `✓ right: ${answer}` : `✗ wrong: the answer is ${answer}`);
    this.why.hidden = !decided;
    this.warnings.hidden = !run.warnings?.length;
    setText(this.warnings, run.warnings?.join(" ") ?? "");
    this.ask.hidden = Boolean(verdict) || !seen.ask;
    this.change.hidden = !seen.change;
    if (this.edits.dataset.key !== run.id) {
      this.edits.dataset.key = run.id;
      this.edits.replaceChildren(...sentences(explorer, run));
      this.edits.hidden = !this.edits.childElementCount;
    }
    this.drawDifference(seen);
    await Promise.all([this.canvas.draw(seen), this.band.draw(seen)]);
  }

  drawDifference(/** @type {Seen} */ { run, base }) {
    this.differs.hidden = base === null;
    const key = `${run.id} ${base?.id}`;
    if (base === null || this.differs.dataset.key === key) return;
    this.differs.dataset.key = key;
    const said = differenceInWords(run, base), { steps } = differences(run, base);
    const none = steps.length ? `The text is the same in the end; the canvases differ after ${listed("step", steps)}.` : "The run is the same as the base run.";
    this.differs.replaceChildren(...(said.length ? said.map(({ text, position, step }) =>
      button(text, () => this.explorer.set({ run: run.id, position, step }))) : [h("span", {}, none)]));
  }
}
