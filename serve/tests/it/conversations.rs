//! What the model is shown: conversations as transformers renders and encodes them, and where a server must do better.

use std::collections::BTreeMap;

use gemma4c_models::gguf::Gguf;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, vocab_from_metadata};
use serde_json::{Value, json};

use crate::golden;
use crate::support::{Server, options};

/// What the template writes behind `<|turn>model\n` where the model is not to think.
const NO_THOUGHTS: &str = "<|channel>thought\n<channel|>";
const PARIS: &str = "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>}<tool_call|>";
const PARIS_3: &str = "<|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>";

fn result(function: &str, value: &str) -> String {
    format!("<|tool_response>response:{function}{{value:<|\"|>{value}<|\"|>}}<tool_response|>")
}

fn weather(value: &str) -> String {
    result("get_weather", value)
}

/// Conversations with results of tools, of which transformers makes a turn `<|turn>tool` with this template: what must
/// follow the first `<|turn>model\n` in place of it. A result is in the model's turn, and so is what the model says
/// before a call and after a result.
fn with_results() -> BTreeMap<&'static str, String> {
    let rome = "<|tool_call>call:get_weather{city:<|\"|>Rome<|\"|>,days:1}<tool_call|>";
    let book = "<|tool_call>call:book{n:None,ok:true,price:1.5,when:{day:<|\"|>x<|\"|>},who:[{age:3,name:<|\"|>A<|\"|>}]}<tool_call|>";
    let lodz = "<|tool_call>call:get_weather{city:<|\"|>Łódź \"x\" \n🦙<|\"|>,l:[1,2.5,<|\"|>s<|\"|>,false,None,{k:1e-07,z:1e+20}]}<tool_call|>";
    let thought = "<|channel>thought\nI should look<channel|>";
    let again = format!("<|turn>model\n{NO_THOUGHTS}");
    BTreeMap::from([
        ("call+result str", [PARIS_3, &weather("{\"temp\": 21}"), NO_THOUGHTS].concat()),
        ("call+result text", [PARIS_3, &weather("21 degrees"), NO_THOUGHTS].concat()),
        (
            "call+result, answer, user",
            [PARIS_3, &weather("21"), "It is 21.<turn|>\n<|turn>user\nThx<turn|>\n", &again].concat(),
        ),
        ("parallel calls", [PARIS, rome, &weather("21"), &weather("25"), NO_THOUGHTS].concat()),
        ("calls in sequence", [PARIS_3, &weather("21"), book, &result("book", "done"), NO_THOUGHTS].concat()),
        ("call with content", ["Let me see.", PARIS, &weather("21"), NO_THOUGHTS].concat()),
        ("call reasoning_content", [thought, PARIS, &weather("21")].concat()),
        ("call reasoning", [thought, PARIS, &weather("21")].concat()),
        (
            "old reasoning dropped",
            [PARIS, &weather("21"), "21<turn|>\n<|turn>user\nmore<turn|>\n<|turn>model\n"].concat(),
        ),
        ("args empty", ["<|tool_call>call:now{}<tool_call|>", &result("now", "12:00"), NO_THOUGHTS].concat()),
        ("args unicode", [lodz, &weather("ok"), NO_THOUGHTS].concat()),
        ("tool parts", [PARIS_3, &weather("21 C"), NO_THOUGHTS].concat()),
        ("content null", [PARIS_3, &weather("21"), NO_THOUGHTS].concat()),
        // Arguments are JSON in a text, as clients send them: the model is shown what it wrote itself.
        ("args as string", [PARIS_3, &weather("21"), NO_THOUGHTS].concat()),
    ])
}

