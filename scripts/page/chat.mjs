// The chat page against answers that the test writes: nothing here depends on what a model says or how fast it is.
import { StandIn } from "./stand_in.mjs";

const at = (id) => `document.getElementById("${id}")`;
const click = (page, selector) => page.run(`document.querySelector(${JSON.stringify(selector)}).click()`);
const last = (selector) => `document.querySelector(".exchange:last-child ${selector}")`;
const isDone = `${at("stop")}.hidden`;
const users = (request) => request.messages.map((message) => `${message.role}: ${typeof message.content === "string" ? message.content : JSON.stringify(message.content)}`);

/// Types a question and sends it with a key, as its user would.
export async function ask(page, text) {
  await page.run(`${at("input")}.focus()`);
  await page.type(text);
  await page.press("Enter");
}

function expect(what, actual, expected) {
  const [a, b] = [actual, expected].map((value) => JSON.stringify(value));
  if (a !== b) throw new Error(`${what}: ${a}, not ${b}`);
}

export const MARKDOWN = `## Sorting in Rust

Use \`sort_unstable\` when **order of equals** does not matter; it is *faster* and allocates nothing. See [the documentation](https://doc.rust-lang.org/std/).

\`\`\`rust
fn main() {
    let mut numbers = vec![3, 1, 2];
    numbers.sort_unstable();
    println!("{numbers:?} <b>no markup</b> // a long line that scrolls within its own box on a phone");
}
\`\`\`

1. Sort first:
   - by key
   - then by value
2. Search with \`binary_search\`.

| method | stable | allocates | worst case |
|---|:-:|:-:|--:|
| \`sort\` | yes | yes | n log n |
| \`sort_unstable\` | no | no | n log n |

> Measure before you choose.

---

That is all.`;

const HOSTILE = `<script>window.hurt = 1</script><img src=x onerror="window.hurt = 1">

[a](javascript:window.hurt=1) [b](data:text/html,<script>window.hurt=1</script>) ![c](https://example.invalid/pixel.png)
<a href="javascript:window.hurt=1">d</a> <iframe src="https://example.invalid"></iframe>

\`\`\`"><script>window.hurt=1</script>
</code></pre><script>window.hurt = 1</script>
\`\`\`

| <svg onload="window.hurt=1"> | b |
|---|---|
| [e](JaVaScRiPt:window.hurt=1) | <style>body{display:none}</style> |
`;

