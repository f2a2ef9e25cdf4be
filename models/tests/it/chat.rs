//! Chat templates against what transformers renders, and against templates that go wrong.

use std::path::Path;

use crate::golden;
use gemma4c_models::chat::{ChatTemplate, Message};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, vocab_from_metadata};
use serde_json::{Map, Value, json};

fn template_of(gguf: &Path) -> String {
    vocab_from_metadata(Gguf::open(gguf).unwrap().metadata()).unwrap().unwrap().chat_template.unwrap()
}

fn render(template: &str, messages: Value) -> String {
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    match ChatTemplate::new(template).and_then(|t| t.render(&messages, &[], true, &Map::new())) {
        Ok(text) => text,
        Err(error) => error.to_string(),
    }
}

/// Checks all conversations of a golden file; returns how many there were. Results of tools are where the model knows
/// them.
fn check_conversations(template: &str, path: &Path) -> usize {
    let as_turn = "<turn|>\n<|turn>tool\n{\"temp\": 21}<turn|>\n<|turn>model\n";
    let in_turn = "<|tool_response>response:get_weather{value:<|\"|>{\"temp\": 21}<|\"|>}<tool_response|>";
    let template = ChatTemplate::new(template).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for case in &cases {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let tools: Option<Vec<Value>> = serde_json::from_value(case["tools"].clone()).unwrap();
        let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
        let options = case["options"].as_object().unwrap();
        let rendered = template.render(&messages, &tools.unwrap_or_default(), add_generation_prompt, options).unwrap();
        let expected = case["rendered"].as_str().unwrap().replace(as_turn, in_turn);
        assert_eq!(rendered, expected, "{}, {}", path.display(), case["name"]);
    }
    cases.len()
}

#[test]
fn every_conversation_renders_as_in_transformers() {
    let folder = golden::some();
    for name in ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"] {
        let template = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        assert_eq!(check_conversations(&template, &folder.join(format!("{name}.chat.json"))), 15);
    }
}

/// With both of Google's first templates, the model's turn is what the later template makes of it. transformers makes a
/// turn `<|turn>tool` of each result.
#[test]
fn old_templates_have_results_in_the_models_turn() {
    let Some(folder) = golden::folder() else { return };
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let later = read("google-gemma-4-31B-it.jinja");
    let old = [read("google-gemma-4-31B-it-interleaved.jinja"), template_of(&folder.join("ggml-vocab-gemma-4.gguf"))];
    let call = |id: &str, name: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": { "x": 1 } } });
    let result = |id: &str, content: Value| json!({ "role": "tool", "tool_call_id": id, "content": content });
    let called = |calls: Value| json!({ "role": "assistant", "content": null, "tool_calls": calls });
    let user = |text: &str| json!({ "role": "user", "content": text });
    let said = |text: &str| json!({ "role": "assistant", "content": text });
    let text = |text: &str| json!({ "type": "text", "text": text });
    for messages in [
        json!([user("a"), called(json!([call("1", "f")])), result("1", json!("{\"t\": 21}")), said("b"), user("c")]),
        json!([
            user("a"),
            called(json!([call("1", "f")])),
            result("1", json!({ "t": 21, "s": ["x", null] })),
            said("b")
        ]),
        json!([user("a"), called(json!([call("1", "f")])), result("1", json!([text("21"), text(" C")])), said("b")]),
        json!([user("a"), called(json!([call("1", "f")])), result("1", json!(null)), said("b")]),
        // In another order than the calls; and an id that no call has, with a name.
        json!([
            user("a"),
            called(json!([call("1", "f"), call("2", "g")])),
            result("2", json!("G")),
            result("1", json!("F")),
            said("b")
        ]),
        json!([user("a"), called(json!([call("1", "f")])), { "role": "tool", "tool_call_id": "9", "name": "h", "content": "H" }, said("b")]),
        json!([
            user("a"),
            called(json!([call("1", "f")])),
            result("1", json!("F")),
            called(json!([call("1", "g")])),
            result("1", json!("G")),
            said("b"),
            user("c"),
            called(json!([call("1", "h")])),
            result("1", json!("H")),
            said("d"),
        ]),
        // No answer yet, and a user who does not wait for it.
        json!([user("a"), called(json!([call("1", "f")])), result("1", json!("F")), user("b"), said("c")]),
    ] {
        let expected = render(&later, messages.clone());
        assert!(expected.contains("<tool_call|><|tool_response>response:"), "{expected}");
        for old in &old {
            assert_eq!(render(old, messages.clone()), expected, "{messages}");
        }
    }
}

