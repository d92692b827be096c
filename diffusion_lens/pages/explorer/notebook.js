/** What is seen as a Jupyter notebook, nbformat 4.5: the code of the run, and of the view with the selection filled in. */

import { settingsOf } from "./picture.js";
import { codeOf, shownTrace } from "./runs.js";
import { readable } from "./words.js";

/** @typedef {import("./types.js").Seen} Seen */

/** The code of a view for a selection; null where the run has no numbers of it there.
 * @param {Seen} seen @param {string} view @returns {string|null} */
function codeWithNumbers(seen, view) {
  const { run, step, position, block } = seen;
  const known = {
    lens: run.lens?.steps.includes(step) && run.lens.positions.includes(position),
    attention: run.attention?.steps.includes(step) && run.attention.layers.includes(block),
    trace: shownTrace(seen)?.steps.includes(step),
    predictions: run.predictions?.steps.includes(step),
  };
  return known[view] ?? true ? codeOf(seen, view) || null : null;
}

/** The notebook of one or two runs.
 * @param {Seen[]} shown */
export function notebookOf(shown) {
  /** @type {any[]} */ const cells = [];
  const add = (/** @type {Record<string, any>} */ cell) => cells.push({ id: `cell-${cells.length}`, metadata: {}, ...cell });
  const markdown = (/** @type {string} */ source) => add({ cell_type: "markdown", source });
  const code = (/** @type {string} */ source) => add({ cell_type: "code", execution_count: null, outputs: [], source });
  markdown("# Runs of a diffusion language model\n\nThe code repeats what `diffusion_lens` has shown, and stops if the weights are other ones.");
  for (const seen of shown) {
    const { run, shown: step, position } = seen, written = new Set(run.python.run.split("\n\n"));
    // The code of each view contains that of the run, which has a cell of its own.
    const beyond = (/** @type {string} */ text) => text.split("\n\n").filter((part) => !written.has(part)).join("\n\n");
    const settings = settingsOf(run);
    markdown(`## ${seen.model.name}\n\n${fenced([`run:      ${readable(run.label)}`, `prompt:   ${readable(run.prompt)}`,
      ...(settings ? [`settings: ${settings}`] : []), `shown:    step ${step}, position ${position}`].join("\n"))}`);
    code(run.python.run);
    code(`${beyond(codeWithNumbers(seen, "canvas"))}\nwords`);
    const open = codeWithNumbers(seen, seen.state.view) ?? codeWithNumbers(seen, "predictions");
    if (open) code(beyond(open));
    code("trajectory.plot()");
  }
  return {
    nbformat: 4, nbformat_minor: 5, cells,
    metadata: { kernelspec: { display_name: "Python 3", language: "python", name: "python3" }, language_info: { name: "python" } },
  };
}

/** A text of a model as a block of Markdown that it cannot end.
 * @param {string} text */
function fenced(text) {
  const fence = "`".repeat(Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length)) + 1);
  return `${fence}text\n${text}\n${fence}`;
}
