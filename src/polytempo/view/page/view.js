// The page: asks for the runs every second or so, and draws what it is told. No state is kept here
// but what is chosen; all figures come from the server.

const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const STATE = { idle: "#c3c9d0", training: "#0072b2", uploading: "#e69f00" }; // gone: hatched
const CIVIDIS = ["#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a69d75", "#d3c164", "#fee838"];
const CLUSTERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f3c8d",
  "#f0e442", "#a5673f", "#59636e"];
const KINDS = { dispatch: "to clients", upload: "from clients", multicast: "to clients in training",
  exchange: "between peers" };
const EVERY = 1000, SELDOM = 4000; // milliseconds between two looks: while runs go on, and else
const LATEST = 250; // trainings that fill the width of the timeline
const CHOSEN = 24, DETAILED = 4; // runs in the curves, and in full

const $ = (where, what) => where.querySelector(what);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runs = new Map(); // key -> as listed
const known = new Map(); // key -> in full
const views = new Map(); // key -> element
let chosen = null; // keys, in the order of their colours; null: not chosen by hand yet
let lost = false;

const saved = JSON.parse(document.querySelector("#saved")?.textContent ?? "null"); // a page in one file

async function ask(path) {
  if (saved) return saved.answers[path] ?? saved.answers[path.split("?")[0]];
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 204) return null;
  if (answer.status === 404) return undefined;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// -- the loop ---------------------------------------------------------------------------------------

async function look() {
  let pause = SELDOM;
  try {
    if (!document.hidden) {
      await lookAtRuns();
      const keys = picked();
      await Promise.all(keys.map(lookAtRun));
      for (const key of known.keys()) if (!keys.includes(key)) known.delete(key);
      draw();
      const reading = [...known.values()].some((run) => run.reading);
      const busy = [...runs.values()].some((run) => run.status === "running");
      pause = reading ? 50 : busy ? EVERY : SELDOM;
    }
    lost = false;
  } catch (error) {
    lost = String(error.message || error);
  }
  say();
  if (!saved) setTimeout(look, pause);
}

async function lookAtRuns() {
  const found = await ask("/api/runs");
  runs.clear();
  for (const run of found.runs) runs.set(run.key, run);
  $(document, "#folders").textContent = found.folders.join(", ");
  $(document, "#more").textContent = found.left_out
    ? `The latest ${found.runs.length} runs are listed; ${found.left_out} older ones are not.` : "";
  list();
}

async function lookAtRun(key) {
  const before = known.get(key);
  const order = views.has(key) ? $(views.get(key), ".order").value : "slowest";
  const asked = new URLSearchParams({ order, have: before?.have ?? "" });
  const found = await ask(`/api/runs/${key}?${asked}`);
  if (found === undefined) known.delete(key);
  else if (found) known.set(key, { ...found, key, fresh: true });
}

/** The runs that are shown: those chosen by hand, else those that go on, else the latest. */
function picked() {
  if (chosen) return chosen.filter((key) => runs.has(key));
  const all = [...runs.values()];
  const going = all.filter((run) => run.status === "running");
  if (saved) return all.slice(0, CHOSEN).map((run) => run.key);
  return (going.length ? going : all).slice(0, going.length ? CHOSEN : 1).map((run) => run.key);
}

function say() {
  const state = $(document, "#state");
  state.className = lost ? "lost" : "";
  const going = [...runs.values()].filter((run) => run.status === "running").length;
  state.textContent = saved ? `saved ${saved.saved}` : lost
    ? "No answer. If the run has ended, its view has too: polytempo view FOLDER shows it again."
    : `${runs.size} run${runs.size === 1 ? "" : "s"}, ${going ? `${going} going on` : "none going on"}`;
}

// -- the list of runs -------------------------------------------------------------------------------

const look_of = (key) => {
  const shown = picked().map((one) => runs.get(one)), seeds = group(shown);
  const place = Math.max(0, together(seeds, shown) // runs that differ by their seed have one colour
    ? [...seeds.values()].findIndex((of) => of.some((run) => run.key === key)) : shown.findIndex((run) => run.key === key));
  return { color: PALETTE[place % PALETTE.length], dash: DASHES[Math.floor(place / PALETTE.length)] };
};

