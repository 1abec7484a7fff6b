// Vercel's AI SDK through its provider for OpenAI's API.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "nereid", baseURL: `${process.env.NEREID_URL}/v1`, includeUsage: true });
const model = provider("scripted");
const settings = { model, temperature: 0, maxRetries: 0 };

test("a text, whole and streamed", async () => {
  const whole = await generateText({ ...settings, prompt: "h" });
  assert.equal(whole.text, "Hello there, 20 °C out.");
  const streamed = streamText({ ...settings, prompt: "h" });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
});

test("thinking is reasoning", async () => {
  const { text, reasoningText } = await generateText({ ...settings, prompt: "t" });
  assert.deepEqual([reasoningText, text], ["Let me see.", "The answer."]);
});

test("a tool is run and its result answered", async () => {
  const asked = [];
  const get_weather = tool({
    inputSchema: z.object({ city: z.string(), days: z.number() }),
    execute: async (input) => {
      asked.push(input);
      return "7h";
    },
  });
  for (const run of [generateText, streamText]) {
    const made = await run({ ...settings, prompt: "w", tools: { get_weather }, stopWhen: stepCountIs(2) });
    const steps = await made.steps;
    assert.equal(steps[0].toolCalls[0].toolName, "get_weather");
    assert.equal(steps.length, 2);
  }
  assert.deepEqual(asked, [{ city: "Paris", days: 2 }, { city: "Paris", days: 2 }]);
});
