// @ts-check
// The key of a picture of canvases: what stands around them in the page (nodes with `data-saved`), drawn where it stands. Swatches,
// scales, tokens and words; a list that is scrolled gives the lines that are seen.

import { drawHatch } from "../../../player/web/hatch.js";

/** @import { Context } from "../../../player/web/types.js" */
/** @typedef {{ text: string, font: string }} Ink */

const MARKED = "#D55E00";

/** Parts of the key that are seen. @param {ShadowRoot[]} roots @returns {HTMLElement[]} */
export function savedParts(roots) {
  const nodes = roots.flatMap((root) => [.../** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll("[data-saved]"))]);
  return nodes.filter((node) => node.getBoundingClientRect().width > 0 && node.getBoundingClientRect().height > 0);
}

/** Draws a part; the origin is a point of the window. @param {Context} ctx @param {HTMLElement} part @param {number} left @param {number} top @param {Ink} ink */
export function drawPart(ctx, part, left, top, ink) {
  const frame = part.getBoundingClientRect();
  const leaves = part.childElementCount ? [.../** @type {NodeListOf<HTMLElement>} */ (part.querySelectorAll("*"))].filter((node) => !node.childElementCount) : [part];
  for (const leaf of leaves) {
    const box = leaf.getBoundingClientRect();
    if (box.bottom < frame.top || box.top > frame.bottom || !box.width) continue;
    const place = { x: box.left - left, y: box.top - top, width: box.width, height: box.height };
    if (leaf.dataset.stops) drawRamp(ctx, place, leaf.dataset.stops.split(";"));
    else if (leaf.classList.contains("hatched")) drawHatch(ctx, place, getComputedStyle(leaf).color);
    else if (leaf.classList.contains("nr")) drawHatch(ctx, place, "#828282");
    else drawWords(ctx, leaf, frame, left, top, ink);
  }
}

/** @param {Context} ctx @param {{ x: number, y: number, width: number, height: number }} place @param {string[]} colors */
function drawRamp(ctx, { x, y, width, height }, colors) {
  colors.forEach((color, i) => {
    ctx.fillStyle = color;
    ctx.fillRect(x + (i * width) / colors.length, y, width / colors.length + (i + 1 < colors.length ? 0.5 : 0), height);
  });
}

/** Ground, words and marks of a node, line by line. @param {Context} ctx @param {HTMLElement} leaf @param {DOMRect} frame @param {number} left @param {number} top @param {Ink} ink */
function drawWords(ctx, leaf, frame, left, top, ink) {
  const style = getComputedStyle(leaf);
  const ground = style.backgroundColor;
  const seen = (/** @type {DOMRect} */ box) => box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2;
  for (const box of [...leaf.getClientRects()].filter(seen)) {
    const [x, y] = [box.left - left, box.top - top];
    if (ground && !/^(transparent|rgba\(.*, 0\))$/.test(ground)) {
      ctx.fillStyle = ground;
      ctx.fillRect(x, y, box.width, box.height);
    }
    if (leaf.classList.contains("needle")) {
      ctx.fillStyle = style.color;
      ctx.fillRect(x, y + box.height - 1, box.width, 2);
    }
    if (leaf.classList.contains("picked")) {
      ctx.fillStyle = MARKED;
      for (const edge of [y - 2, y + box.height]) ctx.fillRect(x, edge, box.width, 2);
    }
    if (leaf.classList.contains("now")) {
      ctx.strokeStyle = MARKED;
      ctx.lineWidth = 3;
      ctx.strokeRect(x - 1, y - 1, box.width + 2, box.height + 2);
    }
  }
  ctx.fillStyle = ground && leaf.style.color ? style.color : ink.text;
  ctx.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const [text, box] of wordLines(leaf)) if (seen(box)) ctx.fillText(text, box.left - left, box.top - top + box.height / 2);
}

/** The lines that a node's words are broken into, each with its box. @param {HTMLElement} leaf @returns {[string, DOMRect][]} */
function wordLines(leaf) {
  const node = leaf.firstChild;
  if (!(node instanceof Text)) return [];
  /** @type {[string, DOMRect][]} */
  const lines = [];
  const range = document.createRange();
  for (const word of node.data.matchAll(/\S+\s*/g)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].trimEnd().length);
    const box = range.getBoundingClientRect();
    const last = lines[lines.length - 1];
    if (last && Math.abs(last[1].top - box.top) < 3) last[0] += node.data.slice(word.index - 1, word.index).replace(/\S/, "") + word[0].trimEnd();
    else lines.push([word[0].trimEnd(), box]);
  }
  return lines;
}
