/** The views, in the order of their tabs. */

import { tokenView } from "./views/token.js";

/** @type {import("./types.js").View[]} */
export const VIEWS = [tokenView];

/** Show one more view, after the others.
 * @param {import("./types.js").View} view */
export const addView = (view) => VIEWS.push(view);
