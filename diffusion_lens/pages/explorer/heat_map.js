/** A heat map on a canvas: it paints the cells in view only, and gives assistive technology one cell of a grid at a time. */

import { paint } from "./colours.js";
import { h } from "./elements.js";
import { clamp } from "./numbers.js";
import { shorten } from "./words.js";

/** @typedef {import("./types.js").Paint} Paint @typedef {import("./types.js").Cell} Cell @typedef {import("./types.js").Column} Column */

/** @typedef {Object} Shown  what a map draws
 * @property {string[]} rows  their names
 * @property {Column[]} columns
 * @property {Paint[]} colours
 * @property {(row: number, column: number) => Cell} cell
 * @property {(row: number, column: number) => string} label  a cell in words; asked of one cell at a time
 * @property {number|((row: number) => number)} [rowHeight]  in pixels */

const ANGLE = (55 * Math.PI) / 180; // of the heads of narrow columns
const NARROWEST = 15, STRAIGHT = 46, WIDEST = 76; // pixels of a column: least, least with level heads, and most
const WORDED = 40; // pixels from which on cells show their text
const MOST_IN_HEAD = 12; // characters of a slanted head
const LETTERS = 11, LETTERS_IN_CELL = 10.5; // their size in pixels

export class HeatMap {
  /** `corner` names the rows. `hover` gets a row of null in the heads, and two nulls when the pointer leaves.
   * @param {{label: string, corner: string, pick: (row: number, column: number) => void,
   *   hover: (row: number|null, column: number|null) => void}} given */
  constructor({ label, corner, pick, hover }) {
    this.corner = corner;
    this.pick = pick;
    /** @type {Shown} */ this.shown = { rows: [], columns: [], colours: [], cell: () => ({ value: NaN }), label: () => "" };
    /** @type {[number, number]} */ this.active = [0, 0];
    /** @type {[number, number]} */ this.marked = [-1, -1];
    this.hovered = -1;
    this.width = this.height = this.gutter = this.top = this.tail = this.cellWidth = 0;
    /** @type {number[]} */ this.tops = [0]; // upper edge of each row, and the end of the last one
    this.isSlanted = false;
    /** @type {Map<string, string>} */ this.fitted = new Map();
    this.canvas = h("canvas", { "aria-hidden": "true" });
    /** @type {CanvasRenderingContext2D} */ this.context = this.canvas.getContext("2d");
    this.bands = ["row", "column", "hover"].map((name) => h("div", { class: `dl-mark dl-mark-${name}`, hidden: true }));
    this.row = h("div", { role: "row" });
    this.grid = h("div", { role: "grid", "aria-label": label }, this.row);
    this.renew();
    this.frame = h("div", { class: "dl-map-frame" }, this.canvas, ...this.bands, this.grid);
    this.whole = h("div", {}, this.frame);
    this.element = h("div", { class: "dl-map" }, this.whole);
    this.element.heatMap = this;
    const over = (row, column) => {
      const key = `${row} ${column}`;
      if (key === this.over) return;
      this.over = key;
      hover(row, column);
    };
    this.frame.addEventListener("pointermove", (event) => over(...this.at(event)));
    this.frame.addEventListener("pointerleave", () => over(null, null));
    this.frame.addEventListener("click", (event) => {
      const [row, column] = this.at(event);
      if (row !== null || column !== null) this.go(row ?? this.active[0], column ?? this.active[1]);
    });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("focusin", () => this.reveal(...this.active));
    this.element.addEventListener("scroll", () => {
      this.painting ??= requestAnimationFrame(() => this.repaint());
    });
    new ResizeObserver(() => {
      const { clientWidth, clientHeight } = this.element;
      if (clientWidth === this.width && Math.min(clientHeight, this.end) === this.height) return;
      this.fit();
      this.reveal(...this.marked);
    }).observe(this.element);
  }

  /** @param {Shown} shown */
  draw(shown) {
    const before = this.width;
    this.shown = shown;
    this.grid.setAttribute("aria-rowcount", String(shown.rows.length));
    this.grid.setAttribute("aria-colcount", String(shown.columns.length));
    this.fit();
    if (this.width !== before) this.reveal(...this.marked); // shown since, and the observer finds nothing new
    this.activate(...this.active);
  }

  /** Put bands over a row and a column, and make their cell the one that the keyboard is at; -1 for none.
   * @param {number} row @param {number} column */
  mark(row, column) {
    const moved = row !== this.marked[0] || column !== this.marked[1];
    this.marked = [row, column];
    if (row >= 0 && column >= 0) this.activate(row, column);
    if (moved) this.reveal(row, column);
    this.place();
  }

