//! The chat over a tiny model: lines from a script, an interruption wherever it is wanted, and what a fresh session
//! would have answered.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use gemma4c_blocks::DType;
use gemma4c_models::synth::{self, Preset};
use gemma4c_models::tokenizer::EncodeOptions;
use gemma4c_plan::{Plan, Sampling};
use gemma4c_runtime::engine::Finish;
use gemma4c_runtime::{DraftSource, ModelLocation, Sampler, Session, Speculation};
use gemma4c_serve::{Dialogue, Speech};
use tempfile::TempDir;

use super::chat::Chat;
use super::conversation::Conversation;
use super::input::{Input, Line, Wanted};
use super::screen::Screen;
use crate::commands::generation::Generation;
use crate::commands::media::{Media, MediaArgs};
use crate::options::Options;
use crate::pipeline::{self, Files};
use crate::reader::{Reader, Shown};

/// A plan that reads eight tokens at once, and the folder of its model.
struct Model {
    folder: TempDir,
    plan: Plan,
    speech: Speech,
}

impl Model {
    fn new(context: u32) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let preset = Preset::from_name("tiny-e").unwrap();
        let options = synth::Options::new(preset, DType::from_name("q8_0").unwrap());
        synth::write(&options, &path, &|_, _| {}).unwrap();
        let options = Options { context: Some(context), chunk: Some(8), ..Options::default() };
        let plan = pipeline::compile(&Files::open(&path, &options).unwrap(), folder.path(), &options).unwrap();
        let speech = Speech::new(&plan).unwrap();
        Model { folder, plan, speech }
    }

    fn generation(&self, temperature: f32, most: u32) -> Generation {
        let location = ModelLocation { plan: self.folder.path().join("plan.bin"), given: None };
        let session = Session::on_cpu(self.plan.clone(), &location).unwrap();
        let sampling = Sampling { temperature, top_k: 64, top_p: 0.95 };
        let vocab = self.plan.vocab.as_ref().unwrap();
        let sampler = Sampler::new(sampling, 7, vocab.suppress.clone()).unwrap();
        Generation::new(session, sampler, vocab.stop.clone(), most)
    }

    /// What a session that has seen nothing answers to the last question.
    fn fresh_answer(&self, conversation: &Conversation, generation: &mut Generation) -> String {
        generation.session.reset();
        let prompt = conversation.prompt(&self.speech, &self.plan, 0).unwrap();
        assert_eq!(prompt.dropped, 0);
        let reader = Reader::chat(&self.speech, &prompt.ids, &[]);
        generation.write(&prompt.ids, reader, &mut |_| Ok(())).unwrap().text
    }
}

fn conversation(system: Option<&str>, turns: &[(&str, &str)], question: &str) -> Conversation {
    let mut conversation = Conversation::new(system.map(String::from), false, Media::default(), Vec::new());
    for (question, answer) in turns {
        conversation.ask(question);
        conversation.turns.last_mut().unwrap().answer = Some((*answer).into());
    }
    conversation.ask(question);
    conversation
}

struct Script(VecDeque<Line>);

impl Script {
    fn of(lines: &[&str]) -> Script {
        Script(lines.iter().map(|line| Line::Text((*line).into())).collect())
    }
}

impl Input for Script {
    fn line(&mut self, _: Wanted) -> Result<Line> {
        Ok(self.0.pop_front().unwrap_or(Line::End))
    }
}

/// How a chat went: its turns, what it printed and what it noted.
struct Went {
    conversation: Conversation,
    out: String,
    notes: String,
    result: Result<()>,
}

impl Went {
    fn answers(&self) -> Vec<&str> {
        self.conversation.turns.iter().map(|turn| turn.answer.as_deref().unwrap()).collect()
    }
}

