// Rollouts as a table that scrolls through any number of rows: only what is in sight is asked for, 100 rows at a time.
import { choose, link } from "./address.js";
import { exported, get, pathOf } from "./api.js";
import { outcomeColour, scaleOf } from "./colours.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { counted, evaluationName, judgement, number, plain } from "./format.js";
import { Empty, Fault, Outcome, SearchField, Select, Signed, Skeleton, Tag } from "./parts.js";

const PAGE = 100;
const ROW_PX = 34;
const BY_LENGTH = [["length", "shortest"], ["-length", "longest"]];
const SORTS = {
  rollouts: [["", "in order"], ["reward", "lowest reward"], ["-reward", "highest reward"], ...BY_LENGTH, ["-advantage", "highest advantage"], ["advantage", "lowest advantage"]],
  evaluations: [["", "in order"], ["judged", "wrong first"], ["-judged", "right first"], ...BY_LENGTH],
};
const FILTERS = ["evaluation", "sampling", "outcome", "term", "low", "high", "length_low", "length_high", "text", "sort"];
const CLEARED = Object.fromEntries(FILTERS.map((name) => [name, ""]));
const EVALUATIONS = [{ value: "", label: "all evaluations" }, ...["before", "brief", "after"].map((value) => ({ value, label: evaluationName(value) }))];
const SAMPLINGS = [{ value: "", label: "greedy and sampled" }, { value: "sampled", label: "sampled" }, { value: "greedy", label: "greedy" }];

// Pages of 100 rows by their number, asked for as they come into sight.
function usePages(path, filters, version) {
  const [found, setFound] = useState({ key: null, pages: new Map(), head: null });
  const asked = useRef(new Set());
  const key = pathOf(path, filters);
  useEffect(() => { asked.current = new Set(); }, [key, version]);
  async function ask(page) {
    const name = `${key} ${version} ${page}`;
    if (asked.current.has(name)) return;
    asked.current.add(name);
    const where = pathOf(path, { ...filters, offset: page * PAGE, limit: PAGE });
    try {
      const head = await get(where);
      setFound((now) => ({ key, head, pages: new Map(now.key === key ? now.pages : []).set(page, head.rows) }));
      if (!head.done && !exported) setTimeout(() => { asked.current.delete(name); setFound((now) => ({ ...now })); }, 50);
    } catch (error) {
      setFound((now) => ({ ...now, key, head: { ...(now.head || { rows: [], outcomes: [], terms: [] }), faults: [error.message], failed: true } }));
    }
  }
  return [found.key === key ? found : { ...found, pages: new Map() }, ask];
}

export function RolloutList({ run, source, step, query, version, tall }) {
  const filters = { source, step, ...Object.fromEntries(FILTERS.map((name) => [name, query[name]])) };
  const [found, ask] = usePages(`/api/run/${run}/rows`, filters, version);
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [at, setAt] = useState(0);
  const { head, pages } = found;
  const matches = head ? head.matches : 0;
  const first = Math.max(0, Math.floor(view.top / ROW_PX) - 5);
  const last = Math.min(matches, Math.ceil((view.top + view.height) / ROW_PX) + 5);
  useEffect(() => {
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page++) ask(page);
  });
  useMove(box, at, setAt, matches);
  const noted = (event) => setView({ top: event.target.scrollTop, height: event.target.clientHeight });
  const rows = [];
  const cells = CELLS[source].filter(([name]) => step === undefined || name !== "step");
  for (let place = first; place < last; place++) {
    const row = (pages.get(Math.floor(place / PAGE)) || [])[place % PAGE];
    rows.push(html`<${RolloutRow} key=${place} place=${place} row=${row} run=${run} on=${place === at} cells=${cells} />`);
  }
  return html`${!exported && html`<${Filters} head=${head} query=${query} source=${source} />`}${head && (head.faults || []).map((text) => html`<${Fault} text=${text} />`)}
    ${head && !head.failed && html`<p class="note" role="status">${progress(head)}</p>`}
    ${!head && html`<${Skeleton} lines=${10} />`}${head && head.done && !matches ? html`<${Empty}>No rollouts match these filters.<//>` : html`<div class=${"virtual" + (tall ? " tall" : "")} ref=${box}
      data-scroller onScroll=${noted} role="table" aria-rowcount=${matches} aria-label="rollouts"><${Titles} cells=${cells} /><div role="rowgroup" style=${{ height: matches * ROW_PX + "px" }}>${rows}</div></div>`}`;
}

function progress(head) {
  const share = head.matches === head.total ? counted(head.total, "rollout") : `${number(head.matches)} of ${counted(head.total, "rollout")} match`;
  return head.done ? share : `${share} so far; ${number(head.looked_at)} of ${number(head.of_files)} files searched`;
}

