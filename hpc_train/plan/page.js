// Draws a fabric with the ranks of a run in it. The data: see page.py, which writes it.

// Ranks and groups: arithmetic on the mesh, as in plan/mesh.py (row-major, the last axis varies fastest).

const axisNames = data.axes.map((axis) => axis[0]);
const degrees = data.axes.map((axis) => axis[1]);
const strides = degrees.map((_, index) => degrees.slice(index + 1).reduce((a, b) => a * b, 1));
const numRanks = degrees.reduce((a, b) => a * b, 1);
const coordinate = (rank, axis) => Math.floor(rank / strides[axis]) % degrees[axis];

function groupOf(rank, axis) {
  const first = rank - coordinate(rank, axis) * strides[axis];
  return Array.from({ length: degrees[axis] }, (_, place) => first + place * strides[axis]);
}

/** The ranks that a rank sends to along an axis: next, previous; -1 where there is none. */
function neighbours(rank, axis) {
  const group = groupOf(rank, axis);
  const place = coordinate(rank, axis);
  const pattern = data.patterns[axisNames[axis]] || "ring";
  const closes = pattern !== "line" && group.length > 1;
  const at = (index) => {
    if (index >= 0 && index < group.length) return group[index];
    return closes ? group[(index + group.length) % group.length] : -1;
  };
  return pattern === "ring" ? [at(place + 1), -1] : [at(place + 1), at(place - 1)];
}

// Places: which rank sits in which cell. A cell is a GPU of a node; cells are numbered node by node.

const firstCell = [];
let numCells = 0;
for (const count of data.nodeGpus) {
  firstCell.push(numCells);
  numCells += count;
}
const orders = data.orders.map((order) => {
  const cellOfRank = new Int32Array(numRanks);
  const rankOfCell = new Int32Array(numCells).fill(-1);
  for (let rank = 0; rank < numRanks; rank++) {
    cellOfRank[rank] = firstCell[order.node[rank]] + order.gpu[rank];
    rankOfCell[cellOfRank[rank]] = rank;
  }
  return { ...order, cellOfRank, rankOfCell };
});

/** What a GPU hangs on: rail, leaf, number of the switch, number of the pod; null where no topology is known. */
function link(node, gpu) {
  const kind = data.kinds[data.nodeKind[node]];
  if (kind === undefined) return null;
  const [rail, leaf, port, pod] = kind[gpu];
  return { rail, leaf, port, pod };
}

/** How high a transfer climbs: node, leaf, spine, core; "network" where no topology is known. */
function tierBetween(order, rank, other) {
  const [a, b] = [order.node[rank], order.node[other]];
  if (a === b || (data.nodeDomain[a] >= 0 && data.nodeDomain[a] === data.nodeDomain[b])) return "node";
  const [here, there] = [link(a, order.gpu[rank]), link(b, order.gpu[other])];
  if (here === null || there === null) return "network";
  if (here.port === there.port) return "leaf";
  return here.pod === there.pod ? "spine" : "core";
}

// Layout: nodes in the boxes of their leaves, these in pods. World coordinates are pixels at zoom 1.

const boxNodes = data.boxes.map(() => []);
data.nodeBox.forEach((box, node) => boxNodes[box].push(node));
const podBoxes = data.pods.map(() => []);
data.boxes.forEach((box, index) => podBoxes[box[1]].push(index));
const columnsOf = (count) => (count <= 4 ? count : count <= 8 ? 4 : 8);
const widestNode = Math.max(...data.nodeGpus.map(columnsOf));
const tallestNode = Math.max(...data.nodeGpus.map((count) => Math.ceil(count / columnsOf(count))));

function flow(items, width, gap) {
  let [x, y, row, right] = [0, 0, 0, 0];
  for (const item of items) {
    if (x > 0 && x + item.width > width) [x, y, row] = [0, y + row + gap, 0];
    [item.x, item.y] = [x, y];
    x += item.width + gap;
    right = Math.max(right, x - gap);
    row = Math.max(row, item.height);
  }
  return { width: right, height: y + row };
}

