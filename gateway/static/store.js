// Values kept in the browser's localStorage: the text, the settings and the number of saved keystrokes. None of them is
// sent to the server from here. The page works without storage, since private windows and full disks refuse it.

const PREFIX = "tercet.";

/**
 * Read a stored value.
 * @param {string} name
 * @returns {any}  Null if nothing is stored, or it cannot be read.
 */
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Store a value as JSON.
 * @param {string} name
 * @param {unknown} value
 * @returns {boolean}  Whether the value was stored.
 */
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/**
 * Remove a stored value.
 * @param {string} name
 */
export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Without storage there is nothing to remove.
  }
}

/**
 * Call a function when another window of this page stores or removes a value.
 * @param {string} name
 * @param {(value: any) => void} onChange  Called with the new value; null if it was removed.
 */
export function watch(name, onChange) {
  addEventListener("storage", (event) => {
    if (event.key === PREFIX + name) onChange(event.newValue === null ? null : JSON.parse(event.newValue));
  });
}
