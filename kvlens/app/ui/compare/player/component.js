// @ts-check
// The view of two runs as a component of Streamlit: made once per place in the page, then handed what Python sends.

import { unpack } from "../../../../player/web/codec.js";
import { listen } from "../../../../player/web/listening.js";
import { PairView } from "./pair.js";

/** @import { Commit } from "../../../../player/web/types.js" */

/** @type {WeakMap<ShadowRoot, PairView>} */
const LIVE_PAIRS = new WeakMap();

/** @param {{ data: Uint8Array, parentElement: ShadowRoot, setStateValue: Commit }} component */
export default function (component) {
  const { data, parentElement: root, setStateValue } = component;
  let view = LIVE_PAIRS.get(root);
  if (!view || view.el.stripA !== root.querySelector("#stripA")) {
    view = new PairView(root);
    LIVE_PAIRS.set(root, view);
  }
  // This function runs again whenever Python sends data, without the clean-up of the time before.
  view.stopListening?.();
  view.stopListening = listen(view);
  view.receive(unpack(data).header, setStateValue);
  return () => view.stopListening();
}