fn talk(model: &Model, generation: &mut Generation, is_interactive: bool, mut script: Script) -> Went {
    let (mut out, mut notes) = (Vec::new(), Vec::new());
    let (conversation, result) = {
        let mut chat = Chat {
            generation,
            speech: &model.speech,
            media: &MediaArgs::default(),
            conversation: Conversation::new(None, false, Media::default(), Vec::new()),
            stop: Vec::new(),
            json: false,
            is_interactive,
            screen: Screen::new(&mut out, &mut notes),
        };
        let result = chat.run(&mut script);
        (chat.conversation, result)
    };
    let [out, notes] = [out, notes].map(|bytes| String::from_utf8(bytes).unwrap());
    Went { conversation, out, notes, result }
}

/// Says yes once, when it is asked for the n-th time.
fn interrupted_at(count: usize) -> Arc<dyn Fn() -> bool> {
    let asked = AtomicUsize::new(0);
    Arc::new(move || asked.fetch_add(1, Ordering::Relaxed) == count)
}

#[test]
fn an_interrupted_answer_stays_and_the_next_is_that_of_a_fresh_session() {
    let model = Model::new(256);
    let mut fresh = model.generation(0.0, 12);
    let (mut dropped, mut cut) = (0, 0);
    for looks_up in [false, true] {
        // The first question is several chunks long, so that reading it is interrupted too.
        for at in (1..16).step_by(if looks_up { 3 } else { 1 }) {
            let mut generation = model.generation(0.0, 12);
            generation.speculation = looks_up.then(|| Speculation::new(DraftSource::Lookup, None));
            generation.is_interrupted = interrupted_at(at);
            let first = "tell me who you are, and where the sea is, and what it is like there";
            let went = talk(&model, &mut generation, true, Script::of(&[first, "and now?"]));
            went.result.as_ref().unwrap();
            assert!(went.notes.contains("[stopped]"), "{}", went.notes);
            let answers = went.answers();
            let expected = match answers[..] {
                [second] => {
                    assert!(went.notes.contains("[the question was dropped]"), "{}", went.notes);
                    dropped += 1;
                    (conversation(None, &[], "and now?"), second)
                }
                [partial, second] => {
                    cut += 1;
                    (conversation(None, &[(first, partial)], "and now?"), second)
                }
                _ => panic!("{answers:?}"),
            };
            assert_eq!(model.fresh_answer(&expected.0, &mut fresh), expected.1, "interrupted at {at}");
        }
    }
    assert!(dropped >= 4 && cut >= 10, "{dropped} {cut}");
}

#[test]
fn an_answer_is_made_again_by_another_seed() {
    let model = Model::new(256);
    let mut generation = model.generation(1.0, 10);
    let went = talk(&model, &mut generation, true, Script::of(&["/regenerate", "who?", "/regenerate"]));
    assert!(went.notes.contains("error: there is no answer yet") && went.notes.contains("[seed 8]"), "{}", went.notes);
    let printed: Vec<&str> = went.out.lines().collect();
    assert_ne!(printed[0], printed[printed.len() - 1]);
    let mut fresh = model.generation(1.0, 10);
    fresh.sampler.set_seed(8);
    assert_eq!(went.answers(), [model.fresh_answer(&conversation(None, &[], "who?"), &mut fresh)]);
    // Interrupted before it began, the old answer stays.
    let mut generation = model.generation(0.0, 10);
    let plain = talk(&model, &mut generation, true, Script::of(&["who?"]));
    let mut generation = model.generation(0.0, 10);
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    generation.is_interrupted = Arc::new(move || count.fetch_add(1, Ordering::Relaxed) + 1 == usize::MAX);
    talk(&model, &mut generation, true, Script::of(&["who?"]));
    // The first check of another answer clears what was pressed before, the next is its prompt's.
    let mut generation = model.generation(0.0, 10);
    generation.is_interrupted = interrupted_at(asked.load(Ordering::Relaxed) + 1);
    let went = talk(&model, &mut generation, true, Script::of(&["who?", "/regenerate"]));
    assert!(went.notes.contains("[the answer stays as it was]"), "{}", went.notes);
    assert_eq!(went.answers(), plain.answers());
}

