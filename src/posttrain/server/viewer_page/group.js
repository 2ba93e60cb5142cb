// A group: the completions of one prompt side by side, and the token at which each leaves the others.
import { choose, link } from "./address.js";
import { outcomeColour, scaleOf } from "./colours.js";
import { html, useMemo } from "./dom.js";
import { counted, number, plain } from "./format.js";
import { Loaded } from "./loading.js";
import { Outcome, Select, Signed, Tag, Visible } from "./parts.js";
import { Pieces, PlainText } from "./tokens.js";

const ORDERS = {
  "": ["highest reward first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  low: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  drawn: ["sample order", (a, b) => a.sample - b.sample],
  parts: ["earliest difference first", (a, b) => a.parts_at - b.parts_at],
  long: ["longest first", (a, b) => b.pieces.length - a.pieces.length],
};
const TOKENS_IN_A_CARD = 1500;

export function GroupView({ run, rest, query, version }) {
  const [source, step, group] = rest;
  return html`<${Loaded} path=${`/api/run/${run.run}/group/${[source, step, group].map(encodeURIComponent).join("/")}`} version=${version} lines=${16}>
    ${(page) => html`<${Group} run=${run.run} page=${page} query=${query} />`}<//>`;
}

function Group({ run, page, query }) {
  const rollouts = useMemo(() => [...page.rollouts].sort((ORDERS[query.order || ""] || ORDERS[""])[1]), [page, query.order]);
  const near = (side) => page.neighbours[side] && html`<a rel=${side === "next" ? "next" : "prev"} href=${link(["run", run, "group", ...page.neighbours[side].split("/")], query)}
    title=${side === "next" ? "next group (→)" : "previous group (←)"}>${side === "next" ? "next →" : "← previous"}</a>`;
  const held = page.source === "evaluations";
  return html`<div class="title"><h1 tabindex="-1">${held ? plain(page.prompt_id) : `Group ${page.group}`} <span class="muted">of step ${page.step}</span></h1>
      <nav class="near" aria-label="other groups">${near("previous")}${near("next")}</nav></div>
    <p class="note"><a href=${link(["run", run, "problem", page.prompt_id])}>${plain(page.prompt_id)}</a> · ${counted(rollouts.length, "completion")}</p>
    <section class="text" aria-label="prompt"><h2>Prompt</h2>${page.prompt.length ? html`<${Pieces} pieces=${page.prompt} spaces=${false} />`
      : html`<${PlainText} text=${page.prompt_text} spaces=${false} />`}</section>
    <div class="bar"><${Select} label="order" value=${query.order || ""} onChange=${(value) => choose({ order: value })}
      options=${Object.entries(ORDERS).map(([value, [label]]) => ({ value, label }))} />
      <span class="note"><i class="sample-parts" aria-hidden="true"></i> the first token that differs from most others; the part before it is grey</span></div>
    <div class="cards">${rollouts.map((one) => html`<${Card} key=${one.at} run=${run} one=${one} />`)}</div>`;
}

function Card({ run, one }) {
  const address = link(["run", run, "rollout", ...one.at.split("/")]);
  const pieces = one.pieces.slice(0, TOKENS_IN_A_CARD);
  return html`<article class="card"><header><a data-item class="open" href=${address}>${one.rollout}</a>
      <b class="n">${number(one.reward)}</b>${one.advantage !== null && html`<${Signed} value=${one.advantage} scale=${scaleOf({ name: "advantage" })} />`}
      ${one.outcome && html`<${Outcome} name=${one.outcome} colour=${outcomeColour(one.outcome)} />`}
      ${one.greedy && html`<${Tag}>greedy<//>`}${one.finish !== "stop" && html`<${Tag} tone="warn">${one.finish === "length" ? "cut off" : one.finish}<//>`}
      <span class="muted n">${one.pieces.length ? counted(one.pieces.length, "token") : ""}</span></header>
    ${one.pieces.length ? html`<div class="tokens">${pieces.map((piece, at) => html`<span key=${at} class=${place(at, one.parts_at, one.pieces.length) + (piece.special ? " special" : "")}><${Visible} text=${piece.text} spaces=${false} /></span>`)}${pieces.length < one.pieces.length && "…"}</div>`
      : html`<${PlainText} text=${one.text} spaces=${false} />`}</article>`;
}

function place(at, partsAt, length) {
  if (partsAt >= length) return "token"; // it never leaves what most say
  if (at < partsAt) return "token shared";
  return at === partsAt ? "token parts" : "token";
}
