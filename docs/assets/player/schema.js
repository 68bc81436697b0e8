/* Does a value fit a JSON schema? As much of JSON Schema as trace_schema.json uses, and no more. */
;(function (player) {
  "use strict"

  const KNOWN = new Set([
    "$ref",
    "$schema",
    "$defs",
    "title",
    "description",
    "oneOf",
    "anyOf",
    "const",
    "enum",
    "type",
    "minimum",
    "properties",
    "required",
    "additionalProperties",
    "items",
  ])

  const IS_TYPE = {
    object: (value) => typeof value === "object" && value !== null && !Array.isArray(value),
    array: Array.isArray,
    string: (value) => typeof value === "string",
    boolean: (value) => typeof value === "boolean",
    integer: Number.isInteger,
    null: (value) => value === null,
  }

  /* Return null if `value` fits, else what is wrong with it, in words. `root` holds the $defs. */
  player.misfit = function misfit(value, schema, root, name = "the line") {
    for (const keyword of Object.keys(schema)) {
      if (!KNOWN.has(keyword)) throw new Error(`trace schema: keyword ${keyword} is not supported`)
    }
    if (schema.$ref) return misfit(value, resolve(schema.$ref, root), root, name)
    if (schema.anyOf) {
      const misfits = schema.anyOf.map((option) => misfit(value, option, root, name))
      return misfits.includes(null) ? null : misfits.join(", or ")
    }
    if ("const" in schema && value !== schema.const) {
      return `${name} is ${show(value)}, not ${show(schema.const)}`
    }
    if (schema.enum && !schema.enum.includes(value)) {
      return `${name} is ${show(value)}; it must be one of ${schema.enum.map(show).join(", ")}`
    }
    if (schema.type && !IS_TYPE[schema.type](value)) {
      return `${name} is ${show(value)}; it must be of type ${schema.type}`
    }
    if ("minimum" in schema && value < schema.minimum) {
      return `${name} is ${value}; it must be ${schema.minimum} or more`
    }
    if (schema.items)
      return first(value, (item, i) => misfit(item, schema.items, root, `${name}[${i}]`))
    if (schema.properties) return misfitOfObject(value, schema, root)
    return null
  }

  function misfitOfObject(value, schema, root) {
    const { properties, required = [], additionalProperties = true } = schema
    const missing = required.filter((field) => !(field in value))
    if (missing.length) return `${missing.join(", ")} is missing`
    return first(Object.keys(value), (field) => {
      if (field in properties) return player.misfit(value[field], properties[field], root, field)
      return additionalProperties ? null : `there is no field ${show(field)}`
    })
  }

  function first(values, check) {
    for (let i = 0; i < values.length; i++) {
      const wrong = check(values[i], i)
      if (wrong) return wrong
    }
    return null
  }

  function resolve(reference, root) {
    return reference
      .slice(2)
      .split("/")
      .reduce((node, part) => node[part], root)
  }

  function show(value) {
    const text = JSON.stringify(value)
    return text === undefined ? "nothing" : text.length > 60 ? `${text.slice(0, 60)} ...` : text
  }
})((window.BlockTablePlayer ??= {}))