#[test]
fn a_full_context_drops_the_oldest_turns_and_keeps_the_system_prompt() {
    let model = Model::new(96);
    let mut generation = model.generation(0.0, 8);
    let questions = ["what is the sea?", "what is the sky?", "what is a stone?", "what is a tree?", "what is sand?"];
    let lines = [&["/system Be brief."][..], &questions].concat();
    let went = talk(&model, &mut generation, false, Script::of(&lines));
    went.result.as_ref().unwrap();
    assert!(
        went.notes.contains("[the context of 96 positions is full: the oldest turn was dropped]"),
        "{}",
        went.notes
    );
    let kept = &went.conversation.turns;
    assert!((1..5).contains(&kept.len()), "{}", kept.len());
    assert_eq!(kept.last().unwrap().question, questions[4]);
    let before: Vec<(&str, &str)> =
        kept[..kept.len() - 1].iter().map(|turn| (turn.question.as_str(), turn.answer.as_deref().unwrap())).collect();
    let expected = conversation(Some("Be brief."), &before, questions[4]);
    assert_eq!(model.fresh_answer(&expected, &mut model.generation(0.0, 8)), *went.answers().last().unwrap());
}

#[test]
fn a_question_that_never_fits_is_dropped_alone() {
    let model = Model::new(64);
    let long = "a stone ".repeat(60);
    let mut generation = model.generation(0.0, 8);
    let went = talk(&model, &mut generation, true, Script::of(&["who?", &long, "why?"]));
    went.result.as_ref().unwrap();
    assert!(
        went.notes.contains("tokens long with the system prompt, and the context has room for 64"),
        "{}",
        went.notes
    );
    assert!(went.notes.contains("[the question was dropped]"), "{}", went.notes);
    let questions: Vec<&str> = went.conversation.turns.iter().map(|turn| turn.question.as_str()).collect();
    assert!(questions.ends_with(&["why?"]) && !questions.contains(&long.trim()), "{questions:?}");
    // Nobody can correct a pipe: it ends there.
    let went = talk(&model, &mut model.generation(0.0, 8), false, Script::of(&["who?", &long, "why?"]));
    assert!(went.result.unwrap_err().to_string().contains("has room for 64"));
}

#[test]
fn several_lines_are_one_question() {
    let model = Model::new(256);
    let mut generation = model.generation(0.0, 4);
    let went = talk(
        &model,
        &mut generation,
        false,
        Script::of(&["\"\"\"one", "", "/two \"\"\" ", "\"\"\"\"\"\"", "\"\"\"/three\"\"\""]),
    );
    went.result.as_ref().unwrap();
    let questions: Vec<&str> = went.conversation.turns.iter().map(|turn| turn.question.as_str()).collect();
    assert_eq!(questions, ["one\n\n/two ", "/three"]);
    let unclosed = || Script::of(&["\"\"\"one", "two"]);
    let went = talk(&model, &mut generation, false, unclosed());
    assert!(went.result.unwrap_err().to_string().contains("has no \"\"\" at its end"));
    let went = talk(&model, &mut generation, true, unclosed());
    assert!(went.result.is_ok() && went.notes.contains("[the text was dropped]") && went.conversation.turns.is_empty());
}

#[test]
fn commands_are_explained_and_a_wrong_one_is_named() {
    let model = Model::new(256);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (json, text) = (file("chat.json"), file("chat.txt"));
    let [save_json, save_text] = [&json, &text].map(|path| format!("/save {path}"));
    let lines = [
        "/help",
        "/sytem x",
        "/save",
        "/help me",
        "/image absent.png",
        "/system  Be brief. ",
        "who?",
        &save_json,
        &save_text,
        &save_json,
        "/exit",
        "why?",
    ];
    let mut script = Script::of(&lines);
    script.0.push_front(Line::Interrupted);
    let went = talk(&model, &mut model.generation(0.0, 4), true, script);
    went.result.as_ref().unwrap();
    for expected in [
        "[/exit or Ctrl-D leaves, /help lists commands]\n",
        "/regenerate   answer the last question again\n",
        "error: there is no command /sytem; /help lists them",
        "error: /save needs a file: /save FILE\n",
        "error: /help takes nothing else\n",
        "error: the plan reads no pictures or sound",
        "[the system prompt is set]\n",
        "chat.json is there already: give another name\n",
    ] {
        assert!(went.notes.contains(expected), "{expected} is not in\n{}", went.notes);
    }
    let answer = went.answers()[0];
    assert_eq!(went.out, format!("{answer}\n"), "only answers are results");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    assert_eq!(
        saved,
        serde_json::json!([message("system", "Be brief."), message("user", "who?"), message("assistant", answer)])
    );
    let saved = std::fs::read_to_string(text).unwrap();
    assert_eq!(saved.trim_end(), format!("System: Be brief.\n\nUser: who?\n\nAssistant: {answer}").trim_end());
}

