// A text token by token: colours by a quantity, numbers on hover and on focus, marks of graders, white space.
import { heat } from "./colours.js";
import { html, useState } from "./dom.js";
import { brief, number, plain } from "./format.js";
import { Visible } from "./parts.js";

const SHOWN = 2000;

export function Pieces({ pieces, spaces, className = "" }) {
  const [limit, setLimit] = useState(SHOWN);
  return html`<div class=${"tokens " + className}>${pieces.slice(0, limit).map((piece, at) => html`<span key=${at} class=${kind(piece)}>${
    inside(piece, spaces)}</span>`)}</div><${More} total=${pieces.length} limit=${limit} setLimit=${setLimit} />`;
}

function kind(piece) {
  return "token" + (piece.special ? " special" : "") + (piece.sampled ? "" : " given") + (piece.partial ? " partial" : "");
}

function inside(piece, spaces) {
  return html`<${Visible} text=${piece.text} spaces=${spaces} />`;
}

function More({ total, limit, setLimit }) {
  if (total <= limit) return null;
  return html`<p class="note"><button type="button" class="plain" onClick=${() => setLimit(limit + 5 * SHOWN)}>
    Show more of ${total} tokens</button></p>`;
}

// `at` is the token whose numbers are shown; `onPick(at)` is called for hover and focus, `onHold(at)` for a click and for keys.
export function TokenText({ pieces, values, scale, spaces, spans, turns, at, onPick, onHold = onPick, say }) {
  const [limit, setLimit] = useState(Math.max(SHOWN, at + 1));
  const keyed = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(Math.min(limit, pieces.length) - 1, Math.max(0, at + by));
    onHold(next);
    const node = event.currentTarget.querySelector(`[data-at="${next}"]`);
    node.focus({ preventScroll: true });
    node.scrollIntoView({ block: "nearest" });
  };
  const calling = (act) => (event) => {
    const node = event.target.closest("[data-at]");
    if (node) act(Number(node.dataset.at));
  };
  const picked = calling(onPick);
  const end = Math.min(limit, pieces.length);
  const token = (place) => html`${names(spans[place])}<span key=${place} data-at=${place} tabindex=${place === at ? 0 : -1} aria-label=${say(place)}
    data-value=${place === at && values && values[place] !== null ? number(values[place]) : undefined}
    class=${classes(pieces[place], values && values[place], scale, spans[place], place === at)}>${inside(pieces[place], spaces)}</span>`;
  return html`<div class="tokens read" role="group" aria-label="completion, token by token" onMouseOver=${picked} onFocusIn=${picked} onClick=${calling(onHold)} onKeyDown=${keyed}>
    ${segments(turns, end).map(({ from, to, turn }) => {
      const tokens = Array.from({ length: to - from }, (_, place) => token(from + place));
      return turn ? html`<div class="reply" key=${"r" + from}><${Calls} turn=${turn} />${tokens}</div>` : tokens;
    })}</div><${More} total=${pieces.length} limit=${limit} setLimit=${setLimit} />`;
}

// What was sampled and what replied, in order: [{from, to, turn: the turn that a reply answers}].
function segments(turns, end) {
  const found = [];
  let at = 0;
  for (const turn of turns) {
    found.push({ from: at, to: turn.end }, { from: turn.end, to: turn.end + turn.given, turn });
    at = turn.end + turn.given;
  }
  found.push({ from: at, to: end });
  return found.map((one) => ({ ...one, to: Math.min(one.to, end) })).filter((one) => one.to > one.from);
}

// The tools that a turn called, at the head of the reply.
function Calls({ turn }) {
  return html`<span class="reply-head">${turn.calls.length ? `reply of ${turn.calls.map(callText).join(", ")}` : "reply"}</span>`;
}

// {name, failed, …} -> "calculator (failed)"; what else a call says follows as JSON.
export function callText({ name = "", failed, ...rest }) {
  const more = Object.keys(rest).length ? " " + brief(JSON.stringify(rest), 160) : "";
  return plain(name) + (failed ? " (failed)" : "") + plain(more);
}

// The name of a grader's span, at its first token.
function names(marks) {
  return marks && marks.filter((mark) => mark.first).map(({ kind: name, span }) => html`<span class=${"mark-name " + name} data-name=${plain(`${span.function}: ${name}`)}></span>`);
}

function classes(piece, value, scale, marks, on) {
  const marked = marks ? marks.map((mark) => ` mark-${mark.kind}${mark.first ? " first" : ""}`).join("") : "";
  return `${kind(piece)} ${scale ? heat(value, scale) : ""}${marked}${on ? " on" : ""}`;
}

// Which spans cover which tokens: {token: [{kind, first, span}]}. Offsets are in the completion; spans in prefill + completion.
export function spansByToken(offsets, spans, shift) {
  const found = {};
  for (const span of spans) {
    let first = true;
    for (let at = 0; at + 1 < offsets.length; at++) {
      const [start, end] = [offsets[at] + shift, offsets[at + 1] + shift];
      if (end <= span.start || start >= span.end || start === end) continue;
      (found[at] ||= []).push({ kind: span.kind, first, span });
      first = false;
    }
  }
  return found;
}

// A completion without a tokenizer: its characters only.
export function PlainText({ text, spaces }) {
  const [all, setAll] = useState(false);
  const shown = all ? text : text.slice(0, 20000);
  return html`<div class="tokens"><${Visible} text=${shown} spaces=${spaces} /></div>
    ${shown.length < text.length && html`<p class="note"><button type="button" class="plain" onClick=${() => setAll(true)}>
      Show all ${text.length} characters</button></p>`}`;
}

export function tokenName(piece) {
  return plain(JSON.stringify(piece.text));
}
