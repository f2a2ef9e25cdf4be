//! Keeps an answer to its form: free while the model thinks, then by a grammar; calls of tools always by theirs.

use std::sync::Arc;

use gemma4c_runtime::engine::Mask;

use crate::follow::Follower;
use crate::language::Mark;
use crate::rules::Guide;
use crate::speech::Speech;

/// The markers that an answer's course depends on, by id.
#[derive(Clone, Debug)]
pub struct Ids {
    call_open: Option<u32>,
    call_close: Option<u32>,
    channel_open: Option<u32>,
    channel_close: Option<u32>,
    response_open: Option<u32>,
    stop: Arc<[u32]>,
}

impl Ids {
    pub fn new(speech: &Speech) -> Ids {
        Ids {
            call_open: speech.id(Mark::CallOpen),
            call_close: speech.id(Mark::CallClose),
            channel_open: speech.id(Mark::ChannelOpen),
            channel_close: speech.id(Mark::ChannelClose),
            response_open: speech.id(Mark::ResponseOpen),
            stop: Arc::clone(&speech.stop),
        }
    }
}

/// What is asked of calls.
pub struct Calls {
    /// At the beginning of a call, right after its marker.
    pub follower: Follower,
    /// The functions that may be called.
    pub names: Arc<[String]>,
    /// The answer must be a call.
    pub must: bool,
    /// More than one may come.
    pub parallel: bool,
}

enum Stage {
    Thinking,
    /// Whether anything of the answer has come.
    Answer {
        begun: bool,
    },
    Call(Box<Follower>),
    AfterCall,
}

/// The guide of one sequence.
pub struct Guided {
    pub ids: Ids,
    /// The form of text that is no call.
    pub answer: Option<Follower>,
    pub calls: Option<Calls>,
    /// Calls are not wanted, though there are tools.
    pub forbids_calls: bool,
    /// A channel may come before the answer.
    pub may_think: bool,
    /// Tokens of thoughts, after which their channel is closed.
    pub most_thoughts: Option<u32>,
    /// Those that have come.
    thoughts: u32,
    /// Text right after a channel, where models forget the marker of a call.
    after_channel: Option<String>,
    stage: Stage,
}

impl Guided {
    pub fn new(ids: Ids, is_thinking: bool) -> Guided {
        let stage = if is_thinking { Stage::Thinking } else { Stage::Answer { begun: false } };
        Guided {
            ids,
            answer: None,
            calls: None,
            forbids_calls: false,
            may_think: false,
            most_thoughts: None,
            thoughts: 0,
            after_channel: None,
            stage,
        }
    }

    /// `call:` and the name of a tool, right after a channel, is a call without its marker: from there on it follows
    /// the grammar of one.
    fn note_unmarked(&mut self, token: u32) {
        let (Some(calls), Some(mut text)) = (&self.calls, self.after_channel.take()) else { return };
        text.push_str(&calls.follower.text(token));
        let written = text.trim_start();
        let begins = |name: &String| {
            let head = format!("call:{name}{{");
            head.starts_with(written) || written.starts_with(&head)
        };
        if !written.is_empty() && !calls.names.iter().any(begins) {
            return;
        }
        if written.len() > "call:".len() {
            let mut follower = calls.follower.copy();
            follower.consume_text(written);
            self.stage = Stage::Call(Box::new(follower));
        } else {
            self.after_channel = Some(text);
        }
    }

    /// Whether there have been as many thoughts as there may be.
    fn has_thought_enough(&self) -> bool {
        self.ids.channel_close.is_some() && self.most_thoughts.is_some_and(|most| self.thoughts >= most)
    }

    /// What may come beside the text's own form.
    fn openings(&self, begun: bool) -> Vec<u32> {
        let call = self.ids.call_open.filter(|_| self.calls.is_some() && !begun);
        let channel = self.ids.channel_open.filter(|_| self.may_think && !begun && !self.has_thought_enough());
        call.into_iter().chain(channel).collect()
    }
}

