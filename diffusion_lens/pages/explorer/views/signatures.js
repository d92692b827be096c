/** The signatures of reversal: means over facts as bars with their intervals, and the value of the run's own fact. */

import { button, h, setText } from "../elements.js";
import { read, roundUp } from "../numbers.js";
import { number } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Table} Table */
/** @typedef {{name: string, title: string, sentence: string, labels: string[], zero: number, ends: [number, number]|null}} Measure */

/** @type {import("../types.js").View} */
export const signaturesView = {
  name: "signatures",
  title: "Signatures",
  help: "Measures of whether what was trained in one direction serves the other one, with their intervals.",
  missing: ({ run }) => (run.signatures ? null : run.missing.signatures ?? "There are no signatures on this page."),
  create: () => new SignaturesPane(),
};

class SignaturesPane {
  constructor() {
    /** @type {Seen} */ this.seen = null;
    this.heading = h("h3");
    this.cards = h("div", { class: "dl-cards" });
    this.element = h("div", {}, h("header", { class: "dl-group" }, this.heading,
      button("as Python", () => this.seen.code("signatures", "Signatures"), { class: "dl-code" })), this.cards);
  }

  async draw(/** @type {Seen} */ seen) {
    this.seen = seen;
    const { run } = seen, { measures, facts, n_facts } = run.signatures;
    const { tables } = await seen.chunk("signatures");
    if (!seen.current()) return;
    setText(this.heading, `Means over ${n_facts} facts, with intervals of 95%; the tick is ${facts.length > 1 ? `the mean of ${facts.length} facts` : "the fact"} of this run`);
    if (this.cards.dataset.run === run.id) return;
    this.cards.dataset.run = run.id;
    this.cards.replaceChildren(...measures.map((/** @type {Measure} */ measure) => cardOf(measure, tables[measure.name])));
  }
}

/** A number with as many decimals as it needs. @param {number} x */
const exact = (x) => (Math.abs(x) < 0.001 && x !== 0 ? x.toExponential(1).replaceAll("-", "−") : number(x));

/** The four numbers of a bar: mean, ends of the interval, and the value of the fact.
 * @param {Table} table @param {number} i */
const barOf = (table, i) => ({ mean: read(table, i, 0), low: read(table, i, 1), high: read(table, i, 2), own: read(table, i, 3) });

/** @param {Measure} measure @param {Table} table */
function cardOf({ name, title, sentence, labels, zero, ends }, table) {
  const bars = labels.map((label, i) => ({ label, ...barOf(table, i) })), known = bars.filter(({ mean }) => !Number.isNaN(mean));
  const most = roundUp(known.reduce((far, bar) => [bar.mean, bar.low, bar.high, bar.own].reduce((x, y) => Math.max(x, Math.abs(y) || 0), far), 0));
  const [low, high] = ends ?? [-most, most];
  const first = known.reduce((one, other) => (Math.abs(other.mean - zero) > Math.abs(one.mean - zero) ? other : one), known[0]);
  const interval = (/** @type {any} */ bar) => (Number.isNaN(bar.low) ? "" : ` [${exact(bar.low)}, ${exact(bar.high)}]`);
  const said = first ? ` It is farthest from ${zero} at ${first.label}: ${exact(first.mean)}${interval(first)}, and ${exact(first.own)} for the fact of this run.` : "";
  return h("section", { class: "dl-card", "aria-label": title }, h("h3", {}, title), h("p", { class: "dl-numbers" }, `Each bar is ${sentence}.${said}`),
    h("ul", { class: "dl-signature", "data-measure": name, tabindex: 0, "aria-label": title }, ...bars.map((bar) => {
      const text = `${bar.label}: ${exact(bar.mean)}${interval(bar)}; this fact ${exact(bar.own)}`;
      const share = (/** @type {number} */ x) => `${(100 * (x - low)) / (high - low)}%`;
      const part = (/** @type {string} */ kind, /** @type {number} */ from, /** @type {number} */ to) => {
        const element = h("i", { class: kind, hidden: Number.isNaN(from) || Number.isNaN(to) });
        element.style.left = share(Math.min(from, to));
        element.style.width = `calc(${share(Math.max(from, to))} - ${share(Math.min(from, to))})`;
        return element;
      };
      return h("li", { title: text }, h("b", {}, bar.label), h("span", { class: "dl-track", role: "img", "aria-label": text },
        part("dl-mean", zero, bar.mean), part("dl-interval", bar.low, bar.high), part("dl-fact-tick", bar.own, bar.own), part("dl-zero", zero, zero)),
      h("span", {}, exact(bar.mean)));
    })));
}
