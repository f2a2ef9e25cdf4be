//! The types in which keys and values are kept, and the bytes of a head's row in each.
//!
//! A row of a cache is its heads one after the other. In 8 bits a head is its codes and then, for q8_0, the scales of
//! its groups of 32 values, filled up to 16 bytes: what a GPU copies at once. So a head is one run of bytes, whatever
//! its type, and a row too.

use gemma4c_blocks::narrow::{self, GROUP};
use serde::{Deserialize, Serialize};

/// Type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvType {
    F16,
    BF16,
    F32,
    /// int8 codes with an f16 scale for each 32 values of a head.
    Q8_0,
    /// e4m3, without a scale.
    Fp8,
}

impl KvType {
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::BF16 => "bf16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
            KvType::Fp8 => "fp8",
        }
    }

    /// Values in 8 bits, in whose codes nothing can be added or multiplied: they are widened first.
    pub const fn is_narrow(self) -> bool {
        matches!(self, KvType::Q8_0 | KvType::Fp8)
    }

    /// Bytes of the elements that kernels count a cache in. Of 8-bit types they are words of two codes.
    pub const fn bytes(self) -> u64 {
        match self {
            KvType::F16 | KvType::BF16 | KvType::Q8_0 | KvType::Fp8 => 2,
            KvType::F32 => 4,
        }
    }

    /// Bytes of one head's key or value.
    pub const fn head_bytes(self, head_dim: u32) -> u64 {
        let dim = head_dim as u64;
        match self {
            KvType::F16 | KvType::BF16 => dim * 2,
            KvType::F32 => dim * 4,
            KvType::Q8_0 => (dim + dim.div_ceil(GROUP as u64) * 2).next_multiple_of(16),
            KvType::Fp8 => dim.next_multiple_of(16),
        }
    }

    /// Bytes of the keys, or of the values, of one position.
    pub const fn row_bytes(self, kv_heads: u32, head_dim: u32) -> u64 {
        kv_heads as u64 * self.head_bytes(head_dim)
    }

    /// What a CPU rounds keys and values to, which it keeps in f32: to 8 bits as a GPU does, and else not at all.
    pub const fn on_cpu(self) -> KvType {
        if self.is_narrow() { self } else { KvType::F32 }
    }

    /// Rounds one head's values as a GPU that keeps them in this type. Only 8-bit types have a meaning on a CPU.
    pub fn round_head(self, head: &mut [f32]) {
        match self {
            KvType::F16 | KvType::BF16 | KvType::F32 => {}
            KvType::Q8_0 => {
                for group in head.chunks_mut(GROUP) {
                    let mut codes = [0; GROUP];
                    let scale = narrow::q8_0_from_f32(group, &mut codes);
                    group.iter_mut().zip(codes).for_each(|(value, code)| *value = narrow::q8_0_to_f32(code, scale));
                }
            }
            KvType::Fp8 => head.iter_mut().for_each(|value| *value = narrow::fp8_to_f32(narrow::fp8_from_f32(*value))),
        }
    }

    /// One head's values in 8 bits, as they lie in a GPU's memory; `None` for other types.
    pub fn narrow_head(self, head: &[f32]) -> Option<Vec<u8>> {
        let mut bytes = vec![0; head.len()];
        match self {
            KvType::F16 | KvType::BF16 | KvType::F32 => return None,
            KvType::Q8_0 => {
                let groups = head.chunks(GROUP).zip(bytes.chunks_mut(GROUP));
                let scales: Vec<_> = groups.map(|(values, codes)| narrow::q8_0_from_f32(values, codes)).collect();
                bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
            }
            KvType::Fp8 => bytes.iter_mut().zip(head).for_each(|(code, value)| *code = narrow::fp8_from_f32(*value)),
        }
        bytes.resize(self.head_bytes(head.len() as u32) as usize, 0);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_34_bytes_for_32_values_in_whole_copies() {
        let bytes = |dim| [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Fp8].map(|kv| kv.head_bytes(dim));
        assert_eq!(bytes(256), [512, 1024, 272, 256]);
        assert_eq!(bytes(512), [1024, 2048, 544, 512]);
        assert_eq!(bytes(128), [256, 512, 144, 128]);
        assert_eq!(KvType::Q8_0.row_bytes(16, 256), 16 * 272);
    }

    #[test]
    fn a_rounded_head_is_what_its_bytes_are_read_as() {
        let values: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.031).collect();
        for kv in [KvType::Q8_0, KvType::Fp8] {
            let mut rounded = values.clone();
            kv.round_head(&mut rounded);
            let bytes = kv.narrow_head(&values).expect("8 bits");
            let read = |i: usize| match kv {
                KvType::Q8_0 => {
                    let scale = [bytes[128 + i / 32 * 2], bytes[129 + i / 32 * 2]];
                    narrow::q8_0_to_f32(bytes[i], narrow::scale_from(scale))
                }
                _ => narrow::fp8_to_f32(bytes[i]),
            };
            assert!(rounded != values && (0..128).all(|i| read(i) == rounded[i]), "{kv:?}");
        }
        for kv in [KvType::F16, KvType::BF16, KvType::F32] {
            let mut same = values.clone();
            kv.round_head(&mut same);
            assert!(same == values && kv.narrow_head(&values).is_none(), "{kv:?}");
        }
    }

    #[test]
    fn scales_follow_all_codes_of_a_head() {
        let mut head = [0.0f32; 64];
        (head[0], head[40]) = (127.0, -254.0);
        let bytes = KvType::Q8_0.narrow_head(&head).expect("8 bits");
        // Codes are stored as 128 more.
        assert_eq!((bytes.len(), bytes[0], bytes[40]), (80, 128 + 127, 128 - 127));
        assert_eq!(bytes[64..68], [0x00, 0x3c, 0x00, 0x40]);
    }
}
