/** The graph of a run: time runs down, layers across. Nodes can be pinned, and pinned nodes be grouped under a name.
 *
 * What is pinned, grouped and selected is text in the state, as the `qParams` of circuit-tracer: its viewers read the same.
 */

import { paint, ramp } from "../colours.js";
import { button, drawLegend, field, h, ids, setText } from "../elements.js";
import { pngOf, svgText } from "../film.js";
import { clamp, read, wordOf } from "../numbers.js";
import { INKS, SVG_ROOT, drawn } from "../picture.js";
import { finalWord, placeIn, predictedAt } from "../runs.js";
import { quoted, readable, shorten } from "../words.js";

/** @typedef {import("../types.js").Seen} Seen @typedef {import("../types.js").Chunk} Chunk
 * @typedef {{index: number, id: string, kind: string, name: string, step: number, layer: number, head: number, position: number,
 *   branch: number, effect: number, share: number, word: string|null, other: string|null}} Node  share: of the influence, with all larger ones
 * @typedef {{from: number, to: number, weight: number, decision: boolean}} Edge  from and to are nodes, and places in a picture
 * @typedef {{pinnedIds: string[], supernodes: string[][], clickedId: string, pruningThreshold: number, chunk: string}} Picked  chunk: the graph that was computed last
 * @typedef {{id: string, nodes: Node[], text: string, name: string|null, x: number, y: number}} Place  a node, or a group by its name */

const ROW = 22, STEP = 40, COLUMN = [34, 120], SIDES = [112, 84]; // px of a row, before a step, of a column, and what is left free
const MOST_EDGES = 300, MOST_LISTED = 40, AT_FIRST = 60, NAMED = 8; // edges that are drawn, entries of a list, nodes at first and with a name
const NEAR = 10; // px around a node that belong to it

/** @type {import("../types.js").View} */
export const graphView = {
  name: "graph",
  title: "Graph",
  help: "The parts, by step and layer, through which the difference to another run passes.",
  missing: ({ run }) => (run.graph ? null : run.missing.graph ?? "There is no graph of a run on this page."),
  create: () => new GraphPane(),
};

/** Nodes and edges of a chunk, read once.
 * @param {import("../types.js").Run} run @param {Chunk} chunk @returns {{nodes: Node[], edges: Edge[]}} */
function graphOf(run, chunk) {
  const { header: { document, ids, names, kinds }, tables } = chunk;
  if (!chunk.graph) {
    const shares = new Map(document.nodes.map((/** @type {any} */ node) => [node.node_id, node.influence]));
    const word = (/** @type {string} */ table, /** @type {number} */ i) => wordOf(run, chunk, read(tables[table], i));
    const numbers = (/** @type {number} */ i) => Object.fromEntries(["step", "layer", "head", "position", "branch", "effect"].map((name) => [name, read(tables[name], i)]));
    chunk.graph = {
      nodes: ids.map((/** @type {string} */ id, /** @type {number} */ index) => ({ index, id, name: names[index], kind: kinds[index],
        ...numbers(index), share: kinds[index] === "target" ? 0 : shares.get(id), word: word("token", index), other: word("other", index) })),
      edges: document.links.map(({ weight }, i) => ({ from: read(tables.source, i), to: read(tables.target, i), weight, decision: read(tables.decision, i) === 1 })),
    };
  }
  return chunk.graph;
}

/** What is pinned, grouped and selected, by the text of an address or of a file; what is no such text selects nothing.
 * @param {any} given @param {Node[]} nodes @returns {Picked} */
function pickedIn(given, nodes) {
  const texts = (/** @type {any} */ list) => (Array.isArray(list) ? list.filter((one) => typeof one === "string") : []);
  const shares = nodes.map(({ share }) => share).sort((a, b) => a - b), threshold = Number(given?.pruningThreshold);
  return {
    pinnedIds: texts(given?.pinnedIds),
    supernodes: (Array.isArray(given?.supernodes) ? given.supernodes : []).map(texts).filter((/** @type {string[]} */ group) => group.length > 1),
    clickedId: typeof given?.clickedId === "string" ? given.clickedId : "",
    chunk: typeof given?.chunk === "string" ? given.chunk : "",
    pruningThreshold: threshold > 0 ? Math.min(1, threshold) : shares[Math.min(AT_FIRST, shares.length) - 1],
  };
}

