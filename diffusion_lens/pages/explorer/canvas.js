/** The text of one run as it is written, step by step: the first thing that is seen. */

import { paint, ramp } from "./colours.js";
import { drawLegend, h, setText } from "./elements.js";
import { clamp } from "./numbers.js";
import { predictedOf, predictedText } from "./predicted.js";
import { differs, isForced, isGiven, isRight, isText, lengthOf, replaced, stateAt, wordAfter } from "./runs.js";
import { readable } from "./words.js";

/** @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Run} Run */
/** @typedef {import("./predicted.js").Predicted} Predicted */

export const OVERLAYS = {
  confidence: "confidence when revealed", entropy: "entropy (nats)", probability: "p(likeliest)",
  margin: "p(first) − p(second)", commitment: "commitment",
};
const RING = 6; // pixels around the selected token: its frame, and that of the focus
export const COMMITTED = 0.45; // colour of what is decided, on the scale from 0 to 1

/** What the colours of the canvas can show of a run.
 * @param {Run} run */
export function overlaysOf(run) {
  const { k, committed } = run.predictions ?? { k: 0, committed: null };
  const known = { confidence: true, margin: k > 1, commitment: Boolean(committed) };
  return Object.keys(OVERLAYS).filter((name) => known[name] ?? k > 0);
}

/** What the colours show of this run: what is chosen, where there is that.
 * @param {Seen} seen */
export const overlayOf = ({ run, state }) => (overlaysOf(run).includes(state.canvas) ? state.canvas : "confidence");

/** The colour of a position after a step, from 0 to 1, its word, and its marks; `predicted` is null for the confidence.
 * @param {Seen} seen @param {Predicted|null} predicted @param {string} overlay @param {number} step @param {number} position
 * @returns {{value: number, word: string|null, guess: boolean, kinds: string[]}} */
export function canvasCell(seen, predicted, overlay, step, position) {
  const { run, base } = seen, word = wordAfter(run, step, position), given = isGiven(run, position) || !run.real[position];
  const prediction = predicted?.at(step, position) ?? null, at = predicted?.committed(position) ?? null;
  const guess = prediction !== null && word === null, committed = at !== null && step >= at;
  const value = overlay === "commitment" ? (committed ? COMMITTED : prediction ? 0 : NaN)
    : predicted ? (!prediction ? NaN : overlay === "entropy" ? 1 - prediction.entropy / predicted.highest : prediction[overlay])
      : word === null || given || isForced(run, position) || replaced(run, step, position) ? 0 : run.confidence?.[position] ?? 0.25;
  const kinds = [
    word === null && "masked", given && "given", run.revealed_at?.[position] === step && "new",
    base !== null && differs(run, base, step, position) && "diff", guess && "guess", Number.isNaN(value) && "plain",
    overlay === "commitment" && step === at && "commits",
  ].filter((kind) => typeof kind === "string");
  return { value, word: word ?? (guess ? prediction.top[0][0] : null), guess, kinds };
}

/** What such a cell says in words.
 * @param {Seen} seen @param {Predicted|null} predicted @param {number} step @param {number} position */
export function canvasLabel(seen, predicted, step, position) {
  const prediction = predicted?.at(step, position) ?? null, at = predicted?.committed(position) ?? null;
  const since = at === null || step < at ? "" : step === at ? "; commits here" : `; committed since step ${at}`;
  return `${stateAt(seen, step, position)}${prediction ? `; ${predictedText(prediction)}` : ""}${since}`;
}

/** The colour scale of an overlay, with the numbers of its ends. */
export function drawOverlayLegend(/** @type {HTMLElement} */ box, /** @type {string} */ overlay, /** @type {Predicted|null} */ predicted, /** @type {boolean} */ dark) {
  // What is certain is saturated, whichever quantity is shown.
  const [low, high] = overlay === "entropy" ? [`${predicted?.highest}`, "0"] : overlay === "commitment" ? ["open", "committed"] : ["0", "1"];
  const stops = overlay === "commitment" ? [0, 0, COMMITTED, COMMITTED] : undefined;
  drawLegend(box, ramp("canvas", dark), { name: overlay === "confidence" ? "confidence" : `${OVERLAYS[overlay]}; italics: not yet written`, low, high }, stops);
}

