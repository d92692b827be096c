/** Pictures as pixels: a PNG, and films of the steps. */

import { gifOf } from "./gif.js";

/** @typedef {import("./types.js").Told} Told */

const SCALE = 2; // pixels per px of a picture
const SHOWN = 700, SHOWN_LAST = 2000; // milliseconds of a frame, and of the last one
const DRAWN = 50; // milliseconds after which the recorder gets a frame again
const BITS = 8e6; // per second, so that small text stays sharp
const FILMS = ["video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm"];

/** A picture as the text of an SVG file.
 * @param {SVGSVGElement} picture */
export const svgText = (picture) => new XMLSerializer().serializeToString(picture);

/** A canvas as large as the largest picture, and a function that draws one on it.
 * @param {SVGSVGElement[]} pictures */
function screenFor(pictures) {
  const largest = (/** @type {string} */ side) => SCALE * Math.max(...pictures.map((picture) => Number(picture.getAttribute(side))));
  const canvas = Object.assign(document.createElement("canvas"), { width: largest("width"), height: largest("height") });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const show = async (/** @type {SVGSVGElement} */ picture) => {
    const large = /** @type {SVGSVGElement} */ (picture.cloneNode(true)), image = new Image();
    for (const side of ["width", "height"]) large.setAttribute(side, String(SCALE * Number(picture.getAttribute(side))));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(large))}`;
    await image.decode();
    context.fillStyle = picture.querySelector("rect").getAttribute("fill"); // of the paper
    const draw = () => { context.fillRect(0, 0, canvas.width, canvas.height); context.drawImage(image, 0, 0); };
    draw();
    return draw;
  };
  return { canvas, context, show };
}

/** A picture as PNG, with two pixels for each px.
 * @param {SVGSVGElement} picture @returns {Promise<Blob>} */
export async function pngOf(picture) {
  const { canvas, show } = screenFor([picture]);
  await show(picture);
  const png = await new Promise((/** @type {BlobCallback} */ done) => canvas.toBlob(done, "image/png"));
  if (!png) throw new Error(`This browser cannot draw a PNG of ${canvas.width} × ${canvas.height} pixels.`);
  return png;
}

/** Pictures as an animated GIF.
 * @param {SVGSVGElement[]} pictures @param {Told} told @param {AbortSignal} signal */
export function gifFilm(pictures, told, signal) {
  const { canvas, context, show } = screenFor(pictures), last = pictures.length - 1;
  const frame = async (/** @type {number} */ i) => {
    signal.throwIfAborted();
    await show(pictures[i]);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  };
  return gifOf(pictures.map((_, i) => (i < last ? SHOWN : SHOWN_LAST)), frame, (i) => told({ what: "Writing the film", done: i, of: pictures.length }));
}

/** The type of the WebM films that this browser can record; undefined for none. */
export const filmType = () =>
  "MediaRecorder" in globalThis && "captureStream" in HTMLCanvasElement.prototype ? FILMS.find((type) => MediaRecorder.isTypeSupported(type)) : undefined;

/** Pictures as WebM. A recorder works in real time: this takes as long as the film lasts.
 * @param {SVGSVGElement[]} pictures @param {Told} told @param {AbortSignal} signal @returns {Promise<Blob[]>} */
export async function webmFilm(pictures, told, signal) {
  const { canvas, show } = screenFor(pictures), stream = canvas.captureStream(1000 / DRAWN);
  const recorder = new MediaRecorder(stream, { mimeType: filmType(), videoBitsPerSecond: BITS });
  /** @type {Blob[]} */ const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const ended = new Promise((done, fail) => {
    recorder.addEventListener("stop", done);
    recorder.addEventListener("error", () => fail(new Error("This browser could not go on recording the film.")));
  });
  try {
    for (const [i, picture] of pictures.entries()) {
      told({ what: "Recording the film", done: i, of: pictures.length });
      const draw = await show(picture), start = performance.now();
      if (recorder.state === "inactive") recorder.start();
      while (performance.now() - start < (i < pictures.length - 1 ? SHOWN : SHOWN_LAST)) {
        signal.throwIfAborted();
        await new Promise((done) => setTimeout(done, DRAWN));
        draw();
      }
    }
  } finally {
    if (recorder.state !== "inactive") recorder.stop();
    for (const track of stream.getTracks()) track.stop();
  }
  await ended;
  return parts;
}