/// Allows these tokens alone.
fn allow_only(allowed: &mut Mask, tokens: impl IntoIterator<Item = u32>) {
    allowed.clear();
    tokens.into_iter().for_each(|token| allowed.allow(token));
}

impl Guide for Guided {
    fn is_active(&self) -> bool {
        match &self.stage {
            Stage::Thinking => self.has_thought_enough(),
            Stage::Answer { .. } => {
                self.forbids_calls || self.answer.is_some() || self.calls.as_ref().is_some_and(|calls| calls.must)
            }
            Stage::Call(_) => true,
            Stage::AfterCall => {
                let is_free = self.calls.as_ref().is_none_or(|calls| calls.parallel && !calls.must);
                !is_free || self.answer.is_some()
            }
        }
    }

    fn restrict(&mut self, allowed: &mut Mask) {
        match &mut self.stage {
            Stage::Thinking => allow_only(allowed, self.ids.channel_close),
            Stage::Call(follower) => follower.restrict(&[], allowed),
            Stage::AfterCall => {
                let may_call = self.calls.as_ref().is_some_and(|calls| calls.parallel);
                let call = self.ids.call_open.filter(|_| may_call);
                // The token that says: run the tools now. Some vocabularies end by another.
                let run = self.ids.response_open.filter(|id| self.ids.stop.contains(id));
                let ends = run.map_or_else(|| self.ids.stop.to_vec(), |run| vec![run]);
                allow_only(allowed, call.into_iter().chain(ends));
            }
            Stage::Answer { begun } => {
                let begun = *begun;
                let openings = self.openings(begun);
                if self.calls.as_ref().is_some_and(|calls| calls.must) {
                    return allow_only(allowed, openings);
                }
                if let Some(follower) = &mut self.answer {
                    return follower.restrict(&openings, allowed);
                }
                if let Some(call) = self.ids.call_open.filter(|_| self.forbids_calls) {
                    allowed.forbid(call);
                }
            }
        }
    }

    fn has_form(&self) -> bool {
        self.answer.is_some() || self.calls.is_some() || self.forbids_calls
    }

    fn picked(&mut self, token: u32) {
        let opens_call = Some(token) == self.ids.call_open;
        match &mut self.stage {
            Stage::Call(follower) => {
                if Some(token) == self.ids.call_close {
                    self.stage = Stage::AfterCall;
                } else {
                    follower.consume(token);
                }
            }
            _ if opens_call && self.calls.is_some() => {
                let follower = self.calls.as_ref().map(|calls| Box::new(calls.follower.copy()));
                self.stage = follower.map_or(Stage::AfterCall, Stage::Call);
            }
            Stage::Thinking => {
                self.thoughts = self.thoughts.saturating_add(1);
                if Some(token) == self.ids.channel_close {
                    self.may_think = false;
                    self.after_channel = Some(String::new());
                    self.stage = Stage::Answer { begun: false };
                }
            }
            Stage::Answer { begun } if Some(token) == self.ids.channel_open && (self.answer.is_none() || !*begun) => {
                self.stage = Stage::Thinking;
            }
            Stage::Answer { begun } => {
                *begun = true;
                if let Some(follower) = &mut self.answer {
                    follower.consume(token);
                } else {
                    self.note_unmarked(token);
                }
            }
            Stage::AfterCall => {
                let is_channel = Some(token) == self.ids.channel_open;
                self.stage = if is_channel { Stage::Thinking } else { Stage::Answer { begun: true } };
            }
        }
    }

