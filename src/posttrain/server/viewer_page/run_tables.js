// Commands that make several runs: the table of a comparison and the phases of a recipe, with the runs behind them.
import { link } from "./address.js";
import { Chart } from "./charts.js";
import { lineColour } from "./colours.js";
import { html } from "./dom.js";
import { interval, number, percent, plain, seconds, shareInterval, signed, words } from "./format.js";
import { Loaded } from "./loading.js";
import { Empty, Section } from "./parts.js";
import { Picture } from "./pictures.js";

export function ComparisonPage({ run, version }) {
  return html`<h1 tabindex="-1">Comparison</h1><${Loaded} path=${`/api/run/${run.run}/comparison`} version=${version} lines=${12}>
    ${(page) => html`<${Comparison} run=${run} page=${page} />`}<//>`;
}

// A colour for each variant, a kind of line for each seed.
const DASHES = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]];

function seedOf(line) {
  return Number(line.name.split(", seed ")[1]) || 0;
}

function Comparison({ run, page }) {
  if (!page.variants.length) return html`<${Empty}>No run of this comparison has finished yet.<//>`;
  const show = page.measure.startsWith("accuracy") ? percent : number;
  const place = Object.fromEntries(page.variants.map((one, at) => [one.variant, at]));
  const lines = page.curves.flatMap((panel) => panel.lines.map((line) => ({ ...line, colour: lineColour(place[line.name.split(", seed ")[0]] || 0), dash: DASHES[seedOf(line) % DASHES.length] })));
  return html`<p class="note">Budget of a run: ${plain(page.budget)}. Means over seeds, with 95% intervals over seeds.</p>
    <div class="scroll"><table class="rows"><thead><tr><th>variant</th><th class="n">before</th><th class="n">after</th><th class="n" title="The mean after training minus that of the first variant">difference to the first</th>
      <th class="n">greedy</th><th class="n">KL</th><th class="n">length</th><th class="n">tokens</th><th class="n">training</th><th class="n">memory</th></tr></thead>
      <tbody>${page.variants.map((one) => html`<${Variant} key=${one.variant} one=${one} show=${show} />`)}</tbody></table></div>
    ${lines.length > 0 && html`<section class="panels one"><${Chart} title=${words(page.measure)} unit="by tokens sampled" lines=${lines} percents=${show === percent} sync="comparison" /></section>`}
    <${Section} id="runs" title="Runs"><div class="scroll"><table class="rows"><thead><tr><th>run</th><th class="n">before</th><th class="n">after</th>
      <th class="n">KL</th><th class="n">steps</th><th class="n">tokens</th><th class="n">training</th></tr></thead>
      <tbody>${page.variants.flatMap((one) => one.runs.map((cell) => html`<tr key=${one.variant + cell.seed}>
        <th scope="row"><${RunLink} run=${cell.run} text=${`${one.variant}, seed ${cell.seed}`} /></th>
        <td class="n">${show(cell.before)}</td><td class="n">${show(cell.after)}</td><td class="n">${number(cell.kl)}</td><td class="n">${number(cell.steps)}</td>
        <td class="n">${number(cell.tokens)}</td><td class="n">${seconds(cell.seconds)}</td></tr>`))}</tbody></table></div><//>
    ${page.pictures.map((name) => html`<${Picture} key=${name} run=${run} name=${name} />`)}`;
}

function Variant({ one, show }) {
  const gain = show === percent ? (value) => `${signed(value * 100)} pp` : signed;
  const range = (low, high, least) => (show === percent ? shareInterval(low, high, least) : interval(low, high));
  const estimate = ([mean, low, high], format = show, least = 0) => mean === undefined ? "" : html`${format(mean)}<span class="interval">${range(low, high, least)}</span>`;
  const { greedy, kl_per_completion: kl, mean_length: length, sampled_tokens: tokens, training_seconds: time, peak_memory_bytes: memory } = one.numbers;
  return html`<tr><th scope="row">${plain(one.variant)}</th><td class="n">${estimate(one.before)}</td><td class="n">${estimate(one.after)}</td><td class="n">${estimate(one.gain, gain, -1)}</td>
    <td class="n">${show(greedy)}</td><td class="n">${number(kl)}</td><td class="n">${number(length)}</td><td class="n">${number(Math.round(tokens))}</td>
    <td class="n">${seconds(time)}</td><td class="n">${memory === undefined ? "–" : `${number(memory / 1e9)} GB`}</td></tr>`;
}

function RunLink({ run, text }) {
  if (run === null) return html`${plain(text)} <span class="muted">not in this list</span>`;
  return html`<a data-item class="open" href=${link(["run", run])}>${plain(text)}</a>`;
}

export function PhasesPage({ run, version }) {
  return html`<h1 tabindex="-1">Phases</h1><${Loaded} path=${`/api/run/${run.run}/phases`} version=${version} lines=${12}>
    ${(page) => page.phases.length ? html`<div class="scroll"><table class="rows"><thead><tr><th>phase</th><th>command</th><th>state</th><th>measure</th>
      <th class="n">before</th><th class="n">after</th><th class="n">steps</th><th class="n">time</th></tr></thead>
      ${page.phases.map((phase) => html`<${Phase} key=${phase.number} phase=${phase} />`)}</table></div>` : html`<${Empty}>No phase has started yet.<//>`}<//>`;
}

function Phase({ phase }) {
  const measures = phase.measures.length ? phase.measures : [null];
  return html`<tbody>${measures.map((one, place) => html`<tr key=${place}>
    ${place === 0 ? html`<th scope="row"><${RunLink} run=${phase.run} text=${`${phase.number}. ${phase.name}`} /></th><td>${plain(phase.command)}</td><td>${phase.state}</td>` : html`<td colspan="3"></td>`}
    <td>${one && plain(one.measure)}</td><td class="n">${one && value(one, "before")}</td><td class="n">${one && value(one, "after")}</td>
    <td class="n">${place === 0 && number(phase.steps)}</td><td class="n">${place === 0 && seconds(phase.seconds)}</td></tr>`)}</tbody>`;
}

function value(measure, side) {
  const show = measure.unit === "share" ? percent : number;
  return html`${show(measure[side])}<span class="interval">${interval(measure[side + "_low"], measure[side + "_high"], show)}</span>`;
}
