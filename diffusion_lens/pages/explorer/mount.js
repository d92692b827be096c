/** Places to mount the explorer: a page that contains its data, the page of `diffusion-lens explore`, a notebook. */

import { Explorer } from "./explorer.js";
import { fileSource, liveSource, widgetSource } from "./sources.js";

function mount(/** @type {HTMLElement} */ element, /** @type {import("./types.js").Source} */ source, /** @type {boolean} */ hasAddress) {
  const explorer = new Explorer(element, source, hasAddress);
  explorer.start();
  return () => explorer.close();
}

/** Mount in a page that contains its data. */
export const mountFile = (/** @type {HTMLElement} */ element) => mount(element, fileSource(), true);
/** Mount in the page of `diffusion-lens explore`. */
export const mountLive = (/** @type {HTMLElement} */ element) => mount(element, liveSource(), true);
/** For anywidget. */
export default { render: (/** @type {{model: any, el: HTMLElement}} */ { model, el }) => mount(el, widgetSource(model), false) };
