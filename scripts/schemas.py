"""Asks a server for answers by JSON schemas and judges them with the `jsonschema` package.

    schemas.py answers FILE          judges what serve/tests/it/schemas.rs has written
    schemas.py suite FOLDER URL      every schema of the official test suite, as response_format and as the parameters of a tool

No finished answer may violate its schema, and every refusal names a keyword of the schema and the field that has it.
"""

import collections
import concurrent.futures
import fractions
import glob
import json
import os
import re
import sys
import urllib.error
import urllib.request

import jsonschema
import referencing.exceptions
from jsonschema import validators

CHOICES = 4
KEYWORDS = """$ref $dynamicRef $recursiveRef $anchor allOf anyOf oneOf not if then else type enum const minimum maximum exclusiveMinimum exclusiveMaximum
    multipleOf minLength maxLength pattern format items prefixItems additionalItems unevaluatedItems contains minContains maxContains uniqueItems minItems
    maxItems properties patternProperties additionalProperties unevaluatedProperties propertyNames required dependentRequired dependentSchemas dependencies
    minProperties maxProperties""".split()


def multiple_of(validator, divisor, instance, schema):
    """Exactly: 0.07 is a multiple of 0.01, though their quotient as doubles is 7.000000000000001."""
    if validator.is_type(instance, "number"):
        quotient = fractions.Fraction(str(instance)) / fractions.Fraction(str(divisor))
        if quotient.denominator != 1:
            yield jsonschema.ValidationError(f"{instance} is not a multiple of {divisor}")


Judge = validators.extend(jsonschema.Draft202012Validator, {"multipleOf": multiple_of})


def violation(schema, value):
    error = next(Judge(schema).iter_errors(value), None)
    return error and error.message


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def longest_space(text):
    outside = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', text)
    return max((len(run) for run in re.findall(r"\s+", outside)), default=0)


def parameters(schema, number):
    """The schema itself where it is one of objects; else that of an argument. A name of its own keeps its references right."""
    if isinstance(schema, dict) and (schema.get("type") == "object" or "properties" in schema or "required" in schema):
        return schema
    if isinstance(schema, dict):
        schema = {"$id": f"urn:suite:{number}"} | schema
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


class Table:
    """What came of the schemas, asked for in one way."""

    def __init__(self, name):
        self.name = name
        self.counts = collections.Counter()
        self.refused = collections.Counter()
        self.faults = []
        self.space = 0

    def refuse(self, schema, error):
        self.counts["refused"] += 1
        words = set(re.findall(r"\$?\w+", error["message"]))
        named = [word for word in KEYWORDS if word in words and f'"{word}"' in json.dumps(schema)]
        named += [word for word in ("false", "schema") if word in words and f'"{word}"' in error["message"]]
        self.refused[named[0] if named else "(no keyword)"] += 1
        if not named or not error.get("param"):
            self.counts["refused without keyword or param"] += 1
            self.faults.append(f"refusal: {error} {json.dumps(schema)}")

    def judge(self, schema, choice):
        message = choice["message"]
        calls = message.get("tool_calls") or []
        texts = [call["function"]["arguments"] for call in calls] if self.name != "response_format" else [message["content"]]
        content = message.get("content") or ""
        if self.name != "response_format" and ("tool_call" in content or "call:" in content):
            self.counts["leaks"] += 1
            self.faults.append(f"leak: {content!r}")
        if choice["finish_reason"] == "length":
            self.counts["cut"] += 1
            return
        if choice["finish_reason"] not in ("stop", "tool_calls") or not texts:
            self.counts["failed"] += 1
            self.faults.append(f"failed: {choice} {json.dumps(schema)}")
            return
        self.counts["finished"] += 1
        for text in texts:
            self.space = max(self.space, longest_space(text))
            try:
                wrong = violation(schema, json.loads(text))
            # A regular expression that Python does not know, such as one of letters by their class; a reference out of the schema.
            except (re.error, referencing.exceptions.Unresolvable):
                self.counts["not judged"] += 1
                continue
            if wrong:
                self.counts["violations"] += 1
                self.faults.append(f"violation: {wrong}: {text} {json.dumps(schema)}")

    def take(self, schema, status, answer):
        self.counts["schemas"] += 1
        if status == 400:
            return self.refuse(schema, answer["error"])
        if status != 200:
            self.counts["failed"] += 1
            return self.faults.append(f"failed: {status} {answer} {json.dumps(schema)}")
        self.counts["accepted"] += 1
        for choice in answer["choices"]:
            self.judge(schema, choice)

    def print(self):
        names = "schemas, accepted, refused, refused without keyword or param, finished, not judged, cut, failed, leaks, violations".split(", ")
        print(f"{self.name}: " + ", ".join(f"{self.counts[name]} {name}" for name in names))
        print("  longest white space:", self.space)
        print("  refused by:", ", ".join(f"{name} {count}" for name, count in self.refused.most_common()))

    def is_right(self):
        return not any(self.counts[name] for name in ("refused without keyword or param", "failed", "leaks", "violations"))


def suite(folder, url):
    files = sorted(glob.glob(os.path.join(folder, "**", "*.json"), recursive=True))
    schemas = [case["schema"] for file in files for case in json.load(open(file))]
    assert len(schemas) > 300, f"no test suite in {folder}"
    # Signs that end something come more often, so that answers end too.
    bias = {}
    for text in ('"', "}", "]", "}}", "]}", '"}'):
        _, answer = post(f"{url}/tokenize", {"prompt": text, "add_special_tokens": False})
        if len(answer["tokens"]) == 1:
            bias[str(answer["tokens"][0])] = 8

    def ask(number):
        found = []
        for way in ("response_format", "parameters"):
            schema = schemas[number] if way == "response_format" else parameters(schemas[number], number)
            body = {
                "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64, "n": CHOICES, "seed": number, "logit_bias": bias,
            }
            if way == "response_format":
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            else:
                body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
                body |= {"tool_choice": "required", "parallel_tool_calls": False}
            found.append((way, schema, *post(f"{url}/v1/chat/completions", body)))
        return found

    tables = {name: Table(name) for name in ("response_format", "parameters")}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(ask, range(len(schemas))):
            for way, schema, status, answer in found:
                tables[way].take(schema, status, answer)
    for table in tables.values():
        table.print()
    for table in tables.values():
        for fault in table.faults:
            print(f"{table.name}: {fault}"[:1000], file=sys.stderr)
    return all(table.is_right() for table in tables.values())


def answers(file):
    counts = collections.Counter()
    for line in open(file):
        answer = json.loads(line)
        counts[answer["finish_reason"]] += 1
        jsonschema.Draft202012Validator.check_schema(answer["schema"])
        if answer["finish_reason"] in ("stop", "tool_calls"):
            wrong = violation(answer["schema"], json.loads(answer["text"]))
            assert not wrong, f"{wrong}: {answer}"
    print(f"all answers that ended are valid: {dict(counts)}")
    return True


if __name__ == "__main__":
    sys.exit(0 if {"suite": suite, "answers": answers}[sys.argv[1]](*sys.argv[2:]) else 1)
