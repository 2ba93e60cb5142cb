// Small pieces that every page uses.
import { heat, levels } from "./colours.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { number, plain, short, visibleParts, words } from "./format.js";

export function Fault({ text }) {
  return html`<p class="fault" role="status">${plain(text)}</p>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Skeleton({ lines = 4 }) {
  const rows = Array.from({ length: lines }, (_, line) => html`<span class="bone" key=${line}></span>`);
  return html`<div class="skeleton" role="status" aria-label="loading">${rows}</div>`;
}

export function Outcome({ name, colour = "grey" }) {
  return html`<span class="outcome"><i class=${"dot " + colour} aria-hidden="true"></i>${plain(words(name))}</span>`;
}

export function Tag({ children, tone = "", title }) {
  return html`<span class=${"tag " + tone} title=${title}>${children}</span>`;
}

// A number on the colour of its sign: the same scale wherever this quantity is shown.
export function Signed({ value, scale }) {
  const text = typeof value === "number" && value > 0 ? "+" + number(value) : number(value);
  return html`<span class=${"signed " + heat(value, scale)}>${text}</span>`;
}

export function Fact({ name, children, title }) {
  return html`<div class="fact" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;
}

export function Section({ title, note, id, actions, children }) {
  return html`<section class="section" aria-labelledby=${id}>
    <header class="section-head"><h2 id=${id}>${title}</h2>${note && html`<p class="note">${note}</p>`}${actions}</header>
    ${children}
  </section>`;
}

// One choice of a few: radio buttons that look like one bar.
export function Choice({ label, name, options, value, onChange }) {
  return html`<fieldset class="choice"><legend>${label}</legend>
    ${options.map((option) => html`<label class=${option.value === value ? "on" : ""} key=${option.value} title=${option.title}>
      <input type="radio" name=${name} value=${option.value} checked=${option.value === value}
        onChange=${() => onChange(option.value)} />${option.label}</label>`)}
  </fieldset>`;
}

// A value that is not among the options, such as an outcome of rows that were not read yet, stays chosen.
export function Select({ label, options: offered, value, onChange }) {
  const options = offered.some((option) => option.value === value) ? offered : [...offered, { value, label: plain(value) }];
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map((option) => html`<option value=${option.value} selected=${option.value === value}>${option.label}</option>`)}
    </select></label>`;
}

const PAUSE_MS = 250;

// The search field of a page: it searches when typing pauses.
export function SearchField({ places, text = "", onSearch }) {
  const [typed, setTyped] = useState(text);
  const timer = useRef(null);
  useEffect(() => setTyped(text), [text]);
  const changed = (event) => {
    const { value } = event.target;
    setTyped(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onSearch(value), PAUSE_MS);
  };
  return html`<label class="field grow"><span>search</span><input type="search" data-search placeholder=${`in ${places} ( / )`} value=${typed} onInput=${changed} /></label>`;
}

// A text with white space and unseen characters marked, always as text.
export function Visible({ text, spaces = true }) {
  return visibleParts(text, spaces).map((part) => {
    if (part.kind === "unseen") return html`<span class="unseen" title="an invisible character">${part.text}</span>`;
    if (part.kind === "newline") return html`<span class="newline" aria-hidden="true"></span>${"\n"}`;
    if (part.kind === "space") return html`<span class="space"> </span>`;
    if (part.kind === "tab") return html`<span class="tab">${"\t"}</span>`;
    return part.text;
  });
}

// What the colours stand for.
export function Legend({ scale, label, unit }) {
  const sides = scale.signed ? [...steps("n").reverse(), "heat-0", ...steps("p")] : ["heat-0", ...steps("p")];
  const show = (share) => short(scale.middle + share * scale.full) + (share === 1 && unit ? " " + unit : "");
  return html`<div class="legend" role="img" aria-label=${`colours of ${label}: from ${show(scale.signed ? -1 : 0)} to ${show(1)}`}>
    <span>${show(scale.signed ? -1 : 0)}</span>
    <span class="ramp">${sides.map((name) => html`<i class=${name} key=${name}></i>`)}</span>
    <span>${show(1)}</span>${scale.own && html`<span class="note">(this rollout's largest)</span>`}</div>`;
}

function steps(sign) {
  return Array.from({ length: levels }, (_, level) => `heat-${sign}${level + 1}`);
}
