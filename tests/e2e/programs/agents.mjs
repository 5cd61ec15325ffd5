// The task with agents of LangChain and OpenAI: `agents.mjs langchain|openai chat|responses|messages run|typed`.
import { City, root, system, task, tell, tools, url } from "./notes.mjs";

const [program, api, kind] = process.argv.slice(2);
const isTyped = kind === "typed";
const asked = task(isTyped ? "notes-bare" : "notes");

async function withLangChain() {
  const { createAgent, providerStrategy, tool } = await import("langchain");
  const { ChatAnthropic } = await import("@langchain/anthropic");
  const { ChatOpenAI } = await import("@langchain/openai");
  const how = { model: "scripted", apiKey: "any", maxRetries: 0 };
  const model =
    api === "messages"
      ? new ChatAnthropic({ ...how, anthropicApiUrl: root, maxTokens: 500 })
      : new ChatOpenAI({ ...how, configuration: { baseURL: url }, useResponsesApi: api === "responses" });
  const agent = createAgent({
    model,
    systemPrompt: system,
    tools: tools.map(({ run, ...it }) => tool(run, it)),
    ...(isTyped ? { responseFormat: providerStrategy(City) } : {}),
  });
  const state = await agent.invoke({ messages: [{ role: "user", content: asked }] });
  return isTyped ? state.structuredResponse : state.messages.at(-1).text;
}

async function withOpenAIAgents() {
  const agents = await import("@openai/agents");
  const { default: OpenAI } = await import("openai");
  agents.setTracingDisabled(true);
  agents.setDefaultOpenAIClient(new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 }));
  agents.setOpenAIAPI(api === "chat" ? "chat_completions" : "responses");
  const agent = new agents.Agent({
    name: "Clerk",
    model: "scripted",
    instructions: system,
    tools: tools.map(({ schema, run, ...it }) => agents.tool({ ...it, parameters: schema, execute: run })),
    ...(isTyped ? { outputType: City } : {}),
  });
  return (await agents.run(agent, asked)).finalOutput;
}

tell(await (program === "langchain" ? withLangChain() : withOpenAIAgents()));
