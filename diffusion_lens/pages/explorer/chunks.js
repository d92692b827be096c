/** The chunks that the page has: those that were used last, within a bound on their size. */

import { decodeChunk } from "./numbers.js";
import { indexOfStep, stepsOf } from "./runs.js";

/** @typedef {import("./types.js").Chunk} Chunk @typedef {{promise: Promise<Chunk>, bytes: number, drawing: number}} Kept */

const MOST_BYTES = 64 * 2 ** 20;

export class Chunks {
  constructor() {
    /** @type {Map<string, Kept>} */ this.kept = new Map(); // in the order of their last use
    this.bytes = 0;
    this.drawing = 0; // The chunks of the present drawing stay.
  }

  has(/** @type {string} */ key) { return this.kept.has(key); }
  loaded(/** @type {string} */ key) { return (this.kept.get(key)?.bytes ?? 0) > 0; }

  /** A chunk, which is fetched where it is not kept. @returns {Promise<Chunk>} */
  get(/** @type {string} */ key, /** @type {() => Promise<ArrayBuffer>} */ fetchIt) {
    const entry = this.kept.get(key) ?? this.add(key, fetchIt());
    this.kept.delete(key);
    this.kept.set(key, entry);
    entry.drawing = this.drawing;
    return entry.promise;
  }

  add(/** @type {string} */ key, /** @type {Promise<ArrayBuffer>} */ coming) {
    const came = (/** @type {ArrayBuffer} */ buffer) => {
      const chunk = decodeChunk(buffer);
      entry.bytes = buffer.byteLength;
      this.bytes += entry.bytes;
      this.drop();
      return chunk;
    };
    /** @type {Kept} */ const entry = { promise: coming.then(came), bytes: 0, drawing: this.drawing };
    entry.promise.catch(() => this.kept.delete(key));
    return entry;
  }

  /** Drop what was not used for longest, until the rest is within the bound. */
  drop() {
    for (const [key, { bytes, drawing }] of this.kept) {
      if (this.bytes <= MOST_BYTES) return;
      if (!bytes || drawing === this.drawing) continue;
      this.kept.delete(key);
      this.bytes -= bytes;
    }
  }
}

/** Decode what the neighbouring steps show, while nothing else happens.
 * @param {import("./explorer.js").Explorer} explorer */
export function prepare(explorer) {
  const idle = window.requestIdleCallback ?? ((/** @type {() => void} */ job) => setTimeout(job, 50));
  for (const { run, step, shown, block } of explorer.shown.map((one) => explorer.seen(one))) {
    idle(() => {
      const at = indexOfStep(run, shown);
      for (const near of stepsOf(run).filter((one, i) => Math.abs(i - at) === 1 || one === step)) {
        const wanted = [run.lens?.steps.includes(near) && `lens/${near}`,
          ...run.traces.map(({ name, steps, lazy }) => !lazy && steps.includes(near) && `trace/${name}/${near}`),
          run.attention?.layers.includes(block) && run.attention.steps.includes(near) && `attention/${block}/${near}`];
        for (const name of wanted) if (name) explorer.chunk(run, name).catch(() => null);
      }
    });
  }
}