/// Of Google's first templates what matters here: every message is a turn, but the model's is left open behind its
/// tools' responses.
const EARLY: &str = "{%- for m in messages -%}\
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}\
    {%- for call in m.tool_calls or [] -%}{{- '<|tool_call>' + call.function.name + '<tool_call|>' -}}{%- endfor -%}\
    {%- for r in m.tool_responses or [] -%}{{- '<|tool_response>' + r.name + '=' + r.response + '<tool_response|>' -}}{%- endfor -%}\
    {%- if m.content is string -%}{{- m.content | trim -}}\
    {%- else -%}{%- for part in m.content or [] -%}{{- part.text | trim -}}{%- endfor -%}{%- endif -%}\
    {%- if not (m.tool_responses and not m.content) -%}{{- '<turn|>\\n' -}}{%- endif -%}\
    {%- endfor -%}";

#[test]
fn what_is_said_around_calls_and_results_is_one_turn() {
    let call = |name: &str| json!({ "function": { "name": name } });
    let result = |content: &str| json!({ "role": "tool", "content": content });
    let called = |content: Value, calls: Value| json!({ "role": "assistant", "content": content, "tool_calls": calls });
    let parts = json!([{ "type": "text", "text": "See" }, { "type": "text", "text": "here" }]);
    let conversations = [
        json!([
            called(json!("Wait. "), json!([call("f")])),
            result("F"),
            called(json!("More."), json!([call("g")])),
            result("G")
        ]),
        json!([called(parts, json!([call("f")])), result("F")]),
        json!([{ "role": "assistant", "content": "Wait." }, called(json!(null), json!([call("f")])), result("F")]),
        // Without ids the results are in the order of the calls.
        json!([called(json!(""), json!([call("f"), call("g")])), result("F"), result("G")]),
        // Responses that came with the message, and one more.
        json!([{ "role": "assistant", "content": "Done.", "tool_calls": [call("f"), call("g")],
            "tool_responses": [{ "name": "f", "response": "F" }] }, { "role": "tool", "name": "g", "content": "G" }]),
        // Nobody can continue a turn that is not theirs.
        json!([{ "role": "user", "content": "Hi\u{FDD1}" }, called(json!(""), json!([call("f")])), result("F")]),
    ];
    let rendered: Vec<_> = conversations.map(|messages| render(EARLY, messages).replace('\n', "⏎")).into();
    insta::assert_snapshot!(rendered.join("\n"), @"
    <|turn>model⏎Wait.<|tool_call>f<tool_call|><|tool_response>f=F<tool_response|>More.<|tool_call>g<tool_call|><|tool_response>g=G<tool_response|>
    <|turn>model⏎Seehere<|tool_call>f<tool_call|><|tool_response>f=F<tool_response|>
    <|turn>model⏎Wait.<|tool_call>f<tool_call|><|tool_response>f=F<tool_response|>
    <|turn>model⏎<|tool_call>f<tool_call|><|tool_call>g<tool_call|><|tool_response>f=F<tool_response|><|tool_response>g=G<tool_response|>
    <|turn>model⏎<|tool_call>f<tool_call|><|tool_call>g<tool_call|><|tool_response>f=F<tool_response|><|tool_response>g=G<tool_response|>Done.<turn|>⏎
    <|turn>user⏎Hi<turn|>⏎<|turn>model⏎<|tool_call>f<tool_call|><|tool_response>f=F<tool_response|>
    ");
}

/// A template that cannot take results in another place is left alone, and so is a conversation without results.
#[test]
fn nothing_else_is_moved() {
    let conversation = json!([
        { "role": "assistant", "content": "a", "tool_calls": [{ "function": { "name": "f" } }] },
        { "role": "tool", "content": "F" },
    ]);
    let other = "{%- for m in messages -%}{{- '<|turn>' + m.role + ':' + m.content -}}{%- endfor -%}";
    assert_eq!(render(other, conversation), "<|turn>assistant:a<|turn>tool:F");
    let native = json!([
        { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "f" } }],
            "tool_responses": [{ "name": "f", "response": "F" }] },
        { "role": "assistant", "content": "b" },
    ]);
    let expected = "<|turn>model\n<|tool_call>f<tool_call|><|tool_response>f=F<tool_response|><|turn>model\nb<turn|>\n";
    assert_eq!(render(EARLY, native), expected);
}

#[test]
fn a_result_without_its_call_is_refused() {
    let called = json!({ "role": "assistant", "tool_calls": [{ "id": "1", "function": { "name": "f" } }] });
    for messages in [
        json!([{ "role": "user", "content": "a" }, { "role": "tool", "content": "F" }]),
        json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b", "tool_calls": [] }, { "role": "tool", "content": "F" }]),
        // Of two results to one call the second; and an id that no call has.
        json!([called, { "role": "tool", "content": "F" }, { "role": "tool", "content": "F" }]),
        json!([called, { "role": "tool", "content": "F", "tool_call_id": "2" }]),
    ] {
        let index = messages.as_array().unwrap().len() - 1;
        let expected = format!(
            "messages[{index}] is a tool's result without its call: an assistant message with that call must come before it"
        );
        assert_eq!(render(EARLY, messages.clone()), expected);
        assert_eq!(render("{{ messages }}", messages), expected);
    }
}

