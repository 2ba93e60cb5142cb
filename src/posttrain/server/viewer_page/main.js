// The frame around every page: where one is, the tabs of a run, colours, keys.
import { above, keepLinksInside, link, parsed } from "./address.js";
import { contents, exported, keepToken } from "./api.js";
import { html, mount, useEffect, useRef, useState } from "./dom.js";
import { counted, number, plain } from "./format.js";
import { listenForKeys, shown } from "./keys.js";
import { useResponse, useVersion } from "./loading.js";
import { pageOf, pages, tabsOf } from "./pages.js";
import { Empty, Fault, Skeleton } from "./parts.js";
import { RunList, State } from "./runs.js";
import { useThemeChoice } from "./theme.js";

const LIST_POLL_MS = 5000;

function useAddress() {
  const [address, setAddress] = useState(parsed(location.hash));
  useEffect(() => {
    const changed = () => setAddress(parsed(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

// Whether a run is to be followed: it is being written, or is about to be.
function goesOn(run, list) {
  return Boolean(run) && list.live && ["running", "not begun"].includes(run.state);
}

// Grows while a run of the list is running, so that the list follows.
function useTicks(running) {
  const [ticks, setTicks] = useState(0);
  useEffect(() => {
    if (!running || exported) return undefined;
    const timer = setInterval(() => setTicks((number) => number + 1), LIST_POLL_MS);
    return () => clearInterval(timer);
  }, [running]);
  return ticks;
}

// A new page starts at its heading; going back returns to the same height.
function usePlace(parts) {
  const heights = useRef(new Map());
  const path = parts.join("/");
  useEffect(() => {
    const noted = () => heights.current.set(path, scrollY);
    addEventListener("scroll", noted, { passive: true });
    const height = heights.current.get(path) || 0;
    requestAnimationFrame(() => scrollTo(0, height));
    const heading = document.querySelector("h1");
    if (heading && parts.length && document.activeElement === document.body) heading.focus({ preventScroll: true });
    return () => removeEventListener("scroll", noted);
  }, [path]);
}

function App() {
  const { parts: asked, query } = useAddress();
  const [running, setRunning] = useState(false);
  const { data, error } = useResponse("/api/runs", useTicks(running));
  const runs = data ? data.runs : [];
  const parts = exported && runs.length === 1 && !asked.length ? ["run", String(runs[0].run)] : asked; // a file of one run opens at it
  useEffect(() => setRunning(runs.some((run) => goesOn(run, data))), [data]);
  usePlace(parts);
  const run = parts[0] === "run" ? runs.find((one) => String(one.run) === parts[1]) : undefined;
  useEffect(() => { document.title = [...crumbs(parts, run).map(([name]) => name).reverse(), "posttrain"].join(" · "); });
  return html`<${Header} parts=${parts} run=${run} runs=${runs} /><main id="page">${exported && html`<${FileNote} />`}
    ${error && html`<${Fault} text=${error} />`}${!data && !error && html`<${Skeleton} />`}
    ${data && html`<${Shown} parts=${parts} query=${query} run=${run} runs=${runs} faults=${data.faults} live=${goesOn(run, data)} />`}</main>`;
}

function Shown({ parts, query, run, runs, faults, live }) {
  const version = useVersion(run ? run.run : null, live && !exported);
  const [place, , name = ""] = parts;
  const Page = place === "run" ? run && pageOf(run, name) : pages[place];
  if (!parts.length) return html`<${RunList} runs=${runs} faults=${faults} query=${query} />`;
  if (!Page) return html`<${Empty}>There is no page at this address. <a href="#/">All runs</a><//>`;
  return html`<${Page} key=${place + name} run=${run} runs=${runs} rest=${parts.slice(place === "run" ? 3 : 1)} query=${query} runs=${runs}
    version=${version} />`;
}

// What a file that was exported leaves out.
function FileNote() {
  const { rollouts, of, left_out: leftOut } = contents;
  const missing = leftOut.length ? ` ${counted(leftOut.length, "page")} did not fit.` : "";
  return html`<p class="note exported" role="status">This file has ${number(rollouts)} of ${counted(of, "rollout")}.${missing}${
    (rollouts < of || missing) && html` Open the run folder with <code>posttrain view</code> to see all.`}</p>`;
}

function Header({ parts, run, runs }) {
  const [theme, nextTheme] = useThemeChoice();
  const keys = useRef(null);
  const page = parts[2] || "";
  return html`<header class="top"><a class="skip" href="#page" onClick=${skip}>Skip to the page</a>
    <nav class="crumbs" aria-label="breadcrumbs"><a class="brand" href="#/">posttrain</a>
      ${crumbs(parts, run).map(([label, address]) => html`<span aria-hidden="true">›</span><a href=${address} key=${address}>${label}</a>`)}
      ${run && html`<${State} state=${run.state} />`}</nav>
    <div class="tools"><button type="button" data-key="t" onClick=${nextTheme} title="colours: system, light or dark (t)">${{ system: "◐ system", light: "○ light", dark: "● dark" }[theme]}</button>
      <button type="button" data-key="?" aria-label="keys" title="keys (?)" onClick=${() => keys.current.showModal()}>?</button></div>
    ${run && html`<nav class="tabs" aria-label="pages of this run">${tabsOf(run, runs).map((tab, place) => html`<a key=${tab.page}
      data-key=${place < 9 ? place + 1 : undefined} href=${tab.href} aria-current=${tab.holds.includes(page) ? "page" : undefined}
      >${tab.label}</a>`)}</nav>`}
    <dialog ref=${keys} class="keys" aria-label="keys" onKeyDown=${(event) => event.key === "?" && keys.current.close()}>
      <h2>Keys</h2><dl>${shown.map(([key, does]) => html`<dt key=${key}>${key.split("  ").map((one) => html`<kbd>${one}</kbd>`)}</dt><dd>${does}</dd>`)}</dl>
      <form method="dialog"><button>Close</button></form></dialog></header>`;
}

function skip(event) {
  event.preventDefault();
  const heading = document.querySelector("#page h1");
  if (heading) heading.focus();
}

// The pages above this one, this one last.
function crumbs(parts, run) {
  if (!run) return parts.length ? [[parts[0], link(parts)]] : [];
  const found = [];
  for (let at = parts; at.length > 2; at = parsed(above(at)).parts) found.unshift([label(at), link(at)]);
  return [[plain(run.name), link(["run", run.run])], ...found];
}

function label([, , page, ...rest]) {
  if (page === "step") return `step ${rest[0]}`;
  if (page === "group") return rest[0] === "rollouts" ? `group ${rest[2]}` : `step ${rest[1]}, problem ${rest[2]}`;
  if (page === "rollout") return `rollout ${rest[3]}`;
  return plain(page === "problem" ? rest.join("/") : { rows: "rollouts" }[page] || page);
}

keepToken();
keepLinksInside();
listenForKeys();
mount(html`<${App} />`, document.getElementById("app"));
