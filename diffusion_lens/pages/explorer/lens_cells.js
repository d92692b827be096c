/** What the lens reads in one cell: a layer and a position at a step. */

import { read } from "./numbers.js";
import { likeliest } from "./predicted.js";
import { targetAt } from "./runs.js";
import { number, quoted } from "./words.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Chunk} Chunk */
/** @typedef {{top: [string, number][], entropy: number, rank: number, probability: number, target: string|null}} LensCell */

/** The lens's numbers for one cell, or null where nothing was read.
 * @param {Run} run @param {Chunk} chunk @param {number} layer @param {number} position @returns {LensCell|null} */
export function lensAt(run, chunk, layer, position) {
  const row = run.lens.layers.indexOf(layer), column = run.lens.positions.indexOf(position);
  const { top_tokens, top_probabilities, entropy, rank, probability } = chunk.tables;
  if (row < 0 || column < 0 || Number.isNaN(read(entropy, row, column))) return null;
  const top = likeliest(run, chunk, top_tokens, top_probabilities, run.lens.k, row, column);
  const numbers = { entropy: read(entropy, row, column), rank: read(rank, row, column), probability: read(probability, row, column) };
  return { top, ...numbers, target: targetAt(run, position) };
}

/** What a cell says, for the status line and screen readers.
 * @param {LensCell|null} cell */
export function lensText(cell) {
  if (!cell) return "not read";
  const target = cell.target === null || cell.rank < 0 ? "no target" :
    `target ${quoted(cell.target)} rank ${cell.rank}, p ${number(cell.probability)}`;
  const [[word, p] = ["", NaN]] = cell.top;
  return `${quoted(word)} ${number(p)}; ${target}; entropy ${number(cell.entropy)} nats`;
}