#[test]
fn conversations_are_encoded_as_by_transformers_or_better() {
    let Some(folder) = golden::folder() else { return };
    let model = folder.join("converted/a_e2b.Q4_K_M.gguf");
    let server = Server::over(&model, 2048);
    let vocab = vocab_from_metadata(Gguf::open(&model).unwrap().metadata()).unwrap().unwrap();
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let special = EncodeOptions { add_bos: false, parse_special: true };
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("converted/chat.json")).unwrap()).unwrap();
    let (mut better, mut equal) = (with_results(), 0);
    for case in cases["a_e2b"].as_array().unwrap() {
        let (name, rendered) = (case["name"].as_str().unwrap(), case["rendered"].as_str().unwrap());
        let request = json!({
            "messages": case["messages"], "tools": case["tools"], "chat_template_kwargs": case["options"],
        });
        let answer = server.post("/tokenize", &request);
        assert_eq!(answer.status, 200, "{name}: {}", answer.text);
        let ids: Vec<u32> = serde_json::from_value(answer.json()["tokens"].clone()).unwrap();
        let shown = tokenizer.decode(&ids, true).unwrap();
        let reference: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(reference, tokenizer.encode(rendered, special), "{name}: the reference encodes its own text");
        if let Some(turn) = better.remove(name) {
            let (before, _) = rendered.split_once("<|turn>model\n").unwrap();
            let expected = format!("{before}<|turn>model\n{turn}");
            assert_eq!((shown.as_str(), ids), (expected.as_str(), tokenizer.encode(&expected, special)), "{name}");
            assert_ne!(expected, rendered, "{name} is no exception");
        } else if name == "marker in text" {
            // The same text, of which the markers that the user spells are characters.
            let markers = |ids: &[u32]| ids.iter().filter(|id| tokenizer.token(**id).unwrap().0.contains('|')).count();
            assert_eq!((shown.as_str(), markers(&ids)), (rendered, 5), "{name}");
            assert!(markers(&reference) > 5);
        } else if name == "system parts" {
            // The template prints a list of parts as Python would; a server has texts to send.
            let expected = rendered.replace("[{'type': 'text', 'text': 'sys'}]", "sys");
            assert_eq!((shown.as_str(), ids), (expected.as_str(), tokenizer.encode(&expected, special)), "{name}");
            assert_ne!(expected, rendered, "{name} is no exception");
        } else {
            assert_eq!((shown.as_str(), ids), (rendered, reference), "{name}");
            equal += 1;
        }
    }
    assert_eq!((equal, better), (28, BTreeMap::new()));
}

fn tokens(server: &Server, request: &Value) -> Vec<u32> {
    let answer = server.post("/tokenize", request);
    assert_eq!(answer.status, 200, "{}", answer.text);
    serde_json::from_value(answer.json()["tokens"].clone()).unwrap()
}

fn shown(server: &Server, request: &Value) -> String {
    let text = server.post("/detokenize", &json!({ "tokens": tokens(server, request) })).json();
    text["content"].as_str().unwrap().to_owned()
}

#[test]
fn the_models_turn_is_opened_unless_the_request_says_no() {
    let server = Server::new(options(), 1);
    let hi = json!([{ "role": "user", "content": "Hi" }]);
    let plain = shown(&server, &json!({ "messages": hi }));
    let closed = "<bos><|turn>user\nHi<turn|>\n";
    assert_eq!(plain, format!("{closed}<|turn>model\n{NO_THOUGHTS}"));
    for request in [
        json!({ "messages": hi, "add_generation_prompt": false }),
        json!({ "messages": hi, "chat_template_kwargs": { "add_generation_prompt": false }, "unknown": 1 }),
    ] {
        assert_eq!(shown(&server, &request), closed, "{request}");
    }
    let think = json!({ "messages": hi, "chat_template_kwargs": { "enable_thinking": true } });
    assert_eq!(
        shown(&server, &think),
        "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    );
    // A chat has the tokens that the same request is said to have.
    let mut chat = json!({ "messages": hi, "add_generation_prompt": false, "max_tokens": 1 });
    let usage = server.post("/v1/chat/completions", &chat).json()["usage"]["prompt_tokens"].clone();
    assert_eq!(usage, tokens(&server, &chat).len());
    chat["add_generation_prompt"] = json!("no");
    for path in ["/tokenize", "/v1/chat/completions"] {
        let refused = server.post(path, &chat);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("add_generation_prompt")));
    }
}

#[test]
fn variables_reach_the_template_on_every_path() {
    let server = Server::with_template("{{ word }}");
    let hi = json!([{ "role": "user", "content": "Hi" }]);
    let request = json!({
        "messages": hi, "input": hi, "max_tokens": 1, "chat_template_kwargs": { "word": "one two <turn|> three" },
    });
    assert_eq!(shown(&server, &request), "one two <turn|> three");
    let count = tokens(&server, &request).len();
    let [chat, response] = ["/v1/chat/completions", "/v1/responses"].map(|path| server.post(path, &request).json());
    assert_eq!((&chat["usage"]["prompt_tokens"], &response["usage"]["input_tokens"]), (&json!(count), &json!(count)));
}

