/** The form of a run: prompt and settings; and the questions that a new prompt leaves open, with suggestions. */

import { button, field, fillSelect, h, ids } from "./elements.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Spec} Spec @typedef {import("./types.js").Seen} Seen */

const orNull = (/** @type {string} */ text) => (text.trim() === "" ? null : text);
const numbersIn = (/** @type {string} */ text) => (text.trim() ? text.split(",").map(Number) : null);

export class PromptForm {
  constructor(/** @type {any} */ explorer) {
    this.explorer = explorer;
    const numeric = (/** @type {any} */ attributes) => h("input", { type: "number", ...attributes });
    const onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.element.requestSubmit();
    };
    this.prompt = h("textarea", { rows: 1, spellcheck: "false", id: ids(), "aria-label": "Prompt", oninput: () => this.separate(), onkeydown });
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
    this.settings = h("details", { class: "dl-settings" }, h("summary", {}, "Settings"), h("div", { class: "dl-fields dl-popover" },
      field("Model", this.model), field("Length", this.length), field("Steps", this.steps), field("Sampler", this.sampler),
      field("Guidance", this.guidance), field("Temperature", this.temperature), field("Seed", this.seed),
      field("Answer", this.answer), field("Subject: first position, one past its last", this.subject)));
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.run();
    };
    this.edited = false; // Whether the form contains what was typed and not run.
    this.stale = false; // Whether it is to show the run again that it showed before.
    /** @type {Spec|null} */ this.spec = null;
    this.element = h("form", { class: "dl-form", "aria-label": "Prompt and settings", onsubmit, oninput: () => (this.edited = true) },
      this.prompt, this.go, this.settings);
    this.settings.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") { this.settings.open = false; this.settings.firstChild.focus(); }
    });
  }

  fillSamplers() {
    const { models } = this.explorer.manifest, model = models[Number(this.model.value)] ?? models[0];
    fillSelect(this.sampler, [["", "default"], ...model.samplers.map((/** @type {string} */ name) => [name, name])],
      model.samplers.includes(this.sampler.value) ? this.sampler.value : "");
    this.sampler.disabled = model.grows;
  }

  /** Show the settings of a run in the form, unless they would replace what was typed and not run. */
  read(/** @type {Run|undefined} */ run) {
    if (this.edited || (run && run.spec === this.spec && !this.stale)) return;
    this.stale = false;
    const { models } = this.explorer.manifest, spec = (this.spec = run?.spec ?? null);
    const several = models.length > 1, both = several ? [["all", "all, side by side"]] : [];
    const all = several && (this.model.value === "" || this.model.value === "all");
    fillSelect(this.model, [...both, ...models.map((/** @type {any} */ { name }, /** @type {number} */ i) => [i, name])], all ? "all" : spec?.model ?? 0);
    this.fillSamplers();
    if (!spec) return;
    this.prompt.value = spec.prompt;
    for (const name of ["length", "steps", "seed", "temperature", "answer", "sampler"]) this[name].value = spec[name] ?? "";
    this.guidance.value = spec.cfg_scale;
    this.subject.value = spec.subject?.join(", ") ?? "";
  }

  /** Answer and subject belong to a prompt: while another one is typed, those of the shown run are left out. */
  separate() {
    const { prompt, answer, subject } = this.spec ?? {}, isOwn = this.prompt.value === prompt;
    for (const [input, own] of [[this.answer, answer ?? ""], [this.subject, subject?.join(", ") ?? ""]]) {
      if (input.value === (isOwn ? "" : own)) input.value = isOwn ? own : "";
    }
  }

  /** The answer and the subject of a prompt that is one of the facts, by model as tokenizers differ, where the form names none.
   * @param {string} prompt */
  async known(prompt) {
    const { explorer } = this, fact = explorer.manifest.facts?.find((/** @type {any} */ one) => one.prompt === prompt.trim());
    if (!fact || this.answer.value.trim() || this.subject.value.trim()) return {};
    const { subjects } = await explorer.source.suggest(prompt).catch(() => ({ subjects: [] }));
    const found = subjects.find((/** @type {any} */ { text }) => text === fact.subject);
    return { answer: fact.answer, spans: found?.spans ?? {} };
  }

  async run() {
    this.edited = false;
    this.settings.open = false;
    const spec = {
      prompt: this.prompt.value, length: this.length.value ? Number(this.length.value) : null, steps: Number(this.steps.value),
      sampler: this.sampler.value || null, cfg_scale: Number(this.guidance.value),
      temperature: Number(this.temperature.value), seed: Number(this.seed.value),
      answer: orNull(this.answer.value), subject: numbersIn(this.subject.value), interventions: [], base: null,
    };
    const { explorer } = this, { models } = explorer.manifest, asked = this.model.value;
    const known = await explorer.work("reading the prompt", () => this.known(spec.prompt));
    if (!known) return;
    const { answer, spans } = known;
    const asIn = (/** @type {number} */ model) => ({ ...spec, model, ...(answer ? { answer, subject: spans[model] ?? null } : {}) });
    if (asked !== "all") return explorer.compute([asIn(Number(asked))]);
    // Models side by side may be of different kinds: where a setting does not fit, a model takes its own.
    return explorer.compute(models.map((/** @type {any} */ { samplers, masks }, /** @type {number} */ model) => ({
      ...asIn(model), sampler: samplers.includes(spec.sampler) ? spec.sampler : null, cfg_scale: masks ? spec.cfg_scale : 0,
    })));
  }
}

