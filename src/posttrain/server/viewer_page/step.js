// A step: its groups with their scores, or its rollouts with filters.
import { choose, go, link } from "./address.js";
import { outcomeColours } from "./colours.js";
import { html, useMemo } from "./dom.js";
import { brief, counted, number, percent, plain, seconds } from "./format.js";
import { Loaded } from "./loading.js";
import { Choice, Empty, Fact, Outcome, Select, Tag } from "./parts.js";
import { RolloutList } from "./rollout_list.js";
import { OutcomeBar, ScoreStrip } from "./strips.js";

const ORDERS = {
  "": ["widest spread first", (a, b) => (b.spread || 0) - (a.spread || 0)],
  draw: ["prompt order", (a, b) => a.draw - b.draw],
  best: ["highest mean first", (a, b) => (b.mean || 0) - (a.mean || 0)],
  worst: ["lowest mean first", (a, b) => (a.mean || 0) - (b.mean || 0)],
  long: ["longest first", (a, b) => (b.mean_length || 0) - (a.mean_length || 0)],
};
const HEAD = [["reward", "reward", number], ["eval/accuracy_sampled", "held-out accuracy", percent], ["completions/mean_length", "mean length", number],
  ["kl", "KL to the reference", number], ["kl_behaviour", "KL to μ", number], ["entropy", "entropy", number], ["entropy_estimate", "entropy, estimated", number],
  ["clip_ratio/region_mean", "clipped", percent], ["grad_norm", "gradient norm", number], ["learning_rate", "learning rate", number], ["step_time", "seconds", seconds]];

export function StepView({ run, rest, query, version }) {
  const [step] = rest;
  return html`<${Loaded} path=${`/api/run/${run.run}/step/${step}`} version=${version} lines=${16}>
    ${(page) => html`<${Step} run=${run.run} page=${page} query=${query} version=${version} />`}<//>`;
}

function Step({ run, page, query, version }) {
  const filtered = ["outcome", "term", "text", "length_low", "length_high"].some((name) => query[name]);
  const view = query.view || (filtered ? "rollouts" : "groups");
  const total = page.groups.reduce((sum, group) => sum + group.rewards.length, 0);
  const near = (side) => page[side] !== null && html`<a rel=${side === "next" ? "next" : "prev"} href=${link(["run", run, "step", page[side]], query)}
    title=${side === "next" ? "next step (→)" : "previous step (←)"}>${side === "next" ? "next →" : "← previous"}</a>`;
  return html`<div class="title"><h1 tabindex="-1">Step ${page.step}</h1><nav class="near" aria-label="other steps">${near("previous")}${near("next")}</nav></div>
    <dl class="facts">${HEAD.filter(([name]) => typeof page.metrics[name] === "number").map(([name, title, show]) => html`<${Fact} key=${name} name=${title}>${show(page.metrics[name])}<//>`)}</dl>
    <div class="bar"><${Choice} label="Show" name="view" value=${view} onChange=${(value) => choose({ view: value === "groups" ? "" : value })}
      options=${[{ value: "groups", label: counted(page.groups.length, "group") }, { value: "rollouts", label: counted(total, "rollout") }]} />
      ${view === "groups" && html`<${Select} label="order" value=${query.order || ""} onChange=${(value) => choose({ order: value })}
        options=${Object.entries(ORDERS).map(([value, [label]]) => ({ value, label }))} />`}</div>
    ${view === "groups" ? html`<${Groups} run=${run} page=${page} order=${query.order || ""} />`
      : html`<${RolloutList} run=${run} source="rollouts" step=${page.step} query=${query} version=${version} />`}
    <${AllMetrics} metrics=${page.metrics} />`;
}

function Groups({ run, page, order }) {
  const groups = useMemo(() => [...page.groups].sort((ORDERS[order] || ORDERS[""])[1]), [page, order]);
  const colours = useMemo(() => outcomeColours(new Set(page.groups.flatMap((group) => group.outcomes).filter(Boolean))), [page]);
  const scores = page.groups.flatMap((group) => group.rewards).filter((score) => score !== null);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const judged = Object.keys(colours).length > 0;
  if (!groups.length) return html`<${Empty}>This step has no rollouts.<//>`;
  return html`<p class="key">${Object.entries(colours).map(([name, colour]) => html`<${Outcome} key=${name} name=${name} colour=${colour} />`)}
      <span class="note">Each dot is one reward, from ${number(low)} to ${number(high)}.</span></p>
    <div class="scroll"><table class="rows groups"><thead><tr><th class="n">group</th><th>prompt</th><th>rewards</th><th class="n">mean</th>
      <th class="n">spread</th>${judged && html`<th>outcomes</th>`}<th class="n">length</th><th></th></tr></thead><tbody>
      ${groups.map((group) => html`<${GroupRow} key=${group.group} run=${run} step=${page.step} group=${group} low=${low} high=${high} colours=${colours} />`)}
    </tbody></table></div>`;
}

function GroupRow({ run, step, group, low, high, colours }) {
  const address = link(["run", run, "group", "rollouts", step, group.group]);
  const judged = Object.keys(colours).length > 0;
  const counts = {};
  for (const name of group.outcomes.filter(Boolean)) counts[name] = (counts[name] || 0) + 1;
  const quiet = group.uninformative || group.replaced;
  return html`<tr class=${quiet ? "quiet" : ""} onClick=${() => go(address)}><th scope="row" class="n"><a data-item class="open" href=${address}>${group.group}</a></th>
    <td class="prompt">${plain(brief(group.prompt, 90))}</td><td><${ScoreStrip} scores=${group.rewards} low=${low} high=${high} /></td>
    <td class="n">${number(group.mean)}</td><td class="n">${number(group.spread)}</td>
    ${judged && html`<td><${OutcomeBar} counts=${sorted(counts, colours)} colours=${colours} /></td>`}<td class="n">${number(group.mean_length)}</td>
    <td>${group.uninformative && html`<${Tag} title="All rewards are equal: this group does not change the policy.">no signal<//>`}
      ${group.replaced && html`<${Tag} tone="warn" title="Dynamic sampling drew another group instead.">replaced<//>`}</td></tr>`;
}

function sorted(counts, colours) {
  const order = Object.keys(colours);
  return Object.fromEntries(Object.entries(counts).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b)));
}

function AllMetrics({ metrics }) {
  const names = Object.keys(metrics).filter((name) => name !== "step").sort();
  if (!names.length) return null;
  return html`<details class="all"><summary>All ${names.length} metrics of this step</summary><div class="columns"><table class="pairs"><tbody>
    ${names.map((name) => html`<tr key=${name}><th scope="row">${name}</th><td class="n">${number(metrics[name])}</td></tr>`)}</tbody></table></div></details>`;
}
