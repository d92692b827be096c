/** The lens: what each layer would write at each position of a step, and at the selected position over all steps. */

import { ramp } from "../colours.js";
import { drawLegend, field, fillSelect, h, setText } from "../elements.js";
import { HeatMap } from "../heat_map.js";
import { lensAt, lensText } from "../lens_cells.js";
import { columnsOf, MapPane, readingOf, rowHeight } from "../map_pane.js";
import { read, roundUp, wordOf } from "../numbers.js";
import { listed, sameStep, targetAt } from "../runs.js";
import { readable, signed } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Run} Run @typedef {import("../types.js").Chunk} Chunk */
/** @typedef {(layer: number, position: number) => number} Numbers  NaN where there is none */

const LENS_COLOURS = { top: "p(likeliest)", probability: "p(target)", rank: "rank of target", entropy: "entropy (nats)" };
const LENS_CHANGES = { "change of probability": "probability", "change of entropy": "entropy" };
// Highest numbers of the scales of colours so far: limits only grow, so that the colours of two steps can be compared.
const LENS_LIMITS = { entropy: 1, rank: 1, "change of probability": 0.1, "change of entropy": 0.1 };
/** @type {WeakMap<Run, Map<number, number>[]>} */ const PLACES = new WeakMap();

/** @type {import("../types.js").View} */
export const lensView = {
  name: "lens",
  title: "Lens",
  help: "The likeliest token of each layer at each position, and what layers and steps make of the selected one.",
  missing: ({ run, step }) => (!run.lens ? run.missing.lens ?? "There is no lens." : run.lens.steps.includes(step) ? null
    : `The lens was read at ${listed("step", run.lens.steps)}.`),
  create: () => new LensPane(),
};

const layersOf = (/** @type {Run} */ run) => [...run.lens.layers].reverse();
const layerName = (/** @type {Run} */ run, /** @type {number} */ layer) => run.lens.labels[run.lens.layers.indexOf(layer)];

