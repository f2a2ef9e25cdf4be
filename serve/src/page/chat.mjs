// The chat: asks, shows the answer as it comes, keeps the conversation, and says how the server is.
//
// At most one answer is on its way. `running` says which; whoever ends it early takes `running` away first, and an answer that finds itself replaced
// touches neither the page nor the conversation.
import { Shown } from "./markdown.mjs";
import { MOST_BYTES, kindOf, part, read, shown } from "./media.mjs";
import { emptyAnswer, isAnswered, loadConversation, loadKey, loadSettings, messagesFor, saveConversation, saveKey, saveSettings, storageOf } from "./store.mjs";

const $ = (id) => document.getElementById(id);
const element = (name, className, ...children) => {
  const node = Object.assign(document.createElement(name), { className });
  node.append(...children);
  return node;
};
const [local, session] = [storageOf("localStorage"), storageOf("sessionStorage")];
const SETTINGS = ["system", "temperature", "most", "seed"];
const isTouch = matchMedia("(pointer: coarse)"), isNarrow = matchMedia("(max-width: 48rem)");

let exchanges = loadConversation(local);
/// The answer on its way: `{ view, controller }`.
let running = null;
/// What the model reads besides text, and what goes with the next message.
let senses = [], attached = [];

const headers = () => ({ "content-type": "application/json", ...($("key").value && { authorization: "Bearer " + $("key").value }) });
const keep = () => ($("kept").textContent = saveConversation(local, exchanges) || "The conversation and the settings are kept in this browser.");
const say = (text) => ($("status").textContent = text);

// The conversation on the page.

function button(name, title, act) {
  const made = element("button", "small", name);
  Object.assign(made, { type: "button", title });
  made.addEventListener("click", act);
  return made;
}

/// An exchange on the page. Questions are shown as they were typed, answers as Markdown.
class View {
  constructor(exchange) {
    this.exchange = exchange;
    this.thoughts = element("details", "thoughts", element("summary", "", "Thoughts"), element("div", ""));
    this.content = element("div", "content");
    this.content.dir = "auto";
    this.waiting = element("div", "waiting");
    this.failure = element("div", "failure");
    this.note = element("div", "note");
    const question = element("div", "question", ...exchange.media.map(shown), element("div", "text", exchange.text));
    question.dir = "auto";
    this.copy = button("Copy answer", "Copy the answer as Markdown", (event) => copy(event.currentTarget, exchange.answer.content));
    const retry = button("Retry", "Ask the same question again", () => answer(this)), edit = button("Edit", "Take the question back and change it", () => takeBack(this));
    for (const one of [retry, edit]) one.classList.add("only-last");
    this.root = element("section", "exchange", question, this.thoughts, this.content, this.waiting, this.failure, this.note, element("div", "actions", this.copy, retry, edit));
    this.markdown = new Shown(this.content);
    this.refresh();
  }

  refresh() {
    const { answer, answer: { content, thoughts } } = this.exchange;
    const isRunning = running?.view === this;
    this.markdown.set(content);
    this.thoughts.hidden = !thoughts;
    this.thoughts.firstChild.textContent = isRunning && !content ? "Thinking…" : "Thoughts";
    if (this.thoughts.lastChild.textContent !== thoughts) this.thoughts.lastChild.textContent = thoughts;
    this.waiting.hidden = !isRunning || Boolean(content || thoughts);
    this.failure.textContent = answer.failure;
    this.note.textContent = answer.note;
    this.copy.hidden = !content;
    this.root.classList.toggle("left-out", !isRunning && !isAnswered(this.exchange));
  }
}

/// Changes the page, and stays at its end if a reader is there.
function atEnd(change, always = false) {
  const log = $("log");
  const isThere = always || log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  change();
  if (isThere) log.scrollTop = log.scrollHeight;
}

function showAll() {
  $("log").replaceChildren($("empty"), ...exchanges.map((exchange) => new View(exchange).root));
  showState();
  $("log").scrollTop = $("log").scrollHeight;
}

function showState() {
  $("empty").hidden = exchanges.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  document.body.classList.toggle("answering", running !== null);
}

async function copy(from, text) {
  const name = from.textContent;
  from.textContent = (await toClipboard(text)) ? "Copied" : "Cannot copy";
  setTimeout(() => (from.textContent = name), 1500);
}

/// Browsers have a clipboard only over TLS or on their own machine; elsewhere the older way works.
async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text, readOnly: true }), focused = document.activeElement;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}

// Answers.

/// The data of server-sent events, one by one. A stream that ends without saying so was cut.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection was lost before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const event of parts) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
}

/// What a response that is no answer says.
async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

