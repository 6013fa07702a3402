// @ts-check
// Layer x query-head map of one metric at one step. KV groups are ruled apart and named under the query heads.

import { NOT_RECORDED, decode } from "./codec.js";
import { DIVERGING, SEQUENTIAL, VERMILION, context2d, css } from "./color.js";

/** @import { Cell, Context, HeadView, RunHeader, Theme } from "./types.js" */

const MOST_RECTANGLES = 1000; // cells drawn one by one; more are one picture

export class HeadMap {
  /** @param {HTMLCanvasElement} canvas @param {(layer: number, head: number) => void} onPick @param {(cell: Cell | null) => void} onHover */
  constructor(canvas, onPick, onHover) {
    this.canvas = canvas;
    /** @type {{ left: number, top: number, cw: number, ch: number, layers: number, heads: number } | null} */
    this.box = null;
    /** @type {CanvasPattern | null} */
    this.pattern = null;
    this.patternColor = "";
    this.font = "sans-serif";
    canvas.addEventListener("click", (e) => { const cell = this.cell(e); if (cell) onPick(...cell); });
    canvas.addEventListener("mousemove", (e) => onHover(this.cell(e)));
    canvas.addEventListener("mouseleave", () => onHover(null));
  }

  /** @param {MouseEvent} event @returns {Cell | null} */
  cell(event) {
    if (!this.box) return null;
    const rect = this.canvas.getBoundingClientRect();
    const { left, top, cw, ch, layers, heads } = this.box;
    const head = Math.floor((event.clientX - rect.left - left) / cw);
    const layer = Math.floor((event.clientY - rect.top - top) / ch);
    return head >= 0 && head < heads && layer >= 0 && layer < layers ? [layer, head] : null;
  }

  /** @param {number} layers */
  static height(layers) {
    return 50 + Math.max(120, Math.min(190, layers * 24));
  }

  /** Whether what is missing has the hatch; with so many heads it is plain grey. @param {RunHeader} header */
  static hatches({ layers, q_heads: heads }) {
    return layers * heads <= MOST_RECTANGLES;
  }

