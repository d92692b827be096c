/** The address: all that is selected, the runs that are shown, and their models, so that a link opens the same page. */

/** @typedef {import("./types.js").State} State @typedef {import("./types.js").Spec} Spec @typedef {import("./types.js").Run} Run */
/** @typedef {import("./types.js").Model} Model */
/** @typedef {{index: number, name: string, weights: string}} Named  a model of a link; its weights may be unknown, "" */
/** @typedef {{state: Partial<State>, specs: Spec[], models: Named[], problem: string|null}} Opened  what a link names */

const TEXTS = ["run", "compare", "left", "view", "canvas", "colour", "trace", "graph"];
const NUMBERS = ["step", "position", "layer", "head", "key"];
const MOST_SPECS = 32, LONGEST_SPECS = 2 ** 18; // runs of a link, and their characters

/** The runs that a run needs, and itself: its base, and those from which its interventions take activations.
 * @param {Run[]} runs @param {string[]} ids @returns {Run[]} */
export function needed(runs, ids) {
  /** @type {Map<string, Run>} */ const found = new Map();
  const add = (/** @type {string|null|undefined} */ id) => {
    const run = runs.find((one) => one.id === id);
    if (!run || found.has(run.id)) return;
    [run.base, ...(run.spec?.interventions ?? []).map(({ source }) => source)].forEach(add);
    found.set(run.id, run);
  };
  ids.forEach(add);
  return [...found.values()];
}

const toBase64 = (/** @type {string} */ text) =>
  btoa(String.fromCharCode(...new TextEncoder().encode(text))).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
const fromBase64 = (/** @type {string} */ text) =>
  new TextDecoder().decode(Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (char) => char.charCodeAt(0)));

/** What a page or a notebook keeps of the runs that are shown: how they are computed, and on which models.
 * @param {State} state @param {Run[]} runs  those of the page @param {Model[]} models @returns {{specs: Spec[], models: Named[]}} */
export function keptOf(state, runs, models) {
  const shown = needed(runs, [state.run, state.compare]), of = [...new Set(shown.map(({ model }) => model))].sort((a, b) => a - b);
  return {
    specs: shown.map(({ spec }) => spec).filter(Boolean),
    models: of.filter((index) => models[index]).map((index) => ({ index, name: models[index].name, weights: models[index].weights ?? "" })),
  };
}

/** The part of an address after "#".
 * @param {State} state @param {Run[]} runs  those of the page @param {Model[]} all  those of the page */
export function written(state, runs, all) {
  const kept = new URLSearchParams(), { specs, models } = keptOf(state, runs, all);
  for (const { index, name, weights } of models) kept.append("model", `${index}:${weights}:${name}`);
  for (const name of TEXTS) if (state[name]) kept.set(name, state[name]);
  for (const name of NUMBERS) if (state[name] !== null && state[name] >= 0) kept.set(name, String(state[name]));
  if (state.facts) kept.set("facts", "1");
  kept.set("written", state.written ? "1" : "0");
  if (specs.length) kept.set("runs", toBase64(JSON.stringify(specs)));
  return kept.toString();
}

/** What an address selects; what it does not name, or names wrongly, is left out.
 * @param {string} hash @returns {Opened} */
function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  /** @type {any} */ const state = {};
  for (const name of TEXTS) if (given.has(name)) state[name] = given.get(name);
  for (const name of NUMBERS) {
    const value = Number.parseInt(given.get(name) ?? "", 10);
    if (value >= 0) state[name] = value;
  }
  if (given.has("facts")) state.facts = given.get("facts") === "1";
  if (given.has("written") || "step" in state) state.written = given.get("written") === "1"; // Who names a step means it.
  const models = given.getAll("model").map((text) => /^(\d+):([^:]*):(.*)$/s.exec(text)).filter(Boolean)
    .map(([, index, weights, name]) => ({ index: Number(index), weights, name }));
  const coded = given.get("runs") ?? "";
  let specs = [], problem = null;
  try {
    specs = coded.length > LONGEST_SPECS ? [] : JSON.parse(fromBase64(coded));
  } catch { /* A link that was cut off still opens the page. */ }
  if (!Array.isArray(specs)) specs = [];
  if (coded.length > LONGEST_SPECS) problem = `The runs of this link take ${coded.length.toLocaleString("en")} characters, and a link opens at most ${LONGEST_SPECS.toLocaleString("en")}. Compute them here, or save a page of them.`;
  else if (specs.length > MOST_SPECS) {
    problem = `This link names ${specs.length} runs, and a link opens at most ${MOST_SPECS}. Compute them here, or save a page of them.`;
    specs = [];
  }
  return { state, specs, models, problem };
}

/** What a page opens: the address where it names a run, which is then a whole link; otherwise the place that was kept,
 * changed by what the address names.
 * @param {any} kept  a state, with specs and models @param {string} hash @returns {Opened} */
export function openedBy(kept, hash) {
  const address = readAddress(hash);
  if ("run" in address.state || address.problem) return address;
  const { specs, models, ...state } = kept;
  return { ...address, state: { ...state, ...address.state }, specs: [...(specs ?? []), ...address.specs], models: [...(models ?? []), ...address.models] };
}

/** Why a link does not belong to a page: it is of other models, or of other weights. Null if it belongs to it.
 * @param {Named[]} named @param {Model[]} models  those of the page */
export function mismatch(named, models) {
  const names = (/** @type {{name: string}[]} */ all) => all.map(({ name }) => name).join(" and ");
  if (named.some(({ index, name }) => models[index]?.name !== name)) {
    const start = (named[0].index > 0 ? ["MODEL"] : []).concat(named.map(({ name }) => name)).join(" --against ");
    return `This link is of ${names(named)}, and this page shows ${names(models)}. To open it, start diffusion-lens explore ${start}.`;
  }
  const other = named.find(({ index, weights }) => weights && models[index].weights && models[index].weights !== weights);
  return other ? `This link is of ${other.name} with other weights: their SHA-256 begins with ${other.weights}, that of this page with ${models[other.index].weights}. To open it, start the explorer with the weights of the link.` : null;
}
