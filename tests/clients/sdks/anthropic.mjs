// Anthropic's own SDK for JavaScript, unchanged.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.NEREID_URL, apiKey: "none", maxRetries: 0 });
const ask = (content) => ({
  model: "scripted", max_tokens: 100, temperature: 0, messages: [{ role: "user", content }],
});
const WEATHER = {
  name: "get_weather",
  input_schema: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } },
};

test("a message, whole and streamed", async () => {
  const whole = await client.messages.create(ask("h"));
  assert.deepEqual(whole.content.map((block) => block.text), ["Hello there, 20 °C out."]);
  assert.equal(whole.stop_reason, "end_turn");
  const streamed = await client.messages.stream(ask("h")).finalMessage();
  assert.deepEqual([streamed.content, streamed.usage], [whole.content, { ...whole.usage, ...streamed.usage }]);
});

test("thinking is a block of its own", async () => {
  const message = await client.messages.create(ask("t"));
  assert.deepEqual(message.content.map((block) => block.type), ["thinking", "text"]);
});

test("a tool's call and its result", async () => {
  const said = await client.messages.stream({ ...ask("w"), tools: [WEATHER] }).finalMessage();
  const call = said.content.find((block) => block.type === "tool_use");
  assert.deepEqual([said.stop_reason, call.name, call.input], ["tool_use", "get_weather", { city: "Paris", days: 2 }]);
  const messages = [
    ...ask("w").messages,
    { role: "assistant", content: said.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "7h" }] },
  ];
  const then = await client.messages.create({ ...ask("w"), messages, tools: [WEATHER] });
  assert.equal(then.content[0].text, "Hello there, 20 °C out.");
});

test("tokens are counted", async () => {
  const { model, messages } = ask("h");
  assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 0);
});

test("a refusal is the SDK's own error", async () => {
  await assert.rejects(client.messages.create({ ...ask("h"), model: "none" }), Anthropic.NotFoundError);
});
