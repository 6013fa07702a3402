// @ts-check
// What full KV reads at this step with the selected head, beside what the run read: a bar per span. By the run's own query where
// full KV's own masses were not recorded.

import { decode, visibleText } from "./codec.js";
import { VERMILION, context2d } from "./color.js";

/** @import { Picture } from "./picture.js" */
/** @import { Context, Theme, WantedRow } from "./types.js" */

const WANTED_ROWS = 5;
const WANTED_ROW = 23; // px
const ORANGE = "#E69F00";

export class Wanted {
  /** @param {HTMLCanvasElement} canvas @param {(span: number) => void} onPick */
  constructor(canvas, onPick) {
    this.canvas = canvas;
    /** @type {WantedRow[]} the rows that are drawn */
    this.rows = [];
    canvas.addEventListener("click", (e) => {
      const row = Math.floor((e.clientY - canvas.getBoundingClientRect().top - this.top) / WANTED_ROW);
      const picked = this.rows[row];
      if (picked) onPick(picked.id);
    });
  }

  get top() {
    return 38;
  }

  static get height() {
    return 38 + WANTED_ROWS * WANTED_ROW + 18;
  }

  // The spans listed at a step, most wanted first: {id, span, full, own, mass}; null where full attention was not recorded.
  /** @param {Picture} view @param {number} step @returns {WantedRow[] | null} */
  static listed(view, step) {
    const { arrays } = view.slice;
    if (!arrays.wanted_start || Number.isNaN(arrays.wanted_tail[step])) return null;
    /** @type {WantedRow[]} */
    const rows = [];
    for (let i = arrays.wanted_start[step]; i < arrays.wanted_start[step + 1]; i++) {
      const span = arrays.wanted_span[i];
      const [full, own, mass] = ["full", "own", "mass"].map((name) => decode(arrays[`wanted_${name}`][i], 0, 1));
      rows.push({ id: view.run.header.spans[span].id, span, full, own, mass });
    }
    return rows;
  }

  /** @param {Picture} view @param {number} width @param {number} height @param {Theme} theme */
  draw(view, width, height, theme) {
    const ctx = context2d(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillStyle = theme.text;
    ctx.font = `600 12px ${theme.font}`;
    const { layer, head } = view.slice.header;
    ctx.fillText(`Attention of ${view.headName(layer, head)} by span, step ${view.step}`, 0, 9);
    ctx.font = `11px ${theme.font}`;
    const all = Wanted.listed(view, view.step);
    this.rows = all ? all.slice(0, WANTED_ROWS) : [];
    if (!all) {
      ctx.fillText(`Full attention's masses were not recorded here${view.run.header.sampling}.`, 0, 28);
      return;
    }
    this.key(ctx, theme, massName(view));
    const left = Math.min(190, width * 0.42);
    const most = Math.max(0.05, ...this.rows.map((row) => Math.max(row.full, row.mass)));
    const room = width - left - (view.run.header.reference ? 166 : 78);
    this.rows.forEach((row, i) => {
      const y = this.top + i * WANTED_ROW;
      if (row.id === view.span) {
        ctx.strokeStyle = VERMILION;
        ctx.strokeRect(1, y + 1, width - 2, WANTED_ROW - 2);
      }
      ctx.fillStyle = theme.text;
      ctx.fillText(fitted(ctx, this.name(view, row.span), left - 8), 4, y + WANTED_ROW / 2);
      ctx.fillStyle = ORANGE;
      ctx.fillRect(left, y + 3, (row.full / most) * room, 8);
      ctx.fillStyle = theme.accent;
      ctx.fillRect(left, y + 12, (row.mass / most) * room, 8);
      ctx.fillStyle = theme.text;
      const own = view.run.header.reference ? `, own query ${row.own.toFixed(2)}` : "";
      ctx.fillText(`${row.full.toFixed(2)} / ${row.mass.toFixed(2)}${own}`, left + Math.max(row.full, row.mass) / most * room + 6, y + WANTED_ROW / 2);
    });
    const more = all.slice(WANTED_ROWS).reduce((sum, row) => sum + row.full, view.slice.arrays.wanted_tail[view.step]);
    ctx.fillText(`All other spans hold ${more.toFixed(2)} of ${massName(view)}.`, 4, this.top + this.rows.length * WANTED_ROW + 9);
  }

  /** @param {Context} ctx @param {Theme} theme @param {string} name */
  key(ctx, theme, name) {
    let x = 0;
    for (const [color, text] of [[ORANGE, name], [theme.accent, "this run's, rebuilt and summarised tokens too"]]) {
      ctx.fillStyle = color;
      ctx.fillRect(x, 23, 12, 9);
      ctx.fillStyle = theme.text;
      ctx.fillText(text, x + 17, 28);
      x += 27 + ctx.measureText(text).width;
    }
  }

  /** 'span 17 ★ “text of its first tokens”'; the star marks the needle. @param {Picture} view @param {number} index */
  name(view, index) {
    const { spans, texts, needle } = view.run.header;
    const { id, kind, start, end } = spans[index];
    if (kind === "window") return `span ${id}, the window`;
    const star = needle.some(([a, b]) => a < end && b > start) ? " \u2605" : "";
    const text = texts.slice(start, Math.min(end, start + 12)).map(visibleText).join("").replace(/\s+/g, " ").trim();
    return `span ${id}${star} \u201c${text}\u201d`;
  }
}

/** The mass that bars, holes and tails are of: full KV's own where it was recorded. @param {Picture} view */
export function massName({ run }) {
  return run.header.reference ? "full KV's mass" : "own-query mass (full KV's was not recorded)";
}

/** The text, cut to a width. @param {Context} ctx @param {string} text @param {number} width */
function fitted(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let size = text.length;
  while (size > 1 && ctx.measureText(`${text.slice(0, size)}\u2026`).width > width) size--;
  return `${text.slice(0, size)}\u2026`;
}