/** The object that a text of JSON is; null for another text.
 * @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The other prompt of a graph that was computed here, by the name of its chunk. */
const promptIn = (/** @type {string} */ name) => name.split("/").slice(2).join("/");
const amount = (/** @type {number} */ x) => x.toFixed(Math.abs(x) < 1 ? 3 : 1).replace("-", "−");

/** A node in words, without its effect.
 * @param {Seen} seen @param {Node} node */
function nodeText(seen, { kind, name, step, layer, head, position, branch, word, other }) {
  const at = placeIn({ ...seen, step }, position), said = word === null ? `position ${position}` : `${quoted(word)} (${position})`;
  const not = other === null ? "" : `, not ${quoted(other)}`, where = `at ${at}, step ${step}${branch ? ", unconditional branch" : ""}`;
  return { head: `head ${head} of block ${layer} ${where}`, mlp: `MLP of block ${layer} ${where}`, token: `given ${said}, read by step ${step}`,
    embed: `${at}, read by step ${step}`, decision: `step ${step} decides on ${said}${not}`, target: `target ${said}${not}, step ${step}` }[kind] ?? `${name} ${where}`;
}

/** The outline of a node around its place.
 * @param {string} kind @param {number} r */
const outlineOf = (kind, r) => ({
  token: `M${-r} ${-r}H${r}V${r}H${-r}Z`, embed: `M${-r} ${-r}H${r}V${r}H${-r}Z`, mlp: `M${-r - 1} 0L0 ${-r - 1}L${r + 1} 0L0 ${r + 1}Z`,
  decision: `M${-r} ${-r - 1}L${r + 1} 0L${-r} ${r + 1}Z`, target: `M${-r} ${-r - 1}L${r + 1} 0L${-r} ${r + 1}Z`,
  error: `M${-r} ${-r}L${r} ${r}M${r} ${-r}L${-r} ${r}`, feature: `M${-r - 1} ${r}L0 ${-r - 1}L${r + 1} ${r}Z`,
})[kind] ?? `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`;

