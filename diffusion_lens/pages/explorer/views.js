/** The views, in the order of their tabs. */

import { attentionView } from "./views/attention.js";
import { lensView } from "./views/lens.js";
import { stepsView } from "./views/steps.js";
import { tokenView } from "./views/token.js";
import { traceView } from "./views/trace.js";

/** @type {import("./types.js").View[]} */
export const VIEWS = [tokenView, stepsView, lensView, traceView, attentionView];

/** Show one more view, after the others.
 * @param {import("./types.js").View} view */
export const addView = (view) => VIEWS.push(view);