function list() {
  const box = $(document, "#list"), keys = picked();
  const wanted = [...runs.values()].map((run) => {
    const part = run.planned ? `${Math.round((100 * run.updates) / run.planned)}%` : `${run.updates}`;
    return { ...run, means: $(document, "#seeds").checked, text: run.status === "running" ? part : run.status, on: keys.includes(run.key) };
  });
  const stamp = JSON.stringify(wanted);
  if (box.dataset.stamp === stamp) return;
  box.dataset.stamp = stamp;
  const focused = document.activeElement?.dataset?.key;
  box.replaceChildren(...wanted.map((run) => {
    const label = document.createElement("label"), tick = document.createElement("input");
    tick.type = "checkbox"; tick.checked = run.on; tick.dataset.key = run.key;
    tick.disabled = !run.on && keys.length >= CHOSEN;
    tick.addEventListener("change", () => {
      chosen = tick.checked ? [...picked(), run.key] : picked().filter((key) => key !== run.key);
      list();
      Promise.all(picked().map(lookAtRun)).then(draw, () => {});
    });
    const dot = document.createElement("span"), name = document.createElement("span");
    dot.className = "dot"; if (run.on) dot.style.background = look_of(run.key).color;
    name.className = "name"; name.textContent = run.name;
    const small = document.createElement("small"); small.textContent = run.text;
    label.append(tick, dot, name, small);
    return label;
  }));
  if (focused) $(box, `[data-key="${focused}"]`)?.focus();
  if (!runs.size) box.innerHTML = '<p class="empty">No runs here yet.</p>';
}

// -- drawing ----------------------------------------------------------------------------------------

const CONFIG = { displayModeBar: false };

function plot(place, traces, layout = {}) {
  const axis = { gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"),
    automargin: true, tickfont: { color: css("--quiet") } };
  const style = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" },
    margin: { l: 48, r: 12, t: 12, b: 42 }, hovermode: "closest", uirevision: "as it was",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...layout,
    xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
  if (!place.dataset.watched) { // the page may be laid out anew around it
    place.dataset.watched = "yes";
    new ResizeObserver(() => { if (place.clientWidth && place.data) Plotly.Plots.resize(place); }).observe(place);
  }
  return Plotly.react(place, traces, style, CONFIG);
}

function draw() {
  if (!window.Plotly) return;
  const shown = picked().map((key) => known.get(key)).filter(Boolean);
  drawCurves(shown);
  const details = $(document, "#details"), full = shown.slice(0, DETAILED);
  details.className = full.length === 1 ? "one" : "";
  for (const [key, view] of views) {
    if (!full.some((run) => run.key === key)) { view.remove(); views.delete(key); }
  }
  for (const run of full) {
    const place = views.get(run.key) ?? addView(run.key);
    if (details.children[full.indexOf(run)] !== place) details.insertBefore(place, details.children[full.indexOf(run)]);
    if (run.fresh) drawRun(place, run);
    run.fresh = false;
  }
}

