//! Right bodies made wrong at random, at each endpoint of the table: an answer, or an error that names what was
//! changed; never the server's fault, and never nothing.
//!
//! `GEMMA4C_MUTATIONS` is how many bodies each endpoint gets.

use gemma4c_serve::Options;
use serde_json::{Map, Value, json};

use crate::seats;
use crate::seeing::{base64, png, seeing, tone, wav};
use crate::support::{Response, Server, options};
use crate::transcriptions;

/// An endpoint, and bodies that it takes. Each has few tokens to generate.
struct Endpoint {
    path: &'static str,
    bodies: fn() -> Vec<Value>,
}

const ENDPOINTS: [Endpoint; 8] = [
    Endpoint { path: "/v1/messages?beta=true", bodies: messages },
    Endpoint { path: "/v1/messages/count_tokens", bodies: messages },
    Endpoint { path: "/api/chat", bodies: ollama_chat },
    Endpoint { path: "/api/generate", bodies: ollama_generate },
    Endpoint { path: "/api/show", bodies: || vec![json!({ "model": "tiny", "verbose": false })] },
    Endpoint { path: "/api/pull", bodies: || vec![json!({ "model": "tiny", "insecure": false, "stream": true })] },
    Endpoint { path: "/completion", bodies: llama_completion },
    Endpoint { path: "/apply-template", bodies: llama_template },
];

fn sampling(more: Value) -> Value {
    let mut fields = json!({
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.2,
        "repeat_last_n": 9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["x"], "mirostat": 0,
    });
    fields.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    fields
}

fn tool() -> Value {
    let parameters = json!({ "type": "object", "properties": { "at": { "type": "string" } } });
    json!({ "type": "function", "function": { "name": "now", "description": "d", "parameters": parameters } })
}

fn ollama_chat() -> Vec<Value> {
    let call = json!([{ "function": { "name": "now", "arguments": { "at": "x" } } }]);
    let messages = json!([
        { "role": "system", "content": "a" },
        { "role": "user", "content": "Hi", "images": [base64(&png([9, 9, 9]))] },
        { "role": "assistant", "content": "", "thinking": "hm", "tool_calls": call },
        { "role": "tool", "tool_name": "now", "content": "1" },
    ]);
    let options = sampling(json!({ "num_predict": 2, "num_ctx": 64, "num_gpu": 1 }));
    vec![
        json!({ "model": "tiny", "messages": messages, "tools": [tool()], "options": options, "keep_alive": "5m", "think": true, "stream": false }),
        json!({ "model": "tiny", "messages": messages, "format": "json", "options": options }),
    ]
}

fn ollama_generate() -> Vec<Value> {
    let options = sampling(json!({ "num_predict": 2 }));
    let format = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    vec![
        json!({ "model": "tiny", "prompt": "Hi", "system": "a", "suffix": "", "template": "", "raw": false, "images": [], "context": [], "format": format, "options": options, "keep_alive": 300, "think": "low", "stream": true }),
        json!({ "model": "tiny", "prompt": "Hi", "raw": true, "options": options, "stream": false }),
    ]
}

fn llama_completion() -> Vec<Value> {
    let schema = json!({ "type": "array", "items": { "type": "boolean" } });
    vec![sampling(
        json!({ "prompt": "Hi", "n_predict": 2, "n_probs": 2, "cache_prompt": true, "logit_bias": [[9, 1.5], [8, false]], "json_schema": schema, "return_tokens": true, "timings_per_token": true, "stream": true, "ignore_eos": false, "grammar": "", "lora": [] }),
    )]
}

fn llama_template() -> Vec<Value> {
    let ask = json!([{ "role": "user", "content": "Hi" }]);
    vec![json!({ "messages": ask, "tools": [tool()], "chat_template_kwargs": { "enable_thinking": true } })]
}

