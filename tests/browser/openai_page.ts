// OpenAI's SDK, unmodified, on a page of another origin than the server's. The tests call these functions.

import OpenAI, { APIError } from "openai";

const url = new URLSearchParams(location.search).get("server") ?? "";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
const request = { prompt: "The old man looked at the sea and", max_tokens: 8, temperature: 0 };

async function complete(): Promise<string> {
  const completion = await client.completions.create({ ...request, model: "embedded" });
  return completion.choices[0].text;
}

async function stream(): Promise<string[]> {
  const texts: string[] = [];
  for await (const chunk of await client.completions.create({ ...request, model: "embedded", stream: true })) {
    texts.push(chunk.choices[0].text);
  }
  return texts;
}

async function list(): Promise<string[]> {
  return (await client.models.list()).data.map((model) => model.id);
}

async function fail(): Promise<object> {
  try {
    await client.completions.create({ ...request, model: "no-such-model" });
    return {};
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
    return { status: error.status, param: error.param, hasRequestId: Boolean(error.headers?.get("x-request-id")) };
  }
}

Object.assign(window, { complete, fail, list, stream });
