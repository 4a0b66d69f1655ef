/* The page of the API, made from openapi.json: routes by group, fields with types and meaning, requests to copy. */

import { copyButton, make } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
/* In the order in which tables begin. */
const USUAL = [
  "model",
  "type",
  "role",
  "content",
  "messages",
  "prompt",
  "text",
  "input",
  "system",
  "instructions",
  "stream",
  "max_tokens",
  "max_completion_tokens",
  "max_output_tokens",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "stop",
  "seed",
  "n",
  "tools",
  "tool_choice",
  "response_format",
  "reasoning_effort",
  "enable_thinking",
  "logprobs",
  "top_logprobs",
];
const BASE = new URL(".", location.href).href.replace(/\/$/, "");

/* The schema that a reference names, with its name. */
class Schemas {
  constructor(components) {
    this.components = components;
  }

  resolve(schema) {
    const name = schema?.$ref?.split("/").at(-1);
    return name ? { name, ...this.components[name] } : (schema ?? {});
  }

  /* The alternatives of a schema; null is left out, since it means the same as no value. */
  alternatives(schema) {
    return (schema.anyOf ?? schema.oneOf ?? [schema]).filter((each) => each.type !== "null");
  }

  /* The records with fields that a schema is made of. */
  records(schema) {
    if (!schema || typeof schema !== "object") return [];
    if (schema.$ref) {
      const found = this.resolve(schema);
      return found.properties ? [found] : this.records(this.components[found.name]);
    }
    const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.prefixItems ?? [])];
    return [...parts, schema.items, schema.additionalProperties].flatMap((part) => this.records(part));
  }

  describeType(schema) {
    return (
      this.alternatives(schema)
        .map((each) => this.describeOne(each))
        .join(" or ") || "null"
    );
  }

  describeOne(schema) {
    if (schema.$ref)
      return this.resolve(schema).properties ? this.resolve(schema).name : this.describeType(this.resolve(schema));
    if (schema.anyOf || schema.oneOf) return this.describeType(schema);
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.type === "array") {
      const inner = schema.items ? this.describeType(schema.items) : "any";
      return inner.includes(" ") ? `list of (${inner})` : `list of ${inner}`;
    }
    if (schema.type === "object" && typeof schema.additionalProperties === "object") {
      return `object of ${this.describeType(schema.additionalProperties)}`;
    }
    return Array.isArray(schema.type) ? schema.type.join(" or ") : (schema.type ?? "any");
  }

  /* Bounds in words, of all alternatives. */
  describeBounds(schema) {
    return this.alternatives(schema)
      .flatMap((each) => {
        const low = realBound(each.minimum ?? each.exclusiveMinimum),
          high = realBound(each.maximum ?? each.exclusiveMaximum),
          words = [];
        const above = each.exclusiveMinimum === undefined ? "from" : "above";
        if (low !== undefined && high !== undefined) words.push(`${above} ${low} to ${high}`);
        else if (low !== undefined) words.push(`${above} ${low}`);
        else if (high !== undefined) words.push(`at most ${high}`);
        if (each.maxLength === 0) words.push("empty");
        else if (each.maxLength !== undefined)
          words.push(`${each.minLength ? `${each.minLength} to ` : "up to "}${each.maxLength} characters`);
        if (each.maxItems !== undefined)
          words.push(`${each.minItems ? `${each.minItems} to ` : "up to "}${each.maxItems} items`);
        if (each.maxProperties !== undefined) words.push(`up to ${each.maxProperties} entries`);
        return words;
      })
      .join("; ");
  }
}

const prose = (text) => renderMarkdown((text ?? "").replace(/\n\s+/g, "\n"));

/* Bounds of the machine's integers say nothing about a field. */
const realBound = (number) => (Math.abs(number) >= 2 ** 31 - 1 ? undefined : number);

/* Fields as readers look for them: required ones, usual ones, the rest, and those without effect. */
function inOrder(properties, required) {
  const rank = ([name, field]) => {
    if (required.has(name)) return -1;
    if (field.description?.includes("without effect")) return USUAL.length + 1;
    return USUAL.includes(name) ? USUAL.indexOf(name) : USUAL.length;
  };
  return Object.entries(properties).sort((a, b) => rank(a) - rank(b));
}

