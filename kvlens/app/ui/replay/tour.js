// Five marks that lead through a loss. Each points at a part of the page, says one thing, and can be left: Escape, the x, or
// the last one's end. Once left they never come by themselves again, as far as this browser remembers.

const LEFT = "kvlens-marks-left";
const FOLLOW_MS = 150, PATIENCE_MS = 20000, GAP = 10;
const TOURS = new WeakMap();

// A browser may refuse to remember, and throws then.
const remembered = () => {
  try { return window.localStorage.getItem(LEFT) !== null; } catch { return false; }
};
const remember = () => {
  try { window.localStorage.setItem(LEFT, "1"); } catch { /* it asks again next time */ }
};

class Tour {
  constructor(root) {
    this.root = root;
    this.place = root.querySelector("#marks");
    this.ring = root.querySelector("#ring");
    this.box = root.querySelector("#box");
    this.at = null;
    this.keys = (event) => this.key(event);
    root.querySelector("#around").onclick = () => this.open(0);
    root.querySelector("#leave").onclick = () => this.leave();
    root.querySelector("#back").onclick = () => this.open(this.at - 1);
    root.querySelector("#on").onclick = () => (this.at + 1 < this.marks.length ? this.open(this.at + 1) : this.leave());
  }

  receive({ run, marks, unasked }) {
    const other = run !== this.run;
    Object.assign(this, { run, marks });
    if (other) {
      this.close();
      if (unasked && !remembered()) this.begin();
    } else if (this.at !== null) this.say();
  }

  // Unasked, the marks wait until the page stands still: all they point at is there.
  begin() {
    const began = Date.now();
    clearInterval(this.waiting);
    this.waiting = setInterval(() => {
      const late = Date.now() - began > PATIENCE_MS;
      const still = document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState === "notRunning";
      if (!late && !(still && this.target(0))) return;
      clearInterval(this.waiting);
      if (!late && this.root.isConnected) this.open(0);
    }, FOLLOW_MS);
  }

  open(at) {
    this.at = Math.max(0, at);
    if (!this.place.matches(":popover-open")) this.place.showPopover();
    this.say();
    this.target()?.scrollIntoView({ block: "center" });
    document.addEventListener("keydown", this.keys, true);
    clearInterval(this.following);
    this.following = setInterval(() => this.follow(), FOLLOW_MS);
    this.follow();
    this.root.querySelector("#on").focus({ preventScroll: true });
  }

  say() {
    const mark = this.marks[this.at], last = this.at + 1 === this.marks.length;
    const put = (id, text) => { this.root.querySelector(id).textContent = text; };
    put("#count", `${this.at + 1} of ${this.marks.length}`);
    put("#title", mark.title);
    put("#text", mark.text);
    put("#on", last ? "Done" : "Next");
    this.root.querySelector("#back").disabled = this.at === 0;
    this.box.dataset.mark = this.at + 1;
  }

  // What a mark points at: a line of the verdict, known by its first words, or whatever a selector finds.
  target(at = this.at) {
    const { within, begins } = this.marks[at];
    const found = document.querySelector(within);
    if (!begins || !found) return found;
    return [...found.querySelectorAll("strong")].find((strong) => strong.textContent.startsWith(begins)) ?? null;
  }

  // The ring goes where its target is, the box below or above it.
  follow() {
    if (!this.root.isConnected) return this.close();
    const target = this.target();
    this.ring.hidden = !target;
    const area = target ? this.line(target) : new DOMRect(window.innerWidth / 2, window.innerHeight / 3, 0, 0);
    Object.assign(this.ring.style, {
      left: `${area.left - 6}px`, top: `${area.top - 4}px`, width: `${area.width + 12}px`, height: `${area.height + 8}px`,
    });
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const below = area.bottom + GAP + height < window.innerHeight;
    const top = below ? area.bottom + GAP : Math.max(GAP, area.top - GAP - height);
    this.box.style.left = `${Math.max(GAP, Math.min(area.left, window.innerWidth - width - GAP))}px`;
    this.box.style.top = `${top}px`;
  }

  // All of a line that begins with a bold word, up to the next break: it may go over several rows.
  line(target) {
    if (target.tagName !== "STRONG") return target.getBoundingClientRect();
    const range = document.createRange();
    range.setStartBefore(target);
    let end = target;
    while (end.nextSibling && end.nextSibling.nodeName !== "BR") end = end.nextSibling;
    range.setEndAfter(end);
    return range.getBoundingClientRect();
  }

  key(event) {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault();
    this.leave();
  }

  leave() {
    remember();
    this.close();
  }

  close() {
    this.at = null;
    if (this.place.matches(":popover-open")) this.place.hidePopover();
    clearInterval(this.following);
    clearInterval(this.waiting);
    document.removeEventListener("keydown", this.keys, true);
  }
}

export default function ({ data, parentElement }) {
  let tour = TOURS.get(parentElement);
  if (!tour || tour.place !== parentElement.querySelector("#marks")) {
    tour?.close();
    tour = new Tour(parentElement);
    TOURS.set(parentElement, tour);
  }
  tour.receive(data);
  return () => tour.close();
}
