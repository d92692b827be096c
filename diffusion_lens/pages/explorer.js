/**
 * The explorer: one denoising run (or several) as maps that share their horizontal axis, the position.
 *
 * The module is the same in a file that contains its data, in a notebook (anywidget) and in the live page of
 * `diffusion-lens explore`. A `Source` gives it the manifest, chunks of numbers, and in the last two also new runs. Text
 * of models enters the document through `textContent` only.
 *
 * Types are written where a name does not tell: a step, position, layer or head is a number, a label a string, `run` and
 * `spec` are those of the manifest (`diffusion_lens/pages/views.py` and `diffusion_lens/explorer/spec.py` describe both).
 *
 * Sections: 1 types, 2 numbers from chunks, 3 colours, 4 words, 5 runs, 6 sources, 7 elements, 8 maps, 9 one run's maps,
 * 10 the inspector, 11 experiments, 12 the explorer, 13 places to mount it.
 */

// 1. Types ------------------------------------------------------------------------------------------------------------

/**
 * @typedef {{data: ArrayLike<number>, shape: number[], scale: number, none: number|null}} Table
 * @typedef {{header: any, tables: Record<string, Table>}} Chunk
 * @typedef {{live: boolean, manifest(): Promise<any>, chunk(run: string, name: string): Promise<ArrayBuffer>,
 *   act?(spec: any): Promise<any>, close?(): void}} Source
 * @typedef {{background: string, ink: string}} Paint
 * @typedef {{value: number, text?: string, label: string, kind?: string}} Cell  value: 0 to 1, NaN where there is none
 * @typedef {{run: string, compare: string, step: number, position: number, layer: number, head: number, query: number,
 *   colour: string, canvas: string, trace: string, wide: boolean}} State
 */

// 2. Numbers from chunks ----------------------------------------------------------------------------------------------

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
const NONE = { u1: 255, u2: 65535 };
const after8 = (n) => Math.ceil(n / 8) * 8;

/** The tables of a chunk: a JSON header, then arrays, each padded to 8 bytes. @returns {Chunk} */
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

/** The text of a token of a chunk, whose own words follow those of the run. */
const wordOf = (run, chunk, index) => run.words[index] ?? chunk.header.words?.[index - run.words.length] ?? null;

/** One number of a table; NaN where it contains none. */
export function read(/** @type {Table} */ table, ...index) {
  let at = 0;
  for (let axis = 0; axis < index.length; axis++) at = at * table.shape[axis] + index[axis];
  const stored = table.data[at];
  return stored === undefined || stored === table.none ? NaN : stored * table.scale;
}

/** Base64 of gzip, as in a page. @returns {Promise<ArrayBuffer>} */
async function inflate(base64) {
  const text = atob(base64.trim());
  const bytes = Uint8Array.from(text, (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// 3. Colours ----------------------------------------------------------------------------------------------------------

/** sRGB, 0 to 255, of a colour in OKLCH (Ottosson 2020, "A perceptual color space for image processing"). */
function oklch(L, C, hue) {
  const a = C * Math.cos((hue * Math.PI) / 180), b = C * Math.sin((hue * Math.PI) / 180);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const y = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, y)));
  });
}

/** Black or white, whichever contrasts more; the ratio is at least 4.5 on every colour. */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// One hue for each view; lightness is linear in the value, so equal differences look equal.
const HUES = { canvas: 235, lens: 295, attention: 160, trace: 45 };
/** @type {Map<string, Paint[]>} */ const RAMPS = new Map();

/** 256 colours of a view, from the background to saturated; "change" goes from blue over the background to red. */
export function ramp(view, dark) {
  const key = `${view} ${dark}`;
  if (!RAMPS.has(key)) {
    RAMPS.set(key, Array.from({ length: 256 }, (_, i) => {
      const x = view === "change" ? Math.abs(i - 127.5) / 127.5 : i / 255;
      const hue = view === "change" ? (i < 127.5 ? 250 : 30) : HUES[view];
      const rgb = dark ? oklch(0.25 + 0.58 * x, 0.015 + 0.095 * x, hue) : oklch(0.975 - 0.5 * x, 0.006 + 0.14 * x, hue);
      return { background: `rgb(${rgb.join(" ")})`, ink: inkOn(rgb) };
    }));
  }
  return RAMPS.get(key);
}

const paint = (/** @type {Paint[]} */ colours, value) =>
  colours[Math.min(255, Math.max(0, Math.round(value * 255)))];

// 4. Words and numbers ------------------------------------------------------------------------------------------------

const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}]/gu;
const escaped = (char) =>
  ({ "\n": "\\n", "\t": "\\t", "\r": "\\r" })[char] ?? `\\u{${char.codePointAt(0).toString(16)}}`;

/** A function of a word that remembers its results: a map asks for the same few words thousands of times. */
function remembered(compute) {
  const known = new Map();
  return (word) => {
    if (!known.has(word)) known.set(word, compute(word));
    return known.get(word);
  };
}

/** A token as a short label: without outer spaces, with invisible characters escaped. */
export const readable = remembered((word) => {
  const spaced = word.replaceAll("▁", " ");
  return (spaced.replace(/^ +| +$/g, "") || "␣".repeat(spaced.length)).replace(INVISIBLE, escaped);
});

/** A token in full: outer spaces are visible. */
export const quoted = remembered((word) => {
  const marks = (spaces) => "␣".repeat(spaces.length);
  return `“${word.replaceAll("▁", " ").replace(/^ +| +$/g, marks).replace(INVISIBLE, escaped)}”`;
});

const shorten = (text, most) =>
  text.length > most ? `${text.slice(0, most - 1)}…` : text;

/** A number with three decimals; "–" where there is none. */
export const number = (x) =>
  x === null || x === undefined || Number.isNaN(x) ? "–" : x.toFixed(3).replace("-", "−");
const signed = (x) => (x > 0 ? `+${number(x)}` : number(x));

/** The smallest of 1, 2, 5, 10, ... times a power of ten that is at least x, so that a scale has a round end. */
function roundUp(x) {
  if (!(x > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((digit) => digit * power).find((limit) => limit >= x * 0.9999);
}

/** Code with the placeholders of the current selection filled in. */
export const fillIn = (code, values) =>
  code.replace(/\{(step|layer|head|position|name)\}/g, (_, name) => String(values[name]));

// 5. Runs -------------------------------------------------------------------------------------------------------------

/** Steps that a run can show. Its canvases have one entry more, the final canvas, or contain the canvas of each step. */
const stepsOf = (run) => run.steps.slice(0, run.n_steps);
const lastStep = (run) => run.steps[run.n_steps - 1];
/** Index of the canvas that is shown at a step: the one after the step, where there is one. */
const canvasAt = (run, step) => run.steps.indexOf(step) + (run.canvases.length > run.n_steps ? 1 : 0);
const clamp = (x, low, high) =>
  Math.min(high, Math.max(low, x));
/** The model of a run; a page of traces alone knows no more than the layers that were traced. */
const modelOf = (manifest, run) => manifest.models[run.model] ??
  { n_layers: Math.max(0, ...run.traces.flatMap(({ layers }) => layers)) + 1, n_heads: 1, grows: false, masks: true, samplers: [] };
/** Text at a position after a step; null where it is masked or not reached. */
const wordAfter = (run, step, position) =>
  run.words[run.canvases[canvasAt(run, step)]?.[position]] ?? null;
/** Whether the token at a position came with the prompt, and was not masked again. */
const isGiven = (run, position) => run.given[position] && !(run.revealed_at?.[position] >= 0);
const finalWord = (run, position) => wordAfter(run, lastStep(run), position);

/** The token whose rank and probability the lens reads at a position: the answer's, or the one that the run wrote. */
export function targetAt(run, position) {
  const { targets, positions } = run.lens ?? {};
  if (targets) return run.words[targets[positions.indexOf(position)]] ?? null;
  const at = run.answer ? run.answer.positions.indexOf(position) : -1;
  return at >= 0 ? run.words[run.answer.words[at]] : finalWord(run, position);
}

/** Where two runs differ: positions of the final canvas, with the first step, and steps whose canvases differ. */
export function differences(run, base) {
  const tokens = [], steps = [];
  const positions = Math.max(run.canvases[0].length, base.canvases[0].length);
  for (const step of stepsOf(run).filter((own) => stepsOf(base).includes(own))) {
    for (let position = 0; position < positions; position++) {
      if (wordAfter(run, step, position) !== wordAfter(base, step, position)) { steps.push(step); break; }
    }
  }
  for (let position = 0; position < positions; position++) {
    const was = finalWord(base, position), is = finalWord(run, position);
    if (was !== is) tokens.push({ position, was, is });
  }
  return { tokens, steps };
}

const plural = (n, noun) => (n === 1 ? `1 ${noun} differs` : `${n || "No"} ${noun}s differ`);
const sites = { resid: "residual stream", attn: "attention", mlp: "MLP", head: "head" };

/** Numbers in words, runs of them as ranges: "step 3", "steps 0–4, 7". */
export function listed(noun, numbers) {
  const ranges = [];
  for (const n of numbers) {
    if (ranges.length && ranges.at(-1)[1] === n - 1) ranges.at(-1)[1] = n;
    else ranges.push([n, n]);
  }
  const texts = ranges.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  return `${noun}${numbers.length > 1 ? "s" : ""} ${texts.join(", ")}`;
}

/** The name of a run in a list: its label, with its prompt where others have the same label. */
function nameIn(runs, run) {
  const alike = runs.filter(({ label }) => label === run.label);
  return alike.length < 2 ? run.label : `${run.label} ${alike.indexOf(run) + 1}: ${shorten(run.prompt, 40)}`;
}

/** An intervention in words. */
export function describe(edit, runs = []) {
  if (edit.what === "force") {
    return `position ${edit.position} ${edit.token === null ? "masked" : `set to ${quoted(edit.token)}`} before step ${edit.step}`;
  }
  const site = edit.site === "head" ? `head ${edit.head}` : sites[edit.site];
  const source = runs.find((run) => run.id === edit.source)?.label ?? "the run without interventions";
  const change = { zero: "set to zero", mean: `set to its mean in ${source}`, patch: `patched from ${source}` }[edit.what];
  const at = (noun, numbers) => (numbers === null ? `all ${noun}s` : listed(noun, numbers));
  return `block ${edit.layer} ${site} ${change} at ${at("position", edit.positions)}, ${at("step", edit.steps)}`;
}

/** What the steps of a run predicted, by step and position. */
export class Predicted {
  constructor(run, /** @type {Chunk} */ chunk) {
    Object.assign(this, { run, chunk, k: run.predictions.k });
    this.rows = new Map();
    const { step, position, entropy } = chunk.tables, n = (this.n = run.canvases[0].length);
    step.data.forEach((one, i) => this.rows.set(one * n + position.data[i], i));
    this.highest = roundUp(entropy.data.reduce((a, b) => (b > a ? b : a), 0));
  }

  /** The likeliest tokens as [text, probability], and their numbers; null where the step predicted nothing. */
  at(step, position) {
    const row = this.rows.get(step * this.n + position);
    if (row === undefined) return null;
    const { top_tokens, top_probabilities, entropy } = this.chunk.tables;
    const top = likeliest(this.run, this.chunk, top_tokens, top_probabilities, this.k, row);
    const [first, second] = top.map(([, p]) => p);
    return { top, probability: first, margin: second === undefined ? NaN : first - second, entropy: read(entropy, row) };
  }

  /** The probability of the token that the run wrote at a position; NaN where it is none of the likeliest. */
  written(step, position) {
    const row = this.rows.get(step * this.n + position), final = this.run.canvases.at(-1)[position];
    const { top_tokens, top_probabilities } = this.chunk.tables;
    for (let i = 0; row !== undefined && i < this.k; i++) {
      if (read(top_tokens, row, i) === final) return read(top_probabilities, row, i);
    }
    return NaN;
  }

  /** The step from which on the likeliest token is the one that was written; null for none. */
  committed(position) {
    const step = this.run.predictions.committed?.[position] ?? -1;
    return step < 0 ? null : step;
  }
}

/** What a step predicted, for the status line and screen readers. */
function predictedText({ top: [[word, p]], margin, entropy }) {
  const second = Number.isNaN(margin) ? "" : `, margin ${number(margin)}`;
  return `predicted ${quoted(word)} ${number(p)}${second}, entropy ${number(entropy)} nats`;
}

// 6. Sources ----------------------------------------------------------------------------------------------------------

/** Data inside the page. @returns {Source} */
function fileSource() {
  return {
    live: false,
    manifest: async () => JSON.parse(document.getElementById("manifest").textContent),
    async chunk(run, name) {
      const selector = `script[data-run="${CSS.escape(run)}"][data-chunk="${CSS.escape(name)}"]`;
      const script = document.querySelector(selector);
      if (!script) throw new Error(`This page does not contain ${name} of the run ${run}.`);
      return inflate(script.textContent);
    },
  };
}

/** Data from the server of this page, which demands the token in the page's own address. @returns {Source} */
function liveSource() {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const ask = async (path, options = {}) => {
    const headers = { "X-Token": token, "Content-Type": "application/json" };
    const answer = await fetch(path, { ...options, headers }).catch(() => {
      throw new Error("The server does not answer. Is diffusion-lens explore still running?");
    });
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(error ?? `The server said ${answer.status}.`), { unknown: answer.status === 404 });
  };
  return {
    live: true,
    manifest: async () => (await ask("api/manifest")).json(),
    chunk: async (run, name) => (await ask(`api/chunk?${new URLSearchParams({ run, name })}`)).arrayBuffer(),
    act: async (spec) => (await ask("api/run", { method: "POST", body: JSON.stringify(spec) })).json(),
  };
}

/** Data from the notebook's kernel. @returns {Source} */
function widgetSource(model) {
  /** @type {Map<number, [(value: any) => void, (error: Error) => void]>} */ const waiting = new Map();
  let last = 0;
  const listen = (message, buffers) => {
    const [resolve, reject] = waiting.get(message.id) ?? [];
    waiting.delete(message.id);
    if (!resolve) return;
    if (!message.ok) return reject(Object.assign(new Error(message.error), { unknown: message.unknown }));
    const bytes = buffers?.[0];
    resolve(bytes ? bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) : message.run);
  };
  model.on("msg:custom", listen);
  const ask = (question) => new Promise((resolve, reject) => {
    waiting.set(++last, [resolve, reject]);
    model.send({ id: last, ...question });
  });
  return {
    live: Boolean(model.get("live")),
    manifest: async () => model.get("manifest"),
    chunk: (run, name) => ask({ ask: "chunk", run, name }),
    act: (spec) => ask({ ask: "run", spec }),
    close: () => model.off("msg:custom", listen),
  };
}

