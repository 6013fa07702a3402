// As much of a page as Stepper and Jumps touch.

export class FakeNode {
  constructor(id = "", dataset = {}) {
    Object.assign(this, { id, dataset: { ...dataset }, children: [], value: "", textContent: "", disabled: false, title: "" });
  }

  append(...nodes) { this.children.push(...nodes); }

  add(node) {
    this.children.push(node);
    if (node.selected) this.value = node.value;
  }
}

class FakeOption {
  constructor(text, value, _default, selected = false) { Object.assign(this, { text, value, selected }); }
}

// Puts the names that modules expect into the global scope; frames run when `frame` is called.
export function install() {
  const frames = [];
  const clock = { now: 0 };
  Object.assign(globalThis, {
    Option: FakeOption, HTMLSelectElement: class extends FakeNode {}, HTMLInputElement: class extends FakeNode {},
    HTMLButtonElement: class extends FakeNode {}, document: { createElement: () => new FakeNode() },
    requestAnimationFrame: (callback) => frames.push(callback),
  });
  globalThis.performance.now = () => clock.now;
  return {
    frame(now) {
      clock.now = now;
      for (const callback of frames.splice(0)) callback(now);
    },
  };
}

export class FakeRoot {
  constructor(ids, acts = []) {
    this.nodes = ids.map((id) => new FakeNode(id));
    this.buttons = acts.map((act) => new FakeNode("", { act }));
  }

  addEventListener() {}

  querySelectorAll(selector) {
    return selector === "[id]" ? this.nodes : this.buttons;
  }
}

export function keyPress(key, from, keys = {}) {
  return { key, shiftKey: false, ctrlKey: false, metaKey: false, altKey: false, composedPath: () => [from], preventDefault() {}, stopPropagation() {}, ...keys };
}
