// One rollout: every token with its numbers, what the graders read, and its place among its siblings.
import { choose, link } from "./address.js";
import { baseOf, scaleOf } from "./colours.js";
import { html, useEffect, useMemo, useState } from "./dom.js";
import { plain } from "./format.js";
import { Loaded } from "./loading.js";
import { Choice, Empty, Legend, Select } from "./parts.js";
import { DatasetRow, Facts, Graders, Reading, sentence } from "./rollout_facts.js";
import { Pieces, PlainText, spansByToken, TokenText } from "./tokens.js";

export function RolloutView({ run, rest, query, version }) {
  const path = rest.map(encodeURIComponent).join("/");
  return html`<${Loaded} path=${`/api/run/${run.run}/rollout/${path}`} version=${version} lines=${16}>
    ${(page) => html`<${Rollout} key=${page.row.at} run=${run.run} page=${page} query=${query} />`}<//>`;
}

function Rollout({ run, page, query }) {
  const { row, completion, quantities } = page;
  const chosen = quantities.find((one) => one.name === query.colour) || quantities[0];
  const off = query.colour === "none";
  const quantity = off ? undefined : chosen;
  const scale = useMemo(() => quantity && scaleOf(quantity), [quantity]);
  const spans = useMemo(() => spansByToken(page.offsets, page.spans, page.prefill.length), [page]);
  const [at, setAt] = useState(Math.max(0, Math.min(Number(query.token) || 0, completion.length - 1)));
  const hold = (place) => { setAt(place); choose({ token: place || "" }); };
  useEffect(() => { if (query.token) document.querySelector(`[data-at="${at}"]`)?.scrollIntoView({ block: "center" }); }, []);
  const spaces = query.spaces !== "off";
  const near = (side) => page.neighbours[side] && html`<a rel=${side === "next" ? "next" : "prev"} title=${side === "next" ? "next rollout (j)" : "previous rollout (k)"}
    href=${link(["run", run, "rollout", ...page.neighbours[side].split("/")], { ...query, token: "" })}>${side === "next" ? "next →" : "← previous"}</a>`;
  return html`<div class="title"><h1 tabindex="-1">Rollout ${row.rollout} <span class="muted">of group ${row.group}, step ${row.step}</span></h1>
      <nav class="near" aria-label="other rollouts">${near("previous")}${near("next")}</nav></div>
    <${Facts} page=${page} />
    <div class="reader"><div class="main"><${Prompt} page=${page} spaces=${spaces} />
      <section class="text" aria-label="completion"><div class="text-head"><h2>Completion</h2>
        <${Controls} quantities=${quantities} chosen=${quantity} spaces=${spaces} /></div>
        ${quantity && html`<${Legend} scale=${scale} label=${quantity.label} unit=${quantity.unit} />`}
        ${completion.length ? html`<${TokenText} pieces=${completion} values=${quantity && quantity.values} scale=${scale} spaces=${spaces} spans=${spans}
          turns=${page.turns} at=${at} onPick=${setAt} onHold=${hold} say=${(place) => sentence(page, quantity, place)} />`
          : page.completion_text ? html`<${PlainText} text=${page.completion_text} spaces=${spaces} />` : html`<${Empty}>The completion is empty.<//>`}</section></div>
      <aside class="side" aria-label="numbers">${completion.length > 0 && html`<${Reading} page=${page} at=${at} chosen=${quantity} />`}
        <${Graders} page=${page} run=${run} onHold=${hold} /><${DatasetRow} page=${page} /></aside></div>`;
}

function Prompt({ page, spaces }) {
  return html`<section class="text" aria-label="prompt"><h2>Prompt</h2>
    ${page.prompt.length ? html`<${Pieces} pieces=${page.prompt} spaces=${spaces} />` : html`<${PlainText} text=${page.prompt_text} spaces=${spaces} />`}
    ${page.prefill && html`<p class="note">The last ${page.prefill.length} characters are a prefill, and graded with the completion:
      <code>${plain(page.prefill)}</code></p>`}</section>`;
}

function Controls({ quantities, chosen, spaces }) {
  const bases = [...new Map(quantities.map((one) => [baseOf(one.name), one])).values()]; // the last update of each
  const options = [...bases.map((one) => ({ value: baseOf(one.name), label: one.label.split(", update")[0] })), { value: "none", label: "none" }];
  const base = chosen ? baseOf(chosen.name) : "none";
  const updates = quantities.filter((one) => baseOf(one.name) === base && one.update !== undefined);
  const pick = (value) => choose({ colour: value === "none" ? value : bases.find((one) => baseOf(one.name) === value).name });
  const turn = () => pick(options[(options.findIndex((one) => one.value === base) + 1) % options.length].value);
  return html`<div class="controls">${quantities.length > 0 && html`<${Choice} label="Colour" name="colour" value=${base} options=${options} onChange=${pick} />`}
    ${updates.length > 1 && html`<${Select} label="update" value=${chosen.name} onChange=${(value) => choose({ colour: value })}
      options=${updates.map((one) => ({ value: one.name, label: String(one.update) }))} />`}
    <button type="button" class="hidden" data-key="c" tabindex="-1" aria-hidden="true" onClick=${turn}></button>
    <label class="tick"><input type="checkbox" data-key="w" checked=${spaces} onChange=${() => choose({ spaces: spaces ? "off" : "" })} />white space</label></div>`;
}
