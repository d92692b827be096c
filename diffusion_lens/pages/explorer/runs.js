/** Questions asked of a run of the manifest: what stands where at which step, and how two runs differ. */

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Intervention} Intervention */

import { fillIn, number, quoted, readable, shorten } from "./words.js";

/** What is asked of the steps of a run for every cell of a picture: those that it can show, and the index of each.
 * @type {WeakMap<Run, {shown: number[], index: Map<number, number>}>} */
const STEPS = new WeakMap();
const knownOf = (/** @type {Run} */ run) => {
  if (!STEPS.has(run)) STEPS.set(run, { shown: run.steps.slice(0, run.n_steps), index: new Map(run.steps.map((step, i) => [step, i])) });
  return STEPS.get(run);
};

/** Steps that a run can show. Its canvases have one entry more, the final canvas, or contain the canvas of each step. */
export const stepsOf = (/** @type {Run} */ run) => knownOf(run).shown;
/** Index of a step of a run, -1 for none. */
export const indexOfStep = (/** @type {Run} */ run, /** @type {number} */ step) => knownOf(run).index.get(step) ?? -1;
const isShown = (/** @type {Run} */ run, /** @type {number} */ step) => knownOf(run).index.get(step) < run.n_steps;
export const lastStep = (/** @type {Run} */ run) => run.steps[run.n_steps - 1];
/** The number of positions of a canvas. */
export const lengthOf = (/** @type {Run} */ run) => run.canvases[0].length;
/** Index of the canvas that is shown at a step: the one after the step, where there is one. */
export const canvasAt = (/** @type {Run} */ run, /** @type {number} */ step) =>
  indexOfStep(run, step) + (run.canvases.length > run.n_steps ? 1 : 0);

/** The model of a run; a page of traces alone knows no more than the layers that were traced.
 * @param {import("./types.js").Manifest} manifest @param {Run} run @returns {import("./types.js").Model} */
export const modelOf = (manifest, run) => manifest.models[run.model] ?? {
  name: run.label, n_layers: Math.max(0, ...run.traces.flatMap(({ layers }) => layers)) + 1, n_heads: 1, grows: false,
  masks: true, samplers: [], length: null,
};

/** Text at a position after a step; null where it is masked or not reached.
 * @param {Run} run @param {number} step @param {number} position @returns {string|null} */
export const wordAfter = (run, step, position) => run.words[run.canvases[canvasAt(run, step)]?.[position]] ?? null;

/** Whether a position is masked, or not reached, in the canvas which a step reads.
 * @param {Run} run @param {number} step @param {number} position */
export const isOpen = (run, step, position) => run.canvases[indexOfStep(run, step)]?.[position] < 0;

/** Whether a text that grows has come to a position before the explained step; what lies after its end reads nothing.
 * @param {import("./types.js").Seen} seen @param {number} position */
export const isReached = ({ run, model, step }, position) => !model.grows || !isOpen(run, step, position);

/** Whether the token at a position came with the prompt, and was not masked again.
 * @param {Run} run @param {number} position */
export const isGiven = (run, position) => run.given[position] && !((run.revealed_at?.[position] ?? -1) >= 0);

export const finalWord = (/** @type {Run} */ run, /** @type {number} */ position) => wordAfter(run, lastStep(run), position);

/** Whether a token is another one than was revealed there; the confidence is then not this token's.
 * @param {Run} run @param {number} step @param {number} position */
export function replaced(run, step, position) {
  const at = run.revealed_at?.[position] ?? -1;
  return at >= 0 && at < step && wordAfter(run, at, position) !== wordAfter(run, step, position);
}

/** The change of the state that keeps the explained step when another position is selected in a view of it.
 * @param {import("./types.js").Seen} seen */
export const sameStep = ({ step, shown }) => (step === shown ? { written: false } : { step });

/** The step that explains what stands at a position after a step: of a token that stays, the one that wrote it.
 * @param {Run} run @param {import("./types.js").Model} model @param {number} step @param {number} position */
export function decisiveStep(run, model, step, position) {
  const at = run.revealed_at?.[position] ?? -1, stays = model.masks || model.grows;
  return stays && at >= 0 && at < step && !isOpen(run, step, position) && !isForced(run, position) ? at : step;
}

/** Whether the token that stands at a position was written by an intervention, not by the model.
 * @param {Run} run @param {number} position */
export const isForced = (run, position) => (run.forced ?? []).some(([step, at]) => at === position && step === run.revealed_at?.[position]);

/** Whether a position is part of the text: no padding, and not after the end token.
 * @param {Run} run @param {number} position */
export const isText = (run, position) => run.real[position] && position <= (run.end ?? Infinity);