class GraphPane {
  constructor() {
    /** @type {Seen} */ this.seen = null;
    /** @type {Chunk} */ this.chunk = null;
    this.name = ""; // of the chunk
    /** @type {Place[]} */ this.places = [];
    /** @type {Place|null} */ this.lit = null;
    /** @type {(Edge & {line: SVGElement})[]} */ this.lines = [];
    this.slider = h("input", { type: "range", min: 0.01, max: 1, step: 0.01, onchange: () => this.pick({ pruningThreshold: Number(this.slider.value) }),
      oninput: () => setText(this.count, `${Math.round(100 * this.slider.value)} % of the influence`) });
    this.count = h("span", { class: "dl-numbers" });
    this.legend = h("span", { class: "dl-legend" });
    this.heading = h("h3");
    this.reading = h("p", { class: "dl-numbers" });
    this.picture = h("div", { class: "dl-circuit-picture", tabindex: 0, role: "group", "aria-label": "Graph; arrow keys go from node to node" });
    this.file = h("input", { type: "file", accept: ".json", hidden: true, onchange: () => this.load() });
    this.pin = button("Pin", () => this.togglePin());
    this.leave = button("Deselect", () => this.pick({ clickedId: "" }));
    this.said = h("p");
    this.lists = h("div");
    this.pins = h("div");
    this.asked = h("label", { for: ids() });
    this.against = h("input", { type: "text", id: this.asked.htmlFor });
    this.form = h("form", { class: "dl-form", onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); this.explain(); } }, this.asked, this.against, h("button", { type: "submit" }, "Explain"));
    this.body = h("div", {},
      h("header", { class: "dl-group" }, this.heading, field("Influence", this.slider, "dl-grow"), this.count, this.legend,
        button("Load pins…", () => this.file.click(), { title: "Pins and groups of a graph that was saved from here or from circuit-tracer" }), this.file,
        button("as Python", () => this.code(), { class: "dl-code" })),
      this.reading, h("div", { class: "dl-circuit-body" }, this.picture, h("section", {}, this.said, h("div", { class: "dl-group" }, this.pin, this.leave), this.pins, this.lists)));
    this.element = h("div", { class: "dl-graph-pane" }, this.form, this.body);
    this.picture.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const place = this.placeAt(event);
      if (place) this.choose(place.id, place.nodes[0]);
    });
    this.picture.addEventListener("pointermove", (/** @type {MouseEvent} */ event) => this.light(this.placeAt(event)));
    this.picture.addEventListener("pointerleave", () => this.light(null));
    this.picture.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.go(event));
  }

  /** The place under an event, or the nearest one beside it. @returns {Place|null} */
  placeAt(/** @type {MouseEvent} */ { target, clientX, clientY }) {
    const { left, top } = this.svg.getBoundingClientRect(), far = (/** @type {Place} */ { x, y }) => Math.hypot(clientX - left - x, clientY - top - y);
    const over = this.places[/** @type {any} */ (target).closest("[data-place]")?.dataset.place];
    return over ?? this.places.filter((place) => far(place) < NEAR).sort((a, b) => far(a) - far(b))[0] ?? null;
  }

  async draw(/** @type {Seen} */ seen) {
    const { run, dark, position } = seen, given = parsed(seen.state.graph);
    const name = run.graph.chunk ?? (/^graph\//.test(given?.chunk) ? String(given.chunk) : "");
    this.seen = seen;
    this.form.hidden = Boolean(run.graph.chunk);
    this.body.hidden = !run.graph.chunk && !seen.loaded(name);
    setText(this.asked, `Why ${quoted(finalWord(run, position) ?? "·")} (${position})? Change words of the prompt:`);
    if (name !== this.name || !this.against.value) this.against.value = promptIn(name) || run.prompt;
    this.name = name;
    if (this.body.hidden) return;
    const chunk = await seen.chunk(name), { about } = chunk.header;
    if (!seen.current()) return;
    this.chunk = chunk;
    const { nodes, edges } = graphOf(run, chunk), picked = (this.picked = pickedIn(given, nodes));
    const known = new Set(nodes.map(({ id }) => id)), grouped = new Map();
    picked.supernodes.forEach(([, ...ids], i) => ids.forEach((id) => known.has(id) && !grouped.has(id) && grouped.set(id, i)));
    if (grouped.has(picked.clickedId)) picked.clickedId = `supernode-${grouped.get(picked.clickedId)}`;
    const isShown = ({ id, share }) => share <= picked.pruningThreshold || grouped.has(id) || id === picked.clickedId || picked.pinnedIds.includes(id);
    const shown = nodes.filter(isShown), whole = Math.abs(about.clean - about.corrupted) || 1;
    this.places = this.placesOf(shown, grouped);
    const at = new Map(this.places.flatMap((place, i) => place.nodes.map(({ index }) => [index, i])));
    this.flows = flowsBetween(edges, (node) => at.get(node) ?? -1);
    this.slider.value = String(picked.pruningThreshold);
    const drawnEdges = this.drawPicture(whole);
    setText(this.heading, `The ${about.metric} of ${quoted(wordOf(run, chunk, about.word))} at step ${about.step}`);
    setText(this.count, `${shown.length} of ${nodes.length} nodes, ${drawnEdges} of ${edges.length.toLocaleString("en")} edges`);
    setText(this.reading, `${amount(about.clean)} in this run, ${amount(about.corrupted)} in ${quoted(about.text)}. ` +
      `Effects are shares of the difference, ${amount(about.clean - about.corrupted)}; heavy lines are decisions.`);
    drawLegend(this.legend, ramp("change", dark), { name: "effect", low: amount(-whole), high: amount(whole) });
    this.drawSelected(edges, nodes);
    this.drawPins(nodes);
  }

  /** Compute the graph of the selected token. */
  async explain() {
    const { seen } = this, chunk = `graph/${seen.position}/${this.against.value}`;
    await seen.work("the graph", (told, signal) => seen.chunk(chunk, undefined, told, signal));
    if (seen.loaded(chunk)) await this.seen.select({ graph: JSON.stringify({ chunk }) });
  }

  code() {
    this.seen.code("graph", "Graph", { position: this.name.split("/")[1], name: JSON.stringify(promptIn(this.name)) });
  }

  /** Where nodes and groups stand. @param {Node[]} nodes @param {Map<string, number>} grouped @returns {Place[]} */
  placesOf(nodes, grouped) {
    const { seen, picked } = this, { n_layers, n_heads } = seen.model;
    const width = (this.width = clamp((this.picture.clientWidth - SIDES[0] - SIDES[1] - 14) / (n_layers + 2), COLUMN[0], COLUMN[1]));
    const key = (/** @type {Node} */ { step, position, branch }) => [step, branch, position].join(" ");
    const sorted = nodes.toSorted((a, b) => a.step - b.step || a.branch - b.branch || a.position - b.position);
    /** @type {Map<string, {y: number, node: Node}>} */ this.rows = new Map();
    /** @type {Map<number, number>} */ this.tops = new Map();
    let y = 8;
    for (const node of sorted) {
      if (!this.tops.has(node.step)) this.tops.set(node.step, (y += STEP) - STEP / 2);
      if (!this.rows.has(key(node))) this.rows.set(key(node), { y: (y += ROW) - ROW / 2, node });
    }
    this.height = y + 8;
    const taken = new Set();
    const placed = (/** @type {Node} */ node) => {
      const lane = node.head < 0 ? n_heads : node.head, { kind } = node, { y: top } = this.rows.get(key(node));
      const column = { token: 0.5, embed: 0.5, error: node.layer < 0 ? 0.2 : undefined, decision: n_layers + 1.4, target: n_layers + 1.4 }[kind] ?? node.layer + 1 + (lane + 0.5) / (n_heads + 1);
      let x = Math.round(SIDES[0] + column * width);
      while (taken.has(`${x} ${top}`)) x += 7; // several nodes of one part
      taken.add(`${x} ${top}`);
      return { x, y: top };
    };
    const alone = nodes.filter(({ id }) => !grouped.has(id)).map((node) => ({ id: node.id, nodes: [node], text: nodeText(seen, node), name: null, ...placed(node) }));
    const groups = picked.supernodes.flatMap(([name], i) => {
      const members = nodes.filter(({ id }) => grouped.get(id) === i).sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
      return members.length ? [{ id: `supernode-${i}`, nodes: members, text: `${quoted(name)}, ${members.length} nodes, the largest ${nodeText(seen, members[0])}`, name, ...placed(members[0]) }] : [];
    });
    return [...alone, ...groups];
  }

  /** Draw all; returns the number of edges in the picture. @param {number} whole */
  drawPicture(whole) {
    const { seen, places, picked, width } = this, { run, model, dark, step, position } = seen, inks = dark ? INKS.dark : INKS.light;
    const colour = (/** @type {number} */ share) => paint(ramp("change", dark), 0.5 + share / 2).background;
    const isOf = (/** @type {Edge} */ { from, to }) => places[from].id === picked.clickedId || places[to].id === picked.clickedId;
    const isPicked = places.some(({ id }) => id === picked.clickedId);
    const chosen = this.flows.filter((flow, i) => i < MOST_EDGES || flow.decision || isOf(flow));
    const heaviest = Math.max(...chosen.filter(({ decision }) => !decision).map(({ weight }) => Math.abs(weight)), 1e-9);
    this.lit = null;
    this.lines = chosen.map((flow) => {
      const from = places[flow.from], to = places[flow.to], strength = Math.min(1, Math.abs(flow.weight) / heaviest);
      const top = this.tops.get(to.nodes[0].step), isBack = flow.decision && to.x < from.x;
      const line = drawn("path", { d: isBack ? broken(from, to, top - 12) : curve(from, to), class: "dl-flow", fill: "none",
        stroke: flow.decision ? inks.soft : colour(Math.sign(flow.weight)), "stroke-width": flow.decision ? 4 : 0.5 + 3.5 * strength,
        opacity: isPicked ? (isOf(flow) ? 0.9 : flow.decision ? 0.3 : 0.07) : flow.decision ? 0.8 : (0.15 + 0.65 * strength).toFixed(2), ...(flow.weight < 0 ? { "stroke-dasharray": "4 3" } : {}) });
      return { ...flow, line };
    });
    const parts = places.filter(({ name, nodes: [{ layer }] }) => name === null && layer >= 0).sort((a, b) => Math.abs(b.nodes[0].effect) - Math.abs(a.nodes[0].effect));
    const halo = { stroke: inks.paper, "stroke-width": 3, "paint-order": "stroke" };
    /** @type {Place[]} */ const named = [];
    for (const part of parts.slice(0, NAMED)) if (named.every(({ x, y }) => y !== part.y || Math.abs(x - part.x) > 36)) named.push(part);
    const marks = places.map((place, i) => {
      const [{ kind, word }] = place.nodes, effect = place.nodes[0].effect / whole, isNow = place.id === picked.clickedId;
      const mark = drawn("g", { transform: `translate(${place.x} ${place.y})`, "data-place": i, class: "dl-mark-node" });
      const outline = { stroke: isNow ? inks.ink : inks.soft, "stroke-width": isNow ? 3 : picked.pinnedIds.includes(place.id) ? 2.5 : 0.8, fill: kind === "error" ? "none" : colour(clamp(effect, -1, 1)) };
      if (place.name !== null) {
        const text = shorten(readable(place.name), 24), half = 3.4 * text.length + 8;
        mark.append(drawn("rect", { x: -half, y: -9, width: 2 * half, height: 18, rx: 9, ...outline, fill: inks.paper }), drawn("text", { y: 4, "text-anchor": "middle", fill: inks.ink }, text));
      } else mark.append(drawn("path", { d: outlineOf(kind, Math.round(3 + 6 * Math.sqrt(Math.min(1, Math.abs(effect))))), ...outline }));
      if (named.includes(place)) mark.append(drawn("text", { y: -10, "font-size": 9, "text-anchor": "middle", fill: inks.soft, ...halo }, place.nodes[0].name));
      if (place.name === null && (kind === "decision" || kind === "target")) mark.append(drawn("text", { x: 13, y: -5, fill: inks.ink, "font-weight": 600, ...halo }, shorten(readable(word ?? "·"), 12)));
      return mark;
    });
    const label = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ text, /** @type {Record<string, any>} */ more) => drawn("text", { x, y, fill: inks.soft, ...more }, text);
    const heads = ["given", ...Array.from({ length: model.n_layers }, (_, layer) => `${width < 52 ? "" : "block "}${layer}`), "writes"];
    const names = heads.map((text, i) => label(SIDES[0] + (i + 0.5 + (i > model.n_layers ? 0.4 : 0)) * width, 16, text, { "text-anchor": "middle" }));
    const steps = [...this.tops].map(([one, y]) => label(8, y + 12, `step ${one}`, { "font-weight": 600, fill: inks.ink }));
    const rows = [...this.rows.values()].map(({ y, node }) => {
      const at = run.words[run.canvases[run.steps.indexOf(node.step)]?.[node.position]], isNow = node.step === step && node.position === position;
      return label(SIDES[0] - 8, y + 4, `${shorten(at === undefined ? "·" : readable(at), 12)} ${node.position}${node.branch ? "*" : ""}`, { "text-anchor": "end", ...(isNow ? { fill: inks.ink, "font-weight": 600 } : {}) });
    });
    const size = { width: SIDES[0] + (model.n_layers + 2) * width + SIDES[1], height: this.height };
    this.svg = drawn("svg", { ...SVG_ROOT, ...size, viewBox: `0 0 ${Math.ceil(size.width)} ${Math.ceil(size.height)}`, "font-size": 11, role: "img",
      "aria-label": `Graph with ${places.length} nodes and ${chosen.length} edges; the list beside it has those of the selected node` },
    drawn("rect", { ...size, fill: inks.paper }), ...names, ...steps, ...rows, ...this.lines.map(({ line }) => line).reverse(), ...marks);
    this.picture.replaceChildren(this.svg);
    return chosen.length;
  }

  /** Light the edges of a place, and say what it is; null for none. */
  light(/** @type {Place|null} */ place) {
    if (place === this.lit) return;
    this.lit = place;
    this.svg?.classList.toggle("dl-faded", place !== null);
    if (!place) return;
    for (const { from, to, line } of this.lines) line.classList.toggle("dl-lit", this.places[from] === place || this.places[to] === place);
    this.seen.say(this.sentence(place));
  }

  /** A place in words, with its effect. */
  sentence(/** @type {Place} */ { text, nodes: [{ effect }] }) {
    const { clean, corrupted } = this.chunk.header.about;
    return `${text}: ${amount(effect)} of ${amount(clean - corrupted)}`;
  }

  /** Go to the nearest place in the direction of an arrow key. */
  go(/** @type {KeyboardEvent} */ event) {
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if ((!dx && !dy) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const now = this.places.find(({ id }) => id === this.picked.clickedId) ?? { x: 0, y: 0 };
    const far = (/** @type {Place} */ { x, y }) => { // Sideways counts more than ahead.
      const along = (x - now.x) * dx + (y - now.y) * dy;
      return along > 0 ? along + 3 * Math.abs((x - now.x) * dy + (y - now.y) * dx) : Infinity;
    };
    const next = this.places.reduce((best, one) => (far(one) < far(best) ? one : best), this.places[0]);
    if (next && far(next) < Infinity) this.choose(next.id, next.nodes[0]);
  }

  /** Select a place, and in the explorer token, step, block and head of its node. */
  async choose(/** @type {string} */ id, /** @type {Node} */ { kind, step, position, layer, head }) {
    await this.pick({ clickedId: id }, { step, written: false, position: layer < 0 ? position : predictedAt(this.seen, position),
      ...(layer < 0 ? {} : { layer }), ...(kind === "head" ? { head } : {}) });
    this.picture.querySelector(`[data-place="${this.places.findIndex((place) => place.id === this.picked.clickedId)}"]`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Change what is pinned, grouped or selected, and say what is selected. */
  async pick(/** @type {Partial<Picked>} */ change, /** @type {Partial<import("../types.js").State>} */ more = {}) {
    await this.seen.select({ graph: JSON.stringify({ ...this.picked, ...change }), ...more });
    if (this.said.textContent) this.seen.say(this.said.textContent);
  }

  togglePin() {
    const { clickedId, pinnedIds } = this.picked;
    return this.pick({ pinnedIds: pinnedIds.includes(clickedId) ? pinnedIds.filter((id) => id !== clickedId) : [...pinnedIds, clickedId] });
  }

  /** What flows into the selected place and out of it; the nodes with the largest influence where none is selected.
   * @param {Edge[]} edges @param {Node[]} nodes */
  drawSelected(edges, nodes) {
    const { clickedId, pinnedIds, supernodes } = this.picked, at = this.places.find(({ id }) => id === clickedId), isGroup = clickedId.startsWith("supernode-");
    setText(this.said, at ? this.sentence(at) : "Select a node to see what flows into it and out of it.");
    this.leave.hidden = !at;
    this.pin.hidden = !at || isGroup;
    setText(this.pin, pinnedIds.includes(clickedId) ? "Unpin" : "Pin");
    const own = new Set(!at ? [] : isGroup ? supernodes[Number(clickedId.split("-")[1])].slice(1) : [clickedId]);
    const idOf = (/** @type {number} */ node) => nodes[node].id;
    const list = (/** @type {string} */ title, /** @type {[Node, number][]} */ entries) => {
      /** @type {Map<Node, number>} */ const sums = new Map();
      for (const [node, x] of entries) sums.set(node, (sums.get(node) ?? 0) + x);
      const sorted = [...sums].sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)), more = sorted.length - MOST_LISTED;
      return [h("h4", {}, more > 0 ? `${title}: ${MOST_LISTED} of ${sorted.length}` : title), h("ol", { class: "dl-circuit-edges" }, ...sorted.slice(0, MOST_LISTED).map(([node, x]) => {
        const onclick = () => this.choose(node.id, node);
        return h("li", {}, h("button", { type: "button", onclick }, h("span", {}, nodeText(this.seen, node)), " ", h("b", {}, amount(x))));
      }))];
    };
    this.lists.replaceChildren(...(at ? [
      ...list("Flows into it", edges.filter(({ from, to }) => own.has(idOf(to)) && !own.has(idOf(from))).map(({ from, weight }) => [nodes[from], weight])),
      ...list("Flows out of it", edges.filter(({ from, to }) => own.has(idOf(from)) && !own.has(idOf(to))).map(({ to, weight }) => [nodes[to], weight])),
    ] : list("Largest effects", nodes.map((node) => [node, node.effect]))));
  }

  /** The pinned nodes and the groups, to be selected, released, grouped, renamed and ungrouped. @param {Node[]} nodes */
  drawPins(nodes) {
    const { pinnedIds, supernodes } = this.picked, byId = new Map(nodes.map((node) => [node.id, node])), members = new Set(supernodes.flatMap(([, ...ids]) => ids));
    const free = pinnedIds.filter((id) => byId.has(id) && !members.has(id)), name = h("input", { type: "text", placeholder: "name" });
    const group = () => this.pick({ supernodes: [...supernodes, [name.value.trim() || `group ${supernodes.length + 1}`, ...free]], clickedId: `supernode-${supernodes.length}` });
    const rename = (/** @type {number} */ i, /** @type {string} */ to) => this.pick({ supernodes: supernodes.map((one, k) => (k === i ? [to.trim() || one[0], ...one.slice(1)] : one)) });
    const chip = (/** @type {string} */ id) => button(nodeText(this.seen, byId.get(id)), () => this.choose(id, byId.get(id)), { class: "dl-chip" });
    this.pins.replaceChildren(
      ...(free.length ? [h("h4", {}, "Pinned"), h("div", { class: "dl-suggestions" }, ...free.map(chip)), h("div", { class: "dl-group" }, field("Group them as", name), button("Group", group))] : []),
      ...(supernodes.length ? [h("h4", {}, "Groups")] : []),
      ...supernodes.map(([text, ...ids], i) => h("div", { class: "dl-group" },
        h("input", { type: "text", value: text, "aria-label": `Name of group ${i + 1}`, onchange: (/** @type {any} */ { target }) => rename(i, target.value) }),
        h("span", {}, `${ids.length} nodes`), button("Ungroup", () => this.pick({ supernodes: supernodes.filter((_, k) => k !== i), clickedId: "" })))));
  }

  /** Take pins and groups from a file of the JSON of circuit-tracer. */
  async load() {
    const { seen } = this, [file] = this.file.files, given = parsed(await file.text());
    this.file.value = "";
    if (!given?.qParams) return seen.say(`${file.name} is no graph in the JSON of circuit-tracer.`);
    const { nodes } = graphOf(seen.run, this.chunk), picked = pickedIn(given.qParams, nodes), { pinnedIds, supernodes } = picked;
    const ids = new Set([...pinnedIds, ...supernodes.flatMap(([, ...members]) => members)]);
    for (const { id } of nodes) ids.delete(id);
    await this.pick({ ...picked, chunk: this.picked.chunk });
    seen.say(`Pins: ${pinnedIds.length}, groups: ${supernodes.length}${ids.size ? `; ${ids.size} of their nodes are not in this graph` : ""}.`);
  }

  /** What the menu "Share" saves of this view. @returns {import("../types.js").Saved[]} */
  files() {
    if (!this.svg || this.body.hidden) return [];
    const { document } = this.chunk.header, { pinnedIds, supernodes, clickedId, pruningThreshold } = this.picked;
    const chosen = { pinnedIds, supernodes, clickedId: clickedId.startsWith("supernode-") ? "" : clickedId, pruningThreshold };
    const whole = { ...document, qParams: { ...document.qParams, ...chosen } };
    return [
      { name: "Graph (.json)", help: "for the viewers of circuit-tracer and Neuronpedia, with pins and groups", ending: "json", type: "application/json", make: async () => JSON.stringify(whole) },
      { name: "Graph (.svg)", help: "the picture of the graph, for a paper", ending: "svg", type: "image/svg+xml", make: async () => svgText(this.svg) },
      { name: "Graph (.png)", help: "the picture of the graph, for a slide", ending: "png", type: "image/png", make: () => pngOf(this.svg) },
    ];
  }
}

