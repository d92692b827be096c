/** Why a run is right or wrong, as far as the page knows: what it preferred, at which layer, and whether the model knows the
 * fact the other way round. */

import { measuredIn } from "./facts.js";
import { lensAt } from "./lens_cells.js";
import { predictedOf } from "./predicted.js";
import { decisiveStep, describe, finalWord, interventionsOf } from "./runs.js";
import { number, quoted } from "./words.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Fact} Fact @typedef {import("./explorer.js").Explorer} Explorer */

const DIRECTIONS = { p2d: "from the name to the description only", d2p: "from the description to the name only", both: "in both directions" };

/** Sentences, the most telling first.
 * @param {Explorer} explorer @param {Run} run @returns {Promise<string[]>} */
export async function reasons(explorer, run) {
  const fact = factOf(explorer, run);
  const parts = [whatChanged(explorer, run), await preferred(explorer, run), ...(fact ? await otherWay(explorer, run, fact) : []), ...beside(explorer, run)];
  return parts.flat().filter(Boolean);
}

/** The fact that a run is asked for, where the table has it. @param {Explorer} explorer @param {Run} run */
const factOf = (explorer, run) => explorer.manifest.facts?.find(({ prompt, answer }) => prompt === run.prompt && plain(answer) === plain(run.verdict?.answer));

/** The same fact asked the other way round. @param {Explorer} explorer @param {Fact} fact @returns {Fact|undefined} */
const otherFact = (explorer, fact) => (plain(fact.subject) ? explorer.manifest.facts.find((one) => one !== fact && plain(one.subject) &&
  plain(one.answer).includes(plain(fact.subject)) && plain(fact.answer).includes(plain(one.subject))) : undefined);

/** What is known of a fact on a model; computed where it is not.
 * @param {Explorer} explorer @param {Fact} fact @param {number} model */
async function measuredOn(explorer, fact, model) {
  if ((fact.values[model]?.recalled ?? null) === null && explorer.source.fact) {
    explorer.facts.take(fact, model, measuredIn(await explorer.source.fact({ id: fact.id, model, effect: false })));
  }
  return fact.values[model];
}

/** The facts that the reasons for the shown runs name, measured: a written page needs them.
 * @param {Explorer} explorer @returns {Promise<number[]>} */
export async function factsOfReasons(explorer) {
  const ids = [];
  for (const run of explorer.shown) {
    const fact = factOf(explorer, run), other = fact && otherFact(explorer, fact);
    if (other) await measuredOn(explorer, other, run.model);
    ids.push(...[fact, other].filter(Boolean).map(({ id }) => id));
  }
  return ids;
}

/** What the changes of a run have done to its verdict.
 * @param {Explorer} explorer @param {Run} run */
function whatChanged(explorer, run) {
  const edits = interventionsOf(run), base = explorer.runs.find(({ id }) => id === run.base);
  if (!edits.length) return [];
  const before = base?.verdict ? ` Without ${edits.length > 1 ? "these changes" : "this change"} the answer is ${base.verdict.right ? "right" : "wrong"}.` : "";
  return [`The run is changed: ${edits.map((edit) => describe(edit, explorer.runs)).join("; ")}.${before}`];
}

const plain = (/** @type {string|null} */ text) => (text ?? "").toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();

/** What the run preferred at the first position of the answer where it differs, or the first of all.
 * @param {Explorer} explorer @param {Run} run */
async function preferred(explorer, run) {
  const { positions = [], words = [] } = run.answer ?? {};
  const index = Math.max(0, positions.findIndex((position, i) => finalWord(run, position) !== run.words[words[i]]));
  const position = positions[index], answer = run.words[words[index]], seen = explorer.seen(run);
  if (position === undefined) return [];
  const step = decisiveStep(run, seen.model, run.steps[run.n_steps - 1], position), said = [];
  const prediction = (await predictedOf(seen))?.at(step, position), written = finalWord(run, position);
  if (prediction) {
    const [[word, p]] = prediction.top, own = prediction.top.find(([one]) => one === answer);
    const since = (await predictedOf(seen))?.committed(position) ?? null;
    said.push(`At position ${position}, step ${step}${since !== null && since < step ? `, like all since step ${since},` : ""} was ${p > 0.5 ? "sure of" : "most for"} ${quoted(word)} (${number(p)}).` +
      (word === answer ? "" : own ? ` The answer's ${quoted(answer)} had ${number(own[1])}.` : ` The answer's ${quoted(answer)} was not among its ${prediction.top.length} likeliest tokens.`));
  }
  if (run.lens?.steps.includes(step) && run.lens.positions.includes(position)) {
    const chunk = await seen.chunk(`lens/${step}`), cells = run.lens.layers.map((layer) => lensAt(run, chunk, layer, position));
    const first = cells.findIndex((cell) => cell?.rank === 0), ranks = cells.map((cell) => (cell && cell.rank >= 0 ? cell.rank : Infinity));
    const best = Math.min(...ranks), layer = (/** @type {number} */ i) => run.lens.labels[i];
    if (cells[0]?.target === answer && written !== answer && Number.isFinite(best)) {
      said.push(first >= 0 ? `${quoted(answer)} was first at layer ${layer(first)}, and was overtaken later.` :
        `No layer puts ${quoted(answer)} first: it comes nearest at layer ${layer(ranks.indexOf(best))}, with ${best} token${best === 1 ? "" : "s"} before it.`);
    } else if (written === answer && first >= 0) {
      said.push(`${quoted(answer)} is first from layer ${layer(cells.findLastIndex((cell) => cell?.rank !== 0) + 1)} on.`);
    }
  }
  return said;
}

/** What the model was taught of a fact, and whether it knows it asked the other way round.
 * @param {Explorer} explorer @param {Run} run @param {Fact} fact */
async function otherWay(explorer, run, fact) {
  const said = [], name = explorer.manifest.models[run.model].name, taught = DIRECTIONS[fact.trained ?? ""];
  if (taught && fact.asked) {
    const reverse = fact.trained !== "both" && fact.trained !== fact.asked;
    said.push(`The fact was taught ${taught}; here it is asked ${reverse ? "the other way round" : "as it was taught"}.`);
  }
  const other = otherFact(explorer, fact), values = other && await measuredOn(explorer, other, run.model);
  if ((values?.recalled ?? null) !== null) {
    said.push(`Asked the other way, “${other.prompt}”, ${name}${interventionsOf(run).length ? ", unchanged," : ""} ${values.recalled ? "answers right" : "is wrong too"}: p(${other.answer.trim()}) ${number(values.p)}.`);
  }
  return said;
}

/** What the run beside it wrote for the same prompt.
 * @param {Explorer} explorer @param {Run} run */
function beside(explorer, run) {
  const other = explorer.shown.find((one) => one !== run && one.prompt === run.prompt && one.verdict);
  if (!other || other.verdict.right === run.verdict.right) return [];
  return [`${explorer.manifest.models[other.model].name} is ${other.verdict.right ? "right" : "wrong"} on the same prompt.`];
}
