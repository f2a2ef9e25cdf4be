//! Whatever the tokens are cut into, the answer is the same; whatever is malformed, nothing is lost and arguments are
//! JSON.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Delta, Language, Mark, Piece, Start, Tool};

/// Text, and markers by their id.
#[derive(Clone, Debug)]
enum Item {
    Text(String),
    Mark(Mark),
}

use Item::Text;

const OPEN: Item = Item::Mark(Mark::CallOpen);
const CLOSE: Item = Item::Mark(Mark::CallClose);
const QUOTE: Item = Item::Mark(Mark::Quote);
const THINK: Item = Item::Mark(Mark::ChannelOpen);
const ANSWER: Item = Item::Mark(Mark::ChannelClose);

fn text(text: &str) -> Item {
    Text(text.into())
}

fn tools() -> Arc<[Tool]> {
    let parameters = json!({ "type": "object", "properties": {
        "city": { "type": "string" }, "days": { "type": "integer" }, "sure": { "type": ["boolean", "null"] },
        "list": { "type": "array", "items": { "type": "number" } },
        "name": { "type": "STRING" },
        "pair": { "prefixItems": [{ "type": "string" }], "items": { "type": "integer" } },
        "deep": { "type": "object", "properties": { "x": { "type": "string" } } },
    } });
    let tool = |name: &str| Tool { name: name.into(), parameters: parameters.clone() };
    [tool("weather"), tool("a-b.c:d")].into()
}

/// Reasoning, content and calls, put together.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

fn add(answer: &mut Answer, deltas: Vec<Delta>) {
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) => answer.reasoning.push_str(&text),
            Delta::Content(text) => answer.content.push_str(&text),
            Delta::Call { index, name } => {
                assert_eq!(index, answer.calls.len());
                answer.calls.push((name, String::new()));
            }
            Delta::Arguments { index, text } => answer.calls[index].1.push_str(&text),
        }
    }
}

/// Reads items whose text is cut where `cut` says so, after how many bytes of all text.
fn read(items: &[Item], start: Start, is_cut_off: bool, cut: &dyn Fn(usize) -> bool) -> Answer {
    let mut language = Language::new(start, tools());
    let (mut answer, mut deltas, mut at) = (Answer::default(), Vec::new(), 0);
    for item in items {
        match item {
            Item::Mark(mark) => language.push(Piece::Mark(*mark), &mut deltas),
            Text(text) => {
                let mut from = 0;
                for to in 1..=text.len() {
                    at += 1;
                    if to == text.len() || cut(at) {
                        language.push(Piece::Bytes(&text.as_bytes()[from..to]), &mut deltas);
                        from = to;
                    }
                }
            }
        }
        add(&mut answer, std::mem::take(&mut deltas));
    }
    language.finish(is_cut_off, &mut deltas);
    add(&mut answer, deltas);
    assert_eq!(language.calls(), answer.calls.len());
    answer
}

#[track_caller]
fn check(items: &[Item], reasoning: &str, content: &str, calls: &[(&str, Value)]) {
    for cut in [0, 1, 2, 3] {
        let answer = read(items, Start::Content, false, &|at| cut != 0 && at % cut == 0);
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), (reasoning, content), "{answer:?}");
        let found: Vec<(&str, Value)> =
            answer.calls.iter().map(|(name, json)| (name.as_str(), serde_json::from_str(json).expect(json))).collect();
        assert_eq!(found, calls);
    }
}

#[test]
fn thoughts_text_and_calls_are_told_apart() {
    check(&[THINK, text("thought\nHm."), ANSWER, text("Yes")], "Hm.", "Yes", &[]);
    check(&[THINK, text("thought\n"), ANSWER, text("Yes"), ANSWER], "", "Yes", &[]);
    check(&[THINK, ANSWER, THINK, text("thoughtful"), ANSWER, text("Yes")], "thoughtful", "Yes", &[]);
    let items = [
        text("Let me see."),
        OPEN,
        text("call:weather{city:"),
        QUOTE,
        text("\"Pa{r}is\",\n<b>"),
        QUOTE,
        text(",days:3,deep:{x:"),
        QUOTE,
        QUOTE,
        text("},list:[1,2.5e3,-1],sure:null}"),
        CLOSE,
        text("\n"),
        OPEN,
        text("call:a-b.c:d{}"),
        CLOSE,
    ];
    let first =
        json!({ "city": "\"Pa{r}is\",\n<b>", "days": 3, "deep": { "x": "" }, "list": [1, 2.5e3, -1], "sure": null });
    check(&items, "", "Let me see.", &[("weather", first), ("a-b.c:d", json!({}))]);
    // A call ends thinking.
    check(&[THINK, text("thought\nHm"), OPEN, text("call:weather{}"), CLOSE], "Hm", "", &[("weather", json!({}))]);
}

