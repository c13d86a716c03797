// Two turns of the Vercel AI SDK with a tool; the second argument is the option `store` in JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { baseURL, recordingFetch, report } from "./gateway.mjs";

const model = createOpenAI({ baseURL, apiKey: "none", fetch: recordingFetch })("demo");
const openai = { textVerbosity: "low", ...JSON.parse(process.argv[3]) };
const options = { model, temperature: 0, maxOutputTokens: 400, maxRetries: 0, providerOptions: { openai } };
const look_up = tool({
  description: "Look a word up.",
  inputSchema: z.object({ word: z.enum(["mast", "hull"]) }),
  execute: async ({ word }) => `A ${word} is part of a ship.`,
});

const messages = [{ role: "user", content: "What is a mast?" }];
const texts = [];
const asked = await generateText({
  ...options, messages, tools: { look_up }, toolChoice: { type: "tool", toolName: "look_up" }, stopWhen: stepCountIs(1),
});
messages.push(...asked.response.messages);
let error = null;
try {
  for (const question of ["Go on.", "And now?"]) {
    messages.push({ role: "user", content: question });
    const failed = [];
    const answer = streamText({
      ...options, messages, maxOutputTokens: 8, onError: (event) => failed.push(event.error),
    });
    await answer.consumeStream();
    if (failed.length) throw failed[0];
    texts.push(await answer.text);
    messages.push(...(await answer.response).messages);
  }
} catch (failure) {
  error = failure.message;
}
report({ outputs: asked.toolResults.map((result) => result.output), texts, error });
