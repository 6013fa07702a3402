// @ts-check
// Colour tables: Cividis for quantities from zero, RdBu around zero, Okabe-Ito for span states. Entry 255 means 'not recorded'.

/** @import { Color, ColorTable, Context, Surface, Theme } from "./types.js" */

const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const RDBU = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247], [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];
// In the order of the codes; the words of kvlens/text/words.py, tests hold the two together.
export const STATE_WORDS = ["resident", "summary only", "rebuilt", "in host memory", "evicted", "partly evicted", "quantised", "partly recalled", "rewritten"];
const STATE_COLORS = [[0, 80, 150], [230, 159, 0], [0, 158, 115], [130, 205, 245], [204, 121, 167], [240, 228, 66], [140, 81, 10], [123, 127, 212], [196, 71, 107]];
export const GREY = [160, 160, 160];
export const VERMILION = "#D55E00";
export const HOLE = [178, 0, 24];

/** @param {Color[]} stops @returns {ColorTable} */
function interpolate(stops) {
  const table = new Uint8ClampedArray(768);
  for (let i = 0; i < 255; i++) {
    const t = (i / 254) * (stops.length - 1);
    const k = Math.min(stops.length - 2, Math.floor(t));
    for (let c = 0; c < 3; c++) table[i * 3 + c] = stops[k][c] + (stops[k + 1][c] - stops[k][c]) * (t - k);
  }
  table.set(GREY, 765);
  return table;
}

export const SEQUENTIAL = interpolate(CIVIDIS);
export const DIVERGING = interpolate(RDBU);
export const STATES = (() => {
  const table = new Uint8ClampedArray(768).fill(160);
  STATE_COLORS.forEach((color, i) => table.set(color, i * 3));
  return table;
})();

/** @param {ColorTable} table @param {number} index */
export function css(table, index) {
  return `rgb(${table[index * 3]},${table[index * 3 + 1]},${table[index * 3 + 2]})`;
}

export const PALE = 0.85; // of a state's colour; the rest is the page's ground, so that holes stand out

// A state's colour as tokens and maps have it, in red, green and blue; ground: the page's.
/** @param {number} code @param {Color} ground @returns {Color} */
export function pale(code, ground) {
  return code === 255 ? GREY : STATE_COLORS[code].map((value, c) => Math.round(PALE * value + (1 - PALE) * ground[c]));
}

/** @type {Map<string, Color>} */
const GROUNDS = new Map();

/** What a colour of the page is in red, green and blue. @param {string} color @returns {Color} */
export function rgb(color) {
  const known = GROUNDS.get(color);
  if (known) return known;
  const pixel = new OffscreenCanvas(1, 1).getContext("2d");
  pixel.fillStyle = color;
  pixel.fillRect(0, 0, 1, 1);
  const numbers = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
  GROUNDS.set(color, numbers);
  return numbers;
}

/** Black or white, whichever is read more easily on red, green and blue. @param {ArrayLike<number> & Iterable<number>} color */
export function ink([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 135 ? "#000" : "#fff";
}

/** Black or white, whichever is read more easily on the colour. @param {ColorTable} table @param {number} index */
export function inkOn(table, index) {
  return ink(table.subarray(index * 3, index * 3 + 3));
}

/** @param {ColorTable} table */
export function gradient(table) {
  const stops = Array.from({ length: 11 }, (_, i) => css(table, Math.round(i * 25.4)));
  return `linear-gradient(to right, ${stops.join(",")})`;
}

/** The page's own colours, so that canvases follow light and dark. @param {Element} element @returns {Theme} */
export function readTheme(element) {
  const style = getComputedStyle(element);
  const get = (/** @type {string} */ name, /** @type {string} */ fallback) => style.getPropertyValue(name).trim() || fallback;
  return {
    text: get("--st-text-color", "#222"),
    background: get("--st-background-color", "#fff"),
    panel: get("--st-secondary-background-color", "#f2f2f2"),
    border: get("--st-border-color", "#ccc"),
    accent: get("--st-primary-color", "#0072B2"),
    font: get("--st-font", "sans-serif"),
    code: get("--st-code-font", "monospace"),
  };
}

// A canvas sized in CSS pixels, drawn at the screen's resolution; or what takes its drawing as vectors, for that moment.
/** @param {Surface} canvas @param {number} width CSS pixels @param {number} height @returns {Context} */
export function context2d(canvas, width, height) {
  if (canvas.vector) return canvas.vector;
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    if (canvas.style) Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}
