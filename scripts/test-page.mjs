// The chat page and a plan's page in a real browser.
// usage: node scripts/test-page.mjs URL [--drop PICTURE.png] [--plan PLAN.html] [--pictures FOLDER]     needs chromium (or $CHROMIUM) and node
//
// With a real server at URL: asks, reads a streamed answer, retries it, stops one. Of a model that reads pictures, drops one.
// In front of that server, with answers that the test writes: everything else (page/chat.mjs). A plan's page is looked at on a phone.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { browse } from "./page/browser.mjs";
import { ask, testChat } from "./page/chat.mjs";

const options = { drop: { type: "string" }, plan: { type: "string" }, pictures: { type: "string" } };
const { values: { drop, plan, pictures }, positionals: [url] } = parseArgs({ options, allowPositionals: true });
const notes = `[...document.querySelectorAll(".note")].map((note) => note.textContent).filter(Boolean)`;
const isDone = `document.getElementById("stop").hidden`;
const answerOf = (index) => `document.querySelectorAll(".content")[${index}].textContent`;

/// A setting, as its user would change it.
const set = (page, id, value) => page.run(`document.getElementById("${id}").value = ${value}; document.getElementById("${id}").dispatchEvent(new Event("input", { bubbles: true }))`);

/// A picture is dropped, shown, sent once, and part of the prompt.
async function dropPicture(page, file) {
  await page.run(`{
    const bytes = Uint8Array.from(atob("${readFileSync(file).toString("base64")}"), (letter) => letter.charCodeAt(0)), files = new DataTransfer();
    files.items.add(new File([bytes], "picture.png", { type: "image/png" }));
    files.items.add(new File(["text"], "notes.txt", { type: "text/plain" }));
    document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: files }));
  }`);
  await page.until("its thumbnail", `document.querySelector("#media img")?.naturalWidth > 0`);
  await page.check("a file that cannot be read is dropped in silence", `document.getElementById("media").textContent.includes("notes.txt")`);
  await ask(page, "What is it?");
  await page.until("an answer to a picture", `${notes}.some((note) => /^\\d+ tokens.* of \\d{2,} prompt tokens/.test(note))`);
  const prompt = await page.run(`Number(${notes}[0].match(/of (\\d+) prompt tokens/)[1])`);
  if (prompt < 40) throw new Error(`a prompt of ${prompt} tokens has no picture in it`);
  const isShown = `document.querySelector(".question img")?.naturalWidth > 0 && document.querySelector("#media").children.length === 0`;
  await page.check("the picture is not shown in its turn, or would be sent twice", isShown);
  await page.reload();
  await page.until("the picture after a reload", `document.querySelector(".question img")?.naturalWidth > 0`);
  await page.run(`document.getElementById("new").click()`);
}

async function testServer(browser) {
  const page = await browser.open(url);
  await page.resize(1400, 900);
  await page.until("the plan's facts", `document.querySelectorAll("#facts dd").length >= 5`);
  await page.until("live metrics", `document.querySelector("#metrics dd")?.textContent === "0"`);
  await set(page, "most", "40");
  await set(page, "seed", "1");
  await page.check("pictures can be attached where the model reads them, and only there", `document.getElementById("attach").hidden === ${!drop}`);
  if (drop) await dropPicture(page, drop);
  await ask(page, "Who are you?");
  await page.until("a whole answer", `${isDone} && ${notes}.some((note) => /^\\d+ tokens/.test(note))`);
  const first = await page.run(answerOf(0));
  await page.run(`[...document.querySelectorAll(".actions button")].find((one) => one.textContent === "Retry").click()`);
  await page.until("the second try", `${isDone} && ${notes}.some((note) => /^\\d+ tokens/.test(note))`);
  const second = await page.run(answerOf(0));
  if (first !== second) throw new Error(`the same seed gave ${JSON.stringify(first)} and ${JSON.stringify(second)}`);
  if (pictures) await page.picture(`${pictures}/server.png`);
  // Whatever it has written by then, the next request knows nothing of it, and the server is free again.
  await set(page, "most", "400");
  await ask(page, "Now at length");
  await page.until("a stream", `${answerOf(1)}.length > 20`);
  await page.run(`document.getElementById("new").click()`);
  await page.until("a free server", `document.querySelector("#metrics dd")?.textContent === "0"`);
  await page.check("a new chat is not empty", `document.querySelectorAll(".exchange").length === 0`);
  if (page.complaints.length) throw new Error(page.complaints.join("\n"));
  await page.close();
}

/// No part of a plan's page is wider than a phone; what is wide scrolls within its own box. Whatever is folded is opened.
async function testPlan(browser) {
  const page = await browser.open(pathToFileURL(resolve(plan)).href);
  // A phone's browser makes its window wider where something does not fit: the width is that of the glass.
  const wideAt = (width) => `[...document.querySelectorAll("nav, main *")].filter((one) => one.checkVisibility() && !one.closest("svg, .scroll, pre, .strip, .columns, .bar") && one.getBoundingClientRect().right > ${width} + 1).map((one) => one.outerHTML.slice(0, 80))`;
  for (const [width, height] of [[390, 844], [320, 640], [1400, 900]]) {
    await page.resize(width, height);
    for (const scheme of pictures ? ["light", "dark"] : []) {
      await page.paint(scheme);
      await page.picture(`${pictures}/plan-${width}-${scheme}.png`, true);
    }
    await page.run(`document.querySelectorAll("details").forEach((one) => (one.open = true))`);
    for (const tab of await page.run(`[...document.querySelectorAll(".tabs > input")].map((one) => one.id)`)) {
      await page.run(`document.getElementById("${tab}").click()`);
      const found = await page.run(wideAt(width));
      if (found.length || (await page.run("document.scrollingElement.scrollWidth")) > width) throw new Error(`wider than ${width} pixels: ${found.join("\n")}`);
    }
    await page.check("a column of names is squeezed", `[...document.querySelectorAll("td.which")].every((one) => !one.checkVisibility() || one.offsetWidth >= 120)`);
    for (const link of await page.run(`[...document.querySelectorAll("nav a")].map((one) => one.hash)`)) {
      await page.run(`document.documentElement.style.scrollBehavior = "auto"; location.hash = "${link}"`);
      await page.check(`the bar hides the heading at ${link}`, `document.querySelector("${link} :is(h1, h2)").getBoundingClientRect().top >= document.querySelector("nav").getBoundingClientRect().bottom`);
    }
    await page.check("a drawing does not scroll within its own box", `[...document.querySelectorAll("svg, table")].every((one) => one.closest(".scroll"))`);
    await page.run(`document.querySelectorAll("details").forEach((one) => (one.open = false))`);
  }
  await page.close();
}

await browse(async (browser) => {
  if (url) {
    await testServer(browser);
    // What a model reads changes none of it.
    if (!drop) await testChat(browser, url, pictures);
  }
  if (plan) await testPlan(browser);
});
console.log("the page works");