/* A table of fields; records inside them unfold on demand, as they may hold themselves. */
function fieldTable(record, schemas) {
  const required = new Set(record.required ?? []);
  const rows = inOrder(record.properties, required).map(([name, field]) => {
    const fallback =
      field.default === undefined || field.default === null ? null : `default ${JSON.stringify(field.default)}`;
    const inner = schemas.records(field).filter((each) => each.name !== record.name);
    const facts = [schemas.describeBounds(field), fallback].filter(Boolean).join("; ");
    const meaning = make(
      "td",
      {},
      field.description ? prose(field.description) : null,
      facts ? make("small", { textContent: facts }) : null,
      ...inner.map((each) => unfold(each, schemas)),
    );
    const label = make("th", { scope: "row" }, make("code", { textContent: name }));
    if (required.has(name)) label.append(make("span", { className: "required", textContent: "required" }));
    return make("tr", {}, label, make("td", { className: "type", textContent: schemas.describeType(field) }), meaning);
  });
  return make(
    "div",
    { className: "table", tabIndex: 0 },
    make("table", { className: "fields" }, make("tbody", {}, ...rows)),
  );
}

function unfold(record, schemas) {
  const details = make(
    "details",
    { className: "inner" },
    make("summary", {}, make("code", { textContent: record.name })),
  );
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1)
      details.append(prose(record.description), fieldTable(record, schemas));
  });
  return details;
}

function codeBox(title, text) {
  return make(
    "div",
    { className: "code" },
    make(
      "div",
      { className: "code-head" },
      make("span", { textContent: title }),
      copyButton("Copy", () => text, { showsText: true }),
    ),
    make("pre", { tabIndex: 0 }, make("code", { textContent: text })),
  );
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/* The media type of a request's body, and what the document says of it. */
const bodyOf = (operation) => Object.entries(operation.requestBody?.content ?? {})[0] ?? [];

/* A request to copy, with the address of this server. */
function curl(route) {
  const { method, path, operation } = route,
    [kind, content] = bodyOf(operation),
    isForm = kind === "multipart/form-data";
  const query = (operation.parameters ?? []).filter((each) => each.in === "query" && each.required);
  const address = BASE + path + (query.length ? `?${query.map((each) => `${each.name}=`).join("&")}` : "");
  const lines = [`curl ${method === "GET" ? "" : `-X ${method} `}${/[{}&?]/.test(address) ? quote(address) : address}`];
  if (operation.security) lines.push("-H 'Authorization: Bearer KEY'");
  if (content && isForm) lines.push(...Object.keys(content.example ?? {}).map((name) => `-F ${name}=@FILE`));
  else if (content) lines.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(content.example ?? {}))}`);
  return lines.join(" \\\n  ");
}

class Route {
  constructor(method, path, operation, schemas) {
    Object.assign(this, { method: method.toUpperCase(), path, operation, schemas, aliases: [] });
    this.id = `${method}${path.replace(/[^a-zA-Z0-9]+/g, "-").replace(/-$/, "")}`;
  }

  /* Whether another path is the same route under another name. */
  isAliasOf(other) {
    const key = ({ method, operation }) =>
      JSON.stringify([
        method,
        operation.tags,
        operation.summary,
        bodyOf(operation)[1]?.schema,
        operation.parameters,
      ]);
    return key(this) === key(other);
  }

  /* What the filter looks in: the path and the names of all fields, inner ones too. */
  get text() {
    if (this.words) return this.words;
    const records = new Map(),
      pending = this.schemas.records(this.bodySchema);
    for (let record = pending.pop(); record; record = pending.pop()) {
      if (records.has(record.name)) continue;
      records.set(record.name, Object.keys(record.properties));
      pending.push(...Object.values(record.properties).flatMap((field) => this.schemas.records(field)));
    }
    const { summary } = this.operation;
    this.words = [this.path, ...this.aliases, summary, ...[...records.values()].flat()].join(" ").toLowerCase();
    return this.words;
  }

  get bodySchema() {
    return bodyOf(this.operation)[1]?.schema;
  }

  make() {
    const head = make(
      "summary",
      {},
      make("span", { className: `method ${this.method.toLowerCase()}`, textContent: this.method }),
      make("code", { className: "path", textContent: this.path }),
      make("span", { className: "what", textContent: this.operation.summary }),
    );
    this.node = make("details", { className: "route", id: this.id }, head);
    this.node.addEventListener("toggle", () => {
      if (!this.node.open) return;
      if (this.node.childElementCount === 1) this.node.append(this.makeBody());
      if (location.hash !== `#${this.id}`) history.replaceState(null, "", `#${this.id}`);
    });
    return this.node;
  }

  makeBody() {
    const { operation, schemas } = this,
      body = make("div", { className: "route-body" }),
      [, content] = bodyOf(operation);
    if (this.aliases.length)
      body.append(
        make(
          "p",
          { className: "aliases" },
          "Also at ",
          ...this.aliases.flatMap((path, place) => [place ? ", " : "", make("code", { textContent: path })]),
          ".",
        ),
      );
    body.append(codeBox("Request", curl(this)));
    if (operation.parameters?.length) {
      const properties = Object.fromEntries(
        operation.parameters.map((each) => [
          each.name,
          { ...each.schema, description: each.description ?? `In the ${each.in === "path" ? "path" : "query"}.` },
        ]),
      );
      const required = operation.parameters.filter((each) => each.required).map((each) => each.name);
      body.append(make("h4", { textContent: "Parameters" }), fieldTable({ properties, required }, schemas));
    }
    if (content) {
      body.append(make("h4", { textContent: "Body" }));
      for (const record of schemas.records(content.schema))
        body.append(prose(record.description), fieldTable(record, schemas));
    }
    body.append(make("h4", { textContent: "Response" }), ...this.makeResponses());
    return body;
  }

  makeResponses() {
    const { responses } = this.operation,
      parts = [];
    for (const [media, { schema, "x-event": event }] of Object.entries(responses["200"].content)) {
      const records = this.schemas.records(event ?? schema);
      parts.push(
        make(
          "p",
          {},
          make("code", { textContent: `200 ${media}` }),
          event ? ", each event:" : records.length ? "" : `: ${this.schemas.describeType(schema)}`,
        ),
      );
      parts.push(...records.map((record) => unfold(record, this.schemas)));
    }
    const failures = Object.entries(responses).filter(([status]) => status !== "200");
    const rows = failures.map(([status, { description }]) =>
      make("li", {}, make("code", { textContent: status }), ` ${description}`),
    );
    if (rows.length) parts.push(make("ul", { className: "statuses" }, ...rows));
    return parts;
  }
}