    fn copy(&self) -> Box<dyn Guide> {
        let calls = self.calls.as_ref().map(|calls| {
            let (follower, names) = (calls.follower.copy(), Arc::clone(&calls.names));
            Calls { follower, names, ..*calls }
        });
        let stage = match &self.stage {
            Stage::Thinking => Stage::Thinking,
            Stage::Answer { begun } => Stage::Answer { begun: *begun },
            Stage::Call(follower) => Stage::Call(Box::new(follower.copy())),
            Stage::AfterCall => Stage::AfterCall,
        };
        let (ids, answer) = (self.ids.clone(), self.answer.as_ref().map(Follower::copy));
        let after_channel = self.after_channel.clone();
        let Guided { forbids_calls, may_think, most_thoughts, thoughts, .. } = *self;
        Box::new(Guided { ids, answer, calls, forbids_calls, may_think, most_thoughts, thoughts, after_channel, stage })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::grammar::Grammars;
    use crate::language::Tool;
    use crate::speech::tests::bytes_and_markers;
    use crate::structure::Structure;
    use crate::tools::Declared;

    struct Course {
        speech: Arc<Speech>,
        grammars: Grammars,
    }

    impl Course {
        fn new() -> Course {
            let speech = Arc::new(bytes_and_markers());
            Course { grammars: Grammars::new(Arc::clone(&speech)), speech }
        }

        fn id(&self, mark: Mark) -> u32 {
            self.speech.id(mark).unwrap()
        }

        fn guided(&self) -> Guided {
            Guided::new(Ids::new(&self.speech), false)
        }

        fn choice(&self, words: &[&str]) -> Option<Follower> {
            let words = words.iter().map(|word| word.to_string()).collect();
            Some(self.grammars.structure(&Structure::Choice(words)).unwrap())
        }

        fn calls(&self, must: bool, parallel: bool) -> Option<Calls> {
            let parameters =
                json!({ "type": "object", "properties": { "x": { "type": "boolean" } }, "required": ["x"] });
            let tool = Tool { name: "f".into(), parameters };
            let tool = Declared { tool, declaration: json!({}), param: "tools".into() };
            let follower = self.grammars.call(&[&tool], self.id(Mark::Quote), self.id(Mark::CallClose)).unwrap();
            Some(Calls { follower, names: ["f".to_owned()].into(), must, parallel })
        }

        /// What may come next; nothing said is anything.
        fn allowed(&self, guided: &mut Guided) -> Option<Vec<u32>> {
            let mut allowed = Mask::all(self.speech.vocab_size);
            guided.is_active().then(|| {
                guided.restrict(&mut allowed);
                (0..self.speech.vocab_size).filter(|id| allowed.allows(*id)).collect()
            })
        }

        fn say(&self, guided: &mut Guided, text: &str) {
            for byte in text.bytes() {
                let allowed = self.allowed(guided);
                assert!(allowed.is_none_or(|allowed| allowed.contains(&byte.into())), "{} in {text}", byte as char);
                guided.picked(byte.into());
            }
        }
    }

    #[test]
    fn a_form_begins_after_thoughts_and_ends_the_answer() {
        let course = Course::new();
        let [open, close] = [Mark::ChannelOpen, Mark::ChannelClose].map(|mark| course.id(mark));
        let mut guided = Guided { answer: course.choice(&["yes", "no"]), may_think: true, ..course.guided() };
        assert_eq!(course.allowed(&mut guided), Some(vec![b'n'.into(), b'y'.into(), open]));
        guided.picked(open);
        assert_eq!(course.allowed(&mut guided), None);
        course.say(&mut guided, "thought\nmaybe");
        guided.picked(close);
        assert_eq!(course.allowed(&mut guided), Some(vec![b'n'.into(), b'y'.into()]));
        let mut other = guided.copy();
        course.say(&mut guided, "yes");
        assert_eq!(course.allowed(&mut guided), Some(course.speech.stop.to_vec()));
        // A copy goes its own way.
        other.picked(b'n'.into());
        let mut allowed = Mask::all(course.speech.vocab_size);
        other.restrict(&mut allowed);
        assert!(allowed.allows(b'o'.into()) && !allowed.allows(b'e'.into()));
    }

    #[test]
    fn thoughts_end_when_there_were_enough() {
        let course = Course::new();
        let [open, close] = [Mark::ChannelOpen, Mark::ChannelClose].map(|mark| course.id(mark));
        let mut guided =
            Guided { answer: course.choice(&["a"]), may_think: true, most_thoughts: Some(3), ..course.guided() };
        assert!(course.allowed(&mut guided).unwrap().contains(&open));
        guided.picked(open);
        course.say(&mut guided, "hm");
        assert_eq!(course.allowed(&mut guided), None);
        course.say(&mut guided, "m");
        assert_eq!(course.allowed(&mut guided), Some(vec![close]));
        guided.picked(close);
        assert_eq!(course.allowed(&mut guided), Some(vec![b'a'.into()]));
        // Of an answer without a form: a channel that is opened again is closed again.
        let mut guided = Guided { most_thoughts: Some(0), ..course.guided() };
        assert_eq!(course.allowed(&mut guided), None);
        guided.picked(open);
        assert_eq!(course.allowed(&mut guided), Some(vec![close]));
        assert!(!guided.has_form());
    }

    #[test]
    fn calls_are_free_until_they_begin() {
        let course = Course::new();
        let [call, end, run] = [Mark::CallOpen, Mark::CallClose, Mark::ResponseOpen].map(|mark| course.id(mark));
        let mut guided = Guided { calls: course.calls(false, false), ..course.guided() };
        course.say(&mut guided, "Let me see");
        assert_eq!(course.allowed(&mut guided), None);
        guided.picked(call);
        assert_eq!(course.allowed(&mut guided), Some(vec![b'c'.into()]));
        course.say(&mut guided, "call:f{x:true}");
        assert_eq!(course.allowed(&mut guided), Some(vec![end]));
        guided.picked(end);
        assert_eq!(course.allowed(&mut guided), Some(vec![run]));
        // Several, and at least one.
        let mut guided = Guided { calls: course.calls(true, true), may_think: true, ..course.guided() };
        let channel = course.id(Mark::ChannelOpen);
        assert_eq!(course.allowed(&mut guided), Some(vec![channel, call].into_iter().collect()));
        guided.picked(call);
        course.say(&mut guided, "call:f{x:false}");
        guided.picked(end);
        assert_eq!(course.allowed(&mut guided), Some(vec![call, run]));
    }

    #[test]
    fn calls_that_are_not_wanted_do_not_begin() {
        let course = Course::new();
        let mut guided = Guided { forbids_calls: true, ..course.guided() };
        let allowed = course.allowed(&mut guided).unwrap();
        assert!(!allowed.contains(&course.id(Mark::CallOpen)) && allowed.len() as u32 == course.speech.vocab_size - 1);
        let mut guided = Guided { answer: course.choice(&["a"]), calls: course.calls(false, true), ..course.guided() };
        assert_eq!(course.allowed(&mut guided), Some(vec![b'a'.into(), course.id(Mark::CallOpen)]));
    }

    #[test]
    fn a_call_without_its_marker_follows_the_grammar_too() {
        let course = Course::new();
        let [open, close] = [Mark::ChannelOpen, Mark::ChannelClose].map(|mark| course.id(mark));
        let after_channel = || {
            let mut guided = Guided { calls: course.calls(false, true), may_think: true, ..course.guided() };
            [open, close].into_iter().for_each(|token| guided.picked(token));
            guided
        };
        let mut guided = after_channel();
        course.say(&mut guided, "\ncall:");
        assert_eq!(course.allowed(&mut guided), None);
        course.say(&mut guided, "f");
        assert_eq!(course.allowed(&mut guided), Some(vec![b'{'.into()]));
        course.say(&mut guided, "{x:true}");
        assert_eq!(course.allowed(&mut guided), Some(vec![course.id(Mark::CallClose)]));
        // Other text is free.
        let mut guided = after_channel();
        course.say(&mut guided, "call: me");
        assert_eq!(course.allowed(&mut guided), None);
    }
}
