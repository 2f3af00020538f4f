// The documentation page: shows the server's OpenAPI document in Swagger UI, which also sends requests. It gives the
// viewer the address of the server and the API key that the editor has.

import { load } from "./store.js";

const { SwaggerUIBundle } = /** @type {any} */ (globalThis);

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`The server answered ${response.status}.`);
  const spec = await response.json();
  // The page's own address, which may be below a path of a proxy: its policy allows requests to no other origin.
  spec.servers = [{ url: new URL(".", location.href).href }];
  const key = load("key", "sessionStorage") ?? load("key");
  const viewer = SwaggerUIBundle({
    spec,
    dom_id: "#viewer",
    deepLinking: true,
    displayRequestDuration: true,
    filter: true,
    tryItOutEnabled: true,
    validatorUrl: null, // the default is a service on the web
    onComplete() {
      if (spec.security && key) viewer.preauthorizeApiKey("bearer", key);
    },
  });
}

document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches);
show().catch((error) => {
  document.querySelector("#viewer")?.append(`The OpenAPI document could not be loaded. ${error.message}`);
});