const TESTS = {
  async "an empty conversation names the model"(page) {
    await page.until("the model's name", `${at("greeting")}.textContent === document.title && document.title !== "gemma4c"`);
    await page.check("the context is not named", `/context of \\d+ tokens/.test(${at("about")}.textContent)`);
  },

  async "a question gets a sign of life, then an answer that is announced once"(page, server) {
    await page.run(`window.said = []; new MutationObserver(() => said.push(${at("status")}.textContent)).observe(${at("status")}, { childList: true, characterData: true, subtree: true })`);
    await ask(page, "How do I sort?");
    const reply = await server.next();
    expect("the first request", users(reply.request), ["user: How do I sort?"]);
    await page.check("nothing shows that the answer is on its way", `${last(".waiting")}.checkVisibility() && ${last(".waiting")}.textContent.startsWith("Waiting")`);
    reply.begin().thought("The user wants to ").thought("sort.");
    await page.until("thoughts", `${last(".thoughts")}.checkVisibility() && ${last(".thoughts div")}.textContent === "The user wants to sort."`);
    await page.check("thoughts are not collapsed, or the page still waits", `!${last(".thoughts")}.open && !${last(".waiting")}.checkVisibility()`);
    const open = MARKDOWN.indexOf("sort_unstable();");
    for (const letter of MARKDOWN.slice(0, open)) reply.text(letter);
    await page.until("code that is not closed yet", `${last("pre code")}?.textContent.endsWith("numbers.")`);
    reply.text(MARKDOWN.slice(open)).end();
    await page.until("the end", isDone);
    expect("what was announced", await page.run("said.map((text) => text.slice(0, 23))"), ["Answering", "Sorting in RustUse sort"]);
    await page.check("a button's name is announced", `!said[1].includes("Copy")`);
  },

  async "Markdown becomes elements, and code can be copied"(page) {
    for (const [selector, text] of [["h4.level2", "Sorting in Rust"], ["strong", "order of equals"], ["em", "faster"], ["p code", "sort_unstable"], [".language", "rust"], ["ol > li > ul > li", "by key"], ["th:nth-child(4)", "worst case"],
      ["td code", "sort"], ["blockquote p", "Measure before you choose."], ["hr + p", "That is all."]])
      expect(selector, await page.run(`${last(".content " + selector)}?.textContent`), text);
    await page.check("a rule is missing", `${last("hr")} !== null`);
    await page.check("a link is not safe", `(({ href, target, rel }) => href === "https://doc.rust-lang.org/std/" && target === "_blank" && rel.includes("noopener"))(${last(".content a")})`);
    await page.check("code became markup", `${last("pre b")} === null && ${last("pre")}.textContent.includes("<b>no markup</b>")`);
    await click(page, ".exchange:last-child .copy");
    await page.until("the copy", `${last(".copy")}.textContent === "Copied"`);
    expect("the clipboard", (await page.run("navigator.clipboard.readText()")).split("\n").slice(0, 2), ["fn main() {", "    let mut numbers = vec![3, 1, 2];"]);
    await page.run(`${last(".actions button")}.click()`);
    await page.until("a copy of the answer", `navigator.clipboard.readText().then((text) => text.endsWith("That is all."))`);
    expect("the copied answer", await page.run("navigator.clipboard.readText()"), MARKDOWN);
  },

  async "hostile Markdown stays text"(page, server) {
    await ask(page, "<b>Hurt me</b>");
    const reply = await server.next();
    expect("roles", reply.request.messages.map(({ role }) => role), ["user", "assistant", "user"]);
    if (JSON.stringify(reply.request).includes("The user wants")) throw new Error("thoughts are told again");
    reply.begin().text(HOSTILE).end();
    await page.until("the end", isDone);
    await page.check("an element came of a text", `document.querySelector("#log :is(script, img, iframe, style, svg, object, form, .question b)") === null`);
    await page.check("a handler or another scheme came of a text", `[...document.querySelectorAll("#log *")].every((one) => [...one.attributes].every(({ name }) => !name.startsWith("on") && name !== "style") && (!one.href || /^(https?|mailto):/.test(one.href)))`);
    await page.check("a script has run", "window.hurt === undefined");
    await page.check("the text is not shown", `${last(".content")}.textContent.includes("<script>window.hurt = 1</script>")`);
  },

  async "New during an answer leaves nothing of it"(page, server) {
    await ask(page, "The old question");
    const old = await server.next();
    old.begin().text("The old answer");
    await page.until("its beginning", `${last(".content")}.textContent === "The old answer"`);
    // In one go, so that nothing of the old answer has had time to end.
    const isEmpty = await page.run(`(() => {
      ${at("new")}.click();
      const isEmpty = document.querySelectorAll(".exchange").length === 0 && ${at("empty")}.checkVisibility() && ${at("stop")}.hidden;
      ${at("input")}.value = "The new question";
      ${at("form")}.requestSubmit();
      return isEmpty;
    })()`);
    if (!isEmpty) throw new Error("the page is not empty");
    await old.closed();
    const fresh = await server.next();
    expect("the new request", users(fresh.request), ["user: The new question"]);
    fresh.begin().text("The new answer").end();
    await page.until("the new answer", `${isDone} && ${last(".content")}.textContent === "The new answer"`);
    await page.check("the old conversation shows, or is kept", `!(document.body.innerText + localStorage["gemma4c.conversation"]).includes("old")`);
    await ask(page, "And then?");
    const third = await server.next();
    expect("the request after it", users(third.request), ["user: The new question", "assistant: The new answer", "user: And then?"]);
    third.begin().text("Nothing").end();
    await page.until("its end", isDone);
  },

  async "a failed turn keeps its question and leaves no message"(page, server) {
    const before = ["user: The new question", "assistant: The new answer", "user: And then?", "assistant: Nothing"];
    await ask(page, "Will it fail?");
    (await server.next()).refuse(500, "the engine has failed");
    await page.until("the error", `${isDone} && ${last(".failure")}.textContent === "the engine has failed"`);
    await page.check("the question is gone", `${last(".question")}.textContent === "Will it fail?"`);
    expect("what is announced", await page.run(`${at("status")}.textContent`), "Error: the engine has failed");
    // Retried: asked once, as before.
    await page.run(`[...document.querySelectorAll(".exchange:last-child .actions button")].find((one) => one.textContent === "Retry").click()`);
    const retried = await server.next();
    expect("the second try", users(retried.request), [...before, "user: Will it fail?"]);
    retried.begin().thought("Hm");
    await page.until("a thought", `${last(".thoughts")}.checkVisibility()`);
    retried.cut();
    await page.until("a broken connection", `${isDone} && ${last(".failure")}.textContent.includes("was lost")`);
    // Left as it is: not part of what comes next.
    await ask(page, "Another");
    const other = await server.next();
    expect("the next request", users(other.request), [...before, "user: Another"]);
    other.begin().event({ error: { message: "it broke", type: "server_error" } }).response.end();
    await page.until("an error in the stream", `${last(".failure")}.textContent === "it broke"`);
    await page.run(`[...document.querySelectorAll(".exchange:last-child .actions button")].find((one) => one.textContent === "Edit").click()`);
    await page.check("the question cannot be changed", `${at("input")}.value === "Another" && document.querySelectorAll(".exchange").length === 3`);
    await page.run(`${at("input")}.value = ""`);
    // A stream that ends in order, but before it says so.
    await ask(page, "Cut short");
    (await server.next()).begin().thought("Hm").response.end();
    await page.until("an answer that was cut", `${last(".failure")}.textContent.includes("was lost")`);
    // No server at all.
    await page.run(`window.realFetch = fetch; window.fetch = () => Promise.reject(new TypeError("Failed to fetch"))`);
    await ask(page, "Nobody there");
    await page.until("no answer", `${last(".failure")}.textContent === "The server does not answer."`);
    await page.run(`window.fetch = realFetch`);
    // No JSON, as a proxy would answer.
    await ask(page, "Through a proxy");
    (await server.next()).response.writeHead(502, { "content-type": "text/html" }).end("<h1>Bad gateway</h1>");
    await page.until("its status", `${last(".failure")}.textContent.includes("502")`);
  },

  async "Esc stops, and what there is stays"(page, server) {
    await ask(page, "At length");
    const reply = await server.next();
    reply.begin().text("Half an ans");
    await page.until("a part", `${last(".content")}.textContent === "Half an ans"`);
    await page.press("Escape");
    await reply.closed();
    await page.until("its stop", `${isDone} && ${last(".note")}.textContent === "stopped"`);
    await ask(page, "Once more");
    const early = await server.next();
    expect("what was said before", users(early.request).slice(-3), ["user: At length", "assistant: Half an ans", "user: Once more"]);
    await page.press("Escape");
    await early.closed();
    await page.until("a stop before the first token", `${isDone} && ${last(".note")}.textContent.startsWith("stopped; ")`);
  },

  async "a reload keeps conversation and settings"(page, server) {
    await page.run(`for (const [id, value] of [["system", "Be brief."], ["temperature", "0.5"], ["seed", "7"]]) ${"document.getElementById(id)"}.value = value;
      ${at("thinking")}.click(); ${at("seed")}.dispatchEvent(new Event("input", { bubbles: true }))`);
    const shown = `[...document.querySelectorAll(".exchange")].map((one) => one.querySelector(".question").textContent + " > " + one.querySelector(".content").textContent + one.querySelector(".failure").textContent)`;
    const before = await page.run(shown);
    await page.reload();
    expect("after a reload", await page.run(shown), before);
    await ask(page, "Still here?");
    const reply = await server.next();
    expect("the history", users(reply.request).filter((_, index) => index < 3), ["system: Be brief.", "user: The new question", "assistant: The new answer"]);
    expect("the settings", [reply.request.temperature, reply.request.seed, reply.request.chat_template_kwargs.enable_thinking], [0.5, 7, true]);
    reply.begin().text("Cut by a re");
    await page.until("a part", `${last(".content")}.textContent === "Cut by a re"`);
    await page.reload();
    await reply.closed();
    expect("a reload during an answer", await page.run(`[${last(".content")}.textContent, ${isDone}]`), ["Cut by a re", true]);
    // Garbage, and more than a browser keeps.
    for (const bad of ["{", "[{}]", "[7]"]) {
      // What another tab has written is not written over.
      await page.run(`localStorage["gemma4c.conversation"] = localStorage["gemma4c.settings"] = ${JSON.stringify(bad)}`);
      await page.reload();
      await page.check(`a storage of ${bad} breaks the page`, `document.querySelectorAll(".exchange").length === 0`);
    }
    await page.run(`localStorage.other = "x".repeat(5_000_000)`);
    await ask(page, "With a full storage");
    const full = await server.next();
    full.begin().text("y".repeat(300_000)).end();
    await page.until("its end", `${isDone} && ${last(".note")}.textContent !== ""`);
    await page.check("nobody is told that it is not kept", `/too large|keeps nothing/.test(${at("kept")}.textContent)`);
    await page.run("localStorage.clear()");
    await click(page, "#new");
  },

  async "the input grows with its text"(page) {
    const height = () => page.run(`${at("input")}.clientHeight`);
    const low = await height();
    await page.run(`${at("input")}.focus()`);
    await page.type("one\ntwo\nthree\nfour");
    const high = await height();
    await page.type("\nfive".repeat(200));
    const most = await height();
    await page.run(`${at("input")}.value = ""; ${at("input")}.dispatchEvent(new Event("input"))`);
    if (!(high > low * 2 && most < 0.5 * (await page.run("innerHeight")) && (await height()) === low)) throw new Error(`the input is ${low}, ${high}, ${most} pixels high`);
  },

  async "a phone has all of it"(page, server) {
    for (const [width, height] of [[390, 844], [320, 640]]) {
      await page.resize(width, height);
      const wide = `[...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() && !one.closest("pre *, .scroll *, #status") && one.getBoundingClientRect().right > ${width} + 1).map((one) => one.outerHTML.slice(0, 80))`;
      const fits = async () => expect(`what is wider than ${width} pixels`, await page.run(wide), []);
      const input = await page.run(`${at("input")}.clientWidth`);
      if (input < width - 60) throw new Error(`the input is ${input} pixels wide of ${width}`);
      await page.run(`${at("input")}.focus()`);
      await page.type("On a phone");
      // There, Enter is a new line.
      await page.press("Enter");
      await click(page, "#send");
      const reply = await server.next();
      reply.begin().text(MARKDOWN).end();
      await page.until("the answer", `${isDone} && ${last("table")} !== null`);
      await fits();
      await page.check("settings are open, or hide their button", `!${at("settings")}.checkVisibility() && ${at("open-settings")}.checkVisibility()`);
      await click(page, "#open-settings");
      await page.check("settings do not open", `${at("settings")}.checkVisibility() && document.activeElement.id === "close-settings" && ${at("seed")}.getBoundingClientRect().right <= innerWidth`);
      await page.until("figures of the server", `document.querySelectorAll("#metrics dd").length > 3`);
      await fits();
      await page.press("Escape");
      await page.check("settings do not close", `!${at("settings")}.checkVisibility() && document.activeElement.id === "open-settings" && !${at("main")}.inert`);
      await page.check("a button is too small for a finger", `[...document.querySelectorAll("button")].every((one) => !one.checkVisibility() || one.offsetHeight >= 40)`);
      await click(page, "#new");
    }
    await page.resize(1400, 900);
    await page.check("settings are beside the chat", `${at("settings")}.checkVisibility() && !${at("open-settings")}.checkVisibility()`);
  },

  async "all text can be read, light and dark"(page, server) {
    await ask(page, "What does all of it look like?");
    const reply = await server.next();
    reply.begin().thought("Hm.").text(MARKDOWN).end();
    await page.until("an answer", isDone);
    await page.run(`${last(".thoughts")}.open = true`);
    await ask(page, "And an error?");
    (await server.next()).refuse(400, "the prompt is longer than the context");
    await page.until("an error", `${last(".failure")}.textContent !== ""`);
    for (const width of [1400, 390])
      for (const scheme of ["light", "dark"]) {
        await page.resize(width, 844);
        await page.paint(scheme);
        if (width === 390) await click(page, "#open-settings");
        const poor = await page.run(POOR_CONTRAST);
        if (poor.length) throw new Error(`${scheme}, ${width} pixels: ${poor.join("; ")}`);
        if (width === 390) await click(page, "#close-settings");
      }
    await page.resize(1400, 900);
  },
};