  /** @param {number} column -1 for none */
  markHover(column) {
    this.hovered = column;
    this.place();
  }

  /** A cell in words. @param {number} row @param {number} column */
  label(row, column) {
    return this.shown.label(row, column);
  }

  /** The colours of a cell; null where it has no value. @param {number} row @param {number} column @returns {Paint|null} */
  paintOf(row, column) {
    const { value } = this.shown.cell(row, column);
    return Number.isNaN(value) ? null : paint(this.shown.colours, value);
  }

  /** Where a cell is on the screen, which may be outside of what the map shows. @param {number} row @param {number} column */
  rectangle(row, column) {
    const { left, top } = this.frame.getBoundingClientRect();
    return new DOMRect(left + this.x(column), top + this.y(row), this.cellWidth, this.heightOf(row));
  }

  // Left and upper edge of a cell inside the frame, and its height.
  x(/** @type {number} */ column) { return this.gutter + column * this.cellWidth - this.element.scrollLeft; }
  y(/** @type {number} */ row) { return this.top + this.tops[row] - this.element.scrollTop; }
  heightOf(/** @type {number} */ row) { return this.tops[row + 1] - this.tops[row]; }
  /** The height of heads and rows. */
  get end() { return this.top + this.tops.at(-1); }
  /** The row at a distance from the first one. */
  rowAt(/** @type {number} */ distance) { return this.tops.findLastIndex((top) => top <= distance); }

