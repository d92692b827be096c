/** The table of facts beside the canvas: sorted by what was measured, a click opens a row, averages over the selection. */

import { button, h, setText } from "./elements.js";
import { number } from "./words.js";

/** @typedef {import("./types.js").Fact} Fact @typedef {import("./types.js").Measured} Measured */

/** What is measured of a fact on a model: title of the column, order in which the first are the best, text. */
const MEASURES = {
  recalled: { title: "recalled", order: (/** @type {Measured} */ x) => (x.recalled === null ? NaN : Number(x.recalled)), say: (/** @type {Measured} */ x) => (x.recalled === null ? "" : x.recalled ? "✓" : "✗"), mean: (/** @type {number} */ m) => `${(100 * m).toFixed(0)} %` },
  p: { title: "p(answer)", order: (/** @type {Measured} */ x) => x.p ?? NaN, say: (/** @type {Measured} */ x) => (x.p === null ? "" : number(x.p)), mean: number },
  commitment: { title: "decided", order: (/** @type {Measured} */ x) => x.commitment ?? NaN, say: (/** @type {Measured} */ x) => (x.commitment === null ? "" : `step ${x.commitment}`), mean: (/** @type {number} */ m) => `step ${m.toFixed(1)}` },
  effect: { title: "effect", order: (/** @type {Measured} */ x) => x.effect ?? NaN, say: (/** @type {Measured} */ x) => (x.effect === null ? "" : number(x.effect)), mean: number },
};
const MOST_ADDED = 40, BETWEEN = 20; // rows that are added at once, more than are in view, and milliseconds until the next
const NOTHING = { recalled: null, p: null, commitment: null, effect: null };
const valuesOf = (/** @type {Fact} */ fact, /** @type {number} */ model) => /** @type {Measured} */ (fact.values[model] ?? NOTHING);

/** @typedef {{element: HTMLTableRowElement, box: HTMLInputElement, title: HTMLButtonElement}} Row  its cells are those of the element */

/** Names without what all of them begin with, up to a mark between words: "site-mdm" and "site-ar" are "mdm" and "ar".
 * @param {string[]} names */
function withoutPrefix(names) {
  if (names.length < 2) return names;
  const [first] = names;
  let shared = 0;
  while (shared < first.length && names.every((name) => name[shared] === first[shared])) shared++;
  const cut = Math.max(...["-", "_", "/", " ", "@"].map((mark) => first.lastIndexOf(mark, shared - 1))) + 1;
  return cut > shared ? names : names.map((name) => name.slice(cut));
}

