//! Grammars over the plan's vocabulary: which tokens may come next.
//!
//! The vocabulary is indexed once, in the background, because that takes seconds for a large one. Schemas come from
//! outside: their size, and the work and memory that they may take, are bounded; one that takes more is refused, or
//! ends its own request and no other.

use std::sync::{Arc, OnceLock};

use gemma4c_plan::TokenKind;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::error::ApiError;
use crate::follow::Follower;
use crate::language::Mark;
use crate::schema::distinct::{Notation, Table, Watch};
use crate::schema::{self, Schema};
use crate::speech::Speech;
use crate::structure::Structure;
use crate::tools::Declared;

/// Bytes of a schema, a regular expression or a grammar.
const LONGEST: usize = 256 << 10;

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
        self.try_matcher(grammar)?.map_err(|error| {
            let error: String = error.chars().take(500).collect();
            ApiError::bad_request("invalid_schema", format!("{what} cannot be followed: {error}"))
        })
    }

    /// A matcher, or what llguidance says against the grammar.
    fn try_matcher(&self, grammar: TopLevelGrammar) -> Result<Result<Matcher, String>, ApiError> {
        let matcher = Matcher::new(self.factory()?.create_parser(grammar));
        Ok(match matcher.get_error() {
            Some(error) => Err(error),
            None => Ok(matcher),
        })
    }

    /// JSON that follows a schema, with little space in it.
    fn json(&self, schema: &Value, param: &str) -> Result<Follower, ApiError> {
        let schema = Schema::read(schema, param)?;
        let grammar = TopLevelGrammar::from_json_schema(schema::json::grammar(&schema));
        let matcher = self.try_matcher(grammar)?.map_err(|_| too_large(param))?;
        let watch = Table::new(&schema).map(|table| Watch::new(Notation::Json(Arc::new(table))));
        Ok(Follower::new(matcher).watching(watch, None))
    }

    /// Follows the form of a whole answer.
    pub fn structure(&self, structure: &Structure) -> Result<Follower, ApiError> {
        let bounded = |text: &str, what: &str| match text.len() > LONGEST {
            true => {
                let message = format!("{what} must have at most {LONGEST} bytes; found {}", text.len());
                Err(ApiError::bad_request("invalid_schema", message))
            }
            false => Ok(()),
        };
        let matcher = match structure {
            Structure::JsonObject => return self.json(&json!({ "type": "object" }), "response_format"),
            Structure::JsonSchema { schema, param } => return self.json(schema, param),
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
        };
        matcher.map(Follower::new)
    }

    /// Follows a call of one of these tools.
    pub fn call(&self, tools: &[&Declared], quote: u32, close: u32) -> Result<Follower, ApiError> {
        let mut schemas = Vec::new();
        for tool in tools {
            schemas.push((*tool, Schema::read(&tool.tool.parameters, &tool.param)?));
        }
        let lark = schema::call::lark(&schemas, quote, close)?;
        let matcher = match lark.len() > 4 * LONGEST {
            true => return Err(too_large("tools")),
            false => self.try_matcher(TopLevelGrammar::from_lark(lark))?.map_err(|_| too_large("tools"))?,
        };
        let tables: Vec<(String, Option<Arc<Table>>)> =
            schemas.iter().map(|(tool, schema)| (tool.tool.name.clone(), Table::new(schema).map(Arc::new))).collect();
        let needs_watch = tables.iter().any(|(_, table)| table.is_some());
        let watch = needs_watch.then(|| Watch::new(Notation::Call(tables.into())));
        Ok(Follower::new(matcher).watching(watch, Some(quote)))
    }
}

/// Each keyword can be enforced, but all of them together take too much.
fn too_large(param: &str) -> ApiError {
    ApiError::schema(param, format!("{param}: \"schema\" is too large or too complex for a grammar"))
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
