// The Node SDK: tools, whole and streamed, parse, and the loop that runs them. node tools.cjs URL [KEY], with `openai` in NODE_PATH.
const assert = require("node:assert");
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: process.argv[3] || "any", maxRetries: 0 });
const parameters = {
  type: "object", properties: { city: { enum: ["Kyoto", "Oslo"] } }, required: ["city"], additionalProperties: false,
};
const messages = [{ role: "user", content: "Kyoto?" }];
const body = { model: "m", messages, max_tokens: 60, seed: 7 };
const plain = { type: "function", function: { name: "get_weather", parameters } };
const right = (text) => assert.ok(["Kyoto", "Oslo"].includes(JSON.parse(text).city), text);

async function main() {
  const answer = await client.chat.completions.create({ ...body, tools: [plain], tool_choice: "required" });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  right(answer.choices[0].message.tool_calls[0].function.arguments);

  const strict = { type: "function", function: { ...plain.function, strict: true } };
  const parsed = await client.chat.completions.parse({ ...body, tools: [strict], tool_choice: "required" });
  right(JSON.stringify(parsed.choices[0].message.tool_calls[0].function.parsed_arguments));

  const stream = client.chat.completions.stream({ ...body, tools: [plain], tool_choice: "required" });
  const pieces = [];
  stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  right((await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);
  assert.ok(pieces.length > 1);

  for (const streamed of [false, true]) {
    const asked = [];
    const tool = {
      type: "function",
      function: { ...plain.function, parse: JSON.parse, function: (found) => (asked.push(found.city), "12 C") },
    };
    const tool_choice = { type: "function", function: { name: "get_weather" } }; // one call, and its result ends the run
    const runner = client.chat.completions.runTools({ ...body, tools: [tool], tool_choice, stream: streamed });
    await runner.done();
    assert.equal(asked.length, 1);
    assert.equal(runner.messages.at(-1).role, "tool");
  }

  const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
  const request = { model: "m", input: "Kyoto?", tools, tool_choice: "required", store: false };
  const response = await client.responses.parse(request);
  right(JSON.stringify(response.output[0].parsed_arguments));
  const events = client.responses.stream(request);
  right((await events.finalResponse()).output[0].arguments);
  console.log("right");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
