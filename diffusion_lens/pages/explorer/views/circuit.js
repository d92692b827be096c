/** A circuit: heads and MLPs by their scores, and the edges between them with the largest ones. */

import { ramp, paint } from "../colours.js";
import { button, drawLegend, field, h, setText } from "../elements.js";
import { clamp, read } from "../numbers.js";
import { drawn } from "../picture.js";
import { listed } from "../runs.js";
import { number, signed } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen
 * @typedef {{name: string, layer: number, head: number, lane: number, text: string}} End  a part of the network; head -1 for none
 * @typedef {{from: End, to: End, score: number}} Edge */

const LANE = [30, 90], STOREY = 30, MARGIN = [58, 20]; // pixels: least and most width of a lane, height of a layer, what is left free
const EDGES_AT_FIRST = 30, EDGES_LISTED = 12;

/** @type {import("../types.js").View} */
export const circuitView = {
  name: "circuit",
  title: "Circuit",
  help: "Heads and MLPs that make the difference to another run, and the edges between them with the largest scores.",
  missing: ({ run }) => (run.circuit ? null : run.missing.circuit ?? "There are no scores of edges on this page."),
  create: () => new CircuitPane(),
};

/** A writer or reader of the residual stream by its name: "embed", "a0.h1", "a0.h1<k>", "m0" or "logits".
 * @param {string} name @param {import("../types.js").Model} model @param {number} keyHeads @returns {End} */
function endOf(name, model, keyHeads) {
  if (name === "embed" || name === "logits") return { name, layer: name === "embed" ? -1 : model.n_layers, head: -1, lane: model.n_heads / 2, text: name };
  const [, kind, layer, head, input] = name.match(/^([am])(\d+)(?:\.h(\d+)(?:<(\w)>)?)?$/);
  if (kind === "m") return { name, layer: Number(layer), head: -1, lane: model.n_heads, text: `MLP ${layer}` };
  // Several heads share the keys and values of one: the edge ends between them.
  const shared = input === "k" || input === "v" ? model.n_heads / keyHeads : 1, first = Number(head) * shared;
  const what = { q: "queries of ", k: "keys of ", v: "values of " }[input] ?? "";
  const heads = shared > 1 ? `heads ${first}–${first + shared - 1}` : `head ${first}`;
  return { name, layer: Number(layer), head: first, lane: first + (shared - 1) / 2, text: `${what}${heads} of block ${layer}` };
}

class CircuitPane {
  constructor() {
    /** @type {Seen} */ this.seen = null;
    this.slider = h("input", { type: "range", min: 1, value: EDGES_AT_FIRST, oninput: () => this.draw(this.seen) });
    this.edgesField = field("Edges", this.slider, "dl-grow");
    this.count = h("span", { class: "dl-numbers" });
    this.legend = h("span", { class: "dl-legend" });
    this.heading = h("h3");
    this.reading = h("p", { class: "dl-numbers" });
    this.picture = h("div", { class: "dl-circuit-picture", tabindex: 0, role: "group", "aria-label": "Circuit" });
    this.list = h("ol", { class: "dl-circuit-edges" });
    this.listHeading = h("h4");
    this.element = h("div", { class: "dl-circuit-pane" },
      h("header", { class: "dl-group" }, this.heading, this.edgesField, this.count, this.legend,
        button("as Python", () => this.seen.code("circuit", "Circuit"), { class: "dl-code" })),
      this.reading, h("div", { class: "dl-circuit-body" }, this.picture, h("section", {}, this.listHeading, this.list)));
  }

  async draw(/** @type {Seen} */ seen) {
    this.seen = seen;
    const { run, model, dark } = seen, { circuit } = run;
    const step = circuit.steps.findLast((/** @type {number} */ one) => one <= seen.step) ?? circuit.steps[0];
    const { tables, header } = await seen.chunk(`circuit/${step}`);
    if (!seen.current()) return;
    const { nodes, writer, reader, score } = tables, known = writer ? writer.data.length : 0;
    const end = (/** @type {string} */ name) => endOf(name, model, circuit.n_key_value_heads);
    this.slider.max = String(known);
    this.edgesField.hidden = known === 0;
    const shown = Math.min(known, Number(this.slider.value));
    /** @type {Edge[]} */ const edges = Array.from({ length: shown }, (_, i) => (
      { from: end(circuit.writers[read(writer, i)]), to: end(circuit.readers[read(reader, i)]), score: read(score, i) }));
    const parts = circuit.writers.map((/** @type {string} */ name, /** @type {number} */ i) => ({ part: end(name), score: read(nodes, i) }));
    // Everything begins in the embedding, whose score is the whole difference: the others would be pale beside it.
    const most = parts.reduce((/** @type {number} */ high, /** @type {any} */ one) => (one.part.layer < 0 ? high : Math.max(high, Math.abs(one.score))), 0) || 1;
    setText(this.heading, `Circuit at step ${step}${step === seen.step ? "" : `, the last of ${listed("step", circuit.steps)} before this one`}`);
    setText(this.count, known ? `${shown} of ${circuit.n_edges}` : "nodes only");
    const rows = circuit.n_rows > 1 ? `, summed over ${circuit.n_rows} rows` : "";
    setText(this.reading, `The metric is ${number(header.clean)} in the clean run and ${number(header.corrupted)} in the corrupted one; ` +
      `this run is the ${circuit.side} one. A score estimates how much the clean output raises it${rows}.`);
    drawLegend(this.legend, ramp("change", dark), { name: "score", low: number(-most), high: number(most) });
    this.drawPicture(seen, parts, edges, most);
    const strongest = edges.length ? edges.slice(0, EDGES_LISTED).map((edge) => ({ text: `${edge.from.text} → ${edge.to.text}`, score: edge.score, pick: () => this.pick(edge.to, edge.from), edge })) :
      parts.toSorted((/** @type {any} */ a, /** @type {any} */ b) => Math.abs(b.score) - Math.abs(a.score)).slice(0, EDGES_LISTED)
        .map((/** @type {any} */ one) => ({ text: one.part.text, score: one.score, pick: () => this.pick(one.part), edge: null }));
    setText(this.listHeading, edges.length ? "Strongest edges" : "Strongest parts");
    this.list.replaceChildren(...strongest.map((/** @type {any} */ one) => {
      const mark = (/** @type {boolean} */ on) => one.edge?.line?.classList.toggle("dl-hover", on);
      return h("li", {}, h("button", { type: "button", onclick: one.pick, onfocus: () => mark(true), onblur: () => mark(false), onpointerenter: () => mark(true), onpointerleave: () => mark(false) }, h("span", {}, one.text), " ", h("b", {}, signed(one.score))));
    }));
  }

