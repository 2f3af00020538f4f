// Small values kept in the browser: settings, positions in documents, the number of saved keystrokes and the API key. None
// of them is sent to the server from here. The page works without storage, since private windows and full disks refuse it.

/** @typedef {"localStorage"|"sessionStorage"} Place  Until it is removed, or until the tab is closed. */

const PREFIX = "tercet.";

/**
 * Read a stored value.
 * @param {string} name
 * @param {Place} [place]
 * @returns {any}  Null if nothing is stored, or it cannot be read.
 */
export function load(name, place = "localStorage") {
  try {
    return JSON.parse(globalThis[place].getItem(PREFIX + name) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Store a value as JSON.
 * @param {string} name
 * @param {unknown} value
 * @param {Place} [place]
 * @returns {boolean}  Whether the value was stored.
 */
export function save(name, value, place = "localStorage") {
  try {
    globalThis[place].setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Remove a stored value.
 * @param {string} name
 * @param {Place} [place]
 */
export function remove(name, place = "localStorage") {
  try {
    globalThis[place].removeItem(PREFIX + name);
  } catch {
    // Without storage there is nothing to remove.
  }
}

/**
 * Names of the values in localStorage that start with a prefix.
 * @param {string} prefix
 * @returns {string[]}
 */
export function names(prefix) {
  try {
    const stored = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + prefix));
    return stored.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}
