// How often completions show each behaviour over training; a point opens examples.
import { choose, link } from "./address.js";
import { exported, get } from "./api.js";
import { Chart } from "./charts.js";
import { html, useEffect, useState } from "./dom.js";
import { number, percent, plain, words } from "./format.js";
import { Empty, Fault, Skeleton } from "./parts.js";

const AGAIN_MS = 20;

// The server reads some files for each response: ask until it has read all of them.
function useBehaviours(path, version) {
  const [found, setFound] = useState({});
  useEffect(() => {
    let current = true;
    async function ask() {
      try {
        const data = await get(path);
        if (!current) return;
        setFound({ data });
        if (!data.done && !exported) setTimeout(ask, AGAIN_MS);
      } catch (error) {
        if (current) setFound((now) => ({ ...now, error: error.message }));
      }
    }
    ask();
    return () => { current = false; };
  }, [path, version]);
  return found;
}

export function BehavioursView({ run, query, version }) {
  const { data, error } = useBehaviours(`/api/run/${run.run}/behaviours`, version);
  const known = data ? data.behaviours.filter((one) => one.points.length) : [];
  return html`<h1 tabindex="-1">Behaviours</h1><p class="note">Share of completions that show each behaviour, with 95% intervals. Click a point for examples.</p>
    ${error && html`<${Fault} text=${error} />`}${!data && !error && html`<${Skeleton} lines=${10} />`}
    ${data && data.faults.map((text) => html`<${Fault} text=${text} />`)}
    ${data && !data.done && html`<p class="note" role="status">Read ${number(data.read)} of ${number(data.of_files)} files.</p>`}
    ${data && data.done && !known.length && html`<${Empty}>This run has no completions.<//>`}
    <section class="panels behaviours">${known.map((one) => html`<${Behaviour} key=${one.name} run=${run} one=${one} query=${query} />`)}</section>`;
}

function Behaviour({ run, one, query }) {
  const column = (name) => one.points.map((point) => point[name]);
  const line = { name: one.name, steps: column("step"), values: column("share"), low: column("low"), high: column("high") };
  const open = query.behaviour === one.name ? one.points.find((point) => String(point.step) === query.step) : undefined;
  return html`<div class="behaviour"><${Chart} title=${words(one.name)} lines=${[line]} percents sync="behaviours" onOpen=${(step) => choose({ behaviour: one.name, step })} />
    <p class="note">${plain(one.says)}</p><${StepChoice} one=${one} open=${open} />
    ${open && html`<div class="examples"><h4>Step ${open.step}: ${percent(open.share)} of completions</h4>${open.examples.length
      ? html`<p class="links">${open.examples.map((example) => html`<a key=${example.at} data-item href=${link(["run", run.run, "rollout", ...example.at.split("/")])}>${plain(example.label)}</a>`)}</p>`
      : html`<p class="note">No examples at this step.</p>`}</div>`}</div>`;
}

// The same by keyboard: a step is chosen from a list.
function StepChoice({ one, open }) {
  return html`<label class="field"><span>examples of step</span><select value=${open ? open.step : ""} onChange=${(event) => choose({ behaviour: one.name, step: event.target.value })}>
    <option value="">choose</option>${one.points.map((point) => html`<option key=${point.step} value=${point.step} selected=${open && open.step === point.step}>${point.step}</option>`)}</select></label>`;
}
