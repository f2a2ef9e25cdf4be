//! The tokenizer: text to token ids and back, from a plan's vocabulary.
//!
//! Text becomes ids in three steps: special tokens are cut out of the raw text; in what lies between, spaces become `▁`
//! and each character becomes its token, or the byte tokens of its UTF-8; then neighbours are merged by rank. There is
//! no normalisation, no splitting into words and no prefix space. Runs of newlines need no rule of their own: no merge
//! of the Gemma 4 vocabulary joins a newline to anything else, and its merges make one token of a short run.
//!
//! A literal `▁` in a text is indistinguishable from a space, as it is for the model.

mod bpe;
mod detokenize;
mod markers;
mod metadata;
mod special;
mod spelling;

use std::collections::HashMap;

use gemma4c_plan::{Merge, Strings, TokenKind, Vocab};
use thiserror::Error;

use bpe::Merges;
use special::Specials;
use spelling::{SPACE, byte_value, is_marker, only_character};

pub use detokenize::Detokenizer;
pub use metadata::{VocabError, vocab_from_metadata};

/// What is wrong with a vocabulary, or with an id.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TokenizerError {
    #[error("vocabulary: the token texts are inconsistent (their ends do not lie in order within the text)")]
    InconsistentTexts,
    #[error("vocabulary: {tokens} tokens, but {kinds} token kinds")]
    KindCount { tokens: usize, kinds: usize },
    #[error("vocabulary: {count} {what} are more than 32 bits can number")]
    TooMany { what: &'static str, count: usize },
    #[error("vocabulary: {what} names token {id}, but there are {tokens} tokens")]
    IdOutOfRange { what: String, id: u32, tokens: usize },
    #[error("vocabulary: merge {rank} joins tokens {left} and {right}, but token {result} does not spell them joined")]
    MergeText { rank: usize, left: u32, right: u32, result: u32 },
    #[error("vocabulary: byte token {id} is not spelled like `<0x1F>`")]
    ByteToken { id: u32 },
    #[error("vocabulary: no token for byte 0x{missing:02X}, and no unknown token either")]
    NoFallback { missing: u8 },
    #[error("vocabulary: special token {id} is {len} bytes long (at most {} are allowed)", special::LONGEST)]
    LongSpecial { id: u32, len: usize },
    #[error("token {id} is not in the vocabulary of {tokens} tokens")]
    UnknownId { id: u32, tokens: usize },
}

/// How a text is to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Start with the beginning-of-sequence token, where the vocabulary asks for one. A rendered chat template already
    /// has it in its text: two of them confuse the model, and none at all ruins it.
    pub add_bos: bool,
    /// Read control tokens written in the text, such as `<turn|>`, as those tokens. Without it they are plain text;
    /// user-defined tokens are recognised either way.
    pub parse_special: bool,
}

/// What stands for a character without a token.
#[derive(Debug)]
enum Fallback {
    /// The tokens of its bytes.
    Bytes(Box<[u32; 256]>),
    Unknown(u32),
}

/// A vocabulary, checked and indexed for use.
#[derive(Debug)]
pub struct Tokenizer {
    tokens: Strings,
    kinds: Vec<TokenKind>,
    merges: Merges,
    /// Tokens of one character.
    characters: HashMap<char, u32>,
    fallback: Fallback,
    user_defined: Specials,
    user_defined_and_control: Specials,
    /// Of a rendered template: its own markers, and what is recognised in the words of others.
    markers: Specials,
    user_defined_words: Specials,
    bos: Option<u32>,
}

impl Tokenizer {
    /// Checks the vocabulary, which may come from a damaged or hostile file, and builds the indices.
    pub fn new(vocab: &Vocab) -> Result<Tokenizer, TokenizerError> {
        check_ids(vocab)?;
        check_merges(vocab)?;

        let mut characters = HashMap::new();
        let mut byte_tokens = [None; 256];
        let mut specials = Vec::new();
        for ((id, text), kind) in (0u32..).zip(vocab.tokens.iter()).zip(&vocab.kinds) {
            match kind {
                TokenKind::Byte => {
                    let byte = byte_value(text).ok_or(TokenizerError::ByteToken { id })?;
                    byte_tokens[byte as usize].get_or_insert(id);
                }
                TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => {
                    if text.len() > special::LONGEST {
                        return Err(TokenizerError::LongSpecial { id, len: text.len() });
                    }
                    specials.push((text, id, *kind == TokenKind::UserDefined));
                }
                TokenKind::Normal | TokenKind::Unused => {
                    if let Some(character) = only_character(text) {
                        characters.entry(character).or_insert(id);
                    }
                }
            }
        }
        let fallback = match (byte_tokens.iter().position(Option::is_none), vocab.unknown) {
            (None, _) => Fallback::Bytes(Box::new(byte_tokens.map(Option::unwrap_or_default))),
            (Some(_), Some(unknown)) => Fallback::Unknown(unknown),
            (Some(missing), None) => return Err(TokenizerError::NoFallback { missing: missing as u8 }),
        };
        Ok(Tokenizer {
            tokens: vocab.tokens.clone(),
            kinds: vocab.kinds.clone(),
            merges: Merges::new(&vocab.merges, vocab.tokens.len()),
            characters,
            fallback,
            user_defined: Specials::new(specials.iter().filter(|special| special.2).map(|s| (s.0, s.1))),
            user_defined_and_control: Specials::new(specials.iter().map(|s| (s.0, s.1))),
            markers: Specials::new(specials.iter().filter(|s| !s.2 || is_marker(s.0)).map(|s| (s.0, s.1))),
            user_defined_words: Specials::new(specials.iter().filter(|s| s.2 && !is_marker(s.0)).map(|s| (s.0, s.1))),
            bos: vocab.bos.filter(|_| vocab.add_bos),
        })
    }

