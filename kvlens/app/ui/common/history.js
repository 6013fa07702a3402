// @ts-check
// One place is one entry of the browser's history. Streamlit 1.67 adds one whenever a script writes the address: also
// where the page only completes what a link or the menu left open, so that Back leads to an address which the page
// completes again; and a script that leaves for another page writes the new query on the page it leaves first.
(() => {
  const push = history.pushState.bind(history);
  const replace = history.replaceState.bind(history);
  const OTHER_VIEWS = ["job", "race", "whatif", "hold", "drop", "from", "budget"]; // what a page shows instead of what it showed
  /** @type {{ from: string, whole: boolean } | null} */
  let last = null; // the newest change of the query alone, since a person did anything: what comes then is no part of it
  let added = false; // whether an entry was added since: the page they left may still write its address over the new one
  const begins = () => { last = null; added = false; };
  for (const done of ["pointerdown", "keydown", "popstate"]) addEventListener(done, begins, true);

  /** `to` says all that `from` says, and more of the same view. @param {URL} from @param {URL} to */
  const completes = (from, to) =>
    [...from.searchParams].every(([name, value]) => to.searchParams.getAll(name).includes(value)) &&
    OTHER_VIEWS.every((name) => from.searchParams.get(name) === to.searchParams.get(name));

  const add = (/** @type {Parameters<typeof push>} */ ...entry) => {
    const first = !added;
    added = true;
    return (first ? push : replace)(...entry);
  };

  history.pushState = (state, title, address) => {
    const from = new URL(location.href);
    const to = new URL(address ?? location.href, location.href);
    if (to.pathname === from.pathname) {
      const whole = completes(from, to);
      last = { from: from.href, whole };
      return (whole ? replace : add)(state, title, address);
    }
    const said = last;
    last = null;
    if (!said || to.search !== from.search) return add(state, title, address);
    if (!said.whole) return replace(state, title, address);
    replace({}, "", said.from);
    return add(state, title, address);
  };
})();