/// Texts whose contrast with what is behind them is below 4.5:1.
const POOR_CONTRAST = `(() => {
  const parse = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return { r, g, b, a }; };
  const over = (top, below) => Object.fromEntries(["r", "g", "b"].map((c) => [c, top[c] * top.a + below[c] * (1 - top.a)]).concat([["a", 1]]));
  const behind = (one) => { const colours = []; for (; one; one = one.parentElement) colours.push(parse(getComputedStyle(one).backgroundColor)); return colours.reverse().reduce((below, top) => over(top, below), { r: 255, g: 255, b: 255, a: 1 }); };
  const light = ({ r, g, b }) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const poor = [];
  const look = (one, style, text) => { const back = behind(one); const found = ratio(over(parse(style.color), back), back); if (found < 4.5 || style.opacity !== "1") poor.push(text.trim().slice(0, 30) + " " + found.toFixed(2)); };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  for (let node = texts.nextNode(); node; node = texts.nextNode()) if (node.data.trim() && node.parentElement.checkVisibility()) { count += 1; look(node.parentElement, getComputedStyle(node.parentElement), node.data); }
  for (const one of document.querySelectorAll("[placeholder]")) look(one, getComputedStyle(one, "::placeholder"), one.placeholder);
  if (count < 20) poor.push("only " + count + " texts");
  return poor;
})()`;

