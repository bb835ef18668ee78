// Draws what each hdp rank does in a step: a row a rank, time from left to right. The data: see batch_page.py.

const MARGIN = { left: 58, top: 22, right: 10, bottom: 6 };
const ALONE = "#b9c4d0";
const IDLE = "#f6f7f9";

// Plans: packs with their ranks, and for each rank its packs in the order of time.

const plans = data.plans.map((plan) => {
  const packs = plan.packs.map(([begin, end, offload, lengths, runs]) => {
    let size = 0;
    for (let at = 1; at < runs.length; at += 2) size += runs[at];
    return { begin, end, offload, lengths, runs, size };
  });
  const ofRank = Array.from({ length: data.numRanks }, () => []);
  packs.forEach((pack, index) => eachRank(pack, (rank) => ofRank[rank].push(index)));
  return { ...plan, packs, ofRank };
});
const longest = Math.max(1, ...plans.map((plan) => plan.end));

function eachRank(pack, action) {
  for (let at = 0; at < pack.runs.length; at += 2) {
    for (let step = 0; step < pack.runs[at + 1]; step++) action(pack.runs[at] + step);
  }
}

/** Rows from top to bottom are ranks in the order of their places, so that rings are runs of rows. */
const rowOfRank = new Int32Array(data.numRanks);
data.order.forEach((rank, row) => (rowOfRank[rank] = row));

function colourOf(size) {
  if (size === 1) return ALONE;
  const share = Math.log2(size) / Math.max(1, Math.log2(data.numRanks));
  return `hsl(${Math.round(205 - 205 * share)} 70% ${Math.round(58 - 12 * share)}%)`;
}

// The view: first row and rows in all, first nanosecond and nanoseconds in all.

const view = { plan: plans[0], row: 0, rows: data.numRanks, time: 0, span: longest, shown: null, isPinned: false };
let [width, height] = [0, 0];
const xOf = (time) => MARGIN.left + ((time - view.time) / view.span) * (width - MARGIN.left - MARGIN.right);
const yOf = (row) => MARGIN.top + ((row - view.row) / view.rows) * (height - MARGIN.top - MARGIN.bottom);
const timeAt = (x) => view.time + ((x - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * view.span;
const rowAt = (y) => view.row + ((y - MARGIN.top) / (height - MARGIN.top - MARGIN.bottom)) * view.rows;
const wholeSpan = () => (element("same").checked ? longest : view.plan.end) || 1;

function reset() {
  Object.assign(view, { row: 0, rows: data.numRanks, time: 0, span: wholeSpan() });
  redraw();
}

function timeText(nanoseconds) {
  if (!nanoseconds) return "0";
  for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]) {
    if (nanoseconds >= size) return `${Number((nanoseconds / size).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(nanoseconds)} ns`;
}

/** Runs of rows that a pack covers. */
function rowRuns(pack) {
  const rows = [];
  eachRank(pack, (rank) => rows.push(rowOfRank[rank]));
  rows.sort((a, b) => a - b);
  const runs = [];
  for (const row of rows) {
    const last = runs[runs.length - 1];
    if (last && last[0] + last[1] === row) last[1]++;
    else runs.push([row, 1]);
  }
  return runs;
}
for (const plan of plans) for (const pack of plan.packs) pack.rows = rowRuns(pack);

function boxesOf(pack) {
  const [left, right] = [xOf(pack.begin), xOf(pack.end)];
  return pack.rows.map(([row, count]) => [left, yOf(row), Math.max(0.5, right - left), yOf(row + count) - yOf(row)]);
}

function redraw() {
  [width, height] = [element("stage").clientWidth, element("stage").clientHeight];
  const context = prepare(base);
  context.fillStyle = IDLE;
  context.fillRect(MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom);
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom);
  context.clip();
  const rowHeight = (height - MARGIN.top - MARGIN.bottom) / view.rows;
  for (const pack of view.plan.packs) {
    context.fillStyle = colourOf(pack.size);
    for (const [x, y, w, h] of boxesOf(pack)) {
      if (y > height || y + h < 0 || x > width || x + w < 0) continue;
      context.fillRect(x, y, w, h);
      if (rowHeight >= 3 || pack.size > 1) {
        context.strokeStyle = "rgba(255,255,255,0.85)";
        context.lineWidth = rowHeight >= 6 ? 1 : 0.5;
        context.strokeRect(x, y, w, h);
      }
    }
  }
  const least = xOf(data.least);
  context.strokeStyle = "#1c2530";
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(least, 0);
  context.lineTo(least, height);
  context.stroke();
  context.restore();
  drawAxes(context, rowHeight);
  drawShown();
}

function drawAxes(context, rowHeight) {
  context.fillStyle = "#5a6673";
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  const wanted = view.span / Math.max(2, width / 130);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const tick = [1, 2, 5, 10].map((times) => times * power).find((step) => step >= wanted);
  for (let time = Math.ceil(view.time / tick) * tick; time <= view.time + view.span; time += tick) {
    if (xOf(time) > width - 20) break;
    context.fillText(timeText(time), xOf(time), 11);
    context.fillRect(xOf(time), MARGIN.top - 4, 1, 4);
  }
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / rowHeight));
  const step = every === 1 ? 1 : 2 ** Math.ceil(Math.log2(every));
  for (let row = Math.ceil(view.row / step) * step; row < view.row + view.rows; row += step) {
    if (row >= 0 && row < data.numRanks) {
      context.fillText(`${data.order[row]}`, MARGIN.left - 5, yOf(row + 0.5));
    }
  }
}

// What the mouse is on.

