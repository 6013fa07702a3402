// @ts-check
// Small pieces of a legend. Text goes into textContent only.

import { css, gradient } from "./color.js";

/** @import { ColorTable } from "./types.js" */

const STOPS = 32; // colours of a ramp, for who draws it anew

/** @param {string} text @param {string} [className] */
export function textNode(text, className = "") {
  const node = document.createElement("span");
  node.textContent = text;
  node.className = className;
  return node;
}

/** A swatch and its word, never parted by a line break. @param {Node[]} nodes */
export function pair(...nodes) {
  const node = textNode("", "pair");
  node.append(...nodes);
  return node;
}

/** @param {string} color */
export function swatch(color) {
  const node = textNode("", "swatch");
  node.style.backgroundColor = color;
  return node;
}

/** A swatch of diagonal lines. @param {string} color */
export function hatched(color) {
  const node = swatch("");
  node.classList.add("hatched");
  node.style.color = color;
  return node;
}

/** A ramp of one colour between two strengths, 0..1. @param {number[]} color @param {number} from @param {number} to */
export function fade(color, from, to) {
  const node = textNode("", "ramp");
  node.style.backgroundImage = `linear-gradient(to right, rgba(${color}, ${from}), rgba(${color}, ${to}))`;
  node.dataset.stops = Array.from({ length: STOPS }, (_, i) => `rgba(${color}, ${from + ((to - from) * i) / (STOPS - 1)})`).join(";");
  return node;
}

/** @param {ColorTable} table */
export function ramp(table) {
  const node = textNode("", "ramp");
  node.style.backgroundImage = gradient(table);
  node.dataset.stops = Array.from({ length: STOPS }, (_, i) => css(table, Math.round((i * 254) / (STOPS - 1)))).join(";");
  return node;
}