function requestFor(exchange) {
  const system = $("system").value;
  const request = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messagesFor(exchanges, exchange, part)],
    stream: true, stream_options: { include_usage: true },
    chat_template_kwargs: { enable_thinking: $("thinking").checked },
  };
  for (const [id, field] of [["temperature", "temperature"], ["most", "max_tokens"], ["seed", "seed"]])
    if ($(id).value !== "") request[field] = Number($(id).value);
  return request;
}

async function answer(view) {
  const reply = (view.exchange.answer = emptyAnswer());
  const mine = (running = { view, controller: new AbortController() });
  const started = performance.now();
  const waited = () => {
    const seconds = Math.floor((performance.now() - started) / 1000);
    view.waiting.textContent = "Waiting for the first token" + (seconds ? `, ${seconds} s` : "");
  };
  waited();
  const clock = setInterval(waited, 1000);
  atEnd(() => { showState(); view.refresh(); }, true);
  keep();
  say("Answering");
  try {
    await stream(requestFor(view.exchange), mine, reply);
  } catch (error) {
    if (error.name === "AbortError") reply.note = "stopped";
    else reply.failure = error.message;
  }
  clearInterval(clock);
  if (running !== mine) return;
  if (!reply.content) reply.note = [reply.note, "not part of the conversation unless it is answered"].filter(Boolean).join("; ");
  running = null;
  atEnd(() => { view.refresh(); showState(); });
  keep();
  say(reply.failure ? "Error: " + reply.failure : spoken(view.content) || reply.note);
  if (!isTouch.matches) $("input").focus();
}

/// Reads an answer into `reply`, and shows it once a frame at most.
async function stream(request, mine, reply) {
  const asked = { method: "POST", headers: headers(), body: JSON.stringify(request), signal: mine.controller.signal };
  const response = await fetch("v1/chat/completions", asked).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  });
  if (!response.ok) throw new Error(await complaint(response));
  let first = 0, finish = "", usage = null, frame = 0;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage || usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    first ||= choice.delta.reasoning_content || choice.delta.content ? performance.now() : 0;
    reply.thoughts += choice.delta.reasoning_content ?? "";
    reply.content += choice.delta.content ?? "";
    finish = choice.finish_reason || finish;
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      if (running === mine) atEnd(() => mine.view.refresh());
    });
  }
  if (!usage) return;
  const { completion_tokens: tokens, prompt_tokens: prompt } = usage, seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) + " tokens/s, " : "";
  reply.note = `${tokens} tokens, ${rate}${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${prompt} prompt tokens kept` + (finish === "length" ? ", cut by the limit" : "");
}

/// An answer as it is read aloud: once, when it is there, without the names of buttons.
function spoken(content) {
  const copied = content.cloneNode(true);
  copied.querySelectorAll(".bar").forEach((bar) => bar.remove());
  return copied.textContent;
}

const stop = () => running?.controller.abort();

function startAnew() {
  const old = running;
  running = null;
  old?.controller.abort();
  exchanges = [];
  showAll();
  keep();
  say("A new conversation");
  $("input").focus();
}

function takeBack(view) {
  exchanges = exchanges.filter((exchange) => exchange !== view.exchange);
  showAll();
  keep();
  $("input").value = view.exchange.text;
  attached = view.exchange.media.filter((one) => one.url);
  showAttached();
  grow();
  $("input").focus();
}

// The message being written.

/// As high as its text, up to what the style sheet allows.
function grow() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + "px";
}

function send() {
  const text = $("input").value.trim();
  if (!(text || attached.length) || running) return;
  const exchange = { text, media: attached, answer: emptyAnswer() };
  exchanges.push(exchange);
  const view = new View(exchange);
  $("log").append(view.root);
  $("input").value = "";
  attached = [];
  showAttached();
  grow();
  answer(view);
}

/// Attaches files. Those that cannot be are named.
async function attach(files) {
  const refused = [];
  for (const file of files) {
    const kind = kindOf(file.type, senses);
    if (!kind) refused.push(`${file.name} is nothing that this model reads.`);
    else if (file.size > MOST_BYTES) refused.push(`${file.name} is larger than ${MOST_BYTES >> 20} MB.`);
    else attached.push({ kind, url: await read(file), name: file.name });
  }
  showAttached(refused.join(" "));
}

function showAttached(refused = "") {
  $("media").replaceChildren(...attached.map((one) => {
    const view = shown(one), remove = element("button", "remove", "×");
    Object.assign(remove, { type: "button", title: "Remove " + one.name });
    remove.addEventListener("click", () => { attached = attached.filter((other) => other !== one); showAttached(); });
    view.append(remove);
    return view;
  }), ...(refused ? [element("p", "hint", refused)] : []));
  if (refused) say(refused);
}

// Settings, and how the server is.

