/** What is seen of one or two runs as a picture: an SVG that needs nothing else, for a slide, a paper or a film. */

import { COMMITTED, OVERLAYS, canvasCell, overlayOf } from "./canvas.js";
import { paint, ramp } from "./colours.js";
import { finalWord, isRight, isText, lastStep, lengthOf, stepsOf, verdictAt } from "./runs.js";
import { readable, shorten } from "./words.js";

/** @typedef {import("./types.js").Run} Run @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Paint} Paint
 * @typedef {import("./predicted.js").Predicted} Predicted
 *
 * @typedef {{x: number, y: number, width: number, position: number, word: string|null, guess: boolean, kinds: string[],
 *   colour: Paint|null, right: boolean|null}} Box  the token at a position; `right` where the answer is known there
 */

const SVG = "http://www.w3.org/2000/svg";
const FONT = "'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif";
const WIDTH = 720, BESIDE = 480, PAD = 28; // px of one run, of one of two that stand side by side, and of the margin
const LINE = 38, BOX = 29, SIZE = 15; // px of a line of tokens, a box and its font
const LONGEST = 32; // characters of a token
/** The colours of paper, text and lines. */
export const INKS = {
  light: { paper: "#ffffff", ink: "#1b1f24", soft: "#57606a", line: "#d8dee4", right: "#116329", wrong: "#a1260d" },
  dark: { paper: "#14171b", ink: "#e6e9ed", soft: "#a3adb8", line: "#373e47", right: "#7ee787", wrong: "#ff9a80" },
};
/** Attributes of a picture that stands in a file of its own. */
export const SVG_ROOT = { xmlns: SVG, "font-family": FONT };

/** @param {string} tag @param {Record<string, any>} attributes @param {...(Node|string)} children @returns {any} */
export function drawn(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? String(Math.round(10 * value) / 10) : value);
  element.append(...children);
  return element;
}

/** @type {CanvasRenderingContext2D|null} */ let measuring = null;

/** The width of a text in px.
 * @param {string} text @param {number} size @param {number} weight */
function widthOf(text, size, weight = 400) {
  measuring ??= document.createElement("canvas").getContext("2d");
  measuring.font = `${weight} ${size}px ${FONT}`;
  return measuring.measureText(text).width;
}

/** @type {WeakMap<Run, number[]>} */ const WIDTHS = new WeakMap();

/** At each position the width in px of the widest token that any canvas of a run has there.
 * @param {Run} run */
function widestOf(run) {
  if (!WIDTHS.has(run)) {
    const widths = run.words.map((word) => widthOf(boxed(word), SIZE));
    const at = (/** @type {number} */ position) => Math.max(14, ...run.canvases.map((canvas) => widths[canvas[position]] ?? 0));
    WIDTHS.set(run, Array.from({ length: lengthOf(run) }, (_, position) => at(position)));
  }
  return WIDTHS.get(run);
}

/** A text in lines that are at most so wide; what has no place in the last one is left out.
 * @param {string} text @param {number} size @param {number} weight @param {number} width @param {number} most */
function linesOf(text, size, weight, width, most) {
  const fits = (/** @type {string} */ line) => widthOf(line, size, weight) <= width;
  const cut = (/** @type {string} */ line) => {
    let n = line.length;
    while (!fits(shorten(line, n))) n -= 1;
    return shorten(line, n);
  };
  const lines = [""];
  for (const word of text.split(/(?<= )/)) {
    if (lines.at(-1) === "" || fits(`${lines.at(-1)}${word}`.trimEnd())) lines[lines.length - 1] += word;
    else lines.push(word);
  }
  const kept = lines.slice(0, most);
  if (lines.length > most) kept[most - 1] += lines.slice(most).join("");
  return kept.map((line) => cut(line.trimEnd()));
}

/** The step of a run that is shown when another one shows `step`.
 * @param {Run} run @param {number} step */
const stepIn = (run, step) => stepsOf(run).findLast((own) => own <= step) ?? stepsOf(run)[0];

const inQuotes = (/** @type {string} */ text) => `“${readable(text)}”`;

/** The text of a token in its box.
 * @param {string} word */
const boxed = (word) => shorten(readable(word), LONGEST);

/** The boxes of a run's tokens after a step. A box is as wide as the widest word that is ever in it, so nothing moves from
 * step to step, and pieces of one word stay together.
 * @param {Seen} seen @param {Predicted|null} predicted @param {number} step @param {number} width
 * @returns {{boxes: Box[], height: number}} */