/* Routes by tag, in the document's order; paths that name one route twice are one entry. */
function readRoutes(document, schemas) {
  const groups = new Map((document.tags ?? []).map((tag) => [tag.name, { tag, routes: [] }]));
  for (const [path, operations] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const name = operation.tags?.[0] ?? "other",
        route = new Route(method, path, operation, schemas);
      if (!groups.has(name)) groups.set(name, { tag: { name }, routes: [] });
      const { routes } = groups.get(name),
        same = routes.find((each) => route.isAliasOf(each));
      if (same) same.aliases.push(path);
      else routes.push(route);
    }
  }
  return [...groups.values()].filter((group) => group.routes.length);
}

function describeServer({ info, components }) {
  const hasKey = Boolean(components.securitySchemes?.key);
  const key = hasKey
    ? "This server needs a key: send `Authorization: Bearer KEY` with each request."
    : "This server needs no key.";
  const base = `Base address: \`${BASE}\`; OpenAI's clients take \`${BASE}/v1\`.`;
  const text = `${info.description}\n\n${base} ${key}\n\nVersion ${info.version}.`;
  return [
    renderMarkdown(text),
    make("p", {}, "Generated from ", make("a", { href: "openapi.json", textContent: "openapi.json" }), "."),
  ];
}

function filter(groups) {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let numShown = 0;
  for (const group of groups) {
    const shown = group.routes.filter((route) => {
      const isShown = words.every((word) => route.text.includes(word));
      route.node.hidden = !isShown;
      return isShown;
    });
    group.section.hidden = group.link.hidden = !shown.length;
    numShown += shown.length;
  }
  $("none").hidden = numShown > 0;
}

function openHash() {
  const found = document.getElementById(location.hash.slice(1));
  if (found?.matches(".route")) found.open = true;
  found?.scrollIntoView();
}

function show(description) {
  const schemas = new Schemas(description.components.schemas),
    groups = readRoutes(description, schemas);
  $("about").replaceChildren(...describeServer(description));
  for (const group of groups) {
    const title = group.tag["x-displayName"] ?? group.tag.name,
      id = `group-${group.tag.name}`;
    group.link = make("a", { href: `#${id}`, textContent: title });
    group.section = make(
      "section",
      { id, "aria-label": title },
      make("h2", { textContent: title }),
      group.tag.description ? make("p", { className: "group-about", textContent: group.tag.description }) : null,
      ...group.routes.map((route) => route.make()),
    );
  }
  $("groups").append(...groups.map((group) => group.link));
  $("routes").append(...groups.map((group) => group.section));
  $("filter").addEventListener("input", () => filter(groups));
  addEventListener("hashchange", openHash);
  openHash();
}

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`status ${response.status}`);
  show(await response.json());
} catch (error) {
  $("about").replaceChildren(
    make("p", {
      className: "failure",
      role: "alert",
      textContent: `The description of the API could not be read: ${error.message}.`,
    }),
  );
}
