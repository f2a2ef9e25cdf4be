//! Keeps an answer to its form: free while the model thinks, then by a grammar; calls of tools always by theirs.

use std::sync::Arc;

use llguidance::Matcher;

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
    pub matcher: Matcher,
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
    Call(Box<Matcher>),
    AfterCall,
}

/// The guide of one sequence.
pub struct Guided {
    pub ids: Ids,
    /// The form of text that is no call.
    pub answer: Option<Matcher>,
    pub calls: Option<Calls>,
    /// Calls are not wanted, though there are tools.
    pub forbids_calls: bool,
    /// A channel may come before the answer.
    pub may_think: bool,
    stage: Stage,
}

impl Guided {
    pub fn new(ids: Ids, is_thinking: bool) -> Guided {
        let stage = if is_thinking { Stage::Thinking } else { Stage::Answer { begun: false } };
        Guided { ids, answer: None, calls: None, forbids_calls: false, may_think: false, stage }
    }

    /// What may come beside the text's own form.
    fn openings(&self, begun: bool) -> Vec<u32> {
        let call = self.ids.call_open.filter(|_| self.calls.is_some() && !begun);
        let channel = self.ids.channel_open.filter(|_| self.may_think && !begun);
        call.into_iter().chain(channel).collect()
    }
}

/// Makes everything NaN but what is allowed.
fn allow(logits: &mut [f32], is_allowed: impl Fn(u32) -> bool) {
    logits.iter_mut().zip(0..).filter(|(_, id)| !is_allowed(*id)).for_each(|(logit, _)| *logit = f32::NAN);
}

/// What a matcher allows, and some tokens besides; nothing where it has failed.
fn follow(matcher: &mut Matcher, also: &[u32], logits: &mut [f32]) {
    let kept: Vec<(usize, f32)> =
        also.iter().filter_map(|id| Some((*id as usize, *logits.get(*id as usize)?))).collect();
    match matcher.compute_mask_or_eos() {
        Err(_) => return logits.fill(f32::NAN),
        Ok(mask) => {
            // Most words of a mask are all zeros or all ones.
            let words = mask.as_slice().iter().copied().chain(std::iter::repeat(0));
            for (group, word) in logits.chunks_mut(u32::BITS as usize).zip(words) {
                match word {
                    0 => group.fill(f32::NAN),
                    u32::MAX => {}
                    _ => {
                        let denied = group.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                        denied.for_each(|(_, logit)| *logit = f32::NAN);
                    }
                }
            }
        }
    }
    kept.into_iter().for_each(|(id, logit)| logits[id] = logit);
}

impl Guide for Guided {
    fn is_active(&self) -> bool {
        match &self.stage {
            Stage::Thinking => false,
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

    fn restrict(&mut self, logits: &mut [f32]) {
        match &mut self.stage {
            Stage::Thinking => {}
            Stage::Call(matcher) => follow(matcher, &[], logits),
            Stage::AfterCall => {
                let may_call = self.calls.as_ref().is_some_and(|calls| calls.parallel);
                let call = self.ids.call_open.filter(|_| may_call);
                // The token that says: run the tools now. Some vocabularies end by another.
                let run = self.ids.response_open.filter(|id| self.ids.stop.contains(id));
                let stop = &self.ids.stop;
                allow(logits, |id| Some(id) == call || run.map_or_else(|| stop.contains(&id), |run| run == id));
            }
            Stage::Answer { begun } => {
                let begun = *begun;
                let openings = self.openings(begun);
                if self.calls.as_ref().is_some_and(|calls| calls.must) {
                    return allow(logits, |id| openings.contains(&id));
                }
                if let Some(matcher) = &mut self.answer {
                    return follow(matcher, &openings, logits);
                }
                if let Some(call) = self.ids.call_open.filter(|_| self.forbids_calls)
                    && let Some(logit) = logits.get_mut(call as usize)
                {
                    *logit = f32::NAN;
                }
            }
        }
    }

    fn picked(&mut self, token: u32) {
        let opens_call = Some(token) == self.ids.call_open;
        match &mut self.stage {
            Stage::Call(matcher) => {
                if Some(token) == self.ids.call_close {
                    self.stage = Stage::AfterCall;
                } else {
                    // A matcher that fails allows nothing from then on.
                    _ = matcher.consume_token(token);
                }
            }
            _ if opens_call && self.calls.is_some() => {
                let matcher = self.calls.as_ref().map(|calls| Box::new(calls.matcher.deep_clone()));
                self.stage = matcher.map_or(Stage::AfterCall, Stage::Call);
            }
            Stage::Thinking => {
                if Some(token) == self.ids.channel_close {
                    self.may_think = false;
                    self.stage = Stage::Answer { begun: false };
                }
            }
            Stage::Answer { begun } if Some(token) == self.ids.channel_open && (self.answer.is_none() || !*begun) => {
                self.stage = Stage::Thinking;
            }
            Stage::Answer { begun } => {
                *begun = true;
                if let Some(matcher) = &mut self.answer {
                    _ = matcher.consume_token(token);
                }
            }
            Stage::AfterCall => {
                let is_channel = Some(token) == self.ids.channel_open;
                self.stage = if is_channel { Stage::Thinking } else { Stage::Answer { begun: true } };
            }
        }
    }

    fn copy(&self) -> Box<dyn Guide> {
        let calls = self.calls.as_ref().map(|calls| Calls { matcher: calls.matcher.deep_clone(), ..*calls });
        let stage = match &self.stage {
            Stage::Thinking => Stage::Thinking,
            Stage::Answer { begun } => Stage::Answer { begun: *begun },
            Stage::Call(matcher) => Stage::Call(Box::new(matcher.deep_clone())),
            Stage::AfterCall => Stage::AfterCall,
        };
        let (ids, answer) = (self.ids.clone(), self.answer.as_ref().map(Matcher::deep_clone));
        let Guided { forbids_calls, may_think, .. } = *self;
        Box::new(Guided { ids, answer, calls, forbids_calls, may_think, stage })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::call_grammar;
    use crate::grammar::Grammars;
    use crate::language::Tool;
    use crate::speech::tests::bytes_and_markers;
    use crate::structure::Structure;

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

        fn choice(&self, words: &[&str]) -> Option<Matcher> {
            let words = words.iter().map(|word| word.to_string()).collect();
            Some(self.grammars.structure(&Structure::Choice(words)).unwrap())
        }

        fn calls(&self, must: bool, parallel: bool) -> Option<Calls> {
            let parameters =
                json!({ "type": "object", "properties": { "x": { "type": "boolean" } }, "required": ["x"] });
            let tool = Tool { name: "f".into(), parameters };
            let lark = call_grammar::lark([&tool].into_iter(), self.id(Mark::Quote), self.id(Mark::CallClose)).unwrap();
            Some(Calls { matcher: self.grammars.call(lark).unwrap(), must, parallel })
        }

        /// What may come next; nothing said is anything.
        fn allowed(&self, guided: &mut Guided) -> Option<Vec<u32>> {
            let mut logits = vec![0.0; self.speech.vocab_size as usize];
            guided.is_active().then(|| {
                guided.restrict(&mut logits);
                (0..).zip(logits).filter(|(_, logit)| !logit.is_nan()).map(|(id, _)| id).collect()
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
        let mut logits = vec![0.0; course.speech.vocab_size as usize];
        other.restrict(&mut logits);
        assert!(!logits[b'o' as usize].is_nan() && logits[b'e' as usize].is_nan());
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
}