/// Pictures of what a reader should look at: widths and colours, empty, with an answer, with an error, with settings.
async function takePictures(page, server, folder) {
  const shots = async (name) => {
    for (const [width, height] of [[1400, 900], [390, 844]])
      for (const scheme of ["light", "dark"]) {
        await page.resize(width, height);
        await page.paint(scheme);
        await page.run(`new Promise((done) => requestAnimationFrame(() => { const log = ${at("log")}; log.scrollTop = ${JSON.stringify(name)} === "answer" ? 0 : log.scrollHeight; requestAnimationFrame(done); }))`);
        await page.picture(`${folder}/${name}-${width}-${scheme}.png`);
      }
    await page.resize(1400, 900);
    await page.paint("light");
  };
  await page.run(`localStorage.clear()`);
  await click(page, "#new");
  await shots("empty");
  await ask(page, "How do I sort a list of numbers in Rust?");
  const reply = await server.next();
  await shots("waiting");
  reply.begin().thought("The user wants to sort numbers. Stable or not? I should show both.").text(MARKDOWN).end();
  await page.until("an answer", isDone);
  await shots("answer");
  await ask(page, "And if there are more of them than fit into memory?");
  (await server.next()).refuse(400, "the prompt has 1201 tokens and the answer 400 at most: together more than the context of 1024");
  await page.until("an error", `${last(".failure")}.textContent !== ""`);
  await shots("error");
  await page.resize(390, 844);
  await click(page, "#open-settings");
  await page.until("figures", `document.querySelectorAll("#metrics dd").length > 3`);
  for (const scheme of ["light", "dark"]) {
    await page.paint(scheme);
    await page.picture(`${folder}/settings-390-${scheme}.png`);
  }
  await click(page, "#close-settings");
}

/// All of it, in front of the server at an address.
export async function testChat(browser, origin, pictures) {
  const server = await StandIn.start(origin);
  try {
    const page = await browser.open(server.url);
    await browser.call("Browser.grantPermissions", { origin: server.url, permissions: ["clipboardReadWrite", "clipboardSanitizedWrite"] });
    await page.resize(1400, 900);
    for (const [name, test] of Object.entries(TESTS)) {
      try {
        await test(page, server);
        if (page.complaints.length) throw new Error(page.complaints.join("\n"));
      } catch (error) {
        error.message = `${name}: ${error.message}`;
        throw error;
      }
    }
    if (pictures) await takePictures(page, server, pictures);
    await page.close();
  } finally {
    server.close();
  }
}
