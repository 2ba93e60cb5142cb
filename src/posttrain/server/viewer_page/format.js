// Numbers and texts as they are shown.

const MINUS = "\u2212";

// Three significant digits; "–" where there is no value.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return grouped(value);
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : value.toPrecision(digits);
  return text.replaceAll("-", MINUS).replace("e+", "e");
}

// The same without zeros at its end: for scales.
export function short(value) {
  return number(Number(value.toPrecision(3))).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function grouped(value) {
  return String(value).replace("-", MINUS).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${number(value * 100)}%`;
}

export function signed(value) {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${number(value)} s`;
  const whole = Math.round(value);
  const minutes = Math.floor(whole / 60);
  return minutes < 100 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function interval(low, high, show = number) {
  return low === null || low === undefined ? "" : `${show(low)} to ${show(high)}`;
}

// An interval of shares, cut at its bounds: a normal approximation of few seeds goes beyond them.
export function shareInterval(low, high, least = 0) {
  const cut = (value) => Math.min(1, Math.max(least, value));
  return low === null || low === undefined ? "" : interval(cut(low), cut(high), percent);
}

// What a task says of a completion: right, wrong, or a score between them.
export function judgement(score) {
  if (score === null || score === undefined) return "–";
  return score >= 1 ? "right" : score <= 0 ? "wrong" : number(score);
}

// How an evaluation is called in the run folder, in words. The quick ones during training are called "brief".
export function evaluationName(name) {
  return { before: "before training", brief: "during training", after: "after training" }[name] || plain(name);
}

// "1 rollout", "2 rollouts"
export function counted(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}

// "wrong_value" -> "wrong value"
export function words(name) {
  return String(name).replaceAll("_", " ");
}

// The start of a text on one line.
export function brief(text, length = 120) {
  const line = String(text).replace(/\s+/g, " ").trim();
  return line.length > length ? line.slice(0, length) + "…" : line;
}

// Characters that would be invisible, move others or break a line unseen: shown by their code, such as U+202E.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udfff]/;

const UNSEEN_OR_SPACE = new RegExp(`(${UNSEEN.source}| |\\t|\\n)`);
const ONLY_UNSEEN = new RegExp(`(${UNSEEN.source})`);
const SPACES = { " ": "space", "\t": "tab", "\n": "newline" };

// [{text, kind: "text" | "unseen" | "space" | "tab" | "newline"}], in order; with `spaces` false, spaces are in the texts.
export function visibleParts(text, spaces) {
  const parts = text.split(spaces ? UNSEEN_OR_SPACE : ONLY_UNSEEN).filter((part) => part !== "");
  return parts.map((part) => {
    const unseen = part.length <= 2 && UNSEEN.test(part);
    return { text: unseen ? code(part) : part, kind: unseen ? "unseen" : (spaces && SPACES[part]) || "text" };
  });
}

function code(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

// A text on one or more lines with what is unseen written out: for titles, labels and cells of tables.
export function plain(text) {
  return visibleParts(String(text), false).map((part) => (part.kind === "unseen" ? `[${part.text}]` : part.text)).join("");
}
