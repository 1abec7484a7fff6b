// OpenAI's own SDK for JavaScript, unchanged. The scripted model's answer is chosen by the last character of the prompt.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.NEREID_URL}/v1`, apiKey: "none", maxRetries: 0 });
const ask = (content) => ({ model: "scripted", temperature: 0, messages: [{ role: "user", content }] });
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } },
  },
};

test("models are listed", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["demo", "scripted"]);
});

test("a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(ask("h"));
  assert.equal(whole.choices[0].message.content, "Hello there, 20 °C out.");
  assert.equal(whole.choices[0].finish_reason, "stop");
  const stream = await client.chat.completions.create({
    ...ask("h"), stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "Hello there, 20 °C out.");
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("thinking stands beside the answer", async () => {
  const { message } = (await client.chat.completions.create(ask("t"))).choices[0];
  assert.deepEqual([message.reasoning_content, message.content], ["Let me see.", "The answer."]);
});

test("a call of a tool is put together from its stream", async () => {
  const runner = client.chat.completions.stream({ ...ask("w"), tools: [WEATHER] });
  const { choices } = await runner.finalChatCompletion();
  const [call] = choices[0].message.tool_calls;
  assert.equal(choices[0].finish_reason, "tool_calls");
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris", days: 2 });
});

test("a completion", async () => {
  const made = await client.completions.create({ model: "scripted", prompt: "h", temperature: 0 });
  assert.equal(made.choices[0].text, "Hello there, 20 °C out.");
});

test("a response, whole and streamed, and what follows it", async () => {
  const first = await client.responses.create({ model: "scripted", input: "h", temperature: 0 });
  assert.equal(first.output_text, "Hello there, 20 °C out.");
  const stream = client.responses.stream({ model: "scripted", input: "t", temperature: 0, previous_response_id: first.id });
  const kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  const final = await stream.finalResponse();
  assert.equal(final.output_text, "The answer.");
  for (const kind of ["response.created", "response.output_text.delta", "response.completed"]) assert.ok(kinds.has(kind));
});

test("a refusal is the SDK's own error", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask("h"), max_tokens: 0 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...ask("h"), model: "none" }), OpenAI.NotFoundError);
});

test("an abort ends the stream", async () => {
  const stream = await client.chat.completions.create({ ...ask("x"), model: "demo", max_tokens: 4000, stream: true });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
  assert.ok(chunks < 100);
});
