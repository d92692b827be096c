/** Where manifest, chunks and new runs come from: the page itself, its server, or the kernel of a notebook. */

import { inflate } from "./numbers.js";

/** @typedef {import("./types.js").Source} Source @typedef {import("./types.js").Told} Told */

const POLLED = 400; // milliseconds between two questions for the progress of a chunk
const SILENT = 20_000; // milliseconds after which a kernel that says nothing is given up

/** An error of the library; `unknown` says that a run or chunk was dropped, or never computed.
 * @param {string} text @param {boolean} unknown */
const failed = (text, unknown = false) => Object.assign(new Error(text), { unknown });

/** An error after which no other question is answered. @param {string} text */
const gone = (text) => Object.assign(failed(text), { gone: true });

/** Data inside the page. @returns {Source} */
export function fileSource() {
  return {
    live: false,
    manifest: async () => JSON.parse(document.getElementById("manifest").textContent),
    async chunk(run, name) {
      const script = document.querySelector(`script[data-run="${CSS.escape(run)}"][data-chunk="${CSS.escape(name)}"]`);
      if (!script) throw new Error(`This page does not contain ${name} of the run ${run}.`);
      return inflate(script.textContent);
    },
  };
}

/** Data from the server of this page, which demands the token in the page's own address. @returns {Source} */
export function liveSource() {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  /** @param {string} path @param {RequestInit} options */
  const ask = async (path, options = {}) => {
    const headers = { "X-Token": token, "Content-Type": "application/json" };
    const answer = await fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : gone("The server does not answer. Is diffusion-lens explore still running?");
    });
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw failed(error ?? `The server said ${answer.status}.`, answer.status === 404);
  };
  const post = (path, asked, signal) => ask(path, { method: "POST", body: JSON.stringify(asked), signal });
  /** The last line of an answer in lines of JSON; those before tell the progress. @param {Told} [told] */
  const lastLine = async (/** @type {Response} */ answer, told) => {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "", last = null;
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (waiting + (value ?? "")).split("\n");
      waiting = done ? "" : lines.pop();
      for (const line of lines.filter((one) => one)) {
        last = JSON.parse(line);
        if (last.progress) told?.(last.progress);
      }
      if (done) break;
    }
    if (!last || last.progress) throw failed("The answer of the server was cut off.");
    if (last.error) throw failed(last.error, Boolean(last.unknown));
    return last;
  };
  return {
    live: true,
    manifest: async () => (await ask("api/manifest")).json(),
    async chunk(run, name, told, signal) {
      const polling = told && setInterval(async () => {
        const progress = await ask("api/progress").then((answer) => answer.json()).catch(() => ({}));
        if (progress.what) told(progress);
      }, POLLED);
      try {
        return await (await ask(`api/chunk?${new URLSearchParams({ run, name })}`, { signal })).arrayBuffer();
      } finally {
        clearInterval(polling);
      }
    },
    run: async (spec, told, signal) => (await lastLine(await post("api/run", spec, signal), told)).run,
    fact: async (asked, told, signal) => (await lastLine(await post("api/fact", asked, signal), told)).fact,
    suggest: async (prompt) => (await post("api/suggest", { prompt })).json(),
    page: async (asked) => (await post("api/page", asked)).arrayBuffer(),
  };
}

/** Data from the notebook's kernel, through a model of anywidget.
 * @param {any} model @returns {Source} */
export function widgetSource(model) {
  /** @type {Map<number, {resolve: (value: any) => void, reject: (error: Error) => void, told?: Told, silence: any}>} */ const waiting = new Map();
  /** No longer wait for the answer to a question; returns whether it was awaited. @param {number} id */
  const forget = (id) => {
    clearInterval(waiting.get(id)?.silence);
    return waiting.delete(id);
  };
  let last = 0, heard = 0;
  const listen = (message, buffers) => {
    heard = Date.now();
    const asked = waiting.get(message.id);
    if (!asked) return;
    if (message.alive) return; // A step takes long.
    if (message.progress) return asked.told?.(message.progress);
    forget(message.id);
    if (!message.ok) return asked.reject(failed(message.error, Boolean(message.unknown)));
    const bytes = buffers?.[0];
    asked.resolve(bytes ? bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) : message);
  };
  model.on("msg:custom", listen);
  /** @param {any} question @param {Told} [told] @param {AbortSignal} [signal] @returns {Promise<any>} */
  const ask = (question, told, signal) => new Promise((resolve, reject) => {
    const id = ++last;
    heard = Date.now();
    const silence = setInterval(() => {
      if (Date.now() - heard < SILENT || !forget(id)) return;
      model.send({ id: ++last, ask: "cancel", of: id }); // Nobody waits for it any more, should it come.
      reject(gone("The kernel does not answer: it runs another cell, or is gone. Wait for the cell, or run this one again."));
    }, SILENT / 4);
    waiting.set(id, { resolve, reject, told, silence });
    signal?.addEventListener("abort", () => {
      if (!forget(id)) return;
      model.send({ id: ++last, ask: "cancel", of: id });
      reject(new DOMException("cancelled", "AbortError"));
    });
    model.send({ id, ...question });
  });
  return {
    live: Boolean(model.get("live")),
    manifest: async () => model.get("manifest"),
    async chunk(run, name, told, signal) {
      const kept = model.get("kept")?.[`${run} ${name}`];
      return kept ? kept.buffer.slice(kept.byteOffset, kept.byteOffset + kept.byteLength) : ask({ ask: "chunk", run, name }, told, signal);
    },
    run: async (spec, told, signal) => (await ask({ ask: "run", spec }, told, signal)).run,
    fact: async (asked, told, signal) => (await ask({ ask: "fact", fact: asked.id, model: asked.model, effect: asked.effect }, told, signal)).fact,
    suggest: async (prompt) => (await ask({ ask: "suggest", prompt })).suggestions,
    page: (asked) => ask({ ask: "page", ...asked }),
    state: () => model.get("state"),
    keep(state) {
      model.set("state", state);
      model.save_changes();
    },
    close() {
      [...waiting.keys()].forEach(forget);
      model.off("msg:custom", listen);
    },
  };
}