/** In a width; of which the leaves of a pod take a part. */
function layOut(cell, width, shape, part) {
  const label = cell >= 12 ? 13 : 0;
  const gap = Math.max(1.5, cell * 0.4);
  const node = { width: widestNode * cell + gap, height: tallestNode * cell + gap + label };
  const boxes = data.boxes.map((box, index) => {
    const count = boxNodes[index].length;
    const columns = Math.min(count, Math.max(1, Math.ceil(Math.sqrt((count * shape * node.height) / node.width))));
    const header = box[0] ? 14 : 2;
    const size = { columns, header, width: columns * node.width + 6, index };
    return { ...size, height: Math.ceil(count / columns) * node.height + header + 4 };
  });
  const pods = data.pods.map((pod, index) => {
    const inside = podBoxes[index].map((box) => boxes[box]);
    const header = pod ? 17 : 3;
    const size = flow(inside, width / part - 12, 6);
    return { width: size.width + 12, height: size.height + header + 6, header, inside };
  });
  const whole = flow(pods, width, 9);
  for (const pod of pods) {
    for (const box of pod.inside) {
      box.x += pod.x + 6;
      box.y += pod.y + pod.header;
    }
  }
  return { cell, label, gap, node, boxes, pods, ...whole };
}

const CELLS = [48, 42, 36, 32, 28, 24, 21, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5.5, 5, 4.5, 4, 3.5, 3, 2.5, 2];

/** With the largest cells that fit; where even the smallest do not, so that the whole is shrunk the least. */
function fitting(width, height) {
  for (const cell of CELLS) {
    for (const part of [1, 2, 3]) {
      for (const shape of [1.6, 1, 2.6, 0.6]) {
        const found = layOut(cell, width, shape, part);
        if (found.height <= height && found.width <= width) return found;
      }
    }
  }
  let [best, most] = [null, 0];
  for (let times = 1.1; times < 40; times *= 1.1) {
    for (const part of [1, 2, 3]) {
      const found = layOut(CELLS[CELLS.length - 1], width * times, 1.6, part);
      const scale = Math.min(width / found.width, height / found.height);
      if (scale > most) [best, most] = [found, scale];
    }
    if (most >= 1 / times) break;
  }
  return best;
}

// Drawing.

const view = { scale: 1, x: 0, y: 0, order: orders[0], colour: 0, shown: -1, isPinned: false };
let plan = null;
let corners = null; // x and y of each cell
const AXIS_COLOURS = { pp: "#b3261e", dp: "#0b57d0", cp: "#8e24aa", tp: "#111111" };
const axisColour = (axis) => AXIS_COLOURS[axisNames[axis]] || "#555555";
const FEW = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"];

function colourOf(value, count) {
  if (count <= FEW.length) return FEW[value];
  return `hsl(${Math.round((300 * value) / (count - 1))} 72% ${value % 2 ? 44 : 60}%)`;
}

function placeCells() {
  corners = new Float32Array(2 * numCells);
  plan.boxes.forEach((box) => {
    boxNodes[box.index].forEach((node, place) => {
      const left = box.x + 3 + plan.gap / 2 + (place % box.columns) * plan.node.width;
      const top = box.y + box.header + plan.label + Math.floor(place / box.columns) * plan.node.height;
      const columns = columnsOf(data.nodeGpus[node]);
      for (let gpu = 0; gpu < data.nodeGpus[node]; gpu++) {
        corners[2 * (firstCell[node] + gpu)] = left + (gpu % columns) * plan.cell;
        corners[2 * (firstCell[node] + gpu) + 1] = top + Math.floor(gpu / columns) * plan.cell;
      }
    });
  });
}

/** In the world's coordinates. */
function prepareView(canvas) {
  const context = prepare(canvas);
  context.translate(view.x, view.y);
  context.scale(view.scale, view.scale);
  return context;
}

const SMALLEST_TEXT = 6; // pixels; smaller ones are specks

function font(context, size, weight = "") {
  context.font = `${weight} ${size}px system-ui, sans-serif`.trim();
  return size * view.scale >= SMALLEST_TEXT;
}

/** What tells a name from those beside it stands at its end; so a long one loses its beginning, with dots for that. */
function fittedText(context, text, x, y, width) {
  let shown = text;
  for (let left = text.length - 1; context.measureText(shown).width > width; left--) {
    if (left < 1) return;
    shown = `\u2026${text.slice(-left)}`;
  }
  context.fillText(shown, x, y);
}

/** A leaf's name without that of its pod, which stands above it. */
function nameInPod(box) {
  const [name, pod] = data.boxes[box];
  const prefix = `${data.pods[pod].split(" ")[0]}.`;
  return prefix.length > 1 && name.startsWith(prefix) ? name.slice(prefix.length) : name;
}

