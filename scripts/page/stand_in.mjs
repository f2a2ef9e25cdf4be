// A server whose answers a test writes piece by piece. Everything but answers comes from a real server behind it: the page, its headers, its facts.
import { createServer } from "node:http";
import { once } from "node:events";

/// What does not come in a minute never comes.
function within(promise, what) {
  let clock;
  const late = new Promise((_, failed) => (clock = setTimeout(() => failed(new Error(`never came: ${what}`)), 60_000)));
  return Promise.race([promise, late]).finally(() => clearTimeout(clock));
}

export class StandIn {
  /// In front of the server at an address.
  static async start(origin) {
    const stand = new StandIn();
    Object.assign(stand, { origin, replies: [], readers: [] });
    stand.server = createServer((request, response) => stand.handle(request, response).catch((error) => response.destroy(error)));
    stand.server.listen(0, "127.0.0.1");
    await once(stand.server, "listening");
    stand.url = `http://127.0.0.1:${stand.server.address().port}`;
    return stand;
  }

  async handle(request, response) {
    if (request.method === "GET") {
      const real = await fetch(this.origin + request.url);
      // The body has been decoded, and is as long as it is.
      const headers = [...real.headers].filter(([name]) => !["content-length", "content-encoding", "transfer-encoding", "connection"].includes(name));
      response.writeHead(real.status, Object.fromEntries(headers)).end(Buffer.from(await real.arrayBuffer()));
      return;
    }
    let body = "";
    for await (const part of request.setEncoding("utf8")) body += part;
    const reply = new Reply(response, JSON.parse(body));
    const reader = this.readers.shift();
    if (reader) reader(reply);
    else this.replies.push(reply);
  }

  /// The next question: its request, and the reply to write to.
  next() {
    if (this.replies.length) return Promise.resolve(this.replies.shift());
    return within(new Promise((reader) => this.readers.push(reader)), "a request");
  }

  close() {
    this.server.closeAllConnections();
    this.server.close();
  }
}

class Reply {
  constructor(response, request) {
    Object.assign(this, { response, request, ended: once(response, "close") });
    // Whoever cuts a stream may still write to it.
    response.on("error", () => {});
  }

  /// The client has left, or has read all of it.
  closed() {
    return within(this.ended, "the end of a request");
  }

  event(value) {
    this.response.write(`data: ${typeof value === "string" ? value : JSON.stringify(value)}\n\n`);
    return this;
  }

  delta(delta, finish_reason = null) {
    return this.event({ id: "chatcmpl-1", object: "chat.completion.chunk", choices: [{ index: 0, delta, logprobs: null, finish_reason }], usage: null });
  }

  begin() {
    this.response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-cache" });
    this.response.write(": ping\n\n");
    return this.delta({ role: "assistant", content: "" });
  }

  text(content) {
    return this.delta({ content });
  }

  thought(reasoning_content) {
    return this.delta({ reasoning_content, reasoning: reasoning_content });
  }

  end() {
    this.delta({}, "stop").event({ choices: [], usage: { prompt_tokens: 12, completion_tokens: 34, total_tokens: 46, prompt_tokens_details: { cached_tokens: 5 } } });
    this.event("[DONE]").response.end();
  }

  refuse(status, message) {
    this.response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify({ error: { message, type: "server_error", param: null, code: null } }));
  }

  cut() {
    this.response.destroy();
  }
}
