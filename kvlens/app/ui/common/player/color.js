// Colour tables: Cividis for quantities from zero, RdBu around zero, Okabe-Ito for span states. Entry 255 means 'not recorded'.

const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const RDBU = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247], [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];
// In the order of the codes; the words of kvlens/app/figures/words.py, tests hold the two together.
const STATE_WORDS = ["resident", "summary only", "rebuilt", "in host memory", "evicted", "partly evicted", "quantised"];
const STATE_COLORS = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [86, 180, 233], [204, 121, 167], [240, 228, 66], [140, 81, 10]];
const GREY = [160, 160, 160];
const VERMILION = "#D55E00";

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

const SEQUENTIAL = interpolate(CIVIDIS);
const DIVERGING = interpolate(RDBU);
const STATES = (() => {
  const table = new Uint8ClampedArray(768).fill(160);
  STATE_COLORS.forEach((color, i) => table.set(color, i * 3));
  return table;
})();

function css(table, index) {
  return `rgb(${table[index * 3]},${table[index * 3 + 1]},${table[index * 3 + 2]})`;
}

const PALE = 0.62; // of a state's colour; the rest is the page's ground, so that holes stand out

// A state's colour as tokens and maps have it, in red, green and blue; ground: the page's.
function pale(code, ground) {
  return code === 255 ? GREY : STATE_COLORS[code].map((value, c) => Math.round(PALE * value + (1 - PALE) * ground[c]));
}

const GROUNDS = new Map();

// What a colour of the page is in red, green and blue.
function rgb(color) {
  if (GROUNDS.has(color)) return GROUNDS.get(color);
  const one = new OffscreenCanvas(1, 1).getContext("2d");
  one.fillStyle = color;
  one.fillRect(0, 0, 1, 1);
  const found = [...one.getImageData(0, 0, 1, 1).data].slice(0, 3);
  GROUNDS.set(color, found);
  return found;
}

// Black or white, whichever is read more easily on red, green and blue.
function ink([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 135 ? "#000" : "#fff";
}

// Black or white, whichever is read more easily on the colour.
function inkOn(table, index) {
  return ink(table.subarray(index * 3, index * 3 + 3));
}

function gradient(table) {
  const stops = [];
  for (let i = 0; i <= 254; i += 25.4) stops.push(css(table, Math.round(i)));
  return `linear-gradient(to right, ${stops.join(",")})`;
}

// The page's own colours, so that canvases follow light and dark.
function readTheme(element) {
  const style = getComputedStyle(element);
  const get = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
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
function context2d(canvas, width, height) {
  if (canvas.vector) return canvas.vector;
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}
