// Drawing of the view of two runs and the words beside the pictures. PairView (pair.js) has what moves and what is picked.

import { formatValue, visibleText } from "../../../../player/web/codec.js";
import { DIVERGING, SEQUENTIAL, readTheme } from "../../../../player/web/color.js";
import { HeadMap } from "../../../../player/web/heatmap.js";
import { ramp, textNode } from "../../../../player/web/nodes.js";
import { colorTokens } from "../../../../player/web/spans.js";
import { Stepper } from "../../../../player/web/stepper.js";
import { axisText } from "../../../../player/web/tracks.js";

export class PairPicture extends Stepper {
  draw() {
    if (!this.runs || this.steps === 0) return;
    const { el } = this;
    const theme = readTheme(el.player);
    const width = el.player.clientWidth;
    if (width < 50) return;
    this.runs.forEach((run, i) => this.drawStrip(run, i));
    this.drawPrompt();
    const shown = this.range ? (this.delta ? 3 : 2) : 0;
    el.player.querySelector(".pair-maps").hidden = shown === 0;
    el.player.querySelector(".pair-maps").classList.toggle("two", shown === 2);
    el.mapD.parentElement.hidden = shown < 3;
    const mapWidth = Math.floor((width - 12 * (shown - 1)) / Math.max(1, shown));
    const height = HeadMap.height(this.runs[0].header.layers);
    const views = this.range ? [0, 1].map((i) => ({ ...this.at(), run: this.runs[i], metric: this.metrics[i] || this.about, range: this.range })) : [];
    if (this.delta) views.push({ ...this.at(), ...this.delta });
    views.forEach((view, i) => this.maps[i].draw(view, mapWidth, height, theme));
    this.tracks.draw(this, width, this.tracks.tracks.length * 64 + 34, theme);
    this.words();
  }

  at() {
    return { step: this.step, layer: this.layer, head: this.head };
  }

  drawStrip(run, i) {
    const last = run.header.steps - 1;
    const step = Math.min(this.step, last);
    this.clocks[i].seek(step);
    const current = run.arrays.pos_of_step[step];
    this.legend = colorTokens(this.mode, run, this.clocks[i], step, this.colors[i]);
    this.strips[i].draw(this.stripView(i));
    const text = visibleText(run.header.texts[current]).replace(/\n/g, "");
    const said = this.step > last ? `ended at step ${last}` : `\u201c${text}\u201d, log p ${formatValue(run.arrays.logprob[step], "nats")}`;
    this.el[i === 0 ? "nowA" : "nowB"].textContent = `${i === 0 ? "A" : "B"} \u00b7 ${this.header.labels[i]}\nstep ${this.step}: ${said}`;
  }

  drawPrompt() {
    this.prompt.draw(this.stripView(this.whose));
  }

  stripView(i) {
    const run = this.runs[i];
    const current = run.arrays.pos_of_step[Math.min(this.step, run.header.steps - 1)];
    return { clock: this.clocks[i], current, span: null, colors: this.colors[i], legend: this.legend, follow: true };
  }

  words() {
    const { el, step, header } = this;
    el.scrub.value = String(step);
    if (this.root.activeElement !== el.number) el.number.value = String(step);
    const apart = header.diverged !== null && step > header.diverged;
    el.context.textContent = apart ? `different contexts since step ${header.diverged}` : "the same context in both runs";
    el.difference.textContent = `B \u2212 A${apart ? " (different contexts)" : ""}`;
    el.player.dataset.step = String(step);
    el.player.dataset.cell = `${this.layer},${this.head}`;
    el.player.dataset.apart = String(apart);
    this.drawLegend();
    this.hover(null);
  }

  drawLegend() {
    const { legend } = this;
    const key = `${this.mode} ${this.header.metric} ${this.range} ${this.delta?.range}`;
    if (this.legendKey === key) return;
    this.legendKey = key;
    const marks = this.header.diverged === null ? [] : [
      textNode("", "mark here"), textNode("first divergence"), textNode("", "mark after"), textNode("different contexts"),
    ];
    this.el.legend.replaceChildren(textNode(legend.lo), ramp(legend.table), textNode(legend.hi), ...marks, textNode(`\u00b7 ${legend.note}`));
    if (!this.range) return;
    const [metric, end] = [this.about, (value) => axisText(value, this.about.unit)];
    const unit = metric.unit === "bytes" ? "" : ` ${metric.unit}`;
    const parts = [textNode(`${metric.title} in A and B`), textNode(end(this.range[0])),
      ramp(metric.diverging ? DIVERGING : SEQUENTIAL), textNode(end(this.range[1]) + unit)];
    if (this.delta) {
      parts.push(textNode("\u00b7 B \u2212 A"), textNode(end(this.delta.range[0])), ramp(DIVERGING), textNode(`+${end(this.delta.range[1])}${unit}`),
        textNode("red: more in B, blue: less in B"));
    }
    const missing = textNode("", "swatch nr");
    this.el.scale.replaceChildren(...parts, missing, textNode("not recorded (n/r)"));
  }

  hover(cell) {
    if (!this.range) {
      this.el.cell.textContent = "The runs recorded no figure per head.";
      return;
    }
    const [layer, head] = cell || [this.layer, this.head];
    const [one, two] = [0, 1].map((i) => this.value(i, layer, head));
    const unit = this.about.unit;
    const change = Number.isNaN(two - one) ? "" : ` \u00b7 ${two === one ? "the same" : `${formatValue(Math.abs(two - one), unit)} ${two > one ? "more" : "less"} in B`}`;
    this.el.cell.textContent = `${cell ? "under the pointer" : "selected"}: ${this.headName(layer, head)} \u00b7 ${this.about.title} at step ${this.step}: `
      + `A ${formatValue(one, unit)} \u00b7 B ${formatValue(two, unit)}${change}`;
  }
}
