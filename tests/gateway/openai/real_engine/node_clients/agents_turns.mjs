// Two turns of `@openai/agents` with a tool; the second argument is `chat_completions` or `responses`.
import { Agent, run, setDefaultOpenAIClient, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { baseURL, recordingFetch, report } from "./gateway.mjs";

setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, fetch: recordingFetch }));
setOpenAIAPI(process.argv[3]);

const lookUp = tool({
  name: "look_up",
  description: "Look a word up.",
  parameters: z.object({ word: z.enum(["mast", "hull"]) }),
  execute: async ({ word }) => `A ${word} is part of a ship.`,
});
const settings = { maxTokens: 400, temperature: 0 };
const first = new Agent({
  name: "first",
  model: "demo",
  tools: [lookUp],
  modelSettings: { ...settings, toolChoice: "look_up", store: true, text: { verbosity: "low" } },
});
const Fact = z.object({ word: z.enum(["mast", "hull"]), masts: z.enum(["one", "two"]) });
const typed = new Agent({ name: "second", model: "demo", outputType: Fact, modelSettings: settings });

const asked = await run(first, "What is a mast?", { maxTurns: 3 });
const outputs = asked.newItems.filter((item) => item.type === "tool_call_output_item").map((item) => item.output);
const answers = [];
let history = asked.history;
for (const question of ["Go on.", "And now?"]) {
  const answer = await run(typed, [...history, { role: "user", content: question }]);
  answers.push(answer.finalOutput);
  history = answer.history;
}
report({ outputs, answers });
