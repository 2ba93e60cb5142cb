// The address behind `#` says what is shown and keeps every choice, so that it can be sent to somebody else.

// "#/run/0/step/12?sort=spread" -> {parts: ["run", "0", "step", "12"], query: {sort: "spread"}}
export function parsed(hash) {
  const [path, search] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, query: Object.fromEntries(new URLSearchParams(search || "")) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch (error) {
    if (error instanceof URIError) return text;
    throw error;
  }
}

export function link(parts, query = {}) {
  return "#/" + parts.map(encodeURIComponent).join("/") + search(query);
}

// Empty choices are left out, so that a default never appears in an address.
export function search(query) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return kept.length ? "?" + new URLSearchParams(kept) : "";
}

// In a notebook the page is the text of a frame: its links are relative to the notebook's own address.
const inNotebook = location.protocol === "about:";

export function keepLinksInside() {
  if (!inNotebook) return;
  document.addEventListener("click", (event) => {
    const found = event.target.closest("a[href^='#']");
    if (!found || event.defaultPrevented) return;
    event.preventDefault();
    go(found.getAttribute("href"));
  });
}

export function go(address) {
  location.hash = address;
}

// Change choices of the page that is shown without a new entry in the browser's history.
export function choose(choices) {
  const { parts, query } = parsed(location.hash);
  const address = link(parts, { ...query, ...choices });
  if (inNotebook) return go(address);
  history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

// The page above this one: where Backspace and Escape go.
export function above(parts) {
  const [, run, page, ...rest] = parts;
  if (parts[0] !== "run") return link([]);
  if (page === "rollout") return link(["run", run, "group", ...rest.slice(0, 3)]);
  if (page === "group") return rest[0] === "rollouts" ? link(["run", run, "step", rest[1]]) : link(["run", run, "held-out"]);
  if (page === "step") return link(["run", run]);
  if (page === "problem") return link(["run", run, "problems"]);
  return page ? link(["run", run]) : link([]);
}
