/** Tokens, numbers and lists of numbers as text. */

const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}]/gu;
const escaped = (/** @type {string} */ char) =>
  ({ "\n": "\\n", "\t": "\\t", "\r": "\\r" })[char] ?? `\\u{${char.codePointAt(0).toString(16)}}`;

/** A function of a word that remembers its results: a map asks for the same few words thousands of times.
 * @param {(word: string) => string} compute @returns {(word: string) => string} */
function remembered(compute) {
  const known = new Map();
  return (word) => {
    if (!known.has(word)) known.set(word, compute(word));
    return known.get(word);
  };
}

/** A token as a short label: without outer spaces, with invisible characters escaped. */
export const readable = remembered((word) => {
  const spaced = word.replaceAll("▁", " ");
  return (spaced.replace(/^ +| +$/g, "") || "␣".repeat(spaced.length)).replace(INVISIBLE, escaped);
});

/** A token in full: outer spaces are visible. */
export const quoted = remembered((word) => {
  const marks = (/** @type {string} */ spaces) => "␣".repeat(spaces.length);
  return `“${word.replaceAll("▁", " ").replace(/^ +| +$/g, marks).replace(INVISIBLE, escaped)}”`;
});

/** A text of at most so many characters.
 * @param {string} text @param {number} most */
export const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A number with three decimals; "–" where there is none.
 * @param {number|null} [x] */
export const number = (x) =>
  x === null || x === undefined || Number.isNaN(x) ? "–" : x.toFixed(3).replace("-", "−");
export const signed = (/** @type {number} */ x) => (x > 0 ? `+${number(x)}` : number(x));

/** Code with the placeholders of the current selection filled in.
 * @param {string} code @param {Record<string, any>} values */
export const fillIn = (code, values) =>
  code.replace(/\{(step|layer|head|position|name)\}/g, (_, name) => String(values[name]));
