//! Model files made wrong on purpose: a copy of a good one with keys or tensors changed.

use std::path::Path;

use gemma4c_models::gguf::{Body, Gguf, TensorInfo, Value, Writer};

/// What happens to a key of the original.
pub enum Key<'v> {
    Keep,
    Drop,
    Set(Value<'v>),
}

/// Copies the model at `from` to `to`. `key` decides on each key; `shape` gives each tensor's dimensions, or `None` to
/// leave it out. A tensor whose shape changes is as many of its first bytes as it then has, and then zeros.
pub fn rewrite(
    from: &Path,
    to: &Path,
    key: impl Fn(&str) -> Key<'static>,
    shape: impl Fn(&TensorInfo) -> Option<Vec<u64>>,
) {
    let original = Gguf::open(from).expect("the original opens");
    let (body, kept) = begin(&original, to, key, shape);
    for (index, tensor) in kept.into_iter().enumerate() {
        let bytes = original.data(tensor);
        let len = bytes.len().min(body.tensor_len(index) as usize);
        body.write_at(index, 0, &bytes[..len]).expect("the copy is written");
    }
    body.finish().expect("the copy is complete");
}

/// The same, but the tensors' data is a hole: for whoever looks at headers alone.
pub fn rewrite_header(
    original: &Gguf,
    to: &Path,
    key: impl Fn(&str) -> Key<'static>,
    shape: impl Fn(&TensorInfo) -> Option<Vec<u64>>,
) {
    begin(original, to, key, shape).0.finish().expect("the copy is complete");
}

/// The copy with its header written, and the originals of its tensors in their order.
fn begin<'a>(
    original: &'a Gguf,
    to: &Path,
    key: impl Fn(&str) -> Key<'static>,
    shape: impl Fn(&TensorInfo) -> Option<Vec<u64>>,
) -> (Body, Vec<&'a TensorInfo>) {
    let mut writer = Writer::new();
    for (name, value) in original.metadata().iter() {
        match key(name) {
            Key::Keep => writer.set(name, value).expect("a key"),
            Key::Set(value) => writer.set(name, value).expect("a key"),
            Key::Drop => {}
        }
    }
    let mut kept = Vec::new();
    for tensor in original.tensors() {
        if let Some(dims) = shape(tensor) {
            writer.tensor(&tensor.name, &dims, tensor.dtype().expect("a known type")).expect("a tensor");
            kept.push(tensor);
        }
    }
    (writer.create(to).expect("the copy is created"), kept)
}

/// The shape a tensor has.
pub fn same(tensor: &TensorInfo) -> Option<Vec<u64>> {
    Some(tensor.dims().to_vec())
}
