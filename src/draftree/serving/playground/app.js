"use strict";
const byId = (id) => document.getElementById(id);
const FIELDS = ["prompt", "drafter", "policy", "temperature", "tokens", "seed", "compare", "schema"];
const STORE = "draftree playground";
let config = null;   // what the server offers
let steps = [];      // the tree of each step
let now = -1;        // the step that is shown
let follow = true;   // whether the newest step is shown as it comes
let running = null;  // the controller of the request at hand

/** Keeps what was typed, so that it survives a reload; the API key only as long as the tab is open. */
function save() {
  const kept = {};
  for (const id of FIELDS) kept[id] = byId(id).type === "checkbox" ? byId(id).checked : byId(id).value;
  localStorage.setItem(STORE, JSON.stringify(kept));
  sessionStorage.setItem(`${STORE} key`, byId("key").value);
}

function restore() {
  byId("key").value = sessionStorage.getItem(`${STORE} key`) ?? "";
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(STORE) ?? "{}"); } catch { /* somebody else's */ }
  for (const id of FIELDS) {
    const field = byId(id);
    if (kept[id] === undefined) continue;
    if (field.type === "checkbox") field.checked = kept[id] === true;
    else if (field.tagName !== "SELECT" || [...field.options].some((o) => o.value === kept[id])) field.value = kept[id];
  }
}

function problem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = text === "";
}

function status(text) { byId("status").textContent = text; }

/** Fills the pickers; without a server it says so, and tries again. */
async function connect() {
  try {
    const answer = await fetch("/playground/config.json");
    config = await answer.json();
  } catch {
    status("");
    problem("The server does not answer. Is draftree serve still running? Trying again …");
    setTimeout(connect, 2000);
    return;
  }
  problem("");
  byId("model").textContent = config.model;
  byId("key-label").hidden = !config.key;
  byId("tokens").max = config.max_tokens;
  byId("schema-part").hidden = !config.chat;
  for (const [id, specs] of [["drafter", config.drafters], ["policy", config.policies]]) {
    byId(id).replaceChildren(...specs.map((spec) => new Option(spec, spec)));
  }
  restore();
  status("ready");
}

function parsed(schema) {
  try { return JSON.parse(schema); } catch (error) { throw new Error(`The JSON schema cannot be read: ${error.message}`); }
}

function body(speculative) {
  const prompt = byId("prompt").value;
  const asked = config.chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const schema = config.chat ? byId("schema").value.trim() : "";
  if (schema !== "") {
    const name = "answer";
    asked.response_format = { type: "json_schema", json_schema: { name, schema: parsed(schema) } };
  }
  return {
    ...asked, model: config.model, stream: true, stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value), seed: Number(byId("seed").value),
    max_tokens: Number(byId("tokens").value), speculative, metrics: "trees",
  };
}

/** Yields the events of a streamed answer. */
async function* ask(speculative, signal) {
  const headers = { "content-type": "application/json" };
  if (byId("key").value !== "") headers.authorization = `Bearer ${byId("key").value}`;
  const path = config.chat ? "/v1/chat/completions" : "/v1/completions";
  const answer = await fetch(path, { method: "POST", headers, signal, body: JSON.stringify(body(speculative)) });
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      const data = line.trim();
      if (!data.startsWith("data: ") || data === "data: [DONE]") continue;
      const event = JSON.parse(data.slice(6));
      if (event.error !== undefined) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Live figures of an answer: tokens per second, and tokens per pass (τ). */
function figures(count, verified, accepted, began) {
  const seconds = (performance.now() - began) / 1000;
  const tau = verified === 0 ? 1 : 1 + accepted / verified;
  return `${(count / seconds).toFixed(1)} tokens/s · ${tau.toFixed(2)} tokens per pass (τ)`;
}

/** Writes one answer into the page; returns its text. */
async function write(speculative, text, out, onStep, signal) {
  text.replaceChildren();
  out.textContent = "";
  let count = 0, verified = 0, accepted = 0, began = null;
  for await (const event of ask(speculative, signal)) {
    if (event.tree !== undefined) {
      if (began === null) began = performance.now();
      else {
        verified += 1;
        accepted += event.tree.kind.filter((kind) => kind === "accepted").length;
        count += event.tree.tokens.length;
        out.textContent = figures(count, verified, accepted, began);
      }
      const number = onStep(event.tree);
      for (const token of event.tree.tokens) {
        const span = document.createElement("span");
        span.className = token.origin;
        span.textContent = token.text;
        span.dataset.step = number;
        text.append(span);
      }
      text.scrollTop = text.scrollHeight;
    }
    if (event.metrics !== undefined) {
      const found = event.metrics.speculative_decoding;
      const tau = found.mean_acceptance_length.toFixed(2);
      out.textContent = `${event.metrics.tokens_per_second.toFixed(1)} tokens/s · ${tau} tokens per pass (τ)`;
    }
  }
  return text.textContent;
}

async function start() {
  if (running !== null || config === null) return;
  save();
  problem("");
  byId("plain-side").hidden = !byId("compare").checked;
  byId("verdict").textContent = "";
  steps = [];
  now = -1;
  follow = true;
  running = new AbortController();
  byId("write").disabled = true;
  byId("stop").disabled = false;
  status("writing …");
  try {
    const chosen = { drafter: byId("drafter").value, policy: byId("policy").value };
    const drafted = await write(chosen, byId("text"), byId("figures"), addStep, running.signal);
    if (byId("compare").checked) {
      status("plain decoding …");
      const plain = await write(false, byId("plain-text"), byId("plain-figures"), () => -1, running.signal);
      byId("verdict").textContent = plain === drafted ? "The same text." : "The texts differ.";
    }
    status("done");
  } catch (error) {
    if (error.name === "AbortError") status("stopped");
    else {
      status("");
      const gone = error instanceof TypeError;  // what fetch raises when nobody answers
      problem(gone ? "The server does not answer any more. Start draftree serve again; what you typed is kept." : error.message);
    }
  } finally {
    running = null;
    byId("write").disabled = false;
    byId("stop").disabled = true;
  }
}

function addStep(step) {
  steps.push(step);
  byId("steps").hidden = false;
  byId("slider").max = steps.length - 1;
  if (follow) show(steps.length - 1);
  return steps.length - 1;
}

function show(wanted) {
  const next = Math.min(Math.max(wanted, 0), steps.length - 1);
  if (!(next >= 0)) return;
  now = next;
  const step = steps[now];
  byId("tree").replaceChildren(drawTree(step, config.drawing));
  byId("head").textContent = step.head;
  byId("slider").value = now;
  byId("slider").setAttribute("aria-valuetext", step.head);
  byId("back").disabled = now === 0;
  byId("on").disabled = now === steps.length - 1;
  for (const span of byId("text").children) span.classList.toggle("chosen", Number(span.dataset.step) === now);
}

function move(to) {
  follow = to >= steps.length - 1;
  show(to);
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("slider").addEventListener("input", (event) => move(Number(event.target.value)));
byId("back").addEventListener("click", () => move(now - 1));
byId("on").addEventListener("click", () => move(now + 1));
byId("text").addEventListener("click", (event) => {
  if (event.target.dataset.step !== undefined) move(Number(event.target.dataset.step));
});
for (const id of ["tree", "text"]) {
  byId(id).addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    move(now + by);
  });
}
for (const id of [...FIELDS, "key"]) byId(id).addEventListener("input", save);
connect();