/** Asks for the answer of a prompt, and for its subject, with suggestions: what marks it right or wrong, and what a
 * trace follows. It is shown where one of them is needed and not known. */
export class AnswerForm {
  constructor(/** @type {any} */ explorer) {
    this.explorer = explorer;
    this.answer = h("input", { type: "text", spellcheck: "false" });
    this.subject = h("input", { type: "text", placeholder: "first, end", spellcheck: "false" });
    this.answers = h("span", { class: "dl-suggestions" });
    this.subjects = h("span", { class: "dl-suggestions" });
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.use();
    };
    this.element = h("form", { class: "dl-card dl-ask", "aria-label": "Answer and subject", hidden: true, onsubmit },
      h("div", { class: "dl-fields" }, field("What is the right answer?", this.answer), this.answers),
      h("div", { class: "dl-fields" }, field("Which positions are the subject (first, one past its last)?", this.subject), this.subjects),
      h("div", { class: "dl-buttons" }, button("Cancel", () => this.close()), h("button", { type: "submit", class: "dl-primary" }, "Mark and trace")));
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.close());
    /** @type {Run|null} */ this.run = null;
    /** @type {Record<string, number[]>} */ this.spans = {}; // of the suggested subject, by model
  }

  async open(/** @type {Run} */ run) {
    this.run = run;
    this.spans = {};
    this.element.hidden = false;
    this.answer.value = run.spec.answer ?? "";
    this.subject.value = run.spec.subject?.join(", ") ?? "";
    for (const list of [this.answers, this.subjects]) list.replaceChildren();
    this.answer.focus({ preventScroll: true });
    const { answers, subjects } = await this.explorer.source.suggest(run.spec.prompt).catch(() => ({ answers: [], subjects: [] }));
    if (this.run !== run) return;
    const chip = (/** @type {string} */ text, /** @type {string} */ why, /** @type {() => void} */ use) => button(text.trim(), use, { title: why, class: "dl-chip" });
    this.answers.replaceChildren(...answers.map((/** @type {any} */ { text, why }) => chip(text, why, () => { this.answer.value = text; })));
    const placed = subjects.filter((/** @type {any} */ { spans }) => run.model in spans);
    this.subjects.replaceChildren(...placed.map((/** @type {any} */ { text, spans, why }) => chip(text, why, () => {
      this.spans = spans;
      this.subject.value = spans[run.model].join(", ");
    })));
  }

  close() {
    this.run = null;
    this.element.hidden = true;
  }

  /** Run again with answer and subject: every model that shows this prompt, a suggested subject where its own tokens are. */
  use() {
    const { run, spans, explorer } = this, answer = orNull(this.answer.value), typed = numbersIn(this.subject.value);
    const isSuggested = typed !== null && String(typed) === String(spans[run.model]);
    this.close();
    explorer.forget();
    const shown = explorer.shown.filter((/** @type {Run} */ one) => one.spec?.prompt === run.spec.prompt);
    return explorer.compute(shown.map((/** @type {Run} */ one) => ({ ...one.spec, answer, subject: isSuggested ? spans[one.model] ?? null : typed })));
  }
}
