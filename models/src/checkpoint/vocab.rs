//! `tokenizer.json`, as the metadata that a GGUF file of the same model has: pieces, their types, merges by rank.
//!
//! The tokenizer behind is one and knows one algorithm (see [`crate::tokenizer`]), so what a file says of its
//! normaliser, its splitting and its merging is compared with that, and anything else is refused by name.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::config::written;
use super::error::{Fault, shown};
use super::json::Bounded;
use crate::gguf::Writer;

/// Types of tokens, as GGUF files number them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Ids without a token: a vocabulary may have some, padded to a round size.
const MOST_HOLES: usize = 1 << 16;
/// More than any model has, twice over.
const MOST_PIECES: usize = 1 << 19;
const MOST_MERGES: usize = 1 << 20;
const MOST_ADDED: usize = 1 << 16;
/// What stands for a space.
const SPACE: &str = "▁";

#[derive(Deserialize)]
pub struct Tokenizer {
    normalizer: Option<Normaliser>,
    pre_tokenizer: Option<Splitter>,
    #[serde(default)]
    added_tokens: Bounded<Added, MOST_ADDED>,
    model: Model,
}

#[derive(Deserialize)]
struct Normaliser {
    r#type: String,
    pattern: Option<Pattern>,
    content: Option<String>,
    #[serde(default)]
    normalizers: Vec<Normaliser>,
}

#[derive(Deserialize)]
struct Pattern {
    #[serde(rename = "String")]
    string: Option<String>,
}

#[derive(Deserialize)]
struct Splitter {
    r#type: String,
    pattern: Option<Pattern>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

#[derive(Deserialize)]
struct Model {
    r#type: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Pieces,
    merges: Bounded<Merge, MOST_MERGES>,
}

/// Texts and ids, in the file's order.
struct Pieces(Vec<(Box<str>, u32)>);

/// `left right`, however the file spells it.
struct Merge(Box<str>);

/// `tokenizer_config.json`, as far as it matters.
#[derive(Default, Deserialize)]
pub struct Special {
    bos_token: Option<Spelling>,
    eos_token: Option<Spelling>,
    unk_token: Option<Spelling>,
    pad_token: Option<Spelling>,
    mask_token: Option<Spelling>,
    pub chat_template: Option<Templates>,
}

/// A token's text, alone or in an object.
#[derive(Deserialize)]
#[serde(untagged)]
enum Spelling {
    Text(String),
    Object { content: String },
}

/// One template, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Templates {
    One(String),
    Several(Vec<Named>),
}

#[derive(Deserialize)]
pub struct Named {
    name: String,
    template: String,
}

impl Templates {
    /// The one that chats are written by.
    pub fn usual(self) -> Option<String> {
        match self {
            Templates::One(template) => Some(template),
            Templates::Several(list) => list.into_iter().find(|one| one.name == "default").map(|one| one.template),
        }
    }
}

