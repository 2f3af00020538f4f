// Renders the JSON schemas of an OpenAPI document: fields with their types, defaults and descriptions. It does not know
// operations.

import { createElement } from "./dom.js";

/** @typedef {any} Json  A part of the document. */

/** Levels of nested objects that are shown. */
const MAX_DEPTH = 4;

/**
 * Append a description: paragraphs, with `code` in backticks. Other Markdown is shown as it is.
 * @param {HTMLElement} parent
 * @param {string} text
 */
export function renderText(parent, text) {
  const isBlock = parent instanceof HTMLDivElement;
  for (const paragraph of text.split(/\n\s*\n/)) {
    const target = isBlock ? document.createElement("p") : parent;
    paragraph.split("`").forEach((part, index) => {
      target.append(index % 2 ? createElement("code", "", part) : part);
    });
    if (isBlock) parent.append(target);
  }
}

export class SchemaView {
  #components;

  /** @param {Json} components  Of the document. */
  constructor(components) {
    this.#components = components;
  }

  /** What a reference points to, or the part itself. @param {Json} part  @returns {Json} */
  resolve(part) {
    if (!part.$ref) return part;
    const [kind, name] = part.$ref.split("/").slice(-2);
    return this.#components[kind][name];
  }

  /** Names of the parameters and of the fields of the request bodies. @param {Json} operation  @returns {string[]} */
  namesIn(operation) {
    const schemas = Object.values(operation.requestBody?.content ?? {}).map(({ schema }) => schema);
    const fields = schemas.flatMap((schema) => schema.anyOf ?? [schema]).map((schema) => this.resolve(schema));
    const names = (operation.parameters ?? []).map((/** @type {Json} */ { name }) => name);
    return [...names, ...fields.flatMap(({ properties = {} }) => Object.keys(properties))];
  }

  /** @param {Json[]} parameters  @returns {HTMLElement} */
  renderParameters(parameters) {
    const fields = parameters.map(({ name, in: place, description, required, schema }) =>
      this.#renderField(name, { ...schema, description: `${description} (${place})` }, required, 1),
    );
    return list(fields);
  }

  /**
   * A schema's fields, or its type where it has none.
   * @param {Json} schema
   * @param {number} [depth]  Of the objects around it.
   * @returns {HTMLElement}
   */
  render(schema, depth = 0) {
    const objects = this.#objectsIn(schema);
    if (!objects.length) return createElement("p", "type", this.#type(schema));
    const element = createElement("div", "schema", "");
    for (const object of objects) {
      const { title, description, properties, required = [] } = object;
      if (depth === 0 || objects.length > 1) element.append(createElement("p", "type", title ?? "object"));
      if (description) {
        const text = createElement("div", "note", "");
        renderText(text, description);
        element.append(text);
      }
      const fields = Object.entries(properties).map(([name, field]) =>
        this.#renderField(name, field, required.includes(name), depth + 1),
      );
      element.append(list(fields));
    }
    return element;
  }

  /** @param {string} name  @param {Json} schema  @param {boolean} isRequired  @param {number} depth */
  #renderField(name, schema, isRequired, depth) {
    const item = document.createElement("li");
    item.append(createElement("code", "", name), " ", createElement("span", "type", this.#type(schema)));
    if (isRequired) item.append(" ", createElement("strong", "", "required"));
    if (schema.default !== undefined && schema.default !== null) {
      item.append(" ", createElement("span", "type", `default ${JSON.stringify(schema.default)}`));
    }
    if (schema.description) {
      const text = createElement("div", "note", "");
      renderText(text, schema.description);
      item.append(text);
    }
    if (depth < MAX_DEPTH && this.#objectsIn(schema).length) item.append(this.render(schema, depth));
    return item;
  }

  /** The objects with known fields that a value of the schema is, or holds. @param {Json} schema  @returns {Json[]} */
  #objectsIn(schema) {
    const resolved = this.resolve(schema);
    if (resolved.properties) return [resolved];
    const parts = resolved.anyOf ?? resolved.oneOf ?? [resolved.items || resolved.contentSchema].filter(Boolean);
    return parts.flatMap((/** @type {Json} */ part) => this.#objectsIn(part));
  }

  /** A schema's type in a few words. @param {Json} schema  @returns {string} */
  #type(schema) {
    if (schema.$ref) return schema.$ref.split("/").at(-1);
    if (schema.const !== undefined) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((/** @type {Json} */ value) => JSON.stringify(value)).join(" or ");
    const parts = schema.anyOf ?? schema.oneOf;
    if (parts) return [...new Set(parts.map((/** @type {Json} */ part) => this.#type(part)))].join(" or ");
    if (schema.contentSchema) return `${this.#type(schema.contentSchema)} as JSON`;
    if (schema.prefixItems) return `[${schema.prefixItems.map((/** @type {Json} */ part) => this.#type(part)).join(", ")}]`;
    if (schema.type === "array") return schema.items ? `list of ${this.#type(schema.items)}` : "list";
    return schema.type ?? "any value";
  }
}

/** @param {HTMLElement[]} items  @returns {HTMLElement} */
function list(items) {
  const element = createElement("ul", "fields", "");
  element.append(...items);
  return element;
}
