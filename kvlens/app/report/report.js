// Draws every figure of the page from the data that stand beside it.
for (const box of document.querySelectorAll(".plot")) {
  const spec = JSON.parse(document.getElementById(`${box.id}-data`).textContent);
  const image = { format: "svg", filename: `kvlens-${box.id}` };
  Plotly.newPlot(box, spec.data, spec.layout, { responsive: true, displaylogo: false, toImageButtonOptions: image });
}
