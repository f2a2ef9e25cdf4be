//! A vocabulary from GGUF metadata, with the mistakes of early Gemma 4 files put right.
//!
//! Files differ in what they say about the same tokens: the end of a turn may or may not be the end-of-sequence token,
//! special tokens may be marked as normal ones, and the beginning-of-sequence token may be denied. The text of a
//! special token tells what it is in all of them, so the text decides.

use std::collections::HashMap;

use gemma4c_plan::{Merge, Strings, TokenKind, Vocab};
use thiserror::Error;

use super::spelling::byte_value;
use crate::gguf::{Array, FromValue, GgufError, Metadata, Value};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const SUPPRESS: &str = "tokenizer.ggml.suppress_tokens";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Tokens that end a generation; the last one asks for the tools to be run.
const STOP: [&str; 3] = ["<eos>", "<turn|>", "<|tool_response>"];

/// Where media go in the prompt. A text model that samples one has lost its way, and some do.
const MEDIA: [&str; 7] = ["<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"];

/// Structure that is not part of an answer.
const CONTROL: [&str; 10] =
    ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>", "<|turn>", "<turn|>"];

/// Structure within an answer, which whoever reads the answer needs to see.
const USER_DEFINED: [&str; 7] =
    ["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>", "<|channel>", "<channel|>"];