class LensPane {
  constructor() {
    this.select = h("select", { onchange: () => this.pane.seen.select({ colour: this.select.value }) });
    this.pane = new MapPane({
      label: "Lens", corner: "layer", code: () => "lens", tools: [field("Lens shows", this.select)],
      choose: (seen, r, c) => ({ layer: layersOf(seen.run)[r], position: c, ...sameStep(seen) }),
    });
    this.overHeading = h("h3");
    this.over = new HeatMap({
      label: "Lens of the selected position, layer by step", corner: "layer",
      pick: async (r, c) => {
        const { run, select } = this.pane.seen;
        await select({ layer: layersOf(run)[r], step: run.lens.steps[c] });
        this.pane.seen.say(this.over.label(r, c));
      },
      hover: (r, c) => {
        this.over.markHover(c ?? -1);
        if (r !== null && c !== null) this.pane.seen.say(this.over.label(r, c));
      },
    });
    this.element = h("div", {}, this.pane.element, h("div", { class: "dl-over" }, this.overHeading, this.over.element));
    /** @type {Map<number, Chunk>} */ this.known = new Map(); // chunks of `knownRun` by step
    /** @type {Run|null} */ this.knownRun = null;
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  draw(/** @type {Seen} */ seen) {
    const { run, base, step } = seen, quantity = quantityOf(seen), isChange = quantity in LENS_CHANGES;
    const offered = [...Object.entries(LENS_COLOURS), ...(base?.lens ? Object.keys(LENS_CHANGES).map((name) => [name, name]) : [])];
    fillSelect(this.select, offered, quantity);
    setText(this.pane.heading, `Lens at step ${step}`);
    setText(this.pane.reading, readingOf(seen, "lens"));
    return this.pane.draw(seen, async () => {
      const [chunk, baseChunk] = await Promise.all([seen.chunk(`lens/${step}`), isChange && base.lens.steps.includes(step) ? seen.chunk(`lens/${step}`, base) : null]);
      if (!seen.current()) return;
      this.pane.show(isChange && !baseChunk ? `The lens of the base run was read at ${listed("step", base.lens.steps)}.` : null);
      if (this.knownRun !== run) this.known.clear();
      this.knownRun = run;
      this.known.set(step, chunk);
      const drawMaps = () => {
        this.drawOver(seen, LENS_CHANGES[quantity] ?? quantity); // It may widen the scale of both.
        if (!isChange || baseChunk) this.drawStep(seen, quantity, chunk, baseChunk);
      };
      drawMaps();
      this.readRest(seen, drawMaps);
    });
  }

  /** @param {Seen} seen @param {string} quantity @param {Chunk} chunk @param {Chunk|null} baseChunk */
  drawStep(seen, quantity, chunk, baseChunk) {
    const { run, base, layer, position } = seen, layers = layersOf(run), { map, legend } = this.pane;
    const numbers = baseChunk ? changesOf(run, chunk, base, baseChunk, LENS_CHANGES[quantity]) : numbersOf(run, chunk, quantity);
    const { colours, value, ends } = scaleOf(run, chunk, numbers, quantity, seen.dark);
    drawLegend(legend, colours, ends);
    map.draw({
      rows: layers.map((one) => layerName(run, one)), columns: columnsOf(seen), colours, rowHeight: rowHeight(layers.length, 13),
      cell: (r, p) => lensCell(run, chunk, value(numbers(layers[r], p)), layers[r], p),
      label: (r, p) => {
        const cell = lensAt(run, chunk, layers[r], p), label = `${layerName(run, layers[r])}, position ${p}: ${lensText(cell)}`;
        if (!baseChunk || !cell) return label;
        const change = numbers(layers[r], p);
        return `${label}; ${quantity} ${Number.isNaN(change) ? "none, since the targets differ" : signed(change)}`;
      },
    });
    map.mark(layers.indexOf(layer), position);
  }

  /** The selected position, layer by step, as far as the steps have been read.
   * @param {Seen} seen @param {string} quantity */
  drawOver({ run, position, layer, step, dark }, quantity) {
    const layers = layersOf(run), { steps } = run.lens, { over } = this, known = new Map(this.known);
    const scales = new Map([...known].map(([one, chunk]) => {
      const numbers = numbersOf(run, chunk, quantity);
      return [one, { numbers, ...scaleOf(run, chunk, numbers, quantity, dark) }];
    }));
    setText(this.overHeading, `Position ${position} over all steps: ${LENS_COLOURS[quantity]}`);
    over.draw({
      rows: layers.map((one) => layerName(run, one)), columns: steps.map((one) => ({ text: `${one}`, title: `step ${one}` })),
      colours: ramp("lens", dark), rowHeight: rowHeight(layers.length, 13),
      cell: (r, c) => {
        const chunk = known.get(steps[c]);
        if (!chunk) return { value: NaN, kind: "plain" };
        const { numbers, value } = scales.get(steps[c]);
        return lensCell(run, chunk, value(numbers(layers[r], position)), layers[r], position);
      },
      label: (r, c) => {
        const chunk = known.get(steps[c]);
        return `${layerName(run, layers[r])}, step ${steps[c]}, position ${position}: ${chunk ? lensText(lensAt(run, chunk, layers[r], position)) : "being read"}`;
      },
    });
    over.mark(layers.indexOf(layer), steps.indexOf(step));
  }

  /** Read the other steps, one after the other, while nothing else is selected.
   * @param {Seen} seen @param {() => void} then */
  async readRest(seen, then) {
    const { run } = seen, rest = run.lens.steps.filter((step) => !this.known.has(step));
    for (const step of rest) {
      const chunk = await seen.chunk(`lens/${step}`).catch(() => null);
      if (!seen.current()) return;
      if (chunk) this.known.set(step, chunk);
      await new Promise((resolve) => setTimeout(resolve)); // Events come first.
      if (!seen.current()) return;
    }
    if (rest.length) then();
  }
}

/** What the colours show: of a run without a base, the number itself instead of its change.
 * @param {Seen} seen */
function quantityOf({ base, state: { colour } }) {
  if (Object.hasOwn(LENS_CHANGES, colour)) return base?.lens ? colour : LENS_CHANGES[colour];
  return Object.hasOwn(LENS_COLOURS, colour) ? colour : "top";
}

/** Row and column of a layer and a position in the lens's tables; -1 where they were not read.
 * @param {Run} run @param {number} layer @param {number} position */
function placeOf(run, layer, position) {
  if (!PLACES.has(run)) PLACES.set(run, [run.lens.layers, run.lens.positions].map((axis) => new Map(axis.map((one, i) => [one, i]))));
  const [rows, columns] = PLACES.get(run);
  return [rows.get(layer) ?? -1, columns.get(position) ?? -1];
}

/** A cell of a map, with a value on its scale.
 * @param {Run} run @param {Chunk} chunk @param {number} value @param {number} layer @param {number} position @returns {import("../types.js").Cell} */
function lensCell(run, chunk, value, layer, position) {
  const [row, column] = placeOf(run, layer, position), { top_tokens, rank } = chunk.tables;
  const word = column < 0 ? null : wordOf(run, chunk, read(top_tokens, row, column, 0));
  return { value, text: word === null ? "" : readable(word), kind: column >= 0 && read(rank, row, column) === 0 ? "hit" : "" };
}

/** One number of the lens by layer and position; of ranks the logarithm.
 * @param {Run} run @param {Chunk} chunk @param {string} quantity @returns {Numbers} */
function numbersOf(run, { tables }, quantity) {
  return (layer, position) => {
    const [row, column] = placeOf(run, layer, position);
    if (row < 0 || column < 0) return NaN;
    if (quantity === "top") return read(tables.top_probabilities, row, column, 0);
    const x = read(tables[quantity], row, column);
    return quantity !== "rank" ? x : x < 0 ? NaN : Math.log10(x + 1);
  };
}

/** Changes of a number against the base run; NaN where there is none, or where the two have another target.
 * @param {Run} run @param {Chunk} chunk @param {Run} base @param {Chunk} baseChunk @param {string} quantity @returns {Numbers} */
function changesOf(run, chunk, base, baseChunk, quantity) {
  const own = numbersOf(run, chunk, quantity), other = numbersOf(base, baseChunk, quantity);
  const isSame = run.lens.positions.map((position) => quantity !== "probability" || targetAt(run, position) === targetAt(base, position));
  return (layer, position) => (isSame[placeOf(run, layer, position)[1]] ? own(layer, position) - other(layer, position) : NaN);
}

/** The highest absolute number of a step.
 * @param {Run} run @param {Chunk} chunk @param {Numbers} numbers @param {string} quantity */
function highestOf(run, chunk, numbers, quantity) {
  let highest = 0;
  if (!(quantity in LENS_CHANGES)) {
    const { data } = chunk.tables[quantity];
    for (let i = 0; i < data.length; i++) if (data[i] > highest) highest = data[i];
    return quantity === "rank" ? Math.log10(highest + 1) : highest;
  }
  for (const layer of run.lens.layers) for (const position of run.lens.positions) {
    highest = Math.max(highest, Math.abs(numbers(layer, position)) || 0);
  }
  return highest;
}

/** Colours of a quantity, the ends of the scale, and where a number is on it, from 0 to 1.
 * @param {Run} run @param {Chunk} chunk @param {Numbers} numbers @param {string} quantity @param {boolean} dark */
function scaleOf(run, chunk, numbers, quantity, dark) {
  const highest = quantity in LENS_LIMITS ? highestOf(run, chunk, numbers, quantity) : 0;
  if (highest > LENS_LIMITS[quantity]) LENS_LIMITS[quantity] = roundUp(highest);
  const limit = () => LENS_LIMITS[quantity] ?? 1, name = LENS_COLOURS[quantity] ?? quantity;
  const end = quantity === "rank" ? `${Math.round(10 ** limit() - 1)}` : `${Number(limit().toPrecision(3))}`;
  if (quantity in LENS_CHANGES) {
    return { value: (/** @type {number} */ x) => (x / limit() + 1) / 2, colours: ramp("change", dark), ends: { name, low: `−${end}`, high: `+${end}` } };
  }
  // What is certain is saturated, whichever quantity is shown.
  const falls = quantity === "rank" || quantity === "entropy", share = (/** @type {number} */ x) => (falls ? 1 - x / limit() : x / limit());
  return { value: share, colours: ramp("lens", dark), ends: { name, low: falls ? end : "0", high: falls ? "0" : end } };
}
