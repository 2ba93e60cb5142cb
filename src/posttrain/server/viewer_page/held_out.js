// Held-out problems before training, along the way and after: which are solved now, lost, or never answered right.
import { choose, link } from "./address.js";
import { Chart } from "./charts.js";
import { html, useMemo } from "./dom.js";
import { brief, counted, evaluationName, number, percent, plain } from "./format.js";
import { Loaded } from "./loading.js";
import { Choice, Empty, SearchField, Section } from "./parts.js";
import { ShareCells } from "./strips.js";

const CHANGES = [["solved", "solved now, not before"], ["lost", "lost"], ["always", "solved before and after"], ["unsolved", "not solved before or after, right at times"], ["never", "no right answer at all"]];
const SHOWN = 100;

export function HeldOutView({ run, query, version }) {
  return html`<h1 tabindex="-1">Held-out problems</h1><${Loaded} path=${`/api/run/${run.run}/held-out`} version=${version} lines=${12}>
    ${(page) => html`<${HeldOut} run=${run} page=${page} query=${query} />`}<//>`;
}

function HeldOut({ run, page, query }) {
  if (!page.evaluations.length && !page.problems.length) return html`<${Empty}>This run has no held-out evaluation yet.<//>`;
  const change = query.change || "";
  const wanted = (query.text || "").toLowerCase();
  const problems = useMemo(() => page.problems.filter((one) => (!change || one.change === change)
    && (!wanted || (one.prompt_id + " " + one.prompt).toLowerCase().includes(wanted))), [page, change, wanted]);
  const limit = Number(query.limit) || SHOWN;
  const lines = linesOf(page.evaluations);
  const options = [{ value: "", label: `all ${number(page.problems.length)}` },
    ...CHANGES.filter(([name]) => name in page.counts).map(([value, label]) => ({ value, label: `${label}: ${number(page.counts[value])}` }))];
  return html`${lines.length > 0 && html`<section class="panels one"><${Chart} title="Held-out accuracy" lines=${lines} percents sync="held-out" /></section>
      <p class="note">With 95% intervals. Evaluations during training measure fewer problems.</p>`}
    ${page.says && html`<p class="says">${plain(page.says)}</p>`}
    <div class="bar"><${Choice} label="Show" name="change" value=${change} options=${options} onChange=${(value) => choose({ change: value })} /></div>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}><${SearchField} places="the prompt or its id" text=${query.text}
      onSearch=${(text) => choose({ text })} /></form>
    <${Section} id="problems" title=${counted(problems.length, "problem")} note="Solved: most completions are right. Squares: share of right completions before, during and after training.">
      ${problems.length ? html`<${Table} run=${run} problems=${problems.slice(0, limit)} />` : html`<${Empty}>No problems match.<//>`}
      ${problems.length > limit && html`<p class="note"><button type="button" class="plain" onClick=${() => choose({ limit: limit + 500 })}>Show more</button></p>`}<//>`;
}

function linesOf(evaluations) {
  const names = [...new Set(evaluations.map((one) => one.name))];
  return names.map((name) => {
    const own = evaluations.filter((one) => one.name === name);
    return { name: evaluationName(name), steps: own.map((one) => one.step), values: own.map((one) => one.accuracy), low: own.map((one) => one.low), high: own.map((one) => one.high) };
  });
}

function Table({ run, problems }) {
  return html`<div class="scroll"><table class="rows"><thead><tr><th>problem</th><th>prompt</th><th class="n">before</th><th class="n">after</th>
    <th>before … after</th><th></th></tr></thead><tbody>${problems.map((one) => html`<tr key=${one.prompt_id}>
      <th scope="row"><a data-item class="open" href=${link(["run", run.run, "problem", one.prompt_id])}>${plain(one.prompt_id)}</a></th>
      <td class="prompt">${plain(brief(one.prompt, 70))}</td><td class="n"><${Share} run=${run} value=${one.before} at=${one.links.before} /></td>
      <td class="n"><${Share} run=${run} value=${one.after} at=${one.links.after} /></td>
      <td><${ShareCells} values=${[one.before, ...one.along, one.after]} /></td><td class="muted">${(CHANGES.find(([name]) => name === one.change) || [])[1]}</td></tr>`)}</tbody></table></div>`;
}

function Share({ run, value, at }) {
  return at ? html`<a href=${link(["run", run.run, "group", ...at.split("/")])}>${percent(value)}</a>` : percent(value);
}
