/** An animated GIF (GIF89a, CompuServe 1990): 256 colours for all frames, and of each frame what has changed. */

const SAMPLED = 6; // frames that choose the colours
const CLEAR = 256, END = 257, MOST_CODES = 4096;

/** A colour's place in the tables: five bits of each channel. */
const keyOf = (/** @type {Uint8ClampedArray} */ data, /** @type {number} */ i) => ((data[i] >> 3) << 10) | ((data[i + 1] >> 3) << 5) | (data[i + 2] >> 3);

/** The 256 most frequent colours of some frames, each the mean of those that share its place.
 * @param {ImageData[]} frames @returns {number[][]} */
function paletteOf(frames) {
  const counts = new Uint32Array(32768), sums = [0, 1, 2].map(() => new Float64Array(32768));
  for (const { data } of frames) {
    for (let i = 0; i < data.length; i += 4) {
      const key = keyOf(data, i);
      counts[key] += 1;
      for (let channel = 0; channel < 3; channel++) sums[channel][key] += data[i + channel];
    }
  }
  const keys = [...counts.keys()].filter((key) => counts[key]).sort((a, b) => counts[b] - counts[a]).slice(0, 256);
  return Array.from({ length: 256 }, (_, i) => (i < keys.length ? sums.map((sum) => Math.round(sum[keys[i]] / counts[keys[i]])) : [0, 0, 0]));
}

/** For a frame the index of each pixel's nearest colour.
 * @param {number[][]} palette @returns {(frame: ImageData) => Uint8Array} */
function indexer(palette) {
  const known = new Int16Array(32768).fill(-1);
  const distance = (/** @type {number[]} */ [r, g, b], /** @type {number[]} */ own) => (r - own[0]) ** 2 + (g - own[1]) ** 2 + (b - own[2]) ** 2;
  return ({ data }) => {
    const indices = new Uint8Array(data.length / 4);
    for (let i = 0; i < indices.length; i++) {
      const key = keyOf(data, 4 * i);
      if (known[key] < 0) {
        const own = [...data.subarray(4 * i, 4 * i + 3)], distances = palette.map((colour) => distance(colour, own));
        known[key] = distances.indexOf(Math.min(...distances));
      }
      indices[i] = known[key];
    }
    return indices;
  };
}

/** LZW (Welch 1984) with codes of 9 to 12 bits, the lowest bit first, in blocks of at most 255 bytes.
 * @param {Uint8Array} indices @returns {number[]} */
function compressed(indices) {
  /** @type {number[]} */ const bytes = [];
  const longer = new Uint16Array(MOST_CODES * 256); // the code of a code's text and one more index; 0 for none
  let next = END + 1, size = 9, bits = 0, held = 0;
  const emit = (/** @type {number} */ code) => {
    held |= code << bits;
    for (bits += size; bits >= 8; bits -= 8, held >>>= 8) bytes.push(held & 255);
  };
  emit(CLEAR);
  let prefix = indices[0];
  for (let i = 1; i < indices.length; i++) {
    const at = prefix * 256 + indices[i];
    if (longer[at]) { prefix = longer[at]; continue; }
    emit(prefix);
    if (next < MOST_CODES) {
      longer[at] = next++;
      if (next > 1 << size && size < 12) size += 1;
    } else {
      emit(CLEAR);
      longer.fill(0);
      [next, size] = [END + 1, 9];
    }
    prefix = indices[i];
  }
  emit(prefix);
  if (next === 1 << size && size < 12) size += 1; // The decoder has one code more by now.
  emit(END);
  if (bits) bytes.push(held & 255);
  const blocks = [8]; // bits of an index
  for (let i = 0; i < bytes.length; i += 255) blocks.push(Math.min(255, bytes.length - i), ...bytes.slice(i, i + 255));
  return [...blocks, 0];
}

/** The rectangle in which two frames differ, as [x, y, width, height]; one pixel where they do not.
 * @param {Uint8Array} now @param {Uint8Array|null} before @param {number} width @param {number} height */
function changed(now, before, width, height) {
  if (!before) return [0, 0, width, height];
  let [left, right, top, bottom] = [width, 0, height, 0];
  for (let i = 0; i < now.length; i++) {
    if (now[i] === before[i]) continue;
    const x = i % width, y = (i - x) / width;
    [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x + 1), Math.min(top, y), Math.max(bottom, y + 1)];
  }
  return right ? [left, top, right - left, bottom - top] : [0, 0, 1, 1];
}

/** A GIF that repeats, of frames of one size.
 * @param {number[]} durations  of each frame, in milliseconds @param {(i: number) => Promise<ImageData>} frame
 * @param {(i: number) => void} began  called before each frame @returns {Promise<Uint8Array<ArrayBuffer>[]>} */
export async function gifOf(durations, frame, began) {
  const n = durations.length, sampled = new Set(Array.from({ length: SAMPLED }, (_, i) => Math.round((i * (n - 1)) / (SAMPLED - 1))));
  /** @type {ImageData[]} */ const samples = [];
  for (const i of sampled) samples.push(await frame(i));
  const palette = paletteOf(samples), indices = indexer(palette), [{ width, height }] = samples;
  const two = (/** @type {number[]} */ ...numbers) => numbers.flatMap((x) => [x & 255, x >> 8]);
  const ascii = (/** @type {string} */ text) => [...text].map((char) => char.charCodeAt(0));
  const parts = [new Uint8Array([...ascii("GIF89a"), ...two(width, height), 0xf7, 0, 0, ...palette.flat(),
    0x21, 0xff, 11, ...ascii("NETSCAPE2.0"), 3, 1, 0, 0, 0])];
  /** @type {Uint8Array|null} */ let before = null;
  for (const [i, duration] of durations.entries()) {
    began(i);
    const now = indices(await frame(i)), [x, y, w, high] = changed(now, before, width, height), part = new Uint8Array(w * high);
    for (let row = 0; row < high; row++) part.set(now.subarray((y + row) * width + x, (y + row) * width + x + w), row * w);
    parts.push(new Uint8Array([0x21, 0xf9, 4, 4, ...two(Math.round(duration / 10)), 0, 0, 0x2c, ...two(x, y, w, high), 0, ...compressed(part)]));
    before = now;
  }
  return [...parts, new Uint8Array([0x3b])];
}