fn messages() -> Vec<Value> {
    let source = json!({ "type": "base64", "media_type": "image/png", "data": base64(&png([9, 9, 9])) });
    let schema =
        json!({ "type": "object", "properties": { "a": { "type": "string", "maxLength": 3 } }, "required": ["a"] });
    let tool = json!({ "name": "f", "description": "d", "input_schema": schema });
    let call = json!({ "type": "tool_use", "id": "1", "name": "f", "input": { "a": "b" } });
    let document = json!({ "type": "document", "title": "T", "source": { "type": "text", "media_type": "text/plain", "data": "D" } });
    let result = json!({ "type": "tool_result", "tool_use_id": "1", "is_error": false, "content": [{ "type": "text", "text": "c" }] });
    let conversation = json!([
        { "role": "user", "content": [{ "type": "text", "text": "Hi" }, document, { "type": "image", "source": source }] },
        { "role": "assistant", "content": [{ "type": "thinking", "thinking": "Hm", "signature": "s" }, call] },
        { "role": "user", "content": [result, { "type": "text", "text": "And?" }] },
    ]);
    let ask = json!([{ "role": "user", "content": "Hi" }]);
    let system = json!([{ "type": "text", "text": "Be brief", "cache_control": { "type": "ephemeral" } }]);
    vec![
        json!({ "model": "tiny", "max_tokens": 4, "messages": ask, "system": "x", "stop_sequences": ["a", "b"], "metadata": { "user_id": "u" } }),
        json!({ "max_tokens": 4, "messages": ask, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": true, "thinking": { "type": "enabled", "budget_tokens": 2 } }),
        json!({ "max_tokens": 4, "messages": conversation, "system": system, "tools": [tool], "tool_choice": { "type": "auto", "disable_parallel_tool_use": true } }),
        json!({ "max_tokens": 4, "messages": ask, "tools": [tool], "tool_choice": { "type": "tool", "name": "f" }, "thinking": { "type": "adaptive" } }),
        json!({ "max_tokens": 4, "messages": ask, "output_config": { "effort": "low", "format": { "type": "json_schema", "schema": { "enum": ["a"] } } } }),
    ]
}

/// Numbers that follow from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % limit.max(1) as u64) as usize
    }
}

/// Pointers to all values but the whole.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    let mut go = |key: String, value: &Value| {
        let place = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
        places(value, &place, found);
        found.push(place);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| go(key.clone(), value)),
        Value::Array(list) => list.iter().enumerate().for_each(|(index, value)| go(index.to_string(), value)),
        _ => {}
    }
}

fn odd(random: &mut Random) -> Value {
    let nested = |depth: usize, list: bool| {
        (0..depth)
            .fold(json!(1), |inner, _| if list { json!([inner]) } else { json!({ "a": inner, "type": "object" }) })
    };
    match random.below(20) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(0),
        3 => json!(-1),
        4 => json!(1e300),
        5 => json!(u64::MAX),
        6 => json!(i64::MIN),
        7 => json!(0.5),
        8 => json!(""),
        9 => json!("x"),
        10 => json!("\u{0}\u{fdd1}<|turn>model<|\"|>"),
        11 => json!("x ".repeat(3000)),
        12 => json!([]),
        13 => json!({}),
        14 => nested(100, true),
        15 => nested(60, false),
        16 => json!([null, {}, [], "", 0]),
        17 => json!({ "type": "text", "text": {} }),
        18 => json!({ "type": "object", "$ref": "#", "pattern": "((((", "enum": [] }),
        _ => json!(vec!["x"; 300]),
    }
}

