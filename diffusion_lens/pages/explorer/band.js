/** The layers of one run at the selected position, at the step that decided it: what each would have written. */

import { paint, ramp } from "./colours.js";
import { h, setText } from "./elements.js";
import { lensAt, lensText } from "./lens_cells.js";
import { clamp } from "./numbers.js";
import { branchOf, listed } from "./runs.js";
import { number, quoted, readable } from "./words.js";

/** @typedef {import("./types.js").Seen} Seen */

/** The layer of a lens that is nearest to the selected one.
 * @param {number[]} layers @param {number} layer */
const nearest = (layers, layer) => layers.reduce((best, one) => (Math.abs(one - layer) < Math.abs(best - layer) ? one : best), layers[0]);

export class LayerBand {
  constructor() {
    /** @type {Seen|null} */ this.seen = null;
    this.heading = h("span", { class: "dl-layers-name" });
    this.cells = h("div", { class: "dl-layers", role: "group", "aria-label": "Layers" });
    this.reading = h("span", { class: "dl-layers-reading" });
    this.element = h("div", { class: "dl-layer-band" }, this.heading, this.cells, this.reading);
    this.cells.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const layers = this.layers, at = clamp(layers.indexOf(nearest(layers, this.seen.layer)) + move, 0, layers.length - 1);
      this.seen.select({ layer: layers[at] });
      this.cells.children[at].focus();
    });
  }

  get layers() { return this.seen.run.lens?.layers ?? []; }

  async draw(/** @type {Seen} */ seen) {
    const { run, model, step, position, dark } = seen, { lens } = run, last = lens?.layers.length - 1;
    this.seen = seen;
    const missing = !lens ? run.missing.lens ?? "There is no lens." : !lens.steps.includes(step) ? `The lens was read at ${listed("step", lens.steps)}.`
      : !lens.positions.includes(position) ? "The lens reads nothing at this position." : null;
    setText(this.heading, `${model.name}: layers at step ${step}${branchOf(run)}${step === seen.shown ? "" : ", which wrote it"}`);
    this.cells.hidden = missing !== null;
    if (missing) return setText(this.reading, missing);
    const layer = nearest(lens.layers, seen.layer), chunk = await seen.chunk(`lens/${step}`);
    if (!seen.current()) return;
    const cells = lens.layers.map((one) => lensAt(run, chunk, one, position)), isRead = cells.some((cell) => cell !== null);
    this.cells.hidden = !isRead;
    if (!isRead) return setText(this.reading, "The lens reads nothing at this position yet.");
    const colours = ramp("lens", dark), wide = this.cells.clientWidth / lens.layers.length >= 44;
    while (this.cells.children.length < lens.layers.length) {
      const index = this.cells.children.length;
      this.cells.append(h("button", { type: "button", onclick: () => this.seen.select({ layer: this.layers[index] }),
        onpointerenter: (/** @type {any} */ event) => this.seen.say(event.target.ariaLabel) }));
    }
    [...this.cells.children].forEach((/** @type {any} */ button, i) => {
      button.hidden = i > last;
      if (i > last) return;
      const cell = cells[i], [word, p] = cell?.top[0] ?? ["", NaN];
      const { background, ink } = Number.isNaN(p) ? { background: "", ink: "" } : paint(colours, p);
      button.style.background = background;
      button.style.color = ink;
      button.className = cell?.rank === 0 ? "dl-hit" : "";
      button.tabIndex = lens.layers[i] === layer ? 0 : -1;
      setText(button, wide ? readable(word) : cell?.rank === 0 ? "•" : "");
      button.setAttribute("aria-label", `layer ${lens.labels[i]}: ${lensText(cell)}`);
      button.setAttribute("aria-pressed", String(lens.layers[i] === layer));
    });
    const at = lens.layers.indexOf(layer), cell = cells[at] ?? null;
    const place = layer < model.n_layers ? `before block ${layer}` : "after the last block";
    setText(this.reading, !cell ? "" : `${place}: ${cell.top.slice(0, 2).map(([word, p]) => `${quoted(word)} ${number(p)}`).join(", ")}` +
      (cell.target === null || cell.rank < 1 ? "" : `; ${quoted(cell.target)} has rank ${cell.rank}`));
  }
}
