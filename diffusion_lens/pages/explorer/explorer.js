/**
 * The explorer: the runs that are shown, what is selected, and the order of the page.
 *
 * From top to bottom: prompt, the canvases of one or two runs, the steps, the layers at the selected position, and one
 * of the views, which shows more of what is selected. A selection is a change of the state; each part draws itself from
 * it. All that is computed comes from the source.
 */

import { keptOf, mismatch, needed, openedBy, written } from "./address.js";
import { OVERLAYS, drawOverlayLegend, overlayOf, overlaysOf } from "./canvas.js";
import { ChangesDrawer } from "./changes.js";
import { Chunks, prepare } from "./chunks.js";
import { Column } from "./column.js";
import { button, field, fillSelect, h, ids, setText } from "./elements.js";
import { FactsTable, measuredIn } from "./facts.js";
import { helpText } from "./help.js";
import { clamp } from "./numbers.js";
import { predictedOf } from "./predicted.js";
import { AnswerForm, PromptForm } from "./prompt.js";
import { codeOf, decisiveStep, differenceInWords, differences, lastStep, lengthOf, modelOf, nameIn, stateAt, stepsOf } from "./runs.js";
import { shareMenu } from "./share.js";
import { VIEWS } from "./views.js";
import { reasons } from "./why.js";
import { Work } from "./work.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Spec} Spec @typedef {import("./types.js").State} State */
/** @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Chunk} Chunk @typedef {import("./types.js").Told} Told */

const WHOLE_PLAY = 5000, SLOWEST = 700; // milliseconds for all steps, and at most for one
const QUICK = 300, PAUSE = 120; // milliseconds between selections that follow quickly, and before a chunk is asked for then
/** What is selected where nothing says otherwise. @type {State} */
const START = {
  run: "", compare: "", left: "", step: -1, position: -1, layer: -1, head: 0, key: null, view: "", colour: "top", canvas: "confidence", trace: "", graph: "", facts: false,
  written: true,
};

/** All of it: the state, what is loaded, and the parts of the page. */
export class Explorer {
  constructor(/** @type {HTMLElement} */ element, /** @type {import("./types.js").Source} */ source, /** @type {boolean} */ hasAddress) {
    this.root = element;
    this.source = source;
    this.hasAddress = hasAddress;
    /** @type {import("./types.js").Manifest} */ this.manifest = null;
    this.chunks = new Chunks();
    this.doing = new Work(this);
    /** @type {State} */ this.state = { ...START };
    this.kept = ""; // the runs in the newest entry of the history
    this.openings = 0;
    this.drawnAt = -Infinity;
    this.hurried = false;
    /** @type {number[]} */ this.steps = [0];
    this.drawing = 0;
    /** @type {any} */ this.timer = 0;
    this.abort = new AbortController();
    element.classList.add("dl-explorer");
  }

  get runs() { return this.manifest.runs; }
  get working() { return this.doing.present !== null; }
  /** The runs that are shown, in their order on the page. @returns {Run[]} */
  get shown() { return this.columns.map(({ run }) => run).filter(Boolean); }
  get active() { return this.columns.find(({ run }) => run?.id === this.state.run) ?? this.columns[0]; }
  get view() { return VIEWS.find(({ name }) => name === this.state.view) ?? VIEWS[0]; }
  get dark() { return getComputedStyle(this.root).getPropertyValue("--dl-dark").trim() === "1"; }

  async start() {
    try {
      this.manifest = await this.source.manifest();
    } catch (error) {
      this.root.append(h("p", { role: "alert", class: "dl-alert" }, error.message));
      return;
    }
    this.build();
    await this.open();
  }

