// @ts-check
// Saves all canvases of a component as one picture, SVG or PNG: at their places, with their key and labels, on the page's ground.

import { makeRoom, placeOf } from "./menuroom.js";
import { drawPart, savedParts } from "./savekey.js";
import { HATCH, VectorContext } from "./vector.js";

/**
 * @typedef {HTMLCanvasElement & { vector?: VectorContext }} Canvas
 * @typedef {{ shown: [Canvas, DOMRect][], parts: HTMLElement[], lines: string[], left: number, top: number, width: number, height: number, font: string,
 *   background: string, text: string }} Picture of canvases at their places, in CSS pixels
 */

const [LINE, PAD] = [18, 12]; // of the caption above, and around

/** @param {{ data: { key: string, name: string, caption: string }, parentElement: ShadowRoot }} component */
export default function ({ data, parentElement }) {
  makeRoom(data.key);
  const save = (/** @type {string} */ format) => {
    const place = document.querySelector(placeOf(data.key));
    const roots = place ? [...place.querySelectorAll("*")].flatMap((node) => (node.shadowRoot ? [node.shadowRoot] : [])) : [];
    /** @type {[Canvas, DOMRect][]} */
    const boxes = roots.flatMap((root) => [...root.querySelectorAll("canvas")]).map((canvas) => [canvas, canvas.getBoundingClientRect()]);
    const shown = boxes.filter(([, box]) => box.width > 0 && box.height > 0);
    if (!shown.length) return;
    const lines = data.caption.split("\n");
    const parts = savedParts(roots);
    const all = [...shown.map(([, box]) => box), ...parts.map((part) => part.getBoundingClientRect())];
    const left = Math.min(...all.map((box) => box.left)) - PAD;
    const top = Math.min(...all.map((box) => box.top)) - PAD - (lines.length + 1) * LINE;
    const width = Math.max(...all.map((box) => box.right)) - left + PAD;
    const height = Math.max(...all.map((box) => box.bottom)) - top + PAD;
    const style = getComputedStyle(/** @type {Element} */ (parentElement.querySelector("button")));
    const color = (/** @type {string} */ name) => style.getPropertyValue(`--st-${name}-color`).trim();
    const about = { shown, parts, lines, left, top, width, height, font: style.fontFamily, background: color("background"), text: color("text") };
    if (format === "svg") keep(new Blob([vectors(about)], { type: "image/svg+xml" }), `${data.name}.svg`);
    else pixels(about).toBlob((blob) => blob && keep(blob, `${data.name}.png`));
  };
  for (const button of parentElement.querySelectorAll("button")) button.onclick = () => save(button.dataset.format ?? "");
}

/** The caption, the key, and over each canvas its label. @param {CanvasRenderingContext2D | VectorContext} ctx @param {Picture} about */
function label(ctx, { shown, parts, lines, left, top, text, font }) {
  ctx.fillStyle = text;
  ctx.font = `600 12px ${font}`;
  lines.forEach((line, i) => ctx.fillText(line, PAD, PAD + (i + 0.6) * LINE));
  ctx.font = `11px ${font}`;
  for (const [canvas, box] of shown) ctx.fillText(canvas.dataset.title ?? canvas.getAttribute("aria-label") ?? "", box.left - left, box.top - top - 4);
  const context = /** @type {import("../../../player/web/types.js").Context} */ (/** @type {unknown} */ (ctx));
  for (const part of parts) drawPart(context, part, left, top, { text, font });
}

/** @param {Picture} about */
function pixels(about) {
  const { shown, left, top, width, height, background } = about;
  const ratio = Math.max(2, window.devicePixelRatio || 1);
  const picture = Object.assign(document.createElement("canvas"), { width: width * ratio, height: height * ratio });
  const ctx = /** @type {CanvasRenderingContext2D} */ (picture.getContext("2d"));
  ctx.scale(ratio, ratio);
  ctx.fillStyle = background;
  ctx.fillRect(0, 0, width, height);
  label(ctx, about);
  for (const [canvas, box] of shown) ctx.drawImage(canvas, box.left - left, box.top - top, box.width, box.height);
  return picture;
}

/** Every canvas draws itself once more, into vectors. @param {Picture} about */
function vectors(about) {
  const { shown, left, top, width, height, background } = about;
  const ground = new VectorContext();
  ground.fillStyle = background;
  ground.fillRect(0, 0, width, height);
  label(ground, about);
  for (const [canvas] of shown) canvas.vector = new VectorContext();
  shown[0][0].dispatchEvent(new CustomEvent("redraw", { bubbles: true }));
  const drawn = shown.map(([canvas, box]) => canvas.vector?.group(box.left - left, box.top - top));
  for (const [canvas] of shown) delete canvas.vector;
  const size = `width="${Math.ceil(width)}" height="${Math.ceil(height)}" viewBox="0 0 ${Math.ceil(width)} ${Math.ceil(height)}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size}><defs>${HATCH}</defs>${ground.group(0, 0)}${drawn.join("")}</svg>`;
}

/** @param {Blob} blob @param {string} name */
function keep(blob, name) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
