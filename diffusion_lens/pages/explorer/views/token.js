/** What is known of the selected position: its alternatives, its layer, and what reads it. */

import { overlayOf } from "../canvas.js";
import { button, drawBars, drawCourse, h, setText } from "../elements.js";
import { lensAt } from "../lens_cells.js";
import { read } from "../numbers.js";
import { predictedOf } from "../predicted.js";
import { branchOf, finalWord, isGiven, isReached, lengthOf, listed, placeIn, predictedAt, queryOf, sameStep, silenced, sites, stateAt, stepsOf, wordAfter } from "../runs.js";
import { number, quoted, signed } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen */

const MOST_READ = 6; // most positions and heads that a sentence lists

/** @type {import("../types.js").View} */
export const tokenView = {
  name: "token",
  title: "Token",
  help: "What the step predicted at the selected position, what its layer reads and restores, and where attention goes.",
  missing: () => null,
  create: () => new TokenPane(),
};

class TokenPane {
  constructor() {
    const code = (/** @type {string} */ view, /** @type {string} */ title) =>
      button("as Python", () => this.seen.code(view, title), { class: "dl-code" });
    this.heading = h("h3");
    this.state = h("p", { class: "dl-state" });
    this.goTo = button("", () => this.seen.select({ step: this.seen.step }), { class: "dl-code" });
    this.topHeading = h("h4");
    this.topCode = code("predictions", "Predictions");
    this.top = h("ol", { class: "dl-bars" });
    this.topNumbers = h("p", { class: "dl-numbers" });
    this.course = h("div", { class: "dl-course" });
    this.lensHeading = h("h3");
    this.lensCode = code("lens", "Lens");
    this.lens = h("ol", { class: "dl-bars" });
    this.lensNumbers = h("p", { class: "dl-numbers" });
    this.restored = h("div", { class: "dl-restored" });
    this.change = button("", () => this.seen.change("attn"), { class: "dl-change" });
    this.attentionHeading = h("h3");
    this.attention = h("div", { class: "dl-reads" });
    this.layerCard = h("div", { class: "dl-card" }, h("header", {}, this.lensHeading, this.lensCode), this.lens, this.lensNumbers, this.restored, this.change);
    this.attentionCard = h("div", { class: "dl-card" }, this.attentionHeading, this.attention);
    this.element = h("div", { class: "dl-cards" },
      h("div", { class: "dl-card" }, h("header", {}, this.heading, this.goTo), this.state,
        h("header", {}, this.topHeading, this.topCode), this.top, this.topNumbers, this.course),
      this.layerCard, this.attentionCard);
    /** @type {Seen} */ this.seen = null;
  }

  async draw(/** @type {Seen} */ seen) {
    this.seen = seen;
    const { run, position, step, shown } = seen, word = wordAfter(run, shown, position);
    setText(this.heading, `Position ${position}  ${word === null ? "·" : quoted(word)}`);
    setText(this.state, stateAt(seen, shown, position).replace(/^step (\d+), position \d+, (.*)$/, "After step $1: $2"));
    this.goTo.hidden = step === shown;
    setText(this.goTo, `go to step ${step}`);
    await Promise.all([this.drawPredicted(seen), this.drawLayer(seen), this.drawAttention(seen)]);
  }

  async drawPredicted(/** @type {Seen} */ seen) {
    const { run, step, position } = seen, predicted = await predictedOf(seen);
    if (!seen.current()) return;
    const final = finalWord(run, position), prediction = predicted?.at(step, position) ?? null;
    setText(this.topHeading, `Predictions of step ${step}`);
    drawBars(this.top, prediction?.top ?? [], predicted?.k ?? 0, final);
    this.topCode.hidden = !run.python?.predictions;
    this.course.hidden = !predicted;
    this.top.dataset.empty = prediction || !predicted ? "" : isGiven(run, position) ? "The token was given." : "This step predicts nothing here.";
    if (!predicted) return setText(this.topNumbers, run.missing.predictions ?? "Nothing is recorded.");
    const margin = predicted.k > 1 ? ` Margin ${number(prediction?.margin)}.` : "", since = predicted.committed(position);
    setText(this.topNumbers, !prediction ? "" : `Entropy ${number(prediction.entropy)} nats.${margin} ${since === null ? "" : `Committed at step ${since} (dotted).`}`);
    const isEntropy = overlayOf(seen) === "entropy" || final === null, steps = stepsOf(run);
    const values = steps.map((one) => (isEntropy ? predicted.at(one, position)?.entropy ?? NaN : predicted.written(one, position)));
    const name = isEntropy ? "entropy (nats)" : `p(${quoted(final)})`;
    const known = steps.flatMap((one, i) => (Number.isNaN(values[i]) ? [] : [`step ${one}: ${number(values[i])}`]));
    drawCourse(this.course, steps, values, isEntropy ? predicted.highest : 1, [[step, "dl-now"], [since, "dl-since"]],
      `${name} by step. ${known.join(", ") || "none"}`);
    this.course.prepend(h("span", {}, `${name} by step`));
  }

