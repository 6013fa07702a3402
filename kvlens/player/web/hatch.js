// @ts-check
// Hatching by single lines, so that a canvas and a vector picture take the same drawing.

/** @import { Context } from "./types.js" */

const HATCH_GAP = 6; // px between lines, measured across
const HATCH_LINE = 2; // px

/**
 * Lines from the lower left to the upper right, in phase with those of all other boxes.
 * @param {Context} ctx @param {{ x: number, y: number, width: number, height: number }} box @param {string} color
 */
export function drawHatch(ctx, { x, y, width, height }, color) {
  ctx.strokeStyle = color;
  ctx.lineWidth = HATCH_LINE;
  ctx.beginPath();
  for (const [x0, y0, x1, y1] of hatchLines(x, y, width, height)) {
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
  }
  ctx.stroke();
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, Math.max(0, width - 1), Math.max(0, height - 1));
}

/**
 * The lines x + y = k * HATCH_GAP inside a box: [x0, y0, x1, y1], lower left first.
 * @param {number} x @param {number} y @param {number} width @param {number} height @returns {[number, number, number, number][]}
 */
export function hatchLines(x, y, width, height) {
  /** @type {[number, number, number, number][]} */
  const lines = [];
  const last = x + y + width + height;
  for (let sum = Math.ceil((x + y) / HATCH_GAP) * HATCH_GAP; sum <= last; sum += HATCH_GAP) {
    const left = Math.max(x, sum - y - height), right = Math.min(x + width, sum - y);
    if (right > left) lines.push([left, sum - left, right, sum - right]);
  }
  return lines;
}
