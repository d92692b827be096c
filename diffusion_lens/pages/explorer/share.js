/** The menu "Share": what is seen as a link, a page, a picture, a film, a notebook or code. */

import { needed } from "./address.js";
import { overlayOf } from "./canvas.js";
import { button, h, ids } from "./elements.js";
import { filmType, gifFilm, pngOf, svgText, webmFilm } from "./film.js";
import { notebookOf } from "./notebook.js";
import { drawPicture } from "./picture.js";
import { predictedOf } from "./predicted.js";
import { lengthOf, stepsOf } from "./runs.js";
import { factsOfReasons } from "./why.js";

/** @typedef {import("./types.js").Seen} Seen @typedef {import("./explorer.js").Explorer} Explorer */

const LONGEST_NAME = 60; // characters of a file's name
const MOST_WEIGHTS = 2e6; // bytes of attention, before they are compressed, of each run in a page
const KEPT = 60e3; // milliseconds in which a browser has begun to save a file

/** @param {Explorer} explorer @returns {HTMLElement} */
export function shareMenu(explorer) {
  const id = ids();
  const text = h("textarea", { readonly: true, rows: 4, hidden: true, "aria-label": "Text to copy" });
  const list = h("div", { class: "dl-share-list" });
  const menu = h("div", { id, popover: "auto", class: "dl-share-menu", role: "group", "aria-label": "Share" }, list, text);
  const opener = button("Share", () => {}, { popovertarget: id, class: "dl-share" });

  const save = (/** @type {BlobPart[]} */ parts, /** @type {string} */ ending, /** @type {string} */ type, /** @type {string} */ what) => {
    const url = URL.createObjectURL(new Blob(parts, { type })), name = `${fileName(seenIn(explorer))}.${ending}`;
    h("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), KEPT);
    explorer.say(`Saved ${what} as ${name}.`);
  };
  const copy = async (/** @type {string} */ copied, /** @type {string} */ what, also = "") => {
    try {
      await navigator.clipboard.writeText(copied);
      explorer.say(`Copied ${what}.${also}`);
    } catch { // A frame in a notebook, and an address without https, have no clipboard.
      menu.showPopover();
      text.value = copied;
      text.hidden = false;
      text.focus();
      text.select();
      explorer.say(`Press Ctrl+C to copy ${what}.${also}`);
    }
  };
  /** What can be done, as name, help and action. @returns {[string, string, () => any][]} */
  const actions = () => {
    const { source, steps, state } = explorer, seens = seenIn(explorer), coded = seens.filter(({ run }) => run.python?.run);
    const link = explorer.link(), step = `the picture of step ${state.step}`;
    const film = (/** @type {string} */ ending, /** @type {string} */ type, /** @type {typeof gifFilm|typeof webmFilm} */ make) =>
      explorer.work("the film", async (told, signal) => {
        const pictures = await Promise.all(steps.map((one) => pictureOf(explorer, one)));
        save(await make(pictures, told, signal), ending, type, `the film of ${steps.length} steps`);
      });

    const page = { runs: needed(explorer.runs, explorer.shown.map(({ id }) => id)).map(({ id }) => id), state, attention: attentionIn(explorer), facts: explorer.facts.ofPage };
    /** @type {[string, string, () => any][]} */ const all = [
      ["SVG", "the picture of this step, for a paper", () => explorer.work("drawing", async () =>
        save([svgText(await pictureOf(explorer))], "svg", "image/svg+xml", step))],
      ["PNG", "the picture of this step, for a slide", () => explorer.work("drawing", async () =>
        save([await pngOf(await pictureOf(explorer))], "png", "image/png", step))],
      ["Film (.gif)", `a film of ${steps.length} steps, for slides and mail`, () => film("gif", "image/gif", gifFilm)],
      filmType()
        ? ["Film (.webm)", "the same in more colours, recorded as it plays", () => film("webm", "video/webm", webmFilm)]
        : ["Film (.webm)", "this browser cannot record one", () => explorer.say("This browser cannot record a film; it can write a GIF.")],
    ];
    const { view } = explorer, files = view.missing(explorer.seen()) === null ? explorer.active.pane(view).pane.files?.() : null;
    for (const { name, help, ending, type, make } of files ?? []) {
      all.push([name, help, () => explorer.work("saving", async () => save([await make()], ending, type, name))]);
    }
    if (coded.length) {
      const code = coded.map(({ run }) => `${run.python.run}\n`).join("\n\n");
      all.push(["Notebook (.ipynb)", "the code, to run and to change", () =>
        save([JSON.stringify(notebookOf(coded), null, 1)], "ipynb", "application/x-ipynb+json", "the notebook")]);
      all.push(["Code", "the run as Python, copied", () => copy(code, "the code")]);
    }
    if (!source.page) all.unshift(["Page (.html)", "this file is the page", () => explorer.say("This file is the page: send it as it is.")]);
    else if (source.live) {
      all.unshift(["Page (.html)", `a file that opens anywhere, without a model: the runs that are shown${factsInWords(page.facts.length, explorer)}`, () => explorer.work("writing the page", async () =>
        save([await source.page({ ...page, facts: [...new Set([...page.facts, ...(await factsOfReasons(explorer))])] })], "html", "text/html", "the page"))]);
    }
    if (link) {
      const [help, also] = !source.live ? ["an address that opens what you see", ""] : isLocal()
        ? ["opens what you see on this machine, while the server runs; it contains the server's token", " It opens on this machine while the server runs."]
        : ["opens what you see, and lets whoever has it compute here: it contains the server's token", " Whoever has it can compute on this server."];
      all.unshift(["Copy link", help, () => copy(link, "the link", also)]);
    }
    return all;
  };
  menu.addEventListener("beforetoggle", (/** @type {any} */ { newState }) => {
    if (newState !== "open") return;
    text.hidden = true;
    list.replaceChildren(...actions().map(([name, help, act]) => {
      const onclick = () => { menu.hidePopover(); act(); };
      return h("button", { type: "button", onclick }, h("b", {}, name), h("span", {}, help));
    }));
    const { left, right, bottom } = opener.getBoundingClientRect(), width = Math.min(320, innerWidth - 16);
    const x = Math.min(Math.max(8, left + width > innerWidth - 8 ? right - width : left), innerWidth - width - 8);
    Object.assign(menu.style, { width: `${width}px`, left: `${x}px`, top: `${bottom + 4}px`, maxHeight: `${innerHeight - bottom - 12}px` });
  });
  // Who opens it by keyboard is in it. A button with `autofocus` would do, but not in the frame of a notebook.
  menu.addEventListener("toggle", (/** @type {any} */ { newState }) => newState === "open" && text.hidden && list.firstChild.focus());
  // Up and Down go through the list, as in a menu.
  list.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], items = [...list.children];
    if (!step) return;
    event.preventDefault();
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  });
  return h("span", { class: "dl-sharing" }, opener, menu);
}

