//! Reading a vocabulary from GGUF metadata: what early files get wrong, and what hostile ones do.

use gemma4c_models::gguf::{Gguf, Writer};
use gemma4c_models::tokenizer::{VocabError, vocab_from_metadata};
use gemma4c_plan::{Merge, TokenKind, Vocab};

/// The metadata of a small vocabulary, with some keys in another form.
struct Keys {
    model: Option<&'static str>,
    pre: Option<&'static str>,
    tokens: &'static [&'static str],
    types: Option<&'static [i32]>,
    merges: &'static [&'static str],
    eos: u32,
    suppress: &'static [i32],
}

impl Default for Keys {
    fn default() -> Keys {
        Keys {
            model: Some("gemma4"),
            pre: None,
            tokens: &["<eos>", "<turn|>", "<|channel>", "<0x41>", "▁", "a", "▁a", "<audio|>", "<bos>"],
            types: Some(&[1, 3, 3, 6, 1, 1, 1, 1, 3]),
            merges: &["▁ a"],
            eos: 1,
            suppress: &[],
        }
    }
}

impl Keys {
    fn read(self) -> Result<Option<Vocab>, VocabError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vocab.gguf");
        let mut writer = Writer::new();
        let text = [("tokenizer.ggml.model", self.model), ("tokenizer.ggml.pre", self.pre)];
        for (key, value) in text.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            writer.set(key, value).unwrap();
        }
        writer.set_array("tokenizer.ggml.tokens", self.tokens.iter().copied()).unwrap();
        if let Some(types) = self.types {
            writer.set_array("tokenizer.ggml.token_type", types.iter().copied()).unwrap();
        }
        writer.set_array("tokenizer.ggml.merges", self.merges.iter().copied()).unwrap();
        writer.set("tokenizer.ggml.eos_token_id", self.eos).unwrap();
        writer.set("tokenizer.ggml.add_bos_token", false).unwrap();
        writer.set_array("tokenizer.ggml.suppress_tokens", self.suppress.iter().copied()).unwrap();
        writer.create(&path).unwrap().finish().unwrap();
        vocab_from_metadata(Gguf::open(&path).unwrap().metadata())
    }
}

#[test]
fn the_text_of_a_special_token_decides_what_it_is() {
    use TokenKind::*;
    let vocab = Keys { suppress: &[5], ..Keys::default() }.read().unwrap().unwrap();
    assert_eq!(vocab.kinds, [Control, Control, UserDefined, Byte, Normal, Normal, Normal, Control, Control]);
    assert_eq!(vocab.merges, [Merge { left: 4, right: 5, result: 6 }]);
    assert_eq!((vocab.bos, vocab.add_bos, vocab.eos, vocab.unknown), (Some(8), true, Some(1), None));
    assert_eq!((vocab.stop, vocab.suppress), (vec![0, 1], vec![5, 7]));
    let untyped = Keys { types: None, ..Keys::default() }.read().unwrap().unwrap();
    assert_eq!(untyped.kinds, vocab.kinds);
}

#[test]
fn which_vocabularies_are_known() {
    let read = |model, pre| Keys { model, pre, ..Keys::default() }.read();
    assert!(read(Some("gemma4"), None).unwrap().is_some());
    assert!(read(Some("llama"), Some("gemma4")).unwrap().is_some());
    assert!(read(Some("none"), None).unwrap().is_none());
    assert!(read(None, None).unwrap().is_none());
    assert!(read(Some("llama"), Some("default")).is_err());
    assert!(read(Some("gpt2"), None).is_err());
}

#[test]
fn bad_metadata_is_named() {
    let faults = [
        Keys { model: Some("llama"), pre: Some("default"), ..Keys::default() },
        Keys { model: Some("gpt2"), ..Keys::default() },
        Keys { types: Some(&[1, 1]), ..Keys::default() },
        Keys { types: Some(&[1, 3, 3, 6, 1, 7, 1, 1, 3]), ..Keys::default() },
        Keys { merges: &["▁ a", "▁a"], ..Keys::default() },
        Keys { merges: &["▁ a", "x a"], ..Keys::default() },
        Keys { merges: &["▁ a", "a "], ..Keys::default() },
        Keys { merges: &["▁ a", "a a"], ..Keys::default() },
        Keys { merges: &["▁ a", ""], ..Keys::default() },
        Keys { eos: 9, ..Keys::default() },
        Keys { suppress: &[1, -1], ..Keys::default() },
    ];
    let messages: Vec<_> = faults.into_iter().map(|keys| keys.read().unwrap_err().to_string()).collect();
    insta::assert_snapshot!(messages.join("\n"), @r"
    tokenizer.ggml.model is string `llama` and tokenizer.ggml.pre is string `default`; known are `gemma4`, and `llama` with tokenizer.ggml.pre `gemma4`
    tokenizer.ggml.model is string `gpt2` and tokenizer.ggml.pre is not there; known are `gemma4`, and `llama` with tokenizer.ggml.pre `gemma4`
    tokenizer.ggml.token_type has 2 elements, but there are 9 tokens
    tokenizer.ggml.token_type[5] is i32 7: token types are the integers 0 to 6
    tokenizer.ggml.merges[1] is string `▁a`: it has no space
    tokenizer.ggml.merges[1] is string `x a`: no token is its left part
    tokenizer.ggml.merges[1] is string `a `: no token is its right part
    tokenizer.ggml.merges[1] is string `a a`: no token is its two parts joined
    tokenizer.ggml.merges[1] is string ``: it has no space
    tokenizer.ggml.eos_token_id is 9, but there are 9 tokens
    tokenizer.ggml.suppress_tokens[1] is i32 -1: it is not the id of a token
    ");
}