function openSettings(open) {
  document.body.classList.toggle("with-settings", open);
  $("shade").hidden = !open;
  $("main").inert = open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  $(open ? "close-settings" : "open-settings").focus();
  if (open) metrics();
}

function restoreSettings() {
  const kept = loadSettings(local);
  for (const id of SETTINGS) if (typeof kept[id] === "string") $(id).value = kept[id];
  $("thinking").checked = kept.thinking === true;
  $("key").value = loadKey(session);
}

function keepSettings() {
  saveSettings(local, { ...Object.fromEntries(SETTINGS.map((id) => [id, $(id).value])), thinking: $("thinking").checked });
}

const rows = (list, pairs) => list.replaceChildren(...pairs.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", String(value))]));

function greet(title, about, isError = false) {
  $("greeting").textContent = title;
  $("about").textContent = about;
  $("about").classList.toggle("error", isError);
}

/// Says what the server runs; asks again until it is there and its model is loaded.
async function facts() {
  let version;
  try {
    const response = await fetch("version", { headers: headers() });
    if (response.status === 401) return greet("This server asks for an API key", "Enter it in the settings.", true);
    if (!response.ok) throw new Error(await complaint(response));
    version = await response.json();
  } catch {
    greet("The server does not answer", "The page asks again every few seconds.", true);
    return setTimeout(facts, 3000);
  }
  document.title = $("model").textContent = version.model;
  senses = version.input_modalities ?? ["text"];
  $("attach").hidden = senses.length < 2;
  $("file").accept = senses.slice(1).map((kind) => kind + "/*").join(",");
  const memory = version.memory_bytes ? (version.memory_bytes / 2 ** 30).toFixed(1) + " GiB" : "the host's";
  const words = senses.map((sense) => ({ image: "pictures", audio: "sound" })[sense] ?? sense).join(", ");
  rows($("facts"), [["model", version.model], ["device", version.device ?? "loading"], ["context", version.context], ["reads", words],
    ["sequences", version.sequences ?? ""], ["memory", memory], ["hash", version.plan_hash.slice(0, 12)]]);
  greet(version.model, version.device ? `On ${version.device}, with a context of ${version.context} tokens. Reads ${words}.` : "The model is being loaded.");
  if (!version.device) setTimeout(facts, 1000);
}

async function metrics() {
  if (document.hidden || (isNarrow.matches && !document.body.classList.contains("with-settings"))) return;
  try {
    const text = await (await fetch("metrics")).text();
    const of = (name) => Number(text.match(new RegExp("^vllm:" + name + "\\{[^}]*\\} (.*)$", "m"))?.[1] ?? NaN);
    rows($("metrics"), [["running", of("num_requests_running")], ["waiting", of("num_requests_waiting")],
      ["cache in use", (100 * of("kv_cache_usage_perc")).toFixed(1) + " %"], ["tokens written", of("generation_tokens_total")],
      ["prompt tokens kept", of("prefix_cache_hits_total")]]);
  } catch { rows($("metrics"), [["", "the server does not answer"]]); }
}

const on = (id, event, act) => $(id).addEventListener(event, act);
on("form", "submit", (event) => { event.preventDefault(); send(); });
on("input", "input", grow);
// A keyboard on glass has no Shift + Enter: there the button sends.
on("input", "keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch.matches) { event.preventDefault(); send(); }
});
on("input", "paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => kindOf(file.type, senses));
  if (files.length) { event.preventDefault(); attach(files); }
});
on("attach", "click", () => $("file").click());
on("file", "change", () => { attach([...$("file").files]); $("file").value = ""; });
on("stop", "click", stop);
on("new", "click", startAnew);
on("log", "click", ({ target }) => { if (target.matches(".code .copy")) copy(target, target.closest(".code").querySelector("pre").textContent); });
on("open-settings", "click", () => openSettings(true));
on("close-settings", "click", () => openSettings(false));
on("shade", "click", () => openSettings(false));
on("settings", "input", keepSettings);
on("key", "change", () => { saveKey(session, $("key").value); facts(); });
isNarrow.addEventListener("change", () => { if (document.body.classList.contains("with-settings")) openSettings(false); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (document.body.classList.contains("with-settings")) openSettings(false);
  else stop();
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) { event.preventDefault(); document.body.classList.add("dropping"); }
});
document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (event.dataTransfer.files.length) { event.preventDefault(); attach([...event.dataTransfer.files]); }
});
// A reload cuts an answer; what there is of it stays. A page that answers nothing has kept all it has, and another tab may have kept more since.
addEventListener("pagehide", () => {
  if (!running) return;
  running.view.exchange.answer.note = "cut: the page was left";
  keep();
});

restoreSettings();
showAll();
keep();
facts();
metrics();
setInterval(metrics, 1000);
if (!isTouch.matches) $("input").focus();
