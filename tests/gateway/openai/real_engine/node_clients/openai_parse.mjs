// Typed answers and streamed tool calls of `openai`; every message of the gateway is sent back.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { baseURL, recordingFetch, report } from "./gateway.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, fetch: recordingFetch });
const Fact = z.object({ word: z.enum(["mast", "hull"]), masts: z.literal([1, 2, 3]) });
const LookUp = z.object({ word: z.enum(["mast", "hull"]) });
const limits = { model: "demo", temperature: 0 };
const user = { role: "user", content: "Name a fact." };

const history = [user];
const parsed = [];
for (let turn = 0; turn < 2; turn++) {
  const response_format = zodResponseFormat(Fact, "fact");
  const answer = await client.chat.completions.parse({
    ...limits, max_tokens: 400, messages: history, response_format, service_tier: "flex", verbosity: "low",
  });
  parsed.push(answer.choices[0].message.parsed);
  history.push(answer.choices[0].message, user);
}

const stream = client.chat.completions.stream({
  ...limits,
  max_tokens: 400,
  messages: history,
  tools: [zodFunction({ name: "look_up", parameters: LookUp })],
  tool_choice: { type: "function", function: { name: "look_up" } },
});
const message = (await stream.finalChatCompletion()).choices[0].message;
const calls = message.tool_calls.map((call) => call.function.parsed_arguments);
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "A pole." };
const streamed = client.chat.completions.stream({ ...limits, max_tokens: 8, messages: [...history, message, result] });
const text = await streamed.finalContent();

const items = [user];
const responses = [];
for (let turn = 0; turn < 2; turn++) {
  const answer = await client.responses.parse({
    ...limits, max_output_tokens: 400, input: items, text: { format: zodTextFormat(Fact, "fact") },
  });
  responses.push(answer.output_parsed);
  items.push(...answer.output, user);
}
report({ parsed, calls, text, responses });
