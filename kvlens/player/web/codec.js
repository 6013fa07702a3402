// Payloads: 4-byte little-endian header length | JSON header | typed arrays in the order of header.arrays.
// Large per-run payloads live in window.__kvlens.runs so that several views can share one copy.

export const NOT_RECORDED = 65535; // code of a value that was not recorded; the largest recorded code is 65534
const ARRAY_TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

export function unpack(data) {
  const bytes = data instanceof Uint8Array ? data : new Uint8Array(data);
  const length = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const arrays = {};
  let offset = 4 + length;
  for (const [name, type, count] of header.arrays) {
    const size = count * ARRAY_TYPES[type].BYTES_PER_ELEMENT;
    arrays[name] = new ARRAY_TYPES[type](bytes.slice(offset, offset + size).buffer);
    offset += size;
  }
  return { header, arrays };
}

export function sharedRuns() {
  window.__kvlens = window.__kvlens || { runs: new Map() };
  return window.__kvlens.runs;
}

// code 0..65534 -> lo..hi
export function decode(code, lo, hi) {
  return code === NOT_RECORDED ? NaN : lo + (code / 65534) * (hi - lo);
}

export function formatBytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

// One way to print a value everywhere in the player; NaN is 'not recorded', never 0.
export function formatValue(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not recorded";
  if (unit === "bytes") return formatBytes(value);
  if (unit === "share" || unit === "cosine") return value.toFixed(4);
  if (unit === "nats") return `${value.toFixed(3).replace(/^-0\.0+$/, "0.000")} nats`;
  if (unit === "0 or 1") return value >= 0.5 ? "yes" : "no";
  const rounded = Math.abs(value - Math.round(value)) < 5e-3 ? String(Math.round(value)) : String(Number(value.toPrecision(4)));
  return unit ? `${rounded} ${unit}` : rounded;
}

// White space and control characters made visible; everything else is shown as it is, through textContent only.
export function visibleText(text) {
  const shown = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) =>
    c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0)));
  if (shown === "") return "\u2205";
  return shown.replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u21e5").replace(/^ +$/, (s) => "\u00b7".repeat(s.length));
}