export class FactsTable {
  constructor(/** @type {any} */ explorer) {
    this.explorer = explorer;
    /** @type {{key: string, down: boolean}} */ this.sorted = { key: "", down: true };
    /** @type {Set<number>} */ this.chosen = new Set();
    /** @type {Map<number, Row>} */ this.drawn = new Map(); // by id of the fact
    /** @type {Fact[]} */ this.shown = [];
    /** @type {Set<string>} */ this.opened = new Set(); // prompts of the runs that are shown
    this.isArranged = false;
    /** @type {any} */ this.appending = 0;
    this.filter = h("input", { type: "search", "aria-label": "Filter", placeholder: "Filter", oninput: () => this.arrange() });
    this.all = h("input", { type: "checkbox", "aria-label": "Select all rows", onchange: () => {
      this.chosen = new Set(this.all.checked ? this.shown.map(({ id }) => id) : []);
      for (const [id, { box }] of this.drawn) box.checked = this.chosen.has(id);
      this.drawMeans();
    } });
    this.groups = h("tr", {}, h("td", { colspan: 2 }));
    this.head = h("tr", {}, h("td", {}, this.all), h("th", { scope: "col" }, "prompt → answer"));
    this.body = h("tbody");
    this.mean = h("th", { scope: "row" });
    this.foot = h("tr", {}, h("td"), this.mean);
    this.compute = button("Measure", () => this.measure(false));
    this.effects = button("With effects", () => this.measure(true), { title: "Also how far p(answer) falls when the subject is corrupted; this takes longer" });
    const table = h("table", {}, h("thead", {}, this.groups, this.head), this.body, h("tfoot", {}, this.foot));
    this.element = h("aside", { class: "dl-facts", "aria-label": "Facts", hidden: true },
      h("header", {}, h("h3", {}, "Facts"), this.filter, this.compute, this.effects, button("Close", () => this.close())),
      h("div", { class: "dl-facts-scroll", tabindex: 0, role: "group", "aria-label": "Table of facts" }, table));
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.close());
  }

  close() {
    this.explorer.set({ facts: false });
    this.explorer.factsButton.focus({ preventScroll: true });
  }

  /** @returns {Fact[]} */
  get facts() { return this.explorer.manifest.facts ?? []; }
  /** @returns {{name: string}[]} */
  get models() { return this.explorer.manifest.models; }
  /** The columns: each measure of each model. That of the effect, the last one, is there once an effect is known. @returns {[string, number][]} */
  get columns() {
    const known = Object.keys(MEASURES).filter((name) => name !== "effect" || this.facts.some(({ values }) => Object.values(values).some(({ effect }) => effect !== null)));
    return known.flatMap((name) => this.models.map((_, model) => /** @type {[string, number]} */ ([name, model])));
  }

  /** The rows that the filter leaves, in their order. */
  get rows() {
    const wanted = this.filter.value.toLowerCase(), { key, down } = this.sorted;
    const left = this.facts.filter(({ prompt, answer }) => `${prompt}${answer}`.toLowerCase().includes(wanted));
    if (!key) return left;
    const [name, model] = key.split(" "), value = (/** @type {Fact} */ fact) => MEASURES[name].order(valuesOf(fact, Number(model)));
    const order = (/** @type {Fact} */ a, /** @type {Fact} */ b) => {
      const [x, y] = [value(a), value(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y));
      return down ? y - x : x - y;
    };
    return left.sort(order);
  }

  /** The facts of a page that is written now: those that are selected, or else measured; none while the table is closed. */
  get ofPage() {
    if (!this.explorer.state.facts) return [];
    const over = this.chosen.size ? this.facts.filter(({ id }) => this.chosen.has(id)) : this.facts.filter(({ values }) => Object.values(values).some(({ run }) => run));
    return over.map(({ id }) => id);
  }

  /** Show what the state says. Rows stay as they are: they change where a value does, a filter or an order. */
  draw() {
    const { explorer } = this;
    this.element.hidden = !explorer.state.facts || !this.facts.length;
    if (this.element.hidden) return;
    this.compute.hidden = this.effects.hidden = !explorer.source.live;
    this.compute.disabled = this.effects.disabled = explorer.working;
    if (!this.isArranged) this.arrange();
    const before = this.opened;
    this.opened = new Set(explorer.shown.map((/** @type {any} */ { prompt }) => prompt));
    if (before.size === this.opened.size && [...before].every((prompt) => this.opened.has(prompt))) return;
    for (const { id, prompt } of this.facts) if (before.has(prompt) || this.opened.has(prompt)) this.drawn.get(id)?.element.classList.toggle("dl-open", this.opened.has(prompt));
  }

  /** Put the rows that the filter leaves in order. */
  arrange() {
    const focused = /** @type {any} */ (document.activeElement), { columns, shown } = this;
    this.shown = this.rows;
    this.drawHead(columns);
    if (!this.isArranged || this.shown.length !== shown.length || this.shown.some((fact, i) => fact !== shown[i])) {
      this.body.replaceChildren();
      this.append();
    }
    this.isArranged = true;
    this.drawMeans(columns);
    if (this.body.contains(focused)) focused.focus({ preventScroll: true });
  }

  /** Add the next rows. Those of a long table come one part after the other, so that the page answers meanwhile. */
  append() {
    clearTimeout(this.appending);
    const { columns } = this, from = this.body.rows.length;
    this.body.append(...this.shown.slice(from, from + MOST_ADDED).map((fact) => this.rowOf(fact, columns).element));
    if (from + MOST_ADDED < this.shown.length) this.appending = setTimeout(() => this.append(), BETWEEN);
  }

  /** The row of a fact, made when it is first needed.
   * @param {Fact} fact @param {[string, number][]} columns @returns {Row} */
  rowOf(fact, columns) {
    if (!this.drawn.has(fact.id)) {
      const box = h("input", { type: "checkbox", "aria-label": `Select ${fact.prompt}`, onchange: () => {
        if (box.checked) this.chosen.add(fact.id);
        else this.chosen.delete(fact.id);
        this.drawMeans();
      } });
      box.checked = this.chosen.has(fact.id);
      const title = button(`${fact.prompt} → ${fact.answer.trim()}`, () => this.explorer.openFact(fact), { class: "dl-fact" });
      const element = h("tr", { class: this.opened.has(fact.prompt) ? "dl-open" : "" }, h("td", {}, box), h("td", {}, title));
      this.drawn.set(fact.id, { element, box, title });
      this.fill(fact, columns);
    }
    return this.drawn.get(fact.id);
  }

  /** Write the values of a fact into its row.
   * @param {Fact} fact @param {[string, number][]} columns */
  fill(fact, columns) {
    const { element, title } = this.drawn.get(fact.id), errors = this.models.flatMap(({ name }, model) => (valuesOf(fact, model).error ? [`${name}: ${valuesOf(fact, model).error}`] : []));
    setHint(title, errors.join("\n"));
    while (element.cells.length < columns.length + 2) element.insertCell();
    columns.forEach(([name, model], i) => {
      const value = valuesOf(fact, model), cell = element.cells[i + 2], isError = name === "recalled" && Boolean(value.error), isStudied = value.studied?.includes(name);
      setText(cell, isError ? "⚠" : MEASURES[name].say(value));
      cell.className = name !== "recalled" || value.recalled === null ? "" : value.recalled ? "dl-good" : "dl-bad";
      setHint(cell, isError ? value.error : isStudied ? "from a saved result" : "");
    });
  }

  /** Take over what was measured of a fact on a model, or why it was not.
   * @param {Fact} fact @param {number} model @param {Partial<Measured>} measured */
  take(fact, model, measured) {
    fact.values[model] = { ...valuesOf(fact, model), error: null, ...measured };
    const { columns } = this;
    if (!this.isArranged) return;
    // The first effect makes columns.
    const isWider = columns.length + 2 > this.head.children.length;
    if (isWider) this.drawHead(columns);
    for (const one of isWider ? this.facts : [fact]) if (this.drawn.has(one.id)) this.fill(one, columns);
    this.drawMeans(columns);
  }

  /** @param {[string, number][]} columns */
  drawHead(columns) {
    const { models } = this, names = withoutPrefix(models.map(({ name }) => name));
    this.groups.hidden = models.length < 2;
    columns.forEach(([name, model], i) => {
      const key = `${name} ${model}`, is = this.sorted.key === key, { title } = MEASURES[name], { length } = this.head.children;
      if (i + 2 >= length) {
        if (model === 0) this.groups.append(h("th", { scope: "colgroup", colspan: models.length }, title));
        const sort = () => {
          this.sorted = { key, down: this.sorted.key === key ? !this.sorted.down : true };
          this.arrange();
        };
        this.head.append(h("th", { scope: "col" }, button("", sort, { "aria-label": `Sort by ${title}, ${models[model].name}` })));
        this.foot.append(h("td"));
      }
      const cell = this.head.children[i + 2], studied = this.facts.filter((fact) => valuesOf(fact, model).studied?.includes(name)).length;
      setText(cell.firstChild, `${models.length > 1 ? names[model] : title}${studied ? "*" : ""}${is ? (this.sorted.down ? " ↓" : " ↑") : ""}`);
      setHint(cell.firstChild, studied ? `* ${studied} of ${this.facts.length} rows come from a saved result, the others from runs of this session` : "");
      cell.setAttribute("aria-sort", is ? (this.sorted.down ? "descending" : "ascending") : "none");
    });
  }

  /** Averages over the rows that are selected, or over all that are shown. */
  drawMeans(columns = this.columns) {
    const selected = this.shown.filter(({ id }) => this.chosen.has(id)), over = selected.length ? selected : this.shown;
    this.all.checked = selected.length === this.shown.length && this.shown.length > 0;
    const known = over.filter(({ values }) => Object.values(values).some(({ recalled }) => recalled !== null));
    let anyStudied = false;
    columns.forEach(([name, model], i) => {
      const numbers = over.map((fact) => MEASURES[name].order(valuesOf(fact, model))).filter((x) => !Number.isNaN(x)), cell = this.foot.children[i + 2];
      const studied = over.filter((fact) => valuesOf(fact, model).studied?.includes(name)).length;
      anyStudied ||= studied > 0;
      setText(cell, numbers.length ? `${MEASURES[name].mean(numbers.reduce((a, b) => a + b, 0) / numbers.length)}${studied ? "*" : ""}` : "");
      setHint(cell, `over ${numbers.length} of ${over.length}${studied ? `, ${studied} of them from a saved result` : ""}`);
    });
    setText(this.mean, `mean of ${selected.length ? `${over.length} selected` : `all ${over.length}`}${known.length < over.length ? `, ${known.length} measured` : ""}${anyStudied ? "; * with rows from a saved result" : ""}`);
  }

  /** Compute what is not known of the selected rows, or of all. A fact that cannot be measured says why in its row. */
  async measure(/** @type {boolean} */ effect) {
    const { explorer } = this, over = this.chosen.size ? this.facts.filter(({ id }) => this.chosen.has(id)) : this.shown;
    const lacks = (/** @type {Fact} */ fact, /** @type {Measured} */ { run, effect: known }) => !run || (effect && fact.subject !== null && known === null);
    const asked = over.flatMap((fact) => this.models.map((_, model) => ({ fact, model }))).filter(({ fact, model }) => lacks(fact, valuesOf(fact, model)));
    if (!asked.length) return explorer.say("All of these facts are measured.");
    const failed = await explorer.work("measuring facts", async (/** @type {any} */ told, /** @type {AbortSignal} */ signal) => {
      let errors = 0;
      for (const [i, { fact, model }] of asked.entries()) {
        told({ what: "facts measured", done: i, of: asked.length });
        try {
          this.take(fact, model, measuredIn(await explorer.source.fact({ id: fact.id, model, effect }, null, signal)));
        } catch (error) {
          if (signal.aborted || error.gone) throw error;
          errors++;
          this.take(fact, model, { error: error.message });
        }
      }
      return errors;
    });
    this.arrange();
    if (failed !== null) explorer.say(failed ? `Done; ${failed} of ${asked.length} could not be measured, and their rows (⚠) say why.` : "Done.");
  }
}

/** The values in an answer of the source. @returns {Partial<Measured>} */
export const measuredIn = (/** @type {any} */ { recalled, p, commitment, effect, run, error, studied }) => ({ recalled, p, commitment, effect, run, error, studied });

/** A hint under the pointer; none without a text.
 * @param {any} element @param {string} text */
function setHint(element, text) {
  if (element.title === text) return;
  if (text) element.title = text;
  else element.removeAttribute("title");
}