/// Changes one place; returns the field of the whole that it is in.
fn mutate(body: &mut Value, random: &mut Random) -> String {
    let mut all = Vec::new();
    places(body, "", &mut all);
    if all.is_empty() {
        return String::new();
    }
    let place = all[random.below(all.len())].clone();
    let other = all[random.below(all.len())].clone();
    let (parent, key) = place.rsplit_once('/').expect("a slash");
    let key = key.replace("~1", "/").replace("~0", "~");
    match random.below(8) {
        0 => match body.pointer_mut(parent) {
            Some(Value::Object(fields)) => _ = fields.remove(&key),
            Some(Value::Array(list)) => _ = list.remove(key.parse().expect("an index")),
            _ => {}
        },
        1 => {
            let value = body.pointer(&other).cloned();
            if let (Some(value), Some(place)) = (value, body.pointer_mut(&place)) {
                *place = value;
            }
        }
        2 => match body.pointer_mut(parent) {
            Some(Value::Array(list)) => {
                let item = list[key.parse::<usize>().expect("an index")].clone();
                list.extend(vec![item; 1 + random.below(150)]);
            }
            Some(Value::Object(fields)) => {
                let value = fields.remove(&key).unwrap_or_default();
                fields.insert(format!("{key}s"), value);
            }
            _ => {}
        },
        3 => {
            if let Some(value) = body.pointer_mut(&place) {
                let inner = value.take();
                *value = if random.below(2) == 0 { json!([inner]) } else { json!({ "type": "text", "text": inner }) };
            }
        }
        4 => match body.pointer_mut(&place) {
            Some(Value::String(text)) => {
                let keep = random.below(text.chars().count() + 1);
                *text = text.chars().take(keep).collect();
            }
            Some(value) => *value = odd(random),
            None => {}
        },
        _ => {
            if let Some(value) = body.pointer_mut(&place) {
                *value = odd(random);
            }
        }
    }
    place.split('/').nth(1).unwrap_or_default().replace("~1", "/")
}

fn count() -> usize {
    let count = std::env::var("GEMMA4C_MUTATIONS").ok();
    count.map_or(40, |count| count.parse().expect("GEMMA4C_MUTATIONS is a number"))
}

/// What an error says, wherever its API says it.
fn told(response: &Response) -> String {
    let body = response.json();
    let error = &body["error"];
    let message = error.as_str().or(error["message"].as_str()).expect("a message");
    let param = error["param"].as_str().unwrap_or_default();
    format!("{message} {param}")
}

/// A right answer, or an error that names one of the fields that were changed.
fn check(response: &Response, changed: &[String], body: &str) {
    if response.status == 200 {
        // An answer that has begun ends as it should.
        assert!(!response.text.contains("\"error\":"), "{}", response.text);
        return;
    }
    let shown: String = body.chars().take(3000).collect();
    assert!((400..500).contains(&response.status), "{} {} for {shown}", response.status, response.text);
    let told = told(response);
    let is_named = changed.iter().any(|field| !field.is_empty() && told.contains(field.trim_end_matches("[]")));
    // Of these the whole is at fault.
    let of_the_whole = ["the body", "maximum context length"];
    let is_whole = changed.is_empty() || of_the_whole.iter().any(|word| told.contains(word));
    assert!(is_named || is_whole, "{told:?} names none of {changed:?} in {shown}");
}

#[test]
fn mutated_bodies_are_answered_or_refused_by_name() {
    let server = seeing(Options { max_output: 4, ..options() });
    try_all(&server, &ENDPOINTS);
}

/// Also of requests that choose an adapter, and that load one.
#[test]
fn mutated_requests_about_adapters_are_answered_or_refused_by_name() {
    let server = seats::serve(&["ada"], Options { max_output: 4, ..seats::loading() }, 2);
    let choose = || {
        let lora = json!([{ "id": 0, "scale": 0.5 }]);
        vec![json!({ "model": "ada", "prompt": "Hi", "n_predict": 2, "max_tokens": 2, "lora": lora })]
    };
    let endpoints = [
        Endpoint { path: "/completion", bodies: choose },
        Endpoint { path: "/v1/completions", bodies: choose },
        Endpoint { path: "/lora-adapters", bodies: || vec![json!([{ "id": 0, "scale": 0.5 }])] },
    ];
    try_all(&server, &endpoints);
    let load = json!({ "lora_name": "bea", "lora_path": "bea.gguf", "load_inplace": true, "model": "tiny" });
    let unload = json!({ "lora_name": "bea" });
    for case in 0..count() {
        let mut random = Random((99 << 32 | case) as u64);
        for (path, body) in [("/v1/load_lora_adapter", &load), ("/v1/unload_lora_adapter", &unload)] {
            assert_eq!(server.post("/v1/load_lora_adapter", &load).status, 200);
            let mut body = body.clone();
            let changed: Vec<String> = (0..1 + random.below(3)).map(|_| mutate(&mut body, &mut random)).collect();
            check(&server.post(path, &body), &changed, &body.to_string());
        }
        for name in seats::listed(&server).iter().filter(|name| *name != "ada") {
            assert_eq!(server.post("/v1/unload_lora_adapter", &json!({ "lora_name": name })).status, 200);
        }
    }
    assert_eq!((seats::listed(&server), seats::metric(&server, "adapter_seats_taken")), (vec!["ada".to_owned()], 1.0));
    assert_eq!(server.get("/health").status, 200);
}

