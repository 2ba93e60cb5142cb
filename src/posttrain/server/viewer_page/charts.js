// Curves over steps: uPlot with our colours, one linked cursor, and a legend that reads out the values under it.
import { html, useEffect, useLayoutEffect, useMemo, useRef } from "./dom.js";
import { lineColour, paint } from "./colours.js";
import { number, percent, words } from "./format.js";
import { useThemeVersion } from "./theme.js";

const { uPlot } = globalThis;
const HEIGHT = 150;
const FONT = "11px system-ui, sans-serif";
const DRAG_PX = 8;

// One axis for all lines. A line with two points at one step has two places there; `spread` puts null where a line has no point.
function aligned(lines) {
  const times = new Map();
  for (const line of lines) {
    for (const [step, count] of counts(line.steps)) times.set(step, Math.max(count, times.get(step) || 0));
  }
  const steps = [...times.keys()].sort((a, b) => a - b).flatMap((step) => new Array(times.get(step)).fill(step));
  const first = new Map([...steps.keys()].reverse().map((at) => [steps[at], at]));
  const spread = (line, values) => {
    const row = new Array(steps.length).fill(null);
    const seen = new Map();
    line.steps.forEach((step, at) => {
      const before = seen.get(step) || 0;
      row[first.get(step) + before] = values[at] ?? null;
      seen.set(step, before + 1);
    });
    return row;
  };
  return { steps, spread };
}

function counts(values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) || 0) + 1);
  return found;
}

// Intervals that no band shows, because neither neighbour on the line has one: {step, low, high, colour}.
function whiskersOf(line, colour) {
  const has = (at) => (line.low[at] ?? null) !== null;
  return line.steps.flatMap((step, at) => (has(at) && !has(at - 1) && !has(at + 1) ? [{ step, low: line.low[at], high: line.high[at], colour }] : []));
}

// A line of the right axis is dashed.
function dashOf(line) {
  return line.dash || (line.axis === "right" ? [4, 3] : undefined);
}

function pattern(dash) {
  if (!dash) return "";
  return dash[0] > 3 ? "dashed" : "dotted";
}

function asLines(lines) {
  const { steps, spread } = aligned(lines);
  const data = [steps];
  const series = [{}];
  const bands = [];
  const whiskers = [];
  lines.forEach((line, place) => {
    const colour = line.colour || lineColour(place);
    data.push(spread(line, line.values));
    series.push({ colour, scale: line.axis === "right" ? "right" : "y", width: 1.6, points: { show: line.steps.length < 25, size: 5 }, dash: dashOf(line) });
    if (!line.low || !line.high || !line.low.some((value) => value !== null)) return;
    data.push(spread(line, line.high), spread(line, line.low));
    series.push({ edge: true, scale: "y" }, { edge: true, scale: "y" });
    bands.push({ series: [data.length - 2, data.length - 1], colour });
    whiskers.push(...whiskersOf(line, colour));
  });
  return { data, series, bands, whiskers };
}

// Shares on top of each other; the first line is drawn at the bottom.
function asStack(lines) {
  const { steps, spread } = aligned(lines);
  const data = [steps];
  const series = [{}];
  let below = new Array(steps.length).fill(0);
  const tops = lines.map((line) => {
    below = spread(line, line.values).map((value, at) => below[at] + (value || 0));
    return below;
  });
  for (let place = lines.length - 1; place >= 0; place--) {
    data.push(tops[place]);
    series.push({ colour: lines[place].colour || lineColour(place), width: 1, filled: true, points: { show: false } });
  }
  return { data, series, bands: [], whiskers: [] };
}