function drawCurves(shown) {
  const x = $(document, "input[name=x]:checked").value;
  const y = $(document, "input[name=y]:checked").value;
  const close = $(document, "#close").checked;
  const stamp = JSON.stringify([x, y, close, $(document, "#seeds").checked, shown.map((run) => [run.key, run.have]), css("--ink")]);
  const place = $(document, "#curve");
  if (place.dataset.stamp === stamp) return;
  place.dataset.stamp = stamp;
  const metric = shown[0]?.metric;
  const label = y === "loss" ? "loss" : metric?.label ?? "metric";
  $(document, "#heading").textContent = label[0].toUpperCase() + label.slice(1)
    + (metric && y !== "loss" ? ` (${metric.better} is better)` : "");
  const share = y !== "loss" && metric?.share;
  const form = share ? ".1%" : ".4g";
  const seeds = group(shown), means = together(seeds, shown);
  $(document, "#seeds").parentElement.hidden = seeds.size === shown.length;
  const traces = means ? [...seeds].flatMap(([name, runs], k) => ofSeeds(name, runs, x, y, k, form)) : shown.map((run) => ({
    x: run.curve[x], y: run.curve[y], name: text(run.name), mode: "lines+markers",
    marker: { size: run.curve.time.length > 60 ? 3 : 5 }, connectgaps: true,
    line: { width: 2.2, ...look_of(run.key) },
    hovertemplate: `%{y:${form}}<extra>${text(run.name)}</extra>`,
  }));
  const clock = shown.every((run) => run.deployed) ? "time (s)" : "simulated time (s)";
  plot(place, traces, {
    hovermode: "x unified", showlegend: shown.length > 1, uirevision: x + y + close,
    xaxis: { title: { text: { time: clock, updates: "updates", messages: "models sent" }[x] }, rangemode: "tozero" },
    yaxis: { tickformat: share ? ".2~%" : "", ...extent(traces, close, y === "loss" ? "lower" : metric?.better) },
  });
  const others = [...new Set(shown.map((run) => run.metric.name))];
  const notes = means ? ["Lines are means over seeds, bands are a standard deviation to either side."] : [];
  if (others.length > 1) notes.push(`These runs are judged by different metrics: ${others.join(", ")}.`);
  const thin = shown.reduce((sum, run) => sum + run.curve.left_out, 0);
  if (thin) notes.push(`${thin.toLocaleString()} evaluations are left out: 1,000 per run are drawn.`);
  if (shown.length > DETAILED) notes.push(`Of these, the first ${DETAILED} are shown in full below.`);
  $(document, "#curvenote").textContent = notes.join(" ");
}

/** Runs that differ by their seed alone, by the name of the rest of their folder. */
function group(shown) {
  const found = new Map();
  for (const run of shown) {
    const name = run.name.replace(/[/_-]?seed\d+$/, "") || run.strategy;
    found.set(name, [...(found.get(name) ?? []), run]);
  }
  return found;
}

const together = (seeds, shown) => seeds.size < shown.length && $(document, "#seeds").checked;

/** Mean and standard deviation of several seeds. A value holds until the next evaluation. */
function ofSeeds(name, runs, x, y, k, form) {
  const curves = runs.map((run) => run.curve[x].map((at, i) => [at, run.curve[y][i]]).filter(([, value]) => value !== null))
    .filter((curve) => curve.length);
  if (!curves.length) return [];
  const begin = Math.max(...curves.map((curve) => curve[0][0]));
  const grid = [...new Set(curves.flatMap((curve) => curve.map(([at]) => at)))].filter((at) => at >= begin).sort((a, b) => a - b);
  const values = curves.map((curve) => {
    let place = 0;
    return grid.map((at) => { while (place + 1 < curve.length && curve[place + 1][0] <= at) place++; return curve[place][1]; });
  });
  const over = (how) => grid.map((_, i) => how(values.map((one) => one[i])));
  const mean = (all) => all.reduce((sum, one) => sum + one) / all.length;
  const apart = (all) => Math.sqrt(all.reduce((sum, one) => sum + (one - mean(all)) ** 2, 0) / Math.max(1, all.length - 1));
  const color = PALETTE[k % PALETTE.length], dash = DASHES[Math.floor(k / PALETTE.length)];
  const edge = { x: grid, mode: "lines", line: { width: 0, shape: "hv" }, hoverinfo: "skip", showlegend: false, legendgroup: name };
  return [
    { ...edge, y: over((all) => mean(all) - apart(all)) },
    { ...edge, y: over((all) => mean(all) + apart(all)), fill: "tonexty", fillcolor: `${color}2b` },
    { x: grid, y: over(mean), name: `${text(name)} (${curves.length} seeds)`, mode: "lines",
      line: { color, dash, width: 2.2, shape: "hv" }, legendgroup: name, hovertemplate: `%{y:${form}}<extra>${text(name)}</extra>` },
  ];
}

/** Up to a named tick. With the close-up: without what was worse than anything in the last two thirds of each run. */
function extent(traces, close, better) {
  const all = traces.flatMap(({ y }) => y).filter((value) => value !== null);
  if (!all.length) return {};
  const late = traces.flatMap(({ y }) => y.slice(close ? Math.floor(y.length / 3) : 0)).filter((value) => value !== null);
  const low = Math.min(...(better === "lower" ? all : late)), high = Math.max(...(better === "lower" ? late : all));
  const span = high - low || 0.01, tenth = 10 ** Math.floor(Math.log10(span / 4));
  const step = tenth * [1, 2, 5, 10].find((times) => times * tenth >= span / 6);
  return { range: [low - 0.06 * span, step * Math.ceil(high / step) + 0.02 * span], nticks: 9 };
}

