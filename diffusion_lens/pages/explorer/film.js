/** Pictures as pixels: a PNG, and a film of the steps. */

/** @typedef {import("./types.js").Told} Told */

const SCALE = 2; // pixels per px of a picture
const SHOWN = 700, SHOWN_LAST = 1500; // milliseconds of a frame, and of the last one
const DRAWN = 50; // milliseconds after which the recorder gets a frame again
const BITS = 8e6; // per second, so that small text stays sharp
const FILMS = ["video/webm;codecs=vp9", "video/webm;codecs=vp8", "video/webm"];

/** A picture as the text of an SVG file.
 * @param {SVGSVGElement} picture */
export const svgText = (picture) => new XMLSerializer().serializeToString(picture);

/** @param {SVGSVGElement} picture @returns {{width: number, height: number}} */
const pixelsOf = (picture) => ({ width: SCALE * Number(picture.getAttribute("width")), height: SCALE * Number(picture.getAttribute("height")) });

/** @param {SVGSVGElement} picture @returns {Promise<HTMLImageElement>} */
async function imageOf(picture) {
  const { width, height } = pixelsOf(picture), large = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
  large.setAttribute("width", String(width));
  large.setAttribute("height", String(height));
  const image = new Image(width, height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(large))}`;
  await image.decode();
  return image;
}

/** A picture as PNG, with two pixels for each px.
 * @param {SVGSVGElement} picture @returns {Promise<Blob>} */
export async function pngOf(picture) {
  const canvas = Object.assign(document.createElement("canvas"), pixelsOf(picture));
  canvas.getContext("2d").drawImage(await imageOf(picture), 0, 0);
  const png = await new Promise((/** @type {BlobCallback} */ done) => canvas.toBlob(done, "image/png"));
  if (!png) throw new Error(`This browser cannot draw a PNG of ${canvas.width} × ${canvas.height} pixels.`);
  return png;
}

/** The type of the films that this browser can record; undefined for none. */
export const filmType = () =>
  "MediaRecorder" in globalThis && "captureStream" in HTMLCanvasElement.prototype ? FILMS.find((type) => MediaRecorder.isTypeSupported(type)) : undefined;

/** A film of some pictures. A recorder works in real time: the film takes as long as it lasts.
 * @param {SVGSVGElement[]} pictures @param {Told} told @param {AbortSignal} signal @returns {Promise<Blob[]>} */
export async function filmOf(pictures, told, signal) {
  const sizes = pictures.map(pixelsOf), type = filmType();
  const size = { width: Math.max(...sizes.map(({ width }) => width)), height: Math.max(...sizes.map(({ height }) => height)) };
  const canvas = Object.assign(document.createElement("canvas"), size), context = canvas.getContext("2d");
  const stream = canvas.captureStream(1000 / DRAWN), recorder = new MediaRecorder(stream, { mimeType: type, videoBitsPerSecond: BITS });
  /** @type {Blob[]} */ const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const ended = new Promise((done, fail) => {
    recorder.addEventListener("stop", done);
    recorder.addEventListener("error", () => fail(new Error("This browser could not go on recording the film.")));
  });
  try {
    for (const [i, picture] of pictures.entries()) {
      told({ what: "Recording the film", done: i, of: pictures.length });
      const image = await imageOf(picture), start = performance.now();
      while (performance.now() - start < (i < pictures.length - 1 ? SHOWN : SHOWN_LAST)) {
        signal.throwIfAborted();
        context.drawImage(image, 0, 0);
        if (recorder.state === "inactive") recorder.start();
        await new Promise((done) => setTimeout(done, DRAWN));
      }
    }
  } finally {
    if (recorder.state !== "inactive") recorder.stop();
    for (const track of stream.getTracks()) track.stop();
  }
  await ended;
  return parts;
}
