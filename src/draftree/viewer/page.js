const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const last = data.steps.length - 1;
let now = -1;

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
  byId("tree").replaceChildren(drawTree(step, data));
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