function drawBase() {
  const context = prepareView(base);
  context.textBaseline = "alphabetic";
  const hasPodNames = font(context, 11, "600");
  plan.pods.forEach((pod, index) => {
    context.strokeStyle = "#8d99a6";
    context.strokeRect(pod.x + 0.5, pod.y + 0.5, pod.width - 1, pod.height - 1);
    context.fillStyle = "#1c2530";
    if (hasPodNames) fittedText(context, data.pods[index], pod.x + 6, pod.y + 12, pod.width - 10);
  });
  const hasLeafNames = font(context, 10);
  plan.boxes.forEach((box) => {
    context.fillStyle = "#f1f4f7";
    context.fillRect(box.x, box.y, box.width, box.height);
    context.fillStyle = "#4a5663";
    if (hasLeafNames) fittedText(context, nameInPod(box.index), box.x + 4, box.y + 10.5, box.width - 6);
  });
  drawCells(context);
  if (plan.label) drawNodeNames(context);
}

function drawCells(context) {
  const { rankOfCell } = view.order;
  const size = plan.cell - (plan.cell >= 5 ? 1 : 0.4);
  // Colour by colour: to change a canvas's colour costs more than to fill a square.
  const cells = Array.from({ length: degrees[view.colour] + 1 }, () => []);
  rankOfCell.forEach((rank, cell) => cells[rank < 0 ? 0 : coordinate(rank, view.colour) + 1].push(cell));
  cells.forEach((some, index) => {
    context.fillStyle = index ? colourOf(index - 1, degrees[view.colour]) : "#d9dfe5";
    for (const cell of some) context.fillRect(corners[2 * cell], corners[2 * cell + 1], size, size);
  });
  if (plan.cell * view.scale < 18) return;
  context.fillStyle = "#000";
  context.font = `${(plan.cell * 0.36).toFixed(1)}px system-ui, sans-serif`;
  context.textAlign = "center";
  for (let cell = 0; cell < numCells; cell++) {
    const middle = corners[2 * cell] + size / 2;
    if (rankOfCell[cell] >= 0) context.fillText(rankOfCell[cell], middle, corners[2 * cell + 1] + size * 0.64);
  }
  context.textAlign = "start";
}

function drawNodeNames(context) {
  if (!font(context, 9.5)) return;
  context.fillStyle = "#4a5663";
  data.nodes.forEach((name, node) => {
    const [x, y] = [corners[2 * firstCell[node]], corners[2 * firstCell[node] + 1]];
    fittedText(context, name, x, y - 3, plan.node.width - plan.gap);
  });
}

function middleOf(rank) {
  const cell = view.order.cellOfRank[rank];
  return [corners[2 * cell] + plan.cell / 2, corners[2 * cell + 1] + plan.cell / 2];
}

function pathPoints(rank, other) {
  const tier = tierBetween(view.order, rank, other);
  const [from, to] = [data.nodeBox[view.order.node[rank]], data.nodeBox[view.order.node[other]]];
  const leaf = (index) => [plan.boxes[index].x + plan.boxes[index].width / 2, plan.boxes[index].y + 5];
  const spine = (index) => [plan.pods[index].x + plan.pods[index].width / 2, plan.pods[index].y + 4];
  const [podFrom, podTo] = [data.boxes[from][1], data.boxes[to][1]];
  const points = [middleOf(rank)];
  if (tier !== "node" && tier !== "network") points.push(leaf(from));
  if (tier === "spine" || tier === "core") points.push(spine(podFrom));
  if (tier === "core") points.push([(spine(podFrom)[0] + spine(podTo)[0]) / 2, -8], spine(podTo));
  if (tier === "spine" || tier === "core") points.push(leaf(to));
  return [...points, middleOf(other)];
}

function drawOverlay() {
  const context = prepareView(overlay);
  if (view.shown < 0) return;
  const width = Math.min(2, 0.35 * plan.cell * view.scale) / view.scale;
  for (let axis = 0; axis < axisNames.length; axis++) {
    if (degrees[axis] === 1) continue;
    context.strokeStyle = axisColour(axis);
    context.lineWidth = width;
    for (const member of groupOf(view.shown, axis)) {
      const cell = view.order.cellOfRank[member];
      context.strokeRect(corners[2 * cell] - 0.5, corners[2 * cell + 1] - 0.5, plan.cell, plan.cell);
    }
    for (const other of neighbours(view.shown, axis)) {
      if (other < 0) continue;
      context.beginPath();
      pathPoints(view.shown, other).forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.stroke();
    }
  }
  const [x, y] = middleOf(view.shown);
  context.lineWidth = 2 * width;
  context.strokeStyle = "#000";
  context.strokeRect(x - plan.cell / 2 - 1, y - plan.cell / 2 - 1, plan.cell + 1, plan.cell + 1);
}

