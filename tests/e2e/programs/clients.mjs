// The task with OpenAI's and Anthropic's packages: `clients.mjs openai-run|openai-parse|anthropic-run`.
import { readFileSync, writeFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.env.TIEREDKV_URL;
const system = "You keep notes of cities, and you read and write them with your tools only. ".repeat(12);
const kind = process.argv[2];
const script = kind === "openai-parse" ? "notes-bare" : "notes";
const task = `Read the note \`todo\` and do what it says. Please follow script ${script}.`;
const City = z.object({ name: z.string(), population: z.number().int() });
const tools = [
  {
    name: "read_note",
    description: "Read a note.",
    schema: z.object({ title: z.string() }),
    run: ({ title }) => readFileSync(`${title}.txt`, "utf8"),
  },
  {
    name: "write_note",
    description: "Write a note.",
    schema: z.object({ title: z.string(), text: z.string() }),
    run: ({ title, text }) => (writeFileSync(`${title}.txt`, text), "It is written."),
  },
];

async function withOpenAI(isTyped) {
  const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
  const runner = client.chat.completions.runTools({
    model: "scripted",
    messages: [{ role: "system", content: system }, { role: "user", content: task }],
    tools: tools.map(({ name, description, schema, run }) => ({
      type: "function",
      function: { name, description, parameters: z.toJSONSchema(schema), parse: JSON.parse, function: run },
    })),
    ...(isTyped ? { response_format: zodResponseFormat(City, "city") } : {}),
  });
  return await runner.finalContent();
}

async function withAnthropic() {
  const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "any", maxRetries: 0 });
  const message = await client.beta.messages.toolRunner({
    model: "scripted",
    max_tokens: 500,
    system: [{ type: "text", text: system, cache_control: { type: "ephemeral" } }],
    cache_control: { type: "ephemeral" },
    messages: [{ role: "user", content: task }],
    tools: tools.map(({ name, description, schema, run }) =>
      betaZodTool({ name, description, inputSchema: schema, run }),
    ),
  });
  return message.content.at(-1).text;
}

const answer = await (kind === "anthropic-run" ? withAnthropic() : withOpenAI(kind === "openai-parse"));
console.log(JSON.stringify(City.parse(JSON.parse(answer))));
