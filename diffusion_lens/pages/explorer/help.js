/** The words that the page uses, and its keys. */

import { h } from "./elements.js";

/** @type {[string, string][]} */
const WORDS = [
  ["step", "One pass of the model. A diffusion model writes some masked positions at each; an autoregressive (AR) model the next one."],
  ["t", "The time of a step, from 1, when all is masked, to 0."],
  ["masked, ·", "A position that is not written yet. Its frame is dashed."],
  ["frame", "A solid frame marks a token that the shown step has written; a blue one what is selected."],
  ["confidence", "The probability that the model gave a token when it wrote it: the colour of the text."],
  ["right, wrong", "Whether the answer stands in the text before the end token. A straight line underlines a token of the answer, a wavy one another token in its place."],
  ["committed, decided", "The step from which on the likeliest token is the one that is written in the end. It may be earlier than the step that writes it."],
  ["entropy (nats)", "How undecided a prediction is: 0 where one token is certain."],
  ["margin", "The probability of the likeliest token less that of the second."],
  ["layer, block", "A block is one layer of the network. “3_pre” is the state before block 3, “final_post” the one after the last block."],
  ["lens", "What the model would write if it ended at this layer. A dot or bold type marks a layer whose likeliest token is the target."],
  ["target, rank", "The target is the answer's token, or the one that was written. Its rank is the number of tokens that are likelier: 0 is the likeliest."],
  ["attention", "How much a position reads from each other one, by head. The weights of a row add up to 1."],
  ["trace", "Noise at the subject makes the model forget (corrupted). One state of the clean run is put back (restored): the effect is what the probability of the answer gains."],
  ["block 3 set to zero", "A change of the run: what this part writes is left out, or taken from another run (patched)."],
  ["hatched, grey", "There is no number here."],
];
/** @type {[string, string][]} */
const KEYS = [
  ["Tab", "to the text, the layers, the views"], ["Arrows", "inside the text, the layers, the views, and a map"],
  ["[ and ]", "step before, step after"], ["Space", "play, from the text and the layers"], ["?", "this help"], ["Escape", "close what is open"],
];

/** @returns {HTMLElement} */
export function helpText() {
  const list = (/** @type {[string, string][]} */ entries) => h("dl", {}, ...entries.flatMap(([word, meaning]) => [h("dt", {}, word), h("dd", {}, meaning)]));
  return h("div", { class: "dl-help-text", tabindex: 0 }, h("h3", {}, "Keys"), list(KEYS), h("h3", {}, "Words"), list(WORDS));
}
