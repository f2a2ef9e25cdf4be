//! A text that follows a grammar, and the few things that no grammar can say.

use llguidance::Matcher;
use toktrie::{TokEnv, TokTrie};

use gemma4c_runtime::engine::Mask;

use crate::schema::distinct::{Token, Watch};

/// Tokens ahead that are looked at, where an item begins as one that was there.
const FARTHEST: u32 = 8;

pub struct Follower {
    matcher: Matcher,
    watch: Option<Watch>,
    /// The token around the strings of a call.
    quote: Option<u32>,
}

impl Follower {
    pub fn new(matcher: Matcher) -> Follower {
        Follower { matcher, watch: None, quote: None }
    }

    /// Also keeps what must differ from repeating itself.
    pub fn watching(self, watch: Option<Watch>, quote: Option<u32>) -> Follower {
        Follower { watch, quote, ..self }
    }

    pub fn copy(&self) -> Follower {
        Follower { matcher: self.matcher.deep_clone(), watch: self.watch.clone(), quote: self.quote }
    }

    pub fn consume(&mut self, token: u32) {
        if let (Some(watch), Ok(env)) = (&mut self.watch, self.matcher.tok_env()) {
            _ = push(watch, token, self.quote, &env);
        }
        // A matcher that fails allows nothing from then on.
        _ = self.matcher.consume_token(token);
    }

    /// What a token says.
    pub fn text(&self, token: u32) -> String {
        self.matcher.tok_env().map_or(String::new(), |env| env.tok_trie().decode_str(&[token]))
    }

    /// Takes a text whose own tokens are others.
    pub fn consume_text(&mut self, text: &str) {
        if let Ok(env) = self.matcher.tok_env() {
            env.tokenize_bytes(text.as_bytes()).into_iter().for_each(|token| self.consume(token));
        }
    }

    /// Allows what may come next, and some tokens besides; nothing where the grammar has failed.
    pub fn restrict(&mut self, also: &[u32], allowed: &mut Mask) {
        match self.matcher.compute_mask_or_eos() {
            Err(_) => allowed.clear(),
            Ok(mask) => {
                allowed.set(mask.as_slice());
                self.forbid_repetition(allowed);
                also.iter().for_each(|token| allowed.allow(*token));
            }
        }
    }

    fn forbid_repetition(&self, allowed: &mut Mask) {
        let Some(watch) = self.watch.as_ref().filter(|watch| watch.is_needed()) else { return };
        let Ok(env) = self.matcher.tok_env() else { return };
        let (is_free, remainders) = (watch.is_in_free_text(), watch.remainders());
        for token in tokens(allowed) {
            let bytes = env.tok_trie().token(token);
            let repeats = remainders.iter().any(|rest| !bytes.is_empty() && rest.starts_with(bytes));
            if is_free && !repeats && !read(token, self.quote, &env).is_some_and(|token| watch.may_end(token)) {
                continue;
            }
            if self.is_dead_end(token, &self.matcher, watch, &env, 0) {
                allowed.forbid(token);
            }
        }
    }

    /// Whether a token repeats something, or leads to nothing but a repetition.
    fn is_dead_end(&self, token: u32, matcher: &Matcher, watch: &Watch, env: &TokEnv, depth: u32) -> bool {
        let mut watch = watch.clone();
        if !push(&mut watch, token, self.quote, env) {
            return true;
        }
        // A prefix of something new goes on.
        if depth >= FARTHEST || watch.remainders().is_empty() {
            return false;
        }
        let mut matcher = matcher.deep_clone();
        if matcher.consume_token(token).is_err() {
            return true;
        }
        let Ok(mask) = matcher.compute_mask_or_eos() else { return true };
        let mut allowed = Mask::all(env.tok_trie().vocab_size() as u32);
        allowed.set(mask.as_slice());
        tokens(&allowed).into_iter().all(|token| self.is_dead_end(token, &matcher, &watch, env, depth + 1))
    }
}

/// Those that a mask allows.
fn tokens(allowed: &Mask) -> Vec<u32> {
    let words = allowed.words().iter().enumerate();
    let bits =
        words.flat_map(|(at, word)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 32 + bit));
    bits.map(|token| token as u32).collect()
}

/// A token as it is watched. Markers other than quotes end the text, and repeat nothing.
fn read(token: u32, quote: Option<u32>, env: &TokEnv) -> Option<Token<'_>> {
    let bytes = env.tok_trie().token(token);
    match bytes.first() {
        _ if Some(token) == quote => Some(Token::Quote),
        Some(&TokTrie::SPECIAL_TOKEN_MARKER) => None,
        _ => Some(Token::Bytes(bytes)),
    }
}

/// Whether a token repeats nothing.
fn push(watch: &mut Watch, token: u32, quote: Option<u32>, env: &TokEnv) -> bool {
    read(token, quote, env).is_none_or(|token| watch.push(token))
}