// 7. Elements ---------------------------------------------------------------------------------------------------------

/** An element; strings among the children become text, `on...` attributes listeners. @returns {any} */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const button = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);
const codeButton = (onclick) => button("as Python", onclick, { class: "dl-code" });
const ids = ((n) => () => `dl-${++n}`)(0);

/** A labelled control. */
function field(label, control, kind = "") {
  control.id ||= ids();
  return h("span", { class: `dl-field ${kind}` }, h("label", { for: control.id }, label), control);
}

/** Fill a `<select>` with [value, text] pairs, if they changed, and choose one. */
function fillSelect(select, options, value) {
  const key = JSON.stringify(options);
  if (select.dataset.key !== key) {
    select.replaceChildren(...options.map(([option, text]) => h("option", { value: option }, text)));
    select.dataset.key = key;
  }
  select.value = String(value);
}

/** Set text only where it changes, which is much cheaper for thousands of cells. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A colour scale with the numbers of its ends; `stops` are the values that it shows. */
function drawLegend(box, /** @type {Paint[]} */ colours, ends, stops = [0, 0.25, 0.5, 0.75, 1]) {
  const shown = stops.map((x) => paint(colours, x).background).join(", ");
  if (!box.firstChild) box.append(h("span"), h("span"), h("i"), h("span"));
  const [name, low, bar, high] = (box.children);
  setText(name, ends.name);
  setText(low, ends.low);
  setText(high, ends.high);
  bar.style.background = `linear-gradient(90deg, ${shown})`;
}

/** A small line of numbers by step, with gaps at NaN; `marks` are [step, class of a vertical line]. */
function drawCourse(box, steps, values, highest, marks, label) {
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const x = (i) => (steps.length < 2 ? 100 : 4 + (192 * i) / (steps.length - 1)), y = (value) => 38 - 34 * (value / highest);
  const path = values.map((value, i) => (Number.isNaN(value) ? "" :
    `${i > 0 && !Number.isNaN(values[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}h0`)).join("");
  const picture = svg("svg", { viewBox: "0 0 200 42", preserveAspectRatio: "none", role: "img", "aria-label": label });
  picture.append(...marks.filter(([step]) => steps.includes(step)).map(([step, kind]) =>
    svg("path", { class: kind, d: `M${x(steps.indexOf(step)).toFixed(1)} 2V40` })), svg("path", { class: "dl-line", d: path }));
  box.replaceChildren(h("span", {}, String(highest)), picture, h("span", {}, "0"),
    h("span", {}, h("span", {}, `${steps[0]}`), h("span", {}, "step"), h("span", {}, `${steps.at(-1)}`)));
}

/** Likeliest tokens as rows with bars; `most` rows always, so that nothing below them moves. */
function drawBars(list, rows, most, marked) {
  while (list.children.length < most) list.append(h("li", {}, h("b"), h("i"), h("span")));
  [...list.children].forEach((row, i) => {
    const [word, p] = rows[i] ?? ["", NaN];
    row.hidden = i >= most;
    setText(row.children[0], rows[i] ? quoted(word) : "");
    row.children[0].title = rows[i] ? quoted(word) : "";
    row.children[1].style.setProperty("--p", String(p || 0));
    setText(row.children[2], rows[i] ? number(p) : "");
    row.classList.toggle("dl-target", rows[i] !== undefined && word === marked);
  });
}

// 8. Maps -------------------------------------------------------------------------------------------------------------

/** A map of coloured cells that arrow keys move through. Its cells are reused while its size stays. */
class CellMap {
  /** `corner` names the rows; `hover` gets a row of null in the head, and null alone when the pointer leaves. */
  constructor({ label, corner, pick, hover }) {
    this.corner = corner;
    this.pick = pick;
    this.hovered = hover;
    this.active = [0, 0];
    this.size = "";
    /** @type {any[][]} */ this.cells = [];
    this.bands = ["row", "column", "hover"].map((name) => h("div", { class: `dl-band dl-band-${name}`, hidden: true }));
    this.body = h("div", { role: "grid", "aria-label": label });
    this.element = h("div", { class: "dl-map" }, this.body, ...this.bands);
    this.element.addEventListener("click", (event) => this.at(event, (r, c) => this.go(r ?? this.active[0], c)));
    this.element.addEventListener("pointerover", (event) => this.at(event, hover));
    this.element.addEventListener("pointerleave", () => hover(null));
    this.body.addEventListener("keydown", (event) => this.key(event));
  }

  /** Call a function with the row (null in the head) and column under an event. */
  at(event, /** @type {(row: any, column: any) => void} */ then) {
    const cell = event.target.closest("[data-column]");
    if (cell) then(cell.dataset.row === undefined ? null : Number(cell.dataset.row), Number(cell.dataset.column));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [r, c] = this.active, rows = this.cells.length - 1, columns = this.cells[0].length - 1;
    const next = { ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1], ArrowUp: [r - 1, c], ArrowDown: [r + 1, c],
      Home: [r, 0], End: [r, columns], PageUp: [0, c], PageDown: [rows, c], Enter: [r, c], " ": [r, c] }[event.key];
    if (!next) return;
    event.preventDefault();
    this.go(clamp(next[0], 0, rows), clamp(next[1], 0, columns));
  }

  go(row, column) {
    this.activate(row, column);
    this.cells[row][column].focus({ preventScroll: false });
    this.pick(row, column);
  }

  activate(row, column) {
    const before = this.cells[this.active[0]]?.[this.active[1]];
    if (before) { before.tabIndex = -1; before.removeAttribute("aria-selected"); }
    const now = this.cells[row]?.[column];
    if (!now) return;
    this.active = [row, column];
    now.tabIndex = 0;
    now.setAttribute("aria-selected", "true");
  }

  /** Build the elements for a number of rows and columns. */
  build(rows, columns) {
    if (this.size === `${rows} ${columns}`) return;
    this.size = `${rows} ${columns}`;
    const row = (children) => h("div", { role: "row", class: "dl-row" }, ...children);
    const each = (n, /** @type {(i: number) => any} */ make) => Array.from({ length: n }, (_, i) => make(i));
    this.heads = each(columns, (c) => h("div", { role: "columnheader", class: "dl-head", "data-column": c }, h("span")));
    this.names = each(rows, () => h("div", { role: "rowheader", class: "dl-name" }));
    const cell = (r, c) => h("div", { role: "gridcell", tabindex: -1, "data-row": r, "data-column": c });
    this.cells = each(rows, (r) => each(columns, (c) => cell(r, c)));
    const corner = h("div", { role: "columnheader", class: "dl-head dl-corner" }, this.corner);
    const body = document.createDocumentFragment();
    body.append(row([corner, ...this.heads]), ...each(rows, (r) => row([this.names[r], ...this.cells[r]])));
    this.body.replaceChildren(body);
    this.element.style.setProperty("--columns", String(columns));
    this.element.style.setProperty("--rows", String(rows));
    this.active = [0, 0];
    this.cells[0]?.[0] && this.activate(0, 0);
  }

  /**
   * @param {string[]} rows
   * @param {{text: string, title: string, muted?: boolean}[]} columns
   * @param {Paint[]} colours
   * @param {(row: number, column: number) => Cell} cell
   */
  draw(rows, columns, colours, cell) {
    this.build(rows.length, columns.length);
    this.drawHeads(columns);
    rows.forEach((name, r) => setText(this.names[r], name));
    this.cells.forEach((line, r) => line.forEach((element, c) => {
      const { value, text = "", label, kind = "" } = cell(r, c);
      const missing = Number.isNaN(value);
      const { background, ink } = missing ? { background: "", ink: "" } : paint(colours, value);
      // Comparing with what was drawn is much cheaper than drawing it again.
      if (element.drawn !== background) Object.assign(element.style, { backgroundColor: background, color: ink });
      element.drawn = background;
      const name = `dl-cell ${missing ? "dl-none " : ""}${kind}`;
      if (element.className !== name) element.className = name;
      setText(element, text);
      if (element.ariaLabel !== label) element.ariaLabel = label;
    }));
  }

  drawHeads(columns) {
    columns.forEach(({ text, title, muted }, c) => {
      setText(this.heads[c].firstChild, text);
      this.heads[c].setAttribute("aria-label", title);
      this.heads[c].className = muted ? "dl-head dl-muted" : "dl-head";
    });
  }

  /** Put a band over a row or column; -1 for none. */
  mark(row, column) {
    const [rowBand, columnBand] = this.bands;
    rowBand.hidden = row < 0;
    columnBand.hidden = column < 0;
    rowBand.style.setProperty("--at", String(row));
    columnBand.style.setProperty("--at", String(column));
    if (row >= 0 && column >= 0) this.activate(row, column);
  }

  markHover(column) {
    this.bands[2].hidden = column < 0 || column >= (this.cells[0]?.length ?? 0);
    this.bands[2].style.setProperty("--at", String(column));
  }
}

