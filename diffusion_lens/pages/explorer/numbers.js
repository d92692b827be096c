/** Numbers of a run from binary chunks, whose format `diffusion_lens/pages/views.py` describes. */

/** @typedef {import("./types.js").Table} Table @typedef {import("./types.js").Chunk} Chunk @typedef {import("./types.js").Run} Run */

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
const NONE = { u1: 255, u2: 65535 };
const after8 = (/** @type {number} */ n) => Math.ceil(n / 8) * 8;

/** The tables of a chunk: a JSON header, then arrays, each padded to 8 bytes.
 * @param {ArrayBuffer} buffer @returns {Chunk} */
export function decodeChunk(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  /** @type {Record<string, Table>} */ const tables = {};
  let at = after8(4 + length);
  for (const { name, dtype, shape, scale } of header.arrays) {
    const data = new ARRAYS[dtype](buffer, at, shape.reduce((a, b) => a * b, 1));
    tables[name] = { data, shape, scale: scale ?? 1, none: scale === undefined ? null : NONE[dtype] };
    at = after8(at + data.byteLength);
  }
  return { header, tables };
}

/** The text of a token of a chunk, whose own words follow those of the run.
 * @param {Run} run @param {Chunk} chunk @param {number} index @returns {string|null} */
export const wordOf = (run, chunk, index) => run.words[index] ?? chunk.header.words?.[index - run.words.length] ?? null;

/** One number of a table; NaN where it contains none.
 * @param {Table} table @param {...number} index */
export function read(table, ...index) {
  let at = 0;
  for (let axis = 0; axis < index.length; axis++) at = at * table.shape[axis] + index[axis];
  const stored = table.data[at];
  return stored === undefined || stored === table.none ? NaN : stored * table.scale;
}

/** Base64 of gzip, as in a page.
 * @param {string} base64 @returns {Promise<ArrayBuffer>} */
export async function inflate(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i); // much faster than a function for each
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

export const clamp = (/** @type {number} */ x, /** @type {number} */ low, /** @type {number} */ high) => Math.min(high, Math.max(low, x));

/** The smallest of 1, 2, 5, 10, ... times a power of ten that is at least x, so that a scale has a round end.
 * @param {number} x */
export function roundUp(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((digit) => digit * power).find((limit) => limit >= x * 0.9999);
}
