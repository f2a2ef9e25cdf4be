//! The tokenizer against llama.cpp's and Hugging Face's ids, against a plain version of itself, and against bad input.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::golden;
use gemma4c_models::gguf::Gguf;
use gemma4c_models::tokenizer::{EncodeOptions, Tokenizer, TokenizerError, vocab_from_metadata};
use gemma4c_plan::{Merge, Strings, TokenKind, Vocab};
use proptest::prelude::*;

const PLAIN: EncodeOptions = EncodeOptions { add_bos: false, parse_special: false };
const SPECIAL: EncodeOptions = EncodeOptions { add_bos: false, parse_special: true };

fn vocab_of(path: &Path) -> Vocab {
    vocab_from_metadata(Gguf::open(path).unwrap().metadata()).unwrap().expect("the file has a vocabulary")
}

fn real_vocab() -> Option<Vocab> {
    Some(vocab_of(&golden::folder()?.join("ggml-vocab-gemma-4.gguf")))
}

#[test]
fn real_vocabulary_gives_the_reference_ids() {
    let Some(folder) = golden::folder() else { return };
    let tokenizer = Tokenizer::new(&vocab_of(&folder.join("ggml-vocab-gemma-4.gguf"))).unwrap();
    let texts = std::fs::read_to_string(folder.join("ggml-vocab-gemma-4.gguf.inp")).unwrap();
    let ids = std::fs::read_to_string(folder.join("ggml-vocab-gemma-4.gguf.out")).unwrap();
    let texts: Vec<_> = texts.split("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<Vec<u32>> =
        ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect()).collect();
    assert_eq!((texts.len(), ids.len()), (46, 46));
    for (text, ids) in texts.iter().zip(&ids) {
        assert_eq!(&tokenizer.encode(text, PLAIN), ids, "{text:?}");
        assert_eq!(&tokenizer.decode(ids, false).unwrap(), text);
    }
}

#[test]
fn every_model_gives_the_reference_ids() {
    let (folder, models) = (golden::some(), golden::of(&golden::TEXT));
    let mut texts = 0;
    for model in &models {
        let tokenizer = Tokenizer::new(&vocab_of(&folder.join(format!("{model}.gguf")))).unwrap();
        let cases = std::fs::read(folder.join(format!("{model}.tokens.json"))).unwrap();
        let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let flag = |name: &str| case[name].as_bool().unwrap();
            let options = EncodeOptions { add_bos: flag("add_bos"), parse_special: flag("parse_special") };
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text, options), ids, "{text:?} in {model}");
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["pieces"].as_str().unwrap(), "in {model}");
            texts += 1;
        }
    }
    assert_eq!(texts, 20 * models.len());
}

#[test]
fn real_vocabulary_is_read_right() {
    let Some(vocab) = real_vocab() else { return };
    assert_eq!((vocab.tokens.len(), vocab.merges.len()), (262_144, 514_906));
    assert_eq!((vocab.bos, vocab.eos, vocab.unknown, vocab.add_bos), (Some(2), Some(1), Some(3), true));
    assert_eq!(vocab.stop, [1, 50, 106]);
    assert_eq!(vocab.suppress, [255999, 256000, 258880, 258881, 258882, 258883, 258884]);
    let of_kind = |kind| (0..).zip(&vocab.kinds).filter(move |(_, k)| **k == kind).map(|(id, _): (u32, _)| id);
    assert_eq!(of_kind(TokenKind::UserDefined).collect::<Vec<_>>(), [48, 49, 50, 51, 52, 100, 101]);
    assert_eq!(of_kind(TokenKind::Control).count(), 17);
    assert_eq!(of_kind(TokenKind::Byte).collect::<Vec<_>>(), (238..=493).collect::<Vec<_>>());
    assert!(vocab.chat_template.is_some());
}

/// References that split text at newline runs and take short runs whole agree with plain merging because of this.
#[test]
fn newline_runs_need_no_rule() {
    let Some(vocab) = real_vocab() else { return };
    let text = |id: u32| vocab.tokens.get(id as usize).unwrap();
    let crossing = |m: &&Merge| text(m.left).ends_with('\n') != text(m.right).starts_with('\n');
    assert_eq!(vocab.merges.iter().find(crossing), None);
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    for length in 1..=31u32 {
        assert_eq!(tokenizer.encode(&"\n".repeat(length as usize), PLAIN), [106 + length]);
    }
    assert_eq!(tokenizer.encode(&"\n".repeat(40), PLAIN), [137, 115]);
}

