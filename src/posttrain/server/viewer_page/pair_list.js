// Pairs of answers with their scores, their margins, and the calibration of a reward model.
import { choose } from "./address.js";
import { pathOf } from "./api.js";
import { html } from "./dom.js";
import { counted, number, percent, plain, signed } from "./format.js";
import { Loaded } from "./loading.js";
import { Empty, Fact, Section, Select, Tag, Visible } from "./parts.js";

const PAGE = 50;
const SORTS = [["", "in order"], ["margin", "most wrong first"], ["-margin", "widest margin first"]];
const SIDE_BINS = 12; // on each side of 0; a margin of exactly 0 has a bin of its own
const COUNTS = [["num_prompts", "prompts", number], ["num_judged", "judged", number], ["num_ties", "ties", number], ["num_open", "not judged yet", number],
  ["longer_chosen_share", "longer answer chosen", percent]];

export function PairsPage({ run, query, version }) {
  const asked = { step: query.step, sort: query.sort, offset: query.offset };
  return html`<h1 tabindex="-1">Pairs</h1><${Loaded} path=${pathOf(`/api/run/${run.run}/pairs`, asked)} version=${version} lines=${12}>
    ${(page) => html`<${Pairs} page=${page} query=${query} />`}<//>`;
}

function Pairs({ page, query }) {
  const options = SORTS.map(([value, label]) => ({ value, label }));
  const last = page.offset + page.rows.length;
  return html`${page.lacks.map((text) => html`<p class="note" key=${text}>${plain(text)}</p>`)}
    ${page.total > 0 && html`<p class="note">Scores: ${page.scores}${page.unit && html` (${page.unit})`}.</p>`}
    <dl class="facts"><${Fact} name="pairs">${number(page.total)}<//>
      ${page.margins.length > 0 && html`<${Fact} name="rejected answer scores higher">${number(page.wrong)}<//>`}
      ${COUNTS.filter(([name]) => name in page.counts).map(([name, label, show]) => html`<${Fact} key=${name} name=${label}>${show(page.counts[name])}<//>`)}</dl>
    <div class="panels kinds">${page.margins.length > 1 && html`<${Margins} margins=${page.margins} />`}
      ${page.calibration.length > 0 && html`<${Calibration} curves=${page.calibration} />`}</div>
    <${Section} id="pairs" title=${counted(page.total, "pair")} actions=${html`<span class="bar">
        ${page.steps.length > 0 && html`<${Select} label="round of step" value=${String(page.step)} onChange=${(step) => choose({ step, offset: "" })}
          options=${page.steps.map((step) => ({ value: String(step), label: String(step) }))} />`}
        ${page.total > 1 && html`<${Select} label="order" value=${query.sort || ""} options=${options} onChange=${(sort) => choose({ sort, offset: "" })} />`}</span>`}>
      ${page.rows.length ? page.rows.map((row, place) => html`<${Pair} key=${page.offset + place} row=${row} />`) : html`<${Empty}>No pairs to show.<//>`}
      ${page.total > PAGE && html`<nav class="near" aria-label="pages of pairs">
        ${page.offset > 0 && html`<button type="button" onClick=${() => choose({ offset: Math.max(0, page.offset - PAGE) || "" })}>← previous</button>`}
        <span class="note">${page.offset + 1} to ${last} of ${number(page.total)}</span>
        ${last < page.total && html`<button type="button" onClick=${() => choose({ offset: page.offset + PAGE })}>next →</button>`}</nav>`}<//>`;
}

