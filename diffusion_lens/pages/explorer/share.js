/** The menu "Share": what is seen as a link, a page, a picture, a film, a notebook or code. */

import { button, h, ids } from "./elements.js";
import { filmOf, filmType, pngOf, svgText } from "./film.js";
import { notebookOf } from "./notebook.js";
import { pictureOfRuns } from "./picture.js";
import { predictedOf } from "./predicted.js";
import { stepsOf } from "./runs.js";

/** @typedef {import("./types.js").Seen} Seen @typedef {import("./types.js").Source} Source
 *
 * @typedef {Object} Shareable  what the menu needs of the explorer
 * @property {Source} source
 * @property {() => Seen[]} seen  the selection in each run that is shown, the selected run first
 * @property {() => string|null} link  the address of what is seen; null in a notebook
 */

const LONGEST_NAME = 60; // characters of a file's name
const KEPT = 60e3; // milliseconds in which a browser has begun to save a file

/** @param {Shareable} explorer @returns {HTMLElement} */
export function shareMenu(explorer) {
  const id = ids();
  const text = h("textarea", { readonly: true, rows: 4, hidden: true, "aria-label": "Text to copy" });
  const list = h("div", { class: "dl-share-list" });
  const menu = h("div", { id, popover: "auto", class: "dl-share-menu", role: "group", "aria-label": "Share" }, list, text);
  const opener = button("Share", () => {}, { popovertarget: id, class: "dl-share" });
  const say = (/** @type {string} */ said) => explorer.seen()[0].say(said);

  const save = (/** @type {Blob} */ blob, /** @type {string} */ ending, /** @type {string} */ what) => {
    const url = URL.createObjectURL(blob), name = `${fileName(explorer.seen())}.${ending}`;
    h("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), KEPT);
    say(`Saved ${what} as ${name}.`);
  };
  const copy = async (/** @type {string} */ copied, /** @type {string} */ what) => {
    try {
      await navigator.clipboard.writeText(copied);
      say(`Copied ${what}.`);
    } catch { // A frame in a notebook, and an address without https, have no clipboard.
      menu.showPopover();
      text.value = copied;
      text.hidden = false;
      text.focus();
      text.select();
      say(`Press Ctrl+C to copy ${what}.`);
    }
  };
  /** Does what takes long, with progress and a way to cancel it; an error becomes an alert. */
  const long = (/** @type {Parameters<Seen["work"]>[0]} */ task) => explorer.seen()[0].work(task);

  const actions = () => {
    const [first] = explorer.seen(), link = explorer.link(), { source } = explorer, picture = `the picture of step ${first.step}`;
    const python = explorer.seen().map(({ run }) => run.python.run).filter(Boolean);
    /** @type {[string, string, (() => any)|null][]} */ const all = [
      ["Copy link", "an address that opens what you see", link && (() => copy(link, "the link"))],
      source.live && source.page
        ? ["Page (.html)", "a file that opens anywhere, without a model", () => long(async () => save(await pageOf(explorer), "html", "the page"))]
        : ["Page (.html)", source.page ? "needs the kernel of this notebook" : "this file is the page: send it as it is",
          () => say(source.page ? "The notebook's kernel writes the page: run its cell again." : "This file is the page: send it as it is.")],
      ["SVG", "the picture of this step, for a paper", () => long(async () => save(await svgOf(explorer), "svg", picture))],
      ["PNG", "the picture of this step, for a slide", () => long(async () => save(await pngOf(await pictureOf(explorer)), "png", picture))],
      filmType()
        ? ["Film (.webm)", `all steps, ${filmSteps(explorer.seen()).length} pictures`, () => long((told, signal) => saveFilm(explorer, save, told, signal))]
        : ["Film (.webm)", "this browser cannot record one", () => say("This browser cannot record a film; Chromium and Firefox can.")],
      ["Notebook (.ipynb)", "the code, to run and to change", python.length ? () => save(jsonOf(notebookOf(explorer.seen())), "ipynb", "the notebook") : null],
      ["Code", "the run as Python, copied", python.length ? () => copy(`${python.join("\n\n\n")}\n`, "the code") : null],
    ];
    return all.filter(([, , act]) => act);
  };
  menu.addEventListener("beforetoggle", (/** @type {any} */ { newState }) => {
    if (newState !== "open") return;
    text.hidden = true;
    list.replaceChildren(...actions().map(([name, help, act], i) => {
      const onclick = () => { menu.hidePopover(); act(); };
      return h("button", { type: "button", autofocus: i === 0, onclick }, h("b", {}, name), h("span", {}, help));
    }));
    const { left, right, bottom } = opener.getBoundingClientRect(), width = Math.min(320, innerWidth - 16);
    const x = Math.min(Math.max(8, left + width > innerWidth - 8 ? right - width : left), innerWidth - width - 8);
    Object.assign(menu.style, { width: `${width}px`, left: `${x}px`, top: `${bottom + 4}px`, maxHeight: `${innerHeight - bottom - 12}px` });
  });
  // Up and Down go through the list, as in a menu.
  list.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], items = [...list.children];
    if (!step) return;
    event.preventDefault();
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  });
  return h("span", { class: "dl-sharing" }, opener, menu);
}

/** The picture of what is seen, of one step or of another.
 * @param {Shareable} explorer @param {number} [step] @returns {Promise<SVGSVGElement>} */
export async function pictureOf(explorer, step) {
  const shown = explorer.seen(), [first] = shown, overlay = first.state.canvas;
  const predicted = overlay === "confidence" ? undefined : await Promise.all(shown.map((seen) => predictedOf(seen)));
  return pictureOfRuns(shown.map(({ run }) => run), { step: step ?? first.step, overlay, dark: first.dark, predicted });
}

/** @param {Shareable} explorer */
const svgOf = async (explorer) => new Blob([svgText(await pictureOf(explorer))], { type: "image/svg+xml" });
const jsonOf = (/** @type {any} */ data) => new Blob([`${JSON.stringify(data, null, 1)}\n`], { type: "application/x-ipynb+json" });

/** @param {Shareable} explorer */
async function pageOf({ source, seen }) {
  const shown = seen(), [{ state, block }] = shown;
  const attention = state.view === "attention" ? [block] : [];
  return new Blob([await source.page({ runs: shown.map(({ run }) => run.id), state, attention })], { type: "text/html" });
}

/** The steps of a film: those of the run that has most.
 * @param {Seen[]} shown */
const filmSteps = (shown) => stepsOf(shown.map(({ run }) => run).reduce((a, b) => (b.n_steps > a.n_steps ? b : a)));

/** @param {Shareable} explorer @param {(blob: Blob, ending: string, what: string) => void} save
 * @param {import("./types.js").Told} told @param {AbortSignal} signal */
async function saveFilm(explorer, save, told, signal) {
  const steps = filmSteps(explorer.seen());
  const pictures = await Promise.all(steps.map((step) => pictureOf(explorer, step)));
  save(await filmOf(pictures, told, signal), "webm", `the film of ${steps.length} steps`);
}

/** A file's name from models and prompt, in letters that every system takes.
 * @param {Seen[]} shown */
export function fileName(shown) {
  const text = [...shown.map(({ model }) => model.name), shown[0].run.prompt].join("-");
  const safe = text.normalize("NFKD").replace(/\p{M}/gu, "").replace(/[^A-Za-z0-9]+/g, "-").toLowerCase().slice(0, LONGEST_NAME);
  return safe.replace(/^-+|-+$/g, "") || "run";
}