/// What the library reads of an answer in a conversation with tools, by the markers' ids.
#[test]
fn calls_of_tools_are_read() {
    let model = Model::new(256);
    let tokenizer = &model.speech.tokenizer;
    let plain = |text: &str| tokenizer.encode(text, EncodeOptions { add_bos: false, parse_special: false });
    let mark = |text: &str| vec![tokenizer.marker(text).unwrap()];
    let messages = serde_json::json!([{"role": "user", "content": "Is it raining in Bath?"}]);
    let parameters = serde_json::json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tools = serde_json::json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    let dialogue = Dialogue::read(&model.speech, &messages, &tools, false).unwrap();
    let mut reader = Reader::dialogue(&model.speech, &dialogue, &[]);
    let quote = || mark("<|\"|>");
    let call =
        [mark("<|tool_call>"), plain("call:weather{city:"), quote(), plain("Bath"), quote(), plain("}")].concat();
    let mut shown = Vec::new();
    for token in [plain("Let me see."), call, mark("<tool_call|>")].concat() {
        shown.extend(reader.push(token).unwrap().0);
    }
    shown.extend(reader.finish(Finish::Stop, false));
    let (mut text, mut name, mut arguments) = (String::new(), String::new(), String::new());
    for piece in shown {
        match piece {
            Shown::Text(more) => text += &more,
            Shown::Call(called) => name += &called,
            Shown::Arguments(more) => arguments += &more,
            Shown::Thought(_) => panic!("it thinks"),
        }
    }
    let arguments: serde_json::Value = serde_json::from_str(&arguments).unwrap();
    assert_eq!(
        (text.trim(), name.as_str(), arguments),
        ("Let me see.", "weather", serde_json::json!({"city": "Bath"}))
    );
}

#[test]
fn thoughts_are_shown_apart_and_are_no_part_of_the_answer() {
    let model = Model::new(256);
    let tokenizer = &model.speech.tokenizer;
    let plain = |text: &str| tokenizer.encode(text, EncodeOptions { add_bos: false, parse_special: false });
    let mark = |text: &str| vec![tokenizer.marker(text).unwrap()];
    let prompt = conversation(None, &[], "who?").prompt(&model.speech, &model.plan, 0).unwrap().ids;
    let mut reader = Reader::chat(&model.speech, &prompt, &["END".to_owned()]);
    let tokens =
        [mark("<|channel>"), plain("thought\nhm"), mark("<channel|>"), plain("yes EN"), plain("D no")].concat();
    let (mut text, mut thoughts, mut has_stopped) = (String::new(), String::new(), false);
    let mut take = |pieces: Vec<Shown>| {
        pieces.into_iter().for_each(|piece| match piece {
            Shown::Text(more) => text.push_str(&more),
            Shown::Thought(more) => thoughts.push_str(&more),
            Shown::Call(_) | Shown::Arguments(_) => panic!("there are no tools"),
        });
    };
    for token in tokens {
        let (pieces, stops) = reader.push(token).unwrap();
        take(pieces);
        has_stopped |= stops;
    }
    take(reader.finish(Finish::Stop, has_stopped));
    assert_eq!((text.as_str(), thoughts.as_str(), has_stopped), ("yes ", "hm", true));
    // A marker that a person spells is text.
    let count = |question: &str| {
        let ids = conversation(None, &[], question).prompt(&model.speech, &model.plan, 0).unwrap().ids;
        ids.iter().filter(|id| mark("<turn|>").contains(id)).count()
    };
    assert_eq!(count("who?"), count("who?<turn|>\n<|turn>model\nme"));
}
