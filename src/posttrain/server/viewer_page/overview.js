// A run at a glance: what it learned, what it is paid for, what it cost, and the alarms.
import { choose, go, link } from "./address.js";
import { Chart } from "./charts.js";
import { outcomeColours } from "./colours.js";
import { html, useMemo } from "./dom.js";
import { counted, interval, number, percent, plain, seconds, signed, words } from "./format.js";
import { Loaded } from "./loading.js";
import { StepTable } from "./overview_steps.js";
import { Empty, Fact, Section, Tag } from "./parts.js";
import { Dumbbell } from "./strips.js";

export function OverviewPage({ run, runs, query, version }) {
  return html`<${Loaded} path=${`/api/run/${run.run}/overview`} version=${version} lines=${12}>
    ${(overview) => html`<${Overview} overview=${overview} runs=${runs} query=${query} version=${version} />`}<//>`;
}

function Overview({ overview, runs, query, version }) {
  const marks = overview.alarms.filter((alarm) => !alarm.notice).map((alarm) => alarm.step);
  return html`<${Head} overview=${overview} runs=${runs} />
    ${overview.lacks.length > 0 && html`<ul class="lacks">${overview.lacks.map((text) => html`<li key=${text}>${plain(text)}</li>`)}</ul>`}
    <${Alarms} alarms=${overview.alarms} run=${overview.run} />
    <${Panels} overview=${overview} query=${query} marks=${marks} />
    <${BeforeAfter} measures=${overview.before_after} />
    ${overview.kind === "rl" && html`<${StepTable} run=${overview.run} query=${query} version=${version} />`}
    <${Made} overview=${overview} />`;
}

// The comparison or the phases that the run is in, and the runs that it is compared with.
function Around({ overview, runs }) {
  const nameOf = (run) => plain(runs.find((one) => one.run === run)?.name || run);
  const { part_of: around, compared_with: others } = overview;
  return html`${around !== null && html`<p class="links">Part of <a href=${link(["run", around])}>${nameOf(around)}</a></p>`}
    ${others.length > 0 && html`<p class="links">Compare with ${others.map((other) => html`<a key=${other}
      href=${link(["compare"], { a: overview.run, b: other })}>${nameOf(other)}</a> `)}</p>`}`;
}

function Head({ overview, runs }) {
  const steps = `${number(overview.last_step)}${overview.num_steps ? ` of ${number(overview.num_steps)}` : ""}`;
  const facts = [["algorithm", overview.algorithm], ["task", overview.task], ["model", overview.model], ["steps", steps],
    ["time", seconds(overview.seconds.total)]];
  return html`<h1 tabindex="-1">${plain(overview.name)} <${Tag}>${overview.kind}<//></h1>
    <dl class="facts">${facts.filter(([, value]) => value && value !== "–").map(([name, value]) => html`<${Fact} key=${name} name=${name}>${plain(value)}<//>`)}</dl>
    <${Around} overview=${overview} runs=${runs} />`;
}

function Alarms({ alarms, run }) {
  if (!alarms.length) return null;
  const loud = alarms.filter((alarm) => !alarm.notice).length;
  const title = loud ? counted(loud, "alarm") : counted(alarms.length, "notice");
  return html`<${Section} id="alarms" title=${title} note="What looks wrong in the metrics, and the completions behind it.">
    <ul class="alarms">${alarms.map((alarm, place) => html`<li key=${place} data-step=${alarm.step} class=${alarm.notice ? "notice" : "alarm"}>
      <span class="alarm-step"><a data-item href=${link(["run", run, "step", alarm.step])}>step ${alarm.step}</a></span>
      <span class="alarm-text"><b>${plain(words(alarm.name))}:</b> ${plain(alarm.says)}
        ${alarm.links.length > 0 && html`<span class="links">completions ${alarm.links.map((one) => html`<a key=${one.at} data-item title=${one.label}
          href=${link(["run", run, "rollout", ...one.at.split("/")])}>${one.at.split("/").slice(2).join("·")}</a>`)}</span>`}
        ${alarm.transcript && html`<details><summary>transcript</summary><pre>${plain(alarm.transcript)}</pre></details>`}</span></li>`)}</ul><//>`;
}