/** The edges between places, those of equal ends summed, the heaviest first.
 * @param {Edge[]} edges @param {(node: number) => number} placeOf  -1 for none @returns {Edge[]} */
function flowsBetween(edges, placeOf) {
  /** @type {Map<string, Edge>} */ const flows = new Map();
  for (const edge of edges) {
    const from = placeOf(edge.from), to = placeOf(edge.to), key = `${from} ${to}`, flow = flows.get(key);
    if (from < 0 || to < 0 || from === to) continue;
    if (flow) Object.assign(flow, { weight: flow.weight + edge.weight, decision: flow.decision || edge.decision });
    else flows.set(key, { ...edge, from, to });
  }
  return [...flows.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
}

/** @param {Place} from @param {Place} to */
const curve = ({ x, y }, to) => `M${x} ${y}C${(x + to.x) / 2} ${y} ${(x + to.x) / 2} ${to.y} ${to.x} ${to.y}`;
/** A line that goes back to the first column of a later step, like a text at the end of its line.
 * @param {Place} from @param {Place} to @param {number} between */
const broken = ({ x, y }, to, between) => `M${x} ${y}C${x + 50} ${y} ${x + 50} ${between} ${x} ${between}H${to.x}C${to.x - 30} ${between} ${to.x - 30} ${to.y} ${to.x} ${to.y}`;
