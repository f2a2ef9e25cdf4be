//! Keys and values as caches of every type hold them. Cases think of a cache as of values; here they become elements, head by head.

use gemma4c_dsl::harness::{Bound, Data};
use gemma4c_dsl::{BF16, F16, Float};
use gemma4c_plan::cuda::KvType;

/// Elements of so many values, which are whole heads where the type has 8 bits.
pub fn elements(kv: KvType, dim: usize, values: usize) -> usize {
    match kv.is_narrow() {
        true => values / dim * (kv.head_bytes(dim as u32) / kv.bytes()) as usize,
        false => values,
    }
}

/// The elements of a cache with these values.
pub fn data(kv: KvType, dim: usize, values: &[f32]) -> Data {
    match kv {
        KvType::F16 => values.iter().map(|&v| F16::from_f32(v)).collect::<Vec<_>>().into(),
        KvType::BF16 => values.iter().map(|&v| BF16::from_f32(v)).collect::<Vec<_>>().into(),
        KvType::F32 => values.into(),
        KvType::Q8_0 | KvType::Fp8 => {
            assert!(values.len().is_multiple_of(dim), "whole heads");
            let bytes: Vec<u8> = values.chunks(dim).flat_map(|head| kv.narrow_head(head)).flatten().collect();
            let words = bytes.chunks_exact(2).map(|b| F16::from_bits(u16::from_le_bytes([b[0], b[1]])));
            words.collect::<Vec<_>>().into()
        }
    }
}

/// Values as they are read again, of whole heads.
pub fn round(kv: KvType, dim: usize, values: &mut [f32]) {
    match kv {
        KvType::F16 => values.iter_mut().for_each(|v| *v = F16::from_f32(*v).to_f32()),
        KvType::BF16 => values.iter_mut().for_each(|v| *v = BF16::from_f32(*v).to_f32()),
        KvType::F32 => {}
        KvType::Q8_0 | KvType::Fp8 => values.chunks_mut(dim).for_each(|head| kv.round_head(head)),
    }
}

/// The same, until nothing changes: values that a cache holds exactly. (f16 rounds the largest value of a q8_0 group, which may give it
/// another scale.)
pub fn settle(kv: KvType, dim: usize, values: &mut [f32]) {
    loop {
        let before = values.to_vec();
        round(kv, dim, values);
        if before == values {
            return;
        }
    }
}

/// How far a stored value may be off that was computed in another order: one step of the type. In 8 bits none of the cases' values is so close
/// to the middle between two codes that it would matter.
pub fn bound(kv: KvType) -> Bound {
    let within = |relative| Bound::Within { absolute: 3e-6, relative };
    match kv {
        KvType::F16 => within(1.0 / 1024.0),
        KvType::BF16 => within(1.0 / 128.0),
        KvType::F32 => within(4e-6),
        KvType::Q8_0 | KvType::Fp8 => Bound::Exact,
    }
}