// The panel.

const SWITCHES = { node: "inside the node", leaf: "1 switch", spine: "3 switches", core: "5 switches" };

function describeTransfer(rank, other) {
  const order = view.order;
  const [node, gpu] = [order.node[other], order.gpu[other]];
  const tier = tierBetween(order, rank, other);
  const where = `rank ${other} on ${data.nodes[node]} GPU ${gpu}`;
  if (tier === "node") {
    return `${where}: ${node === order.node[rank] ? "inside the node" : "in one NVLink domain"}`;
  }
  if (tier === "network") return `${where}: over the network`;
  const [here, there] = [link(order.node[rank], order.gpu[rank]), link(node, gpu)];
  const rails = here.rail === there.rail ? `rail ${here.rail}` : `rail ${here.rail} to ${there.rail}`;
  const spine = (end) => `a spine of ${data.podNames[end.pod]}`;
  const names = [here.leaf];
  if (tier === "spine") names.push(spine(here));
  if (tier === "core") names.push(spine(here), "the core", spine(there));
  if (tier !== "leaf") names.push(there.leaf);
  return `${where}: ${rails}, ${SWITCHES[tier]} (${names.join(", ")})`;
}

function describeGroup(group) {
  if (group.length <= 8) return group.join(", ");
  return `${group.slice(0, 3).join(", ")}, ... ${group[group.length - 1]} (every ${group[1] - group[0]})`;
}

function showPanel() {
  const panel = element("shown");
  panel.replaceChildren();
  const rank = view.shown;
  if (rank < 0) {
    add(panel, "h2", "Rank");
    add(panel, "p", "Point at a GPU to see its rank, its groups and their paths; click to keep it.", "hint");
    add(panel, "p", "Wheel: zoom. Drag: move. Double click: all again. Escape: let go.", "hint");
    return;
  }
  const [node, gpu] = [view.order.node[rank], view.order.gpu[rank]];
  const hangsOn = link(node, gpu);
  add(panel, "h2", `Rank ${rank}${view.isPinned ? " (kept)" : ""}`);
  const place = [data.nodes[node], `GPU ${gpu}`];
  if (hangsOn) place.push(`rail ${hangsOn.rail}`, hangsOn.leaf || "no link");
  add(panel, "div", place.join(", "));
  add(panel, "div", axisNames.map((name, axis) => `${name} ${coordinate(rank, axis)} of ${degrees[axis]}`).join(", "));
  for (let axis = axisNames.length - 1; axis >= 0; axis--) {
    if (degrees[axis] === 1) continue;
    const part = add(panel, "div", undefined, "group");
    add(part, "span", "", "axis").style.background = axisColour(axis);
    part.append(`${axisNames[axis]} group: ranks ${describeGroup(groupOf(rank, axis))}`);
    neighbours(rank, axis).forEach((other, index) => {
      if (other >= 0) add(part, "div", `${index ? "back to" : "sends to"} ${describeTransfer(rank, other)}`);
    });
  }
}

function showLegend() {
  element("legend").replaceChildren();
  const count = degrees[view.colour];
  const few = count <= 16;
  const values = few ? Array.from({ length: count }, (_, value) => value) : [0, 0.25, 0.5, 0.75, 1];
  for (const value of values) {
    const shown = few ? value : Math.round(value * (count - 1));
    addToLegend(colourOf(shown, count), few && count > 8 ? `${shown}` : `${axisNames[view.colour]} ${shown}`);
  }
}

// What the user does.

function show(rank, isPinned) {
  if (rank === view.shown && isPinned === view.isPinned) return;
  const start = performance.now();
  view.shown = rank;
  view.isPinned = isPinned;
  drawOverlay();
  showPanel();
  document.body.dataset.hoverMs = (performance.now() - start).toFixed(2);
}

