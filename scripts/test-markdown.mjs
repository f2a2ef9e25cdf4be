// The chat page's Markdown and its store, without a browser: what becomes which block, what never becomes a link, what a browser keeps.
// usage: node scripts/test-markdown.mjs
import assert from "node:assert/strict";
import { inline, parse, safeAddress } from "../serve/src/page/markdown.mjs";
import { bounded, emptyAnswer, loadConversation, loadSettings, messagesFor, saveConversation } from "../serve/src/page/store.mjs";

/// Blocks and text in a short form: `p(a strong(b))`.
const short = (node) => {
  if (typeof node === "string") return node;
  if (Array.isArray(node)) return node.map(short).join("");
  switch (node.kind) {
    case "break": return "/";
    case "code": return node.raw === undefined ? `code(${node.text})` : `pre:${node.language}(${node.text})`;
    case "link": return `link:${node.href}(${short(node.content)})`;
    case "heading": return `h${node.level}(${short(node.content)})`;
    case "paragraph": return `p(${short(node.content)})`;
    case "quote": return `quote(${short(node.blocks)})`;
    case "list": return `${node.start ?? "ul"}${node.isLoose ? "+" : ""}(${node.items.map((item) => (item.done === null ? "" : item.done ? "[x]" : "[ ]") + short(item.blocks)).join(",")})`;
    case "table": return `table:${node.align.map((one) => one[0] ?? "l").join("")}(${[node.head, ...node.rows].map((row) => row.map(short).join("|")).join(";")})`;
    case "rule": return "rule";
    default: return `${node.kind}(${short(node.content)})`;
  }
};

for (const [text, expected] of [
  // Paragraphs and headings.
  ["one\ntwo\n\nthree", "p(one/two)p(three)"],
  ["# A *b*\n## B ##\n#hash", "h1(A emphasis(b))h2(B)p(#hash)"],
  ["text\n---\nmore\n***", "p(text)rulep(more)rule"],
  // Emphasis, by CommonMark's rules; ideographs need no spaces around it.
  ["**a** *b* ***c*** __d__ _e_ ~~f~~", "p(strong(a) emphasis(b) emphasis(strong(c)) strong(d) emphasis(e) struck(f))"],
  ["snake_case_name 2 * 3 * 4 **open", "p(snake_case_name 2 * 3 * 4 **open)"],
  ["**a *b** c*", "p(emphasis(emphasis(a emphasis(b)) c))"],
  ["*a **b** c* **a *b* c**", "p(emphasis(a strong(b) c) strong(a emphasis(b) c))"],
  ["これは**「重要」**です", "p(これはstrong(「重要」)です)"],
  ["\\*a\\* \\\\ \\x", "p(*a* \\ \\x)"],
  // Code.
  ["`a*b*` ``c`d`` `e", "p(code(a*b*) code(c`d) `e)"],
  ["```rust\nfn f() {}\n\n  *x*\n```\nafter", "pre:rust(fn f() {}\n\n  *x*)p(after)"],
  ["~~~\n```\n~~~", "pre:(```)"],
  ["before\n```py\nprint(1)", "p(before)pre:py(print(1))"],
  ["```", "pre:()"],
  ["````\n```\n````", "pre:(```)"],
  // Lists.
  ["- a\n  - b\n    - c\n- d", "ul(p(a)ul(p(b)ul(p(c))),p(d))"],
  ["3. a\n4. b\n  - c", "3(p(a),p(b)ul(p(c)))"],
  ["1. a\n\n2. b\n\nafter", "1+(p(a),p(b))p(after)"],
  ["1. a\n   ```js\n   x\n     y\n   ```\n2. b", "1(p(a)pre:js(x\n  y),p(b))"],
  ["- [ ] a\n- [x] b", "ul([ ]p(a),[x]p(b))"],
  ["- a\nb\n* c", "ul(p(a/b))ul(p(c))"],
  ["In\n1912. it was\n- so", "p(In/1912. it was)ul(p(so))"],
  ["* **a**: b\n* c", "ul(p(strong(a): b),p(c))"],
  // Quotes, tables.
  ["> a\n> > b\nlazy\n\nc", "quote(p(a)quote(p(b/lazy)))p(c)"],
  ["| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n| 2 |\nafter", "table:lr(a|b;1|code(x|y);2;after)"],
  ["a | b\n--- | :-:\n**1** | 2<br>3\n\nafter", "table:lc(a|b;strong(1)|2/3)p(after)"],
  ["a | b\nc | d", "p(a | b/c | d)"],
  // Links.
  ["[a *b*](https://x.y/z_(w) \"t\") <https://a.b> (https://c.d/e).", "p(link:https://x.y/z_(w)(a emphasis(b)) link:https://a.b/(https://a.b) (link:https://c.d/e(https://c.d/e)).)"],
  ["[mail](mailto:a@b.c) ![alt](https://x.y/p.png)", "p(link:mailto:a@b.c(mail) link:https://x.y/p.png(alt))"],
  ["[a] [b][c] ](https://x.y) [", "p([a] [b][c] ](https://x.y) [)"],
  // HTML is text.
  ["<b>a</b> <img src=x onerror=alert(1)> &lt;", "p(<b>a</b> <img src=x onerror=alert(1)> &lt;)"],
]) assert.equal(short(parse(text)), expected, JSON.stringify(text));