  /** Open what was kept, or what the address names; runs that are not there are computed. What neither names is the default. */
  async open() {
    const opening = ++this.openings, isFirst = opening === 1, wasShown = this.kept;
    await this.doing.cancel();
    if (opening !== this.openings) return;
    const opened = openedBy({ ...this.manifest.state, ...this.source.state?.() }, this.hasAddress ? location.hash : "");
    const problem = mismatch(opened.models, this.manifest.models), said = [opened.problem, problem].filter(Boolean);
    const { state, specs } = problem ? { state: {}, specs: [] } : opened;
    const lacking = !this.source.run ? [] : specs.filter((spec) => !this.runs.some((run) => JSON.stringify(run.spec) === JSON.stringify(spec)));
    const done = !lacking.length || await this.work("opening the link", async (told, signal) => {
      for (const spec of lacking) {
        try {
          this.add(await this.source.run(spec, told, signal));
        } catch (error) {
          if (signal.aborted) throw error;
          said.push(`A run of this link could not be computed: ${error.message}`);
        }
      }
      return true;
    });
    if (opening !== this.openings) return;
    if (said.length) this.fail(said.join(" "));
    this.main.hidden = this.runs.length === 0;
    const [first] = this.runs, has = (/** @type {string} */ id) => this.runs.some((run) => run.id === id);
    if (!first) return;
    if (wasShown && (!done || problem)) return this.keep(); // What was shown stays.
    const { run, compare } = state, other = this.runs.find((one) => one.base === null && one.model !== first.model);
    const shown = has(run) ? {} : has(compare) ? { run: compare, compare: "" } : { run: first.id, compare: run ? "" : other?.id ?? "" };
    const known = Object.fromEntries(Object.entries(state).filter(([name]) => name in START));
    Object.assign(this.state, START, known, shown);
    this.kept = "";
    this.forget();
    const plays = isFirst && !("step" in known) && !matchMedia("(prefers-reduced-motion: reduce)").matches;
    await this.set(plays ? { step: 0 } : {});
    if (plays) this.play(true);
  }

  /** A run is opened: the form shows it, and not what was typed before. What is typed until it comes is kept. */
  forget() { if (this.form) Object.assign(this.form, { edited: false, stale: true }); }

  /** Add a run to those of the page, or put it in the place of the same one. */
  add(/** @type {Run} */ run) {
    const at = this.runs.findIndex(({ id }) => id === run.id);
    if (at < 0) this.runs.push(run);
    else this.runs[at] = run;
  }

  build() {
    const { live } = this.source;
    this.columns = [new Column(this), new Column(this)];
    this.form = live ? new PromptForm(this) : null;
    this.answers = new AnswerForm(this);
    this.drawer = new ChangesDrawer(this);
    this.facts = new FactsTable(this);
    this.factsButton = button("Facts", () => this.set({ facts: !this.state.facts }), { "aria-pressed": "false" });
    this.factsButton.hidden = !this.manifest.facts?.length;
    this.runSelect = h("select", { onchange: () => this.choose({ run: this.runSelect.value, compare: this.columns[1].run?.id ?? "" }) });
    this.compareSelect = h("select", { onchange: () => this.choose({ run: this.columns[0].run.id, compare: this.compareSelect.value }) });
    this.choice = h("span", { class: "dl-group dl-runs" }, field("Run", this.runSelect), field("beside", this.compareSelect));
    this.tools = h("span", { class: "dl-group dl-tools" }, this.factsButton, shareMenu(this),
      button("as Python", () => this.code("run", "The run"), { class: "dl-code" }),
      button("?", () => this.show("Words and keys", helpText()), { "aria-label": "Help", class: "dl-code" }));
    this.title = h("h1", {}, this.manifest.title);
    this.head = h("header", { class: "dl-title" }, this.title, this.form?.element ?? h("span", { class: "dl-prompt-text" }), this.choice, this.tools);

    this.slider = h("input", { type: "range", min: 0, step: 1, oninput: () => { this.play(false); this.set({ step: this.steps[Number(this.slider.value)] }); } });
    this.stepText = h("span", { class: "dl-step-text" });
    this.playing = button("Play", () => this.play(!this.timer), { "aria-pressed": "false" });
    this.overlaySelect = h("select", { onchange: () => this.set({ canvas: this.overlaySelect.value }) });
    this.overlay = field("Colours show", this.overlaySelect);
    this.legend = h("span", { class: "dl-legend" });
    const step = (/** @type {number} */ by, /** @type {string} */ text, /** @type {string} */ label) =>
      button(text, () => { this.play(false); this.stepBy(by); }, { "aria-label": label });
    this.transport = h("div", { class: "dl-transport", role: "group", "aria-label": "Steps" },
      this.playing, step(-1, "◀", "previous step"), field("Step", this.slider, "dl-grow"), step(1, "▶", "next step"), this.stepText,
      h("span", { class: "dl-group" }, this.overlay, this.legend));

    this.stage = h("div", { class: "dl-stage" });
    this.bands = h("div", { class: "dl-bands" });
    this.tabs = h("div", { class: "dl-tabs", role: "tablist", "aria-label": "Views" });
    this.panel = h("div", { class: "dl-panel", role: "tabpanel", id: ids(), tabindex: 0 });
    this.buildTabs();
    this.status = h("div", { class: "dl-status", role: "status", "aria-live": "polite" });
    this.alert = h("div", { class: "dl-alert", role: "alert", hidden: true });
    this.dialog = h("dialog", { class: "dl-dialog", "aria-labelledby": ids() });
    this.main = h("div", { class: "dl-main" }, this.stage, this.transport, this.bands, this.answers.element, this.tabs, this.panel);
    this.main.hidden = this.runs.length === 0;
    this.root.append(this.head, h("div", { class: "dl-body" }, this.facts.element, this.main, this.drawer.element),
      h("div", { class: "dl-foot" }, this.alert, this.doing.element, this.status), this.dialog);
    this.listen();
  }

