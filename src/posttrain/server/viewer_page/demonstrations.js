// Held-out demonstrations of a supervised run: the loss of each token, before training and along the way.
import { choose } from "./address.js";
import { pathOf } from "./api.js";
import { html, useState } from "./dom.js";
import { counted, number, plain } from "./format.js";
import { Loaded } from "./loading.js";
import { Choice, Empty, Legend, Select } from "./parts.js";
import { TokenText } from "./tokens.js";

const FULL = 3; // nats, the full colour of a loss; a change has it on both sides
const SHOWN = 8;
const VIEWS = [{ value: "", label: "loss" }, { value: "before", label: "loss before training" }, { value: "change", label: "change" }];

export function DemonstrationsPage({ run, query, version }) {
  return html`<h1 tabindex="-1">Demonstrations</h1><${Loaded} path=${pathOf(`/api/run/${run.run}/demonstrations`, { step: query.step })} version=${version} lines=${12}>
    ${(page) => html`<${Demonstrations} page=${page} query=${query} />`}<//>`;
}

function Demonstrations({ page, query }) {
  const limit = Number(query.limit) || SHOWN;
  if (!page.rows.length) return html`${page.lacks.map((text) => html`<${Empty} key=${text}>${plain(text)}<//>`)}`;
  const hasBefore = page.rows.some((row) => row.before.length);
  const shown = hasBefore ? query.show || "" : "";
  const scale = { full: FULL, signed: shown === "change", middle: 0 };
  return html`<p class="note">Held-out rows, measured at ${counted(page.steps.length, "step")}. Each learned token has a loss, −log π in nats: 0 is certain, 0.69 a coin flip.</p>
    <div class="bar"><${Select} label="step" value=${String(page.step)} onChange=${(step) => choose({ step })}
        options=${page.steps.map((step) => ({ value: String(step), label: String(step) }))} />
      ${hasBefore && html`<${Choice} label="Colour" name="show" value=${shown} options=${VIEWS} onChange=${(value) => choose({ show: value })} />`}
      <${Legend} scale=${scale} label=${VIEWS.find((one) => one.value === shown).label} unit="nats" /></div>
    ${page.rows.slice(0, limit).map((row) => html`<${Demonstration} key=${row.example} row=${row} shown=${shown} scale=${scale} />`)}
    ${page.rows.length > limit && html`<p class="note"><button type="button" class="plain" onClick=${() => choose({ limit: limit + SHOWN })}>Show more of ${page.rows.length}</button></p>`}`;
}

function valuesOf(row, shown) {
  if (shown === "before") return row.before;
  if (shown !== "change") return row.losses;
  return row.losses.map((loss, place) => (loss === null || row.before[place] === null ? null : loss - row.before[place]));
}

function Demonstration({ row, shown, scale }) {
  const [at, setAt] = useState(0);
  const values = valuesOf(row, shown);
  const say = (place) => `${plain(JSON.stringify(row.pieces[place].text))}, ${values[place] === null ? "read only" : number(values[place]) + " nats"}`;
  return html`<article class="card demonstration"><header><b>row ${row.example + 1}</b>
      <span class="n">mean loss ${row.mean_before === null ? "" : html`${number(row.mean_before)} → `}<b>${number(row.mean)}</b></span>
      <span class="muted n">${counted(row.losses.filter((loss) => loss !== null).length, "learned token")}</span></header>
    <${TokenText} pieces=${row.pieces} values=${values} scale=${scale} spaces=${false} spans=${{}} turns=${[]} at=${at} onPick=${setAt} say=${say} /></article>`;
}
