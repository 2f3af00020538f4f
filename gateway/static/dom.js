// Text on the page. Knows nothing of what it says.

/**
 * Change an element's text in place, while somebody types elsewhere: where nodes come and go, Chromium ends the step of
 * undo that the typing makes up, and would then take back every letter by itself.
 * @param {Element} element  Holds text, or nothing.
 * @param {string} text
 */
export function write(element, text) {
  if (!element.firstChild) element.append(new Text());
  const node = /** @type {Text} */ (element.firstChild);
  if (node.data !== text) node.data = text;
}

/**
 * @param {string} name
 * @param {string} className
 * @param {string} text
 */
export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(new Text(text));
  return made;
}