#[test]
fn control_tokens_are_parsed_only_if_asked_for() {
    let Some(vocab) = real_vocab() else { return };
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    let text = "<bos><|turn>user\nHi<turn|>\n<|channel>";
    let ids = tokenizer.encode(text, SPECIAL);
    assert_eq!(ids, [2, 105, 2364, 107, 10979, 106, 107, 100]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "user\nHi\n<|channel>");
    let ids = tokenizer.encode(text, PLAIN);
    assert!(!ids.contains(&2) && !ids.contains(&105) && !ids.contains(&106) && ids.ends_with(&[100]));
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(tokenizer.encode("", EncodeOptions { add_bos: true, parse_special: false }), [2]);
}

/// A vocabulary of bytes, some characters and some merges: `<bos>`, `<turn|>`, `<|channel>`, `<0x00>` …, `▁`, `a` …
fn small_vocab(merges: &[(usize, usize)]) -> Vocab {
    let mut vocab = Vocab { bos: Some(0), add_bos: true, ..Vocab::default() };
    let mut by_text: HashMap<String, u32> = HashMap::new();
    let mut add = |vocab: &mut Vocab, text: &str, kind| {
        *by_text.entry(text.into()).or_insert_with(|| {
            assert!(vocab.tokens.push(text));
            vocab.kinds.push(kind);
            vocab.tokens.len() as u32 - 1
        })
    };
    add(&mut vocab, "<bos>", TokenKind::Control);
    add(&mut vocab, "<turn|>", TokenKind::Control);
    add(&mut vocab, "<|channel>", TokenKind::UserDefined);
    for byte in 0..=255u8 {
        add(&mut vocab, &format!("<0x{byte:02X}>"), TokenKind::Byte);
    }
    let first = vocab.tokens.len();
    for character in "▁abcé\n".chars() {
        add(&mut vocab, &character.to_string(), TokenKind::Normal);
    }
    for &(left, right) in merges {
        let pick = |seed: usize| first + seed % (vocab.tokens.len() - first);
        let (left, right) = (pick(left), pick(right));
        let joined = [left, right].map(|id| vocab.tokens.get(id).unwrap()).concat();
        let result = add(&mut vocab, &joined, TokenKind::Normal);
        vocab.merges.push(Merge { left: left as u32, right: right as u32, result });
    }
    vocab
}

/// The definition, word for word: the leftmost pair of the lowest rank, again and again.
fn plain_merging(vocab: &Vocab, mut ids: Vec<u32>) -> Vec<u32> {
    loop {
        let rank = |pair: &[u32]| vocab.merges.iter().position(|m| [m.left, m.right] == pair);
        let best = ids.windows(2).enumerate().filter_map(|(at, pair)| Some((rank(pair)?, at))).min();
        let Some((rank, at)) = best else { return ids };
        ids.splice(at..at + 2, [vocab.merges[rank].result]);
    }
}

