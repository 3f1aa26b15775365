"use strict";
/* Draws the tree of a step. `size` has the height of a box, the padding of its text, and the gap between two columns. */

/** An SVG element with attributes and children (strings become text). */
function svgElement(name, attributes, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function drawEdge(step, i, size) {
  const p = step.parent[i], middle = size.height / 2, bend = step.x[i] - size.gap / 2;
  const line = `M${step.x[p] + step.w[p]} ${step.y[p] + middle}H${bend}V${step.y[i] + middle}H${step.x[i]}`;
  return svgElement("path", { class: step.kind[i], d: line });
}

function drawBox(step, i, size) {
  const full = 0.5 * Math.sqrt(step.value[i] ?? 0);  // most values are small
  return svgElement("g", { class: step.kind[i], transform: `translate(${step.x[i]} ${step.y[i]})` },
    svgElement("title", {}, step.tip[i]),
    svgElement("rect", { width: step.w[i], height: size.height, rx: 5, "fill-opacity": full }),
    svgElement("text", { class: "label", x: size.pad, y: 15 }, step.label[i]),
    svgElement("text", { class: "figure", x: step.w[i] - size.pad, y: 15, "text-anchor": "end" }, step.figure[i]));
}

/** A step's tree; of edges that share a piece, the accepted path's lie on top. */
function drawTree(step, size) {
  const items = step.kind.map((_, i) => i);
  const edges = items.filter((i) => step.parent[i] >= 0);
  const rejected = (i) => step.kind[i] === "rejected";
  const taken = items.filter((i) => i > 0 && !rejected(i)).map((i) => step.text[i]).join(" ");
  const frame = { width: step.width + 4, height: step.height + 4, viewBox: `-2 -2 ${step.width + 4} ${step.height + 4}` };
  return svgElement("svg", { ...frame, class: "tree", role: "img", "aria-labelledby": "title desc" },
    svgElement("title", { id: "title" }, step.head),
    svgElement("desc", { id: "desc" }, `Behind ${step.text[0]} came ${taken || "nothing"}. The table below has every node.`),
    ...edges.filter(rejected).map((i) => drawEdge(step, i, size)),
    ...edges.filter((i) => !rejected(i)).map((i) => drawEdge(step, i, size)),
    ...items.map((i) => drawBox(step, i, size)));
}

