// All steps of a run as a table: each row opens its step.
import { choose, go, link } from "./address.js";
import { heat, scaleOf } from "./colours.js";
import { html } from "./dom.js";
import { number, percent } from "./format.js";
import { Loaded } from "./loading.js";
import { Empty, Section } from "./parts.js";

const SHOWN = 1000;

export function StepTable({ run, query, version }) {
  return html`<${Section} id="steps" title="Steps"><${Loaded} path=${`/api/run/${run}/steps?source=rollouts`} version=${version}>
    ${({ steps }) => (steps.length ? html`<${Table} run=${run} steps=${steps} limit=${Number(query.limit) || SHOWN} />` : html`<${Empty}>No rollouts yet.<//>`)}<//><//>`;
}

function Table({ run, steps, limit }) {
  const replaced = steps.some((row) => row.replaced);
  const scale = scaleOf({ name: "reward" });
  return html`<div class="scroll tall"><table class="rows steps"><thead><tr><th>step</th><th class="n">reward</th><th class="n">held-out</th>
    <th class="n">rollouts</th><th class="n">groups</th><th class="n">without signal</th>${replaced && html`<th class="n">replaced</th>`}<th class="n">length</th></tr></thead>
    <tbody>${steps.slice(0, limit).map((row) => html`<tr key=${row.step} onClick=${() => go(link(["run", run, "step", row.step]))}>
      <th scope="row"><a data-item class="open" href=${link(["run", run, "step", row.step])}>${row.step}</a></th>
      <td class=${"n " + heat(row.reward, scale)}>${number(row.reward)}</td><td class="n">${row.accuracy === null ? "" : percent(row.accuracy)}</td>
      <td class="n">${row.rows === null ? "unreadable" : number(row.rows)}</td><td class="n">${number(row.groups)}</td>
      <td class="n">${percent(row.uninformative)}</td>${replaced && html`<td class="n">${row.replaced ? number(row.replaced) : ""}</td>`}
      <td class="n">${number(row.mean_length)}</td></tr>`)}</tbody></table></div>
    ${steps.length > limit && html`<p class="note"><button type="button" class="plain" onClick=${() => choose({ limit: limit + 500 })}>
      Show more of ${number(steps.length)} steps</button></p>`}`;
}
