// Next to a rollout's text: its scores, the numbers of the token in hand, what graders read, and the row it came from.
import { link } from "./address.js";
import { heat, outcomeColour, scaleOf } from "./colours.js";
import { html } from "./dom.js";
import { counted, evaluationName, judgement, number, percent, plain, words } from "./format.js";
import { Fact, Outcome, Section, Signed, Tag } from "./parts.js";
import { callText, tokenName } from "./tokens.js";

export function Facts({ page }) {
  const { row } = page;
  return html`<dl class="facts">${(row.reward !== null || row.judged === null) && html`<${Fact} name="reward"><b>${number(row.reward)}</b><//>`}
    ${row.judged !== null && html`<${Fact} name="by the task"><b>${judgement(row.judged)}</b><//>`}
    ${row.advantage !== null && html`<${Fact} name="advantage"><${Signed} value=${row.advantage} scale=${scaleOf({ name: "advantage" })} /><//>`}
    ${Object.entries(row.outcomes).map(([name, outcome]) => html`<${Fact} key=${name} name=${plain(name)}>
      <${Outcome} name=${outcome} colour=${outcomeColour(outcome)} /><//>`)}
    ${Object.keys(row.scores).length > 1 && Object.entries(row.scores).map(([name, score]) => html`<${Fact} key=${"s" + name} name=${plain(name)}>${number(score)}<//>`)}
    <${Fact} name="finish">${words(row.finish)}<//><${Fact} name="tokens">${number(row.length)}<//>
    ${row.evaluation && html`<${Fact} name="evaluation">${evaluationName(row.evaluation)}${row.greedy && ", greedy"}<//>`}
    ${page.weights_version !== null && html`<${Fact} name="sampled after" title="optimiser updates of the weights that sampled it">${counted(page.weights_version, "update")}<//>`}
    ${row.replaced && html`<${Tag} tone="warn">its group was replaced<//>`}${page.failure && html`<${Tag} tone="warn">${plain(page.failure)}<//>`}</dl>`;
}

// A token and its number in words: its label for those who do not see colours.
export function sentence(page, quantity, at) {
  const piece = page.completion[at];
  const value = quantity && quantity.values[at];
  return `${tokenName(piece)}${value === null || value === undefined ? "" : `, ${quantity.label} ${number(value)}`}`;
}

export function Reading({ page, at, chosen }) {
  const piece = page.completion[Math.min(at, page.completion.length - 1)];
  const alternatives = (page.alternatives && page.alternatives[at]) || [];
  const updates = page.quantities.map((one) => one.update).filter((update) => update !== undefined);
  const update = chosen?.update ?? Math.max(...updates);
  const shown = page.quantities.filter((one) => one.update === undefined || one.update === update);
  const rows = shown.filter((one) => one.values[at] !== null && one.values[at] !== undefined);
  const ofUpdate = shown.filter((one) => one.update !== undefined).map((one) => one.label.split(", update")[0]);
  return html`<section class="reading-box" aria-live="off" aria-label="token"><h2>Token ${at} <code>${tokenName(piece)}</code></h2>
    <table class="pairs"><tbody><tr><th scope="row">id</th><td class="n">${piece.id}</td></tr>
      ${!piece.sampled && html`<tr><th scope="row">given</th><td class="n">not sampled</td></tr>`}
      ${rows.map((one) => html`<tr key=${one.name} class=${one === chosen ? "on" : ""}><th scope="row" title=${one.unit}>${one.label.split(", update")[0]}</th>
        <td class=${"n " + paleOrHeat(one, at)}>${one.unit === "yes or no" ? (one.values[at] ? "yes" : "no") : number(one.values[at], 4)}${one.unit === "nats" && html`<span class="unit">nats</span>`}</td></tr>`)}</tbody></table>
    ${updates.length > 0 && html`<p class="note">From update ${update} of the step, before it changed the weights: ${ofUpdate.join(", ")}.</p>`}
    ${alternatives.length > 0 && html`<h3>Likeliest tokens</h3><ol class="alternatives">${alternatives.map((one) => html`<li key=${one.id} class=${one.id === piece.id ? "on" : ""}>
      <code>${plain(JSON.stringify(one.text))}</code><span class="share-bar"><i style=${{ width: 100 * Math.exp(one.logprob) + "%" }}></i></span><span class="n">${share(Math.exp(one.logprob))}</span></li>`)}</ol>`}</section>`;
}

function share(probability) {
  return probability < 1e-4 ? "< 0.01%" : percent(probability);
}

// A quantity without a fixed scale has no colour here: it could not be compared.
function paleOrHeat(quantity, at) {
  const scale = scaleOf(quantity);
  return scale.own ? "" : heat(quantity.values[at], scale);
}

export function Graders({ page, run, onHold }) {
  const siblings = page.siblings || [];
  const tokenOf = (span) => Math.max(0, page.offsets.findIndex((offset) => offset + page.prefill.length > span.start) - 1);
  return html`${page.spans.length + page.notes.length > 0 && html`<${Section} id="graders" title="What graders read"><ul class="spans">
      ${page.spans.map((span, place) => html`<li key=${place}><button type="button" class="plain" onClick=${() => onHold(tokenOf(span))}>
        <i class=${"swatch mark-" + span.kind} aria-hidden="true"></i>${plain(span.function)}: ${span.kind}</button>
        ${span.value !== null && html`<span class="n"> ${number(span.value)}</span>`} <span class="muted">${plain(span.says)}</span></li>`)}
      ${page.notes.map((note, place) => html`<li key=${"n" + place}>${plain(note)}</li>`)}</ul><//>`}
    ${page.turns.length > 0 && html`<${Section} id="turns" title="Turns"><ol class="spans">${page.turns.map((turn, place) => html`<li key=${place}>
      ${turn.calls.map(callText).join(", ") || `turn ${place + 1}`}: ${counted(turn.given, "token")} in reply${turn.reward !== null && `, reward ${number(turn.reward)}`}</li>`)}</ol><//>`}
    ${siblings.length > 0 && html`<${Section} id="siblings" title="Same prompt"><p class="siblings">${siblings.map((one) => html`<a key=${one.at}
      href=${link(["run", run, "rollout", ...one.at.split("/")])} aria-current=${one.at === page.row.at ? "page" : undefined}>${plain(one.label)}</a>`)}</p><//>`}`;
}

export function DatasetRow({ page }) {
  const extras = Object.entries(page.extras || {});
  if (!page.columns && !extras.length) return null;
  return html`<${Section} id="row" title="Row of the data set"><p class="note">${plain(page.row.prompt_id)}</p>
    ${page.columns && html`<pre class="code">${plain(page.columns)}</pre>`}
    ${extras.length > 0 && html`<table class="pairs"><tbody>${extras.map(([name, value]) => html`<tr key=${name}><th scope="row">${plain(name)}</th>
      <td>${plain(typeof value === "object" ? JSON.stringify(value) : value)}</td></tr>`)}</tbody></table>`}<//>`;
}