// 9. One run's maps ---------------------------------------------------------------------------------------------------

const CANVAS_COLOURS = {
  confidence: "confidence when revealed", entropy: "entropy (nats)", probability: "p(likeliest)",
  margin: "p(first) − p(second)", commitment: "commitment",
};
const LENS_COLOURS = { top: "p(likeliest)", probability: "p(target)", rank: "rank of target", entropy: "entropy (nats)" };
const COMMITTED = 0.45; // colour of what is decided, on the scale from 0 to 1
const CHANGES = { "change of probability": "probability", "change of entropy": "entropy" };

/** The `k` likeliest tokens of a place in two tables, as [text, probability]. */
function likeliest(run, chunk, tokens, probabilities, k, ...place) {
  const one = (i) => [wordOf(run, chunk, read(tokens, ...place, i)), read(probabilities, ...place, i)];
  const rows = Array.from({ length: k }, (_, i) => one(i));
  return rows.filter(([word, p]) => word !== null && !Number.isNaN(p));
}

/** The lens's numbers for one cell, or null where nothing was read. */
export function lensAt(run, /** @type {Chunk} */ chunk, layer, position) {
  const row = run.lens.layers.indexOf(layer), column = run.lens.positions.indexOf(position);
  const { top_tokens, top_probabilities, entropy, rank, probability } = chunk.tables;
  if (row < 0 || column < 0 || Number.isNaN(read(entropy, row, column))) return null;
  const top = likeliest(run, chunk, top_tokens, top_probabilities, run.lens.k, row, column);
  const numbers = { entropy: read(entropy, row, column), rank: read(rank, row, column), probability: read(probability, row, column) };
  return { top, ...numbers, target: targetAt(run, position) };
}

/** One number of the lens, as its colours show it: ranks by their logarithm. */
function lensNumber(run, /** @type {Chunk} */ { tables }, quantity, layer, position) {
  const row = run.lens.layers.indexOf(layer), column = run.lens.positions.indexOf(position);
  if (quantity === "top") return read(tables.top_probabilities, row, column, 0);
  const x = read(tables[quantity], row, column);
  return quantity !== "rank" ? x : x < 0 ? NaN : Math.log10(x + 1);
}

/** Change of a number against the base run; NaN where there is none, or where the two have another target. */
function lensChange(run, chunk, base, baseChunk, quantity, layer, position) {
  const own = lensAt(run, chunk, layer, position), other = lensAt(base, baseChunk, layer, position);
  if (!own || !other || (quantity === "probability" && own.target !== other.target)) return NaN;
  return own[quantity] - other[quantity];
}

/** What a lens cell says, for the status line and screen readers. */
function lensText(cell) {
  if (!cell) return "not read";
  const target = cell.target === null || cell.rank < 0 ? "no target" :
    `target ${quoted(cell.target)} rank ${cell.rank}, p ${number(cell.probability)}`;
  const [[word, p] = ["", NaN]] = cell.top;
  return `${quoted(word)} ${number(p)}; ${target}; entropy ${number(cell.entropy)} nats`;
}

/** What the canvas shows and what the other views read; nothing for a run that has only the canvases which were read. */
function readingText(run, layer) {
  if (run.canvases.length === run.n_steps) return "";
  const warned = run.warnings?.length ? `Warning: ${run.warnings.join(" ")}. ` : "";
  const predicted = layer === "confidence" ? "" :
    " Colours of the canvas show what a step predicted there, and words in italics are its likeliest tokens, not yet written.";
  const commits = layer !== "commitment" ? "" :
    " An edge marks the first step from which on the likeliest token is the one that is written in the end.";
  const shown = `${warned}Text and canvas show what each step has written; tokens in frames are new.${predicted}${commits}`;
  const views = [["lens", run.lens], ["trace", run.traces.length], ["attention", run.attention], ["predictions", run.predictions]];
  const others = views.filter(([, view]) => view).map(([name]) => name);
  if (!others.length) return shown;
  const names = others.join(", ").replace(/^./, (first) => first.toUpperCase()).replace(/, (\w+)$/, " and $1");
  const read = `${names} at a step read the canvas before it, where the columns in italics are not yet written.`;
  const branches = "The run is guided: lens and attention are those of the conditional branch, predictions, confidence and traces those after guidance.";
  return `${shown} ${read}${run.guided ? ` ${branches}` : ""}`;
}

