"use strict";
// What all pages have: their data, two canvases one over the other, a panel of text. The page's own script is below.

const began = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const base = element("base");
const overlay = element("overlay");

/** A canvas as large as the stage, empty, in pixels of the page. */
function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth, clientHeight } = element("stage");
  canvas.width = Math.round(clientWidth * ratio);
  canvas.height = Math.round(clientHeight * ratio);
  canvas.style.width = `${clientWidth}px`;
  canvas.style.height = `${clientHeight}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Names come from the user's files, so they are only ever set as text. */
function add(parent, tag, text, className) {
  const child = parent.appendChild(document.createElement(tag));
  if (text !== undefined) child.textContent = text;
  if (className) child.className = className;
  return child;
}

/** The tables and notes that the text for a terminal has too. */
function showSummary() {
  const panel = element("summary");
  for (const section of data.summary) {
    if (!section.rows.length) continue;
    add(panel, "h2", section.title);
    const table = add(panel, "table");
    // A header that only says the title once more is left out.
    const says = section.header.filter((text) => text && text.toLowerCase() !== section.title.toLowerCase());
    const lines = says.length ? [section.header, ...section.rows] : section.rows;
    for (const cells of lines) {
      const line = add(table, "tr");
      // A list without spaces may go on in the next line behind each comma.
      for (const text of cells) add(line, cells === section.header ? "th" : "td", text.replaceAll(",", ",\u200b"));
    }
  }
  for (const note of data.notes) add(panel, "p", note, "note");
}

function choose(select, texts, change) {
  texts.forEach((text, index) => add(select, "option", text).setAttribute("value", index));
  select.addEventListener("change", () => change(Number(select.value)));
}

function addToLegend(colour, text) {
  const entry = add(element("legend"), "span");
  add(entry, "i").style.background = colour;
  entry.append(text);
}
