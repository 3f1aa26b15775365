"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const last = data.steps.length - 1;
let now = -1;

/** An SVG element with attributes and children (strings become text). */
function element(name, attributes, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function edge(step, i) {
  const p = step.parent[i], middle = data.height / 2, bend = step.x[i] - data.gap / 2;
  const line = `M${step.x[p] + step.w[p]} ${step.y[p] + middle}H${bend}V${step.y[i] + middle}H${step.x[i]}`;
  return element("path", { class: step.kind[i], d: line });
}

function box(step, i) {
  const full = 0.5 * Math.sqrt(step.value[i] ?? 0);  // most values are small
  return element("g", { class: step.kind[i], transform: `translate(${step.x[i]} ${step.y[i]})` },
    element("title", {}, step.tip[i]),
    element("rect", { width: step.w[i], height: data.height, rx: 5, "fill-opacity": full }),
    element("text", { class: "label", x: data.pad, y: 15 }, step.label[i]),
    element("text", { class: "figure", x: step.w[i] - data.pad, y: 15, "text-anchor": "end" }, step.figure[i]));
}

/** A step's tree; of edges that share a piece, the accepted path's lie on top. */
function tree(step) {
  const items = step.kind.map((_, i) => i);
  const edges = items.filter((i) => step.parent[i] >= 0);
  const rejected = (i) => step.kind[i] === "rejected";
  const taken = items.filter((i) => i > 0 && !rejected(i)).map((i) => step.text[i]).join(" ");
  const size = { width: step.width + 4, height: step.height + 4, viewBox: `-2 -2 ${step.width + 4} ${step.height + 4}` };
  return element("svg", { ...size, class: "tree", role: "img", "aria-labelledby": "title desc" },
    element("title", { id: "title" }, step.head),
    element("desc", { id: "desc" }, `Behind ${step.text[0]} came ${taken || "nothing"}. The table below has every node.`),
    ...edges.filter(rejected).map((i) => edge(step, i)),
    ...edges.filter((i) => !rejected(i)).map((i) => edge(step, i)),
    ...items.map((i) => box(step, i)));
}

const WHAT = { root: "written before", bonus: "chosen by the target" };

function row(step, i) {
  const found = document.createElement("tr");
  const behind = step.parent[i] < 0 ? "" : step.text[step.parent[i]];
  const cells = [step.depth[i], behind, step.text[i], step.rank[i], step.q[i], step.value[i], step.entropy[i],
    WHAT[step.kind[i]] ?? step.kind[i]];
  for (const cell of cells) found.insertCell().textContent = cell ?? "";
  return found;
}

function show(wanted) {
  const next = Math.min(Math.max(wanted, 0), last);
  if (next === now || !(next >= 0)) return;
  now = next;
  const step = data.steps[now];
  byId("tree").replaceChildren(tree(step));
  byId("rows").replaceChildren(...step.kind.map((_, i) => row(step, i)));
  byId("head").textContent = step.head;
  byId("slider").value = now;
  byId("slider").setAttribute("aria-valuetext", step.head);
  byId("back").disabled = now === 0;
  byId("on").disabled = now === last;
  for (const span of byId("text").children) span.classList.toggle("chosen", Number(span.dataset.step) === now);
  inView(byId("text").querySelector(".chosen"));
  history.replaceState(null, "", `#${now}`);
}

/** Scrolls the text, and not the page. */
function inView(span) {
  const text = byId("text");
  if (!span) return;
  const place = span.getBoundingClientRect(), frame = text.getBoundingClientRect();
  if (place.top < frame.top || place.bottom > frame.bottom) text.scrollTop += place.top - frame.top - frame.height / 2;
}

byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
byId("back").addEventListener("click", () => show(now - 1));
byId("on").addEventListener("click", () => show(now + 1));
byId("text").addEventListener("click", (event) => {
  if (event.target.dataset.step !== undefined) show(Number(event.target.dataset.step));
});
document.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const busy = event.target === byId("slider") || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
  if (move === undefined || busy) return;  // the slider moves by itself
  event.preventDefault();
  show(now + move);
});
addEventListener("hashchange", () => show(Number(location.hash.slice(1))));
show(location.hash === "" ? Number(byId("slider").value) : Number(location.hash.slice(1)) || 0);