/** The maps of one run, one under another, with a common horizontal axis. */
class RunPanel {
  constructor(/** @type {Explorer} */ explorer) {
    this.explorer = explorer;
    this.run = null;
    this.cell = 0;
    this.views = {};
    this.title = h("h2", {});
    this.text = h("div", { class: "dl-text", role: "group", "aria-label": "Text" });
    this.changes = h("div", { class: "dl-changes" });
    this.scroll = h("div", { class: "dl-scroll" });
    this.reading = h("p", { class: "dl-reading" });
    this.element = h("section", { class: "dl-run" }, this.title, this.text, this.changes, this.reading, this.scroll);
    this.element.addEventListener("pointerdown", () => explorer.activatePanel(this));
    this.element.addEventListener("focusin", () => explorer.activatePanel(this));
    this.text.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.pick({ position: clamp(this.position + step, 0, this.nPositions - 1) });
      this.text.children[this.position].focus();
    });
    this.text.addEventListener("pointerleave", () => explorer.hover(this, null));

    this.addView("canvas", "Canvas by step", "step", (r, c) => ({ step: this.run.steps[r], position: c }));
    this.addView("lens", "Lens", "layer", (r, c) => ({ layer: this.lensLayers()[r], position: c }));
    this.addView("trace", "Causal trace", "layer", (r, c) => ({ layer: this.traceLayers()[r], position: c }));
    this.addView("attention", "Attention", "query", (r, c) => ({ position: this.queries[r], key: c }));
    const chooseTrace = () => explorer.set({ trace: this.traceSelect.value });
    this.traceSelect = h("select", { "aria-label": "Restored states", onchange: chooseTrace });
    this.views.trace.tools.prepend(this.traceSelect);
    this.heads = h("div", { class: "dl-heads", role: "group", "aria-label": "Heads" });
    this.views.attention.map.element.before(this.heads);
    this.resizing = new ResizeObserver(() => this.fit() && explorer.render());
    this.resizing.observe(this.scroll);
  }

  addView(name, title, corner, /** @type {(r: number, c: number) => any} */ chosen) {
    const { explorer } = this;
    const map = new CellMap({
      label: title, corner,
      pick: async (r, c) => {
        await this.pick(chosen(r, c));
        explorer.say(map.cells[r]?.[c]?.getAttribute("aria-label") ?? "");
      },
      // In the head the row is null; outside the map the column is undefined too.
      hover: (r, c) => explorer.hover(this, c === undefined ? null :
        r === null ? { column: c, position: c } : { column: c, label: map.cells[r][c].ariaLabel, ...chosen(r, c) }),
    });
    const heading = h("h3", {}, title), note = h("p", { class: "dl-note", hidden: true });
    const legend = h("span", { class: "dl-legend" });
    const code = codeButton(() => explorer.showCode(this, name === "canvas" && this.layer !== "confidence" ? "predictions" : name, title));
    const tools = h("span", { class: "dl-tools" }, legend, code);
    const section = h("section", { class: `dl-view dl-${name}`, "aria-label": title },
      h("header", {}, heading, tools), note, map.element);
    this.views[name] = { map, heading, note, legend, tools, code, section, key: "" };
    this.scroll.append(section);
  }

  get nPositions() { return this.run.canvases[0].length; }
  get position() { return clamp(this.explorer.state.position, 0, this.nPositions - 1); }
  get step() { return stepsOf(this.run).findLast((step) => step <= this.explorer.state.step) ?? this.run.steps[0]; }
  get block() { return clamp(this.explorer.state.layer, 0, this.model.n_layers - 1); }
  /** What the colours of the canvas show: what there is of it in this run. */
  get layer() { return this.layers().includes(this.explorer.state.canvas) ? this.explorer.state.canvas : "confidence"; }
  get head() { return clamp(this.explorer.state.head, 0, this.model.n_heads - 1); }
  get model() { return modelOf(this.explorer.manifest, this.run); }
  get base() { return this.explorer.runs.find((run) => run.id === this.run.base) ?? null; }
  get trace() { return this.run.traces.find((trace) => trace.name === this.explorer.state.trace) ?? this.run.traces[0] ?? null; }
  /** Queries of the attention map: of a long canvas, those around the selected position. */
  get queries() {
    const n = this.nPositions, most = 64;
    const from = n <= 96 ? 0 : clamp(Math.floor(this.position / 32) * 32 - 16, 0, n - most);
    return Array.from({ length: n <= 96 ? n : most }, (_, i) => from + i);
  }
  layers() {
    const { k, committed } = this.run.predictions ?? { k: 0 };
    return Object.keys(CANVAS_COLOURS).filter((name) => (
      { confidence: true, margin: k > 1, commitment: Boolean(committed) }[name] ?? k > 0));
  }
  lensLayers() { return [...this.run.lens.layers].reverse(); }
  traceLayers() { return [...this.trace.layers].reverse(); }
  pick(change) {
    this.explorer.activatePanel(this);
    return this.explorer.set(change);
  }

  /** The selected position in words. */
  async summary() {
    const { run, step, position } = this, { lens } = run, { layer } = this.explorer.state;
    const row = lens ? lens.layers.indexOf(layer) : -1;
    const about = this.layer === "confidence" ? this.stateAt(step, position) :
      this.layerCell(await this.explorer.predicted(run), step, position).label;
    if (row < 0 || !lens.steps.includes(step)) return about;
    const chunk = await this.explorer.chunk(run, `lens/${step}`);
    return `${about} · lens ${lens.labels[row]}: ${lensText(lensAt(run, chunk, layer, position))}`;
  }

  /** Measure the columns. Returns whether their width has changed. */
  fit() {
    if (!this.run) return false;
    const width = this.scroll.clientWidth, n = this.nPositions;
    this.narrow = width < 600;
    const gutter = this.narrow ? 64 : 76;
    const wide = this.explorer.state.wide;
    const whole = Math.floor((width - gutter - 2) / n);
    const slanted = !wide && whole < 46;
    const cell = wide ? 64 : slanted ? clamp(Math.floor((width - gutter - 38) / n), 14, 46) : Math.min(whole, 76);
    const style = `--view:${width}px;--gutter:${gutter}px;--cell:${cell}px`;
    // Custom properties are inherited: to set them, even to what they are, costs the styles of thousands of cells.
    if (this.sizes !== style) this.scroll.style.cssText = this.sizes = style;
    this.scroll.classList.toggle("dl-slanted", slanted);
    const changed = cell !== this.cell;
    this.cell = cell;
    this.inCells = cell >= 40; // whether cells are wide enough for text
    this.scroll.classList.toggle("dl-worded", this.inCells);
    return changed;
  }

  columns() {
    return Array.from({ length: this.nPositions }, (_, p) => {
      const word = finalWord(this.run, p) ?? "·";
      const text = shorten(readable(word), this.scroll.classList.contains("dl-slanted") ? 11 : Math.floor(this.cell / 6));
      return { text, title: `position ${p}, ${quoted(word)}`, muted: this.run.canvases[this.run.steps.indexOf(this.step)][p] < 0 };
    });
  }

  show(run) {
    if (this.run === run) return;
    this.run = run;
    this.text.replaceChildren(...run.canvases[0].map((_, p) => h("button", { type: "button",
      onclick: () => this.pick({ position: p }),
      onpointerenter: () => this.explorer.hover(this, { column: p, position: p, label: this.text.children[p].ariaLabel }),
    })));
    for (const view of Object.values(this.views)) view.key = "";
    this.fit();
  }

  render() {
    setText(this.title, this.run.label);
    setText(this.reading, readingText(this.run, this.layer));
    for (const [name, { code }] of Object.entries(this.views)) code.hidden = !this.run.python?.[name];
    this.drawText();
    this.drawChanges();
    const jobs = [this.drawCanvas(), this.drawLens(), this.drawTrace(), this.drawAttention()];
    this.markSelection();
    return Promise.all(jobs);
  }

  markSelection() {
    const { run, step, position, views } = this, { layer, key } = this.explorer.state;
    views.canvas.map.mark(run.steps.indexOf(step), position);
    if (run.lens) views.lens.map.mark(this.lensLayers().indexOf(layer), position);
    if (this.trace) views.trace.map.mark(this.traceLayers().indexOf(this.block), position);
    views.attention.map.mark(this.queries.indexOf(position), clamp(key ?? position, 0, this.nPositions - 1));
    views.attention.map.bands[1].style.setProperty("--at", String(position));
  }

  markHover(column) {
    for (const { map } of Object.values(this.views)) map.markHover(column);
    [...this.text.children].forEach((token, p) => token.classList.toggle("dl-hover", p === column));
  }

  /** What happened at a position up to a step. */
  stateAt(step, position) {
    const { run } = this, word = wordAfter(run, step, position);
    const start = `step ${step}, position ${position}, `;
    if (!run.real[position]) return `${start}padding`;
    const unopened = step + 1 < (run.opened_at?.[position] ?? 0);
    if (word === null) return `${start}${unopened ? "in a block that is not open yet" : this.model.grows ? "not reached" : "masked"}`;
    const changed = this.differs(step, position) ? `; the base run has ${this.baseWord(step, position)}` : "";
    if (isGiven(run, position)) return `${start}${quoted(word)}, given${changed}`;
    const confidence = run.confidence ? ` with confidence ${number(run.confidence[position])}` : "";
    const at = run.revealed_at?.[position];
    if (at === undefined) return `${start}${quoted(word)}${changed}`;
    if (this.replaced(step, position)) return `${start}${quoted(word)}, set by an intervention in place of the token of step ${at}${changed}`;
    return `${start}${quoted(word)}, ${at < 0 || at > step ? "not yet final" : `${this.model.masks || this.model.grows ? "revealed" : "last changed"} at step ${at}${confidence}`}${changed}`;
  }

  /** Whether a token is another one than was revealed there; the confidence is then not this token's. */
  replaced(step, position) {
    const at = this.run.revealed_at?.[position] ?? -1;
    return at >= 0 && at < step && wordAfter(this.run, at, position) !== wordAfter(this.run, step, position);
  }

  baseWord(step, position) {
    const word = wordAfter(this.base, step, position);
    return word === null ? "a mask" : quoted(word);
  }

  differs(step, position) {
    return this.base !== null && stepsOf(this.base).includes(step) &&
      wordAfter(this.run, step, position) !== wordAfter(this.base, step, position);
  }

  canvasCell(step, p) {
    const { run } = this, word = wordAfter(run, step, p), masked = word === null;
    const kind = [masked ? "dl-masked" : "", isGiven(run, p) || !run.real[p] ? "dl-given" : "", run.revealed_at?.[p] === step ? "dl-new" : "",
      this.differs(step, p) ? "dl-diff" : ""].filter(Boolean).join(" ");
    const value = masked || isGiven(run, p) || this.replaced(step, p) ? 0 : run.confidence ? run.confidence[p] : 0.25;
    return { value: value || 0, text: masked || !this.inCells ? "" : readable(word), label: this.stateAt(step, p), kind };
  }

  /** A cell of the canvas in the colours of what the step predicted there. */
  layerCell(/** @type {Predicted} */ predicted, step, p) {
    const { layer } = this, seen = predicted.at(step, p), { text, label, kind } = this.canvasCell(step, p);
    const at = predicted.committed(p), word = seen?.top[0]?.[0];
    const isGuess = seen !== null && wordAfter(this.run, step, p) === null;
    const value = layer === "commitment" ? (at !== null && step >= at ? COMMITTED : seen ? 0 : NaN) : !seen ? NaN :
      layer === "entropy" ? 1 - seen.entropy / predicted.highest : seen[layer];
    const commits = at === null ? "" : step === at ? "; commits here" : `; committed since step ${at}`;
    return {
      value, text: isGuess && this.inCells ? readable(word) : text,
      label: `${label}${seen ? `; ${predictedText(seen)}` : ""}${at !== null && step >= at ? commits : ""}`,
      kind: [kind, isGuess ? "dl-guess" : "", Number.isNaN(value) ? "dl-plain" : "",
        layer === "commitment" && step === at ? "dl-commits" : ""].filter(Boolean).join(" "),
    };
  }

  drawText() {
    const { run, step } = this, colours = this.explorer.colours("canvas");
    [...this.text.children].forEach((token, p) => {
      const { value, label, kind } = this.canvasCell(step, p), word = wordAfter(run, step, p);
      const { background, ink } = isGiven(run, p) || word === null ? { background: "", ink: "" } : paint(colours, value);
      token.className = `${kind} ${/^[ ▁]/.test(word ?? " ") ? "dl-spaced" : ""}`;
      token.style.background = background;
      token.style.color = ink;
      token.hidden = !run.real[p];
      token.tabIndex = p === this.position ? 0 : -1;
      setText(token, word === null ? "·" : readable(word));
      token.setAttribute("aria-label", label);
      token.setAttribute("aria-pressed", String(p === this.position));
    });
  }

  drawChanges() {
    const { base, run } = this;
    this.changes.hidden = base === null;
    if (base === null || this.changes.dataset.key === run.id) return;
    this.changes.dataset.key = run.id;
    const { tokens, steps } = differences(run, base);
    const where = steps.length ? `The canvases differ after ${listed("step", steps)}.` : "";
    const count = `${plural(tokens.length, "token")} from “${base.label}”. ${where}`;
    const shown = (word) => (word === null ? "·" : readable(word));
    this.changes.replaceChildren(h("span", {}, count), ...tokens.map(({ position, was, is }) =>
      button(`${position}: ${shown(was)} → ${shown(is)}`, () => this.pick({ position }))));
  }

  drawCanvas() {
    const { run, layer, views: { canvas }, explorer } = this, steps = stepsOf(run);
    const colours = explorer.colours("canvas");
    const key = `${run.id} ${this.base?.id} ${this.cell} ${explorer.dark} ${layer}`;
    if (canvas.key === key) return canvas.map.drawHeads(this.columns());
    this.present("canvas", null);
    const chunks = layer === "confidence" ? [] : [explorer.predicted(run)];
    return this.load("canvas", key, chunks, (/** @type {any} */ predicted) => {
      // What is certain is saturated, whichever quantity is shown.
      const [low, high] = layer === "entropy" ? [`${predicted.highest}`, "0"] :
        layer === "commitment" ? ["open", "committed"] : ["0", "1"];
      const name = layer === "confidence" ? layer : CANVAS_COLOURS[layer];
      const stops = layer === "commitment" ? [0, 0, COMMITTED, COMMITTED] : undefined;
      drawLegend(canvas.legend, colours, { name, low, high }, stops);
      canvas.map.element.classList.toggle("dl-low", steps.length > 16);
      canvas.map.element.classList.toggle("dl-long", steps.length > 64);
      canvas.map.draw(steps.map(String), this.columns(), colours, (r, c) =>
        (predicted ? this.layerCell(predicted, steps[r], c) : this.canvasCell(steps[r], c)));
      this.markSelection();
    });
  }

  /** Show a view's map, or the reason why there is none. Returns whether there is one. */
  present(name, reason) {
    const { map, note, legend } = this.views[name];
    map.element.hidden = reason !== null;
    note.hidden = reason === null;
    legend.hidden = reason !== null;
    if (reason !== null) { note.replaceChildren(reason); this.views[name].key = ""; }
    return reason === null;
  }

  /** Draw a view when its chunks have come, unless something else is wanted by then. */
  async load(name, key, /** @type {Promise<Chunk>[]} */ chunks, /** @type {(...chunks: Chunk[]) => void} */ draw) {
    const view = this.views[name];
    if (view.key === key) return;
    view.key = key;
    view.section.setAttribute("aria-busy", "true");
    try {
      const came = await Promise.all(chunks);
      if (view.key === key) draw(...came);
    } catch (error) {
      if (view.key === key) this.present(name, `This view could not be read: ${error.message}`);
    }
    if (view.key === key || view.key === "") view.section.removeAttribute("aria-busy");
  }

  drawLens() {
    const { run, step, base, explorer } = this, { lens } = run, { colour } = explorer.state;
    setText(this.views.lens.heading, `Lens at step ${step}`);
    const reason = !lens ? run.missing.lens ?? "There is no lens." : lens.steps.includes(step) ? null :
      `The lens was read at ${listed("step", lens.steps)}.`;
    if (!this.present("lens", reason)) return;
    const quantity = colour in CHANGES && !base?.lens ? CHANGES[colour] : colour;
    const chunks = [explorer.chunk(run, `lens/${step}`)];
    if (quantity in CHANGES) chunks.push(explorer.chunk(base, `lens/${step}`));
    return this.load("lens", `${run.id} ${step} ${quantity} ${this.cell} ${explorer.dark}`, chunks, (chunk, baseChunk) => {
      const { map, legend } = this.views.lens, layers = this.lensLayers();
      const { at, colours, value, ends } = explorer.lensScale(run, chunk, quantity, base, baseChunk);
      drawLegend(legend, colours, ends);
      map.element.classList.toggle("dl-low", layers.length > 13);
      map.draw(layers.map((layer) => lens.labels[lens.layers.indexOf(layer)]), this.columns(), colours, (r, p) => {
        const cell = lensAt(run, chunk, layers[r], p);
        const label = `${lens.labels[lens.layers.indexOf(layers[r])]}, position ${p}: ${lensText(cell)}`;
        if (!cell) return { value: NaN, label };
        const change = quantity in CHANGES ? at(layers[r], p) : 0;
        const changed = Number.isNaN(change) ? "none, since the targets differ" : signed(change);
        return {
          value: value(layers[r], p), text: this.inCells && cell.top.length ? readable(cell.top[0][0]) : "",
          kind: cell.rank === 0 ? "dl-hit" : "", label: quantity in CHANGES ? `${label}; ${quantity} ${changed}` : label,
        };
      });
      this.markSelection();
    });
  }

  drawTrace() {
    const { run, step, trace, explorer } = this, { heading, note } = this.views.trace;
    fillSelect(this.traceSelect, run.traces.map(({ name, kind }) => [name, sites[kind] ?? name]), trace?.name);
    this.traceSelect.hidden = run.traces.length < 2;
    setText(heading, trace ? `Causal trace at step ${step}` : "Causal trace");
    const made = trace?.lazy ? "A trace can be made" : "The trace was made";
    const reason = !trace ? run.missing.trace ?? "There is no trace." : trace.steps.includes(step) ? null :
      `${made} at ${listed("step", trace.steps)}.`;
    if (!this.present("trace", reason)) return;
    const asked = `${run.id} ${trace.name}`;
    if (trace.lazy && !explorer.traced.has(asked)) {
      this.present("trace", "A trace takes longer than the other views.");
      note.append(" ", button("Compute the trace", () => {
        explorer.traced.add(asked);
        explorer.render();
      }));
      return;
    }
    if (trace.lazy && !this.views.trace.map.cells.length) { this.present("trace", "Computing the trace…"); }
    const chunks = [explorer.chunk(run, `trace/${trace.name}/${step}`)];
    return this.load("trace", `${asked} ${step} ${this.cell} ${explorer.dark}`, chunks, (chunk) => {
      this.present("trace", null);
      const { map, legend } = this.views.trace, layers = this.traceLayers(), { scores } = chunk.tables;
      const { clean, corrupted } = chunk.header;
      const low = Math.min(...(trace.corrupted ?? [corrupted]));
      // At least a hundredth wide, so that rounding is not drawn as an effect on a fact that the model does not know.
      const high = Math.max(trace.highest ?? chunk.header.highest, low + 0.01);
      const colours = explorer.colours("trace");
      const name = `p(${shorten(readable(trace.answer), 26)}): clean ${number(clean)}, corrupted ${number(corrupted)}`;
      drawLegend(legend, colours, { name, low: number(low), high: number(high) });
      map.element.classList.toggle("dl-low", layers.length > 13);
      map.draw(layers.map(String), this.columns(), colours, (r, p) => {
        const column = trace.positions.indexOf(p), score = column < 0 ? NaN : read(scores, column, trace.layers.indexOf(layers[r]));
        const inside = trace.subject && p >= trace.subject[0] && p < trace.subject[1];
        const label = `layer ${layers[r]}, position ${p}, ${quoted(finalWord(run, p) ?? "·")}${inside ? " (subject)" : ""}: ` +
          (Number.isNaN(score) ? "no score" : `p ${number(score)}, effect ${signed(score - corrupted)}`);
        const text = this.inCells && !Number.isNaN(score) ? number(score) : "";
        return { value: clamp((score - low) / (high - low || 1), 0, 1), label, text };
      });
      this.markSelection();
    });
  }

  drawAttention() {
    const { run, step, block, head, explorer } = this, { attention } = run, { n_heads } = this.model;
    setText(this.views.attention.heading, `Attention of block ${block}, head ${head} at step ${step}`);
    const all = attention && attention.layers.includes(block) && attention.steps.includes(step);
    const reason = !attention ? run.missing.attention ?? "There is no attention." : all ? null :
      `The cache contains attention of ${listed("block", attention.layers)} at ${listed("step", attention.steps)}.`;
    this.heads.hidden = reason !== null;
    if (!this.present("attention", reason)) return;
    const colours = explorer.colours("attention");
    const key = `${run.id} ${step} ${block} ${head} ${this.cell} ${this.queries[0]} ${explorer.dark}`;
    return this.load("attention", key, [explorer.chunk(run, `attention/${block}/${step}`)], ({ tables: { pattern } }) => {
      const { map, legend } = this.views.attention, { queries } = this, digits = pattern.scale > 0.001 ? 2 : 4;
      drawLegend(legend, colours, { name: "weight", low: "0", high: "1" });
      this.drawHeads(pattern, n_heads, colours);
      map.element.classList.toggle("dl-low", queries.length > 24);
      const words = this.columns(), named = words.map((_, p) => quoted(finalWord(run, p) ?? "·"));
      const rows = queries.map((q) => `${q} ${shorten(words[q].text, this.narrow ? 6 : 9)}`);
      map.draw(rows, words, colours, (r, k) => {
        const q = queries[r], x = read(pattern, head, q, k);
        const weight = Number.isNaN(x) ? "not reached" : x.toFixed(digits);
        return {
          value: x, text: this.inCells && x >= 0.005 ? weight : "",
          label: `head ${head}, query ${q} ${named[q]}, key ${k} ${named[k]}: ${weight}`,
        };
      });
      this.markSelection();
    });
  }

  /** A small picture of each head's pattern; a click shows the head. */
  drawHeads(/** @type {Table} */ pattern, nHeads, /** @type {Paint[]} */ colours) {
    const n = pattern.shape[1];
    const rgb = colours.map(({ background }) => background.match(/\d+/g).map(Number));
    while (this.heads.children.length < nHeads) {
      const head = this.heads.children.length;
      this.heads.append(h("button", { type: "button", onclick: () => this.pick({ head }) }, h("canvas"), `${head}`));
    }
    [...this.heads.children].forEach((chooser, head) => {
      chooser.hidden = head >= nHeads;
      if (chooser.hidden) return;
      chooser.setAttribute("aria-pressed", String(head === this.head));
      chooser.setAttribute("aria-label", `head ${head}`);
      const canvas = chooser.firstChild;
      canvas.width = canvas.height = n;
      const context = canvas.getContext("2d"), image = context.createImageData(n, n);
      for (let i = 0; i < n * n; i++) {
        const stored = pattern.data[head * n * n + i];
        if (stored !== pattern.none) image.data.set([...rgb[Math.round(stored * pattern.scale * 255)], 255], 4 * i);
      }
      context.putImageData(image, 0, 0);
    });
  }
}