const text = (value) => String(value).replace(/[<&]/g, (c) => ({ "<": "&lt;", "&": "&amp;" })[c]);

function addView(key) {
  const view = $(document, "#detail").content.firstElementChild.cloneNode(true);
  view.dataset.key = key;
  views.set(key, view);
  $(view, ".order").parentElement.hidden = Boolean(saved); // which needs the server
  $(document, "#details").append(view);
  $(view, ".colour").addEventListener("change", ({ target }) => { target.dataset.chosen = "by hand"; drawGrid(view, known.get(key)); });
  $(view, ".order").addEventListener("change", () => lookAtRun(key).then(draw, () => {}));
  for (const which of ["graph", "similarity"]) {
    const slider = $(view, `.${which} input`);
    slider.addEventListener("input", () => drawMatrix(view, known.get(key), which, true));
  }
  const canvas = $(view, "canvas");
  canvas.addEventListener("pointermove", (event) => tip(event, view, known.get(key)));
  canvas.addEventListener("pointerleave", () => { $(document, "#tip").hidden = true; });
  new ResizeObserver(() => drawGrid(view, known.get(key))).observe($(view, ".grid"));
  return view;
}

function drawRun(view, run) {
  const details = `${run.strategy}, seed ${run.seed ?? "?"}`;
  $(view, "h2").textContent = run.name.includes(run.strategy) ? run.name : `${run.name}: ${details}`;
  const status = $(view, ".status");
  status.textContent = run.status || "not known";
  status.className = `status ${run.status}`;
  const done = run.planned ? Math.min(1, run.updates / run.planned) : 0;
  $(view, ".progress div").style.width = `${100 * done}%`;
  const figures = { updates: `${run.updates.toLocaleString()}${run.planned ? ` / ${run.planned.toLocaleString()}` : ""}`, ...run.figures };
  $(view, ".figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const box = document.createElement("div"), term = document.createElement("dt");
    const given = document.createElement("dd");
    term.textContent = name; given.textContent = value; box.append(term, given);
    return box;
  }));
  $(view, ".notes").replaceChildren(...run.notes.map((note) => {
    const line = document.createElement("li"); line.textContent = note; return line;
  }));
  drawGrid(view, run);
  drawTimeline(view, run);
  drawSpread(view, run);
  drawStaleness(view, run);
  drawMessages(view, run);
  for (const which of ["graph", "similarity"]) drawMatrix(view, run, which);
  drawClusters(view, run);
  drawDiagnosis(view, run);
  drawSettings(view, run);
}

// -- clients ----------------------------------------------------------------------------------------

function cells(view, run) {
  const canvas = $(view, "canvas"), number = run.clients.state.length;
  const width = Math.max(80, $(view, ".grid").clientWidth - 30);
  let size = Math.min(46, Math.floor(Math.sqrt((width * Math.max(150, width * 0.4)) / number)));
  size = Math.max(6, Math.min(size, width));
  const across = Math.max(1, Math.floor(width / size));
  return { canvas, number, size, across, width, height: Math.ceil(number / across) * size };
}

