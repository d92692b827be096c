/** The experts that each position chose in every layer with a router, at a step. */

import { ramp } from "../colours.js";
import { button, drawLegend, setText } from "../elements.js";
import { columnsOf, MapPane, rowHeight } from "../map_pane.js";
import { read } from "../numbers.js";
import { listed, wordAfter } from "../runs.js";
import { quoted } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen */

/** @type {import("../types.js").View} */
export const expertsView = {
  name: "experts",
  title: "Experts",
  help: "The expert that each position chose first, by layer, in colours of its share of the weight.",
  missing: ({ run, step }) => {
    if (!run.experts) return run.missing.experts ?? "No block of this model has a router that chooses among experts.";
    return run.experts.steps.includes(step) ? null : `This page contains the experts' choices of ${listed("step", run.experts.steps)}.`;
  },
  create: () => new ExpertsPane(),
};

class ExpertsPane {
  constructor() {
    const code = button("as Python", () => {
      const { run, block, code } = this.pane.seen, { layers } = run.experts;
      code("experts", "Experts", { layer: layers.includes(block) ? block : layers[0] });
    }, { class: "dl-code" });
    this.pane = new MapPane({
      label: "Experts by layer", corner: "block", tools: [code],
      choose: (seen, r, c) => ({ layer: this.layerOf(seen, r), position: c }),
    });
    this.element = this.pane.element;
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  /** The layer of a row; the first layer is at the bottom. */
  layerOf(/** @type {Seen} */ { run }, /** @type {number} */ row) { return run.experts.layers.at(-1 - row); }

  draw(/** @type {Seen} */ seen) {
    const { run, step, position, block, dark } = seen, { map, legend } = this.pane, { layers, n_experts } = run.experts;
    return this.pane.draw(seen, async () => {
      const { tables: { experts, weights } } = await seen.chunk(`experts/${step}`);
      if (!seen.current()) return;
      const n = experts.shape[2], colours = ramp("experts", dark);
      const choicesAt = (/** @type {number} */ r, /** @type {number} */ c) => {
        const i = layers.length - 1 - r, all = Array.from({ length: n }, (_, k) => ({ expert: read(experts, i, c, k), weight: read(weights, i, c, k) }));
        return all.sort((a, b) => b.weight - a.weight || 0);
      };
      const shareOf = (/** @type {{weight: number}[]} */ choices) => choices[0].weight / choices.reduce((sum, { weight }) => sum + weight, 0);
      this.pane.show(null);
      setText(this.pane.heading, `${n} of ${n_experts} experts at step ${step}`);
      drawLegend(legend, colours, { name: "share of the first expert", low: "0", high: "1" });
      map.draw({
        rows: layers.toReversed().map(String), columns: columnsOf(seen), colours, rowHeight: rowHeight(layers.length, 16),
        cell: (r, c) => {
          const choices = choicesAt(r, c), share = shareOf(choices);
          return { value: share, text: String(choices[0].expert), kind: "plain" };
        },
        label: (r, c) => {
          const word = wordAfter(run, step, c), weight = (/** @type {number} */ x) => (Number.isNaN(x) ? "" : ` (weight ${x.toFixed(3)})`);
          return `block ${this.layerOf(seen, r)}, position ${c} ${word === null ? "masked" : quoted(word)}: ` +
            choicesAt(r, c).map((one) => `expert ${one.expert}${weight(one.weight)}`).join(", ");
        },
      });
      const row = layers.indexOf(block);
      map.mark(row < 0 ? -1 : layers.length - 1 - row, position);
      setText(this.pane.reading, "Numbers in the cells are those of the first expert. The router reads the canvas before the step, where the columns in italics are not yet written.");
    });
  }
}