#[test]
fn sloppy_calls_are_understood() {
    let call = |arguments: &[Item], expected: Value| {
        let items = [&[OPEN, text("call:weather{")], arguments, &[text("}"), CLOSE]].concat();
        check(&items, "", "", &[("weather", expected)]);
    };
    call(&[text("city:\"Pa\\\"ris\", days:'3'")], json!({ "city": "Pa\"ris", "days": 3 }));
    call(&[text("city:`a`,sure:True")], json!({ "city": "a", "sure": true }));
    call(&[text("city:Paris"), QUOTE, text(",days:1")], json!({ "city": "Paris", "days": 1 }));
    call(&[text("city:12,days:"), QUOTE, text("42"), QUOTE], json!({ "city": "12", "days": 42 }));
    call(&[text("list:[\"1\",2,],days:108.")], json!({ "list": [1, 2], "days": 108 }));
    call(&[QUOTE, text("city"), QUOTE, text(":x,\"days\":2")], json!({ "city": "x", "days": 2 }));
    call(&[text("days:,city:x")], json!({ "days": null, "city": "x" }));
    call(&[QUOTE, text(" a:b "), QUOTE, text(":1,"), QUOTE, QUOTE, text(":2")], json!({ " a:b ": 1, "": 2 }));
    call(
        &[text("pair:["), QUOTE, text("42"), QUOTE, text(","), QUOTE, text("7"), QUOTE, text("]")],
        json!({ "pair": ["42", 7] }),
    );
    call(&[text("name:"), QUOTE, text("42"), QUOTE], json!({ "name": "42" }));
    call(&[text("other:[{a:1e5,b:[true]}]")], json!({ "other": [{ "a": 1e5, "b": [true] }] }));
    // Without the word, without the marker after a thought, and without an end.
    check(&[OPEN, text(":weather{days:1}"), CLOSE], "", "", &[("weather", json!({ "days": 1 }))]);
    let items = [THINK, text("thought\nA"), ANSWER, text("call:weather{days:1}"), CLOSE];
    check(&items, "A", "", &[("weather", json!({ "days": 1 }))]);
    check(
        &[OPEN, text("call:weather{list:[1,{a:"), QUOTE, text("x")],
        "",
        "",
        &[("weather", json!({ "list": [1, { "a": "x" }] }))],
    );
    check(&[OPEN, text("call:weather{city:"), CLOSE], "", "", &[("weather", json!({ "city": null }))]);
}

#[test]
fn what_is_no_call_is_content() {
    check(&[OPEN, text("hello"), CLOSE], "", "<|tool_call>hello", &[]);
    check(&[OPEN, text("what a {day}"), CLOSE], "", "<|tool_call>what a {day}", &[]);
    check(&[OPEN, text("call:weather{days:1]}"), CLOSE], "", "]}", &[("weather", json!({ "days": 1 }))]);
    check(&[OPEN, text("call:weather{}more"), CLOSE], "", "more", &[("weather", json!({}))]);
    check(&[text("call:weather{}")], "", "call:weather{}", &[]);
    check(&[THINK, ANSWER, text("call:whether{}")], "", "call:whether{}", &[]);
    let long = "x".repeat(400);
    check(&[OPEN, text(&long)], "", &format!("<|tool_call>{long}"), &[]);
    // Without tools a call is what it spells.
    let mut language = Language::new(Start::Content, Arc::default());
    let (mut deltas, mut answer) = (Vec::new(), Answer::default());
    for piece in [Piece::Mark(Mark::CallOpen), Piece::Bytes(b"call:f{}"), Piece::Mark(Mark::CallClose)] {
        language.push(piece, &mut deltas);
    }
    add(&mut answer, deltas);
    assert_eq!(answer.content, "<|tool_call>call:f{}<tool_call|>");
}

