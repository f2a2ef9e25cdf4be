//! The library as another program uses it: its answers are the command line's, and its errors say which they are. What
//! each item does by itself is in the examples of its documentation, which are tests too.

#[allow(dead_code, reason = "its `main`")]
#[path = "../../examples/generate.rs"]
mod example;

use crate::common::{Place, ids};
use gemma4c::{
    Completion, Conversation, Device, Error, Finish, Interrupt, Message, Model, Sampling, demo_drafter, demo_model,
};
use serde_json::{Value, json};

/// The model of the demo, compiled in memory for the CPU.
fn demo(place: &Place) -> Model {
    Model::compile(demo_model(place.path("")).unwrap()).cpu().context(512).open().unwrap()
}

#[test]
fn the_example_writes_what_the_command_line_writes() {
    let place = Place::new();
    demo_model(place.path("")).unwrap();
    let run = |arguments: &[&str]| {
        let mut out = Vec::new();
        example::run(arguments.iter().map(|argument| argument.to_string()), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let line = "run austen.gguf --device cpu --ctx 2048 --temp 0.7 --seed 1 -n 40 -p";
    let said =
        |text: &str| place.command(&format!("{line} '{text}'")).env("GEMMA4C_CACHE", place.path("cache")).output();
    let said = |text: &str| String::from_utf8(said(text).unwrap().stdout).unwrap();
    assert_eq!(run(&[]), format!("She was{}", said("She was")));
    let model = place.path("austen.gguf");
    assert_eq!(run(&["The carriage", model.to_str().unwrap()]), format!("The carriage{}", said("The carriage")));
}

#[test]
fn an_answer_is_the_same_alone_in_a_batch_and_in_pieces() {
    let place = Place::new();
    let mut model = demo(&place);
    let prompts =
        ["The carriage", "Her sister was", "\"My dear Emma,", "It was", "No", "Mr. Elton", "", "And", "She", "He"];
    let sampling = Sampling::default().temperature(1.0).seed(5).max_tokens(20).stop(".");
    let many = model.generate_many(prompts, &sampling).unwrap();
    assert!(many.iter().any(|answer| answer.finish == Finish::Stop), "a stop string comes");
    assert!(many.iter().any(|answer| answer.finish == Finish::Length), "or the limit does");
    for (prompt, answer) in prompts.iter().zip(&many) {
        assert_eq!(model.generate(*prompt, &sampling).unwrap(), *answer, "{prompt}");
        assert!(!answer.text.contains('.') && answer.prompt_tokens == model.tokenize(prompt).unwrap().len());
        // Another answer that nobody reads to its end is none of this one's business.
        let mut left = model.stream("It is a truth", &sampling).unwrap();
        assert!(left.next().is_some());
        drop(left);
        let mut stream = model.stream(*prompt, &sampling).unwrap();
        let pieces: Vec<String> = stream.by_ref().map(Result::unwrap).collect();
        assert_eq!(pieces.concat(), answer.text);
        assert!(pieces.len() > 1 || answer.tokens.len() < 4, "{pieces:?}");
        assert_eq!(stream.complete().unwrap(), *answer);
    }
    let [one, other] = [0, 1].map(|_| model.generate("It was", &Sampling::default().max_tokens(30)).unwrap());
    assert_ne!(one, other, "without a seed each answer has its own");
}

#[test]
fn logits_are_those_of_the_command_line() {
    let place = Place::new();
    let mut model = demo(&place);
    let tokens = model.tokenize("She was not at all").unwrap();
    let rows = model.logits(&tokens).unwrap();
    Model::compile(place.path("austen.gguf")).cpu().context(512).write(place.path("plan.bin")).unwrap();
    let expected = place.logits("plan.bin", &format!("--all --tokens {}", ids(&tokens)));
    let expected = expected.get("logits");
    assert_eq!(rows.len(), tokens.len());
    for (at, row) in rows.iter().enumerate() {
        assert!(row.iter().map(|x| x.to_bits()).eq(expected.row(at).iter().map(|x| x.to_bits())), "row {at}");
    }
    assert!(model.logits(&tokens).unwrap() == rows, "and the same every time");
}

#[test]
fn a_chat_is_that_of_the_command_line() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    Model::compile(place.path("model.gguf")).cpu().context(256).write(place.path("plan.bin")).unwrap();
    let mut model = Model::open_on(place.path("plan.bin"), Device::Cpu).unwrap();
    let line = "run plan.bin --seed 3 -n 12 --chat --system 'Be <turn|> brief.' -p 'Who wrote Emma?' --json";
    let expected: serde_json::Value = serde_json::from_str(&place.ok(line)).unwrap();
    let messages = vec![Message::system("Be <turn|> brief."), Message::user("Who wrote Emma?")];
    let shown = model.format_chat(&messages).unwrap();
    assert!(shown.contains("Who wrote Emma?") && shown.contains("<|turn>"), "{shown}");
    let Completion { text, tokens, finish, prompt_tokens, .. } =
        model.generate(messages, &Sampling::default().seed(3).max_tokens(12)).unwrap();
    assert_eq!(serde_json::json!(tokens), expected["tokens"]);
    assert_eq!(
        (text.as_str(), finish.name()),
        (expected["text"].as_str().unwrap(), expected["finish_reason"].as_str().unwrap())
    );
    assert_eq!(prompt_tokens as u64, expected["prompt_tokens"].as_u64().unwrap());
}

/// The same conversation in JSON is the same prompt. What comes of tools is in `commands/run/tests.rs`.
#[test]
fn a_conversation_in_json_is_that_of_messages() {
    let place = Place::new();
    place.ok("synth tiny-e -q q8_0 -o model.gguf");
    let mut model = Model::compile(place.path("model.gguf")).cpu().context(512).open().unwrap();
    let sampling = Sampling::default().seed(3).max_tokens(12);
    let messages = vec![Message::system("Be <turn|> brief."), Message::user("Who wrote Emma?")];
    let expected = model.generate(messages, &sampling).unwrap();
    let messages =
        json!([{"role": "system", "content": "Be <turn|> brief."}, {"role": "user", "content": "Who wrote Emma?"}]);
    let plain = Conversation { messages: messages.clone(), ..Conversation::default() };
    assert_eq!(model.generate(plain, &sampling).unwrap(), expected);
    let nameless = Conversation { messages, tools: json!([{"function": {}}]), thinking: false };
    let refused = model.generate(nameless, &sampling).unwrap_err();
    assert!(
        matches!(&refused, Error::Dialogue(_)) && refused.to_string().starts_with("tools[0].function.name must be")
    );
}

#[test]
fn perplexity_is_that_of_the_command_line() {
    let place = Place::new();
    let mut model = demo(&place);
    Model::compile(place.path("austen.gguf")).cpu().context(512).write(place.path("plan.bin")).unwrap();
    let text = "It was not in her power to be of any use, and she knew that she could not be so. ".repeat(6);
    place.write("prose.txt", &text);
    let line = "perplexity plan.bin --file prose.txt --window 24 -o json";
    let expected: Value = serde_json::from_str(&place.ok(line)).unwrap();
    let found = model.perplexity(&text, 24).unwrap();
    assert_eq!(json!(found.nll), expected["nll"]);
    assert!(found.tokens >= 22);
    assert!(matches!(model.perplexity(&text, 2), Err(Error::Option(_))));
    assert!(matches!(model.perplexity("Emma", 24), Err(Error::Option(_))));
}

/// A plan, a model's file, and what may be said of each.
#[test]
fn whatever_names_a_model_is_opened() {
    let place = Place::new();
    let gguf = demo_model(place.path("")).unwrap();
    let drafter = demo_drafter(place.path("")).unwrap();
    let greedy = Sampling::greedy().max_tokens(12);
    Model::compile(&gguf).cpu().context(512).drafter(&drafter).write(place.path("plan.bin")).unwrap();
    let expected = demo(&place).generate("She was", &greedy).unwrap();
    let find = |name: &str| Model::find(place.path(name)).device(Device::Cpu).quiet();
    for opener in [
        find("plan.bin"),
        find("plan.bin").undrafted().sequences(3),
        find("austen.gguf").context(512),
        find("austen.gguf").drafter(&drafter),
    ] {
        assert_eq!(opener.open().unwrap().generate("She was", &greedy).unwrap(), expected);
    }
    assert_eq!(find("plan.bin").sequences(3).open().unwrap().sequences(), 3);
    let said = |opener: gemma4c::Opener| opener.open().unwrap_err().to_string();
    assert!(said(find("plan.bin").context(64)).starts_with("context is for a GGUF model; "));
    assert!(said(find("plan.bin").drafter(&drafter)).starts_with("drafter is for a GGUF model; "));
    assert!(said(find("plan.bin").sequences(0)).starts_with("sequences 0: "));
    assert!(said(find("austen.gguf").memory(1.5)).starts_with("memory 1.5: "));
    assert!(matches!(find("nothing").open(), Err(Error::Read { .. })));
}

/// An answer that somebody ended leaves nothing in the engine, in whatever way it was asked for.
#[test]
fn an_interrupt_ends_what_is_computed_and_nothing_else() {
    let place = Place::new();
    let mut model = demo(&place);
    let sampling = Sampling::greedy().max_tokens(40);
    let expected = model.generate("She was", &sampling).unwrap();
    let set = Interrupt::default();
    set.set();
    model.interrupt_by(set);
    let tokens = model.tokenize("She was").unwrap();
    let interrupted = |error: Option<Error>| assert!(matches!(error, Some(Error::Interrupted)), "{error:?}");
    interrupted(model.generate("She was", &sampling).err());
    interrupted(model.generate_many(["She was", "It is", "No"], &sampling).err());
    interrupted(model.logits(&tokens).err());
    interrupted(model.hidden_states(&tokens).err());
    model.interrupt_by(Interrupt::default());
    assert_eq!(model.generate("She was", &sampling).unwrap(), expected);
}

#[test]
fn each_fault_has_its_type_and_names_what_it_is_about() {
    let place = Place::new();
    let mut model = demo(&place);
    let gguf = place.path("austen.gguf");
    let said = |error: Error| error.to_string();
    let read = |error: &Error| matches!(error, Error::Read { path, .. } if path.ends_with("nothing"));
    assert!(read(&Model::open(place.path("nothing")).unwrap_err()));
    assert!(matches!(Model::compile(place.path("nothing")).open().unwrap_err(), Error::Gguf(_)));
    let refused = Model::open(&gguf).unwrap_err();
    assert!(matches!(refused, Error::WrongFile { .. }));
    assert!(said(refused).contains("is a model, not a plan"));
    let refused = Model::compile(&gguf).cpu().context(1 << 20).open().unwrap_err();
    assert!(matches!(&refused, Error::Option(_)) && said(refused).contains("a context of 1048576 is out of range"));
    let refused = Model::compile(&gguf).gpu("abacus").open().unwrap_err();
    assert!(matches!(&refused, Error::Option(_)) && said(refused).contains("abacus"));
    let refused = Model::compile(&gguf).cpu().drafter(&gguf).open().unwrap_err();
    assert!(matches!(&refused, Error::In { path, source } if *path == gguf && matches!(**source, Error::Drafter(_))));
    let refused = Model::compile(&gguf).cpu().write(place.path("nowhere/plan.bin")).unwrap_err();
    assert!(matches!(&refused, Error::Read { .. } | Error::Write { .. }), "{refused}");
    let long = "once more ".repeat(400);
    let refused = model.generate_many(["He", long.as_str()], &Sampling::greedy()).unwrap_err();
    assert!(matches!(&refused, Error::Request(_)) && said(refused).contains("the context has room for 512"));
    let refused = model.generate("He", &Sampling::default().temperature(3.0)).unwrap_err();
    assert!(said(refused).contains("a temperature of 3"));
    assert!(matches!(model.logits(&[1 << 30]), Err(Error::Request(_))));
    assert!(matches!(model.detokenize(&[1 << 30]), Err(Error::Tokenizer(_))));
    // Nothing of this stays behind.
    assert_eq!(model.generate("He", &Sampling::greedy().max_tokens(3)).unwrap().tokens.len(), 3);
}
