// Two runs: their curves on one axis, and their held-out problems one by one with the exact test of the difference.
import { choose, link } from "./address.js";
import { pathOf } from "./api.js";
import { Chart } from "./charts.js";
import { html, useMemo } from "./dom.js";
import { brief, counted, number, percent, plain, signed } from "./format.js";
import { Loaded } from "./loading.js";
import { Choice, Empty, Section, Select } from "./parts.js";

const SHOWN = 200;

// `runs` is the list of open runs: {run, name}.
export function ComparePage({ query, version, runs }) {
  const options = runs.map((run) => ({ value: String(run.run), label: plain(run.name) }));
  const { a = "0", b = runs.length > 1 ? "1" : "" } = query;
  return html`<h1 tabindex="-1">Two runs</h1><div class="bar"><${Select} label="A" options=${options} value=${a} onChange=${(value) => choose({ a: value, b })} />
    <${Select} label="B" options=${options} value=${b} onChange=${(value) => choose({ a, b: value })} />
    <button type="button" class="plain" onClick=${() => choose({ a: b, b: a })}>Swap</button></div>
    ${runs.length < 2 || a === b ? html`<${Empty}>Choose two runs. Open several with <code>posttrain view FOLDER FOLDER</code>.<//>`
      : html`<${Loaded} path=${pathOf("/api/compare", { a, b })} version=${version} lines=${12}>${(found) => html`<${Compared} found=${found} query=${query} />`}<//>`}`;
}

function Compared({ found, query }) {
  const [a, b] = [plain(found.a.name), plain(found.b.name)];
  return html`<section class="panels" aria-label="curves of both runs">${found.curves.map((panel) => html`<${Chart} key=${panel.panel} title=${panel.panel} unit=${panel.unit}
      lines=${coloured(panel.lines, found.a.name)} percents=${panel.scale === "share"} sync="compare" />`)}</section>
    ${!found.problems.length ? html`<p class="note">Only the curves are compared: the runs have no held-out problems in common.</p>` : html`<${Section} id="test" title="Held-out problems" note="Solved: most completions are right after training.">
      <div class="scroll fit"><table class="rows square"><thead><tr><td></td><th scope="col">${b} solves</th><th scope="col">${b} does not</th></tr></thead><tbody>
        <tr><th scope="row">${a} solves</th><td class="n">${number(found.both)}</td><td class="n heat-n2">${number(found.only_a)}</td></tr>
        <tr><th scope="row">${a} does not</th><td class="n heat-p2">${number(found.only_b)}</td><td class="n">${number(found.neither)}</td></tr></tbody></table></div>
      <p class="says">${plain(found.says)}</p><//><${Problems} found=${found} query=${query} />`}`;
}

// One colour for each run, one kind of line for each measure.
const DASHES = [undefined, [7, 4], [2, 3], [9, 3, 2, 3]];

function coloured(lines, first) {
  const measure = (line) => line.name.split(", ")[0];
  const measures = [...new Set(lines.map(measure))];
  const isFirst = (line) => line.name.endsWith(`, ${first}`);
  return lines.map((line) => ({ ...line, name: `${measure(line)}, ${isFirst(line) ? "A" : "B"}`, colour: isFirst(line) ? "blue" : "orange",
    dash: DASHES[measures.indexOf(measure(line)) % DASHES.length] }));
}

const SIDES = {
  "": () => true, differ: (one) => solved(one.a) !== solved(one.b), a: (one) => solved(one.a) && !solved(one.b), b: (one) => solved(one.b) && !solved(one.a),
};

function solved(share) {
  return share > 0.5;
}

function Problems({ found, query }) {
  const side = query.side ?? "";
  const problems = useMemo(() => found.problems.filter(SIDES[side] || SIDES[""]).sort((x, y) => Math.abs(y.b - y.a) - Math.abs(x.b - x.a)), [found, side]);
  const options = [["", "all"], ["differ", "differ"], ["a", "only A solves"], ["b", "only B solves"]].map(([value, label]) => ({ value, label }));
  return html`<div class="bar"><${Choice} label="Show" name="side" value=${side} options=${options} onChange=${(value) => choose({ side: value })} />
      <span class="note">${counted(problems.length, "problem")}, largest difference first${problems.length > SHOWN ? `; the first ${SHOWN} are listed` : ""}</span></div>
    <div class="scroll"><table class="rows"><thead><tr><th>problem</th><th>prompt</th><th class="n">A</th><th class="n">B</th><th class="n">B − A</th></tr></thead>
      <tbody>${problems.slice(0, SHOWN).map((one) => html`<tr key=${one.prompt_id}><th scope="row">${plain(one.prompt_id)}</th><td class="prompt">${plain(brief(one.prompt, 80))}</td>
        <td class="n"><a data-item href=${address(found.a, one.at_a)}>${percent(one.a)}</a></td><td class="n"><a href=${address(found.b, one.at_b)}>${percent(one.b)}</a></td>
        <td class="n">${signed((one.b - one.a) * 100)} pp</td></tr>`)}</tbody></table></div>`;
}

function address(run, at) {
  return link(["run", run.run, "group", ...at.split("/").slice(0, 3)]);
}
