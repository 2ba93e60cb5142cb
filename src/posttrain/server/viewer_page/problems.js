// Problems over training: all of them, and one with its completions at every step where it was asked.
import { choose, go, link } from "./address.js";
import { pathOf } from "./api.js";
import { Chart } from "./charts.js";
import { outcomeColours } from "./colours.js";
import { html, useMemo } from "./dom.js";
import { brief, counted, evaluationName, number, percent, plain } from "./format.js";
import { Loaded } from "./loading.js";
import { Empty, Outcome, SearchField, Tag } from "./parts.js";
import { ShareCells } from "./strips.js";
import { PlainText } from "./tokens.js";

const SHOWN = 200;
const SOURCES = { rollouts: "training", evaluations: "held-out" };

export function ProblemsView({ run, query, version }) {
  return html`<h1 tabindex="-1">Problems</h1><p class="note">Each square is one step at which the problem was asked, from white (never solved) to blue (always).</p>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}><${SearchField} places="the prompt or its id" text=${query.text}
      onSearch=${(text) => choose({ text })} /></form>
    <${Loaded} path=${pathOf(`/api/run/${run.run}/problems`, { text: query.text })} version=${version} lines=${12}>${(found) => html`<${Problems} run=${run} found=${found} query=${query} />`}<//>`;
}

function Problems({ run, found, query }) {
  const limit = Number(query.limit) || SHOWN;
  const { problems: matching } = found;
  return html`<p class="note" role="status">${counted(found.total, "problem")}${query.text && " match"}${
      found.problems.length < found.total ? `; the first ${number(found.problems.length)} are listed` : ""}</p>
    ${!matching.length ? html`<${Empty}>No problems match.<//>` : html`<div class="scroll"><table class="rows"><thead><tr><th>problem</th><th>prompt</th>
      <th class="n">asked</th><th class="n">first</th><th class="n">last</th><th>over training</th></tr></thead><tbody>
      ${matching.slice(0, limit).map((one) => html`<${ProblemRow} key=${one.prompt_id} run=${run} one=${one} />`)}</tbody></table></div>`}
    ${matching.length > limit && html`<p class="note"><button type="button" class="plain" onClick=${() => choose({ limit: limit + 500 })}>Show more</button></p>`}`;
}

function ProblemRow({ run, one }) {
  const address = link(["run", run.run, "problem", one.prompt_id]);
  const shares = one.asked.map((asked) => asked.solved ?? asked.reward);
  return html`<tr onClick=${() => go(address)}><th scope="row"><a data-item class="open" href=${address}>${plain(one.prompt_id)}</a></th>
    <td class="prompt">${plain(brief(one.prompt, 80))}</td><td class="n">${counted(one.asked.length, "time")}</td>
    <td class="n">${percent(shares[0])}</td><td class="n">${percent(shares[shares.length - 1])}</td>
    <td><${ShareCells} values=${shares} labels=${one.asked.map((asked) => `step ${asked.step}`)} /></td></tr>`;
}

export function ProblemView({ run, rest, query, version }) {
  return html`<${Loaded} path=${pathOf(`/api/run/${run.run}/problem`, { id: rest.join("/") })} version=${version} lines=${12}>
    ${(page) => html`<${Problem} run=${run} page=${page} query=${query} />`}<//>`;
}

function Problem({ run, page }) {
  const colours = useMemo(() => outcomeColours(new Set(page.steps.flatMap((step) => step.rows.flatMap((row) => Object.values(row.outcomes))))), [page]);
  const open = (step) => document.querySelector(`[data-step="${step}"]`)?.scrollIntoView({ block: "start", behavior: "smooth" });
  const lines = linesOf(page.steps);
  const greedy = page.steps.some((step) => step.rows.some((row) => row.greedy));
  return html`<h1 tabindex="-1">${plain(page.prompt_id)}</h1><section class="text" aria-label="prompt"><${PlainText} text=${page.prompt} spaces=${false} /></section>
    ${page.columns && html`<details><summary>Row of the data set</summary><pre class="code">${plain(page.columns)}</pre></details>`}
    ${page.steps.length > 1 && html`<section class="panels one"><${Chart} title="Mean score" lines=${lines} sync="problem" onOpen=${open} /></section>`}
    ${greedy && html`<p class="note">Means leave out greedy completions.</p>`}
    <p class="key">${Object.entries(colours).map(([name, colour]) => html`<${Outcome} key=${name} name=${name} colour=${colour} />`)}</p>
    ${page.steps.map((step) => html`<section class="asked-at" key=${step.source + step.step + step.evaluation} data-step=${step.step}>
      <h2><a data-item href=${link(["run", run.run, "group", step.source, step.step, step.rows[0] ? step.rows[0].group : ""])}>Step ${step.step}</a>
        <span class="muted"> ${SOURCES[step.source]}${step.evaluation && `, ${evaluationName(step.evaluation)}`} · ${step.source === "rollouts" ? "mean reward" : "mean score"} ${number(meanScore(step))}</span></h2>
      <ul class="tries">${step.rows.map((row) => html`<${Try} key=${row.at} run=${run} row=${row} colours=${colours} />`)}</ul></section>`)}`;
}

// Training is paid by its reward; a held-out completion is judged by the task, whatever training pays for.
function scoreOf(row) {
  return row.source === "rollouts" ? row.reward : row.judged ?? row.reward;
}

function meanScore(step) {
  const known = step.rows.filter((row) => !row.greedy).map(scoreOf).filter((score) => score !== null);
  return known.length ? known.reduce((sum, score) => sum + score, 0) / known.length : null;
}

// A line for training and one for held-out evaluations; a step with two evaluations has two points.
function linesOf(steps) {
  return Object.entries(SOURCES).flatMap(([source, name]) => {
    const own = steps.filter((step) => step.source === source);
    return own.length ? [{ name, steps: own.map((step) => step.step), values: own.map(meanScore), colour: source === "rollouts" ? "blue" : "orange" }] : [];
  });
}

function Try({ run, row, colours }) {
  const outcome = Object.values(row.outcomes)[0];
  return html`<li><a class="try" data-item href=${link(["run", run.run, "rollout", ...row.at.split("/")])}><b class="n">${number(scoreOf(row))}</b>
    <span>${outcome && html`<${Outcome} name=${outcome} colour=${colours[outcome]} />`}</span>
    <span class="text">${row.greedy && html`<${Tag}>greedy<//> `}${plain(brief(row.completion, 400))}</span></a></li>`;
}