  buildTabs() {
    this.tabs.replaceChildren(...VIEWS.map((view) => h("button", {
      type: "button", role: "tab", id: ids(), "data-view": view.name, "aria-controls": this.panel.id, title: view.help,
      onclick: () => this.openView(view.name),
    }, view.title)));
    this.tabs.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const open = [...this.tabs.children].filter((tab) => !tab.hidden), at = open.findIndex((tab) => tab.dataset.view === this.view.name);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: open.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const tab = open[(to + open.length) % open.length];
      this.openView(tab.dataset.view);
      tab.focus();
    });
  }

  listen() {
    const { signal } = this.abort;
    this.root.addEventListener("keydown", (/** @type {any} */ event) => {
      if (event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "[" || event.key === "]") { this.play(false); this.stepBy(event.key === "[" ? -1 : 1); }
      if (event.key === "?") this.show("Words and keys", helpText());
      // The token and the layer that have the focus are selected already, so the space bar has nothing else to do there.
      if (event.key === " " && !event.target.closest("button:not([aria-pressed=true]:is(.dl-text *, .dl-layers *)), input, [role=grid], summary, a")) { event.preventDefault(); this.play(!this.timer); }
    }, { signal });
    // Who looks at something wants it to hold still.
    this.root.addEventListener("pointerdown", (/** @type {any} */ event) => event.target.closest("button") !== this.playing && this.play(false), { signal });
    let { dark } = this;
    const repaint = () => {
      if (this.dark === dark) return;
      dark = this.dark;
      this.render();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, { signal });
    this.themes = new MutationObserver(repaint);
    const attributeFilter = ["data-theme", "class", "data-jp-theme-light"];
    for (const themed of [document.documentElement, document.body]) this.themes.observe(themed, { attributeFilter });
    let width = 0;
    this.sizes = new ResizeObserver(() => {
      if (this.main.clientWidth !== width && this.shown.length) this.render();
      width = this.main.clientWidth;
    });
    this.sizes.observe(this.main);
    if (this.hasAddress) {
      addEventListener("hashchange", () => location.hash.slice(1) === this.address() || this.open(), { signal });
    }
  }

  /** A chunk, decoded. @returns {Promise<Chunk>} */
  chunk(/** @type {Run} */ run, /** @type {string} */ name, /** @type {Told|undefined} */ told = undefined, /** @type {AbortSignal|undefined} */ signal = undefined) {
    const again = async (/** @type {any} */ error) => {
      if (!error.unknown || !run.spec || !this.source.run) throw error;
      await this.recompute(run.spec);
      return this.source.chunk(run.id, name, told, signal);
    };
    return this.chunks.get(`${run.id} ${name}`, () => this.source.chunk(run.id, name, told, signal).catch(again));
  }

  /** A chunk for a drawing. While selections follow quickly, none is asked for that would not be shown. @returns {Promise<Chunk>} */
  async wanted(/** @type {number} */ drawing, /** @type {Run} */ run, /** @type {string} */ name, /** @type {Told|undefined} */ told, /** @type {AbortSignal|undefined} */ signal) {
    if (this.hurried && this.source.live && !signal && name.includes("/") && !this.chunks.has(`${run.id} ${name}`)) {
      await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
      if (this.drawing !== drawing) throw new Error("Something else was selected meanwhile.");
    }
    return this.chunk(run, name, told, signal);
  }

  /** Compute a run. Those that it names, and that the source has dropped since, are computed again. @returns {Promise<Run>} */
  async recompute(/** @type {Spec} */ spec, /** @type {Told|undefined} */ told = undefined, /** @type {AbortSignal|undefined} */ signal = undefined) {
    try {
      return await this.source.run(spec, told, signal);
    } catch (error) {
      const named = [spec.base, ...spec.interventions.map(({ source }) => source)];
      const dropped = needed(this.runs, named.filter(Boolean)).filter((run) => run.spec);
      if (!error.unknown || !dropped.length) throw error;
      for (const run of dropped) await this.source.run(run.spec, told, signal);
      return this.source.run(spec, told, signal);
    }
  }

  /** Do what takes long: with progress, the time, and a way to cancel it. Null where it failed or was cancelled. */
  work(/** @type {string} */ name, /** @type {(told: Told, signal: AbortSignal) => Promise<any>} */ task) { return this.doing.run(name, task); }

  busy(/** @type {boolean} */ is) {
    this.root.classList.toggle("dl-computing", is);
    if (this.form) this.form.go.disabled = is;
    this.facts.draw();
    this.drawer.draw(this.seen());
  }

  /** Compute runs, and show them: the first, and the second or another one beside it. */
  async compute(/** @type {Spec[]} */ specs, beside = "") {
    this.play(false);
    const runs = await this.work(`computing ${specs.length > 1 ? `${specs.length} runs` : "the run"}`, async (told, signal) => {
      /** @type {Run[]} */ const came = [];
      try {
        for (const spec of specs) came.push(await this.recompute(spec, told, signal));
      } catch (error) {
        if (!came.length || signal.aborted) throw error;
        this.fail(error.message); // The first model has answered; its run is shown.
      }
      return came;
    });
    if (!runs) return;
    for (const run of runs) this.add(run);
    this.main.hidden = false;
    const [first, second] = runs, isNew = !this.shown.some(({ prompt }) => prompt === first.prompt);
    await this.set({ run: first.id, compare: second?.id ?? beside, ...(isNew ? { step: -1, position: -1 } : {}) });
    const base = this.runs.find((run) => run.id === first.base), said = base ? differenceInWords(first, base).map(({ text }) => text) : [];
    this.say(`Done.${!base ? "" : said.length ? ` ${said.join("; ")}` :
      differences(first, base).steps.length ? " The text is the same in the end." : " It is the same as the base run."}`);
    if (isNew && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      await this.set({ step: this.steps[0] });
      this.play(true);
    }
  }

  /** Run again with one more intervention, beside the run that has none, or the other model. */
  change(/** @type {Run} */ run, /** @type {import("./types.js").Intervention} */ edit) {
    const base = this.runs.find(({ id }) => id === run.base) ?? run;
    this.forget();
    return this.compute([{ ...run.spec, interventions: [...run.spec.interventions, edit], base: base.id }], this.besides(run, base));
  }

  /** Run again without one of the interventions. Its button goes, so the focus goes to the one that makes changes. */
  async undo(/** @type {Run} */ run, /** @type {number} */ index) {
    const interventions = run.spec.interventions.filter((_, i) => i !== index), base = interventions.length ? run.base : null;
    const other = this.besides(run, interventions.length ? this.runs.find(({ id }) => id === run.base) : null);
    this.forget();
    await this.compute([{ ...run.spec, interventions, base }], other);
    if (document.activeElement === document.body) this.active.change.focus({ preventScroll: true });
  }

  /** The run to show beside a changed one: that of another model where one is shown, otherwise the base. */
  besides(/** @type {Run} */ run, /** @type {Run|null|undefined} */ base) {
    return this.shown.find((other) => other.model !== run.model)?.id ?? base?.id ?? "";
  }

  /** Show the runs of a fact on all models; those that are not there are computed. */
  async openFact(/** @type {import("./types.js").Fact} */ fact) {
    this.forget();
    const { models } = this.manifest, known = models.map((_, model) => this.runs.find(({ id }) => id === fact.values[model]?.run));
    if (known.every(Boolean) || !this.source.fact) {
      const [first, second] = known.filter(Boolean);
      if (first) return this.set({ run: first.id, compare: second?.id ?? "", step: -1, position: -1 });
      return this.say("This page does not contain the run of this fact.");
    }
    if (this.working) return this.say("The explorer is computing: wait until it has finished, or cancel it, and choose the fact again.");
    /** @type {string[]} */ const errors = [];
    const specs = await this.work("computing the fact", async (told, signal) => {
      const came = [];
      for (const [model] of models.entries()) {
        try {
          const answer = await this.source.fact({ id: fact.id, model, effect: false }, told, signal);
          this.facts.take(fact, model, measuredIn(answer));
          came.push(answer.spec);
        } catch (error) {
          if (signal.aborted || error.gone) throw error;
          this.facts.take(fact, model, { error: error.message });
          errors.push(error.message);
        }
      }
      return came;
    });
    if (specs?.length) await this.compute(specs);
    if (errors.length) this.fail(errors.join(" "));
  }

  /** Show other runs of the page. */
  choose(/** @type {Partial<State>} */ runs) {
    this.forget();
    return this.set(runs);
  }

  /** Change the state and draw. */
  async set(/** @type {Partial<State>} */ change) {
    Object.assign(this.state, change);
    if (change.position !== undefined && change.key === undefined) this.state.key = null;
    // Who selects a token wants to know what wrote it; who selects a step, what happens there.
    if (change.written === undefined && change.step !== undefined) this.state.written = change.step < 0;
    else if (change.written === undefined && change.position !== undefined) this.state.written = true;
    if (!this.runs.length) return;
    this.settle();
    this.form?.read(this.runs.find(({ id }) => id === this.state.run));
    this.keep();
    await this.render();
    this.say(this.summary());
  }

  /** Bring the state into the ranges of the run. */
  settle() {
    const { state } = this, run = this.runs.find((one) => one.id === state.run) ?? this.runs[0], model = modelOf(this.manifest, run);
    state.run = run.id;
    if (!this.runs.some((one) => one.id === state.compare) || state.compare === state.run) state.compare = "";
    // The run on the left stays on the left when the other one becomes the active one, or is another.
    if (!state.compare || state.left !== state.compare) state.left = state.run;
    if (state.position < 0) state.position = Math.max(0, run.answer?.positions[0] ?? run.revealed_at?.findIndex((at) => at >= 0) ?? 0);
    state.position = Math.min(state.position, lengthOf(run) - 1);
    if (!(state.canvas in OVERLAYS)) state.canvas = "confidence";
    const middle = Math.floor(model.n_layers / 2), cached = run.attention?.layers ?? [];
    if (state.layer < 0) state.layer = cached.includes(middle) ? middle : cached[0] ?? middle;
    const other = this.runs.find((one) => one.id === state.compare);
    this.steps = [...new Set([run, ...(other ? [other] : [])].flatMap(stepsOf))].sort((a, b) => a - b);
    if (state.step < 0) state.step = this.steps.at(-1);
    state.step = this.steps.findLast((step) => step <= state.step) ?? this.steps[0];
    state.layer = clamp(state.layer, 0, model.n_layers);
    state.head = clamp(state.head, 0, model.n_heads - 1);
    if (!VIEWS.some(({ name }) => name === state.view)) state.view = VIEWS[0].name;
  }

  /** The run on the left, for one on the right of the same model and prompt: they are compared. @returns {Run|null} */
  twin(/** @type {Run} */ run) {
    const [left, right] = this.shown;
    return right === run && left.model === run.model && left.prompt === run.prompt && left.base !== run.id ? left : null;
  }

  /** What is selected in a run, for its parts. @returns {Seen|null} */
  seen(/** @type {Run|null} */ run = this.active?.run ?? null) {
    if (!run) return null;
    const { state, drawing } = this, model = modelOf(this.manifest, run), position = clamp(state.position, 0, lengthOf(run) - 1);
    const shown = stepsOf(run).findLast((step) => step <= state.step) ?? run.steps[0];
    const canCompute = this.source.live && run.spec !== null && run.spec !== undefined;
    return {
      run, model, state, live: this.source.live, dark: this.dark,
      base: this.runs.find(({ id }) => id === run.base) ?? this.twin(run),
      shown, position, step: state.written ? decisiveStep(run, model, shown, position) : shown,
      layer: Math.min(state.layer, model.n_layers),
      block: clamp(state.layer, 0, model.n_layers - 1),
      head: clamp(state.head, 0, model.n_heads - 1),
      key: state.key,
      chunk: (name, of = run, told, signal) => this.wanted(drawing, of, name, told, signal),
      loaded: (name) => this.chunks.loaded(`${run.id} ${name}`),
      current: () => this.drawing === drawing,
      select: (change) => this.set(this.shown.includes(run) && run.id !== state.run ? { run: run.id, compare: state.run, ...change } : change),
      say: (text) => this.say(text),
      work: (name, task) => this.work(name, task),
      code: (view, title, values) => this.code(view, title, values, run),
      change: canCompute ? (site = "") => this.drawer.toggle(true, site) : null,
      ask: canCompute ? () => this.answers.open(run) : null,
    };
  }

  async render() {
    const { state, runs, stage, bands } = this;
    const wanted = [state.run, state.compare].map((id) => runs.find((run) => run.id === id)).filter(Boolean);
    if (state.left === state.compare) wanted.reverse();
    this.columns.forEach((column, i) => { column.run = wanted[i] ?? null; });
    const drawing = (this.chunks.drawing = ++this.drawing), now = performance.now(), columns = this.columns.filter(({ run }) => run);
    [this.hurried, this.drawnAt] = [now - this.drawnAt < QUICK, now];
    this.root.dataset.state = "drawing";
    for (const part of [stage, bands, this.panel]) part.classList.toggle("dl-pair", columns.length === 2);
    const { view } = this;
    replace(stage, columns.map(({ element }) => element));
    replace(bands, columns.map(({ band }) => band.element));
    replace(this.panel, columns.map((column) => column.pane(view).box));
    this.markActive();
    this.drawTransport();
    this.drawTabs();
    this.facts.draw();
    this.factsButton.setAttribute("aria-pressed", String(state.facts));
    this.drawer.draw(this.seen());
    try {
      await Promise.all(columns.flatMap((column) => {
        const seen = this.seen(column.run);
        return [column.draw(seen), column.drawPane(view, seen)];
      }));
    } catch (error) {
      if (this.drawing === drawing) this.fail(error.message);
    }
    if (this.drawing !== drawing) return;
    this.root.dataset.state = "ready";
    if (!this.source.live) prepare(this);
  }

  drawTransport() {
    const { state, runs, active: { run } } = this, seen = this.seen();
    this.slider.max = String(this.steps.length - 1);
    this.slider.value = String(this.steps.indexOf(state.step));
    const time = run.times?.[run.steps.indexOf(seen.shown)];
    setText(this.stepText, `${seen.shown} of ${run.steps[0]}–${lastStep(run)}${time === undefined ? "" : `, t ${time.toFixed(2)}`}`);
    this.slider.setAttribute("aria-valuetext", `step ${seen.shown}`);
    const overlay = overlayOf(seen);
    fillSelect(this.overlaySelect, overlaysOf(run).map((name) => [name, OVERLAYS[name]]), overlay);
    this.overlay.hidden = !run.predictions;
    const drawing = this.drawing;
    predictedOf(seen).catch(() => null).then((predicted) => drawing === this.drawing && drawOverlayLegend(this.legend, overlay, predicted, seen.dark));
    // The runs of facts are chosen in their table.
    const chosen = runs.filter((one) => this.shown.includes(one) || one.fact === undefined);
    const named = chosen.map((one) => [one.id, nameIn(runs, one)]);
    this.choice.hidden = chosen.length < 2 || (chosen.length === 2 && this.shown.length === 2);
    const [left, right] = this.columns.map((column) => column.run?.id ?? "");
    fillSelect(this.runSelect, named, left);
    fillSelect(this.compareSelect, [["", "–"], ...named.filter(([id]) => id !== left)], right);
    if (!this.form) setText(this.head.children[1], run.prompt);
  }

  drawTabs() {
    const seens = this.shown.map((run) => this.seen(run));
    [...this.tabs.children].forEach((tab, i) => {
      const is = VIEWS[i] === this.view, { missing, name } = VIEWS[i];
      // A view for which no run of the page has anything is not offered, unless the page says what would make it.
      tab.hidden = !is && seens.every((seen) => missing(seen) !== null && !(name in (seen.run.missing ?? {})) && !(seen.run[name] ?? seen.run[`${name}s`]?.length));
      tab.setAttribute("aria-selected", String(is));
      tab.tabIndex = is ? 0 : -1;
      if (!is) return;
      this.panel.setAttribute("aria-labelledby", tab.id);
      this.tabs.scrollLeft = clamp(this.tabs.scrollLeft, tab.offsetLeft + tab.offsetWidth - this.tabs.clientWidth, tab.offsetLeft - 10);
    });
  }

  /** The run whose selection is meant is the one that was touched last. */
  activate(/** @type {Column} */ { run }) {
    if (!run || run.id === this.state.run) return;
    [this.state.run, this.state.compare] = [run.id, this.state.run];
    this.markActive();
    this.drawTransport();
    this.form?.read(run);
    this.drawer.draw(this.seen());
    this.keep();
  }

  markActive() {
    for (const column of this.columns) for (const part of column.parts) part.classList.toggle("dl-active", column === this.active);
  }

  openView(/** @type {string} */ view) {
    this.panel.scrollTop = 0;
    return this.set({ view });
  }

  /** Mark a position under the pointer in every part; -1 for none. */
  hover(/** @type {number} */ position) {
    for (const column of this.columns) {
      if (!column.run) continue;
      column.canvas.hover(position);
      column.pane(this.view).pane.hover?.(position);
    }
  }

  /** The selection in words. */
  summary() {
    const seen = this.seen();
    return seen ? `${this.shown.length > 1 ? `${seen.model.name}: ` : ""}${stateAt(seen, seen.shown, seen.position)}` : "";
  }

  stepBy(/** @type {number} */ change) {
    const index = this.steps.indexOf(this.state.step) + change;
    return this.set({ step: this.steps[clamp(index, 0, this.steps.length - 1)] });
  }

  play(/** @type {boolean} */ on) {
    clearInterval(this.timer);
    if (!on && this.timer) this.state.written = true;
    const last = () => this.state.step === this.steps.at(-1), every = clamp(WHOLE_PLAY / this.steps.length, 90, SLOWEST);
    this.timer = on ? setInterval(() => {
      if (!last()) return this.stepBy(1);
      this.play(false);
      this.set({ written: true });
    }, every) : 0;
    if (on && last()) this.set({ step: this.steps[0] });
    this.playing.setAttribute("aria-pressed", String(on));
    setText(this.playing, on ? "Pause" : "Play");
  }

  say(/** @type {string} */ text) { setText(this.status, text); }

  fail(/** @type {string|null} */ message) {
    this.alert.hidden = message === null;
    setText(this.alert, message ?? "");
  }

  /** The code that gives a view's numbers, with the selection in it. */
  code(/** @type {string} */ view, /** @type {string} */ title, /** @type {Record<string, any>} */ values = {}, run = this.active.run) {
    const code = codeOf(this.seen(run), view, values);
    const pre = h("pre", { tabindex: 0 }, h("code", {}, code));
    const copy = button("Copy", async () => {
      try {
        await navigator.clipboard.writeText(code);
        setText(copy, "Copied");
      } catch {
        getSelection().selectAllChildren(pre);
        setText(copy, "Selected: press Ctrl+C");
      }
    }, { class: "dl-primary" });
    this.show(`${title} as Python`, pre, copy);
  }

  /** Say what a run preferred to the answer, and what it knows of the fact. */
  async why(/** @type {Run} */ run) {
    const said = h("div", { class: "dl-why", "aria-live": "polite" }, h("p", {}, "Reading…"));
    this.show(`Why ${modelOf(this.manifest, run).name} is ${run.verdict.right ? "right" : "wrong"}`, said);
    const texts = await reasons(this, run).catch((error) => [`This could not be read: ${error.message}`]);
    said.replaceChildren(...texts.map((text) => h("p", {}, text)));
  }

  /** Show something in a dialog, which Escape closes. */
  show(/** @type {string} */ title, /** @type {HTMLElement} */ content, /** @type {HTMLElement[]} */ ...buttons) {
    const heading = h("h2", { id: this.dialog.getAttribute("aria-labelledby") }, title);
    this.dialog.replaceChildren(heading, content, h("div", { class: "dl-buttons" }, ...buttons, button("Close", () => this.dialog.close())));
    this.dialog.showModal();
  }

  /** The part of the address after "#". */
  address() { return written(this.state, this.runs, this.manifest.models); }

  /** Keep the state in the address, or in the notebook. Other runs are a new entry of the history, so that Back shows those before. */
  keep() {
    const { state } = this, shown = [state.run, state.compare].sort().join(" "), isNew = this.kept && this.kept !== shown;
    this.source.keep?.({ ...state, ...keptOf(state, this.runs, this.manifest.models) });
    this.kept = shown;
    if (!this.hasAddress) return;
    try {
      history[isNew ? "pushState" : "replaceState"](null, "", `#${this.address()}`);
    } catch { /* A sandboxed frame has no history; the state then lives in the page only. */ }
    document.title = this.manifest.title;
  }

  /** The address of what is shown; "" in a notebook. */
  link() { return this.hasAddress ? location.href : ""; }

  /** The parts have other widths now. */
  fit() { if (this.shown.length) this.render(); }

  close() {
    this.abort.abort();
    this.play(false);
    this.themes?.disconnect();
    this.sizes?.disconnect();
    this.source.close?.();
    this.root.replaceChildren();
  }
}

/** Make elements the children of another one, without touching it where they are already: a focus stays. */
function replace(/** @type {HTMLElement} */ parent, /** @type {HTMLElement[]} */ children) {
  const now = [...parent.children];
  if (now.length !== children.length || now.some((child, i) => child !== children[i])) parent.replaceChildren(...children);
}