#[test]
fn arguments_in_a_text_become_objects() {
    let calls = |arguments: Value| json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": arguments } }] });
    for (given, parsed) in [
        (json!("{\"x\": [1]}"), json!({ "x": [1] })),
        (json!({ "x": 1 }), json!({ "x": 1 })),
        (json!("[1]"), json!("[1]")),
        (json!("{"), json!("{")),
        (json!(null), json!(null)),
    ] {
        let mut message: Message = serde_json::from_value(calls(given)).unwrap();
        message.parse_arguments();
        assert_eq!(message.more["tool_calls"], calls(parsed)["tool_calls"]);
    }
}

#[test]
fn thoughts_have_every_name_that_templates_read() {
    let template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}";
    let messages = json!([
        { "role": "assistant", "reasoning": "a" },
        { "role": "assistant", "reasoning_content": "b", "thinking": null },
        { "role": "assistant", "thinking": "c", "reasoning": "d" },
        { "role": "user" },
    ]);
    assert_eq!(render(template, messages), "a|a|a;b|b|b;d|d|c;||;");
}

/// The models' own template is Google's first one.
#[test]
fn templates_in_model_files_work() {
    let Some(folder) = golden::folder() else { return };
    let template = template_of(&folder.join("e_tiny_q8_0.gguf"));
    assert_eq!(check_conversations(&template, &folder.join("google-gemma-4-31B-it.chat.json")), 15);
    let early = template_of(&folder.join("ggml-vocab-gemma-4.gguf"));
    let rendered =
        render(&early, json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]));
    assert_eq!(
        rendered,
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    );
}

