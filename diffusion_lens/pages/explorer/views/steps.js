/** The canvas by step: what each step has written, in the colours of the confidence or of what the step predicted. */

import { canvasCell, canvasLabel, drawOverlayLegend, overlayOf } from "../canvas.js";
import { ramp } from "../colours.js";
import { setText } from "../elements.js";
import { columnsOf, MapPane, rowHeight } from "../map_pane.js";
import { predictedOf } from "../predicted.js";
import { canvasAt, lengthOf, stepsOf } from "../runs.js";
import { readable } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../predicted.js").Predicted} Predicted */
/** @typedef {{from: number, to: number}} Rows  first and last index of steps that look the same */

const THIN = 12; // pixels of a row of several steps

/** @type {import("../types.js").View} */
export const stepsView = {
  name: "canvas",
  title: "Steps",
  help: "The canvas after each step, in colours of what the step was sure of.",
  missing: () => null,
  create: () => new StepsPane(),
};

class StepsPane {
  constructor() {
    this.pane = new MapPane({
      label: "Canvas by step", corner: "step", code: (seen) => (overlayOf(seen) === "confidence" ? "canvas" : "predictions"),
      choose: (seen, r, c) => ({ step: this.stepOf(seen, this.rows[r]), position: c }),
    });
    this.element = this.pane.element;
    setText(this.pane.heading, "Canvas by step");
    this.asked = "";
    /** @type {Rows[]} */ this.rows = [];
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  /** The step that a row shows: of several, the selected one. */
  stepOf(/** @type {Seen} */ { run, shown: step }, /** @type {Rows} */ { from, to }) {
    const at = run.steps.indexOf(step);
    return run.steps[at >= from && at <= to ? at : from];
  }

  draw(/** @type {Seen} */ seen) {
    const { run, base, dark, shown: step, position } = seen, overlay = overlayOf(seen), steps = stepsOf(run), { map, legend } = this.pane;
    return this.pane.draw(seen, async () => {
      const predicted = overlay === "confidence" ? null : await predictedOf(seen);
      if (!seen.current()) return;
      const asked = `${run.id} ${base?.id} ${overlay}`;
      if (asked !== this.asked) this.rows = foldedRows(seen, predicted, overlay);
      this.asked = asked;
      setText(this.pane.reading, readingOfSteps(seen, overlay, this.rows));
      drawOverlayLegend(legend, overlay, predicted, dark);
      const height = rowHeight(this.rows.length, 16);
      map.draw({
        rows: this.rows.map(({ from, to }) => (from === to ? `${steps[from]}` : `${steps[from]}–${steps[to]}`)),
        columns: columnsOf({ ...seen, step }), colours: ramp("canvas", dark),
        rowHeight: (r) => (this.rows[r].from === this.rows[r].to ? height : THIN),
        cell: (r, c) => {
          const { value, word, kinds } = canvasCell(seen, predicted, overlay, this.stepOf(seen, this.rows[r]), c);
          return { value, text: word === null ? "" : readable(word), kind: kinds.join(" ") };
        },
        label: (r, c) => canvasLabel(seen, predicted, this.stepOf(seen, this.rows[r]), c),
      });
      const at = steps.indexOf(step);
      map.mark(this.rows.findIndex(({ from, to }) => from <= at && at <= to), position);
    });
  }
}

/** Rows of steps; steps after one that look as it does are one row.
 * @param {Seen} seen @param {Predicted|null} predicted @param {string} overlay @returns {Rows[]} */
function foldedRows(seen, predicted, overlay) {
  const { run } = seen, steps = stepsOf(run), /** @type {Rows[]} */ rows = [];
  const seenIn = (/** @type {number} */ i) => Array.from({ length: lengthOf(run) }, (_, p) => {
    const { value, word, kinds } = canvasCell(seen, predicted, overlay, steps[i], p);
    return `${value} ${word} ${kinds}`;
  });
  /** @type {{at: number, cells: string[]}|null} */ let known = null; // the last row whose cells were asked for
  steps.forEach((step, i) => {
    const [before, now] = [i - 1, i].map((one) => run.canvases[canvasAt(run, steps[one] ?? step)]);
    let isSame = i > 0 && before.every((word, p) => word === now[p]);
    if (isSame) {
      const last = known?.at === i - 1 ? known.cells : seenIn(i - 1);
      known = { at: i, cells: seenIn(i) };
      isSame = last.every((cell, p) => cell === known.cells[p]);
    }
    if (isSame) rows.at(-1).to = i;
    else rows.push({ from: i, to: i });
  });
  return rows;
}

/** What the rows and their marks are. */
function readingOfSteps(/** @type {Seen} */ { run }, /** @type {string} */ overlay, /** @type {Rows[]} */ rows) {
  if (run.canvases.length === run.n_steps) return "";
  return [
    "Each row is the canvas after a step; tokens in frames are new.",
    rows.some(({ from, to }) => from < to) ? "A thin row stands for steps that change nothing." : "",
    overlay === "confidence" ? "" : "Colours show what the step predicted there, and words in italics are its likeliest tokens, not yet written.",
    overlay === "commitment" ? "An edge marks the first step from which on the likeliest token is the one that is written in the end." : "",
    overlay !== "confidence" && run.guided ? "The run is guided: predictions are those after guidance." : "",
  ].filter(Boolean).join(" ");
}
