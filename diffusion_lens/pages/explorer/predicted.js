/** What the steps of a run predicted at the positions that they could change. */

import { read, roundUp, wordOf } from "./numbers.js";
import { number, quoted } from "./words.js";

/** @typedef {import("./types.js").Chunk} Chunk @typedef {import("./types.js").Run} Run */

/** The `k` likeliest tokens of a place in two tables, as [text, probability].
 * @param {Run} run @param {Chunk} chunk @returns {[string, number][]} */
export function likeliest(run, chunk, tokens, probabilities, k, ...place) {
  const one = (i) => /** @type {[string, number]} */ ([wordOf(run, chunk, read(tokens, ...place, i)), read(probabilities, ...place, i)]);
  const rows = Array.from({ length: k }, (_, i) => one(i));
  return rows.filter(([word, p]) => word !== null && !Number.isNaN(p));
}

/** @typedef {{top: [string, number][], probability: number, margin: number, entropy: number}} Prediction */

export class Predicted {
  constructor(/** @type {Run} */ run, /** @type {Chunk} */ chunk) {
    this.run = run;
    this.chunk = chunk;
    this.k = run.predictions.k;
    this.n = run.canvases[0].length;
    /** @type {Map<number, number>} */ this.rows = new Map();
    /** @type {Map<number, Prediction>} */ this.known = new Map(); // by row: a view asks for the same ones several times
    const { step, position, entropy } = chunk.tables;
    for (let i = 0; i < step.data.length; i++) this.rows.set(step.data[i] * this.n + position.data[i], i);
    let highest = 0;
    for (let i = 0; i < entropy.data.length; i++) if (entropy.data[i] > highest) highest = entropy.data[i];
    this.highest = roundUp(highest);
  }

  /** The likeliest tokens as [text, probability], and their numbers; null where the step predicted nothing.
   * @param {number} step @param {number} position @returns {Prediction|null} */
  at(step, position) {
    const row = this.rows.get(step * this.n + position);
    if (row === undefined) return null;
    if (!this.known.has(row)) {
      const { top_tokens, top_probabilities, entropy } = this.chunk.tables;
      const top = likeliest(this.run, this.chunk, top_tokens, top_probabilities, this.k, row);
      const [first, second] = top.map(([, p]) => p);
      this.known.set(row, { top, probability: first, margin: second === undefined ? NaN : first - second, entropy: read(entropy, row) });
    }
    return this.known.get(row);
  }

  /** The step whose predictions explain what stands at a position after a step: of a written token, those of the step
   * that wrote it, unless it is predicted at every step.
   * @param {number} step @param {number} position */
  decisive(step, position) {
    const at = this.run.revealed_at?.[position] ?? -1;
    return at >= 0 && at < step && !this.at(step, position) ? at : step;
  }

  /** The probability of the token that the run wrote at a position; NaN where it is none of the likeliest.
   * @param {number} step @param {number} position */
  written(step, position) {
    const row = this.rows.get(step * this.n + position), final = this.run.canvases.at(-1)[position];
    const { top_tokens, top_probabilities } = this.chunk.tables;
    for (let i = 0; row !== undefined && i < this.k; i++) {
      if (read(top_tokens, row, i) === final) return read(top_probabilities, row, i);
    }
    return NaN;
  }

  /** The step from which on the likeliest token is the one that was written; null for none. */
  committed(/** @type {number} */ position) {
    const step = this.run.predictions.committed?.[position] ?? -1;
    return step < 0 ? null : step;
  }
}

/** What the steps of a run predicted; null where nothing is known of it.
 * @param {import("./types.js").Seen} seen @returns {Promise<Predicted|null>} */
export async function predictedOf(seen, run = seen.run) {
  if (!run.predictions) return null;
  const chunk = await seen.chunk("predictions", run);
  return (chunk.predicted ??= new Predicted(run, chunk));
}

/** What a step predicted, for the status line and screen readers.
 * @param {Prediction} prediction */
export function predictedText({ top: [[word, p]], margin, entropy }) {
  const second = Number.isNaN(margin) ? "" : `, margin ${number(margin)}`;
  return `predicted ${quoted(word)} ${number(p)}${second}, entropy ${number(entropy)} nats`;
}
