// The world of a run of inverse RL: rewards, visits and policies, cell by cell.
import { Chart } from "./charts.js";
import { html } from "./dom.js";
import { number, percent, plain, words } from "./format.js";
import { Loaded } from "./loading.js";
import { Empty, Fact, Section } from "./parts.js";
import { Picture } from "./pictures.js";

const SIDE = 300;
const MOST = 40; // cells along a side; larger worlds are drawn in blocks
const NUMBERED = 6; // up to here each cell has its number
const ROUNDING = 1e-8; // smaller differences of values are errors of value iteration

// What the numbers of summary.json are called here, and what they say.
const FACTS = {
  gap: ["gap to the demonstrations", "Largest difference between a feature of the demonstrations and its expected value under the learned policy"],
  least_gap: ["smallest possible gap", "The smallest gap that any policy can reach"],
  visits_gap: ["gap in visits", "Largest difference in visits of a state when the learned policy acts"],
  value_lost: ["value lost", "Value of the expert's policy minus that of the learned policy, under the expert's reward"],
  value_lost_greedy: ["value lost, greedy policy", "The same, if the learned policy always takes its most likely action"],
  steps_per_episode: ["steps per episode", "Expected steps of an episode of the learned policy"],
};

export function GridPage({ run, version }) {
  return html`<h1 tabindex="-1">World</h1><${Loaded} path=${`/api/run/${run.run}/grid`} version=${version} lines=${12}>
    ${(page) => html`<${Grid} run=${run} page=${page} />`}<//>`;
}