function laidOut(seen, predicted, step, width) {
  const { run, dark } = seen, colours = ramp("canvas", dark), overlay = predicted ? overlayOf(seen) : "confidence";
  const spaces = run.words.some((word) => /^[ ▁]/.test(word)); // Tokens of a vocabulary of words have none.
  /** @type {Box[][]} */ const words = [];
  for (let position = 0; position < lengthOf(run); position++) {
    if (!isText(run, position)) continue;
    const { value, word, guess, kinds } = canvasCell(seen, predicted, overlay, step, position);
    const isPlain = Number.isNaN(value) || kinds.includes("given") || (word === null && !predicted);
    const widest = Math.max(widestOf(run)[position], guess ? widthOf(boxed(word), SIZE) : 0);
    const box = { x: 0, y: 0, width: Math.min(width, widest + 14), position, word, guess, kinds, right: isRight(run, step, position),
      colour: isPlain ? null : paint(colours, value) };
    const joins = spaces && position !== run.end && /^[^ ▁\n]/.test(finalWord(run, position) ?? "");
    if (joins && words.length) words.at(-1).push(box);
    else words.push([box]);
  }
  let x = 0, y = 0;
  for (const word of words) {
    const whole = word.reduce((sum, box) => sum + box.width + 2, 0) - 2;
    if (x > 0 && x + whole > width) { x = 0; y += LINE; }
    for (const box of word) {
      if (x > 0 && x + box.width > width) { x = 0; y += LINE; }
      Object.assign(box, { x, y });
      x += box.width + 2;
    }
    x += spaces ? 5 : 3;
  }
  return { boxes: words.flat(), height: y + BOX };
}

/** A token: a box in the colour of its value, dashed where nothing is written, framed where the step wrote it, with a
 * line under it where the answer is known.
 * @param {Run} run @param {Box} box @param {typeof INKS.light} inks */
function drawToken(run, { x, y, width, position, word, guess, kinds, colour, right }, inks) {
  const isMask = kinds.includes("masked"), isNew = kinds.includes("new") && !isMask;
  const frame = isNew ? { stroke: inks.ink, "stroke-width": 2 } : isMask ? { stroke: inks.soft, "stroke-width": 1, "stroke-dasharray": "3 3" } : {};
  const inset = isNew ? 1 : 0.5;
  const token = drawn("g", {}, drawn("rect", {
    x: x + inset, y: y + inset, width: width - 2 * inset, height: BOX - 2 * inset, rx: 5, fill: colour?.background ?? "none", ...frame,
  }));
  if (word !== null) {
    const text = boxed(word), isSoft = kinds.includes("given") || guess || position === run.end;
    token.append(drawn("text", {
      x: x + width / 2, y: y + 20, "text-anchor": "middle", "font-size": SIZE, fill: colour?.ink ?? (isSoft ? inks.soft : inks.ink),
      textLength: Math.min(widthOf(text, SIZE), width - 6), lengthAdjust: "spacingAndGlyphs", ...(guess ? { "font-style": "italic" } : {}),
    }, text));
  }
  if (run.answer?.positions.includes(position)) {
    const stroke = right === null ? inks.line : right ? inks.right : inks.wrong;
    token.append(drawn("path", {
      d: `M${(x + 1).toFixed(1)} ${(y + BOX + 4).toFixed(1)}h${(width - 2).toFixed(1)}`, fill: "none", stroke, "stroke-width": 3, ...(right === false ? { "stroke-dasharray": "4 2" } : {}),
    }));
  }
  return token;
}

/** One run, from its own left upper corner.
 * @param {Seen} seen @param {number} width @param {number} wanted  step @param {Predicted|null} predicted
 * @returns {{element: SVGGElement, height: number, said: string}} */
function drawRun(seen, width, wanted, predicted) {
  const { run } = seen, step = stepIn(run, wanted), inks = seen.dark ? INKS.dark : INKS.light;
  const element = drawn("g", {});
  let y = 0;
  const write = (/** @type {string[]} */ lines, /** @type {number} */ size, /** @type {number} */ high, /** @type {Record<string, any>} */ attributes) => {
    for (const line of lines) {
      y += high;
      element.append(drawn("text", { x: 0, y, "font-size": size, ...attributes }, line));
    }
  };
  const where = `after step ${step} of ${stepsOf(run)[0]}–${lastStep(run)}`;
  element.append(drawn("text", { x: width, y: 21, "text-anchor": "end", "font-size": 13, fill: inks.soft }, where));
  write(linesOf(readable(run.label), 17, 700, width - 20 - widthOf(where, 13), 2), 17, 21, { "font-weight": 700, fill: inks.ink });
  if (run.prompt) {
    y += 3;
    write(linesOf(inQuotes(run.prompt), 14, 400, width, 3), 14, 19, { fill: inks.soft });
  }
  y += 16;
  const { boxes, height } = laidOut(seen, predicted, step, width);
  const verdict = verdictAt(run, step);
  element.append(drawn("g", { transform: `translate(0 ${y})` }, ...boxes.map((box) => drawToken(run, box, inks))));
  y += height;
  let judged = "";
  if (run.verdict) {
    const { right, wrote, answer } = run.verdict, asked = `the answer is ${inQuotes(answer)}`;
    const last = linesOf(right ? `✓ right: ${inQuotes(wrote)}` : `✗ wrong: ${inQuotes(wrote)}, ${asked}`, 15, 700, width, 2);
    // The lines have their place at every step, so that the pictures of all steps have one size.
    const lines = verdict ? last : last.map((_, i) => (i ? "" : linesOf(asked, 15, 400, width, 1)[0]));
    y += 14;
    write(lines, 15, 19, verdict ? { "font-weight": 700, fill: right ? inks.right : inks.wrong } : { fill: inks.soft });
    judged = `; ${lines.join(" ").trim()}`;
  }
  const text = boxes.map(({ word, guess }) => (word === null || guess ? "·" : readable(word))).join(" ");
  return { element, height: y + 4, said: `${readable(run.label)} after step ${step}: ${text}${judged}` };
}