function drawGrid(view, run) {
  const card = $(view, ".grid");
  card.hidden = !run?.clients;
  if (card.hidden) return;
  const given = run.clients, select = $(view, ".colour");
  for (const option of select.options) {
    if (option.value === "value") option.textContent = run.metric.label;
    option.hidden = option.disabled = option.value === "state" ? !run.events
      : option.value === "updates" ? !run.events : !given[option.value];
  }
  if (run.status === "finished" && given.value && !select.dataset.chosen) select.value = "value"; // all are idle
  if (select.selectedOptions[0].disabled) select.value = [...select.options].find((o) => !o.disabled)?.value ?? "state";
  const by = select.value, { canvas, number, size, across, width, height } = cells(view, run);
  const sharp = window.devicePixelRatio || 1;
  canvas.width = width * sharp; canvas.height = height * sharp;
  canvas.style.height = `${height}px`; canvas.style.width = `${width}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  const values = by === "state" ? null : given[by];
  const finite = values?.filter((value) => value !== null) ?? [];
  const low = by === "value" ? Math.min(...finite) : 0, high = Math.max(...finite, low + 1e-9);
  const gap = size > 12 ? 2 : 1, gone = String(given.states.indexOf("gone"));
  pen.textAlign = "center"; pen.textBaseline = "middle";
  pen.font = `${Math.round(size * 0.34)}px system-ui, sans-serif`;
  for (let k = 0; k < number; k++) {
    const x = (k % across) * size, y = Math.floor(k / across) * size, state = given.state[k];
    const box = [x + gap / 2, y + gap / 2, size - gap, size - gap];
    let fill = null;
    if (values) fill = values[k] === null ? null : shade((values[k] - low) / (high - low));
    else if (state !== gone) fill = STATE[given.states[state]];
    if (fill) { pen.fillStyle = fill; pen.beginPath(); pen.roundRect(...box, size > 12 ? 3 : 1); pen.fill(); }
    else hatch(pen, box);
    if (size >= 24) {
      pen.fillStyle = fill ? ink(fill) : css("--quiet");
      pen.fillText(String(k), x + size / 2, y + size / 2);
    }
  }
  const counts = given.states.map((name, k) => `${given.counts[k]} ${name}`);
  canvas.setAttribute("aria-label", `${given.total} clients: ${counts.join(", ")}`);
  const legend = $(view, ".legend");
  if (!values) {
    legend.innerHTML = given.states.map((name, k) =>
      `<span><i class="${name}" style="background:${STATE[name] ?? ""}"></i>${given.counts[k].toLocaleString()} ${name}</span>`).join("");
  } else {
    const shown = (value) => by === "value" ? figure(run.metric, value) : value.toLocaleString(undefined, { maximumFractionDigits: 1 });
    legend.innerHTML = `<span>${shown(low)}<span class="scale" style="background:linear-gradient(90deg,${CIVIDIS})"></span>${shown(high)}</span>`
      + (finite.length < number ? `<span><i class="gone"></i>${number - finite.length} not known</span>` : "");
  }
  $(card, ".cap").textContent = given.total > number
    ? `The first ${number.toLocaleString()} of ${given.total.toLocaleString()} clients are drawn; the counts are of all.` : "";
}

function hatch(pen, [x, y, width, height]) {
  pen.save();
  pen.strokeStyle = css("--quiet"); pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  pen.beginPath(); pen.moveTo(x, y + height); pen.lineTo(x + width, y); pen.stroke();
  pen.restore();
}

function shade(share) {
  const at = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1), k = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const parts = [1, 3, 5].map((i) => {
    const [a, b] = [CIVIDIS[k], CIVIDIS[k + 1]].map((c) => parseInt(c.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * (at - k));
  });
  return `rgb(${parts})`;
}

function ink(fill) {
  const parts = fill.startsWith("#") ? [1, 3, 5].map((i) => parseInt(fill.slice(i, i + 2), 16)) : fill.match(/\d+/g).map(Number);
  return 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2] > 140 ? "#1f2328" : "#ffffff";
}

const figure = (metric, value) => value === null ? "-" : metric.share ? `${(100 * value).toFixed(1)}%` : Number(value.toPrecision(4)).toString();

function tip(event, view, run) {
  const box = $(document, "#tip"), { number, size, across } = cells(view, run), given = run.clients;
  const column = Math.floor(event.offsetX / size), k = Math.floor(event.offsetY / size) * across + column;
  box.hidden = column >= across || k >= number || k < 0;
  if (box.hidden) return;
  const lines = [`client ${k}${given.names?.[k] && given.names[k] !== k ? `, ${given.names[k]}` : ""}`];
  if (run.events) lines.push(`${given.states[given.state[k]]}, ${given.updates[k].toLocaleString()} updates`);
  if (given.staleness && given.staleness[k] !== null) lines.push(`last staleness ${given.staleness[k]}`);
  if (given.value) lines.push(`${run.metric.label} ${figure(run.metric, given.value[k])}`);
  box.textContent = lines.join("\n");
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - 190)}px`;
  box.style.top = `${event.clientY + 14}px`;
}

// -- timeline ---------------------------------------------------------------------------------------

