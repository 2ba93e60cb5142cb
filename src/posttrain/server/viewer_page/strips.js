// Small drawings in the text: scores of a group, shares of outcomes, an interval, a line.
import { html } from "./dom.js";
import { number, percent, words } from "./format.js";

const WIDTH = 150;
const HEIGHT = 22;

// One dot per score between the lowest and the highest of the step; equal scores stack.
export function ScoreStrip({ scores, low, high }) {
  const known = scores.filter((score) => score !== null);
  const place = (score) => 6 + ((score - low) / (high - low || 1)) * (WIDTH - 12);
  const bins = new Map();
  const dots = known.map((score) => {
    const x = Math.round(place(score) / 5) * 5;
    bins.set(x, (bins.get(x) || 0) + 1);
    return { x, rank: bins.get(x) - 1 };
  });
  const most = Math.max(...bins.values(), 1);
  const rise = Math.min(5, (HEIGHT - 8) / most);
  const said = `${known.length} scores from ${number(Math.min(...known))} to ${number(Math.max(...known))}`;
  return html`<svg class="strip" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT} role="img" aria-label=${said}>
    <line x1="2" x2=${WIDTH - 2} y1=${HEIGHT - 2.5} y2=${HEIGHT - 2.5} class="axis" />
    ${dots.map(({ x, rank }, key) => html`<circle key=${key} cx=${x} cy=${HEIGHT - 6 - rank * rise} r="2.4" class="blue" />`)}
  </svg>`;
}

// Counts as one bar: {name: count}.
export function OutcomeBar({ counts, colours }) {
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0) || 1;
  let left = 0;
  const said = Object.entries(counts).map(([name, count]) => `${count} ${words(name)}`).join(", ");
  return html`<svg class="outcome-bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${said}><title>${said}</title>
    ${Object.entries(counts).map(([name, count]) => {
      const x = left;
      left += (100 * count) / total;
      return html`<rect key=${name} x=${x} y="0" width=${(100 * count) / total} height="10" class=${colours[name] || "grey"} />`;
    })}</svg>`;
}

// Before and after on one line from 0 to 1, each with its interval.
export function Dumbbell({ before, after }) {
  const x = (value) => 4 + Math.min(1, Math.max(0, value)) * 152;
  const mark = (point, y, tone) => point.value !== null && html`<g class=${tone}>
    ${point.low !== null && point.low !== undefined && html`<line x1=${x(point.low)} x2=${x(point.high)} y1=${y} y2=${y} class="whisker" />`}
    <circle cx=${x(point.value)} cy=${y} r="3.5" /></g>`;
  return html`<svg class="dumbbell" viewBox="0 0 160 22" width="160" height="22" aria-hidden="true">
    <line x1="4" x2="156" y1="11" y2="11" class="axis" />${mark(before, 7, "grey")}${mark(after, 15, "blue")}</svg>`;
}

// Shares over time as squares: white 0, blue 1.
export function ShareCells({ values, labels = [] }) {
  return html`<span class="cells" role="img" aria-label=${values.map((value) => percent(value)).join(", ")}>
    ${values.map((value, place) => html`<i key=${place} class=${"cell " + (value === null ? "none" : `heat-p${Math.round(value * 6)}`)}
      title=${`${labels[place] || ""} ${percent(value)}`}></i>`)}</span>`;
}
