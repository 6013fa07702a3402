// @ts-check
// Saves a Plotly chart as an image. Plotly's own image button does the work: it reads its options when it is pressed, so each of ours
// sets the format and presses it. The page's ground is painted in for that moment, because the light text of a dark page cannot be
// read on white paper.

/** @param {{ data: { key: string }, parentElement: ShadowRoot }} component */
export default function ({ data, parentElement }) {
  const save = (/** @type {string} */ format) => {
    const place = "st-key-" + data.key.trim().replace(/[^a-zA-Z0-9_-]/g, "-");
    /** @type {any} a box that Plotly has drawn in */
    const plot = document.querySelector(`.${CSS.escape(place)} .js-plotly-plot`);
    const press = plot && plot.querySelector('.modebar-btn[data-title^="Download plot"]');
    if (!press) return;
    const options = plot._context.toImageButtonOptions;
    const ground = plot.layout.paper_bgcolor;
    plot._context.toImageButtonOptions = { ...options, format, scale: format === "png" ? 2 : 1 };
    plot.layout.paper_bgcolor = getComputedStyle(/** @type {Element} */ (parentElement.querySelector("button"))).getPropertyValue("--st-background-color").trim();
    press.click();
    plot._context.toImageButtonOptions = options;
    plot.layout.paper_bgcolor = ground;
  };
  for (const button of parentElement.querySelectorAll("button")) button.onclick = () => save(button.dataset.format ?? "");
}