function Pair({ row }) {
  const wrong = row.margin !== null && row.margin < 0;
  return html`<article class=${"pair" + (wrong ? " wrong" : "")} tabindex="0" data-item>
    <header><span class="muted">${plain(row.where)}</span>${row.tie && html`<${Tag}>tie<//>`}${wrong && html`<${Tag} tone="warn">wrong order<//>`}
      <span class="n">margin <b>${signed(row.margin)}</b></span>${row.judge && html`<span class="muted">judged by ${plain(row.judge)}</span>`}</header>
    ${row.prompt && html`<div class="tokens asked"><${Visible} text=${row.prompt} spaces=${false} /></div>`}
    <div class="sides">${["chosen", "rejected"].map((side) => html`<section key=${side} aria-label=${side}>
      <h3>${row.tie ? { chosen: "first", rejected: "second" }[side] : side} <span class="n">${number(row[side + "_score"])}</span></h3>
      <div class="tokens"><${Visible} text=${row[side]} spaces=${false} /></div></section>`)}</div></article>`;
}

// The bin of a margin: those left of the middle are in the wrong order, and the middle one holds ties.
function binOf(margin, size) {
  if (margin === 0) return SIDE_BINS;
  const away = Math.min(SIDE_BINS - 1, Math.floor((Math.abs(margin) / size) * SIDE_BINS)) + 1;
  return SIDE_BINS + Math.sign(margin) * away;
}

// How many pairs have which margin.
function Margins({ margins }) {
  const size = Math.max(...margins.map(Math.abs), 1e-9);
  const counts = new Array(2 * SIDE_BINS + 1).fill(0);
  for (const margin of margins) counts[binOf(margin, size)] += 1;
  const most = Math.max(...counts);
  const wide = 274 / counts.length;
  const tone = (bin) => (bin === SIDE_BINS ? "grey" : bin < SIDE_BINS ? "orange" : "blue");
  const said = `margins of ${margins.length} pairs from ${number(-size)} to ${number(size)}; ${margins.filter((one) => one < 0).length} below 0, ${counts[SIDE_BINS]} at 0`;
  return html`<figure class="chart plain-figure"><figcaption><h3>Margins<span class="unit">score of chosen − score of rejected</span></h3></figcaption>
    <svg viewBox="0 0 320 150" role="img" aria-label=${said}><line x1="36" x2="310" y1="128" y2="128" class="axis" /><line x1="36" x2="36" y1="16" y2="128" class="axis" />
      ${counts.map((count, bin) => html`<rect key=${bin} x=${36 + bin * wide} width=${wide - 1} y=${128 - (count / most) * 112}
        height=${(count / most) * 112} class=${tone(bin)}><title>${counted(count, bin === SIDE_BINS ? "tie" : "pair")}</title></rect>`)}
      <text x="32" y="20" text-anchor="end">${number(most)}</text><text x="32" y="130" text-anchor="end">0</text><text x="36" y="10">pairs</text>
      <text x="36" y="144">${number(-size)}</text><text x="173" y="144" text-anchor="middle">0</text>
      <text x="310" y="144" text-anchor="end">${number(size)}</text></svg></figure>`;
}

const SIDE = 180;

// How often the answer with the higher score was preferred, by the probability that its score predicts.
function Calibration({ curves }) {
  const x = (value) => 48 + (value - 0.5) * 2 * SIDE;
  const y = (value) => 10 + (1 - value) * SIDE;
  const tones = { before: "grey", after: "blue" };
  const said = curves.map((one) => `${one.when} training: ${number(one.error)}, ${number(one.by_chance)} expected by chance`).join("; ");
  return html`<figure class="chart plain-figure"><figcaption><h3>Calibration</h3><span class="readings">${curves.map((one) => html`<span class="reading" key=${one.when}
      title=${`Calibration error: mean distance between predicted and observed shares. ${number(one.by_chance)} is expected by chance.`}>
      <i class=${"dot " + tones[one.when]}></i>error ${one.when} training <b>${number(one.error)}</b> (${number(one.by_chance)} by chance alone)</span>`)}</span></figcaption>
    <svg viewBox=${`0 0 ${SIDE + 74} ${SIDE + 42}`} role="img" aria-label=${"calibration error " + said}>
      <line x1=${x(0.5)} x2=${x(1)} y1=${y(0)} y2=${y(0)} class="axis" /><line x1=${x(0.5)} x2=${x(0.5)} y1=${y(0)} y2=${y(1)} class="axis" />
      <line x1=${x(0.5)} x2=${x(1)} y1=${y(0.5)} y2=${y(1)} class="axis dashed" />
      ${curves.flatMap((one) => one.points.filter((point) => point.confidence !== null && point.right !== null).map((point, place) => html`<g key=${one.when + place} class=${tones[one.when]}>
        ${point.right_low !== null && html`<line class="whisker" x1=${x(point.confidence)} x2=${x(point.confidence)} y1=${y(point.right_low)} y2=${y(point.right_high)} />`}
        <circle cx=${x(point.confidence)} cy=${y(point.right)} r="4"><title>${`${one.when}: ${counted(point.num_pairs, "pair")}, predicted ${percent(point.confidence)}, right ${percent(point.right)}`}</title></circle></g>`))}
      ${[0, 0.5, 1].map((value) => html`<text key=${value} x=${x(0.5) - 6} y=${y(value) + 4} text-anchor="end">${percent(value)}</text>`)}
      <text x=${x(0.5)} y=${SIDE + 26}>50%</text><text x=${x(1)} y=${SIDE + 26} text-anchor="end">100%</text>
      <text x=${x(0.75)} y=${SIDE + 38} text-anchor="middle">predicted probability</text>
      <text transform=${`translate(10 ${y(0.5)}) rotate(-90)`} text-anchor="middle">share right</text></svg></figure>`;
}
