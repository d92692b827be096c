/** The causal trace: the probability of the answer when one state of the clean run is restored in a corrupted one. */

import { ramp } from "../colours.js";
import { button, drawLegend, fillSelect, h, setText } from "../elements.js";
import { columnsOf, MapPane, readingOf, rowHeight } from "../map_pane.js";
import { clamp, read } from "../numbers.js";
import { finalWord, listed, sameStep, shownTrace, sites } from "../runs.js";
import { number, quoted, readable, shorten, signed } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Trace} Trace @typedef {import("../types.js").Chunk} Chunk */

const LEAST_EFFECT = 0.05; // of the scale of colours

/** @type {import("../types.js").View} */
export const traceView = {
  name: "trace",
  title: "Trace",
  help: "Which states carry the answer: its probability when one of them is restored in a corrupted run.",
  missing: (seen) => {
    const trace = shownTrace(seen);
    if (!trace) return seen.run.missing.trace ?? "There is no trace.";
    if (trace.steps.includes(seen.step)) return null;
    return `${trace.lazy ? "A trace can be made" : "The trace was made"} at ${listed("step", trace.steps)}.`;
  },
  create: () => new TracePane(),
};

const tracedLayers = (/** @type {Trace} */ trace) => [...trace.layers].reverse();

class TracePane {
  constructor() {
    this.select = h("select", { "aria-label": "Restored states", onchange: () => this.pane.seen.select({ trace: this.select.value }) });
    this.pane = new MapPane({
      label: "Causal trace", corner: "layer", code: () => "trace", tools: [this.select],
      choose: (seen, r, c) => ({ layer: tracedLayers(shownTrace(seen))[r], position: c, ...sameStep(seen) }),
    });
    this.element = this.pane.element;
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  draw(/** @type {Seen} */ seen) {
    const { run, step } = seen, trace = shownTrace(seen), name = `trace/${trace.name}/${step}`;
    fillSelect(this.select, run.traces.map((one) => [one.name, sites[one.kind] ?? one.name]), trace.name);
    this.select.hidden = run.traces.length < 2;
    setText(this.pane.heading, `Causal trace at step ${step}`);
    setText(this.pane.reading, `Noise at the subject makes the model forget; one state of the clean run is then put back, and a dark cell is one that brings the answer back. ${readingOf(seen, "trace")}`);
    return this.pane.draw(seen, async () => {
      if (trace.lazy && !seen.loaded(name)) {
        return this.pane.show("A trace takes longer than the other views.", button("Compute the trace", () => this.compute(name)));
      }
      const chunk = await seen.chunk(name);
      if (!seen.current()) return;
      this.pane.show(null);
      this.drawMap(seen, trace, chunk);
    });
  }

  async compute(/** @type {string} */ name) {
    const { seen } = this.pane;
    await seen.work("tracing", (told, signal) => seen.chunk(name, undefined, told, signal));
    if (seen.loaded(name)) this.draw(this.pane.seen);
  }

  drawMap(/** @type {Seen} */ seen, /** @type {Trace} */ trace, /** @type {Chunk} */ { header: { clean, corrupted, highest }, tables: { scores } }) {
    const { run, block, position, dark } = seen, layers = tracedLayers(trace), colours = ramp("trace", dark), { map, legend } = this.pane;
    const low = Math.min(...(trace.corrupted ?? [corrupted]));
    // So wide that rounding is not drawn as an effect on a fact that the model does not know.
    const high = Math.max(trace.highest ?? highest, low + LEAST_EFFECT);
    const name = `p(${shorten(readable(trace.answer), 26)}), clean ${number(clean)}: corrupted`;
    drawLegend(legend, colours, { name, low: number(low), high: number(high) });
    const rows = layers.map((layer) => trace.layers.indexOf(layer)), columns = new Map(trace.positions.map((p, i) => [p, i]));
    const scoreOf = (/** @type {number} */ r, /** @type {number} */ p) => (columns.has(p) ? read(scores, columns.get(p), rows[r]) : NaN);
    map.draw({
      rows: layers.map(String), columns: columnsOf(seen), colours, rowHeight: rowHeight(layers.length, 13),
      cell: (r, p) => {
        const score = scoreOf(r, p);
        return { value: clamp((score - low) / (high - low), 0, 1), text: Number.isNaN(score) ? "" : number(score) };
      },
      label: (r, p) => {
        const score = scoreOf(r, p), inside = trace.subject && p >= trace.subject[0] && p < trace.subject[1];
        return `layer ${layers[r]}, position ${p}, ${quoted(finalWord(run, p) ?? "·")}${inside ? " (subject)" : ""}: ` +
          (Number.isNaN(score) ? "no score" : `p ${number(score)}, effect ${signed(score - corrupted)}`);
      },
    });
    map.mark(layers.indexOf(block), position);
  }
}
