// @ts-check
// The token strip: real text in the DOM (textContent only), at most WINDOW tokens at a time, coloured per step.

import { visibleText } from "./codec.js";
import { STATES, css, ink, inkOn, pale } from "./color.js";

/** @import { Range, Run, StripView } from "./types.js" */

const WINDOW = 2048;
const ALL_IN_DOM = 3000; // up to here every token is in the DOM and there is no window to move

/** @type {Record<string, number>} */
const FLAG = { now: 1, future: 2, first: 4, last: 8, picked: 16, needle: 32, asked: 64 };

/** @param {string} text */
function boundary(text) {
  const mark = document.createElement("span");
  mark.className = "boundary";
  mark.textContent = text;
  return mark;
}

export class TokenStrip {
  /** @param {HTMLElement} box @param {(pos: number) => void} onPick @param {(pos: number | null) => void} onHover */
  constructor(box, onPick, onHover) {
    this.box = box;
    /** @type {Run | null} */
    this.run = null;
    this.start = 0;
    this.end = 0;
    this.answer = 0;
    this.ground = "";
    /** @type {HTMLElement[]} */
    this.cells = [];
    /** @type {[number, string][]} */
    this.marks = [];
    /** @type {Set<number>} */
    this.continued = new Set();
    this.needle = new Uint8Array(0);
    this.drawnColor = new Int16Array(0);
    this.drawnFlags = new Int16Array(0);
    box.addEventListener("click", (e) => TokenStrip.pass(e, onPick));
    box.addEventListener("mouseover", (e) => TokenStrip.pass(e, onHover));
    box.addEventListener("mouseleave", () => onHover(null));
  }

  /** Hands on the position of the token that an event is about, if there is one. @param {Event} event @param {(pos: number) => void} use */
  static pass(event, use) {
    const pos = event.target instanceof HTMLElement ? event.target.dataset.pos : undefined;
    if (pos !== undefined) use(Number(pos));
  }

  /** @param {Run} run */
  setRun(run) {
    this.run = run;
    this.continued = new Set(run.header.continued);
    this.needle = new Uint8Array(run.header.texts.length);
    for (const [from, to] of run.header.needle) this.needle.fill(1, from, to);
    const { prompt, asked } = run.header; // a question that was fed once the context was placed: steps that choose nothing
    this.answer = prompt + asked;
    this.marks = asked ? [[prompt, "question, fed step by step"], [this.answer, "generated"]] : [[prompt, "generated"]];
    this.build(0);
  }

  /** The positions [from, to) that the strip is about. @returns {Range} */
  get range() {
    return [0, this.run.header.texts.length];
  }

  get windowed() {
    const [from, to] = this.range;
    return to - from > ALL_IN_DOM;
  }

  /** @param {number} start */
  build(start) {
    const { texts } = this.run.header;
    const [from, to] = this.range;
    const size = this.windowed ? WINDOW : to - from;
    this.start = Math.max(from, Math.min(start, to - size));
    this.end = this.start + size;
    this.drawnColor = new Int16Array(this.end - this.start).fill(-1);
    this.drawnFlags = new Int16Array(this.end - this.start).fill(-1);
    const list = document.createDocumentFragment();
    this.cells = [];
    for (let pos = this.start; pos < this.end; pos++) {
      for (const [at, text] of this.marks) if (pos === at) list.appendChild(boundary(text));
      const cell = document.createElement("span");
      cell.dataset.pos = String(pos);
      cell.textContent = this.continued.has(pos) ? "\u2009" : visibleText(texts[pos]);
      list.appendChild(cell);
      this.cells.push(cell);
    }
    this.box.replaceChildren(list);
  }

  /** Makes `pos` part of the window, where the strip is about it; true if the window had to move. @param {number} pos */
  include(pos) {
    const [from, to] = this.range;
    if ((pos >= this.start && pos < this.end) || pos < from || pos >= to) return false;
    this.build(pos - WINDOW / 2);
    return true;
  }

  /** @param {number} pos @param {StripView} view */
  flags(pos, view) {
    const { spanOf } = view.clock;
    const span = spanOf[pos];
    let flags = this.needle[pos] ? FLAG.needle : 0;
    if (pos === view.current) flags |= FLAG.now;
    if (pos > view.current) flags |= FLAG.future;
    if (pos >= this.run.header.prompt && pos < this.answer) flags |= FLAG.asked;
    if (span >= 0) {
      if (pos === 0 || spanOf[pos - 1] !== span) flags |= FLAG.first;
      if (pos + 1 === spanOf.length || spanOf[pos + 1] !== span) flags |= FLAG.last;
      if (this.run.header.spans[span].id === view.span) flags |= FLAG.picked;
    }
    return flags;
  }

  /** Only cells whose colour or marks changed are touched. @param {StripView} view */
  draw(view) {
    if (view.follow) this.include(view.current);
    if (String(view.ground) !== this.ground) {
      this.ground = String(view.ground);
      this.drawnColor.fill(-1);
    }
    for (let pos = this.start; pos < this.end; pos++) {
      const i = pos - this.start;
      const color = view.colors[pos] | (view.legend.table === STATES ? 256 : 0);
      if (color !== this.drawnColor[i]) {
        this.drawnColor[i] = color;
        const style = this.cells[i].style;
        const state = view.legend.table === STATES ? pale(view.colors[pos], view.ground) : null;
        style.backgroundColor = state ? `rgb(${state})` : css(view.legend.table, view.colors[pos]);
        style.color = state ? ink(state) : inkOn(view.legend.table, view.colors[pos]);
      }
      const flags = this.flags(pos, view);
      if (flags !== this.drawnFlags[i]) {
        this.drawnFlags[i] = flags;
        const names = Object.keys(FLAG).filter((name) => flags & FLAG[name]);
        this.cells[i].className = names.join(" ");
      }
    }
    if (view.follow) this.reveal(view.current);
  }

  /** @param {number} pos */
  reveal(pos) {
    const cell = this.cells[pos - this.start];
    if (!cell) return;
    const top = cell.offsetTop; // the box is the cells' offset parent
    if (top < this.box.scrollTop || top > this.box.scrollTop + this.box.clientHeight - 30) {
      this.box.scrollTop = top - this.box.clientHeight / 2;
    }
  }

  /** Shows `pos` although it is not the current token (minimap click, chosen span). @param {number} pos */
  goTo(pos) {
    this.include(pos);
    const cell = this.cells[pos - this.start];
    if (cell) this.box.scrollTop = cell.offsetTop - this.box.clientHeight / 2;
  }
}
