// The task with Vercel's AI SDK: `ai_sdk.mjs chat|responses|messages run|stream|typed`.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { City, system, task, tell, tools, url } from "./notes.mjs";

const [api, kind] = process.argv.slice(2);
const how = { name: "tieredkv", baseURL: url, apiKey: "any" };
const models = {
  chat: () => createOpenAICompatible({ ...how, includeUsage: true, supportsStructuredOutputs: true })("scripted"),
  responses: () => createOpenAI(how)("scripted"),
  messages: () => createAnthropic(how)("scripted"),
};
// On the messages API it asks models that it does not know for a call of a tool `json`.
const typed = api === "messages" ? "notes-json" : "notes-bare";
const asked = {
  model: models[api](),
  maxOutputTokens: 500,
  maxRetries: 0,
  system,
  prompt: task(kind === "typed" ? typed : "notes"),
  tools: Object.fromEntries(
    tools.map(({ name, description, schema, run }) => [name, tool({ description, inputSchema: schema, execute: run })]),
  ),
  stopWhen: stepCountIs(5),
  ...(kind === "typed" ? { output: Output.object({ schema: City }) } : {}),
};
const answer = await (kind === "stream" ? streamText(asked) : generateText(asked));
tell(await (kind === "typed" ? answer.output : answer.text));
