// All tokens in one line: each pixel column shows the strongest colour entry among its tokens.

class Minimap {
  constructor(canvas, onGo) {
    this.canvas = canvas;
    this.height = 30;
    const go = (e) => {
      if (!this.view) return;
      const box = canvas.getBoundingClientRect();
      const n = this.view.colors.length;
      onGo(Math.max(0, Math.min(n - 1, Math.floor(((e.clientX - box.left) / box.width) * n))));
    };
    canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); go(e); });
    canvas.addEventListener("pointermove", (e) => e.buttons & 1 && go(e));
  }

  draw(view, width, needle, strip, theme) {
    this.view = view;
    const { colors, legend, current } = view;
    const n = colors.length;
    const columns = Math.max(1, Math.floor(width));
    const row = new ImageData(columns, 1);
    for (let x = 0; x < columns; x++) {
      const from = Math.floor((x * n) / columns);
      const to = Math.max(from + 1, Math.floor(((x + 1) * n) / columns));
      let best = -1;
      for (let i = from; i < to; i++) if (colors[i] !== 255 && colors[i] > best) best = colors[i];
      const entry = (best < 0 ? 255 : best) * 3;
      row.data.set([legend.table[entry], legend.table[entry + 1], legend.table[entry + 2], from > current ? 90 : 255], x * 4);
    }
    const ctx = context2d(this.canvas, columns, this.height);
    if (!this.buffer || this.buffer.width !== columns) this.buffer = new OffscreenCanvas(columns, 1);
    this.buffer.getContext("2d").putImageData(row, 0, 0);
    ctx.clearRect(0, 0, columns, this.height);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.buffer, 0, 8, columns, this.height - 14);
    const x = (pos) => (pos / n) * columns;
    ctx.fillStyle = theme.text;
    for (const [from, to] of needle) ctx.fillRect(x(from), this.height - 4, Math.max(3, x(to) - x(from)), 3);
    if (strip.windowed) {
      ctx.strokeStyle = theme.text;
      ctx.strokeRect(x(strip.start) + 0.5, 6.5, Math.max(4, x(strip.end) - x(strip.start)) - 1, this.height - 11);
    }
    ctx.fillStyle = VERMILION;
    ctx.fillRect(Math.min(columns - 2, x(current)), 0, 2, this.height);
  }
}