// 10. The inspector ---------------------------------------------------------------------------------------------------

/** What is known of one position and cell: what the step predicted, the lens's likeliest tokens, the position over all steps. */
class Inspector {
  constructor(/** @type {Explorer} */ explorer) {
    this.explorer = explorer;
    this.heading = h("h3", {});
    this.state = h("p", { class: "dl-state" });
    this.topHeading = h("h4", {});
    this.top = h("ol", { class: "dl-bars" });
    this.topNumbers = h("p", { class: "dl-numbers" });
    this.course = h("div", { class: "dl-course" });
    this.lensHeading = h("h4", {}, "Lens");
    this.lens = h("ol", { class: "dl-bars" });
    this.lensNumbers = h("p", { class: "dl-numbers" });
    this.overHeading = h("h4", {}, "Over all steps");
    this.overKey = "";
    this.over = new CellMap({
      label: "Lens of the selected position, layer by step", corner: "layer",
      pick: (r, c) => this.panel && this.panel.pick({ layer: this.panel.lensLayers()[r], step: this.panel.run.lens.steps[c] }),
      hover: (r, c) => r !== null && explorer.say(this.over.cells[r][c].getAttribute("aria-label")),
    });
    this.code = codeButton(() => explorer.showCode(this.panel, "predictions", "Predictions", this.shown));
    this.lensCard = h("div", { class: "dl-card" }, this.lensHeading, this.lens, this.lensNumbers);
    this.overCard = h("div", { class: "dl-card" }, this.overHeading, this.over.element);
    this.element = h("aside", { class: "dl-inspector", "aria-label": "Selected position" },
      h("div", { class: "dl-card" }, this.heading, this.state, h("header", {}, this.topHeading, this.code), this.top,
        this.topNumbers, this.course),
      this.lensCard, this.overCard);
  }

  /** Show a position; `preview` is a hovered cell, which takes the place of the selected one until the pointer leaves. */
  async render(/** @type {RunPanel} */ panel, preview = null) {
    this.panel = panel;
    const { run } = panel, { explorer } = this;
    const position = preview?.position ?? panel.position, step = preview?.step ?? panel.step;
    const layer = preview?.layer ?? explorer.state.layer;
    const key = (this.wanted = `${run.id} ${position} ${step} ${layer}`);
    const word = wordAfter(run, step, position);
    setText(this.heading, `Position ${position}  ${word === null ? "·" : quoted(word)}`);
    setText(this.state, panel.stateAt(step, position).replace(/^step (\d+), position \d+, (.*)$/, "After step $1: $2"));
    const jobs = [this.drawPredicted(panel, step, position, key), this.drawLens(run, step, layer, position, key)];
    await Promise.all(preview ? jobs : [...jobs, this.drawOver(panel)]);
  }

  async drawPredicted(/** @type {RunPanel} */ panel, step, position, key) {
    const { run } = panel, at = run.revealed_at?.[position] ?? -1;
    const predicted = await this.explorer.predicted(run);
    if (this.wanted !== key) return;
    // A token that is written has the predictions of the step that wrote it, unless it is predicted at every step.
    const shown = (this.shown = at >= 0 && at < step && !predicted?.at(step, position) ? at : step);
    setText(this.topHeading, `Predictions of step ${shown}`);
    const seen = predicted?.at(shown, position), final = finalWord(run, position);
    drawBars(this.top, seen?.top ?? [], predicted?.k ?? 0, final);
    this.code.hidden = !run.python?.predictions;
    this.course.hidden = !predicted;
    this.top.dataset.empty = seen || !predicted ? "" :
      isGiven(run, position) ? "The token was given." : "This step predicts nothing here.";
    if (!predicted) return setText(this.topNumbers, run.missing.predictions ?? "Nothing is recorded.");
    const margin = predicted.k > 1 ? ` Margin ${number(seen?.margin)}.` : "", since = predicted.committed(position);
    setText(this.topNumbers, !seen ? "" : `Entropy ${number(seen.entropy)} nats.${margin} ${since === null ? "" : `Committed at step ${since} (dotted).`}`);
    const isEntropy = panel.layer === "entropy" || final === null, steps = stepsOf(run);
    const values = steps.map((one) => (isEntropy ? predicted.at(one, position)?.entropy ?? NaN : predicted.written(one, position)));
    const name = isEntropy ? "entropy (nats)" : `p(${quoted(final)})`;
    const known = steps.flatMap((one, i) => (Number.isNaN(values[i]) ? [] : [`step ${one}: ${number(values[i])}`]));
    drawCourse(this.course, steps, values, isEntropy ? predicted.highest : 1,
      [[shown, "dl-now"], [since, "dl-since"]], `${name} by step. ${known.join(", ") || "none"}`);
    this.course.prepend(h("span", {}, `${name} by step`));
  }