// Half an answer never throws, and what is complete stays as it is.
const whole = "# T\n\n- a\n  1. b **c** `d`\n\n```js\nx\n```\n\n| a | b |\n|---|---|\n| [l](https://x.y) | *e* |\n\n> q\n";
for (let end = 0; end <= whole.length; end += 1) parse(whole.slice(0, end));
assert.deepEqual(parse(whole.slice(0, -6)).slice(0, 3), parse(whole).slice(0, 3));

// An address is a link by its scheme alone, whatever is done to hide that.
const addresses = (nodes) => nodes.flatMap((node) => (node?.kind === "link" ? [node.href] : node?.content ? addresses(node.content) : []));
for (const hostile of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:alert(1)", "java\tscript:alert(1)", "\u0001javascript:alert(1)", "vbscript:x", "data:text/html,<script>alert(1)</script>",
  "data:image/svg+xml,<svg onload=alert(1)>", "blob:https://x.y/z", "file:///etc/passwd", "//x.y", "/v1/models", "x", "", "https://", "view-source:https://x.y", "javascript&colon;alert(1)"]) {
  assert.equal(safeAddress(hostile), null, hostile);
  for (const text of [`[a](${hostile})`, `[a](<${hostile}>)`, `![a](${hostile})`, `<${hostile}>`, `[a](${hostile} "t")`])
    // An address may be part of another, which stays text.
    assert.deepEqual(addresses(inline(text)).filter((address) => !address.startsWith("https://x.y/")), [], text);
}
assert.deepEqual(addresses(inline("[a](https://x.y/\" onclick=\"alert(1))")), ["https://x.y/"]);
assert.deepEqual(addresses(inline("[[a](https://b.c)](https://d.e)")), ["https://d.e/"], "no link within a link");

// Deep or long: no overflow of the stack, and no depth that a browser could not show.
const depth = (node) => 1 + Math.max(0, ...[node.content, node.blocks, ...(node.items ?? []).map((item) => item.blocks)].flat().filter((inner) => typeof inner === "object").map(depth));
for (const piece of ["*", "*a ", "**a* ", "_a_", "[", "](", "[a](", "![", "> ", "- ", "1. ", "`", "``` ", "|", "<", "https://x", "~~a ", "\\", "[a](b(", "\n- ", "\n> "])
  for (const text of [piece.repeat(2000), (piece + "x").repeat(2000), (piece + "\n").repeat(2000), piece.repeat(2000) + "x" + [...piece].reverse().join("").repeat(2000)])
    assert.ok(Math.max(...parse(text).map(depth)) < 80, piece);
const steps = Array.from({ length: 500 }, (_, level) => " ".repeat(2 * level) + "- x").join("\n");
assert.ok(Math.max(...parse(steps).map(depth)) < 80);

// A request has whole exchanges and the question, never an empty message.
const exchange = (text, content, more = {}) => ({ text, media: [], answer: { ...emptyAnswer(), content, ...more } });
const picture = (size) => ({ kind: "image", name: "p.png", url: "data:image/png;base64," + "A".repeat(size) });
const said = [exchange("one", "1", { thoughts: "hm" }), exchange("failed", "", { failure: "no" }), exchange("two", "")];
assert.deepEqual(messagesFor(said, said[2], null), [{ role: "user", content: "one" }, { role: "assistant", content: "1" }, { role: "user", content: "two" }]);

// What is kept is bounded: the newest first, pictures after text.
const long = Array.from({ length: 10 }, (_, at) => exchange(`q${at}`, "x".repeat(300)));
const kept = bounded(long, 2000);
assert.ok(!kept.all && kept.exchanges.length < 5 && kept.exchanges.at(-1).text === "q9" && kept.exchanges[0].text === `q${10 - kept.exchanges.length}`);
const seen = bounded([{ ...exchange("a", "b"), media: [picture(900)] }, { ...exchange("c", "d"), media: [picture(900)] }], 2000);
assert.deepEqual(seen.exchanges.map(({ media }) => Boolean(media[0].url)), [false, true]);
assert.deepEqual(bounded(said).exchanges, said);

// A storage that is full, that holds anything, or that refuses.
const storage = (entries, most = Infinity) => ({
  getItem: (name) => entries[name] ?? null,
  removeItem: (name) => delete entries[name],
  setItem: (name, text) => { if (text.length > most) throw new Error("full"); entries[name] = text; },
});
for (const bad of ["", "{", "null", "7", "{}", "[1]", "[null]", '[{"text":"a"}]', '[{"text":"a","media":[],"answer":{"content":1,"thoughts":"","note":"","failure":""}}]', "[[]]",
  '[{"text":"a","media":[{"kind":"image","name":"x","url":"https://x.y/z.png"}],"answer":{"content":"","thoughts":"","note":"","failure":""}}]']) {
  assert.deepEqual(loadConversation(storage({ "gemma4c.conversation": bad })), [], bad);
  assert.equal(typeof loadSettings(storage({ "gemma4c.settings": bad })), "object", bad);
}
const entries = {};
assert.equal(saveConversation(storage(entries), said), "");
assert.deepEqual(loadConversation(storage(entries)), said);
assert.match(saveConversation(storage(entries, 200_000), [{ ...exchange("a", "b"), media: [picture(1_000_000)] }]), /too large/);
assert.equal(loadConversation(storage(entries))[0].media[0].url, undefined);
assert.match(saveConversation(storage(entries, 0), said), /keeps nothing/);
assert.deepEqual(loadConversation(storage(entries)), []);
console.log("the page's Markdown and store work");
