// A conversation as data: what of it a request says, and what of it a browser keeps.
//
// It is a list of exchanges, each a question and what was answered: `{ text, media, answer: { content, thoughts, note, failure } }`. An exchange without an answer
// (it failed, or was stopped before its first word) stays on the page and is in no later request: so no request has an empty message,
// and a question that the server refuses is not refused again with every question after it.

/// What a browser keeps, in characters. Browsers keep about five million for all of a site.
const MOST_KEPT = 2_000_000;
const CONVERSATION = "gemma4c.conversation", SETTINGS = "gemma4c.settings", KEY = "gemma4c.key";

export const emptyAnswer = () => ({ content: "", thoughts: "", note: "", failure: "" });
export const isAnswered = (exchange) => exchange.answer.content !== "";

/// The messages of a request that asks a question of the conversation. Thoughts are not part of what the model is told again.
export function messagesFor(exchanges, asked, part) {
  const before = exchanges.slice(0, exchanges.indexOf(asked)).filter(isAnswered);
  const question = ({ text, media }) => ({ role: "user", content: media.length ? [...media.map(part), ...(text ? [{ type: "text", text }] : [])] : text });
  return [...before.flatMap((exchange) => [question(exchange), { role: "assistant", content: exchange.answer.content }]), question(asked)];
}

const sizeOf = ({ text, answer }) => text.length + Object.values(answer).reduce((sum, one) => sum + one.length, 200);

/// The newest exchanges that fit, and of their pictures and sounds the newest that still do. The others keep their names.
export function bounded(exchanges, most = MOST_KEPT) {
  let left = most;
  const kept = [];
  for (const exchange of [...exchanges].reverse()) {
    left -= sizeOf(exchange);
    if (left < 0) break;
    kept.unshift(exchange);
  }
  let all = kept.length === exchanges.length;
  const withMedia = kept.reverse().map((exchange) => ({ ...exchange, media: exchange.media.map(({ kind, name, url }) => {
    if (!url) return { kind, name };
    left -= url.length;
    if (left >= 0) return { kind, name, url };
    all = false;
    return { kind, name };
  }) }));
  return { exchanges: withMedia.reverse(), all };
}

const isText = (value) => typeof value === "string";
const isMedium = (one) => ["image", "audio"].includes(one?.kind) && isText(one.name) && (one.url === undefined || (isText(one.url) && one.url.startsWith(`data:${one.kind}/`)));
const isExchange = (one) => isText(one?.text) && Array.isArray(one.media) && one.media.every(isMedium) && Object.keys(emptyAnswer()).every((field) => isText(one.answer?.[field]));

function readJson(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    // Another program's, or half of one.
    return null;
  }
}

/// The conversation that was kept. What is not one is as if there were none.
export function loadConversation(storage) {
  const kept = readJson(storage, CONVERSATION);
  return Array.isArray(kept) && kept.every(isExchange) ? kept : [];
}

/// Keeps a conversation. Returns what a user should know of it.
export function saveConversation(storage, exchanges) {
  if (!exchanges.length) {
    storage.removeItem(CONVERSATION);
    return "";
  }
  // Others of this site may have taken part of the space.
  for (const most of [MOST_KEPT, MOST_KEPT / 4, MOST_KEPT / 16]) {
    const kept = bounded(exchanges, most);
    try {
      storage.setItem(CONVERSATION, JSON.stringify(kept.exchanges));
      return kept.all ? "" : "This conversation is too large to be kept whole: after a reload its oldest part is gone.";
    } catch { /* Too much still. */ }
  }
  storage.removeItem(CONVERSATION);
  return "This browser keeps nothing: a reload empties the conversation.";
}

/// Settings by name: texts, and whether to think.
export function loadSettings(storage) {
  const kept = readJson(storage, SETTINGS);
  return Object.fromEntries(Object.entries(kept && typeof kept === "object" ? kept : {}).filter(([, value]) => isText(value) || typeof value === "boolean"));
}

export function saveSettings(storage, settings) {
  try {
    storage.setItem(SETTINGS, JSON.stringify(settings));
  } catch { /* They hold until the page is left. */ }
}

/// A key is kept as long as its tab.
export const loadKey = (storage) => storage.getItem(KEY) ?? "";
export function saveKey(storage, key) {
  try {
    storage.setItem(KEY, key);
  } catch { /* It holds until the page is left. */ }
}

/// A browser's storage; where it allows none, one that keeps nothing and says so by refusing.
export function storageOf(name) {
  try {
    if (window[name]) return window[name];
  } catch { /* Blocked for this site. */ }
  return { getItem: () => null, removeItem: () => {}, setItem: () => { throw new Error("nothing is kept"); } };
}