  async drawLens(run, step, layer, position, key) {
    const { lens } = run, row = lens ? lens.layers.indexOf(layer) : -1;
    this.lensCard.hidden = !lens;
    if (!lens) return;
    setText(this.lensHeading, `Lens: ${row < 0 ? `layer ${layer}` : lens.labels[row]} at step ${step}`);
    const chunk = lens.steps.includes(step) ? await this.explorer.chunk(run, `lens/${step}`) : null;
    if (this.wanted !== key) return;
    const cell = chunk && lensAt(run, chunk, layer, position);
    drawBars(this.lens, cell?.top ?? [], lens.k, cell?.target ?? null);
    this.lens.dataset.empty = cell ? "" : "The lens reads nothing here.";
    const target = cell && cell.rank >= 0 && cell.target !== null;
    const ranked = target ? `Target ${quoted(cell.target)}: rank ${cell.rank}, p ${number(cell.probability)}. ` : "";
    setText(this.lensNumbers, cell ? `${ranked}Entropy ${number(cell.entropy)} nats.` : "");
  }

  /** Layer by step at the selected position. */
  async drawOver(/** @type {RunPanel} */ panel) {
    const { run, position } = panel, { explorer } = this, { lens } = run;
    this.overCard.hidden = !lens;
    if (!lens) return;
    const { colour } = explorer.state, quantity = CHANGES[colour] ?? colour;
    setText(this.overHeading, `Position ${position} over all steps: ${LENS_COLOURS[quantity]}`);
    const key = `${run.id} ${position} ${quantity} ${explorer.dark}`;
    const mark = () => this.over.mark(panel.lensLayers().indexOf(explorer.state.layer), lens.steps.indexOf(panel.step));
    if (this.overKey === key) return mark();
    this.overKey = key;
    const chunks = await Promise.all(lens.steps.map((step) => explorer.chunk(run, `lens/${step}`)));
    if (this.overKey !== key) return;
    const layers = panel.lensLayers(), scales = chunks.map((chunk) => explorer.lensScale(run, chunk, quantity));
    this.over.element.style.setProperty("--cell", `${clamp(Math.floor(220 / chunks.length), 6, 36)}px`);
    const names = layers.map((layer) => lens.labels[lens.layers.indexOf(layer)]);
    const columns = lens.steps.map((step) => ({ text: chunks.length > 12 && step % 4 ? "" : `${step}`, title: `step ${step}` }));
    this.over.draw(names, columns, scales[0].colours, (r, c) => {
      const cell = lensAt(run, chunks[c], layers[r], position);
      const label = `${names[r]}, step ${lens.steps[c]}, position ${position}: ${lensText(cell)}`;
      return { value: cell ? scales[c].value(layers[r], position) : NaN, kind: cell?.rank === 0 ? "dl-hit" : "", label };
    });
    mark();
  }
}

// 11. Experiments -----------------------------------------------------------------------------------------------------

const option = (value, text = value) => [value, text];
const orNull = (text) => (text.trim() === "" ? null : text);

/** The form of a run, the actions on the selected token and cell, and the list of a run's interventions. */
class Experiments {
  constructor(/** @type {Explorer} */ explorer) {
    this.explorer = explorer;
    const numeric = (attributes) => h("input", { type: "number", ...attributes });
    this.prompt = h("textarea", { rows: 2, spellcheck: "false", oninput: () => this.separate() });
    this.model = h("select", { onchange: () => this.fillSamplers() });
    this.length = numeric({ min: 1, step: 1 });
    this.steps = numeric({ min: 1, step: 1, value: 8 });
    this.sampler = h("select");
    this.guidance = numeric({ step: "any", min: 0, value: 0 });
    this.temperature = numeric({ step: "any", min: 0, value: 0 });
    this.seed = numeric({ step: 1, value: 0 });
    this.answer = h("input", { type: "text", spellcheck: "false" });
    this.subject = h("input", { type: "text", placeholder: "first, end", spellcheck: "false" });
    this.go = h("button", { type: "submit", class: "dl-primary" }, "Run");
    const settings = h("details", { class: "dl-settings" }, h("summary", {}, "Settings"), h("div", { class: "dl-fields" },
      field("Model", this.model), field("Length", this.length), field("Steps", this.steps), field("Sampler", this.sampler),
      field("Guidance", this.guidance), field("Temperature", this.temperature), field("Seed", this.seed),
      field("Answer", this.answer), field("Subject positions", this.subject)));
    const onsubmit = (event) => {
      event.preventDefault();
      this.runForm();
    };
    this.edited = false; // Whether the form contains what was typed and not run.
    const oninput = () => (this.edited = true);
    this.form = h("form", { class: "dl-form", "aria-label": "Prompt and settings", onsubmit, oninput },
      h("div", { class: "dl-prompt" }, field("Prompt", this.prompt, "dl-grow"), this.go), settings);
    this.list = h("div", { class: "dl-edits" });

    this.tokenHeading = h("h4", {});
    this.token = h("input", { type: "text", spellcheck: "false" });
    this.remask = button("Mask it and go on", () => this.edit(this.force(null)));
    this.forceIt = button("Force and go on", () => this.token.value && this.edit(this.force(this.token.value)));
    const changed = () => this.render();
    this.site = h("select", { onchange: changed });
    this.what = h("select", { onchange: changed });
    this.source = h("select", { onchange: changed });
    this.when = h("select", { onchange: changed });
    this.where = h("select", { onchange: changed });
    const changes = [option("zero", "set to zero"), option("mean", "set to the mean"), option("patch", "patch from a run")];
    fillSelect(this.what, changes, "zero");
    this.sourceField = field("From", this.source);
    this.apply = button("Apply", () => this.edit(this.ablation()));
    this.applied = h("p", { class: "dl-numbers" });
    this.actions = h("div", { class: "dl-card dl-actions", role: "group", "aria-label": "Interventions" },
      this.tokenHeading, h("div", { class: "dl-fields" }, field("Token", this.token), this.forceIt, this.remask),
      h("h4", {}, "Selected cell"),
      h("div", { class: "dl-fields" }, field("Site", this.site), field("Change", this.what), this.sourceField,
        field("Steps", this.when), field("Positions", this.where)), this.applied, this.apply);
  }

  fillSamplers() {
    const { models } = this.explorer.manifest, model = models[Number(this.model.value)] ?? models[0];
    const samplers = ([["", "default"], ...model.samplers.map((name) => option(name))]);
    fillSelect(this.sampler, samplers, model.samplers.includes(this.sampler.value) ? this.sampler.value : "");
    this.sampler.disabled = model.grows;
  }

  /** Show the settings of a run in the form, unless they would replace what was typed and not run. */
  read(run) {
    if (this.edited) return;
    const { models } = this.explorer.manifest, spec = (this.spec = run?.spec);
    const both = (models.length > 1 ? [["all", "all, side by side"]] : []);
    const beginsWithAll = this.model.value === "" && models.length > 1;
    const chosen = beginsWithAll || this.model.value === "all" ? "all" : spec?.model ?? 0;
    fillSelect(this.model, [...models.map(({ name }, i) => [i, name]), ...both], chosen);
    this.fillSamplers();
    if (!spec) return;
    this.prompt.value = spec.prompt;
    for (const name of ["length", "steps", "seed", "temperature", "answer", "sampler"]) this[name].value = spec[name] ?? "";
    this.guidance.value = spec.cfg_scale;
    this.subject.value = spec.subject?.join(", ") ?? "";
  }

  /** Answer and subject belong to a prompt: while another one is typed, those of the shown run are left out. */
  separate() {
    const { prompt, answer, subject } = this.spec ?? {};
    const isOwn = this.prompt.value === prompt;
    for (const [input, own] of [[this.answer, answer ?? ""], [this.subject, subject?.join(", ") ?? ""]]) {
      if (input.value === (isOwn ? "" : own)) input.value = isOwn ? own : "";
    }
  }

  render() {
    const { explorer } = this, panel = explorer.panel, { run, position, step, block, head } = panel;
    const { spec } = run;
    this.actions.hidden = !spec;
    this.remask.hidden = !panel.model.masks; // Where there is no [MASK], no position is masked again.
    setText(this.tokenHeading, `Position ${position}, before step ${this.forcedStep}`);
    const places = [option("resid", `residual stream, block ${block}`), option("attn", `attention, block ${block}`),
      option("mlp", `MLP, block ${block}`), option("head", `head ${head}, block ${block}`)];
    fillSelect(this.site, places, this.site.value || "attn");
    fillSelect(this.when, [option("this", `step ${step}`), option("all", "all steps")], this.when.value || "all");
    fillSelect(this.where, [option("this", `position ${position}`), option("all", "all positions")], this.where.value || "all");
    const others = explorer.runs.filter((other) => other.model === run.model && other.spec);
    const sources = [option("", "the run without interventions"), ...others.map((run) => option(run.id, nameIn(explorer.runs, run)))];
    fillSelect(this.source, sources, this.source.value);
    this.sourceField.hidden = this.what.value === "zero";
    const edits = spec?.interventions ?? [];
    const fromItself = this.what.value === "patch" && !this.source.value && edits.length === 0;
    const nothing = "This run has no interventions, so a patch from it changes nothing. Choose another run.";
    setText(this.applied, fromItself ? nothing : describe(this.ablation(), explorer.runs));
    this.apply.hidden = fromItself;
    this.list.hidden = edits.length === 0;
    const remove = (index) => {
      const interventions = edits.filter((_, i) => i !== index);
      return this.change({ ...spec, interventions, base: interventions.length ? spec.base : null });
    };
    this.list.replaceChildren(h("span", {}, "Interventions:"), ...edits.map((edit, i) => {
      const text = describe(edit, explorer.runs);
      return h("span", { class: "dl-edit" }, text, button("×", () => remove(i), { "aria-label": `Remove: ${text}` }));
    }));
  }

  /** A token is changed in the canvas that is shown, which the next step reads; after the last step, in that step's. */
  get forcedStep() {
    const { run, step } = this.explorer.panel;
    return Math.min(step + 1, lastStep(run));
  }

  force(token) {
    return { what: "force", step: this.forcedStep, position: this.explorer.panel.position, token };
  }

  ablation() {
    const { step, position, block, head } = this.explorer.panel, site = this.site.value;
    return {
      what: this.what.value, site, layer: block, head: site === "head" ? head : null,
      positions: this.where.value === "this" ? [position] : null, steps: this.when.value === "this" ? [step] : null,
      source: this.what.value === "zero" ? null : this.source.value || null,
    };
  }