function options({ built, size, range, percents, stacked, hooks, sync }) {
  const muted = paint("muted");
  const axis = { stroke: muted, font: FONT, ticks: { show: false }, gap: 6 };
  const grid = { stroke: paint("line"), width: 1 };
  const right = built.series.some((one) => one.scale === "right");
  return {
    ...size,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
    scales: { x: { time: false, range }, y: { range: yRange(percents, stacked) }, ...(right && { right: { range: yRange(true, false) } }) },
    axes: [
      { ...axis, grid: { show: false }, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
      { ...axis, grid, size: 46, values: percents ? asPercents : asNumbers, space: 34 },
      ...(right ? [{ ...axis, grid: { show: false }, side: 1, scale: "right", size: 40, values: asPercents, space: 34 }] : []),
    ],
    series: built.series.map((one) => (one.colour || one.edge ? drawn(one, stacked) : {})),
    bands: built.bands.map((band) => ({ series: band.series, fill: paint(band.colour, 0.16) })),
    hooks,
  };
}

function asPercents(_, values) {
  return values.map((value) => `${number(value * 100, 2)}%`);
}

// As many decimals as the distance between two lines of the grid needs.
function asNumbers(_, values, axis, space, distance) {
  if (distance < 1e-4) return values.map((value) => (value ? value.toExponential(0).replaceAll("-", "\u2212") : "0"));
  const decimals = (String(Number(distance.toPrecision(6))).split(/[.e]/)[1] || "").length;
  return values.map((value) => value.toFixed(decimals).replace("-", "\u2212"));
}

function drawn(one, stacked) {
  if (one.edge) return { stroke: "transparent", points: { show: false }, spanGaps: true, scale: one.scale };
  const stroke = stacked ? paint("surface") : paint(one.colour);
  const fill = one.filled ? paint(one.colour, 1) : undefined;
  return { stroke, width: one.width, fill, spanGaps: true, scale: one.scale || "y", dash: one.dash, points: { ...one.points, fill: stroke } };
}

function yRange(percents, stacked) {
  return (_, low, high) => {
    if (stacked) return [0, percents ? 1 : high || 1];
    if (low === null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    const bottom = low >= 0 && low <= 0.35 * high ? 0 : low - room;
    return [percents ? Math.max(0, bottom) : bottom, percents ? Math.min(1, high + room) : high + room];
  };
}

// Intervals of single points: a vertical line with a short bar at each end.
function drawWhiskers(plot, whiskers) {
  const { ctx } = plot;
  const unit = devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = 1.4 * unit;
  for (const { step, low, high, colour } of whiskers) {
    const x = Math.round(plot.valToPos(step, "x", true));
    const ends = [low, high].map((value) => plot.valToPos(value, "y", true));
    ctx.strokeStyle = paint(colour);
    ctx.beginPath();
    ctx.moveTo(x, ends[0]);
    ctx.lineTo(x, ends[1]);
    for (const y of ends) {
      ctx.moveTo(x - 5 * unit, y);
      ctx.lineTo(x + 5 * unit, y);
    }
    ctx.stroke();
  }
  ctx.restore();
}

// Alarms: a small mark at the foot of their step.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = paint("orange");
  ctx.strokeStyle = paint("orange", 0.5);
  ctx.setLineDash([3, 3]);
  const unit = devicePixelRatio || 1;
  for (const step of marks) {
    const x = Math.round(plot.valToPos(step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const foot = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, foot - 7 * unit);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x, foot - 8 * unit);
    ctx.lineTo(x - 4.5 * unit, foot);
    ctx.lineTo(x + 4.5 * unit, foot);
    ctx.fill();
  }
  ctx.restore();
}

// `lines`: [{name, steps, values, low?, high?, colour?}]. A click opens the step under the cursor; a drag zooms.
export function Chart({ title, unit, lines, stacked, percents, range, marks = [], sync = "steps", height = HEIGHT, onOpen, onZoom, onMark }) {
  const box = useRef(null);
  const head = useRef(null);
  const plot = useRef(null);
  const acts = useRef({});
  const themed = useThemeVersion();
  const built = useMemo(() => (stacked ? asStack(lines) : asLines(lines)), [JSON.stringify(lines), stacked]);
  acts.current = { onOpen, onZoom, onMark, range, marks, lines, whiskers: built.whiskers };
  const shape = JSON.stringify([built.series, built.bands, stacked, percents, height, sync]);
  useLayoutEffect(() => {
    const node = box.current;
    const hooks = {
      setCursor: [(drawing) => readOut(head.current, node, drawing, acts.current.lines, percents)],
      setSelect: [(drawing) => zoomed(drawing, acts.current)],
      draw: [(drawing) => drawWhiskers(drawing, acts.current.whiskers), (drawing) => drawMarks(drawing, acts.current.marks)],
      ready: [(drawing) => listen(drawing, acts)],
    };
    const size = { width: node.clientWidth || 300, height };
    const limits = (_, low, high) => acts.current.range || (low === high ? [low - 0.5, high + 0.5] : [low, high + (high - low) * 1e-6]); // else a second point at the last step is left out
    plot.current = new uPlot(options({ built, size, range: limits, percents, stacked, hooks, sync }), built.data, node);
    readOut(head.current, node, plot.current, lines, percents);
    const watcher = new ResizeObserver(() => plot.current.setSize({ width: node.clientWidth, height }));
    watcher.observe(node);
    return () => { watcher.disconnect(); plot.current.destroy(); };
  }, [shape, themed]);
  useEffect(() => {
    plot.current.setData(built.data);
    readOut(head.current, box.current, plot.current, lines, percents);
  }, [built, JSON.stringify(range), JSON.stringify(marks)]);
  return html`<figure class="chart"><figcaption ref=${head}>
      <h3>${title}${unit && html`<span class="unit">${unit}</span>`}</h3>
      <span class="readings">${lines.map((line, place) => html`<span class="reading" key=${line.name}>
        <i class=${`${stacked ? "dot" : "stroke"} ${line.colour || lineColour(place)} ${pattern(dashOf(line))}`}></i>${words(line.name).toLowerCase() !== title.toLowerCase() && words(line.name)} <b></b></span>`)}</span>
    </figcaption><div class="plot" ref=${box} role="slider" tabindex="0" aria-label=${spoken(title, lines, percents)}
      onKeyDown=${(event) => keyed(event, plot.current, acts.current)}></div></figure>`;
}

// A line of a chart in words, for those who do not see it.
function spoken(title, lines, percents) {
  const show = percents ? percent : number;
  const said = lines.map(({ name, steps, values }) => {
    const known = steps.map((step, at) => [step, values[at]]).filter(([, value]) => value !== null);
    if (!known.length) return `${name}: no values`;
    const [first, last] = [known[0], known[known.length - 1]];
    return `${words(name)}: ${show(first[1])} at step ${first[0]}, ${show(last[1])} at step ${last[0]}`;
  });
  return `${title}. ${said.join("; ")}`;
}

// The values at the cursor, or the last ones: in the legend, and in words on the plot.
function readOut(head, node, plot, lines, percents) {
  if (!head) return;
  const steps = plot.data[0];
  const at = plot.cursor.idx ?? steps.length - 1;
  const show = percents ? percent : number;
  const places = head.querySelectorAll("b");
  const values = lines.map((line) => (line.axis === "right" ? percent : show)(near(line, steps[at])));
  values.forEach((value, place) => { if (places[place]) places[place].textContent = value; });
  const said = { min: steps[0], max: steps[steps.length - 1], now: steps[at], text: `step ${steps[at]}: ${lines.map((line, place) => `${words(line.name)} ${values[place]}`).join(", ")}` };
  for (const [name, value] of Object.entries(said)) node.setAttribute(`aria-value${name}`, value ?? 0);
}

const MOVES = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

// The chart by keyboard: arrows move the cursor, Enter opens its alarm or else its step, + and − zoom.
function keyed(event, plot, { onOpen, onZoom, onMark, marks }) {
  const steps = plot.data[0];
  const at = plot.cursor.idx ?? (event.key === "ArrowRight" ? -1 : steps.length);
  const step = steps[plot.cursor.idx];
  const acts = {
    Enter: step === undefined ? undefined : marks.includes(step) && onMark ? () => onMark(step) : onOpen && (() => onOpen(step)),
    "+": onZoom && step !== undefined ? () => onZoom(...halfAround(step, steps)) : undefined,
    "-": onZoom && (() => onZoom(null, null)),
  };
  const act = event.key in MOVES ? () => moveCursor(plot, Math.min(steps.length - 1, Math.max(0, at + MOVES[event.key]))) : acts[event.key];
  if (!act) return;
  event.preventDefault();
  event.stopPropagation();
  act();
}

// The cursor is where its pixel is: the charts that are linked to it follow.
function moveCursor(plot, at) {
  plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 1 });
}

