// @ts-check
// Draws into SVG what is drawn on a canvas: as much of a canvas's context as the player and its parts use. A component draws here when
// its canvas carries one as `vector` and it is told to redraw (context2d in player/color.js).

/** @type {Record<string, string>} */
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
export const HATCH = '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#aaa"/>'
  + '<path d="M0 6L6 0" stroke="#828282"/></pattern>';
/** @type {Record<string, number>} */
const BASELINES = { middle: 0.35, top: 0.8 }; // of the font's size, below the place that is given

/** @typedef {{ x: number, y: number, width: number, height: number }} Box */

export class VectorContext {
  constructor() {
    this.vector = true;
    /** @type {string | CanvasPattern} */
    this.fillStyle = "#000";
    /** @type {string | CanvasPattern} */
    this.strokeStyle = "#000";
    this.lineWidth = 1;
    this.font = "10px sans-serif";
    this.textAlign = "left";
    this.textBaseline = "alphabetic";
    /** @type {string[]} */
    this.parts = [];
    /** @type {number[]} groups to be closed, per save() */
    this.open = [];
    /** @type {Box | null} the rectangle of the path */
    this.last = null;
    this.dash = "";
    this.path = "";
    this.clips = 0;
    this.measure = /** @type {OffscreenCanvasRenderingContext2D} */ (new OffscreenCanvas(1, 1).getContext("2d"));
  }

  /** @param {unknown} text */
  static safe(text) {
    return String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "\u2423").replace(/[&<>"]/g, (sign) => ESCAPES[sign]);
  }

  /** @param {number} value */
  static n(value) {
    return String(Math.round(value * 100) / 100);
  }

  // A colour of `what` (fill, stroke) as attributes; what is no text is the hatching of values that were not recorded.
  /** @param {"fill" | "stroke"} what @param {string | CanvasPattern} style */
  static paint(what, style) {
    if (typeof style !== "string") return `${what}="url(#hatch)"`;
    const [, rgb, alpha] = style.match(/^rgba\(([^)]*),\s*([\d.]+)\)$/) || [];
    return rgb ? `${what}="rgb(${rgb})" ${what}-opacity="${alpha}"` : `${what}="${VectorContext.safe(style)}"`;
  }

  /** @param {string} name @param {object} numbers @param {string} more */
  add(name, numbers, more) {
    const at = Object.entries(numbers).map(([key, value]) => `${key}="${VectorContext.n(value)}"`).join(" ");
    this.parts.push(`<${name} ${at} ${more}/>`);
  }

  stroking() {
    return `fill="none" ${VectorContext.paint("stroke", this.strokeStyle)} stroke-width="${this.lineWidth}"${this.dash}`;
  }

  // ---- as a canvas's context has it --------------------------------------------------------------------------------

  clearRect() { this.parts = []; }
  /** @param {number[]} dash */
  setLineDash(dash) { this.dash = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : ""; }
  /** @param {string} text */
  measureText(text) { this.measure.font = this.font; return this.measure.measureText(text); }
  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  fillRect(x, y, width, height) { this.add("rect", VectorContext.box(x, y, width, height), VectorContext.paint("fill", this.fillStyle)); }
  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  strokeRect(x, y, width, height) { this.add("rect", VectorContext.box(x, y, width, height), this.stroking()); }
  beginPath() { this.path = ""; this.last = null; }
  /** @param {number} x @param {number} y */
  moveTo(x, y) { this.path += `M${VectorContext.n(x)} ${VectorContext.n(y)}`; }
  /** @param {number} x @param {number} y */
  lineTo(x, y) { this.path += `L${VectorContext.n(x)} ${VectorContext.n(y)}`; }
  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  rect(x, y, width, height) { this.last = VectorContext.box(x, y, width, height); }
  stroke() { this.parts.push(`<path d="${this.path}" ${this.stroking()}/>`); }
  fill() { this.parts.push(`<path d="${this.path}Z" ${VectorContext.paint("fill", this.fillStyle)}/>`); }
  save() { this.open.push(0); }
  restore() { this.parts.push("</g>".repeat(this.open.pop() || 0)); }

  // A box with a size; the canvas's may run backwards.
  /** @param {number} x @param {number} y @param {number} width @param {number} height @returns {Box} */
  static box(x, y, width, height) {
    return { x: Math.min(x, x + width), y: Math.min(y, y + height), width: Math.abs(width), height: Math.abs(height) };
  }

  // To the rectangle of the path, until restore().
  clip() {
    const id = `clip${Math.random().toString(36).slice(2)}`;
    this.parts.push(`<clipPath id="${id}">`);
    this.add("rect", this.last ?? {}, "");
    this.parts.push(`</clipPath><g clip-path="url(#${id})">`);
    this.open[this.open.length - 1] += 1;
  }

  /** @param {string} text @param {number} x @param {number} y */
  fillText(text, x, y) {
    const size = Number((this.font.match(/([\d.]+)px/) || [0, 10])[1]);
    const anchor = this.textAlign === "center" ? "middle" : this.textAlign === "right" ? "end" : "start";
    const at = `x="${VectorContext.n(x)}" y="${VectorContext.n(y + size * (BASELINES[this.textBaseline] || 0))}"`;
    const style = `style="font:${VectorContext.safe(this.font)}" text-anchor="${anchor}" ${VectorContext.paint("fill", this.fillStyle)}`;
    const room = text ? ` textLength="${VectorContext.n(this.measureText(text).width)}" lengthAdjust="spacingAndGlyphs"` : ""; // in any font
    this.parts.push(`<text ${at} ${style}${room} xml:space="preserve">${VectorContext.safe(text)}</text>`);
  }

  // A picture of few colours: a rectangle per stretch of one colour in a row.
  /** @param {OffscreenCanvas} image @param {number} left @param {number} top @param {number} width @param {number} height */
  drawImage(image, left, top, width, height) {
    const ctx = /** @type {OffscreenCanvasRenderingContext2D} */ (image.getContext("2d"));
    const { data } = ctx.getImageData(0, 0, image.width, image.height);
    const [across, down] = [width / image.width, height / image.height];
    const color = (/** @type {number} */ i) => data[i + 3] && `rgb(${data[i]},${data[i + 1]},${data[i + 2]})`;
    for (let row = 0; row < image.height; row++) {
      for (let from = 0, x = 0; x < image.width; x = from) {
        const shown = color((row * image.width + x) * 4);
        for (from = x + 1; from < image.width && color((row * image.width + from) * 4) === shown; ) from++;
        if (shown) this.add("rect", VectorContext.box(left + x * across, top + row * down, (from - x) * across, down), `fill="${shown}" shape-rendering="crispEdges"`);
      }
    }
  }

  /** What was drawn, moved to a place of a picture. @param {number} x @param {number} y */
  group(x, y) {
    return `<g transform="translate(${VectorContext.n(x)} ${VectorContext.n(y)})">${this.parts.join("")}</g>`;
  }
}