function drawTimeline(view, run) {
  const card = $(view, ".timeline"), given = run.timeline;
  card.hidden = !given;
  if (!given) return;
  const most = Math.max(1, ...given.staleness), stale = given.staleness.some((value) => value > 0);
  const steps = stale ? Math.min(5, most + 1) : 1, groups = new Map();
  const lane = given.clients.length, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const add = (name, color, k) => {
    if (!groups.has(name)) groups.set(name, { type: "bar", orientation: "h", x: [], y: [], base: [], text: [], name,
      width: 0.8, textposition: "none", hoverinfo: "text", marker: { color, line: { color: css("--card"), width: 0.5 } } });
    const group = groups.get(name), client = given.clients[given.row[k]], took = given.end[k] - given.start[k];
    group.text.push(`client ${client}, ${took.toPrecision(3)} s`
      + (given.fate[k] ? `, ${given.fates[given.fate[k]]}` : stale ? `, staleness ${given.staleness[k]}` : ""));
    group.base.push(given.start[k]);
    group.x.push(took);
    group.y.push(given.row[k]);
  };
  const bound = (step) => Math.round((step * (most + 1)) / steps);
  for (let step = 0; step < steps; step++) {
    const from = bound(step), to = bound(step + 1) - 1;
    const name = !stale ? "done" : from === to ? `staleness ${from}` : `staleness ${from}–${to}`;
    const color = stale ? shade((dark ? 0.35 : 0.1) + ((dark ? 0.65 : 0.85) * step) / Math.max(1, steps - 1)) : STATE.training;
    given.fate.forEach((fate, k) => {
      if (fate === 0 && given.staleness[k] >= from && given.staleness[k] <= to) add(name, color, k);
    });
  }
  given.fate.forEach((fate, k) => { if (fate === 2) add("under way", "#56b4e9", k); });
  given.fate.forEach((fate, k) => { if (fate === 1) add("lost", "#d55e00", k); });
  const every = Math.ceil(lane / 24), rows = given.clients.map((_, k) => k).filter((k) => k % every === 0);
  const latest = Math.max(...given.end), earliest = Math.min(...given.start);
  // The latest few fill the width; the rest is a drag away.
  const starts = [...given.start].sort((a, b) => b - a);
  const from = starts[Math.min(starts.length, LATEST) - 1] ?? earliest, span = latest - from || 1;
  const place = $(card, ".plot");
  place.style.height = `${Math.max(220, Math.min(620, 110 + lane * 16))}px`;
  plot(place, [...groups.values()], {
    barmode: "overlay", hovermode: "closest", dragmode: "pan", showlegend: true,
    xaxis: { title: { text: run.deployed ? "time (s)" : "simulated time (s)" }, showgrid: true,
      range: [latest - span * 1.01, latest + span * 0.01] },
    yaxis: { tickvals: rows, ticktext: rows.map((k) => given.clients[k]), range: [lane - 0.4, -0.6],
      title: { text: "client" }, fixedrange: true, showgrid: false },
    uirevision: `${place.dataset.moved ?? latest}`,
  });
  if (!place.dataset.bound) {
    place.dataset.bound = "yes";
    place.on("plotly_relayout", (change) => { // once moved by hand, it stays where it is
      if ("xaxis.range[0]" in change) place.dataset.moved = "by hand";
      if (change["xaxis.autorange"]) delete place.dataset.moved;
    });
  }
  const notes = [];
  if (given.trained > lane) notes.push(`${lane} of ${given.trained.toLocaleString()} clients.`);
  if (given.capped) notes.push(`The latest ${given.row.length.toLocaleString()} of ${given.over.toLocaleString()} trainings.`);
  notes.push("Drag to see earlier ones, double-click for all.");
  $(card, ".cap").textContent = notes.join(" ");
}

// -- the rest ---------------------------------------------------------------------------------------

function drawSpread(view, run) {
  const card = $(view, ".spread"), given = run.clients?.value;
  card.hidden = !given;
  if (!given) return;
  const sign = run.metric.better === "lower" ? -1 : 1;
  const sorted = given.map((value, client) => [value, client]).filter(([value]) => value !== null).sort(([a], [b]) => sign * (a - b));
  plot($(card, ".plot"), [{ type: "bar", y: sorted.map(([value]) => value), customdata: sorted.map(([, client]) => client),
    marker: { color: PALETTE[0] }, hovertemplate: `%{y:${run.metric.share ? ".1%" : ".4g"}}<extra>client %{customdata}</extra>` }],
    { showlegend: false, bargap: 0.1, xaxis: { title: { text: "clients, from the worst to the best" }, showticklabels: false },
      yaxis: { tickformat: run.metric.share ? ".0%" : "", title: { text: run.metric.label } } });
}