impl Tokenizer {
    fn check(&self) -> Result<(), Fault> {
        let refuse = |what: String, why: &str| Err(Fault::unsupported(what, why));
        let Model { r#type, dropout, continuing_subword_prefix, end_of_word_suffix, .. } = &self.model;
        match r#type.as_deref() {
            None | Some("BPE") => {}
            Some(other) => return refuse(format!("a tokenizer of type `{}`", shown(other)), "Gemma 4's is BPE"),
        }
        let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if dropout.is_some_and(|part| part != 0.0) || has(continuing_subword_prefix) || has(end_of_word_suffix) {
            return refuse("BPE with dropout, prefix or suffix".into(), "Gemma 4's has none");
        }
        if !self.model.byte_fallback || self.model.ignore_merges {
            return refuse(
                "BPE without byte_fallback, or with ignore_merges".into(),
                "Gemma 4's merges, down to bytes",
            );
        }
        match &self.normalizer {
            Some(normaliser) if normaliser.replaces_spaces() => {}
            Some(other) => {
                let what = format!("the normaliser `{}`", shown(&other.r#type));
                return refuse(what, "Gemma 4's replaces each space by ▁");
            }
            None => return refuse("a tokenizer without normaliser".into(), "Gemma 4's replaces each space by ▁"),
        }
        match &self.pre_tokenizer {
            None => {}
            // There are no spaces left to split at.
            Some(Splitter { r#type, pattern: Some(Pattern { string: Some(text) }) })
                if r#type == "Split" && text == " " => {}
            Some(other) => {
                let what = format!("the pre-tokeniser `{}`", shown(&other.r#type));
                return refuse(what, "Gemma 4 splits a text into no words");
            }
        }
        match self.added_tokens.0.iter().find(|token| token.lstrip || token.rstrip || token.single_word) {
            Some(token) => refuse(
                format!("the added token `{}`", shown(&token.content)),
                "it takes in or asks for what is around it",
            ),
            None => Ok(()),
        }
    }

    /// As the metadata of a GGUF file; `rows` are those of the embedding table.
    pub fn write(&self, special: &Special, rows: u32, writer: &mut Writer) -> Result<(), Fault> {
        self.check()?;
        let tokens = self.by_id(rows)?;
        writer.set("tokenizer.ggml.model", "gemma4").map_err(written)?;
        let unused: Vec<String> = (0..tokens.len())
            .map(|id| if tokens[id].is_none() { format!("[PAD{id}]") } else { String::new() })
            .collect();
        let texts = tokens.iter().zip(&unused).map(|(token, unused)| token.map_or(unused.as_str(), |(text, _)| text));
        writer.set_array("tokenizer.ggml.tokens", texts).map_err(written)?;
        let types = tokens.iter().map(|token| token.map_or(UNUSED, |(_, kind)| kind));
        writer.set_array("tokenizer.ggml.token_type", types).map_err(written)?;
        let merges = self.model.merges.0.iter().map(|merge| &*merge.0);
        writer.set_array("tokenizer.ggml.merges", merges).map_err(written)?;
        let of_keys = [
            ("bos", &special.bos_token, Some("<bos>")),
            ("eos", &special.eos_token, Some("<eos>")),
            ("unknown", &special.unk_token, Some("<unk>")),
            ("padding", &special.pad_token, Some("<pad>")),
            ("mask", &special.mask_token, None),
        ];
        for (key, said, usual) in of_keys {
            let Some(text) = said.as_ref().map(Spelling::text).or(usual) else { continue };
            let id = tokens.iter().position(|token| token.is_some_and(|(other, _)| other == text));
            if let Some(id) = id {
                writer.set(&format!("tokenizer.ggml.{key}_token_id"), id as u32).map_err(written)?;
            } else if said.is_some() {
                return Err(Fault::key(&format!("{key}_token"), shown(text), "a token of the vocabulary"));
            }
        }
        writer.set("tokenizer.ggml.add_bos_token", true).map_err(written)
    }

    /// Texts and types by id; `None` where an id has no token.
    fn by_id(&self, rows: u32) -> Result<Vec<Option<(&str, i32)>>, Fault> {
        let Pieces(pieces) = &self.model.vocab;
        let own = pieces.iter().map(|(text, id)| (&**text, *id, false));
        let added = self.added_tokens.0.iter().map(|token| (token.content.as_str(), token.id, token.special));
        let count = own.clone().chain(added.clone()).map(|(_, id, _)| id as usize + 1).max().unwrap_or(0);
        if count > pieces.len() + self.added_tokens.0.len() + MOST_HOLES {
            let expected = format!("ids with at most {MOST_HOLES} left out");
            return Err(Fault::key("the largest id of a token", count - 1, expected));
        }
        if count > rows as usize {
            let expected = format!("one of the {rows} rows of the embedding table");
            return Err(Fault::key("the largest id of a token", count - 1, expected));
        }
        if rows as usize > count + MOST_HOLES {
            return Err(Fault::key("vocab_size", rows, format!("at most {MOST_HOLES} more than the {count} tokens")));
        }
        let mut tokens: Vec<Option<(&str, i32)>> = vec![None; rows as usize];
        for (text, id, is_special) in own.chain(added) {
            let kind = if is_special {
                CONTROL
            } else if is_byte(text) {
                BYTE
            } else {
                NORMAL
            };
            let place = &mut tokens[id as usize];
            match place {
                Some((other, _)) if *other != text => {
                    let found = format!("`{}` and `{}`", shown(other), shown(text));
                    return Err(Fault::key(&format!("token {id}"), found, "one text"));
                }
                _ => *place = Some((text, kind)),
            }
        }
        Ok(tokens)
    }
}

impl Normaliser {
    fn replaces_spaces(&self) -> bool {
        match (self.r#type.as_str(), &self.pattern, self.content.as_deref()) {
            ("Replace", Some(Pattern { string: Some(text) }), Some(SPACE)) => text == " ",
            ("Sequence", ..) => matches!(self.normalizers.as_slice(), [only] if only.replaces_spaces()),
            _ => false,
        }
    }
}

impl Spelling {
    fn text(&self) -> &str {
        match self {
            Spelling::Text(text) | Spelling::Object { content: text } => text,
        }
    }
}

/// `<0x1F>`
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pieces, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Pieces;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tokens and ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pieces, A::Error> {
                let mut pieces = Vec::new();
                while let Some((text, id)) = map.next_entry::<Box<str>, u32>()? {
                    if pieces.len() == MOST_PIECES {
                        return Err(A::Error::custom(format!("more than {MOST_PIECES} tokens")));
                    }
                    pieces.push((text, id));
                }
                Ok(Pieces(pieces))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Merge, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge: two tokens, in a list or with a space between")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Merge, E> {
                Ok(Merge(text.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
                let pair = (list.next_element::<Cow<str>>()?, list.next_element::<Cow<str>>()?);
                match pair {
                    (Some(left), Some(right)) if list.next_element::<serde::de::IgnoredAny>()?.is_none() => {
                        if left.contains(' ') || right.contains(' ') {
                            return Err(A::Error::custom("a token of a merge has a space, which no text has left"));
                        }
                        Ok(Merge(format!("{left} {right}").into_boxed_str()))
                    }
                    _ => Err(A::Error::custom("a merge is of two tokens")),
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}
