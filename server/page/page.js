"use strict";
const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
let running = null; // AbortController of the request in flight
let before = null; // figures of the last poll

function show(text, kind) {
  const span = document.createElement("span");
  if (kind) span.className = kind;
  span.textContent = text;
  $("output").append(span);
}

function body() {
  const value = {
    model: $("model").textContent,
    max_tokens: Number($("max_tokens").value),
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("seed").value !== "") value.seed = Number($("seed").value);
  if ($("stop").value !== "") value.stop = $("stop").value;
  if (mode() === "chat") value.messages = [{ role: "user", content: $("prompt").value }];
  else value.prompt = $("prompt").value;
  return value;
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

// The events of a server-sent stream, as parsed JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function generate(event) {
  event.preventDefault();
  running = new AbortController();
  $("send").disabled = true;
  $("cancel").disabled = false;
  $("output").replaceChildren();
  $("summary").textContent = "";
  const chat = mode() === "chat";
  if (!chat) show($("prompt").value, "prompt");
  const start = performance.now();
  let first = null, usage = null, reason = null;
  try {
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      for (const choice of chunk.choices) {
        const delta = chat ? choice.delta : { content: choice.text };
        if (delta.reasoning_content) show(delta.reasoning_content, "thought");
        if (delta.content) show(delta.content);
        if (first === null && (delta.content || delta.reasoning_content)) first = performance.now();
        reason = choice.finish_reason ?? reason;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped here";
    else show(`\n${error.message}`, "error");
  }
  const end = performance.now();
  const parts = [];
  if (usage) parts.push(`${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} output tokens`);
  if (first !== null) parts.push(`first token after ${((first - start) / 1000).toFixed(2)} s`);
  if (usage && first !== null && usage.completion_tokens > 1)
    parts.push(`${((usage.completion_tokens - 1) / ((end - first) / 1000)).toFixed(1)} tokens/s`);
  if (reason) parts.push(reason);
  $("summary").textContent = parts.join(" · ");
  $("send").disabled = false;
  $("cancel").disabled = true;
  running = null;
}

const percent = (part) => `${(100 * part).toFixed(1)} %`;

async function poll() {
  try {
    const load = await (await fetch("/load")).json();
    const now = performance.now();
    $("state").className = `dot ${load.state === "ready" ? "good" : "bad"}`;
    $("state").title = load.state;
    $("running").textContent = load.num_running;
    $("waiting").textContent = load.num_waiting;
    $("cache").textContent = percent(load.cache_usage);
    $("cache-bar").style.width = percent(load.cache_usage);
    $("hits").textContent = load.prefix_queries ? percent(load.prefix_hits / load.prefix_queries) : "–";
    $("drafts").hidden = load.num_speculative_tokens === 0;
    if (load.spec_draft_tokens) $("acceptance").textContent = percent(load.spec_accepted_tokens / load.spec_draft_tokens);
    if (before !== null)
      $("rate").textContent = ((load.generation_tokens - before.tokens) / ((now - before.at) / 1000)).toFixed(1);
    before = { tokens: load.generation_tokens, at: now };
  } catch {
    $("state").className = "dot bad";
    $("state").title = "unreachable";
  }
  setTimeout(poll, POLL_MS);
}

fetch("/v1/models").then((r) => r.json()).then((models) => {
  $("model").textContent = models.data[0].id;
  document.title = `${models.data[0].id} · snapmla`;
});
$("form").addEventListener("submit", generate);
$("cancel").addEventListener("click", () => running?.abort());
poll();
