// Saves all canvases of a component as one picture: at their places, with their labels above them, on the page's ground.

export default function ({ data, parentElement }) {
  const save = () => {
    const place = document.querySelector(`.${CSS.escape("st-key-" + data.key.trim().replace(/[^a-zA-Z0-9_-]/g, "-"))}`);
    const roots = place ? [...place.querySelectorAll("*")].map((node) => node.shadowRoot).filter((root) => root) : [];
    const shown = roots.flatMap((root) => [...root.querySelectorAll("canvas")]).map((canvas) => [canvas, canvas.getBoundingClientRect()])
      .filter(([canvas, box]) => box.width > 0 && box.height > 0);
    if (!shown.length) return;
    const [line, pad] = [18, 12];
    const lines = data.caption.split("\n");
    const left = Math.min(...shown.map(([, box]) => box.left)) - pad;
    const top = Math.min(...shown.map(([, box]) => box.top)) - pad - (lines.length + 1) * line;
    const width = Math.max(...shown.map(([, box]) => box.right)) - left + pad;
    const height = Math.max(...shown.map(([, box]) => box.bottom)) - top + pad;
    const ratio = Math.max(2, window.devicePixelRatio || 1);
    const picture = Object.assign(document.createElement("canvas"), { width: width * ratio, height: height * ratio });
    const [ctx, style] = [picture.getContext("2d"), getComputedStyle(parentElement.querySelector("button"))];
    ctx.scale(ratio, ratio);
    ctx.fillStyle = style.getPropertyValue("--st-background-color").trim();
    ctx.fillRect(0, 0, width, height);
    ctx.fillStyle = style.getPropertyValue("--st-text-color").trim();
    ctx.font = `600 12px ${style.fontFamily}`;
    lines.forEach((text, i) => ctx.fillText(text, pad, pad + (i + 0.6) * line));
    ctx.font = `11px ${style.fontFamily}`;
    for (const [canvas, box] of shown) {
      ctx.fillText(canvas.getAttribute("aria-label") || "", box.left - left, box.top - top - 4);
      ctx.drawImage(canvas, box.left - left, box.top - top, box.width, box.height);
    }
    const link = Object.assign(document.createElement("a"), { download: `${data.name}.png` });
    picture.toBlob((blob) => {
      link.href = URL.createObjectURL(blob);
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  };
  parentElement.querySelector("button").onclick = save;
}
