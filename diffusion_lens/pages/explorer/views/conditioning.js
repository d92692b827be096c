/** Self-conditioning: the likeliest tokens of the prediction that each step reads of the step before, beside the canvas. */

import { ramp } from "../colours.js";
import { button, drawLegend, setText } from "../elements.js";
import { columnsOf, MapPane, rowHeight } from "../map_pane.js";
import { read, wordOf } from "../numbers.js";
import { finalWord } from "../runs.js";
import { quoted, readable } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Chunk} Chunk */

/** @type {import("../types.js").View} */
export const conditioningView = {
  name: "conditioning",
  title: "Self-conditioning",
  help: "The likeliest token that each step was handed by the step before, in colours of how long it has stayed the same.",
  missing: ({ run }) => (run.conditioning ? null : "Each step of this model reads the canvas alone, and nothing of what the step before predicted."),
  create: () => new ConditioningPane(),
};

/** For each step and position, the number of steps up to this one that were handed the same token.
 * @param {Chunk} chunk @returns {number[][]} */
function stays({ tables: { words } }) {
  const [steps, positions] = words.shape, /** @type {number[][]} */ table = [];
  for (let i = 0; i < steps; i++) {
    table.push(Array.from({ length: positions }, (_, p) => {
      const word = read(words, i, p);
      return word < 0 ? 0 : 1 + (i > 0 && read(words, i - 1, p) === word ? table[i - 1][p] : 0);
    }));
  }
  return table;
}

class ConditioningPane {
  constructor() {
    this.pane = new MapPane({
      label: "Tokens handed on by step", corner: "step",
      tools: [button("as Python", () => this.pane.seen.code("conditioning", "Self-conditioning"), { class: "dl-code" })],
      choose: ({ run }, r, c) => ({ step: run.conditioning.steps[r], position: c }),
    });
    this.element = this.pane.element;
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  draw(/** @type {Seen} */ seen) {
    const { run, step, position, dark } = seen, { map, legend } = this.pane, { steps } = run.conditioning;
    return this.pane.draw(seen, async () => {
      const chunk = await seen.chunk("conditioning");
      if (!seen.current()) return;
      const { words, streak, finished } = chunk.tables, table = (chunk.stays ??= stays(chunk)), colours = ramp("canvas", dark);
      const longest = table.flat().reduce((most, x) => Math.max(most, x), 4), wordAt = (/** @type {number} */ r, /** @type {number} */ c) => wordOf(run, chunk, read(words, r, c));
      this.pane.show(null);
      setText(this.pane.heading, "Tokens that each step was handed");
      drawLegend(legend, colours, { name: "steps with this token", low: "0", high: String(longest) });
      map.draw({
        rows: steps.map(String), columns: columnsOf(seen), colours, rowHeight: rowHeight(steps.length, 16),
        cell: (r, c) => {
          const word = wordAt(r, c);
          return word === null ? { value: NaN, kind: "plain" } :
            { value: table[r][c] / longest, text: readable(word), kind: word === finalWord(run, c) ? "hit" : "" };
        },
        label: (r, c) => {
          const word = wordAt(r, c), times = (/** @type {number} */ n) => `${n} step${n === 1 ? "" : "s"}`;
          if (word === null) return `step ${steps[r]}, position ${c}: nothing was handed on`;
          const all = read(streak, r) > 0 ? `; all of these tokens stayed for ${times(read(streak, r))}` : "";
          return `step ${steps[r]}, position ${c}: reads ${quoted(word)} of the step before, for ${times(table[r][c])} now${all}` +
            (read(finished, r) ? "; the block is finished" : "");
        },
      });
      map.mark(steps.indexOf(step), position);
      setText(this.pane.reading, "Each row is what a step reads of the prediction of the step before. Tokens in bold are those that were written in the end; the first step of a block reads none.");
    });
  }
}