/** The token whose rank and probability the lens reads at a position: the answer's, or the one that the run wrote.
 * @param {Run} run @param {number} position @returns {string|null} */
export function targetAt(run, position) {
  const { targets, positions } = run.lens ?? {};
  if (targets) return run.words[targets[positions.indexOf(position)]] ?? null;
  const at = run.answer ? run.answer.positions.indexOf(position) : -1;
  return at >= 0 ? run.words[run.answer.words[at]] : finalWord(run, position);
}

/** Where two runs differ: positions of the final canvas, with the step since which they do, and steps whose canvases
 * differ. Text after an end token is none.
 * @param {Run} run @param {Run} base */
export function differences(run, base) {
  const steps = stepsOf(run).filter((step) => isShown(base, step));
  const positions = Array.from({ length: Math.max(lengthOf(run), lengthOf(base)) }, (_, position) => position);
  const differ = (/** @type {number} */ step, /** @type {number} */ position) => wordAfter(run, step, position) !== wordAfter(base, step, position);
  const textOf = (/** @type {Run} */ one, /** @type {number} */ position) => (isText(one, position) ? finalWord(one, position) : "");
  const tokens = positions.map((position) => ({
    position, was: textOf(base, position), is: textOf(run, position),
    step: steps[steps.findLastIndex((step) => !differ(step, position)) + 1] ?? lastStep(run),
  })).filter(({ was, is }) => was !== is);
  return { tokens, steps: steps.filter((step) => positions.some((position) => differ(step, position))) };
}

/** The difference of two runs in words, one sentence for each stretch of positions: "Plerrick → Mondall, from step 3".
 * @param {Run} run @param {Run} base @returns {{text: string, position: number, step: number}[]} */
export function differenceInWords(run, base) {
  const stretches = [];
  for (const token of differences(run, base).tokens) {
    const last = stretches.at(-1);
    if (last && last.at(-1).position === token.position - 1) last.push(token);
    else stretches.push([token]);
  }
  const text = (/** @type {(string|null)[]} */ words) => words.map((word) => (word === null ? "·" : readable(word))).join(" ").trim() || "nothing";
  return stretches.map((tokens) => {
    const step = Math.min(...tokens.map((token) => token.step));
    const [was, is] = [tokens.map((token) => token.was), tokens.map((token) => token.is)].map(text);
    return { text: `${was} → ${is}, from step ${step}`, position: tokens[0].position, step };
  });
}

export const sites = { resid: "residual stream", attn: "attention", mlp: "MLP", head: "head" };

/** Numbers in words, runs of them as ranges: "step 3", "steps 0–4, 7".
 * @param {string} noun @param {number[]} numbers */
export function listed(noun, numbers) {
  /** @type {number[][]} */ const ranges = [];
  for (const n of numbers) {
    if (ranges.length && ranges.at(-1)[1] === n - 1) ranges.at(-1)[1] = n;
    else ranges.push([n, n]);
  }
  const texts = ranges.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  return `${noun}${numbers.length > 1 ? "s" : ""} ${texts.join(", ")}`;
}

/** The name of a run in a list: its label, with its prompt where others have the same label.
 * @param {Run[]} runs @param {Run} run */
export function nameIn(runs, run) {
  const alike = runs.filter(({ label }) => label === run.label);
  return alike.length < 2 ? run.label : `${run.label} ${alike.indexOf(run) + 1}: ${shorten(run.prompt, 40)}`;
}

/** An intervention in words.
 * @param {Intervention} edit @param {Run[]} runs */
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

/** What stands at a position after a step, and since when.
 * @param {import("./types.js").Seen} seen */
export function stateAt({ run, model, base }, step, position) {
  const word = wordAfter(run, step, position), start = `step ${step}, position ${position}, `;
  if (!run.real[position]) return `${start}padding`;
  const unopened = step + 1 < (run.opened_at?.[position] ?? 0);
  if (word === null) return `${start}${unopened ? "in a block that is not open yet" : model.grows ? "not reached" : "masked"}`;
  const was = base && differs(run, base, step, position) ? wordAfter(base, step, position) : undefined;
  const changed = was === undefined ? "" : `; the base run has ${was === null ? "a mask" : quoted(was)}`;
  const said = `${start}${quoted(word)}`, at = run.revealed_at?.[position];
  if (isGiven(run, position)) return `${said}, given${changed}`;
  if (at === undefined) return `${said}${changed}`;
  if (isForced(run, position) && at <= step) return `${said}, written by an intervention before step ${at}${changed}`;
  if (replaced(run, step, position)) return `${said}, set by an intervention in place of the token of step ${at}${changed}`;
  if (at < 0 || at > step) return `${said}, not yet final${changed}`;
  const confidence = run.confidence ? ` with confidence ${number(run.confidence[position])}` : "";
  return `${said}, ${model.masks || model.grows ? "revealed" : "last changed"} at step ${at}${confidence}${changed}`;
}

