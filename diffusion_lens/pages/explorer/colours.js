/** Colours: scales whose lightness is linear in the value, and the ink that is readable on them. */

/** @typedef {import("./types.js").Paint} Paint */

/** sRGB, 0 to 255, of a colour in OKLCH (Ottosson 2020, "A perceptual color space for image processing").
 * @param {number} L @param {number} C @param {number} hue */
function oklch(L, C, hue) {
  const a = C * Math.cos((hue * Math.PI) / 180), b = C * Math.sin((hue * Math.PI) / 180);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const y = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, y)));
  });
}

/** Black or white, whichever contrasts more; the ratio is at least 4.5 on every colour.
 * @param {number[]} rgb */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// One hue for each view; lightness is linear in the value, so equal differences look equal.
const HUES = { canvas: 235, lens: 295, attention: 160, trace: 45, experts: 85 };
/** @type {Map<string, Paint[]>} */ const RAMPS = new Map();

/** 256 colours of a view, from the background to saturated; "change" goes from blue over the background to red.
 * @param {string} view @param {boolean} dark @returns {Paint[]} */
export function ramp(view, dark) {
  const key = `${view} ${dark}`;
  if (!RAMPS.has(key)) {
    RAMPS.set(key, Array.from({ length: 256 }, (_, i) => {
      const x = view === "change" ? Math.abs(i - 127.5) / 127.5 : i / 255;
      const hue = view === "change" ? (i < 127.5 ? 250 : 30) : HUES[view];
      const rgb = dark ? oklch(0.25 + 0.58 * x, 0.015 + 0.095 * x, hue) : oklch(0.975 - 0.5 * x, 0.006 + 0.14 * x, hue);
      return { background: `rgb(${rgb.join(" ")})`, ink: inkOn(rgb), rgb };
    }));
  }
  return RAMPS.get(key);
}

/** The colour of a value from 0 to 1.
 * @param {Paint[]} colours @param {number} value */
export const paint = (colours, value) => colours[Math.min(255, Math.max(0, Math.round(value * 255)))];
