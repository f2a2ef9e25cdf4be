//! What the writer writes, the reader reads: all value types, all tensor types, split files.

use std::path::Path;

use gemma4c_blocks::DType;
use gemma4c_models::gguf::{Gguf, GgufError, Value, WriteError, Writer};

/// A file of `tensors` F32 tensors named from `first` on, as part `number` of `count`.
fn write_part(path: &Path, number: u16, count: u16, first: usize, tensors: usize, total: i32) {
    let mut writer = Writer::new();
    if number == 0 {
        writer.set("general.architecture", "gemma4").unwrap();
    }
    writer.set("split.no", number).unwrap();
    writer.set("split.count", count).unwrap();
    writer.set("split.tensors.count", total).unwrap();
    for i in 0..tensors {
        writer.tensor(&format!("t{}", first + i), &[8], DType::F32).unwrap();
    }
    let body = writer.create(path).unwrap();
    for i in 0..tensors {
        body.write_at(i, 0, &[(first + i) as u8; 32]).unwrap();
    }
    body.finish().unwrap();
}

#[test]
fn every_value_type_survives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("values.gguf");
    let scalars: [(&str, Value<'_>); 12] = [
        ("u8", Value::U8(u8::MAX)),
        ("i8", Value::I8(i8::MIN)),
        ("u16", Value::U16(u16::MAX)),
        ("i16", Value::I16(i16::MIN)),
        ("u32", Value::U32(u32::MAX)),
        ("i32", Value::I32(i32::MIN)),
        ("f32", Value::F32(1e-6)),
        ("bool", Value::Bool(true)),
        ("str", Value::Str("▁text\n")),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(-0.5)),
    ];
    let strings: Vec<String> = (0..1000).map(|i| format!("token {i}")).collect();

    let mut writer = Writer::new();
    for (key, value) in scalars {
        writer.set(key, value).unwrap();
    }
    writer.set_array("strings", strings.iter().map(String::as_str)).unwrap();
    writer.set_array("floats", [0.5f32, -1000.0]).unwrap();
    writer.set_array("flags", [true, false, true]).unwrap();
    writer.set_array("widths", [6144i32, 12288]).unwrap();
    writer.set_array::<u8>("empty", []).unwrap();
    assert!(matches!(writer.set("u8", 1u8), Err(WriteError::Duplicate { .. })));
    writer.create(&path).unwrap().finish().unwrap();

    let gguf = Gguf::open(&path).unwrap();
    let metadata = gguf.metadata();
    for (key, value) in scalars {
        assert_eq!(metadata.get(key), Some(value));
    }
    assert_eq!(metadata.len(), scalars.len() + 5);
    let keys: Vec<&str> = metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(keys[..3], ["u8", "i8", "u16"], "the file's order is kept");
    assert_eq!(metadata.array("strings").unwrap().strings().unwrap().collect::<Vec<_>>(), strings);
    assert_eq!(metadata.per_layer_bool("flags", 3).unwrap(), [true, false, true]);
    assert_eq!(metadata.per_layer_u32("widths", 2).unwrap(), [6144, 12288]);
    assert_eq!(metadata.per_layer_u32("u16", 2).unwrap(), [65535; 2]);
    assert!(metadata.array("empty").unwrap().is_empty());
    assert!(metadata.array("floats").unwrap().strings().is_none());
    assert_eq!(metadata.u32("u8").unwrap(), 255);
    assert_eq!(metadata.optional::<u32>("absent").unwrap(), None);

    // Copied from one file to another, arrays keep their bytes.
    let copy = folder.path().join("copy.gguf");
    let mut writer = Writer::new();
    for (key, value) in metadata.iter() {
        writer.set(key, value).unwrap();
    }
    writer.create(&copy).unwrap().finish().unwrap();
    assert_eq!(std::fs::read(&copy).unwrap(), std::fs::read(&path).unwrap());
}

