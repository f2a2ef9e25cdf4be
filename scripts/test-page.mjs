// The chat page in a real browser: asks, reads a streamed answer, stops one, retries, and takes a screenshot. Of a model that reads pictures, drops one.
// usage: node scripts/test-page.mjs URL [SCREENSHOT.png] [--drop PICTURE.png]     needs chromium (or $CHROMIUM) and node
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";

const { values: { drop: dropped }, positionals: [url, picture] } = parseArgs({ options: { drop: { type: "string" } }, allowPositionals: true });
const profile = mkdtempSync(join(tmpdir(), "page-"));
const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", `--user-data-dir=${profile}`, "--window-size=1200,760"];
const browser = spawn(process.env.CHROMIUM ?? "chromium", [...flags, "about:blank"], { stdio: ["ignore", "ignore", "pipe", "pipe", "pipe"] });

try {
  // Messages are JSON, each ended by a zero byte.
  const [, , , to, from] = browser.stdio;
  let complaints = "", rest = "", next = 0;
  const waiting = new Map();
  browser.stderr.on("data", (data) => (complaints += data));
  browser.on("exit", () => waiting.forEach((done) => done({ error: { message: "the browser has ended:\n" + complaints } })));
  from.on("data", (data) => {
    const messages = (rest + data).split("\0");
    rest = messages.pop();
    for (const message of messages.map((text) => JSON.parse(text))) waiting.get(message.id)?.(message);
  });
  const call = async (method, params = {}, sessionId) => {
    const id = ++next;
    const answered = new Promise((done) => waiting.set(id, done));
    to.write(JSON.stringify({ id, method, params, sessionId }) + "\0");
    const answer = await answered;
    waiting.delete(id);
    if (answer.error) throw new Error(`${method}: ${answer.error.message}`);
    return answer.result;
  };
  const { targetId } = await call("Target.createTarget", { url });
  const { sessionId } = await call("Target.attachToTarget", { targetId, flatten: true });
  const run = async (expression) => {
    const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true }, sessionId);
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  };
  const until = async (what, expression) => {
    for (let tries = 0; tries < 600; tries++) {
      if (await run(expression).catch(() => false)) return;
      await new Promise((later) => setTimeout(later, 50));
    }
    throw new Error(`never came: ${what}\n` + (await run("document.body.innerText")));
  };
  const ask = (text) => run(`document.getElementById("input").value = ${JSON.stringify(text)}; document.getElementById("form").requestSubmit()`);
  const notes = `[...document.querySelectorAll(".note")].map((note) => note.textContent).filter(Boolean)`;

  await until("the plan's facts", `document.querySelectorAll("#facts dd").length >= 5`);
  await until("live metrics", `document.querySelector("#metrics dd")?.textContent === "0"`);
  await run(`document.getElementById("most").value = 40; document.getElementById("seed").value = 1`);
  if (await run(`document.getElementById("attach").hidden`) === Boolean(dropped)) throw new Error("pictures can be attached where the model reads them, and only there");
  if (dropped) {
    const file = JSON.stringify(readFileSync(dropped).toString("base64"));
    await run(`{
      const bytes = Uint8Array.from(atob(${file}), (letter) => letter.charCodeAt(0)), files = new DataTransfer();
      files.items.add(new File([bytes], "picture.png", { type: "image/png" }));
      document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: files }));
    }`);
    await until("its thumbnail", `document.querySelector("#media img")?.naturalWidth > 0`);
    await ask("What is it?");
    await until("an answer to a picture", `${notes}.some((note) => /^\\d+ tokens.* of \\d{2,} prompt tokens/.test(note))`);
    const prompt = await run(`Number(${notes}[0].match(/of (\\d+) prompt tokens/)[1])`);
    if (prompt < 40) throw new Error(`a prompt of ${prompt} tokens has no picture in it`);
    if (!(await run(`document.querySelector(".user img")?.naturalWidth > 0 && document.querySelector("#media").children.length === 0`)))
      throw new Error("the picture is not shown in its turn, or would be sent twice");
    await run(`document.getElementById("clear").click()`);
  }
  await ask("Who are you? <b>No markup</b>");
  await until("a whole answer", `${notes}.some((note) => /^\\d+ tokens/.test(note))`);
  if (await run(`document.querySelector(".user b") !== null`)) throw new Error("what was typed became markup");
  const first = await run(`document.querySelectorAll(".assistant")[0].children[1].textContent`);
  await run(`document.getElementById("retry").click()`);
  await until("the second try", `!document.getElementById("stop").disabled || ${notes}.length === 1`);
  await until("its end", `document.getElementById("stop").disabled && ${notes}.length === 1`);
  const second = await run(`document.querySelectorAll(".assistant")[0].children[1].textContent`);
  if (first !== second) throw new Error(`the same seed gave ${JSON.stringify(first)} and ${JSON.stringify(second)}`);
  if (picture) {
    const { data } = await call("Page.captureScreenshot", { format: "png" }, sessionId);
    writeFileSync(picture, Buffer.from(data, "base64"));
  }
  await run(`document.getElementById("most").value = 400`);
  await ask("Now at length");
  await until("a stream", `document.querySelectorAll(".assistant")[1]?.textContent.length > 20`);
  await run(`document.getElementById("stop").click()`);
  await until("its stop", `${notes}.includes("stopped") || ${notes}.length === 2`);
  await until("a free server", `document.querySelector("#metrics dd")?.textContent === "0"`);
  await run(`document.getElementById("clear").click()`);
  if (await run(`document.querySelectorAll(".turn").length`)) throw new Error("a new chat is not empty");
  console.log("the page works");
} finally {
  const gone = new Promise((gone) => browser.on("exit", gone));
  browser.kill();
  await gone;
  try {
    rmSync(profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
  } catch (error) {
    // Processes that the browser started may outlive it and still write there: a folder that is left says nothing of the page.
    console.error(`left behind: ${profile} (${error.code})`);
  }
}