  /** Select the layer and head of a part; of an edge those of its reader, unless only its writer has some.
   * @param {End} part @param {End} [other] */
  pick(part, other) {
    const chosen = part.layer < this.seen.model.n_layers || !other ? part : other;
    this.seen.say(chosen.text);
    return this.seen.select({ layer: Math.max(0, chosen.layer), ...(chosen.head < 0 ? {} : { head: chosen.head }) });
  }

  drawPicture(/** @type {Seen} */ { model, dark, block, head }, /** @type {{part: End, score: number}[]} */ parts, /** @type {Edge[]} */ edges, /** @type {number} */ most) {
    const colours = ramp("change", dark), [left, top] = MARGIN, height = STOREY;
    const width = clamp((this.picture.clientWidth - left - 24) / (model.n_heads + 1), LANE[0], LANE[1]);
    const x = (/** @type {number} */ lane) => left + (lane + 0.5) * width, y = (/** @type {number} */ layer) => top + (model.n_layers - layer + 0.5) * height;
    // An MLP reads what the heads of its block have written, so it is higher in the row.
    const at = (/** @type {End} */ end) => [x(end.lane), y(end.layer) - (end.name.startsWith("m") ? 6 : 0)];
    const colour = (/** @type {number} */ score, limit = most) => paint(colours, 0.5 + score / limit / 2).background;
    const strongest = edges.reduce((high, { score }) => Math.max(high, Math.abs(score)), 0) || 1;
    const lines = edges.map((edge) => {
      const [x0, y0] = at(edge.from), [x1, y1] = at(edge.to), middle = (y0 + y1) / 2, share = Math.abs(edge.score) / strongest;
      const text = `${edge.from.text} → ${edge.to.text}: ${signed(edge.score)}`;
      const line = drawn("path", { d: `M${x0} ${y0}C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`, class: edge.score < 0 ? "dl-edge dl-below" : "dl-edge",
        "stroke-width": (0.6 + 5 * share).toFixed(2), stroke: colour(edge.score < 0 ? -1 : 1, 1) }, drawn("title", {}, text));
      line.addEventListener("pointerenter", () => this.seen.say(text));
      line.addEventListener("click", () => this.pick(edge.to, edge.from));
      Object.assign(edge, { line });
      return line;
    }).reverse();
    const nodes = parts.map(({ part, score }) => {
      const [cx, cy] = at(part), is = part.layer === block && part.head === head;
      const node = drawn("circle", { cx, cy, r: 7, fill: colour(score), class: is ? "dl-node dl-now" : "dl-node" }, drawn("title", {}, `${part.text}: ${signed(score)}`));
      node.addEventListener("pointerenter", () => this.seen.say(`${part.text}: score ${signed(score)}`));
      node.addEventListener("click", () => this.pick(part));
      return node;
    });
    const label = (/** @type {number} */ atX, /** @type {number} */ atY, /** @type {string} */ text, /** @type {string} */ anchor) =>
      drawn("text", { x: atX, y: atY + 4, "text-anchor": anchor }, text);
    const names = [label(left - 8, y(model.n_layers), "logits", "end"), label(left - 8, y(-1), "embed", "end"),
      ...Array.from({ length: model.n_layers }, (_, layer) => label(left - 8, y(layer), `block ${layer}`, "end")),
      ...Array.from({ length: model.n_heads }, (_, one) => label(x(one), 8, `${one}`, "middle")), label(x(model.n_heads), 8, "MLP", "middle")];
    const size = [left + (model.n_heads + 1) * width + 6, top + (model.n_layers + 2) * height];
    const logits = drawn("circle", { cx: x(model.n_heads / 2), cy: y(model.n_layers), r: 7, class: "dl-node dl-open" }, drawn("title", {}, "logits"));
    this.picture.replaceChildren(drawn("svg", { width: size[0], height: size[1], viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img",
      "aria-label": `Circuit with ${edges.length} edges; the strongest are listed beside it` }, ...names, ...lines, ...nodes, logits));
  }
}