function packAt(x, y) {
  const row = Math.floor(rowAt(y));
  if (x < MARGIN.left || row < 0 || row >= data.numRanks) return null;
  const rank = data.order[row];
  const time = timeAt(x);
  const pack = view.plan.ofRank[rank].find((index) => {
    const { begin, end } = view.plan.packs[index];
    return begin <= time && time < end;
  });
  return { rank, pack: pack === undefined ? -1 : pack };
}

function drawShown() {
  const context = prepare(overlay);
  if (!view.shown) return;
  context.strokeStyle = "#111";
  context.lineWidth = 2;
  if (view.shown.pack >= 0) {
    for (const [x, y, w, h] of boxesOf(view.plan.packs[view.shown.pack])) context.strokeRect(x, y, w, Math.max(1, h));
  }
  const y = yOf(rowOfRank[view.shown.rank]);
  context.fillStyle = "#111";
  context.fillRect(MARGIN.left - 4, y, 4, Math.max(2, yOf(rowOfRank[view.shown.rank] + 1) - y));
}

function runsText(runs) {
  const texts = [];
  for (let at = 0; at < runs.length; at += 2) {
    texts.push(runs[at + 1] === 1 ? `${runs[at]}` : `${runs[at]}-${runs[at] + runs[at + 1] - 1}`);
  }
  return texts.length <= 12 ? texts.join(",") : [...texts.slice(0, 6), "...", ...texts.slice(-6)].join(",");
}

function show(found, isPinned) {
  view.shown = found;
  view.isPinned = isPinned && found !== null;
  drawShown();
  const place = element("shown");
  place.replaceChildren();
  if (!found) {
    const how = "Point at the drawing. Wheel: zoom ranks; with Shift: time. Drag: move. Double click: all.";
    add(place, "div", how, "hint");
    return;
  }
  const line = (text) => add(place, "div", text);
  const node = data.nodes.length ? ` on ${data.nodes[data.nodeOfRank[found.rank]]}` : "";
  add(place, "h2", `hdp rank ${found.rank}${node}`);
  const list = view.plan.ofRank[found.rank];
  line(`${list.length} micro-batches with sequences`);
  if (found.pack < 0) {
    line("waits, or is done");
  } else {
    const pack = view.plan.packs[found.pack];
    const total = pack.lengths.reduce((a, b) => a + b, 0);
    const more = pack.lengths.length > 12 ? ", ..." : "";
    line(`micro-batch ${list.indexOf(found.pack)}: ${timeText(pack.begin)} to ${timeText(pack.end)}`);
    line(`${pack.lengths.length} sequences with ${total} tokens: ${pack.lengths.slice(0, 12).join(", ")}${more}`);
    line(pack.size === 1 ? "of this rank alone" : `ring of ${pack.size} ranks: ${runsText(pack.runs)}`);
    if (pack.offload) line(`${pack.offload / 10} % of activations offloaded`);
  }
}

// Set-up.

element("title").textContent = data.title;
showSummary();
choose(element("plan"), plans.map((plan) => plan.name), (index) => {
  view.plan = plans[index];
  show(null, false);
  reset();
});
const sizes = [1];
for (let size = 2; size < data.numRanks; size *= 4) sizes.push(size);
if (data.numRanks > 1) sizes.push(data.numRanks);
for (const size of sizes) addToLegend(colourOf(size), size === 1 ? "alone" : `ring of ${size}`);
add(element("legend"), "span", "- - no plan is faster");

element("same").addEventListener("change", reset);
element("find").addEventListener("input", () => {
  const text = element("find").value.trim();
  const node = data.nodes.indexOf(text);
  const rank = node >= 0 ? data.nodeOfRank.indexOf(node) : /^\d+$/.test(text) ? Number(text) : -1;
  if (rank < 0 || rank >= data.numRanks) return show(null, false);
  view.rows = Math.min(data.numRanks, 24);
  view.row = Math.max(0, Math.min(data.numRanks - view.rows, rowOfRank[rank] - view.rows / 2));
  redraw();
  show({ rank, pack: view.plan.ofRank[rank].length ? view.plan.ofRank[rank][0] : -1 }, true);
});

const stage = element("stage");
let dragged = null;
const placeOf = (event) => {
  const box = stage.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};
stage.addEventListener("pointerdown", (event) => {
  dragged = { at: placeOf(event), row: view.row, time: view.time, isMoved: false };
  stage.setPointerCapture(event.pointerId);
});
stage.addEventListener("pointermove", (event) => {
  const [x, y] = placeOf(event);
  if (!dragged) {
    if (!view.isPinned) show(packAt(x, y), false);
    return;
  }
  if (Math.abs(x - dragged.at[0]) + Math.abs(y - dragged.at[1]) > 3) dragged.isMoved = true;
  view.time = dragged.time - ((x - dragged.at[0]) / (width - MARGIN.left - MARGIN.right)) * view.span;
  view.row = dragged.row - ((y - dragged.at[1]) / (height - MARGIN.top - MARGIN.bottom)) * view.rows;
  redraw();
});
stage.addEventListener("pointerup", (event) => {
  if (dragged && !dragged.isMoved) {
    const found = packAt(...placeOf(event));
    show(view.isPinned ? null : found, true);
  }
  dragged = null;
});
stage.addEventListener("dblclick", reset);
stage.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    const [x, y] = placeOf(event);
    const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015);
    if (event.shiftKey) {
      const time = timeAt(x);
      view.span = Math.max(1, Math.min(4 * longest, view.span * factor));
      view.time += time - timeAt(x);
    } else {
      const row = rowAt(y);
      view.rows = Math.max(4, Math.min(2 * data.numRanks, view.rows * factor));
      view.row += row - rowAt(y);
    }
    redraw();
  },
  { passive: false },
);
window.addEventListener("resize", redraw);
show(null, false);
reset();
document.body.dataset.loadMs = (performance.now() - began).toFixed(1);
