//! The sampler: every case in the simulator under three orders and as host-compiled text; and its generator.

use gemma4c_codegen::cases::sample;
use gemma4c_codegen::kernels::sample::{key_of, logit_of, philox_uniform, token_of};

#[test]
fn every_case_equals_its_oracle() {
    for case in sample::cases() {
        case.assert();
    }
}

/// Whoever forgets words of a mask is found out.
#[test]
fn a_mask_that_is_too_short_is_read_beyond() {
    let error = sample::by_mask_of(2).check().expect_err("the third word is missing").to_string();
    assert!(error.contains("masks"), "{error}");
}

/// The first block of Philox 4x32-10 with counter 0 and key 0, from the generator's published test vectors.
#[test]
fn philox_agrees_with_its_published_vector() {
    assert_eq!(philox_uniform(0, 0, 0), (0x6627_e8d5u32 >> 8) as f32 / 16_777_216.0);
}

#[test]
fn keys_order_logits_and_give_them_back() {
    let logits = [f32::NEG_INFINITY, -7.0, -1e-40, -0.0, 0.0, 1e-40, 3.5, f32::INFINITY];
    for pair in logits.windows(2) {
        assert!(key_of(pair[0], 0) < key_of(pair[1], u32::MAX - 1), "{pair:?}");
    }
    for logit in logits {
        assert_eq!((logit_of(key_of(logit, 9)).to_bits(), token_of(key_of(logit, 9))), (logit.to_bits(), 9));
        assert!(key_of(logit, 9) > key_of(logit, 10));
    }
    assert_eq!(key_of(f32::NAN, 3), 0);
}
