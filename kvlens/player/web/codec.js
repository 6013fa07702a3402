// @ts-check
// Payloads: 4-byte little-endian header length | JSON header | typed arrays in the order of header.arrays.
// Large per-run payloads live in window.__kvlens.runs so that several views can share one copy.

export const NOT_RECORDED = 65535; // code of a value that was not recorded; the largest recorded code is 65534
/** @import { Arrays, Message, Run } from "./types.js" */

/** @type {Record<string, any>} */
const ARRAY_TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

/** @param {ArrayBuffer | Uint8Array} data @returns {Message<any>} */
export function unpack(data) {
  const bytes = data instanceof Uint8Array ? data : new Uint8Array(data);
  const length = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  /** @type {Arrays} */
  const arrays = {};
  let offset = 4 + length;
  for (const [name, type, count] of header.arrays) {
    const size = count * ARRAY_TYPES[type].BYTES_PER_ELEMENT;
    arrays[name] = new ARRAY_TYPES[type](bytes.slice(offset, offset + size).buffer);
    offset += size;
  }
  return { header, arrays };
}

/** @returns {Map<string, Run>} */
export function sharedRuns() {
  const page = /** @type {{ __kvlens?: { runs: Map<string, Run> } }} */ (/** @type {unknown} */ (window));
  page.__kvlens = page.__kvlens || { runs: new Map() };
  return page.__kvlens.runs;
}

/** code 0..65534 -> lo..hi @param {number} code @param {number} lo @param {number} hi */
export function decode(code, lo, hi) {
  return code === NOT_RECORDED ? NaN : lo + (code / 65534) * (hi - lo);
}

const BYTE_UNITS = /** @type {[string, number][]} */ ([["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]);

/** @param {number} value */
export function formatBytes(value) {
  for (const [unit, size] of BYTE_UNITS) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

// One way to print a value everywhere in the player; NaN is 'not recorded', never 0.
/** @param {number | null | undefined} value @param {string} unit */
export function formatValue(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not recorded";
  if (unit === "bytes") return formatBytes(value);
  if (unit === "share" || unit === "cosine") return value.toFixed(4);
  if (unit === "nats") return `${value.toFixed(3).replace(/^-0\.0+$/, "0.000")} nats`;
  if (unit === "0 or 1") return value >= 0.5 ? "yes" : "no";
  const rounded = Math.abs(value - Math.round(value)) < 5e-3 ? String(Math.round(value)) : String(Number(value.toPrecision(4)));
  return unit ? `${rounded} ${unit}` : rounded;
}

/** White space and control characters made visible; everything else is shown as it is, through textContent only. @param {string} text */
export function visibleText(text) {
  const shown = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) =>
    c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)));
  if (shown === "") return "\u2205";
  return shown.replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u21e5").replace(/^ +$/, (s) => "\u00b7".repeat(s.length));
}