  async drawLayer(/** @type {Seen} */ seen) {
    const { run, step, layer, block, position } = seen, { lens } = run, row = lens ? lens.layers.indexOf(layer) : -1;
    this.layerCard.hidden = !lens && !run.traces.length;
    setText(this.lensHeading, `Layer ${row < 0 ? layer : lens.labels[row]} at step ${step}${branchOf(run)}`);
    this.lensCode.hidden = !run.python?.lens;
    this.change.hidden = !seen.change || !run.spec;
    setText(this.change, `Change block ${block}…`);
    this.restored.replaceChildren(...run.traces.filter(({ steps }) => steps.includes(step)).map((trace) => this.restoredLine(seen, trace)));
    const chunk = lens?.steps.includes(step) ? await seen.chunk(`lens/${step}`) : null;
    if (!seen.current() || !lens) return;
    const cell = chunk && lensAt(run, chunk, layer, position);
    drawBars(this.lens, cell?.top ?? [], lens.k, cell?.target ?? null);
    this.lens.dataset.empty = cell ? "" : "The lens reads nothing here.";
    const ranked = cell && cell.rank >= 0 && cell.target !== null ? `Target ${quoted(cell.target)}: rank ${cell.rank}, p ${number(cell.probability)}. ` : "";
    setText(this.lensNumbers, cell ? `${ranked}Entropy ${number(cell.entropy)} nats.` : "");
  }

  /** What restoring the selected cell does to the answer, in a sentence, or a button that computes it. */
  restoredLine(/** @type {Seen} */ seen, /** @type {import("../types.js").Trace} */ trace) {
    const { block, position, step } = seen, at = queryOf(seen), name = `trace/${trace.name}/${step}`, line = h("p", { class: "dl-numbers" });
    const say = async () => {
      const { tables: { scores }, header: { corrupted } } = await seen.chunk(name);
      const row = trace.positions.indexOf(at), column = trace.layers.indexOf(block), score = row < 0 || column < 0 ? NaN : read(scores, row, column);
      setText(line, Number.isNaN(score) ? `The ${sites[trace.kind]} was not restored here.` :
        `Restoring the ${sites[trace.kind]} of block ${block} ${at === position ? "here" : `at position ${at}, where the token is predicted`}: p(answer) ${number(score)}, effect ${signed(score - corrupted)}.`);
    };
    if (!trace.lazy || seen.loaded(name)) say().catch((error) => setText(line, error.message));
    else {
      line.append(button(`What does restoring the ${sites[trace.kind]} do?`, async () => {
        await seen.work("tracing", (told, signal) => seen.chunk(name, undefined, told, signal));
        if (seen.loaded(name)) await say();
      }, { class: "dl-code" }));
    }
    return line;
  }

  /** What is read where the selected token is predicted, and which positions read that place, by head. */
  async drawAttention(/** @type {Seen} */ seen) {
    const { run, block, head, position, step, model } = seen, { attention } = run, at = queryOf(seen);
    this.attentionCard.hidden = !attention;
    if (!attention) return;
    setText(this.attentionHeading, `Attention of block ${block} at step ${step}${branchOf(run)}`);
    if (!attention.layers.includes(block) || !attention.steps.includes(step)) {
      return this.attention.replaceChildren(h("p", { class: "dl-numbers" }, `This page contains attention of ${listed("block", attention.layers)} at ${listed("step", attention.steps)}.`));
    }
    const { tables: { pattern } } = await seen.chunk(`attention/${block}/${step}`);
    if (!seen.current()) return;
    const heads = Array.from({ length: model.n_heads }, (_, i) => i), positions = Array.from({ length: lengthOf(run) }, (_, p) => p).filter((p) => isReached(seen, p));
    const line = (/** @type {string} */ verb, /** @type {(other: number, head: number) => number} */ weight, /** @type {(other: number) => any} */ chosen) => {
      const strongest = positions.flatMap((p) => heads.map((one) => ({ p, one, x: weight(p, one) })))
        .filter(({ p, x }) => p !== at && x >= 0.01).sort((a, b) => b.x - a.x).slice(0, MOST_READ);
      const chips = strongest.map(({ p, one, x }) => button(`${placeIn(seen, p)} ${x.toFixed(2)} (head ${one})`,
        () => seen.select({ head: one, view: "attention", ...chosen(p) }), { class: one === head ? "dl-chip dl-own" : "dl-chip" }));
      return h("p", {}, h("b", {}, `${verb} `), ...(chips.length ? chips : ["nothing above 0.01"]));
    };
    const silent = silenced(run, block);
    this.attention.replaceChildren(...(silent ? [h("p", { class: "dl-bad" }, silent)] : []),
      h("p", {}, at === position ? `The token is predicted at its own position.` : `The token is predicted at the position before it, ${placeIn(seen, at)}.`),
      line("It reads", (p, one) => read(pattern, one, at, p), (p) => ({ key: p })),
      line("It is read by", (p, one) => read(pattern, one, p, at), (p) => ({ position: predictedAt(seen, p), key: at, ...sameStep(seen) })));
  }
}
