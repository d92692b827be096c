/** Attention of one block at a step: its heads as small pictures, one as a map of query by key, and what is read in words. */

import { ramp } from "../colours.js";
import { button, drawLegend, h, setText } from "../elements.js";
import { columnsOf, MapPane, readingOf, rowHeight } from "../map_pane.js";
import { clamp, read } from "../numbers.js";
import { finalWord, isReached, lengthOf, listed, placeIn, predictedAt, queryOf, sameStep, silenced } from "../runs.js";
import { quoted, shorten } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Table} Table */

const MOST_NAMED = 4; // most positions or heads that a sentence lists
const LEAST_WEIGHT = 0.01; // weight below which it does not

/** @type {import("../types.js").View} */
export const attentionView = {
  name: "attention",
  title: "Attention",
  help: "Which positions each head reads.",
  missing: ({ run: { attention, missing }, block, step }) => {
    if (!attention) return missing.attention ?? "There is no attention.";
    return attention.layers.includes(block) && attention.steps.includes(step) ? null :
      `There is attention of ${listed("block", attention.layers)} at ${listed("step", attention.steps)}.`;
  },
  create: () => new AttentionPane(),
};

class AttentionPane {
  constructor() {
    this.pane = new MapPane({ label: "Attention", corner: "query", code: () => "attention", choose: (seen, r, c) => ({ position: predictedAt(seen, r), key: c, ...sameStep(seen) }) });
    this.heads = h("div", { class: "dl-heads", role: "group", "aria-label": "Heads" });
    this.words = h("div", { class: "dl-reads" });
    this.pane.map.element.before(this.heads, this.words);
    this.element = this.pane.element;
    this.pictured = "";
    /** @type {Table|null} */ this.pattern = null;
  }

  hover(/** @type {number} */ position) { this.pane.map.markHover(position); }

  draw(/** @type {Seen} */ seen) {
    const { run, step, block, head, key, dark } = seen, n = lengthOf(run), query = queryOf(seen), { map, legend } = this.pane;
    setText(this.pane.heading, `Attention of block ${block}, head ${head} at step ${step}`);
    setText(this.pane.reading, readingOf(seen, "attention"));
    return this.pane.draw(seen, async () => {
      const { tables: { pattern } } = await seen.chunk(`attention/${block}/${step}`);
      if (!seen.current()) return;
      const colours = ramp("attention", dark), columns = columnsOf(seen), digits = pattern.scale > 0.001 ? 2 : 4;
      const weight = (/** @type {number} */ x) => (Number.isNaN(x) ? "not reached" : x.toFixed(digits));
      drawLegend(legend, colours, { name: "weight", low: "0", high: "1" });
      this.drawHeads(seen, pattern);
      this.drawWords(seen, pattern);
      map.draw({
        rows: columns.map(({ text }, q) => `${q} ${shorten(text, 9)}`), columns, colours, rowHeight: rowHeight(n, 24),
        cell: (q, k) => {
          const x = read(pattern, head, q, k);
          return { value: x, text: x >= 0.005 ? weight(x) : "" };
        },
        label: (q, k) => `head ${head}, query ${q} ${finalQuoted(seen, q)}, key ${k} ${finalQuoted(seen, k)}: ${weight(read(pattern, head, q, k))}`,
      });
      map.mark(query, clamp(key ?? query, 0, n - 1));
    });
  }

  /** A small picture of each head's pattern; a click shows the head.
   * @param {Seen} seen @param {Table} pattern */
  drawHeads({ head, dark }, pattern) {
    const [nHeads, n] = pattern.shape, { heads } = this;
    while (heads.children.length < nHeads) {
      const one = heads.children.length;
      heads.append(button(`${one}`, () => this.pane.seen.select({ head: one }), { "aria-label": `head ${one}` }));
      heads.lastElementChild.prepend(h("canvas", { "aria-hidden": "true" }));
    }
    const isPictured = this.pattern === pattern && this.pictured === `${dark}`;
    this.pattern = pattern;
    this.pictured = `${dark}`;
    // Stored integers to pixels, red in the lowest byte; the integer for none is transparent.
    const pixels = new Uint32Array(pattern.none + 1);
    const opaque = ramp("attention", dark).map(({ rgb: [r, g, b] }) => (255 << 24) | (b << 16) | (g << 8) | r);
    for (let x = 0; x < pattern.none; x++) pixels[x] = opaque[Math.min(255, Math.round(x * pattern.scale * 255))];
    [...heads.children].forEach((/** @type {any} */ chooser, one) => {
      chooser.hidden = one >= nHeads;
      chooser.setAttribute("aria-pressed", String(one === head));
      if (chooser.hidden || isPictured) return;
      const canvas = chooser.firstChild;
      canvas.width = canvas.height = n;
      const context = canvas.getContext("2d"), image = context.createImageData(n, n), whole = new Uint32Array(image.data.buffer);
      for (let i = 0; i < n * n; i++) whole[i] = pixels[pattern.data[one * n * n + i]];
      context.putImageData(image, 0, 0);
    });
  }

  /** What the selected position reads, what reads it, and which heads read most what it reads.
   * @param {Seen} seen @param {Table} pattern */
  drawWords(seen, pattern) {
    const { run, position, block, head, key, select } = seen, query = queryOf(seen), [nHeads, n] = pattern.shape;
    const strongest = (/** @type {number} */ count, /** @type {(i: number) => number} */ weight) => Array.from({ length: count }, (_, i) => ({ i, x: weight(i) }))
      .filter(({ x }) => x >= LEAST_WEIGHT).sort((a, b) => b.x - a.x).slice(0, MOST_NAMED);
    const line = (/** @type {string} */ words, /** @type {{i: number, x: number}[]} */ found, /** @type {(i: number) => string} */ name, /** @type {(i: number) => any} */ chosen) =>
      h("p", {}, h("span", {}, `${words} `), ...(found.length ? found.map(({ i, x }) => button(`${name(i)} ${x.toFixed(2)}`, () => select(chosen(i)), { class: "dl-chip" })) : [`nothing above ${LEAST_WEIGHT}`]));
    const place = (/** @type {number} */ p) => placeIn(seen, p), silent = silenced(run, block);
    const own = query === position ? place(query) : `${place(query)}, which predicts position ${position},`;
    const reads = strongest(n, (k) => read(pattern, head, query, k)), meant = key ?? reads.find(({ i }) => i !== query)?.i ?? query;
    this.words.replaceChildren(...(silent ? [h("p", { class: "dl-bad" }, silent)] : []),
      line(`In head ${head}, ${own} reads`, reads, place, (k) => ({ key: k })),
      line("It is read by", strongest(n, (q) => (isReached(seen, q) ? read(pattern, head, q, query) : 0)), place, (q) => ({ position: predictedAt(seen, q), key: query, ...sameStep(seen) })),
      line(`Heads in which it reads ${place(meant)} most:`, strongest(nHeads, (one) => read(pattern, one, query, meant)), (one) => `head ${one}`, (one) => ({ head: one, key: meant })));
  }
}

const finalQuoted = (/** @type {Seen} */ { run }, /** @type {number} */ position) => quoted(finalWord(run, position) ?? "·");