/** The tokens of a run as buttons, in lines. */
export class RunCanvas {
  constructor(/** @type {(seen: Seen, position: number|null) => void} */ hovered) {
    /** @type {Seen|null} */ this.seen = null;
    this.hovered = hovered;
    this.showsAll = false; // also the positions after the end token
    this.text = h("div", { class: "dl-text", role: "group", "aria-label": "Text" });
    this.more = h("button", { type: "button", class: "dl-more", onclick: () => {
      this.showsAll = !this.showsAll;
      this.draw(this.seen);
    } });
    this.element = h("div", { class: "dl-canvas" }, this.text);
    this.text.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
    this.text.addEventListener("pointerleave", () => this.seen && hovered(this.seen, null));
    /** @type {Run|null} */ this.shown = null;
    /** @type {string[]} */ this.labels = [];
  }

  get visible() {
    const { run } = this.seen;
    return Array.from({ length: lengthOf(run) }, (_, p) => p).filter((p) => run.real[p] && (this.showsAll || isText(run, p)));
  }

  key(/** @type {KeyboardEvent} */ event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const { visible, seen } = this, at = visible.findLastIndex((p) => p <= seen.position);
    const position = visible[clamp(at + move, 0, visible.length - 1)];
    seen.select({ position });
    this.tokens[position].focus();
  }

  /** One button for each position. */
  build(/** @type {Run} */ run) {
    if (this.shown === run) return;
    this.shown = run;
    this.showsAll = false;
    this.tokens = run.canvases[0].map((_, p) => h("button", {
      type: "button", "data-position": p, onclick: () => this.seen.select({ position: p }),
      onpointerenter: () => { this.seen.say(this.labels[p]); this.hovered(this.seen, p); },
    }));
    this.text.replaceChildren(...this.tokens, this.more);
  }

  hover(/** @type {number} */ position) {
    this.tokens?.forEach((token, p) => token.classList.toggle("dl-hover", p === position));
  }

  async draw(/** @type {Seen} */ seen) {
    const overlay = overlayOf(seen), predicted = overlay === "confidence" ? null : await predictedOf(seen);
    if (!seen.current()) return;
    this.seen = seen;
    const { run, shown: step, position, dark } = seen, colours = ramp("canvas", dark);
    this.build(run);
    const hidden = lengthOf(run) - this.visible.length - run.real.filter((real) => !real).length;
    this.more.hidden = !hidden && !this.showsAll;
    setText(this.more, this.showsAll ? "end the text at the end token" : `+ ${hidden} after the end`);
    this.tokens.forEach((token, p) => {
      const { value, word, guess, kinds } = canvasCell(seen, predicted, overlay, step, p);
      const right = isRight(run, step, p), isPlain = Number.isNaN(value) || kinds.includes("given") || (word === null && !guess && !predicted);
      const { background, ink } = isPlain ? { background: "", ink: "" } : paint(colours, value);
      const marks = [...kinds, /^[ ▁]/.test(word ?? " ") ? "spaced" : "", right === null ? "" : right ? "right" : "wrong"];
      token.className = marks.filter(Boolean).map((kind) => `dl-${kind}`).join(" ");
      token.style.background = background;
      token.style.color = ink;
      token.hidden = !run.real[p] || !(this.showsAll || isText(run, p) || p === position);
      token.tabIndex = p === position ? 0 : -1;
      setText(token, word === null ? "·" : readable(word));
      this.labels[p] = `${canvasLabel(seen, predicted, step, p)}${right === null ? "" : right ? "; as in the answer" : "; not as in the answer"}`;
      token.setAttribute("aria-label", this.labels[p]);
      token.setAttribute("aria-pressed", String(p === position));
    });
    this.keepInView(this.tokens[position]);
  }

  /** Scroll inside the text, never the page. */
  keepInView(/** @type {HTMLElement|undefined} */ token) {
    if (!token) return;
    const { text } = this, above = token.offsetTop - text.scrollTop, below = above + token.offsetHeight - text.clientHeight;
    if (above < RING) text.scrollTop += above - RING;
    else if (below > -RING) text.scrollTop += below + RING;
  }
}