/** Which facts a page contains.
 * @param {number} n @param {Explorer} explorer */
const factsInWords = (n, explorer) =>
  !explorer.manifest.facts?.length ? "" : explorer.state.facts ? `, and ${n} facts, those that are selected or else measured` : "; open the table of facts to add them";

/** Whether the address is one of this machine. */
const isLocal = () => ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

/** The blocks whose attention a written page contains: all of them where they are small, otherwise the selected one.
 * @param {Explorer} explorer @returns {number[]} */
function attentionIn(explorer) {
  const weights = ({ run, model }) => stepsOf(run).length * model.n_layers * model.n_heads * lengthOf(run) ** 2;
  const seens = seenIn(explorer), all = seens.every((seen) => weights(seen) < MOST_WEIGHTS);
  return all ? Array.from({ length: Math.min(...seens.map(({ model }) => model.n_layers)) }, (_, block) => block) : [explorer.seen().block];
}

/** The selection in each run that is shown.
 * @param {Explorer} explorer @returns {Seen[]} */
const seenIn = (explorer) => explorer.shown.map((run) => explorer.seen(run));

/** The picture of what is seen, of this step or of another.
 * @param {Explorer} explorer */
async function pictureOf(explorer, step = explorer.state.step) {
  const seens = seenIn(explorer);
  const predictions = seens.map((seen) => (overlayOf(seen) === "confidence" ? null : predictedOf(seen)));
  return drawPicture(seens, step, await Promise.all(predictions));
}

/** A file's name from models and prompt, in letters that every system takes.
 * @param {Seen[]} shown */
function fileName(shown) {
  const text = [...shown.map(({ model }) => model.name), shown[0].run.prompt].join("-");
  const safe = text.normalize("NFKD").replace(/\p{M}/gu, "").replace(/[^A-Za-z0-9]+/g, "-").toLowerCase().slice(0, LONGEST_NAME);
  return safe.replace(/^-+|-+$/g, "") || "run";
}
