/** The address: all that is selected, and the runs that are shown, so that a link opens the same page. */

/** @typedef {import("./types.js").State} State @typedef {import("./types.js").Spec} Spec @typedef {import("./types.js").Run} Run */

const TEXTS = ["run", "compare", "left", "view", "canvas", "colour", "trace"];
const NUMBERS = ["step", "position", "layer", "head", "key"];

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

/** The part of an address after "#".
 * @param {State} state @param {Run[]} runs  those of the page */
export function written(state, runs) {
  const kept = new URLSearchParams();
  for (const name of TEXTS) if (state[name]) kept.set(name, state[name]);
  for (const name of NUMBERS) if (state[name] !== null && state[name] >= 0) kept.set(name, String(state[name]));
  if (state.facts) kept.set("facts", "1");
  kept.set("written", state.written ? "1" : "0");
  const specs = needed(runs, [state.run, state.compare]).map(({ spec }) => spec).filter(Boolean);
  if (specs.length) kept.set("runs", toBase64(JSON.stringify(specs)));
  return kept.toString();
}

/** What an address selects; what it does not name, or names wrongly, is left out.
 * @param {string} hash @returns {{state: Partial<State>, specs: Spec[]}} */
export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  /** @type {any} */ const state = {};
  for (const name of TEXTS) if (given.has(name)) state[name] = given.get(name);
  for (const name of NUMBERS) {
    const value = Number.parseInt(given.get(name) ?? "", 10);
    if (value >= 0) state[name] = value;
  }
  if (given.has("facts")) state.facts = given.get("facts") === "1";
  if (given.has("written") || "step" in state) state.written = given.get("written") === "1"; // Who names a step means it.
  let specs = [];
  try {
    specs = JSON.parse(fromBase64(given.get("runs") ?? "")) ?? [];
  } catch { /* A link that was cut off still opens the page. */ }
  return { state, specs: Array.isArray(specs) ? specs : [] };
}