#[test]
fn a_call_that_was_cut_stays_as_it_is() {
    let items = [OPEN, text("call:weather{city:"), QUOTE, text("Par")];
    let answer = read(&items, Start::Content, true, &|_| false);
    assert_eq!(answer.calls, [("weather".to_owned(), "{\"city\":\"Par".to_owned())]);
    // Before the name is known there is nothing to tell, with the marker or without.
    for items in
        [vec![OPEN], vec![OPEN, text("call:")], vec![OPEN, text("call:weath")], vec![THINK, ANSWER, text("call:weath")]]
    {
        assert_eq!(read(&items, Start::Content, true, &|_| true), Answer::default(), "{items:?}");
    }
    assert_eq!(read(&[THINK, ANSWER, text("cal")], Start::Content, true, &|_| true).content, "cal");
    for (written, expected) in [
        ("days:12", "{\"days\":12"),
        ("days:1e999,ci", "{\"days\":1e999,\"ci"),
        ("days:1,ci", "{\"days\":1,\"ci"),
        ("days:'4", "{\"days\":\"4"),
    ] {
        let items = [OPEN, text("call:weather{"), text(written)];
        assert_eq!(read(&items, Start::Content, true, &|_| true).calls[0].1, expected);
    }
    assert_eq!(read(&[text("thought\nA")], Start::Label, true, &|_| true).reasoning, "A");
    assert_eq!(read(&[text("A"), ANSWER, text("B")], Start::Thinking, true, &|_| true).content, "B");
}

fn any_items() -> impl Strategy<Value = Vec<Item>> {
    let marks = prop::sample::select(vec![
        Mark::ChannelOpen,
        Mark::ChannelClose,
        Mark::CallOpen,
        Mark::CallOpen,
        Mark::CallClose,
        Mark::CallClose,
        Mark::Quote,
        Mark::Quote,
        Mark::ResponseOpen,
        Mark::Hidden,
    ]);
    let words = prop::sample::select(vec![
        "thought\n",
        "th",
        "call:",
        "call:weather{",
        "a-b.c:d",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "city:",
        "days:",
        "list:[",
        "12",
        "1e5",
        "true",
        "null",
        "\"",
        "'",
        "\\",
        "é",
        "日本",
        " ",
        "\n",
        "x y",
        "-",
        "deep:{x:",
    ]);
    let item = prop_oneof![marks.prop_map(Item::Mark), words.prop_map(text)];
    prop::collection::vec(item, 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Malformed calls included: every way to cut the tokens gives one answer, in which arguments are JSON and no text
    /// is lost.
    #[test]
    fn every_split_gives_the_same_answer(items in any_items(), cuts in any::<u64>(), is_cut_off in any::<bool>()) {
        let whole = read(&items, Start::Content, is_cut_off, &|_| false);
        let split = read(&items, Start::Content, is_cut_off, &|at| cuts >> (at % 64) & 1 == 1);
        prop_assert_eq!(&whole, &split);
        prop_assert_eq!(&whole, &read(&items, Start::Content, is_cut_off, &|_| true));
        if !is_cut_off {
            for (_, arguments) in &whole.calls {
                prop_assert!(serde_json::from_str::<Value>(arguments).is_ok_and(|json| json.is_object()), "{arguments}");
            }
        }
        // A call that is cut before its name is known is left out: nobody can say what it would have been.
        let all: String = [&whole.reasoning, &whole.content].into_iter().cloned()
            .chain(whole.calls.iter().map(|(name, arguments)| format!("{name}{arguments}"))).collect();
        for word in ["é", "日本", "x y"] {
            let given = items.iter().filter(|item| matches!(item, Text(text) if text == word)).count();
            prop_assert!(is_cut_off || all.matches(word).count() >= given, "{word} in {whole:?}");
        }
    }
}
