// The runs that the viewer was started with or found: one line each.
import { choose, link } from "./address.js";
import { html } from "./dom.js";
import { number, percent, plain, words } from "./format.js";
import { Empty, Fault } from "./parts.js";

// These make other runs, or pairs: they take no steps.
const WITHOUT_STEPS = ["compare", "phases", "collect"];

export function State({ state }) {
  return html`<span class=${"state " + state}><i class="dot" aria-hidden="true"></i>${state}</span>`;
}

export function RunList({ runs, faults, query }) {
  const chosen = (query.chosen || "").split(",").filter(Boolean).map(Number).filter((run) => runs.some((one) => one.run === run));
  if (!runs.length) {
    return html`<${Empty}>No runs were found. Train one with <code>posttrain rl recipes/countdown-tiny.yaml</code>, or name
      a run folder: <code>posttrain view FOLDER</code>.<//>`;
  }
  const tick = (run) => choose({ chosen: (chosen.includes(run) ? chosen.filter((one) => one !== run) : [...chosen, run].slice(-2)).join(",") });
  return html`<h1 tabindex="-1">Runs</h1>${(faults || []).map((text) => html`<${Fault} text=${text} />`)}
    <p class="note">${runs.length > 1
      ? html`Choose two runs to <${Comparison} chosen=${chosen} />` : "Open the run to see what it learned."}</p>
    <div class="scroll"><table class="rows runs"><thead><tr>${runs.length > 1 && html`<th><span class="hidden">compare</span></th>`}
      <th>run</th><th>kind</th><th>state</th><th class="n">steps</th><th class="n">reward</th><th class="n">held-out</th><th>folder</th>
    </tr></thead><tbody>${runs.map((run) => html`<tr key=${run.run}>
      ${runs.length > 1 && html`<td><input type="checkbox" aria-label=${`compare ${run.name}`}
        checked=${chosen.includes(run.run)} onChange=${() => tick(run.run)} /></td>`}
      <th scope="row"><a data-item class="open" href=${link(["run", run.run])}>${plain(run.name)}</a>
        ${(run.faults || []).map((text) => html`<${Fault} text=${text} />`)}</th>
      <td>${run.kind}</td><td><${State} state=${run.state} /></td>
      <td class="n">${WITHOUT_STEPS.includes(run.kind) ? "–" : number(run.last_step)}${run.num_steps ? html`<span class="muted"> / ${number(run.num_steps)}</span>` : ""}</td>
      <td class="n">${number(run.reward)}</td><td class="n"><${HeldOut} run=${run} /></td>
      <td class="muted path">${plain(run.folder)}</td></tr>`)}</tbody></table></div>`;
}

// The main held-out result; what it measures is said where it is not an accuracy.
function HeldOut({ run }) {
  if (run.accuracy === null) return "–";
  if (run.measure.includes("accuracy")) return percent(run.accuracy);
  return html`${number(run.accuracy)} <span class="muted">${words(run.measure)}</span>`;
}

function Comparison({ chosen }) {
  if (chosen.length < 2) return html`<span>compare them.</span>`;
  return html`<a href=${link(["compare"], { a: Math.min(...chosen), b: Math.max(...chosen) })}>compare them</a>`;
}