proptest! {
    #[test]
    fn merging_equals_its_definition(
        merges in prop::collection::vec((0usize..64, 0usize..64), 0..48),
        text in "[ abcé\n]{0,40}",
    ) {
        let vocab = small_vocab(&merges);
        let characters = text.replace(' ', "▁");
        let id = |c: char| (0u32..).zip(vocab.tokens.iter()).find(|(_, t)| *t == c.to_string()).unwrap().0;
        let expected = plain_merging(&vocab, characters.chars().map(id).collect());
        prop_assert_eq!(Tokenizer::new(&vocab).unwrap().encode(&text, PLAIN), expected);
    }

    #[test]
    fn any_text_survives(
        merges in prop::collection::vec((0usize..64, 0usize..64), 0..16),
        text in "([ abcé\n]|\\PC|<turn\\|>|<\\|channel>|<0x41>){0,60}",
        parse_special: bool,
    ) {
        let tokenizer = Tokenizer::new(&small_vocab(&merges)).unwrap();
        let ids = tokenizer.encode(&text, EncodeOptions { add_bos: false, parse_special });
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text.replace('▁', " "));
    }

    /// The pieces, joined, are the whole text.
    #[test]
    fn streaming_equals_decoding(ids in prop::collection::vec(0u32..265, 0..40), show_control: bool) {
        let tokenizer = Tokenizer::new(&small_vocab(&[])).unwrap();
        let mut detokenizer = tokenizer.detokenizer(show_control);
        let mut text = String::new();
        for &id in &ids {
            text.push_str(detokenizer.push(id).unwrap());
        }
        text.push_str(&detokenizer.finish());
        prop_assert_eq!(&text, &tokenizer.decode(&ids, show_control).unwrap());
        if ids.iter().all(|id| (3..259).contains(id)) {
            let bytes: Vec<u8> = ids.iter().map(|id| (id - 3) as u8).collect();
            prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
        }
    }

    /// A vocabulary from a hostile plan: an error or a tokenizer that works, never a panic.
    #[test]
    fn no_vocabulary_panics(
        merges in prop::collection::vec((0u32..280, 0u32..280, 0u32..280), 0..8),
        kinds in prop::collection::vec((0usize..300, 0u8..6), 0..3),
        cut in 0usize..3,
        bos in prop::option::of(0u32..300),
        text in "[ abc<>|x0-9]{0,20}",
    ) {
        let mut vocab = small_vocab(&[(1, 2), (2, 3), (7, 1)]);
        vocab.bos = bos;
        vocab.merges.extend(merges.iter().map(|&(left, right, result)| Merge { left, right, result }));
        for (id, kind) in kinds {
            use TokenKind::*;
            let id = id % vocab.kinds.len();
            vocab.kinds[id] = [Normal, Control, UserDefined, Byte, Unknown, Unused][kind as usize];
        }
        vocab.kinds.truncate(vocab.kinds.len() - cut);
        if let Ok(tokenizer) = Tokenizer::new(&vocab) {
            let ids = tokenizer.encode(&text, EncodeOptions { add_bos: true, parse_special: true });
            prop_assert!(tokenizer.decode(&ids, true).is_ok());
        }
    }
}

#[test]
fn any_unicode_survives_the_real_vocabulary() {
    let Some(vocab) = real_vocab() else { return };
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    proptest!(|(text in "(\\PC|[\u{0}-\u{7f}]|\\w{1,12} ?|<\\|channel>|<eos>|<table>| {1,40}|\n{1,40}){0,80}", parse_special: bool)| {
        let ids = tokenizer.encode(&text, EncodeOptions { add_bos: false, parse_special });
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text.replace('▁', " "));
    });
}

#[test]
fn a_stream_never_shows_half_a_character() {
    let tokenizer = Tokenizer::new(&small_vocab(&[])).unwrap();
    let byte = |byte: u8| u32::from(byte) + 3;
    let pieces = |ids: &[u32]| {
        let mut detokenizer = tokenizer.detokenizer(false);
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id).unwrap().to_owned()).collect();
        pieces.push(detokenizer.finish());
        pieces
    };
    let llama = [0xF0, 0x9F, 0xA6, 0x99].map(byte);
    let (letter_a, bos, channel) = (260, 0, 2);
    assert_eq!(pieces(&llama), ["", "", "", "🦙", ""]);
    assert_eq!(pieces(&llama[..3]), ["", "", "", "\u{FFFD}"]);
    assert_eq!(pieces(&[llama[0], letter_a]), ["", "\u{FFFD}a", ""]);
    assert_eq!(pieces(&[byte(0xFF), llama[0], byte(b'x')]), ["\u{FFFD}", "", "\u{FFFD}x", ""]);
    assert_eq!(
        pieces(&[llama[0], llama[1], llama[0], llama[1], llama[2], llama[3]]),
        ["", "", "\u{FFFD}", "", "", "🦙", ""]
    );
    // A hidden token leaves no trace, a shown one is text like any other.
    assert_eq!(pieces(&[llama[0], bos, llama[1], llama[2], llama[3]]), ["", "", "", "", "🦙", ""]);
    assert_eq!(pieces(&[llama[0], channel]), ["", "\u{FFFD}<|channel>", ""]);
}

