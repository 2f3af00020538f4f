// Helpers for text nodes. They do not know what the page shows.

/**
 * Set an element's text in place: an element that has it already is not changed, so that it is neither laid out nor
 * announced again.
 * @param {Element} element  Contains a single text node, or nothing.
 * @param {string} text
 */
export function setText(element, text) {
  if (!element.firstChild) element.append(new Text());
  const node = /** @type {Text} */ (element.firstChild);
  if (node.data !== text) node.data = text;
}

/**
 * Create an element that contains one text node.
 * @param {string} name  Tag name.
 * @param {string} className  Empty: none.
 * @param {string} text
 * @returns {HTMLElement}
 */
export function createElement(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(new Text(text));
  return element;
}

/** A number with its unit. @param {number} number @param {string} unit  Of one. */
export function counted(number, unit) {
  return `${number.toLocaleString()} ${unit}${number === 1 ? "" : "s"}`;
}
