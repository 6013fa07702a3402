// Moving through steps: buttons, keys, playing, and what is committed.
import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";
import { Stepper } from "../../kvlens/player/web/stepper.js";
import { FakeNode, FakeRoot, install, keyPress } from "./fakedom.js";

class Moved extends Stepper {
  constructor(root) {
    super(root);
    this.commits = [];
    this.drawn = 0;
    this.setStateValue = (name, value) => this.commits.push([name, value]);
  }

  draw() { this.drawn += 1; }
  get loaded() { return true; }
  ownKeys() { return { n: () => this.go(7) }; }
}

let page, view, buttons;
beforeEach(() => {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  page = install();
  const root = new FakeRoot(["player", "play", "rate", "mode", "scrub", "number", "of"], ["first", "back", "play", "forward", "last", "help"]);
  view = new Moved(root);
  view.wireSteps({ help: () => {} }, [["state", "state"]]);
  view.setSteps(10);
  buttons = Object.fromEntries(root.buttons.map((button) => [button.dataset.act, button]));
});

test("a short run is played a step a second at first, a long one faster, and the user's rate stays", () => {
  assert.equal(view.el.rate.value, "1");
  assert.ok(view.el.rate.children.some((option) => option.value === "1"));
  view.setSteps(512);
  assert.equal(view.el.rate.value, "20");
  view.el.rate.value = "5";
  view.el.rate.onchange();
  view.setSteps(6);
  assert.equal(view.el.rate.value, "5");
});

test("a step stays inside the run, whatever was asked for", () => {
  for (const [asked, shown] of [[4, 4], [99, 9], [-3, 0]]) {
    view.go(asked);
    assert.equal(view.step, shown);
  }
  view.el.number.value = "nonsense";
  view.el.number.onchange();
  assert.equal(view.step, 0);
  assert.deepEqual([view.el.scrub.max, view.el.of.textContent], ["9", "/ 9"]);
});

test("buttons and keys move, and keys of a field are left to it", () => {
  buttons.last.onclick();
  assert.equal(view.step, 9);
  buttons.back.onclick();
  assert.equal(view.step, 8);
  const presses = [["Home", 0], ["ArrowRight", 1], ["End", 9], ["ArrowLeft", 8], ["N", 7]];
  for (const [key, step] of presses) {
    view.key(keyPress(key, new FakeNode()));
    assert.equal(view.step, step, key);
  }
  view.key(keyPress("ArrowRight", new FakeNode(), { ctrlKey: true }));
  view.key(keyPress("ArrowRight", new globalThis.HTMLSelectElement()));
  view.key(keyPress("ArrowRight", Object.assign(new globalThis.HTMLInputElement(), { type: "number" })));
  assert.equal(view.step, 7);
  view.step = 0;
  view.key(keyPress("ArrowRight", new FakeNode(), { shiftKey: true }));
  assert.equal(view.step, 9, "ten steps, cut at the end");
});

test("only the last of several moves is committed, after a pause", () => {
  view.go(1);
  view.go(2);
  view.go(3);
  assert.deepEqual(view.commits, []);
  mock.timers.tick(1000);
  assert.deepEqual(view.commits, [["selection", { step: 3, layer: 0, head: 0 }]]);
  view.pickHead(1, 2);
  mock.timers.tick(1000);
  assert.deepEqual(view.commits[1], ["selection", { step: 3, layer: 1, head: 2 }]);
  const { drawn } = view;
  view.pickHead(1, 2);
  mock.timers.tick(1000);
  assert.deepEqual([view.commits.length, view.drawn], [2, drawn], "the same head again is no change");
});

test("it plays at its rate, drops steps when frames are late, ends at the last step and commits once", () => {
  view.el.rate.value = "10";
  view.step = 9;
  page.frame(0);
  view.toggle();
  assert.deepEqual([view.step, view.playing, view.el.player.dataset.playing], [0, true, "true"], "from the end it begins anew");
  page.frame(50);
  assert.equal(view.step, 0);
  page.frame(100);
  assert.equal(view.step, 1);
  page.frame(450);
  assert.deepEqual([view.step, view.frames], [4, 2]);
  mock.timers.tick(1000);
  assert.deepEqual(view.commits, [], "nothing is sent while it plays");
  page.frame(5000);
  assert.deepEqual([view.step, view.playing, view.el.play.textContent], [9, false, "Play"]);
  mock.timers.tick(1000);
  assert.equal(view.commits.length, 1);
  page.frame(6000);
  assert.equal(view.step, 9);
});