function Grid({ run, page }) {
  const facts = Object.entries(page.facts);
  return html`${page.lacks.map((text) => html`<p class="note" key=${text}>${plain(text)}</p>`)}
    ${facts.length > 0 && html`<dl class="facts">${facts.map(([name, value]) => html`<${Fact} key=${name} name=${FACTS[name] ? FACTS[name][0] : words(name)} title=${FACTS[name] && FACTS[name][1]}>${number(Math.abs(value) < ROUNDING ? 0 : value)}<//>`)}</dl>`}
    ${page.maps.length ? html`<p class="note">${page.is_grid ? "Each cell is a state." : "This world is not a grid: states by number, left to right."}${
        page.terminal.length > 0 && " A cross marks a state that ends the episode."} Each reward has its own scale; visits share one.</p>
      <div class="worlds">${page.maps.map((map) => html`<${World} key=${map.name} page=${page} title=${map.name} map=${map} />`)}
        ${page.arrows.map((one) => html`<${World} key=${one.name} page=${page} title=${one.name} arrows=${one.steps} />`)}</div>` : html`<${Empty}>No reward yet.<//>`}
    ${page.curves.length > 0 && html`<${Section} id="fit" title="The fit" note="By iteration."><div class="panels">${page.curves.map((panel) => html`<${Chart}
      key=${panel.panel} title=${words(panel.panel)} lines=${panel.lines} sync="fit" />`)}</div><//>`}
    ${page.pictures.length > 0 && html`<${Section} id="pictures" title="Pictures of the run folder">${page.pictures.map((name) => html`<${Picture} key=${name} run=${run} name=${name} />`)}<//>`}`;
}

// Blocks of cells, each with the mean of its values.
function blocks({ width, height }, values, mean) {
  const size = Math.max(1, Math.ceil(Math.max(width, height > 1 ? height : 1) / MOST));
  const found = new Map();
  values.forEach((value, cell) => {
    if (value === null) return;
    const [x, y] = [Math.floor((cell % width) / size), Math.floor(Math.floor(cell / width) / size)];
    const key = `${x},${y}`;
    if (!found.has(key)) found.set(key, { x, y, cell, all: [] });
    found.get(key).all.push(value);
  });
  return { size, width: Math.ceil(width / size), height: Math.ceil(height / size), cells: [...found.values()].map((one) => ({ ...one, value: mean(one.all) })) };
}

const meanOf = (all) => all.reduce((sum, value) => sum + value, 0) / all.length;
const meanStep = (all) => [meanOf(all.map((step) => step[0])), meanOf(all.map((step) => step[1]))];

function World({ page, title, map, arrows }) {
  const { size, width, height, cells } = blocks(page, map ? map.values : arrows, map ? meanOf : meanStep);
  const unit = SIDE / Math.max(width, height > 1 ? height : 1);
  const tall = Math.max(unit * height, 24);
  const up = page.upwards;
  const left = (x) => x * unit;
  const top = (y) => (up ? height - 1 - y : y) * unit;
  const ends = new Set(page.terminal.map((cell) => `${Math.floor((cell % page.width) / size)},${Math.floor(Math.floor(cell / page.width) / size)}`));
  const numbered = map && width <= NUMBERED && height > 1;
  const said = map ? `${title}: from ${number(map.low)} to ${number(map.high)}` : title;
  return html`<figure class="world"><figcaption><h3>${title}</h3>${map && html`<span class="note n">${number(map.low)} to ${number(map.high)}</span>`}</figcaption>
    <svg viewBox=${`0 0 ${SIDE} ${Math.max(tall, 1)}`} role="img" aria-label=${said}>
      <rect x="0" y="0" width=${unit * width} height=${tall} class="ground" />
      ${map && cells.map((one) => html`<rect key=${one.cell} x=${left(one.x)} y=${top(one.y)} width=${unit} height=${Math.max(unit, height > 1 ? 0 : 24)} ...${shade(one.value, map)}>
        <title>${`x ${one.x * size}, y ${one.y * size}: ${number(one.value)}`}</title></rect>`)}
      ${numbered && cells.map((one) => html`<text key=${"t" + one.cell} x=${left(one.x) + unit / 2} y=${top(one.y) + unit / 2 + 4} text-anchor="middle">${short(one.value)}</text>`)}
      ${!map && cells.map((one) => html`<${Arrow} key=${one.cell} x=${left(one.x) + unit / 2} y=${top(one.y) + unit / 2} step=${one.value} unit=${unit} up=${up} />`)}
      ${size === 1 && page.is_grid && [...ends].map((key) => { const [x, y] = key.split(",").map(Number); return html`<path key=${key} class="end"
        d=${`M${left(x) + unit * 0.06} ${top(y) + unit * 0.06}l${unit * 0.16} ${unit * 0.16}m0 ${-unit * 0.16}l${-unit * 0.16} ${unit * 0.16}`} />`; })}</svg></figure>`;
}

// Blue above 0 and orange below where a map has both signs, else blue from its lowest to its highest number.
function shade(value, { low, high }) {
  if (low < 0 && high > 0) {
    const share = Math.abs(value) / Math.max(-low, high);
    return { class: value < 0 ? "below" : "above", "fill-opacity": share.toFixed(3) };
  }
  return { class: "above", "fill-opacity": ((value - low) / (high - low || 1)).toFixed(3) };
}

function short(value) {
  return Math.abs(value) < 0.005 ? "0" : number(Math.round(value * 100) / 100, 2);
}

function Arrow({ x, y, step: [dx, dy], unit, up }) {
  const length = Math.hypot(dx, dy);
  if (length < 0.03) return html`<circle cx=${x} cy=${y} r=${unit * 0.06} class="arrow-dot" />`;
  const [ax, ay] = [(dx / length) * unit * 0.42, ((up ? -dy : dy) / length) * unit * 0.42];
  const share = Math.min(1, length);
  const [tx, ty] = [x + ax * share, y + ay * share];
  const [bx, by] = [x - ax * share, y - ay * share];
  const head = 0.45;
  return html`<path class="arrow" d=${`M${bx} ${by}L${tx} ${ty}M${tx - head * (ax * 0.8 - ay * 0.5) * share} ${ty - head * (ay * 0.8 + ax * 0.5) * share}L${tx} ${ty}L${
    tx - head * (ax * 0.8 + ay * 0.5) * share} ${ty - head * (ay * 0.8 - ax * 0.5) * share}`}><title>${`mean step ${number(dx, 2)}, ${number(dy, 2)}; ${percent(share)} of a cell`}</title></path>`;
}
