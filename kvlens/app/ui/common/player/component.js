// @ts-check
// The player as a component of Streamlit: made once per place in the page, then handed what Python sends.

import { unpack } from "../../../../player/web/codec.js";
import { listen } from "../../../../player/web/listening.js";
import { Player } from "../../../../player/web/player.js";

/** @import { Commit } from "../../../../player/web/types.js" */

/** @type {WeakMap<ShadowRoot, Player>} */
const LIVE_PLAYERS = new WeakMap();

/** @param {{ data: Uint8Array, parentElement: ShadowRoot, setStateValue: Commit }} component */
export default function (component) {
  const { data, parentElement: root, setStateValue } = component;
  let player = LIVE_PLAYERS.get(root);
  if (!player || player.el.strip !== root.querySelector("#strip")) {
    player = new Player(root);
    LIVE_PLAYERS.set(root, player);
  }
  // This function runs again whenever Python sends data, without the clean-up of the time before.
  player.stopListening?.();
  player.stopListening = listen(player);
  player.receive(unpack(data), setStateValue);
  return () => player.stopListening();
}
