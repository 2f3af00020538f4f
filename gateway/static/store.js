// What this browser keeps: the text, the settings, the tally of keys saved. The server is told none of it.
// Where a browser refuses to keep anything (private windows, a full disk), everything goes on without.

const PREFIX = "tercet.";

/** @param {string} name @returns {any} */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name) ?? "null");
  } catch {
    return null;
  }
}

/** @param {string} name @param {unknown} value  Whether it is kept now. */
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** @param {string} name */
export function forget(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // there was nothing kept
  }
}

/**
 * Another window of this page has kept something else.
 * @param {string} name
 * @param {(value: any) => void} tell
 */
export function onForeignSave(name, tell) {
  addEventListener("storage", (event) => {
    if (event.key === PREFIX + name) tell(event.newValue === null ? null : JSON.parse(event.newValue));
  });
}
