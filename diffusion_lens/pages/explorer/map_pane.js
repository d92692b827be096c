/** What the views that are heat maps over positions have in common: tools above a map, or a note in its place. */

import { button, h } from "./elements.js";
import { HeatMap } from "./heat_map.js";
import { finalWord, isOpen, lengthOf } from "./runs.js";
import { quoted, readable } from "./words.js";

/** @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Column} Column */

export class MapPane {
  /** `choose` is what a cell selects, `code` the view whose Python code gives the numbers.
   * @param {{label: string, corner: string, tools?: HTMLElement[], code?: (seen: Seen) => string,
   *   choose: (seen: Seen, row: number, column: number) => Partial<import("./types.js").State>}} given */
  constructor({ label, corner, tools = [], code = () => "", choose }) {
    /** @type {Seen} */ this.seen = null;
    this.map = new HeatMap({
      label, corner,
      pick: async (row, column) => {
        await this.seen.select(choose(this.seen, row, column));
        this.seen.say(this.map.label(row, column));
      },
      hover: (row, column) => {
        this.map.markHover(column ?? -1);
        if (column !== null) this.seen.say(row === null ? this.map.shown.columns[column].title : this.map.label(row, column));
      },
    });
    this.heading = h("h3");
    this.legend = h("span", { class: "dl-legend" });
    this.note = h("p", { class: "dl-note", hidden: true });
    this.reading = h("p", { class: "dl-reading" });
    this.code = button("as Python", () => this.seen.code(code(this.seen), label), { class: "dl-code" });
    this.hasCode = () => Boolean(this.seen.run.python?.[code(this.seen)]);
    this.element = h("div", { class: "dl-map-pane", role: "group", "aria-label": label },
      h("header", {}, this.heading, h("span", {}, ...tools, this.legend, this.code)), this.note, this.map.element, this.reading);
  }

  /** Draw a selection. @param {Seen} seen @param {() => Promise<void>} job */
  draw(seen, job) {
    this.seen = seen;
    this.code.hidden = !this.hasCode();
    return job();
  }

  /** Show the map, or a note in its place.
   * @param {string|null} note @param {...HTMLElement} children */
  show(note, ...children) {
    for (const element of [this.map.element, this.legend]) element.hidden = note !== null;
    this.note.hidden = note === null;
    this.note.replaceChildren(...(note === null ? [] : [note, " ", ...children]));
  }
}

/** The positions as columns: the words that are written in the end, in italics where the step does not read them yet.
 * @param {Seen} seen @returns {Column[]} */
export function columnsOf({ run, step }) {
  return Array.from({ length: lengthOf(run) }, (_, p) => {
    const word = finalWord(run, p) ?? "·";
    return { text: readable(word), title: `position ${p}, ${quoted(word)}`, muted: isOpen(run, step, p) };
  });
}

/** What a view of one step reads. @param {Seen} seen @param {string} view */
export function readingOf({ run, step }, view) {
  if (run.canvases.length === run.n_steps) return "";
  const branch = run.guided ? ` The run is guided: ${view === "trace" ? "the trace is that after guidance" : `the ${view} is that of the conditional branch`}.` : "";
  return `The ${view} at step ${step} reads the canvas before it, where the columns in italics are not yet written.${branch}`;
}

/** Pixels of a row: lower where there are many. @param {number} rows @param {number} most */
export const rowHeight = (rows, most) => (rows > most ? 15 : 21);
