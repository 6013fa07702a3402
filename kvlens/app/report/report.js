// @ts-check
// Draws every figure of the page from the data that stand beside it.
/** @type {any} */
const plotly = Reflect.get(window, "Plotly");

for (const box of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".plot"))) {
  const spec = JSON.parse(document.getElementById(`${box.id}-data`)?.textContent ?? "");
  const image = { format: "svg", filename: `kvlens-${box.id}` };
  plotly.newPlot(box, spec.data, spec.layout, { responsive: true, displaylogo: false, toImageButtonOptions: image });
}