function drawStaleness(view, run) {
  const card = $(view, ".staleness"), given = run.staleness;
  card.hidden = !given;
  if (!given) return;
  const names = given.start.map((from) => given.width === 1 ? `${from}` : `${from}–${from + given.width - 1}`);
  plot($(card, ".plot"), [{ type: "bar", x: given.start.map((from) => from + (given.width - 1) / 2), y: given.count,
    customdata: names, width: given.width * 0.9, marker: { color: PALETTE[0] }, hovertemplate: "%{y:,} updates<extra>staleness %{customdata}</extra>" }],
    { showlegend: false, xaxis: { title: { text: "updates folded in while the client trained" } }, yaxis: { title: { text: "updates" } } });
}

function drawMessages(view, run) {
  const card = $(view, ".messages"), given = run.messages;
  card.hidden = !given;
  if (!given) return;
  const traces = Object.entries(given.kinds).map(([kind, counts], k) => ({ x: given.time, y: counts, name: KINDS[kind] ?? kind,
    mode: "lines", line: { color: PALETTE[k], dash: DASHES[k], width: 2 }, hovertemplate: "%{y:,}" }));
  plot($(card, ".plot"), traces, { hovermode: "x unified", showlegend: true,
    xaxis: { title: { text: run.deployed ? "time (s)" : "simulated time (s)" } }, yaxis: { rangemode: "tozero" } });
  const sizes = Object.entries(given.bytes).filter(([, size]) => size);
  $(card, ".cap").textContent = sizes.length
    ? sizes.map(([kind, size]) => `${KINDS[kind] ?? kind}: ${bytes(size)}`).join("; ") : "Bytes are known when the run is over.";
}

function bytes(size) {
  for (const unit of ["B", "kB", "MB", "GB"]) { if (size < 1000) return `${Number(size.toPrecision(3))} ${unit}`; size /= 1000; }
  return `${Number(size.toPrecision(3))} TB`;
}

async function drawMatrix(view, run, which, byHand = false) {
  const card = $(view, `.${which}`), number = run.matrices[which];
  card.hidden = !number;
  if (!number) return;
  const slider = $(card, "input"), last = Number(slider.value) >= Number(slider.max);
  slider.max = number - 1;
  if (last && !byHand) slider.value = number - 1;
  slider.parentElement.hidden = number < 2;
  const stamp = `${slider.value} ${run.have}`;
  if (card.dataset.stamp === stamp) return;
  card.dataset.stamp = stamp;
  let given;
  try {
    given = await ask(`/api/runs/${run.key}/${which}?number=${slider.value}`);
  } catch { // no answer: as with the rest of the page
    delete card.dataset.stamp;
    return;
  }
  if (card.dataset.stamp !== stamp) return; // the slider was moved on meanwhile
  if (!given) { card.hidden = true; return; }
  $(card, "output").textContent = given.updates === null ? "" : `${given.updates.toLocaleString()} updates`;
  const names = given.clients.map(String);
  const flat = given.cells.flat().filter((value) => value !== null).sort((a, b) => a - b);
  const top = flat[Math.floor(0.99 * (flat.length - 1))] ?? 1, low = which === "graph" ? Math.min(0, flat[0] ?? 0) : flat[0] ?? 0;
  plot($(card, ".plot"), [{ type: "heatmap", z: given.cells, colorscale: "Cividis", zmin: low, zmax: top > low ? top : low + 1,
    customdata: given.cells.map((row, i) => row.map((_, j) => `${names[i]} and ${names[j]}`)), xgap: names.length < 60 ? 1 : 0, ygap: names.length < 60 ? 1 : 0,
    hovertemplate: `%{z:.3g}<extra>%{customdata}</extra>`, colorbar: { thickness: 10, outlinewidth: 0 } }],
    { xaxis: { showticklabels: names.length <= 24, tickvals: names.map((_, k) => k), ticktext: names, showgrid: false, constrain: "domain", title: { text: which === "graph" ? "from client" : "" } },
      yaxis: { showticklabels: names.length <= 24, tickvals: names.map((_, k) => k), ticktext: names, showgrid: false, autorange: "reversed", scaleanchor: "x", constrain: "domain", title: { text: which === "graph" ? "client learns" : "" } } });
  $(card, ".cap").textContent = given.block > 1 ? `Means over blocks of ${given.block} clients.` : "Neighbours work together; what clients keep of themselves is left out.";
}

