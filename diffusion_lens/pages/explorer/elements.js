/** Elements of the page. Text of models enters the document through `textContent` only. */

import { paint } from "./colours.js";
import { number, quoted } from "./words.js";

/** @typedef {import("./types.js").Paint} Paint */

/** An element; strings among the children become text, `on...` attributes listeners.
 * @param {string} tag @param {Record<string, any>} attributes @param {...any} children @returns {any} */
export function h(tag, attributes = {}, ...children) {
  const element = /** @type {any} */ (document.createElement(tag));
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** @param {string} text @param {(event: any) => void} onclick @param {Record<string, any>} attributes @returns {HTMLButtonElement} */
export const button = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);
export const ids = ((n) => () => `dl-${++n}`)(0);

/** A labelled control.
 * @param {string} label @param {any} control @param {string} kind @returns {HTMLElement} */
export function field(label, control, kind = "") {
  control.id ||= ids();
  return h("span", { class: `dl-field ${kind}` }, h("label", { for: control.id }, label), control);
}

/** Fill a `<select>` with [value, text] pairs, if they changed, and choose one.
 * @param {any} select @param {any[][]} options @param {any} value */
export function fillSelect(select, options, value) {
  const key = JSON.stringify(options);
  if (select.dataset.key !== key) {
    select.replaceChildren(...options.map(([option, text]) => h("option", { value: option }, text)));
    select.dataset.key = key;
  }
  select.value = String(value);
}

/** Set text only where it changes, which is much cheaper for thousands of cells.
 * @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A colour scale with the numbers of its ends; `stops` are the values that it shows.
 * @param {any} box @param {Paint[]} colours @param {{name: string, low: string, high: string}} ends @param {number[]} stops */
export function drawLegend(box, colours, ends, stops = [0, 0.25, 0.5, 0.75, 1]) {
  const shown = stops.map((x) => paint(colours, x).background).join(", ");
  if (!box.firstChild) box.append(h("span"), h("span"), h("i"), h("span"));
  const [name, low, bar, high] = box.children;
  setText(name, ends.name);
  setText(low, ends.low);
  setText(high, ends.high);
  bar.style.background = `linear-gradient(90deg, ${shown})`;
}

/** A small line of numbers by step, with gaps at NaN; `marks` are [step, class of a vertical line].
 * @param {HTMLElement} box @param {number[]} steps @param {number[]} values @param {number} highest @param {any[][]} marks @param {string} label */
export function drawCourse(box, steps, values, highest, marks, label) {
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const x = (i) => (steps.length < 2 ? 100 : 4 + (192 * i) / (steps.length - 1)), y = (value) => 38 - 34 * (value / highest);
  const path = values.map((value, i) => (Number.isNaN(value) ? "" :
    `${i > 0 && !Number.isNaN(values[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}h0`)).join("");
  const picture = svg("svg", { viewBox: "0 0 200 42", preserveAspectRatio: "none", role: "img", "aria-label": label });
  picture.append(...marks.filter(([step]) => steps.includes(step)).map(([step, kind]) =>
    svg("path", { class: kind, d: `M${x(steps.indexOf(step)).toFixed(1)} 2V40` })), svg("path", { class: "dl-line", d: path }));
  box.replaceChildren(h("span", {}, String(highest)), picture, h("span", {}, "0"),
    h("span", {}, h("span", {}, `${steps[0]}`), h("span", {}, "step"), h("span", {}, `${steps.at(-1)}`)));
}

/** Likeliest tokens as rows with bars; `most` rows always, so that nothing below them moves.
 * @param {HTMLElement} list @param {[string, number][]} rows @param {number} most @param {string|null} marked */
export function drawBars(list, rows, most, marked) {
  while (list.children.length < most) list.append(h("li", {}, h("b"), h("i"), h("span")));
  [...list.children].forEach((/** @type {any} */ row, i) => {
    const [word, p] = rows[i] ?? ["", NaN];
    row.hidden = i >= most;
    setText(row.children[0], rows[i] ? quoted(word) : "");
    row.children[0].title = rows[i] ? quoted(word) : "";
    row.children[1].style.setProperty("--p", String(p || 0));
    setText(row.children[2], rows[i] ? number(p) : "");
    row.classList.toggle("dl-target", rows[i] !== undefined && word === marked);
  });
}
