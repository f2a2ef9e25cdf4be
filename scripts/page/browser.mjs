// Chromium without a window, driven over its own protocol: pages that are run, looked at and waited for.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/// Starts the browser ($CHROMIUM, or `chromium`), hands it to `use`, and ends it.
export async function browse(use) {
  const profile = mkdtempSync(join(tmpdir(), "page-"));
  const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", `--user-data-dir=${profile}`];
  const process_ = spawn(process.env.CHROMIUM ?? "chromium", [...flags, "about:blank"], { stdio: ["ignore", "ignore", "pipe", "pipe", "pipe"] });
  try {
    await use(new Browser(process_));
  } finally {
    const gone = new Promise((done) => process_.on("exit", done));
    process_.kill();
    await gone;
    try {
      rmSync(profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
    } catch (error) {
      // Processes that the browser started may outlive it and still write there: a folder that is left says nothing of the page.
      console.error(`left behind: ${profile} (${error.code})`);
    }
  }
}

class Browser {
  constructor(process_) {
    const [, , , to, from] = process_.stdio;
    let complaints = "", rest = "";
    Object.assign(this, { to, next: 0, waiting: new Map(), listeners: new Map() });
    process_.stderr.on("data", (data) => (complaints += data));
    process_.on("exit", () => this.waiting.forEach((done) => done({ error: { message: "the browser has ended:\n" + complaints } })));
    // Messages are JSON, each ended by a zero byte.
    from.setEncoding("utf8").on("data", (data) => {
      const messages = (rest + data).split("\0");
      rest = messages.pop();
      for (const message of messages.map((text) => JSON.parse(text)))
        if (message.id) this.waiting.get(message.id)?.(message);
        else this.listeners.get(message.sessionId)?.(message);
    });
  }

  async call(method, params = {}, sessionId) {
    const id = ++this.next;
    const answered = new Promise((done) => this.waiting.set(id, done));
    this.to.write(JSON.stringify({ id, method, params, sessionId }) + "\0");
    const answer = await answered;
    this.waiting.delete(id);
    if (answer.error) throw new Error(`${method}: ${answer.error.message}`);
    return answer.result;
  }

  async open(url) {
    const { targetId } = await this.call("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.call("Target.attachToTarget", { targetId, flatten: true });
    const page = new Page(this, targetId, sessionId);
    this.listeners.set(sessionId, (message) => page.hear(message));
    for (const domain of ["Page", "Runtime", "Log"]) await page.call(domain + ".enable");
    await page.call("Page.navigate", { url });
    await page.until("the page", `document.readyState === "complete"`);
    return page;
  }
}

class Page {
  constructor(browser, targetId, sessionId) {
    Object.assign(this, { browser, targetId, sessionId, complaints: [] });
  }

  call(method, params) {
    return this.browser.call(method, params, this.sessionId);
  }

  /// Uncaught errors, and what the page's policy has forbidden. Responses that are errors are none of these.
  hear({ method, params }) {
    if (method === "Runtime.exceptionThrown") this.complaints.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
    if (method === "Log.entryAdded" && params.entry.level === "error" && params.entry.source !== "network") this.complaints.push(params.entry.text);
  }

  /// What an expression is, or resolves to.
  async run(expression) {
    const { result, exceptionDetails } = await this.call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true, userGesture: true });
    if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description ?? exceptionDetails.text}`);
    return result.value;
  }

  async until(what, expression) {
    for (let tries = 0; tries < 1200; tries++) {
      if (await this.run(expression).catch(() => false)) return;
      await new Promise((later) => setTimeout(later, 25));
    }
    throw new Error(`never came: ${what}\n` + (await this.run("document.body.innerText")));
  }

  async check(what, expression) {
    if (!(await this.run(expression))) throw new Error(`${what}\n  ${expression}\n` + (await this.run("document.body.innerText")).slice(0, 2000));
  }

  async reload() {
    await this.run("window.isOld = true");
    await this.call("Page.reload");
    await this.until("the page again", `!window.isOld && document.readyState === "complete"`);
  }

  /// A window's width and height; a touch screen below 768 pixels.
  async resize(width, height) {
    const mobile = width < 768;
    await this.call("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile });
    await this.call("Emulation.setTouchEmulationEnabled", { enabled: mobile });
  }

  paint(scheme) {
    return this.call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
  }

  async press(key, code = key) {
    const keys = { Enter: { windowsVirtualKeyCode: 13, text: "\r" }, Escape: { windowsVirtualKeyCode: 27 } };
    for (const type of ["keyDown", "keyUp"]) await this.call("Input.dispatchKeyEvent", { type, key, code, ...keys[key] });
  }

  type(text) {
    return this.call("Input.insertText", { text });
  }

  async picture(file, isWhole = false) {
    const { data } = await this.call("Page.captureScreenshot", { format: "png", captureBeyondViewport: isWhole });
    writeFileSync(file, Buffer.from(data, "base64"));
  }

  close() {
    return this.browser.call("Target.closeTarget", { targetId: this.targetId });
  }
}
