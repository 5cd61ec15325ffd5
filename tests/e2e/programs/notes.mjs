// The task of the programs in JavaScript, as `notes.py` has it for those in Python.
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

export const url = process.env.TIEREDKV_URL; // with /v1
export const root = url.replace(/\/v1$/, "");
export const system = "You keep notes of cities, and you read and write them with your tools only. ".repeat(12);
export const task = (script) =>
  `Read the note \`todo\` and do what it says. Please follow script ${script}. Without tools, follow script city.`;
export const City = z.object({ name: z.string(), population: z.number().int() });
export const tools = [
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

// Prints the outcome, which the test reads.
export function tell(city) {
  console.log(JSON.stringify(City.parse(typeof city === "string" ? JSON.parse(city) : city)));
}
