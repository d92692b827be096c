/** The table of facts beside the canvas: sorted by what was measured, a click opens a row, averages over the selection. */

import { button, h } from "./elements.js";
import { number } from "./words.js";

/** @typedef {import("./types.js").Fact} Fact @typedef {import("./types.js").Measured} Measured */

/** What is measured of a fact on a model: title of the column, order in which the first are the best, text. */
const MEASURES = {
  recalled: { title: "recalled", order: (/** @type {Measured} */ x) => (x.recalled === null ? NaN : Number(x.recalled)), say: (/** @type {Measured} */ x) => (x.recalled === null ? "" : x.recalled ? "✓" : "✗"), mean: (/** @type {number} */ m) => `${(100 * m).toFixed(0)} %` },
  p: { title: "p(answer)", order: (/** @type {Measured} */ x) => x.p ?? NaN, say: (/** @type {Measured} */ x) => (x.p === null ? "" : number(x.p)), mean: number },
  commitment: { title: "decided", order: (/** @type {Measured} */ x) => x.commitment ?? NaN, say: (/** @type {Measured} */ x) => (x.commitment === null ? "" : `step ${x.commitment}`), mean: (/** @type {number} */ m) => `step ${m.toFixed(1)}` },
  effect: { title: "effect", order: (/** @type {Measured} */ x) => x.effect ?? NaN, say: (/** @type {Measured} */ x) => (x.effect === null ? "" : number(x.effect)), mean: number },
};
const NOTHING = { recalled: null, p: null, commitment: null, effect: null };

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
    this.filter = h("input", { type: "search", "aria-label": "Filter", placeholder: "Filter", oninput: () => this.draw() });
    this.all = h("input", { type: "checkbox", "aria-label": "Select all rows", onchange: () => {
      this.chosen = new Set(this.all.checked ? this.rows.map(({ id }) => id) : []);
      this.draw();
    } });
    this.groups = h("tr");
    this.head = h("tr");
    this.body = h("tbody");
    this.foot = h("tr");
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
  /** The columns: each measure of each model. @returns {[string, number][]} */
  get columns() {
    const known = Object.keys(MEASURES).filter((name) => name !== "effect" || this.facts.some(({ values }) => Object.values(values).some(({ effect }) => effect !== null)));
    return known.flatMap((name) => this.explorer.manifest.models.map((/** @type {any} */ _, /** @type {number} */ model) => /** @type {[string, number]} */ ([name, model])));
  }

  /** The rows that the filter leaves, in their order. */
  get rows() {
    const wanted = this.filter.value.toLowerCase(), { key, down } = this.sorted;
    const left = this.facts.filter(({ prompt, answer }) => `${prompt}${answer}`.toLowerCase().includes(wanted));
    if (!key) return left;
    const [name, model] = key.split(" "), value = (/** @type {Fact} */ fact) => MEASURES[name].order(fact.values[model] ?? NOTHING);
    const order = (/** @type {Fact} */ a, /** @type {Fact} */ b) => {
      const [x, y] = [value(a), value(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y));
      return down ? y - x : x - y;
    };
    return left.sort(order);
  }

  draw() {
    const { explorer } = this, { models } = explorer.manifest, { columns, rows } = this;
    this.element.hidden = !explorer.state.facts || !this.facts.length;
    if (this.element.hidden) return;
    this.compute.hidden = this.effects.hidden = !explorer.source.live;
    this.compute.disabled = this.effects.disabled = explorer.working;
    const name = (/** @type {Element} */ one) => one.ariaLabel ?? one.textContent, focused = this.element.contains(document.activeElement) ? document.activeElement : null;
    const sort = (/** @type {string} */ key) => {
      this.sorted = { key, down: this.sorted.key === key ? !this.sorted.down : true };
      this.draw();
    };
    const names = withoutPrefix(models.map((/** @type {any} */ { name }) => name));
    const measures = [...new Set(columns.map(([name]) => name))];
    this.groups.hidden = models.length < 2;
    this.groups.replaceChildren(h("td", { colspan: 2 }), ...measures.map((name) => h("th", { scope: "colgroup", colspan: models.length }, MEASURES[name].title)));
    this.head.replaceChildren(h("td", {}, this.all), h("th", { scope: "col" }, "prompt → answer"), ...columns.map(([name, model]) => {
      const key = `${name} ${model}`, is = this.sorted.key === key, arrow = is ? (this.sorted.down ? " ↓" : " ↑") : "";
      const text = models.length > 1 ? names[model] : MEASURES[name].title;
      return h("th", { scope: "col", "aria-sort": is ? (this.sorted.down ? "descending" : "ascending") : "none" },
        button(`${text}${arrow}`, () => sort(key), { "aria-label": `Sort by ${MEASURES[name].title}, ${models[model].name}` }));
    }));
    const shown = explorer.shown.map((/** @type {any} */ { prompt }) => prompt);
    this.body.replaceChildren(...rows.map((fact) => {
      const box = h("input", { type: "checkbox", "aria-label": `Select ${fact.prompt}`, onchange: () => {
        if (box.checked) this.chosen.add(fact.id);
        else this.chosen.delete(fact.id);
        this.drawMeans();
      } });
      box.checked = this.chosen.has(fact.id);
      return h("tr", { class: shown.includes(fact.prompt) ? "dl-open" : "" }, h("td", {}, box),
        h("td", {}, button(`${fact.prompt} → ${fact.answer.trim()}`, () => explorer.openFact(fact), { class: "dl-fact" })),
        ...columns.map(([name, model]) => {
          const value = fact.values[model] ?? NOTHING;
          return h("td", { class: name === "recalled" && value.recalled !== null ? (value.recalled ? "dl-good" : "dl-bad") : "" }, MEASURES[name].say(value));
        }));
    }));
    this.drawMeans();
    // The rows are new ones, also that which has the focus.
    if (focused && !focused.isConnected) {
      /** @type {HTMLElement[]} */ const alike = [...this.element.querySelectorAll("button, input")].filter((one) => name(one) === name(focused));
      alike[0]?.focus({ preventScroll: true });
    }
  }

  /** Averages over the rows that are selected, or over all that are shown. */
  drawMeans() {
    const { rows, columns } = this, selected = rows.filter(({ id }) => this.chosen.has(id)), over = selected.length ? selected : rows;
    this.all.checked = selected.length === rows.length && rows.length > 0;
    const known = over.filter(({ values }) => Object.values(values).some(({ recalled }) => recalled !== null));
    const cells = columns.map(([name, model]) => {
      const numbers = over.map(({ values }) => MEASURES[name].order(values[model] ?? NOTHING)).filter((x) => !Number.isNaN(x));
      const mean = numbers.reduce((a, b) => a + b, 0) / numbers.length;
      return h("td", { title: `over ${numbers.length} of ${over.length}` }, numbers.length ? MEASURES[name].mean(mean) : "");
    });
    this.foot.replaceChildren(h("td"), h("th", { scope: "row" }, `mean of ${selected.length ? `${over.length} selected` : `all ${over.length}`}${known.length < over.length ? `, ${known.length} measured` : ""}`), ...cells);
  }

  /** Compute what is not known of the selected rows, or of all. */
  async measure(/** @type {boolean} */ effect) {
    const { explorer } = this, { models } = explorer.manifest;
    const over = this.chosen.size ? this.facts.filter(({ id }) => this.chosen.has(id)) : this.rows;
    const asked = over.flatMap((fact) => models.map((/** @type {any} */ _, /** @type {number} */ model) => ({ fact, model })))
      .filter(({ fact, model }) => (fact.values[model]?.recalled ?? null) === null || (effect && fact.subject !== null && (fact.values[model]?.effect ?? null) === null));
    await explorer.work("measuring facts", async (/** @type {any} */ told, /** @type {AbortSignal} */ signal) => {
      for (const [i, { fact, model }] of asked.entries()) {
        told({ what: "facts measured", done: i, of: asked.length });
        const { recalled, p, commitment, effect: fallen, run } = await explorer.source.fact({ id: fact.id, model, effect }, null, signal);
        fact.values[model] = { recalled, p, commitment, effect: fallen, run };
        this.draw();
      }
    });
    this.draw();
  }
}