#[test]
fn unknown_stands_for_a_character_where_there_are_no_byte_tokens() {
    let mut vocab = Vocab { tokens: Strings::default(), unknown: Some(0), ..Vocab::default() };
    for (text, kind) in [("<unk>", TokenKind::Unknown), ("a", TokenKind::Normal)] {
        assert!(vocab.tokens.push(text));
        vocab.kinds.push(kind);
    }
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    assert_eq!(tokenizer.encode("aéa", PLAIN), [1, 0, 1]);
    assert_eq!(tokenizer.decode(&[1, 0, 1], false).unwrap(), "aa");
}

#[test]
fn bad_vocabularies_and_ids_are_named() {
    let error = |change: &dyn Fn(&mut Vocab)| {
        let mut vocab = small_vocab(&[(1, 2)]);
        change(&mut vocab);
        Tokenizer::new(&vocab).unwrap_err()
    };
    let merge = |left, right, result| Merge { left, right, result };
    let messages = [
        error(&|v| v.kinds.truncate(100)),
        error(&|v| v.bos = Some(266)),
        error(&|v| v.stop = vec![1, 999]),
        error(&|v| v.merges.push(merge(260, 4_000_000_000, 265))),
        error(&|v| v.merges.push(merge(260, 260, 265))),
        error(&|v| v.kinds[260] = TokenKind::Byte),
        error(&|v| v.kinds[3 + 0x41] = TokenKind::Normal),
        error(&|v| {
            assert!(v.tokens.push(&"<".repeat(1000)));
            v.kinds.push(TokenKind::Control);
        }),
        // What a damaged file can hold but `Strings` would never build: an end beyond the text.
        error(&|v| v.tokens = serde_json::from_value(serde_json::json!({"text": "ab", "ends": [1, 9]})).unwrap()),
        Tokenizer::new(&small_vocab(&[])).unwrap().decode(&[1, 265], true).unwrap_err(),
    ]
    .map(|error: TokenizerError| error.to_string());
    insta::assert_snapshot!(messages.join("\n"), @r"
    vocabulary: 266 tokens, but 100 token kinds
    vocabulary: bos names token 266, but there are 266 tokens
    vocabulary: the stop list names token 999, but there are 266 tokens
    vocabulary: merge 1 names token 4000000000, but there are 266 tokens
    vocabulary: merge 1 joins tokens 260 and 260, but token 265 does not spell them joined
    vocabulary: byte token 260 is not spelled like `<0x1F>`
    vocabulary: no token for byte 0x41, and no unknown token either
    vocabulary: special token 266 is 1000 bytes long (at most 256 are allowed)
    vocabulary: the token texts are inconsistent (their ends do not lie in order within the text)
    token 265 is not in the vocabulary of 265 tokens
    ");
}

/// One long fragment, whatever it says, takes near-linear time.
#[test]
fn a_megabyte_takes_less_than_two_seconds() {
    let Some(vocab) = real_vocab() else { return };
    let start = Instant::now();
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    eprintln!("{:>28}: {:?}", "build", start.elapsed());
    let limit = Duration::from_secs(if cfg!(debug_assertions) { 10 } else { 2 });
    let prose =
        "It was the best of times, it was the worst of times; 1859 — Ein Märchen, 42 Äpfel. Съешь ещё этих булок 🦙\n";
    let words = prose.replace('\n', " ");
    for (name, unit) in [
        ("prose", prose),
        ("prose on one line", &words),
        ("one letter", "a"),
        ("spaces", " "),
        ("newlines", "\n"),
        ("no space", "supercalifragilistic"),
        ("byte tokens", "\u{1F999}"),
        ("angle brackets", "<"),
        ("almost special", "<|tool_respons"),
        ("special", "<turn|>"),
        ("user-defined", "<|channel>"),
    ] {
        let text = unit.repeat(1_000_000 / unit.len() + 1);
        let start = Instant::now();
        let ids = tokenizer.encode(&text, SPECIAL);
        let encoding = start.elapsed();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        eprintln!(
            "{name:>28}: {} bytes, {} ids in {encoding:?}, and back {:?}",
            text.len(),
            ids.len(),
            start.elapsed() - encoding
        );
        assert!(encoding < limit, "{name}: {encoding:?}");
    }
}
