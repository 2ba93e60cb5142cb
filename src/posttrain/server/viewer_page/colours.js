// Colours by meaning. The numbers are in style.css, once for light and dark; here are the names and the scales.

// How many steps of colour lie between white and the full colour.
const LEVELS = 6;

// What a full colour stands for, so that a colour means the same on every page. Signed quantities run from −full (orange)
// over white to +full (blue); the others from 0 (white) to full (blue).
const NATS = { full: -5, signed: false };
const REWARD = { full: 1, signed: true };
const ADVANTAGE = { full: 2, signed: true };
const ENTROPY = { full: 2, signed: false };
const GAP = { full: 2, signed: true };
const RATIO = { full: 0.2, signed: true, middle: 1 };
const YES = { full: 1, signed: false };
const SCALES = {
  ...{ reward: REWARD, advantage: ADVANTAGE, token_advantages: ADVANTAGE, token_values: REWARD, process_rewards: REWARD, token_rewards: REWARD },
  ...{ logprobs: NATS, cut_logprobs: NATS, policy_logprobs: NATS, reference_logprobs: NATS, teacher_logprobs: NATS, teacher_logprobs_gap: GAP, reference_logprobs_gap: GAP },
  ...{ ratio: RATIO, clipped: YES, kl: { full: 0.5, signed: false }, updated_logprobs: NATS, updated_ratio: RATIO, updated_clipped: YES },
  ...{ entropy: ENTROPY, entropies: ENTROPY, new_values: REWARD, values: REWARD, returns: REWARD },
};

// The name of a quantity without the update that computed it: "ratio.2" -> "ratio".
export function baseOf(name) {
  return name.replace(/\.\d+$/, "");
}

export function scaleOf(quantity) {
  const known = SCALES[baseOf(quantity.name)];
  if (known) return { middle: 0, ...known };
  const sizes = quantity.values.filter((value) => value !== null).map(Math.abs);
  return { full: Math.max(...sizes, 1e-9), signed: quantity.diverging, middle: quantity.centre || 0, own: true };
}

// The class of a value: "heat-p4" is the fourth blue, "heat-n2" the second orange, "" no colour.
export function heat(value, scale) {
  if (value === null || value === undefined) return "";
  const share = (value - scale.middle) / scale.full;
  const level = Math.min(LEVELS, Math.round(Math.abs(share) * LEVELS));
  if (!level) return "";
  return `heat-${share < 0 ? "n" : "p"}${level}`;
}

export const levels = LEVELS;

// Outcomes of the library's graders, from good to bad: an outcome has one colour on every page and in every run.
const OUTCOMES = {
  correct: "blue", passed: "blue", partial: "sky", wrong_value: "amber", wrong: "amber", wrong_numbers: "orange", unformatted: "orange",
  malformed: "purple", syntax_error: "purple", raised: "purple", no_answer: "green", no_code: "green", truncated: "grey", time_limit: "grey",
};
const OTHERS = ["purple", "amber", "green", "sky", "orange"];

export function outcomeColour(name) {
  if (name in OUTCOMES) return OUTCOMES[name];
  let sum = 0;
  for (let at = 0; at < name.length; at++) sum = (sum * 31 + name.charCodeAt(at)) % 9973;
  return OTHERS[sum % OTHERS.length];
}

// {name: colour}, good outcomes first.
export function outcomeColours(names) {
  const order = Object.keys(OUTCOMES);
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  return Object.fromEntries([...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1)).map((name) => [name, outcomeColour(name)]));
}

const LINES = ["blue", "orange", "green", "purple", "amber", "sky", "grey"];

export function lineColour(place) {
  return LINES[place % LINES.length];
}

// A colour of style.css as the canvas of a chart needs it, in the theme that is on.
export function paint(name, opacity = 1) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return opacity === 1 ? found : found.replace(/^rgb\((.*)\)$/, `rgba($1, ${opacity})`);
}