  /** @param {HeadView} view @param {number} width @param {number} height @param {Theme} theme */
  draw(view, width, height, theme) {
    const { header, arrays } = view.run;
    const { layers, q_heads: heads, kv_heads: kvHeads } = header;
    const [left, top, right, bottom] = [40, 8, 8, 42];
    const cw = (width - left - right) / heads;
    const ch = (height - top - bottom) / layers;
    this.box = { left, top, cw, ch, layers, heads };
    const ctx = context2d(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    const codes = arrays[`cube:${view.metric.name}`];
    if (!codes && header.metrics.some((metric) => metric.name === view.metric.name)) {
      this.label(ctx, "being loaded\u2026", left + (width - left - right) / 2, height / 2, theme.text, 12);
      return;
    }
    const table = view.metric.diverging ? DIVERGING : SEQUENTIAL;
    const [lo, hi] = view.range;
    const few = HeadMap.hatches(header);
    const hatch = few ? this.hatch(ctx, theme) : null;
    const image = few || ctx.vector ? null : new ImageData(heads, layers);
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        const code = codes ? codes[(view.step * layers + layer) * heads + head] : NOT_RECORDED;
        const value = decode(code, view.metric.lo, view.metric.hi);
        const missing = Number.isNaN(value);
        const entry = missing ? 255 : Math.max(0, Math.min(254, Math.round(((value - lo) / (hi - lo)) * 254)));
        if (image) {
          const i = (layer * heads + head) * 4;
          for (let c = 0; c < 3; c++) image.data[i + c] = table[entry * 3 + c];
          image.data[i + 3] = 255;
          continue;
        }
        const [x, y] = [left + head * cw, top + layer * ch];
        ctx.fillStyle = missing && hatch ? hatch : css(table, entry);
        ctx.fillRect(x, y, cw + 0.5, ch + 0.5);
        if (missing && hatch && cw > 22 && ch > 12) this.label(ctx, "n/r", x + cw / 2, y + ch / 2, "#222", 10);
      }
    }
    if (image) this.drawImage(ctx, image, left, top, cw * heads, ch * layers);
    this.axes(ctx, view, theme, width, height, heads / kvHeads);
    this.outline(ctx, view.layer, view.head, VERMILION, 3);
  }

  // A pixel per head, drawn larger at once: thousands of rectangles take longer than a frame.
  /** @param {Context} ctx @param {ImageData} image @param {number} left @param {number} top @param {number} width @param {number} height */
  drawImage(ctx, image, left, top, width, height) {
    const cells = new OffscreenCanvas(image.width, image.height);
    cells.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(cells, left, top, width, height);
  }

  /** @param {Context} ctx @param {Theme} theme */
  hatch(ctx, theme) {
    if (this.pattern && this.patternColor === theme.text) return this.pattern;
    const tile = new OffscreenCanvas(6, 6);
    const t = tile.getContext("2d");
    t.fillStyle = "rgb(170,170,170)";
    t.fillRect(0, 0, 6, 6);
    t.strokeStyle = "rgb(130,130,130)";
    t.beginPath();
    t.moveTo(0, 6);
    t.lineTo(6, 0);
    t.stroke();
    this.patternColor = theme.text;
    this.pattern = ctx.createPattern(tile, "repeat");
    return this.pattern;
  }

  /**
   * @param {Context} ctx @param {string} text @param {number} x @param {number} y @param {string} color @param {number} size
   * @param {CanvasTextAlign} [align]
   */
  label(ctx, text, x, y, color, size, align = "center") {
    ctx.font = `${size}px ${this.font}`;
    ctx.fillStyle = color;
    ctx.textAlign = align;
    ctx.textBaseline = "middle";
    ctx.fillText(text, x, y);
  }

  /** @param {Context} ctx @param {HeadView} view @param {Theme} theme @param {number} width @param {number} height @param {number} group */
  axes(ctx, view, theme, width, height, group) {
    this.font = theme.font;
    const { left, top, cw, ch, layers, heads } = this.box;
    const every = (/** @type {number} */ count, /** @type {number} */ room, /** @type {number} */ need) => Math.max(1, Math.ceil((count * need) / room));
    const rows = every(layers, ch * layers, 13);
    for (let l = 0; l < layers; l += rows) this.label(ctx, `L${l}`, left - 6, top + (l + 0.5) * ch, theme.text, 11, "right");
    const columns = every(heads, cw * heads, 26);
    const bottom = top + layers * ch;
    for (let q = 0; q < heads; q += columns) this.label(ctx, `Q${q}`, left + (q + 0.5) * cw, bottom + 10, theme.text, 11);
    ctx.strokeStyle = theme.background;
    ctx.lineWidth = 2;
    const kvEvery = every(heads / group, cw * heads, 34);
    for (let q = 0; q < heads; q += group) {
      if (q > 0) {
        ctx.beginPath();
        ctx.moveTo(left + q * cw, top);
        ctx.lineTo(left + q * cw, bottom);
        ctx.stroke();
      }
      if ((q / group) % kvEvery === 0) this.label(ctx, `KV${q / group}`, left + (q + group / 2) * cw, bottom + 25, theme.text, 11);
      ctx.fillStyle = theme.border;
      ctx.fillRect(left + q * cw + 2, bottom + 17, group * cw - 4, 2);
    }
    this.label(ctx, "query heads over their KV heads; layers downwards", left, height - 5, theme.text, 10, "left");
  }

  /** @param {Context} ctx @param {number} layer @param {number} head @param {string} color @param {number} lineWidth */
  outline(ctx, layer, head, color, lineWidth) {
    const { left, top, cw, ch } = this.box;
    ctx.strokeStyle = color;
    ctx.lineWidth = lineWidth;
    ctx.strokeRect(left + head * cw, top + layer * ch, cw, ch);
  }
}