/// What is wrong with the vocabulary in a GGUF file.
#[derive(Debug, Error)]
pub enum VocabError {
    #[error(transparent)]
    Metadata(#[from] GgufError),
    #[error("{MODEL} is {model} and {PRE} is {pre}; known are `gemma4`, and `llama` with {PRE} `gemma4`")]
    UnknownTokenizer { model: String, pre: String },
    #[error("{key} has {found} elements, but there are {expected} tokens")]
    Length { key: &'static str, found: usize, expected: usize },
    #[error("{key}[{index}] is {found}: {problem}")]
    Element { key: &'static str, index: usize, found: String, problem: &'static str },
    #[error("{key} is {id}, but there are {tokens} tokens")]
    IdOutOfRange { key: &'static str, id: u32, tokens: usize },
    #[error("{key} is {found}, expected an array of strings")]
    NotStrings { key: &'static str, found: String },
    #[error("{TOKENS} is longer than 4 GiB")]
    TooLong,
}

/// The vocabulary of a model; `None` where it has none and works on token ids.
pub fn vocab_from_metadata(metadata: &Metadata) -> Result<Option<Vocab>, VocabError> {
    let pre: Option<&str> = metadata.optional(PRE)?;
    match (metadata.optional(MODEL)?, pre) {
        (None | Some("none"), _) => return Ok(None),
        (Some("gemma4"), _) | (Some("llama"), Some("gemma4")) => {}
        (Some(model), pre) => {
            let pre = pre.map_or("not there".into(), |pre| Value::Str(pre).to_string());
            return Err(VocabError::UnknownTokenizer { model: Value::Str(model).to_string(), pre });
        }
    }
    let tokens = read_tokens(metadata)?;
    let mut by_text = HashMap::with_capacity(tokens.len());
    for (id, text) in (0u32..).zip(tokens.iter()) {
        by_text.entry(text).or_insert(id);
    }
    let id = |key: &'static str, text: &str| match metadata.optional::<u32>(key)? {
        Some(id) if id as usize >= tokens.len() => Err(VocabError::IdOutOfRange { key, id, tokens: tokens.len() }),
        Some(id) => Ok(Some(id)),
        None => Ok(by_text.get(text).copied()),
    };
    let ids_of = |texts: &[&str]| -> Vec<u32> { texts.iter().filter_map(|text| by_text.get(text).copied()).collect() };

    let eos = id(EOS, "<eos>")?;
    let mut stop = ids_of(&STOP);
    stop.extend(eos);
    let mut suppress = ids_of(&MEDIA);
    suppress.extend(read_suppressed(metadata, tokens.len())?);
    let bos = id(BOS, "<bos>")?;
    Ok(Some(Vocab {
        kinds: read_kinds(metadata, &tokens)?,
        merges: read_merges(metadata, &by_text)?,
        bos,
        eos,
        unknown: id(UNKNOWN, "<unk>")?,
        // Whatever the file says: without it the model's output is worthless, and early files deny it.
        add_bos: bos.is_some(),
        stop: sorted_set(stop),
        suppress: sorted_set(suppress),
        chat_template: metadata.optional::<&str>(CHAT_TEMPLATE)?.map(String::from),
        tokens,
    }))
}

fn read_tokens(metadata: &Metadata) -> Result<Strings, VocabError> {
    let mut tokens = Strings::default();
    for text in strings(TOKENS, metadata.array(TOKENS)?)? {
        if !tokens.push(text) {
            return Err(VocabError::TooLong);
        }
    }
    Ok(tokens)
}

fn read_kinds(metadata: &Metadata, tokens: &Strings) -> Result<Vec<TokenKind>, VocabError> {
    let by_text = |text: &str| match text {
        _ if CONTROL.contains(&text) || MEDIA.contains(&text) => Some(TokenKind::Control),
        _ if USER_DEFINED.contains(&text) => Some(TokenKind::UserDefined),
        _ => None,
    };
    let Some(types) = metadata.optional::<Array<'_>>(TOKEN_TYPE)? else {
        let plain = |text| if byte_value(text).is_some() { TokenKind::Byte } else { TokenKind::Normal };
        return Ok(tokens.iter().map(|text| by_text(text).unwrap_or_else(|| plain(text))).collect());
    };
    if types.len() != tokens.len() {
        return Err(VocabError::Length { key: TOKEN_TYPE, found: types.len(), expected: tokens.len() });
    }
    let kind = |(index, (value, text)): (usize, (Value<'_>, &str))| {
        Ok(match (by_text(text), value.as_int()) {
            (Some(kind), _) => kind,
            (None, Some(0 | 1)) => TokenKind::Normal,
            (None, Some(2)) => TokenKind::Unknown,
            (None, Some(3)) => TokenKind::Control,
            (None, Some(4)) => TokenKind::UserDefined,
            (None, Some(5)) => TokenKind::Unused,
            (None, Some(6)) => TokenKind::Byte,
            _ => {
                let (found, problem) = (value.to_string(), "token types are the integers 0 to 6");
                return Err(VocabError::Element { key: TOKEN_TYPE, index, found, problem });
            }
        })
    };
    types.iter().zip(tokens.iter()).enumerate().map(kind).collect()
}

/// Merges are spelled `left right`. A left part may itself begin with a space, never the right one.
fn read_merges(metadata: &Metadata, by_text: &HashMap<&str, u32>) -> Result<Vec<Merge>, VocabError> {
    let array = metadata.array(MERGES)?;
    let mut merges = Vec::with_capacity(array.len());
    let mut joined = String::new();
    for (index, text) in strings(MERGES, array)?.enumerate() {
        let error = |problem| VocabError::Element { key: MERGES, index, found: Value::Str(text).to_string(), problem };
        let token = |part: &str, problem| by_text.get(part).copied().ok_or_else(|| error(problem));
        let gap = text.bytes().skip(1).position(|byte| byte == b' ').ok_or_else(|| error("it has no space"))? + 1;
        let (left, right) = (&text[..gap], &text[gap + 1..]);
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        merges.push(Merge {
            left: token(left, "no token is its left part")?,
            right: token(right, "no token is its right part")?,
            result: token(&joined, "no token is its two parts joined")?,
        });
    }
    Ok(merges)
}

fn read_suppressed(metadata: &Metadata, tokens: usize) -> Result<Vec<u32>, VocabError> {
    let Some(array) = metadata.optional::<Array<'_>>(SUPPRESS)? else { return Ok(Vec::new()) };
    let id = |(index, value)| match u32::from_value(value) {
        Some(id) if (id as usize) < tokens => Ok(id),
        _ => {
            let (found, problem) = (value.to_string(), "it is not the id of a token");
            Err(VocabError::Element { key: SUPPRESS, index, found, problem })
        }
    };
    array.iter().enumerate().map(id).collect()
}

fn strings<'a>(key: &'static str, array: Array<'a>) -> Result<impl Iterator<Item = &'a str>, VocabError> {
    array.strings().ok_or_else(|| VocabError::NotStrings { key, found: Value::Array(array).to_string() })
}

fn sorted_set(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}
