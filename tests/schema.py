"""A JSON document against a JSON schema, for the keywords that pydantic writes for our models."""

from typing import Any

KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "enum": lambda value, allowed: value in allowed,
}
ANNOTATIONS = {"title", "description", "default", "$defs"}
STRUCTURE = {"$ref", "anyOf", "type", "properties", "required", "additionalProperties", "items", "prefixItems"}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """What of a JSON value does not fit a JSON schema."""
    assert schema.keys() <= BOUNDS.keys() | ANNOTATIONS | STRUCTURE, f"not understood: {sorted(schema)}"
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    if "anyOf" in schema:
        return [] if any(not fits(value, one, root) for one in schema["anyOf"]) else [f"{value!r}: none of anyOf"]
    kind = schema["type"]
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return [f"{value!r} is no {kind}"]
    found = [
        f"{value!r}: {name} {schema[name]}" for name in BOUNDS.keys() & schema if not BOUNDS[name](value, schema[name])
    ]
    if kind == "object":
        properties, other = schema.get("properties", {}), schema.get("additionalProperties", False)
        found += [f"{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            one = properties.get(name, other)
            found += fits(item, one, root) if isinstance(one, dict) else [f"{name} is unknown"]
    if kind == "array":
        each = schema.get("prefixItems") or [schema["items"]] * len(value)
        found += [e for item, one in zip(value, each, strict=False) for e in fits(item, one, root)]
    return found