// j and k move over rows that may not be on the page yet.
function useMove(box, at, setAt, matches) {
  useEffect(() => {
    const node = box.current;
    if (!node) return undefined;
    const moved = (event) => {
      const inside = node.contains(document.activeElement);
      const next = Math.min(matches - 1, Math.max(0, inside ? at + event.detail : Math.round(node.scrollTop / ROW_PX)));
      setAt(next);
      const top = next * ROW_PX;
      if (top < node.scrollTop) node.scrollTop = top;
      if (top + 2 * ROW_PX > node.scrollTop + node.clientHeight) node.scrollTop = top + 2 * ROW_PX - node.clientHeight;
      requestAnimationFrame(() => { const row = node.querySelector(`[data-place="${next}"]`); if (row) row.focus({ preventScroll: true }); });
    };
    node.addEventListener("move", moved);
    return () => node.removeEventListener("move", moved);
  });
}

// The cells before a rollout's outcome: [title, class, what is shown].
const STEP = ["step", "n", (row) => row.step];
const NAME = ["rollout", "n muted", (row) => `${row.evaluation ? row.draw : row.group}·${row.greedy ? row.sample : row.rollout}`];
const TOKENS = ["tokens", "n muted", (row) => number(row.length)];
const CELLS = {
  rollouts: [STEP, NAME, ["reward", "n", (row) => number(row.reward)],
    ["advantage", "n", (row) => html`<${Signed} value=${row.advantage} scale=${scaleOf({ name: "advantage" })} />`], TOKENS],
  evaluations: [STEP, ["evaluation", "evaluation", (row) => evaluationName(row.evaluation)], NAME, ["sampling", "sampling", (row) => (row.greedy ? "greedy" : "sampled")],
    ["judged", "sampling", (row) => html`<b>${judgement(row.judged)}</b>`], TOKENS],
};

function Titles({ cells }) {
  return html`<div class="row titles" role="row">${cells.map(([name, shape]) => html`<span role="columnheader" class=${shape} key=${name}>${name}</span>`)}
    <span role="columnheader">outcome</span><span role="columnheader" class="text">completion</span></div>`;
}

function RolloutRow({ place, row, run, on, cells }) {
  const style = { top: place * ROW_PX + "px" };
  if (!row) return html`<div class="row" style=${style} aria-hidden="true"><span class="bone"></span></div>`;
  const outcome = Object.values(row.outcomes)[0];
  const address = link(["run", run, "rollout", ...row.at.split("/")]);
  return html`<a class="row" role="row" data-place=${place} tabindex=${on ? 0 : -1} aria-rowindex=${place + 1} style=${style} href=${address}>
    ${cells.map(([name, shape, show]) => html`<span role="cell" class=${shape} key=${name}>${show(row)}</span>`)}
    <span role="cell">${outcome ? html`<${Outcome} name=${outcome} colour=${outcomeColour(outcome)} />` : row.finish}</span>
    <span role="cell" class="text">${row.replaced && html`<${Tag}>replaced<//> `}${plain(row.completion.slice(0, 200)).replaceAll("\n", " ↵ ")}</span></a>`;
}

function Filters({ head, query, source }) {
  const outcomes = [{ value: "", label: "any outcome" }, ...((head && head.outcomes) || []).map((one) => ({ value: one, label: plain(one.split(":").pop()) }))];
  const terms = [{ value: "", label: "any score" }, ...((head && head.terms) || []).map((one) => ({ value: one, label: plain(one) }))];
  const set = (name) => (event) => choose({ [name]: event.target.value });
  const field = (name, label) => html`<label class="field"><span>${label}</span>
    <input type="number" step="any" value=${query[name] || ""} onChange=${set(name)} /></label>`;
  const any = FILTERS.some((name) => query[name]);
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()} aria-label="filters">
    <${SearchField} places="the prompt or the completion" text=${query.text} onSearch=${(text) => choose({ text })} />
    ${source === "evaluations" && html`<${Select} label="evaluation" options=${EVALUATIONS} value=${query.evaluation || ""} onChange=${(value) => choose({ evaluation: value })} />
      <${Select} label="sampling" options=${SAMPLINGS} value=${query.sampling || ""} onChange=${(value) => choose({ sampling: value })} />`}
    <${Select} label="outcome" options=${outcomes} value=${query.outcome || ""} onChange=${(value) => choose({ outcome: value })} />
    <${Select} label="score" options=${terms} value=${query.term || ""} onChange=${(value) => choose({ term: value, low: "", high: "" })} />
    ${query.term && html`${field("low", "from")}${field("high", "to")}`}${field("length_low", "tokens from")}${field("length_high", "to")}
    <${Select} label="order" options=${SORTS[source].map(([value, label]) => ({ value, label }))} value=${query.sort || ""} onChange=${(value) => choose({ sort: value })} />
    ${any && html`<button type="button" class="plain" onClick=${() => choose(CLEARED)}>Clear</button>`}</form>`;
}

export function RowsPage({ run, query, version }) {
  const source = query.source === "evaluations" ? "evaluations" : "rollouts";
  return html`<h1 tabindex="-1">Rollouts</h1><div class="bar"><${Select} label="show" value=${source} onChange=${(value) => choose({ ...CLEARED, source: value === "rollouts" ? "" : value })}
    options=${[{ value: "rollouts", label: "training rollouts" }, { value: "evaluations", label: "held-out evaluations" }]} /></div>
    <${RolloutList} run=${run.run} source=${source} query=${query} version=${version} tall />`;
}