function rankAt(event) {
  const area = element("stage").getBoundingClientRect();
  const x = (event.clientX - area.left - view.x) / view.scale;
  const y = (event.clientY - area.top - view.y) / view.scale;
  const inside = (box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
  const box = plan.boxes.find(inside);
  if (box === undefined) return -1;
  const column = Math.floor((x - box.x - 3) / plan.node.width);
  const row = Math.floor((y - box.y - box.header) / plan.node.height);
  const node = column < 0 || column >= box.columns || row < 0 ? undefined : boxNodes[box.index][row * box.columns + column];
  if (node === undefined) return -1;
  for (let cell = firstCell[node]; cell < firstCell[node] + data.nodeGpus[node]; cell++) {
    const [dx, dy] = [x - corners[2 * cell], y - corners[2 * cell + 1]];
    if (dx >= 0 && dx < plan.cell && dy >= 0 && dy < plan.cell) return view.order.rankOfCell[cell];
  }
  return -1;
}

function redraw() {
  drawBase();
  drawOverlay();
}

function refit() {
  const { clientWidth, clientHeight } = element("stage");
  plan = fitting(clientWidth - 16, clientHeight - 24);
  view.scale = Math.min(1, (clientWidth - 16) / plan.width, (clientHeight - 24) / plan.height);
  [view.x, view.y] = [8, 16];
  placeCells();
  redraw();
}

function find(text) {
  const node = data.nodes.indexOf(text);
  const cells = view.order.rankOfCell;
  const first = node < 0 ? -1 : cells.slice(firstCell[node], firstCell[node] + data.nodeGpus[node]).find((r) => r >= 0);
  const rank = /^\d+$/.test(text) && Number(text) < numRanks ? Number(text) : first === undefined ? -1 : first;
  show(rank, rank >= 0);
}

function chooseColour(axis) {
  view.colour = axis;
  element("colour").value = axis;
  showLegend();
}

function chooseOrder(index) {
  view.order = orders[index];
  element("order").value = index;
}

/** #rank=5&colour=dp&order=1 opens the page so. */
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const axis = axisNames.indexOf(asked.get("colour"));
  if (axis >= 0) chooseColour(axis);
  const order = Number(asked.get("order"));
  if (orders[order]) chooseOrder(order);
  redraw();
  if (asked.has("rank")) find(asked.get("rank"));
}

function listen() {
  const stage = element("stage");
  let dragged = null;
  stage.addEventListener("pointermove", (event) => {
    if (dragged !== null) {
      [view.x, view.y] = [dragged.x + event.clientX, dragged.y + event.clientY];
      dragged.far ||= Math.abs(event.clientX - dragged.startX) + Math.abs(event.clientY - dragged.startY) > 4;
      if (dragged.far) requestAnimationFrame(redraw);
    } else if (!view.isPinned) {
      show(rankAt(event), false);
    }
  });
  stage.addEventListener("pointerdown", (event) => {
    const start = { startX: event.clientX, startY: event.clientY, far: false };
    dragged = { x: view.x - event.clientX, y: view.y - event.clientY, ...start };
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointerup", (event) => {
    const rank = rankAt(event);
    if (dragged !== null && !dragged.far) show(rank, rank >= 0 && !(view.isPinned && rank === view.shown));
    dragged = null;
  });
  stage.addEventListener("pointerleave", () => view.isPinned || show(-1, false));
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = stage.getBoundingClientRect();
    const [x, y] = [event.clientX - area.left, event.clientY - area.top];
    const factor = Math.exp(-event.deltaY / 400);
    const scale = Math.min(60, Math.max(0.2, view.scale * factor));
    [view.x, view.y] = [x - ((x - view.x) * scale) / view.scale, y - ((y - view.y) * scale) / view.scale];
    view.scale = scale;
    requestAnimationFrame(redraw);
  }, { passive: false });
  stage.addEventListener("dblclick", refit);
  window.addEventListener("resize", refit);
  window.addEventListener("hashchange", readAddress);
  window.addEventListener("keydown", (event) => event.key === "Escape" && show(-1, false));
  element("find").addEventListener("change", (event) => find(event.target.value.trim()));
}

function start() {
  element("title").textContent = data.title;
  element("subtitle").textContent = data.subtitle;
  choose(element("colour"), axisNames.map((name) => data.axisMeaning[name] || name), (axis) => {
    chooseColour(axis);
    redraw();
  });
  choose(element("order"), orders.map((order) => order.name), (index) => {
    chooseOrder(index);
    redraw();
    showPanel();
  });
  element("order-choice").hidden = orders.length < 2;
  const widest = degrees.indexOf(Math.max(...degrees));
  chooseColour(degrees[0] > 1 ? 0 : widest);
  refit();
  showSummary();
  showPanel();
  listen();
  readAddress();
  document.body.dataset.loadMs = (performance.now() - began).toFixed(1);
}

start();