    /// How many tokens there are; ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// A token's text as the vocabulary spells it, and what it is for.
    pub fn token(&self, id: u32) -> Result<(&str, TokenKind), TokenizerError> {
        match (self.tokens.get(id as usize), self.kinds.get(id as usize)) {
            (Some(text), Some(kind)) => Ok((text, *kind)),
            _ => Err(TokenizerError::UnknownId { id, tokens: self.tokens.len() }),
        }
    }

    /// The ids of a text. Takes time O(n log n) in its length, whatever it says.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        let specials = if options.parse_special { &self.user_defined_and_control } else { &self.user_defined };
        let mut ids = Vec::with_capacity(text.len() / 3);
        ids.extend(self.bos.filter(|_| options.add_bos));
        self.encode_with(specials, text, &mut ids);
        ids
    }

    fn encode_with(&self, specials: &Specials, text: &str, ids: &mut Vec<u32>) {
        let mut symbols = Vec::new();
        let mut rest = text;
        while let Some((place, special)) = specials.find(rest) {
            self.encode_fragment(&rest[..place.start], &mut symbols, ids);
            ids.push(special);
            rest = &rest[place.end..];
        }
        self.encode_fragment(rest, &mut symbols, ids);
    }

    /// The bytes that a token stands for in a text. Control tokens stand for their spelling.
    pub fn bytes(&self, id: u32) -> Result<Vec<u8>, TokenizerError> {
        let (text, kind) = self.token(id)?;
        Ok(match kind {
            // `Tokenizer::new` refuses byte tokens that do not name a byte.
            TokenKind::Byte => byte_value(text).into_iter().collect(),
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => text.as_bytes().to_vec(),
            TokenKind::Normal | TokenKind::Unused => text.replace(SPACE, " ").into_bytes(),
        })
    }

    /// Text without special tokens; `symbols` is working memory.
    fn encode_fragment(&self, text: &str, symbols: &mut Vec<u32>, ids: &mut Vec<u32>) {
        symbols.clear();
        for character in text.chars() {
            let character = if character == ' ' { SPACE } else { character };
            match (self.characters.get(&character), &self.fallback) {
                (Some(&id), _) => symbols.push(id),
                (None, Fallback::Unknown(unknown)) => symbols.push(*unknown),
                (None, Fallback::Bytes(tokens)) => {
                    let mut utf8 = [0; 4];
                    let bytes = character.encode_utf8(&mut utf8).bytes();
                    symbols.extend(bytes.map(|byte| tokens[byte as usize]));
                }
            }
        }
        self.merges.apply(symbols, ids);
    }
}

/// Everything that names a token names one that exists.
fn check_ids(vocab: &Vocab) -> Result<(), TokenizerError> {
    if !vocab.tokens.is_consistent() {
        return Err(TokenizerError::InconsistentTexts);
    }
    let tokens = vocab.tokens.len();
    if vocab.kinds.len() != tokens {
        return Err(TokenizerError::KindCount { tokens, kinds: vocab.kinds.len() });
    }
    // The highest number stays free: the merge loop uses it for "none".
    for (what, count) in [("tokens", tokens), ("merges", vocab.merges.len())] {
        if count >= u32::MAX as usize {
            return Err(TokenizerError::TooMany { what, count });
        }
    }
    let check = |what: &dyn Fn() -> String, id: u32| {
        if (id as usize) < tokens { Ok(()) } else { Err(TokenizerError::IdOutOfRange { what: what(), id, tokens }) }
    };
    for (name, id) in [("bos", vocab.bos), ("eos", vocab.eos), ("unknown", vocab.unknown)] {
        id.map_or(Ok(()), |id| check(&|| name.into(), id))?;
    }
    for (name, ids) in [("stop", &vocab.stop), ("suppress", &vocab.suppress)] {
        ids.iter().try_for_each(|&id| check(&|| format!("the {name} list"), id))?;
    }
    for (rank, merge) in vocab.merges.iter().enumerate() {
        for id in [merge.left, merge.right, merge.result] {
            check(&|| format!("merge {rank}"), id)?;
        }
    }
    Ok(())
}

/// Every merge makes a token that spells what its two parts spell; the ids must have been checked.
fn check_merges(vocab: &Vocab) -> Result<(), TokenizerError> {
    let text = |id: u32| vocab.tokens.get(id as usize).unwrap_or_default();
    for (rank, &Merge { left, right, result }) in vocab.merges.iter().enumerate() {
        if text(result).strip_prefix(text(left)) != Some(text(right)) {
            return Err(TokenizerError::MergeText { rank, left, right, result });
        }
    }
    Ok(())
}
