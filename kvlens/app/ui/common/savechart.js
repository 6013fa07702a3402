// @ts-check
// Saves a Plotly chart as an image. Plotly's own image button does the work: it reads its options when it is pressed, so each of ours
// sets the format and presses it. The page's ground is painted in for that moment, because the light text of a dark page cannot be
// read on white paper.

import { makeRoom, placeOf } from "./menuroom.js";

/** @param {{ data: { key: string, caption: string }, parentElement: ShadowRoot }} component */
export default function ({ data, parentElement }) {
  makeRoom(data.key);
  const save = (/** @type {string} */ format) => {
    /** @type {any} a box that Plotly has drawn in */
    const plot = document.querySelector(`${placeOf(data.key)} .js-plotly-plot`);
    const press = plot && plot.querySelector('.modebar-btn[data-title^="Download plot"]');
    if (!press) return;
    const options = plot._context.toImageButtonOptions;
    const style = getComputedStyle(/** @type {Element} */ (parentElement.querySelector("button")));
    const { paper_bgcolor: ground, title, font } = plot.layout;
    const ink = style.getPropertyValue("--st-text-color").trim();
    plot.layout.font = { ...font, color: ink };
    plot._context.toImageButtonOptions = { ...options, format, scale: format === "png" ? 2 : 1 };
    plot.layout.paper_bgcolor = style.getPropertyValue("--st-background-color").trim();
    plot.layout.title = captioned(title, data.caption);
    press.click();
    plot._context.toImageButtonOptions = options;
    Object.assign(plot.layout, { paper_bgcolor: ground, title, font });
  };
  for (const button of parentElement.querySelectorAll("button")) button.onclick = () => save(button.dataset.format ?? "");
}

/** A figure's title with the condition of its page below it. @param {any} title @param {string} caption */
function captioned(title, caption) {
  if (!caption) return title;
  const plain = caption.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const text = title?.text ? `${title.text}<br><sup>${plain}</sup>` : `<sup>${plain}</sup>`;
  return { ...title, text };
}
