// Clients of OpenAI's API in JavaScript against a server with a random model, called `tiny`.
// usage: node clients.mjs URL        run where `openai`, `ai`, `@ai-sdk/openai-compatible` and `zod` are installed
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.argv[2] + "/v1";
const messages = [{ role: "user", content: "Hi" }];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 6 }, days: { type: "integer" } }, required: ["city", "days"] };

const client = new OpenAI({ baseURL, apiKey: "x", maxRetries: 0 });
const create = (more) => client.chat.completions.create({ model: "tiny", messages, max_tokens: 300, seed: 1, ...more });
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const whole = await create({ tools, tool_choice: "required", parallel_tool_calls: false });
const call = whole.choices[0].message.tool_calls[0].function;
assert.deepEqual(Object.keys(JSON.parse(call.arguments)).sort(), ["city", "days"]);
const stream = client.chat.completions.stream({ model: "tiny", messages, max_tokens: 300, seed: 1, tools, tool_choice: "required", parallel_tool_calls: false });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.arguments);
assert.equal(final.choices[0].finish_reason, "tool_calls");
const text = await create({ max_tokens: 8 });
let streamed = "";
for await (const chunk of await create({ max_tokens: 8, stream: true })) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, text.choices[0].message.content);
await assert.rejects(create({ temperature: 9 }), (error) => error.status === 400 && error.code === "invalid_value");
const response = await client.responses.create({ model: "tiny", input: "Hi", max_output_tokens: 5 });
assert.ok(["completed", "incomplete"].includes(response.status));
console.log("openai (npm): ok");

const model = createOpenAICompatible({ name: "gemma4c", baseURL, apiKey: "x", supportsStructuredOutputs: true })("tiny");
const made = await generateObject({ model, schema: z.object({ ok: z.boolean(), kind: z.enum(["a", "b"]) }), prompt: "Hi", maxOutputTokens: 200, maxRetries: 0 });
assert.equal(typeof made.object.ok, "boolean");
const weather = tool({ inputSchema: z.object({ city: z.string().max(6), days: z.number().int() }) });
const called = await generateText({ model, tools: { weather }, toolChoice: "required", prompt: "Hi", maxOutputTokens: 300, seed: 1, maxRetries: 0 });
assert.equal(called.toolCalls[0].toolName, "weather");
const flow = streamText({ model, prompt: "Hi", maxOutputTokens: 8, seed: 1, maxRetries: 0 });
let flowed = "";
for await (const piece of flow.textStream) flowed += piece;
assert.equal(flowed, (await generateText({ model, prompt: "Hi", maxOutputTokens: 8, seed: 1, maxRetries: 0 })).text);
console.log("@ai-sdk/openai-compatible: ok");
