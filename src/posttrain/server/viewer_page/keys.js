// Everything works without a mouse. Pages only mark their elements: `data-item` for what j and k move over, rel="prev" and
// rel="next" for neighbours, `data-search` for the search field, `data-key` for a button with a key.
import { above, go, link, parsed } from "./address.js";

export const shown = [
  ["j  k  ↓  ↑", "move down and up a list; next and previous rollout"],
  ["Enter", "open"],
  ["Backspace  Esc", "go up: rollout, group, step, run, list of runs"],
  ["←  →", "previous and next step, group or rollout; in a text, previous and next token; in a chart, its cursor"],
  ["+  −", "in a chart: zoom in at the cursor, show all steps"],
  ["/", "search"],
  ["1 … 9", "the tabs of a run"],
  ["c", "colour a rollout's tokens by the next quantity"],
  ["w", "show or hide white space"],
  ["t", "system, light or dark colours"],
  ["?", "show or hide these keys"],
];

export function listenForKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.matches("input[type=text], input[type=search], input[type=number], textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = document.querySelector("dialog[open]") ? null : acts[event.key] || press(event.key);
    if (act && act(event.target) !== false) event.preventDefault();
  });
}

const acts = {
  j: () => move(1) || follow("next"),
  k: () => move(-1) || follow("prev"),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  ArrowRight: (target) => !target.matches("input") && follow("next"),
  ArrowLeft: (target) => !target.matches("input") && follow("prev"),
  Backspace: up,
  Escape: up,
  "/": search,
};

// Move the focus over the items of the page; false where it has none.
function move(by) {
  const scroller = document.querySelector("[data-scroller]");
  if (scroller) return scroller.dispatchEvent(new CustomEvent("move", { detail: by }));
  const items = [...document.querySelectorAll("[data-item]")].filter((item) => item.offsetParent !== null);
  if (!items.length) return false;
  const at = items.indexOf(document.activeElement);
  const next = items[Math.min(items.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : items.length - 1) : at + by))];
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function follow(side) {
  const found = document.querySelector(`a[rel=${side}]`);
  if (!found || found.closest("[inert]")) return false;
  found.click();
  return true;
}

function up() {
  const { parts } = parsed(location.hash);
  if (!parts.length) return false;
  go(above(parts));
  return true;
}

function search() {
  const field = document.querySelector("[data-search]");
  if (field) {
    field.focus();
    field.select();
    return true;
  }
  const { parts } = parsed(location.hash);
  if (parts[0] !== "run") return false;
  go(link(["run", parts[1], "rows"], { find: "1" }));
  return true;
}

function press(key) {
  const button = [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key);
  return button && (() => button.click());
}