  /** Run again with one more intervention, and compare with the run that has none. */
  edit(intervention) {
    const { run, base } = this.explorer.panel, { spec } = run;
    return this.change({ ...spec, interventions: [...spec.interventions, intervention], base: base?.id ?? run.id });
  }

  /** Show the run of other interventions, beside that of another model where one is shown. */
  change(spec) {
    const { runs, state } = this.explorer, beside = runs.find(({ id }) => id === state.compare);
    return this.run([spec], beside && beside.model !== spec.model ? [beside] : []);
  }

  runForm() {
    this.edited = false;
    const subject = this.subject.value.trim() ? this.subject.value.split(",").map(Number) : null;
    const spec = {
      prompt: this.prompt.value, length: this.length.value ? Number(this.length.value) : null, steps: Number(this.steps.value),
      sampler: this.sampler.value || null, cfg_scale: Number(this.guidance.value),
      temperature: Number(this.temperature.value), seed: Number(this.seed.value),
      answer: orNull(this.answer.value), subject, interventions: [], base: null,
    };
    if (this.model.value !== "all") return this.run([{ ...spec, model: Number(this.model.value) }]);
    // Models side by side may be of different kinds: where a setting does not fit, a model takes its own.
    return this.run(this.explorer.manifest.models.map(({ samplers, masks }, model) => ({
      ...spec, model, sampler: samplers.includes(spec.sampler) ? spec.sampler : null, cfg_scale: masks ? spec.cfg_scale : 0,
    })));
  }

  /** Compute runs and show them, with others `beside` them; an error of the library becomes text. */
  async run(specs, beside = []) {
    const { explorer } = this, began = performance.now(), pressed = document.activeElement, runs = [];
    const say = () => explorer.say(`Computing the run… ${((performance.now() - began) / 1000).toFixed(0)} s`);
    const timer = setInterval(say, 1000);
    say();
    explorer.fail(null);
    explorer.root.classList.add("dl-computing");
    this.go.disabled = this.apply.disabled = this.forceIt.disabled = this.remask.disabled = true;
    try {
      for (const spec of specs) runs.push(await explorer.compute(spec));
    } catch (error) {
      explorer.fail(error.message);
    }
    clearInterval(timer);
    explorer.say("No run was computed.");
    if (runs.length) await explorer.add(...runs, ...beside);
    explorer.root.classList.remove("dl-computing");
    this.go.disabled = this.apply.disabled = this.forceIt.disabled = this.remask.disabled = false;
    // A button that is disabled loses the focus, and the keyboard its place.
    if (document.activeElement === document.body && explorer.root.contains(pressed)) pressed.focus({ preventScroll: true });
  }
}

// 12. The explorer ----------------------------------------------------------------------------------------------------

const HELP = "Arrow keys move inside a map, Home and End go to the ends of a row, Page Up and Page Down to the ends of a " +
  "column. [ and ] change the step, Escape closes a dialog.";

/** All of it: the state, what is loaded, the toolbar, one or two panels, the inspector. */
class Explorer {
  constructor(element, /** @type {Source} */ source, usesHash) {
    this.source = source;
    this.usesHash = usesHash;
    this.manifest = null;
    /** @type {Map<string, any>} */ this.chunks = new Map();
    /** @type {Record<string, number>} */ this.limits = { entropy: 1, rank: 1 };
    for (const name of Object.keys(CHANGES)) this.limits[name] = 0.1;
    /** @type {Set<string>} */ this.traced = new Set();
    /** @type {State & Record<string, any>} */
    this.state = {
      run: "", compare: "", step: -1, position: -1, layer: -1, head: 0, key: null, colour: "top", canvas: "confidence", trace: "", wide: false,
    };
    this.root = element;
    element.classList.add("dl-explorer");
    this.abort = new AbortController();
  }

  get runs() { return this.manifest.runs; }
  get panel() { return this.panels.find((panel) => panel.run?.id === this.state.run) ?? this.panels[0]; }

  async start() {
    try {
      this.manifest = await this.source.manifest();
    } catch (error) {
      this.root.append(h("p", { role: "alert", class: "dl-alert" }, error.message));
      return;
    }
    this.build();
    const [first] = this.runs, other = this.runs.find((run) => run.base === null && run.model !== first.model);
    this.readHash();
    if (!first) return;
    if (!this.runs.some((run) => run.id === this.state.run)) this.state.run = first.id;
    if (other && !location.hash.includes("run=")) this.state.compare = other.id;
    this.settle();
    this.set({ run: this.state.run });
  }