/** The settings of a run in words; empty where they are not known.
 * @param {Run} run */
export function settingsOf({ spec }) {
  if (!spec) return "";
  const parts = [`${spec.steps} steps`, spec.sampler, spec.cfg_scale ? `guidance ${spec.cfg_scale}` : null,
    `temperature ${spec.temperature}`, `seed ${spec.seed}`];
  return parts.filter((part) => part).join(", ");
}

/** The scale of the colours, ended at `x`.
 * @param {string} overlay @param {Predicted|null} predicted @param {Paint[]} colours @param {typeof INKS.light} inks @param {number} right @param {number} y */
function drawScale(overlay, predicted, colours, inks, right, y) {
  const [low, high] = overlay === "entropy" ? [`${predicted?.highest}`, "0"] : overlay === "commitment" ? ["open", "committed"] : ["0", "1"];
  const size = 12, bar = 84, parts = 21, start = right - widthOf(high, size) - 6 - bar;
  const group = drawn("g", { "font-size": size, fill: inks.soft });
  const value = (/** @type {number} */ i) => (overlay === "commitment" ? (i < parts / 2 ? 0 : COMMITTED) : i / (parts - 1));
  for (let i = 0; i < parts; i++) {
    group.append(drawn("rect", { x: start + (i * bar) / parts, y: y - 10, width: bar / parts + 0.4, height: 12, fill: paint(colours, value(i)).background }));
  }
  group.append(drawn("rect", { x: start - 0.5, y: y - 10.5, width: bar + 1, height: 13, fill: "none", stroke: inks.line }),
    drawn("text", { x: right, y, "text-anchor": "end" }, high),
    drawn("text", { x: start - 6, y, "text-anchor": "end" }, `${OVERLAYS[overlay]}  ${low}`));
  return group;
}

/** Runs side by side, or one above the other where they would be taller than wide, with a line that says what is shown.
 * @param {Seen[]} seens @param {number} step  the canvas after this step, or after the last one that a run has before it
 * @param {(Predicted|null)[]} predictions  what the steps of each run predicted; null shows the confidence
 * @returns {SVGSVGElement} */
export function drawPicture(seens, step, predictions) {
  const all = (/** @type {number} */ width) => seens.map((seen, i) => drawRun(seen, width, step, predictions[i]));
  const isPair = seens.length > 1, [{ dark }] = seens, runs = seens.map(({ run }) => run);
  let parts = all(isPair ? BESIDE : WIDTH);
  const beside = isPair && parts.every(({ height }) => height < BESIDE);
  if (isPair && !beside) parts = all(WIDTH);
  const wide = beside ? BESIDE : WIDTH, gap = 40;
  const inks = dark ? INKS.dark : INKS.light;
  const width = 2 * PAD + (beside ? runs.length * wide + (runs.length - 1) * gap : wide);
  const picture = drawn("svg", { ...SVG_ROOT, role: "img", "aria-label": parts.map(({ said }) => said).join("; "), width });
  let x = PAD, y = PAD - 8, lowest = y;
  parts.forEach(({ element, height }, i) => {
    element.setAttribute("transform", `translate(${x} ${y})`);
    picture.append(element);
    lowest = Math.max(lowest, y + height);
    if (i < parts.length - 1) {
      const line = beside ? `M${x + wide + gap / 2} ${y + 6}V${y + Math.max(...parts.map((part) => part.height))}` : `M${PAD} ${y + height + gap / 2 - 4}H${width - PAD}`;
      picture.append(drawn("path", { d: line, stroke: inks.line, "stroke-width": 1, fill: "none" }));
    }
    if (beside) x += wide + gap;
    else y += height + gap;
  });
  const settings = runs.map(settingsOf), alike = new Set(settings).size === 1;
  const said = alike ? [settings[0]] : runs.map((run, i) => `${readable(run.label)}: ${settings[i]}`);
  const foot = lowest + 40, line = 17;
  picture.append(
    drawn("path", { d: `M${PAD} ${foot - 21}H${width - PAD}`, stroke: inks.line, "stroke-width": 1, fill: "none" }),
    ...said.map((text, i) => drawn("text", { x: PAD, y: foot + i * line, "font-size": 12, fill: inks.soft }, ...linesOf(text, 12, 400, width - 2 * PAD - 290, 1))),
    drawScale(predictions[0] ? overlayOf(seens[0]) : "confidence", predictions[0], ramp("canvas", dark), inks, width - PAD, foot));
  const height = Math.ceil(foot + (said.length - 1) * line + 18);
  picture.setAttribute("height", String(height));
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.prepend(drawn("rect", { width, height, fill: inks.paper }));
  return picture;
}
