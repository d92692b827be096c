/** Work that takes long: one task at a time, with its progress, its time, and a way to cancel it. */

import { button, h, setText } from "./elements.js";

/** @typedef {import("./types.js").Told} Told */

export class Work {
  constructor(/** @type {import("./explorer.js").Explorer} */ explorer) {
    this.explorer = explorer;
    this.bar = h("progress");
    this.text = h("span");
    this.element = h("div", { class: "dl-progress", hidden: true }, this.bar, this.text, button("Cancel", () => this.cancel()));
    /** @type {AbortController|null} */ this.present = null;
    this.ended = Promise.resolve();
  }

  /** Cancel the present task, and wait until it has ended. */
  cancel() {
    this.present?.abort();
    return this.ended;
  }

  /** Do a task; null where it failed, was cancelled, or another one is not done yet. */
  async run(/** @type {string} */ name, /** @type {(told: Told, signal: AbortSignal) => Promise<any>} */ task) {
    if (this.present) return null;
    const { explorer, bar, text } = this, began = performance.now(), pressed = /** @type {any} */ (document.activeElement);
    const present = (this.present = new AbortController());
    let end = () => {};
    this.ended = new Promise((resolve) => { end = () => resolve(undefined); });
    let said = name;
    const say = () => setText(text, `${said} · ${((performance.now() - began) / 1000).toFixed(0)} s`);
    const told = (/** @type {import("./types.js").Progress} */ { what, done, of }) => {
      said = `${what} ${done} of ${of}`;
      [bar.max, bar.value] = [of, done];
      say();
    };
    bar.removeAttribute("value");
    const timer = setInterval(say, 500), appear = setTimeout(() => { this.element.hidden = false; }, 150);
    explorer.busy(true);
    explorer.fail(null);
    say();
    let result = null;
    try {
      result = (await task(told, present.signal)) ?? null;
    } catch (error) {
      if (present.signal.aborted) explorer.say(`Cancelled: ${name}.`);
      else explorer.fail(error.message);
    }
    clearInterval(timer);
    clearTimeout(appear);
    this.element.hidden = true;
    this.present = null;
    explorer.busy(false);
    end();
    // A button that is disabled loses the focus, and the keyboard its place.
    if (document.activeElement === document.body && explorer.root.contains(pressed)) pressed.focus({ preventScroll: true });
    return result;
  }
}
