// Service worker: opens the editor from the browser's cache while the server does not respond. It does not know
// documents, settings or suggestions, and leaves all requests but those for the editor's own files to the network.
//
// The server writes `TERCET_ASSETS` above this text: a hash of all files together, and of each by its address. A new
// version of any file is therefore a new service worker, which fills a new cache and deletes the old one.

const worker = /** @type {ServiceWorkerGlobalScope} */ (/** @type {unknown} */ (globalThis));
const { version, files } = /** @type {{TERCET_ASSETS: {version: string, files: Record<string, string>}}} */ (
  /** @type {unknown} */ (globalThis)
).TERCET_ASSETS;
const PAGE_URL = worker.registration.scope;
const CACHE_PREFIX = `tercet ${PAGE_URL} `;
const CACHE_NAME = CACHE_PREFIX + version;
/** A server that has not answered after this long counts as gone. */
const MAX_WAIT_MS = 4000;

/** Pages that came from the cache, by client id: their files come from it too, to be of the same version. */
const cachedPages = new Set();

/**
 * Store all files. Those that the browser has are revalidated by their ETag.
 * @throws {Error} If the server serves another version of a file, as in the middle of an upgrade; the browser will
 *   install this service worker again.
 */
async function fillCache() {
  const cache = await caches.open(CACHE_NAME);
  await Promise.all(Object.entries(files).map(async ([address, hash]) => {
    const url = new URL(address, PAGE_URL);
    const response = await fetch(url, { cache: "no-cache" });
    const digest = await crypto.subtle.digest("SHA-256", await response.clone().arrayBuffer());
    const digits = Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (!response.ok || !digits.startsWith(hash)) throw new Error(`${url} is of another version.`);
    await cache.put(url, response);
  }));
}

async function deleteOtherCaches() {
  const names = (await caches.keys()).filter((name) => name.startsWith(CACHE_PREFIX) && name !== CACHE_NAME);
  await Promise.all(names.map((name) => caches.delete(name)));
}

/**
 * The page, from the server if it responds.
 * @param {FetchEvent} event
 * @returns {Promise<Response>}
 */
async function openPage(event) {
  const response = await Promise.race([fetch(event.request).catch(() => null), waitForServer()]);
  if (response && response.status < 500) return response; // 502 to 504: a proxy whose server is gone
  const page = await findInCache(new Request(PAGE_URL));
  if (page) cachedPages.add(event.resultingClientId);
  return page ?? response ?? Response.error();
}

/** @returns {Promise<null>} */
function waitForServer() {
  return new Promise((resolve) => setTimeout(() => resolve(null), MAX_WAIT_MS));
}

/** @param {Request} request  @returns {Promise<Response|undefined>} */
async function findInCache(request) {
  return (await caches.open(CACHE_NAME)).match(request);
}

worker.addEventListener("install", (event) => {
  event.waitUntil(fillCache().then(() => worker.skipWaiting()));
});

worker.addEventListener("activate", (event) => event.waitUntil(deleteOtherCaches()));

worker.addEventListener("fetch", (event) => {
  const { request, clientId } = event;
  const { origin, pathname } = new URL(request.url);
  if (request.mode === "navigate") {
    if (origin + pathname === PAGE_URL) event.respondWith(openPage(event));
  } else if (cachedPages.has(clientId) && request.url.slice(PAGE_URL.length) in files) {
    event.respondWith(findInCache(request).then((response) => response ?? Response.error()));
  }
});