function drawClusters(view, run) {
  const card = $(view, ".clusters"), given = run.clusters;
  card.hidden = !given;
  if (!given) return;
  const area = new Map();
  for (const row of given.cells) for (const cell of row) if (cell >= 0) area.set(cell, (area.get(cell) ?? 0) + 1);
  const largest = [...area].sort((a, b) => b[1] - a[1]).slice(0, CLUSTERS.length).map(([cluster]) => cluster).sort((a, b) => a - b);
  const code = new Map(largest.map((cluster, k) => [cluster, k])), others = CLUSTERS.length;
  const z = given.cells.map((row) => row.map((cell) => cell < 0 ? null : code.get(cell) ?? others));
  const colours = [...CLUSTERS, "#c3c9d0"], scale = colours.flatMap((c, k) => [[k / colours.length, c], [(k + 1) / colours.length, c]]);
  plot($(card, ".plot"), [{ type: "heatmap", z, x: z[0].map((_, k) => (given.updates * (k + 1)) / z[0].length), zmin: -0.5, zmax: others + 0.5,
    colorscale: scale, showscale: false, customdata: given.cells.map((row, i) => row.map((cell) => `client ${given.clients[i]}: ${cell < 0 ? "no cluster" : `cluster ${cell}`}`)),
    hovertemplate: "%{customdata}<extra></extra>" }],
    { xaxis: { title: { text: "updates" }, showgrid: false }, yaxis: { tickvals: z.length <= 24 ? z.map((_, k) => k) : [], ticktext: given.clients.map(String), autorange: "reversed", showgrid: false, title: { text: "client" } } });
  $(card, ".cap").textContent = `${given.number} clusters now.` + (given.left_out ? ` ${given.clients.length} clients are drawn, ${given.left_out} are not.` : "");
}

function drawDiagnosis(view, run) {
  const card = $(view, ".diagnosis"), given = run.diagnosis;
  card.hidden = !given;
  if (!given) return;
  const names = { noise: "sampling noise", bias: "participation bias", delay: "delay", gradient: "gradient" };
  plot($(card, ".plot"), Object.entries(names).map(([key, name], k) => ({ x: given.updates, y: given[key].map((v) => v > 0 ? v : null), name, mode: "lines",
    line: { color: key === "gradient" ? css("--quiet") : PALETTE[k], dash: key === "gradient" ? "dash" : "solid", width: 2 } })),
    { hovermode: "x unified", xaxis: { title: { text: "updates" } }, yaxis: { type: "log", title: { text: "squared length" }, exponentformat: "power" } });
}

function drawSettings(view, run) {
  const lines = [["folder", run.folder]], about = run.about;
  for (const key of ["federation", "began", "command"]) if (about[key]) lines.push([key, about[key]]);
  if (about.versions) lines.push(["versions", Object.entries(about.versions).map(([k, v]) => `${k} ${v}`).join(", ")]);
  for (const [key, value] of Object.entries(about.settings)) lines.push([key, typeof value === "object" ? JSON.stringify(value) : value]);
  const box = $(view, ".text"), stamp = JSON.stringify(lines);
  if (box.dataset.stamp === stamp) return;
  box.dataset.stamp = stamp;
  box.replaceChildren(...lines.flatMap(([key, value]) => {
    const name = document.createElement("b"), given = document.createElement("span");
    name.textContent = key; given.textContent = value; return [name, given];
  }));
}

$(document, "#seeds").addEventListener("change", list);
for (const name of ["#against", "#figure", "#close", "#seeds"]) $(document, name).addEventListener("change", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const run of known.values()) run.fresh = true;
  draw();
});
look();
