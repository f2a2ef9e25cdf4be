//! Grammars over the plan's vocabulary: which tokens may come next.
//!
//! The vocabulary is indexed once, in the background, because that takes seconds for a large one. Schemas come from outside: their size, and the work
//! and memory that they may take, are bounded; one that takes more is refused, or ends its own request and no other.

use std::sync::{Arc, OnceLock};

use gemma4c_plan::TokenKind;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::error::ApiError;
use crate::language::Mark;
use crate::speech::Speech;
use crate::structure::Structure;

/// Bytes of a schema, a regular expression or a grammar.
const LONGEST: usize = 256 << 10;
/// Between two tokens of JSON: a space, or a line break and some indentation. Without a bound a model may go on for ever.
const JSON_SPACE: &str = r" |\n {0,32}";

/// Makes matchers for one vocabulary.
pub struct Grammars {
    speech: Arc<Speech>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Grammars {
    pub fn new(speech: Arc<Speech>) -> Grammars {
        Grammars { speech, factory: OnceLock::new() }
    }

    /// Indexes the vocabulary, or waits for whoever does.
    pub fn prepare(&self) {
        _ = self.factory();
    }

    fn factory(&self) -> Result<&ParserFactory, ApiError> {
        let factory = self.factory.get_or_init(|| factory(&self.speech));
        factory.as_ref().map_err(|error| ApiError::internal(format!("the vocabulary cannot be indexed: {error}")))
    }

    fn matcher(&self, grammar: TopLevelGrammar, what: &str) -> Result<Matcher, ApiError> {
        let invalid = |error: String| {
            let error: String = error.chars().take(500).collect();
            ApiError::bad_request("invalid_schema", format!("{what} cannot be followed: {error}"))
        };
        let parser = self.factory()?.create_parser(grammar);
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(invalid(error)),
            None => Ok(matcher),
        }
    }

    /// The matcher of a whole answer.
    pub fn structure(&self, structure: &Structure) -> Result<Matcher, ApiError> {
        let bounded = |text: &str, what: &str| match text.len() > LONGEST {
            true => {
                let message = format!("{what} must have at most {LONGEST} bytes; found {}", text.len());
                Err(ApiError::bad_request("invalid_schema", message))
            }
            false => Ok(()),
        };
        match structure {
            Structure::JsonObject => self.matcher(json_grammar(&json!({ "type": "object" })), "json_object"),
            Structure::JsonSchema(schema) => {
                bounded(&schema.to_string(), "the JSON schema")?;
                self.matcher(json_grammar(schema), "the JSON schema")
            }
            Structure::Regex(regex) => {
                bounded(regex, "the regular expression")?;
                self.matcher(TopLevelGrammar::from_regex(regex), "the regular expression")
            }
            Structure::Choice(choices) => {
                if choices.is_empty() || choices.iter().any(String::is_empty) {
                    return Err(ApiError::bad_request(
                        "invalid_schema",
                        "choice needs at least one text, and no empty one",
                    ));
                }
                let choices: Vec<String> =
                    choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
                let grammar = format!("start: {}", choices.join(" | "));
                bounded(&grammar, "choice")?;
                self.matcher(TopLevelGrammar::from_lark(grammar), "choice")
            }
            Structure::Lark(grammar) => {
                bounded(grammar, "the grammar")?;
                self.matcher(TopLevelGrammar::from_lark(grammar.clone()), "the grammar")
            }
        }
    }

    /// The matcher of a call, by a grammar of our own making.
    pub fn call(&self, lark: String) -> Result<Matcher, ApiError> {
        if lark.len() > 4 * LONGEST {
            return Err(ApiError::bad_request("invalid_schema", "the schemas of the tools are too large"));
        }
        self.matcher(TopLevelGrammar::from_lark(lark), "the schema of a tool")
    }
}

/// JSON that follows a schema, with little space in it.
fn json_grammar(schema: &Value) -> TopLevelGrammar {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        schema => schema.clone(),
    };
    if let Value::Object(fields) = &mut schema {
        fields.insert("x-guidance".into(), json!({ "whitespace_pattern": JSON_SPACE }));
    }
    TopLevelGrammar::from_json_schema(schema)
}

fn factory(speech: &Speech) -> Result<ParserFactory, String> {
    let word = |id: u32| -> Vec<u8> {
        if speech.suppress.contains(&id) {
            return Vec::new();
        }
        let is_marker = match speech.tokenizer.token(id) {
            Ok((_, TokenKind::Control | TokenKind::Unknown)) => true,
            Ok((text, TokenKind::UserDefined)) => speech.tokenizer.marker(text) == Some(id),
            _ => false,
        };
        let bytes = speech.bytes(id);
        match is_marker {
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat(),
            false => bytes,
        }
    };
    let words: Vec<Vec<u8>> = (0..speech.vocab_size).map(word).collect();
    let end = speech.stop.iter().copied().find(|id| Some(*id) != speech.id(Mark::ResponseOpen));
    let end = end.ok_or("there is no token that ends an answer")?;
    let trie = TokTrie::from(&TokRxInfo::new(speech.vocab_size, end), &words).with_eos_tokens(&speech.stop);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    // About 40 MB, and 15 ms a token, at the worst.
    limits.max_lexer_states = 25_000;
    limits.max_grammar_size = 200_000;
    Ok(factory)
}
