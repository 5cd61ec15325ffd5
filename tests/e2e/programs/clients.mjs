// The task with OpenAI's and Anthropic's packages: `clients.mjs openai-run|openai-parse|anthropic-run`.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { City, root, system, task, tell, tools, url } from "./notes.mjs";

const kind = process.argv[2];
const content = task(kind === "openai-parse" ? "notes-bare" : "notes");

async function withOpenAI(isTyped) {
  const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
  const runner = client.chat.completions.runTools({
    model: "scripted",
    messages: [{ role: "system", content: system }, { role: "user", content }],
    tools: tools.map(({ name, description, schema, run }) => ({
      type: "function",
      function: { name, description, parameters: z.toJSONSchema(schema), parse: JSON.parse, function: run },
    })),
    ...(isTyped ? { response_format: zodResponseFormat(City, "city") } : {}),
  });
  return await runner.finalContent();
}

async function withAnthropic() {
  const client = new Anthropic({ baseURL: root, apiKey: "any", maxRetries: 0 });
  const message = await client.beta.messages.toolRunner({
    model: "scripted",
    max_tokens: 500,
    system: [{ type: "text", text: system, cache_control: { type: "ephemeral" } }],
    cache_control: { type: "ephemeral" },
    messages: [{ role: "user", content }],
    tools: tools.map(({ name, description, schema, run }) =>
      betaZodTool({ name, description, inputSchema: schema, run }),
    ),
  });
  return message.content.at(-1).text;
}

tell(await (kind === "anthropic-run" ? withAnthropic() : withOpenAI(kind === "openai-parse")));
