// @ts-check
// Drawing of the player and the words beside the pictures. Player (player.js) has what moves and what is picked.

import { CacheMap } from "./cachemap.js";
import { NOT_RECORDED, decode, formatValue, visibleText } from "./codec.js";
import { DIVERGING, SEQUENTIAL, STATE_WORDS, css, pale, readTheme, rgb } from "./color.js";
import { HeadMap } from "./heatmap.js";
import { sampledAt } from "./holes.js";
import { Jumps } from "./jumps.js";
import { writeMapKey } from "./mapkey.js";
import { pair, ramp, swatch, textNode } from "./nodes.js";
import { colorTokens } from "./spans.js";
import { TokenStrip } from "./strip.js";
import { Tracks, axisText } from "./tracks.js";
import { View } from "./view.js";
import { massName, Wanted } from "./wanted.js";

/** @import { Cell, MapPlace, Metric, Track } from "./types.js" */

const MAP_HEIGHT = 196, MAP_LOW = 130; // px; the lower one where the window is
const LOW = 800; // px

export class Picture extends View {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    super(root);
    this.strip = new TokenStrip(this.el.strip, (pos) => this.pickToken(pos), (pos) => this.hoverToken(pos));
    this.map = new CacheMap(this.el.map, (place) => this.pickPlace(place), (place) => this.hoverPlace(place));
    this.wanted = new Wanted(this.el.wanted, (span) => this.pickWanted(span));
    this.heads = new HeadMap(this.el.heads, (l, h) => this.pickHead(l, h), (cell) => this.hoverHead(cell));
    this.tracks = new Tracks(this.el.tracks, (step) => { this.pause(); this.go(step); }, () => this.commit(0));
    this.jumps = new Jumps(this.el.jumps, (place) => this.jump(place));
  }

  // After a change that is more than a step: other head, other metric, other size.
  refresh() {
    const { header, arrays } = this.run;
    this.metric = header.metrics.find((m) => m.name === this.metricName) || header.metrics[0];
    /** @type {Track[]} */
    const tracks = header.tracks.map((t) => ({
      ...t, values: arrays[`track:${t.name}`], second: t.second && { values: arrays[`track:${t.second.name}`] },
      marks: arrays[`marks:${t.marks}`],
    }));
    if (header.oracle && this.span !== null) tracks.unshift(this.spanTrack());
    if (this.metric) {
      this.el.metric.value = this.metric.name;
      const head = this.headSeries(this.metric);
      tracks.push({ title: `${this.metric.title}, ${this.headName()}`, unit: this.metric.unit, values: head, zero: this.metric.zero, pending: !arrays[`cube:${this.metric.name}`] });
    }
    this.tracks.setTracks(tracks, this.steps, header.diverged);
    this.draw();
  }

  // What the selected head read of the selected span, beside what it would have read of all keys; NaN where it was not listed.
  /** @returns {Track} */
  spanTrack() {
    const { header } = this.slice;
    const here = header.layer === this.layer && header.head === this.head;
    const listed = (/** @type {number} */ step) => (here && Wanted.listed(this, step)?.find((row) => row.id === this.span)) || { full: NaN, mass: NaN };
    const rows = Array.from({ length: here ? this.steps : 0 }, (_, step) => listed(step));
    return {
      title: `mass on span ${this.span}, ${this.headName()}: this run (blue), ${massName(this)} (orange)`, unit: "share", zero: true, pending: !here,
      values: rows.map((row) => row.mass), second: { values: rows.map((row) => row.full) },
    };
  }

  /** @param {Metric} metric */
  headSeries({ name, lo, hi }) {
    const { layers, q_heads: heads } = this.run.header;
    const codes = this.run.arrays[`cube:${name}`];
    const code = (/** @type {number} */ step) => (codes ? codes[(step * layers + this.layer) * heads + this.head] : NOT_RECORDED);
    return Float64Array.from({ length: this.steps }, (_, step) => decode(code(step), lo, hi));
  }

  headName(layer = this.layer, head = this.head) {
    const { q_heads: heads, kv_heads: kvHeads } = this.run.header;
    return `L${layer} Q${head} (KV${Math.floor(head / (heads / kvHeads))})`;
  }

  draw() {
    if (!this.run || this.steps === 0) return;
    const { el, run, step } = this;
    const theme = readTheme(el.player);
    const width = el.player.clientWidth;
    if (width < 50) return;
    this.ground = rgb(theme.background);
    this.clock.seek(step);
    this.current = run.arrays.pos_of_step[step];
    this.legend = colorTokens(this.mode, run, this.clock, step, this.colors);
    if (this.metric) this.range = el.fit.checked ? this.metric.seen : this.metric.natural;
    this.strip.draw(this);
    const stacked = width < 820;
    el.player.querySelector(".views")?.classList.toggle("stacked", stacked);
    this.worst = el.worst.value === "worst";
    const [wide, narrow] = stacked ? [width, width] : [Math.floor((width - 18) * 0.6), Math.floor((width - 18) * 0.4)];
    if (run.header.spans.length) this.map.draw(this, wide, window.innerHeight < LOW ? MAP_LOW : MAP_HEIGHT, theme);
    if (this.metric) this.heads.draw({ run, step, layer: this.layer, head: this.head, metric: this.metric, range: this.range }, narrow, HeadMap.height(run.header.layers), theme);
    this.wanted.draw(this, narrow, Wanted.height, theme);
    this.tracks.draw(this, width, this.tracks.tracks.length * 60 + 34, theme);
    this.words();
  }

  words() {
    const { el, run, step } = this;
    el.scrub.value = String(step);
    this.jumps.moveTo(step);
    if (this.root.activeElement !== el.number) el.number.value = String(step);
    const text = visibleText(run.header.texts[this.current]).replace(/\n/g, "");
    el.now.textContent = `step ${step}${step < run.header.asked ? ", the question's" : ""}: token #${this.current} \u201c${text}\u201d, log p ${formatValue(run.arrays.logprob[step], "nats")}`
      + ` \u00b7 ${this.headName()} \u00b7 ${this.span === null ? "no span selected" : `span ${this.span}`}`;
    el.player.dataset.run = run.header.uid;
    el.player.dataset.step = String(step);
    el.player.dataset.cell = `${this.layer},${this.head}`;
    el.player.dataset.frames = String(this.frames);
    if (this.metric) el.heads.dataset.title = `${this.metric.title} (${this.metric.unit}) by layer and query head at step ${step}`;
    this.drawLegend();
    this.hoverToken(this.hovered);
    this.hoverHead(this.hoveredCell);
  }

  // The states that some span of the selected KV head has at some step.
  seenStates() {
    return [...new Set(Array.from(this.slice.arrays.change_state || []))].sort((a, b) => a - b);
  }

  /** @param {number} code */
  stateWord(code) {
    return pair(swatch(`rgb(${pale(code, this.ground)})`), textNode(STATE_WORDS[code]));
  }

  drawLegend() {
    const { legend } = this;
    const key = `${this.mode} ${this.ground} ${legend.states ? this.seenStates() : ""}`;
    if (this.legendKey !== key) {
      this.legendKey = key;
      const parts = legend.states
        ? this.seenStates().map((code) => this.stateWord(code))
        : [textNode(legend.lo ?? ""), ramp(legend.table), textNode(legend.hi ?? "")];
      this.el.legend.replaceChildren(...parts, pair(swatch(css(legend.table, 255)), textNode(legend.missing || "not recorded")), ...(legend.note ? [textNode(`\u00b7 ${legend.note}`)] : []));
    }
    writeMapKey(this);
    this.drawScale();
  }

  // The key of the head map.
  drawScale() {
    if (!this.metric) return;
    const { metric, range } = this;
    const hatches = HeadMap.hatches(this.run.header);
    const scaleKey = `${metric.name} ${range} ${hatches}`;
    if (this.scaleKey === scaleKey) return;
    this.scaleKey = scaleKey;
    const table = metric.diverging ? DIVERGING : SEQUENTIAL;
    const missing = swatch(hatches ? "" : css(table, 255));
    if (hatches) missing.classList.add("nr");
    const owner = metric.level === "kv" ? " \u00b7 a figure of the KV head, shown for each of its query heads" : "";
    this.el.metric.title = this.el.scale.title = `${metric.title}: ${metric.doc}${owner}`;
    this.el.scale.replaceChildren(textNode(axisText(range[0], metric.unit)), ramp(table),
      textNode(`${axisText(range[1], metric.unit)} ${metric.unit === "bytes" ? "" : metric.unit}`), pair(missing, textNode(hatches ? "not recorded (n/r)" : "not recorded")));
  }

  /** The words below the cache map for the place under the pointer. @param {MapPlace | null} place */
  hoverPlace(place) {
    if (place === null || !this.run) {
      this.hoverToken(null);
      return;
    }
    const { pos, step, hole } = place;
    const { header } = this.run;
    const index = hole && hole.span >= 0 ? hole.span : this.clock.spanAt(pos, step);
    const text = visibleText(header.texts[pos]).replace(/\n/g, "");
    const code = index < 0 ? 255 : this.clock.stateAt(index, step);
    const span = index < 0 ? "not written yet" : `span ${header.spans[index].id} (${header.spans[index].kind}): ${STATE_WORDS[code] || "state not recorded"}`;
    const who = hole && hole.head !== null ? this.headName(Math.floor(hole.head / header.q_heads), hole.head % header.q_heads) : this.headName();
    const lost = hole ? `${massName(this)} of ${who} has ${hole.to - hole.from > 1 ? `tokens ${hole.from}\u2013${hole.to - 1}` : `token ${hole.from}`} at ${hole.mass.toFixed(3)}, ${hole.summary ? "more than its summary got here" : "which this run did not attend"}; click to choose the span` : sampledAt(this, step) ? "no hole here" : "full attention was not recorded at this step";
    this.el.token.textContent = `step ${step} \u00b7 #${pos} \u201c${text}\u201d \u00b7 ${span}\n${lost}`;
  }

  /** @param {number | null} pos */
  hoverToken(pos) {
    this.hovered = pos;
    const { run, clock, step } = this;
    if (pos === null) {
      this.el.token.textContent = "Hover a token or a place of the map for its figures, click it to select its span.";
      return;
    }
    const from = run.arrays.char_start[pos];
    const offsets = from < 0 ? "" : ` \u00b7 characters ${from}\u2013${run.arrays.char_end[pos]}`;
    const made = pos - run.header.prompt;
    const kind = made < 0 ? "prompt" : `${made < run.header.asked ? "the question's, fed" : "generated"} at step ${made}`;
    const index = clock.spanOf[pos];
    const text = visibleText(run.header.texts[pos]).replace(/\n/g, "");
    let line = `#${pos} \u201c${text}\u201d \u00b7 ${kind}${offsets} \u00b7 surprisal ${formatValue(run.arrays.surprisal[pos], "nats")}`;
    if (index >= 0) {
      const span = run.header.spans[index];
      const range = span.kind === "window" ? "remainder" : `tokens ${span.start}\u2013${span.end - 1}`;
      line += `\nspan ${span.id} (${span.kind}, ${range}) at step ${step}: ${this.massWords(index)} \u00b7 state ${clock.state(index) || "not recorded"}`;
    } else line += "\nin no span at this step";
    this.el.token.textContent = line;
  }

  // Lists are cut after the strongest spans, so a mean over heads is a lower bound and an absent span is not a zero.
  /** @param {number} index */
  massWords(index) {
    const [mean, head] = [this.clock.mass("mean", index), this.clock.mass("head", index)];
    const all = Number.isNaN(mean) ? "listed by no head" : `mean mass over all heads \u2265 ${mean.toFixed(4)}`;
    const mine = Number.isNaN(head) ? `not listed by ${this.headName()}` : `${this.headName()} mass \u2248 ${head.toFixed(4)}`;
    return this.run.header.span_masses ? `${all} \u00b7 ${mine}` : "mass not recorded";
  }

  /** @param {Cell | null} cell */
  hoverHead(cell) {
    this.hoveredCell = cell;
    if (!this.metric) {
      this.el.cell.textContent = "This run recorded no figures per head.";
      return;
    }
    const { layers, q_heads: heads } = this.run.header;
    const [layer, head] = cell || [this.layer, this.head];
    const codes = this.run.arrays[`cube:${this.metric.name}`];
    const code = codes ? codes[(this.step * layers + layer) * heads + head] : NOT_RECORDED;
    const value = codes ? formatValue(decode(code, this.metric.lo, this.metric.hi), this.metric.unit) : "being loaded\u2026";
    this.el.cell.textContent = `${cell ? "under the pointer" : "selected"}: ${this.headName(layer, head)} \u00b7 ${this.metric.title} at step ${this.step}: ${value}`;
  }
}
