//! The words a person reads when a GGUF file is not right, as one snapshot: a text that changes is a text that is
//! reviewed.

use std::fmt::Write;
use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_models::gguf::{Gguf, GgufError, Writer};

fn model() -> Writer {
    let mut writer = Writer::new();
    writer.set("general.architecture", "gemma4").unwrap();
    writer.set("gemma4.block_count", 2u32).unwrap();
    writer.set_array("gemma4.feed_forward_length", [64i32, 128, -1]).unwrap();
    writer.set_array("tokenizer.ggml.tokens", ["<pad>", "the"]).unwrap();
    writer.tensor("token_embd.weight", &[32, 4], DType::Q8_0).unwrap();
    writer.tensor("blk.0.attn_q.weight", &[64, 2], DType::Q4_0).unwrap();
    writer
}

fn bytes_of(writer: Writer, folder: &Path) -> Vec<u8> {
    let path = folder.join("model.gguf");
    writer.create(&path).unwrap().finish().unwrap();
    std::fs::read(path).unwrap()
}

/// Where the bytes `after` end in `bytes`.
fn behind(bytes: &[u8], after: &str) -> usize {
    bytes.windows(after.len()).position(|w| w == after.as_bytes()).unwrap() + after.len()
}

/// `bytes` with `new` written `skip` bytes behind the text `after`.
fn patched(bytes: &[u8], after: &str, skip: usize, new: &[u8]) -> Vec<u8> {
    let at = behind(bytes, after) + skip;
    let mut bytes = bytes.to_vec();
    bytes[at..at + new.len()].copy_from_slice(new);
    bytes
}

#[test]
fn each_typical_fault_has_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let good = bytes_of(model(), folder.path());
    let with = |at: usize, new: &[u8]| [&good[..at], new, &good[at + new.len()..]].concat();
    let mut texts = String::new();
    let mut tell = |name: &str, error: GgufError| {
        let text = error.to_string().replace(&format!("{}/", folder.path().display()), "");
        writeln!(texts, "{name}\n    {text}").unwrap();
    };

    let aligned = bytes_of(Writer::with_alignment(64).unwrap(), folder.path());
    let twice = {
        let mut writer = Writer::new();
        writer.set("aa", 1u32).unwrap();
        writer.set("ab", 1u32).unwrap();
        writer.tensor("ta", &[4], DType::F32).unwrap();
        writer.tensor("tb", &[4], DType::F32).unwrap();
        bytes_of(writer, folder.path())
    };
    let q = "blk.0.attn_q.weight";
    let files: [(&str, Vec<u8>); 25] = [
        ("wrong magic", with(0, b"PK\x03\x04")),
        ("an empty file", vec![]),
        ("newer version", with(4, &4u32.to_le_bytes())),
        ("older version", with(4, &1u32.to_le_bytes())),
        ("big-endian", with(4, &3u32.to_be_bytes())),
        ("cut in the fixed header", good[..17].to_vec()),
        ("cut in a key", good[..behind(&good, "gemma4.bl")].to_vec()),
        ("cut in a value", good[..behind(&good, "gemma4.block_count") + 5].to_vec()),
        ("cut in an array", good[..behind(&good, "<pad>") + 4].to_vec()),
        ("cut in the tensor table", good[..behind(&good, q) + 10].to_vec()),
        ("cut tensor", good[..good.len() - 64].to_vec()),
        ("absurd tensor count", with(8, &(1u64 << 60).to_le_bytes())),
        ("absurd key count", with(16, &u64::MAX.to_le_bytes())),
        ("absurd array length", patched(&good, "tokenizer.ggml.tokens", 8, &(1u64 << 60).to_le_bytes())),
        ("absurd key length", with(24, &(1u64 << 40).to_le_bytes())),
        ("a key that is not text", patched(&good, "gemma4.bl", 0, &[0xff])),
        ("a token that is not text", patched(&good, "<pa", 0, &[0xc3])),
        ("unknown value type", patched(&good, "gemma4.block_count", 0, &[99])),
        ("array of arrays", patched(&good, "tokenizer.ggml.tokens", 4, &[9])),
        ("alignment not a power of two", patched(&aligned, "general.alignment", 4, &[48])),
        ("misaligned tensor", patched(&good, q, 4 + 16 + 4, &[7])),
        ("too many dimensions", patched(&good, q, 0, &[5])),
        ("a dimension of 0", patched(&good, q, 4, &[0; 8])),
        ("a size that overflows", patched(&good, q, 4 + 8, &u64::MAX.to_le_bytes())),
        ("a row that is not whole blocks", patched(&good, q, 4, &[65])),
    ];
    for (name, bytes) in files {
        let path = folder.path().join("bad.gguf");
        std::fs::write(&path, bytes).unwrap();
        tell(name, Gguf::open(&path).expect_err(name));
    }
    for (name, from, to) in [("duplicate key", "ab", b"aa"), ("duplicate tensor", "tb", b"ta")] {
        let path = folder.path().join("bad.gguf");
        let at = behind(&twice, from) - 2;
        std::fs::write(&path, [&twice[..at], to, &twice[at + 2..]].concat()).unwrap();
        tell(name, Gguf::open(&path).expect_err(name));
    }

    let path = folder.path().join("model.gguf");
    std::fs::write(&path, patched(&good, q, 4 + 16, &41u32.to_le_bytes())).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let metadata = gguf.metadata();
    tell("unsupported tensor type, once asked for", gguf.tensor(q).unwrap().dtype().unwrap_err());
    tell("missing key", metadata.u32("gemma4.context_length").unwrap_err());
    tell("key of another type", metadata.u32("general.architecture").unwrap_err());
    tell("array of another length", metadata.per_layer_u32("gemma4.feed_forward_length", 2).unwrap_err());
    tell("element out of range", metadata.per_layer_u32("gemma4.feed_forward_length", 3).unwrap_err());
    tell("absurd layer count", metadata.per_layer_u32("gemma4.block_count", u32::MAX).unwrap_err());

    tell("no such file", Gguf::open(folder.path().join("absent.gguf")).unwrap_err());
    std::fs::create_dir(folder.path().join("folder.gguf")).unwrap();
    tell("a folder", Gguf::open(folder.path().join("folder.gguf")).unwrap_err());

    let part = |number: u16, tensors: i32| {
        let mut writer = Writer::new();
        writer.set("split.no", number).unwrap();
        writer.set("split.count", 2u16).unwrap();
        writer.set("split.tensors.count", tensors).unwrap();
        writer.tensor(&format!("t{number}"), &[4], DType::F32).unwrap();
        bytes_of(writer, folder.path())
    };
    let first = folder.path().join("split-00001-of-00002.gguf");
    let second = folder.path().join("split-00002-of-00002.gguf");
    std::fs::write(&first, part(0, 2)).unwrap();
    tell("missing split part", Gguf::open(&first).unwrap_err());
    std::fs::write(&second, part(0, 2)).unwrap();
    tell("a split part under another's name", Gguf::open(&first).unwrap_err());
    std::fs::write(&second, part(1, 2)).unwrap();
    std::fs::write(&first, part(0, 3)).unwrap();
    tell("split parts that lack tensors", Gguf::open(&second).unwrap_err());
    let loose = folder.path().join("loose.gguf");
    std::fs::rename(&second, &loose).unwrap();
    tell("a split part with a name of its own", Gguf::open(&loose).unwrap_err());

    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../snapshots/errors"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!("gguf", texts));
}