  build() {
    const set = (name, control, convert = (x) => x) => {
      control.addEventListener("change", () => this.set({ [name]: convert(control.value) }));
      return control;
    };
    // Who chooses another run wants to see its settings, in place of what was typed.
    this.runSelect = set("run", h("select", { onchange: () => this.experiments && (this.experiments.edited = false) }));
    this.compareSelect = set("compare", h("select"));
    this.layerSelect = set("layer", h("select"), Number);
    this.headSelect = set("head", h("select"), Number);
    this.colourSelect = set("colour", h("select"));
    this.canvasSelect = set("canvas", h("select"));
    const slide = () => this.set({ step: this.steps[Number(this.slider.value)] });
    this.slider = h("input", { type: "range", min: 0, step: 1, oninput: slide });
    this.stepText = h("span", { class: "dl-step-text" });
    const stepBy = (this.stepBy = (change) => {
      const index = this.steps.indexOf(this.state.step) + change;
      return this.set({ step: this.steps[clamp(index, 0, this.steps.length - 1)] });
    });
    this.play = button("Play", () => this.playing(!this.timer), { "aria-pressed": "false" });
    this.wide = h("input", { type: "checkbox", onchange: () => this.set({ wide: this.wide.checked }) });
    const runs = h("div", { class: "dl-group dl-runs" }, field("Run", this.runSelect), field("Compare with", this.compareSelect));
    const steps = h("div", { class: "dl-group dl-steps" },
      button("◀", () => stepBy(-1), { "aria-label": "previous step" }), field("Step", this.slider, "dl-grow"),
      button("▶", () => stepBy(1), { "aria-label": "next step" }), this.play, this.stepText);
    const choices = h("div", { class: "dl-group" }, field("Layer", this.layerSelect), field("Head", this.headSelect),
      field("Canvas shows", this.canvasSelect), field("Lens shows", this.colourSelect), field("Wide columns", this.wide));
    this.runsGroup = runs;
    this.status = h("div", { class: "dl-status", role: "status", "aria-live": "polite" });
    this.alert = h("div", { class: "dl-alert", role: "alert", hidden: true });
    this.panels = [new RunPanel(this), new RunPanel(this)];
    this.inspector = new Inspector(this);
    this.main = h("div", { class: "dl-main" }, this.inspector.element);
    this.dialog = h("dialog", { class: "dl-dialog", "aria-labelledby": ids() });
    this.runCode = codeButton(() => this.showCode(this.panel, "run", "The run"));
    this.root.append(h("header", { class: "dl-title" }, h("h1", {}, this.manifest.title), this.runCode));
    if (this.source.live) {
      this.experiments = new Experiments(this);
      this.root.append(this.experiments.form, this.experiments.list);
      this.inspector.element.firstChild.after(this.experiments.actions);
    }
    this.bar = h("div", { class: "dl-bar", role: "group", "aria-label": "What is shown" }, runs, steps, choices);
    this.sizes = new ResizeObserver(() => this.root.style.setProperty("--bar", `${this.bar.offsetHeight}px`));
    this.sizes.observe(this.bar);
    this.root.append(this.bar, this.main,
      h("p", { class: "dl-help" }, HELP), h("div", { class: "dl-foot" }, this.alert, this.status), this.dialog);
    this.main.hidden = this.runs.length === 0;

    const { signal } = this.abort;
    this.root.addEventListener("keydown", (event) => {
      const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select");
      if (typing || event.ctrlKey || event.metaKey) return;
      if (event.key === "[" || event.key === "]") stepBy(event.key === "[" ? -1 : 1);
    }, { signal });
    const repaint = () => this.isDark() !== this.dark && this.render();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, { signal });
    this.themes = new MutationObserver(repaint);
    const attributeFilter = ["data-theme", "class", "data-jp-theme-light"];
    for (const themed of [document.documentElement, document.body]) this.themes.observe(themed, { attributeFilter });
    if (this.usesHash) addEventListener("hashchange", () => { this.readHash(); this.settle(); this.render(); }, { signal });
    this.dark = this.isDark();
  }

  isDark() { return getComputedStyle(this.root).getPropertyValue("--dl-dark").trim() === "1"; }
  colours(view) { return ramp(view, this.dark); }

  /** A chunk, decoded. @returns {Promise<Chunk>} */
  chunk(run, name) {
    const key = `${run.id} ${name}`;
    if (!this.chunks.has(key)) {
      const again = (error) => {
        if (!error.unknown || !run.spec) throw error;
        return this.compute(run.spec).then(() => this.source.chunk(run.id, name));
      };
      const promise = this.source.chunk(run.id, name).catch(again).then(decodeChunk);
      promise.catch(() => this.chunks.delete(key));
      this.chunks.set(key, promise);
    }
    return this.chunks.get(key);
  }

  /** What the steps of a run predicted; null where nothing is known of it. @returns {Promise<Predicted|null>} */
  async predicted(run) {
    if (!run.predictions) return null;
    const chunk = /** @type {any} */ (await this.chunk(run, "predictions"));
    return (chunk.predicted ??= new Predicted(run, chunk));
  }

  /** Compute a run. Those that it names, and that were dropped since, are computed again. */
  async compute(spec) {
    try {
      return await this.source.act(spec);
    } catch (error) {
      const ids = [spec.base, ...spec.interventions.map(({ source }) => source)];
      const named = this.runs.filter(({ id }) => ids.includes(id));
      if (!error.unknown || !named.length) throw error;
      for (const run of named) await this.compute(run.spec);
      return this.source.act(spec);
    }
  }

  /** Colours of a quantity, and where a cell is on its scale, 0 to 1. Limits only grow, so that scales hold still. */
  lensScale(run, /** @type {Chunk} */ chunk, quantity, base = null, /** @type {Chunk|null} */ baseChunk = null) {
    const { limits } = this, isChange = quantity in CHANGES;
    const at = (layer, position) => (isChange ? lensChange(run, chunk, base, baseChunk, CHANGES[quantity], layer, position)
      : lensNumber(run, chunk, quantity, layer, position));
    if (quantity in limits) {
      for (const layer of run.lens.layers) {
        for (const position of run.lens.positions) {
          const x = Math.abs(at(layer, position));
          if (x > limits[quantity]) limits[quantity] = roundUp(x);
        }
      }
    }
    const limit = limits[quantity] ?? 1, name = LENS_COLOURS[quantity] ?? quantity;
    const end = quantity === "rank" ? `${Math.round(10 ** limit - 1)}` : `${Number(limit.toPrecision(3))}`;
    const share = (x) => x / (limits[quantity] ?? 1);
    if (isChange) {
      const value = (layer, position) => (share(at(layer, position)) + 1) / 2;
      return { at, value, colours: this.colours("change"), ends: { name, low: `−${end}`, high: `+${end}` } };
    }
    // What is certain is saturated, whichever quantity is shown.
    const falls = quantity === "rank" || quantity === "entropy";
    const value = (layer, position) => (falls ? 1 - share(at(layer, position)) : share(at(layer, position)));
    return { at, value, colours: this.colours("lens"), ends: { name, low: falls ? end : "0", high: falls ? "0" : end } };
  }

  /** Change the state and draw. */
  set(change) {
    Object.assign(this.state, change);
    if (change.position !== undefined && change.key === undefined) this.state.key = null;
    this.settle();
    if (change.run !== undefined) this.experiments?.read(this.runs.find(({ id }) => id === this.state.run));
    this.writeHash();
    return this.render()
      .then(async () => this.runs.length && this.say(await this.panel.summary()))
      .catch((error) => this.fail(error.message));
  }

  /** Bring the state into the ranges of the run. */
  settle() {
    const { state } = this, run = this.runs.find((one) => one.id === state.run) ?? this.runs[0];
    if (!run) return;
    const model = modelOf(this.manifest, run);
    state.run = run.id;
    if (!this.runs.some((one) => one.id === state.compare) || state.compare === state.run) state.compare = "";
    const written = run.answer?.positions[0] ?? run.revealed_at?.findIndex((at) => at >= 0) ?? 0;
    if (state.position < 0) state.position = Math.max(0, written);
    if (!Object.hasOwn({ ...LENS_COLOURS, ...CHANGES }, state.colour)) state.colour = "top";
    if (!Object.hasOwn(CANVAS_COLOURS, state.canvas)) state.canvas = "confidence";
    const middle = Math.floor(model.n_layers / 2), cached = run.attention?.layers ?? [];
    if (state.layer < 0) state.layer = cached.includes(middle) ? middle : cached[0] ?? middle;
    const other = this.runs.find((one) => one.id === state.compare);
    this.steps = [...new Set([run, ...(other ? [other] : [])].flatMap(stepsOf))].sort((a, b) => a - b);
    if (state.step < 0) state.step = run.revealed_at?.[state.position] ?? -1;
    state.step = this.steps.findLast((step) => step <= state.step) ?? this.steps[0];
    state.layer = clamp(state.layer, 0, model.n_layers);
    state.head = clamp(state.head, 0, model.n_heads - 1);
    this.slider.max = String(this.steps.length - 1);
    this.slider.value = String(this.steps.indexOf(state.step));
  }

  /** Add computed runs, or show those there are: the first one, and the second beside it. */
  async add(...runs) {
    const [run, beside] = runs;
    this.runs.push(...runs.filter(({ id }) => !this.runs.some((one) => one.id === id)));
    this.main.hidden = false;
    await this.set({ run: run.id, compare: beside?.id ?? "" });
    const base = this.runs.find((one) => one.id === run.base);
    const { tokens, steps } = base ? differences(run, base) : { tokens: [], steps: [] };
    const changes = !base ? "" : tokens.length === 0 && steps.length === 0 ? " It is the same as the base run." :
      ` ${plural(tokens.length, "token")} from the base run; the canvases differ from step ${steps[0] ?? "–"}.`;
    this.say(`Done: ${run.text}.${changes}`);
  }

  render() {
    const { state, runs } = this;
    this.dark = this.isDark();
    if (!runs.length) return Promise.resolve();
    const shown = [state.run, state.compare].map((id) => runs.find((run) => run.id === id)).filter(Boolean);
    // The run on the left stays on the left when the other one becomes the active one, or is another.
    if (shown.length === 2 && this.panels[0].run === shown[1]) shown.reverse();
    this.main.classList.toggle("dl-pair", shown.length === 2);
    this.panels.forEach((panel, i) => {
      if (!shown[i]) { panel.run = null; panel.element.remove(); return; }
      if (!panel.element.isConnected) this.inspector.element.before(panel.element);
      panel.show(shown[i]);
    });
    const panels = this.panels.slice(0, shown.length);
    panels.forEach((panel) => panel.fit());
    this.drawBar();
    const drawing = (this.drawing = {});
    this.root.dataset.state = "drawing";
    this.experiments?.render();
    return Promise.all([...panels.map((panel) => panel.render()), this.inspector.render(this.panel)]).then(() => {
      if (this.drawing !== drawing) return;
      this.root.dataset.state = "ready";
      if (!this.source.live) panels.forEach((panel) => this.prepare(panel));
    }, (error) => this.fail(error.message));
  }

  /** Decode what the neighbouring steps show, while nothing else happens. */
  prepare({ run, step, block, trace }) {
    const idle = window.requestIdleCallback ?? ((job) => setTimeout(job, 50));
    idle(() => {
      const at = run.steps.indexOf(step);
      for (const near of stepsOf(run).filter((_, i) => Math.abs(i - at) === 1)) {
        if (run.lens?.steps.includes(near)) this.chunk(run, `lens/${near}`);
        if (trace?.steps.includes(near)) this.chunk(run, `trace/${trace.name}/${near}`);
        const { layers, steps } = run.attention ?? { layers: [], steps: [] };
        if (layers.includes(block) && steps.includes(near)) this.chunk(run, `attention/${block}/${near}`);
      }
    });
  }

  drawBar() {
    const { state, runs, panel } = this, { run, model } = panel;
    this.runsGroup.hidden = runs.length < 2;
    this.runCode.hidden = !run.python?.run;
    this.headSelect.parentNode.hidden = !run.attention;
    this.colourSelect.parentNode.hidden = !run.lens;
    const named = runs.map((one) => option(one.id, nameIn(runs, one)));
    fillSelect(this.runSelect, named, state.run);
    const others = named.filter(([id]) => id !== state.run);
    fillSelect(this.compareSelect, [option("", "–"), ...others], state.compare);
    const layers = run.lens ? run.lens.layers : Array.from({ length: model.n_layers }, (_, i) => i);
    const place = (layer) => (layer < model.n_layers ? `enters block ${layer}` : "after the last block");
    const shownLayer = (layer, i) => [layer, run.lens ? `${run.lens.labels[i]}: ${place(layer)}` : String(layer)];
    fillSelect(this.layerSelect, layers.map(shownLayer), state.layer);
    fillSelect(this.headSelect, Array.from({ length: model.n_heads }, (_, i) => [i, String(i)]), state.head);
    const changes = panel.base?.lens ? Object.keys(CHANGES).map((name) => option(name)) : [];
    this.canvasSelect.parentNode.hidden = !run.predictions;
    fillSelect(this.canvasSelect, panel.layers().map((name) => [name, CANVAS_COLOURS[name]]), panel.layer);
    fillSelect(this.colourSelect, [...Object.entries(LENS_COLOURS), ...changes], state.colour);
    const time = run.times?.[run.steps.indexOf(panel.step)];
    const shownTime = time === undefined ? "" : `, t ${time.toFixed(2)}`;
    setText(this.stepText, `${panel.step} of ${run.steps[0]}–${lastStep(run)}${shownTime}`);
    this.slider.setAttribute("aria-valuetext", `step ${panel.step}`);
  }

  activatePanel(/** @type {RunPanel} */ panel) {
    if (!panel.run || panel.run.id === this.state.run) return;
    [this.state.run, this.state.compare] = [panel.run.id, this.state.run];
    this.drawBar();
    this.experiments?.read(panel.run);
  }

  /** A cell under the pointer: its column in every map, its text, and its details until the pointer leaves. */
  hover(/** @type {RunPanel} */ panel, cell) {
    const column = cell ? cell.column : -1;
    for (const one of this.panels) if (one.run) one.markHover(column);
    if (cell?.label) this.say(cell.label);
    this.inspector.render(cell ? panel : this.panel, cell).catch((error) => this.fail(error.message));
  }

  say(text) { setText(this.status, text); }

  fail(message) {
    this.alert.hidden = message === null;
    setText(this.alert, message ?? "");
  }

  playing(on) {
    clearInterval(this.timer);
    this.timer = on ? setInterval(() => {
      if (this.state.step === this.steps.at(-1)) this.playing(false);
      else this.stepBy(1);
    }, 700) : 0;
    if (on && this.state.step === this.steps.at(-1)) this.set({ step: this.steps[0] });
    this.play.setAttribute("aria-pressed", String(on));
    setText(this.play, on ? "Pause" : "Play");
  }

  /** The code that gives a view's numbers, with the current selection in it. */
  showCode(/** @type {RunPanel} */ panel, view, title, step = panel.step) {
    const { position, head } = panel, name = panel.trace?.name ?? "";
    const shown = { step, layer: view === "attention" ? panel.block : this.state.layer, head, position, name };
    const code = fillIn(panel.run.python?.[view] ?? "", shown);
    const done = button("Close", () => this.dialog.close());
    const copy = h("button", { type: "button", class: "dl-primary", onclick: async () => {
      try {
        await navigator.clipboard.writeText(code);
        setText(copy, "Copied");
      } catch {
        getSelection().selectAllChildren(pre);
        setText(copy, "Selected: press Ctrl+C");
      }
    } }, "Copy");
    const pre = h("pre", { tabindex: 0 }, h("code", {}, code));
    const heading = h("h2", { id: this.dialog.getAttribute("aria-labelledby") }, `${title} as Python`);
    this.dialog.replaceChildren(heading, pre, h("div", { class: "dl-buttons" }, copy, done));
    this.dialog.showModal();
  }

  readHash() {
    if (!this.usesHash) return;
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of ["run", "compare", "colour", "canvas", "trace"]) if (given.has(name)) this.state[name] = given.get(name);
    for (const name of ["step", "position", "layer", "head"]) {
      const value = Number.parseInt(given.get(name) ?? "", 10);
      if (value >= 0) this.state[name] = value;
    }
  }

  writeHash() {
    if (!this.usesHash) return;
    const { run, compare, step, position, layer, head, colour, canvas, trace } = this.state;
    const kept = Object.entries({ run, compare, step, position, layer, head, colour, canvas, trace }).filter(([, value]) => value !== "");
    try {
      history.replaceState(null, "", `#${new URLSearchParams(kept.map(([name, value]) => [name, String(value)]))}`);
    } catch { /* A sandboxed frame has no history; the state then lives in the page only. */ }
  }

  close() {
    this.abort.abort();
    clearInterval(this.timer);
    this.themes?.disconnect();
    this.sizes?.disconnect();
    this.panels?.forEach((panel) => panel.resizing.disconnect());
    this.source.close?.();
    this.root.replaceChildren();
  }
}

// 13. Places to mount it ----------------------------------------------------------------------------------------------

function mount(element, /** @type {Source} */ source, usesHash) {
  const explorer = new Explorer(element, source, usesHash);
  explorer.start();
  return () => explorer.close();
}

/** Mount in a page that contains its data. */
export const mountFile = (element) => mount(element, fileSource(), true);
/** Mount in the page of `diffusion-lens explore`. */
export const mountLive = (element) => mount(element, liveSource(), true);
/** For anywidget. */
export default { render: (/** @type {{model: any, el: HTMLElement}} */ { model, el }) => mount(el, widgetSource(model), false) };