function halfAround(step, steps) {
  const quarter = Math.max(1, Math.round((steps[steps.length - 1] - steps[0]) / 4));
  return [Math.max(steps[0], step - quarter), step + quarter];
}

// The value at a step, or the last one before it.
function near(line, step) {
  for (let at = line.steps.length - 1; at >= 0; at--) {
    if (line.steps[at] <= step && line.values[at] !== null) return line.values[at];
  }
  return null;
}

function zoomed(plot, { onZoom }) {
  if (!onZoom || plot.select.width < DRAG_PX) return;
  const left = plot.posToVal(plot.select.left, "x");
  const right = plot.posToVal(plot.select.left + plot.select.width, "x");
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  onZoom(Math.floor(left), Math.ceil(right));
}

// The alarm whose mark is under the pointer.
function markAt(plot, marks, event) {
  const box = plot.over.getBoundingClientRect();
  if (event.clientY < box.bottom - 2 * DRAG_PX) return undefined;
  return marks.find((step) => Math.abs(plot.valToPos(step, "x") - (event.clientX - box.left)) < DRAG_PX);
}

function listen(plot, acts) {
  let down = null;
  plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    const { onOpen, onMark, marks } = acts.current;
    const at = plot.cursor.idx;
    const mark = onMark ? markAt(plot, marks, event) : undefined;
    if (mark !== undefined) onMark(mark);
    else if (onOpen && at !== null && Math.abs(event.clientX - down) < DRAG_PX) onOpen(plot.data[0][at]);
  });
  plot.over.addEventListener("dblclick", () => acts.current.onZoom && acts.current.onZoom(null, null));
}