/** Whether two runs differ at a position after a step that both have.
 * @param {Run} run @param {Run} base @param {number} step @param {number} position */
export const differs = (run, base, step, position) =>
  isShown(base, step) && wordAfter(run, step, position) !== wordAfter(base, step, position);

/** A position in words, as the explained step reads it: its token, or that it is masked.
 * @param {import("./types.js").Seen} seen @param {number} position */
export function placeIn({ run, model, step }, position) {
  if (isOpen(run, step, position)) return `position ${position} (${model.masks ? "masked" : "not yet written"})`;
  return `${quoted(run.words[run.canvases[indexOfStep(run, step)][position]] ?? "·")} (${position})`;
}

/** The interventions of a run, which a written page keeps without a spec.
 * @param {Run} run @returns {Intervention[]} */
export const interventionsOf = (run) => run.spec?.interventions ?? run.changes ?? [];

/** What the interventions of a run have set to zero in the attention of a block, in words; null for nothing.
 * @param {Run} run @param {number} block */
export function silenced(run, block) {
  const edits = interventionsOf(run).filter(({ what, layer, site }) => what === "zero" && layer === block && (site === "attn" || site === "head"));
  return edits.length ? `In this run: ${edits.map((edit) => describe(edit)).join("; ")}. The pattern is what the heads read; it is not passed on there.` : null;
}

/** The verdict on a run, once its answer is written as it is in the end.
 * @param {Run} run @param {number} step */
export function verdictAt(run, step) {
  const { answer, verdict } = run, now = canvasAt(run, step);
  if (!verdict) return null;
  const decided = answer ? answer.positions.every((position) => run.canvases[now][position] === run.canvases.at(-1)[position]) : step === lastStep(run);
  return decided ? verdict : null;
}

/** @type {WeakMap<Run, Map<number, number>>} */ const ANSWERED = new WeakMap();

/** The word of the answer that belongs to each position: where the answer stands in the text, otherwise where it is asked.
 * @param {Run} run @returns {Map<number, number>} */
function answerIn(run) {
  if (!ANSWERED.has(run)) {
    const { positions = [], words = [] } = run.answer ?? {}, final = run.canvases.at(-1);
    const isAsked = positions.every((position, i) => final[position] === words[i]);
    const starts = final.map((_, i) => i).filter((i) => words.length && words.every((word, k) => final[i + k] === word));
    const start = run.verdict?.right && !isAsked ? starts.find((i) => !isGiven(run, i)) : undefined;
    ANSWERED.set(run, new Map(words.map((word, i) => [start === undefined ? positions[i] : start + i, word])));
  }
  return ANSWERED.get(run);
}

/** Whether the text at a position is the answer's there; null where no answer is known for it.
 * @param {Run} run @param {number} step @param {number} position */
export function isRight(run, step, position) {
  const wanted = answerIn(run).get(position), word = wordAfter(run, step, position);
  return wanted === undefined || word === null ? null : word === run.words[wanted];
}

/** What the first screen reads of a guided run. @param {Run} run */
export const branchOf = (run) => (run.guided ? ", conditional branch" : "");

/** The position at which the selected token is predicted: its own, or the one before it.
 * @param {import("./types.js").Seen} seen */
export const queryOf = ({ position, model }) => Math.max(0, position - (model.shift ?? 0));

/** The position whose token is predicted at a position: the inverse of `queryOf`.
 * @param {import("./types.js").Seen} seen @param {number} query */
export const predictedAt = ({ run, model }, query) => Math.min(lengthOf(run) - 1, query + (model.shift ?? 0));

/** The trace that is chosen, or the first one; null for none.
 * @param {import("./types.js").Seen} seen @returns {import("./types.js").Trace|null} */
export const shownTrace = ({ run, state }) => run.traces.find(({ name }) => name === state.trace) ?? run.traces[0] ?? null;

/** The Python code of a view with a selection in it; "" where there is none.
 * @param {import("./types.js").Seen} seen @param {string} view @param {Record<string, any>} values  in place of what is selected */
export function codeOf(seen, view, values = {}) {
  const { run, shown, step, position, layer, block, head } = seen, name = shownTrace(seen)?.name ?? "";
  const selected = { step: view === "canvas" ? shown : step, layer: view === "attention" ? block : layer, head, position, name };
  return fillIn(run.python?.[view] ?? "", { ...selected, ...values });
}