/// A template that shows the messages as it gets them.
#[test]
fn what_a_message_brings_reaches_the_template() {
    let server = Server::with_template("{{ messages | tojson }}");
    let messages =
        |messages: Value| -> Value { serde_json::from_str(&shown(&server, &json!({ "messages": messages }))).unwrap() };
    let user = json!({ "role": "user", "content": "Hi" });
    let call = json!([{ "id": "a", "type": "function", "function": { "name": "now", "arguments": "{}" } }]);
    for name in ["reasoning_content", "reasoning", "thinking"] {
        let asked = json!([user, { "role": "assistant", "tool_calls": call, name: "so" }]);
        for read in ["reasoning_content", "reasoning"] {
            assert_eq!(messages(asked.clone())[1][read], "so", "{name} as {read}");
        }
        let old = json!([user, { "role": "assistant", "tool_calls": call, name: "so" }, user]);
        assert_eq!(messages(old)[1]["reasoning_content"], Value::Null, "thoughts of a turn that is over");
    }
    let responses = json!([{ "name": "now", "response": { "hour": 12, "<turn|>": ["<eos>"] } }]);
    let native = json!([user, { "role": "assistant", "tool_calls": call, "tool_responses": responses }]);
    assert_eq!(messages(native)[1]["tool_responses"], responses);
    // A result may be an object.
    let result = json!({ "role": "tool", "tool_call_id": "a", "content": { "hour": 12 } });
    let asked = messages(json!([user, { "role": "assistant", "tool_calls": call }, result]));
    assert_eq!((&asked[2]["content"], &asked[2]["name"]), (&json!({ "hour": 12 }), &json!("now")));
    // Thoughts in the assistant's text are none of it, in whatever part they are; a user's text is all words.
    let text = |text: &str| json!({ "type": "text", "text": text });
    let thoughts = "<|channel>thought\nhm\n<channel|>one<|channel>more";
    for role in ["assistant", "user"] {
        let left = if role == "assistant" { "one" } else { thoughts };
        assert_eq!(messages(json!([{ "role": role, "content": thoughts }]))[0]["content"], left);
        let parts = json!([{ "role": role, "content": [text(" a "), text(thoughts)] }]);
        assert_eq!(messages(parts)[0]["content"], json!([text(" a "), text(left)]));
    }
    // Of the system and of a tool, parts are one text.
    let system = json!([{ "role": "system", "content": [text("a "), text("b")] }, user]);
    assert_eq!(messages(system)[0]["content"], "a b");
}

#[test]
fn results_that_do_not_fit_are_refused_by_name() {
    let server = Server::new(options(), 1);
    let user = json!({ "role": "user", "content": "Hi" });
    let result = json!({ "role": "tool", "tool_call_id": "a", "content": "noon" });
    for (messages, param) in [
        (json!([user, result]), "messages[1]"),
        (json!([user, { "role": "assistant", "content": "Hm" }, result, result]), "messages[2]"),
        (json!([user, { "role": "assistant", "tool_responses": "noon" }]), "messages[1].tool_responses"),
        (json!([user, { "role": "assistant", "tool_responses": [{ "name": "a" }] }]), "messages[1].tool_responses[0]"),
        (
            json!([user, { "role": "assistant", "tool_responses": [{ "name": 1, "response": 2 }] }]),
            "messages[1].tool_responses[0]",
        ),
    ] {
        for path in ["/tokenize", "/v1/chat/completions"] {
            let answer = server.post(path, &json!({ "messages": messages, "max_tokens": 1 }));
            assert_eq!(answer.status, 400, "{messages} {}", answer.text);
            let error = &answer.json()["error"];
            assert_eq!(error["param"], param, "{error}");
            assert!(error["message"].as_str().unwrap().starts_with(param), "{error}");
        }
    }
    let output = json!({ "type": "function_call_output", "call_id": "a", "output": "noon" });
    let input = json!({ "instructions": "Be brief", "input": [{ "role": "user", "content": "Hi" }, output] });
    assert_eq!(server.post("/v1/responses", &input).json()["error"]["param"], "input[1]");
}