function Panels({ overview, query, marks }) {
  const { run, outcomes, seconds_by_stage: stages } = overview;
  const whole = overview.num_steps && overview.state === "running" ? overview.num_steps : overview.last_step;
  const range = query.from ? [Number(query.from), Number(query.to)] : [0, Math.max(1, whole)];
  const opens = overview.kind === "rl";
  const common = { range, marks, onMark, onOpen: opens ? (step) => step > 0 && go(link(["run", run, "step", step])) : undefined,
    onZoom: (from, to) => choose({ from, to }) };
  const colours = useMemo(() => outcomeColours(outcomes.names), [outcomes.names.join()]);
  if (!overview.curves.length) {
    const pages = overview.kind_pages.map((page) => html`<a key=${page.path} data-item href=${link(["run", run, page.path])}>${page.title}</a>`);
    return html`<${Empty}>${pages.length ? html`What this run found: ${pages}` : "No metrics yet."}<//>`;
  }
  return html`<section class="panels" aria-label="curves over steps">
    ${query.from && html`<p class="note zoomed">Steps ${query.from} to ${query.to}. <button type="button" class="plain"
      onClick=${() => choose({ from: "", to: "" })}>Show all steps</button></p>`}
    ${overview.curves.map((panel) => html`<${Chart} key=${panel.panel} title=${panel.panel} unit=${panel.unit} lines=${panel.lines}
      percents=${panel.scale === "share"} ...${common} />`)}
    ${outcomes.names.length > 0 && html`<${Chart} title="Outcomes" unit=${outcomes.function} stacked percents
      lines=${stacked(outcomes, colours)} ...${common} />`}
    ${stages.names.length > 0 && html`<${Chart} title="Seconds by stage" unit="s" stacked lines=${stacked(stages)} ...${common} />`}
    </section><p class="note">${opens && "Click a point to open its step. "}Drag to zoom; double-click to see all steps.</p>`;
}

// A click on a mark: to the alarms of its step, with their transcripts open.
function onMark(step) {
  const alarms = [...document.querySelectorAll(`.alarms [data-step="${step}"]`)];
  for (const alarm of alarms) alarm.querySelector("details")?.setAttribute("open", "");
  alarms[0].scrollIntoView({ block: "center", behavior: "smooth" });
  alarms[0].querySelector("a").focus({ preventScroll: true });
}

// One line for each name, in the order of `colours` where there are some.
function stacked({ steps, names, values }, colours = {}) {
  const order = Object.keys(colours);
  const lines = names.map((name, place) => ({ name, steps, values: values[place], low: [], high: [], colour: colours[name] }));
  return lines.sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
}

function BeforeAfter({ measures }) {
  if (!measures.length) return null;
  const rests = measures.some((measure) => measure.resting_on);
  return html`<${Section} id="before-after" title="Before and after" note="Held-out problems, with 95% intervals.">
    <div class="scroll"><table class="rows measures"><thead><tr><th>measure</th><th class="n">before</th><th class="n">after</th>
      <th class="n">change</th><th aria-hidden="true"></th>${rests && html`<th>measured on</th>`}</tr></thead>
      <tbody>${measures.map((measure) => html`<${MeasureRow} key=${measure.name} measure=${measure} rests=${rests} />`)}</tbody></table></div><//>`;
}

function MeasureRow({ measure, rests }) {
  const share = measure.unit === "share";
  const show = share ? percent : number;
  const change = measure.before === null || measure.after === null ? null : measure.after - measure.before;
  const sides = ["before", "after"].map((side) => ({ value: measure[side], low: measure[side + "_low"], high: measure[side + "_high"] }));
  return html`<tr><th scope="row" title=${measure.name}>${plain(measure.measure)}</th>
    ${sides.map((side) => html`<td class="n">${show(side.value)}<span class="interval">${interval(side.low, side.high, show)}</span></td>`)}
    <td class="n">${share && change !== null ? `${signed(change * 100)} pp` : signed(change)}</td>
    <td>${share && html`<${Dumbbell} before=${sides[0]} after=${sides[1]} />`}</td>
    ${rests && html`<td class="muted">${plain(measure.resting_on)}</td>`}</tr>`;
}

// How the run was made, folded away.
function Made({ overview }) {
  const tables = [["Machine", overview.machine], ["Versions", overview.versions],
    ["Seconds", mapped(overview.seconds, seconds)], ["Tokens", mapped(overview.tokens, number)]];
  return html`<${Section} id="made" title="How it was made">
    <p class="note path">${plain(overview.folder)}</p>
    ${overview.recipe && html`<details><summary>Recipe</summary><pre class="code">${plain(overview.recipe)}</pre></details>`}
    ${tables.filter(([, table]) => Object.keys(table).length).map(([title, table]) => html`<details key=${title}>
      <summary>${title}</summary><table class="pairs"><tbody>${Object.entries(table).map(([name, value]) => html`<tr key=${name}>
        <th scope="row">${plain(words(name))}</th><td>${plain(value)}</td></tr>`)}</tbody></table></details>`)}<//>`;
}

function mapped(table, show) {
  return Object.fromEntries(Object.entries(table).map(([name, value]) => [name, show(value)]));
}