#[test]
fn tensors_of_every_type_come_back_aligned() {
    let folder = tempfile::tempdir().unwrap();
    for alignment in [1u32, 32, 4096] {
        let path = folder.path().join(format!("{alignment}.gguf"));
        let mut writer = Writer::with_alignment(alignment).unwrap();
        let types: Vec<DType> = DType::of_files().collect();
        for &dtype in &types {
            writer.tensor(dtype.name(), &[256, 3, 2], dtype).unwrap();
        }
        let body = writer.create(&path).unwrap();
        for i in 0..types.len() {
            let bytes: Vec<u8> = (0..body.tensor_len(i)).map(|j| (j * 7 + i as u64) as u8).collect();
            let (front, back) = bytes.split_at(bytes.len() / 3);
            body.write_at(i, front.len() as u64, back).unwrap();
            body.write_at(i, 0, front).unwrap();
            assert!(matches!(body.write_at(i, 1, &bytes), Err(WriteError::OutOfRange { .. })));
        }
        body.finish().unwrap();

        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.tensors().len(), types.len());
        for (i, tensor) in gguf.tensors().iter().enumerate() {
            assert_eq!((tensor.dtype().unwrap(), tensor.dims()), (types[i], &[256, 3, 2][..]));
            assert!(tensor.offset.is_multiple_of(alignment.into()));
            assert!(gguf.data(tensor).iter().enumerate().all(|(j, &b)| b == (j * 7 + i) as u8), "{}", tensor.name);
        }
    }
}

#[test]
fn an_unfinished_file_leaves_nothing_and_an_old_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, "old").unwrap();
    let mut writer = Writer::new();
    writer.tensor("t", &[4], DType::F32).unwrap();
    drop(writer.create(&path).unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_split_model_opens_as_one_from_any_part() {
    let folder = tempfile::tempdir().unwrap();
    let part = |n: usize| folder.path().join(format!("m-0000{n}-of-00003.gguf"));
    for (n, first, tensors) in [(1, 0, 2), (2, 2, 3), (3, 5, 1)] {
        write_part(&part(n), n as u16 - 1, 3, first, tensors, 6);
    }
    let mut fingerprints = Vec::new();
    for n in 1..=3 {
        let gguf = Gguf::open(part(n)).unwrap();
        let paths: Vec<_> = gguf.files().iter().map(|f| f.path.clone()).collect();
        assert_eq!(paths, [part(1), part(2), part(3)]);
        assert_eq!(gguf.metadata().str("general.architecture").unwrap(), "gemma4");
        for i in 0..6 {
            let tensor = gguf.tensor(&format!("t{i}")).unwrap();
            assert_eq!(gguf.data(tensor), [i as u8; 32]);
            assert_eq!(tensor.file, [0, 0, 1, 1, 1, 2][i]);
        }
        fingerprints.push(gguf.fingerprint(gguf.tensors()));
    }
    assert!(fingerprints.iter().all(|f| *f == fingerprints[0]));

    // A part from another model of the same name and shape changes the fingerprint.
    let mut bytes = std::fs::read(part(3)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(part(3), bytes).unwrap();
    let gguf = Gguf::open(part(1)).unwrap();
    assert_ne!(gguf.fingerprint(gguf.tensors()), fingerprints[0]);

    std::fs::remove_file(part(2)).unwrap();
    match Gguf::open(part(3)) {
        Err(GgufError::MissingPart { path, part: 2, count: 3 }) => assert_eq!(path, part(2)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_unknown_type_is_an_error_only_for_who_asks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vision.gguf");
    let mut writer = Writer::new();
    writer.tensor("token_embd.weight", &[32], DType::F32).unwrap();
    writer.tensor("v.patch.weight", &[32], DType::F32).unwrap();
    let body = writer.create(&path).unwrap();
    body.finish().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let name = bytes.windows(14).position(|w| w == b"v.patch.weight").unwrap();
    let type_at = name + 14 + 4 + 8;
    bytes[type_at..type_at + 4].copy_from_slice(&41u32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();

    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().dtype().unwrap(), DType::F32);
    let vision = gguf.tensor("v.patch.weight").unwrap();
    assert_eq!((vision.ggml_type, vision.len), (41, 0));
    assert!(matches!(vision.dtype(), Err(GgufError::UnsupportedType { id: 41, .. })));
}
