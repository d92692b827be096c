/** The views, in the order of their tabs. */

import { attentionView } from "./views/attention.js";
import { circuitView } from "./views/circuit.js";
import { conditioningView } from "./views/conditioning.js";
import { expertsView } from "./views/experts.js";
import { graphView } from "./views/graph.js";
import { lensView } from "./views/lens.js";
import { signaturesView } from "./views/signatures.js";
import { stepsView } from "./views/steps.js";
import { tokenView } from "./views/token.js";
import { traceView } from "./views/trace.js";

/** @type {import("./types.js").View[]} */
export const VIEWS = [tokenView, stepsView, lensView, traceView, attentionView, circuitView, graphView, expertsView, conditioningView, signaturesView];

/** Show one more view, after the others.
 * @param {import("./types.js").View} view */
export const addView = (view) => VIEWS.push(view);