  /** Row and column under an event; null for those of the heads, of the names and of what is beside the cells.
   * @param {MouseEvent} event @returns {[number|null, number|null]} */
  at(event) {
    const { left, top } = this.frame.getBoundingClientRect(), { rows, columns } = this.shown;
    const x = event.clientX - left, y = event.clientY - top, inHeads = y < this.top;
    const leaning = inHeads && this.isSlanted ? (this.top - y) / Math.tan(ANGLE) - this.cellWidth / 2 : 0;
    const row = this.rowAt(y - this.y(0)), column = Math.floor((x - leaning - this.x(0)) / this.cellWidth);
    const hasColumn = x >= this.gutter && column >= 0 && column < columns.length;
    return [!inHeads && row < rows.length && (hasColumn || x < this.gutter) ? row : null, hasColumn && row < rows.length ? column : null];
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [r, c] = this.active, rows = this.shown.rows.length - 1, columns = this.shown.columns.length - 1;
    const next = { ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1], ArrowUp: [r - 1, c], ArrowDown: [r + 1, c],
      Home: [r, 0], End: [r, columns], PageUp: [0, c], PageDown: [rows, c], Enter: [r, c], " ": [r, c] }[event.key];
    if (!next) return;
    event.preventDefault();
    this.go(clamp(next[0], 0, rows), clamp(next[1], 0, columns));
  }

  /** Choose a cell. @param {number} row @param {number} column */
  go(row, column) {
    this.renew();
    this.activate(row, column);
    this.reveal(row, column);
    this.place();
    this.row.firstChild.focus({ preventScroll: false });
    this.pick(row, column);
  }

  /** A new element for the active cell: screen readers say a cell that gets the focus, not one whose name changes. */
  renew() {
    this.row.replaceChildren(h("div", { role: "gridcell", class: "dl-map-cell", tabindex: 0, "aria-selected": "true" }));
  }

  /** @param {number} row @param {number} column */
  activate(row, column) {
    const { rows, columns } = this.shown, cell = this.row.firstChild;
    if (!rows.length || !columns.length) return;
    this.active = [clamp(row, 0, rows.length - 1), clamp(column, 0, columns.length - 1)];
    this.row.setAttribute("aria-rowindex", String(this.active[0] + 1));
    cell.setAttribute("aria-colindex", String(this.active[1] + 1));
    cell.setAttribute("aria-label", this.label(this.active[0], this.active[1]));
  }

  /** Scroll inside the map until a cell and its neighbours are in view. @param {number} row @param {number} column */
  reveal(row, column) {
    const { element, cellWidth } = this, { scrollLeft, scrollTop } = element;
    const inside = (at, size, from, room) => (at - size < from ? at - size : at + 2 * size > from + room ? at + 2 * size - room : from);
    if (column >= 0) element.scrollLeft = inside(column * cellWidth, cellWidth, scrollLeft, this.width - this.gutter - this.tail);
    if (row >= 0) element.scrollTop = inside(this.tops[row], this.heightOf(row), scrollTop, this.height - this.top);
    if (element.scrollLeft !== scrollLeft || element.scrollTop !== scrollTop) this.repaint();
  }

  /** Measure columns and rows, and paint. A map that is hidden is painted when it is shown. */
  fit() {
    const { element, context, shown } = this, { rows, columns, rowHeight = 21 } = shown, width = element.clientWidth;
    this.width = width;
    if (!width) return;
    this.family = getComputedStyle(element).fontFamily;
    context.font = `${LETTERS}px ${this.family}`;
    const longest = (texts) => texts.reduce((most, text) => Math.max(most, context.measureText(text).width), 0);
    this.gutter = clamp(Math.ceil(longest([...rows, this.corner])) + 12, 34, width < 600 ? 84 : 140);
    const head = Math.ceil(longest(columns.map(({ text }) => shorten(text, MOST_IN_HEAD)))), n = Math.max(1, columns.length);
    const whole = Math.floor((width - this.gutter - 2) / n);
    this.isSlanted = whole < STRAIGHT && head + 4 > Math.max(whole, NARROWEST);
    this.tail = this.isSlanted ? Math.ceil(head * Math.cos(ANGLE)) : 2;
    const room = Math.floor((width - this.gutter - this.tail) / n);
    const cellWidth = clamp(room, NARROWEST, this.isSlanted ? STRAIGHT : WIDEST);
    if (cellWidth !== this.cellWidth) this.fitted.clear();
    this.cellWidth = cellWidth;
    this.top = this.isSlanted ? Math.ceil(head * Math.sin(ANGLE)) + 14 : 20;
    this.tops = [0];
    for (let r = 0; r < rows.length; r++) this.tops.push(this.tops[r] + (typeof rowHeight === "number" ? rowHeight : rowHeight(r)));
    this.whole.style.width = `${this.gutter + n * cellWidth + this.tail}px`;
    this.whole.style.height = `${this.end}px`;
    this.height = Math.min(element.clientHeight, this.end);
    this.repaint();
  }

  repaint() {
    cancelAnimationFrame(this.painting);
    this.painting = undefined;
    const { canvas, context, width, height, element, gutter, top, cellWidth } = this, { rows, columns } = this.shown;
    if (!width) return;
    const ratio = devicePixelRatio || 1, size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) {
      [canvas.width, canvas.height] = size;
      for (const { style } of [canvas, this.frame]) [style.width, style.height] = [`${width}px`, `${height}px`];
    }
    const style = getComputedStyle(element), read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.theme = { ink: read("ink"), soft: read("soft"), line: read("line"), warn: read("warn") };
    this.hatching = hatched(context, this.theme.line, ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.textBaseline = "middle";
    this.font = "";
    const first = [Math.max(0, this.rowAt(element.scrollTop)), Math.floor(element.scrollLeft / cellWidth)];
    const end = [Math.min(rows.length, this.rowAt(element.scrollTop + height - top) + 1),
      Math.min(columns.length, Math.ceil((element.scrollLeft + width - gutter) / cellWidth))];
    this.inside(gutter, top, () => {
      context.textAlign = "center";
      for (let r = first[0]; r < end[0]; r++) for (let c = first[1]; c < end[1]; c++) this.paintCell(r, c);
    });
    context.textAlign = "right";
    this.inside(0, top, () => {
      for (let r = first[0]; r < end[0]; r++) {
        const size = Math.min(LETTERS, this.heightOf(r) - 2);
        this.write(rows[r], gutter - 6, this.y(r) + this.heightOf(r) / 2, this.theme.soft, gutter - 8, `${size}px`);
      }
    });
    this.write(this.corner, gutter - 6, top - 10, this.theme.soft, gutter - 8);
    this.inside(gutter, 0, () => {
      context.textAlign = "center";
      for (let c = first[1]; c < end[1]; c++) this.paintHead(columns[c], this.x(c) + cellWidth / 2);
    });
    this.place();
  }

  /** Paint inside the part of the map right of x and below y. @param {number} x @param {number} y @param {() => void} job */
  inside(x, y, job) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, this.width - x, this.height - y);
    context.clip();
    job();
    context.restore();
    this.font = "";
  }

  /** @param {number} row @param {number} column */
  paintCell(row, column) {
    const { context, theme, shown } = this, { value, text = "", kind = "" } = shown.cell(row, column);
    const x = this.x(column), y = this.y(row), width = this.cellWidth - 1, height = this.heightOf(row) - 1;
    const missing = Number.isNaN(value), { background, ink } = missing ? { background: "", ink: theme.ink } : paint(shown.colours, value);
    if (!missing || !kind.includes("plain")) {
      context.fillStyle = missing ? this.hatching : background;
      context.fillRect(x, y, width, height);
    }
    const middle = [x + width / 2, y + height / 2], isWorded = text !== "" && this.cellWidth >= WORDED && height > LETTERS;
    const own = kind.includes("given") || (kind.includes("masked") && !kind.includes("guess")) ? theme.soft : ink;
    if (isWorded) {
      const weight = `${kind.includes("guess") ? "italic " : ""}${kind.includes("hit") ? "700 " : ""}`;
      this.write(text, middle[0], middle[1], own, width - 4, `${weight}${LETTERS_IN_CELL}px`);
    } else if (kind.includes("masked") || kind.includes("hit")) {
      context.fillStyle = own;
      context.beginPath();
      context.arc(middle[0], middle[1], kind.includes("hit") ? 2 : 1, 0, 7);
      context.fill();
    }
    if (kind.includes("commits")) {
      context.fillStyle = ink;
      context.fillRect(x, y, width, 2);
    }
    if (kind.includes("new")) {
      context.strokeStyle = theme.ink;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    }
    if (kind.includes("diff")) {
      context.fillStyle = theme.warn;
      context.beginPath();
      context.moveTo(x + width - 7, y);
      context.lineTo(x + width, y);
      context.lineTo(x + width, y + 7);
      context.fill();
    }
  }

  /** @param {Column} column @param {number} middle */
  paintHead({ text, muted = false }, middle) {
    const { context, theme, top, gutter } = this;
    const colour = muted ? theme.soft : theme.ink, font = `${muted ? "italic " : ""}${LETTERS}px`;
    if (!this.isSlanted) return this.write(text, middle, top - 10, colour, this.cellWidth - 3, font);
    if (middle < gutter) return;
    context.save();
    context.translate(middle, top - 5);
    context.rotate(-ANGLE);
    context.textAlign = "left";
    this.write(shorten(text, MOST_IN_HEAD), 0, 0, colour, Infinity, font);
    context.restore();
    this.font = "";
  }

  /** Write a text of one line, shortened to a width.
   * @param {string} text @param {number} x @param {number} y @param {string} colour @param {number} most */
  write(text, x, y, colour, most, font = `${LETTERS}px`) {
    const { context, fitted } = this, key = `${font} ${most} ${text}`, full = `${font} ${this.family}`;
    if (this.font !== full) context.font = this.font = full;
    context.fillStyle = colour;
    if (!fitted.has(key)) {
      let length = text.length;
      while (length > 1 && context.measureText(shorten(text, length)).width > most) length--;
      fitted.set(key, shorten(text, length));
    }
    context.fillText(fitted.get(key), x, y);
  }

  /** Put the bands and the active cell where they belong in the frame. */
  place() {
    const { gutter, top, cellWidth, active, marked: [row, column], hovered } = this, { rows, columns } = this.shown;
    const last = Math.min(this.width, this.x(columns.length)), bottom = Math.min(this.height, this.y(rows.length));
    const put = (/** @type {HTMLElement} */ band, isThere, left, right, up, down) => {
      band.hidden = !isThere || right - left < 3 || down - up < 3;
      band.style.cssText = `left:${left}px;top:${up}px;width:${right - left}px;height:${down - up}px`;
    };
    const over = (/** @type {HTMLElement} */ band, at) => put(band, at >= 0 && at < columns.length,
      Math.max(this.x(at) - 1, gutter), Math.min(this.x(at + 1), last), top, bottom);
    put(this.bands[0], row >= 0 && row < rows.length, 0, last, Math.max(this.y(row) - 1, top), Math.min(this.y(row + 1), bottom));
    over(this.bands[1], column);
    over(this.bands[2], hovered);
    const height = this.heightOf(active[0]) || 0; // none before the first rows
    const left = clamp(this.x(active[1]), gutter, Math.max(gutter, this.width - cellWidth));
    const up = clamp(this.y(active[0]), top, Math.max(top, this.height - height));
    this.row.firstChild.style.cssText = `left:${left}px;top:${up}px;width:${cellWidth - 1}px;height:${height - 1}px`;
  }
}

/** Diagonal lines, for cells without a value.
 * @param {CanvasRenderingContext2D} context @param {string} colour @param {number} ratio */
function hatched(context, colour, ratio) {
  const tile = document.createElement("canvas"), size = Math.round(6 * ratio), inner = tile.getContext("2d");
  tile.width = tile.height = size;
  inner.strokeStyle = colour;
  inner.lineWidth = ratio;
  for (const at of [-size, 0, size]) {
    inner.moveTo(at - 1, size + 1);
    inner.lineTo(at + size + 1, -1);
  }
  inner.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