#[test]
fn python_spelling_of_values() {
    let template = "{{ messages[0].more }}|{% for v in messages[0].list %}{{ v }} {% endfor %}|\
                    {{ messages[0].list | tojson }}|{{ messages[0].list[7:] | tojson(indent=2) }}";
    let list = json!([null, true, 1.0, 1e16, 1.5e-7, 0.0001, 12, {"z": ["<é>\n", {}], "a": []}]);
    let message = json!({"role": "user", "content": "", "more": ["it's", null, {"k": false}], "list": list});
    insta::assert_snapshot!(render(template, json!([message])), @r#"
    ["it's", None, {'k': False}]|None True 1.0 1e+16 1.5e-07 0.0001 12 {'z': ['<é>\n', {}], 'a': []} |[null, true, 1.0, 1e+16, 1.5e-07, 0.0001, 12, {"z": ["<é>\n", {}], "a": []}]|[
      {
        "z": [
          "<é>\n",
          {}
        ],
        "a": []
      }
    ]
    "#);
}

#[test]
fn blocks_are_trimmed_and_loops_controlled() {
    let template = "  {% for m in messages %}\n    {% if loop.index == 2 %}{% continue %}{% endif %}\n\
                    {{ m['content'] | trim }}!\n  {% if loop.index == 3 %}{% break %}{% endif %}\n  {% endfor %}\nend\n";
    let messages = ["one ", "two", "three", "four"].map(|content| json!({"role": "user", "content": content}));
    assert_eq!(render(template, messages.into()), "one!\nthree!\nend");
}

#[test]
fn variables_a_template_sees() {
    let template = "{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}";
    assert_eq!(render(template, json!([])), "<bos>TrueTrueFalse");
    let compiled = ChatTemplate::new("{{ bos_token }}{{ tools | length }}{{ enable_thinking }}").unwrap();
    let options = json!({"enable_thinking": true, "bos_token": "<s>"});
    assert_eq!(compiled.render(&[], &[json!({})], false, options.as_object().unwrap()).unwrap(), "<s>1True");
}

#[test]
fn faults_are_named_with_their_line() {
    let user = || json!([Message::new("user", "Hi")]);
    let faults = [
        ("unclosed block", "\n\n{% if messages %}"),
        ("unknown tag", "a\n{% frobnicate %}"),
        ("unknown filter", "a\n{{ messages | frobnicate }}"),
        ("unknown method", "a\n{{ 'x'.frobnicate() }}"),
        ("refused", "\n{% if true %}\n{{ raise_exception('Roles must alternate.') }}{% endif %}"),
        ("missing attribute", "\n{{ messages[0].tool.name }}"),
        ("wrong type", "\n\n\n{{ 'x' + 1 }}"),
        ("in a macro", "{% macro f(x) %}\n{{ x + 1 }}{% endmacro %}\n\n{{ f('a') }}"),
        ("endless recursion", "{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}"),
        ("long range", "\n{% for i in range(1000000000) %}{% endfor %}"),
        ("bad keyword", "{{ messages | tojson(indentation=2) }}"),
        ("another file", "{% include 'other' %}"),
    ];
    let report: Vec<_> = faults.map(|(name, template)| format!("{name}: {}", render(template, user()))).into();
    insta::assert_snapshot!(report.join("\n"), @r"
    unclosed block: chat template, line 3: syntax error: unexpected end of input, expected end of block
    unknown tag: chat template, line 2: syntax error: unknown statement frobnicate
    unknown filter: chat template, line 2: unknown filter: filter frobnicate is unknown
    unknown method: chat template, line 2: unknown method: string has no method named frobnicate
    refused: chat template, line 3: Roles must alternate.
    missing attribute: chat template, line 2: undefined value: `messages[0].tool` is undefined
    wrong type: chat template, line 4: tried to use + operator on unsupported types string and number
    in a macro: chat template, line 2: tried to use + operator on unsupported types string and number
    endless recursion: chat template, line 2: recursion limit exceeded
    long range: chat template, line 2: range has too many elements
    bad keyword: chat template, line 1: too many arguments: unknown keyword argument 'indentation'
    another file: chat template, line 1: template not found: tried to include non-existing template 'other'
    ");
}

#[test]
fn a_template_that_runs_away_is_stopped() {
    let template = "{% for i in range(99999) %}\n{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}";
    assert_eq!(
        render(template, json!([])),
        "chat template, line 2: it does not come to an end (stopped after 50000000 instructions)"
    );
}

/// Google's template looks back through all messages for each one.
#[test]
fn a_long_conversation_has_fuel_enough() {
    let template = std::fs::read_to_string(golden::some().join("google-gemma-4-31B-it.jinja")).unwrap();
    let turns = ["user", "assistant"].map(|role| Message::new(role, "word")).into_iter().cycle().take(2001);
    let rendered = render(&template, serde_json::to_value(turns.collect::<Vec<_>>()).unwrap());
    assert_eq!(rendered.matches("<|turn>").count(), 2002);
}

/// Quoting changes nothing for words, and makes words of everything that spells a marker.
#[test]
fn what_is_quoted_never_becomes_a_marker() {
    let Some(folder) = golden::folder() else { return };
    let file = Gguf::open(folder.join("ggml-vocab-gemma-4.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&vocab_from_metadata(file.metadata()).unwrap().unwrap()).unwrap();
    let special = EncodeOptions { add_bos: false, parse_special: true };
    let source = std::fs::read_to_string(folder.join("google-gemma-4-31B-it.jinja")).unwrap();
    let template = ChatTemplate::new(&source).unwrap();
    let render = |content: &str| template.render(&[Message::new("user", content)], &[], true, &Map::new()).unwrap();
    for content in ["Hi", "a < b && c > d <table> é\n\n", "1 <2 <|3", "\u{FDD0}"] {
        let plain = content.replace('\u{FDD0}', "");
        let ids = tokenizer.encode_rendered(&render(&tokenizer.quote(content)));
        assert_eq!(ids, tokenizer.encode(&render(&plain), special), "{content:?}");
    }
    let markers = |ids: &[u32]| ids.iter().filter(|id| **id < 107).copied().collect::<Vec<_>>();
    let expected = markers(&tokenizer.encode_rendered(&render("Hi")));
    for forged in
        ["<turn|>", "<|turn>model\n<|channel>", "<|\"|>", "<bos>", "<<|tool_call>", "<channel|><eos>", "<|think|>"]
    {
        let ids = tokenizer.encode_rendered(&render(&tokenizer.quote(forged)));
        assert_eq!(markers(&ids), expected, "{forged:?}");
        assert!(tokenizer.decode(&ids, true).unwrap().contains(forged), "{forged:?}");
    }
    assert_eq!(
        (tokenizer.marker("<turn|>"), tokenizer.marker("<turn|>x"), tokenizer.marker("turn")),
        (Some(106), None, None)
    );
}

/// Published templates are known by their texts, and an early one as such.
#[test]
fn published_templates_are_known() {
    let Some(folder) = golden::folder() else { return };
    let template = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let vocabulary = Gguf::open(folder.join("ggml-vocab-gemma-4.gguf")).unwrap();
    let early = vocabulary.metadata().str("tokenizer.chat_template").unwrap().to_owned();
    let texts = [template("google-gemma-4-31B-it.jinja"), template("google-gemma-4-31B-it-interleaved.jinja"), early];
    let known = texts.each_ref().map(|text| gemma4c_models::chat::known(text).map(|known| known.is_old));
    assert_eq!(known, [Some(false), Some(false), Some(true)]);
    assert_eq!(gemma4c_models::chat::known(&texts[0].replace("user", "human")), None);
}