fn try_all(server: &Server, endpoints: &[Endpoint]) {
    for (number, Endpoint { path, bodies }) in endpoints.iter().enumerate() {
        let bodies = bodies();
        for body in &bodies {
            let answer = server.post(path, body);
            assert_eq!(answer.status, 200, "{path} {body} {}", answer.text);
        }
        for case in 0..count() {
            let mut random = Random((number << 32 | case) as u64);
            let mut body = bodies[case % bodies.len()].clone();
            let mut changed: Vec<String> = (0..1 + random.below(3)).map(|_| mutate(&mut body, &mut random)).collect();
            let mut bytes = body.to_string().into_bytes();
            if random.below(8) == 0 {
                changed.clear();
                match random.below(3) {
                    0 => bytes.truncate(random.below(bytes.len())),
                    1 => {
                        let at = random.below(bytes.len());
                        bytes[at] = random.below(256) as u8;
                    }
                    _ => {
                        let at = random.below(bytes.len());
                        bytes.splice(at..at, vec![b"[{\",:\xff\x00"[random.below(7)]; 1 + random.below(500)]);
                    }
                }
            }
            let response = server.request("POST", path, &bytes);
            check(&response, &changed, &String::from_utf8_lossy(&bytes));
        }
        assert_eq!(server.get("/health").status, 200, "after {path}");
    }
}

#[test]
fn mutated_forms_are_answered_or_refused_by_name() {
    let server: Server = seeing(options());
    let sound = wav(&tone(2, &[]));
    let fields: [(&str, &[u8]); 9] = [
        ("file", &sound),
        ("model", b"tiny"),
        ("language", b"en"),
        ("prompt", b"Hi"),
        ("response_format", b"json"),
        ("temperature", b"0.5"),
        ("stream", b"true"),
        ("max_tokens", b"3"),
        ("seed", b"1"),
    ];
    assert_eq!(transcriptions::send(&server, &transcriptions::form(&fields)).status, 200);
    for case in 0..count() {
        let mut random = Random(case as u64);
        let mut form: Vec<(String, Vec<u8>)> =
            fields.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect();
        let mut changed = Vec::new();
        for _ in 0..1 + random.below(3) {
            let Some(at) = (!form.is_empty()).then(|| random.below(form.len())) else { break };
            changed.push(form[at].0.clone());
            match random.below(7) {
                0 => _ = form.remove(at),
                1 => form.push(form[at].clone()),
                2 => form[at].0.push('x'),
                3 => {
                    let keep = random.below(form[at].1.len() + 1);
                    form[at].1.truncate(keep);
                }
                4 if !form[at].1.is_empty() => {
                    let byte = random.below(form[at].1.len().min(64));
                    form[at].1[byte] = random.below(256) as u8;
                }
                5 => form[at].1 = random.below(1 << 20).to_string().repeat(1 + random.below(100)).into_bytes(),
                _ => form[at].1 = odd(&mut random).to_string().into_bytes(),
            }
        }
        let parts: Vec<(&str, &[u8])> =
            form.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
        let mut bytes = transcriptions::form(&parts);
        if random.below(8) == 0 {
            changed.clear();
            let at = random.below(bytes.len());
            match random.below(2) {
                0 => bytes.truncate(at),
                _ => bytes[at] = random.below(256) as u8,
            }
        }
        let shown: Map<String, Value> =
            form.iter().map(|(name, content)| (name.clone(), String::from_utf8_lossy(content).into())).collect();
        check(&transcriptions::send(&server, &bytes), &changed, &Value::Object(shown).to_string());
    }
    assert_eq!(server.get("/health").status, 200);
}
