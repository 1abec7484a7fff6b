// A page for the OpenAPI description that needs nothing from elsewhere, and tries every operation.

import { apiKey, models, setApiKey } from "./api.js";
import { $, make as element } from "./dom.js";
import { tryOut } from "./try.js";

const make = (tag, text, ...children) => element(tag, {}, ...(text ? [text] : []), ...children);

function typeOf(schema, named) {
  if (!schema) return "";
  if (schema.$ref) {
    named.add(schema.$ref.split("/").pop());
    return schema.$ref.split("/").pop();
  }
  if (schema.anyOf) return schema.anyOf.map((one) => typeOf(one, named)).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items, named) || "anything"}`;
  if (schema.type === "object" && schema.additionalProperties) return `object of ${typeOf(schema.additionalProperties, named)}`;
  const limits = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]]
    .filter(([key]) => schema[key] !== undefined).map(([key, sign]) => `${sign} ${schema[key]}`);
  return [schema.type || "anything", ...limits].join(" ");
}

function fields(schema, named) {
  const table = make("table", "", make("tr", "", make("th", "Field"), make("th", "Type"), make("th", "")));
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const needed = (schema.required || []).includes(name) ? "required" : "";
    table.append(make("tr", "", make("td", "", make("code", name)), make("td", typeOf(field, named)),
      make("td", [needed, field.description].filter(Boolean).join(". "))));
  }
  return table;
}

function operation(method, path, spec, schemas, model) {
  const details = make("details", "", make("summary", "", make("code", `${method.toUpperCase()} ${path}`), ` ${spec.summary || ""}`));
  details.addEventListener("toggle", () => {
    if (details.open && !details.querySelector("form")) details.firstChild.after(tryOut(method, path, spec, model, apiKey));
  });
  const body = spec.requestBody && spec.requestBody.content["application/json"].schema;
  const queue = new Set();
  if (body) typeOf(body, queue);
  const seen = new Set();
  while (queue.size > seen.size) {
    const name = [...queue].find((one) => !seen.has(one));
    seen.add(name);
    if (schemas[name] && schemas[name].properties) details.append(make("h2", name), fields(schemas[name], queue));
  }
  const answers = Object.entries(spec.responses).map(([status, one]) => `${status}: ${one.description}`);
  details.append(make("h2", "Answers"), make("p", answers.join(" · ")));
  return details;
}

$("key").value = apiKey();
$("key").addEventListener("change", () => setApiKey($("key").value));

const spec = await (await fetch("/openapi.json")).json();
const [first] = await models().catch(() => []); // without a key the examples say MODEL
for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, one] of Object.entries(methods)) {
    $("paths").append(operation(method, path, one, spec.components.schemas, first?.id || "MODEL"));
  }
}
